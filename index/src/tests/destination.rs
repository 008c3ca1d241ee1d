//! Endpoints and profiles.

use super::*;

pub(super) fn key(port: u16) -> EndpointsQuery {
    EndpointsQuery { port, node: None, hostname: None }
}

pub(super) fn web() -> Key {
    Key::new("shop", "web")
}

pub(super) fn addrs(endpoints: &Endpoints) -> Vec<String> {
    endpoints.by_addr.keys().map(ToString::to_string).collect()
}

#[test]
fn endpoints_follow_slices_pods_and_the_service() {
    let world = World::new();
    let mut rx = world.index().watch_endpoints(&web(), key(80));
    assert!(rx.borrow().by_addr.is_empty());
    world.apply(service("web", "10.96.0.1", json!({})));
    world.apply(slice("web", &[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")], 8080));
    assert_eq!(addrs(&changed(&mut rx).unwrap()), Vec::<String>::new(), "pods are not known yet");
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    assert_eq!(addrs(&changed(&mut rx).unwrap()), ["10.244.0.1:8080"]);
    world.apply(pod("web-2", "10.244.0.2", json!({})));
    assert_eq!(addrs(&changed(&mut rx).unwrap()), ["10.244.0.1:8080", "10.244.0.2:8080"]);
    world.delete(Kind::Pod, "shop", "web-1");
    assert_eq!(addrs(&changed(&mut rx).unwrap()), ["10.244.0.2:8080"]);
    world.delete(Kind::Service, "shop", "web");
    assert!(addrs(&changed(&mut rx).unwrap()).is_empty());
    world.apply(service("web", "10.96.0.1", json!({})));
    assert_eq!(addrs(&changed(&mut rx).unwrap()), ["10.244.0.2:8080"]);
}

#[test]
fn a_batch_is_published_once() {
    let world = World::new();
    let mut rx = world.index().watch_endpoints(&web(), key(80));
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        slice("web", &[("web-1", "10.244.0.1")], 8080),
        pod("web-1", "10.244.0.1", json!({})),
    ]);
    assert_eq!(addrs(&changed(&mut rx).unwrap()), ["10.244.0.1:8080"]);
    world.apply(pod("web-1", "10.244.0.1", json!({"status": {"message": "irrelevant"}})));
    assert!(changed(&mut rx).is_none());
}

#[test]
fn other_services_do_not_wake_a_subscriber() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut rx = world.index().watch_endpoints(&web(), key(80));
    world.apply_all([
        service("api", "10.96.0.2", json!({})),
        slice("api", &[("api-1", "10.244.0.9")], 8080),
        pod("api-1", "10.244.0.9", json!({})),
    ]);
    assert!(changed(&mut rx).is_none());
}

