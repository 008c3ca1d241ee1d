//! A request to a replica and its response, from the head to the end of the body: what it says about the replica, and
//! what is counted.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::Instant;
use tonic::Code;

use super::{metrics::ServiceMetrics, replicas::Picked};

/// The body of a response; its end or its drop is the end of the exchange.
pub(crate) struct ResponseBody {
    body: Incoming,
    exchange: Exchange,
}

/// One exchange. It is counted when it is dropped.
pub(super) struct Exchange {
    picked: Picked,
    metrics: Arc<ServiceMetrics>,
    since: Instant,
    http_status: u16,
    grpc_status: Option<Code>,
    has_failed: bool,
    /// Whether the latency needs no more observation.
    is_timed: bool,
}

impl Exchange {
    /// The head has arrived: the replica is alive, unless it says itself that it cannot answer.
    pub(super) fn begun(
        picked: Picked,
        response: &Response<Incoming>,
        metrics: Arc<ServiceMetrics>,
        since: Instant,
    ) -> Self {
        let grpc_status = grpc_status(response.headers());
        let http_status = response.status().as_u16();
        let has_failed = response.status().is_server_error();
        if has_failed || grpc_status == Some(Code::Unavailable) {
            picked.replica.failed();
        } else {
            picked.replica.succeeded();
        }
        Self { picked, metrics, since, http_status, grpc_status, has_failed, is_timed: false }
    }

    /// The body has begun. One that begins with an error has no latency.
    fn first_frame(&mut self, is_error: bool) {
        if !std::mem::replace(&mut self.is_timed, true) && !is_error {
            self.metrics.latency(self.http_status, self.since.elapsed());
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.first_frame(false);
        self.metrics.responded(self.http_status, self.grpc_status, self.has_failed);
    }
}

impl ResponseBody {
    pub(super) fn new(body: Incoming, exchange: Exchange) -> Self {
        Self { body, exchange }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(frame) = &polled {
            self.exchange.first_frame(matches!(frame, Some(Err(_))));
        }
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.exchange.grpc_status = grpc_status(trailers);
                    if self.exchange.grpc_status == Some(Code::Unavailable) {
                        self.exchange.picked.replica.failed();
                    }
                }
            }
            Poll::Ready(Some(Err(_))) => self.exchange.has_failed = true,
            Poll::Ready(None) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn grpc_status(headers: &HeaderMap) -> Option<Code> {
    headers.get("grpc-status").map(|status| Code::from_bytes(status.as_bytes()))
}
