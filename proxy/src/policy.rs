//! Inbound policy: one watch per port, kept as long as somebody needs it.
//!
//! ```text
//! connection -> Policies::port(80) -> watch::Receiver<Arc<ServerPolicy>> <- stream task <- WatchPort <- policy controller
//! ```
//!
//! A port has the default policy until the controller's first answer, so that nobody ever waits. An answer that cannot be read
//! denies; a controller that cannot be reached leaves the last answer in force. Owns the watches; the decision is
//! [`authz::authorize`]'s.

pub(crate) mod authz;
mod convert;
pub(crate) mod filter;
pub(crate) mod limit;
pub(crate) mod server;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::Code;
use weft_proto::linkerd::inbound::PortSpec;
use weft_proto::linkerd::inbound::inbound_server_policies_client::InboundServerPoliciesClient;

use crate::config::Config;
use crate::control::{Backoff, ControlClient};
use crate::shared::Shared;

use server::ServerPolicy;

/// One port's policy as it changes.
pub(crate) type PortPolicy = watch::Receiver<Arc<ServerPolicy>>;
type PortPolicySender = Arc<watch::Sender<Arc<ServerPolicy>>>;

/// All ports' policies. Clones share them.
#[derive(Clone)]
pub(crate) struct Policies {
    inner: Arc<Inner>,
}

struct Inner {
    config: Arc<Config>,
    client: ControlClient,
    /// Where the streams run.
    control: Handle,
    ports: Mutex<HashMap<u16, PortPolicySender>>,
}

impl Policies {
    /// Starts watching the configured ports.
    pub(crate) fn new(shared: &Arc<Shared>, client: ControlClient) -> Self {
        Self::with(Arc::new(shared.config.clone()), client, shared.control.clone())
    }

    fn with(config: Arc<Config>, client: ControlClient, control: Handle) -> Self {
        let inner = Arc::new(Inner { config, client, control, ports: Mutex::new(HashMap::new()) });
        for port in &inner.config.inbound.ports {
            inner.subscribe(*port);
        }
        Self { inner }
    }

    /// The policy of a port, from now on. Never waits: what is not known yet is the default.
    pub(crate) fn port(&self, port: u16) -> PortPolicy {
        self.inner.subscribe(port)
    }
}

impl Inner {
    fn subscribe(self: &Arc<Self>, port: u16) -> PortPolicy {
        let mut ports = self.ports.lock();
        if let Some(known) = ports.get(&port) {
            return known.subscribe();
        }
        let (sender, receiver) = watch::channel(Arc::new(ServerPolicy::default_for(&self.config, port)));
        let sender = Arc::new(sender);
        ports.insert(port, Arc::clone(&sender));
        self.control.spawn(Arc::clone(self).keep(port, sender));
        receiver
    }

    /// Follows a port's policy until nobody has needed it for a while.
    async fn keep(self: Arc<Self>, port: u16, sender: PortPolicySender) {
        tokio::select! {
            () = self.follow(port, &sender) => {}
            () = self.unused(port, &sender) => {}
        }
    }

    /// Ends when a port was without connections for the idle timeout. Ports from the settings are never forgotten.
    async fn unused(&self, port: u16, sender: &PortPolicySender) {
        if self.config.inbound.ports.contains(&port) {
            return std::future::pending().await;
        }
        loop {
            sender.closed().await;
            tokio::time::sleep(self.config.inbound.discovery_idle_timeout).await;
            let mut ports = self.ports.lock();
            // Whoever subscribes holds the lock, so that nobody can come in between.
            if sender.receiver_count() == 0 {
                ports.remove(&port);
                return;
            }
        }
    }

