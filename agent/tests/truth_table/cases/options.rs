//! SO_ORIGINAL_DST: all sizes of buffers at both levels, all kinds of sockets, alongside netfilter's own answers.

use crate::case::*;

type Seen = &'static [(&'static str, &'static str)];

/// The one deliberate difference.
const LENGTH: &str = "netfilter leaves the length as the caller gave it, Weft answers that of the address";

/// Netfilter requires room for the address and leaves the length unchanged.
const ASKED_V4: Seen = &[
    ("ask:IP/0", "EINVAL"),
    ("ask:IP/8", "EINVAL"),
    ("ask:IP/15", "EINVAL"),
    ("ask:IP/16", "16:10.99.0.3:8080"),
    ("ask:IP/17", "17:10.99.0.3:8080"),
    ("ask:IP/28", "28:10.99.0.3:8080"),
    ("ask:IP/32", "32:10.99.0.3:8080"),
    ("ask:IP/128", "128:10.99.0.3:8080"),
    ("ask:IP/8192", "8192:10.99.0.3:8080"),
    ("ask:IPV6/0", "EOPNOTSUPP"),
    ("ask:IPV6/28", "EOPNOTSUPP"),
    ("ask:IPV6/8192", "EOPNOTSUPP"),
];
const ASKED_V4_WEFT: Seen = &[
    ("ask:IP/0", "EINVAL"),
    ("ask:IP/8", "EINVAL"),
    ("ask:IP/15", "EINVAL"),
    ("ask:IP/16", "16:10.99.0.3:8080"),
    ("ask:IP/17", "16:10.99.0.3:8080"),
    ("ask:IP/28", "16:10.99.0.3:8080"),
    ("ask:IP/32", "16:10.99.0.3:8080"),
    ("ask:IP/128", "16:10.99.0.3:8080"),
    ("ask:IP/8192", "16:10.99.0.3:8080"),
    ("ask:IPV6/0", "EOPNOTSUPP"),
    ("ask:IPV6/28", "EOPNOTSUPP"),
    ("ask:IPV6/8192", "EOPNOTSUPP"),
];
const ASKED_V6: Seen = &[
    ("ask:IPV6/0", "EINVAL"),
    ("ask:IPV6/16", "EINVAL"),
    ("ask:IPV6/27", "EINVAL"),
    ("ask:IPV6/28", "28:[fd99::3]:8080"),
    ("ask:IPV6/32", "32:[fd99::3]:8080"),
    ("ask:IPV6/128", "128:[fd99::3]:8080"),
    ("ask:IPV6/8192", "8192:[fd99::3]:8080"),
    ("ask:IP/8", "EINVAL"),
    ("ask:IP/16", "ENOENT"),
    ("ask:IP/8192", "ENOENT"),
];
const ASKED_V6_WEFT: Seen = &[
    ("ask:IPV6/0", "EINVAL"),
    ("ask:IPV6/16", "EINVAL"),
    ("ask:IPV6/27", "EINVAL"),
    ("ask:IPV6/28", "28:[fd99::3]:8080"),
    ("ask:IPV6/32", "28:[fd99::3]:8080"),
    ("ask:IPV6/128", "28:[fd99::3]:8080"),
    ("ask:IPV6/8192", "28:[fd99::3]:8080"),
    ("ask:IP/8", "EINVAL"),
    ("ask:IP/16", "ENOENT"),
    ("ask:IP/8192", "ENOENT"),
];
/// On the dual-stack listener of 4143, queried at both levels.
const DUAL_V4: Seen = &[
    ("ask:IP/15", "EINVAL"),
    ("ask:IP/16", "16:10.99.0.2:8080"),
    ("ask:IPV6/27", "EINVAL"),
    ("ask:IPV6/28", "ENOENT"),
    ("ask:IPV6/8192", "ENOENT"),
];
const DUAL_V6: Seen = &[
    ("ask:IP/15", "EINVAL"),
    ("ask:IP/16", "ENOENT"),
    ("ask:IP/8192", "ENOENT"),
    ("ask:IPV6/27", "EINVAL"),
    ("ask:IPV6/28", "28:[fd99::2]:8080"),
];
const OWN_V4: Seen = &[("own:IP/15", "EINVAL"), ("own:IP/16", "16:10.99.0.3:8080"), ("own:IPV6/28", "EOPNOTSUPP")];
const OWN_V6: Seen = &[("own:IPV6/27", "EINVAL"), ("own:IPV6/28", "28:[fd99::3]:8080"), ("own:IP/16", "ENOENT")];
const OWN_MAPPED: Seen = &[("own:IP/15", "EINVAL"), ("own:IP/16", "16:10.99.0.3:8080"), ("own:IPV6/28", "ENOENT")];
const PASSED_V4: Seen = &[("own:IP/15", "EINVAL"), ("own:IP/16", "16:10.99.0.3:4567")];
const PASSED_V6: Seen = &[("own:IPV6/28", "28:[fd99::3]:4567"), ("own:IP/16", "ENOENT")];
const FRESH_V4: Seen =
    &[("own:IP/8", "EINVAL"), ("own:IP/16", "ENOENT"), ("own:IP/8192", "ENOENT"), ("own:IPV6/28", "EOPNOTSUPP")];
