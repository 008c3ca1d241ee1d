//! ExternalWorkload: a machine outside the cluster that is part of the mesh.

use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::field::{FieldPath, Invalid};

/// API group of ExternalWorkload.
pub const GROUP: &str = "workload.linkerd.io";
/// Name of the port on which the workload's proxy accepts meshed connections.
pub const PROXY_PORT_NAME: &str = "linkerd-proxy";
/// The most addresses that a workload may have: one of each family.
const MAX_IPS: usize = 2;

/// Spec of an ExternalWorkload (`workload.linkerd.io/v1beta1`).
#[derive(CustomResource, Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "workload.linkerd.io", version = "v1beta1", kind = "ExternalWorkload", namespaced)]
#[kube(plural = "externalworkloads", status = "ExternalWorkloadStatus", derive = "PartialEq")]
#[serde(rename_all = "camelCase")]
pub struct ExternalWorkloadSpec {
    /// The identity of the workload. In objects of v1alpha1 its name is `meshTls`.
    #[serde(rename = "meshTLS", alias = "meshTls")]
    pub mesh_tls: MeshTls,
    /// Ports of the workload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<WorkloadPort>>,
    /// Its addresses, at most one of each family.
    #[serde(default, rename = "workloadIPs", skip_serializing_if = "Option::is_none")]
    pub workload_ips: Option<Vec<WorkloadIp>>,
}

/// The identity of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MeshTls {
    /// Its identity, such as `spiffe://root.linkerd.cluster.local/vm`.
    pub identity: String,
    /// The TLS server name that clients send.
    pub server_name: String,
}

/// A port of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct WorkloadPort {
    /// Name, unique in the workload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Number.
    pub port: i32,
    /// `TCP` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}

/// An address of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct WorkloadIp {
    /// An IPv4 or IPv6 address, without a port.
    pub ip: String,
}

/// The state of a workload.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct ExternalWorkloadStatus {
    /// `Ready` is true while it serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::condition::schema")]
    pub conditions: Option<Vec<Condition>>,
}

impl ExternalWorkload {
    /// Whether its condition `Ready` is true.
    pub fn is_ready(&self) -> bool {
        let conditions = self.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }

    /// Its valid addresses.
    pub fn ips(&self) -> impl Iterator<Item = IpAddr> {
        self.spec.workload_ips.iter().flatten().filter_map(|entry| entry.ip.parse().ok())
    }
}

/// The problems of an ExternalWorkload.
pub fn check(workload: &ExternalWorkload) -> Vec<Invalid> {
    let spec = &workload.spec;
    let mut found = Vec::new();
    for (field, value) in [("identity", &spec.mesh_tls.identity), ("serverName", &spec.mesh_tls.server_name)] {
        if value.is_empty() {
            found.push(FieldPath::of("spec.meshTLS").key(field).invalid("empty, expected a name"));
        }
    }
    for (index, port) in spec.ports.iter().flatten().enumerate() {
        if !(1..=65535).contains(&port.port) {
            let at = FieldPath::of("spec.ports").index(index).key("port");
            found.push(at.invalid(format!("bad port {}, expected 1-65535", port.port)));
        }
    }
    for (index, entry) in spec.workload_ips.iter().flatten().enumerate() {
        let at = FieldPath::of("spec.workloadIPs").index(index);
        if index >= MAX_IPS {
            found.push(at.invalid("too many addresses, expected at most two"));
        } else if entry.ip.parse::<IpAddr>().is_err() {
            found.push(at.key("ip").invalid(format!("bad address {:?}, expected an IP address", entry.ip)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workload(spec: serde_json::Value) -> ExternalWorkload {
        serde_json::from_value(json!({"apiVersion": "workload.linkerd.io/v1beta1", "kind": "ExternalWorkload",
            "metadata": {"name": "vm", "namespace": "shop"}, "spec": spec}))
        .unwrap()
    }

    #[test]
    fn checks() {
        let tls = json!({"identity": "spiffe://root/vm", "serverName": "vm.cluster.local"});
        let fields = |spec| check(&workload(spec)).iter().map(|invalid| invalid.field.to_string()).collect::<Vec<_>>();
        let good = json!({"meshTLS": tls, "ports": [{"port": 80}], "workloadIPs": [{"ip": "192.0.2.1"}]});
        assert_eq!(fields(good.clone()), [""; 0]);
        assert_eq!(workload(good).ips().count(), 1);
        assert_eq!(fields(json!({"meshTls": tls, "workloadIPs": [{"ip": "192.0.2.1"}]})), [""; 0], "v1alpha1");
        assert_eq!(fields(json!({"meshTLS": tls, "ports": [{"port": 0}]})), ["spec.ports[0].port"]);
        assert_eq!(fields(json!({"meshTLS": tls, "workloadIPs": [{"ip": "vm"}]})), ["spec.workloadIPs[0].ip"]);
        assert_eq!(fields(json!({"meshTLS": {"identity": "", "serverName": "x"}})), ["spec.meshTLS.identity"]);
    }

    #[test]
    fn readiness_is_a_condition() {
        let mut vm = workload(json!({"meshTLS": {"identity": "i", "serverName": "s"}}));
        assert!(!vm.is_ready());
        for (status, expected) in [("True", true), ("False", false)] {
            vm.status = serde_json::from_value(json!({"conditions": [{"type": "Ready", "status": status,
                "reason": "", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}))
            .unwrap();
            assert_eq!(vm.is_ready(), expected);
        }
        vm.status = serde_json::from_value(json!({"conditions": [{"type": "Ready", "status": "True",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]}))
        .unwrap();
        assert!(vm.is_ready(), "without a reason and a message");
    }
}
