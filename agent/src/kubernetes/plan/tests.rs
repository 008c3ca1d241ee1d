//! The plan: events and results in, attempts and reports out.

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
    assert_eq!(events, [vec![], vec![EnrolmentEvent::Bypassed(true)], vec![], vec![EnrolmentEvent::Bypassed(false)]]);
}

#[test]
fn an_annotation_that_the_administrator_forbids_is_reported_once_and_has_no_effect() {
    let mut f = Fixture::new(vec![]);
    f.plan.defaults.rules.bypass_allowed = false;
    let skips =
        |ports: &str| web(&json!({"metadata": {"annotations": {"config.linkerd.io/skip-inbound-ports": ports}}}));
    let mut reported = Vec::new();
    for ports in ["4567", "1-65535", "1-65535", "80", "4567", "80"] {
        f.apply(Event::Apply(skips(ports)));
        f.wait(10_000);
        let pod = f.plan.begin(f.now).remove(0);
        let skipped = pod.rules.as_ref().unwrap().skip_inbound_ports.to_string();
        assert_eq!(skipped, if ports == "4567" { "4567" } else { "4567-4568" }, "{ports}");
        f.plan.attempted(&pod, enrolled(7), f.now);
        assert_eq!(f.only().problem, None, "{ports}");
        reported.extend(f.plan.take_reports().into_iter().map(|report| match report.event {
            EnrolmentEvent::Forbidden(Forbidden::Skip { value, .. }) => value,
            event => panic!("{ports}: {event:?}"),
        }));
    }
    assert_eq!(reported, ["1-65535", "80", "80"]);
}

#[test]
fn another_user_or_group_of_the_proxy_is_reported_where_it_is_forbidden_and_has_no_effect() {
    let mut f = Fixture::new(vec![]);
    f.plan.defaults.rules.bypass_allowed = false;
    for name in ["config.linkerd.io/proxy-uid", "config.linkerd.io/proxy-gid"] {
        f.apply(Event::Apply(web(&json!({"metadata": {"annotations": {name: "1000"}}}))));
        let pod = f.plan.begin(f.now).remove(0);
        let rules = pod.rules.as_ref().unwrap();
        assert_eq!((rules.proxy_uid, rules.proxy_gid), (2102, None), "{name}");
        f.plan.attempted(&pod, enrolled(7), f.now);
        let reported = f.plan.take_reports().into_iter().map(|report| match report.event {
            EnrolmentEvent::Forbidden(forbidden) => forbidden.annotation(),
            event => panic!("{name}: {event:?}"),
        });
        assert_eq!(reported.collect::<Vec<_>>(), [name]);
    }
}

