//! What the proxy of a pod does with a connection that the kernel redirects to it: the endpoints that the control plane
//! names for the destination, and why one of them would be reached in plaintext.
//!
//! Owns the words for it. Refuses to know rules about pods: it asks the controller that proxies ask, and reads the
//! answer as they do.

use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, anyhow};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use serde::Serialize;
use tonic::transport::{Channel, Endpoint as GrpcEndpoint};
use weft_k8s_api::labels;
use weft_proto::{
    agent::PodRef,
    linkerd::destination::{
        GetDestination, WeightedAddr, WeightedAddrSet, destination_client::DestinationClient, protocol_hint,
        tls_identity, update::Update,
    },
};

use super::backends;
use crate::{
    agent,
    cluster::{ANSWER, Cluster},
    mesh::list,
    output::Tone,
};

/// The port of the destination controller.
const DESTINATION: u16 = 8086;
/// The port of the policy controller, in the same pods.
const POLICY: u16 = 8090;
/// What the injector sets on the proxy of a pod that may send nothing in plaintext.
const REQUIRE_MTLS: &str = "WEFT_PROXY_REQUIRE_MTLS";
/// The label of endpoints of a Service with the same annotation.
const REQUIRES_MTLS: &str = "require_mtls";
/// The most endpoints in a table; JSON has all.
const SHOWN: usize = 10;

/// One endpoint of the destination.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Endpoint {
    address: SocketAddr,
    /// Null if no pod has the address.
    pod: Option<String>,
    transport: Transport,
    /// Null without mutual TLS.
    identity: Option<String>,
    /// What the endpoint's proxy is sent: `http2`, `opaque`, or `detected`.
    hint: &'static str,
    /// Why it is not mutual TLS; empty if it is.
    reason: String,
}

/// How connections to an endpoint are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Transport {
    Plaintext,
    Refused,
    MutualTls,
}

impl Transport {
    fn tone(self) -> Option<Tone> {
        match self {
            Self::Plaintext => Some(Tone::Warning),
            Self::Refused => Some(Tone::Bad),
            Self::MutualTls => None,
        }
    }
}

/// The client, as far as the endpoints depend on it.
pub(super) struct Client<'a> {
    pub(super) pod: &'a PodRef,
    pub(super) node: &'a str,
    /// Its own addresses, to which its proxy connects without TLS.
    pub(super) ips: Vec<IpAddr>,
    /// Whether its proxy may send nothing in plaintext.
    pub(super) requires_mtls: bool,
}

/// Whether a pod's proxy refuses plaintext.
pub(super) fn requires_mtls(pod: &Pod) -> bool {
    let spec = pod.spec.iter();
    let mut containers = spec.flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()));
    containers.any(|container| {
        let mut variables = container.env.iter().flatten();
        variables.any(|variable| variable.name == REQUIRE_MTLS && variable.value.as_deref() == Some("true"))
    })
}

/// The addresses of a pod.
pub(super) fn ips(pod: &Pod) -> Vec<IpAddr> {
    let listed = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
    listed.filter_map(|listed| listed.ip.parse().ok()).collect()
}

/// The endpoints of an address, as the proxy of the client would find them.
pub(super) async fn endpoints(cluster: &Cluster, client: &Client<'_>, address: SocketAddr) -> Result<Vec<Endpoint>> {
    let asked = async {
        let pod = controller(cluster).await?;
        let destination = connect(cluster, &pod, DESTINATION).await?;
        ask(destination, || connect(cluster, &pod, POLICY), client, address).await
    };
    let found = match tokio::time::timeout(ANSWER, asked).await {
        Ok(found) => found?,
        Err(_) => return Err(anyhow!("the destination controller did not answer within {}s", ANSWER.as_secs())),
    };
    Ok(read(found, &cluster.namespace, client.requires_mtls, &client.ips))
}

