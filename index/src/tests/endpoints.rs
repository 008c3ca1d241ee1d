//! Settings of discovery: where endpoints are listed, and upgrades.

use super::*;

fn query() -> EndpointsQuery {
    EndpointsQuery { port: 80, node: None, hostname: None }
}

fn web() -> Key {
    Key::new("shop", "web")
}

/// Endpoints of `web`: one subset for each list of addresses, of which those with a name are pods.
fn endpoints_object(subsets: &[(u16, &[(&str, &str)])]) -> Value {
    let subsets: Vec<_> = subsets
        .iter()
        .map(|(port, addresses)| {
            let address = |(pod, ip): &(&str, &str)| match *pod {
                "" => json!({"ip": ip}),
                pod => {
                    json!({"ip": ip, "nodeName": "n", "targetRef": {"kind": "Pod", "name": pod, "namespace": "shop"}})
                }
            };
            let ports = json!([{"name": "http", "port": port}, {"name": "dns", "port": 53, "protocol": "UDP"}]);
            json!({"addresses": addresses.iter().map(address).collect::<Vec<_>>(), "ports": ports,
                "notReadyAddresses": [{"ip": "10.244.0.99"}]})
        })
        .collect();
    json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "web", "namespace": "shop"}, "subsets": subsets})
}

/// `web`, with the annotation about mutual TLS.
fn requiring(ip: &str, value: &str) -> Value {
    let mut object = service("web", ip, json!({}));
    merge(&mut object, json!({"metadata": {"annotations": {"weft.io/require-mtls": value}}}));
    object
}

/// A pod of `web` without a proxy.
fn unmeshed() -> Value {
    pod("web-1", "10.244.0.1", json!({"metadata": {"labels": {"linkerd.io/control-plane-ns": ""}}}))
}

fn of_endpoints() -> World {
    World::with(|cluster| cluster.endpoints_from = EndpointsFrom::Endpoints)
}

#[test]
fn a_service_that_requires_mutual_tls_says_so_of_each_endpoint() {
    let world = World::new();
    world.apply_all([requiring("10.96.0.1", "false"), pod("web-1", "10.244.0.1", json!({}))]);
    world.apply(slice("web", &[("web-1", "10.244.0.1")], 8080));
    let mut rx = world.index().watch_endpoints(&web(), query());
    let label = |found: &Endpoints| found.by_addr[&addr("10.244.0.1:8080")].labels.get("require_mtls").cloned();
    assert_eq!(label(&rx.borrow_and_update()), None);
    for (value, expected) in [("true", true), ("false", false), ("maybe", true)] {
        world.apply(requiring("10.96.0.1", value));
        assert_eq!(label(&changed(&mut rx).unwrap()).is_some(), expected, "{value}");
    }
}

#[test]
fn the_profile_of_a_pods_address_says_that_a_headless_service_requires_mutual_tls() {
    for (is_meshed, pod) in [(false, unmeshed()), (true, pod("web-1", "10.244.0.1", json!({})))] {
        let world = World::new();
        world.apply_all([requiring("None", "false"), pod, slice("web", &[("web-1", "10.244.0.1")], 8080)]);
        let mut rx = world.index().watch_endpoint_profile(addr("10.244.0.1:8080")).unwrap();
        let before = rx.borrow_and_update().clone().unwrap().endpoint.clone();
        assert_eq!((before.identity.is_some(), before.labels.get("require_mtls")), (is_meshed, None));
        let mut requires = || {
            let mut found = changed(&mut rx).unwrap().unwrap().endpoint.clone();
            let label = found.labels.remove("require_mtls");
            assert_eq!(found, before, "nothing else differs");
            label.is_some()
        };
        for (value, expected) in [("true", true), ("false", false), ("maybe", true)] {
            world.apply(requiring("None", value));
            assert_eq!(requires(), expected, "{value}");
        }
        world.delete(Kind::Service, "shop", "web");
        assert!(!requires());
    }
}

#[test]
fn the_profile_of_a_pods_address_requires_mutual_tls_while_the_service_lists_the_pod_ready_or_not() {
    let of_slice = slice("web", &[("web-1", "10.244.0.1")], 8080);
    let mut unready_slice = of_slice.clone();
    unready_slice["endpoints"][0]["conditions"] = json!({"ready": false});
    let of_subset = endpoints_object(&[(8080, &[("web-1", "10.244.0.1")])]);
    let mut unready_subset = of_subset.clone();
    unready_subset["subsets"][0]["notReadyAddresses"] = of_subset["subsets"][0]["addresses"].clone();
    unready_subset["subsets"][0]["addresses"] = json!([]);
    for (world, ready, unready, kind, name) in [
        (World::new(), of_slice, unready_slice, Kind::EndpointSlice, "web-1"),
        (of_endpoints(), of_subset, unready_subset, Kind::Endpoints, "web"),
    ] {
        world.apply_all([requiring("None", "true"), unmeshed()]);
        let mut rx = world.index().watch_endpoint_profile(addr("10.244.0.1:9090")).unwrap();
        let requires =
            |found: Option<Arc<Snapshot<EndpointProfile>>>| found.unwrap().endpoint.labels.contains_key("require_mtls");
        assert!(!requires(rx.borrow_and_update().clone()), "{kind}");
        world.apply(unready);
        assert!(requires(changed(&mut rx).unwrap()), "{kind}");
        world.apply(ready);
        assert!(changed(&mut rx).is_none(), "{kind}");
        world.delete(kind, "shop", name);
        assert!(!requires(changed(&mut rx).unwrap()), "{kind}");
    }
}

