//! Endpoints of a Service's port, as one client may see them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use super::{
    Cluster, Key,
    records::{ServiceRecord, SliceEndpoint, Target},
    store::Store,
    workload,
};

/// Which port, and who asks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EndpointsKey {
    /// The Service's port.
    pub(crate) port: u16,
    /// The client's node, where it is known.
    pub(crate) node: Option<String>,
    /// Only the endpoint with this hostname.
    pub(crate) hostname: Option<String>,
}

/// All endpoints of a Service's port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Endpoints {
    /// Endpoints by address.
    pub(crate) by_addr: BTreeMap<SocketAddr, Endpoint>,
    /// Labels that all of them share.
    pub(crate) labels: BTreeMap<String, String>,
}

/// How clients may speak to an endpoint's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hint {
    /// Nothing is known.
    Unknown,
    /// HTTP/1 may travel in HTTP/2.
    H2,
    /// Nothing may be read.
    Opaque,
}

/// Who an endpoint's proxy proves to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerIdentity {
    /// A service account of the cluster, by its name, which is also what clients ask for in TLS.
    ServiceAccount(String),
    /// A machine outside the cluster.
    External {
        /// Its SPIFFE ID.
        id: String,
        /// The name that clients ask for in TLS.
        server_name: String,
    },
}

/// One endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// Its address.
    pub(crate) addr: SocketAddr,
    /// Its own labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// Identity of its proxy; `None` means plain text.
    pub(crate) identity: Option<PeerIdentity>,
    /// What its proxy understands.
    pub(crate) hint: Hint,
    /// The proxy's port for connections with a transport header.
    pub(crate) transport_port: Option<u16>,
    /// Whether HTTP/2 connections to it are kept alive by pings.
    pub(crate) http2: bool,
    /// Whether its port is opaque.
    pub(crate) opaque: bool,
}

impl Endpoint {
    /// An address of which nothing is known.
    pub(crate) fn plain(addr: SocketAddr) -> Self {
        Self {
            addr,
            labels: BTreeMap::new(),
            identity: None,
            hint: Hint::Unknown,
            transport_port: None,
            http2: false,
            opaque: false,
        }
    }
}

/// Computes the endpoints; none where there is no such Service.
pub(super) fn compute(store: &Store, cluster: &Cluster, service: &Key, key: &EndpointsKey) -> Endpoints {
    let Some(record) = store.service(service) else { return Endpoints::default() };
    let candidates = candidates(store, &record, key);
    let client_zone = key.node.as_deref().and_then(|node| store.zone(node));
    let mut by_addr = BTreeMap::new();
    for (ports, endpoint) in filter(candidates, record.local, key, client_zone) {
        for addr in addresses(cluster, endpoint, ports) {
            if let Some(found) = build(store, cluster, endpoint, addr, client_zone) {
                by_addr.insert(addr, found);
            }
        }
    }
    if cluster.ipv6 {
        prefer_ipv6(store, &mut by_addr);
    }
    let labels = BTreeMap::from([
        ("namespace".to_owned(), service.namespace.clone()),
        ("service".to_owned(), service.name.clone()),
    ]);
    Endpoints { by_addr, labels }
}

/// Endpoints that serve the port, each with the port's number there. A port that the Service does not declare is taken
/// literally; a declared one that a slice lacks has no endpoints in it.
fn candidates<'a>(store: &'a Store, service: &ServiceRecord, key: &EndpointsKey) -> Vec<(u16, &'a SliceEndpoint)> {
    let name = service.port(key.port).map(|port| port.name.clone());
    let slices = store.slices(&service.key);
    let of_slice = slices.filter_map(|slice| {
        let port = match &name {
            Some(name) => *slice.ports.get(name)?,
            None => key.port,
        };
        Some(slice.endpoints.iter().map(move |endpoint| (port, endpoint)))
    });
    let hostname = key.hostname.as_deref();
    of_slice.flatten().filter(|(_, endpoint)| hostname.is_none() || endpoint.hostname.as_deref() == hostname).collect()
}

