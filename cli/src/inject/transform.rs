//! One object with the proxy, with the annotations that ask for it, or without both.

use k8s_openapi::{
    api::core::v1::{Pod, PodTemplateSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_yaml_ng::Value;
use weft_k8s_api::{
    field::FieldPath,
    inject::{self, Additions, Decision, InjectConfig, Refusal, SkipReason},
    labels, support,
};

use super::{
    manual::Manual,
    options::Overrides,
    report::{Entry, Outcome},
    workload::{self, Role, at, at_mut, extend, mapping, path, remove_entries, remove_named, text},
};
use crate::manifest::document::{Document, Unusable};

/// Containers that injection adds, Linkerd's included.
const INIT_CONTAINERS: [&str; 3] = [labels::PROXY_CONTAINER, labels::INIT_CONTAINER, "linkerd-network-validator"];
const CONTAINERS: [&str; 2] = [labels::PROXY_CONTAINER, labels::DEBUG_CONTAINER];
/// Volumes that injection adds, Linkerd's included.
const VOLUMES: [&str; 4] =
    ["linkerd-identity-end-entity", "linkerd-identity-token", "linkerd-podinfo", "linkerd-proxy-init-xtables-lock"];
/// Begins the annotations of meshed pods, and the request for a proxy.
const MARKS: &str = "linkerd.io/";
/// Labels of meshed pods, beside those that name a pod's owner.
const LABELS: [&str; 2] = [labels::CONTROL_PLANE_NS, labels::WORKLOAD_NS];

/// What `weft inject` was asked for.
pub(super) struct Injection<'a> {
    pub(super) overrides: &'a Overrides,
    /// Settings for whole proxies; without them objects are only annotated.
    pub(super) manual: Option<&'a Manual>,
}

/// An object of a document, and its place in it.
pub(super) struct Place<'a> {
    pub(super) document: &'a Document,
    /// Empty, or the item of a list.
    pub(super) outer: FieldPath,
}

impl Place<'_> {
    fn unusable(&self, object: &Value, field: FieldPath, problem: impl std::fmt::Display) -> Unusable {
        self.document.unusable(&workload::display(object), &field.under(self.outer.clone()), problem)
    }
}

/// Injects into an object.
///
/// # Errors
/// When it asks for a proxy and cannot have one, or cannot be read.
pub(super) fn inject(object: &mut Value, place: &Place, injection: &Injection) -> Result<Entry, Unusable> {
    let role = Role::of(object);
    let mut entry = entry(object, Outcome::Skipped(None));
    let metadata = FieldPath::of("metadata");
    match role {
        Role::Other => {}
        Role::Namespace => {
            let all = annotations(injection.overrides.mode, injection.overrides);
            annotate(object, &[], all).map_err(|problem| place.unusable(object, metadata, problem))?;
            entry.outcome = Outcome::Injected;
        }
        Role::Service => {
            if let Some(ports) = injection.overrides.get(labels::OPAQUE_PORTS) {
                annotate(object, &[], vec![(labels::OPAQUE_PORTS, ports.to_owned())])
                    .map_err(|problem| place.unusable(object, metadata, problem))?;
                entry.outcome = Outcome::Annotated;
            }
        }
        Role::Workload(keys) => into_workload(object, place, keys, injection, &mut entry)?,
    }
    Ok(entry)
}

/// Removes what injection adds from an object.
///
/// # Errors
/// When it cannot be read, or is a part of the control plane.
pub(super) fn uninject(object: &mut Value, place: &Place) -> Result<Entry, Unusable> {
    let role = Role::of(object);
    let mut entry = entry(object, Outcome::Skipped(None));
    let removed = match role {
        Role::Other => false,
        Role::Namespace | Role::Service => remove_request(object),
        Role::Workload(keys) => {
            typed(object, place, keys)?;
            remove_proxy(object, keys)
        }
    };
    if removed {
        entry.outcome = Outcome::Uninjected;
    }
    Ok(entry)
}

fn entry(object: &Value, outcome: Outcome) -> Entry {
    let kind = text(object, &["kind"]).unwrap_or_default().to_lowercase();
    Entry { kind, name: workload::name(object).to_owned(), outcome, warnings: Vec::new() }
}

