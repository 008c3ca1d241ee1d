//! A port's policy, as a policy controller sends it.

use std::{net::IpAddr, sync::Arc, time::Duration};

use http::Request;
use ipnet::IpNet;
use prost::Message as _;
use tokio::time::Instant;
use weft_proto::linkerd::{
    inbound::{
        Authn, Authz, HttpRoute, Network, Server,
        authn::{Permit, permit_mesh_tls::Clients},
        proxy_protocol::Kind,
    },
    meta::metadata,
    net::IpNetwork,
};
use weft_tls::identity::Identity;

use super::routes::{self, Matches, Parts, SentRoute, SentRule};
use crate::{
    policy::{
        authz::{Client, ClientTls, NoTls, authorize},
        convert,
        server::{HttpPolicy, Protocol, ServerPolicy},
    },
    route::proto::MAX_DURATION,
};

const PORT: u16 = 8080;
/// Deadline of detection where a message has none.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The most networks and identities of a message from which clients are made.
const MAX_NAMED: usize = 6;

/// Reads a port's policy.
pub(super) fn policy(bytes: &[u8]) {
    let Ok(message) = Server::decode(bytes) else { return };
    let sent = Sent::of(&message);
    let clients = clients(&sent);
    let in_force = convert::in_force(message.clone(), PORT, DETECT_TIMEOUT);
    let Ok(read) = convert::server(message.clone(), DETECT_TIMEOUT) else { return check_denies(&in_force, &clients) };
    check_equal(&read, &in_force);
    check_unreadable_parts(&message, &read);
    check_clients(&sent, &read, &clients);
    if let Protocol::Detect { timeout, .. } = read.protocol {
        assert!(timeout <= MAX_DURATION, "{timeout:?}");
    }
    let Some(http) = read.http() else { return };
    routes::check_whole(&sent.routes, &http.routes, |filters| Parts { filters: filters.len(), backends: Vec::new() });
    for mut request in routes::requests(&sent.routes) {
        let found = http.find(&request).unwrap_or_else(|| panic!("no route for {request:?}"));
        // An application that reads paths in another way reads those of routes in that way, too. gRPC has plain names.
        if !read.is_grpc()
            && let Ok(otherwise) = http.find_otherwise(&request)
        {
            assert!(otherwise.iter().all(Option::is_some), "a reading without a route: {request:?}");
        }
        routes::apply(found.filters, found.prefix, &mut request);
    }
    if let Some(limit) = &http.limit {
        let (now, identity) = (Instant::now(), clients.iter().find_map(Client::identity));
        let _ = (limit.check(identity, now), limit.check(None, now));
    }
}

/// The parts of a message that do not depend on the protocol.
struct Sent<'a> {
    /// Whether clients can send nothing but requests: their protocol is HTTP, or a resource is about requests.
    is_http: bool,
    /// The server's authorizations.
    authorizations: &'a [Authz],
    /// Those of each route.
    of_routes: Vec<&'a [Authz]>,
    routes: Vec<SentRoute<'a>>,
}

impl<'a> Sent<'a> {
    fn of(message: &'a Server) -> Self {
        let kind = message.protocol.as_ref().and_then(|protocol| protocol.kind.as_ref());
        let parts = |filters| Parts { filters, backends: Vec::new() };
        let http: &[HttpRoute] = match kind {
            Some(Kind::Detect(detect)) => &detect.http_routes,
            Some(Kind::Http1(http1)) => &http1.routes,
            Some(Kind::Http2(http2)) => &http2.routes,
            Some(Kind::Grpc(_) | Kind::Opaque(_) | Kind::Tls(_)) | None => &[],
        };
        let grpc = match kind {
            Some(Kind::Grpc(grpc)) => &grpc.routes[..],
            _ => &[],
        };
        let of_http = http.iter().map(|route| {
            let rules = route
                .rules
                .iter()
                .map(|rule| SentRule { matches: Matches::Http(&rule.matches), parts: parts(rule.filters.len()) });
            SentRoute { hosts: &route.hosts, rules: rules.collect() }
        });
        let of_grpc = grpc.iter().map(|route| {
            let rules = route
                .rules
                .iter()
                .map(|rule| SentRule { matches: Matches::Grpc(&rule.matches), parts: parts(rule.filters.len()) });
            SentRoute { hosts: &route.hosts, rules: rules.collect() }
        });
        let of_routes = http.iter().map(|route| &route.authorizations[..]);
        Self {
            is_http: match kind {
                Some(Kind::Http1(_) | Kind::Http2(_) | Kind::Grpc(_)) => true,
                Some(Kind::Detect(detect)) => {
                    detect.http_local_rate_limit.is_some() || detect.http_routes.iter().any(is_resource)
                }
                Some(Kind::Opaque(_) | Kind::Tls(_)) | None => false,
            },
            authorizations: &message.authorizations,
            of_routes: of_routes.chain(grpc.iter().map(|route| &route.authorizations[..])).collect(),
            routes: of_http.chain(of_grpc).collect(),
        }
    }

