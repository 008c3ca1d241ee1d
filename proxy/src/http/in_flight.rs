//! The limit of requests that a worker answers at once. Requests beyond it are shed.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Counts requests up to a limit. Clones share the count.
#[derive(Clone, Debug)]
pub(crate) struct RequestLimit {
    count: Arc<AtomicUsize>,
    limit: usize,
}

/// The permit of a request in flight, held until the end of the response.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicUsize>);

impl RequestLimit {
    /// Admits at most `limit` requests at once.
    pub(crate) fn new(limit: usize) -> Self {
        Self { count: Arc::default(), limit }
    }

    /// Admits a request; `None` if there are too many.
    pub(crate) fn admit(&self) -> Option<Permit> {
        let before = self.count.fetch_add(1, Ordering::Relaxed);
        let permit = Permit(Arc::clone(&self.count));
        (before < self.limit).then_some(permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_in_flight_than_allowed() {
        let limit = RequestLimit::new(1);
        let first = limit.admit();
        assert!(first.is_some());
        assert!(limit.clone().admit().is_none());
        drop(first);
        assert!(limit.admit().is_some());
        assert_eq!(limit.count.load(Ordering::Relaxed), 0);
    }
}
