//! Parses what policies say about time, repetition and load: timeouts, retries, failure accrual, load estimation.

use std::{num::NonZeroU32, ops::RangeInclusive, sync::Arc};

use weft_proto::linkerd::{
    http_route,
    outbound::{self, backend::balance_p2c, failure_accrual},
};

use super::{Accrual, Load, Penalty, SuccessRate, error::PolicyError};
use crate::{
    request::{
        backoff::Backoff,
        terms::{GrpcCodes, MAX_REPLAY_BYTES, Retry, RetryWhen, Timeouts},
    },
    route::proto::duration,
};

type ProtoDuration = prost_types::Duration;

/// Parses a rule's timeouts. Older controllers send the response's alone, in a field of the rule.
pub(super) fn read_timeouts(
    message: Option<http_route::Timeouts>,
    older: Option<ProtoDuration>,
) -> Result<Timeouts, PolicyError> {
    let message = message.unwrap_or_default();
    Ok(Timeouts {
        request: duration(message.request, "request timeout")?,
        head: None,
        response: duration(message.response.or(older), "response timeout")?,
        idle: duration(message.idle, "idle timeout")?,
    })
}

/// Parses the retries of an HTTP route.
pub(super) fn read_http_retry(message: outbound::http_route::Retry) -> Result<Retry, PolicyError> {
    let range = |range: outbound::http_route::retry::conditions::StatusRange| {
        let code = |code: u32| u16::try_from(code).ok().filter(|code| (100..600).contains(code));
        let (from, to) = code(range.start).zip(code(range.end)).ok_or(PolicyError::Range("status range of retries"))?;
        Ok(RangeInclusive::new(from, to))
    };
    let ranges = message.conditions.unwrap_or_default().status_ranges;
    let http = ranges.into_iter().map(range).collect::<Result<_, PolicyError>>()?;
    Ok(Retry {
        when: RetryWhen::Status { http, grpc: GrpcCodes::default() },
        limit: message.max_retries,
        max_bytes: replay_bytes(message.max_request_bytes),
        timeout: duration(message.timeout, "timeout of an attempt")?,
        backoff: message.backoff.map(read_backoff).transpose()?,
        budget: None,
    })
}

/// Parses the retries of a gRPC route.
pub(super) fn read_grpc_retry(message: outbound::grpc_route::Retry) -> Result<Retry, PolicyError> {
    let conditions = message.conditions.unwrap_or_default();
    let codes = [
        (1, conditions.cancelled),
        (4, conditions.deadine_exceeded),
        (8, conditions.resource_exhausted),
        (13, conditions.internal),
        (14, conditions.unavailable),
    ];
    let grpc = GrpcCodes::new(codes.into_iter().filter_map(|(code, is_set)| is_set.then_some(code)));
    Ok(Retry {
        when: RetryWhen::Status { http: Vec::new(), grpc },
        limit: message.max_retries,
        max_bytes: replay_bytes(message.max_request_bytes),
        timeout: duration(message.timeout, "timeout of an attempt")?,
        backoff: message.backoff.map(read_backoff).transpose()?,
        budget: None,
    })
}

