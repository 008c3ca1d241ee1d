//! Proof that no value of a chart is accepted and does nothing: each one, set to something else, changes a manifest, an
//! injected pod or a redirection, or is named as a value without effect. And that agents and injectors are restarted
//! for what they read: agents for nothing else, because a node's new pods wait meanwhile.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value as Json, json};
use weft_k8s_api::{
    inject::{Decision, Redirection, RedirectionDefaults, inject},
    values::Values,
};

use super::{
    values::{merge, parsed},
    *,
};
use crate::manifest::document;

/// What values are set to: the first that is not the default, and that the chart accepts.
fn others(default: &Json) -> Vec<Json> {
    let mut others = match default {
        Json::Bool(set) => vec![json!(!set)],
        Json::Number(number) => vec![json!(number.as_i64().unwrap_or_default() + 7)],
        _ => Vec::new(),
    };
    // Texts with a grammar of their own come before any text.
    let texts = [
        "Always",
        "OnDelete",
        "Recreate",
        "Fail",
        "apache",
        "json",
        "insecure",
        "cgroup",
        "transparent",
        "deny",
        "kubernetes.io/tls",
        "77",
        "77s",
        "77Mi",
        "192.0.2.0/24",
        "debug",
        "/elsewhere",
        "other/name",
        "otel.obs:4318",
        "-----BEGIN CERTIFICATE-----\nother",
        "-----BEGIN PRIVATE KEY-----\nother",
        "other",
    ];
    others.extend(texts.map(Json::from));
    others.extend([
        json!(true),
        json!(7),
        json!(0.5),
        json!([{"name": "A", "value": "1"}]),
        json!([{"name": "a"}]),
        json!([{"name": "a", "namespace": "b"}]),
        json!([{"key": "a", "operator": "Exists"}]),
        json!(["192.0.2.0/24"]),
        json!(["--other"]),
        json!({"enabled": true}),
        json!({"limits": {"memory": "77Mi"}}),
        json!({"example.org/a": "b"}),
    ]);
    let is_alike = |other: &Json| default.is_null() || std::mem::discriminant(other) == std::mem::discriminant(default);
    others.retain(|other| other != default && is_alike(other));
    others
}

/// What has to be set for the values below a path to matter.
const NEEDED: &[(&str, &str)] = &[
    ("agent.enforceProxyExemption", "{agent: {proxyExemption: cgroup}}"),
    ("controller.podDisruptionBudget", "{enablePodDisruptionBudget: true}"),
    ("networkPolicy", "{networkPolicy: {enabled: true}}"),
    ("podDisruptionBudget", "{podDisruptionBudget: {enabled: true}}"),
    ("podMonitor", "{podMonitor: {enabled: true}}"),
    ("policyValidator.externalSecret", "{policyValidator: {caBundle: '-----BEGIN CERTIFICATE-----'}}"),
    ("profileValidator.externalSecret", "{profileValidator: {caBundle: '-----BEGIN CERTIFICATE-----'}}"),
    ("prometheusRule", "{prometheusRule: {enabled: true}}"),
    ("proxyInjector.externalSecret", "{proxyInjector: {caBundle: '-----BEGIN CERTIFICATE-----'}}"),
    (
        "proxy.tracing",
        "{proxy: {tracing: {enabled: true, collector: {endpoint: 'otel.obs:4317',
            meshIdentity: {serviceAccountName: otel, namespace: obs}}}}}",
    ),
];

/// Values without which the control plane's chart renders nothing.
pub(crate) fn certificates() -> Json {
    let (certificate, key) = ("-----BEGIN CERTIFICATE-----", "-----BEGIN PRIVATE KEY-----");
    json!({"identityTrustAnchorsPEM": certificate, "identity": {"issuer": {"tls": {"crtPEM": certificate, "keyPEM": key}}}})
}

/// The ConfigMap from which the injector and the agent read, which has a copy of every value; and the other manifests,
/// without its digest. The former is empty where there is none.
pub(crate) fn apart(manifests: Vec<String>) -> (String, Vec<String>) {
    let is_config = |text: &String| text.contains("\nkind: ConfigMap\n") && text.contains("\n  name: linkerd-config\n");
    let (config, others): (Vec<_>, Vec<_>) = manifests.into_iter().partition(is_config);
    let others = others.iter().map(|text| text.lines().filter(|line| !line.contains("checksum/config:")).collect());
    (config.concat(), others.collect())
}

