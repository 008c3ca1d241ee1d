//! Data of the truth table's cases. A case says what is dialled, how, by which process and in which setup, and the
//! outcome behind linkerd-init's rules and behind Weft. Refuses to know how a case is run.
//!
//! ```text
//!   mate (meshed) ──10.98.0.0/24, fd98::/64── pod (meshed) ──10.99.0.0/24, fd99::/64── peer (not meshed)
//!                                              │
//!                             nested (not meshed), 10.97.0.0/24, reaches the others through pod
//! ```

/// The pod to which the rows refer, and its neighbours: names of network namespaces.
pub(crate) const POD: &str = "pod";
pub(crate) const PEER: &str = "peer";
pub(crate) const MATE: &str = "mate";
pub(crate) const NESTED: &str = "nested";

/// The proxy's user and its ports, as linkerd-init has them by default.
pub(crate) const PROXY_UID: u32 = 2102;
pub(crate) const OUTBOUND_PORT: u16 = 4140;
pub(crate) const INBOUND_PORT: u16 = 4143;
/// Further ports of the proxy, which Weft skips inbound while the proxy listens there: tap, and probes and metrics.
pub(crate) const CONTROL_PORT: u16 = 4190;
pub(crate) const ADMIN_PORT: u16 = 4191;
pub(crate) const SKIPPED_INBOUND: [u16; 2] = [4567, 4568];
pub(crate) const SKIPPED_OUTBOUND: [u16; 2] = [4567, 4568];
/// Networks whose inbound connections are skipped; the peer's second addresses are in them.
pub(crate) const SKIPPED_SUBNETS: [&str; 2] = ["10.99.0.64/27", "fd99::77/128"];
/// The pod's own addresses, the first of each family being its primary one.
pub(crate) const OWN: [&str; 6] = ["10.99.0.2", "fd99::2", "10.99.0.22", "fd99::22", "10.98.0.2", "fd98::2"];
/// A group that some rows exempt.
pub(crate) const PROXY_GID: u32 = 2103;

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// The rows that it covers: O and I of Linkerd's own table, W of Weft's, K kinds of sockets, S socket options, B
    /// load balancers, N bypasses. The first one names it.
    pub(crate) ids: &'static [&'static str],
    /// The traffic, for people.
    pub(crate) what: &'static str,
    /// Deviations from the usual setup.
    pub(crate) given: &'static [Given],
    pub(crate) by: Caller,
    pub(crate) act: Act,
    /// Dialled one after the other, as `ip:port` or `[ip]:port`; `%device` stands for the device's number.
    pub(crate) to: &'static [&'static str],
    /// The outcome behind linkerd-init's rules, and behind Weft unless it differs.
    pub(crate) outcome: Outcome,
    /// The different outcome behind Weft. Every difference has a reason.
    pub(crate) differs: Option<Difference>,
    /// Weft's counters of each connection: direction and verdict; no other counter may change.
    pub(crate) verdicts: &'static [&'static str],
}

/// A deliberate difference.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Difference {
    pub(crate) weft: Outcome,
    pub(crate) reason: &'static str,
}

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) netns: &'static str,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) place: Place,
}

/// The cgroup of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// That of an application in a pod.
    Pod,
    /// The cgroup of the pod's proxy.
    Proxy,
    /// Outside of all pods, like processes of the host.
    Host,
    /// In its own user namespace, whose users are the host's from [`SHIFT`] on.
    UserNamespace,
}

/// The first user of the host that a user namespace gets.
pub(crate) const SHIFT: u32 = 200_000;

pub(crate) const APP: Caller = Caller { netns: POD, uid: 1000, gid: 1000, place: Place::Pod };
pub(crate) const ROOT: Caller = Caller { uid: 0, gid: 0, ..APP };
pub(crate) const PROXY: Caller = Caller { uid: PROXY_UID, gid: PROXY_UID, place: Place::Proxy, ..APP };
pub(crate) const STRANGER: Caller = Caller { netns: PEER, ..APP };

/// Deviations from a meshed pod with Linkerd's defaults and a running proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    /// Neither rules nor enrolment.
    NoRules,
    /// The proxy does not listen.
    NoProxy,
    /// linkerd-init runs with `--ipv6=false`. Weft has no such switch.
    Ipv4Only,
    /// `proxy-gid` is [`PROXY_GID`].
    ProxyGroup,
    /// The proxy's user, as the host sees it.
    ProxyUser(u32),
    /// Only the cgroup of the proxy is exempt, whatever its user. Linkerd has no such mode.
    Strict,
    /// Inbound redirection of these ports only (`--ports-to-redirect`); Weft gets all other ports as skipped.
    OnlyPort(u16),
    /// The pod's redirection is switched off; behind iptables: the rules are removed.
    Bypassed,
    /// The node's redirection is switched off; behind iptables: the rules are removed.
    NodeBypassed,
    /// The pod has linkerd-init's rules in addition to Weft's.
    InitRules,
    /// A firewall rule that activates connection tracking.
    Tracking,
    /// A sysctl of the pod's network namespace: path below /proc/sys, value.
    Sysctl(&'static str, &'static str),
    /// A load balancer at the cgroup above the one to which Weft is attached.
    BalancerAbove,
    /// A load balancer below it, at the application's own cgroup.
    BalancerBelow,
}

