//! The form of a request: whether its target fits its method, and which host it names.
//!
//! Routes match the host of a request, and applications decide by it: it has to be the same for both.

use http::{
    HeaderValue, Method, Request, Uri, Version,
    header::HOST,
    uri::{Authority, Scheme},
};

use super::respond::Failure;

/// Refuses a request whose target or host is malformed or ambiguous, and gives one in absolute form its target's host
/// as `Host`.
///
/// # Errors
/// [`Failure::BadRequest`] for targets that do not fit their method (RFC 9112 section 3.2) or have a user before their
/// host (RFC 9110 section 4.2.4), CONNECT over HTTP/2, several or malformed `Host` fields, and `Host` fields that
/// differ from an HTTP/2 request's `:authority` (RFC 9113 section 8.3.1).
pub(crate) fn normalize<B>(request: &mut Request<B>) -> Result<(), Failure> {
    let is_http2 = request.version() == Version::HTTP_2;
    let fits = if is_http2 { request.method() != Method::CONNECT } else { target_fits_method(request) };
    // Applications do not agree about the host of `secret:80@allowed`.
    let has_user = request.uri().authority().is_some_and(|named| named.as_str().contains('@'));
    if !fits || has_user {
        return Err(Failure::BadRequest);
    }
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Failure::BadRequest);
    }
    let host = host.map(read_host).transpose()?.flatten();
    let Some(named) = request.uri().authority() else { return Ok(()) };
    let agrees = host.as_ref().is_some_and(|host| is_same(host, named, request.uri().scheme()));
    if agrees || (is_http2 && !request.headers().contains_key(HOST)) {
        return Ok(());
    }
    if is_http2 {
        return Err(Failure::BadRequest);
    }
    // RFC 9112 section 3.2.2: the target's host replaces the field.
    let host = HeaderValue::from_str(named.as_str()).map_err(|_| Failure::BadRequest)?;
    request.headers_mut().insert(HOST, host);
    Ok(())
}

/// A CONNECT target is a host and port; any other target is a path.
fn target_fits_method<B>(request: &Request<B>) -> bool {
    let uri: &Uri = request.uri();
    if request.method() != Method::CONNECT {
        return uri.scheme().is_some() || uri.path_and_query().is_some();
    }
    request.version() == Version::HTTP_11
        && uri.scheme().is_none()
        && uri.authority().is_some()
        && uri.path_and_query().is_none_or(|path| path.as_str().is_empty())
}

/// The authority of a `Host` field; `None` for an empty one, which HTTP/1 clients send when the target has none.
fn read_host(value: &HeaderValue) -> Result<Option<Authority>, Failure> {
    if value.is_empty() {
        return Ok(None);
    }
    if value.as_bytes().contains(&b'@') {
        return Err(Failure::BadRequest);
    }
    Authority::try_from(value.as_bytes()).map(Some).map_err(|_| Failure::BadRequest)
}

fn is_same(one: &Authority, other: &Authority, scheme: Option<&Scheme>) -> bool {
    let default = if scheme == Some(&Scheme::HTTPS) { 443 } else { 80 };
    // A port that is no number is nobody's.
    let port = |authority: &Authority| match authority.as_str().get(authority.host().len()..) {
        Some("" | ":") => Some(default),
        rest => rest?.strip_prefix(':')?.parse().ok(),
    };
    let of_one: Option<u16> = port(one);
    one.host().eq_ignore_ascii_case(other.host()) && of_one.is_some() && of_one == port(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(version: Version, method: &str, target: &str, hosts: &[&str]) -> Request<()> {
        let mut request = Request::builder().version(version).method(method).uri(target);
        for host in hosts {
            request = request.header("host", *host);
        }
        request.body(()).unwrap()
    }

    /// The `Host` of an accepted request; `None` for a refused one.
    fn host_of(version: Version, method: &str, target: &str, hosts: &[&str]) -> Option<String> {
        let mut request = request(version, method, target, hosts);
        normalize(&mut request).ok()?;
        Some(request.headers().get(HOST).map_or_else(String::new, |host| host.to_str().unwrap().to_owned()))
    }

    #[test]
    fn targets_have_to_fit_their_method() {
        for (method, target, version, fits) in [
            ("GET", "/a", Version::HTTP_11, true),
            ("GET", "http://a/b", Version::HTTP_11, true),
            ("OPTIONS", "*", Version::HTTP_11, true),
            ("GET", "example.com", Version::HTTP_11, false),
            ("CONNECT", "example.com:443", Version::HTTP_11, true),
            ("CONNECT", "example.com:443", Version::HTTP_10, false),
            ("CONNECT", "http://example.com/", Version::HTTP_11, false),
            ("CONNECT", "/a", Version::HTTP_11, false),
            ("CONNECT", "example.com:443", Version::HTTP_2, false),
            ("CONNECT", "user@example.com:443", Version::HTTP_11, false),
            ("GET", "http://a/b", Version::HTTP_2, true),
            ("GET", "http://user@a/b", Version::HTTP_11, false),
            ("GET", "http://secret:80@a/b", Version::HTTP_11, false),
            ("GET", "http://secret:80@a/b", Version::HTTP_2, false),
        ] {
            assert_eq!(host_of(version, method, target, &[]).is_some(), fits, "{method} {target} {version:?}");
        }
    }

    #[test]
    fn a_request_names_one_host() {
        for version in [Version::HTTP_11, Version::HTTP_2] {
            for (hosts, fits) in [
                (&["a"][..], true),
                (&["a:80"], true),
                (&[], true),
                (&[""], true),
                (&["a", "b"], false),
                (&["a", "a"], false),
                (&["user@a"], false),
                (&["a b"], false),
                (&["a/b"], false),
            ] {
                assert_eq!(host_of(version, "GET", "/", hosts).is_some(), fits, "{version:?} {hosts:?}");
            }
        }
    }

    #[test]
    fn a_target_in_absolute_form_replaces_the_host_of_http1() {
        for (target, hosts, expected) in [
            ("http://allowed/", &["secret"][..], "allowed"),
            ("http://allowed:8080/", &["allowed"], "allowed:8080"),
            ("http://allowed/", &["ALLOWED:80"], "ALLOWED:80"),
            ("http://allowed/", &[], "allowed"),
            ("http://allowed/", &[""], "allowed"),
        ] {
            assert_eq!(
                host_of(Version::HTTP_11, "GET", target, hosts).as_deref(),
                Some(expected),
                "{target} {hosts:?}"
            );
        }
        let connect = host_of(Version::HTTP_11, "CONNECT", "allowed:443", &["secret:443"]);
        assert_eq!(connect.as_deref(), Some("allowed:443"));
    }

    #[test]
    fn host_and_authority_of_http2_agree() {
        for (host, fits) in [
            ("allowed", true),
            ("Allowed:80", true),
            ("secret", false),
            ("allowed:81", false),
            ("allowed:99999", false),
            ("", false),
        ] {
            assert_eq!(host_of(Version::HTTP_2, "GET", "http://allowed/", &[host]).is_some(), fits, "{host}");
        }
    }
}
