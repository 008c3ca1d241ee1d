//! Mesh TLS of accepted connections: the names that this proxy serves, and the handshake with the current credentials;
//! for ports of the application and for the proxy's own.

use std::{io, sync::Arc, time::Duration};

use ::http::Extensions;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use weft_tls::{
    credentials::{Credentials, peer_identity},
    identity::Identity,
};

use super::error::ConnectionError;
use crate::{
    detect,
    identity::CertificateExpired,
    io::{Batched, Io},
    orig_dst::canonical,
    policy::authz::{Client, ClientTls, NoTls},
    transport_header::ALPN,
};

/// Deadline for a client of the proxy's own ports to begin to speak: Linkerd's.
const OWN_PORT_DETECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Deadline for it to finish TLS: the limit for a first request.
const OWN_PORT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to one of the proxy's own ports, decrypted if it uses mesh TLS.
pub(crate) trait OwnPortStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> OwnPortStream for S {}

/// A connection whose TLS is terminated here.
pub(super) type Terminated = Io<TlsStream<Batched<Io<TcpStream>>>>;

/// The server side of mesh TLS, of one worker or of one port.
pub(crate) struct TlsServer {
    credentials: watch::Receiver<Option<Arc<Credentials>>>,
    configs: Mutex<Option<Configs>>,
}

/// Configurations made from one certificate; a renewal replaces them.
#[derive(Clone)]
struct Configs {
    credentials: Arc<Credentials>,
    /// For ports of the application: without ALPN, as Linkerd's.
    plain: Arc<ServerConfig>,
    /// For the proxy's own port: with the transport header's ALPN.
    direct: Arc<ServerConfig>,
}

/// The result of a handshake.
pub(super) struct Handshake {
    /// The decrypted connection.
    pub(super) stream: Terminated,
    /// The client's identity, if it sent a certificate.
    pub(super) identity: Option<Identity>,
    /// Whether a transport header follows.
    pub(super) has_header: bool,
}

impl TlsServer {
    pub(crate) fn new(credentials: watch::Receiver<Option<Arc<Credentials>>>) -> Self {
        Self { credentials, configs: Mutex::new(None) }
    }

    /// Terminates the client's TLS on a port of the application.
    pub(super) async fn accept(&self, stream: Io<TcpStream>, timeout: Duration) -> Result<Handshake, ConnectionError> {
        let Configs { credentials, plain, .. } = self.configs()?;
        handshake(&credentials, plain, stream, timeout).await
    }

    /// Terminates the client's TLS on the proxy's own port.
    pub(super) async fn accept_direct(
        &self,
        stream: Io<TcpStream>,
        timeout: Duration,
    ) -> Result<Handshake, ConnectionError> {
        let Configs { credentials, direct, .. } = self.configs()?;
        handshake(&credentials, direct, stream, timeout).await
    }

    /// Accepts a client of one of the proxy's own ports, which are not redirected: mesh TLS is terminated if the client
    /// asks for `server_name`, and every request of the connection gets the [`Client`] as an extension.
    ///
    /// # Errors
    /// When the client asks for another server, or does not finish TLS.
    pub(crate) async fn accept_own_port(
        &self,
        stream: TcpStream,
        server_name: &str,
    ) -> io::Result<(Box<dyn OwnPortStream>, Extensions)> {
        let addr = canonical(stream.peer_addr()?);
        let (name, stream) = detect::tls(stream, OWN_PORT_DETECT_TIMEOUT).await.map_err(io::Error::other)?;
        let (stream, tls): (Box<dyn OwnPortStream>, _) = match name {
            None => (Box::new(stream), ClientTls::None(NoTls::NotFromRemote)),
            Some(name) if *name == *server_name => {
                let handshake = self.accept(stream, OWN_PORT_TIMEOUT).await.map_err(io::Error::other)?;
                (Box::new(handshake.stream), ClientTls::Established(handshake.identity))
            }
            Some(_) => return Err(io::Error::other("the client asks for another server")),
        };
        let mut extensions = Extensions::new();
        extensions.insert(Client { addr, tls });
        Ok((stream, extensions))
    }

    fn configs(&self) -> Result<Configs, ConnectionError> {
        let current = self.credentials.borrow().clone().ok_or(ConnectionError::NoIdentity)?;
        let mut configs = self.configs.lock();
        match &*configs {
            Some(known) if Arc::ptr_eq(&known.credentials, &current) => Ok(known.clone()),
            _ => {
                let made = Configs {
                    plain: current.server_config(&[]),
                    direct: current.server_config(&[ALPN]),
                    credentials: current,
                };
                *configs = Some(made.clone());
                Ok(made)
            }
        }
    }
}

/// A certificate that has expired is shown all the same: clients judge it by their clocks, and know why they refuse it.
async fn handshake(
    credentials: &Credentials,
    config: Arc<ServerConfig>,
    stream: Io<TcpStream>,
    timeout: Duration,
) -> Result<Handshake, ConnectionError> {
    let accepted = tokio::time::timeout(timeout, TlsAcceptor::from(config).accept(Batched::new(stream))).await;
    let accepted = accepted.map_err(|_| ConnectionError::HandshakeTimedOut)?;
    let stream = accepted.map_err(|reason| match CertificateExpired::check(credentials) {
        Ok(()) => ConnectionError::Handshake(reason),
        Err(expired) => ConnectionError::CertificateExpired { expired, reason },
    })?;
    let (_, session) = stream.get_ref();
    let identity = session.peer_certificates().and_then(peer_identity);
    let has_header = session.alpn_protocol() == Some(ALPN);
    Ok(Handshake { stream: Io::new(stream), identity, has_header })
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::testing::tcp_pair;

    #[tokio::test(start_paused = true)]
    async fn a_client_of_an_own_port_has_a_second_to_begin() {
        let (_silent, stream) = tcp_pair().await;
        let began = Instant::now();
        assert!(TlsServer::new(watch::channel(None).1).accept_own_port(stream, "web.demo").await.is_err());
        let waited = began.elapsed();
        assert!(waited >= Duration::from_secs(1) && waited < Duration::from_secs(2), "{waited:?}");
    }
}
