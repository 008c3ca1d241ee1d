//! Behaviour of applications and proxies that a mesh has to tolerate.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::fd::IntoRawFd as _,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use aya::maps::HashMap;
use nix::sys::resource::{Resource, setrlimit};
use socket2::{Domain, Socket, Type};
use weft_ebpf_abi::{
    address::Address,
    pod::{BYPASSED, Pod as Entry},
    socket::{Client, ClientKey},
};
use weft_proto::agent::Direction;
use weft_test_kit::{
    agent::verdicts,
    pod::{APPLICATION_UID, PROXY_UID, Pod},
    world::{Mesh, World},
};

use crate::{kernel, map_full::NOBODY};

/// The port of clients that choose one.
const PORT: u16 = 33_333;
/// More descriptors than a process may have by default.
const DESCRIPTORS: u64 = 4096;

/// Runs the commands of this file, in addition to the common ones.
pub(crate) fn follow(words: &[&str]) -> Option<String> {
    match words {
        ["fill-descriptors"] => {
            setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS + 64, DESCRIPTORS + 64).unwrap();
            for _ in 0..DESCRIPTORS {
                let _ = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
            }
            Some("ok".into())
        }
        ["connect-twice", target] => {
            let target = target.parse::<SocketAddr>().unwrap().into();
            let [first, second] = [0; 2].map(|_| {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                socket.set_reuse_address(true).unwrap();
                socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)).into()).unwrap();
                socket
            });
            first.connect(&target).unwrap();
            Some(format!("{:?}", second.connect(&target).unwrap_err().kind()))
        }
        ["flood"] => {
            // Refused at once, so that only the verdict takes time.
            thread::spawn(|| {
                loop {
                    let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, 9));
                }
            });
            Some("ok".into())
        }
        _ => crate::hung::follow(words),
    }
}

/// A server and its proxy, which has thousands of descriptors and listened before there was an agent: no program could
/// record it, so its sockets have to be duplicated, and finding them takes a while.
fn listening_before_the_agent(world: &mut World) -> [Pod; 2] {
    world.kill_agent();
    world.unload();
    let mut server = world.pod("b", APPLICATION_UID);
    server.ok("serve 8080");
    let mut proxy = world.pod("b", PROXY_UID);
    proxy.ok("fill-descriptors");
    proxy.ok("proxy");
    world.start_agent(&[]);
    [server, proxy]
}

pub(crate) fn proxy_with_many_descriptors(world: &mut World) {
    let _running = listening_before_the_agent(world);
    world.mesh("b");
    world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(4143);
    assert!(world.pod("b", APPLICATION_UID).say("attest").starts_with("flags=3 "));
}

/// As iptables do, the client dials the proxy's port itself, before and after the enrolment.
pub(crate) fn running_proxy_keeps_its_clients(world: &mut World) {
    let _running = listening_before_the_agent(world);
    let mut client = world.pod("c", APPLICATION_UID);
    let (stop, connections) = (AtomicBool::new(false), AtomicUsize::new(0));
    let refused = thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut refused = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                refused.extend(Some(client.say("connect 10.98.0.2:4143")).filter(|answer| answer.starts_with("error")));
                connections.fetch_add(1, Ordering::Relaxed);
            }
            refused
        });
        let goes_on = || {
            let enough = connections.load(Ordering::Relaxed) + 5;
            world.eventually("connections", |_| (connections.load(Ordering::Relaxed) > enough).then_some(()));
        };
        goes_on();
        world.mesh("b");
        goes_on();
        stop.store(true, Ordering::Relaxed);
        load.join().unwrap()
    });
    assert_eq!(refused, [""; 0], "of {connections:?}");
    world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(4143);
}

pub(crate) fn proxy_crash_loop(world: &mut World) {
    let mesh = Mesh::new(world);
    let Mesh { a, b, servers } = mesh;
    drop(b);
    let mut client = world.pod("c", APPLICATION_UID);
    let mut app = world.pod("b", APPLICATION_UID);
    // No agent is involved: the programs see each proxy begin to listen.
    world.kill_agent();
    for _ in 0..10 {
        assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
        assert_eq!(app.say("connect 192.0.2.1:80"), "error ConnectionRefused");
        let proxy = world.proxy("b");
        // At the first connection after listen(2).
        let answer = client.connect("10.98.0.2:8080");
        answer.reached(4143);
        assert_eq!(answer.field("orig"), "10.98.0.2:8080");
        app.connect("192.0.2.1:80").reached(4140);
        drop(proxy);
    }
    world.start_agent(&[]);
    let mesh = Mesh { a, b: world.proxy("b"), servers };
    mesh.is_meshed(world);
    assert_eq!(world.status().flow_misses, 0);
}

