//! Policy for connections to an address or to a Service's name.
//!
//! ```text
//! address --> Service's port     --> routes of the Service       (service.rs, routes.rs)
//!         |-> undeclared port    --> refused
//!         |-> EgressNetwork      --> routes of the EgressNetwork (egress.rs, routes.rs)
//!         '-> outside otherwise  --> forwarded
//! ```

mod egress;
mod policy;
mod routes;
mod service;

use std::net::{IpAddr, SocketAddr};

use weft_k8s_api::policy::route::ParentKind;

pub use policy::{
    BackendResource, ConnectionRoute, OutboundGrpcRoute, OutboundHttpRoute, OutboundParent, OutboundPolicy,
    OutboundProtocol, ParentPolicy, RequestFilter, RequestRoute, RequestRule, RouteBackend, ServicePort,
};

use super::{
    cluster::Cluster,
    records::{Key, Traffic},
    store::{ParentId, Store},
};

/// What the policy towards an address, or a Service by name, depends on besides that. What a client can choose is
/// reduced to what makes a difference, so that it does not multiply answers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum OutboundKey {
    /// A port, and the namespace of the clients if it has routes or EgressNetworks of its own for this destination.
    Port { port: u16, namespace: Option<String> },
    /// Every port that the Service does not declare.
    Undeclared,
}

impl OutboundKey {
    /// The key of an address for clients of a namespace.
    pub(super) fn of_addr(store: &Store, cluster: &Cluster, addr: SocketAddr, namespace: &str) -> Self {
        match store.service_by_ip(addr.ip()) {
            Ok(Some(service)) if service.port(addr.port()).is_none() => Self::Undeclared,
            Ok(Some(service)) => Self::of_name(store, &service.key, addr.port(), namespace),
            Ok(None) | Err(_) => {
                let namespace = store.chooses_egress(cluster, namespace).then(|| namespace.to_owned());
                Self::Port { port: addr.port(), namespace }
            }
        }
    }

    /// The key of a Service by name for clients of a namespace.
    pub(super) fn of_name(store: &Store, service: &Key, port: u16, namespace: &str) -> Self {
        let parent = ParentId::new(ParentKind::Service, service.clone());
        let namespace = store.has_consumer_routes(&parent, namespace).then(|| namespace.to_owned());
        Self::Port { port, namespace }
    }

    /// Whether clients of a namespace may have this key although they belong to another, now that the namespace
    /// `counts` or does so no more.
    pub(super) fn is_stale(&self, changed: &str, counts: bool) -> bool {
        match self {
            Self::Port { namespace: None, .. } => counts,
            Self::Port { namespace: Some(namespace), .. } => !counts && namespace == changed,
            Self::Undeclared => false,
        }
    }
}

/// The policy towards an address. `None` for cluster addresses that belong to no Service or to several;
/// proxies then use the endpoint's profile.
pub(super) fn compute_by_addr(
    store: &Store,
    cluster: &Cluster,
    ip: IpAddr,
    key: &OutboundKey,
) -> Option<OutboundPolicy> {
    let service = store.service_by_ip(ip).ok()?;
    let (port, namespace) = match (key, &service) {
        (OutboundKey::Port { port, namespace }, _) => (*port, namespace.as_deref()),
        (OutboundKey::Undeclared, Some(service)) => {
            return Some(OutboundPolicy::UndefinedPort { service: service.key.clone() });
        }
        (OutboundKey::Undeclared, None) => return None,
    };
    let addr = SocketAddr::new(ip, port);
    match service {
        Some(service) if service.port(port).is_none() => {
            Some(OutboundPolicy::UndefinedPort { service: service.key.clone() })
        }
        Some(service) => {
            let policy = service::policy(store, cluster, &service.key, Some(&service), port, namespace);
            Some(OutboundPolicy::Parent(Box::new(policy)))
        }
        None if cluster.contains(ip) => None,
        None => Some(match egress::network_of(store, cluster, ip, namespace) {
            Some(network) => OutboundPolicy::Parent(Box::new(egress::policy(store, cluster, network, addr, namespace))),
            None => OutboundPolicy::Egress { addr },
        }),
    }
}

/// The policy towards a Service by name, which need not exist yet; as in Linkerd, the port need not be declared either.
pub(super) fn compute_by_name(store: &Store, cluster: &Cluster, key: &Key, of: &OutboundKey) -> Option<OutboundPolicy> {
    let OutboundKey::Port { port, namespace } = of else { return None };
    let record = store.service(key);
    let policy = service::policy(store, cluster, key, record.as_deref(), *port, namespace.as_deref());
    Some(OutboundPolicy::Parent(Box::new(policy)))
}

impl ServicePort {
    fn new(cluster: &Cluster, service: Key, port: u16) -> Self {
        let authority = format!("{}:{port}", cluster.service_name(&service.name, &service.namespace));
        Self { service, port, authority }
    }
}

impl ParentPolicy {
    fn new(parent: OutboundParent, protocol: OutboundProtocol, traffic: &Traffic) -> Self {
        Self {
            parent,
            protocol,
            timeouts: traffic.timeouts,
            http_retry: traffic.http_retry.clone(),
            grpc_retry: traffic.grpc_retry.clone(),
            accrual: traffic.accrual,
            honor_retry_after: traffic.honor_retry_after,
            load_bias: traffic.load_bias,
        }
    }
}

impl routes::Routes {
    /// The protocol where neither the Service nor the port says which it is: that of the strongest kind of route.
    fn detected(self) -> OutboundProtocol {
        if !self.grpc.is_empty() {
            OutboundProtocol::Grpc(self.grpc)
        } else if !self.http.is_empty() {
            OutboundProtocol::Detect(self.http)
        } else if !self.tls.is_empty() {
            OutboundProtocol::Tls(self.tls)
        } else if !self.tcp.is_empty() {
            OutboundProtocol::Opaque(self.tcp)
        } else {
            OutboundProtocol::Detect(Vec::new())
        }
    }
}
