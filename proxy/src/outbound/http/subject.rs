//! What taps say about a request of the application.

use std::net::SocketAddr;

use crate::{
    discover::route::Action,
    metrics::{Direction, label},
    outbound::endpoint::Endpoint,
    tap::{Subject, without_prefix},
};

/// A request of the application to an endpoint.
pub(super) fn subject(source: SocketAddr, endpoint: &Endpoint, action: &Action) -> Subject {
    let mut destination_labels = without_prefix(&endpoint.info.labels, "dst_");
    match endpoint.identity() {
        Some(id) => destination_labels.extend([label("tls", "true"), label("server_id", id.to_string())]),
        None => destination_labels.push(label("tls", endpoint.no_tls_reason())),
    }
    let route_labels = match &action.profile {
        Some(profile) => without_prefix(&profile.route, "rt_"),
        None => without_prefix(&action.meta.labels("route"), "route_"),
    };
    Subject {
        direction: Direction::Outbound,
        source,
        source_labels: vec![label("tls", "loopback")],
        destination: endpoint.info.addr,
        destination_labels,
        route_labels,
    }
}
