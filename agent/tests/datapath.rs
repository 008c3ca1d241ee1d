//! The agent against the real kernel: three network namespaces joined by veth pairs, two of them enrolled, with this
//! very program as their proxies and applications. Needs root, cgroup2 and iproute2, and fails without them.
//!
//! ```text
//!   a (meshed) ───10.99.0.0/24, fd99::/64─── b (meshed) ───10.98.0.0/24, fd98::/64─── c (not meshed)
//! ```
//!
//! All names carry the process id, so runs do not meet; everything is removed on the way out, panics included.

#![expect(clippy::print_stdout, reason = "a test program without libtest reports by itself")]
#![expect(clippy::allow_attributes, reason = "modules that test programs share are not used whole by each")]
#![expect(clippy::unwrap_used, reason = "a test ends where its expectation does")]

#[path = "datapath/enrolment.rs"]
mod enrolment;
#[path = "datapath/pod.rs"]
mod pod;
#[expect(dead_code, reason = "the truth table makes worlds of its own")]
#[path = "datapath/world.rs"]
mod world;

use std::{panic::AssertUnwindSafe, process::ExitCode, time::Duration};

use tonic::Code;
use weft_proto::agent::{PortRange, WatchRequest};

use crate::{
    pod::{Answer, Pod},
    world::World,
};

const PROXY: u32 = 2102;
const APP: u32 = 1000;

type Check = (&'static str, fn(&mut World));

/// In this order, because a later check finds what an earlier one left.
const CHECKS: [Check; 29] = [
    ("an unenrolled namespace notices nothing", unenrolled_notices_nothing),
    ("a request that cannot be used names its field", bad_requests_are_refused),
    ("enrolment is attested and idempotent", enrolment_is_attested_and_idempotent),
    ("outbound reaches the proxy with the original destination", outbound_is_redirected),
    ("inbound reaches the proxy with the original destination", inbound_is_steered),
    ("loopback, own address, skipped ports and the proxy pass", exemptions_pass),
    ("inbound skipped ports and subnets pass", inbound_exemptions_pass),
    ("a socket used again forgets its first destination", reused_sockets_forget),
    ("the application's own source address stays", chosen_source_stays),
    ("a socket bound to a device is redirected or refused", device_bound_is_redirected),
    ("a link-local address is one link's", link_local_addresses_are_one_links),
    ("the control port is the proxy's alone", control_port_is_the_proxys),
    ("traces tell who, where from, where to and why", traces_tell),
    ("a filter leaves out the rest", traces_filter),
    ("a group of listeners outlives its members", listener_group_outlives_members),
    ("another user's listener is not the proxy", foreign_listener_is_ignored),
    ("without its proxy a pod is refused, never open", refuses_without_proxy),
    ("a killed agent is not missed, and the next one takes over", agent_restarts),
    ("other programs replace those in force in place", programs_are_replaced),
    ("no connection is lost while agents come and go", nothing_is_lost_under_load),
    ("unloading leaves nothing", unload_leaves_nothing),
    ("proxies that listened before the programs did are found", running_proxies_are_found),
    ("without an agent the kernel enrols a pod when its proxy listens", enrolment::kernel_enrols_by_itself),
    ("inbound is attested when the proxy listens", enrolment::attestation_wants_a_listener),
    ("a proxy is known by its group, or by its cgroup alone", enrolment::proxies_are_known_by_group_or_cgroup),
    ("a strict pod's ports are its proxy's alone", enrolment::strict_pods_have_no_impostors),
    ("bypass of a pod and of the node is complete and told", enrolment::bypass_is_complete_and_told),
    ("an accepted connection finds its verdict", enrolment::acceptance_is_matched),
    ("what is explained is what happens", enrolment::explanations_come_true),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|argument| argument == pod::SUBCOMMAND) {
        return pod::main(&arguments[1..], |_| None);
    }
    if arguments.iter().any(|argument| argument == "--list") {
        CHECKS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let mut world = World::new();
    // A failed check is reported once, below.
    std::panic::set_hook(Box::new(|_| {}));
    let mut failures = 0;
    for (name, check) in CHECKS {
        print!("test {name} ... ");
        if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| check(&mut world))) {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            println!("FAILED\n{}", text.unwrap_or_default());
            failures += 1;
        } else {
            println!("ok");
        }
    }
    if failures > 0 {
        println!("\ntest result: FAILED. {failures} of {}; the last agent said:\n{}", CHECKS.len(), world.agent_log());
        return ExitCode::FAILURE;
    }
    println!("\ntest result: ok. {} passed", CHECKS.len());
    ExitCode::SUCCESS
}

