//! Picks an endpoint of a service: the less loaded of two random ones. Load is peak latency (EWMA) times requests in
//! flight.
//!
//! Owns availability (an endpoint that refuses connections backs off, longer each time; one whose responses fail is
//! ejected, see `breaker`) and fail-fast (if none was available for 3 s, requests fail at once until one is). Refuses
//! to connect: it returns endpoints. One balancer belongs to one worker.

pub(super) mod breaker;
mod ewma;
mod fail_fast;
mod in_flight;
mod search;

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use rand::RngExt as _;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use super::endpoint::{ConnectError, Endpoint, refuses_plaintext};
use crate::{
    config::OutboundConfig,
    discover::{
        Endpoints,
        endpoints::EndpointsState,
        route::{Accrual, Load},
    },
    metrics::{BalancerKind, BalancerMetrics, Labels},
    request::backoff::Backoff,
    shared::Shared,
};

use breaker::{Breaker, Change, Report};
use ewma::Ewma;
use fail_fast::FailFast;
pub(crate) use in_flight::InFlight;
pub(crate) use search::Search;

/// The longest pause after failed connections, so that no setting overflows a time: a day.
const LONGEST_PAUSE: Duration = Duration::from_secs(86_400);

/// Why no endpoint is picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SelectError {
    /// None was available in time.
    #[error("no endpoint of the service is available")]
    FailFast,
    /// Mutual TLS is required, and no endpoint has an identity; one of them.
    #[error("refusing plaintext to {0}: it has no identity, and weft.io/require-mtls is set")]
    PlaintextRefused(SocketAddr),
    /// As many wait for one as may.
    #[error("too many wait for an endpoint of the service")]
    QueueFull,
}

/// A request that waits for an endpoint.
struct Waiting<'a> {
    pool: &'a PoolState,
    since: Instant,
}

/// Why no endpoint is picked now.
enum Unready {
    /// None is available; when the first becomes available again, if that is known.
    Until(Option<Instant>),
    /// None may be used.
    Refused(SocketAddr),
}

/// A service's endpoints with their loads.
pub(crate) struct Balancer {
    shared: Arc<Shared>,
    discovered: Arc<Endpoints>,
    load: Load,
    accrual: Option<Arc<Accrual>>,
    state: Mutex<State>,
    /// How many may wait for an endpoint.
    capacity: usize,
    pool: Arc<PoolState>,
}

/// What the endpoints of a balancer share.
struct PoolState {
    /// Looked up when the balancer is used: policies name many that never are.
    metrics: LazyLock<BalancerMetrics, LookUp>,
    fail_fast: FailFast,
    /// Wakes what waits: an endpoint becomes available, or fail-fast begins.
    woken: Notify,
    endpoints: AtomicUsize,
    ejected: AtomicUsize,
    /// How many wait for an endpoint.
    waiting: AtomicUsize,
}

type LookUp = Box<dyn FnOnce() -> BalancerMetrics + Send>;

struct State {
    changes: watch::Receiver<EndpointsState>,
    endpoints: Vec<Arc<Balanced>>,
    /// Whether there has been a list of endpoints.
    is_known: bool,
    /// An endpoint that is not among them, because it would be sent plaintext.
    refused: Option<SocketAddr>,
}

/// One endpoint and its state.
pub(crate) struct Balanced {
    /// The endpoint to connect to.
    pub(crate) endpoint: Arc<Endpoint>,
    rtt: Mutex<Ewma>,
    in_flight: AtomicU32,
    rest: Mutex<Rest>,
    /// The pauses after failed connections.
    backoff: Backoff,
    /// Deadline for the connection that probes an endpoint after its rest.
    probe: Duration,
    breaker: Option<Mutex<Breaker>>,
    /// Whether its responses change its load or availability.
    is_judged: bool,
    min_ready: usize,
    pool: Arc<PoolState>,
}

/// How long an endpoint that failed is not used.
#[derive(Debug, Default)]
struct Rest {
    until: Option<Instant>,
    /// Attempts that failed since a connection worked.
    failures: u32,
    /// Whether the rest is over and one connection probes the endpoint; for others it continues until the result is
    /// known.
    probing: bool,
}

