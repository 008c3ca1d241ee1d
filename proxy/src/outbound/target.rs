//! One destination as a worker uses it: the plan made from profile and policy, rebuilt when either changes.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::future::select_all;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use rand::seq::IndexedRandom as _;
use tokio::{sync::watch, time::Instant};

use super::{
    backends::{Backends, Resolved},
    rules::{RuleSlot, Rules},
};
use crate::{
    destination::Destination,
    discover::{
        Lookup,
        policy::PolicyState,
        profile::{Profile, ProfileState},
        route::{Backend, Distribution, HttpRoutes, OpaqueRoute, Policy, Protocol, RouteBackend, forward_to},
    },
    metrics::{
        BalancerKind, ByHost, DetectMetrics, Direction, InUse, Labels, Peer, TcpRouteMetrics, TransportMetrics, label,
    },
    route::Meta,
    shared::Shared,
};

/// Why a destination has no plan.
#[derive(Debug, thiserror::Error)]
pub(super) enum TargetError {
    /// The control plane did not answer in time.
    #[error("no answer from the control plane about {0} in time: is it reachable?")]
    Timeout(Destination),
    /// The policy controller refuses the address, or nothing is known about the name.
    #[error("the control plane knows nothing about {0}, or refuses to answer")]
    Refused(Destination),
}

impl TargetError {
    /// The value of the metric label `error`.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "discovery timeout",
            Self::Refused(_) => "discovery refused",
        }
    }
}

/// A destination.
pub(super) struct OutboundTarget {
    /// Its address, or its name.
    pub(super) destination: Destination,
    shared: Arc<Shared>,
    backends: Arc<Backends>,
    lookup: Arc<Lookup>,
    current: Mutex<Current>,
    source_metrics: OnceLock<Arc<TransportMetrics>>,
}

struct Current {
    profile: watch::Receiver<ProfileState>,
    policy: watch::Receiver<PolicyState>,
    plan: Option<Arc<RoutingPlan>>,
}

/// A policy with its backends resolved.
pub(super) struct RoutingPlan {
    /// The policy, adjusted to the profile.
    pub(super) policy: Policy,
    backends: Vec<(Arc<Backend>, BalancerKind, Resolved)>,
    rules: Rules,
    detect: OnceLock<DetectMetrics>,
    /// `outbound_tcp_protocol_connections_total`.
    accepted: OnceLock<(InUse, Counter)>,
    /// By position among the routes of connections.
    connections: Vec<ByHost<TcpRouteMetrics>>,
}

impl OutboundTarget {
    /// Creates a destination from a pending lookup.
    pub(super) fn new(
        shared: Arc<Shared>,
        backends: Arc<Backends>,
        destination: Destination,
        lookup: Arc<Lookup>,
    ) -> Self {
        let current = Current { profile: lookup.profile.clone(), policy: lookup.policy.clone(), plan: None };
        Self { destination, shared, backends, lookup, current: Mutex::new(current), source_metrics: OnceLock::new() }
    }

    /// The plan, once the control plane has answered.
    ///
    /// # Errors
    /// When it does not answer in time, or refuses.
    pub(super) async fn ready(&self) -> Result<Arc<RoutingPlan>, TargetError> {
        if let Some(plan) = self.plan() {
            return Ok(plan);
        }
        // Boxed: a request for a known destination needs no room for it.
        Box::pin(self.await_plan()).await
    }

    async fn await_plan(&self) -> Result<Arc<RoutingPlan>, TargetError> {
        let (mut profile, mut policy) = (self.lookup.profile.clone(), self.lookup.policy.clone());
        let answers = async {
            let profile = profile.wait_for(|state| !matches!(state, ProfileState::Pending)).await.is_ok();
            profile && policy.wait_for(|state| !matches!(state, PolicyState::Pending)).await.is_ok()
        };
        if !tokio::time::timeout(self.shared.config.outbound.discovery_timeout, answers).await.unwrap_or(false) {
            return Err(TargetError::Timeout(self.destination.clone()));
        }
        self.plan().ok_or_else(|| TargetError::Refused(self.destination.clone()))
    }

    /// The current plan; `None` if there is no answer, or if the answer is a refusal.
    pub(super) fn plan(&self) -> Option<Arc<RoutingPlan>> {
        let mut current = self.current.lock();
        let changed = current.profile.has_changed().unwrap_or(false) || current.policy.has_changed().unwrap_or(false);
        if changed || current.plan.is_none() {
            let profile = current.profile.borrow_and_update().clone();
            let policy = current.policy.borrow_and_update().clone();
            let detect_timeout = self.shared.config.outbound.detect_timeout;
            let policy = decide(&profile, &policy, &self.destination, detect_timeout);
            // The old plan is dropped afterwards, so that parts in both stay alive.
            current.plan = policy.map(|policy| Arc::new(RoutingPlan::new(policy, &self.backends)));
        }
        current.plan.clone()
    }

