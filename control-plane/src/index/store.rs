//! Records by key, and the tables that find them by what a question names.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    hash::Hash,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use weft_k8s_api::{
    labels,
    manifest::{Object, ObjectRef},
    policy::{AuthorizationPolicySpec, IdentityMatch, NamespacedTargetRef, Network, ServerAuthorizationSpec},
};

use super::{
    AddressError, Index, Key,
    profile::{ProfileRecord, service_of_profile},
    records::{self, PodRecord, ServerRecord, ServiceRecord, SliceRecord},
    subject::{Subject, WorkloadRecord},
};

/// Everything known.
#[derive(Default)]
pub(super) struct Store {
    services: HashMap<Key, Arc<ServiceRecord>>,
    service_ips: Table<IpAddr, Key>,
    slices: HashMap<Key, Arc<SliceRecord>>,
    slices_of_service: Table<Key, Key>,
    services_of_pod: Table<Key, Key>,
    pods: HashMap<Key, Arc<PodRecord>>,
    pods_in_namespace: Table<String, Key>,
    pod_ips: Table<IpAddr, Key>,
    pod_host_ports: Table<SocketAddr, Key>,
    pods_of_owner: Table<Owned, Key>,
    workloads: HashMap<Key, Arc<WorkloadRecord>>,
    workloads_in_namespace: Table<String, Key>,
    workload_ips: Table<IpAddr, Key>,
    services_of_workload: Table<Key, Key>,
    profiles: HashMap<Key, Arc<ProfileRecord>>,
    zones: HashMap<String, String>,
    /// Owners of ReplicaSets and Jobs.
    owners: HashMap<Owned, (String, String)>,
    namespaces: HashMap<String, NamespacePolicies>,
    policies_by_authentication: Table<Key, String>,
}

/// Kind and key of an object that stands between pods and what people deploy.
type Owned = (String, Key);

/// Policy objects of one namespace.
#[derive(Default)]
pub(super) struct NamespacePolicies {
    pub(super) servers: BTreeMap<String, Arc<ServerRecord>>,
    pub(super) authorizations: BTreeMap<String, Authz>,
    pub(super) server_authorizations: BTreeMap<String, ServerAuthorizationSpec>,
    pub(super) mesh_tls: HashMap<String, (Vec<IdentityMatch>, Vec<NamespacedTargetRef>)>,
    pub(super) networks: HashMap<String, Vec<Network>>,
}

/// An AuthorizationPolicy.
pub(super) struct Authz {
    pub(super) created: Option<Timestamp>,
    pub(super) spec: AuthorizationPolicySpec,
}

/// Several values per key, in order.
struct Table<K, V>(HashMap<K, BTreeSet<V>>);

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash, V: Ord> Table<K, V> {
    fn insert(&mut self, key: K, value: V) {
        self.0.entry(key).or_default().insert(value);
    }

    fn remove(&mut self, key: &K, value: &V) {
        if let Some(values) = self.0.get_mut(key) {
            values.remove(value);
            if values.is_empty() {
                self.0.remove(key);
            }
        }
    }

    fn iter<'a>(&'a self, key: &K) -> impl Iterator<Item = &'a V> + use<'a, K, V> {
        self.0.get(key).into_iter().flatten()
    }
}

impl Store {
    pub(super) fn service(&self, key: &Key) -> Option<Arc<ServiceRecord>> {
        self.services.get(key).cloned()
    }

    pub(super) fn service_by_ip(&self, ip: IpAddr) -> Result<Option<Arc<ServiceRecord>>, AddressError> {
        let mut owners = self.service_ips.iter(&ip);
        let first = owners.next();
        match owners.next() {
            Some(_) => Err(AddressError::AmbiguousService(names(self.service_ips.iter(&ip)), ip)),
            None => Ok(first.and_then(|key| self.service(key))),
        }
    }

    pub(super) fn slices(&self, service: &Key) -> impl Iterator<Item = &Arc<SliceRecord>> {
        self.slices_of_service.iter(service).filter_map(|key| self.slices.get(key))
    }

