//! Parameters of a meshed pod's redirection: which connections go to the proxy and which bypass it.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;

use super::{
    annotations::{InjectError, Reading, Settings, shown},
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
    /// The annotations that were ignored for the administrator's rules.
    pub forbidden: Vec<Forbidden>,
}

/// An annotation that lifts more of a pod's redirection than the cluster's administrator allows. It refuses the pod at
/// admission, and has no effect on a running one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// The pod would be less strict.
    #[error(
        "annotation {}: \"user\" is less strict than this cluster allows (chart value agent.enforceProxyExemption); \
         remove the annotation",
        labels::PROXY_EXEMPTION
    )]
    Exemption,
    /// The pod would not be redirected at all.
    #[error(
        "annotation {}: this cluster allows no pod to switch its redirection off (chart value agent.allowBypass); \
         remove the annotation",
        labels::BYPASS
    )]
    Bypass,
    /// Ports or networks would bypass the proxy.
    #[error(
        "annotation {annotation}: {value:?} bypasses the proxy beyond {setting}, which this cluster does not allow \
         (chart value agent.allowBypass); remove the annotation, or have the cluster's administrator extend {setting}"
    )]
    Skip {
        /// The annotation's name.
        annotation: &'static str,
        /// The beginning of its value.
        value: String,
        /// The chart's value that is the limit.
        setting: &'static str,
    },
}

impl Forbidden {
    /// The annotation's name.
    pub fn annotation(&self) -> &'static str {
        match self {
            Self::Exemption => labels::PROXY_EXEMPTION,
            Self::Bypass => labels::BYPASS,
            Self::Skip { annotation, .. } => annotation,
        }
    }
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
    /// Namespace of the control plane; `None` where there may be several.
    pub control_plane_namespace: Option<String>,
}

/// What bypasses the proxy in pods without annotations, and, where the administrator allows no bypass, in any pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skips {
    /// Inbound ports.
    pub inbound: PortSet,
    /// Outbound ports.
    pub outbound: PortSet,
    /// Source networks of inbound connections.
    pub subnets: Vec<IpNet>,
    /// Ports of the API server. In pods of a control plane, connections to them bypass the proxy whatever the
    /// annotations say: the proxies there wait for the control plane, and it waits for the API server
    /// (`linkerd2-proxy-init:cni-plugin/main.go`).
    pub api_server_ports: PortSet,
}

impl Default for RedirectionDefaults {
    fn default() -> Self {
        Self {
            ports: ProxyPorts::default(),
            proxy_uid: labels::PROXY_UID,
            proxy_gid: None,
            rules: ExemptionRules::default(),
            skips: Skips::default(),
            control_plane_namespace: None,
        }
    }
}

impl Default for Skips {
    /// Linkerd's Helm defaults: 4567 and 4568, Galera's replication.
    fn default() -> Self {
        let galera: PortSet = [4567, 4568].into_iter().collect();
        let (subnets, api_server_ports) = Default::default();
        Self { inbound: galera.clone(), outbound: galera, subnets, api_server_ports }
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
        let RedirectionDefaults { ports, rules, skips, .. } = defaults;
        let of_control_plane = is_of_control_plane(pod, *rules, defaults.control_plane_namespace.as_deref());
        let forbidden = forbidden(&settings, *rules, skips, of_control_plane);
        let is_forbidden = |name| forbidden.iter().any(|one| one.annotation() == name);
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
        Ok(Self {
            outbound_port: settings.outbound_port.unwrap_or(ports.outbound),
            inbound_port: settings.inbound_port.unwrap_or(ports.inbound),
            control_port: settings.control_port.unwrap_or(ports.control),
            admin_port: settings.admin_port.unwrap_or(ports.admin),
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

/// Whether the pod is a part of the control plane. Anybody may set the label; where pods are not trusted with bypasses,
/// the namespace counts too.
pub(super) fn is_of_control_plane(pod: &Pod, rules: ExemptionRules, namespace: Option<&str>) -> bool {
    let is_labelled =
        pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(labels::CONTROL_PLANE_COMPONENT));
    let is_there = || namespace.is_none_or(|namespace| pod.metadata.namespace.as_deref() == Some(namespace));
    is_labelled && (rules.bypass_allowed || is_there())
}

/// The annotations that lift more of the pod's redirection than the administrator allows.
pub(super) fn forbidden(
    settings: &Settings,
    rules: ExemptionRules,
    skips: &Skips,
    of_control_plane: bool,
) -> Vec<Forbidden> {
    let mut found = Vec::new();
    if settings.exemption.is_some_and(|own| own < rules.exemption(Some(own))) {
        found.push(Forbidden::Exemption);
    }
    if rules.bypass_allowed {
        return found;
    }
    if settings.bypass {
        found.push(Forbidden::Bypass);
    }
    let mut outbound = skips.outbound.clone();
    if of_control_plane {
        skips.api_server_ports.ranges().for_each(|range| outbound.insert(range));
    }
    let lists = [
        (labels::SKIP_INBOUND_PORTS, &settings.skip_inbound_ports, &skips.inbound, "proxyInit.ignoreInboundPorts"),
        (labels::SKIP_OUTBOUND_PORTS, &settings.skip_outbound_ports, &outbound, "proxyInit.ignoreOutboundPorts"),
    ];
    for (annotation, own, allowed, setting) in lists {
        if let Some(own) = own.as_ref().filter(|own| !own.is_subset(allowed)) {
            found.push(Forbidden::Skip { annotation, value: shown(&own.to_string()), setting });
        }
    }
    let is_allowed = |own: &IpNet| skips.subnets.iter().any(|subnet| subnet.contains(own));
    if let Some(own) = settings.skip_subnets.as_ref().filter(|own| !own.iter().all(is_allowed)) {
        let value = own.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let (annotation, setting) = (labels::SKIP_SUBNETS, "proxyInit.skipSubnets");
        found.push(Forbidden::Skip { annotation, value: shown(&value), setting });
    }
    found
}
