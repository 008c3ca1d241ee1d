//! The gRPC edge: turns messages into calls of the datapath and errors into status codes. Refuses to decide anything.
//! [`Pods`] is served outside Kubernetes; on a Kubernetes node `kubernetes` makes the same calls.

mod request;

use std::{
    collections::HashMap,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt, wrappers::BroadcastStream, wrappers::errors::BroadcastStreamRecvError};
use tonic::{Request, Response, Status};
use weft_ebpf_abi::verdict::{Direction, Verdict};
use weft_proto::agent::{
    EnrolRequest, EnrolResponse, Event, ExplainRequest, ExplainResponse, Host, LogLine, PodRef, PodState, PodStatus,
    StatusRequest, StatusResponse, VerdictCount, WatchRequest, WithdrawRequest, WithdrawResponse, pods_server,
    status_server, trace_server,
};
use weft_runtime::{
    error::chain,
    telemetry::{self, Recent},
};

use crate::{
    cgroup::{self, AttachPoint},
    datapath::{
        DatapathError,
        explain::Answer,
        handle::Handle,
        netns::{Netns, NetnsError},
        rules::{InvalidRule, PodName, Rules},
        sample::{Enrolled, Sample},
        scans::ScanSlots,
    },
    features::Feature,
    host,
    kubernetes::{Problem, Tracking, Trackings},
    trace::{Broadcaster, Filter, api_direction},
};

/// Enrols and withdraws pods.
pub(crate) struct Pods {
    datapath: Handle,
    /// Of network namespaces, by their paths. As on a Kubernetes node, nothing else limits enrolments in progress:
    /// those of pods whose scans take long would use up such a limit while they wait for each other.
    scans: ScanSlots<PathBuf>,
}

/// Streams events.
pub(crate) struct Trace {
    pub(crate) events: Broadcaster,
    /// Adds a pod's status to an explanation.
    pub(crate) status: StatusService,
}

/// Answers status requests.
#[derive(Clone)]
pub(crate) struct StatusService {
    pub(crate) datapath: Handle,
    pub(crate) attach: AttachPoint,
    /// The features found at the start.
    pub(crate) features: Vec<Feature>,
    pub(crate) recent: Recent,
    /// `None` outside Kubernetes.
    pub(crate) kubernetes: Option<KubernetesNode>,
}

/// State that only an agent on a Kubernetes node has.
#[derive(Clone)]
pub(crate) struct KubernetesNode {
    pub(crate) name: String,
    pub(crate) pods: watch::Receiver<Trackings>,
}

impl Pods {
    pub(crate) fn new(datapath: Handle) -> Self {
        Self { datapath, scans: ScanSlots::default() }
    }
}

#[tonic::async_trait]
impl pods_server::Pods for Pods {
    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<EnrolResponse>, Status> {
        let request = request.into_inner();
        let path = request::netns_path(&request).map_err(invalid)?;
        let mut rules = request::rules(request).and_then(Rules::new).map_err(invalid)?;
        let pod = rules.pod.clone();
        let (cookies, netns_path) = (self.datapath.facts().cookies.clone(), path.clone());
        let proxy_uid = rules.proxy_uid;
        let scanned = self.scans.run(&path, move |_| Netns::open(&netns_path, &cookies, proxy_uid)).await;
        let netns = scanned.map_err(|error| Status::internal(error.to_string()))?.map_err(no_netns)?;
        rules.add_addresses(&netns.addresses);
        let done = self.datapath.enrol(netns, rules).await.map_err(refused)?;
        tracing::info!(
            namespace = pod.namespace, pod = pod.name, netns = %path.display(), netns_cookie = done.cookie,
            generation = done.generation, "pod enrolled"
        );
        Ok(Response::new(EnrolResponse { netns_cookie: done.cookie, generation: done.generation.into() }))
    }

