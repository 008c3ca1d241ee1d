//! How much the index holds, how many streams follow it, and how many updates were published, for metrics.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
};

use weft_k8s_api::policy::route::ParentKind;

use super::{
    Index, Key,
    endpoints::{Endpoints, EndpointsKey},
    profile::ProfileKey,
    records::RouteKind,
    watches::Watches,
};

/// Numbers of objects, views and subscribers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Objects by kind, in lower case.
    pub objects: BTreeMap<&'static str, usize>,
    /// Views by what they are of.
    pub views: BTreeMap<&'static str, Views>,
    /// What clients follow of Services.
    pub endpoints: BTreeMap<EndpointsLabels, EndpointsCount>,
    /// Clients of Services' profiles, by namespace and name of the ServiceProfile, whether or not it exists.
    pub profiles: BTreeMap<Key, Followed>,
    /// Clients of each Service's profile, whatever the port.
    pub services: BTreeMap<Key, usize>,
    /// Clients of profiles of single addresses.
    pub workloads: Followed,
    /// Objects that decide about inbound connections, by namespace.
    pub inbound: BTreeMap<String, InboundSizes>,
    /// Sizes of the tables that decide about outbound connections.
    pub outbound: OutboundSizes,
}

/// Views of one sort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Views {
    /// Their number; some may have lost their last client.
    pub views: usize,
    /// Number of clients.
    pub subscribers: usize,
}

/// What tells the clients of a Service's endpoints apart, as far as Linkerd's metrics do. Clients choose none of it
/// freely: a hostname counts only if there is an endpoint with it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointsLabels {
    /// The Service.
    pub service: Key,
    /// The port that the clients ask for, not that of the endpoints.
    pub port: u16,
    /// The hostname of the one endpoint that is asked for.
    pub hostname: Option<String>,
    /// The clients' node, where only endpoints on the same one count.
    pub node: Option<String>,
}

/// Clients of answers that may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// Number of clients.
    pub subscribers: usize,
    /// Number of answers that were published after the first one, while there were clients.
    pub updates: u64,
}

/// A Service's endpoints and their clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointsCount {
    /// Clients of all views that have these labels.
    pub followed: Followed,
    /// Number of endpoints; of several views, the most.
    pub endpoints: usize,
    /// Whether the Service has an object that lists endpoints.
    pub exists: bool,
}

/// Numbers of objects of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InboundSizes {
    /// MeshTLSAuthentications.
    pub mesh_tls_authentications: usize,
    /// NetworkAuthentications.
    pub network_authentications: usize,
    /// Pods.
    pub pods: usize,
    /// ExternalWorkloads.
    pub external_workloads: usize,
    /// Servers.
    pub servers: usize,
    /// ServerAuthorizations.
    pub server_authorizations: usize,
    /// AuthorizationPolicies.
    pub authorization_policies: usize,
    /// HTTPRoutes of Servers.
    pub http_routes: usize,
}

/// Sizes of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboundSizes {
    /// Addresses of Services.
    pub service_ips: usize,
    /// Services and EgressNetworks.
    pub parents: usize,
    /// Services with routes, by namespace.
    pub routed_services: BTreeMap<String, usize>,
    /// Policies of Services' ports that clients follow, by namespace of the Service.
    pub ports: BTreeMap<String, usize>,
}

/// Number of answers that were published after the first one.
#[derive(Default)]
pub(super) struct Published {
    endpoints: HashMap<EndpointsLabels, u64>,
    profiles: HashMap<Key, u64>,
    workloads: u64,
}

impl Published {
    /// Counts a new state of a Service's endpoints.
    pub(super) fn endpoints(&mut self, service: &Key, key: &EndpointsKey, endpoints: &Endpoints) {
        *self.endpoints.entry(EndpointsLabels::new(service, key, endpoints)).or_default() += 1;
    }

