//! Which Server selects a workload's port.

use std::sync::Arc;

use weft_k8s_api::{
    policy::{self, ProxyProtocol},
    ports::PortSet,
};

use super::{records::ServerRecord, selectable::Selectable, store::Store};

/// The Server that selects a workload's port: of several the oldest, then the first by name (Linkerd's
/// order).
pub(super) fn server<'a>(store: &'a Store, selectable: Selectable<'_>, port: u16) -> Option<&'a Arc<ServerRecord>> {
    let servers = store.policies(selectable.namespace())?.servers.values();
    let selecting = servers.filter(|server| selects(server, selectable, port));
    selecting.min_by(|a, b| (a.created, &a.key.name).cmp(&(b.created, &b.key.name)))
}

/// Whether the workload's annotation, the default list, or an opaque Server makes a port opaque.
pub(super) fn is_opaque(store: &Store, selectable: Selectable<'_>, port: u16, default: &PortSet) -> bool {
    if selectable.is_opaque(port, default) {
        return true;
    }
    let servers = store.policies(selectable.namespace()).into_iter().flat_map(|policies| policies.servers.values());
    let mut opaque = servers.filter(|server| server.spec.protocol() == Some(ProxyProtocol::Opaque));
    opaque.any(|server| selects(server, selectable, port))
}

/// Whether a Server selects a workload, whatever the port.
pub(super) fn selects_workload(server: &ServerRecord, selectable: Selectable<'_>) -> bool {
    let (selector, labels) = match selectable {
        Selectable::Pod(pod) => (&server.spec.pod_selector, &pod.labels),
        Selectable::External(workload) => (&server.spec.external_workload_selector, &workload.labels),
    };
    selector.as_ref().is_some_and(|selector| policy::selects(selector, Some(labels)))
}

fn selects(server: &ServerRecord, selectable: Selectable<'_>, port: u16) -> bool {
    selects_workload(server, selectable) && selectable.port_is(&server.spec.port, port)
}