/// Linkerd's topology filter: local Services only on the client's node; else by the zones for which endpoints are hinted,
/// if every endpoint is and any is left.
fn filter<'a>(
    candidates: Vec<(u16, &'a SliceEndpoint)>,
    local: bool,
    key: &EndpointsKey,
    client_zone: Option<&str>,
) -> Vec<(u16, &'a SliceEndpoint)> {
    if local {
        let on_node = |endpoint: &SliceEndpoint| key.node.is_some() && endpoint.node == key.node;
        return candidates.into_iter().filter(|(_, endpoint)| on_node(endpoint)).collect();
    }
    let hinted = !candidates.is_empty() && candidates.iter().all(|(_, endpoint)| !endpoint.for_zones.is_empty());
    let Some(zone) = client_zone.filter(|_| hinted) else { return candidates };
    let near: Vec<_> =
        candidates.iter().filter(|(_, endpoint)| endpoint.for_zones.iter().any(|z| z == zone)).copied().collect();
    if near.is_empty() { candidates } else { near }
}

fn addresses<'a>(
    cluster: &Cluster,
    endpoint: &'a SliceEndpoint,
    port: u16,
) -> impl Iterator<Item = SocketAddr> + use<'a> {
    let ipv6 = cluster.ipv6;
    let usable = endpoint.addresses.iter().filter(move |ip| ipv6 || ip.is_ipv4());
    usable.map(move |ip| SocketAddr::new(*ip, port))
}

fn build(
    store: &Store,
    cluster: &Cluster,
    slice: &SliceEndpoint,
    addr: SocketAddr,
    client_zone: Option<&str>,
) -> Option<Endpoint> {
    let mut endpoint = match &slice.target {
        Target::Address => {
            Endpoint { opaque: cluster.default_opaque_ports.contains(addr.port()), ..Endpoint::plain(addr) }
        }
        Target::Pod(key) => {
            let Some(pod) = store.pod(key) else {
                tracing::debug!(pod = %key, "endpoint refers to a pod that is not known yet");
                return None;
            };
            workload::endpoint(store, cluster, pod, addr)?
        }
        Target::External(key) => {
            let Some(external) = store.workload(key) else {
                tracing::debug!(workload = %key, "endpoint refers to a workload that is not known yet");
                return None;
            };
            workload::external_endpoint(store, cluster, external, addr)
        }
        Target::Other(kind) => {
            tracing::warn!(kind, "endpoint refers to an object of an unsupported kind");
            return None;
        }
    };
    let locality = match (client_zone, slice.zone.as_deref()) {
        (Some(client), Some(zone)) if client == zone => "local",
        (Some(_), Some(_)) => "remote",
        _ => "unknown",
    };
    if let Some(zone) = &slice.zone {
        endpoint.labels.insert("zone".to_owned(), zone.clone());
    }
    endpoint.labels.insert("zone_locality".to_owned(), locality.to_owned());
    Some(endpoint)
}

/// A pod with addresses of both families is presented once, by its IPv6 address.
fn prefer_ipv6(store: &Store, by_addr: &mut BTreeMap<SocketAddr, Endpoint>) {
    let of_pod = |addr: &SocketAddr| store.pod_by_addr(*addr).ok().flatten().map(|(pod, _)| pod.ips.clone());
    let has_v6 = |ips: Vec<IpAddr>, port: u16, by_addr: &BTreeMap<SocketAddr, Endpoint>| {
        ips.iter().any(|ip| ip.is_ipv6() && by_addr.contains_key(&SocketAddr::new(*ip, port)))
    };
    let twins: Vec<_> = by_addr
        .keys()
        .filter(|addr| addr.is_ipv4())
        .filter(|addr| of_pod(addr).is_some_and(|ips| has_v6(ips, addr.port(), by_addr)))
        .copied()
        .collect();
    for addr in twins {
        by_addr.remove(&addr);
    }
}
