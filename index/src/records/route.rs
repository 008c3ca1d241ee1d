//! Routes of all kinds, read once: what they are attached to, their rules, and where they send traffic.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use weft_k8s_api::{
    field::Invalid,
    manifest::Kind,
    policy::{
        GROUP,
        route::{
            Backend, BackendKind, Filter, GATEWAY_GROUP, GatewayHttpRoute, GrpcMatch, GrpcRoute, HostMatch, HttpMatch,
            HttpRoute, HttpRouteSpec, OpaqueRule, Parent, RouteView, RuleTimeouts, TcpRoute, TlsRoute,
        },
        traffic::{self, Annotations, GrpcCode, Retry, StatusRange, Timeouts},
    },
};

use super::{Key, created};

/// Kinds of routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteKind {
    /// HTTPRoute of `policy.linkerd.io`.
    Http,
    /// HTTPRoute of the Gateway API.
    GatewayHttp,
    /// GRPCRoute.
    Grpc,
    /// TLSRoute.
    Tls,
    /// TCPRoute.
    Tcp,
}

/// Identifies a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteId {
    /// Kind.
    pub kind: RouteKind,
    /// Namespace and name.
    pub key: Key,
}

/// A route with a parent that Weft acts on.
#[derive(Debug, PartialEq)]
pub(crate) struct RouteRecord {
    pub(crate) id: RouteId,
    pub(crate) created: Option<Timestamp>,
    /// The parents that Weft acts on.
    pub(crate) parents: Vec<Parent>,
    pub(crate) rules: Rules,
    /// Whether everything in the spec is understood. Otherwise the route is attached without any rule: to a Server it
    /// then admits nothing, and to a Service it means nothing.
    pub(crate) readable: bool,
    /// Limits by annotations; `None` without any, and then those of the parent count.
    pub(crate) timeouts: Option<Timeouts>,
    /// Retries by annotations of an HTTPRoute; `None` without any, and then those of the parent count.
    pub(crate) http_retry: Option<Retry<StatusRange>>,
    /// Retries by annotations of a GRPCRoute; `None` without any, and then those of the parent count.
    pub(crate) grpc_retry: Option<Retry<GrpcCode>>,
    /// What cannot be read.
    pub(crate) problems: Vec<String>,
}

/// The rules of a route, by kind.
#[derive(Debug, PartialEq)]
pub(crate) enum Rules {
    Http { hosts: Vec<HostMatch>, rules: Vec<HttpRule> },
    Grpc { hosts: Vec<HostMatch>, rules: Vec<GrpcRule> },
    Tls { names: Vec<HostMatch>, backends: Vec<Backend> },
    Tcp { backends: Vec<Backend> },
}

/// A rule of an HTTPRoute. Without a match, it is about every request; without a backend, requests go to the parent.
#[derive(Debug, PartialEq)]
pub(crate) struct HttpRule {
    pub(crate) matches: Vec<HttpMatch>,
    pub(crate) filters: Vec<Filter>,
    pub(crate) backends: Vec<RuleBackend>,
    pub(crate) timeouts: RuleTimeouts,
}

/// A rule of a GRPCRoute. Without a match, it is about every request; without a backend, requests go to the parent.
#[derive(Debug, PartialEq)]
pub(crate) struct GrpcRule {
    pub(crate) matches: Vec<GrpcMatch>,
    pub(crate) filters: Vec<Filter>,
    pub(crate) backends: Vec<RuleBackend>,
}

/// A backend, and what is done to the requests that go there.
#[derive(Debug, PartialEq)]
pub(crate) struct RuleBackend {
    pub(crate) backend: Backend,
    pub(crate) filters: Vec<Filter>,
}

