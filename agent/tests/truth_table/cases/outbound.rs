//! Connections from the pod.

use crate::case::*;

const PASS_PROXY: &[&str] = &["outbound pass_proxy"];
const PASS_LOOPBACK: &[&str] = &["outbound pass_loopback"];
const PASS_OWN: &[&str] = &["outbound pass_own_address"];
const PASS_PORT: &[&str] = &["outbound pass_skip_port"];

pub(crate) const CASES: &[Case] = &[
    Case {
        ids: &["O1"],
        what: "connection that began before the rules were in force, and was tracked already",
        given: &[Given::Tracking],
        act: Act::ConnectEarly,
        to: &["10.99.0.3:8080"],
        ..UNTOUCHED
    },
    Case {
        ids: &["O1"],
        what: "connection that began before the rules were in force, not tracked before",
        act: Act::ConnectEarly,
        to: &["10.99.0.3:8080"],
        outcome: fails("ECONNRESET"),
        differs: differs(DIRECT, EARLY),
        ..UNTOUCHED
    },
    Case {
        ids: &["O2", "W12"],
        what: "UDP (QUIC and DNS are no different)",
        act: Act::Dial(How::Udp),
        outcome: seen(&[("listener", "5353")]),
        to: &["10.99.0.3:5353", "[fd99::3]:5353"],
        ..UNTOUCHED
    },
    Case {
        ids: &["O2", "W12"],
        what: "ICMP",
        by: ROOT,
        act: Act::Dial(How::Icmp),
        outcome: seen(&[("icmp-type", "0")]),
        to: &["10.99.0.3:0"],
        ..UNTOUCHED
    },
    Case {
        ids: &["O3"],
        what: "IPv6 where only IPv4 has rules (`--ipv6=false`)",
        given: &[Given::Ipv4Only],
        to: &["[fd99::3]:8080"],
        // Connection tracking is inactive for a family without rules.
        outcome: DIRECT.but(&[("own-orig", "ENOENT")]),
        differs: differs(OUTBOUND, "a pod that is meshed is meshed in both families: there is no switch"),
        ..REDIRECTED
    },
    Case {
        ids: &["O4", "W9"],
        what: "the proxy, to anywhere",
        by: PROXY,
        to: &["10.99.0.3:8080", "[fd99::3]:8080", "[::ffff:10.99.0.3]:8080"],
        verdicts: PASS_PROXY,
        ..UNTOUCHED
    },
    Case {
        ids: &["I16", "W9"],
        what: "the proxy, to its application: own address and loopback",
        by: PROXY,
        to: &["10.99.0.2:8080", "127.0.0.1:8080", "[fd99::2]:8080", "[::1]:8080"],
        verdicts: PASS_PROXY,
        ..UNTOUCHED
    },
    Case {
        ids: &["W10"],
        what: "the proxy in a user namespace, where the host knows it by another uid",
        given: &[Given::ProxyUser(SHIFT + PROXY_UID)],
        by: Caller { place: Place::UserNamespace, ..PROXY },
        to: &["10.99.0.3:8080"],
        verdicts: PASS_PROXY,
        ..UNTOUCHED
    },
    Case {
        ids: &["W10"],
        what: "the proxy's uid on the host, when the proxy is another one",
        given: &[Given::ProxyUser(SHIFT + PROXY_UID)],
        by: PROXY,
        to: &["10.99.0.3:8080"],
        ..REDIRECTED
    },
    Case {
        ids: &["O5"],
        what: "a process of the proxy's group, where `proxy-gid` is set",
        given: &[Given::ProxyGroup],
        by: Caller { gid: PROXY_GID, ..APP },
        to: &["10.99.0.3:8080"],
        verdicts: &["outbound pass_proxy_group"],
        ..UNTOUCHED
    },
    Case {
        ids: &["O5"],
        what: "a process of the proxy's group, where `proxy-gid` is not set",
        by: Caller { gid: PROXY_GID, ..APP },
        to: &["10.99.0.3:8080"],
        ..REDIRECTED
    },
    Case {
        ids: &["O6", "I15", "W3"],
        what: "loopback",
        to: &["127.0.0.1:8080", "127.9.8.7:8080", "[::ffff:127.0.0.1]:8080"],
        verdicts: PASS_LOOPBACK,
        ..UNTOUCHED
    },
    Case {
        ids: &["O6", "W8"],
        what: "the proxy's own listeners on loopback, dialled by hand: the answer is themselves, which loop guards know",
        to: &["127.0.0.1:4140", "127.0.0.1:4143", "[::1]:4140", "[::1]:4143"],
        verdicts: PASS_LOOPBACK,
        ..UNTOUCHED
    },
    Case {
        ids: &["O7"],
        what: "connect to 0.0.0.0",
        to: &["0.0.0.0:8080"],
        outcome: DIRECT.but(ANY_V4),
        verdicts: PASS_LOOPBACK,
        ..UNTOUCHED
    },
    Case {
        ids: &["O7"],
        what: "connect to ::",
        to: &["[::]:8080"],
        outcome: DIRECT.but(ANY_V6),
        verdicts: PASS_LOOPBACK,
        ..UNTOUCHED
    },
    Case {
        ids: &["O8", "I15", "W4"],
        what: "an own address, on every interface",
        to: &["10.99.0.2:8080", "10.99.0.22:8080", "10.98.0.2:8080", "[::ffff:10.99.0.2]:8080"],
        verdicts: PASS_OWN,
        ..UNTOUCHED
    },
    Case {
        ids: &["O8", "W8"],
        what: "the proxy's inbound listener at an own address",
        to: &["10.99.0.2:4143", "[fd99::2]:4143"],
        verdicts: PASS_OWN,
        ..UNTOUCHED
    },
    Case {
        ids: &["O9", "O11", "W5", "W1"],
        what: "a ClusterIP, its own among them",
        to: &["10.96.0.10:80", "[fd96::10]:80"],
        ..REDIRECTED
    },
    Case { ids: &["O10", "O21", "I17", "W1", "W26"], what: "another pod", to: &["10.99.0.3:8080"], ..REDIRECTED },
    Case {
        ids: &["O10", "O22"],
        what: "another pod, by root, as in a debug container or by `kubectl exec`",
        by: ROOT,
        to: &["10.99.0.3:8080"],
        ..REDIRECTED
    },
    Case {
        ids: &["O12", "W7", "W1"],
        what: "node, cloud metadata, API server, internet",
        to: &["10.99.0.3:443", "169.254.169.254:80", "192.0.2.7:443"],
        ..REDIRECTED
    },
    Case {
        ids: &["O13", "W6"],
        what: "a skipped port",
        to: &["10.99.0.3:4567", "[fd99::3]:4567", "[::ffff:10.99.0.3]:4567"],
        verdicts: PASS_PORT,
        ..UNTOUCHED
    },
    Case {
        ids: &["O14"],
        what: "a destination in a skipped network, which only means sources",
        to: &["10.99.0.77:8080", "[fd99::77]:8080"],
        ..REDIRECTED
    },
    Case { ids: &["O15"], what: "DNS over TCP", to: &["10.99.0.3:53"], ..REDIRECTED },
    Case {
        ids: &["O16"],
        what: "through a second interface",
        to: &["10.98.0.4:8080"],
        outcome: OUTBOUND.but(&[("source", "10.98.0.2")]),
        differs: differs(OUTBOUND, "the source is the pod's first address, because the decision falls before routing"),
        ..REDIRECTED
    },
    Case {
        ids: &["O17", "W2"],
        what: "IPv4 from an IPv6 socket (v4-mapped); the answer is IPv4",
        to: &["[::ffff:10.99.0.3]:8080", "[::ffff:192.0.2.7]:443"],
        ..REDIRECTED
    },
    Case { ids: &["O18", "W2"], what: "IPv6", to: &["[fd99::3]:8080", "[2001:db8::7]:443"], ..REDIRECTED },
    Case { ids: &["O19", "W3"], what: "::1", to: &["[::1]:8080"], verdicts: PASS_LOOPBACK, ..UNTOUCHED },
    Case {
        ids: &["O19", "W4"],
        what: "an own IPv6 address",
        to: &["[fd99::2]:8080", "[fd99::22]:8080", "[fd98::2]:8080"],
        verdicts: PASS_OWN,
        ..UNTOUCHED
    },
    Case {
        ids: &["O19"],
        what: "an own link-local address",
        to: &["[fe80::2%to99]:8080"],
        outcome: seen(&[("listener", "8080"), ("same-source", "true")]),
        differs: differs(
            OUTBOUND,
            "a pod with several interfaces: the address alone does not say on which of them it is the pod's own",
        ),
        ..REDIRECTED
    },
    Case {
        ids: &["O20"],
        what: "before there are rules, as in an init container that comes too early",
        given: &[Given::NoRules],
        to: &["10.99.0.3:8080", "[fd99::3]:8080"],
        ..UNTOUCHED
    },
    Case {
        ids: &["O20", "W24"],
        what: "rules, but no proxy",
        given: &[Given::NoProxy],
        to: &["10.99.0.3:8080", "[fd99::3]:8080", "[::ffff:10.99.0.3]:8080"],
        outcome: fails("ECONNREFUSED"),
        ..REDIRECTED
    },
    Case {
        ids: &["O23", "W11"],
        what: "an application that runs as the proxy's user",
        by: Caller { place: Place::Pod, ..PROXY },
        to: &["10.99.0.3:8080"],
        verdicts: PASS_PROXY,
        ..UNTOUCHED
    },
    Case {
        ids: &["O23", "W11"],
        what: "an application that runs as the proxy's user, in strict mode",
        given: &[Given::Strict],
        by: Caller { place: Place::Pod, ..PROXY },
        to: &["10.99.0.3:8080"],
        outcome: DIRECT,
        differs: differs(OUTBOUND, "strict mode exempts the proxy's cgroup; linkerd-init has nothing like it"),
        ..REDIRECTED
    },
    Case {
        ids: &["O4", "W11"],
        what: "the proxy in strict mode",
        given: &[Given::Strict],
        by: PROXY,
        to: &["10.99.0.3:8080"],
        verdicts: &["outbound pass_proxy_cgroup"],
        ..UNTOUCHED
    },
    Case {
        ids: &["O24", "W28"],
        what: "forwarded for a network namespace inside of the pod, to somebody else",
        by: Caller { netns: NESTED, ..APP },
        to: &["10.99.0.3:8080"],
        outcome: INBOUND.but(&[("accepted-local", "10.97.0.2:4143")]),
        differs: differs(DIRECT, "the socket is not the pod's, and the packet is not for the pod"),
        verdicts: &[],
        ..REDIRECTED
    },
    Case {
        ids: &["O26"],
        what: "linkerd's network validator",
        by: Caller { uid: 65534, gid: 65534, ..APP },
        to: &["1.1.1.1:20001", "[fd00::1]:20001"],
        ..REDIRECTED
    },
    Case {
        ids: &["W17"],
        what: "a process of the host that entered the pod's network namespace",
        by: Caller { place: Place::Host, ..APP },
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND,
        differs: differs(DIRECT, "its sockets belong to a cgroup of the host, where no programs are attached"),
        verdicts: &[],
        ..REDIRECTED
    },
    Case {
        ids: &["W30"],
        what: "a pod that is not meshed",
        by: STRANGER,
        to: &["10.99.0.3:8080", "10.99.0.77:8081"],
        ..UNTOUCHED
    },
];

/// linkerd-init never sees such a connection, but a rule that is installed again may.
pub(super) const EARLY: &str =
    "connection tracking takes the first packet it sees for the start of the connection, and redirects it";

const ANY_V4: &[(&str, &str)] =
    &[("peername", "127.0.0.1:8080"), ("accepted-local", "127.0.0.1:8080"), ("own-orig", "127.0.0.1:8080")];
const ANY_V6: &[(&str, &str)] =
    &[("peername", "[::1]:8080"), ("accepted-local", "[::1]:8080"), ("own-orig", "[::1]:8080")];
