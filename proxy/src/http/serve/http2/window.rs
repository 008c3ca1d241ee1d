//! What clients may send on a connection that applications have not read: the window of each connection, and the bound
//! for all of them.
//!
//! A connection begins with Linkerd's window. When its uploads could fill half of it, it doubles, so that a slow reader
//! holds up no other one. What all connections have beyond their beginning comes out of one budget: without it, a
//! client with many connections could fill the memory of the pod. A window never shrinks, because the client may use
//! what it was once given.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::config::Http2ServerConfig;

/// The first window in bytes: Linkerd's default.
const FIRST: u32 = 1 << 20;
/// The largest window in bytes: twice what the 256 streams fill that another proxy of ours puts on a connection.
const LARGEST: u32 = 32 << 20;
/// What all connections of the proxy have together beyond their first windows, in bytes: that of four whose windows are
/// the largest.
const BUDGET: usize = 4 * LARGEST as usize;

/// What is left of the bytes that connections may have beyond their first windows.
#[derive(Debug)]
pub(crate) struct WindowBudget(AtomicUsize);

/// The window of one connection. Dropping it gives back what it has of the budget.
#[derive(Debug)]
pub(super) struct Window {
    budget: Arc<WindowBudget>,
    stream: u32,
    first: u32,
    size: u32,
    largest: u32,
}

impl Default for WindowBudget {
    fn default() -> Self {
        Self(AtomicUsize::new(BUDGET))
    }
}

impl WindowBudget {
    fn take(&self, bytes: u32) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes as usize)).is_ok()
    }
}

impl Window {
    /// The window that the settings want, which stays as it is if they say how large it is or that it follows the
    /// bandwidth.
    pub(super) fn new(config: &Http2ServerConfig, budget: Arc<WindowBudget>) -> Self {
        let stream = config.stream_window;
        let first = config.connection_window.unwrap_or(FIRST.max(stream));
        let grows = config.connection_window.is_none() && !config.adaptive_window;
        Self { budget, stream, first, size: first, largest: if grows { LARGEST } else { first } }
    }

    /// Its bytes.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Grows for this many uploads; returns the new size if there is one. It doubles, because h2 announces nothing less
    /// than half of a window.
    pub(super) fn grow(&mut self, uploads: usize) -> Option<u32> {
        let before = self.size;
        let unread = uploads.saturating_mul(self.stream as usize);
        while self.size < self.largest && unread > self.size as usize / 2 {
            let more = self.size.min(self.largest - self.size);
            if !self.budget.take(more) {
                break;
            }
            self.size += more;
        }
        (self.size != before).then_some(self.size)
    }

    /// Grows to what the bandwidth asks for, if there is as much left; returns the new size if there is one.
    pub(super) fn grow_to(&mut self, bytes: u32) -> Option<u32> {
        let more = bytes.checked_sub(self.size).filter(|more| *more > 0)?;
        self.budget.take(more).then(|| {
            self.size = bytes;
            bytes
        })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.budget.0.fetch_add((self.size - self.first) as usize, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inbound::testing;

    const STREAM: usize = 65_535;

    fn window(budget: &Arc<WindowBudget>) -> Window {
        Window::new(&testing::config().http2.inbound_server, Arc::clone(budget))
    }

    #[test]
    fn a_window_has_room_for_twice_what_the_uploads_may_fill() {
        let mut window = window(&Arc::default());
        let mut grown = Vec::new();
        for uploads in 1..=300 {
            grown.extend(window.grow(uploads).map(|size| (uploads, size >> 20)));
            assert!(uploads > 256 || window.size() as usize >= 2 * uploads * STREAM, "{uploads}");
        }
        assert_eq!(grown, [(9, 2), (17, 4), (33, 8), (65, 16), (129, 32)]);
        let mut burst = self::window(&Arc::default());
        assert_eq!((burst.grow(200), burst.grow(1)), (Some(LARGEST), None), "it does not shrink");
    }

    #[test]
    fn all_windows_together_are_bounded_and_what_ends_leaves_room_for_others() {
        let budget = Arc::<WindowBudget>::default();
        let mut windows: Vec<_> = (0..100).map(|_| window(&budget)).collect();
        for window in &mut windows {
            window.grow(1000);
        }
        let sizes: Vec<_> = windows.iter().map(|window| window.size() as usize).collect();
        let total: usize = sizes.iter().sum();
        assert!(total <= BUDGET + sizes.len() * FIRST as usize && total > BUDGET, "{sizes:?}");
        assert_eq!((sizes[0], sizes[99]), (LARGEST as usize, FIRST as usize));
        windows.remove(0);
        assert_eq!(windows[98].grow(1000), Some(LARGEST));
        drop(windows);
        assert_eq!(budget.0.load(Ordering::Relaxed), BUDGET);
    }

    #[test]
    fn a_window_of_the_settings_stays() {
        for (fixed, adaptive, size) in [(Some(80_000), false, 80_000), (None, true, FIRST), (Some(7), true, 7)] {
            let mut config = testing::config().http2.inbound_server;
            (config.connection_window, config.adaptive_window) = (fixed, adaptive);
            let mut window = Window::new(&config, Arc::default());
            assert_eq!((window.size(), window.grow(1000)), (size, None));
        }
    }

    #[test]
    fn a_window_that_follows_the_bandwidth_takes_from_the_budget_too() {
        let mut config = testing::config().http2.inbound_server;
        config.adaptive_window = true;
        let budget = Arc::default();
        let mut windows: Vec<_> = (0..10).map(|_| Window::new(&config, Arc::clone(&budget))).collect();
        let grown: Vec<_> = windows.iter_mut().map(|window| window.grow_to(16 << 20)).collect();
        assert_eq!(grown.iter().flatten().count(), BUDGET / (15 << 20), "{grown:?}");
        assert_eq!(windows[0].grow_to(FIRST), None, "it does not shrink");
    }
}
