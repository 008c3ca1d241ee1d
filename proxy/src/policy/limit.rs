//! Local rate limits: requests per second in total and per client identity, by the generic cell rate algorithm.
//!
//! Owns the arithmetic and the clients' states. Refuses to read clocks: the caller passes the time, so that tests can
//! control it.

use std::{collections::HashMap, num::NonZeroU32, sync::Arc, time::Duration};

use parking_lot::Mutex;
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

    /// Allows a request or returns the scope of the limit that it exceeds.
    pub(crate) fn check(&self, identity: Option<&Identity>, now: Instant) -> Result<(), Scope> {
        if self.total.as_ref().is_some_and(|cell| !cell.take(now)) {
            return Err(Scope::Total);
        }
        let own = identity.and_then(|identity| {
            self.overrides.iter().find(|over| over.identities.iter().any(|name| **name == *identity.as_str()))
        });
        let passes = match (own, self.per_identity) {
            (Some(over), _) => over.cell.take(now),
            (None, Some(rate)) => self.take_for_client(identity, rate, now),
            (None, None) => true,
        };
        if passes { Ok(()) } else { Err(Scope::Identity) }
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

    fn take(&self, now: Instant) -> bool {
        let mut due = self.due.lock();
        match advance(*due, self.rate, now) {
            Some(next) => {
                *due = Some(next);
                true
            }
            None => false,
        }
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
}
