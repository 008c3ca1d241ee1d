//! What bypasses the proxy in all pods, and which annotations lift more of a pod's redirection than the administrator
//! allows.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;

use super::{
    annotations::{Settings, shown},
    exemption::{Exemption, ExemptionRules},
};
use crate::{labels, ports::PortSet};

/// The chart's value with the inbound ports.
const INBOUND_SETTING: &str = "proxyInit.ignoreInboundPorts";

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

impl Default for Skips {
    /// Linkerd's Helm defaults: 4567 and 4568, Galera's replication.
    fn default() -> Self {
        let galera: PortSet = [4567, 4568].into_iter().collect();
        let (subnets, api_server_ports) = Default::default();
        Self { inbound: galera.clone(), outbound: galera, subnets, api_server_ports }
    }
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
    /// Processes of another user or group than the chart's would bypass the proxy.
    #[error(
        "annotation {annotation}: {id} is not {setting}, and its connections would bypass the proxy, which this \
         cluster does not allow (chart value agent.allowBypass); remove the annotation, or set the annotation {}: \
         cgroup",
        labels::PROXY_EXEMPTION
    )]
    ProxyId {
        /// The annotation's name.
        annotation: &'static str,
        /// Its value.
        id: i64,
        /// The chart's value that is the limit.
        setting: &'static str,
    },
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
            Self::ProxyId { annotation, .. } | Self::Skip { annotation, .. } => annotation,
        }
    }
}

/// Whether the ports of an annotation `config.linkerd.io/skip-inbound-ports` have no effect, where the administrator
/// allows these alone.
pub fn forbidden_inbound_ports(own: &PortSet, allowed: &PortSet) -> Option<Forbidden> {
    beyond(labels::SKIP_INBOUND_PORTS, own, allowed, INBOUND_SETTING)
}

/// What the administrator has set, beyond which annotations may lift nothing of a pod's redirection.
#[derive(Clone, Copy)]
pub(super) struct Limits<'a> {
    pub(super) rules: ExemptionRules,
    pub(super) skips: &'a Skips,
    pub(super) proxy_uid: i64,
    pub(super) proxy_gid: Option<i64>,
}

/// Whether the pod is a part of the control plane. Anybody may set the label; where pods are not trusted with bypasses,
/// the namespace counts too, and no pod is one while none is known.
pub(super) fn is_of_control_plane(pod: &Pod, rules: ExemptionRules, namespaces: &[String]) -> bool {
    let is_labelled =
        pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(labels::CONTROL_PLANE_COMPONENT));
    let is_there = || pod.metadata.namespace.as_ref().is_some_and(|namespace| namespaces.contains(namespace));
    is_labelled && (rules.bypass_allowed || is_there())
}

/// The annotations that lift more of the pod's redirection than the administrator allows.
pub(super) fn forbidden(settings: &Settings, limits: &Limits<'_>, of_control_plane: bool) -> Vec<Forbidden> {
    let Limits { rules, skips, proxy_uid, proxy_gid } = *limits;
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
    // In a strict pod they exempt nobody.
    if rules.exemption(settings.exemption) == Exemption::User {
        let uid = settings.uid.filter(|uid| *uid != proxy_uid);
        let gid = settings.gid.filter(|gid| *gid > 0 && Some(*gid) != proxy_gid);
        let ids = [(labels::PROXY_UID_ANNOTATION, uid, "proxy.uid"), (labels::PROXY_GID_ANNOTATION, gid, "proxy.gid")];
        let ids = ids.into_iter().filter_map(|(annotation, id, setting)| Some((annotation, id?, setting)));
        found.extend(ids.map(|(annotation, id, setting)| Forbidden::ProxyId { annotation, id, setting }));
    }
    let mut outbound = skips.outbound.clone();
    if of_control_plane {
        skips.api_server_ports.ranges().for_each(|range| outbound.insert(range));
    }
    let lists = [
        (labels::SKIP_INBOUND_PORTS, &settings.skip_inbound_ports, &skips.inbound, INBOUND_SETTING),
        (labels::SKIP_OUTBOUND_PORTS, &settings.skip_outbound_ports, &outbound, "proxyInit.ignoreOutboundPorts"),
    ];
    for (annotation, own, allowed, setting) in lists {
        found.extend(own.as_ref().and_then(|own| beyond(annotation, own, allowed, setting)));
    }
    let is_allowed = |own: &IpNet| skips.subnets.iter().any(|subnet| subnet.contains(own));
    if let Some(own) = settings.skip_subnets.as_ref().filter(|own| !own.iter().all(is_allowed)) {
        let value = own.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let (annotation, setting) = (labels::SKIP_SUBNETS, "proxyInit.skipSubnets");
        found.push(Forbidden::Skip { annotation, value: shown(&value), setting });
    }
    found
}

fn beyond(annotation: &'static str, own: &PortSet, allowed: &PortSet, setting: &'static str) -> Option<Forbidden> {
    (!own.is_subset(allowed)).then(|| Forbidden::Skip { annotation, value: shown(&own.to_string()), setting })
}
