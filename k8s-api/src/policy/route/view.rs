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
