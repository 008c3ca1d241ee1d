//! The capabilities of an agent: sufficient, minimal, and equal to those that the chart requests.

use std::{collections::BTreeSet, process::Command};

use aya::maps::MapData;
use nix::libc;
use rustix::thread::CapabilitySet;
use weft_proto::agent::{Direction, EnrolResponse, ExplainRequest, PortRange, WatchRequest};
use weft_test_kit::{
    node::{Node, as_on_linux},
    pod::{APPLICATION_UID, PROXY_UID},
    world::{Mesh, World},
};

use crate::{
    AGENT, confined,
    confined::{ALSO_DENIED, PROBE},
    kernel,
};

/// Required on every node. CAP_SYS_CHROOT, which the chart adds, is for mounting a bpffs on a node that has none.
const CAPABILITIES: CapabilitySet =
    CapabilitySet::NET_ADMIN.union(CapabilitySet::SYS_ADMIN).union(CapabilitySet::SYS_PTRACE);

fn spawn_confined(world: &mut World, capabilities: CapabilitySet, flags: &[&str]) {
    let mut command = confined::command(capabilities, &world.directory(), AGENT);
    command.args(world.agent_arguments(&world.pins(), flags));
    world.spawn_agent(&mut command);
}

/// Starts an agent that cannot duplicate descriptors of other processes.
fn start_without_duplicates(world: &mut World) {
    let mut command = confined::command(CAPABILITIES, &world.directory(), AGENT);
    command.env(ALSO_DENIED, libc::SYS_pidfd_getfd.to_string());
    command.args(world.agent_arguments(&world.pins(), &[]));
    world.spawn_agent(&mut command);
    world.wait_for_agent();
}

fn effective(world: &World) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.agent_pid())).unwrap();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(set.trim(), 16).unwrap()
}

/// Runs the commands of this file, in addition to the common ones.
pub(crate) fn follow(words: &[&str]) -> Option<String> {
    let [pin, id] = words.strip_prefix(&["open-map"])? else { return None };
    let opened = [MapData::from_pin(pin), MapData::from_id(id.parse().unwrap())];
    Some(opened.map(|result| if result.is_ok() { "opened" } else { "refused" }).join(" "))
}

/// A proxy has its user and no capability.
pub(crate) fn of_a_proxy(world: &mut World) {
    let _mesh = Mesh::new(world);
    let (mut proxy, mut root) = (world.pod("b", PROXY_UID), world.pod("b", 0));
    for (path, map) in kernel::pinned(&world.pins()).into_iter().filter(|(_, pinned)| pinned.program.is_none()) {
        let order = format!("open-map {} {}", world.pins().join(&path).display(), map.id);
        assert_eq!(proxy.say(&order), "refused refused", "{path:?}");
        assert_eq!(root.say(&order), "opened opened", "{path:?}");
    }
}

/// As after an upgrade from an agent that knew no admin port, on a node whose seccomp profile or security module
/// forbids to duplicate descriptors of other processes.
pub(crate) fn no_duplicates(world: &mut World) {
    let _mesh = Mesh::new(world);
    let request = world.request("b");
    let mut older = request.clone();
    older.admin_port = 9191;
    older.skip_inbound_ports.push(PortRange { first: 4191, last: 4191 });
    let EnrolResponse { netns_cookie: cookie, generation } = world.enrol(older).unwrap();
    let mut pods = kernel::pods(&world.pins());
    let entry = pods.get(&cookie, 0).unwrap();
    pods.insert(cookie, weft_ebpf_abi::pod::Pod { admin_port: 0, ..entry }, 0).unwrap();
    let mut admin = world.pod("b", PROXY_UID);
    admin.ok("serve-at 0.0.0.0:4191");
    world.kill_agent();
    start_without_duplicates(world);

    // The new rules are in force, except that probes reach the admin port as before.
    let mut client = world.pod("c", APPLICATION_UID);
    let mut changed = request;
    changed.skip_inbound_ports = vec![PortRange { first: 8081, last: 8081 }];
    for _ in 0..2 {
        assert_eq!(world.enrol(changed.clone()).unwrap().generation, generation + 1);
        client.connect("10.98.0.2:8081").reached(8081);
        client.connect("10.98.0.2:9090").reached(4143);
        client.connect("10.98.0.2:4191").reached(4191);
    }
    // Where sockets carry cookies, listeners of before the agent's start have to be taken for that: until the whole
    // proxy has started again, the search goes on to fail.
    if as_on_linux().next().is_some() {
        return;
    }
    // Nothing is missing once the proxy has started again.
    drop(admin);
    let mut admin = world.pod("b", PROXY_UID);
    admin.ok("serve-at 0.0.0.0:4191");
    assert_eq!(world.enrol(changed).unwrap().generation, generation + 2);
    client.connect("10.98.0.2:4191").reached(4191);
    drop(admin);
    let mut app = world.pod("b", APPLICATION_UID);
    app.ok("serve 4191");
    assert!(!client.say("connect 10.98.0.2:4191").contains("listener=4191"), "it is the proxy's alone");
}

