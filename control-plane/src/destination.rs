//! The destination service: `Get` streams a Service's endpoints, `GetProfile` the profile of an address or a
//! name.
//!
//! It parses requests, chooses the view, and turns snapshots into messages; the index decides everything else. Codes
//! and texts of errors are Linkerd's (`linkerd2:controller/api/destination/server.go`), because proxies choose between
//! retrying and giving up by them.

mod endpoints;
mod federated;
pub(crate) mod http2;
mod linked;
mod message;
mod routes;
pub(crate) mod token;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{Request, Response};
use tokio::sync::watch;
use tonic::{Status, body::Body};
use weft_index::{
    AmbiguousAddress, Discovery, EndpointProfile, Endpoints, EndpointsQuery, Index, Key, OptionalView, ProfileQuery,
    ServiceProfile, Snapshot, View,
};
use weft_proto::linkerd::destination::GetDestination;

use crate::{
    authority::{self, Authority, Host},
    clusters::Clusters,
    grpc::{self, RequestBody},
    metrics::Method,
    stream::{self, Answering, Ask, Next},
};
use linked::Asked;
pub(crate) use message::EndpointSettings;
use token::Token;

const SERVICE: &str = "io.linkerd.proxy.destination.Destination";
const GET: Method = Method { grpc_service: SERVICE, grpc_method: "Get", grpc_type: "server_stream" };
const GET_PROFILE: Method = Method { grpc_service: SERVICE, grpc_method: "GetProfile", grpc_type: "server_stream" };

/// Serves `Get` and `GetProfile`; clones share the index.
#[derive(Clone)]
pub(crate) struct Destination {
    /// The index that answers.
    pub(crate) answering: Answering,
    /// Clusters whose Services have endpoints here.
    pub(crate) clusters: Clusters,
    /// Settings of messages about endpoints.
    pub(crate) settings: EndpointSettings,
}

/// Where the endpoints are that a request asks for.
enum Found {
    Here(View<Endpoints>),
    Elsewhere(watch::Receiver<Option<Discovery>>),
}

/// The profile of what a request names.
enum Profile {
    Service(View<ServiceProfile>, Ask<Arc<Snapshot<ServiceProfile>>>),
    Endpoint(OptionalView<EndpointProfile>),
    /// That of the address to which the hostname of an endpoint leads, and where the hostname leads later.
    Instance(OptionalView<EndpointProfile>, IpAddr, watch::Receiver<Option<IpAddr>>),
}

impl Destination {
    /// Answers a request.
    pub(crate) fn call(self, request: Request<impl RequestBody>) -> impl Future<Output = Response<Body>> + Send {
        let method = Method::of(request.uri().path(), &[GET, GET_PROFILE]);
        let body = request.into_body();
        async move {
            let Some(method) = method else { return grpc::unimplemented() };
            let call = self.answering.metrics.start(method);
            if method == GET {
                grpc::respond(call, self.get(body).await)
            } else {
                grpc::respond(call, self.get_profile(body).await)
            }
        }
    }

    async fn get<B: RequestBody>(&self, body: B) -> Result<impl Stream<Item = Bytes> + use<B>, Status> {
        let request = grpc::read::<GetDestination>(body).await?;
        let authority = parse(&request.path)?;
        let (service, hostname) = match self.host(&authority)? {
            Host::Ip(ip) => {
                return Err(Status::invalid_argument(format!("IP queries not supported by Get API: host={ip}")));
            }
            Host::Service(service) => (service, None),
            Host::Instance(hostname, service) => (service, Some(hostname)),
        };
        let node = Token::parse(&request.context_token).node_name;
        let query = EndpointsQuery { port: authority.port, node, hostname };
        self.endpoints(Asked { service, query, path: request.path }).await
    }

    async fn endpoints(&self, asked: Asked) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (service, query) = (asked.service.clone(), asked.query.clone());
        let ask = move |index: &mut Index| find(index, &service, &query);
        let asking = ask.clone();
        match self.answering.ask(asking).await?? {
            Found::Here(view) => {
                let again: Ask<_> = Arc::new(move |index| match ask(index)? {
                    Found::Here(view) => Ok(view),
                    Found::Elsewhere(_) => Err(Status::aborted("the endpoints are in other clusters now")),
                });
                let settings = self.settings.clone();
                let step = move |sent: Option<&_>, endpoints: &_| endpoints::step(sent, endpoints, &settings);
                Ok(self.answering.follow(view, Some(again), step).left_stream())
            }
            // Such streams are few and large: on the heap, they cost the others nothing.
            Found::Elsewhere(discovery) => {
                Ok(Box::pin(linked::frames(self, asked, discovery)).await?.boxed().right_stream())
            }
        }
    }

    async fn get_profile<B: RequestBody>(&self, body: B) -> Result<impl Stream<Item = Bytes> + use<B>, Status> {
        let request = grpc::read::<GetDestination>(body).await?;
        let authority = parse(&request.path)?;
        let host = self.host(&authority)?;
        let namespace = Token::parse(&request.context_token).namespace;
        let query = ProfileQuery { port: authority.port, namespace };
        let found = self.answering.ask(move |index| profile(index, host, query)).await??;
        let settings = self.settings.clone();
        let step = move |sent: Option<&_>, profile: &_| endpoint_profile(sent, profile, &settings);
        Ok(match found {
            Profile::Service(view, again) => self.answering.follow(view, Some(again), service_profile).left_stream(),
            Profile::Endpoint(view) => self.answering.follow(view, None, step).left_stream().right_stream(),
            // Such streams are few: on the heap, they cost the others nothing.
            Profile::Instance(view, ip, leads) => {
                let profiles = self.answering.follow(view, None, step).take_until(moved(ip, leads));
                profiles.boxed().right_stream().right_stream()
            }
        })
    }

    fn host(&self, authority: &Authority) -> Result<Host, Status> {
        let domain = &self.answering.index.cluster().cluster_domain;
        authority::resolve(&authority.host, domain)
            .ok_or_else(|| Status::invalid_argument(format!("Invalid authority: {}", authority.host)))
    }
}

