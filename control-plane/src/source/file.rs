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
use notify::RecursiveMode;
use tokio::sync::mpsc;

use plan::Plan;
use scan::Scanner;
use weft_index::Event;

use crate::file_changes::FileChanges;

/// Writers replace files one by one; a scan waits until the directory has been quiet for this long.
const QUIET: Duration = Duration::from_millis(20);

/// A directory that is being watched.
pub(crate) struct FileSource {
    dir: PathBuf,
    changes: FileChanges,
}

impl FileSource {
    /// Starts watching; no later change is missed.
    ///
    /// # Errors
    /// When the directory does not exist.
    pub(crate) fn new(dir: PathBuf) -> anyhow::Result<Self> {
        std::fs::read_dir(&dir)
            .with_context(|| format!("--dir {}: not a readable directory, create it or name another", dir.display()))?;
        let changes = FileChanges::new(vec![dir.clone()], RecursiveMode::Recursive, QUIET);
        Ok(Self { dir, changes })
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
            self.changes.wait().await;
        }
    }
}

#[cfg(test)]
mod tests;
