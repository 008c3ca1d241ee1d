//! Kinds of workloads beside Deployments, and many starts of pods: what they send travels by mutual TLS from the first
//! byte.

use std::{
    collections::BTreeSet,
    env,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use weft_examples::client::Report;
use weft_tests::report::assert_vouched_for;

use crate::{
    kernel,
    requirement::Requirement,
    wire::Wire,
    world::{CLIENT_ID, SHOP, World},
};

/// The workloads' namespace: meshed, and restricted by Pod Security.
pub(super) const NAMESPACE: &str = "workloads";
/// A meshed namespace whose Pod Security admits ports of the node.
pub(super) const EDGE: &str = "edge";
/// A namespace outside the mesh.
const PLAIN: &str = "plain";
/// A meshed namespace with addresses of both families.
const DUAL: &str = "dual";
/// The identity of its pods.
const DUAL_ID: &str = "default.dual.serviceaccount.identity.linkerd.cluster.local";
const HOST_PORT: u16 = 17_070;
/// A port that no other application has.
pub(super) const PORT: u16 = 7070;
pub(super) const SERVER: &str = "server.workloads:80";
/// The identity of pods without an account of their own.
const IDENTITY: &str = "default.workloads.serviceaccount.identity.linkerd.cluster.local";
const STARTS: &str = "WEFT_TEST_POD_STARTS";
/// Pods that are started when [`STARTS`] is not set: a pod takes about a second of a processor.
const FEW_STARTS: usize = 20;
/// Time limit for a pod to start and end, on a slow machine.
pub(super) const POD: Duration = Duration::from_secs(120);

/// Starts what the checks have in common.
pub(super) fn start(world: &World) {
    for (name, level) in [(NAMESPACE, "restricted"), (EDGE, "privileged")] {
        let metadata = json!({"name": name, "annotations": {"linkerd.io/inject": "enabled"},
            "labels": {"pod-security.kubernetes.io/enforce": level}});
        world
            .cluster
            .apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}).to_string())
            .unwrap();
    }
    let service = |name: &str, headless: bool| {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"selector": {"app": name}, "clusterIP": headless.then_some("None"),
                "ports": [{"name": "http", "port": if headless { PORT } else { 80 }, "targetPort": PORT}]}})
    };
    let replicated = |kind: &str, name: &str, replicas: u32| {
        let mut object = json!({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}},
                "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [server()]}}}});
        if kind == "StatefulSet" {
            object["spec"]["serviceName"] = json!(name);
            object["spec"]["podManagementPolicy"] = json!("Parallel");
            // Beside the HTTP probe: one that connects, and one that runs in the container.
            let container = &mut object["spec"]["template"]["spec"]["containers"][0];
            let command = json!(["/weft-client", "http1", "--target", format!("localhost:{PORT}"), "--count", "1"]);
            container["startupProbe"] = json!({"exec": {"command": command}, "periodSeconds": 1, "timeoutSeconds": 5,
                "failureThreshold": 60});
            container["livenessProbe"] = json!({"tcpSocket": {"port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5});
        }
        restricted(&mut object["spec"]["template"]["spec"]);
        object
    };
    let mut on_the_node = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "edge", "namespace": EDGE},
        "spec": {"containers": [server()]}});
    on_the_node["spec"]["containers"][0]["ports"] = json!([{"containerPort": PORT, "hostPort": HOST_PORT}]);
    let scheduled = json!({"apiVersion": "batch/v1", "kind": "CronJob",
        "metadata": {"name": "scheduled", "namespace": NAMESPACE},
        "spec": {"schedule": "* * * * *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": job(1)}}});
    let items = [
        service("server", false),
        replicated("Deployment", "server", 1),
        service("database", true),
        replicated("StatefulSet", "database", 2),
        on_the_node,
        scheduled,
    ];
    world.cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()).unwrap();
    world.cluster.rolled_out(NAMESPACE, "deploy/server").unwrap();
    world.cluster.rolled_out(NAMESPACE, "sts/database").unwrap();
}

