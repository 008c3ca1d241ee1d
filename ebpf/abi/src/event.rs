//! Events about connections while there are watchers: the verdict, and the acceptance. Refuses names: user space maps
//! cookies to pods.

use crate::address::Address;

/// Bytes of a thread's name in the kernel, TASK_COMM_LEN.
pub const COMMAND_BYTES: usize = 16;

/// Bytes of the ring buffer: about 2,300 events, a few milliseconds of a node at full load.
pub const RING_BYTES: u32 = 256 * 1024;

/// Kinds of events.
pub mod kind {
    /// A verdict was given.
    pub const VERDICT: u8 = 0;
    /// A connection was established, seen at its accepting end: by the proxy if it was redirected, else by the
    /// application. Its verdict was reported before; the verdict field of this event has no meaning.
    pub const ACCEPTED: u8 = 1;
}

/// One verdict, or one accepted connection.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Nanoseconds of CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// The cookie of the pod's network namespace.
    pub netns_cookie: u64,
    /// The client's end; its port is 0 where the kernel has not chosen one yet.
    pub source: Address,
    /// The address to which the client connected.
    pub original: Address,
    /// The address to which the connection goes.
    pub new: Address,
    /// The calling process; 0 inbound.
    pub pid: u32,
    /// The calling user as the host sees it; 0 inbound.
    pub uid: u32,
    /// Port of `source`.
    pub source_port: u16,
    /// Port of `original`.
    pub original_port: u16,
    /// Port of `new`.
    pub new_port: u16,
    /// [`crate::verdict::Direction`] as a number.
    pub direction: u8,
    /// [`crate::verdict::Verdict`] as a number.
    pub verdict: u8,
    /// The calling thread's name, padded with zeros; empty inbound.
    pub command: [u8; COMMAND_BYTES],
    /// The generation of the pod's rules by which the verdict was given.
    pub generation: u32,
    /// One of [`kind`].
    pub kind: u8,
    /// Unused.
    pub pad: [u8; 3],
}

impl Event {
    /// Reads an event from the ring buffer's bytes; `None` if their number is wrong.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < size_of::<Self>() {
            return None;
        }
        fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
            bytes.get(at..at.checked_add(N)?)?.try_into().ok()
        }
        let address = |at: usize| -> Option<Address> {
            let mut words = [0; 4];
            for (index, word) in words.iter_mut().enumerate() {
                *word = u32::from_ne_bytes(array(bytes, at + index * 4)?);
            }
            Some(Address { words })
        };
        let u16_at = |at: usize| array(bytes, at).map(u16::from_ne_bytes);
        let u32_at = |at: usize| array(bytes, at).map(u32::from_ne_bytes);
        let u64_at = |at: usize| array(bytes, at).map(u64::from_ne_bytes);
        use core::mem::offset_of;
        Some(Self {
            time_ns: u64_at(offset_of!(Self, time_ns))?,
            netns_cookie: u64_at(offset_of!(Self, netns_cookie))?,
            source: address(offset_of!(Self, source))?,
            original: address(offset_of!(Self, original))?,
            new: address(offset_of!(Self, new))?,
            pid: u32_at(offset_of!(Self, pid))?,
            uid: u32_at(offset_of!(Self, uid))?,
            source_port: u16_at(offset_of!(Self, source_port))?,
            original_port: u16_at(offset_of!(Self, original_port))?,
            new_port: u16_at(offset_of!(Self, new_port))?,
            direction: *bytes.get(offset_of!(Self, direction))?,
            verdict: *bytes.get(offset_of!(Self, verdict))?,
            command: array(bytes, offset_of!(Self, command))?,
            generation: u32_at(offset_of!(Self, generation))?,
            kind: *bytes.get(offset_of!(Self, kind))?,
            pad: [0; 3],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_has_no_holes() {
        assert_eq!(size_of::<Event>(), 8 + 8 + 3 * 16 + 4 + 4 + 3 * 2 + 2 + COMMAND_BYTES + 4 + 4);
    }

    #[test]
    fn reads_what_the_kernel_wrote() {
        let mut bytes = [0u8; size_of::<Event>()];
        bytes[0] = 7;
        bytes[core::mem::offset_of!(Event, new_port)..][..2].copy_from_slice(&4140u16.to_ne_bytes());
        bytes[core::mem::offset_of!(Event, command)..][..4].copy_from_slice(b"curl");
        let event = Event::from_bytes(&bytes).unwrap();
        assert_eq!((event.time_ns, event.new_port, &event.command[..5]), (7, 4140, b"curl\0".as_slice()));
    }

    #[test]
    fn refuses_a_short_record() {
        assert!(Event::from_bytes(&[0; size_of::<Event>() - 1]).is_none());
    }
}
