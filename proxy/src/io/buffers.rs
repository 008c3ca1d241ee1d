//! Buffers that a thread's connections take turns in using, of two sizes. Owns how many there are.

use std::cell::RefCell;

/// Bytes of a large buffer: four TLS records, and what a socket buffer typically holds.
pub(super) const LARGE: usize = 64 * 1024;

/// Bytes of a small buffer: messages fit, and it is what a stalled direction of a copy holds in the end.
pub(super) const SMALL: usize = 8 * 1024;

/// The most large buffers in use on a thread, 16 MiB. A connection that makes progress has one for the time of a poll,
/// so that those in use belong to connections that are stalled. Beyond the number, others do without.
pub(super) const MAX_LARGE: usize = 256;

/// Buffers of either size that a thread keeps for reuse.
const POOLED: usize = 16;

thread_local! {
    static LARGE_BUFFERS: RefCell<Buffers<LARGE>> = const { RefCell::new(Buffers::new()) };
    static SMALL_BUFFERS: RefCell<Buffers<SMALL>> = const { RefCell::new(Buffers::new()) };
}

/// A thread's buffers of one size.
struct Buffers<const SIZE: usize> {
    free: Vec<Box<[u8]>>,
    in_use: usize,
}

impl<const SIZE: usize> Buffers<SIZE> {
    const fn new() -> Self {
        Self { free: Vec::new(), in_use: 0 }
    }

    fn take(&mut self) -> Box<[u8]> {
        self.in_use += 1;
        self.free.pop().unwrap_or_else(|| vec![0; SIZE].into_boxed_slice())
    }

    fn give(&mut self, buffer: Box<[u8]>) {
        // A connection that ends on another thread than it began on returns what was counted there.
        self.in_use = self.in_use.saturating_sub(1);
        if self.free.len() < POOLED {
            self.free.push(buffer);
        }
    }
}

/// A large buffer; `None` if too many are in use.
pub(super) fn take_large() -> Option<Box<[u8]>> {
    LARGE_BUFFERS.with_borrow_mut(|buffers| (buffers.in_use < MAX_LARGE).then(|| buffers.take()))
}

/// A small buffer. There is no limit of them.
pub(super) fn take_small() -> Box<[u8]> {
    SMALL_BUFFERS.with_borrow_mut(Buffers::take)
}

/// Returns a buffer of either size.
pub(super) fn give_buffer(buffer: Box<[u8]>) {
    if buffer.len() == LARGE {
        LARGE_BUFFERS.with_borrow_mut(|buffers| buffers.give(buffer));
    } else {
        SMALL_BUFFERS.with_borrow_mut(|buffers| buffers.give(buffer));
    }
}

/// How many large and small buffers this thread's connections hold.
#[cfg(test)]
pub(super) fn in_use() -> (usize, usize) {
    (LARGE_BUFFERS.with_borrow(|large| large.in_use), SMALL_BUFFERS.with_borrow(|small| small.in_use))
}
