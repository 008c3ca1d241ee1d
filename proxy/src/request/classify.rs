//! Which responses are failures.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, StatusCode, header::RETRY_AFTER};

/// A response, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The HTTP status.
    pub(crate) status: StatusCode,
    /// The gRPC status, from headers or trailers: 0 to 16.
    pub(crate) grpc: Option<u8>,
    /// How long the server asks clients to stay away (`Retry-After` in seconds, `grpc-retry-pushback-ms`).
    pub(crate) retry_after: Option<Duration>,
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_RETRY_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// gRPC's `UNKNOWN`.
const UNKNOWN: u8 = 2;
/// The last code that gRPC defines, `UNAUTHENTICATED`.
const LAST_CODE: u8 = 16;

/// The longest time away that a server can ask for: Linkerd's limit.
pub(crate) const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);

impl Answer {
    /// What a response's head says.
    pub(crate) fn of_head(status: StatusCode, headers: &HeaderMap) -> Self {
        Self { status, grpc: grpc_status(headers), retry_after: retry_after(status, headers) }
    }

    /// Adds what the trailers say.
    pub(crate) fn with_trailers(mut self, trailers: Option<&HeaderMap>) -> Self {
        if let Some(trailers) = trailers {
            self.grpc = self.grpc.or_else(|| grpc_status(trailers));
            self.retry_after = self.retry_after.or_else(|| retry_after(self.status, trailers));
        }
        self
    }

    /// Whether the server says that it has too much to do: 429 or RESOURCE_EXHAUSTED.
    pub(crate) fn is_overloaded(&self) -> bool {
        self.status == StatusCode::TOO_MANY_REQUESTS || self.grpc == Some(8)
    }

    /// Whether load balancing avoids the endpoint for a while: overloaded, 5xx, or one of gRPC's faults of the server.
    /// Permission denied (7) is none of them.
    pub(crate) fn is_penalized(&self) -> bool {
        self.is_overloaded()
            || self.status.is_server_error()
            || self.grpc.is_some_and(|status| matches!(status, 2 | 4 | 13 | 14 | 15))
    }
}

/// The classes of a route's responses. By default as Linkerd: HTTP 5xx fails; with gRPC, the statuses that are the
/// server's fault.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Classes(Option<Arc<[Class]>>);

/// Responses of a ServiceProfile's route that are alike.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Class {
    /// Which responses belong to it.
    pub(crate) condition: Condition,
    /// Whether they are failures.
    pub(crate) is_failure: bool,
}

/// A condition on a response.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Condition {
    /// Every one holds.
    All(Vec<Condition>),
    /// One holds.
    Any(Vec<Condition>),
    /// It does not hold.
    Not(Box<Condition>),
    /// The HTTP status is in the range.
    Status(RangeInclusive<u16>),
}

impl Classes {
    /// The classes of a ServiceProfile's route; the first that matches decides, and without one the default.
    pub(crate) fn of_profile(classes: Vec<Class>) -> Self {
        Self((!classes.is_empty()).then(|| classes.into()))
    }

    /// Whether a response is a failure.
    pub(crate) fn is_failure(&self, answer: &Answer) -> bool {
        let class = self.0.iter().flat_map(|classes| classes.iter()).find(|class| class.condition.holds(answer.status));
        match (class, answer.grpc) {
            (Some(class), _) => class.is_failure,
            (None, Some(status)) => is_grpc_failure(status),
            (None, None) => answer.status.is_server_error(),
        }
    }
}

impl Condition {
    fn holds(&self, status: StatusCode) -> bool {
        match self {
            Self::All(all) => all.iter().all(|one| one.holds(status)),
            Self::Any(any) => any.iter().any(|one| one.holds(status)),
            Self::Not(one) => !one.holds(status),
            Self::Status(range) => range.contains(&status.as_u16()),
        }
    }
}

/// The `grpc-status` in headers or trailers, if it is there and readable. As in Linkerd, a number that gRPC does not
/// define is `UNKNOWN`: servers choose it, and it becomes a label.
fn grpc_status(headers: &HeaderMap) -> Option<u8> {
    let number: u16 = headers.get(GRPC_STATUS)?.to_str().ok()?.parse().ok()?;
    Some(u8::try_from(number).ok().filter(|code| *code <= LAST_CODE).unwrap_or(UNKNOWN))
}

/// Linkerd's default: unknown, deadline exceeded, permission denied, internal, unavailable, data loss.
fn is_grpc_failure(status: u8) -> bool {
    matches!(status, 2 | 4 | 7 | 13 | 14 | 15)
}

