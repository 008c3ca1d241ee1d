//! Records by key, and tables for each way to look one up.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    hash::Hash,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use weft_k8s_api::{
    manifest::ObjectRef,
    policy::{
        AuthorizationPolicySpec, Network, ServerAuthorizationSpec, TargetRef,
        route::{Parent, ParentKind, ReferenceGrantSpec},
    },
};

use super::{
    cluster::Cluster,
    pairs::Members,
    records::{
        EgressNetworkRecord, ExternalWorkloadRecord, Key, Lifecycle, MeshTlsRecord, Owner, PodRecord, ProfileRecord,
        RateLimitRecord, RouteId, RouteKind, RouteRecord, ServerRecord, ServiceRecord, SliceRecord, Status,
    },
    selectable::Selectable,
    servers::Servers,
};

/// Several objects claim one address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AmbiguousAddress {
    /// Services.
    #[error("services {0} share the cluster address {1}")]
    Services(String, IpAddr),
    /// Pods, none of which has ended.
    #[error("pods {0} share the address {1}")]
    Pods(String, SocketAddr),
    /// ExternalWorkloads.
    #[error("external workloads {0} share the address {1}")]
    Workloads(String, SocketAddr),
}

/// Everything that is known.
#[derive(Default)]
pub(super) struct Store {
    pub(super) services: HashMap<Key, Arc<ServiceRecord>>,
    pub(super) service_ips: Table<IpAddr, Key>,
    pub(super) slices: HashMap<Key, Arc<SliceRecord>>,
    /// Number of subsets of Endpoints objects.
    pub(super) subsets: HashMap<Key, usize>,
    pub(super) slices_of_service: Table<Key, Key>,
    /// Services by the pods that are their endpoints, ready or not.
    pub(super) services_of_pod: Table<Key, Key>,
    pub(super) pods: HashMap<Key, Arc<PodRecord>>,
    pub(super) pods_in_namespace: Members,
    pub(super) pod_ips: Table<IpAddr, Key>,
    pub(super) pod_host_ports: Table<SocketAddr, Key>,
    pub(super) pods_of_owner: Table<Owned, Key>,
    pub(super) workloads: HashMap<Key, Arc<ExternalWorkloadRecord>>,
    pub(super) workloads_in_namespace: Members,
    pub(super) workload_ips: Table<IpAddr, Key>,
    pub(super) services_of_workload: Table<Key, Key>,
    pub(super) profiles: HashMap<Key, Arc<ProfileRecord>>,
    /// Nodes, with their zones if they have one.
    pub(super) zones: HashMap<String, Option<String>>,
    /// Owners of ReplicaSets and Jobs.
    pub(super) owners: HashMap<Owned, Owner>,
    pub(super) namespaces: HashMap<String, NamespacePolicies>,
    /// AuthorizationPolicies by the authentications that they refer to.
    pub(super) policies_by_authentication: Table<Key, Key>,
    pub(super) routes: HashMap<RouteId, Arc<RouteRecord>>,
    /// Routes by their parents, whatever the port, and whether or not the parents exist.
    pub(super) routes_of_parent: Table<ParentId, RouteId>,
    /// Routes by the Services that they send traffic to.
    pub(super) routes_of_backend: Table<Key, RouteId>,
    /// ReferenceGrants by namespace and name, so that those of a namespace are together.
    pub(super) reference_grants: BTreeMap<Key, ReferenceGrantSpec>,
    /// By namespace and name, so that those of a namespace are together.
    pub(super) egress_networks: BTreeMap<Key, Arc<EgressNetworkRecord>>,
    /// Routes of EgressNetworks of other namespaces, by their own.
    pub(super) egress_consumers: Table<String, RouteId>,
    /// Routes by the EgressNetworks that they send traffic to.
    pub(super) routes_to_egress_network: Table<Key, RouteId>,
    /// What the statuses of objects say now, of those whose status Weft writes.
    pub(super) statuses: HashMap<ObjectRef, Status>,
}

/// A parent of routes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ParentId {
    pub(super) kind: ParentKind,
    pub(super) key: Key,
}

/// An object between pods and what people deploy (a ReplicaSet or a Job).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Owned {
    pub(super) kind: String,
    pub(super) key: Key,
}

/// A pod at an address.
pub(super) struct PodAt<'a> {
    pub(super) pod: &'a Arc<PodRecord>,
    /// The port in the pod.
    pub(super) port: u16,
}