pub(crate) fn source_port_reuse(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut app = world.pod("a", APPLICATION_UID);
    for round in 0..50 {
        for target in ["10.99.0.2:8080", "192.0.2.7:443", "10.99.0.2:8081"] {
            let answer = app.answer(&format!("connect-port {PORT} {target}"));
            answer.reached(4140);
            assert_eq!((answer.field("orig"), answer.port("sockname")), (target, PORT), "{round}");
        }
    }
    // The announcement of a refused connection is no other connection's destination.
    let Mesh { a, b: _b, servers: _servers } = mesh;
    drop(a);
    assert_eq!(app.say(&format!("connect-port {PORT} 192.0.2.9:80")), "error ConnectionRefused");
    let _a = world.proxy("a");
    let by_hand = app.answer(&format!("connect-port {PORT} 127.0.0.1:4140"));
    assert_eq!(by_hand.field("orig"), "127.0.0.1:4140");
    let answer = app.answer(&format!("connect-port {PORT} 192.0.2.8:80"));
    assert_eq!(answer.field("orig"), "192.0.2.8:80");
    assert_eq!(world.status().flow_misses, 0);
}

/// A client is in the map while its socket is open. One whose connect(2) fails before the SYN stays, for the agent.
pub(crate) fn clients_are_forgotten(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut clients = kernel::clients(&world.pins());
    let entries = |clients: &HashMap<_, ClientKey, Client>| -> Vec<_> { clients.iter().map(Result::unwrap).collect() };
    let mut proxy = world.pod("c", PROXY_UID);
    proxy.ok("halt 127.0.0.1:4140");
    world.mesh("c");
    world.eventually("no client", |_| entries(&clients).is_empty().then_some(()));
    let mut app = world.pod("c", APPLICATION_UID);
    app.ok("start 192.0.2.7:80");
    let [(_, open)] = entries(&clients)[..] else { panic!("one client") };
    let address = Address::from(IpAddr::from([192, 0, 2, 7]));
    assert_eq!((open.state.destination, open.state.port, open.connecting_since_ns), (address, 80, 0));
    proxy.ok("resume");
    assert_eq!(app.answer("finish").field("peername"), "192.0.2.7:80");
    world.eventually("no client", |_| entries(&clients).is_empty().then_some(()));
    // An entry that a former socket left is not believed.
    let mut proxy = world.pod("c", PROXY_UID);
    proxy.ok("halt [::1]:4140");
    app.ok("start [2001:db8::7]:80");
    let [(key, open)] = entries(&clients)[..] else { panic!("one client") };
    clients.insert(key, Client { source_port: open.source_port ^ 1, ..open }, 0).unwrap();
    proxy.ok("resume");
    assert_eq!(app.answer("finish").field("peername"), "[::1]:4140");
    world.eventually("no client", |_| entries(&clients).is_empty().then_some(()));
    // Disconnected, and connected again elsewhere.
    assert_eq!(app.answer("reuse 192.0.2.7:80 192.0.2.8:80").field("peername"), "192.0.2.8:80");
    world.eventually("no client", |_| entries(&clients).is_empty().then_some(()));
    // The source port is taken: the kernel refuses the second connection after the programs have redirected it.
    assert_eq!(app.say("connect-twice 192.0.2.9:80"), "AddrNotAvailable");
    world.eventually("one client", |_| (entries(&clients).len() == 1).then_some(()));
    let [(key, failed)] = entries(&clients)[..] else { panic!("one client") };
    assert_ne!(failed.connecting_since_ns, 0);
    clients.insert(key, Client { connecting_since_ns: 1, ..failed }, 0).unwrap();
    let others = [0, u64::MAX].map(|connecting_since_ns| Client { connecting_since_ns, ..failed });
    (0..).zip(others).for_each(|(number, other)| clients.insert(ClientKey(NOBODY + number), other, 0).unwrap());
    world.kill_agent();
    world.start_agent(&[]);
    let left: BTreeSet<_> = clients.keys().map(Result::unwrap).collect();
    assert_eq!(left, BTreeSet::from([ClientKey(NOBODY), ClientKey(NOBODY + 1)]));
}

