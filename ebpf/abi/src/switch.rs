//! Indices of the switches of a running datapath. Each is a separate word, so that one can be set without reading the
//! others. All are 0 initially. A later layout does not change them, because its agent sets switches of the earlier one
//! while both are in force (docs/adr/0009).

/// Not 0: produce events.
pub const TRACE: u32 = 0;
/// Not 0: redirect nothing on this node, regardless of pods' entries.
pub const BYPASS: u32 = 1;
/// Not 0: a proxy that binds its outbound port on loopback enrols its namespace; see [`crate::pod::SELF_ENROLLED`].
pub const SELF_ENROL: u32 = 2;
/// The user of a proxy for [`SELF_ENROL`], as the host sees it.
pub const PROXY_UID: u32 = 3;
/// The outbound port of such a proxy.
pub const OUTBOUND_PORT: u32 = 4;
/// The inbound port of a proxy whose network namespace is not enrolled; 0 for [`crate::socket::DEFAULT_INBOUND_PORT`].
pub const INBOUND_PORT: u32 = 5;
/// Number of switches.
pub const COUNT: u32 = 6;
