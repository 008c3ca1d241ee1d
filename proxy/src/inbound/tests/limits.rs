//! Limits of clients: the time for a request's head, streams, and what they may cancel.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicUsize, Ordering},
};

use http_body_util::{Empty, StreamBody};
use hyper::body::Frame;
use tokio::net::TcpSocket;

use super::{
    metrics::{expect, target},
    *,
};
use crate::{
    http::frames::{canceled, frame, head, next_frame, preface, stream},
    testing::{INJECTORS_FILTER, Lines},
};

#[tokio::test]
async fn a_client_that_does_not_finish_a_head_is_closed() {
    let limit = |config: &mut Config| config.http1_client_timeout = Duration::from_millis(100);
    let world = World::with(http_app().await, limit).await;
    // A first head that never ends, and a connection that is kept without another request.
    let request = "GET / HTTP/1.1\r\nhost: web.demo\r\n";
    for sent in [request.to_owned(), format!("{request}\r\n")] {
        let mut stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "still open after {}", answer.escape_ascii());
        assert_eq!(answer.starts_with(b"HTTP/1.1 200"), sent.ends_with("\r\n\r\n"), "{}", answer.escape_ascii());
    }
}

/// A connection to the proxy from 127.0.0.`last`: all of that network is this host's.
async fn connect_from(last: u8, proxy: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
    socket.connect(proxy).await.unwrap()
}

/// Whether the proxy answers a request from there. If not, it has closed the connection.
async fn is_served(last: u8, proxy: SocketAddr) -> bool {
    let mut stream = connect_from(last, proxy).await;
    let mut answer = Vec::new();
    let exchanged = async {
        // Both fail if the proxy closes the connection first.
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: web.demo\r\nconnection: close\r\n\r\n").await;
        let _ = stream.read_to_end(&mut answer).await;
    };
    tokio::time::timeout(Duration::from_secs(20), exchanged).await.expect("neither answered nor closed");
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 200"), "{}", answer.escape_ascii());
    !answer.is_empty()
}

#[tokio::test]
async fn an_address_has_its_share_of_connections_and_another_one_is_served() {
    const LIMIT: usize = 32;
    let world = World::new(http_app().await).await;
    let inbound = Inbound::new(Arc::clone(&world.registry), world.policies.clone()).sharing(LIMIT);
    let port = testing::serve_on(Arc::new(inbound), None, world.app).await;
    let proxy = SocketAddr::from(([127, 0, 0, 1], port));
    let mut held = Vec::new();
    for _ in 0..LIMIT / 2 {
        let mut stream = connect_from(2, proxy).await;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: web.demo\r\n").await.unwrap();
        held.push(stream);
    }
    assert!(!is_served(2, proxy).await, "half of all connections are of this address");
    assert!(is_served(3, proxy).await);
    for stream in &held {
        let read = stream.try_read(&mut [0]);
        assert!(read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "{read:?}");
    }
    drop(held);
    settled(async || if is_served(2, proxy).await { Ok(()) } else { Err("closed connections still count") }).await;
}

#[tokio::test]
async fn a_connection_beyond_its_addresss_share_is_closed_counted_and_logged() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    // A connection that sends nothing stays open.
    let patient = |config: &mut Config| config.inbound.detect_timeout = Duration::from_secs(600);
    let mut world = World::with(http_app().await, patient).await;
    let inbound = Inbound::new(Arc::clone(&world.registry), world.policies.clone());
    world.inbound = Arc::new(inbound.sharing(2));
    let _held = world.raw(Some(ELSEWHERE), world.app).await;
    // Another port of the same address, also as a listener of IPv6 sees it.
    for peer in ["10.9.9.9:50001", "[::ffff:10.9.9.9]:50002"] {
        let refused = world.raw(Some(peer), world.app).await;
        expect_closed(&mut (Box::new(refused) as Box<dyn Duplex>)).await;
        let line = "Connection closed error=too many connections of the client's address are open";
        let written = format!("{line} client.addr={peer} orig_dst.addr={}", world.app);
        crate::testing::eventually("the line is written", || lines.text().contains(&written)).await;
    }
    assert_eq!(get_over(world.raw(Some("10.9.9.8:50000"), world.app).await, "/").await.0, StatusCode::OK);
    let labels = format!(r#"error="too many connections",{}"#, target(world.app));
    expect(&world, "inbound_tcp_errors_total", &[(&labels, 2)]).await;
}

