//! End-to-end tests of the inbound side over loopback sockets: real TLS, real HTTP, a stand-in for the application.
//!
//! Clients on loopback are always admitted, so tests of refusals use another peer address.

mod access_log;
mod close;
mod limits;
mod log;
mod metrics;
mod policy;
mod rates;
mod requests;
mod routes;
mod streams;
mod tls;

use std::{net::SocketAddr, num::NonZeroU16, time::Duration};

use ::http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{
    body::{Bytes, Incoming},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsConnector;
use weft_runtime::drain::Drain;

use super::{
    testing::{Mesh, OWN, config, shared},
    *,
};
use crate::{
    config::Config,
    policy::testing::{anybody, authz, detecting, http_only, only, opaque},
    testing::{serve_each, settled, tcp_pair},
    transport_header::{ALPN, SessionProtocol, TransportHeader},
};

const CLIENT: &str = "client.demo.serviceaccount.identity.linkerd.cluster.local";
const ELSEWHERE: &str = "10.9.9.9:50000";

/// A worker in front of an application.
struct World {
    mesh: Mesh,
    inbound: Arc<Inbound>,
    policies: Policies,
    /// Address of the application.
    app: SocketAddr,
    drain: Option<Drain>,
    registry: Arc<Shared>,
}

/// How a client connects.
#[derive(Clone, Copy)]
enum Via {
    Plain,
    /// mTLS to the application's port.
    Tls,
    /// mTLS to the proxy's own port, with a transport header.
    Direct(Option<SessionProtocol>),
}

impl World {
    async fn new(app: SocketAddr) -> Self {
        Self::with(app, |_| {}).await
    }

    async fn with(app: SocketAddr, change: impl FnOnce(&mut Config)) -> Self {
        Self::built(app, change, |_| {}).await
    }

    async fn built(app: SocketAddr, change: impl FnOnce(&mut Config), change_shared: impl FnOnce(&mut Shared)) -> Self {
        let mesh = Mesh::new();
        let mut settings = config();
        settings.inbound.detect_timeout = Duration::from_millis(300);
        settings.inbound.connect_timeout = Duration::from_secs(2);
        change(&mut settings);
        let (mut shared, drain) = shared(settings.clone(), &mesh);
        change_shared(Arc::get_mut(&mut shared).unwrap());
        let policies = Policies::unreachable(settings);
        let inbound = Arc::new(Inbound::new(Arc::clone(&shared), policies.clone()));
        Self { mesh, inbound, policies, app, drain: Some(drain), registry: shared }
    }

    /// A connection as if accepted from `peer` with the original destination `target`.
    async fn raw(&self, peer: Option<&str>, target: SocketAddr) -> TcpStream {
        let (client, accepted) = tcp_pair().await;
        let peer = peer.map_or_else(|| client.local_addr().unwrap(), |peer| peer.parse().unwrap());
        let inbound = Arc::clone(&self.inbound);
        let served = async move {
            if let Err(error) = inbound.serve(accepted, peer, target).await {
                inbound.failed(&error, peer, target);
            }
        };
        tokio::spawn(self.registry.drain.track(served));
        client
    }

    /// mTLS to the proxy's own port, with this transport header.
    async fn direct(&self, name: Option<&str>, port: u16, protocol: Option<SessionProtocol>) -> Box<dyn Duplex> {
        let own = SocketAddr::new(self.app.ip(), self.registry.config.inbound.listen.port());
        let stream = self.raw(Some(ELSEWHERE), own).await;
        let config = self.mesh.credentials(CLIENT).client_config(&OWN.parse().unwrap(), &[ALPN]);
        let server = rustls::pki_types::ServerName::try_from(OWN).unwrap();
        let mut stream = TlsConnector::from(config).connect(server, stream).await.unwrap();
        let port = NonZeroU16::new(port).unwrap();
        let header = TransportHeader { port, name: name.map(str::to_owned), protocol };
        stream.write_all(&header.encode()).await.unwrap();
        Box::new(stream)
    }

    async fn connect(&self, via: Via, peer: Option<&str>) -> Box<dyn Duplex> {
        let own_port = self.registry.config.inbound.listen.port();
        let (target, alpn): (_, &[&[u8]]) = match via {
            Via::Plain => return Box::new(self.raw(peer, self.app).await),
            Via::Tls => (self.app, &[]),
            Via::Direct(_) => (SocketAddr::new(self.app.ip(), own_port), &[ALPN]),
        };
        let stream = self.raw(peer, target).await;
        let config = self.mesh.credentials(CLIENT).client_config(&OWN.parse().unwrap(), alpn);
        let name = rustls::pki_types::ServerName::try_from(OWN).unwrap();
        let mut stream = TlsConnector::from(config).connect(name, stream).await.unwrap();
        if let Via::Direct(protocol) = via {
            let port = NonZeroU16::new(self.app.port()).unwrap();
            let header = TransportHeader { port, name: None, protocol };
            stream.write_all(&header.encode()).await.unwrap();
        }
        Box::new(stream)
    }

    /// A connection that was upgraded to a tunnel.
    async fn tunnel(&self, via: Via) -> Box<dyn Duplex> {
        let mut stream = self.connect(via, Some(ELSEWHERE)).await;
        let request = b"GET / HTTP/1.1\r\nhost: web.demo\r\nconnection: upgrade\r\nupgrade: mirror\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        assert!(head.starts_with(b"HTTP/1.1 101"), "{}", head.escape_ascii());
        stream
    }

    async fn get(&self, via: Via, peer: Option<&str>, path: &str) -> (StatusCode, ::http::HeaderMap, String) {
        get_over(self.connect(via, peer).await, path).await
    }

    async fn get_http2(
        &self,
        via: Via,
        peer: Option<&str>,
        request: Request<()>,
    ) -> (StatusCode, ::http::HeaderMap, String) {
        let stream = TokioIo::new(self.connect(via, peer).await);
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await;
        let (mut sender, connection) = handshake.unwrap();
        tokio::spawn(connection);
        let response = sender.send_request(request.map(|()| Full::<Bytes>::default())).await.unwrap();
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
    }

    /// A ClientHello that asks for this name.
    fn hello(&self, name: &'static str) -> Vec<u8> {
        let config = self.mesh.credentials(CLIENT).client_config(&OWN.parse().unwrap(), &[]);
        let name = rustls::pki_types::ServerName::try_from(name).unwrap();
        let mut hello = Vec::new();
        rustls::ClientConnection::new(config, name).unwrap().write_tls(&mut hello).unwrap();
        hello
    }

    /// The value of a counter family: the sum over all label sets that contain each of `labels`.
    fn counted(&self, text: &str, name: &str, labels: &[&str]) -> u64 {
        let lines =
            text.lines().filter(|line| line.starts_with(name) && labels.iter().all(|label| line.contains(label)));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    }
}

/// Sends a request of HTTP/1 on a connection of its own.
async fn get_over(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    path: &str,
) -> (StatusCode, ::http::HeaderMap, String) {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder().uri(path).header("host", "web.demo");
    let request = request.header("l5d-client-id", "forged").header("l5d_client_id", "forged");
    let response = sender.send_request(request.body(Full::<Bytes>::default()).unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
}

trait Duplex: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send> Duplex for T {}

/// An application that answers HTTP of either version with the request that it received, one item a line.
async fn http_app() -> SocketAddr {
    let mut connections = 0;
    serve_each(move |stream| {
        connections += 1;
        let connection = connections;
        let answer = service_fn(move |request: Request<Incoming>| answer(request, connection));
        async move {
            let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let _ = builder.serve_connection_with_upgrades(TokioIo::new(stream), answer).await;
        }
    })
    .await
}

async fn answer(
    mut request: Request<Incoming>,
    connection: usize,
) -> Result<::http::Response<Full<Bytes>>, std::convert::Infallible> {
    if request.headers().contains_key("upgrade") {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut tunnel = TokioIo::new(upgrade.await.unwrap());
            let mut bytes = [0; 4];
            tunnel.read_exact(&mut bytes).await.unwrap();
            bytes.reverse();
            tunnel.write_all(&bytes).await.unwrap();
        });
        let response = ::http::Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header("connection", "upgrade")
            .header("upgrade", "mirror");
        return Ok(response.body(Full::default()).unwrap());
    }
    // As an application behind CGI reads names.
    let ids = request.headers().iter().filter(|(name, _)| name.as_str().replace('_', "-") == "l5d-client-id");
    let ids: Vec<&str> = ids.map(|(_, id)| id.to_str().unwrap()).collect();
    let seen = format!(
        "{:?} {} {} id={} proto={} host={} added={} connection={connection}",
        request.version(),
        request.method(),
        request.uri(),
        ids.join(","),
        request.headers().contains_key("l5d-orig-proto"),
        request.headers().get("host").map_or("", |host| host.to_str().unwrap()),
        request.headers().get("x-added").map_or("", |added| added.to_str().unwrap()),
    );
    Ok(::http::Response::new(Full::new(Bytes::from(seen))))
}

