//! The state of the control plane: objects in, answers for proxies out, and the subscriptions to them.
//!
//! ```text
//! Event --apply--> Store (records and lookup tables) --dirty--> publish --> watch::Sender per subscription
//! ```
//!
//! Everything here is synchronous. A lookup touches only what matches: pods by address, services by cluster
//! address, slices by service, policies by namespace. A subscriber holds a `watch::Receiver` with the newest
//! snapshot, so a slow stream never blocks an update. The gRPC edge turns snapshots into messages; the index
//! does not know gRPC, and objects reach it as [`Event`]s, wherever they come from.

mod apply;
mod cluster;
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

use parking_lot::Mutex;
use tokio::sync::watch;

pub use cluster::{Cluster, TransportMode};
pub use endpoint::{Endpoint, Hint, PeerIdentity};
use endpoints::EndpointsKey;
pub use endpoints::{Endpoints, EndpointsQuery};
pub use event::Event;
pub use inbound::{Authentication, Authorization, InboundServer, Origin, ServerProtocol};
pub use outbound::{OutboundPolicy, OutboundProtocol};
pub use profile::{EndpointProfile, ProfileKey, ServiceProfile};
pub use records::{DstOverride, Key, RetryBudget};
pub use store::AmbiguousAddress;

use records::{ExternalWorkloadRecord, PodRecord, ServiceRecord};
use store::Store;
use watches::Watches;

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

/// The index, shared by the gRPC services. Every call locks for a moment and never waits.
#[derive(Clone)]
pub struct SharedIndex(Arc<Mutex<Index>>);

/// Store, subscriptions, and what to recompute.
struct Index {
    cluster: Arc<Cluster>,
    store: Store,
    dirty: Dirty,
    problems: Vec<Problem>,
    /// AuthorizationPolicies that grant nothing, with the reason, by namespace and name.
    ineffective: HashMap<String, BTreeMap<String, String>>,
    synced: bool,
    endpoints: Watches<Key, EndpointsKey, Arc<Endpoints>>,
    service_profiles: Watches<Key, ProfileKey, Arc<ServiceProfile>>,
    endpoint_profiles: Watches<IpAddr, u16, Option<Arc<EndpointProfile>>>,
    inbound: Watches<Key, u16, Option<Arc<InboundServer>>>,
    inbound_external: Watches<Key, u16, Option<Arc<InboundServer>>>,
    outbound: Watches<IpAddr, u16, Option<Arc<OutboundPolicy>>>,
    outbound_names: Watches<Key, u16, Option<Arc<OutboundPolicy>>>,
}

/// Changes since the last publication, by the subscriptions that they affect.
#[derive(Default)]
struct Dirty {
    /// Services whose endpoints changed.
    endpoints: HashSet<Key>,
    /// Services whose clients' places may have to be looked up again, see `Client::suits`.
    moved: HashSet<Key>,
    /// Services whose profiles changed.
    profiles: HashSet<Key>,
    /// Services whose policy by name changed.
    outbound_names: HashSet<Key>,
    /// Addresses of Services.
    outbound: HashSet<IpAddr>,
    /// Addresses of workloads.
    endpoint_profiles: HashSet<IpAddr>,
    pods: HashSet<Key>,
    workloads: HashSet<Key>,
    /// Namespaces whose policies changed.
    policies: HashSet<String>,
    /// Whether a node became known.
    new_nodes: bool,
}

impl SharedIndex {
    /// An empty index.
    pub fn new(cluster: Cluster) -> Self {
        Self(Arc::new(Mutex::new(Index {
            cluster: Arc::new(cluster),
            store: Store::default(),
            dirty: Dirty::default(),
            problems: Vec::new(),
            ineffective: HashMap::new(),
            synced: false,
            endpoints: Watches::default(),
            service_profiles: Watches::default(),
            endpoint_profiles: Watches::default(),
            inbound: Watches::default(),
            inbound_external: Watches::default(),
            outbound: Watches::default(),
            outbound_names: Watches::default(),
        })))
    }

