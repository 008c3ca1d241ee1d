//! The trace of a cluster: every node's agent at once, as agents come, go and are replaced.
//!
//! ```text
//! watch of the agents' pods ──> one task for each agent ──[Message]──┐
//! watch of a workload's pods (when one was named) ── their names ────┴──> Printer
//! ```
//!
//! Events of one node are in the kernel's order; between nodes, in the order of arrival.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    time::Duration,
};

use anyhow::{Result, bail};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, watcher},
    },
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
};
use weft_proto::agent::{self, WatchRequest, trace_client::TraceClient};

use super::{
    local::is_gone,
    printer::{Next, Printer},
    select::Selection,
};
use crate::{
    agent::{SELECTOR, api_port, in_pod},
    cluster::Cluster,
    output::note,
};

/// Between two attempts to reach the same agent.
const RETRY: Duration = Duration::from_secs(1);
/// Messages that wait for a slow terminal; then the agents wait, and count what they drop.
const QUEUE: usize = 1024;

/// From an agent's task.
enum Message {
    Connected { node: String },
    Event { node: String, event: Box<agent::Event> },
    Gone { node: String, why: String },
    Refused { node: String, why: String },
}

/// Prints every agent's events until there are enough.
pub(super) async fn trace(
    cluster: &Cluster,
    request: &WatchRequest,
    selection: &Selection,
    printer: &mut Printer,
) -> Result<()> {
    let agents: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let mut agent_pods = pin!(watcher(agents, watcher::Config::default().labels(SELECTOR)).default_backoff());
    let mut workload_pods = match (&selection.labels, &selection.namespace) {
        (Some(labels), Some(namespace)) => {
            let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
            watcher(pods, watcher::Config::default().labels(labels)).default_backoff().touched_objects().boxed()
        }
        _ => stream::pending().boxed(),
    };
    let (messages_tx, mut messages) = mpsc::channel(QUEUE);
    let mut tasks = Tasks { set: JoinSet::new(), running: BTreeMap::new(), listed: BTreeSet::new() };
    let mut nodes = Nodes::default();
    let mut names = BTreeSet::new();
    loop {
        tokio::select! {
            Some(event) = agent_pods.next() => match event {
                Ok(event) => {
                    let first = matches!(event, watcher::Event::InitDone) && !nodes.listed;
                    for node in tasks.apply(event, |pod| follow(cluster.clone(), pod, request.clone(), messages_tx.clone())) {
                        nodes.gone(&node, "its pod is gone");
                    }
                    if first {
                        nodes.listed(tasks.nodes(), &cluster.namespace)?;
                    }
                }
                Err(error) if !nodes.listed => bail!("the agents' pods in namespace {}: {}", cluster.namespace, watch_error(&error)),
                Err(error) => note(&format!("the agents' pods: {}; trying again", watch_error(&error))),
            },
            Some(pod) = workload_pods.next() => match pod {
                Ok(pod) => { names.insert(pod.name_any()); }
                Err(error) => note(&format!("the pods of {}: {}; trying again", selection.labels.as_deref().unwrap_or_default(), watch_error(&error))),
            },
            Some(message) = messages.recv() => match message {
                Message::Connected { node } => {
                    nodes.connected(&node);
                    printer.header()?;
                }
                Message::Event { node, event } => {
                    let name = event.pod.as_ref().map(|pod| pod.name.as_str()).unwrap_or_default();
                    if selection.labels.is_some() && !names.contains(name) {
                        printer.loss(&node, event.dropped_before);
                    } else if printer.event(&node, &event)? == Next::Enough {
                        return Ok(());
                    }
                }
                Message::Gone { node, why } => nodes.gone(&node, &why),
                Message::Refused { node, why } => bail!("the agent on {node} refused: {why}"),
            },
        }
    }
}

/// One task for each agent pod. Dropping this ends them.
struct Tasks {
    set: JoinSet<()>,
    /// By the pods' uids: a successor may have the same name.
    running: BTreeMap<String, (String, AbortHandle)>,
    /// Seen since the watch began anew.
    listed: BTreeSet<String>,
}

impl Tasks {
    /// Starts and ends tasks; gives the nodes whose agent has gone.
    fn apply<F>(&mut self, event: watcher::Event<Pod>, follow: impl Fn(Pod) -> F) -> Vec<String>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(pod) => {
                self.listed.insert(pod.uid().unwrap_or_default());
                self.start(pod, follow);
            }
            watcher::Event::InitDone => {
                let gone: Vec<_> = self.running.keys().filter(|uid| !self.listed.contains(*uid)).cloned().collect();
                return gone.iter().filter_map(|uid| self.end(uid)).collect();
            }
            watcher::Event::Apply(pod) => self.start(pod, follow),
            watcher::Event::Delete(pod) => return self.end(&pod.uid().unwrap_or_default()).into_iter().collect(),
        }
        Vec::new()
    }

    fn start<F>(&mut self, pod: Pod, follow: impl Fn(Pod) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let uid = pod.uid().unwrap_or_default();
        if runs(&pod) && !self.running.contains_key(&uid) {
            let node = node_of(&pod);
            let task = self.set.spawn(follow(pod));
            self.running.insert(uid, (node, task));
        }
    }

    fn end(&mut self, uid: &str) -> Option<String> {
        let (node, task) = self.running.remove(uid)?;
        task.abort();
        Some(node)
    }

    fn nodes(&self) -> BTreeSet<String> {
        self.running.values().map(|(node, _)| node.clone()).collect()
    }
}

fn runs(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
}

fn node_of(pod: &Pod) -> String {
    pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default()
}

