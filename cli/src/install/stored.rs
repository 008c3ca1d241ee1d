//! The stored configuration of an installation: who installed it, the values that differ from the chart's, and its
//! issuer. It is in the cluster, and in the manifests of `weft install`.

use anyhow::{Context as _, Result, anyhow};
use futures::join;
use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, Secret},
};
use kube::Api;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{certificates, cluster, cluster::Object};
use crate::{
    chart::values,
    cluster::{ANSWER, Cluster, within},
    manifest::document::{self, Document},
    mesh::{Fetched, installed::Installed},
};

/// The Secret in which `weft install` stores what differs from the chart's values; Linkerd's name.
pub(super) const OVERRIDES: &str = "linkerd-config-overrides";
/// The Secret with the issuer's certificate and key; Linkerd's name.
const ISSUER: &str = "linkerd-identity-issuer";

/// An installation.
#[derive(Debug)]
pub(super) struct Stored {
    installed: Installed,
    namespace: String,
    /// Where it was looked for: a cluster's address, or the manifests.
    place: String,
    overrides: Fetched<Option<Secret>>,
    issuer: Fetched<Option<Secret>>,
}

impl Stored {
    /// The installation in a cluster.
    ///
    /// # Errors
    /// When the cluster does not say whether there is one.
    pub(super) async fn in_cluster(cluster: &Cluster) -> Result<Self> {
        let installed = cluster::installed(cluster).await?;
        let (overrides, issuer) = match installed {
            Installed::ByUs => {
                let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
                join!(within(ANSWER, api.get_opt(OVERRIDES)), within(ANSWER, api.get_opt(ISSUER)))
            }
            _ => (Ok(None), Ok(None)),
        };
        Ok(Self { installed, namespace: cluster.namespace.clone(), place: cluster.server.clone(), overrides, issuer })
    }

    /// The installation that manifests make in `namespace`; `place` is where they were read.
    ///
    /// # Errors
    /// When one of its objects cannot be read; the error names it.
    pub(super) fn in_manifests(documents: &[Document], place: &str, namespace: &str) -> Result<Self> {
        let config: Option<ConfigMap> = object(documents, "ConfigMap", namespace, "linkerd-config")?;
        Ok(Self {
            installed: Installed::of(config.as_ref()),
            namespace: namespace.to_owned(),
            place: place.to_owned(),
            overrides: Ok(object(documents, "Secret", namespace, OVERRIDES)?),
            issuer: Ok(object(documents, "Secret", namespace, ISSUER)?),
        })
    }

    /// Refuses an installation that this program did not make; `helm` is the command for one of helm's.
    pub(super) fn check_ours(&self, helm: &str) -> Result<()> {
        cluster::ours(&self.installed, &self.namespace, &self.place, helm)
    }

    /// The values of the installation that differ from the chart's, its issuer included.
    ///
    /// # Errors
    /// When they are not there or cannot be read; the error names the Secret.
    pub(super) fn values(&self) -> Result<Value> {
        let text = self.text(OVERRIDES, &self.overrides, OVERRIDES)?.with_context(|| {
            format!(
                "Secret {}/{OVERRIDES} does not exist in {}, so the values of the installation are not known: give them \
                 again to `weft install --ignore-cluster`, and its certificates, because proxies would not trust new \
                 ones: --identity-trust-anchors-file, --identity-issuer-certificate-file, --identity-issuer-key-file",
                self.namespace, self.place
            )
        })?;
        let mut all = values::parsed(&text).with_context(|| self.at(OVERRIDES, OVERRIDES))?;
        let scheme = all["identity"]["issuer"]["scheme"].as_str().unwrap_or("linkerd.io/tls");
        if scheme == "linkerd.io/tls" {
            let pem = |key| {
                let missing = || format!("{}: missing in {}", self.at(ISSUER, key), self.place);
                self.text(ISSUER, &self.issuer, key)?.with_context(missing)
            };
            let (certificate, key) = (pem("crt.pem")?, pem("key.pem")?);
            values::merge(&mut all, certificates::issuer_values(&certificate, &key));
        }
        Ok(all)
    }

    fn at(&self, name: &str, key: &str) -> String {
        format!("Secret {}/{name}, data[{key:?}]", self.namespace)
    }

    fn text(&self, name: &str, secret: &Fetched<Option<Secret>>, key: &str) -> Result<Option<String>> {
        let secret = secret.as_ref().map_err(|problem| anyhow!("Secret {}/{name}: {problem}", self.namespace))?;
        let Some(secret) = secret else { return Ok(None) };
        if let Some(text) = secret.string_data.as_ref().and_then(|texts| texts.get(key)) {
            return Ok(Some(text.clone()));
        }
        let Some(ByteString(bytes)) = secret.data.as_ref().and_then(|data| data.get(key)) else { return Ok(None) };
        String::from_utf8(bytes.clone()).map(Some).with_context(|| format!("{}: not text", self.at(name, key)))
    }
}

