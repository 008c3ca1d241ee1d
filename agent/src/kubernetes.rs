//! The agent on a Kubernetes node: watches the node's meshed pods through the API server, and enrols them.
//!
//! ```text
//! API server ──watch──> plan ──due──> locate (cgroup, process, netns) ──> datapath
//! cgroup tree ──wake──> plan <──result──────────────────────────────────────┘
//!                        └──reports──> Kubernetes Events
//! ```
//!
//! Decisions are in [`plan`], which is synchronous; this file waits and acts. Refuses to withdraw pods: see [`plan`].

mod client;
mod locate;
pub(crate) mod metrics;
mod owner;
mod plan;
mod pod;
mod report;
mod wake;

use std::{pin::pin, time::Duration};

use anyhow::{Context, Result};
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher},
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use weft_k8s_api::{inject::RedirectionDefaults, labels};
use weft_runtime::{error::chain, readiness::Gate};

use self::{
    client::Pauses,
    locate::{LocateError, Locator, Sandbox},
    metrics::EnrolmentSeconds,
    plan::Plan,
    pod::MeshedPod,
    wake::Wake,
};
pub(crate) use self::{
    client::connect,
    owner::{Owner, follow, uninstalled},
    plan::{Enrolment, EnrolmentEvent, Problem, Report, Tracking},
    report::Publisher,
};
use crate::{
    cgroup::AttachPoint,
    datapath::{
        handle::Handle,
        rules::{PodName, Rules},
        scans::{CpuMeter, ScanSlots},
    },
};

/// The node and pod this agent runs as, from the downward API.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) node: String,
    /// None for an agent that does not run in a pod.
    pub(crate) pod: Option<OwnPod>,
}

/// The agent's own pod.
#[derive(Clone, Debug)]
pub(crate) struct OwnPod {
    pub(crate) name: PodName,
    pub(crate) uid: String,
}

/// State of the node's pods, for status and metrics. `None` before the first list.
pub(crate) type Trackings = Option<Vec<Tracking>>;

/// Parameters of the enrolment of a node's pods.
pub(crate) struct Config {
    pub(crate) node: String,
    /// Defaults of redirection. Only pods of the control planes that it names are enrolled, of any if it names none.
    pub(crate) defaults: RedirectionDefaults,
    pub(crate) attach: AttachPoint,
    /// Cookies of network namespaces that are gone.
    pub(crate) gone: mpsc::UnboundedReceiver<Vec<u64>>,
}

/// Outputs of the enrolment of a node's pods.
pub(crate) struct Outputs {
    pub(crate) datapath: Handle,
    pub(crate) trackings: watch::Sender<Trackings>,
    pub(crate) caught_up: Gate,
    pub(crate) seconds: EnrolmentSeconds,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
}

/// The node's pods that are not enrolled because an attempt failed or an annotation cannot be read. A pod that is still
/// starting is not one of them.
pub(crate) fn failed(pods: &watch::Receiver<Trackings>) -> Vec<PodName> {
    let has_failed = |pod: &&Tracking| {
        pod.enrolled.is_none() && matches!(pod.problem, Some(Problem::Failed(_) | Problem::Annotation(_)))
    };
    pods.borrow().iter().flatten().filter(has_failed).map(|pod| pod.name.clone()).collect()
}

/// The labels of pods that belong to one of these control planes, or to any.
fn selector(control_planes: &[String]) -> String {
    match control_planes {
        [] => labels::CONTROL_PLANE_NS.to_owned(),
        some => format!("{} in ({})", labels::CONTROL_PLANE_NS, some.join(",")),
    }
}

/// Enrols the node's meshed pods, forever.
///
/// # Errors
/// When the node cannot be inspected. If the API server does not answer, this waits.
pub(crate) async fn enrol_pods(client: Client, mut config: Config, outputs: Outputs) -> Result<()> {
    let cookies = outputs.datapath.facts().cookies.clone();
    let locator = Locator::new(config.attach.clone(), cookies).context("cannot read the agent's own namespaces")?;
    let selector = selector(&config.defaults.control_plane_namespaces);
    let selection = watcher::Config::default().fields(&format!("spec.nodeName={}", config.node)).labels(&selector);
    let mut events = pin!(watcher(Api::<Pod>::all(client), selection).backoff(Pauses::default()));
    let mut wake = Wake::new(config.attach.pod_parents());
    let mut plan = Plan::new(config.defaults);
    let scans = ScanSlots::default();
    let (shared, look_with, scans) = (&outputs, &locator, &scans);
    let start = |pod: MeshedPod| async move {
        let result = attempt(shared, look_with, scans, &pod).await;
        (pod, result)
    };
    let mut attempts = FuturesUnordered::new();
    loop {
        let next_due = plan.next_due();
        let due = async {
            match next_due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            event = events.next() => match event.context("the watch of pods ended")? {
                Ok(event) => {
                    tracing::debug!(%event, "pod watch");
                    plan.apply(event, Instant::now());
                }
                Err(error) => tracing::warn!(error = chain(&error), "cannot watch this node's pods"),
            },
            woken = wake.woken() => {
                for pod in woken.context("cannot read inotify")? {
                    plan.wake(pod.as_deref(), Instant::now());
                }
            }
            Some(cookies) = config.gone.recv() => plan.gone(&cookies, Instant::now()),
            Some((pod, result)) = attempts.next() => plan.attempted(&pod, result, Instant::now()),
            () = due => {}
        }
        // All finished attempts, before new ones begin.
        while let Some(Some((pod, result))) = attempts.next().now_or_never() {
            plan.attempted(&pod, result, Instant::now());
        }
        // Watches are set before the attempt, so that anything that appears in between wakes the plan.
        wake.watch_parents();
        for pod in plan.begin(Instant::now()) {
            if plan.is_pending(&pod.uid) {
                match locator.pod_cgroup(&pod.uid) {
                    Some(cgroup) => wake.watch_pod(&cgroup, &pod.uid),
                    // Where pods have cgroups, there is nothing to look at yet.
                    None if !config.attach.is_root => {
                        let not_yet = Problem::NotYet(LocateError::NoProcess.to_string());
                        plan.attempted(&pod, Err(not_yet), Instant::now());
                        continue;
                    }
                    None => {}
                }
            }
            attempts.push(start(pod));
        }
        for report in plan.take_reports() {
            let (namespace, pod) = (&report.name.namespace, &report.name.name);
            match &report.event {
                EnrolmentEvent::Problem(problem) => {
                    tracing::warn!(namespace, pod, error = problem.text(), "pod not enrolled")
                }
                EnrolmentEvent::Forbidden(forbidden) => {
                    tracing::warn!(namespace, pod, error = %forbidden, "annotation without effect")
                }
                EnrolmentEvent::Bypassed(true) => {
                    tracing::warn!(namespace, pod, "pod bypassed: none of its connections are redirected")
                }
                EnrolmentEvent::Bypassed(false) => tracing::info!(namespace, pod, "pod redirected again"),
            }
            let _ = outputs.reports.send(report);
        }
        if let Some(tracking) = plan.take_tracking() {
            outputs.trackings.send_replace(Some(tracking));
        }
        if plan.caught_up() {
            outputs.caught_up.open();
        }
    }
}

