//! Metrics of the export, three of them under Linkerd's names.

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::Counter},
    registry::Registry,
};

use crate::metrics::{Counters, label};

/// The families. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TraceMetrics {
    /// Attempts of an export.
    pub(super) streams: Counter,
    /// Exports that the collector answered.
    pub(super) requests: Counter,
    /// Spans that it accepted.
    pub(super) exported: Counter,
    /// Spans that found no room in the queue.
    pub(super) dropped_full: Counter,
    /// Spans that could not be exported.
    pub(super) dropped_failed: Counter,
    /// Spans that the collector rejected.
    pub(super) dropped_rejected: Counter,
}

/// A counter whose name does not end with `_total`.
#[derive(Clone, Debug)]
struct Unsuffixed(Counter);

impl TraceMetrics {
    /// Creates the families and registers them.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let dropped = Counters::default();
        let with = |reason| dropped.get_or_create(&vec![label("reason", reason)]);
        let metrics = Self {
            dropped_full: with("queue_full"),
            dropped_failed: with("failed"),
            dropped_rejected: with("rejected"),
            ..Self::default()
        };
        for (name, help, counter) in [
            ("opentelemetry_span_export_streams", "Attempts to export spans", &metrics.streams),
            ("opentelemetry_span_export_requests", "Exports of spans that the collector answered", &metrics.requests),
            ("opentelemetry_span_exports", "Exported spans", &metrics.exported),
        ] {
            registry.register(name, help, Unsuffixed(counter.clone()));
        }
        registry.register("weft_proxy_spans_dropped", "Spans that were not exported", dropped);
        metrics
    }
}

impl EncodeMetric for Unsuffixed {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        encoder.encode_gauge(&self.0.get())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Unknown
    }
}
