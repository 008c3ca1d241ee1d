//! Policy of one port: protocol, routes, and allowed clients. Immutable: a change creates a new one.
//!
//! Owns the types and the default policies. Refuses to read messages (see [`super::convert`]).

use std::{sync::Arc, time::Duration};

use http::Request;
use ipnet::IpNet;

use super::{
    authz::{Authentication, Authorization, Client, Network, Suffix, authorize},
    limit::RateLimit,
};
use crate::{
    config::{Config, DefaultPolicy},
    route::{
        Meta, Route,
        filter::Filter,
        matching,
        readings::{self, DotSegment, Reading},
    },
};

/// One port's policy.
#[derive(Clone, Debug)]
pub(crate) struct ServerPolicy {
    /// The server resource.
    pub(crate) meta: Arc<Meta>,
    /// The protocol of the port.
    pub(crate) protocol: Protocol,
    /// The allowed clients.
    pub(crate) authorizations: Arc<[Authorization]>,
}

/// The protocol of a port.
#[derive(Clone, Debug)]
pub(crate) enum Protocol {
    /// HTTP if the client's first bytes are HTTP, otherwise opaque.
    Detect {
        /// Deadline for the first bytes.
        timeout: Duration,
        /// Policy of HTTP requests.
        http: HttpPolicy,
    },
    /// HTTP/1.
    Http1(HttpPolicy),
    /// HTTP/2.
    Http2(HttpPolicy),
    /// gRPC.
    Grpc(HttpPolicy),
    /// Bytes; TLS is not detected.
    Opaque,
    /// The application's own TLS.
    Tls,
}

/// Policy of HTTP requests.
#[derive(Clone, Debug)]
pub(crate) struct HttpPolicy {
    /// The routes, with their filters.
    pub(crate) routes: Vec<Route<Vec<Filter>>>,
    /// Name and authorizations of each route, by the same index.
    pub(crate) details: Vec<RouteDetails>,
    /// The routes as each reading has their paths, by its index; empty if all have them alike.
    by_reading: Vec<Vec<Route<()>>>,
    /// The rate limit.
    pub(crate) limit: Option<Arc<RateLimit>>,
}

/// A route's name and authorizations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RouteDetails {
    /// The route resource.
    pub(crate) meta: Arc<Meta>,
    /// The route's own authorizations.
    pub(crate) own: Vec<Authorization>,
    /// The server's, which all its routes share.
    pub(crate) of_server: Arc<[Authorization]>,
}

/// The route that a request takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matched<'a> {
    /// The route's index.
    pub(crate) index: usize,
    /// Its name and authorizations.
    pub(crate) details: &'a RouteDetails,
    /// The filters of its rule.
    pub(crate) filters: &'a [Filter],
    /// How many bytes of the path the rule's prefix matched, if it matched by prefix.
    pub(crate) prefix: Option<usize>,
}

impl RouteDetails {
    /// The authorization that allows a client, the route's own first; `None` denies.
    pub(crate) fn authorize(&self, client: &Client) -> Option<&Arc<Meta>> {
        authorize(&self.own, client).or_else(|| authorize(&self.of_server, client))
    }
}

impl ServerPolicy {
    /// Policy of HTTP requests, if the protocol is HTTP.
    pub(crate) fn http(&self) -> Option<&HttpPolicy> {
        match &self.protocol {
            Protocol::Detect { http, .. } | Protocol::Http1(http) | Protocol::Http2(http) | Protocol::Grpc(http) => {
                Some(http)
            }
            Protocol::Opaque | Protocol::Tls => None,
        }
    }

    /// Whether requests are gRPC, and have metrics of their own.
    pub(crate) fn is_grpc(&self) -> bool {
        matches!(self.protocol, Protocol::Grpc(_))
    }

    /// Whether bytes may be forwarded unchanged. A port of HTTP forwards none, and one with detection only while no
    /// resource says anything about its requests: routes, filters and limits would not see them.
    pub(crate) fn takes_bytes(&self) -> bool {
        match &self.protocol {
            Protocol::Detect { http, .. } => http.is_default(),
            Protocol::Opaque | Protocol::Tls => true,
            Protocol::Http1(_) | Protocol::Http2(_) | Protocol::Grpc(_) => false,
        }
    }

