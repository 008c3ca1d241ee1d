//! How requests and connections end: drains, limits of requests in flight, resets, pings, an application that accepts
//! nobody.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicU32, Ordering},
};

use ::h2::Reason;
use ::http::Response;
use http_body_util::StreamBody;
use hyper::body::Frame;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{metrics::scrape, *};
use crate::{
    config::{Keepalive, SocketConfig},
    http::frames::{Received, canceled, frame, head, next_frame, preface, stream},
    listen,
};

const DEADLINE: Duration = Duration::from_secs(10);
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
/// The flag of a PING that answers another.
const ACK: u8 = 1;
/// Flags of a head without a body.
const WHOLE: u8 = 5;

/// An application that answers with a head at once, and with a body when the test says so.
async fn held_app() -> (SocketAddr, mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
    let (held, releases) = mpsc::unbounded_channel();
    let addr = serve_each(move |stream| {
        let held = held.clone();
        let service = service_fn(move |_: Request<Incoming>| {
            let (release, released) = oneshot::channel();
            held.send(release).unwrap();
            let end = async move {
                // An error means that the test is over.
                let _ = released.await;
                Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"end")))
            };
            let body = Box::pin(StreamBody::new(futures::stream::once(end)));
            std::future::ready(Ok::<_, Infallible>(Response::new(body)))
        });
        async move {
            let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        }
    });
    (addr.await, releases)
}

#[tokio::test]
async fn a_drain_says_goaway_and_lets_http2_requests_finish() {
    let (app, mut held) = held_app().await;
    let mut world = World::new(app).await;
    let mut client = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    let request = frame(HEADERS, WHOLE, 1, &head(0x82, "/"));
    client.write_all(&[preface(), request].concat()).await.unwrap();
    let release = held.recv().await.unwrap();
    let drained = tokio::spawn(world.drain.take().unwrap().drain(DEADLINE));
    let mut release = Some(release);
    let (mut body, mut goaways) = (Vec::new(), 0);
    let ended = async {
        while let Some(Received { kind, flags, stream, payload }) = next_frame(&mut client).await {
            match kind {
                GOAWAY => {
                    assert_eq!(payload[4..8], [0; 4], "no error");
                    goaways += 1;
                    if let Some(release) = release.take() {
                        assert!(!drained.is_finished(), "the request goes on");
                        release.send(()).unwrap();
                    }
                }
                PING if flags & ACK == 0 => client.write_all(&frame(PING, ACK, 0, &payload)).await.unwrap(),
                DATA => {
                    assert_eq!(stream, 1);
                    body.extend(payload);
                }
                _ => {}
            }
        }
    };
    tokio::time::timeout(DEADLINE, ended).await.expect("the connection ends");
    assert!(goaways > 0, "none says that no more requests are taken");
    assert_eq!(body, b"end");
    assert!(drained.await.unwrap());
}

/// A flood of requests that their client resets at once (CVE-2023-44487) must not become a flood at the application.
#[tokio::test]
async fn streams_that_are_reset_at_once_cost_the_application_nothing() {
    const BATCHES: u32 = 20;
    const RESETS: u32 = 10;
    let (connections, requests) = (Arc::<AtomicU32>::default(), Arc::<AtomicU32>::default());
    let (connected, requested) = (Arc::clone(&connections), Arc::clone(&requests));
    let app = serve_each(move |stream| {
        connected.fetch_add(1, Ordering::Relaxed);
        let requested = Arc::clone(&requested);
        let service = service_fn(move |request: Request<Incoming>| {
            if request.uri().path() == "/reset" {
                requested.fetch_add(1, Ordering::Relaxed);
            }
            std::future::ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())))
        });
        async move {
            let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        }
    });
    let world = World::new(app.await).await;
    let mut client = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    client.write_all(&preface()).await.unwrap();
    for batch in 0..BATCHES {
        let first = batch * (RESETS + 1);
        let mut frames: Vec<u8> = (first..first + RESETS).flat_map(|n| canceled(n, "/reset")).collect();
        let whole = stream(first + RESETS);
        frames.extend(frame(HEADERS, WHOLE, whole, &head(0x82, "/")));
        client.write_all(&frames).await.unwrap();
        let answered = async {
            while let Some(received) = next_frame(&mut client).await {
                assert_ne!(received.kind, GOAWAY, "{:?}", received.payload);
                if (received.kind, received.stream) == (HEADERS, whole) {
                    return;
                }
            }
            panic!("the connection was closed");
        };
        tokio::time::timeout(DEADLINE, answered).await.expect("another stream is answered");
    }
    // What had begun before the first reset.
    let (connections, requests) = (connections.load(Ordering::Relaxed), requests.load(Ordering::Relaxed));
    assert!(connections <= 3 && requests <= 1, "{connections} connections, {requests} requests");
}

