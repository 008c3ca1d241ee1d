//! Parses `OutboundPolicy` messages.
//!
//! HTTP, gRPC, TLS and opaque routes have their own messages with the same fields; the macros below parse those that
//! differ only in type.

use std::{collections::HashMap, sync::Arc, time::Duration};

use weft_proto::linkerd::{meta, outbound, tls_route};

use super::{
    Accrual, Action, Backend, BackendKind, Distribution, HttpRoutes, OpaqueRoute, OpaqueRoutes, Policy, Protocol,
    RefuseOpaque, RouteBackend,
    error::PolicyError,
    terms::{read_accrual, read_grpc_retry, read_http_retry, read_load, read_timeouts},
};
use crate::{
    discover::endpoint::EndpointInfo,
    request::{classify::Classes, terms::Terms},
    route::{
        Meta, Route,
        expression::Expressions,
        filter::Filter,
        matching::HostMatch,
        proto::{self as routes, ReadRouteError},
    },
};

/// Detection timeout if policy has none: Linkerd's default.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);

impl Policy {
    /// Parses a policy.
    ///
    /// # Errors
    /// When any part cannot be parsed; then no part may be used.
    pub(crate) fn read(message: outbound::OutboundPolicy) -> Result<Self, PolicyError> {
        use outbound::proxy_protocol::Kind;
        let kind = message.protocol.and_then(|protocol| protocol.kind).ok_or(PolicyError::Missing("protocol"))?;
        let expressions = &mut Expressions::new();
        let protocol = match kind {
            Kind::Detect(detect) => Protocol::Detect {
                timeout: routes::duration(detect.timeout, "detection timeout")?.unwrap_or(DETECT_TIMEOUT),
                http1: {
                    let http1 = detect.http1.ok_or(PolicyError::Missing("HTTP/1 routes"))?;
                    read_http(http1.routes, read_accrual(http1.failure_accrual)?, expressions)?
                },
                http2: {
                    let http2 = detect.http2.ok_or(PolicyError::Missing("HTTP/2 routes"))?;
                    read_http(http2.routes, read_accrual(http2.failure_accrual)?, expressions)?
                },
                opaque: read_opaque(detect.opaque.ok_or(PolicyError::Missing("opaque routes"))?.routes)?,
            },
            Kind::Http1(http1) => {
                Protocol::Http1(read_http(http1.routes, read_accrual(http1.failure_accrual)?, expressions)?)
            }
            Kind::Http2(http2) => {
                Protocol::Http2(read_http(http2.routes, read_accrual(http2.failure_accrual)?, expressions)?)
            }
            Kind::Grpc(grpc) => {
                Protocol::Http2(read_grpc(grpc.routes, read_accrual(grpc.failure_accrual)?, expressions)?)
            }
            Kind::Opaque(opaque) => Protocol::Opaque(read_opaque(opaque.routes)?),
            Kind::Tls(tls) => Protocol::Tls(read_tls(tls.routes)?),
        };
        Ok(Self { parent: read_meta(message.metadata), protocol })
    }
}

/// Parses a `Distribution` message of the module `$module`, with `$filter` for the backends' filters and `$accrual` for
/// the endpoints of services.
macro_rules! read_distribution {
    ($module:ident, $message:expr, $filter:expr, $accrual:expr) => {{
        use outbound::$module::distribution::Kind;
        let read_backend = |backend: outbound::$module::RouteBackend| -> Result<RouteBackend, PolicyError> {
            let mut filters = Vec::with_capacity(backend.filters.len());
            for filter in backend.filters {
                filters.push($filter(filter)?);
            }
            let backend = read_backend(backend.backend.ok_or(PolicyError::Missing("backend"))?, $accrual)?;
            Ok(RouteBackend { filters, backend: Arc::new(backend) })
        };
        match $message.and_then(|distribution| distribution.kind) {
            None => return Err(PolicyError::Missing("distribution of backends")),
            Some(Kind::Empty(_)) => Distribution::Empty,
            Some(Kind::FirstAvailable(first)) => Distribution::FirstAvailable(
                first.backends.into_iter().map(read_backend).collect::<Result<_, PolicyError>>()?,
            ),
            Some(Kind::RandomAvailable(random)) => Distribution::Random(
                random
                    .backends
                    .into_iter()
                    .map(|weighted| {
                        let backend = weighted.backend.ok_or(PolicyError::Missing("weighted backend"))?;
                        Ok((read_backend(backend)?, weighted.weight))
                    })
                    .collect::<Result<_, PolicyError>>()?,
            ),
        }
    }};
}

