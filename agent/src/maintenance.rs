//! Periodic checks of the agent: pods that are gone, pins, the node's bypass switch, full maps. Refuses to hold state
//! that the kernel has.

pub(crate) mod bypass;
pub(crate) mod garbage;
pub(crate) mod losses;
pub(crate) mod pins;
