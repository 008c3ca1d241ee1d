//! `OutboundPolicies`: how a workload should connect to a destination.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use futures::Stream;
use http::{Request, Response};
use tonic::{Status, body::Body};
use weft_index::{OutboundPolicy, Snapshot};
use weft_proto::linkerd::outbound::{TrafficSpec, traffic_spec::Target};
use weft_runtime::server::RequestBody;

use super::{outbound_message, workload};
use crate::{
    authority::{self, Authority, Host},
    grpc,
    metrics::Method,
    stream::{self, Answering, Ask, Next},
};

const SERVICE: &str = "io.linkerd.proxy.outbound.OutboundPolicies";
const GET: Method = Method { grpc_service: SERVICE, grpc_method: "Get", grpc_type: "unary" };
const WATCH: Method = Method { grpc_service: SERVICE, grpc_method: "Watch", grpc_type: "server_stream" };

/// The service.
#[derive(Clone)]
pub(super) struct OutboundPolicies(pub(super) Answering);

impl OutboundPolicies {
    /// Answers a request.
    pub(super) async fn call(self, request: Request<RequestBody>) -> Response<Body> {
        let path = request.uri().path();
        let start = |method| self.0.metrics.start(method);
        if GET.is_at(path) {
            grpc::respond(start(GET), self.get(request).await)
        } else if WATCH.is_at(path) {
            grpc::respond(start(WATCH), self.watch(request).await)
        } else {
            grpc::unimplemented()
        }
    }

    async fn get(&self, request: Request<RequestBody>) -> Result<impl Stream<Item = Bytes> + use<>, Status> {
        let ask = self.question(&grpc::read(request).await?)?;
        let view = self.0.ask(move |index| ask(index)).await??;
        let policy = view.borrow().clone().ok_or_else(unknown)?;
        Ok(grpc::message(policy.whole(encode)))
    }

    async fn watch(&self, request: Request<RequestBody>) -> Result<impl Stream<Item = Bytes> + use<>, Status> {
        let ask = self.question(&grpc::read(request).await?)?;
        self.0.subscribe(ask, step).await
    }

    fn question(&self, request: &TrafficSpec) -> Result<Ask<Option<Arc<Snapshot<OutboundPolicy>>>>, Status> {
        workload::parse(&request.source_workload)?;
        let target = request.target.as_ref().ok_or_else(|| Status::invalid_argument("target is required"))?;
        match target {
            Target::Addr(addr) => {
                let port = workload::port(addr.port)?;
                let ip = addr.ip.ok_or_else(|| Status::invalid_argument("target address has no IP"))?;
                let ip = ip.try_into().map_err(|_| Status::invalid_argument("target address has no IP"))?;
                let addr = SocketAddr::new(ip, port);
                Ok(Arc::new(move |index| index.watch_outbound(addr).ok_or_else(unknown)))
            }
            Target::Authority(text) => {
                let shown = authority::excerpt(text);
                let authority = Authority::parse(text)
                    .ok_or_else(|| Status::invalid_argument(format!("failed to parse target authority: {shown}")))?;
                match authority::resolve(&authority.host, &self.0.index.cluster().cluster_domain) {
                    Some(Host::Service(service)) => {
                        Ok(Arc::new(move |index| Ok(index.watch_outbound_name(&service, authority.port))))
                    }
                    _ => Err(Status::not_found(format!("no such policy: {shown}"))),
                }
            }
        }
    }
}

/// When the destination is no longer known, the client asks again and gets NotFound.
fn step(sent: Option<&Option<Arc<Snapshot<OutboundPolicy>>>>, policy: &Option<Arc<Snapshot<OutboundPolicy>>>) -> Next {
    stream::whole_or_end(sent, policy, encode)
}

fn encode(policy: &OutboundPolicy) -> Bytes {
    grpc::frame(&outbound_message::policy(policy))
}

fn unknown() -> Status {
    Status::not_found("no such policy")
}
