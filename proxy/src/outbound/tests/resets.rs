//! Streams and connections of HTTP/2 that end early, requests that are shed, and the drain.

use std::{collections::HashSet, sync::atomic::AtomicUsize};

use ::h2::{Reason, client, server};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};
use weft_proto::linkerd::outbound::http_route::Retry;

use super::{
    resilience::{Act, Script, backoff, changed, ejecting, metric, retry},
    *,
};
use crate::http::frames::{frame, next_frame};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Status 200 in HPACK's static table.
const OK: u8 = 0x88;

/// A client whose frames the test sees.
async fn client(proxy: &Proxy) -> client::SendRequest<Bytes> {
    let (sender, connection) = client::handshake(proxy.connect().await).await.unwrap();
    tokio::spawn(connection);
    sender.ready().await.unwrap()
}

fn request() -> Request<()> {
    Request::post("http://server.demo/").body(()).unwrap()
}

/// Whether a request ended with this error, in the metrics of its route.
fn has_ended(proxy: &Proxy, error: &str) -> bool {
    let is_it = |line: &str| {
        line.starts_with("outbound_http_route_request_statuses_total")
            && line.ends_with(&format!(r#"error="{error}"}} 1"#))
    };
    proxy.scrape().lines().any(is_it)
}

#[tokio::test]
async fn a_reset_reaches_a_client_of_http2_with_its_code() {
    for (reason, label) in [
        (Reason::CANCEL, "CANCEL"),
        (Reason::INTERNAL_ERROR, "RESET"),
        (Reason::ENHANCE_YOUR_CALM, "ENHANCE_YOUR_CALM"),
        // It is too large to be sent again.
        (Reason::REFUSED_STREAM, "REFUSED"),
    ] {
        let (proxy, peer, _) = meshed().await;
        let half_read = Arc::new(tokio::sync::Notify::new());
        let was_read = Arc::clone(&half_read);
        tokio::spawn(async move {
            let (_, stream) = peer.accept().await;
            let mut server = server::handshake(stream).await.unwrap();
            let (_body, mut respond) = server.accept().await.unwrap().unwrap();
            respond.send_reset(reason);
            let (_body, mut respond) = server.accept().await.unwrap().unwrap();
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            stream.send_data("half".into(), false).unwrap();
            let mut reset = std::pin::pin!(async {
                was_read.notified().await;
                stream.send_reset(reason);
            });
            tokio::select! {
                _ = server.accept() => panic!("the connection ends"),
                () = &mut reset => {}
            }
            let _ = server.accept().await;
        });
        let mut sender = client(&proxy).await;
        let large = Request::post("http://server.demo/").header("content-length", 1 << 20).body(()).unwrap();
        let (response, _body) = sender.send_request(large, false).unwrap();
        assert_eq!(response.await.unwrap_err().reason(), Some(reason));
        eventually(label, || has_ended(&proxy, label)).await;
        let (response, _body) = sender.send_request(request(), false).unwrap();
        let mut body = response.await.unwrap().into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "half");
        half_read.notify_one();
        assert_eq!(body.data().await.unwrap().unwrap_err().reason(), Some(reason), "after the head");
    }
}

#[tokio::test]
async fn a_reset_is_a_bad_gateway_for_a_client_of_http1() {
    let (proxy, peer, _) = meshed().await;
    tokio::spawn(async move {
        let (_, stream) = peer.accept().await;
        let mut server = server::handshake(stream).await.unwrap();
        while let Some(Ok((_, mut respond))) = server.accept().await {
            respond.send_reset(Reason::INTERNAL_ERROR);
        }
    });
    assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY);
    assert!(has_ended(&proxy, "IO"), "{}", proxy.scrape());
}

/// Reads the client's frames until its request's head has come, and writes a GOAWAY that leaves the request out.
async fn go_away(mut stream: impl AsyncRead + AsyncWrite + Unpin, reason: Reason) {
    const PREFACE: usize = 24;
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
    stream.read_exact(&mut [0; PREFACE]).await.unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        stream.read_exact(&mut vec![0; length as usize]).await.unwrap();
        if head[3] == HEADERS {
            break;
        }
    }
    let [.., code] = u32::from(reason).to_be_bytes();
    stream.write_all(&[0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, code]).await.unwrap();
    // Until the client closes.
    let _ = stream.read_to_end(&mut Vec::new()).await;
}

