//! The example client and server against each other on loopback, each protocol with its opposite: what works without a
//! mesh is the baseline for what has to work with one.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::oneshot,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use weft_examples::{
    client::{self, Load, Phase, Protocol, Report},
    server::{EchoApp, Seen, Upstream},
};

/// Longest wait for something that should happen soon, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn load(protocol: Protocol, target: String) -> Load {
    Load {
        protocol,
        target,
        path: "/hello?x=1".to_owned(),
        count: Some(30),
        duration: None,
        stop: CancellationToken::new(),
        concurrency: 3,
        pause: Duration::ZERO,
        timeout: PATIENCE,
        fresh: false,
        mapped: false,
        phase: Phase::default(),
    }
}

async fn serve(banner: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let app = EchoApp { pod: Arc::from("web-0"), upstream: None };
    if banner {
        tokio::spawn(app.serve_banner(listener));
    } else {
        tokio::spawn(app.serve_http(listener, std::future::pending()));
    }
    target
}

/// A port that refuses connections. The socket reserves it: no other process can listen there until it is dropped.
fn refusing() -> (TcpSocket, String) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap().to_string();
    (socket, address)
}

/// The address of a relay to the target, and a receiver that gets a message after the first answer.
async fn through(target: String) -> (String, oneshot::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (answered_tx, answered) = oneshot::channel();
    tokio::spawn(async move {
        let mut answered_tx = Some(answered_tx);
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&target).await.unwrap();
            let answered_tx = answered_tx.take();
            tokio::spawn(async move {
                let mut bytes = [0; 1024];
                let read = client.read(&mut bytes).await.unwrap();
                server.write_all(&bytes[..read]).await.unwrap();
                let read = server.read(&mut bytes).await.unwrap();
                client.write_all(&bytes[..read]).await.unwrap();
                answered_tx.map(|answered| answered.send(()));
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    (address, answered)
}

fn assert_all_answered(report: &Report) {
    assert_eq!((report.requests, report.failures), (30, 0), "{report:?}");
    assert_eq!(report.by_backend.get("web-0"), Some(&30));
    assert!(report.peer_addr_ok);
    assert_eq!(report.local_ips, ["127.0.0.1"]);
    assert_eq!(report.seen_peer_ips, ["127.0.0.1"]);
    assert!(report.latency_ms.p50 > 0.0 && report.latency_ms.p50 <= report.latency_ms.max);
}

#[tokio::test]
async fn every_protocol_is_answered_on_kept_connections() {
    let (http, banner) = (serve(false).await, serve(true).await);
    for protocol in [Protocol::Http1, Protocol::Http2, Protocol::Grpc, Protocol::WebSocket, Protocol::Banner] {
        let target = if protocol == Protocol::Banner { &banner } else { &http };
        let report = client::drive(load(protocol, target.clone())).await;
        assert_all_answered(&report);
        assert_eq!(report.connections, 3, "{protocol:?}");
    }
}

#[tokio::test]
async fn fresh_opens_a_connection_for_every_request() {
    let http = serve(false).await;
    for protocol in [Protocol::Http1, Protocol::Http2, Protocol::Grpc, Protocol::WebSocket] {
        let report = client::drive(Load { fresh: true, ..load(protocol, http.clone()) }).await;
        assert_all_answered(&report);
        assert_eq!(report.connections, 30, "{protocol:?}");
    }
}

#[tokio::test]
async fn mapped_dials_ipv4_through_an_ipv6_socket() {
    let http = serve(false).await;
    let report = client::drive(Load { mapped: true, ..load(Protocol::Http1, http) }).await;
    assert_eq!(report.failures, 0, "{report:?}");
    assert!(report.peer_addr_ok);
    assert_eq!(report.local_ips, ["::ffff:127.0.0.1"]);
}

#[tokio::test]
async fn a_refused_connection_is_a_failure_in_every_protocol() {
    let (_reserved, target) = refusing();
    for protocol in [Protocol::Http1, Protocol::Http2, Protocol::Grpc, Protocol::WebSocket, Protocol::Banner] {
        let report = client::drive(load(protocol, target.clone())).await;
        assert_eq!((report.requests, report.failures), (30, 30), "{protocol:?}");
        assert!(report.errors.keys().all(|error| error.starts_with("connect: ")), "{report:?}");
    }
}

#[tokio::test]
async fn a_server_that_says_no_is_counted_by_status() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = stream.write_all(answer).await;
        }
    });
    for protocol in [Protocol::Http1, Protocol::WebSocket] {
        let report = client::drive(Load { fresh: true, concurrency: 1, ..load(protocol, target.clone()) }).await;
        assert_eq!(report.failures, 30, "{report:?}");
        assert!(report.errors.contains_key("status 403"), "{report:?}");
    }
}

