//! Endpoints of a Service's port, as one client should see them.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
};

use tokio::sync::watch::Ref;

use super::{
    cluster::Cluster,
    endpoint::{Endpoint, Hint, Locality, PeerIdentity, SharedEndpoint},
    records::{Gateway, Key, ServiceRecord, SliceEndpoint, Target},
    snapshot::Snapshot,
    store::Store,
    workload,
};

/// The most ports that a Service does not declare and for which it has views at a time. Each such port is taken
/// literally, so that each has endpoints of its own: without a bound, one client could fill the memory.
pub const MAX_UNDECLARED_PORTS: usize = 8;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointsQuery {
    /// The Service's port.
    pub port: u16,
    /// The client's node, as the client names it.
    pub node: Option<String>,
    /// Restricts the answer to the endpoint with this hostname.
    pub hostname: Option<String>,
}

/// What a subscription depends on. Clients share one if their answers cannot differ, so that their number does not
/// depend on the number of nodes, nor on what clients call theirs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct EndpointsKey {
    pub(super) port: u16,
    hostname: Option<String>,
    pub(super) client: Client,
}

/// Where clients are, as far as the answer depends on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Client {
    /// Nowhere in particular: the client names no node.
    Anywhere,
    /// On a node without a zone.
    NoZone,
    /// On a node that is not known (yet).
    Unknown,
    /// In a zone.
    Zone(String),
    /// In another cluster, and perhaps in a zone of the same name.
    Afar(Option<String>),
    /// On a node, because the Service is served by endpoints on the client's node alone.
    Node {
        /// Name of the node.
        name: String,
        /// Zone of the node; `None` while the node is not known, or if it has none.
        zone: Option<String>,
    },
}

impl Client {
    /// Whether a node that becomes known may be the client's, and say more about its place.
    pub(super) fn awaits_node(&self) -> bool {
        matches!(self, Self::Unknown | Self::Node { zone: None, .. })
    }

    /// Whether the place says enough for a Service that is served by the client's node alone, and not too much for
    /// another.
    pub(super) fn suits(&self, local: bool) -> bool {
        match self {
            Self::Afar(_) | Self::Anywhere => true,
            Self::Node { .. } => local,
            Self::NoZone | Self::Unknown | Self::Zone(_) => !local,
        }
    }
}

impl EndpointsKey {
    /// Replaces the client's node by what the answer depends on.
    pub(super) fn new(store: &Store, service: &Key, query: EndpointsQuery) -> Self {
        let EndpointsQuery { port, node, hostname } = query;
        let local = store.service(service).is_some_and(|service| service.local);
        let Some(name) = node else { return Self { port, hostname, client: Client::Anywhere } };
        let zone = store.node(&name).map(|zone| zone.map(str::to_owned));
        // A node that has endpoints is there, whether or not its object is known: manifests of a sandbox have none.
        let zone = zone.or_else(|| (local && store.serves_on(service, &name)).then_some(None));
        let client = match zone {
            None => Client::Unknown,
            Some(zone) if local => Client::Node { name, zone },
            Some(Some(zone)) => Client::Zone(zone),
            Some(None) => Client::NoZone,
        };
        Self { port, hostname, client }
    }

    /// For a client in another cluster.
    pub(super) fn from_afar(port: u16, hostname: Option<String>, zone: Option<String>) -> Self {
        Self { port, hostname, client: Client::Afar(zone) }
    }

    /// The hostname of the one endpoint that clients ask for.
    pub(super) fn hostname(&self) -> Option<&str> {
        self.hostname.as_deref()
    }

    fn zone(&self) -> Option<&str> {
        match &self.client {
            Client::Afar(zone) => zone.as_deref(),
            Client::Zone(zone) => Some(zone),
            Client::Node { zone, .. } => zone.as_deref(),
            Client::Anywhere | Client::NoZone | Client::Unknown => None,
        }
    }

    /// The clients' node, where the answer depends on it.
    pub(super) fn node(&self) -> Option<&str> {
        match &self.client {
            Client::Node { name, .. } => Some(name),
            Client::Afar(_) | Client::Anywhere | Client::NoZone | Client::Unknown | Client::Zone(_) => None,
        }
    }
}

