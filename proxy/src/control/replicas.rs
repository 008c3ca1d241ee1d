//! The replicas of one service: found by DNS, picked by load, resting after failures.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::seq::IndexedRandom as _;
use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use super::{
    Backoff,
    connect::{Connector, Sender, Tls},
    metrics::ServiceMetrics,
};
use crate::dns::{Dns, ResolveError};

/// The shortest time between two resolutions: a record with a TTL of 0 is not resolved for each request, nor a service
/// that has no ready replica.
const RESOLVE_PAUSE: Duration = Duration::from_secs(1);

/// First and longest rest of a replica that failed. While all of them rest, requests wait, so that it is not long: the
/// code that asks has pauses of its own, of up to 10 s.
const REST: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

/// The replicas at one moment.
pub(super) type Set = Arc<[Arc<Replica>]>;

/// The replicas of a service.
pub(super) struct Replicas {
    host: String,
    port: u16,
    dns: Dns,
    metrics: Arc<ServiceMetrics>,
    known: Mutex<Known>,
    /// Held while the name is resolved.
    resolving: Arc<AsyncMutex<()>>,
}

struct Known {
    set: Set,
    /// When to resolve again; `None` means never.
    valid_until: Option<Instant>,
}

/// One replica.
pub(super) struct Replica {
    pub(super) addr: SocketAddr,
    /// Requests and streams that have not ended.
    open: AtomicUsize,
    link: AsyncMutex<Link>,
    rest: Mutex<Rest>,
}

#[derive(Default)]
struct Link {
    sender: Option<Sender>,
    /// When connecting failed last, and why: callers that waited for that attempt share it.
    failed: Option<(Instant, io::ErrorKind, String)>,
}

struct Rest {
    backoff: Backoff,
    until: Option<Instant>,
}

/// A picked replica, counted as busy while this lives.
pub(super) struct Picked {
    pub(super) replica: Arc<Replica>,
}

impl Replicas {
    pub(super) fn new(host: String, port: u16, dns: Dns, metrics: Arc<ServiceMetrics>) -> Arc<Self> {
        let known = Known { set: Arc::new([]), valid_until: Some(Instant::now()) };
        Arc::new(Self { host, port, dns, metrics, known: Mutex::new(known), resolving: Arc::default() })
    }

    /// The replicas that are known. Waits only for the first answer of DNS; later ones arrive in the background.
    pub(super) async fn current(self: &Arc<Self>) -> Result<Set, ResolveError> {
        let (set, is_due) = {
            let known = self.known.lock();
            (Arc::clone(&known.set), known.valid_until.is_some_and(|until| until <= Instant::now()))
        };
        if set.is_empty() {
            let _one = self.resolving.lock().await;
            let set = Arc::clone(&self.known.lock().set);
            return if set.is_empty() { self.resolve().await } else { Ok(set) };
        }
        if is_due {
            self.resolve_in_background();
        }
        Ok(set)
    }

    #[expect(clippy::disallowed_methods, reason = "ends with the look-up, whose time the resolver limits")]
    fn resolve_in_background(self: &Arc<Self>) {
        let Ok(one) = Arc::clone(&self.resolving).try_lock_owned() else { return };
        let replicas = Arc::clone(self);
        tokio::spawn(async move {
            let _one = one;
            if let Err(error) = replicas.resolve().await {
                tracing::debug!(%error, "keeping the replicas of the control plane that are known");
            }
        });
    }