/// The endpoint of `web-1` on port 8080, with a change to its pod.
pub(super) fn endpoint(world: &World, change: Value) -> Option<Arc<SharedEndpoint>> {
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        slice("web", &[("web-1", "10.244.0.1")], 8080),
        pod("web-1", "10.244.0.1", change),
    ]);
    let snapshot = world.index().watch_endpoints(&web(), key(80)).borrow().clone();
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
    assert_eq!((found.labels["zone"].as_str(), &found.zone), ("", &None));
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
    let mut rx = world.index().watch_endpoints(&web(), key(80));
    let server = |port: Value| {
        json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server", "metadata": {"name": "s", "namespace": "shop"},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "port": port, "proxyProtocol": "opaque"}})
    };
    world.apply(server(json!("http")));
    assert!(changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
    world.apply(server(json!(9)));
    assert!(!changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
    world.apply(server(json!(8080)));
    assert!(changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
    world.delete(Kind::Server, "shop", "s");
    assert!(!changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].opaque);
}

/// An ExternalWorkload with a port for its proxy.
pub(super) fn external(ip: &str) -> Value {
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
    let mut rx = world.index().watch_endpoints(&web(), key(80));
    assert!(rx.borrow().by_addr.is_empty(), "the workload is not known yet");
    let mut profile = world.index().watch_endpoint_profile(addr("192.0.2.1:8080")).unwrap();
    assert_eq!(profile.borrow().as_ref().unwrap().endpoint.identity, None);
    world.apply(external("192.0.2.1"));
    let by_name = changed(&mut rx).unwrap().by_addr[&addr("192.0.2.1:8080")].clone();
    let by_address = changed(&mut profile).unwrap().unwrap().endpoint.clone();
    let identity =
        PeerIdentity::External { id: "spiffe://root/vm".to_owned(), server_name: "vm.cluster.local".to_owned() };
    for found in [&**by_name, &by_address] {
        assert_eq!(found.identity.as_ref(), Some(&identity));
        assert_eq!((found.hint, found.transport_port, found.opaque), (Hint::H2, Some(5143), false));
        assert_eq!((found.labels["external_workload"].as_str(), found.labels["zone"].as_str()), ("vm", "z"));
    }
    world.apply(json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
        "metadata": {"name": "s", "namespace": "shop"}, "spec": {"proxyProtocol": "opaque", "port": "http",
            "externalWorkloadSelector": {"matchLabels": {"app": "vm"}}}}));
    assert_eq!(changed(&mut rx).unwrap().by_addr[&addr("192.0.2.1:8080")].hint, Hint::Opaque);
    let policy = world.index().watch_inbound_external(&Key::new("shop", "vm"), 8080).unwrap().borrow().clone().unwrap();
    assert_eq!(
        (policy.policy.origin.clone(), policy.policy.protocol),
        (Origin::Server("s".to_owned()), ServerProtocol::Opaque)
    );
    world.delete(Kind::ExternalWorkload, "shop", "vm");
    assert!(changed(&mut rx).unwrap().by_addr.is_empty());
    assert!(world.index().watch_inbound_external(&Key::new("shop", "vm"), 8080).is_none());
}

#[test]
fn ports_by_number_name_and_absence() {
    let world = World::new();
    endpoint(&world, json!({}));
    let find = |port| addrs(&world.index().watch_endpoints(&web(), key(port)).borrow().clone());
    assert_eq!(find(80), ["10.244.0.1:8080"]);
    assert_eq!(find(9999), ["10.244.0.1:9999"], "an undeclared port is taken literally");
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"name": "admin", "port": 80}]})));
    assert!(find(80).is_empty(), "the slice has no port of that name");
}

#[test]
fn not_ready_and_foreign_endpoints_are_left_out() {
    let world = World::new();
    endpoint(&world, json!({}));
    let mut rx = world.index().watch_endpoints(&web(), key(80));
    let mut not_ready = slice("web", &[("web-1", "10.244.0.1")], 8080);
    not_ready["endpoints"][0]["conditions"] = json!({"ready": false});
    world.apply(not_ready);
    assert!(changed(&mut rx).unwrap().by_addr.is_empty());
    let mut bare = slice("web", &[("web-1", "10.244.0.1")], 8080);
    bare["endpoints"][0].as_object_mut().unwrap().remove("targetRef");
    world.apply(bare);
    assert_eq!(changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].hint, Hint::Unknown);
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
        let key = EndpointsQuery { port: 80, node: node.map(str::to_owned), hostname: hostname.map(str::to_owned) };
        addrs(&world.index().watch_endpoints(&web(), key).borrow().clone())
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
    let dual = |metadata: Value, inbound: &str| {
        let change = json!({"metadata": metadata, "status": {"podIPs": [{"ip": "10.244.0.1"}, {"ip": "fd00::1"}]}});
        let mut pod = pod("web-1", "10.244.0.1", change);
        pod["spec"]["initContainers"][0]["env"][0]["value"] = json!(inbound);
        pod
    };
    let mut v6 = slice("web", &[("web-1", "fd00::1")], 8080);
    merge(&mut v6, json!({"addressType": "IPv6", "metadata": {"name": "web-6"}}));
    // A proxy that was injected before IPv6 was enabled does not listen for it: the pod would refuse who comes so.
    let skips = json!({"annotations": {"config.linkerd.io/skip-inbound-ports": "8080"}});
    let unmeshed = json!({"labels": {"linkerd.io/control-plane-ns": ""}});
    for (ipv6, pod, expected) in [
        (false, dual(json!({}), "[::]:4143"), "10.244.0.1:8080"),
        (true, dual(json!({}), "[::]:4143"), "[fd00::1]:8080"),
        (true, dual(json!({}), "0.0.0.0:4143"), "10.244.0.1:8080"),
        (true, dual(skips, "0.0.0.0:4143"), "[fd00::1]:8080"),
        (true, dual(unmeshed, "0.0.0.0:4143"), "[fd00::1]:8080"),
    ] {
        let world = World::with(|cluster| cluster.ipv6 = ipv6);
        world.apply_all([
            service("web", "10.96.0.1", json!({})),
            slice("web", &[("web-1", "10.244.0.1")], 8080),
            v6.clone(),
            pod,
        ]);
        assert_eq!(addrs(&world.index().watch_endpoints(&web(), key(80)).borrow().clone()), [expected]);
    }
}

