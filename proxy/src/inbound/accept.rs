//! Finds out what an accepted connection is: direct or for a port, our TLS or another's, HTTP or not.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::Instant,
};

use super::{Inbound, Serving, direct, error::ConnectionError, http, tcp};
use crate::{
    detect::{self, Detected, Reads},
    http::serve::HttpVersion,
    io::{Abort, Io},
    metrics::{Direction, Labels},
    orig_dst::canonical,
    policy::{
        PortPolicy,
        authz::{Client, ClientTls, NoTls},
        server::{Protocol, ServerPolicy},
    },
};

/// Finds out how to serve one accepted connection with the original destination `target`.
pub(super) async fn negotiate(
    inbound: &Arc<Inbound>,
    stream: TcpStream,
    peer: SocketAddr,
    target: SocketAddr,
) -> Result<Serving, ConnectionError> {
    let config = &inbound.shared.config;
    let peer = canonical(peer);
    if !config.inbound.ips.is_empty() && !config.is_local(target.ip()) {
        return Err(ConnectionError::ForeignAddress(target));
    }
    if target.port() == config.inbound.listen.port() {
        return direct::negotiate(inbound, stream, peer, target).await;
    }

    let policy = inbound.policies.port(target.port(), peer.ip()).await;
    let is_opaque = matches!(policy.borrow().protocol, Protocol::Opaque);
    let requires_tls = config.inbound.tls_ports.contains(&target.port());
    let skipped = Client { addr: peer, tls: ClientTls::None(NoTls::PortSkipped) };
    if is_opaque && !requires_tls {
        return tcp::forward(inbound, Io::new(stream), skipped, target, policy);
    }

    let timeout = config.inbound.detect_timeout;
    let (name, stream) = detect::tls(stream, timeout).await?;
    match name {
        None if requires_tls => Err(ConnectionError::TlsRequired(target)),
        Some(_) if is_opaque => tcp::forward(inbound, stream, skipped, target, policy),
        Some(name) if *name == *config.identity.server_name => {
            let handshake = inbound.tls.accept(stream, timeout).await?;
            let client = Client { addr: peer, tls: ClientTls::Established(handshake.identity) };
            dispatch(inbound, handshake.stream, client, target, policy).await
        }
        Some(_) => {
            let client = Client { addr: peer, tls: ClientTls::Passthrough };
            tcp::forward(inbound, stream, client, target, policy)
        }
        None => {
            let client = Client { addr: peer, tls: ClientTls::None(NoTls::NotFromRemote) };
            dispatch(inbound, stream, client, target, policy).await
        }
    }
}

/// How a connection is served after its TLS is settled.
enum ServePlan {
    /// As bytes.
    Bytes,
    /// As HTTP without detection.
    Http(HttpVersion),
    /// As detected from the client's first bytes.
    Detect {
        /// Deadline for these bytes.
        timeout: Duration,
        /// Whether what is not HTTP is forwarded as bytes.
        takes_bytes: bool,
    },
}

impl ServePlan {
    fn new(policy: &ServerPolicy, is_plain: bool, detect_timeout: Duration) -> Self {
        let takes_bytes = policy.takes_bytes();
        match &policy.protocol {
            Protocol::Opaque | Protocol::Tls => Self::Bytes,
            Protocol::Http2(_) | Protocol::Grpc(_) => Self::Http(HttpVersion::Http2),
            Protocol::Http1(_) if is_plain => Self::Http(HttpVersion::Http1),
            // A meshed client may carry HTTP/1 over HTTP/2.
            Protocol::Http1(_) => Self::Detect { timeout: detect_timeout, takes_bytes },
            Protocol::Detect { timeout, .. } => Self::Detect { timeout: *timeout, takes_bytes },
        }
    }
}

/// Dispatches by the policy's protocol, and by detection if the protocol is open.
async fn dispatch<S>(
    inbound: &Arc<Inbound>,
    stream: Io<S>,
    client: Client,
    target: SocketAddr,
    policy: PortPolicy,
) -> Result<Serving, ConnectionError>
where
    S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
{
    let is_plain = matches!(client.tls, ClientTls::None(_));
    // One statement, so that the connection does not keep a reference to this policy.
    let plan = ServePlan::new(&policy.borrow(), is_plain, inbound.shared.config.inbound.detect_timeout);
    let (timeout, takes_bytes) = match plan {
        ServePlan::Bytes => return tcp::forward(inbound, stream, client, target, policy),
        ServePlan::Http(version) => return Ok(http::serve(inbound, stream, version, client, target, policy)),
        ServePlan::Detect { timeout, takes_bytes } => (timeout, takes_bytes),
    };
    let reads = if takes_bytes { Reads::One } else { Reads::UntilClear };

    let began = Instant::now();
    let detected = detect::http(stream, timeout, reads).await;
    let result = detected.as_ref().map_or("error", |(detected, _)| detected.label());
    let mut labels = Labels::new();
    inbound.append_server(&policy.borrow().meta, target, &mut labels);
    inbound.shared.metrics.detect(Direction::Inbound, labels).detected(result, began.elapsed());
    let (detected, stream) = detected?;
    let version = match detected {
        Detected::Http1 => Some(HttpVersion::Http1),
        Detected::Http2 => Some(HttpVersion::Http2),
        Detected::NotHttp => None,
        // Where bytes do not pass, a client that says nothing speaks HTTP/1.
        Detected::TimedOut => (!takes_bytes).then_some(HttpVersion::Http1),
    };
    match version {
        Some(version) => Ok(http::serve(inbound, stream, version, client, target, policy)),
        None => tcp::forward(inbound, stream, client, target, policy),
    }
}
