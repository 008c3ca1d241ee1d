//! Events on a pod's owner: the pod has no name yet, and people look at the Deployment.
//!
//! The owner's owner is fetched in the background, once for each ReplicaSet or Job.

use std::collections::HashMap;

use anyhow::anyhow;
use k8s_openapi::{
    api::{apps::v1::ReplicaSet, batch::v1::Job, core::v1::ObjectReference},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::{Api, Client, runtime::events::EventType};
use tokio::{sync::mpsc, time::Instant};
use weft_k8s_api::{inject::SkipReason, names};

use crate::{
    allowance::{Allowance, Rate},
    api::events::Events,
};

/// Events that may wait; further ones are dropped, because no request may wait for them.
const QUEUE: usize = 256;
/// Burst of Events, and their rate per second in the long run. Anybody who reaches the webhook can cause them, and
/// each costs one or two requests to the API server; a hundred pods that start together get theirs.
const RATE: Rate = Rate { burst: 200.0, per_second: 10.0 };
/// The longest kind, version and uid of an owner, in bytes; Kubernetes' own are shorter.
const MAX_TEXT: usize = 253;
/// How many owners are remembered before the memory is cleared.
const REMEMBERED: usize = 1024;

/// What happened to the pod.
#[derive(Clone, Debug)]
pub(super) enum InjectionReport {
    Injected,
    Skipped(SkipReason),
    Failed(String),
}

/// Publishes Events on owners, without waiting.
#[derive(Clone)]
pub(super) struct Reporter(mpsc::Sender<(ObjectReference, InjectionReport)>);

impl Reporter {
    /// Publishes an Event on the owner of a pod, if it has one.
    pub(super) fn report(&self, pod: &ObjectMeta, report: InjectionReport) {
        let Some(owner) = controller(pod).filter(|owner| is_possible(owner)) else { return };
        let regarding = reference(owner, pod.namespace.as_deref());
        if self.0.try_send((regarding, report)).is_err() {
            tracing::debug!("event dropped, too many are waiting");
        }
    }
}

/// Whether an object may have this owner. Anybody may send a review: the name becomes a part of a request's path, and
/// all texts wait in memory.
fn is_possible(owner: &OwnerReference) -> bool {
    let OwnerReference { api_version, kind, name, uid, .. } = owner;
    names::is_subdomain(name) && [api_version, kind, uid].into_iter().all(|text| text.len() <= MAX_TEXT)
}

/// The controller among the owners.
pub(super) fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// The reporter, and the task that writes its Events.
pub(super) fn start(
    client: Client,
    events: Events,
) -> (Reporter, impl Future<Output = anyhow::Result<()>> + Send + 'static) {
    let (tx, mut rx) = mpsc::channel(QUEUE);
    let writing = async move {
        let mut owners = Owners { client, known: HashMap::new() };
        let mut allowance = Allowance::new(RATE, Instant::now());
        while let Some((regarding, report)) = rx.recv().await {
            if !allowance.take(Instant::now()) {
                tracing::debug!("event dropped, the rate is too high");
                continue;
            }
            let regarding = owners.top(regarding).await;
            let (type_, reason, note) = match report {
                InjectionReport::Injected => {
                    (EventType::Normal, "Injected", "Linkerd sidecar proxy injected".to_owned())
                }
                InjectionReport::Skipped(reason) => {
                    let note = format!("Linkerd sidecar proxy injection skipped: {}", reason.explanation());
                    (EventType::Normal, "InjectionSkipped", note)
                }
                InjectionReport::Failed(problem) => (EventType::Warning, "InjectionFailed", problem),
            };
            events.publish(type_, reason, note, &regarding).await;
        }
        Err(anyhow!("the injector ended"))
    };
    (Reporter(tx), writing)
}

struct Owners {
    client: Client,
    /// By the uid of the ReplicaSet or Job.
    known: HashMap<String, ObjectReference>,
}

impl Owners {
    /// The Deployment of a ReplicaSet, the CronJob of a Job, otherwise the owner itself.
    async fn top(&mut self, owner: ObjectReference) -> ObjectReference {
        let (Some(namespace), Some(name), Some(uid)) = (&owner.namespace, &owner.name, &owner.uid) else {
            return owner;
        };
        if let Some(known) = self.known.get(uid) {
            return known.clone();
        }
        let found = match owner.kind.as_deref() {
            Some("ReplicaSet") => {
                let api: Api<ReplicaSet> = Api::namespaced(self.client.clone(), namespace);
                api.get_metadata_opt(name).await.map(|object| object.map(|object| object.metadata))
            }
            Some("Job") => {
                let api: Api<Job> = Api::namespaced(self.client.clone(), namespace);
                api.get_metadata_opt(name).await.map(|object| object.map(|object| object.metadata))
            }
            _ => return owner,
        };
        let top = match found {
            Ok(Some(metadata)) => controller(&metadata).map(|top| reference(top, Some(namespace))),
            Ok(None) => None,
            Err(error) => {
                tracing::debug!(%error, kind = owner.kind, name, namespace, "owner cannot be read");
                None
            }
        };
        let Some(top) = top else { return owner };
        if self.known.len() >= REMEMBERED {
            self.known.clear();
        }
        self.known.insert(uid.clone(), top.clone());
        top
    }
}

fn reference(owner: &OwnerReference, namespace: Option<&str>) -> ObjectReference {
    ObjectReference {
        api_version: Some(owner.api_version.clone()),
        kind: Some(owner.kind.clone()),
        name: Some(owner.name.clone()),
        uid: Some(owner.uid.clone()),
        namespace: namespace.map(str::to_owned),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_owner_that_cannot_exist_gets_no_event() {
        let long = "x".repeat(MAX_TEXT + 1);
        let (tx, mut rx) = mpsc::channel(QUEUE);
        let reporter = Reporter(tx);
        for (change, expected) in [
            (json!({}), true),
            (json!({"name": "x".repeat(MAX_TEXT)}), true),
            (json!({"name": "web?watch=true"}), false),
            (json!({"name": "../secrets/s"}), false),
            (json!({"name": long}), false),
            (json!({"kind": long}), false),
            (json!({"apiVersion": long}), false),
            (json!({"uid": long}), false),
        ] {
            let mut owner =
                json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "u", "controller": true});
            owner.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            let pod = serde_json::from_value(json!({"ownerReferences": [owner]})).unwrap();
            reporter.report(&pod, InjectionReport::Injected);
            assert_eq!(rx.try_recv().is_ok(), expected, "{change}");
        }
    }
}
