//! Contents of traces and explanations of connections.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tonic::Code;
use weft_proto::agent::{Direction, EventKind, ExplainRequest, WatchRequest};
use weft_test_kit::{
    node::Node,
    pod::{APPLICATION_UID, PROXY_UID},
    world::{Mesh, World},
};

use crate::Pair;

pub(crate) fn traces_tell(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut watch = world.watch(WatchRequest::default());
    let mut app = world.pod("a", APPLICATION_UID);
    let answer = world.eventually("the first event", |_| {
        let answer = app.connect("10.99.0.2:8080");
        watch.try_next(Duration::from_millis(50)).map(|event| (answer, event))
    });
    let (answer, event) = answer;
    assert_eq!(event.verdict, "redirect");
    assert_eq!(event.pod.as_ref().map(|pod| pod.name.as_str()), Some("a"));
    assert_eq!((event.uid, event.direction), (APPLICATION_UID, 1));
    assert_eq!(event.original_destination, "10.99.0.2:8080");
    assert_eq!(event.new_destination, "127.0.0.1:4140");
    assert!(event.source.starts_with("10.99.0.1:"), "{event:?}");
    assert!(event.pid > 0 && !event.command.is_empty(), "{event:?}");
    let _ = answer;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
    assert!(now.abs_diff(u128::from(event.time_unix_ns)) < 10_000_000_000, "{event:?}");

    let mut client = world.pod("c", APPLICATION_UID);
    client.connect("10.98.0.2:8080");
    let event = watch.find(|event| event.direction == 2);
    assert_eq!((event.verdict.as_str(), event.new_destination.as_str()), ("redirect", "10.98.0.2:4143"));
    assert_eq!(event.original_destination, "10.98.0.2:8080");
    assert!(event.source.starts_with("10.98.0.3:"), "{event:?}");
    app.connect("127.0.0.1:4140");
    let event = watch.find(|event| event.verdict == "pass_loopback");
    assert_eq!(event.new_destination, "127.0.0.1:4140");
}

pub(crate) fn traces_filter(world: &mut World) {
    let _mesh = Mesh::new(world);
    let mut watch =
        world.watch(WatchRequest { verdict: "pass_skip_port".into(), pod: "a".into(), ..Default::default() });
    let mut app = world.pod("a", APPLICATION_UID);
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

pub(crate) fn acceptance_is_matched(world: &mut World) {
    let _pair = Pair::new(world);
    let mut watch = world.watch(WatchRequest { accepted: true, ..Default::default() });
    let mut app = world.pod("c", APPLICATION_UID);
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
    assert_eq!((accepted.verdict.as_str(), accepted.uid), ("redirect", APPLICATION_UID));
    assert_eq!(accepted.source, answer.field("accepted-peer"));
    assert!(accepted.accepted_after_ns > 0 && accepted.generation > 0, "{accepted:?}");
    world.pod("c", PROXY_UID).connect("10.98.0.2:8081");
    let accepted = watch.find(|event| event.kind() == EventKind::Accepted && event.direction() == Direction::Inbound);
    assert_eq!(accepted.pod.as_ref().map(|pod| pod.name.as_str()), Some("b"));
    assert_eq!((accepted.verdict.as_str(), accepted.new_destination.as_str()), ("redirect", "10.98.0.2:8081"));
    assert!(accepted.accepted_after_ns > 0);
}

/// Explanations match what happens: each query is followed by the connection itself.
pub(crate) fn explanations_come_true(world: &mut World) {
    let Pair { b, c: _c, servers: _servers } = Pair::new(world);
    let ask = |pod: &str, direction: Direction, destination: &str, source: &str| ExplainRequest {
        pod: Some(Node::pod_ref(pod)),
        direction: direction.into(),
        destination: destination.into(),
        source: source.into(),
        ..ExplainRequest::default()
    };
    let mut app = world.pod("c", APPLICATION_UID);
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
        app.connect(destination).reached(listener);
    }
    let mut as_proxy = ask("c", Direction::Outbound, "10.98.0.2:8080", "");
    as_proxy.as_proxy = true;
    assert_eq!(world.explain(as_proxy).unwrap().verdict, "pass_proxy");
    let mut peer = world.pod("c", PROXY_UID);
    for (destination, source, verdict, listener) in [
        ("10.98.0.2:8080", "10.98.0.3", "redirect", 4143),
        ("0.0.0.0:8080", "10.98.0.3", "redirect", 4143),
        ("10.98.0.2:9090", "10.98.0.3", "pass_skip_port", 9090),
        ("10.98.0.2:8081", "10.98.0.77", "pass_skip_subnet", 8081),
    ] {
        let answer = world.explain(ask("b", Direction::Inbound, destination, source)).unwrap();
        assert_eq!(answer.verdict, verdict, "{destination} from {source}: {answer:?}");
        let dialled = destination.replace("0.0.0.0", "10.98.0.2");
        peer.connect_from(source, &dialled).reached(listener);
    }
    drop(b);
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
