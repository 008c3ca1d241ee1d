//! Two clusters: a client's proxy, a gateway's, and the Services behind it, which may have a third.

use super::{raw::read_head, *};
use crate::policy::{
    Policies,
    testing::{authz, detecting, only, opaque},
};
use weft_proto::linkerd::destination::{AuthorityOverride, WeightedAddr, WeightedDst};

const GATEWAY: &str = "gateway.linkerd-multicluster.serviceaccount.identity.linkerd.cluster.local";
/// The Service's name in the gateway's cluster.
pub(super) const REMOTE: &str = "web.demo.svc.cluster.local";

pub(super) struct Clusters {
    pub(super) client: Proxy,
    gateway: Arc<Shared>,
    outbound: Outbound,
    /// Policy of the gateway's own port.
    policies: Policies,
    /// The control plane of the gateway's cluster.
    control: Control,
    /// Where clients reach the gateway.
    pub(super) port: u16,
    identity: &'static str,
}

impl Clusters {
    async fn start() -> Self {
        Self::with_identity(GATEWAY).await
    }

    async fn with_identity(identity: &'static str) -> Self {
        Self::with(identity, |_| {}).await
    }

    async fn with(identity: &'static str, change: impl FnOnce(&mut Config)) -> Self {
        let here = Control::default();
        let service = "10.1.3.1:80".parse().unwrap();
        here.policies.lock().insert(service, policy(SERVICE, vec![]));
        Self::of(Proxy::start(service, here).await, identity, change).await
    }

    /// A client whose requests the gateway may serve.
    pub(super) async fn behind(client: Proxy, change: impl FnOnce(&mut Config)) -> Self {
        Self::of(client, GATEWAY, change).await
    }

    async fn of(client: Proxy, identity: &'static str, change: impl FnOnce(&mut Config)) -> Self {
        let control = Control::default();
        let mut config = testing::config();
        let controller = control.serve().await;
        config.destination.control.port = controller.port();
        config.policy.control.port = controller.port();
        config.outbound.allow_loopback = true;
        wait_for_endpoints(&mut config, Duration::from_secs(60));
        config.inbound.gateway_suffixes = vec![crate::destination::Suffix::parse("svc.cluster.local.").unwrap()];
        config.identity.local_name = identity.parse().unwrap();
        config.identity.server_name = identity.into();
        change(&mut config);
        let (mut gateway, drain) = testing::shared(config, &client.mesh);
        std::mem::forget(drain);
        Arc::get_mut(&mut gateway).unwrap().credentials = watch::channel(Some(client.mesh.credentials(identity))).1;
        let outbound = fake::outbound(&gateway);
        let (port, policies) = testing::serve_gateway(Arc::clone(&gateway), outbound.clone()).await;
        Self { client, gateway, outbound, policies, control, port, identity }
    }

    /// The gateway as the client's destination controller describes it, for a Service of its cluster.
    fn endpoint(&self, service: &str) -> WeightedAddr {
        let mut endpoint = endpoint(SocketAddr::from(([127, 0, 0, 1], self.port)), Some((self.identity, self.port)));
        endpoint.tls_identity.as_mut().unwrap().server_name = None;
        endpoint.protocol_hint.as_mut().unwrap().opaque_transport = None;
        endpoint.authority_override = Some(AuthorityOverride { authority_override: service.to_owned() });
        endpoint
    }

    /// Makes the client's Service one of the gateway's cluster.
    pub(super) fn mirror(&self, service: &str) {
        self.client.control.update(SERVICE, add(vec![self.endpoint(service)]));
    }

    /// A Service of the gateway's cluster.
    pub(super) fn serve(&self, service: &str, endpoint: WeightedAddr) {
        self.control.named.lock().insert(service.to_owned(), policy(service, vec![]));
        self.control.update(service, add(vec![endpoint]));
    }

    async fn grpc(&self) -> String {
        let request = Request::post("http://web.remote/echo.Echo/Say").header("content-type", "application/grpc");
        let response = self.client.http2().await.send_request(request.body(Full::default()).unwrap()).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        response.headers()["grpc-status"].to_str().unwrap().to_owned()
    }
}

/// An application of both HTTP versions that answers with the request that it received.
async fn mirror_app() -> SocketAddr {
    let service = service_fn(|request: Request<Incoming>| async move {
        let (head, body) = request.into_parts();
        let fields = head.headers.iter().map(|(name, value)| format!("{name}={}\n", value.to_str().unwrap()));
        let fields: String = fields.collect();
        let body = body.collect().await.unwrap().to_bytes();
        let seen = format!("{:?} {}\n{fields}body={}", head.version, head.uri, body.escape_ascii());
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(seen))))
    });
    serve_each(move |stream| async move {
        let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
        builder.serve_connection(TokioIo::new(stream), service).await
    })
    .await
}

