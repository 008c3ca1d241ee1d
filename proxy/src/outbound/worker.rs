//! A worker's state between connections: destinations, kept for the idle timeout after their last use.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{backends::Backends, target::OutboundTarget};
use crate::{
    destination::{Destination, Name},
    discover::Discover,
    failure_log::FailureLog,
    http::body::replay::ReplayRoom,
    in_flight::SharedLimit,
    recent::Recent,
    shared::Shared,
};

/// The most destinations by name that are kept. The sender of a request chooses the name, and each name takes two
/// streams of the control plane.
pub(super) const MAX_NAMES: usize = 1024;

/// One worker's outbound state.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    discover: Discover,
    targets: Recent<SocketAddr, OutboundTarget>,
    names: Recent<Name, OutboundTarget>,
    /// Backends of all destinations.
    pub(super) backends: Arc<Backends>,
    /// Limit of requests in flight.
    pub(super) limit: SharedLimit,
    /// Lines about what failed.
    pub(super) failures: FailureLog,
    /// Room for bodies of requests that may be sent again.
    pub(super) replay_room: ReplayRoom,
    #[cfg(test)]
    pub(super) pretended_dst: parking_lot::Mutex<Option<SocketAddr>>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, discover: Discover) -> Arc<Self> {
        Arc::new(Self {
            limit: SharedLimit::new(shared.config.outbound.max_in_flight),
            failures: FailureLog::default(),
            replay_room: ReplayRoom::default(),
            backends: Arc::new(Backends::new(Arc::clone(&shared), discover.clone())),
            shared,
            discover,
            targets: Recent::new(),
            names: Recent::new(),
            #[cfg(test)]
            pretended_dst: parking_lot::Mutex::default(),
        })
    }

    /// The destination with this address, from memory or looked up.
    pub(super) fn target(&self, addr: SocketAddr) -> Arc<OutboundTarget> {
        self.targets.get(addr, || self.look_up(addr.into()))
    }

    /// The destination with this name, from memory or looked up; `None` if [`MAX_NAMES`] are kept and all are in use.
    pub(super) fn named(&self, name: &Name) -> Option<Arc<OutboundTarget>> {
        self.names.get_within(MAX_NAMES, Duration::ZERO, name, || self.look_up(Destination::Name(name.clone())))
    }

    /// How many destinations by name are kept.
    #[cfg(test)]
    pub(super) fn known_names(&self) -> usize {
        self.names.keys().len()
    }

    fn look_up(&self, destination: Destination) -> OutboundTarget {
        let lookup = self.discover.look_up(&destination);
        OutboundTarget::new(Arc::clone(&self.shared), Arc::clone(&self.backends), destination, lookup)
    }

    /// Removes entries that are no longer used.
    pub(super) fn sweep(&self, now: Instant) {
        let idle = self.shared.config.outbound.discovery_idle_timeout;
        self.targets.sweep(now, idle);
        self.names.sweep(now, idle);
        self.backends.sweep();
    }
}
