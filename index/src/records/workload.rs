//! ExternalWorkloads: machines outside the cluster.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use weft_k8s_api::{
    labels,
    ports::{PortList, PortSet},
    workload::{self, ExternalWorkload},
};

use super::{DefaultPolicyAnnotation, Key, Owner, opaque_ports, require_identity, single_owner};

/// An ExternalWorkload.
#[derive(Debug, PartialEq)]
pub(crate) struct ExternalWorkloadRecord {
    pub key: Key,
    pub ips: Vec<IpAddr>,
    pub labels: BTreeMap<String, String>,
    pub owner: Option<Owner>,
    pub identity: String,
    pub server_name: String,
    /// Port of its proxy.
    pub inbound_port: u16,
    /// Ports of the application.
    pub ports: Vec<u16>,
    pub require_identity: PortSet,
    pub default_policy: DefaultPolicyAnnotation,
    /// Parts that cannot be read.
    pub problems: Vec<String>,
    opaque_ports: Option<PortList>,
    named_ports: HashMap<String, u16>,
}

impl ExternalWorkloadRecord {
    pub(crate) fn new(external: &ExternalWorkload) -> Self {
        let spec = &external.spec;
        let tcp = spec.ports.iter().flatten().filter(|port| port.protocol.as_deref().is_none_or(|p| p == "TCP"));
        let listed = tcp.filter_map(|port| Some((port.name.clone(), u16::try_from(port.port).ok()?)));
        let (mut ports, mut named_ports) = (Vec::new(), HashMap::new());
        for (name, number) in listed {
            ports.push(number);
            named_ports.extend(name.map(|name| (name, number)));
        }
        let mut problems = Vec::new();
        Self {
            key: Key::of(&external.metadata),
            ips: external.ips().collect(),
            labels: external.metadata.labels.clone().unwrap_or_default(),
            owner: single_owner(&external.metadata),
            identity: spec.mesh_tls.identity.clone(),
            server_name: spec.mesh_tls.server_name.clone(),
            inbound_port: named_ports.get(workload::PROXY_PORT_NAME).copied().unwrap_or(labels::INBOUND_PORT),
            ports,
            require_identity: require_identity(&external.metadata, &mut problems),
            default_policy: DefaultPolicyAnnotation::read(&external.metadata, &mut problems),
            opaque_ports: opaque_ports(&external.metadata, &mut problems),
            problems,
            named_ports,
        }
    }

    /// Whether the annotation, or else the default list, makes the port opaque.
    pub(crate) fn is_opaque(&self, port: u16, default: &PortSet) -> bool {
        let named = |name: &str| self.named_ports.get(name).copied().into_iter().collect();
        self.opaque_ports.as_ref().map_or_else(|| default.contains(port), |list| list.resolve(named).contains(port))
    }

    /// Whether a number or the name of a port denotes the port.
    pub(crate) fn port_is(&self, wanted: &IntOrString, port: u16) -> bool {
        match wanted {
            IntOrString::Int(number) => *number == i32::from(port),
            IntOrString::String(name) => self.named_ports.get(name) == Some(&port),
        }
    }
}
