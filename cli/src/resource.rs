//! Selection of pods on the command line: by name, or by the labels of a workload.

use std::str::FromStr;

use anyhow::{Context as _, Result, anyhow, bail};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet},
        batch::v1::{CronJob, Job},
        core::v1::{Pod, ReplicationController},
    },
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kube::{Api, ResourceExt as _, api::ListParams, core::Selector};
use serde::de::DeserializeOwned;
use weft_proto::agent::PodRef;
use weft_sandbox::state::{PodState, State};

use crate::{
    cluster::{ANSWER, Cluster, within},
    kind::{Kind, names},
    mesh::list,
};

/// A pod or a workload, as named on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resource {
    kind: Kind,
    /// The namespace in `NAMESPACE/NAME`.
    namespace: Option<String>,
    name: String,
}

/// The label of a Job's pods, and of the Job's name in it.
const JOB_NAME: &str = "batch.kubernetes.io/job-name";

/// The selected pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// `None` means all namespaces.
    pub(crate) namespace: Option<String>,
    /// `None` means all pods, or those that `labels` select.
    pub(crate) pod: Option<String>,
    /// A label selector in the API's syntax.
    pub(crate) labels: Option<String>,
}

impl Resource {
    pub(crate) fn pod(name: String) -> Self {
        Self { kind: Kind::Pod, namespace: None, name }
    }

    /// Whether this is kubectl's name of a kind of pods or workloads.
    pub(crate) fn is_kind(text: &str) -> bool {
        kind(text).is_some()
    }
}

impl FromStr for Resource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("expected NAME, NAMESPACE/NAME or KIND/NAME with a KIND of {}", names(Kind::with_pods()));
        let Some((first, name)) = text.split_once('/') else {
            return if text.is_empty() { Err(wrong()) } else { Ok(Self::pod(text.to_owned())) };
        };
        if first.is_empty() || name.is_empty() || name.contains('/') {
            return Err(wrong());
        }
        Ok(match kind(first) {
            Some(kind) => Self { kind, namespace: None, name: name.to_owned() },
            None => Self { kind: Kind::Pod, namespace: Some(first.to_owned()), name: name.to_owned() },
        })
    }
}

/// The kind of pods or workloads with this name.
fn kind(text: &str) -> Option<Kind> {
    Kind::parse(text).filter(|kind| Kind::with_pods().any(|known| known == *kind))
}

impl Selection {
    /// Selects in a cluster, which knows the pods of a workload.
    pub(crate) async fn in_cluster(
        resource: Option<Resource>,
        namespace: Option<&str>,
        cluster: &Cluster,
    ) -> Result<Self> {
        let Some(resource) = resource else {
            return Ok(Self { namespace: namespace.map(str::to_owned), ..Self::default() });
        };
        let own = resource.namespace.as_deref().or(namespace).unwrap_or(&cluster.default_namespace).to_owned();
        if resource.kind == Kind::Pod {
            return Ok(Self { namespace: Some(own), pod: Some(resource.name), labels: None });
        }
        let labels = labels(&resource, &own, cluster).await?;
        Ok(Self { namespace: Some(own), pod: None, labels: Some(labels) })
    }

    /// Selects in a sandbox, whose pods may be named as for `weft sandbox exec`.
    pub(crate) fn in_sandbox(resource: Option<Resource>, namespace: Option<&str>, state: &State) -> Result<Self> {
        let Some(resource) = resource else { return Self::on_socket(None, namespace) };
        let wanted = Self::on_socket(Some(resource), namespace)?;
        let name = wanted.pod.as_deref().unwrap_or_default();
        let full = wanted.namespace.as_ref().map_or_else(|| name.to_owned(), |namespace| format!("{namespace}/{name}"));
        // The pod may not exist yet.
        Ok(match state.pod(&full) {
            Some(pod) => Self { namespace: Some(pod.namespace.clone()), pod: Some(pod.name.clone()), labels: None },
            None => wanted,
        })
    }

    /// Selects at one agent, which knows pods by name only.
    pub(crate) fn on_socket(resource: Option<Resource>, namespace: Option<&str>) -> Result<Self> {
        let Some(resource) = resource else {
            return Ok(Self { namespace: namespace.map(str::to_owned), ..Self::default() });
        };
        if resource.kind != Kind::Pod {
            bail!(
                "only a cluster knows the pods of a workload: name the pod, or select a cluster (--context, --kubeconfig)"
            );
        }
        let namespace = resource.namespace.or_else(|| namespace.map(str::to_owned));
        Ok(Self { namespace, pod: Some(resource.name), labels: None })
    }

    /// The selected pod of a sandbox.
    pub(crate) fn known<'a>(&self, state: &'a State) -> Result<&'a PodState> {
        let found = self.one().and_then(|pod| state.pod(&format!("{}/{}", pod.namespace, pod.name)));
        found.with_context(|| {
            let name = self.pod.as_deref().unwrap_or_default();
            format!("sandbox `{}` has no pod {name}, or several like it: see `weft sandbox ps`", state.config.name)
        })
    }

    /// The pod, if it is one and its namespace is known.
    pub(crate) fn one(&self) -> Option<PodRef> {
        Some(PodRef { namespace: self.namespace.clone()?, name: self.pod.clone()? })
    }
}

