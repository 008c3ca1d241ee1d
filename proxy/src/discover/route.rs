//! Outbound policy in the form that the data path reads: routes, filters, backends.
//!
//! Owns turning the controller's messages into it, whole or not at all: what cannot be read fails requests instead of being
//! passed over.

mod read;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::endpoint::EndpointInfo;
use crate::route::filter::Filter;
use crate::route::matching::HostMatch;
use crate::route::{Meta, Route};

/// A destination's policy.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// What the policy belongs to, for metrics.
    pub(crate) parent: Meta,
    /// How connections are told apart, and where they go.
    pub(crate) protocol: Protocol,
}

/// How a destination is spoken to.
#[derive(Clone, Debug)]
pub(crate) enum Protocol {
    /// The client's first bytes decide.
    Detect {
        /// How long they may take.
        timeout: Duration,
        /// For HTTP/1.
        http1: HttpRoutes,
        /// For HTTP/2.
        http2: HttpRoutes,
        /// For everything else.
        opaque: OpaqueRoutes,
    },
    /// HTTP/1, and nothing is detected.
    Http1(HttpRoutes),
    /// HTTP/2 or gRPC, and nothing is detected.
    Http2(HttpRoutes),
    /// Bytes.
    Opaque(OpaqueRoutes),
    /// TLS of the application's own, told apart by server name.
    Tls(OpaqueRoutes),
}

/// Routes of requests.
pub(crate) type HttpRoutes = Arc<[Route<Action>]>;
/// Routes of connections.
pub(crate) type OpaqueRoutes = Arc<[OpaqueRoute]>;

/// What happens with requests that match.
#[derive(Clone, Debug)]
pub(crate) struct Action {
    /// The route's name, for metrics.
    pub(crate) meta: Meta,
    /// Applied in order.
    pub(crate) filters: Vec<Filter>,
    /// Where requests go.
    pub(crate) backends: Distribution,
    /// How long a request and its response may take together.
    pub(crate) request_timeout: Option<Duration>,
}

/// How one of several backends is picked.
#[derive(Clone, Debug)]
pub(crate) enum Distribution {
    /// There is none.
    Empty,
    /// The first that has a ready endpoint.
    FirstAvailable(Vec<RouteBackend>),
    /// At random by weight.
    Random(Vec<(RouteBackend, u32)>),
}

/// A backend as one route uses it.
#[derive(Clone, Debug)]
pub(crate) struct RouteBackend {
    /// Applied after the route's.
    pub(crate) filters: Vec<Filter>,
    /// Where it leads.
    pub(crate) backend: Arc<Backend>,
}

/// Somewhere to send requests or connections.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Backend {
    /// The backend's name, for metrics.
    pub(crate) meta: Meta,
    /// What kind it is.
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
        load: PeakEwma,
    },
}

/// Parameters of load estimation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PeakEwma {
    /// What is assumed of an endpoint that was never used.
    pub(crate) default_rtt: Duration,
    /// How fast the past is forgotten.
    pub(crate) decay: Duration,
}

/// Where connections go.
#[derive(Clone, Debug)]
pub(crate) struct OpaqueRoute {
    /// The route's name, for metrics.
    pub(crate) meta: Meta,
    /// Server names that it is for; none means all.
    pub(crate) server_names: Vec<HostMatch>,
    /// Whether connections are closed instead, and why.
    pub(crate) refuse: Option<RefuseOpaque>,
    /// Where they go.
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

impl PeakEwma {
    /// What Linkerd uses when policy says nothing: 30 ms and 10 s.
    pub(crate) const DEFAULT: Self = Self { default_rtt: Duration::from_millis(30), decay: Duration::from_secs(10) };
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
    /// An endpoint of no named resource.
    pub(crate) fn forward(endpoint: Arc<EndpointInfo>) -> Self {
        Self { meta: Meta::built_in("endpoint"), kind: BackendKind::Forward(endpoint) }
    }

