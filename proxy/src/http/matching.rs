//! Which route and rule a request falls under: hosts, paths, headers, queries, methods, and the order among several that match.
//!
//! The order is the Gateway API's: the more specific host wins, then the more specific path (exact, longest prefix, regular
//! expression), then a method, then the number of headers, then of query parameters; what is listed first wins a tie.
//! Reads policy messages; an unreadable match is an error, never ignored.

use std::cmp::Reverse;

use http::header::HOST;
use http::{HeaderName, HeaderValue, Method, Request};
use regex::Regex;
use weft_proto::linkerd::{grpc_route, http_route};

/// Why a match cannot be used; the whole policy cannot, then.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MatchError {
    /// A regular expression does not compile.
    #[error("compile a route's regular expression")]
    Regex(#[from] regex::Error),
    /// A header name is malformed.
    #[error("read a route's header name")]
    HeaderName(#[from] http::header::InvalidHeaderName),
    /// A header value is malformed.
    #[error("read a route's header value")]
    HeaderValue(#[from] http::header::InvalidHeaderValue),
    /// The method is none.
    #[error("read a route's method")]
    Method,
    /// A message lacks what it is about.
    #[error("a route's {0} is empty")]
    Empty(&'static str),
}

/// A host that a route is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostMatch {
    /// This host.
    Exact(String),
    /// Hosts below a name; the labels in reverse (`com`, `example`).
    Suffix(Vec<String>),
}

/// How specific a match is; the greatest wins.
pub(crate) type Specificity = (HostRank, RequestRank);
/// Exact hosts before suffixes, longer suffixes before shorter, any before none.
pub(crate) type HostRank = (u8, usize);
/// Path kind, path length, method, headers, query parameters.
pub(crate) type RequestRank = (u8, usize, bool, usize, usize);

/// A set of conditions that all have to hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestMatch {
    path: Option<PathMatch>,
    headers: Vec<(HeaderName, ValueMatch)>,
    query: Vec<(String, QueryMatch)>,
    method: Option<Method>,
}

#[derive(Clone, Debug)]
enum PathMatch {
    Exact(String),
    Prefix(String),
    Regex(Regex),
    /// A gRPC service with any method.
    GrpcService(String),
    /// A gRPC method of any service.
    GrpcMethod(String),
}

#[derive(Clone, Debug)]
enum ValueMatch {
    Exact(HeaderValue),
    Regex(Regex),
}

#[derive(Clone, Debug)]
enum QueryMatch {
    Exact(String),
    Regex(Regex),
}

/// One route with hosts and rules, generic over what a rule leads to.
#[derive(Clone, Debug)]
pub(crate) struct Route<R> {
    /// Hosts; none means all.
    pub(crate) hosts: Vec<HostMatch>,
    /// Each rule's matches (none means all requests), and what it leads to.
    pub(crate) rules: Vec<(Vec<RequestMatch>, R)>,
}

/// Finds the rule of the most specific match, as indices of route and rule.
pub(crate) fn find<B, R>(routes: &[Route<R>], request: &Request<B>) -> Option<(usize, usize)> {
    // Most targets have one route that takes everything.
    if let [Route { hosts, rules }] = routes
        && let ([], [(matches, _)]) = (&hosts[..], &rules[..])
        && matches.is_empty()
    {
        return Some((0, 0));
    }
    let host = host(request);
    let mut best: Option<(Specificity, Reverse<usize>, Reverse<usize>)> = None;
    for (route_index, route) in routes.iter().enumerate() {
        let Some(host_rank) = route.rank_host(host) else { continue };
        for (rule_index, (matches, _)) in route.rules.iter().enumerate() {
            let Some(request_rank) = rank_request(matches, request) else { continue };
            let candidate = ((host_rank, request_rank), Reverse(route_index), Reverse(rule_index));
            if best.as_ref().is_none_or(|best| candidate > *best) {
                best = Some(candidate);
            }
        }
    }
    best.map(|(_, route, rule)| (route.0, rule.0))
}

fn host<B>(request: &Request<B>) -> &str {
    let from_uri = request.uri().authority().map(http::uri::Authority::host);
    let host = from_uri.or_else(|| {
        let value = request.headers().get(HOST)?.to_str().ok()?;
        // A port, and the brackets of an IPv6 address, are not part of the host.
        match value.strip_prefix('[') {
            Some(v6) => v6.split(']').next(),
            None => value.split(':').next(),
        }
    });
    host.unwrap_or_default().trim_end_matches('.')
}

fn rank_request<B>(matches: &[RequestMatch], request: &Request<B>) -> Option<RequestRank> {
    if matches.is_empty() {
        return Some(Default::default());
    }
    matches.iter().filter_map(|one| one.rank(request)).max()
}

impl<R> Route<R> {
    fn rank_host(&self, host: &str) -> Option<HostRank> {
        if self.hosts.is_empty() {
            return Some((0, 0));
        }
        self.hosts.iter().filter_map(|one| one.rank(host)).max()
    }
}

impl HostMatch {
    /// Reads a policy's host.
    pub(crate) fn read(message: http_route::HostMatch) -> Result<Self, MatchError> {
        match message.r#match.ok_or(MatchError::Empty("host match"))? {
            http_route::host_match::Match::Exact(host) => Ok(Self::Exact(host.to_ascii_lowercase())),
            http_route::host_match::Match::Suffix(suffix) => {
                Ok(Self::Suffix(suffix.reverse_labels.iter().map(|label| label.to_ascii_lowercase()).collect()))
            }
        }
    }

    /// How specifically a host matches; `None` if it does not.
    pub(crate) fn rank(&self, host: &str) -> Option<HostRank> {
        match self {
            Self::Exact(exact) => exact.eq_ignore_ascii_case(host).then_some((2, exact.len())),
            Self::Suffix(labels) => {
                let mut of_host = host.rsplit('.');
                let all = labels.iter().all(|label| of_host.next().is_some_and(|of| of.eq_ignore_ascii_case(label)));
                (all && of_host.next().is_some()).then_some((1, labels.len()))
            }
        }
    }
}

