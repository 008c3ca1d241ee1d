//! Policy of a pod's port: which clients may connect.
//!
//! ```text
//! port --Server?--> none:  the pod's or the mesh's default policy
//!                   found: ServerAuthorizations, AuthorizationPolicies on it or on its Namespace, its own accessPolicy
//! ```
//!
//! Anything that cannot be parsed or resolved never allows: an AuthorizationPolicy with an unresolved
//! reference is ignored, and an unreadable default policy is `deny`.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use weft_k8s_api::policy::{
    self, AuthorizationPolicySpec, Client, DefaultPolicy, IdentityMatch, NamespacedTargetRef, Network, ProxyProtocol,
    ServerReference, TargetRef,
};

use super::{
    cluster::Cluster,
    records::{DefaultPolicyAnnotation, Key, ServerRecord},
    selectable::Selectable,
    selection,
    store::{Authz, Store},
};

/// The policy of one port.
#[derive(Clone, Debug, PartialEq)]
pub struct InboundServer {
    /// The Server or the default policy that defines it.
    pub origin: Origin,
    /// The protocol of clients.
    pub protocol: ServerProtocol,
    /// A client must satisfy one of these.
    pub authorizations: Vec<Authorization>,
    /// Paths of probes, open to `probe_networks`.
    pub probe_paths: Vec<String>,
    /// Networks from which probes come.
    pub probe_networks: Vec<IpNet>,
}

/// The resource or the default that a rule comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A default, by name.
    Default(&'static str),
    /// A Server.
    Server(String),
    /// A ServerAuthorization.
    ServerAuthorization(String),
    /// An AuthorizationPolicy.
    AuthorizationPolicy(String),
}

/// The protocol of clients on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerProtocol {
    /// Detected by the proxy.
    Detect,
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
    /// gRPC.
    Grpc,
    /// TCP.
    Opaque,
    /// TLS that the application terminates.
    Tls,
}

/// One set of clients that may connect.
#[derive(Clone, Debug, PartialEq)]
pub struct Authorization {
    /// The resource or default that grants this.
    pub origin: Origin,
    /// A client must come from one of these networks; never empty: stock proxies refuse a whole Server that
    /// has an authorization without networks.
    pub networks: Vec<Network>,
    /// The client must also satisfy this.
    pub authentication: Authentication,
}

/// The identity that a client must prove.
#[derive(Clone, Debug, PartialEq)]
pub enum Authentication {
    /// None.
    Unauthenticated,
    /// Mesh TLS, with any identity or without one.
    Tls,
    /// One of these identities; an empty list admits no client.
    Identities(Vec<IdentityMatch>),
}

/// Computes the policy; `None` if the pod does not exist.
pub(super) fn compute(store: &Store, cluster: &Cluster, pod: &Key, port: u16) -> Option<InboundServer> {
    Some(compute_for(store, cluster, Selectable::Pod(store.pod(pod)?), port))
}

/// Computes the policy of an ExternalWorkload; `None` if the workload does not exist.
pub(super) fn compute_external(store: &Store, cluster: &Cluster, workload: &Key, port: u16) -> Option<InboundServer> {
    Some(compute_for(store, cluster, Selectable::External(store.workload(workload)?), port))
}

fn compute_for(store: &Store, cluster: &Cluster, selectable: Selectable<'_>, port: u16) -> InboundServer {
    match selection::server(store, selectable, port) {
        Some(server) => compute_from_server(store, cluster, selectable, server, port),
        None => compute_default(cluster, selectable, port),
    }
}

fn compute_from_server(
    store: &Store,
    cluster: &Cluster,
    selectable: Selectable<'_>,
    server: &ServerRecord,
    port: u16,
) -> InboundServer {
    let mut authorizations = server_authorizations(store, cluster, server);
    authorizations.extend(authorization_policies(store, cluster, server));
    // An unreadable accessPolicy denies; the source reports it.
    authorizations.extend(server.spec.access().ok().and_then(|access| default_authorization(cluster, access)));
    let protocol = match server.spec.protocol().unwrap_or_default() {
        ProxyProtocol::Unknown => ServerProtocol::Detect,
        ProxyProtocol::Http1 => ServerProtocol::Http1,
        ProxyProtocol::Http2 => ServerProtocol::Http2,
        ProxyProtocol::Grpc => ServerProtocol::Grpc,
        ProxyProtocol::Opaque => ServerProtocol::Opaque,
        ProxyProtocol::Tls => ServerProtocol::Tls,
    };
    InboundServer {
        origin: Origin::Server(server.key.name.clone()),
        protocol,
        authorizations,
        probe_paths: selectable.probe_paths(port),
        probe_networks: cluster.probe_networks.clone(),
    }
}

