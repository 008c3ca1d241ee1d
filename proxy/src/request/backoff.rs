//! Pauses that double, between two bounds, with jitter.

use std::time::Duration;

/// The bounds of pauses between attempts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Backoff {
    /// The first pause.
    pub(crate) min: Duration,
    /// The longest pause before jitter; at least `min`.
    pub(crate) max: Duration,
    /// The share of a pause that chance may add to it: 0 adds nothing, 1 up to doubles it.
    pub(crate) jitter: f64,
}

impl Backoff {
    /// Linkerd's pauses for retries that a request's headers ask for: 25 to 250 ms, jitter 1.
    pub(crate) const RETRIES: Self =
        Self { min: Duration::from_millis(25), max: Duration::from_millis(250), jitter: 1.0 };

    /// The pause after `failures` failures in a row, the first being 1. `chance` is between 0 and 1.
    pub(crate) fn pause(&self, failures: u32, chance: f64) -> Duration {
        let doubled = 2_u32.checked_pow(failures.saturating_sub(1)).and_then(|factor| self.min.checked_mul(factor));
        let base = doubled.unwrap_or(self.max).min(self.max);
        // What cannot be represented is the longest pause there is.
        let added = Duration::try_from_secs_f64(base.as_secs_f64() * (self.jitter * chance).max(0.0));
        base.saturating_add(added.unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_their_limit() {
        let backoff = Backoff { min: Duration::from_millis(100), max: Duration::from_secs(1), jitter: 0.5 };
        let pauses: Vec<u128> = (1..=6).map(|failures| backoff.pause(failures, 0.0).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(backoff.pause(u32::MAX, 0.0), Duration::from_secs(1));
        assert_eq!(backoff.pause(1, 1.0), Duration::from_millis(150));
    }
}
