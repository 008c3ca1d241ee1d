//! A worker's state between connections: destinations, kept for the idle timeout after their last use.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{backends::Backends, target::OutboundTarget};
use crate::{
    discover::Discover,
    http::{body::replay::ReplayRoom, in_flight::RequestLimit},
    shared::Shared,
};

/// One worker's outbound state.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    discover: Discover,
    targets: Mutex<HashMap<SocketAddr, Cached>>,
    /// Backends of all destinations.
    pub(super) backends: Arc<Backends>,
    /// Limit of requests in flight.
    pub(super) limit: RequestLimit,
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
            replay_room: ReplayRoom::default(),
            backends: Arc::new(Backends::new(Arc::clone(&shared), discover.clone())),
            shared,
            discover,
            targets: Mutex::default(),
            #[cfg(test)]
            pretended_dst: Mutex::default(),
        })
    }

    /// The destination with this address, from memory or looked up.
    pub(super) fn target(&self, addr: SocketAddr) -> Arc<OutboundTarget> {
        let mut targets = self.targets.lock();
        let now = Instant::now();
        let cached = targets.entry(addr).or_insert_with(|| {
            let lookup = self.discover.look_up(addr);
            Cached {
                target: Arc::new(OutboundTarget::new(
                    Arc::clone(&self.shared),
                    Arc::clone(&self.backends),
                    addr,
                    lookup,
                )),
                used: now,
            }
        });
        cached.used = now;
        Arc::clone(&cached.target)
    }

    /// Removes entries that are no longer used.
    pub(super) fn sweep(&self, now: Instant) {
        let idle = self.shared.config.outbound.discovery_idle_timeout;
        let unused: Vec<Cached> = {
            let mut targets = self.targets.lock();
            for cached in targets.values_mut() {
                if Arc::strong_count(&cached.target) > 1 {
                    cached.used = now;
                }
            }
            targets
                .extract_if(|_, cached| now.saturating_duration_since(cached.used) >= idle)
                .map(|(_, old)| old)
                .collect()
        };
        drop(unused);
        self.backends.sweep();
    }
}
