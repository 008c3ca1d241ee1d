//! How much the index holds, and who listens, for metrics.

use std::{collections::BTreeMap, hash::Hash};

use super::{Index, Key, watches::Watches};

/// Numbers of objects, views and subscribers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Objects by kind, in lower case.
    pub objects: BTreeMap<&'static str, usize>,
    /// Views by what they are of.
    pub views: BTreeMap<&'static str, Views>,
    /// Clients that follow the endpoints of a Service's port.
    pub endpoints: BTreeMap<(Key, u16), usize>,
}

/// Views of one sort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Views {
    /// Their number; some may have lost their last client.
    pub views: usize,
    /// Number of clients.
    pub subscribers: usize,
}

impl Index {
    /// Counts. Looks at every view.
    pub fn statistics(&self) -> Statistics {
        let store = &self.store;
        let policies = || store.namespaces.values();
        let objects = BTreeMap::from([
            ("service", store.services.len()),
            ("endpointslice", store.slices.len()),
            ("pod", store.pods.len()),
            ("node", store.zones.len()),
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
        ]);
        let mut endpoints = BTreeMap::new();
        for (service, key, subscribers) in self.endpoints.subscribers().filter(|(_, _, subscribers)| *subscribers > 0) {
            *endpoints.entry((service.clone(), key.port)).or_default() += subscribers;
        }
        let views = BTreeMap::from([
            ("endpoints", views(&self.endpoints)),
            ("service_profiles", views(&self.service_profiles)),
            ("endpoint_profiles", views(&self.endpoint_profiles)),
            ("inbound_policies", views(&self.inbound)),
            ("inbound_policies_of_external_workloads", views(&self.inbound_external)),
            ("outbound_policies", views(&self.outbound)),
            ("outbound_policies_by_name", views(&self.outbound_names)),
        ]);
        Statistics { objects, views, endpoints }
    }
}

fn views<G: Clone + Eq + Hash, K: Eq + Hash, T>(watches: &Watches<G, K, T>) -> Views {
    watches.subscribers().fold(Views::default(), |sum, (_, _, subscribers)| Views {
        views: sum.views + 1,
        subscribers: sum.subscribers + subscribers,
    })
}
