//! The kinds that are watched, for which parts, and with which fields.

use kube::core::ApiResource;
use weft_index::EndpointsFrom;
use weft_k8s_api::{labels, manifest::Kind};

/// Parts of the control plane that use objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Parts that serve this cluster.
    Parts {
        /// Discovery, by the objects that list endpoints.
        discovery: Option<EndpointsFrom>,
        /// Policy.
        policy: bool,
        /// Whether policy needs ReferenceGrants.
        reference_grants: bool,
    },
    /// Endpoints of a linked cluster: what the role of Linkerd's multicluster extension allows to read.
    Linked(EndpointsFrom),
}

/// A kind, and how it is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    /// Versions that may be read, the best first: they do not differ in anything that is used here, and the API server
    /// converts.
    pub(super) versions: &'static [&'static str],
    /// Kind.
    pub(super) kind: Kind,
    /// Name of the resource.
    pub(super) plural: &'static str,
    /// Whether only metadata is watched.
    pub(super) metadata_only: bool,
    /// Restricts the watch to objects with this label.
    pub(super) label: Option<&'static str>,
    /// Whether the cluster may be without it: nothing waits for it, and it is watched once it is installed.
    pub(super) optional: bool,
}

impl Watched {
    const fn new(kind: Kind, versions: &'static [&'static str], plural: &'static str) -> Self {
        Self { versions, kind, plural, metadata_only: false, label: None, optional: false }
    }

    const fn metadata(kind: Kind, versions: &'static [&'static str], plural: &'static str) -> Self {
        Self { metadata_only: true, ..Self::new(kind, versions, plural) }
    }

    const fn optional(kind: Kind, versions: &'static [&'static str], plural: &'static str) -> Self {
        Self { optional: true, ..Self::new(kind, versions, plural) }
    }

    /// Whether it is a custom resource of Weft's, whose definition has to be installed.
    pub(super) fn is_custom(&self) -> bool {
        self.kind.group().ends_with("linkerd.io")
    }

    /// The resource in one of its versions.
    pub(super) fn resource(&self, version: &str) -> ApiResource {
        let group = self.kind.group();
        ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version: if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") },
            kind: self.kind.to_string(),
            plural: self.plural.to_owned(),
        }
    }
}

const SERVICES: Watched = Watched::new(Kind::Service, &["v1"], "services");
const PODS: Watched = Watched::new(Kind::Pod, &["v1"], "pods");
const MESHED_PODS: Watched = Watched { label: Some(labels::CONTROL_PLANE_NS), ..PODS };
const SLICES: Watched = Watched::new(Kind::EndpointSlice, &["v1"], "endpointslices");
const ENDPOINTS: Watched = Watched::new(Kind::Endpoints, &["v1"], "endpoints");
const NODES: Watched = Watched::metadata(Kind::Node, &["v1"], "nodes");
const REPLICA_SETS: Watched = Watched::metadata(Kind::ReplicaSet, &["v1"], "replicasets");
const JOBS: Watched = Watched::metadata(Kind::Job, &["v1"], "jobs");
const SERVERS: Watched = Watched::new(Kind::Server, &["v1beta3", "v1beta2", "v1beta1"], "servers");
const SERVER_AUTHORIZATIONS: Watched = Watched::new(Kind::ServerAuthorization, &["v1beta1"], "serverauthorizations");
const AUTHORIZATION_POLICIES: Watched = Watched::new(Kind::AuthorizationPolicy, &["v1alpha1"], "authorizationpolicies");
const MESH_TLS: Watched = Watched::new(Kind::MeshTLSAuthentication, &["v1alpha1"], "meshtlsauthentications");
const NETWORKS: Watched = Watched::new(Kind::NetworkAuthentication, &["v1alpha1"], "networkauthentications");
const RATE_LIMITS: Watched = Watched::new(Kind::HttpLocalRateLimitPolicy, &["v1alpha1"], "httplocalratelimitpolicies");
const EGRESS_NETWORKS: Watched = Watched::new(Kind::EgressNetwork, &["v1alpha1"], "egressnetworks");
const HTTP_ROUTES: Watched = Watched::new(Kind::HttpRoute, &["v1beta3", "v1beta2", "v1beta1"], "httproutes");
const GATEWAY_HTTP_ROUTES: Watched = Watched::optional(Kind::GatewayHttpRoute, &["v1", "v1beta1"], "httproutes");
const GRPC_ROUTES: Watched = Watched::optional(Kind::GrpcRoute, &["v1", "v1alpha2"], "grpcroutes");
const TLS_ROUTES: Watched = Watched::optional(Kind::TlsRoute, &["v1", "v1alpha3", "v1alpha2"], "tlsroutes");
const TCP_ROUTES: Watched = Watched::optional(Kind::TcpRoute, &["v1alpha2", "v1"], "tcproutes");
const REFERENCE_GRANTS: Watched = Watched::optional(Kind::ReferenceGrant, &["v1", "v1beta1"], "referencegrants");
const PROFILES: Watched = Watched::new(Kind::ServiceProfile, &["v1alpha2"], "serviceprofiles");
const WORKLOADS: Watched = Watched::new(Kind::ExternalWorkload, &["v1beta1"], "externalworkloads");

