//! How an endpoint is reached: in plaintext or by TLS, with or without a header, in which version of HTTP, and by whom.

use std::sync::atomic::AtomicUsize;

use weft_proto::linkerd::destination::{
    Http2ClientParams,
    http2_client_params::{FlowControl, KeepAlive},
};

use super::{
    resilience::{Script, changed, duration, metric, request_timeout},
    *,
};
use crate::{
    config::Windows,
    discover::endpoint::EndpointInfo,
    http::{
        body::Body,
        frames::{Received, frame, next_frame},
        informational::Informational,
    },
    outbound::{endpoint::Endpoint, h1},
    transport_header::{ALPN, TransportHeader},
};

/// A proxy whose clients call one service.
async fn proxy(change: impl FnOnce(&mut Config)) -> Proxy {
    let control = Control::default();
    let service = "10.1.5.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    Proxy::start_with(service, control, change, true).await
}

#[tokio::test]
async fn the_pod_itself_is_reached_in_plaintext_whatever_its_identity() {
    for require_mtls in [false, true] {
        let proxy = proxy(|config| {
            config.inbound.ips = vec!["127.0.0.1".parse().unwrap()];
            config.outbound.require_mtls = require_mtls;
        })
        .await;
        let app = application("itself").await;
        let port_for_headers = unused_addr().port();
        proxy.control.update(SERVICE, add(vec![endpoint(app, Some((testing::OWN, port_for_headers)))]));
        assert_eq!(text(proxy.get("/").await).await, "itself / HTTP/1.1", "plaintext to its port, and no HTTP/2");
        let metrics = proxy.scrape();
        let of_app = |line: &&str| line.starts_with("request_total") && line.contains(&format!(r#"="{app}""#));
        let line = metrics.lines().find(of_app).expect("the request is counted");
        assert!(line.contains(r#"tls="no_identity",no_tls_reason="loopback""#), "{line}");
    }
}

#[tokio::test]
async fn an_endpoint_of_a_service_has_its_name_as_authority() {
    let app = application("app").await;
    for (path, authority) in [
        ("server.demo.svc.cluster.local:8080", "server.demo.svc.cluster.local:8080"),
        // As in Linkerd, without HTTP's own port.
        ("server.demo.svc.cluster.local:80", "server.demo.svc.cluster.local"),
    ] {
        let control = Control::default();
        let service = "10.1.5.2:80".parse().unwrap();
        control.policies.lock().insert(service, policy(path, vec![]));
        control.update(path, add(vec![endpoint(app, None)]));
        let proxy = Proxy::start(service, control).await;
        text(proxy.get("/").await).await;
        for (name, peer) in
            [("request_total", ""), ("response_latency_ms_count", ""), ("tcp_open_total", r#"peer="dst","#)]
        {
            let begin = format!(r#"{name}{{direction="outbound",{peer}authority="{authority}",target_addr="{app}","#);
            eventually(&begin, || proxy.scrape().lines().any(|line| line.starts_with(&begin))).await;
        }
    }
    let proxy = Proxy::start(app, Control::default()).await;
    text(proxy.get("/").await).await;
    assert!(!proxy.scrape().contains("authority="), "an address has none: {}", proxy.scrape());
}

#[tokio::test]
async fn a_header_is_sent_where_the_endpoint_has_a_port_for_it_and_negotiates_it() {
    for (has_port, alpn, negotiates) in [(true, &[ALPN][..], true), (true, &[][..], false), (false, &[ALPN][..], false)]
    {
        let proxy = proxy(|_| {}).await;
        let peer = Peer::listen_with(&proxy.mesh.credentials(SERVER), alpn).await;
        let workload = SocketAddr::from(([127, 0, 0, 1], if has_port { 8080 } else { peer.port() }));
        let mut meshed = endpoint(workload, Some((SERVER, peer.port())));
        if !has_port {
            meshed.protocol_hint.as_mut().unwrap().opaque_transport = None;
        }
        proxy.control.update(SERVICE, add(vec![meshed]));
        tokio::spawn(async move {
            let mut stream = peer.accept_tls().await;
            let negotiated = stream.get_ref().1.alpn_protocol().is_some();
            if negotiated {
                assert_eq!(TransportHeader::read(&mut stream).await.unwrap().port.get(), workload.port());
            }
            // A header that was not negotiated would be no beginning of HTTP/2.
            let service = service_fn(move |request: Request<Incoming>| async move {
                let seen = format!("{negotiated} {:?}", request.version());
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(seen))))
            });
            http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await
        });
        let seen = text(proxy.get("/").await).await;
        assert_eq!(seen, format!("{negotiates} HTTP/2.0"), "port {has_port}, ALPN of {}", alpn.len());
    }
}

#[tokio::test]
async fn http1_stays_http1_for_a_meshed_endpoint_that_is_not_said_to_take_http2() {
    let proxy = proxy(|_| {}).await;
    let (peer, port) = Peer::listen(&proxy.mesh.credentials(SERVER)).await;
    let mut unknown = endpoint("127.0.0.1:8080".parse().unwrap(), Some((SERVER, port)));
    unknown.protocol_hint.as_mut().unwrap().protocol = None;
    proxy.control.update(SERVICE, add(vec![unknown]));
    tokio::spawn(async move {
        loop {
            let (header, stream) = peer.accept().await;
            let service = service_fn(move |request: Request<Incoming>| async move {
                let seen = format!("{:?} {:?}", header.protocol, request.version());
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(seen))))
            });
            tokio::spawn(async move {
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    assert_eq!(text(proxy.get("/").await).await, "Some(Http1) HTTP/1.1");
    let request = Request::get("http://server.demo/").body(Full::default()).unwrap();
    let response = proxy.http2().await.send_request(request).await.unwrap();
    assert_eq!(text(response).await, "Some(Http2) HTTP/2.0");
}

#[tokio::test]
async fn a_meshed_endpoint_gets_a_request_only_as_the_identity_that_it_requires() {
    let (proxy, peer, _) = meshed().await;
    let reached = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&reached);
    tokio::spawn(async move {
        loop {
            let (_, stream) = peer.accept().await;
            count.fetch_add(1, Ordering::Relaxed);
            let service = service_fn(|request: Request<Incoming>| async move {
                assert!(!request.headers().contains_key("l5d-require-id"));
                Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
            });
            tokio::spawn(http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service));
        }
    });
    for (required, status, connections) in [(testing::OWN, StatusCode::BAD_GATEWAY, 0), (SERVER, StatusCode::OK, 1)] {
        let mut request = get("/");
        request.headers_mut().insert("l5d-require-id", required.parse().unwrap());
        assert_eq!(proxy.http1().await.send_request(request).await.unwrap().status(), status);
        assert_eq!(reached.load(Ordering::Relaxed), connections);
    }
}

/// A listener that no connection reaches, because its backlog is full, and what fills it.
pub(super) async fn full() -> (TcpListener, Vec<TcpStream>) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let full = socket.listen(1).unwrap();
    let addr = full.local_addr().unwrap();
    // The kernel lets as many wait as the backlog says and one more, and drops the handshakes of others.
    let mut waiting = Vec::new();
    while let Ok(stream) = tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(addr)).await {
        waiting.push(stream.unwrap());
        assert!(waiting.len() < 8, "the backlog is full");
    }
    (full, waiting)
}

#[tokio::test]
async fn an_endpoint_that_takes_no_connection_in_time_is_a_gateway_timeout() {
    let (full, _waiting) = full().await;
    let addr = full.local_addr().unwrap();
    let impatient = |config: &mut Config| config.outbound.connect_timeout = Duration::from_millis(100);
    let proxy = Proxy::start_with(addr, Control::default(), impatient, true).await;
    let response = proxy.get("/").await;
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(response.headers()["l5d-proxy-error"], "connect timed out");
    assert_eq!(response.headers()["connection"], "close");
    assert!(proxy.scrape().contains(r#"outbound_http_errors_total{error="connect timeout"} 1"#));
}

#[tokio::test]
async fn an_endpoint_rests_though_its_requests_gave_up() {
    let (full, _waiting) = full().await;
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let control = Control::default();
        let service = "10.1.5.3:80".parse().unwrap();
        let timeouts = request_timeout(Duration::from_secs(1));
        control.policies.lock().insert(service, changed(|rule| rule.timeouts = Some(timeouts)));
        let addrs = [full.local_addr().unwrap(), Script::default().listen().await];
        control.update(SERVICE, add(addrs.map(|addr| endpoint(addr, None)).to_vec()));
        let slow = |config: &mut Config| {
            config.outbound.connect_timeout = Duration::from_secs(2);
            config.outbound.backoff_min = Duration::from_secs(60);
            config.outbound.backoff_max = Duration::from_secs(60);
        };
        let proxy = Proxy::start_with(service, control, slow, true).await;
        let ask = async || {
            if version == Version::HTTP_11 {
                return proxy.get("/").await.status();
            }
            let request = Request::get("http://server.demo/").body(Full::default()).unwrap();
            proxy.http2().await.send_request(request).await.unwrap().status()
        };
        settled(async || {
            ask().await;
            let pending = metric(&proxy, "outbound_http_balancer_endpoints{endpoint_state=\"pending\"");
            if pending == 1 { Ok(()) } else { Err("the endpoint does not rest") }
        })
        .await;
        for _ in 0..10 {
            assert_eq!(ask().await, StatusCode::OK, "{version:?}");
        }
    }
}

#[tokio::test]
async fn attempts_whose_requests_were_given_up_are_bounded() {
    let (full, _waiting) = full().await;
    let mut config = testing::config();
    config.outbound.allow_loopback = true;
    config.outbound.connect_timeout = Duration::from_secs(60);
    config.outbound.max_idle_connections = 2;
    let (shared, _drain) = testing::shared(config, &Mesh::new());
    let info = Arc::new(EndpointInfo::unmeshed(full.local_addr().unwrap()));
    let endpoint = Arc::new(Endpoint::new(shared, info, None));
    let none = Informational::none();
    let ask = || Box::pin(h1::send(&endpoint, None, Box::new(Request::new(Body::Empty)), true, &none, || {}));
    let mut waits = ask();
    assert!(futures::poll!(waits.as_mut()).is_pending());
    for _ in 0..5 {
        assert!(futures::poll!(ask()).is_pending());
    }
    // The endpoint is this test's, of the attempt that is waited for, and of two others.
    let attempts = || (endpoint.given_up.load(Ordering::Relaxed), Arc::strong_count(&endpoint));
    eventually("the others are aborted", || attempts() == (2, 4)).await;
    assert!(futures::poll!(waits.as_mut()).is_pending());
}

/// An application of HTTP/2 that answers the first request of a connection completely, and others with a head alone,
/// and counts pings.
async fn pinged() -> (SocketAddr, Arc<AtomicUsize>) {
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;
    const ACK: u8 = 1;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    let pings = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&pings);
    let addr = serve_each(move |mut stream| {
        let counted = Arc::clone(&counted);
        async move {
            let mut preface = [0; 24];
            stream.read_exact(&mut preface).await.unwrap();
            let mut is_first = true;
            stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            while let Some(Received { kind, flags, stream: id, payload }) = next_frame(&mut stream).await {
                let answer = match kind {
                    SETTINGS if flags & ACK == 0 => frame(SETTINGS, ACK, 0, &[]),
                    PING if flags & ACK == 0 => {
                        counted.fetch_add(1, Ordering::Relaxed);
                        frame(PING, ACK, 0, &payload)
                    }
                    // `:status` 200 in HPACK.
                    HEADERS => {
                        let end = if std::mem::take(&mut is_first) { END_STREAM } else { 0 };
                        frame(HEADERS, END_HEADERS | end, id, &[0x88])
                    }
                    _ => continue,
                };
                if stream.write_all(&answer).await.is_err() {
                    return;
                }
            }
        }
    });
    (addr.await, pings)
}

/// A client of a proxy whose endpoint is pinged so often, if idle ones are, and the endpoint's count.
struct Pinged {
    client: conn::http2::SendRequest<Full<Bytes>>,
    pings: Arc<AtomicUsize>,
    _proxy: Proxy,
}

impl Pinged {
    async fn start(interval: Duration, while_idle: bool) -> Self {
        let proxy = proxy(|_| {}).await;
        let (app, pings) = pinged().await;
        let mut pinging = endpoint(app, None);
        let keep_alive = KeepAlive { interval: duration(interval), timeout: duration(100 * interval), while_idle };
        pinging.http2 = Some(Http2ClientParams { keep_alive: Some(keep_alive), ..Default::default() });
        proxy.control.update(SERVICE, add(vec![pinging]));
        Self { client: proxy.http2().await, pings, _proxy: proxy }
    }

    async fn ask(&mut self) -> Response<Incoming> {
        let request = Request::get("http://server.demo/").body(Full::default()).unwrap();
        self.client.send_request(request).await.unwrap()
    }

    /// Waits for `pings` further pings.
    async fn more(&self, pings: usize) {
        let before = self.count();
        crate::testing::eventually("the connection is pinged", || self.count() >= before + pings).await;
    }

    fn count(&self) -> usize {
        self.pings.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn idle_connections_are_pinged_only_if_the_endpoint_says_so() {
    let interval = Duration::from_millis(20);
    let (mut always, mut in_use) = (Pinged::start(interval, true).await, Pinged::start(interval, false).await);
    for pinged in [&mut always, &mut in_use] {
        assert_eq!(text(pinged.ask().await).await, "");
    }
    // One may be on its way.
    always.more(3).await;
    let before = in_use.count();
    always.more(15).await;
    assert_eq!(in_use.count(), before, "an idle connection is pinged");
    let held = in_use.ask().await;
    in_use.more(3).await;
    drop(held);
}

/// The windows of streams and of the connection that a client of HTTP/2 announces first (RFC 9113 section 6.5.2).
async fn announced(stream: &mut TcpStream) -> Windows {
    const SETTINGS: u8 = 4;
    const WINDOW_UPDATE: u8 = 8;
    const INITIAL_WINDOW_SIZE: [u8; 2] = [0, 4];
    let mut windows = Windows { stream: 65_535, connection: 65_535 };
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).await.unwrap();
    loop {
        let Received { kind, payload, .. } = next_frame(stream).await.unwrap();
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        match kind {
            SETTINGS => {
                let named = payload.chunks(6).find(|setting| setting[..2] == INITIAL_WINDOW_SIZE);
                windows.stream = named.map_or(windows.stream, |setting| number(&setting[2..]));
            }
            WINDOW_UPDATE => {
                windows.connection += number(&payload);
                return windows;
            }
            other => panic!("a frame of type {other} comes before the connection's window"),
        }
    }
}

#[tokio::test]
async fn connections_to_an_endpoint_have_the_windows_that_discovery_names() {
    let of_settings = testing::config().http2.windows;
    let named = FlowControl {
        initial_stream_window_size: 100_000,
        initial_connection_window_size: 1_000_000,
        adaptive_flow_control: false,
    };
    for (flow_control, expected) in [
        (None, of_settings),
        (Some(named), Windows { stream: 100_000, connection: 1_000_000 }),
        (
            Some(FlowControl { initial_stream_window_size: 0, ..named }),
            Windows { connection: 1_000_000, ..of_settings },
        ),
        (Some(FlowControl { adaptive_flow_control: true, ..named }), of_settings),
    ] {
        let proxy = proxy(|_| {}).await;
        let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut addr = endpoint(app.local_addr().unwrap(), None);
        addr.http2 = Some(Http2ClientParams { flow_control, ..Default::default() });
        proxy.control.update(SERVICE, add(vec![addr]));
        let mut client = proxy.http2().await;
        let request = Request::get("http://server.demo/").body(Full::default()).unwrap();
        let _asked = tokio::spawn(client.send_request(request));
        let (mut stream, _) = app.accept().await.unwrap();
        assert_eq!(announced(&mut stream).await, expected, "{flow_control:?}");
    }
}
