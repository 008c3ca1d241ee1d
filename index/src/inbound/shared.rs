//! Policies of Servers, each derived once when something changes that it depends on, and shared by all of the Server's
//! pods and ports.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use weft_k8s_api::policy::ProxyProtocol;

use super::{Origin, ServerPolicy, ServerProtocol, authorizations, rate_limit, routes};
use crate::{
    cluster::Cluster,
    records::{Key, ServerRecord},
    store::Store,
};

/// The policies of all Servers.
#[derive(Default)]
pub(crate) struct ServerPolicies(HashMap<Key, Arc<ServerPolicy>>);

impl ServerPolicies {
    /// Derives the policy of a Server anew, or removes that of one which is gone; returns whether it is another one
    /// now.
    pub(crate) fn derive(&mut self, store: &Store, cluster: &Cluster, key: &Key) -> bool {
        let Some(server) = store.policies(&key.namespace).and_then(|policies| policies.servers.get(&key.name)) else {
            return self.0.remove(key).is_some();
        };
        let new = policy_of(store, cluster, server);
        match self.0.entry(key.clone()) {
            Entry::Occupied(known) if **known.get() == new => false,
            Entry::Occupied(mut known) => {
                known.insert(Arc::new(new));
                true
            }
            Entry::Vacant(vacant) => {
                vacant.insert(Arc::new(new));
                true
            }
        }
    }

    /// The policy of a Server.
    pub(super) fn policy(&self, store: &Store, cluster: &Cluster, server: &ServerRecord) -> Arc<ServerPolicy> {
        let known = self.0.get(&server.key).cloned();
        known.unwrap_or_else(|| Arc::new(policy_of(store, cluster, server)))
    }
}

/// The protocol of a Server's clients.
pub(super) fn protocol(server: &ServerRecord) -> ServerProtocol {
    match server.spec.protocol().unwrap_or_default() {
        ProxyProtocol::Unknown => ServerProtocol::Detect,
        ProxyProtocol::Http1 => ServerProtocol::Http1,
        ProxyProtocol::Http2 => ServerProtocol::Http2,
        ProxyProtocol::Grpc => ServerProtocol::Grpc,
        ProxyProtocol::Opaque => ServerProtocol::Opaque,
        ProxyProtocol::Tls => ServerProtocol::Tls,
    }
}

fn policy_of(store: &Store, cluster: &Cluster, server: &ServerRecord) -> ServerPolicy {
    let protocol = protocol(server);
    ServerPolicy {
        origin: Origin::Server(server.key.name.clone()),
        protocol,
        authorizations: authorizations::of_server(store, cluster, server),
        routes: routes::attached(store, cluster, &server.key, protocol),
        rate_limit: rate_limit::of_server(store, cluster, &server.key),
        probe_networks: cluster.probe_networks.clone(),
    }
}
