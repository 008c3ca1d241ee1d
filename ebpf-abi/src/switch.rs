//! Indices of the switches of a running datapath. Each is one word of its own, so that turning one needs no knowledge of
//! the others. All are 0 in the beginning.

/// Not 0: produce events.
pub const TRACE: u32 = 0;
/// Not 0: redirect nothing on this node, whatever pods' entries say.
pub const BYPASS: u32 = 1;
/// Not 0: a proxy that binds its outbound port on loopback enrols its network namespace; see [`crate::pod::SELF_ENROLLED`].
pub const SELF_ENROL: u32 = 2;
/// The user that is a proxy to [`SELF_ENROL`], as the host sees it.
pub const PROXY_UID: u32 = 3;
/// The outbound port of such a proxy.
pub const OUTBOUND_PORT: u32 = 4;
/// The inbound port of a proxy whose network namespace is not enrolled; 0 for [`crate::socket::DEFAULT_INBOUND_PORT`].
pub const INBOUND_PORT: u32 = 5;
/// How many there are.
pub const COUNT: u32 = 6;
