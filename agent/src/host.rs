//! What the host has to offer before anything is loaded. Each refusal is one line that says what is missing and what to
//! do about it. Reads, never changes.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// What is missing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostError {
    #[error("missing {missing}: run as root, or grant the agent CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and CAP_SYS_ADMIN")]
    Capabilities { missing: String },
    #[error("the kernel offers no BTF at {BTF}: it needs CONFIG_DEBUG_INFO_BTF=y and /sys mounted")]
    NoBtf,
    #[error("no cgroup2 is mounted: mount one, for example `mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified`")]
    NoCgroup2,
    #[error("{path} is not a directory of a cgroup2 file system: pass one with --cgroup")]
    NotCgroup2 { path: String },
    #[error("{path} is not on a bpffs: mount one, for example `mount -t bpf bpffs {hint}`, or pass another --pin-dir")]
    NoBpffs { path: String, hint: String },
    #[error("cannot read {path}")]
    Read { path: &'static str, source: io::Error },
}

const BTF: &str = "/sys/kernel/btf/vmlinux";
const STATUS: &str = "/proc/self/status";
const MOUNTS: &str = "/proc/self/mountinfo";

// include/uapi/linux/capability.h
const CAPABILITIES: [(&str, u32); 4] =
    [("CAP_NET_ADMIN", 12), ("CAP_SYS_ADMIN", 21), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];

// include/uapi/linux/magic.h
const CGROUP2_MAGIC: i64 = 0x6367_7270;
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Where Kubernetes keeps its pods under the cgroup2 root, by kubelet's cgroup driver: cgroupfs, systemd, and kind.
const KUBEPODS: [&str; 3] = ["kubepods", "kubepods.slice", "kubelet.slice/kubelet-kubepods.slice"];

/// Whether this process may load programs, into a kernel that can check them.
pub(crate) fn check() -> Result<(), HostError> {
    let status = fs::read_to_string(STATUS).map_err(|source| HostError::Read { path: STATUS, source })?;
    let missing = missing_capabilities(&status);
    if !missing.is_empty() {
        return Err(HostError::Capabilities { missing: missing.join(", ") });
    }
    if !Path::new(BTF).exists() {
        return Err(HostError::NoBtf);
    }
    Ok(())
}

/// The cgroup to attach to: the given one, else Kubernetes' pods, else the root of the cgroup2 mount.
pub(crate) fn cgroup(given: Option<&Path>) -> Result<PathBuf, HostError> {
    let path = match given {
        Some(path) => path.to_path_buf(),
        None => {
            let mounts = fs::read_to_string(MOUNTS).map_err(|source| HostError::Read { path: MOUNTS, source })?;
            let root = cgroup2_mount(&mounts).ok_or(HostError::NoCgroup2)?;
            KUBEPODS.iter().map(|name| root.join(name)).find(|path| path.is_dir()).unwrap_or(root)
        }
    };
    if path.is_dir() && file_system(&path) == Some(CGROUP2_MAGIC) {
        Ok(path)
    } else {
        Err(HostError::NotCgroup2 { path: path.display().to_string() })
    }
}

/// Whether a directory that may not exist yet is on a bpffs.
pub(crate) fn check_bpffs(pin_dir: &Path) -> Result<(), HostError> {
    let existing = pin_dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if file_system(existing) == Some(BPF_FS_MAGIC) {
        return Ok(());
    }
    let hint =
        if pin_dir.starts_with("/sys/fs/bpf") { Path::new("/sys/fs/bpf") } else { pin_dir.parent().unwrap_or(pin_dir) };
    Err(HostError::NoBpffs { path: pin_dir.display().to_string(), hint: hint.display().to_string() })
}

fn file_system(path: &Path) -> Option<i64> {
    rustix::fs::statfs(path).ok().map(|statfs| statfs.f_type)
}

/// The names of those [`CAPABILITIES`] that are not effective.
fn missing_capabilities(status: &str) -> Vec<&'static str> {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
        .unwrap_or(0);
    CAPABILITIES.iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| *name).collect()
}

/// The first cgroup2 mount point (proc(5): the fields after the lone dash begin with the type).
fn cgroup2_mount(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        if file_system.split(' ').next()? != "cgroup2" {
            return None;
        }
        Some(PathBuf::from(mount.split(' ').nth(4)?.replace("\\040", " ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_cgroup2_beside_version_1() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(cgroup2_mount(mounts).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(cgroup2_mount("32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"), None);
    }

    #[test]
    fn names_the_missing_capabilities() {
        assert_eq!(missing_capabilities("Name:\tx\nCapEff:\t000001fffeffffff\n"), [""; 0]);
        assert_eq!(missing_capabilities("CapEff:\t0000000000001000\n"), ["CAP_SYS_ADMIN", "CAP_PERFMON", "CAP_BPF"]);
        assert_eq!(missing_capabilities("").len(), 4);
    }

    #[test]
    fn a_directory_on_disk_is_no_bpffs() {
        let directory = tempfile::tempdir().unwrap();
        let error = check_bpffs(&directory.path().join("weft/v1")).unwrap_err().to_string();
        assert!(error.contains("mount -t bpf"), "{error}");
    }

    #[test]
    fn a_directory_on_disk_is_no_cgroup() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(cgroup(Some(directory.path())), Err(HostError::NotCgroup2 { .. })));
    }
}
