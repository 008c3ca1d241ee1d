//! Routes: how requests and connections to a Server, a Service or an EgressNetwork are matched and where they go.
//!
//! ```text
//! HTTPRoute (policy.linkerd.io), HTTPRoute, GRPCRoute, TLSRoute, TCPRoute (gateway.networking.k8s.io)
//!   |--view()---------> what all have in common: parents, status
//!   '--rules, read()--> typed matches, filters, timeouts | what is invalid
//! ReferenceGrant -------> whether a route may send traffic to a Service of another namespace
//! ```
//!
//! The resources are kept as written, so that an object always deserialises, also with match types and filters of later
//! versions of the Gateway API. Reading a rule either understands all of it or fails: a match that is left out would
//! make the route wider than it was written.

mod backend;
mod filter;
mod grant;
mod grpc;
mod http;
mod matching;
mod opaque;
mod parent;
mod status;
mod view;

pub use backend::{Backend, BackendKind, BackendReference};
pub use filter::{Filter, HeaderModifier, HttpHeader, Redirect, RedirectPath, RouteFilter};
pub use grant::{ReferenceGrant, ReferenceGrantFrom, ReferenceGrantSpec, ReferenceGrantTo};
pub use grpc::{GrpcBackendReference, GrpcMatch, GrpcMethod, GrpcRoute, GrpcRouteMatch, GrpcRouteRule, GrpcRouteSpec};
pub use http::{
    GatewayHttpRoute, GatewayHttpRouteSpec, HttpBackendReference, HttpMatch, HttpRoute, HttpRouteMatch, HttpRouteRule,
    HttpRouteSpec, HttpTimeouts, RuleTimeouts,
};
pub use matching::{HeaderMatch, HostMatch, NamedMatch, PathMatch, PathValue, QueryMatch, ValueMatch};
pub use opaque::{OpaqueRule, TcpRoute, TcpRouteSpec, TlsRoute, TlsRouteSpec};
pub use parent::{Parent, ParentKind, ParentReference};
pub use status::{CONTROLLER, RouteParentStatus, RouteStatus};
pub use view::RouteView;

use crate::field::{FieldPath, Invalid};

/// API group of the Gateway API's routes.
pub const GATEWAY_GROUP: &str = "gateway.networking.k8s.io";

/// Reads every element of a list at `at`, and collects the problems of all.
fn read_all<T, R>(at: &str, items: &[T], read: impl Fn(&T) -> Result<R, Vec<Invalid>>) -> Result<Vec<R>, Vec<Invalid>> {
    let (mut good, mut bad) = (Vec::with_capacity(items.len()), Vec::new());
    for (index, item) in items.iter().enumerate() {
        match read(item) {
            Ok(item) => good.push(item),
            Err(found) => {
                let under = |invalid: Invalid| Invalid {
                    field: invalid.field.under(FieldPath::of(at).index(index)),
                    problem: invalid.problem,
                };
                bad.extend(found.into_iter().map(under));
            }
        }
    }
    if bad.is_empty() { Ok(good) } else { Err(bad) }
}
