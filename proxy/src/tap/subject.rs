//! The two ends of a tapped request, and its route: addresses, and the labels with which Linkerd's tools show them.
//!
//! Labels of destinations and routes are those of the metrics without the prefixes `dst_`, `rt_` and `route_`.

use std::{borrow::Cow, net::SocketAddr};

use crate::metrics::{Direction, Labels};

/// What a tap says about a request beside the request itself.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    /// Whose request it is.
    pub(crate) direction: Direction,
    /// The client's address; outbound that of the pod's own application.
    pub(crate) source: SocketAddr,
    /// `tls`, and `client_id` with TLS.
    pub(crate) source_labels: Labels,
    /// The server's address: outbound the endpoint's, inbound the original destination.
    pub(crate) destination: SocketAddr,
    /// `tls`, `server_id` with TLS, and what the control plane says; inbound the policy in force.
    pub(crate) destination_labels: Labels,
    /// Labels of the matched route, or of the ServiceProfile's.
    pub(crate) route_labels: Labels,
}

/// The labels with this prefix, without it.
pub(crate) fn without_prefix(labels: &Labels, prefix: &str) -> Labels {
    let strip = |(name, value): &(Cow<'static, str>, Cow<'static, str>)| {
        name.strip_prefix(prefix).map(|name| (name.to_owned().into(), value.clone()))
    };
    labels.iter().filter_map(strip).collect()
}
