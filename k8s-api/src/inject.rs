//! Injection: from a Pod, its Namespace and the mesh's settings to the Pod with the proxy, or a reason to leave it alone.
//!
//! What is added is what Linkerd's injector adds (`linkerd2:charts/partials/templates/_proxy.tpl`), except that redirection
//! is the node agent's work: there is never an init container with iptables rules. The proxy is a native sidecar.
//! Everything is a pure function; the webhook, the sandbox and the CLI call the same one.

mod annotations;
mod config;
mod env;
mod opaque;
mod redirection;
mod sidecar;

use std::{collections::BTreeMap, fmt};

use k8s_openapi::{
    api::core::v1::{Namespace, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use sha2::{Digest, Sha256};

pub use annotations::InjectError;
pub(crate) use annotations::is_quantity;
pub use config::{
    ControlPlaneAddrs, ControlService, InjectConfig, ProxyPorts, ProxyResources, default_cluster_networks,
};
pub use opaque::{check_opaque_ports, pod_opaque_ports, service_opaque_ports};
pub use redirection::{Exemption, Redirection, RedirectionDefaults};

use crate::{
    field::{FieldPath, Invalid},
    labels,
};
use annotations::Settings;

/// What injection decided.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "an injected Pod is the common case")]
pub enum Decision {
    /// The pod with the proxy.
    Injected(Pod),
    /// The pod stays as it is.
    Skipped(SkipReason),
}

/// Why a pod is not injected; the names are Linkerd's, read by its metrics and events.
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
    /// The pod gets no service account token, so the proxy could not prove an identity.
    TokenDisabled,
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
            Self::TokenDisabled => "disabled_automount_service_account_token_account",
        }
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Decides about `pod` and adds the proxy. Settings come from the pod's annotations, then the namespace's, then `config`.
///
/// # Errors
/// When an annotation of a pod that is to be injected cannot be read; the error names it, its value and what was expected.
pub fn inject(pod: &Pod, namespace: Option<&Namespace>, config: &InjectConfig) -> Result<Decision, InjectError> {
    let ns_annotations = namespace.and_then(|namespace| namespace.metadata.annotations.as_ref());
    let mode = match mode(pod, ns_annotations) {
        Ok(mode) => mode,
        Err(reason) => return Ok(Decision::Skipped(reason)),
    };
    let mut pod = pod.clone();
    inherit(&mut pod.metadata, ns_annotations, mode);
    let empty = BTreeMap::new();
    let (settings, errors) = Settings::read(pod.metadata.annotations.as_ref().unwrap_or(&empty));
    if let Some(error) = errors.into_iter().next() {
        return Err(error);
    }
    mark(&mut pod, config, &settings);
    sidecar::add(&mut pod, config, &settings, mode == Mode::Ingress);
    Ok(Decision::Injected(pod))
}

/// Every annotation in `metadata` that injection would stumble over.
pub fn check_annotations(metadata: &ObjectMeta) -> Vec<Invalid> {
    let Some(annotations) = &metadata.annotations else { return Vec::new() };
    let mut found: Vec<_> = Settings::read(annotations)
        .1
        .into_iter()
        .map(|error| {
            let field = FieldPath::annotation(error.annotation);
            field.invalid(format!("bad value {:?}, expected {}", error.value, error.expected))
        })
        .collect();
    if let Some(value) = annotations.get(labels::INJECT).filter(|value| Mode::parse(value).is_none()) {
        found.push(
            FieldPath::annotation(labels::INJECT)
                .invalid(format!("bad value {value:?}, expected enabled, disabled or ingress")),
        );
    }
    found
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

/// The reasons are tried in Linkerd's order (`linkerd2:pkg/inject/report.go`).
fn mode(pod: &Pod, ns_annotations: Option<&BTreeMap<String, String>>) -> Result<Mode, SkipReason> {
    let spec = pod.spec.as_ref();
    if spec.and_then(|spec| spec.host_network) == Some(true) {
        return Err(SkipReason::HostNetwork);
    }
    if sidecar::exists(pod) {
        return Err(SkipReason::SidecarExists);
    }
    let wanted =
        |annotations: Option<&BTreeMap<String, String>>, bad| match annotations.and_then(|a| a.get(labels::INJECT)) {
            None => Ok(None),
            Some(value) => Mode::parse(value).map(Some).ok_or(bad),
        };
    let own = wanted(pod.metadata.annotations.as_ref(), SkipReason::InvalidAnnotationAtWorkload)?;
    let inherited = wanted(ns_annotations, SkipReason::InvalidAnnotationAtNamespace);
    let mode = match own {
        Some(mode) => mode,
        None => inherited?.ok_or(SkipReason::AnnotationAbsent)?,
    };
    if mode == Mode::Disabled {
        return Err(SkipReason::AnnotationDisabled);
    }
    if spec.and_then(|spec| spec.automount_service_account_token) == Some(false) {
        return Err(SkipReason::TokenDisabled);
    }
    Ok(mode)
}

/// Takes over the namespace's settings that the pod lacks.
fn inherit(metadata: &mut ObjectMeta, ns_annotations: Option<&BTreeMap<String, String>>, mode: Mode) {
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.entry(labels::INJECT.to_owned()).or_insert_with(|| mode.label().to_owned());
    for (name, value) in ns_annotations.into_iter().flatten() {
        if name.starts_with(labels::CONFIG_PREFIX) && !NOT_INHERITED.contains(&name.as_str()) {
            annotations.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }
}

/// What Linkerd does not take over from a namespace (`linkerd2:pkg/inject/inject.go`), of what is read here.
const NOT_INHERITED: [&str; 1] = ["config.linkerd.io/enable-gateway"];

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
    if settings.opaque_ports.is_none() {
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
        pod_labels.insert(format!("{}{kind}", labels::PROXY_OWNER_PREFIX), name);
    }
}

/// The owner's kind in lower case and its name. A Deployment is recognised through its ReplicaSet, whose name is the
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
