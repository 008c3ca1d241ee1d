//! Decides which of the node's pods to enrol now. Synchronous and without I/O: events in, attempts and reports out.
//!
//! ```text
//! pod appears ─> pending ─attempt─> enrolled ─its network namespace is gone─> pending
//!                  └─ annotation that cannot be read ─> refused ─annotation changes─> pending
//! ```
//!
//! Never withdraws: a pod that is gone from the API server may be alive on the node for a while (it was deleted by
//! force, or its label was removed), and its connections must not become open. The datapath removes it when its network
//! namespace ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;
use tokio::time::Instant;
use weft_k8s_api::inject::{Forbidden, InjectError, RedirectionDefaults};

use super::pod::MeshedPod;
use crate::datapath::rules::PodName;

/// The first delay after an attempt that came too early: a container runtime needs some milliseconds between creating a
/// container's cgroup and moving its first process into its namespaces.
const FIRST_DELAY: Duration = Duration::from_millis(5);
/// The longest delay. The delay doubles up to this; a new entry in the pod's cgroup starts again with the first delay.
const LAST_DELAY: Duration = Duration::from_secs(1);
/// Interval at which an enrolled pod is checked again: its addresses may have changed, and there is no notification.
/// Also the longest delay after an attempt that failed: each may take long, and fail for the life of the pod.
const REVIEW: Duration = Duration::from_secs(10);

/// The pods of the API server's watch.
#[derive(Debug)]
pub(super) struct Plan {
    defaults: RedirectionDefaults,
    pods: BTreeMap<String, Tracked>,
    /// The pods of a list in progress.
    listing: Option<BTreeSet<String>>,
    listed: bool,
    reports: Vec<Report>,
    /// Whether the tracking has changed since it was taken.
    is_changed: bool,
}

#[derive(Debug)]
struct Tracked {
    pod: MeshedPod,
    enrolled: Option<Enrolment>,
    /// Time of the next attempt; none if nothing is to be done. During an attempt: time of an event that requires
    /// another one.
    due: Option<Instant>,
    under_way: bool,
    delay: Duration,
    attempted: bool,
    /// Whether the pod is enrolled, and the last attempt did not find it on the node: it ends, or gets a new sandbox.
    missing: bool,
    /// Whether the pod has an Event that says that it is bypassed.
    bypassed: bool,
    /// The annotations without effect of which it has Events.
    forbidden: Vec<Forbidden>,
    problem: Option<Problem>,
}

/// A pod in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Enrolment {
    pub(crate) cookie: u64,
    /// Time from the start of the pod's first process.
    pub(crate) after: Duration,
}

/// The reason why a pod, or its newest rules, are not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// Temporary, and not an error.
    NotYet(String),
    /// The kernel or the node refuses; the attempt is repeated.
    Failed(String),
    /// The pod's owner has to change the pod.
    Annotation(InjectError),
}

/// A report for the pod's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(super) name: PodName,
    pub(super) uid: String,
    pub(super) event: EnrolmentEvent,
}

/// The event that is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EnrolmentEvent {
    /// Its rules are not in force.
    Problem(Problem),
    /// An annotation has no effect, because the administrator forbids it.
    Forbidden(Forbidden),
    /// The owner's bypass of the pod came into force, or ended.
    Bypassed(bool),
}

/// A pod as status and metrics show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tracking {
    pub(crate) name: PodName,
    pub(crate) uid: String,
    pub(crate) enrolled: Option<Enrolment>,
    pub(crate) problem: Option<Problem>,
}

impl Problem {
    /// One clause, for people.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::NotYet(text) | Self::Failed(text) => text.clone(),
            Self::Annotation(error) => error.to_string(),
        }
    }
}

impl Tracked {
    /// Whether its rules are not in force for a temporary reason.
    fn is_pending(&self) -> bool {
        self.pod.rules.is_ok() && (self.enrolled.is_none() || self.problem.is_some())
    }
}

impl Plan {
    pub(super) fn new(defaults: RedirectionDefaults) -> Self {
        Self { defaults, pods: BTreeMap::new(), listing: None, listed: false, reports: Vec::new(), is_changed: false }
    }

