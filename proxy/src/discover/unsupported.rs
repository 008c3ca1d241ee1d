//! Fields of policies and profiles that this proxy does not act on: logged and counted, once for each policy.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use parking_lot::Mutex;
use weft_proto::linkerd::{
    destination::DestinationProfile,
    outbound::{self, FailureAccrual, OutboundPolicy, backend, proxy_protocol},
};

use crate::{
    metrics::{Counters, label},
    route::Meta,
};

/// The most policies that are remembered; beyond that they are reported again.
const REPORTED: usize = 1024;

/// Reports unsupported fields. Clones share the memory of reports.
#[derive(Clone)]
pub(super) struct UnsupportedFields {
    counters: Counters,
    reported: Arc<Mutex<HashSet<(Meta, &'static str)>>>,
}

impl UnsupportedFields {
    pub(super) fn new(counters: Counters) -> Self {
        Self { counters, reported: Arc::default() }
    }

    /// Reports `fields`, except those that were reported for this policy before.
    pub(super) fn report(&self, policy: &Meta, fields: BTreeSet<&'static str>) {
        let mut reported = self.reported.lock();
        if reported.len() + fields.len() > REPORTED {
            reported.clear();
        }
        let new: Vec<&str> = fields.into_iter().filter(|field| reported.insert((policy.clone(), *field))).collect();
        drop(reported);
        if new.is_empty() {
            return;
        }
        for field in &new {
            self.counters.get_or_create_owned(&vec![label("field", *field)]).inc();
        }
        let Meta { group, kind, namespace, name, port, .. } = policy;
        tracing::warn!(%group, %kind, %namespace, %name, port, fields = new.join(", "),
            "policy has fields that this proxy does not support; it runs without them");
    }
}

/// Adds the unsupported fields of the rules of a message of the module `$module`.
macro_rules! add_rules {
    ($module:ident, $routes:expr, $fields:expr) => {
        for rule in $routes.iter().flat_map(|route| &route.rules) {
            use outbound::$module::distribution::Kind;
            let timeouts = rule.timeouts.unwrap_or_default();
            #[expect(deprecated, reason = "older controllers send the response's timeout here alone")]
            let response = timeouts.response.is_some() || rule.request_timeout.is_some();
            let backends: Vec<_> = match rule.backends.as_ref().and_then(|backends| backends.kind.as_ref()) {
                Some(Kind::FirstAvailable(first)) => first.backends.iter().collect(),
                Some(Kind::RandomAvailable(random)) => {
                    random.backends.iter().filter_map(|weighted| weighted.backend.as_ref()).collect()
                }
                Some(Kind::Empty(_)) | None => Vec::new(),
            };
            let penalizes = backends.iter().filter_map(|backend| backend.backend.as_ref()).any(is_penalizing);
            for (field, is_set) in [
                ("timeouts.response", response),
                ("timeouts.idle", timeouts.idle.is_some()),
                ("retry", rule.retry.is_some()),
                ("allow_l5d_request_headers", rule.allow_l5d_request_headers),
                ("balancer.penalty_peak_ewma", penalizes),
            ] {
                if is_set {
                    $fields.insert(field);
                }
            }
        }
    };
}

/// The unsupported fields that a policy sets.
pub(super) fn find_in_policy(policy: &OutboundPolicy) -> BTreeSet<&'static str> {
    use proxy_protocol::Kind;
    let mut fields = BTreeSet::new();
    let accrual = |accrual: &Option<FailureAccrual>| accrual.as_ref().is_some_and(|accrual| accrual.kind.is_some());
    let mut breaks = false;
    let (http1, http2, grpc) = match policy.protocol.as_ref().and_then(|protocol| protocol.kind.as_ref()) {
        Some(Kind::Detect(detect)) => (detect.http1.as_ref(), detect.http2.as_ref(), None),
        Some(Kind::Http1(http1)) => (Some(http1), None, None),
        Some(Kind::Http2(http2)) => (None, Some(http2), None),
        Some(Kind::Grpc(grpc)) => (None, None, Some(grpc)),
        Some(Kind::Opaque(_) | Kind::Tls(_)) | None => (None, None, None),
    };
    if let Some(http1) = http1 {
        breaks |= accrual(&http1.failure_accrual);
        add_rules!(http_route, http1.routes, fields);
    }
    if let Some(http2) = http2 {
        breaks |= accrual(&http2.failure_accrual);
        add_rules!(http_route, http2.routes, fields);
    }
    if let Some(grpc) = grpc {
        breaks |= accrual(&grpc.failure_accrual);
        add_rules!(grpc_route, grpc.routes, fields);
    }
    if breaks {
        fields.insert("failure_accrual");
    }
    fields
}

