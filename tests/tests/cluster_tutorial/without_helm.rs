//! The mesh of README's commands, by `weft install` and without helm: pods of `weft inject` are in it, except on the
//! ports that its flags exclude, and `weft uninstall` leaves nothing.

use std::{io::Write as _, time::Duration};

use serde_json::{Value, json};
use weft_examples::client::Report;
use weft_tests::report::assert_vouched_for;

use crate::{
    nothing_is_left, readme, workloads,
    world::{COMPONENTS, MESH, World},
};

/// A namespace without the annotation that meshes it.
const NAMESPACE: &str = "by-hand";
/// The identity of its pods.
const IDENTITY: &str = "default.by-hand.serviceaccount.identity.linkerd.cluster.local";
const REQUESTS: u32 = 10;

/// The tutorial's mesh is gone, and the cluster is as it was.
pub(super) fn installs_injects_and_removes(world: &mut World) {
    world.cluster.kubectl(&["wait", "--for=delete", &format!("namespace/{MESH}"), "--timeout=180s"]).unwrap();
    readme::follow(world);

    world.cluster.kubectl(&["create", "namespace", NAMESPACE]).unwrap();
    start(world, "server", &["--manual"]);
    // Of the Service, and of its pods.
    start(world, "opaque", &["--manual", "--opaque-ports", &format!("80,{}", workloads::PORT)]);
    // The cluster's injector adds this one's.
    start(world, "client", &[]);
    start(world, "around", &["--manual", "--skip-outbound-ports", "80"]);
    for name in ["server", "opaque", "client", "around"] {
        world.cluster.rolled_out(NAMESPACE, &format!("deploy/{name}")).unwrap();
    }
    let report = requests(world, "client", "server");
    assert_vouched_for(&report, IDENTITY);
    // A port that the client's proxy does not get.
    let report = requests(world, "around", "server");
    assert!(report.by_client_id.is_empty(), "{report:?}");
    // Bytes of a port without protocol detection travel by mutual TLS, and no request is counted.
    let counted = || {
        let pod = world.cluster.pod(NAMESPACE, "app=client").unwrap();
        let metrics = world.proxy_metrics(NAMESPACE, &pod);
        let labels = [("direction", "outbound"), ("peer", "dst"), ("tls", "true")];
        (metrics.sum("tcp_open_total", &labels), metrics.sum("request_total", &[("direction", "outbound")]))
    };
    let (connections, counted_requests) = counted();
    let report = requests(world, "client", "opaque");
    assert!(report.by_client_id.is_empty(), "a proxy has read a request: {report:?}");
    let (more, still) = counted();
    assert!(more - connections >= f64::from(REQUESTS), "{connections}, then {more}");
    assert!((still - counted_requests).abs() < f64::EPSILON, "{counted_requests}, then {still}");

    let check = world.weft(&["check", "--proxy", "--namespace", NAMESPACE, "-o", "json"]).unwrap();
    let check: Value = serde_json::from_str(&check).unwrap();
    assert_eq!(check["success"], true, "{check:#}");
    upgraded(world);
    without_a_proxy(world, "around");
    readme::forget(world);
    let refused = world.weft(&["uninstall"]).unwrap_err().to_string();
    assert!(refused.contains("3 pods have a proxy"), "{refused}");
    // `weft uninstall` asks for pods alone: the rest of a namespace may go later.
    world.cluster.kubectl(&["-n", NAMESPACE, "delete", "deploy", "--all", "--cascade=foreground"]).unwrap();
    world.cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]).unwrap();
    world.remember_agents();
    world.cluster.delete(&world.weft(&["uninstall"]).unwrap()).unwrap();
    nothing_is_left(world);
}

