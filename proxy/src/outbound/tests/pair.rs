//! Both sides of the proxy together: a client, the outbound side, mTLS, the inbound side, an application.

use super::*;
use crate::{access_log::AccessLog, config::AccessLogFormat};

/// A client's proxy whose only destination is `app`, with a proxy of its own.
pub(super) async fn in_front_of(app: SocketAddr) -> Proxy {
    pair(app).await.0
}

/// The same, and the state of the other proxy.
pub(super) async fn pair(app: SocketAddr) -> (Proxy, Arc<Shared>) {
    let control = Control::default();
    let service = "10.1.2.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let proxy = Proxy::start(service, control).await;
    let (shared, drain) = testing::shared(testing::config(), &proxy.mesh);
    // The server's side is never drained here; forgetting it keeps it from ending with this function.
    std::mem::forget(drain);
    let port = testing::serve_direct(Arc::clone(&shared)).await;
    proxy.control.update(SERVICE, add(vec![endpoint(app, Some((testing::OWN, port)))]));
    (proxy, shared)
}

/// An application of both HTTP versions that echoes bodies, returns the request in headers, and upgrades on request.
pub(super) async fn echo() -> SocketAddr {
    serve_each(move |stream| async move {
        hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
            .serve_connection_with_upgrades(TokioIo::new(stream), service_fn(answer))
            .await
    })
    .await
}

async fn answer(
    mut request: Request<Incoming>,
) -> Result<Response<http_body_util::Either<Incoming, Empty<Bytes>>>, Infallible> {
    use http_body_util::Either;
    let response = Response::builder()
        .header("seen-version", format!("{:?}", request.version()))
        .header("seen-uri", request.uri().to_string())
        .header("seen-client", request.headers().get("l5d-client-id").map_or("", |id| id.to_str().unwrap()));
    assert!(!request.headers().contains_key("l5d-orig-proto"));
    if request.method() == Method::CONNECT || request.headers().contains_key("upgrade") {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            let mut received = [0; 4];
            stream.read_exact(&mut received).await.unwrap();
            stream.write_all(&received).await.unwrap();
        });
        let response = if request.method() == Method::CONNECT {
            response
        } else {
            let switching = response.status(StatusCode::SWITCHING_PROTOCOLS);
            switching.header("connection", "upgrade").header("upgrade", "websocket")
        };
        return Ok(response.body(Either::Right(Empty::new())).unwrap());
    }
    Ok(response.body(Either::Left(request.into_body())).unwrap())
}

#[tokio::test]
async fn http1_arrives_as_http1_with_the_clients_identity() {
    let proxy = in_front_of(echo().await).await;
    let mut sender = proxy.http1().await;
    for body in ["", "a body", "another"] {
        let request = Request::builder()
            .method(Method::POST)
            .uri("/path?query")
            .header("host", "server.demo")
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .unwrap();
        sender.ready().await.unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!((response.status(), response.version()), (StatusCode::OK, Version::HTTP_11));
        assert_eq!(response.headers()["seen-version"], "HTTP/1.1");
        assert_eq!(response.headers()["seen-uri"], "/path?query");
        assert_eq!(response.headers()["seen-client"], testing::OWN);
        assert!(response.headers().keys().all(|name| !name.as_str().starts_with("l5d-")), "{:?}", response.headers());
        assert_eq!(text(response).await, body);
    }
}

#[tokio::test]
async fn http10_and_head_and_absolute_targets_arrive_as_they_were() {
    let app = echo().await;
    let proxy = in_front_of(app).await;
    let mut head = get("/head");
    *head.method_mut() = Method::HEAD;
    let response = proxy.http1().await.send_request(head).await.unwrap();
    assert_eq!((response.status(), text(response).await.as_str()), (StatusCode::OK, ""));
    let response = proxy.http1().await.send_request(get("http://server.demo/absolute")).await.unwrap();
    assert_eq!(response.headers()["seen-uri"], "http://server.demo/absolute");
    let mut client = proxy.connect().await;
    client.write_all(b"GET /old HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.") && answer.contains(" 200 ") && answer.contains("seen-uri: /old"), "{answer}");
}

