//! Checks of the cluster itself: whether it answers, is new enough, and has the kinds that the mesh needs.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use serde::Deserialize;

use super::{
    answer::{Stop, known},
    facts::{Crd, CreatedKind, Facts},
};
use crate::{cluster::is_ipv6, docs, mesh::installed::Installed, problem::Problem};

/// Linkerd's minimum, and ours: native sidecars are on by default since 1.29. Only 1.36 is tested.
const MIN_VERSION: (u32, u32) = (1, 31);
/// The oldest kernel for the kernel programs, which lack functions below 5.15; see docs/interception.md.
const MIN_KERNEL: (u32, u32) = (5, 10);
/// With a larger difference, tokens and certificates are outside their validity; Linkerd's bound.
const MAX_SKEW_SECONDS: i64 = 300;
/// Oldest release of the Gateway API whose kinds proxies support; Linkerd's minimum.
const MIN_GATEWAY: (u32, u32) = (1, 2);
/// The kinds of the Gateway API that routing uses.
const GATEWAY_KINDS: [&str; 2] = ["httproutes.gateway.networking.k8s.io", "grpcroutes.gateway.networking.k8s.io"];

/// The kinds that `helm install` creates.
pub(super) const CREATED: [CreatedKind; 16] = [
    kind("", "namespaces", false),
    kind("apiextensions.k8s.io", "customresourcedefinitions", false),
    kind("rbac.authorization.k8s.io", "clusterroles", false),
    kind("rbac.authorization.k8s.io", "clusterrolebindings", false),
    kind("admissionregistration.k8s.io", "mutatingwebhookconfigurations", false),
    kind("admissionregistration.k8s.io", "validatingwebhookconfigurations", false),
    kind("admissionregistration.k8s.io", "validatingadmissionpolicies", false),
    kind("admissionregistration.k8s.io", "validatingadmissionpolicybindings", false),
    kind("rbac.authorization.k8s.io", "roles", true),
    kind("rbac.authorization.k8s.io", "rolebindings", true),
    kind("", "serviceaccounts", true),
    kind("", "services", true),
    kind("apps", "deployments", true),
    kind("apps", "daemonsets", true),
    kind("", "configmaps", true),
    kind("", "secrets", true),
];

const fn kind(group: &'static str, plural: &'static str, namespaced: bool) -> CreatedKind {
    CreatedKind { group, plural, namespaced }
}

pub(super) fn client(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    Ok(match &facts.client {
        Ok(_) => Vec::new(),
        Err(error) => vec![Problem::new("kubeconfig", error, "set KUBECONFIG, or use --kubeconfig and --context")],
    })
}

pub(super) fn answers(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    Ok(match (&facts.cluster, &facts.client) {
        (Err(error), Ok(server)) => {
            let remedy =
                "is it running, is this the right context, has the login expired? `kubectl version` asks the same";
            vec![Problem::new(format!("API server {server}"), error, remedy)]
        }
        _ => Vec::new(),
    })
}

pub(super) fn version(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (major, minor, text) = &facts.cluster()?.version;
    if (*major, *minor) >= MIN_VERSION {
        return Ok(Vec::new());
    }
    let (need_major, need_minor) = MIN_VERSION;
    let needs = format!("runs Kubernetes {text}, and {need_major}.{need_minor} is needed");
    Ok(vec![Problem::new("API server", needs, "upgrade the cluster")])
}

pub(super) fn clock(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let Some(skew) = facts.cluster()?.clock_skew else { return Err(Stop::Skip) };
    if skew.abs() <= MAX_SKEW_SECONDS {
        return Ok(Vec::new());
    }
    let way = if skew > 0 { "ahead of" } else { "behind" };
    let problem = format!("its clock is {}s {way} this machine's", skew.abs());
    Ok(vec![Problem::new("API server", problem, "synchronise the clocks: certificates are valid for a limited time")])
}

/// The definitions that the chart installs, by name, with the versions of their objects.
pub(crate) fn our_crds() -> BTreeMap<String, BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Definition {
        metadata: Name,
        spec: Spec,
    }
    #[derive(Deserialize)]
    struct Spec {
        versions: Vec<Version>,
    }
    #[derive(Deserialize)]
    struct Name {
        name: String,
    }
    #[derive(Deserialize)]
    struct Version {
        name: String,
        served: bool,
    }
    let all = weft_k8s_api::crds::all();
    let parsed = all.iter().filter_map(|definition| serde_yaml_ng::from_str::<Definition>(&definition.yaml).ok());
    let served = |spec: Spec| spec.versions.into_iter().filter(|version| version.served).map(|version| version.name);
    parsed.map(|definition| (definition.metadata.name, served(definition.spec).collect())).collect()
}

