//! TLSRoute and TCPRoute of the Gateway API: routes of connections.

use kube::CustomResource;
use serde::{Deserialize, Serialize};

use super::{BackendReference, HostMatch, ParentReference, RouteStatus, read_all};
use crate::field::Invalid;

/// Spec of a TLSRoute (`gateway.networking.k8s.io/v1alpha2`).
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[kube(group = "gateway.networking.k8s.io", version = "v1alpha2", kind = "TLSRoute", root = "TlsRoute")]
#[kube(plural = "tlsroutes", namespaced, status = "RouteStatus", derive = "PartialEq", schema = "disabled")]
#[serde(rename_all = "camelCase")]
pub struct TlsRouteSpec {
    /// The parents: Services or EgressNetworks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_refs: Option<Vec<ParentReference>>,
    /// Server names that clients ask for; absent means every name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostnames: Option<Vec<String>>,
    /// The rules, of which Linkerd and Weft support exactly one.
    #[serde(default)]
    pub rules: Vec<OpaqueRule>,
}

/// Spec of a TCPRoute (`gateway.networking.k8s.io/v1alpha2`).
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[kube(group = "gateway.networking.k8s.io", version = "v1alpha2", kind = "TCPRoute", root = "TcpRoute")]
#[kube(plural = "tcproutes", namespaced, status = "RouteStatus", derive = "PartialEq", schema = "disabled")]
#[serde(rename_all = "camelCase")]
pub struct TcpRouteSpec {
    /// The parents: Services or EgressNetworks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_refs: Option<Vec<ParentReference>>,
    /// The rules, of which Linkerd and Weft support exactly one.
    #[serde(default)]
    pub rules: Vec<OpaqueRule>,
}

/// A rule about connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OpaqueRule {
    /// Where the connections go; absent or empty means the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_refs: Option<Vec<BackendReference>>,
}

impl TlsRouteSpec {
    /// Server names; none means every name.
    ///
    /// # Errors
    /// Lists every host that is not a DNS name; the paths begin at the spec.
    pub fn read_hostnames(&self) -> Result<Vec<HostMatch>, Vec<Invalid>> {
        read_all("hostnames", self.hostnames.as_deref().unwrap_or_default(), |name| HostMatch::read(name))
    }
}
