//! The write side: how a change of an object changes the tables, and which subscriptions it affects.

use std::{collections::HashSet, sync::Arc};

use weft_k8s_api::{
    labels,
    manifest::{Kind, Object, ObjectRef},
    policy::AuthorizationPolicySpec,
};

use super::{
    Index, Problem, inbound,
    records::{
        self, ExternalWorkloadRecord, Key, MeshTlsRecord, Owner, PodRecord, ProfileRecord, ServerRecord, ServiceRecord,
        SliceRecord,
    },
    store::{Authz, Owned},
};

impl Index {
    /// Applies a new or changed object.
    pub(super) fn set(&mut self, object: Object) {
        let key = Key::of(object.metadata());
        match object {
            Object::Service(service) => self.set_service(&key, Some(ServiceRecord::new(&service))),
            Object::EndpointSlice(slice) => self.set_slice(&key, SliceRecord::new(&slice)),
            Object::Pod(pod) => self.set_pod(&key, Some(PodRecord::new(&pod))),
            Object::Node(node) => {
                let zone = node.metadata.labels.as_ref().and_then(|labels| labels.get(labels::ZONE)).cloned();
                self.set_node(&key.name, Some(zone));
            }
            Object::ReplicaSet(set) => self.set_owner(Kind::ReplicaSet, key, records::single_owner(&set.metadata)),
            Object::Job(job) => self.set_owner(Kind::Job, key, records::single_owner(&job.metadata)),
            Object::ExternalWorkload(external) => self.set_workload(&key, Some(ExternalWorkloadRecord::new(&external))),
            Object::ServiceProfile(profile) => match ProfileRecord::new(profile) {
                Ok(record) => self.set_profile(key, Some(record)),
                // As in Linkerd, the last state stays in force.
                Err(problem) => {
                    let problem = format!("{problem}; its last state stays in force");
                    self.problems.push(Problem { object: format!("ServiceProfile {key}"), problem });
                }
            },
            Object::Server(server) => {
                let record = Arc::new(ServerRecord::new(&server));
                let old = self.store.policies_mut(&key.namespace).servers.insert(record.clone());
                if old.as_ref() != Some(&record) {
                    self.server_changed([old, Some(record)].into_iter().flatten());
                }
            }
            Object::ServerAuthorization(authorization) => {
                let new = authorization.spec;
                let policies = self.store.policies_mut(&key.namespace);
                let old = policies.server_authorizations.insert(key.name.clone(), new.clone());
                if old.as_ref() != Some(&new) {
                    self.policies_changed(&key.namespace);
                }
            }
            Object::AuthorizationPolicy(policy) => {
                let new = Authz { created: records::created(&policy.metadata), spec: policy.spec };
                let known = self.store.policies(&key.namespace).and_then(|all| all.authorizations.get(&key.name));
                if known == Some(&new) {
                    return;
                }
                self.forget_authorization(&key);
                for reference in authentications(&key.namespace, &new.spec) {
                    self.store.policies_by_authentication.insert(reference, key.namespace.clone());
                }
                self.store.policies_mut(&key.namespace).authorizations.insert(key.name, new);
                self.policies_changed(&key.namespace);
            }
            Object::MeshTLSAuthentication(authentication) => {
                let new = MeshTlsRecord {
                    identities: authentication.spec.identities.unwrap_or_default(),
                    references: authentication.spec.identity_refs.unwrap_or_default(),
                };
                self.store.policies_mut(&key.namespace).mesh_tls.insert(key.name.clone(), new);
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
            // Admitted, but not enforced yet (`support::FIELDS`).
            Object::HttpLocalRateLimitPolicy(_)
            | Object::EgressNetwork(_)
            | Object::HttpRoute(_)
            | Object::GatewayHttpRoute(_)
            | Object::GrpcRoute(_)
            | Object::TlsRoute(_)
            | Object::TcpRoute(_) => {}
        }
    }

    /// Removes an object.
    pub(super) fn remove(&mut self, reference: &ObjectRef) {
        let key = Key::new(reference.namespace.clone().unwrap_or_default(), reference.name.clone());
        match reference.kind {
            Kind::Service => self.set_service(&key, None),
            Kind::EndpointSlice => self.set_slice(&key, None),
            Kind::Pod => self.set_pod(&key, None),
            Kind::Node => self.set_node(&key.name, None),
            Kind::ReplicaSet | Kind::Job => self.set_owner(reference.kind, key, None),
            Kind::ExternalWorkload => self.set_workload(&key, None),
            Kind::ServiceProfile => self.set_profile(key, None),
            Kind::Server => {
                let old = self.store.policies_mut(&key.namespace).servers.remove(&key.name);
                self.server_changed(old.into_iter());
            }
            Kind::ServerAuthorization => {
                self.store.policies_mut(&key.namespace).server_authorizations.remove(&key.name);
                self.policies_changed(&key.namespace);
            }
            Kind::AuthorizationPolicy => {
                self.forget_authorization(&key);
                self.policies_changed(&key.namespace);
            }
            Kind::MeshTLSAuthentication => {
                self.store.policies_mut(&key.namespace).mesh_tls.remove(&key.name);
                self.authentication_changed(&key);
            }
            Kind::NetworkAuthentication => {
                self.store.policies_mut(&key.namespace).networks.remove(&key.name);
                self.authentication_changed(&key);
            }
            Kind::Namespace | Kind::ServiceAccount | Kind::ConfigMap | Kind::Secret | Kind::Deployment => {}
            Kind::HttpLocalRateLimitPolicy
            | Kind::EgressNetwork
            | Kind::HttpRoute
            | Kind::GatewayHttpRoute
            | Kind::GrpcRoute
            | Kind::TlsRoute
            | Kind::TcpRoute => {}
        }
    }

    /// Reports problems that an object did not have before.
    fn report(&mut self, kind: Kind, key: &Key, before: Option<&[String]>, now: Option<&[String]>) {
        let before = before.unwrap_or_default();
        for problem in now.unwrap_or_default().iter().filter(|problem| !before.contains(problem)) {
            self.problems.push(Problem { object: format!("{kind} {key}"), problem: problem.clone() });
        }
    }

    fn set_service(&mut self, key: &Key, new: Option<ServiceRecord>) {
        let old = self.store.services.get(key).cloned();
        if old.as_deref() == new.as_ref() {
            return;
        }
        let (before, now) = (old.as_ref().map(|old| &*old.problems), new.as_ref().map(|new| &*new.problems));
        self.report(Kind::Service, key, before, now);
        if new.as_ref().is_some_and(|new| new.local != old.as_ref().is_some_and(|old| old.local)) {
            self.dirty.moved.insert(key.clone());
        }
        let ports = |record: &ServiceRecord| record.ports.iter().map(|port| port.port).collect::<HashSet<_>>();
        if old.as_deref().map(ports) != new.as_ref().map(ports) {
            self.dirty.profiled.insert(key.clone());
        }
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
            let claimed = new.cluster_ips.clone();
            store.services.insert(key.clone(), Arc::new(new));
            for error in claimed.into_iter().filter_map(|ip| store.service_by_ip(ip).err()) {
                let object = format!("Service {key}");
                self.problems
                    .push(Problem { object, problem: format!("{error}; clients of that address get no policy") });
            }
        }
    }

