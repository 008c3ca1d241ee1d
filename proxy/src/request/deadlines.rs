//! When one attempt of a request has taken too long: what expires next follows from what has happened so far.

use std::time::Duration;

use tokio::time::Instant;

use super::terms::Timeouts;

/// What has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Expired {
    /// The time of the request, with all attempts.
    #[error("request timed out")]
    Request,
    /// The time that a ServiceProfile's route has until the response's head, with all attempts.
    #[error("request timed out")]
    Profile,
    /// The time of this attempt until the response's head.
    #[error("timed out waiting for response headers")]
    Head,
    /// The time from the request's end to the response's end.
    #[error("response timed out")]
    Response,
    /// The time without a frame in either direction; a frame that waits for its client counts.
    #[error("stream idle for too long")]
    Idle,
}

/// The progress of an attempt against its limits.
#[derive(Debug)]
pub(crate) struct Deadlines {
    request: Option<Instant>,
    /// By when a ServiceProfile's route wants the response's head, whatever the attempt.
    profile: Option<Instant>,
    head: Option<Duration>,
    response: Option<Duration>,
    idle: Option<Duration>,
    /// When the request's end was sent.
    sent: Option<Instant>,
    /// When the last frame passed.
    active: Instant,
}

impl Timeouts {
    /// By when a request that arrived then has to be answered, and what expires else.
    pub(crate) fn answer_by(&self, arrived: Instant) -> Option<(Instant, Expired)> {
        // A sum that does not fit is no limit.
        let until = |limit: Option<Duration>, what| Some((arrived.checked_add(limit?)?, what));
        let limits = [until(self.request, Expired::Request), until(self.head, Expired::Profile)];
        limits.into_iter().flatten().min_by_key(|(at, _)| *at)
    }
}

impl Deadlines {
    /// An attempt that begins now; `head` is its limit until the response's head. The request's time began when it
    /// arrived.
    pub(crate) fn new(timeouts: Timeouts, head: Option<Duration>, arrived: Instant, now: Instant) -> Self {
        Self {
            // A sum that does not fit is no limit.
            request: timeouts.request.and_then(|limit| arrived.checked_add(limit)),
            profile: timeouts.head.and_then(|limit| arrived.checked_add(limit)),
            head,
            response: timeouts.response,
            idle: timeouts.idle,
            sent: None,
            active: now,
        }
    }

    /// A frame passed, in either direction.
    pub(crate) fn frame(&mut self, now: Instant) {
        self.active = now;
    }

    /// The request's end was sent.
    pub(crate) fn request_sent(&mut self, now: Instant) {
        self.active = now;
        self.sent.get_or_insert(now);
    }

    /// The response's head is there. Where it comes before the request's end, the time of the response begins with it.
    pub(crate) fn head_received(&mut self, now: Instant) {
        self.request_sent(now);
        self.head = None;
        self.profile = None;
    }

    /// What expires first, and when, if nothing else happens.
    pub(crate) fn next(&self) -> Option<(Instant, Expired)> {
        let after = |start: Option<Instant>, limit: Option<Duration>| start?.checked_add(limit?);
        [
            (self.request, Expired::Request),
            (self.profile, Expired::Profile),
            (after(self.sent, self.head), Expired::Head),
            (after(self.sent, self.response), Expired::Response),
            (after(Some(self.active), self.idle), Expired::Idle),
        ]
        .into_iter()
        .filter_map(|(at, what)| Some((at?, what)))
        .min_by_key(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn without_limits_nothing_expires() {
        let now = Instant::now();
        let mut deadlines = Deadlines::new(Timeouts::default(), None, now, now);
        deadlines.head_received(now);
        assert_eq!(deadlines.next(), None);
        let max = Some(Duration::MAX);
        let forever = Timeouts { request: max, head: max, response: max, idle: max };
        assert_eq!(Deadlines::new(forever, Some(Duration::MAX), now, now).next(), None);
    }

    #[test]
    fn the_requests_time_goes_on_over_attempts() {
        let now = Instant::now();
        let timeouts = Timeouts { request: Some(seconds(5)), ..Timeouts::default() };
        let second = Deadlines::new(timeouts, None, now, now + seconds(3));
        assert_eq!(second.next(), Some((now + seconds(5), Expired::Request)));
    }

    #[test]
    fn a_profiles_time_ends_with_the_head() {
        let now = Instant::now();
        let mut deadlines = Deadlines::new(Timeouts { head: Some(seconds(5)), ..Timeouts::default() }, None, now, now);
        assert_eq!(deadlines.next(), Some((now + seconds(5), Expired::Profile)));
        deadlines.head_received(now + seconds(1));
        assert_eq!(deadlines.next(), None, "a stream may go on");
    }

    #[test]
    fn head_and_response_count_from_the_requests_end() {
        let now = Instant::now();
        let timeouts = Timeouts { response: Some(seconds(9)), ..Timeouts::default() };
        let mut deadlines = Deadlines::new(timeouts, Some(seconds(2)), now, now);
        assert_eq!(deadlines.next(), None, "the client is still sending");
        deadlines.request_sent(now + seconds(10));
        assert_eq!(deadlines.next(), Some((now + seconds(12), Expired::Head)));
        deadlines.head_received(now + seconds(11));
        assert_eq!(deadlines.next(), Some((now + seconds(19), Expired::Response)));
    }

    #[test]
    fn an_early_head_begins_the_responses_time() {
        let now = Instant::now();
        let mut deadlines =
            Deadlines::new(Timeouts { response: Some(seconds(9)), ..Timeouts::default() }, None, now, now);
        deadlines.head_received(now + seconds(1));
        deadlines.request_sent(now + seconds(5));
        assert_eq!(deadlines.next(), Some((now + seconds(10), Expired::Response)));
    }

    #[test]
    fn frames_in_either_direction_put_idleness_off() {
        let now = Instant::now();
        let mut deadlines = Deadlines::new(Timeouts { idle: Some(seconds(2)), ..Timeouts::default() }, None, now, now);
        assert_eq!(deadlines.next(), Some((now + seconds(2), Expired::Idle)));
        deadlines.frame(now + seconds(1));
        assert_eq!(deadlines.next(), Some((now + seconds(3), Expired::Idle)));
    }
}