/// `weft upgrade` with another setting of redirection restarts what reads it, and the running pods stay in the mesh.
/// What the next one leaves out is deleted by `weft prune`, and nothing else.
fn upgraded(world: &World) {
    let settings = "proxyInit.ignoreOutboundPorts=4567,enablePodDisruptionBudget=true";
    world.cluster.apply(&world.weft(&["upgrade", "--set", settings]).unwrap()).unwrap();
    world.cluster.rolled_out(MESH, "ds/weft-agent").unwrap();
    world.cluster.rolled_out(MESH, "deploy/linkerd-proxy-injector").unwrap();
    let values = world.cluster.kubectl(&["-n", MESH, "get", "configmap", "linkerd-config", "-o", "yaml"]).unwrap();
    assert!(values.contains(r#"ignoreOutboundPorts: "4567""#), "{values}");
    let report = requests(world, "client", "server");
    assert_vouched_for(&report, IDENTITY);
    assert_eq!(world.weft(&["prune"]).unwrap().trim(), "");

    let budgets = || {
        let names = world.cluster.kubectl(&["-n", MESH, "get", "poddisruptionbudgets", "-o", "name"]).unwrap();
        names.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(budgets().len(), COMPONENTS.len());
    let upgrade = world.weft(&["upgrade", "--set", "enablePodDisruptionBudget=false"]).unwrap();
    world.cluster.apply(&upgrade).unwrap();
    let pruned = world.weft(&["prune"]).unwrap();
    let kinds: Vec<_> = pruned.lines().filter_map(|line| line.strip_prefix("kind: ")).collect();
    assert_eq!(kinds, ["PodDisruptionBudget"; COMPONENTS.len()], "{pruned}");
    world.cluster.delete(&pruned).unwrap();
    assert_eq!(budgets(), Vec::<String>::new());
    assert_eq!(world.weft(&["prune"]).unwrap().trim(), "");
}

/// `weft uninject` takes the proxy off a workload.
fn without_a_proxy(world: &World, name: &str) {
    let deployment = world.cluster.kubectl(&["-n", NAMESPACE, "get", "deploy", name, "-o", "yaml"]).unwrap();
    let uninjected = world.weft(&["uninject", file_of(&deployment).path().to_str().unwrap()]).unwrap();
    world.cluster.apply(&uninjected).unwrap();
    world.cluster.rolled_out(NAMESPACE, &format!("deploy/{name}")).unwrap();
    let selector = format!("app={name}");
    world
        .cluster
        .until(Duration::from_secs(60), |cluster| {
            let pods = cluster.kubectl(&["-n", NAMESPACE, "get", "pods", "-l", &selector, "-o", "yaml"])?;
            anyhow::ensure!(!pods.contains("linkerd-proxy"), "{pods}");
            Ok(())
        })
        .unwrap();
}

/// Starts a workload with a proxy that `weft inject` adds, or asks for, and a Service in front of it.
fn start(world: &World, name: &str, flags: &[&str]) {
    let labels = json!({"app": name});
    let mut container = workloads::server();
    if ["client", "around"].contains(&name) {
        container = json!({"name": "client", "image": container["image"], "command": ["/weft-client", "wait"]});
    }
    let metadata = json!({"name": name, "namespace": NAMESPACE});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata,
        "spec": {"selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}}});
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata,
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": workloads::PORT}]}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service, deployment]});
    let manifest = file_of(&list.to_string());
    let injected = world.weft(&[&["inject", manifest.path().to_str().unwrap()], flags].concat()).unwrap();
    assert_eq!(injected.contains("linkerd-proxy"), flags.contains(&"--manual"), "{injected}");
    world.cluster.apply(&injected).unwrap();
}

/// Requests of a pod, each on its own connection.
fn requests(world: &World, from: &str, to: &str) -> Report {
    let pod = world.cluster.pod(NAMESPACE, &format!("app={from}")).unwrap();
    let target = format!("{to}.{NAMESPACE}:80");
    let count = REQUESTS.to_string();
    let arguments = ["http1", "--target", &target, "--count", &count, "--fresh"];
    // A rollout is done before every node's Services lead to its pods.
    let answered = world.cluster.until(Duration::from_secs(60), |cluster| {
        let report = cluster.client(NAMESPACE, &pod, &arguments)?;
        anyhow::ensure!(report.failures == 0, "{report:?}");
        Ok(report)
    });
    answered.unwrap()
}

fn file_of(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}