/// An application that speaks first and then echoes.
async fn banner_app() -> SocketAddr {
    serve_each(|mut stream| async move {
        let (mut read, mut write) = stream.split();
        write.write_all(b"hello").await.unwrap();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
    .await
}

async fn expect_banner(stream: &mut Box<dyn Duplex>) {
    let mut bytes = [0; 5];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"hello");
}

/// A closed connection is an end or a reset before any byte.
async fn expect_closed(stream: &mut Box<dyn Duplex>) {
    let mut bytes = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut bytes)).await.expect("not closed");
    assert!(bytes.is_empty() || ended.is_err(), "{bytes:?}");
    assert!(bytes.is_empty());
}

#[tokio::test]
async fn plaintext_http_is_forwarded_and_forged_identities_are_removed() {
    let world = World::new(http_app().await).await;
    let (status, _, body) = world.get(Via::Plain, None, "/a?b=c").await;
    assert_eq!(status, 200);
    assert!(body.starts_with("HTTP/1.1 GET /a?b=c id= proto=false"), "{body}");
}

#[tokio::test]
async fn a_meshed_client_is_named_to_the_application() {
    let world = World::new(http_app().await).await;
    for via in [Via::Tls, Via::Direct(Some(SessionProtocol::Http1))] {
        let (status, _, body) = world.get(via, Some(ELSEWHERE), "/").await;
        assert_eq!(status, 200);
        assert!(body.contains(&format!("id={CLIENT} ")), "{body}");
    }
}

