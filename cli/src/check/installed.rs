//! Checks of the installation: whose it is, objects by name, readable settings, running pods.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use weft_k8s_api::values::Values;

use super::{
    answer::{Stop, known},
    facts::Facts,
};
use crate::{
    docs,
    mesh::{DEPLOYMENTS, installed::Installed, is_agent, pods},
    problem::Problem,
};

const SERVICE_ACCOUNTS: [&str; 4] = ["linkerd-destination", "linkerd-identity", "linkerd-proxy-injector", "weft-agent"];
/// What checks the other parts of a mesh of Linkerd.
const LINKERD: &str = "`linkerd check` for the control plane and the proxies";

/// Remedies of later checks would install Weft's objects into another mesh.
pub(super) fn is_ours(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    match facts.installed() {
        None | Some(Installed::No) => return Err(Stop::Skip),
        // The agents of this namespace are checked.
        Some(Installed::ByOthers) if facts.agent_alone().is_some() => return Err(Stop::Skip),
        Some(Installed::ByUs | Installed::ByHelm(_) | Installed::ByTemplate) => return Ok(Vec::new()),
        Some(Installed::ByOthers) => {}
    }
    let theirs = "is that of another mesh, such as Linkerd";
    let (problem, remedy) = match facts.agents_for_linkerd().next() {
        Some(agent) => {
            let namespace = agent.alone_in().unwrap_or_default();
            let agents = format!("`weft check -L {namespace}` and `weft status -L {namespace}` for the agents");
            (format!("{theirs}, and {} {}", agent.object(), agent.description()), format!("{LINKERD}, {agents}"))
        }
        None => (
            theirs.to_owned(),
            format!("{LINKERD}, or -L for the namespace of Weft's control plane; see {}", docs::page("migration.md")),
        ),
    };
    Ok(vec![Problem::new(facts.named("ConfigMap", "linkerd-config"), problem, remedy)])
}

/// A warning, after which the agents are checked.
pub(super) fn agents_have_a_control_plane(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let agent = facts.agent_alone().ok_or(Stop::Skip)?;
    let remedy = format!("{LINKERD}, `weft status -L {}` for the pods that the agents enrol", facts.namespace);
    let problem = format!("{}: only the agents are checked", agent.description());
    Ok(vec![Problem::new(agent.object(), problem, remedy)])
}

pub(super) fn namespace(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let namespaces = known("Namespaces", &facts.cluster()?.namespaces)?;
    if namespaces.iter().any(|namespace| namespace.name_any() == facts.namespace) {
        return Ok(Vec::new());
    }
    let remedy = format!("{}, or name the control plane's namespace with -L", facts.install());
    Ok(vec![Problem::new(format!("Namespace {}", facts.namespace), "does not exist", remedy)])
}

pub(super) fn config(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let object = facts.named("ConfigMap", "linkerd-config");
    Ok(match known(&object, &facts.cluster()?.config)? {
        Some(_) => Vec::new(),
        None => vec![Problem::new(
            object,
            "does not exist",
            format!("{}, or name another namespace with -L", facts.install()),
        )],
    })
}

/// The injector and the agents parse the same values with the same functions.
pub(super) fn config_parses(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let object = facts.named("ConfigMap", "linkerd-config");
    let Some(yaml) = cluster.config_yaml() else {
        let found = Problem::new(format!("{object}, data.values"), "is missing", facts.upgrade(""));
        return Ok(vec![found]);
    };
    let checked = Values::parse(yaml).and_then(|values| {
        values.redirection()?;
        values.inject_config(&facts.namespace, cluster.anchors_pem().unwrap_or_default())
    });
    Ok(match checked {
        Ok(_) => Vec::new(),
        Err(invalid) => {
            let remedy = facts.upgrade(&format!("--set {}=...", invalid.field));
            vec![Problem::new(format!("{object}, data.values, {}", invalid.field), invalid.problem, remedy)]
        }
    })
}

