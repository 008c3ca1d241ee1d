//! Types that Weft's kernel programs and user space share.
//!
//! Owns the layout of every map key and value ([`pod`], [`socket`], [`event`], [`counter`], [`switch`]) and the
//! decision about a connection ([`decision`]), which is one pure function per direction: the kernel programs call it,
//! and so does `weft explain`. Refuses to use `std`, to allocate, and to know about maps or programs.
//!
//! Layouts are `repr(C)` with explicit padding, for little-endian hosts only (x86-64, arm64). Changes only add maps: a
//! changed layout gets a new [`LAYOUT`] and with it a new pin directory.
#![no_std]

pub mod address;
pub mod counter;
pub mod decision;
pub mod event;
pub mod pod;
pub mod socket;
pub mod switch;
pub mod verdict;

#[cfg(feature = "user")]
mod user;

/// The version of all layouts in this crate together with the names of maps and pins.
pub const LAYOUT: u32 = 3;

/// Names of the maps, which are the names of their pins too.
pub mod map {
    /// Hash: netns cookie (u64) to [`crate::pod::Pod`].
    pub const PODS: &str = "PODS";
    /// Hash: [`crate::pod::PortBlockKey`] to [`crate::pod::PortBlock`].
    pub const PORTS: &str = "PORTS";
    /// Longest prefix: [`crate::pod::Subnet`] to u8 (unused).
    pub const SUBNETS: &str = "SUBNETS";
    /// Socket storage: [`crate::socket::SocketState`].
    pub const SOCKETS: &str = "SOCKETS";
    /// Socket storage: the cookie of the socket's network namespace (u64), for programs that cannot get it (before
    /// Linux 5.15). Accepted sockets inherit their listener's.
    pub const NAMESPACES: &str = "NAMESPACES";
    /// Hash: [`crate::socket::ClientKey`] to [`crate::socket::Client`]. Those without room are in [`SOCKETS`].
    pub const CLIENTS: &str = "CLIENTS";
    /// Hash: [`crate::socket::FlowKey`] to [`crate::socket::Waiting`].
    pub const WAITING: &str = "WAITING";
    /// LRU hash: [`crate::socket::FlowKey`] to [`crate::socket::Flow`], for connections without room in [`WAITING`].
    pub const FLOWS: &str = "FLOWS";
    /// Array of one u32: not 0 while connections may be in [`FLOWS`].
    pub const OVERFLOW: &str = "OVERFLOW";
    /// Array of one [`crate::socket::Lookup`] for each processor.
    pub const LOOKUPS: &str = "LOOKUPS";
    /// Program array of one: what pods' stubs call.
    pub const STEERING: &str = "STEERING";
    /// Socket hash: [`crate::socket::ListenerKey`] to a listening socket.
    pub const LISTENERS: &str = "LISTENERS";
    /// Ring buffer of [`crate::event::Event`].
    pub const EVENTS: &str = "EVENTS";
    /// Per-CPU array of u64, indexed by [`crate::counter`].
    pub const STATS: &str = "STATS";
    /// Hash: [`crate::socket::ProxyKey`] to [`crate::socket::Slots`]: proxies with a listener in [`LISTENERS`].
    pub const PROXIES: &str = "PROXIES";
    /// Hash: [`crate::pod::AdmissionKey`] to the cookie of a network namespace (u64) that was admitted for a cgroup.
    pub const ADMISSIONS: &str = "ADMISSIONS";
    /// Array of u32, indexed by [`crate::switch`].
    pub const SWITCHES: &str = "SWITCHES";
    /// Ring buffer of aya-log's records.
    pub const LOGS: &str = "AYA_LOGS";

    /// All maps that outlive an agent.
    pub const ALL: [&str; 18] = [
        PODS, PORTS, SUBNETS, SOCKETS, NAMESPACES, CLIENTS, WAITING, FLOWS, OVERFLOW, LOOKUPS, STEERING, LISTENERS,
        PROXIES, ADMISSIONS, EVENTS, STATS, SWITCHES, LOGS,
    ];
}
