//! Bodies that are read from streams of HTTP/2.

use std::{
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, header::CONTENT_LENGTH};
use http_body::{Frame, SizeHint};
use tokio::sync::oneshot;

use super::error::BodyError;
use crate::http::{headers::remove_mesh_headers, shared_connections::StreamPermit};

/// A request's body on a client's connection.
#[derive(Debug)]
pub(crate) struct H2Request {
    stream: h2::RecvStream,
    /// How many bytes are still to come, if the client said so.
    left: Option<u64>,
    /// What counts it among the open ones of its connection, until it ends.
    open: Option<Arc<()>>,
}

/// A response's body, and its stream's place on the connection.
#[derive(Debug)]
pub(crate) struct H2Body {
    stream: h2::RecvStream,
    permit: StreamPermit,
    request: Option<Rest>,
}

/// The rest of a request whose response has begun. Dropping it before the response's end says that nothing more is
/// wanted of either.
#[derive(Debug)]
struct Rest(Option<oneshot::Sender<()>>);

impl Drop for Rest {
    fn drop(&mut self) {
        if let Some(given_up) = self.0.take() {
            // It may have been sent by now.
            let _ = given_up.send(());
        }
    }
}

impl H2Request {
    /// The body of a request with these headers; it drops `open` when it ends.
    pub(crate) fn new(stream: h2::RecvStream, headers: &HeaderMap, open: Option<Arc<()>>) -> Self {
        let length = || headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok();
        // h2 refuses more or fewer bytes than the header says.
        let left = if stream.is_end_stream() { Some(0) } else { length() };
        Self { stream, left, open }
    }

    pub(super) fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(poll_h2(&mut self.stream, cx));
        if let (Some(left), Some(Ok(frame))) = (&mut self.left, &frame) {
            *left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
        }
        if self.stream.is_end_stream() {
            self.open = None;
        }
        Poll::Ready(frame)
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl H2Body {
    pub(super) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    /// A response's body on a shared connection. `given_up` hears of it if it is dropped before its end.
    pub(crate) fn new(stream: h2::RecvStream, permit: StreamPermit, given_up: Option<oneshot::Sender<()>>) -> Self {
        Self { stream, permit, request: given_up.map(|given_up| Rest(Some(given_up))) }
    }

    /// The response is whole: its server may still want the request.
    fn end(&mut self) {
        if let Some(mut request) = self.request.take() {
            request.0 = None;
        }
    }

    pub(super) fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match poll_h2(&mut self.stream, cx) {
            // A peer that needs no more of our request says so after its response, which is complete.
            Poll::Ready(Some(Err(BodyError::H2(error))))
                if error.is_reset() && error.reason() == Some(h2::Reason::NO_ERROR) =>
            {
                self.end();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(BodyError::H2(error)))) if self.permit.is_own_bound(&error) => {
                Poll::Ready(Some(Err(BodyError::Unread(Box::new(error.into())))))
            }
            polled => {
                self.permit.set_unread(matches!(polled, Poll::Ready(Some(Ok(_)))) && !self.stream.is_end_stream());
                if matches!(polled, Poll::Ready(None)) || self.stream.is_end_stream() {
                    self.end();
                }
                polled
            }
        }
    }
}

fn poll_h2(stream: &mut h2::RecvStream, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
    match ready!(stream.poll_data(cx)) {
        Some(Ok(bytes)) => {
            stream.flow_control().release_capacity(bytes.len())?;
            Poll::Ready(Some(Ok(Frame::data(bytes))))
        }
        Some(Err(error)) => Poll::Ready(Some(Err(error.into()))),
        None => Poll::Ready(ready!(stream.poll_trailers(cx))?.map(|mut trailers| {
            remove_mesh_headers(&mut trailers);
            Ok(Frame::trailers(trailers))
        })),
    }
}