/// Defines `$name`, which parses the routes of the module `$module`: its `$filter`, `$retry` and `$rule` parse their
/// parts.
macro_rules! define_read_routes {
    ($name:ident, $message:ident, $module:ident, $filter:ident, $retry:ident, $rule:ident, $is_grpc:literal) => {
        fn $name(
            messages: Vec<outbound::$message>,
            accrual: Option<Arc<Accrual>>,
            expressions: &mut Expressions,
        ) -> Result<HttpRoutes, PolicyError> {
            let mut routes = Vec::with_capacity(messages.len());
            for message in messages {
                let meta = read_meta(message.metadata);
                let mut rules = Vec::with_capacity(message.rules.len());
                for rule in message.rules {
                    let filters = rule.filters.into_iter().map($filter).collect::<Result<_, _>>()?;
                    let backends = read_distribution!($module, rule.backends, $filter, accrual.as_ref());
                    #[expect(deprecated, reason = "older controllers send the response's timeout here alone")]
                    let timeouts = read_timeouts(rule.timeouts, rule.request_timeout)?;
                    let retry = rule.retry.map($retry).transpose()?.map(Arc::new);
                    let allow_headers = rule.allow_l5d_request_headers;
                    let terms = Terms { timeouts, retry, allow_headers, classes: Classes::default() };
                    let meta = meta.clone();
                    let action = Action { meta, is_grpc: $is_grpc, filters, backends, terms, profile: None };
                    rules.push(routes::$rule(rule.matches, action, expressions)?);
                }
                routes.push(Route { hosts: routes::hosts(message.hosts)?, rules });
            }
            Ok(HttpRoutes::Policy(routes.into()))
        }
    };
}

define_read_routes!(read_http, HttpRoute, http_route, read_http_filter, read_http_retry, http_rule, false);
define_read_routes!(read_grpc, GrpcRoute, grpc_route, read_grpc_filter, read_grpc_retry, grpc_rule, true);

/// Parses the rules of an opaque or TLS route: all have the same action, so each becomes a route.
macro_rules! read_connection_rules {
    ($module:ident, $meta:expr, $names:expr, $rules:expr, $routes:expr) => {
        for rule in $rules {
            let refuse = rule.filters.into_iter().map(|filter| match filter.kind {
                Some(outbound::$module::filter::Kind::Forbidden(_)) => RefuseOpaque::Forbidden,
                Some(outbound::$module::filter::Kind::Invalid(_)) | None => RefuseOpaque::Invalid,
            });
            let refuse = refuse.last();
            let refusing = |_: outbound::$module::Filter| Ok::<_, ReadRouteError>(Filter::Unknown);
            let backends = match rule.backends {
                // The controller leaves out the backends of a forbidden route.
                None if refuse.is_some() => Distribution::Empty,
                backends => without_refused(read_distribution!($module, backends, refusing, None)),
            };
            $routes.push(OpaqueRoute { meta: $meta.clone(), server_names: Arc::clone(&$names), refuse, backends });
        }
    };
}

fn read_opaque(messages: Vec<outbound::OpaqueRoute>) -> Result<OpaqueRoutes, PolicyError> {
    let mut routes = Vec::with_capacity(messages.len());
    for message in messages {
        let (meta, names) = (read_meta(message.metadata), Arc::<[HostMatch]>::default());
        read_connection_rules!(opaque_route, meta, names, message.rules, routes);
    }
    Ok(routes.into())
}

fn read_tls(messages: Vec<outbound::TlsRoute>) -> Result<OpaqueRoutes, PolicyError> {
    let mut routes = Vec::with_capacity(messages.len());
    for message in messages {
        let meta = read_meta(message.metadata);
        let names = message.snis.into_iter().map(read_sni).collect::<Result<Arc<[_]>, _>>()?;
        read_connection_rules!(tls_route, meta, names, message.rules, routes);
    }
    Ok(routes.into())
}

