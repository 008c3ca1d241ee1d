//! Changes of a cluster while requests run, none of which may fail.

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Read as _},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use weft_tests::cluster::Load;

use crate::world::{AGENTS, COMPONENTS, MESH, REPLICAS, SHOP, World};

/// Duration of the load before a change.
const BEFORE: Duration = Duration::from_secs(1);
/// Duration of the load after it: longer than any cache or balancer remembers.
const AFTER: Duration = Duration::from_secs(3);

/// Time limit of a change; a slow machine takes minutes for a rollout.
const AT_MOST: &str = "15m";

/// Runs requests through all three services while `happens` happens; none may fail.
pub(super) fn under_load(world: &mut World, happens: impl FnOnce(&mut World)) {
    let client = world.client(SHOP);
    let start = |world: &World, more: &[&str]| -> Load {
        let arguments = ["http1", "--target", "web.shop:80", "--until-eof", "--duration", AT_MOST];
        let gently = ["--concurrency", "2", "--pause", "5ms"];
        world.cluster.start_client(SHOP, &client, &[&arguments[..], &gently, more].concat()).unwrap()
    };
    // Long-lived connections, and a new one for every request, which the kernel has to redirect each time.
    let mut loads = [start(world, &[]), start(world, &["--fresh"])];
    thread::sleep(BEFORE);
    happens(world);
    thread::sleep(AFTER);
    let goes_on = loads.each_mut().map(|load| load.is_running().unwrap());
    for (load, goes_on) in loads.into_iter().zip(goes_on) {
        let report = load.report().unwrap();
        println!(
            "    {} requests, {} connections, {} failures, {:.0} ms at most",
            report.requests, report.connections, report.failures, report.latency_ms.max
        );
        assert!(report.requests > 100, "too few requests to mean anything: {report:?}");
        assert!(goes_on, "it ended before the change did: {report:?}");
        assert_eq!(report.failures, 0, "{:?}", report.errors);
    }
}

pub(super) fn agents_deleted_by_force(world: &mut World) {
    under_load(world, |world| {
        let before = world.cluster.pods(MESH, AGENTS).unwrap();
        let delete = ["-n", MESH, "delete", "pods", "-l", AGENTS, "--grace-period=0", "--force"];
        world.cluster.kubectl(&delete).unwrap();
        world.cluster.rolled_out(MESH, "ds/weft-agent").unwrap();
        let after = world.cluster.pods(MESH, AGENTS).unwrap();
        assert!(!before.is_empty() && after.iter().all(|agent| !before.contains(agent)), "{before:?}, then {after:?}");
    });
}

pub(super) fn agents_rolled_out(world: &mut World) {
    under_load(world, |world| {
        world.cluster.kubectl(&["-n", MESH, "rollout", "restart", "ds/weft-agent"]).unwrap();
        world.cluster.rolled_out(MESH, "ds/weft-agent").unwrap();
    });
}

pub(super) fn leader_deleted_by_force(world: &mut World) {
    let scale = |world: &World, replicas: usize| {
        let wanted = replicas.to_string();
        world.cluster.kubectl(&["-n", MESH, "scale", "deploy/linkerd-destination", "--replicas", &wanted]).unwrap();
        world.cluster.rolled_out(MESH, "deploy/linkerd-destination").unwrap();
        world.wait_for_pods("destination", replicas);
    };
    scale(world, 2);
    under_load(world, |world| {
        let before = world.lease_holder().unwrap();
        world.cluster.kubectl(&["-n", MESH, "delete", "pod", &before, "--grace-period=0", "--force"]).unwrap();
        // The kubelet still sends SIGTERM, and kills it 2 s later, but its token was deleted with its pod. While the
        // API server caches the token, the pod may release the lease; otherwise the lease expires 30 s after its last
        // renewal.
        let moved = world.cluster.until(Duration::from_secs(50), |_| match world.lease_holder()? {
            holder if holder != before => Ok(holder),
            _ => anyhow::bail!("{before} still holds the lease"),
        });
        println!("    the lease moved from {before} to {}", moved.unwrap());
    });
    scale(world, 1);
}

