//! Weft in a real cluster: the tutorial as its readers run it, and checks of the mesh that it installs.
//!
//! The checks share one installation, because an installation takes minutes: the tutorial runs up to its last section,
//! then the checks of the mesh, and then the tutorial's last section must leave nothing behind. They run in the order
//! of [`CHECKS`], and a check that is run alone, with a filter, first does what it [`Needs`]. A check whose
//! [`Requirement`] the cluster does not meet is reported as ignored, with the reason; it fails in a cluster that was
//! made by `cargo xtask test`. The check of an upgrade is listed where there is an earlier version
//! (`cargo xtask upgrade`). Needs `KUBECONFIG`, the images of `cargo xtask dist` in the cluster, and helm, kubectl and
//! step in PATH: `cargo xtask test cluster`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "tests report on the standard streams")]
#![expect(clippy::unwrap_used, reason = "a check ends where its expectation does")]

mod agent_only;
mod bad_input;
#[path = "../shared/certificates.rs"]
mod certificates;
mod command_line;
mod component;
mod control_planes;
mod injection;
mod interception;
mod kernel;
mod kube_router;
mod migration;
mod network_policy;
mod readme;
mod requirement;
mod under_load;
mod upgrade;
mod wire;
mod without_helm;
mod workloads;
mod world;

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use requirement::Requirement;
use serde_json::Value;
use weft_test_kit::check::{catch, not_run, requires_all};
use weft_tests::report::assert_vouched_for;
use world::{CLIENT_ID, LEASE, MESH, REPLICAS, SHOP, World};

/// A check that takes longer says how long: the whole is what one has to wait for before each merge.
const LONG: Duration = Duration::from_secs(5);

/// The state of the cluster that a check requires, for some in a cluster that meets a [`Requirement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// No mesh yet.
    Cluster,
    /// The mesh of the tutorial.
    Mesh,
    /// The same, and a requirement.
    MeshAnd(Requirement),
    /// Workloads of other kinds in it.
    Workloads,
    /// The same, and a requirement.
    WorkloadsAnd(Requirement),
    /// The mesh of the tutorial, and the artefacts of an earlier version. Without these the check is not listed.
    EarlierVersion,
    /// The state after the tutorial has removed the mesh.
    Removal,
}

impl Needs {
    fn requirement(self) -> Option<Requirement> {
        match self {
            Self::MeshAnd(requirement) | Self::WorkloadsAnd(requirement) => Some(requirement),
            Self::Cluster | Self::Mesh | Self::Workloads | Self::EarlierVersion | Self::Removal => None,
        }
    }
}

