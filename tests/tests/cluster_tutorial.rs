//! Weft in a real cluster: the tutorial as its readers run it, and what must hold of the mesh that it makes.
//!
//! The checks run in the order of [`CHECKS`], because they share one installation: the tutorial is followed up to its
//! last section, the mesh is put to the test, and then the tutorial's end must leave nothing. Needs `KUBECONFIG`, the
//! images of `cargo xtask dist` in the cluster, and helm, kubectl and step in PATH: `cargo xtask test cluster`.

#![expect(clippy::print_stdout, reason = "a test program without libtest reports by itself")]
#![expect(clippy::unwrap_used, reason = "a check ends where its expectation does")]

#[path = "cluster_tutorial/bad_input.rs"]
mod bad_input;
#[path = "cluster_tutorial/interception.rs"]
mod interception;
#[path = "cluster_tutorial/under_load.rs"]
mod under_load;
#[path = "cluster_tutorial/world.rs"]
mod world;

use std::{panic::AssertUnwindSafe, process::ExitCode, time::Duration};

use serde_json::Value;
use world::{LEASE, MESH, SHOP, World};

type Check = (&'static str, fn(&mut World));

const CHECKS: [Check; 25] = [
    ("without the CRDs the chart refuses and names them", bad_input::missing_crds),
    ("a chart without its values refuses and names them", bad_input::missing_values),
    ("the tutorial, up to its end", tutorial),
    ("the destination service watches and does not poll", watches_and_does_not_poll),
    ("one destination pod holds the lease and renews it", lease_is_renewed),
    ("meshed pods have no init container but the sidecar, and no capability", pods_have_no_privileges),
    ("requests travel by mutual TLS", requests_are_encrypted),
    ("promtool objects to no metric whose name is not Linkerd's", metrics_are_clean),
    ("an annotation that does not parse is told to the pod's owner", bad_input::unreadable_annotation),
    ("an annotation that is broken later is told, and changes nothing", bad_input::annotation_broken_later),
    ("a bad ServiceProfile and a bad Server are refused", bad_input::refused_by_admission),
    ("a webhook that lost its certificate gets it back", bad_input::lost_webhook_certificate),
    ("an issuer of another root is told by name, and identity goes on", bad_input::mismatched_certificates),
    ("an agent that is deleted by force fails no request", under_load::agent_deleted_by_force),
    ("a new agent takes over without failing a request", under_load::agent_rolled_out),
    ("the lease moves when its holder is deleted by force, and no request fails", under_load::leader_deleted_by_force),
    ("a released lease moves at once", under_load::leader_deleted),
    ("a rollout of the application fails no request", under_load::application_rolled_out),
    ("weft explain tells what the kernel does", interception::explained),
    ("a strict pod exempts its proxy's container and no user", interception::strict),
    ("a bypassed pod goes around its proxy, and says so", interception::bypassed),
    ("a new pod waits for its agent, and gets nowhere around its proxy", interception::waits_for_the_agent),
    ("weft check has nothing to say", check_is_content),
    ("the tutorial's end", tutorial_end),
    ("nothing is left", nothing_is_left),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    if std::env::args().any(|argument| argument == "--list") {
        CHECKS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    // The checks stand on each other; a filter chooses this program or leaves it out.
    if !arguments.is_empty() && !arguments.iter().any(|wanted| "cluster_tutorial".contains(wanted.as_str())) {
        return ExitCode::SUCCESS;
    }
    let mut world = match World::new() {
        Ok(world) => world,
        Err(error) => {
            println!("test cluster_tutorial ... FAILED\n{error:#}");
            return ExitCode::FAILURE;
        }
    };
    // A failed check is reported once, below.
    std::panic::set_hook(Box::new(|_| {}));
    let mut failures = Vec::new();
    for (name, check) in CHECKS {
        println!("test {name} ...");
        let started = std::time::Instant::now();
        if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| check(&mut world))) {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            world.explain();
            // Last, so that it is not lost among what the pods said.
            println!("test {name} ... FAILED\n{}", text.unwrap_or_default());
            failures.push(name);
            // Without the mesh there is nothing left to check.
            if name == "the tutorial, up to its end" {
                break;
            }
        } else {
            println!("test {name} ... ok ({} s)", started.elapsed().as_secs());
        }
    }
    if failures.is_empty() {
        println!("\ntest result: ok. {} passed", CHECKS.len());
        return ExitCode::SUCCESS;
    }
    println!("\ntest result: FAILED: {}", failures.join("; "));
    ExitCode::FAILURE
}

