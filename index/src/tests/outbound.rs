//! Outbound policies of addresses and names: Services, their ports, EgressNetworks, and how changes reach open views.

use weft_k8s_api::policy::TrafficPolicy;

use super::*;

pub(super) type Watch = OptionalView<OutboundPolicy>;

pub(super) fn watch(world: &World, target: &str, namespace: &str) -> Watch {
    world.index().watch_outbound(addr(target), namespace).unwrap()
}

/// The policy of a destination that routes can be attached to.
pub(super) fn parent(rx: &Watch) -> ParentPolicy {
    match value(&rx.borrow()) {
        Some(OutboundPolicy::Parent(policy)) => (**policy).clone(),
        other => panic!("{other:?}"),
    }
}

/// The protocol, the routes in force and where everything else goes, in a few words.
pub(super) fn shown(policy: Option<&OutboundPolicy>) -> String {
    let policy = match policy {
        None => return "none".to_owned(),
        Some(OutboundPolicy::UndefinedPort { service }) => return format!("undefined {service}"),
        Some(OutboundPolicy::Egress { addr }) => return format!("egress {addr}"),
        Some(OutboundPolicy::Parent(policy)) => policy,
    };
    let ids = |ids: Vec<&RouteId>| ids.iter().map(|id| format!(" {}", id.key)).collect::<String>();
    let (protocol, routes) = match &policy.protocol {
        OutboundProtocol::Detect(routes) => ("Detect", ids(routes.iter().map(|route| &route.id).collect())),
        OutboundProtocol::Http1(routes) => ("Http1", ids(routes.iter().map(|route| &route.id).collect())),
        OutboundProtocol::Http2(routes) => ("Http2", ids(routes.iter().map(|route| &route.id).collect())),
        OutboundProtocol::Grpc(routes) => ("Grpc", ids(routes.iter().map(|route| &route.id).collect())),
        OutboundProtocol::Tls(routes) => ("Tls", ids(routes.iter().map(|route| &route.id).collect())),
        OutboundProtocol::Opaque(routes) => ("Opaque", ids(routes.iter().map(|route| &route.id).collect())),
    };
    let parent = match &policy.parent {
        OutboundParent::Service(port) => port.authority.clone(),
        OutboundParent::EgressNetwork { network, policy: TrafficPolicy::Allow, .. } => format!("allow {network}"),
        OutboundParent::EgressNetwork { network, policy: TrafficPolicy::Deny, .. } => format!("deny {network}"),
    };
    format!("{protocol} {parent}{routes}")
}

/// The answer to a client of a namespace.
pub(super) fn ask(world: &World, target: &str, namespace: &str) -> String {
    let found = world.index().watch_outbound(addr(target), namespace);
    shown(value(&found.and_then(|rx| rx.borrow().clone())))
}

pub(super) fn egress_network(namespace: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "policy.linkerd.io/v1alpha1", "kind": "EgressNetwork",
        "metadata": {"name": name, "namespace": namespace}, "spec": spec})
}

fn allow(cidr: &str) -> Value {
    json!({"trafficPolicy": "Allow", "networks": [{"cidr": cidr}]})
}

