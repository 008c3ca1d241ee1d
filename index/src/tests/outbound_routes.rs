//! Routes of Services and EgressNetworks: which are in force for which client, and what they say.

use std::time::Duration;

use weft_k8s_api::policy::traffic::StatusRange;

use super::{
    outbound::{ask, egress_network, parent, shown, watch},
    *,
};

const WEB: &str = "10.96.0.1:80";

/// A route of the Service `web` in `shop`; `parent` is merged over the reference.
fn route(kind: &str, namespace: &str, name: &str, parent: Value, spec: Value) -> Value {
    let version = match kind {
        "TLSRoute" | "TCPRoute" => "v1alpha2",
        _ => "v1",
    };
    let mut reference = json!({"group": "core", "kind": "Service", "namespace": "shop", "name": "web"});
    merge(&mut reference, parent);
    let rules = json!([{"backendRefs": [{"name": "web", "namespace": "shop", "port": 80}]}]);
    let mut object = json!({"apiVersion": format!("gateway.networking.k8s.io/{version}"), "kind": kind,
        "metadata": {"name": name, "namespace": namespace}, "spec": {"parentRefs": [reference], "rules": rules}});
    merge(&mut object["spec"], spec);
    object
}

fn http(name: &str, rule: Value) -> Value {
    route("HTTPRoute", "shop", name, json!({}), json!({"rules": [rule]}))
}

fn of_network(namespace: &str, name: &str, port: Value) -> Value {
    json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "namespace": namespace, "name": name, "port": port})
}

fn created(mut object: Value, time: &str) -> Value {
    merge(&mut object, json!({"metadata": {"creationTimestamp": time}}));
    object
}

fn web() -> World {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    world
}

