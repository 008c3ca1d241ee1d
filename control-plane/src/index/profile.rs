//! Profiles of Services and of single endpoints.

use std::net::SocketAddr;

use super::{Cluster, Endpoint, Key, store::Store, workload};

/// What proxies should know of a Service's port before they connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServiceProfile {
    /// The Service declares the port.
    Declared {
        /// The Service.
        service: Key,
        /// The port.
        port: u16,
        /// The Service's DNS name.
        name: String,
        /// Whether the port is opaque.
        opaque: bool,
    },
    /// It does not, or there is no such Service (any more): the policy forbids it, the profile is empty.
    Undeclared,
}

/// What proxies should know of an address that is no Service's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndpointProfile {
    /// The endpoint.
    pub(crate) endpoint: Endpoint,
    /// Whether its port is opaque.
    pub(crate) opaque: bool,
}

pub(super) fn service(store: &Store, cluster: &Cluster, key: &Key, port: u16) -> ServiceProfile {
    match store.service(key) {
        Some(service) if service.port(port).is_some() => ServiceProfile::Declared {
            service: key.clone(),
            port,
            name: cluster.service_name(&key.name, &key.namespace),
            opaque: service.is_opaque(port, &cluster.default_opaque_ports),
        },
        _ => ServiceProfile::Undeclared,
    }
}

/// The endpoint of the pod or the ExternalWorkload, or the bare address. An address that became ambiguous is bare, too: nothing can be said of it.
pub(super) fn endpoint(store: &Store, cluster: &Cluster, addr: SocketAddr) -> EndpointProfile {
    let pod = store.pod_by_addr(addr).ok().flatten();
    let known = pod.and_then(|(pod, port)| {
        let inner =
            SocketAddr::new(pod.ips.first().copied().filter(|_| port != addr.port()).unwrap_or(addr.ip()), port);
        let mut endpoint = workload::endpoint(store, cluster, pod, inner)?;
        endpoint.labels.insert("namespace".to_owned(), pod.key.namespace.clone());
        Some(endpoint)
    });
    let external = || {
        let external = store.workload_by_ip(addr.ip()).filter(|_| pod.is_none())?;
        Some(workload::external_endpoint(store, cluster, external, addr))
    };
    let endpoint = known.or_else(external).unwrap_or_else(|| Endpoint {
        opaque: cluster.default_opaque_ports.contains(addr.port()),
        ..Endpoint::plain(addr)
    });
    EndpointProfile { opaque: endpoint.opaque, endpoint }
}
