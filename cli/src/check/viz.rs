//! Checks of the component weft-viz, where it is installed.

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Namespace, Pod},
};
use kube::ResourceExt;
use weft_k8s_api::{boolean, inject::TapClient, labels, observe, values::Values};

use super::{
    answer::{Stop, known},
    data_plane,
    facts::{Facts, RENDER_AGAIN, helm_upgrade},
    installed::not_ready,
};
use crate::{
    component::{NAME, NAMESPACE},
    mesh::{
        installed::{CHART_VERSION, Installed},
        pods,
    },
    problem::Problem,
};

const INSTALL: &str = "weft viz install | kubectl apply -f -";

/// The component's Deployments and pods; where there are none, the other checks have nothing to judge.
fn component(facts: &Facts) -> Result<(&[Deployment], &[Pod]), Stop> {
    let (deployments, pods) = known("Deployments and Pods of weft-viz", &facts.cluster()?.viz)?;
    if deployments.is_empty() { Err(Stop::Skip) } else { Ok((deployments, pods)) }
}

/// Only who asks about the component misses it.
pub(super) fn installed(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    match component(facts) {
        Ok(_) => Ok(Vec::new()),
        Err(Stop::Skip) if facts.mode.is_viz() && facts.cluster.is_ok() => {
            Ok(vec![Problem::new(format!("Deployment {NAMESPACE}/{NAME}"), "does not exist", INSTALL)])
        }
        Err(stop) => Err(stop),
    }
}

pub(super) fn ready(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (deployments, all) = component(facts)?;
    let broken = all.iter().filter(|pod| !pods::is_leaving(pod) && !pods::is_ready(pod));
    let mut problems: Vec<_> = broken.map(|pod| not_ready(facts, pod)).collect();
    for deployment in deployments {
        let wanted = deployment.spec.replicas.unwrap_or(1);
        let ready = deployment.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0);
        if problems.is_empty() && ready < wanted {
            let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
            let remedy = format!("kubectl -n {namespace} describe deployment {name}");
            let problem = format!("{ready} of {wanted} replicas are ready");
            problems.push(Problem::new(format!("Deployment {namespace}/{name}"), problem, remedy));
        }
    }
    Ok(problems)
}

pub(super) fn meshed(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (_, all) = component(facts)?;
    let bare = all.iter().filter(|pod| !pods::is_leaving(pod) && pods::proxy_container(pod).is_none());
    let problem = |pod: &Pod| {
        let namespace = pod.namespace().unwrap_or_default();
        let what = "has no proxy, so other proxies refuse its taps, and policies may refuse its scrapes";
        let remedy = format!("kubectl -n {namespace} rollout restart deployment {NAME}, while the injector runs");
        Problem::new(format!("Pod {}", pods::full_name(pod)), what, remedy)
    };
    Ok(bare.map(problem).collect())
}

/// Whom the injector lets tap new proxies.
fn tap_client(facts: &Facts) -> Result<Option<TapClient>, Stop> {
    let cluster = facts.cluster()?;
    let values = cluster.config_yaml().and_then(|yaml| Values::parse(yaml).ok()).ok_or(Stop::Skip)?;
    let config = values.inject_config(&facts.namespace, cluster.anchors_pem().unwrap_or_default());
    Ok(config.map_err(|_| Stop::Skip)?.tap)
}

/// Compares the namespace of the component with the identity that the injector gives to proxies.
pub(super) fn taps(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (deployments, _) = component(facts)?;
    let client = tap_client(facts)?;
    let places = deployments.iter().map(|deployment| deployment.namespace().unwrap_or_default());
    let problems = places.filter_map(|place| {
        let remedy = facts.upgrade(&format!("--set proxy.tap.serviceAccountName={NAME},proxy.tap.namespace={place}"));
        let problem = match &client {
            None => "name nobody, so proxies serve no tap".to_owned(),
            Some(client) if client.service_account == NAME && client.namespace == place => return None,
            Some(client) => {
                let (account, namespace) = (&client.service_account, &client.namespace);
                format!(
                    "name {account} of namespace {namespace}, so proxies refuse taps of {NAME} in namespace {place}"
                )
            }
        };
        let object = format!("{}, data.values, proxy.tap", facts.named("ConfigMap", "linkerd-config"));
        Some(Problem::new(object, problem, format!("{remedy}; then restart the pods")))
    });
    Ok(problems.collect())
}

pub(super) fn answers(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (deployments, _) = component(facts)?;
    let Some(answer) = &facts.cluster()?.viz_answer else { return Err(Stop::Skip) };
    Ok(match answer {
        Ok(()) => Vec::new(),
        Err(error) => {
            let remedy = "kubectl create clusterrolebinding viz-stats --clusterrole weft-viz-viewer --user USER, or a rolebinding in \
                          the namespaces that are yours";
            let namespace = deployments.first().and_then(ResourceExt::namespace).unwrap_or_default();
            vec![Problem::new(format!("Deployment {namespace}/{NAME}"), error.clone(), remedy)]
        }
    })
}

