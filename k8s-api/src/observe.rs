//! What a Pod says about the proxy in it and about the workload that it belongs to, for those who look at a running
//! mesh.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodStatus};

use crate::{
    inject::{ProxyPorts, is_native_sidecar, proxy_container, variable},
    labels,
};

/// The variable that starts the tap server, with the one client that it has.
const TAP_CLIENT: &str = "LINKERD2_PROXY_TAP_SVC_NAME";
/// The tap server's address.
const TAP_ADDRESS: &str = "LINKERD2_PROXY_CONTROL_LISTEN_ADDR";
/// Name of the port of metrics.
const ADMIN_PORT: &str = "linkerd-admin";

/// Where the proxy of a pod listens for those who look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listeners {
    /// Metrics.
    pub admin: u16,
    /// Tap; `None` where tap is off.
    pub tap: Option<u16>,
}

/// The listeners of a pod's proxy, Weft's or Linkerd's; `None` without a proxy.
pub fn listeners(pod: &Pod) -> Option<Listeners> {
    let proxy = proxy_container(pod)?;
    let default = ProxyPorts::default();
    let named = proxy.ports.iter().flatten().find(|port| port.name.as_deref() == Some(ADMIN_PORT));
    let admin = named.and_then(|port| u16::try_from(port.container_port).ok()).unwrap_or(default.admin);
    let control = || {
        let address = variable(proxy, TAP_ADDRESS).and_then(|text| text.parse::<SocketAddr>().ok());
        address.map_or(default.control, |address| address.port())
    };
    let tap = variable(proxy, TAP_CLIENT).filter(|client| !client.is_empty()).map(|_| control());
    Some(Listeners { admin, tap })
}

/// What controls a pod, nearest first, as (kind in small letters, name): a ReplicaSet, then its Deployment, which is
/// recognised by the hash of the pod's template. A CronJob is not in the list: the pod does not name it.
pub fn owners(pod: &Pod) -> Vec<(String, String)> {
    let Some(owner) = pod.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
    else {
        return Vec::new();
    };
    let mut owners = vec![(owner.kind.to_lowercase(), owner.name.clone())];
    let hash = pod.metadata.labels.as_ref().and_then(|labels| labels.get(labels::POD_TEMPLATE_HASH));
    if owner.kind == "ReplicaSet"
        && let Some(deployment) = hash.and_then(|hash| owner.name.strip_suffix(hash.as_str())?.strip_suffix('-'))
    {
        owners.push(("deployment".to_owned(), deployment.to_owned()));
    }
    owners
}

/// A pod's status in a word or two, as `kubectl get pods` has it: `Running`, `Init:1/2`, `CrashLoopBackOff`,
/// `Terminating`.
pub fn status(pod: &Pod) -> String {
    let Some(status) = &pod.status else { return "Pending".to_owned() };
    let phase = status.phase.as_deref().unwrap_or("Unknown");
    if pod.metadata.deletion_timestamp.is_some() && !matches!(phase, "Succeeded" | "Failed") {
        return if status.reason.as_deref() == Some("NodeLost") { "Unknown" } else { "Terminating" }.to_owned();
    }
    if let Some(initializing) = initializing(pod, status) {
        return initializing;
    }
    let containers = status.container_statuses.as_deref().unwrap_or_default();
    let ended = containers.iter().find_map(|container| trouble(container.state.as_ref()?));
    let runs = containers.iter().any(|container| container.ready && is_running(container));
    match ended {
        Some(ended) if ended == "Completed" && runs => "Running".to_owned(),
        Some(ended) => ended,
        None => status.reason.clone().unwrap_or_else(|| phase.to_owned()),
    }
}

/// What an init container does that has not ended well; a sidecar is past it when it has started.
fn initializing(pod: &Pod, status: &PodStatus) -> Option<String> {
    let specs = || pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let is_sidecar = |name: &str| specs().any(|spec| spec.name == name && is_native_sidecar(spec));
    let statuses = status.init_container_statuses.as_deref().unwrap_or_default();
    let is_past = |container: &ContainerStatus| {
        let ended = container.state.as_ref().and_then(|state| state.terminated.as_ref());
        ended.is_some_and(|ended| ended.exit_code == 0)
            || container.started == Some(true) && is_sidecar(&container.name)
    };
    let (position, container) = statuses.iter().enumerate().find(|(_, container)| !is_past(container))?;
    let trouble = container.state.as_ref().and_then(trouble).filter(|reason| reason != "PodInitializing");
    Some(trouble.map_or_else(|| format!("Init:{position}/{}", specs().count()), |reason| format!("Init:{reason}")))
}

fn is_running(container: &ContainerStatus) -> bool {
    container.state.as_ref().is_some_and(|state| state.running.is_some())
}

