//! What injection adds to a pod, as data: the webhook turns it into a patch, and the command line into a manifest.
//!
//! Only additions: a comparison of whole objects would rewrite lists with a new first element, and would lose fields
//! that this version does not know.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, Volume};

/// The difference between a pod and the pod that [`super::inject()`] made of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Additions {
    /// Annotations that are new, or have another value.
    pub annotations: BTreeMap<String, String>,
    /// Labels that are new, or have another value.
    pub labels: BTreeMap<String, String>,
    /// Volumes after the pod's own.
    pub volumes: Vec<Volume>,
    /// Init containers before the pod's own.
    pub init_containers: Vec<Container>,
    /// Containers after the pod's own.
    pub containers: Vec<Container>,
}

impl Additions {
    /// What `after` has and `before` has not.
    pub fn between(before: &Pod, after: &Pod) -> Self {
        let (old, new) = (before.spec.as_ref(), after.spec.as_ref());
        let init = |pod: Option<&k8s_openapi::api::core::v1::PodSpec>| {
            pod.and_then(|spec| spec.init_containers.as_ref()).map_or(0, Vec::len)
        };
        let volumes = old.and_then(|spec| spec.volumes.as_ref()).map_or(0, Vec::len);
        let containers = old.map_or(0, |spec| spec.containers.len());
        let first = init(new).saturating_sub(init(old));
        Self {
            annotations: added(before.metadata.annotations.as_ref(), after.metadata.annotations.as_ref()),
            labels: added(before.metadata.labels.as_ref(), after.metadata.labels.as_ref()),
            volumes: new.into_iter().flat_map(|spec| spec.volumes.iter().flatten()).skip(volumes).cloned().collect(),
            init_containers: new
                .into_iter()
                .flat_map(|spec| spec.init_containers.iter().flatten())
                .take(first)
                .cloned()
                .collect(),
            containers: new.into_iter().flat_map(|spec| &spec.containers).skip(containers).cloned().collect(),
        }
    }
}

type Map = BTreeMap<String, String>;

fn added(before: Option<&Map>, after: Option<&Map>) -> Map {
    let known = |key: &String, value: &String| before.and_then(|before| before.get(key)) == Some(value);
    let new = after.into_iter().flatten().filter(|(key, value)| !known(key, value));
    new.map(|(key, value)| (key.clone(), value.clone())).collect()
}
