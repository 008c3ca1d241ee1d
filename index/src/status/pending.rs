//! Statuses that are wanted and not said, for the writer.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::Notify;
use weft_k8s_api::manifest::ObjectRef;

use super::wanted;
use crate::{cluster::Cluster, records::Status, store::Store};

/// Statuses that objects should have and do not have. One task reads them; clones share the state.
#[derive(Clone, Debug, Default)]
pub struct PendingStatuses(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    pending: Mutex<Pending>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    wanted: HashMap<ObjectRef, Arc<Status>>,
    /// Objects whose wanted status has changed since the last look at it.
    changed: BTreeSet<ObjectRef>,
    /// How often an object was added to those that changed.
    enqueued: u64,
}

impl PendingStatuses {
    /// Waits until there are statuses to take. For one task.
    pub async fn changed(&self) {
        while self.0.pending.lock().changed.is_empty() {
            self.0.changed.notified().await;
        }
    }

    /// Objects whose wanted status has changed since the last call.
    pub fn take_changed(&self) -> BTreeSet<ObjectRef> {
        std::mem::take(&mut self.0.pending.lock().changed)
    }

    /// Makes every pending status count as changed.
    pub fn all_anew(&self) {
        let mut pending = self.0.pending.lock();
        let all: BTreeSet<_> = pending.wanted.keys().cloned().collect();
        all.into_iter().for_each(|object| pending.enqueue(object));
    }

    /// The status that an object should have and does not have. What is new in it is so since `now`, also in later
    /// calls.
    pub fn get(&self, object: &ObjectRef, now: Timestamp) -> Option<Arc<Status>> {
        let mut pending = self.0.pending.lock();
        let status = pending.wanted.get_mut(object)?;
        Arc::make_mut(status).stamp(now);
        Some(status.clone())
    }

    /// How often a status came to be written, since the start.
    pub fn enqueued(&self) -> u64 {
        self.0.pending.lock().enqueued
    }

    /// Derives the statuses of these objects anew.
    pub(crate) fn update(&self, store: &Store, cluster: &Cluster, objects: impl IntoIterator<Item = ObjectRef>) {
        let mut pending = self.0.pending.lock();
        for object in objects {
            let before = pending.wanted.get(&object).map(|status| &**status);
            match wanted::to_write(store, cluster, &object, before) {
                Some(status) if before != Some(&status) => {
                    pending.wanted.insert(object.clone(), Arc::new(status));
                    pending.enqueue(object);
                }
                Some(_) => {}
                None => {
                    pending.wanted.remove(&object);
                    pending.changed.remove(&object);
                }
            }
        }
        if !pending.changed.is_empty() {
            self.0.changed.notify_one();
        }
    }

    /// Everything that is pending, in order.
    #[cfg(test)]
    pub(crate) fn all(&self) -> std::collections::BTreeMap<ObjectRef, Arc<Status>> {
        self.0.pending.lock().wanted.clone().into_iter().collect()
    }
}

impl Pending {
    fn enqueue(&mut self, object: ObjectRef) {
        if self.changed.insert(object) {
            self.enqueued += 1;
        }
    }
}
