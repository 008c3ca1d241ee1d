//! The way back to an earlier version, and the upgrade from it, while requests run.
//!
//! `cargo xtask upgrade` builds the earlier version, gives the nodes its images and runs this check.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use serde_json::json;
use weft_tests::report::assert_vouched_for;

use crate::{
    under_load::{restart_application, under_load},
    workloads::{POD, requests, resources, restricted},
    world::{AGENTS, CHART, CLIENT_ID, MESH, SHOP, World},
};

/// Names the directory with the images and charts of the earlier version.
const ARTEFACTS: &str = "WEFT_TEST_PREVIOUS";
/// The registry of its images.
const EARLIER: &str = "previous.weft.test/";
/// The registry of this version's images, as the charts of the checkout name it.
const THIS: &str = "localhost/";
/// Selects every pod of the mesh.
const COMPONENT: &str = "linkerd.io/control-plane-component";

/// The directory with the earlier version, if there is one.
pub(super) fn artefacts() -> Option<PathBuf> {
    env::var_os(ARTEFACTS).map(PathBuf::from)
}

/// Control plane and agents change first and applications later, so that proxies of one version meet the control plane,
/// the agents and the proxies of the other one, in both directions. The CRDs stay new, as docs/installation.md says.
pub(super) fn there_and_back(world: &mut World) {
    let directory = artefacts().unwrap();
    println!("    the earlier version is that in {}", directory.display());
    let chart = chart_in(&directory.join("charts"));
    let replicas = world.upgrade_once();
    under_load(world, |world| {
        let client = world.client(SHOP);
        let client = client.as_str();
        move_to(world, &chart, EARLIER, replicas);
        start_pod(world, "earlier", EARLIER);
        assert_encrypted(world, &[client, "earlier"]);
        restart(world, EARLIER);
        assert_encrypted(world, &[client, "earlier"]);

        move_to(world, CHART, THIS, replicas);
        start_pod(world, "upgraded", THIS);
        assert_encrypted(world, &[client, "earlier", "upgraded"]);
        restart(world, THIS);
        assert_encrypted(world, &[client, "earlier", "upgraded"]);
    });
    // Until they are gone: a proxy of another version than the control plane's is a warning.
    world.cluster.kubectl(&["-n", SHOP, "delete", "pod", "earlier", "upgraded"]).unwrap();
    world.weft(&["check", "--proxy"]).unwrap();
}

/// The packaged chart of the control plane in a directory.
fn chart_in(directory: &Path) -> String {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("list {}: {error}", directory.display()));
    let paths = entries.map(|entry| entry.unwrap().path().display().to_string());
    let is_it = |path: &String| path.contains("/weft-control-plane-") && path.ends_with(".tgz");
    let charts: Vec<_> = paths.filter(is_it).collect();
    let [chart] = charts.as_slice() else { panic!("not one chart of the control plane: {charts:?}") };
    chart.clone()
}

/// Moves control plane and agents to a chart whose images are in this registry.
fn move_to(world: &World, chart: &str, registry: &str, replicas: usize) {
    let started = Instant::now();
    world.move_to(chart, replicas);
    for (selector, program) in [(AGENTS, "weft-agent"), (COMPONENT, "weft-control-plane"), (COMPONENT, "weft-proxy")] {
        assert_runs(world, MESH, selector, program, registry);
    }
    println!("    moved to {chart} in {} s", started.elapsed().as_secs());
}

/// Gives the application the proxies of the version that the mesh has.
fn restart(world: &World, registry: &str) {
    restart_application(world);
    assert_runs(world, SHOP, "app in (api, web)", "weft-proxy", registry);
}

/// Starts a pod with a client, which gets the proxy of the version that the mesh has.
fn start_pod(world: &World, name: &str, registry: &str) {
    let container = json!({"name": "client", "image": "localhost/weft-examples:0.1.0",
        "command": ["/weft-client", "wait"], "resources": resources()});
    let mut spec =
        json!({"serviceAccountName": "client", "terminationGracePeriodSeconds": 1, "containers": [container]});
    restricted(&mut spec);
    let metadata = json!({"name": name, "namespace": SHOP, "labels": {"app": name}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
    world.cluster.apply(&pod.to_string()).unwrap();
    let (object, within) = (format!("pod/{name}"), format!("--timeout={}s", POD.as_secs()));
    world.cluster.kubectl(&["-n", SHOP, "wait", &object, "--for=condition=Ready", &within]).unwrap();
    assert_runs(world, SHOP, &format!("app={name}"), "weft-proxy", registry);
}

/// Every request of these clients is answered and travels by mutual TLS, each on a connection of its own.
fn assert_encrypted(world: &World, clients: &[&str]) {
    for client in clients {
        let report = requests(world, SHOP, client, "web.shop:80", 20).unwrap();
        assert_vouched_for(&report, CLIENT_ID);
    }
}

/// The pods, terminating ones left out, have a program, and its image is from this registry in all of them.
#[track_caller]
fn assert_runs(world: &World, namespace: &str, selector: &str, program: &str, registry: &str) {
    let list = world.cluster.get(&["-n", namespace, "pods", "-l", selector]).unwrap();
    let pods = list["items"].as_array().unwrap().iter();
    let containers = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null()).flat_map(|pod| {
        let kinds = ["initContainers", "containers"];
        kinds.into_iter().filter_map(move |kind| pod["spec"][kind].as_array()).flatten()
    });
    let images: BTreeSet<_> = containers.filter_map(|container| container["image"].as_str()).collect();
    let (right, wrong): (Vec<_>, Vec<_>) = images
        .into_iter()
        .filter(|image| image.contains(&format!("/{program}:")))
        .partition(|image| image.starts_with(registry));
    assert!(wrong.is_empty() && !right.is_empty(), "{selector} in {namespace}: {right:?} and {wrong:?}");
}
