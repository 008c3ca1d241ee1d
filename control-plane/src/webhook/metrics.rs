//! Metrics of the webhooks, under Linkerd's names where it has one.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{counter::Counter, family::Family, gauge::ConstGauge},
    registry::Registry,
};
use weft_tls::serving::CurrentPair;

/// Counters of the injector (`linkerd2:controller/proxy-injector/metrics.go`).
#[derive(Clone, Default)]
pub(crate) struct InjectorMetrics {
    requests: Family<RequestLabels, Counter>,
    responses: Family<ResponseLabels, Counter>,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    /// Kind of the owner, in lower case, or of the object itself; `other` for kinds that Kubernetes does not have.
    pub(crate) owner_kind: &'static str,
    /// Namespace of the object; it exists, because its annotations were read.
    pub(crate) namespace: String,
    /// Where `linkerd.io/inject` is set: on the `workload`, on the `namespace`, or nowhere.
    pub(crate) annotation_at: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    owner_kind: &'static str,
    namespace: String,
    annotation_at: &'static str,
    skip: &'static str,
    skip_reason: &'static str,
}

impl InjectorMetrics {
    /// Registers the counters.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "proxy_inject_admission_requests",
            "Objects in requests to the injector",
            metrics.requests.clone(),
        );
        registry.register(
            "proxy_inject_admission_responses",
            "Objects in answers of the injector",
            metrics.responses.clone(),
        );
        metrics
    }

    /// Counts a request.
    pub(crate) fn count_request(&self, labels: &RequestLabels) {
        self.requests.get_or_create(labels).inc();
    }

    /// Counts an answer; `skipped` is the reason why nothing was injected, or empty.
    pub(crate) fn count_response(&self, labels: RequestLabels, skipped: &'static str) {
        let RequestLabels { owner_kind, namespace, annotation_at } = labels;
        let skip = if skipped.is_empty() { "false" } else { "true" };
        let labels = ResponseLabels { owner_kind, namespace, annotation_at, skip, skip_reason: skipped };
        self.responses.get_or_create(&labels).inc();
    }
}

/// Registers `webhook_cert_ttl_seconds`: seconds until the certificate in force expires, computed at each scrape; 0
/// after that, or before there is one.
pub(super) fn register_ttl(registry: &mut Registry, component: &'static str, current: CurrentPair) {
    registry.register_collector(Box::new(Ttl { component, current }));
}

struct Ttl {
    component: &'static str,
    current: CurrentPair,
}

impl fmt::Debug for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ttl")
    }
}

impl Collector for Ttl {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let until = self.current.get().map(|pair| pair.not_after);
        let left = until.and_then(|until| until.duration_since(SystemTime::now()).ok()).unwrap_or(Duration::ZERO);
        let gauge = ConstGauge::new(left.as_secs_f64());
        let help = "Seconds until the certificate of the webhook expires";
        let mut encoder = encoder.encode_descriptor("webhook_cert_ttl_seconds", help, None, gauge.metric_type())?;
        gauge.encode(encoder.encode_family(&[("webhook", self.component)])?)
    }
}
