//! Questions, and the index's answers in the words of the model.

use weft_k8s_api::policy::Network;

use super::{reading::*, traffic::found, *};

/// What a client may ask.
#[derive(Clone, Debug)]
pub(super) enum Question {
    Endpoints(Key, EndpointsQuery),
    ServiceProfile(Key, ProfileQuery),
    AddressProfile(SocketAddr),
    Inbound(Key, u16),
    InboundExternal(Key, u16),
    Outbound(SocketAddr, &'static str),
    OutboundName(Key, u16, &'static str),
    /// Where the endpoints of a Service are.
    Discovery(Key),
    /// The endpoints for a client of another cluster, in this zone.
    FromAfar(Key, u16, Option<&'static str>, Option<&'static str>),
}

/// The open subscription to an answer.
enum View {
    Endpoints(super::View<Endpoints>),
    ServiceProfile(super::View<ServiceProfile>),
    AddressProfile(OptionalView<EndpointProfile>),
    Inbound(OptionalView<InboundServer>),
    Outbound(OptionalView<OutboundPolicy>),
    Discovery(watch::Receiver<Option<Discovery>>),
}

/// A question, and the stream of its answers.
pub(super) struct Stream {
    pub(super) question: Question,
    view: Option<View>,
}

impl Question {
    /// What the model says.
    pub(super) fn expected(&self, objects: &Objects<'_>, cluster: &Cluster) -> Value {
        let workload = |kind: &str, key: &Key| objects.find(kind, &key.namespace, &key.name);
        match self {
            Self::Endpoints(service, query) => {
                let (node, hostname) = (query.node.as_deref(), query.hostname.as_deref());
                json!(endpoints::of_service(objects, cluster, service, query.port, Client::On(node), hostname))
            }
            Self::FromAfar(service, port, hostname, zone) => {
                json!(endpoints::of_service(objects, cluster, service, *port, Client::Afar(*zone), *hostname))
            }
            Self::Discovery(service) => json!(workload("Service", service).map(endpoints::discovery)),
            // Clients are refused if there is no Service.
            Self::ServiceProfile(service, query) => workload("Service", service).map_or(Value::Null, |service| {
                endpoints::service_profile(objects, service, query.port, query.namespace.as_deref())
            }),
            Self::AddressProfile(addr) => match endpoints::address_profile(objects, cluster, *addr) {
                Ok(found) => json!(found),
                Err(()) => json!("ambiguous"),
            },
            Self::Inbound(pod, port) => {
                json!(workload("Pod", pod).map(|pod| inbound::of_workload(objects, cluster, pod, *port)))
            }
            Self::InboundExternal(external, port) => {
                let external = workload("ExternalWorkload", external);
                json!(external.map(|external| inbound::of_workload(objects, cluster, external, *port)))
            }
            Self::Outbound(addr, client) => json!(outbound::of_address(objects, cluster, *addr, client)),
            Self::OutboundName(service, port, client) => {
                outbound::of_service(objects, cluster, (&service.namespace, &service.name), *port, client)
            }
        }
    }

    fn ask(&self, index: &mut Index) -> Option<View> {
        match self {
            Self::Discovery(service) => index.watch_discovery(service).map(View::Discovery),
            Self::FromAfar(service, port, hostname, zone) => {
                let (hostname, zone) = (hostname.map(str::to_owned), zone.map(str::to_owned));
                Some(View::Endpoints(index.watch_endpoints_from_afar(service, *port, hostname, zone)))
            }
            Self::Endpoints(service, query) => Some(View::Endpoints(index.watch_endpoints(service, query.clone()))),
            Self::ServiceProfile(service, query) => {
                index.service(service)?;
                Some(View::ServiceProfile(index.watch_service_profile(service, query.clone())))
            }
            Self::AddressProfile(addr) => index.watch_endpoint_profile(*addr).ok().map(View::AddressProfile),
            Self::Inbound(pod, port) => index.watch_inbound(pod, *port).map(View::Inbound),
            Self::InboundExternal(external, port) => index.watch_inbound_external(external, *port).map(View::Inbound),
            Self::Outbound(addr, client) => index.watch_outbound(*addr, client).map(View::Outbound),
            Self::OutboundName(service, port, client) => {
                Some(View::Outbound(index.watch_outbound_name(service, *port, client)))
            }
        }
    }
}

impl Stream {
    pub(super) fn new(question: Question) -> Self {
        Self { question, view: None }
    }

    /// What the client has been sent. As a client does, it asks again when its stream ended.
    pub(super) fn answer(&mut self, index: &mut Index) -> Value {
        let gone = match &self.view {
            None => true,
            Some(View::Endpoints(rx)) => rx.has_changed().is_err(),
            Some(View::ServiceProfile(rx)) => rx.has_changed().is_err(),
            // While it is not clear whose an address is, a stream is silent, and a new one is refused.
            Some(View::AddressProfile(rx)) => rx.has_changed().is_err() || rx.borrow().is_none(),
            Some(View::Inbound(rx)) => rx.has_changed().is_err() || rx.borrow().is_none(),
            Some(View::Outbound(rx)) => rx.has_changed().is_err() || rx.borrow().is_none(),
            Some(View::Discovery(rx)) => rx.has_changed().is_err() || rx.borrow().is_none(),
        };
        if gone {
            self.view = None;
            self.view = self.question.ask(index);
        }
        let is_service = |key: &Key| index.service(key).is_some();
        match (&self.view, &self.question) {
            (None, Question::AddressProfile(_)) => json!("ambiguous"),
            (None, _) => Value::Null,
            // The stream of a Service that is gone says nothing more.
            (Some(View::ServiceProfile(_)), Question::ServiceProfile(key, _)) if !is_service(key) => Value::Null,
            (Some(View::Endpoints(rx)), _) => endpoints_of(&rx.borrow()),
            (Some(View::ServiceProfile(rx)), _) => service_profile(&rx.borrow()),
            (Some(View::AddressProfile(rx)), _) => json!(value(&rx.borrow()).map(|profile| {
                let mut seen = endpoint(&profile.endpoint);
                seen["opaque"] = json!(profile.opaque);
                seen
            })),
            (Some(View::Inbound(rx)), _) => json!(value(&rx.borrow()).map(server)),
            (Some(View::Outbound(rx)), _) => json!(value(&rx.borrow()).map(policy)),
            (Some(View::Discovery(rx)), _) => json!(rx.borrow().as_ref().map(discovery)),
        }
    }
}

fn endpoints_of(endpoints: &Endpoints) -> Value {
    let each = endpoints.by_addr.iter().map(|(addr, found)| {
        let mut seen = endpoint(found);
        let labels = seen["labels"].as_object_mut().unwrap();
        labels.extend(endpoints.labels.iter().map(|(key, value)| (key.clone(), json!(value))));
        seen["locality"] = json!(endpoints.locality(found).label());
        (addr.to_string(), seen)
    });
    json!(each.collect::<BTreeMap<_, _>>())
}

fn discovery(discovery: &Discovery) -> Value {
    match discovery {
        Discovery::Local => json!("here"),
        Discovery::Linked { cluster, service } => json!({"cluster": cluster, "service": service}),
        Discovery::Federated { local, linked } => {
            let linked: Vec<_> = linked.iter().map(|member| format!("{}@{}", member.service, member.cluster)).collect();
            json!({"here": local, "members": linked})
        }
    }
}

fn endpoint(endpoint: &Endpoint) -> Value {
    let identity = endpoint.identity.as_ref().map(|identity| match identity {
        PeerIdentity::ServiceAccount(name) => name.clone(),
        PeerIdentity::Gateway(name) => format!("gateway {name}"),
        PeerIdentity::External { id, server_name } => format!("{id} as {server_name}"),
    });
    let hint = match endpoint.hint {
        Hint::Unknown => "none",
        Hint::Detect => "detect",
        Hint::H2 => "h2",
        Hint::Opaque => "opaque",
    };
    json!({"labels": endpoint.labels, "identity": identity, "hint": hint, "transport": endpoint.transport_port,
        "http2": endpoint.http2, "authority": endpoint.authority_override})
}

fn service_profile(profile: &ServiceProfile) -> Value {
    let ServiceProfile::Declared { port, name, opaque, profile, .. } = profile else { return json!("empty") };
    let routes = profile.iter().flat_map(|profile| &profile.routes).map(|route| json!(route));
    let budget = profile.as_ref().and_then(|profile| profile.retry_budget);
    let budget = budget.map(|budget| format!("{} {} {:?}", budget.ratio, budget.min_per_second, budget.ttl));
    let instead = profile.iter().flat_map(|profile| &profile.overrides);
    let instead: Vec<_> = instead.map(|one| format!("{} {}", one.authority, one.weight)).collect();
    json!({"budget": budget, "instead": instead, "name": name, "port": port, "opaque": opaque,
        "routes": routes.collect::<Vec<_>>(), "profile": profile.as_ref().map(|profile| &profile.key.namespace)})
}

fn server(server: &InboundServer) -> Value {
    let policy = &server.policy;
    let protocol = match policy.protocol {
        ServerProtocol::Detect => "detect",
        ServerProtocol::Http1 => "http/1",
        ServerProtocol::Http2 => "http/2",
        ServerProtocol::Grpc => "grpc",
        ServerProtocol::Opaque => "opaque",
        ServerProtocol::Tls => "tls",
    };
    let routes = match &policy.routes {
        InboundRoutes::Default => None,
        InboundRoutes::Http(routes) => Some(routes.iter().map(inbound_route).collect::<Vec<_>>()),
        InboundRoutes::Grpc(routes) => Some(routes.iter().map(inbound_route).collect()),
    };
    // Only HTTP has requests that could be probes.
    let is_http = matches!(policy.protocol, ServerProtocol::Detect | ServerProtocol::Http1 | ServerProtocol::Http2);
    let probes = server.probe_paths.iter().filter(|_| is_http).collect::<Vec<_>>();
    let limit = policy.rate_limit.as_ref().map(|limit| format!("{} {}", limit.name, limit.total.unwrap_or_default()));
    json!({"origin": origin(&policy.origin), "protocol": protocol, "routes": routes, "probes": probes, "limit": limit,
        "authorizations": grants(&policy.authorizations)})
}

fn origin(origin: &Origin) -> String {
    match origin {
        Origin::Default(name) => format!("default {name}"),
        Origin::Server(name) => format!("server {name}"),
        Origin::ServerAuthorization(name) => format!("ServerAuthorization {name}"),
        Origin::AuthorizationPolicy(name) => format!("AuthorizationPolicy {name}"),
    }
}

fn grants(authorizations: &[Authorization]) -> Vec<String> {
    let one = |authorization: &Authorization| {
        let mut who = match &authorization.authentication {
            Authentication::Unauthenticated => vec!["anyone".to_owned()],
            Authentication::Tls => vec!["any TLS".to_owned()],
            Authentication::Identities(all) => all.iter().map(ToString::to_string).collect(),
        };
        let network = |network: &Network| {
            let except: Vec<_> = network.except.iter().flatten().map(ToString::to_string).collect();
            let cidr = network.cidr.to_string();
            if except.is_empty() { cidr } else { format!("{cidr} but {}", except.join(",")) }
        };
        let mut from: Vec<_> = authorization.networks.iter().map(network).collect();
        who.sort_unstable();
        from.sort_unstable();
        format!("{}: {} from {}", origin(&authorization.origin), who.join(" or "), from.join(" or "))
    };
    let mut all: Vec<_> = authorizations.iter().map(one).collect();
    all.sort_unstable();
    all
}

fn inbound_route<M>(route: &InboundRoute<M>) -> Value {
    let RouteId { kind, key } = &route.id;
    let hosts: Vec<_> = route.hosts.iter().map(host).collect();
    let rules: Vec<_> = route.rules.iter().map(|rule| found::inbound_filters(&rule.filters)).collect();
    json!({"route": format!("{} {}", kind.group(), key.name), "hosts": hosts, "rules": rules,
        "authorizations": grants(&route.authorizations)})
}

fn host(host: &weft_k8s_api::policy::route::HostMatch) -> String {
    match host {
        weft_k8s_api::policy::route::HostMatch::Exact(name) => name.clone(),
        weft_k8s_api::policy::route::HostMatch::Suffix(labels) => format!("*.{}", labels.join(".")),
    }
}

fn policy(policy: &OutboundPolicy) -> Value {
    let parent = match policy {
        OutboundPolicy::UndefinedPort { service } => return json!({"undefined port of": service.to_string()}),
        OutboundPolicy::Egress { addr } => return json!({"outside": addr.to_string()}),
        OutboundPolicy::Parent(parent) => parent,
    };
    let requests = |routes: &[OutboundHttpRoute]| routes.iter().map(request_route).collect::<Vec<_>>();
    let connections = |routes: &[ConnectionRoute]| {
        let one = |of: &ConnectionRoute| outbound_route(&of.id, vec![json!({"backends": backends(&of.backends)})]);
        routes.iter().map(one).collect::<Vec<_>>()
    };
    let (protocol, routes) = match &parent.protocol {
        OutboundProtocol::Detect(routes) => ("detect", requests(routes)),
        OutboundProtocol::Http1(routes) => ("http/1", requests(routes)),
        OutboundProtocol::Http2(routes) => ("http/2", requests(routes)),
        OutboundProtocol::Grpc(routes) => ("grpc", routes.iter().map(request_route).collect()),
        OutboundProtocol::Tls(routes) => ("tls", connections(routes)),
        OutboundProtocol::Opaque(routes) => ("opaque", connections(routes)),
    };
    match &parent.parent {
        OutboundParent::Service(of) => {
            json!({"service": format!("{}:{}", of.service, of.port), "protocol": protocol, "routes": routes,
                "traffic": found::parent(parent)})
        }
        OutboundParent::EgressNetwork { network, policy, .. } => {
            json!({"network": network.to_string(), "policy": format!("{policy:?}"), "protocol": protocol,
                "routes": routes, "traffic": found::parent(parent)})
        }
    }
}

fn request_route<M, C: found::Condition>(route: &RequestRoute<M, C>) -> Value {
    let rule = |rule: &RequestRule<M, C>| {
        json!({"backends": backends(&rule.backends), "filters": found::outbound_filters(&rule.filters),
            "timeouts": found::timeouts(rule.timeouts), "retry": found::retry(rule.retry.as_ref())})
    };
    outbound_route(&route.id, route.rules.iter().map(rule).collect())
}

fn backends(all: &[RouteBackend]) -> Vec<Value> {
    let backend = |backend: &RouteBackend| {
        let resource = match backend.resource.as_ref().unwrap() {
            BackendResource::Service(of) => format!("{}:{}", of.service, of.port),
            BackendResource::EgressNetwork { network, port } => format!("{network}:{port}"),
        };
        let works = if backend.problem.is_none() { "works" } else { "fails" };
        json!({"to": format!("{resource} x{} {works}", backend.weight),
            "filters": found::outbound_filters(&backend.filters)})
    };
    all.iter().map(backend).collect()
}

fn outbound_route(RouteId { kind, key }: &RouteId, rules: Vec<Value>) -> Value {
    json!({"route": format!("{} {key}", kind.group()), "rules": rules})
}
