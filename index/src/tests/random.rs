//! Random histories: whatever happened, answers equal those of an index that has only ever seen what is left.
//!
//! A history is a list of batches of applies and deletes, with repetitions, changes back and forth, deletes of what is
//! not there, and objects before those that they refer to. All questions are asked at the start and kept open. After
//! each batch every open answer is compared with the answer of a new index, which gets the remaining objects in another
//! order: what is wrong there is a change that was not passed on, or an order that counts.
//!
//! `WEFT_INDEX_HISTORIES=1000000 cargo test -p weft-index random` goes on for longer than the suite does.

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
use weft_k8s_api::manifest::{Object, ObjectRef};

use super::*;

/// Histories in an ordinary run.
const HISTORIES: u32 = 150;

const NODES: [&str; 4] = ["n1", "n2", "n3", "none"];
const ADDRESSES: [&str; 6] = ["10.244.0.1", "10.244.0.2", "10.244.0.3", "10.96.0.1", "10.96.0.2", "192.168.0.1"];
/// Addresses outside the cluster.
const OUTSIDE: [&str; 2] = ["8.8.8.8", "93.184.216.34"];
/// Namespaces of clients.
const CLIENTS: [&str; 3] = ["shop", "ops", "dev"];
const PORTS: [u16; 3] = [80, 8080, 9999];

/// An open subscription: what it asks, and the answer so far.
struct Open<Q, T> {
    question: Q,
    answer: Option<watch::Receiver<T>>,
}

/// An answer that is always there.
type Always<T> = Arc<Snapshot<T>>;

