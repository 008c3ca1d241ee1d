//! Changes of inbound policy: which Servers they concern. A Server's policy is then derived anew, and its pods get
//! another answer only if it differs.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use weft_k8s_api::{
    manifest::Kind,
    policy::{AuthorizationPolicySpec, Network, ServerAuthorizationSpec, route::ParentKind},
};

use crate::{
    Index, Problem, inbound,
    records::{Key, MeshTlsRecord, RateLimitRecord, RouteId, ServerRecord},
    status,
    store::{Authz, Protected},
};

impl Index {
    pub(super) fn set_server(&mut self, key: &Key, new: Option<ServerRecord>) {
        let servers = &mut self.store.policies_mut(&key.namespace).servers;
        let old = servers.get(&key.name).cloned();
        if old.as_deref() == new.as_ref() {
            return;
        }
        let new = new.map(Arc::new);
        match &new {
            Some(new) => servers.insert(new.clone()),
            None => servers.remove(&key.name),
        };
        let accepts_routes = |server: &Option<Arc<ServerRecord>>| server.as_ref().is_some_and(|it| !it.is_unreadable);
        if old.is_some() != new.is_some() || accepts_routes(&old) != accepts_routes(&new) {
            self.server_status_changed(key);
        }
        self.dirty.servers.insert(key.clone());
        self.server_changed([old, new].into_iter().flatten());
    }

    pub(super) fn set_server_authorization(&mut self, key: &Key, new: Option<ServerAuthorizationSpec>) {
        let policies = self.store.policies_mut(&key.namespace);
        if policies.server_authorizations.get(&key.name) == new.as_ref() {
            return;
        }
        let old = match new.clone() {
            Some(new) => policies.server_authorizations.insert(key.name.clone(), new),
            None => policies.server_authorizations.remove(&key.name),
        };
        for spec in [old, new].into_iter().flatten() {
            let selected = policies.servers.iter().filter(|server| inbound::selects(&spec.server, server));
            self.dirty.servers.extend(selected.map(|server| server.key.clone()));
        }
    }

    pub(super) fn set_authorization(&mut self, key: &Key, new: Option<Authz>) {
        let policies = self.store.policies_mut(&key.namespace);
        if policies.authorizations.get(&key.name) == new.as_ref() {
            return;
        }
        let mut protected = Vec::new();
        if let Some(old) = policies.authorizations.remove(&key.name) {
            if let Some(target) = Protected::of(&old.spec.target_ref, &key.namespace) {
                policies.authorizations_of.remove(&target, &key.name);
                protected.push(target);
            }
            for reference in authentications(&key.namespace, &old.spec) {
                self.store.policies_by_authentication.remove(&reference, key);
            }
        }
        if let Some(new) = new {
            for reference in authentications(&key.namespace, &new.spec) {
                self.store.policies_by_authentication.insert(reference, key.clone());
            }
            let policies = self.store.policies_mut(&key.namespace);
            if let Some(target) = Protected::of(&new.spec.target_ref, &key.namespace) {
                policies.authorizations_of.insert(target.clone(), key.name.clone());
                protected.push(target);
            }
            policies.authorizations.insert(key.name.clone(), new);
        }
        self.dirty.policies.insert(key.namespace.clone());
        protected.iter().for_each(|protected| self.protected_changed(&key.namespace, protected));
    }

    pub(super) fn set_mesh_tls(&mut self, key: &Key, new: Option<MeshTlsRecord>) {
        if replace(&mut self.store.policies_mut(&key.namespace).mesh_tls, &key.name, new) {
            self.authentication_changed(key);
        }
    }

    pub(super) fn set_networks(&mut self, key: &Key, new: Option<Vec<Network>>) {
        if replace(&mut self.store.policies_mut(&key.namespace).networks, &key.name, new) {
            self.authentication_changed(key);
        }
    }

    pub(super) fn set_rate_limit(&mut self, key: &Key, new: Option<RateLimitRecord>) {
        let policies = self.store.policies_mut(&key.namespace);
        if policies.rate_limits.get(&key.name) == new.as_ref() {
            return;
        }
        let mut servers = HashSet::new();
        if let Some(server) = policies.rate_limits.remove(&key.name).as_ref().and_then(RateLimitRecord::server) {
            policies.rate_limits_of_server.remove(&server.to_owned(), &key.name);
            servers.insert(server.to_owned());
        }
        if let Some(new) = new {
            if let Some(server) = new.server() {
                policies.rate_limits_of_server.insert(server.to_owned(), key.name.clone());
                servers.insert(server.to_owned());
            }
            policies.rate_limits.insert(key.name.clone(), new);
        }
        self.dirty.statuses.insert(status::reference(Kind::HttpLocalRateLimitPolicy, &key.namespace, &key.name));
        for server in servers {
            let server = Key::new(&key.namespace, server);
            self.rate_limit_statuses_changed(&server);
            self.dirty.servers.insert(server);
        }
    }