/// What the server `port` of a pod says when it is reached directly.
fn reaches(answer: &Answer, port: u16) {
    assert_eq!(answer.listener(), Some(port), "{answer:?}");
}

fn unenrolled_notices_nothing(world: &mut World) {
    let mut app = world.pod("a", APP);
    world.keep("b app", |world| {
        let mut server = world.pod("b", APP);
        server.ok("serve 8080");
        server.ok("serve 8081");
        server.ok("serve 9090");
        server
    });
    for (target, peer) in [("10.99.0.2:8080", "10.99.0.2:8080"), ("[fd99::2]:8080", "[fd99::2]:8080")] {
        let answer = app.connect(target);
        reaches(&answer, 8080);
        assert_eq!(answer.field("peername"), peer);
        // No connection tracking and no hook: the kernel's own errors.
        assert!(answer.field("orig").starts_with("error"), "{answer:?}");
    }
    // ENOPROTOOPT or EOPNOTSUPP, by kernel version.
    assert!(app.say("attest").starts_with("error E"));
}

fn bad_requests_are_refused(world: &mut World) {
    let mut request = world.request("a");
    request.netns_path = "/run/netns/does-not-exist-weft".into();
    assert_eq!(world.enrol(request).unwrap_err().code(), Code::NotFound);
    let mut request = world.request("a");
    request.ips = vec!["nonsense".into()];
    let status = world.enrol(request).unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("ips: "), "{status}");
    let mut request = world.request("a");
    request.netns_path = "/proc/self/status".into();
    assert_eq!(world.enrol(request).unwrap_err().code(), Code::FailedPrecondition);
    assert!(world.status().pods.is_empty());
}

fn enrolment_is_attested_and_idempotent(world: &mut World) {
    world.keep("a proxy", |world| world.proxy("a"));
    let first = world.enrol(world.request("a")).unwrap();
    let again = world.enrol(world.request("a")).unwrap();
    assert_eq!((first.generation, again.generation), (1, 1));
    let mut changed = world.request("a");
    changed.skip_subnets.clear();
    assert_eq!(world.enrol(changed).unwrap().generation, 2);
    assert_eq!(world.enrol(world.request("a")).unwrap().generation, 3);
    // The proxy of b listens after the enrolment, the one of a did before.
    world.enrol(world.request("b")).unwrap();
    world.keep("b proxy", |world| world.proxy("b"));
    let mut app = world.pod("a", APP);
    assert_eq!(app.say("attest"), format!("flags=3 generation=3 cookie={}", first.netns_cookie));
    let status = world.status();
    assert_eq!(status.pods.len(), 2);
    assert!(status.pods.iter().all(|pod| pod.outbound && pod.inbound), "{status:?}");
}

fn outbound_is_redirected(world: &mut World) {
    let mut app = world.pod("a", APP);
    for (target, original, source, proxy) in [
        ("10.99.0.2:8080", "10.99.0.2:8080", "10.99.0.1", "127.0.0.1:4140"),
        ("192.0.2.7:443", "192.0.2.7:443", "10.99.0.1", "127.0.0.1:4140"),
        ("[fd99::2]:8080", "[fd99::2]:8080", "[fd99::1]", "[::1]:4140"),
        ("[2001:db8::7]:443", "[2001:db8::7]:443", "[fd99::1]", "[::1]:4140"),
        ("[::ffff:10.99.0.2]:8080", "10.99.0.2:8080", "10.99.0.1", "127.0.0.1:4140"),
    ] {
        let answer = app.connect(target);
        reaches(&answer, 4140);
        assert_eq!(answer.field("orig"), original, "{target}");
        assert_eq!(answer.field("accepted-local"), proxy, "{target}");
        // The application sees whom it dialled, the proxy sees the pod's address and the application's very port.
        assert_eq!(answer.field("peername"), target);
        assert_eq!(answer.field("accepted-peer").rsplit_once(':').unwrap().0, source, "{target}");
        assert_eq!(answer.port("accepted-peer"), answer.port("sockname"), "{target}");
    }
    assert_eq!(world.status().flow_misses, 0);
}

