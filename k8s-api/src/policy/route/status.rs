//! What controllers said about a route.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ParentReference;

/// Name of the controller in statuses, Linkerd's; other controllers of the Gateway API have other names.
pub const CONTROLLER: &str = "linkerd.io/policy-controller";

/// Status of a route.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct RouteStatus {
    /// One entry for each parent and controller.
    #[serde(default)]
    pub parents: Vec<RouteParentStatus>,
}

/// What one controller says about a route and one of its parents.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteParentStatus {
    /// The parent, as in the spec.
    pub parent_ref: ParentReference,
    /// Name of the controller that wrote the entry, such as `linkerd.io/policy-controller`.
    pub controller_name: String,
    /// `Accepted` and `ResolvedRefs`.
    // `None` if the controller wrote none: an entry is written back as it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::condition::schema")]
    pub conditions: Option<Vec<Condition>>,
}

impl RouteParentStatus {
    /// What it says.
    pub fn conditions(&self) -> &[Condition] {
        self.conditions.as_deref().unwrap_or_default()
    }
}
