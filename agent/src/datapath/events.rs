//! The kernel's events in the programs' ring buffer. Refuses to decide who reads them, and how many.

use std::{future::Future, io};

use aya::maps::{MapData, RingBuf};
use tokio::io::unix::AsyncFd;
use weft_ebpf_abi::{counter, event::Event as KernelEvent};

use super::{DatapathError, bpf, maps::Counters};

/// A source of the kernel's events.
pub(crate) trait EventSource: Send {
    /// Waits until there are events.
    fn ready(&mut self) -> impl Future<Output = io::Result<()>> + Send;

    /// The next event, if there is one. An event of an unknown form is skipped.
    fn next(&mut self) -> Option<KernelEvent>;

    /// Number of events lost so far because the buffer was full.
    fn dropped(&self) -> Result<u64, DatapathError>;
}

/// The events of the kernel programs. Has one reader at a time.
pub(crate) struct RingEvents {
    ring: RingBuf<MapData>,
    counters: Counters,
}

/// [`RingEvents`] that a task can wait for.
pub(crate) struct ReadableEvents {
    ring: AsyncFd<RingBuf<MapData>>,
    counters: Counters,
}

impl RingEvents {
    pub(crate) fn new(ring: RingBuf<MapData>, counters: Counters) -> Self {
        Self { ring, counters }
    }

    /// Registers the ring buffer so that a task can wait for events.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub(crate) fn readable(self) -> io::Result<ReadableEvents> {
        Ok(ReadableEvents { ring: bpf::readable(self.ring)?, counters: self.counters })
    }
}

impl EventSource for ReadableEvents {
    async fn ready(&mut self) -> io::Result<()> {
        self.ring.readable_mut().await?.clear_ready();
        Ok(())
    }

    fn next(&mut self) -> Option<KernelEvent> {
        loop {
            let bytes = self.ring.get_mut().next()?;
            if let Some(event) = KernelEvent::from_bytes(&bytes) {
                return Some(event);
            }
        }
    }

    fn dropped(&self) -> Result<u64, DatapathError> {
        self.counters.read(counter::EVENTS_DROPPED)
    }
}