/// The name of a pod of the destination controller that is ready.
async fn controller(cluster: &Cluster) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let selector = format!("{}=destination", labels::CONTROL_PLANE_COMPONENT);
    let found = list(pods, &ListParams::default().labels(&selector)).await;
    let found = found.map_err(|error| anyhow!("the destination controller's pods: {error}"))?;
    let is_ready = |pod: &Pod| {
        let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
    };
    let ready = found.iter().find(|pod| is_ready(pod)).map(Pod::name_any);
    ready.with_context(|| format!("no destination controller is ready in {}", cluster.namespace))
}

/// Connects to a port of such a pod, through the API server.
async fn connect(cluster: &Cluster, pod: &str, port: u16) -> Result<Channel> {
    let (cluster, name) = (cluster.clone(), pod.to_owned());
    // The address is not used: the connector has the pod.
    let endpoint = GrpcEndpoint::from_static("http://destination");
    let channel = endpoint.connect_with_connector(tower::service_fn(move |_| {
        let (cluster, name) = (cluster.clone(), name.clone());
        async move { cluster.forward(&cluster.namespace, &name, port).await.map(TokioIo::new) }
    }));
    channel.await.map_err(|error| anyhow!("the destination controller: {:#}", anyhow::Error::from(error)))
}

/// The first answers about an address: its endpoint, or those of its Service, or of those that the ServiceProfile or
/// routes name instead.
async fn ask<F>(
    destination: Channel,
    policy: impl FnOnce() -> F,
    client: &Client<'_>,
    address: SocketAddr,
) -> Result<Vec<WeightedAddr>>
where
    F: Future<Output = Result<Channel>>,
{
    let failed = |status| anyhow!("the destination controller: {}", agent::reason(&status));
    let PodRef { namespace, name } = client.pod;
    let token = serde_json::json!({"ns": namespace, "nodeName": client.node, "pod": name}).to_string();
    let question = |path: String| GetDestination { path, context_token: token.clone(), ..GetDestination::default() };
    let mut controller = DestinationClient::new(destination);
    let mut profiles = controller.get_profile(question(address.to_string())).await.map_err(failed)?.into_inner();
    let profile = profiles.message().await.map_err(failed)?.unwrap_or_default();
    if let Some(endpoint) = profile.endpoint {
        return Ok(vec![endpoint]);
    }
    if profile.fully_qualified_name.is_empty() {
        return Ok(vec![WeightedAddr { addr: Some(address.into()), ..WeightedAddr::default() }]);
    }
    let own = format!("{}:{}", profile.fully_qualified_name, address.port());
    // As the proxy does: a ServiceProfile with destinations or routes comes before policy.
    let services = if !profile.dst_overrides.is_empty() {
        // One without a weight gets nothing.
        profile.dst_overrides.into_iter().filter(|dst| dst.weight > 0).map(|dst| dst.authority).collect()
    } else if !profile.routes.is_empty() {
        vec![own]
    } else {
        let routed = backends::services(policy().await?, client.pod, address).await?;
        routed.map_or_else(|| vec![own], |services| services.into_iter().collect())
    };
    let mut found = Vec::new();
    for service in services {
        let mut updates = controller.get(question(service)).await.map_err(failed)?.into_inner();
        if let Some(Update::Add(WeightedAddrSet { addrs, .. })) =
            updates.message().await.map_err(failed)?.and_then(|it| it.update)
        {
            found.extend(addrs);
        }
    }
    Ok(found)
}

/// What a proxy, whose pod has the addresses `own`, makes of the controller's messages; what is not mutual TLS first.
fn read(found: Vec<WeightedAddr>, control_namespace: &str, requires_mtls: bool, own: &[IpAddr]) -> Vec<Endpoint> {
    let read = found.into_iter().filter_map(|message| {
        let address = message.addr.and_then(|addr| SocketAddr::try_from(addr).ok())?;
        match own.contains(&address.ip()) {
            true => Some(own_endpoint(address, message)),
            false => Some(endpoint(address, message, control_namespace, requires_mtls)),
        }
    });
    let mut endpoints: Vec<_> = read.collect();
    endpoints.sort_by_key(|endpoint| (endpoint.transport, endpoint.address));
    // Two Services may have one pod.
    endpoints.dedup();
    endpoints
}