    /// The authorization of a client whose bytes are forwarded unchanged.
    pub(crate) fn authorize_bytes(&self, client: &Client) -> Option<&Arc<Meta>> {
        if self.takes_bytes() { authorize(&self.authorizations, client) } else { None }
    }

    /// A port's policy if the controller has none.
    pub(crate) fn default_for(config: &Config, port: u16) -> Self {
        let (name, grant) = grant(config.inbound.default_policy);
        let meta = Arc::new(Meta::built_in(name));
        let authorizations: Arc<[Authorization]> = grant
            .map(|(source, authentication)| Authorization {
                networks: match source {
                    Source::All => all_networks(),
                    Source::Cluster => config.policy.cluster_networks.iter().copied().map(Network::from).collect(),
                },
                authentication,
                meta: Arc::clone(&meta),
            })
            .into_iter()
            .collect();
        let protocol = if config.inbound.opaque_ports.contains(&port) {
            Protocol::Opaque
        } else {
            let timeout = config.inbound.detect_timeout;
            Protocol::Detect { timeout, http: HttpPolicy::one_route(&authorizations) }
        };
        Self { meta, protocol, authorizations }
    }

    /// The policy in force if no answer can be used: every client is denied. `name` is the reason, for log and
    /// metrics.
    pub(crate) fn denied(name: &str, detect_timeout: Duration) -> Self {
        let protocol = Protocol::Detect { timeout: detect_timeout, http: HttpPolicy::one_route(&Arc::default()) };
        Self { meta: Arc::new(Meta::built_in(name)), protocol, authorizations: Arc::default() }
    }

    /// Whether it denies every client, the pod itself included: no answer that can be read does.
    pub(crate) fn is_denied(&self) -> bool {
        self.authorizations.is_empty()
    }
}

impl HttpPolicy {
    /// The policy of these routes, whose details have the same index.
    pub(crate) fn new(
        routes: Vec<Route<Vec<Filter>>>,
        details: Vec<RouteDetails>,
        limit: Option<Arc<RateLimit>>,
    ) -> Self {
        let by_reading = if routes.iter().all(Route::is_read_alike) {
            Vec::new()
        } else {
            Reading::all().map(|reading| routes.iter().map(|route| route.read(reading)).collect()).collect()
        };
        Self { routes, details, by_reading, limit }
    }

    /// One route that matches everything, with the server's own authorizations.
    pub(crate) fn one_route(authorizations: &Arc<[Authorization]>) -> Self {
        let (meta, of_server) = (Arc::new(Meta::built_in("default")), Arc::clone(authorizations));
        let details = RouteDetails { meta, own: Vec::new(), of_server };
        Self::new(vec![Route::catch_all(Vec::new())], vec![details], None)
    }

    /// Whether no resource says anything about requests: there are no routes but those that the control plane or the
    /// proxy generated, and no limit.
    fn is_default(&self) -> bool {
        self.limit.is_none() && !self.has_routes()
    }

    /// Whether a route is a resource, not generated by the control plane or the proxy.
    fn has_routes(&self) -> bool {
        self.details.iter().any(|route| !route.meta.is_default())
    }

    /// The routes that a request takes if its application reads paths in another way than routes do; `None` where
    /// there is no route then. Each reading applies to the request's path and to those of routes, so that a route
    /// whose own path is encoded keeps its requests. There are none where all routes are generated.
    ///
    /// # Errors
    /// [`DotSegment`].
    pub(crate) fn find_otherwise<B>(&self, request: &Request<B>) -> Result<Vec<Option<&RouteDetails>>, DotSegment> {
        if !self.has_routes() {
            return Ok(Vec::new());
        }
        let path = request.uri().path();
        let mut readings = readings::of(path)?;
        if self.by_reading.is_empty() {
            readings.dedup_by(|one, other| one.1 == other.1);
        } else if readings.iter().all(|(reading, _)| *reading != Reading::DECODED) {
            // The path is its own decoded form, and may be that of a route as well.
            readings.push((Reading::DECODED, path.to_owned()));
        }
        let route = |(reading, path): &(Reading, String)| {
            let found = match self.by_reading.get(reading.index()) {
                Some(routes) => matching::find_with_path(routes, request, path),
                None => matching::find_with_path(&self.routes, request, path),
            };
            self.details.get(found?.route)
        };
        Ok(readings.iter().map(route).collect())
    }

