//! gRPC connections to the control plane: one HTTP/2 connection per service, opened on demand and reopened when it is
//! lost.
//!
//! Plaintext inside the pod (loopback), otherwise mTLS with the service's identity and the current credentials. Owns
//! connecting and pacing. Refuses to know the requests: a stream and its recovery belong to the code that opens it.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rand::{RngExt as _, seq::SliceRandom as _};
use rustls::pki_types::ServerName;
use tokio::{
    net::TcpStream,
    sync::{Mutex, watch},
    time::Instant,
};
use tokio_rustls::TlsConnector;
use tonic::{Status, Streaming};
use weft_tls::{
    anchors::TrustAnchors,
    credentials::{Credentials, bootstrap_client_config},
    identity::Identity,
};

use crate::{
    config::{ControlAddr, SocketConfig, StreamLimits},
    dns::{Dns, ResolveError},
    io::{Io, Stream},
    listen::set_options,
};

/// Deadline for connecting to one address, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of pings on idle connections, and deadline for their answers, so that a vanished controller is noticed;
/// Linkerd's chart has the same.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(3));
/// First and longest pause between attempts: Linkerd's for control-plane clients.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

type Credentialed = watch::Receiver<Option<Arc<Credentials>>>;

/// Why a request cannot be sent to a controller.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Its name has no address.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// Connecting to all of its addresses failed.
    #[error("connect to {service}")]
    Connect {
        /// The service's address as configured.
        service: String,
        /// The failure of the last address.
        #[source]
        source: io::Error,
    },
    /// The request could not be sent.
    #[error("send a request to {service}")]
    Send {
        /// The service's address as configured.
        service: String,
        /// The error of hyper.
        #[source]
        source: hyper::Error,
    },
    /// The proxy is shutting down.
    #[error("the proxy has no credentials and will get none")]
    Credentials,
}

/// How a client authenticates itself.
#[derive(Clone)]
pub(crate) enum Trust {
    /// Waits for the proxy's own certificate.
    Credentials(Credentialed),
    /// Uses no certificate until there is one: for the service that issues it.
    Bootstrap(TrustAnchors, Credentialed),
}

/// A client for tonic. Clones share the connection.
#[derive(Clone)]
pub(crate) struct ControlClient {
    inner: Arc<Inner>,
}

struct Inner {
    addr: ControlAddr,
    authority: Authority,
    trust: Trust,
    dns: Dns,
    limits: StreamLimits,
    connection: Mutex<Option<http2::SendRequest<tonic::body::Body>>>,
}

impl ControlClient {
    /// Creates a client; it connects at the first request.
    pub(crate) fn new(addr: ControlAddr, trust: Trust, dns: Dns, limits: StreamLimits) -> Self {
        let host = addr.host.trim_end_matches('.');
        let authority =
            if host.contains(':') { format!("[{host}]:{}", addr.port) } else { format!("{host}:{}", addr.port) };
        let authority = authority.parse().unwrap_or_else(|_| Authority::from_static("control.invalid"));
        Self { inner: Arc::new(Inner { addr, authority, trust, dns, limits, connection: Mutex::new(None) }) }
    }

    /// Opens a stream within the limits of the settings.
    ///
    /// # Errors
    /// The controller's status, or a deadline that passed before the stream's head arrived.
    pub(crate) async fn open<T>(
        &self,
        asked: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
    ) -> Result<Messages<T>, Status> {
        let StreamLimits { initial, idle, lifetime } = self.inner.limits;
        let opened = Instant::now();
        let initial = initial.map(|initial| opened + initial);
        // So that streams that many proxies opened together do not end together.
        let end = lifetime.map(|lifetime| opened + lifetime.mul_f64(rand::rng().random_range(0.8..=1.0)));
        let stream = within(initial, asked).await?.into_inner();
        Ok(Messages { stream, silence: initial, idle, end })
    }
}

impl Inner {
    async fn send(
        &self,
        mut request: http::Request<tonic::body::Body>,
    ) -> Result<http::Response<Incoming>, ControlError> {
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(self.authority.clone());
        parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        let mut sender = self.connection().await?;
        sender.send_request(request).await.map_err(|source| ControlError::Send { service: self.service(), source })
    }

    /// The shared connection, reopened if it is gone. Concurrent callers wait for the same attempt.
    async fn connection(&self) -> Result<http2::SendRequest<tonic::body::Body>, ControlError> {
        let mut connection = self.connection.lock().await;
        if let Some(sender) = connection.as_mut() {
            if !sender.is_closed() && sender.ready().await.is_ok() {
                return Ok(sender.clone());
            }
            *connection = None;
        }
        let sender = self.connect().await?;
        *connection = Some(sender.clone());
        Ok(sender)
    }

