//! Publishes the state to the control plane: one manifest per object, as in an API server, in a watched directory.
//!
//! Owns the content of running Pods and EndpointSlices, which the kubelet and a controller write in a cluster.

use std::{
    collections::HashMap,
    fs, io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use k8s_openapi::{
    api::{
        core::v1::{ObjectReference, Pod, PodCondition, PodIP, PodStatus, Service, ServicePort},
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice},
    },
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use serde::Serialize;
use serde_json::Value;
use weft_k8s_api::{labels, manifest::Object};

use crate::{
    config::NODE_NAME,
    host::services::{Protocol, VirtualService},
    state::write_atomically,
};

/// A pod with addresses.
#[derive(Clone, Debug)]
pub(super) struct RunningPod {
    /// The desired pod.
    pub(super) pod: Pod,
    /// Its addresses, IPv4 first.
    pub(super) ips: Vec<IpAddr>,
    /// Whether it is ready for traffic.
    pub(super) ready: bool,
}

/// Keeps the directory equal to what was last published.
#[derive(Debug)]
pub(super) struct Publisher {
    dir: PathBuf,
    written: HashMap<String, String>,
}

impl Publisher {
    /// Publishes into an empty directory, which is created.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub(super) fn create(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir, written: HashMap::new() })
    }

    /// Writes changed files, then removes stale ones.
    ///
    /// # Errors
    /// When the directory is not writable; the next call retries the rest.
    pub(super) fn publish(&mut self, objects: &[Value]) -> io::Result<()> {
        let mut current = HashMap::with_capacity(objects.len());
        for object in objects {
            let file = file_name(object);
            let text = serde_json::to_string_pretty(object)?;
            if self.written.get(&file) != Some(&text) {
                write_atomically(&self.dir.join(&file), text.as_bytes())?;
            }
            current.insert(file, text);
        }
        for file in self.written.keys().filter(|file| !current.contains_key(*file)) {
            match fs::remove_file(self.dir.join(file)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        self.written = current;
        Ok(())
    }
}

/// A name of its own for each object: two kinds of different groups may have the same name.
fn file_name(object: &Value) -> String {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or("-").to_lowercase();
    let version = text("/apiVersion");
    let group = version.split_once('/').map_or("core", |(group, _)| group);
    format!("{}.{group}_{}_{}.json", text("/kind"), text("/metadata/namespace"), text("/metadata/name"))
}

/// An object as JSON.
pub(super) fn json<T: Serialize>(object: &T) -> Value {
    serde_json::to_value(object).expect("Kubernetes types are plain data")
}

/// An object of the manifests as JSON; `None` for kinds that are not published unchanged.
pub(super) fn json_of(object: &Object) -> Option<Value> {
    Some(match object {
        Object::Namespace(object) => json(object),
        Object::ServiceAccount(object) => json(object),
        Object::Server(object) => json(object),
        Object::ServerAuthorization(object) => json(object),
        Object::AuthorizationPolicy(object) => json(object),
        Object::MeshTLSAuthentication(object) => json(object),
        Object::NetworkAuthentication(object) => json(object),
        Object::HttpLocalRateLimitPolicy(object) => json(object),
        Object::HttpRoute(object) => json(object),
        Object::GatewayHttpRoute(object) => json(object),
        Object::GrpcRoute(object) => json(object),
        Object::ServiceProfile(object) => json(object),
        _ => return None,
    })
}

/// The pod as the API server would show it while it runs.
pub(super) fn running_pod(running: &RunningPod) -> Pod {
    let mut pod = running.pod.clone();
    if let Some(spec) = &mut pod.spec {
        spec.node_name = Some(NODE_NAME.to_owned());
    }
    let ready = if running.ready { "True" } else { "False" };
    pod.status = Some(PodStatus {
        phase: Some("Running".to_owned()),
        pod_ip: running.ips.first().map(ToString::to_string),
        pod_ips: Some(running.ips.iter().map(|ip| PodIP { ip: ip.to_string() }).collect()),
        conditions: Some(vec![PodCondition {
            type_: "Ready".to_owned(),
            status: ready.to_owned(),
            ..PodCondition::default()
        }]),
        ..PodStatus::default()
    });
    pod
}

/// A Service's slices: one for each of its address families. Without `ipFamilies` that is IPv4 alone, as in a cluster
/// whose first family is IPv4. None for a Service without selector.
pub(super) fn endpoint_slices(service: &Service, pods: &[RunningPod]) -> Vec<EndpointSlice> {
    let Some(spec) = &service.spec else { return Vec::new() };
    let Some(selector) = spec.selector.as_ref().filter(|selector| !selector.is_empty()) else { return Vec::new() };
    let selected: Vec<&RunningPod> = pods
        .iter()
        .filter(|running| {
            let labels = running.pod.metadata.labels.as_ref();
            running.pod.metadata.namespace == service.metadata.namespace
                && selector.iter().all(|(key, value)| labels.and_then(|labels| labels.get(key)) == Some(value))
        })
        .collect();
    let single = ["IPv4".to_owned()];
    let families = spec.ip_families.as_deref().filter(|families| !families.is_empty()).unwrap_or(&single);
    families.iter().map(|family| slice(service, &selected, family)).collect()
}

fn slice(service: &Service, selected: &[&RunningPod], family: &str) -> EndpointSlice {
    let endpoints: Vec<Endpoint> = selected
        .iter()
        .filter_map(|running| {
            let ip = running.ips.iter().find(|ip| ip.is_ipv6() == (family == "IPv6"))?;
            Some(Endpoint {
                addresses: vec![ip.to_string()],
                conditions: Some(EndpointConditions {
                    ready: Some(running.ready),
                    serving: Some(running.ready),
                    ..EndpointConditions::default()
                }),
                hostname: running.pod.spec.as_ref().and_then(|spec| spec.hostname.clone()),
                node_name: Some(NODE_NAME.to_owned()),
                target_ref: Some(ObjectReference {
                    kind: Some("Pod".to_owned()),
                    namespace: running.pod.metadata.namespace.clone(),
                    name: running.pod.metadata.name.clone(),
                    uid: running.pod.metadata.uid.clone(),
                    ..ObjectReference::default()
                }),
                ..Endpoint::default()
            })
        })
        .collect();
    let name = service.metadata.name.clone().unwrap_or_default();
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    EndpointSlice {
        metadata: ObjectMeta {
            name: Some(format!("{name}-{}", family.to_lowercase())),
            namespace: service.metadata.namespace.clone(),
            labels: Some([(labels::SERVICE_NAME.to_owned(), name)].into()),
            ..ObjectMeta::default()
        },
        address_type: family.to_owned(),
        endpoints: Some(endpoints),
        ports: Some(
            ports
                .iter()
                .map(|port| EndpointPort {
                    name: Some(port.name.clone().unwrap_or_default()),
                    port: target_port(port, selected),
                    protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".to_owned())),
                    app_protocol: port.app_protocol.clone(),
                })
                .collect(),
        ),
    }
}

/// The port in the pods. A name is resolved in the first selected pod that defines it. Kubernetes would make a slice
/// for every different port; here all pods of one Service are replicas of one template.
fn target_port(port: &ServicePort, selected: &[&RunningPod]) -> Option<i32> {
    match &port.target_port {
        None => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::String(name)) => selected.iter().find_map(|running| {
            let containers = running.pod.spec.as_ref()?.containers.iter();
            let mut ports = containers.flat_map(|container| container.ports.as_deref().unwrap_or_default());
            ports.find(|port| port.name.as_ref() == Some(name)).map(|port| port.container_port)
        }),
    }
}

/// The node's translations for clients outside the mesh: each cluster IP and port to its ready endpoints.
pub(super) fn virtual_services(services: &[Service], slices: &[EndpointSlice]) -> Vec<VirtualService> {
    let mut all = Vec::new();
    for service in services {
        let Some(spec) = &service.spec else { continue };
        let Some(address) = spec.cluster_ip.as_deref().and_then(|ip| ip.parse::<IpAddr>().ok()) else { continue };
        for port in spec.ports.as_deref().unwrap_or_default() {
            let protocol = match port.protocol.as_deref() {
                Some("UDP") => Protocol::Udp,
                Some("SCTP") => continue,
                _ => Protocol::Tcp,
            };
            let Ok(number) = u16::try_from(port.port) else { continue };
            let endpoints = slices_of(service, slices)
                .flat_map(|slice| ready_addresses(slice, port.name.as_deref().unwrap_or_default()))
                .filter(|endpoint| endpoint.is_ipv4() == address.is_ipv4())
                .collect();
            all.push(VirtualService { address, port: number, protocol, endpoints });
        }
    }
    all
}

/// The slices of a Service.
pub(super) fn slices_of<'a>(
    service: &'a Service,
    slices: &'a [EndpointSlice],
) -> impl Iterator<Item = &'a EndpointSlice> {
    slices.iter().filter(|slice| {
        let owner = slice.metadata.labels.as_ref().and_then(|labels| labels.get(labels::SERVICE_NAME));
        slice.metadata.namespace == service.metadata.namespace && owner == service.metadata.name.as_ref()
    })
}

