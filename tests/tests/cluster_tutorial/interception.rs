//! The kernel's redirection of pods, seen from the cluster: explained, strict, bypassed, and without an agent.

use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;
use weft_examples::client::Report;
use weft_tests::report::assert_vouched_for;

use crate::world::{CLIENT_ID, SHOP, World};

/// Time limit for a container to start and end, on a slow machine.
const CONTAINER: Duration = Duration::from_secs(90);

pub(super) fn explained(world: &mut World) {
    let client = world.client(SHOP);
    let explain = |arguments: &[&str]| -> Value {
        let text = world.weft(&[&["explain", "-n", SHOP, "-o", "json", &client], arguments].concat()).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let of_workload = world.weft(&["explain", "-n", SHOP, "deploy/client", "to", "web:80"]).unwrap();
    assert!(of_workload.contains(&client) && of_workload.contains("redirect -> 127.0.0.1:4140"), "{of_workload}");
    let service = explain(&["to", "web.shop:80"]);
    assert_eq!((&service["verdict"], &service["new_destination"]), (&"redirect".into(), &"127.0.0.1:4140".into()));
    let endpoints = service["endpoints"].as_array().unwrap();
    let is_meshed = |endpoint: &Value| endpoint["transport"] == "mutual_tls" && endpoint["hint"] == "http2";
    assert!(!endpoints.is_empty() && endpoints.iter().all(is_meshed), "{service:#}");
    assert!(of_workload.contains("mutual TLS with"), "{of_workload}");
    // The API server is outside the mesh.
    let api = explain(&["to", "kubernetes.default:443"]);
    assert_eq!(api["endpoints"][0]["transport"], "plaintext", "{api:#}");
    assert_eq!(explain(&["to", "web.shop:80", "--as-proxy"])["verdict"], "pass_proxy");
    assert_eq!(explain(&["127.0.0.1:9999"])["verdict"], "pass_loopback");
    assert_eq!(explain(&["10.9.0.7:53", "--udp"])["verdict"], "pass_not_tcp");
    assert_eq!(explain(&["--inbound", "8080"])["verdict"], "redirect");
    let admin = explain(&["--inbound", "4191"]);
    assert_eq!(admin["verdict"], "pass_skip_port");
    assert!(admin["reason"].as_str().is_some_and(|reason| reason.contains("4191")), "{admin:#}");
    let stranger = world.client("outside");
    let text = world.weft(&["explain", "-n", "outside", "-o", "json", &stranger, "to", "web.shop:80"]).unwrap();
    let stranger: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(stranger["verdict"], "pass_not_meshed", "{stranger:#}");
}

/// An application with the proxy's user is redirected like any other in a strict pod, and refused in any other.
pub(super) fn strict(world: &mut World) {
    let lax = world.cluster.apply(&client_with_the_proxys_user("Pod", "as-proxy", "user")).unwrap_err();
    let refused = format!("{lax:#}");
    assert!(refused.contains("runAsUser is 2102") && refused.contains("weft.io/proxy-exemption: cgroup"), "{refused}");

    let name = "as-proxy-strict";
    world.cluster.apply(&client_with_the_proxys_user("Deployment", name, "cgroup")).unwrap();
    world.cluster.rolled_out(SHOP, &format!("deploy/{name}")).unwrap();
    let pod = world.cluster.pod(SHOP, &format!("app={name}")).unwrap();
    status_has(world, &pod, &[("state", "enrolled".into()), ("strict", true.into())]);
    let report = requests(world, &pod).unwrap();
    assert_vouched_for(&report, CLIENT_ID);
    world.cluster.kubectl(&["-n", SHOP, "delete", "deploy", name, "--wait=false"]).unwrap();
}

/// A bypass lets connections pass at once, and is reported everywhere.
pub(super) fn bypassed(world: &mut World) {
    let client = world.client(SHOP);
    let object = format!("Pod/{client}");
    for (annotation, reason, is_bypassed) in
        [("weft.io/bypass=true", "RedirectionBypassed", true), ("weft.io/bypass-", "RedirectionInForce", false)]
    {
        world.cluster.kubectl(&["-n", SHOP, "annotate", "pod", &client, annotation]).unwrap();
        world.event(SHOP, &object, &[reason]);
        status_has(world, &client, &[("bypassed", is_bypassed.into())]);
        let report = requests(world, &client).unwrap();
        if is_bypassed {
            assert!(report.failures == 0 && report.by_client_id.is_empty(), "{report:?}");
        } else {
            assert_vouched_for(&report, CLIENT_ID);
        }
    }
}

/// With no agent on the node, a meshed pod's application is not started, other containers of the pod connect only
/// through the proxy, and running pods are unaffected.
pub(super) fn waits_for_the_agent(world: &mut World) {
    world.stop_agents();
    let client = world.client(SHOP);
    world.cluster.kubectl(&["-n", SHOP, "scale", "deploy/store", "--replicas", "2"]).unwrap();
    let load = ["http1", "--target", "web.shop:80", "--until-eof", "--fresh", "--pause", "20ms"];
    let load = world.cluster.start_client(SHOP, &client, &load).unwrap();

    let held = world.cluster.until(CONTAINER, |cluster| {
        let list = cluster.get(&["-n", SHOP, "pods", "-l", "app=store"])?;
        let pods = list["items"].as_array().context("a list")?;
        let held = pods.iter().find(|pod| pod["status"]["initContainerStatuses"][0]["ready"] == false);
        let held = held.with_context(|| format!("no pod whose proxy waits: {list:#}"))?;
        if held["status"]["initContainerStatuses"][0]["state"]["running"].is_null() {
            bail!("its proxy does not run: {:#}", held["status"]);
        }
        Ok(held["metadata"]["name"].as_str().context("a name")?.to_owned())
    });
    let held = held.unwrap();
    // It has no agent and no application, but a debug container can be added.
    let from_inside = look(world, &held, &["http1", "--target", "web.shop:80", "--count", "5", "--timeout", "20s"]);
    let from_inside: Report = serde_json::from_str(&from_inside).unwrap();
    let store = "store.shop.serviceaccount.identity.linkerd.cluster.local";
    assert_vouched_for(&from_inside, store);
    let pod = world.cluster.get(&["-n", SHOP, "pod", &held]).unwrap();
    let application = &pod["status"]["containerStatuses"][0]["state"];
    assert!(!application["waiting"].is_null(), "its application was started: {pod:#}");

    let report = load.report().unwrap();
    assert!(report.requests > 0 && report.failures == 0, "{report:?}");
    world.start_agents();
    world.cluster.rolled_out(SHOP, "deploy/store").unwrap();
    world.cluster.kubectl(&["-n", SHOP, "scale", "deploy/store", "--replicas", "1"]).unwrap();
    world.cluster.rolled_out(SHOP, "deploy/store").unwrap();
}

/// Runs `weft-client` in a container that is added to a pod, and returns its report.
fn look(world: &World, pod: &str, arguments: &[&str]) -> String {
    const LOOK: &str = "look";
    let debug = ["-n", SHOP, "debug", pod, "--quiet", "--container", LOOK, "--profile", "restricted"];
    let image = ["--image", "localhost/weft-examples:0.1.0", "--image-pull-policy", "IfNotPresent"];
    let command = ["--", "/weft-client"];
    world.cluster.kubectl(&[&debug[..], &image, &command, arguments, &["--json"]].concat()).unwrap();
    let said = world.cluster.until(CONTAINER, |cluster| {
        let pod = cluster.get(&["-n", SHOP, "pod", pod])?;
        let state = &pod["status"]["ephemeralContainerStatuses"][0]["state"];
        if state["terminated"].is_null() {
            bail!("the container {LOOK} has not ended: {state}");
        }
        Ok(())
    });
    said.unwrap();
    world.cluster.kubectl(&["-n", SHOP, "logs", pod, "-c", LOOK]).unwrap()
}

/// Connections with a separate kernel decision each.
fn requests(world: &World, pod: &str) -> anyhow::Result<Report> {
    world.cluster.client(SHOP, pod, &["http1", "--target", "web.shop:80", "--count", "10", "--fresh"])
}

/// Waits until the status of a pod has these fields: it follows the kernel, on which readiness and connections depend.
fn status_has(world: &World, pod: &str, expected: &[(&str, Value)]) {
    let found = world.cluster.until(CONTAINER, |_| {
        let status: Value = serde_json::from_str(&world.weft(&["status", "-o", "json"])?)?;
        let row = status["pods"].as_array().into_iter().flatten().find(|row| row["name"] == pod);
        let row = row.with_context(|| format!("status knows no {pod}: {status:#}"))?;
        anyhow::ensure!(expected.iter().all(|(field, value)| row[*field] == *value), "not {expected:?}: {row:#}");
        Ok(())
    });
    found.unwrap();
}

fn client_with_the_proxys_user(kind: &str, name: &str, exemption: &str) -> String {
    let restricted = serde_json::json!({
        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": true,
        "runAsNonRoot": true, "runAsUser": 2102, "seccompProfile": {"type": "RuntimeDefault"},
    });
    let labels = serde_json::json!({"app": name});
    let annotations = serde_json::json!({"weft.io/proxy-exemption": exemption});
    let spec = serde_json::json!({
        "serviceAccountName": "client",
        "containers": [{
            "name": "client", "image": "localhost/weft-examples:0.1.0",
            "command": ["/weft-client", "wait"], "securityContext": restricted,
        }],
    });
    let object = match kind {
        "Pod" => serde_json::json!({
            "apiVersion": "v1", "kind": kind, "spec": spec,
            "metadata": {"name": name, "namespace": SHOP, "labels": labels, "annotations": annotations},
        }),
        _ => serde_json::json!({
            "apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": SHOP},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec},
            },
        }),
    };
    object.to_string()
}
