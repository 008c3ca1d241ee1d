//! Problems that somebody should solve, most fundamental first: agents, control plane, pods.

use std::collections::BTreeSet;

use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{Node, NodeSelectorTerm, Pod, PodSpec, Taint, Toleration},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement},
    jiff::Timestamp,
};
use kube::ResourceExt as _;
use weft_k8s_api::{
    labels,
    policy::{is_readable, selects},
};

use super::rows::{AgentRow, PodRow, State};
use crate::{
    cluster, docs,
    mesh::{Agent, Mesh, is_agent, other_agent::OtherAgent, pods},
    problem::Problem,
};

/// `elsewhere` are the agents of other namespaces, where this one has none.
pub(super) fn of_cluster(
    mesh: &Mesh,
    elsewhere: &[OtherAgent],
    agents: &[AgentRow],
    rows: &[PodRow],
    now: Timestamp,
) -> Vec<Problem> {
    let mut found = Vec::new();
    unanswered(mesh, &mut found);
    match elsewhere {
        [] => nodes_without_agent(mesh, &mut found),
        elsewhere => found.extend(elsewhere.iter().map(OtherAgent::status)),
    }
    of_agents(&mesh.namespace, agents, &mut found);
    several_versions(mesh, agents, &mut found);
    of_control_plane(mesh, !elsewhere.is_empty(), &mut found);
    of_lease(mesh, now, &mut found);
    of_pods(rows, &mut found);
    found
}

/// Queries that the API server did not answer: problems that depend on them are missing below.
fn unanswered(mesh: &Mesh, found: &mut Vec<Problem>) {
    let questions = [
        ("Nodes", mesh.nodes.as_ref().err()),
        ("Deployments", mesh.deployments.as_ref().err()),
        ("DaemonSet weft-agent", mesh.daemon_set.as_ref().err()),
        ("Lease", mesh.lease.as_ref().err()),
        ("Pods with a proxy", mesh.meshed.as_ref().err()),
    ];
    for (what, error) in questions {
        if let Some(error) = error {
            found.push(Problem::new(what.to_owned(), error, cluster::remedy_for(error)));
        }
    }
}

fn nodes_without_agent(mesh: &Mesh, found: &mut Vec<Problem>) {
    let (Ok(nodes), Ok(daemon_set)) = (&mesh.nodes, &mesh.daemon_set) else { return };
    if daemon_set.is_none() {
        let object = format!("DaemonSet {}/weft-agent", mesh.namespace);
        found.push(Problem::new(
            object,
            "does not exist, so nothing redirects new pods",
            "weft install | kubectl apply -f -",
        ));
        return;
    }
    for node in without_agent(nodes, mesh) {
        let object = format!("Node {node}");
        let remedy =
            "meshed pods there stay unready; allow it to run there (values agent.tolerations, agent.nodeSelector)";
        found.push(Problem::new(object, "has no agent", remedy));
    }
}

/// Nodes that should have an agent and have none: those that its DaemonSet selects and whose taints it tolerates, and
/// those with meshed pods.
pub(crate) fn without_agent(nodes: &[Node], mesh: &Mesh) -> Vec<String> {
    let with: BTreeSet<&str> = mesh.agents.iter().map(Agent::node).collect();
    let enrols = mesh.enrols();
    let meshed = mesh.meshed.iter().flatten().filter(|pod| !pods::is_over(pod) && enrols(pod));
    let meshed: BTreeSet<&str> = meshed.map(pods::node).collect();
    let linux = |node: &&Node| node.labels().get("kubernetes.io/os").is_none_or(|os| os == "linux");
    let selected = |node: &Node| mesh.daemon_set.iter().flatten().any(|daemon_set| is_selected(daemon_set, node));
    let wanted = nodes.iter().filter(linux).map(|node| (node.name_any(), selected(node)));
    let missing = wanted.filter(|(name, selected)| {
        let name = name.as_str();
        !with.contains(name) && (*selected || meshed.contains(name))
    });
    missing.map(|(name, _)| name).collect()
}

/// What pods of every DaemonSet on the host network tolerate
/// (<https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/#taints-and-tolerations>).
const TOLERATED: [(&str, &str); 7] = [
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
    ("node.kubernetes.io/network-unavailable", "NoSchedule"),
];