fn into_workload(
    object: &mut Value,
    place: &Place,
    keys: &'static [&'static str],
    injection: &Injection,
    entry: &mut Entry,
) -> Result<(), Unusable> {
    let display = workload::display(object);
    let was = typed(object, place, keys)?.metadata.unwrap_or_default();
    let was = was.annotations.as_ref().and_then(|annotations| annotations.get(labels::INJECT)).cloned();
    remove_proxy(object, keys);
    if was.as_deref() == Some("disabled") {
        entry.outcome = Outcome::Skipped(Some(SkipReason::AnnotationDisabled.explanation()));
        entry.warnings.push(format!("\"{}: disabled\" annotation set on {display}", labels::INJECT));
        return Ok(());
    }
    let mode = if was.as_deref() == Some("ingress") { "ingress" } else { injection.overrides.mode };
    let metadata = path(&FieldPath::default(), keys).key("metadata");
    let mut all = annotations(mode, injection.overrides);
    if injection.manual.is_some() {
        // The injector would report that it skips this pod, which is what was wanted.
        all.retain(|(name, _)| *name != labels::INJECT);
    }
    annotate(object, keys, all).map_err(|problem| place.unusable(object, metadata.clone(), problem))?;

    let pod = pod(object, place, keys, mode)?;
    let neutral = InjectConfig::new("", "", "");
    let (config, namespace) = match injection.manual {
        Some(manual) => (&manual.config, manual.namespace_of(object)),
        None => (&neutral, None),
    };
    let mut before = pod;
    if let Some(manual) = injection.manual {
        before.metadata.namespace = Some(manual.namespace_name(object));
        before.metadata.owner_references = Some(workload::owners(object)).filter(|owners| !owners.is_empty());
    }
    let after = match inject::inject(&before, namespace, config) {
        Ok(Decision::Injected(after)) => after,
        Ok(Decision::Skipped(reason)) => return Err(not_injectable(object, place, keys, reason)),
        Err(refusal) => {
            let field = match refusal.annotation() {
                Some(annotation) => metadata.key("annotations").key(annotation),
                None => path(&FieldPath::default(), keys).key("spec"),
            };
            // Whether the others are refused depends on settings of the cluster.
            if injection.manual.is_some() || matches!(refusal, Refusal::Annotation(_)) {
                return Err(place.unusable(object, field, refusal));
            }
            entry.warnings.push(format!("{display}: the injector will refuse its pods by default: {refusal}"));
            entry.outcome = Outcome::Injected;
            return Ok(());
        }
    };
    if uses_udp(&before) {
        entry.warnings.push(format!("{display} uses \"protocol: UDP\", which bypasses the proxy"));
    }
    let unread = support::pod_warnings(&after.metadata);
    entry.warnings.extend(unread.iter().map(|invalid| format!("{display}: {invalid}")));
    if injection.manual.is_some() {
        add(object, keys, &Additions::between(&before, &after))
            .map_err(|problem| place.unusable(object, path(&FieldPath::default(), keys), problem))?;
    }
    entry.outcome = Outcome::Injected;
    Ok(())
}

/// The pod template, if there is one and it is not the control plane's.
fn typed(object: &Value, place: &Place, keys: &[&str]) -> Result<PodTemplateSpec, Unusable> {
    let field = || path(&FieldPath::default(), keys);
    let Some(template) = at(object, keys) else {
        return Err(place.unusable(object, field(), "missing, expected a pod template"));
    };
    let typed = workload::template(template)
        .map_err(|(inner, problem)| place.unusable(object, inner.under(field()), problem))?;
    if typed.spec.is_none() {
        return Err(place.unusable(object, field().key("spec"), "missing, expected a pod's specification"));
    }
    let labels_of = |metadata: Option<&ObjectMeta>| metadata.and_then(|metadata| metadata.labels.clone());
    let own = at(object, &["metadata", "labels", labels::CONTROL_PLANE_COMPONENT]).is_some();
    let component =
        labels_of(typed.metadata.as_ref()).is_some_and(|labels| labels.contains_key(labels::CONTROL_PLANE_COMPONENT));
    if own || component {
        let problem = "a part of the control plane, whose proxy the chart adds; leave it out";
        return Err(place.unusable(object, FieldPath::of("metadata.labels"), problem));
    }
    Ok(typed)
}

