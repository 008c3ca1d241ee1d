//! The state of the control plane: objects in, answers for proxies out, and the subscriptions to them.
//!
//! ```text
//! Event --apply--> Store (records and lookup tables) --dirty--> publish --> watch::Sender per view
//! ```
//!
//! [`Index`] is synchronous, and one thread owns it ([`SharedIndex`]). A lookup touches only what matches: pods by
//! address, services by cluster address, slices by service, policies by namespace. A subscriber holds a
//! `watch::Receiver` with the newest [`Snapshot`] of a view, so a slow stream never blocks an update. The gRPC edge
//! turns snapshots into messages; the index does not know gRPC, and objects reach it as [`Event`]s, wherever they come
//! from.

mod acceptance;
mod apply;
mod cluster;
mod discovery;
mod endpoint;
mod endpoints;
mod event;
mod inbound;
mod outbound;
mod pairs;
mod profile;
mod records;
mod selectable;
mod selection;
mod servers;
mod shared;
mod snapshot;
mod statistics;
mod status;
mod store;
mod watches;
mod workload;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use tokio::sync::watch;
use weft_k8s_api::manifest::ObjectRef;

pub use cluster::{Cluster, EndpointsFrom, TransportMode};
pub use discovery::{Discovery, LinkedService};
pub use endpoint::{Endpoint, Hint, Locality, PeerIdentity, SharedEndpoint};
pub use endpoints::{Endpoints, EndpointsQuery, MAX_UNDECLARED_PORTS};
use endpoints::{EndpointsKey, Known};
pub use event::Event;
use inbound::ServerPolicies;
pub use inbound::{
    Authentication, Authorization, InboundRateLimit, InboundRateLimitOverride, InboundRoute, InboundRoutes,
    InboundRule, InboundServer, Origin, ServerPolicy, ServerProtocol,
};
use outbound::OutboundKey;
pub use outbound::{
    BackendResource, ConnectionRoute, OutboundGrpcRoute, OutboundHttpRoute, OutboundParent, OutboundPolicy,
    OutboundProtocol, ParentPolicy, RequestFilter, RequestRoute, RequestRule, RouteBackend, ServicePort,
};
use profile::ProfileKey;
pub use profile::{EndpointProfile, ProfileQuery, ServiceProfile};
pub use records::{DstOverride, Key, RetryBudget, RouteId, RouteKind, Status};
pub use shared::{SharedIndex, Unanswered};
pub use snapshot::Snapshot;
pub use statistics::{EndpointsCount, EndpointsLabels, Followed, InboundSizes, OutboundSizes, Statistics, Views};
pub use status::PendingStatuses;
pub use store::AmbiguousAddress;

use records::{ExternalWorkloadRecord, PodRecord, ServiceRecord, SliceRecord};
use statistics::Published;
use store::{ParentId, Store};
use watches::Watches;

/// A subscription to a value: the newest snapshot.
pub type View<T> = watch::Receiver<Arc<Snapshot<T>>>;

/// A subscription to a value that may not be there.
pub type OptionalView<T> = watch::Receiver<Option<Arc<Snapshot<T>>>>;

/// The result of a batch, besides new snapshots.
#[derive(Debug, Default)]
pub struct Applied {
    /// Whether the batch completed the initial state.
    pub synced: bool,
    /// Problems of objects that are new with this batch.
    pub problems: Vec<Problem>,
}

/// A part of an object that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Kind, namespace and name.
    pub object: String,
    /// The problem, and its consequence.
    pub problem: String,
}

