//! What a policy towards a destination consists of.

use std::net::SocketAddr;

use weft_k8s_api::policy::{
    TrafficPolicy,
    route::{GrpcMatch, HeaderModifier, HostMatch, HttpMatch, Redirect},
    traffic::{FailureAccrual, GrpcCode, LoadBias, Retry, StatusRange, Timeouts},
};

use crate::records::{Key, RouteId};

/// The policy towards one destination.
#[derive(Clone, Debug, PartialEq)]
pub enum OutboundPolicy {
    /// A Service's port, or an address of an EgressNetwork.
    Parent(Box<ParentPolicy>),
    /// A Service's cluster address with a port that the Service does not declare: connections are refused. All such
    /// ports share this answer.
    UndefinedPort {
        /// The Service.
        service: Key,
    },
    /// An address outside the cluster and outside of every EgressNetwork: connections go to their original destination.
    Egress {
        /// The address that the client dialled.
        addr: SocketAddr,
    },
}

/// The policy towards something that routes can be attached to.
#[derive(Clone, Debug, PartialEq)]
pub struct ParentPolicy {
    /// What the routes are attached to, and where traffic goes that no backend of a route is for.
    pub parent: OutboundParent,
    /// The protocol of clients, with the routes that are in force.
    pub protocol: OutboundProtocol,
    /// Limits of requests that no route is about.
    pub timeouts: Timeouts,
    /// Retries of HTTP requests that no route is about.
    pub http_retry: Option<Retry<StatusRange>>,
    /// Retries of gRPC requests that no route is about.
    pub grpc_retry: Option<Retry<GrpcCode>>,
    /// When an endpoint gets no requests for a time.
    pub accrual: Option<FailureAccrual>,
    /// Whether `Retry-After` lengthens that time.
    pub honor_retry_after: bool,
    /// How much slower an endpoint with failures appears.
    pub load_bias: Option<LoadBias>,
}

/// What routes are attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutboundParent {
    /// A port of a Service.
    Service(ServicePort),
    /// An address of an EgressNetwork.
    EgressNetwork {
        /// The EgressNetwork.
        network: Key,
        /// The address that the client dialled.
        addr: SocketAddr,
        /// What happens to traffic that no route is about.
        policy: TrafficPolicy,
    },
}

/// A port of a Service, whose endpoints a balancer resolves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// The Service.
    pub service: Key,
    /// The Service's port, which may differ from that of its endpoints.
    pub port: u16,
    /// Name and port that the balancer resolves.
    pub authority: String,
}

/// The protocol of clients, with the routes that are in force: the oldest first, then by name. Without a route,
/// everything goes to the parent.
#[derive(Clone, Debug, PartialEq)]
pub enum OutboundProtocol {
    /// Detected by the proxy; the routes are for HTTP of either version.
    Detect(Vec<OutboundHttpRoute>),
    /// HTTP/1.
    Http1(Vec<OutboundHttpRoute>),
    /// HTTP/2.
    Http2(Vec<OutboundHttpRoute>),
    /// gRPC.
    Grpc(Vec<OutboundGrpcRoute>),
    /// TLS, routed by the server name that clients ask for.
    Tls(Vec<ConnectionRoute>),
    /// TCP.
    Opaque(Vec<ConnectionRoute>),
}

/// A route of HTTP requests.
pub type OutboundHttpRoute = RequestRoute<HttpMatch, StatusRange>;
/// A route of gRPC requests.
pub type OutboundGrpcRoute = RequestRoute<GrpcMatch, GrpcCode>;

/// A route of requests; `M` is a condition on a request, `C` on a response that is retried.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRoute<M, C> {
    /// The resource that defines the route; part of the answer's metadata.
    pub id: RouteId,
    /// Hosts of the requests; none means every host.
    pub hosts: Vec<HostMatch>,
    /// The rules, in the order of the resource.
    pub rules: Vec<RequestRule<M, C>>,
}

/// A rule of a route of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRule<M, C> {
    /// Conditions, one of which must hold; none means every request.
    pub matches: Vec<M>,
    /// Filters of the requests and their responses.
    pub filters: Vec<RequestFilter>,
    /// Where the requests go; none means to the parent.
    pub backends: Vec<RouteBackend>,
    /// Limits of the time that requests take.
    pub timeouts: Timeouts,
    /// Which requests are tried again.
    pub retry: Option<Retry<C>>,
}

/// A route of connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionRoute {
    /// The resource that defines the route; part of the answer's metadata.
    pub id: RouteId,
    /// Server names that clients ask for; none means every name, and a TCPRoute has none.
    pub names: Vec<HostMatch>,
    /// Where the connections go; none means to the parent.
    pub backends: Vec<RouteBackend>,
}

/// A filter of a rule or of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestFilter {
    /// Changes headers of requests.
    RequestHeaders(HeaderModifier),
    /// Changes headers of responses.
    ResponseHeaders(HeaderModifier),
    /// Answers with a redirection.
    Redirect(Redirect),
    /// Fails requests, for this reason.
    Fail(String),
}

/// A backend of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteBackend {
    /// What the rule names; `None` for a kind of resource that cannot be a backend.
    pub resource: Option<BackendResource>,
    /// Share of the traffic in proportion to the other backends.
    pub weight: u32,
    /// Filters of the requests that go there.
    pub filters: Vec<RequestFilter>,
    /// Why nothing can be sent there: such traffic fails.
    pub problem: Option<String>,
}

/// A resource that traffic can be sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendResource {
    /// A Service.
    Service(ServicePort),
    /// An EgressNetwork: traffic goes to its original destination.
    EgressNetwork {
        /// The EgressNetwork.
        network: Key,
        /// The port that the rule names, or else the one that the client dialled; zero where neither is known.
        port: u16,
    },
}
