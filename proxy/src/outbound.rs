//! The outbound side: connections from the application to other workloads.
//!
//! ```text
//! accept -> original destination -> discover (profile, policy) -> protocol -> http: route -> backend -> endpoint
//!                                                                        \-> tcp:  route -> backend -> endpoint
//! ```
//!
//! [`serve_accepted`] follows these steps. Everything here belongs to one worker; workers share only discovery.

mod backends;
mod balance;
mod endpoint;
mod h1;
pub(crate) mod h2;
mod http;
mod ingress;
mod named;
mod rules;
mod target;
mod tcp;
mod worker;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use futures::future::{BoxFuture, join_all};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::Instant,
};

use crate::{
    detect::{self, DetectError, Detected, Reads},
    discover::{Discover, route::Protocol},
    http::{
        serve::{Closing, HttpVersion},
        upgrade::{self, Tunnel},
    },
    io::{Abort, Io, Stream},
    listen::{Accepted, Listener},
    metrics::{Direction, Labels, label},
    orig_dst::{self, OrigDstError},
    route::Meta,
    shared::Shared,
};

use target::{OutboundTarget, RoutingPlan, TargetError, no_target};
use worker::Worker;

pub(crate) use named::{RelayError, RelayFailed};

/// Interval of looking for unused destinations and idle connections.
const SWEEP: Duration = Duration::from_secs(1);

/// Why a connection ended before it was forwarded.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    /// Discovery has no usable answer.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The client ended before its protocol was known.
    #[error(transparent)]
    Detect(#[from] DetectError),
    /// The connection could not be forwarded.
    #[error(transparent)]
    Tcp(#[from] tcp::ForwardError),
}

impl ConnectionError {
    /// The value of the label `error` of `outbound_tcp_errors_total`. Linkerd's values
    /// (`linkerd/app/outbound/src/metrics/error.rs`), and more for what is `unexpected` there.
    fn label(&self) -> &'static str {
        match self {
            Self::Target(error) => error.label(),
            Self::Detect(DetectError::TimedOut) => "tls detection timeout",
            Self::Detect(_) => "i/o",
            Self::Tcp(error) => error.label(),
        }
    }

    /// Whether nothing has failed: the client left, or policy wants the connection closed.
    fn is_expected(&self) -> bool {
        use tcp::ForwardError::{NoRoute, Refused};
        matches!(self, Self::Detect(DetectError::Closed) | Self::Tcp(NoRoute | Refused(_)))
    }
}

/// Serves a connection of which everything is known, as on the inbound side. Returns the tunnel that it becomes.
type Serving = BoxFuture<'static, Result<Option<Tunnel>, ConnectionError>>;

/// The known facts about a connection before its first byte.
struct Connection {
    worker: Arc<Worker>,
    target: Arc<OutboundTarget>,
    /// The application's address.
    peer: SocketAddr,
    /// Whether requests may name another destination (ingress mode).
    requests_choose: bool,
    closing: Closing,
    /// What the connection becomes after an upgrade.
    tunnel: Mutex<Option<Tunnel>>,
}

/// One worker's outbound side. Clones share it.
#[derive(Clone)]
pub(crate) struct Outbound(Arc<Worker>);

impl Outbound {
    /// Creates a side without connections.
    pub(crate) fn new(shared: Arc<Shared>, discover: Discover) -> Self {
        Self(Worker::new(shared, discover))
    }

    /// Accepts until the drain begins. Connections continue in tasks that the drain waits for.
    pub(crate) async fn run(&self, listeners: Vec<Listener>) {
        let Self(worker) = self;
        tokio::select! {
            _ = join_all(listeners.iter().map(|listener| accept_all(worker, listener))) => {}
            () = sweep(worker) => {}
            () = worker.shared.drain.signaled() => {}
        }
    }
}

async fn accept_all(worker: &Arc<Worker>, listener: &Listener) {
    loop {
        let accepted = listener.accept().await;
        let worker = Arc::clone(worker);
        let drain = worker.shared.drain.clone();
        drain.spawn(async move { serve_accepted(&worker, accepted).await });
    }
}

async fn sweep(worker: &Worker) {
    let mut every = tokio::time::interval(SWEEP);
    loop {
        every.tick().await;
        worker.sweep(Instant::now());
    }
}

