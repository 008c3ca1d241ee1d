//! Checks of proxies: ready, of one version, redirected; and of the annotations that configure them.

use k8s_openapi::{
    api::core::v1::{Event, Namespace, Pod, Service},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    jiff::Timestamp,
};
use kube::ResourceExt as _;
use weft_k8s_api::{
    field::Invalid,
    inject::{check_annotations, requested},
    labels,
};

use super::{
    answer::{Stop, known},
    facts::{ClusterFacts, Facts, Mode},
    installed::proxy_not_ready,
};
use crate::{mesh::pods, problem::Problem, status};

/// Older Events may be outdated: Kubernetes keeps them for an hour, even if the cause is gone.
const RECENT_SECONDS: i64 = 600;

pub(super) fn control_plane_healthy(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    Ok(not_ready_proxies(facts, own(facts, true)?))
}

pub(super) fn control_plane_up_to_date(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let pods = own(facts, true)?;
    Ok(outdated(facts, pods, &format!("kubectl -n {} rollout restart deployment", facts.namespace)))
}

pub(super) fn control_plane_enrolled(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    enrolled(facts, own(facts, true)?)
}

pub(super) fn namespace_exists(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let wanted = facts.data_plane_namespace.as_ref().ok_or(Stop::Skip)?;
    let namespaces = known("Namespaces", &facts.cluster()?.namespaces)?;
    if namespaces.iter().any(|namespace| namespace.name_any() == *wanted) {
        return Ok(Vec::new());
    }
    Ok(vec![Problem::new(format!("Namespace {wanted}"), "does not exist", "name another with -n")])
}

pub(super) fn proxies_ready(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    Ok(not_ready_proxies(facts, own(facts, false)?))
}

pub(super) fn proxies_up_to_date(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let pods = own(facts, false)?;
    Ok(outdated(facts, pods, "restart its workload: kubectl rollout restart"))
}

pub(super) fn proxies_enrolled(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    enrolled(facts, own(facts, false)?)
}

/// Live meshed pods of the selected namespaces, without the control plane's.
pub(super) fn meshed_applications(facts: &Facts) -> Result<Vec<&Pod>, Stop> {
    own(facts, false)
}

/// Services of the selected namespaces.
pub(super) fn services_in_scope<'a>(facts: &'a Facts, all: &'a [Service]) -> impl Iterator<Item = &'a Service> {
    let wanted = facts.data_plane_namespace.as_ref();
    all.iter().filter(move |service| wanted.is_none_or(|name| service.namespace().as_ref() == Some(name)))
}

/// Pods that should have a proxy: they were created before the annotation, or while the injector did not answer.
pub(super) fn have_a_proxy(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let all = known("Pods", &cluster.pods)?;
    let namespaces = known("Namespaces", &cluster.namespaces)?;
    let wanted = |pod: &&Pod| {
        let own = requested(Some(pod.annotations()));
        let inherited = || {
            let name = pod.namespace().unwrap_or_default();
            namespaces
                .iter()
                .find(|namespace| namespace.name_any() == name)
                .and_then(|namespace| requested(Some(namespace.annotations())))
        };
        let mode = own.or_else(inherited);
        let host_network = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
        matches!(mode, Some("enabled" | "ingress")) && !host_network
    };
    let without = all.iter().filter(|pod| !pods::is_over(pod) && !pods::is_leaving(pod)).filter(wanted);
    let without = without.filter(|pod| pods::proxy_container(pod).is_none());
    Ok(without
        .map(|pod| {
            let problem = "has no proxy: it was created before the annotation, or while the injector did not answer";
            let remedy = restart(pod);
            Problem::new(format!("Pod {}", pods::full_name(pod)), problem, remedy)
        })
        .collect())
}

/// Annotations of namespaces, workload templates and pods for which new pods are refused.
pub(super) fn annotations(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    of_metadata(facts, check_annotations, "correct or remove the annotation; new pods are refused until then")
}

