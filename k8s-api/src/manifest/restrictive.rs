//! What stands for a policy of which a part has the wrong type, and that was never read in a good state: it selects
//! what the policy may select, as far as that can be read, and allows nothing. Without it, what the policy restricts
//! would have the default policy.
//!
//! Kinds that only allow are left out, because their absence denies; so are kinds that are no policies.

use k8s_openapi::apimachinery::pkg::{
    apis::meta::v1::{LabelSelector, ObjectMeta},
    util::intstr::IntOrString,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Kind, Object, ObjectRef};
use crate::{
    labels,
    policy::{
        EVERY_PORT, EgressNetwork, EgressNetworkSpec, HttpLocalRateLimitPolicy, HttpLocalRateLimitPolicySpec,
        RateLimit, Server, ServerSpec,
        route::{GatewayHttpRoute, GrpcRoute, HttpRoute, ParentReference, TcpRoute, TlsRoute},
    },
    ports,
};

/// What stands for an unreadable object with this content, if it is of a kind whose absence may allow something. Its
/// annotation `weft.io/unreadable` has the problem.
pub(super) fn restrictive(reference: &ObjectRef, value: &Value, problem: String) -> Option<Object> {
    let name = reference.name.as_str();
    let spec = &value["spec"];
    let mut object = match reference.kind {
        Kind::Server => Object::Server(Server::new(name, server(spec))),
        Kind::HttpLocalRateLimitPolicy => {
            Object::HttpLocalRateLimitPolicy(HttpLocalRateLimitPolicy::new(name, rate_limit(spec)?))
        }
        Kind::EgressNetwork => Object::EgressNetwork(EgressNetwork::new(name, egress_network(spec))),
        Kind::HttpRoute => Object::HttpRoute(HttpRoute::new(name, route(spec, &http_rule())?)),
        Kind::GatewayHttpRoute => Object::GatewayHttpRoute(GatewayHttpRoute::new(name, route(spec, &http_rule())?)),
        Kind::GrpcRoute => {
            let rule = json!([{"matches": [{"method": {"type": "unreadable"}}]}]);
            Object::GrpcRoute(GrpcRoute::new(name, route(spec, &rule)?))
        }
        // Without a rule they mean nothing.
        Kind::TlsRoute => Object::TlsRoute(TlsRoute::new(name, route(spec, &json!([]))?)),
        Kind::TcpRoute => Object::TcpRoute(TcpRoute::new(name, route(spec, &json!([]))?)),
        _ => return None,
    };
    let metadata = object.metadata_mut();
    if let Some(read) = part::<ObjectMeta>(&value["metadata"]) {
        *metadata = read;
    }
    metadata.name = Some(name.to_owned());
    metadata.namespace.clone_from(&reference.namespace);
    metadata.annotations.get_or_insert_default().insert(labels::UNREADABLE.to_owned(), problem);
    Some(object)
}

fn server(spec: &Value) -> ServerSpec {
    let everything = || Some(LabelSelector::default());
    let selector = |name: &str| match &spec[name] {
        Value::Null => None,
        selector => part(selector).or_else(everything),
    };
    let is_port = |port: &IntOrString| match port {
        IntOrString::Int(number) => (1..=65535).contains(number),
        IntOrString::String(name) => ports::is_port_name(name),
    };
    let is_readable = spec.is_object();
    ServerSpec {
        pod_selector: if is_readable { selector("podSelector") } else { everything() },
        external_workload_selector: if is_readable { selector("externalWorkloadSelector") } else { everything() },
        port: part(&spec["port"]).filter(is_port).unwrap_or(EVERY_PORT),
        ..ServerSpec::default()
    }
}

/// The smallest limit there is. Without its target, it is about nothing.
fn rate_limit(spec: &Value) -> Option<HttpLocalRateLimitPolicySpec> {
    Some(HttpLocalRateLimitPolicySpec {
        target_ref: part(&spec["targetRef"])?,
        total: Some(RateLimit { requests_per_second: 1 }),
        identity: None,
        overrides: None,
    })
}

/// Denies traffic to its networks, or to all if they cannot be read.
fn egress_network(spec: &Value) -> EgressNetworkSpec {
    EgressNetworkSpec { networks: part(&spec["networks"]), traffic_policy: "Deny".to_owned() }
}

/// The parents that have a name, and rules that cannot be read.
fn route<S: DeserializeOwned>(spec: &Value, rules: &Value) -> Option<S> {
    let parents = match &spec["parentRefs"] {
        Value::Array(parents) => parents.as_slice(),
        parent @ Value::Object(_) => std::slice::from_ref(parent),
        _ => return None,
    };
    let parents: Vec<_> = parents.iter().filter_map(parent).collect();
    part(&json!({"parentRefs": parents, "rules": rules}))
}

/// A reference to a parent, without the parts that cannot be read.
fn parent(reference: &Value) -> Option<ParentReference> {
    Some(ParentReference {
        group: part(&reference["group"]),
        kind: part(&reference["kind"]),
        namespace: part(&reference["namespace"]),
        name: part(&reference["name"])?,
        section_name: part(&reference["sectionName"]),
        port: part(&reference["port"]),
    })
}

fn http_rule() -> Value {
    json!([{"matches": [{"path": {"type": "unreadable", "value": "/"}}]}])
}

fn part<T: DeserializeOwned>(value: &Value) -> Option<T> {
    T::deserialize(value).ok()
}