#[tokio::test]
async fn failures_are_reported_with_what_happened_when_they_were_sent() {
    let phase = Phase::default();
    phase.begin("nobody listens");
    let (_reserved, nobody) = refusing();
    let report = client::drive(Load { phase, ..load(Protocol::Http1, nobody) }).await;
    let [failed] = &*report.failed else { panic!("{report:?}") };
    assert_eq!((failed.phase.as_str(), failed.count), ("nobody listens", 30));
    assert!(failed.error.starts_with("connect: ") && failed.first_ms <= failed.last_ms, "{failed:?}");
    assert!(client::drive(load(Protocol::Http1, serve(false).await)).await.failed.is_empty());
}

#[tokio::test]
async fn a_duration_ends_the_load() {
    let http = serve(false).await;
    // Long enough for one request, however busy the machine is.
    let load = Load { count: None, duration: Some(Duration::from_secs(1)), ..load(Protocol::Http1, http) };
    let report = client::drive(load).await;
    assert!(report.requests > 0 && report.failures == 0, "{report:?}");
}

#[tokio::test]
async fn a_load_ends_when_it_is_told() {
    let stop = CancellationToken::new();
    let (target, answered) = through(serve(false).await).await;
    let endless = Load { count: None, stop: stop.clone(), ..load(Protocol::Http1, target) };
    let sent = tokio::spawn(client::drive(endless));
    timeout(PATIENCE, answered).await.unwrap().unwrap();
    assert!(!sent.is_finished());
    stop.cancel();
    let report = timeout(PATIENCE, sent).await.unwrap().unwrap();
    assert!(report.requests > 0 && report.failures == 0, "{report:?}");
}

#[tokio::test]
async fn a_probe_tells_both_ends_and_the_kernels_answers() {
    let http = serve(false).await;
    let probe = client::probe(&http, false).await.unwrap();
    assert_eq!(probe.dialled, http);
    assert_eq!(probe.peer, http);
    assert!(probe.local.starts_with("127.0.0.1:"));
}

async fn serve_in_front_of(upstream: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let app = EchoApp { pod: Arc::from("front-0"), upstream: Some(Upstream::new(upstream)) };
    tokio::spawn(app.serve_http(listener, std::future::pending()));
    target
}

#[tokio::test]
async fn an_answer_has_the_upstreams_answer_in_it() {
    let front = serve_in_front_of(&serve(false).await).await;
    let mut stream = TcpStream::connect(&front).await.unwrap();
    stream.write_all(b"GET /cart?x=1 HTTP/1.1\r\nhost: front\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let seen: Seen = serde_json::from_str(body).unwrap();
    let upstream = seen.upstream.unwrap();
    assert_eq!((seen.pod.as_str(), upstream.pod.as_str(), upstream.path.as_str()), ("front-0", "web-0", "/cart?x=1"));
}

#[tokio::test]
async fn a_missing_upstream_fails_requests_but_not_probes() {
    let (_reserved, nobody) = refusing();
    let front = serve_in_front_of(&nobody).await;
    let report = client::drive(load(Protocol::Http1, front.clone())).await;
    assert_eq!(report.errors.get("status 502"), Some(&30), "{report:?}");
    let probes = client::drive(Load { path: "/healthz".to_owned(), ..load(Protocol::Http1, front) }).await;
    assert_eq!(probes.failures, 0, "{probes:?}");
}

#[tokio::test]
async fn a_stopped_server_closes_idle_connections_and_takes_no_new_ones() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let app = EchoApp { pod: Arc::from("web-0"), upstream: None };
    let server = tokio::spawn(app.serve_http(listener, async { drop(stopped.await) }));
    let mut kept = TcpStream::connect(target).await.unwrap();
    kept.write_all(b"GET / HTTP/1.1\r\nhost: web\r\n\r\n").await.unwrap();
    assert!(kept.read(&mut [0; 1024]).await.unwrap() > 0);
    drop(stop);
    timeout(PATIENCE, server).await.unwrap().unwrap();
    assert_eq!(kept.read(&mut [0; 1024]).await.unwrap(), 0);
    assert!(TcpStream::connect(target).await.is_err());
}