#[tokio::test]
async fn carried_http1_reaches_the_application_as_http1() {
    let world = World::new(http_app().await).await;
    let request = Request::get("http://web.demo/x").header("l5d-orig-proto", "HTTP/1.1").body(()).unwrap();
    let (status, headers, body) =
        world.get_http2(Via::Direct(Some(SessionProtocol::Http2)), Some(ELSEWHERE), request).await;
    assert_eq!(status, 200);
    assert_eq!(headers["l5d-orig-proto"], "HTTP/1.1");
    assert!(body.starts_with("HTTP/1.1 GET /x id=") && body.contains("proto=false"), "{body}");
}

#[tokio::test]
async fn native_http2_stays_http2() {
    let world = World::new(http_app().await).await;
    let request = Request::get("http://web.demo/x").body(()).unwrap();
    let (status, headers, body) =
        world.get_http2(Via::Direct(Some(SessionProtocol::Http2)), Some(ELSEWHERE), request).await;
    assert_eq!(status, 200);
    assert!(!headers.contains_key("l5d-orig-proto"));
    assert!(body.starts_with("HTTP/2.0 GET http://web.demo/x"), "{body}");
}

#[tokio::test]
async fn requests_are_judged_one_by_one_and_only_the_mesh_hears_why() {
    let world = World::new(http_app().await).await;
    let port = world.app.port();
    world.policies.publish(port, detecting(vec![authz("web", only(&[CLIENT]))]));
    assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, 200);
    let (status, headers, body) = world.get(Via::Plain, Some(ELSEWHERE), "/").await;
    assert_eq!((status, body.as_str()), (StatusCode::FORBIDDEN, ""));
    assert!(!headers.contains_key("l5d-proxy-error"));
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/healthz").await.0, 200, "a probe");
    assert_eq!(world.get(Via::Plain, None, "/").await.0, 200, "the pod itself");

    world.policies.publish(port, detecting(vec![authz("other", only(&["other.demo"]))]));
    let (status, headers, _) = world.get(Via::Tls, Some(ELSEWHERE), "/").await;
    assert_eq!(status, 403);
    assert_eq!(headers["l5d-proxy-error"], "unauthorized request on route");
    let call =
        Request::post("http://web.demo/echo.Echo/Say").header("content-type", "application/grpc").body(()).unwrap();
    for (via, is_told) in [(Via::Direct(Some(SessionProtocol::Http2)), true), (Via::Plain, false)] {
        let (status, headers, _) = world.get_http2(via, Some(ELSEWHERE), call.clone()).await;
        assert_eq!((status, headers["grpc-status"].to_str().unwrap()), (StatusCode::OK, "7"));
        assert_eq!(headers.contains_key("grpc-message"), is_told, "{headers:?}");
    }
}