/// What a mesh with these values is.
#[derive(Debug, PartialEq)]
struct Effects {
    manifests: Vec<String>,
    /// A pod as the injector makes it, and its redirection.
    injected: Option<(Json, Redirection)>,
    /// What the agents read.
    redirection: Option<RedirectionDefaults>,
    /// The redirection of a pod of the control plane that asks not to be redirected, and for less than strictness.
    of_the_control_plane: Option<Redirection>,
}

/// The digests of settings in the pods of agents and injectors, which restart them.
#[derive(Debug, PartialEq)]
struct Digests {
    agents: Option<String>,
    injectors: Option<String>,
}

impl Digests {
    fn of(manifests: &[String]) -> Self {
        let of = |kind: &str, name: &str| {
            let (kind, name) = (format!("\nkind: {kind}\n"), format!("\n  name: {name}\n"));
            let manifest = manifests.iter().find(|text| text.contains(&kind) && text.contains(&name))?;
            manifest.lines().find(|line| line.contains("checksum/config:")).map(str::to_owned)
        };
        Self { agents: of("DaemonSet", "weft-agent"), injectors: of("Deployment", "linkerd-proxy-injector") }
    }
}

/// What is wrong about the restarts that follow from a change.
fn wrong_restart(before: &(Effects, Digests), after: &(Effects, Digests)) -> Option<&'static str> {
    let (read, restarted) = (before.0.redirection != after.0.redirection, before.1.agents != after.1.agents);
    if read != restarted {
        return Some(if read { "agents read it and are not restarted" } else { "agents are restarted for nothing" });
    }
    let is_late = before.0.injected != after.0.injected && before.1.injectors == after.1.injectors;
    is_late.then_some("injectors read it and are not restarted")
}

impl Effects {
    fn of(manifests: Vec<String>) -> Result<Self> {
        let (config, manifests) = apart(manifests);
        if config.is_empty() {
            return Ok(Self { manifests, injected: None, redirection: None, of_the_control_plane: None });
        }
        let config = document::parse_yaml(&config)?;
        let values = Values::parse(config["data"]["values"].as_str().context("data.values")?)?;
        let redirection = values.redirection()?;
        let pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop",
                "annotations": {"linkerd.io/inject": "enabled", "config.linkerd.io/enable-debug-sidecar": "true"}},
            "spec": {"containers": [{"name": "app", "ports": [{"containerPort": 80}]}]},
        }))?;
        let injected = match inject(&pod, None, &values.inject_config("mesh", "anchors")?) {
            Ok(Decision::Injected(pod)) => (serde_json::to_value(&pod)?, Redirection::of(&pod, &redirection)?),
            other => bail!("not injected: {other:?}"),
        };
        let control_plane = serde_json::from_value(json!({"metadata": {
            "labels": {"linkerd.io/control-plane-component": "destination"},
            "annotations": {"weft.io/bypass": "true", "weft.io/proxy-exemption": "user"},
        }}))?;
        let of_the_control_plane = Some(Redirection::of(&control_plane, &redirection)?);
        Ok(Self { manifests, injected: Some(injected), redirection: Some(redirection), of_the_control_plane })
    }
}

/// A path to every value that has none below it.
fn leaves(values: &Json, path: &[String], into: &mut Vec<Vec<String>>) {
    match values.as_object().filter(|map| !map.is_empty()) {
        Some(map) => {
            map.iter().for_each(|(key, inner)| leaves(inner, &[path, std::slice::from_ref(key)].concat(), into));
        }
        None => into.push(path.to_vec()),
    }
}

/// A chart, and what it makes of values that are set over others.
struct Subject {
    chart: Chart,
    schema: Json,
    /// Without which it renders nothing.
    required: Json,
    /// Its values with no others than those, and what they make.
    plain: (Json, (Effects, Digests)),
}

