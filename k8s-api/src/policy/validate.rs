//! Rules on policy resources beyond their types, one function per kind.
//!
//! They are those of Linkerd's admission webhook (`linkerd2:policy-controller/runtime/src/admission.rs`) that concern
//! one object. Parts that Linkerd accepts and Weft does not act on are also refused.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{
    AuthorizationPolicy, GROUP, MeshTLSAuthentication, NamespacedTargetRef, Network, NetworkAuthentication, Server,
    ServerAuthorization,
};
use crate::{
    field::{FieldPath, Invalid},
    ports,
};

/// Group of Gateway API's routes.
const GATEWAY_GROUP: &str = "gateway.networking.k8s.io";

/// The problems of a Server.
pub fn server(server: &Server) -> Vec<Invalid> {
    let spec = &server.spec;
    let mut found = Vec::new();
    match (&spec.pod_selector, &spec.external_workload_selector) {
        (None, None) => {
            found.push(FieldPath::of("spec").invalid("no selector, expected podSelector or externalWorkloadSelector"))
        }
        (Some(_), Some(_)) => found.push(
            FieldPath::of("spec.externalWorkloadSelector")
                .invalid("second selector, expected one of podSelector and externalWorkloadSelector"),
        ),
        _ => {}
    }
    match &spec.port {
        IntOrString::Int(1..=65535) => {}
        IntOrString::Int(port) => {
            found.push(FieldPath::of("spec.port").invalid(format!("bad port {port}, expected 1-65535 or a port name")))
        }
        IntOrString::String(name) if ports::is_port_name(name) => {}
        IntOrString::String(name) => found
            .push(FieldPath::of("spec.port").invalid(format!("bad port {name:?}, expected 1-65535 or a port name"))),
    }
    if spec.protocol().is_none() {
        let name = spec.proxy_protocol.as_deref().unwrap_or_default();
        found.push(
            FieldPath::of("spec.proxyProtocol")
                .invalid(format!("unknown protocol {name:?}, expected unknown, HTTP/1, HTTP/2, gRPC, opaque or TLS")),
        );
    }
    if let Err(error) = spec.access() {
        found.push(FieldPath::of("spec.accessPolicy").invalid(error));
    }
    found
}

/// The problems of a ServerAuthorization.
pub fn server_authorization(authorization: &ServerAuthorization) -> Vec<Invalid> {
    let spec = &authorization.spec;
    let mut found = Vec::new();
    match (&spec.server.name, &spec.server.selector) {
        (None, None) => found.push(FieldPath::of("spec.server").invalid("no Server, expected name or selector")),
        (Some(_), Some(_)) => {
            found.push(FieldPath::of("spec.server.selector").invalid("beside name, expected one of the two"));
        }
        _ => {}
    }
    let client = &spec.client;
    match &client.mesh_tls {
        Some(_) if client.unauthenticated => found
            .push(FieldPath::of("spec.client.unauthenticated").invalid("true beside meshTLS, expected one of the two")),
        Some(tls) => {
            let named = tls.identities.as_ref().map_or(0, Vec::len) + tls.service_accounts.as_ref().map_or(0, Vec::len);
            if tls.unauthenticated_tls && named > 0 {
                found.push(
                    FieldPath::of("spec.client.meshTLS.unauthenticatedTLS")
                        .invalid("true beside identities or serviceAccounts, expected one of the two"),
                );
            }
            if !tls.unauthenticated_tls && named == 0 {
                found.push(
                    FieldPath::of("spec.client.meshTLS")
                        .invalid("admits no client, expected identities, serviceAccounts or unauthenticatedTLS"),
                );
            }
        }
        None if !client.unauthenticated => {
            found.push(
                FieldPath::of("spec.client").invalid("admits no client, expected unauthenticated: true or meshTLS"),
            );
        }
        None => {}
    }
    found.extend(networks(&FieldPath::of("spec.client.networks"), client.networks.as_deref().unwrap_or_default()));
    found
}

/// The problems of an AuthorizationPolicy.
pub fn authorization_policy(policy: &AuthorizationPolicy) -> Vec<Invalid> {
    let target = &policy.spec.target_ref;
    let mut found = Vec::new();
    if target.is("", "Namespace") {
        let own = policy.metadata.namespace.as_deref().unwrap_or("default");
        if target.name != own {
            found.push(
                FieldPath::of("spec.targetRef.name")
                    .invalid(format!("namespace {:?}, expected the policy's own, {own:?}", target.name)),
            );
        }
    } else if !target.is(GROUP, "Server") {
        let group = target.group.as_deref().unwrap_or_default();
        let is_route = matches!(group, GROUP | GATEWAY_GROUP) && target.kind.ends_with("Route");
        let why = if is_route { "routes are not supported yet" } else { "unsupported target" };
        found.push(
            FieldPath::of("spec.targetRef")
                .invalid(format!("{:?} of group {group:?}: {why}, expected Server or Namespace", target.kind)),
        );
    }
    found.extend(required_authentications(&policy.spec.required_authentication_refs));
    found
}