#[tokio::test]
async fn a_request_that_no_route_takes_is_not_found() {
    let world = World::new(http_app().await).await;
    let mut server = detecting(vec![authz("all", anybody())]);
    let kind = server.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut());
    if let Some(weft_proto::linkerd::inbound::proxy_protocol::Kind::Detect(detect)) = kind {
        detect.http_routes.remove(0);
    }
    world.policies.publish(world.app.port(), server);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/healthz").await.0, 200);
    assert_eq!(world.get(Via::Plain, Some(ELSEWHERE), "/other").await.0, 404);
}

#[tokio::test]
async fn upgrades_become_tunnels_in_both_ways_of_arriving() {
    let world = World::new(http_app().await).await;
    for via in [Via::Plain, Via::Tls, Via::Direct(Some(SessionProtocol::Http1))] {
        let mut stream = world.tunnel(via).await;
        stream.write_all(b"abcd").await.unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"dcba");
    }
}

#[tokio::test]
async fn connections_to_the_application_are_kept_and_replaced_when_it_closed_them() {
    let world = World::new(http_app().await).await;
    for _ in 0..3 {
        let (_, _, body) = world.get(Via::Plain, None, "/").await;
        assert!(body.ends_with("connection=1"), "{body}");
    }

    // This application closes every connection after one answer without announcing it.
    let closing = serve_each(|mut stream| async move {
        let mut bytes = [0; 1024];
        let _ = stream.read(&mut bytes).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    });
    let world = World::new(closing.await).await;
    for _ in 0..5 {
        let (status, _, body) = world.get(Via::Plain, None, "/").await;
        assert_eq!((status, body.as_str()), (StatusCode::OK, "ok"));
    }
}

#[tokio::test]
async fn an_application_that_does_not_listen_is_a_bad_gateway() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let world = World::new(gone.local_addr().unwrap()).await;
    drop(gone);
    let (status, headers, _) = world.get(Via::Tls, Some(ELSEWHERE), "/").await;
    assert_eq!(status, 502);
    assert!(headers["l5d-proxy-error"].to_str().unwrap().contains("connect to"));
    assert_eq!(headers["connection"], "close");
}

