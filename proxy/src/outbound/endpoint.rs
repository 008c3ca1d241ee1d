//! One endpoint as a worker uses it: connecting with TLS and transport header, and the HTTP connections that are kept.
//!
//! Owns all rules for connecting to an endpoint. Always refuses plaintext to an endpoint with an identity, plaintext to
//! any other where mutual TLS is required, and connections to loopback, where the proxy itself listens.

use std::{
    io,
    net::SocketAddr,
    num::NonZeroU16,
    sync::{Arc, atomic::AtomicUsize},
};

use http::uri::Authority;
use parking_lot::Mutex;
use rustls::ClientConfig;
use tokio::{io::AsyncWriteExt as _, net::TcpStream};
use tokio_rustls::TlsConnector;
use weft_tls::{credentials::Credentials, identity::Identity};

use crate::{
    config::{Config, Windows},
    discover::endpoint::{EndpointInfo, EndpointTls, ProtocolHint},
    http::{pool::Pool, shared_connections::SharedConnections},
    identity::CertificateExpired,
    io::{Batched, Io, Stream},
    listen::set_options,
    metrics::{Direction, HttpMetrics, Labels, Peer, TransportMetrics, label, target_labels},
    shared::Shared,
    transport_header::{ALPN, SessionProtocol, TransportHeader},
};

/// An endpoint with its connections.
pub(crate) struct Endpoint {
    /// Its description from the control plane.
    pub(crate) info: Arc<EndpointInfo>,
    /// Whether it is this very pod, which is reached without TLS, over `lo`.
    pub(crate) local: bool,
    /// Metrics of HTTP with it.
    pub(crate) http: Arc<HttpMetrics>,
    pub(super) shared: Arc<Shared>,
    pub(super) h1: Pool,
    /// Attempts to connect over HTTP/1 whose requests were given up.
    pub(super) given_up: AtomicUsize,
    pub(super) h2: SharedConnections<ConnectError>,
    transport: Arc<TransportMetrics>,
    tls: Mutex<Option<TlsConfig>>,
}

/// A client configuration and the credentials that it was made from.
struct TlsConfig {
    credentials: Arc<Credentials>,
    config: Arc<ClientConfig>,
}

/// Why an endpoint did not process a request, which can be sent to another one.
#[derive(Debug)]
pub(crate) enum Unprocessed {
    /// It cannot be reached. Requests that waited for the same attempt share the reason.
    Unreachable(Arc<ConnectError>),
    /// It refused the stream (RFC 9113 section 8.7).
    Refused(::h2::Error),
    /// It refused the stream, and had not announced how few it allows when the stream was begun.
    LimitUnknown(::h2::Error),
    /// Its connection ended before the request.
    ConnectionEnded,
}

/// Why an endpoint cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    /// The connection was not made in time.
    #[error("connect to {0} timed out")]
    Timeout(SocketAddr),
    /// The connection was refused, reset, or TLS failed.
    #[error("connect to {addr}: {source}")]
    Io {
        /// Address of the endpoint.
        addr: SocketAddr,
        /// Error of the kernel or of rustls.
        source: io::Error,
    },
    /// The address is loopback.
    #[error("refusing to connect to {0}: a loopback target is the proxy itself")]
    Loopback(SocketAddr),
    /// The endpoint has no identity, and plaintext is not allowed.
    #[error("refusing plaintext to {0}: it has no identity, and weft.io/require-mtls is set")]
    PlaintextRefused(SocketAddr),
    /// There is no certificate yet, and plaintext is not allowed.
    #[error("no certificate to connect to {0} with")]
    NoCredentials(SocketAddr),
    /// The certificate has expired, and plaintext is not allowed. The endpoint would refuse it, in TLS 1.3 only after
    /// the handshake.
    #[error("connect to {addr}: {source}")]
    CertificateExpired {
        /// Address of the endpoint.
        addr: SocketAddr,
        /// Whose certificate, and since when.
        source: CertificateExpired,
    },
    /// HTTP/2 could not be set up.
    #[error("begin HTTP/2 with {addr}: {source}")]
    Http2 {
        /// Address of the endpoint.
        addr: SocketAddr,
        /// Error of h2.
        source: h2::Error,
    },
    /// HTTP/1 could not be set up.
    #[error("begin HTTP/1 with {addr}: {source}")]
    Http1 {
        /// Address of the endpoint.
        addr: SocketAddr,
        /// Error of hyper.
        source: hyper::Error,
    },
}

