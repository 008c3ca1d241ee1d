//! Requests to Kubernetes APIs, under the names of Linkerd's clients (`linkerd2:pkg/prometheus/prometheus.go`).

use http::{Method, StatusCode};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use tokio::time::Instant;

/// Buckets of the time until an answer begins, in seconds; a watch's ends later.
const LATENCY_BUCKETS: [f64; 10] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0];
/// The client of this cluster's API.
const OWN: &str = "k8s";
/// The clients of linked clusters' APIs, all together.
const LINKS: &str = "link";

/// Counters of the requests of one client.
#[derive(Clone)]
pub(crate) struct RequestMetrics {
    client: &'static str,
    requests: Family<Answered, Counter>,
    latency: Family<Answered, Histogram, fn() -> Histogram>,
    in_flight: Family<Client, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Client {
    client: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    client: &'static str,
    code: u16,
    method: &'static str,
}

impl RequestMetrics {
    /// Registers the counters, for the client of this cluster's API.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(LATENCY_BUCKETS);
        let metrics = Self {
            client: OWN,
            requests: Family::default(),
            latency: Family::new_with_constructor(histogram),
            in_flight: Family::default(),
        };
        registry.register("http_client_requests", "Requests that were answered", metrics.requests.clone());
        let help = "Time until the answer to a request began";
        registry.register("http_client_request_latency_seconds", help, metrics.latency.clone());
        let help = "Requests whose answer has not begun";
        registry.register("http_client_in_flight_requests", help, metrics.in_flight.clone());
        metrics
    }

    /// The same counters for clients of linked clusters' APIs.
    pub(crate) fn of_links(&self) -> Self {
        Self { client: LINKS, ..self.clone() }
    }

    /// Counts a request as in flight until the result is dropped.
    pub(crate) fn begin(&self, method: &Method) -> Requested {
        self.in_flight.get_or_create(&Client { client: self.client }).inc();
        Requested { metrics: self.clone(), method: label(method), since: Instant::now() }
    }
}

/// A request without an answer.
pub(crate) struct Requested {
    metrics: RequestMetrics,
    method: &'static str,
    since: Instant,
}

impl Requested {
    /// Counts the answer.
    pub(crate) fn answered(&self, status: StatusCode) {
        let Self { metrics, method, since } = self;
        let labels = Answered { client: metrics.client, code: status.as_u16(), method };
        metrics.requests.get_or_create(&labels).inc();
        metrics.latency.get_or_create(&labels).observe(since.elapsed().as_secs_f64());
    }
}

impl Drop for Requested {
    fn drop(&mut self) {
        self.metrics.in_flight.get_or_create(&Client { client: self.metrics.client }).dec();
    }
}

/// Go's spelling, in lower case. Requests to an API server have one of these methods.
fn label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "get",
        Method::POST => "post",
        Method::PUT => "put",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_in_flight_until_they_end_and_counted_when_they_are_answered() {
        let mut registry = Registry::default();
        let metrics = RequestMetrics::new(&mut registry);
        let scrape = |registry: &Registry| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
            text
        };
        let (answered, failed) = (metrics.begin(&Method::GET), metrics.of_links().begin(&Method::PATCH));
        answered.answered(StatusCode::OK);
        drop(answered);
        let text = scrape(&registry);
        let own = r#"client="k8s",code="200",method="get""#;
        for line in [
            format!("http_client_requests_total{{{own}}} 1"),
            format!("http_client_request_latency_seconds_count{{{own}}} 1"),
            "http_client_in_flight_requests{client=\"k8s\"} 0".to_owned(),
            "http_client_in_flight_requests{client=\"link\"} 1".to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        drop(failed);
        let text = scrape(&registry);
        assert!(text.contains("in_flight_requests{client=\"link\"} 0") && !text.contains("patch"), "{text}");
    }
}
