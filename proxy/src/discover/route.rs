//! Outbound policy in the form that the data path reads: routes, filters, backends.
//!
//! Owns turning the controller's messages into it, whole or not at all: what cannot be read fails requests instead of being
//! passed over.

mod read;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Scheme;
use http::{HeaderName, HeaderValue, StatusCode};
use weft_proto::linkerd::meta::{Metadata, metadata};

use super::endpoint::EndpointInfo;
use crate::http::matching::{HostMatch, Route};
use crate::metrics::{Labels, label};

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
pub(crate) type HttpRoutes = Arc<[Route<Rule>]>;
/// Routes of connections.
pub(crate) type OpaqueRoutes = Arc<[OpaqueRoute]>;

/// What happens with requests that match.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    /// The route's name, for metrics.
    pub(crate) meta: Meta,
    /// Applied in order.
    pub(crate) filters: Vec<Filter>,
    /// Where requests go.
    pub(crate) backends: Distribution,
    /// How long a request and its response may take together.
    pub(crate) request_timeout: Option<Duration>,
}

/// A change to a request or its response, or an answer in the server's place.
#[derive(Clone, Debug)]
pub(crate) enum Filter {
    /// Changes the request's headers.
    RequestHeaders(HeaderChange),
    /// Changes the response's headers.
    ResponseHeaders(HeaderChange),
    /// Answers with a redirect.
    Redirect(Redirect),
    /// Answers with a failure, for a share of requests.
    Fail {
        /// The HTTP status or gRPC code.
        code: u16,
        /// Whether it is gRPC's.
        grpc: bool,
        /// The message.
        message: String,
        /// Numerator and denominator of the share.
        ratio: (u32, u32),
    },
    /// The policy cannot be used.
    Invalid,
}

/// Headers to remove, set and add.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeaderChange {
    /// Appended.
    pub(crate) add: Vec<(HeaderName, HeaderValue)>,
    /// Put in the place of what is there.
    pub(crate) set: Vec<(HeaderName, HeaderValue)>,
    /// Taken out.
    pub(crate) remove: Vec<HeaderName>,
}

/// Parts of the location that a redirect replaces.
#[derive(Clone, Debug)]
pub(crate) struct Redirect {
    /// The new scheme.
    pub(crate) scheme: Option<Scheme>,
    /// The new host.
    pub(crate) host: Option<String>,
    /// The new port.
    pub(crate) port: Option<u16>,
    /// The new path.
    pub(crate) path: Option<RedirectPath>,
    /// The response's status.
    pub(crate) status: StatusCode,
}

/// How a redirect changes the path.
#[derive(Clone, Debug)]
pub(crate) enum RedirectPath {
    /// All of it.
    Full(String),
    /// The part that the rule's prefix matched.
    Prefix(String),
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

/// A resource, for metric labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// `core`, `policy.linkerd.io`, ...
    pub(crate) group: String,
    /// `Service`, `HTTPRoute`, `default`, ...
    pub(crate) kind: String,
    /// Its namespace.
    pub(crate) namespace: String,
    /// Its name.
    pub(crate) name: String,
    /// The port of a Service; 0 if it has none.
    pub(crate) port: u16,
    /// The section of a route.
    pub(crate) section: String,
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

impl Meta {
    /// A default of the controller's or the proxy's own.
    pub(crate) fn default_named(name: &str) -> Self {
        Self { kind: "default".to_owned(), name: name.to_owned(), ..Self::default() }
    }

    fn read(message: Option<Metadata>) -> Self {
        match message.and_then(|message| message.kind) {
            Some(metadata::Kind::Default(name)) => Self::default_named(&name),
            Some(metadata::Kind::Resource(resource)) => Self {
                group: resource.group,
                kind: resource.kind,
                namespace: resource.namespace,
                name: resource.name,
                port: u16::try_from(resource.port).unwrap_or_default(),
                section: resource.section,
            },
            None => Self::default(),
        }
    }

    /// The labels `<role>_group`, `<role>_kind` and so on.
    pub(crate) fn labels(&self, role: &'static str, with_port: bool) -> Labels {
        let mut labels: Labels = vec![
            label(format!("{role}_group"), self.group.clone()),
            label(format!("{role}_kind"), self.kind.clone()),
            label(format!("{role}_namespace"), self.namespace.clone()),
            label(format!("{role}_name"), self.name.clone()),
        ];
        if with_port {
            let port = if self.port == 0 { String::new() } else { self.port.to_string() };
            labels.push(label(format!("{role}_port"), port));
            labels.push(label(format!("{role}_section_name"), self.section.clone()));
        }
        labels
    }
}

impl Backend {
    /// An endpoint of no named resource.
    pub(crate) fn forward(endpoint: Arc<EndpointInfo>) -> Self {
        Self { meta: Meta::default_named("endpoint"), kind: BackendKind::Forward(endpoint) }
    }

    /// A service that is known by name alone.
    pub(crate) fn balance(path: String) -> Self {
        Self { meta: Meta::default_named(&path), kind: BackendKind::Balance { path, load: PeakEwma::DEFAULT } }
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
        let parent = Meta::default_named("endpoint");
        let routes: OpaqueRoutes = Arc::new([OpaqueRoute {
            meta: Meta::default_named("opaq"),
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
        let http = http_default(vec![Filter::Invalid], Distribution::Empty);
        let opaque: OpaqueRoutes = Arc::new([OpaqueRoute {
            meta: Meta::default_named("invalid"),
            server_names: Vec::new(),
            refuse: Some(RefuseOpaque::Invalid),
            backends: Distribution::Empty,
        }]);
        Self {
            parent: Meta::default_named("invalid"),
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
            meta: Meta::default_named("profile"),
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
    let rule = Rule { meta: Meta::default_named("http"), filters, backends, request_timeout: None };
    Arc::new([Route { hosts: Vec::new(), rules: vec![(Vec::new(), rule)] }])
}

/// A plain endpoint as a distribution's only backend.
pub(crate) fn forward_to(addr: SocketAddr) -> Distribution {
    Distribution::only(Backend::forward(Arc::new(EndpointInfo::unmeshed(addr))))
}