/// The client's own pod, which is never refused: nothing leaves the pod.
fn own_endpoint(address: SocketAddr, mut message: WeightedAddr) -> Endpoint {
    Endpoint {
        address,
        pod: message.metric_labels.remove("pod"),
        transport: Transport::Plaintext,
        identity: None,
        hint: "detected",
        reason: "it is the client's own pod, which the proxy reaches over lo".to_owned(),
    }
}

fn endpoint(address: SocketAddr, message: WeightedAddr, control_namespace: &str, requires_mtls: bool) -> Endpoint {
    let labels = message.metric_labels;
    let identity = message.tls_identity.and_then(|tls| tls.strategy).map(|strategy| match strategy {
        tls_identity::Strategy::DnsLikeIdentity(id) => id.name,
        tls_identity::Strategy::UriLikeIdentity(id) => id.uri,
    });
    let hint = match message.protocol_hint.and_then(|hint| hint.protocol) {
        Some(protocol_hint::Protocol::H2(_)) => "http2",
        Some(protocol_hint::Protocol::Opaque(_)) => "opaque",
        None => "detected",
    };
    let refused_by = match labels.get(REQUIRES_MTLS).is_some_and(|value| value == "true") {
        true => Some("the Service"),
        false => requires_mtls.then_some("the client's pod"),
    };
    let (transport, reason) = match (&identity, refused_by) {
        (Some(_), _) => (Transport::MutualTls, String::new()),
        (None, None) => (Transport::Plaintext, without_identity(&labels, address.port(), control_namespace)),
        (None, Some(whose)) => {
            let reason = without_identity(&labels, address.port(), control_namespace);
            (Transport::Refused, format!("{reason}, and {} of {whose} forbids plaintext", labels::REQUIRE_MTLS))
        }
    };
    Endpoint { address, pod: labels.get("pod").cloned(), transport, identity, hint, reason }
}

/// Why the control plane names no identity, by the labels of the endpoint.
fn without_identity(found: &HashMap<String, String>, port: u16, control_namespace: &str) -> String {
    let Some(pod) = found.get("pod") else { return "no pod of the cluster has this address".to_owned() };
    match found.get("control_plane_ns") {
        None => format!("pod {pod} has no proxy"),
        Some(other) if other != control_namespace => format!("pod {pod} belongs to the mesh of namespace {other}"),
        Some(_) => format!("port {port} is in {} of pod {pod}", labels::SKIP_INBOUND_PORTS),
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if let Some(pod) = &self.pod {
            write!(f, " ({pod})")?;
        }
        match (self.transport, &self.identity) {
            (Transport::MutualTls, Some(identity)) => {
                let carried = match self.hint {
                    "http2" => ", HTTP carried over HTTP/2",
                    "opaque" => ", as opaque TCP",
                    _ => "",
                };
                write!(f, ": mutual TLS with {identity}{carried}")
            }
            (Transport::Refused, _) => write!(f, ": refused, because {}", self.reason),
            _ => write!(f, ": plaintext, because {}", self.reason),
        }
    }
}

