//! Endpoints and profiles, as a destination controller sends them.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use prost::Message as _;
use weft_proto::linkerd::destination::{
    AddrSet, DestinationProfile, HttpStatusRange, RequestMatch, ResponseClass, ResponseMatch, Route, TlsIdentity,
    Update, WeightedAddr, request_match::Match, response_match, update,
};

use super::outbound::{check_duration, check_endpoint};
use crate::{
    discover::{
        endpoint::EndpointInfo,
        endpoints::{EndpointSet, apply},
        profile::{Profile, routes::MAX_DEPTH},
        route::Distribution,
    },
    request::{
        classify::Answer,
        terms::{MAX_REPLAY_BYTES, Terms},
    },
};

const PORT: u16 = 8080;
/// The most requests that are made from one profile.
const MAX_REQUESTS: usize = 16;

/// Reads a change of endpoints.
pub(super) fn endpoints(bytes: &[u8]) {
    let Ok(message) = Update::decode(bytes) else { return };
    let mut set = EndpointSet::new();
    apply(&mut set, message.clone());
    let Some(update::Update::Add(add)) = &message.update else { return assert!(set.is_empty(), "{set:?}") };
    let mut expected = EndpointSet::new();
    for sent in &add.addrs {
        if let Ok(read) = EndpointInfo::read(sent.clone(), &add.metric_labels) {
            check_endpoint(&read, sent);
            expected.insert(read.addr, Arc::new(read));
        } else if let Some(addr) = sent.addr.and_then(|addr| addr.try_into().ok()) {
            // Not as an earlier entry describes it, either.
            expected.remove(&addr);
        }
        assert!(EndpointInfo::read(unnamed(sent), &add.metric_labels).is_err(), "plaintext without an identity");
    }
    assert_eq!(set, expected);
    apply(&mut set, message.clone());
    assert_eq!(set, expected, "a repetition changes something");
    let addrs = expected.keys().map(|addr| (*addr).into()).collect();
    apply(&mut set, Update { update: Some(update::Update::Remove(AddrSet { addrs })) });
    assert!(set.is_empty(), "{set:?}");
}

/// Reads a profile.
pub(super) fn profile(bytes: &[u8]) {
    let Ok(message) = DestinationProfile::decode(bytes) else { return };
    let Ok(read) = Profile::read(message.clone()) else { return };
    assert_eq!(read.name.as_deref().unwrap_or_default(), message.fully_qualified_name);
    assert_eq!(read.opaque, message.opaque_protocol);
    assert_eq!(read.overrides.len(), message.dst_overrides.len());
    assert_eq!(read.number_of_routes(), message.routes.len());
    assert_eq!(read.endpoint.is_some(), message.endpoint.is_some());
    if let (Some(read), Some(sent)) = (&read.endpoint, &message.endpoint) {
        check_endpoint(read, sent);
    }
    check_unreadable_parts(&message);
    check_routes(&read, &message);
}

/// The endpoint with an unreadable identity.
fn unnamed(endpoint: &WeightedAddr) -> WeightedAddr {
    WeightedAddr { tls_identity: Some(TlsIdentity::default()), ..endpoint.clone() }
}

