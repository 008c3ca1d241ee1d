//! What a route grants a request: how long it may take, and whether it may be sent again.

use std::{fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use http::StatusCode;
use tower::retry::budget::{Budget as _, TpsBudget};

use super::{
    backoff::Backoff,
    classify::{Answer, Classes},
};

/// The largest request body that is kept for another attempt, whatever a policy says: Linkerd's 64 KiB.
pub(crate) const MAX_REPLAY_BYTES: usize = 64 * 1024;

/// The terms of a route's rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Terms {
    /// Limits in time.
    pub(crate) timeouts: Timeouts,
    /// Which requests are sent again.
    pub(crate) retry: Option<Arc<Retry>>,
    /// Whether a request's `l5d-retry-*` and `l5d-*-timeout` headers change these terms.
    pub(crate) allow_headers: bool,
    /// Which responses are failures.
    pub(crate) classes: Classes,
}

/// Limits in time of one request and its response; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// From the request's arrival to the end of the response, all attempts together.
    pub(crate) request: Option<Duration>,
    /// From the request's arrival to the response's head, all attempts together: the timeout of a ServiceProfile's
    /// route.
    pub(crate) head: Option<Duration>,
    /// From the end of the request to the end of the response, of one attempt.
    pub(crate) response: Option<Duration>,
    /// Between two frames in either direction.
    pub(crate) idle: Option<Duration>,
}

/// When a request is sent again, and how often.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Retry {
    /// Which responses are not delivered.
    pub(crate) when: RetryWhen,
    /// The most repetitions of one request.
    pub(crate) limit: u32,
    /// The largest request body, in bytes; at most [`MAX_REPLAY_BYTES`].
    pub(crate) max_bytes: usize,
    /// How long an attempt may take until the response's head, except the last one.
    pub(crate) timeout: Option<Duration>,
    /// Pauses between attempts.
    pub(crate) backoff: Option<Backoff>,
    /// What all requests of a ServiceProfile share.
    pub(crate) budget: Option<Budget>,
}

/// Which responses are not delivered while the request can be sent again.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RetryWhen {
    /// Those of a policy.
    Status {
        /// HTTP statuses.
        http: Vec<RangeInclusive<u16>>,
        /// gRPC statuses.
        grpc: GrpcCodes,
    },
    /// Those that a ServiceProfile's route classifies as failures.
    Failure(Classes),
}

/// A set of gRPC statuses from 0 to 16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GrpcCodes(u32);

/// How many requests may be sent again in relation to those that are sent; clones share it.
#[derive(Clone)]
pub(crate) struct Budget {
    tokens: Arc<TpsBudget>,
    settings: BudgetSettings,
}

/// The settings of a budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BudgetSettings {
    /// Retries per request; 0.2 is one for five.
    pub(crate) ratio: f32,
    /// Retries per second that are always allowed.
    pub(crate) min_per_second: u32,
    /// How long a request counts, from 1 to 60 s.
    pub(crate) ttl: Duration,
}

impl RetryWhen {
    /// Whether a response with this end is not delivered.
    pub(crate) fn matches(&self, answer: &Answer) -> bool {
        match self {
            Self::Status { http, grpc } => {
                answer.grpc.is_some_and(|code| grpc.contains(code))
                    || http.iter().any(|range| range.contains(&answer.status.as_u16()))
            }
            Self::Failure(classes) => classes.is_failure(answer),
        }
    }

    /// Whether the trailers of a response with this status can matter; `is_grpc` is what its head says.
    pub(crate) fn reads_trailers(&self, status: StatusCode, is_grpc: bool) -> bool {
        let reads_grpc = match self {
            Self::Status { grpc, .. } => *grpc != GrpcCodes::default(),
            // Other responses have their status in the head, and their streams must not wait for a first frame.
            Self::Failure(_) => is_grpc,
        };
        reads_grpc && status == StatusCode::OK
    }
}

impl GrpcCodes {
    /// The codes of a list; those above 16 do not exist.
    pub(crate) fn new(codes: impl IntoIterator<Item = u8>) -> Self {
        Self(codes.into_iter().filter(|code| *code <= 16).fold(0, |set, code| set | 1 << code))
    }

    /// Whether a code is in the set.
    pub(crate) fn contains(self, code: u8) -> bool {
        code <= 16 && self.0 & (1 << code) != 0
    }
}

impl Budget {
    /// A full budget; `None` if a setting is out of range.
    pub(crate) fn new(settings: BudgetSettings) -> Option<Self> {
        let BudgetSettings { ratio, min_per_second, ttl } = settings;
        let ttl_fits = (Duration::from_secs(1)..=Duration::from_secs(60)).contains(&ttl);
        let fits = ttl_fits && (0.0..=1000.0).contains(&ratio) && i32::try_from(min_per_second).is_ok();
        fits.then(|| Self { tokens: Arc::new(TpsBudget::new(ttl, min_per_second, ratio)), settings })
    }

    /// Counts a request that is not sent again.
    pub(super) fn deposit(&self) {
        self.tokens.deposit();
    }

    /// Takes one retry, if there is one left.
    pub(super) fn withdraw(&self) -> bool {
        self.tokens.withdraw()
    }
}

impl PartialEq for Budget {
    fn eq(&self, other: &Self) -> bool {
        self.settings == other.settings
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_out_of_range_is_none() {
        let settings = BudgetSettings { ratio: 0.2, min_per_second: 10, ttl: Duration::from_secs(10) };
        assert!(Budget::new(settings).is_some());
        for broken in [
            BudgetSettings { ratio: f32::NAN, ..settings },
            BudgetSettings { ratio: -0.1, ..settings },
            BudgetSettings { ratio: 1000.5, ..settings },
            BudgetSettings { min_per_second: u32::MAX, ..settings },
            BudgetSettings { ttl: Duration::from_millis(999), ..settings },
            BudgetSettings { ttl: Duration::from_secs(61), ..settings },
        ] {
            assert!(Budget::new(broken).is_none(), "{broken:?}");
        }
    }

    #[test]
    fn conditions_are_statuses_of_http_or_grpc() {
        let when = RetryWhen::Status { http: vec![502..=504], grpc: GrpcCodes::new([8, 14, 200]) };
        let answer = |status, grpc| Answer { status: StatusCode::from_u16(status).unwrap(), grpc, retry_after: None };
        for (status, grpc, expected) in [
            (503, None, true),
            (500, None, false),
            (200, Some(14), true),
            (200, Some(13), false),
            (200, Some(200), false),
            (504, Some(0), true),
        ] {
            assert_eq!(when.matches(&answer(status, grpc)), expected, "{status} {grpc:?}");
        }
        let http = RetryWhen::Status { http: vec![500..=599], grpc: GrpcCodes::default() };
        let profile = RetryWhen::Failure(Classes::default());
        for (name, when, of_http, of_grpc) in
            [("gRPC", &when, true, true), ("HTTP", &http, false, false), ("profile", &profile, false, true)]
        {
            let reads = [false, true].map(|is_grpc| when.reads_trailers(StatusCode::OK, is_grpc));
            assert_eq!(reads, [of_http, of_grpc], "{name}");
            assert!(!when.reads_trailers(StatusCode::NOT_FOUND, true), "{name}");
        }
    }
}