#[test]
fn endpoints_objects_list_endpoints_where_slices_do_not() {
    let world = of_endpoints();
    world.apply_all([service("web", "10.96.0.1", json!({})), pod("web-1", "10.244.0.1", json!({}))]);
    let mut rx = world.index().watch_endpoints(&web(), query());
    world.apply(endpoints_object(&[(8080, &[("web-1", "10.244.0.1")]), (9090, &[("", "192.0.2.1")])]));
    let found = changed(&mut rx).unwrap();
    let (meshed, bare) = (&found.by_addr[&addr("10.244.0.1:8080")], &found.by_addr[&addr("192.0.2.1:9090")]);
    assert_eq!(found.by_addr.len(), 2, "each subset has its own port: {found:?}");
    assert!(meshed.identity.is_some() && bare.identity.is_none());
    // A subset less, then none.
    world.apply(endpoints_object(&[(8080, &[("web-1", "10.244.0.1")])]));
    assert_eq!(changed(&mut rx).unwrap().by_addr.len(), 1);
    world.delete(Kind::Endpoints, "shop", "web");
    assert!(changed(&mut rx).unwrap().by_addr.is_empty());
    assert!(world.index().watch_endpoints(&web(), query()).borrow().by_addr.is_empty());
}

#[test]
fn a_mirrored_service_is_read_from_endpoints_objects_too() {
    let world = of_endpoints();
    let mut object = endpoints_object(&[(4143, &[("", "192.0.2.1")])]);
    let metadata = json!({"labels": {"mirror.linkerd.io/cluster-name": "east"}, "annotations": {
        "mirror.linkerd.io/remote-gateway-identity": "gateway", "mirror.linkerd.io/remote-svc-fq-name": "api.back.svc.x"}});
    merge(&mut object, json!({"metadata": metadata}));
    world.apply_all([service("web", "10.96.0.1", json!({})), object]);
    let found = world.index().watch_endpoints(&web(), query()).borrow().clone();
    let endpoint = &found.by_addr[&addr("192.0.2.1:4143")];
    assert_eq!(endpoint.identity, Some(PeerIdentity::Gateway("gateway".to_owned())));
    assert_eq!(endpoint.authority_override.as_deref(), Some("api.back.svc.x:80"));
    assert_eq!((found.labels["target_cluster"].as_str(), found.labels["target_service"].as_str()), ("east", "api"));
}

#[test]
fn objects_that_the_settings_exclude_are_reported_and_not_read() {
    let by_slice = slice("web", &[("web-1", "10.244.0.1")], 8080);
    let by_endpoints = endpoints_object(&[(8080, &[("web-1", "10.244.0.1")])]);
    for (world, object, kind) in
        [(World::new(), by_endpoints, "Endpoints"), (of_endpoints(), by_slice, "EndpointSlice")]
    {
        world.apply_all([service("web", "10.96.0.1", json!({})), pod("web-1", "10.244.0.1", json!({}))]);
        let read = manifest::parse("test.json".as_ref(), &object.to_string()).objects.remove(0).object;
        let problems = world.index().apply(vec![Event::Apply(Box::new(read))]).problems;
        assert!(problems.len() == 1 && problems[0].object.starts_with(kind), "{problems:?}");
        assert!(world.index().watch_endpoints(&web(), query()).borrow().by_addr.is_empty());
    }
}

#[test]
fn without_upgrades_a_meshed_endpoint_has_a_hint_without_a_protocol() {
    let world = World::with(|cluster| cluster.h2_upgrade = false);
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        pod("web-1", "10.244.0.1", json!({})),
        slice("web", &[("web-1", "10.244.0.1")], 8080),
    ]);
    let found = world.index().watch_endpoints(&web(), query()).borrow().clone();
    let endpoint = &found.by_addr[&addr("10.244.0.1:8080")];
    assert_eq!((endpoint.hint, endpoint.transport_port), (Hint::Detect, Some(4143)));
    assert!(endpoint.http2 && endpoint.identity.is_some());
    world.apply(pod(
        "web-1",
        "10.244.0.1",
        json!({"metadata": {"annotations": {"config.linkerd.io/opaque-ports": "8080"}}}),
    ));
    let found = world.index().watch_endpoints(&web(), query()).borrow().clone();
    assert_eq!(found.by_addr[&addr("10.244.0.1:8080")].hint, Hint::Opaque, "opaque is not a matter of upgrades");
}