    async fn follow(&self, port: u16, sender: &PortPolicySender) {
        let mut client = InboundServerPoliciesClient::new(self.client.clone());
        let mut backoff = Backoff::new();
        loop {
            let spec = PortSpec { workload: self.config.policy.workload.clone(), port: port.into() };
            let ended = match client.watch_port(spec).await {
                Ok(response) => {
                    let mut stream = response.into_inner();
                    loop {
                        match stream.message().await {
                            Ok(Some(message)) => {
                                backoff.reset();
                                self.publish(port, message, sender);
                            }
                            Ok(None) => break None,
                            Err(status) => break Some(status),
                        }
                    }
                }
                Err(status) => Some(status),
            };
            match ended {
                // The controller has judged the question itself; asking again changes nothing (Linkerd's rule).
                Some(status) if matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition) => {
                    tracing::warn!(port, %status, "policy controller refuses to answer for this port, keeping its policy");
                    return std::future::pending().await;
                }
                Some(status) => tracing::debug!(port, %status, "policy stream failed, keeping the last policy"),
                None => tracing::debug!(port, "policy stream ended, keeping the last policy"),
            }
            backoff.pause().await;
        }
    }

    fn publish(&self, port: u16, message: weft_proto::linkerd::inbound::Server, sender: &PortPolicySender) {
        let timeout: Duration = self.config.inbound.detect_timeout;
        let policy = convert::server(message, timeout).unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::error!(port, error, "policy cannot be read, denying everybody: do controller and proxy fit?");
            ServerPolicy::invalid(timeout)
        });
        sender.send_replace(Arc::new(policy));
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Policies for tests: real messages through the real conversion, without a controller.

    use super::*;

    pub(crate) use super::convert::tests::{anybody, authz, detecting, only, opaque};

    impl Policies {
        /// Policies of a controller that cannot be reached.
        pub(crate) fn unreachable(config: Config) -> Self {
            let addr = config.policy.control.clone();
            let dns = crate::dns::Dns::new(Default::default()).expect("the host has a resolv.conf");
            let (_, credentials) = watch::channel(None);
            let client = ControlClient::new(addr, crate::control::Trust::Credentials(credentials), dns);
            Self::with(Arc::new(config), client, Handle::current())
        }

        /// What the controller would do by sending this.
        pub(crate) fn publish(&self, port: u16, message: weft_proto::linkerd::inbound::Server) {
            drop(self.port(port));
            let sender = Arc::clone(&self.inner.ports.lock()[&port]);
            self.inner.publish(port, message, &sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::server::Protocol;
    use super::testing::{anybody, authz, detecting, opaque};
    use super::*;

    #[tokio::test]
    async fn a_port_has_the_default_policy_until_the_first_answer() {
        let policies = Policies::unreachable(crate::inbound::testing::config());
        let mut port = policies.port(8080);
        assert_eq!(&*port.borrow_and_update().meta.name, "all-unauthenticated");
        policies.publish(8080, opaque(vec![authz("a", anybody())]));
        port.changed().await.unwrap();
        assert!(matches!(port.borrow().protocol, Protocol::Opaque));
    }

    #[tokio::test]
    async fn an_unreadable_answer_denies_and_a_readable_one_heals() {
        let policies = Policies::unreachable(crate::inbound::testing::config());
        let port = policies.port(8080);
        let mut broken = detecting(vec![authz("a", anybody())]);
        broken.protocol = None;
        policies.publish(8080, broken);
        assert!(port.borrow().authorizations.is_empty());
        policies.publish(8080, detecting(vec![authz("a", anybody())]));
        assert_eq!(port.borrow().authorizations.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn unused_ports_are_forgotten_and_configured_ones_are_not() {
        let mut config = crate::inbound::testing::config();
        config.inbound.ports = vec![80];
        config.inbound.discovery_idle_timeout = Duration::from_secs(90);
        let policies = Policies::unreachable(config);
        drop(policies.port(8080));
        let held = policies.port(8081);
        tokio::time::sleep(Duration::from_secs(200)).await;
        let mut known: Vec<u16> = policies.inner.ports.lock().keys().copied().collect();
        known.sort_unstable();
        assert_eq!(known, [80, 8081]);
        drop(held);
    }
}