impl RequestMatch {
    /// Reads an HTTP route's match.
    pub(crate) fn read(message: http_route::HttpRouteMatch) -> Result<Self, MatchError> {
        use http_route::{path_match, query_param_match};
        let path = match message.path {
            None => None,
            Some(path) => Some(match path.kind.ok_or(MatchError::Empty("path match"))? {
                path_match::Kind::Exact(path) => PathMatch::Exact(path),
                path_match::Kind::Prefix(prefix) => PathMatch::Prefix(prefix),
                path_match::Kind::Regex(regex) => PathMatch::Regex(anchored(&regex)?),
            }),
        };
        let mut query = Vec::new();
        for param in message.query_params {
            let value = match param.value.ok_or(MatchError::Empty("query match"))? {
                query_param_match::Value::Exact(value) => QueryMatch::Exact(value),
                query_param_match::Value::Regex(regex) => QueryMatch::Regex(anchored(&regex)?),
            };
            query.push((param.name, value));
        }
        let method = match message.method {
            None => None,
            Some(method) => Some(Method::try_from(method).map_err(|_| MatchError::Method)?),
        };
        Ok(Self { path, headers: read_headers(message.headers)?, query, method })
    }

    /// Reads a gRPC route's match.
    pub(crate) fn read_grpc(message: grpc_route::GrpcRouteMatch) -> Result<Self, MatchError> {
        let path = message.rpc.and_then(|rpc| match (rpc.service.is_empty(), rpc.method.is_empty()) {
            (true, true) => None,
            (false, true) => Some(PathMatch::GrpcService(rpc.service)),
            (true, false) => Some(PathMatch::GrpcMethod(rpc.method)),
            (false, false) => Some(PathMatch::Exact(format!("/{}/{}", rpc.service, rpc.method))),
        });
        Ok(Self { path, headers: read_headers(message.headers)?, query: Vec::new(), method: None })
    }

    fn rank<B>(&self, request: &Request<B>) -> Option<RequestRank> {
        let (path_kind, path_length) = match &self.path {
            None => (0, 0),
            Some(path) => path.rank(request.uri().path())?,
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
            let mut params = request.uri().query().unwrap_or_default().split('&');
            params.any(|param| {
                let (sent_name, sent) = param.split_once('=').unwrap_or((param, ""));
                sent_name == name
                    && match value {
                        QueryMatch::Exact(exact) => exact == sent,
                        QueryMatch::Regex(regex) => regex.is_match(sent),
                    }
            })
        });
        (headers && query).then_some((
            path_kind,
            path_length,
            self.method.is_some(),
            self.headers.len(),
            self.query.len(),
        ))
    }
}

impl PathMatch {
    /// Kind and length of the match: exact (3), prefix (2), regular expression (1).
    fn rank(&self, path: &str) -> Option<(u8, usize)> {
        match self {
            Self::Exact(exact) => (exact == path).then_some((3, exact.len())),
            Self::Prefix(prefix) => {
                // A prefix ends at a path segment: /a takes /a and /a/b, not /ab (Gateway API, PathPrefix).
                let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
                let rest = path.strip_prefix(prefix)?;
                (rest.is_empty() || rest.starts_with('/')).then_some((2, prefix.len()))
            }
            Self::Regex(regex) => regex.is_match(path).then(|| (1, regex.as_str().len())),
            Self::GrpcService(service) => {
                let (of_path, _) = path.strip_prefix('/')?.split_once('/')?;
                (of_path == service).then_some((2, service.len()))
            }
            Self::GrpcMethod(method) => {
                let (_, of_path) = path.strip_prefix('/')?.split_once('/')?;
                (of_path == method).then_some((1, method.len()))
            }
        }
    }
}

