//! What the index keeps of each object: the parts that decisions need, parsed once.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::{
    api::{
        core::v1::{Container, Pod, Probe, Service},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
    jiff::Timestamp,
};
use weft_k8s_api::{
    labels,
    policy::{self, DefaultPolicy, Server, ServerSpec},
    ports::{PortList, PortSet},
};

use super::Subject;

/// Namespace and name of an object whose kind is known.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Namespace.
    pub(crate) namespace: String,
    /// Name.
    pub(crate) name: String,
}

impl Key {
    /// The key of an object.
    pub(crate) fn of(metadata: &ObjectMeta) -> Self {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        Self { namespace: part(&metadata.namespace), name: part(&metadata.name) }
    }

    /// A key from its parts.
    pub(crate) fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A Service.
#[derive(Debug, PartialEq)]
pub(crate) struct ServiceRecord {
    pub(crate) key: Key,
    pub(crate) cluster_ips: Vec<IpAddr>,
    pub(crate) ports: Vec<ServicePort>,
    pub(crate) external: bool,
    /// Whether only endpoints on the client's node serve it.
    pub(crate) local: bool,
    opaque_ports: Option<PortList>,
}

/// A port of a Service.
#[derive(Debug, PartialEq)]
pub(crate) struct ServicePort {
    pub(crate) port: u16,
    pub(crate) name: String,
    pub(crate) app_protocol: Option<String>,
}

/// An EndpointSlice.
#[derive(Debug, PartialEq)]
pub(super) struct SliceRecord {
    pub(super) service: Key,
    /// Ports by name; an unnamed one has the empty name.
    pub(super) ports: HashMap<String, u16>,
    pub(super) endpoints: Vec<SliceEndpoint>,
}

/// A ready endpoint of a slice.
#[derive(Debug, PartialEq)]
pub(super) struct SliceEndpoint {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) hostname: Option<String>,
    pub(super) node: Option<String>,
    pub(super) zone: Option<String>,
    pub(super) for_zones: Vec<String>,
    pub(super) target: Target,
}

/// What an endpoint stands for.
#[derive(Debug, PartialEq)]
pub(super) enum Target {
    Pod(Key),
    External(Key),
    /// An address without an object behind it.
    Address,
    /// Kinds that are not known here; such endpoints are left out.
    Other(String),
}

/// A Pod.
#[derive(Debug, PartialEq)]
pub(crate) struct PodRecord {
    pub(crate) key: Key,
    pub(crate) ips: Vec<IpAddr>,
    /// Addresses on the node that lead to ports of the pod.
    pub(crate) host_ports: Vec<(SocketAddr, u16)>,
    pub(crate) host_network: bool,
    pub(crate) terminated: bool,
    pub(crate) node: Option<String>,
    pub(crate) service_account: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) owner: Option<(String, String)>,
    pub(crate) skip_inbound: PortSet,
    pub(crate) require_identity: PortSet,
    pub(crate) default_policy: DefaultPolicyAnnotation,
    pub(crate) proxy: Option<ProxyPorts>,
    opaque_ports: Option<PortList>,
    named_ports: HashMap<String, Vec<u16>>,
    probes: Vec<(IntOrString, String)>,
}

/// What a workload's annotation says about ports that no Server selects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DefaultPolicyAnnotation {
    /// Nothing.
    Inherit,
    /// A policy.
    Policy(DefaultPolicy),
    /// Something that cannot be read, which denies.
    Unreadable,
}

/// Ports of a pod's proxy, read from the environment of its container as Linkerd does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProxyPorts {
    pub(crate) inbound: u16,
    pub(crate) admin: u16,
    pub(crate) control: u16,
}

/// A Server.
#[derive(Debug, PartialEq)]
pub(super) struct ServerRecord {
    pub(super) key: Key,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) created: Option<Timestamp>,
    pub(super) spec: ServerSpec,
}

impl ServiceRecord {
    pub(super) fn new(service: &Service) -> Self {
        let key = Key::of(&service.metadata);
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
            opaque_ports: optional(&service.metadata, labels::OPAQUE_PORTS),
            key,
        }
    }

    /// The port with this number.
    pub(crate) fn port(&self, number: u16) -> Option<&ServicePort> {
        self.ports.iter().find(|port| port.port == number)
    }

    /// Whether the annotation, or else the default list, makes the port opaque.
    pub(crate) fn is_opaque(&self, number: u16, default: &PortSet) -> bool {
        let name = self.port(number).map(|port| port.name.as_str());
        self.opaque_ports.as_ref().map_or_else(|| default.contains(number), |list| list.covers(number, name))
    }
}