/// The selected pods of a cluster, without those that have ended. None is an error.
pub(crate) async fn pods(cluster: &Cluster, selection: &Selection) -> Result<Vec<Pod>> {
    let api = |namespace: &str| Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    if let (Some(namespace), Some(name)) = (&selection.namespace, &selection.pod) {
        let found = within(ANSWER, api(namespace).get(name)).await;
        return Ok(vec![found.map_err(|error| anyhow!("pod {namespace}/{name}: {error}"))?]);
    }
    let labels = selection.labels.as_deref().unwrap_or_default();
    let wanted = ListParams::default().labels(labels);
    let (api, place) = match &selection.namespace {
        Some(namespace) => (api(namespace), format!("in namespace {namespace}")),
        None => (Api::all(cluster.client.clone()), "in all namespaces".to_owned()),
    };
    let mut found = list(api, &wanted).await.map_err(|error| anyhow!("pods {place}: {error}"))?;
    found.retain(|pod| !crate::mesh::pods::is_over(pod));
    if found.is_empty() {
        bail!(
            "no pod {place} has the labels {labels} and has not ended: its workload may have no replicas, or be in another \
             namespace (-n)"
        );
    }
    Ok(found)
}

async fn labels(resource: &Resource, namespace: &str, cluster: &Cluster) -> Result<String> {
    let name = resource.name.as_str();
    if resource.kind == Kind::CronJob {
        return jobs_of(name, namespace, cluster).await;
    }
    let selector = match resource.kind {
        Kind::Pod | Kind::CronJob | Kind::Namespace | Kind::Service | Kind::Authority => Ok(None),
        Kind::ReplicationController => get::<ReplicationController>(cluster, namespace, name).await.map(|it| {
            let match_labels = it.spec.and_then(|spec| spec.selector)?;
            Some(LabelSelector { match_labels: Some(match_labels), match_expressions: None })
        }),
        Kind::Deployment => get::<Deployment>(cluster, namespace, name).await.map(|it| Some(it.spec.selector)),
        Kind::DaemonSet => get::<DaemonSet>(cluster, namespace, name).await.map(|it| Some(it.spec.selector)),
        Kind::StatefulSet => get::<StatefulSet>(cluster, namespace, name).await.map(|it| Some(it.spec.selector)),
        Kind::ReplicaSet => get::<ReplicaSet>(cluster, namespace, name).await.map(|it| Some(it.spec.selector)),
        Kind::Job => get::<Job>(cluster, namespace, name).await.map(|it| it.spec.and_then(|spec| spec.selector)),
    };
    let what = format!("{:?} {namespace}/{name}", resource.kind);
    let selector = selector.map_err(|error| anyhow!("{what}: {error}"))?;
    text(selector.with_context(|| format!("{what} has no spec.selector"))?)
        .with_context(|| format!("{what}: spec.selector"))
}

/// The pods of a CronJob are those of its Jobs, which it owns.
async fn jobs_of(name: &str, namespace: &str, cluster: &Cluster) -> Result<String> {
    let what = format!("CronJob {namespace}/{name}");
    let owner = get::<CronJob>(cluster, namespace, name).await.map_err(|error| anyhow!("{what}: {error}"))?;
    let jobs = list(Api::<Job>::namespaced(cluster.client.clone(), namespace), &ListParams::default()).await;
    let jobs = jobs.map_err(|error| anyhow!("Jobs of {what}: {error}"))?;
    let own = |job: &&Job| job.owner_references().iter().any(|by| Some(&by.uid) == owner.metadata.uid.as_ref());
    let names: Vec<String> = jobs.iter().filter(own).map(kube::ResourceExt::name_any).collect();
    if names.is_empty() {
        bail!("{what} has no Jobs now: it makes one at its next time");
    }
    Ok(format!("{JOB_NAME} in ({})", names.join(",")))
}

async fn get<K>(cluster: &Cluster, namespace: &str, name: &str) -> Result<K, String>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    K::DynamicType: Default,
{
    within(ANSWER, Api::namespaced(cluster.client.clone(), namespace).get(name)).await
}

fn text(selector: LabelSelector) -> Result<String> {
    Ok(Selector::try_from(selector)?.to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn parse(text: &str) -> Resource {
        text.parse().unwrap()
    }

    #[test]
    fn names_are_kubectls() {
        assert_eq!(parse("web-0"), Resource::pod("web-0".to_owned()));
        assert_eq!(parse("po/web-0"), parse("pod/web-0"));
        assert_eq!(parse("deploy/web").kind, Kind::Deployment);
        assert_eq!(parse("deployment/web"), parse("deploy/web"));
        assert_eq!(parse("cj/report").kind, Kind::CronJob);
        assert_eq!(parse("rc/old").kind, Kind::ReplicationController);
        // A namespace, not a kind: it has no pods of its own.
        assert_eq!((parse("svc/web").kind, parse("ns/web").kind), (Kind::Pod, Kind::Pod));
        let qualified = parse("shop/web-0");
        assert_eq!((qualified.kind, qualified.namespace.as_deref()), (Kind::Pod, Some("shop")));
    }

    #[test]
    fn half_a_name_is_refused_with_what_was_expected() {
        for text in ["", "/", "deploy/", "/web", "a/b/c"] {
            assert!(text.parse::<Resource>().unwrap_err().contains("KIND/NAME"), "{text:?}");
        }
    }

    #[test]
    fn one_agent_knows_pods_but_no_workloads() {
        let pod = Selection::on_socket(Some(parse("shop/web-0")), None).unwrap();
        assert_eq!((pod.namespace.as_deref(), pod.pod.as_deref()), (Some("shop"), Some("web-0")));
        assert!(Selection::on_socket(Some(parse("deploy/web")), None).unwrap_err().to_string().contains("--context"));
    }

    #[test]
    fn a_workloads_selector_becomes_the_apis() {
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let selector = LabelSelector { match_labels: Some(labels), match_expressions: None };
        assert_eq!(text(selector).unwrap(), "app=web");
    }
}
