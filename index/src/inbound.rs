//! Policy of a pod's port: which clients may connect, for which requests, and how many.
//!
//! ```text
//! port --Server?--> none:  the pod's or the mesh's default policy
//!                   found: the Server's policy, which all of its pods share: authorizations, routes, rate limit
//! ```
//!
//! A pod adds the paths of its probes. Anything that cannot be parsed or resolved never allows: an AuthorizationPolicy
//! with an unresolved reference is ignored, an unreadable route takes no request and still replaces the default route,
//! and an unreadable default policy is `deny`.

mod authorizations;
mod rate_limit;
mod routes;
mod shared;
mod unused;

use std::sync::Arc;

use ipnet::IpNet;
use weft_k8s_api::policy::{
    DefaultPolicy, IdentityMatch, Network,
    route::{Filter, GrpcMatch, HostMatch, HttpMatch},
};

use super::{
    cluster::Cluster,
    records::{DefaultPolicyAnnotation, Key, RouteId},
    selectable::Selectable,
    selection,
    store::Store,
};

pub(super) use authorizations::{ineffective, selects};
pub(super) use shared::ServerPolicies;
pub(super) use unused::unused;

/// The policy of one port.
#[derive(Clone, Debug, PartialEq)]
pub struct InboundServer {
    /// What the Server, or the default policy, says.
    pub policy: Arc<ServerPolicy>,
    /// Paths of the pod's probes, open to the policy's `probe_networks`; none where routes are attached.
    pub probe_paths: Vec<String>,
}

/// The policy of a Server, or a default policy.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerPolicy {
    /// The Server or the default policy that defines it.
    pub origin: Origin,
    /// The protocol of clients.
    pub protocol: ServerProtocol,
    /// A client must satisfy one of these, or one of those of the route that its request takes.
    pub authorizations: Vec<Authorization>,
    /// The attached routes.
    pub routes: InboundRoutes,
    /// Limits of the rate of HTTP requests.
    pub rate_limit: Option<InboundRateLimit>,
    /// Networks from which probes come.
    pub probe_networks: Vec<IpNet>,
}

/// The resource or the default that a rule comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A default, by name.
    Default(&'static str),
    /// A Server.
    Server(String),
    /// A ServerAuthorization.
    ServerAuthorization(String),
    /// An AuthorizationPolicy.
    AuthorizationPolicy(String),
}

/// The protocol of clients on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerProtocol {
    /// Detected by the proxy.
    Detect,
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
    /// gRPC.
    Grpc,
    /// TCP.
    Opaque,
    /// TLS that the application terminates.
    Tls,
}

/// One set of clients that may connect.
#[derive(Clone, Debug, PartialEq)]
pub struct Authorization {
    /// The resource or default that grants this.
    pub origin: Origin,
    /// A client must come from one of these networks; never empty: stock proxies refuse a whole Server that
    /// has an authorization without networks.
    pub networks: Vec<Network>,
    /// The client must also satisfy this.
    pub authentication: Authentication,
}

/// The identity that a client must prove.
#[derive(Clone, Debug, PartialEq)]
pub enum Authentication {
    /// None.
    Unauthenticated,
    /// Mesh TLS, with any identity or without one.
    Tls,
    /// One of these identities; an empty list admits no client.
    Identities(Vec<IdentityMatch>),
}

/// Routes of the port's protocol, the oldest first, then by name.
#[derive(Clone, Debug, PartialEq)]
pub enum InboundRoutes {
    /// None is attached: every request takes the default route.
    Default,
    /// HTTPRoutes, at least one. A request that none of them takes is refused.
    Http(Vec<InboundRoute<HttpMatch>>),
    /// GRPCRoutes, at least one. A request that none of them takes is refused.
    Grpc(Vec<InboundRoute<GrpcMatch>>),
}

