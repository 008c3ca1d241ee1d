//! Agents of other builds and other layouts, and programs that the kernel rejects.

use std::process::Command;

use nix::sys::wait::WaitStatus;
use weft_ebpf_abi::LAYOUT;
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

pub(crate) fn upgrade_in_place(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut changed = world.request("a");
    changed.skip_outbound_ports.push(PortRange { first: 9095, last: 9095 });
    world.enrol(changed).unwrap();
    drop(mesh);
    let mut servers = world.pod("b", APPLICATION_UID);
    servers.ok("serve 9095");
    let (mut a, mut b) = (world.pod("a", PROXY_UID), world.pod("b", PROXY_UID));
    a.ok("echo-proxy");
    b.ok("echo-proxy");
    let (mut app, mut client) = (world.pod("a", APPLICATION_UID), world.pod("c", APPLICATION_UID));
    assert_eq!(app.answer("open 10.99.0.2:8080").listener(), Some(4140));
    assert_eq!(client.answer("open 10.98.0.2:8080").listener(), Some(4143));
    let before = (kernel::pinned(&world.pins()), world.status());
    world.kill_agent();
    world.start_agent(&["--debug-log"]);
    let after = (kernel::pinned(&world.pins()), world.status());
    // The same maps and links, but other programs.
    for (path, old) in &before.0 {
        let new = &after.0[path];
        assert_eq!(new.id, old.id, "{path:?}");
        if let Some(program) = old.program {
            assert_ne!(new.program, Some(program), "{path:?}");
        }
    }
    assert_eq!(after.0.len(), before.0.len());
    assert_eq!(after.1.pods, before.1.pods);
    assert_ne!(after.1.programs, before.1.programs);
    // Older connections, their names, and the rules.
    app.ok("ping");
    client.ok("ping");
    assert_eq!(app.answer("open 10.99.0.2:8080").field("peername"), "10.99.0.2:8080");
    assert_eq!(app.connect("10.99.0.2:9095").listener(), Some(9095));
    assert_eq!(client.answer("open 10.98.0.2:8080").field("orig"), "10.98.0.2:8080");
}

pub(crate) fn refused_program(world: &mut World) {
    let mesh = Mesh::new(world);
    let before = kernel::pinned(&world.pins());
    world.kill_agent();
    let load = Load::start(world);
    // The program that is attached last, and the pods' program: they are rejected when others are most likely replaced
    // already.
    for name in ["weft_connect6", "weft_sk_lookup"] {
        let (arguments, log) = (world.agent_arguments(&world.pins(), &["--debug-log"]), world.next_log());
        let agent = Traced::start(AGENT, arguments, log, move |call| {
            // The kernel keeps fifteen letters of the name.
            if call.loads().is_some_and(|loaded| name.starts_with(&loaded) && !loaded.is_empty()) {
                call.spoil();
            }
            Then::Goes
        });
        assert!(matches!(agent.ended(), WaitStatus::Exited(_, 1)));
        let said = world.agent_log();
        let last = said.lines().last().unwrap();
        assert!(last.contains(&format!("refused program {name}")), "{said}");
        assert!(last.contains("unknown opcode ff") && !last.contains("processed"), "{said}");
        assert_eq!(kernel::pinned(&world.pins()), before, "nothing was touched");
    }
    load.goes_on(world);
    load.all_well();
    mesh.is_meshed(world);
    // The same agent with its unchanged programs is accepted.
    world.start_agent(&["--debug-log"]);
    assert_ne!(kernel::pinned(&world.pins()), before);
    mesh.is_meshed(world);
}

pub(crate) fn newer_layout_is_left_alone(world: &mut World) {
    let mesh = Mesh::new(world);
    world.kill_agent();
    let newer = (LAYOUT + 1).to_string();
    let label = world.pins().join("layout");
    let relabel = |value: &str| {
        std::fs::remove_file(&label).unwrap();
        std::os::unix::fs::symlink(value, &label).unwrap();
    };
    relabel(&newer);
    let before = kernel::pinned(&world.pins());
    let arguments = world.agent_arguments(&world.pins(), &["--debug-log"]);
    world.spawn_agent(Command::new(AGENT).args(arguments));
    assert!(!world.agent_ended());
    let says = format!("has layout {newer}, this agent knows up to {LAYOUT}");
    assert!(world.agent_log().contains(&says), "{}", world.agent_log());
    let unload = Command::new(AGENT).arg("unload").arg("--pin-dir").arg(world.pins()).output().unwrap();
    assert!(!unload.status.success());
    assert!(String::from_utf8_lossy(&unload.stderr).contains(&says), "{unload:?}");
    assert_eq!(kernel::pinned(&world.pins()), before);
    mesh.is_meshed(world);

    // The newer layout's directory beside this one's own.
    let siblings = world.directory().join("bpffs/node");
    std::fs::create_dir(&siblings).unwrap();
    std::fs::rename(world.pins(), siblings.join(format!("v{newer}"))).unwrap();
    let own = siblings.join(format!("v{LAYOUT}"));
    let arguments = world.agent_arguments(&own, &[]);
    world.spawn_agent(Command::new(AGENT).args(arguments));
    assert!(!world.agent_ended());
    assert!(world.agent_log().contains(&says), "{}", world.agent_log());
    assert!(!own.exists());
    mesh.is_meshed(world);
    // The opposite: the same directories, but no newer agent.
    let newer = siblings.join(format!("v{newer}"));
    std::fs::remove_file(newer.join("layout")).unwrap();
    std::os::unix::fs::symlink(LAYOUT.to_string(), newer.join("layout")).unwrap();
    std::fs::rename(&newer, &own).unwrap();
    world.start_agent_at(&own, &[]);
    assert_eq!(world.status().pods.len(), 2);
    world.pod("a", APPLICATION_UID).connect("10.99.0.2:8080").reached(4140);
}
