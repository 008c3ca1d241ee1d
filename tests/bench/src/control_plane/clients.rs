//! The simulated proxies: the streams that a proxy opens for its targets and for itself, on a connection to either
//! service for each proxy, or for several of them, as behind the control plane's sidecar.

mod connection;
mod link;
mod round;

use std::{
    net::{SocketAddr, SocketAddrV4},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{sync::watch, task::JoinSet};

use super::{
    args::Args,
    objects::{POD_PORT, PORT, Plan},
    wire::{self, Addressed, Method},
    world::Service,
};
use connection::{Connection, Spec};
use link::Pace;
pub(super) use round::{Answers, Round};

/// Time for every stream of all clients to have its first answer.
const ANSWERED_WITHIN: Duration = Duration::from_secs(600);
/// One client of this many stops reading, or reads slowly.
const STALLED_STEP: u32 = 10;
/// Files that are not connections of clients.
const OTHER_FILES: u64 = 256;

/// All simulated proxies.
pub(super) struct Clients {
    count: u32,
    /// Clients that share a connection.
    per_connection: u32,
    /// Time between two openings of connections.
    pause: Duration,
    /// Clients that have each Service as target, by its number.
    subscribers: Vec<Vec<u32>>,
    specs: Vec<Specs>,
    shared: Arc<Shared>,
    pace: watch::Sender<Pace>,
    connections: JoinSet<()>,
}

/// Streams of one client, by service.
struct Specs {
    destination: Arc<[Spec]>,
    policy: Arc<[Spec]>,
}

/// What all connections count.
#[derive(Default)]
struct Shared {
    arrivals: Mutex<Vec<Arrival>>,
    messages: AtomicU64,
    /// Messages to clients that do not read.
    stalled_messages: AtomicU64,
    bytes: AtomicU64,
    lost_connections: AtomicU64,
    ended_streams: AtomicU64,
    last_problem: Mutex<Option<String>>,
}

/// An address in a message to one client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) client: u32,
    pub(super) what: Addressed,
    pub(super) at: Instant,
}

/// Counters of all clients together.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pub(super) messages: u64,
    pub(super) stalled_messages: u64,
    /// Bytes of HTTP/2 DATA.
    pub(super) bytes: u64,
    pub(super) lost_connections: u64,
    pub(super) ended_streams: u64,
    /// Why the last connection or stream ended.
    pub(super) last_problem: Option<String>,
}

impl Clients {
    /// Plans the clients; nothing is connected yet. The first pods are theirs.
    ///
    /// # Errors
    /// The process may not open as many files.
    pub(super) fn new(plan: &Plan, services: &[Service], args: &Args) -> anyhow::Result<Self> {
        let (count, targets, per_connection) = (args.clients, args.targets, args.clients_per_connection.max(1));
        raise_file_limit(2 * u64::from(count.div_ceil(per_connection)) + OTHER_FILES)?;
        let mut subscribers = vec![Vec::new(); services.len()];
        let mut specs = Vec::new();
        for client in 0..count {
            let targets = targets_of(client, targets, plan.size.services);
            for target in &targets {
                let of_target: &mut Vec<u32> = subscribers.get_mut(*target as usize).context("no such Service")?;
                of_target.push(client);
            }
            specs.push(Specs::new(plan, services, client, &targets)?);
        }
        let (shared, pace) = (Arc::new(Shared::default()), watch::Sender::new(Pace::Full));
        let pause = Duration::from_secs(args.open_seconds.into()) / count.div_ceil(per_connection).max(1);
        Ok(Self { count, per_connection, pause, subscribers, specs, shared, pace, connections: JoinSet::new() })
    }

    /// Number of streams to each service.
    pub(super) fn streams(&self) -> [u64; 2] {
        let count = |of: fn(&Specs) -> &Arc<[Spec]>| self.specs.iter().map(|specs| of(specs).len() as u64).sum();
        [count(|specs| &specs.destination), count(|specs| &specs.policy)]
    }

    /// Closes every connection, opens all again, at once unless there is a pause, and waits until every stream has its
    /// first answer. The time counts from the close. The addresses are those of destination and policy.
    ///
    /// # Errors
    /// Some streams have no answer in time.
    pub(super) async fn open(&mut self, addresses: [SocketAddr; 2]) -> anyhow::Result<Answers> {
        let round = Arc::new(Round::new(self.streams().iter().sum()));
        self.close().await;
        let clients: Vec<_> = (0..self.count).zip(&self.specs).collect();
        for together in clients.chunks(self.per_connection as usize) {
            for (index, address) in addresses.into_iter().enumerate() {
                let of = |specs: &Specs| [&specs.destination, &specs.policy][index].clone();
                let specs = together.iter().map(|(client, specs)| (*client, of(specs))).collect();
                let disturbed = together.iter().any(|(client, _)| is_stalling(*client));
                let pace = (disturbed && self.per_connection == 1).then(|| self.pace.subscribe());
                let (shared, round) = (self.shared.clone(), round.clone());
                self.connections.spawn(Connection { address, specs, shared, round, pace }.run());
            }
            if !self.pause.is_zero() {
                tokio::time::sleep(self.pause).await;
            }
        }
        let complete = tokio::time::timeout(ANSWERED_WITHIN, round.complete()).await;
        complete.ok().with_context(|| {
            let problem = self.counts().last_problem.unwrap_or_else(|| "no error was reported".to_owned());
            format!("{} streams have no answer within {ANSWERED_WITHIN:?}: {problem}", round.pending())
        })?;
        Ok(round.answers())
    }

    /// Closes every connection.
    pub(super) async fn close(&mut self) {
        self.pace.send_replace(Pace::Full);
        self.connections.shutdown().await;
    }

