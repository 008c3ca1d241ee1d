//! Pods: addresses, ports, and settings of their proxies.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::{
    api::core::v1::{Container, ContainerPort, HTTPGetAction, Pod, Probe},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use weft_k8s_api::{
    inject, labels,
    ports::{PortList, PortSet},
};

use super::{DefaultPolicyAnnotation, Key, Owner, opaque_ports, optional, require_identity, single_owner};

/// A Pod.
#[derive(Debug, PartialEq)]
pub(crate) struct PodRecord {
    pub key: Key,
    pub ips: Vec<IpAddr>,
    pub host_ports: Vec<HostPort>,
    pub host_network: bool,
    pub lifecycle: Lifecycle,
    pub node: Option<String>,
    pub service_account: String,
    pub labels: BTreeMap<String, String>,
    pub owner: Option<Owner>,
    pub skip_inbound: PortSet,
    pub require_identity: PortSet,
    pub default_policy: DefaultPolicyAnnotation,
    pub proxy: Option<ProxyListeners>,
    /// Parts that cannot be read.
    pub problems: Vec<String>,
    opaque_ports: Option<PortList>,
    named_ports: HashMap<String, Vec<u16>>,
    probes: Vec<HttpProbe>,
}

/// An address on the node that leads to a port of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub addr: SocketAddr,
    /// The port in the pod.
    pub port: u16,
}

/// Whether a pod still owns its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    /// It does. A pending pod counts, since its proxy may already run.
    Live,
    /// It was deleted and ends within its grace period, unless another pod already has its address.
    Terminating,
    /// Its containers have ended.
    Ended,
}

/// An HTTP probe of the kubelet.
#[derive(Clone, Debug, PartialEq)]
struct HttpProbe {
    port: IntOrString,
    path: String,
}

/// Where a pod's proxy listens, read from the environment of its container as Linkerd does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProxyListeners {
    /// Whether the inbound port accepts IPv6. It does not in a pod that was injected while `disableIPv6` was true.
    pub ipv6: bool,
    pub inbound: u16,
    pub admin: u16,
    pub control: u16,
}

impl PodRecord {
    /// `allowed_skips` are the inbound ports that an annotation may have bypass the proxy; `None` allows any.
    pub(crate) fn new(pod: &Pod, allowed_skips: Option<&PortSet>) -> Self {
        let spec = pod.spec.clone().unwrap_or_default();
        let status = pod.status.clone().unwrap_or_default();
        let listed = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
        let ips = addresses(listed.chain(status.pod_ip.as_deref()));
        let serving = || {
            spec.init_containers
                .iter()
                .flatten()
                .filter(|container| inject::is_native_sidecar(container))
                .chain(&spec.containers)
        };
        let node_ips: Vec<IpAddr> =
            addresses(status.host_ips.iter().flatten().map(|ip| ip.ip.as_str()).chain(status.host_ip.as_deref()));
        let mut named_ports: HashMap<String, Vec<u16>> = HashMap::new();
        let mut host_ports = Vec::new();
        for port in serving().flat_map(|container| container.ports.iter().flatten()) {
            // The name of a UDP port is no name of the TCP port with its number
            // (`linkerd2:policy-controller/k8s/index`).
            let Some(number) = u16::try_from(port.container_port).ok().filter(|_| is_tcp(port)) else { continue };
            if let Some(name) = &port.name {
                named_ports.entry(name.clone()).or_default().push(number);
            }
            if let Some(host_port) = port.host_port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0)
            {
                let to = |ip: &IpAddr| HostPort { addr: SocketAddr::new(*ip, host_port), port: number };
                host_ports.extend(node_ips.iter().map(to));
            }
        }
        let mut problems = Vec::new();
        let lifecycle = match status.phase.as_deref() {
            Some("Succeeded" | "Failed") => Lifecycle::Ended,
            _ if pod.metadata.deletion_timestamp.is_some() => Lifecycle::Terminating,
            _ => Lifecycle::Live,
        };
        let container = serving().find(|container| container.name == labels::PROXY_CONTAINER);
        let proxy = container.and_then(proxy_listeners);
        let namespace = pod.metadata.labels.as_ref().and_then(|all| all.get(labels::CONTROL_PLANE_NS));
        let is_meshed = namespace.is_some_and(|namespace| !namespace.is_empty());
        // A pod without the container is fine: the node agent has the label too.
        if container.is_some() && proxy.is_none() && is_meshed {
            problems.push(format!(
                "pod is labelled as meshed, but the environment of its container {} names no inbound, admin and \
                 control addresses; it is not announced",
                labels::PROXY_CONTAINER
            ));
        }
        Self {
            key: Key::of(&pod.metadata),
            ips,
            host_ports,
            host_network: spec.host_network == Some(true),
            lifecycle,
            node: spec.node_name.clone(),
            service_account: spec
                .service_account_name
                .clone()
                .filter(|name| !name.is_empty())
                .unwrap_or_else(|| "default".to_owned()),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            owner: single_owner(&pod.metadata),
            // Without a proxy there is nothing to bypass.
            skip_inbound: skip_inbound(&pod.metadata, allowed_skips.filter(|_| is_meshed), &mut problems),
            require_identity: require_identity(&pod.metadata, &mut problems),
            default_policy: DefaultPolicyAnnotation::read(&pod.metadata, &mut problems),
            proxy,
            opaque_ports: opaque_ports(&pod.metadata, &mut problems),
            problems,
            named_ports,
            probes: serving().flat_map(probes).collect(),
        }
    }

    /// Namespace of the control plane that meshes the pod; `None` if it is not meshed.
    pub(crate) fn control_namespace(&self) -> Option<&str> {
        self.labels.get(labels::CONTROL_PLANE_NS).map(String::as_str).filter(|namespace| !namespace.is_empty())
    }

    /// Whether a connection to the port by IPv6 is accepted: by the application, or by a proxy that listens for it.
    pub(crate) fn accepts_ipv6(&self, port: u16) -> bool {
        let redirected = self.control_namespace().is_some() && !self.skip_inbound.contains(port);
        !redirected || self.proxy.is_some_and(|proxy| proxy.ipv6)
    }

    /// Whether the annotation, or else the default list, makes the port opaque.
    pub(crate) fn is_opaque(&self, port: u16, default: &PortSet) -> bool {
        match &self.opaque_ports {
            Some(list) => list.resolve(|name| self.named_ports.get(name).cloned().unwrap_or_default()).contains(port),
            None => default.contains(port),
        }
    }

    /// Whether a number or the name of a container port denotes the port.
    pub(crate) fn port_is(&self, wanted: &IntOrString, port: u16) -> bool {
        match wanted {
            IntOrString::Int(number) => *number == i32::from(port),
            IntOrString::String(name) => self.named_ports.get(name).is_some_and(|ports| ports.contains(&port)),
        }
    }

    /// Paths of HTTP probes on a port, sorted.
    pub(crate) fn probe_paths(&self, port: u16) -> Vec<String> {
        let of_port = self.probes.iter().filter(|probe| self.port_is(&probe.port, port));
        let mut paths: Vec<_> = of_port.map(|probe| probe.path.clone()).collect();
        paths.sort_unstable();
        paths.dedup();
        paths
    }
}

