//! Tests of the policy of a port over time, without a controller.

mod codes;

use std::{net::Ipv4Addr, ops::Range, pin::pin};

use tokio::time::Instant;

use super::{
    server::Protocol,
    testing::{anybody, authz, detecting, opaque},
    *,
};

const TIMEOUT: Duration = Duration::from_secs(10);
/// The address of a client.
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// Settings of a proxy that waits for the controller.
fn waiting() -> Config {
    let mut config = crate::inbound::testing::config();
    config.inbound.policy_timeout = TIMEOUT;
    config
}

fn name(port: &PortPolicy) -> String {
    port.borrow().meta.name.to_string()
}

#[tokio::test(start_paused = true)]
async fn a_port_waits_for_the_first_answer() {
    let policies = Policies::unreachable(waiting());
    let mut port = pin!(policies.port(8080, CLIENT));
    assert!(tokio::time::timeout(TIMEOUT / 2, port.as_mut()).await.is_err(), "no answer, no policy");
    policies.publish(8080, opaque(vec![authz("a", anybody())]));
    let port = port.await;
    assert!(matches!(port.borrow().protocol, Protocol::Opaque));
    assert_eq!(name(&policies.port(8080, CLIENT).await), name(&port), "later connections do not wait");
}

#[tokio::test(start_paused = true)]
async fn a_port_has_what_the_settings_say_when_no_answer_comes() {
    for (unanswered, expected) in [(Unanswered::Default, "all-unauthenticated"), (Unanswered::Deny, "unanswered")] {
        let mut config = waiting();
        config.inbound.unanswered = unanswered;
        let policies = Policies::unreachable(config);
        let begin = Instant::now();
        let port = policies.port(8080, CLIENT).await;
        assert_eq!(name(&port), expected);
        assert!(begin.elapsed() >= TIMEOUT && begin.elapsed() < TIMEOUT * 2, "{:?}", begin.elapsed());
        assert_eq!(port.borrow().authorizations.is_empty(), unanswered == Unanswered::Deny);
        let again = Instant::now();
        policies.port(8080, CLIENT).await;
        assert_eq!(again.elapsed(), Duration::ZERO, "the deadline is the port's");
    }
}

#[tokio::test(start_paused = true)]
async fn configured_ports_are_settled_when_all_have_answers() {
    let mut config = waiting();
    config.inbound.ports = vec![80, 81];
    let policies = Policies::unreachable(config);
    let mut settled = pin!(policies.settled());
    policies.publish(80, detecting(Vec::new()));
    assert!(tokio::time::timeout(TIMEOUT / 2, settled.as_mut()).await.is_err());
    policies.publish(81, detecting(Vec::new()));
    assert!(tokio::time::timeout(Duration::from_millis(1), settled).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_last_answer_outlives_the_idle_time() {
    let policies = Policies::unreachable(waiting());
    policies.publish(8080, detecting(Vec::new()));
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_secs(200)).await;
        assert!(policies.inner.ports.lock().watched.keys().all(|port| *port != 8080), "forgotten");
        let begin = Instant::now();
        let port = policies.port(8080, CLIENT).await;
        assert_eq!(name(&port), "web", "the controller is gone, and its last answer stays in force");
        assert!(begin.elapsed() >= TIMEOUT, "a newer one was waited for");
    }
}

#[tokio::test(start_paused = true)]
async fn ports_of_a_scan_are_bounded() {
    let mut config = crate::inbound::testing::config();
    config.inbound.ports = vec![80];
    let policies = Policies::unreachable(config);
    let policy = async |client: u8, port: u16| policies.port(port, IpAddr::from([10, 0, 0, client])).await;
    // The ports that a client gets, which stay in use.
    let scan = async |client: u8, ports: Range<u16>| {
        let mut held = Vec::new();
        for port in ports {
            held.push(policy(client, port).await);
        }
        held.retain(|policy| name(policy) != "too-many-ports");
        held
    };
    let mut held = scan(1, 1000..2000).await;
    assert_eq!(held.len(), UNDECLARED_PORTS / 2, "one client does not get all");
    for client in 2..10 {
        let first = 1000 * u16::from(client);
        let others = scan(client, first..first + 100).await;
        assert_eq!(others.len(), UNDECLARED_PORTS / 16, "each other client has a share");
        held.extend(others);
    }
    assert_eq!(name(&policy(10, 900).await), "too-many-ports");
    assert_eq!(name(&policy(10, 80).await), "all-unauthenticated", "configured ports are not removed");
    held.pop();
    assert_eq!(name(&policy(1, 900).await), "too-many-ports");
    assert_eq!(name(&policy(10, 900).await), "all-unauthenticated", "an unused one makes room");
    for port in 10_000..60_000 {
        policy(10, port).await;
    }
    let ports = policies.inner.ports.lock();
    assert!(ports.watched.len() <= UNDECLARED_PORTS + 1 && ports.last.len() <= UNDECLARED_PORTS);
}

