//! Which Server selects a workload's port.

use std::sync::Arc;

use weft_k8s_api::{
    policy::{EVERY_PORT, ProxyProtocol},
    ports::PortSet,
};

use super::{records::ServerRecord, selectable::Selectable, store::Store};

/// The Server that selects a workload's port: of several the oldest, then the first by name (Linkerd's
/// order). One that may select too much, because its port or a selector cannot be read, comes last.
pub(super) fn server<'a>(store: &'a Store, selectable: Selectable<'a>, port: u16) -> Option<&'a Arc<ServerRecord>> {
    let servers = store.policies(selectable.namespace())?.servers.selecting(selectable);
    let is_of_every_port = |server: &ServerRecord| server.is_unreadable && server.spec.port == EVERY_PORT;
    let of_port = servers.filter(|server| is_of_every_port(server) || selectable.port_is(&server.spec.port, port));
    let order = |server: &'a ServerRecord| (server.is_widened, server.created, &server.key.name);
    of_port.min_by(|a, b| order(a).cmp(&order(b)))
}

/// Whether the workload's annotation, the default list, or an opaque Server makes a port opaque.
pub(super) fn is_opaque(store: &Store, selectable: Selectable<'_>, port: u16, default: &PortSet) -> bool {
    if selectable.is_opaque(port, default) {
        return true;
    }
    let Some(policies) = store.policies(selectable.namespace()) else { return false };
    policies.servers.selecting(selectable).any(|server| {
        server.spec.protocol() == Some(ProxyProtocol::Opaque) && selectable.port_is(&server.spec.port, port)
    })
}
