//! The endpoints that a Service has among ExternalWorkloads. Pure functions.

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::{
    api::{
        core::v1::{ObjectReference, Service, ServicePort},
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort},
    },
    apimachinery::pkg::util::intstr::IntOrString,
};
use weft_k8s_api::{labels, names, workload::ExternalWorkload};

/// Protocol of ports without one.
const TCP: &str = "TCP";

/// Endpoints that may share a slice: one address family and equal ports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    /// `IPv4` or `IPv6`.
    pub(super) family: String,
    /// Name, number and protocol of every port, sorted.
    pub(super) ports: Vec<(String, i32, String)>,
}

impl Group {
    /// The group of an existing slice.
    pub(super) fn of(family: &str, ports: &[EndpointPort]) -> Self {
        let port = |port: &EndpointPort| {
            let protocol = port.protocol.clone().unwrap_or_else(|| TCP.to_owned());
            (port.name.clone().unwrap_or_default(), port.port.unwrap_or_default(), protocol)
        };
        let mut ports: Vec<_> = ports.iter().map(port).collect();
        ports.sort();
        Self { family: family.to_owned(), ports }
    }

    /// The ports in the form of a slice.
    pub(super) fn endpoint_ports(&self, service: &Service) -> Vec<EndpointPort> {
        let declared = || service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
        let app_protocol = |name: &str| {
            let port = declared().find(|port| port.name.as_deref().unwrap_or_default() == name)?;
            port.app_protocol.clone()
        };
        let port = |(name, number, protocol): &(String, i32, String)| EndpointPort {
            app_protocol: app_protocol(name),
            name: Some(name.clone()),
            port: Some(*number),
            protocol: Some(protocol.clone()),
        };
        self.ports.iter().map(port).collect()
    }
}

/// The endpoints that a Service should have, from the workloads that it selects; by address in each group.
pub(super) fn wanted<'a>(
    service: &Service,
    workloads: impl Iterator<Item = &'a ExternalWorkload>,
) -> BTreeMap<Group, BTreeMap<String, Endpoint>> {
    let mut groups: BTreeMap<Group, BTreeMap<String, Endpoint>> = BTreeMap::new();
    let families = families(service);
    for workload in workloads.filter(|workload| workload.metadata.deletion_timestamp.is_none()) {
        let ports = ports(service, workload);
        if ports.is_empty() {
            continue;
        }
        for ip in workload.ips() {
            let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
            if !families.contains(&family) {
                continue;
            }
            let group = Group { family: family.to_owned(), ports: ports.clone() };
            groups.entry(group).or_default().insert(ip.to_string(), endpoint(service, workload, ip));
        }
    }
    groups
}

/// Address families of a Service; a headless one without families has both.
fn families(service: &Service) -> Vec<&'static str> {
    let spec = service.spec.as_ref();
    let named = spec.and_then(|spec| spec.ip_families.as_ref()).filter(|families| !families.is_empty());
    match named {
        Some(families) => {
            ["IPv4", "IPv6"].into_iter().filter(|family| families.iter().any(|named| named == family)).collect()
        }
        None if is_headless(service) => vec!["IPv4", "IPv6"],
        None => vec!["IPv4"],
    }
}

/// Whether a Service has no cluster address.
pub(super) fn is_headless(service: &Service) -> bool {
    service.spec.as_ref().is_some_and(|spec| spec.cluster_ip.as_deref() == Some("None"))
}

/// The Service's ports, resolved for the workload; a port that the workload does not list is left out.
fn ports(service: &Service, workload: &ExternalWorkload) -> Vec<(String, i32, String)> {
    let listed = || workload.spec.ports.iter().flatten();
    let of = |protocol: &Option<String>| protocol.clone().unwrap_or_else(|| TCP.to_owned());
    let resolve = |port: &ServicePort| {
        let protocol = of(&port.protocol);
        let mut same = listed().filter(|candidate| of(&candidate.protocol) == protocol);
        let found = match &port.target_port {
            Some(IntOrString::String(name)) if !name.is_empty() => {
                same.find(|candidate| candidate.name.as_ref() == Some(name))?.port
            }
            Some(IntOrString::Int(number)) if *number != 0 => same.find(|candidate| candidate.port == *number)?.port,
            _ => same.find(|candidate| candidate.port == port.port)?.port,
        };
        Some((port.name.clone().unwrap_or_default(), found, protocol))
    };
    let declared = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let mut ports: Vec<_> = declared.filter_map(resolve).collect();
    ports.sort();
    ports
}

fn endpoint(service: &Service, workload: &ExternalWorkload, ip: IpAddr) -> Endpoint {
    let metadata = &workload.metadata;
    let ready = workload.is_ready();
    Endpoint {
        addresses: vec![ip.to_string()],
        conditions: Some(EndpointConditions { ready: Some(ready), serving: Some(ready), terminating: Some(false) }),
        // The API server refuses a whole slice for a hostname that is not a DNS label.
        hostname: metadata.name.clone().filter(|name| is_headless(service) && names::is_label(name)),
        zone: metadata.labels.as_ref().and_then(|all| all.get(labels::ZONE)).cloned(),
        target_ref: Some(ObjectReference {
            kind: Some("ExternalWorkload".to_owned()),
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
            uid: metadata.uid.clone(),
            ..ObjectReference::default()
        }),
        ..Endpoint::default()
    }
}
