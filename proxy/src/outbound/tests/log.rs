//! What the log says at the level of the injector's filter about requests and connections that fail.

use super::*;
use crate::{
    http::respond::{Failure, RequestKind},
    testing::{INJECTORS_FILTER, Lines},
};

#[tokio::test]
async fn fail_fast_its_end_and_requests_that_fail_are_logged_at_info() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let control = Control::default();
    let service = "10.1.6.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![]));
    let proxy = Proxy::start_with(service, control, fails_fast, true).await;
    let written = |expected: &str| {
        let text = lines.text();
        let found = text.lines().filter(|line| line.contains(" INFO ") && line.contains(expected)).count();
        assert_eq!(found, 1, "{expected} in\n{text}");
    };
    assert_eq!(proxy.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
    written(&format!("Unavailable; entering failfast service=\"{SERVICE}\" timeout=0.5"));
    written("HTTP/1.1 request failed error=service in fail-fast client.addr=127.0.0.1:");
    written(" orig_dst.addr=10.1.6.1:80");
    let stream = TokioIo::new(proxy.connect().await);
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let request = Request::post("http://server.demo/echo.Echo/Say").header("content-type", "application/grpc");
    let response = sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap();
    assert_eq!(response.headers()["grpc-status"], "4");
    written("gRPC request failed error=service in fail-fast");
    proxy.control.update(SERVICE, add(vec![endpoint(application("app").await, None)]));
    let deadline = Instant::now() + Duration::from_secs(60);
    while proxy.get("/").await.status() != StatusCode::OK {
        assert!(Instant::now() < deadline, "the endpoint is not used");
    }
    written(&format!("Available; exited failfast service=\"{SERVICE}\" elapsed=0."));
    written("Unavailable; entering failfast");
}

#[tokio::test]
async fn an_endpoint_that_refuses_connections_is_a_warning_once_for_each_pause() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let dead = unused_addr();
    let control = Control::default();
    let service = "10.1.6.2:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    control.update(SERVICE, add(vec![endpoint(dead, None)]));
    let rest = |config: &mut Config| {
        fails_fast(config);
        config.outbound.backoff_min = Duration::from_secs(60);
        config.outbound.backoff_max = Duration::from_secs(60);
    };
    let proxy = Proxy::start_with(service, control, rest, true).await;
    for _ in 0..2 {
        assert_eq!(proxy.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
        let mut client = proxy.connect().await;
        client.write_all(b"\x01\x02 these are not http").await.unwrap();
        assert!(matches!(client.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    }
    let text = lines.text();
    let expected =
        format!("Failed to connect error=connect to {dead}: Connection refused (os error 111) dst.addr={dead}");
    let warnings = text.lines().filter(|line| line.contains(" WARN ") && line.contains(&expected)).count();
    assert_eq!(warnings, 2, "one of each balancer:\n{text}");
    assert!(text.contains("Connection closed error=no endpoint of the service is available client.addr=127"), "{text}");
}

#[tokio::test]
async fn answers_of_policy_and_clients_that_leave_are_not_logged() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    for of in [policy(SERVICE, vec![failing(418, "injected")]), forbidden()] {
        let is_forbidden = of == forbidden();
        let control = Control::default();
        let service = "10.1.6.3:80".parse().unwrap();
        control.policies.lock().insert(service, of);
        control.update(SERVICE, add(vec![endpoint(application("app").await, None)]));
        let proxy = Proxy::start(service, control).await;
        drop(proxy.connect().await);
        if is_forbidden {
            let mut client = proxy.connect().await;
            assert!(matches!(client.read(&mut [0; 1]).await, Ok(0) | Err(_)));
            eventually("it is counted", || proxy.scrape().contains(r#"error="forbidden"}"#)).await;
        } else {
            assert_eq!(proxy.get("/").await.status(), StatusCode::IM_A_TEAPOT);
        }
    }
    let text = lines.text();
    assert!(!text.contains("request failed") && !text.contains("Connection closed"), "{text}");
}

#[tokio::test]
async fn a_request_that_is_given_up_before_its_response_is_logged_at_debug() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread("warn,weft=debug");
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = silent.local_addr().unwrap();
    let proxy = Proxy::start(addr, Control::default()).await;
    let mut client = proxy.connect().await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: server.demo\r\n\r\n").await.unwrap();
    let (mut server, _) = silent.accept().await.unwrap();
    assert!(server.read(&mut [0; 64]).await.unwrap() > 0);
    let expected = format!("request given up before its response dst.addr={addr} client.addr=127.0.0.1:");
    let is_logged = || lines.text().lines().any(|line| line.contains("DEBUG") && line.contains(&expected));
    assert!(!is_logged());
    drop(client);
    eventually("the client's leaving is logged", is_logged).await;
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_failures_is_a_bounded_number_of_lines() {
    let lines = Lines::default();
    let _guard = lines.of_this_thread(INJECTORS_FILTER);
    let (log, client) = (crate::failure_log::FailureLog::default(), "10.0.0.1:50000".parse().unwrap());
    let kind = RequestKind::outbound(Version::HTTP_11, &HeaderMap::new(), true);
    let failed = || log.request(kind, &Failure::LoadShed, &Failure::LoadShed, client, &client);
    (0..1000).for_each(|_| failed());
    assert_eq!(lines.text().lines().count(), 20);
    tokio::time::advance(Duration::from_secs(1)).await;
    failed();
    let text = lines.text();
    assert_eq!(text.lines().count(), 21);
    assert!(text.lines().last().unwrap().ends_with(" suppressed=980"), "{text}");
}
