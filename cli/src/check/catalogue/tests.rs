//! Tests of all checks together: a healthy cluster, what each category needs to know, and the documents.

use std::collections::BTreeMap;

use serde_json::json;

use super::{
    super::{
        facts::{
            ClusterFacts, Facts,
            tests::{healthy, object},
        },
        outcome::Outcome,
    },
    *,
};
use crate::{
    cluster::HELM_RELEASE,
    mesh::{installed::PART_OF, other_agent::tests::alone},
};

/// Every mode.
const MODES: [Mode; 7] =
    [Mode::Pre, Mode::Definitions, Mode::Installed, Mode::Proxy, Mode::Viz, Mode::VizProxy, Mode::AgentAlone];

#[test]
fn a_healthy_cluster_passes_every_check_of_every_mode() {
    for mode in [Mode::Pre, Mode::Definitions, Mode::Installed, Mode::Proxy] {
        let mut facts = healthy();
        facts.mode = mode;
        let cluster = facts.cluster.as_mut().unwrap();
        if mode == Mode::Pre {
            cluster.config = Ok(None);
        }
        let outcome = Outcome::of(of(facts.mode), &facts);
        let failed: Vec<_> = outcome.checks().filter(|check| !check.problems.is_empty()).collect();
        assert!(outcome.success && failed.is_empty(), "{mode:?}: {failed:#?}");
    }
}

#[test]
fn nothing_is_judged_of_a_cluster_that_does_not_answer() {
    let mut facts = healthy();
    facts.cluster = Err("connection refused".to_owned());
    let outcome = Outcome::of(of(facts.mode), &facts);
    assert!(!outcome.success);
    let names: Vec<_> = outcome.categories.iter().map(|category| category.category_name).collect();
    assert_eq!(names, ["kubernetes-api"]);
}

#[test]
fn what_may_not_be_read_ends_nothing_and_what_is_not_there_does() {
    let last = |facts: &Facts| Outcome::of(of(facts.mode), facts).categories.last().unwrap().category_name;
    let mut facts = healthy();
    facts.cluster.as_mut().unwrap().namespaces = Err("namespaces is forbidden".to_owned());
    assert_eq!(last(&facts), "weft-events");
    facts.cluster.as_mut().unwrap().namespaces = Ok(Vec::new());
    assert_eq!(last(&facts), "linkerd-existence");
}

#[test]
fn only_the_definitions_are_checked_on_request() {
    let mut facts = healthy();
    facts.mode = Mode::Definitions;
    let cluster = facts.cluster.as_mut().unwrap();
    (cluster.namespaces, cluster.config) = (Ok(Vec::new()), Ok(None));
    let outcome = Outcome::of(of(facts.mode), &facts);
    let names: Vec<_> = outcome.categories.iter().map(|category| category.category_name).collect();
    assert_eq!(names, ["kubernetes-api", "kubernetes-version", "gateway-api-crd", "linkerd-crd"]);
    assert!(outcome.success, "{outcome:#?}");
    facts.cluster.as_mut().unwrap().crds.as_mut().unwrap().remove("servers.policy.linkerd.io");
    assert!(!Outcome::of(of(facts.mode), &facts).success);
}

/// Every other remedy would put objects of Weft beside those of Linkerd.
#[test]
fn of_linkerds_control_plane_nothing_is_said_but_which_commands_apply() {
    let mut facts = healthy();
    let cluster = facts.cluster.as_mut().unwrap();
    (cluster.config, cluster.crds) = (Ok(Some(object(json!({"data": {}})))), Ok(BTreeMap::new()));
    for (agents, commands) in [
        (Vec::new(), &["`linkerd check`", "-L"][..]),
        (vec![alone()], &["DaemonSet linkerd-cni/linkerd-cni", "`linkerd check`", "`weft status -L linkerd-cni`"]),
    ] {
        facts.cluster.as_mut().unwrap().other_agents = Ok(agents);
        let outcome = Outcome::of(of(facts.applicable_mode()), &facts);
        let failed: Vec<_> = outcome.checks().filter(|check| !check.problems.is_empty()).collect();
        let [failed] = failed.as_slice() else { panic!("{failed:#?}") };
        let text = failed.explanation().join("\n");
        assert!(outcome.is_fatal() && failed.description == "control plane is Weft's", "{outcome:#?}");
        assert!(text.starts_with("ConfigMap linkerd/linkerd-config: ") && !text.contains("kubectl apply"), "{text}");
        assert!(commands.iter().all(|command| text.contains(command)), "{text}");
    }
}

