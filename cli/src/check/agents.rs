//! Checks of the agents: one on each node, ready, answering, of one version.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt as _;

use super::{
    answer::{Stop, known},
    data_plane::{is_ours, last_seen},
    facts::Facts,
    installed::not_ready,
};
use crate::{
    agent::DAEMON_SET,
    docs,
    mesh::{Agent, is_agent, pods},
    problem::Problem,
    status::without_agent,
};

pub(super) fn exists(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let object = facts.named("DaemonSet", DAEMON_SET);
    Ok(match known(&object, &facts.cluster()?.mesh.daemon_set)? {
        Some(_) => Vec::new(),
        None => vec![Problem::new(object, "does not exist, so nothing redirects new pods", facts.upgrade(""))],
    })
}

pub(super) fn on_all_nodes(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let mesh = &facts.cluster()?.mesh;
    if !matches!(mesh.daemon_set, Ok(Some(_))) {
        return Err(Stop::Skip);
    }
    let nodes = known("Nodes", &mesh.nodes)?;
    let refused = creation_failure(facts);
    let values = match mesh.is_agent_alone() {
        true => "tolerations, nodeSelector",
        false => "agent.tolerations, agent.nodeSelector",
    };
    let missing = without_agent(nodes, mesh).into_iter().map(|node| {
        let why = refused.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        let remedy = match refused {
            Some(_) => format!("kubectl label --overwrite namespace {} pod-security.kubernetes.io/enforce=privileged, or remove what refuses it", facts.namespace),
            None => format!("meshed pods there never become ready; let it run there (values {values})"),
        };
        Problem::new(format!("Node {node}"), format!("has no agent{why}"), remedy)
    });
    Ok(missing.collect())
}

pub(super) fn ready(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let all = known("Pods", &facts.cluster()?.mesh.control_pods)?;
    let broken = all.iter().filter(|pod| is_agent(pod) && !pods::is_leaving(pod) && !pods::is_ready(pod));
    Ok(broken
        .map(|pod| {
            let problem = not_ready(facts, pod);
            let text = match node_warning(facts, pod) {
                Some(warning) => warning,
                None => problem.problem,
            };
            let object = format!("{} on node {}", problem.object, pods::node(pod));
            Problem {
                object,
                problem: text,
                remedy: format!("{}; a node needs Linux 5.10, cgroup2 and BTF", problem.remedy),
            }
        })
        .collect())
}

pub(super) fn answer(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let mesh = &facts.cluster()?.mesh;
    // Agents that are not ready are reported already.
    let ready = mesh.agents.iter().filter(|agent| pods::is_ready(&agent.pod) && !pods::is_leaving(&agent.pod));
    Ok(ready
        .filter_map(|agent| {
            let error = agent.answer.as_ref().err()?;
            let remedy = format!(
                "this user needs `get` and `create` of pods/exec in {}; else see the agent's log",
                facts.namespace
            );
            Some(Problem::new(format!("Agent on node {}", agent.node()), format!("does not answer: {error}"), remedy))
        })
        .collect())
}

pub(super) fn one_version(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let mesh = &facts.cluster()?.mesh;
    let answers = || mesh.agents.iter().filter_map(|agent| agent.answer.as_ref().ok());
    let versions: BTreeSet<_> = answers().map(|status| status.version.as_str()).collect();
    let programs: BTreeSet<_> = answers().map(|status| status.programs.as_str()).collect();
    if versions.len() <= 1 && programs.len() <= 1 {
        return Ok(Vec::new());
    }
    let versions: Vec<_> = versions.into_iter().collect();
    let problem = format!("agents run {} with {} kinds of programs", versions.join(", "), programs.len());
    let name = mesh.daemon_set_name();
    let remedy = format!("kubectl -n {} rollout status daemonset/{name}", facts.namespace);
    Ok(vec![Problem::new(facts.named("DaemonSet", &name), problem, remedy)])
}

pub(super) fn below_the_root(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let mesh = &facts.cluster()?.mesh;
    let at_root = |agent: &Agent| {
        let status = agent.answer.as_ref().ok().filter(|status| status.cgroup_is_root)?;
        let problem = format!("its programs are attached to the root of the cgroup2 tree: {}", status.cgroup_reason);
        let remedy = "it works, but the programs also run for host processes; a kubelet with cgroup2 has its own kubepods cgroup";
        Some(Problem::new(format!("Agent on node {}", agent.node()), problem, remedy))
    };
    Ok(mesh.agents.iter().filter_map(at_root).collect())
}

pub(super) fn no_misses(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let mesh = &facts.cluster()?.mesh;
    let missed = |agent: &Agent| {
        let misses = agent.answer.as_ref().ok().map(|status| status.flow_misses).filter(|misses| *misses > 0)?;
        let problem = format!("{misses} connections reached a proxy's outbound port without an original destination");
        Some(Problem::new(
            format!("Agent on node {}", agent.node()),
            problem,
            format!("was port 4140 dialled by nsenter or port-forward? see {}", docs::page("troubleshooting.md")),
        ))
    };
    Ok(mesh.agents.iter().filter_map(missed).collect())
}