#[tokio::test]
async fn bytes_are_forwarded_when_nobody_speaks_http() {
    let world = World::new(banner_app().await).await;
    // An opaque port, then silence inside TLS on a detected port, then a transport header without HTTP.
    for (via, is_opaque) in
        [(Via::Plain, true), (Via::Tls, false), (Via::Direct(None), true), (Via::Direct(None), false)]
    {
        let all = vec![authz("all", anybody())];
        world.policies.publish(world.app.port(), if is_opaque { opaque(all) } else { detecting_soon(all) });
        let mut stream = world.connect(via, Some(ELSEWHERE)).await;
        expect_banner(&mut stream).await;
        stream.write_all(b"echo").await.unwrap();
        let mut echo = [0; 4];
        stream.read_exact(&mut echo).await.unwrap();
        assert_eq!(&echo, b"echo");
    }
}

#[tokio::test]
async fn a_client_that_waits_for_the_server_needs_an_opaque_port() {
    let world = World::new(banner_app().await).await;
    world.policies.publish(world.app.port(), detecting_soon(vec![authz("all", anybody())]));
    expect_closed(&mut world.connect(Via::Plain, Some(ELSEWHERE)).await).await;
    let mut speaks = world.connect(Via::Plain, Some(ELSEWHERE)).await;
    speaks.write_all(b"not HTTP, and long enough to tell").await.unwrap();
    expect_banner(&mut speaks).await;
}

/// A detected port with a short timeout.
fn detecting_soon(authorizations: Vec<weft_proto::linkerd::inbound::Authz>) -> weft_proto::linkerd::inbound::Server {
    let mut server = detecting(authorizations);
    let kind = server.protocol.as_mut().and_then(|protocol| protocol.kind.as_mut());
    if let Some(weft_proto::linkerd::inbound::proxy_protocol::Kind::Detect(detect)) = kind {
        detect.timeout = None;
    }
    server
}

#[tokio::test]
async fn a_denied_connection_is_closed_without_a_byte() {
    let world = World::new(banner_app().await).await;
    world.policies.publish(world.app.port(), opaque(vec![authz("other", only(&["other.demo"]))]));
    for via in [Via::Plain, Via::Direct(None)] {
        expect_closed(&mut world.connect(via, Some(ELSEWHERE)).await).await;
    }
    expect_banner(&mut world.connect(Via::Plain, None).await).await;
}

#[tokio::test]
async fn a_connection_ends_when_policy_no_longer_allows_it_and_goes_on_when_it_does() {
    let world = World::new(banner_app().await).await;
    let port = world.app.port();
    world.policies.publish(port, opaque(vec![authz("a", only(&[CLIENT]))]));
    let mut stream = world.connect(Via::Direct(None), Some(ELSEWHERE)).await;
    expect_banner(&mut stream).await;
    world.policies.publish(port, opaque(vec![authz("b", anybody())]));
    stream.write_all(b"still").await.unwrap();
    let mut echo = [0; 5];
    stream.read_exact(&mut echo).await.unwrap();
    world.policies.publish(port, opaque(Vec::new()));
    expect_closed(&mut stream).await;
}

#[tokio::test]
async fn tls_for_others_passes_through_untouched() {
    let world = World::new(banner_app().await).await;
    let mut stream = world.raw(Some(ELSEWHERE), world.app).await;
    let hello = world.hello("somebody.else");
    stream.write_all(&hello).await.unwrap();
    let mut banner = [0; 5];
    stream.read_exact(&mut banner).await.unwrap();
    assert_eq!(&banner, b"hello");
    let mut echo = vec![0; hello.len()];
    stream.read_exact(&mut echo).await.unwrap();
    assert!(echo == hello);
}

