//! The annotation of opaque ports on objects that are not injected: unmeshed pods and Services, for the proxies that
//! call them (`linkerd2:pkg/inject/inject.go`, CreateOpaquePortsPatch). Services inherit `weft.io/require-mtls`
//! likewise.

use k8s_openapi::{
    api::core::v1::{Namespace, Pod, Service},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};

use super::{InjectConfig, sidecar};
use crate::{
    field::{FieldPath, Invalid},
    labels,
    ports::{PortList, PortSet},
};

/// The value of `config.linkerd.io/opaque-ports` to set on a pod; `None` if it is set already, or if no port is
/// opaque.
pub fn pod_opaque_ports(pod: &Pod, namespace: Option<&Namespace>, config: &InjectConfig) -> Option<String> {
    let ports = sidecar::container_ports(pod).into_iter().map(|port| (port, port));
    annotation(&pod.metadata, namespace, &config.default_opaque_ports, ports)
}

/// The same for a Service: its ports whose targets are opaque by default.
pub fn service_opaque_ports(service: &Service, namespace: Option<&Namespace>, config: &InjectConfig) -> Option<String> {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten()).filter_map(|port| {
        let number = u16::try_from(port.port).ok()?;
        let target = match port.target_port {
            Some(IntOrString::Int(target)) => u16::try_from(target).ok().filter(|target| *target != 0),
            _ => None,
        };
        Some((number, target.unwrap_or(number)))
    });
    annotation(&service.metadata, namespace, &config.default_opaque_ports, ports)
}

/// The value of `weft.io/require-mtls` to set on a Service, as its namespace has it; `None` if it is set already, or if
/// the namespace has none. One that cannot be read is inherited, too: it was written to require mutual TLS.
pub fn service_require_mtls(service: &Service, namespace: Option<&Namespace>) -> Option<String> {
    let of = |metadata: &ObjectMeta| metadata.annotations.as_ref()?.get(labels::REQUIRE_MTLS).cloned();
    if of(&service.metadata).is_some() {
        return None;
    }
    of(&namespace?.metadata)
}

/// Checks the annotation of opaque ports of an object that has one.
///
/// # Errors
/// When an entry cannot be read; the error names it and the annotation.
pub fn check_opaque_ports(metadata: &ObjectMeta) -> Result<(), Invalid> {
    let text = metadata.annotations.as_ref().and_then(|annotations| annotations.get(labels::OPAQUE_PORTS));
    let bad = text.and_then(|text| PortList::read(text).1);
    bad.map_or(Ok(()), |error| Err(FieldPath::annotation(labels::OPAQUE_PORTS).invalid(error)))
}

/// `ports` are pairs of the port in the annotation and the port to look up in the defaults.
fn annotation(
    metadata: &ObjectMeta,
    namespace: Option<&Namespace>,
    defaults: &PortSet,
    ports: impl Iterator<Item = (u16, u16)>,
) -> Option<String> {
    let of = |metadata: &ObjectMeta| metadata.annotations.as_ref()?.get(labels::OPAQUE_PORTS).cloned();
    if of(metadata).is_some() {
        return None;
    }
    if let Some(inherited) = namespace.and_then(|namespace| of(&namespace.metadata)) {
        return Some(inherited);
    }
    let opaque: PortSet = ports.filter(|(_, target)| defaults.contains(*target)).map(|(port, _)| port).collect();
    let listed: Vec<_> = opaque.iter().map(|port| port.to_string()).collect();
    (!listed.is_empty()).then(|| listed.join(","))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(own: Value, namespace: Value, ports: Value, expected: Option<&str>) {
        let service: Service = serde_json::from_value(
            json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "db", "annotations": own}, "spec": {"ports": ports}}),
        )
        .unwrap();
        let namespace: Namespace = serde_json::from_value(
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"annotations": namespace}}),
        )
        .unwrap();
        let config = InjectConfig::new("proxy", "1", "anchors");
        assert_eq!(service_opaque_ports(&service, Some(&namespace), &config).as_deref(), expected, "{ports}");
    }

    #[test]
    fn a_service_gets_what_its_namespace_or_the_defaults_say() {
        let said = |ports: &str| json!({"config.linkerd.io/opaque-ports": ports});
        check(json!({}), json!({}), json!([{"port": 3306}, {"port": 80}]), Some("3306"));
        check(json!({}), json!({}), json!([{"port": 33, "targetPort": 3306}]), Some("33"));
        check(json!({}), json!({}), json!([{"port": 3306, "targetPort": 8080}]), None);
        check(json!({}), json!({}), json!([{"port": 3306, "targetPort": "mysql"}]), Some("3306"));
        check(json!({}), json!({}), json!([{"port": 80}]), None);
        check(json!({}), said("9000"), json!([{"port": 80}]), Some("9000"));
        check(said("1"), said("9000"), json!([{"port": 3306}]), None);
    }

    #[test]
    fn a_service_inherits_from_its_namespace_that_mutual_tls_is_required() {
        let said = |value: &str| json!({"metadata": {"annotations": {"weft.io/require-mtls": value}}});
        let namespace: Namespace = serde_json::from_value(said("true")).unwrap();
        let (silent, own): (_, Service) = (Service::default(), serde_json::from_value(said("false")).unwrap());
        assert_eq!(service_require_mtls(&silent, Some(&namespace)).as_deref(), Some("true"));
        assert_eq!(service_require_mtls(&own, Some(&namespace)), None, "its own wins");
        assert_eq!(service_require_mtls(&silent, Some(&Namespace::default())), None);
        assert_eq!(service_require_mtls(&silent, None), None);
    }

    #[test]
    fn a_bad_annotation_is_named() {
        let metadata = |ports: &str| ObjectMeta {
            annotations: Some([(labels::OPAQUE_PORTS.to_owned(), ports.to_owned())].into()),
            ..ObjectMeta::default()
        };
        assert!(check_opaque_ports(&metadata("80,mysql,90-91,postgres-replication")).is_ok());
        let error = check_opaque_ports(&metadata("NOT A PORT")).unwrap_err().to_string();
        assert!(error.contains("config.linkerd.io/opaque-ports"), "{error}");
    }
}
