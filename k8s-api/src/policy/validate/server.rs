//! Server and ServerAuthorization.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::networks;
use crate::{
    field::{FieldPath, Invalid},
    policy::{Server, ServerAuthorization, is_readable},
    ports,
};

/// The problems of a Server.
pub fn server(server: &Server) -> Vec<Invalid> {
    let spec = &server.spec;
    let mut found = server_selection(server);
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

/// The problems of what a Server selects: with one of them, it is unknown which ports it is about.
pub fn server_selection(server: &Server) -> Vec<Invalid> {
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
    let selectors =
        [("spec.podSelector", &spec.pod_selector), ("spec.externalWorkloadSelector", &spec.external_workload_selector)];
    for (field, selector) in selectors {
        if selector.as_ref().is_some_and(|selector| !is_readable(selector)) {
            found.push(FieldPath::of(field).invalid("unknown operator, expected In, NotIn, Exists or DoesNotExist"));
        }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::policy::validate::tests::check;

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
        for (operator, is_known) in [("In", true), ("in", false)] {
            let selector = json!({"matchExpressions": [{"key": "app", "operator": operator, "values": ["web"]}]});
            for field in ["podSelector", "externalWorkloadSelector"] {
                let problem = format!("spec.{field}");
                let expected = [problem.as_str()];
                check(json!({field: selector, "port": 80}), if is_known { &[] } else { &expected });
            }
        }
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
}