impl Subject {
    fn new(name: &'static str) -> Self {
        let chart = Chart::read(name).unwrap();
        let required = if name == CONTROL_PLANE { certificates() } else { json!({}) };
        let plain = render(&chart, required.clone()).unwrap();
        let schema = serde_json::from_str(file(&chart.files, "values.schema.json").unwrap()).unwrap();
        Self { chart, schema, required, plain }
    }

    /// Whether the schema of the value at a path allows this one: it is much quicker asked than the whole.
    fn allows(&self, path: &[String], other: &Json) -> bool {
        let mut at = &self.schema;
        for key in path {
            while let Some(reference) = at["$ref"].as_str() {
                at = self.schema.pointer(reference.trim_start_matches('#')).unwrap();
            }
            let named = at["properties"].get(key);
            let Some(inner) = named.or_else(|| at.get("additionalProperties")) else { return true };
            at = inner;
        }
        let schema = json!({"definitions": self.schema["definitions"], "allOf": [at]});
        schema::mistakes(&schema, other).unwrap().is_empty()
    }

    /// Why a value is idle, if it is.
    fn idle(&self, path: &[String]) -> Option<String> {
        let dotted = path.join(".");
        let at = |values: &Json| path.iter().fold(values.clone(), |at, key| at[key].clone());
        let mut base = self.required.clone();
        let needed = NEEDED.iter().find(|(below, _)| dotted.starts_with(below)).map(|(_, needed)| {
            merge(&mut base, parsed(needed).unwrap());
            render(&self.chart, base.clone()).unwrap()
        });
        let (values, before) = needed.as_ref().unwrap_or(&self.plain);
        let mut refusals = Vec::new();
        for other in others(&at(values)).into_iter().filter(|other| self.allows(path, other)) {
            let mut set = base.clone();
            merge(&mut set, path.iter().rev().fold(other.clone(), |inner, key| json!({key: inner})));
            match render(&self.chart, set) {
                Ok((_, after)) if after.0 != before.0 => {
                    return wrong_restart(before, &after).map(|wrong| format!("{dotted}: {other}: {wrong}"));
                }
                Ok((values, _)) if self.without_effect(&values).contains(&dotted) => return None,
                Ok(_) => return Some(format!("{dotted}: {other} changes nothing")),
                Err(error) => refusals.push(format!("{other}: {error:#}")),
            }
        }
        let is_refused = refusals.iter().any(|refusal| refusal.contains(&format!("{dotted} is not supported")));
        (!is_refused).then(|| format!("{dotted}: nothing is accepted: {refusals:#?}"))
    }

    /// What the chart says of values without effect.
    fn without_effect(&self, values: &Json) -> String {
        let root = Value::from(self.chart.root("mesh", values));
        let notes = self.chart.renderer().render("templates/NOTES.txt", &root).unwrap();
        notes.split_once("have no effect: ").map(|(_, named)| named.to_owned()).unwrap_or_default()
    }
}

fn render(chart: &Chart, set: Json) -> Result<(Json, (Effects, Digests))> {
    let values = chart.values(&Settings { base: Some(set), ..Settings::default() })?;
    let manifests = chart.manifests("mesh", &values)?;
    let digests = Digests::of(&manifests);
    Ok((values, (Effects::of(manifests)?, digests)))
}

fn every_value_matters(name: &'static str) {
    let (subject, mut paths) = (Subject::new(name), Vec::new());
    leaves(&subject.chart.defaults().unwrap(), &[], &mut paths);
    assert!(!paths.is_empty(), "{name}");
    // This is the longest test of the program, and the others end long before it.
    let next = AtomicUsize::new(0);
    let idle = || {
        let path = paths.get(next.fetch_add(1, Ordering::Relaxed))?;
        Some(subject.idle(path))
    };
    let idle: Vec<_> = std::thread::scope(|scope| {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> =
            (0..workers).map(|_| scope.spawn(|| std::iter::from_fn(idle).flatten().collect::<Vec<_>>())).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert!(idle.is_empty(), "{name}: {idle:#?}");
}

#[test]
fn every_value_of_the_control_plane_changes_something() {
    every_value_matters(CONTROL_PLANE);
}

#[test]
fn every_value_of_other_charts_changes_something_or_is_said_to_have_no_effect() {
    [CRDS, VIZ, "weft-agent"].into_iter().for_each(every_value_matters);
}
