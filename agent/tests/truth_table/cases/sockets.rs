//! Kinds of sockets and ways to use them, for which the address alone does not decide.

use crate::case::*;

const DIALLED: &[&str] = &["10.99.0.3:8080", "[fd99::3]:8080"];
const OUT_AND_LOOPBACK: &[&str] = &["outbound pass_loopback", "outbound redirect"];
const ANOTHER_PORT: &str =
    "connection tracking still knows the first connection, and gives the second another source port";
const CREATOR: &str = "iptables ask who opened the socket, Weft who connects it";

pub(crate) const CASES: &[Case] = &[
    Case {
        ids: &["K1", "W13"],
        what: "nonblocking connect",
        act: Act::Dial(How::Nonblocking),
        to: DIALLED,
        ..REDIRECTED
    },
    Case {
        ids: &["K2", "W13"],
        what: "TCP fast open by MSG_FASTOPEN, no cookie yet",
        act: Act::Dial(How::FastOpenSend),
        to: DIALLED,
        outcome: OUTBOUND.but(&[("syn-data", "0")]),
        ..REDIRECTED
    },
    Case {
        ids: &["K2", "W13"],
        what: "TCP fast open by MSG_FASTOPEN, data in the SYN",
        given: &[FAST_OPEN],
        act: Act::Dial(How::FastOpenSend),
        to: DIALLED,
        outcome: OUTBOUND.but(&[("syn-data", "1")]),
        ..REDIRECTED
    },
    Case {
        ids: &["K3", "W13"],
        what: "TCP fast open by TCP_FASTOPEN_CONNECT, data in the SYN",
        given: &[FAST_OPEN],
        act: Act::Dial(How::FastOpenConnect),
        to: DIALLED,
        outcome: OUTBOUND.but(&[("syn-data", "1")]),
        ..REDIRECTED
    },
    Case { ids: &["K4", "W13"], what: "connect by io_uring", act: Act::Dial(How::Ring), to: DIALLED, ..REDIRECTED },
    Case {
        ids: &["K5", "W13"],
        what: "MPTCP",
        act: Act::Dial(How::Multipath),
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND.but(&[("own-orig-is", "peer")]),
        differs: differs(
            OUTBOUND.but(&[("peername", "127.0.0.1:4140"), ("own-orig", "ENOENT")]),
            "the application sees the proxy as peer, and no original destination: only the subflow keeps it",
        ),
        ..REDIRECTED
    },
    Case {
        ids: &["K6", "W14"],
        what: "SO_BINDTODEVICE by a process with CAP_NET_RAW",
        by: ROOT,
        act: Act::Dial(How::Device("to99")),
        to: DIALLED,
        outcome: fails("ETIMEDOUT"),
        differs: differs(OUTBOUND, "the socket is freed from its device: bound to it, it could not reach the proxy"),
        ..REDIRECTED
    },
    Case {
        ids: &["K7", "W14"],
        what: "SO_BINDTODEVICE by any other process",
        act: Act::Dial(How::Device("to99")),
        to: DIALLED,
        outcome: fails("ETIMEDOUT"),
        differs: differs(
            fails("EPERM"),
            "the kernel does not let it be freed, and what cannot reach the proxy is refused at once",
        ),
        verdicts: &["outbound deny_device"],
        ..REDIRECTED
    },
    Case {
        ids: &["K8", "W14"],
        what: "SO_BINDTODEVICE to a skipped port",
        act: Act::Dial(How::Device("to99")),
        to: &["10.99.0.3:4567"],
        verdicts: &["outbound pass_skip_port"],
        ..UNTOUCHED
    },
    Case {
        ids: &["K9", "W15"],
        what: "bind to an address",
        act: Act::Dial(How::From("10.99.0.22:0")),
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND.but(&[("source", "10.99.0.22")]),
        ..REDIRECTED
    },
    Case {
        ids: &["K9", "W15"],
        what: "bind to an address, IPv6",
        act: Act::Dial(How::From("[fd99::22]:0")),
        to: &["[fd99::3]:8080"],
        outcome: OUTBOUND.but(&[("source", "fd99::22")]),
        ..REDIRECTED
    },
    Case {
        ids: &["K10", "W15"],
        what: "bind to an address and a port",
        act: Act::Dial(How::FromPort("10.99.0.2:0")),
        to: &["10.99.0.3:8080"],
        ..REDIRECTED
    },
    Case {
        ids: &["K11", "W15"],
        what: "bind to a port alone",
        act: Act::Dial(How::FromPort("0.0.0.0:0")),
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND,
        differs: differs(
            OUTBOUND.but(&[("source", "127.0.0.1")]),
            "a socket with a port cannot be given an address any more, so the kernel takes loopback's",
        ),
        ..REDIRECTED
    },
    Case {
        ids: &["K12", "W15"],
        what: "bind to loopback",
        act: Act::Dial(How::From("127.0.0.1:0")),
        to: &["10.99.0.3:8080"],
        outcome: fails("EINVAL"),
        differs: differs(
            OUTBOUND.but(&[("source", "127.0.0.1")]),
            "no route leads from loopback to another host, but one leads to the proxy",
        ),
        ..REDIRECTED
    },
    Case {
        ids: &["K13", "W16"],
        what: "socket used again after AF_UNSPEC: first loopback, then elsewhere",
        act: Act::Dial(How::After("127.0.0.1:4140")),
        to: &["10.99.0.3:8080"],
        verdicts: OUT_AND_LOOPBACK,
        ..REDIRECTED
    },
    Case {
        ids: &["K14", "W16"],
        what: "socket used again after AF_UNSPEC: first elsewhere, then loopback",
        act: Act::Dial(How::After("10.99.0.3:8080")),
        to: &["127.0.0.1:8080", "127.0.0.1:4140"],
        outcome: DIRECT.but(&[("source", "127.0.0.1")]),
        differs: differs(
            DIRECT.but(&[("source", "10.99.0.2")]),
            "the source that a redirected socket was given stays its own",
        ),
        verdicts: OUT_AND_LOOPBACK,
        ..REDIRECTED
    },
    Case {
        ids: &["K15", "W16"],
        what: "socket used again after AF_UNSPEC, for another destination",
        act: Act::Dial(How::After("10.99.0.3:8080")),
        to: &["10.99.0.3:8081", "192.0.2.7:443"],
        ..REDIRECTED
    },
    Case {
        ids: &["K16"],
        what: "one source port for two destinations in turn (SO_REUSEADDR), each closed before the next",
        act: Act::Dial(How::Alternating("10.99.0.3:8080")),
        to: &["192.0.2.7:443"],
        outcome: OUTBOUND.but(&[("same-source", "false")]),
        differs: differs(OUTBOUND, ANOTHER_PORT),
        ..REDIRECTED
    },
    Case {
        ids: &["K17"],
        what: "one source port for two destinations at once (SO_REUSEADDR)",
        act: Act::Dial(How::Beside("10.99.0.3:8080")),
        to: &["192.0.2.7:443"],
        // Connection tracking changes the port of the second one.
        outcome: OUTBOUND.but(&[("same-source", "false")]),
        differs: differs(
            fails("EADDRNOTAVAIL"),
            "both go to one address, the proxy's, and no two connections may have the same four",
        ),
        ..REDIRECTED
    },
    Case {
        ids: &["K18"],
        what: "socket of the pod, connected by a process of another pod (SCM_RIGHTS)",
        by: STRANGER,
        act: Act::Borrow(APP),
        to: DIALLED_BY_OTHERS,
        outcome: OUTBOUND.but(&[("source", "10.99.0.2")]),
        ..REDIRECTED
    },
    Case {
        ids: &["K19"],
        what: "socket of a pod that is not meshed, connected by a process of the pod",
        act: Act::Borrow(STRANGER),
        to: &["10.99.0.77:8080"],
        outcome: DIRECT.but(&[("own-orig", "ENOENT")]),
        ..UNTOUCHED
    },
    Case {
        ids: &["K20"],
        what: "socket of the proxy, connected by the application",
        act: Act::Borrow(PROXY),
        to: &["10.99.0.3:8080"],
        outcome: DIRECT,
        differs: differs(OUTBOUND, CREATOR),
        ..REDIRECTED
    },
    Case {
        ids: &["K21"],
        what: "socket of the application, connected by the proxy",
        by: PROXY,
        act: Act::Borrow(APP),
        to: &["10.99.0.3:8080"],
        outcome: OUTBOUND,
        differs: differs(DIRECT, CREATOR),
        verdicts: &["outbound pass_proxy"],
        ..REDIRECTED
    },
    Case {
        ids: &["K22"],
        what: "socket made before the rules were in force, connected afterwards",
        act: Act::CreateEarly,
        to: &["10.99.0.3:8080", "[fd99::3]:8080", "[::ffff:10.99.0.3]:8080"],
        ..REDIRECTED
    },
    Case {
        ids: &["K23"],
        what: "connect cancelled by a signal, then its source port used for another destination",
        given: &[NO_COOKIES],
        act: Act::Cancel("10.99.0.3:8080"),
        to: &["192.0.2.7:443"],
        outcome: OUTBOUND.but(&[("same-source", "false")]),
        differs: differs(OUTBOUND, ANOTHER_PORT),
        ..REDIRECTED
    },
    Case {
        ids: &["K24"],
        what: "more connections at once than the proxy's queue has room for: each arrives when there is",
        given: &[NO_COOKIES],
        act: Act::Overflow,
        to: &["10.99.0.3:8080", "192.0.2.7:443", "10.99.0.3:443", "10.96.0.10:80"],
        outcome: OUTBOUND.but(&[("kernel:ListenOverflows", "true")]),
        ..REDIRECTED
    },
    Case {
        ids: &["K24"],
        what: "more inbound connections at once than the proxy's queue has room for",
        given: &[NO_COOKIES],
        by: STRANGER,
        act: Act::Overflow,
        to: &["10.99.0.2:8080", "10.99.0.2:8081", "10.99.0.2:443", "10.99.0.2:4143"],
        outcome: INBOUND.but(&[("kernel:ListenOverflows", "true")]),
        ..STEERED
    },
    Case {
        ids: &["K25"],
        what: "SYN cookies",
        given: &[COOKIES],
        to: DIALLED,
        outcome: OUTBOUND.but(&[("kernel:SyncookiesRecv", "true")]),
        ..REDIRECTED
    },
    Case {
        ids: &["K25"],
        what: "SYN cookies, inbound",
        given: &[COOKIES],
        to: &["10.99.0.2:8080", "[fd99::2]:8080"],
        outcome: INBOUND.but(&[("kernel:SyncookiesRecv", "true")]),
        ..STEERED
    },
    Case {
        ids: &["K26"],
        what: "IPv6 routing header by way of another host, to an own address",
        act: Act::Dial(How::Via("fd99::3")),
        to: &["[fd99::2]:8080"],
        outcome: fails("ETIMEDOUT"),
        verdicts: &["outbound pass_own_address"],
        ..REDIRECTED
    },
    Case {
        ids: &["K26"],
        what: "IPv6 routing header by way of another host, elsewhere",
        act: Act::Dial(How::Via("fd99::3")),
        to: &["[fd98::4]:8080"],
        outcome: fails("ETIMEDOUT"),
        ..REDIRECTED
    },
    Case {
        ids: &["K27"],
        what: "SYN on a raw socket (CAP_NET_RAW), to where only the proxy answers",
        by: ROOT,
        act: Act::Dial(How::RawSyn),
        to: &["192.0.2.7:443"],
        outcome: seen(&[("syn-ack", "192.0.2.7")]),
        differs: differs(
            fails("EAGAIN"),
            "the packet leaves the pod, its target may answer: Weft sees connect(2) and TCP sockets, not raw ones. Drop `CAP_NET_RAW`",
        ),
        ..UNTOUCHED
    },
    Case {
        ids: &["K28"],
        what: "SYN on a packet socket (CAP_NET_RAW): only the answer is seen",
        by: ROOT,
        act: Act::Dial(How::PacketSyn),
        to: &["10.99.0.3:8080"],
        outcome: seen(&[("syn-ack", "10.99.0.3")]),
        verdicts: &["inbound redirect"],
        ..UNTOUCHED
    },
];

const DIALLED_BY_OTHERS: &[&str] = &["10.99.0.3:8080", "10.96.0.10:80"];
/// Client and server, without cookies, for every listener (Documentation/networking/ip-sysctl.rst).
const FAST_OPEN: Given = Given::Sysctl("net/ipv4/tcp_fastopen", "1543");
/// With cookies, the greeting of a server that speaks first is lost if its queue was full, with either interception.
const NO_COOKIES: Given = Given::Sysctl("net/ipv4/tcp_syncookies", "0");
/// Always, not only when the queue is full.
const COOKIES: Given = Given::Sysctl("net/ipv4/tcp_syncookies", "2");
