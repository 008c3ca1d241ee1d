//! Inbound policy: one watch per port, kept as long as connections need it.
//!
//! ```text
//! connection -> Policies::port(80) -> watch::Receiver<Arc<ServerPolicy>> <- stream task <- WatchPort <- policy controller
//! ```
//!
//! Connections to a port wait for the controller's first answer, up to a deadline; after that, the default policy
//! applies, or none. The answers for ports that were not used for a while are remembered, so that the last answer also
//! stays in force there while the controller cannot be reached. An answer that cannot be parsed denies. Owns the
//! watches; [`authz::authorize`] decides.

pub(crate) mod authz;
pub(crate) mod convert;
pub(crate) mod limit;
pub(crate) mod server;

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::watch, task::AbortHandle};
use tonic::{Code, Status};
use weft_proto::linkerd::inbound::{PortSpec, inbound_server_policies_client::InboundServerPoliciesClient};
use weft_tls::credentials::Credentials;

use crate::{
    config::{Config, Unanswered},
    control::ControlClient,
    failure_log::LineLimit,
    pauses::Pauses,
    route::Meta,
    shared::Shared,
};

use server::ServerPolicy;

/// The most undeclared ports that are watched at a time, and whose last answers are remembered: enough for any
/// application, while a scan of all ports neither opens 65,535 streams nor stores as many policies.
const UNDECLARED_PORTS: usize = 1024;
/// How many of them one client may use while half of them are used, so that a scan that holds its connections leaves
/// ports to others: a sixteenth, as of the requests in flight ([`crate::in_flight`]).
const UNDECLARED_PORTS_OF_A_CLIENT: usize = UNDECLARED_PORTS / 16;

/// One port's policy and its changes.
pub(crate) type PortPolicy = watch::Receiver<Arc<ServerPolicy>>;

/// All ports' policies. Clones share them.
#[derive(Clone)]
pub(crate) struct Policies {
    inner: Arc<Inner>,
}

struct Inner {
    config: Arc<Config>,
    client: ControlClient,
    /// Without credentials nothing can be requested, so deadlines start with them.
    credentials: watch::Receiver<Option<Arc<Credentials>>>,
    /// The runtime of the streams.
    control: Handle,
    ports: Mutex<Ports>,
    /// Lines about ports for which there is no room.
    refusals: LineLimit,
}

#[derive(Default)]
struct Ports {
    watched: HashMap<u16, Watched>,
    /// Last answers for ports that are no longer watched.
    last: HashMap<u16, Arc<ServerPolicy>>,
}

struct Watched {
    port: Arc<Port>,
    task: AbortHandle,
    /// The client that connected to it first; `None` if the proxy itself follows it.
    client: Option<IpAddr>,
}

/// A watched port.
struct Port {
    number: u16,
    policy: watch::Sender<Arc<ServerPolicy>>,
    /// Whether its policy is an answer of the controller.
    known: AtomicBool,
    /// Whether connections may proceed: the controller has answered, or the deadline has passed.
    settled: watch::Sender<bool>,
}

/// What is lost when an answer is forgotten, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Loss {
    /// Nothing: the settings say the same.
    Nothing,
    /// A default policy that differs from the settings.
    Default,
    /// What a resource says, or a denial because the answer could not be read.
    Server,
}

impl Policies {
    /// Starts watching the configured ports.
    pub(crate) fn new(shared: &Arc<Shared>, client: ControlClient) -> Self {
        Self::with(Arc::new(shared.config.clone()), client, shared.credentials.clone(), shared.control.clone())
    }

    fn with(
        config: Arc<Config>,
        client: ControlClient,
        credentials: watch::Receiver<Option<Arc<Credentials>>>,
        control: Handle,
    ) -> Self {
        let (ports, refusals) = (Mutex::default(), LineLimit::default());
        let inner = Arc::new(Inner { config, client, credentials, control, ports, refusals });
        for port in &inner.config.inbound.ports {
            inner.subscribe(*port, None);
        }
        Self { inner }
    }

    /// The policy of a port that a client connects to, and its changes. Waits for the controller's first answer, up to
    /// the configured deadline.
    pub(crate) async fn port(&self, port: u16, client: IpAddr) -> PortPolicy {
        when_settled(self.inner.subscribe(port, Some(client))).await
    }

    /// The policy of a port and its changes, and whether it may be used: see [`Self::port`], which waits for that.
    pub(crate) fn follow(&self, port: u16) -> (PortPolicy, watch::Receiver<bool>) {
        self.inner.subscribe(port, None)
    }

    /// Waits until every configured port has its first answer, or its deadline has passed.
    pub(crate) async fn settled(&self) {
        for port in &self.inner.config.inbound.ports {
            when_settled(self.follow(*port)).await;
        }
    }
}

