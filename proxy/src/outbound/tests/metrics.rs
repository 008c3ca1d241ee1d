//! What requests and connections leave in the metrics: whole lines, with Linkerd's names, labels and values.

use std::collections::BTreeSet;

use weft_proto::linkerd::{
    http_route::Timeouts,
    meta::{Metadata, Resource, metadata},
    outbound::{OutboundPolicy, TlsRoute, grpc_route, http_route::Retry, opaque_route, proxy_protocol, tls_route},
    tls_route::{SniMatch, sni_match},
};

use super::{
    resilience::{Act, Script, backoff, duration, idle_timeout, metric, request_timeout, response_timeout, retry},
    *,
};

/// The labels of the parent, of the route and of the backend in [`named`].
const PARENT: &str = r#"parent_group="core",parent_kind="Service",parent_namespace="demo",parent_name="server",parent_port="80",parent_section_name="""#;
const ROUTE: &str =
    r#"route_group="gateway.networking.k8s.io",route_kind="HTTPRoute",route_namespace="demo",route_name="web""#;
const GRPC: &str =
    r#"route_group="gateway.networking.k8s.io",route_kind="GRPCRoute",route_namespace="demo",route_name="web""#;
const BACKEND: &str = r#"backend_group="core",backend_kind="Service",backend_namespace="demo",backend_name="behind",backend_port="8080",backend_section_name="""#;

fn resource(group: &str, kind: &str, name: &str, port: u32) -> Option<Metadata> {
    let (group, kind, name, namespace) = (group.into(), kind.into(), name.into(), "demo".into());
    let resource = Resource { group, kind, name, namespace, port, ..Resource::default() };
    Some(Metadata { kind: Some(metadata::Kind::Resource(resource)) })
}

fn service(name: &str, port: u32) -> Option<Metadata> {
    resource("core", "Service", name, port)
}

/// Names the backends of a distribution by first availability.
macro_rules! name_backends {
    ($module:ident, $rule:expr) => {{
        let kind = $rule.backends.as_mut().and_then(|backends| backends.kind.as_mut());
        let Some($module::distribution::Kind::FirstAvailable(first)) = kind else { panic!("another distribution") };
        for backend in &mut first.backends {
            backend.backend.as_mut().unwrap().metadata = service("behind", 8080);
        }
    }};
}

/// The policy with names for its parent, its routes and its backends.
fn named(mut policy: OutboundPolicy) -> OutboundPolicy {
    use weft_proto::linkerd::outbound::{grpc_route, http_route};
    const GATEWAY: &str = "gateway.networking.k8s.io";
    policy.metadata = service("server", 80);
    match policy.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut()).unwrap() {
        proxy_protocol::Kind::Detect(detect) => {
            for routes in [&mut detect.http1.as_mut().unwrap().routes, &mut detect.http2.as_mut().unwrap().routes] {
                for route in routes {
                    route.metadata = resource(GATEWAY, "HTTPRoute", "web", 0);
                    route.rules.iter_mut().for_each(|rule| name_backends!(http_route, rule));
                }
            }
            for route in &mut detect.opaque.as_mut().unwrap().routes {
                route.metadata = resource(GATEWAY, "TCPRoute", "bytes", 0);
                route.rules.iter_mut().for_each(|rule| name_backends!(opaque_route, rule));
            }
        }
        proxy_protocol::Kind::Grpc(grpc) => {
            for route in &mut grpc.routes {
                route.metadata = resource(GATEWAY, "GRPCRoute", "web", 0);
                route.rules.iter_mut().for_each(|rule| name_backends!(grpc_route, rule));
            }
        }
        proxy_protocol::Kind::Opaque(opaque) => {
            for route in &mut opaque.routes {
                route.metadata = resource(GATEWAY, "TCPRoute", "bytes", 0);
            }
        }
        _ => panic!("another protocol"),
    }
    policy
}

