//! Everything of the sandbox that touches the kernel: namespaces, links, address translation, cgroups, processes, mounts.
//!
//! Stateless operations: each does one thing to the host and reports failures. What is wanted, and when, is the
//! daemon's business. Every name that is left on the host comes from [`crate::config::Layout`], so that
//! [`cleanup::remove_everything`] finds all of it after any crash without a list.
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

/// An act on the host that failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A network namespace could not be made.
    #[error("cannot create network namespace `{name}`: {source} (root is needed)")]
    CreateNetns {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// A network namespace could not be removed.
    #[error("cannot delete network namespace `{name}`: {source}")]
    DeleteNetns {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// A network namespace could not be entered.
    #[error("cannot enter network namespace {}: {source}", path.display())]
    EnterNetns {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A thread inside a network namespace did not finish.
    #[error("the thread in network namespace {} ended early", path.display())]
    RunInNetns {
        /// The namespace's file.
        path: PathBuf,
    },
    /// A setting under /proc/sys was refused.
    #[error("cannot set {} to {value}: {source}", path.display())]
    SetSysctl {
        /// The setting's file.
        path: PathBuf,
        /// What it was to be.
        value: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No netlink socket.
    #[error("cannot open a netlink socket: {0}")]
    OpenNetlink(#[source] io::Error),
    /// The kernel refused a link, an address, a route or a neighbour.
    #[error("cannot {act}: {source}")]
    ConfigureNetwork {
        /// What was asked for.
        act: String,
        /// The kernel's answer.
        source: rtnetlink::Error,
    },
    /// A link is not there.
    #[error("no network interface `{name}`: {source}")]
    FindLink {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// A tool could not be started.
    #[error("cannot run `{tool}`: {source} (is it installed?)")]
    RunTool {
        /// The program.
        tool: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A tool said no.
    #[error("`{tool}` failed to {act}: {stderr}")]
    ToolFailed {
        /// The program.
        tool: &'static str,
        /// What it was to do.
        act: &'static str,
        /// What it said.
        stderr: String,
    },
    /// Ports or networks that iptables cannot be given.
    #[error("`{value}` is not {expected}")]
    ParseRule {
        /// What was given.
        value: String,
        /// What it should have been.
        expected: &'static str,
    },
    /// The list of mounts is not readable.
    #[error("cannot read /proc/self/mountinfo: {0}")]
    ReadMounts(#[source] io::Error),
    /// No cgroup2 file system.
    #[error(
        "no cgroup2 file system is mounted: run `mount -t cgroup2 none /sys/fs/cgroup/unified`, or boot with systemd.unified_cgroup_hierarchy=1"
    )]
    NoCgroup2,
    /// A cgroup could not be made.
    #[error("cannot create cgroup {}: {source}", path.display())]
    CreateCgroup {
        /// Its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A cgroup's list of processes is not readable.
    #[error("cannot list the processes of cgroup {}: {source}", path.display())]
    ReadCgroup {
        /// Its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A cgroup's processes could not be ended.
    #[error("cannot kill the processes of cgroup {}: {source}", path.display())]
    KillCgroup {
        /// Its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A cgroup could not be removed.
    #[error("cannot remove cgroup {}: {source} (processes in it: {processes:?})", path.display())]
    RemoveCgroup {
        /// Its directory.
        path: PathBuf,
        /// The processes still in it.
        processes: Vec<u32>,
        /// Why.
        source: io::Error,
    },
    /// A process could not join a cgroup.
    #[error("cannot join cgroup {}: {source}", path.display())]
    JoinCgroup {
        /// Its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A container's specification could not be written.
    #[error("cannot write container specification {}: {source}", path.display())]
    WriteSpec {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A container's specification could not be read.
    #[error("cannot read container specification {}: {source}", path.display())]
    ReadSpec {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A process of Weft's own could not be started.
    #[error("cannot start {}: {source}", path.display())]
    Start {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No mount namespace.
    #[error("cannot create a mount namespace: {0}")]
    UnshareMounts(#[source] io::Error),
    /// A mount was refused, or one side of it is missing.
    #[error("cannot mount {} on {}: {source}", what.display(), target.display())]
    Mount {
        /// What was to be seen.
        what: PathBuf,
        /// Where.
        target: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A volume's place is not there and cannot be made without changing the host.
    #[error("cannot mount a volume on {}: it does not exist on this host; use a path below /run or /var/run, or create it", target.display())]
    MissingMountTarget {
        /// Where it was to be.
        target: PathBuf,
    },
    /// A mount could not be taken away.
    #[error("cannot unmount {}: {source}", target.display())]
    Unmount {
        /// Where it is.
        target: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The container's user was refused.
    #[error("cannot become user {uid} and group {gid}: {source}")]
    DropPrivileges {
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
        /// Why.
        source: io::Error,
    },
    /// The container's working directory is not usable.
    #[error("cannot change to working directory {}: {source}", path.display())]
    ChangeDirectory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A container without a command.
    #[error("the container has no command: set `command` in its manifest, images are not run here")]
    NoCommand,
    /// The container's program did not start.
    #[error("cannot run `{program}`: {source}")]
    Exec {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A directory of the sandbox could not be made.
    #[error("cannot create {}: {source}", path.display())]
    CreateDirectory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file or directory of the sandbox could not be removed.
    #[error("cannot remove {}: {source}", path.display())]
    RemoveFiles {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The lock file is not usable.
    #[error("cannot lock {}: {source}", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another daemon has this name.
    #[error("sandbox `{name}` runs already (pid {pid}): stop it with `weft sandbox stop --name {name}`")]
    AlreadyRuns {
        /// The sandbox.
        name: String,
        /// Its daemon, as the lock file says.
        pid: String,
    },
    /// Not root.
    #[error("a sandbox makes network namespaces and cgroups: run it as root (`sudo weft sandbox ...`)")]
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
    #[error("`{tool}` is not on the PATH: install {package} (`cargo xtask setup` does)")]
    MissingTool {
        /// The program.
        tool: &'static str,
        /// What it comes in.
        package: &'static str,
    },
    /// A binary of Weft's is not built.
    #[error("{} does not exist: {cure}", path.display())]
    MissingBinary {
        /// Where it was looked for.
        path: PathBuf,
        /// What to do.
        cure: &'static str,
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

/// Makes sure that there is a BPF file system on this directory, which is created.
///
/// # Errors
/// When the directory cannot be made, or the mount is refused.
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

/// Where something is mounted, as /proc/self/mountinfo (proc(5)) says: mount point and type, in order of mounting.
fn mounts() -> Result<Vec<(PathBuf, String)>> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").map_err(HostError::ReadMounts)?;
    Ok(text.lines().filter_map(parse_mount).collect())
}

fn parse_mount(line: &str) -> Option<(PathBuf, String)> {
    let (before, after) = line.split_once(" - ")?;
    let target = before.split(' ').nth(4)?;
    let kind = after.split(' ').next()?;
    // Blanks are written in octal; nothing of Weft's has tabs, line ends or backslashes in its path.
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
