//! The timer for the heads of an HTTP/1 connection's requests.
//!
//! hyper makes a timer when it begins to wait for a head and drops it when the head is there. Registering and removing one of the
//! runtime's for each request costs more than reading the head. Here a connection keeps one, which is set anew only when it has
//! elapsed: an earlier wake-up does no harm.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant as StdInstant},
};

use hyper::rt::{Sleep as HyperSleep, Timer};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until};

/// A connection's timer.
#[derive(Debug, Default)]
pub(super) struct KeptTimer(Arc<Mutex<Option<Pin<Box<Sleep>>>>>);

/// One wait for a head.
#[derive(Debug)]
struct Wait {
    until: Instant,
    kept: Arc<Mutex<Option<Pin<Box<Sleep>>>>>,
}

impl Timer for KeptTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn HyperSleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: StdInstant) -> Pin<Box<dyn HyperSleep>> {
        Box::pin(Wait { until: deadline.into(), kept: Arc::clone(&self.0) })
    }

    fn now(&self) -> StdInstant {
        // The runtime's clock, which tests stop.
        Instant::now().into()
    }
}

impl Future for Wait {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { until, kept } = self.get_mut();
        let mut kept = kept.lock();
        let sleep = kept.get_or_insert_with(|| Box::pin(sleep_until(*until)));
        loop {
            if sleep.deadline() > *until || sleep.is_elapsed() {
                if Instant::now() >= *until {
                    return Poll::Ready(());
                }
                sleep.as_mut().reset(*until);
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
        let timer = KeptTimer::default();
        let begin = Instant::now();
        let seconds = Duration::from_secs;
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
}
