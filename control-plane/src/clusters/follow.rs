//! The task that follows Secrets and the clusters that they link.

use std::{collections::HashMap, pin::pin};

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ObjectReference, Secret};
use kube::{
    Api, Client,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event as Watch},
    },
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::Instant,
};
use weft_index::{Cluster, EndpointsFrom, Event, SharedIndex};
use weft_k8s_api::labels;
use weft_runtime::readiness::Readiness;

use super::{
    Clusters, LinkedCluster,
    link::Link,
    plan::{Action, Plan, Unusable},
};
use crate::{
    api::{self, events::Events, explain_watch},
    metrics::{RequestMetrics, WatchMetrics},
    source::kube::{Interest, KubeSource},
};

/// Batches of one cluster that may wait for its index; its source waits beyond.
const BATCHES: usize = 16;

/// What following clusters needs.
pub(crate) struct Following {
    /// The client of this cluster's API.
    pub(crate) client: Client,
    /// Namespace of the Secrets.
    pub(crate) namespace: String,
    /// Settings of this cluster's index, which those of others have too, except for their domains.
    pub(crate) cluster: Cluster,
    /// The objects that list endpoints.
    pub(crate) endpoints_from: EndpointsFrom,
    /// Publishes problems of Secrets.
    pub(crate) events: Events,
    /// Where streams find the clusters.
    pub(crate) clusters: Clusters,
    /// Counts requests to their APIs.
    pub(crate) requests: RequestMetrics,
}

/// A cluster that is followed.
struct Followed {
    task: AbortHandle,
    /// What replaces it as soon as it is complete.
    successor: Option<Successor>,
}

struct Successor {
    task: AbortHandle,
    linked: LinkedCluster,
}

/// Follows the clusters of a namespace's Secrets. Runs until the process ends.
///
/// # Errors
/// When the watch ends, or a cluster's task panics.
pub(crate) async fn follow(following: Following) -> anyhow::Result<()> {
    let api: Api<Secret> = Api::namespaced(following.client.clone(), &following.namespace);
    let config =
        watcher::Config::default().fields(&format!("type={}", labels::LINK_SECRET_TYPE)).labels(labels::LINK_CLUSTER);
    let mut secrets = pin!(watcher::watcher(api, config).default_backoff());
    let mut plan = Plan::default();
    let mut next: Option<Instant> = None;
    let mut trouble: Option<String> = None;
    let (synced_tx, mut synced_rx) = mpsc::channel(BATCHES);
    let mut state = State { following, followed: HashMap::new(), tasks: JoinSet::new(), number: 0, synced_tx };
    loop {
        let due = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            event = secrets.next() => match event {
                None => anyhow::bail!("the watch of linked clusters ended"),
                Some(Err(error)) => {
                    let problem = explain_watch(&error);
                    // Once, however often it occurs.
                    if trouble.as_ref() != Some(&problem) {
                        let namespace = &state.following.namespace;
                        tracing::error!(problem, namespace, "Secrets of linked clusters cannot be watched, retrying");
                    }
                    trouble = Some(problem);
                }
                Some(Ok(event)) => {
                    // A list that begins may be refused.
                    if !matches!(event, Watch::Init) {
                        trouble = None;
                    }
                    take(&mut plan, &event);
                    if let Watch::InitDone = event {
                        state.following.clusters.complete();
                    }
                }
            },
            () = due => {}
            Some((cluster, number)) = synced_rx.recv() => state.synced(&cluster, number),
            Some(ended) = state.tasks.join_next() => match ended {
                Ok(ended) => ended?,
                Err(error) if error.is_panic() => anyhow::bail!("following a linked cluster panicked: {error}"),
                // Stopped.
                Err(_) => {}
            },
        }
        for unusable in plan.unusable() {
            state.report(unusable);
        }
        let (actions, at) = plan.due(Instant::now());
        next = at;
        for action in actions {
            match action {
                Action::Start { cluster, link } => state.start(cluster, &link).await?,
                Action::Stop { cluster } => state.stop(&cluster),
            }
        }
    }
}

fn take(plan: &mut Plan, event: &Watch<Secret>) {
    match event {
        Watch::Init => plan.list_begins(),
        Watch::InitApply(secret) | Watch::Apply(secret) => plan.apply(secret),
        Watch::InitDone => plan.list_ends(),
        Watch::Delete(secret) => plan.delete(secret.metadata.name.as_deref().unwrap_or_default()),
    }
}

