//! Migration from an older layout's pin directory to this one's. The older layout is simulated: this build's programs,
//! pinned under an older label, which is all that an agent knows about it.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use weft_ebpf_abi::LAYOUT;
use weft_test_kit::{
    pod::{APPLICATION_UID, PROXY_UID},
    world::{Mesh, World},
};

use crate::{
    AGENT,
    crashes::{ON_A_NODE, SELF_ENROLLING, kubeconfig},
    kernel,
    load::Load,
};

/// The pin directories of the previous layout and of this one.
fn directories(world: &World) -> (PathBuf, PathBuf) {
    let parent = world.directory().join("bpffs/node");
    (parent.join(format!("v{}", LAYOUT - 1)), parent.join(format!("v{LAYOUT}")))
}

/// Leaves the mesh in force as an older agent would, without an agent.
fn make_older(world: &mut World) -> Mesh {
    make_older_with(world, &[], Mesh::new)
}

fn make_older_with(world: &mut World, flags: &[&str], mesh: impl FnOnce(&World) -> Mesh) -> Mesh {
    world.kill_agent();
    world.unload();
    let (older, _) = directories(world);
    world.start_agent_at(&older, flags);
    let mesh = mesh(world);
    world.kill_agent();
    std::fs::remove_file(older.join("layout")).unwrap();
    std::os::unix::fs::symlink((LAYOUT - 1).to_string(), older.join("layout")).unwrap();
    mesh
}

pub(crate) fn pods_come_over(world: &mut World) {
    let mesh = make_older(world);
    let (older, own) = directories(world);
    let objects = kernel::pinned(&older);
    drop(mesh);
    let mut servers = world.pod("b", APPLICATION_UID);
    for port in [8080, 9090] {
        servers.ok(&format!("serve {port}"));
    }
    // A long-lived connection through b's proxy, which then makes room for another proxy, to see what happens to it.
    let mut proxy = world.pod("b", PROXY_UID);
    proxy.ok("echo-proxy");
    let mut client = world.pod("c", APPLICATION_UID);
    client.answer("open 10.98.0.2:8080").reached(4143);
    let mut app = world.pod("b", APPLICATION_UID);
    app.answer("open 192.0.2.1:80").reached(4140);
    let _a = world.proxy("a");
    let load =
        Load::of(world, &[("a", "10.99.0.2:8080", 4140), ("a", "[fd99::2]:8080", 4140), ("a", "192.0.2.7:80", 4140)]);
    load.goes_on(world);
    world.start_agent_at(&own, &[]);
    load.goes_on(world);
    assert!(kernel::pinned(&older).len() == objects.len(), "nothing goes before the pods came over");
    assert!(world.pod("a", APPLICATION_UID).say("attest").starts_with("flags=3 "), "the older layout still answers");
    // If an agent is killed during the migration, the next one continues it.
    world.mesh("b");
    world.kill_agent();
    world.start_agent_at(&own, &[]);
    load.goes_on(world);
    assert!(older.exists(), "a did not come over yet");
    world.mesh("a");
    load.goes_on(world);
    let word = "an older layout no longer redirects";
    world.eventually("the older layout's last redirect", |world| world.agent_log().contains(word).then_some(()));
    world.eventually("the end of the older layout", |_| (!older.exists()).then_some(()));
    load.goes_on(world);
    load.all_well();
    app.ok("ping");
    client.ok("ping");
    assert!(world.agent_log().contains("took over from an older layout"), "{}", world.agent_log());
    let remaining: Vec<_> = objects.values().filter_map(|pinned| pinned.program).collect();
    world.eventually("the end of its programs", |_| {
        let (_, programs) = kernel::everything();
        remaining.iter().all(|program| !programs.contains(program)).then_some(())
    });
    let status = world.status();
    assert_eq!(status.pods.len(), 2);
    let mut again = world.pod("a", APPLICATION_UID);
    let answer = again.connect("10.99.0.2:8080");
    answer.reached(4140);
    assert_eq!((answer.field("orig"), answer.field("peername")), ("10.99.0.2:8080", "10.99.0.2:8080"));
    again.connect("10.99.0.2:9090").reached(9090);
    // Unloading removes what is left of all layouts.
    world.kill_agent();
    let unload = Command::new(AGENT).args(["unload", "--pin-dir"]).arg(&own).output().unwrap();
    assert!(unload.status.success() && !own.exists(), "{unload:?}");
    again.connect("10.99.0.2:8080").reached(8080);
}

