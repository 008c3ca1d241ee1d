//! A destination's policy, as a policy controller sends it.

use std::{sync::Arc, time::Duration};

use http::{Request, Version};
use prost::Message as _;
use tokio::time::Instant;
use weft_proto::linkerd::{
    destination::{WeightedAddr, tls_identity::Strategy},
    outbound::{
        self, OutboundPolicy, backend,
        proxy_protocol::{Grpc, Http1, Http2, Kind, Opaque, Tls},
    },
};

use super::routes::{self, Matches, Parts, SentRoute, SentRule};
use crate::{
    destination::Destination,
    discover::{
        endpoint::EndpointInfo,
        policy,
        route::{
            Accrual, Action, Backend, BackendKind, Distribution, HttpRoutes, OpaqueRoute, Policy, Protocol,
            RouteBackend, SuccessRate,
        },
    },
    metrics::is_label_key,
    request::{
        backoff::Backoff,
        terms::{MAX_REPLAY_BYTES, RetryWhen, Terms},
    },
    route::{filter::apply_to_request, proto::MAX_DURATION},
};

/// Routes of requests as they were sent, and all their backends.
type SentRoutes<'a> = (Vec<SentRoute<'a>>, Vec<&'a outbound::Backend>);

/// The rules of an opaque or TLS route: the number of filters, and of each backend its filters.
struct SentConnections<'a> {
    filters: usize,
    backends: Vec<(usize, &'a outbound::Backend)>,
}

/// Reads a destination's policy.
pub(super) fn policy(bytes: &[u8]) {
    let Ok(message) = OutboundPolicy::decode(bytes) else { return };
    let destination = Destination::Addr(([10, 96, 0, 1], 80).into());
    let in_force = policy::in_force(message.clone(), &destination);
    let Ok(read) = Policy::read(message.clone()) else { return check_refuses(&in_force) };
    assert_eq!(format!("{read:?}"), format!("{in_force:?}"));
    assert!(Policy::read(OutboundPolicy { protocol: None, ..message.clone() }).is_err());
    let kind = message.protocol.as_ref().and_then(|protocol| protocol.kind.as_ref()).expect("it was read");
    match (&read.protocol, kind) {
        (Protocol::Detect { timeout, http1, http2, opaque }, Kind::Detect(sent)) => {
            check_duration(*timeout);
            check_http(http1, &http_routes(&sent.http1.as_ref().expect("it was read").routes));
            check_http(http2, &http_routes(&sent.http2.as_ref().expect("it was read").routes));
            check_connections(opaque, &opaque_rules(sent.opaque.as_ref().expect("it was read")));
        }
        (Protocol::Http1(read), Kind::Http1(Http1 { routes, .. }))
        | (Protocol::Http2(read), Kind::Http2(Http2 { routes, .. })) => check_http(read, &http_routes(routes)),
        (Protocol::Http2(read), Kind::Grpc(Grpc { routes, .. })) => check_http(read, &grpc_routes(routes)),
        (Protocol::Opaque(read), Kind::Opaque(sent)) => check_connections(read, &opaque_rules(sent)),
        (Protocol::Tls(read), Kind::Tls(sent)) => {
            check_connections(read, &tls_rules(sent));
            check_server_names(read, sent);
        }
        (read, sent) => panic!("{read:?} was read from {sent:?}"),
    }
}

/// Every request fails, and every other connection is closed.
fn check_refuses(policy: &Policy) {
    let Protocol::Detect { http1, http2, opaque, .. } = &policy.protocol else { panic!("{policy:?}") };
    for (routes, version) in [(http1, Version::HTTP_11), (http2, Version::HTTP_2)] {
        let mut request = Request::new(());
        *request.version_mut() = version;
        let found = routes.find(&request).expect("every request has a route");
        assert!(apply_to_request(&found.action.filters, found.prefix, &mut request).is_err());
        assert!(matches!(found.action.backends, Distribution::Empty));
    }
    assert!(!opaque.is_empty() && opaque.iter().all(|route| route.refuse.is_some()), "{opaque:?}");
}

