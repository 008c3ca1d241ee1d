//! A control plane and endpoints on loopback, as the outbound tests need them.

use std::{
    collections::HashMap,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status};
use weft_proto::linkerd::{
    destination::{
        DestinationProfile, GetDestination, ProtocolHint, TlsIdentity, Update, WeightedAddr, WeightedAddrSet,
        destination_server::{Destination, DestinationServer},
        protocol_hint,
        tls_identity::{DnsLikeIdentity, Strategy},
        update,
    },
    outbound::{
        self, OutboundPolicy, TrafficSpec,
        outbound_policies_server::{OutboundPolicies, OutboundPoliciesServer},
        traffic_spec,
    },
};
use weft_tls::credentials::Credentials;

use crate::{
    inbound::testing,
    outbound::Outbound,
    shared::Shared,
    transport_header::{ALPN, TransportHeader},
};

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The answers of the fake controllers; any other request gets NotFound or InvalidArgument, as for an unknown address.
#[derive(Clone, Default)]
pub(crate) struct Control {
    pub(crate) policies: Arc<Mutex<HashMap<SocketAddr, OutboundPolicy>>>,
    /// Policies of names with ports.
    pub(crate) named: Arc<Mutex<HashMap<String, OutboundPolicy>>>,
    pub(crate) profiles: Arc<Mutex<HashMap<String, DestinationProfile>>>,
    /// How many of the next policy requests get a stream without messages.
    pub(crate) silent: Arc<AtomicUsize>,
    endpoints: Arc<Mutex<HashMap<String, Service>>>,
}

#[derive(Default)]
struct Service {
    first: Vec<Update>,
    followers: Vec<mpsc::UnboundedSender<Result<Update, Status>>>,
}

