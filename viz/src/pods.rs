//! The cluster's pods, followed by one watch: of each what the engine needs, and nothing else.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use anyhow::anyhow;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1;
use kube::{
    Api, Client,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event},
    },
};
use parking_lot::RwLock;
use weft_k8s_api::observe;
use weft_runtime::readiness::Gate;
use weft_viz_core::fleet::{Phase, Pod, ProxyPorts};

use crate::metrics::VizMetrics;

/// The most pods that are kept: about 1 KiB each, so 20 MiB. Further ones are left out, counted and logged once.
const MAX_PODS: usize = 20_000;

/// The pods as the watch knows them; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pods(Arc<RwLock<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// `None` before the first list is complete.
    pods: Option<ByNamespace>,
    /// The list that is being received.
    listing: ByNamespace,
}

#[derive(Debug, Default)]
struct ByNamespace {
    /// By namespace, then by name.
    pods: HashMap<String, BTreeMap<String, Arc<Pod>>>,
    count: usize,
    left_out: usize,
}

impl ByNamespace {
    fn insert(&mut self, pod: Pod) {
        let namespace = self.pods.entry(pod.namespace.clone()).or_default();
        if !namespace.contains_key(&pod.name) {
            if self.count == MAX_PODS {
                self.left_out += 1;
                return;
            }
            self.count += 1;
        }
        namespace.insert(pod.name.clone(), Arc::new(pod));
    }

    fn remove(&mut self, namespace: &str, name: &str) {
        let Some(pods) = self.pods.get_mut(namespace) else { return };
        if pods.remove(name).is_some() {
            self.count -= 1;
        }
        if pods.is_empty() {
            self.pods.remove(namespace);
        }
    }
}

impl Pods {
    /// The pods of a namespace, of all when it is empty; `None` while they are not known yet.
    pub(crate) fn of_namespace(&self, namespace: &str) -> Option<Vec<Arc<Pod>>> {
        let known = self.0.read();
        let pods = &known.pods.as_ref()?.pods;
        Some(match namespace {
            "" => pods.values().flat_map(BTreeMap::values).cloned().collect(),
            namespace => pods.get(namespace).into_iter().flat_map(BTreeMap::values).cloned().collect(),
        })
    }

    /// Follows the cluster's pods; opens the gate after the first list. Errors are logged, and the watch begins again.
    pub(crate) async fn follow(self, client: Client, gate: Gate, metrics: VizMetrics) -> anyhow::Result<()> {
        let mut events =
            watcher::watcher(Api::<v1::Pod>::all(client), watcher::Config::default()).default_backoff().boxed();
        let mut failing = false;
        let mut crowded = false;
        loop {
            match events.try_next().await {
                Ok(Some(event)) => {
                    failing = false;
                    if self.apply(event) {
                        gate.open();
                    }
                }
                Ok(None) => return Err(anyhow!("the watch of pods ended")),
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "watch of pods interrupted");
                    }
                    gate.explain(error.to_string());
                }
            }
            let (count, left_out) = self.size();
            metrics.pods.set(i64::try_from(count).unwrap_or(i64::MAX));
            metrics.pods_left_out.set(i64::try_from(left_out).unwrap_or(i64::MAX));
            if left_out > 0 && !std::mem::replace(&mut crowded, true) {
                tracing::error!(limit = MAX_PODS, "more pods than the limit, the rest are left out of answers");
            }
        }
    }

    /// How many pods are known, and how many are left out.
    fn size(&self) -> (usize, usize) {
        self.0.read().pods.as_ref().map_or((0, 0), |known| (known.count, known.left_out))
    }

    /// Applies an event; true when a list is complete.
    fn apply(&self, event: Event<v1::Pod>) -> bool {
        let mut known = self.0.write();
        let known = &mut *known;
        match event {
            Event::Init => known.listing = ByNamespace::default(),
            Event::InitApply(pod) => known.listing.insert(record(&pod)),
            Event::InitDone => {
                known.pods = Some(std::mem::take(&mut known.listing));
                return true;
            }
            Event::Apply(pod) => {
                if let Some(pods) = &mut known.pods {
                    pods.insert(record(&pod));
                }
            }
            Event::Delete(pod) => {
                if let Some(pods) = &mut known.pods {
                    let metadata = &pod.metadata;
                    pods.remove(
                        metadata.namespace.as_deref().unwrap_or_default(),
                        metadata.name.as_deref().unwrap_or_default(),
                    );
                }
            }
        }
        false
    }
}

