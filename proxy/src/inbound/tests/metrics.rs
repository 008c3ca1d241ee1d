//! What requests leave in the metrics of servers and routes: whole lines, with Linkerd's names, labels and values.

use std::collections::BTreeSet;

use futures::StreamExt as _;
use http_body_util::StreamBody;
use hyper::body::Frame;
use tokio::time::Instant;
use weft_proto::linkerd::{
    inbound::{
        GrpcRoute, Server, grpc_route,
        proxy_protocol::{Grpc, Kind},
    },
    meta::{Metadata, metadata},
};

use super::*;

/// The labels of the routes in [`detecting`].
const ROUTE: &str = r#"route_group="",route_kind="default",route_name="default""#;

fn scrape(world: &World) -> String {
    let mut registry = prometheus_client::registry::Registry::default();
    world.registry.metrics.register_in(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    text
}

/// Waits until the metrics have these lines of a name and no others.
async fn expect(world: &World, name: &str, expected: &[(&str, u64)]) {
    let expected: BTreeSet<_> = expected.iter().map(|(labels, value)| format!("{name}{{{labels}}} {value}")).collect();
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let text = scrape(world);
        let begin = format!("{name}{{");
        let lines: BTreeSet<_> = text.lines().filter(|line| line.starts_with(&begin)).map(str::to_owned).collect();
        if lines == expected {
            return;
        }
        assert!(Instant::now() < deadline, "{name} has\n{lines:#?}\ninstead of\n{expected:#?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn parent(world: &World) -> String {
    let port = world.app.port();
    format!(r#"parent_group="",parent_kind="server",parent_name="web",parent_port="{port}""#)
}

/// An application whose answer to every call is a message and the gRPC status that the path names.
async fn grpc_app() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(|request: Request<Incoming>| async move {
                let status = request.uri().path().rsplit('/').next().unwrap().to_owned();
                request.into_body().collect().await.unwrap();
                let trailers = [(::http::HeaderName::from_static("grpc-status"), status.parse().unwrap())];
                let frames =
                    [Frame::data(Bytes::from_static(b"message")), Frame::trailers(trailers.into_iter().collect())];
                let body = StreamBody::new(futures::stream::iter(frames).map(Ok::<_, std::convert::Infallible>));
                let response = ::http::Response::builder().header("content-type", "application/grpc");
                Ok::<_, std::convert::Infallible>(response.body(body).unwrap())
            });
            let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(builder.serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}

#[tokio::test]
async fn requests_are_counted_by_server_and_route() {
    let world = World::new(http_app().await).await;
    world.policies.publish(world.app.port(), detecting(vec![authz("web", only(&[CLIENT]))]));
    let stream = TokioIo::new(world.connect(Via::Tls, Some(ELSEWHERE)).await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let body = Full::new(Bytes::from(vec![b'x'; 2000]));
    let request = Request::post("/do").header("host", "web.demo").body(body).unwrap();
    let response = sender.send_request(request).await.unwrap();
    let size = response.into_body().collect().await.unwrap().to_bytes().len();
    assert!(size < 128, "{size}");
    // Another connection counts in the same series; a request that is denied does not count.
    assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, 200);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, 403);

    let labels = format!("{},{ROUTE}", parent(&world));
    expect(&world, "inbound_http_requests_total", &[(&labels, 2)]).await;
    expect(&world, "inbound_http_statuses_total", &[(&format!(r#"{labels},status="200""#), 2)]).await;
    expect(&world, "inbound_http_request_duration_seconds_count", &[(&labels, 2)]).await;
    expect(&world, "inbound_http_response_duration_seconds_count", &[(&labels, 2)]).await;
    // HTTP/1 has no frames: what is read at once counts.
    let sum = format!("inbound_http_request_frame_size_bytes_sum{{{labels}}} 2000.0");
    assert!(scrape(&world).contains(&sum), "{}", scrape(&world));
    let bucket = |le: &str| format!(r#"le="{le}",{labels}"#);
    expect(
        &world,
        "inbound_http_response_frame_size_bytes_bucket",
        &[(&bucket("128.0"), 2), (&bucket("1024.0"), 2), (&bucket("10240.0"), 2), (&bucket("+Inf"), 2)],
    )
    .await;
    assert!(!scrape(&world).contains("inbound_grpc_"), "{}", scrape(&world));
    let port = world.app.port();
    let server = format!(r#"srv_group="",srv_kind="server",srv_name="web",srv_port="{port}""#);
    expect(&world, "inbound_tcp_detect_http_results_total", &[(&format!(r#"result="http/1",{server}"#), 3)]).await;
    expect(&world, "inbound_tcp_detect_http_duration_seconds_count", &[(&server, 3)]).await;
}

#[tokio::test]
async fn requests_that_the_application_does_not_answer_have_no_status() {
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let world = World::new(unused).await;
    world.policies.publish(world.app.port(), detecting(vec![authz("web", only(&[CLIENT]))]));
    assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, 502);
    let failed = format!(r#"{},{ROUTE},status="""#, parent(&world));
    expect(&world, "inbound_http_statuses_total", &[(&failed, 1)]).await;
}

#[tokio::test]
async fn grpc_is_counted_by_the_status_in_trailers() {
    let world = World::new(grpc_app().await).await;
    let named = Some(Metadata { kind: Some(metadata::Kind::Default("default".into())) });
    let route = GrpcRoute { metadata: named, rules: vec![grpc_route::Rule::default()], ..GrpcRoute::default() };
    let kind = Some(Kind::Grpc(Grpc { routes: vec![route] }));
    let server = detecting(vec![authz("web", only(&[CLIENT]))]);
    let protocol = Some(weft_proto::linkerd::inbound::ProxyProtocol { kind });
    world.policies.publish(world.app.port(), Server { protocol, ..server });
    let stream = TokioIo::new(world.connect(Via::Tls, Some(ELSEWHERE)).await);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    for status in ["0", "14", "0", "4242"] {
        let request = Request::post(format!("http://web.demo/echo.Echo/{status}"));
        let body = Full::new(Bytes::from_static(b"call"));
        let request = request.header("content-type", "application/grpc").body(body).unwrap();
        sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
    }
    let labels = format!("{},{ROUTE}", parent(&world));
    let status = |status: &str| format!(r#"{labels},status="{status}""#);
    expect(&world, "inbound_grpc_requests_total", &[(&labels, 4)]).await;
    expect(&world, "inbound_grpc_statuses_total", &[(&status("0"), 2), (&status("14"), 1), (&status(""), 1)]).await;
    expect(&world, "inbound_grpc_request_frame_size_bytes_count", &[(&labels, 4)]).await;
    expect(&world, "inbound_grpc_response_frame_size_bytes_count", &[(&labels, 4)]).await;
    expect(&world, "inbound_grpc_response_duration_seconds_count", &[(&labels, 4)]).await;
    assert!(!scrape(&world).contains("inbound_http_requests_total"), "{}", scrape(&world));
}

#[tokio::test]
async fn authorities_are_a_label_where_it_is_asked_for() {
    let app = http_app().await;
    for is_asked in [false, true] {
        let world = World::with(app, |config| config.inbound.authority_labels = is_asked).await;
        world.policies.publish(world.app.port(), detecting(vec![authz("web", only(&[CLIENT]))]));
        world.get(Via::Tls, Some(ELSEWHERE), "/").await;
        let text = scrape(&world);
        let begin = r#"request_total{direction="inbound",authority="web.demo",target_addr="#;
        assert_eq!(text.lines().any(|line| line.starts_with(begin)), is_asked, "{text}");
        assert_eq!(text.contains("authority="), is_asked, "{text}");
    }
}