    /// A route may be the target of policies, which then begin or cease to grant something.
    pub(super) fn route_changed(&mut self, id: &RouteId) {
        let protected = Protected::Route(id.kind, id.key.name.clone());
        let policies = self.store.policies(&id.key.namespace);
        if policies.is_some_and(|policies| policies.authorizations_of.iter(&protected).next().is_some()) {
            self.dirty.policies.insert(id.key.namespace.clone());
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

    /// The policies that refer to an authentication change, whatever namespaces they are in.
    fn authentication_changed(&mut self, key: &Key) {
        let referring: Vec<_> = self.store.policies_by_authentication.iter(key).cloned().collect();
        for policy in referring {
            let known = self.store.policies(&policy.namespace).and_then(|all| all.authorizations.get(&policy.name));
            let protected = known.and_then(|authz| Protected::of(&authz.spec.target_ref, &policy.namespace));
            if let Some(protected) = protected {
                self.protected_changed(&policy.namespace, &protected);
            }
            self.dirty.policies.insert(policy.namespace);
        }
    }

    /// Marks the Servers that a policy is about.
    fn protected_changed(&mut self, namespace: &str, protected: &Protected) {
        match protected {
            Protected::Namespace => {
                let servers = self.store.policies(namespace).into_iter().flat_map(|policies| policies.servers.iter());
                self.dirty.servers.extend(servers.map(|server| server.key.clone()));
            }
            Protected::Server(name) => {
                self.dirty.servers.insert(Key::new(namespace, name));
            }
            Protected::Route(kind, name) => {
                let id = RouteId { kind: *kind, key: Key::new(namespace, name) };
                let parents = self.store.routes.get(&id).into_iter().flat_map(|route| &route.parents);
                let servers = parents.filter(|parent| parent.kind == ParentKind::Server);
                self.dirty.servers.extend(servers.map(|parent| Key::new(&parent.namespace, &parent.name)));
            }
        }
    }

    /// Derives the policies of Servers that may have changed, and marks the workloads of those that did.
    pub(crate) fn derive_servers(&mut self) {
        for key in std::mem::take(&mut self.dirty.servers) {
            self.dirty.unused.insert(key.clone());
            if !self.server_policies.derive(&self.store, &self.cluster, &key) {
                continue;
            }
            let policies = self.store.policies(&key.namespace);
            let Some(server) = policies.and_then(|policies| policies.servers.get(&key.name)) else { continue };
            self.dirty.pods.extend(self.store.pods_of(server).map(|pod| pod.key.clone()));
            self.dirty.workloads.extend(self.store.workloads_of(server).map(|workload| workload.key.clone()));
        }
    }

    /// Reports AuthorizationPolicies of a namespace that have become ineffective, with the reason. Only after
    /// the start: a policy may arrive before the objects that it refers to.
    pub(crate) fn report_ineffective(&mut self, namespace: &str) {
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

    /// Reports routes and rate limits that a Server accepts and whose kind it does not have, with the reason. Only
    /// after the start, as the Server may arrive last.
    pub(crate) fn report_unused(&mut self, server: &Key) {
        let now = inbound::unused(&self.store, &self.cluster, server);
        let before = self.unused.remove(server).unwrap_or_default();
        for (object, problem) in now.iter().filter(|(object, problem)| before.get(*object) != Some(problem)) {
            self.problems.push(Problem { object: object.to_string(), problem: problem.clone() });
        }
        if !now.is_empty() {
            self.unused.insert(server.clone(), now);
        }
    }
}

/// Authentications that a policy refers to, by namespace and name; the kind is checked when the policy is
/// computed.
fn authentications<'a>(namespace: &'a str, spec: &'a AuthorizationPolicySpec) -> impl Iterator<Item = Key> + 'a {
    let refs = spec.required_authentication_refs.iter();
    refs.map(|reference| Key::new(reference.namespace.as_deref().unwrap_or(namespace), &reference.name))
}

/// Sets or removes a value; returns whether that changed anything.
fn replace<T: PartialEq>(known: &mut HashMap<String, T>, name: &str, new: Option<T>) -> bool {
    if known.get(name) == new.as_ref() {
        return false;
    }
    match new {
        Some(new) => known.insert(name.to_owned(), new),
        None => known.remove(name),
    };
    true
}
