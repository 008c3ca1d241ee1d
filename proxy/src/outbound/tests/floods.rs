//! Floods of frames, heads and connections against both sides: the process stays small, and another client is answered.
//!
//! Each flood has a process of its own, this test's program started again, so that what it measures is the flood's.

mod endpoint;
mod held;

use parking_lot::Mutex;
use weft_runtime::files::raise_limit;

use super::*;
use crate::{
    http::frames::{canceled, frame, head, preface, preface_with, stream},
    testing::{alone, role},
};

/// Answers to another client after which the state of a flood counts as steady.
const ANSWERS: usize = 30;
/// How long something that has to happen may take on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// What becomes of a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The proxy closes the connection.
    Closed,
    /// The proxy reads no more until the client reads.
    HeldUp,
    /// The proxy reads all of it.
    Read,
}

/// What one client sends.
#[derive(Clone, Copy)]
struct Flood {
    name: &'static str,
    opening: fn() -> Vec<u8>,
    /// The nth piece.
    piece: fn(u32) -> Vec<u8>,
    pieces: u32,
    connections: usize,
    /// Whether the client reads what it gets.
    reads: bool,
    /// On the outbound side, and on the inbound side.
    outcomes: [Outcome; 2],
    /// The most that the process may grow by, in MiB.
    mib: u64,
}

const FLOODS: [Flood; 14] = [
    http2("rapid reset", post_head, |n| canceled(n, "/"), 100_000, true, Outcome::Closed, 24),
    http2("CONTINUATION", open_head, continuation, 10_000, true, Outcome::Closed, 24),
    http2("SETTINGS", preface, |_| frame(4, 0, 0, &[0, 4, 0, 1, 0, 0]), 200_000, true, Outcome::Read, 24),
    http2("SETTINGS, answers unread", preface, |_| frame(4, 0, 0, &[]), 4_000_000, false, Outcome::HeldUp, 24),
    http2("PING", preface, |_| frame(6, 0, 0, &[7; 8]), 200_000, true, Outcome::Read, 24),
    http2("PING, answers unread", preface, |_| frame(6, 0, 0, &[7; 8]), 4_000_000, false, Outcome::HeldUp, 24),
    http2("empty DATA", post_head, |_| frame(0, 0, 1, &[]), 200_000, true, Outcome::Closed, 24),
    http2("heads from the table", preface, bomb, 4_000, true, Outcome::Closed, 24),
    // The outbound side refuses more than 200.
    http2("streams without an end", preface, never, 9_000, true, Outcome::Read, 128),
    // On the inbound side they fill a connection's window, 32 MiB; the outbound side refuses more than 200.
    Flood { connections: 4, ..http2("uploads that are not read", ignored, upload, 512, true, Outcome::Read, 192) },
    http2("windows of nothing", closed_window, large, 150, true, Outcome::Read, 48),
    http1("an endless head", 1, || request("/"), |_| [b'x'; 4096].to_vec(), 10_000, Outcome::Closed, 24),
    Flood {
        reads: false,
        ..http1("readers of nothing", 400, || request("/large"), |_| b"\r\n".to_vec(), 1, Outcome::Read, 512)
    },
    Flood { reads: false, ..http1("opaque readers of nothing", 400, || vec![0; 32], |_| vec![], 1, Outcome::Read, 64) },
];

const fn http2(
    name: &'static str,
    opening: fn() -> Vec<u8>,
    piece: fn(u32) -> Vec<u8>,
    pieces: u32,
    reads: bool,
    outcome: Outcome,
    mib: u64,
) -> Flood {
    Flood { name, opening, piece, pieces, connections: 1, reads, outcomes: [outcome; 2], mib }
}

const fn http1(
    name: &'static str,
    connections: usize,
    opening: fn() -> Vec<u8>,
    piece: fn(u32) -> Vec<u8>,
    pieces: u32,
    outcome: Outcome,
    mib: u64,
) -> Flood {
    Flood { name, opening, piece, pieces, connections, reads: true, outcomes: [outcome; 2], mib }
}

fn request(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: server.demo\r\n").into_bytes()
}

fn closed_window() -> Vec<u8> {
    preface_with(&[0, 4, 0, 0, 0, 0])
}

fn post_head() -> Vec<u8> {
    [preface(), frame(1, 4, 1, &head(0x83, "/never"))].concat()
}

/// A head that goes on.
fn open_head() -> Vec<u8> {
    [preface(), frame(1, 1, 1, &head(0x82, "/"))].concat()
}

