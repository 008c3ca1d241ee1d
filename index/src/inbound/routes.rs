//! Routes that are attached to a Server.
//!
//! As in Linkerd, only those of the Server's protocol count: GRPCRoutes where it is gRPC, HTTPRoutes of both groups
//! where it is HTTP or detected. The others, and routes of an opaque Server, have no effect, which is reported
//! ([`super::unused()`]).

use std::sync::Arc;

use weft_k8s_api::policy::route::{Filter, HostMatch};

use super::{InboundRoute, InboundRoutes, InboundRule, ServerProtocol, authorizations};
use crate::{
    acceptance,
    cluster::Cluster,
    records::{Key, RouteRecord, Rules},
    store::{Protected, Store},
};

/// The routes of a Server with this protocol.
pub(super) fn attached(store: &Store, cluster: &Cluster, server: &Key, protocol: ServerProtocol) -> InboundRoutes {
    let accepted = acceptance::accepted_by_server(store, cluster, server);
    let (mut http, mut grpc) = (Vec::new(), Vec::new());
    for route in accepted.into_iter().filter(|route| has(protocol, &route.rules)) {
        match &route.rules {
            Rules::Http { hosts, rules } => {
                let rules = rules.iter().map(|rule| (&rule.matches, &rule.filters));
                http.push(attach(store, cluster, route, hosts, rules));
            }
            Rules::Grpc { hosts, rules } => {
                let rules = rules.iter().map(|rule| (&rule.matches, &rule.filters));
                grpc.push(attach(store, cluster, route, hosts, rules));
            }
            Rules::Tls { .. } | Rules::Tcp { .. } => {}
        }
    }
    match (http.is_empty(), grpc.is_empty()) {
        (false, _) => InboundRoutes::Http(http),
        (true, false) => InboundRoutes::Grpc(grpc),
        (true, true) => InboundRoutes::Default,
    }
}

/// Whether a Server with this protocol has routes of this kind.
pub(super) fn has(protocol: ServerProtocol, rules: &Rules) -> bool {
    match rules {
        Rules::Http { .. } => {
            matches!(protocol, ServerProtocol::Detect | ServerProtocol::Http1 | ServerProtocol::Http2)
        }
        Rules::Grpc { .. } => protocol == ServerProtocol::Grpc,
        Rules::Tls { .. } | Rules::Tcp { .. } => false,
    }
}

fn attach<'a, M: Clone + 'a>(
    store: &Store,
    cluster: &Cluster,
    route: &Arc<RouteRecord>,
    hosts: &[HostMatch],
    rules: impl Iterator<Item = (&'a Vec<M>, &'a Vec<Filter>)>,
) -> InboundRoute<M> {
    let rules = rules.map(|(matches, all)| InboundRule { matches: matches.clone(), filters: filters(all) });
    let key = &route.id.key;
    let protected = Protected::Route(route.id.kind, key.name.clone());
    InboundRoute {
        id: route.id.clone(),
        hosts: hosts.to_vec(),
        rules: rules.collect(),
        authorizations: authorizations::of_policies(store, cluster, &key.namespace, &[protected]),
    }
}

/// The filters that have an effect inbound. Linkerd's proxy has no filter of responses there, so its controller leaves
/// these out. What a request would be without an unsupported filter is not known, so nothing else is done to it.
fn filters(all: &[Filter]) -> Vec<Filter> {
    if let Some(unsupported) = all.iter().find(|filter| matches!(filter, Filter::Unsupported(_))) {
        return vec![unsupported.clone()];
    }
    all.iter().filter(|filter| !matches!(filter, Filter::ResponseHeaders(_))).cloned().collect()
}