    /// The labels `target_addr`, `target_ip` and `target_port`. A name has no address, and may be anything.
    pub(super) fn labels(&self) -> Labels {
        match &self.destination {
            Destination::Addr(addr) => self.shared.metrics.dialled.labels(*addr),
            Destination::Name(_) => no_target(),
        }
    }

    /// Metrics of accepted connections to this destination.
    pub(super) fn source_metrics(&self) -> Arc<TransportMetrics> {
        let metrics = self.source_metrics.get_or_init(|| {
            let mut labels = self.labels();
            labels.push(label("tls", "no_identity"));
            labels.push(label("no_tls_reason", "loopback"));
            Arc::new(self.shared.metrics.transport(Direction::Outbound, Peer::Src, &labels))
        });
        Arc::clone(metrics)
    }
}

impl RoutingPlan {
    fn new(policy: Policy, known: &Backends) -> Self {
        let mut backends: Vec<(Arc<Backend>, BalancerKind, Resolved)> = Vec::new();
        let mut resolve = |distribution: &Distribution, kind: BalancerKind| {
            for backend in distribution.backends() {
                if !backends.iter().any(|(named, of, _)| Arc::ptr_eq(named, &backend.backend) && *of == kind) {
                    let resolved = known.resolve(&backend.backend, &policy.parent, kind);
                    backends.push((Arc::clone(&backend.backend), kind, resolved));
                }
            }
        };
        let (http, opaque): (Vec<&HttpRoutes>, Option<_>) = match &policy.protocol {
            Protocol::Detect { http1, http2, opaque, .. } => (vec![http1, http2], Some(opaque)),
            Protocol::Http1(http) | Protocol::Http2(http) => (vec![http], None),
            Protocol::Opaque(opaque) | Protocol::Tls(opaque) => (vec![], Some(opaque)),
        };
        for action in http.iter().flat_map(|routes| routes.actions()) {
            resolve(&action.backends, BalancerKind::Http);
        }
        for route in opaque.iter().flat_map(|routes| routes.iter()) {
            resolve(&route.backends, policy.opaque_kind());
        }
        let rules = Rules::new(&http);
        let has_names = policy.opaque_kind() == BalancerKind::Tls;
        let connections = opaque.iter().flat_map(|routes| routes.iter()).map(|_| ByHost::new(has_names)).collect();
        Self { backends, rules, detect: OnceLock::new(), accepted: OnceLock::new(), connections, policy }
    }

    /// The HTTP routes for a version; `None` if the policy is for another protocol.
    pub(super) fn http_routes(&self, http2: bool) -> Option<&HttpRoutes> {
        match &self.policy.protocol {
            Protocol::Detect { http2: routes, .. } if http2 => Some(routes),
            Protocol::Detect { http1: routes, .. } => Some(routes),
            Protocol::Http1(routes) | Protocol::Http2(routes) => Some(routes),
            Protocol::Opaque(_) | Protocol::Tls(_) => None,
        }
    }

    /// What is counted of a rule of [`Self::http_routes`].
    pub(super) fn rule(&self, http2: bool, route: usize, rule: usize) -> Option<&RuleSlot> {
        let has_two_sets = matches!(self.policy.protocol, Protocol::Detect { .. });
        self.rules.get(usize::from(http2 && has_two_sets), route, rule)
    }

    /// Counts a connection, by the protocol that policy says.
    pub(super) fn count(&self, shared: &Shared) {
        let Policy { parent, protocol, .. } = &self.policy;
        let (_, counter) = self.accepted.get_or_init(|| accepted(shared, parent, protocol.label()));
        counter.inc();
    }

    /// What is counted of detection.
    pub(super) fn detect(&self, shared: &Shared) -> &DetectMetrics {
        let labels = || self.policy.parent.labels_with_port("parent");
        self.detect.get_or_init(|| shared.metrics.detect(Direction::Outbound, labels()))
    }

    /// What is counted of connections on the route at this position: of opaque ones by the labels of their target, of
    /// TLS by their server name. `None` if there is no such route.
    pub(super) fn connections(
        &self,
        shared: &Shared,
        target: impl FnOnce() -> Labels,
        index: usize,
        server_name: Option<&str>,
    ) -> Option<Arc<TcpRouteMetrics>> {
        let (routes, by_host) = (self.policy.opaque_routes()?, self.connections.get(index)?);
        let route = routes.get(index)?;
        let is_tls = self.policy.opaque_kind() == BalancerKind::Tls;
        Some(by_host.of(server_name, |host| {
            let mut labels = self.policy.parent.labels_with_port("parent");
            labels.extend(route.meta.labels("route"));
            if is_tls {
                labels.push(label("hostname", host.to_owned()));
            } else {
                labels.extend(target().into_iter().skip(1));
            }
            shared.metrics.tcp_route(is_tls, labels)
        }))
    }

