//! Metrics of HTTP: requests, responses with their classification, latency; of endpoints and of ServiceProfiles' routes.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use weft_runtime::metrics::Family;

use super::{
    Counters, Labels,
    histogram::LatencyMs,
    label,
    retain::{InUse, Retained},
};

/// Three families with a common prefix.
#[derive(Clone, Debug, Default)]
pub(super) struct HttpFamilies {
    names: Names,
    requests: Counters,
    responses: Counters,
    latency: Family<Labels, LatencyMs>,
}

#[derive(Clone, Copy, Debug)]
struct Names {
    requests: &'static str,
    responses: &'static str,
    latency: &'static str,
}

impl Default for Names {
    fn default() -> Self {
        Self { requests: "request", responses: "response", latency: "response_latency_ms" }
    }
}

impl HttpFamilies {
    /// `route_*`: requests as the application sees them.
    pub(super) fn of_routes() -> Self {
        let names =
            Names { requests: "route_request", responses: "route_response", latency: "route_response_latency_ms" };
        Self { names, ..Self::default() }
    }

    /// `route_actual_*`: requests with their repetitions.
    pub(super) fn of_actual_routes() -> Self {
        let names = Names {
            requests: "route_actual_request",
            responses: "route_actual_response",
            latency: "route_actual_response_latency_ms",
        };
        Self { names, ..Self::default() }
    }

    /// Registers the families.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(self.names.requests, "HTTP requests", self.requests.clone());
        registry.register(self.names.responses, "HTTP responses", self.responses.clone());
        let help = "Milliseconds from a request's arrival to its response's end";
        registry.register(self.names.latency, help, self.latency.clone());
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
    /// One entry per outcome; there are few, so a scan is fastest.
    seen: Mutex<Vec<(Outcome, Counter, Option<LatencyMs>)>>,
}

/// How a response ended, as the labels of `response_total` say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The HTTP status; `None` if there was no response. Linkerd's series has no label `status_code` then, and no latency.
    pub(crate) status: Option<u16>,
    /// Whether its class is `success`.
    pub(crate) success: bool,
    /// The gRPC status.
    pub(crate) grpc_status: Option<u8>,
    /// What ended it early, in Linkerd's words; empty if nothing did.
    pub(crate) error: &'static str,
}

impl Outcome {
    /// A response without a gRPC status that succeeded.
    #[cfg(test)]
    pub(crate) const fn success(status: u16) -> Self {
        Self { status: Some(status), success: true, grpc_status: None, error: "" }
    }

    /// A failure without a gRPC status; without any, if there was no response.
    pub(crate) const fn failure(status: Option<u16>, error: &'static str) -> Self {
        Self { status, success: false, grpc_status: None, error }
    }
}

impl HttpMetrics {
    pub(super) fn new(families: &HttpFamilies, retained: &Retained, labels: Labels) -> Self {
        // Transport metrics also have direction and target; the name distinguishes the kinds.
        let mut key = labels.clone();
        key.push(label("kind", families.names.requests));
        let in_use = retained.enter(key);
        Self {
            requests: in_use.series(families.names.requests, &families.requests, &labels),
            in_use,
            families: families.clone(),
            labels,
            seen: Mutex::new(Vec::new()),
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
    pub(crate) fn response(&self, outcome: Outcome, latency: Duration) {
        let mut seen = self.seen.lock();
        let entry = match seen.iter().position(|(known, ..)| *known == outcome) {
            Some(index) => &seen[index],
            None => {
                let (counter, histogram) = self.look_up(outcome);
                seen.push((outcome, counter, histogram));
                &seen[seen.len() - 1]
            }
        };
        entry.1.inc();
        if let Some(histogram) = &entry.2 {
            histogram.observe(latency);
        }
    }

    fn look_up(&self, outcome: Outcome) -> (Counter, Option<LatencyMs>) {
        let mut labels = self.labels.clone();
        let HttpFamilies { names, responses, latency, .. } = &self.families;
        let latency = outcome.status.map(|status| {
            labels.push(label("status_code", status.to_string()));
            self.in_use.series(names.latency, latency, &labels)
        });
        labels.push(label("classification", if outcome.success { "success" } else { "failure" }));
        if let Some(status) = outcome.grpc_status {
            labels.push(label("grpc_status", status.to_string()));
        }
        if !outcome.error.is_empty() {
            labels.push(label("error", outcome.error));
        }
        (self.in_use.series(names.responses, responses, &labels), latency)
    }
}
