//! The gRPC service `weft.viz.v1.Viz`: each call is authenticated, authorised and bounded, and then the engine's.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use futures::{StreamExt as _, stream};
use http::HeaderMap;
use tokio::time::{sleep, timeout};
use tonic::{Code, Request, Response, Status};
use weft_proto::viz::{
    EdgesRequest, EdgesResponse, Resource, RoutesRequest, RoutesResponse, SeriesRequest, SeriesResponse,
    StatInboundRequest, StatInboundResponse, StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse,
    TapRequest, viz_server::Viz,
};
use weft_runtime::drain::Watch;
use weft_viz_core::{Engine, RequestError, rpc::TapStream};

use crate::{
    fleet::Mesh,
    gate::{self, Access, Caller, Gate},
    limits::{InUse, Permit, Use},
    metrics::VizMetrics,
};

/// Deadline of an answer: two rounds of scrapes of the most proxies that one component has.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// See above; clones are the same service.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) engine: Engine<Mesh>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) used: InUse,
    pub(crate) metrics: VizMetrics,
    pub(crate) drain: Watch,
}

/// The namespaces of the resources that a request names; the empty one means all.
fn namespaces<'a>(resources: impl IntoIterator<Item = &'a Option<Resource>>) -> Vec<String> {
    let mut namespaces = Vec::new();
    for resource in resources {
        match resource {
            None => namespaces.push(String::new()),
            // It may be named in either field.
            Some(resource) if resource.kind == "namespace" => {
                namespaces.push(resource.name.clone());
                namespaces.extend(Some(resource.namespace.clone()).filter(|namespace| !namespace.is_empty()));
            }
            Some(resource) => namespaces.push(resource.namespace.clone()),
        }
    }
    namespaces.sort_unstable();
    namespaces.dedup();
    namespaces
}

fn stat_namespaces(request: &StatRequest) -> Vec<String> {
    // What the clients of a resource count is theirs.
    let others = [&request.to, &request.from].into_iter().filter(|other| other.is_some());
    namespaces(std::iter::once(&request.resource).chain(others))
}

impl Service {
    /// Who asks, and whether it may; the use counts until the permit is dropped.
    async fn admit(
        &self,
        headers: &HeaderMap,
        access: Access,
        namespaces: &[String],
        what: Use,
    ) -> Result<(Arc<Caller>, Permit), Status> {
        let caller = self.gate.caller(headers).await?;
        self.gate.allow(&caller, access, namespaces).await?;
        let permit = self.used.begin(what, &caller.user)?;
        Ok((caller, permit))
    }

    /// Answers a request for metrics.
    async fn answer<Q, A, F>(
        &self,
        method: &'static str,
        request: Request<Q>,
        namespaces: Vec<String>,
        ask: impl FnOnce(Q) -> F,
    ) -> Result<Response<A>, Status>
    where
        F: Future<Output = Result<A, RequestError>>,
    {
        let (metadata, _, request) = request.into_parts();
        let answering = async {
            let (_, _permit) = self.admit(&metadata.into_headers(), Access::Stats, &namespaces, Use::Request).await?;
            Ok(ask(request).await?)
        };
        let answer = timeout(ANSWER_TIMEOUT, answering).await;
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("the proxies took too long to answer")));
        self.metrics.answered(method, answer.as_ref().err().map_or(Code::Ok, Status::code));
        answer.map(Response::new)
    }

    async fn open_tap(&self, request: Request<TapRequest>) -> Result<TapStream, Status> {
        let (metadata, _, request) = request.into_parts();
        let headers = metadata.into_headers();
        let namespaces = namespaces([&request.resource]);
        let (_, permit) = self.admit(&headers, Access::Taps, &namespaces, Use::Tap).await?;
        let events = self.engine.tap(request).await?;
        let (service, open) = (self.clone(), OpenTap::begin(&self.metrics, permit));
        // Longer than an answer of Kubernetes counts, a tap goes on only if it would be admitted again.
        let end = async move {
            let revoked = async {
                loop {
                    sleep(gate::KEEP).await;
                    let admitted = async {
                        let caller = service.gate.caller(&headers).await?;
                        service.gate.allow(&caller, Access::Taps, &namespaces).await
                    };
                    match admitted.await {
                        // The API server is away; who was admitted may stay.
                        Err(status)
                            if status.code() != Code::Unavailable && status.code() != Code::ResourceExhausted =>
                        {
                            return status;
                        }
                        _ => {}
                    }
                }
            };
            tokio::select! {
                status = revoked => status,
                () = service.drain.signaled() => Status::unavailable("weft-viz is shutting down"),
            }
        };
        Ok(until(events, Box::pin(end), open))
    }
}

