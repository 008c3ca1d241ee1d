//! Parameters of a meshed pod's redirection: which connections go to the proxy and which bypass it.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;

use super::{
    annotations::{InjectError, Reading, Settings},
    config::ProxyPorts,
    exemption::{Exemption, ExemptionRules, shared_id},
};
use crate::{labels, ports::PortSet};

/// Redirection of one pod, with the parameters of `linkerd-init`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirection {
    /// Outbound connections are redirected to this port.
    pub outbound_port: u16,
    /// Inbound connections are redirected to this port.
    pub inbound_port: u16,
    /// Port of the proxy's tap server: inbound connections to it bypass the proxy while it listens there.
    pub control_port: u16,
    /// Port of the proxy's admin server, likewise.
    pub admin_port: u16,
    /// User id in the pod whose outbound connections are the proxy's own.
    pub proxy_uid: i64,
    /// Group id in the pod whose outbound connections are also the proxy's own.
    pub proxy_gid: Option<i64>,
    /// How the proxy's own connections are recognised.
    pub exemption: Exemption,
    /// Whether the owner has switched redirection off.
    pub bypass: bool,
    /// Inbound ports that bypass the proxy.
    pub skip_inbound_ports: PortSet,
    /// Outbound ports that bypass the proxy.
    pub skip_outbound_ports: PortSet,
    /// Source networks whose inbound connections bypass the proxy.
    pub skip_subnets: Vec<IpNet>,
}

/// Defaults for pods without annotations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedirectionDefaults {
    /// Ports of the proxy's listeners.
    pub ports: ProxyPorts,
    /// User id of the proxy in the pod.
    pub proxy_uid: i64,
    /// Group id of the proxy in the pod, if the kernel recognises the proxy by it.
    pub proxy_gid: Option<i64>,
    /// How the proxy's own connections are recognised, and what a pod may change about that.
    pub rules: ExemptionRules,
    /// Inbound ports that bypass the proxy.
    pub skip_inbound_ports: PortSet,
    /// Outbound ports that bypass the proxy.
    pub skip_outbound_ports: PortSet,
    /// Source networks whose inbound connections bypass the proxy.
    pub skip_subnets: Vec<IpNet>,
    /// Ports of the API server. In pods of a control plane, connections to them bypass the proxy whatever the
    /// annotations say: the proxies there wait for the control plane, and it waits for the API server
    /// (`linkerd2-proxy-init:cni-plugin/main.go`).
    pub api_server_ports: PortSet,
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
            api_server_ports: PortSet::default(),
        }
    }
}

impl Redirection {
    /// The redirection that the annotations of an injected pod ask for.
    ///
    /// # Errors
    /// When an annotation cannot be read; such a pod must not be started, because it might bypass the mesh.
    pub fn of(pod: &Pod, defaults: &RedirectionDefaults) -> Result<Self, InjectError> {
        let Reading { settings, refused, .. } =
            pod.metadata.annotations.as_ref().map(Settings::read).unwrap_or_default();
        if let Some(error) = refused.into_iter().next() {
            return Err(error);
        }
        let proxy_uid = settings.uid.unwrap_or(defaults.proxy_uid);
        // Linkerd's rule: group 0, which many processes are in, exempts no connection.
        let proxy_gid = settings.gid.or(defaults.proxy_gid).filter(|gid| *gid > 0);
        let exemption = match shared_id(pod, proxy_uid, proxy_gid) {
            // Admission refuses such a pod; it can still occur as an ephemeral container, or without the webhook.
            Some(_) => Exemption::Cgroup,
            None => defaults.rules.exemption(settings.exemption),
        };
        let ports = defaults.ports;
        let mut skip_outbound_ports =
            settings.skip_outbound_ports.unwrap_or_else(|| defaults.skip_outbound_ports.clone());
        if pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(labels::CONTROL_PLANE_COMPONENT)) {
            for range in defaults.api_server_ports.ranges() {
                skip_outbound_ports.insert(range);
            }
        }
        Ok(Self {
            outbound_port: settings.outbound_port.unwrap_or(ports.outbound),
            inbound_port: settings.inbound_port.unwrap_or(ports.inbound),
            control_port: settings.control_port.unwrap_or(ports.control),
            admin_port: settings.admin_port.unwrap_or(ports.admin),
            proxy_uid,
            proxy_gid,
            exemption,
            bypass: settings.bypass && defaults.rules.bypass_allowed,
            skip_inbound_ports: settings.skip_inbound_ports.unwrap_or_else(|| defaults.skip_inbound_ports.clone()),
            skip_outbound_ports,
            skip_subnets: settings.skip_subnets.unwrap_or_else(|| defaults.skip_subnets.clone()),
        })
    }
}