#[tokio::test]
async fn an_address_has_its_share_of_connections_to_the_application_and_another_one_is_answered() {
    const LIMIT: usize = 8;
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut world = World::new(app.local_addr().unwrap()).await;
    let inbound = Inbound::new(Arc::clone(&world.registry), world.policies.clone());
    world.inbound = Arc::new(inbound.sharing(LIMIT));
    let client = async |addr: &str| {
        let stream = TokioIo::new(world.connect(Via::Plain, Some(addr)).await);
        let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        sender
    };
    // As another proxy carries HTTP/1: each has a connection to the application until it is answered.
    let request = |sender: &hyper::client::conn::http2::SendRequest<Empty<Bytes>>| {
        let mut sender = sender.clone();
        let request = Request::builder().uri("http://web.demo/").header("l5d-orig-proto", "HTTP/1.1");
        let request = request.body(Empty::new()).unwrap();
        tokio::spawn(async move { sender.send_request(request).await.unwrap().status() })
    };
    let accept = async || {
        let accepted = tokio::time::timeout(Duration::from_secs(20), app.accept()).await;
        accepted.expect("the application gets no connection").unwrap().0
    };
    let answer = async |stream: &mut TcpStream| {
        let mut request = [0; 512];
        assert_ne!(stream.read(&mut request).await.unwrap(), 0);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    };
    let greedy = client(ELSEWHERE).await;
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    for _ in 0..LIMIT / 2 {
        waiting.push(request(&greedy));
        held.push(accept().await);
    }
    assert_eq!(request(&greedy).await.unwrap(), StatusCode::SERVICE_UNAVAILABLE, "half of all are its own");

    let other = request(&client("10.9.9.8:50000").await);
    answer(&mut accept().await).await;
    assert_eq!(other.await.unwrap(), StatusCode::OK);

    // Connections that are kept serve further requests.
    answer(&mut held[0]).await;
    assert_eq!(waiting.remove(0).await.unwrap(), StatusCode::OK);
    let again = request(&client(ELSEWHERE).await);
    answer(&mut held[0]).await;
    assert_eq!(again.await.unwrap(), StatusCode::OK);
    let labels = format!(r#"error="loadshed",{}"#, target(world.app));
    expect(&world, "inbound_http_errors_total", &[(&labels, 1)]).await;
    drop(held);
    crate::testing::eventually("closed connections count", || world.inbound.targets.open() == 0).await;
}

#[tokio::test]
async fn an_address_has_its_share_of_http2_connections_to_the_application() {
    const LIMIT: usize = 8;
    // One stream on each connection, and no answers.
    let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
    let app = serve_each(move |stream| {
        let arrived = arrived.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            arrived.send(request).unwrap();
            std::future::pending::<Result<::http::Response<Full<Bytes>>, Infallible>>()
        });
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder.max_concurrent_streams(1).serve_connection(TokioIo::new(stream), service)
    })
    .await;
    let mut world = World::new(app).await;
    let inbound = Inbound::new(Arc::clone(&world.registry), world.policies.clone());
    world.inbound = Arc::new(inbound.sharing(LIMIT));
    let stream = TokioIo::new(world.connect(Via::Plain, Some(ELSEWHERE)).await);
    let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let request = || {
        let mut sender = sender.clone();
        let request = Request::builder().uri("http://web.demo/").body(Empty::<Bytes>::new()).unwrap();
        tokio::spawn(async move { sender.send_request(request).await.unwrap().status() })
    };
    let mut waiting = Vec::new();
    for _ in 0..LIMIT / 2 {
        waiting.push(request());
        arrivals.recv().await.unwrap();
    }
    let refused = tokio::time::timeout(Duration::from_secs(20), request()).await;
    assert_eq!(refused.expect("it waits").unwrap(), StatusCode::SERVICE_UNAVAILABLE, "half of all are its own");
    assert!(waiting.iter().all(|request| !request.is_finished()));
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    drop(sender);
    crate::testing::eventually("closed connections count", || world.inbound.targets.open() == 0).await;
}

