//! Statuses: each reason, and its opposite.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use weft_k8s_api::manifest::ObjectRef;

use super::*;

const OURS: &str = "linkerd.io/policy-controller";
const LINKERD: &str = "policy.linkerd.io/v1beta3";
const GATEWAY: &str = "gateway.networking.k8s.io/v1";
const ACCEPTED: &str = "Accepted=True Accepted";
const RESOLVED: &str = "ResolvedRefs=True ResolvedRefs";
const NO_PARENT: &str = "Accepted=False NoMatchingParent";

/// An index that has seen everything.
fn world<const N: usize>(objects: [Value; N]) -> World {
    let world = World::new();
    world.apply_all(objects);
    world.index().apply(vec![Event::Synced]);
    world
}

fn object(version: &str, kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

/// A route with these parents and, in its only rule, backends.
fn route(version: &str, kind: &str, name: &str, parents: Value, backends: Value) -> Value {
    let rules = json!([{"backendRefs": backends}]);
    object(version, kind, name, json!({"parentRefs": parents, "rules": rules}))
}

fn http(parents: Value, backends: Value) -> Value {
    route(LINKERD, "HTTPRoute", "r", parents, backends)
}

fn web() -> Value {
    json!([{"group": "core", "kind": "Service", "name": "web", "port": 80}])
}

fn to_server() -> Value {
    json!([{"group": "policy.linkerd.io", "kind": "Server", "name": "s"}])
}

fn to_egress(name: &str) -> Value {
    json!([{"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": name, "port": 80}])
}

fn backend(name: &str) -> Value {
    json!([{"name": name, "port": 80}])
}

fn server(name: &str) -> Value {
    object(LINKERD, "Server", name, json!({"podSelector": {}, "port": 8080}))
}

fn egress(name: &str, cidr: &str) -> Value {
    let spec = json!({"trafficPolicy": "Allow", "networks": [{"cidr": cidr}]});
    object("policy.linkerd.io/v1alpha1", "EgressNetwork", name, spec)
}

fn limit(name: &str, created: &str, server: &str) -> Value {
    let target = json!({"group": "policy.linkerd.io", "kind": "Server", "name": server});
    let spec = json!({"targetRef": target, "total": {"requestsPerSecond": 1}});
    let mut limit = object("policy.linkerd.io/v1alpha1", "HTTPLocalRateLimitPolicy", name, spec);
    merge(&mut limit, json!({"metadata": {"creationTimestamp": created}}));
    limit
}

fn now() -> Timestamp {
    "2026-03-01T00:00:00Z".parse().unwrap()
}

fn reference(kind: Kind, name: &str) -> ObjectRef {
    ObjectRef { kind, namespace: Some("shop".to_owned()), name: name.to_owned() }
}

fn show(conditions: &[Condition]) -> String {
    let each = conditions.iter().map(|one| {
        assert_eq!(one.observed_generation, None);
        let message = if one.message.is_empty() { String::new() } else { format!(" ({})", one.message) };
        format!("{}={} {}{message}", one.type_, one.status, one.reason)
    });
    each.collect::<Vec<_>>().join(", ")
}

/// The pending status of an object: its conditions, for each parent.
fn pending(world: &World, kind: Kind, name: &str) -> Vec<String> {
    let status = world.index().statuses().get(&reference(kind, name), now());
    match status.as_deref() {
        None => Vec::new(),
        Some(Status::RateLimit(status)) => vec![show(&status.conditions)],
        Some(Status::EgressNetwork(status)) => vec![show(&status.conditions)],
        Some(Status::Route(status)) => {
            let each = status.parents.iter().map(|entry| {
                let parent = &entry.parent_ref;
                let part = |part: &Option<String>| part.clone().unwrap_or_default();
                let port = parent.port.map(|port| format!(":{port}")).unwrap_or_default();
                let (group, kind, namespace) = (part(&parent.group), part(&parent.kind), part(&parent.namespace));
                let by = if entry.controller_name == OURS { "" } else { "other: " };
                format!("{by}{group}/{kind} {namespace}/{}{port}: {}", parent.name, show(entry.conditions()))
            });
            each.collect()
        }
    }
}

/// The pending status of HTTPRoute `r`, which has one parent: its conditions.
fn of_route(world: &World) -> String {
    let pending = pending(world, Kind::HttpRoute, "r");
    assert_eq!(pending.len(), 1, "{pending:?}");
    pending[0].split_once(": ").unwrap().1.to_owned()
}

/// Objects with the statuses that are pending, as if they had been written.
fn write_all(world: &World, objects: &[Value]) {
    for object in objects {
        let mut object = object.clone();
        let read = manifest::parse("test.json".as_ref(), &object.to_string());
        let reference = read.objects[0].object.reference();
        let Some(status) = world.index().statuses().get(&reference, now()) else { continue };
        object["status"] = match &*status {
            Status::Route(status) => json!(status),
            Status::RateLimit(status) => json!(status),
            Status::EgressNetwork(status) => json!(status),
        };
        world.apply(object);
    }
}

#[test]
fn parents_are_named_as_linkerd_names_them() {
    let parents = json!([
        {"group": "", "kind": "Service", "name": "web", "port": 80},
        {"group": "core", "kind": "Service", "name": "web", "port": 80, "namespace": "shop"},
        {"kind": "Server", "name": "s"},
        {"kind": "EgressNetwork", "name": "out", "port": 80},
        {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "g"},
    ]);
    let objects = [service("web", "10.96.0.1", json!({})), server("s"), egress("out", "1.0.0.0/8")];
    let world = world(objects);
    world.apply(http(parents, json!([])));
    assert_eq!(
        pending(&world, Kind::HttpRoute, "r"),
        [
            format!("core/Service shop/web:80: {ACCEPTED}, {RESOLVED}"),
            // A Server says nothing about backends.
            format!("policy.linkerd.io/Server shop/s: {ACCEPTED}"),
            format!("policy.linkerd.io/EgressNetwork shop/out:80: {ACCEPTED}, {RESOLVED}"),
        ]
    );
}

#[test]
fn a_parent_that_comes_accepts_and_one_that_goes_does_not() {
    for (kind, parent, parents, refs) in [
        (Kind::Service, service("web", "10.96.0.1", json!({})), web(), true),
        (Kind::Server, server("web"), json!([{"kind": "Server", "name": "web"}]), false),
        (Kind::EgressNetwork, egress("web", "1.0.0.0/8"), to_egress("web"), true),
    ] {
        let world = world([http(parents, json!([]))]);
        let refs = if refs { format!(", {RESOLVED}") } else { String::new() };
        assert_eq!(of_route(&world), format!("{NO_PARENT}{refs}"), "{kind}");
        world.apply(parent);
        assert_eq!(of_route(&world), format!("{ACCEPTED}{refs}"), "{kind}");
        world.delete(kind, "shop", "web");
        assert_eq!(of_route(&world), format!("{NO_PARENT}{refs}"), "{kind}");
    }
}

#[test]
fn a_headless_service_is_no_parent() {
    let world = world([http(web(), json!([])), service("web", "None", json!({}))]);
    let expected = format!("{NO_PARENT} (parent service must have a ClusterIP), {RESOLVED}");
    assert_eq!(of_route(&world), expected);
    world.apply(service("web", "10.96.0.1", json!({})));
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
}

#[test]
fn an_egress_network_that_is_not_accepted_is_no_parent() {
    let world = world([http(to_egress("out"), json!([])), egress("out", "10.0.0.0/16")]);
    let expected = format!("{NO_PARENT} (EgressNetwork parent has not been accepted), {RESOLVED}");
    assert_eq!(of_route(&world), expected);
    world.apply(egress("out", "1.0.0.0/16"));
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
}

#[test]
fn a_stronger_kind_of_route_conflicts_while_it_is_there() {
    let world = world([service("web", "10.96.0.1", json!({})), http(web(), json!([]))]);
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
    let grpc = |parents| route(GATEWAY, "GRPCRoute", "g", parents, json!([]));
    world.apply(grpc(web()));
    assert_eq!(of_route(&world), format!("Accepted=False RouteReasonConflicted, {RESOLVED}"));
    let stronger = pending(&world, Kind::GrpcRoute, "g");
    assert_eq!(stronger, [format!("core/Service shop/web:80: {ACCEPTED}, {RESOLVED}")]);
    // At another port.
    world.apply(grpc(json!([{"group": "core", "kind": "Service", "name": "web", "port": 81}])));
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
    world.apply(grpc(web()));
    world.delete(Kind::GrpcRoute, "shop", "g");
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
}

#[test]
fn a_route_of_another_namespace_puts_nobody_elses_out_of_force() {
    let world = world([service("web", "10.96.0.1", json!({})), http(web(), json!([]))]);
    let parents = json!([{"group": "core", "kind": "Service", "name": "web", "namespace": "shop"}]);
    let mut consumers = route(GATEWAY, "GRPCRoute", "g", parents, json!([]));
    consumers["metadata"]["namespace"] = json!("ops");
    world.apply(consumers);
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
    world.apply(route(GATEWAY, "GRPCRoute", "g", web(), json!([])));
    assert_eq!(of_route(&world), format!("Accepted=False RouteReasonConflicted, {RESOLVED}"));
}

#[test]
fn a_backend_that_does_not_exist_is_not_found() {
    let world = world([service("web", "10.96.0.1", json!({})), http(web(), backend("api"))]);
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False BackendNotFound"));
    // Without a cluster address, it can still be a backend.
    world.apply(service("api", "None", json!({})));
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
    world.delete(Kind::Service, "shop", "api");
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False BackendNotFound"));
}

/// Nothing is said about whether the Service exists.
#[test]
fn a_backend_that_no_grant_permits_is_refused() {
    let grant = json!({"apiVersion": "gateway.networking.k8s.io/v1beta1", "kind": "ReferenceGrant",
        "metadata": {"name": "g", "namespace": "ops"}, "spec": {
            "from": [{"group": "policy.linkerd.io", "kind": "HTTPRoute", "namespace": "shop"}],
            "to": [{"group": "", "kind": "Service"}]}});
    let world = World::with(|cluster| cluster.require_reference_grants = true);
    let other = json!([{"name": "api", "namespace": "ops", "port": 80}]);
    world.apply_all([service("web", "10.96.0.1", json!({})), http(web(), other)]);
    world.index().apply(vec![Event::Synced]);
    let why = "RefNotPermitted (no ReferenceGrant of namespace ops permits Service api as a backend)";
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False {why}"));
    world.apply(grant);
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False BackendNotFound"));
    world.delete(Kind::ReferenceGrant, "ops", "g");
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False {why}"));
}

#[test]
fn a_backend_of_another_kind_is_invalid() {
    let other = json!([{"group": "multicluster.x-k8s.io", "kind": "ServiceImport", "name": "web", "port": 80}]);
    let world = world([service("web", "10.96.0.1", json!({})), http(web(), other)]);
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False InvalidKind"));
    world.apply(http(web(), backend("web")));
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
}

#[test]
fn an_egress_network_is_a_backend_only_of_itself() {
    let world = world([egress("out", "1.0.0.0/8"), http(to_egress("out"), to_egress("out"))]);
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
    world.apply(egress("more", "2.0.0.0/8"));
    world.apply(http(to_egress("out"), to_egress("more")));
    let invalid = "InvalidKind (EgressNetwork backend needs to be on a route that has an EgressNetwork parent)";
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False {invalid}"));
    world.delete(Kind::EgressNetwork, "shop", "more");
    assert_eq!(of_route(&world), format!("{ACCEPTED}, ResolvedRefs=False BackendNotFound"));
}

#[test]
fn a_route_with_an_unknown_part_is_not_accepted_and_says_which() {
    let unknown = |matches| {
        let rules = json!([{"matches": matches, "backendRefs": backend("nothing")}]);
        object(GATEWAY, "HTTPRoute", "r", json!({"parentRefs": web(), "rules": rules}))
    };
    let world = world([service("web", "10.96.0.1", json!({}))]);
    // As the API server has it, if admission was not asked.
    let glob = unknown(json!([{"path": {"type": "Glob", "value": "/"}}]));
    let restrictive = manifest::from_api(Kind::GatewayHttpRoute, glob).unwrap_err().restrictive.unwrap();
    world.index().apply(vec![Event::Apply(restrictive)]);
    let found = pending(&world, Kind::GatewayHttpRoute, "r").concat();
    assert!(found.contains("Accepted=False UnsupportedValue (spec.rules[0].matches[0].path"), "{found}");
    assert!(!found.contains("ResolvedRefs"), "{found}");
    world.apply(unknown(json!([{"path": {"type": "Exact", "value": "/"}}])));
    let found = pending(&world, Kind::GatewayHttpRoute, "r").concat();
    assert!(found.contains(&format!("{ACCEPTED}, ResolvedRefs=False BackendNotFound")), "{found}");
}

#[test]
fn connections_have_statuses_too() {
    let world = world([service("web", "10.96.0.1", json!({}))]);
    for (kind, version, name) in [(Kind::TlsRoute, "v1", "TLSRoute"), (Kind::TcpRoute, "v1alpha2", "TCPRoute")] {
        let version = format!("gateway.networking.k8s.io/{version}");
        world.apply(route(&version, name, "r", web(), backend("web")));
        assert_eq!(pending(&world, kind, "r"), [format!("core/Service shop/web:80: {ACCEPTED}, {RESOLVED}")]);
        world.delete(kind, "shop", "r");
        assert!(pending(&world, kind, "r").is_empty());
    }
}

#[test]
fn of_several_rate_limits_the_oldest_is_accepted_then_the_first_by_name() {
    let world = world([limit("a", "2026-01-02T00:00:00Z", "s"), limit("b", "2026-01-01T00:00:00Z", "s")]);
    let of = |name: &str| pending(&world, Kind::HttpLocalRateLimitPolicy, name).concat();
    for name in ["a", "b"] {
        assert_eq!(of(name), "Accepted=False NoMatchingTarget");
    }
    world.apply(server("s"));
    assert_eq!((of("a").as_str(), of("b").as_str()), ("Accepted=False RateLimitReasonAlreadyExists", ACCEPTED));
    world.apply(limit("b", "2026-01-02T00:00:00Z", "s"));
    assert_eq!((of("a").as_str(), of("b").as_str()), (ACCEPTED, "Accepted=False RateLimitReasonAlreadyExists"));
    // About another Server, or gone.
    world.apply(limit("a", "2026-01-02T00:00:00Z", "t"));
    assert_eq!((of("a").as_str(), of("b").as_str()), ("Accepted=False NoMatchingTarget", ACCEPTED));
    world.delete(Kind::HttpLocalRateLimitPolicy, "shop", "a");
    world.delete(Kind::Server, "shop", "s");
    assert_eq!((of("a").as_str(), of("b").as_str()), ("", "Accepted=False NoMatchingTarget"));
}

#[test]
fn an_egress_network_with_addresses_of_the_cluster_is_not_accepted() {
    let world = world([egress("out", "10.1.0.0/16")]);
    let of = || pending(&world, Kind::EgressNetwork, "out").concat();
    assert_eq!(of(), "Accepted=False EgressReasonNetworkOverlap (networks overlap with clusterNetworks)");
    world.apply(egress("out", "1.1.0.0/16"));
    assert_eq!(of(), ACCEPTED);
    let everything = json!({"trafficPolicy": "Deny"});
    world.apply(object("policy.linkerd.io/v1alpha1", "EgressNetwork", "out", everything));
    assert_eq!(of(), ACCEPTED);
}

#[test]
fn what_is_said_is_not_pending_and_a_change_of_status_alone_derives_no_policy() {
    let objects = [
        http(web(), backend("web")),
        limit("l", "2026-01-01T00:00:00Z", "s"),
        egress("out", "1.0.0.0/8"),
        route(GATEWAY, "GRPCRoute", "g", to_server(), json!([])),
    ];
    let world = world([service("web", "10.96.0.1", json!({})), server("s"), pod("web-1", "10.244.0.1", json!({}))]);
    world.apply_all(objects.clone());
    let statuses = world.index().statuses();
    assert_eq!(statuses.take_changed().len(), 4);
    write_all(&world, &objects);
    assert!(statuses.all().is_empty(), "{:?}", statuses.all());
    world.apply(service("api", "10.96.0.2", json!({})));
    assert!(statuses.take_changed().is_empty() && statuses.all().is_empty());
    // The opposite: somebody else changes what Weft said.
    let mut changed = objects[2].clone();
    changed["status"] = json!({"conditions": []});
    world.apply(changed);
    assert_eq!(statuses.take_changed().len(), 1);

    let before = std::mem::take(&mut world.index().dirty);
    assert!(before.statuses.is_empty());
    let read = manifest::parse("test.json".as_ref(), &objects[0].to_string());
    let mut index = world.index();
    index.set(read.objects[0].object.clone());
    assert_eq!(index.dirty.statuses.len(), 1);
    assert!(index.dirty.outbound.is_empty() && index.dirty.outbound_names.is_empty() && index.dirty.pods.is_empty());
}

#[test]
fn what_others_said_stays_and_what_we_said_about_former_parents_goes() {
    let entry = |controller: &str, name: &str| {
        json!({"controllerName": controller, "parentRef": {"group": "core", "kind": "Service", "namespace": "shop", "name": name},
            "conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]})
    };
    let mut object = route(GATEWAY, "HTTPRoute", "r", web(), json!([]));
    object["status"] = json!({"parents": [entry(OURS, "old"), entry("example.org/gateway", "g")]});
    let world = world([service("web", "10.96.0.1", json!({})), object.clone()]);
    let other = format!("other: core/Service shop/g: {ACCEPTED}");
    let found = pending(&world, Kind::GatewayHttpRoute, "r");
    assert_eq!(found, [other.clone(), format!("core/Service shop/web:80: {ACCEPTED}, {RESOLVED}")]);
    // A route that has no parent of ours any more.
    object["spec"]["parentRefs"] = json!([{"name": "g"}]);
    world.apply(object.clone());
    assert_eq!(pending(&world, Kind::GatewayHttpRoute, "r"), [other]);
    // One of which we have said nothing is none of our business.
    object["status"] = json!({"parents": [entry("example.org/gateway", "g")]});
    world.apply(object);
    assert!(pending(&world, Kind::GatewayHttpRoute, "r").is_empty());
    assert!(world.index().store.statuses.is_empty());
}

#[test]
fn an_entry_of_another_controller_is_written_back_as_it_was() {
    let parent = |name: &str| json!({"group": "core", "kind": "Service", "namespace": "shop", "name": name});
    let without = json!({"controllerName": "example.org/gateway", "parentRef": parent("g")});
    let empty = json!({"controllerName": "example.org/other", "parentRef": parent("g"), "conditions": []});
    let mut object = route(GATEWAY, "HTTPRoute", "r", web(), json!([]));
    object["status"] = json!({"parents": [without, empty]});
    let world = world([service("web", "10.96.0.1", json!({})), object]);
    let status = world.index().statuses().get(&reference(Kind::GatewayHttpRoute, "r"), now()).unwrap();
    let Status::Route(status) = &*status else { panic!() };
    let written = serde_json::to_value(status).unwrap();
    assert_eq!(written["parents"].as_array().unwrap()[..2], [without, empty]);
}

#[test]
fn other_conditions_of_an_egress_network_stay() {
    let mut object = egress("out", "1.0.0.0/8");
    object["status"] = json!({"conditions": [{"type": "Seen", "status": "True", "reason": "Seen", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    let world = world([object]);
    assert_eq!(pending(&world, Kind::EgressNetwork, "out").concat(), format!("Seen=True Seen, {ACCEPTED}"));
}

#[test]
fn the_time_of_a_condition_is_that_of_its_change() {
    let object = http(web(), backend("api"));
    let world = world([service("web", "10.96.0.1", json!({})), object.clone()]);
    let times = |now: &str| {
        let status = world.index().statuses().get(&reference(Kind::HttpRoute, "r"), now.parse().unwrap()).unwrap();
        let Status::Route(status) = &*status else { panic!() };
        let times = status.parents[0].conditions().iter().map(|condition| condition.last_transition_time.0.to_string());
        times.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(times("2026-02-01T00:00:00.7Z"), "2026-02-01T00:00:00Z 2026-02-01T00:00:00Z");
    assert_eq!(times("2026-02-02T00:00:00Z"), "2026-02-01T00:00:00Z 2026-02-01T00:00:00Z");
    // As it was written long ago, with another reason for the second condition.
    let condition = |kind: &str, status: &str, reason: &str| {
        json!({"type": kind, "status": status, "reason": reason, "message": "",
            "lastTransitionTime": "2020-01-01T00:00:00Z"})
    };
    let mut written = object;
    written["status"] = json!({"parents": [{"controllerName": OURS,
        "parentRef": {"group": "core", "kind": "Service", "namespace": "shop", "name": "web", "port": 80},
        "conditions": [condition("Accepted", "True", "Accepted"), condition("ResolvedRefs", "False", "InvalidKind")]}]});
    world.apply(written);
    assert_eq!(times("2026-02-03T00:00:00Z"), "2020-01-01T00:00:00Z 2026-02-01T00:00:00Z");
    world.apply(service("api", "10.96.0.2", json!({})));
    assert_eq!(times("2026-02-04T00:00:00Z"), "2020-01-01T00:00:00Z 2026-02-04T00:00:00Z");
}

#[test]
fn nothing_is_pending_before_everything_is_known() {
    let world = World::new();
    world.apply(http(web(), json!([])));
    assert!(world.index().statuses().all().is_empty());
    world.apply(service("web", "10.96.0.1", json!({})));
    world.index().apply(vec![Event::Synced]);
    assert_eq!(of_route(&world), format!("{ACCEPTED}, {RESOLVED}"));
}

#[tokio::test]
async fn the_writer_is_told_of_each_change_once() {
    let world = world([service("web", "10.96.0.1", json!({})), http(web(), json!([]))]);
    let statuses = world.index().statuses();
    statuses.changed().await;
    assert_eq!(statuses.take_changed().into_iter().collect::<Vec<_>>(), [reference(Kind::HttpRoute, "r")]);
    assert!(statuses.take_changed().is_empty());
    statuses.all_anew();
    statuses.changed().await;
    assert_eq!((statuses.take_changed().len(), statuses.enqueued()), (1, 2));
    world.apply(http(web(), backend("none")));
    world.delete(Kind::HttpRoute, "shop", "r");
    assert!(statuses.take_changed().is_empty(), "what is gone is not written");
}
