//! Sends a body over its HTTP/2 stream, as far as flow control and the peer allow.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use ::h2::{Reason, SendStream};
use bytes::Bytes;
use http_body::Body as HttpBody;

use super::body::{Body, error::BodyError};

/// A body being sent. Dropping it before its end resets the stream.
pub(crate) struct Pump<B> {
    body: B,
    stream: SendStream<Bytes>,
    waiting: Option<Bytes>,
    done: bool,
}

impl<B: HttpBody<Data = Bytes, Error = BodyError> + Unpin> Pump<B> {
    pub(crate) fn new(body: B, stream: SendStream<Bytes>) -> Self {
        Self { body, stream, waiting: None, done: false }
    }

    /// Sends all that can be sent now; ready when the body has ended, or when the peer does not want the rest.
    ///
    /// # Errors
    /// When the body fails. The stream is then to be reset.
    pub(crate) fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        let polled = self.poll_frames(cx);
        self.done |= matches!(polled, Poll::Ready(Ok(())));
        polled
    }

    /// Resets the stream.
    pub(crate) fn reset(&mut self, reason: Reason) {
        self.done = true;
        self.stream.send_reset(reason);
    }

    fn poll_frames(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        loop {
            // A peer that needs no more resets the stream, even while this side waits for the rest of the body.
            if let Poll::Ready(_reset) = self.stream.poll_reset(cx) {
                return Poll::Ready(Ok(()));
            }
            if let Some(mut bytes) = self.waiting.take() {
                self.stream.reserve_capacity(bytes.len());
                match self.stream.poll_capacity(cx) {
                    Poll::Ready(Some(Ok(capacity))) if capacity > 0 => {
                        let now = bytes.split_to(capacity.min(bytes.len()));
                        let end = bytes.is_empty() && self.body.is_end_stream();
                        if self.stream.send_data(now, end).is_err() || end {
                            return Poll::Ready(Ok(()));
                        }
                        if !bytes.is_empty() {
                            self.waiting = Some(bytes);
                        }
                    }
                    Poll::Ready(Some(Ok(_))) => self.waiting = Some(bytes),
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(Ok(())),
                    Poll::Pending => {
                        self.waiting = Some(bytes);
                        return Poll::Pending;
                    }
                }
                continue;
            }
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    // An error means that the stream is gone, which ends the sending as well.
                    let _ = self.stream.send_data(Bytes::new(), true);
                    return Poll::Ready(Ok(()));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) if bytes.is_empty() => {
                        if self.body.is_end_stream() {
                            let _ = self.stream.send_data(bytes, true);
                            return Poll::Ready(Ok(()));
                        }
                    }
                    Ok(bytes) => self.waiting = Some(bytes),
                    Err(frame) => {
                        if let Ok(trailers) = frame.into_trailers() {
                            let _ = self.stream.send_trailers(trailers);
                        }
                        return Poll::Ready(Ok(()));
                    }
                },
            }
        }
    }
}

impl Pump<Body> {
    /// Sends a request's body; ready also when the rest is not needed any more. A body that fails cancels the request.
    pub(crate) fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.poll_send(cx) {
            Poll::Ready(Ok(())) => return Poll::Ready(()),
            Poll::Ready(Err(error)) => tracing::debug!(%error, "the request's body ended early"),
            Poll::Pending => {
                let is_superseded = self.waiting.is_some() && self.body.poll_superseded(cx).is_ready();
                if !is_superseded {
                    return Poll::Pending;
                }
            }
        }
        self.reset(Reason::CANCEL);
        Poll::Ready(())
    }
}

impl<B> Drop for Pump<B> {
    fn drop(&mut self) {
        if !self.done {
            self.stream.send_reset(Reason::CANCEL);
        }
    }
}