/// The unsupported fields that a profile sets.
pub(super) fn find_in_profile(profile: &DestinationProfile) -> BTreeSet<&'static str> {
    (!profile.routes.is_empty()).then_some("routes").into_iter().collect()
}

fn is_penalizing(backend: &outbound::Backend) -> bool {
    let Some(backend::Kind::Balancer(balancer)) = &backend.kind else { return false };
    matches!(balancer.load, Some(backend::balance_p2c::Load::PenaltyPeakEwma(_)))
}

#[cfg(test)]
mod tests {
    use outbound::http_route::{Distribution, Retry, RouteBackend, Rule, distribution};
    use weft_proto::linkerd::{destination::Route, http_route::Timeouts};

    use super::*;

    fn policy(rule: Rule, failure_accrual: Option<FailureAccrual>) -> OutboundPolicy {
        let routes = vec![outbound::HttpRoute { rules: vec![rule], ..Default::default() }];
        let kind = Some(proxy_protocol::Kind::Http2(proxy_protocol::Http2 { routes, failure_accrual }));
        OutboundPolicy { protocol: Some(outbound::ProxyProtocol { kind }), metadata: None }
    }

    #[test]
    fn every_field_that_has_no_effect_is_named() {
        assert!(find_in_policy(&policy(Rule::default(), Some(FailureAccrual::default()))).is_empty());
        let duration = || std::time::Duration::from_secs(1).try_into().ok();
        let supported =
            Rule { timeouts: Some(Timeouts { request: duration(), ..Default::default() }), ..Default::default() };
        assert!(find_in_policy(&policy(supported, None)).is_empty());
        let load = backend::balance_p2c::Load::PenaltyPeakEwma(Default::default());
        let balancer = backend::BalanceP2c { discovery: None, load: Some(load) };
        let backend = outbound::Backend { kind: Some(backend::Kind::Balancer(balancer)), ..Default::default() };
        let backends = vec![RouteBackend { backend: Some(backend), ..Default::default() }];
        let first = distribution::Kind::FirstAvailable(distribution::FirstAvailable { backends });
        let rule = Rule {
            timeouts: Some(Timeouts { response: duration(), request: None, idle: duration() }),
            retry: Some(Retry::default()),
            allow_l5d_request_headers: true,
            backends: Some(Distribution { kind: Some(first) }),
            ..Default::default()
        };
        let kind = outbound::failure_accrual::Kind::ConsecutiveFailures(Default::default());
        let accrual = FailureAccrual { kind: Some(kind), ..Default::default() };
        let named: Vec<&str> = find_in_policy(&policy(rule, Some(accrual))).into_iter().collect();
        assert_eq!(
            named,
            [
                "allow_l5d_request_headers",
                "balancer.penalty_peak_ewma",
                "failure_accrual",
                "retry",
                "timeouts.idle",
                "timeouts.response",
            ]
        );
        let profile = DestinationProfile { routes: vec![Route::default()], ..Default::default() };
        assert_eq!(find_in_profile(&profile).len(), 1);
        assert!(find_in_profile(&DestinationProfile::default()).is_empty());
    }

    #[test]
    fn a_policys_field_is_reported_once() {
        let counters = Counters::default();
        let unsupported = UnsupportedFields::new(counters.clone());
        let (web, api) = (Meta::built_in("web"), Meta::built_in("api"));
        for (policy, field) in [(&web, "retry"), (&web, "retry"), (&api, "retry"), (&web, "routes")] {
            unsupported.clone().report(policy, BTreeSet::from([field]));
        }
        let count = |field: &'static str| counters.get_or_create_owned(&vec![label("field", field)]).get();
        assert_eq!((count("retry"), count("routes")), (2, 1));
    }
}