/// Store, views, and what to recompute.
pub struct Index {
    cluster: Arc<Cluster>,
    store: Store,
    dirty: Dirty,
    problems: Vec<Problem>,
    /// AuthorizationPolicies that grant nothing, with the reason, by namespace and name.
    ineffective: HashMap<String, BTreeMap<String, String>>,
    /// Routes and rate limits that Servers accept and do not have, with the problem, by Server.
    unused: HashMap<Key, BTreeMap<ObjectRef, String>>,
    synced: bool,
    discovery: Watches<Key, (), Option<Discovery>>,
    endpoints: Watches<Key, EndpointsKey, Arc<Snapshot<Endpoints>>>,
    service_profiles: Watches<Key, ProfileKey, Arc<Snapshot<ServiceProfile>>>,
    endpoint_profiles: Watches<IpAddr, u16, Option<Arc<Snapshot<EndpointProfile>>>>,
    /// Where the hostnames of a Service's endpoints lead.
    hostnames: Watches<Key, String, Option<IpAddr>>,
    inbound: Watches<Key, u16, Option<Arc<Snapshot<InboundServer>>>>,
    inbound_external: Watches<Key, u16, Option<Arc<Snapshot<InboundServer>>>>,
    outbound: Watches<IpAddr, OutboundKey, Option<Arc<Snapshot<OutboundPolicy>>>>,
    outbound_names: Watches<Key, OutboundKey, Option<Arc<Snapshot<OutboundPolicy>>>>,
    server_policies: ServerPolicies,
    statuses: PendingStatuses,
    published: Published,
}

/// Changes since the last publication, by the subscriptions that they affect.
#[derive(Default)]
struct Dirty {
    /// Services whose endpoints changed.
    endpoints: HashSet<Key>,
    /// Services whose clients' places may have to be looked up again, see `Client::suits`.
    moved: HashSet<Key>,
    /// Services whose endpoints may be elsewhere now.
    discovery: HashSet<Key>,
    /// Services whose endpoints are elsewhere now: clients ask again.
    redirected: HashSet<Key>,
    /// Services whose profiles changed.
    profiles: HashSet<Key>,
    /// Services whose clients may need another profile, see `ProfileKey`.
    profiled: HashSet<Key>,
    /// Services whose policy by name changed.
    outbound_names: HashSet<Key>,
    /// Addresses of Services.
    outbound: HashSet<IpAddr>,
    /// Addresses that another Service has than before, or none.
    reassigned: HashSet<IpAddr>,
    /// Addresses of Services that declare other ports than before.
    ports: HashSet<IpAddr>,
    /// Namespaces that began or ceased to have routes of their own at a Service of another one.
    consumers: HashSet<(ParentId, String)>,
    /// Whether EgressNetworks or their routes changed, and with them the policy of every address outside the cluster.
    egress: bool,
    /// Namespaces that began or ceased to have EgressNetworks, or routes at those of another one.
    egress_consumers: HashSet<String>,
    /// Addresses of workloads.
    endpoint_profiles: HashSet<IpAddr>,
    pods: HashSet<Key>,
    workloads: HashSet<Key>,
    /// Servers whose policies may have changed.
    servers: HashSet<Key>,
    /// Servers whose routes and rate limits may have begun or ceased to have no effect.
    unused: HashSet<Key>,
    /// Namespaces whose AuthorizationPolicies may have begun or ceased to grant something.
    policies: HashSet<String>,
    /// Whether a node became known.
    new_nodes: bool,
    /// Objects whose status may be another.
    statuses: HashSet<ObjectRef>,
}

impl Index {
    /// An empty index.
    pub fn new(cluster: Cluster) -> Self {
        Self {
            cluster: Arc::new(cluster),
            store: Store::default(),
            dirty: Dirty::default(),
            problems: Vec::new(),
            ineffective: HashMap::new(),
            unused: HashMap::new(),
            synced: false,
            discovery: Watches::default(),
            endpoints: Watches::default(),
            service_profiles: Watches::default(),
            endpoint_profiles: Watches::default(),
            hostnames: Watches::default(),
            inbound: Watches::default(),
            inbound_external: Watches::default(),
            outbound: Watches::default(),
            outbound_names: Watches::default(),
            server_policies: ServerPolicies::default(),
            statuses: PendingStatuses::default(),
            published: Published::default(),
        }
    }

