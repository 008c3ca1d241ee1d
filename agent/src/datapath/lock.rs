//! One agent at a time for a pin directory. The kernel releases the lock when its holder exits, however that happens.

use std::{fs::File, io, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(500);
/// Attempts between two log lines.
const REMINDER: u32 = 20;

/// Held while this lives.
#[derive(Debug)]
pub(crate) struct Lock {
    directory: File,
}

/// Why the lock was not acquired.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    #[error("cannot open {path}")]
    Open { path: String, source: io::Error },
    #[error("another agent holds {path}: stop it, or pass another --pin-dir")]
    Held { path: String },
    #[error("cannot lock {path}")]
    Lock { path: String, source: io::Error },
}

impl Lock {
    /// Takes the lock, or fails if it is held.
    ///
    /// # Errors
    /// See [`LockError`].
    pub(crate) fn take(directory: &Path) -> Result<Self, LockError> {
        let path = || directory.display().to_string();
        let open = std::fs::create_dir_all(directory).and_then(|()| File::open(directory));
        let open = open.map_err(|source| LockError::Open { path: path(), source })?;
        match flock(&open, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { directory: open }),
            Err(Errno::AGAIN) => Err(LockError::Held { path: path() }),
            Err(error) => Err(LockError::Lock { path: path(), source: error.into() }),
        }
    }

    /// Whether this is the lock of the directory that has this path now.
    pub(crate) fn is_of(&self, directory: &Path) -> bool {
        let same = |ours: std::fs::Metadata, theirs: std::fs::Metadata| {
            (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino())
        };
        match (self.directory.metadata(), std::fs::metadata(directory)) {
            (Ok(ours), Ok(theirs)) => same(ours, theirs),
            _ => false,
        }
    }

    /// Waits until the lock is free and takes it: two agents meet in a rollout.
    ///
    /// # Errors
    /// See [`LockError`], but never `Held`.
    pub(crate) async fn wait(directory: &Path) -> Result<Self, LockError> {
        let mut attempts = 0;
        loop {
            match Self::take(directory) {
                Err(LockError::Held { .. }) => {
                    if attempts % REMINDER == 0 {
                        tracing::warn!(pin_dir = %directory.display(), "waiting for another agent to end");
                    }
                    attempts += 1;
                    tokio::time::sleep(RETRY).await;
                }
                result => return result,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v1");
        let first = Lock::take(&path).unwrap();
        assert!(first.is_of(&path) && !first.is_of(directory.path()));
        assert!(matches!(Lock::take(&path), Err(LockError::Held { .. })));
        let second = tokio::spawn({
            let path = path.clone();
            async move { Lock::wait(&path).await }
        });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        drop(first);
        let second = second.await.unwrap().unwrap();
        // A recreated directory is another one.
        std::fs::remove_dir(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(!second.is_of(&path));
    }
}