    /// Applies an event of the watch.
    pub(super) fn apply(&mut self, event: watcher::Event<Pod>, now: Instant) {
        match event {
            watcher::Event::Init => self.listing = Some(BTreeSet::new()),
            watcher::Event::InitApply(pod) => {
                if let (Some(listing), Some(uid)) = (&mut self.listing, &pod.metadata.uid) {
                    listing.insert(uid.clone());
                }
                self.put(&pod, now);
            }
            watcher::Event::InitDone => {
                if let Some(listing) = self.listing.take() {
                    self.pods.retain(|uid, _| listing.contains(uid));
                }
                (self.listed, self.is_changed) = (true, true);
            }
            watcher::Event::Apply(pod) => self.put(&pod, now),
            watcher::Event::Delete(pod) => self.remove(&pod),
        }
    }

    fn remove(&mut self, pod: &Pod) {
        self.is_changed |= self.pods.remove(pod.metadata.uid.as_deref().unwrap_or_default()).is_some();
    }

    fn put(&mut self, pod: &Pod, now: Instant) {
        let Some(next) = MeshedPod::read(pod, &self.defaults) else {
            self.remove(pod);
            return;
        };
        self.is_changed |= !self.pods.contains_key(&next.uid);
        let tracked = self.pods.entry(next.uid.clone()).or_insert_with(|| Tracked {
            pod: next.clone(),
            enrolled: None,
            due: None,
            under_way: false,
            delay: FIRST_DELAY,
            attempted: false,
            missing: false,
            bypassed: false,
            forbidden: Vec::new(),
            problem: None,
        });
        let forbidden = next.rules.as_ref().map(|rules| rules.forbidden.clone()).unwrap_or_default();
        for one in forbidden.iter().filter(|one| !tracked.forbidden.contains(one)) {
            let event = EnrolmentEvent::Forbidden(one.clone());
            self.reports.push(Report { name: next.name.clone(), uid: next.uid.clone(), event });
        }
        tracked.forbidden = forbidden;
        if let Err(error) = &next.rules {
            let problem = Problem::Annotation(error.clone());
            if tracked.problem.as_ref() != Some(&problem) {
                let event = EnrolmentEvent::Problem(problem.clone());
                self.reports.push(Report { name: next.name.clone(), uid: next.uid.clone(), event });
                self.is_changed = true;
            }
            // Rules that were in force remain in force.
            (tracked.problem, tracked.due, tracked.attempted) = (Some(problem), None, true);
        } else {
            // A pod that starts has several events that change nothing here. One with a new sandbox has other
            // addresses, or another container of its proxy.
            if tracked.pod != next || tracked.is_pending() || tracked.missing {
                (tracked.due, tracked.delay) = (Some(now), FIRST_DELAY);
            }
            if matches!(tracked.problem, Some(Problem::Annotation(_))) {
                (tracked.problem, self.is_changed) = (None, true);
            }
        }
        tracked.pod = next;
    }

    /// The cgroup of one pod, or of any pod, has changed.
    pub(super) fn wake(&mut self, uid: Option<&str>, now: Instant) {
        for (_, tracked) in self.pods.iter_mut().filter(|(other, _)| uid.is_none_or(|uid| uid == *other)) {
            if (tracked.due.is_some() || tracked.under_way) && tracked.is_pending() {
                (tracked.due, tracked.delay) = (Some(now), FIRST_DELAY);
            }
        }
    }

    /// Pods to attempt now, longest waiting first. They count as in progress until [`Self::attempted`].
    pub(super) fn begin(&mut self, now: Instant) -> Vec<MeshedPod> {
        let waiting = self.pods.values_mut().filter(|tracked| !tracked.under_way);
        let mut due: Vec<_> =
            waiting.filter_map(|tracked| tracked.due.filter(|due| *due <= now).map(|due| (due, tracked))).collect();
        due.sort_by_key(|(due, _)| *due);
        let begin = |(_, tracked): (Instant, &mut Tracked)| {
            (tracked.due, tracked.under_way) = (None, true);
            tracked.pod.clone()
        };
        due.into_iter().map(begin).collect()
    }