    fn set_slice(&mut self, key: &Key, new: Option<SliceRecord>) {
        let old = self.store.slices.get(key).cloned();
        if old.as_deref() == new.as_ref() {
            return;
        }
        let (before, now) = (old.as_ref().map(|old| &*old.problems), new.as_ref().map(|new| &*new.problems));
        self.report(Kind::EndpointSlice, key, before, now);
        let store = &mut self.store;
        if let Some(old) = store.slices.remove(key) {
            store.slices_of_service.remove(&old.service, key);
            self.dirty.slice(store, &old.service);
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
            self.dirty.slice(store, &new.service);
            store.slices.insert(key.clone(), Arc::new(new));
        }
    }

    fn set_pod(&mut self, key: &Key, new: Option<PodRecord>) {
        let old = self.store.pods.get(key).cloned();
        // Most updates of a pod are of its status and change nothing here.
        if old.as_deref() == new.as_ref() {
            return;
        }
        let (before, now) = (old.as_ref().map(|old| &*old.problems), new.as_ref().map(|new| &*new.problems));
        self.report(Kind::Pod, key, before, now);
        let store = &mut self.store;
        self.dirty.endpoints.extend(store.services_of_pod.iter(key).cloned());
        if let Some(old) = store.pods.remove(key) {
            for ip in &old.ips {
                store.pod_ips.remove(ip, key);
            }
            for host in &old.host_ports {
                store.pod_host_ports.remove(&host.addr, key);
            }
            if let Some(owned) = owned_by(&old) {
                store.pods_of_owner.remove(&owned, key);
            }
            store.pods_in_namespace.remove(key, &old.labels);
            self.dirty.pod(&old);
        }
        if let Some(new) = new {
            for ip in &new.ips {
                store.pod_ips.insert(*ip, key.clone());
            }
            for host in &new.host_ports {
                store.pod_host_ports.insert(host.addr, key.clone());
            }
            if let Some(owned) = owned_by(&new) {
                store.pods_of_owner.insert(owned, key.clone());
            }
            store.pods_in_namespace.insert(key, &new.labels);
            self.dirty.pod(&new);
            store.pods.insert(key.clone(), Arc::new(new));
        }
    }

    /// A client's place is looked up once, as in Linkerd. Only those whose node was not known ask again when one becomes
    /// known.
    fn set_node(&mut self, name: &str, zone: Option<Option<String>>) {
        let known = match zone {
            Some(zone) => self.store.zones.insert(name.to_owned(), zone).is_none(),
            None => {
                self.store.zones.remove(name);
                false
            }
        };
        self.dirty.new_nodes |= known;
    }

