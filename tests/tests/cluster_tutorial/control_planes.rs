//! Pods of three control planes on one node: the agent alone enrols those of the two that the chart's value names,
//! each by its own rules, and leaves those of the third to their rules of `linkerd-init`, although their proxy has the
//! same user and port.
//!
//! Requires nodes on this host: the proxies are programs of this host, which note what they get.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use weft_examples::client::Probe;
use weft_passthrough::{Connection, Direction};

use crate::{
    migration::{self, Redirected, connections_of, container},
    world::World,
};

pub(super) const NAMESPACE: &str = "control-planes";
/// The setting of the chart.
pub(super) const VALUE: &str = r"controllerNamespace=linkerd\,linkerd-edge";
/// The pods, the namespaces of their control planes, and what redirects them.
const PODS: [(&str, &str, Redirected); 3] = [
    ("stable", "linkerd", Redirected::ByTheNode),
    (EDGE, "linkerd-edge", Redirected::ByTheNode),
    (OTHER, "linkerd-other", Redirected::ByIptables),
];
/// The pod that skips [`SKIPPED`].
const EDGE: &str = "edge";
/// The pod whose control plane the value does not name.
const OTHER: &str = "other";
/// The port that one pod skips in both directions.
const SKIPPED: u16 = 9000;
/// Time limit for what agents and proxies do, on a slow machine.
const WITHIN: Duration = Duration::from_secs(60);

/// A connection between applications, and which proxies get it.
#[derive(Clone, Copy, Debug)]
struct Route {
    from: &'static str,
    to: &'static str,
    port: u16,
    /// Whether the client's own proxy gets it.
    outbound: bool,
    /// At which port it arrives at the server's proxy; `None` if it does not. Only REDIRECT changes the port.
    inbound: Option<u16>,
}

/// In this order each proxy gets a connection after those that it must not get.
const ROUTES: [Route; 8] = [
    // The rules of linkerd-init skip this port outbound, and the chart's defaults inbound.
    Route { from: OTHER, to: "stable", port: 4567, outbound: false, inbound: None },
    // To the pod's own address, which the kernel does not know of a pod that it enrolled by itself.
    Route { from: OTHER, to: OTHER, port: 8080, outbound: false, inbound: None },
    Route { from: OTHER, to: "stable", port: 8080, outbound: true, inbound: Some(8080) },
    Route { from: EDGE, to: "stable", port: SKIPPED, outbound: false, inbound: Some(SKIPPED) },
    Route { from: EDGE, to: "stable", port: 8080, outbound: true, inbound: Some(8080) },
    Route { from: "stable", to: EDGE, port: SKIPPED, outbound: true, inbound: None },
    Route { from: "stable", to: EDGE, port: 8080, outbound: true, inbound: Some(8080) },
    Route { from: "stable", to: OTHER, port: 8080, outbound: true, inbound: Some(4143) },
];

/// Starts the pods on the node of one of the agents, which are in namespace `agents`.
pub(super) fn start(world: &World, agents: &str) {
    let agents = world.cluster.get(&["-n", agents, "pods"]).unwrap();
    let node = &agents["items"][0]["spec"]["nodeName"];
    let skipped = SKIPPED.to_string();
    let pods = PODS.map(|(name, control_plane, redirected)| {
        let server = ["/weft-echo", "--http", "8080", "--raw", "4567", "--banner", &skipped];
        let client = container("client", 65534, &["/weft-client", "wait"]);
        let mut spec = migration::pod(redirected, &[client, container("server", 65534, &server)]);
        spec["nodeName"] = node.clone();
        let mut annotations = json!({"linkerd.io/inject": "enabled"});
        if name == EDGE {
            for direction in ["inbound", "outbound"] {
                annotations[format!("config.linkerd.io/skip-{direction}-ports")] = json!(skipped);
            }
        }
        json!({"apiVersion": "v1", "kind": "Pod", "spec": spec, "metadata": {
            "name": name, "namespace": NAMESPACE, "annotations": annotations,
            "labels": {"linkerd.io/control-plane-ns": control_plane, "linkerd.io/workload-ns": NAMESPACE},
        }})
    });
    world.cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string()).unwrap();
}