pub(crate) fn inherited_sockets(world: &mut World) {
    let mesh = Mesh::unmeshed(world);
    let mut app = world.pod("a", APPLICATION_UID);
    // Connected before the enrolment: not redirected. Created before and connected after: redirected.
    let mut servers = world.pod("b", APPLICATION_UID);
    servers.ok("echo 8082");
    app.answer("open 10.99.0.2:8082").reached(8082);
    app.ok("create");
    let opposite = app.answer("dial-in-child 10.99.0.2:8080");
    opposite.reached(8080);
    app.ok("create");
    world.mesh("a");
    world.mesh("b");
    app.ok("ping");
    // Another program, in a child process, with its parent's socket.
    let answer = app.answer("dial-in-child 10.99.0.2:8080");
    answer.reached(4140);
    assert_eq!((answer.field("orig"), answer.field("peername")), ("10.99.0.2:8080", "10.99.0.2:8080"));
    // The proxy's socket in a child process still counts as the proxy's, because of its user.
    let mut proxy = world.pod("a", PROXY_UID);
    proxy.ok("create");
    proxy.answer("dial-in-child 10.99.0.2:8080").reached(4143);
    mesh.is_meshed(world);
}

/// The cookie of a pod's network namespace.
fn cookie(world: &World, name: &str) -> u64 {
    world.status().pods.iter().find(|pod| pod.pod.as_ref().unwrap().name == name).unwrap().netns_cookie
}

pub(crate) fn unknown_cookies(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut pods = kernel::pods(&world.pins());
    let cookie = cookie(world, "b");
    let entry = pods.get(&cookie, 0).unwrap();
    // No namespace has the cookie 0: an entry for it belongs to no pod, and is removed after a search.
    pods.insert(0, entry, 0).unwrap();
    let mut servers = world.pod("c", APPLICATION_UID);
    servers.ok("serve 8085");
    world.pod("c", APPLICATION_UID).connect("10.98.0.3:8085").reached(8085);
    assert!(world.pod("c", APPLICATION_UID).say("attest").starts_with("error E"));
    mesh.is_meshed(world);
    world.eventually("the collection of the cookie 0", |_| pods.get(&0, 0).is_err().then_some(()));
    // Another program removed a pod's entry: inbound is refused, because steering is attached; outbound cannot be told
    // from that of a pod outside the mesh, and the proxy is no longer attested.
    pods.remove(&cookie).unwrap();
    assert_eq!(world.pod("c", APPLICATION_UID).say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    assert!(world.pod("b", APPLICATION_UID).say("attest").starts_with("error E"));
    let unknown =
        |verdict: &weft_proto::agent::VerdictCount| verdict.verdict == "deny_unknown_pod" && verdict.count > 0;
    assert!(world.status().verdicts.iter().any(unknown));
    world.mesh("b");
    mesh.is_meshed(world);
}

/// The kernel uses the memory of a replaced entry again at once, for the next entry that is written on that processor:
/// a program that still reads the first one reads the second.
pub(crate) fn replaced_while_read(world: &mut World) {
    const REPLACED_AT_ONCE: usize = 100_000;
    // Both sides have to run at once, which is seldom where other tests want the processors, too.
    const MET: u64 = 10;
    let mesh = Mesh::new(world);
    let cookie = cookie(world, "a");
    let mut pods = kernel::pods(&world.pins());
    let entry = pods.get(&cookie, 0).unwrap();
    let bypassed = Entry { flags: entry.flags | BYPASSED, ..entry };
    let mut busy = world.pod("a", APPLICATION_UID);
    busy.ok("flood");
    world.eventually("connections that meet a replacement", |world| {
        for _ in 0..REPLACED_AT_ONCE {
            pods.insert(cookie, entry, 0).unwrap();
            pods.insert(NOBODY, bypassed, 0).unwrap();
        }
        let status = world.status();
        let outbound = |verdict| verdicts(&status, Direction::Outbound, verdict);
        assert_eq!(outbound("pass_pod_bypassed"), 0, "of {} connections", outbound("pass_loopback"));
        (outbound("deny_unknown_pod") > MET).then_some(())
    });
    drop(busy);
    // The agent's garbage collection removes the other entry: no network namespace has its cookie.
    mesh.is_meshed(world);
}
