//! Mounts a bpffs on a node without one. Most nodes have one: systemd mounts it at boot.
//!
//! A mount in the agent's container would end with the container, and the pins with the mount. So a thread enters the
//! mount namespace of the container's parent process, the runtime's, in which hostPath volumes are resolved; mounts
//! there; and returns a clone of the mount to the container. Needs hostPID, CAP_SYS_ADMIN, CAP_SYS_CHROOT and
//! CAP_SYS_PTRACE, but not `privileged`. Linux 5.2 (open_tree).

use std::{fs::File, io, os::fd::OwnedFd, path::Path, thread};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
};
use rustix::{
    fs::CWD,
    mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree},
};

use crate::host::is_bpffs;

/// Why it could not be mounted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    #[error("cannot open the node's mount namespace {path}: needs hostPID and CAP_SYS_PTRACE")]
    Open { path: String, source: io::Error },
    #[error("cannot enter the node's mount namespace: needs CAP_SYS_ADMIN and CAP_SYS_CHROOT")]
    Enter { source: io::Error },
    #[error("cannot mount a bpffs at the node's {path}: run `mount -t bpf bpffs {path}` on the node")]
    Mount { path: String, source: io::Error },
    #[error("cannot bring the node's {path} into the agent's container")]
    Bring { path: String, source: io::Error },
}

/// Mounts a bpffs at `path` on the node, unless there is one, and at the same path in the container.
///
/// # Errors
/// See [`MountError`]. Nothing is left half done.
pub(crate) fn mount_on_node(path: &Path) -> Result<(), MountError> {
    let text = path.display().to_string();
    let node = format!("/proc/{}/ns/mnt", nix::unistd::getppid());
    let namespace = File::open(&node).map_err(|source| MountError::Open { path: node, source })?;
    // setns changes the calling thread permanently, so the mount gets its own thread.
    let mounted = thread::scope(|scope| {
        let enter = || -> Result<OwnedFd, MountError> {
            // A thread that shares its root directory with others may not change its mount namespace.
            unshare(CloneFlags::CLONE_FS)
                .and_then(|()| setns(&namespace, CloneFlags::CLONE_NEWNS))
                .map_err(|errno| MountError::Enter { source: errno.into() })?;
            if !is_bpffs(path) {
                mount(Some("bpffs"), path, Some("bpf"), MsFlags::empty(), Some("mode=0700"))
                    .map_err(|errno| MountError::Mount { path: text.clone(), source: errno.into() })?;
            }
            open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)
                .map_err(|errno| MountError::Bring { path: text.clone(), source: errno.into() })
        };
        scope.spawn(enter).join()
    });
    let mounted = match mounted {
        Ok(mounted) => mounted?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    move_mount(&mounted, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|errno| MountError::Bring { path: text, source: errno.into() })
}
