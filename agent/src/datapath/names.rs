//! The pods' names, by the cookies of their network namespaces, and the cookies by name. The owner changes them, and
//! other tasks read snapshots: a change copies what a reader holds at that moment, and nothing otherwise.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::rules::PodName;

/// The names by cookie at one moment.
pub(crate) type Snapshot = Arc<BTreeMap<u64, Arc<PodName>>>;

/// The names of now. Clones share them. The lock is held for one change, or to take a snapshot.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names(Arc<Mutex<Index>>);

#[derive(Debug, Default)]
struct Index {
    by_cookie: Snapshot,
    /// In the order in which they were enrolled last. Cookies have no order: each processor has some of its own.
    by_name: BTreeMap<Arc<PodName>, Vec<u64>>,
}

impl Names {
    /// The names as they are now.
    pub(crate) fn snapshot(&self) -> Snapshot {
        Arc::clone(&self.lock().by_cookie)
    }

    /// The network namespaces of a pod, the one that was enrolled last at the end: of its earlier sandboxes, too, while
    /// those are known.
    pub(crate) fn cookies(&self, pod: &PodName) -> Vec<u64> {
        self.lock().by_name.get(pod).into_iter().flatten().copied().collect()
    }

    /// Names a network namespace, which is enrolled.
    pub(crate) fn insert(&self, cookie: u64, pod: &PodName) {
        let mut index = self.lock();
        if index.by_cookie.get(&cookie).is_some_and(|known| **known == *pod) {
            if let Some(cookies) = index.by_name.get_mut(pod) {
                cookies.retain(|known| *known != cookie);
                cookies.push(cookie);
            }
            return;
        }
        index.remove(cookie);
        let name = Arc::new(pod.clone());
        index.by_name.entry(Arc::clone(&name)).or_default().push(cookie);
        Arc::make_mut(&mut index.by_cookie).insert(cookie, name);
    }

    /// Forgets a network namespace. An unknown one is not an error.
    pub(crate) fn remove(&self, cookie: u64) {
        self.lock().remove(cookie);
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    fn remove(&mut self, cookie: u64) {
        let Some(name) = self.by_cookie.get(&cookie).cloned() else { return };
        Arc::make_mut(&mut self.by_cookie).remove(&cookie);
        if let Some(cookies) = self.by_name.get_mut(&name) {
            cookies.retain(|known| *known != cookie);
            if cookies.is_empty() {
                self.by_name.remove(&name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> PodName {
        PodName { namespace: "shop".into(), name: name.into() }
    }

    #[test]
    fn a_pods_namespaces_are_found_by_its_name_in_the_order_of_their_enrolment() {
        let names = Names::default();
        for (cookie, name) in [(7, "web-0"), (9, "web-0"), (8, "web-1"), (7, "web-0")] {
            names.insert(cookie, &pod(name));
        }
        assert_eq!([names.cookies(&pod("web-0")), names.cookies(&pod("web-1"))], [vec![9, 7], vec![8]]);
        names.insert(9, &pod("web-1"));
        names.remove(8);
        names.remove(8);
        assert_eq!([names.cookies(&pod("web-0")), names.cookies(&pod("web-1"))], [[7], [9]]);
        names.remove(7);
        assert!(names.cookies(&pod("web-0")).is_empty());
        assert_eq!(names.lock().by_name.len(), 1);
    }

    #[test]
    fn names_are_copied_only_for_a_reader_that_holds_them() {
        let names = Names::default();
        names.insert(7, &pod("web-0"));
        let first = Arc::as_ptr(&names.snapshot());
        names.insert(8, &pod("web-1"));
        assert_eq!(Arc::as_ptr(&names.snapshot()), first);
        let held = names.snapshot();
        names.insert(9, &pod("web-2"));
        assert_eq!((held.len(), names.snapshot().len()), (2, 3));
    }
}