fn continuation(_n: u32) -> Vec<u8> {
    continued(1)
}

/// More of a stream's head that goes on.
fn continued(stream: u32) -> Vec<u8> {
    // A literal field, never indexed: `x: ...`.
    frame(9, 0, stream, &[&[0x10, 1, b'x', 0x7f, 0x81, 0x3f][..], &[b'y'; 8192]].concat())
}

/// The first head puts 3 KiB into the table, and each head names it 2,000 times.
fn bomb(n: u32) -> Vec<u8> {
    let mut block = head(0x82, "/");
    if n == 0 {
        // A literal field with indexing: `x: yyy...`, of 3,072 bytes.
        block.extend([0x40, 1, b'x', 0x7f, 0x81, 0x17]);
        block.extend([b'y'; 3072]);
    }
    block.extend([0xbe; 2000]);
    frame(1, 5, stream(n), &block)
}

fn never(n: u32) -> Vec<u8> {
    frame(1, 5, stream(n), &head(0x82, "/never"))
}

fn large(n: u32) -> Vec<u8> {
    frame(1, 5, stream(n), &head(0x82, "/large"))
}

static CHUNK: [u8; 16 * 1024] = [7; 16 * 1024];

/// Frames of an unknown kind, which the proxy reads before it announces its window.
fn ignored() -> Vec<u8> {
    [preface(), frame(255, 0, 0, &CHUNK).repeat(5)].concat()
}

/// A request that fills its stream's window.
fn upload(n: u32) -> Vec<u8> {
    let id = stream(n);
    let data = [frame(0, 0, id, &CHUNK).repeat(3), frame(0, 0, id, &CHUNK[1..])].concat();
    [frame(1, 4, id, &head(0x83, "/never")), data].concat()
}

/// An application with answers that are small, large, or never come.
async fn target() -> SocketAddr {
    serve_each(move |mut stream| async move {
        let mut first = [1];
        if stream.peek(&mut first).await.is_ok() && first == [0] {
            while stream.write_all(&CHUNK).await.is_ok() {}
            return;
        }
        let mut server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
        server.http2().max_concurrent_streams(None);
        let _ = server.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
    })
    .await
}

async fn answer(
    request: Request<Incoming>,
) -> Result<Response<http_body_util::combinators::BoxBody<Bytes, Infallible>>, Infallible> {
    let chunks = match request.uri().path() {
        "/never" => std::future::pending().await,
        "/large" => 4096,
        _ => 1,
    };
    let frames = (0..chunks).map(|_| Ok(Frame::data(Bytes::from_static(&CHUNK))));
    Ok(Response::new(http_body_util::BodyExt::boxed(StreamBody::new(futures::stream::iter(frames)))))
}

/// Resident memory of this process in MiB.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096 / (1024 * 1024)
}

/// How many requests of another client were answered.
type Answered = watch::Receiver<usize>;

/// Waits while another client gets enough answers that whatever could happen to a flood has happened.
async fn in_vain(mut answered: Answered) {
    let before = *answered.borrow();
    // Whether the other client is still there is checked in the end.
    let _ = answered.wait_for(|now| *now >= before + ANSWERS).await;
}

impl Flood {
    async fn send(self, addr: SocketAddr, expected: Outcome, answered: Answered) -> (Outcome, TcpStream) {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let mut buffer = (self.opening)();
        for n in 0..self.pieces {
            buffer.extend((self.piece)(n));
            if buffer.len() < 16 * 1024 && n + 1 < self.pieces {
                continue;
            }
            match self.exchange(&mut stream, &buffer, expected, &answered).await {
                Outcome::Read => buffer.clear(),
                other => return (other, stream),
            }
        }
        if !self.reads {
            return (Outcome::Read, stream);
        }
        let mut sink = vec![0; 16 * 1024];
        loop {
            tokio::select! {
                biased;
                read = stream.read(&mut sink) => if matches!(read, Ok(0) | Err(_)) {
                    return (Outcome::Closed, stream);
                },
                () = in_vain(answered.clone()), if expected != Outcome::Closed => return (Outcome::Read, stream),
                () = tokio::time::sleep(PATIENCE), if expected == Outcome::Closed => return (Outcome::Read, stream),
            }
        }
    }