/// A route that is attached to a Server.
#[derive(Clone, Debug, PartialEq)]
pub struct InboundRoute<M> {
    /// The resource that defines the route; part of the answer's metadata.
    pub id: RouteId,
    /// Hosts of the requests; none means every host.
    pub hosts: Vec<HostMatch>,
    /// The rules. An unreadable route has none, and takes no request.
    pub rules: Vec<InboundRule<M>>,
    /// Clients that it admits beside those of the Server.
    pub authorizations: Vec<Authorization>,
}

/// A rule of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct InboundRule<M> {
    /// Requests that it is about, one of these; none means every request.
    pub matches: Vec<M>,
    /// What is done to the requests. An unsupported filter stands alone: the rule's requests must fail.
    pub filters: Vec<Filter>,
}

/// Limits of the requests that one proxy admits, in requests per second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboundRateLimit {
    /// Name of the HTTPLocalRateLimitPolicy.
    pub name: String,
    /// Limit of all requests together.
    pub total: Option<u32>,
    /// Limit of the requests of each identity.
    pub identity: Option<u32>,
    /// Limits of some identities, instead of that of each.
    pub overrides: Vec<InboundRateLimitOverride>,
}

/// A limit of some identities, which share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboundRateLimitOverride {
    /// Requests per second.
    pub requests_per_second: u32,
    /// Identities of clients, whose requests all count towards this limit.
    pub identities: Vec<String>,
}

/// Computes the policy of a pod's port; `None` if the pod does not exist.
pub(super) fn compute(
    store: &Store,
    cluster: &Cluster,
    policies: &ServerPolicies,
    pod: &Key,
    port: u16,
) -> Option<InboundServer> {
    Some(compute_for(store, cluster, policies, Selectable::Pod(store.pod(pod)?), port))
}

/// Computes the policy of an ExternalWorkload; `None` if the workload does not exist.
pub(super) fn compute_external(
    store: &Store,
    cluster: &Cluster,
    policies: &ServerPolicies,
    workload: &Key,
    port: u16,
) -> Option<InboundServer> {
    Some(compute_for(store, cluster, policies, Selectable::External(store.workload(workload)?), port))
}

fn compute_for(
    store: &Store,
    cluster: &Cluster,
    policies: &ServerPolicies,
    selectable: Selectable<'_>,
    port: u16,
) -> InboundServer {
    let policy = match selection::server(store, selectable, port) {
        Some(server) => policies.policy(store, cluster, server),
        None => Arc::new(default_policy(cluster, selectable, port)),
    };
    let probe_paths = match policy.routes {
        InboundRoutes::Default => selectable.probe_paths(port),
        InboundRoutes::Http(_) | InboundRoutes::Grpc(_) => Vec::new(),
    };
    InboundServer { policy, probe_paths }
}

fn default_policy(cluster: &Cluster, selectable: Selectable<'_>, port: u16) -> ServerPolicy {
    let policy = match selectable.default_policy() {
        DefaultPolicyAnnotation::Inherit => cluster.default_policy,
        DefaultPolicyAnnotation::Policy(policy) => policy,
        DefaultPolicyAnnotation::Unreadable => DefaultPolicy::Deny,
    };
    let policy = match policy {
        DefaultPolicy::AllUnauthenticated if selectable.requires_identity(port) => DefaultPolicy::AllAuthenticated,
        DefaultPolicy::ClusterUnauthenticated if selectable.requires_identity(port) => {
            DefaultPolicy::ClusterAuthenticated
        }
        other => other,
    };
    let opaque = selectable.is_opaque(port, &cluster.default_opaque_ports);
    ServerPolicy {
        origin: Origin::Default(policy.label()),
        protocol: if opaque { ServerProtocol::Opaque } else { ServerProtocol::Detect },
        authorizations: authorizations::of_default(cluster, policy).into_iter().collect(),
        routes: InboundRoutes::Default,
        rate_limit: None,
        probe_networks: cluster.probe_networks.clone(),
    }
}