/// Sends `count` requests from a pod, each on a connection of its own.
pub(super) fn requests(world: &World, namespace: &str, pod: &str, target: &str, count: u32) -> anyhow::Result<Report> {
    let arguments = ["http1", "--target", target, "--count", &count.to_string(), "--fresh"];
    world.cluster.client(namespace, pod, &arguments)
}

/// Waits until a pod reaches the target.
pub(super) fn wait_for(world: &World, namespace: &str, pod: &str, target: &str) {
    let reached = world.cluster.until(POD, |_| {
        let report = requests(world, namespace, pod, target, 1)?;
        ensure!(report.failures == 0, "{target}: {report:?}");
        Ok(())
    });
    reached.unwrap();
}

/// Whether pods outside the mesh get plaintext is their Service's to say, at any time, or its namespace's when the
/// Service is created.
pub(super) fn mutual_tls_is_required(world: &mut World) {
    const REQUIRES: &str = weft_k8s_api::labels::REQUIRE_MTLS;
    let service = |name: &str, headless: bool, annotations: Value| {
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": PLAIN, "annotations": annotations},
            "spec": {"selector": {"app": "server"}, "clusterIP": headless.then_some("None"),
                "ports": [{"name": "http", "port": PORT}]}})
    };
    // Of no pod: a pod's address requires what any of its Services requires.
    let mut inherits = service("inherits", false, json!({}));
    inherits["spec"]["selector"]["app"] = json!("nobody");
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": PLAIN, "annotations": {REQUIRES: "true"}}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "server", "namespace": PLAIN, "labels": {"app": "server"}},
        "spec": {"containers": [server()]}});
    let own = json!({REQUIRES: "false"});
    let services = [service("balanced", false, own.clone()), service("headless", true, own), inherits];
    world.cluster.apply(&namespace.to_string()).unwrap();
    for object in services.iter().chain([&pod]) {
        world.cluster.apply(&object.to_string()).unwrap();
    }
    let inherits = world.cluster.get(&["-n", PLAIN, "service", "inherits"]).unwrap();
    assert_eq!(inherits["metadata"]["annotations"][REQUIRES], "true", "{inherits:#}");
    let client = world.client(SHOP);
    for name in ["balanced", "headless"] {
        let target = format!("{name}.{PLAIN}:{PORT}");
        for required in [false, true, false] {
            let annotation = format!("{REQUIRES}={required}");
            world.cluster.kubectl(&["-n", PLAIN, "annotate", "--overwrite", "service", name, &annotation]).unwrap();
            let settled = world.cluster.until(POD, |_| {
                let report = requests(world, SHOP, &client, &target, 5)?;
                ensure!(report.failures == if required { 5 } else { 0 }, "{target}, {required}: {report:?}");
                Ok(())
            });
            settled.unwrap();
        }
    }
    world.cluster.kubectl(&["delete", "namespace", PLAIN, "--wait=false"]).unwrap();
}

/// Each pod of a StatefulSet has a name, behind a Service without an address.
pub(super) fn stateful_set(world: &mut World) {
    let client = world.client(SHOP);
    let ask = |target: &str| {
        // A pod is ready before DNS knows its name.
        wait_for(world, SHOP, &client, target);
        let report = requests(world, SHOP, &client, target, 20).unwrap();
        assert_vouched_for(&report, CLIENT_ID);
        report.by_backend.into_keys().collect::<BTreeSet<_>>()
    };
    for pod in ["database-0", "database-1"] {
        assert_eq!(ask(&format!("{pod}.database.workloads:{PORT}")), [pod.to_owned()].into());
    }
    let all = ask(&format!("database.workloads:{PORT}"));
    assert!(all.iter().all(|pod| pod.starts_with("database-")) && !all.is_empty(), "{all:?}");
    // No probe failed: of HTTP, of TCP, or of a command.
    let pods = world.cluster.get(&["-n", NAMESPACE, "pods", "-l", "app=database"]).unwrap();
    let statuses = pods["items"].as_array().unwrap().iter().map(|pod| &pod["status"]["containerStatuses"][0]);
    let statuses: Vec<_> = statuses.map(|it| (&it["started"], &it["ready"], &it["restartCount"])).collect();
    assert_eq!(statuses, [(&json!(true), &json!(true), &json!(0)); 2]);
}

