//! Routes and rate limits of Servers: what is attached, in which order, with which authorizations.

use super::{
    policy::{authorization, mesh_tls, rule, server, show, target, web_1, world},
    *,
};

const GATEWAY: &str = "gateway.networking.k8s.io";
const POLICY: &str = "policy.linkerd.io";

/// A route to Server `s`; `change` is merged over its spec.
fn route(group: &str, kind: &str, name: &str, change: Value) -> Value {
    let version = if group == GATEWAY { "v1" } else { "v1beta3" };
    let mut object = json!({"apiVersion": format!("{group}/{version}"), "kind": kind,
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"parentRefs": [{"group": POLICY, "kind": "Server", "name": "s"}]}});
    merge(&mut object, json!({"spec": change}));
    object
}

fn http(name: &str, change: Value) -> Value {
    route(POLICY, "HTTPRoute", name, change)
}

fn dated(mut object: Value, time: &str) -> Value {
    object["metadata"]["creationTimestamp"] = json!(time);
    object
}

fn to(group: &str, kind: &str, name: &str) -> Value {
    json!({"group": group, "kind": kind, "name": name})
}

fn inbound(world: &World) -> Arc<Snapshot<InboundServer>> {
    world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap()
}

/// The routes of port 8080 of `web-1` as `name rules [authorizations]`.
fn routes(world: &World) -> Vec<String> {
    show_routes(&inbound(world))
}

fn show_routes(server: &InboundServer) -> Vec<String> {
    fn line<M>(route: &InboundRoute<M>) -> String {
        let origin = |authorization: &Authorization| match &authorization.origin {
            Origin::AuthorizationPolicy(name) => name.clone(),
            other => panic!("{other:?} of a route"),
        };
        let authorizations: Vec<_> = route.authorizations.iter().map(origin).collect();
        format!("{} {} [{}]", route.id.key.name, route.rules.len(), authorizations.join(" "))
    }
    match &server.policy.routes {
        InboundRoutes::Default => vec!["default".to_owned()],
        InboundRoutes::Http(routes) => routes.iter().map(line).collect(),
        InboundRoutes::Grpc(routes) => routes.iter().map(line).collect(),
    }
}

/// Object as the API server has it, whatever the manifest's checks say.
fn unchecked(world: &World, kind: Kind, object: Value) {
    let object = match kind {
        Kind::HttpRoute => manifest::Object::HttpRoute(serde_json::from_value(object).unwrap()),
        Kind::GatewayHttpRoute => manifest::Object::GatewayHttpRoute(serde_json::from_value(object).unwrap()),
        Kind::HttpLocalRateLimitPolicy => {
            manifest::Object::HttpLocalRateLimitPolicy(serde_json::from_value(object).unwrap())
        }
        other => panic!("{other}"),
    };
    world.index().apply(vec![Event::Apply(Box::new(object))]);
}

#[test]
fn a_route_replaces_the_default_and_the_probes_until_it_is_gone() {
    let world = World::new();
    let probe = json!({"httpGet": {"path": "/live", "port": 8080}});
    let container = json!({"name": "app", "livenessProbe": probe});
    world.apply(pod("web-1", "10.244.0.1", json!({"spec": {"containers": [container]}})));
    world.apply(server("s", json!({})));
    let mut rx = world.index().watch_inbound(&web_1(), 8080).unwrap();
    let seen = |server: &InboundServer| (show_routes(server), server.probe_paths.clone());
    let before = (vec!["default".to_owned()], vec!["/live".to_owned()]);
    assert_eq!(seen(rx.borrow().as_ref().unwrap()), before);
    world.apply(http("r", json!({})));
    assert_eq!(seen(&changed(&mut rx).unwrap().unwrap()), (vec!["r 1 []".to_owned()], vec![]));
    world.delete(Kind::HttpRoute, "shop", "r");
    assert_eq!(seen(&changed(&mut rx).unwrap().unwrap()), before);
}

