//! Statuses of routes, rate limits and EgressNetworks, as `kubectl get -o json` shows them.

use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use weft_k8s_api::support::{self, State};
use weft_test_kit::wait::eventually;

use crate::{
    process::{PATIENCE, Process},
    turn::Uses,
    world::{World, define, resource},
};

pub(crate) const POLICY: &str = "policy.linkerd.io/v1beta3";
const ALPHA: &str = "policy.linkerd.io/v1alpha1";
const GATEWAY: &str = "gateway.networking.k8s.io/v1";
const GATEWAY_ALPHA: &str = "gateway.networking.k8s.io/v1alpha2";
const GATEWAY_KINDS: [&str; 4] = ["httproutes", "grpcroutes", "tlsroutes", "tcproutes"];
const LEASE: &str = "policy-controller-write";
pub(crate) const GOOD: &str = "Accepted=True Accepted, ResolvedRefs=True ResolvedRefs";

fn object(version: &str, kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec})
}

pub(crate) fn route(version: &str, kind: &str, name: &str, parent: &Value, backend: &str) -> Value {
    let mut spec = json!({"parentRefs": [parent], "rules": [{"backendRefs": [{"name": backend, "port": 80}]}]});
    if kind == "TLSRoute" {
        spec["hostnames"] = json!(["example.org"]);
    }
    object(version, kind, name, spec)
}

pub(crate) fn service(port: u16) -> Value {
    json!({"group": "core", "kind": "Service", "name": "web", "port": port})
}

fn server(name: &str) -> Value {
    object(POLICY, "Server", name, json!({"podSelector": {}, "port": 8080}))
}

fn limit(name: &str) -> Value {
    let target = json!({"group": "policy.linkerd.io", "kind": "Server", "name": "limited"});
    object(ALPHA, "HTTPLocalRateLimitPolicy", name, json!({"targetRef": target, "total": {"requestsPerSecond": 1}}))
}

fn egress(name: &str, cidr: &str) -> Value {
    object(ALPHA, "EgressNetwork", name, json!({"trafficPolicy": "Allow", "networks": [{"cidr": cidr}]}))
}

/// A world with the Gateway API.
async fn world() -> World {
    let world = World::using(Uses::Statuses).await;
    for kind in GATEWAY_KINDS {
        define(&world.client, &format!("{kind}.gateway.networking.k8s.io")).await;
    }
    world
}

impl World {
    fn api(&self, version: &str, kind: &str) -> Api<DynamicObject> {
        let (group, version) = version.split_once('/').unwrap();
        let resource = resource(group, version, kind);
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }

    async fn get(&self, version: &str, kind: &str, name: &str) -> Value {
        serde_json::to_value(self.api(version, kind).get(name).await.unwrap()).unwrap()
    }

    /// Waits until an object's status has exactly these conditions: of each parent, if it has parents.
    pub(crate) async fn says(&self, policy: &Process, version: &str, kind: &str, name: &str, expected: &[&str]) {
        eventually("the status", PATIENCE, async || {
            let status = self.get(version, kind, name).await["status"].clone();
            let shown = match status["parents"].as_array() {
                Some(parents) => parents.iter().map(|parent| show(&parent["conditions"])).collect(),
                None => vec![show(&status["conditions"])],
            };
            if shown == expected { Ok(()) } else { Err(format!("{kind} {name}: {status}\n{}", policy.output())) }
        })
        .await;
    }
}

fn show(conditions: &Value) -> String {
    let text = |condition: &Value, field: &str| condition[field].as_str().unwrap_or_default().to_owned();
    let each = conditions.as_array().into_iter().flatten().map(|one| {
        let message = text(one, "message");
        let message = if message.is_empty() { message } else { format!(" ({message})") };
        format!("{}={} {}{message}", text(one, "type"), text(one, "status"), text(one, "reason"))
    });
    each.collect::<Vec<_>>().join(", ")
}

