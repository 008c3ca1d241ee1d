//! Decides who should hold a lease, from observations and the local clock alone.

use std::{collections::VecDeque, time::Duration};

use k8s_openapi::api::coordination::v1::Lease;
use tokio::time::Instant;

use super::{DURATION, PERIOD, RENEW_DEADLINE};

/// How many replaced versions are remembered: the renewals of more than two lease durations, far more than a
/// live watch lags behind.
const MAX_REPLACED: usize = 32;

/// The next action on the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing to do now.
    Wait,
    /// Create the lease and hold it.
    Create,
    /// Take the lease: it has no holder, or its holder is dead.
    Take,
    /// Renew the lease.
    Renew,
}

/// One replica's view of the lease.
pub(super) struct Election {
    me: String,
    /// Whether anything has been observed.
    informed: bool,
    seen: Option<Seen>,
    /// Resource versions that newer ones replaced, the oldest first. The watch repeats this replica's writes after
    /// their answers; versions are opaque, and the times in a lease are its writer's wall clock, which may be set back.
    replaced: VecDeque<String>,
    /// When this replica last wrote the lease in its own name, if no other replica has written it since.
    renewed: Option<Instant>,
    /// Whether a newer version is known to exist, so that a write has to wait until it is observed.
    outdated: bool,
}

struct Seen {
    lease: Lease,
    /// When this version was first seen.
    since: Instant,
}

impl Election {
    pub(super) fn new(me: String) -> Self {
        Self { me, informed: false, seen: None, replaced: VecDeque::new(), renewed: None, outdated: false }
    }

    /// Takes in the API server's version of the lease.
    pub(super) fn observe(&mut self, lease: Option<Lease>, now: Instant) {
        self.informed = true;
        let Some(lease) = lease else {
            (self.seen, self.renewed, self.outdated) = (None, None, false);
            return;
        };
        let version = |lease: &Lease| lease.metadata.resource_version.clone().unwrap_or_default();
        let new = version(&lease);
        if self.seen.as_ref().is_some_and(|seen| version(&seen.lease) == new) || self.replaced.contains(&new) {
            return;
        }
        if let Some(old) = self.seen.replace(Seen { lease, since: now }) {
            self.replaced.push_back(version(&old.lease));
            if self.replaced.len() > MAX_REPLACED {
                self.replaced.pop_front();
            }
        }
        self.outdated = false;
        if self.holder() != Some(&self.me) {
            self.renewed = None;
        }
    }

    /// Takes in the result of this replica's write, which began at `now`.
    pub(super) fn wrote(&mut self, lease: Lease, now: Instant) {
        self.observe(Some(lease), now);
        if self.holder() == Some(&self.me) {
            self.renewed = Some(now);
        }
    }

    /// Takes in the newest version, which was asked for.
    pub(super) fn read(&mut self, lease: Option<Lease>, now: Instant) {
        self.outdated = false;
        self.observe(lease, now);
    }

    /// Whether the API server has a newer version than was observed.
    pub(super) fn is_outdated(&self) -> bool {
        self.outdated
    }

    /// Records that the API server has a newer version than was observed.
    pub(super) fn outdated(&mut self) {
        self.outdated = true;
    }

    /// Decides the next action.
    pub(super) fn decide(&self, now: Instant) -> Action {
        if !self.informed || self.outdated {
            return Action::Wait;
        }
        let Some(seen) = &self.seen else { return Action::Create };
        match (self.holder(), self.renewed) {
            (None, _) => Action::Take,
            (Some(holder), Some(renewed)) if holder == self.me && now < renewed + PERIOD / 2 => Action::Wait,
            // Without a renewal of this process, it is that of a former process of this replica.
            (Some(holder), _) if holder == self.me => Action::Renew,
            (Some(_), _) if now >= seen.since + duration(&seen.lease) => Action::Take,
            (Some(_), _) => Action::Wait,
        }
    }

    /// Whether this replica may act as the holder.
    pub(super) fn holds(&self, now: Instant) -> bool {
        self.renewed.is_some_and(|renewed| now < renewed + RENEW_DEADLINE)
    }

    /// The current holder, if it is known.
    pub(super) fn holder(&self) -> Option<&str> {
        let holder = self.lease()?.spec.as_ref()?.holder_identity.as_deref()?;
        (!holder.is_empty()).then_some(holder)
    }

    /// The lease as last observed.
    pub(super) fn lease(&self) -> Option<&Lease> {
        self.seen.as_ref().map(|seen| &seen.lease)
    }
}

