//! Bodies on the data path: an enum instead of boxes, and an observer of a response's end.

pub(crate) mod counted;
pub(crate) mod error;
pub(crate) mod replay;
pub(crate) mod response;
mod stream;
pub(crate) mod timed;

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;

use super::{headers::remove_mesh_headers, respond::RequestKind};

use counted::Counted;
use error::BodyError;
use replay::{Replay, ReplayBody};
pub(crate) use stream::{H2Body, H2Request};
use timed::{Clock, Reporting, Timed};

/// A request's or response's body.
#[derive(Debug)]
pub(crate) enum Body {
    /// No body.
    Empty,
    /// The whole body at once.
    #[cfg(test)]
    Full(Bytes),
    /// Frames that a test sends.
    #[cfg(test)]
    Channel(tokio::sync::mpsc::UnboundedReceiver<Result<Frame<Bytes>, BodyError>>),
    /// A body that hyper reads.
    Incoming(Incoming),
    /// A request's body that an HTTP/2 server stream reads.
    H2Request(H2Request),
    /// A request's body whose frames are counted.
    Counted(Counted),
    /// A body that an HTTP/2 client stream reads.
    H2(H2Body),
    /// A request's body that can be sent again.
    Replay(ReplayBody),
    /// A request's body that counts as progress against deadlines.
    Reporting(Box<Reporting>),
    /// A response's body under deadlines.
    Timed(Box<Timed>),
    /// A response's body whose first frames were read already.
    Peeked(Box<Peeked>),
    /// A response's body that the outbound side observes, at a gateway.
    Boxed(UnsyncBoxBody<Bytes, BodyError>),
}

/// A body whose first frames were read already.
#[derive(Debug)]
pub(crate) struct Peeked {
    frames: VecDeque<Result<Frame<Bytes>, BodyError>>,
    rest: Body,
}