    /// Applies a batch and then publishes what it changed.
    pub fn apply(&self, batch: Vec<Event>) -> Applied {
        let mut index = self.0.lock();
        let mut synced = false;
        for event in batch {
            match event {
                Event::Apply(object) => index.apply(*object),
                Event::Delete(reference) => index.delete(&reference),
                Event::Synced => synced = true,
            }
        }
        index.synced |= synced;
        index.publish();
        Applied { synced, problems: std::mem::take(&mut index.problems) }
    }

    /// Number of AuthorizationPolicies that grant nothing.
    pub fn ineffective_policies(&self) -> usize {
        self.0.lock().ineffective.values().map(BTreeMap::len).sum()
    }

    /// Number of different answers about endpoints that clients have subscribed to.
    #[cfg(test)]
    fn endpoints_subscriptions(&self) -> usize {
        self.0.lock().endpoints.len()
    }

    /// Settings of the mesh, which never change.
    pub fn cluster(&self) -> Arc<Cluster> {
        self.0.lock().cluster.clone()
    }

    /// The Service with this name, if there is one.
    pub fn service(&self, key: &Key) -> Option<Arc<ServiceRecord>> {
        self.0.lock().store.service(key)
    }

    /// The Service that owns a cluster address.
    ///
    /// # Errors
    /// When there are several.
    pub fn service_by_ip(&self, ip: IpAddr) -> Result<Option<Arc<ServiceRecord>>, AmbiguousAddress> {
        self.0.lock().store.service_by_ip(ip)
    }

    /// The address of a Service's endpoint with this hostname.
    pub fn pod_of_service(&self, service: &Key, hostname: &str) -> Option<IpAddr> {
        self.0.lock().store.pod_of_service(service, hostname)
    }

    /// The endpoints of a Service's port. The subscription survives deletion and re-creation of the Service. It ends, and
    /// the client is to ask again, when the Service's endpoints begin or cease to depend on the client's node, and when
    /// the client's node was not known and may be now.
    pub fn watch_endpoints(&self, service: &Key, query: EndpointsQuery) -> watch::Receiver<Arc<Endpoints>> {
        let mut index = self.0.lock();
        let Index { endpoints, store, cluster, .. } = &mut *index;
        let key = EndpointsKey::new(store, service, query);
        endpoints.subscribe(service, key, |key| Arc::new(endpoints::compute(store, cluster, service, key)))
    }

    /// The profile of a Service's port.
    pub fn watch_service_profile(&self, service: &Key, key: ProfileKey) -> watch::Receiver<Arc<ServiceProfile>> {
        let mut index = self.0.lock();
        let Index { service_profiles, store, cluster, .. } = &mut *index;
        service_profiles.subscribe(service, key, |key| Arc::new(profile::service(store, cluster, service, key)))
    }

    /// The profile of an address that belongs to no Service. The snapshot is `None` while nothing is known:
    /// clients keep what they have.
    ///
    /// # Errors
    /// When several pods or ExternalWorkloads have the address.
    pub fn watch_endpoint_profile(
        &self,
        addr: SocketAddr,
    ) -> Result<watch::Receiver<Option<Arc<EndpointProfile>>>, AmbiguousAddress> {
        let mut index = self.0.lock();
        if index.store.pod_by_addr(addr)?.is_none() {
            index.store.workload_by_addr(addr)?;
        }
        let Index { endpoint_profiles, store, cluster, .. } = &mut *index;
        let ip = addr.ip();
        Ok(endpoint_profiles.subscribe(&ip, addr.port(), |port| {
            profile::endpoint(store, cluster, SocketAddr::new(ip, *port)).map(Arc::new)
        }))
    }

    /// The policy of a pod's port. `None` if the pod does not exist; the snapshot becomes `None` when the pod
    /// is deleted.
    pub fn watch_inbound(&self, pod: &Key, port: u16) -> Option<watch::Receiver<Option<Arc<InboundServer>>>> {
        let mut index = self.0.lock();
        let Index { inbound, store, cluster, .. } = &mut *index;
        inbound.subscribe_known(pod, port, |port| inbound::compute(store, cluster, pod, *port))
    }