    async fn withdraw(&self, request: Request<WithdrawRequest>) -> Result<Response<WithdrawResponse>, Status> {
        let pod = request::pod_name(request.into_inner().pod).map_err(invalid)?;
        tracing::info!(namespace = pod.namespace, pod = pod.name, "pod withdrawn");
        self.datapath.call(move |kernel| kernel.withdraw(&pod)).await.map_err(refused)?;
        Ok(Response::new(WithdrawResponse {}))
    }
}

#[tonic::async_trait]
impl trace_server::Trace for Trace {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let filter = Filter::parse(request.into_inner()).map_err(Status::invalid_argument)?;
        let mut missed = 0;
        let events = BroadcastStream::new(self.events.subscribe()).filter_map(move |event| match event {
            // An event that is filtered out must not take the count of lost ones with it.
            Ok(event) => {
                missed += event.dropped_before;
                filter.matches(&event).then(|| {
                    let event = Event { dropped_before: missed, ..Arc::unwrap_or_clone(event) };
                    missed = 0;
                    Ok(event)
                })
            }
            Err(BroadcastStreamRecvError::Lagged(events)) => {
                missed += events;
                None
            }
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let question = request::question(request.into_inner()).map_err(invalid)?;
        let wanted = PodRef::from(&question.pod);
        let answered = self.status.datapath.call(move |kernel| {
            let answer = kernel.explain(&question)?;
            Ok((answer, kernel.sample(Duration::ZERO)?))
        });
        let (Answer { verdict, new_destination, reason, change }, sample) = answered.await.map_err(refused)?;
        let pods = pods(&sample.pods, self.status.known());
        Ok(Response::new(ExplainResponse {
            verdict: verdict.label().to_owned(),
            new_destination: new_destination.map(|end| end.to_string()).unwrap_or_default(),
            reason,
            change,
            pod_status: pods.into_iter().find(|pod| pod.pod.as_ref() == Some(&wanted)),
        }))
    }
}

#[tonic::async_trait]
impl status_server::Status for StatusService {
    async fn get(&self, _request: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let sample = self.datapath.call(|kernel| kernel.sample(Duration::ZERO)).await.map_err(refused)?;
        Ok(Response::new(self.status(&sample)))
    }
}

impl StatusService {
    /// The node's pods, as known from the API server.
    fn known(&self) -> Trackings {
        self.kubernetes.as_ref().and_then(|node| node.pods.borrow().clone())
    }

    fn status(&self, sample: &Sample) -> StatusResponse {
        let facts = self.datapath.facts();
        let count = |(direction, verdict, count): &(Direction, Verdict, u64)| VerdictCount {
            direction: api_direction(*direction).into(),
            verdict: verdict.label().to_owned(),
            count: *count,
        };
        StatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            programs: facts.digest.clone(),
            cgroup: facts.cgroup.display().to_string(),
            pin_dir: facts.pin_dir.display().to_string(),
            pods: pods(&sample.pods, self.known()),
            verdicts: sample.verdicts.iter().map(count).collect(),
            events_dropped: sample.events_dropped,
            flow_misses: sample.flow_misses,
            node: self.kubernetes.as_ref().map(|node| node.name.clone()).unwrap_or_default(),
            mode: if self.kubernetes.is_some() { "kubernetes" } else { "api" }.to_owned(),
            cgroup_reason: self.attach.reason.clone(),
            cgroup_is_root: self.attach.is_root,
            bypassed: sample.bypassed,
            bind_failures: sample.bind_failures,
            listeners_lost: sample.listeners_lost,
            admissions_refused: sample.admissions_refused,
            host: Some(Host { kernel: host::kernel(), cgroups: cgroup::layout().to_owned(), btf: host::has_btf() }),
            last_errors: self.recent.lines().into_iter().map(log_line).collect(),
            features: self.features.iter().map(Into::into).collect(),
        }
    }
}

fn log_line(line: telemetry::Line) -> LogLine {
    let at = line.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    LogLine {
        at_unix_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
        level: line.level.as_str().to_ascii_lowercase(),
        text: line.text,
        times: line.times,
    }
}