/// A stream until its end, or until `end` says why it ends earlier. It holds `open` as long as it lives.
fn until(
    events: weft_viz_core::TapEvents,
    end: Pin<Box<dyn Future<Output = Status> + Send>>,
    open: OpenTap,
) -> TapStream {
    Box::pin(stream::unfold(Some((events, end, open)), |state| async {
        let (mut events, mut end, open) = state?;
        tokio::select! {
            biased;
            status = &mut end => Some((Err(status), None)),
            event = events.next() => event.map(|event| (Ok(event), Some((events, end, open)))),
        }
    }))
}

/// A tap that is counted while it is open.
struct OpenTap {
    metrics: VizMetrics,
    _permit: Permit,
}

impl OpenTap {
    fn begin(metrics: &VizMetrics, permit: Permit) -> Self {
        metrics.taps.inc();
        Self { metrics: metrics.clone(), _permit: permit }
    }
}

impl Drop for OpenTap {
    fn drop(&mut self) {
        self.metrics.taps.dec();
    }
}

#[tonic::async_trait]
impl Viz for Service {
    type TapStream = TapStream;

    async fn stat(&self, request: Request<StatRequest>) -> Result<Response<StatResponse>, Status> {
        let namespaces = stat_namespaces(request.get_ref());
        self.answer("Stat", request, namespaces, |request| self.engine.stat(request)).await
    }

    async fn stat_inbound(
        &self,
        request: Request<StatInboundRequest>,
    ) -> Result<Response<StatInboundResponse>, Status> {
        let namespaces = namespaces([&request.get_ref().resource]);
        self.answer("StatInbound", request, namespaces, |request| self.engine.stat_inbound(request)).await
    }

    async fn stat_outbound(
        &self,
        request: Request<StatOutboundRequest>,
    ) -> Result<Response<StatOutboundResponse>, Status> {
        let namespaces = namespaces([&request.get_ref().resource]);
        self.answer("StatOutbound", request, namespaces, |request| self.engine.stat_outbound(request)).await
    }

    async fn routes(&self, request: Request<RoutesRequest>) -> Result<Response<RoutesResponse>, Status> {
        let namespaces = namespaces([&request.get_ref().resource]);
        self.answer("Routes", request, namespaces, |request| self.engine.routes(request)).await
    }

    async fn edges(&self, request: Request<EdgesRequest>) -> Result<Response<EdgesResponse>, Status> {
        let namespaces = namespaces([&request.get_ref().resource]);
        self.answer("Edges", request, namespaces, |request| self.engine.edges(request)).await
    }

    async fn series(&self, request: Request<SeriesRequest>) -> Result<Response<SeriesResponse>, Status> {
        let namespaces = namespaces([&request.get_ref().resource]);
        self.answer("Series", request, namespaces, |request| self.engine.series(request)).await
    }

    async fn tap(&self, request: Request<TapRequest>) -> Result<Response<TapStream>, Status> {
        let opened = self.open_tap(request).await;
        self.metrics.answered("Tap", opened.as_ref().err().map_or(Code::Ok, Status::code));
        opened.map(Response::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(kind: &str, namespace: &str, name: &str) -> Option<Resource> {
        Some(Resource { namespace: namespace.to_owned(), kind: kind.to_owned(), name: name.to_owned() })
    }

    #[test]
    fn every_namespace_that_an_answer_is_about_is_asked_for() {
        for (of, to, from, expected) in [
            (resource("deployment", "shop", "web"), None, None, &["shop"][..]),
            (resource("deployment", "", ""), None, None, &[""]),
            (None, None, None, &[""]),
            (resource("namespace", "", "shop"), None, None, &["shop"]),
            (resource("namespace", "", ""), None, None, &[""]),
            // A namespace in the field that is allowed, and another as the name.
            (resource("namespace", "shop", "bank"), None, None, &["bank", "shop"]),
            (resource("namespace", "shop", ""), None, None, &["", "shop"]),
            (resource("pod", "shop", "a"), resource("pod", "bank", "b"), None, &["bank", "shop"]),
            (resource("pod", "shop", "a"), None, resource("deployment", "", ""), &["", "shop"]),
        ] {
            let request = StatRequest { resource: of, to, from, ..StatRequest::default() };
            assert_eq!(stat_namespaces(&request), expected, "{request:?}");
        }
    }
}
