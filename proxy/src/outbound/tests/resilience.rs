//! Retries, timeouts, failure accrual and what is sent again without any policy.

use std::{collections::VecDeque, sync::atomic::AtomicUsize};

use futures::StreamExt as _;
use parking_lot::Mutex;
use weft_proto::linkerd::{
    http_route::Timeouts,
    outbound::{
        ExponentialBackoff, FailureAccrual, OutboundPolicy, failure_accrual, grpc_route,
        http_route::{Retry, Rule, retry},
        proxy_protocol,
    },
};

use super::*;

/// What a scripted application does with a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Act {
    /// Answers with a status.
    Answer(u16),
    /// Answers after a while.
    Late(Duration, u16),
    /// Answers with 200 and a body that never ends.
    Stall,
    /// Ends the stream with a gRPC status in trailers.
    Grpc(&'static str),
    /// Answers with this number of bytes in its head.
    Head(usize),
}

/// An application that follows a script, over HTTP/1 or HTTP/2; after its end it answers 200. It keeps what it
/// received: path, body, and the names of headers that ask for retries or timeouts.
#[derive(Clone, Default)]
pub(super) struct Script {
    acts: Arc<Mutex<VecDeque<Act>>>,
    received: Arc<Mutex<Vec<String>>>,
}

impl Script {
    pub(super) fn new(acts: impl IntoIterator<Item = Act>) -> Self {
        Self { acts: Arc::new(Mutex::new(acts.into_iter().collect())), received: Arc::default() }
    }

    pub(super) async fn listen(&self) -> SocketAddr {
        let script = self.clone();
        serve_each(move |stream| {
            let script = script.clone();
            let service = service_fn(move |request| script.clone().act(request));
            async move {
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            }
        })
        .await
    }

    async fn act(self, request: Request<Incoming>) -> Result<Response<BoxedBody>, Infallible> {
        let target = request.uri().path().to_owned();
        let canonical = request.headers().get("l5d-dst-canonical").map(|value| value.to_str().unwrap().to_owned());
        let is_terms =
            |name: &&HeaderName| name.as_str().starts_with("l5d-retry") || name.as_str().ends_with("-timeout");
        let terms: Vec<_> = request.headers().keys().filter(is_terms).map(HeaderName::as_str).collect();
        let terms = terms.join(" ");
        let body = request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let seen = format!("{target} {}{terms}", String::from_utf8_lossy(&body));
        self.received.lock().push(canonical.map_or(seen.clone(), |canonical| format!("{seen} {canonical}")));
        let act = self.acts.lock().pop_front();
        let whole = |status: u16| {
            let body = Full::new(Bytes::from_static(b"answer")).boxed();
            Ok(Response::builder().status(status).body(body).unwrap())
        };
        match act {
            None => whole(200),
            Some(Act::Answer(status)) => whole(status),
            Some(Act::Late(pause, status)) => {
                tokio::time::sleep(pause).await;
                whole(status)
            }
            Some(Act::Stall) => {
                let first = futures::stream::iter([Ok(Frame::data(Bytes::from_static(b"begin")))]);
                Ok(Response::new(http_body_util::BodyExt::boxed(StreamBody::new(
                    first.chain(futures::stream::pending()),
                ))))
            }
            Some(Act::Head(bytes)) => {
                let response = Response::builder().header("x-large", "x".repeat(bytes));
                Ok(response.body(Full::default().boxed()).unwrap())
            }
            Some(Act::Grpc(status)) => {
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", status.parse().unwrap());
                let frames = futures::stream::iter([Ok(Frame::trailers(trailers))]);
                let response = Response::builder().header("content-type", "application/grpc");
                Ok(response.body(http_body_util::BodyExt::boxed(StreamBody::new(frames))).unwrap())
            }
        }
    }

    pub(super) fn received(&self) -> Vec<String> {
        self.received.lock().clone()
    }
}

type BoxedBody = http_body_util::combinators::BoxBody<Bytes, Infallible>;

