//! Streams over indexes of a cluster here and clusters there.

use std::{collections::VecDeque, pin::Pin, time::Duration};

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::time::timeout;
use tonic::Code;
use weft_index::{Cluster, Event, SharedIndex};
use weft_k8s_api::manifest::{self, Kind, ObjectRef};
use weft_proto::linkerd::destination::{Update, update};
use weft_runtime::{drain, metrics::Metrics};

use super::*;
use crate::{
    args,
    clusters::{Clusters, LinkedCluster},
    destination::{EndpointSettings, endpoints::tests::updates, http2},
    metrics::GrpcMetrics,
};

/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(30);
/// How long nothing has to happen.
const SILENCE: Duration = Duration::from_millis(100);

const LABEL: &str = "multicluster.linkerd.io/remote-discovery";
const NAME: &str = "multicluster.linkerd.io/remote-service";
const LOCAL: &str = "multicluster.linkerd.io/local-discovery";

fn index(domain: &str) -> SharedIndex {
    let domain = domain.to_owned();
    SharedIndex::start(Cluster { cluster_domain: domain.clone(), trust_domain: domain, ..args::default_cluster() })
        .unwrap()
}

async fn apply(index: &SharedIndex, object: Value) {
    let read = manifest::parse("test.json".as_ref(), &object.to_string());
    assert!(read.errors.is_empty(), "{:?}", read.errors);
    let objects = read.objects.into_iter().map(|read| Event::Apply(Box::new(read.object)));
    index.apply(objects.collect()).await.unwrap();
}

fn service(name: &str, metadata: Value) -> Value {
    let mut object = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata,
        "spec": {"ports": [{"name": "http", "port": 80}]}});
    object["metadata"]["name"] = json!(name);
    object["metadata"]["namespace"] = json!("shop");
    object
}

/// A meshed pod and the slice with it alone.
async fn serve(index: &SharedIndex, service: &str, ip: &str) {
    let env = |name: &str| json!({"name": format!("LINKERD2_PROXY_{name}_LISTEN_ADDR"), "value": "0.0.0.0:4143"});
    apply(
        index,
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("{service}-1"), "namespace": "shop", "labels": {"linkerd.io/control-plane-ns": "linkerd"}},
            "spec": {"serviceAccountName": "web", "containers": [{"name": "linkerd-proxy",
                "env": [env("INBOUND"), env("ADMIN"), env("CONTROL")]}]},
            "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}}),
    )
    .await;
    apply(
        index,
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": format!("{service}-1"), "namespace": "shop", "labels": {"kubernetes.io/service-name": service}},
            "ports": [{"name": "http", "port": 8080}], "endpoints": [{"addresses": [ip],
                "targetRef": {"kind": "Pod", "name": format!("{service}-1"), "namespace": "shop"}}]}),
    )
    .await;
}

/// A cluster with Service `web` at one address.
async fn cluster(number: u64, ip: &str) -> LinkedCluster {
    let index = index("east.local");
    apply(&index, service("web", json!({}))).await;
    serve(&index, "web", ip).await;
    LinkedCluster { index, synced: true, number }
}

struct World {
    destination: Destination,
    drain: drain::Drain,
}

impl World {
    fn new() -> Self {
        let (drain, watch) = drain::Drain::new();
        let index = index("cluster.local");
        let metrics = Metrics::new().register(GrpcMetrics::new);
        let destination = Destination {
            answering: Answering { index, drain: watch, metrics },
            clusters: Clusters::none(),
            settings: EndpointSettings { http2: http2::DEFAULT.parse().unwrap(), zone_weights: false },
        };
        Self { destination, drain }
    }

    fn index(&self) -> &SharedIndex {
        &self.destination.answering.index
    }

    async fn get(&self, name: &str) -> Result<Client, Status> {
        self.get_port(name, 80).await
    }

    async fn get_port(&self, name: &str, port: u16) -> Result<Client, Status> {
        let path = format!("{name}.shop.svc.cluster.local:{port}");
        let query = EndpointsQuery { port, node: None, hostname: None };
        let frames = self.destination.endpoints(Asked { service: Key::new("shop", name), query, path }).await?;
        Ok(Client { frames: Box::pin(frames), pending: VecDeque::new() })
    }

