//! Linkerd's policy resources, and the rules about them that need no cluster.
//!
//! The structs are the custom resources of group `policy.linkerd.io`; [`validate`] holds the rules that the admission
//! webhook, the manifest reader and the CLI share. Decisions (who may connect) belong to the control plane.

mod authorization;
mod default;
mod egress_network;
mod mesh_tls;
mod network;
mod rate_limit;
pub mod route;
mod selector;
mod server;
mod server_authorization;
pub mod traffic;
pub mod validate;

pub use authorization::{AuthorizationPolicy, AuthorizationPolicySpec, NamespacedTargetRef, TargetRef};
pub use default::{DefaultPolicy, DefaultPolicyError};
pub use egress_network::{EgressNetwork, EgressNetworkSpec, EgressNetworkStatus, TrafficPolicy};
pub use mesh_tls::{IdentityMatch, IdentityMatchError, MeshTLSAuthentication, MeshTLSAuthenticationSpec};
pub use network::{Cidr, CidrError, Network, NetworkAuthentication, NetworkAuthenticationSpec};
pub use rate_limit::{
    HttpLocalRateLimitPolicy, HttpLocalRateLimitPolicySpec, HttpLocalRateLimitPolicyStatus, RateLimit,
    RateLimitOverride,
};
pub use selector::{is_readable, selects};
pub use server::{EVERY_PORT, ProxyProtocol, Server, ServerSpec};
pub use server_authorization::{
    Client, MeshTls, ServerAuthorization, ServerAuthorizationSpec, ServerReference, ServiceAccountReference,
};

/// API group of the policy resources.
pub const GROUP: &str = "policy.linkerd.io";