pub(super) fn duration(duration: Duration) -> Option<prost_types::Duration> {
    duration.try_into().ok()
}

pub(super) fn backoff(min: Duration) -> Option<ExponentialBackoff> {
    let (min_backoff, max_backoff) = (duration(min), duration(Duration::from_secs(60)));
    Some(ExponentialBackoff { min_backoff, max_backoff, jitter_ratio: 0.0, respect_retry_after_hint: false })
}

pub(super) fn retry(max_retries: u32) -> Retry {
    let range = retry::conditions::StatusRange { start: 500, end: 599 };
    Retry {
        max_retries,
        max_request_bytes: 1024,
        conditions: Some(retry::Conditions { status_ranges: vec![range] }),
        timeout: None,
        backoff: backoff(Duration::from_millis(1)),
    }
}

/// A policy for one service whose rules are changed.
pub(super) fn changed(change: impl Fn(&mut Rule)) -> OutboundPolicy {
    let mut policy = policy(SERVICE, vec![]);
    let Some(proxy_protocol::Kind::Detect(detect)) =
        policy.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut())
    else {
        panic!("the policy detects")
    };
    for routes in [&mut detect.http1.as_mut().unwrap().routes, &mut detect.http2.as_mut().unwrap().routes] {
        routes.iter_mut().flat_map(|route| &mut route.rules).for_each(&change);
    }
    policy
}

/// A proxy in front of applications that follow scripts, with a policy.
async fn proxy(policy: OutboundPolicy, scripts: &[&Script]) -> Proxy {
    let control = Control::default();
    let service = "10.1.2.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy);
    let mut endpoints = Vec::new();
    for script in scripts {
        endpoints.push(endpoint(script.listen().await, None));
    }
    control.update(SERVICE, add(endpoints));
    Proxy::start(service, control).await
}

fn post(body: &'static str) -> Request<Full<Bytes>> {
    let body = Full::new(Bytes::from_static(body.as_bytes()));
    Request::post("/do").header("host", "server.demo").body(body).unwrap()
}

