//! Annotations of Services, EgressNetworks and routes that configure traffic: retries, timeouts, failure accrual and
//! load bias.
//!
//! Names, defaults and bounds are Linkerd's (`linkerd2:policy-controller/k8s/index/src/outbound/index.rs`). Each
//! function reads one family, and answers `None` where the object has no annotation of it: a route with any annotation
//! of a family overrides that family of its parent as a whole. Admission and the index share them.

mod accrual;
mod bias;
mod retry;

use std::{collections::BTreeMap, str::FromStr, time::Duration};

pub use accrual::{ConsecutiveFailures, FailureAccrual, SuccessRate, failure_accrual, honor_retry_after};
pub use bias::{LoadBias, load_bias};
pub use retry::{GrpcCode, Retry, StatusRange, grpc_retry, http_retry};

use crate::{
    duration,
    field::{FieldPath, Invalid},
};

/// Annotations of an object.
pub type Annotations = BTreeMap<String, String>;

/// `timeout.linkerd.io/request`: limit of a request with its retries.
pub const TIMEOUT_REQUEST: &str = "timeout.linkerd.io/request";
/// `timeout.linkerd.io/response`: limit of the time from the end of the request to the end of the response.
pub const TIMEOUT_RESPONSE: &str = "timeout.linkerd.io/response";
/// `timeout.linkerd.io/idle`: limit of the time without data in either direction.
pub const TIMEOUT_IDLE: &str = "timeout.linkerd.io/idle";

/// Limits of the time that requests take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Timeouts {
    /// Limit of a request with its retries. A rule's own timeout counts only where this is absent.
    pub request: Option<Duration>,
    /// Limit of the response.
    pub response: Option<Duration>,
    /// Limit of the time without data.
    pub idle: Option<Duration>,
}

/// The timeouts; `None` without an annotation of the family.
///
/// # Errors
/// Lists every annotation that is not a duration.
pub fn timeouts(annotations: &Annotations) -> Result<Option<Timeouts>, Vec<Invalid>> {
    let mut reader = Reader::new(annotations);
    let timeouts = Timeouts {
        request: reader.read(TIMEOUT_REQUEST, duration),
        response: reader.read(TIMEOUT_RESPONSE, duration),
        idle: reader.read(TIMEOUT_IDLE, duration),
    };
    reader.finish((timeouts != Timeouts::default()).then_some(timeouts))
}

/// Reads annotations and collects their problems.
struct Reader<'a> {
    annotations: &'a Annotations,
    found: Vec<Invalid>,
}

impl<'a> Reader<'a> {
    fn new(annotations: &'a Annotations) -> Self {
        Self { annotations, found: Vec::new() }
    }

    /// The value of an annotation; `None` where it is absent or invalid.
    fn read<T>(&mut self, name: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let read = parse(self.annotations.get(name)?.trim());
        read.map_err(|problem| self.refuse(name, problem)).ok()
    }

    fn refuse(&mut self, name: &str, problem: impl std::fmt::Display) {
        self.found.push(FieldPath::annotation(name).invalid(problem));
    }

    fn finish<T>(self, value: T) -> Result<T, Vec<Invalid>> {
        if self.found.is_empty() { Ok(value) } else { Err(self.found) }
    }
}

/// A whole number with a unit, or zero.
fn duration(text: &str) -> Result<Duration, String> {
    duration::parse_whole(text).ok_or_else(|| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let hint = if is_number { format!(": {text}s or {text}ms") } else { String::new() };
        format!("bad duration {text:?}, expected a whole number with ms, s, m, h or d{hint}")
    })
}

/// A number within bounds.
fn number<T: FromStr + PartialOrd>(
    expected: &str,
    bounds: std::ops::RangeInclusive<T>,
    text: &str,
) -> Result<T, String> {
    let parsed = text.parse().ok().filter(|number| bounds.contains(number));
    parsed.ok_or_else(|| format!("bad number {text:?}, expected {expected}"))
}

/// A boolean as in Go.
fn boolean(text: &str) -> Result<bool, String> {
    crate::boolean::parse(text).ok_or_else(|| format!("bad value {text:?}, expected true or false"))
}

#[cfg(test)]
fn of(pairs: &[(&str, &str)]) -> Annotations {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_without_a_unit_gets_a_hint() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert!(duration("10").unwrap_err().ends_with("m, h or d: 10s or 10ms"));
        for text in ["", "soon", "1.5s"] {
            assert!(duration(text).unwrap_err().ends_with("m, h or d"), "{text:?}");
        }
    }

    #[test]
    fn booleans_are_those_of_go() {
        for (text, expected) in [("1", Some(true)), ("True", Some(true)), ("f", Some(false)), ("yes", None), ("", None)]
        {
            assert_eq!(boolean(text).ok(), expected, "{text:?}");
        }
    }

    #[test]
    fn timeouts_are_a_family() {
        assert_eq!(timeouts(&of(&[("timeout.linkerd.io/other", "x")])), Ok(None));
        let expected = Timeouts { idle: Some(Duration::from_secs(1)), ..Timeouts::default() };
        assert_eq!(timeouts(&of(&[(TIMEOUT_IDLE, " 1s ")])), Ok(Some(expected)));
        let found =
            timeouts(&of(&[(TIMEOUT_REQUEST, "1"), (TIMEOUT_RESPONSE, "1s"), (TIMEOUT_IDLE, "x")])).unwrap_err();
        let fields: Vec<_> = found.iter().map(|invalid| invalid.field.clone()).collect();
        assert_eq!(fields, [FieldPath::annotation(TIMEOUT_REQUEST), FieldPath::annotation(TIMEOUT_IDLE)]);
    }
}
