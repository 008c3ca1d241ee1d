//! The write side: how a change of an object changes the tables, and which subscriptions it affects.

mod policy;

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
    sync::Arc,
};

use weft_k8s_api::{
    labels,
    manifest::{Kind, Object, ObjectRef},
    policy::route::{ParentKind, ReferenceGrantSpec},
};

use super::{
    EndpointsFrom, Index, Problem,
    records::{
        self, EgressNetworkRecord, ExternalWorkloadRecord, Key, MeshTlsRecord, Owner, PodRecord, ProfileRecord,
        RateLimitRecord, RouteId, RouteKind, RouteRecord, ServerRecord, ServiceRecord, SliceRecord,
    },
    store::{Authz, Owned, ParentId, Store},
};

impl Index {
    /// Applies a new or changed object.
    pub(super) fn set(&mut self, object: Object) {
        let key = Key::of(object.metadata());
        self.set_status(&object);
        match object {
            Object::Service(service) => self.set_service(&key, Some(ServiceRecord::new(&service))),
            Object::EndpointSlice(_) if !self.reads(EndpointsFrom::Slices) => self.not_read(Kind::EndpointSlice, &key),
            Object::EndpointSlice(slice) => self.set_slice(Kind::EndpointSlice, &key, SliceRecord::new(&slice)),
            Object::Endpoints(_) if !self.reads(EndpointsFrom::Endpoints) => self.not_read(Kind::Endpoints, &key),
            Object::Endpoints(endpoints) => self.set_endpoints(&key, records::subsets(&endpoints)),
            Object::Pod(pod) => {
                let record = PodRecord::new(&pod, self.cluster.allowed_skips.as_ref());
                self.set_pod(&key, Some(record));
            }
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
            Object::Server(server) => self.set_server(&key, Some(ServerRecord::new(&server))),
            Object::ServerAuthorization(authorization) => {
                self.set_server_authorization(&key, Some(authorization.spec));
            }
            Object::AuthorizationPolicy(policy) => {
                let new = Authz { created: records::created(&policy.metadata), spec: policy.spec };
                self.set_authorization(&key, Some(new));
            }
            Object::MeshTLSAuthentication(authentication) => {
                let new = MeshTlsRecord {
                    identities: authentication.spec.identities.unwrap_or_default(),
                    references: authentication.spec.identity_refs.unwrap_or_default(),
                };
                self.set_mesh_tls(&key, Some(new));
            }
            Object::NetworkAuthentication(authentication) => {
                self.set_networks(&key, Some(authentication.spec.networks));
            }
            Object::Namespace(_)
            | Object::ServiceAccount(_)
            | Object::ConfigMap(_)
            | Object::Secret(_)
            | Object::Deployment(_) => {}
            Object::HttpLocalRateLimitPolicy(policy) => {
                self.set_rate_limit(&key, Some(RateLimitRecord::new(policy)));
            }
            Object::EgressNetwork(network) => {
                self.set_egress_network(&key, Some(EgressNetworkRecord::new(network)));
            }
            Object::HttpRoute(route) => self.set_route(RouteKind::Http, key, RouteRecord::http(&route)),
            Object::GatewayHttpRoute(route) => {
                self.set_route(RouteKind::GatewayHttp, key, RouteRecord::gateway_http(&route));
            }
            Object::GrpcRoute(route) => self.set_route(RouteKind::Grpc, key, RouteRecord::grpc(&route)),
            Object::TlsRoute(route) => self.set_route(RouteKind::Tls, key, RouteRecord::tls(&route)),
            Object::TcpRoute(route) => self.set_route(RouteKind::Tcp, key, RouteRecord::tcp(&route)),
            Object::ReferenceGrant(grant) => self.set_reference_grant(key, Some(grant.spec)),
        }
    }

