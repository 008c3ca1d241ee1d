//! Why an inbound connection ends without being served, and how that is counted.

use std::{io, net::SocketAddr};

use super::target::ConnectError;
use crate::{
    detect::DetectError, http::serve::ServeError, identity::CertificateExpired, outbound::RelayFailed,
    transport_header::ReadHeaderError,
};

/// Why a connection was closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    /// Its destination is not an address of the pod.
    #[error("{0} is not an address of this pod (LINKERD2_PROXY_INBOUND_IPS)")]
    ForeignAddress(SocketAddr),
    /// Its first bytes could not be read.
    #[error(transparent)]
    Detect(#[from] DetectError),
    /// There is no certificate, which cannot happen after the first one.
    #[error("the proxy has no certificate yet")]
    NoIdentity,
    /// TLS failed.
    #[error("TLS handshake with the client failed")]
    Handshake(#[source] io::Error),
    /// TLS failed, and the proxy's own certificate has expired, which clients refuse.
    #[error("TLS handshake with the client failed: {reason}; {expired}")]
    CertificateExpired {
        /// Whose certificate, and since when.
        expired: CertificateExpired,
        /// The error of the handshake, which is not the cause.
        reason: io::Error,
    },
    /// TLS took too long.
    #[error("TLS handshake with the client timed out")]
    HandshakeTimedOut,
    /// The proxy's own port was dialled by something that is not a meshed proxy.
    #[error("direct connections must be mutually authenticated: {0}")]
    NotMeshed(&'static str),
    /// The transport header could not be read.
    #[error(transparent)]
    Header(#[from] ReadHeaderError),
    /// The transport header did not arrive in time.
    #[error("the transport header did not arrive in time")]
    HeaderTimedOut,
    /// The transport header contains a name, and this proxy is not a gateway for it.
    #[error(
        "the transport header names a service for which this proxy is not a gateway \
         (LINKERD2_PROXY_INBOUND_GATEWAY_SUFFIXES)"
    )]
    Gateway,
    /// Many connections are open, and the client's address has its share of them.
    #[error("too many connections of the client's address are open")]
    TooManyConnections,
    /// Connections to too many names are open.
    #[error("too many names are in use")]
    TooManyNames,
    /// The Service of a gateway's connection cannot be reached.
    #[error(transparent)]
    Relay(#[from] RelayFailed),
    /// The connection would lead back to this proxy.
    #[error("{0} is the proxy itself")]
    Loop(SocketAddr),
    /// The connection comes from this gateway.
    #[error("the gateway is its own client")]
    GatewayLoop,
    /// It is in plaintext, on a port that requires TLS.
    #[error("port {} requires TLS (LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS)", .0.port())]
    TlsRequired(SocketAddr),
    /// Policy does not allow it.
    #[error("connection denied by policy")]
    Denied,
    /// Policy no longer allows it.
    #[error("connection ended because policy no longer allows it")]
    Revoked,
    /// The application cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// One side failed while bytes were copied.
    #[error("connection failed")]
    Copy(#[source] io::Error),
    /// The HTTP connection failed.
    #[error("HTTP connection failed")]
    Http(#[source] ServeError),
}

impl ConnectionError {
    /// The value of the metric label `error`; `None` for what policy denies, which `inbound_tcp_authz_*` count.
    /// Linkerd's values (`linkerd/app/inbound/src/metrics/error.rs`), and more for what is `unexpected` there.
    pub(super) fn label(&self) -> Option<&'static str> {
        Some(match self {
            Self::Denied | Self::Revoked => return None,
            Self::Detect(DetectError::TimedOut) | Self::HandshakeTimedOut => "tls detection timeout",
            Self::Detect(_)
            | Self::Copy(_)
            | Self::Http(_)
            | Self::Handshake(_)
            | Self::Header(_)
            | Self::HeaderTimedOut
            | Self::Connect(ConnectError::Io { .. }) => "i/o",
            Self::Gateway => "gateway domain invalid",
            Self::GatewayLoop => "gateway loop",
            Self::Relay(error) => error.label(),
            Self::Connect(ConnectError::Timeout(_)) => "connect timeout",
            Self::ForeignAddress(_) => "foreign address",
            Self::Loop(_) => "loop",
            Self::NoIdentity => "no certificate",
            Self::CertificateExpired { .. } => "certificate expired",
            Self::NotMeshed(_) => "not meshed",
            Self::TlsRequired(_) => "tls required",
            Self::TooManyConnections | Self::Connect(ConnectError::TooMany(_)) => "too many connections",
            Self::TooManyNames => "too many names",
        })
    }

    /// Whether nothing has failed: the client left, or policy wants the connection closed.
    pub(super) fn is_expected(&self) -> bool {
        match self {
            Self::Detect(DetectError::Closed) | Self::Denied | Self::Revoked => true,
            // The proxy's own deadline for idle clients.
            Self::Http(error) => error.is_timeout(),
            _ => false,
        }
    }
}
