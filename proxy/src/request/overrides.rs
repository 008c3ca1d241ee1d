//! The headers with which an application sets the terms of one request: `l5d-retry-*`, `l5d-timeout` and its relatives.
//!
//! They count only where the policy allows it, and are removed there; elsewhere they pass, as in Linkerd. A value that
//! cannot be read is as if it were absent.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use http::HeaderMap;

use super::{
    backoff::Backoff,
    terms::{GrpcCodes, MAX_REPLAY_BYTES, Retry, RetryWhen, Terms},
};
use crate::duration;

/// Retries if a request asks for some and does not say how many.
const RETRIES: u32 = 1;
/// The most retries that a header can ask for; a policy may allow more.
const MAX_RETRIES: u32 = 100;

/// What a request's headers ask for.
#[derive(Debug, Default)]
struct Asked {
    http: Option<Vec<RangeInclusive<u16>>>,
    grpc: Option<GrpcCodes>,
    limit: Option<u32>,
    per_try: Option<Duration>,
}

/// The terms of one request: the rule's, changed by its headers, which are removed.
pub(crate) fn apply(mut terms: Terms, headers: &mut HeaderMap) -> Terms {
    if !terms.allow_headers {
        return terms;
    }
    let mut limit = |name| take(headers, name).and_then(|value| duration::parse(&value));
    // The longer name wins.
    let (short, request) = (limit("l5d-timeout"), limit("l5d-request-timeout"));
    terms.timeouts.request = request.or(short).or(terms.timeouts.request);
    terms.timeouts.response = limit("l5d-response-timeout").or(terms.timeouts.response);
    let per_try = limit("l5d-retry-timeout");
    let asked = Asked {
        http: take(headers, "l5d-retry-http").map(|value| parse_statuses(&value)),
        grpc: take(headers, "l5d-retry-grpc").map(|value| parse_codes(&value)),
        limit: take(headers, "l5d-retry-limit").and_then(|value| value.parse().ok()).map(|n: u32| n.min(MAX_RETRIES)),
        per_try,
    };
    if asked.http.is_some() || asked.grpc.is_some() || asked.limit.is_some() || asked.per_try.is_some() {
        terms.retry = Some(Arc::new(asked.over(terms.retry.as_deref())));
    }
    terms
}

impl Asked {
    fn over(self, policy: Option<&Retry>) -> Retry {
        let Some(policy) = policy else {
            return Retry {
                when: RetryWhen::Status { http: self.http.unwrap_or_default(), grpc: self.grpc.unwrap_or_default() },
                limit: self.limit.unwrap_or(RETRIES),
                max_bytes: MAX_REPLAY_BYTES,
                timeout: self.per_try,
                backoff: Some(Backoff::RETRIES),
                budget: None,
            };
        };
        let when = match &policy.when {
            RetryWhen::Status { http, grpc } => {
                RetryWhen::Status { http: self.http.unwrap_or_else(|| http.clone()), grpc: self.grpc.unwrap_or(*grpc) }
            }
            failure @ RetryWhen::Failure(_) => failure.clone(),
        };
        Retry {
            when,
            limit: self.limit.unwrap_or(policy.limit),
            timeout: self.per_try.or(policy.timeout),
            ..policy.clone()
        }
    }
}

fn take(headers: &mut HeaderMap, name: &'static str) -> Option<String> {
    headers.remove(name)?.to_str().ok().map(str::to_owned)
}

/// Statuses, ranges of them and their names, separated by commas: `5xx`, `gateway-error`, `502-504`, `429`.
fn parse_statuses(text: &str) -> Vec<RangeInclusive<u16>> {
    let code = |text: &str| text.parse().ok().filter(|code| (100..600).contains(code));
    let one = |text: &str| match text.to_ascii_lowercase().as_str() {
        "5xx" => Some(500..=599),
        "gateway-error" => Some(502..=504),
        other => match other.split_once('-') {
            None => code(other).map(|code| code..=code),
            Some((from, to)) => code(from).zip(code(to)).filter(|(from, to)| from <= to).map(|(from, to)| from..=to),
        },
    };
    text.split(',').filter_map(|part| one(part.trim())).collect()
}

