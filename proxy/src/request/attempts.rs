//! Whether a request is sent again: one state machine for policies, headers and ServiceProfiles.

use std::{sync::Arc, time::Duration};

use super::{classify::Answer, terms::Retry};

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// With a response.
    Answered(Answer),
    /// Without one, because no endpoint was available, the endpoint refused the stream before it looked at it, or its
    /// head was not there in the time of an attempt.
    Retryable,
    /// Without one, for any other reason: the request may have had its effect, or another attempt would end alike.
    Failed,
}

/// What follows an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The outcome is the request's.
    Deliver(Delivered),
    /// The request is sent again after a pause.
    Again(Duration),
}

/// Why no attempt follows, for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    /// The outcome is what the route wants, or nothing that a repetition mends.
    Final,
    /// Repetitions are used up.
    LimitExceeded,
    /// The budget is empty.
    Overflow,
    /// The body is gone or was too large to keep.
    NotReplayable,
}

/// The attempts of one request.
#[derive(Debug)]
pub(crate) struct Attempts {
    retry: Arc<Retry>,
    repeated: u32,
}

impl Attempts {
    /// Before the first attempt.
    pub(crate) fn new(retry: Arc<Retry>) -> Self {
        Self { retry, repeated: 0 }
    }

    pub(crate) fn retry(&self) -> &Retry {
        &self.retry
    }

    /// How often the request was sent again.
    pub(crate) fn repeated(&self) -> u32 {
        self.repeated
    }

    /// How long the current attempt may take until the response's head. The last one has no limit of its own: nothing
    /// would be won.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.retry.timeout.filter(|_| self.repeated < self.retry.limit)
    }

    /// What follows an attempt with this outcome. `chance` is between 0 and 1.
    pub(crate) fn judge(&mut self, outcome: Outcome, is_replayable: bool, chance: f64) -> Next {
        let is_wanted = match outcome {
            Outcome::Answered(answer) => self.retry.when.matches(&answer),
            // A profile's retries are for responses alone, as in Linkerd.
            Outcome::Retryable => self.retry.budget.is_none(),
            Outcome::Failed => false,
        };
        if !is_wanted || !is_replayable {
            if let Some(budget) = &self.retry.budget {
                budget.deposit();
            }
            return Next::Deliver(if is_wanted { Delivered::NotReplayable } else { Delivered::Final });
        }
        if self.repeated >= self.retry.limit {
            return Next::Deliver(Delivered::LimitExceeded);
        }
        if self.retry.budget.as_ref().is_some_and(|budget| !budget.withdraw()) {
            return Next::Deliver(Delivered::Overflow);
        }
        self.repeated += 1;
        Next::Again(self.retry.backoff.map_or(Duration::ZERO, |backoff| backoff.pause(self.repeated, chance)))
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;
    use crate::request::{
        backoff::Backoff,
        classify::Classes,
        terms::{Budget, BudgetSettings, GrpcCodes, RetryWhen},
    };

    fn policy(limit: u32) -> Retry {
        Retry {
            when: RetryWhen::Status { http: vec![500..=599], grpc: GrpcCodes::new([14]) },
            limit,
            max_bytes: 1024,
            timeout: Some(Duration::from_millis(100)),
            backoff: Some(Backoff { min: Duration::from_millis(25), max: Duration::from_millis(40), jitter: 1.0 }),
            budget: None,
        }
    }

    fn answered(status: u16) -> Outcome {
        Outcome::Answered(Answer { status: StatusCode::from_u16(status).unwrap(), grpc: None, retry_after: None })
    }

    #[test]
    fn failures_are_repeated_up_to_the_limit_with_growing_pauses() {
        let mut attempts = Attempts::new(Arc::new(policy(2)));
        assert_eq!(attempts.judge(answered(503), true, 0.0), Next::Again(Duration::from_millis(25)));
        assert_eq!(attempts.judge(answered(503), true, 0.5), Next::Again(Duration::from_millis(60)));
        assert_eq!(attempts.judge(answered(503), true, 0.0), Next::Deliver(Delivered::LimitExceeded));
        assert_eq!(attempts.repeated(), 2);
    }

    #[test]
    fn what_the_route_wants_is_delivered() {
        let mut attempts = Attempts::new(Arc::new(policy(2)));
        assert_eq!(attempts.judge(answered(404), true, 0.0), Next::Deliver(Delivered::Final));
        assert_eq!(attempts.judge(Outcome::Failed, true, 0.0), Next::Deliver(Delivered::Final));
        assert_eq!(attempts.judge(answered(500), false, 0.0), Next::Deliver(Delivered::NotReplayable));
        assert!(matches!(attempts.judge(Outcome::Retryable, true, 0.0), Next::Again(_)));
    }

    #[test]
    fn the_last_attempt_has_no_time_of_its_own() {
        let mut attempts = Attempts::new(Arc::new(policy(1)));
        assert_eq!(attempts.timeout(), Some(Duration::from_millis(100)));
        attempts.judge(answered(500), true, 0.0);
        assert_eq!(attempts.timeout(), None);
    }

    #[test]
    fn a_profile_repeats_failures_while_its_budget_lasts() {
        let settings = BudgetSettings { ratio: 0.0, min_per_second: 1, ttl: Duration::from_secs(2) };
        let profile = Retry {
            when: RetryWhen::Failure(Classes::default()),
            limit: u32::MAX,
            timeout: None,
            backoff: None,
            budget: Budget::new(settings),
            ..policy(0)
        };
        let mut attempts = Attempts::new(Arc::new(profile));
        let mut repeated = 0;
        while let Next::Again(pause) = attempts.judge(answered(500), true, 0.0) {
            assert_eq!(pause, Duration::ZERO);
            repeated += 1;
            assert!(repeated < 100, "the budget never ends");
        }
        assert_eq!(repeated, 2, "one a second, for two seconds");
        assert_eq!(attempts.judge(answered(500), true, 0.0), Next::Deliver(Delivered::Overflow));
        assert_eq!(attempts.judge(Outcome::Retryable, true, 0.0), Next::Deliver(Delivered::Final));
    }
}
