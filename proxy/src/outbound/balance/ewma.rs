//! The moving average of an endpoint's latency: rises to a peak at once, falls slowly.
//!
//! After "Finagle's Peak EWMA": a slower answer replaces the average, a faster one is weighed in by the time since the last.

use std::time::Duration;

use tokio::time::Instant;

use crate::discover::route::PeakEwma;

/// The average, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ewma {
    seconds: f64,
    updated: Instant,
    decay: f64,
}

impl Ewma {
    /// Starts with the assumed latency of an unused endpoint.
    pub(super) fn new(load: PeakEwma, now: Instant) -> Self {
        Self { seconds: load.default_rtt.as_secs_f64(), updated: now, decay: load.decay.as_secs_f64() }
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

    /// The average, decayed by the time since the last answer, so that a slow endpoint is tried again.
    pub(super) fn estimate(&self, now: Instant) -> f64 {
        self.seconds * self.fade(now)
    }

    fn fade(&self, now: Instant) -> f64 {
        (-now.saturating_duration_since(self.updated).as_secs_f64() / self.decay).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: PeakEwma = PeakEwma { default_rtt: Duration::from_millis(30), decay: Duration::from_secs(10) };

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
}