/// With a part that cannot be read, a profile is unusable: its endpoint would get plaintext, or a route the requests of
/// the one before.
fn check_unreadable_parts(message: &DestinationProfile) {
    if let Some(endpoint) = &message.endpoint {
        let unnamed = DestinationProfile { endpoint: Some(unnamed(endpoint)), ..message.clone() };
        assert!(Profile::read(unnamed).is_err(), "plaintext without an identity");
    }
    let is_read = |route| Profile::read(DestinationProfile { routes: vec![route], ..message.clone() }).is_ok();
    assert!(!is_read(Route::default()), "a route without a condition");
    let Some(route) = message.routes.first() else { return };
    let condition = route.condition.clone().unwrap_or_default();
    let deep = (0..=MAX_DEPTH).fold(condition, |inner, _| RequestMatch { r#match: Some(Match::Not(Box::new(inner))) });
    assert!(!is_read(Route { condition: Some(deep), ..route.clone() }), "a condition without an end");
    let status = ResponseMatch { r#match: Some(response_match::Match::Status(HttpStatusRange::default())) };
    let deep = (0..=MAX_DEPTH).fold(status, |inner, _| {
        let not = response_match::Match::Not(Box::new(inner));
        ResponseMatch { r#match: Some(not) }
    });
    for condition in [None, Some(deep)] {
        let response_classes = vec![ResponseClass { condition, is_failure: true }];
        assert!(!is_read(Route { response_classes, ..route.clone() }), "a class without a condition or an end");
    }
}

/// Every request has a route: the first that is for it, or the default.
fn check_routes(read: &Profile, sent: &DestinationProfile) {
    let routes = read.http_routes(&Distribution::Empty, PORT);
    assert_eq!(routes.actions().count(), sent.routes.len() + 1);
    for (action, sent) in routes.actions().zip(&sent.routes) {
        check_terms(&action.terms, sent);
    }
    for request in requests(sent) {
        let found = routes.find(&request).unwrap_or_else(|| panic!("no route for {request:?}"));
        let own = read.route(&request);
        assert_eq!(found.id.0, own.as_ref().map_or(sent.routes.len(), |(index, _)| *index), "{request:?}");
        assert_eq!(found.action.profile.is_some(), read.name.is_some());
        if let (Some(labels), Some((_, own))) = (&found.action.profile, &own) {
            assert_eq!(&labels.route, own.labels);
        }
    }
}

/// Only requests of a route that says so are sent again, what its classes call failures, and within a budget.
fn check_terms(terms: &Terms, sent: &Route) {
    assert!(!terms.allow_headers);
    if let Some(head) = terms.timeouts.head {
        assert!(!head.is_zero());
        check_duration(head);
    }
    for status in [StatusCode::OK, StatusCode::NOT_FOUND, StatusCode::BAD_GATEWAY] {
        let answer = Answer { status, grpc: None, retry_after: None };
        let is_failure = terms.classes.is_failure(&answer);
        assert!(terms.retry.as_ref().is_none_or(|retry| retry.when.matches(&answer) == is_failure), "{answer:?}");
    }
    if let Some(retry) = &terms.retry {
        assert!(sent.is_retryable && retry.budget.is_some() && retry.max_bytes <= MAX_REPLAY_BYTES, "{retry:?}");
    }
}

/// Requests for the expressions of the routes that are paths themselves, and one for another path.
fn requests(sent: &DestinationProfile) -> impl Iterator<Item = Request<()>> + '_ {
    let paths = sent.routes.iter().filter_map(|route| path(route.condition.as_ref()?)).take(MAX_REQUESTS);
    let requests = paths.chain(["/other"]).flat_map(|path| [(Method::GET, path), (Method::POST, path)]);
    requests.filter_map(|(method, path)| Request::builder().method(method).uri(path).body(()).ok())
}

/// The first expression of a condition.
fn path(condition: &RequestMatch) -> Option<&str> {
    match condition.r#match.as_ref()? {
        Match::All(several) | Match::Any(several) => several.matches.iter().find_map(path),
        Match::Not(inner) => path(inner),
        Match::Path(expression) => Some(expression.regex.as_str()),
        Match::Method(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::seeds, *};

    #[test]
    fn every_seed_of_discovery_is_read() {
        for seed in seeds("endpoints") {
            let message = Update::decode(&seed[..]).unwrap();
            let sent = match &message.update {
                Some(update::Update::Add(add)) => add.addrs.len(),
                Some(_) => 0,
                None => panic!("an empty update"),
            };
            let mut set = EndpointSet::new();
            apply(&mut set, message);
            assert_eq!(set.len(), sent);
        }
        for seed in seeds("destination_profile") {
            Profile::read(DestinationProfile::decode(&seed[..]).unwrap()).unwrap();
        }
    }
}