#[tokio::test]
async fn every_kind_of_route_gets_its_status() {
    let world = world().await;
    let policy = world.policy_named("one").await;
    world.apply(server("s")).await;
    let to_server = json!({"group": "policy.linkerd.io", "kind": "Server", "name": "s"});
    for (version, kind, name, parent, expected) in [
        (POLICY, "HTTPRoute", "inbound", &to_server, "Accepted=True Accepted"),
        (POLICY, "HTTPRoute", "outbound", &service(80), GOOD),
        (GATEWAY, "HTTPRoute", "outbound", &service(81), GOOD),
        (GATEWAY, "GRPCRoute", "outbound", &service(82), GOOD),
        (GATEWAY_ALPHA, "TLSRoute", "outbound", &service(83), GOOD),
        (GATEWAY_ALPHA, "TCPRoute", "outbound", &service(84), GOOD),
    ] {
        world.apply(route(version, kind, name, parent, "web")).await;
        world.says(&policy, version, kind, name, &[expected]).await;
    }
    let status = world.get(POLICY, "HTTPRoute", "outbound").await["status"]["parents"][0].clone();
    let parent = json!({"group": "core", "kind": "Service", "namespace": world.namespace, "name": "web", "port": 80});
    assert_eq!((&status["controllerName"], &status["parentRef"]), (&json!("linkerd.io/policy-controller"), &parent));
    let object = world.get(POLICY, "HTTPRoute", "outbound").await;
    let managers = object["metadata"]["managedFields"].as_array().unwrap().clone();
    let ours = managers.iter().find(|entry| entry["subresource"] == "status").unwrap();
    assert_eq!(ours["manager"], "linkerd.io/policy-controller");
    world.done().await;
}

#[tokio::test]
async fn the_status_of_a_route_follows_what_it_depends_on() {
    let world = world().await;
    let policy = world.policy_named("one").await;
    let to = json!({"group": "core", "kind": "Service", "name": "later", "port": 80});
    world.apply(route(GATEWAY, "HTTPRoute", "r", &to, "backend")).await;
    let says = async |expected: &str| world.says(&policy, GATEWAY, "HTTPRoute", "r", &[expected]).await;
    let not_found = "ResolvedRefs=False BackendNotFound";
    says(&format!("Accepted=False NoMatchingParent, {not_found}")).await;
    let named = |name: &str, ip: Option<&str>| {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"clusterIP": ip, "ports": [{"name": "http", "port": 80}]}})
    };
    world.apply(named("later", Some("None"))).await;
    says(&format!("Accepted=False NoMatchingParent (parent service must have a ClusterIP), {not_found}")).await;
    world.delete("Service", "later").await;
    world.apply(named("later", None)).await;
    says(&format!("Accepted=True Accepted, {not_found}")).await;
    world.apply(named("backend", None)).await;
    says(GOOD).await;
    world.apply(route(GATEWAY, "GRPCRoute", "stronger", &to, "backend")).await;
    says("Accepted=False RouteReasonConflicted, ResolvedRefs=True ResolvedRefs").await;
    world.api(GATEWAY, "GRPCRoute").delete("stronger", &kube::api::DeleteParams::default()).await.unwrap();
    says(GOOD).await;
    let mut other = route(GATEWAY, "HTTPRoute", "r", &to, "backend");
    other["spec"]["rules"][0]["backendRefs"][0] = json!({"group": "example.org", "kind": "Machine", "name": "m"});
    world.apply(other).await;
    says("Accepted=True Accepted, ResolvedRefs=False InvalidKind").await;
    world.done().await;
}