/// What the engine needs of a pod.
fn record(pod: &v1::Pod) -> Pod {
    let (metadata, spec, status) = (&pod.metadata, pod.spec.as_ref(), pod.status.as_ref());
    let text = |text: Option<&String>| text.cloned().unwrap_or_default();
    let listed = status.into_iter().flat_map(|status| status.pod_ips.iter().flatten());
    Pod {
        namespace: text(metadata.namespace.as_ref()),
        name: text(metadata.name.as_ref()),
        uid: text(metadata.uid.as_ref()),
        owners: observe::owners(pod),
        labels: metadata.labels.clone().unwrap_or_default(),
        addresses: listed.filter_map(|address| address.ip.parse().ok()).collect(),
        node: text(spec.and_then(|spec| spec.node_name.as_ref())),
        service_account: text(spec.and_then(|spec| spec.service_account_name.as_ref())),
        phase: match status.and_then(|status| status.phase.as_deref()) {
            Some("Running") => Phase::Running,
            Some("Succeeded") => Phase::Succeeded,
            Some("Failed") => Phase::Failed,
            _ => Phase::Pending,
        },
        status: observe::status(pod),
        proxy: observe::listeners(pod).map(|it| ProxyPorts { admin: it.admin, tap: it.tap }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(namespace: &str, name: &str, phase: &str) -> v1::Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": namespace, "name": name, "uid": format!("{namespace}/{name}"), "labels": {"app": "web"}},
            "spec": {"nodeName": "n", "serviceAccountName": "web", "containers": [{"name": "linkerd-proxy"}]},
            "status": {"phase": phase, "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}, {"ip": "?"}]},
        }))
        .unwrap()
    }

    fn names(pods: &Pods, namespace: &str) -> Option<Vec<String>> {
        let mut names: Vec<_> =
            pods.of_namespace(namespace)?.iter().map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
        names.sort();
        Some(names)
    }

    #[test]
    fn a_list_counts_when_it_is_complete_and_replaces_the_last_one() {
        let pods = Pods::default();
        pods.apply(Event::Init);
        pods.apply(Event::InitApply(pod("a", "one", "Running")));
        assert_eq!(names(&pods, ""), None);
        assert!(pods.apply(Event::InitDone));
        pods.apply(Event::Apply(pod("b", "two", "Pending")));
        assert_eq!(names(&pods, "").unwrap(), ["a/one", "b/two"]);
        assert_eq!(names(&pods, "b").unwrap(), ["b/two"]);
        assert_eq!(names(&pods, "c").unwrap(), [""; 0]);
        pods.apply(Event::Init);
        pods.apply(Event::InitApply(pod("b", "three", "Running")));
        assert_eq!(names(&pods, "").unwrap(), ["a/one", "b/two"]);
        pods.apply(Event::InitDone);
        assert_eq!(names(&pods, "").unwrap(), ["b/three"]);
        pods.apply(Event::Delete(pod("b", "three", "Running")));
        assert_eq!((names(&pods, "").unwrap(), pods.size()), (Vec::new(), (0, 0)));
    }

    #[test]
    fn pods_beyond_the_most_are_left_out_and_counted() {
        let mut pods = ByNamespace::default();
        for number in 0..MAX_PODS + 3 {
            pods.insert(record(&pod("a", &number.to_string(), "Running")));
        }
        assert_eq!((pods.count, pods.left_out), (MAX_PODS, 3));
        pods.insert(record(&pod("a", "7", "Failed")));
        assert_eq!((pods.count, pods.pods["a"]["7"].phase), (MAX_PODS, Phase::Failed), "a known pod still changes");
    }

    #[test]
    fn a_record_has_what_the_engine_needs() {
        let record = record(&pod("a", "one", "Running"));
        assert_eq!(record.addresses.len(), 2);
        assert_eq!(record.proxy, Some(ProxyPorts { admin: 4191, tap: None }));
        assert_eq!((record.phase, record.node.as_str(), record.service_account.as_str()), (Phase::Running, "n", "web"));
    }
}