/// Whether a DaemonSet's pods tolerate the taints of a node. An operator of numbers counts as if they did.
fn tolerates(spec: &PodSpec, node: &Node) -> bool {
    let tolerates = |toleration: &Toleration, taint: &Taint| {
        let is_any_or = |field: &Option<String>, value: &str| {
            field.as_deref().is_none_or(|field| field.is_empty() || field == value)
        };
        let has_value = match toleration.operator.as_deref() {
            None | Some("" | "Equal") => {
                toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
            }
            Some(_) => true,
        };
        is_any_or(&toleration.effect, &taint.effect) && is_any_or(&toleration.key, &taint.key) && has_value
    };
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.filter(|taint| taint.effect != "PreferNoSchedule").all(|taint| {
        TOLERATED.contains(&(taint.key.as_str(), taint.effect.as_str()))
            || spec.tolerations.iter().flatten().any(|toleration| tolerates(toleration, taint))
    })
}

/// Whether a DaemonSet's template selects a node. What is not said by labels, such as `Gt` or a field, counts as if it
/// did.
fn is_selected(daemon_set: &DaemonSet, node: &Node) -> bool {
    let Some(spec) = &daemon_set.spec.template.spec else { return true };
    let labels = node.metadata.labels.as_ref();
    let pairs = LabelSelector { match_labels: spec.node_selector.clone(), ..LabelSelector::default() };
    let takes = |term: &NodeSelectorTerm| {
        let rules = term.match_expressions.iter().flatten().map(|rule| LabelSelectorRequirement {
            key: rule.key.clone(),
            operator: rule.operator.clone(),
            values: rule.values.clone(),
        });
        let selector = LabelSelector { match_expressions: Some(rules.collect()), ..LabelSelector::default() };
        !is_readable(&selector) || selects(&selector, labels)
    };
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    tolerates(spec, node)
        && selects(&pairs, labels)
        && required.is_none_or(|required| required.node_selector_terms.iter().any(takes))
}

pub(super) fn of_agents(namespace: &str, agents: &[AgentRow], found: &mut Vec<Problem>) {
    for agent in agents {
        let object = if agent.node.is_empty() { "Agent".to_owned() } else { format!("Agent on node {}", agent.node) };
        if let Some(error) = &agent.error {
            let remedy = if agent.pod.is_empty() {
                "look at its log".to_owned()
            } else {
                format!("kubectl -n {namespace} logs {} and kubectl describe node {}", agent.pod, agent.node)
            };
            found.push(Problem::new(object.clone(), format!("does not answer: {error}"), remedy));
        }
        if agent.bypassed {
            let remedy = if agent.pod.is_empty() {
                "weft-agent bypass off".to_owned()
            } else {
                format!("kubectl -n {namespace} exec {} -- /weft-agent bypass off", agent.pod)
            };
            let problem = "all redirection is switched off: connections bypass the proxies, in plain text";
            found.push(Problem::new(object.clone(), problem, remedy));
        }
        if agent.listeners_lost > 0 {
            let problem = format!("{} listeners of proxies could not be recorded", agent.listeners_lost);
            let remedy =
                "their pods get no inbound connections if they have no other: restart them; see the agent's log";
            found.push(Problem::new(object.clone(), problem, remedy));
        }
        if agent.admissions_refused > 0 {
            let problem = format!(
                "the kernel refused {} network namespaces in which a proxy listened: no room, or too many of one container",
                agent.admissions_refused
            );
            let remedy = format!(
                "their pods wait for the agent, which enrols them; if the number grows, see the node's Events and {}",
                docs::page("troubleshooting.md")
            );
            found.push(Problem::new(object.clone(), problem, remedy));
        }
        if agent.flow_misses > 0 {
            found.push(Problem::new(
                object,
                format!(
                    "{} connections reached a proxy's outbound port without an original destination",
                    agent.flow_misses
                ),
                format!("was port 4140 dialled by nsenter or port-forward? see {}", docs::page("troubleshooting.md")),
            ));
        }
    }
}

fn several_versions(mesh: &Mesh, agents: &[AgentRow], found: &mut Vec<Problem>) {
    let distinct = |of: fn(&AgentRow) -> &String| -> BTreeSet<&String> {
        agents.iter().filter(|agent| agent.error.is_none()).map(of).collect()
    };
    if distinct(|agent| &agent.version).len() > 1 || distinct(|agent| &agent.programs).len() > 1 {
        let (namespace, daemon_set) = (&mesh.namespace, mesh.daemon_set_name());
        let object = format!("DaemonSet {namespace}/{daemon_set}");
        let remedy = format!("kubectl -n {namespace} rollout status daemonset/{daemon_set}");
        found.push(Problem::new(object, "agents of several versions run side by side", remedy));
    }
}