/// Two endpoints of one pod in the host's network, which is not found by its address.
#[test]
fn a_pod_of_the_host_network_is_announced_once() {
    let dual = json!({"metadata": {"labels": {"linkerd.io/control-plane-ns": ""}}, "spec": {"hostNetwork": true},
        "status": {"podIPs": [{"ip": "192.168.0.1"}, {"ip": "fd00::99"}]}});
    let mut v6 = slice("web", &[("web-1", "fd00::99")], 8080);
    merge(&mut v6, json!({"addressType": "IPv6", "metadata": {"name": "web-6"}}));
    let world = World::with(|cluster| cluster.ipv6 = true);
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        slice("web", &[("web-1", "192.168.0.1")], 8080),
        v6,
        pod("web-1", "192.168.0.1", dual),
    ]);
    assert_eq!(addrs(&world.index().watch_endpoints(&web(), key(80)).borrow().clone()), ["[fd00::99]:8080"]);
}

pub(super) fn on_node(node: &str) -> EndpointsQuery {
    EndpointsQuery { port: 80, node: Some(node.to_owned()), hostname: None }
}

pub(super) fn node(name: &str, zone: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}}})
}

#[test]
fn only_known_pods_count_in_the_topology_filter() {
    let world = World::new();
    let mut zoned = slice("web", &[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")], 8080);
    for (index, zone) in [(0, "a"), (1, "b")] {
        merge(&mut zoned["endpoints"][index], json!({"zone": zone, "hints": {"forZones": [{"name": zone}]}}));
    }
    world.apply_all([
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": {"topology.kubernetes.io/zone": "a"}}}),
        service("web", "10.96.0.1", json!({})),
        zoned,
        pod("web-2", "10.244.0.2", json!({})),
    ]);
    let near = EndpointsQuery { port: 80, node: Some("n".to_owned()), hostname: None };
    let mut rx = world.index().watch_endpoints(&web(), near);
    assert_eq!(addrs(&rx.borrow()), ["10.244.0.2:8080"], "the zone's own pod is not known yet");
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    assert_eq!(addrs(&changed(&mut rx).unwrap()), ["10.244.0.1:8080"]);
}

fn profile_key(port: u16, namespace: Option<&str>) -> ProfileQuery {
    ProfileQuery { port, namespace: namespace.map(str::to_owned) }
}

#[test]
fn the_clients_own_profile_comes_before_the_services() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut anyone = Stream::new(|| world.index().watch_service_profile(&web(), profile_key(80, None)));
    assert!(anyone.next().is_some());
    let mut client = Stream::new(|| world.index().watch_service_profile(&web(), profile_key(80, Some("ops"))));
    assert!(client.next().is_some());
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
    assert_eq!(namespace(&anyone.next().unwrap()).as_deref(), Some("shop"));
    assert_eq!(namespace(&client.next().unwrap()).as_deref(), Some("shop"));
    world.apply(profile("ops", json!(1)));
    assert!(anyone.next().is_none());
    let found = client.next().unwrap();
    assert_eq!(namespace(&found).as_deref(), Some("ops"));
    let ServiceProfile::Declared { profile: Some(record), .. } = &**found else { panic!() };
    let authority = "api.shop.svc.cluster.local".to_owned();
    assert_eq!(record.overrides, [DstOverride { authority, weight: 10_000 }]);
    // A profile that cannot be parsed changes nothing.
    world.apply(profile("ops", json!("much")));
    assert!(client.next().is_none());
    for (spec, field) in [
        (json!({"retryBudget": {"retryRatio": 0.5, "minRetriesPerSecond": 3, "ttl": "soon"}}), "retryBudget.ttl"),
        (json!({"routes": [{"name": "r", "condition": {}, "isRetryable": true}]}), "routes[0].condition"),
    ] {
        let mut unusable = profile("ops", json!(2));
        merge(&mut unusable, json!({"spec": spec}));
        let object = serde_json::from_value(unusable).unwrap();
        let applied = world.index().apply(vec![Event::Apply(Box::new(manifest::Object::ServiceProfile(object)))]);
        assert!(applied.problems[0].problem.starts_with(&format!("spec.{field}: ")), "{:?}", applied.problems);
        assert!(client.next().is_none());
    }
    world.delete(Kind::ServiceProfile, "ops", "web.shop.svc.cluster.local");
    assert_eq!(namespace(&client.next().unwrap()).as_deref(), Some("shop"));
    world.delete(Kind::ServiceProfile, "shop", "web.shop.svc.cluster.local");
    assert_eq!(namespace(&anyone.next().unwrap()), None);
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
    let mut rx = Stream::new(|| world.index().watch_service_profile(&web(), profile_key(80, None)));
    let opaque = |profile: &ServiceProfile| matches!(profile, ServiceProfile::Declared { opaque: true, .. });
    assert!(!opaque(&rx.next().unwrap()));
    world.apply(annotated("http"));
    assert!(opaque(&rx.next().unwrap()));
    // A name may be longer than a container's, and an entry that cannot be read does not lose the others.
    world.apply(annotated("81"));
    assert!(!opaque(&rx.next().unwrap()));
    let mut long = annotated("My_Port,postgres-replication");
    long["spec"]["ports"] = json!([{"port": 80, "name": "postgres-replication"}]);
    let object = manifest::Object::Service(serde_json::from_value(long).unwrap());
    let applied = world.index().apply(vec![Event::Apply(Box::new(object))]);
    assert!(opaque(&rx.next().unwrap()));
    let expected = "a part of annotation config.linkerd.io/opaque-ports is ignored: bad port \"My_Port\", expected ";
    assert!(applied.problems[0].problem.starts_with(expected), "{:?}", applied.problems);
    world.apply(annotated("81"));
    assert!(!opaque(&rx.next().unwrap()));
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"port": 3306}]})));
    assert_eq!(**rx.next().unwrap(), ServiceProfile::Undeclared);
    let undeclared: Vec<_> =
        (1..1000).map(|port| world.index().watch_service_profile(&web(), profile_key(port, None))).collect();
    assert_eq!(world.index().service_profiles.len(), 1, "ports that are not declared share a view");
    drop(undeclared);
    assert!(opaque(&world.index().watch_service_profile(&web(), profile_key(3306, None)).borrow()));
    // Clients of a deleted Service keep its name.
    world.delete(Kind::Service, "shop", "web");
    assert!(
        matches!(&**rx.next().unwrap(), ServiceProfile::Declared { name, .. } if name == "web.shop.svc.cluster.local")
    );
}