#[test]
fn outbound_by_address() {
    let world = World::new();
    let ports = json!([
        {"name": "http", "port": 80}, {"name": "mysql", "port": 3306}, {"name": "mysql-http", "port": 4444, "appProtocol": "http"},
        {"name": "h1", "port": 81, "appProtocol": "http"}, {"name": "h2", "port": 82, "appProtocol": "kubernetes.io/h2c"},
        {"name": "tcp", "port": 83, "appProtocol": "linkerd.io/tcp"}, {"name": "opaque", "port": 84, "appProtocol": "linkerd.io/opaque"},
        {"name": "other", "port": 85, "appProtocol": "mongo"}, {"name": "udp", "port": 86, "protocol": "UDP"}]);
    world.apply(service("web", "10.96.0.1", json!({"ports": ports})));
    for (target, expected) in [
        ("10.96.0.1:80", "Detect web.shop.svc.cluster.local:80"),
        ("10.96.0.1:3306", "Opaque web.shop.svc.cluster.local:3306"),
        ("10.96.0.1:4444", "Http1 web.shop.svc.cluster.local:4444"),
        ("10.96.0.1:81", "Http1 web.shop.svc.cluster.local:81"),
        ("10.96.0.1:82", "Http2 web.shop.svc.cluster.local:82"),
        ("10.96.0.1:83", "Opaque web.shop.svc.cluster.local:83"),
        ("10.96.0.1:84", "Opaque web.shop.svc.cluster.local:84"),
        ("10.96.0.1:85", "Opaque web.shop.svc.cluster.local:85"),
        ("10.96.0.1:86", "undefined shop/web"),
        ("10.96.0.1:9", "undefined shop/web"),
        ("10.244.0.1:80", "none"),
        ("93.184.216.34:443", "egress 93.184.216.34:443"),
    ] {
        assert_eq!(ask(&world, target, "shop"), expected, "{target}");
    }
}

#[test]
fn outbound_watchers_follow_the_service() {
    let world = World::new();
    assert!(world.index().watch_outbound(addr("10.96.0.1:80"), "shop").is_none());
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut rx = watch(&world, "10.96.0.1:80", "shop");
    assert!(matches!(parent(&rx).parent, OutboundParent::Service(port) if port.port == 80));
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"port": 81}]})));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), "undefined shop/web");
    world.apply(service("web", "10.96.0.9", json!({})));
    assert!(rx.has_changed().is_err(), "the address is no longer the Service's, so clients ask again");
    assert_eq!(ask(&world, "10.96.0.1:80", "shop"), "none");
    assert_eq!(ask(&world, "10.96.0.9:80", "shop"), "Detect web.shop.svc.cluster.local:80");
}

#[test]
fn outbound_by_name_needs_no_service_yet() {
    let world = World::new();
    let mut rx = world.index().watch_outbound_name(&Key::new("shop", "web"), 81, "shop");
    assert_eq!(shown(value(&rx.borrow_and_update())), "Detect web.shop.svc.cluster.local:81");
    world.apply(service("web", "10.96.0.1", json!({})));
    assert!(changed(&mut rx).is_none(), "by name, the port need not be declared");
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"port": 81, "appProtocol": "http"}]})));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), "Http1 web.shop.svc.cluster.local:81");
}

#[test]
fn undeclared_ports_of_an_address_share_one_view() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let views: Vec<_> = (1..50).map(|port| watch(&world, &format!("10.96.0.1:{port}"), "shop")).collect();
    assert_eq!(world.index().outbound_subscriptions(), 1);
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"port": 80}, {"port": 7}]})));
    assert!(views.iter().all(|view| view.has_changed().is_err()), "one of them may be declared now");
    assert_eq!(ask(&world, "10.96.0.1:7", "shop"), "Detect web.shop.svc.cluster.local:7");
    assert_eq!(ask(&world, "10.96.0.1:8", "shop"), "undefined shop/web");
}