fn inbound_is_steered(world: &mut World) {
    let mut app = world.pod("c", APP);
    for target in ["10.98.0.2:8080", "10.98.0.2:7777", "[fd98::2]:8080", "10.98.0.2:4143"] {
        let answer = app.connect(target);
        reaches(&answer, 4143);
        assert_eq!(answer.field("orig"), target);
        assert_eq!(answer.field("accepted-local"), target);
        assert_eq!(answer.field("peername"), target);
        assert_eq!(answer.port("accepted-peer"), answer.port("sockname"));
    }
    // The proxy of a calls b: not redirected by a, steered by b.
    let mut proxy = world.pod("a", PROXY);
    let answer = proxy.connect("10.99.0.2:8080");
    reaches(&answer, 4143);
    assert_eq!(answer.field("orig"), "10.99.0.2:8080");
}

fn exemptions_pass(world: &mut World) {
    let mut app = world.pod("b", APP);
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
        reaches(&app.connect(target), 8080);
    }
    let own_inbound = app.connect("10.99.0.2:4143");
    reaches(&own_inbound, 4143);
    assert_eq!(own_inbound.field("orig"), "10.99.0.2:4143");
    let mut proxy = world.pod("b", PROXY);
    for target in ["10.99.0.2:8080", "127.0.0.1:8080", "[fd99::2]:8080"] {
        reaches(&proxy.connect(target), 8080);
    }
    // 9090 is skipped by a outbound and by b inbound.
    let mut app = world.pod("a", APP);
    let answer = app.connect("10.99.0.2:9090");
    reaches(&answer, 9090);
    assert_eq!(answer.field("peername"), "10.99.0.2:9090");
    reaches(&app.connect("[fd99::2]:9090"), 9090);
    reaches(&app.connect("10.99.0.2:9091"), 4140);
}

fn inbound_exemptions_pass(world: &mut World) {
    let mut app = world.pod("c", APP);
    reaches(&app.connect("10.98.0.2:9090"), 9090);
    reaches(&app.connect("10.98.0.2:8081"), 4143);
    // c has a second address in a subnet that b skips.
    reaches(&app.connect_from("10.98.0.77", "10.98.0.2:8081"), 8081);
    reaches(&app.connect_from("fd98::77", "[fd98::2]:8081"), 8081);
    let mut request = world.request("b");
    request.skip_subnets.clear();
    request.skip_inbound_ports = vec![PortRange { first: 8081, last: 8081 }];
    world.enrol(request).unwrap();
    reaches(&app.connect("10.98.0.2:8081"), 8081);
    reaches(&app.connect("10.98.0.2:9090"), 4143);
    reaches(&app.connect_from("10.98.0.77", "10.98.0.2:8080"), 4143);
    world.enrol(world.request("b")).unwrap();
    reaches(&app.connect("10.98.0.2:9090"), 9090);
}

fn reused_sockets_forget(world: &mut World) {
    let mut app = world.pod("a", APP);
    let answer = app.answer("reuse 10.99.0.2:8080 127.0.0.1:4140");
    assert_eq!(answer.field("peername"), "127.0.0.1:4140");
    // Dialled by hand: the proxy learns its own address, which its loop guard knows.
    assert_eq!(answer.field("orig"), "127.0.0.1:4140");
    let answer = app.answer("reuse 127.0.0.1:4140 10.99.0.2:8080");
    assert_eq!(answer.field("peername"), "10.99.0.2:8080");
    assert_eq!(answer.field("orig"), "10.99.0.2:8080");
    let answer = app.answer("reuse 10.99.0.2:8080 10.99.0.2:8081");
    assert_eq!(answer.field("orig"), "10.99.0.2:8081");
}

fn chosen_source_stays(world: &mut World) {
    let mut app = world.pod("a", APP);
    let answer = app.connect_from("10.99.0.11", "10.99.0.2:8080");
    reaches(&answer, 4140);
    assert!(answer.field("accepted-peer").starts_with("10.99.0.11:"), "{answer:?}");
    assert_eq!(answer.field("orig"), "10.99.0.2:8080");
}

