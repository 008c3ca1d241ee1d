//! A process without free file descriptors: no endpoint is blamed, connections wait, and everything goes on afterwards.
//!
//! The limit is the process's, so each of these tests has a process of its own, this test's program started again.

use std::task::Poll;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::TcpSocket;

use super::{
    faults::application_of_everything,
    raw::{BYTES, named},
    resilience::{ejecting, metric},
    *,
};
use crate::testing::{Lines, alone, role};

/// Clients of each protocol.
const EACH: usize = 3;
/// How long something that has to happen may take on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(30);
/// What the log says for each attempt to accept that fails.
const PAUSING: &str = "cannot accept connections, pausing";

/// As long as it lives, the process can open nothing.
struct Exhausted {
    soft: u64,
    hard: u64,
}

impl Exhausted {
    fn begin() -> Self {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 0, hard).unwrap();
        let exhausted = Self { soft, hard };
        let refused = std::net::TcpListener::bind("127.0.0.1:0").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
        exhausted
    }
}

impl Drop for Exhausted {
    fn drop(&mut self) {
        setrlimit(Resource::RLIMIT_NOFILE, self.soft, self.hard).unwrap();
    }
}

/// Whether this process is the test's own; otherwise it has started one, which has ended well.
fn is_alone(test: &str) -> bool {
    if role().is_some() {
        return true;
    }
    let output = alone(&format!("outbound::tests::descriptors::{test}"), "alone").output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "there is no such test: {stdout}");
    false
}

/// How many files this process has open.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Clients that are connected and have sent no request.
struct Clients {
    http1: Vec<conn::http1::SendRequest<Full<Bytes>>>,
    http2: Vec<conn::http2::SendRequest<Full<Bytes>>>,
    opaque: Vec<TcpStream>,
}