/// A Service's port, and the namespace of the client.
type NamedPort = (Key, u16, &'static str);

/// An answer that may not be there.
type Maybe<T> = Option<Arc<Snapshot<T>>>;

/// Every question that there is, open.
struct Client {
    endpoints: Vec<Open<(Key, EndpointsQuery), Always<Endpoints>>>,
    service_profiles: Vec<Open<(Key, ProfileQuery), Always<ServiceProfile>>>,
    endpoint_profiles: Vec<Open<SocketAddr, Maybe<EndpointProfile>>>,
    hostnames: Vec<Open<(Key, &'static str), Option<IpAddr>>>,
    inbound: Vec<Open<(Key, u16), Maybe<InboundServer>>>,
    inbound_external: Vec<Open<(Key, u16), Maybe<InboundServer>>>,
    outbound: Vec<Open<(SocketAddr, &'static str), Maybe<OutboundPolicy>>>,
    outbound_names: Vec<Open<NamedPort, Maybe<OutboundPolicy>>>,
}

fn open<Q, T>(questions: impl IntoIterator<Item = Q>) -> Vec<Open<Q, T>> {
    questions.into_iter().map(|question| Open { question, answer: None }).collect()
}

impl<Q, T: Clone> Open<Q, T> {
    /// The answer now. A subscription that ended, or whose answer `ends` it, is opened again, as clients do.
    fn answer(&mut self, ends: impl Fn(&T) -> bool, ask: impl Fn(&Q) -> Option<watch::Receiver<T>>) -> Option<T> {
        let gone = |rx: &watch::Receiver<T>| rx.has_changed().is_err() || ends(&rx.borrow());
        if self.answer.as_ref().is_none_or(gone) {
            self.answer = None;
            self.answer = ask(&self.question);
        }
        self.answer.as_ref().map(|rx| rx.borrow().clone())
    }
}

fn services() -> Vec<Key> {
    ["web", "api"].map(|name| Key::new("shop", name)).to_vec()
}

fn addresses(ips: &[&str]) -> Vec<SocketAddr> {
    let with_ports = |ip: &&str| PORTS.map(|port| SocketAddr::new(ip.parse().unwrap(), port));
    ips.iter().flat_map(with_ports).collect()
}

fn ports_of(names: &[(&str, &str)]) -> Vec<(Key, u16)> {
    names.iter().flat_map(|(namespace, name)| PORTS.map(|port| (Key::new(*namespace, *name), port))).collect()
}

impl Client {
    fn new() -> Self {
        let mut endpoints = Vec::new();
        let mut service_profiles = Vec::new();
        for service in services() {
            for port in PORTS {
                for node in NODES.map(Some).into_iter().chain([None]) {
                    let query = EndpointsQuery { port, node: node.map(str::to_owned), hostname: None };
                    endpoints.push((service.clone(), query));
                }
                let hostname = Some("web-1".to_owned());
                endpoints.push((service.clone(), EndpointsQuery { port, node: None, hostname }));
                for namespace in [None, Some("ops".to_owned())] {
                    service_profiles.push((service.clone(), ProfileQuery { port, namespace }));
                }
            }
        }
        let outside = addresses(&OUTSIDE);
        let outbound = addresses(&ADDRESSES).into_iter().chain(outside).flat_map(|addr| CLIENTS.map(|of| (addr, of)));
        let pods = ["web-1", "web-2", "web-3"];
        let hostnames = services().into_iter().flat_map(|key| pods.map(|name| (key.clone(), name)));
        let names = services().into_iter().flat_map(|key| PORTS.map(|port| (key.clone(), port)));
        let names = names.flat_map(|(key, port)| CLIENTS.map(|of| (key.clone(), port, of)));
        Self {
            endpoints: open(endpoints),
            service_profiles: open(service_profiles),
            endpoint_profiles: open(addresses(&ADDRESSES)),
            hostnames: open(hostnames),
            inbound: open(ports_of(&[("shop", "web-1"), ("shop", "web-2"), ("shop", "web-3")])),
            inbound_external: open(ports_of(&[("shop", "vm")])),
            outbound: open(outbound),
            outbound_names: open(names),
        }
    }

    /// All answers, as text that names the question.
    fn answers(&mut self, index: &World) -> Vec<String> {
        let mut all = Vec::new();
        for open in &mut self.endpoints {
            let answer = open.answer(|_| false, |(key, query)| Some(index.index().watch_endpoints(key, query.clone())));
            all.push(format!("endpoints {:?}: {answer:?}", open.question));
        }
        for open in &mut self.service_profiles {
            let answer =
                open.answer(|_| false, |(key, query)| Some(index.index().watch_service_profile(key, query.clone())));
            all.push(format!("profile {:?}: {answer:?}", open.question));
        }
        for open in &mut self.endpoint_profiles {
            // While an address is ambiguous, an open stream is silent and a new one is refused.
            let answer = open.answer(|_| false, |addr| index.index().watch_endpoint_profile(*addr).ok()).flatten();
            all.push(format!("profile {}: {answer:?}", open.question));
        }
        for open in &mut self.hostnames {
            let ask = |(key, hostname): &(Key, &str)| index.index().watch_pod_of_service(key, hostname);
            let answer = open.answer(Option::is_none, ask).flatten();
            all.push(format!("hostname {:?}: {answer:?}", open.question));
        }
        for open in &mut self.inbound {
            let answer = open.answer(Option::is_none, |(key, port)| index.index().watch_inbound(key, *port)).flatten();
            all.push(format!("inbound {:?}: {answer:?}", open.question));
        }
        for open in &mut self.inbound_external {
            let answer =
                open.answer(Option::is_none, |(key, port)| index.index().watch_inbound_external(key, *port)).flatten();
            all.push(format!("inbound external {:?}: {answer:?}", open.question));
        }
        for open in &mut self.outbound {
            let answer = open.answer(Option::is_none, |(addr, of)| index.index().watch_outbound(*addr, of)).flatten();
            all.push(format!("outbound {:?}: {answer:?}", open.question));
        }
        for open in &mut self.outbound_names {
            let ask = |(key, port, of): &(Key, u16, &str)| Some(index.index().watch_outbound_name(key, *port, of));
            let answer = open.answer(|_| false, ask);
            all.push(format!("outbound {:?}: {answer:?}", open.question));
        }
        all
    }
}

/// An object, as restrictive as it has to be if it is not valid.
fn parse(object: Value) -> Object {
    let read = manifest::parse("test.json".as_ref(), &object.to_string());
    if read.errors.is_empty() { read.objects.into_iter().next().unwrap().object } else { unreadable(&object) }
}

fn reference(object: &Object) -> ObjectRef {
    let metadata = object.metadata();
    ObjectRef {
        kind: object.kind(),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

fn policy(kind: &str, version: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": format!("policy.linkerd.io/{version}"), "kind": kind,
        "metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

/// A route of a kind, of a namespace, with a parent and backends.
fn route(kind: &str, namespace: &str, name: &str, parent: Value, backends: &[&str]) -> Value {
    let version = if kind.starts_with('T') { "v1alpha2" } else { "v1" };
    let backends: Vec<_> = backends.iter().map(|name| json!({"name": name, "namespace": "shop", "port": 80})).collect();
    json!({"apiVersion": format!("gateway.networking.k8s.io/{version}"), "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"parentRefs": [parent], "rules": [{"backendRefs": backends}]}})
}

/// Objects that only the policy of clients depends on.
fn outbound_forms() -> Vec<Value> {
    let at = |service: &str, port: Option<u16>| json!({"group": "core", "kind": "Service", "namespace": "shop", "name": service, "port": port});
    let network = |namespace: &str, port: Option<u16>| json!({"group": "policy.linkerd.io", "kind": "EgressNetwork", "namespace": namespace, "name": "e", "port": port});
    let mut all = vec![
        route("HTTPRoute", "shop", "r1", at("web", None), &["api"]),
        route("HTTPRoute", "shop", "r1", at("api", Some(80)), &["web", "gone"]),
        route("HTTPRoute", "ops", "r1", at("web", Some(80)), &[]),
        route("HTTPRoute", "ops", "r1", network("linkerd-egress", Some(80)), &["web"]),
        route("HTTPRoute", "ops", "r2", at("web", None), &["web"]),
        route("GRPCRoute", "shop", "g", at("web", Some(8080)), &["api"]),
        route("GRPCRoute", "dev", "g", at("api", None), &[]),
        route("TLSRoute", "dev", "t", at("web", None), &["web"]),
        route("TLSRoute", "linkerd-egress", "t", network("linkerd-egress", Some(80)), &["api"]),
        route("TLSRoute", "dev", "t", network("ops", Some(80)), &[]),
        route("TCPRoute", "shop", "c", at("web", Some(80)), &["api", "web"]),
        route("TCPRoute", "ops", "c", network("ops", Some(8080)), &["web"]),
    ];
    let mut strange = route("HTTPRoute", "shop", "r1", at("web", None), &["api"]);
    merge(&mut strange["spec"]["rules"][0], json!({"matches": [{"unknown": 1}]}));
    let mut annotated = service("web", "10.96.0.1", json!({}));
    merge(&mut annotated, json!({"metadata": {"annotations": {"timeout.linkerd.io/request": "1s"}}}));
    all.extend([strange, annotated, service("web", "None", json!({})), service("api", "8.8.8.8", json!({}))]);
    for namespace in ["ops", "linkerd-egress"] {
        for spec in [
            json!({"trafficPolicy": "Deny"}),
            json!({"trafficPolicy": "Allow", "networks": [{"cidr": "8.8.0.0/16", "except": ["8.8.8.0/24"]}]}),
            json!({"trafficPolicy": "Allow", "networks": [{"cidr": "0.0.0.0/0"}]}),
        ] {
            all.push(super::outbound::egress_network(namespace, "e", spec));
        }
    }
    all
}

/// Every object that a history may contain, in each of its forms.
fn forms() -> Vec<Object> {
    let mut all = Vec::new();
    for (name, zone) in [("n1", "a"), ("n2", "a"), ("n3", "b")] {
        all.push(super::destination::node(name, zone));
    }
    for spec in [
        json!({}),
        json!({"internalTrafficPolicy": "Local"}),
        json!({"ports": [{"name": "http", "port": 80}, {"name": "more", "port": 8080, "appProtocol": "http"}]}),
        json!({"clusterIP": "10.96.0.2"}),
    ] {
        all.push(service("web", "10.96.0.1", spec));
    }
    let mut opaque = service("api", "10.96.0.2", json!({}));
    merge(&mut opaque, json!({"metadata": {"annotations": {"config.linkerd.io/opaque-ports": "80"}}}));
    all.extend([service("api", "10.96.0.2", json!({})), opaque]);
    for (ip, value) in [("10.96.0.1", "true"), ("None", "true"), ("None", "false")] {
        let mut annotated = service("web", ip, json!({}));
        merge(&mut annotated, json!({"metadata": {"annotations": {"weft.io/require-mtls": value}}}));
        all.push(annotated);
    }
    let placed = |name: &str, pods: &[(&str, &str)], zones: &[&str]| {
        let mut object = slice(name, pods, 8080);
        for (endpoint, zone) in zones.iter().enumerate() {
            let node = if *zone == "a" { "n1" } else { "n3" };
            merge(
                &mut object["endpoints"][endpoint],
                json!({"zone": zone, "nodeName": node,
                "hostname": pods[endpoint].0, "hints": {"forZones": [{"name": zone}]}}),
            );
        }
        object
    };
    let (one, two, three) = (("web-1", "10.244.0.1"), ("web-2", "10.244.0.2"), ("web-3", "10.244.0.3"));
    all.extend([
        placed("web", &[one, two], &[]),
        placed("web", &[one, two, three], &["a", "a", "b"]),
        placed("web", &[three], &["b"]),
        placed("api", &[two, three], &[]),
    ]);
    let mut unready = placed("web", &[one, three], &[]);
    unready["endpoints"][1]["conditions"] = json!({"ready": false});
    all.push(unready);
    let mut other = placed("web", &[two], &["a"]);
    merge(&mut other, json!({"metadata": {"name": "web-more"}}));
    all.push(other);
    let mut mirrored = slice("web", &[("gateway", "192.168.0.1")], 4143);
    mirrored["endpoints"][0].as_object_mut().unwrap().remove("targetRef");
    let metadata = json!({"name": "web-east", "labels": {"mirror.linkerd.io/cluster-name": "east"},
        "annotations": {"mirror.linkerd.io/remote-gateway-identity": "gateway"}});
    merge(&mut mirrored, json!({"metadata": metadata}));
    all.push(mirrored);
    let mut machine = slice("web", &[("vm", "192.168.0.1")], 8080);
    merge(&mut machine, json!({"metadata": {"name": "web-vm"}}));
    machine["endpoints"][0]["targetRef"]["kind"] = json!("ExternalWorkload");
    all.push(machine);
    for (name, ip) in [one, two, three] {
        all.push(pod(name, ip, json!({})));
        all.push(pod(name, ip, json!({"metadata": {"labels": {"app": "api", "tier": "back"}}})));
    }
    all.extend([
        pod(
            "web-1",
            "10.244.0.1",
            json!({"metadata": {"annotations": {"config.linkerd.io/opaque-ports": "8080",
            "config.linkerd.io/default-inbound-policy": "deny"}}}),
        ),
        pod(
            "web-1",
            "10.244.0.1",
            json!({"spec": {"containers": [{"name": "app", "ports":
            [{"name": "http", "containerPort": 8080, "hostPort": 80}]}]}, "status": {"hostIP": "192.168.0.1"}}),
        ),
        pod("web-2", "10.244.0.1", json!({})),
        pod("web-2", "10.244.0.2", json!({"status": {"phase": "Succeeded"}})),
        pod("web-3", "10.244.0.3", json!({"metadata": {"labels": {"linkerd.io/control-plane-ns": ""}}})),
        pod(
            "web-3",
            "10.244.0.3",
            json!({"metadata": {"ownerReferences":
            [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "u"}]}}),
        ),
        json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "web-abc", "namespace": "shop",
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "u"}]},
            "spec": {"selector": {}, "template": {}}}),
        super::destination::external("192.168.0.1"),
    ]);
    for (name, spec) in [
        ("s1", json!({"podSelector": {"matchLabels": {"app": "web"}}, "port": 8080})),
        ("s1", json!({"podSelector": {"matchLabels": {"app": "web"}}, "port": "http", "proxyProtocol": "opaque"})),
        ("s1", json!({"podSelector": {"matchLabels": {"app": "api", "tier": "back"}}, "port": 8080})),
        ("s2", json!({"podSelector": {}, "port": 8080, "accessPolicy": "all-unauthenticated"})),
        (
            "s2",
            json!({"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]},
            "port": 80, "proxyProtocol": "gRPC"}),
        ),
        ("s2", json!({"externalWorkloadSelector": {}, "port": 8080, "proxyProtocol": "opaque"})),
    ] {
        all.push(policy("Server", "v1beta3", name, spec));
    }
    for (group, version, kind) in [
        ("policy.linkerd.io", "v1beta3", "HTTPRoute"),
        ("gateway.networking.k8s.io", "v1", "HTTPRoute"),
        ("gateway.networking.k8s.io", "v1", "GRPCRoute"),
    ] {
        for (parents, spec, created) in [
            (&["s1"][..], json!({}), "2026-01-02T00:00:00Z"),
            (&["s1", "s2"], json!({"hostnames": ["web.shop"], "rules": [{}]}), "2026-01-01T00:00:00Z"),
            (&["s2"], json!({"rules": []}), "2026-01-02T00:00:00Z"),
        ] {
            let to = |name: &&str| json!({"group": "policy.linkerd.io", "kind": "Server", "name": name});
            let parents: Vec<_> = parents.iter().map(to).collect();
            let mut route = json!({"apiVersion": format!("{group}/{version}"), "kind": kind,
                "metadata": {"name": "r", "namespace": "shop", "creationTimestamp": created},
                "spec": {"parentRefs": parents}});
            merge(&mut route, json!({"spec": spec}));
            all.push(route);
        }
    }
    for (name, server, rate) in [("l1", "s1", 1), ("l1", "s2", 2), ("l2", "s1", 3), ("l2", "s2", 4)] {
        let target = json!({"group": "policy.linkerd.io", "kind": "Server", "name": server});
        let spec = json!({"targetRef": target, "total": {"requestsPerSecond": rate}});
        all.push(policy("HTTPLocalRateLimitPolicy", "v1alpha1", name, spec));
    }
    let authorizes_as = |name: &str, target: Value, refs: Value| {
        policy(
            "AuthorizationPolicy",
            "v1alpha1",
            name,
            json!({"targetRef": target, "requiredAuthenticationRefs": refs}),
        )
    };
    let authorizes = |target: Value, refs: Value| {
        policy("AuthorizationPolicy", "v1alpha1", "p", json!({"targetRef": target, "requiredAuthenticationRefs": refs}))
    };
    let server = json!({"group": "policy.linkerd.io", "kind": "Server", "name": "s1"});
    let reference = |kind: &str| json!([{"group": "policy.linkerd.io", "kind": kind, "name": "x"}]);
    all.extend([
        authorizes(server.clone(), reference("MeshTLSAuthentication")),
        authorizes(json!({"kind": "Namespace", "name": "shop"}), reference("NetworkAuthentication")),
        authorizes(server, json!([])),
        policy("MeshTLSAuthentication", "v1alpha1", "x", json!({"identities": ["*"]})),
        policy(
            "MeshTLSAuthentication",
            "v1alpha1",
            "x",
            json!({"identityRefs": [{"kind": "ServiceAccount", "name": "a"}]}),
        ),
        policy("NetworkAuthentication", "v1alpha1", "x", json!({"networks": [{"cidr": "10.0.0.0/8"}]})),
        policy(
            "ServerAuthorization",
            "v1beta1",
            "z",
            json!({"server": {"name": "s1"}, "client": {"unauthenticated": true}}),
        ),
        policy(
            "ServerAuthorization",
            "v1beta1",
            "z",
            json!({"server": {"selector": {}}, "client": {"meshTLS": {"identities": ["*"]}}}),
        ),
    ]);
    for (group, kind) in [
        ("policy.linkerd.io", "HTTPRoute"),
        ("gateway.networking.k8s.io", "HTTPRoute"),
        ("gateway.networking.k8s.io", "GRPCRoute"),
    ] {
        let route = json!({"group": group, "kind": kind, "name": "r"});
        all.push(authorizes_as("p", route.clone(), json!([])));
        all.push(authorizes_as("q", route, reference("MeshTLSAuthentication")));
    }
    for namespace in ["shop", "ops"] {
        all.push(json!({"apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
            "metadata": {"name": "web.shop.svc.cluster.local", "namespace": namespace},
            "spec": {"dstOverrides": [{"authority": "api.shop.svc.cluster.local", "weight": "1"}]}}));
    }
    all.extend(outbound_forms());
    all.extend(forms_with_status());
    all.into_iter().map(parse).collect()
}

/// Objects with statuses, some of which have been written.
fn forms_with_status() -> Vec<Value> {
    let mut all = Vec::new();
    let reference = |kind: &str, name: &str| {
        let group = if kind == "Service" { "core" } else { "policy.linkerd.io" };
        json!({"group": group, "kind": kind, "name": name, "port": 80})
    };
    let route = |kind: &str, parents: Value, backends: Value| {
        let version = if kind == "TCPRoute" { "v1alpha2" } else { "v1" };
        json!({"apiVersion": format!("gateway.networking.k8s.io/{version}"), "kind": kind,
            "metadata": {"name": "r", "namespace": "shop"},
            "spec": {"parentRefs": parents, "rules": [{"backendRefs": backends}]}})
    };
    let (web, api, out) = (reference("Service", "web"), reference("Service", "api"), reference("EgressNetwork", "e"));
    for kind in ["HTTPRoute", "GRPCRoute", "TLSRoute", "TCPRoute"] {
        all.push(route(kind, json!([web, reference("Server", "s1")]), json!([api])));
        all.push(route(kind, json!([web, out]), json!([out])));
        let mut written = route(kind, json!([web, {"kind": "Gateway", "name": "g"}]), json!([]));
        let said = json!({"type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        written["status"] = json!({"parents": [
            {"controllerName": "linkerd.io/policy-controller", "parentRef": web, "conditions": [said]},
            {"controllerName": "example.org/gateway", "parentRef": {"name": "g"}, "conditions": [said]}]});
        all.push(written);
    }
    let unknown = json!({"parentRefs": [web], "rules": [{"matches": [{"path": {"type": "Glob", "value": "/"}}]}]});
    all.push(json!({"apiVersion": "policy.linkerd.io/v1beta3", "kind": "HTTPRoute", "spec": unknown,
        "metadata": {"name": "r", "namespace": "shop"}}));
    for (name, server) in [("l1", "s1"), ("l1", "s2"), ("l2", "s1")] {
        let spec = json!({"targetRef": reference("Server", server), "total": {"requestsPerSecond": 1}});
        all.push(policy("HTTPLocalRateLimitPolicy", "v1alpha1", name, spec));
    }
    for cidr in ["1.0.0.0/8", "10.0.0.0/8"] {
        let spec = json!({"trafficPolicy": "Allow", "networks": [{"cidr": cidr}]});
        all.push(policy("EgressNetwork", "v1alpha1", "e", spec));
    }
    all.push(service("api", "None", json!({})));
    all
}

/// What is to be written, without the times, which tell of the history.
fn statuses(index: &World) -> BTreeMap<ObjectRef, Status> {
    let mut all: BTreeMap<_, _> =
        index.index().statuses().all().into_iter().map(|(object, status)| (object, (*status).clone())).collect();
    for status in all.values_mut() {
        status.conditions_mut().for_each(|condition| condition.last_transition_time = records::UNSET);
    }
    all
}

/// Applies a history and compares after each of its batches.
fn check(forms: &[Object], history: &[Vec<(bool, usize)>]) -> Result<(), TestCaseError> {
    let world = World::new();
    world.index().apply(vec![Event::Synced]);
    let (mut client, mut left) = (Client::new(), BTreeMap::new());
    client.answers(&world);
    for batch in history {
        let events = batch.iter().map(|(apply, form)| {
            let object = &forms[form % forms.len()];
            // Nodes stay, and stay where they are: a client's place is looked up once.
            if *apply || object.kind() == Kind::Node {
                left.insert(reference(object), object.clone());
                Event::Apply(Box::new(object.clone()))
            } else {
                left.remove(&reference(object));
                Event::Delete(reference(object))
            }
        });
        world.index().apply(events.collect());
        let fresh = World::new();
        fresh.index().apply(left.values().rev().map(|object| Event::Apply(Box::new(object.clone()))).collect());
        fresh.index().apply(vec![Event::Synced]);
        let (found, expected) = (client.answers(&world), Client::new().answers(&fresh));
        for (found, expected) in found.iter().zip(&expected) {
            prop_assert_eq!(found, expected);
        }
        prop_assert_eq!(world.index().ineffective_policies(), fresh.index().ineffective_policies());
        prop_assert_eq!(statuses(&world), statuses(&fresh));
    }
    Ok(())
}

#[test]
fn random_histories_end_as_if_only_what_is_left_had_ever_been() {
    let forms = forms();
    let histories = std::env::var("WEFT_INDEX_HISTORIES").ok().map_or(HISTORIES, |text| text.parse().unwrap());
    let config = ProptestConfig { cases: histories, failure_persistence: None, ..ProptestConfig::default() };
    // Three of four events apply, so that something is there to be changed.
    let event = (proptest::bool::weighted(0.75), 0..forms.len());
    let history = vec(vec(event, 1..6), 1..25);
    TestRunner::new(config).run(&history, |history| check(&forms, &history)).unwrap();
}
