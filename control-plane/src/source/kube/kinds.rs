//! Which kinds are watched, for whom, and how much of them.

use kube::core::ApiResource;
use weft_k8s_api::{labels, policy, profile, workload};

/// Parts of the control plane that read objects here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    /// Discovery.
    pub(crate) destination: bool,
    /// Policy.
    pub(crate) policy: bool,
}

/// A kind as it is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    /// API group.
    pub(super) group: &'static str,
    /// Versions that may be read, the best first: they differ in nothing that is used here, and the API converts.
    pub(super) versions: &'static [&'static str],
    /// Kind.
    pub(super) kind: &'static str,
    /// Name of the resource.
    pub(super) plural: &'static str,
    /// Whether metadata is all that is needed.
    pub(super) metadata_only: bool,
    /// Only objects that have this label.
    pub(super) label: Option<&'static str>,
}

impl Watched {
    const fn new(
        group: &'static str,
        versions: &'static [&'static str],
        kind: &'static str,
        plural: &'static str,
    ) -> Self {
        Self { group, versions, kind, plural, metadata_only: false, label: None }
    }

    const fn metadata(
        group: &'static str,
        versions: &'static [&'static str],
        kind: &'static str,
        plural: &'static str,
    ) -> Self {
        Self { metadata_only: true, ..Self::new(group, versions, kind, plural) }
    }

    /// Whether a custom resource definition has to be installed for it.
    pub(super) fn is_custom(&self) -> bool {
        self.group.ends_with("linkerd.io")
    }

    /// The resource in one of its versions.
    pub(super) fn resource(&self, version: &str) -> ApiResource {
        ApiResource {
            group: self.group.to_owned(),
            version: version.to_owned(),
            api_version: if self.group.is_empty() { version.to_owned() } else { format!("{}/{version}", self.group) },
            kind: self.kind.to_owned(),
            plural: self.plural.to_owned(),
        }
    }
}

const SERVICES: Watched = Watched::new("", &["v1"], "Service", "services");
const PODS: Watched = Watched::new("", &["v1"], "Pod", "pods");
const MESHED_PODS: Watched = Watched { label: Some(labels::CONTROL_PLANE_NS), ..PODS };
const SLICES: Watched = Watched::new("discovery.k8s.io", &["v1"], "EndpointSlice", "endpointslices");
const NODES: Watched = Watched::metadata("", &["v1"], "Node", "nodes");
const REPLICA_SETS: Watched = Watched::metadata("apps", &["v1"], "ReplicaSet", "replicasets");
const JOBS: Watched = Watched::metadata("batch", &["v1"], "Job", "jobs");
const SERVERS: Watched = Watched::new(policy::GROUP, &["v1beta3", "v1beta2", "v1beta1"], "Server", "servers");
const SERVER_AUTHORIZATIONS: Watched =
    Watched::new(policy::GROUP, &["v1beta1"], "ServerAuthorization", "serverauthorizations");
const AUTHORIZATION_POLICIES: Watched =
    Watched::new(policy::GROUP, &["v1alpha1"], "AuthorizationPolicy", "authorizationpolicies");
const MESH_TLS: Watched = Watched::new(policy::GROUP, &["v1alpha1"], "MeshTLSAuthentication", "meshtlsauthentications");
const NETWORKS: Watched = Watched::new(policy::GROUP, &["v1alpha1"], "NetworkAuthentication", "networkauthentications");
const PROFILES: Watched = Watched::new(profile::GROUP, &["v1alpha2"], "ServiceProfile", "serviceprofiles");
const WORKLOADS: Watched = Watched::new(workload::GROUP, &["v1beta1"], "ExternalWorkload", "externalworkloads");

/// Kinds that somebody needs, each once.
pub(super) fn watched(interest: Interest) -> Vec<Watched> {
    let mut kinds = vec![SERVICES];
    // Discovery needs pods that are not meshed, too: their endpoints are reached in plain text.
    kinds.push(if interest.destination { PODS } else { MESHED_PODS });
    kinds.extend([SERVERS, WORKLOADS]);
    if interest.destination {
        kinds.extend([SLICES, NODES, REPLICA_SETS, JOBS, PROFILES]);
    }
    if interest.policy {
        kinds.extend([SERVER_AUTHORIZATIONS, AUTHORIZATION_POLICIES, MESH_TLS, NETWORKS]);
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_watches_only_what_it_reads() {
        let names = |destination, policy| {
            let kinds = watched(Interest { destination, policy });
            kinds.iter().map(|kind| kind.plural).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            names(true, false),
            "services pods servers externalworkloads endpointslices nodes replicasets jobs serviceprofiles"
        );
        assert_eq!(
            names(false, true),
            "services pods servers externalworkloads serverauthorizations authorizationpolicies \
             meshtlsauthentications networkauthentications"
        );
        let meshed = watched(Interest { destination: false, policy: true });
        assert_eq!(meshed[1].label, Some("linkerd.io/control-plane-ns"));
    }
}
