//! Metrics of the index and of those of linked clusters: objects, views and their clients, how long updates take, and
//! how many wait. Names and labels are Linkerd's where it has one; k8s-api's table of metrics lists them.
//!
//! No series outlives what it is about: all are made anew from what the indexes counted last.

mod series;

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use parking_lot::RwLock;
use prometheus_client::{
    collector::Collector, encoding::DescriptorEncoder, metrics::histogram::Histogram, registry::Registry,
};
use tokio::time::{Instant, MissedTickBehavior};
use weft_index::{Index, SharedIndex, Statistics, Unanswered};

/// How often the index counts: as often as Prometheus usually asks.
const INTERVAL: Duration = Duration::from_secs(10);
/// Buckets of the time that a batch of changes takes, in seconds.
const APPLY_BUCKETS: [f64; 6] = [0.0001, 0.001, 0.01, 0.1, 1.0, 10.0];
/// Linkerd's name of this cluster in labels.
const LOCAL: &str = "local";

/// What indexes counted last, by cluster.
type Counted = BTreeMap<String, Statistics>;

/// The indexes of linked clusters at present, by cluster.
pub(crate) type Linked = Arc<dyn Fn() -> Vec<(String, SharedIndex)> + Send + Sync>;

/// Metrics of the index of this cluster and of those of linked ones.
#[derive(Clone)]
pub(crate) struct IndexMetrics {
    counted: Arc<RwLock<Counted>>,
    apply: Histogram,
    linked: Linked,
}

impl IndexMetrics {
    /// Registers the metrics.
    pub(crate) fn new(registry: &mut Registry, index: &SharedIndex, linked: Linked) -> Self {
        let metrics = Self { counted: Arc::default(), apply: Histogram::new(APPLY_BUCKETS), linked };
        let help = "Time from a batch of changes of objects to their publication, its wait for the index included";
        registry.register("weft_index_apply_seconds", help, metrics.apply.clone());
        registry.register_collector(Box::new(Counts { counted: metrics.counted.clone(), index: index.clone() }));
        metrics
    }

    /// Counts a batch that was applied.
    pub(crate) fn applied(&self, since: Instant) {
        self.apply.observe(since.elapsed().as_secs_f64());
    }

    /// Lets the indexes count at intervals. Runs until that of this cluster stops.
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
        let mut counted = Counted::from([(LOCAL.to_owned(), index.ask(Index::statistics).await?)]);
        for (cluster, index) in (self.linked)() {
            // One that has stopped since is counted no more.
            if let Ok(statistics) = index.ask(Index::statistics).await {
                counted.insert(cluster, statistics);
            }
        }
        *self.counted.write() = counted;
        Ok(())
    }
}

/// Encodes what was counted last.
struct Counts {
    counted: Arc<RwLock<Counted>>,
    index: SharedIndex,
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counts")
    }
}

impl Collector for Counts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counted = self.counted.read().clone();
        series::encode(&mut encoder, &counted, self.index.waiting_questions())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use weft_index::{EndpointsQuery, Event, Key, ProfileQuery};
    use weft_k8s_api::manifest;

    use super::*;
    use crate::args;

    fn scrape(registry: &Registry) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        text
    }

    async fn apply(index: &SharedIndex, object: serde_json::Value) {
        let read = manifest::parse("test.json".as_ref(), &object.to_string());
        index
            .apply(read.objects.into_iter().map(|object| Event::Apply(Box::new(object.object))).collect())
            .await
            .unwrap();
    }

    fn slice(addresses: &[&str]) -> serde_json::Value {
        let endpoints: Vec<_> = addresses.iter().map(|addr| json!({"addresses": [addr]})).collect();
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": endpoints,
            "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
            "ports": [{"name": "", "port": 8080}]})
    }

    #[tokio::test]
    async fn objects_views_and_streams_are_counted() {
        let index = SharedIndex::start(args::default_cluster()).unwrap();
        let mut registry = Registry::default();
        let metrics = IndexMetrics::new(&mut registry, &index, Arc::new(Vec::new));
        let since = Instant::now();
        apply(
            &index,
            json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
                "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}),
        )
        .await;
        metrics.applied(since);
        let web = || Key::new("shop", "web");
        let query = |hostname: Option<&str>| {
            let query = EndpointsQuery { port: 80, node: None, hostname: hostname.map(str::to_owned) };
            move |index: &mut Index| index.watch_endpoints(&web(), query.clone())
        };
        let (one, two) = (index.ask(query(None)).await.unwrap(), index.ask(query(None)).await.unwrap());
        // A hostname that no endpoint has is no label: clients choose it.
        let other = index.ask(query(Some("db-0"))).await.unwrap();
        let profile = ProfileQuery { port: 80, namespace: None };
        let profile = index.ask(move |index| index.watch_service_profile(&web(), profile)).await.unwrap();
        apply(&index, slice(&["192.0.2.1", "192.0.2.2"])).await;
        apply(&index, slice(&["192.0.2.1"])).await;
        metrics.count(&index).await.unwrap();
        let text = scrape(&registry);
        let labels = r#"cluster="local",namespace="shop",service="web",port="80",hostname="",nodename="""#;
        for line in [
            "service_cache_size{cluster=\"local\"} 1".to_owned(),
            "pod_cache_size{cluster=\"local\"} 0".to_owned(),
            "weft_index_views{view=\"endpoints\"} 2".to_owned(),
            "weft_index_subscribers{view=\"endpoints\"} 3".to_owned(),
            format!("endpoints_subscribers{{{labels}}} 3"),
            format!("endpoints_updates{{{labels}}} 2"),
            format!("endpoints_pods{{{labels}}} 1"),
            format!("endpoints_exists{{{labels}}} 1"),
            "profile_subscribers{namespace=\"shop\",profile=\"web.shop.svc.cluster.local\"} 1".to_owned(),
            "profile_updates{namespace=\"shop\",profile=\"web.shop.svc.cluster.local\"} 0".to_owned(),
            "service_subscribers{namespace=\"shop\",name=\"web\"} 1".to_owned(),
            "workload_subscribers 0".to_owned(),
            "outbound_index_service_index_size 1".to_owned(),
            "weft_index_apply_seconds_count 1".to_owned(),
            "weft_index_waiting_questions 0".to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        // With the last client, the series end.
        drop((one, two, other, profile));
        metrics.count(&index).await.unwrap();
        let text = scrape(&registry);
        for family in ["endpoints_subscribers", "endpoints_updates", "profile_subscribers", "service_subscribers"] {
            assert!(!text.contains(&format!("{family}{{")), "{text}");
        }
    }
}