impl ConnectError {
    /// Whether the failure is on this side (file descriptors, ports, memory, no valid certificate), so that another
    /// endpoint would fail alike.
    pub(crate) fn is_local(&self) -> bool {
        match self {
            Self::NoCredentials(_) | Self::CertificateExpired { .. } => true,
            Self::Io { source, .. } => {
                let local =
                    [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS, libc::ENOMEM, libc::EAGAIN];
                source.raw_os_error().is_some_and(|errno| local.contains(&errno))
            }
            _ => false,
        }
    }

    /// The value of the metric label `error`.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "connect timeout",
            Self::Io { .. } | Self::Http1 { .. } | Self::Http2 { .. } => "i/o",
            Self::Loopback(_) => "loopback",
            Self::NoCredentials(_) => "no certificate",
            Self::CertificateExpired { .. } => "certificate expired",
            Self::PlaintextRefused(_) => "identity required",
        }
    }
}

impl Endpoint {
    /// Creates an endpoint without connections; `service` is the name and port of its Service, if it is one's.
    pub(crate) fn new(shared: Arc<Shared>, info: Arc<EndpointInfo>, service: Option<&str>) -> Self {
        let local = shared.config.is_local(info.addr.ip());
        // The application chose an address about which nothing is known. The others are those of the cluster.
        let target = if info.tls.is_none() && info.labels.is_empty() {
            shared.metrics.dialled.labels(info.addr)
        } else {
            target_labels(info.addr)
        };
        let labels = labels(&shared.config, &info, target, service, local);
        Self {
            local,
            http: Arc::new(shared.metrics.http(Direction::Outbound, &labels)),
            transport: Arc::new(shared.metrics.transport(Direction::Outbound, Peer::Dst, &labels)),
            h2: SharedConnections::new(info.windows.or(shared.config.http2.windows)),
            info,
            h1: Pool::default(),
            given_up: AtomicUsize::new(0),
            tls: Mutex::default(),
            shared,
        }
    }

