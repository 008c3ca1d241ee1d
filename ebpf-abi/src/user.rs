//! Lets aya read and write the map types.

use crate::{
    event::Config,
    pod::{Pod, PortBlock, PortBlockKey, Subnet},
    socket::ListenerKey,
};

// SAFETY: repr(C), Copy, only integers, every bit pattern valid, no implicit padding.
unsafe impl aya::Pod for Pod {}
// SAFETY: as above.
unsafe impl aya::Pod for PortBlockKey {}
// SAFETY: as above.
unsafe impl aya::Pod for PortBlock {}
// SAFETY: as above.
unsafe impl aya::Pod for Subnet {}
// SAFETY: as above.
unsafe impl aya::Pod for Config {}
// SAFETY: as above.
unsafe impl aya::Pod for ListenerKey {}
