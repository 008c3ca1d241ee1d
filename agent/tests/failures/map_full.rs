//! Full maps and a full ring buffer.

use std::{
    collections::BTreeSet,
    mem::offset_of,
    os::fd::AsRawFd as _,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData, SockHash};
use nix::sys::signal::{Signal, kill};
use tonic::Code;
use weft_ebpf_abi::{
    map,
    pod::{
        ADMISSION_SLOTS, AdmissionKey, BLOCK_PORTS, MAX_ADMISSIONS, MAX_PODS, MAX_PORT_BLOCKS, PortBlock, PortBlockKey,
    },
    socket::{
        Client, ClientKey, Flow, FlowKey, ListenerKey, MAX_CLIENTS, MAX_LISTENERS, MAX_WAITING, ProxyKey, SocketState,
        Waiting,
    },
};
use weft_proto::agent::{PodRef, PortRange, WatchRequest};
use weft_test_kit::{
    pod::{APPLICATION_UID, PROXY_UID},
    world::{Mesh, World},
};

use crate::{kernel, load::Load};

/// Cookies that no namespace has: the kernel counts up from 1.
pub(crate) const NOBODY: u64 = 1 << 60;

/// The maps of hand-overs, whose entries are otherwise written by programs only.
type Flows = HashMap<MapData, [u8; size_of::<FlowKey>()], [u8; size_of::<Flow>()]>;
type Waits = HashMap<MapData, [u8; size_of::<FlowKey>()], [u8; size_of::<Waiting>()]>;

type Listeners = SockHash<MapData, [u8; size_of::<ListenerKey>()]>;
type Admissions = HashMap<MapData, [u8; size_of::<AdmissionKey>()], u64>;
type Proxies = HashMap<MapData, [u8; size_of::<ProxyKey>()], u8>;

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
    // The agent removes entries of namespaces that are gone, including these, every few seconds.
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
    // b is unchanged: not half enrolled, and none of its rules is left.
    assert!(world.pod("b", APPLICATION_UID).say("attest").starts_with("error E"));
    world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(8080);
    assert_eq!(ports_of_pods(&world.pins()), rules);
    load.goes_on(world);
    load.all_well();
    (0..u64::from(MAX_PODS)).for_each(|nobody| drop(pods.remove(&(NOBODY + nobody))));
    world.mesh("b");
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
    // Room for one block of ports, but the request has three or more.
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
    // Later rules do not include the refused ones, although the generation is the same.
    let mut other = world.request("a");
    other.skip_outbound_ports = vec![PortRange { first: 9090, last: 9090 }, PortRange { first: 7777, last: 7777 }];
    assert_eq!(world.enrol(other).unwrap().generation, 2);
    world.pod("a", APPLICATION_UID).connect("10.99.0.2:80").reached(4140);
    load.all_well();
    mesh.is_meshed(world);
}

/// The pods of one namespace may have a share of the map, and no more: others, and its own pods with few entries, have
/// room.
pub(crate) fn ports_of_one_namespace(world: &mut World) {
    const BLOCKS: u16 = 32;
    let scattered =
        || (1..=BLOCKS).map(|block| u32::from(block * BLOCK_PORTS)).map(|first| PortRange { first, last: first });
    let request = |world: &World, namespace: &str, number: usize, few: bool| {
        let name = format!("{namespace}-{number}");
        world.add_netns(&name);
        let mut request = world.request("a");
        request.pod = Some(PodRef { namespace: namespace.to_owned(), name: name.clone() });
        request.netns_path = world.netns(&name).display().to_string();
        request.ips = vec![format!("10.97.0.{}", number + 1)];
        if !few {
            request.skip_outbound_ports = scattered().collect();
            request.skip_inbound_ports = scattered().collect();
        }
        request
    };
    let share = MAX_PORT_BLOCKS as usize / 8;
    let pods = share / (2 * usize::from(BLOCKS));
    let accepted: Vec<_> = (0..pods).map(|number| request(world, "tenant", number, false)).collect();
    for one in &accepted {
        world.enrol(one.clone()).unwrap();
    }
    let next = request(world, "tenant", pods, false);
    let refused = world.enrol(next.clone()).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let words = format!("the pods of namespace tenant with more than 8 each have {share} of {share}");
    assert!(refused.message().contains(&words), "{refused}");
    let has_entries = |number: usize| {
        world.status().pods.iter().any(|pod| pod.pod.as_ref().is_some_and(|pod| pod.name == format!("tenant-{number}")))
    };
    assert!(!has_entries(pods), "the refused pod is not half enrolled");
    // An agent that takes over counts what is in the kernel.
    world.kill_agent();
    world.start_agent(&[]);
    assert!(world.enrol(next.clone()).unwrap_err().message().contains(&words));
    // Pods that have their rules keep them, and may change them.
    let mut changed = accepted[0].clone();
    changed.skip_inbound_ports[0].last += 1;
    assert_eq!(world.enrol(changed).unwrap().generation, 2);
    world.enrol(request(world, "tenant", pods + 1, true)).unwrap();
    world.enrol(request(world, "other", pods + 2, false)).unwrap();
    let Some(first) = accepted.into_iter().next().and_then(|one| one.pod) else { panic!("a pod has a name") };
    world.withdraw_pod(first);
    world.enrol(next).unwrap();
}

