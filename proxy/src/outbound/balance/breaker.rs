//! Failure accrual: an endpoint whose responses fail gets no requests for a while, then one, which decides.
//!
//! ```text
//!             failures in a row, or a low success rate
//!   Open ──────────────────────────────────────────────► Ejected until ...
//!    ▲                                                    │        ▲
//!    │ the probe succeeds                     time over   ▼        │ the probe fails: twice as long
//!    └──────────────────────────────────────────────── Probation ──┘
//!                                     a probe that goes on for as long as a pause is joined by another
//! ```
//!
//! The rules are linkerd2-proxy's (`app/outbound/src/http/breaker`). The caller passes time and chance.

mod window;

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{discover::route::Accrual, request::classify::Answer};

use window::Window;

/// How a request to the endpoint ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Report {
    /// With a response, which its route takes for a failure or not.
    Answered {
        answer: Answer,
        /// Whether it is a failure.
        is_failure: bool,
    },
    /// Without a whole response, by the endpoint's fault.
    Failed,
}

/// What a report changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The endpoint gets no requests.
    Ejected,
    /// The endpoint gets requests again.
    Restored,
}

/// The state of one endpoint.
#[derive(Debug)]
pub(super) struct Breaker {
    rules: Arc<Accrual>,
    state: State,
    failures: u32,
    /// The latest responses, where their share of successes counts.
    window: Option<Window>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Open,
    /// Until then; how often it was ejected in a row.
    Ejected(Instant, u32),
    /// A request probes the endpoint, and is the only one until then; how often it was ejected, or probed once more, in
    /// a row.
    Probation(Instant, u32),
}

impl Report {
    fn is_failure(&self) -> bool {
        match self {
            Self::Answered { is_failure, .. } => *is_failure,
            Self::Failed => true,
        }
    }

    /// Whether it lowers the success rate: failures, and what says that the server is overloaded.
    fn lowers_rate(&self) -> bool {
        match self {
            Self::Answered { answer, is_failure } => *is_failure || answer.is_overloaded(),
            Self::Failed => true,
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Answered { answer, .. } => answer.retry_after,
            Self::Failed => None,
        }
    }
}

impl Breaker {
    pub(super) fn new(rules: Arc<Accrual>, now: Instant) -> Self {
        let window = rules.success_rate.as_ref().map(|rate| Window::new(rate.window, now));
        Self { rules, state: State::Open, failures: 0, window }
    }

    /// Until when the endpoint gets no request; `None` if it gets one now.
    pub(super) fn blocked_until(&self, now: Instant) -> Option<Instant> {
        match self.state {
            State::Open => None,
            State::Ejected(until, _) | State::Probation(until, _) => (until > now).then_some(until),
        }
    }

    /// Whether it was ejected and not restored.
    pub(super) fn is_ejected(&self) -> bool {
        self.state != State::Open
    }

    /// The endpoint gets a request, which is its probe unless it is open. Returns whether it is.
    ///
    /// A probe may be a stream that never ends: then the next one comes after the pause that would follow a failure.
    pub(super) fn picked(&mut self, now: Instant) -> bool {
        let times = match self.state {
            State::Open => return false,
            State::Ejected(_, times) => times,
            State::Probation(_, times) => times + 1,
        };
        self.state = State::Probation(now + self.rules.backoff.pause(times, 0.0), times);
        true
    }

    /// The probe was given up before its end was known. The next request is one.
    pub(super) fn abandoned(&mut self, now: Instant) -> bool {
        let State::Probation(_, times) = self.state else { return false };
        self.state = State::Ejected(now, times);
        true
    }

    /// A request ended. `may_eject` is whether enough other endpoints are left; `chance` is between 0 and 1.
    pub(super) fn report(&mut self, report: &Report, now: Instant, may_eject: bool, chance: f64) -> Option<Change> {
        match self.state {
            // An answer to an earlier request says nothing new.
            State::Ejected(..) => None,
            State::Probation(..) if self.is_restored_by(report) => {
                *self = Self::new(Arc::clone(&self.rules), now);
                Some(Change::Restored)
            }
            State::Probation(_, times) => {
                self.eject(times + 1, now, report.retry_after(), chance);
                None
            }
            State::Open => {
                self.count(report, now);
                if !self.is_tripped() || !may_eject {
                    return None;
                }
                self.eject(1, now, report.retry_after(), chance);
                Some(Change::Ejected)
            }
        }
    }

    fn count(&mut self, report: &Report, now: Instant) {
        self.failures = if report.is_failure() { self.failures.saturating_add(1) } else { 0 };
        if let Some(window) = &mut self.window {
            window.count(!report.lowers_rate(), now);
        }
    }

