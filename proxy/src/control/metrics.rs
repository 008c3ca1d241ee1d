//! Metrics of the clients of the control plane, under Linkerd's names: requests and responses of all of them, and the
//! replicas of each.
//!
//! There is no queue in front of the replicas, so that Linkerd's `…_balancer_queue_*` have no counterpart.

use std::time::Duration;

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use tonic::Code;
use weft_runtime::metrics::Family;

use crate::{
    config::ControlAddr,
    metrics::{Counters, Labels, LatencyMs, label},
};

type Gauges = Family<Labels, Gauge>;

/// A service of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// The certificate authority.
    Identity,
    /// Discovery.
    Destination,
    /// Policy.
    Policy,
    /// The collector of spans.
    Collector,
}

/// All families. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ControlMetrics {
    requests: Counters,
    responses: Counters,
    latency: Family<Labels, LatencyMs>,
    identity: Balancer,
    destination: Balancer,
    policy: Balancer,
    collector: Balancer,
}

#[derive(Clone, Debug, Default)]
struct Balancer {
    endpoints: Gauges,
    p2c_endpoints: Gauges,
    p2c_updates: Counters,
}

/// The handles of one client.
#[derive(Debug)]
pub(crate) struct ServiceMetrics {
    labels: Labels,
    /// `control_request_total`.
    pub(super) requests: Counter,
    responses: Counters,
    latency: Family<Labels, LatencyMs>,
    /// Replicas that take requests.
    pub(super) ready: Gauge,
    /// Replicas that rest after a failure.
    pub(super) pending: Gauge,
    /// All replicas.
    pub(super) p2c_endpoints: Gauge,
    /// Answers of DNS that changed the replicas.
    pub(super) p2c_resets: Counter,
}

impl Service {
    /// The service's name in names of families and for the label `client`.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Destination => "destination",
            Self::Policy => "policy",
            Self::Collector => "opentelemetry",
        }
    }
}

impl ControlMetrics {
    /// Creates the families and registers them. The encoder appends `_total` to counters.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("control_request", "Requests to the control plane", metrics.requests.clone());
        registry.register("control_response", "Responses of the control plane", metrics.responses.clone());
        let help = "Milliseconds from a request to the control plane to the first frame of its response's body";
        registry.register("control_response_latency_ms", help, metrics.latency.clone());
        for service in [Service::Identity, Service::Destination, Service::Policy, Service::Collector] {
            let Balancer { endpoints, p2c_endpoints, p2c_updates } = metrics.balancer(service).clone();
            // Linkerd's proxy has this one's without the prefix of the others.
            let control = if service == Service::Collector { "" } else { "control_" };
            let registry = registry.sub_registry_with_prefix(format!("{control}{}_balancer", service.label()));
            registry.register("endpoints", "Replicas by state", endpoints);
            registry.register("p2c_endpoints", "Replicas", p2c_endpoints);
            registry.register("p2c_updates", "Changes of the replicas", p2c_updates);
        }
        metrics
    }

    /// `control_response_total`.
    #[cfg(test)]
    pub(super) fn responses(&self) -> &Counters {
        &self.responses
    }

    fn balancer(&self, service: Service) -> &Balancer {
        match service {
            Service::Identity => &self.identity,
            Service::Destination => &self.destination,
            Service::Policy => &self.policy,
            Service::Collector => &self.collector,
        }
    }

    /// The handles of a service's client.
    pub(crate) fn service(&self, service: Service, addr: &ControlAddr) -> ServiceMetrics {
        let host = addr.host.trim_end_matches('.');
        let addr_label = label("addr", format!("{host}:{}", addr.port));
        let of = |key: &'static str, value: &'static str| vec![addr_label.clone(), label(key, value)];
        let balancer = self.balancer(service);
        let mut labels = vec![addr_label.clone()];
        match &addr.identity {
            Some(identity) if !addr.is_loopback() => {
                labels.extend([label("tls", "true"), label("server_id", identity.to_string())]);
            }
            _ => labels.extend([label("tls", "no_identity"), label("no_tls_reason", "loopback")]),
        }
        ServiceMetrics {
            requests: self.requests.get_or_create(&labels),
            responses: self.responses.clone(),
            latency: self.latency.clone(),
            ready: balancer.endpoints.get_or_create(&of("endpoint_state", "ready")),
            pending: balancer.endpoints.get_or_create(&of("endpoint_state", "pending")),
            p2c_endpoints: balancer.p2c_endpoints.get_or_create(&vec![addr_label.clone()]),
            p2c_resets: balancer.p2c_updates.get_or_create(&vec![label("op", "Reset"), addr_label.clone()]),
            labels,
        }
    }
}

impl ServiceMetrics {
    /// Counts the end of a response. A stream that this side ended has no status, and is a success.
    pub(super) fn responded(&self, http_status: u16, grpc_status: Option<Code>, has_failed: bool) {
        let mut labels = self.with_status(http_status);
        let is_success = !has_failed && grpc_status.is_none_or(|code| !is_failure(code));
        labels.push(label("classification", if is_success { "success" } else { "failure" }));
        if let Some(code) = grpc_status {
            labels.push(label("grpc_status", (code as i32).to_string()));
        }
        self.responses.get_or_create(&labels).inc();
    }

    /// Observes the time until the first frame of a response's body.
    pub(super) fn latency(&self, http_status: u16, latency: Duration) {
        self.latency.get_or_create(&self.with_status(http_status)).observe(latency);
    }

    fn with_status(&self, http_status: u16) -> Labels {
        let mut labels = self.labels.clone();
        labels.push(label("status_code", http_status.to_string()));
        labels
    }
}

/// The statuses that Linkerd counts as failures of the server.
fn is_failure(code: Code) -> bool {
    matches!(
        code,
        Code::Unknown
            | Code::DeadlineExceeded
            | Code::PermissionDenied
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
    )
}
