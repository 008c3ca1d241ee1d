//! `{inbound,outbound}_tcp_detect_http_*`: attempts to detect HTTP.

use std::{sync::OnceLock, time::Duration};

use prometheus_client::{
    metrics::counter::Counter,
    registry::{Registry, Unit},
};
use weft_runtime::metrics::Family;

use super::{
    Counters, Direction, Labels, ProxyMetrics,
    histogram::{DetectSeconds, Histogram},
    label,
    retain::InUse,
};

/// Results that there are: two versions of HTTP, none, no byte in time, an error.
const RESULTS: usize = 5;

/// The families of one direction.
#[derive(Clone, Debug, Default)]
pub(super) struct DetectFamilies {
    results: Counters,
    duration: Family<Labels, Histogram<DetectSeconds>>,
}

/// What is counted of detection for one server or destination.
#[derive(Debug)]
pub(crate) struct DetectMetrics {
    results: Counters,
    duration: Histogram<DetectSeconds>,
    labels: Labels,
    in_use: InUse,
    seen: [OnceLock<(&'static str, Counter)>; RESULTS],
}

impl DetectFamilies {
    /// Registers the families under `<direction>_tcp_detect_http`.
    pub(super) fn register(&self, registry: &mut Registry, prefix: &'static str) {
        let registry = registry.sub_registry_with_prefix(prefix);
        registry.register("results", "Results of HTTP detection", self.results.clone());
        registry.register_with_unit("duration", "How long HTTP detection took", Unit::Seconds, self.duration.clone());
    }
}

impl ProxyMetrics {
    /// The metrics of detection; `labels` name the server or the destination.
    pub(crate) fn detect(&self, direction: Direction, labels: Labels) -> DetectMetrics {
        let families = match direction {
            Direction::Inbound => &self.inbound_detect,
            Direction::Outbound => &self.outbound_detect,
        };
        let in_use = self.retained.enter(&families.results, &labels);
        DetectMetrics {
            duration: in_use.series(&families.duration, &labels),
            results: families.results.clone(),
            labels,
            in_use,
            seen: Default::default(),
        }
    }
}

impl DetectMetrics {
    /// Counts one attempt.
    pub(crate) fn detected(&self, result: &'static str, duration: Duration) {
        self.duration.observe(duration);
        for slot in &self.seen {
            let (known, counter) = slot.get_or_init(|| (result, self.look_up(result)));
            if *known == result {
                counter.inc();
                return;
            }
        }
        self.look_up(result).inc();
    }

    fn look_up(&self, result: &'static str) -> Counter {
        let mut labels = vec![label("result", result)];
        labels.extend(self.labels.iter().cloned());
        self.in_use.series(&self.results, &labels)
    }
}
