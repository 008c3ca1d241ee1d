//! What one worker remembers between connections: destinations, balancers, single endpoints.
//!
//! Entries live while they are used, destinations for the idle timeout longer.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::endpoint::Endpoint;
use super::target::{Resolved, Target};
use crate::balance::Balancer;
use crate::discover::Discover;
use crate::discover::endpoint::EndpointInfo;
use crate::discover::route::{Backend, BackendKind, PeakEwma};
use crate::http::in_flight::RequestLimit;
use crate::shared::Shared;

/// One worker's outbound state.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    discover: Discover,
    targets: Mutex<HashMap<SocketAddr, Cached>>,
    balancers: Mutex<HashMap<String, BalancersOfPath>>,
    endpoints: Mutex<HashMap<SocketAddr, Weak<Endpoint>>>,
    /// Requests that are being answered.
    pub(super) limit: RequestLimit,
    #[cfg(test)]
    pub(super) pretended_dst: Mutex<Option<SocketAddr>>,
}

/// The balancers of one service; several only where routes estimate load differently.
type BalancersOfPath = Vec<(PeakEwma, Weak<Balancer>)>;

struct Cached {
    target: Arc<Target>,
    used: Instant,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, discover: Discover) -> Arc<Self> {
        Arc::new(Self {
            limit: RequestLimit::new(shared.config.outbound.max_in_flight),
            shared,
            discover,
            targets: Mutex::default(),
            balancers: Mutex::default(),
            endpoints: Mutex::default(),
            #[cfg(test)]
            pretended_dst: Mutex::default(),
        })
    }

    /// The destination with this address, remembered or looked up.
    pub(super) fn target(self: &Arc<Self>, addr: SocketAddr) -> Arc<Target> {
        let mut targets = self.targets.lock();
        let now = Instant::now();
        let cached = targets.entry(addr).or_insert_with(|| {
            let lookup = self.discover.look_up(addr);
            Cached { target: Arc::new(Target::new(self, addr, lookup)), used: now }
        });
        cached.used = now;
        Arc::clone(&cached.target)
    }

    /// What a backend leads to. Backends that say the same share it.
    pub(super) fn resolve(&self, backend: &Backend) -> Resolved {
        match &backend.kind {
            BackendKind::Forward(info) => Resolved::Forward(self.endpoint(info)),
            BackendKind::Balance { path, load } => Resolved::Balance(self.balancer(path, *load)),
        }
    }

    fn endpoint(&self, info: &Arc<EndpointInfo>) -> Arc<Endpoint> {
        let mut endpoints = self.endpoints.lock();
        if let Some(known) = endpoints.get(&info.addr).and_then(Weak::upgrade)
            && *known.info == **info
        {
            return known;
        }
        let endpoint = Arc::new(Endpoint::new(Arc::clone(&self.shared), Arc::clone(info)));
        endpoints.insert(info.addr, Arc::downgrade(&endpoint));
        endpoint
    }

    fn balancer(&self, path: &str, load: PeakEwma) -> Arc<Balancer> {
        let mut balancers = self.balancers.lock();
        let of_path = balancers.entry(path.to_owned()).or_default();
        let known = of_path.iter().find(|(of, _)| *of == load).and_then(|(_, balancer)| balancer.upgrade());
        if let Some(known) = known {
            return known;
        }
        let discovered = self.discover.endpoints(path);
        let balancer = Arc::new(Balancer::new(Arc::clone(&self.shared), path, discovered, load));
        of_path.retain(|(_, balancer)| balancer.strong_count() > 0);
        of_path.push((load, Arc::downgrade(&balancer)));
        balancer
    }

    /// Forgets what is not used any more.
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
        self.balancers.lock().retain(|_, of_path| {
            of_path.retain(|(_, balancer)| balancer.upgrade().inspect(|balancer| balancer.purge_idle()).is_some());
            !of_path.is_empty()
        });
        self.endpoints.lock().retain(|_, endpoint| endpoint.upgrade().inspect(|known| known.purge_idle()).is_some());
    }
}
