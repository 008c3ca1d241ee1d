//! The charts, rendered by the real helm, against a real API server.
//!
//! `values` is about what the control plane's chart accepts and refuses, `rendering` about its objects, `installation`
//! about a cluster that it is installed in, `agent_only` about the chart of the agent alone.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent_only;
#[path = "../shared/certificates.rs"]
mod certificates;
mod installation;
mod rendering;
mod values;

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Output},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde_json::{Value, json};
use weft_k8s_api::{
    inject::{Decision, RedirectionDefaults, inject},
    ports::PortSet,
    values::Values,
};
use weft_tests::{cluster::Cluster, output::succeeded};

use certificates::generate_certificates;

const CONTROL_PLANE: &str = "charts/weft-control-plane";
const CRDS: &str = "charts/weft-crds";
const MESH: &str = "linkerd";
/// Held by the test that has something installed: a cluster takes one agent.
static INSTALLED: Mutex<()> = Mutex::new(());

fn helm(arguments: &[&str], more: &[String]) -> Output {
    let mut helm = Command::new("helm");
    helm.args(arguments).args(more).current_dir(Cluster::repository()).output().unwrap()
}

fn render(more: &[String]) -> String {
    succeeded(&helm(&["template", "weft", CONTROL_PLANE, "--namespace", MESH], more))
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name} is rendered"))
}