/// The only rule of the only HTTPRoute at `web`.
fn rule(world: &World) -> RequestRule<weft_k8s_api::policy::route::HttpMatch, StatusRange> {
    match parent(&watch(world, WEB, "shop")).protocol {
        OutboundProtocol::Detect(routes) => routes[0].rules[0].clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn producer_routes_are_for_all_clients_and_consumer_routes_for_those_of_their_namespace() {
    let world = web();
    world.apply_all([
        created(route("HTTPRoute", "shop", "c", json!({}), json!({})), "2026-01-03T00:00:00Z"),
        created(route("HTTPRoute", "ops", "b", json!({}), json!({})), "2026-01-02T00:00:00Z"),
        created(route("HTTPRoute", "shop", "a", json!({}), json!({})), "2026-01-03T00:00:00Z"),
        created(route("HTTPRoute", "dev", "d", json!({}), json!({})), "2026-01-04T00:00:00Z"),
    ]);
    for (namespace, expected) in [
        ("shop", " shop/a shop/c"),
        ("none", " shop/a shop/c"),
        ("ops", " ops/b shop/a shop/c"),
        ("dev", " shop/a shop/c dev/d"),
    ] {
        let found = format!("Detect web.shop.svc.cluster.local:80{expected}");
        assert_eq!(ask(&world, WEB, namespace), found, "{namespace}");
        let by_name = world.index().watch_outbound_name(&Key::new("shop", "web"), 80, namespace);
        assert_eq!(shown(value(&by_name.borrow())), found, "{namespace}");
    }
}

#[test]
fn a_clients_namespace_makes_no_view_unless_it_has_routes() {
    let world = web();
    let views: Vec<_> = (0..50).map(|n| watch(&world, WEB, &format!("ns-{n}"))).collect();
    assert_eq!(world.index().outbound_subscriptions(), 1);
    world.apply(route("HTTPRoute", "ns-7", "mine", json!({}), json!({})));
    assert!(views.iter().all(|view| view.has_changed().is_err()), "clients of ns-7 are among them");
    let views: Vec<_> = (0..50).map(|n| watch(&world, WEB, &format!("ns-{n}"))).collect();
    assert_eq!(world.index().outbound_subscriptions(), 2);
    world.apply(route("HTTPRoute", "ns-7", "another", json!({}), json!({})));
    assert!(views.iter().all(|view| view.has_changed().is_ok()), "its first route is what counts");
    world.delete(Kind::GatewayHttpRoute, "ns-7", "mine");
    world.delete(Kind::GatewayHttpRoute, "ns-7", "another");
    let ended: Vec<_> = (0..50).filter(|n| views[*n].has_changed().is_err()).collect();
    assert_eq!(ended, [7]);
}

#[test]
fn grpc_routes_come_before_http_before_tls_before_tcp() {
    let world = web();
    for (kind, expected) in
        [("TCPRoute", "Opaque"), ("TLSRoute", "Tls"), ("HTTPRoute", "Detect"), ("GRPCRoute", "Grpc")]
    {
        world.apply(route(kind, "shop", &kind.to_lowercase(), json!({}), json!({})));
        let found = format!("{expected} web.shop.svc.cluster.local:80 shop/{}", kind.to_lowercase());
        assert_eq!(ask(&world, WEB, "shop"), found);
    }
    world.delete(Kind::GrpcRoute, "shop", "grpcroute");
    assert_eq!(ask(&world, WEB, "shop"), "Detect web.shop.svc.cluster.local:80 shop/httproute");
}

#[test]
fn a_consumer_route_of_a_stronger_kind_is_for_clients_of_its_namespace_alone() {
    let world = web();
    world.apply(route("HTTPRoute", "shop", "a", json!({}), json!({})));
    world.apply(route("GRPCRoute", "dev", "g", json!({}), json!({})));
    // It is in conflict with the route of its own namespace, as within every namespace.
    world.apply(route("HTTPRoute", "dev", "h", json!({}), json!({})));
    let all = || ["shop", "ops", "dev"].map(|of| ask(&world, WEB, of).replace(" web.shop.svc.cluster.local:80", ""));
    assert_eq!(all(), ["Detect shop/a", "Detect shop/a", "Grpc dev/g"]);
    world.apply(route("GRPCRoute", "shop", "p", json!({}), json!({})));
    assert_eq!(all(), ["Grpc shop/p", "Grpc shop/p", "Grpc dev/g shop/p"]);
    world.delete(Kind::GrpcRoute, "shop", "p");
    world.delete(Kind::GrpcRoute, "dev", "g");
    assert_eq!(all(), ["Detect shop/a", "Detect shop/a", "Detect shop/a dev/h"]);
}

#[test]
fn a_consumer_route_does_not_lift_what_an_egress_networks_routes_say_to_others() {
    let world = World::new();
    let at = |kind: &str, namespace: &str| {
        route(kind, namespace, "r", of_network("linkerd-egress", "all", json!(443)), json!({}))
    };
    world.apply_all([
        egress_network("linkerd-egress", "all", json!({"trafficPolicy": "Deny"})),
        at("TLSRoute", "linkerd-egress"),
        at("GRPCRoute", "dev"),
    ]);
    let all = ["shop", "dev"].map(|of| ask(&world, "93.184.216.34:443", of));
    assert_eq!(all, ["Tls deny linkerd-egress/all linkerd-egress/r", "Grpc deny linkerd-egress/all dev/r"]);
}

#[test]
fn a_ports_protocol_says_which_routes_it_has() {
    let world = web();
    let ports = json!([{"name": "a", "port": 80, "appProtocol": "http"}, {"name": "b", "port": 81, "appProtocol": "kubernetes.io/h2c"},
        {"name": "c", "port": 82, "appProtocol": "linkerd.io/opaque"}, {"name": "d", "port": 3306}]);
    world.apply(service("web", "10.96.0.1", json!({"ports": ports})));
    world.apply(route("HTTPRoute", "shop", "http", json!({}), json!({})));
    world.apply(route("TCPRoute", "shop", "tcp", json!({"port": 82}), json!({})));
    world.apply(route("TCPRoute", "shop", "db", json!({"port": 3306}), json!({})));
    let all = || {
        [80, 81, 82, 3306]
            .map(|port| ask(&world, &format!("10.96.0.1:{port}"), "shop").replace("web.shop.svc.cluster.local:", ""))
    };
    // The HTTPRoute is at every port, so the TCPRoutes are in conflict with it.
    assert_eq!(all(), ["Http1 80 shop/http", "Http2 81 shop/http", "Opaque 82", "Opaque 3306"]);
    world.apply(route("HTTPRoute", "shop", "http", json!({"port": 81}), json!({})));
    assert_eq!(all(), ["Http1 80", "Http2 81 shop/http", "Opaque 82 shop/tcp", "Opaque 3306 shop/db"]);
    world.apply(route("GRPCRoute", "shop", "grpc", json!({"port": 81}), json!({})));
    assert_eq!(all(), ["Http1 80", "Grpc 81 shop/grpc", "Opaque 82 shop/tcp", "Opaque 3306 shop/db"]);
}

#[test]
fn a_route_that_is_unreadable_or_not_accepted_is_not_in_force() {
    let world = web();
    let none = "Detect web.shop.svc.cluster.local:80";
    let unknown = json!({"rules": [{"matches": [{"clientCertificate": "x"}]}]});
    world.apply_unreadable(&route("HTTPRoute", "shop", "a", json!({}), unknown));
    assert_eq!(ask(&world, WEB, "shop"), none);
    world.apply(route(
        "HTTPRoute",
        "shop",
        "a",
        json!({"group": "gateway.networking.k8s.io", "kind": "Gateway"}),
        json!({}),
    ));
    assert_eq!(ask(&world, WEB, "shop"), none);
    world.apply(route("HTTPRoute", "shop", "a", json!({}), json!({})));
    assert_eq!(ask(&world, WEB, "shop"), format!("{none} shop/a"));
    let mut rx = world.index().watch_outbound_name(&Key::new("shop", "web"), 80, "shop");
    rx.borrow_and_update();
    world.apply(service("web", "None", json!({})));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), none, "a headless Service has no routes");
    world.delete(Kind::Service, "shop", "web");
    assert_eq!(shown(value(&rx.borrow())), none);
}

