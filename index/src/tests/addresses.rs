//! What is announced of an address, as Linkerd announces it.

use super::*;

fn web() -> Key {
    Key::new("shop", "web")
}

fn find(world: &World, port: u16) -> Arc<Snapshot<Endpoints>> {
    world.index().watch_endpoints(&web(), EndpointsQuery { port, node: None, hostname: None }).borrow().clone()
}

fn addrs(endpoints: &Endpoints) -> Vec<String> {
    endpoints.by_addr.keys().map(ToString::to_string).collect()
}

/// `web` with a slice and its pod.
fn world_with(slice: Value, pod: Value) -> World {
    let world = World::new();
    world.apply_all([service("web", "10.96.0.1", json!({})), slice, pod]);
    world
}

#[test]
fn a_slice_is_of_the_service_that_its_label_or_its_owner_names() {
    let one = || slice("web", &[("web-1", "10.244.0.1")], 8080);
    let mut owned = one();
    owned["metadata"]["labels"] = json!({});
    owned["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Service", "name": "web", "uid": "u"}]);
    let mut of_another = owned.clone();
    of_another["metadata"]["labels"] = json!({"kubernetes.io/service-name": "api"});
    let mut nobodys = one();
    nobodys["metadata"]["labels"] = json!({});
    for (case, object, expected) in [
        ("label", one(), &["10.244.0.1:8080"][..]),
        ("owner", owned, &["10.244.0.1:8080"]),
        ("label before owner", of_another, &[]),
        ("neither", nobodys, &[]),
    ] {
        assert_eq!(addrs(&find(&world_with(object, pod("web-1", "10.244.0.1", json!({}))), 80)), expected, "{case}");
    }
}

#[test]
fn slices_of_names_have_no_addresses_and_absent_readiness_is_readiness() {
    let mut named = slice("web", &[("web-1", "10.244.0.1")], 8080);
    named["addressType"] = json!("FQDN");
    assert!(find(&world_with(named, pod("web-1", "10.244.0.1", json!({}))), 80).by_addr.is_empty());
    for (ready, count) in [(json!(null), 1), (json!(true), 1), (json!(false), 0)] {
        let mut object = slice("web", &[("web-1", "10.244.0.1")], 8080);
        object["endpoints"][0]["conditions"] = json!({"ready": ready});
        assert_eq!(
            find(&world_with(object, pod("web-1", "10.244.0.1", json!({}))), 80).by_addr.len(),
            count,
            "{ready}"
        );
    }
}

#[test]
fn endpoints_without_ports_have_no_undeclared_ones_either() {
    let mut portless = slice("web", &[("web-1", "10.244.0.1")], 8080);
    let pod = || pod("web-1", "10.244.0.1", json!({}));
    assert_eq!(addrs(&find(&world_with(portless.clone(), pod()), 9999)), ["10.244.0.1:9999"]);
    portless["ports"] = json!(null);
    assert!(find(&world_with(portless, pod()), 9999).by_addr.is_empty());
}

#[test]
fn a_pod_without_an_account_has_the_default_one() {
    let pod = pod("web-1", "10.244.0.1", json!({"spec": {"serviceAccountName": ""}}));
    let found = find(&world_with(slice("web", &[("web-1", "10.244.0.1")], 8080), pod), 80);
    let identity = "default.shop.serviceaccount.identity.linkerd.cluster.local".to_owned();
    let endpoint = &found.by_addr[&addr("10.244.0.1:8080")];
    assert_eq!(endpoint.identity, Some(PeerIdentity::ServiceAccount(identity)));
    assert_eq!(endpoint.labels["serviceaccount"], "default");
}

#[test]
fn the_proxys_own_ports_are_reached_without_a_transport_header() {
    for (port, expected) in [(8080, Some(4143)), (4191, None), (4190, None)] {
        let object = slice("web", &[("web-1", "10.244.0.1")], port);
        let found = find(&world_with(object, pod("web-1", "10.244.0.1", json!({}))), 80);
        let endpoint = found.by_addr.values().next().unwrap();
        assert_eq!((endpoint.transport_port, endpoint.identity.is_some()), (expected, true), "{port}");
    }
}

