//! Failure accrual: when an endpoint with failures gets no requests for a time.

use std::time::Duration;

use super::{Annotations, Reader, boolean, duration, number};
use crate::field::Invalid;

const MODE: &str = "balancer.linkerd.io/failure-accrual";
const MAX_FAILURES: &str = "balancer.linkerd.io/failure-accrual-consecutive-max-failures";
const MIN_PENALTY: &str = "balancer.linkerd.io/failure-accrual-consecutive-min-penalty";
const MAX_PENALTY: &str = "balancer.linkerd.io/failure-accrual-consecutive-max-penalty";
const JITTER_RATIO: &str = "balancer.linkerd.io/failure-accrual-consecutive-jitter-ratio";
const THRESHOLD: &str = "balancer.alpha.linkerd.io/failure-accrual-success-rate-threshold";
const WINDOW: &str = "balancer.alpha.linkerd.io/failure-accrual-success-rate-window";
const MIN_REQUESTS: &str = "balancer.alpha.linkerd.io/failure-accrual-success-rate-min-requests";
const HONOR_RETRY_AFTER: &str = "balancer.alpha.linkerd.io/failure-accrual-honor-retry-after";

const DEFAULT_MAX_FAILURES: u32 = 7;
const DEFAULT_MIN_PENALTY: Duration = Duration::from_secs(1);
const DEFAULT_MAX_PENALTY: Duration = Duration::from_secs(60);
const DEFAULT_JITTER_RATIO: f32 = 0.5;
const DEFAULT_THRESHOLD: f64 = 0.8;
const DEFAULT_WINDOW: Duration = Duration::from_secs(10);
const DEFAULT_MIN_REQUESTS: u32 = 5;

/// The shortest window that Linkerd's proxy accepts; with a shorter one it refuses the whole policy.
const SHORTEST_WINDOW: Duration = Duration::from_millis(10);
/// The most requests that Linkerd's proxy accepts; with more it refuses the whole policy.
const MOST_MIN_REQUESTS: u32 = 1_000_000;

/// When an endpoint gets no requests for a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureAccrual {
    /// After failures without a success in between.
    pub consecutive: ConsecutiveFailures,
    /// Also when the rate of successes is low; `None` in mode `consecutive`.
    pub success_rate: Option<SuccessRate>,
}

/// Failures without a success in between, and how long an endpoint then gets no requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConsecutiveFailures {
    /// The number of failures.
    pub max_failures: u32,
    /// The first pause; each further one is twice as long.
    pub min_penalty: Duration,
    /// The longest pause, more than zero.
    pub max_penalty: Duration,
    /// The random part of a pause, as a share of it, within 0-100.
    pub jitter_ratio: f32,
}

/// A rate of successes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuccessRate {
    /// The lowest good rate, within 0-1; zero switches the rate off.
    pub threshold: f64,
    /// The time over which it is computed.
    pub window: Duration,
    /// Requests in the window below which there is no rate.
    pub min_requests: u32,
}

/// The failure accrual of a Service; `None` without a mode.
///
/// # Errors
/// Lists every invalid annotation of the mode.
pub fn failure_accrual(annotations: &Annotations) -> Result<Option<FailureAccrual>, Vec<Invalid>> {
    let mut reader = Reader::new(annotations);
    let unified = match annotations.get(MODE).map(String::as_str) {
        None => return Ok(None),
        Some("consecutive") => false,
        Some("unified") => true,
        Some(other) => {
            reader.refuse(MODE, format!("unknown mode {other:?}, expected consecutive or unified"));
            return reader.finish(None);
        }
    };
    let consecutive = consecutive_failures(&mut reader);
    let success_rate = unified.then(|| success_rate(&mut reader));
    reader.finish(Some(FailureAccrual { consecutive, success_rate }))
}

/// Whether the header `Retry-After` of a response lengthens the pause of its endpoint.
///
/// # Errors
/// When it is neither true nor false.
pub fn honor_retry_after(annotations: &Annotations) -> Result<bool, Vec<Invalid>> {
    let mut reader = Reader::new(annotations);
    let honor = reader.read(HONOR_RETRY_AFTER, boolean).unwrap_or_default();
    reader.finish(honor)
}