impl Balancer {
    /// Creates a balancer over discovered endpoints.
    pub(crate) fn new(
        shared: Arc<Shared>,
        kind: BalancerKind,
        labels: Labels,
        discovered: Arc<Endpoints>,
        load: Load,
        accrual: Option<Arc<Accrual>>,
    ) -> Self {
        let outbound = &shared.config.outbound;
        let queue = if kind == BalancerKind::Http { outbound.http_queue } else { outbound.tcp_queue };
        let of = Arc::clone(&shared);
        let look_up = move || of.metrics.balancer(kind, &labels, queue.failfast_timeout);
        let fail_fast = FailFast::new(discovered.service.clone(), queue.failfast_timeout);
        let mut changes = discovered.state.clone();
        changes.mark_changed();
        Self {
            shared,
            discovered,
            load,
            accrual,
            state: Mutex::new(State { changes, endpoints: Vec::new(), is_known: false, refused: None }),
            capacity: queue.capacity,
            pool: Arc::new(PoolState::new(Box::new(look_up), fail_fast)),
        }
    }

    /// Picks an endpoint, waiting for one to be available until the deadline of the search; `avoided` only if no other
    /// is available.
    ///
    /// # Errors
    /// When none is available, or none was recently, or too many wait already.
    pub(crate) async fn select(&self, deadline: Instant, avoided: Option<&Balanced>) -> Result<InFlight, SelectError> {
        if let Ok(selected) = self.try_select(avoided) {
            self.pool.metrics.waited(Duration::ZERO);
            return Ok(selected);
        }
        let waiting = Waiting::begin(&self.pool, self.capacity).ok_or(SelectError::QueueFull)?;
        let selected = Box::pin(self.wait(deadline, avoided)).await;
        waiting.pool.metrics.waited(waiting.since.elapsed());
        selected
    }

    async fn wait(&self, deadline: Instant, avoided: Option<&Balanced>) -> Result<InFlight, SelectError> {
        let mut changes = self.discovered.state.clone();
        loop {
            changes.mark_unchanged();
            let woken = self.pool.woken.notified();
            let wake = match self.try_select(avoided) {
                Ok(selected) => return Ok(selected),
                Err(Unready::Until(wake)) => wake,
                Err(Unready::Refused(addr)) => return Err(SelectError::PlaintextRefused(addr)),
            };
            if self.is_failing_fast() {
                return Err(SelectError::FailFast);
            }
            let until = wake.map_or(deadline, |wake| wake.min(deadline));
            tokio::select! {
                changed = changes.changed() => changed.map_err(|_| SelectError::FailFast)?,
                () = woken => {}
                () = tokio::time::sleep_until(until) => {
                    if Instant::now() >= deadline {
                        self.pool.fail_fast.enter(&self.pool.metrics);
                        // The others fail with this one, whenever they came.
                        self.pool.woken.notify_waiters();
                        return Err(SelectError::FailFast);
                    }
                }
            }
        }
    }

    /// Whether the control plane has said which endpoints there are.
    pub(crate) fn is_known(&self) -> bool {
        matches!(*self.discovered.state.borrow(), EndpointsState::Known(_))
    }

    /// Waits until [`Self::is_known`].
    pub(crate) async fn known(&self) {
        let mut changes = self.discovered.state.clone();
        if changes.wait_for(|state| matches!(state, EndpointsState::Known(_))).await.is_err() {
            // The stream's task ends after its balancers.
            std::future::pending().await
        }
    }

    /// Whether requests that find no endpoint fail at once.
    pub(crate) fn is_failing_fast(&self) -> bool {
        self.pool.fail_fast.is_active()
    }

    /// Waits until [`Self::is_failing_fast`].
    pub(crate) async fn failing_fast(&self) {
        loop {
            let woken = self.pool.woken.notified();
            if self.is_failing_fast() {
                return;
            }
            woken.await;
        }
    }

    /// Whether it knows an endpoint, be it one that rests.
    pub(crate) fn has_endpoints(&self) -> bool {
        !self.current().endpoints.is_empty()
    }