#[tokio::test]
async fn the_own_port_is_for_meshed_proxies_with_a_header_alone() {
    let world = World::new(banner_app().await).await;
    let own = SocketAddr::new(world.app.ip(), world.registry.config.inbound.listen.port());
    let mut plain = world.raw(Some(ELSEWHERE), own).await;
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    expect_closed(&mut (Box::new(plain) as Box<dyn Duplex>)).await;

    let name = || rustls::pki_types::ServerName::try_from(OWN).unwrap();
    let config = world.mesh.credentials(CLIENT).client_config(&OWN.parse().unwrap(), &[]);
    let stream = world.raw(Some(ELSEWHERE), own).await;
    let without_alpn = TlsConnector::from(config).connect(name(), stream).await.unwrap();
    expect_closed(&mut (Box::new(without_alpn) as Box<dyn Duplex>)).await;

    for (header_name, port) in [(Some("web.demo"), world.app.port()), (None, own.port())] {
        let mut stream = world.direct(header_name, port, None).await;
        expect_closed(&mut stream).await;
    }
}

#[tokio::test]
async fn a_foreign_address_is_refused() {
    let mut world = World::new(banner_app().await).await;
    let mut settings = config();
    settings.inbound.ips = vec!["10.0.0.7".parse().unwrap()];
    let (shared, _drain) = shared(settings, &world.mesh);
    world.inbound = Arc::new(Inbound::new(Arc::clone(&shared), world.policies.clone()));
    let stream = world.raw(Some(ELSEWHERE), world.app).await;
    expect_closed(&mut (Box::new(stream) as Box<dyn Duplex>)).await;
}

#[tokio::test]
async fn a_drain_waits_for_the_answer_and_ends_idle_connections() {
    let mut world = World::new(http_app().await).await;
    let mut idle = world.connect(Via::Plain, None).await;
    idle.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut first = [0; 12];
    idle.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    let drained = world.drain.take().unwrap().drain(Duration::from_secs(5)).await;
    assert!(drained);
}

#[tokio::test]
async fn connections_and_requests_are_counted_under_linkerds_names() {
    let mesh = Mesh::new();
    let mut registry = prometheus_client::registry::Registry::default();
    let metrics = crate::metrics::ProxyMetrics::register(&mut registry);
    let mut world = World::new(http_app().await).await;
    let (with_registry, _drain) = shared(config(), &mesh);
    let mut with_registry = Arc::into_inner(with_registry).unwrap();
    with_registry.metrics = metrics;
    world.mesh = mesh;
    world.registry = Arc::new(with_registry);
    world.inbound = Arc::new(Inbound::new(Arc::clone(&world.registry), world.policies.clone()));
    world.policies.publish(world.app.port(), detecting(vec![authz("web", only(&[CLIENT]))]));
    world.get(Via::Direct(Some(SessionProtocol::Http1)), Some(ELSEWHERE), "/").await;
    world.get(Via::Plain, Some(ELSEWHERE), "/").await;
    // A header's content, which the client chooses, must not become a label.
    expect_closed(&mut world.direct(Some("chosen-by-the-client"), world.app.port(), None).await).await;

    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let client = format!(r#"client_id="{CLIENT}""#);
    let src = r#"direction="inbound",peer="src""#;
    assert!(!text.contains("chosen-by-the-client"), "{text}");
    for (name, labels, expected) in [
        ("tcp_open_total", &[src, r#"tls="true""#, &client][..], 1),
        ("tcp_open_total", &[src, r#"no_tls_reason="no_tls_from_remote""#], 1),
        ("tcp_open_total", &[r#"direction="inbound",peer="dst""#], 1),
        ("request_total", &[r#"direction="inbound""#, &client, r#"srv_name="web""#, r#"route_name="default""#], 1),
        ("response_total", &[r#"classification="success""#, r#"status_code="200""#, &client], 1),
        ("inbound_http_authz_allow_total", &[r#"authz_name="web""#, &client], 1),
        ("inbound_http_authz_deny_total", &[r#"tls="no_identity""#], 1),
        ("inbound_http_errors_total", &[], 0),
        ("inbound_tcp_transport_header_connections_total", &[r#"session_protocol="http/1""#, &client], 1),
    ] {
        assert_eq!(world.counted(&text, name, labels), expected, "{name} {labels:?} in\n{text}");
    }
}