    /// Applies a batch and then publishes what it changed.
    pub fn apply(&mut self, batch: Vec<Event>) -> Applied {
        let mut synced = false;
        for event in batch {
            match event {
                Event::Apply(object) => self.set(*object),
                Event::Delete(reference) => self.remove(&reference),
                Event::Synced => synced = true,
            }
        }
        self.synced |= synced;
        self.publish();
        Applied { synced, problems: std::mem::take(&mut self.problems) }
    }

    /// Number of AuthorizationPolicies that grant nothing.
    pub fn ineffective_policies(&self) -> usize {
        self.ineffective.values().map(BTreeMap::len).sum()
    }

    /// Statuses that are to be written.
    pub fn statuses(&self) -> PendingStatuses {
        self.statuses.clone()
    }

    /// Number of different answers about endpoints that clients have subscribed to.
    #[cfg(test)]
    fn endpoints_subscriptions(&mut self) -> usize {
        self.endpoints.len()
    }

    /// Number of different answers about addresses that clients have subscribed to.
    #[cfg(test)]
    fn outbound_subscriptions(&mut self) -> usize {
        self.outbound.len()
    }

    /// Settings of the mesh, which never change.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// The Service with this name, if there is one.
    pub fn service(&self, key: &Key) -> Option<Arc<ServiceRecord>> {
        self.store.service(key)
    }

    /// The Service that owns a cluster address.
    ///
    /// # Errors
    /// When there are several.
    pub fn service_by_ip(&self, ip: IpAddr) -> Result<Option<Arc<ServiceRecord>>, AmbiguousAddress> {
        self.store.service_by_ip(ip)
    }

    /// The address of a Service's endpoint with this hostname. `None` if there is no such endpoint; the value becomes
    /// `None` when that is so.
    pub fn watch_pod_of_service(&mut self, service: &Key, hostname: &str) -> Option<watch::Receiver<Option<IpAddr>>> {
        let Self { hostnames, store, .. } = self;
        hostnames.subscribe_known(service, hostname.to_owned(), |hostname| store.pod_of_service(service, hostname))
    }

    /// Whether a client may ask for the endpoints of this port: a Service has views of a few ports only that it does
    /// not declare.
    pub fn has_room_for(&self, service: &Key, port: u16) -> bool {
        let Some(record) = self.store.services.get(service) else { return true };
        if record.port(port).is_some() {
            return true;
        }
        let keys = self.endpoints.keys(service);
        let others: HashSet<u16> =
            keys.map(|key| key.port).filter(|other| *other != port && record.port(*other).is_none()).collect();
        others.len() < MAX_UNDECLARED_PORTS
    }

    /// The endpoints of a Service's port. The subscription survives deletion and re-creation of the Service. It ends,
    /// and the client's stream is to ask again, when the Service's endpoints begin or cease to depend on the client's
    /// node, when the client's node was not known and may be now, and when the endpoints begin or cease to be in other
    /// clusters.
    pub fn watch_endpoints(&mut self, service: &Key, query: EndpointsQuery) -> View<Endpoints> {
        let key = EndpointsKey::new(&self.store, service, query);
        self.endpoints_for(service, key)
    }

    /// The endpoints of a Service's port for a client in another cluster, whose zone is known and whose node is not: no
    /// endpoint is too far away for it.
    pub fn watch_endpoints_from_afar(
        &mut self,
        service: &Key,
        port: u16,
        hostname: Option<String>,
        zone: Option<String>,
    ) -> View<Endpoints> {
        self.endpoints_for(service, EndpointsKey::from_afar(port, hostname, zone))
    }

    fn endpoints_for(&mut self, service: &Key, key: EndpointsKey) -> View<Endpoints> {
        let Self { endpoints, store, cluster, .. } = self;
        // Most clients join a view, and must not pay for what only a new one needs.
        if let Some(joined) = endpoints.join(service, &key) {
            return joined;
        }
        let mut known = Known::of(endpoints.values(service));
        endpoints.subscribe(service, key, |key| {
            Arc::new(Snapshot::first(endpoints::compute(store, cluster, service, key, &mut known)))
        })
    }

