//! What is installed in a cluster: whether, by whom, with which overrides, and which objects it consists of.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, anyhow, bail};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Namespace, Pod},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams, PartialObjectMeta},
};
use serde_yaml_ng::Value;
use weft_k8s_api::labels;

use crate::{
    cluster::{ANSWER, Cluster, HELM_RELEASE, within},
    component, docs,
    mesh::{
        installed::{Installed, PART_OF},
        list, list_if_served,
    },
};

/// Kinds of objects in the chart: API version, kind, plural, whether they have namespaces.
const KINDS: [(&str, &str, &str, bool); 20] = [
    // The agents see that their DaemonSet is gone, and unload the programs: it is first when things are deleted.
    ("apps/v1", "DaemonSet", "daemonsets", true),
    ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", false),
    ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", false),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", false),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", false),
    ("apps/v1", "Deployment", "deployments", true),
    ("batch/v1", "CronJob", "cronjobs", true),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", true),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", true),
    ("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", true),
    ("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules", true),
    ("v1", "Service", "services", true),
    ("v1", "ConfigMap", "configmaps", true),
    ("v1", "Secret", "secrets", true),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings", true),
    ("rbac.authorization.k8s.io/v1", "Role", "roles", true),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", false),
    ("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", false),
    ("v1", "ServiceAccount", "serviceaccounts", true),
    ("v1", "Namespace", "namespaces", false),
];

/// An object, as far as it takes to delete it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

impl Object {
    /// The object of a manifest.
    pub(super) fn of(value: &Value) -> Option<Self> {
        Some(Self {
            api_version: value["apiVersion"].as_str()?.to_owned(),
            kind: value["kind"].as_str()?.to_owned(),
            namespace: value["metadata"]["namespace"].as_str().map(str::to_owned),
            name: value["metadata"]["name"].as_str()?.to_owned(),
        })
    }

    /// Its place among others that are created: those that others need come first. An unknown kind is last.
    pub(super) fn rank(&self) -> usize {
        KINDS.iter().rev().position(|(_, kind, ..)| *kind == self.kind).unwrap_or(KINDS.len())
    }

    /// A manifest for `kubectl delete -f -`.
    pub(super) fn manifest(&self) -> Value {
        let text = |text: &str| Value::from(text);
        let mut metadata = vec![(text("name"), text(&self.name))];
        metadata.extend(self.namespace.as_deref().map(|namespace| (text("namespace"), text(namespace))));
        let entries = [
            (text("apiVersion"), text(&self.api_version)),
            (text("kind"), text(&self.kind)),
            (text("metadata"), Value::Mapping(metadata.into_iter().collect())),
        ];
        Value::Mapping(entries.into_iter().collect())
    }
}

/// Whether a mesh is installed, and by whom.
pub(super) async fn installed(cluster: &Cluster) -> Result<Installed> {
    let namespace = &cluster.namespace;
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let found = within(ANSWER, api.get_opt("linkerd-config")).await;
    let found =
        found.map_err(|problem| anyhow!("ConfigMap {namespace}/linkerd-config of {}: {problem}", cluster.server))?;
    Ok(Installed::of(found.as_ref()))
}

/// Whether a namespace exists.
pub(super) async fn has_namespace(cluster: &Cluster, name: &str) -> Result<bool> {
    let found = within(ANSWER, Api::<Namespace>::all(cluster.client.clone()).get_metadata_opt(name)).await;
    let found = found.map_err(|problem| anyhow!("Namespace {name} of {}: {problem}", cluster.server))?;
    Ok(found.is_some())
}

/// Where a custom resource definition comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Definition {
    /// It belongs to a helm release.
    pub(super) by_helm: bool,
    /// It has the label of what Weft installs.
    pub(super) is_ours: bool,
}

impl Definition {
    fn of(found: &impl ResourceExt) -> Self {
        Self {
            by_helm: found.annotations().contains_key(HELM_RELEASE),
            is_ours: found.labels().get(PART_OF.0).is_some_and(|value| value == PART_OF.1),
        }
    }
}

/// The custom resource definitions of a cluster.
pub(super) async fn definitions(cluster: &Cluster) -> Result<BTreeMap<String, Definition>> {
    let api: Api<PartialObjectMeta<CustomResourceDefinition>> = Api::all(cluster.client.clone());
    let found = list(api, &ListParams::default()).await;
    let found = found.map_err(|problem| anyhow!("CustomResourceDefinitions of {}: {problem}", cluster.server))?;
    Ok(found.iter().map(|found| (found.name_any(), Definition::of(found))).collect())
}