    fn all_authorizations(&self) -> impl Iterator<Item = &'a Authz> {
        self.authorizations.iter().chain(self.of_routes.iter().copied().flatten())
    }
}

/// Whether a route is a resource, not generated by the control plane.
fn is_resource(route: &HttpRoute) -> bool {
    let kind = route.metadata.as_ref().and_then(|metadata| metadata.kind.as_ref());
    matches!(kind, Some(metadata::Kind::Resource(resource)) if resource.kind != "default")
}

/// No client gets in, not even one of the pod itself.
fn check_denies(policy: &ServerPolicy, clients: &[Client]) {
    let found = policy.http().and_then(|http| http.find(&Request::new(()))).expect("every request has a route");
    for client in clients {
        assert_eq!(policy.authorize_bytes(client), None, "{client:?}");
        assert_eq!(found.details.authorize(client), None, "{client:?}");
    }
}

/// What is read does not depend on anything but the message.
fn check_equal(one: &ServerPolicy, other: &ServerPolicy) {
    assert_eq!((&one.meta, &one.authorizations), (&other.meta, &other.authorizations));
    assert_eq!(one.http().map(|http| &http.details), other.http().map(|http| &http.details));
    let rest = |http: &HttpPolicy| format!("{:?} {:?}", http.routes, http.limit);
    assert_eq!(one.http().map(rest), other.http().map(rest));
}

/// With a part that cannot be read, the message is unreadable; with one that is for no client, it means the same.
fn check_unreadable_parts(message: &Server, read: &ServerPolicy) {
    let with = |authorization| {
        let mut message = message.clone();
        message.authorizations.push(authorization);
        convert::server(message, DETECT_TIMEOUT)
    };
    let everywhere = || vec![Network { net: Some(IpNet::default().into()), except: Vec::new() }];
    for authentication in [None, Some(Authn { permit: None })] {
        assert!(with(Authz { networks: everywhere(), authentication, ..Authz::default() }).is_err());
    }
    check_equal(&with(Authz::default()).expect("a readable policy"), read);
    assert!(convert::server(Server { protocol: None, ..message.clone() }, DETECT_TIMEOUT).is_err());
}

/// Those clients get in that an authorization of the message admits, and those of the pod itself.
fn check_clients(sent: &Sent<'_>, read: &ServerPolicy, clients: &[Client]) {
    let details = read.http().map_or(&[][..], |http| &http.details);
    assert_eq!(details.len(), sent.of_routes.len());
    assert!(details.iter().all(|route| Arc::ptr_eq(&route.of_server, &read.authorizations)), "copies for each route");
    for client in clients {
        let is_own = ["127.0.0.1", "::1"].contains(&&*client.addr.ip().to_string());
        let is_admitted = |authorizations: &[Authz]| authorizations.iter().any(|authz| admits(authz, client));
        let by_server = is_own || is_admitted(sent.authorizations);
        assert_eq!(authorize(&read.authorizations, client).is_some(), by_server, "{client:?}");
        assert_eq!(read.authorize_bytes(client).is_some(), by_server && !sent.is_http, "{client:?}");
        for (route, own) in details.iter().zip(&sent.of_routes) {
            assert_eq!(route.authorize(client).is_some(), by_server || is_admitted(own), "{client:?}");
        }
    }
}

