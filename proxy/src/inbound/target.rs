//! The application's ports as a worker uses them: connecting, and the HTTP connections that are kept.
//!
//! All clients of a worker share the connections of HTTP/1, which carry one request at a time. Connections are limited,
//! because each has a file of the process. The original address is dialled, never loopback instead, so that the
//! application sees which of the pod's addresses the client used.

mod http2;

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use ::http::{Request, Response};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;

use crate::{
    http::{
        body::Body,
        informational::Informational,
        pool::{Pool, Repetition},
        respond::Failure,
        serve::{MAX_BUFFER_BYTES, MAX_HEAD_BYTES},
    },
    in_flight::{ClientShare, SharedLimit},
    io::{Io, ReadOn},
    listen::set_options,
    metrics::{Direction, InboundRouteMetrics, InboundTargets, Labels, Peer, TransportMetrics, label},
    route::Meta,
    shared::Shared,
};

pub(super) use http2::ClientHttp2;

/// Shortest interval between sweeps of idle connections.
pub(super) const SHORTEST_SWEEP: Duration = Duration::from_secs(1);

/// How often a request is retried on kept connections that turn out to be closed, before a new connection is made.
const STALE_ATTEMPTS: usize = 3;

/// Routes of one port whose metrics are kept.
const ROUTES: usize = 64;

type Http1Sender = http1::SendRequest<Body>;

/// Why the application cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// It does not answer in time.
    #[error("connect to {0} timed out")]
    Timeout(SocketAddr),
    /// Too many connections are open, or many while the client has more requests in flight than its share.
    #[error("too many connections to the application are open for another one to {0}")]
    TooMany(SocketAddr),
    /// It does not listen, or its connection failed.
    #[error("connect to {addr}")]
    Io {
        /// The application's port.
        addr: SocketAddr,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
}

