//! Subscriptions to computed snapshots, in groups that change together.

use std::{collections::HashMap, hash::Hash};

use tokio::sync::watch;

/// Subscriptions that one change may affect are in one group: all ports of an address, all filters of a
/// Service.
pub(super) struct Watches<G, K, T> {
    groups: HashMap<G, HashMap<K, watch::Sender<T>>>,
    subscriptions: usize,
    /// Number of subscriptions at which those without a receiver are removed.
    sweep_at: usize,
}

/// Fewer subscriptions than this are never swept.
const SWEEP_MIN: usize = 64;

impl<G, K, T> Default for Watches<G, K, T> {
    fn default() -> Self {
        Self { groups: HashMap::new(), subscriptions: 0, sweep_at: SWEEP_MIN }
    }
}

impl<G: Clone + Eq + Hash, K: Eq + Hash, T> Watches<G, K, T> {
    /// Joins a subscription, or starts it with the snapshot that `compute` returns.
    pub(super) fn subscribe(&mut self, group: &G, key: K, compute: impl FnOnce(&K) -> T) -> watch::Receiver<T> {
        if let Some(joined) = self.join(group, &key) {
            return joined;
        }
        if self.subscriptions >= self.sweep_at {
            self.sweep();
        }
        let (sender, receiver) = watch::channel(compute(&key));
        self.groups.entry(group.clone()).or_default().insert(key, sender);
        self.subscriptions += 1;
        receiver
    }

    /// Joins a subscription, if there is one.
    pub(super) fn join(&self, group: &G, key: &K) -> Option<watch::Receiver<T>> {
        Some(self.groups.get(group)?.get(key)?.subscribe())
    }

    /// Subscriptions, each with the number of its receivers, which may be zero.
    pub(super) fn subscribers(&self) -> impl Iterator<Item = (&G, &K, usize)> {
        let of_group = |(group, keys)| {
            let keys: &HashMap<K, watch::Sender<T>> = keys;
            keys.iter().map(move |(key, sender)| (group, key, sender.receiver_count()))
        };
        self.groups.iter().flat_map(of_group)
    }

    /// Subscriptions that have a receiver.
    pub(super) fn followed(&self) -> impl Iterator<Item = (&G, &K, &watch::Sender<T>)> {
        let of_group = |(group, keys)| {
            let keys: &HashMap<K, watch::Sender<T>> = keys;
            keys.iter().map(move |(key, sender)| (group, key, sender))
        };
        self.groups.iter().flat_map(of_group).filter(|(_, _, sender)| sender.receiver_count() > 0)
    }

    /// The keys of a group's subscriptions that have a receiver.
    pub(super) fn keys(&self, group: &G) -> impl Iterator<Item = &K> {
        let keys = self.groups.get(group).into_iter().flatten();
        keys.filter(|(_, sender)| sender.receiver_count() > 0).map(|(key, _)| key)
    }

    /// The snapshots of a group.
    pub(super) fn values(&self, group: &G) -> impl Iterator<Item = watch::Ref<'_, T>> {
        self.groups.get(group).into_iter().flatten().map(|(_, sender)| sender.borrow())
    }

    /// Recomputes the snapshots of a group. `next` gets the current one, and returns another if it differs: receivers
    /// are then notified.
    pub(super) fn update(&mut self, group: &G, mut next: impl FnMut(&K, &T) -> Option<T>) {
        for (key, sender) in self.groups.get(group).into_iter().flatten() {
            if sender.receiver_count() > 0 {
                let next = next(key, &sender.borrow());
                if let Some(next) = next {
                    sender.send_replace(next);
                }
            }
        }
        // Without a receiver, nothing would keep the snapshot current for the next subscriber.
        if let Some(keys) = self.groups.get_mut(group) {
            let before = keys.len();
            keys.retain(|_, sender| sender.receiver_count() > 0);
            self.subscriptions -= before - keys.len();
            if keys.is_empty() {
                self.groups.remove(group);
            }
        }
    }

    /// Groups that have subscriptions.
    pub(super) fn groups(&self) -> impl Iterator<Item = &G> {
        self.groups.keys()
    }

    /// Number of subscriptions with a receiver.
    #[cfg(test)]
    pub(super) fn len(&mut self) -> usize {
        self.sweep();
        self.subscriptions
    }

    /// Ends the subscriptions of a group with keys for which `ends` holds.
    pub(super) fn end_in(&mut self, group: &G, ends: impl Fn(&K) -> bool) {
        let Some(keys) = self.groups.get_mut(group) else { return };
        let before = keys.len();
        keys.retain(|key, _| !ends(key));
        self.subscriptions -= before - keys.len();
        if keys.is_empty() {
            self.groups.remove(group);
        }
    }

    /// Ends the subscriptions with keys for which `ends` holds. Looks at all of them.
    pub(super) fn end(&mut self, ends: impl Fn(&K) -> bool) {
        self.groups.retain(|_, keys| {
            keys.retain(|key, _| !ends(key));
            !keys.is_empty()
        });
        self.subscriptions = self.groups.values().map(HashMap::len).sum();
    }

    /// Drops subscriptions without receivers. Each sweep doubles the number at which the next one happens, so its cost
    /// per subscription is constant.
    fn sweep(&mut self) {
        self.groups.retain(|_, keys| {
            keys.retain(|_, sender| sender.receiver_count() > 0);
            !keys.is_empty()
        });
        self.subscriptions = self.groups.values().map(HashMap::len).sum();
        self.sweep_at = SWEEP_MIN.max(self.subscriptions * 2);
    }
}