    pub(super) fn pod(&self, key: &Key) -> Option<&Arc<PodRecord>> {
        self.pods.get(key)
    }

    /// The running pod at an address, and the port in it: by the pod's own address, else by its node's.
    pub(super) fn pod_by_addr(&self, addr: SocketAddr) -> Result<Option<(&Arc<PodRecord>, u16)>, AddressError> {
        let running = |key: &&Key| self.pods.get(key).is_some_and(|pod| !pod.host_network && !pod.terminated);
        let found: Vec<_> = self.pod_ips.iter(&addr.ip()).filter(running).collect();
        if found.len() > 1 {
            return Err(AddressError::AmbiguousPod(names(found.into_iter()), addr.ip()));
        }
        if let Some(pod) = found.first().and_then(|key| self.pods.get(key)) {
            return Ok(Some((pod, addr.port())));
        }
        let on_node = self.pod_host_ports.iter(&addr).filter_map(|key| self.pods.get(key)).find(|pod| !pod.terminated);
        let port = |pod: &PodRecord| pod.host_ports.iter().find(|(host, _)| *host == addr).map(|(_, port)| *port);
        Ok(on_node.and_then(|pod| Some((pod, port(pod)?))))
    }

    /// The address of a Service's endpoint with this hostname.
    pub(super) fn pod_of_service(&self, service: &Key, hostname: &str) -> Option<IpAddr> {
        let mut endpoints = self.slices(service).flat_map(|slice| &slice.endpoints);
        endpoints.find(|endpoint| endpoint.hostname.as_deref() == Some(hostname))?.addresses.first().copied()
    }

    pub(super) fn zone(&self, node: &str) -> Option<&str> {
        self.zones.get(node).map(String::as_str)
    }

    /// Kind and name of what owns a ReplicaSet or a Job.
    pub(super) fn owner_of(&self, kind: &str, key: &Key) -> Option<&(String, String)> {
        self.owners.get(&(kind.to_owned(), key.clone()))
    }

    /// The ServiceProfile of this namespace and name.
    pub(super) fn profile(&self, key: &Key) -> Option<&Arc<ProfileRecord>> {
        self.profiles.get(key)
    }

    pub(super) fn workload(&self, key: &Key) -> Option<&Arc<WorkloadRecord>> {
        self.workloads.get(key)
    }

    /// The ExternalWorkload at an address, the first by name.
    pub(super) fn workload_by_ip(&self, ip: IpAddr) -> Option<&Arc<WorkloadRecord>> {
        self.workload_ips.iter(&ip).find_map(|key| self.workloads.get(key))
    }

    pub(super) fn workloads_in(&self, namespace: &str) -> impl Iterator<Item = &Arc<WorkloadRecord>> {
        self.workloads_in_namespace.iter(&namespace.to_owned()).filter_map(|key| self.workloads.get(key))
    }

    pub(super) fn policies(&self, namespace: &str) -> Option<&NamespacePolicies> {
        self.namespaces.get(namespace)
    }

    pub(super) fn pods_in(&self, namespace: &str) -> impl Iterator<Item = &Arc<PodRecord>> {
        self.pods_in_namespace.iter(&namespace.to_owned()).filter_map(|key| self.pods.get(key))
    }

    fn policies_mut(&mut self, namespace: &str) -> &mut NamespacePolicies {
        self.namespaces.entry(namespace.to_owned()).or_default()
    }
}

fn names<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    keys.map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

