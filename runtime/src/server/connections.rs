//! The connections of one listener, and which of them is closed when there are too many.
//!
//! A new connection never waits. When its source has as many as one may have, it replaces another of the source; when the
//! listener is full, it replaces one of the source that has most. Candidates are, in this order: connections whose request has not arrived yet or that have none, of these
//! the ones that never finished a request, of these the one that has waited longest. So a flood of silent connections
//! displaces itself, and a client with earlier requests, such as an API server between two reviews, keeps its
//! connection. A connection that is being answered is closed only if the listener is full and its source has more than its
//! share. A source has also a bound on the requests that are being answered, whichever connections they are on.
//!
//! All clients behind the pod's own sidecar count as one source, the sidecar; it has no bounds but the listener's.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::Limits;

/// The open connections of a listener.
#[derive(Debug)]
pub(super) struct Connections {
    limits: Limits,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: HashMap<u64, Entry>,
    sources: HashMap<IpAddr, OfSource>,
    held: usize,
}

/// What one address has.
#[derive(Debug, Default)]
struct OfSource {
    connections: HashSet<u64>,
    /// Number of requests that have not ended.
    requests: usize,
}

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    /// The client's address.
    pub(super) addr: IpAddr,
    /// Whether it is the listener's own: then it is the sidecar, with many clients behind it.
    pub(super) local: bool,
}

#[derive(Debug)]
struct Entry {
    source: Source,
    /// When it was accepted, or when its last request ended.
    since: Instant,
    /// Whether a request has ended.
    served: bool,
    /// Requests whose bodies have not ended, and when they began.
    receiving: BTreeMap<u64, Instant>,
    /// Requests that are being answered, and when they began.
    answering: BTreeMap<u64, Instant>,
    held: usize,
    signals: Arc<Signals>,
}

#[derive(Debug, Default)]
struct Signals {
    evicted: CancellationToken,
    /// Notified when a request begins or ends.
    changed: Notify,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// Another connection replaced it.
    Evicted,
    /// Its first request did not arrive in time.
    Begin,
    /// The body of a request did not end in time.
    Receive,
    /// A response did not end in time.
    Exchange,
    /// No further request arrived in time.
    Idle,
}

/// An admitted connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Connection(Arc<Handle>);

/// The state of an admitted connection, shared with its requests.
#[derive(Debug)]
pub(super) struct Handle {
    connections: Arc<Connections>,
    id: u64,
    signals: Arc<Signals>,
}

/// A request and its response, until it is dropped.
#[derive(Debug)]
pub(super) struct Exchange {
    handle: Arc<Handle>,
    id: u64,
    held: AtomicUsize,
    /// Whether the source had too many requests already.
    excess: bool,
}

