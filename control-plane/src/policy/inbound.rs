//! `InboundServerPolicies`: the policy of one port of one workload.

use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use http::Response;
use tonic::{Status, body::Body};
use weft_index::{InboundServer, Index, OptionalView, Snapshot};
use weft_proto::linkerd::inbound::PortSpec;

use super::{
    inbound_message,
    workload::{self, Workload},
};
use crate::{
    grpc::{self, RequestBody},
    metrics::Method,
    stream::{self, Answering, Ask, Next},
};

const SERVICE: &str = "io.linkerd.proxy.inbound.InboundServerPolicies";
const GET_PORT: Method = Method { grpc_service: SERVICE, grpc_method: "GetPort", grpc_type: "unary" };
const WATCH_PORT: Method = Method { grpc_service: SERVICE, grpc_method: "WatchPort", grpc_type: "server_stream" };

/// Serves `GetPort` and `WatchPort`.
#[derive(Clone)]
pub(super) struct InboundPolicies(pub(super) Answering);

impl InboundPolicies {
    pub(super) const METHODS: [Method; 2] = [GET_PORT, WATCH_PORT];

    /// Answers a request to one of its methods.
    pub(super) async fn call(self, method: Method, body: impl RequestBody) -> Response<Body> {
        let call = self.0.metrics.start(method);
        if method == GET_PORT {
            grpc::respond(call, self.get_port(body).await)
        } else {
            grpc::respond(call, self.watch_port(body).await)
        }
    }

    async fn get_port<B: RequestBody>(&self, body: B) -> Result<impl Stream<Item = Bytes> + use<B>, Status> {
        let ask = question(&grpc::read(body).await?)?;
        let view = self.0.ask(move |index| ask(index)).await??;
        let server = view.borrow().clone().ok_or_else(unknown)?;
        Ok(grpc::message(server.whole(encode)))
    }

    async fn watch_port<B: RequestBody>(&self, body: B) -> Result<impl Stream<Item = Bytes> + use<B>, Status> {
        let ask = question(&grpc::read(body).await?)?;
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