/// Policy objects of one namespace.
#[derive(Default)]
pub(super) struct NamespacePolicies {
    pub(super) servers: Servers,
    pub(super) authorizations: BTreeMap<String, Authz>,
    /// AuthorizationPolicies by what they protect, whether or not it exists.
    pub(super) authorizations_of: Table<Protected, String>,
    pub(super) server_authorizations: BTreeMap<String, ServerAuthorizationSpec>,
    pub(super) mesh_tls: HashMap<String, MeshTlsRecord>,
    pub(super) networks: HashMap<String, Vec<Network>>,
    pub(super) rate_limits: BTreeMap<String, RateLimitRecord>,
    /// HTTPLocalRateLimitPolicies by the Servers that they name, whether or not the Servers exist.
    pub(super) rate_limits_of_server: Table<String, String>,
}

impl NamespacePolicies {
    fn is_empty(&self) -> bool {
        self.servers.iter().next().is_none()
            && self.authorizations.is_empty()
            && self.server_authorizations.is_empty()
            && self.mesh_tls.is_empty()
            && self.networks.is_empty()
            && self.rate_limits.is_empty()
    }
}

/// An AuthorizationPolicy.
#[derive(PartialEq)]
pub(super) struct Authz {
    pub(super) created: Option<Timestamp>,
    pub(super) spec: AuthorizationPolicySpec,
}

/// What an AuthorizationPolicy protects, in its own namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Protected {
    /// Every Server.
    Namespace,
    /// A Server.
    Server(String),
    /// A route that is attached to Servers.
    Route(RouteKind, String),
}

/// Several values per key, in order.
pub(super) struct Table<K, V>(HashMap<K, Values<V>>);

/// The values of a key. Most keys have one, for which a set would keep room for eleven.
enum Values<V> {
    One(V),
    Several(BTreeSet<V>),
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash, V: Ord> Table<K, V> {
    pub(super) fn insert(&mut self, key: K, value: V) {
        match self.0.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(Values::One(value));
            }
            Entry::Occupied(mut entry) => entry.get_mut().insert(value),
        }
    }

    pub(super) fn remove(&mut self, key: &K, value: &V) {
        if self.0.get_mut(key).is_some_and(|values| values.remove(value)) {
            self.0.remove(key);
        }
    }

    pub(super) fn iter<'a>(&'a self, key: &K) -> impl Iterator<Item = &'a V> + use<'a, K, V> {
        let (one, several) = match self.0.get(key) {
            Some(Values::One(one)) => (Some(one), None),
            Some(Values::Several(several)) => (None, Some(several)),
            None => (None, None),
        };
        one.into_iter().chain(several.into_iter().flatten())
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }
}

impl<V: Ord> Values<V> {
    fn insert(&mut self, value: V) {
        if matches!(self, Self::One(one) if *one == value) {
            return;
        }
        let mut several = match std::mem::replace(self, Self::Several(BTreeSet::new())) {
            Self::One(one) => BTreeSet::from([one]),
            Self::Several(several) => several,
        };
        several.insert(value);
        *self = Self::Several(several);
    }

    /// Returns whether none is left.
    fn remove(&mut self, value: &V) -> bool {
        match self {
            Self::One(one) => one == value,
            Self::Several(several) => {
                several.remove(value);
                if several.len() == 1
                    && let Some(one) = several.pop_first()
                {
                    *self = Self::One(one);
                }
                false
            }
        }
    }
}

impl Protected {
    /// `None` if the target is of another kind, or another namespace.
    pub(super) fn of(target: &TargetRef, namespace: &str) -> Option<Self> {
        let name = || target.name.clone();
        if target.is("", "Namespace") {
            return (target.name == namespace).then_some(Self::Namespace);
        }
        if target.is(ParentKind::Server.group(), ParentKind::Server.name()) {
            return Some(Self::Server(name()));
        }
        let kinds = [RouteKind::Http, RouteKind::GatewayHttp, RouteKind::Grpc];
        let kind = kinds.into_iter().find(|kind| target.is(kind.group(), kind.name()))?;
        Some(Self::Route(kind, name()))
    }
}

impl ParentId {
    pub(super) fn new(kind: ParentKind, key: Key) -> Self {
        Self { kind, key }
    }

    pub(super) fn of(parent: &Parent) -> Self {
        Self::new(parent.kind, Key::new(&parent.namespace, &parent.name))
    }
}

impl Store {
    /// Routes that name a parent, whatever the port, the oldest first, then by name: Linkerd's order.
    pub(super) fn routes_of(&self, parent: &ParentId) -> Vec<&Arc<RouteRecord>> {
        let mut routes: Vec<_> = self.routes_of_parent.iter(parent).filter_map(|id| self.routes.get(id)).collect();
        routes.sort_by_key(|route| (route.created, &route.id.key.namespace, &route.id.key.name, route.id.kind));
        routes
    }