/// A port's policy when it may be used.
async fn when_settled((policy, mut settled): (PortPolicy, watch::Receiver<bool>)) -> PortPolicy {
    // An error means that the state can no longer change: the policy is final.
    let _ = settled.wait_for(|settled| *settled).await;
    policy
}

impl Inner {
    fn subscribe(self: &Arc<Self>, number: u16, client: Option<IpAddr>) -> (PortPolicy, watch::Receiver<bool>) {
        let mut ports = self.ports.lock();
        if let Some(Watched { port, .. }) = ports.watched.get(&number) {
            return (port.policy.subscribe(), port.settled.subscribe());
        }
        if !self.is_declared(number) && !self.make_room(&mut ports, client) {
            let client = client.map(tracing::field::display);
            self.refusals.write(|suppressed| {
                tracing::warn!(
                    port = number,
                    client.ip = client,
                    suppressed,
                    "too many ports are in use, denying this one: is the pod being scanned?"
                );
            });
            let denied = ServerPolicy::denied("too-many-ports", self.config.inbound.detect_timeout);
            return (watch::channel(Arc::new(denied)).1, watch::channel(true).1);
        }
        let last = ports.last.remove(&number);
        let known = AtomicBool::new(last.is_some());
        let policy = last.unwrap_or_else(|| Arc::new(self.unanswered(number)));
        let port = Arc::new(Port {
            number,
            policy: watch::Sender::new(policy),
            known,
            settled: watch::Sender::new(self.config.inbound.policy_timeout.is_zero()),
        });
        let subscribed = (port.policy.subscribe(), port.settled.subscribe());
        let task = self.control.spawn(Arc::clone(self).keep(Arc::clone(&port))).abort_handle();
        ports.watched.insert(number, Watched { port, task, client });
        subscribed
    }

    fn is_declared(&self, port: u16) -> bool {
        self.config.inbound.ports.contains(&port)
    }

    /// Policy of a port about which the controller has never sent anything.
    fn unanswered(&self, port: u16) -> ServerPolicy {
        match self.config.inbound.unanswered {
            Unanswered::Default => ServerPolicy::default_for(&self.config, port),
            Unanswered::Deny => ServerPolicy::denied("unanswered", self.config.inbound.detect_timeout),
        }
    }

    /// Makes room for another port, unless the client has its share: a port without connections is removed before its
    /// idle time is over.
    fn make_room(&self, ports: &mut Ports, client: Option<IpAddr>) -> bool {
        let undeclared = ports.watched.len().saturating_sub(self.config.inbound.ports.len());
        if undeclared < UNDECLARED_PORTS / 2 {
            return true;
        }
        let (mut used, mut of_client, mut unused) = (0, 0, None);
        for watched in ports.watched.values().filter(|watched| !self.is_declared(watched.port.number)) {
            if watched.port.policy.receiver_count() == 0 {
                unused = Some(watched);
            } else {
                used += 1;
                of_client += usize::from(watched.client == client);
            }
        }
        if used >= UNDECLARED_PORTS / 2 && of_client >= UNDECLARED_PORTS_OF_A_CLIENT {
            return false;
        }
        if undeclared < UNDECLARED_PORTS {
            return true;
        }
        let Some(Watched { port, task, .. }) = unused else { return false };
        task.abort();
        let port = Arc::clone(port);
        self.forget(ports, &port);
        true
    }

    /// Stops watching a port, unless it is watched anew; its last answer is remembered.
    fn forget(&self, ports: &mut Ports, port: &Arc<Port>) {
        if ports.watched.get(&port.number).is_none_or(|watched| !Arc::ptr_eq(&watched.port, port)) {
            return;
        }
        ports.watched.remove(&port.number);
        if port.known.load(Ordering::Relaxed) {
            self.remember(ports, port.number, port.policy.borrow().clone());
        }
    }

    /// Remembers an answer. Beyond the number that is kept, it takes the place of one with which more would be lost
    /// than with that: a client gets answers without a resource for all ports, by a scan.
    fn remember(&self, ports: &mut Ports, number: u16, policy: Arc<ServerPolicy>) {
        if ports.last.len() >= UNDECLARED_PORTS {
            let unanswered = self.unanswered(number).meta;
            let least = ports.last.iter().map(|(number, policy)| (Loss::of(policy, &unanswered), *number)).min();
            match least {
                Some((loss, number)) if loss < Loss::of(&policy, &unanswered) => drop(ports.last.remove(&number)),
                _ => return,
            }
        }
        ports.last.insert(number, policy);
    }

    /// Follows a port's policy until no connection has needed it for a while.
    async fn keep(self: Arc<Self>, port: Arc<Port>) {
        tokio::select! {
            () = self.follow(&port) => {}
            () = self.unused(&port) => {}
            () = self.settle(&port) => {}
        }
    }

