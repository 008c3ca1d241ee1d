//! ServiceProfile: routes of a service by regular expressions, retries and alternate destinations
//! (`linkerd2:controller/gen/apis/serviceprofile/v1alpha2/types.go`).
//!
//! The structs refuse unknown fields, as Linkerd's validator does: a misspelt field would otherwise be a setting that
//! silently does nothing. [`validate()`] holds the rules beyond types.

mod validate;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

pub use validate::{conditions, read, validate};

/// API group of ServiceProfiles.
pub const GROUP: &str = "linkerd.io";

/// Spec of a ServiceProfile (`linkerd.io/v1alpha2`).
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "linkerd.io", version = "v1alpha2", kind = "ServiceProfile", shortname = "sp", namespaced)]
#[kube(derive = "PartialEq")]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ServiceProfileSpec {
    /// Routes, tried in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Vec<Route>>,
    /// The limit on retries that the service may cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_budget: Option<RetryBudget>,
    /// Destinations that requests go to instead, by weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dst_overrides: Option<Vec<WeightedDst>>,
    /// Ports without protocol detection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opaque_ports: Option<Vec<String>>,
}

/// One route.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Route {
    /// Its name in metrics.
    pub name: String,
    /// The requests of the route.
    pub condition: RequestMatch,
    /// The responses that count as failures; absent means status 500 and above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_classes: Option<Vec<ResponseClass>>,
    /// Whether a failed request may be sent again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_retryable: Option<bool>,
    /// The longest time for a response, retries included, such as 300ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
}

/// Conditions on a request; at least one field is set, and all fields that are set must match.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RequestMatch {
    /// Every one of these matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "matches")]
    pub all: Option<Vec<RequestMatch>>,
    /// One of these matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "matches")]
    pub any: Option<Vec<RequestMatch>>,
    /// This does not match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_object")]
    pub not: Option<Box<RequestMatch>>,
    /// The whole path matches this regular expression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_regex: Option<String>,
    /// The method equals this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
}

/// The classification of some responses.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResponseClass {
    /// The responses of the class.
    pub condition: ResponseMatch,
    /// Whether they are failures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_failure: Option<bool>,
}

/// Conditions on a response; at least one field is set, and all fields that are set must match.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResponseMatch {
    /// Every one of these matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "matches")]
    pub all: Option<Vec<ResponseMatch>>,
    /// One of these matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "matches")]
    pub any: Option<Vec<ResponseMatch>>,
    /// This does not match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_object")]
    pub not: Option<Box<ResponseMatch>>,
    /// The status is in this range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<StatusRange>,
}

/// A range of status codes, both ends included. Where one end is absent or zero, the range is the other one
/// (`linkerd2:cli/profile/template.go`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StatusRange {
    /// Lowest status, 100-599; without `max` the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// Highest status, 100-599; without `min` the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
}

/// The limit on retries.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RetryBudget {
    /// Retries per original request, 0 or above.
    pub retry_ratio: f32,
    /// Retries per second that are always allowed.
    pub min_retries_per_second: u32,
    /// The window in which requests count towards the ratio, such as 10s.
    pub ttl: String,
}

/// One alternate destination.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WeightedDst {
    /// The destination, as `host:port`.
    pub authority: String,
    /// Its weight, a quantity such as 1 or 500m.
    #[schemars(schema_with = "quantity")]
    pub weight: IntOrString,
}

// The schema of a custom resource cannot refer to itself, so only the webhook checks nested conditions.

fn matches(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true }
    })
}

fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

fn quantity(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-int-or-string": true })
}
