//! Agents that are killed, at random and at every step, and agents that run at the same time.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use weft_proto::agent::PortRange;
use weft_test_kit::{
    pod::{APPLICATION_UID, PROXY_UID},
    world::{Mesh, World},
};

use crate::{
    AGENT, kernel,
    load::Load,
    traced::{Then, Traced},
};

/// Flags of an agent that lets the kernel enrol pods by itself.
pub(crate) const SELF_ENROLLING: &[&str] = &["--self-enrol-uid", "2102"];
/// Flags of an agent on a Kubernetes node.
pub(crate) const ON_A_NODE: &[&str] = &["--node-name", "node"];
/// More steps than any of these sequences has; a test that gets here has miscounted.
const STEPS: usize = 200;

pub(crate) fn ten_crashes_in_a_row(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut app = world.pod("a", APPLICATION_UID);
    drop(mesh.a);
    let mut proxy = world.pod("a", PROXY_UID);
    proxy.ok("echo-proxy");
    let opened = app.answer("open 10.99.0.2:8080");
    assert_eq!(opened.field("orig"), "10.99.0.2:8080");
    let load = Load::of(world, &[("c", "10.98.0.2:8080", 4143), ("b", "10.99.0.9:8080", 4140)]);
    world.kill_agent();
    load.goes_on(world);
    let begin = Instant::now();
    world.start_agent(&[]);
    let start = begin.elapsed();
    world.kill_agent();
    for tenth in 0..10 {
        // Half of them are to replace the programs, and are interrupted.
        let flags: &[&str] = if tenth % 2 == 0 { &["--debug-log"] } else { &[] };
        let arguments = world.agent_arguments(&world.pins(), flags);
        world.spawn_agent(Command::new(AGENT).args(arguments));
        std::thread::sleep(start * tenth / 10);
        world.kill_agent();
        app.ok("ping");
    }
    world.start_agent(&[]);
    load.goes_on(world);
    load.all_well();
    app.ok("ping");
    let status = world.status();
    assert_eq!((status.pods.len(), status.flow_misses), (2, 0), "{status:?}");
    assert!(status.pods.iter().all(|pod| pod.outbound && pod.inbound), "{status:?}");
}

/// The configuration of an agent on a Kubernetes node, with the address of an API server that does not answer.
pub(crate) fn kubeconfig(world: &World) -> PathBuf {
    let path = world.directory().join("kubeconfig");
    let config = "{apiVersion: v1, kind: Config, current-context: x, contexts: [{name: x, context: {cluster: x, user: x}}], \
                  clusters: [{name: x, cluster: {server: 'http://127.0.0.1:9'}}], users: [{name: x, user: {}}]}";
    std::fs::write(&path, config).unwrap();
    path
}

/// An agent that dies before its nth step, counted from when it is armed.
struct Doomed {
    agent: Traced,
    armed: Arc<AtomicBool>,
    done: Arc<Mutex<Vec<String>>>,
}

impl Doomed {
    fn start(world: &mut World, flags: &[&str], last: usize, armed: bool) -> Self {
        let (arguments, log) = (world.agent_arguments(&world.pins(), flags), world.next_log());
        let armed = Arc::new(AtomicBool::new(armed));
        let done = Arc::new(Mutex::new(Vec::new()));
        let agent = Traced::start(AGENT, arguments, log, {
            let (armed, done) = (armed.clone(), done.clone());
            move |call| {
                if !armed.load(Ordering::SeqCst) || !call.is_step() {
                    return Then::Goes;
                }
                let mut done = done.lock().unwrap();
                if done.len() == last {
                    return Then::Dies;
                }
                done.push(call.to_string());
                Then::Goes
            }
        });
        Self { agent, armed, done }
    }

    /// Waits until it serves, or is dead. True if it serves: then it has no such step.
    fn serves(&self, world: &World) -> bool {
        world.eventually("an agent that serves or dies", |world| {
            if !self.agent.is_running() { Some(false) } else { world.is_served().then_some(true) }
        })
    }

    /// Ends it. Returns the number of its steps.
    fn end(self) -> Vec<String> {
        self.agent.end();
        self.done.lock().unwrap().clone()
    }
}