/// The last of the objects with this name, as `kubectl apply` would leave it.
fn object<T: DeserializeOwned>(documents: &[Document], kind: &str, namespace: &str, name: &str) -> Result<Option<T>> {
    let mut all = documents
        .iter()
        .flat_map(|document| document::objects(&document.value).into_iter().map(move |value| (document, value)));
    let is_it = |(_, value): &(&Document, &serde_yaml_ng::Value)| {
        Object::of(value).is_some_and(|object| {
            (&*object.api_version, &*object.kind, &*object.name) == ("v1", kind, name)
                && object.namespace.as_deref() == Some(namespace)
        })
    };
    let Some((found, value)) = all.rfind(is_it) else { return Ok(None) };
    let read = serde_yaml_ng::from_value(value.clone());
    read.map(Some).with_context(|| format!("{}: document {}: {kind} {namespace}/{name}", found.source, found.number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chart::{Chart, values::Settings},
        install::render::{Certificates, Rendered},
        manifest::ManifestFormat,
    };

    fn stored(text: &str, namespace: &str) -> Result<Stored> {
        let documents = document::parse(&"old.yaml".into(), text).unwrap();
        Stored::in_manifests(&documents, "old.yaml", namespace)
    }

    /// The manifests of an installation with this value, and what they hold of its values.
    fn installed(set: &str, format: ManifestFormat) -> (String, Result<Value>) {
        let settings = Settings { set: vec![set.to_owned()], ..Settings::default() };
        let text = Rendered::new("mesh", &settings, Certificates::New).unwrap().text(format).unwrap();
        let stored = stored(&text, "mesh").unwrap();
        stored.check_ours("helm upgrade").unwrap();
        let values = stored.values();
        (text, values)
    }

    #[test]
    fn manifests_of_an_installation_render_themselves_again() {
        for format in [ManifestFormat::Yaml, ManifestFormat::Json] {
            let (text, values) = installed("proxy.logLevel=debug", format);
            let settings = Settings { base: Some(values.unwrap()), ..Settings::default() };
            let again = Rendered::new("mesh", &settings, Certificates::Kept).unwrap();
            assert_eq!(again.text(format).unwrap(), text);
        }
    }

    #[test]
    fn objects_may_be_in_a_list_as_kubectl_prints_them() {
        let (text, values) = installed("proxy.logLevel=debug", ManifestFormat::Yaml);
        let documents = document::parse(&"old.yaml".into(), &text).unwrap();
        let items: Vec<_> = documents.iter().map(|document| &document.value).collect();
        let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string();
        assert_eq!(stored(&list, "mesh").unwrap().values().unwrap(), values.unwrap());
    }

    #[test]
    fn a_secret_may_have_texts_and_an_issuer_of_another_tool_is_left_to_it() {
        let (text, values) =
            installed("identity.externalCA=true,identity.issuer.scheme=kubernetes.io/tls", ManifestFormat::Yaml);
        assert_eq!(values.unwrap().pointer("/identity/issuer/tls/crtPEM"), None);
        let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: linkerd-config-overrides, namespace: mesh}\n\
                      stringData:\n  linkerd-config-overrides: 'identity: {issuer: {scheme: kubernetes.io/tls}}'\n";
        let later = stored(&format!("{text}---\n{secret}"), "mesh").unwrap();
        let scheme = serde_json::json!({"identity": {"issuer": {"scheme": "kubernetes.io/tls"}}});
        assert_eq!(later.values().unwrap(), scheme);
    }

    #[test]
    fn what_is_missing_in_manifests_or_cannot_be_read_is_named() {
        let (text, _) = installed("proxy.logLevel=debug", ManifestFormat::Yaml);
        let refused = |text: &str, namespace: &str| {
            let stored = stored(text, namespace);
            let values = stored.and_then(|stored| stored.check_ours("helm upgrade").and_then(|()| stored.values()));
            format!("{:#}", values.unwrap_err())
        };
        let elsewhere = refused(&text, "linkerd");
        assert!(elsewhere.contains("linkerd/linkerd-config does not exist in old.yaml"), "{elsewhere}");
        let chart = Chart::control_plane().unwrap();
        let set = "identity.externalCA=true,identity.issuer.scheme=kubernetes.io/tls";
        let external = Settings { set: vec![set.to_owned()], ..Settings::default() };
        let manifests = chart.manifests("mesh", &chart.values(&external).unwrap()).unwrap();
        let by_template = refused(&manifests.join("\n---\n"), "mesh");
        assert!(
            by_template.contains("Secret mesh/linkerd-config-overrides does not exist in old.yaml"),
            "{by_template}"
        );
        for flag in ["trust-anchors-file", "issuer-certificate-file", "issuer-key-file"] {
            assert!(by_template.contains(&format!("--identity-{flag}")), "{by_template}");
        }
        let without_key = refused(&text.replace("key.pem:", "other.pem:"), "mesh");
        assert!(
            without_key.contains(r#"linkerd-identity-issuer, data["key.pem"]: missing in old.yaml"#),
            "{without_key}"
        );
        let data =
            refused(&text.replace("linkerd-config-overrides: ", "linkerd-config-overrides: '%'\n  no: "), "mesh");
        assert!(data.contains("Secret mesh/linkerd-config-overrides"), "{data}");
    }
}
