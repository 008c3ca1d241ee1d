//! Outbound policy in the form that the data path uses: routes, filters, backends.
//!
//! Owns the conversion of the controller's messages. A message is converted completely or not at all: parts that
//! cannot be parsed make requests fail instead of being skipped.

mod read;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use super::endpoint::EndpointInfo;
use crate::route::{Meta, Route, filter::Filter, matching::HostMatch};

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
pub(crate) type HttpRoutes = Arc<[Route<Action>]>;
/// Routes of connections.
pub(crate) type OpaqueRoutes = Arc<[OpaqueRoute]>;

/// The action for requests that match.
#[derive(Clone, Debug)]
pub(crate) struct Action {
    /// The route's name, for metrics.
    pub(crate) meta: Meta,
    /// Filters, applied in order.
    pub(crate) filters: Vec<Filter>,
    /// Backends of the requests.
    pub(crate) backends: Distribution,
    /// The longest time for a request and its response together.
    pub(crate) request_timeout: Option<Duration>,
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
    /// The backend.
    pub(crate) backend: Arc<Backend>,
}

/// A destination of requests or connections.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Backend {
    /// The backend's name, for metrics.
    pub(crate) meta: Meta,
    /// Its kind.
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
    /// Assumed latency of an endpoint that was never used.
    pub(crate) default_rtt: Duration,
    /// Time constant with which old measurements decay.
    pub(crate) decay: Duration,
}

/// A route of connections.
#[derive(Clone, Debug)]
pub(crate) struct OpaqueRoute {
    /// The route's name, for metrics.
    pub(crate) meta: Meta,
    /// Server names of the route; an empty list means all.
    pub(crate) server_names: Vec<HostMatch>,
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

impl PeakEwma {
    /// Linkerd's parameters if policy has none: 30 ms and 10 s.
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
    /// A single endpoint, which no resource names.
    pub(crate) fn forward(endpoint: Arc<EndpointInfo>) -> Self {
        Self { meta: Meta::built_in("endpoint"), kind: BackendKind::Forward(endpoint) }
    }

    /// A service that is known by name only.
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
    /// The policy of a destination without one: detect, and send everything to `backends`.
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

    /// The policy of a destination whose policy cannot be used: requests fail with 500, other connections are closed.
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

    /// The routes of connections without a detected protocol, if the policy has any.
    pub(crate) fn opaque_routes(&self) -> Option<OpaqueRoutes> {
        match &self.protocol {
            Protocol::Detect { opaque, .. } | Protocol::Opaque(opaque) | Protocol::Tls(opaque) => {
                Some(Arc::clone(opaque))
            }
            Protocol::Http1(_) | Protocol::Http2(_) => None,
        }
    }

    /// The policy with all backends replaced, for a profile's overrides.
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
