//! Outbound policy in the form that the data path uses: routes, filters, backends.
//!
//! Owns the conversion of the controller's messages. A message is converted completely or not at all: parts that
//! cannot be parsed make requests fail instead of being skipped.

mod error;
mod read;
mod terms;

use std::{net::SocketAddr, num::NonZeroU32, sync::Arc, time::Duration};

use super::endpoint::EndpointInfo;
use crate::{
    metrics::{BalancerKind, Labels},
    request::{backoff::Backoff, terms::Terms},
    route::{
        Meta, Route,
        condition::RequestCondition,
        filter::Filter,
        matching::{self, Found, HostMatch},
    },
};

/// A destination's policy.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// The resource that the policy belongs to, for metrics.
    pub(crate) parent: Meta,
    /// How connections are distinguished and routed.
    pub(crate) protocol: Protocol,
}

/// The protocol of a destination.
#[derive(Clone, Debug)]
pub(crate) enum Protocol {
    /// Detected from the client's first bytes.
    Detect {
        /// Deadline for these bytes.
        timeout: Duration,
        /// For HTTP/1.
        http1: HttpRoutes,
        /// For HTTP/2.
        http2: HttpRoutes,
        /// For everything else.
        opaque: OpaqueRoutes,
    },
    /// HTTP/1 without detection.
    Http1(HttpRoutes),
    /// HTTP/2 or gRPC without detection.
    Http2(HttpRoutes),
    /// Bytes.
    Opaque(OpaqueRoutes),
    /// The application's own TLS, routed by server name.
    Tls(OpaqueRoutes),
}

/// Routes of requests.
#[derive(Clone, Debug)]
pub(crate) enum HttpRoutes {
    /// Those of a policy: the most specific match wins.
    Policy(Arc<[Route<Action>]>),
    /// Those of a ServiceProfile: the first match wins.
    Profile(Arc<[ProfileRoute]>),
}

/// A route of a ServiceProfile.
#[derive(Clone, Debug)]
pub(crate) struct ProfileRoute {
    /// Which requests it is for.
    pub(crate) condition: RequestCondition,
    /// What happens to them.
    pub(crate) action: Action,
}

/// A request's route.
pub(crate) struct Matched<'a> {
    /// Position of the route and of its rule.
    pub(crate) id: (usize, usize),
    /// What happens to the request.
    pub(crate) action: &'a Action,
    /// How many bytes of the path the rule's prefix matched, if it matched by prefix.
    pub(crate) prefix: Option<usize>,
}

/// Routes of connections.
pub(crate) type OpaqueRoutes = Arc<[OpaqueRoute]>;

/// The action for requests that match.
#[derive(Clone, Debug)]
pub(crate) struct Action {
    /// The route's name, for metrics.
    pub(crate) meta: Meta,
    /// Whether it is a route of gRPC, whose requests have metrics of their own.
    pub(crate) is_grpc: bool,
    /// Filters, applied in order.
    pub(crate) filters: Vec<Filter>,
    /// Backends of the requests.
    pub(crate) backends: Distribution,
    /// How long requests may take, and whether they are sent again.
    pub(crate) terms: Terms,
    /// What a ServiceProfile adds to its routes.
    pub(crate) profile: Option<Arc<ProfileLabels>>,
}

/// What requests on a ServiceProfile's route carry and are counted under.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ProfileLabels {
    /// The service and port: label `dst`, header `l5d-dst-canonical`.
    pub(crate) dst: String,
    /// The labels `rt_*`.
    pub(crate) route: Labels,
}

/// How one of several backends is picked.
#[derive(Clone, Debug)]
pub(crate) enum Distribution {
    /// There is no backend.
    Empty,
    /// The first that has a ready endpoint.
    FirstAvailable(Vec<RouteBackend>),
    /// At random by weight.
    Random(Vec<(RouteBackend, u32)>),
}

/// A backend of one route.
#[derive(Clone, Debug)]
pub(crate) struct RouteBackend {
    /// Filters, applied after the route's.
    pub(crate) filters: Vec<Filter>,
    pub(crate) backend: Arc<Backend>,
}

/// A destination of requests or connections.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Backend {
    /// The backend's name, for metrics.
    pub(crate) meta: Meta,
    pub(crate) kind: BackendKind,
}

/// Kinds of backends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BackendKind {
    /// One endpoint.
    Forward(Arc<EndpointInfo>),
    /// A service's endpoints.
    Balance {
        /// The service's authority.
        path: String,
        /// How load is estimated.
        load: Load,
        /// When an endpoint gets no requests; `None` is never.
        accrual: Option<Arc<Accrual>>,
    },
    /// Nothing: the policy names a backend that does not exist. Its share of requests fails.
    Missing,
}