#[tokio::test]
async fn tunnels_and_bytes_count_as_connections_to_the_application_until_they_end() {
    for (app, is_tunnel) in [(http_app().await, true), (banner_app().await, false)] {
        let world = World::new(app).await;
        let stream = if is_tunnel {
            world.tunnel(Via::Tls).await
        } else {
            world.policies.publish(world.app.port(), opaque(vec![authz("all", anybody())]));
            let mut stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
            expect_banner(&mut stream).await;
            stream
        };
        assert_eq!(world.inbound.targets.open(), 1, "a tunnel: {is_tunnel}");
        drop(stream);
        crate::testing::eventually("it counts after its end", || world.inbound.targets.open() == 0).await;
    }
}

#[tokio::test]
async fn a_connection_takes_little_room_when_all_is_known_about_it() {
    let world = World::new(http_app().await).await;
    let own = SocketAddr::new(world.app.ip(), world.registry.config.inbound.listen.port());
    let config = world.mesh.credentials(CLIENT).client_config(&OWN.parse().unwrap(), &[ALPN]);
    for (protocol, most) in [(None, 2560), (Some(SessionProtocol::Http2), 10 * 1024)] {
        let (client, accepted) = tcp_pair().await;
        let peer = client.local_addr().unwrap();
        let header = TransportHeader { port: NonZeroU16::new(world.app.port()).unwrap(), name: None, protocol };
        let connected = async {
            let name = rustls::pki_types::ServerName::try_from(OWN).unwrap();
            let mut stream = TlsConnector::from(Arc::clone(&config)).connect(name, client).await.unwrap();
            stream.write_all(&header.encode()).await.unwrap();
            stream
        };
        let (_client, serving) = tokio::join!(connected, accept::negotiate(&world.inbound, accepted, peer, own));
        let bytes = size_of_val(&*serving.unwrap());
        assert!(bytes <= most, "{bytes} bytes as {protocol:?}");
    }
}

#[tokio::test]
async fn the_limit_of_requests_in_flight_comes_before_policy() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let one = |config: &mut Config| config.inbound.max_in_flight = 1;
    let world = World::with(silent.local_addr().unwrap(), one).await;
    world.policies.publish(world.app.port(), detecting(vec![authz("web", only(&[CLIENT]))]));
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, StatusCode::FORBIDDEN);
    let mut held = world.connect(Via::Tls, Some(ELSEWHERE)).await;
    held.write_all(b"GET / HTTP/1.1\r\nhost: web.demo\r\n\r\n").await.unwrap();
    let (_app, _) = silent.accept().await.unwrap();
    let (status, headers, _) = world.get(Via::Plain, Some(ELSEWHERE), "/").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{headers:?}");
    drop(held);
    let has_room = async { while world.get(Via::Plain, Some(ELSEWHERE), "/").await.0 != StatusCode::FORBIDDEN {} };
    tokio::time::timeout(Duration::from_secs(10), has_room)
        .await
        .expect("a request that its client gave up is counted");
}