    /// Lets connections proceed if the controller took too long.
    async fn settle(&self, port: &Port) {
        // The sender is gone only when the process ends.
        let _ = self.credentials.clone().wait_for(Option::is_some).await;
        tokio::time::sleep(self.config.inbound.policy_timeout).await;
        if !*port.settled.borrow() {
            tracing::warn!(
                port = port.number,
                server = &*port.policy.borrow().meta.name,
                "the policy controller has not answered in time, using the last or default policy: is it reachable?"
            );
            port.settled.send_replace(true);
        }
        std::future::pending().await
    }

    /// Completes when a port was without connections for the idle timeout. Ports from the settings are never removed.
    async fn unused(&self, port: &Arc<Port>) {
        if self.is_declared(port.number) {
            return std::future::pending().await;
        }
        loop {
            port.policy.closed().await;
            tokio::time::sleep(self.config.inbound.discovery_idle_timeout).await;
            let mut ports = self.ports.lock();
            // Subscribing needs the lock, so no connection can start in between.
            if port.policy.receiver_count() == 0 {
                self.forget(&mut ports, port);
                return;
            }
        }
    }

    async fn follow(&self, port: &Port) {
        let mut client = InboundServerPoliciesClient::new(self.client.clone());
        let mut pauses = Pauses::new();
        loop {
            let spec = PortSpec { workload: self.config.policy.workload.clone(), port: port.number.into() };
            let on_message = |message| self.publish(port, message);
            let status = self.client.read(client.watch_port(spec), &mut pauses, on_message).await;
            match status.code() {
                // The controller has refused the request itself; repeating it changes nothing (Linkerd's rule).
                Code::InvalidArgument | Code::FailedPrecondition => {
                    tracing::warn!(port = port.number, %status, "policy controller refuses to answer for this port, keeping its policy");
                    port.answer();
                    return std::future::pending().await;
                }
                Code::Unimplemented => port.answer(),
                // The answer has arrived, and may deny: nothing laxer may stand in for it.
                _ if is_unreadable(&status) => {
                    tracing::error!(port = port.number, %status, "policy cannot be read, denying every client");
                    let denied = ServerPolicy::denied("invalid-policy", self.config.inbound.detect_timeout);
                    port.policy.send_replace(Arc::new(denied));
                    port.answer();
                }
                _ => {}
            }
            tracing::debug!(port = port.number, %status, "policy stream ended, keeping the last policy");
            self.client.pause(&mut pauses).await;
        }
    }

    fn publish(&self, port: &Port, message: weft_proto::linkerd::inbound::Server) {
        let timeout: Duration = self.config.inbound.detect_timeout;
        port.policy.send_replace(Arc::new(convert::in_force(message, port.number, timeout)));
        port.answer();
    }
}

/// Whether a message has arrived that is larger than the client takes, or no message of this kind. tonic says so with
/// codes that controllers may send, too.
fn is_unreadable(status: &Status) -> bool {
    match status.code() {
        Code::OutOfRange => status.message().starts_with("Error, decoded message length too large"),
        Code::Internal => status.message().starts_with("failed to decode Protobuf message"),
        _ => false,
    }
}

impl Loss {
    /// What is lost with an answer, where `unanswered` is the policy without it.
    fn of(policy: &ServerPolicy, unanswered: &Meta) -> Self {
        match &*policy.meta {
            meta if meta == unanswered => Self::Nothing,
            meta if meta.is_default() && !policy.is_denied() => Self::Default,
            _ => Self::Server,
        }
    }
}

impl Port {
    /// The controller has answered: its last answer is in force.
    fn answer(&self) {
        self.known.store(true, Ordering::Relaxed);
        self.settled.send_replace(true);
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Policies for tests: real messages through the real conversion, without a controller.

    use super::*;

    pub(crate) use super::convert::tests::{anybody, authz, detecting, http_only, only, opaque};

    impl Policies {
        /// Policies of a controller that cannot be reached.
        pub(crate) fn unreachable(config: Config) -> Self {
            let addr = config.policy.control.clone();
            let dns = crate::dns::Dns::new(Default::default()).expect("the host has a resolv.conf");
            let (_, credentials) = watch::channel(None);
            let client =
                ControlClient::new(addr, crate::control::Trust::Credentials(credentials), dns, config.control_streams);
            let (_, credentials) = watch::channel(None);
            Self::with(Arc::new(config), client, credentials, Handle::current())
        }

        /// Applies a message as if the controller had sent it.
        pub(crate) fn publish(&self, port: u16, message: weft_proto::linkerd::inbound::Server) {
            let _subscribed = self.inner.subscribe(port, None);
            let port = Arc::clone(&self.inner.ports.lock().watched[&port].port);
            self.inner.publish(&port, message);
        }
    }
}

#[cfg(test)]
mod tests;
