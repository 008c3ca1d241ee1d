//! Agents of other installations: a node takes one, because two want the same port and the same programs.

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{
    Api, ResourceExt,
    api::{ListParams, PartialObjectMeta},
};

use super::{Fetched, installed::PART_OF, list};
use crate::{
    agent,
    cluster::{Cluster, HELM_RELEASE},
    docs,
    problem::Problem,
};

/// The label that objects of the chart weft-agent have, and those of weft-control-plane do not.
const ALONE: &str = "linkerd.io/cni-resource";

/// Whether a DaemonSet of Weft's agent enrols Linkerd's pods, without a control plane of Weft.
pub(super) fn is_alone(daemon_set: &impl ResourceExt) -> bool {
    daemon_set.labels().contains_key(ALONE)
}

/// A DaemonSet of Weft's agent beside the one of the mesh in question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OtherAgent {
    namespace: String,
    name: String,
    /// Its release, if helm installed it.
    release: Option<String>,
    /// Whether it enrols Linkerd's pods, without a control plane of Weft.
    is_alone: bool,
}

impl OtherAgent {
    /// Those of a cluster.
    pub(crate) async fn list(cluster: &Cluster) -> Fetched<Vec<Self>> {
        let api = Api::<PartialObjectMeta<DaemonSet>>::all(cluster.client.clone());
        let (part_of, ours) = PART_OF;
        let selector = format!("{part_of}={ours},{}", agent::SELECTOR);
        let found = list(api, &ListParams::default().labels(&selector)).await?;
        let all = found.iter().map(Self::of);
        Ok(all.filter(|found| !found.is_of(&cluster.namespace)).collect())
    }

    fn of(found: &PartialObjectMeta<DaemonSet>) -> Self {
        Self {
            namespace: found.namespace().unwrap_or_default(),
            name: found.name_any(),
            release: found.annotations().get(HELM_RELEASE).cloned(),
            is_alone: is_alone(found),
        }
    }

    /// Whether it is the agent of the mesh in this namespace.
    fn is_of(&self, namespace: &str) -> bool {
        !self.is_alone && self.namespace == namespace && self.name == agent::DAEMON_SET
    }

    /// Its kind and full name, for messages.
    pub(crate) fn object(&self) -> String {
        format!("DaemonSet {}/{}", self.namespace, self.name)
    }

    /// Its namespace, if it enrols Linkerd's pods, without a control plane of Weft.
    pub(crate) fn alone_in(&self) -> Option<&str> {
        self.is_alone.then_some(self.namespace.as_str())
    }

    /// Which installation it belongs to, as a sentence about [`Self::object`].
    pub(crate) fn description(&self) -> &'static str {
        if self.is_alone { "is Weft's agent alone, for Linkerd" } else { "is the agent of another control plane" }
    }

    /// What `weft status` says of it, where it is asked about a namespace without agents.
    pub(crate) fn status(&self) -> Problem {
        Problem::new(self.object(), self.description(), format!("weft status -L {}", self.namespace))
    }

    /// Why no other agent can be installed beside it.
    pub(crate) fn problem(&self) -> String {
        format!("{}, and a node takes one agent", self.description())
    }

    /// What to do first. Without rules of `linkerd-init`, pods would go around their proxies once the agent is gone.
    pub(crate) fn remedy(&self) -> String {
        let Self { namespace, name, release, is_alone } = self;
        let removal = match release {
            Some(release) => format!("helm uninstall {release} --namespace {namespace}"),
            None => format!("kubectl -n {namespace} delete daemonset {name}"),
        };
        if *is_alone {
            format!(
                "upgrade Linkerd with cniEnabled=false, restart the meshed workloads, and only then `{removal}`: {}",
                docs::page("migration.md")
            )
        } else {
            format!("-L {namespace} for that mesh, or remove it first: {}", docs::page("installation.md"))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The agent alone, as helm installs it.
    pub(crate) fn alone() -> OtherAgent {
        of(&json!({"name": "linkerd-cni", "namespace": "linkerd-cni", "labels": {"linkerd.io/cni-resource": "true"},
            "annotations": {"meta.helm.sh/release-name": "weft-agent"}}))
    }

    /// The agent of a mesh in this namespace.
    pub(crate) fn of_mesh(namespace: &str) -> OtherAgent {
        of(&json!({"name": "weft-agent", "namespace": namespace}))
    }

    fn of(metadata: &Value) -> OtherAgent {
        let object = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata});
        OtherAgent::of(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn the_agent_of_the_mesh_is_no_other() {
        let own = of(&json!({"name": "weft-agent", "namespace": "linkerd"}));
        assert!(own.is_of("linkerd") && !own.is_of("other"));
        let same_name = of(&json!({"name": "weft-agent", "namespace": "linkerd",
            "labels": {"linkerd.io/cni-resource": "true"}}));
        assert!(!same_name.is_of("linkerd") && !alone().is_of("linkerd"));
    }

    #[test]
    fn the_remedy_does_not_begin_with_the_removal_of_an_agent_that_enrols_linkerds_pods() {
        let remedy = alone().remedy();
        let place = |part: &str| remedy.find(part).unwrap_or_else(|| panic!("{remedy}"));
        assert!(place("cniEnabled=false") < place("restart"));
        assert!(place("restart") < place("helm uninstall weft-agent --namespace linkerd-cni"));
        let other = of_mesh("mesh");
        assert!(other.problem().contains("another control plane") && other.remedy().contains("-L mesh"));
    }
}