/// An application of HTTP/2 that answers nobody before `expected` requests are there; its connections take at most
/// `limit` streams.
async fn gathering_app(expected: usize, limit: u32) -> SocketAddr {
    let gathered = Arc::new(tokio::sync::Barrier::new(expected));
    serve_each(move |stream| {
        let gathered = Arc::clone(&gathered);
        let service = service_fn(move |request: Request<Incoming>| {
            let gathered = Arc::clone(&gathered);
            async move {
                if request.uri().path() != "/first" {
                    gathered.wait().await;
                }
                Ok::<_, Infallible>(::http::Response::new(Full::<Bytes>::default()))
            }
        });
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder.max_concurrent_streams(limit);
        builder.serve_connection(TokioIo::new(stream), service)
    })
    .await
}

#[tokio::test]
async fn http2_requests_beyond_the_limit_of_a_connection_to_the_application_get_another() {
    // More than one connection's flow control takes, with applications that take more and fewer, and with one whose
    // limit is not known when the requests come.
    for (requests, limit, is_announced) in [(300, 10_000, true), (60, 25, true), (300, 25, false)] {
        let world = World::new(gathering_app(requests, limit).await).await;
        let stream = TokioIo::new(world.connect(Via::Plain, Some(ELSEWHERE)).await);
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        let request = |path: &str| {
            let request = Request::builder().uri(format!("http://web.demo{path}"));
            request.body(Full::<Bytes>::default()).unwrap()
        };
        if is_announced {
            // On the first connection.
            assert_eq!(sender.send_request(request("/first")).await.unwrap().status(), StatusCode::OK);
        }
        let all = (0..requests).map(|_| {
            let mut sender = sender.clone();
            async move { sender.send_request(request("/")).await.unwrap().status() }
        });
        let answered = tokio::time::timeout(Duration::from_secs(20), futures::future::join_all(all)).await;
        let answered = answered.unwrap_or_else(|_| panic!("{requests} requests with a limit of {limit} do not gather"));
        assert!(answered.iter().all(|status| *status == StatusCode::OK), "{answered:?}");
    }
}

/// The window of a stream, of the proxy's and of the application's connections.
const STREAM_WINDOW: u32 = 65_535;

/// An application of HTTP/2 that reads nothing of requests for `/unread`, and echoes others. A connection of it takes
/// as many bytes as `window` says, and messages below 256 bytes that cost half as much memory.
async fn unreading_app(window: u32) -> SocketAddr {
    serve_each(move |stream| {
        let service = service_fn(|request: Request<Incoming>| async move {
            if request.uri().path() == "/unread" {
                let _held = request;
                return std::future::pending().await;
            }
            Ok::<_, Infallible>(::http::Response::new(request.into_body()))
        });
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(window);
        builder.serve_connection(TokioIo::new(stream), service)
    })
    .await
}

#[tokio::test]
async fn uploads_that_nobody_reads_leave_room_for_others_on_their_connection() {
    // A window of 256 streams. What comes beyond has to have no body.
    let (window, stream) = (16 << 20, STREAM_WINDOW as usize);
    for (bound, uploads, body, stalled) in [
        // The application and the proxy hold a window of each.
        (Some(window), 200, "some body", 2 * 200 * stream),
        // A window that grows with the streams has room for them, too.
        (None, 200, "some body", 2 * 200 * stream),
        // The application holds one of each upload that has its share of the proxy's.
        (Some(window), 300, "", window + 257 * stream),
    ] {
        let bounded =
            |config: &mut Config| config.http2.inbound_server.connection_window = bound.map(|bytes| bytes as u32);
        // What the application's own window stalls is not the proxy's doing.
        let world = World::with(unreading_app(1 << 30).await, bounded).await;
        let direct = world.connect(Via::Direct(Some(SessionProtocol::Http2)), Some(ELSEWHERE)).await;
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(direct)).await;
        let (mut sender, connection) = handshake.unwrap();
        tokio::spawn(connection);
        let (sent, mut open) = (Arc::<AtomicUsize>::default(), tokio::task::JoinSet::new());
        for _ in 0..uploads {
            let sent = Arc::clone(&sent);
            let endless = futures::stream::repeat_with(move || {
                sent.fetch_add(16_384, Ordering::Relaxed);
                Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[0; 16_384])))
            });
            let request = Request::post("http://web.demo/unread").body(BodyExt::boxed(StreamBody::new(endless)));
            let mut sender = sender.clone();
            open.spawn(async move { sender.send_request(request.unwrap()).await });
        }
        crate::testing::eventually("the uploads stall", || sent.load(Ordering::Relaxed) >= stalled).await;
        let request = Request::post("http://web.demo/").body(BodyExt::boxed(Full::from(body))).unwrap();
        let answered = tokio::time::timeout(Duration::from_secs(20), async {
            sender.send_request(request).await.unwrap().into_body().collect().await.unwrap().to_bytes()
        });
        assert_eq!(answered.await.unwrap_or_else(|_| panic!("no answer beside {uploads} uploads")), body);
    }
}

