//! Metrics of the index: objects, views and their clients, how long updates take, and who waits.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::RwLock;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge, histogram::Histogram},
    registry::Registry,
};
use tokio::time::{Instant, MissedTickBehavior};
use weft_index::{SharedIndex, Statistics, Unanswered};

/// How often the index counts: as often as Prometheus usually asks.
const INTERVAL: Duration = Duration::from_secs(10);
/// Buckets of the time that a batch of changes takes, in seconds.
const APPLY_BUCKETS: [f64; 6] = [0.0001, 0.001, 0.01, 0.1, 1.0, 10.0];

/// Metrics of one index.
#[derive(Clone)]
pub(crate) struct IndexMetrics {
    statistics: Arc<RwLock<Statistics>>,
    apply: Histogram,
}

#[derive(Clone, Debug, EncodeLabelSet)]
struct View {
    view: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet)]
struct ServicePort {
    namespace: String,
    service: String,
    port: u16,
}

impl IndexMetrics {
    /// Registers the metrics.
    pub(crate) fn new(registry: &mut Registry, index: &SharedIndex) -> Self {
        let metrics = Self { statistics: Arc::default(), apply: Histogram::new(APPLY_BUCKETS) };
        let help = "Time from a batch of changes of objects to their publication, its wait for the index included";
        registry.register("weft_index_apply_seconds", help, metrics.apply.clone());
        registry.register_collector(Box::new(Counts { statistics: metrics.statistics.clone(), index: index.clone() }));
        metrics
    }

    /// Observes a batch that was handed over at `since`.
    pub(crate) fn applied(&self, since: Instant) {
        self.apply.observe(since.elapsed().as_secs_f64());
    }

    /// Lets the index count at intervals. Runs until the index stops.
    ///
    /// # Errors
    /// When the index has stopped.
    pub(crate) async fn run(self, index: SharedIndex) -> anyhow::Result<()> {
        let mut tick = tokio::time::interval(INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            match self.count(&index).await {
                Ok(()) | Err(Unanswered::Busy) => {}
                Err(Unanswered::Stopped) => return Err(Unanswered::Stopped.into()),
            }
        }
    }

    async fn count(&self, index: &SharedIndex) -> Result<(), Unanswered> {
        let statistics = index.ask(|index| index.statistics()).await?;
        *self.statistics.write() = statistics;
        Ok(())
    }
}

/// Encodes what was counted last.
struct Counts {
    statistics: Arc<RwLock<Statistics>>,
    index: SharedIndex,
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counts")
    }
}

impl Collector for Counts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let statistics = self.statistics.read().clone();
        for (kind, count) in &statistics.objects {
            // Linkerd's name of the metric has the kind in it.
            let name = format!("{kind}_cache_size");
            let gauge = ConstGauge::new(number(*count));
            gauge.encode(encoder.encode_descriptor(
                &name,
                "Objects of this kind in the index",
                None,
                MetricType::Gauge,
            )?)?;
        }
        let mut views =
            encoder.encode_descriptor("weft_index_views", "Answers that are kept", None, MetricType::Gauge)?;
        for (view, count) in &statistics.views {
            ConstGauge::new(number(count.views)).encode(views.encode_family(&View { view })?)?;
        }
        let help = "Streams by what they follow";
        let mut subscribers = encoder.encode_descriptor("weft_index_subscribers", help, None, MetricType::Gauge)?;
        for (view, count) in &statistics.views {
            ConstGauge::new(number(count.subscribers)).encode(subscribers.encode_family(&View { view })?)?;
        }
        let help = "Streams that follow the endpoints of a Service's port";
        let mut endpoints = encoder.encode_descriptor("endpoints_subscribers", help, None, MetricType::Gauge)?;
        for ((service, port), count) in &statistics.endpoints {
            let labels =
                ServicePort { namespace: service.namespace.clone(), service: service.name.clone(), port: *port };
            ConstGauge::new(number(*count)).encode(endpoints.encode_family(&labels)?)?;
        }
        let help = "Questions of streams that wait for the index";
        let waiting = encoder.encode_descriptor("weft_index_waiting_questions", help, None, MetricType::Gauge)?;
        ConstGauge::new(number(self.index.waiting_questions())).encode(waiting)
    }
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use weft_index::{EndpointsQuery, Event, Key};
    use weft_k8s_api::manifest;

    use super::*;
    use crate::args;

    #[tokio::test]
    async fn objects_views_and_streams_are_counted() {
        let index = SharedIndex::start(args::default_cluster()).unwrap();
        let mut registry = Registry::default();
        let metrics = IndexMetrics::new(&mut registry, &index);
        let service = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}"#;
        let read = manifest::parse("test.json".as_ref(), service);
        let objects = read.objects.into_iter().map(|object| Event::Apply(Box::new(object.object)));
        let since = Instant::now();
        index.apply(objects.collect()).await.unwrap();
        metrics.applied(since);
        let query = EndpointsQuery { port: 80, node: None, hostname: None };
        let watch = move |index: &mut weft_index::Index| index.watch_endpoints(&Key::new("shop", "web"), query.clone());
        let (_one, _two) = (index.ask(watch.clone()).await.unwrap(), index.ask(watch).await.unwrap());
        metrics.count(&index).await.unwrap();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "service_cache_size 1",
            "pod_cache_size 0",
            "weft_index_views{view=\"endpoints\"} 1",
            "weft_index_subscribers{view=\"endpoints\"} 2",
            "endpoints_subscribers{namespace=\"shop\",service=\"web\",port=\"80\"} 2",
            "weft_index_apply_seconds_count 1",
            "weft_index_waiting_questions 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
