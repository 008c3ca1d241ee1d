//! Metrics of the status writer, under Linkerd's names. There is no `patch_enqueue_overflows`: what is pending is held
//! once for each object, and nothing overflows.

use std::{fmt, time::Duration};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        counter::{ConstCounter, Counter},
        histogram::Histogram,
    },
    registry::{Registry, Unit},
};
use weft_index::PendingStatuses;

/// Linkerd's buckets of `resource_status_patch_duration_seconds`.
const BUCKETS: [f64; 9] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];

/// Counters of patches.
#[derive(Clone)]
pub(crate) struct StatusMetrics {
    patches: Counter,
    errors: Counter,
    timeouts: Counter,
    duration: Histogram,
    dequeues: Counter,
    drops: Counter,
}

/// `resource_status_patch_enqueues`, which the index counts.
struct Enqueues(PendingStatuses);

impl StatusMetrics {
    /// Registers the counters.
    pub(crate) fn new(registry: &mut Registry, statuses: PendingStatuses) -> Self {
        let metrics = Self {
            patches: Counter::default(),
            errors: Counter::default(),
            timeouts: Counter::default(),
            duration: Histogram::new(BUCKETS),
            dequeues: Counter::default(),
            drops: Counter::default(),
        };
        let prefixed = registry.sub_registry_with_prefix("resource_status");
        prefixed.register("patches", "Patches that worked", metrics.patches.clone());
        prefixed.register("patch_api_errors", "Patches that the Kubernetes API refused", metrics.errors.clone());
        prefixed.register("patch_timeouts", "Patches without an answer in time", metrics.timeouts.clone());
        prefixed.register_with_unit(
            "patch_duration",
            "Duration of answered patches",
            Unit::Seconds,
            metrics.duration.clone(),
        );
        prefixed.register("patch_dequeues", "Statuses that the writer took", metrics.dequeues.clone());
        prefixed.register(
            "patch_drops",
            "Statuses that were not written because the lease was lost",
            metrics.drops.clone(),
        );
        registry.register_collector(Box::new(Enqueues(statuses)));
        metrics
    }

    pub(super) fn patched(&self, took: Duration) {
        self.patches.inc();
        self.duration.observe(took.as_secs_f64());
    }

    pub(super) fn refused(&self, took: Duration) {
        self.errors.inc();
        self.duration.observe(took.as_secs_f64());
    }

    pub(super) fn timed_out(&self) {
        self.timeouts.inc();
    }

    pub(super) fn dequeued(&self) {
        self.dequeues.inc();
    }

    pub(super) fn dropped(&self, statuses: usize) {
        self.drops.inc_by(u64::try_from(statuses).unwrap_or(u64::MAX));
    }
}

impl fmt::Debug for Enqueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Enqueues")
    }
}

impl Collector for Enqueues {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counter = ConstCounter::new(self.0.enqueued());
        let encoder = encoder.encode_descriptor(
            "resource_status_patch_enqueues",
            "Statuses that came to be written",
            None,
            counter.metric_type(),
        )?;
        counter.encode(encoder)
    }
}
