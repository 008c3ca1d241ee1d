//! The connections of one listener, and which of them is closed when there are too many.
//!
//! A new connection never waits. When its source has as many as one may have, it replaces another of the source; when
//! the listener is full, it replaces one of the source that has most. Candidates are, in this order: connections whose
//! request has not arrived yet or that have none, of these the ones that never had an answer other than an error of the
//! client's, of these the ones that never finished a request, of these the one that has waited longest. So a flood of
//! silent connections, or of requests that are refused, displaces itself, and a client with earlier requests, such as
//! an API server between two reviews, keeps its connection. A connection that is being answered is closed only if the
//! listener is full and its source has more than its share. A source has also a bound on the requests that are being
//! answered, whichever connections they are on.
//!
//! All clients behind the pod's own sidecar count as one source, the sidecar; it has no bounds but the listener's.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    Limits,
    clock::PeerClock,
    gate::{Gate, Member},
};

/// The shortest wait for a deadline: the clock of a connection may stand until then.
const TICK: Duration = Duration::from_millis(10);

/// The open connections of a listener.
#[derive(Debug)]
pub(super) struct Connections {
    limits: Limits,
    table: Mutex<Table>,
    gate: Mutex<Gate>,
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
    /// Whether one was answered with something else than an error of the client's.
    useful: bool,
    /// Requests whose bodies have not ended.
    receiving: BTreeMap<u64, Begun>,
    /// Requests that are being answered, and when they began.
    answering: BTreeMap<u64, Instant>,
    held: usize,
    signals: Arc<Signals>,
}

/// When a request began.
#[derive(Clone, Copy, Debug)]
struct Begun {
    at: Instant,
    /// What the connection's clock had counted.
    counted: Duration,
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
    member: Member,
    clock: Arc<PeerClock>,
    /// Whether a read has found something since the connection's turn began.
    read: AtomicBool,
}

/// A request and its response, until it is dropped.
#[derive(Debug)]
pub(super) struct Exchange {
    handle: Arc<Handle>,
    id: u64,
    held: AtomicUsize,
    /// Whether the source had too many requests already.
    excess: bool,
    /// Whether the answer is something else than an error of the client's.
    useful: AtomicBool,
    stage: Mutex<Stage>,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// This process has not looked at what has arrived.
    Untaken,
    /// Its client owes the rest of it.
    Owed,
    /// This process has all of it, and has not begun to answer.
    Received,
    /// Nothing; the response may go on.
    Answered,
}

impl Connections {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, table: Mutex::default(), gate: Mutex::new(Gate::new(limits.waiting)) }
    }

    /// Admits a connection, in another's place if there are too many; `None` if all others are being answered.
    pub(super) fn admit(self: &Arc<Self>, source: Source) -> Option<Connection> {
        let mut table = self.table.lock();
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
            useful: false,
            receiving: BTreeMap::new(),
            answering: BTreeMap::new(),
            held: 0,
            signals: signals.clone(),
        };
        table.open.insert(id, entry);
        let member = if source.local { Member::Sidecar(id) } else { Member::Address(source.addr) };
        let (connections, clock, read) = (self.clone(), Arc::default(), AtomicBool::new(false));
        Some(Connection(Arc::new(Handle { connections, id, signals, member, clock, read })))
    }

    /// Closes the least useful connection, if there is one: the process is out of file descriptors.
    pub(super) fn evict_one(&self) {
        let mut table = self.table.lock();
        if let Some(victim) = table.victim(None) {
            table.evict(victim);
        }
    }
}

impl Table {
    /// The connection that is closed for a new one.
    fn victim(&self, source: Option<IpAddr>) -> Option<u64> {
        let share = source.map_or(usize::MAX, |source| self.connections_of(source).saturating_add(1));
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
        (self.is_spare(), !self.useful, !self.served, Reverse(self.since), Reverse(id))
    }

    /// How long the connection may stay unless something happens, and why not longer. What a peer has to do in time
    /// counts by the connection's clock.
    fn due(&self, limits: &Limits, counted: Duration) -> Option<(Duration, Overdue)> {
        let begun = self.receiving.first_key_value().map(|(_, begun)| *begun);
        let answering = self.answering.first_key_value().map(|(_, since)| *since);
        if begun.is_none() && answering.is_none() {
            return Some(if self.served {
                (limits.idle.saturating_sub(self.since.elapsed()), Overdue::Idle)
            } else {
                (limits.begin.saturating_sub(counted), Overdue::Begin)
            });
        }
        let receive = begun.map(|begun| ((begun.counted + limits.receive).saturating_sub(counted), Overdue::Receive));
        let exchange = begun.map(|begun| begun.at).into_iter().chain(answering).min().zip(limits.exchange);
        let exchange = exchange.map(|(since, limit)| (limit.saturating_sub(since.elapsed()), Overdue::Exchange));
        receive.into_iter().chain(exchange).min_by_key(|(left, _)| *left)
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
        let Handle { connections, id, signals, clock, .. } = &*self.0;
        loop {
            let due = match connections.table.lock().open.get(id) {
                Some(entry) => entry.due(&connections.limits, clock.elapsed()),
                None => return Overdue::Evicted,
            };
            let passed = async {
                match due {
                    Some((left, _)) => sleep(left.max(TICK)).await,
                    None => std::future::pending().await,
                }
            };
            match due {
                Some((Duration::ZERO, why)) => return why,
                _ => tokio::select! {
                    biased;
                    () = signals.evicted.cancelled() => return Overdue::Evicted,
                    () = signals.changed.notified() => {}
                    () = passed => {}
                },
            }
        }
    }

