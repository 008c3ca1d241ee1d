//! Pins that vanish, cannot be created, or are removed on purpose.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use weft_ebpf_abi::map;
use weft_test_kit::{
    pod::APPLICATION_UID,
    world::{Mesh, World},
};

use crate::{AGENT, kernel, load::Load};

/// Whether a pin directory has its label, which is a dangling symlink, and this many pins.
fn is_complete(pins: &Path, count: usize) -> bool {
    fs::symlink_metadata(pins.join("layout")).is_ok() && kernel::pinned(pins).len() == count
}

pub(crate) fn removed_under_the_agent(world: &mut World) {
    let mesh = Mesh::new(world);
    let pins = world.pins();
    let before = kernel::pinned(&pins);
    let load = Load::start(world);
    world.remove_pins();
    world.eventually("the pins", |_| is_complete(&pins, before.len()).then_some(()));
    assert_eq!(kernel::pinned(&pins), before, "the same maps, links and programs");
    world.eventually("a loud word", |world| world.agent_log().contains("removed by another process").then_some(()));
    // Only one pin is removed, the one with the worst effect.
    fs::remove_file(pins.join("links/connect4")).unwrap();
    world.eventually("the pin", |_| pins.join("links/connect4").exists().then_some(()));
    // The lock is that of the new directory.
    let mut arguments = world.agent_arguments(&pins, &[]);
    arguments[2] = world.directory().join("other.sock").into();
    let second = Command::new(AGENT).args(arguments).output().unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("another agent holds"), "{second:?}");
    // The recreated pins work: the agent may stop.
    world.kill_agent();
    load.goes_on(world);
    mesh.is_meshed(world);
    world.start_agent(&[]);
    let mut names: Vec<_> = world.status().pods.into_iter().map(|pod| pod.pod.unwrap().name).collect();
    names.sort();
    assert_eq!(names, ["a", "b"]);
    load.all_well();
}

pub(crate) fn removed_without_an_agent(world: &mut World) {
    let mesh = Mesh::new(world);
    world.kill_agent();
    fs::remove_dir_all(world.pins()).unwrap();
    world.eventually("the links' end", |world| {
        let open = world.pod("a", APPLICATION_UID).connect("10.99.0.2:8080").listener() == Some(8080);
        (open && world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").listener() == Some(8080)).then_some(())
    });
    world.start_agent(&[]);
    assert!(world.status().pods.is_empty());
    Mesh::is_open(world);
    for name in ["a", "b"] {
        world.enrol(world.request(name)).unwrap();
    }
    mesh.is_meshed(world);
}

pub(crate) fn unmounted_under_the_agent(world: &mut World) {
    let mesh = Mesh::new(world);
    let bpffs = world.directory().join("bpffs");
    let before = kernel::pinned(&world.pins());
    let load = Load::start(world);
    // The agent has the directory open, so removing it needs force.
    assert_eq!(umount2(&bpffs, MntFlags::empty()), Err(nix::errno::Errno::EBUSY));
    umount2(&bpffs, MntFlags::MNT_DETACH).unwrap();
    assert!(!world.pins().exists());
    world.eventually("a loud word", |world| world.agent_log().contains("not on a bpffs any more").then_some(()));
    load.goes_on(world);
    mesh.is_meshed(world);
    mount(Some("bpffs"), &bpffs, Some("bpf"), MsFlags::empty(), None::<&str>).unwrap();
    world.eventually("the pins", |world| is_complete(&world.pins(), before.len()).then_some(()));
    world.kill_agent();
    load.goes_on(world);
    load.all_well();
    mesh.is_meshed(world);
    world.start_agent(&[]);
    assert_eq!(world.status().pods.len(), 2);
}

pub(crate) fn not_on_a_bpffs(world: &mut World) {
    world.kill_agent();
    let elsewhere = world.directory().join("elsewhere/v1");
    let arguments = world.agent_arguments(&elsewhere, &[]);
    world.spawn_agent(Command::new(AGENT).args(arguments));
    assert!(!world.agent_ended());
    let said = world.agent_log();
    assert!(said.contains("is not on a bpffs: mount one, for example `mount -t bpf bpffs "), "{said}");
    assert!(!elsewhere.exists());
}

pub(crate) fn unloaded_under_the_agent(world: &mut World) {
    let _mesh = Mesh::new(world);
    world.unload();
    assert!(!world.agent_ended());
    let said = world.agent_log();
    assert!(said.contains("unloaded behind this agent's back"), "{said}");
    assert!(world.pins_are_gone());
    Mesh::is_open(world);
}

pub(crate) fn unload_leaves_nothing(world: &mut World) {
    let mesh = Mesh::new(world);
    world.kill_agent();
    let ours = kernel::pinned(&world.pins());
    let programs: BTreeSet<u32> = ours.values().filter_map(|pinned| pinned.program).collect();
    let pinned: BTreeSet<u32> =
        ours.values().filter(|pinned| pinned.program.is_none()).map(|pinned| pinned.id).collect();
    let mut maps: BTreeSet<u32> = kernel::maps_of(&programs).union(&pinned).copied().collect();
    assert!(programs.len() >= 10 && maps.len() > pinned.len(), "some programs have maps that are not pinned");
    // The kernel never frees a program array, empty by then, if a process opens and closes it in the instant in which
    // its last pin goes: each takes a reference for the same work, which gives back one (prog_array_map_clear). This
    // test and those beside it look at all maps all the time.
    maps.remove(&kernel::data(&world.pins(), map::STEERING).info().unwrap().id());
    let left = || {
        let (all_maps, all_programs) = kernel::everything();
        (maps.intersection(&all_maps).count(), programs.intersection(&all_programs).count())
    };
    assert_eq!(left(), (maps.len(), programs.len()));
    mesh.is_meshed(world);
    let unload = || {
        let output = Command::new(AGENT).args(["unload", "--pin-dir"]).arg(world.pins()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(unload().starts_with("unloaded "));
    assert!(world.pins_are_gone());
    world.eventually("the end of maps and programs", |_| (left() == (0, 0)).then_some(()));
    Mesh::is_open(world);
    assert!(unload().starts_with("nothing to unload"));
}
