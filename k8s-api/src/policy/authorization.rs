//! AuthorizationPolicy: which clients a target admits.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spec of an AuthorizationPolicy (`policy.linkerd.io/v1alpha1`).
#[derive(CustomResource, Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1alpha1", kind = "AuthorizationPolicy")]
#[kube(plural = "authorizationpolicies", shortname = "authzpolicy", namespaced, derive = "PartialEq")]
#[serde(rename_all = "camelCase")]
pub struct AuthorizationPolicySpec {
    /// The protected target: a Server, a route, or the policy's own Namespace.
    pub target_ref: TargetRef,
    /// Authentications that a client must satisfy, all of them. An empty list admits every client.
    pub required_authentication_refs: Vec<NamespacedTargetRef>,
}

/// A reference to an object in the same namespace (Gateway API GEP-713).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct TargetRef {
    /// API group; absent means core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
}

/// A reference to an object, by default in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct NamespacedTargetRef {
    /// API group; absent means core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Namespace; absent means that of the referring object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

impl TargetRef {
    /// Whether this refers to `kind` of `group` (core is the empty group; kinds are compared ignoring case, as in
    /// Linkerd).
    pub fn is(&self, group: &str, kind: &str) -> bool {
        same_kind(self.group.as_deref(), &self.kind, group, kind)
    }
}

impl NamespacedTargetRef {
    /// Whether this refers to `kind` of `group` (core is the empty group; kinds are compared ignoring case, as in
    /// Linkerd).
    pub fn is(&self, group: &str, kind: &str) -> bool {
        same_kind(self.group.as_deref(), &self.kind, group, kind)
    }
}

/// Whether two references are to one kind; core is the empty group, and case does not matter, as in Linkerd.
pub(super) fn same_kind(left_group: Option<&str>, left_kind: &str, group: &str, kind: &str) -> bool {
    let core = |group: &str| if group == "core" { String::new() } else { group.to_ascii_lowercase() };
    core(left_group.unwrap_or_default()) == core(group) && left_kind.eq_ignore_ascii_case(kind)
}
