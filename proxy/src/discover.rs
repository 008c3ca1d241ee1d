//! Discovery: profile and policy of each destination, and endpoints of each service, from the control plane.
//!
//! ```text
//! OutboundPolicies.Watch ─┐
//! Destination.GetProfile ─┴─> Lookup { profile, policy } ──┐
//! Destination.Get ──────────> Endpoints ───────────────────┴─> watch channels, read by workers
//! ```
//!
//! One process-wide set of streams on the control runtime, shared by all workers. A stream lives as long as its result
//! is in use; if the stream is lost, the last state stays. Refuses to decide where a request goes.

pub(crate) mod endpoint;
pub(crate) mod endpoints;
pub(crate) mod policy;
pub(crate) mod profile;
pub(crate) mod route;

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::watch, task::AbortHandle};

use crate::{control::ControlClient, destination::Destination, shared::Shared};

use endpoints::EndpointsState;
use policy::PolicyState;
use profile::ProfileState;

/// Discovery. Clones share it.
#[derive(Clone)]
pub(crate) struct Discover {
    inner: Arc<Inner>,
}

struct Inner {
    runtime: Handle,
    destination: ControlClient,
    policy: ControlClient,
    context: String,
    workload: String,
    networks: Vec<ipnet::IpNet>,
    lookups: Mutex<HashMap<Destination, Weak<Lookup>>>,
    profiles: Mutex<HashMap<Destination, Weak<ProfileLookup>>>,
    endpoints: Mutex<HashMap<String, Weak<Endpoints>>>,
}

/// Profile and policy of one destination. Dropping the last reference ends the streams.
#[derive(Debug)]
pub(crate) struct Lookup {
    pub(crate) profile: watch::Receiver<ProfileState>,
    pub(crate) policy: watch::Receiver<PolicyState>,
    _streams: [Stream; 2],
}

/// The profile of one destination. Dropping the last reference ends the stream.
#[derive(Debug)]
pub(crate) struct ProfileLookup {
    pub(crate) profile: watch::Receiver<ProfileState>,
    _stream: Stream,
}

/// The endpoints of one service. Dropping the last reference ends the stream.
#[derive(Debug)]
pub(crate) struct Endpoints {
    /// The service's authority.
    pub(crate) service: String,
    /// The last known set.
    pub(crate) state: watch::Receiver<EndpointsState>,
    _stream: Stream,
}

/// A task that ends with its owner.
#[derive(Debug)]
struct Stream(AbortHandle);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Discover {
    /// Creates discovery with clients of both services; nothing is requested yet.
    pub(crate) fn new(shared: &Arc<Shared>, destination: ControlClient, policy: ControlClient) -> Self {
        let config = &shared.config;
        Self {
            inner: Arc::new(Inner {
                runtime: shared.control.clone(),
                destination,
                policy,
                context: config.destination.context.clone(),
                workload: config.policy.workload.clone(),
                networks: config.destination.networks.clone(),
                lookups: Mutex::default(),
                profiles: Mutex::default(),
                endpoints: Mutex::default(),
            }),
        }
    }

    /// Profile and policy of a destination, looked up in parallel unless they are in use already.
    pub(crate) fn look_up(&self, destination: &Destination) -> Arc<Lookup> {
        shared(&self.inner.lookups, destination.clone(), || {
            let inner = &self.inner;
            let (profile_tx, profile) = watch::channel(ProfileState::Pending);
            let (policy_tx, policy) = watch::channel(PolicyState::Pending);
            let has_profile = match destination {
                Destination::Addr(addr) => inner.networks.iter().any(|network| network.contains(&addr.ip())),
                Destination::Name(_) => true,
            };
            let profile_stream = if has_profile {
                let (client, context) = (inner.destination.clone(), inner.context.clone());
                inner.spawn(profile::watch(client, destination.clone(), context, profile_tx))
            } else {
                profile_tx.send_replace(ProfileState::Absent);
                inner.spawn(async move { profile_tx.closed().await })
            };
            let (client, workload) = (inner.policy.clone(), inner.workload.clone());
            let policy_stream = inner.spawn(policy::watch(client, destination.clone(), workload, policy_tx));
            Lookup { profile, policy, _streams: [profile_stream, policy_stream] }
        })
    }

    /// The profile of a destination alone.
    pub(crate) fn profile(&self, destination: &Destination) -> Arc<ProfileLookup> {
        shared(&self.inner.profiles, destination.clone(), || {
            let inner = &self.inner;
            let (tx, profile) = watch::channel(ProfileState::Pending);
            let (client, context) = (inner.destination.clone(), inner.context.clone());
            let stream = inner.spawn(profile::watch(client, destination.clone(), context, tx));
            ProfileLookup { profile, _stream: stream }
        })
    }

    /// The endpoints of a service, by its authority (`web.demo.svc.cluster.local:80`).
    pub(crate) fn endpoints(&self, path: &str) -> Arc<Endpoints> {
        shared(&self.inner.endpoints, path.to_owned(), || {
            let inner = &self.inner;
            let (tx, state) = watch::channel(EndpointsState::Pending);
            let stream =
                inner.spawn(endpoints::watch(inner.destination.clone(), path.to_owned(), inner.context.clone(), tx));
            Endpoints { service: path.to_owned(), state, _stream: stream }
        })
    }
}

#[cfg(test)]
impl Endpoints {
    /// A service's endpoints without a controller, and the sender that changes them.
    pub(crate) fn for_test(set: endpoints::EndpointSet) -> (watch::Sender<EndpointsState>, Self) {
        let (known, state) = watch::channel(EndpointsState::Known(Arc::new(set)));
        let stream = Stream(tokio::spawn(std::future::pending::<()>()).abort_handle());
        (known, Self { service: "server.demo.svc.cluster.local:80".to_owned(), state, _stream: stream })
    }
}

impl Inner {
    fn spawn(&self, stream: impl Future<Output = ()> + Send + 'static) -> Stream {
        Stream(self.runtime.spawn(stream).abort_handle())
    }
}

/// The existing value, if it is still in use, or a new one. Removes values that are no longer in use.
fn shared<K: Eq + Hash, V>(map: &Mutex<HashMap<K, Weak<V>>>, key: K, make: impl FnOnce() -> V) -> Arc<V> {
    let mut map = map.lock();
    if let Some(known) = map.get(&key).and_then(Weak::upgrade) {
        return known;
    }
    map.retain(|_, value| value.strong_count() > 0);
    let value = Arc::new(make());
    map.insert(key, Arc::downgrade(&value));
    value
}
