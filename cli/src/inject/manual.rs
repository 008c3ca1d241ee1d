//! The settings of whole proxies: of the cluster, or the chart's defaults.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result, anyhow};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::Api;
use serde_yaml_ng::Value;
use weft_k8s_api::{inject::InjectConfig, values::Values};
use weft_tls::anchors::TrustAnchors;

use super::workload::{Role, text};
use crate::cluster::{ANSWER, Cluster, within};

/// The chart's own values.
const VALUES: &str = include_str!("../../../charts/weft-control-plane/values.yaml");
/// Namespace of objects without one, if no kubeconfig says another.
const DEFAULT_NAMESPACE: &str = "default";

/// What the injector knows when it decides.
pub(super) struct Manual {
    pub(super) config: InjectConfig,
    default_namespace: String,
    /// Those that workloads are in, and that exist.
    namespaces: BTreeMap<String, Namespace>,
}

impl Manual {
    /// The settings of a cluster, with the namespaces of `objects`.
    ///
    /// # Errors
    /// When the cluster does not answer, or has no settings; the error names the object.
    pub(super) async fn of_cluster(cluster: &Cluster, objects: &[&Value]) -> Result<Self> {
        let values = data(cluster, "linkerd-config", "values").await?;
        let anchors = data(cluster, "linkerd-identity-trust-roots", "ca-bundle.crt").await?;
        let config = Values::parse(&values).and_then(|values| values.inject_config(&cluster.namespace, &anchors));
        let config = config.map_err(|invalid| {
            anyhow!("ConfigMap {}/linkerd-config, data[\"values\"]: {invalid}", cluster.namespace)
        })?;
        let mut manual = Self {
            config,
            default_namespace: cluster.default_namespace.clone(),
            namespaces: namespaces_among(objects)?,
        };
        let api: Api<Namespace> = Api::all(cluster.client.clone());
        for object in objects.iter().filter(|object| matches!(Role::of(object), Role::Workload(_))) {
            let name = manual.namespace_name(object);
            if manual.namespaces.contains_key(&name) {
                continue;
            }
            let found = within(ANSWER, api.get_opt(&name)).await;
            // One that does not exist yet has no annotations.
            if let Some(found) = found.map_err(|problem| anyhow!("Namespace {name}: {problem}"))? {
                manual.namespaces.insert(name, found);
            }
        }
        Ok(manual)
    }

    /// The chart's default settings, with trust anchors from a file.
    ///
    /// # Errors
    /// When the file cannot be used.
    pub(super) fn of_chart(control_namespace: &str, anchors: &Path, objects: &[&Value]) -> Result<Self> {
        let read = || anchors.display().to_string();
        let pem = fs::read_to_string(anchors).with_context(read)?;
        TrustAnchors::from_pem(&pem).with_context(read)?;
        let mut values: Value = serde_yaml_ng::from_str(VALUES).context("the chart's values")?;
        values["linkerdVersion"] = Value::from(env!("CARGO_PKG_VERSION"));
        let text = serde_yaml_ng::to_string(&values).context("the chart's values")?;
        let config = Values::parse(&text).and_then(|values| values.inject_config(control_namespace, &pem))?;
        let namespaces = namespaces_among(objects)?;
        Ok(Self { config, default_namespace: DEFAULT_NAMESPACE.to_owned(), namespaces })
    }

    /// The name of the namespace that an object will be in.
    pub(super) fn namespace_name(&self, object: &Value) -> String {
        text(object, &["metadata", "namespace"]).unwrap_or(&self.default_namespace).to_owned()
    }

    /// That namespace, if it is known.
    pub(super) fn namespace_of(&self, object: &Value) -> Option<&Namespace> {
        self.namespaces.get(&self.namespace_name(object))
    }
}

/// The Namespaces in the manifests themselves.
fn namespaces_among(objects: &[&Value]) -> Result<BTreeMap<String, Namespace>> {
    let mut found = BTreeMap::new();
    for object in objects.iter().filter(|object| Role::of(object) == Role::Namespace) {
        let json = serde_json::to_value(object)?;
        let name = super::workload::name(object).to_owned();
        let namespace = serde_json::from_value(json).with_context(|| format!("namespace/{name}"))?;
        found.insert(name, namespace);
    }
    Ok(found)
}

/// A key of a ConfigMap of the control plane.
async fn data(cluster: &Cluster, name: &str, key: &str) -> Result<String> {
    let namespace = &cluster.namespace;
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let found = within(ANSWER, api.get_opt(name)).await;
    let found = found.map_err(|problem| {
        anyhow!(
            "ConfigMap {namespace}/{name} of {}: {problem}; --manual needs the settings of the cluster, or \
             --ignore-cluster with --identity-trust-anchors-file",
            cluster.server
        )
    })?;
    let found = found.with_context(|| {
        format!(
            "ConfigMap {namespace}/{name} does not exist in {}: the mesh is not installed there, or in another \
             namespace (-L)",
            cluster.server
        )
    })?;
    let value = found.data.and_then(|mut data| data.remove(key));
    value.with_context(|| format!("ConfigMap {namespace}/{name}: data[{key:?}] is missing"))
}