fn check_http(read: &HttpRoutes, (sent, backends): &SentRoutes<'_>) {
    let HttpRoutes::Policy(routes) = read else { panic!("{read:?}") };
    routes::check_whole(sent, routes, |action: &Action| Parts {
        filters: action.filters.len(),
        backends: distributed(&action.backends).iter().map(|backend| backend.filters.len()).collect(),
    });
    for mut request in routes::requests(sent) {
        let found = read.find(&request).unwrap_or_else(|| panic!("no route for {request:?}"));
        routes::apply(&found.action.filters, found.prefix, &mut request);
        for backend in distributed(&found.action.backends) {
            routes::apply(&backend.filters, found.prefix, &mut request);
        }
    }
    let read: Vec<_> = read.actions().flat_map(|action| distributed(&action.backends)).collect();
    assert_eq!(read.len(), backends.len());
    for (read, sent) in read.iter().zip(backends) {
        check_backend(&read.backend, sent);
    }
    for route in routes.iter() {
        route.rules.iter().for_each(|rule| check_terms(&rule.action.terms));
        let names: Vec<_> = route.rules.iter().map(|rule| &rule.action.meta.name).collect();
        assert!(names.windows(2).all(|pair| Arc::ptr_eq(pair[0], pair[1])), "copies for each rule");
    }
}