pub(crate) fn killed_while_starting(world: &mut World) {
    world.kill_agent();
    world.unload();
    let mut died = 0;
    for last in 0..STEPS {
        let doomed = Doomed::start(world, &[], last, true);
        let completed = doomed.serves(world);
        let steps = doomed.end();
        if completed {
            assert!(died > 20, "a start has more steps than {died}: {steps:?}");
            break;
        }
        died += 1;
        // Only every third one gets a complete check.
        if last % 3 == 0 {
            world.start_agent(&[]);
            assert_eq!(kernel::programs(&world.pins()).len(), World::cgroup_programs(), "after {steps:?}");
            world.kill_agent();
        }
        world.unload();
        assert!(world.pins_are_gone());
    }
    assert!(died < STEPS);
    world.start_agent(&[]);
    Mesh::new(world);
}

pub(crate) fn killed_while_updating(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut before = kernel::programs(&world.pins());
    assert_eq!(before.len(), World::cgroup_programs() + 2, "{before:?}");
    world.kill_agent();
    let load = Load::start(world);
    let (mut died, mut mixed) = (0, 0);
    for last in 0..STEPS {
        // To the agent, programs with logging are another build's.
        let doomed = Doomed::start(world, &["--debug-log"], last, true);
        let completed = doomed.serves(world);
        let steps = doomed.end();
        let now = kernel::programs(&world.pins());
        let replaced = now.iter().filter(|(link, program)| before[*link] != **program).count();
        if completed {
            assert_eq!(replaced, before.len(), "{now:?}");
            break;
        }
        died += 1;
        mixed += usize::from(replaced > 0 && replaced < before.len());
        load.goes_on(world);
        // An agent of the old build starts again, and must not trust the label of its build.
        world.start_agent(&[]);
        let after = kernel::programs(&world.pins());
        let newest = *now.values().max().unwrap();
        assert!(after == before || after.values().all(|program| *program > newest), "{replaced} after {steps:?}");
        assert_eq!(after == before, after == now, "it replaces all or, where nothing was replaced, none");
        before = after;
        world.kill_agent();
    }
    assert!(mixed >= 8, "{mixed} of {died} were interrupted between two links");
    world.start_agent(&[]);
    load.all_well();
    mesh.is_meshed(world);
}

pub(crate) fn killed_while_enrolling(world: &mut World) {
    let mesh = Mesh::new(world);
    world.withdraw("a");
    world.kill_agent();
    let (mut died, mut half) = (0, 0);
    for last in 0..STEPS {
        let doomed = Doomed::start(world, &[], last, false);
        assert!(doomed.serves(world));
        doomed.armed.store(true, Ordering::SeqCst);
        let enrolled = world.enrol(world.request("a"));
        let completed = enrolled.is_ok();
        let steps = doomed.end();
        let mut app = world.pod("a", APPLICATION_UID);
        let attested = app.say("attest");
        let outbound = app.connect("10.99.0.2:8080").listener();
        // The proxy is not ready before both directions are attested, and the application starts only then. Outbound is
        // never attested and open.
        let redirected = attested.starts_with("flags=1 ") || attested.starts_with("flags=3 ");
        assert_eq!(outbound, Some(if redirected { 4140 } else { 4143 }), "{attested} after {steps:?}");
        half += usize::from(attested.starts_with("flags=1 "));
        if completed {
            assert!(attested.starts_with("flags=3 "), "{attested} after {steps:?}");
            break;
        }
        died += 1;
        world.start_agent(&[]);
        world.mesh("a");
        mesh.is_meshed(world);
        world.withdraw("a");
        world.kill_agent();
    }
    assert!(died > 5 && half > 0, "{died} died, {half} of them between two directions");
    world.start_agent(&[]);
    world.mesh("a");
    mesh.is_meshed(world);
}