/// Why the DaemonSet's pods are not created, if something refuses them.
fn creation_failure(facts: &Facts) -> Option<String> {
    let cluster = facts.cluster().ok()?;
    let (events, name) = (cluster.events.as_ref().ok()?, cluster.mesh.daemon_set_name());
    let of_agents = |event: &&Event| {
        let object = &event.involved_object;
        object.kind.as_deref() == Some("DaemonSet")
            && object.name.as_ref() == Some(&name)
            && object.namespace.as_deref() == Some(&facts.namespace)
            && event.reason.as_deref() == Some("FailedCreate")
    };
    // Only the last one: earlier ones may concern a namespace that has been corrected since.
    let last = events.iter().filter(of_agents).max_by_key(|event| last_seen(event));
    last.and_then(|event| event.message.clone())
}

/// The warning that this agent published as an Event on its node.
fn node_warning(facts: &Facts, agent: &Pod) -> Option<String> {
    let events = facts.cluster().ok()?.events.as_ref().ok()?;
    // Warnings of earlier agents may be outdated.
    let since = agent.creation_timestamp().map_or(0, |time| time.0.as_second());
    let own = |event: &&Event| {
        is_ours(event)
            && event.involved_object.kind.as_deref() == Some("Node")
            && event.involved_object.name.as_deref() == Some(pods::node(agent))
            && last_seen(event) >= since
    };
    events.iter().filter(own).max_by_key(|event| last_seen(event))?.message.clone()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::check::facts::tests::{check, healthy, object};

    #[test]
    fn a_node_whose_agent_may_not_be_made_says_who_refuses_it() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        cluster.mesh.nodes.as_mut().unwrap().push(object(json!({"metadata": {"name": "b"}})));
        check(on_all_nodes(&facts), &[("Node b", "has no agent")]);
        let involved = json!({"kind": "DaemonSet", "name": "weft-agent", "namespace": "linkerd"});
        facts.cluster.as_mut().unwrap().events = Ok(vec![object(json!({"metadata": {}, "involvedObject": involved,
            "type": "Warning", "reason": "FailedCreate", "message": "violates PodSecurity \"baseline:latest\""}))]);
        check(on_all_nodes(&facts), &[("Node b", "violates PodSecurity")]);
        assert!(on_all_nodes(&facts).unwrap()[0].remedy.contains("enforce=privileged"));
    }

    /// `agent.nodeSelector` leaves out what has no meshed pods, such as nodes with an old kernel.
    #[test]
    fn a_node_that_the_agent_does_not_select_needs_none_without_meshed_pods() {
        let mut facts = healthy();
        let mesh = &mut facts.cluster.as_mut().unwrap().mesh;
        mesh.nodes.as_mut().unwrap().push(object(json!({"metadata": {"name": "b"}})));
        let template = json!({"spec": {"containers": [], "nodeSelector": {"mesh": "true"}}});
        mesh.daemon_set.as_mut().unwrap().as_mut().unwrap().spec.template = object(template);
        check(on_all_nodes(&facts), &[]);
        let meshed = facts.cluster.as_mut().unwrap().mesh.meshed.as_mut().unwrap();
        meshed[0].spec.as_mut().unwrap().node_name = Some("b".to_owned());
        check(on_all_nodes(&facts), &[("Node b", "has no agent")]);
    }

    #[test]
    fn an_agent_that_its_node_cannot_serve_says_what_is_missing() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        cluster.mesh.control_pods.as_mut().unwrap()[0].status = Some(object(json!({"phase": "Running"})));
        cluster
            .container_messages
            .insert("linkerd/weft-agent-1".into(), vec!["container agent: not ready: datapath".into()]);
        check(ready(&facts), &[("Pod linkerd/weft-agent-1 on node a", "not ready: datapath")]);
        facts.cluster.as_mut().unwrap().events = Ok(vec![object(json!({"metadata": {}, "type": "Warning",
            "involvedObject": {"kind": "Node", "name": "a"}, "reportingComponent": "weft.io/agent",
            "message": "no BTF: /sys/kernel/btf/vmlinux does not exist"}))]);
        check(ready(&facts), &[("Pod linkerd/weft-agent-1 on node a", "no BTF")]);
    }

    #[test]
    fn agents_that_differ_or_miss_connections_are_reported() {
        let mut facts = healthy();
        assert_eq!(
            (one_version(&facts), no_misses(&facts), below_the_root(&facts)),
            (Ok(vec![]), Ok(vec![]), Ok(vec![]))
        );
        let agents = &mut facts.cluster.as_mut().unwrap().mesh.agents;
        let mut other = agents[0].clone();
        let status = other.answer.as_mut().unwrap();
        (status.programs, status.flow_misses, status.cgroup_is_root) = ("other".into(), 3, true);
        agents.push(other);
        check(one_version(&facts), &[("DaemonSet linkerd/weft-agent", "2 kinds of programs")]);
        check(no_misses(&facts), &[("Agent on node a", "3 connections")]);
        check(below_the_root(&facts), &[("Agent on node a", "root of the cgroup2 tree")]);
    }
}
