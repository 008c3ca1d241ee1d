//! The outbound side against a control plane and endpoints on loopback, from an accepted connection to an endpoint.

mod close;
mod connecting;
mod control;
mod descriptors;
mod distribution;
mod egress;
mod fake;
mod faults;
mod fidelity;
mod floods;
mod gateway;
mod identity;
mod ingress;
mod log;
mod metrics;
mod pair;
mod profile;
mod protocols;
mod raw;
mod resets;
mod resilience;
mod tap;
mod trace;
mod transparency;
mod unprocessed;
mod unread;
mod websocket;

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::{
    body::{Frame, Incoming},
    client::conn,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use weft_proto::linkerd::{
    destination::{DestinationProfile, protocol_hint},
    outbound::http_route,
};
use weft_runtime::drain::Drain;
use weft_tls::credentials::Credentials;

use super::*;
use crate::{
    config::{Config, SocketConfig},
    inbound::testing::{self, Mesh},
    listen,
    shared::Shared,
    testing::{eventually, serve_each, settled, unused_addr},
    transport_header::SessionProtocol,
};

use fake::{Call, Control, Instead, Peer, add, endpoint, failing, fails_fast, forbidden, policy, wait_for_endpoints};

const SERVER: &str = "server.demo.serviceaccount.identity.linkerd.cluster.local";
const SERVICE: &str = "server.demo.svc.cluster.local:80";

/// A worker and its fakes.
struct Proxy {
    addr: SocketAddr,
    control: Control,
    mesh: Mesh,
    drain: Option<Drain>,
    shared: Arc<Shared>,
    worker: Arc<Worker>,
}

impl Proxy {
    /// Starts a worker for which the original destination of every connection is `orig_dst`.
    async fn start(orig_dst: SocketAddr, control: Control) -> Self {
        Self::start_with(orig_dst, control, |_| {}, true).await
    }

    async fn start_with(
        orig_dst: SocketAddr,
        control: Control,
        change: impl FnOnce(&mut Config),
        credentials: bool,
    ) -> Self {
        let credentials = if credentials { None } else { Some(watch::channel(None).1) };
        Self::start_certified(orig_dst, control, change, credentials).await
    }

    /// Starts a worker with these credentials, or with an hour's.
    async fn start_certified(
        orig_dst: SocketAddr,
        control: Control,
        change: impl FnOnce(&mut Config),
        credentials: Option<watch::Receiver<Option<Arc<Credentials>>>>,
    ) -> Self {
        let mesh = Mesh::new();
        let mut config = testing::config();
        let controller = control.serve().await;
        config.destination.control.port = controller.port();
        config.policy.control.port = controller.port();
        config.destination.networks = vec!["0.0.0.0/0".parse().unwrap()];
        config.outbound.allow_loopback = true;
        wait_for_endpoints(&mut config, Duration::from_secs(60));
        change(&mut config);
        let (mut shared, drain) = testing::shared(config, &mesh);
        if let Some(credentials) = credentials {
            Arc::get_mut(&mut shared).unwrap().credentials = credentials;
        }
        let outbound = fake::outbound(&shared);
        let worker = Arc::clone(&outbound.0);
        let bound = listen::bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
        let addr = bound.local_addr().unwrap();
        let listener = Listener::new(bound, SocketConfig::default()).unwrap();
        *worker.pretended_dst.lock() = Some(orig_dst);
        tokio::spawn(async move { outbound.run(vec![listener]).await });
        Self { addr, control, mesh, drain: Some(drain), shared, worker }
    }

    /// The proxy's metrics.
    fn scrape(&self) -> String {
        fake::scrape(&self.shared)
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    async fn http1(&self) -> conn::http1::SendRequest<Full<Bytes>> {
        let (sender, connection) = conn::http1::handshake(TokioIo::new(self.connect().await)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        sender
    }

    async fn get(&self, path: &str) -> Response<Incoming> {
        self.http1().await.send_request(get(path)).await.unwrap()
    }
}

fn get(path: &str) -> Request<Full<Bytes>> {
    Request::builder().uri(path).header("host", "server.demo").body(Full::default()).unwrap()
}

async fn text(response: Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// An HTTP/1 application that answers with its name and the request that it received.
async fn application(name: &'static str) -> SocketAddr {
    serve_each(move |stream| {
        let service = service_fn(move |request: Request<Incoming>| async move {
            let seen = format!("{name} {} {:?}", request.uri(), request.version());
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(seen))))
        });
        http1::Builder::new().serve_connection(TokioIo::new(stream), service)
    })
    .await
}

#[tokio::test]
async fn an_unknown_address_is_forwarded_as_it_is() {
    let app = application("app").await;
    let proxy = Proxy::start(app, Control::default()).await;
    let response = proxy.get("/a?b=c").await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(text(response).await, "app /a?b=c HTTP/1.1");
}

#[tokio::test]
async fn a_server_that_speaks_first_is_proxied_when_its_port_is_opaque() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let control = Control::default();
    control
        .profiles
        .lock()
        .insert(addr.to_string(), DestinationProfile { opaque_protocol: true, ..Default::default() });
    let proxy = Proxy::start(addr, control).await;
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"220 ready\r\n").await.unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).await.unwrap();
        stream.write_all(&received).await.unwrap();
    });
    let mut client = proxy.connect().await;
    let mut banner = [0; 11];
    client.read_exact(&mut banner).await.unwrap();
    assert_eq!(&banner, b"220 ready\r\n");
    client.write_all(b"bye").await.unwrap();
    client.shutdown().await.unwrap();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"bye");
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap(), Control::default()).await;
    let mut client = proxy.connect().await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    let mut head = [0; 64];
    assert!(server.read(&mut head).await.unwrap() > 0);
    drop(client);
    let ended = tokio::time::timeout(Duration::from_secs(5), server.read_to_end(&mut Vec::new())).await;
    assert!(ended.is_ok(), "the server never notices");
}

