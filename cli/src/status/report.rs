//! The rows of the output, computed from the facts.

use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::Pod},
    jiff::Timestamp,
};
use kube::ResourceExt as _;
use serde::Serialize;

use super::{
    problems,
    rows::{AgentRow, PodRow, agent_of_cluster, pod_rows},
};
use crate::{
    mesh::{Mesh, is_agent, other_agent::OtherAgent, pods},
    problem::Problem,
};

/// The whole result; also the output of `-o json`.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// Problems that somebody should solve.
    pub(super) problems: Vec<Problem>,
    /// `None` outside a cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) control_plane: Option<ControlPlane>,
    pub(super) agents: Vec<AgentRow>,
    pub(super) pods: Vec<PodRow>,
}

#[derive(Debug, Serialize)]
pub(super) struct ControlPlane {
    pub(super) namespace: String,
    pub(super) components: Vec<Component>,
    pub(super) lease: Option<LeaseRow>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Component {
    pub(super) name: String,
    pub(super) ready: i32,
    pub(super) total: i32,
    /// Versions of its pods' images; several during an upgrade.
    pub(super) versions: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct LeaseRow {
    pub(super) name: String,
    /// `None` if it has no holder.
    pub(super) holder: Option<String>,
    pub(super) renewed_seconds_ago: Option<i64>,
    /// Whether its holder has not renewed it in time.
    pub(super) expired: bool,
}

impl Report {
    pub(super) fn of_cluster(mesh: &Mesh, elsewhere: &[OtherAgent], now: Timestamp) -> Self {
        let mut agents: Vec<_> = mesh.agents.iter().map(agent_of_cluster).collect();
        agents.sort_by(|one, other| one.node.cmp(&other.node));
        let rows = pod_rows(mesh);
        Self {
            problems: problems::of_cluster(mesh, elsewhere, &agents, &rows, now),
            control_plane: Some(ControlPlane {
                namespace: mesh.namespace.clone(),
                components: components(mesh),
                lease: mesh.lease.as_ref().ok().and_then(Option::as_ref).map(|lease| lease_row(lease, now)),
            }),
            agents,
            pods: rows,
        }
    }
}

fn components(mesh: &Mesh) -> Vec<Component> {
    let mut components: Vec<_> = mesh
        .deployments
        .iter()
        .flatten()
        .map(|deployment| {
            let name = deployment.name_any();
            let prefix = format!("{name}-");
            let own = |pod: &&Pod| !is_agent(pod) && pod.name_any().starts_with(&prefix);
            Component {
                ready: deployment.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0),
                total: deployment.spec.replicas.unwrap_or(1),
                versions: versions(mesh.control_pods.iter().flatten().filter(own)),
                name,
            }
        })
        .collect();
    components.sort_by(|one, other| one.name.cmp(&other.name));
    if let Ok(Some(daemon_set)) = &mesh.daemon_set {
        let status = daemon_set.status.as_ref();
        components.push(Component {
            name: daemon_set.name_any(),
            ready: status.map_or(0, |status| status.number_ready),
            total: status.map_or(0, |status| status.desired_number_scheduled),
            versions: versions(mesh.agents.iter().map(|agent| &agent.pod)),
        });
    }
    components
}

/// Versions of the images of these pods, without their proxies'.
fn versions<'a>(all: impl Iterator<Item = &'a Pod>) -> Vec<String> {
    let mut versions: Vec<_> = all.flat_map(pods::own_versions).map(str::to_owned).collect();
    versions.sort();
    versions.dedup();
    versions
}