/// Each rule is a route. One with a filter refuses, and a backend with a filter gets no connections.
fn check_connections(read: &[OpaqueRoute], sent: &[SentConnections<'_>]) {
    assert_eq!(read.len(), sent.len());
    for (read, sent) in read.iter().zip(sent) {
        assert_eq!(read.refuse.is_some(), sent.filters > 0, "{read:?}");
        let backends = distributed(&read.backends);
        assert_eq!(backends.len(), sent.backends.len());
        for (read, (filters, sent)) in backends.iter().zip(&sent.backends) {
            if *filters > 0 {
                assert_eq!(read.backend.kind, BackendKind::Missing);
            } else {
                check_backend(&read.backend, sent);
            }
        }
    }
}

/// The rules of a route share its server names: there are no more than were sent.
fn check_server_names(read: &[OpaqueRoute], sent: &Tls) {
    let mut read = read.iter();
    for sent in &sent.routes {
        let of_route: Vec<_> = read.by_ref().take(sent.rules.len()).collect();
        assert!(of_route.iter().all(|rule| rule.server_names.len() == sent.snis.len()));
        assert!(of_route.windows(2).all(|pair| Arc::ptr_eq(&pair[0].server_names, &pair[1].server_names)));
    }
}

/// A backend that was sent without a kind gets nothing.
fn check_backend(read: &Backend, sent: &outbound::Backend) {
    match (&read.kind, &sent.kind) {
        (BackendKind::Missing, None) => {}
        (BackendKind::Forward(endpoint), Some(backend::Kind::Forward(sent))) => check_endpoint(endpoint, sent),
        (BackendKind::Balance { load, accrual, .. }, Some(backend::Kind::Balancer(_))) => {
            let penalty = load.penalty.iter().flat_map(|of| [of.penalty, of.max_retry_after, of.decay]);
            penalty.chain([load.default_rtt, load.decay]).for_each(check_duration);
            assert!(!load.decay.is_zero() && load.penalty.is_none_or(|penalty| !penalty.decay.is_zero()));
            accrual.iter().for_each(|accrual| check_accrual(accrual));
        }
        (read, sent) => panic!("{read:?} was read from {sent:?}"),
    }
}

/// An endpoint that was sent with an identity has to prove that one, and its labels are names that metrics can have.
pub(super) fn check_endpoint(read: &EndpointInfo, sent: &WeightedAddr) {
    let identity = sent.tls_identity.as_ref().map(|sent| match &sent.strategy {
        Some(Strategy::DnsLikeIdentity(dns)) => dns.name.as_str(),
        Some(Strategy::UriLikeIdentity(uri)) => uri.uri.as_str(),
        None => panic!("{read:?} was read from {sent:?}"),
    });
    match (&read.tls, identity) {
        (None, None) => {}
        (Some(tls), Some(identity)) => assert!(tls.server_id.as_str().eq_ignore_ascii_case(identity), "{tls:?}"),
        (tls, identity) => panic!("{tls:?} was read from {identity:?}"),
    }
    assert_ne!(read.addr.port(), 0);
    assert!(read.labels.iter().all(|(key, _)| is_label_key(key)), "{:?}", read.labels);
    if let Some(pings) = &read.pings {
        assert!(!pings.keepalive.interval.is_zero());
        check_duration(pings.keepalive.interval);
        check_duration(pings.keepalive.timeout);
    }
}

fn check_accrual(accrual: &Accrual) {
    check_backoff(&accrual.backoff);
    assert!(accrual.max_failures.is_some() || accrual.success_rate.is_some(), "{accrual:?} counts nothing");
    if let Some(rate) = &accrual.success_rate {
        assert!((0.0..=1.0).contains(&rate.threshold) && rate.window >= SuccessRate::SHORTEST_WINDOW, "{rate:?}");
        check_duration(rate.window);
    }
}

fn check_terms(terms: &Terms) {
    let timeouts = terms.timeouts;
    let limits = [timeouts.request, timeouts.head, timeouts.response, timeouts.idle];
    let retry = terms.retry.as_ref();
    limits.into_iter().chain([retry.and_then(|retry| retry.timeout)]).flatten().for_each(check_duration);
    if let Some(retry) = retry {
        assert!(retry.max_bytes <= MAX_REPLAY_BYTES);
        retry.backoff.iter().for_each(check_backoff);
        let RetryWhen::Status { http, .. } = &retry.when else { panic!("{retry:?}") };
        assert!(http.iter().all(|range| *range.start() >= 100 && *range.end() < 600), "{http:?}");
    }
}

/// Every pause ends at a time that there is.
fn check_backoff(backoff: &Backoff) {
    let Backoff { min, max, jitter } = *backoff;
    assert!(!min.is_zero() && min <= max && (0.0..=100.0).contains(&jitter), "{backoff:?}");
    check_duration(max);
    for failures in [1, 2, u32::MAX] {
        assert!(Instant::now().checked_add(backoff.pause(failures, 1.0)).is_some(), "{backoff:?}");
    }
}

pub(super) fn check_duration(duration: Duration) {
    assert!(duration <= MAX_DURATION, "{duration:?}");
}

fn distributed(distribution: &Distribution) -> Vec<&RouteBackend> {
    match distribution {
        Distribution::Empty => Vec::new(),
        Distribution::FirstAvailable(backends) => backends.iter().collect(),
        Distribution::Random(backends) => backends.iter().map(|(backend, _)| backend).collect(),
    }
}

/// The backends of a distribution that can be read, each with the number of its filters. All protocols have the same
/// fields.
macro_rules! sent_backends {
    ($module:ident, $distribution:expr) => {{
        use outbound::$module::{RouteBackend, distribution::Kind};
        let sent: Vec<&RouteBackend> = match $distribution.as_ref().and_then(|distribution| distribution.kind.as_ref())
        {
            None | Some(Kind::Empty(_)) => Vec::new(),
            Some(Kind::FirstAvailable(first)) => first.backends.iter().collect(),
            Some(Kind::RandomAvailable(random)) => random.backends.iter().flat_map(|of| &of.backend).collect(),
        };
        let backends = sent.into_iter().flat_map(|of| of.backend.iter().map(|backend| (of.filters.len(), backend)));
        backends.collect::<Vec<_>>()
    }};
}

/// The routes of requests, with rules of the module `$module` and matches of the variant `$matches`.
macro_rules! sent_routes {
    ($module:ident, $matches:ident, $routes:expr) => {{
        let mut all = Vec::new();
        let routes = $routes.iter().map(|route| {
            let rules = route.rules.iter().map(|rule| {
                let backends = sent_backends!($module, rule.backends);
                all.extend(backends.iter().map(|(_, backend)| *backend));
                let backends = backends.iter().map(|(filters, _)| *filters).collect();
                let parts = Parts { filters: rule.filters.len(), backends };
                SentRule { matches: Matches::$matches(&rule.matches), parts }
            });
            SentRoute { hosts: &route.hosts, rules: rules.collect() }
        });
        let routes: Vec<_> = routes.collect();
        (routes, all)
    }};
}

/// The rules of routes of connections, of the module `$module`.
macro_rules! sent_connections {
    ($module:ident, $routes:expr) => {{
        let rules = $routes.iter().flat_map(|route| &route.rules);
        let rules = rules.map(|rule| SentConnections {
            filters: rule.filters.len(),
            backends: sent_backends!($module, rule.backends),
        });
        rules.collect()
    }};
}

fn http_routes(routes: &[outbound::HttpRoute]) -> SentRoutes<'_> {
    sent_routes!(http_route, Http, routes)
}

fn grpc_routes(routes: &[outbound::GrpcRoute]) -> SentRoutes<'_> {
    sent_routes!(grpc_route, Grpc, routes)
}

fn opaque_rules(sent: &Opaque) -> Vec<SentConnections<'_>> {
    sent_connections!(opaque_route, sent.routes)
}

fn tls_rules(sent: &Tls) -> Vec<SentConnections<'_>> {
    sent_connections!(tls_route, sent.routes)
}
