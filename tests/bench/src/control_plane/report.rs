//! The results, as JSON and as tables. What could not be measured is absent.

mod table;

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    changes::Propagation,
    meter::{Liveness, Load},
    objects::Size,
};
use crate::{enrolment::Quantiles, machine::Machine};

/// All measurements of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What it ran on.
    pub machine: Machine,
    /// What there was.
    pub setup: Setup,
    /// The beginning; every run has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<Start>,
    /// Endpoints that came and went.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<Changing>,
    /// A rolling restart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Changing>,
    /// All clients came back at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reconnect: Option<Reconnect>,
    /// Some clients did not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stalled: Option<Stalled>,
    /// Some clients read a trickle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow: Option<Stalled>,
    /// Twice the Servers and Services.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doubled: Option<Doubled>,
}

/// Objects, clients and streams.
#[derive(Clone, Debug, Serialize)]
pub struct Setup {
    /// Objects in the API server.
    pub objects: Size,
    /// How long their creation took, seconds.
    pub created_in_seconds: f64,
    /// Simulated proxies.
    pub clients: u32,
    /// Those that share a connection to either service.
    pub clients_per_connection: u32,
    /// Targets of each.
    pub targets: u32,
    /// Streams to the destination service.
    pub destination_streams: u64,
    /// Streams to the policy service.
    pub policy_streams: u64,
}

/// How the control plane started and the clients connected.
#[derive(Clone, Debug, Serialize)]
pub struct Start {
    /// From its start until a process was ready, seconds.
    pub ready_seconds: BTreeMap<&'static str, f64>,
    /// The first answers.
    pub first_answers: FirstAnswers,
    /// Cost of the streams.
    pub opening: Opening,
    /// What the opening took.
    pub load: Load,
}

/// First answers of all streams that were opened at once.
#[derive(Clone, Debug, Serialize)]
pub struct FirstAnswers {
    /// Until the last one, seconds.
    pub all_seconds: f64,
    /// Until each, milliseconds, by method.
    pub milliseconds: BTreeMap<&'static str, Quantiles>,
    /// Connections and streams that had to be opened again meanwhile.
    pub retries: u64,
}

/// What opening streams costs.
#[derive(Clone, Debug, Serialize)]
pub struct Opening {
    /// By process.
    pub processes: Vec<ProcessOpening>,
}

/// What opening a process' streams costs it.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessOpening {
    /// The subcommand of the process.
    pub process: &'static str,
    /// Streams to it.
    pub streams: u64,
    /// CPU time until all were answered, microseconds for each.
    pub cpu_us_per_stream: f64,
    /// Growth of resident memory, bytes for each.
    pub resident_bytes_per_stream: f64,
}

/// Endpoints that changed while nothing else happened.
#[derive(Clone, Debug, Serialize)]
pub struct Changing {
    /// How the changes reached the clients.
    pub propagation: Propagation,
    /// What it took.
    pub load: Load,
}

/// All clients came back at once while endpoints changed.
#[derive(Clone, Debug, Serialize)]
pub struct Reconnect {
    /// The first answers.
    pub first_answers: FirstAnswers,
    /// How changes reached the clients that were back already, from the close of the connections until the last first
    /// answer. The first answers themselves do not count.
    pub meanwhile: Propagation,
    /// The same from seconds before until the end.
    pub around: Propagation,
    /// How the admin servers answered.
    pub live: Vec<Liveness>,
    /// What it took.
    pub load: Load,
}

/// Some clients stopped reading, or read slowly, while endpoints changed.
#[derive(Clone, Debug, Serialize)]
pub struct Stalled {
    /// Clients that did not read as the others did.
    pub clients: u32,
    /// Messages that reached them nevertheless: on their way when their windows closed, or in a trickle.
    pub messages_to_them: u64,
    /// How changes reached the others.
    pub others: Propagation,
    /// What it took; the growth of memory is the queues of the stalled streams.
    pub load: Load,
}

/// The same streams with twice the Servers and Services, by a new control plane.
#[derive(Clone, Debug, Serialize)]
pub struct Doubled {
    /// From its start until a process was ready, seconds.
    pub ready_seconds: BTreeMap<&'static str, f64>,
    /// With the Servers and Services of the run.
    pub once: Opening,
    /// With twice as many.
    pub twice: Opening,
    /// What the second opening took.
    pub load: Load,
}

impl Setup {
    /// As one line.
    #[must_use]
    pub fn describe(&self) -> String {
        let Size { pods, services, nodes, servers, policies } = self.objects;
        format!(
            "{pods} pods, {services} Services, {nodes} nodes, {servers} Servers and {policies} AuthorizationPolicies in \
             one namespace; {} clients of {} targets, {} on a connection: {} streams to destination, {} to policy",
            self.clients, self.targets, self.clients_per_connection, self.destination_streams, self.policy_streams
        )
    }
}
