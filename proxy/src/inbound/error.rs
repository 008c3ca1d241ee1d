//! Why an inbound connection ends without being served, and how that is counted.

use std::{io, net::SocketAddr};

use super::target::ConnectError;
use crate::{detect::DetectError, outbound::RelayFailed, transport_header::ReadHeaderError};

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
    /// The transport header contains a name, and this proxy is no gateway, or none for this name.
    #[error(
        "the transport header is for a gateway, and this proxy is none for the name (LINKERD2_PROXY_INBOUND_GATEWAY_SUFFIXES)"
    )]
    Gateway,
    /// Connections to too many names are open.
    #[error("too many names are in use")]
    TooManyNames,
    /// The Service of a gateway's connection cannot be reached.
    #[error(transparent)]
    Relay(#[from] RelayFailed),
    /// The connection would lead back to this proxy, or comes from it.
    #[error("{0} is the proxy itself")]
    Loop(SocketAddr),
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
    Http(#[source] hyper::Error),
}

impl ConnectionError {
    /// The value of the metric label `error`.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::ForeignAddress(_) => "foreign_address",
            Self::Detect(DetectError::TimedOut) => "tls_detect_timeout",
            Self::Detect(_) | Self::Copy(_) | Self::Http(_) => "io",
            Self::NoIdentity | Self::Handshake(_) | Self::HandshakeTimedOut => "tls_handshake",
            Self::NotMeshed(_) => "direct_not_meshed",
            Self::Header(_) | Self::HeaderTimedOut => "transport_header",
            Self::Gateway => "gateway_not_configured",
            Self::TooManyNames => "too_many_names",
            Self::Relay(error) => error.label(),
            Self::Loop(_) => "loop",
            Self::TlsRequired(_) => "tls_required",
            Self::Denied | Self::Revoked => "unauthorized",
            Self::Connect(_) => "connect",
        }
    }
}