pub(super) fn identity_and_injector_deleted_by_force(world: &mut World) {
    under_load(world, |world| {
        let components = ["identity", "proxy-injector"];
        let pods = components.map(|component| {
            let selector = format!("linkerd.io/control-plane-component={component}");
            world.cluster.pod(MESH, &selector).unwrap()
        });
        let delete = ["-n", MESH, "delete", "pod", "--grace-period=0", "--force", &pods[0], &pods[1]];
        world.cluster.kubectl(&delete).unwrap();
        for component in components {
            world.cluster.rolled_out(MESH, &format!("deploy/linkerd-{component}")).unwrap();
        }
    });
}

pub(super) fn leader_deleted(world: &mut World) {
    let before = world.lease_holder().unwrap();
    let mut logs = world.cluster.command("kubectl");
    logs.args(["-n", MESH, "logs", &before, "-c", "destination", "--follow", "--tail=1"]);
    let mut logs = logs.stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut lines = BufReader::new(logs.stdout.take().unwrap());
    // Once kubectl has printed a line, it follows the log.
    lines.read_line(&mut said).unwrap();
    let started = Instant::now();
    world.cluster.kubectl(&["-n", MESH, "delete", "pod", &before]).unwrap();
    lines.read_to_string(&mut said).unwrap();
    logs.wait().unwrap();
    // Its successor does not wait until the lease expires.
    assert!(said.contains("released lease"), "in its end {before} said:\n{said}");
    world.cluster.rolled_out(MESH, "deploy/linkerd-destination").unwrap();
    let moved = world.cluster.until(Duration::from_secs(15), |_| match world.lease_holder()? {
        holder if holder != before => Ok(()),
        _ => anyhow::bail!("{before} still holds the lease"),
    });
    if let Err(error) = moved {
        panic!("{error:#}; in its end {before} said:\n{said}");
    }
    let transitions = world.lease().unwrap()["spec"]["leaseTransitions"].as_i64();
    assert!(transitions.is_some_and(|count| count >= 2), "transitions are counted: {transitions:?}");
    println!("    after {:?}", started.elapsed());
}

pub(super) fn application_rolled_out(world: &mut World) {
    under_load(world, |world| restart_application(world));
}

/// Replaces the pods that answer the load and those behind them.
pub(super) fn restart_application(world: &World) {
    let workloads = ["deploy/api", "deploy/web"];
    world.cluster.kubectl(&[&["-n", SHOP, "rollout", "restart"], &workloads[..]].concat()).unwrap();
    for workload in workloads {
        world.cluster.rolled_out(SHOP, workload).unwrap();
    }
}

/// With `values-ha.yaml`, every component has a replica on each of three nodes, and an upgrade, and its rollback, go
/// around them: a new pod may be beside an old one, and two replicas always answer.
pub(super) fn highly_available(world: &mut World) {
    world.upgrade_once();
    under_load(world, |world| {
        // Another level than the tutorial's, so that there are new pods.
        let release = world.upgrade_and_wait(&["--set", "controllerLogLevel=warn"]);
        let is_upgraded = || {
            let deployments = world.cluster.kubectl(&["-n", MESH, "get", "deploy", "-o", "yaml"]).unwrap();
            deployments.contains("--log-level=warn")
        };
        assert!(is_upgraded());
        world.roll_back_and_wait(&release);
        assert!(!is_upgraded());
    });
    for component in COMPONENTS {
        let selector = format!("linkerd.io/control-plane-component={component}");
        let pods = world.cluster.get(&["-n", MESH, "pods", "-l", &selector]).unwrap();
        let staying =
            pods["items"].as_array().unwrap().iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let on: Vec<_> = staying.filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect();
        assert_eq!((on.len(), on.iter().collect::<BTreeSet<_>>().len()), (REPLICAS, REPLICAS), "{component}: {on:?}");
    }
}
