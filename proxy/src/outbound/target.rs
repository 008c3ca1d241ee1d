//! One original destination as a worker uses it: the plan made from profile and policy, rebuilt when either changes.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use rand::RngExt as _;
use tokio::sync::watch;

use super::backends::{Backends, Resolved};
use crate::{
    discover::{
        Lookup,
        policy::PolicyState,
        profile::{Profile, ProfileState},
        route::{Action, Backend, Distribution, HttpRoutes, OpaqueRoute, Policy, Protocol, RouteBackend, forward_to},
    },
    metrics::{Direction, Labels, Peer, ProfileMetrics, RetryCounters, TransportMetrics, label, target_labels},
    shared::Shared,
};

/// Deadline for the control plane's first answer about a destination.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a destination has no plan.
#[derive(Debug, thiserror::Error)]
pub(super) enum TargetError {
    /// The control plane did not answer in time.
    #[error("no answer from the control plane about {0} in time: is it reachable?")]
    Timeout(SocketAddr),
    /// The policy controller refuses the address.
    #[error("the policy controller refuses to answer about {0}")]
    Refused(SocketAddr),
}

impl TargetError {
    /// The value of the metric label `error`.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "discovery_timeout",
            Self::Refused(_) => "discovery_refused",
        }
    }
}

/// An original destination.
pub(super) struct OutboundTarget {
    /// Its address.
    pub(super) addr: SocketAddr,
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
    backends: Vec<(Arc<Backend>, Resolved)>,
    statuses: RuleStatuses,
    requests: BackendRequests,
    /// `outbound_http_route_retry_*`, per rule that has retried.
    retries: Mutex<Vec<(RuleId, Arc<RetryCounters>)>>,
    /// `route_*` and `route_actual_*`, per route of a ServiceProfile.
    profiles: Mutex<Vec<(RuleId, Arc<ProfileMetrics>)>>,
}

/// `outbound_http_route_request_statuses_total`, per rule and status; few, so that a scan is fastest.
type RuleStatuses = Mutex<Vec<(RuleId, u16, Counter)>>;

/// `outbound_http_route_backend_requests_total`, per rule and backend.
type BackendRequests = Mutex<Vec<(RuleId, Arc<Backend>, Counter)>>;

/// Position of a rule in a plan: HTTP/2 or not, route, rule.
pub(super) type RuleId = (bool, usize, usize);

impl OutboundTarget {
    /// Creates a destination from a pending lookup.
    pub(super) fn new(shared: Arc<Shared>, backends: Arc<Backends>, addr: SocketAddr, lookup: Arc<Lookup>) -> Self {
        let current = Current { profile: lookup.profile.clone(), policy: lookup.policy.clone(), plan: None };
        Self { addr, shared, backends, lookup, current: Mutex::new(current), source_metrics: OnceLock::new() }
    }

    /// The plan, once the control plane has answered.
    ///
    /// # Errors
    /// When it does not answer in time, or refuses.
    pub(super) async fn ready(&self) -> Result<Arc<RoutingPlan>, TargetError> {
        if let Some(plan) = self.plan() {
            return Ok(plan);
        }
        let (mut profile, mut policy) = (self.lookup.profile.clone(), self.lookup.policy.clone());
        let answers = async {
            let profile = profile.wait_for(|state| !matches!(state, ProfileState::Pending)).await.is_ok();
            profile && policy.wait_for(|state| !matches!(state, PolicyState::Pending)).await.is_ok()
        };
        if !tokio::time::timeout(DISCOVERY_TIMEOUT, answers).await.unwrap_or(false) {
            return Err(TargetError::Timeout(self.addr));
        }
        self.plan().ok_or(TargetError::Refused(self.addr))
    }

    /// The current plan; `None` if there is no answer, or if the answer is a refusal.
    pub(super) fn plan(&self) -> Option<Arc<RoutingPlan>> {
        let mut current = self.current.lock();
        let changed = current.profile.has_changed().unwrap_or(false) || current.policy.has_changed().unwrap_or(false);
        if changed || current.plan.is_none() {
            let profile = current.profile.borrow_and_update().clone();
            let policy = current.policy.borrow_and_update().clone();
            let detect_timeout = self.shared.config.outbound.detect_timeout;
            let policy = decide(&profile, &policy, self.addr, detect_timeout)?;
            // The old plan is dropped afterwards, so that parts in both stay alive.
            current.plan = Some(Arc::new(RoutingPlan::new(policy, &self.backends)));
        }
        current.plan.clone()
    }