    async fn delete(&self, name: &str) {
        let reference = ObjectRef { kind: Kind::Service, namespace: Some("shop".to_owned()), name: name.to_owned() };
        self.index().apply(vec![Event::Delete(reference)]).await.unwrap();
    }
}

struct Client {
    frames: Pin<Box<dyn futures::Stream<Item = Bytes> + Send>>,
    pending: VecDeque<Update>,
}

impl Client {
    async fn update(&mut self) -> Option<Update> {
        if self.pending.is_empty() {
            let frames = timeout(DEADLINE, self.frames.next()).await.expect("an update, or the end")?;
            self.pending.extend(updates(frames).await);
        }
        self.pending.pop_front()
    }

    /// The next update, as `+` and `-` with addresses; `end` at the end.
    async fn next(&mut self) -> String {
        let Some(update) = self.update().await else { return "end".to_owned() };
        let addr =
            |addr: weft_proto::linkerd::net::TcpAddress| std::net::SocketAddr::try_from(addr).unwrap().to_string();
        let parts: Vec<_> = match update.update.unwrap() {
            update::Update::Add(set) => {
                set.addrs.into_iter().map(|one| format!("+{}", addr(one.addr.unwrap()))).collect()
            }
            update::Update::Remove(set) => set.addrs.into_iter().map(|one| format!("-{}", addr(one))).collect(),
            update::Update::NoEndpoints(_) => vec!["none".to_owned()],
        };
        parts.join(" ")
    }

    /// Whether the client receives nothing.
    async fn is_silent(&mut self) -> bool {
        self.pending.is_empty() && timeout(SILENCE, self.frames.next()).await.is_err()
    }
}

