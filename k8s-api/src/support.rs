//! How Weft treats each setting of Linkerd: it works, it has no meaning here, or it is not supported yet.
//!
//! One table for every part that needs it: warnings at admission, `weft check`, refusals of the chart, warnings of the
//! proxy, and docs/compatibility.md. `cargo run -p weft-k8s-api --example support` writes the last three; a test fails
//! if they are outdated.

mod annotations;
mod kinds;
mod metrics;
mod proxy_metrics;
mod table;
mod values;
mod variables;

use k8s_openapi::{api::core::v1::EnvVar, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::Deserialize as _;

pub use annotations::{POD_ANNOTATIONS, SERVICE_ANNOTATIONS};
pub use kinds::FIELDS;
pub use metrics::{API_METRICS, DESTINATION_METRICS, DISCOVERY_API_METRICS, POLICY_METRICS};
pub use proxy_metrics::PROXY_METRICS;
pub use table::{chart_values, document, proxy_variables};
pub use values::{DEFINITION_VALUES, UNLISTED_VALUES, VALUES};
pub use variables::VARIABLES;

use crate::{
    field::{FieldPath, Invalid, Step},
    inject, labels,
    policy::route::{GATEWAY_GROUP, ParentReference},
};

/// How Weft treats a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has the same effect as with Linkerd.
    Works,
    /// It is accepted, but what it configures does not exist here.
    Meaningless,
    /// It is refused, or accepted with a warning.
    Unsupported,
}

impl State {
    /// The term in tables.
    pub fn label(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::Meaningless => "no meaning here",
            Self::Unsupported => "not supported yet",
        }
    }
}

/// An annotation, a variable or a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name; a `*` stands for the rest of one.
    pub name: &'static str,
    /// The value that the row is about; empty means any.
    pub value: &'static str,
    /// How Weft treats it.
    pub state: State,
    /// The reason, or its effect.
    pub note: &'static str,
}

impl Setting {
    const fn new(name: &'static str, state: State, note: &'static str) -> Self {
        Self { name, value: "", state, note }
    }
}

/// A kind of resource, or a field of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// API group.
    pub group: &'static str,
    /// Kind.
    pub kind: &'static str,
    /// Dotted path, through lists; empty means the kind.
    pub path: &'static str,
    /// The value that the row is about; empty means any that is set.
    pub value: &'static str,
    /// How Weft treats it.
    pub state: State,
    /// The reason, or its effect.
    pub note: &'static str,
}

impl Field {
    const fn kind(group: &'static str, kind: &'static str, state: State, note: &'static str) -> Self {
        Self { group, kind, path: "", value: "", state, note }
    }

    const fn part(
        group: &'static str,
        kind: &'static str,
        path: &'static str,
        state: State,
        note: &'static str,
    ) -> Self {
        Self { group, kind, path, value: "", state, note }
    }

    const fn value(
        group: &'static str,
        kind: &'static str,
        path: &'static str,
        value: &'static str,
        state: State,
        note: &'static str,
    ) -> Self {
        Self { group, kind, path, value, state, note }
    }
}

/// A Helm value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// Dotted path.
    pub path: &'static str,
    /// How Weft treats it.
    pub state: State,
    /// The reason, or its effect.
    pub note: &'static str,
}

impl Value {
    const fn new(path: &'static str, state: State, note: &'static str) -> Self {
        Self { path, state, note }
    }
}

/// Annotations of a pod, or of a namespace or template for its pods, that are ignored: not supported yet, unreadable,
/// or unknown.
pub fn pod_warnings(metadata: &ObjectMeta) -> Vec<Invalid> {
    let mut found: Vec<_> = inject::ignored_annotations(metadata)
        .into_iter()
        .map(|invalid| Invalid { problem: format!("{}; ignored", invalid.problem), ..invalid })
        .collect();
    for (name, value) in metadata.annotations.iter().flatten() {
        let known = lookup(POD_ANNOTATIONS, name, value);
        let ours = known.is_some() || name.starts_with(labels::OWN_PREFIX);
        let problem = match known {
            Some(row) if row.state == State::Unsupported => unsupported(row.value, row.note),
            None if !ours && labels::INHERITED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) => {
                "unknown annotation; ignored".to_owned()
            }
            _ => continue,
        };
        found.push(FieldPath::annotation(name).invalid(problem));
    }
    found.extend(variable_warnings(metadata));
    found
}