#[tokio::test]
async fn a_request_that_a_closing_connection_leaves_out_is_sent_again_with_its_body() {
    let (proxy, peer, _) = meshed().await;
    tokio::spawn(async move {
        let (_, stream) = peer.accept().await;
        tokio::spawn(go_away(stream, Reason::NO_ERROR));
        let (_, stream) = peer.accept().await;
        let service = service_fn(|request: Request<Incoming>| async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            Ok::<_, Infallible>(Response::new(Full::new(body)))
        });
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await
    });
    let request = Request::post("/").header("host", "server.demo").body(Full::from("once more")).unwrap();
    let response = proxy.http1().await.send_request(request).await.unwrap();
    assert_eq!((response.status(), text(response).await.as_str()), (StatusCode::OK, "once more"));
}

#[tokio::test]
async fn a_connection_that_breaks_may_have_processed_its_request() {
    for (reason, label) in [(Some(Reason::INTERNAL_ERROR), "GO_AWAY"), (None, "IO")] {
        let (proxy, peer, _) = meshed().await;
        tokio::spawn(async move {
            loop {
                let (_, mut stream) = peer.accept().await;
                match reason {
                    Some(reason) => go_away(stream, reason).await,
                    None => drop(stream.read(&mut [0; 1]).await),
                }
            }
        });
        let mut sender = client(&proxy).await;
        let (response, _) = sender.send_request(request(), true).unwrap();
        response.await.unwrap_err();
        eventually(label, || has_ended(&proxy, label)).await;
        assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY);
        assert_eq!(metric(&proxy, "outbound_http_route_backend_requests_total"), 2, "each was sent once");
    }
}

/// The stream of the next request.
async fn next_head(stream: &mut (impl AsyncRead + Unpin)) -> u32 {
    loop {
        let received = next_frame(stream).await.unwrap();
        if received.kind == HEADERS {
            return received.stream;
        }
    }
}

#[tokio::test]
async fn what_may_arrive_twice_is_sent_again_when_a_kept_connection_ends() {
    for (method, breaks, status) in [
        (Method::GET, None, StatusCode::OK),
        (Method::POST, None, StatusCode::BAD_GATEWAY),
        // The peer has processed neither.
        (Method::POST, Some(Reason::ENHANCE_YOUR_CALM), StatusCode::OK),
    ] {
        let (proxy, peer, _) = meshed().await;
        tokio::spawn(async move {
            let (_, mut kept) = peer.accept().await;
            kept.read_exact(&mut [0; 24]).await.unwrap();
            kept.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            let first = next_head(&mut kept).await;
            kept.write_all(&frame(HEADERS, END_STREAM | END_HEADERS, first, &[OK])).await.unwrap();
            next_head(&mut kept).await;
            if let Some(reason) = breaks {
                let payload = [first.to_be_bytes(), u32::from(reason).to_be_bytes()].concat();
                kept.write_all(&frame(GOAWAY, 0, 0, &payload)).await.unwrap();
                // Until the client closes.
                tokio::spawn(async move { kept.read_to_end(&mut Vec::new()).await });
            } else {
                drop(kept);
            }
            let (_, stream) = peer.accept().await;
            let mut server = server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = server.accept().await {
                respond.send_response(Response::new(()), true).unwrap();
            }
        });
        assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
        let request = Request::builder().method(&method).uri("/").header("host", "server.demo");
        let response = proxy.http1().await.send_request(request.body(Full::default()).unwrap()).await.unwrap();
        assert_eq!(response.status(), status, "{method} {breaks:?}");
    }
}

#[tokio::test]
async fn what_finds_no_endpoint_is_tried_again_and_what_is_shed_is_not() {
    for (capacity, status, retries, label) in
        [(10, StatusCode::GATEWAY_TIMEOUT, 2, "FAIL_FAST"), (0, StatusCode::SERVICE_UNAVAILABLE, 0, "LOAD_SHED")]
    {
        let control = Control::default();
        let service = "10.1.9.1:80".parse().unwrap();
        control.policies.lock().insert(service, changed(|rule| rule.retry = Some(retry(2))));
        control.update(SERVICE, add(vec![]));
        let impatient = |config: &mut Config| {
            config.outbound.http_queue.capacity = capacity;
            config.outbound.http_queue.failfast_timeout = Duration::from_millis(50);
        };
        let proxy = Proxy::start_with(service, control, impatient, true).await;
        let response = proxy.get("/").await;
        assert_eq!((response.status(), &response.headers()["connection"]), (status, &"close".parse().unwrap()));
        assert_eq!(metric(&proxy, "outbound_http_route_retry_requests_total"), retries);
        assert!(has_ended(&proxy, label), "{}", proxy.scrape());
    }
}

