//! Backends, shared by all destinations of a worker: balancers of services, single endpoints.
//!
//! Entries live while they are used.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use super::{balance::Balancer, endpoint::Endpoint, rules::balancer_labels};
use crate::{
    discover::{
        Discover,
        endpoint::EndpointInfo,
        route::{Accrual, Backend, BackendKind, Load},
    },
    metrics::BalancerKind,
    route::Meta,
    shared::Shared,
};

/// One worker's balancers and endpoints.
pub(super) struct Backends {
    shared: Arc<Shared>,
    discover: Discover,
    balancers: Mutex<HashMap<String, BalancersOfPath>>,
    endpoints: Mutex<HashMap<SocketAddr, Weak<Endpoint>>>,
}

/// The balancers of one service; several if policies judge its endpoints differently, or if it has several uses.
type BalancersOfPath = Vec<(Use, Weak<Balancer>)>;

/// What a service is used for. Requests and connections load endpoints differently, and each use is counted.
#[derive(PartialEq)]
struct Use {
    load: Load,
    accrual: Option<Arc<Accrual>>,
    parent: Meta,
    backend: Meta,
    kind: BalancerKind,
}

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

impl Resolved {
    /// Whether requests to it have an endpoint, and need not wait for one.
    pub(super) fn is_available(&self) -> bool {
        match self {
            Self::Balance(balancer) => balancer.is_available(),
            Self::Forward(_) => true,
            Self::Missing => false,
        }
    }

    /// Whether requests to it have an endpoint that does not come from a rest.
    pub(super) fn is_reachable(&self) -> bool {
        match self {
            Self::Balance(balancer) => balancer.is_reachable(),
            Self::Forward(_) => true,
            Self::Missing => false,
        }
    }

    /// Whether requests to it have an endpoint, be it one that rests.
    pub(super) fn has_endpoints(&self) -> bool {
        match self {
            Self::Balance(balancer) => balancer.has_endpoints(),
            Self::Forward(_) => true,
            Self::Missing => false,
        }
    }

    /// Whether both are the same balancer, as equal backends of a parent are.
    pub(super) fn shares_endpoints(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Balance(one), Self::Balance(other)) if Arc::ptr_eq(one, other))
    }
}

impl Backends {
    pub(super) fn new(shared: Arc<Shared>, discover: Discover) -> Self {
        Self { shared, discover, balancers: Mutex::default(), endpoints: Mutex::default() }
    }

    /// The balancer or endpoint of a backend. Equal backends of a parent share it.
    pub(super) fn resolve(&self, backend: &Backend, parent: &Meta, kind: BalancerKind) -> Resolved {
        match &backend.kind {
            BackendKind::Forward(info) => Resolved::Forward(self.endpoint(info)),
            BackendKind::Balance { path, load, accrual } => {
                let (parent, backend) = (parent.clone(), backend.meta.clone());
                Resolved::Balance(
                    self.balancer(path, Use { load: *load, accrual: accrual.clone(), parent, backend, kind }),
                )
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
        let endpoint = Arc::new(Endpoint::new(Arc::clone(&self.shared), Arc::clone(info), None));
        endpoints.insert(info.addr, Arc::downgrade(&endpoint));
        endpoint
    }

    fn balancer(&self, path: &str, of: Use) -> Arc<Balancer> {
        let mut balancers = self.balancers.lock();
        let of_path = balancers.entry(path.to_owned()).or_default();
        let known = of_path.iter().find(|(known, _)| *known == of).and_then(|(_, balancer)| balancer.upgrade());
        if let Some(known) = known {
            return known;
        }
        let discovered = self.discover.endpoints(path);
        let labels = balancer_labels(&of.parent, &of.backend);
        let (shared, accrual) = (Arc::clone(&self.shared), of.accrual.clone());
        let balancer = Arc::new(Balancer::new(shared, of.kind, labels, discovered, of.load, accrual));
        of_path.retain(|(_, balancer)| balancer.strong_count() > 0);
        of_path.push((of, Arc::downgrade(&balancer)));
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
