//! Applies a route's and its backend's filters.

use http::header::HOST;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, Request, Uri};
use rand::Rng as _;

use crate::discover::route::{Filter, HeaderChange, Redirect, RedirectPath};
use crate::http::respond::Failure;

/// Changes a request, or fails it, as its filters say.
///
/// # Errors
/// The failure that a filter injects, a redirect, or an internal one when policy cannot be used.
pub(super) fn apply_to_request<B>(filters: &[Filter], request: &mut Request<B>) -> Result<(), Failure> {
    for filter in filters {
        match filter {
            Filter::RequestHeaders(change) => change_headers(change, request.headers_mut()),
            Filter::ResponseHeaders(_) => {}
            Filter::Redirect(redirect) => return Err(redirect_to(redirect, request)),
            Filter::Fail { code, grpc, message, ratio: (numerator, denominator) } => {
                if rand::rng().random_range(0..*denominator) < *numerator {
                    return Err(Failure::Injected { code: *code, grpc: *grpc, message: message.clone() });
                }
            }
            Filter::Invalid => return Err(Failure::Internal("invalid policy")),
        }
    }
    Ok(())
}

/// Changes a response's headers as its filters say.
pub(super) fn apply_to_response(filters: &[Filter], headers: &mut HeaderMap) {
    for filter in filters {
        if let Filter::ResponseHeaders(change) = filter {
            change_headers(change, headers);
        }
    }
}

fn change_headers(change: &HeaderChange, headers: &mut HeaderMap) {
    for (name, value) in &change.add {
        headers.append(name, value.clone());
    }
    for (name, value) in &change.set {
        headers.insert(name, value.clone());
    }
    for name in &change.remove {
        headers.remove(name);
    }
}

fn redirect_to<B>(redirect: &Redirect, request: &Request<B>) -> Failure {
    match location(redirect, request) {
        Some(location) => Failure::Redirect { status: redirect.status, location },
        None => Failure::Internal("invalid policy"),
    }
}

fn location<B>(redirect: &Redirect, request: &Request<B>) -> Option<HeaderValue> {
    let of_request: Option<Authority> = request
        .uri()
        .authority()
        .cloned()
        .or_else(|| Authority::try_from(request.headers().get(HOST)?.as_bytes()).ok());
    let scheme = redirect.scheme.clone().or_else(|| request.uri().scheme().cloned()).unwrap_or(Scheme::HTTP);
    let host = redirect.host.clone().or_else(|| of_request.as_ref().map(|authority| authority.host().to_owned()))?;
    let port = redirect.port.or_else(|| {
        let kept = redirect.host.is_none() && redirect.scheme.is_none();
        of_request.as_ref().filter(|_| kept)?.port_u16()
    });
    let authority = match port {
        Some(port) => format!("{host}:{port}"),
        None => host,
    };
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let path = match &redirect.path {
        None => request.uri().path_and_query().map_or_else(|| "/".to_owned(), PathAndQuery::to_string),
        Some(RedirectPath::Full(path)) => format!("{path}{query}"),
        // The matched prefix is not known here; a rule that replaces it replaces the whole path, which is what the controller
        // sends such rules for.
        Some(RedirectPath::Prefix(prefix)) => format!("{prefix}{query}"),
    };
    let location = Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build().ok()?;
    HeaderValue::try_from(location.to_string()).ok()
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, StatusCode};

    use super::*;

    fn request() -> Request<()> {
        Request::builder().uri("/a/b?c=d").header("host", "web.demo:8080").body(()).unwrap()
    }

    #[test]
    fn headers_are_added_set_and_removed_in_this_order() {
        let header = |name, value| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let change = HeaderChange {
            add: vec![header("x-a", "2")],
            set: vec![header("x-b", "new")],
            remove: vec![HeaderName::from_static("x-c")],
        };
        let mut request = request();
        for (name, value) in [header("x-a", "1"), header("x-b", "old"), header("x-c", "gone")] {
            request.headers_mut().insert(name, value);
        }
        apply_to_request(&[Filter::RequestHeaders(change)], &mut request).unwrap();
        assert_eq!(request.headers().get_all("x-a").iter().count(), 2);
        assert_eq!(request.headers()["x-b"], "new");
        assert!(!request.headers().contains_key("x-c"));
    }

    #[test]
    fn injected_failures_follow_their_ratio() {
        let fail = |ratio| Filter::Fail { code: 418, grpc: false, message: "no".into(), ratio };
        assert!(apply_to_request(&[fail((0, 1))], &mut request()).is_ok());
        let failure = apply_to_request(&[fail((1, 1))], &mut request()).unwrap_err();
        assert_eq!(failure.status(), 418);
    }

    #[test]
    fn invalid_policy_fails_the_request() {
        assert_eq!(apply_to_request(&[Filter::Invalid], &mut request()).unwrap_err().status(), 500);
    }

    #[test]
    fn redirects_keep_what_they_do_not_replace() {
        let redirect = |host: Option<&str>, path| Redirect {
            scheme: None,
            host: host.map(str::to_owned),
            port: None,
            path,
            status: StatusCode::FOUND,
        };
        for (redirect, expected) in [
            (redirect(None, None), "http://web.demo:8080/a/b?c=d"),
            (redirect(Some("other"), None), "http://other/a/b?c=d"),
            (redirect(None, Some(RedirectPath::Full("/z".into()))), "http://web.demo:8080/z?c=d"),
        ] {
            let failure = apply_to_request(&[Filter::Redirect(redirect)], &mut request()).unwrap_err();
            let Failure::Redirect { location, .. } = failure else { panic!("{failure:?}") };
            assert_eq!(location, expected);
        }
    }
}
