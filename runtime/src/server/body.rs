//! Bodies that report the progress of their exchange.

use std::{
    error::Error,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Wake, Waker, ready},
};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::connections::Exchange;

/// The body of a request, whose bytes count against the listener's limit until the request is answered.
#[derive(Debug)]
pub struct RequestBody {
    incoming: Incoming,
    exchange: Arc<Exchange>,
}

impl RequestBody {
    pub(super) fn new(incoming: Incoming, exchange: Arc<Exchange>) -> Self {
        if incoming.is_end_stream() {
            exchange.received();
        }
        Self { incoming, exchange }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let Self { incoming, exchange } = &mut *self;
        let mut frame = Pin::new(&mut *incoming).poll_frame(cx);
        if frame.is_pending() {
            // Before the next look: what arrives after it counts as arrived at once, whenever this body is polled
            // again.
            exchange.owed();
            let arrival = BodyArrival { exchange: Arc::downgrade(exchange), reader: cx.waker().clone() };
            frame = Pin::new(incoming).poll_frame(&mut Context::from_waker(&Waker::from(Arc::new(arrival))));
            if frame.is_ready() {
                exchange.arrived();
            }
        }
        let frame = ready!(frame);
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && !self.exchange.receive(data.len())
        {
            return Poll::Ready(Some(Err("too many bytes of requests are held".into())));
        }
        if frame.is_none() || self.incoming.is_end_stream() {
            self.exchange.received();
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// A service that drops the body reads no more of it.
impl Drop for RequestBody {
    fn drop(&mut self) {
        self.exchange.received();
    }
}

/// Wakes a request whose body goes on, and stops the clock of its connection.
#[derive(Debug)]
struct BodyArrival {
    /// HTTP/2 keeps wakers for longer than a request lives.
    exchange: Weak<Exchange>,
    reader: Waker,
}

impl Wake for BodyArrival {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(exchange) = self.exchange.upgrade() {
            exchange.arrived();
        }
        self.reader.wake_by_ref();
    }
}

/// The body of a response; the exchange ends when it is dropped.
#[derive(Debug)]
pub struct ResponseBody<B>(Option<(B, Arc<Exchange>)>);

impl<B> ResponseBody<B> {
    pub(super) fn new(body: B, exchange: Arc<Exchange>) -> Self {
        Self(Some((body, exchange)))
    }

    /// That of a refusal, which ends its exchange at once.
    pub(super) fn empty() -> Self {
        Self(None)
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        match &mut self.0 {
            Some((body, _)) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|(body, _)| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or(SizeHint::with_exact(0), |(body, _)| body.size_hint())
    }
}