fn find(index: &mut Index, service: &Key, query: &EndpointsQuery) -> Result<Found, Status> {
    let record = index.service(service).ok_or_else(|| not_found(service))?;
    if record.external {
        return Err(external(service));
    }
    if record.discovery != Discovery::Local {
        return index.watch_discovery(service).map(Found::Elsewhere).ok_or_else(|| not_found(service));
    }
    if !index.has_room_for(service, query.port) {
        return Err(too_many_ports(service));
    }
    Ok(Found::Here(index.watch_endpoints(service, query.clone())))
}

fn profile(index: &mut Index, host: Host, query: ProfileQuery) -> Result<Profile, Status> {
    let ip = match host {
        Host::Ip(ip) => match index.service_by_ip(ip).map_err(|error| ambiguous(&error))? {
            Some(service) => return Ok(profile_of(index, service.key.clone(), query)),
            None => ip,
        },
        Host::Service(service) => {
            return match index.service(&service) {
                Some(record) if record.external => Err(external(&service)),
                Some(_) => Ok(profile_of(index, service, query)),
                // Linkerd passes on the API server's error, which gRPC reports as `Unknown`; proxies retry it.
                None => Err(Status::unknown(format!("service {:?} not found", service.name))),
            };
        }
        Host::Instance(hostname, service) => {
            let leads = index.watch_pod_of_service(&service, &hostname);
            let ip = leads.as_ref().and_then(|leads| *leads.borrow());
            let (Some(leads), Some(ip)) = (leads, ip) else {
                let message = format!("no pod found in Service {service} with hostname {hostname}");
                return Err(Status::not_found(message));
            };
            return Ok(Profile::Instance(of_address(index, ip, query.port)?, ip, leads));
        }
    };
    Ok(Profile::Endpoint(of_address(index, ip, query.port)?))
}

fn of_address(index: &mut Index, ip: IpAddr, port: u16) -> Result<OptionalView<EndpointProfile>, Status> {
    index.watch_endpoint_profile(SocketAddr::new(ip, port)).map_err(|error| ambiguous(&error))
}

/// Waits until the hostname of an endpoint leads to another address, as after a restart of its pod. While it leads
/// nowhere, a client that asked again would be refused.
async fn moved(ip: IpAddr, mut leads: watch::Receiver<Option<IpAddr>>) {
    // An error means that the index has stopped.
    let _ = leads.wait_for(|now| now.is_some_and(|now| now != ip)).await;
}

fn profile_of(index: &mut Index, service: Key, query: ProfileQuery) -> Profile {
    let ask = move |index: &mut Index| index.watch_service_profile(&service, query.clone());
    Profile::Service(ask(index), Arc::new(move |index| Ok(ask(index))))
}

fn service_profile(sent: Option<&Arc<Snapshot<ServiceProfile>>>, profile: &Arc<Snapshot<ServiceProfile>>) -> Next {
    stream::whole(sent, profile, |profile| grpc::frame(&message::service_profile(profile)))
}

/// While nothing is known, nothing is sent and clients keep what they have.
fn endpoint_profile(
    sent: Option<&Option<Arc<Snapshot<EndpointProfile>>>>,
    profile: &Option<Arc<Snapshot<EndpointProfile>>>,
    settings: &EndpointSettings,
) -> Next {
    let Some(profile) = profile else { return Next::Send(Bytes::new()) };
    let encode = |profile: &EndpointProfile| grpc::frame(&message::endpoint_profile(profile, settings));
    stream::whole(sent.and_then(Option::as_ref), profile, encode)
}

fn parse(path: &str) -> Result<Authority, Status> {
    Authority::parse(path)
        .ok_or_else(|| Status::invalid_argument(format!("Invalid authority: {}", authority::excerpt(path))))
}

fn external(service: &Key) -> Status {
    Status::invalid_argument(format!("service {}.{} is of type ExternalName", service.name, service.namespace))
}

fn too_many_ports(service: &Key) -> Status {
    Status::resource_exhausted(format!(
        "clients ask for too many ports that service {}.{} does not declare",
        service.name, service.namespace
    ))
}

fn not_found(service: &Key) -> Status {
    Status::not_found(format!("Service {}.{} not found", service.name, service.namespace))
}

fn ambiguous(error: &AmbiguousAddress) -> Status {
    Status::failed_precondition(error.to_string())
}
