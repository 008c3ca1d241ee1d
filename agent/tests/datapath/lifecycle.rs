//! Proxies and agents that start and stop, up to the end of all redirection.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use aya::{
    maps::MapInfo,
    programs::{ProgramInfo, loaded_programs},
};
use weft_ebpf_abi::map;
use weft_proto::agent::{Direction, ExplainRequest, StatusResponse, WatchRequest};
use weft_sandbox::host::netns;
use weft_test_kit::{
    node::Node,
    pod::{APPLICATION_UID, Pod},
    world::{Mesh, World},
};

pub(crate) fn listener_group_outlives_members(world: &mut World) {
    let Mesh { a: _a, b, servers: _servers } = Mesh::new(world);
    let _second = world.proxy("b");
    let mut app = world.pod("c", APPLICATION_UID);
    let pids = |app: &mut Pod| -> BTreeSet<String> {
        (0..64).map(|_| app.connect("10.98.0.2:8080").field("pid").to_owned()).collect()
    };
    assert_eq!(pids(&mut app).len(), 2, "the kernel spreads over the group");
    // The first member, which comes first in the map, closes; the second stays.
    drop(b);
    assert_eq!(pids(&mut app).len(), 1);
}

pub(crate) fn foreign_listener_is_ignored(world: &mut World) {
    let Mesh { a: _a, b, servers: _servers } = Mesh::new(world);
    drop(b);
    let mut impostor = world.pod("b", APPLICATION_UID);
    impostor.ok("serve 4143");
    let mut client = world.pod("c", APPLICATION_UID);
    assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    drop(impostor);
    let _b = world.proxy("b");
    client.connect("10.98.0.2:8080").reached(4143);
}

pub(crate) fn refuses_without_proxy(world: &mut World) {
    let Mesh { a, b, servers: _servers } = Mesh::new(world);
    drop((a, b));
    let mut app = world.pod("a", APPLICATION_UID);
    for target in ["10.99.0.2:8080", "[fd99::2]:8080", "[::ffff:10.99.0.2]:8080"] {
        assert_eq!(app.say(&format!("connect {target}")), "error ConnectionRefused", "{target}");
    }
    app.connect("10.99.0.2:9090").reached(9090);
    let mut client = world.pod("c", APPLICATION_UID);
    for target in ["10.98.0.2:8080", "[fd98::2]:8080"] {
        assert_eq!(client.say(&format!("connect {target}")), "error ConnectionRefused", "{target}");
    }
    client.connect("10.98.0.2:9090").reached(9090);
    let denied =
        world.status().verdicts.into_iter().find(|count| count.verdict == "deny_no_listener" && count.direction == 2);
    assert!(denied.is_some_and(|count| count.count >= 2));
}

pub(crate) fn agent_restarts(world: &mut World) {
    let Mesh { a: _a, b, servers: _servers } = Mesh::new(world);
    let before = world.status();
    world.kill_agent();
    let mut app = world.pod("a", APPLICATION_UID);
    let mut client = world.pod("c", APPLICATION_UID);
    app.connect("10.99.0.2:8080").reached(4140);
    client.connect("10.98.0.2:8080").reached(4143);
    // A proxy that restarts while no agent runs is found too.
    drop(b);
    let _b = world.proxy("b");
    client.connect("10.98.0.2:8080").reached(4143);
    world.start_agent(&[]);
    let after = world.status();
    assert_eq!(after.programs, before.programs);
    assert_eq!(after.pods, before.pods, "names, generations and cookies are remembered");
    let redirects = |status: &StatusResponse| status.verdicts[0].count;
    assert!(redirects(&after) > redirects(&before), "counters go on");
    let generation = after.pods[0].generation;
    assert_eq!(world.enrol(world.request("a")).unwrap().generation, generation);
    app.connect("10.99.0.2:8080").reached(4140);
    client.connect("10.98.0.2:8080").reached(4143);
}

pub(crate) fn programs_are_replaced(world: &mut World) {
    let _mesh = Mesh::new(world);
    let before = world.status();
    world.kill_agent();
    // Programs with logging count as another build.
    world.start_agent(&["--debug-log"]);
    let after = world.status();
    assert_ne!(after.programs, before.programs);
    assert_eq!(after.pods, before.pods);
    let mut app = world.pod("a", APPLICATION_UID);
    let mut client = world.pod("c", APPLICATION_UID);
    app.connect("10.99.0.2:8080").reached(4140);
    client.connect("10.98.0.2:8080").reached(4143);
    world.eventually("the programs' log", |world| world.agent_log().contains("verdict 0").then_some(()));
    world.kill_agent();
    world.start_agent(&[]);
    assert_eq!(world.status().programs, before.programs);
    app.connect("10.99.0.2:8080").reached(4140);
    client.connect("10.98.0.2:8080").reached(4143);
}

/// Every pod has one of its own, and pods that start at once wait for one another's: docs/adr/0022.
pub(crate) fn pods_program_is_a_stub(world: &mut World) {
    const INSTRUCTIONS: u32 = 64;
    const BYTES: u32 = 4096;
    let _mesh = Mesh::new(world);
    let lookups = MapInfo::from_pin(world.pins().join("maps").join(map::LOOKUPS)).unwrap().id();
    // Programs of other agents on this machine come and go.
    let ours = loaded_programs().filter_map(Result::ok).filter(|program| {
        let maps = program.map_ids().ok().flatten().unwrap_or_default();
        maps.contains(&lookups)
    });
    let (stubs, shared): (Vec<ProgramInfo>, Vec<ProgramInfo>) =
        ours.partition(|program| program.name_as_str() == Some("weft_sk_stub"));
    assert_eq!(shared.len(), 1, "one for all pods");
    assert!(stubs.len() >= 2, "one for each pod, and some in advance: {}", stubs.len());
    for stub in stubs {
        // Linux 5.16 and newer report it.
        let verified = stub.verified_instruction_count().unwrap_or_default();
        assert!(verified <= INSTRUCTIONS, "the verifier followed {verified} instructions");
        let bytes = stub.memory_locked().unwrap();
        assert!(bytes <= BYTES, "{bytes} bytes");
    }
}