#[tokio::test]
async fn grpc_streams_with_trailers() {
    let proxy = in_front_of(echo().await).await;
    let stream = TokioIo::new(proxy.connect().await);
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let (tx, rx) = tokio::sync::mpsc::unbounded_channel::<Result<Frame<Bytes>, Infallible>>();
    let request = Request::builder()
        .method(Method::POST)
        .uri("http://server.demo/echo.Echo/Chat")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(StreamBody::new(tokio_stream::wrappers::UnboundedReceiverStream::new(rx)))
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.headers()["seen-version"], "HTTP/2.0");
    let mut body = response.into_body();
    for message in [&b"one"[..], b"two", b"three"] {
        tx.send(Ok(Frame::data(Bytes::from_static(message)))).unwrap();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), message);
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    tx.send(Ok(Frame::trailers(trailers.clone()))).unwrap();
    drop(tx);
    assert_eq!(body.frame().await.unwrap().unwrap().into_trailers().unwrap(), trailers);
}

#[tokio::test]
async fn a_large_body_passes_both_ways() {
    let proxy = in_front_of(echo().await).await;
    let sent: Bytes = (0..3_000_000_u32).map(|i| (i / 7) as u8).collect::<Vec<u8>>().into();
    let mut request = get("/large");
    *request.method_mut() = Method::POST;
    *request.body_mut() = Full::new(sent.clone());
    let response = proxy.http1().await.send_request(request).await.unwrap();
    let received = response.into_body().collect().await.unwrap().to_bytes();
    assert!(received == sent);
}

#[tokio::test]
async fn websockets_and_connect_become_tunnels() {
    let proxy = in_front_of(echo().await).await;
    let mut websocket = get("/ws");
    websocket.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    websocket.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    let mut connect = get("server.demo:443");
    *connect.method_mut() = Method::CONNECT;
    for (request, status) in [(websocket, StatusCode::SWITCHING_PROTOCOLS), (connect, StatusCode::OK)] {
        let mut response = proxy.http1().await.send_request(request).await.unwrap();
        assert_eq!(response.status(), status);
        let mut stream = TokioIo::new(hyper::upgrade::on(&mut response).await.unwrap());
        stream.write_all(b"ping").await.unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"ping");
    }
}

#[tokio::test]
async fn opaque_bytes_pass_and_both_ends_close_in_turn() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = in_front_of(listener.local_addr().unwrap()).await;
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).await.unwrap();
        stream.write_all(&received).await.unwrap();
    });
    let mut client = proxy.connect().await;
    client.write_all(b"\0\x01\x02 binary and longer than a header").await.unwrap();
    client.shutdown().await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"\0\x01\x02 binary and longer than a header");
}

#[tokio::test]
async fn a_large_head_that_passes_one_proxy_passes_the_other() {
    let proxy = in_front_of(echo().await).await;
    let mut request = get("/");
    request.headers_mut().insert("cookie", "c".repeat(40 * 1024).parse().unwrap());
    assert_eq!(proxy.http1().await.send_request(request).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_request_that_passes_both_sides_has_the_line_of_the_inbound_side_alone() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let (log, lines) = AccessLog::to(AccessLogFormat::Apache, file.reopen().unwrap());
    let mut config = testing::config();
    config.policy.control.port = Control::default().serve().await.port();
    config.outbound.allow_loopback = true;
    let (mut shared, _drain) = testing::shared(config, &Mesh::new());
    Arc::get_mut(&mut shared).unwrap().access_log = Some(log);
    let inbound = testing::serve_port(Arc::clone(&shared), application("app").await).await;
    let Outbound(worker) = fake::outbound(&shared);
    *worker.pretended_dst.lock() = Some(SocketAddr::from(([127, 0, 0, 1], inbound)));
    let bound = listen::bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
    let addr = bound.local_addr().unwrap();
    let listener = Listener::new(bound, SocketConfig::default()).unwrap();
    tokio::spawn(async move { accept_all(&worker, &listener).await });

    let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
    let (mut sender, connection) = conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    assert_eq!(text(sender.send_request(get("/once")).await.unwrap()).await, "app /once HTTP/1.1");
    // Then all of it is written.
    drop(lines);
    let written = std::fs::read_to_string(file.path()).unwrap();
    assert_eq!(written.matches("\"GET /once HTTP/1.1\" 200\n").count(), 1, "{written}");
    assert_eq!(written.lines().count(), 1, "{written}");
}
