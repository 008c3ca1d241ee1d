//! Checks for things that Weft does not act on: resources, and annotations without effect.

use kube::ResourceExt as _;
use weft_k8s_api::support;

use super::{
    answer::{Stop, known},
    data_plane,
    facts::Facts,
};
use crate::{docs, problem::Problem};

fn remedy() -> String {
    format!("remove it, so that no one relies on it; {} says what works", docs::page("compatibility.md"))
}

/// Kinds of which an object, or one of its fields, may have no effect: group, kind and plural.
pub(super) const KINDS: [(&str, &str, &str); 4] = [
    ("policy.linkerd.io", "HTTPRoute", "httproutes"),
    ("gateway.networking.k8s.io", "HTTPRoute", "httproutes"),
    ("gateway.networking.k8s.io", "GRPCRoute", "grpcroutes"),
    ("multicluster.linkerd.io", "Link", "links"),
];

pub(super) fn resources(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let all = known("Custom resources", &facts.cluster()?.objects)?;
    let found = all.iter().flat_map(|it| {
        let object = format!("{}.{} {}/{}", it.kind, it.group, it.namespace, it.name);
        let found = support::object_warnings(it.group, it.kind, &it.content);
        found
            .into_iter()
            .map(move |invalid| Problem::new(format!("{object}, {}", invalid.field), invalid.problem, remedy()))
    });
    Ok(found.collect())
}

pub(super) fn services(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let all = known("Services", &facts.cluster()?.services)?;
    let found = all.iter().flat_map(|it| {
        let object = format!("Service {}/{}", it.namespace().unwrap_or_default(), it.name_any());
        let found = support::service_warnings(&it.metadata);
        found
            .into_iter()
            .map(move |invalid| Problem::new(format!("{object}, {}", invalid.field), invalid.problem, remedy()))
    });
    Ok(found.collect())
}

pub(super) fn pods(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    data_plane::of_metadata(facts, support::pod_warnings, &remedy())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;
    use weft_k8s_api::support::State;

    use super::*;
    use crate::check::facts::{
        CustomObject, Workload,
        tests::{check, healthy, object},
    };

    #[test]
    fn every_kind_with_an_unsupported_part_is_looked_for() {
        let unsupported = support::FIELDS.iter().filter(|row| row.state == State::Unsupported);
        let wanted: BTreeSet<_> = unsupported.map(|row| (row.group, row.kind)).collect();
        let asked: BTreeSet<_> = KINDS.iter().map(|(group, kind, _)| (*group, *kind)).collect();
        assert_eq!(asked, wanted);
    }

    #[test]
    fn what_has_no_effect_is_named() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let custom = |group, kind, content| CustomObject {
            group,
            kind,
            namespace: "shop".to_owned(),
            name: "x".to_owned(),
            content,
        };
        cluster.objects = Ok(vec![
            custom("gateway.networking.k8s.io", "HTTPRoute", json!({"spec": {"rules": [{"retry": {"attempts": 2}}]}})),
            custom(
                "gateway.networking.k8s.io",
                "HTTPRoute",
                json!({"spec": {"rules": [{"timeouts": {"request": "1s"}}]}}),
            ),
            custom("multicluster.linkerd.io", "Link", json!({"spec": {}})),
        ]);
        let exported = json!({"mirror.linkerd.io/exported": "true", "retry.linkerd.io/http": "5xx"});
        let service = json!({"metadata": {"name": "web", "namespace": "shop", "annotations": exported}});
        cluster.services.as_mut().unwrap().push(object(service));
        let namespace =
            json!({"metadata": {"name": "shop", "annotations": {"config.linkerd.io/proxy-cpu-limit": "many"}}});
        cluster.namespaces.as_mut().unwrap().push(object(namespace));
        let template = object(json!({"annotations": {"config.linkerd.io/proxy-log-http-header": "insecure"}}));
        cluster.workloads =
            Ok(vec![Workload { kind: "Deployment", namespace: "shop".into(), name: "web".into(), template }]);
        check(
            resources(&facts),
            &[
                ("HTTPRoute.gateway.networking.k8s.io shop/x, spec.rules.retry", "not supported yet"),
                ("Link.multicluster.linkerd.io shop/x, kind", "no multicluster"),
            ],
        );
        let field = "metadata.annotations[\"mirror.linkerd.io/exported\"]";
        check(services(&facts), &[(&format!("Service shop/web, {field}"), "not supported yet")]);
        check(
            pods(&facts),
            &[
                (
                    "Namespace shop, metadata.annotations[\"config.linkerd.io/proxy-cpu-limit\"]",
                    "expected a Kubernetes quantity",
                ),
                (
                    "Deployment shop/web, spec.template.metadata.annotations[\"config.linkerd.io/proxy-log-http-header\"]",
                    "unknown annotation",
                ),
            ],
        );
    }
}