/// Problems that `find` reports about the annotations of namespaces, workload templates and pods.
pub(super) fn of_metadata(
    facts: &Facts,
    find: fn(&ObjectMeta) -> Vec<Invalid>,
    remedy: &str,
) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let mut found = Vec::new();
    let mut check = |object: String, prefix: &str, metadata: &_| {
        for invalid in find(metadata) {
            found.push(Problem::new(format!("{object}, {prefix}{}", invalid.field), invalid.problem, remedy));
        }
    };
    let namespaces = known("Namespaces", &cluster.namespaces)?;
    let here =
        |namespace: &&Namespace| facts.data_plane_namespace.as_ref().is_none_or(|name| namespace.name_any() == *name);
    for namespace in namespaces.iter().filter(here) {
        check(format!("Namespace {}", namespace.name_any()), "", &namespace.metadata);
    }
    for workload in known("Workloads", &cluster.workloads)? {
        let object = format!("{} {}/{}", workload.kind, workload.namespace, workload.name);
        check(object, "spec.template.", &workload.template);
    }
    // The pods of a workload have the annotations of its template.
    let alone = |pod: &&Pod| pod.owner_references().is_empty() && !pods::is_over(pod);
    for pod in known("Pods", &cluster.pods)?.iter().filter(alone) {
        check(format!("Pod {}", pods::full_name(pod)), "", &pod.metadata);
    }
    Ok(found)
}

/// Warnings that the mesh published as Events, which `kubectl describe` shows with each object.
pub(super) fn no_warnings(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let events = known("Events", &facts.cluster()?.events)?;
    let now = seconds(facts);
    let recent = events.iter().filter(|event| is_ours(event)).filter(|event| now - last_seen(event) <= RECENT_SECONDS);
    let mut found: Vec<Problem> = recent.filter(|event| concerns(facts, event)).map(warning).collect();
    // Processes that restart publish the same Event again.
    found.sort_by(|one, other| (&one.object, &one.problem).cmp(&(&other.object, &other.problem)));
    found.dedup();
    Ok(found)
}

fn warning(event: &Event) -> Problem {
    let object = &event.involved_object;
    let (kind, name) = (object.kind.clone().unwrap_or_default(), object.name.clone().unwrap_or_default());
    let namespace = object.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    let full = namespace.map_or_else(|| name.clone(), |namespace| format!("{namespace}/{name}"));
    let (reason, note) = (event.reason.as_deref().unwrap_or("Warning"), event.message.as_deref().unwrap_or_default());
    let within = namespace.map(|namespace| format!(" -n {namespace}")).unwrap_or_default();
    let remedy = format!("kubectl{within} describe {} {name}", kind.to_lowercase());
    Problem::new(format!("{kind} {full}"), format!("{reason}: {note}"), remedy)
}

/// The command that recreates a pod.
fn restart(pod: &Pod) -> String {
    let namespace = pod.namespace().unwrap_or_default();
    match pod.owner_references().first().map(|owner| owner.kind.as_str()) {
        Some("ReplicaSet") => format!("kubectl -n {namespace} rollout restart deployment"),
        Some(kind @ ("StatefulSet" | "DaemonSet")) => {
            format!("kubectl -n {namespace} rollout restart {}", kind.to_lowercase())
        }
        _ => format!("kubectl -n {namespace} delete pod {}, and create it again", pod.name_any()),
    }
}

/// Whether a part of the mesh published it.
pub(super) fn is_ours(event: &Event) -> bool {
    let source = event.source.as_ref().and_then(|source| source.component.as_deref());
    let reporter = event.reporting_component.as_deref().filter(|reporter| !reporter.is_empty()).or(source);
    reporter.is_some_and(|reporter| reporter.starts_with("linkerd.io/") || reporter.starts_with("weft.io/"))
}

/// Seconds since 1970.
pub(super) fn last_seen(event: &Event) -> i64 {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    let first = event.event_time.as_ref().map(|time| time.0);
    series.into_iter().chain(last).chain(first).map(Timestamp::as_second).max().unwrap_or(0)
}

fn concerns(facts: &Facts, event: &Event) -> bool {
    let namespace = event.involved_object.namespace.as_deref().unwrap_or_default();
    let of_control_plane = namespace.is_empty() || namespace == facts.namespace;
    match (facts.mode, &facts.data_plane_namespace) {
        (Mode::Proxy, None) => true,
        (Mode::Proxy, Some(wanted)) => of_control_plane || namespace == wanted,
        _ => of_control_plane,
    }
}

