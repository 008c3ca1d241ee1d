//! What the status of an object should say. Pure functions of the store.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{
    acceptance,
    condition::{ACCEPTED, Saying, is_ours, say_the_same},
};
use crate::{
    cluster::Cluster,
    records::{Key, RateLimitRecord, RouteId, RouteKind, RouteRecord, Status},
    store::Store,
};
use weft_k8s_api::{
    manifest::{Kind, ObjectRef},
    policy::{
        EgressNetworkStatus, GROUP, HttpLocalRateLimitPolicyStatus, TargetRef,
        route::{BackendKind, CONTROLLER, Parent, ParentKind, ParentReference, RouteParentStatus, RouteStatus},
    },
};

/// The status that is to be written; `None` if the object says it already, or if there is nothing to say. What
/// `pending` or the object says already keeps its time.
pub(super) fn to_write(
    store: &Store,
    cluster: &Cluster,
    object: &ObjectRef,
    pending: Option<&Status>,
) -> Option<Status> {
    let said = store.statuses.get(object);
    let known = Known { said, pending };
    let key = Key::new(object.namespace.clone().unwrap_or_default(), &object.name);
    let wanted = match object.kind {
        Kind::HttpLocalRateLimitPolicy => rate_limit(store, &key, &known)?,
        Kind::EgressNetwork => egress_network(store, cluster, &key, &known)?,
        kind => route(store, cluster, RouteId { kind: RouteKind::of(kind)?, key }, &known),
    };
    (!is_said(&wanted, said)).then_some(wanted)
}

/// What has been said about an object.
struct Known<'a> {
    said: Option<&'a Status>,
    pending: Option<&'a Status>,
}

impl Known<'_> {
    fn condition(&self, saying: Saying, parent: Option<&ParentReference>) -> Condition {
        saying.since([self.said, self.pending], parent)
    }

    /// Conditions of other types, and then the given one.
    fn with_others(&self, others: &[Condition], saying: Saying) -> Vec<Condition> {
        let others = others.iter().filter(|condition| condition.type_ != ACCEPTED).cloned();
        others.chain([self.condition(saying, None)]).collect()
    }
}

/// The entries of other controllers, and then one for each parent that Weft acts on: none for a route without such a
/// parent, or that does not exist any more.
fn route(store: &Store, cluster: &Cluster, id: RouteId, known: &Known<'_>) -> Status {
    let mut parents = match known.said {
        Some(Status::Route(status)) => status.parents.clone(),
        _ => Vec::new(),
    };
    parents.retain(|entry| !is_ours(entry));
    if let Some(route) = store.routes.get(&id) {
        let mut ours: Vec<RouteParentStatus> = Vec::new();
        for parent in &route.parents {
            let parent_ref = reference(parent);
            if ours.iter().any(|entry| entry.parent_ref == parent_ref) {
                continue;
            }
            let sayings = sayings(store, cluster, route, parent);
            let conditions = sayings.into_iter().map(|saying| known.condition(saying, Some(&parent_ref))).collect();
            ours.push(RouteParentStatus {
                controller_name: CONTROLLER.to_owned(),
                conditions: Some(conditions),
                parent_ref,
            });
        }
        parents.append(&mut ours);
    }
    Status::Route(RouteStatus { parents })
}

/// What there is to say about a route and one of its parents.
fn sayings(store: &Store, cluster: &Cluster, route: &RouteRecord, parent: &Parent) -> Vec<Saying> {
    if !route.readable {
        return vec![Saying::unsupported(&route.problems)];
    }
    let acceptance = Saying::acceptance(acceptance::of(store, cluster, route, parent));
    match parent.kind {
        ParentKind::Server => vec![acceptance],
        ParentKind::Service | ParentKind::EgressNetwork => vec![acceptance, resolution(store, cluster, route, parent)],
    }
}