    fn is_tripped(&self) -> bool {
        let in_a_row = self.rules.max_failures.is_some_and(|max| self.failures >= max.get());
        let rarely = || self.window.as_ref().zip(self.rules.success_rate.as_ref());
        in_a_row || rarely().is_some_and(|(window, rate)| window.is_below(rate))
    }

    /// Where only failures in a row count, an overloaded server has answered; where the rate counts, it has to do
    /// better.
    fn is_restored_by(&self, report: &Report) -> bool {
        match (report, &self.rules.success_rate) {
            (_, None) => !report.is_failure(),
            (Report::Answered { answer, .. }, Some(_)) => {
                !report.lowers_rate()
                    && !answer.status.is_server_error()
                    && answer.grpc.is_none_or(|status| status == 0)
            }
            (Report::Failed, Some(_)) => false,
        }
    }

    fn eject(&mut self, times: u32, now: Instant, retry_after: Option<Duration>, chance: f64) {
        // What the server asks for counts for the first time only, and never shortens.
        let asked = retry_after.filter(|_| times == 1 && self.rules.honors_retry_after).unwrap_or_default();
        let pause = self.rules.backoff.pause(times, chance).max(asked.min(self.rules.backoff.max));
        self.state = State::Ejected(now + pause, times);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use http::StatusCode;

    use super::*;
    use crate::{discover::route::SuccessRate, request::backoff::Backoff};

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker(max_failures: u32, success_rate: Option<SuccessRate>) -> (Breaker, Instant) {
        let backoff = Backoff { min: SECOND, max: 60 * SECOND, jitter: 0.0 };
        let max_failures = NonZeroU32::new(max_failures);
        let now = Instant::now();
        (
            Breaker::new(
                Arc::new(Accrual { max_failures, success_rate, backoff, honors_retry_after: true, min_ready: 0 }),
                now,
            ),
            now,
        )
    }

    fn answered(status: u16, retry_after: Option<Duration>) -> Report {
        let status = StatusCode::from_u16(status).unwrap();
        Report::Answered { answer: Answer { status, grpc: None, retry_after }, is_failure: status.is_server_error() }
    }

    fn rate() -> SuccessRate {
        SuccessRate { threshold: 0.8, window: 10 * SECOND, min_requests: 5 }
    }

    #[test]
    fn failures_in_a_row_eject_and_a_success_begins_anew() {
        let (mut breaker, now) = breaker(3, None);
        for status in [500, 500, 200, 500, 500] {
            assert_eq!(breaker.report(&answered(status, None), now, true, 0.0), None);
        }
        assert_eq!(breaker.report(&Report::Failed, now, true, 0.0), Some(Change::Ejected));
        assert_eq!(breaker.blocked_until(now), Some(now + SECOND));
        assert_eq!(breaker.blocked_until(now + SECOND), None);
    }

    #[test]
    fn one_probe_decides_and_pauses_double() {
        let (mut breaker, mut now) = breaker(1, None);
        breaker.report(&answered(500, None), now, true, 0.0);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(breaker.blocked_until(now), Some(now + pause * SECOND));
            now += pause * SECOND;
            assert_eq!(breaker.blocked_until(now), None);
            breaker.picked(now);
            assert!(breaker.blocked_until(now).is_some(), "one request probes it");
            assert_eq!(breaker.report(&answered(503, None), now, true, 0.0), None);
        }
        now += 60 * SECOND;
        breaker.picked(now);
        assert_eq!(breaker.report(&answered(429, None), now, true, 0.0), Some(Change::Restored));
        assert_eq!(breaker.blocked_until(now), None);
    }

    #[test]
    fn an_abandoned_probe_lets_the_next_request_probe() {
        let (mut breaker, now) = breaker(1, None);
        breaker.report(&Report::Failed, now, true, 0.0);
        assert!(!breaker.abandoned(now), "no probe is under way");
        breaker.picked(now);
        assert!(breaker.abandoned(now));
        assert_eq!(breaker.blocked_until(now), None);
    }

    #[test]
    fn a_probe_that_goes_on_does_not_keep_others_away() {
        let (mut breaker, mut now) = breaker(1, None);
        assert!(!breaker.picked(now), "no probe");
        breaker.report(&Report::Failed, now, true, 0.0);
        for pause in [1, 1, 2, 4] {
            assert_eq!(breaker.blocked_until(now), Some(now + pause * SECOND));
            now += pause * SECOND;
            assert_eq!(breaker.blocked_until(now), None);
            assert!(breaker.picked(now));
        }
        assert_eq!(breaker.report(&answered(200, None), now, true, 0.0), Some(Change::Restored));
    }

