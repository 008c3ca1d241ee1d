//! Distributed tracing: spans of requests whose senders record a trace, exported as Linkerd's proxy exports them.
//!
//! ```text
//! request ─> Tracing::begin (headers say: sampled) ─> Traced ─ responded, or dropped ─> queue, 2,048 spans
//!                                                                                         │ batches of 1,000, or every 5 s
//!                                                                      control thread: Exporter ─> OTLP over gRPC ─> collector
//! ```
//!
//! A proxy never begins a trace: a request without a context, or with one that is not sampled, passes as it is.
//! Otherwise each side of the proxy adds two spans, a server's and below it a client's, and the next hop's parent is
//! the last of them. A span ends with the head of the response. Owns contexts, spans and their export; refuses to delay
//! a request: what finds no room is dropped and counted.
//!
//! OpenTelemetry's SDK is not used. It would do the part on the request path with a tracer, a context in a thread-local
//! variable, and a span behind locks, and its batches by a thread or a runtime of its own; what the proxy needs of it
//! is a queue and a timer. Its crate of messages depends on the SDK, so that the messages are generated from
//! `proto/opentelemetry`.
//!
//! Without a collector, a request pays for the test of one `Option`; with one but without a context, for four look-ups
//! of headers.

mod attributes;
mod context;
mod export;
mod metrics;
mod queue;
mod resource;

use std::{num::NonZeroU128, time::SystemTime};

use http::{Request, StatusCode};
use tokio::time::Instant;

use crate::metrics::Direction;
use attributes::{STATUS, cut};
pub(crate) use context::Context;
pub(crate) use export::Exporter;
pub(crate) use metrics::TraceMetrics;
pub(crate) use queue::{Span, Spans};
pub(crate) use resource::resource;

/// The beginning of spans. Clones share the queue; the default one begins none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tracing(Option<queue::Sender>);

/// A request that may have a span. Dropping it before there is a response ends the span without a status.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Traced(Option<Box<Open>>);

#[derive(Debug)]
struct Open {
    /// `None` once it is sent.
    span: Option<Span>,
    began: Instant,
    queue: queue::Sender,
}

/// Which end of the request the span is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The proxy was asked.
    Server,
    /// The proxy asks.
    Client,
}

/// Spans, and where they wait for their export.
pub(crate) fn channel(metrics: &TraceMetrics) -> (Tracing, Spans) {
    let (sender, spans) = queue::channel(metrics.clone());
    (Tracing(Some(sender)), spans)
}

impl Tracing {
    /// Whether requests may have spans.
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Begins the span of a request if its trace is sampled, and makes it the parent of what is done further on.
    #[inline]
    pub(crate) fn begin<B>(&self, request: &mut Request<B>, kind: Kind, direction: Direction) -> Traced {
        match &self.0 {
            None => Traced::default(),
            Some(queue) => Traced(Open::begin(queue, request, kind, direction)),
        }
    }

    /// Waits until the spans that have ended are exported or dropped.
    pub(crate) async fn flush(&self) {
        if let Some(queue) = &self.0 {
            queue.flush().await;
        }
    }
}

impl Open {
    fn begin<B>(
        queue: &queue::Sender,
        request: &mut Request<B>,
        kind: Kind,
        direction: Direction,
    ) -> Option<Box<Self>> {
        let context = Context::read(request.headers()).filter(Context::is_sampled)?;
        let span_id = rand::random::<u64>().max(1);
        let span = Span {
            trace_id: context.trace_id,
            span_id,
            parent_id: context.span_id,
            trace_state: context::trace_state(request.headers()).map(Into::into),
            name: cut(request.uri().path()),
            kind,
            began: SystemTime::now(),
            ended: SystemTime::UNIX_EPOCH,
            attributes: attributes::of_request(request, direction),
        };
        context.write(request.headers_mut(), span_id);
        Some(Box::new(Self { span: Some(span), began: Instant::now(), queue: queue.clone() }))
    }
}

impl Traced {
    /// The trace, if it is collected.
    pub(crate) fn trace_id(&self) -> Option<NonZeroU128> {
        NonZeroU128::new(self.0.as_ref()?.span.as_ref()?.trace_id)
    }

    /// The response has begun: the span ends.
    pub(crate) fn responded(mut self, status: StatusCode) {
        if let Some(span) = self.0.as_mut().and_then(|open| open.span.as_mut()) {
            span.attributes.push((STATUS, status.as_str().into()));
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(mut span) = self.span.take() {
            // The wall clock may be set meanwhile.
            span.ended = span.began + self.began.elapsed();
            self.queue.send(span);
        }
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
