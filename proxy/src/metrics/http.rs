//! Metrics of HTTP: requests, responses with their classification, latency.

use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, family::Family};

use super::{Counters, Labels, ProxyMetrics, histogram::LatencyMs, label, retain::InUse};

/// Counters of requests of one kind, looked up once and shared.
#[derive(Debug)]
pub(crate) struct HttpMetrics {
    requests: Counter,
    responses: Counters,
    latency: Family<Labels, LatencyMs>,
    labels: Labels,
    in_use: InUse,
    /// One entry per outcome; there are few, so a scan is fastest.
    seen: Mutex<Vec<(Outcome, Counter, LatencyMs)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Outcome {
    status: u16,
    success: bool,
    grpc_status: Option<u8>,
}

impl HttpMetrics {
    pub(super) fn new(metrics: &ProxyMetrics, labels: Labels) -> Self {
        // Transport metrics also have direction and target; the name distinguishes the kinds.
        let mut key = labels.clone();
        key.push(label("kind", "http"));
        let in_use = metrics.retained.enter(key);
        in_use.has("request", &metrics.requests, &labels);
        Self {
            in_use,
            requests: metrics.requests.get_or_create_owned(&labels),
            responses: metrics.responses.clone(),
            latency: metrics.response_latency.clone(),
            labels,
            seen: Mutex::new(Vec::new()),
        }
    }

    /// Counts a request.
    pub(crate) fn request(&self) {
        self.requests.inc();
    }

    /// Counts a response at its end.
    pub(crate) fn response(&self, status: u16, success: bool, grpc_status: Option<u8>, latency: Duration) {
        let outcome = Outcome { status, success, grpc_status };
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
        entry.2.observe(latency);
    }

    fn look_up(&self, outcome: Outcome) -> (Counter, LatencyMs) {
        let mut labels = self.labels.clone();
        labels.push(label("status_code", outcome.status.to_string()));
        self.in_use.has("response_latency_ms", &self.latency, &labels);
        let latency = self.latency.get_or_create_owned(&labels);
        labels.push(label("classification", if outcome.success { "success" } else { "failure" }));
        if let Some(status) = outcome.grpc_status {
            labels.push(label("grpc_status", status.to_string()));
        }
        self.in_use.has("response", &self.responses, &labels);
        (self.responses.get_or_create_owned(&labels), latency)
    }
}
