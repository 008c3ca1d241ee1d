//! State of a socket in the kernel, and the hand-over from a client's socket to the proxy's. State does not outlive its
//! socket: only the hand-over has an entry of its own, and it lives from the SYN until the proxy asks about the
//! connection or, where there is no room for so long, until the end of the handshake.

use crate::{address::Address, event::COMMAND_BYTES, pod::Owner};

/// The inbound port of the proxy of a pod that is not enrolled yet: Linkerd's default.
pub const DEFAULT_INBOUND_PORT: u16 = 4143;

/// The port on which it may serve tap: Linkerd's default control port.
pub const DEFAULT_CONTROL_PORT: u16 = 4190;

/// The port on which it serves probes and metrics: Linkerd's default admin port.
pub const DEFAULT_ADMIN_PORT: u16 = 4191;

/// Kinds of sockets.
pub mod kind {
    /// A client whose connection was redirected; the original destination is the one that it dialled.
    pub const CLIENT: u8 = 1;
    /// Accepted by a proxy; the original destination was announced by the client's socket.
    pub const ACCEPTED: u8 = 2;
    /// Bound to one of a proxy's ports by the proxy `owner`, about to listen.
    pub const BOUND: u8 = 3;
    /// A client in the pod whose connection was not redirected.
    pub const PASSED: u8 = 4;
}

/// The value of the socket storage.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketState {
    /// The original destination: what SO_ORIGINAL_DST answers.
    pub destination: Address,
    /// The proxy, filled only for [`kind::BOUND`].
    pub owner: Owner,
    /// The original destination's port.
    pub port: u16,
    /// One of [`kind`].
    pub kind: u8,
    /// Unused.
    pub pad: [u8; 5],
    /// The calling user as the host sees it.
    pub uid: u32,
    /// The calling process.
    pub pid: u32,
    /// The calling thread's name, filled only while events are watched.
    pub command: [u8; COMMAND_BYTES],
}

impl SocketState {
    /// Of a socket that a proxy accepts.
    #[inline(always)]
    #[must_use]
    pub fn accepted(destination: Address, port: u16) -> Self {
        Self { destination, port, kind: kind::ACCEPTED, ..Self::default() }
    }
}

/// The socket of an application whose connection is redirected: its address in the kernel, which is its own for as long
/// as it lives.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientKey(pub u64);

/// What such a socket dialled, from its connect(2) until it is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// The state, which the socket's storage would have.
    pub state: SocketState,
    /// The cookie of the pod's network namespace.
    pub netns_cookie: u64,
    /// Until the SYN is sent: when connect(2) was called, nanoseconds of CLOCK_MONOTONIC. From then on 0, and the
    /// kernel tells when the socket closes. A connect(2) that fails before leaves its entry for the agent to remove.
    pub connecting_since_ns: u64,
    /// The socket's port, from the SYN on. An entry with another port is a former socket's: another program may have
    /// kept the kernel from telling that it closed.
    pub source_port: u32,
    /// Unused.
    pub pad: u32,
}

/// Redirected connections that are open on one node, by their clients' ends. Those beyond are kept in the sockets'
/// storage, which takes longer to make.
pub const MAX_CLIENTS: u32 = 8192;

/// A redirected connection between its SYN and its proxy's question: the client's end of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey {
    /// Loopback addresses and ports repeat in every pod, so the namespace is part of the key.
    pub netns_cookie: u64,
    /// The client's address.
    pub address: Address,
    /// The client's port.
    pub port: u32,
    /// Unused.
    pub pad: u32,
}

/// The original destination of a redirected connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The original destination.
    pub destination: Address,
    /// The port of the destination, in host order.
    pub port: u32,
}

/// A redirected connection that waits for its proxy: nothing evicts it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The original destination.
    pub destination: Address,
    /// The port of the destination, in host order.
    pub port: u32,
    /// Unused.
    pub pad: u32,
    /// When its SYN was sent, nanoseconds of CLOCK_MONOTONIC.
    pub since_ns: u64,
}

/// Connections of one node that wait for their proxies at a time. A proxy asks about a connection when it accepts it,
/// so that few wait unless a proxy is slow; those beyond use the map of flows.
pub const MAX_WAITING: u32 = 1024;

/// Connections between SYN and handshake at a time that find no room in the map of those that wait, for each processor
/// of the node; each takes a few microseconds, and one that takes longer is announced again. The kernel keeps up to
/// half of the entries in per-processor lists.
pub const FLOWS_PER_CPU: u32 = 256;

/// The same for a node of few processors.
pub const MIN_FLOWS: u32 = 1024;

/// How many sockets of one SO_REUSEPORT group are recorded. In a pod that trusts its proxy's user, the kernel spreads
/// connections over the whole group, whichever member is assigned, so recording some is enough as long as members close
/// one by one. In a pod that exempts by cgroup, only recorded sockets get connections.
pub const LISTENER_SLOTS: u8 = 8;

/// The slots of a proxy's listeners, of either family: bit `n` is slot `n`. A hint: a closed listener leaves its bit,
/// and if two begin to listen at the same instant, one bit may be lost.
pub type Slots = u8;

/// The pod for which a listener is being looked up on a processor: what a pod's stub leaves for the program that all
/// pods share.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Lookup {
    /// Held for reading and for writing, so that both fields are of one look-up.
    pub lock: bpf_spin_lock,
    /// Unused.
    pub pad: u32,
    /// The address of the context of this look-up, which no other has while it lasts.
    pub context: u64,
    /// The cookie of the pod's network namespace.
    pub netns_cookie: u64,
}

/// The kernel knows its locks in the values of maps by the name of this type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct bpf_spin_lock {
    val: u32,
}

/// Listening sockets on one node.
pub const MAX_LISTENERS: u32 = 8192;

/// A listener of a proxy.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerKey {
    /// The cookie of the pod's network namespace.
    pub netns_cookie: u64,
    /// The proxy that bound it, so that an application cannot replace the proxy.
    pub owner: Owner,
    /// The port it listens on.
    pub port: u16,
    /// 4 or 6.
    pub family: u8,
    /// Below [`LISTENER_SLOTS`].
    pub slot: u8,
    /// Unused.
    pub pad: u32,
}

/// A proxy that has a listener. The program that attests cannot look up a socket hash.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProxyKey {
    /// The cookie of the pod's network namespace.
    pub netns_cookie: u64,
    /// The proxy that owns the listening socket.
    pub owner: Owner,
    /// The port of the listener.
    pub port: u32,
    /// Unused.
    pub pad: u32,
}

/// The private socket option with which a proxy checks that its pod is intercepted.
pub mod attest {
    /// The level; no protocol uses it ("WE").
    pub const LEVEL: i32 = 0x5745;
    /// The option's name; the level has no other option.
    pub const OPTION: i32 = 1;
    /// Bytes of the answer: flags u32, generation u32, netns cookie u64, in host order.
    pub const BYTES: usize = 16;
    /// Bit of the answer's flags: outbound redirection is in force.
    pub const OUTBOUND: u32 = crate::pod::OUTBOUND;
    /// Bit of the answer's flags: inbound steering is in force, and the proxy has a listener to steer to.
    pub const INBOUND: u32 = crate::pod::INBOUND;
}