    /// The policy of an ExternalWorkload's port. `None` if the workload does not exist; the snapshot becomes
    /// `None` when it is deleted.
    pub fn watch_inbound_external(
        &self,
        workload: &Key,
        port: u16,
    ) -> Option<watch::Receiver<Option<Arc<InboundServer>>>> {
        let mut index = self.0.lock();
        let Index { inbound_external, store, cluster, .. } = &mut *index;
        inbound_external
            .subscribe_known(workload, port, |port| inbound::compute_external(store, cluster, workload, *port))
    }

    /// The policy towards an address. `None` if the address is unknown; the snapshot becomes `None` when that
    /// is so.
    pub fn watch_outbound(&self, addr: SocketAddr) -> Option<watch::Receiver<Option<Arc<OutboundPolicy>>>> {
        let mut index = self.0.lock();
        let Index { outbound, store, cluster, .. } = &mut *index;
        let ip = addr.ip();
        outbound.subscribe_known(&ip, addr.port(), |port| {
            outbound::compute_by_addr(store, cluster, SocketAddr::new(ip, *port)).map(Arc::new)
        })
    }

    /// The policy towards a Service by its name, which need not exist yet.
    pub fn watch_outbound_name(&self, service: &Key, port: u16) -> watch::Receiver<Option<Arc<OutboundPolicy>>> {
        let mut index = self.0.lock();
        let Index { outbound_names, store, cluster, .. } = &mut *index;
        outbound_names
            .subscribe(service, port, |port| Some(Arc::new(outbound::compute_by_name(store, cluster, service, *port))))
    }
}

impl Index {
    /// Recomputes the snapshots that changes since the last call affect, and no others.
    fn publish(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        if self.synced {
            dirty.policies.iter().for_each(|namespace| self.report_ineffective(namespace));
        } else {
            self.dirty.policies = std::mem::take(&mut dirty.policies);
        }
        let (store, cluster) = (&self.store, &*self.cluster);
        let endpoints = |service: &Key, key: &EndpointsKey| Arc::new(endpoints::compute(store, cluster, service, key));
        if dirty.new_nodes {
            self.endpoints.end(|key| key.client.awaits_node());
        }
        for service in &dirty.moved {
            let local = store.service(service).is_some_and(|service| service.local);
            self.endpoints.end_in(service, |key| !key.client.suits(local));
        }
        for service in &dirty.endpoints {
            self.endpoints.update(service, endpoints);
        }
        for service in &dirty.profiles {
            self.service_profiles
                .update(service, |service, key| Arc::new(profile::service(store, cluster, service, key)));
        }
        for service in &dirty.outbound_names {
            self.outbound_names.update(service, |service, port| {
                Some(Arc::new(outbound::compute_by_name(store, cluster, service, *port)))
            });
        }
        for ip in &dirty.endpoint_profiles {
            self.endpoint_profiles
                .update(ip, |ip, port| profile::endpoint(store, cluster, SocketAddr::new(*ip, *port)).map(Arc::new));
        }
        for ip in &dirty.outbound {
            self.outbound.update(ip, |ip, port| {
                outbound::compute_by_addr(store, cluster, SocketAddr::new(*ip, *port)).map(Arc::new)
            });
        }
        for pod in &dirty.pods {
            self.inbound.update(pod, |pod, port| inbound::compute(store, cluster, pod, *port));
        }
        for workload in &dirty.workloads {
            self.inbound_external
                .update(workload, |workload, port| inbound::compute_external(store, cluster, workload, *port));
        }
    }
}

impl Dirty {
    fn service(&mut self, service: &ServiceRecord) {
        for services in [&mut self.endpoints, &mut self.profiles, &mut self.outbound_names] {
            services.insert(service.key.clone());
        }
        self.outbound.extend(&service.cluster_ips);
    }

    /// Marks a Service of which a slice changed: another node may have its first endpoint.
    fn slice(&mut self, store: &Store, service: &Key) {
        self.endpoints.insert(service.clone());
        if store.services.get(service).is_some_and(|service| service.local) {
            self.moved.insert(service.clone());
        }
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