pub(crate) fn bypass_includes_the_older(world: &mut World) {
    let mesh = make_older(world);
    let (_, own) = directories(world);
    let bypass = |state: &str| {
        let arguments = ["bypass", state, "--pin-dir"];
        let output = Command::new(AGENT).args(arguments).arg(&own).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    // The older one alone is in force.
    bypass("on");
    Mesh::is_open(world);
    world.start_agent_at(&own, &[]);
    // b does not come over, so that both stay in force.
    world.mesh("a");
    Mesh::is_open(world);
    bypass("off");
    mesh.is_meshed(world);
    bypass("on");
    Mesh::is_open(world);
    bypass("off");
    mesh.is_meshed(world);
}

/// Pods that only the kernel has enrolled there are unknown to an agent until it has listed the node's pods.
pub(crate) fn stays_until_pods_are_known(world: &mut World) {
    let _mesh = make_older_with(world, SELF_ENROLLING, Mesh::unmeshed);
    let (older, own) = directories(world);
    let arguments = world.agent_arguments(&own, ON_A_NODE);
    let kubeconfig = kubeconfig(world);
    world.spawn_agent(Command::new(AGENT).args(arguments).env("KUBECONFIG", kubeconfig));
    world.wait_for_agent();
    let waiting = "has not looked at every pod";
    world.eventually("a reason", |world| world.agent_log().contains(waiting).then_some(()));
    world.pod("a", APPLICATION_UID).connect("10.99.0.2:8080").reached(4140);
    // A pod that starts meanwhile, in its own cgroup, for which the kernel admits further namespaces.
    let pods = |pins: &Path| kernel::pods(pins).keys().map(Result::unwrap).collect::<BTreeSet<_>>();
    let before = pods(&older);
    let mut proxy = world.pod_in("c", "c", PROXY_UID);
    proxy.ok("proxy");
    world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(4140);
    assert_eq!((pods(&older), pods(&own).len()), (before, 1), "it is in the newer layout alone");
    assert!(older.join("links/connect4").exists());
}

pub(crate) fn stays_while_needed(world: &mut World) {
    let mesh = make_older(world);
    let (older, own) = directories(world);
    // An older agent that is still running, as in a rollout: nothing is taken from it.
    let mut old_agent = {
        std::fs::remove_file(older.join("layout")).unwrap();
        std::os::unix::fs::symlink(LAYOUT.to_string(), older.join("layout")).unwrap();
        let mut arguments = world.agent_arguments(&older, &[]);
        arguments[2] = world.directory().join("old.sock").into();
        world.spawn_agent(Command::new(AGENT).args(arguments));
        world.eventually("the older agent", |world| world.agent_log().contains("in force").then_some(()));
        world.take_agent()
    };
    world.start_agent_at(&own, &[]);
    world.mesh("a");
    world.mesh("b");
    world.eventually("patience", |world| world.agent_log().contains("another agent's").then_some(()));
    assert!(older.join("links/connect4").exists());
    mesh.is_meshed(world);
    world.withdraw("b");
    old_agent.kill().unwrap();
    old_agent.wait().unwrap();
    // No agent knows b here, but it lives: the older layout redirects it, and the log says so.
    let waiting = "that nobody enrolled here";
    world.eventually("a reason", |world| world.agent_log().contains(waiting).then_some(()));
    mesh.is_meshed(world);
    // Unloading removes it as well.
    world.kill_agent();
    let unload = Command::new(AGENT).args(["unload", "--pin-dir"]).arg(&own).output().unwrap();
    assert!(unload.status.success(), "{unload:?}");
    assert!(!older.exists() && !own.exists());
    Mesh::is_open(world);
}
