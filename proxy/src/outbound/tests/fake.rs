//! A control plane and endpoints on loopback, as the outbound tests need them.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Notify, mpsc},
};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Code, Request, Response, Status};
use weft_proto::linkerd::{
    destination::{
        DestinationProfile, GetDestination, ProtocolHint, TlsIdentity, Update, WeightedAddr, WeightedAddrSet,
        destination_server::{Destination, DestinationServer},
        protocol_hint,
        tls_identity::{DnsLikeIdentity, Strategy},
        update,
    },
    http_route::HttpFailureInjector,
    outbound::{
        self, OutboundPolicy, TrafficSpec,
        outbound_policies_server::{OutboundPolicies, OutboundPoliciesServer},
        proxy_protocol, traffic_spec,
    },
    tls_route::{SniMatch, sni_match},
};
use weft_tls::credentials::Credentials;

use crate::{
    config::Config,
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
    endpoints: Arc<Mutex<HashMap<String, Service>>>,
    /// The streams of policies, by address or name.
    watchers: Arc<Mutex<Vec<Watcher>>>,
    calls: Arc<Mutex<HashMap<Call, Calls>>>,
    speak: Arc<Notify>,
}

type Follower<T> = mpsc::UnboundedSender<Result<T, Status>>;
type Watcher = (String, Follower<OutboundPolicy>);

#[derive(Default)]
struct Service {
    first: Vec<Update>,
    followers: Vec<Follower<Update>>,
}

/// A call of the fake controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    Policy,
    Profile,
    Endpoints,
}

/// What a call gets instead of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Instead {
    /// This code.
    Fail(Code),
    /// A stream that ends without a message.
    End,
    /// A stream that sends nothing, and ends with [`Control::speak`].
    Silence,
}

#[derive(Default)]
struct Calls {
    count: usize,
    instead: VecDeque<Instead>,
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

    /// Ends all streams of a service; the next ones begin with this update alone.
    pub(crate) fn replace(&self, path: &str, update: Update) {
        self.endpoints.lock().insert(path.to_owned(), Service { first: vec![update], followers: Vec::new() });
    }

    /// Changes the policy of an address for all present and future subscribers.
    pub(crate) fn change_policy(&self, addr: SocketAddr, policy: OutboundPolicy) {
        let followed = addr.to_string();
        self.policies.lock().insert(addr, policy.clone());
        self.watchers.lock().retain(|(of, watcher)| *of != followed || watcher.send(Ok(policy.clone())).is_ok());
    }

    /// What the next calls get instead of an answer, in turn.
    pub(crate) fn instead(&self, call: Call, of: impl IntoIterator<Item = Instead>) {
        self.calls.lock().entry(call).or_default().instead.extend(of);
    }

    /// How many calls there were.
    pub(crate) fn calls(&self, call: Call) -> usize {
        self.calls.lock().get(&call).map_or(0, |calls| calls.count)
    }

    /// Ends the stream that is silent.
    pub(crate) fn speak(&self) {
        self.speak.notify_one();
    }

    /// Counts a call; `Some` is what it gets instead of an answer.
    fn begin<T: Send + 'static>(&self, call: Call) -> Option<Result<Response<Streamed<T>>, Status>> {
        let mut calls = self.calls.lock();
        let calls = calls.entry(call).or_default();
        calls.count += 1;
        Some(match calls.instead.pop_front()? {
            Instead::Fail(code) => Err(Status::new(code, "as the test wants")),
            Instead::End => Ok(Response::new(stream::empty().boxed())),
            Instead::Silence => {
                let speak = Arc::clone(&self.speak);
                let end = async move {
                    speak.notified().await;
                    Err(Status::unavailable("the silence is over"))
                };
                Ok(Response::new(stream::once(end).boxed()))
            }
        })
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
        if let Some(instead) = self.begin(Call::Endpoints) {
            return instead;
        }
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
        if let Some(instead) = self.begin(Call::Profile) {
            return instead;
        }
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
        if let Some(instead) = self.begin(Call::Policy) {
            return instead;
        }
        let (followed, policy) = match request.into_inner().target {
            Some(traffic_spec::Target::Addr(addr)) => {
                let addr = SocketAddr::try_from(addr).unwrap();
                (addr.to_string(), self.policies.lock().get(&addr).cloned())
            }
            Some(traffic_spec::Target::Authority(name)) => {
                let policy = self.named.lock().get(&name).cloned();
                (name, policy)
            }
            None => return Err(Status::invalid_argument("no target")),
        };
        let policy = policy.ok_or_else(|| Status::not_found("no such service"))?;
        let (tx, rx) = mpsc::unbounded_channel();
        let _ = tx.send(Ok(policy));
        self.watchers.lock().push((followed, tx));
        Ok(Response::new(UnboundedReceiverStream::new(rx).boxed()))
    }
}