impl Connections {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, table: Mutex::default() }
    }

    /// Admits a connection, in another's place if there are too many; `None` if all others are being answered.
    pub(super) fn admit(self: &Arc<Self>, source: Source) -> Option<Connection> {
        let mut table = self.table();
        if !source.local && table.connections_of(source.addr) >= self.limits.source_connections {
            let victim = table.spare_of(source.addr)?;
            table.evict(victim);
        }
        if table.open.len() >= self.limits.connections {
            let victim = table.victim(Some(source.addr))?;
            table.evict(victim);
        }
        table.next += 1;
        let id = table.next;
        table.sources.entry(source.addr).or_default().connections.insert(id);
        let signals = Arc::<Signals>::default();
        let entry = Entry {
            source,
            since: Instant::now(),
            served: false,
            receiving: BTreeMap::new(),
            answering: BTreeMap::new(),
            held: 0,
            signals: signals.clone(),
        };
        table.open.insert(id, entry);
        Some(Connection(Arc::new(Handle { connections: self.clone(), id, signals })))
    }

    /// Closes the least useful connection, if there is one: the process is out of file descriptors.
    pub(super) fn evict_one(&self) {
        let mut table = self.table();
        if let Some(victim) = table.victim(None) {
            table.evict(victim);
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The connection that is closed for a new one.
    fn victim(&self, newcomer: Option<IpAddr>) -> Option<u64> {
        let share = newcomer.map_or(usize::MAX, |newcomer| self.connections_of(newcomer).saturating_add(1));
        let rank = |(id, entry): (&u64, &Entry)| {
            let connections = self.connections_of(entry.source.addr);
            (entry.is_spare() || connections > share).then_some(((connections, entry.rank(*id)), *id))
        };
        self.open.iter().filter_map(rank).max().map(|(_, id)| id)
    }

    /// The connection of a source that is closed for another one of it.
    fn spare_of(&self, source: IpAddr) -> Option<u64> {
        let own = self.sources.get(&source).into_iter().flat_map(|source| &source.connections);
        let spare =
            own.filter_map(|id| self.open.get(id).filter(|entry| entry.is_spare()).map(|entry| (entry.rank(*id), *id)));
        spare.max().map(|(_, id)| id)
    }

    fn connections_of(&self, source: IpAddr) -> usize {
        self.sources.get(&source).map_or(0, |source| source.connections.len())
    }

    fn evict(&mut self, id: u64) {
        if let Some(entry) = self.remove(id) {
            entry.signals.evicted.cancel();
        }
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.open.remove(&id)?;
        self.held -= entry.held;
        let requests = entry.receiving.len() + entry.answering.len();
        if let Some(source) = self.sources.get_mut(&entry.source.addr) {
            source.connections.remove(&id);
            source.requests = source.requests.saturating_sub(requests);
            if source.connections.is_empty() {
                self.sources.remove(&entry.source.addr);
            }
        }
        Some(entry)
    }
}

impl Entry {
    /// Whether no request of it is being answered.
    fn is_spare(&self) -> bool {
        self.answering.is_empty()
    }

    /// Of two connections of a source, the greater one is missed less.
    fn rank(&self, id: u64) -> impl Ord + use<> {
        (self.is_spare(), !self.served, Reverse(self.since), Reverse(id))
    }

    /// When the connection has to close unless something happens, and why.
    fn due(&self, limits: &Limits) -> Option<(Instant, Overdue)> {
        let first = |requests: &BTreeMap<u64, Instant>| requests.first_key_value().map(|(_, since)| *since);
        let (receiving, answering) = (first(&self.receiving), first(&self.answering));
        if receiving.is_none() && answering.is_none() {
            let (limit, why) = if self.served { (limits.idle, Overdue::Idle) } else { (limits.begin, Overdue::Begin) };
            return Some((self.since + limit, why));
        }
        let receive = receiving.map(|since| (since + limits.receive, Overdue::Receive));
        let exchange = receiving.into_iter().chain(answering).min().zip(limits.exchange);
        let exchange = exchange.map(|(since, limit)| (since + limit, Overdue::Exchange));
        receive.into_iter().chain(exchange).min_by_key(|(at, _)| *at)
    }
}

impl Overdue {
    /// The reason, for the log.
    pub(super) const fn reason(self) -> &'static str {
        match self {
            Self::Evicted => "evicted in favour of another connection",
            Self::Begin => "no request in time",
            Self::Receive => "the body of a request did not arrive in time",
            Self::Exchange => "the client did not take its response in time",
            Self::Idle => "idle",
        }
    }
}

impl Connection {
    pub(super) fn handle(&self) -> Arc<Handle> {
        self.0.clone()
    }

