//! EgressNetwork: addresses outside the cluster, and whether traffic to them is allowed without a route.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Network;

/// Spec of an EgressNetwork (`policy.linkerd.io/v1alpha1`).
#[derive(CustomResource, Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1alpha1", kind = "EgressNetwork", plural = "egressnetworks")]
#[kube(namespaced, derive = "PartialEq", status = "EgressNetworkStatus")]
#[serde(rename_all = "camelCase")]
pub struct EgressNetworkSpec {
    /// The networks; absent means all addresses outside the cluster's networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub networks: Option<Vec<Network>>,
    /// What happens to traffic that no route matches: `Allow` or `Deny`.
    pub traffic_policy: String,
}

/// What happens to traffic to an EgressNetwork that no route matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrafficPolicy {
    /// It is forwarded.
    Allow,
    /// It is refused.
    Deny,
}

/// Status of an EgressNetwork.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct EgressNetworkStatus {
    /// `Accepted`.
    #[serde(default)]
    #[schemars(schema_with = "crate::condition::schema")]
    pub conditions: Vec<Condition>,
}

impl EgressNetworkSpec {
    /// The traffic policy, or `None` where it has another name; the caller must then deny.
    pub fn traffic_policy(&self) -> Option<TrafficPolicy> {
        match self.traffic_policy.as_str() {
            "Allow" => Some(TrafficPolicy::Allow),
            "Deny" => Some(TrafficPolicy::Deny),
            _ => None,
        }
    }
}