pub(super) fn crds(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let there = known("CustomResourceDefinitions", &facts.cluster()?.crds)?;
    Ok(missing_crds(&our_crds(), there, &facts.install_crds()))
}

fn missing_crds(
    ours: &BTreeMap<String, BTreeSet<String>>,
    there: &BTreeMap<String, Crd>,
    install: &str,
) -> Vec<Problem> {
    let mut found = Vec::new();
    for (name, versions) in ours {
        let object = format!("CustomResourceDefinition {name}");
        let Some(crd) = there.get(name) else {
            found.push(Problem::new(object, "does not exist", install));
            continue;
        };
        let missing: Vec<_> = versions.difference(&crd.served).map(String::as_str).collect();
        if !missing.is_empty() {
            let remedy = format!("{install}, or remove what another mesh installed");
            found.push(Problem::new(
                format!("{object}, spec.versions"),
                format!("does not serve {}", missing.join(", ")),
                remedy,
            ));
        }
    }
    found
}

pub(super) fn gateway_crds(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let there = known("CustomResourceDefinitions", &facts.cluster()?.crds)?;
    let mut found = Vec::new();
    for name in GATEWAY_KINDS {
        let object = format!("CustomResourceDefinition {name}");
        match there.get(name) {
            // Not a problem: a mesh without routes of the Gateway API does not need it.
            None => {}
            Some(crd) if !crd.served.contains("v1") => {
                let remedy = "upgrade the Gateway API to v1.2 or newer";
                found.push(Problem::new(format!("{object}, spec.versions"), "does not serve v1", remedy));
            }
            Some(Crd { bundle: Some(bundle), .. }) if release(bundle).is_some_and(|release| release < MIN_GATEWAY) => {
                let field = "metadata.annotations[\"gateway.networking.k8s.io/bundle-version\"]";
                let problem = format!("is {bundle}, older than any that is supported");
                found.push(Problem::new(
                    format!("{object}, {field}"),
                    problem,
                    "upgrade the Gateway API to v1.2 or newer",
                ));
            }
            Some(_) => {}
        }
    }
    Ok(found)
}

pub(super) fn not_installed(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    Ok(match installed(facts)? {
        Installed::No | Installed::ByOthers => Vec::new(),
        Installed::ByUs | Installed::ByHelm(_) | Installed::ByTemplate => vec![Problem::new(
            facts.named("ConfigMap", "linkerd-config"),
            "exists: a control plane is installed already",
            format!(
                "{} instead of an installation, `weft check` without --pre, or another namespace with -L",
                facts.upgrade("")
            ),
        )],
    })
}

/// A warning: the agent alone works beside Linkerd, and `weft install` refuses the rest.
pub(super) fn no_other_mesh(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    // What may not be read is a problem of the check before this one.
    Ok(match installed(facts).map_err(|_| Stop::Skip)? {
        Installed::ByOthers => vec![Problem::new(
            facts.named("ConfigMap", "linkerd-config"),
            "is that of another mesh, such as Linkerd: a cluster has one control plane",
            format!("{}: how the agent alone enrols its pods, and how Weft replaces it", docs::page("migration.md")),
        )],
        _ => Vec::new(),
    })
}

/// The agent alone enrols Linkerd's pods, and has to leave them before the mesh's own agents come.
pub(super) fn no_other_agent(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let others = known("DaemonSets", &facts.cluster()?.other_agents)?;
    Ok(others.iter().map(|other| Problem::new(other.object(), other.problem(), other.remedy())).collect())
}

fn installed(facts: &Facts) -> Result<Installed, Stop> {
    let config = known(&facts.named("ConfigMap", "linkerd-config"), &facts.cluster()?.config)?;
    Ok(Installed::of(config.as_ref()))
}

/// The chart's own check, before a person meets it: the default is not known to fit.
pub(super) fn first_family(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let address = known("Service default/kubernetes", &facts.cluster()?.service_address)?;
    if !is_ipv6(address) {
        return Ok(Vec::new());
    }
    let problem =
        format!("is {address}, so Services have IPv6 first; without IPv6 the control plane would not be reached");
    Ok(vec![Problem::new(
        "Service default/kubernetes, spec.clusterIP",
        problem,
        "install with --set disableIPv6=false",
    )])
}