/// Whether the backends exist, can be backends, and may be those of this route: the first that does not, cannot or may
/// not counts.
fn resolution(store: &Store, cluster: &Cluster, route: &RouteRecord, parent: &Parent) -> Saying {
    for backend in route.backends() {
        let key = Key::new(&backend.namespace, &backend.name);
        match backend.kind {
            BackendKind::Unsupported { .. } => return Saying::invalid_kind(""),
            BackendKind::Service if !store.may_refer(cluster, &route.id, &key) => {
                return Saying::ref_not_permitted(&key);
            }
            BackendKind::Service if store.services.contains_key(&key) => {}
            BackendKind::EgressNetwork if store.egress_networks.contains_key(&key) => {
                let is_parent = parent.kind == ParentKind::EgressNetwork
                    && (&parent.namespace, &parent.name) == (&backend.namespace, &backend.name);
                if !is_parent {
                    return Saying::invalid_kind(
                        "EgressNetwork backend needs to be on a route that has an EgressNetwork parent",
                    );
                }
            }
            BackendKind::Service | BackendKind::EgressNetwork => return Saying::backend_not_found(),
        }
    }
    Saying::resolved_refs()
}

/// A parent as Linkerd names it in statuses: with every default, and without the port of a Server.
fn reference(parent: &Parent) -> ParentReference {
    let group = match parent.kind {
        ParentKind::Service => "core",
        ParentKind::Server | ParentKind::EgressNetwork => parent.kind.group(),
    };
    ParentReference {
        group: Some(group.to_owned()),
        kind: Some(parent.kind.name().to_owned()),
        namespace: Some(parent.namespace.clone()),
        name: parent.name.clone(),
        section_name: None,
        port: parent.port.filter(|_| parent.kind != ParentKind::Server),
    }
}

/// `None` for a rate limit that does not exist or is not about a Server.
fn rate_limit(store: &Store, key: &Key, known: &Known<'_>) -> Option<Status> {
    let policies = store.policies(&key.namespace)?;
    let server = policies.rate_limits.get(&key.name).and_then(RateLimitRecord::server)?;
    let in_force = acceptance::rate_limit(store, &Key::new(&key.namespace, server));
    let saying = if policies.servers.get(server).is_none() {
        Saying::no_matching_target()
    } else if in_force.is_some_and(|(name, _)| *name == key.name) {
        Saying::accepted()
    } else {
        Saying::rate_limit_already_exists()
    };
    let others = match known.said {
        Some(Status::RateLimit(status)) => status.conditions.as_slice(),
        _ => &[],
    };
    Some(Status::RateLimit(HttpLocalRateLimitPolicyStatus {
        conditions: known.with_others(others, saying),
        target_ref: TargetRef {
            group: Some(GROUP.to_owned()),
            kind: ParentKind::Server.name().to_owned(),
            name: server.to_owned(),
        },
    }))
}

fn egress_network(store: &Store, cluster: &Cluster, key: &Key, known: &Known<'_>) -> Option<Status> {
    let network = store.egress_networks.get(key)?;
    let saying = if acceptance::is_egress_network_accepted(cluster, network) {
        Saying::accepted()
    } else {
        Saying::network_overlap()
    };
    let others = match known.said {
        Some(Status::EgressNetwork(status)) => status.conditions.as_slice(),
        _ => &[],
    };
    Some(Status::EgressNetwork(EgressNetworkStatus { conditions: known.with_others(others, saying) }))
}

/// Whether an object says what is wanted, whatever the times and the order of a route's parents.
fn is_said(wanted: &Status, said: Option<&Status>) -> bool {
    match (wanted, said) {
        (Status::Route(wanted), said) => {
            let said = match said {
                Some(Status::Route(said)) => said.parents.as_slice(),
                _ => &[],
            };
            let is_same = |one: &RouteParentStatus, other: &RouteParentStatus| {
                one.parent_ref == other.parent_ref
                    && one.controller_name == other.controller_name
                    && say_the_same(one.conditions(), other.conditions())
            };
            let is_said = |entry: &RouteParentStatus| said.iter().any(|said| is_same(entry, said));
            wanted.parents.len() == said.len() && wanted.parents.iter().all(is_said)
        }
        (Status::RateLimit(wanted), Some(Status::RateLimit(said))) => {
            wanted.target_ref == said.target_ref && say_the_same(&wanted.conditions, &said.conditions)
        }
        (Status::EgressNetwork(wanted), Some(Status::EgressNetwork(said))) => {
            say_the_same(&wanted.conditions, &said.conditions)
        }
        _ => false,
    }
}
