//! Whoever a Server may select: pods, and machines outside the cluster.

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

use super::{
    Key,
    records::{DefaultPolicyAnnotation, PodRecord, optional, single_owner},
};

/// An ExternalWorkload.
#[derive(Debug, PartialEq)]
pub(crate) struct WorkloadRecord {
    pub(crate) key: Key,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) owner: Option<(String, String)>,
    pub(crate) identity: String,
    pub(crate) server_name: String,
    /// Port of its proxy.
    pub(crate) inbound_port: u16,
    /// Ports that it serves.
    pub(crate) ports: Vec<u16>,
    require_identity: PortSet,
    default_policy: DefaultPolicyAnnotation,
    opaque_ports: Option<PortList>,
    named_ports: HashMap<String, u16>,
}

/// Whoever a Server may select.
#[derive(Clone, Copy)]
pub(super) enum Subject<'a> {
    Pod(&'a PodRecord),
    External(&'a WorkloadRecord),
}

impl WorkloadRecord {
    pub(super) fn new(external: &ExternalWorkload) -> Self {
        let spec = &external.spec;
        let tcp = spec.ports.iter().flatten().filter(|port| port.protocol.as_deref().is_none_or(|p| p == "TCP"));
        let listed = tcp.filter_map(|port| Some((port.name.clone(), u16::try_from(port.port).ok()?)));
        let (mut ports, mut named_ports) = (Vec::new(), HashMap::new());
        for (name, number) in listed {
            ports.push(number);
            named_ports.extend(name.map(|name| (name, number)));
        }
        Self {
            key: Key::of(&external.metadata),
            ips: external.ips().collect(),
            labels: external.metadata.labels.clone().unwrap_or_default(),
            owner: single_owner(&external.metadata),
            identity: spec.mesh_tls.identity.clone(),
            server_name: spec.mesh_tls.server_name.clone(),
            inbound_port: named_ports.get(workload::PROXY_PORT_NAME).copied().unwrap_or(labels::INBOUND_PORT),
            ports,
            require_identity: optional(&external.metadata, labels::REQUIRE_IDENTITY_PORTS).unwrap_or_default(),
            default_policy: DefaultPolicyAnnotation::read(&external.metadata),
            opaque_ports: optional(&external.metadata, labels::OPAQUE_PORTS),
            named_ports,
        }
    }

    fn port_named(&self, name: &str) -> Vec<u16> {
        self.named_ports.get(name).copied().into_iter().collect()
    }
}

impl<'a> Subject<'a> {
    pub(super) fn namespace(self) -> &'a str {
        match self {
            Self::Pod(pod) => &pod.key.namespace,
            Self::External(workload) => &workload.key.namespace,
        }
    }

    /// Whether a number or a port's name means the port.
    pub(super) fn port_is(self, wanted: &IntOrString, port: u16) -> bool {
        match (self, wanted) {
            (Self::Pod(pod), _) => pod.port_is(wanted, port),
            (Self::External(_), IntOrString::Int(number)) => *number == i32::from(port),
            (Self::External(workload), IntOrString::String(name)) => workload.named_ports.get(name) == Some(&port),
        }
    }

    /// Whether the annotation, or else the default list, makes the port opaque.
    pub(super) fn is_opaque(self, port: u16, default: &PortSet) -> bool {
        match self {
            Self::Pod(pod) => pod.is_opaque(port, default),
            Self::External(workload) => match &workload.opaque_ports {
                Some(list) => list.resolve(|name| workload.port_named(name)).contains(port),
                None => default.contains(port),
            },
        }
    }

    /// Paths of HTTP probes on a port; nobody probes external workloads.
    pub(super) fn probe_paths(self, port: u16) -> Vec<String> {
        match self {
            Self::Pod(pod) => pod.probe_paths(port),
            Self::External(_) => Vec::new(),
        }
    }

    /// What the workload says about ports that no Server selects.
    pub(super) fn default_policy(self) -> DefaultPolicyAnnotation {
        match self {
            Self::Pod(pod) => pod.default_policy,
            Self::External(workload) => workload.default_policy,
        }
    }

    /// Whether only mesh identities may use the port under the default policy.
    pub(super) fn requires_identity(self, port: u16) -> bool {
        match self {
            Self::Pod(pod) => pod.require_identity.contains(port),
            Self::External(workload) => workload.require_identity.contains(port),
        }
    }
}
