//! Series whose labels servers choose: as many as there is room for, and shared ones for the others.

/// Keys with a value of their own.
const MOST: usize = 64;

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

/// The status of those that share a series: the class, which readers of metrics go by. No response has it.
pub(super) fn shared_status(status: u16) -> u16 {
    status / 100
}

/// A status as a label's value; `5xx` for a shared one.
pub(super) fn status_value(status: u16) -> String {
    if status < 100 { format!("{status}xx") } else { status.to_string() }
}
