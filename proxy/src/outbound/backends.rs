//! Backends, shared by all destinations of a worker: balancers of services, single endpoints.
//!
//! Entries live while they are used.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use super::{balance::Balancer, endpoint::Endpoint};
use crate::{
    discover::{
        Discover,
        endpoint::EndpointInfo,
        route::{Accrual, Backend, BackendKind, Load},
    },
    shared::Shared,
};

/// One worker's balancers and endpoints.
pub(super) struct Backends {
    shared: Arc<Shared>,
    discover: Discover,
    balancers: Mutex<HashMap<String, BalancersOfPath>>,
    endpoints: Mutex<HashMap<SocketAddr, Weak<Endpoint>>>,
}

/// The balancers of one service; several only if policies judge its endpoints differently.
type BalancersOfPath = Vec<(Judgement, Weak<Balancer>)>;

/// How load is estimated, and when an endpoint is left out.
type Judgement = (Load, Option<Arc<Accrual>>);

/// A backend's balancer or endpoint.
#[derive(Clone)]
pub(super) enum Resolved {
    /// One endpoint.
    Forward(Arc<Endpoint>),
    /// A service.
    Balance(Arc<Balancer>),
    /// A backend that does not exist.
    Missing,
}

impl Backends {
    pub(super) fn new(shared: Arc<Shared>, discover: Discover) -> Self {
        Self { shared, discover, balancers: Mutex::default(), endpoints: Mutex::default() }
    }

    /// The balancer or endpoint of a backend. Equal backends share it.
    pub(super) fn resolve(&self, backend: &Backend) -> Resolved {
        match &backend.kind {
            BackendKind::Forward(info) => Resolved::Forward(self.endpoint(info)),
            BackendKind::Balance { path, load, accrual } => {
                Resolved::Balance(self.balancer(path, (*load, accrual.clone())))
            }
            BackendKind::Missing => Resolved::Missing,
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

    fn balancer(&self, path: &str, judgement: Judgement) -> Arc<Balancer> {
        let mut balancers = self.balancers.lock();
        let of_path = balancers.entry(path.to_owned()).or_default();
        let known = of_path.iter().find(|(of, _)| *of == judgement).and_then(|(_, balancer)| balancer.upgrade());
        if let Some(known) = known {
            return known;
        }
        let discovered = self.discover.endpoints(path);
        let (load, accrual) = judgement.clone();
        let balancer = Arc::new(Balancer::new(Arc::clone(&self.shared), path, discovered, load, accrual));
        of_path.retain(|(_, balancer)| balancer.strong_count() > 0);
        of_path.push((judgement, Arc::downgrade(&balancer)));
        balancer
    }

    /// Removes unused entries, and closes connections that were idle for too long.
    pub(super) fn sweep(&self) {
        self.balancers.lock().retain(|_, of_path| {
            of_path.retain(|(_, balancer)| balancer.upgrade().inspect(|balancer| balancer.purge_idle()).is_some());
            !of_path.is_empty()
        });
        self.endpoints.lock().retain(|_, endpoint| endpoint.upgrade().inspect(|known| known.purge_idle()).is_some());
    }
}
