//! Pods of Linkerd move from their own iptables rules to the agent, and back, while requests run.
//!
//! Their proxy copies bytes and notes what the kernel says about each connection, so that only the redirection is
//! tested, and its origin is seen: REDIRECT changes the destination of an inbound connection, and the agent does not.

use std::{thread, time::Duration};

use anyhow::ensure;
use serde_json::{Value, json};
use weft_passthrough::{Connection, Direction};
use weft_test_kit::binaries;
use weft_tests::cluster::Load;

use crate::world::World;

const NAMESPACE: &str = "migrating";
const PROGRAMS: &str = "/programs";
const APPLICATION_PORT: u16 = 8080;
/// Load before and after a change: longer than a connection of a client lasts.
const AROUND: Duration = Duration::from_secs(2);

/// linkerd-init's rules with the injector's default arguments (linkerd2-proxy-init, pkg/iptables/iptables.go).
const RULES: &str = "\
*nat
:PROXY_INIT_REDIRECT - [0:0]
:PROXY_INIT_OUTPUT - [0:0]
-A PROXY_INIT_REDIRECT -p tcp -m multiport --dports 4190,4191,4567,4568 -j RETURN
-A PROXY_INIT_REDIRECT -p tcp -j REDIRECT --to-port 4143
-A PROXY_INIT_OUTPUT -m owner --uid-owner 2102 -j RETURN
-A PROXY_INIT_OUTPUT -o lo -j RETURN
-A PROXY_INIT_OUTPUT -p tcp -m multiport --dports 4567,4568 -j RETURN
-A PROXY_INIT_OUTPUT -p tcp -j REDIRECT --to-port 4140
-A PREROUTING -j PROXY_INIT_REDIRECT
-A OUTPUT -j PROXY_INIT_OUTPUT
COMMIT
";

/// What an injected pod has for its redirection: stock Linkerd decides by its value `cniEnabled`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Redirected {
    /// `linkerd-init`.
    ByIptables,
    /// `linkerd-network-validator`, which waits for the node's redirection.
    ByTheNode,
}

/// An application before there is an agent.
pub(super) struct Migration {
    /// Of each client, new connections to `web`, which migrates, and one connection to `kept`, which does not.
    loads: Vec<[Load; 2]>,
}

impl Migration {
    /// Starts the application, every pod with iptables rules, and the load. Requires nodes on this host: its pods run
    /// programs of this host.
    pub(super) fn start(world: &World) -> Self {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}}});
        world.cluster.apply(&namespace.to_string()).unwrap();
        for (name, replicas) in [("web", 2), ("kept", 1), ("client", 1)] {
            apply(world, name, replicas, Redirected::ByIptables);
        }
        rolled_out(world, &["web", "kept", "client"]);
        for target in ["web:80", "kept:80"] {
            answers(world, target);
        }
        let mut migration = Self { loads: vec![start_loads(world, "client")] };
        migration.begin("before there is an agent");
        thread::sleep(AROUND);
        arrive_at(world, "4143", "REDIRECT changes the destination");
        migration
    }

    /// Names what happens from now on, for the loads' reports.
    pub(super) fn begin(&mut self, phase: &str) {
        self.loads.iter_mut().flatten().for_each(|load| load.begin(phase).unwrap());
    }

    /// Once the agent is there: `web` and a second client are restarted as with `cniEnabled`, and `web` once more as
    /// before.
    pub(super) fn there_and_back(&mut self, world: &World) {
        self.begin("the application moves to the agent");
        apply(world, "web", 2, Redirected::ByTheNode);
        apply(world, "moved", 1, Redirected::ByTheNode);
        rolled_out(world, &["web", "moved"]);
        self.loads.push(start_loads(world, "moved"));
        self.begin("all but one client have moved");
        thread::sleep(AROUND);
        arrive_at(world, "8080", "only the agent redirects");
        self.begin("the application moves back");
        apply(world, "web", 2, Redirected::ByIptables);
        rolled_out(world, &["web"]);
        self.begin("the application has moved back");
        thread::sleep(AROUND);
        // This client has no rules: without an agent it goes around its proxy.
        self.loads.pop().into_iter().for_each(finish);
    }

    /// Once the agent is gone.
    pub(super) fn finish(mut self, world: &World) {
        self.begin("the agent is gone");
        thread::sleep(AROUND);
        self.loads.into_iter().for_each(finish);
        arrive_at(world, "4143", "iptables redirect");
        world.cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]).unwrap();
    }
}