/// Locates a pod on the node and enrols it. A pod's processes may delay the enrolment for seconds, but delay no other
/// pod.
async fn attempt(
    outputs: &Outputs,
    locator: &Locator,
    scans: &ScanSlots<String>,
    pod: &MeshedPod,
) -> Result<Enrolment, Problem> {
    let (look_for, locator) = (pod.clone(), locator.clone());
    let scanned = scans.run(&pod.uid, move |meter| locate(&locator, &look_for, meter)).await;
    let (sandbox, rules, found) = scanned.map_err(|error| Problem::Failed(error.to_string()))??;
    let Sandbox { netns, proxy, age } = sandbox;
    let done = outputs.datapath.enrol(netns, rules).await.map_err(|error| Problem::Failed(chain(&error)))?;
    if !done.changed {
        return Ok(Enrolment { cookie: done.cookie, after: Duration::ZERO });
    }
    let after = if done.is_new { age + found.elapsed() } else { Duration::ZERO };
    let (namespace, name) = (&pod.name.namespace, &pod.name.name);
    if done.is_new {
        outputs.seconds.observe(after);
        tracing::info!(
            namespace,
            pod = name,
            netns_cookie = done.cookie,
            generation = done.generation,
            proxy_uid = proxy.uid,
            proxy_cgroup = proxy.cgroup,
            after_ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX),
            "pod enrolled"
        );
    } else {
        tracing::info!(
            namespace,
            pod = name,
            netns_cookie = done.cookie,
            generation = done.generation,
            "pod's rules changed"
        );
    }
    Ok(Enrolment { cookie: done.cookie, after })
}

/// Finds a pod on the node, and completes its rules with what was found there.
fn locate(locator: &Locator, pod: &MeshedPod, meter: &mut CpuMeter) -> Result<(Sandbox, Rules, Instant), Problem> {
    let redirection = pod.rules.as_ref().map_err(|error| Problem::Annotation(error.clone()))?;
    let sandbox = locator.find(pod, redirection, meter).map_err(|error| match error {
        LocateError::Read { .. } | LocateError::Netns(_) | LocateError::NoPodCgroups => Problem::Failed(chain(&error)),
        _ => Problem::NotYet(error.to_string()),
    })?;
    let found = Instant::now();
    let wanted = pod::wanted(pod, redirection, &sandbox.netns.addresses, sandbox.proxy);
    let rules = Rules::new(wanted).map_err(|error| Problem::Failed(error.to_string()))?;
    Ok((sandbox, rules, found))
}

#[cfg(test)]
mod tests {
    use weft_k8s_api::inject::InjectError;

    use super::*;

    #[test]
    fn pods_whose_enrolment_failed_are_known_by_name() {
        let failed_with = || Some(Problem::Failed("map full".into()));
        let unreadable = InjectError { annotation: "config.linkerd.io/x", value: "y".into(), expected: "z" };
        let pods = [
            ("enrolled", Some(1), None),
            ("changed", Some(2), failed_with()),
            ("starting", None, Some(Problem::NotYet("no process".into()))),
            ("failed", None, failed_with()),
            ("refused", None, Some(Problem::Annotation(unreadable))),
        ];
        let pods = pods.into_iter().map(|(name, cookie, problem)| Tracking {
            name: PodName { namespace: "shop".into(), name: name.into() },
            uid: format!("uid-{name}"),
            enrolled: cookie.map(|cookie| Enrolment { cookie, after: Duration::ZERO }),
            problem,
        });
        let (_trackings, pods) = watch::channel(Some(pods.collect()));
        let names: Vec<String> = failed(&pods).into_iter().map(|pod| pod.name).collect();
        assert_eq!(names, ["failed", "refused"]);
    }

    #[test]
    fn pods_are_selected_by_their_control_plane() {
        assert_eq!(selector(&[]), "linkerd.io/control-plane-ns");
        let two = ["linkerd".to_owned(), "linkerd-edge".to_owned()];
        assert_eq!(selector(&two), "linkerd.io/control-plane-ns in (linkerd,linkerd-edge)");
    }
}
