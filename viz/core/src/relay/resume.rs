//! A tap that outlives the pod of weft-viz that began it: when that pod ends, another one is asked for the same.
//!
//! Each change of pod is a problem event, so that every reader shows it.

use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use tokio::time::{Instant, sleep};
use tonic::{Code, Status};
use weft_proto::viz::{TapEvent, tap_event};

use crate::rpc::TapStream;

/// How long another pod is looked for: a roll-out starts it before the old one ends, an eviction afterwards.
const WITHIN: Duration = Duration::from_secs(120);
/// The pause before each attempt.
const PAUSE: Duration = Duration::from_secs(1);

/// The events of a tap that has begun, and of those that follow it, which `open` begins.
pub(super) fn resumed<O, F>(open: O, first: TapStream) -> impl Stream<Item = Result<TapEvent, Status>> + Send
where
    O: Fn() -> F + Send,
    F: Future<Output = Result<TapStream, Status>> + Send,
{
    stream::unfold(Some(Resumed { open, events: Some(first) }), |state| async {
        let mut tap = state?;
        match tap.next().await {
            Ok(event) => Some((Ok(event), Some(tap))),
            Err(status) => Some((Err(status), None)),
        }
    })
}

struct Resumed<O> {
    open: O,
    /// `None` while another pod is looked for.
    events: Option<TapStream>,
}

impl<O, F> Resumed<O>
where
    O: Fn() -> F,
    F: Future<Output = Result<TapStream, Status>>,
{
    async fn next(&mut self) -> Result<TapEvent, Status> {
        if let Some(events) = &mut self.events {
            let ended = match events.next().await {
                Some(Ok(event)) => return Ok(event),
                Some(Err(status)) if is_of_the_pod(&status) => status.message().to_owned(),
                Some(Err(status)) => return Err(status),
                None => "it ended the tap".to_owned(),
            };
            self.events = None;
            return Ok(remark(format!("{ended}; another pod of it is asked")));
        }
        let deadline = Instant::now() + WITHIN;
        loop {
            sleep(PAUSE).await;
            match (self.open)().await {
                Ok(events) => {
                    self.events = Some(events);
                    return Ok(remark("the tap goes on; requests in between are not shown".to_owned()));
                }
                Err(status) if is_of_the_pod(&status) && Instant::now() < deadline => {}
                Err(status) => return Err(status),
            }
        }
    }
}

/// Whether a failure is that of a pod or of the way to it, and not an answer to this caller.
fn is_of_the_pod(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled)
}

fn remark(why: String) -> TapEvent {
    TapEvent {
        namespace: super::NAMESPACE.to_owned(),
        pod: "weft-viz".to_owned(),
        event: Some(tap_event::Event::Problem(why)),
        ..TapEvent::default()
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Mutex};

    use super::*;

    type Events = Vec<Result<TapEvent, Status>>;

    fn event(id: &str) -> Result<TapEvent, Status> {
        Ok(TapEvent { id: id.to_owned(), ..TapEvent::default() })
    }

    fn tap(events: Events) -> TapStream {
        Box::pin(stream::iter(events))
    }

    /// What a reader sees of a tap and of the attempts that follow, after which no pod is ready: ids, remarks, and the
    /// code at the end.
    async fn seen(first: Events, then: impl IntoIterator<Item = Result<Events, Status>>) -> Vec<String> {
        let then: Mutex<VecDeque<_>> = Mutex::new(then.into_iter().collect());
        let open = || {
            let next = then.lock().unwrap().pop_front();
            let next = next.unwrap_or_else(|| Err(Status::unavailable("no pod of weft-viz is ready")));
            async { next.map(tap) }
        };
        let events = resumed(open, tap(first));
        let shown = |event: Result<TapEvent, Status>| match event {
            Ok(TapEvent { event: Some(tap_event::Event::Problem(why)), namespace, pod, .. }) => {
                format!("{namespace}/{pod}: {why}")
            }
            Ok(event) => event.id,
            Err(status) => format!("{:?}", status.code()),
        };
        events.map(shown).collect().await
    }

    #[tokio::test(start_paused = true)]
    async fn a_tap_goes_on_at_another_pod_and_says_so() {
        let ends = || Err(Status::unavailable("weft-viz is shutting down"));
        let later = [
            Err(Status::unavailable("no pod of weft-viz is ready")),
            Err(Status::internal("the connection broke")),
            Ok(vec![event("2"), Err(Status::permission_denied("no longer"))]),
        ];
        let remark = |what: &str| format!("linkerd-viz/weft-viz: {what}");
        assert_eq!(
            seen(vec![event("1"), ends()], later).await,
            [
                "1".to_owned(),
                remark("weft-viz is shutting down; another pod of it is asked"),
                remark("the tap goes on; requests in between are not shown"),
                "2".to_owned(),
                "PermissionDenied".to_owned(),
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_tap_ends_where_there_is_no_other_pod_or_none_that_admits_it() {
        let began = Instant::now();
        let seen_alone = seen(vec![event("1")], []).await;
        assert_eq!(seen_alone.last().map(String::as_str), Some("Unavailable"), "{seen_alone:?}");
        assert!(began.elapsed() >= WITHIN && began.elapsed() < 2 * WITHIN);
        let refused = seen(vec![], [Err(Status::unauthenticated("who are you"))]).await;
        assert_eq!(refused.last().map(String::as_str), Some("Unauthenticated"), "{refused:?}");
        // What is no pod's failure is not asked for again.
        assert_eq!(seen(vec![Err(Status::resource_exhausted("too many"))], [Ok(vec![])]).await, ["ResourceExhausted"]);
    }
}
