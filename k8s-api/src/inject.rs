//! Injection: from a Pod, its Namespace and the mesh's settings to the Pod with the proxy, or a reason to leave it
//! alone.
//!
//! It adds what Linkerd's injector adds (`linkerd2:charts/partials/templates/_proxy.tpl`), except that redirection is
//! the node agent's work: there is never an init container with iptables rules. The proxy is a native sidecar.
//! Everything is a pure function; the webhook, the sandbox and the CLI call the same one.

mod additions;
mod annotations;
mod bypass;
mod config;
mod env;
mod exemption;
mod opaque;
mod redirection;
mod running;
mod sidecar;
mod tuning;

use std::{collections::BTreeMap, fmt};

use k8s_openapi::{
    api::core::v1::{Namespace, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use sha2::{Digest, Sha256};

pub use additions::Additions;
pub use annotations::InjectError;
pub use bypass::{Forbidden, Skips, forbidden_inbound_ports};
pub use config::{
    ControlPlaneAddrs, ControlService, InjectConfig, ProxyPorts, ProxyResources, TapClient, default_cluster_networks,
};
pub use exemption::{Exemption, ExemptionRules, UnknownExemption};
pub use opaque::{check_opaque_ports, pod_opaque_ports, service_opaque_ports, service_require_mtls};
pub use redirection::{Redirection, RedirectionDefaults};
pub use running::{is_native_sidecar, proxy_container, variable};
pub use tuning::{ControlStreams, DebugImage, PerDirection, ProbeTiming, Probes, ProxyTuning, Tracing, Workers};

use crate::{
    field::{FieldPath, Invalid},
    labels,
};
use annotations::{Reading, Settings};
use bypass::Limits;

/// The result of injection.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "an injected Pod is the common case")]
pub enum Decision {
    /// The pod with the proxy.
    Injected(Pod),
    /// The pod stays as it is.
    Skipped(SkipReason),
}

/// Why a pod is not injected; Linkerd's metrics and Events use the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SkipReason {
    /// The pod uses its node's network.
    HostNetwork,
    /// The pod already has a proxy, ours or another mesh's.
    SidecarExists,
    /// Neither the pod nor its namespace asks for injection.
    AnnotationAbsent,
    /// The pod or its namespace refuses injection.
    AnnotationDisabled,
    /// The pod's `linkerd.io/inject` has an unknown value.
    InvalidAnnotationAtWorkload,
    /// The namespace's `linkerd.io/inject` has an unknown value.
    InvalidAnnotationAtNamespace,
}

impl SkipReason {
    /// Linkerd's name of the reason.
    pub fn label(self) -> &'static str {
        match self {
            Self::HostNetwork => "host_network_enabled",
            Self::SidecarExists => "sidecar_already_exists",
            Self::AnnotationAbsent => "injection_enable_annotation_absent",
            Self::AnnotationDisabled => "injection_disable_annotation_present",
            Self::InvalidAnnotationAtWorkload => "invalid_inject_annotation_at_workload",
            Self::InvalidAnnotationAtNamespace => "invalid_inject_annotation_at_ns",
        }
    }

    /// A sentence for people; Linkerd's.
    pub fn explanation(self) -> &'static str {
        match self {
            Self::HostNetwork => "hostNetwork is enabled",
            Self::SidecarExists => "pod has a sidecar injected already",
            Self::AnnotationAbsent => {
                "neither the namespace nor the pod have the annotation \"linkerd.io/inject:enabled\""
            }
            Self::AnnotationDisabled => "pod has the annotation \"linkerd.io/inject:disabled\"",
            Self::InvalidAnnotationAtWorkload => {
                "invalid value for annotation \"linkerd.io/inject\" at workload, expected enabled, disabled or ingress"
            }
            Self::InvalidAnnotationAtNamespace => {
                "invalid value for annotation \"linkerd.io/inject\" at namespace, expected enabled, disabled or ingress"
            }
        }
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Why a pod that asks for a proxy must not start; each message contains a remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// An annotation about admitted clients, or about what bypasses the proxy, cannot be read.
    #[error(transparent)]
    Annotation(#[from] InjectError),
    /// An annotation that the cluster's administrator forbids.
    #[error(transparent)]
    Forbidden(#[from] Forbidden),
    /// An application would run as the proxy's user or group, and its connections would bypass the proxy.
    #[error(
        "{field} is {id}, which is the proxy's: connections of container {container:?} would bypass the proxy; \
         use another id, or set the annotation {}: cgroup",
        labels::PROXY_EXEMPTION
    )]
    ProxyId {
        /// Name of the container.
        container: String,
        /// Where the id is set.
        field: FieldPath,
        /// The user or group id, which is also the proxy's.
        id: i64,
    },
    /// An application of a strict pod could read the proxy's memory and become the proxy.
    #[error(
        "{field}: in a strict pod, container {container:?} may run as the proxy's user ({uid}) and see the proxy's \
         processes; set its securityContext.runAsUser to another user, or remove {field}"
    )]
    SharedProcesses {
        /// Name of the container.
        container: String,
        /// By which processes are shared.
        field: FieldPath,
        /// The proxy's user.
        uid: i64,
    },
}

