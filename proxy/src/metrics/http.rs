//! Metrics of HTTP: requests, responses with their classification, latency; of endpoints and of ServiceProfiles'
//! routes.

use std::{num::NonZeroU128, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use weft_runtime::metrics::Family;

use super::{
    Counters, Labels,
    bounded::{Bounded, shared_status, status_value},
    histogram::LatencyMs,
    label,
    retain::{InUse, Retained},
};

/// Three families with a common prefix.
#[derive(Clone, Debug, Default)]
pub(super) struct HttpFamilies {
    requests: Counters,
    responses: Counters,
    latency: Family<Labels, LatencyMs>,
}

impl HttpFamilies {
    /// Registers the families.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("request", "HTTP requests", self.requests.clone());
        registry.register("response", "HTTP responses", self.responses.clone());
        let help = "Milliseconds from a request to the first frame of its response's body";
        registry.register("response_latency_ms", help, self.latency.clone());
    }
}

/// What is counted of a ServiceProfile's route.
#[derive(Debug)]
pub(crate) struct ProfileMetrics {
    /// Requests as the application sees them.
    pub(crate) route: Arc<HttpMetrics>,
    /// Requests with their repetitions.
    pub(crate) actual: Arc<HttpMetrics>,
    /// Failures for which the budget had a retry.
    pub(crate) retried: (InUse, Counter),
    /// Failures for which it had none.
    pub(crate) skipped: (InUse, Counter),
}

/// Counters of requests of one kind, looked up once and shared.
#[derive(Debug)]
pub(crate) struct HttpMetrics {
    requests: Counter,
    families: HttpFamilies,
    labels: Labels,
    in_use: InUse,
    seen: Mutex<Bounded<Outcome, Counter>>,
    /// By HTTP status.
    latencies: Mutex<Bounded<u16, LatencyMs>>,
}

/// How a response ended, as the labels of `response_total` say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The HTTP status; `None` if there was no response. Linkerd's series has no label `status_code` then, and no
    /// latency.
    pub(crate) status: Option<u16>,
    /// Whether its class is `success`.
    pub(crate) success: bool,
    /// The gRPC status.
    pub(crate) grpc_status: Option<u8>,
    /// What ended it early, in Linkerd's words; an option as that of `StreamEnd`.
    pub(crate) error: Option<&'static str>,
}

impl Outcome {
    /// A response without a gRPC status that succeeded.
    #[cfg(test)]
    pub(crate) const fn success(status: u16) -> Self {
        Self { status: Some(status), success: true, grpc_status: None, error: None }
    }

    /// A failure without a gRPC status; without any, if there was no response.
    pub(crate) const fn failure(status: Option<u16>, error: Option<&'static str>) -> Self {
        Self { status, success: false, grpc_status: None, error }
    }

    /// Without what the server chooses, except the class of the status.
    fn other(self) -> Self {
        Self { status: self.status.map(shared_status), grpc_status: None, ..self }
    }
}

impl HttpMetrics {
    pub(super) fn new(families: &HttpFamilies, retained: &Retained, labels: Labels) -> Self {
        let in_use = retained.enter(&families.requests, &labels);
        Self {
            requests: in_use.series(&families.requests, &labels),
            in_use,
            families: families.clone(),
            labels,
            seen: Mutex::default(),
            latencies: Mutex::default(),
        }
    }

    /// The labels of all series.
    pub(crate) fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Counts a request.
    pub(crate) fn request(&self) {
        self.requests.inc();
    }

    /// Counts a response at its end.
    pub(crate) fn response(&self, outcome: Outcome) {
        self.seen.lock().get(outcome, outcome.other(), |outcome| self.response_counter(outcome)).inc();
    }

    /// Observes the time until the first frame of a response's body, as Linkerd does. A trace that is collected becomes
    /// the exemplar.
    pub(crate) fn latency(&self, status: u16, latency: Duration, trace_id: Option<NonZeroU128>) {
        let mut latencies = self.latencies.lock();
        let histogram = latencies.get(status, shared_status(status), |status| self.latency_histogram(status));
        match trace_id {
            None => histogram.observe(latency),
            Some(trace_id) => histogram.observe_traced(latency, trace_id),
        }
    }

    /// Counts a request whose server did not answer.
    pub(crate) fn failure(&self, outcome: Outcome, latency: Duration) {
        if let Some(status) = outcome.status {
            self.latency(status, latency, None);
        }
        self.response(outcome);
    }

    fn latency_histogram(&self, status: u16) -> LatencyMs {
        let mut labels = self.labels.clone();
        labels.push(label("status_code", status_value(status)));
        self.in_use.series(&self.families.latency, &labels)
    }

    fn response_counter(&self, outcome: Outcome) -> Counter {
        let mut labels = self.labels.clone();
        if let Some(status) = outcome.status {
            labels.push(label("status_code", status_value(status)));
        }
        labels.push(label("classification", if outcome.success { "success" } else { "failure" }));
        if let Some(status) = outcome.grpc_status {
            labels.push(label("grpc_status", status.to_string()));
        }
        if let Some(error) = outcome.error {
            labels.push(label("error", error));
        }
        self.in_use.series(&self.families.responses, &labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Direction, ProxyMetrics};

    #[test]
    fn statuses_beyond_a_number_share_series() {
        let mut registry = Registry::default();
        let metrics = ProxyMetrics::register(&mut registry);
        let http = metrics.http(Direction::Outbound, &Labels::new());
        for status in 100..1000 {
            for grpc_status in [None, Some(14)] {
                http.latency(status, Duration::ZERO, None);
                http.response(Outcome {
                    status: Some(status),
                    success: grpc_status.is_none(),
                    grpc_status,
                    error: None,
                });
            }
        }
        let lines = |name: &str| -> Vec<(String, u64)> {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let of_name = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.split_once("} "));
            of_name.map(|(labels, value)| (labels.to_owned(), value.parse().unwrap())).collect()
        };
        let (responses, latencies) = (lines("response_total"), lines("response_latency_ms_count"));
        // 64 each, and of each class of statuses one series of latencies, and one of successes and of failures.
        for (series, most) in [(&responses, 64 + 18), (&latencies, 64 + 9)] {
            assert_eq!((series.len(), series.iter().map(|(_, value)| value).sum::<u64>()), (most, 1800));
        }
        let shared = responses.iter().filter(|(labels, _)| labels.contains(r#"status_code="5xx""#));
        let mut shared: Vec<_> = shared.map(|(labels, value)| (labels.contains("success"), *value)).collect();
        shared.sort_unstable();
        assert_eq!(shared, [(false, 100), (true, 100)]);
        drop(http);
        metrics.evict(Duration::ZERO);
        assert_eq!((lines("response_total").len(), lines("response_latency_ms_count").len()), (0, 0));
    }
}
