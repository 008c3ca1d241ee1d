//! Redirects: the new location of a request, as linkerd2-proxy computes it.

use http::{
    HeaderValue, Request, StatusCode, Uri,
    header::HOST,
    uri::{Authority, PathAndQuery, Scheme},
};

use crate::http::respond::Failure;

/// Parts of the location that a redirect replaces.
#[derive(Clone, Debug)]
pub(crate) struct Redirect {
    /// The new scheme.
    pub(crate) scheme: Option<Scheme>,
    /// The new host or port.
    pub(crate) authority: Option<AuthorityOverride>,
    /// The new path.
    pub(crate) path: Option<PathOverride>,
    /// The response's status.
    pub(crate) status: StatusCode,
}

/// How a redirect changes the authority.
#[derive(Clone, Debug)]
pub(crate) enum AuthorityOverride {
    /// Host and port.
    Exact(Authority),
    /// The host; the request's port stays.
    Host(Authority),
    /// The port; the request's host stays.
    Port(u16),
}

/// How a redirect changes the path.
#[derive(Clone, Debug)]
pub(crate) enum PathOverride {
    /// The whole path, and the query with it.
    Full(PathAndQuery),
    /// The part of the path that the rule's prefix matched.
    Prefix(String),
}

impl Redirect {
    /// Answers with the new location. A request for that location is not redirected.
    ///
    /// # Errors
    /// The redirect, or an internal failure if there is no valid location: a prefix is to be replaced and the rule
    /// matched none (the API forbids such rules), or the request names no host.
    pub(super) fn apply<B>(&self, request: &Request<B>, prefix: Option<usize>) -> Result<(), Failure> {
        let current = current(request).ok_or(Failure::Internal("redirect without a host"))?;
        let location = self.location(&current, prefix).ok_or(Failure::Internal("invalid redirect"))?;
        if location == current {
            return Ok(());
        }
        let location = HeaderValue::try_from(location.to_string());
        let location = location.map_err(|_| Failure::Internal("invalid redirect"))?;
        Err(Failure::Redirect { status: self.status, location })
    }

    fn location(&self, current: &Uri, prefix: Option<usize>) -> Option<Uri> {
        let scheme = self.scheme.as_ref().or(current.scheme())?;
        let path = match &self.path {
            None => current.path_and_query()?.clone(),
            Some(PathOverride::Full(path)) => path.clone(),
            Some(PathOverride::Prefix(new)) => replace_prefix(current, prefix?, new)?,
        };
        let authority = self.authority(scheme, current.authority()?)?;
        Uri::builder().scheme(scheme.clone()).authority(authority).path_and_query(path).build().ok()
    }

    fn authority(&self, scheme: &Scheme, current: &Authority) -> Option<Authority> {
        let with_port = |host: &str, port: Option<u16>| match port.filter(|port| Some(*port) != default_port(scheme)) {
            Some(port) => Authority::try_from(format!("{host}:{port}")).ok(),
            None => Authority::try_from(host).ok(),
        };
        match &self.authority {
            None => Some(current.clone()),
            Some(AuthorityOverride::Exact(authority)) => Some(authority.clone()),
            Some(AuthorityOverride::Host(host)) => with_port(host.as_str(), current.port_u16()),
            Some(AuthorityOverride::Port(port)) => with_port(current.host(), Some(*port)),
        }
    }
}

/// The request's own URL in absolute form, from its target and `Host`.
fn current<B>(request: &Request<B>) -> Option<Uri> {
    let uri = request.uri();
    let of_host = || Authority::try_from(request.headers().get(HOST)?.as_bytes()).ok();
    let authority = uri.authority().cloned().or_else(of_host)?;
    let scheme = uri.scheme().cloned().unwrap_or(Scheme::HTTP);
    let path = uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
    Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build().ok()
}

/// Replaces the first bytes of the path with `new`, with one slash between it and the rest.
fn replace_prefix(current: &Uri, prefix: usize, new: &str) -> Option<PathAndQuery> {
    let rest = current.path().get(prefix..)?.trim_start_matches('/');
    let ends_in_slash = current.path().get(prefix..)?.starts_with('/');
    let new = new.trim_end_matches('/');
    let slash = if !rest.is_empty() || ends_in_slash || new.is_empty() { "/" } else { "" };
    let query = current.query().map(|query| format!("?{query}")).unwrap_or_default();
    PathAndQuery::try_from(format!("{new}{slash}{rest}{query}")).ok()
}

