//! The policy towards a Service's port.

use weft_k8s_api::policy::route::ParentKind;

use super::{
    policy::{OutboundParent, OutboundProtocol, ParentPolicy, ServicePort},
    routes::Parent,
};
use crate::{
    cluster::Cluster,
    records::{Key, ServiceRecord, Traffic},
    store::{ParentId, Store},
};

/// The policy towards a port of a Service, which need not exist, for a client of this namespace.
pub(super) fn policy(
    store: &Store,
    cluster: &Cluster,
    key: &Key,
    record: Option<&ServiceRecord>,
    port: u16,
    namespace: Option<&str>,
) -> ParentPolicy {
    let default = Traffic::default();
    let traffic = record.map_or(&default, |record| &record.traffic);
    let id = ParentId::new(ParentKind::Service, key.clone());
    let routes = Parent { store, cluster, id, port, traffic }.routes(namespace);
    let app_protocol = record.and_then(|record| record.port(port)?.app_protocol.as_deref());
    let opaque = match record {
        Some(record) => record.is_opaque(port, &cluster.default_opaque_ports),
        None => cluster.default_opaque_ports.contains(port),
    };
    let protocol = match app_protocol {
        Some("http") => OutboundProtocol::Http1(routes.http),
        Some("kubernetes.io/h2c") if !routes.grpc.is_empty() => OutboundProtocol::Grpc(routes.grpc),
        Some("kubernetes.io/h2c") => OutboundProtocol::Http2(routes.http),
        // An unknown protocol is still a protocol, and reading it as HTTP could break it.
        Some(_) => OutboundProtocol::Opaque(routes.tcp),
        None if opaque => OutboundProtocol::Opaque(routes.tcp),
        None => routes.detected(),
    };
    let parent = OutboundParent::Service(ServicePort::new(cluster, key.clone(), port));
    let mut policy = ParentPolicy::new(parent, protocol, traffic);
    if opaque || app_protocol.is_some_and(|name| !matches!(name, "http" | "kubernetes.io/h2c")) {
        // Failures are those of responses, which an opaque port has none of.
        policy.load_bias = None;
    }
    policy
}