    /// Asks DNS. An error leaves what is known.
    async fn resolve(&self) -> Result<Set, ResolveError> {
        let answer = self.dns.resolve(&self.host, self.port).await;
        let mut known = self.known.lock();
        let soonest = Instant::now() + RESOLVE_PAUSE;
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                known.valid_until = Some(soonest);
                return Err(error);
            }
        };
        known.valid_until = answer.valid_until.map(|until| until.max(soonest));
        let mut addrs = answer.addrs;
        addrs.sort_unstable();
        addrs.dedup();
        if !addrs.iter().eq(known.set.iter().map(|replica| &replica.addr)) {
            let kept = |addr: &SocketAddr| known.set.iter().find(|replica| replica.addr == *addr).cloned();
            let set: Set = addrs.iter().map(|addr| kept(addr).unwrap_or_else(|| Replica::new(*addr))).collect();
            tracing::debug!(service = self.host, replicas = ?addrs, "replicas of the control plane changed");
            known.set = Arc::clone(&set);
            self.metrics.p2c_resets.inc();
            self.metrics.p2c_endpoints.set(gauge(set.len()));
            self.changed(&set);
        }
        Ok(Arc::clone(&known.set))
    }

    /// Resolves anew at the next request.
    pub(super) fn expire(&self) {
        let mut known = self.known.lock();
        let now = Instant::now();
        if known.valid_until.is_some_and(|until| until > now + RESOLVE_PAUSE) {
            known.valid_until = Some(now + RESOLVE_PAUSE);
        }
    }

    /// Publishes how many replicas take requests.
    pub(super) fn changed(&self, set: &Set) {
        let resting = set.iter().filter(|replica| replica.is_resting()).count();
        self.metrics.pending.set(gauge(resting));
        self.metrics.ready.set(gauge(set.len() - resting));
    }
}

/// Picks one of those that were not tried: of two at random that do not rest, the one with fewer open requests. If all
/// of them rest, the one whose rest ends first.
pub(super) fn pick(set: &Set, tried: &[SocketAddr]) -> Option<Picked> {
    let untried = || set.iter().filter(|replica| !tried.contains(&replica.addr));
    let awake: Vec<_> = untried().filter(|replica| !replica.is_resting()).collect();
    let picked = match &*awake {
        [] => untried().min_by_key(|replica| replica.rest.lock().until)?,
        [only] => only,
        several => several.sample(&mut rand::rng(), 2).min_by_key(|replica| replica.open.load(Ordering::Relaxed))?,
    };
    Some(Picked::new(Arc::clone(picked)))
}

impl Replica {
    fn new(addr: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            addr,
            open: AtomicUsize::new(0),
            link: AsyncMutex::default(),
            rest: Mutex::new(Rest { backoff: Backoff::between(REST.0, REST.1), until: None }),
        })
    }

    fn is_resting(&self) -> bool {
        self.rest.lock().until.is_some_and(|until| until > Instant::now())
    }

    /// Waits until the replica has rested, if every other one rests, too.
    pub(super) async fn rested(&self, set: &Set) {
        if set.iter().all(|replica| replica.is_resting()) {
            let until = self.rest.lock().until;
            if let Some(until) = until {
                tokio::time::sleep_until(until).await;
            }
        }
    }

    /// It did not do what it was asked to, and rests.
    pub(super) fn failed(&self) {
        let mut rest = self.rest.lock();
        let now = Instant::now();
        // Requests that fail together are one failure.
        if rest.until.is_none_or(|until| until <= now) {
            rest.until = Some(now + rest.backoff.next());
        }
    }

    /// It has answered.
    pub(super) fn succeeded(&self) {
        let mut rest = self.rest.lock();
        rest.backoff.reset();
        rest.until = None;
    }

    /// The shared connection, opened if there is none. Concurrent callers wait for the same attempt and share its
    /// failure.
    pub(super) async fn connection(&self, connector: &Connector, tls: Option<&Tls>) -> io::Result<Sender> {
        let asked = Instant::now();
        let mut link = self.link.lock().await;
        if let Some(sender) = link.sender.as_mut() {
            if !sender.is_closed() && sender.ready().await.is_ok() {
                return Ok(sender.clone());
            }
            link.sender = None;
        }
        if let Some((at, kind, reason)) = &link.failed
            && *at > asked
        {
            return Err(io::Error::new(*kind, reason.clone()));
        }
        match connector.connect(tls, self.addr).await {
            Ok(sender) => {
                link.failed = None;
                link.sender = Some(sender.clone());
                Ok(sender)
            }
            Err(error) => {
                self.failed();
                link.failed = Some((Instant::now(), error.kind(), error.to_string()));
                Err(error)
            }
        }
    }
}

impl Picked {
    fn new(replica: Arc<Replica>) -> Self {
        replica.open.fetch_add(1, Ordering::Relaxed);
        Self { replica }
    }
}

impl Drop for Picked {
    fn drop(&mut self) {
        self.replica.open.fetch_sub(1, Ordering::Relaxed);
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