    /// The endpoint's identity; `None` without TLS.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.tls().map(|tls| &tls.server_id)
    }

    /// The windows of HTTP/2 connections to it.
    pub(crate) fn windows(&self) -> Windows {
        self.info.windows.or(self.shared.config.http2.windows)
    }

    /// The name of the Service, which an endpoint that is a gateway needs; `None` for this pod itself.
    pub(crate) fn authority_override(&self) -> Option<&Authority> {
        self.info.authority_override.as_ref().filter(|_| !self.local)
    }

    /// Why there is no TLS with it, for labels.
    pub(crate) fn no_tls_reason(&self) -> &'static str {
        no_tls_reason(&self.shared.config, &self.info, self.local)
    }

    /// Whether HTTP/1 requests to it are carried over HTTP/2.
    pub(crate) fn upgrades_http1(&self) -> bool {
        self.info.hint == ProtocolHint::Http2 && self.tls().is_some()
    }

    fn tls(&self) -> Option<&EndpointTls> {
        self.info.tls.as_ref().filter(|_| !self.local)
    }

    /// Opens a connection. `session` is the HTTP version that follows, if HTTP follows.
    ///
    /// # Errors
    /// See [`ConnectError`]; nothing of the application's data was sent, so another endpoint may be tried.
    pub(crate) async fn connect(&self, session: Option<SessionProtocol>) -> Result<Io<Stream>, ConnectError> {
        let addr = self.info.addr;
        let timeout = self.shared.config.outbound.connect_timeout;
        let stream = match tokio::time::timeout(timeout, self.connect_unbounded(session)).await {
            Ok(stream) => stream?,
            Err(_) => return Err(ConnectError::Timeout(addr)),
        };
        Ok(Io::new(stream).with_metrics(Arc::clone(&self.transport)))
    }

    async fn connect_unbounded(&self, session: Option<SessionProtocol>) -> Result<Stream, ConnectError> {
        let addr = self.info.addr;
        let failed = |source| ConnectError::Io { addr, source };
        let Some(tls) = self.tls() else {
            if refuses_plaintext(&self.shared.config, &self.info) {
                return Err(ConnectError::PlaintextRefused(addr));
            }
            return Ok(Stream::Plain(self.connect_tcp(addr).await?));
        };
        let header_port = self.info.transport_port;
        let target = header_port.map_or(addr, |port| SocketAddr::new(addr.ip(), port.get()));
        let config = self.tls_config(tls)?;
        let tcp = self.connect_tcp(target).await?;
        let connector = TlsConnector::from(config);
        let mut stream = connector.connect(tls.server_name.clone(), Batched::new(tcp)).await.map_err(failed)?;
        let negotiated = stream.get_ref().1.alpn_protocol() == Some(ALPN);
        if let Some(header) = self.transport_header(session).filter(|_| negotiated) {
            stream.write_all(&header.encode()).await.map_err(failed)?;
            stream.flush().await.map_err(failed)?;
        }
        Ok(Stream::Client(Box::new(stream)))
    }

    /// Whether connections begin with a transport header: the endpoint's proxy has a port for them, or is a gateway.
    fn is_direct(&self) -> bool {
        self.info.transport_port.is_some() || self.info.authority_override.is_some()
    }

    /// The header of a connection; a gateway needs the Service's name, and the port that it has there.
    fn transport_header(&self, session: Option<SessionProtocol>) -> Option<TransportHeader> {
        if !self.is_direct() {
            return None;
        }
        let protocol = session.filter(|_| self.info.hint != ProtocolHint::Opaque);
        let gateway = self.info.authority_override.as_ref();
        match gateway.and_then(|authority| Some((authority.host(), authority.port_u16()?))) {
            Some((host, port)) => {
                let host = host.strip_suffix('.').unwrap_or(host);
                Some(TransportHeader { port: NonZeroU16::new(port)?, name: Some(host.to_owned()), protocol })
            }
            None => Some(TransportHeader { port: NonZeroU16::new(self.info.addr.port())?, name: None, protocol }),
        }
    }

    async fn connect_tcp(&self, addr: SocketAddr) -> Result<TcpStream, ConnectError> {
        let config = &self.shared.config.outbound;
        let ip = addr.ip().to_canonical();
        // The kernel treats 0.0.0.0 and :: as loopback.
        if (ip.is_loopback() || ip.is_unspecified()) && !config.allow_loopback {
            return Err(ConnectError::Loopback(addr));
        }
        let failed = |source| ConnectError::Io { addr, source };
        let stream = TcpStream::connect(addr).await.map_err(failed)?;
        set_options(&stream, config.connect).map_err(failed)?;
        Ok(stream)
    }

    /// The client configuration with the current credentials, unless they have expired.
    fn tls_config(&self, tls: &EndpointTls) -> Result<Arc<ClientConfig>, ConnectError> {
        let credentials = self.shared.credentials.borrow().clone();
        let addr = self.info.addr;
        let credentials = credentials.ok_or(ConnectError::NoCredentials(addr))?;
        CertificateExpired::check(&credentials).map_err(|source| ConnectError::CertificateExpired { addr, source })?;
        let mut cached = self.tls.lock();
        if let Some(known) = cached.as_ref()
            && Arc::ptr_eq(&known.credentials, &credentials)
        {
            return Ok(Arc::clone(&known.config));
        }
        let alpn: &[&[u8]] = if self.is_direct() { &[ALPN] } else { &[] };
        let config = credentials.client_config(&tls.server_id, alpn);
        *cached = Some(TlsConfig { credentials, config: Arc::clone(&config) });
        Ok(config)
    }

    /// Closes HTTP/1 connections that were idle for too long, and HTTP/2 connections that are not needed any more.
    pub(crate) fn purge_idle(&self) {
        self.h1.purge(self.shared.config.outbound.http1_idle_timeout);
        self.h2.purge();
    }
}