fn seconds(facts: &Facts) -> i64 {
    let since = facts.now.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Live meshed pods: the control plane's own, or those of the selected namespaces.
fn own(facts: &Facts, control_plane: bool) -> Result<Vec<&Pod>, Stop> {
    let all = known("Pods with a proxy", &facts.cluster()?.mesh.meshed)?;
    let is_control_plane = |pod: &Pod| {
        pod.namespace().as_deref() == Some(&facts.namespace)
            && pod.labels().contains_key(labels::CONTROL_PLANE_COMPONENT)
    };
    let wanted = |pod: &Pod| match &facts.data_plane_namespace {
        Some(namespace) if !control_plane => pod.namespace().as_ref() == Some(namespace),
        _ => true,
    };
    let alive = all.iter().filter(|pod| !pods::is_over(pod) && !pods::is_leaving(pod));
    Ok(alive.filter(|pod| is_control_plane(pod) == control_plane && wanted(pod)).collect())
}

fn not_ready_proxies(facts: &Facts, all: Vec<&Pod>) -> Vec<Problem> {
    let broken = all.into_iter().filter(|pod| !pods::proxy_status(pod).is_some_and(|status| status.ready));
    broken
        .map(|pod| proxy_not_ready(facts, pod))
        .map(|problem| Problem { problem: format!("its proxy is not ready: {}", problem.problem), ..problem })
        .collect()
}

/// Proxies of another version than `--expected-version`, or, without it, of another image than new ones.
fn outdated(facts: &Facts, all: Vec<&Pod>, remedy: &str) -> Vec<Problem> {
    let new = facts.cluster().ok().and_then(proxy_image);
    let problem = |image: &str| match &facts.expected_version {
        // A digest does not say which version it is.
        Some(expected) => {
            let tag = pods::tag(image).filter(|tag| tag != expected)?;
            Some(format!("its proxy is {tag}, but {expected} is expected"))
        }
        None => {
            let (version, new) = pods::different(image, new.as_deref()?)?;
            Some(format!("its proxy is {version}, but new ones are {new}"))
        }
    };
    let found = all.into_iter().filter_map(|pod| Some((pod, problem(pods::proxy_container(pod)?.image.as_deref()?)?)));
    found.map(|(pod, problem)| Problem::new(format!("Pod {}", pods::full_name(pod)), problem, remedy)).collect()
}

/// Image of the proxies that the injector adds now.
fn proxy_image(cluster: &ClusterFacts) -> Option<String> {
    Some(cluster.values()?.inject_config("", "").ok()?.proxy_image)
}

fn enrolled(facts: &Facts, all: Vec<&Pod>) -> Result<Vec<Problem>, Stop> {
    let names: Vec<_> = all.into_iter().map(|pod| format!("Pod {}", pods::full_name(pod))).collect();
    let found = status::not_enrolled(&facts.cluster()?.mesh);
    Ok(found.into_iter().filter(|problem| names.contains(&problem.object)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use weft_proto::agent::PodState;

    use super::{super::facts::Workload, *};
    use crate::check::facts::tests::{check, healthy, object};

    #[test]
    fn a_healthy_data_plane_has_nothing_to_say() {
        let facts = healthy();
        for judge in [proxies_ready, proxies_up_to_date, proxies_enrolled, have_a_proxy, annotations, no_warnings] {
            assert_eq!(judge(&facts), Ok(Vec::new()));
        }
    }

    #[test]
    fn a_proxy_that_is_not_ready_says_what_it_waits_for() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let status = cluster.mesh.meshed.as_mut().unwrap()[0].status.as_mut().unwrap();
        status.init_container_statuses.as_mut().unwrap()[0].ready = false;
        cluster
            .container_messages
            .insert("shop/web-0".into(), vec!["container linkerd-proxy: not ready: redirect".into()]);
        check(proxies_ready(&facts), &[("Pod shop/web-0", "not ready: redirect")]);
    }

    #[test]
    fn pods_of_other_namespaces_are_not_asked_about() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let status = cluster.mesh.meshed.as_mut().unwrap()[0].status.as_mut().unwrap();
        status.init_container_statuses.as_mut().unwrap()[0].ready = false;
        facts.data_plane_namespace = Some("shop".to_owned());
        check(proxies_ready(&facts), &[("Pod shop/web-0", "its proxy is not ready")]);
        facts.data_plane_namespace = Some("other".to_owned());
        check(proxies_ready(&facts), &[]);
    }

    #[test]
    fn a_pod_that_its_agent_refuses_is_named_with_the_reason() {
        let mut facts = healthy();
        let status = facts.cluster.as_mut().unwrap().mesh.agents[0].answer.as_mut().unwrap();
        status.pods[0].set_state(PodState::Refused);
        status.pods[0].reason = "annotation config.linkerd.io/skip-subnets: bad value".into();
        check(proxies_enrolled(&facts), &[("Pod shop/web-0", "skip-subnets")]);
    }

    #[test]
    fn an_old_proxy_is_named_with_both_versions() {
        let mut facts = healthy();
        let pod = &mut facts.cluster.as_mut().unwrap().mesh.meshed.as_mut().unwrap()[0];
        pod.spec.as_mut().unwrap().init_containers.as_mut().unwrap()[0].image =
            Some("localhost/weft-proxy:0.0.9".into());
        check(proxies_up_to_date(&facts), &[("Pod shop/web-0", "0.0.9, but new ones are 0.1.0")]);
        facts.expected_version = Some("0.0.9".to_owned());
        check(proxies_up_to_date(&facts), &[]);
        facts.expected_version = Some("0.0.8".to_owned());
        check(proxies_up_to_date(&facts), &[("Pod shop/web-0", "0.0.9, but 0.0.8 is expected")]);
    }

    #[test]
    fn a_proxy_with_another_digest_is_old() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let values = "proxy: {image: {name: localhost/weft-proxy, version: 'sha256:01'}}\n";
        cluster.config = Ok(Some(object(json!({"data": {"values": values}}))));
        let pod = &mut cluster.mesh.meshed.as_mut().unwrap()[0];
        let image = &mut pod.spec.as_mut().unwrap().init_containers.as_mut().unwrap()[0].image;
        *image = Some("localhost/weft-proxy@sha256:00".into());
        check(proxies_up_to_date(&facts), &[("Pod shop/web-0", "sha256:00, but new ones are sha256:01")]);
        facts.expected_version = Some("0.1.0".to_owned());
        check(proxies_up_to_date(&facts), &[]);
    }

    #[test]
    fn annotations_are_checked_wherever_they_are_inherited_from() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let bad = |name: &str, value: &str| json!({"name": "x", "annotations": {name: value}});
        cluster.namespaces.as_mut().unwrap().push(object(json!({"metadata": bad("linkerd.io/inject", "yes")})));
        let template = object(bad("config.linkerd.io/skip-subnets", "here"));
        cluster.workloads =
            Ok(vec![Workload { kind: "Deployment", namespace: "shop".into(), name: "web".into(), template }]);
        let expected = [
            ("Namespace x, metadata.annotations[\"linkerd.io/inject\"]", "yes"),
            ("Deployment shop/web, spec.template.metadata.annotations[\"config.linkerd.io/skip-subnets\"]", "here"),
        ];
        check(annotations(&facts), &expected);
    }

    #[test]
    fn pods_older_than_the_annotation_are_reported() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let namespace = json!({"metadata": {"name": "shop", "annotations": {"linkerd.io/inject": "enabled"}}});
        cluster.namespaces.as_mut().unwrap().push(object(namespace));
        let pod = |name: &str, annotations| json!({"metadata": {"name": name, "namespace": "shop", "annotations": annotations}, "spec": {"containers": []}});
        let (refuses, empty) = (json!({"linkerd.io/inject": "disabled"}), json!({"linkerd.io/inject": ""}));
        let pods = [pod("old", json!({})), pod("refuses", refuses), pod("empty", empty)];
        cluster.pods = Ok(pods.map(object).to_vec());
        check(have_a_proxy(&facts), &[("Pod shop/old", "has no proxy"), ("Pod shop/empty", "has no proxy")]);
    }

    #[test]
    fn warnings_of_the_mesh_are_repeated_while_they_are_new() {
        let mut facts = healthy();
        let now = Timestamp::from_second(seconds(&facts)).unwrap();
        let event = |reporter: &str, time: Timestamp| {
            object(
                json!({"metadata": {}, "involvedObject": {"kind": "Pod", "name": "web-0", "namespace": "shop"}, "type": "Warning",
                "reason": "InvalidAnnotation", "message": "bad value", "reportingComponent": reporter,
                "eventTime": time.strftime("%Y-%m-%dT%H:%M:%S.000000Z").to_string()}),
            )
        };
        let old = Timestamp::from_second(seconds(&facts) - 2 * RECENT_SECONDS).unwrap();
        let events = vec![event("weft.io/agent", now), event("weft.io/agent", old), event("kubelet", now)];
        facts.cluster.as_mut().unwrap().events = Ok(events);
        check(no_warnings(&facts), &[("Pod shop/web-0", "InvalidAnnotation: bad value")]);
        facts.mode = Mode::Installed;
        check(no_warnings(&facts), &[]);
    }
}
