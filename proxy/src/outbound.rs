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

use futures::future::join_all;
use tokio::time::Instant;

use crate::{
    detect::{self, DetectError, Detected},
    discover::{
        Discover,
        route::{OpaqueRoutes, Protocol},
    },
    http::serve::{Closing, HttpVersion},
    io::{Io, Stream},
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

/// The known facts about a connection before its first byte.
struct Connection {
    worker: Arc<Worker>,
    target: Arc<OutboundTarget>,
    /// The application's address.
    peer: SocketAddr,
    /// Whether requests may name another destination (ingress mode).
    requests_choose: bool,
    closing: Closing,
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
    let (client, closing) = (orig_dst::canonical(peer), Closing::default());
    let connection =
        Connection { worker: Arc::clone(worker), target: Arc::clone(&target), peer: client, requests_choose, closing };
    if let Err(error) = serve_connection(connection, stream).await {
        worker.count_error(error.label(), target.labels());
        worker.failures.connection(&error, error.is_expected(), peer, &target.destination);
    }
}

async fn serve_connection(connection: Connection, stream: tokio::net::TcpStream) -> Result<(), ConnectionError> {
    let worker = Arc::clone(&connection.worker);
    if connection.requests_choose {
        return connection.ingress(stream).await;
    }
    let plan = connection.target.ready().await?;
    plan.count(&worker.shared);
    match &plan.policy.protocol {
        Protocol::Http1(_) => connection.http(stream, HttpVersion::Http1).await,
        Protocol::Http2(_) => connection.http(stream, HttpVersion::Http2).await,
        Protocol::Opaque(routes) => {
            let stream = connection.accepted(Stream::Plain(stream));
            connection.opaque(stream, &plan, routes, None).await?;
        }
        Protocol::Tls(routes) => {
            let (name, stream) = detect::tls(stream, connection.worker.shared.config.outbound.detect_timeout).await?;
            connection.opaque(connection.accepted(stream), &plan, routes, name).await?;
        }
        Protocol::Detect { timeout, opaque, .. } => {
            connection.detect(stream, *timeout, Some((&plan, opaque))).await?;
        }
    }
    Ok(())
}

impl Connection {
    async fn detect(
        self,
        stream: tokio::net::TcpStream,
        timeout: Duration,
        known: Option<(&RoutingPlan, &OpaqueRoutes)>,
    ) -> Result<(), ConnectionError> {
        let (began, accepted) = (Instant::now(), self.accepted(Stream::Plain(stream)));
        let detected = detect::http(accepted, timeout).await;
        let result = detected.as_ref().map_or("error", |(detected, _)| detected.label());
        match known {
            Some((plan, _)) => plan.detect(&self.worker.shared).detected(result, began.elapsed()),
            None => {
                let labels = Meta::default().labels_with_port("parent");
                self.worker.shared.metrics.detect(Direction::Outbound, labels).detected(result, began.elapsed());
            }
        }
        let (detected, stream) = detected?;
        match detected {
            Detected::Http1 => self.http_stream(stream, HttpVersion::Http1).await,
            Detected::Http2 => self.http_stream(stream, HttpVersion::Http2).await,
            Detected::NotHttp => self.not_http(stream, known).await?,
            Detected::TimedOut => {
                let orig_dst = &self.target.destination;
                tracing::info!(orig_dst.addr = %orig_dst, "protocol detection timed out, continuing as opaque: mark the port as opaque to avoid the delay");
                self.not_http(stream, known).await?;
            }
        }
        Ok(())
    }

    async fn http(self, stream: tokio::net::TcpStream, version: HttpVersion) {
        let stream = self.accepted(Stream::Plain(stream));
        self.http_stream(stream, version).await;
    }

    async fn http_stream(self, stream: Io<Stream>, version: HttpVersion) {
        http::serve(stream, version, Arc::new(self)).await;
    }

    async fn opaque<S>(
        &self,
        stream: Io<S>,
        plan: &RoutingPlan,
        routes: &OpaqueRoutes,
        server_name: Option<String>,
    ) -> Result<(), ConnectionError>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        tcp::forward(self, stream, plan, routes, server_name.as_deref()).await?;
        Ok(())
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
        metrics.count("outbound_tcp_errors", &metrics.outbound_tcp_errors, &labels);
    }

    /// The connection's original destination.
    fn original_dst(&self, stream: &tokio::net::TcpStream, peer: SocketAddr) -> Result<SocketAddr, OrigDstError> {
        #[cfg(test)]
        if let Some(addr) = *self.pretended_dst.lock() {
            return Ok(addr);
        }
        orig_dst::original_dst(stream, peer)
    }
}

#[cfg(test)]
mod tests;