    /// Metrics of accepted connections to this destination.
    pub(super) fn source_metrics(&self) -> Arc<TransportMetrics> {
        let metrics = self.source_metrics.get_or_init(|| {
            let mut labels = target_labels(self.addr);
            labels.push(label("tls", "no_identity"));
            labels.push(label("no_tls_reason", "loopback"));
            Arc::new(self.shared.metrics.transport(Direction::Outbound, Peer::Src, &labels))
        });
        Arc::clone(metrics)
    }
}

impl RoutingPlan {
    fn new(policy: Policy, known: &Backends) -> Self {
        let mut backends: Vec<(Arc<Backend>, Resolved)> = Vec::new();
        let mut resolve = |distribution: &Distribution| {
            for backend in distribution.backends() {
                if !backends.iter().any(|(named, _)| Arc::ptr_eq(named, &backend.backend)) {
                    backends.push((Arc::clone(&backend.backend), known.resolve(&backend.backend)));
                }
            }
        };
        let (http, opaque): (Vec<&HttpRoutes>, Option<_>) = match &policy.protocol {
            Protocol::Detect { http1, http2, opaque, .. } => (vec![http1, http2], Some(opaque)),
            Protocol::Http1(http) | Protocol::Http2(http) => (vec![http], None),
            Protocol::Opaque(opaque) | Protocol::Tls(opaque) => (vec![], Some(opaque)),
        };
        for action in http.iter().flat_map(|routes| routes.actions()) {
            resolve(&action.backends);
        }
        for route in opaque.iter().flat_map(|routes| routes.iter()) {
            resolve(&route.backends);
        }
        Self {
            policy,
            backends,
            statuses: Mutex::default(),
            requests: Mutex::default(),
            retries: Mutex::default(),
            profiles: Mutex::default(),
        }
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

    /// Picks a backend, preferring backends with an available endpoint.
    pub(super) fn pick<'a>(&'a self, distribution: &'a Distribution) -> Option<(&'a RouteBackend, Resolved)> {
        match distribution {
            Distribution::Empty => None,
            Distribution::FirstAvailable(backends) => {
                let available = match &backends[..] {
                    [only] => Some(only),
                    many => many.iter().find(|backend| self.is_available(backend)).or_else(|| many.first()),
                };
                self.resolved(available?)
            }
            Distribution::Random(backends) => {
                let available: Vec<_> = backends.iter().filter(|(backend, _)| self.is_available(backend)).collect();
                let among = if available.is_empty() { backends.iter().collect() } else { available };
                let total: u64 = among.iter().map(|(_, weight)| u64::from(*weight)).sum();
                if total == 0 {
                    return None;
                }
                let mut left = rand::rng().random_range(0..total);
                let picked = among.into_iter().find(|(_, weight)| match left.checked_sub(u64::from(*weight)) {
                    Some(rest) => {
                        left = rest;
                        false
                    }
                    None => true,
                });
                self.resolved(&picked?.0)
            }
        }
    }

    /// Counts a request under its route and backend.
    pub(super) fn count_backend(&self, shared: &Shared, id: RuleId, action: &Action, backend: &Arc<Backend>) {
        let mut requests = self.requests.lock();
        if let Some((.., counter)) = requests.iter().find(|(known, of, _)| *known == id && Arc::ptr_eq(of, backend)) {
            counter.inc();
            return;
        }
        let mut labels = self.route_labels(action);
        labels.extend(backend.meta.labels_with_port("backend"));
        let counter = shared.metrics.outbound_backend_requests.get_or_create_owned(&labels);
        counter.inc();
        requests.push((id, Arc::clone(backend), counter));
    }

    /// Counts a response under its route.
    pub(super) fn count_status(&self, shared: &Shared, id: RuleId, action: &Action, status: u16, error: &'static str) {
        let mut statuses = self.statuses.lock();
        // Errors are rare and their labels vary, so only plain statuses are remembered.
        if let Some((.., counter)) =
            statuses.iter().find(|(known, code, _)| error.is_empty() && *known == id && *code == status)
        {
            counter.inc();
            return;
        }
        let mut labels = self.route_labels(action);
        labels.push(label("http_status", status.to_string()));
        labels.push(label("error", error));
        let counter = shared.metrics.outbound_route_statuses.get_or_create_owned(&labels);
        counter.inc();
        if error.is_empty() {
            statuses.push((id, status, counter));
        }
    }