/// The lines of a scrape that begin with this name and a label.
fn lines(proxy: &Proxy, name: &str) -> BTreeSet<String> {
    let text = proxy.scrape();
    let begin = format!("{name}{{");
    text.lines().filter(|line| line.starts_with(&begin)).map(str::to_owned).collect()
}

/// Waits until the metrics have these lines of a name and no others.
async fn expect(proxy: &Proxy, name: &str, expected: &[(&str, u64)]) {
    let expected: BTreeSet<_> = expected.iter().map(|(labels, value)| format!("{name}{{{labels}}} {value}")).collect();
    settled(async || {
        let found = lines(proxy, name);
        if found == expected { Ok(()) } else { Err(format!("{name} has\n{found:#?}\ninstead of\n{expected:#?}")) }
    })
    .await;
}

async fn proxy(policy: OutboundPolicy, scripts: &[&Script], change: impl FnOnce(&mut Config)) -> Proxy {
    let control = Control::default();
    let service = "10.1.4.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy);
    let mut endpoints = Vec::new();
    for script in scripts {
        endpoints.push(endpoint(script.listen().await, None));
    }
    control.update(SERVICE, add(endpoints));
    Proxy::start_with(service, control, change, true).await
}

async fn read(response: Response<Incoming>) -> StatusCode {
    let status = response.status();
    let _ = response.into_body().collect().await;
    status
}

fn post(body: &'static [u8]) -> Request<Full<Bytes>> {
    Request::post("/do").header("host", "server.demo").body(Full::new(Bytes::from_static(body))).unwrap()
}

