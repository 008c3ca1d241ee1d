//! Responses for failures: which status, for HTTP and for gRPC, and whether the connection closes.
//!
//! The table is Linkerd's (`linkerd/app/core/src/errors/respond.rs`). Refuses to send anything: it only creates
//! responses.

use http::{
    HeaderMap, HeaderValue, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE},
};

use super::headers::{PROXY_CONNECTION_L5D, PROXY_ERROR, is_grpc};
use crate::{metrics::StreamEnd, request::deadlines::Expired};

/// The failure of one request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// A bug, or a policy that cannot be used.
    #[error("{0}")]
    Internal(&'static str),
    /// The server cannot be reached or does not answer as it should.
    #[error("{0}")]
    BadGateway(String),
    /// The destination or its endpoint must not be used; `label` is the value of the metric label `error`.
    #[error("{reason}")]
    Unusable { reason: String, label: &'static str },
    /// Mutual TLS is required, and the endpoint has no identity.
    #[error("{0}")]
    PlaintextRefused(String),
    /// No endpoint was ready in time.
    #[error("service in fail-fast")]
    FailFast,
    /// Connecting took too long.
    #[error("connect timed out")]
    ConnectTimeout,
    /// The control plane did not say in time where the request goes.
    #[error("discovery timed out")]
    DiscoveryTimeout,
    /// A timeout of the policy.
    #[error("{0}")]
    Timeout(Expired),
    /// Too many requests at once.
    #[error("load shed: too many requests in flight")]
    LoadShed,
    /// Policy denies the request.
    #[error("unauthorized request on route")]
    Unauthorized,
    /// A rate limit is exceeded.
    #[error("rate limit exceeded")]
    RateLimited,
    /// No route matches.
    #[error("no route found for request")]
    NoRoute,
    /// A gateway does not serve the name, or knows nothing about it.
    #[error("the gateway does not serve this name")]
    GatewayDomain,
    /// The request has been at this gateway already.
    #[error("gateway loop detected")]
    Loop,
    /// A route injects a failure.
    #[error("{message}")]
    Injected {
        /// The HTTP status, or the gRPC code with `grpc`.
        code: u16,
        /// Whether `code` is gRPC's.
        grpc: bool,
        /// The message from the policy.
        message: String,
    },
    /// A route redirects.
    #[error("redirected")]
    Redirect {
        /// The status of the redirect.
        status: StatusCode,
        /// The new location.
        location: HeaderValue,
    },
    /// The request is malformed.
    #[error("bad request")]
    BadRequest,
    /// Routes and applications may read the path differently.
    #[error("the path has a segment of dots")]
    DotSegment,
}

/// The properties of a request that shape the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestKind {
    /// The version that the client speaks.
    pub(crate) version: Version,
    /// Whether it is gRPC.
    pub(crate) grpc: bool,
    /// Whether it came as HTTP/1 carried over HTTP/2.
    pub(crate) orig_proto: bool,
    /// Whether the client may be told the reason, in `l5d-proxy-error` and `grpc-message`.
    pub(crate) show_error: bool,
    /// Whether the client is another proxy, which closes its application's connection on `l5d-proxy-connection:
    /// close`.
    pub(crate) from_proxy: bool,
}

impl RequestKind {
    /// The kind of a request from the application.
    pub(crate) fn outbound(version: Version, headers: &HeaderMap, show_error: bool) -> Self {
        Self { version, grpc: is_grpc(version, headers), orig_proto: false, show_error, from_proxy: false }
    }

    /// The kind of a request to the application; only meshed clients see the reason of a failure.
    pub(crate) fn inbound(version: Version, headers: &HeaderMap, orig_proto: bool, is_meshed: bool) -> Self {
        Self { version, grpc: is_grpc(version, headers), orig_proto, show_error: is_meshed, from_proxy: is_meshed }
    }
}

