//! Outbound policies as messages.

use std::time::Duration;

use weft_proto::linkerd::{
    destination::WeightedAddr,
    http_route::{HttpRouteMatch, PathMatch, path_match},
    meta::{Metadata, Resource},
    opaque_route::Forbidden,
    outbound::{
        self, Backend, HttpRoute, OpaqueRoute, OutboundPolicy as Message, ProxyProtocol, Queue,
        backend::{self, BalanceP2c, EndpointDiscovery, balance_p2c, endpoint_discovery},
        http_route, opaque_route,
        proxy_protocol::{self, Kind},
    },
};

use super::{DETECT_TIMEOUT, default_metadata, resource_metadata};
use weft_index::{Key, OutboundPolicy, OutboundProtocol};

/// Linkerd's constants: capacity of a balancer's queue, and how long it waits for an endpoint.
const QUEUE_CAPACITY: u32 = 100;
const FAILFAST_TIMEOUT: Duration = Duration::from_secs(3);
/// Linkerd's constants: assumed latency of an unmeasured endpoint, and how fast measurements decay.
const DEFAULT_RTT: Duration = Duration::from_millis(30);
const EWMA_DECAY: Duration = Duration::from_secs(10);

/// The message of a destination's policy.
pub(super) fn policy(policy: &OutboundPolicy) -> Message {
    match policy {
        OutboundPolicy::Service { service, port, authority, protocol } => {
            let metadata = service_metadata(service, *port);
            let backend = balancer(&metadata, authority);
            Message { protocol: Some(routed(*protocol, &backend, "http", "opaq")), metadata: Some(metadata) }
        }
        OutboundPolicy::Egress { addr } => {
            let metadata = default_metadata("egress-fallback");
            let addr = WeightedAddr { addr: Some((*addr).into()), weight: 1, ..WeightedAddr::default() };
            let backend = Backend {
                metadata: Some(metadata.clone()),
                queue: Some(queue()),
                kind: Some(backend::Kind::Forward(addr)),
            };
            let protocol = routed(OutboundProtocol::Detect, &backend, "egress-fallback", "egress-fallback");
            Message { protocol: Some(protocol), metadata: Some(metadata) }
        }
        OutboundPolicy::UndefinedPort { service, port } => {
            let forbidden = opaque_route::Filter { kind: Some(opaque_route::filter::Kind::Forbidden(Forbidden {})) };
            let nowhere = opaque_route::distribution::Kind::Empty(opaque_route::distribution::Empty {});
            let rule = opaque_route::Rule {
                backends: Some(opaque_route::Distribution { kind: Some(nowhere) }),
                filters: vec![forbidden],
            };
            let route = OpaqueRoute { metadata: Some(default_metadata("undefined-port")), rules: vec![rule] };
            let kind = Kind::Opaque(proxy_protocol::Opaque { routes: vec![route] });
            let metadata = Some(service_metadata(service, *port));
            Message { protocol: Some(ProxyProtocol { kind: Some(kind) }), metadata }
        }
    }
}

fn service_metadata(service: &Key, port: u16) -> Metadata {
    resource_metadata(Resource {
        group: "core".to_owned(),
        kind: "Service".to_owned(),
        name: service.name.clone(),
        namespace: service.namespace.clone(),
        section: String::new(),
        port: port.into(),
    })
}

/// One route for everything to one backend, in the form that the protocol needs.
fn routed(protocol: OutboundProtocol, backend: &Backend, http_name: &str, opaque_name: &str) -> ProxyProtocol {
    let http = || vec![http_route(backend, http_name)];
    let opaque = || proxy_protocol::Opaque { routes: vec![opaque_route(backend, opaque_name)] };
    let kind = match protocol {
        OutboundProtocol::Detect => Kind::Detect(proxy_protocol::Detect {
            timeout: DETECT_TIMEOUT.try_into().ok(),
            opaque: Some(opaque()),
            http1: Some(proxy_protocol::Http1 { routes: http(), failure_accrual: None }),
            http2: Some(proxy_protocol::Http2 { routes: http(), failure_accrual: None }),
        }),
        OutboundProtocol::Opaque => Kind::Opaque(opaque()),
        OutboundProtocol::Http1 => Kind::Http1(proxy_protocol::Http1 { routes: http(), failure_accrual: None }),
        OutboundProtocol::Http2 => Kind::Http2(proxy_protocol::Http2 { routes: http(), failure_accrual: None }),
    };
    ProxyProtocol { kind: Some(kind) }
}

fn http_route(backend: &Backend, name: &str) -> HttpRoute {
    let any = PathMatch { kind: Some(path_match::Kind::Prefix("/".to_owned())) };
    let backend = http_route::RouteBackend { backend: Some(backend.clone()), ..http_route::RouteBackend::default() };
    let first = http_route::distribution::FirstAvailable { backends: vec![backend] };
    let rule = http_route::Rule {
        matches: vec![HttpRouteMatch { path: Some(any), ..HttpRouteMatch::default() }],
        backends: Some(http_route::Distribution { kind: Some(http_route::distribution::Kind::FirstAvailable(first)) }),
        ..http_route::Rule::default()
    };
    HttpRoute { metadata: Some(default_metadata(name)), hosts: Vec::new(), rules: vec![rule] }
}

fn opaque_route(backend: &Backend, name: &str) -> OpaqueRoute {
    let backend = opaque_route::RouteBackend { backend: Some(backend.clone()), filters: Vec::new() };
    let first = opaque_route::distribution::FirstAvailable { backends: vec![backend] };
    let distribution =
        outbound::opaque_route::Distribution { kind: Some(opaque_route::distribution::Kind::FirstAvailable(first)) };
    let rule = opaque_route::Rule { backends: Some(distribution), filters: Vec::new() };
    OpaqueRoute { metadata: Some(default_metadata(name)), rules: vec![rule] }
}

fn balancer(metadata: &Metadata, authority: &str) -> Backend {
    let get = endpoint_discovery::DestinationGet { path: authority.to_owned() };
    let ewma = balance_p2c::PeakEwma { default_rtt: DEFAULT_RTT.try_into().ok(), decay: EWMA_DECAY.try_into().ok() };
    let balance = BalanceP2c {
        discovery: Some(EndpointDiscovery { kind: Some(endpoint_discovery::Kind::Dst(get)) }),
        load: Some(balance_p2c::Load::PeakEwma(ewma)),
    };
    Backend { metadata: Some(metadata.clone()), queue: Some(queue()), kind: Some(backend::Kind::Balancer(balance)) }
}

fn queue() -> Queue {
    Queue { capacity: QUEUE_CAPACITY, failfast_timeout: FAILFAST_TIMEOUT.try_into().ok() }
}