fn read_headers(messages: Vec<http_route::HeaderMatch>) -> Result<Vec<(HeaderName, ValueMatch)>, MatchError> {
    let mut headers = Vec::with_capacity(messages.len());
    for header in messages {
        let value = match header.value.ok_or(MatchError::Empty("header match"))? {
            http_route::header_match::Value::Exact(value) => ValueMatch::Exact(HeaderValue::from_bytes(&value)?),
            http_route::header_match::Value::Regex(regex) => ValueMatch::Regex(anchored(&regex)?),
        };
        headers.push((HeaderName::from_bytes(header.name.as_bytes())?, value));
    }
    Ok(headers)
}

/// Regular expressions match the whole value, as Linkerd's do.
fn anchored(regex: &str) -> Result<Regex, regex::Error> {
    Regex::new(&format!("^(?:{regex})$"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(kind: http_route::path_match::Kind) -> RequestMatch {
        RequestMatch::read(http_route::HttpRouteMatch {
            path: Some(http_route::PathMatch { kind: Some(kind) }),
            ..Default::default()
        })
        .unwrap()
    }

    fn prefix(prefix: &str) -> RequestMatch {
        path(http_route::path_match::Kind::Prefix(prefix.into()))
    }

    fn exact(exact: &str) -> RequestMatch {
        path(http_route::path_match::Kind::Exact(exact.into()))
    }

    fn request(uri: &str) -> Request<()> {
        Request::builder().uri(uri).header("host", "web.demo:80").body(()).unwrap()
    }

    fn route(hosts: Vec<HostMatch>, rules: Vec<Vec<RequestMatch>>) -> Route<()> {
        Route { hosts, rules: rules.into_iter().map(|matches| (matches, ())).collect() }
    }

    #[test]
    fn the_most_specific_match_wins() {
        let routes = [
            route(vec![], vec![vec![], vec![prefix("/a")], vec![prefix("/a/b"), exact("/z")]]),
            route(vec![HostMatch::Exact("web.demo".into())], vec![vec![exact("/only-here")]]),
            route(vec![HostMatch::Suffix(vec!["demo".into()])], vec![vec![prefix("/s")]]),
        ];
        for (uri, expected) in [
            ("/", Some((0, 0))),
            ("/a", Some((0, 1))),
            ("/ab", Some((0, 0))),
            ("/a/b/c", Some((0, 2))),
            ("/z", Some((0, 2))),
            ("/only-here", Some((1, 0))),
            ("/s/x", Some((2, 0))),
        ] {
            assert_eq!(find(&routes, &request(uri)), expected, "{uri}");
        }
    }

    #[test]
    fn no_route_is_no_match() {
        let routes = [route(vec![HostMatch::Exact("other.demo".into())], vec![vec![]])];
        assert_eq!(find(&routes, &request("/")), None);
        assert_eq!(find::<_, ()>(&[], &request("/")), None);
    }

    #[test]
    fn a_suffix_needs_a_label_before_it() {
        let suffix = HostMatch::Suffix(vec!["demo".into()]);
        assert!(suffix.rank("web.demo").is_some());
        assert!(suffix.rank("demo").is_none());
        assert!(suffix.rank("web.demos").is_none());
    }

    #[test]
    fn grpc_methods_are_paths() {
        let read = |service: &str, method: &str| {
            RequestMatch::read_grpc(grpc_route::GrpcRouteMatch {
                rpc: Some(grpc_route::GrpcRpcMatch { service: service.into(), method: method.into() }),
                headers: vec![],
            })
            .unwrap()
        };
        let call = request("/echo.Echo/Say");
        for (service, method, matches) in [
            ("echo.Echo", "Say", true),
            ("echo.Echo", "", true),
            ("", "Say", true),
            ("", "", true),
            ("echo", "Say", false),
        ] {
            assert_eq!(read(service, method).rank(&call).is_some(), matches, "{service}/{method}");
        }
    }

    #[test]
    fn an_unreadable_expression_is_an_error() {
        let kind = http_route::path_match::Kind::Regex("(".into());
        let message =
            http_route::HttpRouteMatch { path: Some(http_route::PathMatch { kind: Some(kind) }), ..Default::default() };
        assert!(RequestMatch::read(message).is_err());
    }
}
