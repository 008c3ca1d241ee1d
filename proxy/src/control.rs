//! gRPC clients of the control plane: each service's replicas are balanced over, and one that fails rests while the
//! others take its place.
//!
//! ```text
//! request ─> Replicas (DNS, its TTL) ─> two at random, the less loaded ─> Connector (TCP, mTLS, HTTP/2) ─> replica
//!                                                        └─ failed: rests 100 ms to 3 s, and the next one is tried;
//!                                                           all failed: DNS is asked every second for others
//!                                                        └─ no head for 1 s, and given up: avoided for 30 s
//! ```
//!
//! Plaintext inside the pod (loopback), otherwise mTLS with the service's identity and the current credentials. Owns
//! connecting, balancing and pacing. Refuses to know the requests: a stream and its recovery belong to the code that
//! opens it.

mod connect;
mod exchange;
pub(crate) mod metrics;
mod replicas;

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use rand::RngExt as _;
use tokio::{sync::watch, time::Instant};
use tonic::{Status, Streaming};
use weft_tls::{anchors::TrustAnchors, credentials::Credentials};

use crate::{
    config::{ControlAddr, StreamLimits},
    dns::{Dns, ResolveError},
    pauses::Pauses,
};

use connect::Connector;
pub(crate) use connect::{Sender, handshake};
use exchange::Exchange;
pub(crate) use exchange::ResponseBody;
use metrics::ServiceMetrics;
use replicas::Replicas;

/// How long a request that is given up has waited for its head, at least, for its replica to count as one that does not
/// answer; a third of a stream's first deadline, if that is shorter.
const PATIENCE: Duration = Duration::from_secs(1);

type Credentialed = watch::Receiver<Option<Arc<Credentials>>>;

/// Why a request cannot be sent to a controller.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Its name has no address.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// Connecting to each of its replicas failed.
    #[error("connect to {service}")]
    Connect {
        /// The service's address as configured.
        service: String,
        /// The failure of the last replica.
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
    /// Uses no certificate while there is none, or one that has expired: for the service that issues it.
    Bootstrap(TrustAnchors, Credentialed),
}

/// A client for tonic. Clones share the connections.
#[derive(Clone)]
pub(crate) struct ControlClient {
    inner: Arc<Inner>,
}

struct Inner {
    service: String,
    authority: Authority,
    connector: Connector,
    replicas: Arc<Replicas>,
    limits: StreamLimits,
    metrics: Arc<ServiceMetrics>,
}

impl ControlClient {
    /// Creates a client; it resolves and connects at the first request.
    pub(crate) fn measured(
        addr: ControlAddr,
        trust: Trust,
        dns: Dns,
        limits: StreamLimits,
        metrics: ServiceMetrics,
    ) -> Self {
        let host = addr.host.trim_end_matches('.');
        let authority =
            if host.contains(':') { format!("[{host}]:{}", addr.port) } else { format!("{host}:{}", addr.port) };
        let authority = authority.parse().unwrap_or_else(|_| Authority::from_static("control.invalid"));
        let service = format!("{}:{}", addr.host, addr.port);
        let metrics = Arc::new(metrics);
        let replicas = Replicas::new(addr.host.clone(), addr.port, dns, Arc::clone(&metrics));
        let connector = Connector::new(addr, trust, limits.keepalive);
        Self { inner: Arc::new(Inner { service, authority, connector, replicas, limits, metrics }) }
    }

    /// Creates a client whose metrics nobody reads.
    #[cfg(test)]
    pub(crate) fn new(addr: ControlAddr, trust: Trust, dns: Dns, limits: StreamLimits) -> Self {
        let metrics = metrics::ControlMetrics::default().service(metrics::Service::Policy, &addr);
        Self::measured(addr, trust, dns, limits, metrics)
    }

