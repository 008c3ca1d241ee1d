//! The gRPC edge on the unix socket: turns messages into calls of the datapath and errors into status codes. Refuses to
//! decide anything. Pods are learned through [`Pods`] alone; another source calls the same [`Datapath`] functions.

use std::{pin::Pin, sync::Arc};

use tokio_stream::{Stream, StreamExt, wrappers::BroadcastStream, wrappers::errors::BroadcastStreamRecvError};
use tonic::{Request, Response, Status};
use weft_ebpf_abi::{
    counter,
    verdict::{Direction, Verdict},
};
use weft_proto::agent::{
    EnrolRequest, EnrolResponse, Event, PodStatus, StatusRequest, StatusResponse, VerdictCount, WatchRequest,
    WithdrawRequest, WithdrawResponse, pods_server, status_server, trace_server,
};

use crate::{
    datapath::{Datapath, DatapathError, Enrolled},
    error::chain,
    netns::NetnsError,
    rules::{InvalidRule, PodName, Rules},
    shared::Shared,
    trace::{Filter, Hub, api_direction},
};

/// Enrols and withdraws pods.
pub(crate) struct Pods(pub(crate) Shared);

/// Streams verdicts.
pub(crate) struct Trace(pub(crate) Hub);

/// Tells how things stand.
pub(crate) struct StatusService(pub(crate) Shared);

#[tonic::async_trait]
impl pods_server::Pods for Pods {
    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<EnrolResponse>, Status> {
        let rules = Rules::parse(request.into_inner()).map_err(invalid)?;
        let (pod, path) = (rules.pod.clone(), rules.netns_path.clone());
        let (netns_cookie, generation) = run(&self.0, move |datapath| datapath.enrol(&rules)).await?;
        tracing::info!(
            namespace = pod.namespace, pod = pod.name, netns = %path.display(), netns_cookie, generation,
            "pod enrolled"
        );
        Ok(Response::new(EnrolResponse { netns_cookie, generation: generation.into() }))
    }

    async fn withdraw(&self, request: Request<WithdrawRequest>) -> Result<Response<WithdrawResponse>, Status> {
        let pod = PodName::parse(request.into_inner().pod).map_err(invalid)?;
        tracing::info!(namespace = pod.namespace, pod = pod.name, "pod withdrawn");
        run(&self.0, move |datapath| datapath.withdraw(&pod)).await?;
        Ok(Response::new(WithdrawResponse {}))
    }
}

#[tonic::async_trait]
impl trace_server::Trace for Trace {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let filter = Filter::parse(request.into_inner()).map_err(Status::invalid_argument)?;
        let mut missed = 0;
        let events = BroadcastStream::new(self.0.subscribe()).filter_map(move |event| match event {
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
}

#[tonic::async_trait]
impl status_server::Status for StatusService {
    async fn get(&self, _request: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        run(&self.0, |datapath| status(datapath)).await.map(Response::new)
    }
}

fn status(datapath: &Datapath) -> Result<StatusResponse, DatapathError> {
    let mut verdicts = Vec::new();
    for direction in Direction::ALL {
        for verdict in Verdict::ALL {
            verdicts.push(VerdictCount {
                direction: api_direction(direction).into(),
                verdict: verdict.label().to_owned(),
                count: datapath.verdicts(direction, verdict)?,
            });
        }
    }
    Ok(StatusResponse {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        programs: datapath.digest(),
        cgroup: datapath.cgroup().display().to_string(),
        pin_dir: datapath.pin_dir().display().to_string(),
        pods: datapath.pods()?.into_iter().map(PodStatus::from).collect(),
        verdicts,
        events_dropped: datapath.counter(counter::EVENTS_DROPPED)?,
        flow_misses: datapath.counter(counter::FLOW_MISSES)?,
    })
}

impl From<Enrolled> for PodStatus {
    fn from(pod: Enrolled) -> Self {
        Self {
            pod: pod.name.as_ref().map(Into::into),
            netns_cookie: pod.cookie,
            outbound: pod.outbound,
            inbound: pod.inbound,
            generation: pod.generation.into(),
            ips: pod.ips.iter().map(ToString::to_string).collect(),
        }
    }
}

/// Calls the datapath off the async threads: a call may load programs.
async fn run<T: Send + 'static>(
    datapath: &Shared,
    call: impl FnOnce(&mut Datapath) -> Result<T, DatapathError> + Send + 'static,
) -> Result<T, Status> {
    let datapath = datapath.clone();
    tokio::task::spawn_blocking(move || call(&mut datapath.lock()))
        .await
        .map_err(|error| Status::internal(format!("datapath call failed: {error}")))?
        .map_err(failed)
}

fn invalid(rule: InvalidRule) -> Status {
    Status::invalid_argument(rule.to_string())
}

fn failed(error: DatapathError) -> Status {
    let text = chain(&error);
    tracing::warn!(error = text, "refused");
    match &error {
        DatapathError::Netns(NetnsError::Open { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Status::not_found(text)
        }
        _ => Status::failed_precondition(text),
    }
}
