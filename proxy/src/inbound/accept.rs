//! What kind of connection it is: direct or for a port, TLS for us or for others, HTTP or not.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::target::ConnectError;
use super::{Inbound, direct, http, tcp};
use crate::detect::{self, DetectError, Detected};
use crate::http::serve::HttpVersion;
use crate::io::Io;
use crate::metrics::{label, target_labels};
use crate::orig_dst::canonical;
use crate::policy::PortPolicy;
use crate::policy::authz::{Client, ClientTls, NoTls};
use crate::policy::server::Protocol;
use crate::transport_header::ReadHeaderError;

/// Why a connection was closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    /// It was dialled for another address than the pod's.
    #[error("{0} is not an address of this pod (LINKERD2_PROXY_INBOUND_IPS)")]
    ForeignAddress(SocketAddr),
    /// Its first bytes could not be read.
    #[error(transparent)]
    Detect(#[from] DetectError),
    /// There is no certificate; cannot be after the first one.
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
    /// The transport header did not come.
    #[error("the transport header did not arrive in time")]
    HeaderTimedOut,
    /// The transport header names a service: that is for gateways.
    #[error("the transport header is for a gateway, and this proxy is none")]
    Gateway,
    /// The connection would come back to this proxy.
    #[error("{0} is the proxy's own port")]
    Loop(SocketAddr),
    /// Policy does not allow it.
    #[error("connection denied by policy")]
    Denied,
    /// Policy does not allow it any more.
    #[error("connection ended because policy no longer allows it")]
    Revoked,
    /// The application cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// One side failed while bytes were copied.
    #[error("connection failed")]
    Copy(#[source] io::Error),
    /// HTTP failed beneath the requests.
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
            Self::Loop(_) => "loop",
            Self::Denied | Self::Revoked => "unauthorized",
            Self::Connect(_) => "connect",
        }
    }
}

/// Serves one accepted connection that was dialled for `target`.
pub(super) async fn serve(
    inbound: &Arc<Inbound>,
    stream: TcpStream,
    peer: SocketAddr,
    target: SocketAddr,
) -> Result<(), ConnectionError> {
    let config = &inbound.shared.config;
    let peer = canonical(peer);
    if !config.inbound.ips.is_empty() && !config.is_local(target.ip()) {
        return Err(ConnectionError::ForeignAddress(target));
    }
    if target.port() == config.inbound.listen.port() {
        return direct::serve(inbound, stream, peer, target).await;
    }

    let policy = inbound.policies.port(target.port()).await;
    let is_opaque = matches!(policy.borrow().protocol, Protocol::Opaque);
    if is_opaque {
        let client = Client { addr: peer, tls: ClientTls::None(NoTls::PortSkipped) };
        return tcp::forward(inbound, Io::new(stream), client, target, policy).await;
    }

    let timeout = config.inbound.detect_timeout;
    let (name, stream) = detect::tls(stream, timeout).await?;
    match name {
        Some(name) if *name == *config.identity.server_name => {
            let handshake = inbound.tls.accept(stream, timeout).await?;
            let client = Client { addr: peer, tls: ClientTls::Established(handshake.identity) };
            dispatch(inbound, handshake.stream, client, target, policy).await
        }
        Some(name) => {
            let client = Client { addr: peer, tls: ClientTls::Passthrough(name.into()) };
            tcp::forward(inbound, stream, client, target, policy).await
        }
        None => {
            let client = Client { addr: peer, tls: ClientTls::None(NoTls::NotFromRemote) };
            dispatch(inbound, stream, client, target, policy).await
        }
    }
}

/// Goes by the policy's protocol, and by what the client sends where that leaves it open.
async fn dispatch<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    client: Client,
    target: SocketAddr,
    policy: PortPolicy,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let known = policy.borrow().clone();
    let is_plain = matches!(client.tls, ClientTls::None(_));
    let (timeout, when_silent) = match &known.protocol {
        Protocol::Opaque | Protocol::Tls => return tcp::forward(inbound, stream, client, target, policy).await,
        Protocol::Http2(_) | Protocol::Grpc(_) => {
            return http::serve(inbound, stream, HttpVersion::Http2, client, target, policy).await;
        }
        Protocol::Http1(_) if is_plain => {
            return http::serve(inbound, stream, HttpVersion::Http1, client, target, policy).await;
        }
        // A meshed client may carry HTTP/1 over HTTP/2.
        Protocol::Http1(_) => (inbound.shared.config.inbound.detect_timeout, Some(HttpVersion::Http1)),
        Protocol::Detect { timeout, .. } => (*timeout, None),
    };

    let (detected, stream) = detect::http(stream, timeout).await?;
    let mut labels = target_labels(target);
    labels.push(label("result", detected.label()));
    inbound.shared.metrics.inbound_detect_results.get_or_create(&labels).inc();
    let version = match detected {
        Detected::Http1 => Some(HttpVersion::Http1),
        Detected::Http2 => Some(HttpVersion::Http2),
        Detected::NotHttp => None,
        Detected::TimedOut => when_silent,
    };
    match version {
        Some(version) => http::serve(inbound, stream, version, client, target, policy).await,
        None => tcp::forward(inbound, stream, client, target, policy).await,
    }
}
