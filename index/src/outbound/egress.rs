//! Which EgressNetwork an address outside the cluster belongs to, and the policy towards it.

use std::{
    cmp::Reverse,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use weft_k8s_api::policy::{Network, TrafficPolicy, route::ParentKind};

use super::{
    policy::{OutboundParent, OutboundProtocol, ParentPolicy},
    routes::Parent,
};
use crate::{
    acceptance,
    cluster::Cluster,
    records::EgressNetworkRecord,
    store::{ParentId, Store},
};

/// The EgressNetwork of an address for a client of this namespace. The namespace's own networks count; where it has
/// none, those of the namespace for the whole cluster. Of several with the address, the most specific one wins, then
/// the oldest, then the first by name.
pub(super) fn network_of<'a>(
    store: &'a Store,
    cluster: &Cluster,
    ip: IpAddr,
    namespace: Option<&str>,
) -> Option<&'a Arc<EgressNetworkRecord>> {
    let usable = |namespace: &str| -> Vec<_> {
        let networks = store.egress_networks_in(namespace);
        networks.filter(|network| acceptance::is_egress_network_accepted(cluster, network)).collect()
    };
    let mut candidates = namespace.map(usable).unwrap_or_default();
    if candidates.is_empty() {
        candidates = usable(&cluster.egress_namespace);
    }
    let matching = candidates.into_iter().filter_map(|network| Some((specificity(cluster, network, ip)?, network)));
    let best = matching.min_by_key(|(length, network)| (Reverse(*length), network.created, &network.key));
    best.map(|(_, network)| network)
}

/// The policy towards an address of an EgressNetwork.
pub(super) fn policy(
    store: &Store,
    cluster: &Cluster,
    record: &EgressNetworkRecord,
    addr: SocketAddr,
    namespace: Option<&str>,
) -> ParentPolicy {
    let id = ParentId::new(ParentKind::EgressNetwork, record.key.clone());
    let parent = Parent { store, cluster, id, port: addr.port(), traffic: &record.traffic };
    let routes = parent.routes(namespace);
    let opaque = record
        .opaque_ports
        .as_ref()
        .map_or_else(|| cluster.default_opaque_ports.contains(addr.port()), |ports| ports.covers(addr.port(), None));
    let protocol = if opaque { OutboundProtocol::Opaque(routes.tcp) } else { routes.detected() };
    let parent = OutboundParent::EgressNetwork {
        network: record.key.clone(),
        addr,
        // A policy that cannot be read denies.
        policy: record.spec.traffic_policy().unwrap_or(TrafficPolicy::Deny),
    };
    ParentPolicy::new(parent, protocol, &record.traffic)
}

/// The length of the longest prefix of the EgressNetwork that contains the address.
fn specificity(cluster: &Cluster, record: &EgressNetworkRecord, ip: IpAddr) -> Option<u8> {
    let Some(networks) = &record.spec.networks else { return (!cluster.contains(ip)).then_some(0) };
    let contains = |network: &&Network| {
        network.cidr.0.contains(&ip) && !network.except.iter().flatten().any(|except| except.0.contains(&ip))
    };
    networks.iter().filter(contains).map(|network| network.cidr.0.prefix_len()).max()
}
