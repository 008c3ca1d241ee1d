//! `InboundServerPolicies`: the policy of one port of one workload.

use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use http::{Request, Response};
use tonic::{Status, body::Body};
use weft_index::{InboundServer, Index, OptionalView, Snapshot};
use weft_proto::linkerd::inbound::PortSpec;
use weft_runtime::server::RequestBody;

use super::{
    inbound_message,
    workload::{self, Workload},
};
use crate::{
    grpc,
    metrics::Method,
    stream::{self, Answering, Ask, Next},
};

const SERVICE: &str = "io.linkerd.proxy.inbound.InboundServerPolicies";
const GET_PORT: Method = Method { grpc_service: SERVICE, grpc_method: "GetPort", grpc_type: "unary" };
const WATCH_PORT: Method = Method { grpc_service: SERVICE, grpc_method: "WatchPort", grpc_type: "server_stream" };

/// The service.
#[derive(Clone)]
pub(super) struct InboundPolicies(pub(super) Answering);

impl InboundPolicies {
    /// What the paths of its methods begin with.
    pub(super) const PATH: &str = "/io.linkerd.proxy.inbound.InboundServerPolicies/";

    /// Answers a request.
    pub(super) async fn call(self, request: Request<RequestBody>) -> Response<Body> {
        let path = request.uri().path();
        let start = |method| self.0.metrics.start(method);
        if GET_PORT.is_at(path) {
            grpc::respond(start(GET_PORT), self.get_port(request).await)
        } else if WATCH_PORT.is_at(path) {
            grpc::respond(start(WATCH_PORT), self.watch_port(request).await)
        } else {
            grpc::unimplemented()
        }
    }

    async fn get_port(&self, request: Request<RequestBody>) -> Result<impl Stream<Item = Bytes> + use<>, Status> {
        let ask = question(&grpc::read(request).await?)?;
        let view = self.0.ask(move |index| ask(index)).await??;
        let server = view.borrow().clone().ok_or_else(unknown)?;
        Ok(grpc::message(server.whole(encode)))
    }

    async fn watch_port(&self, request: Request<RequestBody>) -> Result<impl Stream<Item = Bytes> + use<>, Status> {
        let ask = question(&grpc::read(request).await?)?;
        self.0.subscribe(ask, step).await
    }
}

/// The stream ends when the workload is deleted.
fn step(sent: Option<&Option<Arc<Snapshot<InboundServer>>>>, server: &Option<Arc<Snapshot<InboundServer>>>) -> Next {
    stream::whole_or_end(sent, server, encode)
}

fn encode(server: &InboundServer) -> Bytes {
    grpc::frame(&inbound_message::server(server))
}

fn question(request: &PortSpec) -> Result<Ask<Option<Arc<Snapshot<InboundServer>>>>, Status> {
    let port = workload::port(request.port)?;
    let workload = workload::parse(&request.workload)?;
    Ok(Arc::new(move |index| subscribe(index, &workload, port).ok_or_else(unknown)))
}

fn subscribe(index: &mut Index, workload: &Workload, port: u16) -> Option<OptionalView<InboundServer>> {
    match workload {
        Workload::Pod(pod) => index.watch_inbound(pod, port),
        Workload::External(workload) => index.watch_inbound_external(workload, port),
    }
}

fn unknown() -> Status {
    Status::not_found("unknown server")
}