#[test]
fn routes_of_both_groups_are_in_the_order_of_their_age_then_name() {
    let world = world([
        server("s", json!({})),
        dated(route(GATEWAY, "HTTPRoute", "b", json!({})), "2026-01-01T00:00:00Z"),
        dated(http("c", json!({})), "2026-01-01T00:00:00Z"),
        dated(http("a", json!({})), "2026-01-02T00:00:00Z"),
    ]);
    assert_eq!(routes(&world), ["b 1 []", "c 1 []", "a 1 []"]);
    let of_files = super::policy::world([
        server("s", json!({})),
        http("b", json!({})),
        route(GATEWAY, "HTTPRoute", "a", json!({})),
    ]);
    assert_eq!(routes(&of_files), ["a 1 []", "b 1 []"]);
}

#[test]
fn a_server_has_the_routes_of_its_protocol_alone() {
    for (protocol, expected) in [
        ("unknown", "h 1 []"),
        ("HTTP/1", "h 1 []"),
        ("HTTP/2", "h 1 []"),
        ("gRPC", "g 1 []"),
        ("opaque", "default"),
        ("TLS", "default"),
    ] {
        let world = world([
            server("s", json!({"proxyProtocol": protocol})),
            http("h", json!({})),
            route(GATEWAY, "GRPCRoute", "g", json!({})),
        ]);
        assert_eq!(routes(&world), [expected], "{protocol}");
    }
}

#[test]
fn what_the_servers_protocol_does_not_have_is_reported() {
    let limit = || limits("l", json!({"total": {"requestsPerSecond": 1}}));
    let gateway = || route(GATEWAY, "HTTPRoute", "h", json!({}));
    let grpc = || route(GATEWAY, "GRPCRoute", "g", json!({}));
    let reported = |world: &World, batch: Vec<Event>| -> Vec<String> {
        let problems = world.index().apply(batch).problems.into_iter();
        problems.map(|problem| format!("{}: {}", problem.object, problem.problem)).collect()
    };
    for (protocol, named, expected) in [
        (json!(null), "no proxyProtocol", &["GRPCRoute shop/g"][..]),
        (json!("HTTP/1"), "proxyProtocol HTTP/1", &["GRPCRoute shop/g"]),
        (json!("HTTP/2"), "proxyProtocol HTTP/2", &["GRPCRoute shop/g"]),
        (
            json!("gRPC"),
            "proxyProtocol gRPC",
            &["HTTPLocalRateLimitPolicy shop/l", "HTTPRoute shop/h", "HTTPRoute shop/h"],
        ),
        (
            json!("opaque"),
            "proxyProtocol opaque",
            &["GRPCRoute shop/g", "HTTPLocalRateLimitPolicy shop/l", "HTTPRoute shop/h", "HTTPRoute shop/h"],
        ),
        (
            json!("TLS"),
            "proxyProtocol TLS",
            &["GRPCRoute shop/g", "HTTPLocalRateLimitPolicy shop/l", "HTTPRoute shop/h", "HTTPRoute shop/h"],
        ),
    ] {
        let server = server("s", json!({"proxyProtocol": protocol}));
        let world = world([server, http("h", json!({})), gateway(), grpc(), limit()]);
        let mut found = reported(&world, vec![Event::Synced]);
        found.sort();
        let objects: Vec<_> = found.iter().map(|text| text.split(": ").next().unwrap()).collect();
        assert_eq!(objects, expected, "{named}");
        for problem in &found {
            assert!(problem.contains(&format!("Server s has {named}")) && problem.contains("no effect"), "{problem}");
        }
    }
    // It is reported when it becomes so, and once.
    let world = world([server("s", json!({"proxyProtocol": "HTTP/2"})), http("h", json!({})), limit()]);
    assert_eq!(reported(&world, vec![Event::Synced]), [""; 0]);
    let event = |object: Value| {
        let read = manifest::parse("test.json".as_ref(), &object.to_string());
        vec![Event::Apply(Box::new(read.objects.into_iter().next().unwrap().object))]
    };
    let grpc_server = || server("s", json!({"proxyProtocol": "gRPC"}));
    assert_eq!(reported(&world, event(grpc_server())).len(), 2);
    assert_eq!(reported(&world, event(grpc())), [""; 0]);
    assert_eq!(reported(&world, event(http("h", json!({"hostnames": ["web.shop"]})))), [""; 0]);
    world.delete(Kind::Server, "shop", "s");
    assert_eq!(reported(&world, event(grpc_server())).len(), 2);
}

