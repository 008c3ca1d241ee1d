//! Reports for the owners of pods and of the node, as Kubernetes Events, which `kubectl describe` shows. A lost Event
//! is only logged.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;
use weft_k8s_api::labels;
use weft_runtime::error::chain;

use super::{
    Identity,
    plan::{EnrolmentEvent, Problem, Report},
};
use crate::datapath::sample::Losses;

/// The name under which the agent reports.
const CONTROLLER: &str = "weft.io/agent";
/// Kubernetes' limit on the length of a note, in bytes.
const MAX_NOTE_BYTES: usize = 1024;
/// Deadline of a request: reports do not wait for an API server that is down.
const PATIENCE: Duration = Duration::from_secs(5);

/// Publishes Events in the agent's name.
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

    /// Reports on the node and on the agent's own pod that this node cannot be served, and why.
    pub(crate) async fn unsupported(&self, reason: &str) {
        let note = format!("weft-agent cannot redirect pods on node {}: {reason}", self.identity.node);
        self.publish_on_node(EventType::Warning, "WeftAgentUnsupported", "Start", &note).await;
    }

    /// Reports on the node and on the agent's own pod that all redirection was turned off, or on again.
    pub(crate) async fn node_bypassed(&self, bypassed: bool) {
        let node = &self.identity.node;
        if bypassed {
            let note = format!(
                "all redirection on node {node} is switched off: its pods' connections go around their proxies, in plain \
                 text and without policy; `weft-agent bypass off` in the agent's pod ends it"
            );
            self.publish_on_node(EventType::Warning, "RedirectionBypassed", "Bypass", &note).await;
        } else {
            let note = format!("redirection on node {node} is in force again");
            self.publish_on_node(EventType::Normal, "RedirectionInForce", "Bypass", &note).await;
        }
    }

    /// Reports on the node and on the agent's own pod that the kernel's maps had no room for proxies.
    pub(crate) async fn no_room(&self, new: Losses) {
        let note = format!(
            "the kernel maps of node {} had no room for {} listeners of proxies and {} network namespaces of new pods: proxies \
             that start may not become ready. A container that listens or binds as the proxy's user in many network \
             namespaces can fill them; see docs/troubleshooting.md",
            self.identity.node, new.listeners, new.admissions
        );
        self.publish_on_node(EventType::Warning, "NoRoomForProxies", "Record", &note).await;
    }

    async fn publish_on_node(&self, type_: EventType, reason: &str, action: &str, note: &str) {
        let node = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(self.identity.node.clone()),
            // The value that the kubelet writes, and that `kubectl describe node` looks for.
            uid: Some(self.identity.node.clone()),
            ..ObjectReference::default()
        };
        let own = self.identity.pod.as_ref().map(|pod| reference(&pod.name.namespace, &pod.name.name, &pod.uid));
        for regarding in std::iter::once(node).chain(own) {
            self.publish(type_, reason, action, note.to_owned(), &regarding).await;
        }
    }

    /// Publishes the plan's reports, forever.
    pub(crate) async fn run(self, mut reports: mpsc::UnboundedReceiver<Report>) -> anyhow::Result<()> {
        while let Some(report) = reports.recv().await {
            let regarding = reference(&report.name.namespace, &report.name.name, &report.uid);
            let (type_, reason, note) = match &report.event {
                EnrolmentEvent::Problem(Problem::Annotation(error)) => (
                    EventType::Warning,
                    "InvalidAnnotation",
                    format!("{error}; until it can be read, the pod's proxy is not ready, or keeps the rules it has"),
                ),
                EnrolmentEvent::Problem(Problem::Failed(text) | Problem::NotYet(text)) => {
                    (EventType::Warning, "EnrolmentFailed", format!("weft-agent cannot redirect the pod: {text}"))
                }
                EnrolmentEvent::Forbidden(forbidden) => {
                    (EventType::Warning, "ForbiddenAnnotation", format!("{forbidden}; until then it has no effect"))
                }
                EnrolmentEvent::Bypassed(true) => (
                    EventType::Warning,
                    "RedirectionBypassed",
                    format!(
                        "the annotation {} switched the pod's redirection off: its connections go around the proxy, in \
                         plain text and without policy",
                        labels::BYPASS
                    ),
                ),
                EnrolmentEvent::Bypassed(false) => {
                    (EventType::Normal, "RedirectionInForce", "the pod's connections are redirected again".to_owned())
                }
            };
            self.publish(type_, reason, "Enrol", note, &regarding).await;
        }
        Ok(())
    }

    async fn publish(
        &self,
        type_: EventType,
        reason: &str,
        action: &str,
        mut note: String,
        regarding: &ObjectReference,
    ) {
        while note.len() > MAX_NOTE_BYTES {
            note.pop();
        }
        let event =
            Event { type_, reason: reason.to_owned(), note: Some(note), action: action.to_owned(), secondary: None };
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