fn forwarded() -> String {
    format!("forwarded=by={GATEWAY};for={};host={REMOTE};proto=https\n", testing::OWN)
}

#[tokio::test]
async fn a_control_plane_that_says_nothing_about_a_name_is_a_timeout() {
    let soon = |config: &mut Config| config.outbound.discovery_timeout = Duration::from_millis(100);
    let clusters = Clusters::with(GATEWAY, soon).await;
    clusters.control.instead(Call::Policy, [Instead::Silence; 100]);
    clusters.mirror(&format!("{REMOTE}:80"));
    assert_eq!(clusters.client.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(clusters.grpc().await, "4");
}

#[tokio::test]
async fn an_endpoint_of_this_pod_gets_requests_in_plaintext_under_their_own_name() {
    let app = mirror_app().await;
    let control = Control::default();
    let service = "10.1.3.9:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let mut endpoint = endpoint(app, Some((SERVER, app.port())));
    endpoint.authority_override = Some(AuthorityOverride { authority_override: format!("{REMOTE}:80") });
    control.update(SERVICE, add(vec![endpoint]));
    let local = |config: &mut Config| config.inbound.ips = vec![app.ip()];
    let proxy = Proxy::start_with(service, control, local, true).await;
    let seen = text(proxy.get("/a").await).await;
    assert!(seen.starts_with("HTTP/1.1 /a\n") && seen.contains("\nhost=server.demo\n"), "{seen}");
    let stream = TokioIo::new(proxy.connect().await);
    let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://server.demo/b").body(Empty::<Bytes>::new()).unwrap();
    let seen = text(sender.send_request(request).await.unwrap()).await;
    assert!(seen.starts_with("HTTP/2.0 http://server.demo/b\n"), "{seen}");
    assert!(proxy.scrape().contains(r#"no_tls_reason="loopback""#), "{}", proxy.scrape());
}

#[tokio::test]
async fn http1_reaches_a_meshed_service_of_another_cluster() {
    let clusters = Clusters::start().await;
    let (service, drain) = testing::shared(testing::config(), &clusters.client.mesh);
    std::mem::forget(drain);
    let proxy = testing::serve_direct(service).await;
    clusters.serve(&format!("{REMOTE}:80"), endpoint(mirror_app().await, Some((testing::OWN, proxy))));
    clusters.mirror(&format!("{REMOTE}:80"));
    for _ in 0..2 {
        let mut request = get("/path?query");
        *request.method_mut() = Method::POST;
        *request.body_mut() = Full::new(Bytes::from_static(b"some body"));
        let response = clusters.client.http1().await.send_request(request).await.unwrap();
        assert_eq!((response.status(), response.version()), (StatusCode::OK, Version::HTTP_11));
        assert!(response.headers().keys().all(|name| !name.as_str().starts_with("l5d-")), "{:?}", response.headers());
        let seen = text(response).await;
        assert!(seen.starts_with("HTTP/1.1 /path?query\n") && seen.ends_with("body=some body"), "{seen}");
        assert!(seen.contains(&format!("\nhost={REMOTE}\n")), "{seen}");
        assert!(seen.contains(&forwarded()), "{seen}");
        assert!(seen.contains(&format!("\nl5d-client-id={GATEWAY}\n")), "{seen}");
        assert!(!seen.contains("server.demo") && !seen.contains("l5d-dst-canonical"), "{seen}");
    }
    let metrics = fake::scrape(&clusters.gateway);
    let counted =
        format!(r#"session_protocol="http/2",target_port="80",target_name="{REMOTE}",client_id="{}""#, testing::OWN);
    assert!(metrics.contains(&format!("inbound_tcp_transport_header_connections_total{{{counted}}} 1")), "{metrics}");
    let requests = |direction: &str, tls: &str| {
        let counts =
            |line: &&str| line.starts_with(&format!(r#"request_total{{direction="{direction}""#)) && line.contains(tls);
        metrics.lines().filter(counts).filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum::<u64>()
    };
    assert_eq!(requests("inbound", &format!(r#"client_id="{}""#, testing::OWN)), 2);
    assert_eq!(requests("outbound", &format!(r#"server_id="{}""#, testing::OWN)), 2);
}

#[tokio::test]
async fn http2_keeps_its_version_and_gets_the_name() {
    let clusters = Clusters::start().await;
    clusters.serve(&format!("{REMOTE}:8080"), endpoint(mirror_app().await, None));
    clusters.mirror(&format!("{REMOTE}:8080"));
    let request = Request::get("http://web.remote/a?b").header("forwarded", "by=other").body(Full::default()).unwrap();
    let response = clusters.client.http2().await.send_request(request).await.unwrap();
    let seen = text(response).await;
    assert!(seen.starts_with(&format!("HTTP/2.0 http://{REMOTE}:8080/a?b\n")), "{seen}");
    assert!(seen.contains("\nforwarded=by=other\n"), "{seen}");
    assert!(seen.contains(&format!("forwarded=by={GATEWAY};for={};host={REMOTE}:8080;proto=https\n", testing::OWN)));
}

#[tokio::test]
async fn the_canonical_name_of_a_service_stays_in_its_cluster() {
    let profile = DestinationProfile {
        fully_qualified_name: "web-remote.demo.svc.cluster.local".into(),
        dst_overrides: vec![WeightedDst { authority: SERVICE.into(), weight: 1, backend_ref: None }],
        ..Default::default()
    };
    for is_remote in [true, false] {
        let clusters = Clusters::start().await;
        clusters.client.control.profiles.lock().insert("10.1.3.1:80".into(), profile.clone());
        // The gateway takes it off anyway, so what reaches its proxy is looked at.
        let (peer, port) = Peer::listen(&clusters.client.mesh.credentials(GATEWAY)).await;
        let mut gateway = clusters.endpoint(&format!("{REMOTE}:80"));
        gateway.addr = Some(SocketAddr::from(([127, 0, 0, 1], port)).into());
        let local = endpoint("127.0.0.1:8080".parse().unwrap(), Some((GATEWAY, port)));
        clusters.client.control.update(SERVICE, add(vec![if is_remote { gateway } else { local }]));
        tokio::spawn(async move {
            let (_, stream) = peer.accept().await;
            let service = service_fn(|request: Request<Incoming>| async move {
                let canonical =
                    request.headers().get("l5d-dst-canonical").map(|name| name.to_str().unwrap().to_owned());
                let seen = format!("{} {}", request.uri(), canonical.unwrap_or_default());
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(seen))))
            });
            http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await.unwrap();
        });
        let expected = match is_remote {
            true => format!("http://{REMOTE}:80/ "),
            false => "http://server.demo/ web-remote.demo.svc.cluster.local:80".to_owned(),
        };
        assert_eq!(text(clusters.client.get("/").await).await, expected);
    }
}

#[tokio::test]
async fn a_request_that_no_gateway_saw_keeps_its_own_name() {
    let clusters = Clusters::start().await;
    let mut dead = clusters.endpoint(&format!("{REMOTE}:80"));
    dead.addr = Some(unused_addr().into());
    let local = mirror_app().await;
    clusters.client.control.update(SERVICE, add(vec![dead, endpoint(local, None)]));
    for _ in 0..10 {
        let seen = text(clusters.client.get("/").await).await;
        assert!(seen.starts_with("HTTP/1.1 /\n") && seen.contains("\nhost=server.demo\n"), "{seen}");
    }
}

#[tokio::test]
async fn bytes_reach_a_service_of_another_cluster() {
    let clusters = Clusters::start().await;
    let database = serve_each(|mut stream| async move {
        let mut received = [0; 34];
        stream.read_exact(&mut received).await.unwrap();
        stream.write_all(&received).await.unwrap();
        let _ = stream.read(&mut received).await;
    });
    clusters.serve(&format!("{REMOTE}:5432"), endpoint(database.await, None));
    clusters.mirror(&format!("{REMOTE}:5432"));
    let sent = b"\0\x01\x02 binary and longer than a head.";
    let mut client = clusters.client.connect().await;
    client.write_all(sent).await.unwrap();
    let mut received = [0; 34];
    client.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, sent);
    // The policy of the gateway's own port admits connections, and may end them.
    clusters.policies.publish(4143, opaque(vec![]));
    let ended = tokio::time::timeout(Duration::from_secs(5), client.read(&mut received)).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))), "{ended:?}");
    let mut denied = clusters.client.connect().await;
    denied.write_all(sent).await.unwrap();
    assert!(matches!(denied.read(&mut received).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn names_that_are_unknown_or_of_others_are_not_found() {
    for (name, is_looked_up, target) in [
        ("web.demo.svc.other.local:80", 0, "other"),
        ("gone.demo.svc.cluster.local:80", 1, "gone.demo.svc.cluster.local"),
    ] {
        let clusters = Clusters::start().await;
        clusters.mirror(name);
        let response = clusters.client.get("/").await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{name}");
        assert_eq!(clusters.grpc().await, "5");
        let Outbound(worker) = &clusters.outbound;
        assert_eq!(worker.known_names(), is_looked_up);
        let mut bytes = clusters.client.connect().await;
        bytes.write_all(b"\0\x01\x02 binary and longer than a head.").await.unwrap();
        assert!(matches!(bytes.read(&mut [0; 1]).await, Ok(0) | Err(_)), "{name}");
        let metrics = fake::scrape(&clusters.gateway);
        assert!(
            metrics.contains(&format!(r#"target_name="{target}""#)) && !metrics.contains("other.local"),
            "{metrics}"
        );
    }
}

#[tokio::test]
async fn clients_that_policy_denies_learn_nothing_about_names() {
    let clusters = Clusters::start().await;
    clusters.mirror(&format!("{REMOTE}:80"));
    clusters.policies.publish(4143, detecting(vec![authz("other", only(&["other.demo"]))]));
    let response = clusters.client.get("/").await;
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    let Outbound(worker) = &clusters.outbound;
    assert_eq!(worker.known_names(), 0);
}

#[tokio::test]
async fn a_request_that_comes_back_is_refused() {
    let clusters = Clusters::start().await;
    clusters.serve(&format!("{REMOTE}:80"), endpoint(mirror_app().await, None));
    clusters.mirror(&format!("{REMOTE}:80"));
    let mut request = get("/");
    request.headers_mut().insert("forwarded", format!("by=x;for=y, by={GATEWAY};for=z").parse().unwrap());
    let response = clusters.client.http1().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::LOOP_DETECTED);
    assert_eq!(clusters.client.get("/").await.status(), StatusCode::OK);
    let metrics = fake::scrape(&clusters.gateway);
    assert!(metrics.contains(r#"inbound_http_errors_total{error="gateway loop""#), "{metrics}");
}

#[tokio::test]
async fn a_gateway_is_not_its_own_client() {
    let clusters = Clusters::with_identity(testing::OWN).await;
    clusters.serve(&format!("{REMOTE}:80"), endpoint(mirror_app().await, None));
    clusters.mirror(&format!("{REMOTE}:80"));
    assert_eq!(clusters.client.get("/").await.status(), StatusCode::LOOP_DETECTED);
    assert_eq!(clusters.grpc().await, "10");
    let mut bytes = clusters.client.connect().await;
    bytes.write_all(b"\0\x01\x02 binary and longer than a head.").await.unwrap();
    assert!(matches!(bytes.read(&mut [0; 1]).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn connect_passes_a_gateway() {
    let clusters = Clusters::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    clusters.serve(&format!("{REMOTE}:80"), endpoint(listener.local_addr().unwrap(), None));
    clusters.mirror(&format!("{REMOTE}:80"));
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\npong").await.unwrap();
        head
    });
    let mut client = clusters.client.connect().await;
    client.write_all(b"CONNECT web.remote:443 HTTP/1.1\r\nhost: web.remote:443\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    let (answer, head) = (String::from_utf8(answer).unwrap(), server.await.unwrap());
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\npong"), "{answer}");
    assert!(head.starts_with(&format!("CONNECT {REMOTE}")), "{head}");
}

#[tokio::test]
async fn websockets_pass_a_gateway() {
    let clusters = Clusters::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    clusters.serve(&format!("{REMOTE}:80"), endpoint(listener.local_addr().unwrap(), None));
    clusters.mirror(&format!("{REMOTE}:80"));
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_head(&mut stream).await.unwrap();
        let answer = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(answer).await.unwrap();
        let mut received = [0; 4];
        stream.read_exact(&mut received).await.unwrap();
        stream.write_all(&received).await.unwrap();
    });
    let mut request = get("/ws");
    request.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    request.headers_mut().insert("upgrade", "websocket".parse().unwrap());
    let mut response = clusters.client.http1().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut response).await.unwrap());
    stream.write_all(b"ping").await.unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"ping");
}

#[tokio::test]
async fn a_gateways_header_has_host_and_port_of_the_service() {
    let control = Control::default();
    let service = "10.1.3.1:80".parse().unwrap();
    control.policies.lock().insert(service, policy(SERVICE, vec![]));
    let clusters = Clusters::behind(Proxy::start_with(service, control, fails_fast, true).await, |_| {}).await;
    let (peer, port) = Peer::listen(&clusters.client.mesh.credentials(GATEWAY)).await;
    for transport_port in [None, Some(port)] {
        let mut gateway = clusters.endpoint(&format!("{REMOTE}:8080"));
        gateway.addr = Some(SocketAddr::from(([127, 0, 0, 1], port)).into());
        gateway.protocol_hint.as_mut().unwrap().opaque_transport =
            transport_port.map(|port| protocol_hint::OpaqueTransport { inbound_port: u32::from(port) });
        clusters.client.control.update(SERVICE, add(vec![gateway]));
        let addr = clusters.client.addr;
        let asking = tokio::spawn(async move {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nhost: web.remote\r\n\r\n").await.unwrap();
            let _ = stream.read(&mut [0; 1]).await;
        });
        let (header, stream) = peer.accept().await;
        assert_eq!((header.name.as_deref(), header.port.get()), (Some(REMOTE), 8080));
        assert_eq!(header.protocol, Some(SessionProtocol::Http2));
        drop(stream);
        asking.await.unwrap();
    }
}
