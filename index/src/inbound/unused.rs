//! Routes and rate limits that a Server accepts and whose kind its protocol does not have. As with Linkerd, their
//! statuses say `Accepted`, and the Server admits what they would refuse; so the index reports them.

use std::collections::BTreeMap;

use weft_k8s_api::manifest::{Kind, ObjectRef};

use super::{ServerProtocol, routes, shared};
use crate::{
    acceptance,
    cluster::Cluster,
    records::{Key, Rules},
    store::Store,
};

/// The routes of a Server, and its rate limit, that have no effect there, with the problem.
pub(crate) fn unused(store: &Store, cluster: &Cluster, server: &Key) -> BTreeMap<ObjectRef, String> {
    let known = store.policies(&server.namespace).and_then(|policies| policies.servers.get(&server.name));
    let Some(record) = known else { return BTreeMap::new() };
    let protocol = shared::protocol(record);
    let name = &server.name;
    let (named, has) = match protocol {
        ServerProtocol::Detect => ("no proxyProtocol", "HTTPRoutes"),
        ServerProtocol::Http1 => ("proxyProtocol HTTP/1", "HTTPRoutes"),
        ServerProtocol::Http2 => ("proxyProtocol HTTP/2", "HTTPRoutes"),
        ServerProtocol::Grpc => ("proxyProtocol gRPC", "GRPCRoutes and no rate limit"),
        ServerProtocol::Opaque => ("proxyProtocol opaque", "neither routes nor a rate limit"),
        ServerProtocol::Tls => ("proxyProtocol TLS", "neither routes nor a rate limit"),
    };
    let routes = acceptance::accepted_by_server(store, cluster, server).into_iter();
    let routes = routes.filter(|route| !routes::has(protocol, &route.rules)).map(|route| {
        let wanted = if matches!(route.rules, Rules::Grpc { .. }) { "gRPC" } else { "HTTP/1 or HTTP/2" };
        let other = match protocol {
            ServerProtocol::Opaque | ServerProtocol::Tls => "",
            _ => "use a route of that kind, or ",
        };
        let problem = format!(
            "spec.parentRefs: Server {name} has {named} and with it {has}: the route has no effect there; {other}set \
             proxyProtocol to {wanted}"
        );
        (route.id.reference(), problem)
    });
    let limit = acceptance::rate_limit(store, server).filter(|_| !has_rate_limit(protocol)).map(|(limit, _)| {
        let problem = format!(
            "spec.targetRef: Server {name} has {named} and with it {has}: the limit has no effect; set proxyProtocol \
             to HTTP/1 or HTTP/2"
        );
        let (kind, namespace) = (Kind::HttpLocalRateLimitPolicy, Some(server.namespace.clone()));
        (ObjectRef { kind, namespace, name: limit.clone() }, problem)
    });
    routes.chain(limit).collect()
}

/// Whether a Server with this protocol has a rate limit: Linkerd's API has it for HTTP alone.
fn has_rate_limit(protocol: ServerProtocol) -> bool {
    matches!(protocol, ServerProtocol::Detect | ServerProtocol::Http1 | ServerProtocol::Http2)
}
