//! The kinds that are watched, for which parts, and with which fields.

use kube::core::ApiResource;
use weft_k8s_api::{labels, manifest::Kind};

/// Parts of the control plane that use objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    /// Discovery.
    pub(crate) destination: bool,
    /// Policy.
    pub(crate) policy: bool,
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
}

impl Watched {
    const fn new(kind: Kind, versions: &'static [&'static str], plural: &'static str) -> Self {
        Self { versions, kind, plural, metadata_only: false, label: None }
    }

    const fn metadata(kind: Kind, versions: &'static [&'static str], plural: &'static str) -> Self {
        Self { metadata_only: true, ..Self::new(kind, versions, plural) }
    }

    /// Whether it is a custom resource, whose definition has to be installed.
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
const NODES: Watched = Watched::metadata(Kind::Node, &["v1"], "nodes");
const REPLICA_SETS: Watched = Watched::metadata(Kind::ReplicaSet, &["v1"], "replicasets");
const JOBS: Watched = Watched::metadata(Kind::Job, &["v1"], "jobs");
const SERVERS: Watched = Watched::new(Kind::Server, &["v1beta3", "v1beta2", "v1beta1"], "servers");
const SERVER_AUTHORIZATIONS: Watched = Watched::new(Kind::ServerAuthorization, &["v1beta1"], "serverauthorizations");
const AUTHORIZATION_POLICIES: Watched = Watched::new(Kind::AuthorizationPolicy, &["v1alpha1"], "authorizationpolicies");
const MESH_TLS: Watched = Watched::new(Kind::MeshTLSAuthentication, &["v1alpha1"], "meshtlsauthentications");
const NETWORKS: Watched = Watched::new(Kind::NetworkAuthentication, &["v1alpha1"], "networkauthentications");
const PROFILES: Watched = Watched::new(Kind::ServiceProfile, &["v1alpha2"], "serviceprofiles");
const WORKLOADS: Watched = Watched::new(Kind::ExternalWorkload, &["v1beta1"], "externalworkloads");

/// Kinds that some part needs, each once.
pub(super) fn watched(interest: Interest) -> Vec<Watched> {
    let mut kinds = vec![SERVICES];
    // Discovery also needs pods that are not meshed: their endpoints are reached in plain text.
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
