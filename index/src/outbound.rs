//! Policy for connections to an address or to a Service's name.

use std::net::SocketAddr;

use super::{
    cluster::Cluster,
    records::{Key, ServiceRecord},
    store::Store,
};

/// The policy towards one destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutboundPolicy {
    /// A Service's declared port.
    Service {
        /// The Service.
        service: Key,
        /// The port.
        port: u16,
        /// Name and port that the balancer resolves.
        authority: String,
        /// The protocol of clients.
        protocol: OutboundProtocol,
    },
    /// A Service's cluster address with a port that the Service does not declare: connections are refused.
    UndefinedPort {
        /// The Service.
        service: Key,
        /// The port.
        port: u16,
    },
    /// An address outside the cluster: connections go to their original destination.
    Egress {
        /// The address.
        addr: SocketAddr,
    },
}

/// The protocol of clients of a Service's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboundProtocol {
    /// Detected by the proxy.
    Detect,
    /// TCP.
    Opaque,
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
}

/// The policy towards an address. `None` for cluster addresses that belong to no Service or to several;
/// proxies then use the endpoint's profile.
pub(super) fn compute_by_addr(store: &Store, cluster: &Cluster, addr: SocketAddr) -> Option<OutboundPolicy> {
    match store.service_by_ip(addr.ip()) {
        Ok(Some(service)) if service.port(addr.port()).is_none() => {
            Some(OutboundPolicy::UndefinedPort { service: service.key.clone(), port: addr.port() })
        }
        Ok(Some(service)) => Some(of_service(cluster, &service.key, addr.port(), Some(&service))),
        Ok(None) if !cluster.contains(addr.ip()) => Some(OutboundPolicy::Egress { addr }),
        Ok(None) | Err(_) => None,
    }
}

/// The policy towards a Service by name, which need not exist yet; as in Linkerd, the port need not be declared either.
pub(super) fn compute_by_name(store: &Store, cluster: &Cluster, key: &Key, port: u16) -> OutboundPolicy {
    of_service(cluster, key, port, store.service(key).as_deref())
}

fn of_service(cluster: &Cluster, key: &Key, port: u16, service: Option<&ServiceRecord>) -> OutboundPolicy {
    let app_protocol = service.and_then(|service| service.port(port)?.app_protocol.as_deref());
    let opaque = match service {
        Some(service) => service.is_opaque(port, &cluster.default_opaque_ports),
        None => cluster.default_opaque_ports.contains(port),
    };
    let protocol = match app_protocol {
        Some("http") => OutboundProtocol::Http1,
        Some("kubernetes.io/h2c") => OutboundProtocol::Http2,
        // An unknown protocol is still a protocol, and reading it as HTTP could break it.
        Some(_) => OutboundProtocol::Opaque,
        None if opaque => OutboundProtocol::Opaque,
        None => OutboundProtocol::Detect,
    };
    let authority = format!("{}:{port}", cluster.service_name(&key.name, &key.namespace));
    OutboundPolicy::Service { service: key.clone(), port, authority, protocol }
}
