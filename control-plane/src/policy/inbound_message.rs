//! Inbound policies as messages.

use std::{collections::HashMap, sync::Arc};

use http::StatusCode;
use prost::Message as _;
use weft_k8s_api::policy::{
    IdentityMatch, Network,
    route::{Filter, GrpcMatch, HttpMatch},
};
use weft_proto::linkerd::{
    grpc_route::{GrpcFailureInjector, GrpcRouteMatch},
    http_route::{HttpFailureInjector, HttpRouteMatch, PathMatch, path_match},
    http_types::{HttpMethod, http_method},
    inbound::{
        self, Authn, Authz, GrpcRoute, HttpLocalRateLimit, HttpRoute, Identity, IdentitySuffix, ProxyProtocol, Server,
        authn::{Permit, PermitMeshTls, PermitUnauthenticated, permit_mesh_tls},
        grpc_route,
        http_local_rate_limit::{Limit, Override, r#override::ClientIdentities},
        http_route,
        proxy_protocol::{self, Kind},
    },
    meta::{Metadata, Resource},
};

use super::{DETECT_TIMEOUT, default_metadata, labels, resource_metadata, route_message};
use weft_index::{
    Authentication, Authorization, InboundRateLimit, InboundRoute, InboundRoutes, InboundServer, Origin, RouteId,
    ServerPolicy, ServerProtocol,
};

/// The largest message in bytes that gRPC's clients take unless they ask for more, as no proxy does.
const LARGEST_MESSAGE: usize = 4 << 20;
/// API group of Server and AuthorizationPolicy in labels.
const GROUP: &str = weft_k8s_api::policy::GROUP;
/// The gRPC status INTERNAL.
const GRPC_INTERNAL: u32 = 13;

/// The message of a port's policy. One that is too large for proxies would leave them with their last or default
/// policy: they get one that admits nothing but probes, and that has the same protocol.
pub(super) fn server(server: &InboundServer) -> Server {
    let message = unbounded(server);
    let bytes = message.encoded_len();
    if bytes <= LARGEST_MESSAGE {
        return message;
    }
    tracing::error!(
        server = message.labels.get("name"),
        bytes,
        "the policy of a Server is too large for proxies, which deny every client: have fewer or smaller routes and \
         authorizations apply to it"
    );
    let policy = ServerPolicy {
        authorizations: Vec::new(),
        routes: InboundRoutes::Default,
        rate_limit: None,
        ..(*server.policy).clone()
    };
    unbounded(&InboundServer { policy: Arc::new(policy), probe_paths: server.probe_paths.clone() })
}

fn unbounded(server: &InboundServer) -> Server {
    let policy = &server.policy;
    let http = || http_routes(server);
    let limit = || policy.rate_limit.as_ref().map(rate_limit);
    let kind = match policy.protocol {
        ServerProtocol::Detect => Kind::Detect(proxy_protocol::Detect {
            timeout: DETECT_TIMEOUT.try_into().ok(),
            http_routes: http(),
            http_local_rate_limit: limit(),
        }),
        ServerProtocol::Http1 => Kind::Http1(proxy_protocol::Http1 { routes: http(), local_rate_limit: limit() }),
        ServerProtocol::Http2 => Kind::Http2(proxy_protocol::Http2 { routes: http(), local_rate_limit: limit() }),
        // Linkerd's API has no rate limit of gRPC.
        ServerProtocol::Grpc => Kind::Grpc(proxy_protocol::Grpc { routes: grpc_routes(&policy.routes) }),
        ServerProtocol::Opaque => Kind::Opaque(proxy_protocol::Opaque {}),
        ServerProtocol::Tls => Kind::Tls(proxy_protocol::Tls {}),
    };
    Server {
        protocol: Some(ProxyProtocol { kind: Some(kind) }),
        server_ips: Vec::new(),
        labels: origin_labels(&policy.origin),
        authorizations: policy.authorizations.iter().map(authz).collect(),
    }
}

/// The attached routes, or else the default ones.
fn http_routes(server: &InboundServer) -> Vec<HttpRoute> {
    match &server.policy.routes {
        InboundRoutes::Http(routes) => routes.iter().map(http_route).collect(),
        InboundRoutes::Default | InboundRoutes::Grpc(_) => default_http_routes(server),
    }
}

/// A route for all requests, and one for the probes of the kubelet, which has no identity. Proxies add the Server's
/// authorizations to those of each route, so that a default route needs none of its own.
fn default_http_routes(server: &InboundServer) -> Vec<HttpRoute> {
    let probe_networks = &server.policy.probe_networks;
    let all = HttpRoute {
        metadata: Some(default_metadata("default")),
        authorizations: Vec::new(),
        rules: vec![http_route::Rule {
            matches: vec![path(path_match::Kind::Prefix("/".to_owned()))],
            filters: Vec::new(),
        }],
        hosts: Vec::new(),
    };
    if server.probe_paths.is_empty() || probe_networks.is_empty() {
        return vec![all];
    }
    let get = HttpMethod { r#type: Some(http_method::Type::Registered(http_method::Registered::Get.into())) };
    let exact =
        |probe: &String| HttpRouteMatch { method: Some(get.clone()), ..path(path_match::Kind::Exact(probe.clone())) };
    let probes = HttpRoute {
        metadata: Some(default_metadata("probe")),
        authorizations: vec![Authz {
            networks: probe_networks
                .iter()
                .map(|net| inbound::Network { net: Some((*net).into()), except: Vec::new() })
                .collect(),
            authentication: Some(unauthenticated()),
            labels: labels([("group", ""), ("kind", "default"), ("name", "probe")]),
            metadata: Some(default_metadata("probe")),
        }],
        rules: vec![http_route::Rule { matches: server.probe_paths.iter().map(exact).collect(), filters: Vec::new() }],
        hosts: Vec::new(),
    };
    vec![all, probes]
}

fn http_route(route: &InboundRoute<HttpMatch>) -> HttpRoute {
    let rules = route.rules.iter().map(|rule| http_route::Rule {
        matches: rule.matches.iter().map(route_message::http_match).collect(),
        filters: rule.filters.iter().filter_map(http_filter).collect(),
    });
    HttpRoute {
        metadata: Some(route_metadata(&route.id)),
        hosts: route.hosts.iter().map(route_message::host).collect(),
        authorizations: route.authorizations.iter().map(authz).collect(),
        rules: rules.collect(),
    }
}

fn http_filter(filter: &Filter) -> Option<http_route::Filter> {
    use http_route::filter::Kind;
    let kind = match filter {
        Filter::RequestHeaders(modifier) => Kind::RequestHeaderModifier(route_message::request_headers(modifier)),
        Filter::Redirect(redirect) => Kind::Redirect(route_message::redirect(redirect)),
        // What a request would be without the filter is not known: all of the rule's fail.
        Filter::Unsupported(name) => Kind::FailureInjector(HttpFailureInjector {
            status: StatusCode::INTERNAL_SERVER_ERROR.as_u16().into(),
            message: unsupported(name),
            ratio: None,
        }),
        // Proxies have no such filter inbound; Linkerd leaves it out as well.
        Filter::ResponseHeaders(_) => return None,
    };
    Some(http_route::Filter { kind: Some(kind) })
}

/// The attached routes, or else the default one.
fn grpc_routes(routes: &InboundRoutes) -> Vec<GrpcRoute> {
    match routes {
        InboundRoutes::Grpc(routes) => routes.iter().map(grpc_route).collect(),
        InboundRoutes::Default | InboundRoutes::Http(_) => vec![default_grpc_route()],
    }
}

fn default_grpc_route() -> GrpcRoute {
    GrpcRoute {
        metadata: Some(default_metadata("default")),
        authorizations: Vec::new(),
        rules: vec![grpc_route::Rule { matches: vec![GrpcRouteMatch::default()], filters: Vec::new() }],
        hosts: Vec::new(),
    }
}

fn grpc_route(route: &InboundRoute<GrpcMatch>) -> GrpcRoute {
    let rules = route.rules.iter().map(|rule| grpc_route::Rule {
        matches: rule.matches.iter().map(route_message::grpc_match).collect(),
        filters: rule.filters.iter().filter_map(grpc_filter).collect(),
    });
    GrpcRoute {
        metadata: Some(route_metadata(&route.id)),
        hosts: route.hosts.iter().map(route_message::host).collect(),
        authorizations: route.authorizations.iter().map(authz).collect(),
        rules: rules.collect(),
    }
}

fn grpc_filter(filter: &Filter) -> Option<grpc_route::Filter> {
    use grpc_route::filter::Kind;
    let fail = |name: &str| {
        Kind::FailureInjector(GrpcFailureInjector { code: GRPC_INTERNAL, message: unsupported(name), ratio: None })
    };
    let kind = match filter {
        Filter::RequestHeaders(modifier) => Kind::RequestHeaderModifier(route_message::request_headers(modifier)),
        Filter::Unsupported(name) => fail(name),
        Filter::Redirect(_) => fail("RequestRedirect"),
        // Proxies have no such filter inbound; Linkerd leaves it out as well.
        Filter::ResponseHeaders(_) => return None,
    };
    Some(grpc_route::Filter { kind: Some(kind) })
}

fn unsupported(filter: &str) -> String {
    format!("the route has a filter {filter}, which is not supported")
}

fn rate_limit(limit: &InboundRateLimit) -> HttpLocalRateLimit {
    let rate = |requests_per_second: u32| Limit { requests_per_second };
    let overrides = limit.overrides.iter().map(|limit| Override {
        limit: Some(rate(limit.requests_per_second)),
        clients: Some(ClientIdentities {
            identities: limit.identities.iter().map(|name| Identity { name: name.clone() }).collect(),
        }),
    });
    HttpLocalRateLimit {
        // Not in lower case, as Linkerd's.
        metadata: Some(policy_metadata("HTTPLocalRateLimitPolicy", &limit.name)),
        total: limit.total.map(rate),
        identity: limit.identity.map(rate),
        overrides: overrides.collect(),
    }
}

fn path(kind: path_match::Kind) -> HttpRouteMatch {
    HttpRouteMatch { path: Some(PathMatch { kind: Some(kind) }), ..HttpRouteMatch::default() }
}

fn authz(authorization: &Authorization) -> Authz {
    Authz {
        networks: authorization.networks.iter().map(network).collect(),
        authentication: Some(authn(&authorization.authentication)),
        labels: origin_labels(&authorization.origin),
        metadata: Some(origin_metadata(&authorization.origin)),
    }
}

fn network(network: &Network) -> inbound::Network {
    inbound::Network {
        net: Some(network.cidr.0.into()),
        except: network.except.iter().flatten().map(|except| except.0.into()).collect(),
    }
}

fn authn(authentication: &Authentication) -> Authn {
    let all = match authentication {
        Authentication::Unauthenticated => return unauthenticated(),
        Authentication::Tls => return mesh_tls(permit_mesh_tls::Clients::Unauthenticated(PermitUnauthenticated {})),
        Authentication::Identities(all) => all,
    };
    let (mut identities, mut suffixes) = (Vec::new(), Vec::new());
    for identity in all {
        match identity {
            IdentityMatch::Exact(name) => identities.push(Identity { name: name.clone() }),
            IdentityMatch::Suffix(parts) => suffixes.push(IdentitySuffix { parts: parts.clone() }),
        }
    }
    mesh_tls(permit_mesh_tls::Clients::Identities(permit_mesh_tls::PermitClientIdentities { identities, suffixes }))
}

fn mesh_tls(clients: permit_mesh_tls::Clients) -> Authn {
    Authn { permit: Some(Permit::MeshTls(PermitMeshTls { clients: Some(clients) })) }
}

fn unauthenticated() -> Authn {
    Authn { permit: Some(Permit::Unauthenticated(PermitUnauthenticated {})) }
}

fn origin_labels(origin: &Origin) -> HashMap<String, String> {
    match origin {
        Origin::Default(name) => labels([("group", ""), ("kind", "default"), ("name", name)]),
        Origin::Server(name) => labels([("group", GROUP), ("kind", "server"), ("name", name)]),
        Origin::ServerAuthorization(name) => {
            labels([("group", GROUP), ("kind", "serverauthorization"), ("name", name)])
        }
        Origin::AuthorizationPolicy(name) => {
            labels([("group", GROUP), ("kind", "authorizationpolicy"), ("name", name)])
        }
    }
}

fn origin_metadata(origin: &Origin) -> Metadata {
    match origin {
        Origin::Default(name) => default_metadata(name),
        Origin::Server(name) => policy_metadata("server", name),
        Origin::ServerAuthorization(name) => policy_metadata("serverauthorization", name),
        Origin::AuthorizationPolicy(name) => policy_metadata("authorizationpolicy", name),
    }
}

fn policy_metadata(kind: &str, name: &str) -> Metadata {
    resource_metadata(Resource {
        group: GROUP.to_owned(),
        kind: kind.to_owned(),
        name: name.to_owned(),
        ..Resource::default()
    })
}

/// Group, kind and name of a route, without its namespace, as Linkerd's.
fn route_metadata(id: &RouteId) -> Metadata {
    resource_metadata(Resource {
        group: id.kind.group().to_owned(),
        kind: id.kind.name().to_owned(),
        name: id.key.name.clone(),
        ..Resource::default()
    })
}

#[cfg(test)]
mod tests;