#[tokio::test]
async fn requests_are_balanced_and_a_dead_endpoint_is_passed_over() {
    let (a, b, dead) = (application("a").await, application("b").await, unused_addr());
    let control = Control::default();
    let service = "10.1.1.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![endpoint(a, None), endpoint(b, None), endpoint(dead, None)]));
    let proxy = Proxy::start(service, control).await;
    let mut sender = proxy.http1().await;
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..40 {
        sender.ready().await.unwrap();
        let response = sender.send_request(get("/")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        seen.insert(text(response).await.chars().next().unwrap());
    }
    assert_eq!(seen, ['a', 'b'].into());
}

#[tokio::test]
async fn endpoints_that_appear_serve_requests_that_wait() {
    let app = application("late").await;
    let control = Control::default();
    let service = "10.1.1.2:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let proxy = Proxy::start(service, control).await;
    let mut sender = proxy.http1().await;
    let waiting = tokio::spawn(async move { sender.send_request(get("/")).await.unwrap() });
    tokio::task::yield_now().await;
    proxy.control.update(SERVICE, add(vec![endpoint(app, None)]));
    assert_eq!(text(waiting.await.unwrap()).await, "late / HTTP/1.1");
}

#[tokio::test]
async fn a_service_without_endpoints_fails_fast_with_504() {
    let control = Control::default();
    let service = "10.1.1.3:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![]));
    let timeout = Duration::from_secs(5);
    let proxy = Proxy::start_with(service, control, |config| wait_for_endpoints(config, timeout), true).await;
    let response = proxy.get("/").await;
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(response.headers()["l5d-proxy-error"], "service in fail-fast");
    assert_eq!(response.headers()["connection"], "close");
    let again = std::time::Instant::now();
    assert_eq!(proxy.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
    assert!(again.elapsed() < timeout, "failing fast does not wait again");
}

#[tokio::test]
async fn a_controller_that_says_nothing_is_asked_again() {
    let app = application("app").await;
    let control = Control::default();
    let service = "10.1.1.5:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![endpoint(app, None)]));
    control.instead(Call::Policy, [Instead::Silence; 2]);
    let limit = |config: &mut Config| config.control_streams.initial = Some(Duration::from_millis(50));
    let proxy = Proxy::start_with(service, control, limit, true).await;
    assert_eq!(text(proxy.get("/").await).await, "app / HTTP/1.1");
    assert_eq!(proxy.control.calls(Call::Policy), 3);
}

#[tokio::test]
async fn http2_connect_is_refused() {
    let app = application("app").await;
    let proxy = Proxy::start(app, Control::default()).await;
    let stream = TokioIo::new(proxy.connect().await);
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let request = Request::connect("server.demo:443").body(Empty::<Bytes>::new()).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), StatusCode::BAD_REQUEST);
}