/// The pod that the object's controller would create, as far as injection looks at it.
fn pod(object: &Value, place: &Place, keys: &[&str], mode: &str) -> Result<Pod, Unusable> {
    let typed = typed(object, place, keys)?;
    let mut metadata = typed.metadata.unwrap_or_default();
    metadata.annotations.get_or_insert_default().insert(labels::INJECT.to_owned(), mode.to_owned());
    Ok(Pod { metadata, spec: typed.spec, status: None })
}

fn uses_udp(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports.any(|port| port.protocol.as_deref() == Some("UDP"))
}

fn not_injectable(object: &Value, place: &Place, keys: &[&str], reason: SkipReason) -> Unusable {
    let spec = path(&FieldPath::default(), keys).key("spec");
    let field = if reason == SkipReason::HostNetwork { spec.key("hostNetwork") } else { spec };
    let problem = format!(
        "failed to inject: {}; leave it out, or give its pods the annotation {}: disabled",
        reason.explanation(),
        labels::INJECT
    );
    place.unusable(object, field, problem)
}

fn annotations(mode: &str, overrides: &Overrides) -> Vec<(&'static str, String)> {
    std::iter::once((labels::INJECT, mode.to_owned())).chain(overrides.annotations.iter().cloned()).collect()
}

fn annotate(object: &mut Value, keys: &[&str], all: Vec<(&'static str, String)>) -> Result<(), String> {
    if all.is_empty() {
        return Ok(());
    }
    let target = at_mut(object, keys).ok_or_else(|| "missing".to_owned())?;
    let annotations = mapping(target, &["metadata", "annotations"])?;
    for (name, value) in all {
        annotations.insert(Value::from(name), Value::from(value));
    }
    Ok(())
}

fn add(object: &mut Value, keys: &[&str], additions: &Additions) -> Result<(), String> {
    let target = at_mut(object, keys).ok_or_else(|| "missing".to_owned())?;
    for (key, added) in [("annotations", &additions.annotations), ("labels", &additions.labels)] {
        let all = mapping(target, &["metadata", key])?;
        for (name, value) in added {
            all.insert(Value::from(name.as_str()), Value::from(value.as_str()));
        }
    }
    let spec = mapping(target, &["spec"])?;
    extend(spec, "initContainers", &additions.init_containers, true)?;
    extend(spec, "containers", &additions.containers, false)?;
    extend(spec, "volumes", &additions.volumes, false)
}

/// Removes the proxy from a workload's pods, their marks, and what asks the injector for it.
fn remove_proxy(object: &mut Value, keys: &[&str]) -> bool {
    let mut removed = remove_request(object);
    removed |= remove_marks(object, keys);
    let Some(spec) = at_mut(object, keys).and_then(|template| template.get_mut("spec")) else { return removed };
    removed |= remove_named(spec, "initContainers", &INIT_CONTAINERS);
    removed |= remove_named(spec, "containers", &CONTAINERS);
    removed | remove_named(spec, "volumes", &VOLUMES)
}

/// Removes an object's own request for proxies.
fn remove_request(object: &mut Value) -> bool {
    let Some(metadata) = object.get_mut("metadata") else { return false };
    remove_entries(metadata, "annotations", |key, value| key == labels::INJECT && !is_refusal(key, value))
}

/// Removes what marks the pods of a mesh. Settings (`config.linkerd.io`) stay, which are the user's.
fn remove_marks(object: &mut Value, keys: &[&str]) -> bool {
    let Some(metadata) = at_mut(object, keys).and_then(|target| target.get_mut("metadata")) else { return false };
    let annotations =
        remove_entries(metadata, "annotations", |key, value| key.starts_with(MARKS) && !is_refusal(key, value));
    let ours = |key: &str| LABELS.contains(&key) || key.starts_with(labels::PROXY_OWNER_PREFIX);
    annotations | remove_entries(metadata, "labels", |key, _| ours(key))
}

/// Whether an annotation says that there must be no proxy, which also stays.
fn is_refusal(key: &str, value: &Value) -> bool {
    key == labels::INJECT && value.as_str() == Some("disabled")
}
