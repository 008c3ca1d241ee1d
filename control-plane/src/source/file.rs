//! The file source: a directory of manifests instead of a Kubernetes API.
//!
//! ```text
//! directory --scan--> manifests per file --plan--> events
//! ```
//!
//! Every change in the directory leads to one scan, and only changed files are read again. An object that is no longer
//! in any file is deleted. An unreadable file keeps its last good state, is reported once as ERROR, and does not hide
//! the others.

mod plan;
mod scan;

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use notify::{RecursiveMode, Watcher};
use tokio::sync::mpsc;

use plan::Plan;
use scan::Scanner;
use weft_index::Event;

/// Writers replace files one by one; a scan waits until the directory has been quiet for this long.
const QUIET: Duration = Duration::from_millis(20);
/// The longest wait for that, however busy the directory is.
const BUSY: Duration = Duration::from_millis(200);
/// Interval of scans without a notification, in case the kernel dropped one (`inotify(7)`: queues overflow).
const RESCAN: Duration = Duration::from_secs(10);

/// A directory that is being watched.
pub(crate) struct FileSource {
    dir: PathBuf,
    wake_rx: mpsc::Receiver<()>,
    _watcher: notify::RecommendedWatcher,
}

impl FileSource {
    /// Starts watching; no later change is missed.
    ///
    /// # Errors
    /// When the directory does not exist or cannot be watched.
    pub(crate) fn new(dir: PathBuf) -> anyhow::Result<Self> {
        std::fs::read_dir(&dir)
            .with_context(|| format!("--dir {}: not a readable directory, create it or name another", dir.display()))?;
        let (wake_tx, wake_rx) = mpsc::channel(1);
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // A read access is an event too, and must not cause another scan. An error may hide changes, so it does.
            if event.map_or(true, |event| !event.kind.is_access()) {
                let _ = wake_tx.try_send(());
            }
        })
        .context("watch manifests: inotify is not available, raise fs.inotify.max_user_instances")?;
        watcher.watch(&dir, RecursiveMode::Recursive).with_context(|| {
            format!("--dir {}: cannot be watched, raise fs.inotify.max_user_watches", dir.display())
        })?;
        Ok(Self { dir, wake_rx, _watcher: watcher })
    }

    /// Sends a batch of events for the initial state, ending in [`Event::Synced`], and one for every later change.
    /// Runs until the receiver is dropped.
    ///
    /// # Errors
    /// When reading panicked.
    pub(crate) async fn run(mut self, events: mpsc::Sender<Vec<Event>>) -> anyhow::Result<()> {
        let (mut scanner, mut plan) = (Scanner::default(), Plan::default());
        let mut synced = false;
        loop {
            let dir = self.dir.clone();
            let scanned = tokio::task::spawn_blocking(move || (scanner.scan(&dir), scanner)).await?;
            scanner = scanned.1;
            match scanned.0 {
                Ok(files) => {
                    let mut batch = plan.advance(&files);
                    if !synced {
                        batch.push(Event::Synced);
                        synced = true;
                    }
                    if !batch.is_empty() && events.send(batch).await.is_err() {
                        return Ok(());
                    }
                }
                Err(error) => {
                    tracing::error!(dir = %self.dir.display(), %error, "manifests cannot be listed, the last state stays in force");
                }
            }
            self.changed().await;
        }
    }

    /// Waits for a change and then until the directory is quiet.
    async fn changed(&mut self) {
        if tokio::time::timeout(RESCAN, self.wake_rx.recv()).await.is_err() {
            return;
        }
        let quiet = async { while let Ok(Some(())) = tokio::time::timeout(QUIET, self.wake_rx.recv()).await {} };
        let _ = tokio::time::timeout(BUSY, quiet).await;
    }
}

#[cfg(test)]
mod tests;
