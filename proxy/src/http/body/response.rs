//! What is counted of a response: its latency when its body begins, and how it ended.

use std::{num::NonZeroU128, sync::Arc};

use http::{HeaderMap, StatusCode};
use tokio::time::Instant;

use super::End;
use crate::{
    metrics::{HttpMetrics, Outcome},
    request::classify::{Answer, Classes},
};

/// Counts a response: its latency at the first frame of its body, and how it ended, as its route classifies it.
#[derive(Clone, Debug)]
pub(crate) struct CountResponse {
    metrics: Arc<HttpMetrics>,
    /// When the request began, from which its latency counts.
    since: Instant,
    /// The request's trace, if it is collected.
    trace_id: Option<NonZeroU128>,
    /// The response, as far as its head tells.
    pub(crate) answer: Answer,
    /// Which responses are failures.
    classes: Classes,
    /// Whether the latency needs no more observation.
    is_timed: bool,
}

impl CountResponse {
    /// Takes over the information in the response's head.
    pub(crate) fn new(
        metrics: Arc<HttpMetrics>,
        since: Instant,
        status: StatusCode,
        headers: &HeaderMap,
        classes: Classes,
    ) -> Self {
        Self { metrics, since, trace_id: None, answer: Answer::of_head(status, headers), classes, is_timed: false }
    }

    /// Names the request's trace beside its latency.
    pub(crate) fn traced(self, trace_id: Option<NonZeroU128>) -> Self {
        Self { trace_id, ..self }
    }

    /// Counts the same response in other metrics too, for which the request began then.
    pub(crate) fn under(&self, metrics: Arc<HttpMetrics>, since: Instant) -> Self {
        Self { metrics, since, ..self.clone() }
    }

    /// Observes the latency. As in Linkerd, a body that begins with an error has none.
    pub(crate) fn first_frame(&mut self, is_error: bool) {
        if !std::mem::replace(&mut self.is_timed, true) && !is_error {
            self.metrics.latency(self.answer.status.as_u16(), self.since.elapsed(), self.trace_id);
        }
    }

    /// Counts the response as it ended; returns what is known of it, and whether it is a failure. One that the client
    /// did not read counts by what was known.
    pub(crate) fn count(mut self, end: End<'_>) -> (Answer, bool) {
        // The body may have ended before its first frame.
        self.first_frame(matches!(end, End::Failed(_)));
        let answer = match end {
            End::Whole(trailers) => self.answer.with_trailers(trailers),
            End::Failed(_) | End::Dropped => self.answer,
        };
        let is_failure = matches!(end, End::Failed(_)) || self.classes.is_failure(&answer);
        let error = match end {
            End::Failed(error) => Some(error.response_label()),
            End::Whole(_) | End::Dropped => None,
        };
        let status = Some(answer.status.as_u16());
        self.metrics.response(Outcome { status, success: !is_failure, grpc_status: answer.grpc, error });
        (answer, is_failure)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use http_body::Frame;
    use http_body_util::BodyExt as _;
    use prometheus_client::registry::Registry;
    use tokio::{sync::mpsc::UnboundedSender, time::advance};

    use super::*;
    use crate::{
        http::{
            body::{Body, Observed, Observer, error::BodyError},
            respond::RequestKind,
        },
        metrics::{Direction, ProxyMetrics},
    };

    struct Counting(CountResponse);

    impl Observer for Counting {
        fn first_frame(&mut self, is_error: bool) {
            self.0.first_frame(is_error);
        }
        fn data(&mut self, _bytes: usize) {}
        fn ended(self, end: End<'_>) {
            self.0.count(end);
        }
    }

    type Frames = UnboundedSender<Result<Frame<Bytes>, BodyError>>;

    /// The metrics, and a response to a request of this instant, with what gives it frames.
    fn response() -> (Registry, Frames, Observed<Counting>) {
        let mut registry = Registry::default();
        let http = Arc::new(ProxyMetrics::register(&mut registry).http(Direction::Outbound, &Vec::new()));
        let count = CountResponse::new(http, Instant::now(), StatusCode::OK, &HeaderMap::new(), Classes::default());
        let (sender, body) = Body::channel();
        let kind = RequestKind::outbound(http::Version::HTTP_11, &HeaderMap::new(), true);
        (registry, sender, Observed::new(body, Box::new(Counting(count)), kind))
    }

    /// Responses with a latency, the sum of their milliseconds, and responses that have ended.
    fn counted(registry: &Registry) -> (f64, f64, f64) {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
            line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
        };
        (value("response_latency_ms_count"), value("response_latency_ms_sum"), value("response_total"))
    }

    #[tokio::test(start_paused = true)]
    async fn the_latency_is_that_of_the_first_frame_however_long_the_rest_takes() {
        let (registry, sender, mut body) = response();
        for millis in [7, 60_000] {
            advance(Duration::from_millis(millis)).await;
            sender.send(Ok(Frame::data(Bytes::from_static(b"part")))).unwrap();
            body.frame().await.unwrap().unwrap();
            assert_eq!(counted(&registry), (1.0, 7.0, 0.0));
        }
        drop(sender);
        assert!(body.frame().await.is_none());
        assert_eq!(counted(&registry), (1.0, 7.0, 1.0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_without_frames_has_the_latency_of_its_end() {
        let (registry, sender, mut body) = response();
        advance(Duration::from_millis(7)).await;
        drop(sender);
        assert!(body.frame().await.is_none());
        assert_eq!(counted(&registry), (1.0, 7.0, 1.0));
        let (registry, _sender, body) = response();
        advance(Duration::from_millis(5)).await;
        drop(body);
        assert_eq!(counted(&registry), (1.0, 5.0, 1.0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_begins_with_an_error_has_no_latency() {
        let (registry, sender, mut body) = response();
        sender.send(Err(BodyError::Superseded)).unwrap();
        assert!(body.frame().await.unwrap().is_err());
        drop(body);
        assert_eq!(counted(&registry), (0.0, 0.0, 1.0));
    }
}
