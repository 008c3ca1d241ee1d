//! Which connections are redirected, what both of their ends see, and which pass.

use weft_proto::agent::PortRange;
use weft_test_kit::{
    pod::{APPLICATION_UID, PROXY_UID},
    world::{Mesh, World},
};

pub(crate) fn outbound_is_redirected(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("a", APPLICATION_UID);
    for (target, original, source, proxy) in [
        ("10.99.0.2:8080", "10.99.0.2:8080", "10.99.0.1", "127.0.0.1:4140"),
        ("192.0.2.7:443", "192.0.2.7:443", "10.99.0.1", "127.0.0.1:4140"),
        ("[fd99::2]:8080", "[fd99::2]:8080", "[fd99::1]", "[::1]:4140"),
        ("[2001:db8::7]:443", "[2001:db8::7]:443", "[fd99::1]", "[::1]:4140"),
        ("[::ffff:10.99.0.2]:8080", "10.99.0.2:8080", "10.99.0.1", "127.0.0.1:4140"),
    ] {
        let answer = app.connect(target);
        answer.reached(4140);
        assert_eq!(answer.field("orig"), original, "{target}");
        assert_eq!(answer.field("accepted-local"), proxy, "{target}");
        // The application sees the peer that it dialled, the proxy sees the pod's address and the application's own
        // port.
        assert_eq!(answer.field("peername"), target);
        assert_eq!(answer.field("accepted-peer").rsplit_once(':').unwrap().0, source, "{target}");
        assert_eq!(answer.port("accepted-peer"), answer.port("sockname"), "{target}");
    }
    assert_eq!(world.status().flow_misses, 0);
}

pub(crate) fn inbound_is_steered(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("c", APPLICATION_UID);
    for target in ["10.98.0.2:8080", "10.98.0.2:7777", "[fd98::2]:8080", "10.98.0.2:4143"] {
        let answer = app.connect(target);
        answer.reached(4143);
        assert_eq!(answer.field("orig"), target);
        assert_eq!(answer.field("accepted-local"), target);
        assert_eq!(answer.field("peername"), target);
        assert_eq!(answer.port("accepted-peer"), answer.port("sockname"));
    }
    // The proxy of a calls b: not redirected by a, steered by b.
    let mut proxy = world.pod("a", PROXY_UID);
    let answer = proxy.connect("10.99.0.2:8080");
    answer.reached(4143);
    assert_eq!(answer.field("orig"), "10.99.0.2:8080");
}

pub(crate) fn exemptions_pass(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("b", APPLICATION_UID);
    for target in [
        "127.0.0.1:8080",
        "127.0.0.9:8080",
        "[::1]:8080",
        "0.0.0.0:8080",
        "[::]:8080",
        "[::ffff:127.0.0.1]:8080",
        "10.99.0.2:8080",
        "[fd99::2]:8080",
        "[::ffff:10.99.0.2]:8080",
    ] {
        app.connect(target).reached(8080);
    }
    let own_inbound = app.connect("10.99.0.2:4143");
    own_inbound.reached(4143);
    assert_eq!(own_inbound.field("orig"), "10.99.0.2:4143");
    let mut proxy = world.pod("b", PROXY_UID);
    for target in ["10.99.0.2:8080", "127.0.0.1:8080", "[fd99::2]:8080"] {
        proxy.connect(target).reached(8080);
    }
    // 9090 is skipped by a outbound and by b inbound.
    let mut app = world.pod("a", APPLICATION_UID);
    let answer = app.connect("10.99.0.2:9090");
    answer.reached(9090);
    assert_eq!(answer.field("peername"), "10.99.0.2:9090");
    app.connect("[fd99::2]:9090").reached(9090);
    app.connect("10.99.0.2:9091").reached(4140);
}

pub(crate) fn inbound_exemptions_pass(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("c", APPLICATION_UID);
    app.connect("10.98.0.2:9090").reached(9090);
    app.connect("10.98.0.2:8081").reached(4143);
    // c has a second address in a subnet that b skips.
    app.connect_from("10.98.0.77", "10.98.0.2:8081").reached(8081);
    app.connect_from("fd98::77", "[fd98::2]:8081").reached(8081);
    let mut request = world.request("b");
    request.skip_subnets.clear();
    request.skip_inbound_ports = vec![PortRange { first: 8081, last: 8081 }];
    world.enrol(request).unwrap();
    app.connect("10.98.0.2:8081").reached(8081);
    app.connect("10.98.0.2:9090").reached(4143);
    app.connect_from("10.98.0.77", "10.98.0.2:8080").reached(4143);
    world.mesh("b");
    app.connect("10.98.0.2:9090").reached(9090);
}

pub(crate) fn reused_sockets_forget(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("a", APPLICATION_UID);
    let answer = app.answer("reuse 10.99.0.2:8080 127.0.0.1:4140");
    assert_eq!(answer.field("peername"), "127.0.0.1:4140");
    // A direct connection: the proxy gets its own address, which its loop guard recognises.
    assert_eq!(answer.field("orig"), "127.0.0.1:4140");
    let answer = app.answer("reuse 127.0.0.1:4140 10.99.0.2:8080");
    assert_eq!(answer.field("peername"), "10.99.0.2:8080");
    assert_eq!(answer.field("orig"), "10.99.0.2:8080");
    let answer = app.answer("reuse 10.99.0.2:8080 10.99.0.2:8081");
    assert_eq!(answer.field("orig"), "10.99.0.2:8081");
}

