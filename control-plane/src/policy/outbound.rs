//! `OutboundPolicies`: how a workload should connect to a destination.

use std::{net::SocketAddr, sync::Arc};

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use weft_index::{OutboundPolicy, SharedIndex};
use weft_proto::linkerd::outbound::{self, TrafficSpec, outbound_policies_server, traffic_spec::Target};
use weft_runtime::drain;

use super::{outbound_message, workload};
use crate::{
    authority::{self, Authority, Host},
    metrics::{GrpcMetrics, Method},
    stream::{self, Messages, Step},
};

const SERVICE: &str = "io.linkerd.proxy.outbound.OutboundPolicies";
const GET: Method = Method { grpc_service: SERVICE, grpc_method: "Get", grpc_type: "unary" };
const WATCH: Method = Method { grpc_service: SERVICE, grpc_method: "Watch", grpc_type: "server_stream" };

/// The service.
#[derive(Clone)]
pub(crate) struct OutboundPolicies {
    /// The index that answers.
    pub(crate) index: SharedIndex,
    /// Ends the streams.
    pub(crate) drain: drain::Watch,
    /// Counts the calls.
    pub(crate) metrics: GrpcMetrics,
}

#[tonic::async_trait]
impl outbound_policies_server::OutboundPolicies for OutboundPolicies {
    type WatchStream = Messages<outbound::OutboundPolicy>;

    async fn get(&self, request: Request<TrafficSpec>) -> Result<Response<outbound::OutboundPolicy>, Status> {
        let call = self.metrics.start(GET);
        let policy = self.lookup(request.get_ref()).map(|(_, policy)| outbound_message::policy(&policy));
        call.end_with(policy.map(Response::new))
    }

    async fn watch(&self, request: Request<TrafficSpec>) -> Result<Response<Self::WatchStream>, Status> {
        let call = self.metrics.start(WATCH);
        let snapshots = match self.lookup(request.get_ref()) {
            Ok((snapshots, _)) => snapshots,
            Err(status) => return call.end_with(Err(status)),
        };
        // The destination is no longer known: the client asks again and gets NotFound.
        let step = |policy: &Option<Arc<OutboundPolicy>>| match policy {
            Some(policy) => Step::Send(vec![outbound_message::policy(policy)]),
            None => Step::End,
        };
        Ok(Response::new(stream::messages(snapshots, self.drain.clone(), call, step)))
    }
}

type Snapshots = watch::Receiver<Option<Arc<OutboundPolicy>>>;

impl OutboundPolicies {
    fn lookup(&self, request: &TrafficSpec) -> Result<(Snapshots, Arc<OutboundPolicy>), Status> {
        workload::parse(&request.source_workload)?;
        let target = request.target.as_ref().ok_or_else(|| Status::invalid_argument("target is required"))?;
        let unknown = || Status::not_found("no such policy");
        let snapshots = match target {
            Target::Addr(addr) => {
                let port = workload::port(addr.port)?;
                let ip = addr.ip.ok_or_else(|| Status::invalid_argument("target address has no IP"))?;
                let ip = ip.try_into().map_err(|_| Status::invalid_argument("target address has no IP"))?;
                self.index.watch_outbound(SocketAddr::new(ip, port)).ok_or_else(unknown)?
            }
            Target::Authority(text) => {
                let shown = authority::excerpt(text);
                let authority = Authority::parse(text)
                    .ok_or_else(|| Status::invalid_argument(format!("failed to parse target authority: {shown}")))?;
                match authority::resolve(&authority.host, &self.index.cluster().cluster_domain) {
                    Some(Host::Service(service)) => self.index.watch_outbound_name(&service, authority.port),
                    _ => return Err(Status::not_found(format!("no such policy: {shown}"))),
                }
            }
        };
        let policy = snapshots.borrow().clone().ok_or_else(unknown)?;
        Ok((snapshots, policy))
    }
}
