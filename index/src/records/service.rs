//! Services, and the EndpointSlices with their endpoints.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use k8s_openapi::{
    api::{
        core::v1::{ObjectReference, Service},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use weft_k8s_api::{
    boolean, labels,
    ports::{PortList, PortSet},
};

use super::{Gateway, Key, mirror, opaque_ports, traffic::Traffic};
use crate::discovery::Discovery;

/// A Service.
#[derive(Debug, PartialEq)]
pub struct ServiceRecord {
    pub key: Key,
    pub cluster_ips: Vec<IpAddr>,
    pub ports: Vec<ServicePort>,
    pub external: bool,
    /// Whether only endpoints on the client's node serve it.
    pub local: bool,
    /// Whether proxies may send it nothing in plaintext.
    pub(crate) require_mtls: bool,
    /// Where its endpoints are.
    pub discovery: Discovery,
    /// Parts that cannot be read.
    pub problems: Vec<String>,
    /// Annotations about traffic.
    pub(crate) traffic: Traffic,
    opaque_ports: Option<PortList>,
}

/// What cannot be read was written to require it.
fn requires_mtls(metadata: &ObjectMeta, problems: &mut Vec<String>) -> bool {
    let Some(text) = metadata.annotations.as_ref().and_then(|all| all.get(labels::REQUIRE_MTLS)) else { return false };
    boolean::parse(text).unwrap_or_else(|| {
        let name = labels::REQUIRE_MTLS;
        problems.push(format!("annotation {name}: bad value {text:?}, expected true or false; mutual TLS is required"));
        true
    })
}

/// A port of a Service.
#[derive(Debug, PartialEq)]
pub struct ServicePort {
    pub port: u16,
    pub name: String,
    pub app_protocol: Option<String>,
}

/// An EndpointSlice.
#[derive(Debug, PartialEq)]
pub(crate) struct SliceRecord {
    pub service: Key,
    /// Ports by name; an unnamed one has the empty name.
    pub ports: HashMap<String, u16>,
    pub endpoints: Vec<SliceEndpoint>,
    /// Pods of endpoints that are not ready. Nobody is sent to them, but clients may still know their addresses.
    pub unready: Vec<Key>,
    /// Whether the endpoints have ports at all: without, they have not even those that the Service does not declare.
    pub has_ports: bool,
    /// Labels of a Service of another cluster.
    pub target_labels: BTreeMap<String, String>,
    /// Parts that cannot be used.
    pub problems: Vec<String>,
}

/// A ready endpoint of a slice.
#[derive(Debug, PartialEq)]
pub(crate) struct SliceEndpoint {
    pub addresses: Vec<IpAddr>,
    pub hostname: Option<String>,
    pub node: Option<String>,
    pub zone: Option<String>,
    pub for_zones: Vec<String>,
    pub target: Target,
}

/// The object that an endpoint refers to.
#[derive(Debug, PartialEq)]
pub(crate) enum Target {
    Pod(Key),
    External(Key),
    /// A bare address, or the gateway of another cluster.
    Address(Option<Arc<Gateway>>),
}

impl ServiceRecord {
    pub fn new(service: &Service) -> Self {
        let mut problems = Vec::new();
        let spec = service.spec.clone().unwrap_or_default();
        let listed = spec.cluster_ips.unwrap_or_default();
        let mut cluster_ips: Vec<IpAddr> =
            listed.iter().chain(&spec.cluster_ip).filter_map(|ip| ip.parse().ok()).collect();
        cluster_ips.sort_unstable();
        cluster_ips.dedup();
        let tcp = spec
            .ports
            .into_iter()
            .flatten()
            .filter(|port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"));
        let ports = tcp.filter_map(|port| {
            let number = u16::try_from(port.port).ok()?;
            Some(ServicePort { port: number, name: port.name.unwrap_or_default(), app_protocol: port.app_protocol })
        });
        Self {
            ports: ports.collect(),
            cluster_ips,
            external: spec.type_.as_deref() == Some("ExternalName"),
            local: spec.internal_traffic_policy.as_deref() == Some("Local"),
            require_mtls: requires_mtls(&service.metadata, &mut problems),
            opaque_ports: opaque_ports(&service.metadata, &mut problems),
            traffic: Traffic::of_service(&service.metadata, &mut problems),
            key: Key::of(&service.metadata),
            discovery: Discovery::new(&service.metadata, &mut problems),
            problems,
        }
    }

    /// The port with this number.
    pub fn port(&self, number: u16) -> Option<&ServicePort> {
        self.ports.iter().find(|port| port.port == number)
    }

    /// Whether the annotation, or else the default list, makes the port opaque.
    pub fn is_opaque(&self, number: u16, default: &PortSet) -> bool {
        let name = self.port(number).map(|port| port.name.as_str());
        self.opaque_ports.as_ref().map_or_else(|| default.contains(number), |list| list.covers(number, name))
    }
}

impl SliceRecord {
    /// `None` for slices of DNS names and slices without a Service.
    pub(crate) fn new(slice: &EndpointSlice) -> Option<Self> {
        let namespace = slice.metadata.namespace.clone().unwrap_or_default();
        let label = slice.metadata.labels.as_ref().and_then(|labels| labels.get(labels::SERVICE_NAME)).cloned();
        let owner = || {
            slice
                .metadata
                .owner_references
                .iter()
                .flatten()
                .find(|owner| owner.kind == "Service")
                .map(|owner| owner.name.clone())
        };
        let service = Key::new(namespace.clone(), label.or_else(owner)?);
        if slice.address_type == "FQDN" {
            return None;
        }
        let ports = slice
            .ports
            .iter()
            .flatten()
            .filter(|port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"));
        let ports = ports
            .filter_map(|port| Some((port.name.clone().unwrap_or_default(), u16::try_from(port.port?).ok()?)))
            .collect();
        let (ready, unready): (Vec<_>, Vec<_>) = slice.endpoints.iter().flatten().partition(|endpoint| {
            // Kubernetes: an absent condition counts as ready.
            endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false)
        });
        let unready = unready.into_iter().filter_map(|it| pod_of(&namespace, it.target_ref.as_ref())).collect();
        let mut problems = Vec::new();
        let gateway = Gateway::new(&slice.metadata).map(Arc::new);
        let endpoints = ready.into_iter().filter_map(|endpoint| {
            let target = match target(&namespace, endpoint.target_ref.as_ref(), gateway.as_ref()) {
                Ok(target) => target,
                Err(problem) => {
                    if !problems.contains(&problem) {
                        problems.push(problem);
                    }
                    return None;
                }
            };
            Some(SliceEndpoint {
                addresses: endpoint.addresses.iter().filter_map(|address| address.parse().ok()).collect(),
                hostname: endpoint.hostname.clone(),
                node: endpoint.node_name.clone(),
                zone: endpoint.zone.clone(),
                for_zones: endpoint
                    .hints
                    .iter()
                    .flat_map(|hints| hints.for_zones.iter().flatten())
                    .map(|zone| zone.name.clone())
                    .collect(),
                target,
            })
        });
        let endpoints = endpoints.collect();
        let has_ports = slice.ports.is_some();
        Some(Self {
            has_ports,
            service,
            ports,
            endpoints,
            unready,
            target_labels: mirror::target_labels(&slice.metadata),
            problems,
        })
    }

    /// Pods that the slice refers to, ready or not.
    pub(crate) fn pods(&self) -> impl Iterator<Item = &Key> {
        let ready = self.endpoints.iter().filter_map(|endpoint| match &endpoint.target {
            Target::Pod(pod) => Some(pod),
            Target::External(_) | Target::Address(_) => None,
        });
        ready.chain(&self.unready)
    }

    /// ExternalWorkloads that the slice refers to.
    pub(crate) fn workloads(&self) -> impl Iterator<Item = &Key> {
        self.endpoints.iter().filter_map(|endpoint| match &endpoint.target {
            Target::External(workload) => Some(workload),
            Target::Pod(_) | Target::Address(_) => None,
        })
    }
}

/// The pod that an endpoint refers to, in the slice's namespace, if it refers to one.
pub(super) fn pod_of(namespace: &str, reference: Option<&ObjectReference>) -> Option<Key> {
    match target(namespace, reference, None) {
        Ok(Target::Pod(pod)) => Some(pod),
        Ok(Target::External(_) | Target::Address(_)) | Err(_) => None,
    }
}

/// The object that an endpoint refers to, in the slice's namespace.
pub(super) fn target(
    namespace: &str,
    reference: Option<&ObjectReference>,
    gateway: Option<&Arc<Gateway>>,
) -> Result<Target, String> {
    let Some(reference) = reference else { return Ok(Target::Address(gateway.cloned())) };
    let key = Key::new(namespace, reference.name.clone().unwrap_or_default());
    match reference.kind.as_deref().unwrap_or_default() {
        "Pod" => Ok(Target::Pod(key)),
        "ExternalWorkload" => Ok(Target::External(key)),
        kind => Err(format!("endpoints of kind {kind:?} are left out, expected Pod or ExternalWorkload")),
    }
}
