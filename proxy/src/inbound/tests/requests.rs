//! Requests from any client: forms, hosts, headers of the mesh, filters of the route.

use super::*;

/// Sends bytes as a client outside the mesh and reads until the connection ends.
pub(super) async fn exchange(world: &World, request: &str) -> String {
    exchange_bytes(world, request.as_bytes()).await
}

async fn exchange_bytes(world: &World, request: &[u8]) -> String {
    let mut stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn routes_and_the_application_see_the_same_host() {
    let world = World::new(http_app().await).await;
    let twice = "GET / HTTP/1.1\r\nhost: allowed\r\nhost: secret\r\nconnection: close\r\n\r\n";
    let answer = exchange(&world, twice).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    let absolute = "GET http://allowed/ HTTP/1.1\r\nhost: secret\r\nconnection: close\r\n\r\n";
    let answer = exchange(&world, absolute).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("host=allowed "), "{answer}");
    let answer = exchange(&world, "GET http://secret:80@allowed/ HTTP/1.1\r\nhost: allowed\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    for (host, expected) in [("secret", 400), ("allowed", 200)] {
        let request = Request::get("http://allowed/").header("host", host).body(()).unwrap();
        assert_eq!(world.get_http2(Via::Plain, Some(ELSEWHERE), request).await.0, expected, "{host}");
    }
    let request = Request::get("http://secret:80@allowed/").body(()).unwrap();
    assert_eq!(world.get_http2(Via::Plain, Some(ELSEWHERE), request).await.0, 400);
}

#[tokio::test]
async fn the_header_of_carried_http1_never_reaches_the_application() {
    let world = World::new(http_app().await).await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nl5d-orig-proto: HTTP/1.1\r\nconnection: close\r\n\r\n";
    let answer = exchange(&world, request).await;
    assert!(answer.contains("proto=false"), "{answer}");
    let request = Request::get("http://a/").header("l5d-orig-proto", "unknown").body(()).unwrap();
    let (_, _, body) = world.get_http2(Via::Plain, Some(ELSEWHERE), request).await;
    assert!(body.contains("proto=false"), "{body}");
}

#[tokio::test]
async fn connect_over_http2_is_refused_whatever_carries_it() {
    let world = World::new(http_app().await).await;
    for proto in ["", "HTTP/1.1", "HTTP/1.1; absolute-form"] {
        let request = Request::connect("a:80").header("l5d-orig-proto", proto).body(()).unwrap();
        assert_eq!(world.get_http2(Via::Plain, Some(ELSEWHERE), request).await.0, 400, "{proto}");
    }
}

#[tokio::test]
async fn http2_is_not_smuggled_through_an_upgrade() {
    let world = World::new(http_app().await).await;
    for (target, upgrade) in [
        ("GET /", &b"h2c"[..]),
        ("GET /", b"mirror, h2c"),
        ("GET /", b"mirror\r\nupgrade: h2c"),
        ("GET /", b"mirror\r\nupgrade: \xff, h2c"),
        ("CONNECT a:80", b"h2c"),
    ] {
        let head = format!("{target} HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings, close\r\nupgrade: ");
        let request = [head.as_bytes(), upgrade, b"\r\nhttp2-settings: AAMAAABk\r\n\r\n"].concat();
        let answer = exchange_bytes(&world, &request).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{}: {answer}", request.escape_ascii());
    }
}

#[tokio::test]
async fn injected_failures_are_internal_errors_as_with_linkerd() {
    use weft_proto::linkerd::{
        http_route::HttpFailureInjector,
        inbound::{http_route, proxy_protocol},
    };
    let world = World::new(http_app().await).await;
    let mut server = detecting(vec![authz("all", anybody())]);
    let kind = server.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut());
    let Some(proxy_protocol::Kind::Detect(detect)) = kind else { panic!("not detecting") };
    let failure = HttpFailureInjector { status: 418, message: "tea".to_owned(), ratio: None };
    let filter = http_route::filter::Kind::FailureInjector(failure);
    detect.http_routes[0].rules[0].filters.push(http_route::Filter { kind: Some(filter) });
    world.policies.publish(world.app.port(), server);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, 500);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/healthz").await.0, 200);
}

#[tokio::test]
async fn a_body_that_waits_for_100_continue_is_asked_for_only_if_policy_admits_the_request() {
    let app = serve_each(|stream| {
        // It answers when it has read the body.
        let reads = service_fn(|request: Request<Incoming>| async {
            request.into_body().collect().await?;
            Ok::<_, hyper::Error>(::http::Response::new(Full::<Bytes>::default()))
        });
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), reads)
    })
    .await;
    for (permit, expected) in
        [(only(&["nobody"]), "HTTP/1.1 403 Forbidden\r\n"), (anybody(), "HTTP/1.1 100 Continue\r\n")]
    {
        for via in [Via::Plain, Via::Tls] {
            let world = World::new(app).await;
            world.policies.publish(world.app.port(), detecting(vec![authz("web", permit.clone())]));
            let mut client = world.connect(via, Some(ELSEWHERE)).await;
            let head = b"POST / HTTP/1.1\r\nhost: web\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n";
            client.write_all(head).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                assert!(client.read_buf(&mut answer).await.unwrap() > 0, "closed after {}", answer.escape_ascii());
            }
            assert!(answer.starts_with(expected.as_bytes()), "{}", answer.escape_ascii());
        }
    }
}
