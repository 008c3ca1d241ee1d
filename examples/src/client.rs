//! Sends requests to an echo server in one protocol and counts the results. Workers share a budget of requests; each
//! keeps one session (a connection with its protocol state), and opens a new one after a failure, or for every request
//! if configured.
//!
//! A request counts as failed unless the application itself answered with success: refused, reset, closed, timed out,
//! or an HTTP or gRPC error status.

mod phase;
mod session;

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, SocketAddrV6},
    sync::Arc,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use socket2::SockRef;
use tokio::{
    net::{TcpSocket, TcpStream, lookup_host},
    sync::Mutex,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::server::Seen;
pub use phase::{Failed, Phase};
use session::Session;

/// Maximum number of distinct error texts in a report; others are counted under `other`.
const ERROR_KINDS: usize = 32;
/// Upper bound of recorded latencies: an hour, in microseconds.
const LONGEST_US: u64 = 3_600_000_000;

/// Protocols of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 with keep-alive.
    Http1,
    /// HTTP/2 by prior knowledge.
    Http2,
    /// A unary gRPC call.
    Grpc,
    /// A WebSocket over an HTTP/1.1 upgrade: one message and its answer.
    WebSocket,
    /// A TCP protocol in which the server speaks first: one line and its answer.
    Banner,
}

impl Protocol {
    /// The name in reports and on the command line.
    pub fn label(self) -> &'static str {
        match self {
            Self::Http1 => "http1",
            Self::Http2 => "http2",
            Self::Grpc => "grpc",
            Self::WebSocket => "ws",
            Self::Banner => "banner",
        }
    }
}

/// Parameters of a load.
#[derive(Clone, Debug)]
pub struct Load {
    /// The protocol to speak.
    pub protocol: Protocol,
    /// `HOST:PORT`, the host a name or an address.
    pub target: String,
    /// Path of HTTP requests.
    pub path: String,
    /// Requests to send; `None`: until `duration` has passed.
    pub count: Option<u64>,
    /// No new request begins after this.
    pub duration: Option<Duration>,
    /// No new request begins once this is cancelled.
    pub stop: CancellationToken,
    /// Workers, each with its own connection.
    pub concurrency: usize,
    /// Pause of each worker after each request.
    pub pause: Duration,
    /// The longest time for one request, its connection included.
    pub timeout: Duration,
    /// A new connection for every request.
    pub fresh: bool,
    /// Dial an IPv4 address through an IPv6 socket as `::ffff:a.b.c.d`.
    pub mapped: bool,
    /// What happens around the load, for [`Report::failed`].
    pub phase: Phase,
}

/// Results of a load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The protocol's label.
    pub protocol: String,
    /// The target, as given.
    pub target: String,
    /// Requests sent.
    pub requests: u64,
    /// Requests without the application's own answer.
    pub failures: u64,
    /// Failures by error text.
    pub errors: BTreeMap<String, u64>,
    /// Failures by phase and error text, in the order of their first answers.
    pub failed: Vec<Failed>,
    /// Answers by the pod that gave them.
    pub by_backend: BTreeMap<String, u64>,
    /// Answers by the client identity that the server's proxy reported (`l5d-client-id`); unmeshed: absent.
    pub by_client_id: BTreeMap<String, u64>,
    /// Connections opened.
    pub connections: u64,
    /// Whether `getpeername` was the dialled address on every connection.
    pub peer_addr_ok: bool,
    /// The client's own addresses, from `getsockname`.
    pub local_ips: Vec<String>,
    /// The clients' addresses, from the server's `getpeername`.
    pub seen_peer_ips: Vec<String>,
    /// Latency of successful requests.
    pub latency_ms: Latency,
    /// From the first request to the last answer.
    pub elapsed_ms: u64,
}

