//! Headers of one hop, and headers of the mesh.

use std::net::SocketAddr;

use http::{
    HeaderMap, HeaderValue, Method, Request, Response, Version,
    header::{CONNECTION, CONTENT_LENGTH, HeaderName, TE, TRANSFER_ENCODING, UPGRADE},
};

/// The name of [`CLIENT_ID`].
const CLIENT_ID_NAME: &str = "l5d-client-id";
/// The client's identity, which the inbound proxy passes to its application.
pub(crate) const CLIENT_ID: HeaderName = HeaderName::from_static(CLIENT_ID_NAME);
/// The identity that an application requires of its server.
pub(crate) const REQUIRE_ID: HeaderName = HeaderName::from_static("l5d-require-id");
/// The service that a request was addressed to.
pub(crate) const DST_CANONICAL: HeaderName = HeaderName::from_static("l5d-dst-canonical");
/// The service that an ingress sends a request to.
pub(crate) const DST_OVERRIDE: HeaderName = HeaderName::from_static("l5d-dst-override");
/// HTTP/1 that is carried over HTTP/2.
pub(crate) const ORIG_PROTO: HeaderName = HeaderName::from_static("l5d-orig-proto");
/// Why a proxy answered instead of the server.
pub(crate) const PROXY_ERROR: HeaderName = HeaderName::from_static("l5d-proxy-error");
/// `close`: the inbound proxy asks the outbound one to close the application's connection.
pub(crate) const PROXY_CONNECTION_L5D: HeaderName = HeaderName::from_static("l5d-proxy-connection");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Removes headers of one connection: all that `Connection` fields list, and the well-known ones (RFC 9110 section
/// 7.6.1).
///
/// `Transfer-Encoding` stays, because hyper needs it for HTTP/1; a length beside it says nothing, and would be another
/// one for the next recipient (RFC 9112 section 6.3). Headers of the message or the mesh also stay, even if
/// `Connection` lists them: a client must not be able to remove its `l5d-client-id`.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none, and one pass over their names is cheaper than a look-up for each.
    if !headers.keys().any(concerns_connection) {
        return;
    }
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
            .filter_map(|token| HeaderName::from_bytes(token).ok())
            .filter(is_hop_by_hop)
            .collect();
        for name in named {
            headers.remove(name);
        }
        headers.remove(CONNECTION);
    }
    for name in [UPGRADE, KEEP_ALIVE, PROXY_CONNECTION, HTTP2_SETTINGS] {
        headers.remove(name);
    }
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
}

/// Whether a message may have a header of one connection: all of these are, and `Connection` names the others.
fn concerns_connection(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection" | "upgrade" | "keep-alive" | "proxy-connection" | "http2-settings" | "transfer-encoding"
    )
}

/// Whether there may be headers of the mesh. Most messages of applications have none, and one pass over their names is
/// cheaper than a look-up for each.
pub(crate) fn has_mesh_headers(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().starts_with("l5d-"))
}

/// Removes what a client claims as its identity, under each name that applications behind CGI read alike: there `-` and
/// `_` are one character (RFC 3875 section 4.1.18). So is all that is no letter or digit in lighttpd
/// (`http_cgi_encode_varname`).
pub(crate) fn remove_client_id(headers: &mut HeaderMap) {
    let is_client_id = |name: &&HeaderName| {
        let name = name.as_str();
        let is_same =
            |(byte, expected): (u8, u8)| byte == expected || (expected == b'-' && !byte.is_ascii_alphanumeric());
        name.len() == CLIENT_ID_NAME.len() && name.bytes().zip(CLIENT_ID_NAME.bytes()).all(is_same)
    };
    while let Some(name) = headers.keys().find(is_client_id).cloned() {
        headers.remove(name);
    }
}

/// Removes all that has a meaning in the mesh from trailers and informational responses, where neither proxies nor
/// applications expect it.
pub(crate) fn remove_mesh_headers(headers: &mut HeaderMap) {
    remove_client_id(headers);
    while let Some(name) = headers.keys().find(|name| name.as_str().starts_with("l5d-")).cloned() {
        headers.remove(name);
    }
}

/// Whether a message's body has a transfer coding other than chunks (RFC 9112 section 7).
pub(crate) fn has_transfer_coding_beside_chunks(headers: &HeaderMap) -> bool {
    tokens(headers, &TRANSFER_ENCODING).any(|coding| !coding.eq_ignore_ascii_case(b"chunked"))
}