    /// Counts a new profile of a Service.
    pub(super) fn profile(&mut self, profile: Option<Key>) {
        if let Some(profile) = profile {
            *self.profiles.entry(profile).or_default() += 1;
        }
    }

    /// Counts a new profile of an address.
    pub(super) fn workload(&mut self) {
        self.workloads += 1;
    }
}

impl EndpointsLabels {
    fn new(service: &Key, key: &EndpointsKey, endpoints: &Endpoints) -> Self {
        let hostname = key.hostname().filter(|_| !endpoints.by_addr.is_empty());
        Self {
            service: service.clone(),
            port: key.port,
            hostname: hostname.map(str::to_owned),
            node: key.node().map(str::to_owned),
        }
    }
}

impl Index {
    /// Counts. Looks at every view, and forgets what was published to those that have no client any more.
    pub fn statistics(&mut self) -> Statistics {
        let workloads = views(&self.endpoint_profiles);
        let views = BTreeMap::from([
            ("endpoints", views(&self.endpoints)),
            ("service_profiles", views(&self.service_profiles)),
            ("endpoint_profiles", workloads),
            ("hostnames", views(&self.hostnames)),
            ("inbound_policies", views(&self.inbound)),
            ("inbound_policies_of_external_workloads", views(&self.inbound_external)),
            ("outbound_policies", views(&self.outbound)),
            ("outbound_policies_by_name", views(&self.outbound_names)),
        ]);
        let (profiles, services) = self.profiles_followed();
        Statistics {
            objects: self.objects(),
            views,
            endpoints: self.endpoints_followed(),
            profiles,
            services,
            workloads: Followed { subscribers: workloads.subscribers, updates: self.published.workloads },
            inbound: self.inbound_sizes(),
            outbound: self.outbound_sizes(),
        }
    }

