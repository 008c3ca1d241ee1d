//! Ownership of a sandbox's name, and removal of all resources with that name.
//!
//! Removal needs no record of what was created: the names and paths of [`Layout`] suffice after any crash.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process,
};

use nix::{
    fcntl::{Flock, FlockArg},
    mount::{MntFlags, umount2},
};

use super::{HostError, Result, cgroup, mounts, netns};
use crate::config::{Layout, RUN_DIR};

/// The right to be the daemon of a sandbox. Ends with the process at the latest.
#[derive(Debug)]
pub struct Lock {
    // Never read: the kernel releases the lock when the file is closed.
    _file: Flock<File>,
    path: PathBuf,
}

/// Takes the lock of a sandbox's name.
///
/// # Errors
/// [`HostError::AlreadyRuns`] when a daemon has it.
pub fn lock(name: &str) -> Result<Lock> {
    let path = Layout::of(name).lock_file();
    let failed = |source| HostError::Lock { path: path.clone(), source };
    fs::create_dir_all(RUN_DIR).map_err(failed)?;
    loop {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
        let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((mut file, nix::Error::EWOULDBLOCK)) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid).map_err(failed)?;
                return Err(HostError::AlreadyRuns { name: name.to_owned(), pid: pid.trim().to_owned() });
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        // The owner removes the file at the end, and a lock on an unlinked file excludes no other process.
        let locked = file.metadata().map_err(failed)?;
        match fs::metadata(&path) {
            Ok(named) if named.ino() == locked.ino() => {}
            _ => continue,
        }
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        file.write_all(process::id().to_string().as_bytes()).map_err(failed)?;
        return Ok(Lock { _file: file, path });
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A remaining file is harmless.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes everything that a sandbox left: processes, namespaces, mounts, cgroups, files. Every step is tried even if
/// another fails; may be called repeatedly, and after any crash. Blocks until killed processes are gone, for up to 5
/// s.
///
/// # Errors
/// The first step that failed.
pub fn remove_everything(layout: &Layout) -> Result<()> {
    let cgroup = cgroup::mount_point().map(|mount| mount.join(layout.cgroup()));
    let killed = match &cgroup {
        Ok(dir) => cgroup::kill(dir),
        // Without cgroup2 there were no containers.
        Err(_) => Ok(()),
    };
    // The cgroup is removed after the mount, which pins the links attached to it.
    let netns = remove_namespaces(&layout.netns_prefix());
    let unmounted = unmount_below(&layout.run_dir());
    let emptied = match &cgroup {
        Ok(dir) => cgroup::remove(dir),
        Err(_) => Ok(()),
    };
    let files = if unmounted.is_ok() { remove_dir(&layout.run_dir()) } else { Ok(()) };
    killed.and(netns).and(unmounted).and(emptied).and(files)
}

fn remove_namespaces(prefix: &str) -> Result<()> {
    let entries = match fs::read_dir(netns::NETNS_DIR) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(HostError::DeleteNetns { name: prefix.to_owned(), source }),
    };
    let mut outcome = Ok(());
    for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        if name.starts_with(prefix) {
            outcome = outcome.and(netns::delete(&name));
        }
    }
    outcome
}

fn unmount_below(dir: &Path) -> Result<()> {
    // Unmount in reverse order, and lazily, because a killed process may still hold a file.
    for (target, _) in mounts()?.into_iter().rev().filter(|(target, _)| target.starts_with(dir)) {
        match umount2(&target, MntFlags::MNT_DETACH) {
            Ok(()) | Err(nix::Error::ENOENT | nix::Error::EINVAL) => {}
            Err(errno) => return Err(HostError::Unmount { target, source: errno.into() }),
        }
    }
    Ok(())
}

fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(HostError::RemoveFiles { path: dir.to_owned(), source })
        }
        _ => Ok(()),
    }
}
