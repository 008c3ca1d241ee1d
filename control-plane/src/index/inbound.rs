//! Who may connect to a pod's port.
//!
//! ```text
//! port --Server?--> none:  the pod's or the mesh's default policy
//!                   found: ServerAuthorizations, AuthorizationPolicies on it or on its Namespace, its own accessPolicy
//! ```
//!
//! What cannot be read or resolved never allows: an AuthorizationPolicy with an unresolved reference is ignored, an
//! unreadable default policy is `deny`.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use ipnet::IpNet;
use weft_k8s_api::policy::{
    self, AuthorizationPolicySpec, Client, DefaultPolicy, IdentityMatch, NamespacedTargetRef, Network, ProxyProtocol,
    ServerReference,
};

use super::{
    Cluster, Key,
    records::{DefaultPolicyAnnotation, ServerRecord},
    selection,
    store::{Authz, Store},
    subject::Subject,
};

/// The policy of one port.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct InboundServer {
    /// The Server, or the default policy, that it comes from.
    pub(crate) origin: Origin,
    /// What clients speak.
    pub(crate) protocol: ServerProtocol,
    /// A client must satisfy one of these.
    pub(crate) authorizations: Vec<Authorization>,
    /// Paths of probes, open to `probe_networks`.
    pub(crate) probe_paths: Vec<String>,
    /// Networks from which probes come.
    pub(crate) probe_networks: Vec<IpNet>,
}

/// Where a rule comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A default, by name.
    Default(&'static str),
    /// A Server.
    Server(String),
    /// A ServerAuthorization.
    ServerAuthorization(String),
    /// An AuthorizationPolicy.
    AuthorizationPolicy(String),
}

/// What clients speak on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerProtocol {
    /// To be detected.
    Detect,
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
    /// gRPC.
    Grpc,
    /// TCP.
    Opaque,
    /// TLS of the application.
    Tls,
}

/// One way to be allowed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Authorization {
    /// Where it comes from.
    pub(crate) origin: Origin,
    /// A client must come from one of these; never empty: stock proxies refuse a whole Server that has an authorization
    /// without networks.
    pub(crate) networks: Vec<Network>,
    /// And be this.
    pub(crate) authentication: Authentication,
}

/// What a client must prove.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Authentication {
    /// Nothing.
    Unauthenticated,
    /// That it speaks mesh TLS, as whoever.
    Tls,
    /// One of these identities; an empty list admits nobody.
    Identities(Vec<IdentityMatch>),
}

/// Computes the policy; `None` where there is no such pod.
pub(super) fn compute(store: &Store, cluster: &Cluster, pod: &Key, port: u16) -> Option<Arc<InboundServer>> {
    Some(Arc::new(of(store, cluster, Subject::Pod(store.pod(pod)?), port)))
}

/// Computes the policy of an ExternalWorkload; `None` where there is no such workload.
pub(super) fn compute_external(
    store: &Store,
    cluster: &Cluster,
    workload: &Key,
    port: u16,
) -> Option<Arc<InboundServer>> {
    Some(Arc::new(of(store, cluster, Subject::External(store.workload(workload)?), port)))
}

fn of(store: &Store, cluster: &Cluster, subject: Subject<'_>, port: u16) -> InboundServer {
    match selection::server(store, subject, port) {
        Some(server) => declared(store, cluster, subject, server, port),
        None => default(cluster, subject, port),
    }
}

fn declared(store: &Store, cluster: &Cluster, subject: Subject<'_>, server: &ServerRecord, port: u16) -> InboundServer {
    let mut authorizations = server_authorizations(store, cluster, server);
    authorizations.extend(authorization_policies(store, cluster, server));
    match server.spec.access() {
        Ok(access) => authorizations.extend(default_authorization(cluster, access)),
        Err(error) => tracing::error!(server = %server.key, %error, "unreadable accessPolicy denies"),
    }
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
        probe_paths: subject.probe_paths(port),
        probe_networks: cluster.probe_networks.clone(),
    }
}