impl Refusal {
    /// The annotation that has to change, if there is one.
    pub fn annotation(&self) -> Option<&'static str> {
        match self {
            Self::Annotation(error) => Some(error.annotation),
            Self::Forbidden(error) => Some(error.annotation()),
            Self::ProxyId { .. } | Self::SharedProcesses { .. } => None,
        }
    }
}

/// Decides about `pod` and adds the proxy. Settings come from the pod's annotations, then the namespace's, then
/// `config`.
///
/// # Errors
/// When a pod that is to be injected must not start; the error names the annotation or field, and a remedy.
pub fn inject(pod: &Pod, namespace: Option<&Namespace>, config: &InjectConfig) -> Result<Decision, Refusal> {
    let ns_annotations = namespace.and_then(|namespace| namespace.metadata.annotations.as_ref());
    let mode = match mode(pod, ns_annotations) {
        Ok(mode) => mode,
        Err(reason) => return Ok(Decision::Skipped(reason)),
    };
    let mut pod = pod.clone();
    inherit(&mut pod.metadata, ns_annotations, mode, config);
    let empty = BTreeMap::new();
    let Reading { settings, refused, .. } = Settings::read(pod.metadata.annotations.as_ref().unwrap_or(&empty));
    if let Some(error) = refused.into_iter().next() {
        return Err(error.into());
    }
    check_exemption(&pod, config, &settings)?;
    let inherited = Settings::read(ns_annotations.unwrap_or(&empty)).settings;
    mark(&mut pod, config, &settings);
    sidecar::add(&mut pod, config, &settings, &inherited, mode == Mode::Ingress);
    Ok(Decision::Injected(pod))
}

/// Refuses a pod that exempts more than its proxy from redirection, or more than the administrator allows.
fn check_exemption(pod: &Pod, config: &InjectConfig, settings: &Settings) -> Result<(), Refusal> {
    let rules = config.exemption;
    let of_control_plane =
        bypass::is_of_control_plane(pod, rules, std::slice::from_ref(&config.control_plane_namespace));
    let limits = Limits { rules, skips: &config.skips, proxy_uid: config.proxy_uid, proxy_gid: config.proxy_gid };
    let forbidden = bypass::forbidden(settings, &limits, of_control_plane);
    if let Some(error) = forbidden.into_iter().next() {
        return Err(error.into());
    }
    let uid = settings.uid.unwrap_or(config.proxy_uid);
    let gid = settings.gid.or(config.proxy_gid).filter(|gid| *gid > 0);
    let refusal = match rules.exemption(settings.exemption) {
        Exemption::User => exemption::shared_id(pod, uid, gid).map(|shared| Refusal::ProxyId {
            container: shared.container,
            field: shared.field,
            id: shared.id,
        }),
        Exemption::Cgroup => exemption::shared_processes(pod, uid).map(|shared| Refusal::SharedProcesses {
            container: shared.container,
            field: shared.field,
            uid,
        }),
    };
    refusal.map_or(Ok(()), Err)
}