pub(super) fn metric(proxy: &Proxy, name: &str) -> u64 {
    let text = proxy.scrape();
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

#[tokio::test]
async fn a_failed_request_is_sent_again_with_its_body() {
    let script = Script::new([Act::Answer(503), Act::Answer(500)]);
    let proxy = proxy(changed(|rule| rule.retry = Some(retry(2))), &[&script]).await;
    let response = proxy.http1().await.send_request(post("some body")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(script.received(), ["/do some body"; 3]);
    assert_eq!(metric(&proxy, "outbound_http_route_retry_requests_total"), 2);
    assert_eq!(metric(&proxy, "outbound_http_route_retry_successes_total"), 1);
    assert_eq!(metric(&proxy, "request_total"), 3, "an endpoint's metrics count attempts");
}

#[tokio::test]
async fn retries_end_at_their_limit_and_the_last_answer_is_delivered() {
    let script = Script::new([Act::Answer(503); 5]);
    let proxy = proxy(changed(|rule| rule.retry = Some(retry(2))), &[&script]).await;
    let response = proxy.http1().await.send_request(post("x")).await.unwrap();
    assert_eq!((response.status(), script.received().len()), (StatusCode::SERVICE_UNAVAILABLE, 3));
    assert_eq!(metric(&proxy, "outbound_http_route_retry_limit_exceeded_total"), 1);
}

#[tokio::test]
async fn a_body_that_is_too_large_to_keep_is_sent_once() {
    let script = Script::new([Act::Answer(503)]);
    let policy = changed(|rule| rule.retry = Some(Retry { max_request_bytes: 3, ..retry(2) }));
    let proxy = proxy(policy, &[&script]).await;
    let response = proxy.http1().await.send_request(post("four")).await.unwrap();
    assert_eq!((response.status(), script.received().len()), (StatusCode::SERVICE_UNAVAILABLE, 1));
}

#[tokio::test]
async fn an_attempt_that_takes_too_long_is_followed_by_another() {
    let script = Script::new([Act::Late(Duration::from_secs(3600), 200)]);
    let policy = changed(|rule| {
        rule.retry = Some(Retry { timeout: duration(Duration::from_millis(50)), ..retry(1) });
    });
    let proxy = proxy(policy, &[&script]).await;
    let response = proxy.http1().await.send_request(post("x")).await.unwrap();
    assert_eq!((response.status(), script.received().len()), (StatusCode::OK, 2));
}

#[tokio::test]
async fn headers_ask_for_retries_where_the_policy_allows_it() {
    let never = Act::Late(Duration::from_secs(3600), 200);
    let names = |headers: &[(&str, &str)]| headers.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ");
    for (headers, acts, status, allowed_status) in [
        (&[("l5d-retry-http", "gateway-error")][..], vec![Act::Answer(502)], 502, 200),
        (&[("l5d-retry-http", "5xx"), ("l5d-retry-limit", "2")], vec![Act::Answer(500); 2], 500, 200),
        (&[("l5d-retry-http", "5xx"), ("l5d-retry-timeout", "50ms")], vec![never], 0, 200),
        (&[("l5d-response-timeout", "50ms")], vec![never], 0, 504),
        (&[("l5d-timeout", "50ms")], vec![never], 0, 504),
    ] {
        for (allowed, expected) in [(true, allowed_status), (false, status)] {
            let script = Script::new(acts.clone());
            let proxy = proxy(changed(|rule| rule.allow_l5d_request_headers = allowed), &[&script]).await;
            let mut request = get("/");
            for (name, value) in headers {
                request.headers_mut().insert(*name, value.parse().unwrap());
            }
            let mut sender = proxy.http1().await;
            let response = sender.send_request(request);
            let received = if allowed { "/ ".to_owned() } else { format!("/ {}", names(headers)) };
            if expected == 0 {
                let early = tokio::time::timeout(Duration::from_millis(300), response).await;
                assert!(early.is_err(), "{headers:?} have no effect: {early:?}");
            } else {
                assert_eq!(response.await.unwrap().status(), expected, "{headers:?}, allowed: {allowed}");
            }
            assert_eq!(script.received()[0], received, "allowed: {allowed}");
        }
    }
}

#[tokio::test]
async fn headers_ask_for_retries_by_the_status_of_grpc() {
    for (allowed, expected) in [(true, "0"), (false, "14")] {
        let script = Script::new([Act::Grpc("14"), Act::Grpc("0")]);
        let proxy = proxy(changed(|rule| rule.allow_l5d_request_headers = allowed), &[&script]).await;
        let mut sender = proxy.http2().await;
        let request = Request::post("http://server.demo/").header("l5d-retry-grpc", "unavailable");
        let response = sender.send_request(request.body(Full::default()).unwrap()).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().trailers().unwrap()["grpc-status"], expected);
    }
}

#[tokio::test]
async fn an_endpoint_is_not_ejected_for_what_its_client_does_not_send() {
    let limit = Duration::from_millis(500);
    for timeouts in [idle_timeout(limit), request_timeout(limit)] {
        let script = Script::default();
        let policy = ejecting(changed(|rule| rule.timeouts = Some(timeouts)), 1);
        let proxy = proxy(policy, &[&script]).await;
        // The connection to the endpoint is there when the limit counts.
        assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
        let mut client = proxy.connect().await;
        client.write_all(b"POST / HTTP/1.1\r\nhost: server.demo\r\ncontent-length: 9\r\n\r\nbegin").await.unwrap();
        let mut answer = [0; 12];
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, *b"HTTP/1.1 504", "{timeouts:?}");
        assert_eq!(metric(&proxy, "outbound_http_balancer_endpoints{endpoint_state=\"pending\""), 0, "{timeouts:?}");
    }
}

