//! What stands for a policy of which a part has the wrong type, or for a Server of which it cannot be read what it
//! selects, if it was never read in a good state: it selects what the policy may select, as far as that can be read,
//! and allows nothing. Without it, what the policy restricts would have the default policy.
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
        RateLimit, Server, ServerSpec, is_readable,
        route::{GatewayHttpRoute, GrpcRoute, HttpRoute, ParentReference, TcpRoute, TlsRoute},
        validate,
    },
    ports,
};

/// What stands for an unreadable object with this content, if it is of a kind whose absence may allow something. Its
/// annotation `weft.io/unreadable` has the problem.
pub(super) fn restrictive(reference: &ObjectRef, value: &Value, problem: String) -> Option<Object> {
    let name = reference.name.as_str();
    let spec = &value["spec"];
    let mut is_widened = false;
    let mut object = match reference.kind {
        Kind::Server => {
            let (spec, more) = server(spec);
            is_widened = more;
            Object::Server(Server::new(name, spec))
        }
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
    let annotations = metadata.annotations.get_or_insert_default();
    if is_widened {
        annotations.insert(labels::UNREADABLE_SELECTION.to_owned(), problem.clone());
    }
    annotations.insert(labels::UNREADABLE.to_owned(), problem);
    Some(object)
}

/// What stands for an object whose types are right, if what it selects cannot be read.
pub(super) fn stand_in(object: &Object) -> Option<Object> {
    let Object::Server(server) = object else { return None };
    let problem = validate::server_selection(server).into_iter().next()?;
    restrictive(&object.reference(), &serde_json::to_value(server).ok()?, problem.to_string())
}

/// All that a Server may select, and whether that may be more than what it selects.
fn server(spec: &Value) -> (ServerSpec, bool) {
    let mut is_widened = false;
    let has_selector = ["podSelector", "externalWorkloadSelector"].iter().any(|name| !spec[name].is_null());
    let mut selector = |name: &str| match &spec[name] {
        Value::Null if has_selector => None,
        selector => part(selector).filter(is_readable).or_else(|| {
            is_widened = true;
            Some(LabelSelector::default())
        }),
    };
    let (pod_selector, external_workload_selector) = (selector("podSelector"), selector("externalWorkloadSelector"));
    let is_port = |port: &IntOrString| match port {
        IntOrString::Int(number) => (1..=65535).contains(number),
        IntOrString::String(name) => ports::is_port_name(name),
    };
    // A quoted number is no name of a port; what it was to select is plain.
    let unquoted = |port: IntOrString| match port {
        IntOrString::String(text) => match text.parse::<u16>() {
            Ok(number) => IntOrString::Int(number.into()),
            Err(_) => IntOrString::String(text),
        },
        number @ IntOrString::Int(_) => number,
    };
    let port = part(&spec["port"]).map(unquoted).filter(is_port).unwrap_or_else(|| {
        is_widened = true;
        EVERY_PORT
    });
    (ServerSpec { pod_selector, external_workload_selector, port, ..ServerSpec::default() }, is_widened)
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
