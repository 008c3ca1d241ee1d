//! Ten thousand connections that send nothing, or do not finish what they begin: the proxy holds them in little memory
//! and answers others.
//!
//! Open files are limited for each process, so the clients have a process of their own beside the proxy's.

use std::{io::Read as _, process::Stdio};

use socket2::SockRef;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use weft_proto::linkerd::outbound::proxy_protocol;

use super::{
    super::fake::{Over, forward, of_kind, tls_route},
    *,
};

const TEST: &str = "ten_thousand_idle_and_half_open_connections_leave_the_process_small_and_others_answered";
/// Fewer where a process may open fewer files.
const CONNECTIONS: usize = 10_000;
/// What a process opens beside them.
const OTHER_FILES: usize = 500;
/// Connections that are opened at once. Then another client is answered, which it is after all of them were accepted:
/// queues are never full, and no handshake has to be repeated.
const AT_ONCE: usize = 100;

/// What each connection sends.
#[derive(Clone, Copy)]
struct Held {
    name: &'static str,
    opening: fn() -> Vec<u8>,
    /// Whether the Service's policy says TLS. Otherwise the outbound side leaves it to the application.
    is_tls: bool,
    /// The most that the proxy's process may grow by, in MiB, on the outbound side and on the inbound side.
    mib: [u64; 2],
}

const HELD: [Held; 3] = [
    Held { name: "idle connections", opening: Vec::new, is_tls: false, mib: [80, 180] },
    Held { name: "half a head", opening: half_a_head, is_tls: false, mib: [260, 340] },
    Held { name: "half a ClientHello", opening: half_a_hello, is_tls: true, mib: [120, 240] },
];

fn half_a_head() -> Vec<u8> {
    [request("/"), b"x: y\r\n".repeat(3)].concat()
}

fn half_a_hello() -> Vec<u8> {
    [&b"\x16\x03\x01\x07\x00\x01\x00\x06\xfc\x03\x03"[..], &[7; 400]].concat()
}

impl Held {
    /// Serves one side while another process holds connections.
    async fn serve(self, index: usize, side: &str) {
        raise_limit().unwrap();
        let app = target().await;
        let control = Control::default();
        if self.is_tls {
            let routes = vec![tls_route(&[], &Over::First(vec![forward(app)]))];
            control.policies.lock().insert(app, of_kind(proxy_protocol::Kind::Tls(proxy_protocol::Tls { routes })));
        }
        // Nothing may be over before all of them are there, however busy the machine is.
        let patient = |config: &mut Config| {
            config.outbound.detect_timeout = 4 * PATIENCE;
            config.inbound.detect_timeout = 4 * PATIENCE;
        };
        let proxy = Proxy::start_with(app, control, patient, true).await;
        let addr = serve_side(&proxy, app, side).await;
        let before = resident();
        let test = format!("outbound::tests::floods::held::{TEST}");
        let mut clients = tokio::process::Command::from(alone(&test, &format!("{index} clients {addr}")));
        clients.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut clients = clients.spawn().unwrap();
        let mut lines = BufReader::new(clients.stderr.take().unwrap()).lines();
        let said = tokio::time::timeout(4 * PATIENCE, lines.next_line()).await.expect("the clients say nothing");
        let said = said.unwrap().unwrap_or_default();
        let count = said.strip_prefix("holding ").map(str::to_owned);
        if count.is_some() {
            small(addr).await;
        }
        let grown = resident().saturating_sub(before);
        // Then the clients check that they are still connected, and end.
        drop(clients.stdin.take());
        let ended = tokio::time::timeout(PATIENCE, async {
            let mut failure = said;
            while let Ok(Some(line)) = lines.next_line().await {
                failure = format!("{failure}\n{line}");
            }
            (clients.wait().await.unwrap(), failure)
        });
        let (ended, failure) = ended.await.expect("the clients do not end");
        assert!(ended.success(), "{failure}");
        let measured = format!("{} {} on the {side} side: {grown} MiB more", count.unwrap(), self.name);
        assert!(grown <= self.mib[usize::from(side == "inbound")], "{measured}");
        tell(&format!("measured: {measured}"));
    }

    /// Opens the connections and holds them until standard input ends.
    async fn hold(self, addr: SocketAddr) {
        let limit = raise_limit().unwrap().map_or(usize::MAX, |limit| usize::try_from(limit).unwrap());
        let count = CONNECTIONS.min(limit.saturating_sub(OTHER_FILES));
        let mut held = Vec::new();
        while held.len() < count {
            let opening = (held.len()..count).take(AT_ONCE).map(|_| self.open(addr));
            held.extend(futures::future::join_all(opening).await);
            small(addr).await;
        }
        eventually("the proxy does not read what the connections send", || {
            let unread = unread(addr.port());
            unread.len() >= count && unread.iter().all(|bytes| *bytes == 0)
        })
        .await;
        tell(&format!("holding {count}"));
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        for stream in &held {
            let read = stream.try_read(&mut [0]);
            assert!(read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "{read:?}");
        }
    }

    async fn open(self, addr: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        // Closing all these connections would keep their ports from other tests for a minute.
        SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        stream.write_all(&(self.opening)()).await.unwrap();
        stream
    }
}

/// Of each connection that is established to this port of loopback, the bytes that were not read.
fn unread(port: u16) -> Vec<u64> {
    const ESTABLISHED: &str = "01";
    let local = format!("0100007F:{port:04X}");
    let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let unread = sockets.lines().filter_map(|line| {
        // sl, local address, remote address, state, tx_queue:rx_queue
        let mut fields = line.split_whitespace().skip(1);
        let is_accepted = fields.next()? == local && fields.nth(1)? == ESTABLISHED;
        let (_, received) = fields.next()?.split_once(':')?;
        is_accepted.then(|| u64::from_str_radix(received, 16).unwrap())
    });
    unread.collect()
}

#[tokio::test]
async fn ten_thousand_idle_and_half_open_connections_leave_the_process_small_and_others_answered() {
    let Some(role) = role() else { return run_on_both_sides(&format!("held::{TEST}"), &HELD.map(|held| held.name)) };
    let (index, role) = role.split_once(' ').unwrap();
    let index: usize = index.parse().unwrap();
    match role.strip_prefix("clients ") {
        Some(addr) => HELD[index].hold(addr.parse().unwrap()).await,
        None => HELD[index].serve(index, role).await,
    }
}
