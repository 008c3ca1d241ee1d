//! The agent on a Kubernetes node: learns of the node's meshed pods from the API server, and enrols them.
//!
//! ```text
//! API server ──watch──> plan ──due──> locate (cgroup, process, netns) ──> datapath
//! cgroup tree ──wake──> plan <──result──────────────────────────────────────┘
//!                        └──reports──> Kubernetes Events
//! ```
//!
//! Decisions are in [`plan`], synchronous; this is the shell that waits and acts. Refuses to withdraw: see [`plan`].

mod locate;
mod owner;
mod plan;
mod pod;
mod report;
mod wake;

use std::{pin::pin, time::Duration};

use anyhow::{Context, Result};
use futures::StreamExt;
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
use weft_runtime::readiness::Gate;

use self::{
    locate::{LocateError, Locator},
    plan::Plan,
    pod::MeshedPod,
    wake::Wake,
};
pub(crate) use self::{
    owner::{Owner, follow, uninstalled},
    plan::{Enrolment, News, Problem, Report, Tracking},
    report::Publisher,
};
use crate::{
    cgroup::AttachPoint, error::chain, metrics::EnrolmentSeconds, rules::PodName, rules::Rules, shared::Shared,
};

/// Whom the agent is, as the downward API told it.
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

/// What is known of the node's pods, for status and metrics. `None` before the first list.
pub(crate) type Trackings = Option<Vec<Tracking>>;

/// What enrolment is told.
pub(crate) struct Config {
    pub(crate) node: String,
    /// Only pods of the control plane in this namespace.
    pub(crate) controller_namespace: Option<String>,
    pub(crate) defaults: RedirectionDefaults,
    pub(crate) attach: AttachPoint,
    /// Cookies of network namespaces that are gone.
    pub(crate) gone: mpsc::UnboundedReceiver<Vec<u64>>,
}

/// Whom enrolment tells.
pub(crate) struct Outputs {
    pub(crate) datapath: Shared,
    pub(crate) trackings: watch::Sender<Trackings>,
    pub(crate) caught_up: Gate,
    pub(crate) seconds: EnrolmentSeconds,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
}

/// Enrols the node's meshed pods, forever.
///
/// # Errors
/// When the node cannot be looked at. An API server that does not answer is waited for.
pub(crate) async fn enrol_pods(client: Client, mut config: Config, outputs: Outputs) -> Result<()> {
    let cookies = outputs.datapath.lock().cookies();
    let locator = Locator::new(config.attach.clone(), cookies).context("cannot read the agent's own namespaces")?;
    let selector = match &config.controller_namespace {
        Some(namespace) => format!("{}={namespace}", labels::CONTROL_PLANE_NS),
        None => labels::CONTROL_PLANE_NS.to_owned(),
    };
    let selection = watcher::Config::default().fields(&format!("spec.nodeName={}", config.node)).labels(&selector);
    let mut events = pin!(watcher(Api::<Pod>::all(client), selection).default_backoff());
    let mut wake = Wake::new().context("cannot use inotify")?;
    let mut plan = Plan::new(config.defaults);
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
            () = due => {}
        }
        // Watched before they are looked at: what appears between the two wakes.
        for parent in config.attach.pod_parents() {
            wake.watch(&parent);
        }
        for uid in plan.pending().map(str::to_owned).collect::<Vec<_>>() {
            if let Some(cgroup) = locator.pod_cgroup(&uid) {
                wake.watch_pod(&cgroup, &uid);
            }
        }
        for pod in plan.due(Instant::now()) {
            let result = attempt(&outputs, &locator, pod.clone()).await?;
            plan.attempted(&pod, result, Instant::now());
        }
        for report in plan.take_reports() {
            let (namespace, pod) = (&report.name.namespace, &report.name.name);
            match &report.news {
                News::Problem(problem) => tracing::warn!(namespace, pod, error = problem.text(), "pod not enrolled"),
                News::Bypassed(true) => tracing::warn!(namespace, pod, "pod bypassed: nothing of it is redirected"),
                News::Bypassed(false) => tracing::info!(namespace, pod, "pod redirected again"),
            }
            let _ = outputs.reports.send(report);
        }
        if plan.listed() {
            let now = Some(plan.tracking());
            outputs.trackings.send_if_modified(|known| {
                *known != now && {
                    *known = now;
                    true
                }
            });
        }
        if plan.caught_up() {
            outputs.caught_up.open();
        }
    }
}

/// Tries to enrol one pod, off the async threads.
async fn attempt(outputs: &Outputs, locator: &Locator, pod: MeshedPod) -> Result<Result<Enrolment, Problem>> {
    let (datapath, locator, seconds) = (outputs.datapath.clone(), locator.clone(), outputs.seconds.clone());
    let enrol = move || enrol(&datapath, &locator, &seconds, &pod);
    tokio::task::spawn_blocking(enrol).await.context("an enrolment panicked")
}

fn enrol(
    datapath: &Shared,
    locator: &Locator,
    seconds: &EnrolmentSeconds,
    pod: &MeshedPod,
) -> Result<Enrolment, Problem> {
    let rules = pod.rules.as_ref().map_err(|error| Problem::Annotation(error.clone()))?;
    let sandbox = locator.find(pod, rules).map_err(|error| match error {
        LocateError::Read { .. } | LocateError::Netns(_) | LocateError::NoPodCgroups => Problem::Failed(chain(&error)),
        _ => Problem::NotYet(error.to_string()),
    })?;
    let found = Instant::now();
    let request = pod::request(pod, rules, &sandbox.netns.addresses, sandbox.proxy);
    let rules = Rules::parse(request).map_err(|error| Problem::Failed(error.to_string()))?;
    let done = datapath.lock().enrol(&sandbox.netns, &rules).map_err(|error| Problem::Failed(chain(&error)))?;
    if !done.changed {
        return Ok(Enrolment { cookie: done.cookie, after: Duration::ZERO });
    }
    let after = if done.is_new { sandbox.age + found.elapsed() } else { Duration::ZERO };
    let (namespace, name) = (&pod.name.namespace, &pod.name.name);
    if done.is_new {
        seconds.observe(after);
        tracing::info!(
            namespace,
            pod = name,
            netns_cookie = done.cookie,
            generation = done.generation,
            proxy_uid = sandbox.proxy.uid,
            proxy_cgroup = sandbox.proxy.cgroup,
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
