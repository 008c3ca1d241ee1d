//! Checks of enrolment by the kernel alone, of who counts as the proxy, of switching it all off, and of explanations.

use std::{collections::BTreeMap, time::Duration};

use weft_proto::agent::{Direction, EventKind, ExplainRequest, PodRef, PodStatus, WatchRequest};

use crate::{APP, PROXY, reaches, world::World};

/// A user that is in the proxy's group.
const GROUP: u32 = 2103;

/// With everything unloaded before: c was never enrolled, and no agent enrols it here.
pub(crate) fn kernel_enrols_by_itself(world: &mut World) {
    world.start_agent(&["--self-enrol-uid", "2102"]);
    world.kill_agent();
    let mut app = world.pod("c", APP);
    // Neither another user nor another address makes a proxy.
    let mut impostor = world.pod("c", APP);
    impostor.ok("serve 4140");
    assert!(app.say("attest").starts_with("error E"));
    drop(impostor);
    let mut unmeshed = app;
    let mut app = world.pod("c", APP);
    let proxy = world.proxy("c");
    let answer = app.connect("10.98.0.2:8080");
    reaches(&answer, 4140);
    assert_eq!(answer.field("orig"), "10.98.0.2:8080");
    reaches(&app.connect("[fd98::2]:8080"), 4140);
    // A process that was there before the proxy is redirected like any other.
    reaches(&unmeshed.connect("10.98.0.2:8080"), 4140);
    reaches(&world.pod("c", PROXY).connect("10.98.0.2:8080"), 8080);
    // Outbound alone: so its /ready is 503, and its application is not started.
    assert!(app.say("attest").starts_with("flags=1 generation=0 "), "{}", app.say("attest"));
    // Nobody else notices: b is not enrolled.
    reaches(&world.pod("b", APP).connect("10.98.0.3:4143"), 4143);
    drop(proxy);
    // The proxy is gone: refused, not around it.
    assert_eq!(app.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    world.keep("c proxy", |world| world.proxy("c"));
    world.start_agent(&["--self-enrol-uid", "2102"]);
    let status = world.status();
    assert_eq!(status.pods.iter().map(|pod| (pod.self_enrolled, pod.inbound)).collect::<Vec<_>>(), [(true, false)]);
    let done = world.enrol(world.request("c")).unwrap();
    assert_eq!(app.say("attest"), format!("flags=3 generation=1 cookie={}", done.netns_cookie));
    let pod = world.of("c");
    assert!(!pod.self_enrolled && pod.inbound && pod.listening, "{pod:?}");
    // The rules are its own now.
    reaches(&app.connect("10.98.0.2:9090"), 9090);
}

pub(crate) fn attestation_wants_a_listener(world: &mut World) {
    let mut app = world.pod("b", APP);
    world.enrol(world.request("b")).unwrap();
    assert!(app.say("attest").starts_with("flags=1 "), "steering to nobody is no steering");
    assert!(!world.of("b").listening);
    world.keep("b proxy", |world| world.proxy("b"));
    assert!(app.say("attest").starts_with("flags=3 "));
    assert!(world.of("b").listening);
}

pub(crate) fn proxies_are_known_by_group_or_cgroup(world: &mut World) {
    let mut by_group = world.request("c");
    by_group.proxy_gid = GROUP;
    let mut app = world.pod("c", GROUP);
    reaches(&app.connect("10.98.0.2:8080"), 4140);
    world.enrol(by_group).unwrap();
    reaches(&app.connect("10.98.0.2:8080"), 4143);
    let mut strict = world.request("c");
    strict.proxy_gid = GROUP;
    strict.proxy_cgroup = world.cgroup_id("proxy");
    world.enrol(strict.clone()).unwrap();
    // Neither user nor group help, and the listeners of a proxy outside that cgroup are not the proxy's.
    assert_eq!(app.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    assert_eq!(world.pod("c", PROXY).say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    let mut peer = world.pod("b", PROXY);
    assert_eq!(peer.say("connect 10.98.0.3:8080"), "error ConnectionRefused");
    assert!(app.say("attest").starts_with("flags=1 "));
    assert!(world.of("c").strict);
    // One inside is, whether it listens before or after.
    world.drop_kept("c proxy");
    let mut proxy = world.pod_in("proxy", "c", PROXY);
    proxy.ok("proxy");
    assert!(app.say("attest").starts_with("flags=3 "));
    reaches(&app.connect("10.98.0.2:8080"), 4140);
    reaches(&world.pod("c", PROXY).connect("10.98.0.2:8080"), 4140);
    reaches(&peer.connect("10.98.0.3:8080"), 4143);
    reaches(&world.pod_in("proxy", "c", APP).connect("10.98.0.2:8080"), 4143);
    drop(proxy);
    world.enrol(world.request("c")).unwrap();
    world.keep("c proxy", |world| world.proxy("c"));
    reaches(&world.pod("c", PROXY).connect("10.98.0.2:8080"), 4143);
}

/// A pod that exempts by cgroup does not trust its proxy's user, so a process of that user must not share the proxy's
/// ports either: SO_REUSEPORT lets every socket of one user in.
pub(crate) fn strict_pods_have_no_impostors(world: &mut World) {
    const CONNECTIONS: usize = 200;
    world.drop_kept("c proxy");
    let mut strict = world.request("c");
    strict.proxy_cgroup = world.cgroup_id("proxy");
    world.enrol(strict.clone()).unwrap();
    let mut proxy = world.pod_in("proxy", "c", PROXY);
    proxy.ok("proxy");
    proxy.ok("proxy");
    let mut impostor = world.pod_in("application", "c", PROXY);
    impostor.ok("proxy");
    let (mut app, mut peer) = (world.pod("c", APP), world.pod("b", PROXY));
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
    // Both of the proxy's listeners are used.
    let counts = proxy.say("accepted 4143");
    assert!(counts.split(' ').all(|count| count.parse::<usize>().unwrap() > CONNECTIONS / 4), "{counts}");
    // Without the proxy the impostor is alone on its ports, and gets nothing.
    drop(proxy);
    for (target, port) in routes {
        assert_eq!(ask(target, port), "error ConnectionRefused", "{target}");
    }
    // A proxy that listens before its pod is strict is found, too, and before the pod becomes strict.
    world.enrol(world.request("c")).unwrap();
    let mut proxy = world.pod_in("proxy", "c", PROXY);
    proxy.ok("proxy");
    let mut client = world.pod("b", PROXY);
    let load = std::thread::spawn(move || client.say("load 10.98.0.3:8080 3000"));
    world.enrol(strict).unwrap();
    assert!(!load.is_finished(), "the load ended too soon");
    assert_eq!(load.join().unwrap(), "4143=3000");
    let own = format!("pid={}", proxy.id());
    for (target, port) in routes {
        assert!((0..20).all(|_| ask(target, port).ends_with(&own)), "{target}");
    }
    drop((proxy, impostor));
    world.enrol(world.request("c")).unwrap();
    world.keep("c proxy", |world| world.proxy("c"));
}

pub(crate) fn bypass_is_complete_and_told(world: &mut World) {
    let mut app = world.pod("c", APP);
    let mut server = world.pod("c", APP);
    server.ok("serve 8080");
    let mut peer = world.pod("b", PROXY);
    let mut bypassed = world.request("c");
    bypassed.bypass = true;
    world.enrol(bypassed).unwrap();
    reaches(&peer.connect("10.98.0.3:8080"), 8080);
    assert!(world.of("c").bypassed);
    world.enrol(world.request("c")).unwrap();
    reaches(&peer.connect("10.98.0.3:8080"), 4143);
    reaches(&app.connect("10.98.0.2:8080"), 4140);
    // The node's switch needs no agent.
    world.kill_agent();
    world.bypass("on");
    reaches(&peer.connect("10.98.0.3:8080"), 8080);
    reaches(&app.connect("10.98.0.2:8080"), 8080);
    world.start_agent(&[]);
    let status = world.status();
    assert!(status.bypassed, "a new agent leaves the switch as it is");
    let count = |label: &str| status.verdicts.iter().filter(|of| of.verdict == label).map(|of| of.count).sum::<u64>();
    assert!(count("pass_pod_bypassed") > 0 && count("pass_node_bypassed") > 0, "{status:?}");
    world.eventually("the log", |world| world.agent_log().contains("switched off").then_some(()));
    world.bypass("off");
    assert!(!world.status().bypassed);
    reaches(&peer.connect("10.98.0.3:8080"), 4143);
    reaches(&app.connect("10.98.0.2:8080"), 4140);
}

pub(crate) fn acceptance_is_matched(world: &mut World) {
    let mut watch = world.watch(WatchRequest { accepted: true, ..Default::default() });
    let mut app = world.pod("c", APP);
    world.eventually("the first event", |_| {
        app.connect("10.98.0.2:8080");
        watch.try_next(Duration::from_millis(50))
    });
    let answer = app.connect("10.98.0.2:8081");
    let accepted = watch.find(|event| {
        event.kind() == EventKind::Accepted
            && event.original_destination == "10.98.0.2:8081"
            && event.direction() == Direction::Outbound
    });
    assert_eq!((accepted.verdict.as_str(), accepted.uid), ("redirect", APP));
    assert_eq!(accepted.source, answer.field("accepted-peer"));
    assert!(accepted.accepted_after_ns > 0 && accepted.generation > 0, "{accepted:?}");
    world.pod("c", PROXY).connect("10.98.0.2:8081");
    let accepted = watch.find(|event| event.kind() == EventKind::Accepted && event.direction() == Direction::Inbound);
    assert_eq!(accepted.pod.as_ref().map(|pod| pod.name.as_str()), Some("b"));
    assert_eq!((accepted.verdict.as_str(), accepted.new_destination.as_str()), ("redirect", "10.98.0.2:8081"));
    assert!(accepted.accepted_after_ns > 0);
}

/// What is explained is what happens: each question is followed by the connection itself.
pub(crate) fn explanations_come_true(world: &mut World) {
    let ask = |pod: &str, direction: Direction, destination: &str, source: &str| ExplainRequest {
        pod: Some(PodRef { namespace: "test".into(), name: pod.into() }),
        direction: direction.into(),
        destination: destination.into(),
        source: source.into(),
        ..ExplainRequest::default()
    };
    let mut app = world.pod("c", APP);
    for (destination, verdict, listener) in [
        ("10.98.0.2:8080", "redirect", 4140),
        ("[fd98::2]:8080", "redirect", 4140),
        ("10.98.0.2:9090", "pass_skip_port", 9090),
        ("10.98.0.3:4143", "pass_own_address", 4143),
        ("127.0.0.1:4140", "pass_loopback", 4140),
    ] {
        let answer = world.explain(ask("c", Direction::Outbound, destination, "")).unwrap();
        assert_eq!(answer.verdict, verdict, "{destination}");
        assert!(!answer.reason.is_empty() && !answer.change.is_empty(), "{answer:?}");
        assert!(answer.new_destination.ends_with(&format!(":{listener}")), "{answer:?}");
        reaches(&app.connect(destination), listener);
    }
    let mut as_proxy = ask("c", Direction::Outbound, "10.98.0.2:8080", "");
    as_proxy.as_proxy = true;
    assert_eq!(world.explain(as_proxy).unwrap().verdict, "pass_proxy");
    let mut peer = world.pod("c", PROXY);
    for (destination, source, verdict, listener) in [
        ("10.98.0.2:8080", "10.98.0.3", "redirect", 4143),
        ("0.0.0.0:8080", "10.98.0.3", "redirect", 4143),
        ("10.98.0.2:9090", "10.98.0.3", "pass_skip_port", 9090),
        ("10.98.0.2:8081", "10.98.0.77", "pass_skip_subnet", 8081),
    ] {
        let answer = world.explain(ask("b", Direction::Inbound, destination, source)).unwrap();
        assert_eq!(answer.verdict, verdict, "{destination} from {source}: {answer:?}");
        let dialled = destination.replace("0.0.0.0", "10.98.0.2");
        reaches(&peer.connect_from(source, &dialled), listener);
    }
    world.drop_kept("b proxy");
    let mut other = ask("b", Direction::Inbound, "10.98.0.2:8080", "10.98.0.3");
    let answer = world.explain(other.clone()).unwrap();
    assert_eq!((answer.verdict.as_str(), answer.new_destination.as_str()), ("deny_no_listener", ""));
    assert_eq!(peer.say("connect 10.98.0.2:8080"), "error ConnectionRefused");
    other.not_tcp = true;
    assert_eq!(world.explain(other).unwrap().verdict, "pass_not_tcp");
    let nobody = world.explain(ask("nobody", Direction::Outbound, "10.98.0.2:8080", "")).unwrap();
    assert_eq!((nobody.verdict.as_str(), nobody.pod_status), ("pass_not_meshed", None));
    let wrong = world.explain(ask("c", Direction::Outbound, "web:80", "")).unwrap_err();
    assert!(wrong.message().starts_with("destination: "), "{wrong}");
}

impl World {
    fn of(&self, name: &str) -> PodStatus {
        let mut pods = self.status().pods.into_iter();
        pods.find(|pod| pod.pod.as_ref().is_some_and(|pod| pod.name == name)).unwrap()
    }
}