/// Every filter of a connection refuses it. A backend that has one gets no connections, and its share fails.
fn without_refused(distribution: Distribution) -> Distribution {
    let read = |backend: RouteBackend| {
        if backend.filters.is_empty() {
            return backend;
        }
        let meta = backend.backend.meta.clone();
        RouteBackend { filters: Vec::new(), backend: Arc::new(Backend { meta, kind: BackendKind::Missing }) }
    };
    match distribution {
        Distribution::Empty => Distribution::Empty,
        Distribution::FirstAvailable(backends) => {
            Distribution::FirstAvailable(backends.into_iter().map(read).collect())
        }
        Distribution::Random(backends) => {
            Distribution::Random(backends.into_iter().map(|(backend, weight)| (read(backend), weight)).collect())
        }
    }
}

fn read_meta(message: Option<meta::Metadata>) -> Meta {
    routes::meta(message).unwrap_or_default()
}

fn read_sni(message: tls_route::SniMatch) -> Result<HostMatch, PolicyError> {
    match message.r#match.ok_or(PolicyError::Missing("server name"))? {
        tls_route::sni_match::Match::Exact(name) => Ok(HostMatch::Exact(name)),
        tls_route::sni_match::Match::Suffix(suffix) => Ok(HostMatch::Suffix(suffix.reverse_labels)),
    }
}

fn read_backend(message: outbound::Backend, accrual: Option<&Arc<Accrual>>) -> Result<Backend, PolicyError> {
    use outbound::backend::{Kind, endpoint_discovery};
    let kind = match message.kind {
        // What the controller sends for a Service that does not exist.
        None => BackendKind::Missing,
        Some(Kind::Forward(endpoint)) => BackendKind::Forward(Arc::new(EndpointInfo::read(endpoint, &HashMap::new())?)),
        Some(Kind::Balancer(balancer)) => {
            let discovery = balancer.discovery.and_then(|discovery| discovery.kind);
            let endpoint_discovery::Kind::Dst(dst) = discovery.ok_or(PolicyError::Missing("discovery"))?;
            BackendKind::Balance { path: dst.path, load: read_load(balancer.load)?, accrual: accrual.cloned() }
        }
    };
    Ok(Backend { meta: read_meta(message.metadata), kind })
}

fn read_http_filter(message: outbound::http_route::Filter) -> Result<Filter, ReadRouteError> {
    use outbound::http_route::filter::Kind;
    match message.kind {
        None => Ok(Filter::Unknown),
        Some(Kind::RequestHeaderModifier(change)) => Filter::request_headers(change),
        Some(Kind::ResponseHeaderModifier(change)) => Filter::response_headers(change),
        Some(Kind::Redirect(redirect)) => Filter::redirect(redirect),
        Some(Kind::FailureInjector(failure)) => Filter::http_failure(failure),
    }
}

