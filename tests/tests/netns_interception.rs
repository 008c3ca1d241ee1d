//! Interception by itself, with a copy-only program in place of the proxy: the answers of SO_ORIGINAL_DST, and the same
//! program behind linkerd-init's rules and behind the agent's programs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use weft_examples::client::Report;
use weft_passthrough::{Connection, Direction};
use weft_test_kit::{
    binaries,
    manifests::Manifests,
    mesh::{ControlPlane, Interception, Mesh, Options, Pod, Shared, unique_name},
    observe,
    wait::eventually,
};

/// Time limit for a started application to listen.
const SERVES_WITHIN: Duration = Duration::from_secs(60);

static EBPF: Shared = Shared::with(|| passthrough("t-ebpf", Interception::Ebpf));
static IPTABLES: Shared = Shared::with(|| passthrough("t-iptables", Interception::Iptables));

const PODS: &str = "
apiVersion: v1
kind: Namespace
metadata:
  name: shop
  annotations:
    linkerd.io/inject: enabled
---
apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: shop
spec:
  containers:
    - name: web
      image: weft.io/examples
      command: [weft-echo, --http, '8080', --banner, '9000']
---
apiVersion: v1
kind: Pod
metadata:
  name: client
  namespace: shop
spec:
  containers:
    - name: client
      image: weft.io/examples
      command: [weft-client, wait]
";

fn passthrough(name: &str, interception: Interception) -> (Manifests, Options) {
    let manifests = Manifests::empty().unwrap();
    manifests.write("pods.yaml", PODS).unwrap();
    let options = Options {
        name: unique_name(name),
        interception,
        proxy: Some(binaries::directory().unwrap().join("weft-passthrough")),
        control_plane: ControlPlane::None,
        ..Options::default()
    };
    (manifests, options)
}

/// Sends requests that an application must answer without seeing the client's proxy.
async fn answered(mesh: &Mesh, arguments: &[&str]) -> Report {
    let report = mesh.load("shop", "client", arguments).await.unwrap();
    assert!(report.requests > 0 && report.failures == 0, "{report:?}");
    assert!(report.peer_addr_ok, "{report:?}");
    report
}

/// The records of a pod's proxy about connections to an address.
async fn seen(mesh: &Mesh, pod: &str, direction: Direction, original: &str) -> Vec<Connection> {
    let json = mesh.admin("shop", pod, "/connections").await.unwrap();
    let all: Vec<Connection> = serde_json::from_str(&json).unwrap();
    assert!(all.iter().all(|connection| connection.original.is_ok()), "{all:?}");
    let matching =
        |connection: &Connection| connection.direction == direction && connection.original.as_deref() == Ok(original);
    all.into_iter().filter(matching).collect()
}

/// Both pods, once the application answers: without probes, its pod is ready when its process has started.
async fn pods(mesh: &Mesh) -> (Pod, Pod) {
    let (client, web) = (mesh.pod("shop", "client").await.unwrap(), mesh.pod("shop", "web").await.unwrap());
    for (protocol, port) in [("http1", 8080), ("banner", 9000)] {
        let target = format!("{}:{port}", web.ip);
        eventually("an application that serves", SERVES_WITHIN, async || {
            let report = mesh.load("shop", "client", &[protocol, "--target", &target, "--count", "1"]).await.unwrap();
            if report.failures == 0 { Ok(()) } else { Err(format!("{report:?}")) }
        })
        .await;
    }
    (client, web)
}

/// Both proxies get the original destination and the source of an IPv4 connection.
async fn check_v4(mesh: &Mesh, arguments: &[&str], port: u16) {
    let (client, web) = pods(mesh).await;
    let target = format!("{}:{port}", web.ip);
    let mut arguments = arguments.to_vec();
    arguments.extend(["--target", &target, "--count", "3", "--fresh"]);
    answered(mesh, &arguments).await;
    for (pod, direction) in [("client", Direction::Outbound), ("web", Direction::Inbound)] {
        let connections = seen(mesh, pod, direction, &target).await;
        assert!(connections.len() >= 3, "{pod}: {connections:?}");
        for connection in connections {
            assert!(connection.peer.contains(&client.ip), "the proxy's peer is the client's pod: {connection:?}");
        }
    }
}

#[test]
fn ebpf_answers_the_original_ipv4_destination() {
    EBPF.test(async |mesh| check_v4(mesh, &["http1"], 8080).await);
}

#[test]
fn iptables_answers_the_original_ipv4_destination() {
    IPTABLES.test(async |mesh| check_v4(mesh, &["http1"], 8080).await);
}

#[test]
fn ebpf_answers_the_original_destination_of_ipv4_through_an_ipv6_socket() {
    EBPF.test(async |mesh| check_v4(mesh, &["banner", "--mapped"], 9000).await);
}

#[test]
fn iptables_answers_the_original_destination_of_ipv4_through_an_ipv6_socket() {
    IPTABLES.test(async |mesh| check_v4(mesh, &["banner", "--mapped"], 9000).await);
}

/// A connection to an IPv6 destination reaches the proxy over IPv6.
#[test]
fn ebpf_answers_the_original_ipv6_destination() {
    EBPF.test(async |mesh| {
        let (client, web) = pods(mesh).await;
        let target = format!("[{}]:8080", web.ipv6.expect("pods have an IPv6 address"));
        answered(mesh, &["http1", "--target", &target, "--count", "3", "--fresh"]).await;
        let connections = seen(mesh, "client", Direction::Outbound, &target).await;
        assert!(connections.len() >= 3, "{connections:?}");
        let own = client.ipv6.expect("pods have an IPv6 address");
        assert!(connections.iter().all(|connection| connection.peer.contains(&own)), "{connections:?}");
    });
}

#[test]
fn ebpf_leaves_no_netfilter_state_in_pods() {
    EBPF.test(async |mesh| {
        check_v4(mesh, &["http1"], 8080).await;
        let (client, web) = pods(mesh).await;
        for pod in [client, web] {
            assert_eq!(observe::netfilter(&pod.netns).unwrap(), observe::Netfilter::default(), "{}", pod.name);
        }
    });
}

/// The opposite: the same inspection of the same pods finds the netfilter state that iptables interception needs.
#[test]
fn iptables_leaves_rules_and_tracked_connections_in_pods() {
    IPTABLES.test(async |mesh| {
        check_v4(mesh, &["http1"], 8080).await;
        let (client, web) = pods(mesh).await;
        for pod in [client, web] {
            let state = observe::netfilter(&pod.netns).unwrap();
            assert!(state.rules > 0 && state.conntrack > 0, "{}: {state:?}", pod.name);
        }
    });
}