struct State {
    following: Following,
    followed: HashMap<String, Followed>,
    tasks: JoinSet<anyhow::Result<()>>,
    /// Number of the latest index.
    number: u64,
    synced_tx: mpsc::Sender<(String, u64)>,
}

impl State {
    /// Starts a source and an index. They replace what there is under this name as soon as they are complete.
    ///
    /// # Errors
    /// When the index cannot be started.
    async fn start(&mut self, cluster: String, link: &Link) -> anyhow::Result<()> {
        let requests = self.following.requests.of_links();
        let client = match api::connect_to(link.kubeconfig.clone(), requests).await {
            Ok(client) => client,
            Err(error) => {
                let problem = format!("{error:#}");
                tracing::error!(cluster, problem, "linked cluster cannot be followed");
                return Ok(());
            }
        };
        if link.insecure {
            tracing::warn!(cluster, "TLS verification of this linked cluster's API server is disabled");
        }
        let settings = Cluster {
            trust_domain: link.trust_domain.clone(),
            cluster_domain: link.cluster_domain.clone(),
            // Its administrator's rules are not known here.
            allowed_skips: None,
            ..self.following.cluster.clone()
        };
        self.number += 1;
        let index = SharedIndex::start(settings).context("start the index of a linked cluster")?;
        let linked = LinkedCluster { index, synced: false, number: self.number };
        let interest = Interest::Linked(self.following.endpoints_from);
        let following = follow_one(client, interest, linked.clone(), cluster.clone(), self.synced_tx.clone());
        let task = self.tasks.spawn(following);
        tracing::info!(cluster, domain = link.cluster_domain, "linked cluster is followed");
        if let Some(followed) = self.followed.get_mut(&cluster) {
            if let Some(late) = followed.successor.replace(Successor { task, linked }) {
                late.task.abort();
            }
            return Ok(());
        }
        self.following.clusters.put(&cluster, linked);
        self.followed.insert(cluster, Followed { task, successor: None });
        Ok(())
    }

    fn synced(&mut self, cluster: &str, number: u64) {
        let Some(followed) = self.followed.get_mut(cluster) else { return };
        let linked = match followed.successor.take_if(|successor| successor.linked.number == number) {
            Some(successor) => {
                followed.task.abort();
                followed.task = successor.task;
                successor.linked
            }
            None => match self.following.clusters.0.borrow().clusters.get(cluster) {
                Some(linked) if linked.number == number => linked.clone(),
                _ => return,
            },
        };
        tracing::info!(cluster, "objects of a linked cluster are known");
        self.following.clusters.put(cluster, LinkedCluster { synced: true, ..linked });
    }

    fn stop(&mut self, cluster: &str) {
        if let Some(followed) = self.followed.remove(cluster) {
            followed.task.abort();
            if let Some(successor) = followed.successor {
                successor.task.abort();
            }
            tracing::info!(cluster, "linked cluster is no longer followed");
        }
        self.following.clusters.remove(cluster);
    }

    fn report(&self, unusable: Unusable) {
        let Unusable { secret_name: secret, secret_uid: uid, problem } = unusable;
        tracing::error!(secret, problem, "Secret of a linked cluster cannot be used");
        let regarding = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Secret".to_owned()),
            namespace: Some(self.following.namespace.clone()),
            name: Some(secret),
            uid,
            ..ObjectReference::default()
        };
        self.following.events.warning("LinkUnusable", problem, regarding);
    }
}

/// Keeps the index of one cluster current.
///
/// # Errors
/// When the index has stopped.
async fn follow_one(
    client: Client,
    interest: Interest,
    linked: LinkedCluster,
    cluster: String,
    synced: mpsc::Sender<(String, u64)>,
) -> anyhow::Result<()> {
    // Another cluster must not hold up this one's readiness.
    let gate = Readiness::new().gate("caches");
    let (batches_tx, mut batches) = mpsc::channel::<Vec<Event>>(BATCHES);
    let source = KubeSource::new(client, interest, gate, Events::none(), WatchMetrics::default()).run(batches_tx);
    let apply = async {
        while let Some(batch) = batches.recv().await {
            let applied = linked.index.apply(batch).await.context("the index of a linked cluster")?;
            for problem in applied.problems {
                let (object, problem) = (problem.object, problem.problem);
                tracing::debug!(cluster, object, problem, "object of a linked cluster cannot be used as it is");
            }
            if applied.synced && synced.send((cluster.clone(), linked.number)).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    tokio::select! {
        _ = source => Ok(()),
        applied = apply => applied,
    }
}
