//! HTTPLocalRateLimitPolicy: how many requests per second a proxy admits to a Server.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{NamespacedTargetRef, TargetRef};

/// Spec of an HTTPLocalRateLimitPolicy (`policy.linkerd.io/v1alpha1`). Each proxy counts for itself.
#[derive(CustomResource, Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1alpha1", kind = "HTTPLocalRateLimitPolicy")]
#[kube(root = "HttpLocalRateLimitPolicy", plural = "httplocalratelimitpolicies", namespaced, derive = "PartialEq")]
#[kube(status = "HttpLocalRateLimitPolicyStatus")]
#[serde(rename_all = "camelCase")]
pub struct HttpLocalRateLimitPolicySpec {
    /// The Server.
    pub target_ref: TargetRef,
    /// Limit of all requests together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<RateLimit>,
    /// Limit of the requests of each client identity; clients without one share a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<RateLimit>,
    /// Limits of some clients, instead of that of each identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overrides: Option<Vec<RateLimitOverride>>,
}

/// A limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RateLimit {
    /// Requests per second, at least 1.
    pub requests_per_second: u32,
}

/// A limit of some clients.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitOverride {
    /// Requests per second, at least 1.
    pub requests_per_second: u32,
    /// The clients' ServiceAccounts.
    pub client_refs: Vec<NamespacedTargetRef>,
}

/// Status of an HTTPLocalRateLimitPolicy.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpLocalRateLimitPolicyStatus {
    /// `Accepted`.
    #[serde(default)]
    #[schemars(schema_with = "crate::condition::schema")]
    pub conditions: Vec<Condition>,
    /// The target, as in the spec.
    pub target_ref: TargetRef,
}
