//! Sends a request's body over its HTTP/2 stream, as far as flow control and the peer allow.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use ::h2::{Reason, SendStream};
use bytes::Bytes;
use http_body::Body as _;

use crate::http::body::Body;

/// A body being sent. Dropping it before its end resets the stream.
pub(super) struct Pump {
    body: Body,
    stream: SendStream<Bytes>,
    waiting: Option<Bytes>,
    done: bool,
}

impl Pump {
    pub(super) fn new(body: Body, stream: SendStream<Bytes>) -> Self {
        Self { body, stream, waiting: None, done: false }
    }

    /// Sends all that can be sent now; ready when the body has ended, or when the peer does not want the rest.
    pub(super) fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let polled = self.poll_frames(cx);
        self.done |= polled.is_ready();
        polled
    }

    fn poll_frames(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            // A peer that has answered may not want the rest, and resets the stream even while we wait for the
            // application.
            if let Poll::Ready(_reset) = self.stream.poll_reset(cx) {
                return Poll::Ready(());
            }
            if let Some(mut bytes) = self.waiting.take() {
                self.stream.reserve_capacity(bytes.len());
                match self.stream.poll_capacity(cx) {
                    Poll::Ready(Some(Ok(capacity))) if capacity > 0 => {
                        let now = bytes.split_to(capacity.min(bytes.len()));
                        let end = bytes.is_empty() && self.body.is_end_stream();
                        if self.stream.send_data(now, end).is_err() || end {
                            return Poll::Ready(());
                        }
                        if !bytes.is_empty() {
                            self.waiting = Some(bytes);
                        }
                    }
                    Poll::Ready(Some(Ok(_))) => self.waiting = Some(bytes),
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
                    Poll::Pending => {
                        if self.body.poll_superseded(cx).is_ready() {
                            self.stream.send_reset(Reason::CANCEL);
                            return Poll::Ready(());
                        }
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
                    return Poll::Ready(());
                }
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(%error, "the request's body ended early");
                    self.stream.send_reset(Reason::CANCEL);
                    return Poll::Ready(());
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) if bytes.is_empty() => {
                        if self.body.is_end_stream() {
                            let _ = self.stream.send_data(bytes, true);
                            return Poll::Ready(());
                        }
                    }
                    Ok(bytes) => self.waiting = Some(bytes),
                    Err(frame) => {
                        if let Ok(trailers) = frame.into_trailers() {
                            let _ = self.stream.send_trailers(trailers);
                        }
                        return Poll::Ready(());
                    }
                },
            }
        }
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        if !self.done {
            self.stream.send_reset(Reason::CANCEL);
        }
    }
}
