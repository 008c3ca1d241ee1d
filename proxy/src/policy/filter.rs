//! What a route does to requests on their way: changing headers, redirecting, failing some on purpose.
//!
//! Owns reading these filters and applying them. An unreadable filter is an error, never ignored.

use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{HeaderName, HeaderValue, Request, StatusCode};
use rand::Rng as _;
use weft_proto::linkerd::{grpc_route, http_route, http_types};

use crate::http::respond::Failure;

/// One filter.
#[derive(Clone, Debug)]
pub(crate) enum Filter {
    /// Adds, sets and removes request headers.
    RequestHeaders {
        /// Appended.
        add: Vec<(HeaderName, HeaderValue)>,
        /// Replaced.
        set: Vec<(HeaderName, HeaderValue)>,
        /// Taken off.
        remove: Vec<HeaderName>,
    },
    /// Answers with another place.
    Redirect(Redirect),
    /// Fails some requests.
    Fail {
        /// The failure.
        failure: Failure,
        /// How many out of how many; the latter is never zero.
        ratio: (u32, u32),
    },
}

/// What a redirect changes of the request's own address.
#[derive(Clone, Debug)]
pub(crate) struct Redirect {
    scheme: Option<Scheme>,
    host: Option<String>,
    port: Option<u16>,
    path: Option<PathChange>,
    status: StatusCode,
}

#[derive(Clone, Debug)]
enum PathChange {
    Full(String),
    /// Replaces the prefix that the route matched; without knowing it, the whole path up to its first element.
    Prefix(String),
}

/// Why a filter cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FilterError {
    /// A message without content.
    #[error("a route's filter is empty")]
    Empty,
    /// A header that cannot be.
    #[error("a route's filter has an invalid header")]
    Header,
    /// A status that cannot be.
    #[error("a route's filter has the invalid status {0}")]
    Status(u32),
    /// A scheme that cannot be.
    #[error("a route's redirect has an invalid scheme")]
    Scheme,
    /// A port above 65535.
    #[error("a route's redirect has the invalid port {0}")]
    Port(u32),
    /// A share of nothing.
    #[error("a route's failure injector has a ratio with denominator zero")]
    Ratio,
}