/// The next connection of HTTP/2, and the streams of this number of requests on it.
async fn requested(listener: &TcpListener, requests: usize) -> (TcpStream, Vec<u32>) {
    let (mut server, _) = listener.accept().await.unwrap();
    server.read_exact(&mut [0; 24]).await.unwrap();
    server.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    let mut streams = Vec::new();
    while streams.len() < requests {
        streams.push(next_head(&mut server).await);
    }
    (server, streams)
}

/// A Service with one endpoint, which rests after a failure.
async fn ejected_at_once(listener: &TcpListener) -> Proxy {
    let control = Control::default();
    let service = "10.1.9.4:80".parse().unwrap();
    control.policies.lock().insert(service, ejecting(policy(SERVICE, vec![]), 1));
    control.update(SERVICE, add(vec![endpoint(listener.local_addr().unwrap(), None)]));
    Proxy::start(service, control).await
}

const PENDING: &str = "outbound_http_balancer_endpoints{endpoint_state=\"pending\"";

/// A client that reads no body holds up what endpoints send, and the proxy ends a connection of which it would hold too
/// much.
#[tokio::test]
async fn a_connection_that_ends_for_the_proxys_own_bounds_blames_no_endpoint() {
    const UNREAD: usize = 2;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = ejected_at_once(&listener).await;
    let handshake = client::Builder::new().initial_window_size(0).handshake::<_, Bytes>(proxy.connect().await);
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let responses: Vec<_> = (0..=UNREAD).map(|_| sender.send_request(request(), true).unwrap().0).collect();
    let (mut server, streams) = requested(&listener, UNREAD + 1).await;
    for stream in &streams[..UNREAD] {
        // Of its window, each byte comes alone, and counts for a whole frame.
        let bytes = [frame(HEADERS, END_HEADERS, *stream, &[OK]), frame(DATA, 0, *stream, &[7]).repeat(65_535)];
        if server.write_all(&bytes.concat()).await.is_err() {
            break;
        }
    }
    let responses = tokio::time::timeout(Duration::from_secs(60), futures::future::join_all(responses)).await;
    let responses = responses.expect("the connection goes on");
    assert_eq!(responses.iter().filter(|response| response.is_err()).count(), 1, "{responses:?}");
    settled(async || match metric(&proxy, "response_total") {
        1 => Ok(()),
        _ => Err(proxy.scrape()),
    })
    .await;
    assert_eq!(metric(&proxy, PENDING), 0);
}

/// The bounds are the same, but no client is slow.
#[tokio::test]
async fn an_endpoint_that_floods_is_blamed() {
    type Flood = fn(u32) -> [Vec<u8>; 2];
    let floods: [(_, Flood); 2] = [
        ("empty DATA", |id| [frame(HEADERS, END_HEADERS, id, &[OK]), frame(DATA, 0, id, &[]).repeat(101)]),
        ("CONTINUATION", |id| [frame(HEADERS, 0, id, &[OK]), frame(CONTINUATION, 0, id, &[]).repeat(1_000)]),
    ];
    for (name, flood) in floods {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = ejected_at_once(&listener).await;
        let mut sender = client(&proxy).await;
        let (response, _) = sender.send_request(request(), true).unwrap();
        let (mut server, streams) = requested(&listener, 1).await;
        server.write_all(&flood(streams[0]).concat()).await.unwrap();
        let read = async {
            let mut body = response.await?.into_body();
            while let Some(data) = body.data().await {
                data?;
            }
            Ok::<_, ::h2::Error>(())
        };
        let read = tokio::time::timeout(Duration::from_secs(60), read).await.expect("the response goes on");
        assert!(read.is_err(), "{name}");
        eventually(name, || metric(&proxy, PENDING) == 1).await;
    }
}

/// A server of HTTP/2 whose responses go on until they are reset, and a little longer, as if it had not noticed yet.
/// The first one ends when this number of others were. Returns how many were, too.
async fn late(resets: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let reset = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&reset);
    let addr = serve_each(move |mut stream| {
        let reset = Arc::clone(&counted);
        async move {
            stream.read_exact(&mut [0; 24]).await.unwrap();
            stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
            let (mut first, mut going_on) = (0, HashSet::new());
            while let Some(received) = next_frame(&mut stream).await {
                let id = received.stream;
                let frames = match received.kind {
                    HEADERS => {
                        first = if first == 0 { id } else { first };
                        going_on.insert(id);
                        frame(HEADERS, END_HEADERS, id, &[OK])
                    }
                    RST_STREAM if going_on.remove(&id) => {
                        let is_last = reset.fetch_add(1, Ordering::Relaxed) + 1 == resets;
                        let end = if is_last { frame(DATA, END_STREAM, first, b"end") } else { Vec::new() };
                        [frame(DATA, 0, id, &[7]).repeat(3), end].concat()
                    }
                    _ => continue,
                };
                if stream.write_all(&frames).await.is_err() {
                    return;
                }
            }
        }
    });
    (addr.await, reset)
}

