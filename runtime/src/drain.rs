//! Shutting down without losing work: no part takes more, and work in progress is finished.

use std::{future::Future, time::Duration};

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The side that starts the drain.
#[derive(Debug)]
pub struct Drain {
    watch: Watch,
}

/// The side that waits for the drain. Clones are notified together.
#[derive(Clone, Debug)]
pub struct Watch {
    token: CancellationToken,
    tracker: TaskTracker,
}

impl Drain {
    /// Creates both sides.
    #[must_use]
    pub fn new() -> (Self, Watch) {
        let watch = Watch { token: CancellationToken::new(), tracker: TaskTracker::new() };
        (Self { watch: watch.clone() }, watch)
    }

    /// Notifies every watch and waits until all tracked work is done. Returns whether it was, within the deadline.
    pub async fn drain(self, deadline: Duration) -> bool {
        self.watch.token.cancel();
        self.watch.tracker.close();
        tokio::time::timeout(deadline, self.watch.tracker.wait()).await.is_ok()
    }
}

impl Watch {
    /// Waits until the drain begins. Cancel safe.
    pub async fn signaled(&self) {
        self.token.cancelled().await;
    }

    /// Whether the drain has begun.
    #[must_use]
    pub fn is_signaled(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Starts this work as a task, and makes the drain wait for it.
    pub fn spawn<F>(&self, work: F)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tracker.spawn(work);
    }

    /// Makes the drain wait for this work.
    pub fn track<F: Future>(&self, work: F) -> impl Future<Output = F::Output> + use<F> {
        self.tracker.track_future(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_for_tracked_work_and_no_longer_than_the_deadline() {
        let (drain, watch) = Drain::new();
        let signaled = watch.clone();
        watch.spawn(async move { signaled.signaled().await });
        assert!(drain.drain(Duration::from_secs(1)).await);

        let (drain, watch) = Drain::new();
        watch.spawn(std::future::pending::<()>());
        assert!(!drain.drain(Duration::from_secs(1)).await);
    }
}
