//! Endpoints and profiles.

use super::*;

fn key(port: u16) -> EndpointsKey {
    EndpointsKey { port, node: None, hostname: None }
}

fn web() -> Key {
    Key::new("shop", "web")
}

fn addrs(endpoints: &Endpoints) -> Vec<String> {
    endpoints.by_addr.keys().map(ToString::to_string).collect()
}

#[test]
fn endpoints_follow_slices_pods_and_the_service() {
    let world = World::new();
    let mut rx = world.index.watch_endpoints(&web(), key(80));
    assert!(rx.borrow().by_addr.is_empty());
    world.apply(service("web", "10.96.0.1", json!({})));
    world.apply(slice("web", &[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")], 8080));
    assert_eq!(addrs(&news(&mut rx).unwrap()), Vec::<String>::new(), "pods are not known yet");
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    assert_eq!(addrs(&news(&mut rx).unwrap()), ["10.244.0.1:8080"]);
    world.apply(pod("web-2", "10.244.0.2", json!({})));
    assert_eq!(addrs(&news(&mut rx).unwrap()), ["10.244.0.1:8080", "10.244.0.2:8080"]);
    world.delete("Pod", "shop", "web-1");
    assert_eq!(addrs(&news(&mut rx).unwrap()), ["10.244.0.2:8080"]);
    world.delete("Service", "shop", "web");
    assert!(addrs(&news(&mut rx).unwrap()).is_empty());
    world.apply(service("web", "10.96.0.1", json!({})));
    assert_eq!(addrs(&news(&mut rx).unwrap()), ["10.244.0.2:8080"]);
}

#[test]
fn a_batch_is_published_once() {
    let world = World::new();
    let mut rx = world.index.watch_endpoints(&web(), key(80));
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        slice("web", &[("web-1", "10.244.0.1")], 8080),
        pod("web-1", "10.244.0.1", json!({})),
    ]);
    assert_eq!(addrs(&news(&mut rx).unwrap()), ["10.244.0.1:8080"]);
    world.apply(pod("web-1", "10.244.0.1", json!({"status": {"message": "irrelevant"}})));
    assert!(news(&mut rx).is_none());
}

#[test]
fn other_services_do_not_wake_a_subscriber() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut rx = world.index.watch_endpoints(&web(), key(80));
    world.apply_all([
        service("api", "10.96.0.2", json!({})),
        slice("api", &[("api-1", "10.244.0.9")], 8080),
        pod("api-1", "10.244.0.9", json!({})),
    ]);
    assert!(news(&mut rx).is_none());
}

/// The endpoint of `web-1` on port 8080, with a change to its pod.
fn endpoint(world: &World, change: Value) -> Option<Endpoint> {
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        slice("web", &[("web-1", "10.244.0.1")], 8080),
        pod("web-1", "10.244.0.1", change),
    ]);
    let snapshot = world.index.watch_endpoints(&web(), key(80)).borrow().clone();
    snapshot.by_addr.get(&addr("10.244.0.1:8080")).cloned()
}

#[test]
fn a_meshed_pod_has_identity_hint_and_transport() {
    let found = endpoint(&World::new(), json!({})).unwrap();
    let identity = "web.shop.serviceaccount.identity.linkerd.cluster.local".to_owned();
    assert_eq!(found.identity, Some(PeerIdentity::ServiceAccount(identity)));
    assert_eq!((found.hint, found.transport_port, found.opaque), (Hint::H2, Some(4143), false));
    assert_eq!(found.labels["pod"], "web-1");
    assert_eq!(found.labels["serviceaccount"], "web");
    assert_eq!(found.labels["control_plane_ns"], "linkerd");
    assert_eq!(found.labels["zone_locality"], "unknown");
}

#[test]
fn mesh_detection_by_label_annotation_and_environment() {
    let unmeshed = json!({"metadata": {"labels": {"linkerd.io/control-plane-ns": ""}}});
    let skipped = json!({"metadata": {"annotations": {"config.linkerd.io/skip-inbound-ports": "8000-9000"}}});
    let opaque = json!({"metadata": {"annotations": {"config.linkerd.io/opaque-ports": "http"}}});
    let foreign = json!({"metadata": {"labels": {"linkerd.io/control-plane-ns": "other"}}});
    let silent = json!({"spec": {"initContainers": [{"name": "linkerd-proxy", "restartPolicy": "Always"}]}});
    for (name, change, expected) in [
        ("unmeshed", unmeshed, Some((Hint::Unknown, None, false))),
        ("skipped port", skipped, Some((Hint::Unknown, None, false))),
        ("opaque by port name", opaque, Some((Hint::Opaque, Some(4143), true))),
        ("another control plane", foreign, Some((Hint::H2, Some(4143), false))),
        ("proxy without listeners", silent, None),
    ] {
        let got = endpoint(&World::new(), change).map(|e| (e.hint, e.transport_port, e.identity.is_some()));
        assert_eq!(got, expected, "{name}");
    }
    let transparent = World::with(|cluster| cluster.transport_mode = TransportMode::Transparent);
    assert_eq!(endpoint(&transparent, json!({})).unwrap().transport_port, None);
}