    /// Whether a namespace has routes at a parent of another namespace: its clients follow them, and no others do.
    pub(super) fn has_consumer_routes(&self, parent: &ParentId, namespace: &str) -> bool {
        namespace != parent.key.namespace
            && self.routes_of_parent.iter(parent).any(|route| route.key.namespace == namespace)
    }

    /// Whether a namespace has EgressNetworks, or routes at those of another namespace. For clients of the namespace of
    /// the cluster's EgressNetworks, they are the same as for clients without any.
    pub(super) fn chooses_egress(&self, cluster: &Cluster, namespace: &str) -> bool {
        namespace != cluster.egress_namespace
            && (self.egress_networks_in(namespace).next().is_some()
                || self.egress_consumers.iter(&namespace.to_owned()).next().is_some())
    }

    /// Whether a route may send traffic to a Service: one of its own namespace, or, where grants are required, one that
    /// its namespace grants to it.
    pub(super) fn may_refer(&self, cluster: &Cluster, route: &RouteId, service: &Key) -> bool {
        if route.key.namespace == service.namespace || !cluster.require_reference_grants {
            return true;
        }
        let from = Key::new(&service.namespace, "");
        let mut grants = self.reference_grants.range(from..).take_while(|(key, _)| key.namespace == service.namespace);
        let RouteId { kind, key } = route;
        grants.any(|(_, grant)| grant.permits(kind.group(), kind.name(), &key.namespace, &service.name))
    }

    /// The EgressNetworks of a namespace.
    pub(super) fn egress_networks_in<'a>(
        &'a self,
        namespace: &str,
    ) -> impl Iterator<Item = &'a Arc<EgressNetworkRecord>> {
        let from = Key::new(namespace, "");
        let of = namespace.to_owned();
        self.egress_networks.range(from..).take_while(move |(key, _)| key.namespace == of).map(|(_, network)| network)
    }

    pub(super) fn service(&self, key: &Key) -> Option<Arc<ServiceRecord>> {
        self.services.get(key).cloned()
    }

    pub(super) fn service_by_ip(&self, ip: IpAddr) -> Result<Option<Arc<ServiceRecord>>, AmbiguousAddress> {
        let mut owners = self.service_ips.iter(&ip);
        let first = owners.next();
        match owners.next() {
            Some(_) => Err(AmbiguousAddress::Services(names(self.service_ips.iter(&ip)), ip)),
            None => Ok(first.and_then(|key| self.service(key))),
        }
    }

    pub(super) fn slices(&self, service: &Key) -> impl Iterator<Item = &Arc<SliceRecord>> {
        self.slices_of_service.iter(service).filter_map(|key| self.slices.get(key))
    }

    /// Whether a Service has endpoints on a node.
    pub(super) fn serves_on(&self, service: &Key, node: &str) -> bool {
        let mut endpoints = self.slices(service).flat_map(|slice| &slice.endpoints);
        endpoints.any(|endpoint| endpoint.node.as_deref() == Some(node))
    }

    pub(super) fn pod(&self, key: &Key) -> Option<&Arc<PodRecord>> {
        self.pods.get(key)
    }

    /// Whether a Service that has the pod as an endpoint, ready or not, requires mutual TLS.
    pub(super) fn requires_mtls(&self, pod: &Key) -> bool {
        let mut services = self.services_of_pod.iter(pod).filter_map(|key| self.services.get(key));
        services.any(|service| service.require_mtls)
    }

    /// The pod at an address: by the pod's own address, else by its node's.
    pub(super) fn pod_by_addr(&self, addr: SocketAddr) -> Result<Option<PodAt<'_>>, AmbiguousAddress> {
        let by_ip = self.pod_ips.iter(&addr.ip()).filter_map(|key| self.pods.get(key));
        if let Some(pod) = answering(by_ip.filter(|pod| !pod.host_network), addr)? {
            return Ok(Some(PodAt { pod, port: addr.port() }));
        }
        let on_node = self.pod_host_ports.iter(&addr).filter_map(|key| self.pods.get(key));
        let Some(pod) = answering(on_node, addr)? else { return Ok(None) };
        let port = pod.host_ports.iter().find(|host| host.addr == addr).map(|host| host.port);
        Ok(port.map(|port| PodAt { pod, port }))
    }

    /// The address of a Service's endpoint with this hostname.
    pub(super) fn pod_of_service(&self, service: &Key, hostname: &str) -> Option<IpAddr> {
        let mut endpoints = self.slices(service).flat_map(|slice| &slice.endpoints);
        endpoints.find(|endpoint| endpoint.hostname.as_deref() == Some(hostname))?.addresses.first().copied()
    }

    /// Whether a node is known, and its zone if it has one.
    pub(super) fn node(&self, name: &str) -> Option<Option<&str>> {
        self.zones.get(name).map(Option::as_deref)
    }

    /// The owner of a ReplicaSet or a Job.
    pub(super) fn owner_of(&self, kind: &str, key: &Key) -> Option<&Owner> {
        self.owners.get(&Owned { kind: kind.to_owned(), key: key.clone() })
    }

    /// The ServiceProfile of this namespace and name.
    pub(super) fn profile(&self, key: &Key) -> Option<&Arc<ProfileRecord>> {
        self.profiles.get(key)
    }

    pub(super) fn workload(&self, key: &Key) -> Option<&Arc<ExternalWorkloadRecord>> {
        self.workloads.get(key)
    }

    /// The ExternalWorkload at an address, if it lists the port.
    pub(super) fn workload_by_addr(
        &self,
        addr: SocketAddr,
    ) -> Result<Option<&Arc<ExternalWorkloadRecord>>, AmbiguousAddress> {
        let at = self.workload_ips.iter(&addr.ip()).filter_map(|key| self.workloads.get(key));
        let found: Vec<_> = at.filter(|workload| workload.ports.contains(&addr.port())).collect();
        match found[..] {
            [] => Ok(None),
            [workload] => Ok(Some(workload)),
            _ => Err(AmbiguousAddress::Workloads(names(found.iter().map(|workload| &workload.key)), addr)),
        }
    }

    /// Pods that a Server selects, whatever the port.
    pub(super) fn pods_of<'a>(&'a self, server: &'a ServerRecord) -> impl Iterator<Item = &'a Arc<PodRecord>> {
        let (namespace, selector) = (&server.key.namespace, server.spec.pod_selector.as_ref());
        let candidates = self.pods_in_namespace.candidates(namespace, selector);
        let pods = candidates.filter_map(|key| self.pods.get(&key));
        pods.filter(|pod| Selectable::Pod(pod).is_selected_by(server))
    }

    /// ExternalWorkloads that a Server selects, whatever the port.
    pub(super) fn workloads_of<'a>(
        &'a self,
        server: &'a ServerRecord,
    ) -> impl Iterator<Item = &'a Arc<ExternalWorkloadRecord>> {
        let (namespace, selector) = (&server.key.namespace, server.spec.external_workload_selector.as_ref());
        let candidates = self.workloads_in_namespace.candidates(namespace, selector);
        let workloads = candidates.filter_map(|key| self.workloads.get(&key));
        workloads.filter(|workload| Selectable::External(workload).is_selected_by(server))
    }

    pub(super) fn policies(&self, namespace: &str) -> Option<&NamespacePolicies> {
        self.namespaces.get(namespace)
    }

    pub(super) fn policies_mut(&mut self, namespace: &str) -> &mut NamespacePolicies {
        self.namespaces.entry(namespace.to_owned()).or_default()
    }

    /// Drops the tables of a namespace that has no policies any more.
    pub(super) fn forget_policies(&mut self, namespace: &str) {
        if self.policies(namespace).is_some_and(NamespacePolicies::is_empty) {
            self.namespaces.remove(namespace);
        }
    }
}

