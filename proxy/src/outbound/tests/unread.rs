//! Responses that their clients do not read, and requests that their servers do not, or not to their end.

use std::sync::atomic::AtomicUsize;

use ::h2::Reason;

use super::{
    fidelity::ways,
    resilience::{changed, ejecting, metric, response_timeout},
    *,
};
use crate::http::frames::{Received, frame, head, next_frame, preface, preface_with, stream};

/// Of a response, more than all sockets on its way hold.
const LARGE: usize = 128 * 1024 * 1024;
/// The most that the sockets and the proxy hold: the kernel has up to 10 MiB for each of the two connections.
const HELD: usize = 48 * 1024 * 1024;
/// How long it may take on a machine that is busy until nothing moves.
const PATIENCE: Duration = Duration::from_secs(60);

/// Answers `/large`, and counts what it could write of it; anything else is answered with nothing.
async fn application_of_much(written: Arc<AtomicUsize>) -> SocketAddr {
    serve_each(move |mut stream| {
        let written = Arc::clone(&written);
        async move {
            let mut request = [0; 4096];
            let read = stream.read(&mut request).await.unwrap_or(0);
            if !request[..read].starts_with(b"GET /large ") {
                let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
                return;
            }
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n");
            let _ = stream.write_all(head.as_bytes()).await;
            let chunk = vec![b'x'; 64 * 1024];
            while written.load(Ordering::Relaxed) < LARGE && stream.write_all(&chunk).await.is_ok() {
                written.fetch_add(chunk.len(), Ordering::Relaxed);
            }
        }
    })
    .await
}

/// Where clients reach the application through one side of the proxy.
async fn address_of(side: &str, proxy: &Proxy, app: SocketAddr) -> SocketAddr {
    match side {
        "outbound" => proxy.addr,
        _ => SocketAddr::from(([127, 0, 0, 1], testing::serve_port(Arc::clone(&proxy.shared), app).await)),
    }
}

async fn status(addr: SocketAddr) -> StatusCode {
    let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
    let (mut sender, connection) = conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    sender.send_request(get("/")).await.unwrap().status()
}

#[tokio::test]
async fn a_client_of_http1_that_does_not_read_holds_its_server_up() {
    for side in ["outbound", "inbound"] {
        let written = Arc::<AtomicUsize>::default();
        let app = application_of_much(Arc::clone(&written)).await;
        let proxy = Proxy::start(app, Control::default()).await;
        let addr = address_of(side, &proxy, app).await;
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(b"GET /large HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
        let stuck = tokio::time::timeout(PATIENCE, async {
            // Nothing moves any more when it has not moved while others were answered.
            let (mut seen, mut answers) = (0, 0);
            while answers < 20 {
                assert_eq!(status(addr).await, StatusCode::NO_CONTENT);
                let now = written.load(Ordering::Relaxed);
                answers = if now == seen && now > 0 { answers + 1 } else { 0 };
                seen = now;
            }
            seen
        });
        let seen = stuck.await.expect("the response does not begin, or never stops");
        assert!(seen <= HELD, "{side}: {} MiB are on their way", seen / 1024 / 1024);
        let mut received = 0;
        let mut buffer = vec![0; 1024 * 1024];
        while received < LARGE {
            let read = client.read(&mut buffer).await.unwrap();
            assert_ne!(read, 0, "{side}: the response ends after {received} bytes");
            received += read;
        }
    }
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
/// Statuses in HPACK's static table (RFC 7541, appendix A).
const OK: u8 = 0x88;
const NO_CONTENT: u8 = 0x89;
/// RST_STREAM and GOAWAY.
const FAILURES: [u8; 2] = [RST_STREAM, 7];
/// The streams of one connection that nobody reads. By h2's default the connection would end at the ninth.
const STALLED: u32 = 16;

/// A stream's window full of messages of 16 bytes.
fn messages(stream: u32) -> Vec<u8> {
    frame(DATA, 0, stream, &[7; 16]).repeat(65_535 / 16)
}

/// The next frame that fits. Frames that end a stream or the connection do not come before it.
async fn frame_that(peer: &mut TcpStream, fits: impl Fn(&Received) -> bool) -> Received {
    let found = async {
        loop {
            let received = next_frame(peer).await.expect("the connection ends");
            let Received { kind, stream, ref payload, .. } = received;
            assert!(!FAILURES.contains(&kind), "{kind} on stream {stream}: {}", payload.escape_ascii());
            if fits(&received) {
                return received;
            }
        }
    };
    tokio::time::timeout(PATIENCE, found).await.expect("the frame does not come")
}

/// Waits until the peer has read everything that was written.
async fn all_read(peer: &mut TcpStream) {
    peer.write_all(&frame(PING, 0, 0, &[7; 8])).await.unwrap();
    frame_that(peer, |received| received.kind == PING && received.flags == ACK).await;
}

/// The first byte of the head that answers a GET on a stream.
async fn ask(client: &mut TcpStream, stream: u32) -> u8 {
    client.write_all(&frame(HEADERS, 5, stream, &head(0x82, "/"))).await.unwrap();
    frame_that(client, |received| received.kind == HEADERS && received.stream == stream).await.payload[0]
}

/// The proxy holds the messages that the client does not read. Its requests share a connection to their endpoint.
#[tokio::test]
async fn slow_readers_of_small_messages_do_not_end_another_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap(), Control::default()).await;
    let mut client = proxy.connect().await;
    let heads = (0..STALLED).flat_map(|n| frame(HEADERS, 5, stream(n), &head(0x82, "/")));
    // The client has no window for any byte.
    client.write_all(&[preface_with(&[0, 4, 0, 0, 0, 0]), heads.collect()].concat()).await.unwrap();
    let (mut endpoint, _) = listener.accept().await.unwrap();
    endpoint.read_exact(&mut [0; 24]).await.unwrap();
    endpoint.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    for _ in 0..STALLED {
        let request = frame_that(&mut endpoint, |received| received.kind == HEADERS).await;
        endpoint.write_all(&frame(HEADERS, 4, request.stream, &[OK])).await.unwrap();
        endpoint.write_all(&messages(request.stream)).await.unwrap();
    }
    all_read(&mut endpoint).await;
    let answer = async {
        let request = frame_that(&mut endpoint, |received| received.kind == HEADERS).await;
        endpoint.write_all(&frame(HEADERS, 5, request.stream, &[NO_CONTENT])).await.unwrap();
    };
    assert_eq!(tokio::join!(ask(&mut client, stream(STALLED)), answer).0, NO_CONTENT);
}