impl Failure {
    /// The HTTP status.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::BadGateway(_) | Self::Unusable { .. } | Self::PlaintextRefused(_) => StatusCode::BAD_GATEWAY,
            Self::FailFast | Self::ConnectTimeout | Self::DiscoveryTimeout | Self::Timeout(_) => {
                StatusCode::GATEWAY_TIMEOUT
            }
            Self::LoadShed => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unauthorized => StatusCode::FORBIDDEN,
            Self::RateLimited => StatusCode::TOO_MANY_REQUESTS,
            Self::NoRoute | Self::GatewayDomain => StatusCode::NOT_FOUND,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::Injected { code, grpc: false, .. } => {
                StatusCode::from_u16(*code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
            }
            Self::Injected { grpc: true, .. } => StatusCode::OK,
            Self::Redirect { status, .. } => *status,
            Self::BadRequest | Self::DotSegment => StatusCode::BAD_REQUEST,
        }
    }

    /// The gRPC code.
    pub(crate) fn grpc_code(&self) -> u16 {
        match self {
            Self::Internal(_) | Self::BadRequest | Self::DotSegment => 13,
            Self::BadGateway(_) | Self::Unusable { .. } | Self::PlaintextRefused(_) | Self::LoadShed => 14,
            Self::FailFast | Self::ConnectTimeout | Self::DiscoveryTimeout | Self::Timeout(_) => 4,
            Self::Unauthorized => 7,
            Self::RateLimited => 8,
            Self::NoRoute | Self::GatewayDomain | Self::Redirect { .. } => 5,
            Self::Loop => 10,
            Self::Injected { code, grpc: true, .. } => *code,
            Self::Injected { grpc: false, .. } => 9,
        }
    }

    /// Whether the client's connection closes, because its server may be gone.
    pub(crate) fn closes(&self) -> bool {
        match self {
            Self::Internal(_)
            | Self::BadGateway(_)
            | Self::Unusable { .. }
            | Self::PlaintextRefused(_)
            | Self::FailFast
            | Self::ConnectTimeout
            | Self::DiscoveryTimeout
            | Self::Timeout(Expired::Profile)
            | Self::LoadShed
            | Self::Loop
            | Self::BadRequest => true,
            Self::Timeout(_)
            | Self::Unauthorized
            | Self::RateLimited
            | Self::NoRoute
            | Self::GatewayDomain
            | Self::Injected { .. }
            | Self::Redirect { .. }
            // The path is one user's, and others may share the connection.
            | Self::DotSegment => false,
        }
    }

    /// Whether the policy wants this answer, so that nothing has failed.
    pub(crate) fn is_policy(&self) -> bool {
        match self {
            Self::Unauthorized
            | Self::RateLimited
            | Self::NoRoute
            | Self::Injected { .. }
            | Self::Redirect { .. }
            | Self::DotSegment => true,
            Self::Internal(_)
            | Self::BadGateway(_)
            | Self::Unusable { .. }
            | Self::PlaintextRefused(_)
            | Self::FailFast
            | Self::ConnectTimeout
            | Self::DiscoveryTimeout
            | Self::Timeout(_)
            | Self::LoadShed
            | Self::GatewayDomain
            | Self::Loop
            | Self::BadRequest => false,
        }
    }

    /// The value of the label `error` of `*_http_errors_total`; `None` for what policy denies, which
    /// `inbound_http_authz_deny_total` counts. Linkerd's values
    /// (`linkerd/app/{inbound,outbound}/src/metrics/error.rs`), and more for what is `unexpected` there.
    pub(crate) fn label(&self) -> Option<&'static str> {
        Some(match self {
            Self::Unauthorized => return None,
            Self::Internal(_) => "unexpected",
            Self::BadGateway(_) => "i/o",
            Self::Unusable { label, .. } => label,
            Self::PlaintextRefused(_) => "identity required",
            Self::FailFast => "failfast",
            Self::Timeout(_) => "response timeout",
            Self::LoadShed => "loadshed",
            Self::GatewayDomain => "gateway domain invalid",
            Self::Loop => "gateway loop",
            Self::ConnectTimeout => "connect timeout",
            Self::DiscoveryTimeout => "discovery timeout",
            Self::RateLimited => "rate limited",
            Self::NoRoute => "no route",
            Self::Injected { .. } => "injected",
            Self::Redirect { .. } => "redirect",
            Self::BadRequest | Self::DotSegment => "bad request",
        })
    }

    /// What the families of statuses count: an answer of policy by its code, anything else by Linkerd's name for the
    /// error.
    pub(crate) fn stream_end(&self) -> StreamEnd {
        match self {
            Self::Injected { code, grpc: false, .. } => StreamEnd { status: Some(*code), ..StreamEnd::default() },
            Self::Injected { code, grpc: true, .. } => StreamEnd { grpc: Some(*code), ..StreamEnd::default() },
            Self::Redirect { status, .. } => StreamEnd { status: Some(status.as_u16()), ..StreamEnd::default() },
            other => StreamEnd::failed(other.status_label()),
        }
    }

    /// The value of the label `error` of the families of statuses, one of Linkerd's; empty for answers of policy.
    pub(crate) fn status_label(&self) -> &'static str {
        match self {
            Self::FailFast => "FAIL_FAST",
            Self::LoadShed => "LOAD_SHED",
            Self::Timeout(Expired::Request | Expired::Profile) => "REQUEST_TIMEOUT",
            Self::Timeout(Expired::Head) => "RESPONSE_HEADERS_TIMEOUT",
            Self::Timeout(Expired::Response) => "RESPONSE_STREAM_TIMEOUT",
            Self::Timeout(Expired::Idle) => "IDLE_TIMEOUT",
            Self::BadGateway(_) | Self::Unusable { .. } | Self::ConnectTimeout => "IO",
            Self::Injected { .. } | Self::Redirect { .. } => "",
            Self::PlaintextRefused(_) => "REQUIRE_MTLS",
            Self::Internal(_)
            | Self::DiscoveryTimeout
            | Self::Unauthorized
            | Self::RateLimited
            | Self::NoRoute
            | Self::GatewayDomain
            | Self::Loop
            | Self::BadRequest
            | Self::DotSegment => "UNKNOWN",
        }
    }

    /// What a gRPC client is told after the response has begun.
    pub(crate) fn trailers(&self, kind: RequestKind) -> HeaderMap {
        let mut trailers = HeaderMap::with_capacity(2);
        trailers.insert("grpc-status", HeaderValue::from(self.grpc_code()));
        if kind.show_error {
            trailers.insert("grpc-message", grpc_message(&self.to_string()));
        }
        trailers
    }

    /// The response for a request of this kind; it has no body.
    pub(crate) fn respond(&self, kind: RequestKind) -> Response<()> {
        let mut response = Response::new(());
        let message = header_value(&self.to_string());
        *response.version_mut() = kind.version;
        let headers = response.headers_mut();
        if kind.grpc {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            headers.extend(self.trailers(kind));
        } else {
            headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
            if let Self::Redirect { location, .. } = self {
                headers.insert(http::header::LOCATION, location.clone());
            }
        }
        if kind.show_error && !matches!(self, Self::Redirect { .. }) {
            headers.insert(PROXY_ERROR, message);
        }
        if self.closes() && (kind.orig_proto || kind.from_proxy) {
            headers.insert(PROXY_CONNECTION_L5D, HeaderValue::from_static("close"));
        }
        if self.closes() && !kind.orig_proto && kind.version < Version::HTTP_2 {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if !kind.grpc {
            *response.status_mut() = self.status();
        }
        response
    }
}