    /// Waits for a backend with an available endpoint while there is one whose endpoints are not known yet, until
    /// `deadline` at most. Otherwise what comes first would go to a backend without any. While a backend fails fast,
    /// nothing waits.
    pub(super) async fn settled(&self, distribution: &Distribution, kind: BalancerKind, deadline: Instant) {
        let is_available = || distribution.backends().any(|backend| self.is_available(backend, kind, None));
        if !distribution.is_choice() || is_available() {
            return;
        }
        let balancers = distribution.backends().filter_map(|backend| match self.resolved(backend, kind)?.1 {
            Resolved::Balance(balancer) => Some(balancer),
            Resolved::Forward(_) | Resolved::Missing => None,
        });
        let balancers: Vec<_> = balancers.collect();
        // Boxed: what comes later needs no room for it.
        let settled = Box::pin(async {
            loop {
                let unknown = balancers.iter().filter(|balancer| !balancer.is_known());
                let unknown: Vec<_> = unknown.map(|balancer| Box::pin(balancer.known())).collect();
                if unknown.is_empty() || is_available() {
                    return;
                }
                let failing_fast = balancers.iter().map(|balancer| Box::pin(balancer.failing_fast()));
                tokio::select! {
                    biased;
                    _ = select_all(failing_fast) => return,
                    _ = select_all(unknown) => {}
                }
            }
        });
        let _ = tokio::time::timeout_at(deadline, settled).await;
    }

    /// Picks a backend of requests or connections, preferring backends with an available endpoint, never `avoided` if
    /// another one has, and then those with any endpoint. One that does not exist fails its share, as the Gateway API
    /// wants, and nothing that leaves `avoided`.
    pub(super) fn pick<'a>(
        &'a self,
        distribution: &'a Distribution,
        kind: BalancerKind,
        avoided: Option<&Resolved>,
    ) -> Option<(&'a RouteBackend, Resolved)> {
        let is_available = |resolved: &Resolved| is_available(resolved, avoided);
        let is_taken = |resolved: &Resolved| match resolved {
            Resolved::Missing => avoided.is_none(),
            resolved => is_available(resolved),
        };
        match distribution {
            Distribution::Empty => None,
            Distribution::FirstAvailable(backends) => {
                if let [only] = &backends[..] {
                    return self.resolved(only, kind);
                }
                let all = || backends.iter().filter_map(|backend| self.resolved(backend, kind));
                let first = |is: &dyn Fn(&Resolved) -> bool| all().find(|(_, resolved)| is(resolved));
                first(&is_taken).or_else(|| first(&Resolved::has_endpoints)).or_else(|| all().next())
            }
            Distribution::Random(backends) => {
                let draw = |is: &dyn Fn(&Resolved) -> bool| {
                    let known = backends.iter().filter_map(|(backend, weight)| {
                        let (backend, resolved) = self.resolved(backend, kind)?;
                        is(&resolved).then_some((backend, resolved, *weight))
                    });
                    let known: Vec<_> = known.collect();
                    let weighted = known.choose_weighted(&mut rand::rng(), |(_, _, weight)| u64::from(*weight));
                    weighted.ok().map(|(backend, resolved, _)| (*backend, resolved.clone()))
                };
                let (drawn, _) = backends.choose_weighted(&mut rand::rng(), |(_, weight)| u64::from(*weight)).ok()?;
                let drawn = self.resolved(drawn, kind)?;
                if is_taken(&drawn.1) {
                    return Some(drawn);
                }
                draw(&is_available).or_else(|| draw(&Resolved::has_endpoints)).or(Some(drawn))
            }
        }
    }

    fn resolved<'a>(&'a self, backend: &'a RouteBackend, kind: BalancerKind) -> Option<(&'a RouteBackend, Resolved)> {
        let is_it = |known: &Arc<Backend>, of: BalancerKind| Arc::ptr_eq(known, &backend.backend) && of == kind;
        let found = self.backends.iter().find(|(known, of, _)| is_it(known, *of))?;
        Some((backend, found.2.clone()))
    }

    /// Whether an endpoint of one of the backends other than `avoided` is available.
    pub(super) fn has_available(
        &self,
        distribution: &Distribution,
        kind: BalancerKind,
        avoided: Option<&Resolved>,
    ) -> bool {
        distribution.backends().any(|backend| self.is_available(backend, kind, avoided))
    }

    fn is_available(&self, backend: &RouteBackend, kind: BalancerKind, avoided: Option<&Resolved>) -> bool {
        self.resolved(backend, kind).is_some_and(|(_, resolved)| is_available(&resolved, avoided))
    }
}

