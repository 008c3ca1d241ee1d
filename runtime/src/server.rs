//! The one HTTP server of every process: admin servers, webhooks and gRPC services accept their connections here.
//!
//! It owns the limits for all clients, so that silent, slow and abandoned connections cannot keep others out: deadlines
//! ([`Limits`]), bounds on connections, in all and of one address, where a new one replaces the least useful one
//! ([`connections`]), bounds on the requests of an address and on the bytes of requests being received, HTTP/2 pings
//! and TCP keep-alive. It refuses to know what is served.
//!
//! When more comes than can be answered, connections are read from in turns ([`gate`]), and deadlines count only the
//! time for which this process waits for its peer ([`clock`]).
//!
//! ```text
//! accept ─> admit (evicts when full) ─> handshake ─> paced reads ─> hyper ─> service
//!                │ deadlines: begin, receive, exchange, idle ──┘
//! ```

mod body;
mod clock;
mod connections;
mod gate;
mod paced;

use std::{convert::Infallible, future::Future, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use anyhow::Context as _;
use bytes::Bytes;
use http::{Extensions, HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::{body::Body, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
    time::{sleep, timeout},
};

pub use body::{RequestBody, ResponseBody};

use crate::drain::Watch;
use connections::{Connection, Connections, Exchange, Overdue, Source};
use paced::{InTurns, Paced};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Connections that the kernel completes before they are accepted, as far as `net.core.somaxconn` allows (4,096 by
/// default). tokio's own bind asks for 128. When more clients than that come at once, as after a failure of the
/// network, the kernel drops the last step of their handshakes, forgets the handshakes of which most are old, and
/// resets what these clients, who take themselves for connected, then send (`net/ipv4/inet_connection_sock.c`,
/// reqsk_timer_handler).
const BACKLOG: u32 = 65_535;
/// Pause after a failed accept (usually: out of file descriptors) before the next.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a connection may take to close after it was asked to: time for HTTP/2's GOAWAY and its acknowledgement.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Silence after which TCP probes a peer, and interval of the probes; the connection ends after 90 s in all.
const KEEPALIVE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// Limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most connections at a time. A further one replaces another, see [`connections`].
    pub connections: usize,
    /// The most connections at a time of one address. A further one replaces another of the same address. The
    /// listener's own address has no such bound: behind the sidecar are many clients.
    pub source_connections: usize,
    /// The most HTTP/2 streams at a time on one connection.
    pub streams: u32,
    /// The most requests being answered at a time for one address, the listener's own excepted. A further one is
    /// answered with 503.
    pub source_streams: usize,
    /// The most HTTP/2 streams at a time on a connection from the listener's own address: the sidecar, which carries
    /// the streams of many clients.
    pub local_streams: u32,
    /// The most requests that wait for this process, from their arrival until their answers begin, over all
    /// connections; an address may have a sixteenth of them. Beyond, connections are read from in turns, so that what
    /// they send waits with their clients.
    pub waiting: usize,
    /// From accept to the end of the first request's head, the TLS handshake included. Only the time counts for which
    /// this process waits for its peer.
    pub begin: Duration,
    /// From the head of a request to the end of its body. Only the time counts for which this process waits for its
    /// peer.
    pub receive: Duration,
    /// From the head of a request to the end of its response; no bound for streams.
    pub exchange: Option<Duration>,
    /// How long a connection may be without a request after its first.
    pub idle: Duration,
    /// Silence after which an HTTP/2 client is pinged, and deadline for its answer.
    pub ping: Duration,
    /// The most bytes of request bodies at a time, over all connections. Beyond, the connection that holds most is
    /// closed.
    pub held_bytes: usize,
}

impl Limits {
    /// Limits of admin servers, for probes, scrapes and a person with curl. Prometheus keeps idle connections for 5
    /// minutes, and must be the side that closes: a request that crosses a close is lost.
    pub const ADMIN: Self = Self {
        connections: 128,
        source_connections: 128,
        streams: 32,
        source_streams: 128 * 32,
        local_streams: 256,
        waiting: 1024,
        begin: Duration::from_secs(10),
        receive: Duration::from_secs(10),
        exchange: Some(Duration::from_secs(30)),
        idle: Duration::from_secs(330),
        ping: Duration::from_secs(30),
        held_bytes: 1024 * 1024,
    };
    /// Limits of admission webhooks. API servers close idle connections after 90 s (client-go's default), and must be
    /// the side that closes: with failurePolicy Ignore, a lost request is a pod without a proxy. A webhook
    /// configuration may set a timeout of at most 30 s.
    pub const WEBHOOK: Self = Self {
        connections: 512,
        source_connections: 512,
        streams: 128,
        source_streams: 512 * 128,
        local_streams: 128,
        waiting: 4096,
        begin: Duration::from_secs(10),
        receive: Duration::from_secs(30),
        exchange: Some(Duration::from_secs(60)),
        idle: Duration::from_secs(180),
        ping: Duration::from_secs(30),
        held_bytes: 32 * 1024 * 1024,
    };
    /// Limits of gRPC services, whose streams live as long as the proxies that opened them.
    ///
    /// 25,000 proxies that all come back at once have 50,000 connections, until the old ones are closed. What one
    /// client can take is bounded by its address: a proxy has one connection to a service, and a node has 256 pods at
    /// most, should all of them have its address. A proxy has three streams for each of its destinations.
    pub const GRPC: Self = Self {
        connections: 64 * 1024,
        source_connections: 512,
        streams: 4096,
        source_streams: 16 * 1024,
        local_streams: 1024 * 1024,
        waiting: 8 * 1024,
        begin: Duration::from_secs(10),
        receive: Duration::from_secs(10),
        exchange: None,
        idle: Duration::from_secs(300),
        ping: Duration::from_secs(30),
        held_bytes: 16 * 1024 * 1024,
    };
}

/// A server, before it serves.
#[derive(Clone, Debug)]
pub struct Server {
    name: &'static str,
    limits: Limits,
    watch: Watch,
    linger: Duration,
}

impl Server {
    /// Creates a server that ends with the drain.
    #[must_use]
    pub fn new(name: &'static str, limits: Limits, watch: Watch) -> Self {
        Self { name, limits, watch, linger: Duration::ZERO }
    }

    /// Accepts connections for this long after the drain began, and asks HTTP/1 clients to connect elsewhere next
    /// time: for servers whose clients take a moment to learn another address.
    #[must_use]
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// Serves plain text until the drain, which tracks requests in progress.
    pub async fn serve<S, F, B>(self, listener: TcpListener, service: S)
    where
        S: Fn(Request<RequestBody>, SocketAddr) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin + Send + 'static,
    {
        self.serve_with_extensions(listener, plain, service).await;
    }

    /// Serves on the stream that `handshake` returns until the drain, which tracks requests in progress. What the
    /// handshake learns about the client, its extensions, is added to every request of the connection.
    pub async fn serve_with_extensions<H, HF, IO, S, F, B>(self, listener: TcpListener, handshake: H, service: S)
    where
        H: Fn(TcpStream) -> HF,
        HF: Future<Output = io::Result<(IO, Extensions)>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Fn(Request<RequestBody>, SocketAddr) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin + Send + 'static,
    {
        let connections = Arc::new(Connections::new(self.limits));
        let mut ended = pin!(self.ended());
        loop {
            let accepted = tokio::select! {
                () = &mut ended => return,
                accepted = listener.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok((stream, peer)) => (stream, SocketAddr::new(peer.ip().to_canonical(), peer.port())),
                Err(error) => {
                    tracing::warn!(%error, server = self.name, "cannot accept");
                    connections.evict_one();
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let local = stream.local_addr().is_ok_and(|local| local.ip().to_canonical() == peer.ip());
            let Some(connection) = connections.admit(Source { addr: peer.ip(), local }) else {
                tracing::debug!(server = self.name, client.addr = %peer, "refused: every connection is in use");
                continue;
            };
            set_options(&stream);
            let streams = if local { self.limits.local_streams } else { self.limits.streams };
            let handshake = handshake(stream);
            let (server, service) = (self.clone(), service.clone());
            self.watch.spawn(async move {
                if let Err(reason) = server.serve_connection(&connection, handshake, streams, peer, service).await {
                    tracing::debug!(server = server.name, client.addr = %peer, reason, "connection closed");
                }
            });
        }
    }

    /// Serves one connection; an error says why it was closed.
    async fn serve_connection<IO, S, F, B>(
        &self,
        connection: &Connection,
        handshake: impl Future<Output = io::Result<(IO, Extensions)>>,
        streams: u32,
        peer: SocketAddr,
        service: S,
    ) -> Result<(), String>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Fn(Request<RequestBody>, SocketAddr) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin + Send + 'static,
    {
        connection.handle().clock().start();
        // What has arrived counts before a deadline that has passed: it is the process that was late, not the client.
        let (io, extensions) = tokio::select! {
            biased;
            accepted = handshake => accepted.map_err(|error| format!("handshake failed: {error}"))?,
            overdue = connection.overdue() => return Err(overdue.reason().to_owned()),
            () = self.ended() => return Ok(()),
        };
        let handle = connection.handle();
        let io = Paced::new(io, handle.clone());
        let reader = handle.clone();
        let draining = self.watch.clone();
        let service = service_fn(move |mut request: Request<hyper::body::Incoming>| {
            request.extensions_mut().extend(extensions.clone());
            let exchange = Arc::new(handle.begin());
            // On the heap until the answer begins. hyper has one place for this future and for the body that follows
            // it, and a stream would otherwise occupy as much as its request did for as long as it lives.
            Box::pin(answer(exchange, request, peer, &service, draining.clone()))
        });
        let builder = self.http(streams);
        let http = pin!(builder.serve_connection(TokioIo::new(io), service));
        let mut serving = InTurns { http, reader };
        tokio::select! {
            biased;
            served = &mut serving => return served.map_err(|error| error.to_string()),
            overdue = connection.overdue() => {
                if overdue == Overdue::Idle {
                    serving.http.as_mut().graceful_shutdown();
                    let _ = timeout(CLOSE_GRACE, serving).await;
                }
                return Err(overdue.reason().to_owned());
            }
            () = self.ended() => serving.http.as_mut().graceful_shutdown(),
        }
        // From here on the drain has a deadline, which a connection without a request must not use up.
        tokio::select! {
            biased;
            served = &mut serving => served.map_err(|error| error.to_string()),
            overdue = connection.overdue() => Err(overdue.reason().to_owned()),
            () = async { connection.without_requests().await; sleep(CLOSE_GRACE).await } => Ok(()),
        }
    }

    /// Waits until no more connections are accepted.
    async fn ended(&self) {
        self.watch.signaled().await;
        sleep(self.linger).await;
    }

    fn http(&self, streams: u32) -> auto::Builder<TokioExecutor> {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(self.limits.ping)
            .keep_alive_timeout(self.limits.ping)
            .max_concurrent_streams(streams);
        builder
    }
}

/// Binds a listener for [`Server`], which many clients may dial at once.
///
/// # Errors
/// When the address cannot be bound; the error names the flag that sets it.
pub fn bind(addr: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    listen(addr)
        .with_context(|| format!("{flag} {addr}: cannot be bound, stop the process that uses it or choose another"))
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // As tokio's own: a restarted process need not wait for the connections of the last one.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

/// The handshake of plain text, which does nothing.
pub(crate) async fn plain(stream: TcpStream) -> io::Result<(TcpStream, Extensions)> {
    Ok((stream, Extensions::new()))
}

fn set_options(stream: &TcpStream) {
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_INTERVAL).with_retries(KEEPALIVE_RETRIES);
    // Setting an option fails if the peer is gone already.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

/// The answer to a request. What the service does not keep of the request is gone before the first wait: when all
/// clients come back at once, many requests wait.
fn answer<S, F, B>(
    exchange: Arc<Exchange>,
    request: Request<hyper::body::Incoming>,
    peer: SocketAddr,
    service: &S,
    draining: Watch,
) -> impl Future<Output = Result<Response<ResponseBody<B>>, Infallible>> + use<S, F, B>
where
    S: Fn(Request<RequestBody>, SocketAddr) -> F,
    F: Future<Output = Response<B>>,
    B: Body<Data = Bytes>,
{
    let http1 = request.version() < Version::HTTP_2;
    let answering = (!exchange.is_excess()).then(|| {
        let request = request.map(|body| RequestBody::new(body, exchange.clone()));
        // On the heap of its own: a future has room twice for another that is moved into it and awaited.
        Box::pin(service(request, peer))
    });
    async move {
        let Some(answering) = answering else {
            tracing::debug!(client.addr = %peer, "refused: too many requests of this address are being answered");
            let mut refused = Response::new(ResponseBody::empty());
            *refused.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            return Ok(refused);
        };
        let mut response = answering.await;
        exchange.answered();
        if !response.status().is_client_error() {
            exchange.has_use();
        }
        if http1 && draining.is_signaled() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| ResponseBody::new(body, exchange)))
    }
}

#[cfg(test)]
mod tests;