#[test]
fn open_views_follow_routes() {
    let world = web();
    let mut rx = watch(&world, WEB, "shop");
    let mut other = world.index().watch_outbound_name(&Key::new("shop", "api"), 80, "shop");
    other.borrow_and_update();
    world.apply(route("HTTPRoute", "shop", "a", json!({}), json!({})));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), "Detect web.shop.svc.cluster.local:80 shop/a");
    world.apply(route("HTTPRoute", "shop", "a", json!({"name": "api"}), json!({})));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), "Detect web.shop.svc.cluster.local:80");
    assert!(changed(&mut other).is_none(), "there is no Service api");
    world.apply(service("api", "10.96.0.2", json!({})));
    assert_eq!(shown(value(&changed(&mut other).unwrap())), "Detect api.shop.svc.cluster.local:80 shop/a");
    world.delete(Kind::GatewayHttpRoute, "shop", "a");
    assert_eq!(shown(value(&changed(&mut other).unwrap())), "Detect api.shop.svc.cluster.local:80");
}

#[test]
fn backends_exist_or_fail() {
    let world = web();
    world.apply_unreadable(&http("a", json!({"backendRefs": [
        {"name": "web", "port": 9, "weight": 90}, {"name": "api", "port": 80, "weight": 0}, {"name": "web"},
        {"group": "example.org", "kind": "Thing", "name": "x"},
        {"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": "e"},
        {"name": "web", "port": 80, "filters": [{"type": "URLRewrite"}]}, {"name": "web", "namespace": "ops", "port": 80}]})));
    let problems = |world: &World| -> Vec<_> {
        rule(world).backends.iter().map(|backend| backend.problem.clone().unwrap_or_default()).collect()
    };
    let mut expected = [
        "",
        "Service not found api",
        "missing port for backend Service web",
        "unsupported backend type example.org Thing",
        "EgressNetwork backends attach to EgressNetwork parents only",
        "unsupported backend filter: URLRewrite filter is not supported",
        "Service not found web",
    ];
    assert_eq!(problems(&world), expected);
    let mut rx = watch(&world, WEB, "shop");
    rx.borrow_and_update();
    world.apply(service("api", "10.96.0.2", json!({})));
    assert!(changed(&mut rx).is_some(), "a backend appeared");
    expected[1] = "";
    assert_eq!(problems(&world), expected);
    world.apply(service("api", "10.96.0.2", json!({"ports": [{"port": 81}]})));
    assert!(changed(&mut rx).is_none(), "the ports of a backend do not count");
    world.delete(Kind::Service, "shop", "api");
    assert!(changed(&mut rx).is_some());
    let backend = &rule(&world).backends[0];
    let named =
        ServicePort { service: Key::new("shop", "web"), port: 9, authority: "web.shop.svc.cluster.local:9".to_owned() };
    assert_eq!((backend.weight, &backend.resource), (90, &Some(BackendResource::Service(named))));
}

