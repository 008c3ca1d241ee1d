//! All operations of the sandbox on the kernel: namespaces, links, address translation, cgroups, processes, mounts.
//!
//! Operations are stateless: each performs one action on the host and reports failures. The daemon decides what to do,
//! and when. Every name that is left on the host comes from [`crate::config::Layout`], so that
//! [`cleanup::remove_everything`] finds everything after any crash without a list.
//!
//! Needs root and a cgroup2 mount ([`preflight::check`]). Never touches the host's own network namespace.

use std::{
    io,
    path::{Path, PathBuf},
};

use nix::mount::MsFlags;

pub mod cgroup;
pub mod cleanup;
pub mod container;
pub mod iptables;
pub mod janitor;
mod netlink;
pub mod netns;
pub mod network;
pub mod preflight;
pub mod services;

/// The result of this module's functions.
pub type Result<T> = std::result::Result<T, HostError>;

/// An operation on the host that failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A network namespace could not be created.
    #[error("cannot create network namespace `{name}`: {source} (root is needed)")]
    CreateNetns {
        /// Name of the namespace.
        name: String,
        /// Error of the system.
        source: io::Error,
    },
    /// A network namespace could not be removed.
    #[error("cannot delete network namespace `{name}`: {source}")]
    DeleteNetns {
        /// Name of the namespace.
        name: String,
        /// Error of the system.
        source: io::Error,
    },
    /// A network namespace could not be entered.
    #[error("cannot enter network namespace {}: {source}", path.display())]
    EnterNetns {
        /// Path of its file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A thread inside a network namespace did not finish.
    #[error("the thread in network namespace {} ended early", path.display())]
    RunInNetns {
        /// Path of the namespace's file.
        path: PathBuf,
    },
    /// A setting under /proc/sys was refused.
    #[error("cannot set {} to {value}: {source}", path.display())]
    SetSysctl {
        /// Path of the setting's file.
        path: PathBuf,
        /// The value that was to be written.
        value: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// A netlink socket could not be opened.
    #[error("cannot open a netlink socket: {0}")]
    OpenNetlink(#[source] io::Error),
    /// The kernel refused a link, an address, a route or a neighbour.
    #[error("cannot {act}: {source}")]
    ConfigureNetwork {
        /// The requested operation.
        act: String,
        /// The kernel's answer.
        source: rtnetlink::Error,
    },
    /// A link does not exist.
    #[error("no network interface `{name}`: {source}")]
    FindLink {
        /// Name of the link.
        name: String,
        /// Error of the system.
        source: io::Error,
    },
    /// A tool could not be started.
    #[error("cannot run `{tool}`: {source} (is it installed?)")]
    RunTool {
        /// Name of the program.
        tool: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// A tool failed.
    #[error("`{tool}` failed to {act}: {stderr}")]
    ToolFailed {
        /// Name of the program.
        tool: &'static str,
        /// The operation that it should perform.
        act: &'static str,
        /// Its error output.
        stderr: String,
    },
    /// A port or a network that iptables would not accept.
    #[error("`{value}` is not {expected}")]
    ParseRule {
        /// The text that is no port or network.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The list of mounts is not readable.
    #[error("cannot read /proc/self/mountinfo: {0}")]
    ReadMounts(#[source] io::Error),
    /// There is no cgroup2 file system.
    #[error(
        "no cgroup2 file system is mounted: run `mount -t cgroup2 none /sys/fs/cgroup/unified`, or boot with systemd.unified_cgroup_hierarchy=1"
    )]
    NoCgroup2,
    /// A cgroup could not be created.
    #[error("cannot create cgroup {}: {source}", path.display())]
    CreateCgroup {
        /// Path of its directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A cgroup's list of processes is not readable.
    #[error("cannot list the processes of cgroup {}: {source}", path.display())]
    ReadCgroup {
        /// Path of its directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A cgroup's processes could not be ended.
    #[error("cannot kill the processes of cgroup {}: {source}", path.display())]
    KillCgroup {
        /// Path of its directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A cgroup could not be removed.
    #[error("cannot remove cgroup {}: {source} (processes in it: {processes:?})", path.display())]
    RemoveCgroup {
        /// Path of its directory.
        path: PathBuf,
        /// Pids of the processes that are still in it.
        processes: Vec<u32>,
        /// Error of the system.
        source: io::Error,
    },
    /// A process could not join a cgroup.
    #[error("cannot join cgroup {}: {source}", path.display())]
    JoinCgroup {
        /// Path of its directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A container's specification could not be written.
    #[error("cannot write container specification {}: {source}", path.display())]
    WriteSpec {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A container's specification could not be read.
    #[error("cannot read container specification {}: {source}", path.display())]
    ReadSpec {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// One of Weft's own programs could not be started.
    #[error("cannot start {}: {source}", path.display())]
    Start {
        /// Path of the program.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A mount namespace could not be created.
    #[error("cannot create a mount namespace: {0}")]
    UnshareMounts(#[source] io::Error),
    /// A mount was refused, or its source or target is missing.
    #[error("cannot mount {} on {}: {source}", what.display(), target.display())]
    Mount {
        /// A path of the host, or the type of a file system.
        what: PathBuf,
        /// The mount point.
        target: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A volume's mount point does not exist and cannot be created without changing the host.
    #[error("cannot mount a volume on {}: it does not exist on this host; use a path below /run or /var/run, or create it", target.display())]
    MissingMountTarget {
        /// The mount point.
        target: PathBuf,
    },
    /// A file system could not be unmounted.
    #[error("cannot unmount {}: {source}", target.display())]
    Unmount {
        /// The mount point.
        target: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The container's user was refused.
    #[error("cannot become user {uid} and group {gid}: {source}")]
    DropPrivileges {
        /// The user id.
        uid: u32,
        /// The group id.
        gid: u32,
        /// Error of the system.
        source: io::Error,
    },
    /// The container's working directory is not usable.
    #[error("cannot change to working directory {}: {source}", path.display())]
    ChangeDirectory {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The container has no command.
    #[error("the container has no command: set `command` in its manifest, images are not run here")]
    NoCommand,
    /// The container's program did not start.
    #[error("cannot run `{program}`: {source}")]
    Exec {
        /// Name of the program.
        program: String,
        /// Error of the system.
        source: io::Error,
    },
    /// A directory of the sandbox could not be created.
    #[error("cannot create {}: {source}", path.display())]
    CreateDirectory {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A file or directory of the sandbox could not be removed.
    #[error("cannot remove {}: {source}", path.display())]
    RemoveFiles {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The lock file is not usable.
    #[error("cannot lock {}: {source}", path.display())]
    Lock {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// Another daemon uses this name.
    #[error("sandbox `{name}` runs already (pid {pid}): stop it with `weft sandbox stop --sandbox {name}`")]
    AlreadyRuns {
        /// Name of the sandbox.
        name: String,
        /// Pid of its daemon, from the lock file.
        pid: String,
    },
    /// The process is not root.
    #[error("a sandbox creates network namespaces and cgroups: run it as root (`sudo weft sandbox ...`)")]
    NotRoot,
    /// The kernel has no type information.
    #[error(
        "the kernel has no BTF (/sys/kernel/btf/vmlinux): use a kernel with CONFIG_DEBUG_INFO_BTF=y, or `--interception iptables`"
    )]
    NoBtf,
    /// The kernel has no BPF file system.
    #[error("the kernel has no BPF file system: use a kernel with CONFIG_BPF_SYSCALL=y, or `--interception iptables`")]
    NoBpffs,
    /// A tool is not installed.
    #[error("`{tool}` is not on the PATH: install the package {package}")]
    MissingTool {
        /// Name of the program.
        tool: &'static str,
        /// The package that contains it.
        package: &'static str,
    },
    /// One of Weft's binaries does not exist.
    #[error("{} does not exist: {remedy}", path.display())]
    MissingBinary {
        /// The path at which it was expected.
        path: PathBuf,
        /// How to get it, as a sentence.
        remedy: &'static str,
    },
}

impl HostError {
    /// The exit code for this failure, as in shells: 127 when a program does not exist, else 126.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exec { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            _ => 126,
        }
    }
}

/// Mounts a BPF file system on this directory, which is created, unless one is mounted already.
///
/// # Errors
/// When the directory cannot be created, or the mount is refused.
pub fn mount_bpffs(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|source| HostError::CreateDirectory { path: dir.to_owned(), source })?;
    let refused =
        |errno: nix::Error| HostError::Mount { what: "bpf".into(), target: dir.to_owned(), source: errno.into() };
    let present = nix::sys::statfs::statfs(dir).map_err(refused)?;
    if present.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC {
        return Ok(());
    }
    nix::mount::mount(Some("bpf"), dir, Some("bpf"), MsFlags::empty(), Some("mode=0700")).map_err(refused)
}

/// Mount points with their types, in order of mounting, from /proc/self/mountinfo (proc(5)).
///
/// # Errors
/// When it cannot be read.
pub fn mounts() -> Result<Vec<(PathBuf, String)>> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").map_err(HostError::ReadMounts)?;
    Ok(text.lines().filter_map(parse_mount).collect())
}

fn parse_mount(line: &str) -> Option<(PathBuf, String)> {
    let (before, after) = line.split_once(" - ")?;
    let target = before.split(' ').nth(4)?;
    let kind = after.split(' ').next()?;
    // Spaces are written in octal. Weft's paths contain no tabs, newlines or backslashes.
    Some((PathBuf::from(target.replace("\\040", " ")), kind.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_lines_are_read_with_and_without_optional_fields() {
        for line in [
            "31 23 0:27 / /sys/fs/cgroup/a\\040b rw,nosuid shared:9 master:1 - cgroup2 cgroup2 rw",
            "31 23 0:27 / /sys/fs/cgroup/a\\040b rw,nosuid - cgroup2 none rw",
        ] {
            assert_eq!(parse_mount(line), Some(("/sys/fs/cgroup/a b".into(), "cgroup2".to_owned())), "{line}");
        }
        assert_eq!(parse_mount("31 23 0:27 /"), None);
    }

    #[test]
    fn exit_codes_are_the_shells() {
        let exec = |kind| HostError::Exec { program: "x".into(), source: io::Error::from(kind) };
        assert_eq!(exec(io::ErrorKind::NotFound).exit_code(), 127);
        assert_eq!(exec(io::ErrorKind::PermissionDenied).exit_code(), 126);
        assert_eq!(HostError::NoCommand.exit_code(), 126);
    }
}
