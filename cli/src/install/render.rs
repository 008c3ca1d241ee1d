//! The manifests of a mesh: the chart's, its namespace, and a Secret with what differs from the chart's values.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use k8s_openapi::{
    ByteString,
    api::core::v1::{Namespace, Secret},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::{Map, Value, json};
use weft_k8s_api::labels;

use super::{
    certificates::{self, Given},
    cluster::Object,
    stored::OVERRIDES,
};
use crate::{
    chart::{
        Chart,
        values::{Settings, merge},
    },
    manifest::{self, ManifestFormat, document},
    mesh::installed::PART_OF,
    output,
};

/// What to do about certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Certificates {
    /// Generate them if none are given; given ones must be valid.
    New,
    /// They are the installation's, or given; they must be valid.
    Kept,
    /// They may be invalid.
    Forced,
}

/// The rendered manifests of an installation.
#[derive(Debug)]
pub(super) struct Rendered {
    /// Texts with their objects, in the order in which they should be created.
    pub(super) documents: Vec<(String, Object)>,
}

impl Rendered {
    /// Renders the chart.
    pub(super) fn new(namespace: &str, settings: &Settings, certificates: Certificates) -> Result<Self> {
        let chart = Chart::control_plane()?;
        let mut values = chart.values(settings)?;
        match certificates::given(&values)? {
            Given::Nothing if certificates == Certificates::New => {
                let generated = certificates::generate(trust_domain(&values), namespace)?;
                merge(&mut values, generated);
                output::note(
                    "generated a trust anchor and an issuer, valid for a year; the anchor's key is not kept, so give \
                     certificates of your own (--identity-trust-anchors-file ...) to a mesh that has to last",
                );
            }
            Given::All { anchors, certificate, key } if certificates != Certificates::Forced => {
                let checked = certificates::check(&anchors, &certificate, &key);
                checked
                    .context("certificates that proxies would not trust (`weft upgrade --force` takes them anyway)")?;
            }
            _ => {}
        }
        for value in chart.meaningless(namespace, &values)? {
            output::note(&value);
        }
        let mut texts = chart.manifests(namespace, &values)?;
        texts.push(yaml(&namespace_manifest(namespace))?);
        texts.push(yaml(&overrides_manifest(namespace, &overrides_of(values, &chart.defaults()?))?)?);
        Self::of(texts)
    }

    /// Takes rendered manifests.
    pub(super) fn of(texts: Vec<String>) -> Result<Self> {
        let mut documents = Vec::new();
        for text in texts {
            let object = object(&text)?;
            documents.push((text, object));
        }
        documents.sort_by_key(|(_, object)| object.rank());
        Ok(Self { documents })
    }

    /// As text for `kubectl apply -f -`.
    pub(super) fn text(&self, format: ManifestFormat) -> Result<String> {
        let mut stream = String::new();
        for (text, _) in &self.documents {
            match format {
                ManifestFormat::Yaml => manifest::push(&mut stream, text, format),
                ManifestFormat::Json => {
                    manifest::push(&mut stream, &manifest::text(&document::parse_yaml(text)?, format)?, format);
                }
            }
        }
        Ok(stream)
    }

    /// The rendered objects, in the order in which they should be created.
    pub(super) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.documents.iter().map(|(_, object)| object)
    }
}

fn object(text: &str) -> Result<Object> {
    let value = document::parse_yaml(text).with_context(|| format!("the chart rendered invalid YAML:\n{text}"))?;
    Object::of(&value).with_context(|| format!("the chart rendered YAML that is not a Kubernetes object:\n{text}"))
}

pub(super) fn yaml(value: &impl serde::Serialize) -> Result<String> {
    manifest::text(&serde_yaml_ng::to_value(value)?, ManifestFormat::Yaml)
}

fn trust_domain(values: &Value) -> &str {
    let text = |key: &str| values[key].as_str().filter(|text| !text.is_empty());
    text("identityTrustDomain").or_else(|| text("clusterDomain")).unwrap_or("cluster.local")
}