/// The first stream of a client.
const FIRST: u32 = 1;
const END_STREAM: u8 = 1;

/// An endpoint whose responses have two seconds, and which rests after a failure, with a client that announces this
/// window for each stream and sends this number of requests.
async fn requested(window: u32, requests: u32) -> (Proxy, TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control = Control::default();
    let service = "10.1.9.5:80".parse().unwrap();
    let timed = changed(|rule| rule.timeouts = Some(response_timeout(Duration::from_secs(2))));
    control.policies.lock().insert(service, ejecting(timed, 1));
    control.update(SERVICE, add(vec![endpoint(listener.local_addr().unwrap(), None)]));
    let proxy = Proxy::start(service, control).await;
    let mut client = proxy.connect().await;
    let settings = [&[0, 4][..], &window.to_be_bytes()].concat();
    client.write_all(&preface_with(&settings)).await.unwrap();
    let mut accepted = None;
    for n in 0..requests {
        client.write_all(&frame(HEADERS, 5, FIRST + 2 * n, &head(0x82, "/"))).await.unwrap();
        if accepted.is_none() {
            let (mut endpoint, _) = listener.accept().await.unwrap();
            endpoint.read_exact(&mut [0; 24]).await.unwrap();
            endpoint.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            accepted = Some(endpoint);
        }
        let request = frame_that(accepted.as_mut().unwrap(), |received| received.kind == HEADERS).await;
        assert_eq!(request.stream, FIRST + 2 * n, "the client's stream has another number");
    }
    (proxy, client, accepted.unwrap())
}

