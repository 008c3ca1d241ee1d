//! Shutting down without losing work: no part takes more, and work in progress is finished.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Poll, Waker},
    time::Duration,
};

use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

/// The side that starts the drain.
#[derive(Debug)]
pub struct Drain {
    watch: Watch,
}

/// The side that waits for the drain. Clones are notified together.
#[derive(Clone, Debug)]
pub struct Watch {
    signal: Arc<Signal>,
    tracker: TaskTracker,
}

/// The beginning of the drain. Every connection polls it whenever it is polled itself, on all workers, so that a poll
/// is one load of a flag: tokio-util's `CancellationToken` takes two locks of the whole process each time.
#[derive(Debug, Default)]
struct Signal {
    begun: AtomicBool,
    notify: Notify,
}

impl Drain {
    /// Creates both sides.
    #[must_use]
    pub fn new() -> (Self, Watch) {
        let watch = Watch { signal: Arc::default(), tracker: TaskTracker::new() };
        (Self { watch: watch.clone() }, watch)
    }

    /// Notifies every watch and waits until all tracked work is done. Returns whether it was, within the deadline.
    pub async fn drain(self, deadline: Duration) -> bool {
        self.watch.signal.begun.store(true, Ordering::Release);
        self.watch.signal.notify.notify_waiters();
        self.watch.tracker.close();
        tokio::time::timeout(deadline, self.watch.tracker.wait()).await.is_ok()
    }
}

impl Watch {
    /// Waits until the drain begins. Cancel safe.
    pub async fn signaled(&self) {
        // Created before the flag is read, it gets every notification that the read came too early for.
        let mut notified = pin!(self.signal.notify.notified());
        let mut registered: Option<Waker> = None;
        poll_fn(|cx| {
            if self.is_signaled() {
                return Poll::Ready(());
            }
            if registered.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                return Poll::Pending;
            }
            registered = Some(cx.waker().clone());
            notified.as_mut().poll(cx)
        })
        .await;
    }

    /// Whether the drain has begun.
    #[must_use]
    pub fn is_signaled(&self) -> bool {
        self.signal.begun.load(Ordering::Acquire)
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
    /// Counts its wakes.
    #[derive(Default)]
    struct Wakes(std::sync::atomic::AtomicUsize);

    impl std::task::Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn the_task_that_polled_last_is_woken() {
        let (drain, watch) = Drain::new();
        let mut signaled = pin!(watch.signaled());
        let wakes: [Arc<Wakes>; 2] = Default::default();
        let wakers = wakes.clone().map(Waker::from);
        for waker in [0, 0, 1, 1] {
            let mut cx = std::task::Context::from_waker(&wakers[waker]);
            assert!(signaled.as_mut().poll(&mut cx).is_pending());
        }
        assert!(drain.drain(Duration::from_secs(1)).await);
        let wakes = wakes.map(|wakes| wakes.0.load(Ordering::Relaxed));
        assert_eq!(wakes, [0, 1]);
        assert!(signaled.as_mut().poll(&mut std::task::Context::from_waker(&wakers[1])).is_ready());
        watch.signaled().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_signal_is_lost_between_the_flag_and_the_registration() {
        for _ in 0..2000 {
            let (drain, watch) = Drain::new();
            let waiting = tokio::spawn(async move { watch.signaled().await });
            assert!(drain.drain(Duration::from_secs(30)).await);
            tokio::time::timeout(Duration::from_secs(30), waiting).await.expect("the signal arrives").unwrap();
        }
    }
}