/// What differs from the defaults, without the issuer, which its Secret has.
fn overrides_of(mut values: Value, defaults: &Value) -> Value {
    if let Some(tls) = values.pointer_mut("/identity/issuer/tls").and_then(Value::as_object_mut) {
        tls.remove("keyPEM");
        tls.remove("crtPEM");
    }
    let mut different = difference(&values, defaults).unwrap_or_else(|| json!({}));
    // They are not removed by the overrides, only not part of them.
    if let Some(tls) = different.pointer_mut("/identity/issuer/tls").and_then(Value::as_object_mut) {
        tls.retain(|_, value| !value.is_null());
    }
    different
}

/// Values that make `values` when they are merged with `defaults`: null for what is absent.
fn difference(values: &Value, defaults: &Value) -> Option<Value> {
    if values == defaults {
        return None;
    }
    let (Some(map), Some(known)) = (values.as_object(), defaults.as_object()) else { return Some(values.clone()) };
    let changed = map.iter().filter_map(|(key, value)| {
        let different = match known.get(key) {
            Some(default) => difference(value, default)?,
            None => value.clone(),
        };
        Some((key.clone(), different))
    });
    let absent = known.keys().filter(|key| !map.contains_key(*key)).map(|key| (key.clone(), Value::Null));
    let different: Map<String, Value> = changed.chain(absent).collect();
    (!different.is_empty()).then_some(Value::Object(different))
}

fn marks(namespace: &str) -> BTreeMap<String, String> {
    let mark = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    let managed_by = ("app.kubernetes.io/managed-by", "weft");
    [mark(PART_OF), mark(managed_by), mark((labels::CONTROL_PLANE_NS, namespace))].into()
}

/// The namespace, which has to admit the agents.
fn namespace_manifest(name: &str) -> Namespace {
    let mut all = marks(name);
    all.insert("linkerd.io/is-control-plane".to_owned(), "true".to_owned());
    all.insert("pod-security.kubernetes.io/enforce".to_owned(), "privileged".to_owned());
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(all),
        annotations: Some([(labels::INJECT.to_owned(), "disabled".to_owned())].into()),
        ..ObjectMeta::default()
    };
    Namespace { metadata, ..Namespace::default() }
}

fn overrides_manifest(namespace: &str, overrides: &Value) -> Result<Secret> {
    let text = yaml(overrides)?;
    let metadata = ObjectMeta {
        name: Some(OVERRIDES.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(marks(namespace)),
        ..ObjectMeta::default()
    };
    let data = [(OVERRIDES.to_owned(), ByteString(text.into_bytes()))].into();
    Ok(Secret { metadata, data: Some(data), type_: Some("Opaque".to_owned()), ..Secret::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::values::overlay;

    #[test]
    fn overrides_are_what_differs() {
        let defaults =
            json!({"a": 1, "b": {"c": 2, "d": [1]}, "identity": {"issuer": {"tls": {"crtPEM": "", "keyPEM": ""}}}});
        let values = json!({
            "a": 1, "b": {"c": 3, "d": [1], "e": {}},
            "identity": {"issuer": {"tls": {"crtPEM": "x", "keyPEM": "secret"}}},
        });
        let overrides = overrides_of(values, &defaults);
        assert_eq!(overrides["b"], json!({"c": 3, "e": {}}));
        assert!(!overrides.to_string().contains("secret") && !overrides.to_string().contains("null"), "{overrides}");
        assert_eq!(overrides.get("a"), None);
    }

    #[test]
    fn merging_the_difference_gives_the_values_again() {
        let defaults = json!({"a": 1, "b": {"c": 2, "d": 4}, "l": [1], "gone": {"x": 1}});
        let values = json!({"a": 1, "b": {"c": 3, "d": 4}, "l": [2]});
        let mut merged = defaults.clone();
        overlay(&mut merged, difference(&values, &defaults).unwrap());
        assert_eq!(merged, values);
        assert_eq!(difference(&defaults, &defaults), None);
    }

    #[test]
    fn the_namespace_admits_the_agents() {
        let text = yaml(&namespace_manifest("linkerd")).unwrap();
        assert!(text.contains("pod-security.kubernetes.io/enforce: privileged"), "{text}");
    }
}
