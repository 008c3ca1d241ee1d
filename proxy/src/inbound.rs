//! The inbound side: from any client to the application in this pod, under the port's policy.
//!
//! ```text
//! accept -> original destination --own port--> direct: mTLS, transport header --+
//!              |                                                    |          v
//!              |                                                    +--a name--> gateway -> outbound side
//!              +--other port--> policy -> TLS by SNI -> HTTP detection -> http | tcp -> application at the original address
//! ```
//!
//! Owns one worker's state: TLS configurations, connections to the application. Refuses everything that policy does
//! not allow, and any connection whose original destination is unknown or not this pod's.

mod accept;
pub(crate) mod admin;
mod direct;
mod error;
pub(crate) mod gateway;
mod http;
mod profiles;
mod target;
mod tcp;
pub(crate) mod tls;

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::net::TcpStream;

use crate::{
    discover::Discover,
    failure_log::FailureLog,
    in_flight::SharedLimit,
    listen::{Accepted, Listener, MAX_CONNECTIONS},
    metrics::{Direction, InboundTargets, Labels, Peer, TransportMetrics, label},
    orig_dst::original_dst,
    outbound::Outbound,
    policy::{
        Policies,
        authz::{Client, ClientTls},
    },
    route::Meta,
    shared::Shared,
};

use error::ConnectionError;
use profiles::Profiles;
use target::ApplicationPorts;
use tls::TlsServer;

/// The most kinds of connections whose counters are remembered; beyond it they are looked up again.
const SOURCES: usize = 1024;

/// Serves a connection of which everything is known. A future of its own: the one that finds out is far larger, and is
/// freed before.
type Serving = BoxFuture<'static, Result<(), ConnectionError>>;

/// State that the connections of one worker share.
pub(crate) struct Inbound {
    shared: Arc<Shared>,
    policies: Policies,
    tls: TlsServer,
    targets: ApplicationPorts,
    labels: Arc<InboundTargets>,
    /// Limit of accepted connections.
    connections: SharedLimit,
    /// Limit of requests in flight.
    limit: SharedLimit,
    /// Lines about what failed.
    failures: FailureLog,
    sources: Mutex<HashMap<SourceKey, Arc<TransportMetrics>>>,
    /// What serves connections for names; `None` if this proxy serves none.
    gateway: Option<Outbound>,
    /// ServiceProfiles of the names in requests; `None` if they are not looked up.
    profiles: Option<Profiles>,
}

/// Properties that distinguish the counters of accepted connections.
#[derive(PartialEq, Eq, Hash)]
struct SourceKey {
    target: SocketAddr,
    tls: ClientTls,
    server: Arc<Meta>,
}

/// Accepts until the drain begins. Accepted connections continue.
pub(crate) async fn run(
    shared: Arc<Shared>,
    policies: Policies,
    discover: Discover,
    outbound: Outbound,
    listener: Listener,
) {
    let inbound = Inbound::new(Arc::clone(&shared), policies).with_gateway(outbound).with_profiles(discover);
    let inbound = Arc::new(inbound.sharing(listener.limit()));
    let mut sweep = tokio::time::interval(shared.config.inbound.http1_idle_timeout.max(target::SHORTEST_SWEEP));
    let drained = shared.drain.signaled();
    tokio::pin!(drained);
    loop {
        tokio::select! {
            () = &mut drained => return,
            accepted = listener.accept() => {
                shared.drain.spawn(Arc::clone(&inbound).connection(accepted));
            }
            _ = sweep.tick() => {
                inbound.targets.sweep();
                // Those that no connection uses: their series stay for the retention time, and the cache would keep
                // them for ever.
                inbound.sources.lock().retain(|_, metrics| Arc::strong_count(metrics) > 1);
                inbound.limit.sweep();
                inbound.connections.sweep();
                inbound.profiles.iter().for_each(Profiles::sweep);
            }
        }
    }
}