/// Parses failure accrual; `None` if no endpoint is ever left out.
pub(super) fn read_accrual(message: Option<outbound::FailureAccrual>) -> Result<Option<Arc<Accrual>>, PolicyError> {
    let Some(outbound::FailureAccrual { kind: Some(kind), ejection }) = message else { return Ok(None) };
    let (max_failures, success_rate, backoff) = match kind {
        failure_accrual::Kind::ConsecutiveFailures(failures) => (failures.max_failures, None, failures.backoff),
        failure_accrual::Kind::Unified(unified) => {
            let threshold = unified.success_rate_threshold;
            if !(0.0..=1.0).contains(&threshold) {
                return Err(PolicyError::Range("success rate of failure accrual"));
            }
            // The message is older than linkerd2-proxy's window, whose length its `decay` became.
            let window = duration(unified.decay, "window of the success rate")?;
            let window = window.unwrap_or(SuccessRate::DEFAULT_WINDOW).max(SuccessRate::SHORTEST_WINDOW);
            let rate = SuccessRate { threshold, window, min_requests: unified.min_requests };
            (unified.max_consecutive_failures, (threshold > 0.0).then_some(rate), unified.backoff)
        }
    };
    let backoff = backoff.ok_or(PolicyError::Missing("back-off of failure accrual"))?;
    let honors_retry_after = backoff.respect_retry_after_hint;
    let backoff = read_backoff(backoff)?;
    let max_failures = NonZeroU32::new(max_failures);
    if max_failures.is_none() && success_rate.is_none() {
        return Ok(None);
    }
    let min_ready = ejection.map_or(0, |ejection| ejection.min_ready_endpoints);
    Ok(Some(Arc::new(Accrual { max_failures, success_rate, backoff, honors_retry_after, min_ready })))
}

/// Parses how a balancer estimates load.
pub(super) fn read_load(message: Option<balance_p2c::Load>) -> Result<Load, PolicyError> {
    let window = |message, name, default| {
        Ok::<_, PolicyError>(duration(message, name)?.filter(|decay| !decay.is_zero()).unwrap_or(default))
    };
    let load = |default_rtt, decay, penalty| {
        let default_rtt = duration(default_rtt, "default round trip time")?.unwrap_or(Load::DEFAULT.default_rtt);
        Ok(Load { default_rtt, decay: window(decay, "decay of load", Load::DEFAULT.decay)?, penalty })
    };
    match message {
        None => Ok(Load::DEFAULT),
        Some(balance_p2c::Load::PeakEwma(peak)) => load(peak.default_rtt, peak.decay, None),
        Some(balance_p2c::Load::PenaltyPeakEwma(peak)) => {
            let default = Penalty::DEFAULT;
            let penalty = Penalty {
                penalty: window(peak.penalty, "penalty of load", default.penalty)?,
                max_retry_after: window(peak.max_retry_after, "longest Retry-After", default.max_retry_after)?,
                decay: window(peak.penalty_decay, "decay of the penalty", default.decay)?,
            };
            load(peak.default_rtt, peak.decay, Some(penalty))
        }
    }
}

fn read_backoff(message: outbound::ExponentialBackoff) -> Result<Backoff, PolicyError> {
    let min = duration(message.min_backoff, "shortest back-off")?.unwrap_or_default();
    let max = duration(message.max_backoff, "longest back-off")?.unwrap_or_default();
    let jitter = f64::from(message.jitter_ratio);
    if min.is_zero() || max < min || !(0.0..=100.0).contains(&jitter) {
        return Err(PolicyError::Range("back-off"));
    }
    Ok(Backoff { min, max, jitter })
}