/// A port of the node leads to a meshed pod, from outside the cluster.
pub(super) fn host_port(world: &mut World) {
    world.cluster.kubectl(&["-n", EDGE, "wait", "pod/edge", "--for=condition=Ready", "--timeout=90s"]).unwrap();
    let pod = world.cluster.get(&["-n", EDGE, "pod", "edge"]).unwrap();
    let node: IpAddr = pod["status"]["hostIP"].as_str().unwrap().parse().unwrap();
    let answer = world.cluster.until(POD, |_| {
        let mut stream = TcpStream::connect_timeout(&(node, HOST_PORT).into(), Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        Ok(answer)
    });
    let answer = answer.unwrap();
    assert!(answer.contains(r#""pod":"edge""#), "{answer}");
    // The proxy connects to the application, not the client.
    let body = answer.lines().find(|line| line.starts_with('{')).unwrap_or_default();
    let seen: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"));
    let peer: SocketAddr = seen["peer"].as_str().unwrap().parse().unwrap();
    let peer = peer.ip().to_canonical();
    assert!(peer.is_loopback() || pod["status"]["podIP"] == peer.to_string(), "around the proxy: {seen:#}");
    world.cluster.kubectl(&["delete", "namespace", EDGE, "--wait=false"]).unwrap();
}

/// Pods of a Job call a Service from an init container and then from their application, as early as they can, and end.
pub(super) fn every_start_is_meshed(world: &mut World) {
    let starts = env::var(STARTS).map_or(FEW_STARTS, |starts| starts.parse().unwrap());
    let sees_packets = Requirement::LocalNodes.allows("what the nodes forward", &world.cluster);
    let wire = sees_packets.then(|| Wire::to_port(&world.cluster, PORT));
    let started = Instant::now();
    let starting = json!({"apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": "starting", "namespace": NAMESPACE}, "spec": job(starts)});
    world.cluster.apply(&starting.to_string()).unwrap();
    let within = POD + Duration::from_secs(5) * u32::try_from(starts).unwrap();
    let done = world.cluster.until(within, |cluster| {
        let job = cluster.get(&["-n", NAMESPACE, "job", "starting"])?;
        let count = |field: &str| job["status"][field].as_u64().unwrap_or(0);
        assert_eq!(count("failed"), 0, "a pod failed: {:#}", job["status"]);
        ensure!(count("succeeded") == starts as u64, "{:#}", job["status"]);
        Ok(())
    });
    done.unwrap();
    println!("    {starts} pods in {:?}", started.elapsed());
    let around = wire.as_ref().map(Wire::connections).unwrap_or_default();
    for container in ["early", "client"] {
        let reports = reports(world, "starting", container);
        assert_eq!(reports.len(), starts, "{container}");
        reports.iter().for_each(is_meshed);
    }
    assert!(around.is_empty(), "{} connections of meshed pods to the server's own port: {around:#?}", around.len());
    if let Some(wire) = wire {
        // What is looked for exists: a client without a proxy.
        let client = world.client("outside");
        let report = world.cluster.client("outside", &client, &["http1", "--target", SERVER]).unwrap();
        assert!(report.failures == 0 && !wire.connections().is_empty(), "nothing seen: {report:?}");
    }
    world.cluster.kubectl(&["-n", NAMESPACE, "delete", "job", "starting", "--wait=false"]).unwrap();
}

/// A CronJob ran in its minute, and its pod ended.
pub(super) fn scheduled(world: &mut World) {
    let ran = world.cluster.until(POD, |cluster| {
        let jobs = cluster.get(&["-n", NAMESPACE, "jobs"])?;
        let of_cron = |job: &&Value| job["metadata"]["ownerReferences"][0]["kind"] == "CronJob";
        let mut done = jobs["items"].as_array().into_iter().flatten().filter(of_cron);
        let done = done.find(|job| job["status"]["succeeded"] == 1).context("no Job of it has ended")?;
        done["metadata"]["name"].as_str().map(str::to_owned).context("a name")
    });
    reports(world, &ran.unwrap(), "client").iter().for_each(is_meshed);
    world.cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]).unwrap();
}

