//! Labels that should be annotations, annotations that should be labels, and names of annotations that nothing reads.

use k8s_openapi::{api::core::v1::Service, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::ResourceExt as _;
use weft_k8s_api::{
    field::{FieldPath, Invalid},
    labels::{INHERITED_PREFIXES, INJECT},
    support::SERVICE_ANNOTATIONS,
};

use super::{
    answer::{Stop, known},
    data_plane::{of_metadata, services_in_scope},
    facts::Facts,
};
use crate::problem::Problem;

/// A label of namespaces, although its prefix is that of annotations: it keeps the webhooks away.
const ADMISSION: &str = "config.linkerd.io/admission-webhooks";
/// A label of Services, by which Linkerd's service mirror selects them.
const EXPORTED: &str = "mirror.linkerd.io/exported";
/// Prefixes of annotations of Services.
const SERVICE_PREFIXES: [&str; 5] = [
    "retry.linkerd.io/",
    "timeout.linkerd.io/",
    "balancer.linkerd.io/",
    "balancer.alpha.linkerd.io/",
    "config.beta.linkerd.io/",
];

/// Labels of namespaces, workload templates and pods that are read as annotations only.
pub(super) fn pod_labels(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    of_metadata(facts, misplaced_labels, "make it an annotation; as a label it has no effect")
}

/// Labels of Services that are read as annotations only.
pub(super) fn service_labels(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    of_services(facts, misplaced_labels, "make it an annotation; as a label it has no effect")
}

/// Annotations of Services that are read as labels only, or not at all.
pub(super) fn service_annotations(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    of_services(facts, misplaced_annotations, "correct it, or remove it: it has no effect")
}

fn of_services(facts: &Facts, find: fn(&ObjectMeta) -> Vec<Invalid>, remedy: &str) -> Result<Vec<Problem>, Stop> {
    let all = services_in_scope(facts, known("Services", &facts.cluster()?.services)?);
    let named = |service: &Service| format!("{}/{}", service.namespace().unwrap_or_default(), service.name_any());
    let found = all.flat_map(|service| find(&service.metadata).into_iter().map(move |invalid| (service, invalid)));
    Ok(found
        .map(|(service, invalid)| {
            Problem::new(format!("Service {}, {}", named(service), invalid.field), invalid.problem, remedy)
        })
        .collect())
}

fn misplaced_labels(metadata: &ObjectMeta) -> Vec<Invalid> {
    let prefixes = || INHERITED_PREFIXES.iter().chain(&SERVICE_PREFIXES);
    let is_annotation = |name: &str| name == INJECT || prefixes().any(|prefix| name.starts_with(prefix));
    let names = metadata.labels.iter().flatten().map(|(name, _)| name.as_str());
    let wrong = names.filter(|name| *name != ADMISSION && is_annotation(name));
    wrong
        .map(|name| FieldPath::of("metadata.labels").key(name).invalid("is a label and should be an annotation"))
        .collect()
}

fn misplaced_annotations(metadata: &ObjectMeta) -> Vec<Invalid> {
    let names = metadata.annotations.iter().flatten().map(|(name, _)| name.as_str());
    let problem = |name: &str| {
        if name == EXPORTED {
            Some("is an annotation and should be a label")
        } else {
            let ours = SERVICE_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            (ours && !is_known(name)).then_some("is an unknown annotation")
        }
    };
    names.filter_map(|name| Some(FieldPath::annotation(name).invalid(problem(name)?))).collect()
}

fn is_known(name: &str) -> bool {
    SERVICE_ANNOTATIONS.iter().any(|row| match row.name.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => row.name == name,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::check::facts::{
        Workload,
        tests::{check, healthy, object},
    };

    #[test]
    fn labels_that_should_be_annotations_are_named() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let labelled = json!({"metadata": {"name": "shop", "labels": {"linkerd.io/inject": "enabled", ADMISSION: "disabled",
            "linkerd.io/extension": "viz"}}});
        cluster.namespaces.as_mut().unwrap().push(object(labelled));
        let template = object(json!({"labels": {"config.linkerd.io/skip-outbound-ports": "25", "app": "web"}}));
        cluster.workloads =
            Ok(vec![Workload { kind: "Deployment", namespace: "shop".into(), name: "web".into(), template }]);
        let expected = [
            ("Namespace shop, metadata.labels[\"linkerd.io/inject\"]", "should be an annotation"),
            (
                "Deployment shop/web, spec.template.metadata.labels[\"config.linkerd.io/skip-outbound-ports\"]",
                "annotation",
            ),
        ];
        check(pod_labels(&facts), &expected);
    }

    #[test]
    fn services_have_each_name_at_its_place() {
        let mut facts = healthy();
        let service = json!({"metadata": {"name": "web", "namespace": "shop",
            "labels": {"config.linkerd.io/opaque-ports": "25", "mirror.linkerd.io/exported": "true"},
            "annotations": {"mirror.linkerd.io/exported": "true", "retry.linkerd.io/http": "5xx",
                "balancer.linkerd.io/failure-acrual": "consecutive", "example.com/retry": "1"}}});
        facts.cluster.as_mut().unwrap().services.as_mut().unwrap().push(object(service));
        let label = "Service shop/web, metadata.labels[\"config.linkerd.io/opaque-ports\"]";
        check(service_labels(&facts), &[(label, "should be an annotation")]);
        let expected = [
            ("Service shop/web, metadata.annotations[\"balancer.linkerd.io/failure-acrual\"]", "unknown annotation"),
            ("Service shop/web, metadata.annotations[\"mirror.linkerd.io/exported\"]", "should be a label"),
        ];
        check(service_annotations(&facts), &expected);
        facts.data_plane_namespace = Some("other".to_owned());
        check(service_labels(&facts), &[]);
        check(service_annotations(&facts), &[]);
    }
}
