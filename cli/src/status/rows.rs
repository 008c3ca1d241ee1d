//! One row for each agent and each pod: the agent's information, combined with that of Kubernetes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde::Serialize;
use weft_k8s_api::labels;
use weft_proto::agent::{LogLine, PodState, PodStatus, StatusResponse};

use crate::mesh::{Agent, Fetched, Mesh, pods};

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct AgentRow {
    /// Empty outside a cluster.
    pub(super) node: String,
    pub(super) pod: String,
    pub(super) version: String,
    /// Digest of the loaded programs.
    pub(super) programs: String,
    pub(super) attached_to: String,
    pub(super) attached_because: String,
    pub(super) enrolled: usize,
    pub(super) pending: usize,
    pub(super) refused: usize,
    pub(super) events_dropped: u64,
    pub(super) flow_misses: u64,
    pub(super) bind_failures: u64,
    pub(super) listeners_lost: u64,
    pub(super) admissions_refused: u64,
    /// All redirection of the node is switched off.
    pub(super) bypassed: bool,
    /// Its latest warnings and errors, the oldest first.
    pub(super) last_errors: Vec<LogRow>,
    /// Why it does not answer; `None` if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct LogRow {
    pub(super) at_unix_ms: u64,
    pub(super) level: String,
    pub(super) message: String,
    pub(super) times: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct PodRow {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) node: String,
    pub(super) state: State,
    pub(super) outbound: bool,
    pub(super) inbound: bool,
    /// Its owner switched its redirection off.
    pub(super) bypassed: bool,
    /// Its proxy is recognised by its cgroup alone.
    pub(super) strict: bool,
    /// Whether the agent knows a listener of its proxy for inbound connections.
    pub(super) listening: bool,
    /// Number of changes of its rules; 0 if it has none.
    pub(super) rules_generation: u64,
    pub(super) proxy_ready: bool,
    /// Empty if the image has no version.
    pub(super) proxy_version: String,
    /// Why it is not enrolled; empty if it is.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) reason: String,
}

