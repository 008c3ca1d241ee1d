//! The status of an agent on this host: a sandbox's, or one behind a socket.

use std::path::Path;

use anyhow::Result;
use weft_proto::agent::{PodStatus, StatusResponse};
use weft_sandbox::state;

use super::{
    problems::{of_agents, of_pods},
    report::Report,
    rows::{PodRow, State, agent_row},
};
use crate::{agent, mesh::Fetched, problem::Problem};

/// The status of a sandbox's meshed pods, according to its agent.
pub(super) async fn of_sandbox(sandbox: &state::State, namespace: Option<&str>) -> Report {
    let answer = match &sandbox.agent_socket {
        Some(socket) => Some(ask(socket).await),
        None => None,
    };
    let wanted = |pod: &&state::PodState| pod.meshed && namespace.is_none_or(|namespace| pod.namespace == namespace);
    let rows = sandbox.pods.iter().filter(wanted).map(|pod| sandbox_row(pod, answer.as_ref())).collect();
    let mut report = report(answer.as_ref(), rows);
    if answer.is_none() {
        let interception = sandbox.config.interception;
        let text = format!("has no agent: it runs with --interception {interception}");
        report.problems.push(Problem::new(
            format!("Sandbox {}", sandbox.config.name),
            text,
            "run it with --interception ebpf",
        ));
    }
    for error in &sandbox.manifest_errors {
        report.problems.push(Problem::new("Manifest".to_owned(), error, "edit the file: the sandbox follows"));
    }
    report
}

/// The status of one agent, without a cluster to compare it with.
pub(super) async fn of_socket(socket: &Path, namespace: Option<&str>) -> Result<Report> {
    let status = agent::status(agent::on_socket(socket).await?).await.map_err(anyhow::Error::msg)?;
    let wanted = |pod: &&PodStatus| {
        namespace.is_none_or(|namespace| pod.pod.as_ref().is_some_and(|pod| pod.namespace == namespace))
    };
    let rows = status.pods.iter().filter(wanted).map(|pod| agents_row(pod, &status.node)).collect();
    Ok(report(Some(&Ok(status)), rows))
}

async fn ask(socket: &Path) -> Fetched<StatusResponse> {
    let channel = agent::on_socket(socket).await.map_err(|error| error.to_string())?;
    agent::status(channel).await
}

fn report(answer: Option<&Fetched<StatusResponse>>, rows: Vec<PodRow>) -> Report {
    let node = |answer: &Fetched<StatusResponse>| answer.as_ref().map(|status| status.node.clone()).unwrap_or_default();
    let agents: Vec<_> = answer.iter().map(|answer| agent_row(&node(answer), "", answer)).collect();
    let mut found = Vec::new();
    of_agents("", &agents, &mut found);
    of_pods(&rows, &mut found);
    Report { problems: found, control_plane: None, agents, pods: rows }
}

fn sandbox_row(pod: &state::PodState, answer: Option<&Fetched<StatusResponse>>) -> PodRow {
    let is_it = |status: &&PodStatus| {
        status.pod.as_ref().is_some_and(|known| known.namespace == pod.namespace && known.name == pod.name)
    };
    let known = answer.and_then(|answer| answer.as_ref().ok()).and_then(|status| status.pods.iter().find(is_it));
    let unknown = if matches!(answer, Some(Ok(_))) { State::Missing } else { State::Unknown };
    let row = PodRow::new((pod.namespace.clone(), pod.name.clone()), "", known, unknown);
    PodRow {
        // The sidecar's probe delays the pod, so a ready pod has a ready proxy.
        proxy_ready: pod.ready || pod.times.sidecar_ready_ms.is_some(),
        reason: if known.is_some() { row.reason } else { pod.message.clone() },
        ..row
    }
}

fn agents_row(pod: &PodStatus, node: &str) -> PodRow {
    let name = pod.pod.clone().map(|pod| (pod.namespace, pod.name)).unwrap_or_default();
    // An agent does not know probes; enrolment requires that the proxy listens.
    PodRow { proxy_ready: State::of(pod) == State::Enrolled, ..PodRow::new(name, node, Some(pod), State::Unknown) }
}
