//! Local rate limits: requests per second in total and per client identity, by the generic cell rate algorithm.
//!
//! Owns the arithmetic and the clients' states. Refuses to read clocks: the caller passes the time, so that tests can
//! control it.

use std::{collections::HashMap, num::NonZeroU32, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;
use weft_tls::identity::Identity;

use crate::route::Meta;

/// The most clients that are remembered; beyond that, those that have not sent anything for a second are removed.
const CLIENTS: usize = 1024;

/// A port's rate limit.
#[derive(Debug)]
pub(crate) struct RateLimit {
    /// The rate limit resource.
    pub(crate) meta: Arc<Meta>,
    total: Option<Cell>,
    per_identity: Option<NonZeroU32>,
    overrides: Vec<Override>,
    clients: Mutex<HashMap<Option<Identity>, Instant>>,
}

/// Another limit for some clients, which share it.
#[derive(Debug)]
pub(crate) struct Override {
    identities: Vec<Box<str>>,
    cell: Cell,
}

/// Which limit a request exceeds, for the label `ratelimit_scope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The port's.
    Total,
    /// The client's.
    Identity,
}

/// One limit with its own state.
#[derive(Debug)]
struct Cell {
    rate: NonZeroU32,
    /// The due time of the next request if all so far had come evenly.
    due: Mutex<Option<Instant>>,
}

/// Room for one request in a limit, which stays locked until the request takes the room or is refused.
struct Room<'a> {
    due: MutexGuard<'a, Option<Instant>>,
    next: Instant,
}

impl RateLimit {
    /// Creates a limit without state; absent rates do not limit.
    pub(crate) fn new(
        meta: Arc<Meta>,
        total: Option<NonZeroU32>,
        per_identity: Option<NonZeroU32>,
        overrides: Vec<Override>,
    ) -> Self {
        let total = total.map(Cell::new);
        Self { meta, total, per_identity, overrides, clients: Mutex::new(HashMap::new()) }
    }

    /// Allows a request or returns the scope of the limit that it exceeds; a request that exceeds both limits exceeds
    /// the total, as with Linkerd. A refused request takes from neither limit, so that a client beyond its own rate
    /// leaves the total to others; with Linkerd's proxy it uses up the total.
    pub(crate) fn check(&self, identity: Option<&Identity>, now: Instant) -> Result<(), Scope> {
        let own = identity.and_then(|identity| {
            self.overrides.iter().find(|over| over.identities.iter().any(|name| **name == *identity.as_str()))
        });
        let total = self.total.as_ref().map(|cell| cell.room(now).ok_or(Scope::Total)).transpose()?;
        let passes = match (own, self.per_identity) {
            (Some(over), _) => over.cell.take(now),
            (None, Some(rate)) => self.take_for_client(identity, rate, now),
            (None, None) => true,
        };
        if !passes {
            return Err(Scope::Identity);
        }
        if let Some(room) = total {
            room.take();
        }
        Ok(())
    }

    /// Clients without identity share one limit.
    fn take_for_client(&self, identity: Option<&Identity>, rate: NonZeroU32, now: Instant) -> bool {
        let mut clients = self.clients.lock();
        if clients.len() >= CLIENTS {
            clients.retain(|_, due| *due > now);
        }
        let due = clients.get(&identity.cloned()).copied();
        match advance(due, rate, now) {
            Some(due) => {
                clients.insert(identity.cloned(), due);
                true
            }
            None => false,
        }
    }
}

impl Override {
    /// Creates a limit for these identities.
    pub(crate) fn new(identities: Vec<Box<str>>, rate: NonZeroU32) -> Self {
        Self { identities, cell: Cell::new(rate) }
    }
}

impl Scope {
    /// The label's value.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::Identity => "identity",
        }
    }
}

impl Cell {
    fn new(rate: NonZeroU32) -> Self {
        Self { rate, due: Mutex::new(None) }
    }

    fn room(&self, now: Instant) -> Option<Room<'_>> {
        let due = self.due.lock();
        let next = advance(*due, self.rate, now)?;
        Some(Room { due, next })
    }

    fn take(&self, now: Instant) -> bool {
        self.room(now).map(Room::take).is_some()
    }
}

impl Room<'_> {
    fn take(mut self) {
        *self.due = Some(self.next);
    }
}

/// Due time of the request after one at `now`; `None` if it is more than a second's worth too early.
fn advance(due: Option<Instant>, rate: NonZeroU32, now: Instant) -> Option<Instant> {
    let next = due.unwrap_or(now).max(now) + Duration::from_secs(1) / rate.get();
    (next <= now + Duration::from_secs(1)).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(rps: u32) -> Option<NonZeroU32> {
        NonZeroU32::new(rps)
    }

    fn limit(total: u32, per_identity: u32, overrides: Vec<Override>) -> RateLimit {
        RateLimit::new(Arc::new(Meta::built_in("test")), rate(total), rate(per_identity), overrides)
    }

    #[test]
    fn a_seconds_worth_passes_at_once_and_more_after_time_has_passed() {
        let limit = limit(5, 0, Vec::new());
        let now = Instant::now();
        let passed = (0..10).filter(|_| limit.check(None, now).is_ok()).count();
        assert_eq!(passed, 5);
        assert_eq!(limit.check(None, now), Err(Scope::Total));
        assert!(limit.check(None, now + Duration::from_millis(200)).is_ok());
        assert!(limit.check(None, now + Duration::from_millis(200)).is_err());
    }

    #[test]
    fn clients_have_their_own_share_and_overrides_theirs() {
        let limit = limit(0, 1, vec![Override::new(vec!["big.demo".into()], rate(3).unwrap())]);
        let now = Instant::now();
        let (a, b, big) = ("a.demo".parse().unwrap(), "b.demo".parse().unwrap(), "big.demo".parse().unwrap());
        assert!(limit.check(Some(&a), now).is_ok());
        assert_eq!(limit.check(Some(&a), now), Err(Scope::Identity));
        assert!(limit.check(Some(&b), now).is_ok());
        assert!(limit.check(None, now).is_ok());
        assert!(limit.check(None, now).is_err());
        assert_eq!((0..9).filter(|_| limit.check(Some(&big), now).is_ok()).count(), 3);
    }

    #[test]
    fn a_client_beyond_its_rate_leaves_the_total_to_others() {
        let limit = limit(10, 2, vec![Override::new(vec!["slow.demo".into()], rate(1).unwrap())]);
        let now = Instant::now();
        let passed = |name: &str| {
            let identity = name.parse().unwrap();
            (0..100).filter(|_| limit.check(Some(&identity), now).is_ok()).count()
        };
        assert_eq!([passed("greedy.demo"), passed("slow.demo")], [2, 1]);
        assert_eq!(["a.demo", "b.demo", "c.demo"].map(passed), [2; 3], "the total has room for seven more");
        assert_eq!(passed("d.demo"), 1, "the last of the total");
        let greedy = "greedy.demo".parse().unwrap();
        assert_eq!(limit.check(Some(&greedy), now), Err(Scope::Total), "both are exceeded");
    }

    #[test]
    fn a_request_beyond_the_total_takes_nothing_from_its_clients_rate() {
        let limit = limit(10, 1, Vec::new());
        let now = Instant::now();
        for number in 0..10 {
            let client = format!("client-{number}.demo").parse().unwrap();
            assert!(limit.check(Some(&client), now).is_ok());
        }
        let late = "late.demo".parse().unwrap();
        assert_eq!(limit.check(Some(&late), now), Err(Scope::Total));
        assert!(limit.check(Some(&late), now + Duration::from_millis(100)).is_ok());
    }
}
