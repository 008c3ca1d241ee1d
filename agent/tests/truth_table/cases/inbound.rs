//! Connections to the pod.

use super::outbound::EARLY;
use crate::case::*;

const PASS_PORT: &[&str] = &["inbound pass_skip_port"];
const PASS_SUBNET: &[&str] = &["inbound pass_skip_subnet"];

pub(crate) const CASES: &[Case] = &[
    Case {
        ids: &["I1", "W29"],
        what: "connection that began before the rules were in force, and was tracked already",
        given: &[Given::Tracking],
        by: STRANGER,
        act: Act::ConnectEarly,
        to: &["10.99.0.2:8080"],
        ..UNTOUCHED
    },
    Case {
        ids: &["I1", "W29"],
        what: "connection that began before the rules were in force, not tracked before",
        by: STRANGER,
        act: Act::ConnectEarly,
        to: &["10.99.0.2:8080"],
        outcome: fails("ECONNRESET"),
        differs: differs(DIRECT, EARLY),
        ..UNTOUCHED
    },
    Case {
        ids: &["I2", "W12"],
        what: "UDP",
        by: STRANGER,
        act: Act::Dial(How::Udp),
        outcome: seen(&[("listener", "5353")]),
        to: &["10.99.0.2:5353", "[fd99::2]:5353"],
        ..UNTOUCHED
    },
    Case {
        ids: &["I2", "W12"],
        what: "ICMP",
        by: Caller { netns: PEER, ..ROOT },
        act: Act::Dial(How::Icmp),
        outcome: seen(&[("icmp-type", "0")]),
        to: &["10.99.0.2:0"],
        ..UNTOUCHED
    },
    Case {
        ids: &["I3"],
        what: "IPv6 where only IPv4 has rules (`--ipv6=false`)",
        given: &[Given::Ipv4Only],
        to: &["[fd99::2]:8080"],
        // Connection tracking is inactive for a family without rules.
        outcome: DIRECT.but(&[("orig", "ENOENT")]),
        differs: differs(INBOUND, "a pod that is meshed is meshed in both families: there is no switch"),
        ..STEERED
    },
    Case {
        ids: &["I4", "W19", "W30"],
        what: "the proxy's own ports, 4190 and 4191",
        to: &["10.99.0.2:4190", "[fd99::2]:4190", "10.99.0.2:4191"],
        outcome: DIRECT,
        verdicts: PASS_PORT,
        ..STEERED
    },
    Case {
        ids: &["I4", "W19", "W30"],
        what: "4191 over IPv6, where the proxy listens there on IPv4 alone, and an application on IPv6",
        to: &["[fd99::2]:4191"],
        outcome: DIRECT,
        differs: differs(fails("ECONNREFUSED"), "the port is the proxy's alone, in both families"),
        verdicts: &["inbound deny_no_listener"],
        ..STEERED
    },
    Case {
        ids: &["I5", "W19"],
        what: "a skipped port",
        to: &["10.99.0.2:4567", "[fd99::2]:4567"],
        outcome: DIRECT,
        verdicts: PASS_PORT,
        ..STEERED
    },
    Case {
        ids: &["I6", "W20"],
        what: "from a skipped network, to the application and to 4143",
        act: Act::Dial(How::From("10.99.0.77:0")),
        to: &["10.99.0.2:8080", "10.99.0.2:4143"],
        outcome: DIRECT,
        verdicts: PASS_SUBNET,
        ..STEERED
    },
    Case {
        ids: &["I6", "W20"],
        what: "from a skipped network, IPv6",
        act: Act::Dial(How::From("[fd99::77]:0")),
        to: &["[fd99::2]:8080", "[fd99::2]:4143"],
        outcome: DIRECT,
        verdicts: PASS_SUBNET,
        ..STEERED
    },
    Case {
        ids: &["I7", "I9", "I10", "I12", "O27", "W18", "W25"],
        what: "an application's port: by a pod outside the mesh, a peer's TLS, a kubelet's probe, a node port",
        to: &["10.99.0.2:8080", "10.99.0.2:8081", "[fd99::2]:8080"],
        ..STEERED
    },
    Case {
        ids: &["I8", "W21"],
        what: "4143, by a peer with a transport header",
        to: &["10.99.0.2:4143", "[fd99::2]:4143"],
        ..STEERED
    },
    Case {
        ids: &["I11"],
        what: "4140; the proxy cannot forward it, because it listens there on loopback alone",
        to: &["10.99.0.2:4140"],
        ..STEERED
    },
    Case {
        ids: &["I13", "W22"],
        what: "a port where nobody listens: the proxy answers",
        to: &["10.99.0.2:7777", "[fd99::2]:7777"],
        ..STEERED
    },
    Case {
        ids: &["I14"],
        what: "a port in the list, where only some are redirected (`--ports-to-redirect`)",
        given: &[Given::OnlyPort(8080)],
        to: &["10.99.0.2:8080"],
        ..STEERED
    },
    Case {
        ids: &["I14"],
        what: "a port that is not in the list; Weft is told to skip all others",
        given: &[Given::OnlyPort(8080)],
        to: &["10.99.0.2:8081"],
        outcome: DIRECT,
        verdicts: PASS_PORT,
        ..STEERED
    },
    Case {
        ids: &["I18", "W27"],
        what: "a second address of the interface",
        to: &["10.99.0.22:8080", "[fd99::22]:8080"],
        ..STEERED
    },
    Case {
        ids: &["I18", "W27"],
        what: "an address of another interface, as Multus adds them",
        by: Caller { netns: MATE, ..PROXY },
        to: &["10.98.0.2:8080"],
        verdicts: &["inbound redirect", "outbound pass_proxy"],
        ..STEERED
    },
    Case {
        ids: &["I19", "W26"],
        what: "by the proxy of another pod: only a pod's own proxy is exempt",
        by: PROXY,
        to: &["10.98.0.4:8080"],
        outcome: INBOUND.but(&[("source", "10.98.0.2")]),
        verdicts: &["inbound redirect", "outbound pass_proxy"],
        ..STEERED
    },
    Case {
        ids: &["W28"],
        what: "from a network namespace inside of the pod, to the pod",
        by: Caller { netns: NESTED, ..APP },
        to: &["10.97.0.2:8080"],
        ..STEERED
    },
    Case {
        ids: &["W23"],
        what: "rules, but no proxy",
        given: &[Given::NoProxy],
        to: &["10.99.0.2:8080", "[fd99::2]:8080"],
        outcome: fails("ECONNREFUSED"),
        verdicts: &["inbound deny_no_listener"],
        ..STEERED
    },
    Case {
        ids: &["W23"],
        what: "no proxy, a skipped port",
        given: &[Given::NoProxy],
        to: &["10.99.0.2:4567"],
        outcome: DIRECT,
        verdicts: PASS_PORT,
        ..STEERED
    },
];