    /// One client in ten stops reading: the windows of its streams are set to 0, and no data is acknowledged. Its
    /// connections still answer pings.
    pub(super) fn stall(&self) {
        self.pace.send_replace(Pace::Stalled);
    }

    /// One client in ten reads [`link::TRICKLE`] bytes a second from its socket, whatever they are.
    pub(super) fn slow_down(&self) {
        self.pace.send_replace(Pace::Trickle);
    }

    /// Number of clients that [`Self::stall`] stops and [`Self::slow_down`] slows down.
    pub(super) fn stalling(&self) -> u32 {
        (0..self.count).filter(|client| is_stalling(*client)).count() as u32
    }

    /// Services that some client has as target.
    pub(super) fn subscribed<'a>(&self, services: &'a [Service]) -> Vec<&'a Service> {
        let has_subscriber = |service: &&Service| !self.subscribers_of(service.number).is_empty();
        services.iter().filter(has_subscriber).collect()
    }

    /// Clients that have a Service as target.
    pub(super) fn subscribers_of(&self, service: u32) -> &[u32] {
        self.subscribers.get(service as usize).map_or(&[], Vec::as_slice)
    }

    /// What arrived since the last call.
    pub(super) fn take_arrivals(&self) -> Vec<Arrival> {
        std::mem::take(&mut *self.shared.arrivals.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Number of arrivals since they were last taken.
    pub(super) fn arrived(&self) -> usize {
        self.shared.arrivals.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(super) fn counts(&self) -> Counts {
        let shared = &self.shared;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            messages: read(&shared.messages),
            stalled_messages: read(&shared.stalled_messages),
            bytes: read(&shared.bytes),
            lost_connections: read(&shared.lost_connections),
            ended_streams: read(&shared.ended_streams),
            last_problem: shared.last_problem.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

impl Specs {
    fn new(plan: &Plan, services: &[Service], client: u32, targets: &[u32]) -> anyhow::Result<Self> {
        let (token, workload) = (plan.context_token(client), plan.workload(client));
        let (mut destination, mut policy) = (Vec::new(), Vec::new());
        for target in targets {
            let service = services.get(*target as usize).context("no such Service")?;
            let dialled = SocketAddrV4::new(service.cluster_ip, PORT);
            let name = format!("{}.{}.svc.cluster.local:{PORT}", Plan::service_name(*target), plan.namespace(*target));
            let spec = |method, request| Spec { method, request, has_answer: true };
            // About a Service without endpoints, the first message is empty, and older versions send none.
            let has_answer = service.has_endpoints;
            destination.push(Spec { has_answer, ..spec(Method::Get, wire::get(&name, &token)) });
            destination.push(spec(Method::GetProfile, wire::get_profile(dialled, &token)));
            policy.push(spec(Method::OutboundWatch, wire::outbound_watch(dialled, &workload)));
        }
        let request = wire::watch_port(&workload, POD_PORT);
        policy.push(Spec { method: Method::WatchPort, request, has_answer: true });
        Ok(Self { destination: destination.into(), policy: policy.into() })
    }
}

impl Counts {
    /// Those since an earlier time.
    pub(super) fn since(self, before: &Self) -> Self {
        let lost_connections = self.lost_connections.saturating_sub(before.lost_connections);
        let ended_streams = self.ended_streams.saturating_sub(before.ended_streams);
        Self {
            messages: self.messages.saturating_sub(before.messages),
            stalled_messages: self.stalled_messages.saturating_sub(before.stalled_messages),
            bytes: self.bytes.saturating_sub(before.bytes),
            lost_connections,
            ended_streams,
            last_problem: self.last_problem.filter(|_| lost_connections + ended_streams > 0),
        }
    }
}

/// Whether a client is one of those that stop reading.
pub(super) fn is_stalling(client: u32) -> bool {
    client.is_multiple_of(STALLED_STEP)
}

/// Targets of a client: all Services have the same number of clients, if it divides.
fn targets_of(client: u32, targets: u32, services: u32) -> Vec<u32> {
    let first = u64::from(client) * u64::from(targets);
    (first..first + u64::from(targets)).map(|number| (number % u64::from(services)) as u32).collect()
}

/// Raises the soft limit on open files to the hard one.
fn raise_file_limit(wanted: u64) -> anyhow::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).context("raise the limit on open files")?;
    anyhow::ensure!(
        maximum.is_none_or(|maximum| maximum >= wanted),
        "the clients need {wanted} open files and the limit is {}: raise it (ulimit -Hn), or use fewer --clients",
        maximum.unwrap_or_default()
    );
    Ok(())
}

#[cfg(test)]
mod served_tests;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn targets_of_a_client_differ_and_every_service_has_as_many_clients() {
        let mut clients = vec![0; 100];
        for client in 0..200 {
            let targets = targets_of(client, 10, 100);
            assert_eq!(targets.iter().collect::<HashSet<_>>().len(), 10);
            targets.iter().for_each(|target| clients[*target as usize] += 1);
        }
        assert!(clients.iter().all(|count| *count == 20), "{clients:?}");
    }

    #[test]
    fn one_client_in_ten_stalls() {
        assert_eq!((0..100).filter(|client| is_stalling(*client)).count(), 10);
    }

    #[test]
    fn a_problem_counts_only_if_it_is_new() {
        let before = Counts { ended_streams: 2, last_problem: Some("old".to_owned()), ..Counts::default() };
        assert_eq!(before.clone().since(&before).last_problem, None);
        let after = Counts { ended_streams: 3, ..before.clone() };
        assert_eq!(after.since(&before).last_problem.as_deref(), Some("old"));
    }
}
