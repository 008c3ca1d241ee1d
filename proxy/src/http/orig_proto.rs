//! HTTP/1 that is carried between proxies over HTTP/2; `l5d-orig-proto` contains the original version.
//!
//! ```text
//! app --HTTP/1--> outbound: upgrade_request --HTTP/2--> inbound: downgrade_request --HTTP/1--> app
//! app <--HTTP/1-- outbound: downgrade_response <------- inbound: upgrade_response <----------- app
//! ```
//!
//! Refuses requests that upgrade their connection: those stay HTTP/1 (see [`super::headers::wants_upgrade`]).

use http::{
    HeaderMap, HeaderValue, Method, Request, Response, Version,
    header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
    uri::{Authority, PathAndQuery, Scheme, Uri},
};
use http_body::Body;

use super::headers::{ORIG_PROTO, has_transfer_coding_beside_chunks, strip_for_http2, strip_hop_by_hop};

/// The HTTP/1 form of a carried request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrigProto {
    /// HTTP/1.0 or HTTP/1.1.
    pub(crate) version: Version,
    /// Whether the target was in absolute form (`GET http://host/path`).
    pub(crate) absolute_form: bool,
}

/// Whether HTTP/2 can carry an HTTP/1 request: it has no transfer codings, so that only the chunks may be left out (RFC
/// 9113 section 8.2.2).
pub(crate) fn can_be_carried<B>(request: &Request<B>) -> bool {
    !has_transfer_coding_beside_chunks(request.headers())
}

/// Turns an HTTP/1 request into the HTTP/2 request that carries it.
pub(crate) fn upgrade_request<B>(request: &mut Request<B>) {
    let absolute = request.uri().scheme().is_some();
    let value = match (request.version(), absolute) {
        (Version::HTTP_10, false) => "HTTP/1.0",
        (Version::HTTP_10, true) => "HTTP/1.0; absolute-form",
        (_, false) => "HTTP/1.1",
        (_, true) => "HTTP/1.1; absolute-form",
    };
    strip_for_http2(request.headers_mut());
    request.headers_mut().insert(ORIG_PROTO, HeaderValue::from_static(value));
    *request.version_mut() = Version::HTTP_2;
}

/// Removes a carried request's header and restores version, form and chunks; `None` if the request is native HTTP/2, as
/// every CONNECT request is: one over HTTP/1 is not carried.
pub(crate) fn downgrade_request<B: Body>(request: &mut Request<B>) -> Option<OrigProto> {
    let value = request.headers_mut().remove(ORIG_PROTO)?;
    let orig = parse(&value).filter(|_| request.method() != Method::CONNECT)?;
    *request.version_mut() = orig.version;
    // hyper leaves out the body of a GET or HEAD unless a header says that there is one. HTTP/1.0 has no chunks.
    let has_length = request.body().is_end_stream() || request.headers().contains_key(CONTENT_LENGTH);
    if orig.version == Version::HTTP_11 && !has_length {
        request.headers_mut().insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if !orig.absolute_form {
        to_origin_form(request);
    }
    Some(orig)
}

/// Marks the response of an HTTP/1 application and makes it HTTP/2.
pub(crate) fn upgrade_response<B>(response: &mut Response<B>) {
    let value = if response.version() == Version::HTTP_10 { "HTTP/1.0" } else { "HTTP/1.1" };
    strip_for_http2(response.headers_mut());
    response.headers_mut().insert(ORIG_PROTO, HeaderValue::from_static(value));
    *response.version_mut() = Version::HTTP_2;
}

/// Restores the response to an HTTP/1 request of the application on this side.
pub(crate) fn downgrade_response<B>(response: &mut Response<B>) {
    let orig = response.headers_mut().remove(ORIG_PROTO).and_then(|value| parse(&value));
    *response.version_mut() = orig.map_or(Version::HTTP_11, |orig| orig.version);
    strip_hop_by_hop(response.headers_mut());
}

fn parse(value: &HeaderValue) -> Option<OrigProto> {
    let (version, form) = match value.to_str().ok()?.split_once(';') {
        Some((version, form)) => (version, form.trim()),
        None => (value.to_str().ok()?, ""),
    };
    let version = match version.trim() {
        "HTTP/1.1" => Version::HTTP_11,
        "HTTP/1.0" => Version::HTTP_10,
        _ => return None,
    };
    Some(OrigProto { version, absolute_form: form == "absolute-form" })
}

/// Moves a target's authority into `Host`, where HTTP/1 servers expect it.
pub(crate) fn to_origin_form<B>(request: &mut Request<B>) {
    if let Some(authority) = request.uri().authority()
        && !request.headers().contains_key(HOST)
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        request.headers_mut().insert(HOST, host);
    }
    let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    *request.uri_mut() = Uri::from(path);
}

/// Gives a request the scheme and authority that an HTTP/2 client needs; the authority is that of the target, else
/// that of `Host`, else `fallback`.
pub(crate) fn to_absolute_form<B>(request: &mut Request<B>, fallback: Option<&Authority>) {
    if request.uri().scheme().is_some() && request.uri().authority().is_some() {
        return;
    }
    let authority =
        request.uri().authority().cloned().or_else(|| host(request.headers())).or_else(|| fallback.cloned());
    let Some(authority) = authority else { return };
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(authority);
    parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
}

