//! Values by key that are looked up once and stay for a while after their last use.

use std::{collections::HashMap, hash::Hash, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Values by key. One is in use while something else shares it.
pub(crate) struct Recent<K, V>(Mutex<HashMap<K, Entry<V>>>);

struct Entry<V> {
    value: Arc<V>,
    used: Instant,
}

impl<K: Clone + Eq + Hash, V> Recent<K, V> {
    /// Without values.
    pub(crate) fn new() -> Self {
        Self(Mutex::default())
    }

    /// The value of the key, from memory or looked up.
    pub(crate) fn get(&self, key: K, look_up: impl FnOnce() -> V) -> Arc<V> {
        let mut entries = self.0.lock();
        let now = Instant::now();
        let entry = entries.entry(key).or_insert_with(|| Entry { value: Arc::new(look_up()), used: now });
        entry.used = now;
        Arc::clone(&entry.value)
    }

    /// As [`Self::get`], with at most `max` values: one that was unused for the longest time is forgotten for a new
    /// one, but none that was used less than `least_stay` ago. `None` if there is no such value.
    pub(crate) fn get_within(
        &self,
        max: usize,
        least_stay: Duration,
        key: &K,
        look_up: impl FnOnce() -> V,
    ) -> Option<Arc<V>> {
        let mut entries = self.0.lock();
        let now = Instant::now();
        if let Some(known) = entries.get_mut(key) {
            known.used = now;
            return Some(Arc::clone(&known.value));
        }
        let forgotten = if entries.len() < max {
            None
        } else {
            let is_unused = |entry: &Entry<V>| Arc::strong_count(&entry.value) == 1 && now >= entry.used + least_stay;
            let unused = entries.iter().filter(|(_, entry)| is_unused(entry));
            let oldest = unused.min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone())?;
            entries.remove(&oldest)
        };
        let value = Arc::new(look_up());
        entries.insert(key.clone(), Entry { value: Arc::clone(&value), used: now });
        // A value owns streams and connections, whose end is no reason to keep the lock.
        drop(entries);
        drop(forgotten);
        Some(value)
    }

    /// Forgets the values that have been unused for `idle`.
    pub(crate) fn sweep(&self, now: Instant, idle: Duration) {
        let mut entries = self.0.lock();
        for entry in entries.values_mut().filter(|entry| Arc::strong_count(&entry.value) > 1) {
            entry.used = now;
        }
        let is_unused = |_: &K, entry: &mut Entry<V>| now.saturating_duration_since(entry.used) >= idle;
        let forgotten: Vec<_> = entries.extract_if(is_unused).collect();
        drop(entries);
        drop(forgotten);
    }

    /// The keys of all values.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> Vec<K> {
        self.0.lock().keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    /// Checks that its map is not locked when it is dropped.
    struct Value(Weak<Recent<u8, Value>>);

    impl Drop for Value {
        fn drop(&mut self) {
            assert!(self.0.upgrade().is_none_or(|recent| !recent.0.is_locked()));
        }
    }

    #[test]
    fn forgotten_values_are_dropped_without_the_lock() {
        let recent: Arc<Recent<u8, Value>> = Arc::new(Recent::new());
        let get = |key: u8| recent.get_within(1, Duration::ZERO, &key, || Value(Arc::downgrade(&recent))).is_some();
        assert!(get(1) && get(2));
        assert_eq!(recent.keys(), [2]);
        recent.sweep(Instant::now(), Duration::ZERO);
        assert!(recent.keys().is_empty());
    }
}
