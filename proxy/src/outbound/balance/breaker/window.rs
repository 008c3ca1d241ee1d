//! The share of successes among an endpoint's latest responses: an exact ratio over a sliding window, whatever the rate
//! of requests.
//!
//! A moving average that weighs responses by the time between them does not see a burst of failures.

use std::time::Duration;

use tokio::time::Instant;

use crate::discover::route::SuccessRate;

/// Parts of the window: Linkerd's number (`breaker/success_rate.rs`).
const BUCKETS: usize = 10;

/// The window. It moves by a whole bucket at a time.
#[derive(Debug)]
pub(super) struct Window {
    /// The present one first.
    buckets: [Bucket; BUCKETS],
    width_ns: u128,
    begin: Instant,
    /// The number of the present bucket, counted from the beginning.
    present: u128,
}

/// The responses of a part of the window.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    successes: u32,
    responses: u32,
}

impl Window {
    /// A window of this length without responses.
    pub(super) fn new(length: Duration, now: Instant) -> Self {
        let width_ns = (length.as_nanos() / BUCKETS as u128).max(1);
        Self { buckets: Default::default(), width_ns, begin: now, present: 0 }
    }

    /// Counts a response.
    pub(super) fn count(&mut self, is_success: bool, now: Instant) {
        self.advance(now);
        let [present, ..] = &mut self.buckets;
        present.responses = present.responses.saturating_add(1);
        present.successes = present.successes.saturating_add(u32::from(is_success));
    }

    /// Whether the share of successes is too low, as of the last response.
    pub(super) fn is_below(&self, rate: &SuccessRate) -> bool {
        let sum = |part: fn(&Bucket) -> u32| self.buckets.iter().map(|bucket| u64::from(part(bucket))).sum::<u64>();
        let (successes, responses) = (sum(|bucket| bucket.successes), sum(|bucket| bucket.responses));
        let share = || successes as f64 / responses as f64;
        responses > 0 && responses >= u64::from(rate.min_requests) && share() < rate.threshold
    }

    /// Drops the buckets that have left the window.
    fn advance(&mut self, now: Instant) {
        let present = now.saturating_duration_since(self.begin).as_nanos() / self.width_ns;
        let passed = present.saturating_sub(self.present);
        let passed = usize::try_from(passed).unwrap_or(BUCKETS).min(BUCKETS);
        self.buckets.rotate_right(passed);
        self.buckets[..passed].fill(Bucket::default());
        self.present = self.present.max(present);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn rate(threshold: f64, min_requests: u32) -> SuccessRate {
        SuccessRate { threshold, window: 10 * SECOND, min_requests }
    }

    #[test]
    fn a_share_is_exact_and_does_not_depend_on_the_rate_of_requests() {
        for interval in [Duration::ZERO, Duration::from_micros(1), SECOND] {
            let mut now = Instant::now();
            let mut window = Window::new(10 * SECOND, now);
            for is_success in [true, true, true, true, false] {
                window.count(is_success, now);
                now += interval;
            }
            assert!(!window.is_below(&rate(0.8, 5)), "4 of 5 are 0.8, {interval:?}");
            window.count(false, now);
            assert!(window.is_below(&rate(0.8, 5)), "{interval:?}");
            assert!(!window.is_below(&rate(0.8, 7)), "too few, {interval:?}");
        }
    }

    #[test]
    fn a_window_without_responses_is_not_below_anything() {
        let now = Instant::now();
        let mut window = Window::new(10 * SECOND, now);
        assert!(!window.is_below(&rate(1.0, 0)));
        window.count(false, now);
        assert!(window.is_below(&rate(1.0, 0)));
    }

    #[test]
    fn a_bucket_counts_until_the_tenth_after_it_begins() {
        let begin = Instant::now();
        let mut window = Window::new(10 * SECOND, begin);
        // Late in the first bucket, which is the first second.
        window.count(false, begin + Duration::from_millis(900));
        for (millis, is_below) in [(1000, true), (5500, true), (9999, true), (10_000, false)] {
            window.count(true, begin + Duration::from_millis(millis));
            assert_eq!(window.is_below(&rate(0.99, 1)), is_below, "{millis} ms");
        }
        window.count(false, begin + Duration::from_secs(10));
        assert!(window.is_below(&rate(0.99, 1)), "a bucket that has moved out is used again");
    }

    #[test]
    fn after_a_silence_the_window_is_empty() {
        for silence in [10 * SECOND, 11 * SECOND, Duration::from_secs(400 * 24 * 3600)] {
            let begin = Instant::now();
            let mut window = Window::new(10 * SECOND, begin);
            (0..100).for_each(|_| window.count(false, begin));
            let now = begin + silence;
            window.count(false, now);
            assert!(!window.is_below(&rate(0.5, 2)), "one response after {silence:?}");
            window.count(false, now + 9 * SECOND);
            assert!(window.is_below(&rate(0.5, 2)), "two within the window after {silence:?}");
        }
    }

    #[test]
    fn a_clock_that_was_read_before_another_request_s_takes_nothing_away() {
        let begin = Instant::now();
        let mut window = Window::new(10 * SECOND, begin);
        window.count(false, begin + 5 * SECOND);
        window.count(false, begin);
        assert!(window.is_below(&rate(0.5, 2)));
    }

    proptest! {
        #[test]
        fn a_window_counts_what_the_list_of_all_responses_says(
            responses in prop::collection::vec((0_u64..3_000, any::<bool>()), 1..80),
            threshold in 0.0_f64..=1.0,
            min_requests in 0_u32..8,
        ) {
            let rate = rate(threshold, min_requests);
            let begin = Instant::now();
            let mut window = Window::new(rate.window, begin);
            let (mut now_ms, mut all) = (0, Vec::new());
            for (pause_ms, is_success) in responses {
                now_ms += pause_ms;
                all.push((now_ms / 1000, is_success));
                window.count(is_success, begin + Duration::from_millis(now_ms));
                let latest: Vec<_> = all.iter().filter(|(second, _)| second + 10 > now_ms / 1000).collect();
                let successes = latest.iter().filter(|(_, is_success)| *is_success).count();
                let is_below = latest.len() >= min_requests as usize
                    && (successes as f64) / (latest.len() as f64) < threshold;
                prop_assert_eq!(window.is_below(&rate), is_below);
            }
        }
    }
}
