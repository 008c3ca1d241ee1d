//! Bodies on the data path: an enum instead of boxes, and an observer of a response's end.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::metrics::HttpMetrics;

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    /// hyper could not read it.
    #[error("read the body")]
    Hyper(#[from] hyper::Error),
    /// The HTTP/2 stream was reset or its connection failed.
    #[error("read the body from its HTTP/2 stream")]
    H2(#[from] h2::Error),
}

/// A request's or response's body.
#[derive(Debug)]
pub(crate) enum Body {
    /// No body.
    Empty,
    /// The whole body at once.
    #[cfg(test)]
    Full(Bytes),
    /// A body that hyper reads.
    Incoming(Incoming),
    /// A body that an HTTP/2 client stream reads.
    H2(h2::RecvStream),
}

impl Body {
    fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self {
            Self::Empty => Poll::Ready(None),
            #[cfg(test)]
            Self::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                *self = Self::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Self::Incoming(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::from),
            Self::H2(stream) => poll_h2(stream, cx),
        }
    }
}

fn poll_h2(stream: &mut h2::RecvStream, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
    match ready!(stream.poll_data(cx)) {
        Some(Ok(bytes)) => {
            stream.flow_control().release_capacity(bytes.len())?;
            Poll::Ready(Some(Ok(Frame::data(bytes))))
        }
        // A peer that needs no more of our request says so after its response, which is complete.
        Some(Err(error)) if error.is_reset() && error.reason() == Some(h2::Reason::NO_ERROR) => Poll::Ready(None),
        Some(Err(error)) => Poll::Ready(Some(Err(error.into()))),
        None => Poll::Ready(ready!(stream.poll_trailers(cx))?.map(|trailers| Ok(Frame::trailers(trailers)))),
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.get_mut().poll_inner(cx)
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            #[cfg(test)]
            Self::Full(bytes) => bytes.is_empty(),
            Self::Incoming(body) => body.is_end_stream(),
            Self::H2(stream) => stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            #[cfg(test)]
            Self::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Incoming(body) => body.size_hint(),
            Self::H2(stream) if stream.is_end_stream() => SizeHint::with_exact(0),
            Self::H2(_) => SizeHint::default(),
        }
    }
}

/// A response's body that notifies an [`Observer`] of how the response ended.
#[derive(Debug)]
pub(crate) struct Observed<O: Observer> {
    body: Body,
    observer: Option<O>,
    started: bool,
}

/// Is notified of a response's progress, once for each step.
pub(crate) trait Observer {
    /// The first frame has arrived.
    fn first_frame(&mut self);
    /// The body has ended: with trailers, without, or because it failed or was dropped (`Err`).
    fn ended(self, end: Result<Option<&HeaderMap>, Interrupted>);
}

/// The body was not read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interrupted;

impl<O: Observer> Observed<O> {
    /// Observes `body` for `observer`. An empty body ends at once.
    pub(crate) fn new(body: Body, mut observer: O) -> Self {
        if body.is_end_stream() {
            observer.first_frame();
            observer.ended(Ok(None));
            return Self { body, observer: None, started: true };
        }
        Self { body, observer: Some(observer), started: false }
    }

    /// A body without an observer.
    pub(crate) fn unwatched(body: Body) -> Self {
        Self { body, observer: None, started: true }
    }

    fn end(&mut self, end: Result<Option<&HeaderMap>, Interrupted>) {
        if let Some(observer) = self.observer.take() {
            observer.ended(end);
        }
    }
}

impl<O: Observer + Unpin> HttpBody for Observed<O> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let frame = ready!(this.body.poll_inner(cx));
        if !this.started {
            this.started = true;
            if let Some(observer) = &mut this.observer {
                observer.first_frame();
            }
        }
        match &frame {
            None => this.end(Ok(None)),
            Some(Err(_)) => this.end(Err(Interrupted)),
            Some(Ok(frame)) => match frame.trailers_ref() {
                Some(trailers) => this.end(Ok(Some(trailers))),
                // The server side stops polling at the last data frame, so the end has to be noticed here.
                None if this.body.is_end_stream() => this.end(Ok(None)),
                None => {}
            },
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<O: Observer> Drop for Observed<O> {
    fn drop(&mut self) {
        self.end(Err(Interrupted));
    }
}

/// Counts a response when it ends, classified as Linkerd does by default: HTTP 5xx fails; with gRPC, the statuses that are the
/// server's fault fail.
#[derive(Debug)]
pub(crate) struct CountResponse {
    /// The metrics.
    pub(crate) metrics: Arc<HttpMetrics>,
    /// When the request arrived.
    pub(crate) arrived: Instant,
    /// The response's status.
    pub(crate) status: StatusCode,
    /// The gRPC status, if it was in the headers.
    pub(crate) grpc_status: Option<u8>,
}

impl CountResponse {
    /// Takes over the information in the response's head.
    pub(crate) fn new(metrics: Arc<HttpMetrics>, arrived: Instant, status: StatusCode, headers: &HeaderMap) -> Self {
        Self { metrics, arrived, status, grpc_status: grpc_status(headers) }
    }

    fn count(self, trailers: Option<&HeaderMap>, interrupted: bool) {
        let grpc_status = self.grpc_status.or_else(|| trailers.and_then(grpc_status));
        let success = !interrupted && !self.status.is_server_error() && !grpc_status.is_some_and(is_grpc_failure);
        let latency: Duration = self.arrived.elapsed();
        self.metrics.response(self.status.as_u16(), success, grpc_status, latency);
    }
}

impl Observer for CountResponse {
    fn first_frame(&mut self) {}

    fn ended(self, end: Result<Option<&HeaderMap>, Interrupted>) {
        match end {
            Ok(trailers) => self.count(trailers, false),
            Err(Interrupted) => self.count(None, true),
        }
    }
}

/// The `grpc-status` in headers or trailers, if it is there and readable.
pub(crate) fn grpc_status(headers: &HeaderMap) -> Option<u8> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// Linkerd's default classification: unknown, deadline exceeded, permission denied, internal, unavailable, data loss.
fn is_grpc_failure(status: u8) -> bool {
    matches!(status, 2 | 4 | 7 | 13 | 14 | 15)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http_body_util::BodyExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Observer for Recorder {
        fn first_frame(&mut self) {
            self.0.lock().unwrap().push("first".into());
        }
        fn ended(self, end: Result<Option<&HeaderMap>, Interrupted>) {
            self.0.lock().unwrap().push(format!("ended ok={}", end.is_ok()));
        }
    }

    #[tokio::test]
    async fn the_end_is_reported_once() {
        let recorder = Recorder::default();
        let body = Observed::new(Body::Full(Bytes::from_static(b"x")), recorder.clone());
        body.collect().await.unwrap();
        assert_eq!(*recorder.0.lock().unwrap(), ["first", "ended ok=true"]);
    }

    #[test]
    fn a_dropped_body_was_interrupted_and_an_empty_one_was_not() {
        let recorder = Recorder::default();
        drop(Observed::new(Body::Full(Bytes::from_static(b"x")), recorder.clone()));
        drop(Observed::new(Body::Empty, recorder.clone()));
        assert_eq!(*recorder.0.lock().unwrap(), ["ended ok=false", "first", "ended ok=true"]);
    }

    #[test]
    fn grpc_failures_are_the_servers_faults() {
        let failures: Vec<u8> = (0..17).filter(|status| is_grpc_failure(*status)).collect();
        assert_eq!(failures, [2, 4, 7, 13, 14, 15]);
    }
}
