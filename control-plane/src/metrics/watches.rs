//! Whether watches of the Kubernetes API work: a watch that does not leaves the index with old state.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Metrics of all watches of one cluster.
#[derive(Clone, Default)]
pub(crate) struct WatchMetrics {
    up: Family<Kind, Gauge>,
    interruptions: Family<Kind, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    group: &'static str,
    kind: &'static str,
}

impl WatchMetrics {
    /// Registers the metrics.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Whether the watch of this kind works; while it does not, the last state stays in force";
        registry.register("weft_watch_up", help, metrics.up.clone());
        let help = "How often the watch of this kind ceased to work";
        registry.register("weft_watch_interruptions", help, metrics.interruptions.clone());
        metrics
    }

    /// Says whether a watch works.
    pub(crate) fn set(&self, group: &'static str, kind: &'static str, up: bool) {
        let labels = Kind { group, kind };
        let was_up = self.up.get_or_create(&labels).set(up.into()) != 0;
        if was_up && !up {
            self.interruptions.get_or_create(&labels).inc();
        }
    }
}