fn is_meshed(report: &Report) {
    assert_eq!(report.requests, 1, "{report:?}");
    assert_vouched_for(report, IDENTITY);
}

/// What the clients of a Job's pods printed.
fn reports(world: &World, job: &str, container: &str) -> Vec<Report> {
    let selector = format!("batch.kubernetes.io/job-name={job}");
    let logs = ["-n", NAMESPACE, "logs", "-l", &selector, "-c", container, "--tail=-1"];
    let logs = world.cluster.kubectl(&[&logs[..], &["--max-log-requests=1000"]].concat()).unwrap();
    logs.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn job(completions: usize) -> Value {
    let client = |name: &str| {
        json!({"name": name, "image": "localhost/weft-examples:0.1.0",
            "command": ["/weft-client", "http1", "--target", SERVER, "--timeout", "20s", "--json"],
            "resources": resources()})
    };
    let mut spec =
        json!({"restartPolicy": "Never", "initContainers": [client("early")], "containers": [client("client")]});
    restricted(&mut spec);
    // A few may all start at once. Many would take longer than their clients wait.
    let parallelism = if completions > FEW_STARTS { 8 } else { completions };
    // One that fails leaves the others running, so that its own logs are those of a failed pod.
    json!({"completions": completions, "parallelism": parallelism, "backoffLimit": completions,
        "template": {"spec": spec}})
}

/// The container of an application that answers on [`PORT`].
pub(super) fn server() -> Value {
    json!({"name": "server", "image": "localhost/weft-examples:0.1.0", "command": ["/weft-echo", "--http", PORT.to_string()],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "resources": resources(),
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5}})
}

/// What the containers of the examples request. Without a request a pod has the least share of a busy node that there
/// is, and its clients give up before they are served.
pub(super) fn resources() -> Value {
    json!({"requests": {"cpu": "50m", "memory": "16Mi"}})
}

/// Complies with the Pod Security Standard of that name.
pub(super) fn restricted(spec: &mut Value) {
    spec["securityContext"] = json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    for kind in ["initContainers", "containers"] {
        for container in spec[kind].as_array_mut().into_iter().flatten() {
            container["securityContext"] =
                json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
        }
    }
}

