//! A worker's state between connections: destinations, kept for the idle timeout after their last use.

use std::{collections::HashMap, hash::Hash, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{backends::Backends, target::OutboundTarget};
use crate::{
    destination::{Destination, Name},
    discover::Discover,
    failure_log::FailureLog,
    http::{body::replay::ReplayRoom, in_flight::RequestLimit},
    shared::Shared,
};

/// The most destinations by name that are kept. The sender of a request chooses the name, and each name takes two
/// streams of the control plane.
pub(super) const MAX_NAMES: usize = 1024;

/// One worker's outbound state.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    discover: Discover,
    targets: Mutex<HashMap<SocketAddr, Cached>>,
    names: Mutex<HashMap<Name, Cached>>,
    /// Backends of all destinations.
    pub(super) backends: Arc<Backends>,
    /// Limit of requests in flight.
    pub(super) limit: RequestLimit,
    /// Lines about what failed.
    pub(super) failures: FailureLog,
    /// Room for bodies of requests that may be sent again.
    pub(super) replay_room: ReplayRoom,
    #[cfg(test)]
    pub(super) pretended_dst: Mutex<Option<SocketAddr>>,
}

struct Cached {
    target: Arc<OutboundTarget>,
    used: Instant,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, discover: Discover) -> Arc<Self> {
        Arc::new(Self {
            limit: RequestLimit::new(shared.config.outbound.max_in_flight),
            failures: FailureLog::default(),
            replay_room: ReplayRoom::default(),
            backends: Arc::new(Backends::new(Arc::clone(&shared), discover.clone())),
            shared,
            discover,
            targets: Mutex::default(),
            names: Mutex::default(),
            #[cfg(test)]
            pretended_dst: Mutex::default(),
        })
    }

    /// The destination with this address, from memory or looked up.
    pub(super) fn target(&self, addr: SocketAddr) -> Arc<OutboundTarget> {
        let mut targets = self.targets.lock();
        let now = Instant::now();
        let cached = targets.entry(addr).or_insert_with(|| self.look_up(addr.into(), now));
        cached.used = now;
        Arc::clone(&cached.target)
    }

    /// The destination with this name, from memory or looked up. If [`MAX_NAMES`] are kept, the one that was unused for
    /// the longest time is forgotten for it; `None` if all are in use.
    pub(super) fn named(&self, name: &Name) -> Option<Arc<OutboundTarget>> {
        let mut names = self.names.lock();
        let now = Instant::now();
        if let Some(known) = names.get_mut(name) {
            known.used = now;
            return Some(Arc::clone(&known.target));
        }
        let forgotten = if names.len() < MAX_NAMES {
            None
        } else {
            let unused = names.iter().filter(|(_, cached)| Arc::strong_count(&cached.target) == 1);
            let oldest = unused.min_by_key(|(_, cached)| cached.used).map(|(name, _)| name.clone())?;
            names.remove(&oldest)
        };
        let cached = self.look_up(Destination::Name(name.clone()), now);
        let target = Arc::clone(&cached.target);
        names.insert(name.clone(), cached);
        drop(names);
        drop(forgotten);
        Some(target)
    }

    /// How many destinations by name are kept.
    #[cfg(test)]
    pub(super) fn known_names(&self) -> usize {
        self.names.lock().len()
    }

    fn look_up(&self, destination: Destination, now: Instant) -> Cached {
        let lookup = self.discover.look_up(&destination);
        let (shared, backends) = (Arc::clone(&self.shared), Arc::clone(&self.backends));
        Cached { target: Arc::new(OutboundTarget::new(shared, backends, destination, lookup)), used: now }
    }

    /// Removes entries that are no longer used.
    pub(super) fn sweep(&self, now: Instant) {
        let idle = self.shared.config.outbound.discovery_idle_timeout;
        // Dropped after the locks are released.
        let unused = (remove_unused(&self.targets, now, idle), remove_unused(&self.names, now, idle));
        drop(unused);
        self.backends.sweep();
    }
}

fn remove_unused<K: Eq + Hash>(targets: &Mutex<HashMap<K, Cached>>, now: Instant, idle: Duration) -> Vec<Cached> {
    let mut targets = targets.lock();
    for cached in targets.values_mut() {
        if Arc::strong_count(&cached.target) > 1 {
            cached.used = now;
        }
    }
    targets.extract_if(|_, cached| now.saturating_duration_since(cached.used) >= idle).map(|(_, old)| old).collect()
}
