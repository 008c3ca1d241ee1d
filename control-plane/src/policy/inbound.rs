//! `InboundServerPolicies`: the policy of one port of one workload.

use std::sync::Arc;

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use weft_index::{InboundServer, SharedIndex};
use weft_proto::linkerd::inbound::{PortSpec, Server, inbound_server_policies_server};
use weft_runtime::drain;

use super::{
    inbound_message,
    workload::{self, Workload},
};
use crate::{
    metrics::{GrpcMetrics, Method},
    stream::{self, Messages, Step},
};

const SERVICE: &str = "io.linkerd.proxy.inbound.InboundServerPolicies";
const GET_PORT: Method = Method { grpc_service: SERVICE, grpc_method: "GetPort", grpc_type: "unary" };
const WATCH_PORT: Method = Method { grpc_service: SERVICE, grpc_method: "WatchPort", grpc_type: "server_stream" };

/// The service.
#[derive(Clone)]
pub(crate) struct InboundPolicies {
    /// The index that answers.
    pub(crate) index: SharedIndex,
    /// Ends the streams.
    pub(crate) drain: drain::Watch,
    /// Counts the calls.
    pub(crate) metrics: GrpcMetrics,
}

#[tonic::async_trait]
impl inbound_server_policies_server::InboundServerPolicies for InboundPolicies {
    type WatchPortStream = Messages<Server>;

    async fn get_port(&self, request: Request<PortSpec>) -> Result<Response<Server>, Status> {
        let call = self.metrics.start(GET_PORT);
        let snapshot = self.lookup(request.get_ref()).map(|(_, server)| inbound_message::server(&server));
        call.end_with(snapshot.map(Response::new))
    }

    async fn watch_port(&self, request: Request<PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
        let call = self.metrics.start(WATCH_PORT);
        let snapshots = match self.lookup(request.get_ref()) {
            Ok((snapshots, _)) => snapshots,
            Err(status) => return call.end_with(Err(status)),
        };
        // The stream ends when the workload is deleted.
        let step = |server: &Option<Arc<InboundServer>>| match server {
            Some(server) => Step::Send(vec![inbound_message::server(server)]),
            None => Step::End,
        };
        Ok(Response::new(stream::messages(snapshots, self.drain.clone(), call, step)))
    }
}

type Snapshots = watch::Receiver<Option<Arc<InboundServer>>>;

impl InboundPolicies {
    fn lookup(&self, request: &PortSpec) -> Result<(Snapshots, Arc<InboundServer>), Status> {
        let unknown = || Status::not_found("unknown server");
        let port = workload::port(request.port)?;
        let snapshots = match workload::parse(&request.workload)? {
            Workload::Pod(pod) => self.index.watch_inbound(&pod, port),
            Workload::External(workload) => self.index.watch_inbound_external(&workload, port),
        };
        let snapshots = snapshots.ok_or_else(unknown)?;
        let server = snapshots.borrow().clone().ok_or_else(unknown)?;
        Ok((snapshots, server))
    }
}