    /// When to call [`Self::begin`] again.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.pods.values().filter(|tracked| !tracked.under_way).filter_map(|tracked| tracked.due).min()
    }

    /// Applies the result of an attempt. `pod` is what was attempted: the pod may have changed since.
    pub(super) fn attempted(&mut self, pod: &MeshedPod, result: Result<Enrolment, Problem>, now: Instant) {
        let Some(tracked) = self.pods.get_mut(&pod.uid) else { return };
        (tracked.attempted, tracked.under_way, tracked.missing) = (true, false, false);
        let changed = tracked.pod != *pod;
        // An event during the attempt may have come too late for it.
        let again = tracked.due;
        match result {
            Ok(enrolment) => {
                // Keep the time of the first enrolment of this namespace.
                let known = tracked.enrolled.filter(|known| known.cookie == enrolment.cookie);
                self.is_changed |= known.is_none() || tracked.problem.is_some();
                tracked.enrolled = Some(known.unwrap_or(enrolment));
                let bypassed = pod.rules.as_ref().is_ok_and(|rules| rules.bypass);
                if tracked.bypassed != bypassed {
                    tracked.bypassed = bypassed;
                    let event = EnrolmentEvent::Bypassed(bypassed);
                    self.reports.push(Report { name: pod.name.clone(), uid: pod.uid.clone(), event });
                }
                if !changed {
                    (tracked.problem, tracked.delay) = (None, FIRST_DELAY);
                    tracked.due = again.or(Some(now + REVIEW));
                }
            }
            // A terminating pod has no process left; while its namespace exists, its rules are in force.
            Err(Problem::NotYet(_)) if tracked.enrolled.is_some() && !changed => {
                (tracked.due, tracked.missing) = (again.or(Some(now + REVIEW)), true);
            }
            Err(problem) => {
                if matches!(problem, Problem::Failed(_)) && tracked.problem.as_ref() != Some(&problem) {
                    self.reports.push(Report {
                        name: pod.name.clone(),
                        uid: pod.uid.clone(),
                        event: EnrolmentEvent::Problem(problem.clone()),
                    });
                }
                if tracked.pod.rules.is_ok() {
                    self.is_changed |= tracked.problem.as_ref() != Some(&problem);
                    let last = if matches!(problem, Problem::Failed(_)) { REVIEW } else { LAST_DELAY };
                    tracked.problem = Some(problem);
                    tracked.due = again.or(Some(now + tracked.delay.min(last)));
                    tracked.delay = (tracked.delay * 2).min(last);
                }
            }
        }
    }

    /// These network namespaces are gone. Pods that still exist get new ones.
    pub(super) fn gone(&mut self, cookies: &[u64], now: Instant) {
        for tracked in self.pods.values_mut() {
            if tracked.enrolled.is_some_and(|enrolment| cookies.contains(&enrolment.cookie)) {
                (tracked.enrolled, self.is_changed) = (None, true);
                if tracked.pod.rules.is_ok() {
                    (tracked.due, tracked.delay) = (Some(now), FIRST_DELAY);
                }
            }
        }
    }

    /// Whether every pod of the first list was attempted, so that pods that ran already are enrolled.
    pub(super) fn caught_up(&self) -> bool {
        self.listed && self.pods.values().all(|tracked| tracked.attempted)
    }

    /// Reports for pods' owners; each is returned once.
    pub(super) fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    /// Whether a pod is waiting to be located, or its newest rules are not in force.
    pub(super) fn is_pending(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(Tracked::is_pending)
    }

    /// All pods, for status and metrics, if they have changed since the last call. `None` before the first list.
    pub(super) fn take_tracking(&mut self) -> Option<Vec<Tracking>> {
        (self.listed && std::mem::take(&mut self.is_changed)).then(|| self.tracking())
    }

    fn tracking(&self) -> Vec<Tracking> {
        let tracking = |tracked: &Tracked| Tracking {
            name: tracked.pod.name.clone(),
            uid: tracked.pod.uid.clone(),
            enrolled: tracked.enrolled,
            problem: tracked.problem.clone(),
        };
        self.pods.values().map(tracking).collect()
    }
}

#[cfg(test)]
mod tests;
