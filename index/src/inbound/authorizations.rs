//! The clients that a Server, a route or a default policy admits.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use weft_k8s_api::policy::{
    self, AuthorizationPolicySpec, Client, DefaultPolicy, IdentityMatch, NamespacedTargetRef, Network, ServerReference,
    route::{Parent, ParentKind},
};

use super::{Authentication, Authorization, Origin};
use crate::{
    cluster::Cluster,
    records::{Key, RouteId, ServerRecord},
    store::{Authz, Protected, Store},
};

/// Authorizations of a Server: by ServerAuthorizations, by AuthorizationPolicies on it or on its Namespace, and by its
/// own accessPolicy.
pub(super) fn of_server(store: &Store, cluster: &Cluster, server: &ServerRecord) -> Vec<Authorization> {
    if server.is_unreadable {
        return Vec::new();
    }
    let mut all = of_server_authorizations(store, cluster, server);
    let protected = [Protected::Server(server.key.name.clone()), Protected::Namespace];
    all.extend(of_policies(store, cluster, &server.key.namespace, &protected));
    // An unreadable accessPolicy denies; the source reports it.
    all.extend(server.spec.access().ok().and_then(|access| of_default(cluster, access)));
    all
}

/// The authorization of a default policy, if it admits any client.
pub(super) fn of_default(cluster: &Cluster, policy: DefaultPolicy) -> Option<Authorization> {
    let everyone = || Authentication::Unauthenticated;
    let meshed = || Authentication::Identities(vec![IdentityMatch::Suffix(Vec::new())]);
    let cluster_networks = || cluster_networks(cluster);
    let (networks, authentication) = match policy {
        DefaultPolicy::AllUnauthenticated | DefaultPolicy::Audit => (everywhere(), everyone()),
        DefaultPolicy::AllAuthenticated => (everywhere(), meshed()),
        DefaultPolicy::ClusterUnauthenticated => (cluster_networks(), everyone()),
        DefaultPolicy::ClusterAuthenticated => (cluster_networks(), meshed()),
        DefaultPolicy::Deny => return None,
    };
    // Without cluster networks, no client can come from one.
    if networks.is_empty() {
        return None;
    }
    Some(Authorization { origin: Origin::Default(policy.label()), networks, authentication })
}

/// Whether a ServerAuthorization is about a Server of its namespace.
pub(crate) fn selects(reference: &ServerReference, server: &ServerRecord) -> bool {
    match (&reference.name, &reference.selector) {
        (Some(name), None) => *name == server.key.name,
        (None, Some(selector)) => policy::selects(selector, Some(&server.labels)),
        // A reference with both or with neither is invalid.
        _ => false,
    }
}

/// Authorizations by the ServerAuthorizations of the Server, by name.
fn of_server_authorizations(store: &Store, cluster: &Cluster, server: &ServerRecord) -> Vec<Authorization> {
    let namespace = &server.key.namespace;
    let Some(policies) = store.policies(namespace) else { return Vec::new() };
    let found = policies.server_authorizations.iter().filter(|(_, spec)| selects(&spec.server, server));
    let resolved = found.filter_map(|(name, spec)| {
        let origin = Origin::ServerAuthorization(name.clone());
        // An empty list means the same as none, as in Linkerd.
        let networks = spec.client.networks.clone().filter(|networks| !networks.is_empty());
        let networks = networks.unwrap_or_else(|| cluster_networks(cluster));
        if networks.is_empty() {
            return None;
        }
        Some(Authorization { origin, networks, authentication: client(cluster, namespace, &spec.client)? })
    });
    resolved.collect()
}

/// The authentication that a ServerAuthorization requires, the strictest one if it sets several; `None`
/// admits no client.
fn client(cluster: &Cluster, namespace: &str, client: &Client) -> Option<Authentication> {
    let Some(tls) = &client.mesh_tls else { return client.unauthenticated.then_some(Authentication::Unauthenticated) };
    let mut identities = tls.identities.clone().unwrap_or_default();
    for account in tls.service_accounts.iter().flatten() {
        let namespace = account.namespace.as_deref().unwrap_or(namespace);
        identities.push(IdentityMatch::Exact(cluster.identity(&account.name, namespace)));
    }
    if identities.is_empty() {
        return tls.unauthenticated_tls.then_some(Authentication::Tls);
    }
    Some(Authentication::Identities(identities))
}

/// Authorizations by the AuthorizationPolicies of a namespace that protect one of these, oldest first, then by name.
pub(super) fn of_policies(
    store: &Store,
    cluster: &Cluster,
    namespace: &str,
    protected: &[Protected],
) -> Vec<Authorization> {
    let Some(policies) = store.policies(namespace) else { return Vec::new() };
    let names = protected.iter().flat_map(|protected| policies.authorizations_of.iter(protected));
    let mut found: Vec<_> = names.filter_map(|name| policies.authorizations.get_key_value(name)).collect();
    found.sort_by_key(|(name, authz)| (authz.created, *name));
    let resolved = found.into_iter().filter_map(|(name, authz)| {
        let Requirements { networks, authentication } = resolve(store, cluster, namespace, &authz.spec).ok()?;
        Some(Authorization { origin: Origin::AuthorizationPolicy(name.clone()), networks, authentication })
    });
    resolved.collect()
}

