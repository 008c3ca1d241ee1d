//! Parses the policy controller's messages. A part that cannot be parsed makes the whole answer unusable, because a
//! policy with a part left out may allow clients that it was written to deny.

use std::{collections::HashMap, num::NonZeroU32, sync::Arc, time::Duration};

use ipnet::IpNet;
use weft_proto::linkerd::{inbound as proto, meta, net};

use super::{
    authz::{Authentication, Authorization, Network, Suffix},
    limit::{Override, RateLimit},
    server::{HttpPolicy, Protocol, RouteDetails, ServerPolicy},
};
use crate::route::{
    Meta, Route,
    expression::Expressions,
    filter::Filter,
    proto::{self as routes, ReadRouteError},
};

/// Why an answer cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PolicyError {
    /// A required part is absent.
    #[error("the policy's {0} is missing")]
    Missing(&'static str),
    /// A network is malformed.
    #[error("the policy has an invalid network")]
    Network(#[from] net::InvalidIpNetwork),
    /// A route or a duration cannot be parsed.
    #[error("the policy cannot be used")]
    Route(#[from] ReadRouteError),
}

/// The policy of a port for which this message has arrived: one that cannot be parsed denies every client.
pub(crate) fn in_force(message: proto::Server, port: u16, detect_timeout: Duration) -> ServerPolicy {
    server(message, detect_timeout).unwrap_or_else(|error| {
        let error: &dyn std::error::Error = &error;
        tracing::error!(
            port,
            error,
            "policy cannot be read, denying every client: are the controller and the proxy of compatible versions?"
        );
        ServerPolicy::denied("invalid-policy", detect_timeout)
    })
}

/// Parses one port's policy; `detect_timeout` applies if the message has none.
pub(crate) fn server(server: proto::Server, detect_timeout: Duration) -> Result<ServerPolicy, PolicyError> {
    use proto::proxy_protocol::Kind;
    let all = &Arc::from(with_localhost(authorizations(server.authorizations)?));
    let kind = server.protocol.and_then(|protocol| protocol.kind).ok_or(PolicyError::Missing("protocol"))?;
    let protocol = match kind {
        Kind::Detect(detect) => Protocol::Detect {
            timeout: routes::duration(detect.timeout, "detection timeout")?.unwrap_or(detect_timeout),
            http: http(detect.http_routes, detect.http_local_rate_limit, all)?,
        },
        Kind::Http1(http1) => Protocol::Http1(http(http1.routes, http1.local_rate_limit, all)?),
        Kind::Http2(http2) => Protocol::Http2(http(http2.routes, http2.local_rate_limit, all)?),
        Kind::Grpc(grpc) => Protocol::Grpc(grpc_routes(grpc.routes, all)?),
        Kind::Opaque(_) => Protocol::Opaque,
        Kind::Tls(_) => Protocol::Tls,
    };
    let meta = Arc::new(from_labels(&server.labels));
    Ok(ServerPolicy { meta, protocol, authorizations: Arc::clone(all) })
}

fn http(
    routes: Vec<proto::HttpRoute>,
    limit: Option<proto::HttpLocalRateLimit>,
    server: &Arc<[Authorization]>,
) -> Result<HttpPolicy, PolicyError> {
    let limit = limit.map(rate_limit).transpose()?.map(Arc::new);
    let (mut all, mut all_details) = (Vec::new(), Vec::new());
    let mut expressions = Expressions::new();
    for route in routes {
        let mut rules = Vec::new();
        for rule in route.rules {
            let filters = rule.filters.into_iter().map(http_filter).collect::<Result<_, _>>()?;
            rules.push(routes::http_rule(rule.matches, filters, &mut expressions)?);
        }
        all.push(Route { hosts: routes::hosts(route.hosts)?, rules });
        all_details.push(details(route.metadata, route.authorizations, server)?);
    }
    Ok(HttpPolicy::new(all, all_details, limit))
}

fn grpc_routes(routes: Vec<proto::GrpcRoute>, server: &Arc<[Authorization]>) -> Result<HttpPolicy, PolicyError> {
    let (mut all, mut all_details) = (Vec::new(), Vec::new());
    let mut expressions = Expressions::new();
    for route in routes {
        let mut rules = Vec::new();
        for rule in route.rules {
            let filters = rule.filters.into_iter().map(grpc_filter).collect::<Result<_, _>>()?;
            rules.push(routes::grpc_rule(rule.matches, filters, &mut expressions)?);
        }
        all.push(Route { hosts: routes::hosts(route.hosts)?, rules });
        all_details.push(details(route.metadata, route.authorizations, server)?);
    }
    Ok(HttpPolicy::new(all, all_details, None))
}

/// A route's authorizations add to the server's.
fn details(
    metadata: Option<meta::Metadata>,
    own: Vec<proto::Authz>,
    server: &Arc<[Authorization]>,
) -> Result<RouteDetails, PolicyError> {
    let meta = routes::meta(metadata).unwrap_or_else(|| Meta::built_in("default"));
    let own = with_localhost(authorizations(own)?);
    Ok(RouteDetails { meta: Arc::new(meta), own, of_server: Arc::clone(server) })
}

fn http_filter(filter: proto::http_route::Filter) -> Result<Filter, ReadRouteError> {
    use proto::http_route::filter::Kind;
    match filter.kind {
        None => Ok(Filter::Unknown),
        Some(Kind::FailureInjector(message)) => Filter::http_failure(message),
        Some(Kind::RequestHeaderModifier(message)) => Filter::request_headers(message),
        Some(Kind::Redirect(message)) => Filter::redirect(message),
    }
}

fn grpc_filter(filter: proto::grpc_route::Filter) -> Result<Filter, ReadRouteError> {
    use proto::grpc_route::filter::Kind;
    match filter.kind {
        None => Ok(Filter::Unknown),
        Some(Kind::FailureInjector(message)) => Filter::grpc_failure(message),
        Some(Kind::RequestHeaderModifier(message)) => Filter::request_headers(message),
    }
}

fn with_localhost(mut authorizations: Vec<Authorization>) -> Vec<Authorization> {
    authorizations.insert(0, Authorization::localhost());
    authorizations
}

/// Authorizations without networks are left out: they allow no client.
fn authorizations(messages: Vec<proto::Authz>) -> Result<Vec<Authorization>, PolicyError> {
    let mut all = Vec::with_capacity(messages.len());
    for message in messages {
        if message.networks.is_empty() {
            continue;
        }
        let named = routes::meta(message.metadata);
        all.push(Authorization {
            networks: message.networks.into_iter().map(network).collect::<Result<_, _>>()?,
            authentication: authentication(message.authentication)?,
            meta: Arc::new(named.unwrap_or_else(|| from_labels(&message.labels))),
        });
    }
    Ok(all)
}

fn network(message: proto::Network) -> Result<Network, PolicyError> {
    let net = IpNet::try_from(message.net.ok_or(PolicyError::Missing("network"))?)?;
    let except = message.except.into_iter().map(IpNet::try_from).collect::<Result<_, _>>()?;
    Ok(Network { net, except })
}

fn authentication(message: Option<proto::Authn>) -> Result<Authentication, PolicyError> {
    use proto::authn::{Permit, permit_mesh_tls::Clients};
    match message.and_then(|authn| authn.permit).ok_or(PolicyError::Missing("authentication"))? {
        Permit::Unauthenticated(_) => Ok(Authentication::Unauthenticated),
        Permit::MeshTls(tls) => match tls.clients.ok_or(PolicyError::Missing("mesh TLS clients"))? {
            Clients::Unauthenticated(_) => Ok(Authentication::TlsUnauthenticated),
            Clients::Identities(clients) => Ok(Authentication::TlsIdentities {
                identities: clients.identities.into_iter().map(identity).collect(),
                suffixes: clients.suffixes.iter().map(|suffix| Suffix::from_labels(&suffix.parts)).collect(),
            }),
        },
    }
}

/// DNS names are compared in lower case; URIs unchanged.
fn identity(message: proto::Identity) -> Box<str> {
    if message.name.contains("://") { message.name.into() } else { message.name.to_ascii_lowercase().into() }
}

/// A rate of 0 does not limit, as in linkerd2-proxy.
fn rate_limit(message: proto::HttpLocalRateLimit) -> Result<RateLimit, PolicyError> {
    let rate = |limit: proto::http_local_rate_limit::Limit| NonZeroU32::new(limit.requests_per_second);
    let meta = routes::meta(message.metadata).unwrap_or_default();
    let mut overrides = Vec::new();
    for message in message.overrides {
        let Some(limit) = rate(message.limit.ok_or(PolicyError::Missing("rate limit override"))?) else { continue };
        let clients = message.clients.map(|clients| clients.identities).unwrap_or_default();
        overrides.push(Override::new(clients.into_iter().map(identity).collect(), limit));
    }
    let (total, per_identity) = (message.total.and_then(rate), message.identity.and_then(rate));
    Ok(RateLimit::new(Arc::new(meta), total, per_identity, overrides))
}

fn from_labels(labels: &HashMap<String, String>) -> Meta {
    let get = |key: &str| labels.get(key).map(String::as_str).unwrap_or_default().into();
    let kind = labels.get("kind").map_or("default", String::as_str).into();
    Meta { group: get("group"), kind, name: get("name"), ..Meta::default() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proto::authn::{self, Permit, PermitMeshTls, permit_mesh_tls};
    use weft_proto::linkerd::http_route;

    fn all_networks() -> Vec<proto::Network> {
        ["0.0.0.0/0", "::/0"]
            .map(|net| proto::Network { net: Some(net.parse::<IpNet>().unwrap().into()), except: Vec::new() })
            .to_vec()
    }

    /// A message that allows `permit`, from everywhere.
    pub(crate) fn authz(name: &str, permit: Permit) -> proto::Authz {
        let kind = Some(meta::metadata::Kind::Default(name.into()));
        proto::Authz {
            networks: all_networks(),
            authentication: Some(proto::Authn { permit: Some(permit) }),
            metadata: Some(meta::Metadata { kind }),
            labels: HashMap::new(),
        }
    }

    /// Any client.
    pub(crate) fn anybody() -> Permit {
        Permit::Unauthenticated(authn::PermitUnauthenticated {})
    }

    /// Clients with these identities.
    pub(crate) fn only(names: &[&str]) -> Permit {
        let identities = names.iter().map(|name| proto::Identity { name: (*name).into() }).collect();
        let clients = permit_mesh_tls::PermitClientIdentities { identities, suffixes: Vec::new() };
        Permit::MeshTls(PermitMeshTls { clients: Some(permit_mesh_tls::Clients::Identities(clients)) })
    }

    /// A server with one default route and a probe route, as from the control plane.
    pub(crate) fn detecting(authorizations: Vec<proto::Authz>) -> proto::Server {
        let route = |name: &str, kind, method: Option<http::Method>, authorizations| proto::HttpRoute {
            metadata: Some(meta::Metadata { kind: Some(meta::metadata::Kind::Default(name.into())) }),
            hosts: Vec::new(),
            authorizations,
            rules: vec![proto::http_route::Rule {
                matches: vec![http_route::HttpRouteMatch {
                    path: Some(http_route::PathMatch { kind: Some(kind) }),
                    method: method.map(Into::into),
                    ..Default::default()
                }],
                filters: Vec::new(),
            }],
        };
        let everything = route("default", http_route::path_match::Kind::Prefix("/".into()), None, Vec::new());
        let probes = vec![authz("probe", anybody())];
        let probe =
            route("probe", http_route::path_match::Kind::Exact("/healthz".into()), Some(http::Method::GET), probes);
        let detect = proto::proxy_protocol::Detect {
            timeout: Some(prost_duration(Duration::from_secs(10))),
            http_routes: vec![everything, probe],
            http_local_rate_limit: None,
        };
        proto::Server {
            protocol: Some(proto::ProxyProtocol { kind: Some(proto::proxy_protocol::Kind::Detect(detect)) }),
            server_ips: Vec::new(),
            authorizations,
            labels: HashMap::from([("kind".into(), "server".into()), ("name".into(), "web".into())]),
        }
    }

    /// A server whose port is opaque.
    pub(crate) fn opaque(authorizations: Vec<proto::Authz>) -> proto::Server {
        let kind = proto::proxy_protocol::Kind::Opaque(proto::proxy_protocol::Opaque {});
        proto::Server { protocol: Some(proto::ProxyProtocol { kind: Some(kind) }), ..detecting(authorizations) }
    }

    /// The servers of HTTP/1, HTTP/2 and gRPC, without detection, with the routes of [`detecting`].
    pub(crate) fn http_only(authorizations: Vec<proto::Authz>) -> [proto::Server; 3] {
        use proto::proxy_protocol::{Detect, Grpc, Http1, Http2, Kind};
        let whole = detecting(authorizations);
        let Some(Kind::Detect(Detect { http_routes: routes, .. })) =
            whole.protocol.clone().and_then(|protocol| protocol.kind)
        else {
            unreachable!("detecting() detects");
        };
        [
            Kind::Http1(Http1 { routes: routes.clone(), local_rate_limit: None }),
            Kind::Http2(Http2 { routes, local_rate_limit: None }),
            Kind::Grpc(Grpc { routes: Vec::new() }),
        ]
        .map(|kind| proto::Server { protocol: Some(proto::ProxyProtocol { kind: Some(kind) }), ..whole.clone() })
    }

    fn prost_duration<D: TryFrom<Duration>>(duration: Duration) -> D {
        D::try_from(duration).ok().expect("a short duration")
    }

    fn convert(message: proto::Server) -> Result<ServerPolicy, PolicyError> {
        server(message, Duration::from_secs(1))
    }

    #[test]
    fn a_routes_authorizations_add_to_the_servers() {
        let policy = convert(detecting(vec![authz("web", only(&["web.demo"]))])).unwrap();
        let http = policy.http().unwrap();
        let found = |method: &str, path: &str| {
            let request = http::Request::builder().method(method).uri(path).body(()).unwrap();
            let matched = http.find(&request).unwrap();
            (matched.details.meta.name.to_string(), matched.details.own.len() + matched.details.of_server.len())
        };
        // Each list begins with localhost.
        assert_eq!(found("GET", "/healthz"), ("probe".into(), 4));
        assert_eq!(found("POST", "/healthz"), ("default".into(), 3));
        assert_eq!(found("GET", "/"), ("default".into(), 3));
        assert_eq!(policy.authorizations.len(), 2, "its own and localhost's");
        assert_eq!((&*policy.meta.kind, &*policy.meta.name), ("server", "web"));
    }

    #[test]
    fn what_cannot_be_read_is_an_error_and_never_laxer() {
        let whole = || detecting(vec![authz("a", anybody())]);
        assert!(convert(whole()).is_ok());
        assert!(convert(proto::Server { protocol: None, ..whole() }).is_err());
        let mut no_authn = whole();
        no_authn.authorizations[0].authentication = None;
        assert!(matches!(convert(no_authn), Err(PolicyError::Missing("authentication"))));
        let mut no_clients = whole();
        let permit = Permit::MeshTls(PermitMeshTls { clients: None });
        no_clients.authorizations[0].authentication = Some(proto::Authn { permit: Some(permit) });
        assert!(convert(no_clients).is_err());
        let mut bad_network = whole();
        bad_network.authorizations[0].networks[0].net = None;
        assert!(convert(bad_network).is_err());
    }

    #[test]
    fn routes_share_the_authorizations_of_their_server() {
        let policy = convert(detecting(vec![authz("web", only(&["web.demo"]))])).unwrap();
        let details = &policy.http().unwrap().details;
        assert!(details.len() > 1 && details.iter().all(|of| Arc::ptr_eq(&of.of_server, &policy.authorizations)));
    }

    #[test]
    fn an_authorization_without_networks_lets_nobody_in() {
        let mut message = detecting(vec![authz("a", anybody())]);
        message.authorizations[0].networks.clear();
        assert_eq!(*convert(message).unwrap().authorizations, [Authorization::localhost()]);
    }

    #[test]
    fn a_rate_of_zero_does_not_limit() {
        use proto::http_local_rate_limit::{Limit, Override};
        let none = || Some(Limit { requests_per_second: 0 });
        let message = proto::HttpLocalRateLimit {
            total: none(),
            identity: none(),
            overrides: vec![Override { limit: none(), clients: None }],
            ..Default::default()
        };
        let limit = rate_limit(message.clone()).unwrap();
        let now = tokio::time::Instant::now();
        assert!((0..1000).all(|_| limit.check(None, now).is_ok()));
        let limited = proto::HttpLocalRateLimit { total: Some(Limit { requests_per_second: 1 }), ..message };
        let limit = rate_limit(limited).unwrap();
        assert_eq!((0..1000).filter(|_| limit.check(None, now).is_ok()).count(), 1);
    }

    #[test]
    fn an_unreadable_detection_timeout_is_an_error() {
        let with = |nanos| {
            let mut message = detecting(Vec::new());
            let kind = message.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut());
            let Some(proto::proxy_protocol::Kind::Detect(detect)) = kind else { panic!("not detecting") };
            let mut timeout = detect.timeout.unwrap();
            (timeout.seconds, timeout.nanos) = (0, nanos);
            detect.timeout = Some(timeout);
            convert(message)
        };
        assert!(with(1).is_ok());
        assert!(with(-1).is_err());
    }

    #[test]
    fn an_unknown_filter_fails_requests_and_leaves_the_other_rules_alone() {
        let mut message = detecting(Vec::new());
        let kind = message.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut());
        let Some(proto::proxy_protocol::Kind::Detect(detect)) = kind else { panic!("not detecting") };
        detect.http_routes[0].rules[0].filters.push(proto::http_route::Filter { kind: None });
        let policy = convert(message).unwrap();
        let filters = |path: &str| {
            let request = http::Request::builder().uri(path).body(()).unwrap();
            policy.http().unwrap().find(&request).unwrap().filters.len()
        };
        assert_eq!((filters("/"), filters("/healthz")), (1, 0));
    }
}
