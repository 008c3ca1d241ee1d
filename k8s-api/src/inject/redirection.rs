//! Parameters of a meshed pod's redirection: which connections go to the proxy and which bypass it.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;

use super::{
    annotations::{InjectError, Reading, Settings},
    bypass::{Forbidden, Limits, Skips, forbidden, is_of_control_plane},
    config::ProxyPorts,
    exemption::{Exemption, ExemptionRules, shared_id},
    running::{listener_port, proxy_user},
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
    /// The annotations that were ignored for the administrator's rules.
    pub forbidden: Vec<Forbidden>,
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
    /// What bypasses the proxy.
    pub skips: Skips,
    /// Namespaces of the control planes; empty where they may be in any. While the rules allow no bypass, no pod is
    /// then one of a control plane.
    pub control_plane_namespaces: Vec<String>,
}

impl Default for RedirectionDefaults {
    fn default() -> Self {
        Self {
            ports: ProxyPorts::default(),
            proxy_uid: labels::PROXY_UID,
            proxy_gid: None,
            rules: ExemptionRules::default(),
            skips: Skips::default(),
            control_plane_namespaces: Vec::new(),
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
        let RedirectionDefaults { ports, rules, skips, .. } = defaults;
        let of_control_plane = is_of_control_plane(pod, *rules, &defaults.control_plane_namespaces);
        let limits = Limits { rules: *rules, skips, proxy_uid: defaults.proxy_uid, proxy_gid: defaults.proxy_gid };
        let forbidden = forbidden(&settings, &limits, of_control_plane);
        let is_forbidden = |name| forbidden.iter().any(|one| one.annotation() == name);
        let own_uid = settings.uid.filter(|_| !is_forbidden(labels::PROXY_UID_ANNOTATION));
        let proxy_uid = proxy_user(pod).or(own_uid).unwrap_or(defaults.proxy_uid);
        // Linkerd's rule: group 0, which many processes are in, exempts no connection.
        let own_gid = settings.gid.filter(|_| !is_forbidden(labels::PROXY_GID_ANNOTATION));
        let proxy_gid = own_gid.or(defaults.proxy_gid).filter(|gid| *gid > 0);
        // Admission refuses such pods; they can still occur with an ephemeral container, without the webhook, or from
        // before the administrator forbade them.
        let is_strict = shared_id(pod, proxy_uid, proxy_gid).is_some()
            || (!rules.bypass_allowed && proxy_uid != defaults.proxy_uid);
        let exemption = if is_strict { Exemption::Cgroup } else { rules.exemption(settings.exemption) };
        let own_ports = |name, own: Option<PortSet>, default: &PortSet| {
            own.filter(|_| !is_forbidden(name)).unwrap_or_else(|| default.clone())
        };
        let skip_inbound_ports = own_ports(labels::SKIP_INBOUND_PORTS, settings.skip_inbound_ports, &skips.inbound);
        let mut skip_outbound_ports =
            own_ports(labels::SKIP_OUTBOUND_PORTS, settings.skip_outbound_ports, &skips.outbound);
        if of_control_plane {
            skips.api_server_ports.ranges().for_each(|range| skip_outbound_ports.insert(range));
        }
        let skip_subnets = settings.skip_subnets.filter(|_| !is_forbidden(labels::SKIP_SUBNETS));
        // A later annotation could name another of the proxy's own listeners, which has another policy.
        let port = |listener: &[&str], annotated: Option<u16>, default| {
            let running = listener.iter().find_map(|variable| listener_port(pod, variable));
            running.or(annotated).unwrap_or(default)
        };
        Ok(Self {
            outbound_port: port(
                &["OUTBOUND_LISTEN_ADDRS", "OUTBOUND_LISTEN_ADDR"],
                settings.outbound_port,
                ports.outbound,
            ),
            inbound_port: port(&["INBOUND_LISTEN_ADDR"], settings.inbound_port, ports.inbound),
            control_port: port(&["CONTROL_LISTEN_ADDR"], settings.control_port, ports.control),
            admin_port: port(&["ADMIN_LISTEN_ADDR"], settings.admin_port, ports.admin),
            proxy_uid,
            proxy_gid,
            exemption,
            bypass: settings.bypass && rules.bypass_allowed,
            skip_inbound_ports,
            skip_outbound_ports,
            skip_subnets: skip_subnets.unwrap_or_else(|| skips.subnets.clone()),
            forbidden,
        })
    }
}