/// Where grants are required, also routes that are consumers' ask the namespace of the backend.
#[test]
fn a_backend_of_another_namespace_needs_a_grant_where_grants_are_required() {
    let refused = Some("no ReferenceGrant of namespace ops permits Service api");
    let grant = |kind: &str, to: Value| {
        let from = json!({"group": "gateway.networking.k8s.io", "kind": kind, "namespace": "shop"});
        json!({"apiVersion": "gateway.networking.k8s.io/v1beta1", "kind": "ReferenceGrant",
            "metadata": {"name": "g", "namespace": "ops"}, "spec": {"from": [from], "to": [to]}})
    };
    for required in [false, true] {
        let world = World::with(|cluster| cluster.require_reference_grants = required);
        let mut api = service("api", "10.96.0.2", json!({}));
        api["metadata"]["namespace"] = json!("ops");
        let backends = json!([{"name": "api", "namespace": "ops", "port": 80}, {"name": "web", "port": 80}]);
        world.apply_all([service("web", "10.96.0.1", json!({})), api, http("a", json!({"backendRefs": backends}))]);
        let problems = || {
            let backends = rule(&world).backends.clone();
            let [other, own] = [0, 1].map(|at: usize| backends[at].problem.clone());
            assert_eq!(own, None, "a Service of the route's namespace needs none");
            other
        };
        if !required {
            assert_eq!(problems(), None);
            continue;
        }
        assert_eq!(problems().as_deref(), refused);
        let mut rx = watch(&world, WEB, "shop");
        rx.borrow_and_update();
        world.apply(grant("HTTPRoute", json!({"group": "", "kind": "Service", "name": "api"})));
        assert!(changed(&mut rx).is_some());
        assert_eq!(problems(), None);
        for other in [
            grant("GRPCRoute", json!({"group": "", "kind": "Service"})),
            grant("HTTPRoute", json!({"group": "", "kind": "Service", "name": "web"})),
        ] {
            world.apply(other);
            assert_eq!(problems().as_deref(), refused);
        }
        world.apply(grant("HTTPRoute", json!({"group": "", "kind": "Service"})));
        assert_eq!(problems(), None);
        world.delete(Kind::ReferenceGrant, "ops", "g");
        assert_eq!(problems().as_deref(), refused);
    }
}

#[test]
fn a_filter_without_a_meaning_fails_the_rule_and_is_not_left_out() {
    let world = web();
    let add = json!([{"name": "x-a", "value": "1"}]);
    let request = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": {"add": add}});
    let response = json!({"type": "ResponseHeaderModifier", "responseHeaderModifier": {"add": add}});
    world.apply(http("a", json!({"filters": [request, response]})));
    assert!(matches!(rule(&world).filters[..], [RequestFilter::RequestHeaders(_), RequestFilter::ResponseHeaders(_)]));
    world.apply(http("a", json!({"filters": [request, {"type": "RequestMirror"}]})));
    assert_eq!(rule(&world).filters, [RequestFilter::Fail("RequestMirror filter is not supported".to_owned())]);
    world.delete(Kind::GatewayHttpRoute, "shop", "a");

    let mut linkerds = http("a", json!({"filters": [response]}));
    merge(&mut linkerds, json!({"apiVersion": "policy.linkerd.io/v1beta3"}));
    world.apply(linkerds);
    assert!(matches!(rule(&world).filters[..], [RequestFilter::RequestHeaders(_)]), "Linkerd reads it so");

    world.apply(route("GRPCRoute", "shop", "g", json!({}), json!({"rules": [{"filters": [response]}]})));
    let OutboundProtocol::Grpc(routes) = parent(&watch(&world, WEB, "shop")).protocol else { panic!("not gRPC") };
    assert!(matches!(routes[0].rules[0].filters[..], [RequestFilter::Fail(_)]));
}

#[test]
fn timeouts_of_a_route_replace_those_of_the_service_as_a_family() {
    let annotated = |mut object: Value, annotations: &Value| {
        merge(&mut object, json!({"metadata": {"annotations": annotations}}));
        object
    };
    let of_service = json!({"timeout.linkerd.io/request": "9s", "timeout.linkerd.io/idle": "8s"});
    for (of_route, of_rule, expected) in [
        (json!({}), json!({}), (Some(9), None, Some(8))),
        (json!({"timeout.linkerd.io/response": "1s"}), json!({}), (None, Some(1), None)),
        (json!({"timeout.linkerd.io/response": "1s"}), json!({"request": "2s"}), (Some(2), Some(1), None)),
        (json!({"timeout.linkerd.io/request": "1s"}), json!({"request": "2s"}), (Some(1), None, None)),
        (json!({}), json!({"request": "2s"}), (Some(2), None, None)),
        (json!({}), json!({"request": "0s"}), (Some(9), None, Some(8))),
    ] {
        let world = World::new();
        world.apply(annotated(service("web", "10.96.0.1", json!({})), &of_service));
        world.apply(annotated(http("a", json!({"timeouts": of_rule})), &of_route));
        let found = rule(&world).timeouts;
        let seconds = |timeout: Option<Duration>| timeout.map(|timeout| timeout.as_secs());
        let found = (seconds(found.request), seconds(found.response), seconds(found.idle));
        assert_eq!(found, expected, "{of_route} {of_rule}");
    }
}