#[test]
fn a_route_is_attached_to_servers_that_it_may_name() {
    let parent = |change: Value| {
        let mut parent = json!({"group": POLICY, "kind": "Server", "name": "s"});
        merge(&mut parent, change);
        json!({"parentRefs": [parent]})
    };
    for (case, object, expected) in [
        ("its own namespace's", http("r", parent(json!({"namespace": "shop"}))), "r 1 []"),
        ("another Server", http("r", parent(json!({"name": "other"}))), "default"),
        ("a Service of this name", http("r", parent(json!({"group": "", "kind": "Service"}))), "default"),
        ("a port", http("r", parent(json!({"port": 8080}))), "default"),
        ("an opaque route", route(GATEWAY, "TCPRoute", "r", json!({"rules": [{}]})), "default"),
    ] {
        let mut object = object;
        if object["kind"] == "TCPRoute" {
            object["apiVersion"] = json!("gateway.networking.k8s.io/v1alpha2");
        }
        assert_eq!(routes(&world([server("s", json!({})), object])), [expected], "{case}");
    }
    let mut foreign = http("r", parent(json!({"namespace": "shop"})));
    foreign["metadata"]["namespace"] = json!("ops");
    assert_eq!(routes(&world([server("s", json!({})), foreign])), ["default"], "of another namespace");
}

#[test]
fn a_route_waits_for_its_server_and_for_no_status() {
    let world = world([http("r", json!({}))]);
    assert_eq!(routes(&world), ["default"]);
    world.apply(server("s", json!({})));
    assert_eq!(routes(&world), ["r 1 []"]);
    world.apply(http("r", json!({"parentRefs": [{"group": POLICY, "kind": "Server", "name": "other"}]})));
    assert_eq!(routes(&world), ["default"]);
}

#[test]
fn a_policy_of_a_route_admits_clients_to_that_route_alone() {
    let world = world([
        server("s", json!({})),
        http("r", json!({})),
        route(GATEWAY, "HTTPRoute", "r", json!({})),
        http("other", json!({})),
        authorization("p", to(POLICY, "HTTPRoute", "r"), json!([])),
    ]);
    let expected = |of_r: &str, of_gateway: &str| {
        ["other 1 []".to_owned(), format!("r 1 [{of_r}]"), format!("r 1 [{of_gateway}]")].to_vec()
    };
    assert_eq!(routes(&world), expected("p", ""));
    assert_eq!(show(&inbound(&world)), [""; 0], "the Server admits nobody by it");
    world.apply(authorization("q", to(GATEWAY, "httproute", "r"), json!([])));
    assert_eq!(routes(&world), expected("p", "q"));
    world.apply(authorization("p", target("s"), json!([])));
    assert_eq!(routes(&world), expected("", "q"));
    assert_eq!(show(&inbound(&world)).len(), 1);
    world.delete(Kind::AuthorizationPolicy, "shop", "q");
    assert_eq!(routes(&world), expected("", ""));
}

#[test]
fn a_policy_of_a_grpc_route_admits_clients_to_it() {
    let world = world([
        server("s", json!({"proxyProtocol": "gRPC"})),
        route(GATEWAY, "GRPCRoute", "g", json!({})),
        authorization("h", to(GATEWAY, "HTTPRoute", "g"), json!([])),
        authorization("p", to(GATEWAY, "GRPCRoute", "g"), json!([])),
    ]);
    assert_eq!(routes(&world), ["g 1 [p]"]);
}

#[test]
fn a_policy_of_a_route_with_an_unresolved_reference_is_ignored_until_it_resolves() {
    let world = world([
        server("s", json!({})),
        http("r", json!({})),
        authorization("p", to(POLICY, "HTTPRoute", "r"), json!([mesh_tls("m")])),
    ]);
    let mut rx = world.index().watch_inbound(&web_1(), 8080).unwrap();
    assert_eq!(show_routes(rx.borrow().as_ref().unwrap()), ["r 1 []"]);
    world.apply(rule("MeshTLSAuthentication", "v1alpha1", "m", json!({"identities": ["*"]})));
    assert_eq!(show_routes(&changed(&mut rx).unwrap().unwrap()), ["r 1 [p]"]);
    world.delete(Kind::MeshTLSAuthentication, "shop", "m");
    assert_eq!(show_routes(&changed(&mut rx).unwrap().unwrap()), ["r 1 []"]);
}