/// Pods whose proxies were started before the injector named the component. Where tap is disabled, by the values, the
/// namespace or the pod, it is not a problem of this check.
pub(super) fn pods_serve_tap(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    component(facts)?;
    if tap_client(facts) == Ok(None) {
        return Err(Stop::Skip);
    }
    let namespaces = known("Namespaces", &facts.cluster()?.namespaces)?;
    let refusing: Vec<_> = namespaces.iter().filter(|it| disables_tap(*it)).map(Namespace::name_any).collect();
    let is_deliberate =
        |pod: &Pod| disables_tap(pod) || pod.namespace().is_some_and(|namespace| refusing.contains(&namespace));
    let all = data_plane::meshed_applications(facts)?.into_iter().filter(|pod| !is_deliberate(pod));
    let silent = all.filter(|pod| observe::listeners(pod).is_some_and(|listeners| listeners.tap.is_none()));
    let problem = |pod: &Pod| {
        let what = "its proxy serves no tap: it was created before the injector named the component";
        let remedy = "restart its workload: kubectl rollout restart";
        Problem::new(format!("Pod {}", pods::full_name(pod)), what, remedy)
    };
    Ok(silent.map(problem).collect())
}

/// Whether a pod or a namespace disables tap, as the injector reads it.
fn disables_tap(object: &impl ResourceExt) -> bool {
    object.annotations().get(labels::DISABLE_TAP).is_some_and(|text| boolean::parse(text) != Some(false))
}