/// The address that the load balancer replaces, and the replacement.
pub(crate) const BALANCED: (&str, &str) = ("10.96.0.10:80", "10.99.0.3:8080");

/// The action of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// A connection is opened and used.
    Dial(How),
    /// It is opened before the rules are in force, and used afterwards.
    ConnectEarly,
    /// The socket is created before the rules are in force, and connected afterwards.
    CreateEarly,
    /// Another process creates the socket and passes it (SCM_RIGHTS).
    Borrow(Caller),
    /// A connection to this address is cancelled by a signal while the proxy's queue is full; then the same source port
    /// is used for another connection.
    Cancel(&'static str),
    /// All targets are dialled at once while the proxy does not accept and its queue has room for two.
    Overflow,
}

/// How a connection is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// connect(2).
    Plain,
    /// connect(2) on a nonblocking socket, then poll(2).
    Nonblocking,
    /// sendto(2) with MSG_FASTOPEN.
    FastOpenSend,
    /// TCP_FASTOPEN_CONNECT, then connect(2) and write(2).
    FastOpenConnect,
    /// IORING_OP_CONNECT.
    Ring,
    /// An MPTCP socket.
    Multipath,
    /// SO_BINDTODEVICE.
    Device(&'static str),
    /// bind(2) to an address first.
    From(&'static str),
    /// bind(2) to an address and a port that is not used otherwise.
    FromPort(&'static str),
    /// connect(2) to this first, then to AF_UNSPEC.
    After(&'static str),
    /// Connections from one source port to this and to the target in turn, each closed before the next.
    Alternating(&'static str),
    /// From the source port of a connection to this, which stays open.
    Beside(&'static str),
    /// No connection: the options of a fresh TCP socket.
    Fresh,
    /// A UDP datagram and its echo.
    Udp,
    /// An ICMP echo request and its reply.
    Icmp,
    /// A TCP socket with an IPv6 routing header, whose packets go to this address first.
    Via(&'static str),
    /// A SYN that the process itself builds and sends on a raw socket; the result is the address that answers.
    RawSyn,
    /// The same on a packet socket, with an IP header of its own, too.
    PacketSyn,
}

/// Where a connection ends, and what is observed at both of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) reach: Reach,
    /// Observations other than those that follow from `reach`; see `check.rs` for their names.
    pub(crate) but: &'static [(&'static str, &'static str)],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The proxy's outbound listener, which gets the address that was dialled.
    Outbound,
    /// The proxy's inbound listener, which gets the address that was dialled.
    Inbound,
    /// The listener at the address that was dialled.
    Direct,
    /// Only what `but` lists.
    Seen,
    /// No listener: the call fails with this error.
    Fails(&'static str),
}

pub(crate) const OUTBOUND: Outcome = Outcome { reach: Reach::Outbound, but: &[] };
pub(crate) const INBOUND: Outcome = Outcome { reach: Reach::Inbound, but: &[] };
pub(crate) const DIRECT: Outcome = Outcome { reach: Reach::Direct, but: &[] };

impl Outcome {
    pub(crate) const fn but(self, but: &'static [(&'static str, &'static str)]) -> Self {
        Self { reach: self.reach, but }
    }
}

/// An outcome with observations only.
pub(crate) const fn seen(but: &'static [(&'static str, &'static str)]) -> Outcome {
    Outcome { reach: Reach::Seen, but }
}

pub(crate) const fn fails(errno: &'static str) -> Outcome {
    Outcome { reach: Reach::Fails(errno), but: &[] }
}

pub(crate) const fn differs(weft: Outcome, reason: &'static str) -> Option<Difference> {
    Some(Difference { weft, reason })
}

/// A connection of the application that goes to the proxy.
pub(crate) const REDIRECTED: Case = Case {
    ids: &[],
    what: "",
    given: &[],
    by: APP,
    act: Act::Dial(How::Plain),
    to: &[],
    outcome: OUTBOUND,
    differs: None,
    verdicts: &["outbound redirect"],
};

/// A connection from outside that goes to the proxy.
pub(crate) const STEERED: Case = Case { by: STRANGER, outcome: INBOUND, verdicts: &["inbound redirect"], ..REDIRECTED };

/// A connection that goes to the address that was dialled, and for which Weft is not queried.
pub(crate) const UNTOUCHED: Case = Case { outcome: DIRECT, verdicts: &[], ..REDIRECTED };

/// A row that another test covers, or that cannot have a test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elsewhere {
    pub(crate) ids: &'static [&'static str],
    pub(crate) what: &'static str,
    /// The test that covers it, or the reason why there is none.
    pub(crate) where_: &'static str,
}