fn is_hop_by_hop(name: &HeaderName) -> bool {
    let name = name.as_str();
    !matches!(name, "host" | "content-length" | "transfer-encoding" | "te") && !name.starts_with("l5d-")
}

/// The elements of a list header, over all its fields. As bytes: one that is not text must not hide the others.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    let fields = headers.get_all(name).into_iter();
    let elements = fields.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    elements.map(<[u8]>::trim_ascii).filter(|token| !token.is_empty())
}

/// Removes headers that HTTP/2 forbids (RFC 9113 section 8.2.2).
pub(crate) fn strip_for_http2(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    headers.remove(TRANSFER_ENCODING);
    if !headers.contains_key(TE) {
        return;
    }
    if tokens(headers, &TE).any(|coding| coding.eq_ignore_ascii_case(b"trailers")) {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    } else {
        headers.remove(TE);
    }
}

/// Removes headers of one connection from a request that [`wants_upgrade`], except the protocols that it asks for. A
/// CONNECT request asks for none.
pub(crate) fn strip_for_upgrade<B>(request: &mut Request<B>) {
    let is_connect = request.method() == Method::CONNECT;
    let headers = request.headers_mut();
    let protocols = HeaderValue::from_bytes(&tokens(headers, &UPGRADE).collect::<Vec<_>>().join(&b", "[..]));
    strip_hop_by_hop(headers);
    if let Ok(protocols) = protocols
        && !is_connect
    {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocols);
    }
}

/// Whether an HTTP/1.1 request asks for another protocol. One that also lists `h2c` does not count: it is never
/// upgraded, because the following bytes would bypass policy.
pub(crate) fn wants_upgrade<B>(request: &Request<B>) -> bool {
    if request.version() != Version::HTTP_11 {
        return false;
    }
    if request.method() == Method::CONNECT {
        return true;
    }
    let headers = request.headers();
    if !tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case(b"upgrade")) {
        return false;
    }
    // A protocol may have a version: h2c, h2c/1.
    let is_h2c = |protocol: &[u8]| {
        let name = protocol.split(|byte| *byte == b'/').next();
        name.is_some_and(|name| name.trim_ascii().eq_ignore_ascii_case(b"h2c"))
    };
    let mut protocols = tokens(headers, &UPGRADE).peekable();
    protocols.peek().is_some() && !protocols.any(is_h2c)
}