#[tokio::test]
async fn grpc_is_sent_again_for_a_status_in_its_trailers() {
    let script = Script::new([Act::Grpc("14"), Act::Grpc("0")]);
    let conditions = grpc_route::retry::Conditions { unavailable: true, ..Default::default() };
    let retry =
        grpc_route::Retry { max_retries: 1, max_request_bytes: 64, conditions: Some(conditions), ..Default::default() };
    let proxy = proxy(fake::grpc_policy(SERVICE, Some(retry)), &[&script]).await;
    let mut sender = proxy.http2().await;
    let request = Request::post("http://server.demo/echo.Echo/Say")
        .header("content-type", "application/grpc")
        .body(Full::new(Bytes::from_static(b"message")))
        .unwrap();
    let response = sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(response.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(script.received(), ["/echo.Echo/Say message"; 2]);
}

/// Timeouts that must expire after a response's head has arrived, to be tried in turn: on a busy machine a short one
/// expires before it.
pub(super) const LIMITS: [Duration; 4] =
    [Duration::from_millis(80), Duration::from_millis(800), Duration::from_secs(8), Duration::from_secs(80)];

pub(super) fn request_timeout(limit: Duration) -> Timeouts {
    Timeouts { request: duration(limit), ..Timeouts::default() }
}

pub(super) fn idle_timeout(limit: Duration) -> Timeouts {
    Timeouts { idle: duration(limit), ..Timeouts::default() }
}

pub(super) fn response_timeout(limit: Duration) -> Timeouts {
    Timeouts { response: duration(limit), ..Timeouts::default() }
}

#[tokio::test]
async fn a_request_has_its_time_for_the_whole_response() {
    let ask = async |timeouts: Timeouts, act| {
        let script = Script::new([act]);
        let proxy = proxy(changed(|rule| rule.timeouts = Some(timeouts)), &[&script]).await;
        proxy.http1().await.send_request(get("/")).await.unwrap()
    };
    for timeouts in [request_timeout as fn(_) -> _, idle_timeout, response_timeout] {
        for limit in LIMITS {
            let response = ask(timeouts(limit), Act::Stall).await;
            if response.status() == StatusCode::OK {
                let read = tokio::time::timeout(limit + Duration::from_secs(60), response.into_body().collect()).await;
                assert!(read.expect("the body hangs").is_err(), "{:?}", timeouts(limit));
                break;
            }
            assert!(limit < LIMITS[3], "{}: {:?}", response.status(), timeouts(limit));
        }
    }
    let late = Act::Late(Duration::from_secs(3600), 200);
    let timeouts = [request_timeout(LIMITS[0]), response_timeout(LIMITS[0])];
    for (timeouts, error) in timeouts.into_iter().zip(["request timed out", "response timed out"]) {
        let response = ask(timeouts, late).await;
        assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(response.headers()["l5d-proxy-error"], error);
    }
}

/// The policy with endpoints that rest after `max_failures` failures.
pub(super) fn ejecting(mut policy: OutboundPolicy, max_failures: u32) -> OutboundPolicy {
    let Some(proxy_protocol::Kind::Detect(detect)) =
        policy.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut())
    else {
        panic!("the policy detects")
    };
    let failures = failure_accrual::ConsecutiveFailures { max_failures, backoff: backoff(Duration::from_secs(60)) };
    let kind = Some(failure_accrual::Kind::ConsecutiveFailures(failures));
    let accrual = FailureAccrual { kind, ejection: None };
    detect.http1.as_mut().unwrap().failure_accrual = Some(accrual);
    detect.http2.as_mut().unwrap().failure_accrual = Some(accrual);
    policy
}