    /// Waits until no request is in progress. Cancel safe.
    pub(super) async fn without_requests(&self) {
        let Handle { connections, id, signals, .. } = &*self.0;
        loop {
            let quiet = connections
                .table
                .lock()
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
        let Handle { connections, id, member, .. } = &*self.0;
        connections.table.lock().remove(*id);
        let granted = connections.gate.lock().ended(*member, *id);
        granted.wake();
    }
}

impl Handle {
    /// What the connection's deadlines for its peer count.
    pub(super) fn clock(&self) -> &Arc<PeerClock> {
        &self.clock
    }

    /// Waits until there is room for what a read brings.
    pub(super) fn poll_turn(&self, cx: &Context<'_>) -> Poll<()> {
        let may_read = self.connections.gate.lock().may_read(self.member, self.id, cx.waker());
        if may_read { Poll::Ready(()) } else { Poll::Pending }
    }

    /// The connection's task has its turn.
    pub(super) fn begin_turn(&self) {
        self.read.store(false, Ordering::Relaxed);
    }

    /// Whether the connection was read from in this turn, and something was there.
    pub(super) fn has_read_in_turn(&self) -> bool {
        self.read.load(Ordering::Relaxed)
    }

    /// Records that the connection was read from, and whether something was there.
    pub(super) fn has_read(&self, something: bool) {
        self.read.store(something, Ordering::Relaxed);
        let granted = self.connections.gate.lock().has_read(self.id);
        granted.wake();
    }

    /// Starts a request.
    pub(super) fn begin(self: &Arc<Self>) -> Exchange {
        let mut guard = self.connections.table.lock();
        let table = &mut *guard;
        table.next += 1;
        let id = table.next;
        let mut excess = false;
        if let Some(entry) = table.open.get_mut(&self.id) {
            entry.receiving.insert(id, Begun { at: Instant::now(), counted: self.clock.elapsed() });
            if let Some(source) = table.sources.get_mut(&entry.source.addr) {
                excess = !entry.source.local && source.requests >= self.connections.limits.source_streams;
                source.requests += 1;
            }
        }
        drop(guard);
        self.signals.changed.notify_one();
        self.clock.request_arrived();
        self.connections.gate.lock().waits(self.member);
        let stage = Mutex::new(Stage::Untaken);
        let (held, useful) = (AtomicUsize::new(0), AtomicBool::new(false));
        Exchange { handle: self.clone(), id, held, excess, useful, stage }
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
        let mut table = connections.table.lock();
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

    /// Records that the client owes the rest of the body.
    pub(super) fn owed(&self) {
        self.enter(Stage::Owed);
    }

    /// Records that more of the body has arrived.
    pub(super) fn arrived(&self) {
        self.enter(Stage::Untaken);
    }

    /// Records that the answer is something else than an error of the client's.
    pub(super) fn has_use(&self) {
        self.useful.store(true, Ordering::Relaxed);
    }

    /// Records that the answer begins, and releases the body's bytes.
    pub(super) fn answered(&self) {
        self.enter(Stage::Answered);
        self.release();
    }

    fn enter(&self, next: Stage) {
        let Handle { connections, member, clock, .. } = &*self.handle;
        let mut stage = self.stage.lock();
        let last = *stage;
        // What was received owes nothing, and what was answered waits for nothing.
        if last == next || last == Stage::Answered || last == Stage::Received && next != Stage::Answered {
            return;
        }
        *stage = next;
        if next == Stage::Untaken {
            clock.request_arrived();
        } else if last == Stage::Untaken {
            clock.request_taken();
        }
        let waits = |stage| matches!(stage, Stage::Untaken | Stage::Received);
        let granted = match (waits(last), waits(next)) {
            (true, false) => connections.gate.lock().waits_no_longer(*member),
            (false, true) => {
                connections.gate.lock().waits(*member);
                return;
            }
            _ => return,
        };
        drop(stage);
        granted.wake();
    }

    /// Records that the body has ended.
    pub(super) fn received(&self) {
        self.enter(Stage::Received);
        let mut table = self.handle.connections.table.lock();
        let Some(entry) = table.open.get_mut(&self.handle.id) else { return };
        if let Some(begun) = entry.receiving.remove(&self.id) {
            entry.answering.insert(self.id, begun.at);
            drop(table);
            self.handle.signals.changed.notify_one();
        }
    }

    /// Releases the body's bytes.
    fn release(&self) {
        let bytes = self.held.swap(0, Ordering::Relaxed);
        let mut table = self.handle.connections.table.lock();
        if let Some(entry) = table.open.get_mut(&self.handle.id) {
            entry.held -= bytes;
            table.held -= bytes;
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.answered();
        let mut guard = self.handle.connections.table.lock();
        let table = &mut *guard;
        if let Some(entry) = table.open.get_mut(&self.handle.id) {
            let (received, answered) = (entry.receiving.remove(&self.id), entry.answering.remove(&self.id));
            entry.served = true;
            entry.useful |= self.useful.load(Ordering::Relaxed);
            entry.since = Instant::now();
            if let Some(source) = table.sources.get_mut(&entry.source.addr)
                && (received.is_some() || answered.is_some())
            {
                source.requests = source.requests.saturating_sub(1);
            }
        }
        drop(guard);
        self.handle.signals.changed.notify_one();
    }
}

#[cfg(test)]
mod tests;