fn header_value(text: &str) -> HeaderValue {
    let visible: String = text.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect();
    HeaderValue::from_str(&visible).unwrap_or(HeaderValue::from_static("error"))
}

/// Percent-encodes a message as gRPC requires.
fn grpc_message(text: &str) -> HeaderValue {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    header_value(&encoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(version: Version, grpc: bool, orig_proto: bool) -> RequestKind {
        RequestKind { version, grpc, orig_proto, show_error: true, from_proxy: false }
    }

    #[test]
    fn every_class_has_linkerds_status_code_and_close() {
        for (failure, status, code, closes) in [
            (Failure::Internal("x"), 500, 13, true),
            (Failure::BadGateway("x".into()), 502, 14, true),
            (Failure::PlaintextRefused("x".into()), 502, 14, true),
            (Failure::FailFast, 504, 4, true),
            (Failure::ConnectTimeout, 504, 4, true),
            (Failure::DiscoveryTimeout, 504, 4, true),
            (Failure::Unusable { reason: "x".into(), label: "loopback" }, 502, 14, true),
            (Failure::Timeout(Expired::Request), 504, 4, false),
            (Failure::Timeout(Expired::Profile), 504, 4, true),
            (Failure::LoadShed, 503, 14, true),
            (Failure::Unauthorized, 403, 7, false),
            (Failure::RateLimited, 429, 8, false),
            (Failure::NoRoute, 404, 5, false),
            (Failure::GatewayDomain, 404, 5, false),
            (Failure::Loop, 508, 10, true),
            (Failure::BadRequest, 400, 13, true),
            (Failure::DotSegment, 400, 13, false),
            (Failure::Injected { code: 418, grpc: false, message: "x".into() }, 418, 9, false),
            (Failure::Injected { code: 3, grpc: true, message: "x".into() }, 200, 3, false),
        ] {
            let http = failure.respond(kind(Version::HTTP_11, false, false));
            assert_eq!(http.status(), status, "{failure:?}");
            assert_eq!(http.headers().contains_key("connection"), closes, "{failure:?}");
            let grpc = failure.respond(kind(Version::HTTP_2, true, false));
            assert_eq!(grpc.status(), 200, "{failure:?}");
            assert_eq!(grpc.headers()["grpc-status"], code.to_string(), "{failure:?}");
            assert!(!grpc.headers().contains_key("connection"));
        }
    }

    #[test]
    fn errors_have_linkerds_names_where_it_has_one_and_denials_are_none() {
        for (failure, expected) in [
            (Failure::Unauthorized, None),
            (Failure::FailFast, Some("failfast")),
            (Failure::LoadShed, Some("loadshed")),
            (Failure::BadGateway("x".into()), Some("i/o")),
            (Failure::Unusable { reason: "x".into(), label: "loopback" }, Some("loopback")),
            (Failure::PlaintextRefused("x".into()), Some("identity required")),
            (Failure::Timeout(Expired::Request), Some("response timeout")),
            (Failure::Timeout(Expired::Head), Some("response timeout")),
            (Failure::GatewayDomain, Some("gateway domain invalid")),
            (Failure::Loop, Some("gateway loop")),
            (Failure::Internal("x"), Some("unexpected")),
            // All of these are `unexpected` there.
            (Failure::ConnectTimeout, Some("connect timeout")),
            (Failure::RateLimited, Some("rate limited")),
        ] {
            assert_eq!(failure.label(), expected, "{failure:?}");
        }
    }

    #[test]
    fn carried_http1_is_told_to_close_by_the_mesh_header() {
        let response = Failure::FailFast.respond(kind(Version::HTTP_2, false, true));
        assert_eq!(response.headers()["l5d-proxy-connection"], "close");
        assert!(!response.headers().contains_key("connection"));
    }

    #[test]
    fn every_fatal_error_tells_a_meshed_client_to_close() {
        for (version, grpc) in [(Version::HTTP_11, false), (Version::HTTP_2, false), (Version::HTTP_2, true)] {
            let kind = RequestKind { from_proxy: true, ..kind(version, grpc, false) };
            assert_eq!(
                Failure::FailFast.respond(kind).headers()["l5d-proxy-connection"],
                "close",
                "{version:?} {grpc}"
            );
            assert!(!Failure::Unauthorized.respond(kind).headers().contains_key("l5d-proxy-connection"));
        }
        let unmeshed = Failure::FailFast.respond(kind(Version::HTTP_2, true, false));
        assert!(!unmeshed.headers().contains_key("l5d-proxy-connection"));
    }

    #[test]
    fn a_message_to_a_grpc_client_is_percent_encoded() {
        let failure = Failure::BadGateway("50% of \u{fc} or\nless".into());
        let response = failure.respond(kind(Version::HTTP_2, true, false));
        assert_eq!(response.headers()["grpc-message"], "50%25 of %C3%BC or%0Aless");
    }

    #[test]
    fn the_reason_is_hidden_when_it_should_be() {
        let hidden = RequestKind { show_error: false, ..kind(Version::HTTP_11, false, false) };
        assert!(!Failure::FailFast.respond(hidden).headers().contains_key("l5d-proxy-error"));
        let shown = Failure::FailFast.respond(kind(Version::HTTP_11, false, false));
        assert_eq!(shown.headers()["l5d-proxy-error"], "service in fail-fast");
        // An injected failure's message is a policy's, and names no address; Linkerd's proxy hides it likewise.
        for failure in [Failure::FailFast, Failure::Injected { code: 4, grpc: true, message: "x".into() }] {
            let shown = kind(Version::HTTP_2, true, false);
            let hidden = RequestKind { show_error: false, ..shown };
            assert!(failure.respond(shown).headers().contains_key("grpc-message"), "{failure:?}");
            for headers in [failure.respond(hidden).headers(), &failure.trailers(hidden)] {
                assert_eq!(headers["grpc-status"], "4", "{failure:?}");
                assert!(
                    !headers.contains_key("grpc-message") && !headers.contains_key("l5d-proxy-error"),
                    "{headers:?}"
                );
            }
        }
    }
}
