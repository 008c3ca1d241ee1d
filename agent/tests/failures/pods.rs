//! What applications and proxies do that a mesh has to bear.

use std::{
    net::{Ipv4Addr, TcpStream},
    os::fd::IntoRawFd as _,
    thread,
};

use nix::sys::resource::{Resource, setrlimit};

use crate::{APP, Mesh, PROXY, kernel, reaches, world::World};

/// More descriptors than a process may have by default.
const DESCRIPTORS: u64 = 4096;

/// What the processes of this file do besides the common commands.
pub(crate) fn command(words: &[&str]) -> Option<String> {
    match words {
        ["fill-descriptors"] => {
            setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS + 64, DESCRIPTORS + 64).unwrap();
            for _ in 0..DESCRIPTORS {
                let _ = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
            }
            Some("ok".into())
        }
        ["flood"] => {
            // Refused at once, so that nothing but the verdict costs anything.
            thread::spawn(|| {
                loop {
                    let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, 9));
                }
            });
            Some("ok".into())
        }
        _ => None,
    }
}

pub(crate) fn proxy_with_many_descriptors(world: &mut World) {
    world.kill_agent();
    world.unload();
    let mut server = world.pod("b", APP);
    server.ok("serve 8080");
    let mut proxy = world.pod("b", PROXY);
    proxy.ok("fill-descriptors");
    proxy.ok("proxy");
    // It listened before any program could see it, so its sockets have to be taken from it.
    world.start_agent(&[]);
    world.enrol(world.request("b")).unwrap();
    reaches(&world.pod("c", APP).connect("10.98.0.2:8080"), 4143);
    assert!(world.pod("b", APP).say("attest").starts_with("flags=3 "));
}

pub(crate) fn proxy_crash_loop(world: &mut World) {
    let mesh = Mesh::new(world);
    let Mesh { a, _b, _servers } = mesh;
    drop(_b);
    let mut client = world.pod("c", APP);
    let mut app = world.pod("b", APP);
    // No agent takes part: the programs see each proxy begin to listen.
    world.kill_agent();
    for _ in 0..10 {
        assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
        assert_eq!(app.say("connect 192.0.2.1:80"), "error ConnectionRefused");
        let proxy = world.proxy_of("b");
        // At the first connection after listen(2).
        let answer = client.connect("10.98.0.2:8080");
        reaches(&answer, 4143);
        assert_eq!(answer.field("orig"), "10.98.0.2:8080");
        reaches(&app.connect("192.0.2.1:80"), 4140);
        drop(proxy);
    }
    world.start_agent(&[]);
    let mesh = Mesh { a, _b: world.proxy_of("b"), _servers };
    mesh.is_meshed(world);
    assert_eq!(world.status().flow_misses, 0);
}

pub(crate) fn source_port_reuse(world: &mut World) {
    const PORT: u16 = 33_333;
    let mesh = Mesh::new(world);
    let mut app = world.pod("a", APP);
    for round in 0..50 {
        for target in ["10.99.0.2:8080", "192.0.2.7:443", "10.99.0.2:8081"] {
            let answer = app.answer(&format!("connect-port {PORT} {target}"));
            reaches(&answer, 4140);
            assert_eq!((answer.field("orig"), answer.port("sockname")), (target, PORT), "{round}");
        }
    }
    // What a refused connection announced is nobody else's destination.
    let Mesh { a, _b, _servers } = mesh;
    drop(a);
    assert_eq!(app.say(&format!("connect-port {PORT} 192.0.2.9:80")), "error ConnectionRefused");
    let _a = world.proxy_of("a");
    let by_hand = app.answer(&format!("connect-port {PORT} 127.0.0.1:4140"));
    assert_eq!(by_hand.field("orig"), "127.0.0.1:4140");
    let answer = app.answer(&format!("connect-port {PORT} 192.0.2.8:80"));
    assert_eq!(answer.field("orig"), "192.0.2.8:80");
    assert_eq!(world.status().flow_misses, 0);
}

pub(crate) fn inherited_sockets(world: &mut World) {
    let mesh = Mesh::unmeshed(world);
    let mut app = world.pod("a", APP);
    // Connected before the enrolment: it stays what it is. Made before and connected after: redirected.
    let mut servers = world.pod("b", APP);
    servers.ok("echo 8082");
    reaches(&app.answer("open 10.99.0.2:8082"), 8082);
    app.ok("create");
    let opposite = app.answer("dial-in-child 10.99.0.2:8080");
    reaches(&opposite, 8080);
    app.ok("create");
    world.enrol(world.request("a")).unwrap();
    world.enrol(world.request("b")).unwrap();
    app.ok("ping");
    // Another program, in a child, with its parent's socket.
    let answer = app.answer("dial-in-child 10.99.0.2:8080");
    reaches(&answer, 4140);
    assert_eq!((answer.field("orig"), answer.field("peername")), ("10.99.0.2:8080", "10.99.0.2:8080"));
    // The proxy's socket in the hands of its child is the proxy's, because its user is.
    let mut proxy = world.pod("a", PROXY);
    proxy.ok("create");
    reaches(&proxy.answer("dial-in-child 10.99.0.2:8080"), 4143);
    mesh.is_meshed(world);
}

pub(crate) fn unknown_cookies(world: &mut World) {
    let mesh = Mesh::new(world);
    let mut pods = kernel::pods(&world.pins());
    let cookie = world.status().pods.iter().find(|pod| pod.pod.as_ref().unwrap().name == "b").unwrap().netns_cookie;
    let entry = pods.get(&cookie, 0).unwrap();
    // No namespace has the cookie 0: an entry for it is nobody's, and is collected.
    pods.insert(0, entry, 0).unwrap();
    let mut servers = world.pod("c", APP);
    servers.ok("serve 8085");
    reaches(&world.pod("c", APP).connect("10.98.0.3:8085"), 8085);
    assert!(world.pod("c", APP).say("attest").starts_with("error E"));
    mesh.is_meshed(world);
    world.eventually("the collection of the cookie 0", |_| pods.get(&0, 0).is_err().then_some(()));
    // Somebody else removed a pod's entry: inbound is refused, because steering is attached; outbound has nothing that
    // could tell the pod from one outside the mesh, and its proxy cannot attest any more.
    pods.remove(&cookie).unwrap();
    assert_eq!(world.pod("c", APP).say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    assert!(world.pod("b", APP).say("attest").starts_with("error E"));
    let unknown =
        |verdict: &weft_proto::agent::VerdictCount| verdict.verdict == "deny_unknown_pod" && verdict.count > 0;
    assert!(world.status().verdicts.iter().any(unknown));
    world.enrol(world.request("b")).unwrap();
    mesh.is_meshed(world);
}
