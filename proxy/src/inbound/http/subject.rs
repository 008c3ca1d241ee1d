//! What taps say about a request to the application.

use std::net::SocketAddr;

use weft_tls::identity::Identity;

use crate::{
    metrics::{Direction, Labels, label},
    policy::authz::{Client, ClientTls},
    tap::{Subject, without_prefix},
};

/// A request from a client to the application; `labels` are those of its metrics.
pub(super) fn subject(client: &Client, target: SocketAddr, labels: &Labels) -> Subject {
    let source_labels = match &client.tls {
        ClientTls::Established(identity) => {
            let id = identity.as_ref().map(Identity::to_string).unwrap_or_default();
            vec![label("tls", "true"), label("client_id", id)]
        }
        ClientTls::Passthrough => vec![label("tls", "opaque")],
        ClientTls::None(reason) => vec![label("tls", reason.label())],
    };
    let of_policy = |name: &str| ["srv_", "route_", "authz_"].iter().any(|role| name.starts_with(role));
    let mut destination_labels: Labels = labels.iter().filter(|(name, _)| of_policy(name)).cloned().collect();
    destination_labels.push(label("tls", "loopback"));
    Subject {
        direction: Direction::Inbound,
        source: client.addr,
        source_labels,
        destination: target,
        destination_labels,
        route_labels: without_prefix(labels, "route_"),
    }
}
