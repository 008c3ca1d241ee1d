//! What a span says about its request, under the names that Linkerd's proxy uses: OpenTelemetry's semantic conventions
//! for HTTP (`linkerd2-proxy:linkerd/trace-context/src/service.rs`). All values are text there, and so they are here.
//!
//! Copies what it keeps: a part of a request's head would keep the whole buffer of its connection alive until the span
//! is sent.

use std::fmt::Write as _;

use http::{HeaderMap, HeaderName, Request, Uri, header, uri::Authority};

use crate::metrics::Direction;

/// Bytes of a value; the rest is left out. Heads of requests may have 64 KiB, and 2,048 spans wait at most
/// ([`super::queue`]).
const MAX_VALUE: usize = 1024;

const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// Of all headers these: others may be secrets.
const HEADERS: [(HeaderName, &str); 4] = [
    (header::USER_AGENT, "user_agent.original"),
    (header::CONTENT_LENGTH, "http.request.header.content-length"),
    (header::CONTENT_TYPE, "http.request.header.content-type"),
    (HeaderName::from_static("l5d-orig-proto"), "http.request.header.l5d-orig-proto"),
];

/// The attribute of a response.
pub(super) const STATUS: &str = "http.response.status_code";

/// Attributes of one span.
pub(super) type Attributes = Vec<(&'static str, Box<str>)>;

/// The attributes of a request.
pub(super) fn of_request<B>(request: &Request<B>, direction: Direction) -> Attributes {
    let (uri, headers) = (request.uri(), request.headers());
    // The status comes last.
    let mut attributes = Vec::with_capacity(12 + HEADERS.len());
    let mut push = |name, value: &str| attributes.push((name, cut(value)));
    push("http.request.method", request.method().as_str());
    let host = uri.authority().cloned().or_else(|| host(headers, &header::HOST));
    // The mesh's own TLS is not the application's.
    let scheme = uri.scheme_str().or(host.as_ref().map(|_| "http"));
    if let Some(scheme) = scheme {
        push("url.scheme", scheme);
    }
    push("url.path", uri.path());
    if let Some(query) = uri.query() {
        push("url.query", query);
    }
    push("url.full", &full(uri, scheme, host.as_ref()));
    push("network.transport", "tcp");
    if let Some(server) = self::host(headers, &FORWARDED_HOST).or(host) {
        push("server.address", server.host());
        if let Some(port) = server.port() {
            push("server.port", port.as_str());
        }
    }
    for (name, attribute) in &HEADERS {
        if let Some(value) = headers.get(name) {
            push(attribute, &String::from_utf8_lossy(value.as_bytes()));
        }
    }
    push("direction", direction.label());
    attributes
}

/// As much of a text as an attribute holds.
pub(super) fn cut(text: &str) -> Box<str> {
    text[..text.floor_char_boundary(MAX_VALUE)].into()
}

fn host(headers: &HeaderMap, name: &HeaderName) -> Option<Authority> {
    Authority::try_from(headers.get(name)?.as_bytes()).ok()
}

/// The whole URL, without the password that it may contain.
fn full(uri: &Uri, scheme: Option<&str>, host: Option<&Authority>) -> String {
    let mut url = String::new();
    if let (Some(scheme), Some(host)) = (scheme, host) {
        let secret = host.as_str().rsplit_once('@').map(|(secret, _)| secret);
        let hidden = match secret {
            None => "",
            Some(secret) if secret.contains(':') => "REDACTED:REDACTED@",
            Some(_) => "REDACTED@",
        };
        // Writing to a string does not fail.
        let _ = write!(url, "{scheme}://{hidden}{}", host.host());
        if let Some(port) = host.port() {
            let _ = write!(url, ":{port}");
        }
    }
    url.push_str(uri.path());
    if let Some(query) = uri.query() {
        let _ = write!(url, "?{query}");
    }
    url
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn attributes(uri: &str, headers: &[(&str, &str)]) -> BTreeMap<&'static str, String> {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let attributes = of_request(&request.body(()).unwrap(), Direction::Inbound);
        attributes.into_iter().map(|(name, value)| (name, value.into())).collect()
    }

    #[test]
    fn attributes_are_linkerds() {
        let all = attributes(
            "http://example.com:80/foo?bar=baz",
            &[
                ("user-agent", "tokio-test"),
                ("content-length", "0"),
                ("content-type", "text/plain"),
                ("l5d-orig-proto", "HTTP/1.1"),
                ("authorization", "secret"),
            ],
        );
        let expected = [
            ("direction", "inbound"),
            ("http.request.header.content-length", "0"),
            ("http.request.header.content-type", "text/plain"),
            ("http.request.header.l5d-orig-proto", "HTTP/1.1"),
            ("http.request.method", "GET"),
            ("network.transport", "tcp"),
            ("server.address", "example.com"),
            ("server.port", "80"),
            ("url.full", "http://example.com:80/foo?bar=baz"),
            ("url.path", "/foo"),
            ("url.query", "bar=baz"),
            ("url.scheme", "http"),
            ("user_agent.original", "tokio-test"),
        ];
        assert_eq!(all, expected.map(|(name, value)| (name, value.to_owned())).into());
    }

    #[test]
    fn a_request_for_a_path_is_completed_by_its_host() {
        let of = |headers: &[(&str, &str)]| {
            let all = attributes("/a", headers);
            (all["url.full"].clone(), all.get("server.address").cloned().unwrap_or_default())
        };
        assert_eq!(of(&[("host", "web:8080")]), ("http://web:8080/a".to_owned(), "web".to_owned()));
        let forwarded = [("host", "web"), ("x-forwarded-host", "shop.example.org")];
        assert_eq!(of(&forwarded), ("http://web/a".to_owned(), "shop.example.org".to_owned()));
        assert_eq!(of(&[]), ("/a".to_owned(), String::new()));
        assert_eq!(of(&[("host", "not a host")]), ("/a".to_owned(), String::new()));
    }

    #[test]
    fn passwords_are_left_out_and_long_values_are_cut() {
        assert_eq!(attributes("http://me:secret@web/", &[])["url.full"], "http://REDACTED:REDACTED@web/");
        assert_eq!(attributes("http://me@web/", &[])["url.full"], "http://REDACTED@web/");
        assert_eq!(attributes(&format!("/{}", "a".repeat(5000)), &[])["url.path"].len(), MAX_VALUE);
        assert_eq!(&*cut(&"ä".repeat(MAX_VALUE)), "ä".repeat(MAX_VALUE / 2));
    }
}
