//! Waits for changes of files.
//!
//! Directories are watched (`inotify(7)`), because the kubelet and careful writers replace files by renaming. A report
//! can be lost, a directory can be replaced, and the kernel can refuse to watch; so no wait is longer than [`AGAIN`],
//! and its caller reads the files again.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::{sync::mpsc, time::timeout};

/// The longest wait.
const AGAIN: Duration = Duration::from_secs(10);

/// Directories that are being watched.
pub(crate) struct FileChanges {
    directories: Vec<PathBuf>,
    mode: RecursiveMode,
    quiet: Duration,
    /// `None` if there was no inotify instance for this process.
    watcher: Option<RecommendedWatcher>,
    wake_rx: mpsc::Receiver<()>,
    /// Keeps the channel open without a watcher.
    _wake_tx: mpsc::Sender<()>,
}

impl FileChanges {
    /// Starts watching: a wait ends at once if there was a change since. Writers change files one by one, so a wait
    /// goes on until the directories have been `quiet` for this long, or busy for ten times as long.
    pub(crate) fn new(directories: Vec<PathBuf>, mode: RecursiveMode, quiet: Duration) -> Self {
        let (wake_tx, wake_rx) = mpsc::channel(1);
        let reports_tx = wake_tx.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // A read access is an event too, and must not cause another read. An error may hide a change, so it does.
            if event.map_or(true, |event| !event.kind.is_access()) {
                let _ = reports_tx.try_send(());
            }
        });
        let mut changes = Self { directories, mode, quiet, watcher: None, wake_rx, _wake_tx: wake_tx };
        let watched = watcher.and_then(|watcher| {
            changes.watcher = Some(watcher);
            changes.watch()
        });
        if let Err(error) = watched {
            tracing::warn!(
                %error,
                directories = ?changes.directories,
                "files cannot be watched (see fs.inotify.max_user_instances): changes are found up to ten seconds later"
            );
        }
        changes
    }

    /// Waits for a change.
    pub(crate) async fn wait(&mut self) {
        if timeout(AGAIN, self.wake_rx.recv()).await.is_err() {
            // A directory that appeared or was replaced is watched from now on; for the others nothing changes.
            let _ = self.watch();
            return;
        }
        let (quiet, busy) = (self.quiet, 10 * self.quiet);
        let settled = async { while timeout(quiet, self.wake_rx.recv()).await.is_ok() {} };
        let _ = timeout(busy, settled).await;
    }

    fn watch(&mut self) -> notify::Result<()> {
        let Some(watcher) = &mut self.watcher else { return Ok(()) };
        // One that cannot be watched keeps none of the others from it.
        self.directories.iter().map(|directory| watcher.watch(directory, self.mode)).fold(Ok(()), Result::and)
    }
}

/// The directory that a file is in.
pub(crate) fn directory(file: &Path) -> PathBuf {
    file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::time::{Instant, resume};

    use super::*;

    fn changes(directory: &Path) -> FileChanges {
        FileChanges::new(vec![directory.to_owned()], RecursiveMode::NonRecursive, Duration::from_millis(1))
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_inotify_instance_a_wait_ends_after_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let mut changes = FileChanges { watcher: None, ..changes(directory.path()) };
        for _ in 0..2 {
            let began = Instant::now();
            changes.wait().await;
            assert!(began.elapsed() >= AGAIN);
        }
    }

    #[tokio::test]
    async fn a_directory_that_is_not_there_keeps_no_other_from_being_watched() {
        let directory = tempfile::tempdir().unwrap();
        let directories = vec![directory.path().join("none"), directory.path().to_owned()];
        let mut changes = FileChanges::new(directories, RecursiveMode::NonRecursive, Duration::from_millis(1));
        fs::write(directory.path().join("file"), "text").unwrap();
        assert!(timeout(Duration::from_secs(20), changes.wake_rx.recv()).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_directory_that_appears_is_watched_after_the_next_wait() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("later");
        let mut changes = changes(&directory);
        fs::create_dir(&directory).unwrap();
        changes.wait().await;
        // The kernel's report comes in real time.
        resume();
        fs::write(directory.join("file"), "text").unwrap();
        assert!(timeout(Duration::from_secs(20), changes.wake_rx.recv()).await.is_ok());
    }
}