fn tutorial(world: &mut World) {
    world.follow_tutorial(|section| !World::is_end(section));
}

fn tutorial_end(world: &mut World) {
    world.remember_pods();
    world.follow_tutorial(World::is_end);
}

fn watches_and_does_not_poll(world: &mut World) {
    let account = "system:serviceaccount:linkerd:linkerd-destination";
    let Some(before) = world.cluster.audit().unwrap() else {
        println!("  not checked: the audit log of this cluster is not on this host");
        return;
    };
    let by_destination = |entry: &&Value| entry["user"]["username"] == account;
    let watched: std::collections::BTreeSet<_> = before
        .iter()
        .filter(by_destination)
        .filter(|entry| entry["verb"] == "watch")
        .filter_map(|entry| entry["objectRef"]["resource"].as_str())
        .collect();
    for resource in ["services", "endpointslices", "pods", "servers", "nodes", "replicasets"] {
        assert!(watched.contains(resource), "{resource} is not watched by {account}: {watched:?}");
    }
    // What a quiet minute looks like: the lease is renewed, watches may end and begin again, and nothing is listed.
    let quiet = Duration::from_secs(30);
    std::thread::sleep(quiet);
    let after = world.cluster.audit().unwrap().unwrap();
    let new = after[before.len().min(after.len())..].iter().filter(by_destination);
    let (mut renewals, mut polls) = (0, Vec::new());
    for entry in new.filter(|entry| entry["stage"] == "ResponseComplete") {
        match (entry["verb"].as_str().unwrap_or_default(), entry["objectRef"]["resource"].as_str().unwrap_or_default())
        {
            ("update" | "patch", "leases") => renewals += 1,
            ("get" | "list", resource) if resource != "leases" => polls.push(entry["requestURI"].clone()),
            _ => {}
        }
    }
    assert!(polls.is_empty(), "within {quiet:?} of quiet these were asked: {polls:?}");
    assert!((8..=20).contains(&renewals), "about every 2 s the lease is renewed, but {renewals} times in {quiet:?}");
}

fn lease_is_renewed(world: &mut World) {
    let holder = world.lease_holder().unwrap();
    let pods = world.cluster.pods(MESH, "linkerd.io/control-plane-component=destination").unwrap();
    assert!(pods.contains(&holder), "{LEASE} is held by {holder}, not by one of {pods:?}");
    let renewed = |world: &World| world.lease().unwrap()["spec"]["renewTime"].clone();
    let before = renewed(world);
    std::thread::sleep(Duration::from_secs(5));
    assert_ne!(renewed(world), before, "the lease was not renewed within 5 s");
}

/// What promtool says of a name that Linkerd's dashboards know.
const LINKERDS_NAME: &str = "response_latency_ms metric names should not contain abbreviated units";

