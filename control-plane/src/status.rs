//! Writes the statuses of routes, rate limits and EgressNetworks, as Linkerd's policy controller does
//! (`linkerd2:policy-controller/k8s/status/`).
//!
//! ```text
//! index --PendingStatuses--> Queue --patch (while the lease is held)--> API --watch--> index
//! ```
//!
//! The index decides what an object should say; a status is pending until the watch shows it. Synchronous code decides
//! when a patch is due; a failed one is retried until it works or is no longer wanted.

mod metrics;
mod queue;

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};
use weft_index::{PendingStatuses, Status};
use weft_k8s_api::{
    manifest::{Kind, ObjectRef},
    policy::route::CONTROLLER,
};

use crate::{
    allowance::{Allowance, Rate},
    api::explain,
    source::kube::resources,
};
pub(crate) use metrics::StatusMetrics;
use queue::Queue;

/// How many patches may be under way at once.
const MAX_PATCHES: usize = 8;
/// How many patches may be sent: the API server's other clients count too.
const RATE: Rate = Rate { burst: 100.0, per_second: 50.0 };
/// Wait when the allowance is used up: the time of one patch.
const PAUSE: Duration = Duration::from_millis(20);
/// HTTP status of a patch of an object that is gone, or in a version that is not served.
const NOT_FOUND: u16 = 404;

/// Writes statuses.
pub(crate) struct StatusWriter {
    client: Client,
    statuses: PendingStatuses,
    /// How long a patch may take.
    timeout: Duration,
    metrics: StatusMetrics,
    /// The version in which each kind's patch last worked.
    versions: HashMap<Kind, usize>,
}

/// How a patch ended.
struct Ended {
    object: ObjectRef,
    status: Arc<Status>,
    result: Result<Written, String>,
}

/// A patch that needs no retry.
enum Written {
    /// In this version of the kind.
    In(usize),
    /// The object is gone.
    Gone,
}

impl StatusWriter {
    /// A writer of everything that is pending.
    pub(crate) fn new(client: Client, statuses: PendingStatuses, timeout: Duration, metrics: StatusMetrics) -> Self {
        Self { client, statuses, timeout, metrics, versions: HashMap::new() }
    }

    /// Writes while `held` says that this replica may. Runs until the lease is given up.
    ///
    /// # Errors
    /// Never: a request that the API server refuses is retried.
    pub(crate) async fn run(mut self, mut held: watch::Receiver<bool>) -> anyhow::Result<()> {
        loop {
            if held.wait_for(|held| *held).await.is_err() {
                return Ok(());
            }
            // Another replica may have died before it could write.
            self.statuses.all_anew();
            let mut queue = Queue::default();
            tokio::select! {
                () = self.write(&mut queue) => {}
                _ = held.wait_for(|held| !held) => {}
            }
            self.metrics.dropped(queue.waiting());
        }
    }

    async fn write(&mut self, queue: &mut Queue) {
        let mut allowance = Allowance::new(RATE, Instant::now());
        let mut patches = FuturesUnordered::new();
        loop {
            for object in self.statuses.take_changed() {
                self.metrics.dequeued();
                queue.changed(object, Instant::now());
            }
            let now = Instant::now();
            while patches.len() < MAX_PATCHES && allowance.has_some(now) {
                let Some(object) = queue.take_due(now) else { break };
                let Some(status) = self.statuses.get(&object, Timestamp::now()) else {
                    queue.forget(&object);
                    continue;
                };
                if queue.begin(&object, &status, now) {
                    allowance.take(now);
                    patches.push(self.patch(object, status));
                }
            }
            let mut wake = queue.next_due();
            if patches.len() >= MAX_PATCHES {
                wake = None;
            } else if !allowance.has_some(now) {
                wake = wake.map(|due| due.max(now + PAUSE));
            }
            let due = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.statuses.changed() => {}
                () = due => {}
                Some(ended) = patches.next() => self.ended(queue, ended),
            }
        }
    }

    /// A patch of an object's status, in the version that worked last or else in the others.
    fn patch(&self, object: ObjectRef, status: Arc<Status>) -> impl Future<Output = Ended> + use<> {
        let (client, metrics, timeout) = (self.client.clone(), self.metrics.clone(), self.timeout);
        let resources = resources(object.kind);
        let first = self.versions.get(&object.kind).copied().unwrap_or_default();
        async move {
            let params = PatchParams::apply(CONTROLLER);
            let patch = Patch::Merge(json!({"status": body(&status)}));
            let mut result = Ok(Written::Gone);
            for version in (0..resources.len()).map(|index| (first + index) % resources.len()) {
                let namespace = object.namespace.as_deref().unwrap_or_default();
                let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resources[version]);
                let began = Instant::now();
                let patched = tokio::time::timeout(timeout, api.patch_status(&object.name, &params, &patch)).await;
                result = match patched {
                    Ok(Err(kube::Error::Api(status))) if status.code == NOT_FOUND => continue,
                    Ok(Ok(_)) => {
                        metrics.patched(began.elapsed());
                        Ok(Written::In(version))
                    }
                    Ok(Err(error)) => {
                        metrics.refused(began.elapsed());
                        Err(explain(&error))
                    }
                    Err(_) => {
                        metrics.timed_out();
                        Err("no answer from the Kubernetes API in time".to_owned())
                    }
                };
                break;
            }
            Ended { object, status, result }
        }
    }

    fn ended(&mut self, queue: &mut Queue, ended: Ended) {
        let Ended { object, status, result } = ended;
        match result {
            Ok(Written::In(version)) => {
                self.versions.insert(object.kind, version);
                tracing::debug!(%object, "wrote status");
                queue.wrote(&object, status, Instant::now());
            }
            // The watch will say so.
            Ok(Written::Gone) => queue.forget(&object),
            Err(problem) => {
                let attempts = queue.failed(&object, Instant::now());
                if attempts == 1 {
                    tracing::warn!(%object, problem, "status cannot be written, retrying");
                } else {
                    tracing::debug!(%object, problem, attempts, "status still cannot be written");
                }
            }
        }
    }
}

fn body(status: &Status) -> Value {
    match status {
        Status::Route(status) => json!(status),
        Status::RateLimit(status) => json!(status),
        Status::EgressNetwork(status) => json!(status),
    }
}