    /// Removes an object.
    pub(super) fn remove(&mut self, reference: &ObjectRef) {
        let key = Key::new(reference.namespace.clone().unwrap_or_default(), reference.name.clone());
        self.forget_status(reference);
        match reference.kind {
            Kind::Service => self.set_service(&key, None),
            Kind::EndpointSlice => self.set_slice(Kind::EndpointSlice, &key, None),
            Kind::Endpoints => self.set_endpoints(&key, Vec::new()),
            Kind::Pod => self.set_pod(&key, None),
            Kind::Node => self.set_node(&key.name, None),
            Kind::ReplicaSet | Kind::Job => self.set_owner(reference.kind, key, None),
            Kind::ExternalWorkload => self.set_workload(&key, None),
            Kind::ServiceProfile => self.set_profile(key, None),
            Kind::Server => self.set_server(&key, None),
            Kind::ServerAuthorization => self.set_server_authorization(&key, None),
            Kind::AuthorizationPolicy => self.set_authorization(&key, None),
            Kind::MeshTLSAuthentication => self.set_mesh_tls(&key, None),
            Kind::NetworkAuthentication => self.set_networks(&key, None),
            Kind::Namespace | Kind::ServiceAccount | Kind::ConfigMap | Kind::Secret | Kind::Deployment => {}
            Kind::HttpLocalRateLimitPolicy => self.set_rate_limit(&key, None),
            Kind::EgressNetwork => self.set_egress_network(&key, None),
            Kind::HttpRoute => self.set_route(RouteKind::Http, key, None),
            Kind::GatewayHttpRoute => self.set_route(RouteKind::GatewayHttp, key, None),
            Kind::GrpcRoute => self.set_route(RouteKind::Grpc, key, None),
            Kind::TlsRoute => self.set_route(RouteKind::Tls, key, None),
            Kind::TcpRoute => self.set_route(RouteKind::Tcp, key, None),
            Kind::ReferenceGrant => self.set_reference_grant(key, None),
        }
        if let Some(namespace) = &reference.namespace {
            self.store.forget_policies(namespace);
        }
    }

    /// A route changes the policy of its parents: those that it has and those that it had.
    fn set_route(&mut self, kind: RouteKind, key: Key, new: Option<RouteRecord>) {
        let id = RouteId { kind, key };
        let old = self.store.routes.get(&id).cloned();
        if old.as_deref() == new.as_ref() {
            return;
        }
        let (before, now) = (old.as_ref().map(|old| &*old.problems), new.as_ref().map(|new| &*new.problems));
        self.report(kind.name(), &id.key, before, now);
        let parents = [old.as_deref(), new.as_ref()].into_iter().flatten().flat_map(|route| &route.parents);
        let parents: HashSet<_> = parents.map(ParentId::of).collect();
        let namespace = id.key.namespace.clone();
        let consumed = |store: &Store| -> Vec<bool> {
            parents.iter().map(|parent| store.has_consumer_routes(parent, &namespace)).collect()
        };
        let store = &mut self.store;
        let (consumed_before, chose_before) = (consumed(store), store.chooses_egress(&self.cluster, &namespace));
        if let Some(old) = &old {
            store.routes.remove(&id);
            for parent in old.parents.iter().map(ParentId::of) {
                store.routes_of_parent.remove(&parent, &id);
            }
            store.egress_consumers.remove(&namespace, &id);
            old.services().iter().for_each(|service| store.routes_of_backend.remove(service, &id));
            old.egress_networks().iter().for_each(|network| store.routes_to_egress_network.remove(network, &id));
        }
        let new = new.map(Arc::new);
        if let Some(new) = &new {
            for parent in new.parents.iter().map(ParentId::of) {
                if parent.kind == ParentKind::EgressNetwork && parent.key.namespace != namespace {
                    store.egress_consumers.insert(namespace.clone(), id.clone());
                }
                store.routes_of_parent.insert(parent, id.clone());
            }
            new.services().into_iter().for_each(|service| store.routes_of_backend.insert(service, id.clone()));
            let networks = new.egress_networks().into_iter();
            networks.for_each(|network| store.routes_to_egress_network.insert(network, id.clone()));
            store.routes.insert(id.clone(), new.clone());
        }
        if store.chooses_egress(&self.cluster, &namespace) != chose_before {
            self.dirty.egress_consumers.insert(namespace.clone());
        }
        for ((parent, before), now) in parents.iter().zip(consumed_before).zip(consumed(store)) {
            if parent.kind == ParentKind::Service && before != now {
                self.dirty.consumers.insert((parent.clone(), namespace.clone()));
            }
        }
        self.route_status_changed(&id, old.as_deref(), new.as_deref(), &parents);
        parents.iter().for_each(|parent| self.parent_changed(parent));
        self.route_changed(&id);
    }