    /// Where the endpoints of a Service are. `None` if the Service does not exist; the value becomes `None` when it is
    /// deleted.
    pub fn watch_discovery(&mut self, service: &Key) -> Option<watch::Receiver<Option<Discovery>>> {
        let Self { discovery, store, .. } = self;
        discovery.subscribe_known(service, (), |()| discovered(store, service))
    }

    /// The zone of a node, if it is known.
    pub fn zone_of(&self, node: &str) -> Option<String> {
        self.store.node(node).flatten().map(str::to_owned)
    }

    /// The profile of a Service's port. The subscription ends, and the client's stream is to ask again, when the
    /// Service declares other ports, and when a namespace gets its first ServiceProfile for the Service or loses it.
    pub fn watch_service_profile(&mut self, service: &Key, query: ProfileQuery) -> View<ServiceProfile> {
        let Self { service_profiles, store, cluster, .. } = self;
        let key = ProfileKey::new(store, cluster, service, query);
        let compute = |key: &ProfileKey| Arc::new(Snapshot::first(profile::service(store, cluster, service, key)));
        service_profiles.subscribe(service, key, compute)
    }

    /// The profile of an address that belongs to no Service. The snapshot is `None` while nothing is known:
    /// clients keep what they have. The subscription ends, and the client is to ask again, when a Service gets or loses
    /// the address.
    ///
    /// # Errors
    /// When several pods or ExternalWorkloads have the address.
    pub fn watch_endpoint_profile(
        &mut self,
        addr: SocketAddr,
    ) -> Result<OptionalView<EndpointProfile>, AmbiguousAddress> {
        let Self { endpoint_profiles, store, cluster, .. } = self;
        if store.pod_by_addr(addr)?.is_none() {
            store.workload_by_addr(addr)?;
        }
        let ip = addr.ip();
        let compute = |port: &u16| shared(profile::endpoint(store, cluster, SocketAddr::new(ip, *port)));
        Ok(endpoint_profiles.subscribe(&ip, addr.port(), compute))
    }

    /// The policy of a pod's port. `None` if the pod does not exist; the snapshot becomes `None` when the pod
    /// is deleted.
    pub fn watch_inbound(&mut self, pod: &Key, port: u16) -> Option<OptionalView<InboundServer>> {
        let Self { inbound, store, cluster, server_policies: policies, .. } = self;
        inbound.subscribe_known(pod, port, |port| shared(inbound::compute(store, cluster, policies, pod, *port)))
    }

    /// The policy of an ExternalWorkload's port. `None` if the workload does not exist; the snapshot becomes
    /// `None` when it is deleted.
    pub fn watch_inbound_external(&mut self, workload: &Key, port: u16) -> Option<OptionalView<InboundServer>> {
        let Self { inbound_external, store, cluster, server_policies: policies, .. } = self;
        let compute = |port: &u16| shared(inbound::compute_external(store, cluster, policies, workload, *port));
        inbound_external.subscribe_known(workload, port, compute)
    }

    /// The policy towards an address, for clients of a namespace. `None` if the address is unknown; the snapshot
    /// becomes `None` when that is so. The subscription ends, and the client's stream is to ask again, when the
    /// namespace begins or ceases to have routes or EgressNetworks of its own for the address, and when the address is
    /// assigned to another Service.
    pub fn watch_outbound(&mut self, addr: SocketAddr, namespace: &str) -> Option<OptionalView<OutboundPolicy>> {
        let Self { outbound, store, cluster, .. } = self;
        let (ip, key) = (addr.ip(), OutboundKey::of_addr(store, cluster, addr, namespace));
        outbound.subscribe_known(&ip, key, |key| shared(outbound::compute_by_addr(store, cluster, ip, key)))
    }

