//! The kernel's verdicts about the connections of tapped requests, from the agents, with the rights of the person who
//! asks.
//!
//! A connection is the same if pod, direction and client's address and port are: proxies see the port that the kernel
//! saw.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, timeout_at},
};
use tonic::{Streaming, transport::Channel};
use weft_k8s_api::printable;
use weft_proto::{
    agent::{self, Event, WatchRequest, trace_client::TraceClient},
    viz::{self, TapEvent},
};

use super::format::common;
use crate::{
    agent::{SELECTOR, in_pod, on_socket, reason},
    mesh::{list, pods},
    output::{
        colour::{self, paint_if},
        note, progress,
    },
    pod_network::PodNetwork,
};

/// Verdicts that are kept.
const KEPT: usize = 8192;
/// Verdicts that wait to be kept.
const QUEUE: usize = 1024;
/// How much later than a request its connection's verdict may arrive.
const LATE: Duration = Duration::from_millis(300);

/// Pod, direction, and the client's address and port.
type Key = (String, String, bool, String);

/// What agents said.
pub(super) struct Kernel {
    events: mpsc::Receiver<Event>,
    /// `None`: there is none, as far as anybody knows.
    verdicts: HashMap<Key, Option<Verdict>>,
    order: VecDeque<Key>,
    _tasks: JoinSet<()>,
}

/// A decision about a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    verdict: String,
    original_destination: String,
    new_destination: String,
    command: String,
    pid: u32,
}

impl Kernel {
    /// Asks every agent. Those that do not answer are named, and the tap goes on without them.
    pub(super) async fn open(network: &PodNetwork, namespace: &str) -> Self {
        let request = WatchRequest { namespace: namespace.to_owned(), ..WatchRequest::default() };
        let mut tasks = JoinSet::new();
        let (events_tx, events) = mpsc::channel(QUEUE);
        let mut opened = 0;
        for (agent, stream) in progress::during("the nodes' agents", streams(network, &request)).await {
            match stream {
                Ok(stream) => {
                    opened += 1;
                    tasks.spawn(pass(agent, stream, events_tx.clone()));
                }
                Err(why) => note(&format!("no verdicts from {agent}: {why}")),
            }
        }
        if opened == 0 {
            note("no agent answers, so no verdicts are shown; weft status says what the agents do");
        }
        Self { events, verdicts: HashMap::new(), order: VecDeque::new(), _tasks: tasks }
    }

    /// Keeps the next verdict. Waits for ever when there are no more.
    pub(super) async fn listen(&mut self) {
        match self.events.recv().await {
            Some(event) => self.keep(event),
            None => std::future::pending().await,
        }
    }

    /// The verdict about a request's connection.
    pub(super) async fn verdict(&mut self, tapped: &TapEvent) -> Option<Verdict> {
        let is_inbound = tapped.direction() == viz::Direction::Inbound;
        let key = (tapped.namespace.clone(), tapped.pod.clone(), is_inbound, tapped.source.clone());
        let give_up = Instant::now() + LATE;
        loop {
            if let Some(known) = self.verdicts.get(&key) {
                return known.clone();
            }
            match timeout_at(give_up, self.events.recv()).await {
                Ok(Some(event)) => self.keep(event),
                // The connection is older than the tap: nobody waits for it again.
                Ok(None) | Err(_) => {
                    self.insert(key, None);
                    return None;
                }
            }
        }
    }

    fn keep(&mut self, event: Event) {
        let is_inbound = event.direction() == agent::Direction::Inbound;
        let Some(pod) = event.pod else { return };
        let key = (pod.namespace, pod.name, is_inbound, event.source);
        let verdict = Verdict {
            verdict: event.verdict,
            original_destination: event.original_destination,
            new_destination: event.new_destination,
            command: event.command,
            pid: event.pid,
        };
        self.insert(key, Some(verdict));
    }

    fn insert(&mut self, key: Key, verdict: Option<Verdict>) {
        if self.verdicts.insert(key.clone(), verdict).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > KEPT {
            if let Some(oldest) = self.order.pop_front() {
                self.verdicts.remove(&oldest);
            }
        }
    }
}

impl Verdict {
    /// A line as those of requests, escaped.
    pub(super) fn line(&self, tapped: &TapEvent, colours: bool) -> String {
        let process = if self.pid == 0 { String::new() } else { format!(" process={}({})", self.command, self.pid) };
        let ends = format!(" original={} new={}{process}", self.original_destination, self.new_destination);
        let verdict = paint_if(colours, colour::verdict(&self.verdict), &self.verdict);
        format!("knl {} verdict={verdict}{}", printable::line(&common(tapped, false)), printable::line(&ends))
    }