    /// A grant changes the routes of other namespaces that send traffic to its namespace. Grants are few and change
    /// rarely, so that all backends may be looked at.
    fn set_reference_grant(&mut self, key: Key, new: Option<ReferenceGrantSpec>) {
        let namespace = key.namespace.clone();
        let old = match new.clone() {
            Some(new) => self.store.reference_grants.insert(key, new),
            None => self.store.reference_grants.remove(&key),
        };
        if old == new || !self.cluster.require_reference_grants {
            return;
        }
        let backends = self.store.routes_of_backend.keys().filter(|service| service.namespace == namespace);
        let backends: Vec<Key> = backends.cloned().collect();
        for service in &backends {
            self.backend_changed(service);
            self.backend_status_changed(service);
        }
    }

    /// Marks the policies of the parents whose routes send traffic to a Service that appeared or went, or that they may
    /// or may not refer to any more.
    fn backend_changed(&mut self, service: &Key) {
        let routes = self.store.routes_of_backend.iter(service).filter_map(|id| self.store.routes.get(id));
        let parents: HashSet<_> = routes.flat_map(|route| &route.parents).map(ParentId::of).collect();
        // Inbound, a route's backends mean nothing.
        parents
            .iter()
            .filter(|parent| parent.kind != ParentKind::Server)
            .for_each(|parent| self.parent_changed(parent));
    }

    /// Marks the policies that a parent's routes are part of.
    fn parent_changed(&mut self, parent: &ParentId) {
        match parent.kind {
            ParentKind::Server => {
                self.dirty.servers.insert(parent.key.clone());
            }
            ParentKind::Service => {
                self.dirty.outbound_names.insert(parent.key.clone());
                if let Some(service) = self.store.services.get(&parent.key) {
                    self.dirty.outbound.extend(&service.cluster_ips);
                }
            }
            ParentKind::EgressNetwork => self.dirty.egress = true,
        }
    }

    fn set_egress_network(&mut self, key: &Key, new: Option<EgressNetworkRecord>) {
        let old = self.store.egress_networks.get(key).cloned();
        if old.as_deref() == new.as_ref() {
            return;
        }
        let (before, now) = (old.as_ref().map(|old| &*old.problems), new.as_ref().map(|new| &*new.problems));
        self.report("EgressNetwork", key, before, now);
        let chose_before = self.store.chooses_egress(&self.cluster, &key.namespace);
        match new {
            Some(new) => self.store.egress_networks.insert(key.clone(), Arc::new(new)),
            None => self.store.egress_networks.remove(key),
        };
        if self.store.chooses_egress(&self.cluster, &key.namespace) != chose_before {
            self.dirty.egress_consumers.insert(key.namespace.clone());
        }
        self.dirty.egress = true;
        self.egress_network_status_changed(key);
    }