    #[test]
    fn a_low_success_rate_ejects_after_its_first_requests() {
        let (mut breaker, mut now) = breaker(0, Some(rate()));
        for _ in 0..4 {
            now += SECOND;
            assert_eq!(breaker.report(&answered(429, None), now, true, 0.0), None, "too few to tell");
        }
        now += SECOND;
        assert_eq!(breaker.report(&answered(429, None), now, true, 0.0), Some(Change::Ejected));
        now += SECOND;
        breaker.picked(now);
        breaker.report(&answered(429, None), now, true, 0.0);
        assert_eq!(breaker.blocked_until(now), Some(now + 2 * SECOND), "429 does not restore it here");
    }

    #[test]
    fn a_burst_of_failures_ejects_as_soon_as_there_are_enough_requests() {
        // In a row they would not: what says that the server is overloaded counts for the share of successes alone.
        let exhausted = Answer { status: StatusCode::OK, grpc: Some(8), retry_after: None };
        for report in [
            Report::Failed,
            answered(500, None),
            answered(429, None),
            Report::Answered { answer: exhausted, is_failure: false },
        ] {
            let (mut breaker, mut now) = breaker(0, Some(rate()));
            for _ in 0..4 {
                now += Duration::from_micros(100);
                assert_eq!(breaker.report(&report, now, true, 0.0), None, "{report:?}");
            }
            assert_eq!(breaker.report(&report, now, true, 0.0), Some(Change::Ejected), "{report:?}");
        }
    }

    #[test]
    fn successes_before_a_burst_count_as_much_as_its_failures() {
        let (mut breaker, now) = breaker(0, Some(rate()));
        for _ in 0..100 {
            assert_eq!(breaker.report(&answered(200, None), now, true, 0.0), None);
        }
        // 100 of 125 are 0.8, 100 of 126 are less.
        for _ in 0..25 {
            assert_eq!(breaker.report(&answered(500, None), now, true, 0.0), None);
        }
        assert_eq!(breaker.report(&answered(500, None), now, true, 0.0), Some(Change::Ejected));
    }

    #[test]
    fn a_restored_endpoint_begins_with_an_empty_window() {
        let (mut breaker, mut now) = breaker(0, Some(rate()));
        for _ in 0..5 {
            breaker.report(&answered(500, None), now, true, 0.0);
        }
        now += SECOND;
        breaker.picked(now);
        assert_eq!(breaker.report(&answered(200, None), now, true, 0.0), Some(Change::Restored));
        for _ in 0..4 {
            assert_eq!(breaker.report(&answered(500, None), now, true, 0.0), None);
        }
        assert_eq!(breaker.report(&answered(500, None), now, true, 0.0), Some(Change::Ejected));
    }

    #[test]
    fn rare_failures_and_silence_do_not_eject() {
        let (mut breaker, mut now) = breaker(0, Some(rate()));
        for request in 0..200 {
            now += SECOND / 10;
            let status = if request % 20 == 0 { 500 } else { 200 };
            assert_eq!(breaker.report(&answered(status, None), now, true, 0.0), None);
        }
        now += 31 * SECOND;
        assert_eq!(breaker.report(&answered(500, None), now, true, 0.0), None, "the first answer after a silence");
    }

    #[test]
    fn a_server_that_asks_for_more_time_gets_it_once() {
        let (mut breaker, now) = breaker(0, Some(SuccessRate { min_requests: 1, ..rate() }));
        let busy = answered(429, Some(30 * SECOND));
        assert_eq!(breaker.report(&busy, now + 10 * SECOND, true, 0.0), Some(Change::Ejected));
        assert_eq!(breaker.blocked_until(now + 10 * SECOND), Some(now + 40 * SECOND));
        breaker.picked(now + 40 * SECOND);
        breaker.report(&busy, now + 40 * SECOND, true, 0.0);
        assert_eq!(breaker.blocked_until(now + 40 * SECOND), Some(now + 42 * SECOND));
    }

    #[test]
    fn a_failure_that_asks_for_more_time_gets_it() {
        let (mut breaker, now) = breaker(1, None);
        assert_eq!(breaker.report(&answered(503, Some(30 * SECOND)), now, true, 0.0), Some(Change::Ejected));
        assert_eq!(breaker.blocked_until(now), Some(now + 30 * SECOND));
    }

    #[test]
    fn the_last_endpoints_stay() {
        let (mut breaker, now) = breaker(1, None);
        assert_eq!(breaker.report(&Report::Failed, now, false, 0.0), None);
        assert_eq!(breaker.blocked_until(now), None);
    }
}
