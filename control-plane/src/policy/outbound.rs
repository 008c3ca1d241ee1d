//! `OutboundPolicies`: how a workload should connect to a destination.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use futures::Stream;
use http::Response;
use tonic::{Status, body::Body};
use weft_index::{OutboundPolicy, Snapshot};
use weft_proto::linkerd::outbound::{TrafficSpec, traffic_spec::Target};

use super::{outbound_message, workload};
use crate::{
    authority::{self, Authority, Host},
    grpc::{self, RequestBody},
    metrics::Method,
    stream::{self, Answering, Ask, Next},
};

const SERVICE: &str = "io.linkerd.proxy.outbound.OutboundPolicies";
const GET: Method = Method { grpc_service: SERVICE, grpc_method: "Get", grpc_type: "unary" };
const WATCH: Method = Method { grpc_service: SERVICE, grpc_method: "Watch", grpc_type: "server_stream" };

/// Serves `Get` and `Watch`.
#[derive(Clone)]
pub(super) struct OutboundPolicies {
    pub(super) answering: Answering,
    /// Whether headers of requests may set timeouts and retries.
    pub(super) allow_l5d_request_headers: bool,
}

type Policy = Option<Arc<Snapshot<OutboundPolicy>>>;

/// What a client asks for: how to subscribe to it, and its port, which all undeclared ports of a Service share a view
/// for.
struct Question {
    ask: Ask<Policy>,
    port: u16,
}

impl OutboundPolicies {
    pub(super) const METHODS: [Method; 2] = [GET, WATCH];

    /// Answers a request to one of its methods.
    pub(super) async fn call(self, method: Method, body: impl RequestBody) -> Response<Body> {
        let call = self.answering.metrics.start(method);
        if method == GET {
            grpc::respond(call, self.get(body).await)
        } else {
            grpc::respond(call, self.watch(body).await)
        }
    }

    async fn get<B: RequestBody>(&self, body: B) -> Result<impl Stream<Item = Bytes> + use<B>, Status> {
        let Question { ask, port } = self.question(&grpc::read(body).await?)?;
        let view = self.answering.ask(move |index| ask(index)).await??;
        let policy = view.borrow().clone();
        match step(None, &policy, port, self.allow_l5d_request_headers) {
            Next::Send(frame) => Ok(grpc::message(frame)),
            Next::End => Err(unknown()),
        }
    }

    async fn watch<B: RequestBody>(&self, body: B) -> Result<impl Stream<Item = Bytes> + use<B>, Status> {
        let Question { ask, port } = self.question(&grpc::read(body).await?)?;
        let l5d_headers = self.allow_l5d_request_headers;
        let step = move |sent: Option<&Policy>, policy: &Policy| step(sent, policy, port, l5d_headers);
        self.answering.subscribe(ask, step).await
    }

    fn question(&self, request: &TrafficSpec) -> Result<Question, Status> {
        let namespace = workload::parse(&request.source_workload)?.namespace().to_owned();
        let target = request.target.as_ref().ok_or_else(|| Status::invalid_argument("target is required"))?;
        match target {
            Target::Addr(addr) => {
                let port = workload::port(addr.port)?;
                let ip = addr.ip.ok_or_else(|| Status::invalid_argument("target address has no IP"))?;
                let ip = ip.try_into().map_err(|_| Status::invalid_argument("target address has no IP"))?;
                let addr = SocketAddr::new(ip, port);
                let ask: Ask<_> = Arc::new(move |index| index.watch_outbound(addr, &namespace).ok_or_else(unknown));
                Ok(Question { ask, port })
            }
            Target::Authority(text) => {
                let shown = authority::excerpt(text);
                let authority = Authority::parse(text)
                    .ok_or_else(|| Status::invalid_argument(format!("failed to parse target authority: {shown}")))?;
                match authority::resolve(&authority.host, &self.answering.index.cluster().cluster_domain) {
                    Some(Host::Service(service)) => {
                        let port = authority.port;
                        let ask: Ask<_> =
                            Arc::new(move |index| Ok(index.watch_outbound_name(&service, port, &namespace)));
                        Ok(Question { ask, port })
                    }
                    _ => Err(Status::not_found(format!("no such policy: {shown}"))),
                }
            }
        }
    }
}

/// When the destination is no longer known, the client asks again and gets NotFound.
fn step(sent: Option<&Policy>, policy: &Policy, port: u16, l5d_headers: bool) -> Next {
    let encode = |policy: &OutboundPolicy| grpc::frame(&outbound_message::policy(policy, port, l5d_headers));
    match policy.as_ref().map(|policy| &***policy) {
        // Clients of different ports share the view; the message names each client's own port.
        Some(policy @ OutboundPolicy::UndefinedPort { .. }) => {
            let same = sent.and_then(Option::as_ref).is_some_and(|sent| ***sent == *policy);
            Next::Send(if same { Bytes::new() } else { encode(policy) })
        }
        _ => stream::whole_or_end(sent, policy, encode),
    }
}

fn unknown() -> Status {
    Status::not_found("no such policy")
}
