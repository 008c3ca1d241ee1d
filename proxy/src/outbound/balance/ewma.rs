//! The load of an endpoint: a moving average of its latency that rises to a peak at once and falls slowly, and a
//! penalty for failures that falls likewise.
//!
//! After "Finagle's Peak EWMA": a slower answer replaces the average, a faster one is weighed in by the time since the
//! last. A request that ends without an answer can only raise it.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    discover::route::{Load, Penalty},
    request::classify::Answer,
};

/// The average, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ewma {
    seconds: f64,
    updated: Instant,
    decay: Duration,
    penalty: Option<Penalized>,
}

/// What failures add, in seconds.
#[derive(Clone, Copy, Debug)]
struct Penalized {
    terms: Penalty,
    seconds: f64,
    updated: Instant,
}

/// What is left of a value after some time.
fn fade(elapsed: Duration, decay: Duration) -> f64 {
    (-elapsed.as_secs_f64() / decay.as_secs_f64()).exp()
}

impl Ewma {
    /// Starts with the assumed latency of an unused endpoint.
    pub(super) fn new(load: Load, now: Instant) -> Self {
        let penalty = load.penalty.map(|terms| Penalized { terms, seconds: 0.0, updated: now });
        Self { seconds: load.default_rtt.as_secs_f64(), updated: now, decay: load.decay, penalty }
    }

    /// Adds a penalty for a response that asks for one; the time that its server asks for, if it is longer.
    pub(super) fn penalize(&mut self, answer: &Answer, now: Instant) {
        let Some(penalty) = self.penalty.as_mut().filter(|_| answer.is_penalized()) else { return };
        let asked = answer.retry_after.unwrap_or_default().min(penalty.terms.max_retry_after);
        penalty.seconds = penalty.left(now).max(penalty.terms.penalty.max(asked).as_secs_f64());
        penalty.updated = now;
    }

    /// Adds one latency.
    pub(super) fn add(&mut self, rtt: Duration, now: Instant) {
        let rtt = rtt.as_secs_f64();
        if rtt > self.seconds {
            self.seconds = rtt;
        } else {
            let weight = self.fade(now);
            self.seconds = self.seconds * weight + rtt * (1.0 - weight);
        }
        self.updated = now;
    }

    /// Raises the average to the time that a request without an answer took. A shorter time says nothing: an endpoint
    /// that fails fast would attract requests.
    pub(super) fn raise(&mut self, elapsed: Duration, now: Instant) {
        let elapsed = elapsed.as_secs_f64();
        if elapsed > self.seconds * self.fade(now) {
            self.seconds = elapsed;
            self.updated = now;
        }
    }

    /// The average, decayed by the time since the last answer, so that a slow endpoint is tried again.
    pub(super) fn estimate(&self, now: Instant) -> f64 {
        self.seconds * self.fade(now) + self.penalty.map_or(0.0, |penalty| penalty.left(now))
    }

    fn fade(&self, now: Instant) -> f64 {
        fade(now.saturating_duration_since(self.updated), self.decay)
    }
}

impl Penalized {
    fn left(&self, now: Instant) -> f64 {
        self.seconds * fade(now.saturating_duration_since(self.updated), self.terms.decay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load::DEFAULT;

    #[test]
    fn peaks_count_at_once_and_fade() {
        let start = Instant::now();
        let mut ewma = Ewma::new(LOAD, start);
        assert!((ewma.estimate(start) - 0.030).abs() < 1e-9);
        ewma.add(Duration::from_secs(1), start);
        assert!((ewma.estimate(start) - 1.0).abs() < 1e-9);
        let later = start + Duration::from_secs(10);
        assert!((ewma.estimate(later) - (-1.0_f64).exp()).abs() < 1e-9);
    }

    #[test]
    fn faster_answers_are_weighed_in_slowly() {
        let start = Instant::now();
        let mut ewma = Ewma::new(LOAD, start);
        ewma.add(Duration::from_millis(100), start);
        ewma.add(Duration::from_millis(1), start + Duration::from_millis(10));
        let estimate = ewma.estimate(start + Duration::from_millis(10));
        assert!(estimate > 0.099 && estimate < 0.1, "{estimate}");
    }

    #[test]
    fn penalties_fade_and_follow_the_server() {
        let start = Instant::now();
        let answer = |status, retry_after| Answer {
            status: http::StatusCode::from_u16(status).unwrap(),
            grpc: None,
            retry_after,
        };
        let mut ewma = Ewma::new(Load { penalty: Some(Penalty::DEFAULT), ..LOAD }, start);
        ewma.penalize(&answer(404, None), start);
        assert!(ewma.estimate(start) < 0.1);
        ewma.penalize(&answer(503, None), start);
        assert!((ewma.estimate(start) - 5.03).abs() < 1e-9);
        let later = start + Duration::from_secs(10);
        assert!((ewma.estimate(later) - 5.03 * (-1.0_f64).exp()).abs() < 1e-9);
        ewma.penalize(&answer(429, Some(Duration::from_secs(3600))), later);
        assert!(ewma.estimate(later) < 301.0 && ewma.estimate(later) > 300.0, "five minutes at most");
        let mut without = Ewma::new(LOAD, start);
        without.penalize(&answer(503, None), start);
        assert!((without.estimate(start) - 0.030).abs() < 1e-9);
    }
}