    /// Whether an endpoint can be picked right now.
    pub(crate) fn is_available(&self) -> bool {
        let state = self.current();
        let now = Instant::now();
        state.endpoints.iter().any(|endpoint| endpoint.blocked_until(now).is_none())
    }

    /// Whether an endpoint that does not come from a rest can be picked right now.
    pub(crate) fn is_reachable(&self) -> bool {
        let state = self.current();
        let now = Instant::now();
        state.endpoints.iter().any(|endpoint| !endpoint.rests() && endpoint.blocked_until(now).is_none())
    }

    /// Closes connections that were idle for too long.
    pub(crate) fn purge_idle(&self) {
        for balanced in &self.state.lock().endpoints {
            balanced.endpoint.purge_idle();
        }
    }

    /// Picks among the available endpoints; if there is none, returns when the first becomes available again.
    fn try_select(&self, avoided: Option<&Balanced>) -> Result<InFlight, Unready> {
        let now = Instant::now();
        let state = self.current();
        let endpoints = &state.endpoints;
        let (first, second) = match endpoints.len() {
            0 => return Err(state.refused.map_or(Unready::Until(None), Unready::Refused)),
            1 => (0, 0),
            count => {
                let mut random = rand::rng();
                let first = random.random_range(0..count);
                let second = random.random_range(0..count - 1);
                (first, if second >= first { second + 1 } else { second })
            }
        };
        let is_available = |index: usize| endpoints[index].blocked_until(now).is_none();
        let is_avoided = |index: usize| avoided.is_some_and(|avoided| std::ptr::eq(avoided, &*endpoints[index]));
        let available = |index: usize| (is_available(index) && !is_avoided(index)).then_some(index);
        let is_cheaper = |one: usize, other: usize| endpoints[one].cost(now) < endpoints[other].cost(now);
        let picked = match (available(first), available(second)) {
            (Some(first), Some(second)) if first != second && is_cheaper(second, first) => Some(second),
            (Some(index), _) | (None, Some(index)) => Some(index),
            // Both are blocked: with many endpoints that is rare, so a scan for the least loaded is affordable.
            (None, None) => (0..endpoints.len())
                .filter(|index| available(*index).is_some())
                .min_by(|a, b| endpoints[*a].cost(now).total_cmp(&endpoints[*b].cost(now)))
                .or_else(|| (0..endpoints.len()).find(|index| is_available(*index))),
        };
        match picked {
            Some(index) => Ok(InFlight::start(Arc::clone(&endpoints[index]), now)),
            None => Err(Unready::Until(endpoints.iter().filter_map(|endpoint| endpoint.blocked_until(now)).min())),
        }
    }

    /// The state, with what discovery knows by now.
    fn current(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        self.reconcile(&mut state);
        state
    }

    /// Applies changes of discovery; unchanged endpoints keep their connections and loads.
    fn reconcile(&self, state: &mut State) {
        if !state.changes.has_changed().unwrap_or(false) {
            return;
        }
        let EndpointsState::Known(set) = state.changes.borrow_and_update().clone() else { return };
        let before = state.endpoints.len();
        let old: HashMap<SocketAddr, Arc<Balanced>> =
            std::mem::take(&mut state.endpoints).into_iter().map(|known| (known.endpoint.info.addr, known)).collect();
        let config = &self.shared.config;
        state.refused = set.values().find(|info| refuses_plaintext(config, info)).map(|info| info.addr);
        state.endpoints = set
            .values()
            .filter(|info| !refuses_plaintext(config, info))
            .map(|info| match old.get(&info.addr).filter(|known| *known.endpoint.info == **info) {
                Some(known) => Arc::clone(known),
                None => Arc::new(Balanced::new(
                    Arc::new(Endpoint::new(Arc::clone(&self.shared), Arc::clone(info), Some(&self.discovered.service))),
                    self.load,
                    self.accrual.clone(),
                    &self.shared.config.outbound,
                    Arc::clone(&self.pool),
                )),
            })
            .collect();
        let now = state.endpoints.len();
        self.pool.endpoints.store(now, Ordering::Relaxed);
        let is_same =
            |known: &Arc<Balanced>| old.get(&known.endpoint.info.addr).is_some_and(|was| Arc::ptr_eq(was, known));
        let changed = state.endpoints.iter().filter(|known| !is_same(known)).count();
        let kept = state.endpoints.iter().filter(|known| old.contains_key(&known.endpoint.info.addr)).count();
        let metrics = &self.pool.metrics;
        metrics.endpoints.inc_by(gauge(now) - gauge(before));
        if std::mem::replace(&mut state.is_known, true) {
            metrics.added.inc_by(changed as u64);
            metrics.removed.inc_by((old.len() - kept) as u64);
        } else {
            metrics.reset.inc();
        }
    }
}