pub(super) fn named_ones_are_enrolled_and_others_left_alone(world: &World, agents: &str) {
    // A ready pod's proxy listens: what the kernel does by itself then, it has done.
    let ready = ["wait", "pods", "--all", "--for=condition=Ready", "--timeout=90s"];
    world.cluster.kubectl(&[&["-n", NAMESPACE], &ready[..]].concat()).unwrap();
    statuses_say_so(world, agents);
    let addresses = addresses(world);
    let probes = ROUTES.map(|Route { from, to, port, .. }| {
        let target = format!("{}:{port}", addresses[to]);
        let exec = ["-n", NAMESPACE, "exec", from, "-c", "client", "--"];
        let probe = ["/weft-client", "probe", "--target", &target];
        let said = world.cluster.kubectl(&[&exec[..], &probe].concat()).unwrap();
        let probe: Probe = serde_json::from_str(&said).unwrap();
        // What the kernel enrolled by itself would have a loopback source.
        assert_eq!(address(&probe.local).ip().to_string(), addresses[from], "{from} to {to}:{port}: {probe:?}");
        probe
    });
    let seen = world.cluster.until(WITHIN, |_| {
        let of_pods = PODS.map(|(name, ..)| (name, connections_of(world, NAMESPACE, name)));
        let of_pods = BTreeMap::from(of_pods);
        for (route, probe) in ROUTES.iter().zip(&probes) {
            let outbound = of_pods[route.from].iter().any(|got| is_outbound(got, probe));
            let client = &addresses[route.from];
            let inbound = of_pods[route.to].iter().find(|got| is_inbound(got, probe, client));
            let found = (outbound, inbound.map(|got| address(&got.local).port()));
            ensure!(found == (route.outbound, route.inbound), "{route:?}: {found:?}, {probe:?}, {of_pods:#?}");
        }
        Ok(())
    });
    seen.unwrap();
}

/// `weft status` and `weft explain` tell the pods apart, and say why one is left alone.
fn statuses_say_so(world: &World, agents: &str) {
    let of_pods = ["-L", agents, "-n", NAMESPACE, "-o", "json"];
    let status = world.cluster.until(WITHIN, |_| {
        let status = world.weft(&[&["status"], &of_pods[..]].concat())?;
        let status: Value = serde_json::from_str(&status).context("read what weft printed")?;
        for (name, ..) in PODS.iter().filter(|(name, ..)| *name != OTHER) {
            let row = row(&status, name);
            ensure!(row["state"] == "enrolled" && row["listening"] == true, "{name}: {status:#}");
        }
        Ok(status)
    });
    let status = status.unwrap();
    let other = row(&status, OTHER);
    let reason = other["reason"].as_str().unwrap_or_default();
    let is_explained = reason.contains("linkerd-other") && reason.contains("controllerNamespace");
    assert!(other["state"] == "unserved" && is_explained, "{other:#}");
    let problems = status["problems"].to_string();
    assert!(!problems.contains(&format!("{NAMESPACE}/{OTHER}")), "{problems}");
    let nowhere = format!("1.1.1.1:{SKIPPED}");
    for (pod, verdict) in [("stable", "redirect"), (EDGE, "pass_skip_port"), (OTHER, "pass_not_meshed")] {
        let explained = world.weft(&[&["explain"], &of_pods[..], &[pod, &nowhere]].concat()).unwrap();
        let explained: Value = serde_json::from_str(&explained).unwrap();
        assert_eq!(explained["verdict"], verdict, "{pod}: {explained:#}");
    }
}

fn row<'a>(status: &'a Value, pod: &str) -> &'a Value {
    let mut rows = status["pods"].as_array().into_iter().flatten();
    rows.find(|row| row["name"] == pod).unwrap_or(&Value::Null)
}

/// The addresses of the pods, by their names.
fn addresses(world: &World) -> BTreeMap<String, String> {
    let list = world.cluster.get(&["-n", NAMESPACE, "pods"]).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pods = list["items"].as_array().into_iter().flatten();
    pods.map(|pod| (text(&pod["metadata"]["name"]), text(&pod["status"]["podIP"]))).collect()
}

/// Whether a proxy got this connection of its own application.
fn is_outbound(got: &Connection, probe: &Probe) -> bool {
    got.direction == Direction::Outbound && got.peer == probe.local
}

/// Whether a proxy got this connection from the pod of the client: from its application, or from its proxy.
fn is_inbound(got: &Connection, probe: &Probe, client: &str) -> bool {
    let is_to_it = got.original.as_ref().is_ok_and(|original| *original == probe.dialled);
    got.direction == Direction::Inbound && is_to_it && address(&got.peer).ip().to_string() == client
}

fn address(text: &str) -> SocketAddr {
    text.parse::<SocketAddr>().unwrap_or_else(|error| panic!("{text}: {error}"))
}
