//! The names of Services and pods, according to Kubernetes' DNS specification 1.1.0. Pure functions.
//!
//! `SERVICE.NAMESPACE.svc.cluster.local` is the cluster IP, or all ready pods of a headless Service;
//! `HOSTNAME.SERVICE...` one pod; `_PORT._PROTOCOL.SERVICE...` is the SRV record of a named port.

use std::{collections::HashMap, net::IpAddr};

use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};

use super::publish::{ready_endpoints, slices_of};
use crate::config::CLUSTER_DOMAIN;

/// A snapshot of every name.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// Keys are in lower case, without the trailing dot.
    addresses: HashMap<String, Vec<IpAddr>>,
    services: HashMap<String, Vec<SrvTarget>>,
}

/// The target of an SRV record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SrvTarget {
    /// A name with addresses.
    pub(super) host: String,
    /// The port there.
    pub(super) port: u16,
}

/// The records of a name.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer<T> {
    /// The name exists and has these records; an empty list means that it has records of other types only.
    Found(Vec<T>),
    /// The name is in the cluster's domain and does not exist.
    NoSuchName,
    /// The name is in another domain.
    NotOurs,
}

impl Names {
    /// Derives all names.
    pub(super) fn of(services: &[Service], slices: &[EndpointSlice]) -> Self {
        let mut names = Self::default();
        for service in services {
            names.add(service, slices);
        }
        names
    }

    fn add(&mut self, service: &Service, slices: &[EndpointSlice]) {
        let Some(spec) = &service.spec else { return };
        let name = format!(
            "{}.{}.svc.{CLUSTER_DOMAIN}",
            service.metadata.name.as_deref().unwrap_or_default(),
            service.metadata.namespace.as_deref().unwrap_or("default")
        );
        let ports = spec.ports.as_deref().unwrap_or_default();
        if let Some(ip) = spec.cluster_ip.as_deref().and_then(|ip| ip.parse().ok()) {
            self.addresses.insert(name.clone(), vec![ip]);
            for port in ports {
                let Ok(number) = u16::try_from(port.port) else { continue };
                self.add_target(&name, port.name.as_deref(), port.protocol.as_deref(), &name, number);
            }
            return;
        }
        // A headless Service. Its name exists even without endpoints.
        self.addresses.entry(name.clone()).or_default();
        for slice in slices_of(service, slices) {
            for endpoint in ready_endpoints(slice) {
                for ip in endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()) {
                    self.addresses.entry(name.clone()).or_default().push(ip);
                    let label = endpoint.hostname.clone().unwrap_or_else(|| ip.to_string().replace(['.', ':'], "-"));
                    let host = format!("{label}.{name}");
                    self.addresses.entry(host.clone()).or_default().push(ip);
                    for port in slice.ports.as_deref().unwrap_or_default() {
                        let Some(number) = port.port.and_then(|port| u16::try_from(port).ok()) else { continue };
                        self.add_target(&name, port.name.as_deref(), port.protocol.as_deref(), &host, number);
                    }
                }
            }
        }
    }

    fn add_target(&mut self, service: &str, port: Option<&str>, protocol: Option<&str>, host: &str, number: u16) {
        let Some(port) = port.filter(|name| !name.is_empty()) else { return };
        let protocol = protocol.unwrap_or("TCP").to_lowercase();
        let targets = self.services.entry(format!("_{port}._{protocol}.{service}")).or_default();
        let target = SrvTarget { host: host.to_owned(), port: number };
        if !targets.contains(&target) {
            targets.push(target);
        }
    }

    /// The addresses of a name.
    pub(super) fn addresses(&self, name: &str) -> Answer<IpAddr> {
        self.look_up(name, &self.addresses)
    }

    /// The targets of a service name.
    pub(super) fn targets(&self, name: &str) -> Answer<SrvTarget> {
        self.look_up(name, &self.services)
    }

    fn look_up<T: Clone>(&self, name: &str, records: &HashMap<String, Vec<T>>) -> Answer<T> {
        let name = name.trim_end_matches('.').to_lowercase();
        if name != CLUSTER_DOMAIN && !name.ends_with(&format!(".{CLUSTER_DOMAIN}")) {
            return Answer::NotOurs;
        }
        if let Some(found) = records.get(&name) {
            return Answer::Found(found.clone());
        }
        let exists = self.addresses.contains_key(&name) || self.services.contains_key(&name);
        if exists { Answer::Found(Vec::new()) } else { Answer::NoSuchName }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::publish::{RunningPod, endpoint_slices};

    fn names(cluster_ip: &str) -> Names {
        let service: Service = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"clusterIP": cluster_ip, "selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}
        }))
        .unwrap();
        let pod = |name: &str, ip: &str, ready| RunningPod {
            pod: serde_json::from_value(serde_json::json!({
                "metadata": {"name": name, "namespace": "shop", "labels": {"app": "web"}}, "spec": {"containers": []}
            }))
            .unwrap(),
            ips: vec![ip.parse().unwrap()],
            ready,
        };
        let pods = [pod("a", "10.244.0.10", true), pod("b", "10.244.0.11", false)];
        Names::of(std::slice::from_ref(&service), &endpoint_slices(&service, &pods))
    }

    #[test]
    fn a_service_is_its_cluster_ip() {
        let names = names("10.96.0.100");
        let ip = Answer::Found(vec!["10.96.0.100".parse().unwrap()]);
        assert_eq!(names.addresses("web.shop.svc.cluster.local"), ip);
        assert_eq!(names.addresses("WEB.shop.svc.cluster.local."), ip);
        let target = SrvTarget { host: "web.shop.svc.cluster.local".into(), port: 80 };
        assert_eq!(names.targets("_http._tcp.web.shop.svc.cluster.local"), Answer::Found(vec![target]));
    }

    #[test]
    fn a_headless_service_is_its_ready_pods() {
        let names = names("None");
        let ip = || Answer::Found(vec!["10.244.0.10".parse().unwrap()]);
        assert_eq!(names.addresses("web.shop.svc.cluster.local"), ip());
        assert_eq!(names.addresses("10-244-0-10.web.shop.svc.cluster.local"), ip());
        let target = SrvTarget { host: "10-244-0-10.web.shop.svc.cluster.local".into(), port: 8080 };
        assert_eq!(names.targets("_http._tcp.web.shop.svc.cluster.local"), Answer::Found(vec![target]));
    }

    #[test]
    fn unknown_names_and_foreign_ones_differ() {
        let names = names("10.96.0.100");
        assert_eq!(names.addresses("nothing.shop.svc.cluster.local"), Answer::NoSuchName);
        assert_eq!(names.addresses("example.com"), Answer::NotOurs);
        assert_eq!(names.targets("web.shop.svc.cluster.local"), Answer::Found(Vec::new()));
    }
}
