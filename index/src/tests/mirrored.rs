//! Services that a service mirror made for those of another cluster.

use super::*;

/// The slice of a mirrored Service; `change` is merged over its metadata.
fn mirror(change: Value) -> Value {
    let mut object = slice("web-east", &[("gateway", "192.0.2.1")], 4143);
    object["endpoints"][0].as_object_mut().unwrap().remove("targetRef");
    merge(
        &mut object,
        json!({"metadata": {"labels": {"mirror.linkerd.io/cluster-name": "east"}, "annotations": {
            "mirror.linkerd.io/remote-gateway-identity": "linkerd-gateway.linkerd-multicluster.serviceaccount.identity.linkerd.east.local",
            "mirror.linkerd.io/remote-svc-fq-name": "web.shop.svc.east.local"}}}),
    );
    merge(&mut object, json!({"metadata": change}));
    object
}

fn endpoints(world: &World) -> Arc<Snapshot<Endpoints>> {
    let query = EndpointsQuery { port: 80, node: None, hostname: None };
    world.index().watch_endpoints(&Key::new("shop", "web-east"), query).borrow().clone()
}

#[test]
fn a_mirrored_service_is_reached_by_its_gateway() {
    let world = World::new();
    world.apply_all([service("web-east", "10.96.0.9", json!({})), mirror(json!({}))]);
    let found = endpoints(&world);
    let endpoint = &found.by_addr[&addr("192.0.2.1:4143")];
    let gateway = "linkerd-gateway.linkerd-multicluster.serviceaccount.identity.linkerd.east.local".to_owned();
    assert_eq!(endpoint.identity, Some(PeerIdentity::Gateway(gateway)));
    assert_eq!((endpoint.hint, endpoint.http2, endpoint.transport_port), (Hint::H2, true, None));
    assert_eq!(endpoint.authority_override.as_deref(), Some("web.shop.svc.east.local:80"), "the Service's port");
    let label = |name: &str| found.labels.get(name).map(String::as_str);
    assert_eq!((label("service"), label("namespace")), (Some("web-east"), Some("shop")));
    assert_eq!(
        (label("target_cluster"), label("target_service"), label("target_service_namespace")),
        (Some("east"), Some("web"), Some("shop"))
    );
}

#[test]
fn a_gateway_without_identity_is_reached_in_plain_text_by_the_same_authority() {
    let world = World::new();
    world.apply_all([
        service("web-east", "10.96.0.9", json!({})),
        mirror(json!({"annotations": {"mirror.linkerd.io/remote-gateway-identity": ""}})),
    ]);
    let found = endpoints(&world);
    let endpoint = &found.by_addr[&addr("192.0.2.1:4143")];
    assert_eq!((endpoint.identity.as_ref(), endpoint.hint, endpoint.http2), (None, Hint::Unknown, false));
    assert_eq!(endpoint.authority_override.as_deref(), Some("web.shop.svc.east.local:80"));
}

#[test]
fn target_labels_name_as_much_as_is_known() {
    for (metadata, expected) in [
        (json!({"labels": {"mirror.linkerd.io/cluster-name": null}, "annotations": {}}), &["namespace", "service"][..]),
        (
            json!({"annotations": {"mirror.linkerd.io/remote-svc-fq-name": "web"}}),
            &["namespace", "service", "target_cluster"],
        ),
    ] {
        let world = World::new();
        let mut object = mirror(metadata);
        let labels = object["metadata"]["labels"].as_object_mut().unwrap();
        labels.retain(|_, value| !value.is_null());
        world.apply_all([service("web-east", "10.96.0.9", json!({})), object]);
        assert_eq!(endpoints(&world).labels.keys().collect::<Vec<_>>(), expected);
    }
}

#[test]
fn an_address_without_a_mirror_is_a_bare_one() {
    let world = World::new();
    let mut object = mirror(json!({}));
    object["metadata"]["annotations"] = json!({});
    world.apply_all([service("web-east", "10.96.0.9", json!({})), object]);
    let found = endpoints(&world);
    assert_eq!(**found.by_addr[&addr("192.0.2.1:4143")], Endpoint::plain(addr("192.0.2.1:4143")));
}

#[test]
fn a_gateway_that_changes_is_announced_again() {
    let world = World::new();
    world.apply_all([service("web-east", "10.96.0.9", json!({})), mirror(json!({}))]);
    let query = EndpointsQuery { port: 80, node: None, hostname: None };
    let mut rx = world.index().watch_endpoints(&Key::new("shop", "web-east"), query);
    world.apply(mirror(json!({"annotations": {"mirror.linkerd.io/remote-gateway-identity": "other"}})));
    let identity = changed(&mut rx).unwrap().by_addr[&addr("192.0.2.1:4143")].identity.clone();
    assert_eq!(identity, Some(PeerIdentity::Gateway("other".to_owned())));
}
