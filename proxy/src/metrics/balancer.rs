//! `outbound_{http,tcp,tls}_balancer_*`: endpoints of balancers, and requests that wait for one.

use std::{
    sync::atomic::AtomicU64,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::{Registry, Unit},
};
use weft_runtime::metrics::Family;

use super::{
    Counters, Labels, ProxyMetrics,
    histogram::{Histogram, QueueSeconds},
    label,
    retain::InUse,
};

type Seconds = Gauge<f64, AtomicU64>;

/// What a balancer distributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BalancerKind {
    /// Requests of HTTP and gRPC.
    Http,
    /// Connections.
    Tcp,
    /// Connections with the application's TLS.
    Tls,
}

/// The families of one prefix.
#[derive(Clone, Debug, Default)]
pub(super) struct BalancerFamilies {
    endpoints: Family<Labels, Gauge>,
    p2c_endpoints: Family<Labels, Gauge>,
    p2c_updates: Counters,
    length: Family<Labels, Gauge>,
    requests: Counters,
    latency: Family<Labels, Histogram<QueueSeconds>>,
    gate_open: Counters,
    gate_shut: Counters,
    gate_open_time: Family<Labels, Seconds>,
    gate_shut_time: Family<Labels, Seconds>,
    gate_timeout: Family<Labels, Seconds>,
}

/// What is counted of one balancer. Workers have balancers of their own, which share the series: gauges are their sum.
#[derive(Debug)]
pub(crate) struct BalancerMetrics {
    /// Endpoints that get requests.
    pub(crate) ready: Gauge,
    /// Endpoints that get none at the moment.
    pub(crate) pending: Gauge,
    /// All endpoints.
    pub(crate) endpoints: Gauge,
    /// First lists of endpoints.
    pub(crate) reset: Counter,
    /// Endpoints that were added or changed.
    pub(crate) added: Counter,
    /// Endpoints that were removed.
    pub(crate) removed: Counter,
    /// Requests that wait for an endpoint.
    pub(crate) waiting: Gauge,
    requests: Counter,
    latency: Histogram<QueueSeconds>,
    gate_open: Counter,
    gate_shut: Counter,
    gate_open_time: Seconds,
    gate_shut_time: Seconds,
    /// Keeps the series.
    in_use: InUse,
}

impl BalancerFamilies {
    /// Registers the families under `outbound_<protocol>_balancer`.
    pub(super) fn register(&self, registry: &mut Registry, prefix: &'static str) {
        let registry = registry.sub_registry_with_prefix(prefix);
        registry.register("endpoints", "Endpoints of a balancer by state", self.endpoints.clone());
        registry.register("p2c_endpoints", "Endpoints of a balancer", self.p2c_endpoints.clone());
        registry.register("p2c_updates", "Changes of a balancer's endpoints", self.p2c_updates.clone());
        let queue = registry.sub_registry_with_prefix("queue");
        queue.register("length", "Requests that wait for an endpoint", self.length.clone());
        queue.register("requests", "Requests that asked for an endpoint", self.requests.clone());
        let help = "How long requests waited for an endpoint";
        queue.register_with_unit("latency", help, Unit::Seconds, self.latency.clone());
        let gate = queue.sub_registry_with_prefix("gate");
        gate.register("open", "Changes to the state in which requests wait for an endpoint", self.gate_open.clone());
        gate.register("shut", "Changes to the state in which requests fail at once", self.gate_shut.clone());
        let help = "When requests began to wait, 0 while they fail at once";
        gate.register_with_unit("open_time", help, Unit::Seconds, self.gate_open_time.clone());
        let help = "When requests began to fail at once, 0 while they wait";
        gate.register_with_unit("shut_time", help, Unit::Seconds, self.gate_shut_time.clone());
        let help = "How long requests wait for an endpoint";
        gate.register_with_unit("timeout", help, Unit::Seconds, self.gate_timeout.clone());
    }
}

impl ProxyMetrics {
    /// The metrics of a balancer; `labels` name parent and backend, `timeout` is how long requests wait.
    pub(crate) fn balancer(&self, of: BalancerKind, labels: &Labels, timeout: Duration) -> BalancerMetrics {
        let families = match of {
            BalancerKind::Http => &self.http_balancers,
            BalancerKind::Tcp => &self.tcp_balancers,
            BalancerKind::Tls => &self.tls_balancers,
        };
        let with = |key: &'static str, value: &'static str| {
            let mut all = vec![label(key, value)];
            all.extend(labels.iter().cloned());
            all
        };
        let in_use = self.retained.enter(&families.requests, labels);
        let endpoints = |state| in_use.series(&families.endpoints, &with("endpoint_state", state));
        let updates = |op| in_use.series(&families.p2c_updates, &with("op", op));
        let metrics = BalancerMetrics {
            ready: endpoints("ready"),
            pending: endpoints("pending"),
            endpoints: in_use.series(&families.p2c_endpoints, labels),
            reset: updates("Reset"),
            added: updates("Add"),
            removed: updates("Remove"),
            waiting: in_use.series(&families.length, labels),
            requests: in_use.series(&families.requests, labels),
            latency: in_use.series(&families.latency, labels),
            gate_open: in_use.series(&families.gate_open, labels),
            gate_shut: in_use.series(&families.gate_shut, labels),
            gate_open_time: in_use.series(&families.gate_open_time, labels),
            gate_shut_time: in_use.series(&families.gate_shut_time, labels),
            in_use,
        };
        metrics.in_use.series(&families.gate_timeout, labels).set(timeout.as_secs_f64());
        metrics.gate_opened();
        metrics
    }
}

impl BalancerMetrics {
    /// Counts a request that has an endpoint, or none in time.
    pub(crate) fn waited(&self, duration: Duration) {
        self.requests.inc();
        self.latency.observe(duration);
    }

    /// An endpoint gets no requests for a while.
    pub(crate) fn ejected(&self) {
        self.ready.dec();
        self.pending.inc();
    }

    /// It gets requests again.
    pub(crate) fn restored(&self) {
        self.pending.dec();
        self.ready.inc();
    }

    /// Requests wait for an endpoint from now on.
    pub(crate) fn gate_opened(&self) {
        self.gate_open.inc();
        self.gate_open_time.set(unix_now());
        self.gate_shut_time.set(0.0);
    }

    /// Requests fail at once from now on.
    pub(crate) fn gate_was_shut(&self) {
        self.gate_shut.inc();
        self.gate_shut_time.set(unix_now());
        self.gate_open_time.set(0.0);
    }
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