/// With `disableIPv6=false`, a dual-stack Service and its pods are reached at their IPv4 and IPv6 addresses.
pub(super) fn dual_stack(world: &mut World) {
    let metadata = json!({"name": DUAL, "annotations": {"linkerd.io/inject": "enabled"}});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
    world.cluster.apply(&namespace.to_string()).unwrap();
    let service = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": DUAL},
            "spec": {"selector": {"app": name}, "ipFamilyPolicy": "RequireDualStack",
                "ports": [{"name": "http", "port": 80, "targetPort": PORT}]}})
    };
    let pod = |name: &str| {
        let mut container = server();
        container["name"] = json!(name);
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": DUAL, "labels": {"app": name}},
            "spec": {"containers": [container]}})
    };
    let apply = |world: &World, items: &[Value]| {
        world.cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()).unwrap();
    };
    apply(world, &[service("earlier"), pod("earlier")]);
    let replicas = world.upgrade_once();
    // The API server may still ask an injector that is about to end.
    world.wait_for_pods("proxy-injector", replicas);
    apply(world, &[service("server"), pod("server"), pod("client")]);
    let ready = ["-n", DUAL, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=120s"];
    world.cluster.kubectl(&ready).unwrap();

    let addresses = |object: &Value, port: u16| -> Vec<SocketAddr> {
        let found = object.as_array().unwrap().iter().map(|address| match address {
            Value::String(address) => address.parse().unwrap(),
            address => address["ip"].as_str().unwrap().parse().unwrap(),
        });
        found.map(|address: IpAddr| (address, port).into()).collect()
    };
    let service = world.cluster.get(&["-n", DUAL, "service", "server"]).unwrap();
    let server = world.cluster.get(&["-n", DUAL, "pod", "server"]).unwrap();
    let targets =
        [addresses(&service["spec"]["clusterIPs"], 80), addresses(&server["status"]["podIPs"], PORT)].concat();
    let families: BTreeSet<_> = targets.iter().map(SocketAddr::is_ipv6).collect();
    assert_eq!((targets.len(), families.len()), (4, 2), "{targets:?}");
    let inbound = || world.proxy_metrics(DUAL, "server").sum("response_total", &[("direction", "inbound")]);
    for target in targets {
        let target = &target.to_string();
        let ask = |namespace: &str, pod: &str| {
            // A pod is ready before kube-proxy knows where its Service leads.
            wait_for(world, namespace, pod, target);
            let before = inbound();
            let report = requests(world, namespace, pod, target, 5).unwrap();
            assert!(report.failures == 0 && report.peer_addr_ok, "{target}: {report:?}");
            assert_eq!(report.by_backend.keys().collect::<Vec<_>>(), ["server"], "{target}");
            assert!(inbound() - before >= 5.0, "{target}: around the server's proxy");
            report
        };
        assert_vouched_for(&ask(DUAL, "client"), DUAL_ID);
        // A client without a proxy reaches the server's.
        assert!(ask("outside", &world.client("outside")).by_client_id.is_empty(), "{target}");
    }
    // A pod from before the upgrade accepts IPv4 alone, and is reached by it.
    wait_for(world, DUAL, "client", "earlier.dual:80");
    let report = requests(world, DUAL, "client", "earlier.dual:80", 5).unwrap();
    assert_vouched_for(&report, DUAL_ID);
    world.cluster.kubectl(&["delete", "namespace", DUAL, "--wait=false"]).unwrap();
}

/// While a proxy is down its application gets no connection, and makes none; the kubelet starts the proxy again.
pub(super) fn proxy_killed(world: &mut World) {
    let wire = Wire::to_port(&world.cluster, PORT);
    let (client, pod) = (world.client(SHOP), world.cluster.pod(NAMESPACE, "app=server").unwrap());
    let status = || world.cluster.get(&["-n", NAMESPACE, "pod", &pod]).map(|pod| pod["status"].clone());
    wait_for(world, SHOP, &client, SERVER);
    let before = status().unwrap();
    let (seen, proxy) = (wire.connections(), &before["initContainerStatuses"][0]);
    let arguments = ["http1", "--target", SERVER, "--until-eof", "--duration", "15m", "--fresh", "--pause", "5ms"];
    let load = world.cluster.start_client(SHOP, &client, &arguments).unwrap();
    kernel::kill_container(proxy);
    let again = world.cluster.until(POD, |_| {
        let now = status()?["initContainerStatuses"][0].clone();
        ensure!(now["restartCount"] != proxy["restartCount"] && now["ready"] == true, "{now:#}");
        Ok(())
    });
    again.unwrap();
    // The client's proxy tries an endpoint that refused connections again after a while.
    wait_for(world, SHOP, &client, SERVER);
    let asked = requests(world, SHOP, &client, SERVER, 20).unwrap();
    assert_vouched_for(&asked, CLIENT_ID);
    let report = load.report().unwrap();
    println!("    {} requests, {} failed while there was no proxy", report.requests, report.failures);
    assert!(report.requests > report.failures, "{report:?}");
    let after = status().unwrap();
    assert_eq!(after["containerStatuses"][0]["containerID"], before["containerStatuses"][0]["containerID"]);
    let around: Vec<_> = wire.connections().difference(&seen).cloned().collect();
    assert!(around.is_empty(), "connections to the server's own port: {around:#?}");
}