/// The versions that each CustomResourceDefinition of a cluster serves.
pub(super) async fn served(cluster: &Cluster) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let found = list(api, &ListParams::default()).await;
    let found = found.map_err(|problem| anyhow!("CustomResourceDefinitions of {}: {problem}", cluster.server))?;
    let versions = |definition: CustomResourceDefinition| {
        let served = definition.spec.versions.into_iter().filter(|version| version.served);
        served.map(|version| version.name).collect()
    };
    Ok(found.into_iter().map(|definition| (definition.name_any(), versions(definition))).collect())
}

/// The version of Kubernetes.
pub(super) async fn version(cluster: &Cluster) -> Result<String> {
    let info = within(ANSWER, cluster.client.apiserver_version()).await;
    Ok(info.map_err(|problem| anyhow!("version of {}: {problem}", cluster.server))?.git_version)
}

/// Pods with a proxy of this mesh that have not ended, without those of the control plane and of the component
/// weft-viz: `namespace/name`.
pub(super) async fn meshed(cluster: &Cluster) -> Result<Vec<String>> {
    let api: Api<PartialObjectMeta<Pod>> = Api::all(cluster.client.clone());
    let (namespace, own, other) =
        (&cluster.namespace, labels::CONTROL_PLANE_COMPONENT, component::SELECTOR.replace('=', "!="));
    let selector = format!("{}={namespace},!{own},{other}", labels::CONTROL_PLANE_NS);
    // A Job keeps its pods when they have ended, and nothing reaches them any more.
    let alive = ListParams::default().labels(&selector).fields("status.phase!=Succeeded,status.phase!=Failed");
    let found = list(api, &alive).await;
    let found = found.map_err(|problem| anyhow!("pods of {}: {problem}", cluster.server))?;
    Ok(found.iter().map(|pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())).collect())
}

/// The component weft-viz in a cluster.
#[derive(Debug)]
pub(super) struct InstalledViz {
    namespace: String,
    installed: Installed,
}

impl InstalledViz {
    /// The first one that there is.
    pub(super) async fn find(cluster: &Cluster) -> Result<Option<Self>> {
        let api: Api<PartialObjectMeta<Deployment>> = Api::all(cluster.client.clone());
        let found = list(api, &ListParams::default().labels(component::SELECTOR)).await;
        let found = found.map_err(|problem| anyhow!("Deployments of {}: {problem}", cluster.server))?;
        Ok(found
            .first()
            .map(|found| Self { namespace: found.namespace().unwrap_or_default(), installed: Installed::by(found) }))
    }

    /// Refuses what another tool has to do; `helm` is the command for one of helm's.
    pub(super) fn by_kubectl(&self, helm: &str) -> Result<()> {
        let namespace = &self.namespace;
        match &self.installed {
            Installed::ByHelm(release) => bail!(
                "release {release} of namespace {namespace}, the component weft-viz, belongs to helm: use `{helm} \
                 {release} --namespace {namespace}`"
            ),
            Installed::ByTemplate => bail!(
                "helm rendered the component weft-viz in namespace {namespace} for another tool, such as Argo CD: use \
                 that tool, which has its values"
            ),
            _ => Ok(()),
        }
    }

    /// How it is removed.
    pub(super) fn removal(&self) -> String {
        match &self.installed {
            Installed::ByHelm(release) => format!("`helm uninstall {release} --namespace {}`", self.namespace),
            Installed::ByTemplate => "remove it with the tool that renders its chart, such as Argo CD".to_owned(),
            _ => "`weft viz uninstall | kubectl delete -f -`".to_owned(),
        }
    }
}

/// Every object of the mesh in the cluster, in the order in which they should be deleted.
pub(super) async fn objects(cluster: &Cluster) -> Result<Vec<Object>> {
    let selector = format!("{}={},{}={}", PART_OF.0, PART_OF.1, labels::CONTROL_PLANE_NS, cluster.namespace);
    objects_with(cluster, &selector, &[]).await
}