/// Clients of the pod and of other addresses, also of those that a message names: without TLS, without a certificate,
/// and with identities, also with those that it names.
fn clients(sent: &Sent<'_>) -> Vec<Client> {
    let networks = sent.all_authorizations().flat_map(|authz| &authz.networks);
    let networks = networks.flat_map(|network| network.net.iter().chain(&network.except));
    let named = networks.filter_map(|net| Some(IpNet::try_from(*net).ok()?.addr())).take(MAX_NAMED);
    let ips = ["127.0.0.1", "::1", "10.0.0.1", "::ffff:10.0.0.1", "fd00::1"];
    let ips = ips.map(|ip| ip.parse::<IpAddr>().expect("an address")).into_iter().chain(named);
    let identities = sent.all_authorizations().flat_map(identities).take(MAX_NAMED);
    let identities = ["web.demo", "spiffe://root/web"].map(str::to_owned).into_iter().chain(identities);
    let identities = identities.filter_map(|name| name.parse::<Identity>().ok());
    let without = [ClientTls::None(NoTls::NotFromRemote), ClientTls::Passthrough, ClientTls::Established(None)];
    let tls = without.into_iter().chain(identities.map(|identity| ClientTls::Established(Some(identity))));
    let tls: Vec<_> = tls.collect();
    ips.flat_map(|ip| tls.iter().map(move |tls| Client { addr: (ip, 1).into(), tls: tls.clone() })).collect()
}

/// Names that an authorization admits.
fn identities(authz: &Authz) -> Vec<String> {
    let permit = authz.authentication.as_ref().and_then(|authn| authn.permit.as_ref());
    let Some(Permit::MeshTls(tls)) = permit else { return Vec::new() };
    let Some(Clients::Identities(clients)) = &tls.clients else { return Vec::new() };
    let suffixes = clients.suffixes.iter().map(|suffix| format!("any.{}", suffix.parts.join(".")));
    clients.identities.iter().map(|identity| identity.name.clone()).chain(suffixes).collect()
}

/// Whether an authorization of a message admits a client, by the description of Linkerd's API.
fn admits(authz: &Authz, client: &Client) -> bool {
    let ip = client.addr.ip().to_canonical();
    let is_in = |net: &IpNetwork| IpNet::try_from(*net).is_ok_and(|net| net.contains(&ip));
    let is_of = |network: &Network| network.net.iter().any(is_in) && !network.except.iter().any(is_in);
    if !authz.networks.iter().any(is_of) {
        return false;
    }
    let tls = match authz.authentication.as_ref().and_then(|authn| authn.permit.as_ref()) {
        Some(Permit::Unauthenticated(_)) => return true,
        Some(Permit::MeshTls(tls)) => tls.clients.as_ref(),
        None => None,
    };
    match (tls, &client.tls) {
        (Some(Clients::Unauthenticated(_)), ClientTls::Established(_)) => true,
        (Some(Clients::Identities(clients)), ClientTls::Established(Some(Identity::Uri(uri)))) => {
            clients.identities.iter().any(|wanted| *wanted.name == **uri)
        }
        (Some(Clients::Identities(clients)), ClientTls::Established(Some(Identity::Dns(name)))) => {
            clients.identities.iter().any(|wanted| wanted.name.eq_ignore_ascii_case(name))
                || clients.suffixes.iter().any(|suffix| suffix.parts.is_empty() || is_below(name, &suffix.parts))
        }
        _ => false,
    }
}

/// Whether a name has more labels than a suffix, and ends with those.
fn is_below(name: &str, suffix: &[String]) -> bool {
    let suffix = suffix.join(".");
    let mut labels = name.rsplit('.');
    let ends = suffix.rsplit('.').all(|wanted| labels.next().is_some_and(|label| label.eq_ignore_ascii_case(wanted)));
    ends && labels.next().is_some()
}
