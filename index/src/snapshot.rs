//! Published values, each with the bytes that its readers send.

use std::{
    fmt,
    ops::Deref,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;

/// A published value. The first reader encodes it, and what it made is shared by all: an answer costs the same for one
/// client as for thousands.
///
/// The index does not know what the bytes mean; every reader of a kind of value must encode it in the same way.
pub struct Snapshot<T> {
    value: T,
    id: u64,
    predecessor: Option<u64>,
    whole: OnceLock<Bytes>,
    change: OnceLock<Bytes>,
}

impl<T> Snapshot<T> {
    /// The first value of a view.
    pub fn first(value: T) -> Self {
        Self::new(value, None)
    }

    /// The value that replaces `old`.
    pub(crate) fn after(old: &Self, value: T) -> Self {
        Self::new(value, Some(old.id))
    }

    fn new(value: T, predecessor: Option<u64>) -> Self {
        // Unique in the process: a reader may compare values of different views.
        static IDS: AtomicU64 = AtomicU64::new(0);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        Self { value, id, predecessor, whole: OnceLock::new(), change: OnceLock::new() }
    }

    /// The value as bytes.
    pub fn whole(&self, encode: impl FnOnce(&T) -> Bytes) -> Bytes {
        self.whole.get_or_init(|| encode(&self.value)).clone()
    }

    /// The change from `old`, which a client has, to this value, as bytes. Clients that have the value before this one
    /// share them; those that missed some pay for theirs.
    pub fn since(&self, old: &Self, encode: impl FnOnce(&T, &T) -> Bytes) -> Bytes {
        if self.id == old.id {
            return Bytes::new();
        }
        let encode = || encode(&old.value, &self.value);
        if self.predecessor == Some(old.id) { self.change.get_or_init(encode).clone() } else { encode() }
    }
}

impl<T> Deref for Snapshot<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: PartialEq> PartialEq for Snapshot<T> {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id || self.value == other.value
    }
}

impl<T: fmt::Debug> fmt::Debug for Snapshot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_value_and_its_change_are_encoded_once() {
        let encoded = Cell::new(0);
        let count = |bytes: &'static str| {
            encoded.set(encoded.get() + 1);
            Bytes::from_static(bytes.as_bytes())
        };
        let first = Snapshot::first(1);
        let second = Snapshot::after(&first, 2);
        let third = Snapshot::after(&second, 3);
        for _ in 0..2 {
            assert_eq!(second.whole(|_| count("2")), "2");
            assert_eq!(second.since(&first, |_, _| count("1-2")), "1-2");
        }
        assert_eq!(encoded.get(), 2);
        assert_eq!(third.since(&third, |_, _| count("nothing")), "");
        assert_eq!(encoded.get(), 2);
        // A reader that missed a value does not get the change since that one.
        assert_eq!(third.since(&first, |old, new| count(if (*old, *new) == (1, 3) { "1-3" } else { "?" })), "1-3");
        assert_eq!(third.since(&second, |_, _| count("2-3")), "2-3");
    }

    #[test]
    fn values_are_compared_and_not_their_history() {
        let first = Snapshot::first(1);
        assert_eq!(first, Snapshot::first(1));
        assert_ne!(first, Snapshot::after(&first, 2));
    }
}
