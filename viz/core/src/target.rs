//! What a request is about: which pods, and which row of the answer a pod or a destination belongs to.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use weft_proto::viz::Resource;

use crate::{
    error::RequestError,
    family::{Name, Series},
    fleet::Pod,
    selector::Selector,
};

/// Kinds of a pod's owners, as in `weft.viz.v1.Resource`.
const OWNERS: [&str; 7] =
    ["cronjob", "deployment", "statefulset", "daemonset", "job", "replicaset", "replicationcontroller"];

/// The key of a row: namespace, kind and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) kind: String,
    pub(crate) name: String,
}

/// A kind of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Namespace,
    Pod,
    /// Whatever a pod belongs to at last: its Deployment, its StatefulSet, itself.
    Workload,
    /// One of [`OWNERS`].
    Owner(&'static str),
    Service,
    Authority,
}

/// A resource of a request, or all of a kind.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Empty: all.
    pub(crate) namespace: String,
    pub(crate) kind: Kind,
    /// Empty: all.
    pub(crate) name: String,
    selector: Selector,
}

/// Pods by namespace and name, for the labels that name pods alone.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    live: ByName,
    /// Also those that are gone.
    counted: ByName,
}

type ByName = HashMap<(String, String), Arc<Pod>>;

impl Pods {
    /// Those that are there, and those that were counted.
    pub(crate) fn new(live: impl IntoIterator<Item = Arc<Pod>>, counted: impl IntoIterator<Item = Arc<Pod>>) -> Self {
        let named = |pod: Arc<Pod>| ((pod.namespace.clone(), pod.name.clone()), pod);
        Self { live: live.into_iter().map(named).collect(), counted: counted.into_iter().map(named).collect() }
    }

    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<&Arc<Pod>> {
        if name.is_empty() {
            return None;
        }
        let key = (namespace.to_owned(), name.to_owned());
        self.live.get(&key).or_else(|| self.counted.get(&key))
    }

    /// Those that are there.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.live.values()
    }
}

impl Key {
    pub(crate) fn new(namespace: &str, kind: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), kind: kind.to_owned(), name: name.to_owned() }
    }

    pub(crate) fn resource(&self) -> Resource {
        Resource { namespace: self.namespace.clone(), kind: self.kind.clone(), name: self.name.clone() }
    }
}

impl Kind {
    fn read(kind: &str) -> Option<Self> {
        Some(match kind {
            "namespace" => Self::Namespace,
            "pod" => Self::Pod,
            "workload" => Self::Workload,
            "service" => Self::Service,
            "authority" => Self::Authority,
            _ => Self::Owner(OWNERS.into_iter().find(|owner| *owner == kind)?),
        })
    }

    /// Whether it is made of pods, which have proxies of their own.
    pub(crate) fn has_pods(self) -> bool {
        !matches!(self, Self::Service | Self::Authority)
    }

    /// The row that a pod belongs to.
    pub(crate) fn row_of(self, pod: &Pod) -> Option<Key> {
        let of_owner = |owner: &(String, String)| Key::new(&pod.namespace, &owner.0, &owner.1);
        match self {
            Self::Namespace => Some(Key::new("", "namespace", &pod.namespace)),
            Self::Pod => Some(Key::new(&pod.namespace, "pod", &pod.name)),
            Self::Workload => {
                let known = pod.owners.iter().rev().find(|(kind, _)| OWNERS.contains(&kind.as_str()));
                Some(known.map_or_else(|| Key::new(&pod.namespace, "pod", &pod.name), of_owner))
            }
            Self::Owner(kind) => pod.owners.iter().find(|(known, _)| known == kind).map(of_owner),
            Self::Service | Self::Authority => None,
        }
    }

    /// The row that the destination of an outbound series belongs to. Its labels name the last owner and the pod;
    /// owners between, the pod itself.
    pub(crate) fn row_of_destination(self, series: &Series, pods: &Pods) -> Option<Key> {
        let namespace = series.label(Name::DstNamespace);
        let of_label = |kind: &str| {
            let name = series.label(Name::of_destination(kind)?);
            (!name.is_empty() && !namespace.is_empty()).then(|| Key::new(namespace, kind, name))
        };
        let of_pod = || self.row_of(pods.get(namespace, series.label(Name::DstPod))?);
        match self {
            Self::Namespace => (!namespace.is_empty()).then(|| Key::new("", "namespace", namespace)),
            Self::Pod => of_label("pod"),
            Self::Workload => {
                of_pod().or_else(|| OWNERS.iter().find_map(|kind| of_label(kind))).or_else(|| of_label("pod"))
            }
            Self::Owner(kind) => of_label(kind).or_else(of_pod),
            Self::Service => of_label("service"),
            Self::Authority => {
                let authority = series.label(Name::Authority);
                (!authority.is_empty()).then(|| Key::new(namespace, "authority", authority))
            }
        }
    }
}

