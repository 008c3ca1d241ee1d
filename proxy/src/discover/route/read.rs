//! Reads `OutboundPolicy` messages.
//!
//! HTTP, gRPC, TLS and opaque routes have messages of their own with the same fields; the macros below read those that differ
//! in type alone.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use weft_proto::linkerd::{http_route, http_types, outbound, tls_route};

use super::{
    Backend, BackendKind, Distribution, Filter, HeaderChange, HttpRoutes, Meta, OpaqueRoute, OpaqueRoutes, PeakEwma,
    Policy, Protocol, Redirect, RedirectPath, RefuseOpaque, RouteBackend, Rule,
};
use crate::discover::endpoint::{EndpointError, EndpointInfo};
use crate::http::matching::{HostMatch, MatchError, RequestMatch, Route};

/// Detection's timeout when policy gives none: Linkerd's default.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a policy cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PolicyError {
    /// A part that must be there is not.
    #[error("the policy has no {0}")]
    Missing(&'static str),
    /// A match cannot be read.
    #[error("read a route's match")]
    Match(#[from] MatchError),
    /// A forward backend cannot be read.
    #[error("read a backend's endpoint")]
    Endpoint(#[from] EndpointError),
    /// A header's name cannot be read.
    #[error("read a filter's header name")]
    HeaderName(#[from] http::header::InvalidHeaderName),
    /// A header's value cannot be read.
    #[error("read a filter's header value")]
    HeaderValue(#[from] http::header::InvalidHeaderValue),
    /// A status is none.
    #[error("read a filter's status code")]
    Status(#[from] http::status::InvalidStatusCode),
    /// A number is out of its range.
    #[error("a filter's {0} is out of range")]
    Range(&'static str),
    /// A scheme is none.
    #[error("read a redirect's scheme")]
    Scheme,
}

impl Policy {
    /// Reads a policy.
    ///
    /// # Errors
    /// When any part cannot be read; the whole must not be used then.
    pub(crate) fn read(message: outbound::OutboundPolicy) -> Result<Self, PolicyError> {
        use outbound::proxy_protocol::Kind;
        let kind = message.protocol.and_then(|protocol| protocol.kind).ok_or(PolicyError::Missing("protocol"))?;
        let protocol = match kind {
            Kind::Detect(detect) => Protocol::Detect {
                timeout: duration(detect.timeout).unwrap_or(DETECT_TIMEOUT),
                http1: read_http(detect.http1.ok_or(PolicyError::Missing("HTTP/1 routes"))?.routes)?,
                http2: read_http(detect.http2.ok_or(PolicyError::Missing("HTTP/2 routes"))?.routes)?,
                opaque: read_opaque(detect.opaque.ok_or(PolicyError::Missing("opaque routes"))?.routes)?,
            },
            Kind::Http1(http1) => Protocol::Http1(read_http(http1.routes)?),
            Kind::Http2(http2) => Protocol::Http2(read_http(http2.routes)?),
            Kind::Grpc(grpc) => Protocol::Http2(read_grpc(grpc.routes)?),
            Kind::Opaque(opaque) => Protocol::Opaque(read_opaque(opaque.routes)?),
            Kind::Tls(tls) => Protocol::Tls(read_tls(tls.routes)?),
        };
        Ok(Self { parent: Meta::read(message.metadata), protocol })
    }
}

/// Reads a `Distribution` message of the module `$module`, whose backends' filters `$filter` reads.
macro_rules! read_distribution {
    ($module:ident, $message:expr, $filter:expr) => {{
        use outbound::$module::distribution::Kind;
        let read_backend = |backend: outbound::$module::RouteBackend| -> Result<RouteBackend, PolicyError> {
            let mut filters = Vec::with_capacity(backend.filters.len());
            for filter in backend.filters {
                filters.push($filter(filter)?);
            }
            let backend = read_backend(backend.backend.ok_or(PolicyError::Missing("backend"))?)?;
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

fn read_http(messages: Vec<outbound::HttpRoute>) -> Result<HttpRoutes, PolicyError> {
    let mut routes = Vec::with_capacity(messages.len());
    for message in messages {
        let meta = Meta::read(message.metadata);
        let mut rules = Vec::with_capacity(message.rules.len());
        for rule in message.rules {
            let matches = rule.matches.into_iter().map(RequestMatch::read).collect::<Result<_, _>>()?;
            let filters = rule.filters.into_iter().map(read_http_filter).collect::<Result<_, _>>()?;
            let backends = read_distribution!(http_route, rule.backends, read_http_filter);
            let request_timeout = rule.timeouts.and_then(|timeouts| duration(timeouts.request));
            rules.push((matches, Rule { meta: meta.clone(), filters, backends, request_timeout }));
        }
        routes.push(Route { hosts: read_hosts(message.hosts)?, rules });
    }
    Ok(routes.into())
}

fn read_grpc(messages: Vec<outbound::GrpcRoute>) -> Result<HttpRoutes, PolicyError> {
    let mut routes = Vec::with_capacity(messages.len());
    for message in messages {
        let meta = Meta::read(message.metadata);
        let mut rules = Vec::with_capacity(message.rules.len());
        for rule in message.rules {
            let matches = rule.matches.into_iter().map(RequestMatch::read_grpc).collect::<Result<_, _>>()?;
            let filters = rule.filters.into_iter().map(read_grpc_filter).collect::<Result<_, _>>()?;
            let backends = read_distribution!(grpc_route, rule.backends, read_grpc_filter);
            let request_timeout = rule.timeouts.and_then(|timeouts| duration(timeouts.request));
            rules.push((matches, Rule { meta: meta.clone(), filters, backends, request_timeout }));
        }
        routes.push(Route { hosts: read_hosts(message.hosts)?, rules });
    }
    Ok(routes.into())
}

/// Reads the rules of an opaque or TLS route: all lead the same way, so that each becomes a route.
macro_rules! read_connection_rules {
    ($module:ident, $meta:expr, $names:expr, $rules:expr, $routes:expr) => {
        for rule in $rules {
            let refuse = rule.filters.into_iter().map(|filter| match filter.kind {
                Some(outbound::$module::filter::Kind::Forbidden(_)) => RefuseOpaque::Forbidden,
                Some(outbound::$module::filter::Kind::Invalid(_)) | None => RefuseOpaque::Invalid,
            });
            let refuse = refuse.last();
            let no_filters = |_: outbound::$module::Filter| Ok::<_, PolicyError>(Filter::Invalid);
            let backends = match rule.backends {
                // A forbidden route leads nowhere, and the controller then leaves its backends out.
                None if refuse.is_some() => Distribution::Empty,
                backends => read_distribution!($module, backends, no_filters),
            };
            $routes.push(OpaqueRoute { meta: $meta.clone(), server_names: $names.clone(), refuse, backends });
        }
    };
}

fn read_opaque(messages: Vec<outbound::OpaqueRoute>) -> Result<OpaqueRoutes, PolicyError> {
    let mut routes = Vec::with_capacity(messages.len());
    for message in messages {
        let (meta, names) = (Meta::read(message.metadata), Vec::<HostMatch>::new());
        read_connection_rules!(opaque_route, meta, names, message.rules, routes);
    }
    Ok(routes.into())
}

fn read_tls(messages: Vec<outbound::TlsRoute>) -> Result<OpaqueRoutes, PolicyError> {
    let mut routes = Vec::with_capacity(messages.len());
    for message in messages {
        let meta = Meta::read(message.metadata);
        let names = message.snis.into_iter().map(read_sni).collect::<Result<Vec<_>, _>>()?;
        read_connection_rules!(tls_route, meta, names, message.rules, routes);
    }
    Ok(routes.into())
}

fn read_sni(message: tls_route::SniMatch) -> Result<HostMatch, PolicyError> {
    match message.r#match.ok_or(PolicyError::Missing("server name"))? {
        tls_route::sni_match::Match::Exact(name) => Ok(HostMatch::Exact(name)),
        tls_route::sni_match::Match::Suffix(suffix) => Ok(HostMatch::Suffix(suffix.reverse_labels)),
    }
}

fn read_hosts(messages: Vec<http_route::HostMatch>) -> Result<Vec<HostMatch>, PolicyError> {
    messages.into_iter().map(|host| HostMatch::read(host).map_err(PolicyError::from)).collect()
}

fn read_backend(message: outbound::Backend) -> Result<Backend, PolicyError> {
    use outbound::backend::{Kind, balance_p2c, endpoint_discovery};
    let kind = match message.kind.ok_or(PolicyError::Missing("backend kind"))? {
        Kind::Forward(endpoint) => BackendKind::Forward(Arc::new(EndpointInfo::read(endpoint, &HashMap::new())?)),
        Kind::Balancer(balancer) => {
            let discovery = balancer.discovery.and_then(|discovery| discovery.kind);
            let endpoint_discovery::Kind::Dst(dst) = discovery.ok_or(PolicyError::Missing("discovery"))?;
            let (default_rtt, decay) = match balancer.load {
                Some(balance_p2c::Load::PeakEwma(load)) => (duration(load.default_rtt), duration(load.decay)),
                Some(balance_p2c::Load::PenaltyPeakEwma(load)) => (duration(load.default_rtt), duration(load.decay)),
                None => (None, None),
            };
            let load = PeakEwma {
                default_rtt: default_rtt.unwrap_or(PeakEwma::DEFAULT.default_rtt),
                decay: decay.filter(|decay| !decay.is_zero()).unwrap_or(PeakEwma::DEFAULT.decay),
            };
            BackendKind::Balance { path: dst.path, load }
        }
    };
    Ok(Backend { meta: Meta::read(message.metadata), kind })
}

fn read_http_filter(message: outbound::http_route::Filter) -> Result<Filter, PolicyError> {
    use outbound::http_route::filter::Kind;
    Ok(match message.kind {
        None => Filter::Invalid,
        Some(Kind::RequestHeaderModifier(change)) => {
            Filter::RequestHeaders(read_headers(change.add, change.set, change.remove)?)
        }
        Some(Kind::ResponseHeaderModifier(change)) => {
            Filter::ResponseHeaders(read_headers(change.add, change.set, change.remove)?)
        }
        Some(Kind::Redirect(redirect)) => Filter::Redirect(read_redirect(redirect)?),
        Some(Kind::FailureInjector(failure)) => Filter::Fail {
            code: status(failure.status)?.as_u16(),
            grpc: false,
            message: failure.message,
            ratio: read_ratio(failure.ratio),
        },
    })
}

fn read_grpc_filter(message: outbound::grpc_route::Filter) -> Result<Filter, PolicyError> {
    use outbound::grpc_route::filter::Kind;
    Ok(match message.kind {
        None => Filter::Invalid,
        Some(Kind::RequestHeaderModifier(change)) => {
            Filter::RequestHeaders(read_headers(change.add, change.set, change.remove)?)
        }
        Some(Kind::FailureInjector(failure)) => Filter::Fail {
            code: u16::try_from(failure.code).map_err(|_| PolicyError::Range("gRPC code"))?,
            grpc: true,
            message: failure.message,
            ratio: read_ratio(failure.ratio),
        },
    })
}

/// Without a ratio, or with a senseless one, every request fails.
fn read_ratio(ratio: Option<http_route::Ratio>) -> (u32, u32) {
    ratio
        .map(|ratio| (ratio.numerator, ratio.denominator))
        .filter(|(_, denominator)| *denominator > 0)
        .unwrap_or((1, 1))
}

fn read_redirect(message: http_route::RequestRedirect) -> Result<Redirect, PolicyError> {
    let scheme = match message.scheme {
        None => None,
        Some(scheme) => Some(scheme.try_into().map_err(|_| PolicyError::Scheme)?),
    };
    let path = message.path.and_then(|path| path.replace).map(|replace| match replace {
        http_route::path_modifier::Replace::Full(path) => RedirectPath::Full(path),
        http_route::path_modifier::Replace::Prefix(prefix) => RedirectPath::Prefix(prefix),
    });
    Ok(Redirect {
        scheme,
        host: Some(message.host).filter(|host| !host.is_empty()),
        port: Some(u16::try_from(message.port).map_err(|_| PolicyError::Range("port"))?).filter(|port| *port != 0),
        path,
        status: if message.status == 0 { StatusCode::FOUND } else { status(message.status)? },
    })
}

fn read_headers(
    add: Option<http_types::Headers>,
    set: Option<http_types::Headers>,
    remove: Vec<String>,
) -> Result<HeaderChange, PolicyError> {
    let read = |headers: Option<http_types::Headers>| -> Result<Vec<(HeaderName, HeaderValue)>, PolicyError> {
        let mut list = Vec::new();
        for header in headers.unwrap_or_default().headers {
            list.push((HeaderName::from_bytes(header.name.as_bytes())?, HeaderValue::from_bytes(&header.value)?));
        }
        Ok(list)
    };
    let mut removed = Vec::with_capacity(remove.len());
    for name in remove {
        removed.push(HeaderName::from_bytes(name.as_bytes())?);
    }
    Ok(HeaderChange { add: read(add)?, set: read(set)?, remove: removed })
}

fn status(code: u32) -> Result<StatusCode, PolicyError> {
    let code = u16::try_from(code).map_err(|_| PolicyError::Range("status code"))?;
    Ok(StatusCode::from_u16(code)?)
}

fn duration(message: Option<impl TryInto<Duration>>) -> Option<Duration> {
    message.and_then(|message| message.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let Protocol::Http1(routes) = policy.protocol else { panic!("not HTTP/1") };
        let Distribution::FirstAvailable(backends) = &routes[0].rules[0].1.backends else { panic!("not first") };
        let expected = BackendKind::Balance { path: "web.demo:80".to_owned(), load: PeakEwma::DEFAULT };
        assert_eq!(backends[0].backend.kind, expected);
    }

    #[test]
    fn what_lacks_a_part_is_an_error() {
        assert!(Policy::read(outbound::OutboundPolicy::default()).is_err());
        assert!(Policy::read(http1(outbound::http_route::Rule::default())).is_err());
        let rule = outbound::http_route::Rule { backends: first(outbound::Backend::default()), ..Default::default() };
        assert!(Policy::read(http1(rule)).is_err());
    }

    #[test]
    fn an_unknown_filter_is_invalid_and_not_ignored() {
        let rule = outbound::http_route::Rule {
            backends: first(balancer("web.demo:80")),
            filters: vec![outbound::http_route::Filter { kind: None }],
            ..Default::default()
        };
        let Protocol::Http1(routes) = Policy::read(http1(rule)).unwrap().protocol else { panic!("not HTTP/1") };
        assert!(matches!(routes[0].rules[0].1.filters[..], [Filter::Invalid]));
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
}