fn device_bound_is_redirected(world: &mut World) {
    let mut app = world.pod("a", 0);
    for target in ["10.99.0.2:8080", "[fd99::2]:8080"] {
        let answer = app.answer(&format!("connect-by to99 {target}"));
        reaches(&answer, 4140);
        assert_eq!(answer.field("orig"), target);
    }
    // The kernel frees a socket from its device only for processes with CAP_NET_RAW; the others are refused.
    let mut app = world.pod("a", APP);
    assert!(app.say("connect-by to99 10.99.0.2:8080").starts_with("error"));
    // An own address is not the pod's own beyond a device that does not have it: here a answers instead.
    world.ip("a", "addr add fd98::2/128 dev to99 nodad");
    world.ip("b", "-6 route add fd98::2/128 dev to99");
    let target = "[fd98::2]:8080";
    let answer = world.pod("b", 0).answer(&format!("connect-by to99 {target}"));
    reaches(&answer, 4140);
    assert_eq!(answer.field("orig"), target);
    assert!(world.pod("b", APP).say(&format!("connect-by to99 {target}")).starts_with("error"));
    world.ip("b", "-6 route del fd98::2/128 dev to99");
    world.ip("a", "addr del fd98::2/128 dev to99");
}

/// A link-local address belongs to one link: on another, it is another host's.
fn link_local_addresses_are_one_links(world: &mut World) {
    world.ip("b", "addr add fe80::99/64 dev to99 nodad");
    world.ip("b", "addr add fe80::98/64 dev to98 nodad");
    world.enrol(world.request("b")).unwrap();
    world.ip("c", "-6 addr flush dev to98 scope link");
    world.ip("c", "addr add fe80::99/64 dev to98 nodad");
    let answer = world.pod("c", 0).answer("connect-by to98 [fe80::98]:8080");
    reaches(&answer, 4143);
    assert!(answer.field("accepted-peer").contains("fe80::99"), "{answer:?}");
    world.ip("c", "addr del fe80::99/64 dev to98");
    world.ip("b", "addr del fe80::98/64 dev to98");
    world.ip("b", "addr del fe80::99/64 dev to99");
}

/// Tap's port passes by only to the proxy: an application could serve on it around proxy and policy.
fn control_port_is_the_proxys(world: &mut World) {
    let mut app = world.pod("b", APP);
    app.ok("serve 4190");
    let mut client = world.pod("c", APP);
    for target in ["10.98.0.2:4190", "[fd98::2]:4190"] {
        reaches(&client.connect(target), 4143);
    }
    drop(app);
    let mut tap = world.pod("b", PROXY);
    tap.ok("serve 4190");
    for target in ["10.98.0.2:4190", "[fd98::2]:4190"] {
        let answer = client.connect(target);
        reaches(&answer, 4190);
        assert_eq!(answer.field("accepted-local"), target);
    }
    drop(tap);
    // A proxy that serves tap to its own pod alone does not open it to others.
    let mut local = world.pod("b", PROXY);
    local.ok("serve-at 127.0.0.1:4190");
    assert!(!client.say("connect 10.98.0.2:4190").contains("listener=4190"));
}

fn traces_tell(world: &mut World) {
    let mut watch = world.watch(WatchRequest::default());
    let mut app = world.pod("a", APP);
    let answer = world.eventually("the first event", |_| {
        let answer = app.connect("10.99.0.2:8080");
        watch.try_next(Duration::from_millis(50)).map(|event| (answer, event))
    });
    let (answer, event) = answer;
    assert_eq!(event.verdict, "redirect");
    assert_eq!(event.pod.as_ref().map(|pod| pod.name.as_str()), Some("a"));
    assert_eq!((event.uid, event.direction), (APP, 1));
    assert_eq!(event.original_destination, "10.99.0.2:8080");
    assert_eq!(event.new_destination, "127.0.0.1:4140");
    assert!(event.source.starts_with("10.99.0.1:"), "{event:?}");
    assert!(event.pid > 0 && !event.command.is_empty(), "{event:?}");
    let _ = answer;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    assert!(now.abs_diff(u128::from(event.time_unix_ns)) < 10_000_000_000, "{event:?}");

    let mut client = world.pod("c", APP);
    client.connect("10.98.0.2:8080");
    let event = watch.find(|event| event.direction == 2);
    assert_eq!((event.verdict.as_str(), event.new_destination.as_str()), ("redirect", "10.98.0.2:4143"));
    assert_eq!(event.original_destination, "10.98.0.2:8080");
    assert!(event.source.starts_with("10.98.0.3:"), "{event:?}");
    app.connect("127.0.0.1:4140");
    let event = watch.find(|event| event.verdict == "pass_loopback");
    assert_eq!(event.new_destination, "127.0.0.1:4140");
}