impl Clients {
    async fn connect(addr: SocketAddr) -> Self {
        let mut clients = Self { http1: Vec::new(), http2: Vec::new(), opaque: Vec::new() };
        for _ in 0..EACH {
            let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
            let (sender, connection) = conn::http1::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            clients.http1.push(sender);
            let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
            let (sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
            tokio::spawn(connection);
            clients.http2.push(sender);
            clients.opaque.push(TcpStream::connect(addr).await.unwrap());
        }
        clients
    }

    /// One after another sends something; the answers to requests, and how many get the bytes that they have sent.
    async fn exchange(self) -> (Vec<Response<Incoming>>, usize) {
        let mut answers = Vec::new();
        for mut sender in self.http1 {
            answers.push(timely(sender.send_request(get("/"))).await.unwrap());
        }
        for mut sender in self.http2 {
            let request = Request::get("http://server.demo/").body(Full::default()).unwrap();
            answers.push(timely(sender.send_request(request)).await.unwrap());
        }
        let mut echoed = 0;
        for mut client in self.opaque {
            client.write_all(b"\0bytes").await.unwrap();
            let mut received = [1; 6];
            match timely(client.read_exact(&mut received)).await {
                Ok(_) => echoed += usize::from(received == *b"\0bytes"),
                // Closed, without a byte.
                Err(_) => assert_eq!(received, [1; 6]),
            }
        }
        (answers, echoed)
    }
}

async fn timely<F: Future>(happens: F) -> F::Output {
    tokio::time::timeout(PATIENCE, happens).await.unwrap_or_else(|_| panic!("it hangs"))
}

#[tokio::test]
async fn endpoints_are_not_blamed_for_missing_descriptors() {
    if !is_alone("endpoints_are_not_blamed_for_missing_descriptors") {
        return;
    }
    let apps = [application_of_everything().await, application_of_everything().await];
    let service = "10.1.8.1:80".parse().unwrap();
    let control = Control::default();
    // One failure would eject an endpoint.
    control.policies.lock().insert(service, ejecting(policy(SERVICE, vec![]), 1));
    control.update(SERVICE, add(apps.map(|app| endpoint(app, None)).to_vec()));
    let proxy = Proxy::start(service, control).await;
    // Discovery has its connections now. None to an endpoint is kept after HTTP/1.0.
    let answer = timely(proxy.exchange(b"GET / HTTP/1.0\r\n\r\n")).await;
    assert!(answer.contains(" 200 "), "{answer}");
    let mut first = proxy.connect().await;
    first.write_all(b"\0bytes").await.unwrap();
    timely(first.read_exact(&mut [0; 6])).await.unwrap();
    drop(first);
    let clients = Clients::connect(proxy.addr).await;
    let accepted = || metric(&proxy, "tcp_open_connections{direction=\"outbound\",peer=\"src\"");
    eventually("the clients are not accepted", || accepted() == 3 * EACH as u64).await;

    let exhausted = Exhausted::begin();
    let (answers, echoed) = clients.exchange().await;
    for answer in answers {
        assert_eq!(answer.status(), StatusCode::BAD_GATEWAY);
        let reason = answer.headers()["l5d-proxy-error"].to_str().unwrap();
        assert!(reason.contains("Too many open files"), "{reason}");
    }
    assert_eq!(echoed, 0);
    let failed = |protocol: &str| -> u64 {
        let family = format!("outbound_{protocol}_errors_total{{");
        let scrape = proxy.scrape();
        let of_io = scrape.lines().filter(|line| line.starts_with(&family) && line.contains("error=\"i/o\""));
        of_io.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    };
    assert_eq!((failed("http"), failed("tcp")), (2 * EACH as u64, EACH as u64), "{}", proxy.scrape());
    for protocol in ["http", "tcp"] {
        let endpoints =
            |state| metric(&proxy, &format!("outbound_{protocol}_balancer_endpoints{{endpoint_state=\"{state}\""));
        assert_eq!((endpoints("ready"), endpoints("pending")), (2, 0), "{protocol}\n{}", proxy.scrape());
    }

    drop(exhausted);
    let (answers, echoed) = Clients::connect(proxy.addr).await.exchange().await;
    assert!(answers.iter().all(|answer| answer.status() == StatusCode::OK), "{answers:?}");
    assert_eq!(echoed, EACH);
    for protocol in ["http", "tcp"] {
        let shut = metric(&proxy, &format!("outbound_{protocol}_balancer_queue_gate_shut_total"));
        assert_eq!(shut, 0, "{protocol}\n{}", proxy.scrape());
    }
}

#[tokio::test]
async fn an_application_is_reached_again_when_there_are_descriptors() {
    if !is_alone("an_application_is_reached_again_when_there_are_descriptors") {
        return;
    }
    let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
    let app = application_of_everything().await;
    let addr = SocketAddr::from(([127, 0, 0, 1], testing::serve_port(Arc::clone(&shared), app).await));
    let before = open_files();
    let clients = Clients::connect(addr).await;
    // Both ends of each are in this process.
    eventually("the clients are not accepted", || open_files() == before + 2 * 3 * EACH).await;

    let exhausted = Exhausted::begin();
    let (answers, echoed) = clients.exchange().await;
    assert!(answers.iter().all(|answer| answer.status() == StatusCode::BAD_GATEWAY), "{answers:?}");
    assert_eq!(echoed, 0);

    drop(exhausted);
    let (answers, echoed) = Clients::connect(addr).await.exchange().await;
    assert!(answers.iter().all(|answer| answer.status() == StatusCode::OK), "{answers:?}");
    assert_eq!(echoed, EACH);
}

#[tokio::test]
async fn connections_wait_for_descriptors_and_are_served() {
    if !is_alone("connections_wait_for_descriptors_and_are_served") {
        return;
    }
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n";
    let app = named("app").await;
    let proxy = Proxy::start(app, Control::default()).await;
    let inbound = testing::serve_port(Arc::clone(&proxy.shared), app).await;
    for addr in [proxy.addr, SocketAddr::from(([127, 0, 0, 1], inbound))] {
        // What the proxy has to find out about the address is known then.
        let mut first = TcpStream::connect(addr).await.unwrap();
        first.write_all(REQUEST).await.unwrap();
        timely(first.read_to_end(&mut Vec::new())).await.unwrap();

        let log = Lines::default();
        let _guard = log.of_this_thread("trace");
        let sockets: Vec<_> = (0..2 * EACH).map(|_| TcpSocket::new_v4().unwrap()).collect();
        let exhausted = Exhausted::begin();
        let mut clients = Vec::new();
        for (socket, bytes) in sockets.into_iter().zip([REQUEST, BYTES].into_iter().cycle()) {
            let mut client = timely(socket.connect(addr)).await.unwrap();
            client.write_all(bytes).await.unwrap();
            clients.push(client);
        }
        eventually("it does not try again", || log.text().matches(PAUSING).count() >= 3).await;
        for client in &clients {
            assert_eq!(client.try_read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        }

        drop(exhausted);
        for mut client in clients {
            let mut answer = String::new();
            timely(client.read_to_string(&mut answer)).await.unwrap();
            assert!(answer.ends_with("app"), "{answer}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn accepting_without_descriptors_is_tried_ten_times_a_second() {
    if !is_alone("accepting_without_descriptors_is_tried_ten_times_a_second") {
        return;
    }
    let bound = listen::bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
    let addr = bound.local_addr().unwrap();
    let listener = Listener::new(bound, SocketConfig::default()).unwrap();
    // Once something was accepted the listener counts as ready, so that time passes only by pauses.
    let _first = std::net::TcpStream::connect(addr).unwrap();
    let _accepted = listener.accept().await;
    let waiting = std::net::TcpStream::connect(addr).unwrap();
    let log = Lines::default();
    let _guard = log.of_this_thread("trace");
    let exhausted = Exhausted::begin();
    let mut accepting = std::pin::pin!(listener.accept());
    for _ in 0..100 {
        // A loop without a pause ends with the budget that tokio gives a task for each turn.
        let waits = std::future::poll_fn(|cx| Poll::Ready(accepting.as_mut().poll(cx).is_pending())).await;
        assert!(waits);
        tokio::time::advance(Duration::from_millis(101)).await;
    }
    assert_eq!(log.text().matches(PAUSING).count(), 100);

    drop(exhausted);
    assert_eq!(accepting.await.peer, waiting.local_addr().unwrap());
}
