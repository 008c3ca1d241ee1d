//! Detects whether Weft is being uninstalled: then the stopping agent unloads the datapath. It stays in force when an
//! agent stops for any other reason: a rollout, an eviction, a node that shuts down.
//!
//! `helm uninstall` deletes the DaemonSet first, the agent's rights soon after, and its pods last. So the agent
//! watches its DaemonSet from the start. A DaemonSet that is deleted and recreated at once (`kubectl replace --force`,
//! a GitOps tool that replaces) is not an uninstallation: so the agent repeats the question for a while before it
//! believes a deletion, and leaves everything in force if the API server does not answer.

use std::{future::Future, time::Duration};

use futures::StreamExt;
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Namespace, Pod},
};
use kube::{
    Api, Client,
    api::ObjectMeta,
    runtime::{WatchStreamExt, watcher::watch_object},
};
use tokio::{sync::watch, time::Instant};
use weft_runtime::error::chain;

use super::{OwnPod, client::Pauses};

/// How long a stopping agent waits for an answer. Kubernetes gives it 30 s in total.
const PATIENCE: Duration = Duration::from_secs(2);
/// Interval of requests for the agent's own pod.
const RETRY: Duration = Duration::from_secs(5);
/// How long a deleted DaemonSet has to stay away.
const GRACE: Duration = Duration::from_secs(5);
/// Interval of requests for a deleted DaemonSet.
const RECHECK: Duration = Duration::from_millis(500);

/// State of the agent's DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Unknown yet, or the agent's pod has none.
    Unknown,
    Present(String),
    Deleted(String),
}

/// Follows the DaemonSet that owns the agent's pod, forever.
pub(crate) async fn follow(client: Client, pod: OwnPod, state: watch::Sender<Owner>) -> anyhow::Result<()> {
    let namespace = &pod.name.namespace;
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let name = loop {
        match pods.get(&pod.name.name).await {
            Ok(own) => match daemon_set(&own.metadata) {
                Some(name) => break name,
                None => {
                    tracing::info!("no DaemonSet owns the agent's pod: it leaves the datapath in force when it stops");
                    return std::future::pending().await;
                }
            },
            Err(error) => tracing::warn!(error = chain(&error), "cannot read the agent's own pod"),
        }
        tokio::time::sleep(RETRY).await;
    };
    let daemon_sets = Api::<DaemonSet>::namespaced(client, namespace);
    let mut states = std::pin::pin!(watch_object(daemon_sets, &name).backoff(Pauses::default()));
    while let Some(found) = states.next().await {
        match found {
            Ok(found) => {
                let now = owner(&name, found.as_ref().map(|found| &found.metadata));
                if state.send_replace(now.clone()) != now {
                    tracing::info!(daemon_set = name, state = ?now, "the agent's DaemonSet");
                }
            }
            Err(error) => tracing::warn!(error = chain(&error), "cannot watch the agent's DaemonSet"),
        }
    }
    anyhow::bail!("the watch of DaemonSet {namespace}/{name} ended")
}

/// The API server's answer about an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Present,
    /// It does not exist, or is being deleted.
    Gone,
    /// The agent has no permission: an uninstallation removes its rights before its pods.
    Forbidden,
    /// No answer.
    Unknown,
}

/// The reason to unload everything when the agent stops; `None` to leave it in force.
pub(crate) async fn uninstalled(client: &Client, pod: &OwnPod, owner: &Owner) -> Option<String> {
    let namespace = &pod.name.namespace;
    if let Owner::Present(name) | Owner::Deleted(name) = owner {
        let daemon_sets = Api::<DaemonSet>::namespaced(client.clone(), namespace);
        let ask = async || presence(daemon_sets.get_metadata_opt(name), |found| found.metadata).await;
        let was_deleted = matches!(owner, Owner::Deleted(_));
        // The watch may have been between two connections.
        if (was_deleted || ask().await == Presence::Gone) && stays_away(ask).await {
            return Some(format!("DaemonSet {namespace}/{name} was deleted"));
        }
    }
    let namespaces = Api::<Namespace>::all(client.clone());
    if presence(namespaces.get_metadata_opt(namespace), |found| found.metadata).await == Presence::Gone {
        return Some(format!("namespace {namespace} was deleted"));
    }
    None
}