#[tokio::test]
async fn requests_are_counted_by_route_and_attempts_by_backend() {
    let script = Script::new([Act::Answer(503), Act::Answer(200), Act::Answer(404)]);
    let policy = named(resilience::changed(|rule| rule.retry = Some(retry(2))));
    let proxy = proxy(policy, &[&script], |_| {}).await;
    assert_eq!(read(proxy.http1().await.send_request(post(&[b'x'; 200])).await.unwrap()).await, 200);
    assert_eq!(read(proxy.get("/").await).await, 404);

    let route = format!(r#"{PARENT},{ROUTE},hostname="""#);
    let backend = format!("{PARENT},{ROUTE},{BACKEND}");
    let with = |labels: &str, more: &str| format!("{labels},{more}");
    expect(
        &proxy,
        "outbound_http_route_request_statuses_total",
        &[(&with(&route, r#"http_status="200",error="""#), 1), (&with(&route, r#"http_status="404",error="""#), 1)],
    )
    .await;
    expect(&proxy, "outbound_http_route_request_duration_seconds_count", &[(&route, 2)]).await;
    let bucket = |le: &str, labels: &str| format!(r#"le="{le}",{labels}"#);
    expect(
        &proxy,
        "outbound_http_route_request_frame_size_bytes_bucket",
        &[
            (&bucket("128.0", &route), 0),
            (&bucket("1024.0", &route), 1),
            (&bucket("10240.0", &route), 1),
            (&bucket("+Inf", &route), 1),
        ],
    )
    .await;
    for (name, value) in [("requests", 1), ("successes", 1), ("limit_exceeded", 0), ("overflow", 0)] {
        expect(&proxy, &format!("outbound_http_route_retry_{name}_total"), &[(&route, value)]).await;
    }
    expect(&proxy, "outbound_http_route_backend_requests_total", &[(&backend, 3)]).await;
    expect(
        &proxy,
        "outbound_http_route_backend_response_statuses_total",
        &[
            (&with(&backend, r#"http_status="200",error="""#), 1),
            (&with(&backend, r#"http_status="404",error="""#), 1),
            (&with(&backend, r#"http_status="503",error="""#), 1),
        ],
    )
    .await;
    expect(&proxy, "outbound_http_route_backend_response_duration_seconds_count", &[(&backend, 3)]).await;
    // The response that was not delivered was not read.
    expect(&proxy, "outbound_http_route_backend_response_frame_size_bytes_count", &[(&backend, 2)]).await;
    assert!(!proxy.scrape().contains("outbound_grpc_route"), "{}", proxy.scrape());
}

#[tokio::test]
async fn grpc_routes_count_the_status_in_trailers() {
    let conditions = grpc_route::retry::Conditions { unavailable: true, ..Default::default() };
    let retry =
        grpc_route::Retry { max_retries: 1, max_request_bytes: 64, conditions: Some(conditions), ..Default::default() };
    let script = Script::new([Act::Grpc("14"), Act::Grpc("0"), Act::Grpc("5"), Act::Grpc("99"), Act::Answer(200)]);
    let proxy = proxy(named(fake::grpc_policy(SERVICE, Some(retry))), &[&script], |_| {}).await;
    let stream = TokioIo::new(proxy.connect().await);
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..4 {
        let request = Request::post("http://server.demo/echo.Echo/Say").header("content-type", "application/grpc");
        let request = request.body(Full::new(Bytes::from_static(b"message"))).unwrap();
        assert_eq!(read(sender.send_request(request).await.unwrap()).await, 200);
    }
    let route = format!(r#"{PARENT},{GRPC},hostname="""#);
    let backend = format!("{PARENT},{GRPC},{BACKEND}");
    let status = |labels: &str, name: &str| format!(r#"{labels},grpc_status="{name}",error="""#);
    expect(
        &proxy,
        "outbound_grpc_route_request_statuses_total",
        &[(&status(&route, "OK"), 1), (&status(&route, "NOT_FOUND"), 1), (&status(&route, "UNKNOWN"), 2)],
    )
    .await;
    expect(
        &proxy,
        "outbound_grpc_route_backend_response_statuses_total",
        &[
            (&status(&backend, "UNAVAILABLE"), 1),
            (&status(&backend, "OK"), 1),
            (&status(&backend, "NOT_FOUND"), 1),
            (&status(&backend, "UNKNOWN"), 2),
        ],
    )
    .await;
    expect(&proxy, "outbound_grpc_route_backend_requests_total", &[(&backend, 5)]).await;
    expect(&proxy, "outbound_grpc_route_request_duration_seconds_count", &[(&route, 4)]).await;
    expect(&proxy, "outbound_grpc_route_backend_response_duration_seconds_count", &[(&backend, 5)]).await;
    expect(&proxy, "outbound_grpc_route_request_frame_size_bytes_count", &[(&route, 4)]).await;
    expect(&proxy, "outbound_grpc_route_retry_requests_total", &[(&route, 1)]).await;
    expect(&proxy, "outbound_grpc_route_retry_successes_total", &[(&route, 1)]).await;
    assert!(!proxy.scrape().contains("outbound_http_route"), "{}", proxy.scrape());
}

#[tokio::test]
async fn what_ends_a_request_early_is_named_as_by_linkerd() {
    let late = Act::Late(Duration::from_secs(3600), 200);
    for (timeouts, act, labels) in [
        (request_timeout as fn(_) -> _, Some(late), r#"http_status="",error="REQUEST_TIMEOUT""#),
        (request_timeout, Some(Act::Stall), r#"http_status="200",error="REQUEST_TIMEOUT""#),
        (idle_timeout, Some(Act::Stall), r#"http_status="200",error="IDLE_TIMEOUT""#),
        (response_timeout, Some(Act::Stall), r#"http_status="200",error="RESPONSE_STREAM_TIMEOUT""#),
        (|_| Timeouts::default(), None, r#"http_status="",error="FAIL_FAST""#),
    ] {
        for limit in resilience::LIMITS {
            let script = Script::new(act);
            let scripts: &[&Script] = if act.is_some() { &[&script] } else { &[] };
            let policy = named(resilience::changed(|rule| rule.timeouts = Some(timeouts(limit))));
            let change = if act.is_some() { (|_: &mut Config| {}) as fn(&mut Config) } else { fails_fast };
            let proxy = proxy(policy, scripts, change).await;
            let status = read(proxy.get("/").await).await;
            // The head was late on a busy machine.
            if labels.contains("200") && status != StatusCode::OK && limit < resilience::LIMITS[3] {
                continue;
            }
            let route = format!(r#"{PARENT},{ROUTE},hostname="",{labels}"#);
            expect(&proxy, "outbound_http_route_request_statuses_total", &[(&route, 1)]).await;
            let backend = format!("{PARENT},{ROUTE},{BACKEND},{labels}");
            expect(&proxy, "outbound_http_route_backend_response_statuses_total", &[(&backend, 1)]).await;
            break;
        }
    }
}

#[tokio::test]
async fn timeouts_of_attempts_resets_and_answers_of_policy_are_told_apart() {
    let script = Script::new([Act::Late(Duration::from_secs(3600), 200)]);
    let slow =
        Retry { timeout: duration(Duration::from_millis(50)), backoff: backoff(Duration::from_millis(1)), ..retry(1) };
    let retried = named(resilience::changed(|rule| rule.retry = Some(slow.clone())));
    let proxy = self::proxy(retried, &[&script], |_| {}).await;
    assert_eq!(read(proxy.get("/").await).await, 200);
    let backend = format!("{PARENT},{ROUTE},{BACKEND}");
    expect(
        &proxy,
        "outbound_http_route_backend_response_statuses_total",
        &[
            (&format!(r#"{backend},http_status="",error="RESPONSE_HEADERS_TIMEOUT""#), 1),
            (&format!(r#"{backend},http_status="200",error="""#), 1),
        ],
    )
    .await;

    // A filter of the route answers: no backend sees the request.
    let filter = failing(418, "tea");
    let proxy = self::proxy(named(policy(SERVICE, vec![filter])), &[&script], |_| {}).await;
    assert_eq!(read(proxy.get("/").await).await, 418);
    let route = format!(r#"{PARENT},{ROUTE},hostname="""#);
    let injected = format!(r#"{route},http_status="418",error="""#);
    expect(&proxy, "outbound_http_route_request_statuses_total", &[(&injected, 1)]).await;
    expect(&proxy, "outbound_http_route_backend_requests_total", &[]).await;

    let (reset, peer, _) = meshed().await;
    let half_read = Arc::new(tokio::sync::Notify::new());
    let was_read = Arc::clone(&half_read);
    tokio::spawn(async move {
        let (_, stream) = peer.accept().await;
        let mut server = ::h2::server::handshake(stream).await.unwrap();
        let mut reasons =
            [::h2::Reason::CANCEL, ::h2::Reason::ENHANCE_YOUR_CALM, ::h2::Reason::INTERNAL_ERROR].into_iter();
        while let Some(Ok((_, mut respond))) = server.accept().await {
            let Some(reason) = reasons.next() else {
                let mut stream = respond.send_response(Response::new(()), false).unwrap();
                stream.send_data("half".into(), false).unwrap();
                let was_read = Arc::clone(&was_read);
                tokio::spawn(async move {
                    was_read.notified().await;
                    stream.send_reset(::h2::Reason::CANCEL);
                });
                continue;
            };
            respond.send_reset(reason);
        }
    });
    let stream = TokioIo::new(reset.connect().await);
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..4 {
        let request = Request::get("http://server.demo/").body(Empty::<Bytes>::new()).unwrap();
        if let Ok(mut response) = sender.send_request(request).await {
            assert_eq!(response.frame().await.unwrap().unwrap().into_data().unwrap(), "half");
            half_read.notify_one();
            assert!(response.frame().await.unwrap().is_err());
        }
    }
    settled(async || {
        let all = metric(&reset, "outbound_http_route_request_statuses_total") >= 4;
        if all { Ok(()) } else { Err(reset.scrape()) }
    })
    .await;
    for labels in [
        r#"http_status="",error="CANCEL""#,
        r#"http_status="",error="ENHANCE_YOUR_CALM""#,
        r#"http_status="",error="RESET""#,
        r#"http_status="200",error="CANCEL""#,
    ] {
        let of_route = lines(&reset, "outbound_http_route_request_statuses_total");
        assert!(
            of_route.iter().any(|line| line.ends_with(&format!("{labels}}} 1"))),
            "{labels} is not in {of_route:#?}"
        );
    }
    // Without a response there is no status, as at Linkerd's endpoints.
    for (status, labels) in [
        (false, r#"classification="failure",error="h2(CANCEL)""#),
        (false, r#"classification="failure",error="h2(ENHANCE_YOUR_CALM)""#),
        (false, r#"classification="failure",error="h2(INTERNAL_ERROR)""#),
        (true, r#"status_code="200",classification="failure",error="h2(CANCEL)""#),
    ] {
        let of_endpoint = lines(&reset, "response_total");
        let is_it = |line: &String| line.ends_with(&format!("{labels}}} 1")) && line.contains("status_code") == status;
        assert!(of_endpoint.iter().any(is_it), "{labels} is not in {of_endpoint:#?}");
    }
}

#[tokio::test]
async fn a_response_that_the_client_does_not_read_is_counted() {
    let script = Script::new([Act::Stall]);
    let proxy = proxy(named(policy(SERVICE, vec![])), &[&script], |_| {}).await;
    let mut client = proxy.connect().await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
    let mut head = [0; 12];
    client.read_exact(&mut head).await.unwrap();
    drop(client);
    let ended = format!(r#"{PARENT},{ROUTE},hostname="",http_status="200",error="UNKNOWN""#);
    expect(&proxy, "outbound_http_route_request_statuses_total", &[(&ended, 1)]).await;
}

#[tokio::test]
async fn hosts_are_a_label_where_it_is_asked_for() {
    let script = Script::default();
    let hostnames = |config: &mut Config| config.outbound.hostname_labels = true;
    let proxy = proxy(named(policy(SERVICE, vec![])), &[&script], hostnames).await;
    read(proxy.get("/").await).await;
    let mut request = get("/");
    request.headers_mut().insert("host", "10.1.4.1:80".parse().unwrap());
    read(proxy.http1().await.send_request(request).await.unwrap()).await;
    let route = |host: &str| format!(r#"{PARENT},{ROUTE},hostname="{host}""#);
    let durations = "outbound_http_route_request_duration_seconds_count";
    expect(&proxy, durations, &[(&route("server.demo"), 1), (&route(""), 1)]).await;
}

#[tokio::test]
async fn balancers_are_counted_by_parent_backend_and_protocol() {
    let labels = format!("{PARENT},{BACKEND}");
    let script = Script::default();
    let slow = |config: &mut Config| config.outbound.http_queue.failfast_timeout = Duration::from_secs(2);
    let proxy = proxy(named(policy(SERVICE, vec![])), &[], slow).await;
    let waiting = tokio::spawn({
        let mut sender = proxy.http1().await;
        async move { read(sender.send_request(get("/")).await.unwrap()).await }
    });
    expect(&proxy, "outbound_http_balancer_queue_length", &[(&labels, 1)]).await;
    let op = |op: &str| format!(r#"op="{op}",{labels}"#);
    let updates = [(&*op("Reset"), 1), (&*op("Add"), 0), (&*op("Remove"), 0)];
    expect(&proxy, "outbound_http_balancer_p2c_updates_total", &updates).await;
    expect(&proxy, "outbound_tcp_balancer_endpoints", &[]).await;
    proxy.control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    assert_eq!(waiting.await.unwrap(), 200);
    let state = |state: &str| format!(r#"endpoint_state="{state}",{labels}"#);
    let http = "outbound_http_balancer";
    expect(&proxy, &format!("{http}_endpoints"), &[(&state("ready"), 1), (&state("pending"), 0)]).await;
    expect(&proxy, &format!("{http}_p2c_endpoints"), &[(&labels, 1)]).await;
    let updates = [(&*op("Reset"), 1), (&*op("Add"), 1), (&*op("Remove"), 0)];
    expect(&proxy, &format!("{http}_p2c_updates_total"), &updates).await;
    expect(&proxy, &format!("{http}_queue_length"), &[(&labels, 0)]).await;
    expect(&proxy, &format!("{http}_queue_requests_total"), &[(&labels, 1)]).await;
    expect(&proxy, &format!("{http}_queue_latency_seconds_count"), &[(&labels, 1)]).await;
    expect(&proxy, &format!("{http}_queue_gate_open_total"), &[(&labels, 1)]).await;
    expect(&proxy, &format!("{http}_queue_gate_shut_total"), &[(&labels, 0)]).await;
    assert_eq!(
        lines(&proxy, &format!("{http}_queue_gate_timeout_seconds")),
        [format!("{http}_queue_gate_timeout_seconds{{{labels}}} 2.0")].into()
    );
    expect(&proxy, "outbound_tcp_balancer_endpoints", &[]).await;

    // Bytes on the same port are the matter of another balancer.
    let mut opaque = proxy.connect().await;
    opaque.write_all(b"\x01\x02 not http ever").await.unwrap();
    expect(&proxy, "outbound_tcp_balancer_endpoints", &[(&state("ready"), 1), (&state("pending"), 0)]).await;
    expect(&proxy, "outbound_tcp_balancer_queue_requests_total", &[(&labels, 1)]).await;
    expect(&proxy, &format!("{http}_queue_requests_total"), &[(&labels, 1)]).await;
}

#[tokio::test]
async fn a_balancer_that_fails_fast_has_its_gate_shut() {
    let labels = format!("{PARENT},{BACKEND}");
    let proxy = proxy(named(policy(SERVICE, vec![])), &[], fails_fast).await;
    let gate = |name: &str| format!("outbound_http_balancer_queue_gate_{name}_total");
    for _ in 0..3 {
        assert_eq!(read(proxy.get("/").await).await, 504);
    }
    expect(&proxy, &gate("shut"), &[(&labels, 1)]).await;
    expect(&proxy, &gate("open"), &[(&labels, 1)]).await;
    let script = Script::default();
    proxy.control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    settled(async || {
        let status = read(proxy.get("/").await).await;
        if status == 200 { Ok(()) } else { Err(format!("{status}: the endpoint is not used")) }
    })
    .await;
    expect(&proxy, &gate("open"), &[(&labels, 2)]).await;
    expect(&proxy, &gate("shut"), &[(&labels, 1)]).await;
    let shut_time = format!("outbound_http_balancer_queue_gate_shut_time_seconds{{{labels}}} 0.0");
    assert!(proxy.scrape().contains(&shut_time), "{}", proxy.scrape());
}

/// A policy for the application's TLS over one service.
fn tls_policy() -> OutboundPolicy {
    let Some(proxy_protocol::Kind::Detect(detect)) = policy(SERVICE, vec![]).protocol.and_then(|of| of.kind) else {
        panic!("the policy detects")
    };
    let rule = detect.opaque.unwrap().routes.remove(0).rules.remove(0);
    let Some(opaque_route::distribution::Kind::FirstAvailable(first)) = rule.backends.unwrap().kind else {
        panic!("another distribution")
    };
    let mut backend = first.backends[0].backend.clone().unwrap();
    backend.metadata = service("behind", 8080);
    let backends = vec![tls_route::RouteBackend { backend: Some(backend), ..Default::default() }];
    let kind = tls_route::distribution::Kind::FirstAvailable(tls_route::distribution::FirstAvailable { backends });
    let rule = tls_route::Rule { backends: Some(tls_route::Distribution { kind: Some(kind) }), filters: Vec::new() };
    let snis = vec![SniMatch { r#match: Some(sni_match::Match::Exact("web.demo".into())) }];
    let metadata = resource("gateway.networking.k8s.io", "TLSRoute", "tls", 0);
    let routes = vec![TlsRoute { metadata, snis, rules: vec![rule] }];
    let kind = proxy_protocol::Kind::Tls(proxy_protocol::Tls { routes });
    let protocol = Some(weft_proto::linkerd::outbound::ProxyProtocol { kind: Some(kind) });
    OutboundPolicy { protocol, metadata: service("server", 80) }
}

/// A server that reads everything and answers with the number of bytes.
async fn counts_bytes() -> SocketAddr {
    serve_each(move |mut stream| async move {
        let mut received = Vec::new();
        let _ = stream.read_to_end(&mut received).await;
        let _ = stream.write_all(received.len().to_string().as_bytes()).await;
    })
    .await
}

#[tokio::test]
async fn a_response_has_its_latency_when_its_body_begins() {
    let proxy = proxy(policy(SERVICE, vec![]), &[&Script::new([Act::Stall])], |_| {}).await;
    let mut response = proxy.get("/").await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(metric(&proxy, "response_latency_ms_count"), 1);
    assert_eq!(metric(&proxy, "response_total"), 0, "it goes on");
    drop(response);
    eventually("the end of the response is counted", || metric(&proxy, "response_total") > 0).await;
    assert_eq!(metric(&proxy, "response_latency_ms_count"), 1);
}

#[tokio::test]
async fn an_attempt_does_not_count_the_time_of_those_before_it() {
    let script = Script::new([Act::Late(Duration::from_millis(300), 503), Act::Answer(200)]);
    let proxy = proxy(resilience::changed(|rule| rule.retry = Some(retry(1))), &[&script], |_| {}).await;
    assert_eq!(read(proxy.get("/").await).await, 200);
    let milliseconds = |status: &str| {
        let text = proxy.scrape();
        let is_sum = |line: &&str| line.starts_with("response_latency_ms_sum{") && line.contains(status);
        text.lines().find(is_sum).unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let (first, second) = (milliseconds(r#"status_code="503""#), milliseconds(r#"status_code="200""#));
    assert!(second < first, "{second} ms include the first attempt's {first} ms");
}

#[tokio::test]
async fn connections_are_counted_by_route_and_bytes_by_zone() {
    const TARGET: &str = r#"target_ip="10.1.4.1",target_port="80""#;
    let route = |kind: &str, name: &str, target: &str| {
        format!(
            r#"{PARENT},route_group="gateway.networking.k8s.io",route_kind="{kind}",route_namespace="demo",route_name="{name}",{target}"#
        )
    };
    let of_bytes = route("TCPRoute", "bytes", TARGET);
    let hello = crate::detect::client_hello::tests::hello("web.demo");
    let ended = |route: &str, error: &str| format!(r#"{route},error="{error}""#);
    for (policy, bytes, protocol, of) in [
        (named(policy(SERVICE, vec![])), b"\x01\x02 these are not http".to_vec(), "tcp", &of_bytes),
        (tls_policy(), hello, "tls", &route("TLSRoute", "tls", r#"hostname="web.demo""#)),
    ] {
        let control = Control::default();
        let target = "10.1.4.1:80".parse().unwrap();
        control.policies.lock().insert(target, policy);
        let mut near = endpoint(counts_bytes().await, None);
        near.metric_labels.insert("zone_locality".into(), "local".into());
        control.update(SERVICE, add(vec![near]));
        let proxy = Proxy::start(target, control).await;
        let mut client = proxy.connect().await;
        client.write_all(&bytes).await.unwrap();
        let open = format!("outbound_{protocol}_route_open_total");
        expect(&proxy, &open, &[(of, 1)]).await;
        client.shutdown().await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, bytes.len().to_string());
        expect(&proxy, &format!("outbound_{protocol}_route_close_total"), &[(&ended(of, ""), 1)]).await;
        expect(
            &proxy,
            "outbound_tcp_transfer_cost_bytes_total",
            &[
                (r#"op="Send",zone_locality="local""#, bytes.len() as u64),
                (r#"op="Recv",zone_locality="local""#, answer.len() as u64),
            ],
        )
        .await;
        let configured = if protocol == "tcp" { "detect" } else { protocol };
        let accepted = format!(r#"protocol="{configured}",{PARENT}"#);
        expect(&proxy, "outbound_tcp_protocol_connections_total", &[(&accepted, 1)]).await;
        let state = |state: &str| format!(r#"endpoint_state="{state}",{PARENT},{BACKEND}"#);
        let endpoints = format!("outbound_{protocol}_balancer_endpoints");
        expect(&proxy, &endpoints, &[(&state("ready"), 1), (&state("pending"), 0)]).await;
        let detected = usize::from(protocol == "tcp");
        assert_eq!(lines(&proxy, "outbound_tcp_detect_http_duration_seconds_count").len(), detected);
        if protocol == "tcp" {
            let not_http = format!(r#"result="not_http",{PARENT}"#);
            expect(&proxy, "outbound_tcp_detect_http_results_total", &[(&not_http, 1)]).await;
            expect(&proxy, "outbound_tcp_detect_http_duration_seconds_count", &[(PARENT, 1)]).await;
        }
    }

    let proxy = proxy(named(forbidden()), &[], |_| {}).await;
    assert!(!matches!(proxy.connect().await.read_to_end(&mut Vec::new()).await, Ok(read) if read > 0));
    let refused = ended(&of_bytes, "forbidden");
    expect(&proxy, "outbound_tcp_route_close_total", &[(&refused, 1)]).await;
    let error = r#"target_addr="10.1.4.1:80",target_ip="10.1.4.1",target_port="80",error="forbidden""#;
    expect(&proxy, "outbound_tcp_errors_total", &[(error, 1)]).await;
}

#[tokio::test]
async fn an_endpoint_that_resets_a_connection_has_the_error_and_the_application_has_none() {
    let resets = serve_each(|mut stream| async move {
        let _ = stream.read(&mut [0; 64]).await;
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    })
    .await;
    let proxy = Proxy::start(resets, Control::default()).await;
    for bytes in
        [&b"\x01\x02 these are not http"[..], b"GET / HTTP/1.1\r\nhost: server.demo\r\nconnection: close\r\n\r\n"]
    {
        proxy.exchange(bytes).await;
    }
    let target = |peer: &str| {
        let (ip, port) = (resets.ip(), resets.port());
        format!(
            r#"direction="outbound",peer="{peer}",target_addr="{resets}",target_ip="{ip}",target_port="{port}",tls="no_identity""#
        )
    };
    let src = format!(r#"{},no_tls_reason="loopback",errno="""#, target("src"));
    let dst = format!(r#"{},no_tls_reason="not_provided_by_service_discovery""#, target("dst"));
    let (reset, clean) = (format!(r#"{dst},errno="ECONNRESET""#), format!(r#"{dst},errno="""#));
    expect(&proxy, "tcp_close_total", &[(&src, 2), (&reset, 2), (&clean, 0)]).await;
}

#[tokio::test]
async fn a_request_that_waits_for_its_response_is_counted_also_when_its_client_gives_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(silent.local_addr().unwrap(), Control::default()).await;
    let mut client = proxy.connect().await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
    let (mut accepted, _) = silent.accept().await.unwrap();
    assert!(accepted.read(&mut [0; 64]).await.unwrap() > 0);
    assert_eq!(metric(&proxy, "request_total"), 1, "{}", proxy.scrape());
    drop(client);
    accepted.read_to_end(&mut Vec::new()).await.unwrap();
    assert_eq!(metric(&proxy, "request_total"), 1, "{}", proxy.scrape());
}
