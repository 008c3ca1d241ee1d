//! Linked clusters: each Secret of the control plane's namespace that links one becomes watches of that cluster's
//! objects and an index of its own, from which endpoints of Services there are announced here
//! (`linkerd2:controller/api/destination/watcher/cluster_store.go`).
//!
//! ```text
//! Secrets --watch--> Plan (pure: what to start and stop) --> a source and an index per cluster --> Clusters --> streams
//! ```
//!
//! A cluster is known from the moment its Secret is read, and has endpoints once its objects are complete. After a
//! change of its Secret, the old index answers until the new one is complete.

mod follow;
mod link;
mod plan;

use std::{collections::BTreeMap, fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};
use tokio::sync::watch;
use weft_index::SharedIndex;

pub(crate) use follow::{Following, follow};

/// The linked clusters, for streams; clones share them.
#[derive(Clone)]
pub(crate) struct Clusters(watch::Sender<Known>);

/// What is known of linked clusters.
#[derive(Clone, Default)]
pub(crate) struct Known {
    /// Whether all Secrets were read once: a cluster that is missing is not linked.
    pub(crate) complete: bool,
    /// The clusters by name.
    pub(crate) clusters: Arc<BTreeMap<String, LinkedCluster>>,
}

/// A linked cluster.
#[derive(Clone)]
pub(crate) struct LinkedCluster {
    /// Index of its objects, which a source of its own keeps current.
    pub(crate) index: SharedIndex,
    /// Whether they are complete.
    pub(crate) synced: bool,
    /// Tells this index from an earlier one of the same name.
    pub(crate) number: u64,
}

impl Clusters {
    /// None, yet.
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(Known::default()))
    }

    /// None, ever: there is no Kubernetes API, or discovery in other clusters is switched off.
    pub(crate) fn none() -> Self {
        Self(watch::Sender::new(Known { complete: true, ..Known::default() }))
    }

    /// Follows the linked clusters.
    pub(crate) fn watch(&self) -> watch::Receiver<Known> {
        self.0.subscribe()
    }

    /// The indexes of the linked clusters, by name.
    pub(crate) fn indexes(&self) -> Vec<(String, SharedIndex)> {
        let clusters = self.0.borrow().clusters.clone();
        clusters.iter().map(|(name, linked)| (name.clone(), linked.index.clone())).collect()
    }

    /// Number of linked clusters.
    fn len(&self) -> usize {
        self.0.borrow().clusters.len()
    }

    fn complete(&self) {
        self.0.send_if_modified(|known| !std::mem::replace(&mut known.complete, true));
    }

    /// Adds or replaces a cluster.
    pub(crate) fn put(&self, name: &str, cluster: LinkedCluster) {
        self.0.send_modify(|known| {
            Arc::make_mut(&mut known.clusters).insert(name.to_owned(), cluster);
        });
    }

    /// Removes a cluster.
    pub(crate) fn remove(&self, name: &str) {
        self.0.send_if_modified(|known| Arc::make_mut(&mut known.clusters).remove(name).is_some());
    }
}

/// `cluster_store_size`: number of linked clusters.
pub(crate) struct ClusterStoreSize(pub(crate) Clusters);

impl fmt::Debug for ClusterStoreSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterStoreSize")
    }
}

impl Collector for ClusterStoreSize {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = ConstGauge::new(u64::try_from(self.0.len()).unwrap_or(u64::MAX));
        let help = "Number of linked clusters in the remote discovery cluster store";
        gauge.encode(encoder.encode_descriptor("cluster_store_size", help, None, gauge.metric_type())?)
    }
}