/// Pod Security must allow the agent to use the host's network, if the namespace exists and enforces a level.
pub(super) fn pod_security(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
    let namespaces = known("Namespaces", &facts.cluster()?.namespaces)?;
    let Some(namespace) = namespaces.iter().find(|namespace| namespace.name_any() == facts.namespace) else {
        return Ok(Vec::new());
    };
    Ok(match namespace.labels().get(ENFORCE).map(String::as_str) {
        None | Some("privileged") => Vec::new(),
        Some(level) => vec![Problem::new(
            format!("Namespace {}, metadata.labels[\"{ENFORCE}\"]", facts.namespace),
            format!("is {level}, which forbids the agent's host network"),
            format!("kubectl label --overwrite namespace {} {ENFORCE}=privileged", facts.namespace),
        )],
    })
}

pub(super) fn may_create_cluster_wide(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    may_create(facts, false)
}

pub(super) fn may_create_namespaced(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    may_create(facts, true)
}

fn may_create(facts: &Facts, namespaced: bool) -> Result<Vec<Problem>, Stop> {
    let asked = facts.cluster()?.access.iter().filter(|access| access.kind.namespaced == namespaced);
    let mut found = Vec::new();
    for access in asked {
        let kind = access.kind;
        let object =
            if kind.group.is_empty() { kind.plural.to_owned() } else { format!("{}.{}", kind.plural, kind.group) };
        let remedy = "install as a user with rights to everything, such as cluster-admin (--as, --context)";
        match &access.allowed {
            Ok(true) => {}
            Ok(false) => {
                let place = if namespaced { format!(" in namespace {}", facts.namespace) } else { String::new() };
                found.push(Problem::new(object, format!("this user may not create them{place}"), remedy));
            }
            Err(error) => {
                found.push(Problem::new(
                    object,
                    format!("cannot ask whether this user may create them: {error}"),
                    remedy,
                ));
            }
        }
    }
    Ok(found)
}

/// The kernels of all nodes, if the mesh can run on none of them.
pub(super) fn one_kernel(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let nodes = known("Nodes", &facts.cluster()?.mesh.nodes)?;
    Ok(if nodes.iter().any(takes_an_agent) { Vec::new() } else { nodes.iter().filter_map(old_kernel).collect() })
}

/// A warning: the others can run the agent and the meshed pods.
pub(super) fn kernels(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let nodes = &facts.cluster()?.mesh.nodes;
    // Where there are no others, and where nodes may not be read, the check before this one says so.
    let nodes = nodes.as_ref().ok().filter(|nodes| nodes.iter().any(takes_an_agent)).ok_or(Stop::Skip)?;
    Ok(nodes.iter().filter_map(old_kernel).collect())
}

fn takes_an_agent(node: &Node) -> bool {
    let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
    info.is_some_and(|info| info.operating_system == "linux") && old_kernel(node).is_none()
}

fn old_kernel(node: &Node) -> Option<Problem> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    let known = release(&info.kernel_version);
    if info.operating_system != "linux" || known.is_some_and(|version| version >= MIN_KERNEL) {
        return None;
    }
    let (major, minor) = MIN_KERNEL;
    Some(Problem::new(
        format!("Node {}, status.nodeInfo.kernelVersion", node.name_any()),
        format!("is {}, and {major}.{minor} is needed", info.kernel_version),
        "upgrade its system, or keep meshed pods away from it (values agent.nodeSelector, the pods' own nodeSelector)",
    ))
}

/// Whether a version of Kubernetes is older than what the mesh needs. One that cannot be read is not.
pub(crate) fn is_too_old(version: &str) -> bool {
    release(version).is_some_and(|release| release < MIN_VERSION)
}