/// All endpoints of a Service's port.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Endpoints {
    /// Endpoints by address.
    pub by_addr: BTreeMap<SocketAddr, Arc<SharedEndpoint>>,
    /// Labels that all of them share.
    pub labels: BTreeMap<String, String>,
    /// The clients' zone, where it is known.
    pub client_zone: Option<String>,
}

impl Endpoints {
    /// Where an endpoint is, seen from the clients.
    pub fn locality(&self, endpoint: &Endpoint) -> Locality {
        Locality::new(self.client_zone.as_deref(), endpoint.zone.as_deref())
    }
}

/// Endpoints that some view of a Service already has: one that has not changed is shared, and so are its encoded forms.
#[derive(Default)]
pub(super) struct Known(HashMap<SocketAddr, Arc<SharedEndpoint>>);

impl Known {
    /// Endpoints of published views.
    pub(super) fn of<'a>(views: impl Iterator<Item = Ref<'a, Arc<Snapshot<Endpoints>>>>) -> Self {
        let mut known = Self::default();
        for view in views {
            known.0.extend(view.by_addr.iter().map(|(addr, endpoint)| (*addr, endpoint.clone())));
        }
        known
    }

    fn share(&mut self, endpoint: Endpoint) -> Arc<SharedEndpoint> {
        if let Some(known) = self.0.get(&endpoint.addr).filter(|known| known.endpoint() == &endpoint) {
            return known.clone();
        }
        let new = Arc::new(SharedEndpoint::new(endpoint));
        self.0.insert(new.addr, new.clone());
        new
    }
}

/// Computes the endpoints; empty if the Service does not exist.
pub(super) fn compute(
    store: &Store,
    cluster: &Cluster,
    service: &Key,
    key: &EndpointsKey,
    known: &mut Known,
) -> Endpoints {
    let Some(record) = store.service(service) else { return Endpoints::default() };
    let candidates = candidates(store, &record, key);
    let client_zone = key.zone();
    let mut by_addr = BTreeMap::new();
    let mut of_pods = Vec::new();
    for (port, endpoint) in filter(candidates, record.local, key, client_zone) {
        for addr in addresses(store, cluster, endpoint, port) {
            let Some(mut found) = build(store, cluster, endpoint, addr, key.port) else { continue };
            if record.require_mtls {
                found.require_mtls();
            }
            by_addr.insert(addr, known.share(found));
            if let Target::Pod(pod) = &endpoint.target {
                of_pods.push((pod, addr));
            }
        }
    }
    // A pod that is announced by both families is announced once, by its IPv6 address.
    let with_v6: HashSet<_> =
        of_pods.iter().filter(|(_, addr)| addr.is_ipv6()).map(|(pod, addr)| (*pod, addr.port())).collect();
    for (pod, addr) in &of_pods {
        if addr.is_ipv4() && with_v6.contains(&(*pod, addr.port())) {
            by_addr.remove(addr);
        }
    }
    let mut labels = BTreeMap::from([
        ("namespace".to_owned(), service.namespace.clone()),
        ("service".to_owned(), service.name.clone()),
    ]);
    labels.extend(store.slices(service).flat_map(|slice| slice.target_labels.clone()));
    Endpoints { by_addr, labels, client_zone: client_zone.map(str::to_owned) }
}

/// Endpoints that serve the port and whose pods are known, each with its target port. A port that the Service
/// does not declare is taken literally; a slice without a declared port has no endpoints for it.
fn candidates<'a>(store: &'a Store, service: &ServiceRecord, key: &EndpointsKey) -> Vec<(u16, &'a SliceEndpoint)> {
    let name = service.port(key.port).map(|port| port.name.clone());
    let slices = store.slices(&service.key);
    let of_slice = slices.filter_map(|slice| {
        let port = match &name {
            Some(name) => *slice.ports.get(name)?,
            None if !slice.has_ports => return None,
            None => key.port,
        };
        Some(slice.endpoints.iter().map(move |endpoint| (port, endpoint)))
    });
    let hostname = key.hostname.as_deref();
    let wanted = |endpoint: &SliceEndpoint| hostname.is_none() || endpoint.hostname.as_deref() == hostname;
    // Endpoints of unknown pods must not count in the topology filter, or it could leave only those of one
    // zone.
    let known = |endpoint: &SliceEndpoint| match &endpoint.target {
        Target::Pod(pod) => store.pod(pod).is_some(),
        Target::External(workload) => store.workload(workload).is_some(),
        Target::Address(_) => true,
    };
    of_slice.flatten().filter(|(_, endpoint)| wanted(endpoint) && known(endpoint)).collect()
}

