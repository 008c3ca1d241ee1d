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
use weft_k8s_api::inject::{InjectError, RedirectionDefaults};

use super::pod::MeshedPod;
use crate::datapath::rules::PodName;

/// The first delay after an attempt that came too early: a container runtime needs some milliseconds between creating a
/// container's cgroup and moving its first process into its namespaces.
const FIRST_DELAY: Duration = Duration::from_millis(5);
/// The longest delay. The delay doubles up to this; a new entry in the pod's cgroup starts again with the first delay.
const LAST_DELAY: Duration = Duration::from_secs(1);
/// Interval at which an enrolled pod is checked again: its addresses may have changed, and there is no notification.
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
    /// Whether the pod has an Event that says that it is bypassed.
    bypassed: bool,
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
        Self { defaults, pods: BTreeMap::new(), listing: None, listed: false, reports: Vec::new() }
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
                self.listed = true;
            }
            watcher::Event::Apply(pod) => self.put(&pod, now),
            watcher::Event::Delete(pod) => {
                self.pods.remove(pod.metadata.uid.as_deref().unwrap_or_default());
            }
        }
    }

    fn put(&mut self, pod: &Pod, now: Instant) {
        let Some(next) = MeshedPod::read(pod, &self.defaults) else {
            self.pods.remove(pod.metadata.uid.as_deref().unwrap_or_default());
            return;
        };
        let tracked = self.pods.entry(next.uid.clone()).or_insert_with(|| Tracked {
            pod: next.clone(),
            enrolled: None,
            due: None,
            under_way: false,
            delay: FIRST_DELAY,
            attempted: false,
            bypassed: false,
            problem: None,
        });
        if let Err(error) = &next.rules {
            let problem = Problem::Annotation(error.clone());
            if tracked.problem.as_ref() != Some(&problem) {
                let event = EnrolmentEvent::Problem(problem.clone());
                self.reports.push(Report { name: next.name.clone(), uid: next.uid.clone(), event });
            }
            // Rules that were in force remain in force.
            (tracked.problem, tracked.due, tracked.attempted) = (Some(problem), None, true);
        } else {
            // Also if nothing relevant has changed: the pod may have a new sandbox.
            (tracked.due, tracked.delay) = (Some(now), FIRST_DELAY);
            if matches!(tracked.problem, Some(Problem::Annotation(_))) {
                tracked.problem = None;
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
        (tracked.attempted, tracked.under_way) = (true, false);
        let changed = tracked.pod != *pod;
        // An event during the attempt may have come too late for it.
        let again = tracked.due;
        match result {
            Ok(enrolment) => {
                // Keep the time of the first enrolment of this namespace.
                let known = tracked.enrolled.filter(|known| known.cookie == enrolment.cookie);
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
                tracked.due = again.or(Some(now + REVIEW));
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
                    tracked.problem = Some(problem);
                    tracked.due = again.or(Some(now + tracked.delay));
                    tracked.delay = (tracked.delay * 2).min(LAST_DELAY);
                }
            }
        }
    }

    /// These network namespaces are gone. Pods that still exist get new ones.
    pub(super) fn gone(&mut self, cookies: &[u64], now: Instant) {
        for tracked in self.pods.values_mut() {
            if tracked.enrolled.is_some_and(|enrolment| cookies.contains(&enrolment.cookie)) {
                tracked.enrolled = None;
                if tracked.pod.rules.is_ok() {
                    (tracked.due, tracked.delay) = (Some(now), FIRST_DELAY);
                }
            }
        }
    }

    /// Whether the API server has listed all pods once.
    pub(super) fn listed(&self) -> bool {
        self.listed
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

    /// All pods, for status and metrics.
    pub(super) fn tracking(&self) -> Vec<Tracking> {
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
mod tests {
    use serde_json::{Value, json};
    use watcher::Event;

    use super::{super::pod::tests::pod, *};

    struct Fixture {
        plan: Plan,
        now: Instant,
    }

    impl Fixture {
        fn new(events: Vec<Event<Pod>>) -> Self {
            let mut fixture = Self { plan: Plan::new(RedirectionDefaults::default()), now: Instant::now() };
            events.into_iter().for_each(|event| fixture.apply(event));
            fixture
        }

        fn apply(&mut self, event: Event<Pod>) {
            self.plan.apply(event, self.now);
        }

        /// The pods that would be attempted now.
        fn due(&self) -> Vec<String> {
            let due = |pod: &&Tracked| !pod.under_way && pod.due.is_some_and(|due| due <= self.now);
            self.plan.pods.values().filter(due).map(|pod| pod.pod.name.name.clone()).collect()
        }

        /// Attempts all pods that are due, with the same result.
        fn attempt(&mut self, result: &Result<Enrolment, Problem>) {
            for pod in self.plan.begin(self.now) {
                self.plan.attempted(&pod, result.clone(), self.now);
            }
        }

        fn wait(&mut self, ms: u64) {
            self.now += Duration::from_millis(ms);
        }

        fn only(&self) -> Tracking {
            let mut tracking = self.plan.tracking();
            assert_eq!(tracking.len(), 1, "{tracking:?}");
            tracking.remove(0)
        }
    }

    fn web(change: &Value) -> Pod {
        pod("web-0", change)
    }

    fn enrolled(cookie: u64) -> Result<Enrolment, Problem> {
        Ok(Enrolment { cookie, after: Duration::from_millis(30) })
    }

    fn not_yet() -> Result<Enrolment, Problem> {
        Err(Problem::NotYet("no process".into()))
    }

    fn unreadable() -> Value {
        json!({"metadata": {"annotations": {"config.linkerd.io/skip-outbound-ports": "all"}}})
    }

    #[test]
    fn a_pod_is_attempted_until_it_is_enrolled() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        assert_eq!(f.due(), ["web-0"]);
        f.attempt(&not_yet());
        assert!(f.due().is_empty());
        f.wait(5);
        assert_eq!(f.due(), ["web-0"]);
        f.attempt(&enrolled(7));
        f.wait(9_999);
        assert!(f.due().is_empty());
        assert_eq!(f.only().enrolled.unwrap().cookie, 7);
        assert_eq!(f.only().problem, None);
        // Its addresses may have changed.
        f.wait(1);
        assert_eq!(f.due(), ["web-0"]);
    }

    #[test]
    fn a_bypass_is_told_when_it_begins_and_when_it_ends() {
        let bypass = |value: &str| web(&json!({"metadata": {"annotations": {"weft.io/bypass": value}}}));
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        let mut events = Vec::new();
        for value in ["false", "true", "true", "false"] {
            f.apply(Event::Apply(bypass(value)));
            f.attempt(&enrolled(7));
            events.push(f.plan.take_reports().into_iter().map(|report| report.event).collect::<Vec<_>>());
        }
        assert_eq!(
            events,
            [vec![], vec![EnrolmentEvent::Bypassed(true)], vec![], vec![EnrolmentEvent::Bypassed(false)]]
        );
    }

    #[test]
    fn attempts_get_rarer_until_something_happens() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        let mut waited = Vec::new();
        for _ in 0..10 {
            f.attempt(&not_yet());
            let wait = f.plan.next_due().unwrap() - f.now;
            waited.push(u64::try_from(wait.as_millis()).unwrap());
            f.now += wait;
        }
        assert_eq!(waited, [5, 10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        f.attempt(&not_yet());
        f.plan.wake(Some("another"), f.now);
        assert!(f.due().is_empty());
        f.plan.wake(Some("uid-web-0"), f.now);
        assert_eq!(f.due(), ["web-0"]);
        f.attempt(&not_yet());
        assert_eq!(f.plan.next_due(), Some(f.now + FIRST_DELAY));
    }

    #[test]
    fn a_wake_does_not_disturb_enrolled_pods() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        f.attempt(&enrolled(7));
        f.plan.wake(None, f.now);
        assert!(f.due().is_empty());
    }

    #[test]
    fn new_rules_are_attempted_at_once() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        f.attempt(&enrolled(7));
        f.apply(Event::Apply(web(
            &json!({"metadata": {"annotations": {"config.linkerd.io/skip-outbound-ports": "25"}}}),
        )));
        let due = f.plan.begin(f.now);
        assert!(due[0].rules.as_ref().unwrap().skip_outbound_ports.contains(25));
    }

    #[test]
    fn rules_that_change_during_an_attempt_are_attempted_again() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        let before = f.plan.begin(f.now).remove(0);
        f.apply(Event::Apply(web(
            &json!({"metadata": {"annotations": {"config.linkerd.io/skip-outbound-ports": "25"}}}),
        )));
        f.plan.attempted(&before, enrolled(7), f.now);
        assert_eq!(f.due(), ["web-0"]);
    }

    #[test]
    fn an_unreadable_annotation_is_reported_once_and_not_attempted() {
        let mut f = Fixture::new(vec![Event::Apply(web(&unreadable())), Event::Apply(web(&unreadable()))]);
        assert!(f.due().is_empty());
        let reports = f.plan.take_reports();
        assert_eq!(reports.len(), 1);
        assert!(
            matches!(&reports[0].event, EnrolmentEvent::Problem(Problem::Annotation(error)) if error.value == "all")
        );
        assert_eq!(f.only().enrolled, None);
        f.apply(Event::Apply(web(&json!({}))));
        assert_eq!(f.due(), ["web-0"]);
        assert_eq!(f.only().problem, None);
    }

    #[test]
    fn rules_in_force_stay_when_an_annotation_becomes_unreadable() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        f.attempt(&enrolled(7));
        f.apply(Event::Apply(web(&unreadable())));
        assert!(f.due().is_empty());
        assert_eq!(f.only().enrolled.unwrap().cookie, 7);
        assert!(matches!(f.only().problem, Some(Problem::Annotation(_))));
    }

    #[test]
    fn a_refusal_of_the_kernel_is_reported_once_and_attempted_again() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        for _ in 0..3 {
            f.attempt(&Err(Problem::Failed("map full".into())));
            f.wait(1000);
        }
        assert_eq!(f.plan.take_reports().len(), 1);
        f.attempt(&enrolled(7));
        assert_eq!(f.only().problem, None);
    }

    /// For example a pod whose processes take long to inspect.
    #[test]
    fn an_attempt_that_takes_long_delays_no_other_pod() {
        let mut f = Fixture::new(vec![Event::Apply(pod("slow", &json!({})))]);
        let slow = f.plan.begin(f.now).remove(0);
        assert_eq!((f.due(), f.plan.next_due()), (vec![], None));
        f.apply(Event::Apply(pod("web-0", &json!({}))));
        assert_eq!(f.due(), ["web-0"]);
        f.attempt(&enrolled(7));
        f.plan.attempted(&slow, enrolled(9), f.now);
        assert!(f.plan.tracking().iter().all(|pod| pod.enrolled.is_some()));
        f.wait(10_000);
        assert_eq!(f.due(), ["slow", "web-0"]);
    }

    #[test]
    fn what_happens_during_an_attempt_is_not_lost() {
        let change = json!({"metadata": {"annotations": {"config.linkerd.io/skip-outbound-ports": "25"}}});
        let rows = [
            ("a container's cgroup", None),
            ("the same pod again, perhaps with a new sandbox", Some(web(&json!({})))),
            ("another annotation", Some(web(&change))),
        ];
        for (row, told) in rows {
            for result in [not_yet(), enrolled(7)] {
                let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
                let attempt = f.plan.begin(f.now).remove(0);
                match told.clone() {
                    Some(pod) => f.apply(Event::Apply(pod)),
                    None => f.plan.wake(Some("uid-web-0"), f.now),
                }
                assert!(f.due().is_empty(), "{row}: two attempts at once");
                f.plan.attempted(&attempt, result, f.now);
                assert_eq!(f.due(), ["web-0"], "{row}");
            }
        }
    }

    #[test]
    fn a_pod_with_a_new_sandbox_is_enrolled_again() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        f.attempt(&enrolled(7));
        f.plan.gone(&[6], f.now);
        assert!(f.due().is_empty());
        f.plan.gone(&[7], f.now);
        assert_eq!(f.due(), ["web-0"]);
        assert_eq!(f.only().enrolled, None);
    }

    #[test]
    fn an_enrolled_pod_that_ends_is_not_looked_for() {
        let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
        f.attempt(&enrolled(7));
        f.apply(Event::Apply(web(&json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))));
        f.attempt(&not_yet());
        assert!(f.due().is_empty());
        f.plan.wake(None, f.now);
        assert!(f.due().is_empty());
        assert_eq!(f.only().enrolled.unwrap().cookie, 7);
        f.apply(Event::Delete(web(&json!({}))));
        assert!(f.plan.tracking().is_empty());
    }

    #[test]
    fn a_list_replaces_what_was_known() {
        let mut f = Fixture::new(vec![Event::Apply(pod("old", &json!({}))), Event::Apply(pod("both", &json!({})))]);
        f.apply(Event::Init);
        f.apply(Event::InitApply(pod("both", &json!({}))));
        f.apply(Event::InitApply(pod("new", &json!({}))));
        assert_eq!(f.plan.tracking().len(), 3);
        f.apply(Event::InitDone);
        let names: Vec<_> = f.plan.tracking().into_iter().map(|pod| pod.name.name).collect();
        assert_eq!(names, ["both", "new"]);
    }

    #[test]
    fn caught_up_when_each_pod_of_the_first_list_was_attempted() {
        let mut f = Fixture::new(vec![Event::Init]);
        f.apply(Event::InitApply(pod("starting", &json!({}))));
        f.apply(Event::InitApply(pod("running", &json!({}))));
        f.apply(Event::InitApply(pod("refused", &unreadable())));
        assert!(!f.plan.caught_up());
        f.apply(Event::InitDone);
        assert!(!f.plan.caught_up());
        f.attempt(&not_yet());
        assert!(f.plan.caught_up());
    }

    #[test]
    fn without_pods_an_empty_list_is_enough() {
        let mut f = Fixture::new(vec![]);
        assert!(!f.plan.caught_up());
        f.apply(Event::Init);
        f.apply(Event::InitDone);
        assert!(f.plan.caught_up());
    }
}