/// AuthorizationPolicies of a namespace that grant nothing whichever Servers exist, with the reason; by name.
pub(crate) fn ineffective(store: &Store, cluster: &Cluster, namespace: &str) -> BTreeMap<String, String> {
    let policies = store.policies(namespace).into_iter().flat_map(|policies| &policies.authorizations);
    let problem = |authz: &Authz| {
        let target = &authz.spec.target_ref;
        let (kind, name) = (&target.kind, &target.name);
        match Protected::of(target, namespace) {
            None => {
                return Some(format!(
                    "spec.targetRef: {kind} {name} is not a valid target, expected a Server, an HTTPRoute, a GRPCRoute \
                     or the policy's Namespace"
                ));
            }
            Some(Protected::Route(of, _)) => {
                let id = RouteId { kind: of, key: Key::new(namespace, name) };
                let is_server = |parent: &Parent| parent.kind == ParentKind::Server && parent.namespace == namespace;
                if !store.routes.get(&id).is_some_and(|route| route.parents.iter().any(is_server)) {
                    let group = of.group();
                    return Some(format!(
                        "spec.targetRef: {kind} {name} of {group} does not exist, or no Server of its namespace is its parent"
                    ));
                }
            }
            Some(Protected::Namespace | Protected::Server(_)) => {}
        }
        resolve(store, cluster, namespace, &authz.spec).err().map(|error| error.to_string())
    };
    policies.filter_map(|(name, authz)| Some((name.clone(), problem(authz)?))).collect()
}

/// What a policy requires of a client.
struct Requirements {
    networks: Vec<Network>,
    authentication: Authentication,
}

/// Why a policy's requirements cannot be resolved.
#[derive(Debug, thiserror::Error)]
enum RequirementError {
    #[error("spec.requiredAuthenticationRefs: {0} {1} does not exist")]
    Missing(&'static str, Key),
    #[error("spec.requiredAuthenticationRefs: NetworkAuthentication {0} names no network")]
    NoNetworks(Key),
    #[error("spec.requiredAuthenticationRefs: a second requirement of identities or networks, expected one of each")]
    Second,
    #[error(
        "unsupported reference to {0} {1}, expected MeshTLSAuthentication, NetworkAuthentication, ServiceAccount or, \
         for identities, Namespace"
    )]
    Unsupported(String, String),
}

/// Resolves the authentications that a policy requires.
fn resolve(
    store: &Store,
    cluster: &Cluster,
    namespace: &str,
    spec: &AuthorizationPolicySpec,
) -> Result<Requirements, RequirementError> {
    let (mut networks, mut identities) = (None, None);
    for reference in &spec.required_authentication_refs {
        let key = Key::new(reference.namespace.as_deref().unwrap_or(namespace), &reference.name);
        let policies = store.policies(&key.namespace);
        if reference.is(policy::GROUP, "NetworkAuthentication") {
            let found = policies.and_then(|policies| policies.networks.get(&key.name));
            let found = found.ok_or_else(|| RequirementError::Missing("NetworkAuthentication", key.clone()))?;
            // An empty list would name no client, and proxies could not enforce it.
            if found.is_empty() {
                return Err(RequirementError::NoNetworks(key));
            }
            set_once(&mut networks, found.clone())?;
        } else if reference.is(policy::GROUP, "MeshTLSAuthentication") {
            let found = policies.and_then(|policies| policies.mesh_tls.get(&key.name));
            let found = found.ok_or_else(|| RequirementError::Missing("MeshTLSAuthentication", key.clone()))?;
            let mut all = found.identities.clone();
            for reference in &found.references {
                all.push(identity(cluster, &key.namespace, reference)?);
            }
            set_once(&mut identities, all)?;
        } else if reference.is("", "ServiceAccount") {
            set_once(&mut identities, vec![identity(cluster, namespace, reference)?])?;
        } else {
            return Err(RequirementError::Unsupported(reference.kind.clone(), reference.name.clone()));
        }
    }
    let authentication = identities.map_or(Authentication::Unauthenticated, Authentication::Identities);
    Ok(Requirements { networks: networks.unwrap_or_else(everywhere), authentication })
}

/// Two requirements of one sort are not supported: taking them as alternatives would allow too much.
fn set_once<T>(slot: &mut Option<T>, value: T) -> Result<(), RequirementError> {
    slot.replace(value).is_none().then_some(()).ok_or(RequirementError::Second)
}

fn identity(
    cluster: &Cluster,
    namespace: &str,
    reference: &NamespacedTargetRef,
) -> Result<IdentityMatch, RequirementError> {
    if reference.is("", "ServiceAccount") {
        let namespace = reference.namespace.as_deref().unwrap_or(namespace);
        return Ok(IdentityMatch::Exact(cluster.identity(&reference.name, namespace)));
    }
    if reference.is("", "Namespace") {
        let suffix = cluster.namespace_suffix(&reference.name);
        return Ok(IdentityMatch::Suffix(suffix.split('.').map(str::to_owned).collect()));
    }
    Err(RequirementError::Unsupported(reference.kind.clone(), reference.name.clone()))
}

fn cluster_networks(cluster: &Cluster) -> Vec<Network> {
    cluster.networks.iter().copied().map(network).collect()
}

fn everywhere() -> Vec<Network> {
    let v4 = IpNet::new_assert(Ipv4Addr::UNSPECIFIED.into(), 0);
    let v6 = IpNet::new_assert(Ipv6Addr::UNSPECIFIED.into(), 0);
    [v4, v6].map(network).to_vec()
}

fn network(net: IpNet) -> Network {
    Network { cidr: policy::Cidr(net), except: None }
}