    /// Writes, and reads what is there. A proxy that ought to read on has more time for it than one that ought not.
    async fn exchange(
        &self,
        stream: &mut TcpStream,
        mut bytes: &[u8],
        expected: Outcome,
        answered: &Answered,
    ) -> Outcome {
        let (mut from, mut to) = stream.split();
        let mut sink = vec![0; 16 * 1024];
        while !bytes.is_empty() {
            tokio::select! {
                biased;
                wrote = to.write(bytes) => match wrote {
                    Ok(wrote) => bytes = &bytes[wrote..],
                    Err(_) => return Outcome::Closed,
                },
                read = from.read(&mut sink), if self.reads => if matches!(read, Ok(0) | Err(_)) {
                    return Outcome::Closed;
                },
                () = in_vain(answered.clone()), if expected == Outcome::HeldUp => return Outcome::HeldUp,
                () = tokio::time::sleep(PATIENCE), if expected != Outcome::HeldUp => return Outcome::HeldUp,
            }
        }
        Outcome::Read
    }

    /// Floods one side, in a process that does nothing else.
    async fn run(self, side: &str) {
        raise_limit().unwrap();
        let app = target().await;
        let proxy = Proxy::start(app, Control::default()).await;
        let addr = serve_side(&proxy, app, side).await;
        let before = resident();
        let (answers, answered) = watch::channel(0);
        let others = tokio::spawn(async move {
            loop {
                small(addr).await;
                answers.send_modify(|answers| *answers += 1);
            }
        });
        let expected = self.outcomes[usize::from(side == "inbound")];
        let floods = (0..self.connections).map(|_| self.send(addr, expected, answered.clone()));
        let ended = tokio::time::timeout(4 * PATIENCE, futures::future::join_all(floods)).await;
        let ended = ended.expect("the flood never ends");
        in_vain(answered).await;
        assert!(!others.is_finished(), "another client got no answer");
        others.abort();
        let grown = resident().saturating_sub(before);
        for (outcome, _) in &ended {
            assert_eq!(*outcome, expected, "{} on the {side} side", self.name);
        }
        assert!(grown <= self.mib, "{} on the {side} side: {grown} MiB more", self.name);
        tell(&format!("measured: {} on the {side} side: {grown} MiB more", self.name));
    }
}

#[expect(clippy::print_stderr, reason = "another process reads it, and the documents state what is measured here")]
fn tell(text: &str) {
    eprintln!("{text}");
}

/// Where one side of the proxy is to be flooded. It has answered some requests, so that what it then grows by is the
/// flood's.
async fn serve_side(proxy: &Proxy, app: SocketAddr, side: &str) -> SocketAddr {
    let addr = if side == "outbound" {
        proxy.addr
    } else {
        let port = testing::serve_port(Arc::clone(&proxy.shared), app).await;
        SocketAddr::from(([127, 0, 0, 1], port))
    };
    for _ in 0..10 {
        small(addr).await;
    }
    addr
}

/// A request of another client, answered in time.
async fn small(addr: SocketAddr) {
    let answered = async {
        let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
        let (mut sender, connection) = conn::http1::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let response = sender.send_request(get("/small")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().collect().await.unwrap().to_bytes().len()
    };
    assert_eq!(tokio::time::timeout(PATIENCE, answered).await, Ok(16 * 1024));
}

#[tokio::test]
async fn floods_leave_the_process_small_and_others_answered() {
    if let Some(role) = role() {
        let (index, side) = role.split_once(' ').unwrap();
        return FLOODS[index.parse::<usize>().unwrap()].run(side).await;
    }
    run_on_both_sides("floods_leave_the_process_small_and_others_answered", &FLOODS.map(|flood| flood.name));
}

/// Runs a test in processes of its own, for each flood and side one, whose role is `INDEX SIDE`.
fn run_on_both_sides(test: &str, floods: &[&str]) {
    let left = Mutex::new(
        (0..floods.len()).flat_map(|index| [(index, "outbound"), (index, "inbound")]).rev().collect::<Vec<_>>(),
    );
    let failures = Mutex::new(Vec::new());
    // Most of them wait for something most of the time.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((index, side)) = { left.lock().pop() } {
                    let test = format!("outbound::tests::floods::{test}");
                    let output = alone(&test, &format!("{index} {side}")).output().unwrap();
                    let text = String::from_utf8_lossy(&output.stderr);
                    match text.lines().find_map(|line| line.strip_prefix("measured: ")) {
                        Some(said) if output.status.success() => tell(&format!("measured: {said}")),
                        _ => failures.lock().push(format!("{} on the {side} side\n{text}", floods[index])),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