fn traces_filter(world: &mut World) {
    let mut watch =
        world.watch(WatchRequest { verdict: "pass_skip_port".into(), pod: "a".into(), ..Default::default() });
    let mut app = world.pod("a", APP);
    let event = world.eventually("a skipped port", |_| {
        app.connect("10.99.0.2:8080");
        app.connect("10.99.0.2:9090");
        watch.try_next(Duration::from_millis(50))
    });
    assert_eq!(event.original_destination, "10.99.0.2:9090");
    assert_eq!(event.verdict, "pass_skip_port");
    let refused = world.try_watch(WatchRequest { verdict: "nonsense".into(), ..Default::default() });
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
}

fn listener_group_outlives_members(world: &mut World) {
    let second = world.proxy("b");
    let mut app = world.pod("c", APP);
    let pids = |app: &mut Pod| -> std::collections::BTreeSet<String> {
        (0..64).map(|_| app.connect("10.98.0.2:8080").field("pid").to_owned()).collect()
    };
    assert_eq!(pids(&mut app).len(), 2, "the kernel spreads over the group");
    // The first member, which the map names first, goes; the second stays.
    world.drop_kept("b proxy");
    assert_eq!(pids(&mut app).len(), 1);
    world.keep("b proxy", |_| second);
}

fn foreign_listener_is_ignored(world: &mut World) {
    world.drop_kept("b proxy");
    let mut impostor = world.pod("b", APP);
    impostor.ok("serve 4143");
    let mut client = world.pod("c", APP);
    assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    drop(impostor);
    world.keep("b proxy", |world| world.proxy("b"));
    reaches(&client.connect("10.98.0.2:8080"), 4143);
}

fn refuses_without_proxy(world: &mut World) {
    world.drop_kept("a proxy");
    world.drop_kept("b proxy");
    let mut app = world.pod("a", APP);
    for target in ["10.99.0.2:8080", "[fd99::2]:8080", "[::ffff:10.99.0.2]:8080"] {
        assert_eq!(app.say(&format!("connect {target}")), "error ConnectionRefused", "{target}");
    }
    reaches(&app.connect("10.99.0.2:9090"), 9090);
    let mut client = world.pod("c", APP);
    for target in ["10.98.0.2:8080", "[fd98::2]:8080"] {
        assert_eq!(client.say(&format!("connect {target}")), "error ConnectionRefused", "{target}");
    }
    reaches(&client.connect("10.98.0.2:9090"), 9090);
    let denied =
        world.status().verdicts.into_iter().find(|count| count.verdict == "deny_no_listener" && count.direction == 2);
    assert!(denied.is_some_and(|count| count.count >= 2));
    world.keep("a proxy", |world| world.proxy("a"));
    world.keep("b proxy", |world| world.proxy("b"));
}

fn agent_restarts(world: &mut World) {
    let before = world.status();
    world.kill_agent();
    let mut app = world.pod("a", APP);
    let mut client = world.pod("c", APP);
    reaches(&app.connect("10.99.0.2:8080"), 4140);
    reaches(&client.connect("10.98.0.2:8080"), 4143);
    // A proxy that comes back while no agent lives is found too.
    world.drop_kept("b proxy");
    world.keep("b proxy", |world| world.proxy("b"));
    reaches(&client.connect("10.98.0.2:8080"), 4143);
    world.start_agent(&[]);
    let after = world.status();
    assert_eq!(after.programs, before.programs);
    assert_eq!(after.pods, before.pods, "names, generations and cookies are remembered");
    let redirects = |status: &weft_proto::agent::StatusResponse| status.verdicts[0].count;
    assert!(redirects(&after) > redirects(&before), "counters go on");
    let generation = after.pods[0].generation;
    assert_eq!(world.enrol(world.request("a")).unwrap().generation, generation);
    reaches(&app.connect("10.99.0.2:8080"), 4140);
    reaches(&client.connect("10.98.0.2:8080"), 4143);
}