#[test]
fn without_ipv6_only_pods_lose_their_ipv6_addresses() {
    let mut v6 = slice("web", &[("web-1", "fd00::1"), ("vm", "fd00::2"), ("", "fd00::3")], 8080);
    v6["addressType"] = json!("IPv6");
    v6["endpoints"][1]["targetRef"]["kind"] = json!("ExternalWorkload");
    v6["endpoints"][2].as_object_mut().unwrap().remove("targetRef");
    let world = world_with(v6, pod("web-1", "10.244.0.1", json!({})));
    world.apply(super::destination::external("fd00::2"));
    assert_eq!(addrs(&find(&world, 80)), ["[fd00::2]:8080", "[fd00::3]:8080"]);
}

#[test]
fn only_a_profile_names_the_namespace_of_a_workload() {
    let mut machine = slice("web", &[("vm", "192.0.2.1")], 8080);
    machine["endpoints"][0]["targetRef"]["kind"] = json!("ExternalWorkload");
    let world = world_with(machine, super::destination::external("192.0.2.1"));
    assert_eq!(find(&world, 80).by_addr[&addr("192.0.2.1:8080")].labels.get("namespace"), None);
    let profile = world.index().watch_endpoint_profile(addr("192.0.2.1:8080")).unwrap().borrow().clone().unwrap();
    assert_eq!(profile.endpoint.labels["namespace"], "shop");
}

#[test]
fn an_address_that_moves_to_another_pod_is_announced_again() {
    let world = world_with(slice("web", &[("web-1", "10.244.0.1")], 8080), pod("web-1", "10.244.0.1", json!({})));
    let mut rx = world.index().watch_endpoints(&web(), EndpointsQuery { port: 80, node: None, hostname: None });
    world.apply_all([pod("web-2", "10.244.0.1", json!({})), slice("web", &[("web-2", "10.244.0.1")], 8080)]);
    assert_eq!(changed(&mut rx).unwrap().by_addr[&addr("10.244.0.1:8080")].labels["pod"], "web-2");
}

#[test]
fn a_pods_dns_name_leads_to_its_address() {
    let named = |ip: &str| {
        let mut named = slice("web", &[("web-1", "10.244.0.1"), ("web-2", ip)], 8080);
        merge(&mut named["endpoints"][1], json!({"hostname": "web-2"}));
        named
    };
    let world = world_with(named("10.244.0.2"), pod("web-2", "10.244.0.2", json!({})));
    let mut rx = world.index().watch_pod_of_service(&web(), "web-2").unwrap();
    assert_eq!(*rx.borrow(), Some("10.244.0.2".parse().unwrap()));
    assert!(world.index().watch_pod_of_service(&web(), "web-1").is_none());
    world.apply(named("10.244.0.3"));
    assert_eq!(changed(&mut rx), Some(Some("10.244.0.3".parse().unwrap())));
    world.delete(Kind::EndpointSlice, "shop", "web-1");
    assert_eq!(changed(&mut rx), Some(None));
    assert!(world.index().watch_pod_of_service(&web(), "web-2").is_none());
}

#[test]
fn the_profile_of_an_address_ends_when_a_service_gets_it() {
    let world = World::new();
    let before = world.index().watch_endpoint_profile(addr("10.96.0.1:80")).unwrap();
    let ends = |rx: &watch::Receiver<_>| rx.has_changed().is_err();
    world.apply(service("web", "10.96.0.2", json!({})));
    assert!(!ends(&before), "it has another address");
    world.apply(service("web", "10.96.0.1", json!({})));
    assert!(ends(&before));
}

#[test]
fn the_profile_of_an_address_follows_servers() {
    let world = World::new();
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    let mut rx = world.index().watch_endpoint_profile(addr("10.244.0.1:8080")).unwrap();
    let server = |port: u16| {
        json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server", "metadata": {"name": "s", "namespace": "shop"},
            "spec": {"podSelector": {}, "port": port, "proxyProtocol": "opaque"}})
    };
    world.apply(server(8080));
    assert!(changed(&mut rx).unwrap().unwrap().opaque);
    world.apply(server(1));
    assert!(!changed(&mut rx).unwrap().unwrap().opaque);
    world.apply(server(8080));
    assert!(changed(&mut rx).unwrap().unwrap().opaque);
    world.delete(Kind::Server, "shop", "s");
    assert!(!changed(&mut rx).unwrap().unwrap().opaque);
}
