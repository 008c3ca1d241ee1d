//! Which tool installed a mesh, by the ConfigMap that every mesh has, Linkerd's included, or the component weft-viz, by
//! its Deployment.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;

use crate::cluster::HELM_RELEASE;

/// The label that all objects of Weft's charts have.
pub(crate) const PART_OF: (&str, &str) = ("app.kubernetes.io/part-of", "weft");
/// The label with the version of the chart that an object is of.
pub(crate) const CHART_VERSION: &str = "app.kubernetes.io/version";
/// The label of what helm renders, also where another tool applies it and there is no release.
pub(crate) const RENDERED_BY_HELM: (&str, &str) = ("app.kubernetes.io/managed-by", "Helm");

/// Whether a mesh or the component is in a namespace, and which tool installed it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Installed {
    No,
    /// Weft, by helm, in a release of this name.
    ByHelm(String),
    /// Weft, by a tool that applies what `helm template` renders, such as Argo CD: the tool has the values.
    ByTemplate,
    /// Weft, by `weft install | kubectl apply`.
    ByUs,
    /// Another mesh, such as Linkerd.
    ByOthers,
}

impl Installed {
    /// The mesh, by `linkerd-config`.
    pub(crate) fn of(config: Option<&ConfigMap>) -> Self {
        config.map_or(Self::No, Self::by)
    }

    /// What an object is part of. Linkerd's objects have the same names, and helm may have installed them: only the
    /// label says whose chart they are of.
    pub(crate) fn by(object: &impl ResourceExt) -> Self {
        let has = |(key, wanted): (&str, &str)| object.labels().get(key).is_some_and(|value| value == wanted);
        match object.annotations().get(HELM_RELEASE) {
            _ if !has(PART_OF) => Self::ByOthers,
            Some(release) => Self::ByHelm(release.clone()),
            None if has(RENDERED_BY_HELM) => Self::ByTemplate,
            None => Self::ByUs,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_is_known_who_installed() {
        let of = |metadata: serde_json::Value| {
            let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
            Installed::of(Some(&serde_json::from_value(config).unwrap()))
        };
        let (ours, theirs) = (json!({PART_OF.0: "weft"}), json!({PART_OF.0: "Linkerd"}));
        let release = |name: &str| json!({HELM_RELEASE: name});
        assert_eq!(of(json!({"labels": ours})), Installed::ByUs);
        // Helm gives the label to what it installs, and to what it renders for others.
        let by_helm = json!({PART_OF.0: "weft", RENDERED_BY_HELM.0: "Helm"});
        let helms = of(json!({"labels": by_helm, "annotations": release("weft-control-plane")}));
        assert_eq!(helms, Installed::ByHelm("weft-control-plane".to_owned()));
        assert_eq!(of(json!({"labels": by_helm})), Installed::ByTemplate);
        // Linkerd, by its command line and by helm.
        assert_eq!(of(json!({"name": "linkerd-config"})), Installed::ByOthers);
        let linkerd = of(json!({"labels": theirs, "annotations": release("linkerd-control-plane")}));
        assert_eq!(linkerd, Installed::ByOthers);
        assert_eq!(Installed::of(None), Installed::No);
    }
}