#[test]
fn an_opaque_server_makes_the_endpoint_opaque_and_its_deletion_does_not() {
    let world = World::new();
    endpoint(&world, json!({}));
    let mut rx = world.index.watch_endpoints(&web(), key(80));
    let server = |port: Value| {
        json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server", "metadata": {"name": "s", "namespace": "shop"},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "port": port, "proxyProtocol": "opaque"}})
    };
    world.apply(server(json!("http")));
    assert!(news(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
    world.apply(server(json!(9)));
    assert!(!news(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
    world.apply(server(json!(8080)));
    assert!(news(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
    world.delete("Server", "shop", "s");
    assert!(!news(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
}

#[test]
fn the_owner_is_named_by_object_or_by_template_hash() {
    let owned = json!({"metadata": {"labels": {"pod-template-hash": "abc"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "u"}]}});
    assert_eq!(endpoint(&World::new(), owned).unwrap().labels["deployment"], "web");
    let job =
        json!({"metadata": {"ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u"}]}});
    assert_eq!(endpoint(&World::new(), job.clone()).unwrap().labels["k8s_job"], "j");
    // The owner's owner may become known later, and be gone again.
    let world = World::new();
    endpoint(&world, job);
    let mut rx = world.index.watch_endpoints(&web(), key(80));
    world.apply(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "shop",
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": "u"}]}}));
    assert_eq!(news(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].labels["cronjob"], "nightly");
    world.delete("Job", "shop", "j");
    assert_eq!(news(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].labels["k8s_job"], "j");
}

/// An ExternalWorkload with a port for its proxy.
fn external(ip: &str) -> Value {
    json!({"apiVersion": "workload.linkerd.io/v1beta1", "kind": "ExternalWorkload",
        "metadata": {"name": "vm", "namespace": "shop", "labels": {"app": "vm", "topology.kubernetes.io/zone": "z"}},
        "spec": {"meshTLS": {"identity": "spiffe://root/vm", "serverName": "vm.cluster.local"},
            "ports": [{"name": "http", "port": 8080}, {"name": "linkerd-proxy", "port": 5143}],
            "workloadIPs": [{"ip": ip}]}})
}

#[test]
fn an_external_workload_is_meshed_by_name_and_by_address() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut object = slice("web", &[("vm", "192.0.2.1")], 8080);
    object["endpoints"][0]["targetRef"]["kind"] = json!("ExternalWorkload");
    world.apply(object);
    let mut rx = world.index.watch_endpoints(&web(), key(80));
    assert!(rx.borrow().by_addr.is_empty(), "the workload is not known yet");
    let mut profile = world.index.watch_endpoint_profile(addr("192.0.2.1:8080")).unwrap();
    assert_eq!(profile.borrow().endpoint.identity, None);
    world.apply(external("192.0.2.1"));
    let by_name = news(&mut rx).unwrap().by_addr[&addr("192.0.2.1:8080")].clone();
    let by_address = news(&mut profile).unwrap().endpoint.clone();
    let identity =
        PeerIdentity::External { id: "spiffe://root/vm".to_owned(), server_name: "vm.cluster.local".to_owned() };
    for found in [by_name, by_address] {
        assert_eq!(found.identity.as_ref(), Some(&identity));
        assert_eq!((found.hint, found.transport_port, found.opaque), (Hint::H2, Some(5143), false));
        assert_eq!((found.labels["external_workload"].as_str(), found.labels["zone"].as_str()), ("vm", "z"));
    }
    world.apply(json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
        "metadata": {"name": "s", "namespace": "shop"}, "spec": {"proxyProtocol": "opaque", "port": "http",
            "externalWorkloadSelector": {"matchLabels": {"app": "vm"}}}}));
    assert_eq!(news(&mut rx).unwrap().by_addr[&addr("192.0.2.1:8080")].hint, Hint::Opaque);
    let policy = world.index.watch_inbound_external(&Key::new("shop", "vm"), 8080).borrow().clone().unwrap();
    assert_eq!((policy.origin.clone(), policy.protocol), (Origin::Server("s".to_owned()), ServerProtocol::Opaque));
    world.delete("ExternalWorkload", "shop", "vm");
    assert!(news(&mut rx).unwrap().by_addr.is_empty());
    assert!(world.index.watch_inbound_external(&Key::new("shop", "vm"), 8080).borrow().is_none());
}

#[test]
fn ports_by_number_name_and_absence() {
    let world = World::new();
    endpoint(&world, json!({}));
    let find = |port| addrs(&world.index.watch_endpoints(&web(), key(port)).borrow().clone());
    assert_eq!(find(80), ["10.244.0.1:8080"]);
    assert_eq!(find(9999), ["10.244.0.1:9999"], "an undeclared port is taken literally");
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"name": "admin", "port": 80}]})));
    assert!(find(80).is_empty(), "the slice has no port of that name");
}