#[test]
fn where_the_agent_is_alone_the_agents_are_checked() {
    let mut facts = Facts { mode: Mode::Installed, namespace: "linkerd-cni".to_owned(), ..healthy() };
    let cluster = facts.cluster.as_mut().unwrap();
    (cluster.config, cluster.other_agents) = (Ok(None), Ok(vec![alone()]));
    let outcome = Outcome::of(of(facts.applicable_mode()), &facts);
    let names: Vec<_> = outcome.categories.iter().map(|category| category.category_name).collect();
    assert_eq!(names, ["kubernetes-api", "kubernetes-version", "weft-existence", "weft-agent", "weft-events"]);
    let noted: Vec<_> = outcome.checks().filter(|check| !check.problems.is_empty()).collect();
    let [noted] = noted.as_slice() else { panic!("{noted:#?}") };
    let text = noted.explanation().join("\n");
    assert!(outcome.success && text.starts_with("DaemonSet linkerd-cni/linkerd-cni: "), "{outcome:#?}");
    assert!(text.contains("`linkerd check`") && text.contains("`weft status -L linkerd-cni`"), "{text}");
    // Not the agent of this namespace.
    facts.namespace = "linkerd".to_owned();
    assert_eq!(facts.applicable_mode(), Mode::Installed);
}

#[test]
fn descriptions_are_unique_within_a_category() {
    for category in CATEGORIES {
        let unique: BTreeSet<_> = category.checks.iter().map(|check| check.description).collect();
        assert_eq!(unique.len(), category.checks.len(), "{}", category.name);
    }
}

/// Wrong in many ways, so that checks look at all that they ever look at.
fn broken() -> Facts {
    let mut facts = healthy();
    facts.expected_version = Some("0.2.0".to_owned());
    let cluster = facts.cluster.as_mut().unwrap();
    let values = "controllerReplicas: 3\nclusterNetworks: 192.0.2.0/24\nproxy: {image: {name: localhost/weft-proxy, version: 0.3.0}}\n";
    let metadata = json!({"labels": {PART_OF.0: PART_OF.1}, "annotations": {HELM_RELEASE: "mesh"}});
    cluster.config = Ok(Some(object(json!({"metadata": metadata, "data": {"values": values}}))));
    cluster.crds = Ok(BTreeMap::new());
    cluster.clock_skew = Some(1000);
    cluster.mesh.nodes.as_mut().unwrap().push(object(json!({"metadata": {"name": "b"}})));
    let pods = cluster.mesh.control_pods.as_mut().unwrap();
    pods[0].status = Some(object(json!({"phase": "Running"})));
    pods.push(object(
        json!({"metadata": {"name": "linkerd-destination-1", "namespace": "linkerd"}, "status": {"phase": "Pending"}}),
    ));
    for name in ["weft-agent-1", "linkerd-destination-1", "viz-1"] {
        cluster.container_messages.insert(format!("linkerd/{name}"), vec!["container x: not ready: x".to_owned()]);
    }
    let event = |kind: &str, name: &str, reason: &str| {
        object(
            json!({"metadata": {}, "involvedObject": {"kind": kind, "name": name, "namespace": "linkerd"}, "type": "Warning",
            "reason": reason, "message": reason, "reportingComponent": "weft.io/agent", "lastTimestamp": "2100-01-01T00:00:00Z"}),
        )
    };
    cluster.events =
        Ok(vec![event("DaemonSet", "weft-agent", "FailedCreate"), event("Node", "a", "WeftAgentUnsupported")]);
    cluster.viz = Ok((
        vec![object(
            json!({"metadata": {"name": "weft-viz", "namespace": "linkerd"}, "spec": {"selector": {}, "template": {}}}),
        )],
        vec![object(json!({"metadata": {"name": "viz-1", "namespace": "linkerd"}, "status": {"phase": "Pending"}}))],
    ));
    cluster.webhooks.values_mut().for_each(|webhook| webhook.endpoints = Ok(0));
    facts
}