/// The duration of the lease, as its holder wrote it.
fn duration(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
    let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok()).filter(|seconds| *seconds > 0);
    seconds.map_or(DURATION, Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn lease(version: u32, holder: Option<&str>) -> Lease {
        serde_json::from_value(json!({
            "metadata": {"name": "l", "namespace": "linkerd", "resourceVersion": version.to_string()},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 30,
                // The holder's clock must not matter.
                "renewTime": format!("2001-01-01T00:00:{version:02}.000000Z")},
        }))
        .unwrap()
    }

    #[test]
    fn nothing_is_done_before_something_is_known() {
        let now = Instant::now();
        let mut election = Election::new("a".to_owned());
        assert_eq!(election.decide(now), Action::Wait);
        election.observe(None, now);
        assert_eq!(election.decide(now), Action::Create);
    }

    #[test]
    fn a_free_lease_is_taken_and_then_renewed() {
        let now = Instant::now();
        let mut election = Election::new("a".to_owned());
        for holder in [None, Some("")] {
            election.observe(Some(lease(1, holder)), now);
            assert_eq!(election.decide(now), Action::Take, "{holder:?}");
        }
        assert!(!election.holds(now));
        election.wrote(lease(2, Some("a")), now);
        assert!(election.holds(now));
        assert_eq!(election.decide(now), Action::Wait);
        assert_eq!(election.decide(now + secs(2)), Action::Renew);
        election.wrote(lease(3, Some("a")), now + secs(2));
        // The watch repeats what was written, the newest version last.
        election.observe(Some(lease(2, Some("a"))), now + secs(2));
        election.observe(Some(lease(3, Some("a"))), now + secs(2));
        assert_eq!(election.lease(), Some(&lease(3, Some("a"))));
        assert!(election.holds(now + secs(11)));
        assert!(!election.holds(now + secs(13)), "the renewal deadline is over");
    }

    /// The wall clock is set back between two renewals, so that the newer one has the older time.
    #[test]
    fn a_wall_clock_that_goes_back_does_not_end_the_lease() {
        let now = Instant::now();
        let at = |version: u32, time: &str| {
            let mut lease = lease(version, Some("a"));
            let renewed = serde_json::from_value(json!(format!("2026-01-01T{time}.000000Z"))).unwrap();
            lease.spec.as_mut().unwrap().renew_time = Some(renewed);
            lease
        };
        let mut election = Election::new("a".to_owned());
        election.observe(Some(lease(1, None)), now);
        election.wrote(at(2, "12:00:00"), now);
        election.observe(Some(at(2, "12:00:00")), now);
        election.wrote(at(3, "11:00:00"), now + secs(2));
        assert_eq!(election.lease(), Some(&at(3, "11:00:00")));
        // The watch is one renewal behind, and its old version is not taken for a new one.
        election.wrote(at(4, "11:00:02"), now + secs(4));
        election.observe(Some(at(3, "11:00:00")), now + secs(4));
        election.observe(Some(at(4, "11:00:02")), now + secs(4));
        assert_eq!(election.lease(), Some(&at(4, "11:00:02")));
        assert!(election.holds(now + secs(13)));
        assert_eq!(election.decide(now + secs(6)), Action::Renew);
        // Another writer's version is accepted, whatever its time.
        election.outdated();
        election.observe(Some(lease(5, Some("b"))), now + secs(6));
        assert_eq!((election.holder(), election.holds(now + secs(6))), (Some("b"), false));
    }

    #[test]
    fn another_holder_is_left_alone_while_it_renews_and_replaced_when_it_does_not() {
        let now = Instant::now();
        let mut election = Election::new("a".to_owned());
        election.observe(Some(lease(1, Some("b"))), now);
        assert_eq!(election.decide(now + secs(29)), Action::Wait);
        election.observe(Some(lease(2, Some("b"))), now + secs(29));
        assert_eq!(election.decide(now + secs(31)), Action::Wait);
        // The same version again is not a renewal.
        election.observe(Some(lease(2, Some("b"))), now + secs(50));
        assert_eq!(election.decide(now + secs(58)), Action::Wait);
        assert_eq!(election.decide(now + secs(59)), Action::Take);
    }

    #[test]
    fn a_lease_that_somebody_took_is_lost() {
        let now = Instant::now();
        let mut election = Election::new("a".to_owned());
        election.wrote(lease(1, Some("a")), now);
        election.observe(Some(lease(2, Some("b"))), now + secs(1));
        assert!(!election.holds(now + secs(1)));
        assert_eq!(election.decide(now + secs(1)), Action::Wait);
        election.observe(None, now + secs(2));
        assert_eq!(election.decide(now + secs(2)), Action::Create);
    }

    #[test]
    fn after_a_conflict_nothing_is_written_before_an_update_arrives() {
        let now = Instant::now();
        let mut election = Election::new("a".to_owned());
        election.observe(Some(lease(1, None)), now);
        election.outdated();
        assert_eq!(election.decide(now), Action::Wait);
        election.observe(Some(lease(2, Some("b"))), now);
        assert_eq!(election.decide(now + secs(30)), Action::Take);
    }

    /// The answer of the second renewal was lost, so that the third one was a conflict.
    #[test]
    fn a_renewal_of_which_only_a_read_tells_does_not_cost_the_lease() {
        let now = Instant::now();
        let mut election = Election::new("a".to_owned());
        election.observe(Some(lease(1, None)), now);
        election.wrote(lease(2, Some("a")), now);
        election.outdated();
        assert_eq!((election.decide(now + secs(7)), election.is_outdated()), (Action::Wait, true));
        election.read(Some(lease(3, Some("a"))), now + secs(7));
        assert_eq!((election.decide(now + secs(7)), election.is_outdated()), (Action::Renew, false));
        assert!(election.holds(now + secs(9)));
        assert!(!election.holds(now + secs(10)), "its own clock counts from what it wrote, not from what it read");
    }

    #[test]
    fn the_lease_of_a_former_life_is_renewed_at_once() {
        let now = Instant::now();
        let mut election = Election::new("a".to_owned());
        election.observe(Some(lease(1, Some("a"))), now);
        assert_eq!(election.decide(now), Action::Renew);
        assert!(!election.holds(now));
    }
}