impl Filter {
    /// Reads a request header modifier.
    pub(crate) fn request_headers(message: http_route::RequestHeaderModifier) -> Result<Self, FilterError> {
        Ok(Self::RequestHeaders {
            add: headers(message.add)?,
            set: headers(message.set)?,
            remove: message
                .remove
                .iter()
                .map(|name| HeaderName::from_bytes(name.as_bytes()).map_err(|_| FilterError::Header))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Reads an HTTP failure injector.
    pub(crate) fn http_failure(message: http_route::HttpFailureInjector) -> Result<Self, FilterError> {
        let status = u16::try_from(message.status).ok().and_then(|status| StatusCode::from_u16(status).ok());
        let code = status.ok_or(FilterError::Status(message.status))?.as_u16();
        let failure = Failure::Injected { code, grpc: false, message: message.message };
        Ok(Self::Fail { failure, ratio: ratio(message.ratio)? })
    }

    /// Reads a gRPC failure injector.
    pub(crate) fn grpc_failure(message: grpc_route::GrpcFailureInjector) -> Result<Self, FilterError> {
        let code = u16::try_from(message.code).map_err(|_| FilterError::Status(message.code))?;
        let failure = Failure::Injected { code, grpc: true, message: message.message };
        Ok(Self::Fail { failure, ratio: ratio(message.ratio)? })
    }

    /// Reads a redirect. Status 0 is 302, the Gateway API's default.
    pub(crate) fn redirect(message: http_route::RequestRedirect) -> Result<Self, FilterError> {
        let status = match message.status {
            0 => StatusCode::FOUND,
            status => u16::try_from(status)
                .ok()
                .and_then(|status| StatusCode::from_u16(status).ok())
                .filter(StatusCode::is_redirection)
                .ok_or(FilterError::Status(status))?,
        };
        let scheme = message.scheme.map(Scheme::try_from).transpose().map_err(|_| FilterError::Scheme)?;
        let port = match message.port {
            0 => None,
            port => Some(u16::try_from(port).map_err(|_| FilterError::Port(port))?),
        };
        let path = match message.path.map(|path| path.replace.ok_or(FilterError::Empty)).transpose()? {
            None => None,
            Some(http_route::path_modifier::Replace::Full(path)) => Some(PathChange::Full(path)),
            Some(http_route::path_modifier::Replace::Prefix(path)) => Some(PathChange::Prefix(path)),
        };
        let host = Some(message.host).filter(|host| !host.is_empty());
        Ok(Self::Redirect(Redirect { scheme, host, port, path, status }))
    }

    /// Changes a request, or answers it.
    pub(crate) fn apply<B>(&self, request: &mut Request<B>) -> Result<(), Failure> {
        match self {
            Self::RequestHeaders { add, set, remove } => {
                let headers = request.headers_mut();
                for (name, value) in add {
                    headers.append(name, value.clone());
                }
                for (name, value) in set {
                    headers.insert(name, value.clone());
                }
                for name in remove {
                    headers.remove(name);
                }
                Ok(())
            }
            Self::Redirect(redirect) => redirect.apply(request),
            Self::Fail { failure, ratio: (numerator, denominator) } => {
                if rand::rng().random_range(0..*denominator) < *numerator { Err(failure.clone()) } else { Ok(()) }
            }
        }
    }
}

impl Redirect {
    /// Answers with the new place; a request that is there already goes on.
    fn apply<B>(&self, request: &Request<B>) -> Result<(), Failure> {
        let uri = request.uri();
        let from_host = || crate::http::orig_proto::host(request.headers());
        let current = uri.authority().cloned().or_else(from_host);
        let host = self.host.as_deref().or(current.as_ref().map(Authority::host));
        let Some(host) = host else { return Err(Failure::BadRequest) };
        let scheme = self.scheme.clone().or_else(|| uri.scheme().cloned()).unwrap_or(Scheme::HTTP);
        // A new scheme brings its own port unless the redirect names one.
        let kept = current.as_ref().and_then(Authority::port_u16).filter(|_| self.scheme.is_none());
        let well_known = if scheme == Scheme::HTTPS { 443 } else { 80 };
        let authority = match self.port.or(kept).filter(|port| *port != well_known) {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        };
        let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        let path = match &self.path {
            None => format!("{}{query}", uri.path()),
            Some(PathChange::Full(path)) => format!("{path}{query}"),
            Some(PathChange::Prefix(prefix)) => {
                let rest = uri.path().trim_start_matches('/').split_once('/').map_or("", |(_, rest)| rest);
                format!("{}/{rest}{query}", prefix.trim_end_matches('/'))
            }
        };
        let path = PathAndQuery::try_from(path).map_err(|_| Failure::BadRequest)?;
        let location = Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build();
        let location = location.map_err(|_| Failure::BadRequest)?.to_string();
        let location = HeaderValue::try_from(location).map_err(|_| Failure::BadRequest)?;
        Err(Failure::Redirect { status: self.status, location })
    }
}

fn headers(message: Option<http_types::Headers>) -> Result<Vec<(HeaderName, HeaderValue)>, FilterError> {
    let headers = message.map(|headers| headers.headers).unwrap_or_default();
    headers
        .into_iter()
        .map(|header| {
            let name = HeaderName::from_bytes(header.name.as_bytes()).map_err(|_| FilterError::Header)?;
            let value = HeaderValue::from_bytes(&header.value).map_err(|_| FilterError::Header)?;
            Ok((name, value))
        })
        .collect()
}

/// No ratio means always.
fn ratio(message: Option<http_route::Ratio>) -> Result<(u32, u32), FilterError> {
    match message {
        None => Ok((1, 1)),
        Some(http_route::Ratio { denominator: 0, .. }) => Err(FilterError::Ratio),
        Some(ratio) => Ok((ratio.numerator, ratio.denominator)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request<()> {
        Request::builder().uri("/a/b?c=d").header("host", "web.demo:8080").header("x-old", "1").body(()).unwrap()
    }

    fn located(message: http_route::RequestRedirect) -> (u16, String) {
        match Filter::redirect(message).unwrap().apply(&mut request()) {
            Err(Failure::Redirect { status, location }) => (status.as_u16(), location.to_str().unwrap().to_owned()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn headers_are_added_set_and_removed() {
        let header = |name: &str, value: &str| {
            let header = http_types::headers::Header { name: name.into(), value: value.into() };
            Some(http_types::Headers { headers: vec![header] })
        };
        let filter = Filter::request_headers(http_route::RequestHeaderModifier {
            add: header("x-new", "2"),
            set: header("host", "other"),
            remove: vec!["x-old".into()],
        })
        .unwrap();
        let mut request = request();
        filter.apply(&mut request).unwrap();
        assert_eq!(request.headers()["x-new"], "2");
        assert_eq!(request.headers()["host"], "other");
        assert!(!request.headers().contains_key("x-old"));
    }

    #[test]
    fn redirects_change_what_they_name_and_keep_the_rest() {
        use http_route::path_modifier::Replace;
        let path = |replace| Some(http_route::PathModifier { replace: Some(replace) });
        let host = http_route::RequestRedirect { host: "other".into(), ..Default::default() };
        assert_eq!(located(host), (302, "http://other:8080/a/b?c=d".into()));
        let https = http_route::RequestRedirect { scheme: Some("https".into()), status: 301, ..Default::default() };
        assert_eq!(located(https), (301, "https://web.demo/a/b?c=d".into()));
        let full = http_route::RequestRedirect { path: path(Replace::Full("/z".into())), ..Default::default() };
        assert_eq!(located(full).1, "http://web.demo:8080/z?c=d");
        let prefix = http_route::RequestRedirect { path: path(Replace::Prefix("/z".into())), ..Default::default() };
        assert_eq!(located(prefix).1, "http://web.demo:8080/z/b?c=d");
    }

    #[test]
    fn injected_failures_come_as_often_as_their_ratio_says() {
        let fail = |numerator| {
            let ratio = Some(http_route::Ratio { numerator, denominator: 1 });
            let message = http_route::HttpFailureInjector { status: 418, message: "tea".into(), ratio };
            Filter::http_failure(message).unwrap().apply(&mut request())
        };
        assert!(fail(1).is_err());
        assert!(fail(0).is_ok());
    }

    #[test]
    fn unreadable_filters_are_refused() {
        assert!(Filter::redirect(http_route::RequestRedirect { status: 200, ..Default::default() }).is_err());
        assert!(Filter::redirect(http_route::RequestRedirect { port: 70_000, ..Default::default() }).is_err());
        let ratio = Some(http_route::Ratio { numerator: 1, denominator: 0 });
        let message = http_route::HttpFailureInjector { status: 500, message: String::new(), ratio };
        assert!(Filter::http_failure(message).is_err());
    }
}
