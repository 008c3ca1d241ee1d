//! Selects the route and rule of a request: hosts, paths, headers, queries, methods, and the order if several match.
//!
//! The order is linkerd2-proxy's (`linkerd/http/route`, with pull request 4604), which follows the Gateway API where
//! that defines one: the more specific host; then the length of the matched path, where a regular expression counts
//! the whole path and no path is the prefix `/`; at equal length an exact path; then a method; then the number of
//! headers, then of query parameters. Among equals, the first in the list wins.

use std::cmp::Reverse;

use http::{HeaderName, HeaderValue, Method, Request, header::HOST};
use regex::Regex;

use super::{
    Route,
    readings::{self, Reading},
};

/// A host of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostMatch {
    /// This host.
    Exact(String),
    /// Hosts below a name; the labels in reverse (`com`, `example`).
    Suffix(Vec<String>),
}

/// Conditions that all have to hold. The default holds for every request.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestMatch {
    /// Condition on the path; `None` is the prefix `/`.
    pub(crate) path: Option<PathMatch>,
    /// Conditions on header values.
    pub(crate) headers: Vec<(HeaderName, ValueMatch)>,
    /// Conditions on decoded query parameters.
    pub(crate) query: Vec<(String, QueryMatch)>,
    /// Condition on the method; `None` holds for every one.
    pub(crate) method: Option<Method>,
}

/// A condition on a path.
#[derive(Clone, Debug)]
pub(crate) enum PathMatch {
    /// The whole path.
    Exact(String),
    /// Whole leading segments: `/a` matches `/a` and `/a/b`, not `/ab`.
    Prefix(String),
    /// An expression for the whole path.
    Regex(Regex),
    /// A gRPC call (`POST /service/method`); `None` matches any service or method.
    Rpc {
        /// The service with its package.
        service: Option<String>,
        /// The method without its service.
        method: Option<String>,
    },
    /// Every request on a gRPC route without matches; less specific than any other match.
    Any,
}

/// A condition on a header's value.
#[derive(Clone, Debug)]
pub(crate) enum ValueMatch {
    /// This value.
    Exact(HeaderValue),
    /// An expression for the whole value.
    Regex(Regex),
}

/// A condition on a query parameter's value.
#[derive(Clone, Debug)]
pub(crate) enum QueryMatch {
    /// This value.
    Exact(String),
    /// An expression for the whole value.
    Regex(Regex),
}

/// The rule that matches a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Index of the route.
    pub(crate) route: usize,
    /// Index of the rule in the route.
    pub(crate) rule: usize,
    /// How many bytes of the path the rule's prefix matched; `None` if it matched in another way.
    pub(crate) prefix: Option<usize>,
}

/// How specific a host match is: exact before suffix, longer before shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HostRank {
    /// Bytes of the suffix.
    Suffix(usize),
    /// Bytes of the name.
    Exact(usize),
}

/// How specific a match is; the greatest wins, field by field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    path: PathRank,
    method: bool,
    headers: usize,
    query: usize,
}

/// Bytes of the path that matched, and a tie-breaker: 1 for an exact path. For a gRPC call, the service's length comes
/// first and the method's second.
type PathRank = (usize, usize);

/// The rank of a rule without matches, and the prefix that it stands for.
const MATCHES_ALL: (Rank, Option<usize>) = (Rank { path: (1, 0), method: false, headers: 0, query: 0 }, Some(1));

/// Finds the rule of the most specific match.
pub(crate) fn find<B, R>(routes: &[Route<R>], request: &Request<B>) -> Option<Found> {
    find_with_path(routes, request, request.uri().path())
}

/// Finds the rule of the most specific match for the request if it had this path.
pub(crate) fn find_with_path<B, R>(routes: &[Route<R>], request: &Request<B>, path: &str) -> Option<Found> {
    // Most destinations have one route that matches everything.
    if let [Route { hosts, rules }] = routes
        && let ([], [rule]) = (&hosts[..], &rules[..])
        && rule.matches.is_empty()
    {
        return Some(Found { route: 0, rule: 0, prefix: MATCHES_ALL.1 });
    }
    let host = host(request);
    let mut best = None;
    for (route_index, route) in routes.iter().enumerate() {
        let Some(host_rank) = rank_host(&route.hosts, host) else { continue };
        for (rule_index, rule) in route.rules.iter().enumerate() {
            let Some((rank, prefix)) = rank_request(&rule.matches, request, path) else { continue };
            let candidate = (host_rank, rank, Reverse(route_index), Reverse(rule_index));
            if best.as_ref().is_none_or(|(best, _)| candidate > *best) {
                best = Some((candidate, Found { route: route_index, rule: rule_index, prefix }));
            }
        }
    }
    best.map(|(_, found)| found)
}

/// The host of a request, without port and brackets; empty if there is none.
pub(crate) fn host<B>(request: &Request<B>) -> &str {
    let from_uri = request.uri().authority().map(http::uri::Authority::host);
    let host = from_uri.or_else(|| {
        let value = request.headers().get(HOST)?.to_str().ok()?;
        match value.strip_prefix('[') {
            Some(v6) => v6.split(']').next(),
            None => value.split(':').next(),
        }
    });
    host.unwrap_or_default()
}

