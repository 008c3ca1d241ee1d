//! Requirements that cannot be installed: privilege and kernel features. Each problem is one line with a remedy.

use std::{fs, path::Path};

use crate::command;

/// The oldest kernel on which the agent is not degraded.
const OLDEST_KERNEL: (u32, u32) = (5, 15);

/// Problems that prevent running Weft on this host; empty if there are none.
pub(crate) fn problems() -> Vec<String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    Facts {
        root: command::is_root(),
        release: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        filesystems: read("/proc/filesystems"),
        mounts: read("/proc/self/mountinfo"),
    }
    .problems()
}

/// The detected facts, separate so that their evaluation can be tested.
#[derive(Clone, Debug)]
struct Facts {
    root: bool,
    release: String,
    btf: bool,
    filesystems: String,
    mounts: String,
}

impl Facts {
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !self.root {
            problems.push(
                "not root: creating namespaces and loading eBPF programs needs it; run this as root (for tests \
                 without it: cargo xtask test unit)"
                    .to_owned(),
            );
        }
        if let Some(version) = parse_release(&self.release)
            && version < OLDEST_KERNEL
        {
            let (major, minor) = OLDEST_KERNEL;
            problems.push(format!("kernel {} is too old: use Linux {major}.{minor} or newer", self.release));
        }
        if !self.btf {
            problems.push(
                "no BTF at /sys/kernel/btf/vmlinux: use a kernel built with CONFIG_DEBUG_INFO_BTF (distribution \
                 kernels are)"
                    .to_owned(),
            );
        }
        if !self.has_filesystem("bpf") {
            problems.push("no bpf file system: use a kernel built with CONFIG_BPF_SYSCALL".to_owned());
        }
        if !self.has_cgroup2() {
            problems.push(
                "no cgroup2 hierarchy is mounted: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none \
                 /sys/fs/cgroup/unified"
                    .to_owned(),
            );
        }
        problems
    }

    fn has_filesystem(&self, name: &str) -> bool {
        self.filesystems.lines().any(|line| line.split_whitespace().last() == Some(name))
    }

    /// In mountinfo the type follows the separator ` - ` (proc_pid_mountinfo(5)).
    fn has_cgroup2(&self) -> bool {
        self.mounts.lines().filter_map(|line| line.split_once(" - ")).any(|(_, tail)| tail.starts_with("cgroup2 "))
    }
}

/// Major and minor of a release such as `6.12.3-cloud-amd64`.
fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        Facts {
            root: true,
            release: "6.12.3-cloud-amd64".to_owned(),
            btf: true,
            filesystems: "nodev\tsysfs\nnodev\tbpf\n\text4\n".to_owned(),
            mounts: "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n".to_owned(),
        }
    }

    #[test]
    fn a_good_host_has_no_problems() {
        assert_eq!(good().problems(), Vec::<String>::new());
    }

    #[test]
    fn each_lack_is_one_line_with_a_remedy() {
        let cases: [(&str, Facts, &str); 5] = [
            ("user", Facts { root: false, ..good() }, "not root"),
            ("old kernel", Facts { release: "5.10.0-28-amd64".to_owned(), ..good() }, "too old"),
            ("no BTF", Facts { btf: false, ..good() }, "/sys/kernel/btf/vmlinux"),
            ("no bpffs", Facts { filesystems: "\text4\n".to_owned(), ..good() }, "bpf file system"),
            (
                "cgroup v1 only",
                Facts { mounts: "1 2 0:3 / /sys rw - cgroup cgroup rw".to_owned(), ..good() },
                "cgroup2",
            ),
        ];
        for (name, facts, expected) in cases {
            let problems = facts.problems();
            assert_eq!(problems.len(), 1, "{name}: {problems:?}");
            assert!(problems[0].contains(expected) && !problems[0].contains('\n'), "{name}: {problems:?}");
        }
    }

    #[test]
    fn an_unreadable_release_is_not_held_against_the_host() {
        assert_eq!(parse_release("custom"), None);
        assert_eq!(parse_release("6.1"), Some((6, 1)));
    }
}
