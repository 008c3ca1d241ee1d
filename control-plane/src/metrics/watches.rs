//! Whether watches of the Kubernetes API work: a watch that does not leaves the index with old state.
//!
//! `kube_watch_*` are those of Linkerd's policy controller (kubert's `ResourceWatchMetrics`), `*_informer_lag_seconds`
//! those of its destination service (`linkerd2:controller/api/destination/watcher/prometheus.go`).

use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use weft_k8s_api::manifest::Kind;

/// Linkerd's buckets of `*_informer_lag_seconds`. Times of writes have no fractions of seconds.
const LAG_BUCKETS: [f64; 10] = [0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0];
/// The kinds whose lag is measured, under the names that Linkerd has for them, not all of which are plural.
const LAGS: [(Kind, &str); 7] = [
    (Kind::Endpoints, "endpoints"),
    (Kind::EndpointSlice, "endpointslices"),
    (Kind::Service, "services"),
    (Kind::Server, "servers"),
    (Kind::Pod, "pods"),
    (Kind::ExternalWorkload, "externalworkload"),
    (Kind::ServiceProfile, "serviceprofiles"),
];

/// Names of errors.
const ERRORS: [&str; 5] = ["InitialListFailed", "WatchStartFailed", "WatchError", "WatchFailed", "NoResourceVersion"];

/// Metrics of all watches of one cluster.
#[derive(Clone)]
pub(crate) struct WatchMetrics {
    up: Family<Resource, Gauge>,
    interruptions: Family<Resource, Counter>,
    applies: Family<Version, Counter>,
    restarts: Family<Version, Counter>,
    deletes: Family<Version, Counter>,
    errors: Family<Failed, Counter>,
    lags: [Histogram; LAGS.len()],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Resource {
    group: &'static str,
    kind: &'static str,
}

/// A kind in the version in which it is watched.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Version {
    kind: &'static str,
    group: &'static str,
    version: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failed {
    kind: &'static str,
    group: &'static str,
    version: &'static str,
    error: &'static str,
}

/// What a watch delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    /// A new or changed object.
    Apply,
    /// A complete list.
    Restart,
    /// The deletion of an object.
    Delete,
}

impl Default for WatchMetrics {
    /// Metrics without a registry.
    fn default() -> Self {
        Self {
            up: Family::default(),
            interruptions: Family::default(),
            applies: Family::default(),
            restarts: Family::default(),
            deletes: Family::default(),
            errors: Family::default(),
            lags: std::array::from_fn(|_| Histogram::new(LAG_BUCKETS)),
        }
    }
}

impl WatchMetrics {
    /// Registers the metrics; those of lags if the process serves discovery.
    pub(crate) fn new(registry: &mut Registry, discovery: bool) -> Self {
        let metrics = Self::default();
        let help = "Whether the watch of this kind works; while it does not, the last state stays in force";
        registry.register("weft_watch_up", help, metrics.up.clone());
        let help = "How often the watch of this kind ceased to work";
        registry.register("weft_watch_interruptions", help, metrics.interruptions.clone());
        let watch = registry.sub_registry_with_prefix("kube_watch");
        watch.register("applies", "Count of apply events for a resource watch", metrics.applies.clone());
        watch.register("restarts", "Count of restart events for a resource watch", metrics.restarts.clone());
        watch.register("deletes", "Count of delete events for a resource watch", metrics.deletes.clone());
        watch.register("errors", "Count of errors for a resource watch", metrics.errors.clone());
        for ((kind, name), lag) in LAGS.into_iter().zip(&metrics.lags).filter(|_| discovery) {
            let help = format!("Time between a write of an object of kind {kind} and its arrival, without new objects");
            registry.register(format!("{name}_informer_lag_seconds"), help, lag.clone());
        }
        metrics
    }

    /// Says whether a watch works.
    pub(crate) fn set(&self, group: &'static str, kind: &'static str, up: bool) {
        let labels = Resource { group, kind };
        let was_up = self.up.get_or_create(&labels).set(up.into()) != 0;
        if was_up && !up {
            self.interruptions.get_or_create(&labels).inc();
        }
    }

    /// Begins to count for a watch of this version: a counter that is there from the start shows the first increase,
    /// too.
    pub(crate) fn watching(&self, kind: Kind, version: &'static str) {
        let (kind, group) = (kind.name(), kind.group());
        let labels = Version { kind, group, version };
        for family in [&self.applies, &self.restarts, &self.deletes] {
            drop(family.get_or_create(&labels));
        }
        for error in ERRORS {
            drop(self.errors.get_or_create(&Failed { kind, group, version, error }));
        }
    }

    /// Counts what a watch of this version delivered.
    pub(crate) fn delivered(&self, kind: Kind, version: &'static str, what: Delivered) {
        let family = match what {
            Delivered::Apply => &self.applies,
            Delivered::Restart => &self.restarts,
            Delivered::Delete => &self.deletes,
        };
        family.get_or_create(&Version { kind: kind.name(), group: kind.group(), version }).inc();
    }

    /// Counts an error of a watch.
    pub(crate) fn failed(&self, kind: Kind, version: &'static str, error: &watcher::Error) {
        let error = ERRORS[match error {
            watcher::Error::InitialListFailed(_) => 0,
            watcher::Error::WatchStartFailed(_) => 1,
            watcher::Error::WatchError(_) => 2,
            watcher::Error::WatchFailed(_) => 3,
            watcher::Error::NoResourceVersion => 4,
        }];
        self.errors.get_or_create(&Failed { kind: kind.name(), group: kind.group(), version, error }).inc();
    }

    /// Measures how late the write of an object arrives. Clocks of machines differ, and no write arrives before its
    /// time.
    pub(crate) fn arrived(&self, kind: Kind, written: Timestamp, now: Timestamp) {
        let found = LAGS.iter().zip(&self.lags).find(|((measured, _), _)| *measured == kind);
        if let Some((_, lag)) = found {
            lag.observe(now.duration_since(written).as_secs_f64().max(0.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lags_are_those_of_discovery_and_never_negative() {
        let text = |discovery| {
            let mut registry = Registry::default();
            let metrics = WatchMetrics::new(&mut registry, discovery);
            let at = |seconds: i64| Timestamp::from_second(1_800_000_000 + seconds).unwrap();
            metrics.arrived(Kind::Pod, at(0), at(7));
            metrics.arrived(Kind::Pod, at(0), at(-7));
            metrics.arrived(Kind::Node, at(0), at(7));
            metrics.watching(Kind::Server, "v1beta3");
            metrics.delivered(Kind::Server, "v1beta3", Delivered::Apply);
            metrics.failed(Kind::Server, "v1beta3", &watcher::Error::NoResourceVersion);
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        let with = text(true);
        assert_eq!(with.matches("_informer_lag_seconds_count ").count(), LAGS.len());
        for line in [
            "pods_informer_lag_seconds_sum 7.0\n",
            "pods_informer_lag_seconds_count 2\n",
            "pods_informer_lag_seconds_bucket{le=\"5.0\"} 1\n",
            "kube_watch_applies_total{kind=\"Server\",group=\"policy.linkerd.io\",version=\"v1beta3\"} 1\n",
            "kube_watch_deletes_total{kind=\"Server\",group=\"policy.linkerd.io\",version=\"v1beta3\"} 0\n",
            "version=\"v1beta3\",error=\"NoResourceVersion\"} 1\n",
            "version=\"v1beta3\",error=\"WatchError\"} 0\n",
        ] {
            assert!(with.contains(line), "{line} in {with}");
        }
        assert!(!text(false).contains("_lag_seconds"));
    }
}