impl<G: Clone + Eq + Hash, K: Eq + Hash, T> Watches<G, K, Option<T>> {
    /// Like [`Watches::subscribe`], but keeps no subscription if the snapshot would be `None`: clients may
    /// ask for any number of names that do not exist.
    pub(super) fn subscribe_known(
        &mut self,
        group: &G,
        key: K,
        compute: impl FnOnce(&K) -> Option<T>,
    ) -> Option<watch::Receiver<Option<T>>> {
        if let Some(sender) = self.groups.get(group).and_then(|keys| keys.get(&key)) {
            return sender.borrow().is_some().then(|| sender.subscribe());
        }
        let snapshot = compute(&key)?;
        Some(self.subscribe(group, key, |_| Some(snapshot)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subscribers_hear_of_their_group_when_it_differs() {
        let mut watches = Watches::<&str, u16, u32>::default();
        let mut a = watches.subscribe(&"a", 1, |_| 0);
        let b = watches.subscribe(&"b", 1, |_| 0);
        watches.update(&"a", |_, _| Some(7));
        assert!(a.has_changed().unwrap() && !b.has_changed().unwrap());
        assert_eq!(*a.borrow_and_update(), 7);
        watches.update(&"a", |_, old| (*old != 7).then_some(7));
        assert!(!a.has_changed().unwrap());
        watches.end_in(&"a", |_| true);
        assert!(a.has_changed().is_err() && b.has_changed().is_ok());
        watches.end(|port| *port == 1);
        assert!(b.has_changed().is_err());
        assert_eq!((watches.groups.len(), watches.subscriptions), (0, 0));
    }

    #[test]
    fn a_late_subscriber_shares_the_snapshot_and_a_new_one_is_fresh() {
        let mut watches = Watches::<&str, u16, u32>::default();
        let first = watches.subscribe(&"a", 1, |_| 1);
        assert_eq!(*watches.subscribe(&"a", 1, |_| 2).borrow(), 1);
        drop(first);
        watches.update(&"a", |_, _| Some(3));
        assert_eq!(*watches.subscribe(&"a", 1, |_| 4).borrow(), 4);
    }

    #[test]
    fn what_is_not_known_leaves_nothing_behind() {
        let mut watches = Watches::<u32, u16, Option<u32>>::default();
        for group in 0..100 {
            assert!(watches.subscribe_known(&group, 0, |_| None).is_none());
        }
        assert_eq!((watches.groups.len(), watches.subscriptions), (0, 0));
        let mut known = watches.subscribe_known(&0, 0, |_| Some(1)).unwrap();
        watches.update(&0, |_, _| Some(None));
        assert_eq!(*known.borrow_and_update(), None);
        assert!(
            watches.subscribe_known(&0, 0, |_| Some(2)).is_none(),
            "the snapshot is not recomputed without a change"
        );
        drop(known);
        watches.update(&0, |_, _| Some(None));
        assert_eq!((watches.groups.len(), watches.subscriptions), (0, 0), "a group without subscriptions goes");
    }

    #[test]
    fn subscriptions_without_receivers_are_swept() {
        let mut watches = Watches::<u32, u16, u32>::default();
        let kept = watches.subscribe(&0, 0, |_| 0);
        for group in 1..10_000 {
            drop(watches.subscribe(&group, 0, |_| 0));
        }
        assert!(watches.subscriptions <= SWEEP_MIN, "{}", watches.subscriptions);
        assert!(kept.has_changed().is_ok());
    }
}
