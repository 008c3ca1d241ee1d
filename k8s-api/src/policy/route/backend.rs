//! Where a rule sends traffic.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::policy::{GROUP, authorization::same_kind};

/// A reference from a rule to a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct BackendReference {
    /// API group; absent means core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Kind; absent means Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name.
    pub name: String,
    /// Namespace; absent means that of the route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Port; required for a Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Share of the traffic in proportion to the other backends; absent means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// A backend with every default filled in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Kind.
    pub kind: BackendKind,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Port.
    pub port: Option<u16>,
    /// Share of the traffic in proportion to the other backends.
    pub weight: u32,
}

/// Kinds of backends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// A Service.
    Service,
    /// An EgressNetwork, which must be the route's parent.
    EgressNetwork,
    /// A kind that Weft cannot send traffic to: requests for it fail.
    Unsupported {
        /// API group.
        group: String,
        /// Kind.
        kind: String,
    },
}

impl BackendReference {
    /// The backend; `route_namespace` is that of the route.
    pub fn resolve(&self, route_namespace: &str) -> Backend {
        let group = self.group.as_deref().unwrap_or_default();
        let name = self.kind.as_deref().unwrap_or("Service");
        let is = |wanted_group, wanted| same_kind(Some(group), name, wanted_group, wanted);
        let kind = if is("", "Service") {
            BackendKind::Service
        } else if is(GROUP, "EgressNetwork") {
            BackendKind::EgressNetwork
        } else {
            BackendKind::Unsupported { group: group.to_owned(), kind: name.to_owned() }
        };
        let namespace = self.namespace.as_deref().filter(|namespace| !namespace.is_empty()).unwrap_or(route_namespace);
        Backend {
            kind,
            namespace: namespace.to_owned(),
            name: self.name.clone(),
            port: self.port.filter(|port| *port != 0),
            weight: self.weight.unwrap_or(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_backend_is_a_service_unless_it_says_otherwise() {
        let read = |value| serde_json::from_value::<BackendReference>(value).unwrap().resolve("shop");
        let backend = read(json!({"name": "web", "port": 80}));
        assert_eq!((backend.kind, backend.namespace.as_str(), backend.weight), (BackendKind::Service, "shop", 1));
        let backend = read(json!({"group": "core", "kind": "Service", "name": "web", "namespace": "b", "weight": 0}));
        assert_eq!((backend.kind, backend.namespace.as_str(), backend.weight), (BackendKind::Service, "b", 0));
        assert_eq!(
            read(json!({"group": GROUP, "kind": "EgressNetwork", "name": "e"})).kind,
            BackendKind::EgressNetwork
        );
        let other = read(json!({"group": "multicluster.x-k8s.io", "kind": "ServiceImport", "name": "web"}));
        assert!(matches!(other.kind, BackendKind::Unsupported { kind, .. } if kind == "ServiceImport"));
    }
}