/// Also where ReferenceGrants are installed later.
#[tokio::test]
async fn a_backend_of_another_namespace_needs_a_grant_where_grants_are_required() {
    let world = world().await;
    let policy = world.policy_with_grants().await;
    let mut to_other = route(GATEWAY, "HTTPRoute", "r", &service(80), "web");
    to_other["spec"]["rules"][0]["backendRefs"] = json!([{"name": "kubernetes", "namespace": "default", "port": 443}]);
    world.apply(to_other).await;
    let says = async |expected: &str| world.says(&policy, GATEWAY, "HTTPRoute", "r", &[expected]).await;
    let refused = "Accepted=True Accepted, ResolvedRefs=False RefNotPermitted \
        (no ReferenceGrant of namespace default permits Service kubernetes as a backend)";
    says(refused).await;
    define(&world.client, "referencegrants.gateway.networking.k8s.io").await;
    let grants = resource("gateway.networking.k8s.io", "v1beta1", "ReferenceGrant");
    let grants: Api<DynamicObject> = Api::namespaced_with(world.client.clone(), "default", &grants);
    let mut grant =
        DynamicObject::new(&world.namespace, &resource("gateway.networking.k8s.io", "v1beta1", "ReferenceGrant"));
    grant.data = json!({"spec": {"from": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute",
        "namespace": world.namespace}], "to": [{"group": "", "kind": "Service", "name": "kubernetes"}]}});
    grants.create(&kube::api::PostParams::default(), &grant).await.unwrap();
    says(GOOD).await;
    grants.delete(&world.namespace, &kube::api::DeleteParams::default()).await.unwrap();
    says(refused).await;
    world.done().await;
}

#[tokio::test]
async fn rate_limits_and_egress_networks_get_their_status() {
    let world = world().await;
    let policy = world.policy_named("one").await;
    let of_limit = async |name: &str, expected: &str| {
        world.says(&policy, ALPHA, "HTTPLocalRateLimitPolicy", name, &[expected]).await
    };
    world.apply(limit("a")).await;
    of_limit("a", "Accepted=False NoMatchingTarget").await;
    world.apply(server("limited")).await;
    of_limit("a", "Accepted=True Accepted").await;
    world.apply(limit("b")).await;
    of_limit("b", "Accepted=False RateLimitReasonAlreadyExists").await;
    let target = world.get(ALPHA, "HTTPLocalRateLimitPolicy", "a").await["status"]["targetRef"].clone();
    assert_eq!(target, json!({"group": "policy.linkerd.io", "kind": "Server", "name": "limited"}));

    let of_network = async |expected: &str| world.says(&policy, ALPHA, "EgressNetwork", "out", &[expected]).await;
    world.apply(egress("out", "10.1.0.0/16")).await;
    of_network("Accepted=False EgressReasonNetworkOverlap (networks overlap with clusterNetworks)").await;
    let to = json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": "out", "port": 80});
    world.apply(route(POLICY, "HTTPRoute", "out", &to, "web")).await;
    let of_route = async |expected: &str| world.says(&policy, POLICY, "HTTPRoute", "out", &[expected]).await;
    let not_accepted = "Accepted=False NoMatchingParent (EgressNetwork parent has not been accepted)";
    of_route(&format!("{not_accepted}, ResolvedRefs=True ResolvedRefs")).await;
    world.apply(egress("out", "192.0.2.0/24")).await;
    of_network("Accepted=True Accepted").await;
    of_route(GOOD).await;
    world.done().await;
}