#[tokio::test]
async fn an_endpoint_whose_responses_fail_gets_no_more_requests() {
    let (bad, good) = (Script::new(std::iter::repeat_n(Act::Answer(500), 1000)), Script::default());
    let proxy = proxy(ejecting(policy(SERVICE, vec![]), 3), &[&bad]).await;
    let mut sender = proxy.http1().await;
    let mut status = async || {
        sender.ready().await.unwrap();
        let response = sender.send_request(get("/")).await.unwrap();
        let status = response.status();
        response.into_body().collect().await.unwrap();
        status
    };
    for _ in 0..3 {
        assert_eq!(status().await, StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(metric(&proxy, "outbound_http_balancer_endpoints{endpoint_state=\"pending\""), 1);
    proxy.control.update(SERVICE, add(vec![endpoint(good.listen().await, None)]));
    for _ in 0..20 {
        assert_eq!(status().await, StatusCode::OK);
    }
    assert_eq!((bad.received().len(), good.received().len()), (3, 20));
}

#[tokio::test]
async fn slow_readers_do_not_stall_another_request() {
    let control = Control::default();
    let service = "10.1.2.9:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let windows = |config: &mut Config| {
        config.http2.windows.stream = 65_535;
        config.http2.windows.connection = 4 * 65_535;
    };
    let proxy = Proxy::start_with(service, control, windows, true).await;
    let (peer, port) = Peer::listen(&proxy.mesh.credentials(SERVER)).await;
    let workload: SocketAddr = "127.0.0.1:8080".parse().unwrap();
    proxy.control.update(SERVICE, add(vec![endpoint(workload, Some((SERVER, port)))]));
    let connections = Arc::new(AtomicUsize::new(0));
    let accepted = Arc::clone(&connections);
    // More than all buffers of sockets on the way hold.
    let large = Bytes::from(vec![b'x'; 32 << 20]);
    tokio::spawn(async move {
        loop {
            let (_, stream) = peer.accept().await;
            accepted.fetch_add(1, Ordering::Relaxed);
            let large = large.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let body = if request.uri().path() == "/large" { large.clone() } else { Bytes::from_static(b"x") };
                async move { Ok::<_, Infallible>(Response::new(Full::new(body))) }
            });
            tokio::spawn(http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service));
        }
    });
    let mut stalled = Vec::new();
    for _ in 0..20 {
        let mut client = proxy.connect().await;
        client.write_all(b"GET /large HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
        let mut first = [0; 1];
        client.read_exact(&mut first).await.unwrap();
        stalled.push(client);
    }
    let answer = tokio::time::timeout(Duration::from_secs(5), async { text(proxy.get("/small").await).await }).await;
    assert_eq!(answer.expect("a reader of one byte waits for readers of nothing"), "x");
    assert_eq!(connections.load(Ordering::Relaxed), 6, "four streams on each of them");
}

