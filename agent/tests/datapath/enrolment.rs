//! Which pods are enrolled and from when, which processes count as the proxy, and how redirection is switched off.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use tonic::Code;
use weft_proto::agent::PodStatus;
use weft_test_kit::{
    pod::{APPLICATION_UID, PROXY_UID},
    world::World,
};

use crate::Pair;

/// A user in the proxy's group.
const GROUP: u32 = 2103;
/// Flags of an agent that lets the kernel enrol pods by itself.
const SELF_ENROLLING: &[&str] = &["--self-enrol-uid", "2102"];

pub(crate) fn unenrolled_notices_nothing(world: &mut World) {
    let mut app = world.pod("a", APPLICATION_UID);
    let _servers = world.servers("b", &[8080]);
    for (target, peer) in [("10.99.0.2:8080", "10.99.0.2:8080"), ("[fd99::2]:8080", "[fd99::2]:8080")] {
        let answer = app.connect(target);
        answer.reached(8080);
        assert_eq!(answer.field("peername"), peer);
        // No connection tracking and no hook: the kernel's own errors.
        assert!(answer.field("orig").starts_with("error"), "{answer:?}");
    }
    // ENOPROTOOPT or EOPNOTSUPP, by kernel version.
    assert!(app.say("attest").starts_with("error E"));
}