/// Takes over what a part has found.
fn take(part: Part, from: &ClusterFacts, to: &mut ClusterFacts) {
    let from = from.clone();
    match part {
        Part::Definitions => to.crds = from.crds,
        Part::Access => {
            (to.access, to.clock_skew, to.service_address) = (from.access, from.clock_skew, from.service_address);
        }
        Part::OtherAgents => to.other_agents = from.other_agents,
        Part::Config => to.config = from.config,
        Part::Settings => {
            (to.namespaces, to.trust_roots, to.issuer) = (from.namespaces, from.trust_roots, from.issuer);
        }
        Part::Inventory => {
            (to.cluster_roles, to.cluster_role_bindings) = (from.cluster_roles, from.cluster_role_bindings);
            (to.service_accounts, to.services) = (from.service_accounts, from.services);
        }
        Part::Webhooks => to.webhooks = from.webhooks,
        Part::Workloads => (to.workloads, to.pods) = (from.workloads, from.pods),
        Part::Events => to.events = from.events,
        Part::Mesh => (to.mesh, to.container_messages) = (from.mesh, from.container_messages),
        Part::Component => (to.viz, to.viz_answer) = (from.viz, from.viz_answer),
        Part::Objects => to.objects = from.objects,
    }
}

/// A category is judged as soon as what it needs is known.
#[test]
fn what_a_category_does_not_need_does_not_change_its_checks() {
    for (whole, category) in [healthy(), broken()].iter().flat_map(|facts| CATEGORIES.iter().map(move |it| (facts, it)))
    {
        let known = whole.cluster.as_ref().unwrap();
        let mut facts = whole.clone();
        let mut partial = ClusterFacts::unasked(known.version.clone(), &whole.namespace);
        category.needs.iter().for_each(|part| take(*part, known, &mut partial));
        facts.cluster = Ok(Box::new(partial));
        for mode in MODES {
            let judge = |facts: &Facts| {
                let facts = Facts { mode, ..facts.clone() };
                let applying = [category].into_iter().filter(|category| (category.applies)(mode));
                serde_json::to_value(Outcome::of(applying, &facts)).unwrap()
            };
            assert_eq!(judge(&facts), judge(whole), "{mode:?}: {} needs more than it names", category.name);
        }
    }
}

/// A scope asks for nothing that none of its categories needs.
#[test]
fn a_scope_asks_only_for_what_it_needs() {
    assert_eq!(needs(Mode::Definitions), BTreeSet::from([Part::Definitions, Part::Config]));
    assert!(!needs(Mode::Installed).contains(&Part::Access));
}

#[test]
fn every_check_is_explained_where_its_hint_leads() {
    let document = include_str!("../../../../docs/troubleshooting.md");
    let checks = || CATEGORIES.iter().flat_map(|category| category.checks);
    for check in checks() {
        let line = format!("- <a id=\"{}\"></a>**{}**:", check.anchor, check.description);
        assert!(document.lines().any(|it| it.starts_with(&line)), "docs/troubleshooting.md lacks a line {line:?}");
    }
    let anchors: BTreeSet<_> = checks().map(|check| check.anchor).collect();
    assert_eq!(anchors.len(), checks().count(), "two checks have one anchor");
    let explained = document.lines().filter_map(|line| line.strip_prefix("- <a id=\"")?.split('"').next());
    let stale: Vec<_> = explained.filter(|anchor| !anchors.contains(anchor)).collect();
    assert!(stale.is_empty(), "docs/troubleshooting.md explains checks that are gone: {stale:?}");
}

#[test]
fn every_category_is_in_the_guide() {
    let guide = include_str!("../../../../docs/cli.md");
    for category in CATEGORIES {
        let cell = format!("`{}`", category.name);
        let is_there = guide.lines().any(|line| line.split('|').nth(1).is_some_and(|first| first.contains(&cell)));
        assert!(is_there, "the table in docs/cli.md lacks {cell}");
    }
}