fn ready_addresses(slice: &EndpointSlice, port_name: &str) -> Vec<SocketAddr> {
    let ports = slice.ports.as_deref().unwrap_or_default();
    let port = ports.iter().find(|port| port.name.as_deref().unwrap_or_default() == port_name);
    let Some(port) = port.and_then(|port| u16::try_from(port.port?).ok()) else { return Vec::new() };
    let ready = ready_endpoints(slice);
    ready
        .flat_map(|endpoint| &endpoint.addresses)
        .filter_map(|address| Some(SocketAddr::new(address.parse().ok()?, port)))
        .collect()
}

/// The endpoints that are ready for traffic; unset means ready, as in Kubernetes.
pub(super) fn ready_endpoints(slice: &EndpointSlice) -> impl Iterator<Item = &Endpoint> {
    slice
        .endpoints
        .iter()
        .flatten()
        .filter(|endpoint| endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_two_kinds_with_one_name_have_two_files() {
        let route = |version: &str| {
            file_name(&serde_json::json!({"apiVersion": version, "kind": "HTTPRoute",
                "metadata": {"name": "r", "namespace": "shop"}}))
        };
        assert_eq!(route("policy.linkerd.io/v1beta3"), "httproute.policy.linkerd.io_shop_r.json");
        assert_eq!(route("gateway.networking.k8s.io/v1"), "httproute.gateway.networking.k8s.io_shop_r.json");
        // Another version of the same object.
        assert_eq!(route("gateway.networking.k8s.io/v1beta1"), route("gateway.networking.k8s.io/v1"));
        let pod =
            serde_json::json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "r", "namespace": "shop"}});
        assert_eq!(file_name(&pod), "pod.core_shop_r.json");
    }

    fn service() -> Service {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"clusterIP": "10.96.0.100", "selector": {"app": "web"},
                     "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
        }))
        .unwrap()
    }

    fn pod(name: &str, app: &str, ip: &str, ready: bool) -> RunningPod {
        let pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": name, "namespace": "shop", "labels": {"app": app}},
            "spec": {"containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}]}
        }))
        .unwrap();
        RunningPod { pod, ips: vec![ip.parse().unwrap(), "fd00::1".parse().unwrap()], ready }
    }

    #[test]
    fn routes_of_both_groups_are_published_beside_each_other() {
        let route = |version: &str| {
            let object = serde_json::json!({"apiVersion": version, "kind": "HTTPRoute",
                "metadata": {"name": "r", "namespace": "shop"},
                "spec": {"parentRefs": [{"group": "policy.linkerd.io", "kind": "Server", "name": "s"}]}});
            let read = weft_k8s_api::manifest::parse("test.json".as_ref(), &object.to_string());
            json_of(&read.objects[0].object).unwrap()
        };
        let routes = [route("policy.linkerd.io/v1beta3"), route("gateway.networking.k8s.io/v1")];
        let dir = tempfile::tempdir().unwrap();
        Publisher::create(dir.path().to_path_buf()).unwrap().publish(&routes).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn slices_hold_the_selected_pods_by_family() {
        let mut service = service();
        service.spec.as_mut().unwrap().ip_families = Some(vec!["IPv4".to_owned(), "IPv6".to_owned()]);
        let pods = [pod("a", "web", "10.244.0.10", true), pod("b", "other", "10.244.0.11", true)];
        let slices = endpoint_slices(&service, &pods);
        assert_eq!(slices.iter().map(|slice| slice.address_type.as_str()).collect::<Vec<_>>(), ["IPv4", "IPv6"]);
        assert_eq!(ready_endpoints(&slices[0]).count(), 1);
        assert_eq!(slices[0].ports.as_ref().unwrap()[0].port, Some(8080));
    }

    #[test]
    fn only_ready_endpoints_are_translated_to() {
        let pods = [pod("a", "web", "10.244.0.10", true), pod("b", "web", "10.244.0.11", false)];
        let slices = endpoint_slices(&service(), &pods);
        let all = virtual_services(&[service()], &slices);
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].endpoints, ["10.244.0.10:8080".parse().unwrap()]);
    }

    #[test]
    fn the_directory_follows_what_is_published() {
        let dir = tempfile::tempdir().unwrap();
        let mut publisher = Publisher::create(dir.path().join("published")).unwrap();
        let files = || -> usize { fs::read_dir(dir.path().join("published")).unwrap().count() };
        publisher.publish(&[json(&service()), json(&pod("a", "web", "10.0.0.1", true).pod)]).unwrap();
        assert_eq!(files(), 2);
        publisher.publish(&[json(&service())]).unwrap();
        assert_eq!(files(), 1);
    }
}
