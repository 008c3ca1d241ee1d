//! What annotations and owners of a workload make of its endpoints.

use weft_k8s_api::ports::PortSet;

use super::{
    destination::{endpoint, external, key, web},
    *,
};

#[test]
fn a_port_that_may_not_be_skipped_stays_meshed() {
    let skips = |ports: &str| json!({"metadata": {"annotations": {"config.linkerd.io/skip-inbound-ports": ports}}});
    for (allowed, ports, is_meshed) in [
        (None, "1-65535", false),
        (Some("4567,8080"), "8080", false),
        (Some("8000-9000"), "8080-8081", false),
        (Some("4567"), "8080", true),
        (Some("8080"), "1-65535", true),
        (Some(""), "8080", true),
    ] {
        let world = World::with(|cluster| cluster.allowed_skips = allowed.map(|ports| ports.parse().unwrap()));
        let found = endpoint(&world, skips(ports)).unwrap();
        let seen = (found.identity.is_some(), found.transport_port.is_some(), found.hint == Hint::H2);
        assert_eq!(seen, (is_meshed, is_meshed, is_meshed), "{ports} where {allowed:?} is allowed");
    }
    let world = World::with(|cluster| cluster.allowed_skips = Some(PortSet::default()));
    let problems = |change: Value| {
        let object = manifest::from_api(Kind::Pod, pod("web-1", "10.244.0.1", change)).unwrap();
        world.index().apply(vec![Event::Apply(Box::new(object))]).problems
    };
    let mut unmeshed = skips("8080");
    merge(&mut unmeshed, json!({"metadata": {"labels": {"linkerd.io/control-plane-ns": ""}}}));
    assert!(problems(unmeshed).is_empty(), "it has no proxy to bypass");
    let problems = problems(skips("8080"));
    let [Problem { object, problem }] = &problems[..] else { panic!("{problems:?}") };
    assert_eq!(object, "Pod shop/web-1");
    for part in ["skip-inbound-ports", "8080", "agent.allowBypass", "proxyInit.ignoreInboundPorts", "no effect"] {
        assert!(problem.contains(part), "{problem}");
    }
}

#[test]
fn of_an_address_that_a_proxy_is_given_twice_the_last_one_counts() {
    let proxy = json!({"name": "linkerd-proxy", "restartPolicy": "Always", "env": [
        {"name": "LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "value": "0.0.0.0:4143"},
        {"name": "LINKERD2_PROXY_ADMIN_LISTEN_ADDR", "value": "0.0.0.0:4191"},
        {"name": "LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "value": "0.0.0.0:4190"},
        {"name": "LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "value": "0.0.0.0:5143"}]});
    let found = endpoint(&World::new(), json!({"spec": {"initContainers": [proxy]}})).unwrap();
    assert_eq!(found.transport_port, Some(5143));
}

#[test]
fn the_owner_is_named_by_object_or_by_template_hash() {
    let owned = json!({"metadata": {"labels": {"pod-template-hash": "abc"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "u"}]}});
    assert_eq!(endpoint(&World::new(), owned).unwrap().labels["deployment"], "web");
    let job =
        json!({"metadata": {"ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u"}]}});
    assert_eq!(endpoint(&World::new(), job.clone()).unwrap().labels["k8s_job"], "j");
    // The owner's owner may become known later, and vanish again.
    let world = World::new();
    endpoint(&world, job);
    let mut rx = world.index().watch_endpoints(&web(), key(80));
    world.apply(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "shop",
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": "u"}]}}));
    assert_eq!(changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].labels["cronjob"], "nightly");
    world.delete(Kind::Job, "shop", "j");
    assert_eq!(changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].labels["k8s_job"], "j");
}

#[test]
fn an_owner_that_is_no_label_is_left_out() {
    let found = |kind: &str, name: &str| {
        let owners = json!([{"apiVersion": "x/v1", "kind": kind, "name": name, "uid": "u"}]);
        endpoint(&World::new(), json!({"metadata": {"ownerReferences": owners}})).unwrap().labels.clone()
    };
    let mut plain = endpoint(&World::new(), json!({})).unwrap().labels.clone();
    let long = ["K".repeat(64), "n".repeat(254)];
    let forging = "x=\"\"} 1\nrequest_total{y";
    for (kind, name) in [
        ("a b", "n"),
        (forging, "n"),
        ("", "n"),
        ("0", "n"),
        ("é", "n"),
        ("My-Kind", "n"),
        ("Pod", "n"),
        ("ServiceAccount", "n"),
        ("Service", "n"),
        ("Namespace", "n"),
        ("Zone", "n"),
        ("Require_mTLS", "true"),
        ("Target_cluster", "n"),
        (&long[0], "n"),
        ("Rollout", &long[1]),
    ] {
        assert_eq!(found(kind, name), plain, "{kind:?} {name:.9}");
    }
    plain.insert("k2_rollout".to_owned(), "n".repeat(253));
    assert_eq!(found("K2_Rollout", &long[1][1..]), plain);
    // The owner's owner is as much its author's choice.
    let world = World::new();
    let owned = |kind: &str, name: &str| json!([{"apiVersion": "x/v1", "kind": kind, "name": name, "uid": "u"}]);
    world.apply(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "shop",
        "ownerReferences": owned(forging, "n")}}));
    let labels = endpoint(&world, json!({"metadata": {"ownerReferences": owned("Job", "j")}})).unwrap().labels.clone();
    assert_eq!(labels["k8s_job"], "j");
    assert!(!labels.keys().any(|key| key.contains('=')), "{labels:?}");
    let mut workload = external("192.0.2.1");
    for (kind, expected) in [("VirtualMachine", Some("virtualmachine")), (forging, None), ("External_Workload", None)] {
        workload["metadata"]["ownerReferences"] = owned(kind, "n");
        let world = World::new();
        world.apply(workload.clone());
        let profile = world.index().watch_endpoint_profile(addr("192.0.2.1:8080")).unwrap().borrow().clone().unwrap();
        let labels = &profile.endpoint.labels;
        let owner = labels.iter().find(|(_, name)| *name == "n").map(|(key, _)| key.as_str());
        assert_eq!(owner, expected, "{kind}");
        assert_eq!(labels["external_workload"], "vm");
    }
}
