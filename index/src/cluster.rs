//! Settings that never change while the process runs: names, networks, defaults.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_k8s_api::{policy::DefaultPolicy, ports::PortSet};

use super::records::Key;

/// How proxies reach meshed endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportMode {
    /// Connect to the inbound port and send a transport header (Linkerd's chart default since 2.18).
    TransportHeader,
    /// Connect to the application's port, except where it is opaque.
    Transparent,
}

/// Objects that list the endpoints of Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointsFrom {
    /// EndpointSlices.
    Slices,
    /// Endpoints, which have neither zones nor a second family of addresses.
    Endpoints,
}

/// Settings of the mesh.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Namespace of the control plane.
    pub control_namespace: String,
    /// Domain of DNS names.
    pub cluster_domain: String,
    /// Trust domain of identities.
    pub trust_domain: String,
    /// The cluster's networks.
    pub networks: Vec<IpNet>,
    /// Networks from which probes come.
    pub probe_networks: Vec<IpNet>,
    /// Policy of ports that no Server selects.
    pub default_policy: DefaultPolicy,
    /// Ports that are opaque unless an annotation says otherwise.
    pub default_opaque_ports: PortSet,
    /// Inbound ports that annotations may have bypass the proxies of their pods; `None` if they may name any.
    pub allowed_skips: Option<PortSet>,
    /// How proxies reach meshed endpoints.
    pub transport_mode: TransportMode,
    /// The namespace whose EgressNetworks apply to clients of all namespaces that have none.
    pub egress_namespace: String,
    /// Whether a route needs a ReferenceGrant to send traffic to a Service of another namespace.
    pub require_reference_grants: bool,
    /// Whether IPv6 endpoints are announced.
    pub ipv6: bool,
    /// Whether meshed endpoints are announced as accepting HTTP/1 inside HTTP/2.
    pub h2_upgrade: bool,
    /// The objects that list endpoints; the others are not read.
    pub endpoints_from: EndpointsFrom,
}

impl Cluster {
    /// Whether an address belongs to the cluster.
    pub(crate) fn contains(&self, ip: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(&ip))
    }

    /// The mesh identity of a service account.
    pub(crate) fn identity(&self, account: &str, namespace: &str) -> String {
        format!("{account}.{}", self.namespace_suffix(namespace))
    }

    /// The common suffix of all identities of a namespace.
    pub(crate) fn namespace_suffix(&self, namespace: &str) -> String {
        format!("{namespace}.serviceaccount.identity.{}.{}", self.control_namespace, self.trust_domain)
    }

    /// The Service that a ServiceProfile's name refers to.
    pub(crate) fn service_of_profile(&self, name: &str) -> Option<Key> {
        let labels = name.strip_suffix(&self.cluster_domain)?.strip_suffix(".svc.")?;
        let (service, namespace) = labels.split_once('.').filter(|(_, namespace)| !namespace.contains('.'))?;
        Some(Key::new(namespace, service))
    }

    /// The DNS name of a Service.
    pub(crate) fn service_name(&self, name: &str, namespace: &str) -> String {
        format!("{name}.{namespace}.svc.{}", self.cluster_domain)
    }
}