impl PoolState {
    fn new(look_up: LookUp, fail_fast: FailFast) -> Self {
        Self {
            metrics: LazyLock::new(look_up),
            fail_fast,
            woken: Notify::new(),
            endpoints: AtomicUsize::new(0),
            ejected: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        }
    }
}

impl Balanced {
    fn new(
        endpoint: Arc<Endpoint>,
        load: Load,
        accrual: Option<Arc<Accrual>>,
        config: &OutboundConfig,
        pool: Arc<PoolState>,
    ) -> Self {
        pool.metrics.ready.inc();
        let now = Instant::now();
        Self {
            endpoint,
            is_judged: accrual.is_some() || load.penalty.is_some(),
            min_ready: accrual.as_ref().and_then(|accrual| accrual.min_ready.try_into().ok()).unwrap_or(0),
            breaker: accrual.map(|accrual| Mutex::new(Breaker::new(accrual, now))),
            rtt: Mutex::new(Ewma::new(load, now)),
            in_flight: AtomicU32::new(0),
            rest: Mutex::default(),
            backoff: Backoff { min: config.backoff_min, max: config.backoff_max, jitter: config.backoff_jitter },
            probe: config.connect_timeout,
            pool,
        }
    }

    /// How many requests wait for their response, or how many connections there are.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    fn cost(&self, now: Instant) -> f64 {
        let in_flight = f64::from(self.in_flight.load(Ordering::Relaxed));
        self.rtt.lock().estimate(now) * (in_flight + 1.0)
    }

    /// Whether its last attempt to connect failed: it rests, or is to be probed.
    fn rests(&self) -> bool {
        self.rest.lock().until.is_some()
    }

    fn rests_until(&self, now: Instant) -> Option<Instant> {
        self.rest.lock().until.filter(|until| *until > now)
    }

    /// Until when the endpoint gets no requests, if it gets none.
    fn blocked_until(&self, now: Instant) -> Option<Instant> {
        let ejected = self.breaker.as_ref().and_then(|breaker| breaker.lock().blocked_until(now));
        self.rests_until(now).max(ejected)
    }

    /// Records how a request ended.
    fn report(&self, report: &Report) {
        let now = Instant::now();
        if let Report::Answered { answer, .. } = report {
            self.rtt.lock().penalize(answer, now);
        }
        let Some(breaker) = &self.breaker else { return };
        let ready =
            self.pool.endpoints.load(Ordering::Relaxed).saturating_sub(self.pool.ejected.load(Ordering::Relaxed));
        let change = breaker.lock().report(report, now, ready > self.min_ready, rand::rng().random());
        match change {
            Some(Change::Ejected) => {
                tracing::info!(dst.addr = %self.endpoint.info.addr, "endpoint is ejected, its responses fail");
                self.pool.ejected.fetch_add(1, Ordering::Relaxed);
                self.pool.metrics.ejected();
            }
            Some(Change::Restored) => {
                tracing::info!(dst.addr = %self.endpoint.info.addr, "endpoint gets requests again");
                self.pool.ejected.fetch_sub(1, Ordering::Relaxed);
                self.pool.metrics.restored();
                self.pool.woken.notify_waiters();
            }
            // The end of a probe lets waiters compute when the next is due.
            None => self.pool.woken.notify_waiters(),
        }
    }

    /// Records that the end of a probe will not be known.
    fn abandoned(&self) {
        let was_awaited = self.breaker.as_ref().is_some_and(|breaker| breaker.lock().abandoned(Instant::now()));
        if was_awaited {
            self.pool.woken.notify_waiters();
        }
    }

    /// Records that the endpoint was picked; after its rest, only this connection may probe it, and after an ejection
    /// only this request. Returns whether the request is such a probe.
    fn picked(&self, now: Instant) -> bool {
        let is_probe = self.breaker.as_ref().is_some_and(|breaker| breaker.lock().picked(now));
        let mut rest = self.rest.lock();
        rest.probing = rest.until.is_some();
        if rest.probing {
            rest.until = Some(now + self.probe);
        } else {
            // What probes an endpoint after its rest may fail, and ends fail-fast when it is connected.
            self.pool.fail_fast.exit(&self.pool.metrics);
        }
        is_probe
    }

    /// Records how an attempt to connect ended. A connection ends the rest, but not the count of failures: HTTP/2 may
    /// fail on it before there is a response.
    pub(crate) fn connected<T>(&self, connected: &Result<T, ConnectError>) {
        match connected {
            Ok(_) => self.end_rest(&mut self.rest.lock()),
            Err(error) if error.is_local() => self.untried(),
            Err(error) => self.failed(error),
        }
    }

    /// Records that a connection failed: the endpoint backs off, each time twice as long, with a line in the log, whose
    /// level and words are Linkerd's (`linkerd/reconnect`).
    pub(crate) fn failed(&self, error: &ConnectError) {
        let now = Instant::now();
        let mut rest = self.rest.lock();
        if !rest.probing && rest.until.is_some_and(|until| until > now) {
            // Another request has noticed already; only a new attempt lengthens the rest.
            return;
        }
        tracing::warn!(%error, dst.addr = %self.endpoint.info.addr, "Failed to connect");
        if rest.until.is_none() {
            self.pool.metrics.ejected();
        }
        rest.failures = rest.failures.saturating_add(1);
        let pause = self.backoff.pause(rest.failures, rand::rng().random());
        rest.until = Some(now + pause.min(LONGEST_PAUSE));
        rest.probing = false;
    }

    /// Records that no connection could be tried, by no fault of the endpoint's. If it was to probe the endpoint, the
    /// next one is.
    fn untried(&self) {
        let mut rest = self.rest.lock();
        if std::mem::take(&mut rest.probing) {
            rest.until = Some(Instant::now());
            self.pool.woken.notify_waiters();
        }
    }

    /// Records that a connection works.
    pub(crate) fn recovered(&self) {
        let mut rest = self.rest.lock();
        rest.failures = 0;
        self.end_rest(&mut rest);
    }

    fn end_rest(&self, rest: &mut Rest) {
        if rest.until.take().is_some() {
            rest.probing = false;
            self.pool.metrics.restored();
            self.pool.fail_fast.exit(&self.pool.metrics);
            self.pool.woken.notify_waiters();
        }
    }
}