impl Target {
    /// Reads the resource of a request.
    pub(crate) fn read(field: &'static str, resource: Option<Resource>, selector: &str) -> Result<Self, RequestError> {
        let invalid = |message: String| RequestError::Invalid { field, message };
        let resource = resource.ok_or_else(|| invalid("is missing".to_owned()))?;
        let kind = Kind::read(&resource.kind).ok_or_else(|| {
            invalid(format!(
                "{:?} is not one of namespace, pod, workload, service, authority, {}",
                resource.kind,
                OWNERS.join(", ")
            ))
        })?;
        let selector =
            Selector::read(selector).map_err(|message| RequestError::Invalid { field: "selector", message })?;
        let Resource { namespace, name, .. } = resource;
        let namespace = match kind {
            Kind::Namespace if namespace.is_empty() => name.clone(),
            Kind::Namespace if !name.is_empty() && name != namespace => {
                return Err(invalid(format!("namespace {name:?} is not in namespace {namespace:?}")));
            }
            _ => namespace,
        };
        Ok(Self { namespace, kind, name, selector })
    }

    /// As [`Self::read`], of a resource that has pods.
    pub(crate) fn read_with_pods(
        field: &'static str,
        resource: Option<Resource>,
        selector: &str,
    ) -> Result<Self, RequestError> {
        let target = Self::read(field, resource, selector)?;
        if !target.kind.has_pods() {
            let message = "has no pods of its own: name a workload, a pod or a namespace".to_owned();
            return Err(RequestError::Invalid { field, message });
        }
        Ok(target)
    }

    /// The row that a pod belongs to, if the request is about it.
    pub(crate) fn row_of(&self, pod: &Pod) -> Option<Key> {
        if !self.selector.matches(&pod.labels) {
            return None;
        }
        self.kind.row_of(pod).filter(|key| self.has(key) && self.is_in(&pod.namespace))
    }

    /// The row that a destination belongs to, if the request is about it.
    pub(crate) fn row_of_destination(&self, series: &Series, pods: &Pods) -> Option<Key> {
        let key = self.kind.row_of_destination(series, pods)?;
        let is_selected = || {
            let pod = pods.get(series.label(Name::DstNamespace), series.label(Name::DstPod));
            pod.is_some_and(|pod| self.selector.matches(&pod.labels))
        };
        (self.has(&key) && (self.selector == Selector::default() || is_selected())).then_some(key)
    }

    /// Whether a pod is in the namespace and has the labels.
    pub(crate) fn is_of(&self, pod: &Pod) -> bool {
        self.is_in(&pod.namespace) && self.selector.matches(&pod.labels)
    }

    /// The row of an authority, if the request is about it.
    pub(crate) fn authority(&self, namespace: &str, authority: &str) -> Option<Key> {
        let key = Key::new(namespace, "authority", authority);
        (!authority.is_empty() && self.has(&key)).then_some(key)
    }

    fn has(&self, key: &Key) -> bool {
        (self.name.is_empty() || key.name == self.name)
            && (matches!(self.kind, Kind::Namespace) || self.is_in(&key.namespace))
    }

    fn is_in(&self, namespace: &str) -> bool {
        self.namespace.is_empty() || self.namespace == namespace
    }
}

/// Pods of a row by what they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodCounts {
    pub(crate) meshed: u32,
    pub(crate) running: u32,
    pub(crate) failed: u32,
}

/// The rows of a request's pods, and how many pods each has.
pub(crate) fn rows<'a>(target: &Target, pods: impl Iterator<Item = &'a Arc<Pod>>) -> BTreeMap<Key, PodCounts> {
    let mut rows: BTreeMap<Key, PodCounts> = BTreeMap::new();
    for pod in pods {
        let Some(key) = target.row_of(pod) else { continue };
        let counts = rows.entry(key).or_default();
        match pod.phase {
            crate::fleet::Phase::Pending | crate::fleet::Phase::Running => {
                counts.running += 1;
                counts.meshed += u32::from(pod.proxy.is_some());
            }
            crate::fleet::Phase::Failed => counts.failed += 1,
            crate::fleet::Phase::Succeeded => {}
        }
    }
    rows
}