/// An HTTP/1 server that closes each kept connection when the second request on it comes, without an answer.
async fn closes_when_asked_again() -> (SocketAddr, Arc<AtomicUsize>) {
    let lost = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&lost);
    let addr = serve_each(move |mut stream| {
        let lost = Arc::clone(&count);
        async move {
            let mut head = [0; 1024];
            if stream.read(&mut head).await.unwrap() == 0 {
                return;
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
            if stream.read(&mut head).await.unwrap() > 0 {
                lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    })
    .await;
    (addr, lost)
}

#[tokio::test]
async fn a_kept_connection_that_dies_costs_an_idempotent_request_nothing() {
    let (addr, lost) = closes_when_asked_again().await;
    let proxy = Proxy::start(addr, Control::default()).await;
    let mut sender = proxy.http1().await;
    for _ in 0..6 {
        sender.ready().await.unwrap();
        let response = sender.send_request(get("/")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(text(response).await, "ok");
    }
    assert!(lost.load(Ordering::Relaxed) >= 3, "the connections were kept, and died");
    sender.ready().await.unwrap();
    let status = sender.send_request(post("x")).await.unwrap().status();
    assert_eq!(status, StatusCode::BAD_GATEWAY, "a POST may have had its effect");
}

#[tokio::test]
async fn a_backend_that_does_not_exist_fails_its_share_of_requests() {
    let proxy = proxy(fake::missing_backend(), &[]).await;
    let response = proxy.get("/").await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(response.headers()["l5d-proxy-error"], "the route's backend does not exist");
}

/// A server's head is bounded as a client's is. Over HTTP/2 its stream alone is reset.
#[tokio::test]
async fn a_response_whose_head_is_too_large_fails_and_the_next_one_does_not() {
    let script = Script::new([Act::Head(200 * 1024), Act::Head(32 * 1024), Act::Head(500 * 1024)]);
    let proxy = proxy(changed(|_| {}), &[&script]).await;
    let stream = TokioIo::new(proxy.connect().await);
    let handshake = conn::http2::Builder::new(TokioExecutor::new()).max_header_list_size(1 << 20).handshake(stream);
    let (mut http2, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let request = || Request::builder().uri("http://server.demo/").body(Full::<Bytes>::default()).unwrap();
    http2.send_request(request()).await.unwrap_err();
    let response = http2.send_request(request()).await.unwrap();
    assert_eq!((response.status(), response.headers()["x-large"].len()), (StatusCode::OK, 32 * 1024));
    assert_eq!(proxy.get("/").await.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn requests_that_wait_for_one_attempt_to_connect_get_one_answer() {
    // The kernel accepts, and nobody answers TLS.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = silent.local_addr().unwrap();
    let control = Control::default();
    let meshed = Some(endpoint(addr, Some((SERVER, addr.port()))));
    let profile = DestinationProfile { endpoint: meshed, ..DestinationProfile::default() };
    control.profiles.lock().insert(addr.to_string(), profile);
    let soon = |config: &mut Config| config.outbound.connect_timeout = Duration::from_millis(300);
    let proxy = Proxy::start_with(addr, control, soon, true).await;
    for response in futures::future::join_all((0..3).map(|_| proxy.get("/"))).await {
        assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT, "{:?}", response.headers());
        assert_eq!(response.headers()["l5d-proxy-error"], "connect timed out");
    }
    let counted = r#"outbound_http_errors_total{error="connect timeout"} 3"#;
    assert!(proxy.scrape().contains(counted), "{}", proxy.scrape());
}

#[tokio::test]
async fn an_endpoint_that_takes_all_of_the_time_to_connect_costs_no_request_and_rests() {
    // The kernel accepts, and nobody answers TLS.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = silent.local_addr().unwrap();
    // Slower than an endpoint that nothing is known of, which is preferred whenever it does not rest.
    let good = Script::new([Act::Late(Duration::from_millis(60), 200); 6]);
    let control = Control::default();
    let service = "10.1.2.2:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let endpoints = vec![endpoint(addr, Some((SERVER, addr.port()))), endpoint(good.listen().await, None)];
    control.update(SERVICE, add(endpoints));
    let patient = |config: &mut Config| {
        config.outbound.connect_timeout = Duration::from_millis(2500);
        config.outbound.http_queue.failfast_timeout = Duration::from_secs(2);
    };
    let proxy = Proxy::start_with(service, control, patient, true).await;
    for _ in 0..3 {
        assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
    }
    assert_eq!(metric(&proxy, "outbound_http_balancer_endpoints{endpoint_state=\"pending\""), 1);
}

#[tokio::test]
async fn each_attempt_has_the_time_to_find_an_endpoint() {
    let (proxy, peer, workload) = meshed_with(fails_fast).await;
    // Longer than a request waits for an endpoint.
    let slow = Retry { timeout: duration(Duration::from_millis(800)), ..retry(1) };
    proxy.control.change_policy("10.1.1.4:80".parse().unwrap(), changed(|rule| rule.retry = Some(slow.clone())));
    let mut of_http1 = endpoint(workload, Some((SERVER, peer.port())));
    of_http1.protocol_hint.as_mut().unwrap().protocol = None;
    proxy.control.replace(SERVICE, add(vec![of_http1]));
    tokio::spawn(async move {
        let _silent = peer.accept().await;
        peer.refuse().await;
        let (_, stream) = peer.accept().await;
        let service =
            service_fn(|_: Request<Incoming>| async { Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())) });
        http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
    });
    assert_eq!(proxy.get("/").await.status(), StatusCode::OK);
    assert_eq!(metric(&proxy, "outbound_http_balancer_queue_gate_shut_total"), 0);
}
