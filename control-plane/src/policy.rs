//! The policy services: which clients a pod's port admits, and how to connect to a destination.
//!
//! They parse requests, choose the view, and turn snapshots into messages; the index decides.

mod inbound;
mod inbound_message;
mod outbound;
mod outbound_message;
mod route_message;
pub(crate) mod workload;

use std::{collections::HashMap, time::Duration};

use http::{Request, Response};
use tonic::body::Body;
use weft_proto::linkerd::meta::{Metadata, Resource, metadata};

use crate::{
    grpc::{self, RequestBody},
    metrics::Method,
    stream::Answering,
};
use inbound::InboundPolicies;
use outbound::OutboundPolicies;

/// Both services, which share an address.
#[derive(Clone)]
pub(crate) struct Policies {
    pub(crate) answering: Answering,
    /// Whether headers of requests may set timeouts and retries.
    pub(crate) allow_l5d_request_headers: bool,
}

impl Policies {
    /// Answers a request.
    pub(crate) fn call(self, request: Request<impl RequestBody>) -> impl Future<Output = Response<Body>> + Send {
        let Self { answering, allow_l5d_request_headers } = self;
        let inbound = Method::of(request.uri().path(), &InboundPolicies::METHODS);
        let outbound = Method::of(request.uri().path(), &OutboundPolicies::METHODS);
        let body = request.into_body();
        async move {
            match (inbound, outbound) {
                (Some(method), _) => InboundPolicies(answering).call(method, body).await,
                (None, Some(method)) => {
                    OutboundPolicies { answering, allow_l5d_request_headers }.call(method, body).await
                }
                (None, None) => grpc::unimplemented(),
            }
        }
    }
}

/// How long proxies try to detect a protocol before they treat a connection as opaque, Linkerd's constant.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Metadata of a default, which no resource defines.
fn default_metadata(name: &str) -> Metadata {
    Metadata { kind: Some(metadata::Kind::Default(name.to_owned())) }
}

/// Metadata of a resource.
fn resource_metadata(resource: Resource) -> Metadata {
    Metadata { kind: Some(metadata::Kind::Resource(resource)) }
}

fn labels<const N: usize>(pairs: [(&str, &str); N]) -> HashMap<String, String> {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}