/// Lines for people, and what each is about.
pub(super) fn lines(endpoints: &Result<Vec<Endpoint>>) -> Vec<(Option<Tone>, String)> {
    match endpoints {
        Err(error) => vec![(Some(Tone::Warning), format!("endpoints unknown: {error:#}"))],
        Ok(endpoints) if endpoints.is_empty() => vec![(Some(Tone::Bad), "endpoint none is available".to_owned())],
        Ok(endpoints) => {
            let mut lines: Vec<_> =
                endpoints.iter().take(SHOWN).map(|one| (one.transport.tone(), format!("endpoint {one}"))).collect();
            if let Some(more) = endpoints.len().checked_sub(SHOWN).filter(|more| *more > 0) {
                let plain = endpoints.iter().skip(SHOWN).filter(|one| one.transport != Transport::MutualTls).count();
                lines.push((None, format!("         and {more} more, {plain} of them without mutual TLS")));
            }
            lines
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use futures::{StreamExt as _, stream, stream::BoxStream};
    use serde_json::json;
    use tonic::{Request, Response, Status, transport::Server};
    use weft_proto::linkerd::{
        destination::{
            self, DestinationProfile, NoEndpoints, ProtocolHint, TlsIdentity, WeightedDst,
            destination_server::{Destination, DestinationServer},
        },
        outbound::{
            Backend, HttpRoute, OutboundPolicy, ProxyProtocol, TrafficSpec,
            backend::{self, BalanceP2c, EndpointDiscovery, endpoint_discovery},
            http_route::{Distribution, RouteBackend, Rule, WeightedRouteBackend, distribution},
            outbound_policies_server::{OutboundPolicies, OutboundPoliciesServer},
            proxy_protocol, traffic_spec,
        },
    };

    use super::*;

    fn texts(endpoints: Result<Vec<Endpoint>>) -> Vec<String> {
        lines(&endpoints).into_iter().map(|(_, line)| line).collect()
    }

    #[test]
    fn what_is_not_encrypted_stands_out() {
        let tone = |found| lines(&Ok(found))[0].0;
        assert_eq!(tone(read(vec![meshed(9, None)], "linkerd", false, &[])), None);
        assert_eq!(tone(read(vec![message(9, &[])], "linkerd", false, &[])), Some(Tone::Warning));
        assert_eq!(tone(read(vec![message(9, &[])], "linkerd", true, &[])), Some(Tone::Bad));
        assert_eq!(tone(Vec::new()), Some(Tone::Bad));
    }

    fn message(octet: u8, found: &[(&str, &str)]) -> WeightedAddr {
        WeightedAddr {
            addr: Some(SocketAddr::from(([10, 0, 0, octet], 8080)).into()),
            metric_labels: found.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            ..WeightedAddr::default()
        }
    }

    fn meshed(octet: u8, protocol: Option<protocol_hint::Protocol>) -> WeightedAddr {
        let id = tls_identity::DnsLikeIdentity { name: "web.shop.serviceaccount".to_owned() };
        WeightedAddr {
            tls_identity: Some(TlsIdentity {
                server_name: Some(id.clone()),
                strategy: Some(tls_identity::Strategy::DnsLikeIdentity(id)),
            }),
            protocol_hint: Some(ProtocolHint { protocol, opaque_transport: None }),
            ..message(octet, &[("pod", "web-0"), ("control_plane_ns", "linkerd")])
        }
    }

    fn said(message: WeightedAddr, requires_mtls: bool) -> String {
        texts(Ok(read(vec![message], "linkerd", requires_mtls, &[]))).join("\n")
    }

    #[test]
    fn why_an_endpoint_would_be_reached_in_plaintext() {
        let pod = ("pod", "web-0");
        let (ours, theirs) = (("control_plane_ns", "linkerd"), ("control_plane_ns", "canary"));
        for (found, reason) in [
            (vec![], "10.0.0.9:8080: plaintext, because no pod of the cluster has this address"),
            (vec![pod], "10.0.0.9:8080 (web-0): plaintext, because pod web-0 has no proxy"),
            (
                vec![pod, ours],
                "10.0.0.9:8080 (web-0): plaintext, because port 8080 is in config.linkerd.io/skip-inbound-ports of pod web-0",
            ),
            (
                vec![pod, theirs],
                "10.0.0.9:8080 (web-0): plaintext, because pod web-0 belongs to the mesh of namespace canary",
            ),
        ] {
            assert_eq!(said(message(9, &found), false), format!("endpoint {reason}"));
        }
    }

    #[test]
    fn an_endpoint_without_identity_is_refused_where_either_side_requires_mutual_tls() {
        let of_service = said(message(9, &[("require_mtls", "true")]), false);
        let why = "endpoint 10.0.0.9:8080: refused, because no pod of the cluster has this address, and weft.io/require-mtls of";
        assert_eq!(of_service, format!("{why} the Service forbids plaintext"));
        assert_eq!(said(message(9, &[]), true), format!("{why} the client's pod forbids plaintext"));
        assert!(said(meshed(9, None), true).ends_with(": mutual TLS with web.shop.serviceaccount"));
        let own = read(vec![message(9, &[])], "linkerd", true, &["10.0.0.9".parse().unwrap()]);
        assert_eq!(own[0].transport, Transport::Plaintext, "nothing leaves the pod");

        let refusing = |value: &str| {
            let env = json!([{"name": REQUIRE_MTLS, "value": value}]);
            let spec =
                json!({"containers": [{"name": "web"}], "initContainers": [{"name": "linkerd-proxy", "env": env}]});
            requires_mtls(&serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap())
        };
        assert!(refusing("true") && !refusing("false"));
    }

    #[test]
    fn the_hint_says_what_the_endpoints_proxy_is_sent() {
        let identity = "endpoint 10.0.0.9:8080 (web-0): mutual TLS with web.shop.serviceaccount";
        let h2 = protocol_hint::Protocol::H2(protocol_hint::H2 {});
        assert_eq!(said(meshed(9, Some(h2)), false), format!("{identity}, HTTP carried over HTTP/2"));
        let opaque = protocol_hint::Protocol::Opaque(protocol_hint::Opaque {});
        assert_eq!(said(meshed(9, Some(opaque)), false), format!("{identity}, as opaque TCP"));
        assert_eq!(said(meshed(9, None), false), identity);
        let object = serde_json::to_value(read(vec![meshed(9, None)], "linkerd", false, &[])).unwrap();
        let expected = json!([{"address": "10.0.0.9:8080", "pod": "web-0", "transport": "mutual_tls",
            "identity": "web.shop.serviceaccount", "hint": "detected", "reason": ""}]);
        assert_eq!(object, expected);
    }

    #[test]
    fn endpoints_in_plaintext_are_shown_first_and_the_rest_is_counted() {
        let mut found: Vec<_> = (1..=20).map(|octet| meshed(octet, None)).collect();
        found.push(message(99, &[]));
        let lines = texts(Ok(read(found, "linkerd", false, &[])));
        assert_eq!(lines.len(), SHOWN + 1);
        assert!(lines[0].starts_with("endpoint 10.0.0.99:8080: plaintext"), "{lines:#?}");
        assert_eq!(lines[SHOWN], "         and 11 more, 0 of them without mutual TLS");
    }

    /// What a controller is asked, and answers about Services and a pod. As in truth, its streams do not end.
    #[derive(Clone, Default)]
    struct Controller(Arc<Mutex<Vec<String>>>);

    fn answer<T: Send + 'static>(message: T) -> Result<Response<BoxStream<'static, Result<T, Status>>>, Status> {
        Ok(Response::new(stream::iter([Ok(message)]).chain(stream::pending()).boxed()))
    }

    impl Controller {
        fn asked(&self, what: &str, question: GetDestination) -> String {
            let token: serde_json::Value = serde_json::from_str(&question.context_token).unwrap();
            assert_eq!(token, json!({"ns": "shop", "nodeName": "node-1", "pod": "client-0"}));
            self.0.lock().unwrap().push(format!("{what} {}", question.path));
            question.path
        }
    }

    #[tonic::async_trait]
    impl Destination for Controller {
        type GetStream = BoxStream<'static, Result<destination::Update, Status>>;
        type GetProfileStream = BoxStream<'static, Result<DestinationProfile, Status>>;

        async fn get(&self, request: Request<GetDestination>) -> Result<Response<Self::GetStream>, Status> {
            let update = match &*self.asked("get", request.into_inner()) {
                "web.shop.svc.cluster.local:80" => {
                    Update::Add(WeightedAddrSet { addrs: vec![meshed(1, None)], ..WeightedAddrSet::default() })
                }
                "canary.shop.svc.cluster.local:80" => {
                    let addrs = vec![message(2, &[("pod", "canary-0")]), meshed(1, None)];
                    Update::Add(WeightedAddrSet { addrs, ..WeightedAddrSet::default() })
                }
                "peers.shop.svc.cluster.local:80" => {
                    let addrs = vec![meshed(1, None), meshed(7, None)];
                    Update::Add(WeightedAddrSet { addrs, ..WeightedAddrSet::default() })
                }
                _ => Update::NoEndpoints(NoEndpoints { exists: true }),
            };
            answer(destination::Update { update: Some(update) })
        }

        async fn get_profile(
            &self,
            request: Request<GetDestination>,
        ) -> Result<Response<Self::GetProfileStream>, Status> {
            let named = |name: &str| DestinationProfile { fully_qualified_name: name.into(), ..Default::default() };
            answer(match &*self.asked("profile", request.into_inner()) {
                "10.96.0.1:80" => named("web.shop.svc.cluster.local"),
                "10.96.0.2:80" => named("empty.shop.svc.cluster.local"),
                "10.96.0.3:80" => {
                    let instead = [("canary", 1), ("web", 9), ("gone", 0)].map(|(name, weight)| {
                        let authority = format!("{name}.shop.svc.cluster.local:80");
                        WeightedDst { authority, weight, ..WeightedDst::default() }
                    });
                    DestinationProfile { dst_overrides: instead.into(), ..named("split.shop.svc.cluster.local") }
                }
                "10.96.0.4:80" => named("peers.shop.svc.cluster.local"),
                "10.96.0.5:80" => named("routed.shop.svc.cluster.local"),
                "10.0.0.9:8080" => DestinationProfile { endpoint: Some(meshed(9, None)), ..Default::default() },
                _ => DestinationProfile::default(),
            })
        }
    }

    /// A policy whose route sends requests to these Services, by weight.
    fn routed(services: [(&str, u32); 3]) -> OutboundPolicy {
        let backends = services.map(|(name, weight)| {
            let path = format!("{name}.shop.svc.cluster.local:80");
            let kind = endpoint_discovery::Kind::Dst(endpoint_discovery::DestinationGet { path });
            let discovery = Some(EndpointDiscovery { kind: Some(kind) });
            let kind = backend::Kind::Balancer(BalanceP2c { discovery, ..BalanceP2c::default() });
            let backend = RouteBackend {
                backend: Some(Backend { kind: Some(kind), ..Backend::default() }),
                ..RouteBackend::default()
            };
            WeightedRouteBackend { backend: Some(backend), weight }
        });
        let random = distribution::RandomAvailable { backends: backends.into() };
        let backends = Some(Distribution { kind: Some(distribution::Kind::RandomAvailable(random)) });
        let route = HttpRoute { rules: vec![Rule { backends, ..Rule::default() }], ..HttpRoute::default() };
        let http1 = proxy_protocol::Http1 { routes: vec![route], ..proxy_protocol::Http1::default() };
        let protocol = Some(ProxyProtocol { kind: Some(proxy_protocol::Kind::Http1(http1)) });
        OutboundPolicy { protocol, ..OutboundPolicy::default() }
    }

    #[tonic::async_trait]
    impl OutboundPolicies for Controller {
        type WatchStream = BoxStream<'static, Result<OutboundPolicy, Status>>;

        async fn get(&self, request: Request<TrafficSpec>) -> Result<Response<OutboundPolicy>, Status> {
            let TrafficSpec { source_workload, target } = request.into_inner();
            let workload: serde_json::Value = serde_json::from_str(&source_workload).unwrap();
            assert_eq!(workload, json!({"ns": "shop", "pod": "client-0"}));
            let Some(traffic_spec::Target::Addr(address)) = target else { panic!("{target:?}") };
            let address = SocketAddr::try_from(address).unwrap();
            self.0.lock().unwrap().push(format!("policy {address}"));
            match address.to_string().as_str() {
                "10.96.0.5:80" => Ok(Response::new(routed([("canary", 1), ("web", 9), ("gone", 0)]))),
                _ => Err(Status::not_found("no such Service")),
            }
        }

        async fn watch(&self, _: Request<TrafficSpec>) -> Result<Response<Self::WatchStream>, Status> {
            Err(Status::unimplemented("explain asks once"))
        }
    }

    #[tokio::test]
    async fn the_controller_is_asked_as_the_proxy_asks_it() {
        let controller = Controller::default();
        let (near, far) = tokio::io::duplex(64 * 1024);
        let incoming = stream::iter([Ok::<_, std::io::Error>(far)]).chain(stream::pending());
        let services = Server::builder()
            .add_service(DestinationServer::new(controller.clone()))
            .add_service(OutboundPoliciesServer::new(controller.clone()));
        tokio::spawn(services.serve_with_incoming(incoming));
        let mut near = Some(near);
        let connector = tower::service_fn(move |_| {
            let near = near.take().ok_or_else(|| std::io::Error::other("one connection suffices"));
            async move { near.map(TokioIo::new) }
        });
        let channel = GrpcEndpoint::from_static("http://destination").connect_with_connector(connector).await.unwrap();
        let pod = PodRef { namespace: "shop".into(), name: "client-0".into() };
        let ips = vec!["10.0.0.7".parse().unwrap()];
        let client = Client { pod: &pod, node: "node-1", ips, requires_mtls: false };
        let web = "endpoint 10.0.0.1:8080 (web-0): mutual TLS with web.shop.serviceaccount";
        for (address, expected) in [
            ("10.96.0.1:80", &[web][..]),
            ("10.96.0.2:80", &["endpoint none is available"]),
            ("10.96.0.3:80", &["endpoint 10.0.0.2:8080 (canary-0): plaintext, because pod canary-0 has no proxy", web]),
            (
                "10.96.0.4:80",
                &[
                    "endpoint 10.0.0.7:8080 (web-0): plaintext, because it is the client's own pod, which the proxy \
                   reaches over lo",
                    web,
                ],
            ),
            ("10.96.0.5:80", &["endpoint 10.0.0.2:8080 (canary-0): plaintext, because pod canary-0 has no proxy", web]),
            ("10.0.0.9:8080", &["endpoint 10.0.0.9:8080 (web-0): mutual TLS with web.shop.serviceaccount"]),
            ("8.8.8.8:443", &["endpoint 8.8.8.8:443: plaintext, because no pod of the cluster has this address"]),
        ] {
            let policy = || async { Ok(channel.clone()) };
            let found = ask(channel.clone(), policy, &client, address.parse().unwrap()).await.unwrap();
            assert_eq!(texts(Ok(read(found, "linkerd", client.requires_mtls, &client.ips))), expected);
        }
        let asked = controller.0.lock().unwrap().clone();
        let expected = [
            "profile 10.96.0.1:80",
            "policy 10.96.0.1:80",
            "get web.shop.svc.cluster.local:80",
            "profile 10.96.0.2:80",
            "policy 10.96.0.2:80",
            "get empty.shop.svc.cluster.local:80",
            "profile 10.96.0.3:80",
            "get canary.shop.svc.cluster.local:80",
            "get web.shop.svc.cluster.local:80",
            "profile 10.96.0.4:80",
            "policy 10.96.0.4:80",
            "get peers.shop.svc.cluster.local:80",
            "profile 10.96.0.5:80",
            "policy 10.96.0.5:80",
            "get canary.shop.svc.cluster.local:80",
            "get web.shop.svc.cluster.local:80",
            "profile 10.0.0.9:8080",
            "profile 8.8.8.8:443",
        ];
        assert_eq!(asked, expected);
    }
}