impl Control {
    /// Serves on loopback and returns the address.
    pub(crate) async fn serve(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(DestinationServer::new(self.clone()))
            .add_service(OutboundPoliciesServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        addr
    }

    /// Sends an update to all present and future subscribers of a service.
    pub(crate) fn update(&self, path: &str, update: Update) {
        let mut endpoints = self.endpoints.lock();
        let service = endpoints.entry(path.to_owned()).or_default();
        service.followers.retain(|follower| follower.send(Ok(update.clone())).is_ok());
        service.first.push(update);
    }
}

/// An outbound side with the control plane of its settings.
pub(crate) fn outbound(shared: &Arc<Shared>) -> Outbound {
    Outbound::new(Arc::clone(shared), testing::discover(shared))
}

/// A proxy's metrics.
pub(crate) fn scrape(shared: &Shared) -> String {
    let mut registry = prometheus_client::registry::Registry::default();
    shared.metrics.register_in(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    text
}

#[tonic::async_trait]
impl Destination for Control {
    type GetStream = Streamed<Update>;
    type GetProfileStream = Streamed<DestinationProfile>;

    async fn get(&self, request: Request<GetDestination>) -> Result<Response<Self::GetStream>, Status> {
        let mut endpoints = self.endpoints.lock();
        let service = endpoints.entry(request.into_inner().path).or_default();
        let (tx, rx) = mpsc::unbounded_channel();
        for update in &service.first {
            let _ = tx.send(Ok(update.clone()));
        }
        service.followers.push(tx);
        Ok(Response::new(UnboundedReceiverStream::new(rx).boxed()))
    }

    async fn get_profile(&self, request: Request<GetDestination>) -> Result<Response<Self::GetProfileStream>, Status> {
        match self.profiles.lock().get(&request.into_inner().path) {
            Some(profile) => Ok(Response::new(stream::iter([Ok(profile.clone())]).chain(stream::pending()).boxed())),
            None => Err(Status::invalid_argument("no such destination")),
        }
    }
}

#[tonic::async_trait]
impl OutboundPolicies for Control {
    type WatchStream = Streamed<OutboundPolicy>;

    async fn get(&self, _request: Request<TrafficSpec>) -> Result<Response<OutboundPolicy>, Status> {
        Err(Status::unimplemented("only watches"))
    }

    async fn watch(&self, request: Request<TrafficSpec>) -> Result<Response<Self::WatchStream>, Status> {
        let target = request.into_inner().target;
        let is_silent = |left: usize| left.checked_sub(1);
        if self.silent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_silent).is_ok() {
            return Ok(Response::new(stream::pending().boxed()));
        }
        let policy = match target {
            Some(traffic_spec::Target::Addr(addr)) => {
                self.policies.lock().get(&SocketAddr::try_from(addr).unwrap()).cloned()
            }
            Some(traffic_spec::Target::Authority(name)) => self.named.lock().get(&name).cloned(),
            None => return Err(Status::invalid_argument("no target")),
        };
        match policy {
            Some(policy) => Ok(Response::new(stream::iter([Ok(policy)]).chain(stream::pending()).boxed())),
            None => Err(Status::not_found("no such service")),
        }
    }
}

/// An endpoint in the form of the destination controller; `meshed` is its identity and its proxy's port.
pub(crate) fn endpoint(addr: SocketAddr, meshed: Option<(&str, u16)>) -> WeightedAddr {
    let mut endpoint = WeightedAddr { addr: Some(addr.into()), weight: 10_000, ..Default::default() };
    if let Some((identity, port)) = meshed {
        let name = DnsLikeIdentity { name: identity.to_owned() };
        endpoint.tls_identity =
            Some(TlsIdentity { strategy: Some(Strategy::DnsLikeIdentity(name.clone())), server_name: Some(name) });
        endpoint.protocol_hint = Some(ProtocolHint {
            protocol: Some(protocol_hint::Protocol::H2(protocol_hint::H2 {})),
            opaque_transport: Some(protocol_hint::OpaqueTransport { inbound_port: u32::from(port) }),
        });
    }
    endpoint
}

/// An update that adds endpoints.
pub(crate) fn add(addrs: Vec<WeightedAddr>) -> Update {
    Update { update: Some(update::Update::Add(WeightedAddrSet { addrs, ..Default::default() })) }
}

/// A policy that detects protocols and balances everything over one service, with filters on HTTP.
pub(crate) fn policy(path: &str, filters: Vec<outbound::http_route::Filter>) -> OutboundPolicy {
    use outbound::{http_route, opaque_route, proxy_protocol};
    let backend = balancer(path);
    let http = vec![outbound::HttpRoute {
        rules: vec![http_route::Rule {
            filters,
            backends: Some(http_route::Distribution {
                kind: Some(http_route::distribution::Kind::FirstAvailable(http_route::distribution::FirstAvailable {
                    backends: vec![http_route::RouteBackend { backend: Some(backend.clone()), ..Default::default() }],
                })),
            }),
            ..Default::default()
        }],
        ..Default::default()
    }];
    let opaque = vec![outbound::OpaqueRoute {
        rules: vec![opaque_route::Rule {
            backends: Some(opaque_route::Distribution {
                kind: Some(opaque_route::distribution::Kind::FirstAvailable(
                    opaque_route::distribution::FirstAvailable {
                        backends: vec![opaque_route::RouteBackend { backend: Some(backend), ..Default::default() }],
                    },
                )),
            }),
            filters: Vec::new(),
        }],
        ..Default::default()
    }];
    let detect = proxy_protocol::Detect {
        timeout: None,
        opaque: Some(proxy_protocol::Opaque { routes: opaque }),
        http1: Some(proxy_protocol::Http1 { routes: http.clone(), failure_accrual: None }),
        http2: Some(proxy_protocol::Http2 { routes: http, failure_accrual: None }),
    };
    of_kind(proxy_protocol::Kind::Detect(detect))
}

/// A policy for gRPC over one service.
pub(crate) fn grpc_policy(path: &str, retry: Option<outbound::grpc_route::Retry>) -> OutboundPolicy {
    use outbound::{grpc_route, proxy_protocol};
    let backends = vec![grpc_route::RouteBackend { backend: Some(balancer(path)), ..Default::default() }];
    let kind = grpc_route::distribution::Kind::FirstAvailable(grpc_route::distribution::FirstAvailable { backends });
    let backends = Some(grpc_route::Distribution { kind: Some(kind) });
    let rules = vec![grpc_route::Rule { backends, retry, ..Default::default() }];
    let routes = vec![outbound::GrpcRoute { rules, ..Default::default() }];
    of_kind(proxy_protocol::Kind::Grpc(proxy_protocol::Grpc { routes, failure_accrual: None }))
}

/// A policy whose only backend does not exist.
pub(crate) fn missing_backend() -> OutboundPolicy {
    use outbound::{http_route, proxy_protocol};
    let backends = vec![http_route::RouteBackend { backend: Some(Default::default()), ..Default::default() }];
    let kind = http_route::distribution::Kind::FirstAvailable(http_route::distribution::FirstAvailable { backends });
    let backends = Some(http_route::Distribution { kind: Some(kind) });
    let rules = vec![http_route::Rule { backends, ..Default::default() }];
    let routes = vec![outbound::HttpRoute { rules, ..Default::default() }];
    of_kind(proxy_protocol::Kind::Http1(proxy_protocol::Http1 { routes, failure_accrual: None }))
}

fn balancer(path: &str) -> outbound::Backend {
    use outbound::backend::{BalanceP2c, EndpointDiscovery, Kind, endpoint_discovery};
    let dst = endpoint_discovery::DestinationGet { path: path.to_owned() };
    let discovery = Some(EndpointDiscovery { kind: Some(endpoint_discovery::Kind::Dst(dst)) });
    outbound::Backend { kind: Some(Kind::Balancer(BalanceP2c { discovery, load: None })), ..Default::default() }
}

/// A policy that closes opaque connections.
pub(crate) fn forbidden() -> OutboundPolicy {
    use outbound::{opaque_route, proxy_protocol};
    let filter = opaque_route::Filter { kind: Some(opaque_route::filter::Kind::Forbidden(Default::default())) };
    let rule = opaque_route::Rule {
        backends: Some(opaque_route::Distribution {
            kind: Some(opaque_route::distribution::Kind::Empty(opaque_route::distribution::Empty {})),
        }),
        filters: vec![filter],
    };
    let routes = vec![outbound::OpaqueRoute { rules: vec![rule], ..Default::default() }];
    of_kind(proxy_protocol::Kind::Opaque(proxy_protocol::Opaque { routes }))
}

fn of_kind(kind: outbound::proxy_protocol::Kind) -> OutboundPolicy {
    OutboundPolicy { protocol: Some(outbound::ProxyProtocol { kind: Some(kind) }), metadata: None }
}

/// The other side's proxy: terminates TLS and reads the transport header, and leaves the rest to the test.
pub(crate) struct Peer {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Peer {
    /// Listens with these credentials; also returns the port.
    pub(crate) async fn listen(credentials: &Credentials) -> (Self, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        (Self { listener, acceptor: TlsAcceptor::from(credentials.server_config(&[ALPN])) }, port)
    }

    /// The port of the listener.
    pub(crate) fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// The next connection, with its header; the client has proven its identity.
    pub(crate) async fn accept(&self) -> (TransportHeader, tokio_rustls::server::TlsStream<TcpStream>) {
        let (tcp, _) = self.listener.accept().await.unwrap();
        let mut stream = self.acceptor.accept(tcp).await.unwrap();
        assert!(stream.get_ref().1.peer_certificates().is_some(), "the client sends its certificate");
        let header = TransportHeader::read(&mut stream).await.unwrap();
        (header, stream)
    }
}