#[tokio::test]
async fn a_status_that_is_right_is_not_written_again_and_that_of_others_stays() {
    let world = world().await;
    // As another controller left it.
    world.apply(route(GATEWAY, "HTTPRoute", "r", &service(80), "web")).await;
    let condition = json!({"type": "Accepted", "status": "True", "reason": "Accepted", "message": "theirs",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let entry = |controller: &str, name: &str| {
        json!({"controllerName": controller, "conditions": [condition],
            "parentRef": {"group": "core", "kind": "Service", "namespace": world.namespace, "name": name}})
    };
    let ours = "linkerd.io/policy-controller";
    let written = json!({"status": {"parents": [entry("example.org/gateway", "web"), entry(ours, "former")]}});
    let routes = world.api(GATEWAY, "HTTPRoute");
    routes.patch_status("r", &PatchParams::default(), &Patch::Merge(&written)).await.unwrap();

    let policy = world.policy_named("one").await;
    let expected = ["Accepted=True Accepted (theirs)", GOOD];
    world.says(&policy, GATEWAY, "HTTPRoute", "r", &expected).await;
    let before = world.get(GATEWAY, "HTTPRoute", "r").await;
    assert_eq!(before["status"]["parents"][0], written["status"]["parents"][0]);
    // An unrelated object, which is written later.
    world.apply(route(GATEWAY, "HTTPRoute", "other", &service(80), "none")).await;
    let of_other = ["Accepted=True Accepted, ResolvedRefs=False BackendNotFound"];
    world.says(&policy, GATEWAY, "HTTPRoute", "other", &of_other).await;
    // Another process finds it as it should be.
    policy.end(nix::sys::signal::Signal::SIGTERM).await;
    let policy = world.policy_named("one").await;
    policy.says("acquired lease").await;
    world.apply(route(GATEWAY, "HTTPRoute", "other", &service(80), "web")).await;
    world.says(&policy, GATEWAY, "HTTPRoute", "other", &[GOOD]).await;
    assert_eq!(world.get(GATEWAY, "HTTPRoute", "r").await, before);
    assert!(
        policy.lines("wrote status").iter().all(|line| !line.contains(&format!("HTTPRoute {}/r\"", world.namespace)))
    );
    // A status can be read before its writer has the answer to its request and counts it.
    let patched = r#"http_client_requests_total{client="k8s",code="200",method="patch"}"#;
    let metrics = eventually("the write is counted", PATIENCE, async || match policy.get("/metrics").await {
        (200, metrics) if metrics.contains(patched) => Ok(metrics),
        answer => Err(format!("{answer:?}")),
    })
    .await;
    for row in support::API_METRICS.iter().chain(support::POLICY_METRICS) {
        let family = format!("\n# TYPE {} ", row.name);
        assert_eq!(metrics.contains(&family), row.state == State::Works, "{}: {metrics}", row.name);
    }
    world.done().await;
}

#[tokio::test]
async fn a_replica_without_the_lease_writes_no_status() {
    let world = world().await;
    world.deployment("linkerd-destination").await;
    let first = world.policy_named("first").await;
    first.says("acquired lease").await;
    let second = world.policy_named("second").await;
    second.ready().await;
    world.apply(route(GATEWAY, "HTTPRoute", "r", &service(80), "web")).await;
    world.says(&first, GATEWAY, "HTTPRoute", "r", &[GOOD]).await;
    assert!(second.lines("wrote status").is_empty() && second.lines("acquired lease").is_empty());
    let lease = world.get("coordination.k8s.io/v1", "Lease", LEASE).await;
    assert_eq!(lease["spec"]["holderIdentity"], "first");
    let owner = &lease["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["name"]), (&json!("Deployment"), &json!("linkerd-destination")));
    // The opposite: once it is free, the second one takes it, and writes.
    first.end(nix::sys::signal::Signal::SIGTERM).await;
    second.says("acquired lease").await;
    world.apply(route(GATEWAY, "HTTPRoute", "r", &service(80), "none")).await;
    let expected = "Accepted=True Accepted, ResolvedRefs=False BackendNotFound";
    world.says(&second, GATEWAY, "HTTPRoute", "r", &[expected]).await;
    world.done().await;
}

#[tokio::test]
async fn a_kind_of_the_gateway_api_is_not_waited_for_and_followed_once_it_is_installed() {
    let world = world().await;
    world.undefine("tcproutes.gateway.networking.k8s.io").await;
    let policy = world.policy_named("one").await;
    policy.ready().await;
    let absent = || {
        let lines = policy.lines("TCPRoute").into_iter();
        lines.filter(|line| line.contains("kind is not installed") && line.contains("\"INFO\"")).collect::<Vec<_>>()
    };
    // Log lines pass through a queue: they appear later than their effects.
    eventually("a log line", PATIENCE, async || if absent().is_empty() { Err("none") } else { Ok(()) }).await;
    define(&world.client, "tcproutes.gateway.networking.k8s.io").await;
    world.apply(route(GATEWAY_ALPHA, "TCPRoute", "r", &service(80), "web")).await;
    world.says(&policy, GATEWAY_ALPHA, "TCPRoute", "r", &[GOOD]).await;
    assert_eq!(absent().len(), 1, "once, however often it was tried");
    world.done().await;
}