fn default_port(scheme: &Scheme) -> Option<u16> {
    match scheme.as_str() {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNCHANGED: Redirect =
        Redirect { scheme: None, authority: None, path: None, status: StatusCode::MOVED_PERMANENTLY };

    /// The location of a redirect of `GET target` with `Host: host`; `None` if the request is not redirected.
    fn located(redirect: &Redirect, host: &str, target: &str, prefix: Option<usize>) -> Option<String> {
        let request = Request::builder().uri(target).header("host", host).body(()).unwrap();
        match redirect.apply(&request, prefix) {
            Ok(()) => None,
            Err(Failure::Redirect { location, .. }) => Some(location.to_str().unwrap().to_owned()),
            Err(failure) => Some(failure.to_string()),
        }
    }

    #[test]
    fn a_host_keeps_the_port_and_a_port_keeps_the_host() {
        let host = || AuthorityOverride::Host(Authority::from_static("other"));
        let exact = AuthorityOverride::Exact(Authority::from_static("other:81"));
        for (authority, scheme, request_host, expected) in [
            (host(), None, "web.demo:8080", "http://other:8080/a/b?c=d"),
            (host(), None, "web.demo:80", "http://other/a/b?c=d"),
            (host(), None, "web.demo", "http://other/a/b?c=d"),
            (host(), Some(Scheme::HTTPS), "web.demo:443", "https://other/a/b?c=d"),
            (exact, None, "web.demo:8080", "http://other:81/a/b?c=d"),
            (AuthorityOverride::Port(8080), None, "web.demo", "http://web.demo:8080/a/b?c=d"),
            (AuthorityOverride::Port(80), None, "web.demo:8080", "http://web.demo/a/b?c=d"),
            (AuthorityOverride::Port(443), Some(Scheme::HTTPS), "web.demo:80", "https://web.demo/a/b?c=d"),
        ] {
            let redirect = Redirect { scheme, authority: Some(authority), ..UNCHANGED };
            assert_eq!(located(&redirect, request_host, "/a/b?c=d", None).as_deref(), Some(expected));
        }
        let https = Redirect { scheme: Some(Scheme::HTTPS), ..UNCHANGED };
        assert_eq!(located(&https, "web.demo", "/a", None).as_deref(), Some("https://web.demo/a"));
    }

    #[test]
    fn a_full_path_replaces_the_query_too() {
        for (path, expected) in [("/z", "http://web.demo/z"), ("/z?y=1", "http://web.demo/z?y=1")] {
            let path = Some(PathOverride::Full(PathAndQuery::from_static(path)));
            let redirect = Redirect { path, ..UNCHANGED };
            assert_eq!(located(&redirect, "web.demo", "/a/b?c=d", None).as_deref(), Some(expected));
        }
    }

    #[test]
    fn the_matched_prefix_is_replaced_as_the_gateway_api_says() {
        // The table of HTTPPathModifier.replacePrefixMatch.
        for (target, prefix, new, expected) in [
            ("/foo/bar", "/foo", "/xyz", "/xyz/bar"),
            ("/foo/bar", "/foo", "/xyz/", "/xyz/bar"),
            ("/foo/bar", "/foo/", "/xyz", "/xyz/bar"),
            ("/foo/bar", "/foo/", "/xyz/", "/xyz/bar"),
            ("/foo", "/foo", "/xyz", "/xyz"),
            ("/foo/", "/foo", "/xyz", "/xyz/"),
            ("/foo/bar", "/foo", "", "/bar"),
            ("/foo/", "/foo", "", "/"),
            ("/foo", "/foo", "", "/"),
            ("/foo/", "/foo", "/", "/"),
            ("/foo", "/foo", "/", "/"),
            ("/foo/bar?c=d", "/", "/xyz", "/xyz/foo/bar?c=d"),
        ] {
            let redirect = Redirect { path: Some(PathOverride::Prefix(new.to_owned())), ..UNCHANGED };
            let length = if prefix == "/" { 1 } else { prefix.trim_end_matches('/').len() };
            let expected = format!("http://web.demo{expected}");
            assert_eq!(located(&redirect, "web.demo", target, Some(length)), Some(expected), "{target} {prefix} {new}");
        }
    }

    #[test]
    fn a_prefix_that_no_rule_matched_cannot_be_replaced() {
        let redirect = Redirect { path: Some(PathOverride::Prefix("/xyz".to_owned())), ..UNCHANGED };
        assert_eq!(located(&redirect, "web.demo", "/foo", None).as_deref(), Some("invalid redirect"));
    }

    #[test]
    fn a_request_that_is_there_already_goes_on() {
        let host =
            Redirect { authority: Some(AuthorityOverride::Host(Authority::from_static("web.demo"))), ..UNCHANGED };
        assert_eq!(located(&host, "web.demo", "/a", None), None);
        assert_eq!(located(&host, "web.demo:8080", "/a", None), None);
        assert_eq!(located(&UNCHANGED, "web.demo", "/a?b", None), None);
        assert!(located(&host, "other.demo", "/a", None).is_some());
    }
}
