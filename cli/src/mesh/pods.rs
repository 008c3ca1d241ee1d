//! Interprets a pod's status: whether it is ready, and in one line why it is not.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use kube::ResourceExt as _;
pub(crate) use weft_k8s_api::inject::proxy_container;
use weft_k8s_api::labels;

use super::installed::CHART_VERSION;

/// Length of the digests that are shown, as docker shows them: `sha256:` and 12 digits.
const DIGEST: usize = 19;

/// `NAMESPACE/NAME`.
pub(crate) fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Unknown")
}

/// Whether it has ended, as the pods of Jobs do.
pub(crate) fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

pub(crate) fn is_leaving(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").is_some_and(|condition| condition.status == "True")
}

pub(crate) fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

/// Why it has no node; `None` if it has one.
pub(crate) fn unschedulable(pod: &Pod) -> Option<String> {
    let scheduled = condition(pod, "PodScheduled").filter(|condition| condition.status == "False")?;
    Some(scheduled.message.clone().or_else(|| scheduled.reason.clone()).unwrap_or_else(|| "no reason given".to_owned()))
}

/// The status of the proxy's container.
pub(crate) fn proxy_status(pod: &Pod) -> Option<&ContainerStatus> {
    statuses(pod).find(|status| status.name == labels::PROXY_CONTAINER)
}

/// Every container that serves metrics, and the port: the names of the ports are Linkerd's, whose Prometheus finds them
/// so.
pub(crate) fn admin_ports(pod: &Pod) -> Vec<(&str, u16)> {
    let spec = pod.spec.iter();
    let all = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let is_admin = |name: &str| name == "admin" || name.ends_with("-admin");
    all.filter_map(|container| {
        let mut ports = container.ports.iter().flatten();
        let port = ports.find(|port| port.name.as_deref().is_some_and(is_admin))?;
        Some((container.name.as_str(), u16::try_from(port.container_port).ok()?))
    })
    .collect()
}

/// The admin port of one of the containers.
pub(crate) fn admin_port(pod: &Pod, container: &str) -> Option<u16> {
    admin_ports(pod).into_iter().find(|(name, _)| *name == container).map(|(_, port)| port)
}

/// Every container's status, sidecars first.
pub(crate) fn statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let status = pod.status.iter();
    status.flat_map(|status| {
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten())
    })
}

/// The tag of an image: the version of the program in it. `None` if nothing but a digest pins it.
pub(crate) fn tag(image: &str) -> Option<&str> {
    let name = image.split('@').next().unwrap_or(image);
    let tag = name.rsplit_once(':').map(|(_, tag)| tag).filter(|tag| !tag.contains('/'));
    tag.or_else(|| digest(image).is_none().then_some("latest"))
}

/// The beginning of the digest that pins an image.
fn digest(image: &str) -> Option<&str> {
    let (_, digest) = image.split_once('@')?;
    Some(digest.get(..DIGEST).unwrap_or(digest))
}

/// The version of an image: its tag, or its digest if it has no tag.
pub(crate) fn version(image: &str) -> &str {
    tag(image).or_else(|| digest(image)).unwrap_or_default()
}

/// The versions of two images that differ. Digests count where both have one: a tag may be pushed again.
pub(crate) fn different<'a>(one: &'a str, other: &'a str) -> Option<(&'a str, &'a str)> {
    let both = digest(one).zip(digest(other)).unwrap_or_else(|| (version(one), version(other)));
    (both.0 != both.1).then_some(both)
}

/// Versions of a pod's own containers, without its proxy. An image without a tag has the version of the pod's chart.
pub(crate) fn own_versions(pod: &Pod) -> impl Iterator<Item = &str> {
    let chart = pod.labels().get(CHART_VERSION).map(String::as_str);
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let own = containers.filter(|container| container.name != labels::PROXY_CONTAINER);
    let images = own.filter_map(|container| container.image.as_deref());
    images.map(move |image| tag(image).or(chart).unwrap_or_else(|| version(image)))
}

