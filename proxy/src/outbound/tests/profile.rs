//! Routes of ServiceProfiles.

use weft_proto::linkerd::destination::{
    HttpStatusRange, PathMatch, RequestMatch, ResponseClass, ResponseMatch, RetryBudget, Route, WeightedDst,
    request_match, response_match,
};

use crate::{destination::Destination, discover::policy::PolicyState};

use super::{
    resilience::{Act, LIMITS, Script, duration, metric},
    *,
};

const NAME: &str = "server.demo.svc.cluster.local";

fn route(name: &str, path: &str) -> Route {
    let condition = request_match::Match::Path(PathMatch { regex: path.to_owned() });
    Route {
        condition: Some(RequestMatch { r#match: Some(condition) }),
        metrics_labels: [("route".to_owned(), name.to_owned())].into(),
        ..Route::default()
    }
}

async fn proxy(routes: Vec<Route>, script: &Script) -> Proxy {
    let control = Control::default();
    let service: SocketAddr = "10.1.3.1:80".parse().unwrap();
    let retry_budget =
        Some(RetryBudget { retry_ratio: 0.0, min_retries_per_second: 1, ttl: duration(Duration::from_secs(2)) });
    let profile =
        DestinationProfile { fully_qualified_name: NAME.into(), routes, retry_budget, ..DestinationProfile::default() };
    control.profiles.lock().insert(service.to_string(), profile);
    control.policies.lock().insert(service, policy("another.demo:80", vec![]));
    control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    Proxy::start(service, control).await
}

#[tokio::test]
async fn a_profile_with_routes_takes_requests_from_the_policy() {
    let script = Script::default();
    let proxy = proxy(vec![route("books", "/books.*")], &script).await;
    for path in ["/books/1", "/other"] {
        let mut request = get(path);
        request.headers_mut().insert("l5d-dst-canonical", "forged".parse().unwrap());
        assert_eq!(proxy.http1().await.send_request(request).await.unwrap().status(), StatusCode::OK);
    }
    assert_eq!(script.received(), [format!("/books/1  {SERVICE}"), format!("/other  {SERVICE}")]);
    let text = proxy.scrape();
    let books = format!(r#"route_request_total{{direction="outbound",dst="{SERVICE}",rt_route="books"}} 1"#);
    assert!(text.contains(&books), "{text}");
    assert!(text.contains(&format!(r#"route_request_total{{direction="outbound",dst="{SERVICE}"}} 1"#)), "{text}");
}

#[tokio::test]
async fn retryable_routes_are_repeated_while_the_budget_lasts() {
    let script = Script::new([Act::Answer(500), Act::Answer(500), Act::Answer(500), Act::Answer(500)]);
    let proxy = proxy(vec![Route { is_retryable: true, ..route("all", "/.*") }], &script).await;
    assert_eq!(proxy.get("/").await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(script.received().len(), 3, "one and the two that the budget has");
    assert_eq!(metric(&proxy, "route_actual_request_total"), 3);
    assert_eq!(metric(&proxy, "route_request_total"), 1);
    let text = proxy.scrape();
    let route = format!(r#"direction="outbound",dst="{SERVICE}",rt_route="all",status_code="500""#);
    for (name, count) in [("route_actual", 3), ("route", 1)] {
        for line in [
            format!(r#"{name}_response_total{{{route},classification="failure"}} {count}"#),
            format!("{name}_response_latency_ms_count{{{route}}} {count}"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
    assert_eq!(metric(&proxy, "route_retryable_total"), 3, "two retried, one skipped");
}

#[tokio::test]
async fn retryable_routes_are_repeated_by_the_status_in_trailers() {
    let script = Script::new([Act::Grpc("14"), Act::Grpc("0")]);
    let proxy = proxy(vec![Route { is_retryable: true, ..route("all", "/.*") }], &script).await;
    let request = Request::post("http://server.demo/").body(Full::default()).unwrap();
    let body = proxy.http2().await.send_request(request).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(script.received().len(), 2);
}

#[tokio::test]
async fn classes_and_timeouts_are_the_routes() {
    let range = response_match::Match::Status(HttpStatusRange { min: 404, max: 404 });
    let class = ResponseClass { condition: Some(ResponseMatch { r#match: Some(range) }), is_failure: true };
    let script = Script::new([Act::Answer(404), Act::Late(Duration::from_secs(3600), 200)]);
    let late = Route { timeout: duration(Duration::from_millis(100)), ..route("late", "/late") };
    let classified = Route { response_classes: vec![class], ..route("all", "/.*") };
    let proxy = proxy(vec![late, classified], &script).await;
    let missing = proxy.get("/").await;
    assert_eq!(missing.status(), StatusCode::NOT_FOUND);
    missing.into_body().collect().await.unwrap();
    let failed = r#"rt_route="all",status_code="404",classification="failure"} 1"#;
    assert!(proxy.scrape().contains(failed), "{}", proxy.scrape());
    let late = proxy.get("/late").await;
    assert_eq!((late.status(), late.headers()["connection"].as_bytes()), (StatusCode::GATEWAY_TIMEOUT, &b"close"[..]));
}

#[tokio::test]
async fn the_timeout_of_a_route_ends_with_the_head() {
    for limit in LIMITS {
        let script = Script::new([Act::Stall]);
        let proxy = proxy(vec![Route { timeout: duration(limit), ..route("all", "/.*") }], &script).await;
        let response = proxy.get("/").await;
        if response.status() == StatusCode::OK {
            let mut stream = response.into_body();
            assert_eq!(stream.frame().await.unwrap().unwrap().into_data().unwrap(), "begin");
            let more = tokio::time::timeout(2 * limit, stream.frame()).await;
            assert!(more.is_err(), "{limit:?}: {more:?}");
            break;
        }
        assert!(limit < LIMITS[3], "{}", response.status());
    }
}

#[tokio::test]
async fn traffic_is_split_by_weight() {
    let (first, second) = (Script::default(), Script::default());
    let control = Control::default();
    let service: SocketAddr = "10.1.3.2:80".parse().unwrap();
    let split = |authority: &str, weight| WeightedDst { authority: authority.into(), weight, backend_ref: None };
    let profile = DestinationProfile {
        fully_qualified_name: NAME.into(),
        dst_overrides: vec![split("first.demo:80", 900), split("second.demo:80", 100)],
        ..DestinationProfile::default()
    };
    control.profiles.lock().insert(service.to_string(), profile);
    control.update("first.demo:80", add(vec![endpoint(first.listen().await, None)]));
    control.update("second.demo:80", add(vec![endpoint(second.listen().await, None)]));
    let proxy = Proxy::start(service, control).await;
    let mut sender = proxy.http1().await;
    for _ in 0..200 {
        sender.ready().await.unwrap();
        sender.send_request(get("/")).await.unwrap().into_body().collect().await.unwrap();
    }
    let (first, second) = (first.received().len(), second.received().len());
    // 200 draws with p = 0.1: 4 to 50 is seven deviations wide.
    assert!(first + second == 200 && (4..50).contains(&second), "{first} and {second}");
}

#[tokio::test]
async fn connections_to_an_opaque_port_are_split_whatever_the_protocol_of_its_policy() {
    async fn speaker(name: &'static [u8]) -> SocketAddr {
        serve_each(move |mut stream| async move { stream.write_all(name).await.unwrap() }).await
    }
    let http2 = || {
        use weft_proto::linkerd::outbound::{OutboundPolicy, ProxyProtocol, proxy_protocol};
        let kind = Some(proxy_protocol::Kind::Http2(proxy_protocol::Http2::default()));
        OutboundPolicy { protocol: Some(ProxyProtocol { kind }), metadata: None }
    };
    for policy in [fake::missing_backend(), http2(), fake::grpc_policy("another.demo:80", None)] {
        let control = Control::default();
        let service: SocketAddr = "10.1.3.3:80".parse().unwrap();
        let profile = DestinationProfile {
            fully_qualified_name: NAME.into(),
            opaque_protocol: true,
            dst_overrides: vec![WeightedDst { authority: "canary.demo:80".into(), weight: 1, backend_ref: None }],
            ..DestinationProfile::default()
        };
        control.profiles.lock().insert(service.to_string(), profile);
        control.policies.lock().insert(service, policy);
        control.update(SERVICE, add(vec![endpoint(speaker(b"stable").await, None)]));
        control.update("canary.demo:80", add(vec![endpoint(speaker(b"canary").await, None)]));
        let proxy = Proxy::start(service, control).await;
        let mut name = [0; 6];
        proxy.connect().await.read_exact(&mut name).await.unwrap();
        assert_eq!(&name, b"canary");
    }
}

/// An application's proxy whose control plane knows a profile of [`NAME`]; the address is that of its listener.
async fn server(routes: Vec<Route>, change: impl FnOnce(&mut Config)) -> (SocketAddr, Arc<Shared>, impl Fn() -> usize) {
    let control = Control::default();
    let profile = DestinationProfile { fully_qualified_name: NAME.into(), routes, ..DestinationProfile::default() };
    control.profiles.lock().insert(SERVICE.to_owned(), profile);
    let mut config = testing::config();
    config.destination.control.port = control.serve().await.port();
    config.destination.initial_timeout = Duration::from_secs(20);
    change(&mut config);
    let (shared, drain) = testing::shared(config, &Mesh::new());
    std::mem::forget(drain);
    let app = pair::echo().await;
    let discover = testing::discover(&shared);
    let (port, names) = testing::serve_with_profiles(Arc::clone(&shared), discover, app).await;
    (SocketAddr::from(([127, 0, 0, 1], port)), shared, names)
}

async fn ask(server: SocketAddr, path: &str, headers: &[(&'static str, &str)]) -> StatusCode {
    let stream = TokioIo::new(TcpStream::connect(server).await.unwrap());
    let (mut sender, connection) = conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut request = Request::builder().uri(path).body(Empty::<Bytes>::new()).unwrap();
    for (name, value) in headers {
        request.headers_mut().append(*name, value.parse().unwrap());
    }
    let response = sender.send_request(request).await.unwrap();
    let status = response.status();
    response.into_body().collect().await.unwrap();
    status
}

fn lines(shared: &Arc<Shared>, name: &str) -> Vec<String> {
    let text = fake::scrape(shared);
    let mut lines: Vec<_> =
        text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).map(str::to_owned).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn a_server_counts_requests_by_the_routes_of_the_profile_that_they_name() {
    let (server, shared, _) = server(vec![route("books", "/books.*"), route("all", "/all")], |_| {}).await;
    for (path, headers) in [
        ("/books/1", vec![("host", NAME)]),
        ("/books/2", vec![("host", "books"), ("l5d-dst-canonical", SERVICE)]),
        ("/all", vec![("host", SERVICE)]),
        // Without a route, without a profile, outside the suffixes, no name at all.
        ("/other", vec![("host", NAME)]),
        ("/books/3", vec![("host", "another.demo.svc.cluster.local")]),
        ("/books/4", vec![("host", "server.demo.example.org")]),
        ("/books/5", vec![("host", "10.0.0.1:80")]),
    ] {
        assert_eq!(ask(server, path, &headers).await, StatusCode::OK, "{path}");
    }
    let series = |route: &str| format!(r#"direction="inbound",dst="{SERVICE}",rt_route="{route}""#);
    let requests = |route, count| format!("route_request_total{{{}}} {count}", series(route));
    assert_eq!(lines(&shared, "route_request_total"), [requests("all", 1), requests("books", 2)]);
    let responses = |route, count| {
        format!(r#"route_response_total{{{},status_code="200",classification="success"}} {count}"#, series(route))
    };
    assert_eq!(lines(&shared, "route_response_total"), [responses("all", 1), responses("books", 2)]);
    assert!(lines(&shared, "route_actual_request_total").is_empty(), "a server repeats nothing");
}

#[tokio::test]
async fn a_server_classifies_responses_as_the_route_says() {
    let range = response_match::Match::Status(HttpStatusRange { min: 200, max: 200 });
    let class = ResponseClass { condition: Some(ResponseMatch { r#match: Some(range) }), is_failure: true };
    let (server, shared, _) =
        server(vec![Route { response_classes: vec![class], ..route("all", "/.*") }], |_| {}).await;
    assert_eq!(ask(server, "/", &[("host", NAME)]).await, StatusCode::OK);
    for name in ["route_response_total", "response_total"] {
        let counted = lines(&shared, name);
        assert!(counted.len() == 1 && counted[0].contains(r#"classification="failure""#), "{counted:?}");
    }
}

#[tokio::test]
async fn a_server_does_not_wait_longer_for_a_profile_than_the_settings_say_and_follows_few_names() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let change = move |config: &mut Config| {
        config.destination.control.port = port;
        config.destination.initial_timeout = Duration::from_millis(1);
    };
    let (server, shared, names) = server(vec![route("all", "/.*")], change).await;
    for number in 0..70 {
        let host = format!("name-{number}.demo.svc.cluster.local");
        assert_eq!(ask(server, "/", &[("host", &host)]).await, StatusCode::OK);
    }
    assert!(lines(&shared, "route_request_total").is_empty());
    assert_eq!(names(), 64);
}

#[tokio::test]
async fn an_address_without_a_policy_is_asked_about_again_while_it_is_used() {
    let control = Control::default();
    let service = "10.1.2.3:80".parse().unwrap();
    let proxy = Proxy::start(service, control.clone()).await;
    let lookup = testing::discover(&proxy.shared).look_up(&Destination::Addr(service));
    let mut state = lookup.policy.clone();
    let patience = Duration::from_secs(20);
    let absent = state.wait_for(|state| matches!(state, PolicyState::Absent));
    drop(tokio::time::timeout(patience, absent).await.expect("no answer").unwrap());
    // The Service comes.
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let known = state.wait_for(|state| matches!(state, PolicyState::Known(_)));
    drop(tokio::time::timeout(patience, known).await.expect("it was not asked about again").unwrap());
}
