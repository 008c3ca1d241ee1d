//! Token buckets: how much of something may happen at once, and in the long run.

use tokio::time::Instant;

/// A token bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    rate: Rate,
    left: f64,
    at: Instant,
}

/// Size and refill of a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// What may happen at once.
    pub(crate) burst: f64,
    /// What may happen each second in the long run.
    pub(crate) per_second: f64,
}

impl Allowance {
    /// A full bucket.
    pub(crate) fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, left: rate.burst, at: now }
    }

    /// Takes a token; false if there is none.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        self.left = self.left(now);
        self.at = now;
        let allowed = self.left >= 1.0;
        if allowed {
            self.left -= 1.0;
        }
        allowed
    }

    /// Whether there is a token.
    pub(crate) fn has_some(&self, now: Instant) -> bool {
        self.left(now) >= 1.0
    }

    /// Whether it has as many tokens as a new one.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.left(now) >= self.rate.burst
    }

    /// How many tokens there are.
    pub(crate) fn left(&self, now: Instant) -> f64 {
        (self.left + now.saturating_duration_since(self.at).as_secs_f64() * self.rate.per_second).min(self.rate.burst)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn bounds_a_burst_and_the_long_run() {
        let start = Instant::now();
        let mut allowance = Allowance::new(Rate { burst: 200.0, per_second: 10.0 }, start);
        let taken = |allowance: &mut Allowance, at| (0..1000).filter(|_| allowance.take(at)).count();
        assert!(allowance.is_full(start));
        assert_eq!(taken(&mut allowance, start), 200);
        assert!(!allowance.has_some(start));
        assert_eq!(taken(&mut allowance, start + Duration::from_secs(1)), 10);
        let later = start + Duration::from_secs(3600);
        assert!(allowance.has_some(later) && allowance.is_full(later));
        assert_eq!(taken(&mut allowance, later), 200);
    }
}
