//! Which pods of a meshed namespace get a proxy, by their kind and annotation, and what their requests then carry.

use serde_json::{Value, json};
use weft_tests::report::assert_vouched_for;

use crate::{
    workloads::{EDGE, SERVER, server},
    world::World,
};

/// The identity of the namespace's pods.
const IDENTITY: &str = "default.edge.serviceaccount.identity.linkerd.cluster.local";
const INJECT: &str = "linkerd.io/inject";

/// A pod's template, or a pod with a kind and a version beside it.
fn template(name: &str, inject: Option<&str>, spec: &Value) -> Value {
    let annotations = inject.map(|inject| json!({INJECT: inject}));
    let metadata = json!({"name": name, "namespace": EDGE, "labels": {"app": name}, "annotations": annotations});
    // It is its own client.
    let mut container = server();
    container["name"] = json!("client");
    let mut template = json!({"metadata": metadata, "spec": {"containers": [container]}});
    for (key, value) in spec.as_object().into_iter().flatten() {
        template["spec"][key] = value.clone();
    }
    template
}

fn pod(name: &str, inject: Option<&str>, spec: &Value) -> Value {
    let mut pod = template(name, inject, spec);
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod
}

fn workload(kind: &str, name: &str) -> Value {
    let mut spec = json!({"selector": {"matchLabels": {"app": name}}, "template": template(name, None, &json!({}))});
    if kind == "ReplicaSet" {
        spec["replicas"] = json!(1);
    }
    json!({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": EDGE}, "spec": spec})
}

/// The container of a pod's proxy, if it has one.
fn proxy(pod: &Value) -> Option<&Value> {
    let lists = ["initContainers", "containers"].map(|list| pod["spec"][list].as_array());
    lists.into_iter().flatten().flatten().find(|container| container["name"] == "linkerd-proxy")
}

/// Applies a pod of each way, and looks at what it became and at what its requests carry.
pub(super) fn follows_kind_and_annotation(world: &mut World) {
    let items = [
        workload("DaemonSet", "each-node"),
        workload("ReplicaSet", "bare-set"),
        pod("router", Some("ingress"), &json!({})),
        pod("opted-out", Some("disabled"), &json!({})),
        pod("on-host", None, &json!({"hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"})),
    ];
    world.cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()).unwrap();
    world.cluster.rolled_out(EDGE, "ds/each-node").unwrap();
    for (name, is_meshed) in
        [("each-node", true), ("bare-set", true), ("router", true), ("opted-out", false), ("on-host", false)]
    {
        let selector = format!("app={name}");
        let ready = ["-n", EDGE, "wait", "--for=condition=Ready", "pod", "-l", &selector, "--timeout=120s"];
        world.cluster.kubectl(&ready).unwrap();
        let pods = world.cluster.pods(EDGE, &selector).unwrap();
        assert!(pods.len() == 1 || name == "each-node", "{pods:?}");
        let name = &pods[0];
        let pod = world.cluster.get(&["-n", EDGE, "pod", name]).unwrap();
        let proxy = proxy(&pod);
        assert_eq!(proxy.is_some(), is_meshed, "{name}: {pod:#}");
        let ingress = proxy.and_then(|proxy| proxy["env"].as_array()).into_iter().flatten();
        let ingress = ingress.filter(|variable| variable["name"] == "LINKERD2_PROXY_INGRESS_MODE").count();
        assert_eq!(ingress, usize::from(*name == "router"), "{name}");
        let report = world.cluster.client(EDGE, name, &["http1", "--target", SERVER, "--count", "1"]).unwrap();
        assert_eq!(report.failures, 0, "{name}: {report:?}");
        match is_meshed {
            true => assert_vouched_for(&report, IDENTITY),
            false => assert!(report.by_client_id.is_empty(), "{name}: {report:?}"),
        }
    }
    world.cluster.kubectl(&["-n", EDGE, "delete", "ds/each-node", "rs/bare-set", "--wait=false"]).unwrap();
    world.cluster.kubectl(&["-n", EDGE, "delete", "pod", "router", "opted-out", "on-host", "--wait=false"]).unwrap();
}