impl Index {
    /// Takes in an object that is new or changed.
    pub(super) fn apply(&mut self, object: Object) {
        let key = Key::of(object.metadata());
        match object {
            Object::Service(service) => self.set_service(&key, Some(ServiceRecord::new(&service))),
            Object::EndpointSlice(slice) => self.set_slice(&key, SliceRecord::new(&slice)),
            Object::Pod(pod) => self.set_pod(&key, Some(PodRecord::new(&pod))),
            Object::Node(node) => {
                let zone = node.metadata.labels.as_ref().and_then(|labels| labels.get(labels::ZONE)).cloned();
                self.set_zone(&key.name, zone);
            }
            Object::ReplicaSet(set) => self.set_owner("ReplicaSet", key, records::single_owner(&set.metadata)),
            Object::Job(job) => self.set_owner("Job", key, records::single_owner(&job.metadata)),
            Object::ExternalWorkload(external) => self.set_workload(&key, Some(WorkloadRecord::new(&external))),
            Object::ServiceProfile(profile) => match ProfileRecord::new(profile) {
                Ok(record) => self.set_profile(key, Some(record)),
                // Linkerd, too, goes on with what it had.
                Err(error) => {
                    tracing::error!(profile = %key, error, "unreadable profile, its last state stays in force")
                }
            },
            Object::Server(server) => {
                let record = Arc::new(ServerRecord::new(&server));
                let old = self.store.policies_mut(&key.namespace).servers.insert(key.name, record.clone());
                self.server_changed(&key.namespace, [old, Some(record)].into_iter().flatten());
            }
            Object::ServerAuthorization(authorization) => {
                let policies = self.store.policies_mut(&key.namespace);
                policies.server_authorizations.insert(key.name, authorization.spec);
                self.policies_changed(&key.namespace);
            }
            Object::AuthorizationPolicy(policy) => {
                self.forget_authorization(&key);
                for reference in authentications(&key.namespace, &policy.spec) {
                    self.store.policies_by_authentication.insert(reference, key.namespace.clone());
                }
                let authz = Authz { created: records::created(&policy.metadata), spec: policy.spec };
                self.store.policies_mut(&key.namespace).authorizations.insert(key.name, authz);
                self.policies_changed(&key.namespace);
            }
            Object::MeshTLSAuthentication(authentication) => {
                let identities = authentication.spec.identities.unwrap_or_default();
                let references = authentication.spec.identity_refs.unwrap_or_default();
                self.store.policies_mut(&key.namespace).mesh_tls.insert(key.name.clone(), (identities, references));
                self.authentication_changed(&key);
            }
            Object::NetworkAuthentication(authentication) => {
                let networks = authentication.spec.networks;
                self.store.policies_mut(&key.namespace).networks.insert(key.name.clone(), networks);
                self.authentication_changed(&key);
            }
            Object::Namespace(_)
            | Object::ServiceAccount(_)
            | Object::ConfigMap(_)
            | Object::Secret(_)
            | Object::Deployment(_) => {}
        }
    }

    /// Forgets an object.
    pub(super) fn delete(&mut self, reference: &ObjectRef) {
        let key = Key::new(reference.namespace.clone().unwrap_or_default(), reference.name.clone());
        match reference.kind.as_str() {
            "Service" => self.set_service(&key, None),
            "EndpointSlice" => self.set_slice(&key, None),
            "Pod" => self.set_pod(&key, None),
            "Node" => self.set_zone(&key.name, None),
            kind @ ("ReplicaSet" | "Job") => self.set_owner(kind, key, None),
            "ExternalWorkload" => self.set_workload(&key, None),
            "ServiceProfile" => self.set_profile(key, None),
            "Server" => {
                let old = self.store.policies_mut(&key.namespace).servers.remove(&key.name);
                self.server_changed(&key.namespace, old.into_iter());
            }
            "ServerAuthorization" => {
                self.store.policies_mut(&key.namespace).server_authorizations.remove(&key.name);
                self.policies_changed(&key.namespace);
            }
            "AuthorizationPolicy" => {
                self.forget_authorization(&key);
                self.policies_changed(&key.namespace);
            }
            "MeshTLSAuthentication" => {
                self.store.policies_mut(&key.namespace).mesh_tls.remove(&key.name);
                self.authentication_changed(&key);
            }
            "NetworkAuthentication" => {
                self.store.policies_mut(&key.namespace).networks.remove(&key.name);
                self.authentication_changed(&key);
            }
            _ => {}
        }
    }

