//! Writes to the API server at a steady pace, and when each of them reached the clients.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use futures::{StreamExt as _, stream::FuturesUnordered};
use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{
    clients::{Arrival, Clients},
    wire::Addressed,
    world::{Change, Service, World},
};
use crate::enrolment::Quantiles;

/// Writes at a time. When the API server is slower than the pace, fewer are made, and the report says how many.
const IN_FLIGHT: usize = 64;
/// Time without an arrival after which no more are expected, and the longest wait for it.
const QUIET: Duration = Duration::from_secs(2);
const SETTLES_WITHIN: Duration = Duration::from_secs(60);

/// The writes of one part.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) made: Vec<Change>,
    /// From the first to the end of the last, seconds.
    pub(super) seconds: f64,
    pub(super) failed: u64,
    pub(super) last_error: Option<String>,
}

/// How writes reached the clients.
#[derive(Clone, Debug, Serialize)]
pub struct Propagation {
    /// Endpoints that were removed or added.
    pub changes: u64,
    /// Those per second.
    pub changes_per_second: f64,
    /// Writes that the API server refused.
    pub failed_writes: u64,
    /// Why the last of them was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Arrivals of these changes at clients.
    pub arrivals: u64,
    /// Arrivals that there should have been and were not; absent where clients come and go meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<u64>,
    /// Arrivals before the bench had the API server's answer; they count as 0 ms.
    pub before_answer: u64,
    /// From the API server's answer to a client; absent without any arrival.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub milliseconds: Option<Quantiles>,
}

/// Removes and adds endpoints of these Services, one after the other, until `until` completes.
///
/// # Errors
/// No write succeeded.
pub(super) async fn churn(
    world: &World,
    services: &[&Service],
    per_second: u32,
    until: impl Future<Output = ()>,
) -> anyhow::Result<Changes> {
    let with_endpoints: Vec<_> = services.iter().copied().filter(|service| service.has_endpoints).collect();
    anyhow::ensure!(
        !with_endpoints.is_empty(),
        "no target of a client has endpoints that could change, use more --pods"
    );
    let acts = with_endpoints.into_iter().cycle().map(async |service| world.change(service).await.map(|one| vec![one]));
    paced(per_second, acts, until).await
}

