//! Attempts, pauses and deadlines under random events, against a specification that looks at the whole history each
//! time.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use proptest::{collection::vec, option, prelude::*, sample::select};
use tokio::time::Instant;

use super::{
    attempts::{Attempts, Delivered, Next, Outcome},
    backoff::Backoff,
    classify::Answer,
    deadlines::{Deadlines, Expired},
    terms::{GrpcCodes, Retry, RetryWhen, Timeouts},
};

/// Something that happens to an attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Frame,
    Sent,
    Head,
}

/// When each limit expires, from all that has happened: `events` are in order, the first one later than the beginning.
fn specified(
    timeouts: Timeouts,
    head: Option<Duration>,
    arrived: Instant,
    begun: Instant,
    events: &[(Instant, Event)],
) -> Vec<(Instant, Expired)> {
    let first = |wanted: &[Event]| events.iter().find(|(_, event)| wanted.contains(event)).map(|(at, _)| *at);
    // A head before the request's end begins the response's time.
    let asked = first(&[Event::Sent, Event::Head]);
    let is_awaited = first(&[Event::Head]).is_none();
    let active = events.last().map_or(begun, |(at, _)| *at);
    let after = |start: Option<Instant>, limit: Option<Duration>| start?.checked_add(limit?);
    [
        (after(Some(arrived), timeouts.request), Expired::Request),
        (after(Some(arrived), timeouts.head).filter(|_| is_awaited), Expired::Profile),
        (after(asked, head).filter(|_| is_awaited), Expired::Head),
        (after(asked, timeouts.response), Expired::Response),
        (after(Some(active), timeouts.idle), Expired::Idle),
    ]
    .into_iter()
    .filter_map(|(at, what)| Some((at?, what)))
    .collect()
}

fn limit() -> impl Strategy<Value = Option<Duration>> {
    let milliseconds = prop_oneof![9 => 0..5_000_u64, 1 => Just(u64::MAX)];
    option::of(milliseconds.prop_map(Duration::from_millis))
}

fn timeouts() -> impl Strategy<Value = Timeouts> {
    (limit(), limit(), limit(), limit()).prop_map(|(request, head, response, idle)| Timeouts {
        request,
        head,
        response,
        idle,
    })
}

fn outcome() -> impl Strategy<Value = Outcome> {
    let answer = (select(&[200_u16, 404, 500, 503, 599][..]), option::of(select(&[0_u8, 2, 14][..])));
    let answered = answer.prop_map(|(status, grpc)| {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
        Outcome::Answered(Answer { status, grpc, retry_after: None })
    });
    prop_oneof![3 => answered, 1 => Just(Outcome::Retryable), 1 => Just(Outcome::Failed)]
}

proptest! {
    #[test]
    fn what_expires_next_follows_from_all_that_has_happened(
        timeouts in timeouts(),
        head in limit(),
        late in 0..2_000_u64,
        events in vec((0..1_000_u64, select(&[Event::Frame, Event::Sent, Event::Head][..])), 0..12),
    ) {
        let arrived = Instant::now();
        let begun = arrived + Duration::from_millis(late);
        let mut deadlines = Deadlines::new(timeouts, head, arrived, begun);
        let (mut now, mut happened) = (begun, Vec::new());
        for (pause, event) in events {
            now += Duration::from_millis(pause);
            match event {
                Event::Frame => deadlines.frame(now),
                Event::Sent => deadlines.request_sent(now),
                Event::Head => deadlines.head_received(now),
            }
            happened.push((now, event));
            let specified = specified(timeouts, head, arrived, begun, &happened);
            let first = specified.iter().map(|(at, _)| *at).min();
            let next = deadlines.next();
            prop_assert_eq!(next.map(|(at, _)| at), first);
            prop_assert!(next.is_none_or(|next| specified.contains(&next)), "{:?} of {:?}", next, specified);
        }
    }

    #[test]
    fn a_request_is_sent_again_while_it_helps_and_is_allowed(
        allowed in 0..5_u32,
        min in 0..100_u64,
        more in 0..100_u64,
        jitter in 0.0..3.0_f64,
        outcomes in vec((outcome(), prop::bool::weighted(0.9), 0.0..1.0_f64), 1..10),
    ) {
        let (min, max) = (Duration::from_millis(min), Duration::from_millis(min + more));
        let retry = Retry {
            when: RetryWhen::Status { http: vec![500..=599], grpc: GrpcCodes::new([14]) },
            limit: allowed,
            max_bytes: 0,
            timeout: Some(min),
            backoff: Some(Backoff { min, max, jitter }),
            budget: None,
        };
        let mut attempts = Attempts::new(Arc::new(retry));
        for (before, (outcome, is_replayable, chance)) in (0..).zip(outcomes) {
            prop_assert_eq!(attempts.repeated(), before);
            prop_assert_eq!(attempts.timeout().is_some(), before < allowed, "only the last attempt has all the time");
            let helps = match outcome {
                Outcome::Answered(answer) => answer.status.is_server_error() || answer.grpc == Some(14),
                Outcome::Retryable => true,
                Outcome::Failed => false,
            };
            let expected = match (helps, is_replayable) {
                (false, _) => Some(Delivered::Final),
                (true, false) => Some(Delivered::NotReplayable),
                (true, true) => (before >= allowed).then_some(Delivered::LimitExceeded),
            };
            match (attempts.judge(outcome, is_replayable, chance), expected) {
                (Next::Deliver(delivered), Some(expected)) => {
                    prop_assert_eq!(delivered, expected);
                    // The request is over.
                    break;
                }
                (Next::Again(pause), None) => {
                    let longest = max + max.mul_f64(jitter);
                    prop_assert!(pause >= min && pause <= longest, "{:?}", pause);
                }
                (next, expected) => prop_assert!(false, "{:?} instead of {:?}", next, expected),
            }
        }
    }

    #[test]
    fn pauses_are_finite_whatever_a_policy_says(
        min in any::<Duration>(),
        max in any::<Duration>(),
        jitter in prop_oneof![Just(f64::INFINITY), Just(f64::NAN), any::<f64>()],
        failures in any::<u32>(),
        chance in 0.0..=1.0_f64,
    ) {
        let backoff = Backoff { min, max: max.max(min), jitter };
        prop_assert!(backoff.pause(failures, chance) >= min);
    }
}
