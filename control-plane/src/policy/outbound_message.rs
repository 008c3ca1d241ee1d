//! Outbound policies as messages.

mod backend;
mod connection;
mod grpc;
mod http;

use std::{net::SocketAddr, time::Duration};

use weft_k8s_api::policy::{
    TrafficPolicy,
    traffic::{ConsecutiveFailures, FailureAccrual, Timeouts},
};
use weft_proto::linkerd::{
    http_route,
    meta::{Metadata, Resource},
    opaque_route::Forbidden,
    outbound::{
        self, ExponentialBackoff, OpaqueRoute, OutboundPolicy as Message, ProxyProtocol, failure_accrual, opaque_route,
        proxy_protocol::{self, Kind},
    },
};

use super::{DETECT_TIMEOUT, default_metadata, resource_metadata};
use backend::{Load, load};
use weft_index::{OutboundParent, OutboundPolicy, OutboundProtocol, ParentPolicy, RouteId};

/// Linkerd's constants of retries: the largest request that is kept to be sent again, and the pauses.
const RETRY_REQUEST_BYTES: u32 = 64 * 1024;
const RETRY_MIN_BACKOFF: Duration = Duration::from_millis(25);
const RETRY_MAX_BACKOFF: Duration = Duration::from_millis(250);
const RETRY_JITTER: f32 = 1.0;
/// What Linkerd's proxy answers to refused requests.
const REFUSED: &str = "traffic not allowed";

/// What every route of a parent is written with.
struct Context<'a> {
    policy: &'a ParentPolicy,
    /// Where traffic goes that no backend of a route is for.
    parent: outbound::Backend,
    /// How balancers of HTTP and gRPC estimate the load of endpoints.
    load: Load,
    /// Whether headers of requests may set timeouts and retries.
    l5d_headers: bool,
}

/// The message of a destination's policy. `port` is the one that the client asked for.
pub(super) fn policy(policy: &OutboundPolicy, port: u16, l5d_headers: bool) -> Message {
    match policy {
        OutboundPolicy::Parent(policy) => parent(policy, l5d_headers),
        OutboundPolicy::UndefinedPort { service } => {
            let forbidden = opaque_route::Filter { kind: Some(opaque_route::filter::Kind::Forbidden(Forbidden {})) };
            let nowhere = opaque_route::distribution::Kind::Empty(opaque_route::distribution::Empty {});
            let rule = opaque_route::Rule {
                backends: Some(opaque_route::Distribution { kind: Some(nowhere) }),
                filters: vec![forbidden],
            };
            let route = OpaqueRoute { metadata: Some(default_metadata("undefined-port")), rules: vec![rule] };
            let kind = Kind::Opaque(proxy_protocol::Opaque { routes: vec![route] });
            let metadata = backend::service_metadata(service, port);
            Message { protocol: Some(ProxyProtocol { kind: Some(kind) }), metadata: Some(metadata) }
        }
        OutboundPolicy::Egress { addr } => egress_fallback(*addr),
    }
}

fn parent(policy: &ParentPolicy, l5d_headers: bool) -> Message {
    let metadata = backend::parent_metadata(&policy.parent);
    let load = load(policy.load_bias.as_ref());
    let context = Context { policy, parent: backend::of_parent(&policy.parent, load), load, l5d_headers };
    let failure_accrual = policy.accrual.as_ref().map(|of| accrual(of, policy.honor_retry_after));
    let kind = match &policy.protocol {
        OutboundProtocol::Detect(routes) => {
            let routes = context.http_routes(routes);
            Kind::Detect(proxy_protocol::Detect {
                timeout: DETECT_TIMEOUT.try_into().ok(),
                opaque: Some(proxy_protocol::Opaque { routes: context.opaque_routes(&[]) }),
                http1: Some(proxy_protocol::Http1 { routes: routes.clone(), failure_accrual }),
                http2: Some(proxy_protocol::Http2 { routes, failure_accrual }),
            })
        }
        OutboundProtocol::Http1(routes) => {
            Kind::Http1(proxy_protocol::Http1 { routes: context.http_routes(routes), failure_accrual })
        }
        OutboundProtocol::Http2(routes) => {
            Kind::Http2(proxy_protocol::Http2 { routes: context.http_routes(routes), failure_accrual })
        }
        OutboundProtocol::Grpc(routes) => {
            Kind::Grpc(proxy_protocol::Grpc { routes: context.grpc_routes(routes), failure_accrual })
        }
        OutboundProtocol::Tls(routes) => Kind::Tls(proxy_protocol::Tls { routes: context.tls_routes(routes) }),
        OutboundProtocol::Opaque(routes) => {
            Kind::Opaque(proxy_protocol::Opaque { routes: context.opaque_routes(routes) })
        }
    };
    Message { protocol: Some(ProxyProtocol { kind: Some(kind) }), metadata: Some(metadata) }
}