type Profiles = OptionalView<EndpointProfile>;

fn profiles(world: &World, at: &str) -> Profiles {
    world.index().watch_endpoint_profile(addr(at)).unwrap()
}

fn profile_at(world: &World, at: &str) -> EndpointProfile {
    let snapshot = profiles(world, at).borrow().clone();
    (*snapshot.unwrap()).clone()
}

/// The pod of a profile's endpoint, if it is known: a bare address has none.
fn pod_of(profile: &EndpointProfile) -> Option<&str> {
    profile.endpoint.labels.get("pod").map(String::as_str)
}

#[test]
fn endpoint_profiles_follow_the_pod_at_the_address() {
    let world = World::new();
    let mut rx = profiles(&world, "10.244.0.1:8080");
    assert_eq!(rx.borrow().as_ref().unwrap().endpoint, Endpoint::plain(addr("10.244.0.1:8080")));
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    let profile = changed(&mut rx).unwrap().unwrap();
    assert!(profile.endpoint.identity.is_some());
    assert_eq!(profile.endpoint.labels["namespace"], "shop");
    world.apply(pod("web-1", "10.244.0.1", json!({"status": {"phase": "Succeeded"}})));
    assert_eq!(changed(&mut rx).unwrap().unwrap().endpoint.identity, None);
    assert!(profile_at(&world, "10.244.7.7:3306").opaque, "default opaque ports hold for bare addresses");
}