pub(super) fn cluster_roles(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let there = known("ClusterRoles", &facts.cluster()?.cluster_roles)?;
    Ok(missing("ClusterRole", &cluster_role_names(&facts.namespace), there, &facts.upgrade("")))
}

pub(super) fn cluster_role_bindings(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let there = known("ClusterRoleBindings", &facts.cluster()?.cluster_role_bindings)?;
    Ok(missing("ClusterRoleBinding", &cluster_role_binding_names(&facts.namespace), there, &facts.upgrade("")))
}

pub(super) fn service_accounts(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let there = known("ServiceAccounts", &facts.cluster()?.service_accounts)?;
    let names: Vec<_> = SERVICE_ACCOUNTS.map(str::to_owned).into();
    let named = missing("ServiceAccount", &names, there, &facts.upgrade(""));
    let full = |problem: Problem| Problem { object: format!("{} in {}", problem.object, facts.namespace), ..problem };
    Ok(named.into_iter().map(full).collect())
}

pub(super) fn cluster_role_names(namespace: &str) -> Vec<String> {
    rbac_names(namespace, "linkerd-policy")
}

pub(super) fn cluster_role_binding_names(namespace: &str) -> Vec<String> {
    rbac_names(namespace, "linkerd-destination-policy")
}

/// Names of what concerns the whole cluster; that of the policy controller is Linkerd's exception.
fn rbac_names(namespace: &str, policy: &str) -> Vec<String> {
    let ours = ["destination", "identity", "proxy-injector"];
    let mut names: Vec<_> = ours.iter().map(|part| format!("linkerd-{namespace}-{part}")).collect();
    names.extend([policy.to_owned(), "weft-agent".to_owned()]);
    names
}

fn missing(kind: &str, names: &[String], there: &BTreeSet<String>, remedy: &str) -> Vec<Problem> {
    let missing = names.iter().filter(|name| !there.contains(*name));
    missing.map(|name| Problem::new(format!("{kind} {name}"), "does not exist", remedy)).collect()
}

pub(super) fn replica_sets(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let deployments = known("Deployments", &facts.cluster()?.mesh.deployments)?;
    let mut found = Vec::new();
    for name in DEPLOYMENTS {
        let object = facts.named("Deployment", name);
        let Some(deployment) = deployments.iter().find(|deployment| deployment.name_any() == name) else {
            found.push(Problem::new(object, "does not exist", facts.upgrade("")));
            continue;
        };
        let wanted = deployment.spec.replicas.unwrap_or(1);
        let status = deployment.status.clone().unwrap_or_default();
        let (ready, updated) = (status.ready_replicas.unwrap_or(0), status.updated_replicas.unwrap_or(0));
        // A reason why pods are not created at all, such as Pod Security or a quota.
        let conditions = status.conditions.unwrap_or_default();
        let failure = conditions
            .into_iter()
            .find(|it| it.type_.as_deref() == Some("ReplicaFailure") && it.status.as_deref() == Some("True"));
        if let Some(failure) = failure {
            let why = failure.message.or(failure.reason).unwrap_or_default();
            let remedy =
                format!("kubectl -n {} describe replicaset -l linkerd.io/control-plane-component", facts.namespace);
            found.push(Problem::new(object, format!("cannot create its pods: {why}"), remedy));
        } else if ready < wanted || updated < wanted {
            let remedy = format!("kubectl -n {} rollout status deployment/{name}", facts.namespace);
            found.push(Problem::new(
                object,
                format!("{ready} of {wanted} replicas are ready, {updated} up to date"),
                remedy,
            ));
        }
    }
    Ok(found)
}

pub(super) fn scheduled(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let all = known("Pods", &facts.cluster()?.mesh.control_pods)?;
    let stuck = all.iter().filter_map(|pod| Some((pod, pods::unschedulable(pod)?)));
    let remedy = "add room, or change values nodeSelector, tolerations, resources, controllerReplicas";
    Ok(stuck.map(|(pod, why)| Problem::new(format!("Pod {}", pods::full_name(pod)), why, remedy)).collect())
}