/// The policy towards an address outside the cluster that no EgressNetwork has.
fn egress_fallback(addr: SocketAddr) -> Message {
    const NAME: &str = "egress-fallback";
    let metadata = default_metadata(NAME);
    let backend = backend::forward(metadata.clone(), addr, 1);
    let opaque = connection::default_opaque_route(NAME, backend.clone(), false);
    let rule = outbound::http_route::Rule {
        matches: vec![http_route::HttpRouteMatch::default()],
        backends: Some(http::first(backend)),
        ..outbound::http_route::Rule::default()
    };
    let routes = vec![outbound::HttpRoute { metadata: Some(metadata.clone()), hosts: Vec::new(), rules: vec![rule] }];
    let detect = proxy_protocol::Detect {
        timeout: DETECT_TIMEOUT.try_into().ok(),
        opaque: Some(proxy_protocol::Opaque { routes: vec![opaque] }),
        http1: Some(proxy_protocol::Http1 { routes: routes.clone(), failure_accrual: None }),
        http2: Some(proxy_protocol::Http2 { routes, failure_accrual: None }),
    };
    Message { protocol: Some(ProxyProtocol { kind: Some(Kind::Detect(detect)) }), metadata: Some(metadata) }
}

impl Context<'_> {
    /// The traffic policy of an EgressNetwork; `None` for a Service.
    fn egress(&self) -> Option<TrafficPolicy> {
        match &self.policy.parent {
            OutboundParent::EgressNetwork { policy, .. } => Some(*policy),
            OutboundParent::Service(_) => None,
        }
    }
}

fn route_metadata(id: &RouteId) -> Metadata {
    resource_metadata(Resource {
        group: id.kind.group().to_owned(),
        kind: id.kind.name().to_owned(),
        name: id.key.name.clone(),
        namespace: id.key.namespace.clone(),
        ..Resource::default()
    })
}

fn timeouts(timeouts: &Timeouts) -> http_route::Timeouts {
    http_route::Timeouts {
        request: duration(timeouts.request),
        response: duration(timeouts.response),
        idle: duration(timeouts.idle),
    }
}

/// A duration; one that is too long for the message is left out.
fn duration<T>(duration: Option<Duration>) -> Option<T>
where
    Duration: TryInto<T>,
{
    duration.and_then(|duration| duration.try_into().ok())
}

fn retry_backoff() -> ExponentialBackoff {
    ExponentialBackoff {
        min_backoff: RETRY_MIN_BACKOFF.try_into().ok(),
        max_backoff: RETRY_MAX_BACKOFF.try_into().ok(),
        jitter_ratio: RETRY_JITTER,
        respect_retry_after_hint: false,
    }
}

fn accrual(accrual: &FailureAccrual, honor_retry_after: bool) -> outbound::FailureAccrual {
    let ConsecutiveFailures { max_failures, min_penalty, max_penalty, jitter_ratio } = accrual.consecutive;
    let backoff = Some(ExponentialBackoff {
        min_backoff: min_penalty.try_into().ok(),
        max_backoff: max_penalty.try_into().ok(),
        jitter_ratio,
        respect_retry_after_hint: honor_retry_after,
    });
    let kind = match accrual.success_rate {
        None => {
            failure_accrual::Kind::ConsecutiveFailures(failure_accrual::ConsecutiveFailures { max_failures, backoff })
        }
        Some(rate) => failure_accrual::Kind::Unified(failure_accrual::Unified {
            success_rate_threshold: rate.threshold,
            decay: rate.window.try_into().ok(),
            min_requests: rate.min_requests,
            max_consecutive_failures: max_failures,
            backoff,
        }),
    };
    outbound::FailureAccrual { kind: Some(kind), ejection: None }
}

#[cfg(test)]
mod tests;