#[test]
fn retries_of_a_route_replace_those_of_the_service_as_a_family() {
    let world = World::new();
    let mut web = service("web", "10.96.0.1", json!({}));
    merge(
        &mut web,
        json!({"metadata": {"annotations": {"retry.linkerd.io/http": "5xx", "retry.linkerd.io/limit": "4"}}}),
    );
    world.apply(web);
    world.apply(http("a", json!({})));
    assert_eq!(rule(&world).retry.unwrap().limit, 4);
    let mut own = http("a", json!({}));
    merge(&mut own, json!({"metadata": {"annotations": {"retry.linkerd.io/timeout": "1s"}}}));
    world.apply(own);
    let retry = rule(&world).retry.unwrap();
    assert_eq!((retry.limit, retry.timeout, retry.conditions), (1, Some(Duration::from_secs(1)), None));
}

#[test]
fn routes_of_an_egress_network_name_a_port_and_may_be_a_consumers() {
    let world = World::new();
    world.apply(egress_network("linkerd-egress", "all", json!({"trafficPolicy": "Deny"})));
    let target = "93.184.216.34:443";
    let none = "Detect deny linkerd-egress/all";
    let at = |namespace: &str, name: &str, port: Value| {
        route(
            "TLSRoute",
            namespace,
            name,
            of_network("linkerd-egress", "all", port),
            json!({"hostnames": ["example.org"]}),
        )
    };
    let mut rx = watch(&world, target, "shop");
    world.apply_unreadable(&at("linkerd-egress", "a", Value::Null));
    assert_eq!(ask(&world, target, "shop"), none, "without a port, it is not in force");
    world.apply(at("linkerd-egress", "a", json!(80)));
    assert_eq!(ask(&world, target, "shop"), none);
    world.apply(at("linkerd-egress", "a", json!(443)));
    assert_eq!(shown(value(&changed(&mut rx).unwrap())), "Tls deny linkerd-egress/all linkerd-egress/a");
    world.apply(at("shop", "b", json!(443)));
    assert!(rx.has_changed().is_err(), "the namespace has a route of its own");
    assert_eq!(ask(&world, target, "shop"), "Tls deny linkerd-egress/all linkerd-egress/a shop/b");
    assert_eq!(ask(&world, target, "ops"), "Tls deny linkerd-egress/all linkerd-egress/a");
}

#[test]
fn only_the_parent_is_a_backend_among_egress_networks() {
    let world = World::new();
    world.apply_all([
        egress_network("shop", "all", json!({"trafficPolicy": "Deny"})),
        egress_network("shop", "dns", json!({"trafficPolicy": "Allow", "networks": [{"cidr": "8.8.8.8"}]})),
    ]);
    let network = |name: &str| json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": name});
    let spec = json!({"rules": [{"backendRefs": [network("all"), network("dns"), network("gone"), {"name": "web", "port": 80}]}]});
    world.apply(route("TCPRoute", "shop", "a", of_network("shop", "all", json!(80)), spec));
    world.apply(service("web", "10.96.0.1", json!({})));
    let OutboundProtocol::Opaque(routes) = parent(&watch(&world, "1.1.1.1:80", "shop")).protocol else {
        panic!("not TCP")
    };
    let problems: Vec<_> =
        routes[0].backends.iter().map(|backend| backend.problem.as_deref().unwrap_or_default()).collect();
    assert_eq!(
        problems,
        [
            "",
            "Route with EgressNetwork backend needs to have the same EgressNetwork as a parent",
            "EgressNetwork not found gone",
            "",
        ]
    );
    let all = BackendResource::EgressNetwork { network: Key::new("shop", "all"), port: 80 };
    assert_eq!(routes[0].backends[0].resource, Some(all));
}