pub(super) fn control_pods(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let all = known("Pods", &cluster.mesh.control_pods)?;
    let own = |pod: &&Pod| !is_agent(pod) && !pods::is_over(pod) && !pods::is_leaving(pod) && !pods::is_ready(pod);
    Ok(all.iter().filter(own).map(|pod| not_ready(facts, pod)).collect())
}

/// A pod that is not ready, with the messages of its containers.
pub(super) fn not_ready(facts: &Facts, pod: &Pod) -> Problem {
    let messages = messages_of(facts, pod);
    // A message of a running container is more useful than that it is not ready.
    let seen = pods::trouble(pod).filter(|trouble| messages.is_empty() || !trouble.ends_with("is not ready"));
    problem_of(pod, seen.into_iter().chain(messages.iter().cloned()).collect())
}

/// A pod whose proxy is not ready, regardless of its other containers.
pub(super) fn proxy_not_ready(facts: &Facts, pod: &Pod) -> Problem {
    let of_proxy = format!("container {}: ", weft_k8s_api::labels::PROXY_CONTAINER);
    let messages = messages_of(facts, pod).iter().filter(|message| message.starts_with(&of_proxy));
    problem_of(pod, pods::proxy_trouble(pod).into_iter().chain(messages.cloned()).collect())
}

fn messages_of<'a>(facts: &'a Facts, pod: &Pod) -> &'a [String] {
    let messages = facts.cluster().ok().and_then(|cluster| cluster.container_messages.get(&pods::full_name(pod)));
    messages.map(Vec::as_slice).unwrap_or_default()
}

fn problem_of(pod: &Pod, mut causes: Vec<String>) -> Problem {
    if causes.is_empty() {
        causes.push(format!("is {}", pods::phase(pod)));
    }
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let remedy = format!("kubectl -n {namespace} describe pod {name}, and its log");
    Problem::new(format!("Pod {namespace}/{name}"), causes.join("; "), remedy)
}

pub(super) fn node_networks(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let nodes = known("Nodes", &cluster.mesh.nodes)?;
    let outside = Networks::of(facts)?;
    let mut found = Vec::new();
    for node in nodes {
        let spec = node.spec.as_ref();
        let all =
            spec.and_then(|spec| spec.pod_cidrs.clone()).or_else(|| spec?.pod_cidr.clone().map(|cidr| vec![cidr]));
        for cidr in all.into_iter().flatten() {
            let first = cidr.split('/').next().and_then(|ip| ip.parse().ok());
            if first.is_some_and(|ip| outside.lacks(ip)) {
                found.push(outside.problem(format!("Node {}, spec.podCIDRs", node.name_any()), &cidr));
            }
        }
    }
    Ok(found)
}

pub(super) fn pod_networks(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let all = known("Pods with a proxy", &cluster.mesh.meshed)?;
    let outside = Networks::of(facts)?;
    let ips = |pod: &Pod| pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    let of_pod = |pod: &Pod| {
        let ip = ips(pod).filter(|ip| ip.parse().is_ok_and(|ip| outside.lacks(ip)))?;
        Some(outside.problem(format!("Pod {}, status.podIP", pods::full_name(pod)), &ip))
    };
    Ok(all.iter().filter_map(of_pod).collect())
}

pub(super) fn service_networks(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let services = known("Services", &facts.cluster()?.services)?;
    let outside = Networks::of(facts)?;
    let mut found = Vec::new();
    for service in services {
        let ip = service.spec.as_ref().and_then(|spec| spec.cluster_ip.clone()).unwrap_or_default();
        if ip.parse().is_ok_and(|ip| outside.lacks(ip)) {
            let name = format!("{}/{}", service.namespace().unwrap_or_default(), service.name_any());
            found.push(outside.problem(format!("Service {name}, spec.clusterIP"), &ip));
        }
    }
    Ok(found)
}

/// Proxies dial addresses outside the mesh's networks directly, without discovery and without mutual TLS.
struct Networks {
    networks: Vec<IpNet>,
    upgrade: String,
}