    fn set_service(&mut self, key: &Key, new: Option<ServiceRecord>) {
        let store = &mut self.store;
        if let Some(old) = store.services.remove(key) {
            for ip in &old.cluster_ips {
                store.service_ips.remove(ip, key);
            }
            self.dirty.service(&old);
        }
        if let Some(new) = new {
            for ip in &new.cluster_ips {
                store.service_ips.insert(*ip, key.clone());
            }
            self.dirty.service(&new);
            store.services.insert(key.clone(), Arc::new(new));
        }
    }

    fn set_slice(&mut self, key: &Key, new: Option<SliceRecord>) {
        let store = &mut self.store;
        if let Some(old) = store.slices.remove(key) {
            store.slices_of_service.remove(&old.service, key);
            self.dirty.services.insert(old.service.clone());
            let others: Vec<_> =
                store.slices_of_service.iter(&old.service).filter_map(|key| store.slices.get(key)).collect();
            let pods: HashSet<&Key> = others.iter().flat_map(|slice| slice.pods()).collect();
            let workloads: HashSet<&Key> = others.iter().flat_map(|slice| slice.workloads()).collect();
            for pod in old.pods().filter(|pod| !pods.contains(pod)) {
                store.services_of_pod.remove(pod, &old.service);
            }
            for workload in old.workloads().filter(|workload| !workloads.contains(workload)) {
                store.services_of_workload.remove(workload, &old.service);
            }
        }
        if let Some(new) = new {
            for pod in new.pods() {
                store.services_of_pod.insert(pod.clone(), new.service.clone());
            }
            for workload in new.workloads() {
                store.services_of_workload.insert(workload.clone(), new.service.clone());
            }
            store.slices_of_service.insert(new.service.clone(), key.clone());
            self.dirty.services.insert(new.service.clone());
            store.slices.insert(key.clone(), Arc::new(new));
        }
    }

    fn set_pod(&mut self, key: &Key, new: Option<PodRecord>) {
        let store = &mut self.store;
        self.dirty.services.extend(store.services_of_pod.iter(key).cloned());
        if let Some(old) = store.pods.remove(key) {
            for ip in &old.ips {
                store.pod_ips.remove(ip, key);
            }
            for (addr, _) in &old.host_ports {
                store.pod_host_ports.remove(addr, key);
            }
            if let Some(owned) = owned_by(&old) {
                store.pods_of_owner.remove(&owned, key);
            }
            store.pods_in_namespace.remove(&key.namespace, key);
            self.dirty.pod(&old);
        }
        if let Some(new) = new {
            for ip in &new.ips {
                store.pod_ips.insert(*ip, key.clone());
            }
            for (addr, _) in &new.host_ports {
                store.pod_host_ports.insert(*addr, key.clone());
            }
            if let Some(owned) = owned_by(&new) {
                store.pods_of_owner.insert(owned, key.clone());
            }
            store.pods_in_namespace.insert(key.namespace.clone(), key.clone());
            self.dirty.pod(&new);
            store.pods.insert(key.clone(), Arc::new(new));
        }
    }

    /// Zones are in every endpoint's labels, and nodes change them rarely: everything is recomputed.
    fn set_zone(&mut self, node: &str, zone: Option<String>) {
        let old = match zone.clone() {
            Some(zone) => self.store.zones.insert(node.to_owned(), zone),
            None => self.store.zones.remove(node),
        };
        self.dirty.all_endpoints |= old != zone;
    }