impl Report {
    /// Adds the counts of another load to the same target. Latencies are those of the slower one.
    pub fn absorb(&mut self, other: &Self) {
        self.requests += other.requests;
        self.failures += other.failures;
        self.connections += other.connections;
        self.elapsed_ms += other.elapsed_ms;
        self.peer_addr_ok &= other.peer_addr_ok;
        for (mine, theirs) in [
            (&mut self.errors, &other.errors),
            (&mut self.by_backend, &other.by_backend),
            (&mut self.by_client_id, &other.by_client_id),
        ] {
            for (key, count) in theirs {
                *mine.entry(key.clone()).or_default() += count;
            }
        }
        for (mine, theirs) in [(&mut self.local_ips, &other.local_ips), (&mut self.seen_peer_ips, &other.seen_peer_ips)]
        {
            let new: Vec<_> = theirs.iter().filter(|ip| !mine.contains(ip)).cloned().collect();
            mine.extend(new);
        }
        self.failed.extend_from_slice(&other.failed);
        let (mine, theirs) = (&mut self.latency_ms, other.latency_ms);
        (mine.p50, mine.p99, mine.max) = (mine.p50.max(theirs.p50), mine.p99.max(theirs.p99), mine.max.max(theirs.max));
    }
}

/// Milliseconds per request.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Latency {
    /// Half are at most this.
    pub p50: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// The slowest request.
    pub max: f64,
}

/// One answer of the application.
#[derive(Clone, Debug, Default)]
struct Answer {
    backend: String,
    client_id: Option<String>,
    seen_peer: String,
}

impl From<Seen> for Answer {
    fn from(mut seen: Seen) -> Self {
        Self { backend: seen.pod, client_id: seen.headers.remove("l5d-client-id"), seen_peer: seen.peer }
    }
}

struct Shared {
    load: Load,
    started: Instant,
    left: Option<u64>,
    latency: Histogram<u64>,
    report: Report,
}

/// Sends the load and returns its report.
pub async fn drive(load: Load) -> Report {
    let report = Report {
        protocol: load.protocol.label().to_owned(),
        target: load.target.clone(),
        peer_addr_ok: true,
        ..Report::default()
    };
    let concurrency = load.concurrency.max(1);
    let shared = Arc::new(Mutex::new(Shared {
        started: Instant::now(),
        left: load.count,
        latency: Histogram::new_with_bounds(1, LONGEST_US, 3)
            .unwrap_or_else(|_| unreachable!("the bounds are in order")),
        report,
        load,
    }));
    let workers = (0..concurrency).map(|_| tokio::spawn(work(Arc::clone(&shared)))).collect::<Vec<_>>();
    for worker in workers {
        // A worker has nothing that could panic; if it did, the count would lack its requests.
        let _ = worker.await;
    }
    let mut shared = shared.lock().await;
    let at = |quantile| shared.latency.value_at_quantile(quantile) as f64 / 1000.0;
    let latency_ms = Latency { p50: at(0.5), p99: at(0.99), max: shared.latency.max() as f64 / 1000.0 };
    let elapsed = shared.started.elapsed();
    shared.report.latency_ms = latency_ms;
    shared.report.elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    shared.report.clone()
}

async fn work(shared: Arc<Mutex<Shared>>) {
    let load = shared.lock().await.load.clone();
    let mut session = None;
    loop {
        if !shared.lock().await.take_ticket() {
            return;
        }
        let (started, phase) = (Instant::now(), load.phase.now());
        let outcome = match timeout(load.timeout, request(&load, &mut session, &shared)).await {
            Ok(outcome) => outcome,
            Err(_) => Err("timed out".to_owned()),
        };
        if load.fresh || outcome.is_err() {
            session = None;
        }
        shared.lock().await.record(outcome, started.elapsed(), phase);
        if !load.pause.is_zero() {
            tokio::time::sleep(load.pause).await;
        }
    }
}

async fn request(load: &Load, session: &mut Option<Session>, shared: &Mutex<Shared>) -> Result<Answer, String> {
    let open = match session {
        Some(open) => open,
        None => {
            let (stream, dialled) =
                dial(&load.target, load.mapped).await.map_err(|error| format!("connect: {error}"))?;
            shared.lock().await.record_connection(&stream, dialled);
            session.insert(Session::open(load, stream).await?)
        }
    };
    open.request(load).await
}

impl Shared {
    fn take_ticket(&mut self) -> bool {
        if self.load.stop.is_cancelled() || self.load.duration.is_some_and(|limit| self.started.elapsed() >= limit) {
            return false;
        }
        match &mut self.left {
            Some(0) => return false,
            Some(left) => *left -= 1,
            None => {}
        }
        true
    }

