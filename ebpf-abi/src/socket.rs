//! What the kernel remembers about a socket, and what it hands over from a client's socket to the proxy's. Refuses to
//! outlive the socket: only the hand-over has an entry of its own, and it lives from the SYN to the handshake's end.

use crate::{address::Address, event::COMMAND_BYTES, pod::Owner};

/// Where the proxy of a pod that is not enrolled yet listens: Linkerd's default inbound port.
pub const DEFAULT_INBOUND_PORT: u16 = 4143;

/// Where it may serve tap: Linkerd's default control port.
pub const DEFAULT_CONTROL_PORT: u16 = 4190;

/// What a socket is to us.
pub mod kind {
    /// A client whose connection was redirected; the original destination is where it wanted to go.
    pub const CLIENT: u8 = 1;
    /// Accepted by the proxy; the original destination came from the client's socket.
    pub const ACCEPTED: u8 = 2;
    /// Bound to one of a proxy's ports by the proxy `owner`, about to listen.
    pub const BOUND: u8 = 3;
    /// A client of the pod's own whose connection was left alone.
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
    /// The calling thread's name, filled only while somebody watches.
    pub command: [u8; COMMAND_BYTES],
}

/// A redirected connection between its SYN and its handshake's end: the client's end of it.
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

/// Where a connection was meant to go.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The original destination.
    pub destination: Address,
    /// Its port.
    pub port: u32,
}

/// Connections between SYN and accept at a time, for each processor of the node; each takes a few microseconds, and one that
/// takes longer announces itself again. The kernel keeps up to half of them aside in lists of its processors.
pub const FLOWS_PER_CPU: u32 = 256;

/// The same for a node of few processors.
pub const MIN_FLOWS: u32 = 2048;

/// How many sockets of one SO_REUSEPORT group are remembered. In a pod that trusts its proxy's user, the kernel spreads
/// connections over the whole group whichever member it is given, so this only has to outlast members that close one by
/// one. In a pod that exempts by cgroup only these get connections.
pub const LISTENER_SLOTS: u8 = 8;

/// Which slots a proxy's listeners have taken, of either family: bit `n` is slot `n`. A hint: a listener that is closed
/// leaves its bit, and of two that begin to listen at the same instant one bit may be lost.
pub type Slots = u8;

/// Listening sockets on one node.
pub const MAX_LISTENERS: u32 = 8192;

/// A listener of a proxy.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerKey {
    /// The pod.
    pub netns_cookie: u64,
    /// Who bound it, so that an application cannot take the proxy's place.
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

/// A proxy that has a listener. A socket hash cannot be looked into by the program that attests.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProxyKey {
    /// The pod.
    pub netns_cookie: u64,
    /// The proxy.
    pub owner: Owner,
    /// The port on which it listens.
    pub port: u32,
    /// Unused.
    pub pad: u32,
}

/// The private socket option by which a proxy learns that its pod is intercepted.
pub mod attest {
    /// The level; no protocol uses it ("WE").
    pub const LEVEL: i32 = 0x5745;
    /// The option.
    pub const OPTION: i32 = 1;
    /// Bytes of the answer: flags u32, generation u32, netns cookie u64, in host order.
    pub const BYTES: usize = 16;
    /// Bit of the answer's flags: outbound redirection is in force.
    pub const OUTBOUND: u32 = crate::pod::OUTBOUND;
    /// Bit of the answer's flags: inbound steering is in force, and the proxy has a listener to steer to.
    pub const INBOUND: u32 = crate::pod::INBOUND;
}