#[test]
fn policies_of_one_route_are_in_the_order_of_their_age_then_name() {
    let policy = |name: &str| authorization(name, to(POLICY, "HTTPRoute", "r"), json!([]));
    let world = world([
        server("s", json!({})),
        http("r", json!({})),
        dated(policy("c"), "2026-01-01T00:00:00Z"),
        dated(policy("b"), "2026-01-02T00:00:00Z"),
        dated(policy("a"), "2026-01-02T00:00:00Z"),
    ]);
    assert_eq!(routes(&world), ["r 1 [c a b]"]);
}

#[test]
fn an_unreadable_route_takes_no_request_and_replaces_the_default() {
    let world = world([server("s", json!({}))]);
    for unreadable in [
        json!({"rules": [{"matches": [{"path": {"value": "/a"}}]}, {"matches": [{"clientCertificate": {}}]}]}),
        json!({"rules": [{"matches": [{"path": {"type": "RegularExpression", "value": "("}}]}]}),
        json!({"hostnames": ["*"]}),
    ] {
        unchecked(&world, Kind::GatewayHttpRoute, route(GATEWAY, "HTTPRoute", "r", unreadable.clone()));
        assert_eq!(routes(&world), ["r 0 []"], "{unreadable}");
    }
}

#[test]
fn a_route_or_rate_limit_with_a_wrong_type_still_narrows_its_server() {
    let world = world([server("s", json!({}))]);
    for (group, kind) in [(POLICY, "HTTPRoute"), (GATEWAY, "HTTPRoute")] {
        let mut unreadable = route(group, kind, "r", json!({"rules": [{"matches": "all"}]}));
        let parent = unreadable["spec"]["parentRefs"][0].clone();
        let mut typo = parent.clone();
        typo["port"] = json!("8080");
        for parents in [json!([parent, {"name": 1}]), json!([typo]), parent] {
            unreadable["spec"]["parentRefs"] = parents.clone();
            world.apply_unreadable(&unreadable);
            assert_eq!(routes(&world), ["r 0 []"], "{kind} of {group}: {parents}");
            world.delete(Kind::of(group, kind).unwrap(), "shop", "r");
            assert_eq!(routes(&world), ["default"]);
        }
    }
    let spec = json!({"targetRef": target("s"), "total": {"requestsPerSecond": "many"}});
    world.apply_unreadable(&rule("HTTPLocalRateLimitPolicy", "v1alpha1", "l", spec));
    assert_eq!(inbound(&world).policy.rate_limit.as_ref().unwrap().total, Some(1));
    world.apply(server("s", json!({"proxyProtocol": "gRPC"})));
    world.apply_unreadable(&route(GATEWAY, "GRPCRoute", "r", json!({"rules": {}})));
    assert_eq!(routes(&world), ["r 0 []"]);
}