pub(super) fn version(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let (deployments, _) = component(facts)?;
    let (wanted, but) = match &facts.expected_version {
        Some(expected) => (expected, format!("and {expected} is expected")),
        None => (&facts.cli_version, format!("this weft of {}", facts.cli_version)),
    };
    let others = deployments.iter().filter_map(|deployment| {
        let version = deployment.labels().get(CHART_VERSION).filter(|version| *version != wanted)?;
        let namespace = deployment.namespace().unwrap_or_default();
        let object = format!("Deployment {namespace}/{}", deployment.name_any());
        let remedy = match Installed::by(deployment) {
            Installed::ByHelm(release) => helm_upgrade(&release, NAME, &namespace),
            Installed::ByTemplate => RENDER_AGAIN.to_owned(),
            _ if namespace == NAMESPACE => INSTALL.to_owned(),
            _ => format!("weft viz install --viz-namespace {namespace} | kubectl apply -f -"),
        };
        Some(Problem::new(object, format!("is of version {version}, {but}"), remedy))
    });
    Ok(others.collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::facts::{
            Mode,
            tests::{check, healthy, object},
        },
        *,
    };
    use crate::{
        cluster::HELM_RELEASE,
        mesh::installed::{PART_OF, RENDERED_BY_HELM},
    };

    /// A healthy mesh whose injector names this client, with the component in this namespace.
    fn facts(tap: &str, namespace: &str, ready: bool, proxy: &str) -> Facts {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        let values = format!("proxy: {{image: {{name: localhost/weft-proxy, version: 0.1.0}}, tap: {tap}}}\n");
        cluster.config = Ok(Some(object(json!({"data": {"values": values}}))));
        let condition = json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
        cluster.viz = Ok((
            vec![object(json!({
                "metadata": {"name": "weft-viz", "namespace": namespace, "labels": {"app.kubernetes.io/version": "0.1.0"}},
                "spec": {"replicas": 1, "selector": {}, "template": {}}, "status": {"readyReplicas": i32::from(ready)},
            }))],
            vec![object(json!({
                "metadata": {"name": "weft-viz-1", "namespace": namespace},
                "spec": {"nodeName": "a", "containers": [], "initContainers": [{"name": proxy}]},
                "status": {"phase": "Running", "conditions": [condition]},
            }))],
        ));
        facts
    }

    const NAMED: &str = "{serviceAccountName: weft-viz, namespace: linkerd-viz}";

    #[test]
    fn a_sound_component_passes() {
        let facts = facts(NAMED, "linkerd-viz", true, "linkerd-proxy");
        for judge in [installed, ready, meshed, taps, version] {
            check(judge(&facts), &[]);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let broken = facts(NAMED, "linkerd-viz", false, "other");
        check(ready(&broken), &[("Pod linkerd-viz/weft-viz-1", "")]);
        check(meshed(&broken), &[("Pod linkerd-viz/weft-viz-1", "has no proxy")]);
        let object = "ConfigMap linkerd/linkerd-config, data.values, proxy.tap";
        for (tap, namespace, part) in [(NAMED, "viz", "linkerd-viz"), ("{}", "linkerd-viz", "name nobody")] {
            check(taps(&facts(tap, namespace, true, "linkerd-proxy")), &[(object, part)]);
        }
        let mut refused = facts(NAMED, "linkerd-viz", true, "linkerd-proxy");
        refused.cluster.as_mut().unwrap().viz_answer = Some(Err("jane may not get stats.viz.weft.io".to_owned()));
        check(answers(&refused), &[("Deployment linkerd-viz/weft-viz", "jane may not")]);
        let mut newer = facts(NAMED, "linkerd-viz", true, "linkerd-proxy");
        newer.cli_version = "0.2.0".to_owned();
        check(version(&newer), &[("Deployment linkerd-viz/weft-viz", "is of version 0.1.0")]);
        newer.expected_version = Some("0.1.0".to_owned());
        check(version(&newer), &[]);
        newer.expected_version = Some("0.3.0".to_owned());
        check(version(&newer), &[("Deployment linkerd-viz/weft-viz", "0.3.0 is expected")]);
    }

    #[test]
    fn another_version_is_replaced_by_the_tool_that_installed_it() {
        let remedy = |managed_by: &str, release: Option<&str>| {
            let mut facts = facts(NAMED, "monitoring", true, "linkerd-proxy");
            facts.cli_version = "0.2.0".to_owned();
            let deployment = &mut facts.cluster.as_mut().unwrap().viz.as_mut().unwrap().0[0];
            for (label, value) in [(PART_OF.0, PART_OF.1), (RENDERED_BY_HELM.0, managed_by)] {
                deployment.labels_mut().insert(label.to_owned(), value.to_owned());
            }
            let annotations = release.map(|release| (HELM_RELEASE.to_owned(), release.to_owned()));
            deployment.annotations_mut().extend(annotations);
            version(&facts).unwrap().remove(0).remedy
        };
        assert_eq!(remedy("weft", None), "weft viz install --viz-namespace monitoring | kubectl apply -f -");
        assert_eq!(remedy("Helm", None), RENDER_AGAIN);
        let by_helm = remedy("Helm", Some("metrics"));
        assert!(by_helm.starts_with("helm upgrade metrics weft-viz-"), "{by_helm}");
        assert!(by_helm.contains("--namespace monitoring"), "{by_helm}");
    }

    #[test]
    fn pods_that_serve_no_tap_are_named_unless_it_is_on_purpose() {
        let mut facts = facts(NAMED, "linkerd-viz", true, "linkerd-proxy");
        check(pods_serve_tap(&facts), &[("Pod shop/web-0", "serves no tap")]);
        facts.data_plane_namespace = Some("other".to_owned());
        check(pods_serve_tap(&facts), &[]);
        facts.data_plane_namespace = Some("shop".to_owned());
        check(pods_serve_tap(&facts), &[("Pod shop/web-0", "serves no tap")]);
        let annotations = |value: &str| json!({"viz.linkerd.io/disable-tap": value});
        let namespace = |value: &str| object(json!({"metadata": {"name": "shop", "annotations": annotations(value)}}));
        // The injector disables tap for what it cannot read, too.
        for (value, expected) in
            [("true", &[][..]), ("1", &[]), ("yes", &[]), ("", &[]), ("false", &[("Pod shop/web-0", "serves no tap")])]
        {
            facts.cluster.as_mut().unwrap().namespaces.as_mut().unwrap().push(namespace(value));
            check(pods_serve_tap(&facts), expected);
            facts.cluster.as_mut().unwrap().namespaces.as_mut().unwrap().pop();
            let pod = &mut facts.cluster.as_mut().unwrap().mesh.meshed.as_mut().unwrap()[0];
            pod.annotations_mut().insert(labels::DISABLE_TAP.to_owned(), value.to_owned());
            check(pods_serve_tap(&facts), expected);
            // No pod has a tap in a namespace that disables it.
            facts.cluster.as_mut().unwrap().namespaces.as_mut().unwrap().push(namespace("true"));
            check(pods_serve_tap(&facts), &[]);
            facts.cluster.as_mut().unwrap().namespaces.as_mut().unwrap().pop();
            facts.cluster.as_mut().unwrap().mesh.meshed.as_mut().unwrap()[0].annotations_mut().clear();
        }
        let pod = &mut facts.cluster.as_mut().unwrap().mesh.meshed.as_mut().unwrap()[0];
        let proxy = &mut pod.spec.as_mut().unwrap().init_containers.as_mut().unwrap()[0];
        proxy.env = Some(vec![object(json!({"name": "LINKERD2_PROXY_TAP_SVC_NAME", "value": "weft-viz.linkerd-viz"}))]);
        check(pods_serve_tap(&facts), &[]);
    }

    /// Another check reports the values; restarted pods would serve none either.
    #[test]
    fn without_a_client_in_the_values_no_pod_is_blamed() {
        let facts = facts("{}", "linkerd-viz", true, "linkerd-proxy");
        assert_eq!(pods_serve_tap(&facts), Err(Stop::Skip));
    }

    #[test]
    fn only_who_asks_about_the_component_misses_it() {
        let mut facts = healthy();
        assert_eq!(installed(&facts), Err(Stop::Skip));
        facts.mode = Mode::Viz;
        check(installed(&facts), &[("Deployment linkerd-viz/weft-viz", "does not exist")]);
        assert_eq!(ready(&facts), Err(Stop::Skip));
    }
}
