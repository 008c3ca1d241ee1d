//! The timer for the heads of an HTTP/1 connection's requests.
//!
//! hyper makes a timer when it begins to wait for a head and drops it when the head is there. Registering and removing
//! one of the runtime's for each request costs more than reading the head. Here a connection keeps one, which is set
//! anew only when it has elapsed: an earlier wake-up does no harm.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant as StdInstant},
};

use hyper::rt::{Sleep as HyperSleep, Timer};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until};

/// A connection's timer. Clones are the same timer.
#[derive(Clone, Debug)]
pub(super) struct HeadTimer {
    timeout: Duration,
    idle_after: Duration,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Whether `idle` has a value: the connection asks whenever it is polled.
    is_idle: AtomicBool,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    sleep: Option<Pin<Box<Sleep>>>,
    /// The end of a wait that has become idle.
    idle: Option<Instant>,
    /// The end of the next wait, if it goes on with another.
    resumed: Option<Instant>,
}

/// One wait for a head.
#[derive(Debug)]
struct Wait {
    until: Instant,
    /// When the connection is idle; `None` if that is known.
    idle_at: Option<Instant>,
    shared: Arc<Shared>,
}

impl HeadTimer {
    /// A timer of waits for `timeout`, which say after `idle_after` that the connection is idle.
    pub(super) fn new(timeout: Duration, idle_after: Duration) -> Self {
        Self { timeout, idle_after, shared: Arc::default() }
    }

    /// When the present wait ends, once, if the connection has become idle.
    pub(super) fn take_idle(&self) -> Option<Instant> {
        if !self.shared.is_idle.load(Ordering::Relaxed) {
            return None;
        }
        self.shared.is_idle.store(false, Ordering::Relaxed);
        self.shared.kept.lock().idle.take()
    }

    /// The next wait goes on with one that ends at `until`.
    pub(super) fn resume(&self, until: Instant) {
        self.shared.kept.lock().resumed = Some(until);
    }
}

impl Timer for HeadTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn HyperSleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: StdInstant) -> Pin<Box<dyn HyperSleep>> {
        let deadline = Instant::from(deadline);
        let idle_at = deadline.checked_sub(self.timeout).map(|began| began + self.idle_after);
        // Taken here: hyper does not poll the wait for a head that is there as a whole, and the next one is another.
        let until = self.shared.kept.lock().resumed.take().unwrap_or(deadline);
        Box::pin(Wait { until, idle_at, shared: Arc::clone(&self.shared) })
    }

    fn now(&self) -> StdInstant {
        // The runtime's clock, which tests stop.
        Instant::now().into()
    }
}

impl Future for Wait {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { until, idle_at, shared } = self.get_mut();
        let mut kept = shared.kept.lock();
        let Kept { sleep, idle, .. } = &mut *kept;
        loop {
            let next = idle_at.map_or(*until, |idle_at| idle_at.min(*until));
            let sleep = sleep.get_or_insert_with(|| Box::pin(sleep_until(next)));
            if sleep.deadline() > next || sleep.is_elapsed() {
                let now = Instant::now();
                if now >= *until {
                    return Poll::Ready(());
                }
                if now >= next {
                    (*idle, *idle_at) = (Some(*until), None);
                    shared.is_idle.store(true, Ordering::Relaxed);
                    continue;
                }
                sleep.as_mut().reset(next);
            }
            ready!(sleep.as_mut().poll(cx));
        }
    }
}

impl HyperSleep for Wait {}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_at_its_time_whatever_an_earlier_one_has_set() {
        let seconds = Duration::from_secs;
        let timer = HeadTimer::new(seconds(10), seconds(100));
        let begin = Instant::now();
        let mut dropped = timer.sleep(seconds(10));
        assert!(futures::poll!(dropped.as_mut()).is_pending());
        drop(dropped);
        tokio::time::advance(seconds(4)).await;
        // Later than what is set, then earlier than what is set.
        timer.sleep(seconds(10)).await;
        assert_eq!(begin.elapsed(), seconds(14));
        let mut dropped = timer.sleep(seconds(10));
        assert!(futures::poll!(dropped.as_mut()).is_pending());
        drop(dropped);
        timer.sleep(seconds(1)).await;
        assert_eq!(begin.elapsed(), seconds(15));
        timer.sleep(Duration::ZERO).await;
        assert_eq!(begin.elapsed(), seconds(15));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_says_once_that_the_connection_is_idle_and_another_goes_on_with_it() {
        let seconds = Duration::from_secs;
        let timer = HeadTimer::new(seconds(10), seconds(1));
        let begin = Instant::now();
        let mut wait = timer.sleep(seconds(10));
        assert!(futures::poll!(wait.as_mut()).is_pending());
        assert_eq!(timer.take_idle(), None);
        let idle = std::future::poll_fn(|cx| {
            assert!(wait.as_mut().poll(cx).is_pending());
            timer.take_idle().map_or(Poll::Pending, Poll::Ready)
        });
        assert_eq!(idle.await, begin + seconds(10));
        assert_eq!(begin.elapsed(), seconds(1));
        assert!(futures::poll!(wait.as_mut()).is_pending());
        assert_eq!(timer.take_idle(), None);
        drop(wait);

        tokio::time::advance(seconds(5)).await;
        timer.resume(begin + seconds(10));
        timer.sleep(seconds(10)).await;
        assert_eq!(begin.elapsed(), seconds(10));
        timer.sleep(seconds(10)).await;
        assert_eq!(begin.elapsed(), seconds(20), "one wait goes on with another");
    }
}