pub(crate) fn bad_requests_are_refused(world: &mut World) {
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

pub(crate) fn enrolment_is_attested_and_idempotent(world: &mut World) {
    let _a = world.proxy("a");
    let first = world.mesh("a");
    let again = world.mesh("a");
    assert_eq!((first.generation, again.generation), (1, 1));
    let mut changed = world.request("a");
    changed.skip_subnets.clear();
    assert_eq!(world.enrol(changed).unwrap().generation, 2);
    assert_eq!(world.enrol(world.request("a")).unwrap().generation, 3);
    // The proxy of b begins to listen after the enrolment, that of a before.
    world.mesh("b");
    let _b = world.proxy("b");
    let mut app = world.pod("a", APPLICATION_UID);
    assert_eq!(app.say("attest"), format!("flags=3 generation=3 cookie={}", first.netns_cookie));
    let status = world.status();
    assert_eq!(status.pods.len(), 2);
    assert!(status.pods.iter().all(|pod| pod.outbound && pod.inbound), "{status:?}");
}

/// c is not enrolled by an agent, but by the programs that it left behind.
pub(crate) fn kernel_enrols_by_itself(world: &mut World) {
    let _servers = world.servers("b", &[8080, 9090]);
    let _b = world.proxy("b");
    restart_self_enrolling(world);
    world.kill_agent();
    let mut app = world.pod("c", APPLICATION_UID);
    // Neither another user nor another address counts as a proxy.
    let mut impostor = world.pod("c", APPLICATION_UID);
    impostor.ok("serve 4140");
    assert!(app.say("attest").starts_with("error E"));
    drop(impostor);
    let mut unmeshed = app;
    let mut app = world.pod("c", APPLICATION_UID);
    let proxy = world.proxy("c");
    let answer = app.connect("10.98.0.2:8080");
    answer.reached(4140);
    assert_eq!(answer.field("orig"), "10.98.0.2:8080");
    app.connect("[fd98::2]:8080").reached(4140);
    // A process that is older than the proxy is redirected like any other.
    unmeshed.connect("10.98.0.2:8080").reached(4140);
    world.pod("c", PROXY_UID).connect("10.98.0.2:8080").reached(8080);
    // Outbound only, so its /ready is 503 and its application is not started.
    assert!(app.say("attest").starts_with("flags=1 generation=0 "), "{}", app.say("attest"));
    // Other pods are unaffected: b is not enrolled.
    world.pod("b", APPLICATION_UID).connect("10.98.0.3:4143").reached(4143);
    drop(proxy);
    // The proxy is gone: connections are refused, and do not get around it.
    assert_eq!(app.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    let _proxy = world.proxy("c");
    world.start_agent(SELF_ENROLLING);
    let status = world.status();
    assert_eq!(status.pods.iter().map(|pod| (pod.self_enrolled, pod.inbound)).collect::<Vec<_>>(), [(true, false)]);
    let done = world.mesh("c");
    assert_eq!(app.say("attest"), format!("flags=3 generation=1 cookie={}", done.netns_cookie));
    let pod = status_of(world, "c");
    assert!(!pod.self_enrolled && pod.inbound && pod.listening, "{pod:?}");
    // Now the pod has its own rules.
    app.connect("10.98.0.2:9090").reached(9090);
}

/// As when the chart weft-agent is upgraded to leave pods of other control planes alone. The kernel keeps the switch of
/// the agent before, unless the new one turns it off.
pub(crate) fn kernel_stops_enrolling(world: &mut World) {
    let _servers = world.servers("b", &[8080]);
    restart_self_enrolling(world);
    let mut enrolled = world.pod("c", APPLICATION_UID);
    let c = world.proxy("c");
    enrolled.connect("10.98.0.2:8080").reached(4140);
    world.kill_agent();
    world.start_agent(&["--no-self-enrol"]);
    let _a = world.proxy("a");
    let mut app = world.pod("a", APPLICATION_UID);
    for target in ["10.99.0.2:8080", "[fd99::2]:8080"] {
        app.connect(target).reached(8080);
    }
    assert!(app.say("attest").starts_with("error E"));
    let pods = world.status().pods;
    assert_eq!(pods.iter().map(|pod| (pod.self_enrolled, pod.outbound)).collect::<Vec<_>>(), [(true, true)]);
    enrolled.connect("10.98.0.2:8080").reached(4140);
    // It also stays enrolled while its proxy is away.
    drop(c);
    assert_eq!(enrolled.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    let _c = world.proxy("c");
    enrolled.connect("10.98.0.2:8080").reached(4140);
    // An agent that learns of it completes it as before.
    let done = world.mesh("c");
    assert_eq!(enrolled.say("attest"), format!("flags=3 generation=1 cookie={}", done.netns_cookie));
}

pub(crate) fn attestation_wants_a_listener(world: &mut World) {
    restart_self_enrolling(world);
    let mut app = world.pod("b", APPLICATION_UID);
    world.mesh("b");
    assert!(app.say("attest").starts_with("flags=1 "), "steering to nobody is no steering");
    assert!(!status_of(world, "b").listening);
    let _b = world.proxy("b");
    assert!(app.say("attest").starts_with("flags=3 "));
    assert!(status_of(world, "b").listening);
    // The note of a proxy that ended just before its pod's enrolment is forgotten, and its successor is recorded.
    drop(world.proxy("c"));
    world.mesh("c");
    let mut app = world.pod("c", APPLICATION_UID);
    world.eventually("the end of the note", |_| app.say("attest").starts_with("flags=1 ").then_some(()));
    let _c = world.proxy("c");
    assert!(app.say("attest").starts_with("flags=3 "));
    world.pod("b", PROXY_UID).connect("10.98.0.3:8080").reached(4143);
}

/// The kernel does not enrol pods by itself: without an entry the programs record no proxy.
pub(crate) fn restart_while_withdrawn_is_found(world: &mut World) {
    world.mesh("b");
    let b = world.proxy("b");
    let mut client = world.pod("c", APPLICATION_UID);
    client.connect("10.98.0.2:8080").reached(4143);
    world.mesh("b");
    world.withdraw("b");
    // Its note outlives it until the next collection.
    drop(b);
    let _b = world.proxy("b");
    world.mesh("b");
    client.connect("10.98.0.2:8080").reached(4143);
}

pub(crate) fn proxies_are_known_by_group_or_cgroup(world: &mut World) {
    restart_self_enrolling(world);
    let Pair { b: _b, c, servers: _servers } = Pair::new(world);
    let mut by_group = world.request("c");
    by_group.proxy_gid = GROUP;
    let mut app = world.pod("c", GROUP);
    app.connect("10.98.0.2:8080").reached(4140);
    world.enrol(by_group).unwrap();
    app.connect("10.98.0.2:8080").reached(4143);
    let mut strict = world.request("c");
    strict.proxy_gid = GROUP;
    strict.proxy_cgroup = world.cgroup_id("proxy");
    world.enrol(strict.clone()).unwrap();
    // Neither user nor group exempt, and listeners of a proxy outside that cgroup do not count as the proxy's.
    assert_eq!(app.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    assert_eq!(world.pod("c", PROXY_UID).say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    let mut peer = world.pod("b", PROXY_UID);
    assert_eq!(peer.say("connect 10.98.0.3:8080"), "error ConnectionRefused");
    assert!(app.say("attest").starts_with("flags=1 "));
    assert!(status_of(world, "c").strict);
    // A proxy inside the cgroup counts, whether it listens before or after.
    drop(c);
    let mut proxy = world.pod_in("proxy", "c", PROXY_UID);
    proxy.ok("proxy");
    assert!(app.say("attest").starts_with("flags=3 "));
    app.connect("10.98.0.2:8080").reached(4140);
    world.pod("c", PROXY_UID).connect("10.98.0.2:8080").reached(4140);
    peer.connect("10.98.0.3:8080").reached(4143);
    world.pod_in("proxy", "c", APPLICATION_UID).connect("10.98.0.2:8080").reached(4143);
    drop(proxy);
    world.mesh("c");
    let _proxy = world.proxy("c");
    world.pod("c", PROXY_UID).connect("10.98.0.2:8080").reached(4143);
}

/// A pod that exempts by cgroup does not trust its proxy's user, so another process of that user must not share the
/// proxy's ports: SO_REUSEPORT admits every socket of one user.
pub(crate) fn strict_pods_have_no_impostors(world: &mut World) {
    const CONNECTIONS: usize = 200;
    restart_self_enrolling(world);
    let Pair { b: _b, c, servers: _servers } = Pair::new(world);
    drop(c);
    let mut strict = world.request("c");
    strict.proxy_cgroup = world.cgroup_id("proxy");
    world.enrol(strict.clone()).unwrap();
    let mut proxy = world.pod_in("proxy", "c", PROXY_UID);
    proxy.ok("proxy");
    proxy.ok("proxy");
    let mut impostor = world.pod_in("application", "c", PROXY_UID);
    impostor.ok("proxy");
    let (mut app, mut peer) = (world.pod("c", APPLICATION_UID), world.pod("b", PROXY_UID));
    let own = proxy.id().to_string();
    let routes =
        [("10.98.0.3:8080", 4143), ("[fd98::3]:8080", 4143), ("192.0.2.7:80", 4140), ("[2001:db8::7]:80", 4140)];
    let mut ask = |target: &str, port| {
        let client = if port == 4143 { &mut peer } else { &mut app };
        client.say(&format!("connect {target}"))
    };
    for (target, port) in routes {
        let mut answers = BTreeMap::<String, usize>::new();
        for _ in 0..CONNECTIONS {
            let answer = ask(target, port);
            let pid = answer.split_once(" pid=").unwrap_or_else(|| panic!("{target}: {answer}")).1;
            *answers.entry(pid.to_owned()).or_default() += 1;
        }
        assert_eq!(answers, BTreeMap::from([(own.clone(), CONNECTIONS)]), "{target}");
    }
    // Both of the proxy's listeners get connections.
    let counts = proxy.say("accepted 4143");
    assert!(counts.split(' ').all(|count| count.parse::<usize>().unwrap() > CONNECTIONS / 4), "{counts}");
    // Without the proxy the impostor is alone on its ports, and gets no connection.
    drop(proxy);
    for (target, port) in routes {
        assert_eq!(ask(target, port), "error ConnectionRefused", "{target}");
    }
    // A proxy that listened before its pod became strict is found, too.
    world.mesh("c");
    let mut proxy = world.pod_in("proxy", "c", PROXY_UID);
    proxy.ok("proxy");
    let mut client = world.pod("b", PROXY_UID);
    let (batches, is_strict) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            // Half of the ports that one client may use are more than enough.
            while batches.load(Ordering::Relaxed) < 140 && !is_strict.load(Ordering::Relaxed) {
                assert_eq!(client.say("load 10.98.0.3:8080 100"), "4143=100");
                batches.fetch_add(1, Ordering::Relaxed);
            }
            assert_eq!(client.say("load 10.98.0.3:8080 100"), "4143=100");
        });
        world.eventually("a load", |_| (load.is_finished() || batches.load(Ordering::Relaxed) > 0).then_some(()));
        world.enrol(strict).unwrap();
        is_strict.store(true, Ordering::Relaxed);
    });
    let own = format!("pid={}", proxy.id());
    for (target, port) in routes {
        assert!((0..20).all(|_| ask(target, port).ends_with(&own)), "{target}");
    }
}

pub(crate) fn bypass_is_complete_and_reported(world: &mut World) {
    restart_self_enrolling(world);
    let _pair = Pair::new(world);
    let mut app = world.pod("c", APPLICATION_UID);
    let mut server = world.pod("c", APPLICATION_UID);
    server.ok("serve 8080");
    let mut peer = world.pod("b", PROXY_UID);
    let mut bypassed = world.request("c");
    bypassed.bypass = true;
    world.enrol(bypassed).unwrap();
    peer.connect("10.98.0.3:8080").reached(8080);
    assert!(status_of(world, "c").bypassed);
    world.mesh("c");
    peer.connect("10.98.0.3:8080").reached(4143);
    app.connect("10.98.0.2:8080").reached(4140);
    // The node's switch works without an agent.
    world.kill_agent();
    world.bypass("on");
    peer.connect("10.98.0.3:8080").reached(8080);
    app.connect("10.98.0.2:8080").reached(8080);
    world.start_agent(&[]);
    let status = world.status();
    assert!(status.bypassed, "a new agent leaves the switch as it is");
    let count = |label: &str| status.verdicts.iter().filter(|of| of.verdict == label).map(|of| of.count).sum::<u64>();
    assert!(count("pass_pod_bypassed") > 0 && count("pass_node_bypassed") > 0, "{status:?}");
    world.eventually("the log", |world| world.agent_log().contains("switched off").then_some(()));
    world.bypass("off");
    assert!(!world.status().bypassed);
    peer.connect("10.98.0.3:8080").reached(4143);
    app.connect("10.98.0.2:8080").reached(4140);
}

/// As on a node where the kernel enrols pods by itself when their proxies listen.
fn restart_self_enrolling(world: &mut World) {
    world.kill_agent();
    world.unload();
    world.start_agent(SELF_ENROLLING);
}

fn status_of(world: &World, name: &str) -> PodStatus {
    let mut pods = world.status().pods.into_iter();
    pods.find(|pod| pod.pod.as_ref().is_some_and(|pod| pod.name == name)).unwrap()
}
