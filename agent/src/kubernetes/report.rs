//! What a pod's or the node's owner should know, as Kubernetes Events: `kubectl describe` shows them. Losing one is a
//! log line, never more.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;

use super::{
    Identity,
    plan::{Problem, Report},
};
use crate::error::chain;

/// The name under which the agent reports.
const CONTROLLER: &str = "weft.io/agent";
/// Kubernetes' own bound of a note, in bytes.
const MAX_NOTE_BYTES: usize = 1024;
/// An API server that is away is not waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Publishes events in the agent's name.
#[derive(Clone)]
pub(crate) struct Publisher {
    recorder: Recorder,
    identity: Identity,
}

impl Publisher {
    pub(crate) fn new(client: Client, identity: Identity) -> Self {
        let instance = identity.pod.as_ref().map_or_else(|| identity.node.clone(), |pod| pod.name.name.clone());
        let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: Some(instance) };
        Self { recorder: Recorder::new(client, reporter), identity }
    }

    /// Says on the node and on the agent's own pod that this node cannot be served, and why.
    pub(crate) async fn unsupported(&self, reason: &str) {
        let note = format!("weft-agent cannot redirect pods on node {}: {reason}", self.identity.node);
        let node = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(self.identity.node.clone()),
            // What the kubelet writes there, and `kubectl describe node` looks for.
            uid: Some(self.identity.node.clone()),
            ..ObjectReference::default()
        };
        let own = self.identity.pod.as_ref().map(|pod| reference(&pod.name.namespace, &pod.name.name, &pod.uid));
        for regarding in std::iter::once(node).chain(own) {
            self.publish("WeftAgentUnsupported", "Start", note.clone(), &regarding).await;
        }
    }

    /// Publishes what the plan reports, forever.
    pub(crate) async fn run(self, mut reports: mpsc::UnboundedReceiver<Report>) -> anyhow::Result<()> {
        while let Some(report) = reports.recv().await {
            let regarding = reference(&report.name.namespace, &report.name.name, &report.uid);
            let (reason, note) = match &report.problem {
                Problem::Annotation(error) => (
                    "InvalidAnnotation",
                    format!("{error}; until it can be read, the pod's proxy is not ready, or keeps the rules it has"),
                ),
                Problem::Failed(text) | Problem::NotYet(text) => {
                    ("EnrolmentFailed", format!("weft-agent cannot redirect the pod: {text}"))
                }
            };
            self.publish(reason, "Enrol", note, &regarding).await;
        }
        Ok(())
    }

    async fn publish(&self, reason: &str, action: &str, mut note: String, regarding: &ObjectReference) {
        while note.len() > MAX_NOTE_BYTES {
            note.pop();
        }
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        match tokio::time::timeout(PATIENCE, self.recorder.publish(&event, regarding)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(error = chain(&error), reason, "cannot publish a Kubernetes Event"),
            Err(_) => tracing::warn!(reason, "cannot publish a Kubernetes Event: the API server does not answer"),
        }
    }
}

fn reference(namespace: &str, name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}