impl RouteKind {
    /// The API group.
    pub const fn group(self) -> &'static str {
        match self {
            Self::Http => GROUP,
            Self::GatewayHttp | Self::Grpc | Self::Tls | Self::Tcp => GATEWAY_GROUP,
        }
    }

    /// The name in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Http | Self::GatewayHttp => "HTTPRoute",
            Self::Grpc => "GRPCRoute",
            Self::Tls => "TLSRoute",
            Self::Tcp => "TCPRoute",
        }
    }

    /// The kind of object.
    pub const fn kind(self) -> Kind {
        match self {
            Self::Http => Kind::HttpRoute,
            Self::GatewayHttp => Kind::GatewayHttpRoute,
            Self::Grpc => Kind::GrpcRoute,
            Self::Tls => Kind::TlsRoute,
            Self::Tcp => Kind::TcpRoute,
        }
    }

    /// The kind of route that a kind of object is.
    pub(crate) const fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::HttpRoute => Some(Self::Http),
            Kind::GatewayHttpRoute => Some(Self::GatewayHttp),
            Kind::GrpcRoute => Some(Self::Grpc),
            Kind::TlsRoute => Some(Self::Tls),
            Kind::TcpRoute => Some(Self::Tcp),
            _ => None,
        }
    }
}

impl RouteRecord {
    pub(crate) fn http(route: &HttpRoute) -> Option<Self> {
        Self::of_http(RouteKind::Http, &route.view(), &route.spec)
    }

    pub(crate) fn gateway_http(route: &GatewayHttpRoute) -> Option<Self> {
        Self::of_http(RouteKind::GatewayHttp, &route.view(), &route.spec.route)
    }

    pub(crate) fn grpc(route: &GrpcRoute) -> Option<Self> {
        Self::new(RouteKind::Grpc, &route.view(), |namespace, problems| {
            let mut rules = Vec::new();
            for (index, rule) in route.spec.rules.iter().flatten().enumerate() {
                let mut read = RuleReader { index, problems };
                let matches = read.take(rule.read_matches());
                let filters = read.take(rule.read_filters());
                let backends = rule.backend_refs.iter().flatten().map(|reference| RuleBackend {
                    backend: reference.backend.resolve(namespace),
                    filters: read.take(reference.read_filters()),
                });
                rules.push(GrpcRule { backends: backends.collect(), matches, filters });
            }
            if route.spec.rules.is_none() {
                rules.push(GrpcRule { matches: Vec::new(), filters: Vec::new(), backends: Vec::new() });
            }
            Rules::Grpc { hosts: read(route.spec.read_hostnames(), "spec", problems), rules }
        })
    }

    pub(crate) fn tls(route: &TlsRoute) -> Option<Self> {
        Self::new(RouteKind::Tls, &route.view(), |namespace, problems| Rules::Tls {
            names: read(route.spec.read_hostnames(), "spec", problems),
            backends: only_rule(&route.spec.rules, namespace, problems),
        })
    }

    pub(crate) fn tcp(route: &TcpRoute) -> Option<Self> {
        Self::new(RouteKind::Tcp, &route.view(), |namespace, problems| Rules::Tcp {
            backends: only_rule(&route.spec.rules, namespace, problems),
        })
    }

    fn of_http(kind: RouteKind, view: &RouteView<'_>, spec: &HttpRouteSpec) -> Option<Self> {
        Self::new(kind, view, |namespace, problems| {
            let mut rules = Vec::new();
            for (index, rule) in spec.rules.iter().flatten().enumerate() {
                let mut read = RuleReader { index, problems };
                let matches = read.take(rule.read_matches());
                let filters = read.take(rule.read_filters());
                let timeouts = read.take(rule.read_timeouts());
                let backends = rule.backend_refs.iter().flatten().map(|reference| RuleBackend {
                    backend: reference.backend.resolve(namespace),
                    filters: read.take(reference.read_filters()),
                });
                rules.push(HttpRule { backends: backends.collect(), matches, filters, timeouts });
            }
            if spec.rules.is_none() {
                rules.push(HttpRule {
                    matches: Vec::new(),
                    filters: Vec::new(),
                    backends: Vec::new(),
                    timeouts: RuleTimeouts::default(),
                });
            }
            Rules::Http { hosts: read(spec.read_hostnames(), "spec", problems), rules }
        })
    }

