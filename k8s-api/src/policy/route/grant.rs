//! ReferenceGrant: which routes of other namespaces may send traffic to the Services of its own.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::policy::authorization::same_kind;

/// Spec of a ReferenceGrant of the Gateway API: it permits each of `from` to refer to each of `to`.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "gateway.networking.k8s.io", version = "v1", kind = "ReferenceGrant", plural = "referencegrants")]
#[kube(namespaced, derive = "PartialEq")]
pub struct ReferenceGrantSpec {
    /// Kinds of objects in namespaces that may refer.
    pub from: Vec<ReferenceGrantFrom>,
    /// What they may refer to, in the grant's namespace.
    pub to: Vec<ReferenceGrantTo>,
}

/// Objects that may refer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct ReferenceGrantFrom {
    /// API group; empty means core.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Namespace.
    pub namespace: String,
}

/// Objects that may be referred to.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct ReferenceGrantTo {
    /// API group; empty means core.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Name; absent means all of the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl ReferenceGrantSpec {
    /// Whether an object of the kind in the namespace may refer to the grant's Service of this name.
    pub fn permits(&self, group: &str, kind: &str, namespace: &str, service: &str) -> bool {
        let may_refer = |from: &ReferenceGrantFrom| {
            from.namespace == namespace && same_kind(Some(&from.group), &from.kind, group, kind)
        };
        let is_meant = |to: &ReferenceGrantTo| {
            same_kind(Some(&to.group), &to.kind, "", "Service")
                && to.name.as_deref().is_none_or(|name| name.is_empty() || name == service)
        };
        self.from.iter().any(may_refer) && self.to.iter().any(is_meant)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_grant_is_for_kinds_namespaces_and_names() {
        let grant = |to| -> ReferenceGrantSpec {
            let from = json!({"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": "shop"});
            serde_json::from_value(json!({"from": [from], "to": [to]})).unwrap()
        };
        let gateway = "gateway.networking.k8s.io";
        let all = grant(json!({"group": "", "kind": "Service"}));
        assert!(all.permits(gateway, "HTTPRoute", "shop", "web"));
        assert!(!all.permits(gateway, "GRPCRoute", "shop", "web"));
        assert!(!all.permits("policy.linkerd.io", "HTTPRoute", "shop", "web"));
        assert!(!all.permits(gateway, "HTTPRoute", "other", "web"));
        let one = grant(json!({"group": "", "kind": "Service", "name": "web"}));
        assert!(one.permits(gateway, "HTTPRoute", "shop", "web"));
        assert!(!one.permits(gateway, "HTTPRoute", "shop", "api"));
        let other = grant(json!({"group": "", "kind": "Secret"}));
        assert!(!other.permits(gateway, "HTTPRoute", "shop", "web"));
    }
}