    fn record(&mut self, outcome: Result<Answer, String>, took: Duration, phase: (String, u64)) {
        self.report.requests += 1;
        match outcome {
            Ok(answer) => {
                *self.report.by_backend.entry(answer.backend).or_default() += 1;
                if let Some(id) = answer.client_id {
                    *self.report.by_client_id.entry(id).or_default() += 1;
                }
                if let Ok(peer) = answer.seen_peer.parse::<SocketAddr>() {
                    remember(&mut self.report.seen_peer_ips, peer);
                }
                self.latency.saturating_record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
            }
            Err(error) => {
                self.report.failures += 1;
                let known = self.report.errors.len() < ERROR_KINDS || self.report.errors.contains_key(&error);
                let kind = if known { error } else { "other".to_owned() };
                phase::add(&mut self.report.failed, phase, &kind);
                *self.report.errors.entry(kind).or_default() += 1;
            }
        }
    }

    fn record_connection(&mut self, stream: &TcpStream, dialled: SocketAddr) {
        self.report.connections += 1;
        // Connections that broke in the meantime have no addresses any more; their requests fail separately.
        if let Ok(peer) = stream.peer_addr()
            && peer != dialled
        {
            self.report.peer_addr_ok = false;
        }
        if let Ok(local) = stream.local_addr() {
            remember(&mut self.report.local_ips, local);
        }
    }
}

fn remember(ips: &mut Vec<String>, address: SocketAddr) {
    let ip = address.ip().to_string();
    if !ips.contains(&ip) {
        ips.push(ip);
    }
}

/// Resolves and connects as applications do: (stream, the address that was dialled).
///
/// # Errors
/// The name is unknown, or the kernel's error of `connect`.
pub async fn dial(target: &str, mapped: bool) -> io::Result<(TcpStream, SocketAddr)> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in lookup_host(target).await? {
        let address = if mapped { as_mapped(address) } else { address };
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        match socket.connect(address).await {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok((stream, address));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn as_mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0).into(),
        SocketAddr::V6(_) => address,
    }
}

/// The kernel's information about one connection of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Probe {
    /// The address given to `connect`.
    pub dialled: String,
    /// `getpeername`.
    pub peer: String,
    /// `getsockname`.
    pub local: String,
    /// `getsockopt(SOL_IP, SO_ORIGINAL_DST)`: the address, or the error number.
    pub original_dst_v4: Result<String, i32>,
    /// `getsockopt(SOL_IPV6, IP6T_SO_ORIGINAL_DST)`: the address, or the error number.
    pub original_dst_v6: Result<String, i32>,
}

/// Opens one connection and queries the kernel about it.
///
/// # Errors
/// As [`dial`].
pub async fn probe(target: &str, mapped: bool) -> io::Result<Probe> {
    let (stream, dialled) = dial(target, mapped).await?;
    let socket = SockRef::from(&stream);
    let plain = |answer: io::Result<socket2::SockAddr>| match answer {
        Ok(address) => Ok(address.as_socket().map_or_else(String::new, |address| address.to_string())),
        Err(error) => Err(error.raw_os_error().unwrap_or_default()),
    };
    Ok(Probe {
        dialled: dialled.to_string(),
        peer: stream.peer_addr()?.to_string(),
        local: stream.local_addr()?.to_string(),
        original_dst_v4: plain(socket.original_dst_v4()),
        original_dst_v6: plain(socket.original_dst_v6()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_reports_add_up_and_a_wrong_peer_stays_wrong() {
        let report = |backend: &str, peer_addr_ok| Report {
            requests: 2,
            failures: 1,
            by_backend: [(backend.to_owned(), 1)].into(),
            local_ips: vec!["10.0.0.1".to_owned()],
            peer_addr_ok,
            ..Report::default()
        };
        let mut all = report("web-0", true);
        all.absorb(&report("web-1", false));
        all.absorb(&report("web-1", true));
        assert_eq!((all.requests, all.failures, all.peer_addr_ok), (6, 3, false));
        assert_eq!(all.by_backend, [("web-0".to_owned(), 1), ("web-1".to_owned(), 2)].into());
        assert_eq!(all.local_ips, ["10.0.0.1"]);
    }

    #[test]
    fn maps_ipv4_into_ipv6_and_leaves_ipv6_alone() {
        let v6: SocketAddr = "[::1]:80".parse().unwrap();
        assert_eq!(as_mapped("10.0.0.1:80".parse().unwrap()).to_string(), "[::ffff:10.0.0.1]:80");
        assert_eq!(as_mapped(v6), v6);
    }
}