fn of_control_plane(mesh: &Mesh, is_elsewhere: bool, found: &mut Vec<Problem>) {
    let no_deployment = mesh.deployments.as_ref().is_ok_and(Vec::is_empty);
    if no_deployment && !is_elsewhere && !mesh.is_agent_alone() {
        let object = format!("Namespace {}", mesh.namespace);
        found.push(Problem::new(
            object,
            "has no control plane",
            "weft install | kubectl apply -f -, or name another with -L",
        ));
    }
    let own = |pod: &&Pod| !is_agent(pod) && !pods::is_over(pod) && !pods::is_leaving(pod) && !pods::is_ready(pod);
    for pod in mesh.control_pods.iter().flatten().filter(own) {
        let why = pods::trouble(pod).unwrap_or_else(|| format!("is {}", pods::phase(pod)));
        let remedy = format!("kubectl -n {} describe pod {}, or `weft check`", mesh.namespace, pod.name_any());
        found.push(Problem::new(format!("Pod {}", pods::full_name(pod)), format!("not ready: {why}"), remedy));
    }
}

fn of_lease(mesh: &Mesh, now: Timestamp, found: &mut Vec<Problem>) {
    let Ok(Some(lease)) = &mesh.lease else { return };
    let spec = lease.spec.as_ref();
    let held = spec.and_then(|spec| spec.holder_identity.as_deref()).is_some_and(|holder| !holder.is_empty());
    let age = spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| now.as_second() - time.0.as_second());
    let lasts = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(0);
    if held && age.is_some_and(|age| age <= i64::from(lasts)) {
        return;
    }
    let state = age.map_or_else(|| "it has no holder".to_owned(), |age| format!("it has not been renewed for {age}s"));
    let remedy = "EndpointSlices of ExternalWorkloads are not written until a destination pod runs; see its log";
    found.push(Problem::new(format!("Lease {}/{}", mesh.namespace, labels::ENDPOINT_WRITE_LEASE), state, remedy));
}

pub(super) fn of_pods(rows: &[PodRow], found: &mut Vec<Problem>) {
    found.extend(rows.iter().filter_map(not_enrolled));
    for row in rows.iter().filter(|row| row.bypassed) {
        let object = format!("Pod {}/{}", row.namespace, row.name);
        let remedy = format!("remove its annotation {}", weft_k8s_api::labels::BYPASS);
        found.push(Problem::new(object, "bypassed: its connections bypass its proxy, in plain text", remedy));
    }
    for row in rows.iter().filter(|row| row.state == State::Enrolled && !row.proxy_ready) {
        let object = format!("Pod {}/{}", row.namespace, row.name);
        // For the control plane's own pods the reason was reported already.
        if found.iter().all(|problem| problem.object != object) {
            let remedy = format!("kubectl -n {} logs {} -c linkerd-proxy", row.namespace, row.name);
            found.push(Problem::new(object, "its proxy is not ready", remedy));
        }
    }
}