/// The kernel's pods and, on a Kubernetes node, their state in the API server, with those that are not in the kernel.
fn pods(enrolled: &[Enrolled], known: Trackings) -> Vec<PodStatus> {
    let in_kubernetes = known.is_some();
    let (mut by_cookie, mut others) = (HashMap::new(), Vec::new());
    for tracking in known.into_iter().flatten() {
        match tracking.enrolled {
            Some(enrolment) => drop(by_cookie.insert(enrolment.cookie, tracking)),
            None => others.push(tracking),
        }
    }
    let mut pods: Vec<PodStatus> = Vec::new();
    for pod in enrolled {
        // An unreadable one may have been enrolled by an earlier agent, and keeps those rules.
        let refused = |other: &Tracking| Some(&other.name) == pod.name.as_ref() && is_refused(other);
        let before = others.iter().position(refused).map(|at| others.swap_remove(at));
        let tracking = by_cookie.remove(&pod.cookie).or(before);
        let mut status = PodStatus::from(pod);
        match tracking {
            Some(tracking) => describe(&mut status, &tracking),
            None if in_kubernetes => {
                status.state = PodState::Leaving.into();
                status.reason = "the API server no longer knows it, or knows another sandbox of it".to_owned();
            }
            None => {}
        }
        pods.push(status);
    }
    for tracking in by_cookie.into_values().chain(others) {
        let mut status = PodStatus { pod: Some((&tracking.name).into()), ..PodStatus::default() };
        describe(&mut status, &tracking);
        pods.push(status);
    }
    pods
}

fn describe(status: &mut PodStatus, tracking: &Tracking) {
    status.uid.clone_from(&tracking.uid);
    status.reason = tracking.problem.as_ref().map(Problem::text).unwrap_or_default();
    if let Some(enrolment) = tracking.enrolled {
        status.enrolled_after_ms = u64::try_from(enrolment.after.as_millis()).unwrap_or(u64::MAX);
    } else if !(status.outbound && status.inbound) {
        status.state = if is_refused(tracking) { PodState::Refused } else { PodState::Pending }.into();
    }
}

fn is_refused(tracking: &Tracking) -> bool {
    matches!(tracking.problem, Some(Problem::Annotation(_)))
}

impl From<&Enrolled> for PodStatus {
    fn from(pod: &Enrolled) -> Self {
        let state = if pod.outbound && pod.inbound { PodState::Enrolled } else { PodState::Pending };
        Self {
            pod: pod.name.as_ref().map(Into::into),
            netns_cookie: pod.cookie,
            outbound: pod.outbound,
            inbound: pod.inbound,
            generation: pod.generation.into(),
            ips: pod.ips.iter().map(ToString::to_string).collect(),
            state: state.into(),
            bypassed: pod.bypassed,
            self_enrolled: pod.self_enrolled,
            strict: pod.strict,
            listening: pod.listening,
            ..Self::default()
        }
    }
}

impl From<&PodName> for PodRef {
    fn from(pod: &PodName) -> Self {
        Self { namespace: pod.namespace.clone(), name: pod.name.clone() }
    }
}

fn refused(error: DatapathError) -> Status {
    let text = chain(&error);
    tracing::warn!(error = text, "refused");
    Status::failed_precondition(text)
}

fn invalid(rule: InvalidRule) -> Status {
    Status::invalid_argument(rule.to_string())
}

