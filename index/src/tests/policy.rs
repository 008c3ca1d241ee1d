//! Inbound policies; each grant has a test of its refusal.

use super::*;

pub(super) fn rule(kind: &str, version: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": format!("policy.linkerd.io/{version}"), "kind": kind, "metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

pub(super) fn server(name: &str, spec: Value) -> Value {
    let mut object =
        rule("Server", "v1beta3", name, json!({"podSelector": {"matchLabels": {"app": "web"}}, "port": 8080}));
    merge(&mut object, json!({"spec": spec}));
    object
}

pub(super) fn authorization(name: &str, target: Value, refs: Value) -> Value {
    rule("AuthorizationPolicy", "v1alpha1", name, json!({"targetRef": target, "requiredAuthenticationRefs": refs}))
}

pub(super) fn target(name: &str) -> Value {
    json!({"group": "policy.linkerd.io", "kind": "Server", "name": name})
}

pub(super) fn mesh_tls(name: &str) -> Value {
    json!({"group": "policy.linkerd.io", "kind": "MeshTLSAuthentication", "name": name})
}

fn network(name: &str) -> Value {
    json!({"group": "policy.linkerd.io", "kind": "NetworkAuthentication", "name": name})
}

/// `web-1` and the given objects.
pub(super) fn world<const N: usize>(objects: [Value; N]) -> World {
    let world = World::new();
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    world.apply_all(objects);
    world
}

pub(super) fn web_1() -> Key {
    Key::new("shop", "web-1")
}

/// Authorizations of port 8080 of `web-1` as `origin: who from where`.
fn check(world: &World, expected: &[&str]) {
    let server = world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap();
    assert_eq!(show(&server), expected);
}

pub(super) fn show(server: &InboundServer) -> Vec<String> {
    let each = server.policy.authorizations.iter().map(|authorization| {
        let origin = match &authorization.origin {
            Origin::Default(name) => *name,
            Origin::Server(name) | Origin::ServerAuthorization(name) | Origin::AuthorizationPolicy(name) => name,
        };
        let who = match &authorization.authentication {
            Authentication::Unauthenticated => "anyone".to_owned(),
            Authentication::Tls => "any TLS".to_owned(),
            Authentication::Identities(all) => all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or "),
        };
        let networks: Vec<_> = authorization.networks.iter().map(|network| network.cidr.to_string()).collect();
        format!("{origin}: {who} from {}", networks.join(" or "))
    });
    each.collect()
}

const ANYWHERE: &str = "0.0.0.0/0 or ::/0";

#[test]
fn default_policies() {
    let cluster = "10.0.0.0/8 or 100.64.0.0/10 or 172.16.0.0/12 or 192.168.0.0/16 or fd00::/8";
    for (policy, expected) in [
        ("all-unauthenticated", Some(format!("all-unauthenticated: anyone from {ANYWHERE}"))),
        ("all-authenticated", Some(format!("all-authenticated: * from {ANYWHERE}"))),
        ("cluster-unauthenticated", Some(format!("cluster-unauthenticated: anyone from {cluster}"))),
        ("cluster-authenticated", Some(format!("cluster-authenticated: * from {cluster}"))),
        ("audit", Some(format!("audit: anyone from {ANYWHERE}"))),
        ("deny", None),
    ] {
        let expected: Vec<_> = expected.iter().map(String::as_str).collect();
        let annotated = World::new();
        annotated.apply(pod(
            "web-1",
            "10.244.0.1",
            json!({"metadata": {"annotations": {"config.linkerd.io/default-inbound-policy": policy}}}),
        ));
        check(&annotated, &expected);
        let meshwide = World::with(|cluster| cluster.default_policy = policy.parse().unwrap());
        meshwide.apply(pod("web-1", "10.244.0.1", json!({})));
        check(&meshwide, &expected);
    }
}

#[test]
fn an_unreadable_default_policy_denies() {
    let mut object: k8s_openapi::api::core::v1::Pod =
        serde_json::from_value(pod("web-1", "10.244.0.1", json!({}))).unwrap();
    let annotation = ("config.linkerd.io/default-inbound-policy".to_owned(), "allow".to_owned());
    object.metadata.annotations.get_or_insert_default().insert(annotation.0, annotation.1);
    let world = World::new();
    world.index().apply(vec![Event::Apply(Box::new(manifest::Object::Pod(object)))]);
    check(&world, &[]);
}

#[test]
fn identity_is_required_on_listed_ports_only() {
    let world = World::new();
    world.apply(pod(
        "web-1",
        "10.244.0.1",
        json!({"metadata": {"annotations": {"config.linkerd.io/proxy-require-identity-inbound-ports": "8080"}}}),
    ));
    check(&world, &[&format!("all-authenticated: * from {ANYWHERE}")]);
    let other = world.index().watch_inbound(&web_1(), 8081).unwrap().borrow().clone().unwrap();
    assert_eq!(show(&other), [format!("all-unauthenticated: anyone from {ANYWHERE}")]);
}

#[test]
fn a_server_replaces_the_default_on_its_port_only() {
    let world = world([server("s", json!({}))]);
    check(&world, &[]);
    let other = world.index().watch_inbound(&web_1(), 9090).unwrap().borrow().clone().unwrap();
    assert_eq!(other.policy.origin, Origin::Default("all-unauthenticated"));
    world.apply(server("s", json!({"accessPolicy": "all-authenticated"})));
    check(&world, &[&format!("all-authenticated: * from {ANYWHERE}")]);
    world.apply(server("s", json!({"podSelector": {"matchLabels": {"app": "api"}}})));
    check(&world, &[&format!("all-unauthenticated: anyone from {ANYWHERE}")]);
    world.apply(server("s", json!({"port": "http"})));
    check(&world, &[]);
    world.delete(Kind::Server, "shop", "s");
    check(&world, &[&format!("all-unauthenticated: anyone from {ANYWHERE}")]);
}

#[test]
fn the_name_of_a_udp_port_selects_no_tcp_port() {
    let world = world([server("s", json!({"port": "dns"}))]);
    let origin = |world: &World| {
        let view = world.index().watch_inbound(&web_1(), 53).unwrap();
        let server = view.borrow().clone().unwrap();
        server.policy.origin.clone()
    };
    let named = |protocol: &str| {
        json!({"spec": {"containers": [{"name": "app", "ports": [
        {"name": "dns", "containerPort": 53, "protocol": protocol}]}]}})
    };
    world.apply(pod("web-1", "10.244.0.1", named("UDP")));
    assert_eq!(origin(&world), Origin::Default("all-unauthenticated"));
    world.apply(pod("web-1", "10.244.0.1", named("TCP")));
    assert_eq!(origin(&world), Origin::Server("s".to_owned()));
}

#[test]
fn an_unreadable_access_policy_denies() {
    let mut bad: weft_k8s_api::policy::Server =
        serde_json::from_value(server("s", json!({"accessPolicy": "audit"}))).unwrap();
    bad.spec.access_policy = Some("all".to_owned());
    let world = world([]);
    world.index().apply(vec![Event::Apply(Box::new(manifest::Object::Server(bad)))]);
    check(&world, &[]);
}

#[test]
fn of_several_servers_the_oldest_speaks() {
    let dated = |name: &str, time: &str| {
        let mut object = server(name, json!({}));
        object["metadata"]["creationTimestamp"] = json!(time);
        object
    };
    let origin = |world: &World| {
        world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap().policy.origin.clone()
    };
    let by_time = world([dated("a", "2026-01-02T00:00:00Z"), dated("b", "2026-01-01T00:00:00Z")]);
    assert_eq!(origin(&by_time), Origin::Server("b".to_owned()));
    let by_name = world([server("b", json!({})), server("a", json!({}))]);
    assert_eq!(origin(&by_name), Origin::Server("a".to_owned()));
}

#[test]
fn protocols() {
    for (name, expected) in [
        ("unknown", ServerProtocol::Detect),
        ("HTTP/1", ServerProtocol::Http1),
        ("HTTP/2", ServerProtocol::Http2),
        ("gRPC", ServerProtocol::Grpc),
        ("opaque", ServerProtocol::Opaque),
        ("TLS", ServerProtocol::Tls),
    ] {
        let world = world([server("s", json!({"proxyProtocol": name}))]);
        assert_eq!(
            world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().as_ref().unwrap().policy.protocol,
            expected,
            "{name}"
        );
    }
    let annotated = World::new();
    annotated.apply(pod(
        "web-1",
        "10.244.0.1",
        json!({"metadata": {"annotations": {"config.linkerd.io/opaque-ports": "http"}}}),
    ));
    let protocol =
        |port| annotated.index().watch_inbound(&web_1(), port).unwrap().borrow().as_ref().unwrap().policy.protocol;
    assert_eq!((protocol(8080), protocol(8081)), (ServerProtocol::Opaque, ServerProtocol::Detect));
}

#[test]
fn server_authorizations_grant_what_their_clients_say() {
    let cluster = "10.0.0.0/8 or 100.64.0.0/10 or 172.16.0.0/12 or 192.168.0.0/16 or fd00::/8";
    let saz = |server: Value, client: Value| {
        rule("ServerAuthorization", "v1beta1", "a", json!({"server": server, "client": client}))
    };
    let mut labelled = server("s", json!({}));
    labelled["metadata"]["labels"] = json!({"tier": "front"});
    let anyone = json!({"unauthenticated": true});
    let (s, other) = (json!({"name": "s"}), json!({"name": "other"}));
    let selector = |value: &str| json!({"selector": {"matchLabels": {"tier": value}}});
    let web = "web.ops.serviceaccount.identity.linkerd.cluster.local";
    for (name, reference, client, expected) in [
        ("anyone", s.clone(), anyone.clone(), Some(format!("a: anyone from {cluster}"))),
        ("another Server", other, anyone.clone(), None),
        ("by labels", selector("front"), anyone.clone(), Some(format!("a: anyone from {cluster}"))),
        ("by other labels", selector("back"), anyone.clone(), None),
        (
            "networks",
            s.clone(),
            json!({"unauthenticated": true, "networks": [{"cidr": "10.1.0.0/16"}]}),
            Some("a: anyone from 10.1.0.0/16".to_owned()),
        ),
        (
            "an empty list of networks",
            s.clone(),
            json!({"unauthenticated": true, "networks": []}),
            Some(format!("a: anyone from {cluster}")),
        ),
        (
            "TLS",
            s.clone(),
            json!({"meshTLS": {"unauthenticatedTLS": true}}),
            Some(format!("a: any TLS from {cluster}")),
        ),
        (
            "accounts and identities",
            s,
            json!({"meshTLS": {"identities": ["*"], "serviceAccounts": [{"name": "web", "namespace": "ops"}]}}),
            Some(format!("a: * or {web} from {cluster}")),
        ),
    ] {
        let world = world([labelled.clone(), saz(reference, client)]);
        let expected: Vec<_> = expected.iter().map(String::as_str).collect();
        let server = world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap();
        assert_eq!(show(&server), expected, "{name}");
        world.delete(Kind::ServerAuthorization, "shop", "a");
        check(&world, &[]);
    }
}

#[test]
fn a_server_authorization_that_says_too_much_is_read_strictly() {
    let spec = json!({"server": {"name": "s"}, "client": {"unauthenticated": true, "meshTLS": {"unauthenticatedTLS": true,
        "identities": ["web.shop.serviceaccount.identity.linkerd.cluster.local"]}}});
    let value = rule("ServerAuthorization", "v1beta1", "a", spec);
    let unreadable = manifest::from_api(Kind::ServerAuthorization, value).unwrap_err();
    let world = world([server("s", json!({}))]);
    world.index().apply(vec![Event::Apply(unreadable.restrictive.unwrap())]);
    let server = world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap();
    let expected = "a: web.shop.serviceaccount.identity.linkerd.cluster.local from ";
    assert!(show(&server)[0].starts_with(expected), "{:?}", show(&server));
}

#[test]
fn policies_grant_what_their_authentications_say() {
    let identity = "client.shop.serviceaccount.identity.linkerd.cluster.local";
    let tls = |spec: Value| rule("MeshTLSAuthentication", "v1alpha1", "m", spec);
    let net = rule("NetworkAuthentication", "v1alpha1", "n", json!({"networks": [{"cidr": "10.1.0.0/16"}]}));
    let exact = tls(json!({"identities": [identity]}));
    for (name, refs, tls, expected) in [
        ("nothing required", json!([]), exact.clone(), Some(format!("p: anyone from {ANYWHERE}"))),
        ("an identity", json!([mesh_tls("m")]), exact.clone(), Some(format!("p: {identity} from {ANYWHERE}"))),
        ("a network", json!([network("n")]), exact.clone(), Some("p: anyone from 10.1.0.0/16".to_owned())),
        ("both", json!([mesh_tls("m"), network("n")]), exact.clone(), Some(format!("p: {identity} from 10.1.0.0/16"))),
        (
            "a service account",
            json!([{"kind": "ServiceAccount", "name": "client"}]),
            exact.clone(),
            Some(format!("p: {identity} from {ANYWHERE}")),
        ),
        (
            "references",
            json!([mesh_tls("m")]),
            tls(
                json!({"identityRefs": [{"kind": "ServiceAccount", "name": "client"}, {"kind": "Namespace", "name": "ops"}]}),
            ),
            Some(format!("p: {identity} or *.ops.serviceaccount.identity.linkerd.cluster.local from {ANYWHERE}")),
        ),
        ("an unresolved identity", json!([mesh_tls("none")]), exact.clone(), None),
        ("an unresolved network", json!([mesh_tls("m"), network("none")]), exact.clone(), None),
        (
            "another namespace's",
            json!([{"group": "policy.linkerd.io", "kind": "MeshTLSAuthentication", "name": "m", "namespace": "ops"}]),
            exact,
            None,
        ),
    ] {
        for reference in [target("s"), json!({"kind": "Namespace", "name": "shop"})] {
            let world =
                world([server("s", json!({})), tls.clone(), net.clone(), authorization("p", reference, refs.clone())]);
            let expected: Vec<_> = expected.iter().map(String::as_str).collect();
            let got = world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap();
            assert_eq!(show(&got), expected, "{name}");
        }
    }
}

#[test]
fn a_server_with_a_wrong_type_denies_what_it_may_select_and_nothing_grants_more() {
    let grants = [
        authorization("of-server", target("s"), json!([])),
        authorization("of-namespace", json!({"kind": "Namespace", "name": "shop"}), json!([])),
        rule("HTTPRoute", "v1beta3", "r", json!({"parentRefs": [target("s")]})),
    ];
    let other = server("other", json!({"podSelector": {"matchLabels": {"app": "web"}}, "port": 9090}));
    for (name, spec, denied) in [
        ("an access policy", json!({"accessPolicy": 1}), &[8080][..]),
        ("a protocol", json!({"proxyProtocol": []}), &[8080]),
        ("a selector of these pods", json!({"podSelector": {"matchLabels": "app"}}), &[8080]),
        ("a selector of other pods", json!({"podSelector": {"matchLabels": {"app": "api"}}, "accessPolicy": 1}), &[]),
        ("a selector of external workloads", json!({"podSelector": null, "externalWorkloadSelector": 1}), &[]),
        ("the name of a port", json!({"port": "http", "accessPolicy": 1}), &[8080]),
        ("a port", json!({"port": []}), &[8080, 7070]),
        ("a quoted number", json!({"port": "8080"}), &[8080]),
        ("an operator", json!({"podSelector": {"matchExpressions": [{"key": "a", "operator": "in"}]}}), &[8080]),
        ("no port", json!({"port": null}), &[8080, 7070]),
        ("a port of 0", json!({"port": 0}), &[8080, 7070]),
        ("a port beyond the last", json!({"port": 80800, "accessPolicy": "all-unauthenticated"}), &[8080, 7070]),
        ("what is no name of a port", json!({"port": "My_Port"}), &[8080, 7070]),
        ("no selector", json!({"podSelector": null, "accessPolicy": "all-unauthenticated"}), &[8080]),
    ] {
        let world = world(grants.clone());
        world.apply(other.clone());
        world.apply_unreadable(&server("s", spec));
        for port in [8080, 9090, 7070] {
            let found = world.index().watch_inbound(&web_1(), port).unwrap().borrow().clone().unwrap();
            let origin = match port {
                _ if denied.contains(&port) => Origin::Server("s".to_owned()),
                9090 => Origin::Server("other".to_owned()),
                _ => Origin::Default("all-unauthenticated"),
            };
            assert_eq!(found.policy.origin, origin, "{name}: {port}");
            assert_eq!(found.policy.authorizations.is_empty(), denied.contains(&port), "{name}: {port}");
            assert_eq!(found.policy.routes, InboundRoutes::Default, "{name}: {port}");
        }
        // It is as good as any once it can be read.
        world.apply(server("s", json!({})));
        let found = world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap();
        assert_eq!(found.policy.authorizations.len(), 2, "{name}");
        assert!(matches!(found.policy.routes, InboundRoutes::Http(_)), "{name}");
    }
}

#[test]
fn an_unreadable_server_yields_to_others_only_if_it_may_select_too_much() {
    for (spec, decides) in [(json!({"proxyProtocol": []}), "a"), (json!({"port": []}), "b")] {
        let world = world([server("b", json!({"accessPolicy": "all-unauthenticated"}))]);
        world.apply_unreadable(&server("a", spec));
        let found = world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap();
        assert_eq!(found.policy.origin, Origin::Server(decides.to_owned()));
    }
}

#[test]
fn a_server_whose_spec_is_none_denies_every_port_of_its_namespace() {
    let world = world([]);
    let mut unreadable = server("s", json!({}));
    unreadable["spec"] = json!("none");
    world.apply_unreadable(&unreadable);
    check(&world, &[]);
    world.delete(Kind::Server, "shop", "s");
    check(&world, &[&format!("all-unauthenticated: anyone from {ANYWHERE}")]);
}

/// Linkerd's controller cannot read such an object either: what is not stored is an unresolved reference.
#[test]
fn a_bad_identity_denies_the_whole_authentication() {
    let value = rule("MeshTLSAuthentication", "v1alpha1", "m", json!({"identities": ["*", "not an identity"]}));
    let unreadable = manifest::from_api(Kind::MeshTLSAuthentication, value).unwrap_err();
    assert!(unreadable.restrictive.is_none());
    check(&world([server("s", json!({})), authorization("p", target("s"), json!([mesh_tls("m")]))]), &[]);
}

#[test]
fn an_access_policy_of_audit_admits_under_its_own_name() {
    let world = world([server("s", json!({"accessPolicy": "audit"}))]);
    check(&world, &[&format!("audit: anyone from {ANYWHERE}")]);
}

#[test]
fn an_authentication_without_networks_grants_nothing() {
    let value = rule("NetworkAuthentication", "v1alpha1", "n", json!({"networks": []}));
    let unreadable = manifest::from_api(Kind::NetworkAuthentication, value).unwrap_err();
    let world = world([server("s", json!({})), authorization("p", target("s"), json!([network("n")]))]);
    world.index().apply(vec![Event::Apply(unreadable.restrictive.unwrap())]);
    check(&world, &[]);
}

#[test]
fn a_mesh_without_cluster_networks_has_no_clients_there() {
    let saz = rule(
        "ServerAuthorization",
        "v1beta1",
        "a",
        json!({"server": {"name": "s"}, "client": {"unauthenticated": true}}),
    );
    let world = World::with(|cluster| {
        cluster.networks.clear();
        cluster.default_policy = DefaultPolicy::ClusterUnauthenticated;
    });
    world.apply(pod("web-1", "10.244.0.1", json!({})));
    check(&world, &[]);
    world.apply_all([server("s", json!({})), saz]);
    check(&world, &[]);
}

#[test]
fn external_workloads_choose_their_default_policy_as_pods_do() {
    let vm = |annotations: Value| {
        json!({"apiVersion": "workload.linkerd.io/v1beta1", "kind": "ExternalWorkload",
            "metadata": {"name": "vm", "namespace": "shop", "annotations": annotations},
            "spec": {"meshTLS": {"identity": "spiffe://root/vm", "serverName": "vm"},
                "ports": [{"port": 8080}], "workloadIPs": [{"ip": "192.0.2.1"}]}})
    };
    for (annotations, expected) in [
        (json!({}), vec![format!("all-unauthenticated: anyone from {ANYWHERE}")]),
        (json!({"config.linkerd.io/default-inbound-policy": "deny"}), vec![]),
        (json!({"config.linkerd.io/default-inbound-policy": "everybody"}), vec![]),
        (
            json!({"config.linkerd.io/default-inbound-policy": "all-authenticated"}),
            vec![format!("all-authenticated: * from {ANYWHERE}")],
        ),
        (
            json!({"config.linkerd.io/proxy-require-identity-inbound-ports": "8080"}),
            vec![format!("all-authenticated: * from {ANYWHERE}")],
        ),
        (
            json!({"config.linkerd.io/proxy-require-identity-inbound-ports": "8081"}),
            vec![format!("all-unauthenticated: anyone from {ANYWHERE}")],
        ),
    ] {
        let object: weft_k8s_api::workload::ExternalWorkload = serde_json::from_value(vm(annotations.clone())).unwrap();
        let world = World::new();
        world.index().apply(vec![Event::Apply(Box::new(manifest::Object::ExternalWorkload(object)))]);
        let server =
            world.index().watch_inbound_external(&Key::new("shop", "vm"), 8080).unwrap().borrow().clone().unwrap();
        assert_eq!(show(&server), expected, "{annotations}");
    }
}

#[test]
fn a_policy_for_another_target_grants_nothing() {
    check(&world([server("s", json!({})), authorization("p", target("other"), json!([]))]), &[]);
    let route = json!({"group": "policy.linkerd.io", "kind": "HTTPRoute", "name": "s"});
    let route = manifest::from_api(Kind::AuthorizationPolicy, authorization("p", route, json!([]))).unwrap();
    let routed = world([server("s", json!({}))]);
    routed.index().apply(vec![Event::Apply(Box::new(route))]);
    check(&routed, &[]);
    let namespace = authorization("p", json!({"kind": "Namespace", "name": "shop"}), json!([]));
    let without_server = world([namespace]);
    let origin =
        without_server.index().watch_inbound(&web_1(), 8080).unwrap().borrow().clone().unwrap().policy.origin.clone();
    assert_eq!(origin, Origin::Default("all-unauthenticated"), "policies attach to Servers only");
}

#[test]
fn watchers_hear_of_authentications_that_come_and_go() {
    let world = world([server("s", json!({})), authorization("p", target("s"), json!([mesh_tls("m")]))]);
    let mut rx = world.index().watch_inbound(&web_1(), 8080).unwrap();
    let tls = rule("MeshTLSAuthentication", "v1alpha1", "m", json!({"identities": ["*"]}));
    world.apply(tls.clone());
    assert_eq!(show(&changed(&mut rx).unwrap().unwrap()).len(), 1);
    world.delete(Kind::MeshTLSAuthentication, "shop", "m");
    assert!(show(&changed(&mut rx).unwrap().unwrap()).is_empty());
    world.apply(tls);
    assert_eq!(show(&changed(&mut rx).unwrap().unwrap()).len(), 1);
    world.delete(Kind::AuthorizationPolicy, "shop", "p");
    assert!(show(&changed(&mut rx).unwrap().unwrap()).is_empty());
    world.delete(Kind::Pod, "shop", "web-1");
    assert!(changed(&mut rx).unwrap().is_none());
}

/// A policy may arrive before the objects that it refers to: nothing is reported before everything is known.
#[test]
fn a_policy_that_grants_nothing_is_reported_when_that_becomes_so() {
    let world = world([server("s", json!({})), authorization("p", target("s"), json!([mesh_tls("m")]))]);
    let apply = |batch: Vec<Event>| {
        let problems = world.index().apply(batch).problems.into_iter();
        problems.map(|problem| format!("{}: {}", problem.object, problem.problem)).collect::<Vec<_>>()
    };
    let event = |object: Value| {
        let read = manifest::parse("test.json".as_ref(), &object.to_string());
        Event::Apply(Box::new(read.objects.into_iter().next().unwrap().object))
    };
    let missing = "AuthorizationPolicy shop/p: spec.requiredAuthenticationRefs: MeshTLSAuthentication shop/m does not \
                   exist; the policy grants nothing";
    assert_eq!(world.index().ineffective_policies(), 0);
    assert_eq!(apply(vec![Event::Synced]), [missing]);
    assert_eq!(world.index().ineffective_policies(), 1);
    // Another object of the namespace changes: the problem is not reported again.
    assert_eq!(
        apply(vec![event(rule("MeshTLSAuthentication", "v1alpha1", "n", json!({"identities": ["*"]})))]),
        [""; 0]
    );
    let tls = rule("MeshTLSAuthentication", "v1alpha1", "m", json!({"identities": ["*"]}));
    assert_eq!(apply(vec![event(tls)]), [""; 0]);
    assert_eq!(world.index().ineffective_policies(), 0);
    world.delete(Kind::MeshTLSAuthentication, "shop", "m");
    assert_eq!(world.index().ineffective_policies(), 1);
    let route = json!({"group": "policy.linkerd.io", "kind": "HTTPRoute", "name": "r"});
    let route = manifest::from_api(Kind::AuthorizationPolicy, authorization("p", route, json!([]))).unwrap();
    let expected = "AuthorizationPolicy shop/p: spec.targetRef: HTTPRoute r of policy.linkerd.io does not exist, or no \
                    Server of its namespace is its parent; the policy grants nothing";
    assert_eq!(apply(vec![Event::Apply(Box::new(route))]), [expected]);
    let egress = json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": "r"});
    let egress = serde_json::from_value(authorization("p", egress, json!([]))).unwrap();
    let expected = "AuthorizationPolicy shop/p: spec.targetRef: EgressNetwork r is not a valid target, expected a Server, \
                    an HTTPRoute, a GRPCRoute or the policy's Namespace; the policy grants nothing";
    assert_eq!(apply(vec![Event::Apply(Box::new(manifest::Object::AuthorizationPolicy(egress)))]), [expected]);
    world.delete(Kind::AuthorizationPolicy, "shop", "p");
    assert_eq!(world.index().ineffective_policies(), 0);
}

#[test]
fn an_unreadable_list_of_ports_that_require_identity_means_every_port() {
    let annotations = json!({"config.linkerd.io/proxy-require-identity-inbound-ports": "http, 80-"});
    let object = pod("web-1", "10.244.0.1", json!({"metadata": {"annotations": annotations}}));
    let object: k8s_openapi::api::core::v1::Pod = serde_json::from_value(object).unwrap();
    let world = World::new();
    let apply = || world.index().apply(vec![Event::Apply(Box::new(manifest::Object::Pod(object.clone())))]).problems;
    let problems = apply();
    assert_eq!((problems.len(), problems[0].object.as_str()), (1, "Pod shop/web-1"), "{problems:?}");
    check(&world, &[&format!("all-authenticated: * from {ANYWHERE}")]);
    assert_eq!(apply(), [], "a problem is reported once");
}

/// Linkerd's default server goes by the annotation alone. Here both ends of a connection agree: clients treat
/// a port of the default list as opaque, and the server must not wait there for a protocol that never comes.
#[test]
fn both_ends_agree_on_ports_that_are_opaque_by_default() {
    let world = world([]);
    let protocol =
        |port| world.index().watch_inbound(&web_1(), port).unwrap().borrow().as_ref().unwrap().policy.protocol;
    let client = |port| {
        let addr = SocketAddr::new("10.244.0.1".parse().unwrap(), port);
        world.index().watch_endpoint_profile(addr).unwrap().borrow().as_ref().unwrap().opaque
    };
    for (port, expected) in [(3306, true), (8080, false)] {
        assert_eq!((client(port), protocol(port) == ServerProtocol::Opaque), (expected, expected), "{port}");
    }
}

#[test]
fn authentications_of_other_namespaces_count_where_they_are_named() {
    let elsewhere =
        json!({"group": "policy.linkerd.io", "kind": "MeshTLSAuthentication", "name": "m", "namespace": "ops"});
    let world = world([server("s", json!({})), authorization("p", target("s"), json!([elsewhere]))]);
    let mut rx = world.index().watch_inbound(&web_1(), 8080).unwrap();
    let mut tls = rule(
        "MeshTLSAuthentication",
        "v1alpha1",
        "m",
        json!({"identityRefs": [{"kind": "ServiceAccount", "name": "a"}]}),
    );
    tls["metadata"]["namespace"] = json!("ops");
    world.apply(tls);
    let expected = format!("p: a.ops.serviceaccount.identity.linkerd.cluster.local from {ANYWHERE}");
    assert_eq!(show(&changed(&mut rx).unwrap().unwrap()), [expected]);
}

#[test]
fn probes_are_known_by_port() {
    let world = World::new();
    world.apply(pod("web-1", "10.244.0.1", json!({"spec": {"containers": [{"name": "app", "ports": [{"name": "http", "containerPort": 8080}],
        "livenessProbe": {"httpGet": {"path": "/live", "port": "http"}}, "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}},
        "startupProbe": {"tcpSocket": {"port": 8080}}}]}})));
    let paths =
        |port| world.index().watch_inbound(&web_1(), port).unwrap().borrow().as_ref().unwrap().probe_paths.clone();
    assert_eq!(paths(8080), ["/live", "/ready"]);
    assert!(paths(8081).is_empty());
}

/// The kubelet parses the path as a URL: its request has a path and a query.
#[test]
fn a_probes_path_is_that_of_its_request() {
    let world = World::new();
    let probe = |path: &str| json!({"httpGet": {"path": path, "port": 8080}});
    world.apply(pod("web-1", "10.244.0.1", json!({"spec": {"containers": [{"name": "app",
        "livenessProbe": probe("/live?verbose=1"), "readinessProbe": probe("ready#now"), "startupProbe": probe("?x")}]}})));
    let paths = world.index().watch_inbound(&web_1(), 8080).unwrap().borrow().as_ref().unwrap().probe_paths.clone();
    assert_eq!(paths, ["/", "/live", "/ready"]);
}