fn replay_bytes(bytes: u32) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX).min(MAX_REPLAY_BYTES)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn second() -> Option<ProtoDuration> {
        Duration::from_secs(1).try_into().ok()
    }

    fn backoff() -> Option<outbound::ExponentialBackoff> {
        let max_backoff = Duration::from_secs(60).try_into().ok();
        Some(outbound::ExponentialBackoff {
            min_backoff: second(),
            max_backoff,
            jitter_ratio: 0.5,
            respect_retry_after_hint: false,
        })
    }

    #[test]
    fn retries_keep_their_conditions_and_bounds() {
        use outbound::http_route::{
            Retry,
            retry::{Conditions, conditions::StatusRange},
        };
        let retry = |start, end, max_request_bytes| {
            let conditions = Some(Conditions { status_ranges: vec![StatusRange { start, end }] });
            read_http_retry(Retry {
                max_retries: 2,
                max_request_bytes,
                conditions,
                timeout: second(),
                backoff: backoff(),
            })
        };
        let read = retry(500, 599, 1 << 30).unwrap();
        assert_eq!(read.when, RetryWhen::Status { http: vec![500..=599], grpc: GrpcCodes::default() });
        assert_eq!((read.limit, read.max_bytes, read.timeout), (2, 64 * 1024, Some(Duration::from_secs(1))));
        assert!(retry(500, 70_000, 0).is_err() && retry(0, 599, 0).is_err());
    }

    #[test]
    fn grpc_conditions_are_codes() {
        use outbound::grpc_route::{Retry, retry::Conditions};
        let conditions = Some(Conditions { deadine_exceeded: true, unavailable: true, ..Default::default() });
        let read = read_grpc_retry(Retry { conditions, max_retries: 1, ..Default::default() }).unwrap();
        assert_eq!(read.when, RetryWhen::Status { http: vec![], grpc: GrpcCodes::new([4, 14]) });
    }

    #[test]
    fn accrual_with_nothing_to_count_is_none() {
        let consecutive = |max_failures, backoff| {
            let failures = failure_accrual::ConsecutiveFailures { max_failures, backoff };
            let kind = Some(failure_accrual::Kind::ConsecutiveFailures(failures));
            read_accrual(Some(outbound::FailureAccrual { kind, ejection: None }))
        };
        assert_eq!(consecutive(7, backoff()).unwrap().unwrap().max_failures, NonZeroU32::new(7));
        assert!(consecutive(0, backoff()).unwrap().is_none());
        assert!(consecutive(7, None).is_err(), "without a back-off an endpoint would never come back");
        assert!(read_accrual(None).unwrap().is_none());
    }

    #[test]
    fn unified_accrual_measures_a_share_of_successes() {
        let unified_over = |success_rate_threshold, decay| {
            let unified = failure_accrual::Unified {
                success_rate_threshold,
                decay,
                min_requests: 5,
                max_consecutive_failures: 0,
                backoff: backoff(),
            };
            let kind = Some(failure_accrual::Kind::Unified(unified));
            let ejection = Some(outbound::EjectionConfig { min_ready_endpoints: 2 });
            read_accrual(Some(outbound::FailureAccrual { kind, ejection }))
        };
        let unified = |threshold| unified_over(threshold, second());
        let read = unified(0.8).unwrap().unwrap();
        let rate = SuccessRate { threshold: 0.8, window: Duration::from_secs(1), min_requests: 5 };
        assert_eq!((read.success_rate, read.max_failures, read.min_ready), (Some(rate), None, 2));
        assert!(unified(0.0).unwrap().is_none());
        assert!(unified(1.5).is_err() && unified(f64::NAN).is_err());
        let window = |decay| unified_over(0.8, decay).unwrap().unwrap().success_rate.unwrap().window;
        assert_eq!(window(None), Duration::from_secs(10));
        assert_eq!(window(Some(Default::default())), Duration::from_millis(10));
    }

    #[test]
    fn penalties_have_linkerds_defaults() {
        assert_eq!(read_load(None).unwrap(), Load::DEFAULT);
        let penalizing = read_load(Some(balance_p2c::Load::PenaltyPeakEwma(Default::default()))).unwrap();
        assert_eq!(penalizing, Load { penalty: Some(Penalty::DEFAULT), ..Load::DEFAULT });
    }

    #[test]
    fn a_back_off_that_cannot_be_is_an_error() {
        let broken = |change: &dyn Fn(&mut outbound::ExponentialBackoff)| {
            let mut message = backoff().unwrap();
            change(&mut message);
            read_backoff(message).is_err()
        };
        assert!(!broken(&|_| {}));
        assert!(broken(&|backoff| backoff.min_backoff = None));
        assert!(broken(&|backoff| backoff.max_backoff = None));
        assert!(broken(&|backoff| backoff.jitter_ratio = f32::NAN));
        assert!(broken(&|backoff| backoff.jitter_ratio = -0.5));
    }
}