impl SliceRecord {
    /// `None` for slices of DNS names and slices that belong to no Service.
    pub(super) fn new(slice: &EndpointSlice) -> Option<Self> {
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
        let endpoints = slice.endpoints.iter().flatten().filter(|endpoint| {
            // Kubernetes: an absent condition counts as ready.
            endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false)
        });
        let endpoints = endpoints.map(|endpoint| SliceEndpoint {
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
            target: match &endpoint.target_ref {
                None => Target::Address,
                Some(target) if target.kind.as_deref() == Some("Pod") => {
                    Target::Pod(Key::new(namespace.clone(), target.name.clone().unwrap_or_default()))
                }
                Some(target) if target.kind.as_deref() == Some("ExternalWorkload") => {
                    Target::External(Key::new(namespace.clone(), target.name.clone().unwrap_or_default()))
                }
                Some(target) => Target::Other(target.kind.clone().unwrap_or_default()),
            },
        });
        Some(Self { service, ports, endpoints: endpoints.collect() })
    }

    /// Pods that the slice refers to.
    pub(super) fn pods(&self) -> impl Iterator<Item = &Key> {
        self.endpoints.iter().filter_map(|endpoint| match &endpoint.target {
            Target::Pod(pod) => Some(pod),
            Target::External(_) | Target::Address | Target::Other(_) => None,
        })
    }

    /// ExternalWorkloads that the slice refers to.
    pub(super) fn workloads(&self) -> impl Iterator<Item = &Key> {
        self.endpoints.iter().filter_map(|endpoint| match &endpoint.target {
            Target::External(workload) => Some(workload),
            Target::Pod(_) | Target::Address | Target::Other(_) => None,
        })
    }
}

impl PodRecord {
    pub(super) fn new(pod: &Pod) -> Self {
        let spec = pod.spec.clone().unwrap_or_default();
        let status = pod.status.clone().unwrap_or_default();
        let mut ips: Vec<IpAddr> = Vec::new();
        let listed = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str()).chain(status.pod_ip.as_deref());
        for ip in listed.filter_map(|ip| ip.parse().ok()) {
            if !ips.contains(&ip) {
                ips.push(ip);
            }
        }
        let serving = || {
            spec.init_containers
                .iter()
                .flatten()
                .filter(|c| c.restart_policy.as_deref() == Some("Always"))
                .chain(&spec.containers)
        };
        let host_ip: Option<IpAddr> = status.host_ip.as_deref().and_then(|ip| ip.parse().ok());
        let mut named_ports: HashMap<String, Vec<u16>> = HashMap::new();
        let mut host_ports = Vec::new();
        for port in serving().flat_map(|container| container.ports.iter().flatten()) {
            let Ok(number) = u16::try_from(port.container_port) else { continue };
            if let Some(name) = &port.name {
                named_ports.entry(name.clone()).or_default().push(number);
            }
            let host_port = port.host_port.and_then(|port| u16::try_from(port).ok());
            if let (Some(ip), Some(host_port)) = (host_ip, host_port) {
                host_ports.push((SocketAddr::new(ip, host_port), number));
            }
        }
        Self {
            key: Key::of(&pod.metadata),
            ips,
            host_ports,
            host_network: spec.host_network == Some(true),
            terminated: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            node: spec.node_name.clone(),
            service_account: spec
                .service_account_name
                .clone()
                .filter(|name| !name.is_empty())
                .unwrap_or_else(|| "default".to_owned()),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            owner: single_owner(&pod.metadata),
            skip_inbound: optional(&pod.metadata, labels::SKIP_INBOUND_PORTS).unwrap_or_default(),
            require_identity: optional(&pod.metadata, labels::REQUIRE_IDENTITY_PORTS).unwrap_or_default(),
            default_policy: DefaultPolicyAnnotation::read(&pod.metadata),
            proxy: serving().find(|container| container.name == labels::PROXY_CONTAINER).and_then(proxy_ports),
            opaque_ports: optional(&pod.metadata, labels::OPAQUE_PORTS),
            named_ports,
            probes: serving().flat_map(probes).collect(),
        }
    }

    /// Whether the pod is in a mesh.
    pub(crate) fn control_namespace(&self) -> Option<&str> {
        self.labels.get(labels::CONTROL_PLANE_NS).map(String::as_str).filter(|namespace| !namespace.is_empty())
    }

    /// Whether the annotation, or else the default list, makes the port opaque.
    pub(crate) fn is_opaque(&self, port: u16, default: &PortSet) -> bool {
        match &self.opaque_ports {
            Some(list) => list.resolve(|name| self.named_ports.get(name).cloned().unwrap_or_default()).contains(port),
            None => default.contains(port),
        }
    }

    /// Whether a number or a container port's name means the port.
    pub(crate) fn port_is(&self, wanted: &IntOrString, port: u16) -> bool {
        match wanted {
            IntOrString::Int(number) => *number == i32::from(port),
            IntOrString::String(name) => self.named_ports.get(name).is_some_and(|ports| ports.contains(&port)),
        }
    }

    /// Paths of HTTP probes on a port, sorted.
    pub(crate) fn probe_paths(&self, port: u16) -> Vec<String> {
        let mut paths: Vec<_> =
            self.probes.iter().filter(|(wanted, _)| self.port_is(wanted, port)).map(|(_, path)| path.clone()).collect();
        paths.sort_unstable();
        paths.dedup();
        paths
    }
}