fn required_authentications(refs: &[NamespacedTargetRef]) -> Vec<Invalid> {
    let at = |index: usize| FieldPath::of("spec.requiredAuthenticationRefs").index(index);
    let mut found = Vec::new();
    let (mut identity, mut networks) = (0, 0);
    for (index, reference) in refs.iter().enumerate() {
        if reference.is(GROUP, "MeshTLSAuthentication") || reference.is("", "ServiceAccount") {
            identity += 1;
            if identity > 1 {
                found.push(at(index).invalid(
                    "second identity requirement, expected at most one MeshTLSAuthentication or ServiceAccount",
                ));
            }
        } else if reference.is(GROUP, "NetworkAuthentication") {
            networks += 1;
            if networks > 1 {
                found.push(at(index).invalid("second network requirement, expected at most one NetworkAuthentication"));
            }
        } else {
            found.push(at(index).key("kind").invalid(format!(
                "unsupported kind {:?}, expected MeshTLSAuthentication, NetworkAuthentication or ServiceAccount",
                reference.kind
            )));
        }
    }
    found
}

/// The problems of a MeshTLSAuthentication.
pub fn mesh_tls_authentication(authentication: &MeshTLSAuthentication) -> Vec<Invalid> {
    let spec = &authentication.spec;
    let mut found = Vec::new();
    let identities = spec.identities.as_ref().map_or(0, Vec::len);
    let refs = spec.identity_refs.as_deref().unwrap_or_default();
    match (identities, refs.len()) {
        (0, 0) => found.push(FieldPath::of("spec").invalid("no identity, expected identities or identityRefs")),
        (1.., 1..) => {
            found.push(FieldPath::of("spec.identityRefs").invalid("beside identities, expected one of the two"))
        }
        _ => {}
    }
    for (index, reference) in refs.iter().enumerate() {
        let at = FieldPath::of("spec.identityRefs").index(index);
        if reference.is("", "Namespace") {
            if reference.namespace.is_some() {
                found
                    .push(at.key("namespace").invalid("a Namespace has no namespace, expected the field to be absent"));
            }
        } else if !reference.is("", "ServiceAccount") {
            found.push(
                at.key("kind")
                    .invalid(format!("unsupported kind {:?}, expected ServiceAccount or Namespace", reference.kind)),
            );
        }
    }
    found
}

/// The problems of a NetworkAuthentication.
pub fn network_authentication(authentication: &NetworkAuthentication) -> Vec<Invalid> {
    let mut found = Vec::new();
    if authentication.spec.networks.is_empty() {
        found.push(FieldPath::of("spec.networks").invalid("empty, expected at least one network"));
    }
    found.extend(networks(&FieldPath::of("spec.networks"), &authentication.spec.networks));
    found
}