    pub(super) fn json(&self, tapped: &TapEvent) -> Value {
        json!({
            "namespace": tapped.namespace, "pod": tapped.pod,
            "kernelEvent": {"id": tapped.id, "source": tapped.source, "verdict": self.verdict,
                "originalDestination": self.original_destination, "newDestination": self.new_destination,
                "command": self.command, "pid": self.pid},
        })
    }
}

/// A stream of each agent, by the agent's name in messages.
async fn streams(network: &PodNetwork, request: &WatchRequest) -> Vec<(String, Result<Streaming<Event>, String>)> {
    match network {
        PodNetwork::Sandbox(state) => {
            let name = format!("the agent of sandbox {}", state.config.name);
            let Some(socket) = &state.agent_socket else {
                return vec![(name, Err("the sandbox runs without one".to_owned()))];
            };
            let stream = match on_socket(socket).await {
                Ok(channel) => watch(channel, request).await,
                Err(error) => Err(error.to_string()),
            };
            vec![(name, stream)]
        }
        PodNetwork::Cluster(cluster) => {
            let agents = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
            let agents = match list(agents, &ListParams::default().labels(SELECTOR)).await {
                Ok(agents) => agents,
                Err(why) => return vec![(format!("the agents in namespace {}", cluster.namespace), Err(why))],
            };
            let ask = agents.iter().map(|pod| async move {
                let name = format!("the agent on {}", pods::node(pod));
                let channel = in_pod(cluster, &pod.namespace().unwrap_or_default(), &pod.name_any()).await;
                let stream = match channel {
                    Ok(channel) => watch(channel, request).await,
                    Err(why) => Err(why),
                };
                (name, stream)
            });
            join_all(ask).await
        }
    }
}

async fn watch(channel: Channel, request: &WatchRequest) -> Result<Streaming<Event>, String> {
    let stream = TraceClient::new(channel).watch(request.clone()).await;
    stream.map(tonic::Response::into_inner).map_err(|status| reason(&status))
}

async fn pass(agent: String, mut stream: Streaming<Event>, events: mpsc::Sender<Event>) {
    let why = loop {
        match stream.message().await {
            Ok(Some(event)) => {
                if events.send(event).await.is_err() {
                    return;
                }
            }
            Ok(None) => break "it ended the stream".to_owned(),
            Err(status) => break reason(&status),
        }
    };
    note(&format!("no more verdicts from {agent}: {why}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> (Kernel, mpsc::Sender<Event>) {
        let (events_tx, events) = mpsc::channel(QUEUE);
        let kernel = Kernel { events, verdicts: HashMap::new(), order: VecDeque::new(), _tasks: JoinSet::new() };
        (kernel, events_tx)
    }

    fn event(source: &str, direction: agent::Direction) -> Event {
        Event {
            pod: Some(agent::PodRef { namespace: "shop".to_owned(), name: "web-0".to_owned() }),
            direction: direction.into(),
            source: source.to_owned(),
            verdict: "redirect".to_owned(),
            original_destination: "10.0.0.2:80".to_owned(),
            new_destination: "127.0.0.1:4140".to_owned(),
            command: "curl".to_owned(),
            pid: 7,
            ..Event::default()
        }
    }

    fn tapped(source: &str) -> TapEvent {
        TapEvent {
            namespace: "shop".to_owned(),
            pod: "web-0".to_owned(),
            direction: viz::Direction::Outbound.into(),
            id: "0:1".to_owned(),
            source: source.to_owned(),
            ..TapEvent::default()
        }
    }

    #[tokio::test]
    async fn the_verdict_of_the_same_connection_is_found_even_if_it_is_late() {
        let (mut kernel, events) = kernel();
        events.send(event("10.0.0.1:4000", agent::Direction::Inbound)).await.unwrap();
        let late = async {
            tokio::task::yield_now().await;
            events.send(event("10.0.0.1:4000", agent::Direction::Outbound)).await.unwrap();
        };
        let tapped = tapped("10.0.0.1:4000");
        let (verdict, ()) = tokio::join!(kernel.verdict(&tapped), late);
        let line = verdict.unwrap().line(&tapped, false);
        assert!(line.starts_with("knl id=0:1 proxy=out src=10.0.0.1:4000"), "{line}");
        assert!(line.ends_with("verdict=redirect original=10.0.0.2:80 new=127.0.0.1:4140 process=curl(7)"), "{line}");
    }

    #[tokio::test]
    async fn a_connection_that_is_older_than_the_tap_has_none_and_is_waited_for_once() {
        let (mut kernel, events) = kernel();
        drop(events);
        assert_eq!(kernel.verdict(&tapped("10.0.0.1:1")).await, None);
        assert_eq!(kernel.verdicts.len(), 1);
        for port in 0..KEPT + 10 {
            kernel.keep(event(&format!("10.0.0.1:{port}"), agent::Direction::Inbound));
        }
        assert_eq!((kernel.verdicts.len(), kernel.order.len()), (KEPT, KEPT));
    }
}