/// Kinds whose status Weft writes.
const WITH_STATUS: [Watched; 7] =
    [RATE_LIMITS, EGRESS_NETWORKS, HTTP_ROUTES, GATEWAY_HTTP_ROUTES, GRPC_ROUTES, TLS_ROUTES, TCP_ROUTES];

/// Kinds that some part needs, each once.
pub(super) fn watched(interest: Interest) -> Vec<Watched> {
    let (discovery, policy, reference_grants) = match interest {
        Interest::Parts { discovery, policy, reference_grants } => (discovery, policy, reference_grants),
        Interest::Linked(from) => return vec![SERVICES, PODS, SERVERS, list_of(from), REPLICA_SETS],
    };
    let mut kinds = vec![SERVICES];
    // Discovery also needs pods that are not meshed: their endpoints are reached in plain text.
    kinds.push(if discovery.is_some() { PODS } else { MESHED_PODS });
    kinds.extend([SERVERS, WORKLOADS]);
    if let Some(from) = discovery {
        kinds.push(list_of(from));
        kinds.extend([NODES, REPLICA_SETS, JOBS, PROFILES]);
    }
    if policy {
        kinds.extend([SERVER_AUTHORIZATIONS, AUTHORIZATION_POLICIES, MESH_TLS, NETWORKS]);
        kinds.extend(WITH_STATUS);
        kinds.extend(reference_grants.then_some(REFERENCE_GRANTS));
    }
    kinds
}

/// The resource of a kind whose status Weft writes, in each of its versions, the best first.
pub(crate) fn resources(kind: Kind) -> Vec<ApiResource> {
    let found = WITH_STATUS.into_iter().find(|watched| watched.kind == kind);
    found.iter().flat_map(|watched| watched.versions.iter().map(|version| watched.resource(version))).collect()
}

fn list_of(from: EndpointsFrom) -> Watched {
    match from {
        EndpointsFrom::Slices => SLICES,
        EndpointsFrom::Endpoints => ENDPOINTS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_watches_only_what_it_reads() {
        let names = |discovery, policy| {
            let kinds = watched(Interest::Parts { discovery, policy, reference_grants: false });
            kinds.iter().map(|kind| kind.plural).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            names(Some(EndpointsFrom::Slices), false),
            "services pods servers externalworkloads endpointslices nodes replicasets jobs serviceprofiles"
        );
        assert_eq!(
            names(None, true),
            "services pods servers externalworkloads serverauthorizations authorizationpolicies \
             meshtlsauthentications networkauthentications httplocalratelimitpolicies egressnetworks httproutes \
             httproutes grpcroutes tlsroutes tcproutes"
        );
        let by_endpoints = names(Some(EndpointsFrom::Endpoints), false);
        assert!(by_endpoints.contains(" endpoints ") && !by_endpoints.contains("endpointslices"), "{by_endpoints}");
        let linked = watched(Interest::Linked(EndpointsFrom::Slices));
        let linked: Vec<_> = linked.iter().map(|kind| kind.plural).collect();
        assert_eq!(linked, ["services", "pods", "servers", "endpointslices", "replicasets"]);
        let all = Interest::Parts { discovery: Some(EndpointsFrom::Slices), policy: true, reference_grants: true };
        assert_eq!(watched(all).last(), Some(&REFERENCE_GRANTS));
        for kind in watched(all) {
            assert_eq!(kind.optional, kind.kind.group() == "gateway.networking.k8s.io", "{kind:?}");
        }
    }

    #[test]
    fn a_status_is_written_in_the_best_version_that_is_served() {
        let versions = |kind| resources(kind).into_iter().map(|resource| resource.api_version).collect::<Vec<_>>();
        let gateway = |version: &str| format!("gateway.networking.k8s.io/{version}");
        assert_eq!(versions(Kind::TlsRoute), ["v1", "v1alpha3", "v1alpha2"].map(gateway));
        assert_eq!(versions(Kind::EgressNetwork), ["policy.linkerd.io/v1alpha1"]);
        assert!(versions(Kind::Service).is_empty());
    }

    #[test]
    fn policy_watches_meshed_pods_only() {
        let meshed = watched(Interest::Parts { discovery: None, policy: true, reference_grants: false });
        assert_eq!(meshed[1].label, Some("linkerd.io/control-plane-ns"));
    }
}