#[test]
fn not_ready_and_foreign_endpoints_are_left_out() {
    let world = World::new();
    endpoint(&world, json!({}));
    let mut rx = world.index.watch_endpoints(&web(), key(80));
    let mut not_ready = slice("web", &[("web-1", "10.244.0.1")], 8080);
    not_ready["endpoints"][0]["conditions"] = json!({"ready": false});
    world.apply(not_ready);
    assert!(news(&mut rx).unwrap().by_addr.is_empty());
    let mut bare = slice("web", &[("web-1", "10.244.0.1")], 8080);
    bare["endpoints"][0].as_object_mut().unwrap().remove("targetRef");
    world.apply(bare);
    assert_eq!(news(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].hint, Hint::Unknown);
}

#[test]
fn topology_by_node_zone_and_hostname() {
    let world = World::new();
    let node = |name: &str, zone: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}}});
    let mut zoned = slice("web", &[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")], 8080);
    for (index, zone) in [(0, "a"), (1, "b")] {
        merge(
            &mut zoned["endpoints"][index],
            json!({"zone": zone, "nodeName": format!("node-{zone}"), "hostname": format!("web-{zone}"),
            "hints": {"forZones": [{"name": zone}]}}),
        );
    }
    world.apply_all([
        node("node-a", "a"),
        node("node-b", "b"),
        service("web", "10.96.0.1", json!({})),
        zoned,
        pod("web-1", "10.244.0.1", json!({})),
        pod("web-2", "10.244.0.2", json!({})),
    ]);
    let find = |node: Option<&str>, hostname: Option<&str>| {
        let key = EndpointsKey { port: 80, node: node.map(str::to_owned), hostname: hostname.map(str::to_owned) };
        addrs(&world.index.watch_endpoints(&web(), key).borrow().clone())
    };
    assert_eq!(find(Some("node-a"), None), ["10.244.0.1:8080"]);
    assert_eq!(find(None, None).len(), 2, "an unknown node has no zone");
    assert_eq!(find(None, Some("web-b")), ["10.244.0.2:8080"]);
    assert!(find(None, Some("none")).is_empty());
    world.apply(node("node-a", "c"));
    assert_eq!(find(Some("node-a"), None).len(), 2, "no endpoint is left in the zone");
    world.apply(service("web", "10.96.0.1", json!({"internalTrafficPolicy": "Local"})));
    assert_eq!(find(Some("node-b"), None), ["10.244.0.2:8080"]);
    assert!(find(Some("node-z"), None).is_empty() && find(None, None).is_empty(), "local means no fallback");
}

#[test]
fn families() {
    let dual = json!({"status": {"podIPs": [{"ip": "10.244.0.1"}, {"ip": "fd00::1"}]}});
    let mut v6 = slice("web", &[("web-1", "fd00::1")], 8080);
    merge(&mut v6, json!({"addressType": "IPv6", "metadata": {"name": "web-6"}}));
    for (ipv6, expected) in [(false, "10.244.0.1:8080"), (true, "[fd00::1]:8080")] {
        let world = World::with(|cluster| cluster.ipv6 = ipv6);
        world.apply_all([
            service("web", "10.96.0.1", json!({})),
            slice("web", &[("web-1", "10.244.0.1")], 8080),
            v6.clone(),
            pod("web-1", "10.244.0.1", dual.clone()),
        ]);
        assert_eq!(addrs(&world.index.watch_endpoints(&web(), key(80)).borrow().clone()), [expected]);
    }
}

fn profile_key(port: u16, namespace: Option<&str>) -> ProfileKey {
    ProfileKey { port, namespace: namespace.map(str::to_owned) }
}

#[test]
fn the_clients_own_profile_comes_before_the_services() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut anyone = world.index.watch_service_profile(&web(), profile_key(80, None));
    let mut client = world.index.watch_service_profile(&web(), profile_key(80, Some("ops")));
    let namespace = |profile: &ServiceProfile| match profile {
        ServiceProfile::Declared { profile, .. } => profile.as_ref().map(|profile| profile.key.namespace.clone()),
        ServiceProfile::Undeclared => panic!("the port is declared"),
    };
    let profile = |namespace: &str, weight: Value| {
        json!({"apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
            "metadata": {"name": "web.shop.svc.cluster.local", "namespace": namespace},
            "spec": {"dstOverrides": [{"authority": "api.shop.svc.cluster.local", "weight": weight}]}})
    };
    world.apply(profile("shop", json!("500m")));
    assert_eq!(namespace(&news(&mut anyone).unwrap()).as_deref(), Some("shop"));
    assert_eq!(namespace(&news(&mut client).unwrap()).as_deref(), Some("shop"));
    world.apply(profile("ops", json!(1)));
    assert!(news(&mut anyone).is_none());
    let found = news(&mut client).unwrap();
    assert_eq!(namespace(&found).as_deref(), Some("ops"));
    let ServiceProfile::Declared { profile: Some(record), .. } = &*found else { panic!() };
    assert_eq!(record.overrides, [("api.shop.svc.cluster.local".to_owned(), 10_000)]);
    // What cannot be translated changes nothing.
    world.apply(profile("ops", json!("much")));
    assert!(news(&mut client).is_none());
    world.delete("ServiceProfile", "ops", "web.shop.svc.cluster.local");
    assert_eq!(namespace(&news(&mut client).unwrap()).as_deref(), Some("shop"));
    world.delete("ServiceProfile", "shop", "web.shop.svc.cluster.local");
    assert_eq!(namespace(&news(&mut anyone).unwrap()), None);
}