#[test]
fn nothing_is_done_to_requests_of_a_rule_with_an_unsupported_filter() {
    use weft_k8s_api::policy::route::Filter;
    let headers = json!({"add": [{"name": "x", "value": "1"}]});
    let modifier = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": headers});
    let response = json!({"type": "ResponseHeaderModifier", "responseHeaderModifier": headers});
    let mirror = json!({"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "b"}}});
    for (filters, expected) in [
        (json!([modifier, response]), &["request headers"][..]),
        (json!([response]), &[]),
        (json!([modifier, mirror, response]), &["RequestMirror"]),
    ] {
        let world =
            world([server("s", json!({})), route(GATEWAY, "HTTPRoute", "r", json!({"rules": [{"filters": filters}]}))]);
        let InboundRoutes::Http(routes) = &inbound(&world).policy.routes else { panic!("a route is attached") };
        let found = routes[0].rules[0].filters.iter().map(|filter| match filter {
            Filter::RequestHeaders(_) => "request headers",
            Filter::Unsupported(name) => name,
            other => panic!("{other:?}"),
        });
        assert_eq!(found.collect::<Vec<_>>(), expected, "{filters}");
    }
}

fn limits(name: &str, spec: Value) -> Value {
    let mut object = rule("HTTPLocalRateLimitPolicy", "v1alpha1", name, json!({"targetRef": target("s")}));
    merge(&mut object, json!({"spec": spec}));
    object
}

#[test]
fn a_rate_limit_names_identities_and_is_gone_with_its_policy() {
    let clients = json!([{"kind": "ServiceAccount", "name": "a"},
        {"kind": "ServiceAccount", "name": "b", "namespace": "ops"}]);
    let world = world([
        server("s", json!({})),
        limits(
            "l",
            json!({"total": {"requestsPerSecond": 100}, "identity": {"requestsPerSecond": 10},
                "overrides": [{"requestsPerSecond": 50, "clientRefs": clients}]}),
        ),
    ]);
    let identities =
        ["a.shop", "b.ops"].map(|name| format!("{name}.serviceaccount.identity.linkerd.cluster.local")).to_vec();
    let expected = InboundRateLimit {
        name: "l".to_owned(),
        total: Some(100),
        identity: Some(10),
        overrides: vec![InboundRateLimitOverride { requests_per_second: 50, identities }],
    };
    let mut rx = world.index().watch_inbound(&web_1(), 8080).unwrap();
    assert_eq!(rx.borrow().as_ref().unwrap().policy.rate_limit, Some(expected));
    assert_eq!(world.index().watch_inbound(&web_1(), 8081).unwrap().borrow().as_ref().unwrap().policy.rate_limit, None);
    world.delete(Kind::HttpLocalRateLimitPolicy, "shop", "l");
    assert_eq!(changed(&mut rx).unwrap().unwrap().policy.rate_limit, None);
}

#[test]
fn of_several_rate_limits_the_oldest_is_in_force() {
    let limit = |name: &str, rate: u32| limits(name, json!({"total": {"requestsPerSecond": rate}}));
    let total = |world: &World| inbound(world).policy.rate_limit.as_ref().and_then(|limit| limit.total);
    let world = world([
        server("s", json!({})),
        dated(limit("a", 1), "2026-01-02T00:00:00Z"),
        dated(limit("c", 3), "2026-01-01T00:00:00Z"),
        dated(limit("b", 2), "2026-01-01T00:00:00Z"),
    ]);
    assert_eq!(total(&world), Some(2));
    world.delete(Kind::HttpLocalRateLimitPolicy, "shop", "b");
    assert_eq!(total(&world), Some(3));
    let mut elsewhere = dated(limit("c", 3), "2026-01-01T00:00:00Z");
    elsewhere["spec"]["targetRef"]["name"] = json!("other");
    world.apply(elsewhere);
    assert_eq!(total(&world), Some(1));
}

#[test]
fn a_rate_limit_without_service_accounts_has_no_clients() {
    let clients = json!([{"kind": "Namespace", "name": "ops"}]);
    let spec = json!({"overrides": [{"requestsPerSecond": 5, "clientRefs": clients}]});
    let world = world([server("s", json!({}))]);
    unchecked(&world, Kind::HttpLocalRateLimitPolicy, limits("l", spec));
    let limit = inbound(&world).policy.rate_limit.clone().unwrap();
    assert_eq!(limit.overrides[0].identities, [""; 0]);
}

#[test]
fn all_pods_and_ports_of_a_server_share_its_policy() {
    let world = world([server("s", json!({"port": "http"})), http("r", json!({}))]);
    let two_ports = json!({"spec": {"containers": [{"name": "app", "ports": [{"name": "http", "containerPort": 8080}]},
        {"name": "more", "ports": [{"name": "http", "containerPort": 8081}]}]}});
    world.apply(pod("web-2", "10.244.0.2", two_ports));
    let policy = |name: &str, port| {
        let rx = world.index().watch_inbound(&Key::new("shop", name), port).unwrap();
        rx.borrow().as_ref().unwrap().policy.clone()
    };
    let first = policy("web-1", 8080);
    assert_eq!(first.origin, Origin::Server("s".to_owned()));
    assert!(Arc::ptr_eq(&first, &policy("web-2", 8080)) && Arc::ptr_eq(&first, &policy("web-2", 8081)));
    // Also after a change that makes no difference.
    world.apply(authorization("p", target("s"), json!([mesh_tls("none")])));
    assert!(Arc::ptr_eq(&first, &policy("web-1", 8080)));
}

/// The pods and ExternalWorkloads whose answers are computed again after a change.
fn touched(world: &World, object: Value) -> Vec<String> {
    let read = manifest::parse("test.json".as_ref(), &object.to_string());
    assert!(read.errors.is_empty(), "{:?}", read.errors);
    let mut index = world.index();
    index.set(read.objects.into_iter().next().unwrap().object);
    index.derive_servers();
    let mut found: Vec<_> = index.dirty.pods.iter().chain(&index.dirty.workloads).map(|key| key.name.clone()).collect();
    found.sort_unstable();
    index.publish();
    found
}

#[test]
fn a_change_touches_the_pods_of_the_servers_that_it_concerns() {
    let world = world([
        server("s", json!({})),
        server("api", json!({"podSelector": {"matchLabels": {"app": "api"}}})),
        http("r", json!({})),
    ]);
    world.apply_all([
        pod("web-2", "10.244.0.2", json!({})),
        pod("api-1", "10.244.0.3", json!({"metadata": {"labels": {"app": "api"}}})),
        pod("lone-1", "10.244.0.4", json!({"metadata": {"labels": {"app": "lone"}}})),
    ]);
    let of_s = ["web-1", "web-2"];
    assert_eq!(touched(&world, authorization("a", target("s"), json!([]))), of_s);
    assert_eq!(touched(&world, authorization("a", target("s"), json!([]))), [""; 0], "again");
    assert_eq!(touched(&world, authorization("b", to(POLICY, "HTTPRoute", "r"), json!([mesh_tls("m")]))), [""; 0]);
    let tls = |identity: &str| rule("MeshTLSAuthentication", "v1alpha1", "m", json!({"identities": [identity]}));
    assert_eq!(touched(&world, tls("*")), of_s);
    assert_eq!(touched(&world, authorization("c", target("api"), json!([mesh_tls("m")]))), ["api-1"]);
    assert_eq!(touched(&world, tls("*.example")), ["api-1", "web-1", "web-2"]);
    let namespace = authorization("d", json!({"kind": "Namespace", "name": "shop"}), json!([]));
    assert_eq!(touched(&world, namespace), ["api-1", "web-1", "web-2"]);
    assert_eq!(touched(&world, http("r", json!({"hostnames": ["web.shop"]}))), of_s);
    assert_eq!(touched(&world, limits("l", json!({"total": {"requestsPerSecond": 1}}))), of_s);
    let reference = json!({"server": {"name": "api"}, "client": {"unauthenticated": true}});
    assert_eq!(touched(&world, rule("ServerAuthorization", "v1beta1", "z", reference)), ["api-1"]);
    assert_eq!(touched(&world, authorization("e", target("none"), json!([]))), [""; 0]);
}

#[test]
fn a_policy_of_a_route_that_does_not_exist_is_reported() {
    let world = world([
        server("s", json!({})),
        authorization("p", to(POLICY, "HTTPRoute", "r"), json!([])),
        authorization("q", to(GATEWAY, "GRPCRoute", "g"), json!([])),
    ]);
    let problems = world.index().apply(vec![Event::Synced]).problems;
    let expected = |kind: &str, name: &str, group: &str| {
        format!(
            "spec.targetRef: {kind} {name} of {group} does not exist, or no Server of its namespace is its parent; the \
             policy grants nothing"
        )
    };
    let found: Vec<_> = problems.into_iter().map(|problem| problem.problem).collect();
    assert_eq!(found, [expected("HTTPRoute", "r", POLICY), expected("GRPCRoute", "g", GATEWAY)]);
    world.apply(http("r", json!({})));
    assert_eq!(world.index().ineffective_policies(), 1);
    world.apply(route(GATEWAY, "GRPCRoute", "g", json!({})));
    assert_eq!(world.index().ineffective_policies(), 0);
    world.delete(Kind::HttpRoute, "shop", "r");
    assert_eq!(world.index().ineffective_policies(), 1);
}