/// The inbound ports that bypass the proxy by the pod's annotation. A list that names more than is allowed has no
/// effect, as in the node's agent: the pod goes on receiving through its proxy.
fn skip_inbound(metadata: &ObjectMeta, allowed: Option<&PortSet>, problems: &mut Vec<String>) -> PortSet {
    let own: PortSet = optional(metadata, labels::SKIP_INBOUND_PORTS, problems).unwrap_or_default();
    match allowed.and_then(|allowed| inject::forbidden_inbound_ports(&own, allowed)) {
        Some(forbidden) => {
            problems.push(format!("{forbidden}; until then it has no effect"));
            PortSet::default()
        }
        None => own,
    }
}

/// The listeners, or `None` if one of the three addresses is missing: such an endpoint is not announced (as in
/// Linkerd).
fn proxy_listeners(container: &Container) -> Option<ProxyListeners> {
    let address = |name: &str| inject::variable(container, name);
    let port = |address: &str| address.rsplit(':').next()?.parse().ok();
    let inbound = address("LINKERD2_PROXY_INBOUND_LISTEN_ADDR")?;
    Some(ProxyListeners {
        ipv6: inbound.starts_with('['),
        inbound: port(inbound)?,
        admin: port(address("LINKERD2_PROXY_ADMIN_LISTEN_ADDR")?)?,
        control: port(address("LINKERD2_PROXY_CONTROL_LISTEN_ADDR")?)?,
    })
}

fn is_tcp(port: &ContainerPort) -> bool {
    port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP")
}

fn probes(container: &Container) -> Vec<HttpProbe> {
    let all: [&Option<Probe>; 3] = [&container.liveness_probe, &container.readiness_probe, &container.startup_probe];
    let http = all.into_iter().flatten().filter_map(|probe| probe.http_get.as_ref());
    let probe = |get: &HTTPGetAction| HttpProbe {
        port: get.port.clone(),
        path: request_path(get.path.as_deref().unwrap_or_default()),
    };
    http.map(probe).collect()
}

/// The path of the request that the kubelet sends: it parses the probe's path as a URL, which may have a
/// query.
fn request_path(probe: &str) -> String {
    let path = probe.split(['?', '#']).next().unwrap_or_default();
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

/// Addresses that can be parsed, in order and without duplicates.
fn addresses<'a>(listed: impl Iterator<Item = &'a str>) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for ip in listed.filter_map(|ip| ip.parse().ok()) {
        if !found.contains(&ip) {
            found.push(ip);
        }
    }
    found
}