/// Requests and connections wait this long for an endpoint: a minute in tests that say nothing else, so that they find
/// one on a busy machine too.
pub(crate) fn wait_for_endpoints(config: &mut Config, timeout: Duration) {
    config.outbound.http_queue.failfast_timeout = timeout;
    config.outbound.tcp_queue.failfast_timeout = timeout;
}

/// For tests in which a request or a connection finds no endpoint.
pub(crate) fn fails_fast(config: &mut Config) {
    wait_for_endpoints(config, Duration::from_millis(500));
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

/// How a rule distributes what it takes.
pub(crate) enum Over {
    First(Vec<outbound::Backend>),
    Random(Vec<(outbound::Backend, u32)>),
    Nothing,
}

/// The distribution in the form of one kind of routes.
macro_rules! distribution {
    ($module:ident, $over:expr) => {{
        use outbound::$module::{
            Distribution, RouteBackend, WeightedRouteBackend,
            distribution::{Empty, FirstAvailable, Kind, RandomAvailable},
        };
        let of_route =
            |backend: &outbound::Backend| RouteBackend { backend: Some(backend.clone()), ..Default::default() };
        let kind = match $over {
            Over::First(backends) => {
                Kind::FirstAvailable(FirstAvailable { backends: backends.iter().map(of_route).collect() })
            }
            Over::Random(backends) => {
                let weighted = backends.iter().map(|(backend, weight)| WeightedRouteBackend {
                    backend: Some(of_route(backend)),
                    weight: *weight,
                });
                Kind::RandomAvailable(RandomAvailable { backends: weighted.collect() })
            }
            Over::Nothing => Kind::Empty(Empty {}),
        };
        Some(Distribution { kind: Some(kind) })
    }};
}

/// A route of all requests.
pub(crate) fn http_route(over: &Over, filters: Vec<outbound::http_route::Filter>) -> outbound::HttpRoute {
    let rule = outbound::http_route::Rule { filters, backends: distribution!(http_route, over), ..Default::default() };
    outbound::HttpRoute { rules: vec![rule], ..Default::default() }
}

/// A route of all connections.
pub(crate) fn opaque_route(over: &Over) -> outbound::OpaqueRoute {
    let rule = outbound::opaque_route::Rule { backends: distribution!(opaque_route, over), filters: Vec::new() };
    outbound::OpaqueRoute { rules: vec![rule], ..Default::default() }
}

/// A route of TLS with these server names; of all without any.
pub(crate) fn tls_route(names: &[sni_match::Match], over: &Over) -> outbound::TlsRoute {
    let rule = outbound::tls_route::Rule { backends: distribution!(tls_route, over), filters: Vec::new() };
    let snis = names.iter().map(|name| SniMatch { r#match: Some(name.clone()) }).collect();
    outbound::TlsRoute { snis, rules: vec![rule], ..Default::default() }
}

/// A policy that detects protocols.
pub(crate) fn detecting(http: outbound::HttpRoute, opaque: outbound::OpaqueRoute) -> OutboundPolicy {
    let http = vec![http];
    of_kind(proxy_protocol::Kind::Detect(proxy_protocol::Detect {
        timeout: None,
        opaque: Some(proxy_protocol::Opaque { routes: vec![opaque] }),
        http1: Some(proxy_protocol::Http1 { routes: http.clone(), failure_accrual: None }),
        http2: Some(proxy_protocol::Http2 { routes: http, failure_accrual: None }),
    }))
}

/// A policy that detects protocols and distributes everything in the same way.
pub(crate) fn distributing(over: &Over) -> OutboundPolicy {
    detecting(http_route(over, Vec::new()), opaque_route(over))
}

/// A filter that answers every request with a failure.
pub(crate) fn failing(status: u32, message: &str) -> outbound::http_route::Filter {
    use outbound::http_route::{Filter, filter};
    let injector = HttpFailureInjector { status, message: message.to_owned(), ratio: None };
    Filter { kind: Some(filter::Kind::FailureInjector(injector)) }
}

/// A policy that detects protocols and balances everything over one service, with filters on HTTP.
pub(crate) fn policy(path: &str, filters: Vec<outbound::http_route::Filter>) -> OutboundPolicy {
    let over = Over::First(vec![balancer(path)]);
    detecting(http_route(&over, filters), opaque_route(&over))
}

/// A policy for gRPC over one service.
pub(crate) fn grpc_policy(path: &str, retry: Option<outbound::grpc_route::Retry>) -> OutboundPolicy {
    let backends = distribution!(grpc_route, &Over::First(vec![balancer(path)]));
    let rules = vec![outbound::grpc_route::Rule { backends, retry, ..Default::default() }];
    let routes = vec![outbound::GrpcRoute { rules, ..Default::default() }];
    of_kind(proxy_protocol::Kind::Grpc(proxy_protocol::Grpc { routes, failure_accrual: None }))
}

/// A policy whose only backend does not exist.
pub(crate) fn missing_backend() -> OutboundPolicy {
    let routes = vec![http_route(&Over::First(vec![Default::default()]), Vec::new())];
    of_kind(proxy_protocol::Kind::Http1(proxy_protocol::Http1 { routes, failure_accrual: None }))
}

/// The endpoints of a service.
pub(crate) fn balancer(path: &str) -> outbound::Backend {
    use outbound::backend::{BalanceP2c, EndpointDiscovery, Kind, endpoint_discovery};
    let dst = endpoint_discovery::DestinationGet { path: path.to_owned() };
    let discovery = Some(EndpointDiscovery { kind: Some(endpoint_discovery::Kind::Dst(dst)) });
    outbound::Backend { kind: Some(Kind::Balancer(BalanceP2c { discovery, load: None })), ..Default::default() }
}

/// One address.
pub(crate) fn forward(addr: SocketAddr) -> outbound::Backend {
    let kind = outbound::backend::Kind::Forward(endpoint(addr, None));
    outbound::Backend { kind: Some(kind), ..Default::default() }
}

/// A policy that closes opaque connections.
pub(crate) fn forbidden() -> OutboundPolicy {
    use outbound::opaque_route::{Filter, filter};
    let mut route = opaque_route(&Over::Nothing);
    route.rules[0].filters = vec![Filter { kind: Some(filter::Kind::Forbidden(Default::default())) }];
    of_kind(proxy_protocol::Kind::Opaque(proxy_protocol::Opaque { routes: vec![route] }))
}

/// A policy of this protocol.
pub(crate) fn of_kind(kind: proxy_protocol::Kind) -> OutboundPolicy {
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
        let peer = Self::listen_with(credentials, &[ALPN]).await;
        let port = peer.port();
        (peer, port)
    }

    /// Listens with these credentials and knows these protocols of ALPN.
    pub(crate) async fn listen_with(credentials: &Credentials, alpn: &[&[u8]]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { listener, acceptor: TlsAcceptor::from(credentials.server_config(alpn)) }
    }

    /// The port of the listener.
    pub(crate) fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// Closes the next connection before its handshake.
    pub(crate) async fn refuse(&self) {
        drop(self.listener.accept().await.unwrap());
    }

    /// The next connection, with its header; the client has proven its identity.
    pub(crate) async fn accept(&self) -> (TransportHeader, tokio_rustls::server::TlsStream<TcpStream>) {
        let mut stream = self.accept_tls().await;
        let header = TransportHeader::read(&mut stream).await.unwrap();
        (header, stream)
    }

    /// The next connection, of which nothing is read after the handshake.
    pub(crate) async fn accept_tls(&self) -> tokio_rustls::server::TlsStream<TcpStream> {
        let (tcp, _) = self.listener.accept().await.unwrap();
        let stream = self.acceptor.accept(tcp).await.unwrap();
        assert!(stream.get_ref().1.peer_certificates().is_some(), "the client sends its certificate");
        stream
    }
}
