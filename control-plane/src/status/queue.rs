//! When a status is to be written. Synchronous.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;
use weft_index::Status;
use weft_k8s_api::manifest::ObjectRef;

/// How long the watch has to show what was written, before it is written again: somebody else may have overwritten it
/// at once. Linkerd compares all statuses at this interval.
const CONFIRM: Duration = Duration::from_secs(10);
/// Wait after the first failure; it doubles with each further one.
const RETRY_MIN: Duration = Duration::from_millis(200);
/// The longest wait after a failure.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Objects whose status is to be written, or has been and is not shown yet.
#[derive(Default)]
pub(super) struct Queue {
    entries: HashMap<ObjectRef, Entry>,
    due: BTreeSet<(Instant, ObjectRef)>,
}

#[derive(Default)]
struct Entry {
    /// When it is to be looked at; `None` while it is being written.
    due: Option<Instant>,
    /// Whether it has changed while it was being written.
    changed: bool,
    /// What was written last, and when.
    written: Option<(Arc<Status>, Instant)>,
    /// Consecutive failures.
    failures: u32,
}

impl Queue {
    /// Takes in that an object should have another status.
    pub(super) fn changed(&mut self, object: ObjectRef, now: Instant) {
        match self.entries.get_mut(&object) {
            Some(entry) if entry.due.is_none() => entry.changed = true,
            _ => self.schedule(object, now),
        }
    }

    /// An object that is due.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<ObjectRef> {
        let (at, _) = self.due.first()?;
        if *at > now {
            return None;
        }
        let (_, object) = self.due.pop_first()?;
        if let Some(entry) = self.entries.get_mut(&object) {
            entry.due = None;
        }
        Some(object)
    }

    /// Whether a status that is due is to be written now. One that has been is not, until the watch had time to show
    /// it.
    pub(super) fn begin(&mut self, object: &ObjectRef, status: &Arc<Status>, now: Instant) -> bool {
        let written = self.entries.get(object).and_then(|entry| entry.written.as_ref());
        match written.filter(|(written, _)| written == status).map(|(_, at)| *at + CONFIRM) {
            Some(shown_by) if shown_by > now => {
                self.schedule(object.clone(), shown_by);
                false
            }
            _ => true,
        }
    }

    /// Takes in that a status was written.
    pub(super) fn wrote(&mut self, object: &ObjectRef, status: Arc<Status>, now: Instant) {
        let Some(entry) = self.entries.get_mut(object) else { return };
        (entry.written, entry.failures) = (Some((status, now)), 0);
        let at = if std::mem::take(&mut entry.changed) { now } else { now + CONFIRM };
        self.schedule(object.clone(), at);
    }

    /// Takes in that a status could not be written; returns how often in a row.
    pub(super) fn failed(&mut self, object: &ObjectRef, now: Instant) -> u32 {
        let Some(entry) = self.entries.get_mut(object) else { return 0 };
        entry.changed = false;
        entry.failures = entry.failures.saturating_add(1);
        let failures = entry.failures;
        let wait = RETRY_MAX.min(RETRY_MIN * 2u32.pow((failures - 1).min(16)));
        self.schedule(object.clone(), now + wait);
        failures
    }

    /// Forgets an object whose status is as it should be, or that is gone.
    pub(super) fn forget(&mut self, object: &ObjectRef) {
        if let Some(Entry { due: Some(at), .. }) = self.entries.remove(object) {
            self.due.remove(&(at, object.clone()));
        }
    }

    /// When the next object is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// How many statuses have not been written.
    pub(super) fn waiting(&self) -> usize {
        self.entries.values().filter(|entry| entry.written.is_none()).count()
    }

    fn schedule(&mut self, object: ObjectRef, at: Instant) {
        let entry = self.entries.entry(object.clone()).or_default();
        if let Some(before) = entry.due.replace(at) {
            self.due.remove(&(before, object.clone()));
        }
        self.due.insert((at, object));
    }
}

#[cfg(test)]
mod tests {
    use weft_k8s_api::{manifest::Kind, policy::EgressNetworkStatus};

    use super::*;

    fn object(name: &str) -> ObjectRef {
        ObjectRef { kind: Kind::EgressNetwork, namespace: Some("shop".to_owned()), name: name.to_owned() }
    }

    fn status(message: &str) -> Arc<Status> {
        let condition = serde_json::json!({"type": "Accepted", "status": "True", "reason": "Accepted",
            "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"});
        Arc::new(Status::EgressNetwork(EgressNetworkStatus {
            conditions: vec![serde_json::from_value(condition).unwrap()],
        }))
    }

    #[test]
    fn what_was_written_is_written_again_only_if_the_watch_does_not_show_it() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let one = object("one");
        queue.changed(one.clone(), start);
        assert_eq!((queue.take_due(start), queue.waiting()), (Some(one.clone()), 1));
        assert!(queue.begin(&one, &status("a"), start));
        assert_eq!(queue.take_due(start), None, "it is being written");
        queue.wrote(&one, status("a"), start);
        assert_eq!(queue.waiting(), 0);
        // The index derived it once more.
        queue.changed(one.clone(), start);
        assert_eq!(queue.take_due(start), Some(one.clone()));
        assert!(!queue.begin(&one, &status("a"), start));
        assert_eq!(queue.take_due(start), None);
        let later = start + CONFIRM;
        assert_eq!((queue.next_due(), queue.take_due(later)), (Some(later), Some(one.clone())));
        assert!(queue.begin(&one, &status("a"), later));
        queue.wrote(&one, status("a"), later);
        // Another status is written at once.
        queue.changed(one.clone(), later);
        assert_eq!(queue.take_due(later), Some(one.clone()));
        assert!(queue.begin(&one, &status("b"), later));
    }

    #[test]
    fn a_change_during_a_write_is_written_after_it() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let one = object("one");
        queue.changed(one.clone(), start);
        assert!(queue.take_due(start).is_some() && queue.begin(&one, &status("a"), start));
        queue.changed(one.clone(), start);
        assert_eq!(queue.take_due(start), None);
        queue.wrote(&one, status("a"), start);
        assert_eq!(queue.take_due(start), Some(one.clone()));
        assert!(queue.begin(&one, &status("b"), start));
        queue.wrote(&one, status("b"), start);
        assert_eq!(queue.take_due(start), None);
    }

    #[test]
    fn failures_are_retried_later_and_later_and_others_do_not_wait() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let (bad, good) = (object("bad"), object("good"));
        queue.changed(bad.clone(), start);
        let mut now = start;
        let mut waits = Vec::new();
        for attempt in 1..=20 {
            assert_eq!(queue.take_due(now), Some(bad.clone()));
            assert!(queue.begin(&bad, &status("a"), now));
            assert_eq!(queue.failed(&bad, now), attempt);
            let next = queue.next_due().unwrap();
            waits.push(next - now);
            now = next;
        }
        assert_eq!((waits[0], waits[1], waits[19]), (RETRY_MIN, RETRY_MIN * 2, RETRY_MAX));
        queue.changed(good.clone(), now - RETRY_MAX);
        assert_eq!(queue.take_due(now - RETRY_MAX), Some(good));
        queue.forget(&bad);
        assert_eq!(queue.next_due(), None);
    }
}