fn networks(at: &FieldPath, networks: &[Network]) -> Vec<Invalid> {
    let mut found = Vec::new();
    for (index, network) in networks.iter().enumerate() {
        for (number, except) in network.except.iter().flatten().enumerate() {
            let at = at.clone().index(index).key("except").index(number);
            if except.0.contains(&network.cidr.0) {
                found.push(at.invalid(format!("{except} leaves nothing of {}", network.cidr)));
            } else if !network.cidr.0.contains(&except.0) {
                found.push(at.invalid(format!("{except} is not inside {}", network.cidr)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check<K: serde::de::DeserializeOwned>(
        validate: fn(&K) -> Vec<Invalid>,
        api: &str,
        kind: &str,
        spec: Value,
        expected: &[&str],
    ) {
        let object =
            json!({"apiVersion": api, "kind": kind, "metadata": {"name": "x", "namespace": "shop"}, "spec": spec});
        let typed: K = serde_json::from_value(object).unwrap();
        let fields: Vec<_> = validate(&typed).into_iter().map(|invalid| invalid.field.to_string()).collect();
        assert_eq!(fields, expected, "{spec}");
    }

    #[test]
    fn servers() {
        let check = |spec, expected: &[&str]| check(server, "policy.linkerd.io/v1beta3", "Server", spec, expected);
        let selector = json!({"matchLabels": {"app": "web"}});
        check(json!({"podSelector": selector, "port": 80}), &[]);
        check(
            json!({"podSelector": selector, "port": "http", "proxyProtocol": "HTTP/2", "accessPolicy": "audit"}),
            &[],
        );
        check(json!({"podSelector": selector, "port": 0}), &["spec.port"]);
        check(json!({"podSelector": selector, "port": "80"}), &["spec.port"]);
        check(json!({"port": 80}), &["spec"]);
        check(
            json!({"podSelector": selector, "externalWorkloadSelector": {}, "port": 80}),
            &["spec.externalWorkloadSelector"],
        );
        check(json!({"podSelector": selector, "port": 80, "proxyProtocol": "http"}), &["spec.proxyProtocol"]);
        check(json!({"podSelector": selector, "port": 80, "accessPolicy": "all"}), &["spec.accessPolicy"]);
    }

    #[test]
    fn server_authorizations() {
        let check = |client, expected: &[&str]| {
            let spec = json!({"server": {"name": "web"}, "client": client});
            check(server_authorization, "policy.linkerd.io/v1beta1", "ServerAuthorization", spec, expected);
        };
        check(json!({"unauthenticated": true}), &[]);
        check(json!({"meshTLS": {"identities": ["*"]}, "networks": [{"cidr": "10.0.0.0/8"}]}), &[]);
        check(json!({"meshTLS": {"unauthenticatedTLS": true}}), &[]);
        check(json!({}), &["spec.client"]);
        check(json!({"meshTLS": {}}), &["spec.client.meshTLS"]);
        check(json!({"unauthenticated": true, "meshTLS": {"identities": ["*"]}}), &["spec.client.unauthenticated"]);
        check(
            json!({"meshTLS": {"unauthenticatedTLS": true, "serviceAccounts": [{"name": "web"}]}}),
            &["spec.client.meshTLS.unauthenticatedTLS"],
        );
        check(
            json!({"unauthenticated": true, "networks": [{"cidr": "10.0.0.0/8", "except": ["11.0.0.0/8"]}]}),
            &["spec.client.networks[0].except[0]"],
        );
    }

    #[test]
    fn authorization_policies() {
        let check = |target, refs, expected: &[&str]| {
            let spec = json!({"targetRef": target, "requiredAuthenticationRefs": refs});
            check(authorization_policy, "policy.linkerd.io/v1alpha1", "AuthorizationPolicy", spec, expected);
        };
        let srv = json!({"group": GROUP, "kind": "Server", "name": "s"});
        let tls = json!({"group": GROUP, "kind": "MeshTLSAuthentication", "name": "m"});
        let net = json!({"group": GROUP, "kind": "NetworkAuthentication", "name": "n"});
        let sa = json!({"kind": "ServiceAccount", "name": "a"});
        check(srv.clone(), json!([tls, net]), &[]);
        check(srv.clone(), json!([]), &[]);
        check(srv.clone(), json!([sa]), &[]);
        check(srv.clone(), json!([tls, sa]), &["spec.requiredAuthenticationRefs[1]"]);
        check(srv.clone(), json!([net, net]), &["spec.requiredAuthenticationRefs[1]"]);
        check(srv, json!([{"kind": "Secret", "name": "x"}]), &["spec.requiredAuthenticationRefs[0].kind"]);
        check(json!({"kind": "Namespace", "name": "shop"}), json!([]), &[]);
        check(json!({"kind": "Namespace", "name": "other"}), json!([]), &["spec.targetRef.name"]);
        check(json!({"kind": "Service", "name": "web"}), json!([]), &["spec.targetRef"]);
        for (group, kind) in [(GROUP, "HTTPRoute"), (GATEWAY_GROUP, "HTTPRoute"), (GATEWAY_GROUP, "GRPCRoute")] {
            check(json!({"group": group, "kind": kind, "name": "r"}), json!([]), &["spec.targetRef"]);
        }
    }

    #[test]
    fn mesh_tls_authentications() {
        let check = |spec, expected: &[&str]| {
            check(mesh_tls_authentication, "policy.linkerd.io/v1alpha1", "MeshTLSAuthentication", spec, expected)
        };
        check(json!({"identities": ["*"]}), &[]);
        check(
            json!({"identityRefs": [{"kind": "ServiceAccount", "name": "web"}, {"kind": "Namespace", "name": "shop"}]}),
            &[],
        );
        check(json!({}), &["spec"]);
        check(
            json!({"identities": ["*"], "identityRefs": [{"kind": "ServiceAccount", "name": "web"}]}),
            &["spec.identityRefs"],
        );
        check(json!({"identityRefs": [{"kind": "Pod", "name": "web"}]}), &["spec.identityRefs[0].kind"]);
        check(
            json!({"identityRefs": [{"kind": "Namespace", "name": "a", "namespace": "b"}]}),
            &["spec.identityRefs[0].namespace"],
        );
    }

    #[test]
    fn network_authentications() {
        let check = |spec, expected: &[&str]| {
            check(network_authentication, "policy.linkerd.io/v1alpha1", "NetworkAuthentication", spec, expected)
        };
        check(json!({"networks": [{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}]}), &[]);
        check(json!({"networks": []}), &["spec.networks"]);
        check(
            json!({"networks": [{"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}]}),
            &["spec.networks[0].except[0]"],
        );
        check(json!({"networks": [{"cidr": "10.0.0.0/8", "except": ["0.0.0.0/0"]}]}), &["spec.networks[0].except[0]"]);
    }
}