/// Whether a request is gRPC.
pub(crate) fn is_grpc(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_2
        && headers
            .get(http::header::CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// Logs a request's head at the level `debug`, where the settings allow it: headers contain credentials. The field's
/// name is Linkerd's, so that filters with `[{headers}]=off` exclude it.
pub(crate) fn log_request<B>(is_allowed: bool, server: SocketAddr, request: &Request<B>) {
    if is_allowed {
        let (method, uri, version, headers) = (request.method(), request.uri(), request.version(), request.headers());
        tracing::debug!(dst.addr = %server, %method, %uri, ?version, ?headers, "request");
    }
}

/// Logs a response's head, as [`log_request`] does a request's.
pub(crate) fn log_response<B>(is_allowed: bool, server: SocketAddr, response: &Response<B>) {
    if is_allowed {
        let (status, headers) = (response.status(), response.headers());
        tracing::debug!(dst.addr = %server, %status, ?headers, "response");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn connection_takes_its_headers_with_it() {
        let mut map = headers(&[
            ("connection", "close, x-private, host"),
            ("x-private", "1"),
            ("keep-alive", "3"),
            ("proxy-connection", "close"),
            ("upgrade", "h2c"),
            ("host", "example.com"),
            ("accept", "*/*"),
            ("transfer-encoding", "chunked"),
        ]);
        strip_hop_by_hop(&mut map);
        let mut left: Vec<&str> = map.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept", "host", "transfer-encoding"]);
    }

    #[test]
    fn a_length_beside_a_transfer_coding_is_removed() {
        let mut map = headers(&[("content-length", "3"), ("transfer-encoding", "chunked")]);
        strip_hop_by_hop(&mut map);
        assert_eq!(map, headers(&[("transfer-encoding", "chunked")]));
        let length = headers(&[("content-length", "3")]);
        map = length.clone();
        strip_hop_by_hop(&mut map);
        assert_eq!(map, length);
    }

    #[test]
    fn every_connection_field_counts_and_mesh_headers_stay() {
        let mut map = HeaderMap::new();
        for (name, value) in [
            ("connection", "close"),
            ("connection", "x-private, , L5d-Client-Id"),
            ("x-private", "1"),
            ("http2-settings", "AAMAAABk"),
            ("l5d-client-id", "web.demo"),
        ] {
            map.append(name, HeaderValue::from_static(value));
        }
        strip_hop_by_hop(&mut map);
        assert_eq!(map, headers(&[("l5d-client-id", "web.demo")]));
    }

    #[test]
    fn an_identity_is_removed_under_each_name_that_reads_like_its_own() {
        let mut map = HeaderMap::new();
        for name in ["l5d-client-id", "l5d_client_id", "l5d-client_id", "l5d.client+id", "l5d-client-id"] {
            map.append(name, HeaderValue::from_static("forged"));
        }
        let others = headers(&[("l5d-client-ip", "1"), ("l5d_client_ids", "2"), ("l5dxclientxid", "3")]);
        map.extend(others.clone());
        remove_client_id(&mut map);
        assert_eq!(map, others);
    }

    #[test]
    fn only_trailers_survive_in_te() {
        for (fields, kept) in [
            (&["trailers"][..], true),
            (&["gzip"], false),
            (&["trailers", "gzip"], true),
            (&["gzip", "trailers"], true),
            (&["deflate;q=0.5, Trailers"], true),
            (&["trailers", "trailers"], true),
            (&[""], false),
        ] {
            let mut map = headers(&[("transfer-encoding", "chunked")]);
            for field in fields {
                map.append("te", HeaderValue::from_static(field));
            }
            strip_for_http2(&mut map);
            let expected = if kept { headers(&[("te", "trailers")]) } else { HeaderMap::new() };
            assert_eq!(map, expected, "{fields:?}");
        }
    }

    #[test]
    fn upgrades_need_http11_and_both_headers() {
        let request = |version, pairs: &[(&'static str, &'static str)]| {
            let mut request = Request::new(());
            *request.version_mut() = version;
            for (name, value) in pairs {
                request.headers_mut().append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            }
            wants_upgrade(&request)
        };
        let both = [("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")];
        assert!(request(Version::HTTP_11, &both));
        assert!(!request(Version::HTTP_10, &both));
        assert!(!request(Version::HTTP_2, &both));
        assert!(!request(Version::HTTP_11, &both[1..]));
        assert!(request(Version::HTTP_11, &[("connection", "close"), both[0], ("upgrade", "foo/2, bar")]));
        assert!(!request(Version::HTTP_11, &[("connection", "upgrade"), ("upgrade", "")]));
        let upgrade = ("connection", "upgrade");
        for h2c in [
            &[upgrade, ("upgrade", "h2c")][..],
            &[upgrade, ("upgrade", "websocket, H2C")],
            &[upgrade, ("upgrade", "websocket"), ("upgrade", "h2c")],
            &[upgrade, ("upgrade", "h2c/1, websocket")],
            &[upgrade, ("upgrade", "websocket"), ("upgrade", "\u{ff}, h2c")],
            &[("connection", "\u{ff}, upgrade"), ("upgrade", "\u{ff}, h2c, websocket")],
        ] {
            assert!(!request(Version::HTTP_11, h2c), "{h2c:?}");
        }
    }

    #[test]
    fn an_upgrade_keeps_its_protocols_alone() {
        let mut sent = Request::new(());
        *sent.headers_mut() = headers(&[
            ("connection", "Upgrade, http2-settings, x-private, l5d-client-id"),
            ("upgrade", "websocket,foo/2"),
            ("http2-settings", "AAMAAABk"),
            ("x-private", "1"),
            ("l5d-client-id", "web.demo"),
        ]);
        sent.headers_mut().append("upgrade", HeaderValue::from_static(" bar ,"));
        let id = ("l5d-client-id", "web.demo");
        let expected = headers(&[("connection", "upgrade"), ("upgrade", "websocket, foo/2, bar"), id]);
        for (method, expected) in [(Method::GET, expected), (Method::CONNECT, headers(&[id]))] {
            let mut request = sent.clone();
            *request.method_mut() = method;
            strip_for_upgrade(&mut request);
            assert_eq!(request.headers(), &expected);
        }
    }
}