impl PodRow {
    /// A pod as its agent describes it, without its proxy. One that no agent describes is in the state `undescribed`.
    pub(super) fn new(
        (namespace, name): (String, String),
        node: &str,
        described: Option<&PodStatus>,
        undescribed: State,
    ) -> Self {
        Self {
            namespace,
            name,
            node: node.to_owned(),
            state: described.map_or(undescribed, State::of),
            outbound: described.is_some_and(|pod| pod.outbound),
            inbound: described.is_some_and(|pod| pod.inbound),
            bypassed: described.is_some_and(|pod| pod.bypassed),
            strict: described.is_some_and(|pod| pod.strict),
            listening: described.is_some_and(|pod| pod.listening),
            rules_generation: described.map_or(0, |pod| pod.generation),
            proxy_ready: false,
            proxy_version: String::new(),
            reason: described.map(|pod| pod.reason.clone()).unwrap_or_default(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Enrolled,
    Pending,
    Refused,
    Leaving,
    /// Its node's agent does not know it.
    Missing,
    /// There is no agent that could know it.
    Unknown,
    /// The agents do not enrol pods of its control plane.
    Unserved,
}

impl State {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Enrolled => "enrolled",
            Self::Pending => "pending",
            Self::Refused => "refused",
            Self::Leaving => "leaving",
            Self::Missing => "missing",
            Self::Unknown => "unknown",
            Self::Unserved => "unserved",
        }
    }

    pub(super) fn of(pod: &PodStatus) -> Self {
        match pod.state() {
            PodState::Enrolled => Self::Enrolled,
            PodState::Pending => Self::Pending,
            PodState::Refused => Self::Refused,
            PodState::Leaving => Self::Leaving,
            // From an older agent without states: the directions determine it.
            PodState::Unspecified if pod.outbound && pod.inbound => Self::Enrolled,
            PodState::Unspecified => Self::Pending,
        }
    }
}

/// One row for each pod with a proxy, in the order of their names.
pub(super) fn pod_rows(mesh: &Mesh) -> Vec<PodRow> {
    let (enrolments, enrols) = (Enrolments::of(&mesh.agents), mesh.enrols());
    let here = |pod: &&Pod| !pods::is_over(pod);
    let row = |pod: &Pod| pod_row(pod, &enrolments, enrols(pod));
    let mut rows: Vec<_> = mesh.meshed.iter().flatten().filter(here).map(row).collect();
    rows.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    rows
}

pub(super) fn agent_row(node: &str, pod: &str, answer: &Fetched<StatusResponse>) -> AgentRow {
    let row = AgentRow { node: node.to_owned(), pod: pod.to_owned(), ..AgentRow::default() };
    match answer {
        Err(error) => AgentRow { error: Some(error.clone()), ..row },
        Ok(status) => {
            let count = |state| status.pods.iter().filter(|pod| State::of(pod) == state).count();
            AgentRow {
                version: status.version.clone(),
                programs: status.programs.clone(),
                attached_to: status.cgroup.clone(),
                attached_because: status.cgroup_reason.clone(),
                enrolled: count(State::Enrolled) + count(State::Leaving),
                pending: count(State::Pending),
                refused: count(State::Refused),
                events_dropped: status.events_dropped,
                flow_misses: status.flow_misses,
                bind_failures: status.bind_failures,
                listeners_lost: status.listeners_lost,
                admissions_refused: status.admissions_refused,
                bypassed: status.bypassed,
                last_errors: status.last_errors.iter().map(LogRow::of).collect(),
                ..row
            }
        }
    }
}

impl LogRow {
    fn of(line: &LogLine) -> Self {
        let LogLine { at_unix_ms, level, text, times } = line.clone();
        Self { at_unix_ms, level, message: text, times }
    }
}

pub(super) fn agent_of_cluster(agent: &Agent) -> AgentRow {
    agent_row(agent.node(), &agent.pod.name_any(), &agent.answer)
}

/// The agents' information about pods, by the pods' full names; and the nodes whose agents answer.
struct Enrolments<'a> {
    pods: BTreeMap<(&'a str, &'a str), &'a PodStatus>,
    nodes: Vec<&'a str>,
}

impl<'a> Enrolments<'a> {
    fn of(agents: &'a [Agent]) -> Self {
        let answers = || agents.iter().filter_map(|agent| Some((agent, agent.answer.as_ref().ok()?)));
        let of_pod = |status: &'a PodStatus| {
            let pod = status.pod.as_ref()?;
            Some(((pod.namespace.as_str(), pod.name.as_str()), status))
        };
        Self {
            pods: answers().flat_map(|(_, status)| status.pods.iter().filter_map(of_pod)).collect(),
            nodes: answers().map(|(agent, _)| agent.node()).collect(),
        }
    }
}

fn pod_row(pod: &Pod, enrolments: &Enrolments<'_>, is_wanted: bool) -> PodRow {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let known = enrolments.pods.get(&(namespace.as_str(), name.as_str())).copied();
    let node = pods::node(pod);
    let unknown = match enrolments.nodes.contains(&node) {
        _ if !is_wanted => State::Unserved,
        true => State::Missing,
        false => State::Unknown,
    };
    let row = PodRow::new((namespace, name), node, known, unknown);
    let control_plane = pod.labels().get(labels::CONTROL_PLANE_NS).map_or("", String::as_str);
    PodRow {
        reason: match row.state {
            State::Unserved => {
                format!("its control plane, of namespace {control_plane}, is not one of controllerNamespace")
            }
            _ => row.reason,
        },
        proxy_ready: pods::proxy_status(pod).is_some_and(|status| status.ready),
        proxy_version: pods::proxy_container(pod)
            .and_then(|proxy| proxy.image.as_deref())
            .map(|image| pods::version(image).to_owned())
            .unwrap_or_default(),
        ..row
    }
}
