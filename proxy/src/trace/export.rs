//! The export of spans: batches to the collector, again after a failure that may pass, with pauses that grow.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message as _;
use tonic::{Code, Status};
use weft_proto::otlp::{
    ExportTraceServiceRequest, ExportTraceServiceResponse, InstrumentationScope, Resource, ResourceSpans, ScopeSpans,
    Span as OtlpSpan, any_value::Value, span::SpanKind, trace_service_client::TraceServiceClient,
};
use weft_runtime::drain;

use super::{
    Kind,
    queue::{BATCH, Span, Spans},
    resource::attribute,
};
use crate::{control::ControlClient, pauses::Pauses};

/// The times of exports: spans wait as long as those of Linkerd's proxy, and attempts have the protocol's default
/// deadline.
const PACE: Pace = Pace {
    interval: Duration::from_secs(5),
    timeout: Duration::from_secs(10),
    pauses: (Duration::from_secs(1), Duration::from_secs(30)),
};
/// Attempts at one batch. Newer spans wait meanwhile, and are dropped when there is no room for them: the pauses are
/// short enough that a collector that restarts loses nothing, and few enough that one that is gone does not keep old
/// spans instead of new ones.
const ATTEMPTS: usize = 5;
/// Bytes after which a batch takes no further span: half of what a gRPC server takes by default.
const MAX_BYTES: usize = 2 << 20;

/// W3C's flag `sampled`, and that the parent is another process's, as Linkerd's proxy says of all spans.
const FLAGS: u32 = 0x301;

/// Sends batches to a collector.
pub(crate) struct Exporter {
    client: TraceServiceClient<ControlClient>,
    resource: Resource,
    spans: Spans,
    pauses: Pauses,
    pace: Pace,
}

/// The times of exports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// How long spans wait for others.
    pub(super) interval: Duration,
    /// Deadline of one attempt.
    pub(super) timeout: Duration,
    /// First and longest pause after a failed attempt.
    pub(super) pauses: (Duration, Duration),
}

impl Exporter {
    /// Creates an exporter; it connects when there are spans.
    pub(crate) fn new(collector: ControlClient, resource: Resource, spans: Spans) -> Self {
        Self::paced(PACE, collector, resource, spans)
    }

    pub(super) fn paced(pace: Pace, collector: ControlClient, resource: Resource, spans: Spans) -> Self {
        let pauses = Pauses::between(pace.pauses.0, pace.pauses.1);
        Self { client: TraceServiceClient::new(collector), resource, spans, pauses, pace }
    }

    /// Exports for as long as the process runs. During a drain, spans do not wait for others.
    pub(crate) async fn run(mut self, drain: drain::Watch) -> anyhow::Result<()> {
        while let Some(first) = self.spans.next().await {
            tokio::select! {
                () = tokio::time::sleep(self.pace.interval) => {}
                () = self.spans.filled() => {}
                () = drain.signaled() => {}
            }
            let batch = self.batch(first);
            let spans = batch.len();
            self.export(batch).await;
            self.spans.finished(spans);
        }
        // Nothing can send spans any more.
        std::future::pending().await
    }

    fn batch(&mut self, first: Span) -> Vec<OtlpSpan> {
        let first = convert(first);
        let mut bytes = first.encoded_len();
        let mut batch = vec![first];
        while batch.len() < BATCH && bytes < MAX_BYTES {
            let Some(span) = self.spans.take() else { break };
            let span = convert(span);
            bytes += span.encoded_len();
            batch.push(span);
        }
        batch
    }

    async fn export(&mut self, spans: Vec<OtlpSpan>) {
        let count = spans.len() as u64;
        let scope_spans = vec![ScopeSpans { scope: Some(InstrumentationScope::default()), spans }];
        let resource_spans = vec![ResourceSpans { resource: Some(self.resource.clone()), scope_spans }];
        let request = ExportTraceServiceRequest { resource_spans };
        for attempt in 0..ATTEMPTS {
            self.spans.metrics().streams.inc();
            let answer = tokio::time::timeout(self.pace.timeout, self.client.export(request.clone())).await;
            let status = match answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))) {
                Ok(response) => {
                    self.pauses.reset();
                    self.exported(count, &response.into_inner());
                    return;
                }
                Err(status) => status,
            };
            if attempt == 0 {
                tracing::debug!(%status, spans = count, "spans cannot be exported");
            }
            // Also after the last attempt: the next batch has the same collector.
            self.pauses.wait().await;
            if !is_transient(status.code()) {
                break;
            }
        }
        self.spans.metrics().dropped_failed.inc_by(count);
        tracing::warn!(spans = count, "spans were dropped: the collector did not take them");
    }

    fn exported(&self, count: u64, response: &ExportTraceServiceResponse) {
        let metrics = self.spans.metrics();
        let rejected = response.partial_success.as_ref().map_or(0, |partial| partial.rejected_spans);
        let rejected = u64::try_from(rejected).unwrap_or_default().min(count);
        metrics.requests.inc();
        metrics.exported.inc_by(count - rejected);
        if rejected > 0 {
            metrics.dropped_rejected.inc_by(rejected);
            tracing::debug!(spans = rejected, "the collector rejected spans");
        }
    }
}

/// Whether the same request may succeed later (OTLP/gRPC response, "retryable").
fn is_transient(code: Code) -> bool {
    matches!(
        code,
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unavailable
            | Code::DataLoss
            // This side's: the connection failed.
            | Code::Unknown
    )
}

fn convert(span: Span) -> OtlpSpan {
    let Span { trace_id, span_id, parent_id, trace_state, name, kind, began, ended, attributes } = span;
    let kind = match kind {
        Kind::Server => SpanKind::Server,
        Kind::Client => SpanKind::Client,
    };
    OtlpSpan {
        trace_id: trace_id.to_be_bytes().to_vec(),
        span_id: span_id.to_be_bytes().to_vec(),
        trace_state: trace_state.unwrap_or_default().into(),
        parent_span_id: parent_id.to_be_bytes().to_vec(),
        name: name.into(),
        kind: kind.into(),
        start_time_unix_nano: nanos(began),
        end_time_unix_nano: nanos(ended),
        attributes: attributes
            .into_iter()
            .map(|(name, value)| attribute(name, Value::StringValue(value.into())))
            .collect(),
        flags: FLAGS,
    }
}

fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