impl Body {
    /// Takes the body out and leaves none.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Empty)
    }

    /// Reads a response's first frames where they may be its trailers already: the first frame, and the second if it is
    /// there. Returns the body, whole, and the trailers.
    pub(crate) async fn peek_trailers(mut self) -> (Self, Option<HeaderMap>) {
        let mut frames = VecDeque::with_capacity(2);
        let mut trailers = None;
        while frames.len() < 2 && !self.is_end_stream() {
            let is_first = frames.is_empty();
            let frame = std::future::poll_fn(|cx| match self.poll_inner(cx) {
                // Nobody waits for the second.
                Poll::Pending if !is_first => Poll::Ready(None),
                polled => polled.map(Some),
            });
            match frame.await {
                None | Some(None) => break,
                Some(Some(frame)) => {
                    trailers = frame.as_ref().ok().and_then(Frame::trailers_ref).cloned();
                    let is_last = trailers.is_some() || frame.is_err();
                    frames.push_back(frame);
                    if is_last {
                        break;
                    }
                }
            }
        }
        if frames.is_empty() {
            return (self, None);
        }
        (Self::Peeked(Box::new(Peeked { frames, rest: self })), trailers)
    }

    /// What gives a request's body from its beginning again, if it is kept.
    pub(crate) fn again(&self) -> Option<Again> {
        match self {
            Self::Empty => Some(Again { replay: None, clock: None }),
            Self::Replay(body) => Some(Again { replay: Some(body.replay().clone()), clock: None }),
            Self::Reporting(reporting) => {
                let again = reporting.body.again()?;
                Some(Again { clock: Some(reporting.clock().clone()), ..again })
            }
            other if other.is_end_stream() => Some(Again { replay: None, clock: None }),
            _ => None,
        }
    }

    /// Ready when nothing more of a request's body is needed: it is being sent again, from its beginning, or the time
    /// of its response is over.
    pub(crate) fn poll_superseded(&self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Self::Replay(body) => body.poll_superseded(cx),
            Self::Reporting(reporting) => reporting.poll_superseded(cx),
            _ => Poll::Pending,
        }
    }

    /// A body whose frames a test sends.
    #[cfg(test)]
    pub(crate) fn channel() -> (tokio::sync::mpsc::UnboundedSender<Result<Frame<Bytes>, BodyError>>, Self) {
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        (sender, Self::Channel(receiver))
    }

    /// A body of these frames.
    #[cfg(test)]
    pub(crate) fn frames(frames: impl IntoIterator<Item = Frame<Bytes>>) -> Self {
        Self::Peeked(Box::new(Peeked { frames: frames.into_iter().map(Ok).collect(), rest: Self::Empty }))
    }

    pub(super) fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self {
            Self::Empty => Poll::Ready(None),
            #[cfg(test)]
            Self::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                *self = Self::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            #[cfg(test)]
            Self::Channel(receiver) => receiver.poll_recv(cx),
            Self::Incoming(body) => {
                let mut frame = ready!(Pin::new(body).poll_frame(cx));
                if let Some(Ok(frame)) = &mut frame
                    && let Some(trailers) = frame.trailers_mut()
                {
                    remove_mesh_headers(trailers);
                }
                Poll::Ready(frame.map(|frame| frame.map_err(BodyError::from)))
            }
            Self::H2Request(body) => body.poll_inner(cx),
            Self::Counted(body) => body.poll_inner(cx),
            Self::H2(body) => body.poll_inner(cx),
            Self::Replay(body) => body.poll_inner(cx),
            Self::Reporting(body) => body.poll_inner(cx),
            Self::Timed(body) => body.poll_inner(cx),
            Self::Peeked(body) => body.poll_inner(cx),
            Self::Boxed(body) => Pin::new(body).poll_frame(cx),
        }
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
            #[cfg(test)]
            Self::Channel(_) => false,
            Self::Incoming(body) => body.is_end_stream(),
            Self::H2Request(body) => body.is_end_stream(),
            Self::Counted(body) => body.body.is_end_stream(),
            Self::H2(body) => body.is_end_stream(),
            Self::Replay(body) => body.is_end_stream_inner(),
            Self::Reporting(body) => body.body.is_end_stream(),
            Self::Timed(body) => body.is_end_stream(),
            Self::Peeked(body) => body.is_end_stream(),
            Self::Boxed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            #[cfg(test)]
            Self::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            #[cfg(test)]
            Self::Channel(_) => SizeHint::default(),
            Self::Incoming(body) => body.size_hint(),
            Self::Counted(body) => body.body.size_hint(),
            Self::Replay(body) => body.size_hint_inner(),
            Self::Reporting(body) => body.body.size_hint(),
            Self::Timed(body) => body.size_hint(),
            Self::Peeked(body) => body.size_hint(),
            Self::Boxed(body) => body.size_hint(),
            Self::H2Request(body) => body.size_hint(),
            Self::H2(body) if body.is_end_stream() => SizeHint::with_exact(0),
            Self::H2(_) => SizeHint::default(),
        }
    }
}

/// Gives a request's body from its beginning.
#[derive(Debug)]
pub(crate) struct Again {
    replay: Option<Replay>,
    clock: Option<Clock>,
}

impl Again {
    /// The body; `None` if it was too large to keep.
    pub(crate) fn body(self) -> Option<Body> {
        let body = match self.replay {
            None => Body::Empty,
            Some(replay) => Body::Replay(replay.body()?),
        };
        Some(match self.clock {
            Some(clock) => clock.watch_request(body),
            None => body,
        })
    }
}