#[tokio::test]
async fn clients_that_leave_many_responses_end_no_other_request_on_the_connection() {
    // As many as a connection of a client may have, on one connection to the endpoint.
    const REQUESTS: usize = 200;
    const CLIENTS: usize = 10;
    let (server, reset) = late(CLIENTS * REQUESTS).await;
    let proxy = Proxy::start(server, Control::default()).await;
    let mut sender = client(&proxy).await;
    let (response, _) = sender.send_request(request(), true).unwrap();
    let mut body = response.await.unwrap().into_body();
    for left in 1..=CLIENTS {
        let mut leaving = proxy.http2().await;
        let request = || Request::get("http://server.demo/").body(Full::default()).unwrap();
        let responses = (0..REQUESTS).map(|_| leaving.send_request(request()));
        for response in futures::future::join_all(responses).await {
            assert_eq!(response.unwrap().status(), StatusCode::OK);
        }
        eventually("they are reset", || reset.load(Ordering::Relaxed) == left * REQUESTS).await;
    }
    assert_eq!(body.data().await.unwrap().unwrap(), "end");
}

/// Has requests to the Service of [`meshed`] sent again as this says.
fn retrying(proxy: &Proxy, retry: &Retry) {
    let service = "10.1.1.4:80".parse().unwrap();
    proxy.control.change_policy(service, changed(|rule| rule.retry = Some(retry.clone())));
}

fn unavailable() -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

#[tokio::test]
async fn an_attempt_ends_when_the_request_is_sent_again_while_its_body_still_arrives() {
    // The attempt waits for the client, or for the endpoint's window.
    for window in [65_535, 2] {
        let (proxy, peer, _) = meshed().await;
        retrying(&proxy, &retry(1));
        let endpoint = tokio::spawn(async move {
            let (_, stream) = peer.accept().await;
            let handshake = server::Builder::new().initial_window_size(window).handshake::<_, Bytes>(stream);
            let mut server = handshake.await.unwrap();
            // After this answer the proxy knows the window.
            let (_, mut respond) = server.accept().await.unwrap().unwrap();
            respond.send_response(Response::new(()), true).unwrap();
            let (first, mut unread) = server.accept().await.unwrap().unwrap();
            unread.send_response(unavailable(), true).unwrap();
            let (_second, mut respond) = server.accept().await.unwrap().unwrap();
            respond.send_response(Response::new(()), true).unwrap();
            let mut body = first.into_body();
            let reset = async {
                loop {
                    if let Err(error) = body.data().await.expect("the request has no end") {
                        return error.reason();
                    }
                }
            };
            let reset = tokio::select! {
                reset = reset => reset,
                _ = server.accept() => panic!("a third attempt"),
            };
            // The second answer may not have been written yet.
            tokio::spawn(async move { server.accept().await.is_some() });
            reset
        });
        let mut sender = client(&proxy).await;
        assert_eq!(sender.send_request(request(), true).unwrap().0.await.unwrap().status(), 200);
        let (response, mut body) = sender.send_request(request(), false).unwrap();
        body.send_data("begin".into(), false).unwrap();
        assert_eq!(response.await.unwrap().status(), StatusCode::OK);
        let ended = tokio::time::timeout(Duration::from_secs(60), endpoint).await;
        assert_eq!(ended.expect("the first attempt goes on").unwrap(), Some(Reason::CANCEL), "{window}");
    }
}

