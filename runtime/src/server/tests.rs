//! The server on real sockets, with clients that are silent, slow, or gone.

use std::sync::atomic::{AtomicUsize, Ordering};

use http::Method;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::SendRequest;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::Semaphore,
    task::{JoinHandle, JoinSet},
};
use tokio_util::io::InspectReader;

use super::*;
use crate::drain::Drain;

/// HTTP/2's client preface and an empty SETTINGS frame (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(30);
/// For every deadline that a test waits for.
const SHORT: Duration = Duration::from_millis(200);
const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
const REFUSED: &[u8] = b"DELETE / HTTP/1.1\r\nhost: x\r\n\r\n";

/// Serves the length of the request's body, and refuses to delete; returns the address and the drain.
async fn start(limits: Limits) -> (SocketAddr, Drain) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (drain, watch) = Drain::new();
    let service = |request: Request<RequestBody>, _| async {
        let refused = request.method() == Method::DELETE;
        let mut response = match request.into_body().collect().await {
            Ok(body) => Response::new(Full::new(Bytes::from(format!("{} bytes", body.to_bytes().len())))),
            Err(error) => Response::new(Full::new(Bytes::from(error.to_string()))),
        };
        if refused {
            *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
        }
        response
    };
    tokio::spawn(Server::new("test", limits, watch).serve(listener, service));
    (addr, drain)
}

/// A connection on which these bytes were sent.
async fn sent(addr: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// Reads until the server closes.
async fn until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    // A server that closes before it has read everything resets the connection.
    let _ = timeout(DEADLINE, stream.read_to_end(&mut answer)).await.expect("the server closes the connection");
    answer
}

async fn post(addr: SocketAddr, length: usize) -> String {
    let head = format!("POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    let stream = sent(addr, &[head.as_bytes(), &vec![b'x'; length]].concat()).await;
    String::from_utf8(until_closed(stream).await).unwrap()
}

#[tokio::test]
async fn ten_thousand_connections_without_a_request_keep_nobody_out() {
    crate::files::raise_limit().unwrap();
    for (kind, bytes) in [
        ("silent", &b""[..]),
        ("half a head", b"POST / HTTP/1.1\r\nhost: x\r\n"),
        ("no body", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"),
        ("HTTP/2 without a request", PREFACE),
        ("after a request that was refused", REFUSED),
        ("after a request", GET),
    ] {
        let (addr, _drain) = start(Limits { connections: 100, ..Limits::WEBHOOK }).await;
        let mut api_server = sent(addr, GET).await;
        let mut byte = [0];
        api_server.read_exact(&mut byte).await.unwrap();
        let mut held = Vec::new();
        for _ in 0..10_000 {
            held.push(sent(addr, bytes).await);
        }
        assert!(post(addr, 5).await.ends_with("5 bytes"), "{kind}");
        if kind != "after a request" {
            api_server.write_all(GET).await.unwrap();
            let mut answers = [0; 200];
            let mut read = 0;
            while !answers[..read].ends_with(b"0 bytes") || read < 120 {
                let more = timeout(DEADLINE, api_server.read(&mut answers[read..])).await.unwrap().unwrap();
                assert!(more > 0, "{kind}: a client that asked before keeps its connection");
                read += more;
            }
        }
        drop(held);
    }
}

/// Sends bytes on a connection from an address of 127.0.0.0/8, which is not the listener's own.
async fn sent_from(host: u8, addr: SocketAddr, bytes: &[u8]) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 1, host], 0))).unwrap();
    let mut stream = socket.connect(addr).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// Reads a response, and leaves the connection open.
