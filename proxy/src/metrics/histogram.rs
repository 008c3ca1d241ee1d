//! Histograms of plain atomics: the registry's own takes a lock for every observation.

use std::{
    fmt,
    marker::PhantomData,
    num::NonZeroU128,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, TypedMetric},
};
use weft_runtime::metrics::exemplar::{Exemplar, announce};

/// The lines that the encoder writes before the first bucket: sum and count.
const LINES_BEFORE: usize = 2;

/// The bounds of a histogram's buckets, Linkerd's, which dashboards compute their quantiles from.
pub(crate) trait Scale {
    /// Upper bounds, ascending.
    const BOUNDS: &'static [f64];
    /// How many of what is counted make one of the bounds' unit.
    const TICKS: f64;
}

/// Declares scales: name, what it is for, ticks of a unit, bounds.
macro_rules! scales {
    ($($(#[$doc:meta])* $name:ident: $ticks:literal, [$($bound:literal),*];)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name;

        impl Scale for $name {
            const BOUNDS: &'static [f64] = &[$($bound),*];
            const TICKS: f64 = $ticks;
        }
    )*};
}

scales! {
    /// `*_latency_ms`, counted in microseconds.
    Milliseconds: 1e3, [
        1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 1000.0, 2000.0,
        3000.0, 4000.0, 5000.0, 10000.0, 20000.0, 30000.0, 40000.0, 50000.0
    ];
    /// Durations where few buckets are enough, in microseconds.
    CoarseSeconds: 1e6, [0.05, 0.5, 1.0, 10.0];
    /// Durations where short ones are told apart, in microseconds.
    FineSeconds: 1e6, [0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0];
    /// How long requests wait for an endpoint, in microseconds.
    QueueSeconds: 1e6, [0.0005, 0.005, 0.05, 0.5, 1.0, 3.0];
    /// How long detection takes, in microseconds.
    DetectSeconds: 1e6, [0.001, 0.1];
    /// Sizes of frames in bytes.
    FrameBytes: 1.0, [128.0, 1024.0, 10240.0];
}

/// Latencies in milliseconds.
pub(crate) type LatencyMs = Histogram<Milliseconds>;

/// Counts by bound. Clones share the counts.
#[derive(Clone, Debug)]
pub(crate) struct Histogram<S>(Arc<Counts>, PhantomData<S>);

#[derive(Debug)]
struct Counts {
    /// One counter per bound, and one for what is beyond all bounds.
    buckets: Box<[AtomicU64]>,
    ticks: AtomicU64,
    /// The last observation with a trace, of each bucket that has one.
    exemplars: Mutex<Vec<(usize, Exemplar)>>,
}

impl<S: Scale> Default for Histogram<S> {
    fn default() -> Self {
        let buckets = (0..=S::BOUNDS.len()).map(|_| AtomicU64::default()).collect();
        let (ticks, exemplars) = (AtomicU64::default(), Mutex::default());
        Self(Arc::new(Counts { buckets, ticks, exemplars }), PhantomData)
    }
}

impl<S: Scale> Histogram<S> {
    /// Counts one duration, on a scale of time.
    pub(crate) fn observe(&self, duration: Duration) {
        self.count(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
    }

    /// Counts one duration of a request whose trace is collected.
    pub(crate) fn observe_traced(&self, duration: Duration, trace_id: NonZeroU128) {
        self.observe(duration);
        let value = duration.as_micros() as f64 / S::TICKS;
        let (bucket, exemplar) = (Self::bucket(value), Exemplar { trace_id, value, at: SystemTime::now() });
        let mut exemplars = self.0.exemplars.lock();
        match exemplars.binary_search_by_key(&bucket, |(bucket, _)| *bucket) {
            Ok(known) => exemplars[known].1 = exemplar,
            Err(place) => exemplars.insert(place, (bucket, exemplar)),
        }
    }

    fn bucket(value: f64) -> usize {
        S::BOUNDS.partition_point(|bound| *bound < value)
    }

    /// Counts one value.
    pub(crate) fn count(&self, ticks: u64) {
        let bucket = Self::bucket(ticks as f64 / S::TICKS);
        self.0.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        if ticks > 0 {
            self.0.ticks.fetch_add(ticks, Ordering::Relaxed);
        }
    }
}

impl<S: Scale> TypedMetric for Histogram<S> {
    const TYPE: MetricType = MetricType::Histogram;
}

impl<S: Scale> EncodeMetric for Histogram<S> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = self.0.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let bounds = S::BOUNDS.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let total = buckets.iter().map(|(_, count)| count).sum();
        let sum = self.0.ticks.load(Ordering::Relaxed) as f64 / S::TICKS;
        announce(self.0.exemplars.lock().iter().map(|(bucket, exemplar)| (LINES_BEFORE + bucket, *exemplar)));
        encoder.encode_histogram::<NoLabelSet>(sum, total, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use weft_runtime::metrics::{Format, Metrics};

    use super::*;

    fn counts<S>(histogram: &Histogram<S>) -> Vec<u64> {
        histogram.0.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let latency = LatencyMs::default();
        latency.observe(Duration::from_millis(1));
        latency.observe(Duration::from_micros(1001));
        latency.observe(Duration::from_secs(3600));
        let counted = counts(&latency);
        assert_eq!((counted[0], counted[1], counted[Milliseconds::BOUNDS.len()]), (1, 1, 1));

        let seconds = Histogram::<CoarseSeconds>::default();
        for ms in [0, 50, 51, 500, 1000, 10_000, 10_001] {
            seconds.observe(Duration::from_millis(ms));
        }
        assert_eq!(counts(&seconds), [2, 2, 1, 1, 1]);

        let bytes = Histogram::<FrameBytes>::default();
        for size in [0, 128, 129, 1 << 20] {
            bytes.count(size);
        }
        assert_eq!(counts(&bytes), [2, 1, 0, 1]);
    }

    #[test]
    fn the_bounds_are_linkerds() {
        let from_ones = |tens: f64| [1.0, 2.0, 3.0, 4.0, 5.0].map(|ones| ones * tens);
        let milliseconds: Vec<f64> = [1.0, 10.0, 100.0, 1000.0, 10_000.0].into_iter().flat_map(from_ones).collect();
        for (name, bounds, expected) in [
            ("latency in milliseconds", Milliseconds::BOUNDS, &milliseconds[..]),
            ("coarse durations", CoarseSeconds::BOUNDS, &[0.05, 0.5, 1.0, 10.0]),
            ("fine durations", FineSeconds::BOUNDS, &[0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0]),
            ("the queue", QueueSeconds::BOUNDS, &[0.0005, 0.005, 0.05, 0.5, 1.0, 3.0]),
            ("detection", DetectSeconds::BOUNDS, &[0.001, 0.1]),
            ("frames", FrameBytes::BOUNDS, &[128.0, 1024.0, 10240.0]),
        ] {
            assert_eq!(bounds, expected, "{name}");
        }
    }

    #[test]
    fn a_bucket_names_the_last_trace_in_it() {
        let (metrics, latency) = (Metrics::default(), LatencyMs::default());
        metrics.register(|registry| registry.register("latency_ms", "Milliseconds", latency.clone()));
        let trace = |id: u128| NonZeroU128::new(id).unwrap();
        for (micros, id) in [(900, 1), (60_000_000, 2), (700, 3)] {
            latency.observe_traced(Duration::from_micros(micros), trace(id));
        }
        latency.observe(Duration::from_micros(500));
        let text = metrics.encode(Format::OpenMetrics);
        let marked: Vec<&str> = text.lines().filter(|line| line.contains(" # ")).collect();
        assert_eq!(marked.len(), 2, "{text}");
        assert!(
            marked[0]
                .starts_with(r#"latency_ms_bucket{le="1.0"} 3 # {trace_id="00000000000000000000000000000003"} 0.7 1"#)
        );
        assert!(
            marked[1].starts_with(
                r#"latency_ms_bucket{le="+Inf"} 4 # {trace_id="00000000000000000000000000000002"} 60000 1"#
            )
        );
        assert!(!metrics.encode(Format::Text).contains("trace_id"));
    }
}
