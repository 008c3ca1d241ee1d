//! Whether Services and the pods behind them agree on opaque ports: clients follow the Service's annotation, the
//! pod's proxy its own.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Pod, Service, ServicePort},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt as _;
use weft_k8s_api::{
    labels::OPAQUE_PORTS,
    ports::{self, PortList, PortSet},
};

use super::{
    answer::{Stop, known},
    data_plane::{meshed_applications, services_in_scope},
    facts::{ClusterFacts, Facts},
};
use crate::{mesh::pods, problem::Problem};

/// One problem for each port of a Service: the pods behind it usually have one annotation.
pub(super) fn agree(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let meshed = meshed_applications(facts)?;
    let defaults = default_ports(facts, cluster);
    let mut found = Vec::new();
    for service in services_in_scope(facts, known("Services", &cluster.services)?) {
        let behind: Vec<&Pod> = meshed.iter().copied().filter(|pod| selects(service, pod)).collect();
        let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
        found.extend(ports.filter_map(|port| behind.iter().find_map(|pod| disagree(service, port, pod, &defaults))));
    }
    Ok(found)
}

/// The ports that are opaque without an annotation.
fn default_ports(facts: &Facts, cluster: &ClusterFacts) -> PortSet {
    let config = cluster.values().and_then(|values| values.inject_config(&facts.namespace, "").ok());
    config.map_or_else(ports::default_opaque_ports, |config| config.default_opaque_ports)
}

/// Whether a Service sends connections to a pod. Clients of a headless one connect to its pods themselves.
fn selects(service: &Service, pod: &Pod) -> bool {
    let Some(spec) = &service.spec else { return false };
    let selector: Option<&BTreeMap<_, _>> = spec.selector.as_ref().filter(|selector| !selector.is_empty());
    let matches = |selector: &BTreeMap<String, String>| {
        selector.iter().all(|(name, value)| pod.labels().get(name) == Some(value))
    };
    service.namespace() == pod.namespace()
        && spec.cluster_ip.as_deref() != Some("None")
        && selector.is_some_and(matches)
}

/// What is wrong with a Service's port and its target in this pod. Where neither has the annotation, the injector would
/// set it on both.
fn disagree(service: &Service, port: &ServicePort, pod: &Pod, defaults: &PortSet) -> Option<Problem> {
    // Another check reports entries that cannot be read.
    let list =
        |annotations: &BTreeMap<String, String>| annotations.get(OPAQUE_PORTS).map(|text| PortList::read(text).0);
    let (of_service, of_pod) = (list(service.annotations()), list(pod.annotations()));
    if of_service.is_none() && of_pod.is_none() {
        return None;
    }
    let number = u16::try_from(port.port).ok()?;
    let (target, name) = target(port, pod)?;
    let service_is = of_service.map_or_else(|| defaults.contains(number), |it| it.covers(number, port.name.as_deref()));
    let pod_is = of_pod.map_or_else(|| defaults.contains(target), |it| it.covers(target, name.as_deref()));
    let service_name = format!("{}/{}", service.namespace().unwrap_or_default(), service.name_any());
    let field = format!("metadata.annotations[\"{OPAQUE_PORTS}\"]");
    match (service_is, pod_is) {
        (true, false) => Some(Problem::new(
            format!("Pod {}, {field}", pods::full_name(pod)),
            format!("service {service_name} expects target port {target} to be opaque"),
            format!("add {target} to this annotation of its workload's spec.template"),
        )),
        (false, true) => Some(Problem::new(
            format!("Service {service_name}, {field}"),
            format!("the service targets the opaque port {target} of pod {} through {number}", pods::full_name(pod)),
            format!("add {number} to this annotation"),
        )),
        _ => None,
    }
}