pub(crate) fn chosen_source_stays(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("a", APPLICATION_UID);
    let answer = app.connect_from("10.99.0.11", "10.99.0.2:8080");
    answer.reached(4140);
    assert!(answer.field("accepted-peer").starts_with("10.99.0.11:"), "{answer:?}");
    assert_eq!(answer.field("orig"), "10.99.0.2:8080");
}

pub(crate) fn device_bound_is_redirected(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("a", 0);
    for target in ["10.99.0.2:8080", "[fd99::2]:8080"] {
        let answer = app.answer(&format!("connect-by to99 {target}"));
        answer.reached(4140);
        assert_eq!(answer.field("orig"), target);
    }
    // The kernel releases a socket from its device only for processes with CAP_NET_RAW; those of others are refused.
    let mut app = world.pod("a", APPLICATION_UID);
    assert!(app.say("connect-by to99 10.99.0.2:8080").starts_with("error"));
    // An own address is not the pod's own on a device that does not have it: here a answers instead.
    world.ip("a", "addr add fd98::2/128 dev to99 nodad");
    world.ip("b", "-6 route add fd98::2/128 dev to99");
    let target = "[fd98::2]:8080";
    let answer = world.pod("b", 0).answer(&format!("connect-by to99 {target}"));
    answer.reached(4140);
    assert_eq!(answer.field("orig"), target);
    assert!(world.pod("b", APPLICATION_UID).say(&format!("connect-by to99 {target}")).starts_with("error"));
}

/// A link-local address belongs to one link: on another link it belongs to another host.
pub(crate) fn link_local_addresses_are_one_links(world: &mut World) {
    let _mesh = Mesh::new(world);
    world.ip("b", "addr add fe80::99/64 dev to99 nodad");
    world.ip("b", "addr add fe80::98/64 dev to98 nodad");
    world.mesh("b");
    world.ip("c", "-6 addr flush dev to98 scope link");
    world.ip("c", "addr add fe80::99/64 dev to98 nodad");
    let answer = world.pod("c", 0).answer("connect-by to98 [fe80::98]:8080");
    answer.reached(4143);
    assert!(answer.field("accepted-peer").contains("fe80::99"), "{answer:?}");
}

/// The admin port likewise, in each family: by default it is open on IPv4 alone.
pub(crate) fn admin_port_is_the_proxys(world: &mut World) {
    let _mesh = Mesh::new(world);
    let ends = ["10.98.0.2:4191", "[fd98::2]:4191"];
    let mut client = world.pod("c", APPLICATION_UID);
    let mut app = world.pod("b", APPLICATION_UID);
    app.ok("serve 4191");
    ends.iter().for_each(|target| client.connect(target).reached(4143));
    drop(app);
    let mut admin = world.pod("b", PROXY_UID);
    admin.ok("serve-at 0.0.0.0:4191");
    let mut app = world.pod("b", APPLICATION_UID);
    app.ok("serve-at [fd98::2]:4191");
    let answer = client.connect(ends[0]);
    answer.reached(4191);
    assert_eq!((answer.field("accepted-local"), answer.field("pid")), (ends[0], admin.id().to_string().as_str()));
    assert!(client.say(&format!("connect {}", ends[1])).starts_with("error"), "an application serves the proxy's port");
    // While the proxy is down, an application can take its place in the pod, and gets nothing.
    drop((admin, app));
    let mut app = world.pod("b", APPLICATION_UID);
    app.ok("serve 4191");
    for target in ends {
        assert!(!client.say(&format!("connect {target}")).contains("listener=4191"), "{target}");
    }
}

/// As when an agent replaces one of before: the proxies that run are probed on.
pub(crate) fn admin_port_of_a_running_proxy(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut client = world.pod("b", PROXY_UID);
    let _proxy = world.proxy("c");
    let mut admin = world.pod("c", PROXY_UID);
    admin.ok("serve-at 0.0.0.0:4191");
    admin.ok("serve-at 0.0.0.0:9191");
    world.mesh("c");
    client.connect("10.98.0.3:4191").reached(4191);
    client.connect("10.98.0.3:9191").reached(4143);
    let mut request = world.request("c");
    request.admin_port = 9191;
    world.enrol(request).unwrap();
    client.connect("10.98.0.3:9191").reached(9191);
    client.connect("10.98.0.3:4191").reached(4143);
}

/// The tap port is skipped inbound only while the proxy listens on it: otherwise an application could serve on it
/// around proxy and policy.
pub(crate) fn control_port_is_the_proxys(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut app = world.pod("b", APPLICATION_UID);
    app.ok("serve 4190");
    let mut client = world.pod("c", APPLICATION_UID);
    for target in ["10.98.0.2:4190", "[fd98::2]:4190"] {
        client.connect(target).reached(4143);
    }
    drop(app);
    let mut tap = world.pod("b", PROXY_UID);
    tap.ok("serve 4190");
    for target in ["10.98.0.2:4190", "[fd98::2]:4190"] {
        let answer = client.connect(target);
        answer.reached(4190);
        assert_eq!(answer.field("accepted-local"), target);
    }
    drop(tap);
    // A proxy that serves tap only to its own pod does not open the port to others.
    let mut local = world.pod("b", PROXY_UID);
    local.ok("serve-at 127.0.0.1:4190");
    assert!(!client.say("connect 10.98.0.2:4190").contains("listener=4190"));
}