/// Objects with these labels, of the chart's kinds and of others.
pub(super) async fn objects_with(
    cluster: &Cluster,
    selector: &str,
    others: &[(&'static str, &'static str, &'static str, bool)],
) -> Result<Vec<Object>> {
    let mut objects = Vec::new();
    for (api_version, kind, plural, namespaced) in others.iter().copied().chain(KINDS) {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let resource = ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
            plural: plural.to_owned(),
        };
        let api: Api<PartialObjectMeta<DynamicObject>> = Api::all_with(cluster.client.clone(), &resource);
        // Not every cluster has every kind, such as those of the Prometheus Operator.
        let found = list_if_served(api, &ListParams::default().labels(selector)).await;
        let found = found.map_err(|problem| anyhow!("{plural} of {}: {problem}", cluster.server))?;
        let object = |found: PartialObjectMeta<DynamicObject>| Object {
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
            namespace: found.namespace().filter(|_| namespaced),
            name: found.name_any(),
        };
        objects.extend(found.into_iter().map(object));
    }
    Ok(objects)
}

/// Whether [`objects_with`] lists objects of this kind anyway.
#[cfg(test)]
pub(super) fn is_listed(object: &Object) -> bool {
    KINDS.iter().any(|(version, kind, ..)| *version == object.api_version && *kind == object.kind)
}

/// Refuses a mesh in `namespace` that this program did not install. `place` is where it was looked for, `helm` the
/// command for what helm installed.
pub(super) fn ours(installed: &Installed, namespace: &str, place: &str, helm: &str) -> Result<()> {
    match installed {
        Installed::ByUs => Ok(()),
        Installed::No => bail!(
            "ConfigMap {namespace}/linkerd-config does not exist in {place}: no mesh is installed there, or in another \
             namespace (-L)"
        ),
        Installed::ByHelm(release) => bail!("release {release} of namespace {namespace} belongs to helm: use `{helm}`"),
        Installed::ByTemplate => bail!(
            "helm rendered the mesh in namespace {namespace} for another tool, such as Argo CD: use that tool, which \
             has its values"
        ),
        Installed::ByOthers => bail!(
            "the mesh in namespace {namespace} is not Weft: use the tool that installed it; from Linkerd to Weft: {}",
            docs::page("migration.md")
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        chart::{Chart, values::Settings},
        manifest::document,
    };

    #[test]
    fn every_kind_of_the_chart_is_found_again() {
        let everything = "identity.externalCA=true,identity.issuer.scheme=kubernetes.io/tls,podMonitor.enabled=true,\
                          prometheusRule.enabled=true,networkPolicy.enabled=true,enablePodDisruptionBudget=true,\
                          enableRemoteDiscovery=true,webhookClientCA=PEM";
        let settings = Settings { set: vec![everything.to_owned()], ..Settings::default() };
        let chart = Chart::control_plane().unwrap();
        let manifests = chart.manifests("mesh", &chart.values(&settings).unwrap()).unwrap();
        for text in manifests {
            let object = Object::of(&document::parse_yaml(&text).unwrap()).unwrap();
            let known = KINDS.iter().find(|(version, kind, ..)| *version == object.api_version && *kind == object.kind);
            let (.., namespaced) = known.unwrap_or_else(|| panic!("{object:?}"));
            assert_eq!(object.namespace.is_some(), *namespaced, "{object:?}");
        }
    }

    #[test]
    fn it_is_known_where_a_definition_comes_from() {
        let of = |metadata: serde_json::Value| {
            let found: CustomResourceDefinition = serde_json::from_value(json!({
                "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata,
                "spec": {"group": "a", "names": {"kind": "A", "plural": "as"}, "scope": "Namespaced", "versions": []},
            }))
            .unwrap();
            Definition::of(&found)
        };
        let labels = json!({"app.kubernetes.io/part-of": "weft"});
        assert_eq!(of(json!({"labels": labels})), Definition { by_helm: false, is_ours: true });
        let annotations = json!({"meta.helm.sh/release-name": "weft-crds"});
        let both = json!({"labels": labels, "annotations": annotations});
        assert_eq!(of(both), Definition { by_helm: true, is_ours: true });
        assert_eq!(of(json!({"name": "a"})), Definition { by_helm: false, is_ours: false });
    }

    #[test]
    fn the_component_is_left_to_the_tool_that_installed_it() {
        let component = |installed| InstalledViz { namespace: "linkerd-viz".to_owned(), installed };
        let refused = |installed| component(installed).by_kubectl("helm uninstall").unwrap_err().to_string();
        assert!(component(Installed::ByUs).by_kubectl("helm uninstall").is_ok());
        assert_eq!(component(Installed::ByUs).removal(), "`weft viz uninstall | kubectl delete -f -`");
        let by_helm = || Installed::ByHelm("metrics".to_owned());
        let command = "`helm uninstall metrics --namespace linkerd-viz`";
        assert_eq!(component(by_helm()).removal(), command);
        for (installed, words) in [(by_helm(), command), (Installed::ByTemplate, "use that tool")] {
            let refused = refused(installed);
            assert!(refused.contains(words), "{refused}");
        }
        assert!(component(Installed::ByTemplate).removal().contains("such as Argo CD"));
    }

    #[test]
    fn an_object_to_delete_is_its_name() {
        let text = "apiVersion: apps/v1\nkind: DaemonSet\nmetadata:\n  name: weft-agent\n  namespace: linkerd\n";
        let value = document::parse_yaml(&format!("{text}spec: {{}}\n")).unwrap();
        let object = Object::of(&value).unwrap();
        assert_eq!(object.manifest(), document::parse_yaml(text).unwrap());
    }

    /// The agents have to see that the DaemonSet goes before they lose their rights.
    #[test]
    fn the_agents_go_first_and_the_namespace_last() {
        assert_eq!((KINDS[0].1, KINDS[KINDS.len() - 1].1), ("DaemonSet", "Namespace"));
    }
}