/// Number and name of the pod's port behind a Service's port; `None` if the pod has no such port.
fn target(port: &ServicePort, pod: &Pod) -> Option<(u16, Option<String>)> {
    let spec = pod.spec.as_ref()?;
    let mut declared = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let found = match &port.target_port {
        Some(IntOrString::String(name)) => {
            declared.find(|it| it.name.as_ref() == Some(name)).map(|it| it.container_port)?
        }
        Some(IntOrString::Int(number)) if *number != 0 => *number,
        _ => port.port,
    };
    let mut declared = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let name = declared.find(|it| it.container_port == found).and_then(|it| it.name.clone());
    Some((u16::try_from(found).ok()?, name))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::check::facts::tests::{check, healthy, object};

    /// A mesh with Service `shop/db` in front of Pod `shop/web-0`; the texts are annotations, empty for none.
    fn facts(service: &str, ports: Value, pod: &str) -> Facts {
        let mut facts = healthy();
        let annotations = |text: &str| if text.is_empty() { json!({}) } else { json!({OPAQUE_PORTS: text}) };
        let cluster = facts.cluster.as_mut().unwrap();
        let web = &mut cluster.mesh.meshed.as_mut().unwrap()[0];
        web.metadata.labels = Some([("app".to_owned(), "db".to_owned())].into());
        web.metadata.annotations = Some(object(annotations(pod)));
        web.spec.as_mut().unwrap().containers =
            object(json!([{"name": "db", "ports": [{"name": "mysql", "containerPort": 3307}]}]));
        cluster.services = Ok(vec![object(
            json!({"metadata": {"name": "db", "namespace": "shop", "annotations": annotations(service)},
            "spec": {"clusterIP": "10.96.0.9", "selector": {"app": "db"}, "ports": ports}}),
        )]);
        facts
    }

    const POD: &str = "Pod shop/web-0, metadata.annotations[\"config.linkerd.io/opaque-ports\"]";
    const SERVICE: &str = "Service shop/db, metadata.annotations[\"config.linkerd.io/opaque-ports\"]";

    #[test]
    fn a_port_that_only_the_service_calls_opaque_is_named() {
        let one = |service, ports: Value, pod, part| check(agree(&facts(service, ports, pod)), &[(POD, part)]);
        one("80", json!([{"port": 80}]), "", "service shop/db expects target port 80");
        one("80", json!([{"port": 80, "targetPort": "mysql"}]), "90", "expects target port 3307");
        one("80-90", json!([{"port": 85, "targetPort": 8085}]), "", "expects target port 8085");
        one("sql", json!([{"port": 80, "name": "sql", "targetPort": 1}]), "", "expects target port 1 ");
    }

    #[test]
    fn a_port_that_only_the_pod_calls_opaque_is_named() {
        let one = |service, ports: Value, pod, part| check(agree(&facts(service, ports, pod)), &[(SERVICE, part)]);
        one("", json!([{"port": 80}]), "80", "targets the opaque port 80 of pod shop/web-0 through 80");
        one("81", json!([{"port": 80, "targetPort": 3307}]), "mysql", "opaque port 3307 of pod shop/web-0 through 80");
        one("", json!([{"port": 80, "targetPort": "mysql"}]), "3307", "opaque port 3307");
    }

    #[test]
    fn what_agrees_or_is_not_annotated_is_right() {
        let none = |service, ports: Value, pod| check(agree(&facts(service, ports, pod)), &[]);
        none("80", json!([{"port": 80, "targetPort": "mysql"}]), "mysql");
        none("3306", json!([{"port": 3306}]), "");
        none("", json!([{"port": 3306}]), "3306");
        none("", json!([{"port": 80, "targetPort": 3306}]), "");
        // Another port of the Service, and one that the pod does not have.
        none("80", json!([{"port": 81}]), "");
        none("80", json!([{"port": 80, "targetPort": "http"}]), "");
        none("no list!,80", json!([{"port": 80}]), "80");
    }

    #[test]
    fn services_that_send_nothing_to_the_pod_are_left_alone() {
        for change in [json!({"clusterIP": "None"}), json!({"selector": {"app": "web"}}), json!({"selector": {}})] {
            let mut facts = facts("80", json!([{"port": 80}]), "");
            let service = &mut facts.cluster.as_mut().unwrap().services.as_mut().unwrap()[0];
            let mut spec = serde_json::to_value(&service.spec).unwrap();
            spec.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            service.spec = Some(object(spec));
            check(agree(&facts), &[]);
        }
        let mut elsewhere = facts("80", json!([{"port": 80}]), "");
        elsewhere.data_plane_namespace = Some("other".to_owned());
        check(agree(&elsewhere), &[]);
    }
}
