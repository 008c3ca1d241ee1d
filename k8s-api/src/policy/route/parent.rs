//! What a route is attached to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::policy::{GROUP, authorization::same_kind};

/// A reference from a route to a parent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ParentReference {
    /// API group; absent means that of the route, and the empty one is the core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Kind; absent means Gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Namespace; absent means that of the route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
    /// Section of the parent, such as a listener of a Gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub section_name: Option<String>,
    /// Port of the parent; absent means every port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

/// A parent of a kind that Weft acts on, with every default filled in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Parent {
    /// Kind.
    pub kind: ParentKind,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// The port; `None` means every port.
    pub port: Option<u16>,
}

/// Kinds of parents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParentKind {
    /// A Server: the route is about inbound requests.
    Server,
    /// A Service: the route is about outbound traffic to it.
    Service,
    /// An EgressNetwork: the route is about outbound traffic that leaves the cluster.
    EgressNetwork,
}

impl ParentKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Server, Self::Service, Self::EgressNetwork];

    /// API group; empty for the core.
    pub const fn group(self) -> &'static str {
        match self {
            Self::Server | Self::EgressNetwork => GROUP,
            Self::Service => "",
        }
    }

    /// Name in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Server => "Server",
            Self::Service => "Service",
            Self::EgressNetwork => "EgressNetwork",
        }
    }
}

impl ParentReference {
    /// The parent, if it is of a kind that Weft acts on. `route_group` and `route_namespace` are those of the route.
    pub fn resolve(&self, route_group: &str, route_namespace: &str) -> Option<Parent> {
        let group = self.group.as_deref().unwrap_or(route_group);
        let name = self.kind.as_deref().unwrap_or("Gateway");
        let kind = ParentKind::ALL.into_iter().find(|kind| same_kind(Some(group), name, kind.group(), kind.name()))?;
        let namespace = self.namespace.as_deref().filter(|namespace| !namespace.is_empty()).unwrap_or(route_namespace);
        Some(Parent {
            kind,
            namespace: namespace.to_owned(),
            name: self.name.clone(),
            port: self.port.filter(|port| *port != 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::policy::route::GATEWAY_GROUP;

    #[test]
    fn defaults_are_those_of_the_route() {
        use ParentKind::{EgressNetwork, Server, Service};
        for (reference, route_group, expected) in [
            (json!({"kind": "Server", "name": "a"}), GROUP, Some((Server, "shop", None))),
            (json!({"kind": "Server", "name": "a"}), GATEWAY_GROUP, None),
            (json!({"group": GROUP, "kind": "Server", "name": "a"}), GATEWAY_GROUP, Some((Server, "shop", None))),
            (
                json!({"group": "", "kind": "Service", "name": "a", "port": 80}),
                GROUP,
                Some((Service, "shop", Some(80))),
            ),
            (json!({"group": "core", "kind": "Service", "name": "a"}), GATEWAY_GROUP, Some((Service, "shop", None))),
            (json!({"kind": "Service", "name": "a"}), GATEWAY_GROUP, None),
            (
                json!({"group": GROUP, "kind": "EgressNetwork", "name": "a", "namespace": "b", "port": 0}),
                GATEWAY_GROUP,
                Some((EgressNetwork, "b", None)),
            ),
            (json!({"name": "a"}), GATEWAY_GROUP, None),
            (json!({"name": "a"}), GROUP, None),
        ] {
            let parsed: ParentReference = serde_json::from_value(reference.clone()).unwrap();
            let found = parsed.resolve(route_group, "shop");
            let found = found.as_ref().map(|parent| (parent.kind, parent.namespace.as_str(), parent.port));
            assert_eq!(found, expected, "{reference} in {route_group}");
        }
    }
}