/// Why the kernel does not redirect this pod; `None` if it does, or if that is unknown.
pub(super) fn not_enrolled(row: &PodRow) -> Option<Problem> {
    let object = format!("Pod {}/{}", row.namespace, row.name);
    let reason = |default: &str| if row.reason.is_empty() { default.to_owned() } else { row.reason.clone() };
    let node = if row.node.is_empty() { String::new() } else { format!(" on {}", row.node) };
    match row.state {
        State::Enrolled | State::Leaving | State::Unknown => None,
        State::Unserved if row.proxy_ready => None,
        State::Unserved => {
            let remedy = "to have it enrolled, add its control plane's namespace to controllerNamespace";
            Some(Problem::new(object, format!("its proxy is not ready, and {}", row.reason), remedy))
        }
        State::Pending => {
            let remedy = "it becomes ready when this is over; if it lasts, see the agent's log";
            Some(Problem::new(object, format!("not redirected yet: {}", reason("its proxy does not listen")), remedy))
        }
        State::Refused => {
            let why = format!("the agent{node} refuses it: {}", reason("no reason given"));
            Some(Problem::new(object, why, "correct the annotation, then recreate the pod"))
        }
        State::Missing => {
            let remedy = "if it lasts longer than the pod's start, see the agent's log";
            Some(Problem::new(object, format!("the agent{node} does not know it"), remedy))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use weft_proto::agent::{PodState, StatusResponse};

    use super::{
        super::report::{
            Report,
            tests::{agent, enrolled, mesh, meshed, now, status},
        },
        *,
    };
    use crate::mesh::other_agent::tests::{alone, of_mesh};

    /// Checks the objects of the problems, and a part of each text.
    fn check(report: &Report, expected: &[(&str, &str)]) {
        let found: Vec<_> = report.problems.iter().map(|problem| (&problem.object, &problem.problem)).collect();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for ((object, problem), (expected, word)) in found.iter().zip(expected) {
            assert!(object.as_str() == *expected && problem.contains(word), "{object}: {problem}");
        }
        assert!(report.problems.iter().all(|problem| !problem.remedy.is_empty()));
    }

    #[test]
    fn a_refused_annotation_is_repeated() {
        let reason = "annotation config.linkerd.io/skip-inbound-ports: bad value";
        let agents = vec![agent("a", Ok(status(vec![enrolled("web-0", PodState::Refused, reason)])))];
        let report = Report::of_cluster(&mesh(agents, vec![meshed("web-0", "a", false)]), &[], now());
        check(&report, &[("Pod shop/web-0", "skip-inbound-ports")]);
    }

    #[test]
    fn a_proxy_that_is_not_ready_is_named_once_its_pod_is_redirected() {
        let agents = vec![agent("a", Ok(status(vec![enrolled("web-0", PodState::Enrolled, "")])))];
        let report = Report::of_cluster(&mesh(agents, vec![meshed("web-0", "a", false)]), &[], now());
        check(&report, &[("Pod shop/web-0", "proxy is not ready")]);
    }

    #[test]
    fn an_agent_that_does_not_answer_comes_before_its_pods() {
        let agents = vec![agent("a", Err("connection refused".into()))];
        let report = Report::of_cluster(&mesh(agents, vec![meshed("web-0", "a", true)]), &[], now());
        check(&report, &[("Agent on node a", "connection refused")]);
    }

    #[test]
    fn a_node_without_an_agent_is_named() {
        let mut mesh = mesh(vec![agent("a", Ok(status(Vec::new())))], Vec::new());
        let other = json!({"metadata": {"name": "b"}});
        mesh.nodes.as_mut().unwrap().push(serde_json::from_value(other).unwrap());
        check(&Report::of_cluster(&mesh, &[], now()), &[("Node b", "no agent")]);
    }

    #[test]
    fn a_daemon_set_selects_nodes_by_their_labels() {
        let node = json!({"metadata": {"name": "b", "labels": {"pool": "apps"}}});
        let node: Node = serde_json::from_value(node).unwrap();
        let affinity = |terms: serde_json::Value| {
            let required = json!({"nodeSelectorTerms": terms});
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}})
        };
        let rule = |key: &str, operator: &str, values: &[&str]| {
            let rule = json!({"key": key, "operator": operator, "values": values});
            json!({"matchExpressions": [rule]})
        };
        for (spec, expected) in [
            (json!({}), true),
            (json!({"nodeSelector": {"pool": "apps"}}), true),
            (json!({"nodeSelector": {"mesh": "true"}}), false),
            (affinity(json!([rule("pool", "In", &["apps"])])), true),
            (affinity(json!([rule("pool", "NotIn", &["apps"])])), false),
            (affinity(json!([rule("mesh", "Exists", &[]), rule("pool", "Exists", &[])])), true),
            (affinity(json!([rule("pool", "DoesNotExist", &[])])), false),
            (affinity(json!([rule("cores", "Gt", &["8"])])), true),
        ] {
            let daemon_set = json!({"metadata": {}, "spec": {"selector": {}, "template": {"spec": spec}}});
            let daemon_set: DaemonSet = serde_json::from_value(daemon_set).unwrap();
            assert_eq!(is_selected(&daemon_set, &node), expected, "{spec}");
        }
    }

    #[test]
    fn a_daemon_set_tolerates_taints_of_nodes() {
        let every = json!([{"operator": "Exists"}]);
        let gpu = json!([{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]);
        for (tolerations, key, value, effect, expected) in [
            (json!([]), "gpu", "yes", "NoSchedule", false),
            (json!([]), "gpu", "yes", "PreferNoSchedule", true),
            (json!([]), "node.kubernetes.io/unschedulable", "", "NoSchedule", true),
            (json!([]), "node.kubernetes.io/not-ready", "", "NoSchedule", false),
            (every.clone(), "gpu", "yes", "NoExecute", true),
            (gpu.clone(), "gpu", "yes", "NoSchedule", true),
            (gpu.clone(), "gpu", "no", "NoSchedule", false),
            (gpu.clone(), "gpu", "yes", "NoExecute", false),
            (json!([{"key": "gpu"}]), "gpu", "", "NoSchedule", true),
            (json!([{"key": "gpu", "operator": "Exists"}]), "tpu", "yes", "NoSchedule", false),
        ] {
            let taint = json!({"key": key, "value": value, "effect": effect});
            let node = json!({"metadata": {"name": "b"}, "spec": {"taints": [taint]}});
            let spec = json!({"containers": [], "tolerations": tolerations});
            let daemon_set = json!({"metadata": {}, "spec": {"selector": {}, "template": {"spec": spec}}});
            let daemon_set: DaemonSet = serde_json::from_value(daemon_set).unwrap();
            let node: Node = serde_json::from_value(node).unwrap();
            assert_eq!(is_selected(&daemon_set, &node), expected, "{tolerations} {key} {value} {effect}");
        }
    }

    #[test]
    fn agents_with_different_programs_are_told() {
        let mut other = status(Vec::new());
        other.programs = "def".into();
        let agents = vec![agent("a", Ok(status(Vec::new()))), agent("b", Ok(other))];
        check(
            &Report::of_cluster(&mesh(agents, Vec::new()), &[], now()),
            &[("DaemonSet linkerd/weft-agent", "several versions")],
        );
    }

    #[test]
    fn agents_for_linkerd_need_no_control_plane_beside_them() {
        let mut mesh = mesh(vec![agent("a", Ok(status(Vec::new())))], Vec::new());
        mesh.deployments = Ok(Vec::new());
        mesh.lease = Ok(None);
        check(&Report::of_cluster(&mesh, &[], now()), &[("Namespace linkerd", "no control plane")]);
        let daemon_set = &mut mesh.daemon_set.as_mut().unwrap().as_mut().unwrap().metadata;
        daemon_set.name = Some("linkerd-cni".into());
        daemon_set.labels = Some([("linkerd.io/cni-resource".into(), "true".into())].into());
        let report = Report::of_cluster(&mesh, &[], now());
        check(&report, &[]);
        assert_eq!(report.control_plane.unwrap().components[0].name, "linkerd-cni");
    }

    #[test]
    fn agents_of_another_namespace_are_named_instead_of_an_installation() {
        let mut mesh = mesh(Vec::new(), Vec::new());
        (mesh.daemon_set, mesh.lease) = (Ok(None), Ok(None));
        check(&Report::of_cluster(&mesh, &[], now()), &[("DaemonSet linkerd/weft-agent", "does not exist")]);
        for (elsewhere, object, whose, remedy) in [
            (alone(), "DaemonSet linkerd-cni/linkerd-cni", "alone, for Linkerd", "weft status -L linkerd-cni"),
            (of_mesh("mesh"), "DaemonSet mesh/weft-agent", "another control plane", "weft status -L mesh"),
        ] {
            let report = Report::of_cluster(&mesh, std::slice::from_ref(&elsewhere), now());
            check(&report, &[(object, whose)]);
            assert_eq!(report.problems[0].remedy, remedy);
            mesh.deployments = Ok(Vec::new());
            check(&Report::of_cluster(&mesh, &[elsewhere], now()), &[(object, whose)]);
        }
    }

    #[test]
    fn full_maps_are_told() {
        let full = StatusResponse { listeners_lost: 3, admissions_refused: 5, ..status(Vec::new()) };
        let report = Report::of_cluster(&mesh(vec![agent("a", Ok(full))], Vec::new()), &[], now());
        check(&report, &[("Agent on node a", "3 listeners"), ("Agent on node a", "5 network namespaces")]);
    }

    #[test]
    fn a_question_that_may_not_be_asked_is_a_problem() {
        let mut mesh = mesh(vec![agent("a", Ok(status(Vec::new())))], Vec::new());
        mesh.lease = Err("leases is forbidden".into());
        check(&Report::of_cluster(&mesh, &[], now()), &[("Lease", "forbidden")]);
    }
}