impl Inbound {
    fn new(shared: Arc<Shared>, policies: Policies) -> Self {
        let labels = Arc::new(shared.metrics.inbound_targets(&shared.config.inbound.ports));
        Self {
            tls: TlsServer::new(shared.credentials.clone()),
            targets: ApplicationPorts::new(Arc::clone(&shared), Arc::clone(&labels), MAX_CONNECTIONS),
            labels,
            policies,
            connections: SharedLimit::new(MAX_CONNECTIONS),
            limit: SharedLimit::new(shared.config.inbound.max_in_flight)
                .of_a_client(shared.config.inbound.max_in_flight_of_a_client),
            failures: FailureLog::default(),
            sources: Mutex::new(HashMap::new()),
            gateway: None,
            profiles: None,
            shared,
        }
    }

    /// The same where clients share at most `limit` connections, and as many to the application.
    fn sharing(mut self, limit: usize) -> Self {
        self.connections = SharedLimit::new(limit);
        self.targets = ApplicationPorts::new(Arc::clone(&self.shared), Arc::clone(&self.labels), limit);
        self
    }

    /// The same as a gateway to `outbound`, if the settings make it one.
    fn with_gateway(mut self, outbound: Outbound) -> Self {
        let is_gateway = !self.shared.config.inbound.gateway_suffixes.is_empty();
        self.gateway = is_gateway.then_some(outbound);
        self
    }

    /// The same with the profiles of names, if the settings have suffixes.
    fn with_profiles(mut self, discover: Discover) -> Self {
        let has_suffixes = !self.shared.config.destination.suffixes.is_empty();
        self.profiles = has_suffixes.then(|| Profiles::new(Arc::clone(&self.shared), discover));
        self
    }

    async fn connection(self: Arc<Self>, accepted: Accepted) {
        let Accepted { stream, peer, permit } = accepted;
        let _permit = permit;
        match original_dst(&stream, peer) {
            Ok(target) => {
                if let Err(error) = self.serve(stream, peer, target).await {
                    self.failed(&error, peer, target);
                }
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, src.addr = %peer, "connection dropped");
            }
        }
    }

    /// Serves one accepted connection with the original destination `target`.
    async fn serve(
        self: &Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        target: SocketAddr,
    ) -> Result<(), ConnectionError> {
        let of_client = self.connections.client(peer.ip());
        let _permit = self.connections.admit_from(&of_client).ok_or(ConnectionError::TooManyConnections)?;
        Box::pin(accept::negotiate(self, stream, peer, target)).await?.await
    }

    fn failed(&self, error: &ConnectionError, peer: SocketAddr, target: SocketAddr) {
        if let Some(value) = error.label() {
            let mut labels = vec![label("error", value)];
            labels.extend(self.labels.labels(target));
            let metrics = &self.shared.metrics;
            metrics.count(&metrics.inbound_tcp_errors, &labels);
        }
        self.failures.connection(error, error.is_expected(), peer, &target);
    }

    /// The counters of accepted connections of one kind.
    fn source(&self, client: &Client, target: SocketAddr, server: &Arc<Meta>) -> Arc<TransportMetrics> {
        let key = SourceKey { target, tls: client.tls.clone(), server: Arc::clone(server) };
        let mut sources = self.sources.lock();
        if let Some(known) = sources.get(&key) {
            return Arc::clone(known);
        }
        let mut labels = self.labels.labels(target);
        client.tls.append_labels(&self.shared.metrics.client_ids, &mut labels);
        self.append_server(server, target, &mut labels);
        let metrics = Arc::new(self.shared.metrics.transport(Direction::Inbound, Peer::Src, &labels));
        if sources.len() >= SOURCES {
            sources.clear();
        }
        sources.insert(key, Arc::clone(&metrics));
        metrics
    }

    /// Appends the labels of the server of a port: `srv_group`, `srv_kind`, `srv_name`, `srv_port`.
    fn append_server(&self, server: &Meta, target: SocketAddr, labels: &mut Labels) {
        server.append_labels("srv", labels);
        labels.push(label("srv_port", self.labels.port(target)));
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
