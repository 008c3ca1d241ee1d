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
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::Instant,
};

use super::{
    connect::{Connector, Sender, Tls},
    metrics::ServiceMetrics,
};
use crate::{
    dns::{Dns, ResolveError},
    pauses::Pauses,
};

/// The shortest time between two resolutions: a record with a TTL of 0 is not resolved for each request, nor a service
/// that has no ready replica.
const RESOLVE_PAUSE: Duration = Duration::from_secs(1);

/// First and longest time between two resolutions while all replicas have failed. One that is replaced is back within
/// seconds, and found as soon; when a controller stays away, the proxies of a whole mesh ask, and each of them asks
/// seldom.
const OUTAGE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

/// First and longest rest of a replica that failed. While all of them rest, requests wait, so that it is not long: the
/// code that asks has pauses of its own, of up to 10 s.
const REST: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

/// How long others are preferred to a replica that takes requests and answers none, as while its process starts. It
/// does not rest, so that no request waits for it; a rest would be over before the next request is given up.
const AVOIDED: Duration = Duration::from_secs(30);

/// The replicas at one moment.
pub(super) type Set = Arc<[Arc<Replica>]>;

/// The replicas of a service.
pub(super) struct Replicas {
    host: String,
    port: u16,
    dns: Dns,
    metrics: Arc<ServiceMetrics>,
    set: watch::Sender<Set>,
    lookup: Mutex<Lookup>,
    /// Held while the name is resolved.
    resolving: Arc<AsyncMutex<()>>,
}

/// When the name was resolved, and when it will be.
struct Lookup {
    /// The earliest time of the next one.
    soonest: Instant,
    /// When the answer is out of date; `None` means never.
    valid_until: Option<Instant>,
    /// Times between resolutions while all replicas have failed.
    outage: Pauses,
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
    pauses: Pauses,
    until: Option<Instant>,
    /// Until when others are preferred.
    avoided: Option<Instant>,
}

/// A picked replica, counted as busy while this lives.
pub(super) struct Picked {
    pub(super) replica: Arc<Replica>,
    /// When a request that has no answer counts as unanswered, if it is given up.
    overdue: Option<Instant>,
}

impl Replicas {
    pub(super) fn new(host: String, port: u16, dns: Dns, metrics: Arc<ServiceMetrics>) -> Arc<Self> {
        let lookup = Mutex::new(Lookup::new(Instant::now()));
        Arc::new(Self { host, port, dns, metrics, set: watch::Sender::default(), lookup, resolving: Arc::default() })
    }

    /// The replicas that are known. Waits only for the first answer of DNS; later ones arrive in the background.
    pub(super) async fn current(self: &Arc<Self>) -> Result<Set, ResolveError> {
        let set = self.known();
        if set.is_empty() {
            let _one = self.resolving.lock().await;
            let set = self.known();
            return if set.is_empty() { self.resolve().await } else { Ok(set) };
        }
        self.resolve_if_due();
        Ok(set)
    }

    /// The replicas of the last answer of DNS, none before the first.
    pub(super) fn known(&self) -> Set {
        Arc::clone(&self.set.borrow())
    }

    /// Waits until the service has other replicas than these. If all of these failed, DNS is asked again and again,
    /// whatever its TTL says, with pauses that grow ([`OUTAGE`]): a replica that is replaced has another address.
    pub(super) async fn replaced(self: &Arc<Self>, old: &Set) -> Set {
        let mut sets = self.set.subscribe();
        loop {
            {
                let set = sets.borrow_and_update();
                if !Arc::ptr_eq(&set, old) {
                    return Arc::clone(&set);
                }
            }
            let next = (Instant::now() + RESOLVE_PAUSE).max(self.lookup.lock().soonest);
            // The sender lives as long as `self`.
            let is_quiet = tokio::time::timeout_at(next, sets.changed()).await.is_err();
            if is_quiet && have_failed(old) {
                self.expire();
                self.resolve_if_due();
            }
        }
    }