/// Every annotation in `metadata` for which injection refuses a pod, or skips it against its owner's intention.
pub fn check_annotations(metadata: &ObjectMeta) -> Vec<Invalid> {
    let Some(annotations) = &metadata.annotations else { return Vec::new() };
    let mut found = invalid(Settings::read(annotations).refused);
    if let Some(value) = requested(Some(annotations)).filter(|value| Mode::parse(value).is_none()) {
        found.push(
            FieldPath::annotation(labels::INJECT)
                .invalid(format!("bad value {value:?}, expected enabled, disabled or ingress")),
        );
    }
    found
}

/// Every annotation in `metadata` that cannot be read and is ignored; the mesh's default applies.
pub fn ignored_annotations(metadata: &ObjectMeta) -> Vec<Invalid> {
    metadata.annotations.as_ref().map(|annotations| invalid(Settings::read(annotations).ignored)).unwrap_or_default()
}

fn invalid(errors: Vec<InjectError>) -> Vec<Invalid> {
    errors.into_iter().map(|error| FieldPath::annotation(error.annotation).invalid(error.problem())).collect()
}

/// The value of `linkerd.io/inject`; an empty one counts as absent, as with Linkerd (`linkerd2:pkg/inject/report.go`).
pub fn requested(annotations: Option<&BTreeMap<String, String>>) -> Option<&str> {
    annotations?.get(labels::INJECT).map(String::as_str).filter(|value| !value.is_empty())
}

/// An image reference from a name and a version: a tag, or a digest such as `sha256:...`. The name may contain a
/// digest instead.
pub(crate) fn image_reference(name: &str, version: &str) -> String {
    match (name.contains('@'), version.starts_with("sha256:")) {
        (true, _) => name.to_owned(),
        (false, true) => format!("{name}@{version}"),
        (false, false) => format!("{name}:{version}"),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Enabled,
    Disabled,
    Ingress,
}

impl Mode {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "enabled" => Some(Self::Enabled),
            "disabled" => Some(Self::Disabled),
            "ingress" => Some(Self::Ingress),
            _ => None,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Disabled => "disabled",
            Self::Ingress => "ingress",
        }
    }
}

/// The reasons are checked in Linkerd's order (`linkerd2:pkg/inject/report.go`).
fn mode(pod: &Pod, ns_annotations: Option<&BTreeMap<String, String>>) -> Result<Mode, SkipReason> {
    let spec = pod.spec.as_ref();
    if spec.and_then(|spec| spec.host_network) == Some(true) {
        return Err(SkipReason::HostNetwork);
    }
    if sidecar::exists(pod) {
        return Err(SkipReason::SidecarExists);
    }
    let wanted = |annotations, bad| requested(annotations).map(|value| Mode::parse(value).ok_or(bad)).transpose();
    let own = wanted(pod.metadata.annotations.as_ref(), SkipReason::InvalidAnnotationAtWorkload)?;
    let inherited = wanted(ns_annotations, SkipReason::InvalidAnnotationAtNamespace);
    let mode = match own {
        Some(mode) => mode,
        None => inherited?.ok_or(SkipReason::AnnotationAbsent)?,
    };
    if mode == Mode::Disabled {
        return Err(SkipReason::AnnotationDisabled);
    }
    Ok(mode)
}

