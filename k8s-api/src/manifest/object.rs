//! The kinds that Weft reads, as one closed enum.

use std::fmt;

use k8s_openapi::{
    api::{
        apps::v1::{Deployment, ReplicaSet},
        batch::v1::Job,
        core::v1::{ConfigMap, Endpoints, Namespace, Node, Pod, Secret, Service, ServiceAccount},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde::de::DeserializeOwned;

use crate::{
    policy::{
        AuthorizationPolicy, EgressNetwork, HttpLocalRateLimitPolicy, MeshTLSAuthentication, NetworkAuthentication,
        Server, ServerAuthorization,
        route::{GatewayHttpRoute, GrpcRoute, HttpRoute, ReferenceGrant, TcpRoute, TlsRoute},
    },
    profile::ServiceProfile,
    workload::ExternalWorkload,
};

/// Identifies an object: kind, namespace (if its kind has one) and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectRef {
    /// Kind.
    pub kind: Kind,
    /// Namespace; absent for kinds without one.
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name),
            None => write!(f, "{} {}", self.kind, self.name),
        }
    }
}

/// The name of a kind in manifests: that of its type, unless it has another.
macro_rules! name_of {
    ($kind:ident) => {
        stringify!($kind)
    };
    ($kind:ident $name:literal) => {
        $name
    };
}

/// Declares the enums and their per-kind tables in one place: variant, name if it is not the variant's, API group,
/// whether it is namespaced.
macro_rules! objects {
    ($($(#[$doc:meta])* $kind:ident $(= $name:literal)?, $group:literal, $namespaced:literal;)*) => {
        /// A typed object.
        #[derive(Clone, Debug, PartialEq)]
        #[expect(clippy::large_enum_variant, reason = "lists of objects are short-lived, and events carry them boxed")]
        pub enum Object { $($(#[$doc])* $kind($kind),)* }

        impl Object {
            /// The object's kind.
            pub fn kind(&self) -> Kind {
                match self { $(Self::$kind(_) => Kind::$kind,)* }
            }

            /// The object's metadata.
            pub fn metadata(&self) -> &ObjectMeta {
                match self { $(Self::$kind(object) => &object.metadata,)* }
            }

            /// The object's metadata, mutable.
            pub fn metadata_mut(&mut self) -> &mut ObjectMeta {
                match self { $(Self::$kind(object) => &mut object.metadata,)* }
            }
        }

        /// A kind that Weft reads.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Kind { $($(#[$doc])* $kind,)* }

        impl Kind {
            /// The kind with this API group and name; `None` for kinds that Weft does not read.
            pub fn of(group: &str, name: &str) -> Option<Self> {
                match (group, name) { $(($group, name_of!($kind $($name)?)) => Some(Self::$kind),)* _ => None }
            }

            /// The name in manifests.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$kind => name_of!($kind $($name)?),)* }
            }

            /// The API group; empty for the core.
            pub const fn group(self) -> &'static str {
                match self { $(Self::$kind => $group,)* }
            }

            /// Whether its objects live in namespaces.
            pub const fn is_namespaced(self) -> bool {
                match self { $(Self::$kind => $namespaced,)* }
            }
        }

        /// Parses an object of a kind, with `read`.
        pub(super) fn read<R: Reader>(kind: Kind, read: &R) -> Result<Object, R::Error> {
            match kind { $(Kind::$kind => read.read::<$kind>().map(Object::$kind),)* }
        }
    };
}

objects! {
    /// A Namespace.
    Namespace, "", false;
    /// A Node.
    Node, "", false;
    /// A Pod.
    Pod, "", true;
    /// A Service.
    Service, "", true;
    /// A ServiceAccount.
    ServiceAccount, "", true;
    /// A ConfigMap.
    ConfigMap, "", true;
    /// A Secret.
    Secret, "", true;
    /// A Deployment.
    Deployment, "apps", true;
    /// A ReplicaSet.
    ReplicaSet, "apps", true;
    /// A Job.
    Job, "batch", true;
    /// Endpoints.
    Endpoints, "", true;
    /// An EndpointSlice.
    EndpointSlice, "discovery.k8s.io", true;
    /// A Server.
    Server, "policy.linkerd.io", true;
    /// A ServerAuthorization.
    ServerAuthorization, "policy.linkerd.io", true;
    /// An AuthorizationPolicy.
    AuthorizationPolicy, "policy.linkerd.io", true;
    /// A MeshTLSAuthentication.
    MeshTLSAuthentication, "policy.linkerd.io", true;
    /// A NetworkAuthentication.
    NetworkAuthentication, "policy.linkerd.io", true;
    /// An HTTPLocalRateLimitPolicy.
    HttpLocalRateLimitPolicy = "HTTPLocalRateLimitPolicy", "policy.linkerd.io", true;
    /// An EgressNetwork.
    EgressNetwork, "policy.linkerd.io", true;
    /// Linkerd's HTTPRoute.
    HttpRoute = "HTTPRoute", "policy.linkerd.io", true;
    /// The Gateway API's HTTPRoute.
    GatewayHttpRoute = "HTTPRoute", "gateway.networking.k8s.io", true;
    /// A GRPCRoute.
    GrpcRoute = "GRPCRoute", "gateway.networking.k8s.io", true;
    /// A TLSRoute.
    TlsRoute = "TLSRoute", "gateway.networking.k8s.io", true;
    /// A TCPRoute.
    TcpRoute = "TCPRoute", "gateway.networking.k8s.io", true;
    /// A ReferenceGrant.
    ReferenceGrant, "gateway.networking.k8s.io", true;
    /// A ServiceProfile.
    ServiceProfile, "linkerd.io", true;
    /// An ExternalWorkload.
    ExternalWorkload, "workload.linkerd.io", true;
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A source of typed objects.
pub(super) trait Reader {
    /// Error of the source.
    type Error;
    /// Parses an object of type `K`.
    fn read<K: DeserializeOwned>(&self) -> Result<K, Self::Error>;
}

impl Object {
    /// Kind, namespace and name; equal references mean the same object.
    pub fn reference(&self) -> ObjectRef {
        let metadata = self.metadata();
        ObjectRef {
            kind: self.kind(),
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone().unwrap_or_default(),
        }
    }
}
