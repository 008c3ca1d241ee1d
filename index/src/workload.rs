//! A pod or an ExternalWorkload as other proxies see it: identity, hints, labels.

use std::{collections::BTreeMap, net::SocketAddr};

use weft_k8s_api::labels;

use super::{
    cluster::{Cluster, TransportMode},
    endpoint::{Endpoint, Hint, PeerIdentity},
    records::{ExternalWorkloadRecord, Key, PodRecord},
    selectable::Selectable,
    selection,
    store::Store,
};

/// The endpoint of a pod's port. `None` if the pod's proxy does not say on which ports it listens: other
/// proxies could not connect to it over mesh TLS.
pub(super) fn endpoint(store: &Store, cluster: &Cluster, pod: &PodRecord, addr: SocketAddr) -> Option<Endpoint> {
    let port = addr.port();
    let opaque = selection::is_opaque(store, Selectable::Pod(pod), port, &cluster.default_opaque_ports);
    let mut endpoint = Endpoint { labels: pod_labels(store, pod), opaque, ..Endpoint::plain(addr) };
    let meshed = pod.control_namespace().filter(|_| !pod.skip_inbound.contains(port));
    let Some(control_namespace) = meshed else { return Some(endpoint) };
    let proxy = pod.proxy?;
    endpoint.hint = Hint::of(opaque, cluster.h2_upgrade);
    endpoint.http2 = true;
    let through_proxy = cluster.transport_mode == TransportMode::TransportHeader || opaque;
    if through_proxy && port != proxy.admin && port != proxy.control {
        endpoint.transport_port = Some(proxy.inbound);
    }
    if control_namespace == cluster.control_namespace {
        let name = cluster.identity(&pod.service_account, &pod.key.namespace);
        endpoint.identity = Some(PeerIdentity::ServiceAccount(name));
    }
    Some(endpoint)
}

/// The endpoint of an ExternalWorkload's port; such workloads are always meshed.
pub(super) fn external_endpoint(
    store: &Store,
    cluster: &Cluster,
    workload: &ExternalWorkloadRecord,
    addr: SocketAddr,
) -> Endpoint {
    let selectable = Selectable::External(workload);
    let opaque = selection::is_opaque(store, selectable, addr.port(), &cluster.default_opaque_ports);
    let mut found = BTreeMap::from([("external_workload".to_owned(), workload.key.name.clone())]);
    if let Some(owner) = &workload.owner {
        found.insert(owner.label(), owner.name.clone());
    }
    if let Some(zone) = workload.labels.get(labels::ZONE) {
        found.insert("zone".to_owned(), zone.clone());
    }
    let through_proxy = cluster.transport_mode == TransportMode::TransportHeader || opaque;
    Endpoint {
        labels: found,
        opaque,
        hint: Hint::of(opaque, cluster.h2_upgrade),
        http2: true,
        transport_port: through_proxy.then_some(workload.inbound_port),
        identity: Some(PeerIdentity::External {
            id: workload.identity.clone(),
            server_name: workload.server_name.clone(),
        }),
        ..Endpoint::plain(addr)
    }
}

/// Labels of a pod's endpoint, as Linkerd's metrics have them.
fn pod_labels(store: &Store, pod: &PodRecord) -> BTreeMap<String, String> {
    let mut found = BTreeMap::from([
        ("pod".to_owned(), pod.key.name.clone()),
        ("serviceaccount".to_owned(), pod.service_account.clone()),
    ]);
    if let Some(namespace) = pod.control_namespace() {
        found.insert("control_plane_ns".to_owned(), namespace.to_owned());
    }
    if let Some(hash) = pod.labels.get(labels::POD_TEMPLATE_HASH) {
        found.insert("pod_template_hash".to_owned(), hash.clone());
    }
    if let Some((kind, name)) = owner(store, pod) {
        found.insert(kind, name);
    }
    found
}

/// The owner's kind as a label, and its name; a Deployment stands for its ReplicaSet, a CronJob for its Job.
fn owner(store: &Store, pod: &PodRecord) -> Option<(String, String)> {
    let owner = pod.owner.as_ref()?;
    if let Some(above) = store.owner_of(&owner.kind, &Key::new(&pod.key.namespace, &owner.name)) {
        return Some((above.label(), above.name.clone()));
    }
    if owner.kind == "ReplicaSet" {
        // If the object is unknown, its name suffices: the Deployment's name and the hash of its template.
        let hash = pod.labels.get(labels::POD_TEMPLATE_HASH);
        if let Some(deployment) = hash.and_then(|hash| owner.name.strip_suffix(hash.as_str())?.strip_suffix('-')) {
            return Some(("deployment".to_owned(), deployment.to_owned()));
        }
    }
    Some((owner.label(), owner.name.clone()))
}
