//! The Kubernetes source: one long-lived watch for every kind that a part of the control plane needs.
//!
//! ```text
//! API --watch per kind--> follow --Update--> Caches --batches of events-->
//! ```
//!
//! A watch starts with a streamed list of the newest state, continues with bookmarks, and resumes after an
//! interruption. It lists again only if the API server no longer has its position, then in pages of the newest state.
//! So no API server, however far it lags, takes the state back. Nothing is polled. Objects that vanished during an
//! interruption are deleted. Nodes, ReplicaSets and Jobs are watched by their metadata alone.

mod caches;
mod definition;
mod follow;
mod kinds;
mod requests;

use futures::future::join_all;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::sync::mpsc;
use weft_runtime::readiness::Gate;

use crate::{api::events::Events, metrics::WatchMetrics};
use caches::Caches;
pub(crate) use kinds::{Interest, resources};
use weft_index::Event;

/// Updates that may wait to be merged into a batch; beyond that, the watches wait.
const UPDATES: usize = 512;

/// Watches that have not started.
pub(crate) struct KubeSource {
    client: Client,
    interest: Interest,
    gate: Gate,
    owners: Events,
    metrics: WatchMetrics,
}

impl KubeSource {
    /// Prepares the watches. `gate` shows what the start waits for; `owners` publishes problems of objects as Events.
    pub(crate) fn new(client: Client, interest: Interest, gate: Gate, owners: Events, metrics: WatchMetrics) -> Self {
        Self { client, interest, gate, owners, metrics }
    }

    /// Sends everything that exists, then [`Event::Synced`], then every change. Runs until the receiver is dropped.
    ///
    /// # Errors
    /// Never: a request that the API server refuses is retried.
    pub(crate) async fn run(self, events: mpsc::Sender<Vec<Event>>) -> anyhow::Result<()> {
        let kinds = kinds::watched(self.interest);
        let mut caches = Caches::new(&kinds);
        self.gate.explain(caches.waiting());
        let (updates_tx, mut updates_rx) = mpsc::channel(UPDATES);
        let watches = kinds.iter().enumerate().map(|(index, kind)| {
            let updates = updates_tx.clone();
            follow::follow(self.client.clone(), *kind, &self.metrics, move |update| {
                let updates = updates.clone();
                async move { updates.send((index, update)).await.is_ok() }
            })
        });
        let merge = async {
            let mut received = Vec::new();
            while updates_rx.recv_many(&mut received, UPDATES).await > 0 {
                let was_synced = caches.synced();
                let mut batch = Vec::new();
                for (index, update) in received.drain(..) {
                    caches.take(index, update, &mut batch);
                }
                caches.works().for_each(|(kind, works)| self.metrics.set(kind.group(), kind.name(), works));
                let now = Timestamp::now();
                caches.writes().for_each(|(kind, written)| self.metrics.arrived(kind, written, now));
                for report in caches.reports() {
                    self.owners.warning("Unreadable", report.problem, report.regarding);
                }
                if !caches.synced() {
                    self.gate.explain(caches.waiting());
                } else if !was_synced {
                    batch.push(Event::Synced);
                }
                if !batch.is_empty() && events.send(batch).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            _ = join_all(watches) => {}
            () = merge => {}
        }
        Ok(())
    }
}