/// The key of a connection that does not exist.
fn nobodys(number: u32) -> [u8; size_of::<FlowKey>()] {
    let mut key = [0; size_of::<FlowKey>()];
    key[..8].copy_from_slice(&NOBODY.to_ne_bytes());
    key[offset_of!(FlowKey, port)..][..4].copy_from_slice(&number.to_ne_bytes());
    key
}

/// A connection that waits since then.
fn since(since_ns: u64) -> [u8; size_of::<Waiting>()] {
    let mut value = [0; size_of::<Waiting>()];
    value[offset_of!(Waiting, since_ns)..].copy_from_slice(&since_ns.to_ne_bytes());
    value
}

/// Fills the map of connections that wait for their proxies with some that never end, and returns it.
fn fill_waits(world: &World) -> Waits {
    let mut waits: Waits = HashMap::try_from(Map::HashMap(kernel::data(&world.pins(), map::WAITING))).unwrap();
    let full =
        (0..=MAX_WAITING).take_while(|number| waits.insert(nobodys(*number), since(u64::MAX), 0).is_ok()).count();
    assert_eq!(full, MAX_WAITING as usize);
    waits
}

/// Sockets' own storage stands in for the map, and their applications see no difference.
pub(crate) fn clients(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut clients = kernel::clients(&world.pins());
    let nobodys = |number: u32| ClientKey(NOBODY + u64::from(number));
    let state = SocketState::default();
    let client = Client { state, netns_cookie: NOBODY, connecting_since_ns: 0, source_port: 0, pad: 0 };
    let full = (0..=MAX_CLIENTS).take_while(|number| clients.insert(nobodys(*number), client, 0).is_ok()).count();
    assert_eq!(full, MAX_CLIENTS as usize);
    let load = Load::start(world);
    (0..20).for_each(|_| load.goes_on(world));
    load.all_well();
    assert_eq!(world.status().flow_misses, 0);
    let mut app = world.pod("a", APPLICATION_UID);
    for target in ["10.99.0.2:8080", "[fd99::2]:8080"] {
        assert_eq!(app.connect(target).field("peername"), target);
    }
    assert_eq!(clients.iter().map(Result::unwrap).filter(|(_, client)| client.netns_cookie != NOBODY).count(), 0);
    (0..MAX_CLIENTS).for_each(|number| clients.remove(&nobodys(number)).unwrap());
    mesh.is_meshed(world);
}

pub(crate) fn waiting(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut waits = fill_waits(world);
    let load = Load::start(world);
    (0..20).for_each(|_| load.goes_on(world));
    load.all_well();
    assert_eq!(world.status().flow_misses, 0);
    let is_nobodys = |key: &[u8]| key.starts_with(&NOBODY.to_ne_bytes());
    let of_pods = |waits: &Waits| waits.keys().map(Result::unwrap).filter(|key| !is_nobodys(key)).count();
    assert_eq!(of_pods(&waits), 0, "there was no room");
    (0..MAX_WAITING).for_each(|number| waits.remove(&nobodys(number)).unwrap());
    mesh.is_meshed(world);
    // A proxy's question ends the wait, and so does its refusal; what no proxy asks about is forgotten.
    let mut app = world.pod("c", APPLICATION_UID);
    world.mesh("c");
    assert_eq!(app.say("connect 192.0.2.7:80"), "error ConnectionRefused");
    assert_eq!(of_pods(&waits), 0, "of a connection that was refused");
    waits.insert(nobodys(1), since(1), 0).unwrap();
    waits.insert(nobodys(2), since(u64::MAX), 0).unwrap();
    world.eventually("no connection that waits, but the one of now", |_| {
        let left: Vec<_> = waits.keys().map(Result::unwrap).collect();
        (left == [nobodys(2)]).then_some(())
    });
}