    /// The policy towards a Service by its name, which need not exist yet, for clients of a namespace. The subscription
    /// ends like that to an address.
    pub fn watch_outbound_name(&mut self, service: &Key, port: u16, namespace: &str) -> OptionalView<OutboundPolicy> {
        let Self { outbound_names, store, cluster, .. } = self;
        let key = OutboundKey::of_name(store, service, port, namespace);
        outbound_names.subscribe(service, key, |key| shared(outbound::compute_by_name(store, cluster, service, key)))
    }
}

impl Index {
    /// Recomputes the snapshots that changes since the last call affect, and no others.
    fn publish(&mut self) {
        self.derive_servers();
        let mut dirty = std::mem::take(&mut self.dirty);
        if self.synced {
            dirty.policies.iter().for_each(|namespace| self.report_ineffective(namespace));
            dirty.unused.iter().for_each(|server| self.report_unused(server));
            self.statuses.update(&self.store, &self.cluster, std::mem::take(&mut dirty.statuses));
        } else {
            self.dirty.policies = std::mem::take(&mut dirty.policies);
            self.dirty.unused = std::mem::take(&mut dirty.unused);
            self.dirty.statuses = std::mem::take(&mut dirty.statuses);
        }
        let (store, cluster, policies) = (&self.store, &*self.cluster, &self.server_policies);
        let published = &mut self.published;
        if dirty.new_nodes {
            self.endpoints.end(|key| key.client.awaits_node());
        }
        for service in &dirty.moved {
            let local = store.service(service).is_some_and(|service| service.local);
            self.endpoints.end_in(service, |key| !key.client.suits(local));
        }
        dirty.end_outbound(store, cluster, &mut self.outbound, &mut self.outbound_names);
        for ip in &dirty.reassigned {
            self.endpoint_profiles.end_in(ip, |_| true);
        }
        for service in &dirty.redirected {
            self.endpoints.end_in(service, |_| true);
        }
        for service in &dirty.discovery {
            self.discovery.update(service, |(), old| {
                let new = discovered(store, service);
                (*old != new).then_some(new)
            });
        }
        for service in &dirty.endpoints {
            self.hostnames.update(service, |hostname, old| {
                let new = store.pod_of_service(service, hostname);
                (*old != new).then_some(new)
            });
            let mut known = Known::of(self.endpoints.values(service));
            self.endpoints.update(service, |key, old| {
                let new = endpoints::compute(store, cluster, service, key, &mut known);
                if ***old == new {
                    return None;
                }
                published.endpoints(service, key, &new);
                Some(Arc::new(Snapshot::after(old, new)))
            });
        }
        for service in &dirty.profiled {
            self.service_profiles.end_in(service, |_| true);
        }
        for service in &dirty.profiles {
            self.service_profiles.update(service, |key, old| {
                let new = profile::service(store, cluster, service, key);
                if ***old == new {
                    return None;
                }
                published.profile(key.profile(cluster, service));
                Some(Arc::new(Snapshot::after(old, new)))
            });
        }
        for service in &dirty.outbound_names {
            self.outbound_names
                .update(service, |key, old| changed(old, outbound::compute_by_name(store, cluster, service, key)));
        }
        for ip in &dirty.endpoint_profiles {
            self.endpoint_profiles.update(ip, |port, old| {
                let next = changed(old, profile::endpoint(store, cluster, SocketAddr::new(*ip, *port)))?;
                published.workload();
                Some(next)
            });
        }
        for ip in &dirty.outbound {
            self.outbound.update(ip, |key, old| changed(old, outbound::compute_by_addr(store, cluster, *ip, key)));
        }
        for pod in &dirty.pods {
            self.inbound.update(pod, |port, old| changed(old, inbound::compute(store, cluster, policies, pod, *port)));
        }
        for workload in &dirty.workloads {
            self.inbound_external.update(workload, |port, old| {
                changed(old, inbound::compute_external(store, cluster, policies, workload, *port))
            });
        }
    }
}

