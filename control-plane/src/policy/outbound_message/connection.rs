//! Routes of connections: TLS by server name, and TCP.

use weft_k8s_api::policy::{TrafficPolicy, route::HostMatch};
use weft_proto::linkerd::{
    opaque_route::{Forbidden, Invalid},
    outbound::{Backend, OpaqueRoute, TlsRoute, opaque_route, tls_route},
    tls_route::{SniMatch, sni_match},
};

use super::{super::default_metadata, Context, backend, backend::Load, route_metadata};
use weft_index::{ConnectionRoute, OutboundParent, RouteBackend};

/// As in Linkerd, the oldest TCPRoute wins: connections have nothing by which to choose among several.
const TCP_ROUTES: usize = 1;

impl Context<'_> {
    /// The routes. An EgressNetwork ends with a route for every other name.
    pub(super) fn tls_routes(&self, routes: &[ConnectionRoute]) -> Vec<TlsRoute> {
        let mut messages: Vec<_> =
            routes.iter().map(|route| tls_route(route, &self.policy.parent, &self.parent)).collect();
        if let Some(policy) = self.egress() {
            let (name, filters) = match policy {
                TrafficPolicy::Allow => ("tls-egress-allow", Vec::new()),
                TrafficPolicy::Deny => {
                    ("tls-egress-deny", vec![tls_filter(tls_route::filter::Kind::Forbidden(Forbidden {}))])
                }
            };
            let rule = tls_route::Rule { backends: Some(tls_first(self.parent.clone())), filters };
            messages.push(TlsRoute { metadata: Some(default_metadata(name)), snis: Vec::new(), rules: vec![rule] });
        }
        messages
    }

    /// The route, or the default one.
    pub(super) fn opaque_routes(&self, routes: &[ConnectionRoute]) -> Vec<OpaqueRoute> {
        if routes.is_empty() {
            let (name, refuse) = match self.egress() {
                None => ("opaq", false),
                Some(TrafficPolicy::Allow) => ("tcp-egress-allow", false),
                Some(TrafficPolicy::Deny) => ("tcp-egress-deny", true),
            };
            return vec![default_opaque_route(name, self.parent.clone(), refuse)];
        }
        let routes = routes.iter().take(TCP_ROUTES);
        routes.map(|route| opaque_route(route, &self.policy.parent, &self.parent)).collect()
    }
}

/// A route of every connection to one backend.
pub(super) fn default_opaque_route(name: &str, backend: Backend, refuse: bool) -> OpaqueRoute {
    let filters =
        if refuse { vec![opaque_filter(opaque_route::filter::Kind::Forbidden(Forbidden {}))] } else { Vec::new() };
    let rule = opaque_route::Rule { backends: Some(opaque_first(backend)), filters };
    OpaqueRoute { metadata: Some(default_metadata(name)), rules: vec![rule] }
}

fn tls_route(route: &ConnectionRoute, parent: &OutboundParent, to_parent: &Backend) -> TlsRoute {
    use tls_route::{Distribution, Rule, distribution};
    let backends = match &route.backends[..] {
        [] => tls_first(to_parent.clone()),
        backends => {
            let backends = backends.iter().map(|backend| tls_backend(backend, parent)).collect();
            Distribution { kind: Some(distribution::Kind::RandomAvailable(distribution::RandomAvailable { backends })) }
        }
    };
    TlsRoute {
        metadata: Some(route_metadata(&route.id)),
        snis: route.names.iter().map(sni).collect(),
        rules: vec![Rule { backends: Some(backends), filters: Vec::new() }],
    }
}

fn opaque_route(route: &ConnectionRoute, parent: &OutboundParent, to_parent: &Backend) -> OpaqueRoute {
    use opaque_route::{Distribution, Rule, distribution};
    let backends = match &route.backends[..] {
        [] => opaque_first(to_parent.clone()),
        backends => {
            let backends = backends.iter().map(|backend| opaque_backend(backend, parent)).collect();
            Distribution { kind: Some(distribution::Kind::RandomAvailable(distribution::RandomAvailable { backends })) }
        }
    };
    let rule = Rule { backends: Some(backends), filters: Vec::new() };
    OpaqueRoute { metadata: Some(route_metadata(&route.id)), rules: vec![rule] }
}

fn tls_backend(backend: &RouteBackend, parent: &OutboundParent) -> tls_route::WeightedRouteBackend {
    let invalid = |problem: &String| tls_filter(tls_route::filter::Kind::Invalid(Invalid { message: problem.clone() }));
    let message = tls_route::RouteBackend {
        backend: Some(backend::of_route(backend, parent, plain_load())),
        filters: backend.problem.iter().map(invalid).collect(),
    };
    tls_route::WeightedRouteBackend { backend: Some(message), weight: backend.weight }
}

fn opaque_backend(backend: &RouteBackend, parent: &OutboundParent) -> opaque_route::WeightedRouteBackend {
    let invalid =
        |problem: &String| opaque_filter(opaque_route::filter::Kind::Invalid(Invalid { message: problem.clone() }));
    let message = opaque_route::RouteBackend {
        backend: Some(backend::of_route(backend, parent, plain_load())),
        filters: backend.problem.iter().map(invalid).collect(),
    };
    opaque_route::WeightedRouteBackend { backend: Some(message), weight: backend.weight }
}

/// Connections have no responses by which an endpoint could be penalised.
fn plain_load() -> Load {
    backend::load(None)
}

fn tls_first(backend: Backend) -> tls_route::Distribution {
    use tls_route::distribution::{FirstAvailable, Kind};
    let backend = tls_route::RouteBackend { backend: Some(backend), filters: Vec::new() };
    tls_route::Distribution { kind: Some(Kind::FirstAvailable(FirstAvailable { backends: vec![backend] })) }
}

fn opaque_first(backend: Backend) -> opaque_route::Distribution {
    use opaque_route::distribution::{FirstAvailable, Kind};
    let backend = opaque_route::RouteBackend { backend: Some(backend), filters: Vec::new() };
    opaque_route::Distribution { kind: Some(Kind::FirstAvailable(FirstAvailable { backends: vec![backend] })) }
}

fn tls_filter(kind: tls_route::filter::Kind) -> tls_route::Filter {
    tls_route::Filter { kind: Some(kind) }
}

fn opaque_filter(kind: opaque_route::filter::Kind) -> opaque_route::Filter {
    opaque_route::Filter { kind: Some(kind) }
}

/// A server name, of which the labels of a suffix go from the end.
fn sni(name: &HostMatch) -> SniMatch {
    let found = match name {
        HostMatch::Exact(name) => sni_match::Match::Exact(name.clone()),
        HostMatch::Suffix(labels) => {
            sni_match::Match::Suffix(sni_match::Suffix { reverse_labels: labels.iter().rev().cloned().collect() })
        }
    };
    SniMatch { r#match: Some(found) }
}
