//! Endpoints, the older list of a Service's endpoints: each of its subsets is like a slice.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointSubset, Endpoints};

use super::{
    Gateway, Key, mirror,
    service::{SliceEndpoint, SliceRecord, pod_of, target},
};

/// The subsets as slices, in order.
pub(crate) fn subsets(endpoints: &Endpoints) -> Vec<SliceRecord> {
    // They have the Service's name.
    let service = Key::of(&endpoints.metadata);
    let gateway = Gateway::new(&endpoints.metadata).map(Arc::new);
    let subset = |subset: &EndpointSubset| {
        let ports = subset.ports.iter().flatten();
        let tcp = ports.filter(|port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"));
        let ports =
            tcp.filter_map(|port| Some((port.name.clone().unwrap_or_default(), u16::try_from(port.port).ok()?)));
        let (mut found, mut problems) = (Vec::new(), Vec::new());
        for address in subset.addresses.iter().flatten() {
            match endpoint(&service.namespace, address, gateway.as_ref()) {
                Ok(endpoint) => found.extend(endpoint),
                Err(problem) if problems.contains(&problem) => {}
                Err(problem) => problems.push(problem),
            }
        }
        let unready = subset.not_ready_addresses.iter().flatten();
        SliceRecord {
            service: service.clone(),
            ports: ports.collect(),
            endpoints: found,
            unready: unready.filter_map(|it| pod_of(&service.namespace, it.target_ref.as_ref())).collect(),
            has_ports: true,
            target_labels: mirror::target_labels(&endpoints.metadata),
            problems,
        }
    };
    endpoints.subsets.iter().flatten().map(subset).collect()
}

/// An address, which is ready. `None` if it is no IP address.
fn endpoint(
    namespace: &str,
    address: &EndpointAddress,
    gateway: Option<&Arc<Gateway>>,
) -> Result<Option<SliceEndpoint>, String> {
    let target = target(namespace, address.target_ref.as_ref(), gateway)?;
    Ok(address.ip.parse().ok().map(|ip| SliceEndpoint {
        addresses: vec![ip],
        hostname: address.hostname.clone(),
        node: address.node_name.clone(),
        zone: None,
        for_zones: Vec::new(),
        target,
    }))
}