#[test]
fn service_profiles_know_opaque_ports_and_declared_ones() {
    let world = World::new();
    let annotated = |ports: &str| {
        let mut object = service("web", "10.96.0.1", json!({}));
        object["metadata"]["annotations"] = json!({"config.linkerd.io/opaque-ports": ports});
        object
    };
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut rx = world.index.watch_service_profile(&web(), profile_key(80, None));
    let opaque = |profile: &ServiceProfile| matches!(profile, ServiceProfile::Declared { opaque: true, .. });
    assert!(!opaque(&rx.borrow()));
    world.apply(annotated("http"));
    assert!(opaque(&news(&mut rx).unwrap()));
    world.apply(annotated("81"));
    assert!(!opaque(&news(&mut rx).unwrap()));
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"port": 3306}]})));
    assert_eq!(*news(&mut rx).unwrap(), ServiceProfile::Undeclared);
    assert!(opaque(&world.index.watch_service_profile(&web(), profile_key(3306, None)).borrow()));
}

#[test]
fn endpoint_profiles_follow_the_pod_at_the_address() {
    let world = World::new();
    let mut rx = world.index.watch_endpoint_profile(addr("10.244.0.1:8080")).unwrap();
    assert_eq!(rx.borrow().endpoint, Endpoint::plain(addr("10.244.0.1:8080")));
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    let profile = news(&mut rx).unwrap();
    assert!(profile.endpoint.identity.is_some());
    assert_eq!(profile.endpoint.labels["namespace"], "shop");
    world.apply(pod("web-1", "10.244.0.1", json!({"status": {"phase": "Succeeded"}})));
    assert_eq!(news(&mut rx).unwrap().endpoint.identity, None);
    let bare = world.index.watch_endpoint_profile(addr("10.244.7.7:3306")).unwrap();
    assert!(bare.borrow().opaque, "default opaque ports hold for bare addresses");
    world.apply_all([pod("web-1", "10.244.0.1", json!({})), pod("web-2", "10.244.0.1", json!({}))]);
    assert!(matches!(world.index.watch_endpoint_profile(addr("10.244.0.1:1")), Err(AddressError::AmbiguousPod(..))));
}

#[test]
fn a_host_port_leads_to_its_pod() {
    let world = World::new();
    world.apply(pod(
        "web-1",
        "10.244.0.1",
        json!({"status": {"hostIP": "192.168.0.1"},
        "spec": {"containers": [{"name": "app", "ports": [{"containerPort": 8080, "hostPort": 80}]}]}}),
    ));
    let profile = world.index.watch_endpoint_profile(addr("192.168.0.1:80")).unwrap().borrow().clone();
    assert_eq!(profile.endpoint.addr, addr("10.244.0.1:8080"));
    let other = world.index.watch_endpoint_profile(addr("192.168.0.1:81")).unwrap().borrow().clone();
    assert_eq!(other.endpoint.identity, None);
}

#[test]
fn services_by_address() {
    let world = World::new();
    let ip = "10.96.0.1".parse().unwrap();
    assert_eq!(world.index.service_by_ip(ip), Ok(None));
    world.apply(service("web", "10.96.0.1", json!({})));
    assert_eq!(world.index.service_by_ip(ip).unwrap().unwrap().key, web());
    world.apply(service("api", "10.96.0.1", json!({})));
    assert!(matches!(world.index.service_by_ip(ip), Err(AddressError::AmbiguousService(..))));
    world.apply(service("api", "None", json!({})));
    assert_eq!(world.index.service_by_ip(ip).unwrap().unwrap().key, web());
}