#[test]
fn attempts_get_rarer_until_something_happens() {
    let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
    let delay = |f: &mut Fixture, result| {
        f.attempt(&result);
        let wait = f.plan.next_due().unwrap() - f.now;
        f.now += wait;
        wait.as_millis()
    };
    let waited: Vec<_> = (0..10).map(|_| delay(&mut f, not_yet())).collect();
    assert_eq!(waited, [5, 10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
    // Each of these may take long.
    let waited: Vec<_> = (0..6).map(|_| delay(&mut f, Err(Problem::Failed("no answer".into())))).collect();
    assert_eq!(waited, [1000, 2000, 4000, 8000, 10_000, 10_000]);
    assert_eq!(delay(&mut f, not_yet()), 1000);
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

/// As a pod that waits for its image.
#[test]
fn a_wake_of_one_pod_does_not_disturb_others_that_wait() {
    let mut f = Fixture::new(vec![Event::Apply(web(&json!({}))), Event::Apply(pod("waiting", &json!({})))]);
    for wait in [5, 10] {
        f.attempt(&not_yet());
        f.wait(wait);
    }
    f.attempt(&not_yet());
    f.plan.wake(Some("uid-web-0"), f.now);
    assert_eq!(f.due(), ["web-0"]);
    f.attempt(&enrolled(7));
    assert_eq!(f.plan.next_due(), Some(f.now + 4 * FIRST_DELAY));
}

#[test]
fn new_rules_are_attempted_at_once() {
    let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
    f.attempt(&enrolled(7));
    f.apply(Event::Apply(web(&json!({"metadata": {"annotations": {"config.linkerd.io/skip-outbound-ports": "25"}}}))));
    let due = f.plan.begin(f.now);
    assert!(due[0].rules.as_ref().unwrap().skip_outbound_ports.contains(25));
}

#[test]
fn an_enrolled_pod_is_attempted_when_what_matters_changes() {
    let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
    f.attempt(&enrolled(7));
    let status = |ip: &str, container: &str| {
        let proxy = json!([{"name": "linkerd-proxy", "containerID": format!("containerd://{container}")}]);
        let status = json!({"phase": "Running", "podIPs": [{"ip": ip}], "initContainerStatuses": proxy});
        web(&json!({"status": status}))
    };
    for (row, pod, is_attempted) in [
        ("it runs", web(&json!({"status": {"phase": "Running"}})), false),
        ("its addresses and its proxy's container are reported", status("10.244.0.7", "aa"), true),
        ("the same again", status("10.244.0.7", "aa"), false),
        ("its proxy was started again", status("10.244.0.7", "bb"), true),
        ("a new sandbox", status("10.244.0.8", "bb"), true),
    ] {
        f.apply(Event::Apply(pod));
        assert_eq!(!f.due().is_empty(), is_attempted, "{row}");
        f.attempt(&enrolled(7));
    }
}

#[test]
fn rules_that_change_during_an_attempt_are_attempted_again() {
    let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
    let before = f.plan.begin(f.now).remove(0);
    f.apply(Event::Apply(web(&json!({"metadata": {"annotations": {"config.linkerd.io/skip-outbound-ports": "25"}}}))));
    f.plan.attempted(&before, enrolled(7), f.now);
    assert_eq!(f.due(), ["web-0"]);
}

#[test]
fn an_unreadable_annotation_is_reported_once_and_not_attempted() {
    let mut f = Fixture::new(vec![Event::Apply(web(&unreadable())), Event::Apply(web(&unreadable()))]);
    assert!(f.due().is_empty());
    let reports = f.plan.take_reports();
    assert_eq!(reports.len(), 1);
    assert!(matches!(&reports[0].event, EnrolmentEvent::Problem(Problem::Annotation(error)) if error.value == "all"));
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
    for (row, reported) in rows {
        for result in [not_yet(), enrolled(7)] {
            let mut f = Fixture::new(vec![Event::Apply(web(&json!({})))]);
            let attempt = f.plan.begin(f.now).remove(0);
            match reported.clone() {
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
    let ends = || web(&json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    f.apply(Event::Apply(ends()));
    f.wait(10_000);
    f.attempt(&not_yet());
    assert!(f.due().is_empty());
    f.plan.wake(None, f.now);
    assert!(f.due().is_empty());
    assert_eq!(f.only().enrolled.unwrap().cookie, 7);
    // If it gets a new sandbox instead, an event follows.
    f.apply(Event::Apply(ends()));
    assert_eq!(f.due(), ["web-0"]);
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
fn tracking_is_taken_when_it_has_changed() {
    let mut f = Fixture::new(vec![Event::Init, Event::InitApply(web(&json!({})))]);
    assert_eq!(f.plan.take_tracking(), None, "the list is not complete");
    f.apply(Event::InitDone);
    assert_eq!(f.plan.take_tracking().unwrap().len(), 1);
    let failed = || Err(Problem::Failed("map full".into()));
    for (row, result, is_changed) in [
        ("a problem", not_yet(), true),
        ("the same problem", not_yet(), false),
        ("enrolled", enrolled(7), true),
        ("reviewed", enrolled(7), false),
        ("not found at a review", not_yet(), false),
        ("a new sandbox", enrolled(8), true),
        ("a failure", failed(), true),
        ("the same failure", failed(), false),
        ("no failure any more", enrolled(8), true),
    ] {
        f.wait(10_000);
        f.attempt(&result);
        assert_eq!(f.plan.take_tracking().is_some(), is_changed, "{row}");
    }
    f.plan.gone(&[8], f.now);
    assert_eq!(f.plan.take_tracking().unwrap(), [f.only()]);
    for (row, event, is_changed) in [
        ("an event", Event::Apply(web(&json!({}))), false),
        ("an unreadable annotation", Event::Apply(web(&unreadable())), true),
        ("the same annotation", Event::Apply(web(&unreadable())), false),
        ("a readable one", Event::Apply(web(&json!({}))), true),
        ("another pod", Event::Apply(pod("web-1", &json!({}))), true),
        ("its end", Event::Apply(pod("web-1", &json!({"status": {"phase": "Succeeded"}}))), true),
        ("its deletion", Event::Delete(pod("web-1", &json!({}))), false),
        ("a deletion", Event::Delete(web(&json!({}))), true),
    ] {
        f.apply(event);
        assert_eq!(f.plan.take_tracking().is_some(), is_changed, "{row}");
    }
}

#[test]
fn without_pods_an_empty_list_is_enough() {
    let mut f = Fixture::new(vec![]);
    assert!(!f.plan.caught_up());
    f.apply(Event::Init);
    f.apply(Event::InitDone);
    assert!(f.plan.caught_up());
}
