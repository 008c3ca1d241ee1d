//! One opening of all streams: how long each waits for its first answer.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use tokio::sync::Notify;

use crate::{control_plane::wire::Method, enrolment::Quantiles};

/// See above. Its time begins when it is made.
pub(in crate::control_plane) struct Round {
    began: Instant,
    pending: AtomicU64,
    retries: AtomicU64,
    milliseconds: Mutex<BTreeMap<Method, Vec<f64>>>,
    done: Notify,
}

/// The first answers of a round.
#[derive(Clone, Debug)]
pub(in crate::control_plane) struct Answers {
    /// From the beginning until the last one, seconds.
    pub(in crate::control_plane) seconds: f64,
    /// From the beginning until each, milliseconds.
    pub(in crate::control_plane) milliseconds: BTreeMap<Method, Quantiles>,
    /// Connections and streams that failed and were opened again.
    pub(in crate::control_plane) retries: u64,
}

impl Round {
    pub(super) fn new(streams: u64) -> Self {
        let (pending, retries) = (AtomicU64::new(streams), AtomicU64::new(0));
        Self { began: Instant::now(), pending, retries, milliseconds: Mutex::default(), done: Notify::new() }
    }

    /// Counts the first answer of one stream.
    pub(super) fn answered(&self, method: Method) {
        let milliseconds = self.began.elapsed().as_secs_f64() * 1e3;
        let mut all = self.milliseconds.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(method).or_default().push(milliseconds);
        drop(all);
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.notify_one();
        }
    }

    /// Counts a connection or stream that is opened again before the round is complete.
    pub(super) fn retried(&self) {
        if self.pending() > 0 {
            self.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn pending(&self) -> u64 {
        self.pending.load(Ordering::Acquire)
    }

    /// Waits for the last answer.
    pub(super) async fn complete(&self) {
        while self.pending() > 0 {
            self.done.notified().await;
        }
    }

    pub(super) fn answers(&self) -> Answers {
        let all = self.milliseconds.lock().unwrap_or_else(PoisonError::into_inner);
        let milliseconds: BTreeMap<_, _> =
            all.iter().map(|(method, values)| (*method, Quantiles::of(values.clone()))).collect();
        let longest = milliseconds.values().map(|quantiles| quantiles.max).fold(0.0, f64::max);
        Answers { seconds: longest / 1e3, milliseconds, retries: self.retries.load(Ordering::Relaxed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_round_is_complete_with_its_last_answer() {
        let round = Round::new(2);
        round.answered(Method::Get);
        round.retried();
        assert_eq!(round.pending(), 1);
        round.answered(Method::WatchPort);
        round.complete().await;
        // Not part of the round any more.
        round.retried();
        let answers = round.answers();
        assert_eq!(answers.retries, 1);
        assert_eq!(answers.milliseconds.keys().collect::<Vec<_>>(), [&Method::Get, &Method::WatchPort]);
        assert!(answers.seconds >= 0.0);
    }
}
