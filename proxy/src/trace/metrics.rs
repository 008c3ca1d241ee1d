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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrape_has_linkerds_names_without_the_suffix_of_counters() {
        let mut registry = Registry::default();
        let metrics = TraceMetrics::register(&mut registry);
        metrics.streams.inc_by(3);
        metrics.requests.inc_by(2);
        metrics.exported.inc_by(40);
        metrics.dropped_full.inc_by(5);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "opentelemetry_span_export_streams 3",
            "opentelemetry_span_export_requests 2",
            "opentelemetry_span_exports 40",
            r#"weft_proxy_spans_dropped_total{reason="queue_full"} 5"#,
            r#"weft_proxy_spans_dropped_total{reason="failed"} 0"#,
            r#"weft_proxy_spans_dropped_total{reason="rejected"} 0"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
