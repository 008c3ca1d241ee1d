//! The agent without Weft's control plane: a pod as Linkerd's injector makes it with `cniEnabled` gets past its network
//! validator, an application of such pods comes and leaves under load, and a node has pods of several control planes.

use std::{process::Stdio, time::Duration};

use anyhow::ensure;
use serde_json::{Value, json};

use crate::{control_planes, migration::Migration, requirement::Requirement, world::World};

const CHART: &str = "charts/weft-agent";
const NAMESPACE: &str = "linkerd-cni";
const APPLICATIONS: &str = "stock-linkerd";
/// An address that nothing answers, as the validator's.
const NOWHERE: &str = "1.1.1.1:20001";
/// Time limit for what an agent does, on a slow machine.
const AGENT: Duration = Duration::from_secs(60);

pub(super) fn network_validator_succeeds(world: &mut World) {
    let namespaces = [(NAMESPACE, "privileged"), (APPLICATIONS, "baseline"), (control_planes::NAMESPACE, "privileged")];
    for (name, level) in namespaces {
        let labels = json!({"pod-security.kubernetes.io/enforce": level});
        let metadata = json!({"name": name, "labels": labels});
        world
            .cluster
            .apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}).to_string())
            .unwrap();
    }
    let runs_programs = Requirement::LocalNodes.allows("a migration, several control planes", &world.cluster);
    let mut migration = runs_programs.then(|| Migration::start(world));
    if let Some(migration) = &mut migration {
        migration.begin("the agent is installed");
    }
    let named = ["--set", control_planes::VALUE];
    let (installed, said) =
        world.helm(&[&["install", "weft-agent", CHART, "--namespace", NAMESPACE], &named[..]].concat());
    assert!(installed, "{said}");
    world.cluster.rolled_out(NAMESPACE, "ds/linkerd-cni").unwrap();

    if migration.is_some() {
        control_planes::start(world, NAMESPACE);
    }
    world.cluster.apply(&pod().to_string()).unwrap();
    let ready = ["wait", "pod/web", "--for=condition=Ready", "--timeout=90s"];
    world.cluster.kubectl(&[&["-n", APPLICATIONS], &ready[..]].concat()).unwrap();
    let failures = |world: &World| {
        let report = world.cluster.client(APPLICATIONS, "web", &["http1", "--target", NOWHERE, "--timeout", "1s"])?;
        anyhow::Ok(report.failures)
    };
    assert_eq!(failures(world).unwrap(), 0);
    is_shown(world);

    if let Some(migration) = &mut migration {
        control_planes::named_ones_are_enrolled_and_others_left_alone(world, NAMESPACE);
        migration.there_and_back(world);
        migration.begin("the agent is removed");
    }
    let (uninstalled, said) = world.helm(&["uninstall", "weft-agent", "--namespace", NAMESPACE, "--wait"]);
    assert!(uninstalled, "{said}");
    let unloaded = world.cluster.until(AGENT, |_| {
        ensure!(failures(world)? == 1, "connections are still redirected");
        Ok(())
    });
    unloaded.unwrap();
    if let Some(migration) = migration {
        migration.finish(world);
    }
    let namespaces = namespaces.map(|(name, _)| name);
    world.cluster.kubectl(&[&["delete", "namespace", "--wait=false"], &namespaces[..]].concat()).unwrap();
}

/// `weft` finds the agent in its namespace.
fn is_shown(world: &World) {
    let of_pod = ["-L", NAMESPACE, "-n", APPLICATIONS, "-o", "json", "web"];
    let explained = world.weft(&[&["explain"], &of_pod[..], &[NOWHERE]].concat()).unwrap();
    let explained: Value = serde_json::from_str(&explained).unwrap();
    assert_eq!(explained["verdict"], "redirect", "{explained:#}");
    let status = world.weft(&["status", "-L", NAMESPACE, "-n", APPLICATIONS, "-o", "json"]).unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    let pods = status["pods"].as_array().unwrap();
    assert!(pods.iter().any(|pod| pod["name"] == "web" && pod["state"] == "enrolled"), "{status:#}");

    let mut trace = world.cluster.command("weft");
    trace.arg("trace").args(of_pod).args(["--count", "1", "--timeout", "60s"]).stdout(Stdio::piped());
    let mut trace = trace.spawn().unwrap();
    while trace.try_wait().unwrap().is_none() {
        let _ = world.cluster.client(APPLICATIONS, "web", &["http1", "--target", NOWHERE, "--timeout", "1s"]);
    }
    let event: Value = serde_json::from_slice(&trace.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(event["verdict"], "redirect", "{event:#}");
}

/// The order of containers is Linkerd's. Its validator listens on the proxy's port itself, which takes a container of
/// its own here.
fn pod() -> Value {
    let container = |name: &str, user: u32, command: &[&str]| {
        json!({
            "name": name, "image": "localhost/weft-examples:0.1.0", "imagePullPolicy": "IfNotPresent",
            "command": command, "securityContext": {"runAsUser": user, "runAsGroup": user},
        })
    };
    let mut listener = container("listener", 65534, &["/weft-echo", "--http", "4140"]);
    listener["restartPolicy"] = json!("Always");
    let validate = ["/weft-client", "http1", "--target", NOWHERE, "--timeout", "10s"];
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web", "namespace": APPLICATIONS, "annotations": {"linkerd.io/inject": "enabled"},
            "labels": {"linkerd.io/control-plane-ns": "linkerd", "linkerd.io/workload-ns": APPLICATIONS},
        },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "initContainers": [listener, container("linkerd-network-validator", 65534, &validate)],
            "containers": [
                container("linkerd-proxy", 2102, &["/weft-client", "wait"]),
                container("client", 65534, &["/weft-client", "wait"]),
            ],
        },
    })
}