/// Why a pod is not ready, from the container with the most specific reason; `None` if there is no reason.
pub(crate) fn trouble(pod: &Pod) -> Option<String> {
    if let Some(reason) = unschedulable(pod) {
        return Some(format!("no node takes it: {reason}"));
    }
    let broken: Vec<_> = statuses(pod).filter(|status| !status.ready).collect();
    let cause = broken.iter().find_map(|status| container_trouble(status));
    let of_pod = || {
        let status = pod.status.as_ref()?;
        status.message.clone().or_else(|| status.reason.clone())
    };
    cause.or_else(of_pod).or_else(|| broken.first().map(|status| container_starts(status)))
}

/// Why a pod's proxy is not ready; `None` if there is no reason.
pub(crate) fn proxy_trouble(pod: &Pod) -> Option<String> {
    unschedulable(pod).or_else(|| container_trouble(proxy_status(pod)?))
}

/// A container that is starting without problems so far.
fn container_starts(status: &ContainerStatus) -> String {
    let state = status.state.as_ref();
    let waiting = state.and_then(|state| state.waiting.as_ref()).and_then(|waiting| waiting.reason.as_deref());
    match waiting {
        Some(reason) => format!("container {}: {reason}", status.name),
        None => format!("container {} is not ready", status.name),
    }
}

fn container_trouble(status: &ContainerStatus) -> Option<String> {
    let state = status.state.as_ref()?;
    let name = &status.name;
    let ended = state.terminated.as_ref().or_else(|| status.last_state.as_ref()?.terminated.as_ref());
    let ended = ended.filter(|ended| ended.exit_code != 0).map(|ended| {
        let last = ended.message.as_deref().and_then(last_line).map(|line| format!(": {line}")).unwrap_or_default();
        format!("ended with exit code {}{last}", ended.exit_code)
    });
    let waiting = state.waiting.as_ref().filter(|waiting| !is_starting(waiting.reason.as_deref()));
    let waiting = waiting.map(|waiting| {
        let reason = waiting.reason.as_deref().unwrap_or("waiting");
        // The message of a restart counts seconds; how the container ended is more useful.
        match waiting.message.as_deref().filter(|_| ended.is_none()) {
            Some(message) => format!("{reason}: {message}"),
            None => reason.to_owned(),
        }
    });
    match (waiting, ended) {
        (None, None) => None,
        (Some(waiting), None) => Some(format!("container {name}: {waiting}")),
        (None, Some(ended)) => Some(format!("container {name}: {ended}")),
        (Some(waiting), Some(ended)) => Some(format!("container {name}: {waiting}, {ended}")),
    }
}

fn is_starting(reason: Option<&str>) -> bool {
    matches!(reason, None | Some("PodInitializing" | "ContainerCreating"))
}

/// The last line of a program is usually why it ended.
fn last_line(text: &str) -> Option<&str> {
    text.lines().map(str::trim).rfind(|line| !line.is_empty())
}

fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(status: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "web-0", "namespace": "shop"}, "status": status})).unwrap()
    }

    fn container(name: &str, state: serde_json::Value, last: serde_json::Value) -> serde_json::Value {
        json!({"name": name, "ready": false, "restartCount": 0, "image": "i", "imageID": "i", "state": state, "lastState": last})
    }

    #[test]
    fn a_container_that_crashes_says_what_it_said_last() {
        let status = container(
            "identity",
            json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}}),
            json!({"terminated": {"exitCode": 1, "message": "starting\nthe issuer certificate has expired\n"}}),
        );
        let cause = trouble(&pod(json!({"containerStatuses": [status]}))).unwrap();
        assert_eq!(
            cause,
            "container identity: CrashLoopBackOff, ended with exit code 1: the issuer certificate has expired"
        );
    }

    #[test]
    fn an_image_that_cannot_be_pulled_is_named() {
        let status = container(
            "identity",
            json!({"waiting": {"reason": "ErrImagePull", "message": "not found: registry/identity"}}),
            json!({}),
        );
        let cause = trouble(&pod(json!({"containerStatuses": [status]}))).unwrap();
        assert_eq!(cause, "container identity: ErrImagePull: not found: registry/identity");
    }

    #[test]
    fn a_pod_without_a_node_says_why() {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available"});
        let cause = trouble(&pod(json!({"conditions": [condition]}))).unwrap();
        assert_eq!(cause, "no node takes it: 0/1 nodes are available");
    }

    #[test]
    fn a_container_that_merely_starts_is_reported_last() {
        let starts = container("proxy", json!({"waiting": {"reason": "ContainerCreating"}}), json!({}));
        assert_eq!(
            trouble(&pod(json!({"containerStatuses": [starts]}))).unwrap(),
            "container proxy: ContainerCreating"
        );
        let pulls = container("identity", json!({"waiting": {"reason": "ErrImagePull"}}), json!({}));
        let cause = trouble(&pod(json!({"containerStatuses": [starts, pulls]}))).unwrap();
        assert_eq!(cause, "container identity: ErrImagePull");
        let runs = container("proxy", json!({"running": {}}), json!({}));
        assert_eq!(trouble(&pod(json!({"containerStatuses": [runs]}))).unwrap(), "container proxy is not ready");
        assert_eq!(trouble(&pod(json!({}))), None);
    }

    #[test]
    fn admin_ports_are_found_by_name() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "initContainers": [{"name": "linkerd-proxy", "ports": [{"name": "linkerd-admin", "containerPort": 4191}]}],
            "containers": [
                {"name": "destination", "ports": [{"name": "grpc", "containerPort": 8086}, {"name": "dest-admin", "containerPort": 9996}]},
                {"name": "app"}]}}))
        .unwrap();
        assert_eq!(admin_ports(&pod), [("linkerd-proxy", 4191), ("destination", 9996)]);
        let found = ["linkerd-proxy", "destination", "app"].map(|container| admin_port(&pod, container));
        assert_eq!(found, [Some(4191), Some(9996), None]);
    }

    #[test]
    fn versions_are_tags() {
        for (image, expected) in [
            ("localhost/weft-proxy:0.1.0", "0.1.0"),
            ("localhost:5000/weft-proxy", "latest"),
            ("localhost:5000/weft-proxy:0.1.0@sha256:00", "0.1.0"),
            ("a/weft-proxy@sha256:00", "sha256:00"),
            ("a/weft-proxy@sha256:0123456789abcdef", "sha256:0123456789ab"),
        ] {
            assert_eq!(version(image), expected, "{image}");
        }
    }

    #[test]
    fn images_differ_by_their_digests_or_else_by_their_tags() {
        for (one, other, expected) in [
            ("a/p:1", "b/p:1", None),
            ("p:1", "p:2", Some(("1", "2"))),
            ("p@sha256:00", "p@sha256:01", Some(("sha256:00", "sha256:01"))),
            ("p:1@sha256:00", "p:1@sha256:01", Some(("sha256:00", "sha256:01"))),
            ("p:1@sha256:00", "p@sha256:00", None),
            ("p:1", "p@sha256:00", Some(("1", "sha256:00"))),
            ("p:1", "p:1@sha256:00", None),
        ] {
            assert_eq!(different(one, other), expected, "{one} {other}");
        }
    }

    #[test]
    fn an_image_without_a_tag_has_the_version_of_its_chart() {
        let of = |image: &str, labels: serde_json::Value| {
            let containers = json!([{"name": "identity", "image": image}, {"name": "linkerd-proxy", "image": "p:9"}]);
            let pod = json!({"metadata": {"labels": labels}, "spec": {"containers": containers}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            own_versions(&pod).map(str::to_owned).collect::<Vec<_>>()
        };
        let chart = json!({CHART_VERSION: "0.1.0"});
        assert_eq!(of("weft-control-plane:0.2.0", chart.clone()), ["0.2.0"]);
        assert_eq!(of("weft-control-plane@sha256:00", chart), ["0.1.0"]);
        assert_eq!(of("weft-control-plane@sha256:00", json!({})), ["sha256:00"]);
    }
}
