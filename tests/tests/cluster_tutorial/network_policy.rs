//! NetworkPolicies beside the mesh: the ports that they have to admit in both transport modes, what a client gets that
//! they refuse, and a control plane behind the policies of its own chart. The cluster's network plugin enforces them,
//! or kube-router where the nodes are on this host. Where nothing does, the check is left out.

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use weft_test_kit::check::catch;
use weft_tests::report::assert_vouched_for;

use crate::{
    kube_router::KubeRouter,
    requirement::{Requirement, leave_out},
    workloads::{POD, PORT, requests, server, wait_for},
    world::{MESH, SHOP, World},
};

/// The inbound port of proxies: with transport headers, they connect to this port of each other.
const INBOUND: u16 = 4143;
/// The port of the destination controller's metrics.
const METRICS: u16 = 9996;
/// The name of the egress policy.
const EGRESS: &str = "egress";

/// The clients. All but [`PLAIN`] are meshed.
const ALLOWED: &str = "allowed";
const STRANGER: &str = "stranger";
const CONFINED: &str = "confined";
const PLAIN: &str = "plain";

/// A namespace with a meshed server, clients of it, and policies that were there before them.
struct Fixture<'a> {
    world: &'a World,
    namespace: &'static str,
    /// The server's Service.
    server: String,
}

/// In both transport modes, policies hold for meshed pods, and the mesh works behind them.
pub(super) fn enforced(world: &mut World) {
    let world = &*world;
    let part = "kube-router, which enforces NetworkPolicies";
    let kube_router = Requirement::LocalNodes.allows(part, &world.cluster).then(|| KubeRouter::start(&world.cluster));

    let fixture = Fixture::start(world, "fenced");
    match fixture.wait_until_in_force() {
        Err(error) if kube_router.is_none() => {
            leave_out("NetworkPolicies", &format!("nothing in this cluster enforces them: {error:#}"));
            return fixture.end();
        }
        in_force => in_force.unwrap(),
    }
    // Proxies connect to a port that the policy does not admit yet.
    fixture.assert_refused(ALLOWED, &fixture.server);
    fixture.admit(&[PORT, INBOUND]);
    fixture.assert_policies_hold(kube_router.as_ref());
    fixture.end();

    assert!(connects_to_metrics(world).unwrap(), "metrics are not served");
    let release = world.upgrade_and_wait(&[
        "--set",
        "networkPolicy.enabled=true",
        "--set",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=ops",
        "--set",
        "proxy.outboundTransportMode=transparent",
    ]);
    let checked = catch(|| transparent_behind_the_charts_policies(world, kube_router.as_ref()));
    // Later checks are of the mesh as it was.
    world.roll_back_and_wait(&release);
    checked.unwrap_or_else(|error| panic!("{error}"));
}

fn transparent_behind_the_charts_policies(world: &World, kube_router: Option<&KubeRouter<'_>>) {
    let refused = world.cluster.until(POD, |_| {
        ensure!(!connects_to_metrics(world)?, "metrics are served to every client");
        Ok(())
    });
    refused.unwrap();
    // The upgrade replaced the other two components.
    world.cluster.kubectl(&["-n", MESH, "rollout", "restart", "deploy/linkerd-identity"]).unwrap();
    world.cluster.rolled_out(MESH, "deploy/linkerd-identity").unwrap();
    let fixture = Fixture::start(world, "fenced-transparent");
    fixture.wait_until_in_force().unwrap();
    fixture.assert_policies_hold(kube_router);
    fixture.end();
}

