//! Headers that belong to one hop, and headers that belong to the mesh.

use http::header::{CONNECTION, HeaderName, TE, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderValue, Method, Request, Version};

/// The client's identity, as the inbound proxy tells its application.
pub(crate) const CLIENT_ID: HeaderName = HeaderName::from_static("l5d-client-id");
/// The identity that an application demands of its server.
pub(crate) const REQUIRE_ID: HeaderName = HeaderName::from_static("l5d-require-id");
/// The service that a request was meant for.
pub(crate) const DST_CANONICAL: HeaderName = HeaderName::from_static("l5d-dst-canonical");
/// HTTP/1 that travels as HTTP/2.
pub(crate) const ORIG_PROTO: HeaderName = HeaderName::from_static("l5d-orig-proto");
/// Why a proxy answered in the server's place.
pub(crate) const PROXY_ERROR: HeaderName = HeaderName::from_static("l5d-proxy-error");
/// `close`: the inbound proxy asks that the application's connection be closed.
pub(crate) const PROXY_CONNECTION_L5D: HeaderName = HeaderName::from_static("l5d-proxy-connection");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Removes what concerns one connection alone: what `Connection` lists, and the well-known ones (RFC 9110 section 7.6.1).
///
/// `Transfer-Encoding` stays, because hyper needs it for HTTP/1.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if let Some(connection) = headers.remove(CONNECTION) {
        for name in connection.to_str().unwrap_or_default().split(',') {
            // A header that is named here and still belongs to the message must survive.
            if let Ok(name) = name.trim().parse::<HeaderName>()
                && !matches!(name.as_str(), "host" | "content-length" | "transfer-encoding" | "te" | "")
            {
                headers.remove(name);
            }
        }
    }
    for name in [UPGRADE, KEEP_ALIVE, PROXY_CONNECTION] {
        headers.remove(name);
    }
}

/// Makes headers fit for HTTP/2, which forbids those of HTTP/1 connections (RFC 9113 section 8.2.2).
pub(crate) fn strip_for_http2(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    headers.remove(TRANSFER_ENCODING);
    if headers.get(TE).is_some_and(|te| te != "trailers") {
        headers.remove(TE);
    }
}

/// Whether an HTTP/1.1 request asks for another protocol. `h2c` does not count: it is never upgraded.
pub(crate) fn wants_upgrade<B>(request: &Request<B>) -> bool {
    if request.version() != Version::HTTP_11 {
        return false;
    }
    if request.method() == Method::CONNECT {
        return true;
    }
    let upgrade = request.headers().get(UPGRADE).map(HeaderValue::as_bytes);
    let connection = request.headers().get_all(CONNECTION).iter().any(|value| {
        value.to_str().unwrap_or_default().split(',').any(|token| token.trim().eq_ignore_ascii_case("upgrade"))
    });
    connection && upgrade.is_some_and(|protocol| !protocol.eq_ignore_ascii_case(b"h2c"))
}

/// Whether a request is gRPC.
pub(crate) fn is_grpc(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_2
        && headers
            .get(http::header::CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
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
    fn only_trailers_survive_in_te() {
        let mut map = headers(&[("te", "trailers"), ("transfer-encoding", "chunked")]);
        strip_for_http2(&mut map);
        assert_eq!(map.len(), 1);
        let mut map = headers(&[("te", "gzip")]);
        strip_for_http2(&mut map);
        assert!(map.is_empty());
    }

    #[test]
    fn upgrades_need_http11_and_both_headers() {
        let request = |version, pairs: &[(&'static str, &'static str)]| {
            let mut request = Request::new(());
            *request.version_mut() = version;
            *request.headers_mut() = headers(pairs);
            wants_upgrade(&request)
        };
        let both = [("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")];
        assert!(request(Version::HTTP_11, &both));
        assert!(!request(Version::HTTP_10, &both));
        assert!(!request(Version::HTTP_2, &both));
        assert!(!request(Version::HTTP_11, &both[1..]));
        assert!(!request(Version::HTTP_11, &[("connection", "upgrade"), ("upgrade", "h2c")]));
    }
}
