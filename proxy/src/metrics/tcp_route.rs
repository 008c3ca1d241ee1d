//! `outbound_{tcp,tls}_route_*`: connections by route.

use prometheus_client::registry::Registry;

use super::{Counters, Labels, ProxyMetrics, label, retain::InUse};

/// The families of opaque routes, or of TLS routes.
#[derive(Clone, Debug, Default)]
pub(super) struct TcpRouteFamilies {
    open: Counters,
    close: Counters,
}

/// A connection on a route.
#[derive(Debug)]
pub(crate) struct TcpRoute {
    in_use: InUse,
    close: Counters,
    labels: Labels,
}

impl TcpRouteFamilies {
    /// Registers the families under `outbound_<protocol>_route`.
    pub(super) fn register(&self, registry: &mut Registry, prefix: &'static str) {
        let registry = registry.sub_registry_with_prefix(prefix);
        registry.register("open", "Opened connections", self.open.clone());
        registry.register("close", "Closed connections", self.close.clone());
    }
}

impl ProxyMetrics {
    /// Counts a connection on a route. Its series are kept while a connection uses the route and for the retention time
    /// afterwards.
    pub(crate) fn tcp_route(&self, is_tls: bool, labels: Labels) -> TcpRoute {
        let (families, prefix) = match is_tls {
            true => (&self.tls_routes, "outbound_tls_route"),
            false => (&self.tcp_routes, "outbound_tcp_route"),
        };
        let mut key = labels.clone();
        key.push(label("kind", prefix));
        let in_use = self.retained.enter(key);
        in_use.series("open", &families.open, &labels).inc();
        TcpRoute { in_use, close: families.close.clone(), labels }
    }
}

impl TcpRoute {
    /// Counts the connection's end, with the error that ended it or an empty one.
    pub(crate) fn closed(mut self, error: &'static str) {
        self.labels.push(label("error", error));
        self.in_use.series("close", &self.close, &self.labels).inc();
    }
}