    #[expect(clippy::disallowed_methods, reason = "ends with the look-up, whose time the resolver limits")]
    fn resolve_if_due(self: &Arc<Self>) {
        let is_due = self.lookup.lock().valid_until.is_some_and(|until| until <= Instant::now());
        let Some(one) = is_due.then(|| Arc::clone(&self.resolving).try_lock_owned().ok()).flatten() else { return };
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
        let failed = {
            let known = self.known();
            let is_other =
                |addrs: &[SocketAddr]| addrs.iter().any(|addr| known.iter().all(|known| known.addr != *addr));
            have_failed(&known) && !answer.as_ref().is_ok_and(|answer| is_other(&answer.addrs))
        };
        let valid_until = answer.as_ref().map_or(Some(Instant::now()), |answer| answer.valid_until);
        self.lookup.lock().answered(Instant::now(), valid_until, failed);
        let mut addrs = answer?.addrs;
        addrs.sort_unstable();
        addrs.dedup();
        let known = self.known();
        if !addrs.iter().eq(known.iter().map(|replica| &replica.addr)) {
            let kept = |addr: &SocketAddr| known.iter().find(|replica| replica.addr == *addr).cloned();
            let set: Set = addrs.iter().map(|addr| kept(addr).unwrap_or_else(|| Replica::new(*addr))).collect();
            tracing::debug!(service = self.host, replicas = ?addrs, "replicas of the control plane changed");
            self.metrics.p2c_resets.inc();
            self.metrics.p2c_endpoints.set(gauge(set.len()));
            self.changed(&set);
            self.set.send_replace(set);
        }
        Ok(self.known())
    }

    /// Resolves anew at the next request, and not from a cache.
    pub(super) fn expire(&self) {
        self.dns.forget();
        let mut lookup = self.lookup.lock();
        let soonest = lookup.soonest;
        lookup.valid_until = lookup.valid_until.map(|until| until.min(soonest));
    }

    /// Publishes how many replicas take requests.
    pub(super) fn changed(&self, set: &Set) {
        let resting = set.iter().filter(|replica| replica.is_resting()).count();
        self.metrics.pending.set(gauge(resting));
        self.metrics.ready.set(gauge(set.len() - resting));
    }
}

/// Whether there are replicas and none of them answers.
fn have_failed(set: &Set) -> bool {
    !set.is_empty() && set.iter().all(|replica| replica.has_failed())
}

/// Picks one of those that were not tried and do not rest, and avoids none if it can: of two at random the one with
/// fewer open requests. If all of them rest, the one whose rest ends first.
pub(super) fn pick(set: &Set, tried: &[SocketAddr]) -> Option<Picked> {
    let untried = || set.iter().filter(|replica| !tried.contains(&replica.addr));
    let mut awake: Vec<_> = untried().filter(|replica| !replica.is_resting()).collect();
    if awake.iter().any(|replica| !replica.is_avoided()) {
        awake.retain(|replica| !replica.is_avoided());
    }
    let two = awake.sample(&mut rand::rng(), 2).copied();
    let picked = two
        .min_by_key(|replica| replica.open.load(Ordering::Relaxed))
        .or_else(|| untried().min_by_key(|replica| replica.rest.lock().until))?;
    Some(Picked::new(Arc::clone(picked)))
}

impl Lookup {
    fn new(now: Instant) -> Self {
        Self { soonest: now, valid_until: Some(now), outage: Pauses::between(OUTAGE.0, OUTAGE.1) }
    }

    /// DNS has answered, or failed to. `failed` says that no replica answers and DNS knows no other.
    fn answered(&mut self, now: Instant, valid_until: Option<Instant>, failed: bool) {
        let pause = if failed {
            self.outage.next()
        } else {
            self.outage.reset();
            RESOLVE_PAUSE
        };
        self.soonest = now + pause;
        self.valid_until = valid_until.map(|until| until.max(self.soonest));
    }
}