/// Which nodes are listened to, so that every change is told once.
#[derive(Default)]
struct Nodes {
    /// Whether the agents are known that there were in the beginning.
    listed: bool,
    state: BTreeMap<String, NodeState>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NodeState {
    /// Never answered so far.
    Awaited,
    Connected,
    Lost,
}

impl Nodes {
    fn listed(&mut self, nodes: BTreeSet<String>, namespace: &str) -> Result<()> {
        if nodes.is_empty() {
            bail!(
                "no agent runs in namespace {namespace}: `weft check` says why, -L names another control plane's namespace"
            );
        }
        self.listed = true;
        for node in nodes {
            self.state.entry(node).or_insert(NodeState::Awaited);
        }
        Ok(())
    }

    fn connected(&mut self, node: &str) {
        let before = self.state.insert(node.to_owned(), NodeState::Connected);
        let connected = self.state.values().filter(|state| **state == NodeState::Connected).count();
        match before {
            Some(NodeState::Lost) => {
                note(&format!("an agent on {node} answers again; what happened between is not shown"));
            }
            _ => note(&format!("listening on {node} ({connected} of {} nodes)", self.state.len())),
        }
    }

    fn gone(&mut self, node: &str, why: &str) {
        let before = self.state.insert(node.to_owned(), NodeState::Lost);
        match before {
            Some(NodeState::Connected) => note(&format!("the agent on {node} went away ({why}); waiting for the next")),
            Some(NodeState::Lost) => {}
            Some(NodeState::Awaited) | None => {
                note(&format!("the agent on {node} does not answer: {why}; trying again"))
            }
        }
    }
}

/// Streams one agent's events for as long as its pod is there.
async fn follow(cluster: Cluster, pod: Pod, request: WatchRequest, messages: mpsc::Sender<Message>) {
    let node = node_of(&pod);
    loop {
        let Err(ended) = stream_once(&cluster, &pod, &node, &request, &messages).await;
        let message = match ended {
            Ended::Gone(why) => Message::Gone { node: node.clone(), why },
            Ended::Refused(why) => Message::Refused { node: node.clone(), why },
        };
        if messages.send(message).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

enum Ended {
    Gone(String),
    Refused(String),
}

impl From<tonic::Status> for Ended {
    fn from(status: tonic::Status) -> Self {
        let why = status.message().to_owned();
        if is_gone(status.code()) { Self::Gone(why) } else { Self::Refused(why) }
    }
}

async fn stream_once(
    cluster: &Cluster,
    pod: &Pod,
    node: &str,
    request: &WatchRequest,
    messages: &mpsc::Sender<Message>,
) -> Result<std::convert::Infallible, Ended> {
    let namespace = pod.namespace().unwrap_or_default();
    let channel = in_pod(cluster, &namespace, &pod.name_any(), api_port(pod)).await.map_err(Ended::Gone)?;
    let mut events = TraceClient::new(channel).watch(request.clone()).await?.into_inner();
    let closed = |_| Ended::Gone("nobody listens any more".to_owned());
    messages.send(Message::Connected { node: node.to_owned() }).await.map_err(closed)?;
    loop {
        let Some(event) = events.message().await? else {
            return Err(Ended::Gone("it ended the stream".to_owned()));
        };
        messages.send(Message::Event { node: node.to_owned(), event: Box::new(event) }).await.map_err(closed)?;
    }
}

fn watch_error(error: &watcher::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{PodSpec, PodStatus};

    use super::*;

    fn agent(uid: &str, node: &str, phase: &str) -> Pod {
        let mut pod = Pod {
            spec: Some(PodSpec { node_name: Some(node.to_owned()), ..PodSpec::default() }),
            status: Some(PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() }),
            ..Pod::default()
        };
        pod.metadata.uid = Some(uid.to_owned());
        pod
    }

    fn tasks() -> Tasks {
        Tasks { set: JoinSet::new(), running: BTreeMap::new(), listed: BTreeSet::new() }
    }

    #[tokio::test]
    async fn a_replaced_agent_is_followed_by_its_successor() {
        let mut tasks = tasks();
        let follow = |_| std::future::pending();
        assert!(tasks.apply(watcher::Event::Apply(agent("1", "a", "Running")), follow).is_empty());
        assert!(tasks.apply(watcher::Event::Apply(agent("2", "a", "Pending")), follow).is_empty());
        assert_eq!(tasks.running.len(), 1);
        assert_eq!(tasks.apply(watcher::Event::Delete(agent("1", "a", "Running")), follow), ["a"]);
        tasks.apply(watcher::Event::Apply(agent("2", "a", "Running")), follow);
        assert_eq!(tasks.running.keys().collect::<Vec<_>>(), ["2"]);
    }

    #[tokio::test]
    async fn a_watch_that_begins_anew_forgets_whom_it_no_longer_lists() {
        let mut tasks = tasks();
        let follow = |_| std::future::pending();
        for uid in ["1", "2"] {
            tasks.apply(watcher::Event::Apply(agent(uid, uid, "Running")), follow);
        }
        tasks.apply(watcher::Event::Init, follow);
        tasks.apply(watcher::Event::InitApply(agent("2", "2", "Running")), follow);
        assert_eq!(tasks.apply(watcher::Event::InitDone, follow), ["1"]);
        assert_eq!(tasks.nodes().into_iter().collect::<Vec<_>>(), ["2"]);
    }

    #[test]
    fn a_cluster_without_agents_is_an_error_that_names_the_namespace() {
        let error = Nodes::default().listed(BTreeSet::new(), "mesh").unwrap_err().to_string();
        assert!(error.contains("namespace mesh") && error.contains("weft check"), "{error}");
    }
}
