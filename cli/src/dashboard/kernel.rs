//! Verdicts of one pod's connections for the dashboard, as `weft trace` gets them: with the rights of the person.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use futures::{Stream, StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use tonic::transport::Channel;
use weft_proto::agent::{Direction, Event, WatchRequest, trace_client::TraceClient};

use crate::{
    agent, explain,
    resource::{Resource, Selection},
    target::Target,
};

/// Deadline for connecting to the agent of the pod's node.
const CONNECT: Duration = Duration::from_secs(15);

/// Whose verdicts.
#[derive(Debug, Deserialize)]
pub(super) struct Question {
    namespace: String,
    pod: String,
}

/// What the page shows.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", untagged)]
pub(super) enum KernelEvent {
    /// The agent listens: what comes from now on is shown.
    Connected {
        connected: bool,
    },
    Verdict(Verdict),
    /// Why there are no more.
    Problem {
        problem: String,
    },
}

/// A decision.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Verdict {
    time_unix_ms: u64,
    direction: &'static str,
    verdict: String,
    /// Empty inbound.
    command: String,
    pid: u32,
    source: String,
    original_destination: String,
    /// Empty if the connection was refused.
    new_destination: String,
    /// Events that a full buffer lost before this one.
    dropped_before: u64,
}

/// The pod's verdicts from now on. A failure is the last event. `place` is given back when the stream is dropped.
pub(super) fn watch(
    question: Question,
    target: Target,
    place: OwnedSemaphorePermit,
) -> impl Stream<Item = KernelEvent> + Send + 'static {
    let events = async move {
        let connected = tokio::time::timeout(CONNECT, open(&question, target)).await;
        connected.unwrap_or_else(|_| Err(anyhow!("the agent of its node did not answer within {}s", CONNECT.as_secs())))
    };
    let all = stream::once(events).flat_map(|opened| match opened {
        Err(error) => stream::iter([KernelEvent::Problem { problem: format!("{error:#}") }]).boxed(),
        Ok(events) => {
            let events = events.map(|event| match event {
                Ok(event) => KernelEvent::Verdict(verdict(event)),
                Err(status) => KernelEvent::Problem { problem: agent::reason(&status) },
            });
            stream::iter([KernelEvent::Connected { connected: true }]).chain(events).boxed()
        }
    });
    all.inspect(move |_| {
        let _held = &place;
    })
}

async fn open(question: &Question, target: Target) -> Result<tonic::Streaming<Event>> {
    let request =
        WatchRequest { namespace: question.namespace.clone(), pod: question.pod.clone(), ..WatchRequest::default() };
    let channel = agent_of(question, target).await?;
    let events = TraceClient::new(channel).watch(request).await;
    Ok(events.map_err(|status| anyhow!("the agent refused: {}", agent::reason(&status)))?.into_inner())
}

async fn agent_of(question: &Question, target: Target) -> Result<Channel> {
    match target {
        Target::Cluster(cluster) => {
            let named = Some(Resource::pod(question.pod.clone()));
            let selection = Selection::in_cluster(named, Some(&question.namespace), &cluster).await?;
            let (_, node, _) = explain::pod_in_cluster(&cluster, &selection).await?;
            explain::on_node(&cluster, &node).await
        }
        Target::Sandbox(state) => match &state.agent_socket {
            Some(socket) => agent::on_socket(socket).await,
            None => bail!("the sandbox has no agent: it runs with --interception {}", state.config.interception),
        },
        Target::Socket(socket) => agent::on_socket(&socket).await,
    }
}

fn verdict(event: Event) -> Verdict {
    let direction = match event.direction() {
        Direction::Inbound => "inbound",
        Direction::Outbound | Direction::Unspecified => "outbound",
    };
    Verdict {
        time_unix_ms: event.time_unix_ns / 1_000_000,
        direction,
        verdict: event.verdict,
        command: event.command,
        pid: event.pid,
        source: event.source,
        original_destination: event.original_destination,
        new_destination: event.new_destination,
        dropped_before: event.dropped_before,
    }
}