/// The link of a pod whose proxy's listener cannot be taken is attached, and its inbound bit never set.
pub(crate) fn refusals_are_explained(world: &mut World) {
    world.kill_agent();
    world.unload();
    let _mesh = Mesh::unmeshed(world);
    start_without_duplicates(world);
    assert!(world.enrol(world.request("b")).is_err());
    let question = ExplainRequest {
        pod: Some(Node::pod_ref("b")),
        direction: Direction::Inbound.into(),
        destination: "10.98.0.2:8080".into(),
        source: "10.98.0.3".into(),
        ..ExplainRequest::default()
    };
    assert_eq!(world.explain(question).unwrap().verdict, "deny_no_listener");
    assert_eq!(world.pod("c", APPLICATION_UID).say("connect 10.98.0.2:8080"), "error ConnectionRefused");
}

pub(crate) fn enough(world: &mut World) {
    world.kill_agent();
    world.unload();
    let mesh = Mesh::unmeshed(world);
    spawn_confined(world, CAPABILITIES, &[]);
    world.wait_for_agent();
    assert_eq!(effective(world), CAPABILITIES.bits());
    // Sockets have to be duplicated only from proxies that listen already.
    world.mesh("a");
    world.mesh("b");
    mesh.is_meshed(world);
    let mut watch = world.watch(WatchRequest::default());
    let mut app = world.pod("a", APPLICATION_UID);
    world.eventually("an event", |_| {
        app.connect("10.99.0.2:8080");
        watch.try_next(std::time::Duration::from_millis(50))
    });
    // All operations of an agent: replacing programs, recreating pins, withdrawing, unloading.
    world.kill_agent();
    spawn_confined(world, CAPABILITIES, &["--debug-log"]);
    world.wait_for_agent();
    mesh.is_meshed(world);
    world.eventually("the programs' log", |world| {
        app.connect("10.99.0.2:8080");
        world.agent_log().contains("verdict").then_some(())
    });
    world.remove_pins();
    world.eventually("the pins", |world| std::fs::symlink_metadata(world.pins().join("layout")).ok());
    world.withdraw("a");
    world.kill_agent();
    let unload = confined::command(CAPABILITIES, &world.directory(), AGENT)
        .args(["unload", "--pin-dir"])
        .arg(world.pins())
        .output()
        .unwrap();
    assert!(unload.status.success() && world.pins_are_gone(), "{unload:?}");
    Mesh::is_open(world);
}

pub(crate) fn not_too_much(world: &mut World) {
    world.kill_agent();
    world.unload();
    let _mesh = Mesh::unmeshed(world);
    for (name, missing) in [
        ("CAP_NET_ADMIN", CapabilitySet::NET_ADMIN),
        ("CAP_SYS_ADMIN", CapabilitySet::SYS_ADMIN),
        ("CAP_SYS_PTRACE", CapabilitySet::SYS_PTRACE),
    ] {
        spawn_confined(world, CAPABILITIES.difference(missing), &[]);
        assert!(!world.agent_ended(), "{name}");
        assert!(world.agent_log().contains(&format!("missing {name}")), "{}", world.agent_log());
        assert!(world.pins_are_gone());
    }
    // The agent requires the same capabilities as the kernel; those that CAP_SYS_ADMIN includes do not replace it. A
    // missing CAP_NET_ADMIN has an effect only on kernels before 6.6.
    let netns = world.request("b").netns_path;
    let process = std::fs::read_to_string(world.cgroup().join("cgroup.procs")).unwrap();
    let process = process.lines().next().unwrap();
    let works = |capabilities: CapabilitySet| {
        let mut command =
            confined::command(capabilities, &world.directory(), std::env::current_exe().unwrap().to_str().unwrap());
        let output = command.args([confined::RIGHTS, &netns, process]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    };
    assert_eq!(works(CAPABILITIES), "enter look");
    let finer = CapabilitySet::BPF.union(CapabilitySet::PERFMON);
    assert_eq!(works(CAPABILITIES.difference(CapabilitySet::SYS_ADMIN).union(finer)), "look");
    assert_eq!(works(CAPABILITIES.difference(CapabilitySet::SYS_PTRACE)), "enter");
}

pub(crate) fn confinement(world: &mut World) {
    let probe = |command: &mut Command| {
        let output = command.args([PROBE]).arg(world.directory()).arg(world.cgroup()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    };
    let myself = std::env::current_exe().unwrap();
    let myself = myself.to_str().unwrap();
    assert_eq!(probe(&mut confined::command(CAPABILITIES, &world.directory(), myself)), "run");
    // In its own mount namespace, because in this one it would all succeed.
    let free = probe(Command::new("unshare").args(["--mount", myself]));
    std::fs::remove_dir(world.cgroup().join("weft-probe")).unwrap();
    assert_eq!(free, "root tmp cgroup mount ptrace run");
}

pub(crate) fn as_in_the_chart(_world: &mut World) {
    let chart = std::fs::read_to_string("../charts/weft-control-plane/templates/_agent.tpl").unwrap();
    let added = chart.lines().find_map(|line| line.trim().strip_prefix("add: [")).unwrap().trim_end_matches(']');
    let added: BTreeSet<String> = added.split(", ").map(str::to_owned).collect();
    let needed = CAPABILITIES.union(CapabilitySet::SYS_CHROOT);
    assert_eq!(added, needed.iter_names().map(|(name, _)| name.to_owned()).collect());
    for line in ["privileged: false", "readOnlyRootFilesystem: true", "drop: [ALL]", "type: RuntimeDefault"] {
        assert!(chart.lines().any(|text| text.trim() == line), "{line}");
    }
}
