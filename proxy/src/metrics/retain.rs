//! Removes series that have not been used for a while: destinations come and go, and their series would stay for ever.
//!
//! Owns the schedule. A kind of connection or request is known by one of its families and its labels; while a handle of
//! the kind lives, its series stay.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;
use weft_runtime::metrics::Family;

use super::Labels;

/// All kinds whose series can be removed. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Retained(Arc<Mutex<HashMap<Key, Kind>>>);

/// A family, by its number, and labels.
type Key = (usize, Labels);

#[derive(Debug)]
struct Kind {
    /// Number of live handles.
    handles: usize,
    /// When the last one was dropped.
    unused_since: Instant,
    /// The family of each series.
    series: HashMap<Key, Box<dyn AnyFamily>>,
}

/// A family of any kind of metric.
trait AnyFamily: fmt::Debug + Send {
    /// Removes a series.
    fn remove(&self, labels: &Labels);
}

impl<M> AnyFamily for Family<Labels, M>
where
    M: Clone + Default + fmt::Debug + Send + Sync,
{
    fn remove(&self, labels: &Labels) {
        Family::remove(self, labels);
    }
}

/// Keeps the series of a kind while it lives, and for the retention time afterwards.
#[derive(Debug)]
pub(crate) struct InUse {
    retained: Retained,
    key: Key,
}

impl Retained {
    /// Starts to use the kind of this family and these labels. The caller must get its metrics afterwards, or they may
    /// be removed in between.
    pub(crate) fn enter<M: Clone + Default>(&self, family: &Family<Labels, M>, labels: &Labels) -> InUse {
        let key = (family.id(), labels.clone());
        let mut kinds = self.0.lock();
        let new = || Kind { handles: 0, unused_since: Instant::now(), series: HashMap::new() };
        kinds.entry(key.clone()).or_insert_with(new).handles += 1;
        drop(kinds);
        InUse { retained: self.clone(), key }
    }

    /// Removes the series of kinds that have been unused for `idle`.
    pub(crate) fn evict(&self, idle: Duration) {
        let now = Instant::now();
        self.0.lock().retain(|_, kind| {
            let is_used = kind.handles > 0 || now.duration_since(kind.unused_since) < idle;
            if !is_used {
                kind.series.iter().for_each(|((_, labels), family)| family.remove(labels));
            }
            is_used
        });
    }

    /// Calls `with` with the values of some labels in the series that exist, which cannot change meanwhile. The labels
    /// of a kind are those of each of its series.
    pub(super) fn with_values<const N: usize>(&self, keys: [&str; N], with: impl FnOnce([HashSet<&str>; N])) {
        let kinds = self.0.lock();
        let mut values = keys.map(|_| HashSet::new());
        for (key, value) in kinds.keys().flat_map(|(_, labels)| labels) {
            if let Some(at) = keys.iter().position(|known| known == key) {
                values[at].insert(&**value);
            }
        }
        with(values);
    }
}

impl InUse {
    /// The series of the kind with these labels, created if there is none, and removed with the kind.
    pub(crate) fn series<M>(&self, family: &Family<Labels, M>, labels: &Labels) -> M
    where
        M: Clone + Default + fmt::Debug + Send + Sync + 'static,
    {
        let mut kinds = self.retained.0.lock();
        if let Some(kind) = kinds.get_mut(&self.key) {
            kind.series.entry((family.id(), labels.clone())).or_insert_with(|| Box::new(family.clone()));
        }
        family.get_or_create(labels)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(kind) = self.retained.0.lock().get_mut(&self.key) {
            kind.handles -= 1;
            kind.unused_since = Instant::now();
        }
    }
}