impl Networks {
    fn of(facts: &Facts) -> Result<Self, Stop> {
        let values = facts.cluster()?.values().ok_or(Stop::Skip)?;
        let config = values.inject_config(&facts.namespace, "").map_err(|_| Stop::Skip)?;
        Ok(Self { networks: config.cluster_networks, upgrade: facts.upgrade("--set clusterNetworks=...") })
    }

    fn lacks(&self, ip: IpAddr) -> bool {
        !self.networks.iter().any(|network| network.contains(&ip))
    }

    fn problem(&self, object: String, network: &str) -> Problem {
        let remedy = format!("{}, with it among them", self.upgrade);
        Problem::new(object, format!("{network} is not within clusterNetworks, so proxies do not look it up"), remedy)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::check::facts::tests::{check, healthy};

    #[test]
    fn a_healthy_installation_has_nothing_to_say() {
        let facts = healthy();
        for judge in [
            namespace,
            config,
            config_parses,
            cluster_roles,
            cluster_role_bindings,
            service_accounts,
            replica_sets,
            control_pods,
            service_networks,
        ] {
            assert_eq!(judge(&facts), Ok(Vec::new()));
        }
    }

    #[test]
    fn a_value_that_cannot_be_read_is_named_by_its_path() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let values =
            json!({"data": {"values": "clusterNetworks: 10.0.0.0/8,half\nproxy: {image: {name: a, version: b}}\n"}});
        cluster.config = Ok(Some(serde_json::from_value(values).unwrap()));
        check(config_parses(&facts), &[("ConfigMap linkerd/linkerd-config, data.values, clusterNetworks", "half")]);
        assert_eq!(service_networks(&facts), Err(Stop::Skip));
    }

    #[test]
    fn what_helm_did_not_make_is_named() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        cluster.cluster_roles.as_mut().unwrap().remove("linkerd-policy");
        cluster.cluster_role_bindings.as_mut().unwrap().remove("linkerd-destination-policy");
        cluster.mesh.deployments.as_mut().unwrap().retain(|deployment| deployment.name_any() != "linkerd-identity");
        check(cluster_roles(&facts), &[("ClusterRole linkerd-policy", "does not exist")]);
        check(cluster_role_bindings(&facts), &[("ClusterRoleBinding linkerd-destination-policy", "does not exist")]);
        check(replica_sets(&facts), &[("Deployment linkerd/linkerd-identity", "does not exist")]);
    }

    #[test]
    fn a_pod_that_may_not_be_made_says_who_forbids_it() {
        let mut facts = healthy();
        let deployments = facts.cluster.as_mut().unwrap().mesh.deployments.as_mut().unwrap();
        let condition =
            json!({"type": "ReplicaFailure", "status": "True", "message": "pods is forbidden: violates PodSecurity"});
        deployments[0].status = serde_json::from_value(json!({"conditions": [condition]})).unwrap();
        check(replica_sets(&facts), &[("Deployment linkerd/linkerd-destination", "violates PodSecurity")]);
    }

    #[test]
    fn a_container_that_is_not_ready_speaks_for_itself() {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let pod = json!({"metadata": {"name": "linkerd-destination-1", "namespace": "linkerd"}, "status": {"phase": "Running"}});
        cluster.mesh.control_pods.as_mut().unwrap().push(serde_json::from_value(pod).unwrap());
        let messages = vec!["container destination: not ready: caches".to_owned()];
        cluster.container_messages.insert("linkerd/linkerd-destination-1".to_owned(), messages);
        check(control_pods(&facts), &[("Pod linkerd/linkerd-destination-1", "not ready: caches")]);
    }

    #[test]
    fn a_service_outside_the_meshs_networks_is_named() {
        let mut facts = healthy();
        let service = json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": {"clusterIP": "203.0.113.7"}});
        facts.cluster.as_mut().unwrap().services.as_mut().unwrap().push(serde_json::from_value(service).unwrap());
        check(service_networks(&facts), &[("Service shop/web, spec.clusterIP", "203.0.113.7")]);
    }
}