    fn objects(&self) -> BTreeMap<&'static str, usize> {
        let store = &self.store;
        let policies = || store.namespaces.values();
        let owners = |kind: &str| store.owners.keys().filter(|owner| owner.kind == kind).count();
        BTreeMap::from([
            ("service", store.services.len()),
            ("endpoints", store.subsets.len()),
            ("endpointslice", store.slices.len()),
            ("pod", store.pods.len()),
            ("node", store.zones.len()),
            ("replicaset", owners("ReplicaSet")),
            ("job", owners("Job")),
            ("externalworkload", store.workloads.len()),
            ("serviceprofile", store.profiles.len()),
            ("server", policies().map(|policies| policies.servers.iter().count()).sum()),
            ("authorizationpolicy", policies().map(|policies| policies.authorizations.len()).sum()),
            ("serverauthorization", policies().map(|policies| policies.server_authorizations.len()).sum()),
            ("meshtlsauthentication", policies().map(|policies| policies.mesh_tls.len()).sum()),
            ("networkauthentication", policies().map(|policies| policies.networks.len()).sum()),
            ("httplocalratelimitpolicy", policies().map(|policies| policies.rate_limits.len()).sum()),
            ("egressnetwork", store.egress_networks.len()),
            ("route", store.routes.len()),
        ])
    }

    fn endpoints_followed(&mut self) -> BTreeMap<EndpointsLabels, EndpointsCount> {
        let mut counts: BTreeMap<EndpointsLabels, EndpointsCount> = BTreeMap::new();
        for (service, key, view) in self.endpoints.followed() {
            let endpoints = view.borrow();
            let count = counts.entry(EndpointsLabels::new(service, key, &endpoints)).or_default();
            count.followed.subscribers += view.receiver_count();
            count.endpoints = count.endpoints.max(endpoints.by_addr.len());
            count.exists = self.store.slices(service).next().is_some();
        }
        self.published.endpoints.retain(|labels, _| counts.contains_key(labels));
        for (labels, updates) in &self.published.endpoints {
            if let Some(count) = counts.get_mut(labels) {
                count.followed.updates = *updates;
            }
        }
        counts
    }

    fn profiles_followed(&mut self) -> (BTreeMap<Key, Followed>, BTreeMap<Key, usize>) {
        let (mut profiles, mut services) = (BTreeMap::<_, Followed>::new(), BTreeMap::new());
        for (service, key, view) in self.service_profiles.followed() {
            *services.entry(service.clone()).or_default() += view.receiver_count();
            if let Some(profile) = key.profile(&self.cluster, service) {
                profiles.entry(profile).or_default().subscribers += view.receiver_count();
            }
        }
        self.published.profiles.retain(|profile, _| profiles.contains_key(profile));
        for (profile, updates) in &self.published.profiles {
            if let Some(followed) = profiles.get_mut(profile) {
                followed.updates = *updates;
            }
        }
        (profiles, services)
    }

    fn inbound_sizes(&self) -> BTreeMap<String, InboundSizes> {
        let store = &self.store;
        let mut sizes: BTreeMap<String, InboundSizes> = BTreeMap::new();
        for (namespace, policies) in &store.namespaces {
            let of_namespace = sizes.entry(namespace.clone()).or_default();
            of_namespace.mesh_tls_authentications = policies.mesh_tls.len();
            of_namespace.network_authentications = policies.networks.len();
            of_namespace.servers = policies.servers.iter().count();
            of_namespace.server_authorizations = policies.server_authorizations.len();
            of_namespace.authorization_policies = policies.authorizations.len();
        }
        let mut of = |key: &Key, add: fn(&mut InboundSizes)| match sizes.get_mut(&key.namespace) {
            Some(of_namespace) => add(of_namespace),
            None => add(sizes.entry(key.namespace.clone()).or_default()),
        };
        store.pods.keys().for_each(|pod| of(pod, |sizes| sizes.pods += 1));
        store.workloads.keys().for_each(|workload| of(workload, |sizes| sizes.external_workloads += 1));
        for (id, route) in &store.routes {
            let of_server = route.parents.iter().any(|parent| parent.kind == ParentKind::Server);
            if of_server && matches!(id.kind, RouteKind::Http | RouteKind::GatewayHttp) {
                of(&id.key, |sizes| sizes.http_routes += 1);
            }
        }
        sizes
    }

    fn outbound_sizes(&self) -> OutboundSizes {
        let store = &self.store;
        let mut routed_services = BTreeMap::new();
        for parent in store.routes_of_parent.keys().filter(|parent| parent.kind == ParentKind::Service) {
            *routed_services.entry(parent.key.namespace.clone()).or_default() += 1;
        }
        let mut ports = BTreeMap::new();
        let by_name = self.outbound_names.followed().map(|(service, ..)| service.namespace.clone());
        let by_addr =
            self.outbound.followed().filter_map(|(ip, ..)| Some(store.service_by_ip(*ip).ok()??.key.namespace.clone()));
        for namespace in by_name.chain(by_addr) {
            *ports.entry(namespace).or_default() += 1;
        }
        OutboundSizes {
            service_ips: store.service_ips.keys().count(),
            parents: store.services.len() + store.egress_networks.len(),
            routed_services,
            ports,
        }
    }
}

impl ProfileKey {
    /// The ServiceProfile that clients with this key follow, whether or not it exists; `None` for an undeclared port.
    pub(super) fn profile(&self, cluster: &super::Cluster, service: &Key) -> Option<Key> {
        let namespace = self.namespace().unwrap_or(&service.namespace);
        self.is_declared().then(|| Key::new(namespace, cluster.service_name(&service.name, &service.namespace)))
    }
}

fn views<G: Clone + Eq + Hash, K: Eq + Hash, T>(watches: &Watches<G, K, T>) -> Views {
    watches.subscribers().fold(Views::default(), |sum, (_, _, subscribers)| Views {
        views: sum.views + 1,
        subscribers: sum.subscribers + subscribers,
    })
}
