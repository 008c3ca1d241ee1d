//! The connections of one listener, and which of them is closed when there are too many.
//!
//! A new connection never waits. When the listener is full, it replaces another one. Candidates are the connections of
//! the source that has most, in this order: connections whose request has not arrived yet or that have none, of these
//! the ones that never finished a request, of these the one that has waited longest. So a flood of silent connections
//! displaces itself, and a client with earlier requests, such as an API server between two reviews, keeps its
//! connection. A connection that is being answered is closed only if its source has more than its share.
//!
//! All clients behind the pod's own sidecar count as one source, the sidecar.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
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
    /// Number of connections by source.
    sources: HashMap<IpAddr, usize>,
    held: usize,
}

#[derive(Debug)]
struct Entry {
    source: IpAddr,
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
}

impl Connections {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, table: Mutex::default() }
    }

    /// Admits a connection, in another's place if there are too many; `None` if all others are being answered.
    pub(super) fn admit(self: &Arc<Self>, source: IpAddr) -> Option<Connection> {
        let mut table = self.table();
        if table.open.len() >= self.limits.connections {
            let victim = table.victim(Some(source))?;
            table.evict(victim);
        }
        table.next += 1;
        let id = table.next;
        *table.sources.entry(source).or_default() += 1;
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
        let connections_of = |source: &IpAddr| self.sources.get(source).copied().unwrap_or_default();
        let share = newcomer.map_or(usize::MAX, |newcomer| connections_of(&newcomer).saturating_add(1));
        let rank = |(id, entry): (&u64, &Entry)| {
            let connections = connections_of(&entry.source);
            let spare = entry.answering.is_empty();
            (spare || connections > share)
                .then_some(((connections, spare, !entry.served, Reverse(entry.since), Reverse(*id)), *id))
        };
        self.open.iter().filter_map(rank).max().map(|(_, id)| id)
    }

    fn evict(&mut self, id: u64) {
        if let Some(entry) = self.remove(id) {
            entry.signals.evicted.cancel();
        }
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.open.remove(&id)?;
        self.held -= entry.held;
        if let Some(connections) = self.sources.get_mut(&entry.source) {
            *connections -= 1;
            if *connections == 0 {
                self.sources.remove(&entry.source);
            }
        }
        Some(entry)
    }
}

impl Entry {
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
        let mut table = self.connections.table();
        table.next += 1;
        let id = table.next;
        if let Some(entry) = table.open.get_mut(&self.id) {
            entry.receiving.insert(id, Instant::now());
        }
        drop(table);
        self.signals.changed.notify_one();
        Exchange { handle: self.clone(), id, held: AtomicUsize::new(0) }
    }
}

impl Exchange {
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
        let mut table = self.handle.connections.table();
        if let Some(entry) = table.open.get_mut(&self.handle.id) {
            entry.receiving.remove(&self.id);
            entry.answering.remove(&self.id);
            entry.served = true;
            entry.since = Instant::now();
        }
        drop(table);
        self.handle.signals.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ATTACKER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 6));
    const API_SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

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
