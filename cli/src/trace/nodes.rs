//! The trace of a cluster: every node's agent at once, as agents come, go and are replaced.
//!
//! ```text
//! watch of the agents' pods ──> one task for each agent ──[Message]──┐
//! watch of a workload's pods (when one was named) ── their names ────┴──> Printer
//! ```
//!
//! Events of one node are in the kernel's order; between nodes, in the order of arrival.

mod connections;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, future,
    pin::pin,
    time::Duration,
};

use anyhow::{Result, anyhow, bail};
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::{
    Api, ResourceExt as _,
    api::ListParams,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
};
use tonic::{Status, transport::Channel};
use weft_proto::agent::{self, WatchRequest, trace_client::TraceClient};

use super::{
    local::is_gone,
    printer::{Next, Printer},
};
use crate::{
    agent::{SELECTOR, in_pod, reason},
    cluster::{ANSWER, Cluster, root_cause, within},
    mesh::{list, pods},
    output::{
        note,
        progress::{self, API_SERVER},
    },
    resource::Selection,
};
use connections::Nodes;

/// Pause between two attempts to connect to the same agent.
const RETRY: Duration = Duration::from_secs(1);
/// Messages that may wait for a slow terminal; beyond that the agents wait, and count what they drop.
const QUEUE: usize = 1024;

/// An agent's pod and its node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    node: String,
    pod: String,
}

/// A message from an agent's task.
enum Message {
    Connected,
    Event(Box<agent::Event>),
    Gone(String),
    Refused(String),
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
    let (mut all_pods, mut services) = if printer.shows_names() {
        (every::<Pod>(cluster), every::<Service>(cluster))
    } else {
        (stream::pending().boxed(), stream::pending().boxed())
    };
    let (messages_tx, mut messages) = mpsc::channel(QUEUE);
    let mut tasks = Tasks { set: JoinSet::new(), running: BTreeMap::new(), listed: BTreeSet::new() };
    let mut nodes = Nodes::default();
    let mut names = progress::during(API_SERVER, names_of(cluster, selection)).await?;
    // Shows what is waited for until the first agent answers, or a note says that it does not.
    let mut opening = Some(Box::pin(progress::during("the nodes' agents", future::pending::<()>())));
    loop {
        tokio::select! {
            () = async { match &mut opening { Some(opening) => opening.await, None => future::pending().await } } => {}
            Some(event) = agent_pods.next() => match event {
                Ok(event) => {
                    let first = matches!(event, watcher::Event::InitDone) && !nodes.begun();
                    for source in tasks.apply(event, |pod| follow(cluster.clone(), pod, request.clone(), messages_tx.clone())) {
                        nodes.gone(&source, "its pod is gone");
                    }
                    if first {
                        nodes.begin(tasks.sources(), &cluster.namespace)?;
                    }
                }
                Err(error) if !nodes.begun() => bail!("the agents' pods in namespace {}: {}", cluster.namespace, root_cause(&error)),
                Err(error) => note(&format!("the agents' pods: {}; trying again", root_cause(&error))),
            },
            Some(pod) = workload_pods.next() => match pod {
                Ok(pod) => { names.insert(pod.name_any()); }
                Err(error) => note(&format!("the pods of {}: {}; trying again", selection.labels.as_deref().unwrap_or_default(), root_cause(&error))),
            },
            Some(pod) = all_pods.next() => match pod {
                Ok(pod) => printer.names().pod(&pod),
                Err(error) => {
                    note(&format!("addresses of pods stay without names: {}", root_cause(&error)));
                    all_pods = stream::pending().boxed();
                }
            },
            Some(service) = services.next() => match service {
                Ok(service) => printer.names().service(&service),
                Err(error) => {
                    note(&format!("addresses of Services stay without names: {}", root_cause(&error)));
                    services = stream::pending().boxed();
                }
            },
            Some((source, message)) = messages.recv() => match message {
                Message::Connected => {
                    opening = None;
                    nodes.connected(&source);
                    printer.header()?;
                }
                Message::Event(event) => {
                    let name = event.pod.as_ref().map(|pod| pod.name.as_str()).unwrap_or_default();
                    if selection.labels.is_some() && !names.contains(name) {
                        printer.loss(&source.node, event.dropped_before);
                    } else if printer.event(&source.node, &event)? == Next::Enough {
                        return Ok(());
                    }
                }
                Message::Gone(why) => {
                    opening = None;
                    nodes.gone(&source, &why);
                }
                Message::Refused(why) => bail!("the agent on {} refused: {why}", source.node),
            },
        }
    }
}