#[test]
fn traffic_annotations_of_a_service_apply_to_its_ports() {
    let world = World::new();
    let annotated = |annotations: Value| {
        let mut object = service("web", "10.96.0.1", json!({"ports": [{"port": 80}, {"port": 3306, "name": "db"}]}));
        merge(&mut object, json!({"metadata": {"annotations": annotations}}));
        object
    };
    world.apply(annotated(json!({"timeout.linkerd.io/request": "3s", "retry.linkerd.io/http": "5xx",
        "retry.linkerd.io/grpc": "internal", "balancer.linkerd.io/failure-accrual": "unified",
        "balancer.alpha.linkerd.io/failure-accrual-honor-retry-after": "true",
        "balancer.alpha.linkerd.io/penalize-failures": "true"})));
    let rx = watch(&world, "10.96.0.1:80", "shop");
    let policy = parent(&rx);
    assert_eq!(policy.timeouts.request.unwrap().as_secs(), 3);
    assert!(policy.http_retry.is_some() && policy.grpc_retry.is_some() && policy.honor_retry_after);
    assert!(policy.accrual.unwrap().success_rate.is_some() && policy.load_bias.is_some());
    let opaque = parent(&watch(&world, "10.96.0.1:3306", "shop"));
    assert!(opaque.accrual.is_some() && opaque.load_bias.is_none(), "connections have no failed responses");

    let bad = annotated(json!({"timeout.linkerd.io/request": "3", "retry.linkerd.io/limit": "many",
        "balancer.linkerd.io/failure-accrual": "sometimes"}));
    let object = manifest::parse("test.json".as_ref(), &bad.to_string()).objects.into_iter().next().unwrap().object;
    let problems = world.index().apply(vec![Event::Apply(Box::new(object))]).problems;
    let named: Vec<_> = problems.iter().map(|problem| problem.problem.as_str()).collect();
    for annotation in ["timeout.linkerd.io/request", "retry.linkerd.io/limit", "balancer.linkerd.io/failure-accrual"] {
        assert_eq!(named.iter().filter(|text| text.contains(annotation)).count(), 1, "{annotation}: {named:?}");
    }
    let policy = parent(&rx);
    assert!(policy.timeouts.request.is_none() && policy.http_retry.is_none() && policy.accrual.is_none());
}

#[test]
fn the_most_specific_egress_network_wins_then_the_oldest_then_by_name() {
    let world = World::new();
    let created = |mut object: Value, time: &str| {
        merge(&mut object, json!({"metadata": {"creationTimestamp": time}}));
        object
    };
    let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
    world.apply_all([
        created(egress_network("shop", "all", json!({"trafficPolicy": "Deny"})), early),
        created(egress_network("shop", "narrow", allow("93.184.0.0/16")), late),
        created(egress_network("shop", "old", allow("93.184.216.0/24")), early),
        created(egress_network("shop", "a-new", allow("93.184.216.0/24")), late),
        created(egress_network("shop", "z-old", allow("93.184.216.0/24")), early),
        created(
            egress_network(
                "shop",
                "cut",
                json!({"trafficPolicy": "Allow", "networks": [{"cidr": "8.8.0.0/16", "except": ["8.8.8.0/24"]}]}),
            ),
            early,
        ),
    ]);
    for (target, expected) in [
        ("93.184.216.34:80", "Detect allow shop/old"),
        ("93.184.1.1:80", "Detect allow shop/narrow"),
        ("93.184.1.1:3306", "Opaque allow shop/narrow"),
        ("8.8.4.4:80", "Detect allow shop/cut"),
        ("8.8.8.8:80", "Detect deny shop/all"),
        ("[2606:4700::1]:80", "Detect deny shop/all"),
        ("10.1.2.3:80", "none"),
    ] {
        assert_eq!(ask(&world, target, "shop"), expected, "{target}");
    }
}

#[test]
fn a_namespaces_own_egress_networks_come_before_those_of_the_cluster() {
    let world = World::new();
    world.apply(egress_network("linkerd-egress", "all", json!({"trafficPolicy": "Deny"})));
    world.apply(egress_network("shop", "dns", allow("8.8.8.8")));
    world.apply(egress_network("other", "all", json!({"trafficPolicy": "Allow"})));
    assert_eq!(ask(&world, "8.8.8.8:80", "shop"), "Detect allow shop/dns");
    assert_eq!(ask(&world, "1.1.1.1:80", "shop"), "egress 1.1.1.1:80", "the others are not considered");
    assert_eq!(ask(&world, "1.1.1.1:80", "ops"), "Detect deny linkerd-egress/all");
    let world = World::with(|cluster| "shop".clone_into(&mut cluster.egress_namespace));
    world.apply(egress_network("shop", "dns", allow("8.8.8.8")));
    assert_eq!(ask(&world, "8.8.8.8:80", "ops"), "Detect allow shop/dns");
}

