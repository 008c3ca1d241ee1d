//! Floods from a server of HTTP/2, of what the proxy's clients have not asked for.

use super::*;
use crate::http::frames::next_frame;

/// What the server sends on the stream of a request.
#[derive(Clone, Copy)]
struct Flood {
    name: &'static str,
    /// The nth piece for a stream.
    piece: fn(u32, u32) -> Vec<u8>,
    pieces: u32,
    /// Requests of one client, which reads no body.
    requests: u32,
    /// Whether the proxy reads all of it, and then the server's response to the last request. Otherwise it closes the
    /// connection.
    is_read: bool,
    /// The most that the process may grow by at any time, in MiB.
    mib: u64,
}

const FLOODS: [Flood; 9] = [
    read_whole("1xx", |_, id| hint(id, &[]), 400_000, 1),
    read_whole("1xx from the table", large_hint, 4_000, 1),
    Flood { name: "small DATA", piece: message, pieces: 4_000, requests: 100, is_read: false, mib: 48 },
    read_whole("SETTINGS", |_, _| frame(4, 0, 0, &[0, 4, 0, 1, 0, 0]), 200_000, 1),
    read_whole("PING", |_, _| frame(6, 0, 0, &[7; 8]), 200_000, 1),
    read_whole("WINDOW_UPDATE", windows, 200_000, 1),
    read_whole("RST_STREAM", |_, id| reset_before(id), 4_000, 50),
    Flood { name: "empty DATA", piece: empty, pieces: 200_000, requests: 1, is_read: false, mib: 24 },
    Flood { name: "CONTINUATION", piece: endless_head, pieces: 10_000, requests: 1, is_read: false, mib: 24 },
];

/// A flood that the proxy reads, and of which nothing stays.
const fn read_whole(name: &'static str, piece: fn(u32, u32) -> Vec<u8>, pieces: u32, requests: u32) -> Flood {
    Flood { name, piece, pieces, requests, is_read: true, mib: 24 }
}

/// A head with status 103, a literal that is never indexed, and fields.
fn hint(stream: u32, fields: &[u8]) -> Vec<u8> {
    frame(1, 4, stream, &[b"\x18\x03103", fields].concat())
}

/// The first head puts a field into the table, and each names it as often as a head may.
fn large_hint(n: u32, stream: u32) -> Vec<u8> {
    // A literal field with indexing: `x: y`, which counts as 34 bytes.
    let field: &[u8] = if n == 0 { b"\x40\x01x\x01y" } else { b"" };
    hint(stream, &[field, &[0xbe; 2_100]].concat())
}

/// Status 200, and then messages of 16 bytes.
fn message(n: u32, stream: u32) -> Vec<u8> {
    let head = if n == 0 { frame(1, 4, stream, &[0x88]) } else { Vec::new() };
    [head, frame(0, 0, stream, &[7; 16])].concat()
}

/// A byte more for the connection, and one for the stream.
fn windows(_n: u32, stream: u32) -> Vec<u8> {
    [frame(8, 0, 0, &[0, 0, 0, 1]), frame(8, 0, stream, &[0, 0, 0, 1])].concat()
}

/// Resets the stream before, or the first one, so that the last one can be answered.
fn reset_before(stream: u32) -> Vec<u8> {
    frame(3, 0, stream.max(3) - 2, &[0, 0, 0, 8])
}

/// Status 200, and then DATA without a byte.
fn empty(n: u32, stream: u32) -> Vec<u8> {
    if n == 0 { frame(1, 4, stream, &[0x88]) } else { frame(0, 0, stream, &[]) }
}

/// Status 200, and fields without an end.
fn endless_head(n: u32, stream: u32) -> Vec<u8> {
    if n == 0 { frame(1, 0, stream, &[0x88]) } else { continued(stream) }
}

/// The most resident memory that this process ever had, in MiB.
fn highest() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim_end_matches("kB").trim().parse::<u64>().unwrap() / 1024
}

