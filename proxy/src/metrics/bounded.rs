//! Series whose labels servers choose: as many as there is room for, and shared ones for the others.

use std::borrow::Cow;

/// Keys with a value of their own.
const MOST: usize = 64;

/// The status of those that share a series. No response has it.
pub(super) const OTHER_STATUS: u16 = 0;

/// Values by a key, found by a scan: there are few, and most responses have one of the first.
#[derive(Debug)]
pub(super) struct Bounded<K, V>(Vec<(K, V)>);

impl<K: Copy + PartialEq, V> Bounded<K, V> {
    /// The value of `key`, created if there is none. Where there are too many already, it is the value of `other`, of
    /// which there must be few.
    pub(super) fn get(&mut self, key: K, other: K, new: impl FnOnce(K) -> V) -> &V {
        let index = self.position(key).unwrap_or_else(|| {
            let key = if self.0.len() < MOST { key } else { other };
            self.position(key).unwrap_or_else(|| {
                self.0.push((key, new(key)));
                self.0.len() - 1
            })
        });
        &self.0[index].1
    }

    fn position(&self, key: K) -> Option<usize> {
        self.0.iter().position(|(known, _)| *known == key)
    }
}

impl<K, V> Default for Bounded<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// A status as a label's value.
pub(super) fn status_value(status: u16) -> Cow<'static, str> {
    if status == OTHER_STATUS { "other".into() } else { status.to_string().into() }
}
