//! Clients of a service with several replicas, with real DNS, mutual TLS and HTTP/2.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_rustls::TlsAcceptor;
use tower::Service as _;
use weft_proto::linkerd::inbound::{PortSpec, inbound_server_policies_client::InboundServerPoliciesClient};

use super::{
    metrics::{ControlMetrics, Service},
    *,
};
use crate::{
    config::DnsConfig,
    dns::testing::DnsServer,
    inbound::testing::Mesh,
    metrics::{Counters, label},
};

const OWN: &str = "web.demo.serviceaccount.identity.linkerd.cluster.local";
const POLICY: &str = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local";
const DEADLINE: Duration = Duration::from_secs(30);

/// How a replica answers.
#[derive(Clone, Copy, PartialEq)]
enum Behaviour {
    /// With a stream that stays open.
    Stream,
    /// With one message, and a stream that stays open.
    Message,
    /// At once, with this gRPC status.
    Status(&'static str),
    /// It accepts connections and sends nothing.
    Silent,
    /// It accepts requests and answers none, as behind a sidecar while the controller starts.
    Hung,
}

struct Replica {
    port: u16,
    asked: Arc<AtomicUsize>,
    connections: JoinSet<()>,
}

impl Replica {
    async fn start(mesh: &Mesh, identity: &str, behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&asked);
        let acceptor = TlsAcceptor::from(mesh.credentials(identity).server_config(&[]));
        let mut connections = JoinSet::new();
        connections.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, counted) = (acceptor.clone(), Arc::clone(&counted));
                open.spawn(async move {
                    if behaviour == Behaviour::Silent {
                        return std::future::pending().await;
                    }
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = service_fn(|_| {
                        counted.fetch_add(1, Ordering::Relaxed);
                        async move {
                            if behaviour == Behaviour::Hung {
                                return std::future::pending().await;
                            }
                            Ok::<_, Infallible>(respond(behaviour))
                        }
                    });
                    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    // An error means that the client is gone.
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { port, asked, connections }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    /// Closes its listener and all of its connections.
    async fn kill(&mut self) {
        self.connections.shutdown().await;
    }
}

fn respond(behaviour: Behaviour) -> Response<BoxBody<Bytes, Infallible>> {
    let response = Response::builder().header("content-type", "application/grpc");
    match behaviour {
        Behaviour::Status(status) => response.header("grpc-status", status).body(Full::default().boxed()),
        Behaviour::Message => {
            // An empty message of gRPC: not compressed, no bytes.
            let message = Ok(http_body::Frame::data(Bytes::from_static(&[0; 5])));
            let frames = futures::stream::once(std::future::ready(message));
            response.body(StreamBody::new(futures::StreamExt::chain(frames, futures::stream::pending())).boxed())
        }
        Behaviour::Stream | Behaviour::Silent | Behaviour::Hung => {
            response.body(StreamBody::new(futures::stream::pending()).boxed())
        }
    }
    .unwrap()
}

struct World {
    mesh: Mesh,
    dns: DnsServer,
    metrics: ControlMetrics,
    addr: ControlAddr,
    client: ControlClient,
}

impl World {
    async fn new() -> Self {
        Self::with(StreamLimits::default()).await
    }

    async fn with(limits: StreamLimits) -> Self {
        Self::measured(limits, ControlMetrics::default()).await
    }

    async fn measured(limits: StreamLimits, metrics: ControlMetrics) -> Self {
        let (mesh, dns) = (Mesh::new(), DnsServer::start().await);
        let addr = ControlAddr { host: "policy.test.".to_owned(), port: 8090, identity: Some(POLICY.parse().unwrap()) };
        let (_, credentials) = watch::channel(Some(mesh.credentials(OWN)));
        let client = ControlClient::measured(
            addr.clone(),
            Trust::Credentials(credentials),
            dns.resolver(Counters::default(), DnsConfig::default()),
            limits,
            metrics.service(Service::Policy, &addr),
        );
        Self { mesh, dns, metrics, addr, client }
    }

    async fn replicas(&self, count: usize) -> Vec<Replica> {
        let mut replicas = Vec::new();
        for _ in 0..count {
            replicas.push(Replica::start(&self.mesh, POLICY, Behaviour::Stream).await);
        }
        replicas
    }

    fn publish(&self, ttl: u32, replicas: &[&Replica]) {
        let ports: Vec<u16> = replicas.iter().map(|replica| replica.port).collect();
        self.dns.set_srv("policy.test.", ttl, &ports);
    }

    async fn send(&self) -> Result<Response<ResponseBody>, ControlError> {
        let request = Request::post("/policy/Watch").body(tonic::body::Body::empty()).unwrap();
        tokio::time::timeout(DEADLINE, self.client.clone().call(request)).await.expect("a request ends")
    }
}

#[tokio::test]
async fn a_certificate_that_has_expired_is_not_shown_to_the_service_that_issues_the_next_one() {
    let mesh = Mesh::new();
    let (certified, credentials) = watch::channel(None);
    let addr = ControlAddr { host: "identity.test".into(), port: 8080, identity: Some(POLICY.parse().unwrap()) };
    let connector = Connector::new(addr, Trust::Bootstrap(mesh.anchors().clone(), credentials), None);
    let acceptor = TlsAcceptor::from(mesh.credentials(POLICY).server_config(&[]));
    let is_accepted_with_certificate = async || {
        let (client, server) = tokio::io::duplex(64 << 10);
        let (tls, name) = connector.tls().await.unwrap().expect("it is not on loopback");
        let (client, server) = tokio::join!(tls.connect(name, client), acceptor.accept(server));
        client.unwrap();
        server.expect("the server accepts the client").get_ref().1.peer_certificates().is_some()
    };
    assert!(!is_accepted_with_certificate().await, "there is none yet");
    certified.send_replace(Some(mesh.credentials(OWN)));
    assert!(is_accepted_with_certificate().await);
    certified.send_replace(Some(mesh.expired(OWN).await));
    assert!(!is_accepted_with_certificate().await, "it would be refused");
}

#[tokio::test]
async fn streams_are_spread_over_all_replicas() {
    let world = World::new().await;
    let replicas = world.replicas(3).await;
    world.publish(60, &replicas.iter().collect::<Vec<_>>());
    let mut streams = Vec::new();
    for _ in 0..30 {
        streams.push(world.send().await.unwrap());
    }
    let asked: Vec<usize> = replicas.iter().map(Replica::asked).collect();
    assert_eq!(asked.iter().sum::<usize>(), 30);
    assert!(asked.iter().all(|asked| (7..=13).contains(asked)), "{asked:?}");
    let service = world.metrics.service(Service::Policy, &world.addr);
    assert_eq!((service.ready.get(), service.pending.get(), service.p2c_endpoints.get()), (3, 0, 3));
    assert_eq!((service.requests.get(), service.p2c_resets.get()), (30, 1));
}

#[tokio::test]
async fn a_replica_that_dies_is_replaced_at_once() {
    let world = World::new().await;
    let mut replicas = world.replicas(2).await;
    world.publish(60, &replicas.iter().collect::<Vec<_>>());
    let mut streams = Vec::new();
    for _ in 0..10 {
        streams.push(world.send().await.unwrap());
    }
    let mut dead = replicas.remove(0);
    assert!(dead.asked() > 0);
    dead.kill().await;
    let before = replicas[0].asked();
    for _ in 0..10 {
        streams.push(world.send().await.expect("the other replica answers"));
    }
    assert_eq!(replicas[0].asked(), before + 10);
}

#[tokio::test]
async fn a_replica_that_is_silent_or_another_service_wedges_nobody() {
    let world = World::new().await;
    let silent = Replica::start(&world.mesh, POLICY, Behaviour::Silent).await;
    let wrong = Replica::start(&world.mesh, "other.linkerd", Behaviour::Stream).await;
    let right = Replica::start(&world.mesh, POLICY, Behaviour::Stream).await;
    world.publish(60, &[&silent, &wrong, &right]);
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.push(world.send().await.expect("one replica answers"));
    }
    assert_eq!((silent.asked(), wrong.asked(), right.asked()), (0, 0, 20));
    assert!(world.metrics.service(Service::Policy, &world.addr).pending.get() >= 1);

    let world = World::new().await;
    let wrong = Replica::start(&world.mesh, "other.linkerd", Behaviour::Stream).await;
    world.publish(60, &[&wrong]);
    let error = world.send().await.err().expect("no replica is the service");
    assert!(matches!(error, ControlError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn a_replica_that_answers_no_request_is_avoided_while_another_one_does() {
    let world = World::with(StreamLimits { initial: Some(Duration::from_secs(3)), ..StreamLimits::default() }).await;
    let hung = Replica::start(&world.mesh, POLICY, Behaviour::Hung).await;
    let up = Replica::start(&world.mesh, POLICY, Behaviour::Stream).await;
    world.publish(60, &[&hung, &up]);
    let mut client = InboundServerPoliciesClient::new(world.client.clone());
    let mut streams = Vec::new();
    for _ in 0..10 {
        streams.extend(world.client.open(client.watch_port(PortSpec::default())).await.ok());
    }
    // It has no open stream, so that it would be picked each time.
    assert_eq!((hung.asked(), streams.len()), (1, 9));
    // One that answers without a message, as about a Service without endpoints, is as good as any.
    drop(streams);
    assert_eq!(up.asked(), 9);
    assert!(world.client.open(client.watch_port(PortSpec::default())).await.is_ok());
    assert_eq!((hung.asked(), up.asked()), (1, 10));
}

#[tokio::test]
async fn streams_that_are_silent_or_too_old_are_given_up() {
    let short = Some(Duration::from_millis(100));
    let none = StreamLimits::default();
    for (behaviour, limits, messages) in [
        (Behaviour::Stream, StreamLimits { initial: short, ..none }, 0),
        (Behaviour::Stream, StreamLimits { lifetime: short, ..none }, 0),
        (Behaviour::Message, StreamLimits { idle: short, ..none }, 1),
        (Behaviour::Message, StreamLimits { lifetime: short, ..none }, 1),
    ] {
        let world = World::with(limits).await;
        let replica = Replica::start(&world.mesh, POLICY, behaviour).await;
        world.publish(60, &[&replica]);
        let mut client = InboundServerPoliciesClient::new(world.client.clone());
        let received = AtomicUsize::new(0);
        let mut pauses = Pauses::new();
        let followed = world.client.read(client.watch_port(PortSpec::default()), &mut pauses, |_| {
            received.fetch_add(1, Ordering::Relaxed);
        });
        let ended = tokio::time::timeout(DEADLINE, followed).await.expect("the stream is given up");
        assert_eq!(ended.code(), tonic::Code::DeadlineExceeded, "{limits:?}");
        // A stream may be too old before its first message on a busy machine; an idle one is not idle before it.
        let received = received.into_inner();
        assert!(received == messages || limits.lifetime.is_some(), "{limits:?}: {received}");
    }
}

#[tokio::test]
async fn a_replica_that_says_it_is_unavailable_rests() {
    let world = World::new().await;
    let down = Replica::start(&world.mesh, POLICY, Behaviour::Status("14")).await;
    let up = Replica::start(&world.mesh, POLICY, Behaviour::Status("0")).await;
    world.publish(60, &[&down, &up]);
    for _ in 0..40 {
        let response = world.send().await.unwrap();
        drop(response.into_body().collect().await.unwrap());
    }
    assert!(down.asked() < up.asked(), "{} {}", down.asked(), up.asked());
    let responses = |classification: &'static str, code: &'static str| {
        let labels = vec![
            label("addr", "policy.test:8090"),
            label("tls", "true"),
            label("server_id", POLICY),
            label("status_code", "200"),
            label("classification", classification),
            label("grpc_status", code),
        ];
        world.metrics.responses().get_or_create(&labels).get()
    };
    let (failed, succeeded) = (responses("failure", "14"), responses("success", "0"));
    assert_eq!((failed, succeeded), (down.asked() as u64, up.asked() as u64));
}

#[tokio::test]
async fn a_scrape_has_requests_responses_and_replicas_under_linkerds_names() {
    let mut registry = prometheus_client::registry::Registry::default();
    let metrics = ControlMetrics::register(&mut registry);
    let world = World::measured(StreamLimits::default(), metrics).await;
    let replicas = [
        Replica::start(&world.mesh, POLICY, Behaviour::Status("0")).await,
        Replica::start(&world.mesh, POLICY, Behaviour::Status("0")).await,
    ];
    world.publish(60, &replicas.each_ref());
    for _ in 0..3 {
        drop(world.send().await.unwrap().into_body().collect().await.unwrap());
    }
    let in_pod = ControlAddr { host: "localhost.".to_owned(), port: 8080, identity: None };
    let _identity = world.metrics.service(Service::Identity, &in_pod);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let addr = r#"addr="policy.test:8090""#;
    let client = format!(r#"{addr},tls="true",server_id="{POLICY}""#);
    for line in [
        format!("control_request_total{{{client}}} 3"),
        format!(r#"control_response_total{{{client},status_code="200",classification="success",grpc_status="0"}} 3"#),
        format!(r#"control_response_latency_ms_count{{{client},status_code="200"}} 3"#),
        format!(r#"control_policy_balancer_endpoints{{{addr},endpoint_state="ready"}} 2"#),
        format!(r#"control_policy_balancer_endpoints{{{addr},endpoint_state="pending"}} 0"#),
        format!("control_policy_balancer_p2c_endpoints{{{addr}}} 2"),
        format!(r#"control_policy_balancer_p2c_updates_total{{op="Reset",{addr}}} 1"#),
        r#"control_request_total{addr="localhost:8080",tls="no_identity",no_tls_reason="loopback"} 0"#.to_owned(),
        r#"control_identity_balancer_p2c_endpoints{addr="localhost:8080"} 0"#.to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn new_replicas_are_found_when_the_ttl_is_over() {
    let world = World::new().await;
    let replicas = world.replicas(2).await;
    world.publish(1, &[&replicas[0]]);
    let mut streams = vec![world.send().await.unwrap()];
    world.publish(1, &[&replicas[0], &replicas[1]]);
    let found = async {
        while replicas[1].asked() == 0 {
            streams.push(world.send().await.unwrap());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(DEADLINE, found).await.expect("the second replica is asked");
}

#[tokio::test]
async fn a_replica_that_is_replaced_keeps_no_request_whatever_its_ttl() {
    let world = World::new().await;
    // It takes connections and hangs, as an address does that no pod has any more.
    let gone = Replica::start(&world.mesh, POLICY, Behaviour::Silent).await;
    world.publish(3600, &[&gone]);
    let error = world.send().await.err().expect("nothing answers");
    assert!(matches!(error, ControlError::Connect { .. }), "{error}");

    // A request that waits for it goes to its successor.
    let successors = world.replicas(2).await;
    let (_stream, ()) = tokio::join!(async { world.send().await.expect("the successor answers") }, async {
        world.publish(3600, &[&successors[0]]);
    });
    assert_eq!(successors[0].asked(), 1);

    // A client in a long pause asks the successor at once.
    let World { client, .. } = &world;
    let mut successors = successors;
    successors[0].kill().await;
    world.send().await.err().expect("the successor is gone, too");
    world.publish(3600, &[&successors[1]]);
    let mut pauses = Pauses::between(Duration::from_millis(100), DEADLINE * 10);
    while pauses.next() < DEADLINE * 2 {}
    tokio::time::timeout(DEADLINE, client.pause(&mut pauses)).await.expect("the pause ends");
    let _stream = world.send().await.unwrap();
    assert_eq!(successors[1].asked(), 1);
}

#[tokio::test]
async fn requests_that_wait_for_the_same_connection_share_its_failure() {
    let world = World::new().await;
    let silent = Replica::start(&world.mesh, POLICY, Behaviour::Silent).await;
    world.publish(60, &[&silent]);
    // One after the other, they would need 40 s, and each has a deadline of 30 s.
    let requests = (0..20).map(|_| world.send());
    let answers = futures::future::join_all(requests).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(ControlError::Connect { .. }))));
}