fn names<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    keys.map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

/// The pod at an address that several may claim: a terminating pod still runs, with its proxy, unless its
/// address already belongs to another.
fn answering<'a>(
    pods: impl Iterator<Item = &'a Arc<PodRecord>>,
    addr: SocketAddr,
) -> Result<Option<&'a Arc<PodRecord>>, AmbiguousAddress> {
    let (mut live, mut terminating) = (Vec::new(), Vec::new());
    for pod in pods {
        match pod.lifecycle {
            Lifecycle::Live => live.push(pod),
            Lifecycle::Terminating => terminating.push(pod),
            Lifecycle::Ended => {}
        }
    }
    let found = if live.is_empty() { terminating } else { live };
    match found[..] {
        [] => Ok(None),
        [pod] => Ok(Some(pod)),
        _ => Err(AmbiguousAddress::Pods(names(found.iter().map(|pod| &pod.key)), addr)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_each_value_once_in_order_and_no_key_without_values() {
        let mut table = Table::default();
        for value in [2, 2, 3, 1, 3] {
            table.insert("key", value);
        }
        let values = |table: &Table<_, i32>| table.iter(&"key").copied().collect::<Vec<_>>();
        assert_eq!(values(&table), [1, 2, 3]);
        table.remove(&"key", &4);
        table.remove(&"other", &1);
        for (value, left) in [(2, &[1, 3][..]), (1, &[3]), (1, &[3]), (3, &[])] {
            table.remove(&"key", &value);
            assert_eq!(values(&table), left);
        }
        assert_eq!(table.keys().count(), 0);
        table.insert("key", 5);
        assert_eq!(values(&table), [5]);
    }
}