#[tokio::test]
async fn a_drain_closes_the_listener_while_connections_go_on() {
    let (shared, drain) = shared(config(), &Mesh::new());
    let bound = listen::bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0);
    let addr = bound.local_addr().unwrap();
    let listener = Listener::new(bound, SocketConfig::default()).unwrap();
    let discover = testing::discover(&shared);
    let outbound = Outbound::new(Arc::clone(&shared), discover.clone());
    let policies = Policies::unreachable(shared.config.clone());
    let open = shared.drain.track(std::future::pending::<()>());
    let accepting = run(Arc::clone(&shared), policies, discover, outbound, listener);
    let drained = tokio::spawn(async move {
        TcpStream::connect(addr).await.unwrap();
        drain.drain(DEADLINE).await
    });
    tokio::time::timeout(DEADLINE, accepting).await.expect("it accepts further");
    let refused = TcpStream::connect(addr).await.unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    assert!(!drained.is_finished());
    drop(open);
    assert!(drained.await.unwrap());
}

#[tokio::test]
async fn a_drain_waits_for_tunnels() {
    let mut world = World::new(http_app().await).await;
    let mut stream = world.tunnel(Via::Tls).await;
    let drained = tokio::spawn(world.drain.take().unwrap().drain(DEADLINE));
    world.registry.drain.signaled().await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!drained.is_finished(), "the tunnel is open");
    stream.write_all(b"abcd").await.unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"dcba");
    drop(stream);
    assert!(drained.await.unwrap(), "the tunnel has ended");
}

#[tokio::test]
async fn a_tunnel_is_a_request_in_flight_until_it_ends() {
    let world = World::with(http_app().await, |config| config.inbound.max_in_flight = 1).await;
    let mut tunnel = world.tunnel(Via::Tls).await;
    let status = async || world.get(Via::Plain, Some(ELSEWHERE), "/").await.0;
    assert_eq!(status().await, StatusCode::SERVICE_UNAVAILABLE);
    tunnel.write_all(b"abcd").await.unwrap();
    let mut answer = [0; 4];
    tunnel.read_exact(&mut answer).await.unwrap();
    drop(tunnel);
    settled(async || match status().await {
        StatusCode::OK => Ok(()),
        other => Err(other),
    })
    .await;
}

#[tokio::test]
async fn a_tunnel_keeps_nothing_of_its_connection() {
    let world = World::new(http_app().await).await;
    let mut tunnel = world.tunnel(Via::Tls).await;
    let port = world.inbound.targets.get(world.app);
    crate::testing::eventually("the worker and this test alone have it", || Arc::strong_count(&port) == 2).await;
    tunnel.write_all(b"abcd").await.unwrap();
    let mut answer = [0; 4];
    tunnel.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"dcba");
}

/// The response to a request of this type on a connection of its own, with its body still to come.
async fn head_of(world: &World, content_type: &str) -> Response<Incoming> {
    let stream = TokioIo::new(world.connect(Via::Plain, Some(ELSEWHERE)).await);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://web.demo/").header("content-type", content_type);
    sender.send_request(request.body(Full::<Bytes>::default()).unwrap()).await.unwrap()
}