impl Flood {
    /// An application that floods its clients of HTTP/2, and answers those of HTTP/1. It has a thread of its own, so
    /// that it fills the proxy's socket while the proxy is busy. Returns when a connection of HTTP/2 has ended, too.
    async fn target(self) -> (SocketAddr, watch::Receiver<bool>) {
        let (closed, is_closed) = watch::channel(false);
        let (listens, addr) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let closed = Arc::new(closed);
                let addr = serve_each(move |stream| self.serve(stream, Arc::clone(&closed))).await;
                listens.send(addr).unwrap();
                std::future::pending::<()>().await;
            });
        });
        (addr.await.unwrap(), is_closed)
    }

    async fn serve(self, mut stream: TcpStream, closed: Arc<watch::Sender<bool>>) {
        let mut first = [0; 1];
        if stream.peek(&mut first).await.is_ok() && first == *b"P" {
            let _ = self.answer(&mut stream).await;
            let _ = closed.send(true);
            return;
        }
        let server = http1::Builder::new();
        let _ = server.serve_connection(TokioIo::new(stream), service_fn(super::answer)).await;
    }

    /// Floods for each request, and answers the last one if the flood is read; reads until the client closes.
    async fn answer(self, stream: &mut TcpStream) -> std::io::Result<()> {
        stream.read_exact(&mut [0; 24]).await?;
        let (mut from, mut to) = stream.split();
        let (requests, mut asked) = tokio::sync::mpsc::unbounded_channel();
        let read = async {
            while let Some(received) = next_frame(&mut from).await {
                if received.kind == 1 {
                    let _ = requests.send(received.stream);
                }
            }
            Ok(())
        };
        let write = async {
            to.write_all(&frame(4, 0, 0, &[])).await?;
            let mut left = self.requests;
            while let Some(id) = asked.recv().await {
                left -= 1;
                let mut buffer = Vec::new();
                for n in 0..self.pieces {
                    buffer.extend((self.piece)(n, id));
                    if buffer.len() >= 16 * 1024 || n + 1 == self.pieces {
                        to.write_all(&buffer).await?;
                        buffer.clear();
                    }
                }
                if self.is_read && left == 0 {
                    // Status 204.
                    to.write_all(&frame(1, 5, id, &[0x89])).await?;
                }
            }
            Ok(())
        };
        tokio::select! {
            read = read => read,
            wrote = write => wrote,
        }
    }

    /// Asks for the flood on one side, in a process that does nothing else.
    async fn run(self, side: &str) {
        let (app, mut is_closed) = self.target().await;
        let proxy = Proxy::start(app, Control::default()).await;
        let addr = serve_side(&proxy, app, side).await;
        let before = resident();
        let mut client = TcpStream::connect(addr).await.unwrap();
        let heads = (0..self.requests).flat_map(|n| frame(1, 5, stream(n), &head(0x82, "/")));
        client.write_all(&[closed_window(), heads.collect()].concat()).await.unwrap();
        let ended = async {
            if !self.is_read {
                return is_closed.wait_for(|is_closed| *is_closed).await.map(drop).unwrap();
            }
            loop {
                let received = next_frame(&mut client).await.expect("the proxy closes");
                // Informational heads come before it.
                let is_end = received.flags & 1 != 0;
                if received.kind == 1 && is_end && received.stream == stream(self.requests - 1) {
                    return assert_eq!(received.payload[0], 0x89, "{}", received.payload.escape_ascii());
                }
            }
        };
        tokio::time::timeout(4 * PATIENCE, ended).await.expect("the flood never ends");
        small(addr).await;
        let grown = highest().saturating_sub(before);
        assert!(grown <= self.mib, "{} on the {side} side: {grown} MiB more", self.name);
        tell(&format!("measured: {} on the {side} side: {grown} MiB more", self.name));
    }
}

#[tokio::test]
async fn floods_of_a_server_leave_the_process_small_and_others_answered() {
    if let Some(role) = role() {
        let (index, side) = role.split_once(' ').unwrap();
        return FLOODS[index.parse::<usize>().unwrap()].run(side).await;
    }
    run_on_both_sides(
        "endpoint::floods_of_a_server_leave_the_process_small_and_others_answered",
        &FLOODS.map(|flood| flood.name),
    );
}