/// Parameters of load estimation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Load {
    /// Assumed latency of an endpoint that was never used.
    pub(crate) default_rtt: Duration,
    /// Time constant with which old measurements decay; above 0.
    pub(crate) decay: Duration,
    /// What failures add.
    pub(crate) penalty: Option<Penalty>,
}

/// What a failure adds to an endpoint's load (`balancer.alpha.linkerd.io/penalize-failures`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Penalty {
    /// The latency that it stands for.
    pub(crate) penalty: Duration,
    /// The most that a server's `Retry-After` counts.
    pub(crate) max_retry_after: Duration,
    /// Time constant with which it decays; above 0.
    pub(crate) decay: Duration,
}

/// When an endpoint whose responses fail gets no requests for a while.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Accrual {
    /// Failures in a row; `None` does not count them.
    pub(crate) max_failures: Option<NonZeroU32>,
    /// The share of successes; `None` does not measure it.
    pub(crate) success_rate: Option<SuccessRate>,
    /// How long the endpoint gets no requests, each time longer.
    pub(crate) backoff: Backoff,
    /// Whether the endpoint's own `Retry-After` lengthens the first time, up to the longest back-off.
    pub(crate) honors_retry_after: bool,
    /// As many endpoints keep their requests, whatever they answer.
    pub(crate) min_ready: u32,
}

/// A share of successes below which an endpoint gets no requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SuccessRate {
    /// From 0 to 1.
    pub(crate) threshold: f64,
    /// Length of the sliding window; at least 10 ms.
    pub(crate) window: Duration,
    /// Responses in the window before it counts.
    pub(crate) min_requests: u32,
}

/// A route of connections.
#[derive(Clone, Debug)]
pub(crate) struct OpaqueRoute {
    /// The route's name, for metrics.
    pub(crate) meta: Meta,
    /// Server names of the route; an empty list means all.
    pub(crate) server_names: Arc<[HostMatch]>,
    /// Why connections are closed instead, if they are.
    pub(crate) refuse: Option<RefuseOpaque>,
    /// Backends of the connections.
    pub(crate) backends: Distribution,
}

/// Why an opaque connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefuseOpaque {
    /// Policy forbids it.
    Forbidden,
    /// Policy cannot be used.
    Invalid,
}

impl Load {
    /// Linkerd's parameters if policy has none: 30 ms and 10 s.
    pub(crate) const DEFAULT: Self =
        Self { default_rtt: Duration::from_millis(30), decay: Duration::from_secs(10), penalty: None };
}

impl SuccessRate {
    /// Linkerd's window if policy has none.
    pub(crate) const DEFAULT_WINDOW: Duration = Duration::from_secs(10);
    /// Linkerd's shortest window.
    pub(crate) const SHORTEST_WINDOW: Duration = Duration::from_millis(10);
}

impl Penalty {
    /// Linkerd's parameters if policy has none: 5 s, 300 s and 10 s.
    pub(crate) const DEFAULT: Self = Self {
        penalty: Duration::from_secs(5),
        max_retry_after: Duration::from_secs(300),
        decay: Duration::from_secs(10),
    };
}

impl Protocol {
    /// The value of the metric label `protocol`.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Detect { .. } => "detect",
            Self::Http1(_) => "http/1",
            Self::Http2(_) => "http/2",
            Self::Opaque(_) => "opaq",
            Self::Tls(_) => "tls",
        }
    }
}

impl RefuseOpaque {
    /// The value of the metric label `error`.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Forbidden => "forbidden",
            Self::Invalid => "invalid_policy",
        }
    }
}

impl Backend {
    /// A single endpoint, which no resource names.
    pub(crate) fn forward(endpoint: Arc<EndpointInfo>) -> Self {
        Self { meta: Meta::built_in("endpoint"), kind: BackendKind::Forward(endpoint) }
    }

    /// A service that is known by name only.
    pub(crate) fn balance(path: String) -> Self {
        Self { meta: Meta::built_in(&path), kind: BackendKind::Balance { path, load: Load::DEFAULT, accrual: None } }
    }
}

impl Action {
    /// Sends requests on as they are.
    pub(crate) fn plain(backends: Distribution) -> Self {
        Self {
            meta: Meta::built_in("http"),
            is_grpc: false,
            filters: Vec::new(),
            backends,
            terms: Terms::default(),
            profile: None,
        }
    }
}