fn default(cluster: &Cluster, subject: Subject<'_>, port: u16) -> InboundServer {
    let policy = match subject.default_policy() {
        DefaultPolicyAnnotation::Inherit => cluster.default_policy,
        DefaultPolicyAnnotation::Policy(policy) => policy,
        DefaultPolicyAnnotation::Unreadable => DefaultPolicy::Deny,
    };
    let policy = match policy {
        DefaultPolicy::AllUnauthenticated if subject.requires_identity(port) => DefaultPolicy::AllAuthenticated,
        DefaultPolicy::ClusterUnauthenticated if subject.requires_identity(port) => DefaultPolicy::ClusterAuthenticated,
        other => other,
    };
    let opaque = subject.is_opaque(port, &cluster.default_opaque_ports);
    InboundServer {
        origin: Origin::Default(policy.label()),
        protocol: if opaque { ServerProtocol::Opaque } else { ServerProtocol::Detect },
        authorizations: default_authorization(cluster, policy).into_iter().collect(),
        probe_paths: subject.probe_paths(port),
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
    // A mesh without cluster networks: there is no client from there.
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
        // Both or neither is no valid reference.
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

/// What a client must prove, in the strictest reading where more than one thing is said; `None` admits nobody.
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
    let targets = |authz: &Authz| {
        let target = &authz.spec.target_ref;
        (target.is(policy::GROUP, "Server") && target.name == server.key.name)
            || (target.is("", "Namespace") && target.name == *namespace)
    };
    let mut found: Vec<_> = policies.authorizations.iter().filter(|(_, authz)| targets(authz)).collect();
    found.sort_by_key(|(name, authz)| (authz.created, name.as_str()));
    let resolved = found.into_iter().filter_map(|(name, authz)| {
        let Some((networks, authentication)) = resolve(store, cluster, namespace, &authz.spec) else {
            tracing::warn!(
                namespace,
                policy = name,
                "authorization policy refers to what does not exist or is not supported; it is ignored"
            );
            return None;
        };
        Some(Authorization { origin: Origin::AuthorizationPolicy(name.clone()), networks, authentication })
    });
    resolved.collect()
}

/// What a policy requires; `None` where a reference leads nowhere or the combination is not supported.
fn resolve(
    store: &Store,
    cluster: &Cluster,
    namespace: &str,
    spec: &AuthorizationPolicySpec,
) -> Option<(Vec<Network>, Authentication)> {
    let (mut networks, mut identities) = (None, None);
    for reference in &spec.required_authentication_refs {
        let target_namespace = reference.namespace.as_deref().unwrap_or(namespace);
        if reference.is(policy::GROUP, "NetworkAuthentication") {
            let found = store.policies(target_namespace)?.networks.get(&reference.name)?;
            // No network at all is no valid requirement, and nothing that a proxy could enforce.
            if found.is_empty() {
                return None;
            }
            set_once(&mut networks, found.clone())?;
        } else if reference.is(policy::GROUP, "MeshTLSAuthentication") {
            let (named, refs) = store.policies(target_namespace)?.mesh_tls.get(&reference.name)?;
            let mut all = named.clone();
            for reference in refs {
                all.push(identity(cluster, target_namespace, reference)?);
            }
            set_once(&mut identities, all)?;
        } else if reference.is("", "ServiceAccount") {
            set_once(&mut identities, vec![identity(cluster, namespace, reference)?])?;
        } else {
            return None;
        }
    }
    let authentication = identities.map_or(Authentication::Unauthenticated, Authentication::Identities);
    Some((networks.unwrap_or_else(everywhere), authentication))
}

/// Two requirements of one sort are not supported: reading them as alternatives would allow too much.
fn set_once<T>(slot: &mut Option<T>, value: T) -> Option<()> {
    slot.replace(value).is_none().then_some(())
}

fn identity(cluster: &Cluster, namespace: &str, reference: &NamespacedTargetRef) -> Option<IdentityMatch> {
    if reference.is("", "ServiceAccount") {
        let namespace = reference.namespace.as_deref().unwrap_or(namespace);
        return Some(IdentityMatch::Exact(cluster.identity(&reference.name, namespace)));
    }
    let suffix = || cluster.namespace_suffix(&reference.name).split('.').map(str::to_owned).collect();
    reference.is("", "Namespace").then(|| IdentityMatch::Suffix(suffix()))
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