fn metrics_are_clean(world: &mut World) {
    let mut seen = std::collections::BTreeSet::new();
    for namespace in [MESH, SHOP] {
        let list = world.cluster.get(&["-n", namespace, "pods"]).unwrap();
        for pod in list["items"].as_array().unwrap() {
            let name = pod["metadata"]["name"].as_str().unwrap();
            let containers = ["containers", "initContainers"].map(|kind| pod["spec"][kind].as_array());
            let containers = containers.into_iter().flatten().flatten();
            for port in containers.filter_map(|container| container["ports"].as_array()).flatten() {
                let Some(port_name) = port["name"].as_str().filter(|name| name.ends_with("admin")) else { continue };
                let path =
                    format!("/api/v1/namespaces/{namespace}/pods/{name}:{}/proxy/metrics", port["containerPort"]);
                let text = world.cluster.kubectl(&["get", "--raw", &path]).unwrap();
                assert!(text.contains("process_start_time_seconds"), "{path}: {text}");
                let mut complaints = world.promtool(&text);
                complaints.retain(|complaint| port_name != "linkerd-admin" || complaint != LINKERDS_NAME);
                assert!(complaints.is_empty(), "{path}: {complaints:?}");
                seen.insert(port_name.to_owned());
            }
        }
    }
    let expected =
        ["agent-admin", "dest-admin", "ident-admin", "injector-admin", "linkerd-admin", "policy-admin", "spval-admin"];
    assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

fn pods_have_no_privileges(world: &mut World) {
    let list = world.cluster.get(&["-n", SHOP, "pods"]).unwrap();
    let pods = list["items"].as_array().unwrap();
    assert!(pods.len() >= 5, "the application has five pods and a client: {}", pods.len());
    for pod in pods {
        let name = &pod["metadata"]["name"];
        let init: Vec<_> = pod["spec"]["initContainers"].as_array().unwrap().iter().map(|c| &c["name"]).collect();
        assert_eq!(init, ["linkerd-proxy"], "{name}");
        assert_eq!(pod["spec"]["initContainers"][0]["restartPolicy"], "Always", "{name}: not a native sidecar");
        let all = ["initContainers", "containers"].into_iter().flat_map(|list| pod["spec"][list].as_array().unwrap());
        for container in all {
            let context = &container["securityContext"];
            assert!(context["capabilities"]["add"].is_null(), "{name} has capabilities: {context}");
            assert_ne!(context["privileged"], true, "{name} is privileged");
            assert_eq!(context["capabilities"]["drop"][0], "ALL", "{name}: {context}");
        }
    }
}

fn requests_are_encrypted(world: &mut World) {
    let client = world.client(SHOP);
    // Long enough for the balancer to forget how slow a replica's first answer was.
    let load = ["http1", "--target", "web.shop:80", "--duration", "15s", "--pause", "20ms"];
    let report = world.cluster.client(SHOP, &client, &load).unwrap();
    assert!(report.requests >= 200 && report.failures == 0, "{report:?}");
    assert!(report.peer_addr_ok, "the application saw another peer than it dialled: {report:?}");
    let identity = "client.shop.serviceaccount.identity.linkerd.cluster.local";
    assert_eq!(report.by_client_id.keys().collect::<Vec<_>>(), [identity]);
    assert_eq!(report.by_backend.len(), 2, "both replicas answer: {report:?}");
    let metrics = world.proxy_metrics(SHOP, &client);
    assert!(metrics.sum("response_total", &[("direction", "outbound"), ("tls", "true")]) >= 200.0);
    assert_eq!(metrics.sum("response_total", &[("direction", "outbound"), ("tls", "no_identity")]), 0.0);
    // The same request from outside the mesh is answered, too, in plain text; policy decides elsewhere.
    let outside = world.client("outside");
    let report =
        world.cluster.client("outside", &outside, &["http1", "--target", "web.shop:80", "--count", "10"]).unwrap();
    assert_eq!((report.failures, report.by_client_id.len()), (0, 0), "{report:?}");
    let denied =
        world.cluster.client("outside", &outside, &["http1", "--target", "store.shop:80", "--count", "10"]).unwrap();
    assert_eq!(denied.failures, 10, "an unmeshed client reached store: {denied:?}");
    let denied = world.cluster.client(SHOP, &client, &["http1", "--target", "store.shop:80", "--count", "10"]).unwrap();
    assert_eq!(denied.failures, 10, "a client that is not api reached store: {denied:?}");
}

fn check_is_content(world: &mut World) {
    let report = world.weft(&["check", "--proxy", "-o", "json"]);
    let report: Value = serde_json::from_str(&report.unwrap()).unwrap();
    assert_eq!(report["success"], true, "{report:#}");
}

fn nothing_is_left(world: &mut World) {
    for kind in
        ["mutatingwebhookconfigurations", "validatingwebhookconfigurations", "clusterroles", "clusterrolebindings"]
    {
        let list = world.cluster.kubectl(&["get", kind, "-o", "name"]).unwrap();
        let ours: Vec<_> = list.lines().filter(|name| name.contains("linkerd") || name.contains("weft")).collect();
        assert!(ours.is_empty(), "{kind}: {ours:?}");
    }
    let daemonsets = world.cluster.kubectl(&["get", "daemonsets", "-A", "-o", "name"]).unwrap();
    assert!(!daemonsets.contains("weft-agent"), "{daemonsets}");
    world.assert_kernel_is_clean();
}
