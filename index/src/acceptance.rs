//! Whether a parent accepts a route. Policies and statuses are derived from the same answer, so that a route is in
//! force where its status says so, and does not wait for the status to be written, except for clients whose own
//! namespace has a route of a stronger kind: they follow that one. As with Linkerd, a Server also accepts routes and
//! rate limits that its protocol does not have, and the index reports them.

use std::sync::Arc;

use ipnet::IpNet;
use weft_k8s_api::policy::{
    Network,
    route::{Parent, ParentKind},
};

use super::{
    cluster::Cluster,
    records::{EgressNetworkRecord, Key, RateLimitRecord, RouteKind, RouteRecord},
    store::{ParentId, Store},
};

/// What a parent says to a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acceptance {
    Accepted,
    /// There is no such parent, or it cannot have routes: the text says why.
    NoMatchingParent(&'static str),
    /// A route of this kind takes precedence at the same parent.
    Conflicted(RouteKind),
}

/// Whether one of a route's parents accepts it.
pub(super) fn of(store: &Store, cluster: &Cluster, route: &RouteRecord, parent: &Parent) -> Acceptance {
    let id = ParentId::of(parent);
    match parent.kind {
        ParentKind::Server => {
            let policies = store.policies(&id.key.namespace);
            return match policies.and_then(|policies| policies.servers.get(&id.key.name)) {
                // As in Linkerd's inbound index, no route of connections is attached to a Server, and none of another
                // namespace: its authors could close the Server, or open it.
                Some(server) if server.is_unreadable => Acceptance::NoMatchingParent("parent Server cannot be read"),
                Some(_) if matches!(route.id.kind, RouteKind::Tls | RouteKind::Tcp) => Acceptance::NoMatchingParent(""),
                Some(_) if route.id.key.namespace != id.key.namespace => {
                    Acceptance::NoMatchingParent("parent Server must be in the route's namespace")
                }
                Some(_) if parent.port.is_some() => {
                    Acceptance::NoMatchingParent("parent Server must be named without a port")
                }
                Some(_) => Acceptance::Accepted,
                None => Acceptance::NoMatchingParent(""),
            };
        }
        ParentKind::Service => match store.services.get(&id.key) {
            None => return Acceptance::NoMatchingParent(""),
            Some(service) if service.cluster_ips.is_empty() => {
                return Acceptance::NoMatchingParent("parent service must have a ClusterIP");
            }
            Some(_) => {}
        },
        ParentKind::EgressNetwork => match store.egress_networks.get(&id.key) {
            None => return Acceptance::NoMatchingParent(""),
            Some(network) if network.is_unreadable => {
                return Acceptance::NoMatchingParent("EgressNetwork parent cannot be read");
            }
            Some(network) if !is_egress_network_accepted(cluster, network) => {
                return Acceptance::NoMatchingParent("EgressNetwork parent has not been accepted");
            }
            Some(_) => {}
        },
    }
    match stronger(store, route, parent, &id) {
        Some(kind) => Acceptance::Conflicted(kind),
        None => Acceptance::Accepted,
    }
}

/// Routes that a Server accepts; the oldest first, then by name.
pub(super) fn accepted_by_server<'a>(store: &'a Store, cluster: &Cluster, server: &Key) -> Vec<&'a Arc<RouteRecord>> {
    let parent = ParentId::new(ParentKind::Server, server.clone());
    let mut routes = store.routes_of(&parent);
    routes.retain(|route| {
        let mut named = route.parents.iter().filter(|named| ParentId::of(named) == parent);
        named.any(|named| of(store, cluster, route, named) == Acceptance::Accepted)
    });
    routes
}

/// The rate limit that is in force at a Server, with its name: of those that name the Server, the oldest, then the
/// first by name.
pub(super) fn rate_limit<'a>(store: &'a Store, server: &Key) -> Option<(&'a String, &'a RateLimitRecord)> {
    let policies = store.policies(&server.namespace)?;
    let limits = policies.rate_limits_of_server.iter(&server.name);
    let limits = limits.filter_map(|name| policies.rate_limits.get_key_value(name));
    limits.min_by_key(|(name, limit)| (limit.created.is_none(), limit.created, *name))
}

/// Whether an EgressNetwork may be used: it must not contain addresses of the cluster.
pub(super) fn is_egress_network_accepted(cluster: &Cluster, network: &EgressNetworkRecord) -> bool {
    let networks = network.spec.networks.iter().flatten();
    let overlaps = |a: &IpNet, b: &IpNet| a.contains(&b.network()) || b.contains(&a.network());
    // What is cut out of a network does not count.
    let cut_out = |named: &Network, of: &IpNet| named.except.iter().flatten().any(|except| except.0.contains(of));
    !networks
        .into_iter()
        .any(|named| cluster.networks.iter().any(|of| overlaps(&named.cidr.0, of) && !cut_out(named, of)))
}

/// The precedence of kinds at one parent, the strongest first.
fn rank(kind: RouteKind) -> u8 {
    match kind {
        RouteKind::Grpc => 0,
        RouteKind::Http | RouteKind::GatewayHttp => 1,
        RouteKind::Tls => 2,
        RouteKind::Tcp => 3,
    }
}

/// The kind of a stronger route that is attached to all of the ports that `parent` names, and that each client of the
/// route follows. Beyond Linkerd, a consumer route of another namespace does not count: its author could put the routes
/// of a Service or an EgressNetwork out of force for clients that do not follow it.
fn stronger(store: &Store, route: &RouteRecord, parent: &Parent, id: &ParentId) -> Option<RouteKind> {
    let others = store.routes_of_parent.iter(id).filter_map(|id| store.routes.get(id));
    let is_stronger = |other: &&Arc<RouteRecord>| {
        let same = |named: &Parent| ParentId::of(named) == *id && (named.port.is_none() || named.port == parent.port);
        let of = &other.id.key.namespace;
        let is_followed = *of == id.key.namespace || *of == route.id.key.namespace;
        let is_stronger = other.readable && rank(other.id.kind) < rank(route.id.kind);
        is_stronger && is_followed && other.parents.iter().any(same)
    };
    others.filter(is_stronger).map(|other| other.id.kind).min_by_key(|kind| rank(*kind))
}
