//! Connecting to one replica: TCP, mutual TLS unless it is on loopback, HTTP/2.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;
use weft_tls::{credentials::bootstrap_client_config, identity::Identity};

use super::{ControlError, Trust};
use crate::{
    config::{ControlAddr, Keepalive, SocketConfig},
    io::{Batched, Io, Stream},
    listen::set_options,
};

/// Deadline for connecting to one address, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of pings on idle connections, and deadline for their answers, so that a vanished controller is noticed;
/// Linkerd's chart has the same.
const KEEPALIVE: Keepalive = Keepalive { interval: Duration::from_secs(10), timeout: Duration::from_secs(3) };

/// Sends requests over one connection.
pub(crate) type Sender = http2::SendRequest<tonic::body::Body>;

/// A TLS client and the name that it asks for.
pub(super) type Tls = (TlsConnector, ServerName<'static>);

/// Connects to the replicas of one service.
pub(super) struct Connector {
    addr: ControlAddr,
    trust: Trust,
    keepalive: Option<Keepalive>,
}

impl Connector {
    pub(super) fn new(addr: ControlAddr, trust: Trust, keepalive: Option<Keepalive>) -> Self {
        // A controller in this pod cannot vanish unnoticed, and gRPC servers in Go end connections on which they are
        // pinged more often than every five minutes. Elsewhere a proxy answers for the controller.
        let keepalive = keepalive.or_else(|| (!addr.is_loopback()).then_some(KEEPALIVE));
        Self { addr, trust, keepalive }
    }

    /// TLS with the current credentials; `None` for loopback. Waits for the first credentials, if they are needed.
    pub(super) async fn tls(&self) -> Result<Option<Tls>, ControlError> {
        if self.addr.is_loopback() {
            return Ok(None);
        }
        let Some(identity) = &self.addr.identity else { return Err(ControlError::Credentials) };
        let config = match &self.trust {
            Trust::Bootstrap(anchors, credentials) => {
                let credentials = credentials.borrow().clone();
                match credentials.filter(|known| !known.has_expired(SystemTime::now())) {
                    Some(credentials) => credentials.client_config(identity, &[]),
                    // A certificate that has expired would be refused, so that the proxy would never get another.
                    None => bootstrap_client_config(anchors, identity, &[]),
                }
            }
            Trust::Credentials(credentials) => {
                let mut credentials = credentials.clone();
                let known = credentials.wait_for(Option::is_some).await.map_err(|_| ControlError::Credentials)?.clone();
                known.ok_or(ControlError::Credentials)?.client_config(identity, &[])
            }
        };
        let name = server_name(identity).ok_or(ControlError::Credentials)?;
        Ok(Some((TlsConnector::from(config), name)))
    }

    /// Connects within 2 s.
    pub(super) async fn connect(&self, tls: Option<&Tls>, addr: SocketAddr) -> io::Result<Sender> {
        let attempt = async {
            let stream = TcpStream::connect(addr).await?;
            set_options(&stream, SocketConfig::default())?;
            let stream = match tls {
                None => Stream::Plain(stream),
                Some((connector, name)) => {
                    Stream::Client(Box::new(connector.connect(name.clone(), Batched::new(stream)).await?))
                }
            };
            handshake(Io::new(stream), self.keepalive).await
        };
        tokio::time::timeout(CONNECT_TIMEOUT, attempt).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Begins HTTP/2 on a connection and drives it until the last sender and the last request are gone; without
/// `keepalive`, nothing pings.
#[expect(clippy::disallowed_methods, reason = "drives a connection, and ends when the last request on it has")]
pub(crate) async fn handshake(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    keepalive: Option<Keepalive>,
) -> io::Result<Sender> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    if let Some(Keepalive { interval, timeout }) = keepalive {
        builder.timer(TokioTimer::new()).keep_alive_interval(interval).keep_alive_timeout(timeout);
        builder.keep_alive_while_idle(true);
    }
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "control-plane connection ended");
        }
    });
    Ok(sender)
}

/// The TLS server name for a server with this identity; `None` for URIs, which TLS cannot ask for.
fn server_name(identity: &Identity) -> Option<ServerName<'static>> {
    match identity {
        Identity::Dns(name) => ServerName::try_from(name.to_string()).ok(),
        Identity::Uri(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
        time::timeout,
    };

    use super::*;
    use crate::http::frames::{frame, next_frame};

    const SETTINGS: u8 = 4;
    const PING: u8 = 6;

    #[tokio::test(start_paused = true)]
    async fn only_what_may_vanish_unnoticed_is_pinged() {
        let connector = |host: &str, keepalive| {
            let addr = ControlAddr { host: host.to_owned(), port: 8090, identity: None };
            Connector::new(addr, Trust::Credentials(tokio::sync::watch::channel(None).1), keepalive)
        };
        for (host, set, is_pinged) in [
            ("10.0.0.1", None, true),
            ("localhost.", None, false),
            ("127.0.0.1", None, false),
            ("::1", None, false),
            // A relay on loopback may vanish.
            ("127.0.0.1", Some(KEEPALIVE), true),
        ] {
            let (client, mut server) = duplex(4096);
            let _sender = handshake(client, connector(host, set).keepalive).await.unwrap();
            server.read_exact(&mut [0; 24]).await.unwrap();
            server.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            let pinged = async { while next_frame(&mut server).await.unwrap().kind != PING {} };
            let pinged = timeout(6 * KEEPALIVE.interval, pinged).await;
            assert_eq!(pinged.is_ok(), is_pinged, "{host}, {set:?}");
        }
    }
}
