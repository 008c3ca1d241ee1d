//! Maps and the ring buffer without room.

use std::{
    collections::BTreeSet,
    mem::offset_of,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData};
use nix::sys::signal::{Signal, kill};
use tonic::Code;
use weft_ebpf_abi::{
    map,
    pod::{MAX_PODS, PortBlock, PortBlockKey},
    socket::{Flow, FlowKey, MAX_FLOWS},
};
use weft_proto::agent::{PortRange, WatchRequest};

use crate::{APP, Mesh, kernel, load::Load, reaches, world::World};

/// Cookies that no namespace has: the kernel counts from 1.
const NOBODY: u64 = 1 << 60;

/// The map of hand-overs, whose entries only programs write otherwise.
type Flows = HashMap<MapData, [u8; size_of::<FlowKey>()], [u8; size_of::<Flow>()]>;

fn ports_of_pods(pins: &Path) -> BTreeSet<(u64, u32, u16, u16)> {
    let keys = kernel::ports(pins).keys().map(Result::unwrap).collect::<Vec<_>>();
    keys.into_iter().map(|key| (key.netns_cookie, key.generation, key.direction, key.block)).collect()
}

pub(crate) fn pods(world: &mut World) {
    let mesh = Mesh::new(world);
    world.withdraw("b");
    let rules = ports_of_pods(&world.pins());
    let load = Load::of(world, &[("a", "10.99.0.2:8080", 4140)]);
    let mut pods = kernel::pods(&world.pins());
    let (_, entry) = pods.iter().next().unwrap().unwrap();
    let fill = |pods: &mut HashMap<MapData, u64, _>| {
        (0..u64::from(MAX_PODS)).take_while(|nobody| pods.insert(NOBODY + nobody, entry, 0).is_ok()).count()
    };
    // The agent removes entries of namespaces that are gone, these among them, every few seconds.
    let refused = world.eventually("a full map", |world| {
        fill(&mut pods);
        let refused = world.enrol(world.request("b")).err();
        if refused.is_none() {
            world.withdraw("b");
        }
        refused
    });
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("map PODS (is it full?)"), "{refused}");
    // b is as it was: not half enrolled, and nothing of its rules is left.
    assert!(world.pod("b", APP).say("attest").starts_with("error E"));
    reaches(&world.pod("c", APP).connect("10.98.0.2:8080"), 8080);
    assert_eq!(ports_of_pods(&world.pins()), rules);
    load.goes_on(world);
    load.all_well();
    (0..u64::from(MAX_PODS)).for_each(|nobody| drop(pods.remove(&(NOBODY + nobody))));
    world.enrol(world.request("b")).unwrap();
    mesh.is_meshed(world);
}

pub(crate) fn ports(world: &mut World) {
    let mesh = Mesh::new(world);
    let before = world.status().pods;
    let rules = ports_of_pods(&world.pins());
    let load = Load::start(world);
    let mut ports = kernel::ports(&world.pins());
    let key = |nobody: u64| PortBlockKey { netns_cookie: NOBODY + nobody, generation: 1, direction: 0, block: 0 };
    let full = (0..).take_while(|nobody| ports.insert(key(*nobody), PortBlock::default(), 0).is_ok()).count();
    assert!(full > 1000, "{full}");
    // Room for one block of ports, where the request has three or more.
    ports.remove(&key(0)).unwrap();
    let mut changed = world.request("a");
    // In the first block, which is written first.
    changed.skip_outbound_ports.push(PortRange { first: 80, last: 80 });
    let refused = world.enrol(changed).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("map PORTS (is it full?)"), "{refused}");
    assert_eq!(world.status().pods, before, "the old rules are in force");
    mesh.is_meshed(world);
    load.goes_on(world);
    (1..=full as u64).for_each(|nobody| drop(ports.remove(&key(nobody))));
    assert_eq!(ports_of_pods(&world.pins()), rules, "nothing of the refused rules is left");
    // Rules that come after those that were refused have nothing of them, though the generation is the same.
    let mut other = world.request("a");
    other.skip_outbound_ports = vec![PortRange { first: 9090, last: 9090 }, PortRange { first: 7777, last: 7777 }];
    assert_eq!(world.enrol(other).unwrap().generation, 2);
    reaches(&world.pod("a", APP).connect("10.99.0.2:80"), 4140);
    load.all_well();
    mesh.is_meshed(world);
}

pub(crate) fn flows(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut flows: Flows = HashMap::try_from(Map::LruHashMap(kernel::data(&world.pins(), map::FLOWS))).unwrap();
    let mut others = 0u32;
    let mut add = |flows: &mut Flows| {
        let mut key = [0; size_of::<FlowKey>()];
        key[..8].copy_from_slice(&NOBODY.to_ne_bytes());
        key[offset_of!(FlowKey, port)..][..4].copy_from_slice(&others.to_ne_bytes());
        flows.insert(key, [0; size_of::<Flow>()], 0).unwrap();
        others += 1;
    };
    (0..2 * MAX_FLOWS).for_each(|_| add(&mut flows));
    assert!(flows.keys().count() > MAX_FLOWS as usize / 2, "the map is as full as its kind gets");
    // More come while connections are made, so that each of those has to evict one.
    let load = Load::start(world);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                add(&mut flows);
            }
        });
        (0..20).for_each(|_| load.goes_on(world));
        stop.store(true, Ordering::Relaxed);
    });
    load.all_well();
    assert_eq!(world.status().flow_misses, 0);
    mesh.is_meshed(world);
}

pub(crate) fn events(world: &mut World) {
    const CONNECTIONS: usize = 4000;
    let mesh = Mesh::new(world);
    let mut app = world.pod("a", APP);
    let mut watch = world.watch(WatchRequest::default());
    let first = world.eventually("the first event", |_| {
        app.connect("10.99.0.2:8080");
        watch.try_next(Duration::from_millis(50))
    });
    assert_eq!(first.dropped_before, 0);
    assert_eq!(world.status().events_dropped, 0);
    // The only reader stands still.
    kill(world.agent_pid(), Signal::SIGSTOP).unwrap();
    let answer = app.say(&format!("load 10.99.0.2:8080 {CONNECTIONS}"));
    assert_eq!(answer, format!("4140={CONNECTIONS}"));
    mesh.is_meshed(world);
    kill(world.agent_pid(), Signal::SIGCONT).unwrap();
    world.eventually("a loss", |world| (world.status().events_dropped > 0).then_some(()));
    // Some more may be lost until the reader has caught up.
    let mut told = 0;
    while told < world.status().events_dropped {
        app.connect("10.99.0.2:8080");
        told += watch.find(|event| event.dropped_before > 0).dropped_before;
    }
    let dropped = world.status().events_dropped;
    assert_eq!(told, dropped, "all that was lost is told, once");
}