fn lease_row(lease: &Lease, now: Timestamp) -> LeaseRow {
    let spec = lease.spec.as_ref();
    let renewed = spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| now.as_second() - time.0.as_second());
    let duration = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(0);
    LeaseRow {
        name: lease.name_any(),
        holder: spec.and_then(|spec| spec.holder_identity.clone()).filter(|holder| !holder.is_empty()),
        renewed_seconds_ago: renewed,
        expired: renewed.is_none_or(|seconds| seconds > i64::from(duration)),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;
    use weft_k8s_api::labels;
    use weft_proto::agent::{PodRef, PodState, PodStatus, StatusResponse};

    use super::{super::rows::State, *};
    use crate::mesh::{Agent, Fetched};

    pub(in crate::status) fn agent(node: &str, answer: Fetched<StatusResponse>) -> Agent {
        let pod = json!({"metadata": {"name": format!("weft-agent-{node}"), "namespace": "linkerd",
            "labels": {"linkerd.io/control-plane-component": "agent"}}, "spec": {"nodeName": node,
            "containers": [{"name": "agent", "image": "localhost/weft-agent:0.1.0"}]}, "status": {"phase": "Running"}});
        Agent { pod: serde_json::from_value(pod).unwrap(), answer }
    }

    pub(in crate::status) fn status(pods: Vec<PodStatus>) -> StatusResponse {
        StatusResponse { version: "0.1.0".into(), programs: "abc".into(), pods, ..StatusResponse::default() }
    }

    pub(in crate::status) fn enrolled(name: &str, state: PodState, reason: &str) -> PodStatus {
        PodStatus {
            pod: Some(PodRef { namespace: "shop".into(), name: name.into() }),
            outbound: state == PodState::Enrolled,
            inbound: state == PodState::Enrolled,
            generation: 1,
            state: state.into(),
            reason: reason.into(),
            ..PodStatus::default()
        }
    }

    pub(in crate::status) fn meshed(name: &str, node: &str, proxy_ready: bool) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"nodeName": node, "containers": [],
                "initContainers": [{"name": "linkerd-proxy", "image": "localhost/weft-proxy:0.1.0"}]},
            "status": {"phase": "Running", "initContainerStatuses": [{"name": "linkerd-proxy", "ready": proxy_ready,
                "restartCount": 0, "image": "i", "imageID": "i"}]},
        }))
        .unwrap()
    }

    pub(in crate::status) fn mesh(agents: Vec<Agent>, meshed: Vec<Pod>) -> Mesh {
        let deployment = json!({"metadata": {"name": "linkerd-identity"}, "spec": {"replicas": 1, "selector": {}, "template": {}},
            "status": {"readyReplicas": 1}});
        let node = |agent: &Agent| json!({"metadata": {"name": agent.node()}});
        let nodes = agents.iter().map(|agent| serde_json::from_value(node(agent)).unwrap()).collect();
        let daemon_set = json!({"metadata": {"name": "weft-agent"}, "spec": {"selector": {}, "template": {}},
            "status": {"currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberReady": 1, "numberMisscheduled": 0}});
        let lease = json!({"metadata": {"name": "linkerd-destination-endpoint-write"}, "spec": {"holderIdentity": "linkerd-destination-1",
            "leaseDurationSeconds": 30, "renewTime": "2026-01-01T00:00:00.000000Z"}});
        Mesh {
            namespace: "linkerd".into(),
            nodes: Ok(nodes),
            deployments: Ok(vec![serde_json::from_value(deployment).unwrap()]),
            daemon_set: Ok(Some(serde_json::from_value(daemon_set).unwrap())),
            control_pods: Ok(agents.iter().map(|agent| agent.pod.clone()).collect()),
            lease: Ok(Some(serde_json::from_value(lease).unwrap())),
            agents,
            meshed: Ok(meshed),
        }
    }

    /// Two seconds after the lease was renewed.
    pub(in crate::status) fn now() -> Timestamp {
        "2026-01-01T00:00:02Z".parse().unwrap()
    }

    #[test]
    fn a_healthy_mesh_has_rows_and_no_problem() {
        let agents = vec![agent("a", Ok(status(vec![enrolled("web-0", PodState::Enrolled, "")])))];
        let report = Report::of_cluster(&mesh(agents, vec![meshed("web-0", "a", true)]), &[], now());
        assert_eq!(report.problems, []);
        let [pod] = report.pods.as_slice() else { panic!("{:?}", report.pods) };
        assert_eq!((pod.state, pod.proxy_ready, pod.proxy_version.as_str()), (State::Enrolled, true, "0.1.0"));
        assert_eq!((report.agents[0].enrolled, report.agents[0].pending), (1, 0));
        let plane = report.control_plane.unwrap();
        assert_eq!(plane.lease.unwrap().renewed_seconds_ago, Some(2));
        assert_eq!(plane.components.last().unwrap().versions, ["0.1.0"]);
    }

    #[test]
    fn a_pod_that_its_agent_does_not_know_is_told_from_one_that_nobody_was_asked_about() {
        let agents = vec![agent("a", Ok(status(Vec::new()))), agent("b", Err("connection refused".into()))];
        let report = Report::of_cluster(
            &mesh(agents, vec![meshed("web-0", "a", false), meshed("web-1", "b", true)]),
            &[],
            now(),
        );
        let states: Vec<_> = report.pods.iter().map(|pod| pod.state).collect();
        assert_eq!(states, [State::Missing, State::Unknown]);
    }

    #[test]
    fn a_pod_that_the_agents_do_not_enrol_is_a_problem_only_while_it_is_not_ready() {
        let of = |name: &str, control_plane: &str| {
            let mut pod = meshed(name, "a", true);
            pod.metadata.labels = Some([(labels::CONTROL_PLANE_NS.to_owned(), control_plane.to_owned())].into());
            pod
        };
        let mut waiting = of("waiting", "another");
        waiting.status.as_mut().unwrap().init_container_statuses.as_mut().unwrap()[0].ready = false;
        let pods = vec![of("named", "linkerd-edge"), of("unnamed", "another"), waiting];
        let mut mesh = mesh(vec![agent("a", Ok(status(Vec::new())))], pods);
        let run_with = |mesh: &mut Mesh, arguments: &[&str]| {
            let spec = json!({"containers": [{"name": "agent", "args": arguments}]});
            let daemon_set = mesh.daemon_set.as_mut().unwrap().as_mut().unwrap();
            daemon_set.spec.template.spec = Some(serde_json::from_value(spec).unwrap());
        };
        let named = "--controller-namespace=linkerd,linkerd-edge";
        // The kernel enrols proxies by their user, whatever their control plane.
        run_with(&mut mesh, &["run", named]);
        let states: Vec<_> = pod_rows(&mesh).iter().map(|pod| pod.state).collect();
        assert_eq!(states, [State::Missing; 3]);
        run_with(&mut mesh, &["run", named, "--no-self-enrol"]);
        let report = Report::of_cluster(&mesh, &[], now());
        let states: Vec<_> = report.pods.iter().map(|pod| pod.state).collect();
        assert_eq!(states, [State::Missing, State::Unserved, State::Unserved]);
        let reason = &report.pods[1].reason;
        assert!(reason.contains("namespace another") && reason.contains("controllerNamespace"), "{reason}");
        let problems: Vec<_> = report.problems.iter().map(|problem| problem.object.as_str()).collect();
        assert_eq!(problems, ["Pod shop/named", "Pod shop/waiting"], "one may wait for its node for ever");
    }

    #[test]
    fn a_lease_that_nobody_renews_is_expired() {
        let mesh = mesh(Vec::new(), Vec::new());
        let lease = mesh.lease.unwrap().unwrap();
        assert!(!lease_row(&lease, now()).expired);
        assert!(lease_row(&lease, "2026-01-01T00:01:00Z".parse().unwrap()).expired);
    }
}
