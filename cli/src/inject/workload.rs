//! Where an object has its pod template, and its parts in a manifest of which not all is understood.

use k8s_openapi::{api::core::v1::PodTemplateSpec, apimachinery::pkg::apis::meta::v1::OwnerReference};
use serde::Serialize;
use serde_yaml_ng::{Mapping, Value};
use weft_k8s_api::field::{FieldPath, Step};

/// What an object is to injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It has a pod template here; empty for a Pod.
    Workload(&'static [&'static str]),
    Namespace,
    Service,
    /// Nothing is injected into it.
    Other,
}

impl Role {
    /// By the object's API group and kind.
    pub(super) fn of(object: &Value) -> Self {
        let api_version = text(object, &["apiVersion"]).unwrap_or_default();
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        match (group, text(object, &["kind"]).unwrap_or_default()) {
            ("", "Pod") => Self::Workload(&[]),
            ("" | "apps" | "extensions", "Deployment" | "DaemonSet" | "StatefulSet" | "ReplicaSet")
            | ("", "ReplicationController")
            | ("batch", "Job") => Self::Workload(&["spec", "template"]),
            ("batch", "CronJob") => Self::Workload(&["spec", "jobTemplate", "spec", "template"]),
            ("", "Namespace") => Self::Namespace,
            ("", "Service") => Self::Service,
            _ => Self::Other,
        }
    }
}

/// The text at a path.
pub(super) fn text<'a>(object: &'a Value, path: &[&str]) -> Option<&'a str> {
    at(object, path)?.as_str()
}

/// The value at a path.
pub(super) fn at<'a>(object: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter().try_fold(object, |value, key| value.get(key))
}

/// The mutable value at a path.
pub(super) fn at_mut<'a>(object: &'a mut Value, path: &[&str]) -> Option<&'a mut Value> {
    path.iter().try_fold(object, |value, key| value.get_mut(key))
}

/// Its name, or what its name will begin with.
pub(super) fn name(object: &Value) -> &str {
    text(object, &["metadata", "name"]).or_else(|| text(object, &["metadata", "generateName"])).unwrap_or_default()
}

/// Such as `deployment/web`.
pub(super) fn display(object: &Value) -> String {
    format!("{}/{}", text(object, &["kind"]).unwrap_or_default().to_lowercase(), name(object))
}

/// The path of keys below an object.
pub(super) fn path(outer: &FieldPath, keys: &[&str]) -> FieldPath {
    keys.iter().fold(outer.clone(), |path, key| path.key(key))
}

/// The pod template, typed; a Pod is one, too.
pub(super) fn template(value: &Value) -> Result<PodTemplateSpec, (FieldPath, String)> {
    let json = serde_json::to_value(value).map_err(|error| (FieldPath::default(), error.to_string()))?;
    serde_path_to_error::deserialize(json).map_err(|error| {
        use serde_path_to_error::Segment;
        let steps = error.path().iter().filter_map(|segment| match segment {
            Segment::Seq { index } => Some(Step::Index(*index)),
            Segment::Map { key } => Some(Step::Key(key.clone())),
            Segment::Enum { variant } => Some(Step::Key(variant.clone())),
            Segment::Unknown => None,
        });
        (FieldPath(steps.collect()), error.inner().to_string())
    })
}

/// The mapping at a key, which is created if it is absent.
pub(super) fn mapping<'a>(value: &'a mut Value, keys: &[&str]) -> Result<&'a mut Mapping, String> {
    let mut value = value;
    for key in keys {
        let mapping = value.as_mapping_mut().ok_or_else(|| "expected a mapping".to_owned())?;
        value = mapping.entry(Value::from(*key)).or_insert(Value::Null);
        if value.is_null() {
            *value = Value::Mapping(Mapping::new());
        }
    }
    value.as_mapping_mut().ok_or_else(|| format!("{}: expected a mapping", keys.join(".")))
}

/// Puts elements before or after those of a list, which is created if it is absent.
pub(super) fn extend<T: Serialize>(parent: &mut Mapping, key: &str, added: &[T], first: bool) -> Result<(), String> {
    if added.is_empty() {
        return Ok(());
    }
    let added: Result<Vec<_>, _> = added.iter().map(serde_yaml_ng::to_value).collect();
    let added = added.map_err(|error| error.to_string())?;
    let list = parent.entry(Value::from(key)).or_insert(Value::Null);
    if list.is_null() {
        *list = Value::Sequence(Vec::new());
    }
    let list = list.as_sequence_mut().ok_or_else(|| format!("{key}: expected a list"))?;
    let place = if first { 0 } else { list.len() };
    list.splice(place..place, added);
    Ok(())
}

/// Removes the elements with these names, and the list if none is left; whether there was one.
pub(super) fn remove_named(parent: &mut Value, key: &str, names: &[&str]) -> bool {
    let Some(parent) = parent.as_mapping_mut() else { return false };
    let Some(list) = parent.get_mut(key).and_then(Value::as_sequence_mut) else { return false };
    let before = list.len();
    list.retain(|element| !text(element, &["name"]).is_some_and(|name| names.contains(&name)));
    let removed = list.len() < before;
    if removed && list.is_empty() {
        parent.shift_remove(key);
    }
    removed
}

/// Removes the entries for which `goes` holds, and the mapping if none is left; whether there was one.
pub(super) fn remove_entries(parent: &mut Value, key: &str, goes: impl Fn(&str, &Value) -> bool) -> bool {
    let Some(parent) = parent.as_mapping_mut() else { return false };
    let Some(entries) = parent.get_mut(key).and_then(Value::as_mapping_mut) else { return false };
    let before = entries.len();
    entries.retain(|key, value| !key.as_str().is_some_and(|key| goes(key, value)));
    let removed = entries.len() < before;
    if removed && entries.is_empty() {
        parent.shift_remove(key);
    }
    removed
}

/// What the pods of a workload will have as their owner, as far as injection looks at it; empty for a Pod.
pub(super) fn owners(object: &Value) -> Vec<OwnerReference> {
    if Role::of(object) == Role::Workload(&[]) {
        return Vec::new();
    }
    let of = |key: &str| text(object, &[key]).unwrap_or_default().to_owned();
    let owner = OwnerReference {
        api_version: of("apiVersion"),
        kind: of("kind"),
        name: name(object).to_owned(),
        controller: Some(true),
        ..OwnerReference::default()
    };
    vec![owner]
}