/// Names of gRPC statuses, separated by commas. Only those exist here that can be worth a retry, as in Linkerd.
fn parse_codes(text: &str) -> GrpcCodes {
    GrpcCodes::new(text.split(',').filter_map(|name| match name.trim().to_ascii_lowercase().as_str() {
        "cancelled" => Some(1),
        "deadline-exceeded" => Some(4),
        "resource-exhausted" => Some(8),
        "internal" => Some(13),
        "unavailable" => Some(14),
        _ => None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::terms::Timeouts;

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn allowing() -> Terms {
        Terms { allow_headers: true, ..Terms::default() }
    }

    #[test]
    fn headers_without_permission_pass_and_change_nothing() {
        let mut asked = headers(&[("l5d-retry-http", "5xx"), ("l5d-timeout", "1s")]);
        assert_eq!(apply(Terms::default(), &mut asked), Terms::default());
        assert_eq!(asked.len(), 2);
    }

    #[test]
    fn headers_make_a_policy_with_linkerds_defaults() {
        let mut asked = headers(&[("l5d-retry-http", "5xx, 429"), ("x-other", "1")]);
        let retry = apply(allowing(), &mut asked).retry.unwrap();
        assert_eq!(retry.when, RetryWhen::Status { http: vec![500..=599, 429..=429], grpc: GrpcCodes::default() });
        assert_eq!((retry.limit, retry.max_bytes, retry.backoff), (1, 64 * 1024, Some(Backoff::RETRIES)));
        assert_eq!(asked.keys().map(http::HeaderName::as_str).collect::<Vec<_>>(), ["x-other"]);
    }

    #[test]
    fn headers_change_a_policy_field_by_field() {
        let policy = Retry {
            when: RetryWhen::Status { http: vec![500..=599], grpc: GrpcCodes::new([14]) },
            limit: 3,
            max_bytes: 1024,
            timeout: Some(Duration::from_secs(1)),
            backoff: None,
            budget: None,
        };
        let terms = Terms { retry: Some(Arc::new(policy.clone())), ..allowing() };
        let mut asked = headers(&[
            ("l5d-retry-limit", "7"),
            ("l5d-retry-grpc", "internal,cancelled"),
            ("l5d-retry-timeout", "5ms"),
        ]);
        let changed = apply(terms.clone(), &mut asked).retry.unwrap();
        assert_eq!(changed.when, RetryWhen::Status { http: vec![500..=599], grpc: GrpcCodes::new([1, 13]) });
        assert_eq!((changed.limit, changed.timeout), (7, Some(Duration::from_millis(5))));
        assert_eq!((changed.max_bytes, changed.backoff), (1024, None));
        let mut many = headers(&[("l5d-retry-limit", "4000000000")]);
        assert_eq!(apply(terms, &mut many).retry.unwrap().limit, MAX_RETRIES);
    }

    #[test]
    fn timeouts_have_a_short_and_a_long_name() {
        let timeouts = |fields: &[(&'static str, &str)]| apply(allowing(), &mut headers(fields)).timeouts;
        let second = Some(Duration::from_secs(1));
        assert_eq!(timeouts(&[("l5d-timeout", "1s")]), Timeouts { request: second, ..Timeouts::default() });
        let both = timeouts(&[("l5d-timeout", "2s"), ("l5d-request-timeout", "1s")]);
        assert_eq!(both, Timeouts { request: second, ..Timeouts::default() });
        assert_eq!(timeouts(&[("l5d-response-timeout", "1000ms")]).response, second);
    }

    #[test]
    fn what_cannot_be_read_is_as_if_it_were_absent() {
        assert!(parse_statuses("600,abc,504-502,99-101,,").is_empty());
        assert_eq!(parse_statuses("Gateway-Error,200-299"), [502..=504, 200..=299]);
        assert_eq!(parse_codes("ok,permission-denied"), GrpcCodes::default());
    }
}