fn terminating(name: &str) -> Value {
    pod(name, "10.244.0.1", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))
}

#[test]
fn a_terminating_pod_yields_its_address_and_is_meshed_until_then() {
    let world = World::new();
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    let mut rx = profiles(&world, "10.244.0.1:8080");
    // Its proxy still runs: a bare address would make clients connect in plain text.
    world.apply(terminating("web-1"));
    assert!(changed(&mut rx).is_none());
    assert!(profile_at(&world, "10.244.0.1:8080").endpoint.identity.is_some());
    world.apply(pod("web-2", "10.244.0.1", json!({})));
    assert_eq!(pod_of(&changed(&mut rx).unwrap().unwrap()), Some("web-2"));
    world.delete(Kind::Pod, "shop", "web-1");
    assert!(changed(&mut rx).is_none());
}

/// Linkerd announces a pod as meshed once it is running. Its proxy is an init container, which runs before that.
#[test]
fn a_pending_pod_is_meshed() {
    let world = World::new();
    world.apply(pod("web-1", "10.244.0.1", json!({"status": {"phase": "Pending"}})));
    assert!(profile_at(&world, "10.244.0.1:8080").endpoint.identity.is_some());
}

#[test]
fn an_address_that_becomes_ambiguous_keeps_its_last_profile() {
    let world = World::new();
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    let mut rx = profiles(&world, "10.244.0.1:8080");
    world.apply(pod("web-2", "10.244.0.1", json!({})));
    assert_eq!(changed(&mut rx).unwrap(), None, "no profile is sent, least of all that of a bare address");
    assert!(matches!(world.index().watch_endpoint_profile(addr("10.244.0.1:1")), Err(AmbiguousAddress::Pods(..))));
    world.delete(Kind::Pod, "shop", "web-1");
    assert_eq!(pod_of(&changed(&mut rx).unwrap().unwrap()), Some("web-2"));
}

#[test]
fn a_meshed_pod_whose_proxy_cannot_be_read_is_not_reached_in_plain_text() {
    let world = World::new();
    let silent = json!({"spec": {"initContainers": [{"name": "linkerd-proxy", "restartPolicy": "Always"}]}});
    let object = |change: Value| {
        let object = serde_json::from_value(pod("web-1", "10.244.0.1", change)).unwrap();
        Event::Apply(Box::new(manifest::Object::Pod(object)))
    };
    let problems = world.index().apply(vec![object(silent.clone())]).problems;
    assert_eq!((problems.len(), problems[0].object.as_str()), (1, "Pod shop/web-1"), "{problems:?}");
    assert_eq!(world.index().apply(vec![object(silent.clone())]).problems, [], "a problem is reported once");
    let agent = pod("agent", "10.244.0.2", json!({"spec": {"initContainers": [], "containers": [{"name": "agent"}]}}));
    let agent = serde_json::from_value(agent).unwrap();
    let agent = Event::Apply(Box::new(manifest::Object::Pod(agent)));
    assert_eq!(world.index().apply(vec![agent]).problems, [], "a pod without the container is not a problem");
    let mut rx = profiles(&world, "10.244.0.1:8080");
    assert_eq!(*rx.borrow_and_update(), None);
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    assert!(changed(&mut rx).unwrap().unwrap().endpoint.identity.is_some());
    world.index().apply(vec![object(silent)]);
    assert_eq!(changed(&mut rx).unwrap(), None);
}