const FRESH_V6: Seen = &[("own:IPV6/27", "EINVAL"), ("own:IPV6/28", "ENOENT"), ("own:IP/16", "ENOENT")];
const DATAGRAM_V4: Seen = &[("own:IP/8", "ENOPROTOOPT"), ("own:IP/16", "ENOPROTOOPT")];
const DATAGRAM_V6: Seen = &[("own:IPV6/28", "ENOPROTOOPT"), ("own:IP/16", "ENOPROTOOPT")];

pub(crate) const CASES: &[Case] = &[
    Case {
        ids: &["S1"],
        what: "asked about an outbound IPv4 connection, with any room and at both levels",
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND.but(ASKED_V4),
        differs: differs(OUTBOUND.but(ASKED_V4_WEFT), LENGTH),
        ..REDIRECTED
    },
    Case {
        ids: &["S2"],
        what: "asked about an outbound IPv6 connection",
        to: &["[fd99::3]:8080"],
        outcome: OUTBOUND.but(ASKED_V6),
        differs: differs(OUTBOUND.but(ASKED_V6_WEFT), LENGTH),
        ..REDIRECTED
    },
    Case {
        ids: &["S3"],
        what: "asked about an inbound IPv4 connection of a dual-stack listener",
        to: &["10.99.0.2:8080"],
        outcome: INBOUND.but(DUAL_V4),
        ..STEERED
    },
    Case {
        ids: &["S4"],
        what: "asked about an inbound IPv6 connection of a dual-stack listener",
        to: &["[fd99::2]:8080"],
        outcome: INBOUND.but(DUAL_V6),
        ..STEERED
    },
    Case {
        ids: &["S5"],
        what: "asked by the application about its own redirected connection",
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND.but(OWN_V4),
        ..REDIRECTED
    },
    Case {
        ids: &["S5"],
        what: "asked by the application about its own redirected IPv6 connection",
        to: &["[fd99::3]:8080"],
        outcome: OUTBOUND.but(OWN_V6),
        ..REDIRECTED
    },
    Case {
        ids: &["S5"],
        what: "asked by the application about its own redirected v4-mapped connection",
        to: &["[::ffff:10.99.0.3]:8080"],
        outcome: OUTBOUND.but(OWN_MAPPED),
        ..REDIRECTED
    },
    Case {
        ids: &["S6"],
        what: "asked by the application about its own connection that passed",
        to: &["10.99.0.3:4567"],
        outcome: DIRECT.but(PASSED_V4),
        verdicts: &["outbound pass_skip_port"],
        ..UNTOUCHED
    },
    Case {
        ids: &["S6"],
        what: "asked by the application about its own IPv6 connection that passed",
        to: &["[fd99::3]:4567"],
        outcome: DIRECT.but(PASSED_V6),
        verdicts: &["outbound pass_skip_port"],
        ..UNTOUCHED
    },
    Case {
        ids: &["S7"],
        what: "asked about a TCP socket that is not connected",
        act: Act::Dial(How::Fresh),
        to: &["10.99.0.3:8080"],
        outcome: seen(FRESH_V4),
        ..UNTOUCHED
    },
    Case {
        ids: &["S7"],
        what: "asked about an IPv6 TCP socket that is not connected",
        act: Act::Dial(How::Fresh),
        to: &["[fd99::3]:8080"],
        outcome: seen(FRESH_V6),
        ..UNTOUCHED
    },
    Case {
        ids: &["S8"],
        what: "asked about a UDP socket",
        act: Act::Dial(How::Udp),
        to: &["10.99.0.3:5353"],
        outcome: seen(DATAGRAM_V4),
        ..UNTOUCHED
    },
    Case {
        ids: &["S8"],
        what: "asked about an IPv6 UDP socket",
        act: Act::Dial(How::Udp),
        to: &["[fd99::3]:5353"],
        outcome: seen(DATAGRAM_V6),
        ..UNTOUCHED
    },
    Case {
        ids: &["S9"],
        what: "asked by the proxy about its own connection",
        by: PROXY,
        to: &["10.99.0.3:8080", "[fd99::3]:8080"],
        outcome: DIRECT.but(&[("own-orig-is", "peer")]),
        differs: differs(
            DIRECT.but(&[("own-orig-is", "local")]),
            "nothing is kept for the proxy's own connections, which are many, and about which nobody asks",
        ),
        verdicts: &["outbound pass_proxy"],
        ..UNTOUCHED
    },
    Case {
        ids: &["S10"],
        what: "beside a firewall that tracks connections, outbound",
        given: &[Given::Tracking],
        to: &["10.99.0.3:8080", "[fd99::3]:8080", "[::ffff:10.99.0.3]:8080"],
        ..REDIRECTED
    },
    Case {
        ids: &["S10"],
        what: "beside a firewall that tracks connections, any room",
        given: &[Given::Tracking],
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND.but(ASKED_V4),
        differs: differs(OUTBOUND.but(ASKED_V4_WEFT), LENGTH),
        ..REDIRECTED
    },
    Case {
        ids: &["S10"],
        what: "beside a firewall that tracks connections, inbound",
        given: &[Given::Tracking],
        to: &["10.99.0.2:8080", "10.99.0.2:4143", "[fd99::2]:8080", "10.99.0.22:8080"],
        ..STEERED
    },
    Case {
        ids: &["S10"],
        what: "beside a firewall that tracks connections, loopback",
        given: &[Given::Tracking],
        to: &["127.0.0.1:4140", "[::1]:4140"],
        verdicts: &["outbound pass_loopback"],
        ..UNTOUCHED
    },
    Case {
        ids: &["S11", "W35"],
        what: "beside linkerd-init's rules, outbound",
        given: &[Given::InitRules],
        to: &["10.99.0.3:8080", "[fd99::3]:8080", "[::ffff:10.99.0.3]:8080"],
        ..REDIRECTED
    },
    Case {
        ids: &["S11", "W35"],
        what: "beside linkerd-init's rules, inbound: netfilter comes first, and its answer counts",
        given: &[Given::InitRules],
        to: &["10.99.0.2:8080", "10.99.0.2:7777"],
        outcome: INBOUND.but(&[("accepted-local", "10.99.0.2:4143")]),
        ..STEERED
    },
    Case {
        ids: &["S11", "W35"],
        what: "beside linkerd-init's rules, inbound over IPv6",
        given: &[Given::InitRules],
        to: &["[fd99::2]:8080"],
        outcome: INBOUND.but(&[("accepted-local", "[fd99::22]:4143")]),
        ..STEERED
    },
    Case {
        ids: &["S11", "W35"],
        what: "beside linkerd-init's rules, inbound to 4143 itself",
        given: &[Given::InitRules],
        to: &["10.99.0.2:4143"],
        ..STEERED
    },
    Case {
        ids: &["S11", "W35"],
        what: "beside linkerd-init's rules, inbound to a skipped port",
        given: &[Given::InitRules],
        to: &["10.99.0.2:4567"],
        outcome: DIRECT,
        verdicts: &["inbound pass_skip_port"],
        ..STEERED
    },
    Case {
        ids: &["S11", "W35"],
        what: "beside linkerd-init's rules, the proxy",
        given: &[Given::InitRules],
        by: PROXY,
        to: &["10.99.0.3:8080", "10.99.0.2:8080"],
        verdicts: &["outbound pass_proxy"],
        ..UNTOUCHED
    },
];