    /// The counters of a rule's retries.
    pub(super) fn retries(&self, shared: &Shared, id: RuleId, action: &Action) -> Arc<RetryCounters> {
        let mut retries = self.retries.lock();
        if let Some((_, known)) = retries.iter().find(|(known, _)| *known == id) {
            return Arc::clone(known);
        }
        let counters = Arc::new(shared.metrics.retries.counters(&self.route_labels(action)));
        retries.push((id, Arc::clone(&counters)));
        counters
    }

    /// The metrics of a ServiceProfile's route.
    pub(super) fn profile(&self, shared: &Shared, id: RuleId, action: &Action) -> Option<Arc<ProfileMetrics>> {
        let profile = action.profile.as_ref()?;
        let mut profiles = self.profiles.lock();
        if let Some((_, known)) = profiles.iter().find(|(known, _)| *known == id) {
            return Some(Arc::clone(known));
        }
        let metrics = Arc::new(shared.metrics.profile_route(Direction::Outbound, &profile.dst, &profile.route));
        profiles.push((id, Arc::clone(&metrics)));
        Some(metrics)
    }

    fn route_labels(&self, action: &Action) -> Labels {
        let mut labels = self.policy.parent.labels_with_port("parent");
        labels.extend(action.meta.labels("route"));
        labels.push(label("hostname", ""));
        labels
    }

    fn resolved<'a>(&'a self, backend: &'a RouteBackend) -> Option<(&'a RouteBackend, Resolved)> {
        let found = self.backends.iter().find(|(known, _)| Arc::ptr_eq(known, &backend.backend))?;
        Some((backend, found.1.clone()))
    }

    fn is_available(&self, backend: &RouteBackend) -> bool {
        match self.resolved(backend) {
            Some((_, Resolved::Balance(balancer))) => balancer.is_available(),
            // A backend that does not exist fails its share of the requests, as the Gateway API wants.
            Some((_, Resolved::Forward(_) | Resolved::Missing)) => true,
            None => false,
        }
    }
}

impl Distribution {
    /// The first backend.
    pub(super) fn first(&self) -> Option<&Backend> {
        self.backends().next().map(|backend| &*backend.backend)
    }

    fn backends(&self) -> impl Iterator<Item = &RouteBackend> {
        let (first, random): (&[RouteBackend], &[(RouteBackend, u32)]) = match self {
            Self::Empty => (&[], &[]),
            Self::FirstAvailable(backends) => (backends, &[]),
            Self::Random(backends) => (&[], backends),
        };
        first.iter().chain(random.iter().map(|(backend, _)| backend))
    }
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

/// The result of profile and policy together; `None` if connections must be refused.
///
/// A ServiceProfile with routes or overrides takes requests from the policy, and one with overrides opaque connections too, as in
/// Linkerd.
fn decide(profile: &ProfileState, policy: &PolicyState, addr: SocketAddr, detect_timeout: Duration) -> Option<Policy> {
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
        Some(Profile { endpoint: Some(endpoint), .. }) => Distribution::only(Backend::forward(Arc::clone(endpoint))),
        Some(Profile { name: Some(name), .. }) => {
            Distribution::only(Backend::balance(format!("{name}:{}", addr.port())))
        }
        _ => forward_to(addr),
    };
    let policy = match policy {
        PolicyState::Pending | PolicyState::Refused => return None,
        PolicyState::Absent => Policy::synthesize(overrides.clone().unwrap_or_else(by_profile), opaque, detect_timeout),
        PolicyState::Known(policy) => Policy::clone(policy),
    };
    let of_profile = profile.filter(|profile| profile.takes_requests());
    let policy = match of_profile {
        Some(profile) => {
            let routes = profile.http_routes(&overrides.clone().unwrap_or_else(by_profile), addr.port());
            policy.overridden(routes, overrides.as_ref())
        }
        None => policy,
    };
    if !opaque {
        return Some(policy);
    }
    Some(match policy.opaque_routes() {
        Some(routes) => Policy { parent: policy.parent, protocol: Protocol::Opaque(routes) },
        None => Policy::synthesize(by_profile(), true, detect_timeout),
    })
}
