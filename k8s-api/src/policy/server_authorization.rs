//! ServerAuthorization: which clients may connect to which Servers. The older form of AuthorizationPolicy, still in
//! use.

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
    /// The Servers.
    pub server: ServerReference,
    /// The clients that may connect.
    pub client: Client,
}

/// Servers of the same namespace; exactly one of the two is set.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct ServerReference {
    /// One Server, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Servers, by labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::selector::schema")]
    pub selector: Option<LabelSelector>,
}

/// Clients.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct Client {
    /// Networks of the clients; absent means the cluster's networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub networks: Option<Vec<Network>>,
    /// Whether every client is admitted, meshed or not.
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
    /// Whether TLS is sufficient, without an identity: what a proxy uses before it has a certificate.
    #[serde(default, rename = "unauthenticatedTLS")]
    pub unauthenticated_tls: bool,
    /// Identities, suffixes (`*.ns.serviceaccount...`), or `*` for every identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identities: Option<Vec<IdentityMatch>>,
    /// ServiceAccounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_accounts: Option<Vec<ServiceAccountReference>>,
}

/// A ServiceAccount, by default in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct ServiceAccountReference {
    /// Name.
    pub name: String,
    /// Namespace; absent means that of the ServerAuthorization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}