/// A proxy and one meshed endpoint, with the endpoint's side of the connection.
async fn meshed() -> (Proxy, Peer, SocketAddr) {
    meshed_with(|_| {}).await
}

async fn meshed_with(change: impl FnOnce(&mut Config)) -> (Proxy, Peer, SocketAddr) {
    let control = Control::default();
    let service = "10.1.1.4:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let proxy = Proxy::start_with(service, control, change, true).await;
    let (peer, port) = Peer::listen(&proxy.mesh.credentials(SERVER)).await;
    let workload: SocketAddr = "127.0.0.1:8080".parse().unwrap();
    proxy.control.update(SERVICE, add(vec![endpoint(workload, Some((SERVER, port)))]));
    (proxy, peer, workload)
}

#[tokio::test]
async fn http1_travels_to_a_meshed_endpoint_as_http2() {
    let (proxy, peer, workload) = meshed().await;
    tokio::spawn(async move {
        let (header, stream) = peer.accept().await;
        assert_eq!(header.port.get(), workload.port());
        assert_eq!(header.protocol, Some(SessionProtocol::Http2));
        let service = service_fn(|request: Request<Incoming>| async move {
            assert_eq!(request.version(), Version::HTTP_2);
            assert_eq!(request.headers()["l5d-orig-proto"], "HTTP/1.1");
            assert!(!request.headers().contains_key("connection"));
            assert!(!request.headers().contains_key("l5d-client-id"));
            assert_eq!(request.uri().authority().unwrap(), "server.demo");
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let response = Response::builder()
                .header("l5d-orig-proto", "HTTP/1.1")
                .header("l5d-proxy-error", "hidden")
                .body(Full::new(body))
                .unwrap();
            Ok::<_, Infallible>(response)
        });
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await.unwrap();
    });
    let mut sender = proxy.http1().await;
    for body in ["", "some body"] {
        let request = Request::builder()
            .method(Method::POST)
            .uri("/echo")
            .header("host", "server.demo")
            .header("connection", "x-private")
            .header("x-private", "1")
            .header("l5d-client-id", "forged")
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .unwrap();
        sender.ready().await.unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!((response.status(), response.version()), (StatusCode::OK, Version::HTTP_11));
        assert!(response.headers().keys().all(|name| !name.as_str().starts_with("l5d-")), "{:?}", response.headers());
        assert_eq!(text(response).await, body);
    }
}

#[tokio::test]
async fn http2_streams_both_ways_and_keeps_its_trailers() {
    let (proxy, peer, _) = meshed().await;
    tokio::spawn(async move {
        let (_, stream) = peer.accept().await;
        let service = service_fn(|request: Request<Incoming>| async move {
            assert!(!request.headers().contains_key("l5d-orig-proto"));
            // Answers each message as it arrives, before the request has ended.
            Ok::<_, Infallible>(
                Response::builder().header("content-type", "application/grpc").body(request.into_body()).unwrap(),
            )
        });
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await.unwrap();
    });
    let stream = TokioIo::new(proxy.connect().await);
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let (tx, rx) = tokio::sync::mpsc::unbounded_channel::<Result<Frame<Bytes>, Infallible>>();
    let body = StreamBody::new(tokio_stream::wrappers::UnboundedReceiverStream::new(rx));
    let request = Request::builder()
        .method(Method::POST)
        .uri("http://server.demo/echo.Echo/Chat")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .unwrap();
    let mut response = sender.send_request(request).await.unwrap().into_body();
    for message in [&b"one"[..], b"two"] {
        tx.send(Ok(Frame::data(Bytes::from_static(message)))).unwrap();
        assert_eq!(response.frame().await.unwrap().unwrap().into_data().unwrap(), message);
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    tx.send(Ok(Frame::trailers(trailers.clone()))).unwrap();
    drop(tx);
    assert_eq!(response.frame().await.unwrap().unwrap().into_trailers().unwrap(), trailers);
}

#[tokio::test]
async fn websockets_stay_http1_and_become_tunnels() {
    let (proxy, peer, _) = meshed().await;
    tokio::spawn(async move {
        let (header, stream) = peer.accept().await;
        assert_eq!(header.protocol, Some(SessionProtocol::Http1));
        let service = service_fn(|mut request: Request<Incoming>| async move {
            assert_eq!(request.headers()["upgrade"], "websocket");
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(upgrade.await.unwrap());
                let mut received = [0; 4];
                stream.read_exact(&mut received).await.unwrap();
                stream.write_all(&received).await.unwrap();
            });
            let response = Response::builder()
                .status(StatusCode::SWITCHING_PROTOCOLS)
                .header("connection", "upgrade")
                .header("upgrade", "websocket");
            Ok::<_, Infallible>(response.body(Empty::<Bytes>::new()).unwrap())
        });
        http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades().await.unwrap();
    });
    let mut request = get("/ws");
    request.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    request.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    let mut response = proxy.http1().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(response.headers()["upgrade"], "websocket");
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut response).await.unwrap());
    stream.write_all(b"ping").await.unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"ping");
}