/// A number of endpoints in a gauge.
fn gauge(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl<'a> Waiting<'a> {
    /// `None` if `capacity` wait already.
    fn begin(pool: &'a PoolState, capacity: usize) -> Option<Self> {
        // One worker has a balancer, so nothing begins to wait in between.
        if pool.waiting.load(Ordering::Relaxed) >= capacity {
            return None;
        }
        pool.waiting.fetch_add(1, Ordering::Relaxed);
        pool.metrics.waiting.inc();
        Some(Self { pool, since: Instant::now() })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.pool.waiting.fetch_sub(1, Ordering::Relaxed);
        self.pool.metrics.waiting.dec();
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        let known = self.state.get_mut().endpoints.len();
        if known > 0 {
            self.pool.metrics.endpoints.dec_by(gauge(known));
        }
    }
}

impl Drop for Balanced {
    fn drop(&mut self) {
        let metrics = &self.pool.metrics;
        // An endpoint that backs off and is ejected counts as pending twice, and as ready once less.
        if self.rest.get_mut().until.is_some() {
            metrics.restored();
        }
        if self.breaker.as_mut().is_some_and(|breaker| breaker.get_mut().is_ejected()) {
            metrics.restored();
            self.pool.ejected.fetch_sub(1, Ordering::Relaxed);
        }
        metrics.ready.dec();
    }
}

#[cfg(test)]
mod tests;
