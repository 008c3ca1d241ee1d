//! What a worker counts of the rules of one plan: looked up when a rule has its first request, found by position
//! afterwards.

use std::sync::{Arc, OnceLock};

use crate::{
    discover::route::{Action, Backend, HttpRoutes},
    metrics::{BackendMetrics, Direction, ProfileMetrics, RouteMetrics},
    route::Meta,
    shared::Shared,
};

/// The rules of a plan's sets of routes.
pub(super) struct Rules(Vec<Vec<Vec<RuleSlot>>>);

/// A rule's metrics, once it has had a request.
#[derive(Default)]
pub(super) struct RuleSlot(OnceLock<RuleMetrics>);

/// What is counted of one rule.
pub(super) struct RuleMetrics {
    /// `outbound_{http,grpc}_route_*`.
    pub(super) route: RouteMetrics,
    /// `route_*` and `route_actual_*`, of a ServiceProfile's route.
    pub(super) profile: Option<ProfileMetrics>,
    /// `outbound_{http,grpc}_route_backend_*`.
    backends: Vec<(Arc<Backend>, OnceLock<Arc<BackendMetrics>>)>,
}

impl Rules {
    /// Room for the rules of each set.
    pub(super) fn new(sets: &[&HttpRoutes]) -> Self {
        let slots = |count: usize| (0..count).map(|_| RuleSlot::default()).collect();
        Self(sets.iter().map(|routes| routes.rules_by_route().map(slots).collect()).collect())
    }

    /// The rule at a position: its set, its route, its place there.
    pub(super) fn get(&self, set: usize, route: usize, rule: usize) -> Option<&RuleSlot> {
        self.0.get(set)?.get(route)?.get(rule)
    }
}

impl RuleSlot {
    /// The rule's metrics; `parent` and `action` are always the same.
    pub(super) fn metrics(&self, shared: &Shared, parent: &Meta, action: &Action) -> &RuleMetrics {
        self.0.get_or_init(|| RuleMetrics::new(shared, parent, action))
    }
}

impl RuleMetrics {
    fn new(shared: &Shared, parent: &Meta, action: &Action) -> Self {
        let mut labels = parent.labels_with_port("parent");
        labels.extend(action.meta.labels("route"));
        let profile = action.profile.as_ref();
        let backends = action.backends.backends().map(|backend| (Arc::clone(&backend.backend), OnceLock::new()));
        Self {
            route: shared.metrics.route(action.is_grpc, labels, shared.config.outbound.hostname_labels),
            profile: profile.map(|of| shared.metrics.profile_route(Direction::Outbound, &of.dst, &of.route)),
            backends: backends.collect(),
        }
    }

    /// The metrics of one of the rule's backends.
    pub(super) fn backend(&self, backend: &Arc<Backend>) -> Arc<BackendMetrics> {
        let look_up = || Arc::new(self.route.backend(backend.meta.labels_with_port("backend")));
        match self.backends.iter().find(|(known, _)| Arc::ptr_eq(known, backend)) {
            Some((_, metrics)) => Arc::clone(metrics.get_or_init(look_up)),
            None => look_up(),
        }
    }
}

/// The labels of a balancer.
pub(super) fn balancer_labels(parent: &Meta, backend: &Meta) -> crate::metrics::Labels {
    let mut labels = parent.labels_with_port("parent");
    labels.extend(backend.labels_with_port("backend"));
    labels
}
