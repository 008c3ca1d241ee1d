//! What the log says about requests.

use super::*;
use crate::testing::{INJECTORS_FILTER, Lines};

#[tokio::test]
async fn what_is_admitted_for_an_audit_alone_is_logged() {
    for (authorization, expected) in [("all", 0), ("audit", 1)] {
        let lines = Lines::default();
        let _guard = lines.of_this_thread("trace");
        let world = World::new(http_app().await).await;
        world.policies.publish(world.app.port(), detecting(vec![authz(authorization, anybody())]));
        assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, StatusCode::OK);
        assert_eq!(lines.text().matches("Request allowed").count(), expected, "{authorization}: {}", lines.text());
        let world = World::new(banner_app().await).await;
        world.policies.publish(world.app.port(), opaque(vec![authz(authorization, anybody())]));
        expect_banner(&mut world.connect(Via::Direct(None), Some(ELSEWHERE)).await).await;
        assert_eq!(lines.text().matches("Connection allowed").count(), expected, "{authorization}: {}", lines.text());
    }
}

#[tokio::test]
async fn headers_are_logged_only_where_the_settings_allow_it() {
    for is_allowed in [false, true] {
        let lines = Lines::default();
        let _guard = lines.of_this_thread("trace");
        let world = World::with(http_app().await, |config| config.log_headers = is_allowed).await;
        assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, StatusCode::OK);
        let text = lines.text();
        // What the application gets, and what it answers.
        let of_proxy = |line: &&str| line.contains("weft_proxy") && line.contains("headers=");
        let logged: Vec<_> = text.lines().filter(of_proxy).collect();
        assert_eq!(logged.len(), if is_allowed { 2 } else { 0 }, "{text}");
        assert_eq!(logged.iter().any(|line| line.contains(CLIENT)), is_allowed, "{text}");
    }
}

#[tokio::test]
async fn requests_that_fail_are_logged_at_info_and_those_that_policy_refuses_are_not() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let closed = crate::testing::unused_addr();
    let world = World::new(closed).await;
    assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, StatusCode::BAD_GATEWAY);
    let text = lines.text();
    let expected =
        format!(r"HTTP/1.1 request failed error=connect to {closed} error.sources=[Connection refused (os error 111)]");
    assert!(text.lines().any(|line| line.contains(" INFO ") && line.contains(&expected)), "{text}");
    assert!(text.contains(&format!(" client.addr={ELSEWHERE} orig_dst.addr={closed}\n")), "{text}");

    world.policies.publish(closed.port(), detecting(vec![authz("nobody", only(&["nobody"]))]));
    assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, StatusCode::FORBIDDEN);
    let text = lines.text();
    assert_eq!((text.matches("request failed").count(), text.matches("request denied").count()), (1, 1), "{text}");
}

#[tokio::test]
async fn a_request_that_its_client_gives_up_is_logged_at_debug() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread("warn,weft=debug");
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let world = World::new(silent.local_addr().unwrap()).await;
    let mut client = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: web.demo\r\n\r\n").await.unwrap();
    let (mut app, _) = silent.accept().await.unwrap();
    assert!(app.read(&mut [0; 64]).await.unwrap() > 0);
    let addr = world.app;
    let expected = format!("request given up before its response dst.addr={addr} client.addr={ELSEWHERE} elapsed=");
    let is_logged = || lines.text().lines().any(|line| line.contains("DEBUG") && line.contains(&expected));
    assert!(!is_logged());
    drop(client);
    crate::testing::eventually("the client's leaving is logged", is_logged).await;

    let world = World::new(http_app().await).await;
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, StatusCode::OK);
    assert_eq!(lines.text().matches("request given up").count(), 1, "one that is answered: {}", lines.text());
}

/// Sends a hundred requests, which get `expected`; returns how many lines about them may be written meanwhile.
async fn flood(world: &World, expected: StatusCode) -> u64 {
    let stream = TokioIo::new(world.connect(Via::Plain, Some(ELSEWHERE)).await);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let began = tokio::time::Instant::now();
    for _ in 0..100 {
        let request = Request::get("http://web.demo/").body(Full::<Bytes>::default()).unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().status(), expected);
    }
    20 * (1 + began.elapsed().as_secs())
}

#[tokio::test]
async fn a_flood_of_denied_requests_is_a_bounded_number_of_lines() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), detecting(vec![authz("nobody", only(&["nobody"]))]));
    let bound = flood(&world, StatusCode::FORBIDDEN).await;
    let written = lines.text().matches("request denied").count() as u64;
    assert!((20..=bound).contains(&written), "{written} lines, and not {bound}");
}

#[tokio::test]
async fn a_flood_of_requests_allowed_for_an_audit_is_a_bounded_number_of_lines_and_hides_no_denial() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let written = |line: &str| lines.text().matches(line).count() as u64;
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), detecting(vec![authz("audit", anybody())]));
    let bound = flood(&world, StatusCode::OK).await;
    let allowed = written("Request allowed");
    assert!((20..=bound).contains(&allowed), "{allowed} lines, and not {bound}");
    world.policies.publish(world.app.port(), detecting(vec![authz("nobody", only(&["nobody"]))]));
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, StatusCode::FORBIDDEN);
    assert_eq!(written("request denied"), 1, "{}", lines.text());
}

#[tokio::test]
async fn a_flood_of_connections_allowed_for_an_audit_is_a_bounded_number_of_lines() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let world = World::new(banner_app().await).await;
    world.policies.publish(world.app.port(), opaque(vec![authz("audit", anybody())]));
    let began = tokio::time::Instant::now();
    for _ in 0..50 {
        expect_banner(&mut world.connect(Via::Plain, Some(ELSEWHERE)).await).await;
    }
    let bound = 20 * (1 + began.elapsed().as_secs());
    let written = lines.text().matches("Connection allowed").count() as u64;
    assert!((20..=bound).contains(&written), "{written} lines, and not {bound}");
}

#[tokio::test]
async fn connections_that_nobody_asked_to_end_are_logged_at_info() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let world = World::new(http_app().await).await;
    let own = SocketAddr::new(world.app.ip(), world.registry.config.inbound.listen.port());
    let mut stranger = world.raw(Some(ELSEWHERE), own).await;
    stranger.write_all(b"GET / HTTP/1.1\r\nhost: web\r\n\r\n").await.unwrap();
    assert_eq!(stranger.read_to_end(&mut Vec::new()).await.unwrap_or(0), 0);
    let closed = format!(
        "Connection closed error=direct connections must be mutually authenticated: the client does not speak TLS client.addr={ELSEWHERE} orig_dst.addr={own}"
    );
    crate::testing::eventually("the line is written", || lines.text().contains(&closed)).await;
    // Health checks connect, and send nothing.
    drop(world.raw(Some(ELSEWHERE), world.app).await);
    world.policies.publish(world.app.port(), opaque(vec![authz("nobody", only(&["nobody"]))]));
    let mut denied = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    assert_eq!(denied.read_to_end(&mut Vec::new()).await.unwrap_or(0), 0);
    crate::testing::eventually("the refusal is logged", || lines.text().contains("connection denied")).await;
    assert_eq!(lines.text().matches("Connection closed").count(), 1, "{}", lines.text());
}