/// An answer of a default policy, without a resource.
fn default(name: &str) -> weft_proto::linkerd::inbound::Server {
    let mut server = detecting(vec![authz(name, anybody())]);
    server.labels =
        [("kind", "default"), ("name", name)].map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    server
}

/// A scan of all ports gets answers without a resource, which are not worth more than others.
#[tokio::test(start_paused = true)]
async fn a_scan_of_ports_takes_no_remembered_answer_of_a_server() {
    let policies = Policies::unreachable(waiting());
    let idle = || tokio::time::sleep(Duration::from_secs(200));
    let limit = u16::try_from(UNDECLARED_PORTS).unwrap();
    let scan = async |first: u16| {
        for port in first..first + limit {
            policies.publish(port, default("all-unauthenticated"));
        }
        idle().await;
    };
    scan(1000).await;
    assert_eq!(policies.inner.ports.lock().last.len(), UNDECLARED_PORTS);
    let mut unreadable = detecting(Vec::new());
    unreadable.protocol = None;
    policies.publish(9000, unreadable);
    policies.publish(9001, default("all-authenticated"));
    policies.publish(8080, detecting(Vec::new()));
    idle().await;
    scan(3000).await;
    let ports = policies.inner.ports.lock();
    let remembered = [8080, 9000, 9001].map(|port| ports.last.get(&port).map(|policy| policy.meta.name.to_string()));
    assert_eq!(remembered, ["web", "invalid-policy", "all-authenticated"].map(|name| Some(name.to_owned())));
    assert_eq!(ports.last.len(), UNDECLARED_PORTS);
}

/// The controller's default policy may be stricter than that of the settings, which the pod has since its injection.
#[tokio::test(start_paused = true)]
async fn beyond_the_number_that_is_remembered_answers_of_servers_take_the_places_of_defaults() {
    let policies = Policies::unreachable(waiting());
    let idle = || tokio::time::sleep(Duration::from_secs(200));
    for port in 1000..1000 + u16::try_from(UNDECLARED_PORTS).unwrap() {
        policies.publish(port, default("deny"));
    }
    idle().await;
    policies.publish(8080, detecting(Vec::new()));
    policies.publish(8081, default("all-unauthenticated"));
    idle().await;
    let ports = policies.inner.ports.lock();
    assert_eq!(&*ports.last[&8080].meta.name, "web");
    assert!(!ports.last.contains_key(&8081), "the settings say the same");
    assert_eq!(ports.last.len(), UNDECLARED_PORTS);
}

#[tokio::test]
async fn an_unreadable_answer_denies_and_a_readable_one_heals() {
    let policies = Policies::unreachable(crate::inbound::testing::config());
    let port = policies.port(8080, CLIENT).await;
    let mut broken = detecting(vec![authz("a", anybody())]);
    broken.protocol = None;
    policies.publish(8080, broken);
    assert!(port.borrow().authorizations.is_empty());
    policies.publish(8080, detecting(vec![authz("a", anybody())]));
    assert_eq!(port.borrow().authorizations.len(), 2, "its own and localhost's");
}

#[tokio::test(start_paused = true)]
async fn unused_ports_are_forgotten_and_configured_ones_are_not() {
    let mut config = crate::inbound::testing::config();
    config.inbound.ports = vec![80];
    config.inbound.discovery_idle_timeout = Duration::from_secs(90);
    let policies = Policies::unreachable(config);
    drop(policies.port(8080, CLIENT).await);
    let held = policies.port(8081, CLIENT).await;
    tokio::time::sleep(Duration::from_secs(200)).await;
    let mut known: Vec<u16> = policies.inner.ports.lock().watched.keys().copied().collect();
    known.sort_unstable();
    assert_eq!(known, [80, 8081]);
    drop(held);
}