/// Why a container does not run.
fn trouble(state: &ContainerState) -> Option<String> {
    if let Some(waiting) = &state.waiting {
        return waiting.reason.clone().filter(|reason| !reason.is_empty());
    }
    let ended = state.terminated.as_ref()?;
    let code = || match ended.signal {
        Some(signal) if signal != 0 => format!("Signal:{signal}"),
        _ => format!("ExitCode:{}", ended.exit_code),
    };
    Some(ended.reason.clone().filter(|reason| !reason.is_empty()).unwrap_or_else(code))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::inject::{Decision, InjectConfig, TapClient, inject};

    fn pod(value: Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_listeners_of_an_injected_pod_are_found() {
        let plain = pod(json!({
            "metadata": {"annotations": {"linkerd.io/inject": "enabled", "config.linkerd.io/admin-port": "5191"}},
            "spec": {"containers": [{"name": "app"}]},
        }));
        assert_eq!(listeners(&plain), None);
        let mut config = InjectConfig::new("proxy:1", "1", "anchors");
        for (tap, expected) in [(None, None), (Some(TapClient::default()), Some(4190))] {
            config.tap = tap;
            let Ok(Decision::Injected(pod)) = inject(&plain, None, &config) else { panic!("not injected") };
            assert_eq!(listeners(&pod), Some(Listeners { admin: 5191, tap: expected }));
        }
    }

    /// The words are those of `kubectl get pods` (`kubernetes:pkg/printers/internalversion/printers.go`).
    #[test]
    fn a_pods_status_is_in_kubectls_words() {
        let started = |name: &str, state: Value| json!({"name": name, "started": true, "ready": true, "state": state});
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        let ended = |code: i32, reason: Option<&str>| json!({"terminated": {"exitCode": code, "reason": reason}});
        let running = || json!({"running": {}});
        let with = |phase: &str, init: Value, containers: Value| {
            status(&pod(json!({
                "spec": {"initContainers": [{"name": "linkerd-proxy", "restartPolicy": "Always"}, {"name": "migrate"}],
                    "containers": [{"name": "app"}]},
                "status": {"phase": phase, "initContainerStatuses": init, "containerStatuses": containers},
            })))
        };
        let proxy = || started("linkerd-proxy", running());
        let migrated = || json!({"name": "migrate", "state": ended(0, Some("Completed"))});
        let ready = || json!([proxy(), migrated()]);
        let app = |state: Value| json!([started("app", state)]);
        for (found, expected) in [
            (with("Pending", json!([]), json!([])), "Pending"),
            (
                with("Pending", json!([{"name": "linkerd-proxy", "state": waiting("PodInitializing")}]), json!([])),
                "Init:0/2",
            ),
            (with("Pending", json!([proxy(), {"name": "migrate", "state": running()}]), json!([])), "Init:1/2"),
            (
                with("Pending", json!([proxy(), {"name": "migrate", "state": waiting("CrashLoopBackOff")}]), json!([])),
                "Init:CrashLoopBackOff",
            ),
            (
                with("Pending", json!([proxy(), {"name": "migrate", "state": ended(3, None)}]), json!([])),
                "Init:ExitCode:3",
            ),
            (with("Running", ready(), app(running())), "Running"),
            (with("Running", ready(), app(waiting("CrashLoopBackOff"))), "CrashLoopBackOff"),
            (with("Running", ready(), app(ended(1, Some("Error")))), "Error"),
            (
                with(
                    "Running",
                    ready(),
                    json!([started("job", ended(0, Some("Completed"))), started("app", running())]),
                ),
                "Running",
            ),
            (with("Succeeded", ready(), app(ended(0, Some("Completed")))), "Completed"),
        ] {
            assert_eq!(found, expected);
        }
        let gone = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running"}});
        assert_eq!(status(&pod(gone)), "Terminating");
        assert_eq!(status(&pod(json!({"status": {"phase": "Failed", "reason": "Evicted"}}))), "Evicted");
    }

    #[test]
    fn the_last_variable_of_a_name_counts() {
        let env = |values: [&str; 2]| values.map(|value| json!({"name": TAP_CLIENT, "value": value}));
        let tap = |values: [&str; 2]| {
            let proxy = json!({"name": "linkerd-proxy", "env": env(values)});
            listeners(&pod(json!({"spec": {"containers": [proxy]}}))).unwrap().tap
        };
        assert_eq!(tap(["", "viz"]), Some(4190));
        assert_eq!(tap(["viz", ""]), None);
    }

    #[test]
    fn a_deployment_is_the_owner_of_its_replica_set() {
        let owned = |kind: &str, name: &str, controller: bool| {
            pod(json!({"metadata": {
                "labels": {"pod-template-hash": "7f9"},
                "ownerReferences": [{"apiVersion": "v1", "kind": kind, "name": name, "uid": "u", "controller": controller}],
            }}))
        };
        let pair = |kind: &str, name: &str| (kind.to_owned(), name.to_owned());
        assert_eq!(
            owners(&owned("ReplicaSet", "web-7f9", true)),
            [pair("replicaset", "web-7f9"), pair("deployment", "web")]
        );
        assert_eq!(owners(&owned("ReplicaSet", "own", true)), [pair("replicaset", "own")]);
        assert_eq!(owners(&owned("StatefulSet", "db", true)), [pair("statefulset", "db")]);
        assert_eq!(owners(&owned("Node", "a", false)), []);
    }
}
