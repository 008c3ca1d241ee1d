//! Backends: balancers of Services, and original destinations.

use std::{net::SocketAddr, time::Duration};

use weft_k8s_api::policy::traffic::LoadBias;
use weft_proto::linkerd::{
    destination::WeightedAddr,
    meta::{Metadata, Resource},
    outbound::{
        Backend, Queue,
        backend::{
            BalanceP2c, EndpointDiscovery, Kind, balance_p2c,
            balance_p2c::{PeakEwma, PenaltyPeakEwma},
            endpoint_discovery,
        },
    },
};

use super::super::{default_metadata, resource_metadata};
use weft_index::{BackendResource, Key, OutboundParent, RouteBackend, ServicePort};

/// How a balancer estimates the load of endpoints.
pub(super) type Load = balance_p2c::Load;

/// Linkerd's constants: capacity of a balancer's queue, and how long it waits for an endpoint.
const QUEUE_CAPACITY: u32 = 100;
const FAILFAST_TIMEOUT: Duration = Duration::from_secs(3);
/// Linkerd's constants: assumed latency of an unmeasured endpoint, and how fast measurements decay.
const DEFAULT_RTT: Duration = Duration::from_millis(30);
const EWMA_DECAY: Duration = Duration::from_secs(10);
/// The name in metadata of what no resource is.
const INVALID: &str = "invalid";

/// The estimate of a parent's balancers.
pub(super) fn load(bias: Option<&LoadBias>) -> Load {
    let (default_rtt, decay) = (DEFAULT_RTT.try_into().ok(), EWMA_DECAY.try_into().ok());
    match bias {
        None => Load::PeakEwma(PeakEwma { default_rtt, decay }),
        Some(bias) => Load::PenaltyPeakEwma(PenaltyPeakEwma {
            default_rtt,
            decay,
            penalty: bias.penalty.try_into().ok(),
            max_retry_after: bias.max_retry_after.try_into().ok(),
            penalty_decay: LoadBias::DECAY.try_into().ok(),
        }),
    }
}

pub(super) fn parent_metadata(parent: &OutboundParent) -> Metadata {
    match parent {
        OutboundParent::Service(ServicePort { service, port, .. }) => service_metadata(service, *port),
        OutboundParent::EgressNetwork { network, addr, .. } => network_metadata(network, addr.port()),
    }
}

/// Where traffic goes that no backend of a route is for.
pub(super) fn of_parent(parent: &OutboundParent, load: Load) -> Backend {
    match parent {
        OutboundParent::Service(port) => balancer(port, load),
        OutboundParent::EgressNetwork { addr, .. } => forward(parent_metadata(parent), *addr, 1),
    }
}

/// The backend of a rule. One to which nothing can be sent has no kind: proxies fail what is meant for it.
pub(super) fn of_route(backend: &RouteBackend, parent: &OutboundParent, load: Load) -> Backend {
    match (&backend.problem, &backend.resource, parent) {
        (None, Some(BackendResource::Service(port)), _) => balancer(port, load),
        (None, Some(BackendResource::EgressNetwork { network, port }), OutboundParent::EgressNetwork { addr, .. }) => {
            forward(network_metadata(network, *port), *addr, backend.weight)
        }
        (_, resource, _) => {
            let metadata = match resource {
                Some(BackendResource::Service(ServicePort { service, port, .. })) => service_metadata(service, *port),
                Some(BackendResource::EgressNetwork { network, port }) => network_metadata(network, *port),
                None => default_metadata(INVALID),
            };
            Backend { metadata: Some(metadata), queue: Some(queue()), kind: None }
        }
    }
}

/// A single address.
pub(super) fn forward(metadata: Metadata, addr: SocketAddr, weight: u32) -> Backend {
    let addr = WeightedAddr { addr: Some(addr.into()), weight, ..WeightedAddr::default() };
    Backend { metadata: Some(metadata), queue: Some(queue()), kind: Some(Kind::Forward(addr)) }
}

fn balancer(of: &ServicePort, load: Load) -> Backend {
    let get = endpoint_discovery::DestinationGet { path: of.authority.clone() };
    let discovery = Some(EndpointDiscovery { kind: Some(endpoint_discovery::Kind::Dst(get)) });
    Backend {
        metadata: Some(service_metadata(&of.service, of.port)),
        queue: Some(queue()),
        kind: Some(Kind::Balancer(BalanceP2c { discovery, load: Some(load) })),
    }
}

pub(super) fn service_metadata(service: &Key, port: u16) -> Metadata {
    metadata("core", "Service", service, port)
}

fn network_metadata(network: &Key, port: u16) -> Metadata {
    metadata(weft_k8s_api::policy::GROUP, "EgressNetwork", network, port)
}

fn metadata(group: &str, kind: &str, key: &Key, port: u16) -> Metadata {
    resource_metadata(Resource {
        group: group.to_owned(),
        kind: kind.to_owned(),
        name: key.name.clone(),
        namespace: key.namespace.clone(),
        section: String::new(),
        port: port.into(),
    })
}

fn queue() -> Queue {
    Queue { capacity: QUEUE_CAPACITY, failfast_timeout: FAILFAST_TIMEOUT.try_into().ok() }
}