    /// Finds the route of a request.
    pub(crate) fn find<B>(&self, request: &Request<B>) -> Option<Matched<'_>> {
        let found = matching::find(&self.routes, request)?;
        let rule = self.routes.get(found.route)?.rules.get(found.rule)?;
        let details = self.details.get(found.route)?;
        Some(Matched { index: found.route, details, filters: &rule.action, prefix: found.prefix })
    }
}

enum Source {
    All,
    Cluster,
}

/// The default policy's name, and its grant.
fn grant(policy: DefaultPolicy) -> (&'static str, Option<(Source, Authentication)>) {
    let meshed = || Authentication::TlsIdentities { identities: Default::default(), suffixes: vec![Suffix::Any] };
    match policy {
        DefaultPolicy::Deny => ("deny", None),
        DefaultPolicy::AllAuthenticated => ("all-authenticated", Some((Source::All, meshed()))),
        DefaultPolicy::AllUnauthenticated => {
            ("all-unauthenticated", Some((Source::All, Authentication::Unauthenticated)))
        }
        DefaultPolicy::ClusterAuthenticated => ("cluster-authenticated", Some((Source::Cluster, meshed()))),
        DefaultPolicy::ClusterUnauthenticated => {
            ("cluster-unauthenticated", Some((Source::Cluster, Authentication::Unauthenticated)))
        }
        DefaultPolicy::Audit => ("audit", Some((Source::All, Authentication::Unauthenticated))),
    }
}

fn all_networks() -> Vec<Network> {
    vec![Network::from(IpNet::from(ipnet::Ipv4Net::default())), Network::from(IpNet::from(ipnet::Ipv6Net::default()))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::authz::{ClientTls, NoTls};

    #[test]
    fn each_default_policy_lets_in_whom_its_name_says() {
        let client = |ip: &str, tls: &ClientTls| Client { addr: format!("{ip}:1").parse().unwrap(), tls: tls.clone() };
        let meshed = ClientTls::Established(Some("web.demo".parse().unwrap()));
        let plain = ClientTls::None(NoTls::NotFromRemote);
        // Clients of the cluster with and without identity, then clients outside it.
        for (policy, expected) in [
            (DefaultPolicy::Deny, [false; 4]),
            (DefaultPolicy::AllAuthenticated, [true, false, true, false]),
            (DefaultPolicy::AllUnauthenticated, [true; 4]),
            (DefaultPolicy::ClusterAuthenticated, [true, false, false, false]),
            (DefaultPolicy::ClusterUnauthenticated, [true, true, false, false]),
            (DefaultPolicy::Audit, [true; 4]),
        ] {
            let mut config = crate::inbound::testing::config();
            config.inbound.default_policy = policy;
            config.policy.cluster_networks = vec!["10.0.0.0/8".parse().unwrap()];
            let server = ServerPolicy::default_for(&config, 80);
            let judged = [("10.0.0.1", &meshed), ("10.0.0.1", &plain), ("8.8.8.8", &meshed), ("8.8.8.8", &plain)]
                .map(|(ip, tls)| authorize(&server.authorizations, &client(ip, tls)).is_some());
            assert_eq!(judged, expected, "{policy:?}");
            assert!(server.http().unwrap().find(&Request::new(())).is_some());
        }
    }

    #[test]
    fn opaque_ports_are_opaque_and_others_are_detected() {
        let mut config = crate::inbound::testing::config();
        config.inbound.opaque_ports = vec![3306];
        assert!(matches!(ServerPolicy::default_for(&config, 3306).protocol, Protocol::Opaque));
        assert!(matches!(ServerPolicy::default_for(&config, 80).protocol, Protocol::Detect { .. }));
    }

    #[test]
    fn an_unreadable_policy_denies_everybody() {
        let policy = ServerPolicy::denied("invalid-policy", Duration::from_secs(1));
        let tls = ClientTls::Established(Some("web.demo".parse().unwrap()));
        let client = |addr: &str| Client { addr: addr.parse().unwrap(), tls: tls.clone() };
        assert!(authorize(&policy.authorizations, &client("10.0.0.1:1")).is_none());
        let http = policy.http().unwrap();
        assert!(http.details[0].authorize(&client("10.0.0.1:1")).is_none());
        assert!(authorize(&policy.authorizations, &client("127.0.0.1:1")).is_none());
    }
}