fn consecutive_failures(reader: &mut Reader<'_>) -> ConsecutiveFailures {
    let max_failures = reader.read(MAX_FAILURES, |text| number("a whole number", 0..=u32::MAX, text));
    let min_penalty = reader.read(MIN_PENALTY, duration).unwrap_or(DEFAULT_MIN_PENALTY);
    let max_penalty = reader.read(MAX_PENALTY, duration).unwrap_or(DEFAULT_MAX_PENALTY);
    let jitter_ratio = reader.read(JITTER_RATIO, |text| number("0.0-100.0", 0.0..=100.0, text));
    if max_penalty.is_zero() {
        reader.refuse(MAX_PENALTY, "zero, expected a longer duration");
    } else if min_penalty > max_penalty {
        reader.refuse(MIN_PENALTY, format!("{min_penalty:?}, expected at most the longest penalty, {max_penalty:?}"));
    }
    ConsecutiveFailures {
        max_failures: max_failures.unwrap_or(DEFAULT_MAX_FAILURES),
        min_penalty,
        max_penalty,
        jitter_ratio: jitter_ratio.unwrap_or(DEFAULT_JITTER_RATIO),
    }
}

fn success_rate(reader: &mut Reader<'_>) -> SuccessRate {
    let threshold = reader.read(THRESHOLD, |text| number("0.0-1.0", 0.0..=1.0, text)).unwrap_or(DEFAULT_THRESHOLD);
    let window = reader.read(WINDOW, duration).unwrap_or(DEFAULT_WINDOW);
    let min_requests = reader.read(MIN_REQUESTS, |text| number("a whole number", 0..=u32::MAX, text));
    let min_requests = min_requests.unwrap_or(DEFAULT_MIN_REQUESTS);
    if window.is_zero() {
        reader.refuse(WINDOW, "zero, expected at least 10ms");
    }
    // The proxy's bounds do not apply while the rate is switched off.
    if threshold != 0.0 {
        if !window.is_zero() && window < SHORTEST_WINDOW {
            reader.refuse(WINDOW, format!("{window:?}, expected at least 10ms"));
        }
        if min_requests > MOST_MIN_REQUESTS {
            reader.refuse(MIN_REQUESTS, format!("{min_requests}, expected at most {MOST_MIN_REQUESTS}"));
        }
    }
    SuccessRate { threshold, window, min_requests }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::traffic::of;

    #[test]
    fn defaults_are_linkerds() {
        assert_eq!(failure_accrual(&of(&[(MAX_FAILURES, "many")])), Ok(None), "no mode");
        let consecutive = ConsecutiveFailures {
            max_failures: 7,
            min_penalty: Duration::from_secs(1),
            max_penalty: Duration::from_secs(60),
            jitter_ratio: 0.5,
        };
        let expected = FailureAccrual { consecutive, success_rate: None };
        assert_eq!(failure_accrual(&of(&[(MODE, "consecutive"), (THRESHOLD, "x")])), Ok(Some(expected)));
        let rate = SuccessRate { threshold: 0.8, window: Duration::from_secs(10), min_requests: 5 };
        let expected = FailureAccrual { consecutive, success_rate: Some(rate) };
        assert_eq!(failure_accrual(&of(&[(MODE, "unified")])), Ok(Some(expected)));
    }

    #[test]
    fn bounds_are_those_of_the_proxy() {
        for (name, value, valid) in [
            (MODE, "unified", true),
            (MODE, "both", false),
            (MAX_FAILURES, "0", true),
            (MAX_FAILURES, "-1", false),
            (MIN_PENALTY, "60s", true),
            (MIN_PENALTY, "61s", false),
            (MAX_PENALTY, "0", false),
            (MAX_PENALTY, "2", false),
            (JITTER_RATIO, "100", true),
            (JITTER_RATIO, "100.1", false),
            (JITTER_RATIO, "-0.1", false),
            (JITTER_RATIO, "NaN", false),
            (THRESHOLD, "1.0", true),
            (THRESHOLD, "1.1", false),
            (WINDOW, "10ms", true),
            (WINDOW, "9ms", false),
            (WINDOW, "0", false),
            (MIN_REQUESTS, "1000000", true),
            (MIN_REQUESTS, "1000001", false),
        ] {
            let mut annotations = of(&[(MODE, "unified")]);
            annotations.insert(name.to_owned(), value.to_owned());
            let read = failure_accrual(&annotations);
            assert_eq!(read.is_ok(), valid, "{name} {value}");
            for invalid in read.err().into_iter().flatten() {
                assert!(invalid.field.to_string().contains(name), "{invalid}");
            }
        }
    }

    #[test]
    fn a_rate_that_is_off_has_no_bounds() {
        let off = of(&[(MODE, "unified"), (THRESHOLD, "0"), (WINDOW, "1ms"), (MIN_REQUESTS, "2000000")]);
        assert!(failure_accrual(&off).is_ok());
    }

    #[test]
    fn retry_after_is_a_switch() {
        for (value, expected) in [("true", Some(true)), ("0", Some(false)), ("yes", None)] {
            assert_eq!(honor_retry_after(&of(&[(HONOR_RETRY_AFTER, value)])).ok(), expected, "{value}");
        }
        assert_eq!(honor_retry_after(&of(&[])), Ok(false));
    }
}