fn programs_are_replaced(world: &mut World) {
    let before = world.status();
    world.kill_agent();
    // Programs that log are other programs.
    world.start_agent(&["--debug-log"]);
    let after = world.status();
    assert_ne!(after.programs, before.programs);
    assert_eq!(after.pods, before.pods);
    let mut app = world.pod("a", APP);
    let mut client = world.pod("c", APP);
    reaches(&app.connect("10.99.0.2:8080"), 4140);
    reaches(&client.connect("10.98.0.2:8080"), 4143);
    world.eventually("the programs' log", |world| world.agent_log().contains("verdict 0").then_some(()));
    world.kill_agent();
    world.start_agent(&[]);
    assert_eq!(world.status().programs, before.programs);
    reaches(&app.connect("10.99.0.2:8080"), 4140);
    reaches(&client.connect("10.98.0.2:8080"), 4143);
}

fn nothing_is_lost_under_load(world: &mut World) {
    const CONNECTIONS: usize = 3000;
    let loads = [("a", "10.99.0.2:8080", 4140), ("a", "[fd99::2]:8080", 4140), ("c", "10.98.0.2:8080", 4143)];
    let loads = loads.map(|(netns, target, listener)| {
        let mut pod = world.pod(netns, APP);
        let load = std::thread::spawn(move || pod.say(&format!("load {target} {CONNECTIONS}")));
        (load, format!("{listener}={CONNECTIONS}"))
    });
    let mut changes = 0;
    while loads.iter().any(|(load, _)| !load.is_finished()) {
        world.kill_agent();
        world.start_agent(if changes % 2 == 0 { &["--debug-log"] } else { &[] });
        let _watch = world.watch(WatchRequest::default());
        changes += 1;
    }
    for (load, expected) in loads {
        assert_eq!(load.join().unwrap(), expected);
    }
    assert!(changes > 1, "the load ended too soon");
    assert_eq!(world.status().flow_misses, 0);
}

fn unload_leaves_nothing(world: &mut World) {
    world.withdraw("b");
    let mut client = world.pod("c", APP);
    reaches(&client.connect("10.98.0.2:8080"), 8080);
    assert_eq!(world.status().pods.len(), 1);
    world.kill_agent();
    world.unload();
    let mut app = world.pod("a", APP);
    let answer = app.connect("10.99.0.2:8080");
    reaches(&answer, 8080);
    // ENOPROTOOPT or EOPNOTSUPP, by kernel version.
    assert!(app.say("attest").starts_with("error E"));
    assert!(world.pins_are_gone());
}

/// As on a node whose agent comes after its pods: nothing saw the proxies begin to listen.
fn running_proxies_are_found(world: &mut World) {
    world.start_agent(&[]);
    world.enrol(world.request("b")).unwrap();
    let mut client = world.pod("c", APP);
    let mut app = world.pod("b", APP);
    for (target, proxy) in
        [("10.98.0.2:8080", 4143), ("[fd98::2]:8080", 4143), ("192.0.2.7:443", 4140), ("[2001:db8::7]:443", 4140)]
    {
        let answer = if proxy == 4143 { client.connect(target) } else { app.connect(target) };
        reaches(&answer, proxy);
        // What listeners accept that are older than the programs is known, too.
        assert_eq!(answer.field("orig"), target);
    }
    // Enrolled again it is found once only, and a successor takes its place.
    world.enrol(world.request("b")).unwrap();
    world.drop_kept("b proxy");
    assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    let mut impostor = world.pod("b", APP);
    impostor.ok("serve 4143");
    assert_eq!(client.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    drop(impostor);
    world.keep("b proxy", |world| world.proxy("b"));
    reaches(&client.connect("10.98.0.2:8080"), 4143);
    world.kill_agent();
    world.unload();
    assert!(world.pins_are_gone());
    world.drop_kept("b proxy");
}

impl World {
    /// Starts a proxy that answers on its three addresses.
    fn proxy(&self, netns: &str) -> Pod {
        let mut proxy = self.pod(netns, PROXY);
        proxy.ok("proxy");
        proxy
    }
}
