//! What the component counts about itself.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use weft_runtime::metrics::Family;

/// Counters; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct VizMetrics {
    /// Pods that the watch knows.
    pub(crate) pods: Gauge,
    /// Pods beyond the most that are kept.
    pub(crate) pods_left_out: Gauge,
    /// Taps that are open.
    pub(crate) taps: Gauge,
    requests: Family<RequestLabels, Counter>,
    scrapes: Family<ResultLabels, Counter>,
    /// Bytes of scrapes.
    pub(crate) scrape_bytes: Counter,
    reviews: Family<ReviewLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReviewLabels {
    kind: &'static str,
    result: &'static str,
}

impl VizMetrics {
    /// Registers the families.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("weft_viz_pods", "Pods that the watch knows", metrics.pods.clone());
        let left_out = "Pods that are not kept because there are too many";
        registry.register("weft_viz_pods_left_out", left_out, metrics.pods_left_out.clone());
        registry.register("weft_viz_taps", "Taps that are open", metrics.taps.clone());
        registry.register("weft_viz_requests", "Answered requests by method and gRPC code", metrics.requests.clone());
        registry.register("weft_viz_scrapes", "Scrapes of proxies by result", metrics.scrapes.clone());
        registry.register("weft_viz_scrape_bytes", "Bytes of scrapes", metrics.scrape_bytes.clone());
        let reviews = "Requests to the Kubernetes API about callers, by kind and result";
        registry.register("weft_viz_reviews", reviews, metrics.reviews.clone());
        metrics
    }

    /// Counts an answer.
    pub(crate) fn answered(&self, method: &'static str, code: tonic::Code) {
        self.requests.get_or_create(&RequestLabels { method, code: label(code) }).inc();
    }

    /// Counts a scrape.
    pub(crate) fn scraped(&self, bytes: Option<usize>) {
        let result = if bytes.is_some() { "success" } else { "failure" };
        self.scrapes.get_or_create(&ResultLabels { result }).inc();
        self.scrape_bytes.inc_by(bytes.unwrap_or_default() as u64);
    }

    /// Counts a review of a token or of an access.
    pub(crate) fn reviewed(&self, kind: &'static str, result: &'static str) {
        self.reviews.get_or_create(&ReviewLabels { kind, result }).inc();
    }
}

/// The codes that the API answers with.
fn label(code: tonic::Code) -> &'static str {
    use tonic::Code;
    match code {
        Code::Ok => "OK",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::Unavailable => "Unavailable",
        Code::Unauthenticated => "Unauthenticated",
        _ => "Internal",
    }
}
