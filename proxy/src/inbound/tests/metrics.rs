//! What requests leave in the metrics of servers and routes: whole lines, with Linkerd's names, labels and values.

use std::collections::BTreeSet;

use futures::StreamExt as _;
use http_body_util::StreamBody;
use hyper::body::Frame;
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

/// The labels of the servers in this file.
pub(super) const SERVER: &str = r#"srv_group="",srv_kind="server",srv_name="web""#;

/// The labels of a target.
pub(super) fn target(addr: SocketAddr) -> String {
    format!(r#"target_addr="{addr}",target_ip="{}",target_port="{}""#, addr.ip(), addr.port())
}

/// The labels of the server of the application's port.
fn server(world: &World) -> String {
    format!(r#"{SERVER},srv_port="{}""#, world.app.port())
}

/// Waits until the metrics are as they should be.
pub(super) async fn eventually(world: &World, are_right: impl Fn(&str) -> bool) {
    settled(async || {
        let text = scrape(world);
        if are_right(&text) { Ok(()) } else { Err(text) }
    })
    .await;
}

pub(super) fn scrape(world: &World) -> String {
    let mut registry = prometheus_client::registry::Registry::default();
    world.registry.metrics.register_in(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    text
}

/// Waits until the metrics have these lines of a name and no others.
pub(super) async fn expect(world: &World, name: &str, expected: &[(&str, u64)]) {
    let expected: BTreeSet<_> = expected.iter().map(|(labels, value)| format!("{name}{{{labels}}} {value}")).collect();
    let begin = format!("{name}{{");
    settled(async || {
        let text = scrape(world);
        let lines: BTreeSet<_> = text.lines().filter(|line| line.starts_with(&begin)).map(str::to_owned).collect();
        if lines == expected { Ok(()) } else { Err(format!("{name} has\n{lines:#?}\ninstead of\n{expected:#?}")) }
    })
    .await;
}

fn parent(world: &World) -> String {
    let port = world.app.port();
    format!(r#"parent_group="",parent_kind="server",parent_name="web",parent_port="{port}""#)
}

/// An application whose answer to every call is a message and the gRPC status that the path names.
async fn grpc_app() -> SocketAddr {
    serve_each(|stream| {
        let service = service_fn(|request: Request<Incoming>| async move {
            let status = request.uri().path().rsplit('/').next().unwrap().to_owned();
            request.into_body().collect().await.unwrap();
            let trailers = [(::http::HeaderName::from_static("grpc-status"), status.parse().unwrap())];
            let frames = [Frame::data(Bytes::from_static(b"message")), Frame::trailers(trailers.into_iter().collect())];
            let body = StreamBody::new(futures::stream::iter(frames).map(Ok::<_, std::convert::Infallible>));
            let response = ::http::Response::builder().header("content-type", "application/grpc");
            Ok::<_, std::convert::Infallible>(response.body(body).unwrap())
        });
        hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service)
    })
    .await
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
    expect(&world, "inbound_grpc_statuses_total", &[(&status("0"), 2), (&status("14"), 1), (&status("2"), 1)]).await;
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

#[tokio::test]
async fn requests_that_policy_denies_take_no_place_of_an_authority() {
    let world = World::with(http_app().await, |config| config.inbound.authority_labels = true).await;
    world.policies.publish(world.app.port(), detecting(vec![authz("web", only(&[CLIENT]))]));
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, 403);
    let authorities = &world.inbound.shared.metrics.authorities;
    for number in 0..128 {
        let name = format!("web-{number}.demo");
        assert_eq!(authorities.value(&name), name);
    }
    assert_eq!(authorities.value("web.demo"), "other");
}

#[tokio::test]
async fn requests_have_the_labels_of_target_server_route_authorization_and_client() {
    let world = World::new(http_app().await).await;
    let port = world.app.port();
    world.policies.publish(port, detecting(vec![authz("web", only(&[CLIENT]))]));
    assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, 200);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/").await.0, 403);
    let mut without_route = detecting(vec![authz("web", only(&[CLIENT]))]);
    if let Some(Kind::Detect(detect)) = without_route.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut()) {
        detect.http_routes.clear();
    }
    world.policies.publish(port, without_route);
    for (via, expected) in [(Via::Tls, 404), (Via::Plain, 404)] {
        assert_eq!(world.get(via, Some(ELSEWHERE), "/").await.0, expected);
    }

    let server = format!(r#"{},{SERVER},srv_port="{port}""#, target(world.app));
    let (meshed, plain) = (format!(r#"tls="true",client_id="{CLIENT}""#), PLAIN);
    let allowed = format!(r#"{server},{ROUTE},authz_group="",authz_kind="default",authz_name="web",{meshed}"#);
    let answered = format!(r#"direction="inbound",{allowed},status_code="200""#);
    for (name, expected) in [
        ("request_total", vec![format!(r#"direction="inbound",{allowed}"#)]),
        ("response_total", vec![format!(r#"{answered},classification="success""#)]),
        ("response_latency_ms_count", vec![answered]),
        ("inbound_http_authz_allow_total", vec![allowed]),
        ("inbound_http_authz_deny_total", vec![format!("{server},{ROUTE},{plain}")]),
        ("inbound_http_route_not_found_total", vec![format!("{server},{meshed}"), format!("{server},{plain}")]),
    ] {
        let expected: Vec<_> = expected.iter().map(|labels| (labels.as_str(), 1)).collect();
        expect(&world, name, &expected).await;
    }
    // What policy denies is no error.
    let failed = format!(r#"error="no route",{}"#, target(world.app));
    expect(&world, "inbound_http_errors_total", &[(&failed, 2)]).await;
}

/// The labels of a client without TLS.
pub(super) const PLAIN: &str = r#"tls="no_identity",no_tls_reason="no_tls_from_remote""#;
/// The same on an opaque port, where nobody looked.
const SKIPPED: &str = r#"tls="no_identity",no_tls_reason="port_skipped""#;

#[tokio::test]
async fn connections_are_counted_by_what_becomes_of_them() {
    let world = World::new(banner_app().await).await;
    let port = world.app.port();
    let (target, meshed) = (target(world.app), format!(r#"tls="true",client_id="{CLIENT}""#));
    let server = server(&world);
    // Denied, admitted, and ended when policy changes.
    world.policies.publish(port, opaque(vec![authz("a", only(&[CLIENT]))]));
    expect_closed(&mut world.connect(Via::Plain, Some(ELSEWHERE)).await).await;
    let mut stream = world.connect(Via::Direct(None), Some(ELSEWHERE)).await;
    expect_banner(&mut stream).await;
    world.policies.publish(port, opaque(Vec::new()));
    expect_closed(&mut stream).await;
    // TLS for another server, whose name is the client's choice and no label.
    world.policies.publish(port, detecting(vec![authz("all", anybody())]));
    let mut stream = world.raw(Some(ELSEWHERE), world.app).await;
    stream.write_all(&world.hello("somebody.else")).await.unwrap();
    let mut others: Box<dyn Duplex> = Box::new(stream);
    expect_banner(&mut others).await;

    let authz = |name: &str| format!(r#"authz_group="",authz_kind="default",authz_name="{name}""#);
    let allowed = [
        format!("{target},{server},{},{meshed}", authz("a")),
        format!(r#"{target},{server},{},tls="opaque""#, authz("all")),
    ];
    expect(&world, "inbound_tcp_authz_allow_total", &[(&allowed[0], 1), (&allowed[1], 1)]).await;
    expect(&world, "inbound_tcp_authz_deny_total", &[(&format!("{target},{server},{SKIPPED}"), 1)]).await;
    expect(&world, "inbound_tcp_authz_terminate_total", &[(&format!("{target},{server},{meshed}"), 1)]).await;
    expect(&world, "inbound_tcp_errors_total", &[]).await;
    let header = format!(r#"session_protocol="",target_port="{port}",target_name="",client_id="{CLIENT}""#);
    expect(&world, "inbound_tcp_transport_header_connections_total", &[(&header, 1)]).await;
    let accepted = |tls: &str| format!(r#"direction="inbound",peer="src",{target},{tls},{server}"#);
    let (meshed, skipped, others) = (accepted(&meshed), accepted(SKIPPED), accepted(r#"tls="opaque""#));
    expect(&world, "tcp_open_total", &[(&meshed, 1), (&skipped, 1), (&others, 1), (FORWARDED, 2)]).await;
    assert!(!scrape(&world).contains("somebody"), "{}", scrape(&world));
}

/// The labels of connections to the application.
const FORWARDED: &str = r#"direction="inbound",peer="dst",tls="no_identity",no_tls_reason="loopback""#;

/// Waits until these numbers of connections have been closed with these labels and errors, and none with others.
async fn expect_ends(world: &World, ends: &[(&str, &str, u64)]) {
    let ends: Vec<_> = ends.iter().map(|(of, errno, count)| (format!(r#"{of},errno="{errno}""#), *count)).collect();
    let ends: Vec<_> = ends.iter().map(|(labels, count)| (labels.as_str(), *count)).collect();
    expect(world, "tcp_close_total", &ends).await;
}

/// Closes a connection by a reset.
fn reset(stream: TcpStream) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(stream);
}

#[tokio::test]
async fn a_connection_that_is_reset_has_its_error_and_its_bytes() {
    let world = World::new(banner_app().await).await;
    world.policies.publish(world.app.port(), opaque(vec![authz("all", anybody())]));
    let mut stream = world.raw(Some(ELSEWHERE), world.app).await;
    let mut banner = [0; 5];
    stream.read_exact(&mut banner).await.unwrap();
    reset(stream);
    let accepted = format!(r#"direction="inbound",peer="src",{},{SKIPPED},{}"#, target(world.app), server(&world));
    for (name, of_accepted, of_forwarded) in [("tcp_write_bytes_total", 5, 0), ("tcp_read_bytes_total", 0, 5)] {
        expect(&world, name, &[(&accepted, of_accepted), (FORWARDED, of_forwarded)]).await;
    }
    // The application did nothing wrong.
    expect_ends(&world, &[(&accepted, "ECONNRESET", 1), (&accepted, "", 0), (FORWARDED, "", 1)]).await;
}

#[tokio::test]
async fn a_reset_ends_the_side_that_it_came_from_also_below_http_and_tls() {
    for is_tls in [false, true] {
        let world = World::new(http_app().await).await;
        world.policies.publish(world.app.port(), detecting(vec![authz("all", anybody())]));
        let mut stream = world.raw(Some(ELSEWHERE), world.app).await;
        let client = if is_tls {
            let config = world.mesh.credentials(CLIENT).client_config(&OWN.parse().unwrap(), &[]);
            let server = rustls::pki_types::ServerName::try_from(OWN).unwrap();
            let mut stream = TlsConnector::from(config).connect(server, stream).await.unwrap();
            exchange(&mut stream).await;
            reset(stream.into_inner().0);
            format!(r#"tls="true",client_id="{CLIENT}""#)
        } else {
            exchange(&mut stream).await;
            reset(stream);
            PLAIN.to_owned()
        };
        let accepted = format!(r#"direction="inbound",peer="src",{},{client},{}"#, target(world.app), server(&world));
        // The connection to the application is kept for other clients.
        expect_ends(&world, &[(&accepted, "ECONNRESET", 1), (&accepted, "", 0), (FORWARDED, "", 0)]).await;
        expect(&world, "tcp_open_connections", &[(&accepted, 0), (FORWARDED, 1)]).await;
    }
}

/// One request, and the beginning of its answer.
async fn exchange(stream: &mut (impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin)) {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: web.demo\r\n\r\n").await.unwrap();
    let mut answer = [0; 15];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
}