/// Whether an endpoint of a backend other than `avoided` is available.
fn is_available(resolved: &Resolved, avoided: Option<&Resolved>) -> bool {
    !avoided.is_some_and(|avoided| avoided.shares_endpoints(resolved)) && resolved.is_available()
}

impl Distribution {
    /// All backends that may be picked. One of weight 0 gets nothing, also where it alone has an endpoint.
    pub(super) fn backends(&self) -> impl Iterator<Item = &RouteBackend> {
        let (first, random): (&[RouteBackend], &[(RouteBackend, u32)]) = match self {
            Self::Empty => (&[], &[]),
            Self::FirstAvailable(backends) => (backends, &[]),
            Self::Random(backends) => (&[], backends),
        };
        first.iter().chain(random.iter().filter(|(_, weight)| *weight > 0).map(|(backend, _)| backend))
    }

    /// Whether there is more than one backend.
    pub(super) fn is_choice(&self) -> bool {
        self.backends().nth(1).is_some()
    }

    /// Whether a backend has filters of its own.
    pub(super) fn has_filters(&self) -> bool {
        self.backends().any(|backend| !backend.filters.is_empty())
    }
}

/// The labels of a target whose address is unknown.
pub(super) fn no_target() -> Labels {
    ["target_addr", "target_ip", "target_port"].map(|key| label(key, "")).into()
}

/// The counter of connections whose destination is this parent's, which says the protocol.
pub(super) fn accepted(shared: &Shared, parent: &Meta, protocol: &'static str) -> (InUse, Counter) {
    let mut labels = vec![label("protocol", protocol)];
    labels.extend(parent.labels_with_port("parent"));
    let metrics = &shared.metrics;
    metrics.counter(&metrics.outbound_protocol_connections, &labels)
}

/// The first route that accepts a connection with this server name.
pub(super) fn find_opaque<'a>(routes: &'a [OpaqueRoute], server_name: Option<&str>) -> Option<&'a OpaqueRoute> {
    let named = server_name.and_then(|name| {
        let ranked = routes.iter().filter_map(|route| {
            let rank = route.server_names.iter().filter_map(|host| host.rank(name)).max();
            rank.map(|rank| (rank, route))
        });
        // Among equals the first, as with requests.
        ranked.reduce(|best, next| if next.0 > best.0 { next } else { best }).map(|(_, route)| route)
    });
    named.or_else(|| routes.iter().find(|route| route.server_names.is_empty()))
}

/// The result of profile and policy together; `None` if connections must be refused: an address about which nothing is
/// known gets them as they are, and a name cannot.
///
/// A ServiceProfile with routes or overrides takes requests from the policy, and one with overrides opaque connections
/// too, as in Linkerd.
fn decide(
    profile: &ProfileState,
    policy: &PolicyState,
    destination: &Destination,
    detect_timeout: Duration,
) -> Option<Policy> {
    let profile: Option<&Profile> = match profile {
        ProfileState::Pending => return None,
        ProfileState::Absent => None,
        ProfileState::Known(profile) => Some(profile),
    };
    let opaque = profile.is_some_and(|profile| profile.opaque);
    let overrides = profile.and_then(|profile| {
        let backends = profile.overrides.iter().map(|(authority, weight)| {
            let backend = Arc::new(Backend::balance(authority.clone()));
            (RouteBackend { filters: Vec::new(), backend }, *weight)
        });
        (!profile.overrides.is_empty()).then(|| Distribution::Random(backends.collect()))
    });
    let by_profile = || match profile {
        Some(Profile { endpoint: Some(endpoint), .. }) => {
            Some(Distribution::only(Backend::forward(Arc::clone(endpoint))))
        }
        Some(Profile { name: Some(name), .. }) => {
            Some(Distribution::only(Backend::balance(format!("{name}:{}", destination.port()))))
        }
        _ => match destination {
            Destination::Addr(addr) => Some(forward_to(*addr)),
            Destination::Name(_) => None,
        },
    };
    let backends = || overrides.clone().or_else(by_profile);
    let policy = match policy {
        PolicyState::Pending | PolicyState::Refused => return None,
        PolicyState::Absent => Policy::synthesize(backends()?, opaque, detect_timeout),
        PolicyState::Known(policy) => Policy::clone(policy),
    };
    let of_profile = profile.filter(|profile| profile.takes_requests());
    let policy = match of_profile {
        Some(profile) => {
            let routes = profile.http_routes(&backends()?, destination.port());
            policy.overridden(routes, overrides.as_ref())
        }
        None => policy,
    };
    if !opaque {
        return Some(policy);
    }
    Some(match policy.opaque_routes() {
        Some(routes) => Policy { parent: policy.parent, protocol: Protocol::Opaque(routes) },
        None => Policy::synthesize(backends()?, true, detect_timeout),
    })
}