/// A pod with port 8080 at port 80 of its node.
fn with_host_port(name: &str, ip: &str, port: Value) -> Value {
    let mut declared = json!({"containerPort": 8080, "hostPort": 80});
    merge(&mut declared, port);
    pod(
        name,
        ip,
        json!({"status": {"hostIP": "192.168.0.1", "hostIPs": [{"ip": "192.168.0.1"}, {"ip": "fd00::99"}]},
            "metadata": {"annotations": {"config.linkerd.io/opaque-ports": "8080"}},
            "spec": {"containers": [{"name": "app", "ports": [declared]}]}}),
    )
}

#[test]
fn a_host_port_leads_to_its_pod() {
    let world = World::new();
    world.apply(with_host_port("web-1", "10.244.0.1", json!({})));
    for at in ["192.168.0.1:80", "[fd00::99]:80"] {
        let profile = profile_at(&world, at);
        assert_eq!((profile.endpoint.addr, pod_of(&profile)), (addr(at), Some("web-1")));
        assert!(profile.endpoint.identity.is_some() && profile.opaque, "as for the pod's own port");
        assert_eq!(profile.endpoint.transport_port, None, "the node's address does not lead to the proxy's port");
    }
    for at in ["192.168.0.1:81", "192.168.0.1:8080"] {
        assert_eq!(pod_of(&profile_at(&world, at)), None, "{at}");
    }
    // The labels at this address contain the owner's owner too.
    let owned =
        json!({"metadata": {"ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u"}]}});
    let mut object = with_host_port("web-1", "10.244.0.1", json!({}));
    merge(&mut object, owned);
    world.apply(object);
    let mut rx = profiles(&world, "192.168.0.1:80");
    world.apply(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "shop",
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": "u"}]}}));
    assert_eq!(changed(&mut rx).unwrap().unwrap().endpoint.labels["cronjob"], "nightly");
    world.apply(with_host_port("web-2", "10.244.0.2", json!({})));
    assert_eq!(changed(&mut rx).unwrap(), None);
    let ambiguous = world.index().watch_endpoint_profile(addr("192.168.0.1:80"));
    assert!(matches!(ambiguous, Err(AmbiguousAddress::Pods(..))));
    world.apply(with_host_port("web-2", "10.244.0.2", json!({"protocol": "UDP"})));
    assert_eq!(pod_of(&changed(&mut rx).unwrap().unwrap()), Some("web-1"));
}

#[test]
fn an_external_workload_is_at_its_address_on_the_ports_that_it_lists() {
    let world = World::new();
    world.apply(external("192.0.2.1"));
    let meshed = |at: &str| profile_at(&world, at).endpoint.identity.is_some();
    assert!(meshed("192.0.2.1:8080") && meshed("192.0.2.1:5143") && !meshed("192.0.2.1:9090"));
    assert_eq!(profile_at(&world, "192.0.2.1:8080").endpoint.labels["namespace"], "shop");
    let mut other = external("192.0.2.1");
    other["metadata"]["name"] = json!("vm-2");
    world.apply(other);
    let ambiguous =
        |at: &str| matches!(world.index().watch_endpoint_profile(addr(at)), Err(AmbiguousAddress::Workloads(..)));
    assert!(ambiguous("192.0.2.1:8080") && !ambiguous("192.0.2.1:9090"));
}

#[test]
fn services_by_address() {
    let world = World::new();
    let ip = "10.96.0.1".parse().unwrap();
    assert_eq!(world.index().service_by_ip(ip), Ok(None));
    world.apply(service("web", "10.96.0.1", json!({})));
    assert_eq!(world.index().service_by_ip(ip).unwrap().unwrap().key, web());
    world.apply(service("api", "10.96.0.1", json!({})));
    assert!(matches!(world.index().service_by_ip(ip), Err(AmbiguousAddress::Services(..))));
    world.apply(service("api", "None", json!({})));
    assert_eq!(world.index().service_by_ip(ip).unwrap().unwrap().key, web());
}
