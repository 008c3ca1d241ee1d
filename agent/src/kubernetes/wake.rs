//! Notifies of new entries in pods' cgroups, so that a pending pod need not be polled. Refuses to know what they are:
//! the caller looks.

use std::{
    collections::HashMap,
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::io::unix::AsyncFd;

use crate::{cgroup, datapath::bpf};

/// Watches directories of the cgroup tree for new entries (inotify(7)).
#[derive(Debug)]
pub(super) struct Wake {
    /// None if there was no instance for this process.
    inotify: Option<AsyncFd<OwnedFd>>,
    /// Uids of watched pods.
    pods: HashMap<i32, String>,
    /// The watched directories in which pods' cgroups appear.
    parents: HashMap<i32, PathBuf>,
    /// Those that do not exist, or cannot be watched.
    unwatched: Vec<PathBuf>,
}

impl Wake {
    /// Takes the directories in which pods' cgroups appear; watches none yet. Without inotify, of which a user has 128
    /// instances by default, pods are only found later.
    pub(super) fn new(parents: Vec<PathBuf>) -> Self {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
        Self::with(inotify.map_err(io::Error::from).and_then(bpf::readable), parents)
    }

    fn with(inotify: io::Result<AsyncFd<OwnedFd>>, parents: Vec<PathBuf>) -> Self {
        if let Err(error) = &inotify {
            tracing::warn!(
                %error,
                "cannot use inotify (see fs.inotify.max_user_instances): new pods are enrolled up to a second later"
            );
        }
        Self { inotify: inotify.ok(), pods: HashMap::new(), parents: HashMap::new(), unwatched: parents }
    }

    /// Watches the directories in which pods' cgroups appear, as far as they are not watched. If one does not exist
    /// yet, or cannot be watched, its pods are only found later.
    pub(super) fn watch_parents(&mut self) {
        for directory in std::mem::take(&mut self.unwatched) {
            match self.watch(&directory, WatchFlags::empty()) {
                Some(number) => drop(self.parents.insert(number, directory)),
                None => self.unwatched.push(directory),
            }
        }
    }

    fn watch(&self, directory: &Path, more: WatchFlags) -> Option<i32> {
        let flags = WatchFlags::CREATE | WatchFlags::ONLYDIR | more;
        inotify::add_watch(self.inotify.as_ref()?.get_ref(), directory, flags).ok()
    }

    /// Watches a pod's own cgroup until the next entry. Called before each attempt.
    pub(super) fn watch_pod(&mut self, directory: &Path, uid: &str) {
        // Once: cgroupfs does not report that a directory was removed, so the watch would never end.
        if let Some(number) = self.watch(directory, WatchFlags::ONESHOT) {
            self.pods.insert(number, uid.to_owned());
        }
    }

    /// Waits for something new: one pod's cgroup or a cgroup in it, or `None` if it may be any pod's. Cancel safe.
    pub(super) async fn woken(&mut self) -> io::Result<Vec<Option<String>>> {
        let Some(inotify) = &self.inotify else { return std::future::pending().await };
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        loop {
            let mut guard = inotify.readable().await?;
            let mut woken = Vec::new();
            let mut reader = inotify::Reader::new(inotify.get_ref(), &mut buffer);
            loop {
                let event = match reader.next() {
                    Ok(event) => event,
                    Err(Errno::AGAIN) => break,
                    Err(error) => return Err(error.into()),
                };
                if event.events().contains(ReadFlags::IGNORED) {
                    self.pods.remove(&event.wd());
                    self.unwatched.extend(self.parents.remove(&event.wd()));
                } else {
                    // If the queue was full, there is no name.
                    let named = || event.file_name()?.to_str().ok().and_then(cgroup::pod_uid);
                    let pod = self.pods.get(&event.wd()).cloned().or_else(named);
                    if !woken.contains(&pod) {
                        woken.push(pod);
                    }
                }
            }
            guard.clear_ready();
            // A directory may have been removed and created again: cgroupfs reports only the second. Adding a watch
            // that exists changes nothing.
            if woken.contains(&None) {
                self.unwatched.extend(self.parents.drain().map(|(_, directory)| directory));
            }
            if !woken.is_empty() {
                return Ok(woken);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_new_cgroup_wakes_its_pod() {
        let directory = tempfile::tempdir().unwrap();
        let pod = directory.path().join("poduid-1");
        let uid = || Some("uid-1".to_owned());
        let mut wake = Wake::new(vec![directory.path().to_path_buf()]);
        wake.watch_parents();
        fs::create_dir(&pod).unwrap();
        assert_eq!(wake.woken().await.unwrap(), [uid()]);
        wake.watch_pod(&pod, "uid-1");
        wake.watch_pod(&pod, "uid-1");
        fs::create_dir(pod.join("container")).unwrap();
        assert_eq!(wake.woken().await.unwrap(), [uid()]);
        assert!(wake.pods.is_empty(), "watched again before the next attempt");
        wake.watch_pod(&pod, "uid-1");
        fs::remove_dir_all(&pod).unwrap();
        fs::create_dir(&pod).unwrap();
        assert_eq!(wake.woken().await.unwrap(), [uid()]);
        assert!(wake.pods.is_empty());
    }

    #[tokio::test]
    async fn a_directory_of_pods_that_appears_wakes_all_and_is_watched() {
        let directory = tempfile::tempdir().unwrap();
        let burstable = directory.path().join("burstable");
        let mut wake = Wake::new(vec![directory.path().to_path_buf(), burstable.clone()]);
        for uid in ["uid-1", "uid-2"] {
            wake.watch_parents();
            assert_eq!(wake.unwatched, std::slice::from_ref(&burstable));
            fs::create_dir(&burstable).unwrap();
            assert_eq!(wake.woken().await.unwrap(), [None]);
            wake.watch_parents();
            assert!(wake.unwatched.is_empty());
            fs::create_dir(burstable.join(format!("pod{uid}"))).unwrap();
            assert_eq!(wake.woken().await.unwrap(), [Some(uid.to_owned())]);
            // Its watch ends with it, which is read with what follows.
            fs::remove_dir_all(&burstable).unwrap();
            fs::create_dir(directory.path().join(format!("other-{uid}"))).unwrap();
            assert_eq!(wake.woken().await.unwrap(), [None]);
        }
    }

    #[tokio::test]
    async fn a_directory_of_pods_whose_end_is_not_reported_is_watched_again() {
        let directory = tempfile::tempdir().unwrap();
        let burstable = directory.path().join("burstable");
        fs::create_dir(&burstable).unwrap();
        let mut wake = Wake::new(vec![directory.path().to_path_buf(), burstable.clone()]);
        wake.watch_parents();
        // The watch stays with what was renamed, as with a directory that is removed from cgroupfs.
        fs::rename(&burstable, directory.path().join("removed")).unwrap();
        fs::create_dir(&burstable).unwrap();
        assert_eq!(wake.woken().await.unwrap(), [None]);
        wake.watch_parents();
        fs::create_dir(burstable.join("poduid-1")).unwrap();
        let woken = tokio::time::timeout(Duration::from_secs(20), wake.woken()).await;
        assert_eq!(woken.unwrap().unwrap(), [Some("uid-1".to_owned())]);
    }

    #[tokio::test]
    async fn without_an_instance_nothing_wakes_and_nothing_fails() {
        let directory = tempfile::tempdir().unwrap();
        let mut wake = Wake::with(Err(Errno::MFILE.into()), vec![directory.path().to_path_buf()]);
        wake.watch_parents();
        wake.watch_pod(directory.path(), "uid-1");
        fs::create_dir(directory.path().join("container")).unwrap();
        assert!(wake.woken().now_or_never().is_none());
    }
}
