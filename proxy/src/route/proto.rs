//! Parses the messages of `http_route`, `grpc_route` and `meta`, which inbound and outbound policy share.
//!
//! A part that cannot be parsed is an error and makes the whole policy unusable: a policy with a part left out may
//! allow what it was written to refuse. A filter of an unknown kind becomes [`Filter::Unknown`] instead, as in
//! linkerd2-proxy.

use std::time::Duration;

use http::{
    HeaderName, HeaderValue, Method, StatusCode,
    uri::{Authority, PathAndQuery},
};
use weft_proto::linkerd::{
    grpc_route, http_route, http_types,
    meta::{Metadata, metadata},
};

use super::{
    Meta, Rule,
    expression::{ExpressionError, Expressions},
    filter::{FailureInjector, Filter, HeaderChange},
    matching::{HostMatch, PathMatch, QueryMatch, RequestMatch, ValueMatch},
    redirect::{AuthorityOverride, PathOverride, Redirect},
};
use crate::http::respond::Failure;

/// Why a part of a route cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadRouteError {
    /// A required part is absent.
    #[error("the route's {0} is empty")]
    Empty(&'static str),
    /// A regular expression is unusable.
    #[error("read the route's regular expression")]
    Expression(#[from] ExpressionError),
    /// A header name is malformed.
    #[error("read the route's header name")]
    HeaderName(#[from] http::header::InvalidHeaderName),
    /// A header value is malformed.
    #[error("read the route's header value")]
    HeaderValue(#[from] http::header::InvalidHeaderValue),
    /// A method is malformed.
    #[error("read the route's method")]
    Method(#[from] http_types::InvalidMethod),
    /// A scheme is malformed.
    #[error("read the redirect's scheme")]
    Scheme(#[from] http_types::InvalidScheme),
    /// A host or a path is malformed.
    #[error("read the redirect's location")]
    Location(#[from] http::uri::InvalidUri),
    /// A path does not start with a slash.
    #[error("the redirect's path is not absolute")]
    RelativePath,
    /// A number is out of its range.
    #[error("the route's {0} is {1}, which is out of range")]
    Range(&'static str, u32),
    /// A ratio is not between 0 and 1.
    #[error("the failure injector's ratio is {0}/{1}, expected a number from 0 to 1")]
    Ratio(u32, u32),
    /// A duration is negative or too long.
    #[error("the policy's {0} is not a valid duration")]
    Duration(&'static str),
}

/// Parses the name of a resource; `None` if the message has none.
pub(crate) fn meta(message: Option<Metadata>) -> Option<Meta> {
    Some(match message?.kind? {
        metadata::Kind::Default(name) => Meta::built_in(&name),
        metadata::Kind::Resource(resource) => Meta {
            group: resource.group.into(),
            kind: resource.kind.into(),
            namespace: resource.namespace.into(),
            name: resource.name.into(),
            port: u16::try_from(resource.port).unwrap_or_default(),
            section: resource.section.into(),
        },
    })
}

/// Parses the hosts of a route.
pub(crate) fn hosts(messages: Vec<http_route::HostMatch>) -> Result<Vec<HostMatch>, ReadRouteError> {
    use http_route::host_match::Match;
    let read = |message: http_route::HostMatch| match message.r#match {
        None => Err(ReadRouteError::Empty("host match")),
        Some(Match::Exact(host)) => Ok(HostMatch::Exact(host)),
        Some(Match::Suffix(suffix)) => Ok(HostMatch::Suffix(suffix.reverse_labels)),
    };
    messages.into_iter().map(read).collect()
}

/// Parses a rule of an HTTP route.
pub(crate) fn http_rule<R>(
    matches: Vec<http_route::HttpRouteMatch>,
    action: R,
    expressions: &mut Expressions,
) -> Result<Rule<R>, ReadRouteError> {
    let matches = matches.into_iter().map(|one| http_match(one, expressions)).collect::<Result<_, _>>()?;
    Ok(Rule { matches, action })
}

/// Parses a rule of a gRPC route.
pub(crate) fn grpc_rule<R>(
    matches: Vec<grpc_route::GrpcRouteMatch>,
    action: R,
    expressions: &mut Expressions,
) -> Result<Rule<R>, ReadRouteError> {
    let matches = matches.into_iter().map(|one| grpc_match(one, expressions));
    let mut matches = matches.collect::<Result<Vec<RequestMatch>, _>>()?;
    if matches.is_empty() {
        matches.push(RequestMatch { path: Some(PathMatch::Any), ..RequestMatch::default() });
    }
    Ok(Rule { matches, action })
}

fn http_match(
    message: http_route::HttpRouteMatch,
    expressions: &mut Expressions,
) -> Result<RequestMatch, ReadRouteError> {
    use http_route::{path_match, query_param_match};
    let path = match message.path {
        None => None,
        Some(path) => Some(match path.kind.ok_or(ReadRouteError::Empty("path match"))? {
            path_match::Kind::Exact(path) => PathMatch::Exact(path),
            path_match::Kind::Prefix(prefix) => PathMatch::Prefix(prefix),
            path_match::Kind::Regex(regex) => PathMatch::Regex(expressions.whole(&regex)?),
        }),
    };
    let mut query = Vec::with_capacity(message.query_params.len());
    for param in message.query_params {
        if param.name.is_empty() {
            return Err(ReadRouteError::Empty("query parameter's name"));
        }
        let value = match param.value.ok_or(ReadRouteError::Empty("query match"))? {
            query_param_match::Value::Exact(value) => QueryMatch::Exact(value),
            query_param_match::Value::Regex(regex) => QueryMatch::Regex(expressions.whole(&regex)?),
        };
        query.push((param.name, value));
    }
    let method = message.method.map(Method::try_from).transpose()?;
    Ok(RequestMatch { path, headers: header_matches(message.headers, expressions)?, query, method })
}

fn grpc_match(
    message: grpc_route::GrpcRouteMatch,
    expressions: &mut Expressions,
) -> Result<RequestMatch, ReadRouteError> {
    let rpc = message.rpc.unwrap_or_default();
    let some = |name: String| Some(name).filter(|name| !name.is_empty());
    let path = Some(PathMatch::Rpc { service: some(rpc.service), method: some(rpc.method) });
    Ok(RequestMatch { path, headers: header_matches(message.headers, expressions)?, ..RequestMatch::default() })
}

fn header_matches(
    messages: Vec<http_route::HeaderMatch>,
    expressions: &mut Expressions,
) -> Result<Vec<(HeaderName, ValueMatch)>, ReadRouteError> {
    use http_route::header_match::Value;
    let mut headers = Vec::with_capacity(messages.len());
    for header in messages {
        let value = match header.value.ok_or(ReadRouteError::Empty("header match"))? {
            Value::Exact(value) => ValueMatch::Exact(HeaderValue::from_bytes(&value)?),
            Value::Regex(regex) => ValueMatch::Regex(expressions.whole(&regex)?),
        };
        headers.push((HeaderName::from_bytes(header.name.as_bytes())?, value));
    }
    Ok(headers)
}

impl Filter {
    /// Parses a request header modifier.
    pub(crate) fn request_headers(message: http_route::RequestHeaderModifier) -> Result<Self, ReadRouteError> {
        Ok(Self::RequestHeaders(header_change(message.add, message.set, message.remove)?))
    }

    /// Parses a response header modifier.
    pub(crate) fn response_headers(message: http_route::ResponseHeaderModifier) -> Result<Self, ReadRouteError> {
        Ok(Self::ResponseHeaders(header_change(message.add, message.set, message.remove)?))
    }

    /// Parses a redirect. Status 0 means 301, the API's default.
    pub(crate) fn redirect(message: http_route::RequestRedirect) -> Result<Self, ReadRouteError> {
        use http_route::path_modifier::Replace;
        let status = match message.status {
            0 => StatusCode::MOVED_PERMANENTLY,
            code => {
                status(code).ok().filter(StatusCode::is_redirection).ok_or(ReadRouteError::Range("status", code))?
            }
        };
        let port = u16::try_from(message.port).map_err(|_| ReadRouteError::Range("port", message.port))?;
        let authority = match (message.host, port) {
            (host, 0) if host.is_empty() => None,
            (host, port) if host.is_empty() => Some(AuthorityOverride::Port(port)),
            (host, 0) => Some(AuthorityOverride::Host(Authority::try_from(host)?)),
            (host, port) => Some(AuthorityOverride::Exact(Authority::try_from(format!("{host}:{port}"))?)),
        };
        let path = match message.path.and_then(|path| path.replace) {
            None => None,
            Some(Replace::Full(path)) if path.starts_with('/') => {
                Some(PathOverride::Full(PathAndQuery::try_from(path)?))
            }
            Some(Replace::Prefix(new)) if new.is_empty() || new.starts_with('/') => Some(PathOverride::Prefix(new)),
            Some(_) => return Err(ReadRouteError::RelativePath),
        };
        let scheme = message.scheme.map(TryInto::try_into).transpose()?;
        Ok(Self::Redirect(Redirect { scheme, authority, path, status }))
    }

    /// Parses an HTTP failure injector.
    pub(crate) fn http_failure(message: http_route::HttpFailureInjector) -> Result<Self, ReadRouteError> {
        let code = status(message.status)?.as_u16();
        injector(Failure::Injected { code, grpc: false, message: message.message }, message.ratio)
    }

    /// Parses a gRPC failure injector.
    pub(crate) fn grpc_failure(message: grpc_route::GrpcFailureInjector) -> Result<Self, ReadRouteError> {
        let code = u16::try_from(message.code).map_err(|_| ReadRouteError::Range("gRPC code", message.code))?;
        injector(Failure::Injected { code, grpc: true, message: message.message }, message.ratio)
    }
}

/// Without a ratio every request fails.
fn injector(failure: Failure, ratio: Option<http_route::Ratio>) -> Result<Filter, ReadRouteError> {
    let http_route::Ratio { numerator, denominator } =
        ratio.unwrap_or(http_route::Ratio { numerator: 1, denominator: 1 });
    if denominator == 0 || numerator > denominator {
        return Err(ReadRouteError::Ratio(numerator, denominator));
    }
    Ok(Filter::Fail(FailureInjector { failure, numerator, denominator }))
}

fn status(code: u32) -> Result<StatusCode, ReadRouteError> {
    let status = u16::try_from(code).ok().and_then(|code| StatusCode::from_u16(code).ok());
    status.ok_or(ReadRouteError::Range("status", code))
}

fn header_change(
    add: Option<http_types::Headers>,
    set: Option<http_types::Headers>,
    remove: Vec<String>,
) -> Result<HeaderChange, ReadRouteError> {
    let read = |headers: Option<http_types::Headers>| -> Result<Vec<(HeaderName, HeaderValue)>, ReadRouteError> {
        let headers = headers.unwrap_or_default().headers.into_iter();
        headers
            .map(|header| {
                Ok((HeaderName::from_bytes(header.name.as_bytes())?, HeaderValue::from_bytes(&header.value)?))
            })
            .collect()
    };
    let remove = remove.iter().map(|name| HeaderName::from_bytes(name.as_bytes())).collect::<Result<_, _>>()?;
    Ok(HeaderChange { add: read(add)?, set: read(set)?, remove })
}

/// The longest duration of a message: what protobuf allows, about 10,000 years. The clock can still add it to the
/// present time.
pub(crate) const MAX_DURATION: Duration = Duration::from_secs(315_576_000_000);

/// Parses a duration; `None` if the message has none.
///
/// # Errors
/// When it is negative or longer than [`MAX_DURATION`]: an unreadable limit must not become no limit.
pub(crate) fn duration(
    message: Option<prost_types::Duration>,
    what: &'static str,
) -> Result<Option<Duration>, ReadRouteError> {
    let Some(message) = message else { return Ok(None) };
    let is_valid = u64::try_from(message.seconds).is_ok_and(|seconds| seconds <= MAX_DURATION.as_secs());
    let duration = is_valid.then(|| Duration::try_from(message).ok()).flatten();
    duration.filter(|duration| *duration <= MAX_DURATION).map(Some).ok_or(ReadRouteError::Duration(what))
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn redirect(change: impl FnOnce(&mut http_route::RequestRedirect)) -> Result<Filter, ReadRouteError> {
        let mut message = http_route::RequestRedirect::default();
        change(&mut message);
        Filter::redirect(message)
    }

    fn path(replace: http_route::path_modifier::Replace) -> Option<http_route::PathModifier> {
        Some(http_route::PathModifier { replace: Some(replace) })
    }

    #[test]
    fn a_redirect_is_permanent_unless_it_says_otherwise() {
        let status = |code| match redirect(|message| message.status = code) {
            Ok(Filter::Redirect(redirect)) => Some(redirect.status.as_u16()),
            _ => None,
        };
        assert_eq!((status(0), status(302), status(200), status(70_000)), (Some(301), Some(302), None, None));
    }

    #[test]
    fn host_and_port_of_a_redirect_are_read_together() {
        use AuthorityOverride::{Exact, Host, Port};
        let authority = |host: &str, port| match redirect(|message| {
            message.host = host.to_owned();
            message.port = port;
        }) {
            Ok(Filter::Redirect(redirect)) => redirect.authority,
            other => panic!("{other:?}"),
        };
        assert!(authority("", 0).is_none());
        assert!(matches!(authority("", 81), Some(Port(81))));
        assert!(matches!(authority("web", 0), Some(Host(host)) if host == "web"));
        assert!(matches!(authority("web", 81), Some(Exact(exact)) if exact == "web:81"));
        assert!(redirect(|message| message.port = 70_000).is_err());
        assert!(redirect(|message| message.host = "a b".to_owned()).is_err());
    }

    #[test]
    fn paths_of_redirects_are_absolute() {
        use http_route::path_modifier::Replace::{Full, Prefix};
        for (replace, valid) in [
            (Full("/z".into()), true),
            (Full("z".into()), false),
            (Full(String::new()), false),
            (Prefix("/z".into()), true),
            (Prefix(String::new()), true),
            (Prefix("z".into()), false),
        ] {
            assert_eq!(redirect(|message| message.path = path(replace.clone())).is_ok(), valid, "{replace:?}");
        }
    }

    #[test]
    fn a_ratio_is_between_zero_and_one() {
        let read = |ratio: Option<(u32, u32)>| {
            let ratio = ratio.map(|(numerator, denominator)| http_route::Ratio { numerator, denominator });
            let http = http_route::HttpFailureInjector { status: 500, message: String::new(), ratio };
            let grpc = grpc_route::GrpcFailureInjector { code: 2, message: String::new(), ratio };
            (Filter::http_failure(http).is_ok(), Filter::grpc_failure(grpc).is_ok())
        };
        for (ratio, valid) in
            [(None, true), (Some((0, 1)), true), (Some((1, 1)), true), (Some((1, 0)), false), (Some((2, 1)), false)]
        {
            assert_eq!(read(ratio), (valid, valid), "{ratio:?}");
        }
        assert!(Filter::http_failure(http_route::HttpFailureInjector::default()).is_err(), "0 is not a valid status");
    }

    #[test]
    fn a_duration_is_neither_negative_nor_longer_than_protobuf_allows() {
        let read = |seconds, nanos| duration(Some(prost_types::Duration { seconds, nanos }), "timeout").ok().flatten();
        let longest = 315_576_000_000;
        assert_eq!(read(1, 500_000_000), Some(Duration::from_millis(1500)));
        assert_eq!(read(longest, 0), Some(MAX_DURATION));
        assert!(Instant::now().checked_add(MAX_DURATION).is_some());
        for (seconds, nanos) in [(longest, 1), (longest + 1, 0), (i64::MAX, 0), (i64::MIN, 0), (-1, 0), (0, -1)] {
            assert_eq!(read(seconds, nanos), None, "{seconds} s and {nanos} ns");
        }
        assert!(matches!(duration(None, "timeout"), Ok(None)));
    }

    #[test]
    fn a_match_that_lacks_a_part_is_an_error() {
        let read = |message| http_match(message, &mut Expressions::new());
        let regex = http_route::path_match::Kind::Regex("(".into());
        let path =
            |kind| http_route::HttpRouteMatch { path: Some(http_route::PathMatch { kind }), ..Default::default() };
        let query = |name: &str, value| http_route::HttpRouteMatch {
            query_params: vec![http_route::QueryParamMatch { name: name.into(), value }],
            ..Default::default()
        };
        let value = http_route::query_param_match::Value::Exact("b".into());
        for message in [path(None), path(Some(regex)), query("a", None), query("", Some(value))] {
            assert!(read(message.clone()).is_err(), "{message:?}");
        }
        assert!(hosts(vec![http_route::HostMatch { r#match: None }]).is_err());
        let method = http_types::HttpMethod { r#type: None };
        assert!(read(http_route::HttpRouteMatch { method: Some(method), ..Default::default() }).is_err());
    }
}