/// Waits until a stream is reset.
async fn reset(peer: &mut TcpStream, stream: u32) {
    let reset = async {
        loop {
            let received = next_frame(peer).await.expect("the connection ends");
            if (received.kind, received.stream) == (RST_STREAM, stream) {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, reset).await.expect("the stream goes on");
}

#[tokio::test]
async fn a_response_that_its_client_does_not_read_in_time_blames_no_endpoint() {
    for (window, blamed) in [(0, 0), (65_535, 1)] {
        let (proxy, mut client, mut endpoint) = requested(window, 1).await;
        let begin = [frame(HEADERS, 4, FIRST, &[OK]), frame(DATA, 0, FIRST, b"begin").repeat(2)].concat();
        endpoint.write_all(&begin).await.unwrap();
        reset(&mut endpoint, FIRST).await;
        client.write_all(&frame(WINDOW_UPDATE, 0, FIRST, &65_535_u32.to_be_bytes())).await.unwrap();
        reset(&mut client, FIRST).await;
        settled(async || match metric(&proxy, "response_total") {
            1 => Ok(()),
            _ => Err(proxy.scrape()),
        })
        .await;
        let pending = metric(&proxy, "outbound_http_balancer_endpoints{endpoint_state=\"pending\"");
        assert_eq!(pending, blamed, "with a window of {window}");
    }
}

#[tokio::test]
async fn a_response_that_has_ended_in_time_reaches_a_client_that_reads_it_later() {
    const CHUNK: [u8; 16 * 1024] = [7; 16 * 1024];
    const STALLED: u32 = FIRST + 2;
    let (_proxy, mut client, mut endpoint) = requested(0, 2).await;
    let heads = [FIRST, STALLED].map(|stream| frame(HEADERS, 4, stream, &[OK])).concat();
    let whole = [frame(DATA, 0, FIRST, &CHUNK).repeat(2), frame(DATA, END_STREAM, FIRST, &CHUNK)].concat();
    endpoint.write_all(&[heads, whole, frame(DATA, 0, STALLED, b"begin")].concat()).await.unwrap();
    // By then the time of the first is over, too.
    reset(&mut endpoint, STALLED).await;
    client.write_all(&frame(WINDOW_UPDATE, 0, FIRST, &65_535_u32.to_be_bytes())).await.unwrap();
    let (mut received, mut has_ended) = (0, false);
    while !has_ended {
        let data = frame_that(&mut client, |received| received.kind == DATA).await;
        received += data.payload.len();
        has_ended = data.flags & END_STREAM != 0;
    }
    assert_eq!(received, 3 * CHUNK.len());
}

/// An application of HTTP/2 that reads nothing of a POST, and answers other requests.
async fn unreading_app() -> SocketAddr {
    serve_each(|stream| {
        let service = service_fn(|request: Request<Incoming>| async move {
            if request.method() == Method::POST {
                let _held = request;
                return std::future::pending().await;
            }
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        });
        let mut builder = http2::Builder::new(TokioExecutor::new());
        // The rest stays with the proxy.
        builder.initial_stream_window_size(1).serve_connection(TokioIo::new(stream), service)
    })
    .await
}

#[tokio::test]
async fn small_messages_that_an_application_does_not_read_do_not_end_another_request() {
    for side in ["outbound", "inbound"] {
        let app = unreading_app().await;
        let proxy = Proxy::start(app, Control::default()).await;
        let addr = address_of(side, &proxy, app).await;
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(&preface()).await.unwrap();
        frame_that(&mut client, |received| received.kind == WINDOW_UPDATE && received.stream == 0).await;
        // The application announces its windows.
        assert_eq!(ask(&mut client, 1).await, OK, "{side}");
        for n in 0..STALLED {
            client.write_all(&frame(HEADERS, 4, stream(n), &head(0x83, "/"))).await.unwrap();
            client.write_all(&messages(stream(n))).await.unwrap();
        }
        all_read(&mut client).await;
        assert_eq!(ask(&mut client, stream(STALLED)).await, OK, "{side}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_by_a_server_that_reads_no_more_of_its_request() {
    let (is_full, is_noticed) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (full, noticed) = (Arc::clone(&is_full), Arc::clone(&is_noticed));
    let app = serve_each(move |stream| {
        let (filled, is_noticed) = (Arc::clone(&full), Arc::clone(&noticed));
        async move {
            let mut server = ::h2::server::handshake(stream).await.unwrap();
            let (request, mut respond) = server.accept().await.unwrap().unwrap();
            let mut unread = request.into_body();
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            let left = async {
                while unread.flow_control().used_capacity() < 65_535 {
                    tokio::task::yield_now().await;
                }
                filled.notify_one();
                std::future::poll_fn(|cx| stream.poll_reset(cx)).await
            };
            tokio::select! {
                _ = server.accept() => panic!("the connection ends"),
                reason = left => assert_eq!(reason.unwrap(), Reason::CANCEL),
            }
            is_noticed.notify_one();
        }
    })
    .await;
    for (way, proxy) in ways(app).await {
        let (mut sender, connection) = ::h2::client::handshake(proxy.connect().await).await.unwrap();
        tokio::spawn(connection);
        let request = Request::post("http://server.demo/").body(()).unwrap();
        let (response, mut body) = sender.send_request(request, false).unwrap();
        let response = response.await.unwrap();
        // More than all windows on the way.
        body.send_data(vec![0; 1 << 20].into(), false).unwrap();
        is_full.notified().await;
        body.send_reset(Reason::CANCEL);
        drop(response);
        let noticed = tokio::time::timeout(Duration::from_secs(20), is_noticed.notified()).await;
        assert!(noticed.is_ok(), "{way}: the server is left to wait");
    }
}

#[tokio::test]
async fn uploads_that_are_refused_early_end_no_other_request_on_their_connection() {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const GOAWAY: u8 = 7;
    const END_HEADERS: u8 = 4;
    let refusal = failing(403, "refused");
    let control = Control::default();
    let service = "10.1.7.2:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![refusal]));
    let proxy = Proxy::start(service, control).await;
    let mut connection = proxy.connect().await;
    connection.write_all(&preface()).await.unwrap();
    for batch in 0..14 {
        let ids: Vec<_> = (batch * 100..(batch + 1) * 100).map(stream).collect();
        let heads = ids.iter().flat_map(|id| frame(HEADERS, END_HEADERS, *id, &head(0x83, "/")));
        connection.write_all(&heads.collect::<Vec<_>>()).await.unwrap();
        let mut answered = 0;
        while answered < ids.len() {
            let received = next_frame(&mut connection).await.expect("the connection ends");
            assert_ne!(received.kind, GOAWAY, "after {batch} batches: {}", received.payload.escape_ascii());
            answered += usize::from(received.kind == HEADERS);
        }
        // What was on its way when the refusal was sent.
        let late = ids.iter().flat_map(|id| frame(DATA, 0, *id, b"x").repeat(3));
        connection.write_all(&late.collect::<Vec<_>>()).await.unwrap();
    }
}