    /// Reports problems that an object did not have before.
    fn report(&mut self, kind: &str, key: &Key, before: Option<&[String]>, now: Option<&[String]>) {
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
        self.report("Service", key, before, now);
        self.service_status_changed(key, old.as_deref(), new.as_ref());
        if new.as_ref().is_some_and(|new| new.local != old.as_ref().is_some_and(|old| old.local)) {
            self.dirty.moved.insert(key.clone());
        }
        self.service_addresses_changed(key, old.as_deref(), new.as_ref());
        let requires_mtls = |service: Option<&ServiceRecord>| service.is_some_and(|service| service.require_mtls);
        if requires_mtls(old.as_deref()) != requires_mtls(new.as_ref()) {
            for slice in self.store.slices(key) {
                self.dirty.addresses_of_slice(&self.store, slice);
            }
        }
        let appears_or_goes = old.is_some() != new.is_some();
        let elsewhere = |old: &Arc<ServiceRecord>, new: &ServiceRecord| old.discovery != new.discovery;
        if old.as_ref().zip(new.as_ref()).is_some_and(|(old, new)| elsewhere(old, new)) {
            self.dirty.redirected.insert(key.clone());
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
        if appears_or_goes {
            self.backend_changed(key);
        }
    }

    /// Marks addresses that a Service gets or loses; also its profiles and addresses if it declares other ports than
    /// before.
    fn service_addresses_changed(&mut self, key: &Key, old: Option<&ServiceRecord>, new: Option<&ServiceRecord>) {
        let addresses = |service: Option<&ServiceRecord>| -> HashSet<IpAddr> {
            service.into_iter().flat_map(|service| &service.cluster_ips).copied().collect()
        };
        let ports = |service: Option<&ServiceRecord>| -> BTreeSet<u16> {
            service.into_iter().flat_map(|service| &service.ports).map(|port| port.port).collect()
        };
        let (before, now) = (addresses(old), addresses(new));
        self.dirty.reassigned.extend(before.symmetric_difference(&now));
        if ports(old) != ports(new) {
            self.dirty.profiled.insert(key.clone());
            self.dirty.ports.extend(now);
        }
    }

    fn reads(&self, from: EndpointsFrom) -> bool {
        self.cluster.endpoints_from == from
    }

    /// Reports an object of a kind that the settings exclude; manifests may contain some.
    fn not_read(&mut self, kind: Kind, key: &Key) {
        let problem = "not read, because another kind lists the endpoints (--enable-endpoint-slices)".to_owned();
        self.problems.push(Problem { object: format!("{kind} {key}"), problem });
    }

    /// Each subset is like a slice, since it has ports of its own.
    fn set_endpoints(&mut self, key: &Key, subsets: Vec<SliceRecord>) {
        let before = self.store.subsets.remove(key).unwrap_or_default();
        let now = subsets.len();
        // No object has such a name.
        let subset_key = |number: usize| Key::new(&key.namespace, format!("{}/{number}", key.name));
        for (number, subset) in subsets.into_iter().enumerate() {
            self.set_slice(Kind::Endpoints, &subset_key(number), Some(subset));
        }
        for number in now..before {
            self.set_slice(Kind::Endpoints, &subset_key(number), None);
        }
        if now > 0 {
            self.store.subsets.insert(key.clone(), now);
        }
    }

    fn set_slice(&mut self, kind: Kind, key: &Key, new: Option<SliceRecord>) {
        let old = self.store.slices.get(key).cloned();
        if old.as_deref() == new.as_ref() {
            return;
        }
        let (before, now) = (old.as_ref().map(|old| &*old.problems), new.as_ref().map(|new| &*new.problems));
        self.report(kind.name(), key, before, now);
        let store = &mut self.store;
        if let Some(old) = store.slices.remove(key) {
            store.slices_of_service.remove(&old.service, key);
            self.dirty.slice(store, &old);
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
            self.dirty.slice(store, &new);
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
        self.report("Pod", key, before, now);
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

    /// A client's place is looked up once, as in Linkerd. Only those whose node was not known ask again when one
    /// becomes known.
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
        self.report("ExternalWorkload", key, before, now);
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
}

/// The intermediate owner (ReplicaSet or Job) of a pod.
fn owned_by(pod: &PodRecord) -> Option<Owned> {
    let Owner { kind, name } = pod.owner.clone()?;
    Some(Owned { kind, key: Key::new(pod.key.namespace.clone(), name) })
}