/// Waits until the node knows the way to a Service: its pods are ready some milliseconds earlier.
fn answers(world: &World, target: &str) {
    let pod = world.cluster.pod(NAMESPACE, "app=client").unwrap();
    let answered = world.cluster.until(Duration::from_secs(30), |cluster| {
        let report = cluster.client(NAMESPACE, &pod, &["http1", "--target", target, "--count", "5", "--fresh"])?;
        ensure!(report.failures == 0, "{target}: {:?}", report.failed);
        Ok(())
    });
    answered.unwrap();
}

fn start_loads(world: &World, client: &str) -> [Load; 2] {
    let pod = world.cluster.pod(NAMESPACE, &format!("app={client}")).unwrap();
    let start = |target: &str, more: &[&str]| {
        let load = ["http1", "--target", target, "--until-eof", "--pause", "10ms", "--timeout", "5s"];
        world.cluster.start_client(NAMESPACE, &pod, &[&load[..], more].concat()).unwrap()
    };
    [start("web:80", &["--fresh", "--concurrency", "2"]), start("kept:80", &[])]
}

fn finish(loads: [Load; 2]) {
    for (load, least) in loads.into_iter().zip([100, 1]) {
        let report = load.report().unwrap();
        println!("    {} requests, {} connections, {} failures", report.requests, report.connections, report.failures);
        assert_eq!(report.failures, 0, "{:#?}", report.failed);
        assert!(report.requests > 100 && report.connections >= least, "{report:?}");
        // The server's proxy connects to it, not the client.
        let around = report.seen_peer_ips.iter().any(|seen| report.local_ips.contains(seen));
        assert!(!around, "around a proxy: {:?} saw {:?}", report.seen_peer_ips, report.local_ips);
    }
}

/// Waits for inbound connections of `web`, all of which must have arrived at this port. On a busy machine a load starts
/// seconds later than its command.
fn arrive_at(world: &World, port: &str, why: &str) {
    let arrived = world.cluster.until(Duration::from_secs(60), |_| {
        let ports = listeners(world, "web");
        ensure!(!ports.is_empty(), "no connection yet");
        Ok(ports)
    });
    assert_eq!(arrived.unwrap(), [port], "{why}");
}

/// The ports at which inbound connections arrived, according to the proxies of an application.
fn listeners(world: &World, app: &str) -> Vec<String> {
    let connections = connections(world, app);
    let inbound = connections.iter().flatten().filter(|connection| connection.direction == Direction::Inbound);
    let mut ports: Vec<_> = inbound
        .map(|connection| {
            let original = connection.original.as_deref();
            assert!(original.is_ok_and(|original| original.ends_with(":8080")), "{connection:?}");
            connection.local.rsplit(':').next().unwrap_or_default().to_owned()
        })
        .collect();
    ports.sort();
    ports.dedup();
    ports
}

/// The last connections of each pod's proxy.
fn connections(world: &World, app: &str) -> Vec<Vec<Connection>> {
    let pods = world.cluster.pods(NAMESPACE, &format!("app={app}")).unwrap();
    pods.iter().map(|pod| connections_of(world, NAMESPACE, pod)).collect()
}

