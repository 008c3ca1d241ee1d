//! Names of addresses: Services and pods. An unknown address stays as it is.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;
use weft_sandbox::state::State;

/// Names by address, as last received.
#[derive(Debug, Default)]
pub(super) struct Names(HashMap<IpAddr, String>);

impl Names {
    pub(super) fn of_sandbox(state: &State) -> Self {
        let mut names = Self::default();
        for pod in &state.pods {
            names.put(pod.ips.iter().copied(), "pod", &pod.namespace, &pod.name);
        }
        for service in &state.services {
            names.put(service.cluster_ip, "svc", &service.namespace, &service.name);
        }
        names
    }

    /// A pod on its node's network has the node's addresses, which are not its own.
    pub(super) fn pod(&mut self, pod: &Pod) {
        let on_host = pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
        let addresses = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
        if !on_host {
            let addresses = addresses.filter_map(|ip| ip.ip.parse().ok());
            self.put(addresses, "pod", &pod.namespace().unwrap_or_default(), &pod.name_any());
        }
    }

    pub(super) fn service(&mut self, service: &Service) {
        let spec = service.spec.iter();
        let addresses = spec.clone().flat_map(|spec| spec.cluster_ips.iter().flatten());
        let external = spec.flat_map(|spec| spec.external_ips.iter().flatten());
        let balancers = service.status.iter().flat_map(|status| status.load_balancer.iter());
        let balancers = balancers.flat_map(|of| of.ingress.iter().flatten()).filter_map(|ingress| ingress.ip.as_ref());
        // A headless Service has the address `None`.
        let addresses = addresses.chain(external).chain(balancers).filter_map(|ip| ip.parse().ok());
        self.put(addresses, "svc", &service.namespace().unwrap_or_default(), &service.name_any());
    }

    fn put(&mut self, addresses: impl IntoIterator<Item = IpAddr>, kind: &str, namespace: &str, name: &str) {
        for address in addresses {
            self.0.insert(address, format!("{kind}/{name}.{namespace}"));
        }
    }

    /// The name of the owner of an `ip:port`.
    pub(super) fn of(&self, end: &str) -> Option<&str> {
        let end: SocketAddr = end.parse().ok()?;
        self.0.get(&end.ip().to_canonical()).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn addresses_have_owners() {
        let mut names = Names::default();
        let pod = |name: &str, ip: &str, host: bool| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": name, "namespace": "shop"},
                "spec": {"containers": [], "hostNetwork": host}, "status": {"podIPs": [{"ip": ip}]}}))
            .unwrap()
        };
        let service = |name: &str, ips: &[&str]| -> Service {
            serde_json::from_value(
                json!({"metadata": {"name": name, "namespace": "shop"}, "spec": {"clusterIPs": ips}}),
            )
            .unwrap()
        };
        names.pod(&pod("web-0", "10.244.0.5", false));
        names.pod(&pod("node", "192.0.2.1", true));
        names.service(&service("web", &["10.96.0.20", "fd00::20"]));
        names.service(&service("headless", &["None"]));
        for (end, expected) in [
            ("10.244.0.5:40000", Some("pod/web-0.shop")),
            ("10.96.0.20:80", Some("svc/web.shop")),
            ("[fd00::20]:80", Some("svc/web.shop")),
            ("192.0.2.1:80", None),
            ("nonsense", None),
        ] {
            assert_eq!(names.of(end), expected, "{end}");
        }
        names.pod(&pod("web-1", "10.244.0.5", false));
        assert_eq!(names.of("10.244.0.5:1"), Some("pod/web-1.shop"), "an address may pass to another pod");
    }
}
