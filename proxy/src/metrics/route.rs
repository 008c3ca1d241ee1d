//! `outbound_{http,grpc}_route_*`: requests by route, and their attempts by backend.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use prometheus_client::{
    metrics::counter::Counter,
    registry::{Registry, Unit},
};
use weft_runtime::metrics::Family;

use super::{
    Counters, Labels, ProxyMetrics,
    by_host::ByHost,
    histogram::{CoarseSeconds, FineSeconds, FrameBytes, Histogram},
    label,
    retain::InUse,
    stream::{StatusLabels, Statuses, StreamEnd},
};

/// The families of HTTP routes, or of gRPC routes.
#[derive(Clone, Debug, Default)]
pub(super) struct RouteFamilies {
    statuses: Counters,
    duration: Family<Labels, Histogram<CoarseSeconds>>,
    request_frames: Family<Labels, Histogram<FrameBytes>>,
    retry_requests: Counters,
    retry_successes: Counters,
    retry_limit_exceeded: Counters,
    retry_overflow: Counters,
    backend_requests: Counters,
    backend_statuses: Counters,
    backend_duration: Family<Labels, Histogram<FineSeconds>>,
    backend_frames: Family<Labels, Histogram<FrameBytes>>,
}

/// Finds the metrics of one rule's requests and backends.
#[derive(Debug)]
pub(crate) struct RouteMetrics {
    families: RouteFamilies,
    is_grpc: bool,
    labels: Labels,
    in_use: Arc<InUse>,
    by_host: ByHost<RequestMetrics>,
}

/// What is counted of requests, once for each whatever its number of attempts.
#[derive(Debug)]
pub(crate) struct RequestMetrics {
    /// Sizes of the request's frames.
    pub(crate) frames: Histogram<FrameBytes>,
    statuses: Statuses,
    duration: Histogram<CoarseSeconds>,
    families: RouteFamilies,
    labels: Labels,
    in_use: Arc<InUse>,
    retries: OnceLock<RetryCounters>,
}

/// What is counted of attempts with one backend.
#[derive(Debug)]
pub(crate) struct BackendMetrics {
    /// Requests.
    pub(crate) requests: Counter,
    /// Sizes of the response's frames.
    pub(crate) frames: Histogram<FrameBytes>,
    statuses: Statuses,
    duration: Histogram<FineSeconds>,
}

/// How often requests are sent again, and why not.
#[derive(Debug)]
pub(crate) struct RetryCounters {
    /// Requests that were sent again.
    pub(crate) requests: Counter,
    /// Responses to them that the route wants.
    pub(crate) successes: Counter,
    /// Responses that were delivered because the limit was reached.
    pub(crate) limit_exceeded: Counter,
    /// Responses that were delivered because the budget was empty.
    pub(crate) overflow: Counter,
}

impl RouteFamilies {
    /// Registers the families under `outbound_<protocol>_route`.
    pub(super) fn register(&self, registry: &mut Registry, prefix: &'static str) {
        let registry = registry.sub_registry_with_prefix(prefix);
        registry.register("request_statuses", "Completed request-response streams", self.statuses.clone());
        registry.register_with_unit(
            "request_duration",
            "The time between a request's arrival and the end of its response",
            Unit::Seconds,
            self.duration.clone(),
        );
        registry.register_with_unit(
            "request_frame_size",
            "Sizes of requests' data frames",
            Unit::Bytes,
            self.request_frames.clone(),
        );
        let retry = registry.sub_registry_with_prefix("retry");
        retry.register("requests", "Requests that were sent again", self.retry_requests.clone());
        retry.register(
            "successes",
            "Retried requests with a response that is not retryable",
            self.retry_successes.clone(),
        );
        retry.register(
            "limit_exceeded",
            "Retryable responses that were delivered because the route's limit was reached",
            self.retry_limit_exceeded.clone(),
        );
        retry.register(
            "overflow",
            "Retryable responses that were delivered because the retry budget was empty",
            self.retry_overflow.clone(),
        );
        let backend = registry.sub_registry_with_prefix("backend");
        backend.register("requests", "Requests sent to a route's backends", self.backend_requests.clone());
        backend.register("response_statuses", "Completed responses of backends", self.backend_statuses.clone());
        backend.register_with_unit(
            "response_duration",
            "The time between the end of a request and the end of its response",
            Unit::Seconds,
            self.backend_duration.clone(),
        );
        backend.register_with_unit(
            "response_frame_size",
            "Sizes of responses' data frames",
            Unit::Bytes,
            self.backend_frames.clone(),
        );
    }
}