    #[expect(clippy::disallowed_methods, reason = "drives a connection, and ends when the last request on it has")]
    async fn connect(&self) -> Result<http2::SendRequest<tonic::body::Body>, ControlError> {
        let mut addrs = self.dns.resolve(&self.addr.host, self.addr.port).await?;
        addrs.shuffle(&mut rand::rng());
        let tls = self.tls().await?;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for addr in addrs {
            let attempt = async {
                let stream = TcpStream::connect(addr).await?;
                set_options(&stream, SocketConfig::default())?;
                let stream = match &tls {
                    None => Stream::Plain(stream),
                    Some((connector, name)) => Stream::Client(Box::new(connector.connect(name.clone(), stream).await?)),
                };
                let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .keep_alive_interval(KEEPALIVE.0)
                    .keep_alive_timeout(KEEPALIVE.1)
                    .keep_alive_while_idle(true)
                    .handshake(TokioIo::new(Io::new(stream)))
                    .await
                    .map_err(io::Error::other)?;
                tokio::spawn(async move {
                    if let Err(error) = connection.await {
                        tracing::debug!(%error, %addr, "control-plane connection ended");
                    }
                });
                Ok(sender)
            };
            match tokio::time::timeout(CONNECT_TIMEOUT, attempt).await {
                Ok(Ok(sender)) => return Ok(sender),
                Ok(Err(error)) => last = error,
                Err(_) => last = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(ControlError::Connect { service: self.service(), source: last })
    }

    async fn tls(&self) -> Result<Option<(TlsConnector, ServerName<'static>)>, ControlError> {
        if self.addr.is_loopback() {
            return Ok(None);
        }
        let Some(identity) = &self.addr.identity else { return Err(ControlError::Credentials) };
        let config = match &self.trust {
            Trust::Bootstrap(anchors, credentials) => {
                let credentials = credentials.borrow().clone();
                match credentials {
                    Some(credentials) => credentials.client_config(identity, &[]),
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

    fn service(&self) -> String {
        format!("{}:{}", self.addr.host, self.addr.port)
    }
}

/// The TLS server name for a server with this identity; `None` for URIs, which TLS cannot ask for.
pub(crate) fn server_name(identity: &Identity) -> Option<ServerName<'static>> {
    match identity {
        Identity::Dns(name) => ServerName::try_from(name.to_string()).ok(),
        Identity::Uri(_) => None,
    }
}

/// A stream of the control plane that ends when it is silent or open for too long, so that it is opened again.
pub(crate) struct Messages<T> {
    stream: Streaming<T>,
    /// Deadline for the next message.
    silence: Option<Instant>,
    idle: Option<Duration>,
    end: Option<Instant>,
}

impl<T> Messages<T> {
    /// The next message; `None` when the controller ended the stream.
    ///
    /// # Errors
    /// The controller's status, or `DeadlineExceeded` of this side.
    pub(crate) async fn next(&mut self) -> Result<Option<T>, Status> {
        let until = self.silence.into_iter().chain(self.end).min();
        let message = within(until, self.stream.message()).await?;
        self.silence = self.idle.map(|idle| Instant::now() + idle);
        Ok(message)
    }
}

async fn within<T>(until: Option<Instant>, answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    match until {
        None => answer.await,
        Some(until) => tokio::time::timeout_at(until, answer)
            .await
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("the stream was silent, or open, for too long"))),
    }
}

impl tower::Service<http::Request<tonic::body::Body>> for ControlClient {
    type Response = http::Response<Incoming>;
    type Error = ControlError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ControlError>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), ControlError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move { inner.send(request).await })
    }
}

/// Pauses between attempts that grow from 100 ms to 10 s, each with a jitter of half, so that proxies do not return
/// all at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    /// Starts with the shortest pause.
    pub(crate) fn new() -> Self {
        Self { next: BACKOFF.0 }
    }

    /// Starts anew after a success.
    pub(crate) fn reset(&mut self) {
        self.next = BACKOFF.0;
    }

    /// Waits for the next pause.
    pub(crate) async fn pause(&mut self) {
        let pause = self.next.mul_f64(rand::rng().random_range(0.75..1.25));
        self.next = (self.next * 2).min(BACKOFF.1);
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_their_limit_and_begin_anew() {
        let mut backoff = Backoff::new();
        for _ in 0..20 {
            backoff.pause().await;
        }
        assert_eq!(backoff.next, BACKOFF.1);
        backoff.reset();
        assert_eq!(backoff.next, BACKOFF.0);
    }
}
