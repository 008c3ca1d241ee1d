//! The destination service: `Get` streams a Service's endpoints, `GetProfile` the profile of an address or a
//! name.
//!
//! It parses requests, chooses the subscription, and turns snapshots into messages; the index decides
//! everything else. Codes and texts of errors are Linkerd's
//! (`linkerd2:controller/api/destination/server.go`), because proxies choose between retrying and giving up
//! by them.

mod diff;
mod message;
mod routes;
mod token;

use std::{net::SocketAddr, sync::Arc};

use tonic::{Request, Response, Status};
use weft_index::{AmbiguousAddress, EndpointProfile, EndpointsQuery, Key, ProfileKey, ServiceProfile, SharedIndex};
use weft_proto::linkerd::destination::{DestinationProfile, GetDestination, Update, destination_server};
use weft_runtime::drain;

use crate::{
    authority::{self, Authority, Host},
    metrics::{Call, GrpcMetrics, Method},
    stream::{self, Messages, Step},
};
use diff::Diff;
use token::Token;

const SERVICE: &str = "io.linkerd.proxy.destination.Destination";
const GET: Method = Method { grpc_service: SERVICE, grpc_method: "Get", grpc_type: "server_stream" };
const GET_PROFILE: Method = Method { grpc_service: SERVICE, grpc_method: "GetProfile", grpc_type: "server_stream" };

/// The service.
#[derive(Clone)]
pub(crate) struct Destination {
    /// The index that answers.
    pub(crate) index: SharedIndex,
    /// Ends the streams.
    pub(crate) drain: drain::Watch,
    /// Counts the calls.
    pub(crate) metrics: GrpcMetrics,
}

#[tonic::async_trait]
impl destination_server::Destination for Destination {
    type GetStream = Messages<Update>;
    type GetProfileStream = Messages<DestinationProfile>;

    async fn get(&self, request: Request<GetDestination>) -> Result<Response<Self::GetStream>, Status> {
        let call = self.metrics.start(GET);
        let request = request.into_inner();
        match self.endpoints_of(&request) {
            Ok((service, key)) => Ok(Response::new(self.endpoints(&service, key, call))),
            Err(status) => call.end_with(Err(status)),
        }
    }

    async fn get_profile(&self, request: Request<GetDestination>) -> Result<Response<Self::GetProfileStream>, Status> {
        let call = self.metrics.start(GET_PROFILE);
        let request = request.into_inner();
        match self.profile_of(&request) {
            Ok(Profile::Service(service, port)) => {
                let key = ProfileKey { port, namespace: Token::parse(&request.context_token).namespace };
                Ok(Response::new(self.service_profile(&service, key, call)))
            }
            Ok(Profile::Address(addr)) => match self.index.watch_endpoint_profile(addr) {
                Ok(snapshots) => {
                    let drain = self.drain.clone();
                    // While nothing is known, nothing is sent and clients keep what they have.
                    let step = |profile: &Option<Arc<EndpointProfile>>| {
                        Step::Send(profile.iter().map(|profile| message::endpoint_profile(profile)).collect())
                    };
                    Ok(Response::new(stream::messages(snapshots, drain, call, step)))
                }
                Err(error) => call.end_with(Err(ambiguous(&error))),
            },
            Err(status) => call.end_with(Err(status)),
        }
    }
}

/// The subject of a profile request.
enum Profile {
    Service(Key, u16),
    Address(SocketAddr),
}

impl Destination {
    fn endpoints_of(&self, request: &GetDestination) -> Result<(Key, EndpointsQuery), Status> {
        let authority = parse(&request.path)?;
        let (service, hostname) = match self.host(&authority)? {
            Host::Ip(ip) => {
                return Err(Status::invalid_argument(format!("IP queries not supported by Get API: host={ip}")));
            }
            Host::Service(service) => (service, None),
            Host::Instance(hostname, service) => (service, Some(hostname)),
        };
        let record = self.index.service(&service).ok_or_else(|| not_found(&service))?;
        if record.external {
            return Err(external(&service));
        }
        let node = Token::parse(&request.context_token).node_name;
        Ok((service, EndpointsQuery { port: authority.port, node, hostname }))
    }

    fn endpoints(&self, service: &Key, key: EndpointsQuery, call: Call) -> Messages<Update> {
        let snapshots = self.index.watch_endpoints(service, key);
        let mut diff = Diff::default();
        stream::messages(snapshots, self.drain.clone(), call, move |endpoints| Step::Send(diff.advance(endpoints)))
    }

    fn profile_of(&self, request: &GetDestination) -> Result<Profile, Status> {
        let authority = parse(&request.path)?;
        match self.host(&authority)? {
            Host::Ip(ip) => match self.index.service_by_ip(ip) {
                Ok(Some(service)) => Ok(Profile::Service(service.key.clone(), authority.port)),
                Ok(None) => Ok(Profile::Address(SocketAddr::new(ip, authority.port))),
                Err(error) => Err(ambiguous(&error)),
            },
            Host::Service(service) => match self.index.service(&service) {
                Some(record) if record.external => Err(external(&service)),
                Some(_) => Ok(Profile::Service(service, authority.port)),
                // Linkerd passes on the API server's error, which gRPC reports as `Unknown`; proxies retry
                // it.
                None => Err(Status::unknown(format!("service {:?} not found", service.name))),
            },
            Host::Instance(hostname, service) => match self.index.pod_of_service(&service, &hostname) {
                Some(ip) => Ok(Profile::Address(SocketAddr::new(ip, authority.port))),
                None => Err(Status::not_found(format!("no pod found in Service {service} with hostname {hostname}"))),
            },
        }
    }

    fn service_profile(&self, service: &Key, key: ProfileKey, call: Call) -> Messages<DestinationProfile> {
        let snapshots = self.index.watch_service_profile(service, key);
        let step = |profile: &Arc<ServiceProfile>| Step::Send(vec![message::service_profile(profile)]);
        stream::messages(snapshots, self.drain.clone(), call, step)
    }

    fn host(&self, authority: &Authority) -> Result<Host, Status> {
        let domain = &self.index.cluster().cluster_domain;
        authority::resolve(&authority.host, domain)
            .ok_or_else(|| Status::invalid_argument(format!("Invalid authority: {}", authority.host)))
    }
}

fn parse(path: &str) -> Result<Authority, Status> {
    Authority::parse(path)
        .ok_or_else(|| Status::invalid_argument(format!("Invalid authority: {}", authority::excerpt(path))))
}

fn external(service: &Key) -> Status {
    Status::invalid_argument(format!("service {}.{} is of type ExternalName", service.name, service.namespace))
}

fn not_found(service: &Key) -> Status {
    Status::not_found(format!("Service {}.{} not found", service.name, service.namespace))
}

fn ambiguous(error: &AmbiguousAddress) -> Status {
    Status::failed_precondition(error.to_string())
}