pub(crate) fn flows(world: &mut World) {
    let mesh = Mesh::new(world);
    let _waits = fill_waits(world);
    let mut flows: Flows = HashMap::try_from(Map::LruHashMap(kernel::data(&world.pins(), map::FLOWS))).unwrap();
    let mut others = 0u32;
    let mut add = |flows: &mut Flows| {
        flows.insert(nobodys(others), [0; size_of::<Flow>()], 0).unwrap();
        others += 1;
    };
    let room = kernel::data(&world.pins(), map::FLOWS).info().unwrap().max_entries();
    (0..2 * room).for_each(|_| add(&mut flows));
    assert!(flows.keys().count() > room as usize / 2, "the map is as full as its kind gets");
    // More entries are added while connections are made, so that each connection has to evict one.
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

/// A connection whose SYN waits for a full accept queue is announced again when the SYN is sent again, even if other
/// pods' connections have evicted it from the map meanwhile.
pub(crate) fn flows_while_waiting(world: &mut World) {
    let _mesh = Mesh::new(world);
    let _waits = fill_waits(world);
    let mut flows: Flows = HashMap::try_from(Map::LruHashMap(kernel::data(&world.pins(), map::FLOWS))).unwrap();
    let mut proxy = world.pod("c", PROXY_UID);
    // Room for one connection in the queue: the kernel counts from zero.
    proxy.ok("halt 127.0.0.1:4140");
    world.mesh("c");
    let mut app = world.pod("c", APPLICATION_UID);
    (0..3).for_each(|_| app.ok("start 192.0.2.7:80"));
    app.ok("start 192.0.2.8:80");
    for other in 0..4 * kernel::data(&world.pins(), map::FLOWS).info().unwrap().max_entries() {
        flows.insert(nobodys(other), [0; size_of::<Flow>()], 0).unwrap();
    }
    proxy.ok("resume");
    for expected in ["192.0.2.7:80", "192.0.2.7:80", "192.0.2.7:80", "192.0.2.8:80"] {
        assert_eq!(app.answer("finish").field("orig"), expected);
    }
    assert_eq!(world.status().flow_misses, 0);
}

pub(crate) fn listeners(world: &mut World) {
    let Mesh { a: _a, b, servers: _servers } = Mesh::new(world);
    let load = Load::of(world, &[("a", "10.99.0.2:8080", 4140)]);
    drop(b);
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut listeners: Listeners =
        SockHash::try_from(Map::SockHash(kernel::data(&world.pins(), map::LISTENERS))).unwrap();
    let key = |nobody: u64| {
        let mut key = [0; size_of::<ListenerKey>()];
        key[..8].copy_from_slice(&(NOBODY + nobody).to_ne_bytes());
        key
    };
    let full = (0..).take_while(|nobody| listeners.insert(key(*nobody), socket.as_raw_fd(), 0).is_ok()).count();
    assert!(full > 1000, "{full}");
    // A proxy that starts now gets no inbound connections, is not attested, and the loss is counted.
    let b = world.proxy("b");
    assert!(world.status().listeners_lost > 0);
    assert_eq!(world.pod("c", APPLICATION_UID).say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    load.goes_on(world);
    load.all_well();
    drop(b);
    (0..full as u64).for_each(|nobody| drop(listeners.remove(&key(nobody))));
    let _b = world.proxy("b");
    world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(4143);
    assert!(world.pod("b", APPLICATION_UID).say("attest").starts_with("flags=3 "));
}

pub(crate) fn proxies(world: &mut World) {
    let Mesh { a: _a, b, servers: _servers } = Mesh::new(world);
    drop(b);
    let mut proxies: Proxies = HashMap::try_from(Map::HashMap(kernel::data(&world.pins(), map::PROXIES))).unwrap();
    let key = |nobody: u64| {
        let mut key = [0; size_of::<ProxyKey>()];
        key[..8].copy_from_slice(&(NOBODY + nobody).to_ne_bytes());
        key
    };
    // The agent removes notes of proxies that do not listen, including these, every few seconds.
    let _b = world.eventually("a full map", |world| {
        let notes: Vec<_> = proxies.keys().map(Result::unwrap).collect();
        notes.iter().for_each(|note| drop(proxies.remove(note)));
        (0..).take_while(|nobody| proxies.insert(key(*nobody), 1, 0).is_ok()).for_each(drop);
        let lost = world.status().listeners_lost;
        let b = world.proxy("b");
        (world.status().listeners_lost > lost).then_some(b)
    });
    assert!(world.pod("b", APPLICATION_UID).say("attest").starts_with("flags=1 "));
    (0..u64::from(MAX_LISTENERS)).for_each(|nobody| drop(proxies.remove(&key(nobody))));
    // Its listener exists; the next enrolment records it.
    world.mesh("b");
    assert!(world.pod("b", APPLICATION_UID).say("attest").starts_with("flags=3 "));
    world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(4143);
}

pub(crate) fn admissions(world: &mut World) {
    world.kill_agent();
    world.start_agent(&["--self-enrol-uid", "2102"]);
    let mut admissions: Admissions =
        HashMap::try_from(Map::HashMap(kernel::data(&world.pins(), map::ADMISSIONS))).unwrap();
    for nobody in 0..u64::from(MAX_ADMISSIONS) {
        let mut key = [0; size_of::<AdmissionKey>()];
        key[..8].copy_from_slice(&(NOBODY + nobody).to_ne_bytes());
        admissions.insert(key, NOBODY + nobody, 0).unwrap();
    }
    // The kernel enrols no further namespace by itself, and reports this; the agent does enrol it.
    let mesh = Mesh::unmeshed(world);
    assert!(world.pod("a", APPLICATION_UID).say("attest").starts_with("error E"));
    assert!(world.status().admissions_refused > 0);
    world.mesh("a");
    world.mesh("b");
    mesh.is_meshed(world);
}

/// Entries in PODS, LISTENERS, PROXIES and ADMISSIONS.
fn recorded(world: &World) -> [usize; 4] {
    let data = |name| kernel::data(&world.pins(), name);
    let listeners: Listeners = SockHash::try_from(Map::SockHash(data(map::LISTENERS))).unwrap();
    let proxies: Proxies = HashMap::try_from(Map::HashMap(data(map::PROXIES))).unwrap();
    let admissions: Admissions = HashMap::try_from(Map::HashMap(data(map::ADMISSIONS))).unwrap();
    let pods = kernel::pods(&world.pins()).keys().count();
    [pods, listeners.keys().count(), proxies.keys().count(), admissions.keys().count()]
}

/// Limits hold for any number of users and network namespaces in a container.
pub(crate) fn one_container(world: &mut World) {
    world.kill_agent();
    world.start_agent(&["--self-enrol-uid", "2102"]);
    let mut tenant = world.pod_in("tenant", "c", 0);
    tenant.ok("users 50");
    assert_eq!(recorded(world), [0; 4], "no user but the proxy's leaves anything");
    drop(tenant);
    let mut tenant = world.pod_in("tenant", "c", 0);
    tenant.ok("namespaces 20");
    let slots = ADMISSION_SLOTS as usize;
    assert_eq!(recorded(world), [slots; 4]);
    assert!(world.status().admissions_refused >= 20 - slots as u64);
    // Other proxies start normally, and are enrolled by the kernel.
    let mut a = world.pod_in("other", "a", PROXY_UID);
    a.ok("proxy");
    assert!(world.pod("a", APPLICATION_UID).say("attest").starts_with("flags=1 "));
    let mut b = world.pod_in("another", "b", PROXY_UID);
    b.ok("proxy");
    let mut servers = world.pod("b", APPLICATION_UID);
    servers.ok("serve 9090");
    world.mesh("a");
    world.mesh("b");
    world.pod("a", APPLICATION_UID).connect("10.99.0.2:8080").reached(4140);
    world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(4143);
}

pub(crate) fn events(world: &mut World) {
    const CONNECTIONS: usize = 4000;
    let mesh = Mesh::new(world);
    let mut app = world.pod("a", APPLICATION_UID);
    let mut watch = world.watch(WatchRequest::default());
    let first = world.eventually("the first event", |_| {
        app.connect("10.99.0.2:8080");
        watch.try_next(Duration::from_millis(50))
    });
    assert_eq!(first.dropped_before, 0);
    assert_eq!(world.status().events_dropped, 0);
    // The only reader is stopped.
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
    assert_eq!(told, dropped, "each lost event is counted in exactly one report");
}