/// Where the endpoints of a Service are, if it exists.
fn discovered(store: &Store, service: &Key) -> Option<Discovery> {
    store.service(service).map(|record| record.discovery.clone())
}

/// The first snapshot of a view that may have none.
fn shared<T>(value: Option<T>) -> Option<Arc<Snapshot<T>>> {
    value.map(Snapshot::first).map(Arc::new)
}

/// The next snapshot of a view that may have none, if it differs.
fn changed<T: PartialEq>(old: &Option<Arc<Snapshot<T>>>, new: Option<T>) -> Option<Option<Arc<Snapshot<T>>>> {
    if old.as_ref().map(|old| &***old) == new.as_ref() { None } else { Some(shared(new)) }
}

impl Dirty {
    /// Ends the subscriptions whose keys are no longer those that their clients would get now, and marks those of
    /// addresses outside the cluster if EgressNetworks changed.
    fn end_outbound(
        &mut self,
        store: &Store,
        cluster: &Cluster,
        outbound: &mut Watches<IpAddr, OutboundKey, Option<Arc<Snapshot<OutboundPolicy>>>>,
        names: &mut Watches<Key, OutboundKey, Option<Arc<Snapshot<OutboundPolicy>>>>,
    ) {
        self.reassigned.iter().for_each(|ip| outbound.end_in(ip, |_| true));
        self.ports.iter().for_each(|ip| outbound.end_in(ip, |key| *key == OutboundKey::Undeclared));
        for (parent, namespace) in &self.consumers {
            let counts = store.has_consumer_routes(parent, namespace);
            names.end_in(&parent.key, |key| key.is_stale(namespace, counts));
            for ip in store.services.get(&parent.key).iter().flat_map(|service| &service.cluster_ips) {
                outbound.end_in(ip, |key| key.is_stale(namespace, counts));
            }
        }
        if !self.egress && self.egress_consumers.is_empty() {
            return;
        }
        let is_outside = |ip: &IpAddr| !cluster.contains(*ip) && matches!(store.service_by_ip(*ip), Ok(None));
        let outside: Vec<_> = outbound.groups().copied().filter(is_outside).collect();
        for namespace in &self.egress_consumers {
            let counts = store.chooses_egress(cluster, namespace);
            outside.iter().for_each(|ip| outbound.end_in(ip, |key| key.is_stale(namespace, counts)));
        }
        self.outbound.extend(outside);
    }

    fn service(&mut self, service: &ServiceRecord) {
        for services in [&mut self.discovery, &mut self.endpoints, &mut self.profiles, &mut self.outbound_names] {
            services.insert(service.key.clone());
        }
        self.outbound.extend(&service.cluster_ips);
    }

    /// Marks a Service of which a slice changed: another node may have its first endpoint, and other pods may be those
    /// that are sent nothing in plaintext.
    fn slice(&mut self, store: &Store, slice: &SliceRecord) {
        self.endpoints.insert(slice.service.clone());
        let Some(service) = store.services.get(&slice.service) else { return };
        if service.local {
            self.moved.insert(slice.service.clone());
        }
        if service.require_mtls {
            self.addresses_of_slice(store, slice);
        }
    }

    /// Marks the addresses of a slice's pods.
    fn addresses_of_slice(&mut self, store: &Store, slice: &SliceRecord) {
        slice.pods().filter_map(|pod| store.pod(pod)).for_each(|pod| self.addresses(pod));
    }

    fn pod(&mut self, pod: &PodRecord) {
        self.pods.insert(pod.key.clone());
        self.addresses(pod);
    }

    /// Marks the addresses of a pod.
    fn addresses(&mut self, pod: &PodRecord) {
        self.endpoint_profiles.extend(&pod.ips);
        self.endpoint_profiles.extend(pod.host_ports.iter().map(|host| host.addr.ip()));
    }

    fn workload(&mut self, workload: &ExternalWorkloadRecord) {
        self.workloads.insert(workload.key.clone());
        self.endpoint_profiles.extend(&workload.ips);
    }
}