impl HttpRoutes {
    /// The route of a request.
    pub(crate) fn find<B>(&self, request: &http::Request<B>) -> Option<Matched<'_>> {
        match self {
            Self::Policy(routes) => {
                let Found { route, rule, prefix } = matching::find(routes, request)?;
                Some(Matched { id: (route, rule), action: &routes[route].rules[rule].action, prefix })
            }
            Self::Profile(routes) => {
                let (index, route) = routes.iter().enumerate().find(|(_, route)| route.condition.holds(request))?;
                Some(Matched { id: (index, 0), action: &route.action, prefix: None })
            }
        }
    }

    /// The number of rules of each route, by the positions that [`Self::find`] returns.
    pub(crate) fn rules_by_route(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self {
            Self::Policy(routes) => Box::new(routes.iter().map(|route| route.rules.len())),
            Self::Profile(routes) => Box::new(routes.iter().map(|_| 1)),
        }
    }

    /// The actions of all routes.
    pub(crate) fn actions(&self) -> Box<dyn Iterator<Item = &Action> + '_> {
        match self {
            Self::Policy(routes) => Box::new(routes.iter().flat_map(|route| &route.rules).map(|rule| &rule.action)),
            Self::Profile(routes) => Box::new(routes.iter().map(|route| &route.action)),
        }
    }
}

impl Distribution {
    /// One backend without filters.
    pub(crate) fn only(backend: Backend) -> Self {
        Self::FirstAvailable(vec![RouteBackend { filters: Vec::new(), backend: Arc::new(backend) }])
    }
}

impl Policy {
    /// The policy of a destination without one: detect, and send everything to `backends`.
    pub(crate) fn synthesize(backends: Distribution, opaque: bool, detect_timeout: Duration) -> Self {
        let parent = Meta::built_in("endpoint");
        let routes: OpaqueRoutes = Arc::new([OpaqueRoute {
            meta: Meta::built_in("opaq"),
            server_names: Arc::default(),
            refuse: None,
            backends: backends.clone(),
        }]);
        if opaque {
            return Self { parent, protocol: Protocol::Opaque(routes) };
        }
        let http = http_default(Vec::new(), backends);
        let protocol = Protocol::Detect { timeout: detect_timeout, http1: http.clone(), http2: http, opaque: routes };
        Self { parent, protocol }
    }

    /// The policy of a destination whose policy cannot be used: requests fail with 500, other connections are closed.
    pub(crate) fn invalid(detect_timeout: Duration) -> Self {
        let http = http_default(vec![Filter::Unknown], Distribution::Empty);
        let opaque: OpaqueRoutes = Arc::new([OpaqueRoute {
            meta: Meta::built_in("invalid"),
            server_names: Arc::default(),
            refuse: Some(RefuseOpaque::Invalid),
            backends: Distribution::Empty,
        }]);
        Self {
            parent: Meta::built_in("invalid"),
            protocol: Protocol::Detect { timeout: detect_timeout, http1: http.clone(), http2: http, opaque },
        }
    }

    /// What its routes of connections distribute.
    pub(crate) fn opaque_kind(&self) -> BalancerKind {
        if matches!(self.protocol, Protocol::Tls(_)) { BalancerKind::Tls } else { BalancerKind::Tcp }
    }

    /// The routes of connections without a detected protocol, if the policy has any.
    pub(crate) fn opaque_routes(&self) -> Option<OpaqueRoutes> {
        match &self.protocol {
            Protocol::Detect { opaque, .. } | Protocol::Opaque(opaque) | Protocol::Tls(opaque) => {
                Some(Arc::clone(opaque))
            }
            Protocol::Http1(_) | Protocol::Http2(_) => None,
        }
    }

    /// The policy with a ServiceProfile's routes; `opaque` are the backends of other connections, if the profile has
    /// some.
    pub(crate) fn overridden(&self, http: HttpRoutes, opaque: Option<&Distribution>) -> Self {
        let opaque = |of_policy: &OpaqueRoutes| match opaque {
            None => Arc::clone(of_policy),
            Some(backends) => Arc::new([OpaqueRoute {
                meta: Meta::built_in("profile"),
                server_names: Arc::default(),
                refuse: None,
                backends: backends.clone(),
            }]),
        };
        let protocol = match &self.protocol {
            Protocol::Detect { timeout, opaque: routes, .. } => {
                Protocol::Detect { timeout: *timeout, http1: http.clone(), http2: http, opaque: opaque(routes) }
            }
            Protocol::Http1(_) => Protocol::Http1(http),
            Protocol::Http2(_) => Protocol::Http2(http),
            Protocol::Opaque(routes) => Protocol::Opaque(opaque(routes)),
            Protocol::Tls(routes) => Protocol::Tls(opaque(routes)),
        };
        Self { parent: self.parent.clone(), protocol }
    }
}

fn http_default(filters: Vec<Filter>, backends: Distribution) -> HttpRoutes {
    HttpRoutes::Policy(Arc::new([Route::catch_all(Action { filters, ..Action::plain(backends) })]))
}

/// A plain endpoint as a distribution's only backend.
pub(crate) fn forward_to(addr: SocketAddr) -> Distribution {
    Distribution::only(Backend::forward(Arc::new(EndpointInfo::unmeshed(addr))))
}
