//! Routes as they were sent, in the form that inbound and outbound policy and HTTP and gRPC share: to compare with what
//! was read.

use http::Request;
use weft_proto::linkerd::{
    grpc_route::GrpcRouteMatch,
    http_route::{HostMatch, HttpRouteMatch},
};

use super::probe;
use crate::route::{Route, Rule, filter, matching::RequestMatch};

/// The most requests that are made from one set of routes.
const MAX_REQUESTS: usize = 32;

/// A route as it was sent.
pub(super) struct SentRoute<'a> {
    pub(super) hosts: &'a [HostMatch],
    pub(super) rules: Vec<SentRule<'a>>,
}

/// A rule as it was sent.
pub(super) struct SentRule<'a> {
    pub(super) matches: Matches<'a>,
    pub(super) parts: Parts,
}

/// The matches of a rule as they were sent.
pub(super) enum Matches<'a> {
    Http(&'a [HttpRouteMatch]),
    Grpc(&'a [GrpcRouteMatch]),
}

/// The parts of a rule's action.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// The number of its filters.
    pub(super) filters: usize,
    /// The number of filters of each backend.
    pub(super) backends: Vec<usize>,
}

/// The conditions of a match: its path, headers, query parameters and method.
type Conditions = (bool, usize, usize, bool);

/// No part was left out: it may be the one that refuses a request.
pub(super) fn check_whole<R>(sent: &[SentRoute<'_>], read: &[Route<R>], parts: impl Fn(&R) -> Parts) {
    assert_eq!(read.len(), sent.len());
    for (read, sent) in read.iter().zip(sent) {
        assert_eq!(read.hosts.len(), sent.hosts.len());
        assert_eq!(read.rules.len(), sent.rules.len());
        for (read, sent) in read.rules.iter().zip(&sent.rules) {
            assert_eq!(parts(&read.action), sent.parts);
            assert_eq!(conditions(read), sent.matches.conditions());
        }
    }
}

/// Requests that the routes are for, as far as they can be made.
pub(super) fn requests<'a>(sent: &'a [SentRoute<'a>]) -> impl Iterator<Item = Request<()>> + 'a {
    let rules = sent.iter().flat_map(|route| route.rules.iter().map(|rule| (route.hosts, &rule.matches)));
    rules.flat_map(|(hosts, matches)| matches.requests(hosts)).take(MAX_REQUESTS)
}

/// Applies filters to a request. They change it, or refuse it with a status.
pub(super) fn apply(filters: &[filter::Filter], prefix: Option<usize>, request: &mut Request<()>) {
    assert!(prefix.is_none_or(|prefix| prefix <= request.uri().path().len()), "{prefix:?} of {}", request.uri());
    if let Err(failure) = filter::apply_to_request(filters, prefix, request) {
        let _ = (failure.status(), failure.grpc_code());
    }
    let _ = filter::apply_to_response(filters, &mut http::HeaderMap::new());
}

impl Matches<'_> {
    fn conditions(&self) -> Vec<Conditions> {
        match self {
            Self::Http(matches) => {
                let one = |sent: &HttpRouteMatch| {
                    (sent.path.is_some(), sent.headers.len(), sent.query_params.len(), sent.method.is_some())
                };
                matches.iter().map(one).collect()
            }
            // A rule without matches gets one that is less specific than all others.
            Self::Grpc([]) => vec![(true, 0, 0, false)],
            Self::Grpc(matches) => matches.iter().map(|sent| (true, sent.headers.len(), 0, false)).collect(),
        }
    }

    fn requests(&self, hosts: &[HostMatch]) -> Vec<Request<()>> {
        match self {
            Self::Http([]) => probe::http(hosts, &HttpRouteMatch::default()).into_iter().collect(),
            Self::Http(matches) => matches.iter().filter_map(|sent| probe::http(hosts, sent)).collect(),
            Self::Grpc([]) => probe::grpc(hosts, &GrpcRouteMatch::default()).into_iter().collect(),
            Self::Grpc(matches) => matches.iter().filter_map(|sent| probe::grpc(hosts, sent)).collect(),
        }
    }
}

fn conditions<R>(rule: &Rule<R>) -> Vec<Conditions> {
    let one = |read: &RequestMatch| (read.path.is_some(), read.headers.len(), read.query.len(), read.method.is_some());
    rule.matches.iter().map(one).collect()
}
