//! ServerAuthorization: who may connect to which Servers. The older form of AuthorizationPolicy, still in use.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{IdentityMatch, Network};

/// Spec of a ServerAuthorization (`policy.linkerd.io/v1beta1`).
#[derive(CustomResource, Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1beta1", kind = "ServerAuthorization")]
#[kube(plural = "serverauthorizations", shortname = "saz", shortname = "serverauthz", shortname = "srvauthz")]
#[kube(namespaced, derive = "PartialEq")]
pub struct ServerAuthorizationSpec {
    /// Which Servers.
    pub server: ServerReference,
    /// Which clients.
    pub client: Client,
}

/// Servers of the same namespace; exactly one of the two is set.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct ServerReference {
    /// One Server by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Servers by their labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::selector::schema")]
    pub selector: Option<LabelSelector>,
}

/// Clients.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct Client {
    /// Where they may come from; absent means the cluster's networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub networks: Option<Vec<Network>>,
    /// Whether everybody is meant, meshed or not.
    #[serde(default)]
    pub unauthenticated: bool,
    /// Meshed clients.
    #[serde(default, rename = "meshTLS", skip_serializing_if = "Option::is_none")]
    pub mesh_tls: Option<MeshTls>,
}

/// Meshed clients.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MeshTls {
    /// Whether TLS suffices, with no identity proven: what a proxy speaks before it has a certificate.
    #[serde(default, rename = "unauthenticatedTLS")]
    pub unauthenticated_tls: bool,
    /// Identities, suffixes (`*.ns.serviceaccount...`), or `*` for every identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identities: Option<Vec<IdentityMatch>>,
    /// ServiceAccounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_accounts: Option<Vec<ServiceAccountReference>>,
}

/// A ServiceAccount, by default of the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct ServiceAccountReference {
    /// Name.
    pub name: String,
    /// Namespace; absent means that of the ServerAuthorization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}
