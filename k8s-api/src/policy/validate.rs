//! Rules on policy resources beyond their types, one function per kind.
//!
//! They are those of Linkerd's admission webhook (`linkerd2:policy-controller/runtime/src/admission.rs`) that concern
//! one object. Parts that Linkerd accepts and Weft does not act on are also refused.

mod authentication;
mod authorization;
mod egress_network;
mod rate_limit;
mod route;
mod server;

pub use authentication::{mesh_tls_authentication, network_authentication};
pub use authorization::authorization_policy;
pub use egress_network::egress_network;
pub use rate_limit::http_local_rate_limit_policy;
pub use route::{gateway_http_route, grpc_route, http_route, tcp_route, tls_route};
pub use server::{server, server_authorization, server_selection};

use super::Network;
use crate::field::{FieldPath, Invalid};

/// The problems of networks with exceptions.
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
    use serde_json::{Value, json};

    use super::*;

    /// Checks the fields with problems of an object in namespace `shop`.
    pub(super) fn check<K: serde::de::DeserializeOwned>(
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
}