/// `Some(None)` for a route of all hosts, which is less specific than any host.
fn rank_host(hosts: &[HostMatch], host: &str) -> Option<Option<HostRank>> {
    if hosts.is_empty() {
        return Some(None);
    }
    hosts.iter().filter_map(|one| one.rank(host)).max().map(Some)
}

/// The best of the matches; the first of equals.
fn rank_request<B>(matches: &[RequestMatch], request: &Request<B>, path: &str) -> Option<(Rank, Option<usize>)> {
    if matches.is_empty() {
        return Some(MATCHES_ALL);
    }
    let ranks = matches.iter().filter_map(|one| one.rank(request, path));
    ranks.reduce(|best, next| if next.0 > best.0 { next } else { best })
}

impl HostMatch {
    /// How specifically a host matches; `None` if it does not. A trailing dot counts only if the match has one as
    /// well.
    pub(crate) fn rank(&self, host: &str) -> Option<HostRank> {
        let relative = host.strip_suffix('.').unwrap_or(host);
        match self {
            Self::Exact(exact) => {
                let host = if exact.ends_with('.') { host } else { relative };
                exact.eq_ignore_ascii_case(host).then_some(HostRank::Exact(exact.len()))
            }
            Self::Suffix(labels) => {
                let is_rooted = labels.first().is_some_and(String::is_empty);
                let mut of_host = if is_rooted { host } else { relative }.rsplit('.');
                let all = labels.iter().all(|label| of_host.next().is_some_and(|of| of.eq_ignore_ascii_case(label)));
                let length = labels.iter().map(|label| label.len() + 1).sum();
                (all && of_host.next().is_some()).then_some(HostRank::Suffix(length))
            }
        }
    }
}

impl RequestMatch {
    /// The match for paths as this reading has them.
    pub(super) fn read(&self, reading: Reading) -> Self {
        Self { path: self.path.as_ref().map(|path| path.read(reading)), ..self.clone() }
    }

    /// Whether its path is the same in all readings.
    pub(super) fn is_read_alike(&self) -> bool {
        match &self.path {
            Some(PathMatch::Exact(path) | PathMatch::Prefix(path)) => readings::is_read_alike(path),
            Some(PathMatch::Regex(_) | PathMatch::Rpc { .. } | PathMatch::Any) | None => true,
        }
    }

    fn rank<B>(&self, request: &Request<B>, path: &str) -> Option<(Rank, Option<usize>)> {
        let (path, prefix) = match &self.path {
            None => (MATCHES_ALL.0.path, MATCHES_ALL.1),
            Some(of_route) => of_route.rank(request.method(), path)?,
        };
        if self.method.as_ref().is_some_and(|method| method != request.method()) {
            return None;
        }
        let headers = self.headers.iter().all(|(name, value)| {
            request.headers().get_all(name).iter().any(|sent| match value {
                ValueMatch::Exact(exact) => exact == sent,
                ValueMatch::Regex(regex) => sent.to_str().is_ok_and(|sent| regex.is_match(sent)),
            })
        });
        let query = self.query.iter().all(|(name, value)| {
            let query = request.uri().query().unwrap_or_default();
            // Applications compare decoded parameters, and so does this.
            form_urlencoded::parse(query.as_bytes()).any(|(sent_name, sent)| {
                sent_name == *name
                    && match value {
                        QueryMatch::Exact(exact) => *exact == sent,
                        QueryMatch::Regex(regex) => regex.is_match(&sent),
                    }
            })
        });
        let rank = Rank { path, method: self.method.is_some(), headers: self.headers.len(), query: self.query.len() };
        (headers && query).then_some((rank, prefix))
    }
}

impl PathMatch {
    /// The condition as this reading has it. An expression stays as it is: what it matches cannot be read.
    fn read(&self, reading: Reading) -> Self {
        match self {
            Self::Exact(exact) => Self::Exact(reading.read(exact)),
            Self::Prefix(prefix) => Self::Prefix(reading.read(prefix)),
            Self::Regex(_) | Self::Rpc { .. } | Self::Any => self.clone(),
        }
    }

    /// How specifically a path matches, and how much of it a prefix matched.
    fn rank(&self, request_method: &Method, path: &str) -> Option<(PathRank, Option<usize>)> {
        match self {
            Self::Exact(exact) => (exact == path).then_some(((exact.len(), 1), None)),
            Self::Prefix(prefix) if prefix == "/" => Some(((1, 0), Some(1))),
            Self::Prefix(prefix) => {
                let prefix = prefix.trim_end_matches('/');
                let rest = path.strip_prefix(prefix)?;
                (rest.is_empty() || rest.starts_with('/')).then_some(((prefix.len(), 0), Some(prefix.len())))
            }
            Self::Regex(regex) => regex.is_match(path).then_some(((path.len(), 0), None)),
            Self::Rpc { service, method } => {
                let mut parts = path.strip_prefix('/')?.split('/');
                let (of_service, of_method) = (parts.next()?, parts.next()?);
                let fits = service.as_ref().is_none_or(|service| service == of_service)
                    && method.as_ref().is_none_or(|method| method == of_method)
                    && request_method == Method::POST;
                let length = |part: &Option<String>| part.as_ref().map_or(0, String::len);
                fits.then(|| ((length(service), length(method)), None))
            }
            Self::Any => Some(((0, 0), None)),
        }
    }
}

#[cfg(test)]
mod tests;