type Check = (&'static str, Needs, fn(&mut World));

const CHECKS: [Check; 48] = [
    ("without the CRDs the chart refuses and names them", Needs::Cluster, bad_input::missing_crds),
    ("a chart without its values refuses and names them", Needs::Cluster, bad_input::missing_values),
    (
        "the agent alone enrols pods of Linkerd, which come and leave under load",
        Needs::Cluster,
        agent_only::network_validator_succeeds,
    ),
    ("the tutorial, up to its end", Needs::Cluster, tutorial),
    ("one destination pod holds the lease and renews it", Needs::Mesh, lease_is_renewed),
    ("meshed pods have no init container but the sidecar, and no capability", Needs::Mesh, pods_have_no_privileges),
    ("requests travel by mutual TLS", Needs::Mesh, requests_are_encrypted),
    ("weft diagnostics endpoints shows the pods of Services", Needs::Mesh, command_line::endpoints),
    ("weft diagnostics policy shows what admits clients, and where requests go", Needs::Mesh, command_line::policy),
    ("weft diagnostics profile shows the profile of a Service", Needs::Mesh, command_line::profile),
    ("weft diagnostics prints the metrics of proxies and of the control plane", Needs::Mesh, command_line::metrics),
    ("weft identity shows certificates that the mesh accepts", Needs::Mesh, command_line::identity),
    ("weft authz shows what authorizes clients", Needs::Mesh, command_line::authorizations),
    ("weft version shows the versions of the mesh", Needs::Mesh, command_line::versions),
    ("promtool objects to no metric whose name is not Linkerd's", Needs::Mesh, metrics_are_clean),
    ("each pod of a StatefulSet is reached by its own name", Needs::Workloads, workloads::stateful_set),
    (
        "pods get a proxy by their kind and annotation, and no others do",
        Needs::Workloads,
        injection::follows_kind_and_annotation,
    ),
    ("a port of the node leads to a proxy", Needs::Workloads, workloads::host_port),
    (
        "every start of a pod is meshed from its first byte, and Jobs end",
        Needs::Workloads,
        workloads::every_start_is_meshed,
    ),
    (
        "the destination service watches and does not poll",
        Needs::MeshAnd(Requirement::AuditLog),
        watches_and_does_not_poll,
    ),
    (
        "a proxy that is killed is started again, its application is not, and nothing goes around it",
        Needs::WorkloadsAnd(Requirement::LocalNodes),
        workloads::proxy_killed,
    ),
    ("an annotation that does not parse is reported on the pod", Needs::Mesh, bad_input::unreadable_annotation),
    (
        "an annotation that is broken later is reported and changes nothing",
        Needs::Mesh,
        bad_input::annotation_broken_later,
    ),
    ("a bad ServiceProfile and a bad Server are refused", Needs::Mesh, bad_input::refused_by_admission),
    ("a webhook that lost its certificate gets it back", Needs::Mesh, bad_input::lost_webhook_certificate),
    (
        "an issuer of another root is reported by name, and identity keeps serving",
        Needs::Mesh,
        bad_input::mismatched_certificates,
    ),
    ("agents that are deleted by force fail no request", Needs::Mesh, under_load::agents_deleted_by_force),
    ("new agents take over without failing a request", Needs::Mesh, under_load::agents_rolled_out),
    (
        "the lease moves when its holder is deleted by force, and no request fails",
        Needs::Mesh,
        under_load::leader_deleted_by_force,
    ),
    (
        "identity and the injector are deleted by force, and no request fails",
        Needs::Mesh,
        under_load::identity_and_injector_deleted_by_force,
    ),
    ("a released lease moves at once", Needs::Mesh, under_load::leader_deleted),
    ("a rollout of the application fails no request", Needs::Mesh, under_load::application_rolled_out),
    ("weft explain tells what the kernel does", Needs::Mesh, interception::explained),
    ("a strict pod exempts its proxy's container and no user", Needs::Mesh, interception::strict),
    ("a bypassed pod goes around its proxy, and says so", Needs::Mesh, interception::bypassed),
    (
        "a new pod waits for its agent, and gets nowhere around its proxy",
        Needs::Mesh,
        interception::waits_for_the_agent,
    ),
    (
        "after a reboot nothing goes around a proxy, however late the agent",
        Needs::WorkloadsAnd(Requirement::LocalNodes),
        workloads::reboot,
    ),
    ("a CronJob ran in the meantime, and its pod ended", Needs::Workloads, workloads::scheduled),
    (
        "weft-viz shows what happens, to those who may ask, also after a roll-out of itself",
        Needs::Mesh,
        component::shows_what_happens,
    ),
    (
        "a Service that requires mutual TLS gets no plaintext, by its name or by its pod's address",
        Needs::Mesh,
        workloads::mutual_tls_is_required,
    ),
    ("NetworkPolicies hold for meshed pods, and the mesh works behind them", Needs::Mesh, network_policy::enforced),
    ("addresses of both families are meshed", Needs::Mesh, workloads::dual_stack),
    (
        "with three replicas on three nodes an upgrade and its rollback fail no request",
        Needs::MeshAnd(Requirement::Nodes(REPLICAS)),
        under_load::highly_available,
    ),
    (
        "an upgrade from an earlier version and the way back fail no request",
        Needs::EarlierVersion,
        upgrade::there_and_back,
    ),
    ("weft check has nothing to say", Needs::Mesh, check_is_content),
    ("the tutorial's end", Needs::Mesh, tutorial_end),
    ("nothing is left", Needs::Removal, nothing_is_left),
    (
        "README's commands install a mesh without helm, which injects pods, and is removed whole",
        Needs::Removal,
        without_helm::installs_injects_and_removes,
    ),
];

fn main() -> ExitCode {
    let world = Arc::new(Mutex::new(None));
    let is_listed = |&&(_, needs, _): &&Check| needs != Needs::EarlierVersion || upgrade::artefacts().is_some();
    let trials = CHECKS.iter().filter(is_listed).map(|check| trial(&world, check)).collect();
    let conclusion = libtest_mimic::run(&Arguments { test_threads: Some(1), ..Arguments::from_args() }, trials);
    let world = world.lock().unwrap_or_else(PoisonError::into_inner).take();
    // A filter may exclude the checks that remove the mesh. After a failure it stays, for inspection.
    if let Some(mut world) = world.filter(|_| !conclusion.has_failed())
        && let Err(error) = catch(|| world.remove())
    {
        eprintln!("the mesh was not removed: {error}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

fn trial(world: &Arc<Mutex<Option<World>>>, &(name, needs, check): &Check) -> Trial {
    let world = Arc::clone(world);
    Trial::ignorable_test(name, move || {
        let failed = |error: anyhow::Error| Failed::from(format!("{error:#}"));
        let mut world = world.lock().unwrap_or_else(PoisonError::into_inner);
        let world = match &mut *world {
            Some(world) => world,
            none => none.insert(World::new().map_err(failed)?),
        };
        if let Some(requirement) = needs.requirement()
            && let Some(reason) = requirement.missing(&world.cluster).map_err(failed)?
        {
            return not_run(&reason, requires_all());
        }
        match needs {
            Needs::Cluster => {}
            Needs::Mesh | Needs::MeshAnd(_) | Needs::EarlierVersion => world.install()?,
            Needs::Workloads | Needs::WorkloadsAnd(_) => {
                world.install()?;
                world.start_workloads()?;
            }
            Needs::Removal => {
                world.install()?;
                catch(|| world.remove())?;
            }
        }
        let started = Instant::now();
        let checked = catch(|| check(world));
        let took = started.elapsed();
        if took >= LONG {
            println!("  took {} s", took.as_secs());
        }
        checked.map(|()| Completion::Completed).map_err(|error| {
            // At once, because all errors are shown only at the end, which may not come.
            println!("{error}");
            world.explain();
            if let Err(error) = catch(|| world.start_stopped_agents()) {
                println!("{error}");
            }
            Failed::from(error)
        })
    })
}

fn tutorial(world: &mut World) {
    world.install().unwrap_or_else(|error| panic!("{error}"));
}

fn tutorial_end(world: &mut World) {
    world.remove();
}

fn watches_and_does_not_poll(world: &mut World) {
    let account = "system:serviceaccount:linkerd:linkerd-destination";
    let (since, start) = world.since_install.unwrap();
    let before = world.cluster.audit().unwrap().unwrap();
    let by_destination = |entry: &&Value| entry["user"]["username"] == account;
    let watches = || before.iter().filter(by_destination).filter(|entry| entry["verb"] == "watch");
    for uri in watches().filter_map(|entry| entry["requestURI"].as_str()) {
        assert!(uri.contains("watch=true") && uri.contains("allowWatchBookmarks=true"), "{uri}");
    }
    let watched: BTreeSet<_> = watches().filter_map(|entry| entry["objectRef"]["resource"].as_str()).collect();
    for resource in ["services", "endpointslices", "pods", "servers", "nodes", "replicasets"] {
        assert!(watched.contains(resource), "{resource} is not watched by {account}: {watched:?}");
    }
    // Half a minute at least, in which other checks send requests: leases are renewed, watches may end and restart, and
    // nothing is listed.
    std::thread::sleep(Duration::from_secs(30).saturating_sub(since.elapsed()));
    let log = world.cluster.audit().unwrap().unwrap();
    let span = since.elapsed();
    let new = log[start.min(log.len())..].iter().filter(by_destination);
    let (mut renewals, mut polls) = (BTreeMap::new(), Vec::new());
    for entry in new.filter(|entry| entry["stage"] == "ResponseComplete") {
        match (entry["verb"].as_str().unwrap_or_default(), entry["objectRef"]["resource"].as_str().unwrap_or_default())
        {
            ("update" | "patch", "leases") => {
                *renewals.entry(entry["objectRef"]["name"].as_str().unwrap_or_default()).or_insert(0) += 1;
            }
            ("get" | "list", resource) if resource != "leases" => polls.push(entry["requestURI"].clone()),
            _ => {}
        }
    }
    assert!(polls.is_empty(), "within {span:?} these were asked: {polls:?}");
    for lease in [LEASE, "policy-controller-write"] {
        let renewals = renewals.remove(lease).unwrap_or(0);
        let expected = span.as_secs() / 2;
        let bounds = expected / 2..=expected * 4 / 3;
        assert!(bounds.contains(&renewals), "about every 2 s {lease} is renewed, but {renewals} times in {span:?}");
    }
    assert!(renewals.is_empty(), "leases that are not Linkerd's: {renewals:?}");
}

fn lease_is_renewed(world: &mut World) {
    let holder = world.lease_holder().unwrap();
    let pods = world.cluster.pods(MESH, "linkerd.io/control-plane-component=destination").unwrap();
    assert!(pods.contains(&holder), "{LEASE} is held by {holder}, not by one of {pods:?}");
    let renewed = |world: &World| world.lease().unwrap()["spec"]["renewTime"].clone();
    let before = renewed(world);
    let again = world.cluster.until(Duration::from_secs(15), |_| {
        anyhow::ensure!(renewed(world) != before, "the lease is not renewed");
        Ok(())
    });
    again.unwrap();
}

/// promtool's complaints about names that Linkerd's dashboards use.
const LINKERDS_NAMES: [&str; 2] = [
    "control_response_latency_ms metric names should not contain abbreviated units",
    "response_latency_ms metric names should not contain abbreviated units",
];

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
                complaints.retain(|complaint| port_name != "linkerd-admin" || !LINKERDS_NAMES.contains(&&**complaint));
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
    let load = ["http1", "--target", "web.shop:80", "--count", "250", "--concurrency", "4", "--pause", "5ms"];
    // For some seconds, the balancer remembers that a replica's first answer was slow.
    let report = world.cluster.until(Duration::from_secs(30), |cluster| {
        let report = cluster.client(SHOP, &client, &load)?;
        assert_eq!((report.requests, report.failures), (250, 0), "{report:?}");
        anyhow::ensure!(report.by_backend.len() == 2, "one replica answers: {report:?}");
        Ok(report)
    });
    let report = report.unwrap();
    assert!(report.peer_addr_ok, "the application saw another peer than it dialled: {report:?}");
    assert_vouched_for(&report, CLIENT_ID);
    let metrics = world.proxy_metrics(SHOP, &client);
    assert!(metrics.sum("response_total", &[("direction", "outbound"), ("tls", "true")]) >= 200.0);
    assert_eq!(metrics.sum("response_total", &[("direction", "outbound"), ("tls", "no_identity")]), 0.0);
    // The same request from outside the mesh is answered too, in plain text; policy is tested elsewhere.
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
    command_line::checks_before_an_installation(world);
}

fn nothing_is_left(world: &mut World) {
    for kind in [
        "mutatingwebhookconfigurations",
        "validatingwebhookconfigurations",
        "validatingadmissionpolicies",
        "validatingadmissionpolicybindings",
        "clusterroles",
        "clusterrolebindings",
    ] {
        let list = world.cluster.kubectl(&["get", kind, "-o", "name"]).unwrap();
        let ours: Vec<_> = list.lines().filter(|name| name.contains("linkerd") || name.contains("weft")).collect();
        assert!(ours.is_empty(), "{kind}: {ours:?}");
    }
    let definitions = world.cluster.kubectl(&["get", "customresourcedefinitions", "-o", "name"]).unwrap();
    let ours: Vec<_> =
        definitions.lines().filter(|name| name.contains("linkerd.io") || name.contains("weft.io")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    // The namespace's deletion takes its own time; what is in it is not left by it.
    let leases = world.cluster.until(Duration::from_secs(120), |cluster| {
        let leases = cluster.kubectl(&["get", "leases", "-A", "-o", "name"])?;
        let ours = leases.lines().find(|name| name.contains("linkerd") || name.contains("policy-controller"));
        anyhow::ensure!(ours.is_none(), "{ours:?} is left");
        Ok(())
    });
    leases.unwrap();
    let daemonsets = world.cluster.kubectl(&["get", "daemonsets", "-A", "-o", "name"]).unwrap();
    assert!(!daemonsets.contains("weft-agent"), "{daemonsets}");
    world.assert_kernel_is_clean();
}