/// Whether a deleted object is not recreated.
async fn stays_away(mut ask: impl AsyncFnMut() -> Presence) -> bool {
    let end = Instant::now() + GRACE;
    loop {
        let presence = ask().await;
        if presence == Presence::Present {
            tracing::info!("the agent's DaemonSet was recreated");
            return false;
        }
        if Instant::now() >= end {
            return presence != Presence::Unknown;
        }
        tokio::time::sleep(RECHECK).await;
    }
}

async fn presence<T>(
    question: impl Future<Output = kube::Result<Option<T>>>,
    metadata: impl Fn(T) -> ObjectMeta,
) -> Presence {
    match tokio::time::timeout(PATIENCE, question).await {
        Ok(Ok(Some(found))) => match metadata(found).deletion_timestamp {
            None => Presence::Present,
            Some(_) => Presence::Gone,
        },
        Ok(Ok(None)) => Presence::Gone,
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 401 | 403) => Presence::Forbidden,
        Ok(Err(error)) => {
            tracing::debug!(error = chain(&error), "cannot ask whether Weft was uninstalled");
            Presence::Unknown
        }
        Err(_) => Presence::Unknown,
    }
}

fn owner(name: &str, found: Option<&ObjectMeta>) -> Owner {
    match found {
        Some(metadata) if metadata.deletion_timestamp.is_none() => Owner::Present(name.to_owned()),
        _ => Owner::Deleted(name.to_owned()),
    }
}

fn daemon_set(pod: &ObjectMeta) -> Option<String> {
    let mut owners = pod.owner_references.iter().flatten();
    owners.find(|owner| owner.kind == "DaemonSet" && owner.controller == Some(true)).map(|owner| owner.name.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn metadata(metadata: Value) -> ObjectMeta {
        serde_json::from_value(metadata).unwrap()
    }

    #[test]
    fn the_controlling_daemon_set_counts() {
        let owners = |kind, controller| {
            metadata(json!({"ownerReferences": [
                {"apiVersion": "apps/v1", "kind": kind, "name": "weft-agent", "uid": "u", "controller": controller},
            ]}))
        };
        assert_eq!(daemon_set(&owners("DaemonSet", true)).as_deref(), Some("weft-agent"));
        assert_eq!(daemon_set(&owners("DaemonSet", false)), None);
        assert_eq!(daemon_set(&owners("ReplicaSet", true)), None);
        assert_eq!(daemon_set(&ObjectMeta::default()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deletion_counts_only_if_it_lasts() {
        use Presence::{Forbidden, Gone, Present, Unknown};
        let rows: [(&str, &[Presence], bool); 5] = [
            ("uninstalled", &[Gone], true),
            ("uninstalled together with the agent's rights", &[Gone, Forbidden], true),
            ("created again", &[Gone, Gone, Present], false),
            ("created again after a failure", &[Unknown, Present], false),
            ("the API server went away", &[Gone, Unknown], false),
        ];
        for (row, answers, expected) in rows {
            let (mut answers, mut last) = (answers.iter(), Unknown);
            let ask = async || {
                last = answers.next().copied().unwrap_or(last);
                last
            };
            assert_eq!(stays_away(ask).await, expected, "{row}");
        }
    }

    #[test]
    fn a_daemon_set_on_its_way_out_is_deleted() {
        let there = metadata(json!({"name": "weft-agent"}));
        let going = metadata(json!({"name": "weft-agent", "deletionTimestamp": "2026-01-01T00:00:00Z"}));
        assert_eq!(owner("weft-agent", Some(&there)), Owner::Present("weft-agent".into()));
        assert_eq!(owner("weft-agent", Some(&going)), Owner::Deleted("weft-agent".into()));
        assert_eq!(owner("weft-agent", None), Owner::Deleted("weft-agent".into()));
    }
}