/// Why a request was not answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// There is no connection. Requests that waited for the same attempt share its failure.
    #[error(transparent)]
    Connect(#[from] Arc<ConnectError>),
    /// The connection failed after the request may have been sent.
    #[error("request to the application failed")]
    Http(#[source] hyper::Error),
    /// The HTTP/2 connection or stream failed after the request may have been sent.
    #[error("HTTP/2 request to the application failed")]
    Http2(#[source] ::h2::Error),
    /// The application keeps closing connections or refusing streams before it processes the request.
    #[error("the application takes no HTTP/2 request")]
    Refused,
    /// The application answered with 101 to a request that asks for no other protocol.
    #[error("the application switches protocols unasked")]
    SwitchesProtocols,
}

/// One worker's targets by address.
pub(super) struct ApplicationPorts {
    shared: Arc<Shared>,
    labels: Arc<InboundTargets>,
    /// Of connections to all ports.
    limit: SharedLimit,
    /// How many a port keeps that no request uses.
    kept: usize,
    by_addr: Mutex<HashMap<SocketAddr, Arc<ApplicationPort>>>,
}

/// One port of the application.
pub(super) struct ApplicationPort {
    /// The original address.
    pub(super) addr: SocketAddr,
    shared: Arc<Shared>,
    labels: Arc<InboundTargets>,
    routes: Mutex<Vec<CountedRoute>>,
    transport: Arc<TransportMetrics>,
    /// Of connections to all ports.
    limit: SharedLimit,
    kept: usize,
    /// Kept HTTP/1 connections.
    idle: Pool,
    /// The HTTP/2 connections of each client's connection.
    http2: Mutex<Vec<Weak<ClientHttp2>>>,
}

/// A server's route, and its metrics.
struct CountedRoute {
    server: Arc<Meta>,
    route: Arc<Meta>,
    is_grpc: bool,
    metrics: Arc<InboundRouteMetrics>,
}

/// An HTTP/1 connection that returns to its target if its response ended well.
pub(super) struct CheckedOut {
    target: Arc<ApplicationPort>,
    sender: Http1Sender,
}

impl ApplicationPort {
    /// The metrics of requests on a server's route, for as long as the port is used.
    pub(super) fn route(&self, server: &Arc<Meta>, route: &Arc<Meta>, is_grpc: bool) -> Arc<InboundRouteMetrics> {
        let mut routes = self.routes.lock();
        let is_it =
            |known: &CountedRoute| known.is_grpc == is_grpc && *known.server == **server && *known.route == **route;
        if let Some(known) = routes.iter().find(|known| is_it(known)) {
            return Arc::clone(&known.metrics);
        }
        let mut labels = Labels::new();
        server.append_labels("parent", &mut labels);
        labels.push(label("parent_port", self.labels.port(self.addr)));
        route.append_labels("route", &mut labels);
        let metrics = Arc::new(self.shared.metrics.inbound_route(is_grpc, &labels));
        if routes.len() >= ROUTES {
            routes.clear();
        }
        let (server, route) = (Arc::clone(server), Arc::clone(route));
        routes.push(CountedRoute { server, route, is_grpc, metrics: Arc::clone(&metrics) });
        metrics
    }
}

impl ApplicationPorts {
    /// At most `limit` connections are open. Those that no request uses leave room for others.
    pub(super) fn new(shared: Arc<Shared>, labels: Arc<InboundTargets>, limit: usize) -> Self {
        let kept = shared.config.inbound.max_idle_connections.min(limit / 4);
        Self { shared, labels, limit: SharedLimit::new(limit), kept, by_addr: Mutex::new(HashMap::new()) }
    }

    /// How many connections are open.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.limit.taken()
    }

    /// The target at an address.
    pub(super) fn get(&self, addr: SocketAddr) -> Arc<ApplicationPort> {
        let mut by_addr = self.by_addr.lock();
        if let Some(known) = by_addr.get(&addr) {
            return Arc::clone(known);
        }
        // Without the port, as Linkerd's: the accepted connections have it.
        let labels = vec![label("tls", "no_identity"), label("no_tls_reason", "loopback")];
        let transport = Arc::new(self.shared.metrics.transport(Direction::Inbound, Peer::Dst, &labels));
        let target = Arc::new(ApplicationPort {
            addr,
            shared: Arc::clone(&self.shared),
            labels: Arc::clone(&self.labels),
            routes: Mutex::default(),
            transport,
            limit: self.limit.clone(),
            kept: self.kept,
            idle: Pool::default(),
            http2: Mutex::default(),
        });
        by_addr.insert(addr, Arc::clone(&target));
        target
    }

    /// Closes connections that were idle for too long, and removes targets without any.
    pub(super) fn sweep(&self) {
        let timeout = self.shared.config.inbound.http1_idle_timeout;
        self.by_addr.lock().retain(|_, target| {
            let is_idle = target.sweep(timeout);
            !is_idle || Arc::strong_count(target) > 1
        });
    }
}

impl ApplicationPort {
    /// Opens a new connection, for one of a client's `requests` or for a client's bytes. It counts until it is closed.
    pub(super) async fn connect(&self, requests: Option<&ClientShare>) -> Result<Io<TcpStream>, ConnectError> {
        let permit = match requests {
            Some(requests) => self.limit.admit_for(requests),
            None => self.limit.admit(),
        };
        let permit = permit.ok_or(ConnectError::TooMany(self.addr))?;
        let stream = self.connect_tcp().await?;
        Ok(Io::new(stream).with_metrics(Arc::clone(&self.transport)).with_permit(permit))
    }

    async fn connect_tcp(&self) -> Result<TcpStream, ConnectError> {
        let config = &self.shared.config.inbound;
        let failed = |source| ConnectError::Io { addr: self.addr, source };
        let stream = tokio::time::timeout(config.connect_timeout, TcpStream::connect(self.addr)).await;
        let stream = stream.map_err(|_| ConnectError::Timeout(self.addr))?.map_err(failed)?;
        set_options(&stream, config.connect).map_err(failed)?;
        Ok(stream)
    }

    /// Sends one of a client's `requests` over a kept HTTP/1 connection or, without one, over a new one. `reuse` says
    /// whether the connection may carry other requests, before and after. `informational` passes on what comes before
    /// the response.
    pub(super) async fn send_http1(
        self: &Arc<Self>,
        mut request: Box<Request<Body>>,
        reuse: bool,
        requests: &ClientShare,
        informational: &Informational,
    ) -> Result<(Response<Incoming>, Option<CheckedOut>), SendError> {
        let mut stale = 0;
        loop {
            let timeout = self.shared.config.inbound.http1_idle_timeout;
            let kept = if reuse && stale < STALE_ATTEMPTS { self.idle.take(timeout) } else { None };
            let is_new = kept.is_none();
            let (mut sender, mut sent, again) = match kept {
                Some(sender) => {
                    let (sent, again) = Repetition::of(request);
                    (sender, sent, again)
                }
                // Boxed: a request on a kept connection needs no room for what opens one.
                None => (Box::pin(self.connect_http1(requests)).await.map_err(Arc::new)?, *request, None),
            };
            informational.follow(&mut sent);
            match sender.try_send_request(sent).await {
                Ok(response) => {
                    let checked_out = reuse.then(|| CheckedOut { target: Arc::clone(self), sender });
                    return Ok((response, checked_out));
                }
                Err(mut error) => match error.take_message() {
                    // The application had closed the connection, and nothing of the request was sent.
                    Some(unsent) if !is_new => request = Box::new(unsent),
                    // It closed the connection when the request came, and the request may be repeated.
                    _ => match again.and_then(|again| again.after(error.error())) {
                        Some(again) => request = again,
                        None => return Err(SendError::Http(error.into_error())),
                    },
                },
            }
            stale += 1;
        }
    }

    /// HTTP/2 connections for the requests of one client's connection; none is open yet.
    pub(super) fn http2(self: &Arc<Self>, requests: &ClientShare) -> Arc<ClientHttp2> {
        let client = Arc::new(ClientHttp2::new(Arc::clone(self), requests.clone()));
        self.http2.lock().push(Arc::downgrade(&client));
        client
    }

    #[expect(clippy::disallowed_methods, reason = "drives a connection, and ends when the last request on it has")]
    async fn connect_http1(&self, requests: &ClientShare) -> Result<Http1Sender, ConnectError> {
        let stream = self.connect(Some(requests)).await?;
        let addr = self.addr;
        let handshake = http1::Builder::new()
            .max_header_size(MAX_HEAD_BYTES)
            .max_buf_size(MAX_BUFFER_BYTES)
            .handshake(TokioIo::new(ReadOn::new(stream)))
            .await;
        let (sender, connection) =
            handshake.map_err(|error| ConnectError::Io { addr, source: io::Error::other(error) })?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, dst.addr = %addr, "connection to the application ended");
            }
        });
        Ok(sender)
    }

    /// Drops connections that are closed or were idle for longer than `timeout`. Returns whether none is left.
    fn sweep(&self, timeout: Duration) -> bool {
        self.http2.lock().retain(|client| client.upgrade().inspect(|client| client.purge()).is_some());
        self.idle.purge(timeout)
    }
}