    /// Waits until the connection has to close, and returns the reason. Cancel safe.
    pub(super) async fn overdue(&self) -> Overdue {
        let Handle { connections, id, signals } = &*self.0;
        loop {
            let due = match connections.table().open.get(id) {
                Some(entry) => entry.due(&connections.limits),
                None => return Overdue::Evicted,
            };
            let overdue = async {
                match due {
                    Some((at, why)) => {
                        sleep_until(at).await;
                        why
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = signals.evicted.cancelled() => return Overdue::Evicted,
                () = signals.changed.notified() => {}
                why = overdue => return why,
            }
        }
    }

    /// Waits until no request is in progress. Cancel safe.
    pub(super) async fn without_requests(&self) {
        let Handle { connections, id, signals } = &*self.0;
        loop {
            let quiet = connections
                .table()
                .open
                .get(id)
                .is_none_or(|entry| entry.receiving.is_empty() && entry.answering.is_empty());
            if quiet {
                return;
            }
            signals.changed.notified().await;
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.connections.table().remove(self.0.id);
    }
}

impl Handle {
    /// Starts a request.
    pub(super) fn begin(self: &Arc<Self>) -> Exchange {
        let mut guard = self.connections.table();
        let table = &mut *guard;
        table.next += 1;
        let id = table.next;
        let mut excess = false;
        if let Some(entry) = table.open.get_mut(&self.id) {
            entry.receiving.insert(id, Instant::now());
            if let Some(source) = table.sources.get_mut(&entry.source.addr) {
                excess = !entry.source.local && source.requests >= self.connections.limits.source_streams;
                source.requests += 1;
            }
        }
        drop(guard);
        self.signals.changed.notify_one();
        Exchange { handle: self.clone(), id, held: AtomicUsize::new(0), excess }
    }
}

impl Exchange {
    /// Whether the source had too many requests when this one began.
    pub(super) fn is_excess(&self) -> bool {
        self.excess
    }

    /// Counts bytes of the body. False if the connection has to close, because it held most when all together held too
    /// much.
    pub(super) fn receive(&self, bytes: usize) -> bool {
        let Handle { connections, id, .. } = &*self.handle;
        let mut table = connections.table();
        let Some(entry) = table.open.get_mut(id) else { return false };
        entry.held += bytes;
        self.held.fetch_add(bytes, Ordering::Relaxed);
        table.held += bytes;
        while table.held > connections.limits.held_bytes {
            let holds = |(id, entry): (&u64, &Entry)| (entry.answering.is_empty(), entry.held, *id);
            let Some((.., victim)) = table.open.iter().map(holds).max() else { break };
            table.evict(victim);
        }
        table.open.contains_key(id)
    }

    /// Records that the body has ended.
    pub(super) fn received(&self) {
        let mut table = self.handle.connections.table();
        let Some(entry) = table.open.get_mut(&self.handle.id) else { return };
        if let Some(since) = entry.receiving.remove(&self.id) {
            entry.answering.insert(self.id, since);
            drop(table);
            self.handle.signals.changed.notify_one();
        }
    }

    /// Releases the body's bytes.
    pub(super) fn release(&self) {
        let bytes = self.held.swap(0, Ordering::Relaxed);
        let mut table = self.handle.connections.table();
        if let Some(entry) = table.open.get_mut(&self.handle.id) {
            entry.held -= bytes;
            table.held -= bytes;
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.release();
        let mut guard = self.handle.connections.table();
        let table = &mut *guard;
        if let Some(entry) = table.open.get_mut(&self.handle.id) {
            let (received, answered) = (entry.receiving.remove(&self.id), entry.answering.remove(&self.id));
            entry.served = true;
            entry.since = Instant::now();
            if let Some(source) = table.sources.get_mut(&entry.source.addr)
                && received.or(answered).is_some()
            {
                source.requests = source.requests.saturating_sub(1);
            }
        }
        drop(guard);
        self.handle.signals.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ATTACKER: Source = remote(6);
    const API_SERVER: Source = remote(1);

    const fn remote(host: u8) -> Source {
        Source { addr: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, host)), local: false }
    }

    fn full_at(connections: usize) -> Arc<Connections> {
        Arc::new(Connections::new(Limits { connections, held_bytes: 100, ..Limits::WEBHOOK }))
    }

    fn is_open(connection: &Connection) -> bool {
        connection.0.connections.table().open.contains_key(&connection.0.id)
    }

    fn served(connection: &Connection) {
        connection.handle().begin().received();
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_replaces_the_connection_that_is_missed_least() {
        let connections = full_at(3);
        let admit = |source| {
            let connections = connections.clone();
            async move {
                tokio::time::advance(Duration::from_secs(1)).await;
                connections.admit(source)
            }
        };
        let asked_before = admit(ATTACKER).await.unwrap();
        served(&asked_before);
        let older = admit(ATTACKER).await.unwrap();
        let younger = admit(ATTACKER).await.unwrap();
        let newcomer = admit(ATTACKER).await.unwrap();
        assert!(is_open(&asked_before) && is_open(&younger) && is_open(&newcomer), "the oldest silent one goes");
        assert_eq!(older.overdue().await, Overdue::Evicted);
        let being_answered = newcomer.handle().begin();
        being_answered.received();
        let still_arriving = younger.handle().begin();
        let last = admit(ATTACKER).await.unwrap();
        assert!(!is_open(&younger) && is_open(&newcomer), "a request that has not arrived keeps no place");
        drop(still_arriving);
        served(&last);
        let next = admit(ATTACKER).await.unwrap();
        assert!(!is_open(&asked_before) && is_open(&last) && is_open(&next), "the longest idle goes");
    }

    #[tokio::test]
    async fn the_source_with_most_connections_loses_one() {
        let connections = full_at(4);
        let api_server = connections.admit(API_SERVER).unwrap();
        let flood: Vec<_> = (0..3).map(|_| connections.admit(ATTACKER).unwrap()).collect();
        for connection in &flood {
            served(connection);
        }
        let other = connections.admit(API_SERVER).unwrap();
        assert!(is_open(&api_server) && is_open(&other));
        assert_eq!(flood.iter().filter(|connection| is_open(connection)).count(), 2);
    }

    #[tokio::test]
    async fn a_source_has_as_many_connections_as_one_may_and_displaces_only_its_own() {
        let limits = Limits { connections: 9, source_connections: 2, ..Limits::GRPC };
        let connections = Arc::new(Connections::new(limits));
        let (other, silent) = (connections.admit(API_SERVER).unwrap(), connections.admit(ATTACKER).unwrap());
        let busy = connections.admit(ATTACKER).unwrap();
        let exchange = busy.handle().begin();
        exchange.received();
        let next = connections.admit(ATTACKER).unwrap();
        assert!(is_open(&other) && is_open(&busy) && is_open(&next) && !is_open(&silent));
        let another = next.handle().begin();
        another.received();
        assert!(connections.admit(ATTACKER).is_none(), "both are being answered");
        let sidecar = Source { local: true, ..ATTACKER };
        assert!(connections.admit(sidecar).is_some(), "many clients are behind it");
    }

    #[tokio::test]
    async fn requests_of_a_source_are_bounded_over_its_connections_and_free_when_they_end() {
        let connections = Arc::new(Connections::new(Limits { source_streams: 2, ..Limits::GRPC }));
        let (one, two) = (connections.admit(ATTACKER).unwrap(), connections.admit(ATTACKER).unwrap());
        let (first, second) = (one.handle().begin(), two.handle().begin());
        first.received();
        assert!(!first.is_excess() && !second.is_excess());
        let third = two.handle().begin();
        assert!(third.is_excess());
        assert!(!connections.admit(API_SERVER).unwrap().handle().begin().is_excess(), "another source");
        drop((first, third));
        let fourth = one.handle().begin();
        assert!(!fourth.is_excess(), "one has ended");
        // A connection takes its requests with it.
        drop(two);
        assert!(!one.handle().begin().is_excess());
        drop((second, fourth, one));
        assert!(connections.table().sources.is_empty());
        let sidecar = connections.admit(Source { local: true, ..ATTACKER }).unwrap();
        let many: Vec<_> = (0..9).map(|_| sidecar.handle().begin()).collect();
        assert!(many.iter().all(|exchange| !exchange.is_excess()));
    }

    #[tokio::test]
    async fn connections_in_use_go_only_when_their_source_has_more_than_its_share() {
        let connections = full_at(4);
        let flood: Vec<_> = (0..4).map(|_| connections.admit(ATTACKER).unwrap()).collect();
        let exchanges: Vec<_> = flood.iter().map(|connection| connection.handle().begin()).collect();
        exchanges.iter().for_each(Exchange::received);
        assert!(connections.admit(ATTACKER).is_none(), "more than its share");
        let newcomer = connections.admit(API_SERVER).unwrap();
        assert!(is_open(&newcomer) && connections.table().open.len() == 4);
        drop((newcomer, exchanges, flood));
        assert!(connections.table().open.is_empty() && connections.table().sources.is_empty());
    }

    #[tokio::test]
    async fn the_connection_that_holds_most_bytes_goes() {
        let connections = full_at(9);
        let (greedy, modest) = (connections.admit(ATTACKER).unwrap(), connections.admit(ATTACKER).unwrap());
        let (large, small) = (greedy.handle().begin(), modest.handle().begin());
        assert!(large.receive(60) && small.receive(40));
        assert!(small.receive(1), "the other one held more");
        assert!(!is_open(&greedy) && !large.receive(1));
        small.release();
        assert_eq!(connections.table().held, 0);
        assert!(!small.receive(101), "no other connection holds bytes");
        assert!(connections.table().open.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn deadlines_follow_the_requests() {
        let connections = full_at(9);
        let overdue = async |connection: &Connection| {
            let since = Instant::now();
            let why = connection.overdue().await;
            (why, since.elapsed().as_secs())
        };
        let silent = connections.admit(ATTACKER).unwrap();
        assert_eq!(overdue(&silent).await, (Overdue::Begin, 10));
        let idle = connections.admit(ATTACKER).unwrap();
        served(&idle);
        assert_eq!(overdue(&idle).await, (Overdue::Idle, 180));
        let slow = connections.admit(ATTACKER).unwrap();
        let exchange = slow.handle().begin();
        assert_eq!(overdue(&slow).await, (Overdue::Receive, 30));
        exchange.received();
        assert_eq!(overdue(&slow).await, (Overdue::Exchange, 30));
    }
}