#[tokio::test]
async fn an_application_that_ends_a_connection_ends_no_other_clients_requests() {
    let world = World::new(unreading_app(1 << 20).await).await;
    let stream = TokioIo::new(world.connect(Via::Plain, Some(ELSEWHERE)).await);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let (rest, body) = futures::channel::mpsc::unbounded();
    let request = Request::post("http://web.demo/").body(StreamBody::new(body)).unwrap();
    let answer = sender.send_request(request).await.unwrap();

    // 600 KiB of memory, at the application, for 20 bytes each.
    let mut flood = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    let messages = frame(0, 0, 1, &[0; 20]).repeat(2_600);
    let post = frame(1, 4, 1, &head(0x83, "/unread"));
    flood.write_all(&[preface(), post, messages].concat()).await.unwrap();
    let ended = async {
        while let Some(received) = next_frame(&mut flood).await {
            if received.stream == 1 {
                return;
            }
        }
        panic!("the proxy closed the connection");
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("the application takes 600 KiB");

    rest.unbounded_send(Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"the rest")))).unwrap();
    drop(rest);
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "the rest");
}

#[tokio::test]
async fn an_http2_connection_ends_at_its_age_when_its_requests_are_answered() {
    let aged = |config: &mut Config| {
        config.http2.inbound_server.max_connection_age = Some(Duration::from_millis(50));
    };
    let world = World::with(http_app().await, aged).await;
    let stream = TokioIo::new(world.connect(Via::Plain, Some(ELSEWHERE)).await);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::builder().uri("http://web.demo/").body(Full::<Bytes>::default()).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), StatusCode::OK);
    let ended = tokio::time::timeout(Duration::from_secs(10), connection).await;
    assert!(ended.expect("it goes on").unwrap().is_ok());
}

#[tokio::test]
async fn a_client_may_cancel_all_its_requests_at_once_and_keep_one() {
    const HEADERS: u8 = 1;
    const GOAWAY: u8 = 7;
    const CANCELED: u32 = 200;
    let get = |stream| frame(HEADERS, 5, stream, &head(0x82, "/"));
    // The request that is kept is not answered before the last one is there.
    let world = World::new(gathering_app(2, 10_000).await).await;
    let mut client = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    let canceled = (0..CANCELED).flat_map(|n| canceled(n, "/first")).collect();
    client.write_all(&[preface(), get(1), canceled, get(stream(CANCELED))].concat()).await.unwrap();
    let mut expected = vec![1, stream(CANCELED)];
    let answers = async {
        while !expected.is_empty() {
            let mut head = [0; 9];
            client.read_exact(&mut head).await.unwrap();
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            client.read_exact(&mut payload).await.unwrap();
            assert_ne!(head[3], GOAWAY, "{}", payload.escape_ascii());
            let answered = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            expected.retain(|id| head[3] != HEADERS || *id != answered);
        }
    };
    let answered = tokio::time::timeout(Duration::from_secs(20), answers).await;
    assert!(answered.is_ok(), "no answer on {expected:?}");
}
