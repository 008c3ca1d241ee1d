//! Retries.

use std::time::Duration;

use super::{Annotations, Reader, duration, number};
use crate::field::Invalid;

/// How often a request is tried again; 1 where the family has other annotations only.
const LIMIT: &str = "retry.linkerd.io/limit";
/// Limit of one try.
const TIMEOUT: &str = "retry.linkerd.io/timeout";
/// Statuses of HTTP responses that are retried.
const HTTP: &str = "retry.linkerd.io/http";
/// Codes of gRPC responses that are retried.
const GRPC: &str = "retry.linkerd.io/grpc";

/// Which requests are tried again, and how often. `C` is what is compared of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry<C> {
    /// The most tries after the first one, at least 1.
    pub limit: u16,
    /// Limit of one try; absent means none.
    pub timeout: Option<Duration>,
    /// Responses that are retried; absent without an annotation of their own.
    pub conditions: Option<Vec<C>>,
}

/// Statuses of HTTP responses, both ends included, within 100-599.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatusRange {
    /// Lowest status.
    pub min: u16,
    /// Highest status.
    pub max: u16,
}

/// A code of a gRPC response that can be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GrpcCode {
    /// `CANCELLED`.
    Cancelled,
    /// `DEADLINE_EXCEEDED`.
    DeadlineExceeded,
    /// `RESOURCE_EXHAUSTED`.
    ResourceExhausted,
    /// `INTERNAL`.
    Internal,
    /// `UNAVAILABLE`.
    Unavailable,
}

/// Retries of HTTP requests; `None` without an annotation of the family.
///
/// # Errors
/// Lists every invalid annotation.
pub fn http_retry(annotations: &Annotations) -> Result<Option<Retry<StatusRange>>, Vec<Invalid>> {
    retry(annotations, HTTP, |text| {
        let expected = "expected 5xx, gateway-error, a status such as 503 or a range such as 500-504";
        status_range(text).ok_or_else(|| format!("bad condition {text:?}, {expected}"))
    })
}

/// Retries of gRPC requests; `None` without an annotation of the family.
///
/// # Errors
/// Lists every invalid annotation.
pub fn grpc_retry(annotations: &Annotations) -> Result<Option<Retry<GrpcCode>>, Vec<Invalid>> {
    retry(annotations, GRPC, |text| {
        let expected = "expected cancelled, deadline-exceeded, internal, resource-exhausted or unavailable";
        grpc_code(text).ok_or_else(|| format!("bad condition {text:?}, {expected}"))
    })
}

fn retry<C>(
    annotations: &Annotations,
    conditions: &str,
    condition: impl Fn(&str) -> Result<C, String>,
) -> Result<Option<Retry<C>>, Vec<Invalid>> {
    let mut reader = Reader::new(annotations);
    // As in Linkerd, zero means absent.
    let limit = reader.read(LIMIT, |text| number("0-65535", 0..=u16::MAX, text)).filter(|limit| *limit != 0);
    let timeout = reader.read(TIMEOUT, duration).filter(|timeout| !timeout.is_zero());
    let conditions = reader.read(conditions, |text| text.split(',').map(&condition).collect::<Result<Vec<_>, _>>());
    let is_set = limit.is_some() || timeout.is_some() || conditions.is_some();
    reader.finish(is_set.then(|| Retry { limit: limit.unwrap_or(1), timeout, conditions }))
}

fn status_range(text: &str) -> Option<StatusRange> {
    if text.eq_ignore_ascii_case("5xx") {
        return Some(StatusRange { min: 500, max: 599 });
    }
    if text.eq_ignore_ascii_case("gateway-error") {
        return Some(StatusRange { min: 502, max: 504 });
    }
    let status = |text: &str| text.parse::<u16>().ok().filter(|status| (100..=599).contains(status));
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    let range = StatusRange { min: status(min)?, max: status(max)? };
    (range.min <= range.max).then_some(range)
}

fn grpc_code(text: &str) -> Option<GrpcCode> {
    [
        ("cancelled", GrpcCode::Cancelled),
        ("deadline-exceeded", GrpcCode::DeadlineExceeded),
        ("resource-exhausted", GrpcCode::ResourceExhausted),
        ("internal", GrpcCode::Internal),
        ("unavailable", GrpcCode::Unavailable),
    ]
    .into_iter()
    .find_map(|(name, code)| name.eq_ignore_ascii_case(text).then_some(code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::traffic::of;

    #[test]
    fn http_conditions_are_statuses_and_ranges() {
        let range = |min, max| StatusRange { min, max };
        for (text, expected) in [
            ("5xx", Some(vec![range(500, 599)])),
            ("gateway-error", Some(vec![range(502, 504)])),
            ("429,500-503", Some(vec![range(429, 429), range(500, 503)])),
            ("503-500", None),
            ("99", None),
            ("600", None),
            ("4xx", None),
            ("5xx,", None),
            ("", None),
        ] {
            let read = http_retry(&of(&[(HTTP, text)])).ok().flatten().and_then(|retry| retry.conditions);
            assert_eq!(read, expected, "{text:?}");
        }
    }

    #[test]
    fn grpc_conditions_are_codes() {
        let read = |text| grpc_retry(&of(&[(GRPC, text)])).ok().flatten().and_then(|retry| retry.conditions);
        assert_eq!(read("cancelled,Unavailable"), Some(vec![GrpcCode::Cancelled, GrpcCode::Unavailable]));
        assert_eq!(read("deadline-exceeded"), Some(vec![GrpcCode::DeadlineExceeded]));
        for bad in ["", "ok", "5xx", "internal unavailable"] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_limit_is_one_unless_it_is_set() {
        assert_eq!(http_retry(&of(&[])), Ok(None));
        // Zero means absent, and the other protocol's conditions are no part of the family.
        assert_eq!(http_retry(&of(&[(LIMIT, "0"), (TIMEOUT, "0s"), (GRPC, "cancelled")])), Ok(None));
        let retry = http_retry(&of(&[(TIMEOUT, "300ms")])).unwrap().unwrap();
        assert_eq!((retry.limit, retry.timeout), (1, Some(Duration::from_millis(300))));
        assert_eq!(http_retry(&of(&[(LIMIT, "3")])).unwrap().unwrap().limit, 3);
        for (name, bad) in [(LIMIT, "-1"), (LIMIT, "65536"), (LIMIT, "many"), (TIMEOUT, "1")] {
            let found = http_retry(&of(&[(name, bad)])).unwrap_err();
            assert!(found.len() == 1 && found[0].field.to_string().contains(name), "{name} {bad}: {found:?}");
        }
    }
}