#[tokio::test]
async fn no_more_requests_are_in_flight_than_allowed_and_one_is_until_its_response_has_ended() {
    let (app, mut held) = held_app().await;
    let world = World::with(app, |config| config.inbound.max_in_flight = 1).await;
    let first = head_of(&world, "text/plain").await;
    assert_eq!(first.status(), 200);
    for (content_type, status, code) in [("text/plain", 503, None), ("application/grpc", 200, Some("14"))] {
        let refused = head_of(&world, content_type).await;
        assert_eq!(refused.status(), status, "{content_type}");
        let of_grpc = refused.headers().get("grpc-status").map(|code| code.to_str().unwrap());
        assert_eq!(of_grpc, code, "{content_type}");
    }
    let (status, headers, _) = world.get(Via::Plain, Some(ELSEWHERE), "/").await;
    assert_eq!((status.as_u16(), &headers["connection"]), (503, &"close".parse().unwrap()));
    assert_eq!(world.counted(&scrape(&world), "inbound_http_errors_total", &[r#"error="loadshed""#]), 3);

    held.recv().await.unwrap().send(()).unwrap();
    assert_eq!(first.into_body().collect().await.unwrap().to_bytes(), "end");
    assert_eq!(head_of(&world, "text/plain").await.status(), 200);
}

/// An application that resets each stream; after its head, when the test has it.
async fn resetting_app(reason: Reason, after_head: bool, has_head: Arc<Notify>) -> SocketAddr {
    serve_each(move |stream| {
        let has_head = Arc::clone(&has_head);
        async move {
            let mut connection = ::h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                if !after_head {
                    respond.send_reset(reason);
                    continue;
                }
                let mut body: ::h2::SendStream<Bytes> = respond.send_response(Response::new(()), false).unwrap();
                let has_head = Arc::clone(&has_head);
                tokio::spawn(async move {
                    has_head.notified().await;
                    body.send_reset(reason);
                });
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_reset_of_the_applications_stream_reaches_a_client_of_http2_with_its_reason() {
    for reason in [Reason::CANCEL, Reason::INTERNAL_ERROR, Reason::ENHANCE_YOUR_CALM, Reason::REFUSED_STREAM] {
        for after_head in [false, true] {
            let has_head = Arc::new(Notify::new());
            let world = World::new(resetting_app(reason, after_head, Arc::clone(&has_head)).await).await;
            let stream = world.connect(Via::Direct(Some(SessionProtocol::Http2)), Some(ELSEWHERE)).await;
            let (mut sender, connection) = ::h2::client::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            let request = Request::get("http://web.demo/").body(()).unwrap();
            let (response, _) = sender.send_request(request, true).unwrap();
            let error = match response.await {
                Err(error) => {
                    assert!(!after_head, "{reason:?}: {error}");
                    error
                }
                Ok(response) => {
                    assert!(after_head, "{reason:?}: {response:?}");
                    has_head.notify_one();
                    let ended = response.into_body().data().await.expect("the body does not just end");
                    ended.expect_err("the body has no bytes")
                }
            };
            assert!(error.is_reset(), "{reason:?} {after_head}: {error}");
            assert_eq!(error.reason(), Some(reason), "{after_head}");
        }
    }
}

#[tokio::test]
async fn a_client_of_http2_that_answers_no_ping_is_closed() {
    let keepalive = Keepalive { interval: Duration::from_millis(20), timeout: Duration::from_millis(500) };
    let pinging = |config: &mut Config| config.http2.inbound_server.keepalive = Some(keepalive);
    let world = World::with(http_app().await, pinging).await;
    let mut client = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    client.write_all(&preface()).await.unwrap();
    let mut pings = 0;
    let closed = async {
        while let Some(Received { kind, flags, payload, .. }) = next_frame(&mut client).await {
            if kind == PING && flags & ACK == 0 {
                pings += 1;
                if pings < 3 {
                    client.write_all(&frame(PING, ACK, 0, &payload)).await.unwrap();
                }
            }
        }
    };
    tokio::time::timeout(DEADLINE, closed).await.expect("it stays open");
    assert_eq!(pings, 3, "those that are answered are followed by others");
}

#[tokio::test]
async fn windows_follow_the_bandwidth_where_the_settings_ask_for_it() {
    const SETTINGS: u8 = 4;
    const INITIAL_WINDOW: [u8; 2] = [0, 4];
    const PART: usize = 16 * 1024;
    const END_HEADERS: u8 = 4;
    let adaptive = |config: &mut Config| config.http2.inbound_server.adaptive_window = true;
    let silent = serve_each(|stream| async move {
        let _held = stream;
        std::future::pending::<()>().await;
    });
    let world = World::with(silent.await, adaptive).await;
    let mut client = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    // A POST whose body is still to come.
    client.write_all(&[preface(), frame(HEADERS, END_HEADERS, 1, &head(0x83, "/"))].concat()).await.unwrap();
    let grown = async {
        while let Some(Received { kind, flags, payload, .. }) = next_frame(&mut client).await {
            if kind == PING && flags & ACK == 0 {
                // More than two thirds of a stream's window, in one round trip.
                let data = frame(DATA, 0, 1, &[0; PART]).repeat(3);
                client.write_all(&[data, frame(PING, ACK, 0, &payload)].concat()).await.unwrap();
            }
            if kind == SETTINGS && flags & ACK == 0 {
                client.write_all(&frame(SETTINGS, ACK, 0, &[])).await.unwrap();
            }
            let mut settings = payload.chunks(6).filter(|_| kind == SETTINGS);
            let window = settings.find_map(|setting| setting.strip_prefix(&INITIAL_WINDOW)?.try_into().ok());
            let window = window.map_or(0, u32::from_be_bytes);
            if window > 65_535 {
                return window;
            }
        }
        panic!("closed");
    };
    let window = tokio::time::timeout(DEADLINE, grown).await.expect("it stays small");
    assert!(window >= 2 * 3 * PART as u32, "{window}");
}

#[tokio::test]
async fn an_application_that_accepts_nobody_is_a_gateway_timeout() {
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(1).unwrap();
    let app = full.local_addr().unwrap().as_socket().unwrap();
    // The kernel drops the handshakes of those that find no room.
    let connect = || std::net::TcpStream::connect_timeout(&app, Duration::from_millis(100)).ok();
    let _waiting: Vec<_> = std::iter::from_fn(connect).collect();

    let world = World::with(app, |config| config.inbound.connect_timeout = Duration::from_millis(100)).await;
    let (status, headers, _) = world.get(Via::Tls, Some(ELSEWHERE), "/").await;
    assert_eq!((status.as_u16(), &headers["connection"]), (504, &"close".parse().unwrap()));
    let call = Request::post("http://web.demo/a.B/C").header("content-type", "application/grpc").body(()).unwrap();
    let (status, headers, _) = world.get_http2(Via::Tls, Some(ELSEWHERE), call).await;
    assert_eq!((status.as_u16(), &headers["grpc-status"]), (200, &"4".parse().unwrap()));
    assert_eq!(world.counted(&scrape(&world), "inbound_http_errors_total", &[r#"error="connect timeout""#]), 2);
}