    /// Opens a stream and takes its messages until it ends, within the limits of the settings. After a message,
    /// `pauses` start anew. Returns why it ended: the controller's status, `Unavailable` if the controller ended it, or
    /// `DeadlineExceeded` of this side.
    pub(crate) async fn read<T>(
        &self,
        opening: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
        pauses: &mut Pauses,
        mut on_message: impl FnMut(T),
    ) -> Status {
        let mut messages = match self.open(opening).await {
            Ok(messages) => messages,
            Err(status) => return status,
        };
        loop {
            match messages.next().await {
                Ok(Some(message)) => {
                    pauses.reset();
                    on_message(message);
                }
                Ok(None) => return Status::unavailable("the stream ended"),
                Err(status) => return status,
            }
        }
    }

    async fn open<T>(
        &self,
        opening: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
    ) -> Result<Messages<T>, Status> {
        let StreamLimits { initial, idle, lifetime, .. } = self.inner.limits;
        let opened = Instant::now();
        let initial = initial.map(|initial| opened + initial);
        // So that streams that many proxies opened together do not end together.
        let end = lifetime.map(|lifetime| opened + lifetime.mul_f64(rand::rng().random_range(0.8..=1.0)));
        let stream = within(initial, opening).await?.into_inner();
        Ok(Messages { stream, silence: initial, idle, end })
    }

    /// Waits before a failed request is repeated: for the next pause, or until the service has other replicas, which
    /// may answer.
    pub(crate) async fn pause(&self, pauses: &mut Pauses) {
        let replicas = &self.inner.replicas;
        let set = replicas.known();
        tokio::select! {
            () = pauses.wait() => {}
            _ = replicas.replaced(&set) => {
                pauses.reset();
                pauses.wait().await;
            }
        }
    }
}

impl Inner {
    async fn send(
        &self,
        mut request: http::Request<tonic::body::Body>,
    ) -> Result<http::Response<ResponseBody>, ControlError> {
        let since = Instant::now();
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(self.authority.clone());
        parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        self.metrics.requests.inc();
        let tls = self.connector.tls().await?;
        let mut set = self.replicas.current().await?;
        let mut tried = Vec::with_capacity(set.len());
        let mut failure = None;
        let patience = self.limits.initial.map_or(PATIENCE, |initial| PATIENCE.min(initial / 3));
        while let Some(mut picked) = replicas::pick(&set, &tried) {
            tried.push(picked.replica.addr);
            let connected = tokio::select! {
                connected = picked.replica.connection(&set, &self.connector, tls.as_ref()) => connected,
                // A replica that is gone keeps who waits for it until a deadline.
                others = self.replicas.replaced(&set) => {
                    set = others;
                    tried.clear();
                    continue;
                }
            };
            let mut sender = match connected {
                Ok(sender) => sender,
                Err(source) => {
                    tracing::debug!(error = %source, service = self.service, dst.addr = %picked.replica.addr, "cannot connect to a replica of the control plane");
                    self.replicas.changed(&set);
                    failure = Some(ControlError::Connect { service: self.service.clone(), source });
                    continue;
                }
            };
            picked.asked(patience);
            let sent = sender.try_send_request(request).await;
            picked.answered();
            match sent {
                Ok(response) => {
                    let exchange = Exchange::begun(picked, &response, Arc::clone(&self.metrics), since);
                    self.replicas.changed(&set);
                    return Ok(response.map(|body| ResponseBody::new(body, exchange)));
                }
                Err(mut error) => {
                    picked.replica.failed();
                    self.replicas.changed(&set);
                    let unsent = error.take_message();
                    let source = error.into_error();
                    let error = ControlError::Send { service: self.service.clone(), source };
                    // Only a request that was not sent may be sent to another one.
                    let Some(unsent) = unsent else { return Err(error) };
                    failure = Some(error);
                    request = unsent;
                }
            }
        }
        // Each of them failed; there may be others by now.
        self.replicas.expire();
        Err(failure.unwrap_or_else(|| ResolveError::Empty(self.service.clone()).into()))
    }
}

/// A stream of the control plane that ends when it is silent or open for too long, so that it is opened again.
struct Messages<T> {
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
    async fn next(&mut self) -> Result<Option<T>, Status> {
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
    type Response = http::Response<ResponseBody>;
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

#[cfg(test)]
mod tests;
