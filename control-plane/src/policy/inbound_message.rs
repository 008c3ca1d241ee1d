//! Inbound policies as messages.

use std::collections::HashMap;

use weft_k8s_api::policy::{IdentityMatch, Network};
use weft_proto::linkerd::{
    grpc_route::GrpcRouteMatch,
    http_route::{HttpRouteMatch, PathMatch, path_match},
    http_types::{HttpMethod, http_method},
    inbound::{
        self, Authn, Authz, GrpcRoute, HttpRoute, Identity, IdentitySuffix, ProxyProtocol, Server,
        authn::{Permit, PermitMeshTls, PermitUnauthenticated, permit_mesh_tls},
        grpc_route, http_route,
        proxy_protocol::{self, Kind},
    },
    meta::{Metadata, Resource},
};

use super::{DETECT_TIMEOUT, default_metadata, labels, resource_metadata};
use weft_index::{Authentication, Authorization, InboundServer, Origin, ServerProtocol};

/// API group of Server and AuthorizationPolicy in labels.
const GROUP: &str = weft_k8s_api::policy::GROUP;

/// The message of a port's policy.
pub(super) fn server(server: &InboundServer) -> Server {
    let authorizations: Vec<_> = server.authorizations.iter().map(authz).collect();
    let http = || http_routes(server);
    let kind = match server.protocol {
        ServerProtocol::Detect => Kind::Detect(proxy_protocol::Detect {
            timeout: DETECT_TIMEOUT.try_into().ok(),
            http_routes: http(),
            http_local_rate_limit: None,
        }),
        ServerProtocol::Http1 => Kind::Http1(proxy_protocol::Http1 { routes: http(), local_rate_limit: None }),
        ServerProtocol::Http2 => Kind::Http2(proxy_protocol::Http2 { routes: http(), local_rate_limit: None }),
        ServerProtocol::Grpc => Kind::Grpc(proxy_protocol::Grpc { routes: vec![grpc_route()] }),
        ServerProtocol::Opaque => Kind::Opaque(proxy_protocol::Opaque {}),
        ServerProtocol::Tls => Kind::Tls(proxy_protocol::Tls {}),
    };
    Server {
        protocol: Some(ProxyProtocol { kind: Some(kind) }),
        server_ips: Vec::new(),
        labels: origin_labels(&server.origin),
        authorizations,
    }
}

/// A route for all requests, and one for the probes of the kubelet, which has no identity. Proxies add the Server's
/// authorizations to those of each route, so that a default route needs none of its own.
fn http_routes(server: &InboundServer) -> Vec<HttpRoute> {
    let all = HttpRoute {
        metadata: Some(default_metadata("default")),
        authorizations: Vec::new(),
        rules: vec![http_route::Rule {
            matches: vec![path(path_match::Kind::Prefix("/".to_owned()))],
            filters: Vec::new(),
        }],
        hosts: Vec::new(),
    };
    if server.probe_paths.is_empty() || server.probe_networks.is_empty() {
        return vec![all];
    }
    let get = HttpMethod { r#type: Some(http_method::Type::Registered(http_method::Registered::Get.into())) };
    let exact =
        |probe: &String| HttpRouteMatch { method: Some(get.clone()), ..path(path_match::Kind::Exact(probe.clone())) };
    let probes = HttpRoute {
        metadata: Some(default_metadata("probe")),
        authorizations: vec![Authz {
            networks: server
                .probe_networks
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

fn grpc_route() -> GrpcRoute {
    GrpcRoute {
        metadata: Some(default_metadata("default")),
        authorizations: Vec::new(),
        rules: vec![grpc_route::Rule { matches: vec![GrpcRouteMatch::default()], filters: Vec::new() }],
        hosts: Vec::new(),
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
    let resource = |kind: &str, name: &str| {
        resource_metadata(Resource {
            group: GROUP.to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
            ..Resource::default()
        })
    };
    match origin {
        Origin::Default(name) => default_metadata(name),
        Origin::Server(name) => resource("server", name),
        Origin::ServerAuthorization(name) => resource("serverauthorization", name),
        Origin::AuthorizationPolicy(name) => resource("authorizationpolicy", name),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use ipnet::IpNet;

    use super::*;

    /// Names of the routes of a port with a probe.
    fn routes(probe_networks: Vec<IpNet>) -> Vec<String> {
        let answer = server(&InboundServer {
            origin: Origin::Default("deny"),
            protocol: ServerProtocol::Http1,
            authorizations: Vec::new(),
            probe_paths: vec!["/live".to_owned()],
            probe_networks,
        });
        let Some(Kind::Http1(http)) = answer.protocol.unwrap().kind else { panic!("the port speaks HTTP/1") };
        for authz in http.routes.iter().flat_map(|route| &route.authorizations) {
            assert!(!authz.networks.is_empty(), "stock proxies refuse an authorization without networks");
        }
        let name = |metadata: Option<Metadata>| match metadata.and_then(|metadata| metadata.kind) {
            Some(weft_proto::linkerd::meta::metadata::Kind::Default(name)) => name,
            other => panic!("{other:?}"),
        };
        http.routes.into_iter().map(|route| name(route.metadata)).collect()
    }

    #[test]
    fn probes_are_admitted_from_probe_networks_where_there_are_any() {
        let anywhere = IpNet::new_assert(Ipv4Addr::UNSPECIFIED.into(), 0);
        assert_eq!(routes(vec![anywhere]), ["default", "probe"]);
        assert_eq!(routes(Vec::new()), ["default"]);
    }
}