#[tokio::test]
async fn a_linked_service_has_the_endpoints_and_identities_of_its_cluster() {
    let world = World::new();
    apply(world.index(), service("web-east", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
    let east = cluster(1, "10.1.0.1").await;
    world.destination.clusters.put("east", east.clone());
    let mut stream = world.get("web-east").await.unwrap();
    let first = stream.update().await.unwrap().update.unwrap();
    let update::Update::Add(set) = first else { panic!("{first:?}") };
    let identity = set.addrs[0].tls_identity.clone().unwrap().server_name.unwrap().name;
    assert_eq!(identity, "web.shop.serviceaccount.identity.linkerd.east.local");
    assert_eq!((set.metric_labels["service"].as_str(), set.metric_labels["namespace"].as_str()), ("web", "shop"));
    serve(&east.index, "web", "10.1.0.2").await;
    assert_eq!(stream.next().await, "+10.1.0.2:8080");
    assert_eq!(stream.next().await, "-10.1.0.1:8080");
    assert!(world.drain.drain(Duration::ZERO).await);
    assert_eq!(stream.next().await, "end");
}

#[tokio::test]
async fn a_linked_service_that_cannot_be_found_has_linkerds_codes() {
    let world = World::new();
    let local = world.index();
    apply(local, service("nameless", json!({"labels": {LABEL: "east"}}))).await;
    apply(local, service("web-east", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
    let code = async |name: &str| {
        let answer = world.get(name).await;
        answer.map(drop).map_err(|status| (status.code(), status.message().to_owned()))
    };
    let (kind, message) = code("nameless").await.unwrap_err();
    assert_eq!(kind, Code::FailedPrecondition);
    assert!(message.contains("nameless.shop.svc.cluster.local:80"), "{message}");
    assert_eq!(code("web-east").await, Err((Code::NotFound, "Remote cluster not found: east".to_owned())));
    let east = cluster(1, "10.1.0.1").await;
    let mut external = service("web", json!({}));
    external["spec"] = json!({"type": "ExternalName", "externalName": "example.org"});
    apply(&east.index, external).await;
    world.destination.clusters.put("east", east);
    assert_eq!(code("web-east").await.unwrap_err().0, Code::InvalidArgument);
    world.destination.clusters.put("east", cluster(2, "10.1.0.1").await);
    assert_eq!(code("web-east").await, Ok(()));
}

#[tokio::test]
async fn clients_try_again_while_the_clusters_are_not_known() {
    let mut world = World::new();
    world.destination.clusters = Clusters::new();
    apply(world.index(), service("web-east", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
    assert_eq!(world.get("web-east").await.map(drop).unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn a_linked_services_stream_waits_for_its_cluster_and_ends_with_it() {
    let world = World::new();
    let clusters = &world.destination.clusters;
    apply(world.index(), service("web-east", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
    let east = cluster(1, "10.1.0.1").await;
    clusters.put("east", LinkedCluster { synced: false, ..east.clone() });
    let mut stream = world.get("web-east").await.unwrap();
    assert!(stream.is_silent().await, "its objects are not complete");
    clusters.put("east", east);
    assert_eq!(stream.next().await, "+10.1.0.1:8080");
    // A new index of the same cluster, after its Secret changed.
    clusters.put("east", cluster(2, "10.1.0.1").await);
    assert!(stream.is_silent().await, "nothing differs");
    clusters.put("east", cluster(3, "10.1.0.9").await);
    assert_eq!(stream.next().await, "+10.1.0.9:8080");
    assert_eq!(stream.next().await, "-10.1.0.1:8080");
    clusters.remove("west");
    assert!(stream.is_silent().await);
    clusters.remove("east");
    assert_eq!(stream.next().await, "end");
}

#[tokio::test]
async fn a_stream_ends_when_the_service_is_found_in_another_way() {
    let world = World::new();
    let local = world.index();
    world.destination.clusters.put("east", cluster(1, "10.1.0.1").await);
    for labels in [json!({}), json!({LABEL: "west", NAME: "web"}), json!({LABEL: "east", NAME: "api"})] {
        apply(local, service("web-east", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
        let mut stream = world.get("web-east").await.unwrap();
        assert_eq!(stream.next().await, "+10.1.0.1:8080");
        apply(local, service("web-east", json!({"labels": labels}))).await;
        assert_eq!(stream.next().await, "end", "{labels}");
    }
    apply(local, service("web-east", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
    let mut stream = world.get("web-east").await.unwrap();
    assert_eq!(stream.next().await, "+10.1.0.1:8080");
    world.delete("web-east").await;
    assert_eq!(stream.next().await, "end");
}

fn federated(local: &str, linked: &str) -> Value {
    service("web-federated", json!({"annotations": {LOCAL: local, LABEL: linked}}))
}

#[tokio::test]
async fn a_federated_service_has_the_endpoints_of_its_members() {
    let world = World::new();
    let (local, clusters) = (world.index(), &world.destination.clusters);
    apply(local, service("web", json!({}))).await;
    serve(local, "web", "10.0.0.1").await;
    apply(local, federated("web", "web@east,web@west")).await;
    clusters.put("east", cluster(1, "10.1.0.1").await);
    let mut stream = world.get("web-federated").await.unwrap();
    assert_eq!(stream.next().await, "+10.0.0.1:8080");
    assert_eq!(stream.next().await, "+10.1.0.1:8080");
    clusters.put("west", cluster(2, "10.2.0.1").await);
    assert_eq!(stream.next().await, "+10.2.0.1:8080", "a cluster that is linked later");
    clusters.remove("east");
    assert_eq!(stream.next().await, "-10.1.0.1:8080", "one that is no longer");
    apply(local, federated("", "web@west")).await;
    assert_eq!(stream.next().await, "-10.0.0.1:8080", "a member that leaves");
    apply(local, federated("web", "web@west")).await;
    assert_eq!(stream.next().await, "+10.0.0.1:8080", "one that joins");
    apply(local, federated("web", "none@west,web")).await;
    assert_eq!(stream.next().await, "-10.2.0.1:8080", "one that does not exist, and one that cannot be read");
    assert!(stream.is_silent().await);
    apply(local, service("web-federated", json!({}))).await;
    assert_eq!(stream.next().await, "end");
}

#[tokio::test]
async fn members_are_asked_side_by_side() {
    let world = World::new();
    let (east, west) = (cluster(1, "10.1.0.1").await, cluster(2, "10.2.0.1").await);
    world.destination.clusters.put("east", east.clone());
    world.destination.clusters.put("west", west.clone());
    apply(world.index(), federated("", "web@east,web@west")).await;
    // The first member answers only after the second one was asked.
    let (started_tx, started) = tokio::sync::oneshot::channel();
    let (go, wait) = std::sync::mpsc::channel();
    let held = tokio::spawn(async move {
        let question = move |_: &mut Index| {
            started_tx.send(()).unwrap();
            wait.recv().unwrap();
        };
        east.index.ask(question).await
    });
    started.await.unwrap();
    let released = tokio::spawn(async move {
        while west.index.ask(|index| index.statistics().endpoints.is_empty()).await.unwrap() {
            tokio::task::yield_now().await;
        }
        go.send(()).unwrap();
    });
    let mut stream = world.get("web-federated").await.unwrap();
    assert_eq!([stream.next().await, stream.next().await], ["+10.1.0.1:8080", "+10.2.0.1:8080"]);
    held.await.unwrap().unwrap();
    released.await.unwrap();
}

#[tokio::test]
async fn a_federated_services_stream_ends_with_the_service() {
    let world = World::new();
    apply(world.index(), federated("web", "")).await;
    let mut stream = world.get("web-federated").await.unwrap();
    assert!(stream.is_silent().await);
    world.delete("web-federated").await;
    assert_eq!(stream.next().await, "end");
}

#[tokio::test]
async fn a_members_subscription_that_its_index_ends_is_started_anew() {
    let world = World::new();
    let local = world.index();
    apply(local, service("web", json!({}))).await;
    serve(local, "web", "10.0.0.1").await;
    apply(local, federated("web", "")).await;
    let mut stream = world.get("web-federated").await.unwrap();
    assert_eq!(stream.next().await, "+10.0.0.1:8080");
    // The client's place counts from here on, which ends its subscription; it has no node.
    let mut here = service("web", json!({}));
    here["spec"]["internalTrafficPolicy"] = json!("Local");
    apply(local, here).await;
    assert_eq!(stream.next().await, "-10.0.0.1:8080");
    apply(local, service("web", json!({}))).await;
    assert_eq!(stream.next().await, "+10.0.0.1:8080");
}

#[tokio::test]
async fn a_stream_of_a_service_here_ends_when_its_endpoints_are_elsewhere() {
    let world = World::new();
    apply(world.index(), service("web", json!({}))).await;
    serve(world.index(), "web", "10.0.0.1").await;
    let mut stream = world.get("web").await.unwrap();
    assert_eq!(stream.next().await, "+10.0.0.1:8080");
    apply(world.index(), service("web", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
    assert_eq!(stream.next().await, "end");
}

#[tokio::test]
async fn ports_of_a_linked_service_that_it_does_not_declare_are_bounded_in_its_cluster() {
    let world = World::new();
    apply(world.index(), service("web-east", json!({"labels": {LABEL: "east", NAME: "web"}}))).await;
    world.destination.clusters.put("east", cluster(1, "10.1.0.1").await);
    let mut streams = Vec::new();
    let refused = loop {
        let port = 9000 + u16::try_from(streams.len()).unwrap();
        match world.get_port("web-east", port).await {
            Ok(mut stream) => {
                assert_eq!(stream.next().await, format!("+10.1.0.1:{port}"));
                streams.push(stream);
            }
            Err(status) => break status,
        }
    };
    assert_eq!((refused.code(), streams.len()), (Code::ResourceExhausted, 8));
    assert_eq!(world.get("web-east").await.unwrap().next().await, "+10.1.0.1:8080", "one that it declares");
}

/// A client has dozens of streams for as long as it lives, and thousands of clients may ask at once.
#[tokio::test]
async fn streams_and_requests_that_wait_take_little_memory() {
    let world = World::new();
    apply(world.index(), service("web", json!({}))).await;
    let path = "web.shop.svc.cluster.local:80".to_owned();
    let query = EndpointsQuery { port: 80, node: None, hostname: None };
    let asked = Asked { service: Key::new("shop", "web"), query, path };
    let stream = world.destination.endpoints(asked).await.unwrap();
    assert!(size_of_val(&stream) <= 400, "a stream: {} bytes", size_of_val(&stream));
    let request = http::Request::new(http_body_util::Full::new(Bytes::new()));
    let waiting = world.destination.clone().call(request);
    assert!(size_of_val(&waiting) <= 2048, "a request: {} bytes", size_of_val(&waiting));
}