fn read_grpc_filter(message: outbound::grpc_route::Filter) -> Result<Filter, ReadRouteError> {
    use outbound::grpc_route::filter::Kind;
    match message.kind {
        None => Ok(Filter::Unknown),
        Some(Kind::RequestHeaderModifier(change)) => Filter::request_headers(change),
        Some(Kind::FailureInjector(failure)) => Filter::grpc_failure(failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::route::Load;

    fn balancer(path: &str) -> outbound::Backend {
        use outbound::backend::{BalanceP2c, EndpointDiscovery, Kind, endpoint_discovery};
        let dst = endpoint_discovery::DestinationGet { path: path.to_owned() };
        outbound::Backend {
            kind: Some(Kind::Balancer(BalanceP2c {
                discovery: Some(EndpointDiscovery { kind: Some(endpoint_discovery::Kind::Dst(dst)) }),
                load: None,
            })),
            ..Default::default()
        }
    }

    fn http1(rule: outbound::http_route::Rule) -> outbound::OutboundPolicy {
        let routes = vec![outbound::HttpRoute { rules: vec![rule], ..Default::default() }];
        let http1 = outbound::proxy_protocol::Http1 { routes, ..Default::default() };
        outbound::OutboundPolicy {
            protocol: Some(outbound::ProxyProtocol { kind: Some(outbound::proxy_protocol::Kind::Http1(http1)) }),
            metadata: None,
        }
    }

    fn first(backend: outbound::Backend) -> Option<outbound::http_route::Distribution> {
        use outbound::http_route::{Distribution, RouteBackend, distribution};
        let backends = vec![RouteBackend { backend: Some(backend), ..Default::default() }];
        let kind = distribution::Kind::FirstAvailable(distribution::FirstAvailable { backends });
        Some(Distribution { kind: Some(kind) })
    }

    #[test]
    fn reads_a_balancer_with_linkerds_defaults() {
        let rule = outbound::http_route::Rule { backends: first(balancer("web.demo:80")), ..Default::default() };
        let policy = Policy::read(http1(rule)).unwrap();
        let Protocol::Http1(HttpRoutes::Policy(routes)) = policy.protocol else { panic!("not HTTP/1") };
        let Distribution::FirstAvailable(backends) = &routes[0].rules[0].action.backends else { panic!("not first") };
        let expected = BackendKind::Balance { path: "web.demo:80".to_owned(), load: Load::DEFAULT, accrual: None };
        assert_eq!(backends[0].backend.kind, expected);
    }

    #[test]
    fn what_lacks_a_part_is_an_error() {
        assert!(Policy::read(outbound::OutboundPolicy::default()).is_err());
        assert!(Policy::read(http1(outbound::http_route::Rule::default())).is_err());
    }

    #[test]
    fn a_backend_that_does_not_exist_leaves_the_rest_of_the_policy() {
        let rule = outbound::http_route::Rule { backends: first(outbound::Backend::default()), ..Default::default() };
        let Protocol::Http1(HttpRoutes::Policy(routes)) = Policy::read(http1(rule)).unwrap().protocol else {
            panic!("not HTTP/1")
        };
        let Distribution::FirstAvailable(backends) = &routes[0].rules[0].action.backends else { panic!("not first") };
        assert_eq!(backends[0].backend.kind, BackendKind::Missing);
    }

    #[test]
    fn an_unknown_filter_fails_requests_and_is_not_ignored() {
        let rule = outbound::http_route::Rule {
            backends: first(balancer("web.demo:80")),
            filters: vec![outbound::http_route::Filter { kind: None }],
            ..Default::default()
        };
        let Protocol::Http1(HttpRoutes::Policy(routes)) = Policy::read(http1(rule)).unwrap().protocol else {
            panic!("not HTTP/1")
        };
        assert!(matches!(routes[0].rules[0].action.filters[..], [Filter::Unknown]));
    }

    #[test]
    fn a_forbidden_opaque_route_needs_no_backends() {
        use outbound::opaque_route::{Filter, Rule, filter};
        let forbidden = filter::Kind::Forbidden(Default::default());
        let rule = Rule { backends: None, filters: vec![Filter { kind: Some(forbidden) }] };
        let routes = vec![outbound::OpaqueRoute { rules: vec![rule], ..Default::default() }];
        assert_eq!(read_opaque(routes).unwrap()[0].refuse, Some(RefuseOpaque::Forbidden));
        let routes = vec![outbound::OpaqueRoute { rules: vec![Rule::default()], ..Default::default() }];
        assert!(read_opaque(routes).is_err());
    }

    #[test]
    fn a_backend_of_connections_with_a_filter_gets_none() {
        use outbound::opaque_route::{
            Distribution as Sent, Filter, RouteBackend, Rule, WeightedRouteBackend, distribution, filter,
        };
        let backend = |filters| RouteBackend { backend: Some(balancer("web.demo:80")), filters };
        let weighted = |filters| WeightedRouteBackend { backend: Some(backend(filters)), weight: 1 };
        let kinds = |kind| {
            let rule = Rule { backends: Some(Sent { kind: Some(kind) }), filters: Vec::new() };
            let routes = read_opaque(vec![outbound::OpaqueRoute { rules: vec![rule], ..Default::default() }]).unwrap();
            let kinds = |backend: &super::RouteBackend| backend.backend.kind.clone();
            match &routes[0].backends {
                Distribution::FirstAvailable(backends) => backends.iter().map(kinds).collect::<Vec<_>>(),
                Distribution::Random(backends) => backends.iter().map(|(backend, _)| kinds(backend)).collect(),
                Distribution::Empty => Vec::new(),
            }
        };
        let refusing = [None, Some(filter::Kind::Forbidden(Default::default()))];
        for filters in refusing.map(|kind| vec![Filter { kind }]) {
            let first = distribution::FirstAvailable { backends: vec![backend(filters.clone()), backend(Vec::new())] };
            let random = distribution::RandomAvailable { backends: vec![weighted(filters), weighted(Vec::new())] };
            for kind in [distribution::Kind::FirstAvailable(first), distribution::Kind::RandomAvailable(random)] {
                let kinds = kinds(kind);
                assert_eq!(kinds[0], BackendKind::Missing);
                assert!(matches!(kinds[1], BackendKind::Balance { .. }), "{kinds:?}");
            }
        }
    }

    #[test]
    fn the_rules_of_a_tls_route_share_its_server_names() {
        use outbound::tls_route::{Filter, Rule, filter};
        let forbidden = Filter { kind: Some(filter::Kind::Forbidden(Default::default())) };
        let rules = vec![Rule { backends: None, filters: vec![forbidden] }; 2];
        let exact = tls_route::sni_match::Match::Exact("web.demo".to_owned());
        let snis = vec![tls_route::SniMatch { r#match: Some(exact) }];
        let routes = read_tls(vec![outbound::TlsRoute { metadata: None, snis, rules }]).unwrap();
        assert_eq!(*routes[0].server_names, [HostMatch::Exact("web.demo".to_owned())]);
        assert!(Arc::ptr_eq(&routes[0].server_names, &routes[1].server_names));
    }

    #[test]
    fn a_duration_that_cannot_be_read_is_an_error() {
        use weft_proto::linkerd::http_route::Timeouts;
        let policy = |nanos| {
            let mut timeouts = Timeouts { request: Duration::ZERO.try_into().ok(), ..Default::default() };
            timeouts.request.as_mut().unwrap().nanos = nanos;
            let (backends, timeouts) = (first(balancer("web.demo:80")), Some(timeouts));
            Policy::read(http1(outbound::http_route::Rule { backends, timeouts, ..Default::default() }))
        };
        let Protocol::Http1(HttpRoutes::Policy(routes)) = policy(1).unwrap().protocol else { panic!("not HTTP/1") };
        assert_eq!(routes[0].rules[0].action.terms.timeouts.request, Some(Duration::from_nanos(1)));
        assert!(policy(-1).is_err());

        let detect = |nanos| {
            let mut detect = outbound::proxy_protocol::Detect {
                timeout: Duration::ZERO.try_into().ok(),
                opaque: Some(Default::default()),
                http1: Some(Default::default()),
                http2: Some(Default::default()),
            };
            detect.timeout.as_mut().unwrap().nanos = nanos;
            let kind = Some(outbound::proxy_protocol::Kind::Detect(detect));
            Policy::read(outbound::OutboundPolicy { protocol: Some(outbound::ProxyProtocol { kind }), metadata: None })
        };
        assert!(detect(1).is_ok());
        assert!(detect(-1).is_err());
    }

    #[test]
    fn a_filter_that_cannot_be_read_is_an_error() {
        use weft_proto::linkerd::http_route::{HttpFailureInjector, Ratio};
        let ratio = Some(Ratio { numerator: 1, denominator: 0 });
        let failure = HttpFailureInjector { status: 500, message: String::new(), ratio };
        let filter = outbound::http_route::filter::Kind::FailureInjector(failure);
        let filters = vec![outbound::http_route::Filter { kind: Some(filter) }];
        let backends = first(balancer("web.demo:80"));
        assert!(Policy::read(http1(outbound::http_route::Rule { backends, filters, ..Default::default() })).is_err());
    }
}
