//! Lets aya read and write the map types.

#![expect(unsafe_code, reason = "the `Pod` implementations of what kernel and user space share")]

use crate::{
    pod::{AdmissionKey, Pod, PortBlock, PortBlockKey, Subnet},
    socket::{Client, ClientKey, Flow, FlowKey, ListenerKey, ProxyKey, Waiting},
};

// SAFETY: repr(C), Copy, only integers, every bit pattern valid, no implicit padding.
unsafe impl aya::Pod for Pod {}
// SAFETY: as above.
unsafe impl aya::Pod for PortBlockKey {}
// SAFETY: as above.
unsafe impl aya::Pod for AdmissionKey {}
// SAFETY: as above.
unsafe impl aya::Pod for PortBlock {}
// SAFETY: as above.
unsafe impl aya::Pod for Subnet {}
// SAFETY: as above.
unsafe impl aya::Pod for ProxyKey {}
// SAFETY: as above.
unsafe impl aya::Pod for ListenerKey {}
// SAFETY: as above.
unsafe impl aya::Pod for FlowKey {}
// SAFETY: as above.
unsafe impl aya::Pod for Flow {}
// SAFETY: as above.
unsafe impl aya::Pod for ClientKey {}
// SAFETY: as above.
unsafe impl aya::Pod for Client {}
// SAFETY: as above.
unsafe impl aya::Pod for Waiting {}