async fn answered(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let ended = |answer: &[u8]| {
        let text = String::from_utf8_lossy(answer);
        text.ends_with(" bytes") || text.ends_with("\r\n\r\n") && text.contains("content-length: 0")
    };
    while !ended(&answer) {
        let more = timeout(DEADLINE, stream.read_buf(&mut answer)).await.expect("an answer").unwrap();
        assert!(more > 0, "closed after {answer:?}");
    }
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn all_clients_may_come_back_before_their_old_connections_end() {
    crate::files::raise_limit().unwrap();
    // As many clients as addresses here, each with one connection, as after a failure of the network: the server
    // notices none of the old ones.
    let (addr, _drain) = start(Limits { connections: 512, source_connections: 2, ..Limits::GRPC }).await;
    let mut before = Vec::new();
    for host in 1..=250 {
        before.push(sent_from(host, addr, GET).await);
    }
    for old in &mut before {
        assert!(answered(old).await.ends_with("0 bytes"));
    }
    let mut again = Vec::new();
    for host in 1..=250 {
        again.push(sent_from(host, addr, GET).await);
    }
    for new in &mut again {
        assert!(answered(new).await.ends_with("0 bytes"));
    }
    // Nobody lost one for it.
    for old in &mut before {
        old.write_all(GET).await.unwrap();
        assert!(answered(old).await.ends_with("0 bytes"));
    }
    // A client that opens more and more replaces its own.
    let mut greedy = Vec::new();
    for _ in 0..100 {
        greedy.push(sent_from(251, addr, b"").await);
    }
    for stream in greedy.drain(..98) {
        until_closed(stream).await;
    }
    for old in before.iter_mut().chain(&mut again) {
        old.write_all(GET).await.unwrap();
        assert!(answered(old).await.ends_with("0 bytes"));
    }
}

#[tokio::test]
async fn requests_of_an_address_are_bounded_over_its_connections() {
    let limits = Limits { source_streams: 2, receive: DEADLINE, ..Limits::WEBHOOK };
    let (addr, _drain) = start(limits).await;
    let half = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx";
    let held = [sent_from(1, addr, half).await, sent_from(1, addr, half).await];
    let status = async |host| answered(&mut sent_from(host, addr, GET).await).await[9..12].to_owned();
    let refused = async {
        // Those two may not have been read yet.
        while status(1).await != "503" {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, refused).await.expect("a further request is refused");
    assert_eq!(status(2).await, "200", "another address");
    drop(held);
    let admitted = async {
        while status(1).await != "200" {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, admitted).await.expect("a request is admitted once others have ended");
}

#[tokio::test]
async fn clients_that_stall_are_closed_at_every_stage() {
    let limits =
        Limits { begin: SHORT, receive: SHORT, idle: SHORT, ping: DEADLINE, exchange: None, ..Limits::WEBHOOK };
    let (addr, _drain) = start(limits).await;
    for (stage, bytes) in [
        ("nothing", &b""[..]),
        ("half a preface", &PREFACE[..10]),
        ("preface", PREFACE),
        ("half a head", b"GET / HT"),
        ("no body", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"),
        ("idle", GET),
    ] {
        let answer = until_closed(sent(addr, bytes).await).await;
        assert_eq!(answer.starts_with(b"HTTP/1.1 200"), stage == "idle", "{stage}");
    }
}

#[tokio::test]
async fn request_bodies_are_bounded_over_all_connections() {
    let (addr, _drain) = start(Limits { held_bytes: 10_000, ..Limits::WEBHOOK }).await;
    let mut greedy = sent(addr, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n").await;
    greedy.write_all(&[b'x'; 9_000]).await.unwrap();
    let closed = tokio::spawn(until_closed(greedy));
    // The larger one may not have been read yet; none of these fits beside another.
    while !closed.is_finished() {
        let answer = timeout(DEADLINE, post(addr, 5_000)).await.unwrap();
        assert!(answer.ends_with("5000 bytes"), "{answer}");
    }
    assert!(closed.await.unwrap().is_empty());
    assert!(!post(addr, 10_001).await.ends_with("10001 bytes"));
}

#[tokio::test]
async fn a_thousand_clients_connect_before_one_is_accepted() {
    crate::files::raise_limit().unwrap();
    let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let addr = listener.local_addr().unwrap();
    // Nothing accepts. The kernel completes as many as fit in the queue, and lets the others wait.
    let allowed: usize = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
    let connecting = async {
        let mut clients = Vec::new();
        for _ in 0..allowed.min(1000) {
            clients.push(sent(addr, GET).await);
        }
        clients
    };
    let mut clients = timeout(DEADLINE, connecting).await.expect("the queue is as long as the kernel allows");
    // And none of them is lost.
    let (drain, watch) = Drain::new();
    let service = |_, _| std::future::ready(Response::new(Full::new(Bytes::from("0 bytes"))));
    tokio::spawn(Server::new("test", Limits::GRPC, watch).serve(listener, service));
    for client in &mut clients {
        assert!(answered(client).await.ends_with("0 bytes"));
    }
    drop(drain);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_has_arrived_is_served_however_late_the_process_is() {
    let (_drain, watch) = Drain::new();
    let server = Server::new("test", Limits::GRPC, watch);
    let service = |_, _| std::future::ready(Response::new(Full::new(Bytes::from("0 bytes"))));
    let peer = SocketAddr::from(([10, 0, 0, 1], 1));
    // Each time by chance, if the deadline and the request were alike.
    for _ in 0..32 {
        let connections = Arc::new(Connections::new(Limits::GRPC));
        let connection = connections.admit(Source { addr: peer.ip(), local: false }).unwrap();
        let (mut client, io) = tokio::io::duplex(4096);
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        // The process had no time for it.
        tokio::time::advance(Limits::GRPC.begin * 2).await;
        let handshake = std::future::ready(Ok((io, Extensions::new())));
        server.serve_connection(&connection, handshake, 1, peer, service).await.expect("a request is answered");
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("0 bytes"), "{answer:?}");
        // The opposite: who sends nothing is closed.
        let connection = connections.admit(Source { addr: peer.ip(), local: false }).unwrap();
        let (_silent, io) = tokio::io::duplex(4096);
        tokio::time::advance(Limits::GRPC.begin * 2).await;
        let handshake = std::future::ready(Ok((io, Extensions::new())));
        let closed = server.serve_connection(&connection, handshake, 1, peer, service).await;
        assert_eq!(closed.unwrap_err(), Overdue::Begin.reason());
    }
}

/// A server whose turn to work comes when a test says so.
#[derive(Clone)]
struct Busy {
    server: Server,
    connections: Arc<Connections>,
    turns: Arc<Semaphore>,
    /// Whether a request takes its turn before it is read, and not before it is answered.
    reads_late: bool,
    /// Requests that were read and are not answered: now, and the most of them at a time.
    read: Arc<[AtomicUsize; 2]>,
}

/// What the server says of a connection when it has ended.
type Served = JoinHandle<Result<(), String>>;

impl Busy {
    fn new(limits: Limits, reads_late: bool) -> Self {
        let server = Server::new("test", limits, Drain::new().1);
        let connections = Arc::new(Connections::new(limits));
        Self { server, connections, turns: Arc::new(Semaphore::new(0)), reads_late, read: Arc::default() }
    }

    async fn answer(self, request: Request<RequestBody>) -> Response<Full<Bytes>> {
        if self.reads_late {
            self.turns.acquire().await.unwrap().forget();
        }
        let length = request.into_body().collect().await.unwrap().to_bytes().len();
        let [now, most] = &*self.read;
        most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        if !self.reads_late {
            self.turns.acquire().await.unwrap().forget();
        }
        now.fetch_sub(1, Ordering::Relaxed);
        Response::new(Full::new(Bytes::from(format!("{length} bytes"))))
    }

    /// Serves a client of this address.
    fn serve(&self, host: u8) -> (tokio::io::DuplexStream, Served) {
        let peer = SocketAddr::from(([10, 0, 0, host], 1));
        let connection = self.connections.admit(Source { addr: peer.ip(), local: false }).unwrap();
        let (client, io) = tokio::io::duplex(64 * 1024);
        let busy = self.clone();
        let served = tokio::spawn(async move {
            let handshake = std::future::ready(Ok((io, Extensions::new())));
            let (streams, service) = (busy.server.limits.streams, busy.clone());
            let service = move |request, _| service.clone().answer(request);
            busy.server.serve_connection(&connection, handshake, streams, peer, service).await
        });
        (client, served)
    }

    async fn http2(&self, host: u8) -> (SendRequest<Full<Bytes>>, Served) {
        let (client, served) = self.serve(host);
        let connecting = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client));
        let (requests, connection) = connecting.await.unwrap();
        tokio::spawn(connection);
        (requests, served)
    }
}

/// Asks with a body of 100 bytes.
async fn ask(mut requests: SendRequest<Full<Bytes>>) -> Result<Bytes, hyper::Error> {
    requests.ready().await?;
    let request = Request::post("http://x/").body(Full::new(Bytes::from_static(&[b'x'; 100]))).unwrap();
    Ok(requests.send_request(request).await?.into_body().collect().await?.to_bytes())
}

#[tokio::test(start_paused = true)]
async fn http2_clients_that_answer_no_ping_are_closed() {
    // No other deadline ends during the test.
    let ping = Limits::GRPC.ping;
    let busy = Busy::new(Limits { begin: 100 * ping, ..Limits::GRPC }, false);
    let (mut silent, closed) = busy.serve(1);
    silent.write_all(PREFACE).await.unwrap();
    let (_answers_pings, open) = busy.http2(2).await;
    let closed = timeout(3 * ping, closed).await.expect("the server closes the connection of a client that is gone");
    closed.unwrap().unwrap_err();
    sleep(3 * ping).await;
    assert!(!open.is_finished(), "a client that answers pings keeps its connection");
}

#[tokio::test(start_paused = true)]
async fn what_a_client_asks_at_once_is_answered_however_slow_the_process_is() {
    for reads_late in [true, false] {
        // All bodies together are three times as large as may be held.
        let limits = Limits { waiting: 256, held_bytes: 32 * 1024, ..Limits::GRPC };
        let busy = Busy::new(limits, reads_late);
        let (requests, served) = busy.http2(1).await;
        let mut asking: JoinSet<_> = (0..1000).map(|_| ask(requests.clone())).collect();
        // Ten a second, so that the last one waits for ten times the deadline of a request's body.
        for _ in 0..100 {
            sleep(Duration::from_secs(1)).await;
            busy.turns.add_permits(10);
        }
        while let Some(answer) = asking.join_next().await {
            assert_eq!(answer.unwrap().expect("an answer"), "100 bytes");
        }
        assert!(!served.is_finished(), "the connection is open");
        let most = busy.read[1].load(Ordering::Relaxed);
        assert!(most < 300, "{most} of 1000 requests were kept at a time");
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_waits_for_a_share_of_the_requests_of_another() {
    let busy = Busy::new(Limits { waiting: 64, ..Limits::GRPC }, false);
    let (flood, _served) = busy.http2(6).await;
    let mut asking: JoinSet<_> = (0..1000).map(|_| ask(flood.clone())).collect();
    sleep(Duration::from_secs(1)).await;
    let (other, _other_served) = busy.http2(1).await;
    let other = tokio::spawn(ask(other));
    let mut turns = 0;
    while !other.is_finished() {
        busy.turns.add_permits(1);
        turns += 1;
        sleep(Duration::from_millis(1)).await;
        assert!(turns < 300, "the other client waits for all of them");
    }
    other.await.unwrap().expect("an answer");
    busy.turns.add_permits(1000);
    while let Some(answer) = asking.join_next().await {
        answer.unwrap().expect("an answer");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_arrives_little_by_little_is_late_all_the_same() {
    let busy = Busy::new(Limits::GRPC, false);
    let (mut client, served) = busy.serve(1);
    client.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n").await.unwrap();
    let since = tokio::time::Instant::now();
    let trickle = async {
        while client.write_all(b"x").await.is_ok() {
            sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::join!(trickle, async { assert_eq!(served.await.unwrap().unwrap_err(), Overdue::Receive.reason()) });
    assert!(since.elapsed() < 2 * Limits::GRPC.receive);
}

#[tokio::test]
async fn the_requests_of_a_read_begin_before_the_next_read() {
    const REQUESTS: u32 = 5000;
    // GET / on x, as HEADERS whose fields are in the static table (RFC 9113 section 6.2, RFC 7541 appendix A).
    let request = |number: u32| {
        let stream = (2 * number + 1).to_be_bytes();
        [&[0, 0, 6, 1, 5][..], &stream, &[0x82, 0x86, 0x84, 0x41, 1, b'x']].concat()
    };
    let sent = [PREFACE.to_vec(), (0..REQUESTS).flat_map(request).collect()].concat();
    let (mut client, io) = tokio::io::duplex(1024 * 1024);
    client.write_all(&sent).await.unwrap();
    let (read, begun) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let most_ahead = Arc::new(AtomicUsize::new(0));
    let reader = read.clone();
    let io = InspectReader::new(io, move |bytes: &[u8]| {
        reader.fetch_add(bytes.len(), Ordering::Relaxed);
    });
    let service = {
        let (read, begun, most_ahead) = (read.clone(), begun.clone(), most_ahead.clone());
        move |_: Request<RequestBody>, _| {
            let taken = PREFACE.len() + begun.fetch_add(1, Ordering::Relaxed) * request(0).len();
            most_ahead.fetch_max(read.load(Ordering::Relaxed) - taken, Ordering::Relaxed);
            std::future::ready(Response::new(Full::new(Bytes::new())))
        }
    };
    let peer = SocketAddr::from(([10, 0, 0, 1], 1));
    let connections = Arc::new(Connections::new(Limits::GRPC));
    let connection = connections.admit(Source { addr: peer.ip(), local: true }).unwrap();
    let server = Server::new("test", Limits::GRPC, Drain::new().1);
    let handshake = std::future::ready(Ok((io, Extensions::new())));
    let serving = server.serve_connection(&connection, handshake, REQUESTS, peer, service);
    let all = async {
        while begun.load(Ordering::Relaxed) < REQUESTS as usize {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        served = serving => panic!("{served:?}"),
        () = all => {}
    }
    let most_ahead = most_ahead.load(Ordering::Relaxed);
    assert!(most_ahead <= 16 * 1024, "{most_ahead} of {} bytes were read before their requests began", sent.len());
}
