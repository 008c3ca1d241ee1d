//! Profiles of Services and of single endpoints.

use std::{net::SocketAddr, sync::Arc};

use super::{
    cluster::Cluster,
    endpoint::Endpoint,
    records::{Key, ProfileRecord},
    store::Store,
    workload,
};

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileQuery {
    /// The Service's port.
    pub port: u16,
    /// The client's namespace, as the client names it: a ServiceProfile there takes precedence over the one in the
    /// Service's.
    pub namespace: Option<String>,
}

/// What a subscription depends on. Clients share one if their answers cannot differ, whatever they ask for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProfileKey {
    /// The port; `None` for all that the Service does not declare.
    port: Option<u16>,
    /// The client's namespace, if it has a ServiceProfile for the Service.
    namespace: Option<String>,
}

impl ProfileKey {
    /// Replaces the client's words by what the answer depends on.
    pub(super) fn new(store: &Store, cluster: &Cluster, service: &Key, query: ProfileQuery) -> Self {
        let ProfileQuery { port, namespace } = query;
        if is_undeclared(store, service, port) {
            return Self { port: None, namespace: None };
        }
        let name = cluster.service_name(&service.name, &service.namespace);
        let namespace = namespace.filter(|namespace| store.profile(&Key::new(namespace, &name)).is_some());
        Self { port: Some(port), namespace }
    }
}

impl ProfileKey {
    /// Whether the Service declares the port, or does not exist.
    pub(super) fn is_declared(&self) -> bool {
        self.port.is_some()
    }

    /// The namespace of the ServiceProfile, if it is not the Service's.
    pub(super) fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }
}

fn is_undeclared(store: &Store, service: &Key, port: u16) -> bool {
    store.services.get(service).is_some_and(|service| service.port(port).is_none())
}

/// What proxies should know about a Service's port before they connect.
#[derive(Clone, Debug, PartialEq)]
pub enum ServiceProfile {
    /// The Service declares the port, or the Service does not exist (any more), in which case clients keep
    /// its name.
    Declared {
        /// The Service.
        service: Key,
        /// The Service's port, which may differ from that of its endpoints.
        port: u16,
        /// The Service's DNS name.
        name: String,
        /// Whether the port is opaque.
        opaque: bool,
        /// Its ServiceProfile.
        profile: Option<Arc<ProfileRecord>>,
    },
    /// The Service does not declare the port: the policy forbids connections, and the profile is empty.
    Undeclared,
}

/// What proxies should know about an address that belongs to no Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointProfile {
    /// The endpoint of the pod or the ExternalWorkload, or the bare address if it belongs to neither.
    pub endpoint: Endpoint,
    /// Whether its port is opaque.
    pub opaque: bool,
}

pub(super) fn service(store: &Store, cluster: &Cluster, service: &Key, key: &ProfileKey) -> ServiceProfile {
    let Some(port) = key.port else { return ServiceProfile::Undeclared };
    let default = &cluster.default_opaque_ports;
    let record = store.services.get(service);
    let opaque = record.map_or_else(|| default.contains(port), |record| record.is_opaque(port, default));
    let name = cluster.service_name(&service.name, &service.namespace);
    let profile_in = |namespace: &str| store.profile(&Key::new(namespace, name.clone())).cloned();
    let profile = key.namespace.as_deref().and_then(profile_in).or_else(|| profile_in(&service.namespace));
    ServiceProfile::Declared { service: service.clone(), port, opaque, profile, name }
}

/// The endpoint of the pod or the ExternalWorkload, or the bare address if neither is there. `None` if the
/// address became ambiguous, or if the pod's proxy does not say where it listens. Clients then keep what they
/// have, because a bare address would make them connect in plain text.
pub(super) fn endpoint(store: &Store, cluster: &Cluster, addr: SocketAddr) -> Option<EndpointProfile> {
    let endpoint = if let Some(found) = store.pod_by_addr(addr).ok()? {
        let pod = found.pod;
        let mut endpoint = workload::endpoint(store, cluster, pod, SocketAddr::new(addr.ip(), found.port))?;
        endpoint.addr = addr;
        // The node's address leads to one port of the pod, and not to the proxy's port.
        if !pod.ips.contains(&addr.ip()) {
            endpoint.transport_port = None;
        }
        endpoint.labels.insert("namespace".to_owned(), pod.key.namespace.clone());
        // Clients of a headless Service dial the addresses of its pods.
        if store.requires_mtls(&pod.key) {
            endpoint.require_mtls();
        }
        endpoint
    } else if let Some(external) = store.workload_by_addr(addr).ok()? {
        let mut endpoint = workload::external_endpoint(store, cluster, external, addr);
        endpoint.labels.insert("namespace".to_owned(), external.key.namespace.clone());
        endpoint
    } else {
        Endpoint { opaque: cluster.default_opaque_ports.contains(addr.port()), ..Endpoint::plain(addr) }
    };
    Some(EndpointProfile { opaque: endpoint.opaque, endpoint })
}
