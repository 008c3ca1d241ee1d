//! Requirements of the host, checked before anything is loaded. Each refusal is one line with what is missing and a
//! remedy. Reads, never changes.

use std::{fs, io, path::Path};

/// A missing requirement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostError {
    #[error("missing {missing}: run as root, or grant the agent CAP_NET_ADMIN, CAP_SYS_ADMIN and CAP_SYS_PTRACE")]
    Capabilities { missing: String },
    #[error("the agent's pod has its own PID namespace, in which pods' processes are not visible: set hostPID: true")]
    NoHostPid,
    #[error("no cgroup2 is mounted: mount one, for example `mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified`")]
    NoCgroup2,
    #[error(
        "no cgroup2 is mounted at {path} or below: the node needs one, for example by \
         `mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified`, and the agent's pod has to mount the node's /sys/fs/cgroup \
         at {path}"
    )]
    NoCgroup2Below { path: String },
    #[error("{path} is not a directory of a cgroup2 file system: pass one with --cgroup")]
    NotCgroup2 { path: String },
    #[error(
        "the cgroup2 tree at {path} is part of another and does not have the agent's own pod {uid}: mount the node's \
         /sys/fs/cgroup as a hostPath volume and pass its mount point with --cgroup-root"
    )]
    ForeignCgroup2 { path: String, uid: String },
    #[error("{path} is not on a bpffs: mount one, for example `mount -t bpf bpffs {hint}`, or pass another --pin-dir")]
    NoBpffs { path: String, hint: String },
    #[error("cannot read {path}")]
    Read { path: &'static str, source: io::Error },
}

/// The usual mount point of a bpffs.
pub(crate) const BPFFS: &str = "/sys/fs/bpf";

const BTF: &str = "/sys/kernel/btf/vmlinux";
const STATUS: &str = "/proc/self/status";

/// The required capabilities. CAP_SYS_ADMIN is for entering network namespaces, and the kernel accepts it instead of
/// CAP_BPF and CAP_PERFMON as well (bpf_capable and perfmon_capable in include/linux/capability.h), so those are not
/// required. Before Linux 6.6 maps of sockets require CAP_NET_ADMIN itself (sock_hash_alloc in net/core/sock_map.c).
/// CAP_SYS_PTRACE is for inspecting pods' processes: without it a proxy that listens already would silently not be
/// found.
///
/// Numbers: include/uapi/linux/capability.h.
const CAPABILITIES: [(&str, u32); 3] = [("CAP_NET_ADMIN", 12), ("CAP_SYS_PTRACE", 19), ("CAP_SYS_ADMIN", 21)];

// include/uapi/linux/magic.h
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Checks whether this process may load programs. The kernel's features are checked in [`crate::features`].
pub(crate) fn check() -> Result<(), HostError> {
    let status = fs::read_to_string(STATUS).map_err(|source| HostError::Read { path: STATUS, source })?;
    let missing = missing_capabilities(&status);
    if !missing.is_empty() {
        return Err(HostError::Capabilities { missing: missing.join(", ") });
    }
    Ok(())
}

/// Checks whether this process can find the network namespaces of a Kubernetes node's pods.
pub(crate) fn check_processes() -> Result<(), HostError> {
    // The container's parent is the runtime, which is not in the pod's PID namespace.
    if rustix::process::getppid().is_none() { Err(HostError::NoHostPid) } else { Ok(()) }
}

/// Whether the kernel has BTF.
pub(crate) fn has_btf() -> bool {
    Path::new(BTF).exists()
}

/// Checks whether a directory that may not exist yet is on a bpffs.
pub(crate) fn check_bpffs(pin_dir: &Path) -> Result<(), HostError> {
    let existing = pin_dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if is_bpffs(existing) {
        return Ok(());
    }
    let hint = if pin_dir.starts_with(BPFFS) { Path::new(BPFFS) } else { pin_dir.parent().unwrap_or(pin_dir) };
    Err(HostError::NoBpffs { path: pin_dir.display().to_string(), hint: hint.display().to_string() })
}

/// Whether a directory is on a bpffs.
pub(crate) fn is_bpffs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|statfs| statfs.f_type == BPF_FS_MAGIC)
}

/// The kernel's release, as printed by `uname -r`.
pub(crate) fn kernel() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// The names of those [`CAPABILITIES`] that are not effective.
fn missing_capabilities(status: &str) -> Vec<&'static str> {
    CAPABILITIES.iter().filter(|(_, bit)| effective(status) >> bit & 1 == 0).map(|(name, _)| *name).collect()
}

fn effective(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_missing_capabilities() {
        assert_eq!(missing_capabilities("Name:\tx\nCapEff:\t000001fffeffffff\n"), [""; 0]);
        assert_eq!(missing_capabilities("CapEff:\t0000000000001000\n"), ["CAP_SYS_PTRACE", "CAP_SYS_ADMIN"]);
        assert_eq!(missing_capabilities("").len(), 3);
    }

    #[test]
    fn a_directory_on_disk_is_no_bpffs() {
        let directory = tempfile::tempdir().unwrap();
        let error = check_bpffs(&directory.path().join("weft/v1")).unwrap_err().to_string();
        assert!(error.contains("mount -t bpf"), "{error}");
    }
}