/// Puts another authority into a request, where its version has it. `host` is the same as a header's value.
pub(crate) fn replace_authority<B>(request: &mut Request<B>, authority: &Authority, host: &HeaderValue) {
    let is_http2 = request.version() == Version::HTTP_2;
    if request.method() == Method::CONNECT {
        // Its target is an authority alone, and has a port.
        let port = request.uri().port_u16().filter(|_| authority.port_u16().is_none());
        let target = port.and_then(|port| format!("{authority}:{port}").parse().ok());
        *request.uri_mut() = Uri::from(target.unwrap_or_else(|| authority.clone()));
    } else if is_http2 || request.uri().authority().is_some() {
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        parts.authority = Some(authority.clone());
        parts.scheme.get_or_insert(Scheme::HTTP);
        parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        // Scheme, authority and path make a target.
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    }
    if is_http2 {
        request.headers_mut().remove(HOST);
    } else {
        request.headers_mut().insert(HOST, host.clone());
    }
}

/// The authority in `Host`.
pub(crate) fn host(headers: &HeaderMap) -> Option<Authority> {
    Authority::try_from(headers.get(HOST)?.as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    fn request(target: &str, version: Version, body: &'static str) -> Request<Full<&'static [u8]>> {
        let request = Request::builder().uri(target).version(version).header("host", "web.demo");
        request.body(Full::new(body.as_bytes())).unwrap()
    }

    #[test]
    fn a_request_survives_the_way_there() {
        for (target, version, value, arrives) in [
            ("/a?b=c", Version::HTTP_11, "HTTP/1.1", "/a?b=c"),
            ("/", Version::HTTP_10, "HTTP/1.0", "/"),
            ("http://web.demo/x", Version::HTTP_11, "HTTP/1.1; absolute-form", "http://web.demo/x"),
        ] {
            let mut request = request(target, version, "");
            request.headers_mut().insert("transfer-encoding", HeaderValue::from_static("chunked"));
            upgrade_request(&mut request);
            assert_eq!(request.headers()["l5d-orig-proto"], value);
            assert_eq!(request.version(), Version::HTTP_2);
            assert!(!request.headers().contains_key("transfer-encoding"));
            to_absolute_form(&mut request, None);
            assert_eq!(request.uri().authority().unwrap(), "web.demo");
            let orig = downgrade_request(&mut request).unwrap();
            assert_eq!((orig.version, request.version()), (version, version));
            assert_eq!(request.uri().to_string(), arrives);
            assert!(!request.headers().contains_key("l5d-orig-proto"));
            assert_eq!(request.headers()["host"], "web.demo");
        }
    }

    #[test]
    fn a_body_without_a_length_has_chunks_again() {
        for (version, body, length, expected) in [
            (Version::HTTP_11, "body", None, Some("chunked")),
            (Version::HTTP_11, "body", Some("4"), None),
            (Version::HTTP_11, "", None, None),
            (Version::HTTP_10, "body", None, None),
        ] {
            let mut request = request("/", version, body);
            if let Some(length) = length {
                request.headers_mut().insert("content-length", HeaderValue::from_static(length));
            }
            upgrade_request(&mut request);
            downgrade_request(&mut request);
            let encoding = request.headers().get("transfer-encoding").map(|encoding| encoding.to_str().unwrap());
            assert_eq!(encoding, expected, "{version:?} {body:?} {length:?}");
        }
    }

    #[test]
    fn native_http2_stays_as_it_is() {
        let mut request = request("http://web.demo/x", Version::HTTP_2, "");
        assert_eq!(downgrade_request(&mut request), None);
        assert_eq!(request.uri(), "http://web.demo/x");
    }

    #[test]
    fn a_body_with_a_transfer_coding_is_not_carried() {
        for (codings, expected) in [
            (&[][..], true),
            (&["chunked"], true),
            (&["Chunked"], true),
            (&["gzip, chunked"], false),
            (&["gzip", "chunked"], false),
        ] {
            let mut request = request("/", Version::HTTP_11, "body");
            for coding in codings {
                request.headers_mut().append("transfer-encoding", HeaderValue::from_static(coding));
            }
            assert_eq!(can_be_carried(&request), expected, "{codings:?}");
        }
    }

    #[test]
    fn another_authority_leaves_connect_an_authority() {
        for (authority, expected) in [("web.demo", "web.demo:443"), ("web.demo:80", "web.demo:80")] {
            let mut request = request("there:443", Version::HTTP_11, "");
            *request.method_mut() = Method::CONNECT;
            replace_authority(&mut request, &authority.parse().unwrap(), &HeaderValue::from_str(authority).unwrap());
            assert_eq!(request.uri(), expected);
            assert_eq!(request.headers()["host"], authority);
        }
    }

    #[test]
    fn connect_is_not_carried() {
        for value in ["HTTP/1.1", "HTTP/1.1; absolute-form"] {
            let mut request = request("web.demo:443", Version::HTTP_2, "");
            *request.method_mut() = Method::CONNECT;
            request.headers_mut().insert("l5d-orig-proto", HeaderValue::from_static(value));
            assert_eq!(downgrade_request(&mut request), None, "{value}");
            assert_eq!(request.version(), Version::HTTP_2);
            assert!(!request.headers().contains_key("l5d-orig-proto"));
        }
    }

    #[test]
    fn a_response_survives_the_way_back() {
        let mut response =
            Response::builder().version(Version::HTTP_11).header("connection", "close").body(()).unwrap();
        upgrade_response(&mut response);
        assert_eq!(response.headers()["l5d-orig-proto"], "HTTP/1.1");
        assert!(!response.headers().contains_key("connection"));
        downgrade_response(&mut response);
        assert_eq!(response.version(), Version::HTTP_11);
        assert!(response.headers().is_empty());
    }
}