impl DefaultPolicyAnnotation {
    /// Reads `config.linkerd.io/default-inbound-policy`.
    pub(super) fn read(metadata: &ObjectMeta) -> Self {
        match annotation(metadata, labels::DEFAULT_INBOUND_POLICY).map(str::parse) {
            None => Self::Inherit,
            Some(Ok(policy)) => Self::Policy(policy),
            Some(Err(_)) => Self::Unreadable,
        }
    }
}

impl ServerRecord {
    pub(super) fn new(server: &Server) -> Self {
        Self {
            key: Key::of(&server.metadata),
            labels: server.metadata.labels.clone().unwrap_or_default(),
            created: created(&server.metadata),
            spec: server.spec.clone(),
        }
    }

    /// Whether the Server selects a workload, whatever the port.
    pub(super) fn selects(&self, subject: Subject<'_>) -> bool {
        let (selector, labels) = match subject {
            Subject::Pod(pod) => (&self.spec.pod_selector, &pod.labels),
            Subject::External(workload) => (&self.spec.external_workload_selector, &workload.labels),
        };
        selector.as_ref().is_some_and(|selector| policy::selects(selector, Some(labels)))
    }
}

/// When an object was created; manifests in files do not say.
pub(super) fn created(metadata: &ObjectMeta) -> Option<Timestamp> {
    metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// Kind and name of the owner, where there is one and no other.
pub(super) fn single_owner(metadata: &ObjectMeta) -> Option<(String, String)> {
    match metadata.owner_references.as_deref().unwrap_or_default() {
        [owner] => Some((owner.kind.clone(), owner.name.clone())),
        _ => None,
    }
}

fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// An annotation that only optimises: an unreadable one is logged and counts as absent.
pub(super) fn optional<T: std::str::FromStr<Err: std::fmt::Display>>(
    metadata: &ObjectMeta,
    name: &'static str,
) -> Option<T> {
    let value = annotation(metadata, name)?;
    value.parse().inspect_err(|error| tracing::error!(object = %Key::of(metadata), annotation = name, %error, "unreadable annotation is ignored")).ok()
}

/// The ports, or nothing where one of the three addresses is missing: such an endpoint is not announced (as in Linkerd).
fn proxy_ports(container: &Container) -> Option<ProxyPorts> {
    let port = |name: &str| {
        let var = container.env.iter().flatten().find(|var| var.name == name)?;
        var.value.as_deref()?.rsplit(':').next()?.parse().ok()
    };
    Some(ProxyPorts {
        inbound: port("LINKERD2_PROXY_INBOUND_LISTEN_ADDR")?,
        admin: port("LINKERD2_PROXY_ADMIN_LISTEN_ADDR")?,
        control: port("LINKERD2_PROXY_CONTROL_LISTEN_ADDR")?,
    })
}

fn probes(container: &Container) -> impl Iterator<Item = (IntOrString, String)> {
    let all: [&Option<Probe>; 3] = [&container.liveness_probe, &container.readiness_probe, &container.startup_probe];
    let http = all.into_iter().flatten().filter_map(|probe| probe.http_get.as_ref());
    http.map(|get| (get.port.clone(), request_path(get.path.as_deref().unwrap_or_default())))
        .collect::<Vec<_>>()
        .into_iter()
}

/// The path of the request that the kubelet sends: it reads the probe's path as a URL, so that it may have a query.
fn request_path(probe: &str) -> String {
    let path = probe.split(['?', '#']).next().unwrap_or_default();
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}