/// As in Linkerd, `Retry-After` counts with 429 and 503. One with a date is not read: it would compare two hosts'
/// clocks.
fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let number = |name: HeaderName| headers.get(name)?.to_str().ok()?.trim().parse().ok();
    let is_asking = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let asked = if is_asking { number(RETRY_AFTER).map(Duration::from_secs) } else { None };
    let asked = asked.or_else(|| number(GRPC_RETRY_PUSHBACK).map(Duration::from_millis));
    asked.map(|asked| asked.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, grpc: Option<u8>) -> Answer {
        Answer { status: StatusCode::from_u16(status).unwrap(), grpc, retry_after: None }
    }

    #[test]
    fn failures_are_the_servers_faults() {
        let default = Classes::default();
        let grpc: Vec<u8> = (0..17).filter(|status| default.is_failure(&answer(200, Some(*status)))).collect();
        assert_eq!(grpc, [2, 4, 7, 13, 14, 15]);
        let http: Vec<u16> = [200, 301, 404, 429, 500, 503]
            .into_iter()
            .filter(|status| default.is_failure(&answer(*status, None)))
            .collect();
        assert_eq!(http, [500, 503]);
    }

    #[test]
    fn load_balancing_avoids_servers_with_faults_or_too_much_to_do() {
        let penalized = |answer: Answer| (answer.is_penalized(), answer.is_overloaded());
        let grpc: Vec<u8> = (0..17).filter(|status| penalized(answer(200, Some(*status))).0).collect();
        assert_eq!(grpc, [2, 4, 8, 13, 14, 15], "permission denied is the client's fault");
        let overloaded: Vec<u8> = (0..17).filter(|status| penalized(answer(200, Some(*status))).1).collect();
        assert_eq!(overloaded, [8]);
        for (status, expected) in [
            (200, (false, false)),
            (301, (false, false)),
            (400, (false, false)),
            (403, (false, false)),
            (404, (false, false)),
            (408, (false, false)),
            (429, (true, true)),
            (500, (true, false)),
            (503, (true, false)),
            (599, (true, false)),
        ] {
            assert_eq!(penalized(answer(status, None)), expected, "{status}");
        }
    }

    #[test]
    fn the_first_class_of_a_profile_decides() {
        let status = |range| Condition::Status(range);
        let classes = Classes::of_profile(vec![
            Class { condition: status(404..=404), is_failure: true },
            Class {
                condition: Condition::All(vec![status(500..=599), Condition::Not(Box::new(status(503..=503)))]),
                is_failure: false,
            },
            Class { condition: Condition::Any(vec![status(404..=404), status(418..=418)]), is_failure: false },
        ]);
        for (code, expected) in [(404, true), (500, false), (503, true), (418, false), (200, false)] {
            assert_eq!(classes.is_failure(&answer(code, None)), expected, "{code}");
        }
        assert!(classes.is_failure(&answer(200, Some(14))), "gRPC's status counts where no class matches");
    }

    #[test]
    fn a_class_of_a_profile_comes_before_the_status_of_grpc() {
        for is_failure in [false, true] {
            let classes = Classes::of_profile(vec![Class { condition: Condition::Status(200..=299), is_failure }]);
            for grpc in [None, Some(0), Some(14)] {
                assert_eq!(classes.is_failure(&answer(200, grpc)), is_failure, "{grpc:?}");
            }
        }
    }

    #[test]
    fn numbers_that_grpc_does_not_define_are_unknown_and_fail() {
        let read = |value: &str| {
            let headers: HeaderMap = [(GRPC_STATUS, value.parse().unwrap())].into_iter().collect();
            Answer::of_head(StatusCode::OK, &headers)
        };
        for (value, status, is_failure) in [
            ("0", Some(0), false),
            ("16", Some(16), false),
            ("17", Some(2), true),
            ("255", Some(2), true),
            ("256", Some(2), true),
            ("65535", Some(2), true),
            ("65536", None, false),
            ("-1", None, false),
            ("many", None, false),
        ] {
            let answer = read(value);
            assert_eq!((answer.grpc, Classes::default().is_failure(&answer)), (status, is_failure), "{value}");
        }
    }

    #[test]
    fn servers_ask_for_a_time_away_of_five_minutes_at_most() {
        let asked = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            Answer::of_head(StatusCode::TOO_MANY_REQUESTS, &headers).retry_after
        };
        assert_eq!(asked("retry-after", "7"), Some(Duration::from_secs(7)));
        assert_eq!(asked("retry-after", "86400"), Some(Duration::from_secs(300)));
        assert_eq!(asked("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT"), None);
        let headers = HeaderMap::from_iter([(RETRY_AFTER, http::HeaderValue::from_static("7"))]);
        let of_error = Answer::of_head(StatusCode::INTERNAL_SERVER_ERROR, &headers);
        assert_eq!(of_error.retry_after, None, "another error does not ask for it");
        assert_eq!(asked("grpc-retry-pushback-ms", "1500"), Some(Duration::from_millis(1500)));
        assert_eq!(asked("grpc-retry-pushback-ms", "-1"), None);
    }
}
