//! Server: a port of selected workloads, its protocol, and its policy.

use k8s_openapi::apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString};
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{DefaultPolicy, DefaultPolicyError};

/// Spec of a Server (`policy.linkerd.io/v1beta3`).
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1beta3", kind = "Server", shortname = "srv", namespaced)]
#[kube(derive = "PartialEq")]
#[serde(rename_all = "camelCase")]
pub struct ServerSpec {
    /// Selects pods; exactly one of the two selectors is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::selector::schema")]
    pub pod_selector: Option<LabelSelector>,
    /// Selects ExternalWorkloads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::selector::schema")]
    pub external_workload_selector: Option<LabelSelector>,
    /// The port: a number, or the name of a container port.
    #[schemars(schema_with = "int_or_string")]
    pub port: IntOrString,
    /// The protocol of clients: unknown, HTTP/1, HTTP/2, gRPC, opaque or TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_protocol: Option<String>,
    /// The policy that applies in addition to AuthorizationPolicies: all-unauthenticated, all-authenticated,
    /// cluster-unauthenticated, cluster-authenticated, deny or audit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_policy: Option<String>,
}

/// The port in what stands for a Server whose own cannot be read. No readable Server has it.
pub const EVERY_PORT: IntOrString = IntOrString::Int(0);

/// The protocol of clients on a Server's port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ProxyProtocol {
    /// Detected by the proxy.
    #[default]
    Unknown,
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
    /// gRPC.
    Grpc,
    /// TCP without protocol detection.
    Opaque,
    /// TLS that the application terminates.
    Tls,
}

impl ServerSpec {
    /// The protocol, or `None` where it is not one of Linkerd's names.
    pub fn protocol(&self) -> Option<ProxyProtocol> {
        Some(match self.proxy_protocol.as_deref() {
            None | Some("unknown") => ProxyProtocol::Unknown,
            Some("HTTP/1") => ProxyProtocol::Http1,
            Some("HTTP/2") => ProxyProtocol::Http2,
            Some("gRPC") => ProxyProtocol::Grpc,
            Some("opaque") => ProxyProtocol::Opaque,
            Some("TLS") => ProxyProtocol::Tls,
            Some(_) => return None,
        })
    }

    /// The access policy; absent means deny.
    ///
    /// # Errors
    /// When it is not the name of a policy. The caller must then deny.
    pub fn access(&self) -> Result<DefaultPolicy, DefaultPolicyError> {
        self.access_policy.as_deref().map_or(Ok(DefaultPolicy::Deny), str::parse)
    }
}

fn int_or_string(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-int-or-string": true })
}
