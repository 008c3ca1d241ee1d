//! Statuses: what the status of an object should say, from the store alone, and where the object says something else.
//!
//! ```text
//! change --mark--> Dirty::statuses --derive--> wanted --is not what the object says--> PendingStatuses --> writer
//! ```
//!
//! Policies do not wait for statuses: both are derived from [`acceptance`]. Types, reasons and messages are Linkerd's
//! (`linkerd2:policy-controller/k8s/status/src/index.rs`); as there, what other controllers said stays, and no
//! generation is named.

mod condition;
mod pending;
mod wanted;

use std::collections::HashSet;

use weft_k8s_api::{
    manifest::{Kind, Object, ObjectRef},
    policy::route::ParentKind,
};

use super::{
    Index, acceptance,
    records::{Key, RouteId, RouteRecord, ServiceRecord, Status},
    store::ParentId,
};

pub use pending::PendingStatuses;

impl Index {
    /// Takes in what an object's status says now.
    pub(super) fn set_status(&mut self, object: &Object) {
        let reference = object.reference();
        let status = Status::of(object);
        if self.store.statuses.get(&reference) != status.as_ref() {
            match status {
                Some(status) => self.store.statuses.insert(reference.clone(), status),
                None => self.store.statuses.remove(&reference),
            };
            self.dirty.statuses.insert(reference);
        }
    }

    /// Forgets the status of an object that was deleted.
    pub(super) fn forget_status(&mut self, reference: &ObjectRef) {
        if self.store.statuses.remove(reference).is_some() {
            self.dirty.statuses.insert(reference.clone());
        }
    }

    /// Marks the statuses that a route's change affects: its own, and those of the other routes of its parents if it
    /// may take precedence over them now or no longer.
    pub(super) fn route_status_changed(
        &mut self,
        id: &RouteId,
        old: Option<&RouteRecord>,
        new: Option<&RouteRecord>,
        parents: &HashSet<ParentId>,
    ) {
        self.dirty.statuses.insert(id.reference());
        let claims = |route: Option<&RouteRecord>| route.map(|route| (route.readable, route.parents.clone()));
        if claims(old) != claims(new) {
            parents.iter().for_each(|parent| self.children_changed(parent));
        }
    }

    /// Marks the statuses that a Service's change affects.
    pub(super) fn service_status_changed(
        &mut self,
        key: &Key,
        old: Option<&ServiceRecord>,
        new: Option<&ServiceRecord>,
    ) {
        let headless = |service: Option<&ServiceRecord>| service.map(|service| service.cluster_ips.is_empty());
        if headless(old) != headless(new) {
            self.children_changed(&ParentId::new(ParentKind::Service, key.clone()));
            self.backend_status_changed(key);
        }
    }

    /// Marks the statuses of the routes that send traffic to a Service.
    pub(super) fn backend_status_changed(&mut self, service: &Key) {
        self.dirty.statuses.extend(self.store.routes_of_backend.iter(service).map(RouteId::reference));
    }

    /// Marks the statuses that depend on whether a Server exists.
    pub(super) fn server_status_changed(&mut self, key: &Key) {
        self.children_changed(&ParentId::new(ParentKind::Server, key.clone()));
        self.rate_limit_statuses_changed(key);
    }

    /// Marks the statuses of the rate limits that name a Server.
    pub(super) fn rate_limit_statuses_changed(&mut self, server: &Key) {
        let Some(policies) = self.store.policies(&server.namespace) else { return };
        let limits = policies.rate_limits_of_server.iter(&server.name);
        let reference = |name: &String| reference(Kind::HttpLocalRateLimitPolicy, &server.namespace, name);
        self.dirty.statuses.extend(limits.map(reference));
    }

    /// Marks the statuses that an EgressNetwork's change affects.
    pub(super) fn egress_network_status_changed(&mut self, key: &Key) {
        self.dirty.statuses.insert(reference(Kind::EgressNetwork, &key.namespace, &key.name));
        self.children_changed(&ParentId::new(ParentKind::EgressNetwork, key.clone()));
        self.dirty.statuses.extend(self.store.routes_to_egress_network.iter(key).map(RouteId::reference));
    }

    /// Marks the statuses of the routes that name a parent.
    fn children_changed(&mut self, parent: &ParentId) {
        self.dirty.statuses.extend(self.store.routes_of_parent.iter(parent).map(RouteId::reference));
    }
}

impl RouteId {
    /// Kind, namespace and name.
    pub(super) fn reference(&self) -> ObjectRef {
        reference(self.kind.kind(), &self.key.namespace, &self.key.name)
    }
}

/// A reference to a namespaced object.
pub(super) fn reference(kind: Kind, namespace: &str, name: &str) -> ObjectRef {
    ObjectRef { kind, namespace: Some(namespace.to_owned()), name: name.to_owned() }
}