/// Starts `acts` at a steady pace, several at a time if they are slow, until there is none left or `until` completes.
///
/// # Errors
/// None succeeded.
pub(super) async fn paced<F: Future<Output = anyhow::Result<Vec<Change>>>>(
    per_second: u32,
    mut acts: impl Iterator<Item = F>,
    until: impl Future<Output = ()>,
) -> anyhow::Result<Changes> {
    let (began, mut changes) = (Instant::now(), Changes::default());
    let mut ticks = interval(Duration::from_secs(1) / per_second.max(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut in_flight, mut until, mut more) = (FuturesUnordered::new(), std::pin::pin!(until), true);
    while more || !in_flight.is_empty() {
        tokio::select! {
            () = &mut until, if more => more = false,
            Some(done) = in_flight.next() => changes.take(done),
            _ = ticks.tick(), if more && in_flight.len() < IN_FLIGHT => match acts.next() {
                Some(act) => in_flight.push(act),
                None => more = false,
            },
        }
    }
    changes.seconds = began.elapsed().as_secs_f64();
    if changes.made.is_empty() {
        let error = changes.last_error.unwrap_or_else(|| "none was made".to_owned());
        return Err(anyhow!(error)).context("no write succeeded");
    }
    Ok(changes)
}

impl Changes {
    fn take(&mut self, done: anyhow::Result<Vec<Change>>) {
        match done {
            Ok(made) => self.made.extend(made),
            Err(error) => {
                self.failed += 1;
                self.last_error = Some(format!("{error:#}"));
            }
        }
    }

    /// Those that the API server answered within a time.
    pub(super) fn within(&self, (begin, end): (Instant, Instant)) -> Self {
        let made = self.made.iter().filter(|change| (begin..=end).contains(&change.answered)).copied().collect();
        Self { made, seconds: (end - begin).as_secs_f64(), ..Self::default() }
    }

    /// Arrivals that there should be at clients for which `counts` holds.
    pub(super) fn expected(&self, clients: &Clients, counts: impl Fn(u32) -> bool) -> u64 {
        let of = |change: &Change| clients.subscribers_of(change.service).iter().filter(|one| counts(**one)).count();
        self.made.iter().map(|change| of(change) as u64).sum()
    }
}

/// Waits until nothing has arrived for a while.
pub(super) async fn settle(clients: &Clients) {
    let began = Instant::now();
    let (mut last, mut since) = (clients.arrived(), Instant::now());
    while since.elapsed() < QUIET && began.elapsed() < SETTLES_WITHIN {
        sleep(Duration::from_millis(50)).await;
        let now = clients.arrived();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}

/// Matches arrivals with the writes that caused them. `expected` is the number of arrivals that there should be.
pub(super) fn propagation(
    changes: &Changes,
    arrivals: &[Arrival],
    expected: Option<u64>,
    counts: impl Fn(u32) -> bool,
) -> Propagation {
    let answered: HashMap<Addressed, Instant> =
        changes.made.iter().map(|change| (change.what, change.answered)).collect();
    let mut before_answer = 0;
    let mut milliseconds = Vec::new();
    for arrival in arrivals.iter().filter(|arrival| counts(arrival.client)) {
        let Some(answered) = answered.get(&arrival.what) else { continue };
        if arrival.at < *answered {
            before_answer += 1;
        }
        milliseconds.push(arrival.at.saturating_duration_since(*answered).as_secs_f64() * 1e3);
    }
    let made = changes.made.len() as u64;
    let arrived = milliseconds.len() as u64;
    Propagation {
        changes: made,
        changes_per_second: made as f64 / changes.seconds,
        failed_writes: changes.failed,
        last_error: changes.last_error.clone(),
        arrivals: arrived,
        missing: expected.map(|expected| expected.saturating_sub(arrived)),
        before_answer,
        milliseconds: (arrived > 0).then(|| Quantiles::of(milliseconds)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn what(last: u8, added: bool) -> Addressed {
        Addressed { address: Ipv4Addr::new(100, 64, 0, last), added }
    }

    #[test]
    fn an_arrival_belongs_to_the_write_of_its_address() {
        let began = Instant::now();
        let at = |milliseconds| began + Duration::from_millis(milliseconds);
        let change = |what, milliseconds| Change { service: 0, what, answered: at(milliseconds) };
        let made = vec![change(what(1, true), 100), change(what(1, false), 200)];
        let changes = Changes { made, seconds: 1.0, ..Changes::default() };
        let arrival = |client, what, milliseconds| Arrival { client, what, at: at(milliseconds) };
        let arrivals = [
            arrival(1, what(1, true), 110),
            arrival(2, what(1, true), 90),
            arrival(1, what(1, false), 230),
            // Of another part, and of a client that does not count.
            arrival(1, what(9, true), 300),
            arrival(7, what(1, false), 900),
        ];
        let found = propagation(&changes, &arrivals, Some(4), |client| client != 7);
        assert_eq!((found.changes, found.arrivals, found.before_answer, found.missing), (2, 3, 1, Some(1)));
        let milliseconds = found.milliseconds.unwrap();
        assert_eq!((milliseconds.p50, milliseconds.max), (10.0, 30.0));
        let first = propagation(&changes.within((at(0), at(150))), &arrivals, None, |_| true);
        assert_eq!((first.changes, first.arrivals), (1, 2));
        let nothing = propagation(&changes, &[], None, |_| true);
        assert!(nothing.milliseconds.is_none() && nothing.missing.is_none());
    }

    #[tokio::test]
    async fn a_pace_ends_with_what_there_is_to_do_or_when_it_is_told_to() {
        let change = || Change { service: 0, what: what(1, true), answered: Instant::now() };
        let acts = (0..10).map(async |number: u32| {
            anyhow::ensure!(number != 3, "refused");
            Ok(vec![change()])
        });
        let changes = paced(5000, acts, std::future::pending()).await.unwrap();
        assert_eq!((changes.made.len(), changes.failed), (9, 1));
        assert_eq!(changes.last_error.as_deref(), Some("refused"));
        let endless = std::iter::repeat_with(async || Ok(vec![change()]));
        let changes = paced(5000, endless, sleep(Duration::from_millis(50))).await.unwrap();
        assert!(!changes.made.is_empty());
        let refused = std::iter::once(async { Err(anyhow!("refused")) });
        assert!(paced(5000, refused, std::future::pending()).await.is_err());
    }
}
