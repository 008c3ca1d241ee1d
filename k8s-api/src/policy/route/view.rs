//! What routes of all kinds have in common.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    GATEWAY_GROUP, GatewayHttpRoute, GrpcRoute, HttpRoute, Parent, ParentReference, RouteStatus, TcpRoute, TlsRoute,
};
use crate::policy::GROUP;

/// A route of any kind.
#[derive(Clone, Copy, Debug)]
pub struct RouteView<'a> {
    /// API group.
    pub group: &'static str,
    /// Kind.
    pub kind: &'static str,
    /// Metadata.
    pub metadata: &'a ObjectMeta,
    /// References to parents, also to kinds that Weft does not act on.
    pub parent_refs: &'a [ParentReference],
    /// Status.
    pub status: Option<&'a RouteStatus>,
}

impl<'a> RouteView<'a> {
    /// The route's namespace.
    pub fn namespace(&self) -> &'a str {
        self.metadata.namespace.as_deref().unwrap_or("default")
    }

    /// The parents that Weft acts on, with their index in the spec.
    pub fn parents(self) -> impl Iterator<Item = (usize, Parent)> + 'a {
        let parents = self.parent_refs.iter().enumerate();
        parents.filter_map(move |(index, parent)| Some((index, parent.resolve(self.group, self.namespace())?)))
    }

    /// Whether the status says that `parent` accepts the route.
    pub fn is_accepted_by(&self, parent: &Parent) -> bool {
        let mut statuses = self.status.into_iter().flat_map(|status| &status.parents);
        statuses.any(|status| {
            let of = status.parent_ref.resolve(self.group, self.namespace());
            status.is_accepted() && of.as_ref() == Some(parent)
        })
    }
}

fn parents(refs: Option<&Vec<ParentReference>>) -> &[ParentReference] {
    refs.map_or(&[], Vec::as_slice)
}

/// Implements `view` for a kind: its type, group and name, and where its references to parents are.
macro_rules! viewed {
    ($($route:ty, $group:expr, $kind:literal, $($refs:ident).+;)*) => {
        $(impl $route {
            /// What it has in common with other routes.
            pub fn view(&self) -> RouteView<'_> {
                RouteView {
                    group: $group,
                    kind: $kind,
                    metadata: &self.metadata,
                    parent_refs: parents(self.$($refs).+.as_ref()),
                    status: self.status.as_ref(),
                }
            }
        })*
    };
}

viewed! {
    HttpRoute, GROUP, "HTTPRoute", spec.parent_refs;
    GatewayHttpRoute, GATEWAY_GROUP, "HTTPRoute", spec.route.parent_refs;
    GrpcRoute, GATEWAY_GROUP, "GRPCRoute", spec.parent_refs;
    TlsRoute, GATEWAY_GROUP, "TLSRoute", spec.parent_refs;
    TcpRoute, GATEWAY_GROUP, "TCPRoute", spec.parent_refs;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_our_controller_accepts_and_only_the_parent_that_it_names() {
        let route = |controller: &str, port: u16, status: &str| -> HttpRoute {
            let condition = json!({"type": "Accepted", "status": status, "reason": "", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            serde_json::from_value(json!({
                "metadata": {"name": "r", "namespace": "shop"},
                "spec": {"parentRefs": [
                    {"name": "gateway"}, {"group": "core", "kind": "Service", "name": "web", "port": 80},
                ]},
                "status": {"parents": [{"controllerName": controller, "conditions": [condition],
                    "parentRef": {"group": "", "kind": "Service", "namespace": "shop", "name": "web", "port": port}}]},
            }))
            .unwrap()
        };
        for (controller, port, status, expected) in [
            ("linkerd.io/policy-controller", 80, "True", true),
            ("linkerd.io/policy-controller", 80, "False", false),
            ("linkerd.io/policy-controller", 81, "True", false),
            ("example.org/gateway", 80, "True", false),
        ] {
            let route = route(controller, port, status);
            let view = route.view();
            let parents: Vec<_> = view.parents().collect();
            assert_eq!((parents.len(), parents[0].0), (1, 1));
            assert_eq!(view.is_accepted_by(&parents[0].1), expected, "{controller} {port} {status}");
        }
    }
}
