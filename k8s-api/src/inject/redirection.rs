//! What the node agent must know of a meshed pod: which connections its proxy gets and which pass by.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;

use super::{
    annotations::{InjectError, Reading, Settings},
    config::ProxyPorts,
    exemption::{Exemption, ExemptionRules, shared_id},
};
use crate::{labels, ports::PortSet};

/// Redirection of one pod, as `linkerd-init`'s arguments would say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirection {
    /// Where outbound connections go.
    pub outbound_port: u16,
    /// Where inbound connections go.
    pub inbound_port: u16,
    /// Where the proxy may serve tap: inbound connections pass by while it listens there.
    pub control_port: u16,
    /// User id in the pod whose outbound connections are the proxy's own.
    pub proxy_uid: i64,
    /// Group id in the pod whose outbound connections are the proxy's own, too.
    pub proxy_gid: Option<i64>,
    /// By what the proxy's own connections are known.
    pub exemption: Exemption,
    /// Whether nothing is redirected, by its owner's wish.
    pub bypass: bool,
    /// Inbound ports that pass by, the proxy's own admin port among them.
    pub skip_inbound_ports: PortSet,
    /// Outbound ports that pass by.
    pub skip_outbound_ports: PortSet,
    /// Source networks whose inbound connections pass by.
    pub skip_subnets: Vec<IpNet>,
}

/// What applies to pods that say nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedirectionDefaults {
    /// Ports of the proxy's listeners.
    pub ports: ProxyPorts,
    /// User id of the proxy in the pod.
    pub proxy_uid: i64,
    /// Group id of the proxy in the pod, if that is known by it.
    pub proxy_gid: Option<i64>,
    /// By what the proxy's own connections are known, and what a pod may change of that.
    pub rules: ExemptionRules,
    /// Inbound ports that pass by.
    pub skip_inbound_ports: PortSet,
    /// Outbound ports that pass by.
    pub skip_outbound_ports: PortSet,
    /// Source networks that pass by.
    pub skip_subnets: Vec<IpNet>,
}

impl Default for RedirectionDefaults {
    /// Linkerd's Helm defaults: 4567 and 4568, Galera's replication.
    fn default() -> Self {
        let galera: PortSet = [4567, 4568].into_iter().collect();
        Self {
            ports: ProxyPorts::default(),
            proxy_uid: labels::PROXY_UID,
            proxy_gid: None,
            rules: ExemptionRules::default(),
            skip_inbound_ports: galera.clone(),
            skip_outbound_ports: galera,
            skip_subnets: Vec::new(),
        }
    }
}

impl Redirection {
    /// The redirection that an injected pod asks for by its annotations.
    ///
    /// # Errors
    /// When an annotation cannot be read; the pod must then not be started, rather than bypass the mesh.
    pub fn of(pod: &Pod, defaults: &RedirectionDefaults) -> Result<Self, InjectError> {
        let Reading { settings, refused, .. } =
            pod.metadata.annotations.as_ref().map(Settings::read).unwrap_or_default();
        if let Some(error) = refused.into_iter().next() {
            return Err(error);
        }
        let proxy_uid = settings.uid.unwrap_or(defaults.proxy_uid);
        // Linkerd's rule: group 0, which many are in, exempts nobody.
        let proxy_gid = settings.gid.or(defaults.proxy_gid).filter(|gid| *gid > 0);
        let exemption = match shared_id(pod, proxy_uid, proxy_gid) {
            // Admission refuses such a pod; an ephemeral container, or a pod that no webhook saw, may still be one.
            Some(_) => Exemption::Cgroup,
            None => defaults.rules.exemption(settings.exemption),
        };
        let mut skip_inbound_ports = settings.skip_inbound_ports.unwrap_or_else(|| defaults.skip_inbound_ports.clone());
        let ports = defaults.ports;
        let admin = settings.admin_port.unwrap_or(ports.admin);
        skip_inbound_ports.insert(admin..=admin);
        Ok(Self {
            outbound_port: settings.outbound_port.unwrap_or(ports.outbound),
            inbound_port: settings.inbound_port.unwrap_or(ports.inbound),
            control_port: settings.control_port.unwrap_or(ports.control),
            proxy_uid,
            proxy_gid,
            exemption,
            bypass: settings.bypass && defaults.rules.bypass_allowed,
            skip_inbound_ports,
            skip_outbound_ports: settings.skip_outbound_ports.unwrap_or_else(|| defaults.skip_outbound_ports.clone()),
            skip_subnets: settings.skip_subnets.unwrap_or_else(|| defaults.skip_subnets.clone()),
        })
    }
}
