//! Which Server speaks for a pod's port.

use std::sync::Arc;

use weft_k8s_api::policy::{self, ProxyProtocol};

use super::{
    records::{PodRecord, ServerRecord},
    store::Store,
};

/// The Server that selects a pod's port: of several the oldest, then the first by name (Linkerd's order).
pub(super) fn server<'a>(store: &'a Store, pod: &PodRecord, port: u16) -> Option<&'a Arc<ServerRecord>> {
    let servers = store.policies(&pod.key.namespace)?.servers.values();
    let selecting = servers.filter(|server| selects(server, pod, port));
    selecting.min_by(|a, b| (a.created, &a.key.name).cmp(&(b.created, &b.key.name)))
}

/// Whether the pod's annotation, the default list, or an opaque Server makes a port opaque.
pub(super) fn is_opaque(store: &Store, pod: &PodRecord, port: u16, default: &weft_k8s_api::ports::PortSet) -> bool {
    if pod.is_opaque(port, default) {
        return true;
    }
    let servers = store.policies(&pod.key.namespace).into_iter().flat_map(|policies| policies.servers.values());
    let mut opaque = servers.filter(|server| server.spec.protocol() == Some(ProxyProtocol::Opaque));
    opaque.any(|server| selects(server, pod, port))
}

fn selects(server: &ServerRecord, pod: &PodRecord, port: u16) -> bool {
    let selector = server.spec.pod_selector.as_ref();
    selector.is_some_and(|selector| policy::selects(selector, Some(&pod.labels)))
        && pod.port_is(&server.spec.port, port)
}