#[tokio::test]
async fn opaque_bytes_travel_under_mtls_with_a_header_without_protocol() {
    let (proxy, peer, workload) = meshed().await;
    tokio::spawn(async move {
        let (header, mut stream) = peer.accept().await;
        assert_eq!((header.port.get(), header.protocol), (workload.port(), None));
        let mut received = [0; 16];
        stream.read_exact(&mut received).await.unwrap();
        stream.write_all(&received).await.unwrap();
        stream.shutdown().await.unwrap();
    });
    let mut client = proxy.connect().await;
    client.write_all(b"\x01\x02 not http ever").await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"\x01\x02 not http ever");
}

#[tokio::test]
async fn http_travels_to_an_opaque_port_without_a_protocol_in_the_header() {
    let (proxy, peer, workload) = meshed().await;
    let mut opaque = endpoint(workload, Some((SERVER, peer.port())));
    if let Some(hint) = &mut opaque.protocol_hint {
        hint.protocol = Some(protocol_hint::Protocol::Opaque(protocol_hint::Opaque {}));
    }
    proxy.control.update(SERVICE, add(vec![opaque]));
    let server = async {
        for _ in 0..2 {
            let (header, stream) = peer.accept().await;
            assert_eq!(header.protocol, None);
            tokio::spawn(async move {
                let service = service_fn(|request: Request<Incoming>| async move {
                    Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(format!("{:?}", request.version())))))
                });
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    };
    let client = async {
        assert_eq!(text(proxy.get("/").await).await, "HTTP/1.1");
        let stream = TokioIo::new(proxy.connect().await);
        let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get("http://server.demo/").body(Empty::<Bytes>::new()).unwrap();
        assert_eq!(text(sender.send_request(request).await.unwrap()).await, "HTTP/2.0");
    };
    tokio::join!(server, client);
}

#[tokio::test]
async fn without_credentials_a_meshed_endpoint_is_never_reached() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let control = Control::default();
    let profile =
        DestinationProfile { endpoint: Some(endpoint(addr, Some((SERVER, addr.port())))), ..Default::default() };
    control.profiles.lock().insert(addr.to_string(), profile);
    let proxy = Proxy::start_with(addr, control, |_| {}, false).await;
    assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY);
    let accepted = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
    assert!(accepted.is_err(), "nothing was sent, least of all in plaintext");
}