fn compute_default(cluster: &Cluster, selectable: Selectable<'_>, port: u16) -> InboundServer {
    let policy = match selectable.default_policy() {
        DefaultPolicyAnnotation::Inherit => cluster.default_policy,
        DefaultPolicyAnnotation::Policy(policy) => policy,
        DefaultPolicyAnnotation::Unreadable => DefaultPolicy::Deny,
    };
    let policy = match policy {
        DefaultPolicy::AllUnauthenticated if selectable.requires_identity(port) => DefaultPolicy::AllAuthenticated,
        DefaultPolicy::ClusterUnauthenticated if selectable.requires_identity(port) => {
            DefaultPolicy::ClusterAuthenticated
        }
        other => other,
    };
    let opaque = selectable.is_opaque(port, &cluster.default_opaque_ports);
    InboundServer {
        origin: Origin::Default(policy.label()),
        protocol: if opaque { ServerProtocol::Opaque } else { ServerProtocol::Detect },
        authorizations: default_authorization(cluster, policy).into_iter().collect(),
        probe_paths: selectable.probe_paths(port),
        probe_networks: cluster.probe_networks.clone(),
    }
}

fn default_authorization(cluster: &Cluster, policy: DefaultPolicy) -> Option<Authorization> {
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

/// Authorizations by the ServerAuthorizations of the Server, by name.
fn server_authorizations(store: &Store, cluster: &Cluster, server: &ServerRecord) -> Vec<Authorization> {
    let namespace = &server.key.namespace;
    let Some(policies) = store.policies(namespace) else { return Vec::new() };
    let means = |reference: &ServerReference| match (&reference.name, &reference.selector) {
        (Some(name), None) => *name == server.key.name,
        (None, Some(selector)) => policy::selects(selector, Some(&server.labels)),
        // A reference with both or with neither is invalid.
        _ => false,
    };
    let found = policies.server_authorizations.iter().filter(|(_, spec)| means(&spec.server));
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

/// Authorizations by the policies that target the Server or its Namespace, oldest first, then by name.
fn authorization_policies(store: &Store, cluster: &Cluster, server: &ServerRecord) -> Vec<Authorization> {
    let namespace = &server.key.namespace;
    let Some(policies) = store.policies(namespace) else { return Vec::new() };
    let means = |target: &TargetRef| {
        (target.is(policy::GROUP, "Server") && target.name == server.key.name) || is_namespace(target, namespace)
    };
    let mut found: Vec<_> = policies.authorizations.iter().filter(|(_, authz)| means(&authz.spec.target_ref)).collect();
    found.sort_by_key(|(name, authz)| (authz.created, name.as_str()));
    let resolved = found.into_iter().filter_map(|(name, authz)| {
        let Requirements { networks, authentication } = resolve(store, cluster, namespace, &authz.spec).ok()?;
        Some(Authorization { origin: Origin::AuthorizationPolicy(name.clone()), networks, authentication })
    });
    resolved.collect()
}

fn is_namespace(target: &TargetRef, namespace: &str) -> bool {
    target.is("", "Namespace") && target.name == *namespace
}

/// AuthorizationPolicies of a namespace that grant nothing whichever Servers exist, with the reason; by name.
pub(super) fn ineffective(store: &Store, cluster: &Cluster, namespace: &str) -> BTreeMap<String, String> {
    let policies = store.policies(namespace).into_iter().flat_map(|policies| &policies.authorizations);
    let problem = |authz: &Authz| {
        let target = &authz.spec.target_ref;
        if !target.is(policy::GROUP, "Server") && !is_namespace(target, namespace) {
            let (kind, name) = (&target.kind, &target.name);
            return Some(format!(
                "spec.targetRef: {kind} {name} is not a valid target, expected a Server or the policy's Namespace"
            ));
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