/// The last connections of a pod's proxy.
pub(super) fn connections_of(world: &World, namespace: &str, pod: &str) -> Vec<Connection> {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:4191/proxy/connections");
    serde_json::from_str(&world.cluster.kubectl(&["get", "--raw", &path]).unwrap()).unwrap()
}

fn rolled_out(world: &World, names: &[&str]) {
    names.iter().for_each(|name| world.cluster.rolled_out(NAMESPACE, &format!("deploy/{name}")).unwrap());
}

fn apply(world: &World, name: &str, replicas: u32, redirected: Redirected) {
    let labels = json!({"app": name, "linkerd.io/control-plane-ns": "linkerd", "linkerd.io/workload-ns": NAMESPACE});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment",
    "metadata": {"name": name, "namespace": NAMESPACE},
    "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"app": name}},
        "strategy": {"rollingUpdate": {"maxSurge": replicas}},
        "template": {
            "metadata": {"labels": labels, "annotations": {"linkerd.io/inject": "enabled"}},
            "spec": pod(redirected, &[application(name)]),
        },
    }});
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": APPLICATION_PORT}]}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [deployment, service]});
    world.cluster.apply(&list.to_string()).unwrap();
}

/// A client, or a server that clients send requests to.
fn application(name: &str) -> Value {
    if ["client", "moved"].contains(&name) {
        return container("client", 65534, &["/weft-client", "wait"]);
    }
    let mut server = container("server", 65534, &["/weft-echo", "--http", &APPLICATION_PORT.to_string()]);
    let health = json!({"path": "/healthz", "port": APPLICATION_PORT});
    server["readinessProbe"] = json!({"httpGet": health, "periodSeconds": 1, "timeoutSeconds": 5});
    // Clients learn later than the pod that it is terminating.
    server["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 3}}});
    server
}

/// A container with programs of this host, in a pod of [`pod`].
pub(super) fn container(name: &str, user: u32, command: &[&str]) -> Value {
    json!({
        "name": name, "image": "localhost/weft-examples:0.1.0", "imagePullPolicy": "IfNotPresent",
        "command": command, "securityContext": {"runAsUser": user, "runAsGroup": user},
        "volumeMounts": [{"name": "programs", "mountPath": PROGRAMS, "readOnly": true}],
    })
}

/// The spec of a pod with Linkerd's containers in its order, the proxy as native sidecar. Requires nodes on this host.
pub(super) fn pod(redirected: Redirected, applications: &[Value]) -> Value {
    let programs = binaries::directory().unwrap();
    let program = format!("{PROGRAMS}/weft-passthrough");
    let first = match redirected {
        Redirected::ByIptables => {
            // The node's iptables, in the pod's network namespace.
            let script = format!("iptables-nft-restore --wait <<END\n{RULES}END\n");
            let command = ["/node/usr/sbin/chroot", "/node", "/bin/sh", "-ec", &script];
            let mut init = container("linkerd-init", 0, &command);
            init["securityContext"]["capabilities"] = json!({"add": ["NET_ADMIN", "NET_RAW", "SYS_CHROOT"]});
            init["volumeMounts"] = json!([{"name": "node", "mountPath": "/node", "readOnly": true}]);
            init
        }
        Redirected::ByTheNode => {
            container("linkerd-network-validator", 65534, &[&program, "--validate", "1.1.1.1:20001"])
        }
    };
    let mut proxy = container("linkerd-proxy", 2102, &[&program]);
    proxy["restartPolicy"] = json!("Always");
    let ready = json!({"httpGet": {"path": "/ready", "port": 4191}, "periodSeconds": 1, "failureThreshold": 60});
    proxy["startupProbe"] = ready;
    json!({
        "terminationGracePeriodSeconds": 10,
        "initContainers": [first, proxy],
        "containers": applications,
        "volumes": [
            {"name": "programs", "hostPath": {"path": programs, "type": "Directory"}},
            {"name": "node", "hostPath": {"path": "/", "type": "Directory"}},
        ],
    })
}