/// The nodes start anew: nothing is pinned, their pods are gone, and their agents come last.
pub(super) fn reboot(world: &mut World) {
    let wire = Wire::to_port(&world.cluster, PORT);
    let mut spec = json!({"containers": [{"name": "client", "image": "localhost/weft-examples:0.1.0", "command":
        ["/weft-client", "http1", "--target", SERVER, "--duration", "1h", "--fresh", "--pause", "100ms"]}]});
    restricted(&mut spec);
    let talker = json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "talker", "namespace": NAMESPACE},
        "spec": {"selector": {"matchLabels": {"app": "talker"}},
            "template": {"metadata": {"labels": {"app": "talker"}}, "spec": spec}}});
    world.cluster.apply(&talker.to_string()).unwrap();
    world.cluster.rolled_out(NAMESPACE, "deploy/talker").unwrap();
    let pods = ["app=talker", "app=server"].map(|selector| world.cluster.pod(NAMESPACE, selector).unwrap());

    world.stop_agents();
    wire.kubelets().iter().for_each(|kubelet| kernel::remove_pins(kubelet));
    // A pod that runs on is open now. In a reboot there is none.
    let open = world.cluster.until(POD, |_| {
        ensure!(!wire.connections().is_empty(), "the programs are still in force");
        Ok(())
    });
    open.unwrap();
    let status = |pod: &str| world.cluster.get(&["-n", NAMESPACE, "pod", pod]).map(|pod| pod["status"].clone());
    let start_of = |status: &Value| status["initContainerStatuses"][0]["state"]["running"]["startedAt"].clone();
    let before = pods.each_ref().map(|pod| start_of(&status(pod).unwrap()));
    for pod in &pods {
        let pod = world.cluster.get(&["-n", NAMESPACE, "pod", pod]).unwrap();
        kernel::kill_processes_of(pod["metadata"]["uid"].as_str().unwrap());
    }
    let seen = wire.connections();
    for (pod, before) in pods.iter().zip(&before) {
        let waits = world.cluster.until(POD, |_| {
            let status = status(pod)?;
            let proxy = start_of(&status);
            ensure!(!proxy.is_null() && proxy != *before, "its proxy was not started again: {status:#}");
            ensure!(status["initContainerStatuses"][0]["ready"] == false, "its proxy is ready: {status:#}");
            ensure!(status["containerStatuses"][0]["state"]["running"].is_null(), "it runs: {status:#}");
            Ok(())
        });
        waits.unwrap();
    }
    world.start_agents();
    for app in ["server", "talker"] {
        world.cluster.rolled_out(NAMESPACE, &format!("deploy/{app}")).unwrap();
    }
    let asked = world.cluster.until(POD, |_| {
        let metrics = world.proxy_metrics(NAMESPACE, &pods[0]);
        let requests = metrics.sum("response_total", &[("direction", "outbound"), ("tls", "true")]);
        ensure!(requests >= 20.0, "{requests} requests");
        Ok(())
    });
    asked.unwrap();
    let around: Vec<_> = wire.connections().difference(&seen).cloned().collect();
    assert!(around.is_empty(), "connections to the server's own port after the start: {around:#?}");
    drop(wire);
    world.cluster.kubectl(&["-n", NAMESPACE, "delete", "deploy", "talker", "--wait=false"]).unwrap();
}