/// All objects of a kind, and their changes.
fn every<K>(cluster: &Cluster) -> BoxStream<'static, Result<K, watcher::Error>>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    watcher(Api::<K>::all(cluster.client.clone()), watcher::Config::default()).touched_objects().boxed()
}

/// The existing pods of a workload: their first events must not arrive before their names. A note says what does not
/// exist yet.
async fn names_of(cluster: &Cluster, selection: &Selection) -> Result<BTreeSet<String>> {
    let Some(namespace) = &selection.namespace else { return Ok(BTreeSet::new()) };
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    // Agents know a pod by its name: this user may have no right to read it.
    if let Some(name) = &selection.pod
        && let Ok(None) = within(ANSWER, pods.get_metadata_opt(name)).await
    {
        note(&format!("pod {namespace}/{name} does not exist yet"));
    }
    let Some(labels) = &selection.labels else { return Ok(BTreeSet::new()) };
    let found = list(pods, &ListParams::default().labels(labels)).await;
    let found = found.map_err(|error| anyhow!("the pods of {labels} in namespace {namespace}: {error}"))?;
    if found.is_empty() {
        note(&format!("no pod in namespace {namespace} has the labels {labels} yet"));
    }
    Ok(found.iter().map(kube::ResourceExt::name_any).collect())
}

/// One task for each agent pod. Dropping this stops them.
struct Tasks {
    set: JoinSet<()>,
    /// Tasks by the uid of the pod: a successor may have the same name.
    running: BTreeMap<String, (Source, AbortHandle)>,
    /// Pods that were listed since the watch restarted.
    listed: BTreeSet<String>,
}

impl Tasks {
    /// Starts and stops tasks; returns the agents that have gone.
    fn apply<F>(&mut self, event: watcher::Event<Pod>, follow: impl Fn(Pod) -> F) -> Vec<Source>
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
            let source = source_of(&pod);
            let task = self.set.spawn(follow(pod));
            self.running.insert(uid, (source, task));
        }
    }

    fn end(&mut self, uid: &str) -> Option<Source> {
        let (source, task) = self.running.remove(uid)?;
        task.abort();
        Some(source)
    }

    fn sources(&self) -> Vec<Source> {
        self.running.values().map(|(source, _)| source.clone()).collect()
    }
}

fn runs(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
}

fn source_of(pod: &Pod) -> Source {
    Source { node: pods::node(pod).to_owned(), pod: pod.name_any() }
}

/// Streams one agent's events while its pod exists.
async fn follow(cluster: Cluster, pod: Pod, request: WatchRequest, messages: mpsc::Sender<(Source, Message)>) {
    let source = source_of(&pod);
    let send = |message| messages.send((source.clone(), message));
    loop {
        let channel = in_pod(&cluster, &pod.namespace().unwrap_or_default(), &source.pod).await;
        let ended = match channel {
            Ok(channel) => stream(channel, &request, send).await,
            Err(error) => Some(Message::Gone(error)),
        };
        // `None`: the receiver is gone.
        let Some(ended) = ended else { return };
        if send(ended).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Sends events until the stream ends; returns how it ended, or `None` if the receiver is gone.
async fn stream<F, E>(channel: Channel, request: &WatchRequest, send: impl Fn(Message) -> F) -> Option<Message>
where
    F: Future<Output = Result<(), E>>,
{
    let mut events = match TraceClient::new(channel).watch(request.clone()).await {
        Ok(response) => response.into_inner(),
        Err(status) => return Some(ended(&status)),
    };
    send(Message::Connected).await.ok()?;
    loop {
        match events.message().await {
            Ok(Some(event)) => send(Message::Event(Box::new(event))).await.ok()?,
            Ok(None) => return Some(Message::Gone("it ended the stream".to_owned())),
            Err(status) => return Some(ended(&status)),
        }
    }
}

fn ended(status: &Status) -> Message {
    let why = reason(status);
    if is_gone(status.code()) { Message::Gone(why) } else { Message::Refused(why) }
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
        let gone = tasks.apply(watcher::Event::Delete(agent("1", "a", "Running")), follow);
        assert_eq!(gone.iter().map(|source| source.node.as_str()).collect::<Vec<_>>(), ["a"]);
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
        let gone = tasks.apply(watcher::Event::InitDone, follow);
        assert_eq!(gone.iter().map(|source| source.node.as_str()).collect::<Vec<_>>(), ["1"]);
        assert_eq!(tasks.sources().iter().map(|source| source.node.as_str()).collect::<Vec<_>>(), ["2"]);
    }
}