/// Whether nothing may be sent to an endpoint, because it has no identity and mutual TLS is required. This very pod is
/// reached over `lo`.
pub(super) fn refuses_plaintext(config: &Config, info: &EndpointInfo) -> bool {
    let is_required = info.requires_tls || config.outbound.require_mtls;
    is_required && info.tls.is_none() && !config.is_local(info.addr.ip())
}

fn no_tls_reason(config: &Config, info: &EndpointInfo, local: bool) -> &'static str {
    match local {
        true => "loopback",
        // Nothing is known about the address, and the request did not name its Service.
        false if config.outbound.ingress_mode && !info.is_discovered => "ingress_without_override",
        false => "not_provided_by_service_discovery",
    }
}

fn labels(config: &Config, info: &EndpointInfo, target: Labels, service: Option<&str>, local: bool) -> Labels {
    // As in Linkerd, without HTTP's own port.
    let authority = service.map(|service| service.strip_suffix(":80").unwrap_or(service));
    let mut labels: Labels = authority.map(|authority| label("authority", authority.to_owned())).into_iter().collect();
    labels.extend(target);
    match &info.tls {
        Some(tls) if !local => {
            labels.push(label("tls", "true"));
            labels.push(label("server_id", tls.server_id.to_string()));
        }
        _ => {
            labels.push(label("tls", "no_identity"));
            labels.push(label("no_tls_reason", no_tls_reason(config, info, local)));
        }
    }
    labels.extend(info.labels.iter().cloned());
    labels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::SocketConfig,
        inbound::testing::{self, Mesh},
        testing::{SOCKET_OPTIONS, socket_options},
    };

    #[tokio::test]
    async fn connections_to_endpoints_have_their_options() {
        for connect in [SocketConfig::default(), SOCKET_OPTIONS] {
            let mut config = testing::config();
            config.outbound.allow_loopback = true;
            config.outbound.connect = connect;
            let (shared, _drain) = testing::shared(config, &Mesh::new());
            let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let info = EndpointInfo::unmeshed(server.local_addr().unwrap());
            let stream = Endpoint::new(shared, Arc::new(info), None).connect_unbounded(None).await.unwrap();
            let Stream::Plain(stream) = stream else { panic!("TLS with an endpoint without an identity") };
            assert!(stream.nodelay().unwrap());
            assert_eq!(socket_options(&stream), connect);
        }
    }

    #[test]
    fn faults_of_this_side_are_told_from_the_endpoints() {
        let addr = "10.0.0.1:80".parse().unwrap();
        for (errno, is_local) in [
            (libc::EMFILE, true),
            (libc::ENFILE, true),
            (libc::EADDRNOTAVAIL, true),
            (libc::ENOBUFS, true),
            (libc::ECONNREFUSED, false),
            (libc::EHOSTUNREACH, false),
            (libc::ECONNRESET, false),
        ] {
            let error = ConnectError::Io { addr, source: io::Error::from_raw_os_error(errno) };
            assert_eq!(error.is_local(), is_local, "{error}");
        }
        assert!(!ConnectError::Timeout(addr).is_local());
        assert!(ConnectError::NoCredentials(addr).is_local());
    }
}