    fn set_workload(&mut self, key: &Key, new: Option<WorkloadRecord>) {
        let store = &mut self.store;
        self.dirty.services.extend(store.services_of_workload.iter(key).cloned());
        if let Some(old) = store.workloads.remove(key) {
            for ip in &old.ips {
                store.workload_ips.remove(ip, key);
            }
            store.workloads_in_namespace.remove(&key.namespace, key);
            self.dirty.workload(&old);
        }
        if let Some(new) = new {
            for ip in &new.ips {
                store.workload_ips.insert(*ip, key.clone());
            }
            store.workloads_in_namespace.insert(key.namespace.clone(), key.clone());
            self.dirty.workload(&new);
            store.workloads.insert(key.clone(), Arc::new(new));
        }
    }

    fn set_profile(&mut self, key: Key, new: Option<ProfileRecord>) {
        self.dirty.services.extend(service_of_profile(&self.cluster, &key.name));
        match new {
            Some(new) => self.store.profiles.insert(key, Arc::new(new)),
            None => self.store.profiles.remove(&key),
        };
    }

    /// The owner's owner is in the labels of endpoints; it may become known after the pods.
    fn set_owner(&mut self, kind: &str, key: Key, owner: Option<(String, String)>) {
        let owned = (kind.to_owned(), key);
        let store = &mut self.store;
        let old = match owner.clone() {
            Some(owner) => store.owners.insert(owned.clone(), owner),
            None => store.owners.remove(&owned),
        };
        if old == owner {
            return;
        }
        for key in store.pods_of_owner.iter(&owned) {
            self.dirty.services.extend(store.services_of_pod.iter(key).cloned());
            self.dirty.addresses.extend(store.pods.get(key).into_iter().flat_map(|pod| &pod.ips));
        }
    }

    fn forget_authorization(&mut self, key: &Key) {
        let policies = self.store.policies_mut(&key.namespace);
        let Some(old) = policies.authorizations.remove(&key.name) else { return };
        let others: HashSet<Key> =
            policies.authorizations.values().flat_map(|authz| authentications(&key.namespace, &authz.spec)).collect();
        for reference in authentications(&key.namespace, &old.spec).filter(|reference| !others.contains(reference)) {
            self.store.policies_by_authentication.remove(&reference, &key.namespace);
        }
    }

    /// A Server concerns the workloads that it selects or selected: their policies, and (by being opaque) their endpoints.
    fn server_changed(&mut self, namespace: &str, servers: impl Iterator<Item = Arc<ServerRecord>>) {
        let servers: Vec<_> = servers.collect();
        let selected = |subject: Subject<'_>| servers.iter().any(|server| server.selects(subject));
        for pod in self.store.pods_in(namespace).filter(|pod| selected(Subject::Pod(pod))) {
            self.dirty.pod(pod);
            self.dirty.services.extend(self.store.services_of_pod.iter(&pod.key).cloned());
        }
        for workload in self.store.workloads_in(namespace).filter(|workload| selected(Subject::External(workload))) {
            self.dirty.workload(workload);
            self.dirty.services.extend(self.store.services_of_workload.iter(&workload.key).cloned());
        }
    }

    fn authentication_changed(&mut self, key: &Key) {
        let namespaces: Vec<_> = self.store.policies_by_authentication.iter(key).cloned().collect();
        for namespace in namespaces {
            self.policies_changed(&namespace);
        }
    }

    fn policies_changed(&mut self, namespace: &str) {
        self.dirty.pods.extend(self.store.pods_in(namespace).map(|pod| pod.key.clone()));
        self.dirty.workloads.extend(self.store.workloads_in(namespace).map(|workload| workload.key.clone()));
    }
}

/// What a pod is owned by.
fn owned_by(pod: &PodRecord) -> Option<Owned> {
    let (kind, name) = pod.owner.clone()?;
    Some((kind, Key::new(pod.key.namespace.clone(), name)))
}

/// Authentications that a policy refers to, by namespace and name; kinds are told apart when the policy is read.
fn authentications<'a>(namespace: &'a str, spec: &'a AuthorizationPolicySpec) -> impl Iterator<Item = Key> + 'a {
    let refs = spec.required_authentication_refs.iter();
    refs.map(|reference| Key::new(reference.namespace.as_deref().unwrap_or(namespace), &reference.name))
}
