//! A latency histogram of plain atomics: the registry's own takes a lock for every observation.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, TypedMetric},
};

/// Upper bounds in milliseconds: Linkerd's, which dashboards compute their quantiles from.
const BOUNDS_MS: [f64; 25] = [
    1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 1000.0, 2000.0, 3000.0,
    4000.0, 5000.0, 10000.0, 20000.0, 30000.0, 40000.0, 50000.0,
];

/// Counts of durations by bound. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct LatencyMs(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// One counter per bound, and one for durations beyond all bounds.
    buckets: [AtomicU64; BOUNDS_MS.len() + 1],
    sum_us: AtomicU64,
}

impl LatencyMs {
    /// Counts one duration.
    pub(crate) fn observe(&self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let ms = us as f64 / 1000.0;
        let bucket = BOUNDS_MS.partition_point(|bound| *bound < ms);
        self.0.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.0.sum_us.fetch_add(us, Ordering::Relaxed);
    }
}

impl TypedMetric for LatencyMs {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for LatencyMs {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = self.0.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let bounds = BOUNDS_MS.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let total = buckets.iter().map(|(_, count)| count).sum();
        let sum = self.0.sum_us.load(Ordering::Relaxed) as f64 / 1000.0;
        encoder.encode_histogram::<NoLabelSet>(sum, total, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let latency = LatencyMs::default();
        latency.observe(Duration::from_millis(1));
        latency.observe(Duration::from_micros(1001));
        latency.observe(Duration::from_secs(3600));
        let counts: Vec<u64> = latency.0.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        assert_eq!((counts[0], counts[1], counts[BOUNDS_MS.len()]), (1, 1, 1));
    }
}