impl CheckedOut {
    /// Returns the connection after the response was read to its end.
    pub(super) fn give_back(self) {
        let Self { target, sender } = self;
        target.idle.put(sender, target.kept);
    }
}

impl ConnectError {
    fn failure(&self) -> Failure {
        match self {
            Self::Timeout(_) => Failure::ConnectTimeout,
            Self::TooMany(_) => Failure::LoadShed,
            Self::Io { addr, source } => Failure::BadGateway(format!("connect to {addr}: {source}")),
        }
    }
}

impl SendError {
    /// The response to the client.
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Connect(error) => error.failure(),
            // hyper calls the request's body the user's.
            Self::Http(error) if error.is_user() => Failure::BadRequest,
            Self::Http(error) => Failure::BadGateway(error.to_string()),
            Self::Http2(error) => Failure::BadGateway(error.to_string()),
            Self::Refused | Self::SwitchesProtocols => Failure::BadGateway(self.to_string()),
        }
    }

    /// The reason with which the application reset the request's HTTP/2 stream, or refused it, if it did.
    pub(super) fn reset(&self) -> Option<::h2::Reason> {
        match self {
            Self::Http2(error) => error.reason().filter(|_| error.is_reset()),
            Self::Refused => Some(::h2::Reason::REFUSED_STREAM),
            Self::Connect(_) | Self::Http(_) | Self::SwitchesProtocols => None,
        }
    }
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
    async fn connections_to_the_application_have_their_options() {
        for connect in [SocketConfig::default(), SOCKET_OPTIONS] {
            let mut config = testing::config();
            config.inbound.connect = connect;
            let (shared, _drain) = testing::shared(config, &Mesh::new());
            let app = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let labels = Arc::new(shared.metrics.inbound_targets(&shared.config.inbound.ports));
            let ports = ApplicationPorts::new(Arc::clone(&shared), labels, 1);
            let stream = ports.get(app.local_addr().unwrap()).connect_tcp().await.unwrap();
            assert!(stream.nodelay().unwrap());
            assert_eq!(socket_options(&stream), connect);
        }
    }
}