fn no_netns(error: NetnsError) -> Status {
    let text = chain(&error);
    tracing::warn!(error = text, "refused");
    match &error {
        NetnsError::Open { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Status::not_found(text),
        _ => Status::failed_precondition(text),
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, sync::mpsc, time::Duration};

    use futures::FutureExt as _;
    use tonic::Code;
    use weft_k8s_api::inject::InjectError;
    use weft_proto::agent::pods_server::Pods as _;

    use super::*;
    use crate::{
        datapath::{fake::FakeKernel, scans::tests::work_for_long},
        kubernetes::Enrolment,
    };

    fn enrolled(name: &str, cookie: u64) -> Enrolled {
        Enrolled {
            name: Some(PodName { namespace: "shop".into(), name: name.into() }),
            cookie,
            generation: 1,
            outbound: true,
            inbound: true,
            ips: Vec::new(),
            bypassed: false,
            self_enrolled: false,
            strict: false,
            listening: true,
        }
    }

    fn tracking(name: &str, cookie: Option<u64>, problem: Option<Problem>) -> Tracking {
        Tracking {
            name: PodName { namespace: "shop".into(), name: name.into() },
            uid: format!("uid-{name}"),
            enrolled: cookie.map(|cookie| Enrolment { cookie, after: Duration::from_millis(40) }),
            problem,
        }
    }

    #[test]
    fn kernel_and_api_server_are_told_as_one() {
        let bad = InjectError { annotation: "config.linkerd.io/x", value: "y".into(), expected: "z" };
        let known = vec![
            tracking("running", Some(1), None),
            tracking("changed", Some(2), Some(Problem::Annotation(bad.clone()))),
            tracking("starting", None, Some(Problem::NotYet("no process".into()))),
            tracking("refused", None, Some(Problem::Annotation(bad.clone()))),
            tracking("older", None, Some(Problem::Annotation(bad))),
        ];
        let kernel = vec![enrolled("running", 1), enrolled("changed", 2), enrolled("deleted", 3), enrolled("older", 4)];
        let reported: Vec<_> = pods(&kernel, Some(known))
            .into_iter()
            .map(|pod| (pod.pod.unwrap().name, pod.uid, PodState::try_from(pod.state).unwrap(), pod.reason.is_empty()))
            .collect();
        let row = |name: &str, uid: &str, state, fine| (name.to_owned(), uid.to_owned(), state, fine);
        assert_eq!(
            reported,
            [
                row("running", "uid-running", PodState::Enrolled, true),
                row("changed", "uid-changed", PodState::Enrolled, false),
                row("deleted", "", PodState::Leaving, false),
                row("older", "uid-older", PodState::Enrolled, false),
                row("starting", "uid-starting", PodState::Pending, false),
                row("refused", "uid-refused", PodState::Refused, false),
            ]
        );
    }

    #[tokio::test]
    async fn enrolments_that_wait_for_long_scans_delay_no_other_pod() {
        let enrolment = |netns: &str| {
            let (pod, ips) = (PodRef { namespace: "shop".into(), name: "web-0".into() }, vec!["10.0.0.7".into()]);
            Request::new(EnrolRequest { pod: Some(pod), netns_path: netns.into(), ips, ..EnrolRequest::default() })
        };
        let (api, large) = (Pods::new(FakeKernel::default().spawn()), PathBuf::from("/nowhere/large"));
        api.scans.run(&large, |_| work_for_long()).await.unwrap();
        let (end, ended) = mpsc::channel::<()>();
        let mut scan = pin!(api.scans.run(&large, move |_| ended.recv()));
        assert!(scan.as_mut().now_or_never().is_none());
        let mut waiting: Vec<_> = (0..64).map(|_| api.enrol(enrolment("/nowhere/large"))).collect();
        assert!(waiting.iter_mut().all(|enrolment| enrolment.now_or_never().is_none()));
        let other = tokio::time::timeout(Duration::from_secs(20), api.enrol(enrolment("/nowhere/other")));
        assert_eq!(other.await.unwrap().unwrap_err().code(), Code::NotFound);
        drop(end);
        assert!(scan.await.unwrap().is_err());
        for enrolment in waiting {
            assert_eq!(enrolment.await.unwrap_err().code(), Code::NotFound);
        }
    }

    #[test]
    fn nobody_leaves_before_the_first_list() {
        let reported = pods(&[enrolled("running", 1)], None);
        assert_eq!(reported[0].state(), PodState::Enrolled);
    }
}
