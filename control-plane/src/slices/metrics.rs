//! Metrics of the queue of Services to be checked, under the names and meanings of client-go's work queues, as Linkerd
//! has them (`linkerd2:controller/api/destination/external-workload/queue_metrics.go`).

use std::{
    fmt,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{
        MetricType,
        counter::Counter,
        gauge::ConstGauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use tokio::time::Instant;

use super::SliceWriter;

/// Linkerd's name of the queue.
const NAME: &str = "endpoints_controller_workqueue";

/// Counters of the queue.
pub(super) struct QueueMetrics {
    adds: Counter,
    retries: Counter,
    drops: Counter,
    waited: Histogram,
    worked: Histogram,
    /// Services that were taken from the queue and are not being worked on yet.
    taken: AtomicUsize,
    /// Since when a Service is being worked on.
    working: Mutex<Option<Instant>>,
}

impl Default for QueueMetrics {
    fn default() -> Self {
        let seconds = || Histogram::new(exponential_buckets(1e-8, 10.0, 10));
        Self {
            adds: Counter::default(),
            retries: Counter::default(),
            drops: Counter::default(),
            waited: seconds(),
            worked: seconds(),
            taken: AtomicUsize::default(),
            working: Mutex::default(),
        }
    }
}

impl QueueMetrics {
    pub(super) fn added(&self, services: u64) {
        self.adds.inc_by(services);
    }

    /// These were taken from the queue, and each will be worked on.
    pub(super) fn took(&self, services: usize) {
        self.taken.store(services, Ordering::Relaxed);
    }

    /// One of them, which was to be checked at `due`, is being worked on.
    pub(super) fn began(&self, due: Instant) {
        let now = Instant::now();
        self.taken.fetch_sub(1, Ordering::Relaxed);
        self.waited.observe(now.saturating_duration_since(due).as_secs_f64());
        *self.working.lock() = Some(now);
    }

    /// The work on a Service ended.
    pub(super) fn ended(&self) {
        if let Some(since) = self.working.lock().take() {
            self.worked.observe(since.elapsed().as_secs_f64());
        }
    }

    /// The lease is lost, and with it what was taken.
    pub(super) fn stopped(&self) {
        self.took(0);
        self.ended();
    }

    pub(super) fn retried(&self) {
        self.retries.inc();
    }

    pub(super) fn dropped(&self) {
        self.drops.inc();
    }
}

/// What is read at each scrape.
struct Queue(SliceWriter);

impl SliceWriter {
    /// Registers the metrics of the queue.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let QueueMetrics { adds, retries, drops, waited, worked, .. } = &self.0.metrics;
        let labelled = registry.sub_registry_with_label(("name".into(), NAME.into()));
        let queue = labelled.sub_registry_with_prefix("workqueue");
        queue.register("adds", "Total number of adds handled by workqueue", adds.clone());
        queue.register("retries", "Total number of retries handled by workqueue", retries.clone());
        let help = "Total number of dropped items from the queue due to exceeding retry threshold";
        queue.register("drops", help, drops.clone());
        let help = "How long in seconds an item stays in workqueue before being requested";
        queue.register("queue_duration_seconds", help, waited.clone());
        let help = "How long in seconds processing an item from workqueue takes";
        queue.register("work_duration_seconds", help, worked.clone());
        queue.register_collector(Box::new(Queue(self.clone())));
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

impl Collector for Queue {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let shared = &self.0.0;
        let waiting = shared.slices.lock().waiting() + shared.metrics.taken.load(Ordering::Relaxed);
        let depth = u32::try_from(waiting).unwrap_or(u32::MAX);
        // One Service is worked on at a time.
        let running = shared.metrics.working.lock().map_or(0.0, |since| since.elapsed().as_secs_f64());
        for (name, help, value) in [
            ("depth", "Current depth of workqueue", f64::from(depth)),
            ("unfinished_work_seconds", "How many seconds of work is in progress", running),
            (
                "longest_running_processor_seconds",
                "How many seconds has the longest running processor for workqueue been running",
                running,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use weft_index::Event;
    use weft_k8s_api::manifest;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_queue_is_measured_while_this_replica_writes() {
        let writer = SliceWriter::waiting();
        let mut registry = Registry::default();
        writer.register(&mut registry);
        let text = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        let says = |lines: &[(&str, &str)]| {
            let text = text();
            for (name, value) in lines {
                let line = format!("workqueue_{name}{{name=\"{NAME}\"}} {value}\n");
                assert!(text.contains(&line), "{line} in {text}");
            }
        };
        let service = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}}"#;
        let read = manifest::parse("test.json".as_ref(), service);
        let object = read.objects.into_iter().next().unwrap().object;
        writer.observe(&[Event::Apply(Box::new(object)), Event::Synced]);
        // Another replica writes.
        says(&[("depth", "0.0"), ("adds_total", "0")]);
        writer.start();
        says(&[("depth", "1.0"), ("adds_total", "1"), ("queue_duration_seconds_count", "0")]);
        tokio::time::advance(Duration::from_secs(3)).await;
        let (_, due) = writer.0.slices.lock().take_work().pop().unwrap();
        writer.0.metrics.took(2);
        says(&[("depth", "2.0")]);
        writer.0.metrics.began(due);
        tokio::time::advance(Duration::from_secs(2)).await;
        says(&[("depth", "1.0"), ("queue_duration_seconds_sum", "3.0"), ("unfinished_work_seconds", "2.0")]);
        writer.0.metrics.ended();
        says(&[("work_duration_seconds_sum", "2.0"), ("longest_running_processor_seconds", "0.0")]);
        writer.start();
        says(&[("depth", "2.0"), ("adds_total", "2")]);
        writer.stop();
        says(&[("depth", "0.0"), ("work_duration_seconds_count", "1")]);
    }
}