    fn set_workload(&mut self, key: &Key, new: Option<ExternalWorkloadRecord>) {
        let old = self.store.workloads.get(key).cloned();
        if old.as_deref() == new.as_ref() {
            return;
        }
        let (before, now) = (old.as_ref().map(|old| &*old.problems), new.as_ref().map(|new| &*new.problems));
        self.report(Kind::ExternalWorkload, key, before, now);
        let store = &mut self.store;
        self.dirty.endpoints.extend(store.services_of_workload.iter(key).cloned());
        if let Some(old) = store.workloads.remove(key) {
            for ip in &old.ips {
                store.workload_ips.remove(ip, key);
            }
            store.workloads_in_namespace.remove(key, &old.labels);
            self.dirty.workload(&old);
        }
        if let Some(new) = new {
            for ip in &new.ips {
                store.workload_ips.insert(*ip, key.clone());
            }
            store.workloads_in_namespace.insert(key, &new.labels);
            self.dirty.workload(&new);
            store.workloads.insert(key.clone(), Arc::new(new));
        }
    }

    fn set_profile(&mut self, key: Key, new: Option<ProfileRecord>) {
        let Some(service) = self.cluster.service_of_profile(&key.name) else { return };
        let exists = new.is_some();
        let old = match new {
            Some(new) => self.store.profiles.insert(key, Arc::new(new)),
            None => self.store.profiles.remove(&key),
        };
        if old.is_some() == exists {
            self.dirty.profiles.insert(service);
        } else {
            self.dirty.profiled.insert(service);
        }
    }

    /// The labels of endpoints contain the owner's owner, which may become known after the pods.
    fn set_owner(&mut self, kind: Kind, key: Key, owner: Option<Owner>) {
        let owned = Owned { kind: kind.to_string(), key };
        let store = &mut self.store;
        let old = match owner.clone() {
            Some(owner) => store.owners.insert(owned.clone(), owner),
            None => store.owners.remove(&owned),
        };
        if old == owner {
            return;
        }
        for key in store.pods_of_owner.iter(&owned) {
            self.dirty.endpoints.extend(store.services_of_pod.iter(key).cloned());
            if let Some(pod) = store.pods.get(key) {
                self.dirty.addresses(pod);
            }
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

    /// A change of a Server affects the workloads that it selects or selected: their policies, and their
    /// endpoints if it makes a port opaque.
    fn server_changed(&mut self, servers: impl Iterator<Item = Arc<ServerRecord>>) {
        for server in servers {
            for pod in self.store.pods_of(&server) {
                self.dirty.pod(pod);
                self.dirty.endpoints.extend(self.store.services_of_pod.iter(&pod.key).cloned());
            }
            for workload in self.store.workloads_of(&server) {
                self.dirty.workload(workload);
                self.dirty.endpoints.extend(self.store.services_of_workload.iter(&workload.key).cloned());
            }
        }
    }

    fn authentication_changed(&mut self, key: &Key) {
        let namespaces: Vec<_> = self.store.policies_by_authentication.iter(key).cloned().collect();
        for namespace in namespaces {
            self.policies_changed(&namespace);
        }
    }

    fn policies_changed(&mut self, namespace: &str) {
        self.dirty.policies.insert(namespace.to_owned());
        self.dirty.pods.extend(self.store.pods_in(namespace).map(|pod| pod.key.clone()));
        self.dirty.workloads.extend(self.store.workloads_in(namespace).map(|workload| workload.key.clone()));
    }

    /// Reports AuthorizationPolicies of a namespace that have become ineffective, with the reason. Only after
    /// the start: a policy may arrive before the objects that it refers to.
    pub(super) fn report_ineffective(&mut self, namespace: &str) {
        let now = inbound::ineffective(&self.store, &self.cluster, namespace);
        let before = self.ineffective.remove(namespace).unwrap_or_default();
        for (name, problem) in now.iter().filter(|(name, problem)| before.get(*name) != Some(problem)) {
            let (object, problem) = (format!("AuthorizationPolicy {namespace}/{name}"), problem.clone());
            self.problems.push(Problem { object, problem: format!("{problem}; the policy grants nothing") });
        }
        if !now.is_empty() {
            self.ineffective.insert(namespace.to_owned(), now);
        }
    }
}

/// The intermediate owner (ReplicaSet or Job) of a pod.
fn owned_by(pod: &PodRecord) -> Option<Owned> {
    let Owner { kind, name } = pod.owner.clone()?;
    Some(Owned { kind, key: Key::new(pod.key.namespace.clone(), name) })
}

/// Authentications that a policy refers to, by namespace and name; the kind is checked when the policy is
/// computed.
fn authentications<'a>(namespace: &'a str, spec: &'a AuthorizationPolicySpec) -> impl Iterator<Item = Key> + 'a {
    let refs = spec.required_authentication_refs.iter();
    refs.map(|reference| Key::new(reference.namespace.as_deref().unwrap_or(namespace), &reference.name))
}