/// Linkerd's topology filter, which does not concern clients in other clusters. A local Service has only the endpoints
/// on the client's node. Otherwise the zone hints apply, if every endpoint has hints and at least one endpoint is left.
fn filter<'a>(
    candidates: Vec<(u16, &'a SliceEndpoint)>,
    local: bool,
    key: &EndpointsKey,
    client_zone: Option<&str>,
) -> Vec<(u16, &'a SliceEndpoint)> {
    if let Client::Afar(_) = key.client {
        return candidates;
    }
    if local {
        let on_node = |endpoint: &SliceEndpoint| key.node().is_some() && endpoint.node.as_deref() == key.node();
        return candidates.into_iter().filter(|(_, endpoint)| on_node(endpoint)).collect();
    }
    let hinted = !candidates.is_empty() && candidates.iter().all(|(_, endpoint)| !endpoint.for_zones.is_empty());
    let Some(zone) = client_zone.filter(|_| hinted) else { return candidates };
    let near: Vec<_> =
        candidates.iter().filter(|(_, endpoint)| endpoint.for_zones.iter().any(|z| z == zone)).copied().collect();
    if near.is_empty() { candidates } else { near }
}

fn addresses<'a>(
    store: &Store,
    cluster: &Cluster,
    endpoint: &'a SliceEndpoint,
    port: u16,
) -> impl Iterator<Item = SocketAddr> + use<'a> {
    let any_family = match &endpoint.target {
        Target::Pod(pod) => cluster.ipv6 && store.pod(pod).is_some_and(|pod| pod.accepts_ipv6(port)),
        // Only pods can have an address of the other family instead.
        Target::External(_) | Target::Address(_) => true,
    };
    let usable = endpoint.addresses.iter().filter(move |ip| any_family || ip.is_ipv4());
    usable.map(move |ip| SocketAddr::new(*ip, port))
}

fn build(
    store: &Store,
    cluster: &Cluster,
    slice: &SliceEndpoint,
    addr: SocketAddr,
    service_port: u16,
) -> Option<Endpoint> {
    let mut endpoint = match &slice.target {
        Target::Address(gateway) => return Some(address(cluster, gateway.as_deref(), addr, service_port)),
        Target::Pod(key) => workload::endpoint(store, cluster, store.pod(key)?, addr)?,
        Target::External(key) => workload::external_endpoint(store, cluster, store.workload(key)?, addr),
    };
    // Linkerd labels every endpoint with a zone, empty if it is unknown.
    endpoint.labels.entry("zone".to_owned()).or_default();
    if let Some(zone) = &slice.zone {
        endpoint.labels.insert("zone".to_owned(), zone.clone());
        endpoint.zone = Some(zone.clone());
    }
    Some(endpoint)
}

/// An address without an object. Linkerd knows no zone of it; behind a gateway's is another cluster's Service.
fn address(cluster: &Cluster, gateway: Option<&Gateway>, addr: SocketAddr, port: u16) -> Endpoint {
    let mut endpoint = Endpoint { opaque: cluster.default_opaque_ports.contains(addr.port()), ..Endpoint::plain(addr) };
    let Some(Gateway { identity, service }) = gateway else { return endpoint };
    endpoint.authority_override = service.as_ref().map(|service| format!("{service}:{port}"));
    if let Some(identity) = identity {
        endpoint.identity = Some(PeerIdentity::Gateway(identity.clone()));
        // As in Linkerd, a gateway without upgrades has no hint.
        endpoint.hint = if cluster.h2_upgrade { Hint::H2 } else { Hint::Unknown };
        endpoint.http2 = true;
    }
    endpoint
}
