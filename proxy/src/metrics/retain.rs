//! Removes series that have not been used for a while: destinations come and go, and their series would stay for ever.
//!
//! Owns the schedule. A kind of connection or request has a key, its labels; while a handle of the kind lives, its
//! series stay.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;
use weft_runtime::metrics::Family;

use super::{Counters, Labels, histogram::LatencyMs};

/// All kinds whose series can be removed. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Retained(Arc<Mutex<HashMap<Labels, Kind>>>);

#[derive(Debug)]
struct Kind {
    /// Number of live handles.
    handles: usize,
    /// When the last one was dropped.
    unused_since: Instant,
    series: Vec<Series>,
}

/// One series of a family.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// The family's name.
    pub(crate) name: &'static str,
    /// The family from which it is removed.
    pub(crate) family: AnyFamily,
    /// Its labels.
    pub(crate) labels: Labels,
}

/// A family of any kind of metric.
#[derive(Clone, Debug)]
pub(crate) enum AnyFamily {
    /// A family of counters.
    Counter(Counters),
    /// A family of gauges.
    Gauge(Family<Labels, Gauge>),
    /// A family of latencies.
    Latency(Family<Labels, LatencyMs>),
}

/// Keeps the series of a kind while it lives, and for the retention time afterwards.
#[derive(Debug)]
pub(crate) struct InUse {
    retained: Retained,
    key: Labels,
}

impl Retained {
    /// Starts to use a kind. The caller must get its metrics afterwards, or they may be removed in between.
    pub(crate) fn enter(&self, key: Labels) -> InUse {
        let mut kinds = self.0.lock();
        let new = || Kind { handles: 0, unused_since: Instant::now(), series: Vec::new() };
        kinds.entry(key.clone()).or_insert_with(new).handles += 1;
        drop(kinds);
        InUse { retained: self.clone(), key }
    }

    /// Removes the series of kinds that have been unused for `idle`.
    pub(crate) fn evict(&self, idle: Duration) {
        let now = Instant::now();
        self.0.lock().retain(|_, kind| {
            let is_used = kind.handles > 0 || now.duration_since(kind.unused_since) < idle;
            if !is_used {
                kind.series.iter().for_each(Series::remove);
            }
            is_used
        });
    }
}

impl InUse {
    /// Registers a series of the kind.
    pub(crate) fn has(&self, name: &'static str, family: impl Into<AnyFamily>, labels: &Labels) {
        let mut kinds = self.retained.0.lock();
        let Some(kind) = kinds.get_mut(&self.key) else { return };
        if !kind.series.iter().any(|known| known.name == name && known.labels == *labels) {
            kind.series.push(Series { name, family: family.into(), labels: labels.clone() });
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(kind) = self.retained.0.lock().get_mut(&self.key) {
            kind.handles -= 1;
            kind.unused_since = Instant::now();
        }
    }
}

impl Series {
    fn remove(&self) {
        match &self.family {
            AnyFamily::Counter(family) => family.remove(&self.labels),
            AnyFamily::Gauge(family) => family.remove(&self.labels),
            AnyFamily::Latency(family) => family.remove(&self.labels),
        };
    }
}

impl From<&Counters> for AnyFamily {
    fn from(family: &Counters) -> Self {
        Self::Counter(family.clone())
    }
}

impl From<&Family<Labels, Gauge>> for AnyFamily {
    fn from(family: &Family<Labels, Gauge>) -> Self {
        Self::Gauge(family.clone())
    }
}

impl From<&Family<Labels, LatencyMs>> for AnyFamily {
    fn from(family: &Family<Labels, LatencyMs>) -> Self {
        Self::Latency(family.clone())
    }
}