/// Copies the namespace's settings that the pod does not set itself, and then the one of the mesh that the policy
/// controller reads from the pod's annotations.
fn inherit(
    metadata: &mut ObjectMeta,
    ns_annotations: Option<&BTreeMap<String, String>>,
    mode: Mode,
    config: &InjectConfig,
) {
    let annotations = metadata.annotations.get_or_insert_default();
    if requested(Some(annotations)).is_none() {
        annotations.insert(labels::INJECT.to_owned(), mode.label().to_owned());
    }
    for (name, value) in ns_annotations.into_iter().flatten() {
        let is_setting = labels::INHERITED_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        if is_setting && !NOT_INHERITED.contains(&name.as_str()) {
            annotations.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }
    let ports = &config.tuning.require_identity_ports;
    if !ports.is_empty() {
        annotations.entry(labels::REQUIRE_IDENTITY_PORTS.to_owned()).or_insert_with(|| ports.to_string());
    }
}

/// Annotations that Linkerd does not copy from a namespace (`linkerd2:pkg/inject/inject.go`).
const NOT_INHERITED: [&str; 6] = [
    "config.linkerd.io/close-wait-timeout",
    "config.linkerd.io/debug-image",
    "config.linkerd.io/debug-image-pull-policy",
    "config.linkerd.io/debug-image-version",
    "config.linkerd.io/enable-gateway",
    "config.linkerd.io/proxy-cpu-ratio-limit",
];

/// Adds the labels and annotations by which discovery, policy and people recognise a meshed pod.
fn mark(pod: &mut Pod, config: &InjectConfig, settings: &Settings) {
    let owner = owner_label(pod);
    let ports = sidecar::container_ports(pod);
    let namespace = pod.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
    let annotations = pod.metadata.annotations.get_or_insert_default();
    let version = settings.version.clone().unwrap_or_else(|| config.proxy_version.clone());
    annotations.insert(labels::CREATED_BY.to_owned(), format!("weft {}", config.proxy_version));
    annotations.insert(labels::PROXY_VERSION.to_owned(), version);
    let digest = Sha256::digest(config.trust_anchors_pem.as_bytes());
    let hex = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    annotations.insert(labels::TRUST_ROOT_SHA256.to_owned(), hex);
    if !annotations.contains_key(labels::OPAQUE_PORTS) {
        let opaque: Vec<_> =
            ports.iter().filter(|port| config.default_opaque_ports.contains(**port)).map(u16::to_string).collect();
        if !opaque.is_empty() {
            annotations.insert(labels::OPAQUE_PORTS.to_owned(), opaque.join(","));
        }
    }
    let pod_labels = pod.metadata.labels.get_or_insert_default();
    pod_labels.insert(labels::CONTROL_PLANE_NS.to_owned(), config.control_plane_namespace.clone());
    pod_labels.insert(labels::WORKLOAD_NS.to_owned(), namespace);
    if let Some((kind, name)) = owner {
        let kind = cut(&kind, MAX_LABEL - "proxy-".len());
        pod_labels.insert(format!("{}{kind}", labels::PROXY_OWNER_PREFIX), cut(&name, MAX_LABEL).to_owned());
    }
}

/// The longest value of a label, and the longest name of one without its prefix
/// (`k8s.io/apimachinery/pkg/util/validation`).
const MAX_LABEL: usize = 63;

/// The beginning of an owner's name or kind, which may be longer than a label: the API server would refuse the pod, and
/// the label is for people and metrics.
fn cut(text: &str, length: usize) -> &str {
    text.get(..length).unwrap_or(text).trim_end_matches(|c: char| !c.is_ascii_alphanumeric())
}

/// The owner's kind in lower case and its name. A Deployment is recognised by its ReplicaSet, whose name is the
/// Deployment's followed by the pod template's hash.
fn owner_label(pod: &Pod) -> Option<(String, String)> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let [owner] = owners else { return None };
    let hash = pod.metadata.labels.as_ref().and_then(|labels| labels.get(labels::POD_TEMPLATE_HASH));
    if owner.kind == "ReplicaSet" {
        let deployment = hash.and_then(|hash| owner.name.strip_suffix(hash.as_str())?.strip_suffix('-'));
        if let Some(deployment) = deployment {
            return Some(("deployment".to_owned(), deployment.to_owned()));
        }
    }
    Some((owner.kind.to_lowercase(), owner.name.clone()))
}

#[cfg(test)]
mod tests;