impl Peeked {
    fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.frames.pop_front() {
            Some(frame) => Poll::Ready(Some(frame)),
            None => self.rest.poll_inner(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let read: usize = self.frames.iter().flatten().filter_map(Frame::data_ref).map(Bytes::len).sum();
        let (read, rest) = (read as u64, self.rest.size_hint());
        let mut hint = SizeHint::new();
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint.set_lower(rest.lower().saturating_add(read));
        hint
    }
}

/// A response's body that notifies an [`Observer`] of how the response ended. Where a gRPC response fails in its
/// middle, the client is told in trailers.
#[derive(Debug)]
pub(crate) struct Observed<O: Observer> {
    body: Body,
    /// Boxed: a response is moved often until its body is sent.
    observer: Option<Box<O>>,
    started: bool,
    /// The kind of its request; `None` if nothing is added to the response.
    kind: Option<RequestKind>,
}

/// Is notified of a response's progress, once for each step.
pub(crate) trait Observer {
    /// The first frame of the body has arrived, or its end, or an error instead.
    fn first_frame(&mut self, is_error: bool);
    /// A frame of this many bytes of data passes.
    fn data(&mut self, bytes: usize);
    /// The response has ended.
    fn ended(self, end: End<'_>);
}

/// How a response ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End<'a> {
    /// Whole, with or without trailers.
    Whole(Option<&'a HeaderMap>),
    /// Its body failed.
    Failed(&'a BodyError),
    /// The client did not read it to its end.
    Dropped,
}

impl<O: Observer> Observed<O> {
    /// Observes `body` for `observer`. An empty body ends at once.
    pub(crate) fn new(body: Body, mut observer: Box<O>, kind: RequestKind) -> Self {
        let kind = Some(kind);
        if body.is_end_stream() {
            observer.first_frame(false);
            observer.ended(End::Whole(None));
            return Self { body, observer: None, started: true, kind };
        }
        Self { body, observer: Some(observer), started: false, kind }
    }

    /// A body without an observer.
    pub(crate) fn unwatched(body: Body) -> Self {
        Self { body, observer: None, started: true, kind: None }
    }

    /// The observer, unless the body has ended.
    pub(crate) fn observer(&mut self) -> Option<&mut O> {
        self.observer.as_deref_mut()
    }

    fn end(&mut self, end: End<'_>) {
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
                observer.first_frame(matches!(frame, Some(Err(_))));
            }
        }
        match frame {
            None => this.end(End::Whole(None)),
            Some(Err(error)) => {
                this.end(if error.is_own_reset() { End::Dropped } else { End::Failed(&error) });
                let told = this.kind.filter(|kind| kind.grpc);
                if let Some((kind, failure)) = told.zip(error.failure()) {
                    tracing::debug!(%error, "a gRPC response failed after it had begun");
                    this.body = Body::Empty;
                    return Poll::Ready(Some(Ok(Frame::trailers(failure.trailers(kind)))));
                }
                return Poll::Ready(Some(Err(error)));
            }
            Some(Ok(ref frame)) => {
                if let (Some(observer), Some(data)) = (&mut this.observer, frame.data_ref()) {
                    observer.data(data.len());
                }
                match frame.trailers_ref() {
                    Some(trailers) => this.end(End::Whole(Some(trailers))),
                    // The server side stops polling at the last data frame, so the end has to be noticed here.
                    None if this.body.is_end_stream() => this.end(End::Whole(None)),
                    None => {}
                }
            }
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
        self.end(End::Dropped);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http_body_util::BodyExt;

    use super::*;
    use crate::request::deadlines::Expired;

    #[derive(Clone, Debug, Default)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Recorder {
        fn seen(&self) -> Vec<String> {
            self.0.lock().unwrap().clone()
        }
    }

    impl Observer for Recorder {
        fn first_frame(&mut self, _is_error: bool) {
            self.0.lock().unwrap().push("first".into());
        }
        fn data(&mut self, bytes: usize) {
            self.0.lock().unwrap().push(format!("{bytes} bytes"));
        }
        fn ended(self, end: End<'_>) {
            let end = match end {
                End::Failed(error) => format!("failed: {}", error.status_label()),
                end => format!("{end:?}"),
            };
            self.0.lock().unwrap().push(end);
        }
    }

    fn kind(grpc: bool) -> RequestKind {
        RequestKind { version: http::Version::HTTP_2, grpc, orig_proto: false, show_error: true, from_proxy: false }
    }

    fn trailers() -> HeaderMap {
        [(http::HeaderName::from_static("grpc-status"), http::HeaderValue::from_static("14"))].into_iter().collect()
    }

    fn data(text: &'static str) -> Frame<Bytes> {
        Frame::data(Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test]
    async fn the_end_is_reported_once() {
        let recorder = Recorder::default();
        let body = Observed::new(Body::Full(Bytes::from_static(b"x")), Box::new(recorder.clone()), kind(false));
        body.collect().await.unwrap();
        assert_eq!(recorder.seen(), ["first", "1 bytes", "Whole(None)"]);
    }

    #[test]
    fn a_dropped_body_was_interrupted_and_an_empty_one_was_not() {
        let recorder = Recorder::default();
        drop(Observed::new(Body::Full(Bytes::from_static(b"x")), Box::new(recorder.clone()), kind(false)));
        drop(Observed::new(Body::Empty, Box::new(recorder.clone()), kind(false)));
        assert_eq!(recorder.seen(), ["Dropped", "first", "Whole(None)"]);
    }

    #[tokio::test]
    async fn a_grpc_response_that_fails_in_its_middle_ends_with_trailers() {
        for (error, code, label) in [
            (BodyError::Expired(Expired::Request), Some("4"), "REQUEST_TIMEOUT"),
            (BodyError::Superseded, Some("14"), "UNKNOWN"),
            (BodyError::H2(h2::Reason::CANCEL.into()), None, "CANCEL"),
        ] {
            let (sender, body) = Body::channel();
            sender.send(Ok(data("message"))).unwrap();
            sender.send(Err(error)).unwrap();
            let recorder = Recorder::default();
            let collected = Observed::new(body, Box::new(recorder.clone()), kind(true)).collect().await;
            match code {
                Some(code) => {
                    let collected = collected.unwrap();
                    let trailers = collected.trailers().unwrap();
                    assert_eq!(trailers["grpc-status"], code);
                    assert!(trailers.contains_key("grpc-message"));
                }
                None => assert!(matches!(collected, Err(BodyError::H2(_))), "a reset stays a reset"),
            }
            assert_eq!(recorder.seen(), ["first", "7 bytes", &format!("failed: {label}")]);
        }
        let (sender, body) = Body::channel();
        sender.send(Err(BodyError::Expired(Expired::Idle))).unwrap();
        assert!(
            Observed::new(body, Box::<Recorder>::default(), kind(false)).collect().await.is_err(),
            "HTTP has no such trailers"
        );
    }

    #[tokio::test]
    async fn the_reason_of_a_failure_in_the_middle_is_hidden_when_it_should_be() {
        let (sender, body) = Body::channel();
        sender.send(Err(BodyError::Expired(Expired::Idle))).unwrap();
        let hidden = RequestKind { show_error: false, ..kind(true) };
        let collected = Observed::new(body, Box::<Recorder>::default(), hidden).collect().await.unwrap();
        let trailers = collected.trailers().unwrap();
        assert_eq!((&trailers["grpc-status"], trailers.len()), (&http::HeaderValue::from_static("4"), 1));
    }

    #[tokio::test]
    async fn trailers_are_seen_early_and_nothing_is_lost() {
        for (frames, seen) in [
            (vec![Frame::trailers(trailers())], true),
            (vec![data("one"), Frame::trailers(trailers())], true),
            (vec![data("one"), data("two"), Frame::trailers(trailers())], false),
            (vec![data("one")], false),
            (vec![], false),
        ] {
            let length: usize = frames.iter().filter_map(Frame::data_ref).map(Bytes::len).sum();
            let has_trailers = frames.iter().any(Frame::is_trailers);
            let (body, peeked) = Body::frames(frames).peek_trailers().await;
            assert_eq!(peeked.is_some(), seen);
            let collected = body.collect().await.unwrap();
            assert_eq!(collected.trailers().is_some(), has_trailers);
            assert_eq!(collected.to_bytes().len(), length);
        }
    }

    #[tokio::test]
    async fn nobody_waits_for_the_frame_after_the_first() {
        let (sender, body) = Body::channel();
        sender.send(Ok(data("one"))).unwrap();
        let (body, peeked) = body.peek_trailers().await;
        assert!(peeked.is_none());
        sender.send(Ok(Frame::trailers(trailers()))).unwrap();
        drop(sender);
        let collected = body.collect().await.unwrap();
        assert!(collected.trailers().is_some());
        assert_eq!(collected.to_bytes(), "one");
    }
}
