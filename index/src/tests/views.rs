//! Which clients share a view of a Service's endpoints, when they have to ask again, and what is not kept.

use super::{
    destination::{addrs, key, node, on_node, web},
    *,
};

#[test]
fn clients_share_a_subscription_unless_their_answers_can_differ() {
    let world = World::new();
    world.apply_all([node("a-1", "a"), node("a-2", "a"), node("b-1", "b")]);
    world.apply(service("web", "10.96.0.1", json!({})));
    let names = ["a-1", "a-2", "b-1"].map(str::to_owned).into_iter().chain((0..1000).map(|n| format!("none-{n}")));
    let queries: Vec<_> = names.map(|name| on_node(&name)).collect();
    let clients: Vec<_> = queries.iter().map(|query| world.index().watch_endpoints(&web(), query.clone())).collect();
    assert_eq!(world.index().endpoints_subscriptions(), 3, "two zones, and nodes that are not known");
    drop(clients);
    world.apply(service("web", "10.96.0.1", json!({"internalTrafficPolicy": "Local"})));
    let _clients: Vec<_> = queries.into_iter().map(|query| world.index().watch_endpoints(&web(), query)).collect();
    assert_eq!(world.index().endpoints_subscriptions(), 4, "three nodes, and those that are not known");
}

#[test]
fn a_service_has_few_views_of_ports_that_it_does_not_declare() {
    let world = World::new();
    assert!(world.index().has_room_for(&web(), 1), "a Service that does not exist has no endpoints");
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut open = Vec::new();
    for port in 1000..1008 {
        assert!(world.index().has_room_for(&web(), port));
        open.push(world.index().watch_endpoints(&web(), key(port)));
    }
    assert!(!world.index().has_room_for(&web(), 1008));
    assert!(world.index().has_room_for(&web(), 80), "a declared port");
    assert!(world.index().has_room_for(&web(), 1007), "a port that others ask for");
    open.pop();
    assert!(world.index().has_room_for(&web(), 1008), "once another is no longer asked for");
}

#[test]
fn views_of_a_service_share_their_endpoints_and_an_update_keeps_those_that_did_not_change() {
    let world = World::new();
    let mut placed = slice("web", &[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")], 8080);
    merge(&mut placed["endpoints"][0], json!({"zone": "a"}));
    world.apply_all([node("n-a", "a"), node("n-b", "b"), service("web", "10.96.0.1", json!({})), placed]);
    world.apply_all([pod("web-1", "10.244.0.1", json!({})), pod("web-2", "10.244.0.2", json!({}))]);
    let mut views: Vec<_> = ["n-a", "n-b"].map(|n| world.index().watch_endpoints(&web(), on_node(n))).into();
    let at = |view: &View<Endpoints>, at: &str| view.borrow().by_addr[&addr(at)].clone();
    let localities: Vec<_> = views.iter().map(|view| view.borrow().locality(&at(view, "10.244.0.1:8080"))).collect();
    assert_eq!(localities, [Locality::Local, Locality::Remote]);
    let (first, second) = (at(&views[0], "10.244.0.1:8080"), at(&views[0], "10.244.0.2:8080"));
    world.apply(pod("web-2", "10.244.0.2", json!({"spec": {"serviceAccountName": "other"}})));
    for view in &mut views {
        assert!(changed(view).is_some());
        assert!(Arc::ptr_eq(&at(view, "10.244.0.1:8080"), &first));
        assert!(!Arc::ptr_eq(&at(view, "10.244.0.2:8080"), &second));
    }
    assert!(Arc::ptr_eq(&at(&views[0], "10.244.0.2:8080"), &at(&views[1], "10.244.0.2:8080")));
}

#[test]
fn clients_ask_again_when_their_place_counts_differently() {
    let world = World::new();
    let mut placed = slice("web", &[("web-1", "10.244.0.1")], 8080);
    merge(&mut placed["endpoints"][0], json!({"nodeName": "n"}));
    world.apply_all([node("z", "a"), service("web", "10.96.0.1", json!({})), pod("web-1", "10.244.0.1", json!({}))]);
    let ended = |rx: &View<Endpoints>| rx.has_changed().is_err();
    let (zoned, unknown) = (on_node("z"), on_node("n"));
    let watch = |query: &EndpointsQuery| world.index().watch_endpoints(&web(), query.clone());
    let (in_zone, on_unknown) = (watch(&zoned), watch(&unknown));
    world.apply(node("z", "b"));
    assert!(!ended(&in_zone) && !ended(&on_unknown), "a known node that moves ends nothing, as in Linkerd");
    world.apply(node("y", "a"));
    assert!(!ended(&in_zone) && ended(&on_unknown), "the new node could be the client's");
    // From here on, only endpoints on the client's node count.
    world.apply(service("web", "10.96.0.1", json!({"internalTrafficPolicy": "Local"})));
    assert!(ended(&in_zone));
    let (in_zone, on_unknown) = (watch(&zoned), watch(&unknown));
    let nowhere = world.index().watch_endpoints(&web(), key(80));
    world.apply(placed);
    assert!(!ended(&nowhere), "a client that names no node counts the same for every Service");
    assert!(
        !ended(&in_zone) && ended(&on_unknown),
        "a node with an endpoint exists, whether its object is known or not"
    );
    assert_eq!(addrs(&watch(&unknown).borrow()), ["10.244.0.1:8080"]);
    assert!(watch(&zoned).borrow().by_addr.is_empty());
    world.apply(service("web", "10.96.0.1", json!({})));
    assert!(ended(&in_zone));
}

#[test]
fn a_namespace_without_policies_leaves_nothing() {
    let world = World::new();
    let server = super::policy::target("s");
    let policies = [
        (Kind::Server, "v1beta3", json!({"podSelector": {}, "port": 8080})),
        (Kind::ServerAuthorization, "v1beta1", json!({"server": {"name": "s"}, "client": {"unauthenticated": true}})),
        (Kind::AuthorizationPolicy, "v1alpha1", json!({"targetRef": server, "requiredAuthenticationRefs": []})),
        (Kind::MeshTLSAuthentication, "v1alpha1", json!({"identities": ["*"]})),
        (Kind::NetworkAuthentication, "v1alpha1", json!({"networks": [{"cidr": "10.0.0.0/8"}]})),
        (Kind::HttpLocalRateLimitPolicy, "v1alpha1", json!({"targetRef": server, "total": {"requestsPerSecond": 1}})),
    ];
    for (kind, version, spec) in &policies {
        world.apply(super::policy::rule(kind.name(), version, "x", spec.clone()));
    }
    for (kind, ..) in &policies {
        assert_eq!(world.index().store.namespaces.len(), 1, "before the last {kind} is deleted");
        world.delete(*kind, "shop", "x");
    }
    world.delete(Kind::Server, "ops", "never-there");
    assert!(world.index().store.namespaces.is_empty());
}