#[test]
fn an_egress_network_that_is_not_accepted_is_not_used_and_an_unreadable_policy_denies() {
    let world = World::new();
    world.apply(egress_network("shop", "overlaps", allow("0.0.0.0/0")));
    assert_eq!(ask(&world, "8.8.8.8:80", "shop"), "egress 8.8.8.8:80");
    assert_eq!(ask(&world, "10.1.2.3:80", "shop"), "none");
    world.apply_unreadable(&egress_network("shop", "typo", json!({"trafficPolicy": "allow"})));
    assert_eq!(ask(&world, "8.8.8.8:80", "shop"), "Detect deny shop/typo");
}

#[test]
fn an_egress_network_with_a_wrong_type_denies_whatever_its_routes_say() {
    let route = |name: &str| {
        json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "HTTPRoute", "metadata": {"name": "r", "namespace": "shop"},
            "spec": {"parentRefs": [{"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": name, "port": 80}]}})
    };
    for (spec, elsewhere) in [
        (json!({"trafficPolicy": 1, "networks": [{"cidr": "8.8.8.8"}]}), "egress 1.1.1.1:80"),
        (json!({"trafficPolicy": "Allow", "networks": ["8.8.8.8"]}), "Detect deny shop/n"),
    ] {
        let world = World::new();
        world.apply(route("n"));
        world.apply_unreadable(&egress_network("shop", "n", spec));
        assert_eq!(ask(&world, "8.8.8.8:80", "shop"), "Detect deny shop/n");
        assert_eq!(ask(&world, "1.1.1.1:80", "shop"), elsewhere);
        world.apply(egress_network("shop", "n", allow("8.8.8.8")));
        assert_ne!(ask(&world, "8.8.8.8:80", "shop"), "Detect deny shop/n");
    }
}

#[test]
fn open_views_of_addresses_outside_follow_egress_networks() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let (mut rx, other) = (watch(&world, "8.8.8.8:80", "shop"), watch(&world, "8.8.8.8:80", "ops"));
    let mut web = watch(&world, "10.96.0.1:80", "shop");
    assert_eq!(world.index().outbound_subscriptions(), 2, "namespaces do not count yet");
    world.apply(egress_network("linkerd-egress", "all", json!({"trafficPolicy": "Deny"})));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), "Detect deny linkerd-egress/all");
    world.apply(egress_network("shop", "dns", allow("8.8.8.8")));
    assert!(
        rx.has_changed().is_err() && other.has_changed().is_err(),
        "one of them is of the namespace that counts now"
    );
    let (mut rx, mut other) = (watch(&world, "8.8.8.8:80", "shop"), watch(&world, "8.8.8.8:80", "ops"));
    assert_eq!(shown(value(&rx.borrow_and_update())), "Detect allow shop/dns");
    assert_eq!(shown(value(&other.borrow_and_update())), "Detect deny linkerd-egress/all");
    world.apply(egress_network("shop", "dns", json!({"trafficPolicy": "Deny", "networks": [{"cidr": "8.8.8.8"}]})));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), "Detect deny shop/dns");
    assert!(changed(&mut other).is_none() && changed(&mut web).is_none());
    world.delete(Kind::EgressNetwork, "shop", "dns");
    assert!(rx.has_changed().is_err() && other.has_changed().is_ok());
    assert_eq!(ask(&world, "8.8.8.8:80", "shop"), "Detect deny linkerd-egress/all");
    world.delete(Kind::EgressNetwork, "linkerd-egress", "all");
    assert_eq!(shown(value(&changed(&mut other).unwrap())), "egress 8.8.8.8:80");
}