impl ProxyMetrics {
    /// The metrics of a rule; `labels` name its parent and its route. With `by_hostname`, each host has
    /// series of its own.
    pub(crate) fn route(&self, is_grpc: bool, labels: Labels, by_hostname: bool) -> RouteMetrics {
        let families = if is_grpc { &self.grpc_routes } else { &self.http_routes };
        RouteMetrics {
            families: families.clone(),
            is_grpc,
            in_use: Arc::new(self.retained.enter(&families.statuses, &labels)),
            labels,
            by_host: ByHost::new(by_hostname),
        }
    }
}

impl RouteMetrics {
    /// The metrics of requests for a host.
    pub(crate) fn requests(&self, host: Option<&str>) -> Arc<RequestMetrics> {
        self.by_host.of(host, |host| self.requests_of(host))
    }

    fn requests_of(&self, host: &str) -> RequestMetrics {
        let (families, in_use) = (&self.families, &self.in_use);
        let mut labels = self.labels.clone();
        labels.push(label("hostname", host.to_owned()));
        let kind = if self.is_grpc { StatusLabels::Grpc } else { StatusLabels::Http };
        RequestMetrics {
            frames: in_use.series(&families.request_frames, &labels),
            duration: in_use.series(&families.duration, &labels),
            statuses: Statuses::new(&families.statuses, kind, &labels, in_use),
            families: families.clone(),
            labels,
            in_use: Arc::clone(in_use),
            retries: OnceLock::new(),
        }
    }

    /// The metrics of attempts with the backend that the labels name.
    pub(crate) fn backend(&self, backend: Labels) -> BackendMetrics {
        let (families, in_use) = (&self.families, &self.in_use);
        let mut labels = self.labels.clone();
        labels.extend(backend);
        let kind = if self.is_grpc { StatusLabels::Grpc } else { StatusLabels::Http };
        BackendMetrics {
            requests: in_use.series(&families.backend_requests, &labels),
            frames: in_use.series(&families.backend_frames, &labels),
            duration: in_use.series(&families.backend_duration, &labels),
            statuses: Statuses::new(&families.backend_statuses, kind, &labels, in_use),
        }
    }
}

impl RequestMetrics {
    /// Counts a request's end.
    pub(crate) fn ended(&self, end: StreamEnd, duration: Duration) {
        self.statuses.count(end);
        self.duration.observe(duration);
    }

    /// The counters of retries.
    pub(crate) fn retries(&self) -> &RetryCounters {
        self.retries.get_or_init(|| {
            let counter = |family| self.in_use.series(family, &self.labels);
            RetryCounters {
                requests: counter(&self.families.retry_requests),
                successes: counter(&self.families.retry_successes),
                limit_exceeded: counter(&self.families.retry_limit_exceeded),
                overflow: counter(&self.families.retry_overflow),
            }
        })
    }
}

impl BackendMetrics {
    /// Counts a response's end.
    pub(crate) fn ended(&self, end: StreamEnd, duration: Duration) {
        self.statuses.count(end);
        self.duration.observe(duration);
    }
}

/// Whether a host is a name of DNS, as the label needs it; addresses are not.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::by_host::HOSTNAMES;

    #[test]
    fn host_names_are_labels_up_to_a_number() {
        let mut registry = Registry::default();
        let metrics = ProxyMetrics::register(&mut registry);
        let route = metrics.route(false, vec![label("route_name", "web")], true);
        for number in 0..1000 {
            route.requests(Some(&format!("host-{number}.demo"))).ended(StreamEnd::default(), Duration::ZERO);
        }
        for host in [None, Some("10.0.0.1"), Some("a b"), Some("[::1]")] {
            route.requests(host).ended(StreamEnd::default(), Duration::ZERO);
        }
        route.requests(Some("host-0.demo")).ended(StreamEnd::default(), Duration::ZERO);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let statuses = |line: &&str| line.starts_with("outbound_http_route_request_statuses_total");
        assert_eq!(text.lines().filter(statuses).count(), HOSTNAMES + 1);
        let line = |host: &str, count: usize| {
            let labels = format!(r#"route_name="web",hostname="{host}",http_status="",error="""#);
            let line = format!("outbound_http_route_request_statuses_total{{{labels}}} {count}");
            assert!(text.contains(&line), "{line} is not in\n{text}");
        };
        line("host-0.demo", 2);
        line("", 1000 - HOSTNAMES + 4);
        let unnamed = metrics.route(false, vec![label("route_name", "plain")], false);
        unnamed.requests(Some("host-0.demo")).ended(StreamEnd::default(), Duration::ZERO);
        text.clear();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains(r#"statuses_total{route_name="plain",hostname="","#), "{text}");
    }
}