    /// A service that is known by name alone.
    pub(crate) fn balance(path: String) -> Self {
        Self { meta: Meta::built_in(&path), kind: BackendKind::Balance { path, load: PeakEwma::DEFAULT } }
    }
}

impl Distribution {
    /// One backend without filters.
    pub(crate) fn only(backend: Backend) -> Self {
        Self::FirstAvailable(vec![RouteBackend { filters: Vec::new(), backend: Arc::new(backend) }])
    }
}

impl Policy {
    /// What holds for a destination without policy: detect, and send everything to `backends`.
    pub(crate) fn synthesize(backends: Distribution, opaque: bool, detect_timeout: Duration) -> Self {
        let parent = Meta::built_in("endpoint");
        let routes: OpaqueRoutes = Arc::new([OpaqueRoute {
            meta: Meta::built_in("opaq"),
            server_names: Vec::new(),
            refuse: None,
            backends: backends.clone(),
        }]);
        if opaque {
            return Self { parent, protocol: Protocol::Opaque(routes) };
        }
        let http = http_default(Vec::new(), backends);
        let protocol =
            Protocol::Detect { timeout: detect_timeout, http1: Arc::clone(&http), http2: http, opaque: routes };
        Self { parent, protocol }
    }

    /// What holds for a destination whose policy cannot be used: requests fail with 500, other connections are closed.
    pub(crate) fn invalid(detect_timeout: Duration) -> Self {
        let http = http_default(vec![Filter::Unknown], Distribution::Empty);
        let opaque: OpaqueRoutes = Arc::new([OpaqueRoute {
            meta: Meta::built_in("invalid"),
            server_names: Vec::new(),
            refuse: Some(RefuseOpaque::Invalid),
            backends: Distribution::Empty,
        }]);
        Self {
            parent: Meta::built_in("invalid"),
            protocol: Protocol::Detect { timeout: detect_timeout, http1: Arc::clone(&http), http2: http, opaque },
        }
    }

    /// The routes of connections that are not looked into, if the policy has any.
    pub(crate) fn opaque_routes(&self) -> Option<OpaqueRoutes> {
        match &self.protocol {
            Protocol::Detect { opaque, .. } | Protocol::Opaque(opaque) | Protocol::Tls(opaque) => {
                Some(Arc::clone(opaque))
            }
            Protocol::Http1(_) | Protocol::Http2(_) => None,
        }
    }

    /// Sends everything to `backends` instead, as a profile's overrides demand.
    pub(crate) fn overridden(&self, backends: &Distribution) -> Self {
        let http = http_default(Vec::new(), backends.clone());
        let opaque: OpaqueRoutes = Arc::new([OpaqueRoute {
            meta: Meta::built_in("profile"),
            server_names: Vec::new(),
            refuse: None,
            backends: backends.clone(),
        }]);
        let protocol = match &self.protocol {
            Protocol::Detect { timeout, .. } => {
                Protocol::Detect { timeout: *timeout, http1: Arc::clone(&http), http2: http, opaque }
            }
            Protocol::Http1(_) => Protocol::Http1(http),
            Protocol::Http2(_) => Protocol::Http2(http),
            Protocol::Opaque(_) => Protocol::Opaque(opaque),
            Protocol::Tls(_) => Protocol::Tls(opaque),
        };
        Self { parent: self.parent.clone(), protocol }
    }
}

fn http_default(filters: Vec<Filter>, backends: Distribution) -> HttpRoutes {
    let rule = Action { meta: Meta::built_in("http"), filters, backends, request_timeout: None };
    Arc::new([Route::catch_all(rule)])
}

/// A plain endpoint as a distribution's only backend.
pub(crate) fn forward_to(addr: SocketAddr) -> Distribution {
    Distribution::only(Backend::forward(Arc::new(EndpointInfo::unmeshed(addr))))
}