impl<'a> Fixture<'a> {
    /// Starts the pods under policies of which one admits the server's own port alone.
    fn start(world: &'a World, namespace: &'static str) -> Self {
        let fixture = Self { world, namespace, server: format!("server.{namespace}:80") };
        let metadata = json!({"name": namespace, "annotations": {"linkerd.io/inject": "enabled"}});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        world.cluster.apply(&object.to_string()).unwrap();
        fixture.admit(&[PORT]);
        world.cluster.apply(&egress_policy(namespace).to_string()).unwrap();
        let service = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "server", "namespace": namespace},
            "spec": {"selector": {"app": "server"}, "ports": [{"name": "http", "port": 80, "targetPort": PORT}]}});
        let items = [
            service,
            pod(namespace, "server", &json!({"app": "server"})),
            pod(namespace, ALLOWED, &json!({"access": "granted"})),
            pod(namespace, STRANGER, &json!({"access": "none"})),
            pod(namespace, CONFINED, &json!({"access": "granted", "egress": "confined"})),
            pod(namespace, PLAIN, &json!({"access": "granted"})),
        ];
        world.cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()).unwrap();
        let ready = ["-n", namespace, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=120s"];
        world.cluster.kubectl(&ready).unwrap();
        fixture
    }

    /// Allows ingress to these ports of the server from pods with a label. The policy denies all other ingress.
    fn admit(&self, ports: &[u16]) {
        let ports: Vec<_> = ports.iter().map(|port| json!({"protocol": "TCP", "port": port})).collect();
        let from = json!([{"podSelector": {"matchLabels": {"access": "granted"}}}]);
        let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "server", "namespace": self.namespace},
            "spec": {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
                "ingress": [{"from": from, "ports": ports}]}});
        self.world.cluster.apply(&policy.to_string()).unwrap();
    }

    /// Waits until the server's policy is in force, by clients without a proxy, whose connections are all new. No other
    /// client may send a request before: its proxy's connection would remain.
    fn wait_until_in_force(&self) -> anyhow::Result<()> {
        self.wait_until_answered(PLAIN, &self.server);
        let outside = self.world.client("outside");
        self.world.cluster.until(POD, |_| {
            let report = requests(self.world, "outside", &outside, &self.server, 1)?;
            ensure!(report.failures == 1, "a client of another namespace is answered: {report:?}");
            Ok(())
        })
    }

    /// The policies refuse what they do not admit, and nothing else, until they are deleted.
    fn assert_policies_hold(&self, kube_router: Option<&KubeRouter<'_>>) {
        let web = format!("web.{SHOP}:80");
        self.wait_until_answered(ALLOWED, &self.server);
        self.assert_refused(STRANGER, &self.server);
        if let Some(kube_router) = kube_router {
            kube_router.wait_until_enforced(EGRESS, self.namespace, CONFINED);
        }
        self.wait_until_answered(CONFINED, &self.server);
        self.assert_refused(CONFINED, &web);
        self.wait_until_answered(STRANGER, &web);
        self.assert_ready();
        self.world.cluster.kubectl(&["-n", self.namespace, "delete", "networkpolicies", "--all"]).unwrap();
        self.wait_until_answered(STRANGER, &self.server);
        self.wait_until_answered(CONFINED, &web);
        wait_for(self.world, "outside", &self.world.client("outside"), &self.server);
    }

    /// Waits until a client is answered: by mutual TLS, if it is meshed.
    fn wait_until_answered(&self, client: &str, target: &str) {
        let report = self.world.cluster.until(POD, |_| {
            let report = requests(self.world, self.namespace, client, target, 3)?;
            ensure!(report.failures == 0, "{client} to {target}: {report:?}");
            Ok(report)
        });
        let report = report.unwrap();
        if client == PLAIN {
            assert!(report.by_client_id.is_empty(), "{report:?}");
        } else {
            let identity = format!("default.{}.serviceaccount.identity.linkerd.cluster.local", self.namespace);
            assert_vouched_for(&report, &identity);
        }
    }

    /// The proxy of a client finds no endpoint that takes its connections, and answers that.
    fn assert_refused(&self, client: &str, target: &str) {
        // One request: each takes as long as a proxy waits for an endpoint.
        let report = requests(self.world, self.namespace, client, target, 1).unwrap();
        let errors: Vec<_> = report.errors.keys().map(String::as_str).collect();
        assert_eq!((report.failures, &errors[..]), (1, &["status 504"][..]), "{client} to {target}: {report:?}");
    }

    /// The kubelet's probes of applications and proxies succeed: all pods are ready, and no container was restarted.
    fn assert_ready(&self) {
        let pods = self.world.cluster.get(&["-n", self.namespace, "pods"]).unwrap();
        for pod in pods["items"].as_array().unwrap() {
            let kinds = ["initContainerStatuses", "containerStatuses"];
            for status in kinds.iter().filter_map(|kind| pod["status"][kind].as_array()).flatten() {
                assert_eq!((&status["ready"], &status["restartCount"]), (&json!(true), &json!(0)), "{pod:#}");
            }
        }
    }

    fn end(&self) {
        self.world.cluster.kubectl(&["delete", "namespace", self.namespace, "--wait=false"]).unwrap();
    }
}

/// A pod that serves, and is a client of the others.
fn pod(namespace: &str, name: &str, labels: &Value) -> Value {
    let mut container = server();
    container["name"] = json!("client");
    let inject = if name == PLAIN { "disabled" } else { "enabled" };
    let annotations = json!({"linkerd.io/inject": inject});
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels, "annotations": annotations},
        "spec": {"containers": [container]}})
}

/// Confines pods with a label to the server, the control plane and DNS.
fn egress_policy(namespace: &str) -> Value {
    let all_of = |name: &str| json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}});
    let server = json!({"podSelector": {"matchLabels": {"app": "server"}}});
    let dns = ["UDP", "TCP"].map(|protocol| json!({"protocol": protocol, "port": 53}));
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": EGRESS, "namespace": namespace},
        "spec": {"podSelector": {"matchLabels": {"egress": "confined"}}, "policyTypes": ["Egress"],
            "egress": [{"to": [server, all_of(MESH)]}, {"to": [all_of("kube-system")], "ports": dns}]}})
}

/// Whether a client outside the mesh can connect to the metrics of the destination controller.
fn connects_to_metrics(world: &World) -> anyhow::Result<bool> {
    let pods = world.cluster.pods(MESH, "linkerd.io/control-plane-component=destination")?;
    let name = pods.first().context("no destination controller")?;
    let pod = world.cluster.get(&["-n", MESH, "pod", name])?;
    let target = format!("{}:{METRICS}", pod["status"]["podIP"].as_str().context("it has no address")?);
    let report = requests(world, "outside", &world.client("outside"), &target, 1)?;
    let is_unconnected = |error: &String| error.starts_with("connect: ") || error == "timed out";
    Ok(!report.errors.keys().any(is_unconnected))
}
