//! `outbound_{tcp,tls}_route_*`: connections by route.

use std::sync::OnceLock;

use prometheus_client::{metrics::counter::Counter, registry::Registry};

use super::{Counters, Labels, ProxyMetrics, label, retain::InUse};

/// Errors that end connections: none, forbidden, an invalid backend or policy, unexpected ones.
const ERRORS: usize = 5;

/// The families of opaque routes, or of TLS routes.
#[derive(Clone, Debug, Default)]
pub(super) struct TcpRouteFamilies {
    open: Counters,
    close: Counters,
}

/// What is counted of connections on one route. Its series are kept while it lives and for the retention time
/// afterwards.
#[derive(Debug)]
pub(crate) struct TcpRouteMetrics {
    open: Counter,
    close: Counters,
    labels: Labels,
    in_use: InUse,
    seen: [OnceLock<(&'static str, Counter)>; ERRORS],
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
    /// The metrics of a route of connections.
    pub(crate) fn tcp_route(&self, is_tls: bool, labels: Labels) -> TcpRouteMetrics {
        let families = if is_tls { &self.tls_routes } else { &self.tcp_routes };
        let in_use = self.retained.enter(&families.open, &labels);
        let open = in_use.series(&families.open, &labels);
        TcpRouteMetrics { open, close: families.close.clone(), labels, in_use, seen: Default::default() }
    }
}

impl TcpRouteMetrics {
    /// Counts a connection.
    pub(crate) fn opened(&self) {
        self.open.inc();
    }

    /// Counts a connection's end, with the error that ended it or an empty one.
    pub(crate) fn closed(&self, error: &'static str) {
        for slot in &self.seen {
            let (known, counter) = slot.get_or_init(|| (error, self.look_up(error)));
            if *known == error {
                counter.inc();
                return;
            }
        }
        self.look_up(error).inc();
    }

    fn look_up(&self, error: &'static str) -> Counter {
        let mut labels = self.labels.clone();
        labels.push(label("error", error));
        self.in_use.series(&self.close, &labels)
    }
}