/// Major and minor version of a text such as `v1.36.3`, `5.15.0-101-generic` or `1.31+`.
pub(super) fn release(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.trim_start_matches('v').split('.');
    let number = |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    Some((number(parts.next()?)?, number(parts.next()?)?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        check::facts::tests::{check, healthy, object},
        cluster::HELM_RELEASE,
        mesh::other_agent::tests::alone,
    };

    #[test]
    fn versions_are_read_whatever_follows_them() {
        assert_eq!(release("v1.36.3"), Some((1, 36)));
        assert_eq!(release("5.15.0-101-generic"), Some((5, 15)));
        assert_eq!(release("1.31+"), Some((1, 31)));
        assert_eq!(release("unknown"), None);
        assert!(is_too_old("v1.30.9") && !is_too_old("v1.31.0") && !is_too_old("unknown"));
    }

    /// Linkerd's ConfigMap has the same name, and its helm release must not be the target of a remedy.
    #[test]
    fn a_mesh_that_is_there_is_told_from_linkerds() {
        let mut facts = healthy();
        let mut with = |metadata| {
            facts.cluster.as_mut().unwrap().config = Ok(Some(object(json!({"metadata": metadata}))));
            (not_installed(&facts), no_other_mesh(&facts), facts.upgrade(""))
        };
        let part_of = |whose: &str| json!({"app.kubernetes.io/part-of": whose});
        let (ours, other, _) = with(json!({"labels": part_of("weft")}));
        check(ours, &[("ConfigMap linkerd/linkerd-config", "installed already")]);
        check(other, &[]);
        let helm = json!({HELM_RELEASE: "linkerd-control-plane"});
        let (ours, other, remedy) = with(json!({"labels": part_of("Linkerd"), "annotations": helm}));
        check(ours, &[]);
        check(other, &[("ConfigMap linkerd/linkerd-config", "another mesh, such as Linkerd")]);
        assert!(!remedy.contains("linkerd-control-plane"), "{remedy}");
    }

    #[test]
    fn an_agent_of_another_installation_is_named() {
        let mut facts = healthy();
        check(no_other_agent(&facts), &[]);
        facts.cluster.as_mut().unwrap().other_agents = Ok(vec![alone()]);
        check(no_other_agent(&facts), &[("DaemonSet linkerd-cni/linkerd-cni", "a node takes one agent")]);
    }

    #[test]
    fn services_that_are_ipv6_first_need_a_value() {
        let mut facts = healthy();
        check(first_family(&facts), &[]);
        facts.cluster.as_mut().unwrap().service_address = Ok("fd00::1".to_owned());
        check(first_family(&facts), &[("Service default/kubernetes, spec.clusterIP", "IPv6 first")]);
    }

    #[test]
    fn the_charts_definitions_are_known() {
        let ours = our_crds();
        assert!(ours["servers.policy.linkerd.io"].contains("v1beta3"), "{ours:?}");
        assert!(ours.contains_key("serviceprofiles.linkerd.io"));
    }

    #[test]
    fn a_definition_that_is_missing_or_old_is_named() {
        let ours = our_crds();
        let mut there: BTreeMap<_, _> =
            ours.iter().map(|(name, served)| (name.clone(), Crd { served: served.clone(), bundle: None })).collect();
        assert_eq!(missing_crds(&ours, &there, "install weft-crds"), []);
        there.remove("serviceprofiles.linkerd.io");
        there.get_mut("servers.policy.linkerd.io").unwrap().served.remove("v1beta3");
        let [old, missing] = missing_crds(&ours, &there, "install weft-crds").try_into().unwrap();
        assert_eq!(
            old.to_string(),
            "CustomResourceDefinition servers.policy.linkerd.io, spec.versions: does not serve v1beta3"
        );
        assert!(missing.object.ends_with("serviceprofiles.linkerd.io") && missing.remedy.contains("weft-crds"));
    }

    fn node(kernel: &str, os: &str) -> Node {
        let info = json!({"architecture": "amd64", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": kernel,
            "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": os, "osImage": "", "systemUUID": ""});
        object(json!({"metadata": {"name": "a"}, "status": {"nodeInfo": info}}))
    }

    #[test]
    fn old_kernels_are_an_error_where_no_node_has_another() {
        let mut facts = healthy();
        let mut of = |nodes: &[(&str, &str)]| {
            let nodes = nodes.iter().map(|(kernel, os)| node(kernel, os)).collect();
            facts.cluster.as_mut().unwrap().mesh.nodes = Ok(nodes);
            (one_kernel(&facts), kernels(&facts))
        };
        let (none, some) = of(&[("5.4.0-42", "linux"), ("10.0.20348", "windows")]);
        check(none, &[("Node a, status.nodeInfo.kernelVersion", "5.10 is needed")]);
        assert_eq!(some, Err(Stop::Skip));
        let (none, some) = of(&[("5.4.0-42", "linux"), ("6.1.0", "linux")]);
        check(none, &[]);
        check(some, &[("Node a, status.nodeInfo.kernelVersion", "5.10 is needed")]);
    }

    #[test]
    fn old_kernels_are_named_and_windows_is_left_alone() {
        assert_eq!(old_kernel(&node("6.1.0", "linux")), None);
        assert_eq!(old_kernel(&node("10.0.20348", "windows")), None);
        let problem = old_kernel(&node("5.4.0-42", "linux")).unwrap();
        assert_eq!(problem.to_string(), "Node a, status.nodeInfo.kernelVersion: is 5.4.0-42, and 5.10 is needed");
    }
}