/// Variables of the annotation `proxy-additional-env` that the proxy does not read.
fn variable_warnings(metadata: &ObjectMeta) -> Vec<Invalid> {
    let text = metadata.annotations.as_ref().and_then(|annotations| annotations.get(labels::PROXY_ADDITIONAL_ENV));
    let variables: Vec<EnvVar> = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let unread = variables.iter().filter_map(|variable| {
        let row = lookup(
            VARIABLES,
            variable.name.strip_prefix("LINKERD2_PROXY_")?,
            variable.value.as_deref().unwrap_or_default(),
        );
        let problem = match row {
            Some(row) if row.state == State::Unsupported => unsupported(row.value, row.note),
            Some(_) => return None,
            None => "unknown variable; ignored".to_owned(),
        };
        Some(FieldPath::annotation(labels::PROXY_ADDITIONAL_ENV).key(&variable.name).invalid(problem))
    });
    unread.collect()
}

/// Annotations of a Service or a route that are not supported yet.
pub fn service_warnings(metadata: &ObjectMeta) -> Vec<Invalid> {
    let annotations = metadata.annotations.iter().flatten().chain(metadata.labels.iter().flatten());
    let unsupported_rows = annotations.filter_map(|(name, value)| {
        let row = lookup(SERVICE_ANNOTATIONS, name, value).filter(|row| row.state == State::Unsupported)?;
        let kind = if metadata.annotations.as_ref().is_some_and(|all| all.contains_key(name)) {
            "annotations"
        } else {
            "labels"
        };
        Some(FieldPath::of("metadata").key(kind).key(name).invalid(unsupported(row.value, row.note)))
    });
    unsupported_rows.collect()
}

/// Parts of a custom resource that are not supported yet; `object` as in the API server.
pub fn object_warnings(group: &str, kind: &str, object: &serde_json::Value) -> Vec<Invalid> {
    if is_foreign(group, object) {
        return Vec::new();
    }
    let rows = FIELDS.iter().filter(|row| row.group == group && row.kind == kind && row.state == State::Unsupported);
    let found =
        rows.filter(|row| row.path.is_empty() || has(object, &row.path.split('.').collect::<Vec<_>>(), row.value));
    found
        .map(|row| {
            let path = if row.path.is_empty() {
                FieldPath(vec![Step::Key("kind".to_owned())])
            } else {
                FieldPath::of(row.path)
            };
            path.invalid(unsupported(row.value, row.note))
        })
        .collect()
}

/// Whether an object is another controller's: a route of the Gateway API, none of whose parents Weft acts on.
fn is_foreign(group: &str, object: &serde_json::Value) -> bool {
    let read = |parent| ParentReference::deserialize(parent).ok();
    let parents =
        object.pointer("/spec/parentRefs").and_then(serde_json::Value::as_array).filter(|all| !all.is_empty());
    let is_ours = |parent| read(parent).is_none_or(|parent| parent.resolve(group, "").is_some());
    group == GATEWAY_GROUP && parents.is_some_and(|parents| !parents.iter().any(is_ours))
}

/// Whether something is set at a path, in any element of the lists along it.
fn has(value: &serde_json::Value, path: &[&str], wanted: &str) -> bool {
    use serde_json::Value as Json;
    match (value, path) {
        (Json::Array(list), [_, ..]) => list.iter().any(|element| has(element, path, wanted)),
        (_, [key, rest @ ..]) => value.get(key).is_some_and(|inner| has(inner, rest, wanted)),
        (Json::Null | Json::Bool(false), []) => false,
        (Json::String(text), []) => {
            if wanted.is_empty() {
                !text.is_empty()
            } else {
                text == wanted
            }
        }
        (Json::Array(list), []) => wanted.is_empty() && !list.is_empty(),
        (_, []) => wanted.is_empty(),
    }
}

/// The row of a setting: that of its value, of its name, or of the longest prefix.
fn lookup(rows: &'static [Setting], name: &str, value: &str) -> Option<&'static Setting> {
    let exact = |row: &&Setting| row.name == name && (row.value.is_empty() || row.value == value.trim());
    let named = rows.iter().filter(exact).max_by_key(|row| row.value.len());
    named.or_else(|| {
        let prefixed = |row: &&Setting| row.name.strip_suffix('*').is_some_and(|prefix| name.starts_with(prefix));
        rows.iter().filter(prefixed).max_by_key(|row| row.name.len())
    })
}

fn unsupported(value: &str, note: &str) -> String {
    let what = if value.is_empty() { String::new() } else { format!("{value:?} is ") };
    format!("{what}{}: {note}", State::Unsupported.label())
}

#[cfg(test)]
mod tests;