    /// `None` for a route of another controller.
    fn new(kind: RouteKind, view: &RouteView<'_>, rules: impl FnOnce(&str, &mut Vec<String>) -> Rules) -> Option<Self> {
        let parents: Vec<_> = view.parents().map(|(_, parent)| parent).collect();
        if parents.is_empty() {
            return None;
        }
        let (empty, mut problems) = (Annotations::default(), Vec::new());
        let annotations = view.metadata.annotations.as_ref().unwrap_or(&empty);
        let mut rules = rules(view.namespace(), &mut problems);
        let readable = problems.is_empty();
        if !readable {
            rules.clear();
        }
        // Annotations only tune: those that cannot be read are left out.
        let timeouts = annotation(traffic::timeouts(annotations), &mut problems);
        let (mut http_retry, mut grpc_retry) = (None, None);
        match rules {
            Rules::Http { .. } => http_retry = annotation(traffic::http_retry(annotations), &mut problems),
            Rules::Grpc { .. } => grpc_retry = annotation(traffic::grpc_retry(annotations), &mut problems),
            Rules::Tls { .. } | Rules::Tcp { .. } => {}
        }
        let id = RouteId { kind, key: Key::of(view.metadata) };
        let created = created(view.metadata);
        Some(Self { id, created, parents, rules, readable, timeouts, http_retry, grpc_retry, problems })
    }

    /// Services that the rules name as backends, each once.
    pub(crate) fn services(&self) -> BTreeSet<Key> {
        self.backends_of(&BackendKind::Service)
    }

    /// EgressNetworks that the rules name as backends, each once.
    pub(crate) fn egress_networks(&self) -> BTreeSet<Key> {
        self.backends_of(&BackendKind::EgressNetwork)
    }

    fn backends_of(&self, kind: &BackendKind) -> BTreeSet<Key> {
        let backends = self.backends().filter(|backend| backend.kind == *kind);
        backends.map(|backend| Key::new(&backend.namespace, &backend.name)).collect()
    }

    /// Backends of all rules.
    pub(crate) fn backends(&self) -> Box<dyn Iterator<Item = &Backend> + '_> {
        match &self.rules {
            Rules::Http { rules, .. } => {
                Box::new(rules.iter().flat_map(|rule| &rule.backends).map(|backend| &backend.backend))
            }
            Rules::Grpc { rules, .. } => {
                Box::new(rules.iter().flat_map(|rule| &rule.backends).map(|backend| &backend.backend))
            }
            Rules::Tls { backends, .. } | Rules::Tcp { backends } => Box::new(backends.iter()),
        }
    }
}

impl Rules {
    /// Removes every rule: a rule of which a part is unknown must not take effect without it.
    fn clear(&mut self) {
        match self {
            Self::Http { rules, .. } => rules.clear(),
            Self::Grpc { rules, .. } => rules.clear(),
            Self::Tls { backends, .. } | Self::Tcp { backends } => backends.clear(),
        }
    }
}

/// Reads the parts of one rule.
struct RuleReader<'a> {
    index: usize,
    problems: &'a mut Vec<String>,
}

impl RuleReader<'_> {
    fn take<T: Default>(&mut self, part: Result<T, Vec<Invalid>>) -> T {
        read(part, &format!("spec.rules[{}]", self.index), self.problems)
    }
}

fn read<T: Default>(part: Result<T, Vec<Invalid>>, at: &str, problems: &mut Vec<String>) -> T {
    part.unwrap_or_else(|found| {
        problems.extend(found.iter().map(|invalid| format!("{at}.{invalid}")));
        T::default()
    })
}

fn annotation<T>(read: Result<Option<T>, Vec<Invalid>>, problems: &mut Vec<String>) -> Option<T> {
    read.unwrap_or_else(|found| {
        problems.extend(found.iter().map(|invalid| format!("{invalid}; the annotations of this family are ignored")));
        None
    })
}

/// The backends of the only rule.
fn only_rule(rules: &[OpaqueRule], namespace: &str, problems: &mut Vec<String>) -> Vec<Backend> {
    match rules {
        [rule] => rule.backend_refs.iter().flatten().map(|reference| reference.resolve(namespace)).collect(),
        _ => {
            problems.push(format!("spec.rules: {} rules, expected exactly one", rules.len()));
            Vec::new()
        }
    }
}