async fn serve_accepted(worker: &Arc<Worker>, accepted: Accepted) {
    let Accepted { stream, peer, permit: _permit } = accepted;
    let target = match worker.original_dst(&stream, peer) {
        Ok(orig_dst) => worker.target(orig_dst),
        Err(error) => {
            worker.count_error("original destination", no_target());
            tracing::warn!(%error, src.addr = %peer, "outbound connection is dropped");
            return;
        }
    };
    let requests_choose = worker.shared.config.outbound.ingress_mode;
    let connection = Connection {
        worker: Arc::clone(worker),
        target: Arc::clone(&target),
        peer: orig_dst::canonical(peer),
        requests_choose,
        closing: Closing::default(),
        tunnel: Mutex::default(),
    };
    let served = async { Box::pin(connection.negotiate(stream)).await?.await };
    match served.await {
        Ok(tunnel) => {
            // A tunnel needs no discovery, whose streams end when nothing uses the destination.
            drop(target);
            upgrade::run(tunnel).await;
        }
        Err(error) => {
            worker.count_error(error.label(), target.labels());
            worker.failures.connection(&error, error.is_expected(), peer, &target.destination);
        }
    }
}

impl Connection {
    /// Finds out how to serve the connection.
    async fn negotiate(self, stream: TcpStream) -> Result<Serving, ConnectionError> {
        if self.requests_choose {
            return self.ingress(stream).await;
        }
        let plan = self.target.ready().await?;
        let shared = &self.worker.shared;
        plan.count(shared);
        Ok(match &plan.policy.protocol {
            Protocol::Http1(_) => self.http(stream, HttpVersion::Http1),
            Protocol::Http2(_) => self.http(stream, HttpVersion::Http2),
            Protocol::Opaque(_) => {
                let stream = self.accepted(Stream::Plain(stream));
                self.opaque(stream, plan, None)
            }
            Protocol::Tls(_) => {
                let (name, stream) = detect::tls(stream, shared.config.outbound.detect_timeout).await?;
                let stream = self.accepted(stream);
                self.opaque(stream, plan, name)
            }
            Protocol::Detect { timeout, .. } => {
                let timeout = *timeout;
                self.detect(stream, timeout, Some(plan)).await?
            }
        })
    }

    async fn detect(
        self,
        stream: TcpStream,
        timeout: Duration,
        known: Option<Arc<RoutingPlan>>,
    ) -> Result<Serving, ConnectionError> {
        let (began, accepted) = (Instant::now(), self.accepted(Stream::Plain(stream)));
        let detected = detect::http(accepted, timeout, Reads::One).await;
        let result = detected.as_ref().map_or("error", |(detected, _)| detected.label());
        match &known {
            Some(plan) => plan.detect(&self.worker.shared).detected(result, began.elapsed()),
            None => {
                let labels = Meta::default().labels_with_port("parent");
                self.worker.shared.metrics.detect(Direction::Outbound, labels).detected(result, began.elapsed());
            }
        }
        let (detected, stream) = detected?;
        let version = match detected {
            Detected::Http1 => Some(HttpVersion::Http1),
            Detected::Http2 => Some(HttpVersion::Http2),
            Detected::NotHttp => None,
            Detected::TimedOut => {
                let orig_dst = &self.target.destination;
                tracing::info!(orig_dst.addr = %orig_dst, "protocol detection timed out, continuing as opaque: mark the port as opaque to avoid the delay");
                None
            }
        };
        match (version, known) {
            (Some(version), _) => Ok(self.http_stream(stream, version)),
            (None, Some(plan)) => Ok(self.opaque(stream, plan, None)),
            (None, None) => {
                let plan = self.target.ready().await?;
                Ok(self.opaque(stream, plan, None))
            }
        }
    }

    fn http(self, stream: TcpStream, version: HttpVersion) -> Serving {
        let stream = self.accepted(Stream::Plain(stream));
        self.http_stream(stream, version)
    }

    fn http_stream(self, stream: Io<Stream>, version: HttpVersion) -> Serving {
        let connection = Arc::new(self);
        Box::pin(async move { Ok(http::serve(stream, version, connection).await) })
    }

    fn opaque<S>(self, stream: Io<S>, plan: Arc<RoutingPlan>, server_name: Option<String>) -> Serving
    where
        S: AsyncRead + AsyncWrite + Abort + Unpin + Send + 'static,
    {
        Box::pin(async move {
            tcp::forward(&self, stream, &plan, server_name.as_deref()).await?;
            Ok(None)
        })
    }

    /// Counts the accepted connection with its destination's labels.
    fn accepted<S>(&self, stream: S) -> Io<S> {
        Io::new(stream).with_metrics(self.target.source_metrics())
    }
}

impl Worker {
    /// Counts a connection that was not served to its end.
    fn count_error(&self, error: &'static str, mut labels: Labels) {
        labels.push(label("error", error));
        let metrics = &self.shared.metrics;
        metrics.count(&metrics.outbound_tcp_errors, &labels);
    }

    /// The connection's original destination.
    fn original_dst(&self, stream: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OrigDstError> {
        #[cfg(test)]
        if let Some(addr) = *self.pretended_dst.lock() {
            return Ok(addr);
        }
        orig_dst::original_dst(stream, peer)
    }
}

#[cfg(test)]
mod tests;