impl Replica {
    fn new(addr: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            addr,
            open: AtomicUsize::new(0),
            link: AsyncMutex::default(),
            rest: Mutex::new(Rest { pauses: Pauses::between(REST.0, REST.1), until: None, avoided: None }),
        })
    }

    fn is_resting(&self) -> bool {
        self.rest.lock().until.is_some_and(|until| until > Instant::now())
    }

    fn is_avoided(&self) -> bool {
        self.rest.lock().avoided.is_some_and(|until| until > Instant::now())
    }

    /// Whether it failed and has not answered since.
    fn has_failed(&self) -> bool {
        self.rest.lock().until.is_some()
    }

    /// Waits until the replica has rested, if every other one rests, too.
    async fn rested(&self, set: &Set) {
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
            rest.until = Some(now + rest.pauses.next());
        }
    }

    /// It has answered.
    pub(super) fn succeeded(&self) {
        let mut rest = self.rest.lock();
        rest.pauses.reset();
        (rest.until, rest.avoided) = (None, None);
    }

    /// The shared connection, opened if there is none, after the replica's rest if all of the set rest. Concurrent
    /// callers wait for the same attempt and share its failure.
    pub(super) async fn connection(&self, set: &Set, connector: &Connector, tls: Option<&Tls>) -> io::Result<Sender> {
        self.rested(set).await;
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
        Self { replica, overdue: None }
    }

    /// A request is sent. If it is given up without an answer after `patience`, others are preferred to the replica.
    pub(super) fn asked(&mut self, patience: Duration) {
        self.overdue = Some(Instant::now() + patience);
    }

    /// The request has an answer, or an error.
    pub(super) fn answered(&mut self) {
        self.overdue = None;
    }
}

impl Drop for Picked {
    fn drop(&mut self) {
        self.replica.open.fetch_sub(1, Ordering::Relaxed);
        let now = Instant::now();
        if self.overdue.is_some_and(|overdue| overdue <= now) {
            self.replica.rest.lock().avoided = Some(now + AVOIDED);
        }
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds after the beginning of an outage at which each of many proxies asks DNS, if all of them asked at 0.
    fn questions(proxies: usize, seconds: u64) -> Vec<Vec<f64>> {
        let began = Instant::now();
        let end = began + Duration::from_secs(seconds);
        let of_one = || {
            let mut lookup = Lookup::new(began);
            let mut asked = Vec::new();
            while lookup.soonest < end {
                asked.push((lookup.soonest - began).as_secs_f64());
                let now = lookup.soonest;
                lookup.answered(now, Some(now), true);
            }
            asked
        };
        (0..proxies).map(|_| of_one()).collect()
    }

    #[test]
    fn proxies_without_a_controller_ask_dns_soon_and_then_seldom_and_not_together() {
        let all = questions(1000, 120);
        assert!(all.iter().all(|asked| (1.0..=2.0).contains(&asked[1])), "a replica that was replaced is found soon");
        let longest = all.iter().flat_map(|asked| asked.windows(2).map(|two| two[1] - two[0])).fold(0.0, f64::max);
        assert!(longest <= OUTAGE.1.as_secs_f64(), "{longest}");
        let mut by_second = [0; 120];
        for at in all.iter().flatten() {
            by_second[*at as usize] += 1;
        }
        // Each asks every 7.5 s on average: 133 in a second.
        assert!(by_second[30..].iter().all(|count| (70..=230).contains(count)), "{by_second:?}");
    }

    #[test]
    fn a_replica_that_is_avoided_is_picked_only_where_the_others_rest() {
        let set: Set = (1..=5).map(|n| Replica::new(SocketAddr::from(([10, 0, 0, n], 8086)))).collect();
        for replica in &set[..4] {
            replica.rest.lock().avoided = Some(Instant::now() + AVOIDED);
        }
        // The one that is not avoided has most to do.
        set[4].open.store(9, Ordering::Relaxed);
        let picked = |tried: &[SocketAddr]| pick(&set, tried).unwrap().replica.addr;
        assert!((0..100).all(|_| picked(&[]) == set[4].addr));
        assert_ne!(picked(&[set[4].addr]), set[4].addr);
        set[4].failed();
        assert_ne!(picked(&[]), set[4].addr);
        set.iter().for_each(|replica| replica.failed());
        assert!(pick(&set, &[]).is_some(), "all of them rest");
    }

    #[test]
    fn an_outage_that_has_ended_leaves_no_long_pause() {
        let now = Instant::now();
        let mut lookup = Lookup::new(now);
        (0..9).for_each(|_| lookup.answered(now, Some(now), true));
        assert!(lookup.soonest >= now + OUTAGE.1 / 2);
        lookup.answered(now, Some(now), false);
        assert_eq!((lookup.soonest, lookup.valid_until), (now + RESOLVE_PAUSE, Some(now + RESOLVE_PAUSE)));
        lookup.answered(now, Some(now), true);
        assert!(lookup.soonest <= now + OUTAGE.0, "the next outage begins with short pauses");
        lookup.answered(now, None, false);
        assert_eq!(lookup.valid_until, None);
    }
}