pub(crate) fn nothing_is_lost_under_load(world: &mut World) {
    const CHANGES: usize = 4;
    const BATCH: usize = 100;
    // Ports of one client during the whole test: half of those that it may use.
    const PORTS: usize = 14_000;
    let _mesh = Mesh::new(world);
    let clients = [("a", "10.99.0.2:8080", 4140), ("a", "[fd99::2]:8080", 4140), ("c", "10.98.0.2:8080", 4143)];
    let clients = clients.map(|(netns, target, listener)| (world.pod(netns, APPLICATION_UID), target, listener));
    let changes = AtomicUsize::new(0);
    thread::scope(|scope| {
        for (mut client, target, listener) in clients {
            let changes = &changes;
            scope.spawn(move || {
                let mut used = 0;
                while used < PORTS {
                    let seen = changes.load(Ordering::Relaxed);
                    if seen == CHANGES {
                        return;
                    }
                    // Where agents take long, as on a busy machine, single connections make the ports last for all of
                    // them.
                    let count = if used < (seen + 1) * PORTS / (CHANGES + 1) { BATCH } else { 1 };
                    assert_eq!(client.say(&format!("load {target} {count}")), format!("{listener}={count}"));
                    used += count;
                }
                // A client that is faster than the agents has still seen some of the changes.
                assert!(changes.load(Ordering::Relaxed) > 1, "the load ended too soon");
            });
        }
        for change in 0..CHANGES {
            world.kill_agent();
            world.start_agent(if change % 2 == 0 { &["--debug-log"] } else { &[] });
            let _watch = world.watch(WatchRequest::default());
            changes.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert_eq!(world.status().flow_misses, 0);
}

pub(crate) fn unload_leaves_nothing(world: &mut World) {
    let _mesh = Mesh::new(world);
    world.withdraw("b");
    let mut client = world.pod("c", APPLICATION_UID);
    client.connect("10.98.0.2:8080").reached(8080);
    assert_eq!(world.status().pods.len(), 1);
    world.kill_agent();
    world.unload();
    let mut app = world.pod("a", APPLICATION_UID);
    let answer = app.connect("10.99.0.2:8080");
    answer.reached(8080);
    // ENOPROTOOPT or EOPNOTSUPP, by kernel version.
    assert!(app.say("attest").starts_with("error E"));
    assert!(world.pins_are_gone());
}

/// As when a pod is made anew under its name while a process of the one before still runs. The kernel's cookies are not
/// in the order of time, so both orders are tried.
pub(crate) fn latest_namespace_of_a_name_answers(world: &mut World) {
    world.add_netns("d");
    let enrol = |name: &str| {
        let mut request = world.request("a");
        request.netns_path = world.netns(name).display().to_string();
        request.ips = vec![format!("10.97.0.{}", name.as_bytes()[0])];
        world.enrol(request).unwrap();
    };
    let answers = |name: &str| {
        let question = ExplainRequest {
            pod: Some(Node::pod_ref("a")),
            direction: Direction::Outbound.into(),
            destination: format!("10.97.0.{}:80", name.as_bytes()[0]),
            ..ExplainRequest::default()
        };
        world.explain(question).unwrap().verdict == "pass_own_address"
    };
    for name in ["a", "b", "a", "d"] {
        enrol(name);
        assert!(answers(name), "{name} was enrolled last");
    }
    netns::delete(world.netns("d").file_name().unwrap().to_str().unwrap()).unwrap();
    world.eventually("the end of the namespace", |_| (!answers("d")).then_some(()));
    assert!(answers("a"), "a was enrolled last of those that live");
}

/// As on a node whose agent starts after its pods: no program saw the proxies begin to listen.
pub(crate) fn running_proxies_are_found(world: &mut World) {
    world.kill_agent();
    world.unload();
    let b = world.proxy("b");
    world.start_agent(&[]);
    world.mesh("b");
    let mut client = world.pod("c", APPLICATION_UID);
    let mut app = world.pod("b", APPLICATION_UID);
    for (target, proxy) in
        [("10.98.0.2:8080", 4143), ("[fd98::2]:8080", 4143), ("192.0.2.7:443", 4140), ("[2001:db8::7]:443", 4140)]
    {
        let answer = if proxy == 4143 { client.connect(target) } else { app.connect(target) };
        answer.reached(proxy);
        // The destination is also known on connections to listeners that are older than the programs.
        assert_eq!(answer.field("orig"), target);
    }
    // Enrolled again, it is recorded only once, and a successor replaces it.
    world.mesh("b");
    drop(b);
    assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    let mut impostor = world.pod("b", APPLICATION_UID);
    impostor.ok("serve 4143");
    assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    drop(impostor);
    let _b = world.proxy("b");
    client.connect("10.98.0.2:8080").reached(4143);
    world.kill_agent();
    world.unload();
    assert!(world.pins_are_gone());
}