#[tokio::test]
async fn a_connection_of_http1_ends_with_the_attempt_whose_request_is_sent_again() {
    let (ended, mut end) = mpsc::unbounded_channel();
    let mut connections = 0;
    let app = serve_each(move |mut stream| {
        connections += 1;
        let (status, ended) = (if connections == 1 { 503 } else { 200 }, ended.clone());
        async move {
            if stream.read(&mut [0; 1024]).await.unwrap() == 0 {
                return;
            }
            let answer = format!("HTTP/1.1 {status} Answer\r\ncontent-length: 0\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await;
            let _ = ended.send(status);
        }
    });
    let control = Control::default();
    let service = "10.1.9.3:80".parse().unwrap();
    control.policies.lock().insert(service, changed(|rule| rule.retry = Some(retry(1))));
    control.update(SERVICE, add(vec![endpoint(app.await, None)]));
    let proxy = Proxy::start(service, control).await;
    let mut client = proxy.connect().await;
    let begin = b"POST / HTTP/1.1\r\nhost: server.demo\r\ntransfer-encoding: chunked\r\n\r\n5\r\nbegin\r\n";
    client.write_all(begin).await.unwrap();
    let mut status = [0; 12];
    client.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    let ended = tokio::time::timeout(Duration::from_secs(60), end.recv()).await;
    assert_eq!(ended.expect("the first attempt goes on"), Some(503));
}

#[tokio::test]
async fn what_arrives_during_a_pause_is_no_reason_not_to_send_a_request_again() {
    let (proxy, peer, _) = meshed().await;
    let keeps = Retry { max_request_bytes: 1024, backoff: backoff(Duration::from_millis(300)), ..retry(1) };
    retrying(&proxy, &keeps);
    tokio::spawn(async move {
        let (_, stream) = peer.accept().await;
        let mut server = server::handshake(stream).await.unwrap();
        let (_first, mut respond) = server.accept().await.unwrap().unwrap();
        respond.send_response(unavailable(), true).unwrap();
        let (second, mut respond) = server.accept().await.unwrap().unwrap();
        tokio::spawn(async move {
            let mut body = second.into_body();
            let mut received = 0;
            while let Some(chunk) = body.data().await {
                let chunk = chunk.unwrap();
                body.flow_control().release_capacity(chunk.len()).unwrap();
                received += chunk.len();
            }
            let response = Response::builder().header("x-received", received).body(()).unwrap();
            respond.send_response(response, true).unwrap();
        });
        let _ = server.accept().await;
    });
    let mut sender = client(&proxy).await;
    let (response, mut body) = sender.send_request(request(), false).unwrap();
    body.send_data("begin".into(), false).unwrap();
    eventually("the pause", || metric(&proxy, "outbound_http_route_retry_requests_total") == 1).await;
    body.send_data(vec![b'x'; 100 * 1024].into(), true).unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["x-received"], (5 + 100 * 1024).to_string());
}

#[tokio::test]
async fn requests_beyond_the_limit_are_shed_until_a_response_has_ended() {
    let script = Script::new([Act::Stall]);
    let control = Control::default();
    let service = "10.1.9.2:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    let proxy = Proxy::start_with(service, control, |config| config.outbound.max_in_flight = 1, true).await;
    let mut first = proxy.get("/").await;
    first.body_mut().frame().await.unwrap().unwrap();
    let shed = proxy.get("/").await;
    assert_eq!(
        (shed.status(), &shed.headers()["connection"]),
        (StatusCode::SERVICE_UNAVAILABLE, &"close".parse().unwrap())
    );
    let grpc = Request::post("http://server.demo/echo.Echo/Say").header("content-type", "application/grpc");
    let shed = proxy.http2().await.send_request(grpc.body(Full::default()).unwrap()).await.unwrap();
    assert_eq!((shed.status(), &shed.headers()["grpc-status"]), (StatusCode::OK, &"14".parse().unwrap()));
    assert!(proxy.scrape().contains(r#"outbound_http_errors_total{error="loadshed"} 2"#), "{}", proxy.scrape());
    drop(first);
    let deadline = Instant::now() + Duration::from_secs(60);
    while proxy.get("/").await.status() != StatusCode::OK {
        assert!(Instant::now() < deadline, "the permit is kept");
    }
}

#[tokio::test]
async fn a_drain_takes_no_connections_and_lets_http2_finish() {
    let script = Script::new([Act::Stall]);
    let control = Control::default();
    let service = script.listen().await;
    let mut proxy = Proxy::start(service, control).await;
    let (sender, connection) = client::handshake(proxy.connect().await).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let (response, _) = sender.send_request(request(), true).unwrap();
    let mut body = response.await.unwrap().into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "begin");
    let drained = tokio::spawn(proxy.drain.take().unwrap().drain(Duration::from_secs(600)));
    // GOAWAY: the connection takes no more requests.
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Ok(ready) = sender.ready().await {
        assert!(Instant::now() < deadline, "the client may go on");
        sender = ready;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    while TcpStream::connect(proxy.addr).await.is_ok() {
        assert!(Instant::now() < deadline, "connections are accepted");
    }
    assert!(!drained.is_finished(), "a request is in flight");
    assert!(!connection.is_finished(), "its connection stays");
    drop(body);
    connection.await.unwrap().unwrap();
    assert!(drained.await.unwrap());
}