#[tokio::test]
async fn where_mutual_tls_is_required_nothing_is_sent_in_plaintext() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let of_pod = |config: &mut Config| config.outbound.require_mtls = true;
    let of_service = |_: &mut Config| {};
    for (by_service, change) in [(false, of_pod as fn(&mut Config)), (true, of_service as fn(&mut Config))] {
        let control = Control::default();
        let service = "10.1.1.8:80".parse().unwrap();
        control.policies.lock().insert(service, policy(SERVICE, vec![]));
        let mut unmeshed = endpoint(addr, None);
        if by_service {
            unmeshed.metric_labels.insert("require_mtls".into(), "true".into());
        }
        control.update(SERVICE, add(vec![unmeshed]));
        let proxy = Proxy::start_with(service, control, change, true).await;
        let response = proxy.get("/").await;
        let reason = format!("refusing plaintext to {addr}: it has no identity, and weft.io/require-mtls is set");
        assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
        assert_eq!(response.headers()["l5d-proxy-error"], reason);
        let text = proxy.scrape();
        assert!(text.contains(r#"outbound_http_errors_total{error="identity required"} 1"#), "{text}");
        assert!(text.lines().any(|line| line.ends_with(r#"http_status="",error="REQUIRE_MTLS"} 1"#)), "{text}");
        let mut opaque = proxy.connect().await;
        opaque.write_all(b"\x01\x02 not http ever").await.unwrap();
        assert!(!matches!(opaque.read_to_end(&mut Vec::new()).await, Ok(read) if read > 0));
        let target = r#"target_addr="10.1.1.8:80",target_ip="10.1.1.8",target_port="80""#;
        let counted = format!(r#"outbound_tcp_errors_total{{{target},error="identity required"}} 1"#);
        assert!(proxy.scrape().lines().any(|line| line == counted), "{}", proxy.scrape());
        assert!(tokio::time::timeout(Duration::from_millis(50), listener.accept()).await.is_err());
    }
    // An address that no Service has is an endpoint like any other.
    let proxy = Proxy::start_with(addr, Control::default(), of_pod, true).await;
    assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY);
    assert!(tokio::time::timeout(Duration::from_millis(50), listener.accept()).await.is_err());
}

#[tokio::test]
async fn a_required_identity_has_to_be_the_endpoints() {
    let app = application("app").await;
    let proxy = Proxy::start(app, Control::default()).await;
    let mut request = get("/");
    request.headers_mut().insert("l5d-require-id", SERVER.parse().unwrap());
    let response = proxy.http1().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert!(proxy.scrape().contains("outbound_http_errors_total{error=\"identity required\"} 1\n"));
    assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn policy_can_fail_requests_and_forbid_connections() {
    let (service, closed) = ("10.1.1.6:80".parse().unwrap(), "10.1.1.7:81".parse().unwrap());
    let control = Control::default();
    let filter = failing(403, "traffic not allowed");
    control.policies.lock().insert(service, policy(SERVICE, vec![filter]));
    control.policies.lock().insert(closed, forbidden());
    let proxy = Proxy::start(service, control.clone()).await;
    assert_eq!(proxy.get("/").await.status(), StatusCode::FORBIDDEN);
    let proxy = Proxy::start(closed, control).await;
    let mut answer = Vec::new();
    assert!(!matches!(proxy.connect().await.read_to_end(&mut answer).await, Ok(read) if read > 0));
}

#[tokio::test]
async fn loopback_is_refused_unless_tests_ask_for_it() {
    let app = application("app").await;
    let refuse = |config: &mut Config| config.outbound.allow_loopback = false;
    // The kernel connects 0.0.0.0 to loopback.
    for loopback in [app, SocketAddr::from(([0, 0, 0, 0], app.port()))] {
        let proxy = Proxy::start_with(loopback, Control::default(), refuse, true).await;
        assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY, "{loopback}");
        assert!(proxy.scrape().contains("outbound_http_errors_total{error=\"loopback\"} 1\n"), "{loopback}");
    }
}

#[tokio::test]
async fn a_drain_lets_requests_finish_and_takes_no_more() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let mut proxy = Proxy::start(addr, Control::default()).await;
    let mut sender = proxy.http1().await;
    let response = tokio::spawn(async move { sender.send_request(get("/slow")).await.unwrap() });
    let (mut app, _) = listener.accept().await.unwrap();
    let mut request = [0; 16];
    app.read_exact(&mut request).await.unwrap();
    let drained = tokio::spawn(proxy.drain.take().unwrap().drain(Duration::from_secs(10)));
    proxy.shared.drain.signaled().await;
    app.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone").await.unwrap();
    assert_eq!(text(response.await.unwrap()).await, "done");
    assert!(drained.await.unwrap(), "the connection closes when its request is answered");
}