/// The kernel has enrolled the pod when its proxy listened, and does not do so again.
pub(crate) fn killed_while_completing(world: &mut World) {
    let mut mesh = Mesh::new(world);
    world.kill_agent();
    world.start_agent(SELF_ENROLLING);
    let mut died = 0;
    for last in 0..STEPS {
        world.withdraw("a");
        world.kill_agent();
        let Mesh { a, b, servers } = mesh;
        drop(a);
        mesh = Mesh { a: world.proxy("a"), b, servers };
        let doomed = Doomed::start(world, SELF_ENROLLING, last, false);
        assert!(doomed.serves(world));
        doomed.armed.store(true, Ordering::SeqCst);
        let completed = world.enrol(world.request("a")).is_ok();
        let steps = doomed.end();
        let mut app = world.pod("a", APPLICATION_UID);
        assert_eq!(app.connect("10.99.0.2:8080").listener(), Some(4140), "after {steps:?}");
        // It collects garbage before it serves.
        world.start_agent(SELF_ENROLLING);
        assert_eq!(app.connect("10.99.0.2:8080").listener(), Some(4140), "with the next agent, after {steps:?}");
        world.mesh("a");
        mesh.is_meshed(world);
        if completed {
            assert!(died > 5, "{died}");
            return;
        }
        died += 1;
    }
    panic!("no enrolment was completed, after {died}");
}

pub(crate) fn killed_while_changing(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut changed = world.request("a");
    changed.skip_outbound_ports.push(PortRange { first: 9095, last: 9095 });
    let rules = |pins: &Path| {
        let ports = kernel::ports(pins).keys().map(Result::unwrap).collect::<Vec<_>>();
        ports.into_iter().map(|key| (key.netns_cookie, key.direction, key.block)).collect::<Vec<_>>()
    };
    let mut before = rules(&world.pins());
    before.sort_unstable();
    world.kill_agent();
    let load = Load::start(world);
    let mut died = 0;
    for last in 0..STEPS {
        let doomed = Doomed::start(world, &[], last, false);
        assert!(doomed.serves(world));
        doomed.armed.store(true, Ordering::SeqCst);
        let completed = world.enrol(changed.clone()).is_ok();
        let steps = doomed.end();
        load.goes_on(world);
        let mut app = world.pod("a", APPLICATION_UID);
        let now = app.connect("10.99.0.2:9095").listener();
        assert!(now == Some(4140) || now == Some(9095), "{now:?} after {steps:?}");
        world.start_agent(&[]);
        // Rules other than the interrupted ones: nothing of those may remain.
        world.mesh("a");
        app.connect("10.99.0.2:9095").reached(4140);
        let mut after = rules(&world.pins());
        after.sort_unstable();
        assert_eq!(after, before, "after {steps:?}");
        world.kill_agent();
        if completed {
            assert_eq!(now, Some(9095), "the change is in force");
            break;
        }
        died += 1;
    }
    assert!(died > 3, "{died}");
    world.start_agent(&[]);
    load.all_well();
    mesh.is_meshed(world);
}

pub(crate) fn one_at_a_time(world: &mut World) {
    let mesh = Mesh::new(world);
    let first = world.take_agent();
    let other = world.directory().join("other.sock");
    let second = |world: &World, flags: &[&str]| {
        let mut arguments = world.agent_arguments(&world.pins(), flags);
        arguments[2] = other.clone().into();
        let mut command = Command::new(AGENT);
        command.args(arguments);
        command
    };
    let mut refused = second(world, &[]);
    world.spawn_agent(&mut refused);
    assert!(!world.agent_ended());
    let said = world.agent_log();
    assert!(said.contains("another agent holds") && said.contains("--pin-dir"), "{said}");
    mesh.is_meshed(world);

    // On a Kubernetes node two agents overlap in every rollout.
    let mut waiting = second(world, ON_A_NODE);
    let kubeconfig = kubeconfig(world);
    world.spawn_agent(waiting.env("KUBECONFIG", kubeconfig));
    let says = |world: &World, words: &str| {
        world.eventually(words, |world| world.agent_log().contains(words).then_some(()));
    };
    says(world, "waiting for another agent to end");
    std::thread::sleep(Duration::from_secs(1));
    assert!(!world.agent_log().contains("datapath in force"), "{}", world.agent_log());
    let mut first = first;
    first.kill().unwrap();
    first.wait().unwrap();
    says(world, "datapath in force");
    mesh.is_meshed(world);
}
