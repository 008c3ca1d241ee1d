//! The charts in this program, rendered as `helm template` renders them.
//!
//! ```text
//! values.yaml, files, --set ──values──> checked by values.schema.json ──render──> manifests
//! ```
//!
//! Owns as much of Helm's templates as our charts use, which a test compares with helm. What it does not know is an
//! error, and never left out. Nothing is downloaded, and no cluster is asked.

#[cfg(test)]
pub(crate) mod effects;
mod functions;
mod lex;
mod parse;
mod pattern;
mod render;
mod schema;
mod value;
pub(crate) mod values;

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, Result, bail};
use include_dir::{Dir, include_dir};
use serde_json::{Value as Json, json};
use weft_k8s_api::manifest::split;

use parse::Templates;
use render::Renderer;
use value::Value;
use values::Settings;

/// The folder of the repository; new files in it are seen when this file is compiled again.
static CHARTS: Dir = include_dir!("$CARGO_MANIFEST_DIR/../charts");
const CONTROL_PLANE: &str = "weft-control-plane";
const CRDS: &str = "weft-crds";
const VIZ: &str = "weft-viz";
/// The registry of the images. The program of a release is built with the one in which its images are.
const REGISTRY: Option<&str> = option_env!("WEFT_REGISTRY");

/// A chart of this version as an argument for helm: in the registry of the release, else the packed chart beside the
/// program's archive.
pub(crate) fn reference(chart: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    match REGISTRY.filter(|registry| *registry != "localhost") {
        Some(registry) => format!("oci://{registry}/charts/{chart} --version {version}"),
        None => format!("{chart}-{version}.tgz"),
    }
}

/// One of the charts.
pub(crate) struct Chart {
    name: &'static str,
    templates: Templates,
    files: BTreeMap<String, String>,
    metadata: Json,
}

impl Chart {
    /// Reads the chart of the control plane.
    ///
    /// # Errors
    /// When one of its files is not what it should be.
    pub(crate) fn control_plane() -> Result<Self> {
        Self::read(CONTROL_PLANE)
    }

    /// Reads the chart of the custom resource definitions.
    ///
    /// # Errors
    /// When one of its files is not what it should be.
    pub(crate) fn definitions() -> Result<Self> {
        Self::read(CRDS)
    }

    /// Reads the chart of the component weft-viz.
    ///
    /// # Errors
    /// When one of its files is not what it should be.
    pub(crate) fn viz() -> Result<Self> {
        Self::read(VIZ)
    }

    fn read(name: &'static str) -> Result<Self> {
        let root = CHARTS.get_dir(name).context("the chart is not in this program")?;
        let (mut templates, mut files) = (Templates::new(), BTreeMap::new());
        collect(name, root, &mut |path, text| {
            if path.starts_with("templates/") {
                return parse::file(path, text, &mut templates);
            }
            files.insert(path.to_owned(), in_registry(text, REGISTRY));
            Ok(())
        })?;
        let metadata = values::parsed(file(&files, "Chart.yaml")?).context("Chart.yaml")?;
        Ok(Self { name, templates, files, metadata })
    }

    /// The chart's values without any setting.
    pub(crate) fn defaults(&self) -> Result<Json> {
        values::parsed(file(&self.files, "values.yaml")?).context("values.yaml")
    }

    /// The chart's values for high availability.
    pub(crate) fn high_availability(&self) -> Result<Json> {
        values::parsed(file(&self.files, "values-ha.yaml")?).context("values-ha.yaml")
    }

    /// All values with these settings.
    ///
    /// # Errors
    /// When one cannot be read, or the chart's schema refuses it; every refused one is named.
    pub(crate) fn values(&self, settings: &Settings) -> Result<Json> {
        let values = settings.onto(&self.defaults()?)?;
        let schema: Json =
            serde_json::from_str(file(&self.files, "values.schema.json")?).context("values.schema.json")?;
        let refused = schema::mistakes(&schema, &values).context("values.schema.json")?;
        if !refused.is_empty() {
            bail!("{}", refused.join("\n"));
        }
        Ok(values)
    }

    /// The manifests of a release in `namespace`, each a document of its own.
    ///
    /// # Errors
    /// When the chart refuses the values, with its own words.
    pub(crate) fn manifests(&self, namespace: &str, values: &Json) -> Result<Vec<String>> {
        let mut manifests = Vec::new();
        for name in self.templates.keys().filter(|name| is_manifest(name)) {
            // Each has its own values: functions such as `set` change them.
            let text = self.renderer().render(name, &Value::from(self.root(namespace, values)))?;
            let documents = split(&text).into_iter().map(|document| document.text.trim());
            manifests.extend(documents.filter(|document| !is_blank(document)).map(|document| format!("{document}\n")));
        }
        Ok(manifests)
    }

    /// Linkerd's values that are set and have no meaning here, with the reason of each.
    pub(crate) fn meaningless(&self, namespace: &str, values: &Json) -> Result<Vec<String>> {
        let arguments = json!({"root": self.root(namespace, values), "supported": true});
        let text = self.renderer().render("weft.differs", &Value::from(arguments))?;
        Ok(serde_yaml_ng::from_str::<Option<Vec<String>>>(&text).context("weft.differs")?.unwrap_or_default())
    }

    /// What templates see, as helm names it.
    fn root(&self, namespace: &str, values: &Json) -> Json {
        let (mut values, metadata) = (values.clone(), &self.metadata);
        if let Json::Object(values) = &mut values {
            values.entry("global").or_insert_with(|| json!({}));
        }
        json!({
            "Values": values,
            "Chart": {"Name": metadata["name"], "Version": metadata["version"], "AppVersion": metadata["appVersion"]},
            "Release": {
                "Name": self.name, "Namespace": namespace, "Service": "weft",
                "IsInstall": true, "IsUpgrade": false, "Revision": 1,
            },
        })
    }

    fn renderer(&self) -> Renderer<'_> {
        Renderer { templates: &self.templates, files: &self.files }
    }
}

/// The chart in the repository names images that are loaded and not pulled.
fn in_registry(text: &str, registry: Option<&str>) -> String {
    match registry {
        Some(registry) => text.replace("localhost/weft-", &format!("{registry}/weft-")),
        None => text.to_owned(),
    }
}

fn is_manifest(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    name.starts_with("templates/")
        && !file.starts_with('_')
        && Path::new(file).extension().is_some_and(|end| end == "yaml")
}

fn is_blank(document: &str) -> bool {
    document.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
}

fn file<'a>(files: &'a BTreeMap<String, String>, name: &str) -> Result<&'a str> {
    files.get(name).map(String::as_str).with_context(|| format!("{name} is not in the chart"))
}

/// Every file below a folder of a chart, by its path in the chart.
fn collect(chart: &str, folder: &Dir, each: &mut impl FnMut(&str, &str) -> Result<()>) -> Result<()> {
    for file in folder.files() {
        let path = file.path().strip_prefix(chart).unwrap_or(file.path());
        // Paths in the program are those of the machine that compiled it.
        let path = path.to_string_lossy().replace('\\', "/");
        each(&path, file.contents_utf8().with_context(|| format!("{path}: not text"))?)?;
    }
    folder.dirs().try_for_each(|folder| collect(chart, folder, each))
}

/// An image of the same name, tag and digest in a registry, as Linkerd's flag `--registry` has it.
pub(crate) fn image_in(registry: &str, image: &str) -> String {
    let name = image.rsplit('/').next().unwrap_or(image);
    format!("{}/{name}", registry.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::document;

    /// Certificates come from elsewhere, so that none are needed.
    const EXTERNAL: [&str; 2] = ["identity.externalCA=true", "identity.issuer.scheme=kubernetes.io/tls"];

    fn settings(more: &[&str]) -> Settings {
        Settings { set: EXTERNAL.iter().chain(more).map(|set| (*set).to_owned()).collect(), ..Settings::default() }
    }

    #[test]
    fn a_release_names_its_own_registry() {
        let values = "controllerImage: localhost/weft-control-plane";
        assert_eq!(
            in_registry(values, Some("registry.example/mesh")),
            "controllerImage: registry.example/mesh/weft-control-plane"
        );
        assert_eq!(in_registry(values, None), values);
    }

    #[test]
    fn every_manifest_is_an_object() {
        let chart = Chart::control_plane().unwrap();
        let ha =
            Settings { base: Some(chart.high_availability().unwrap()), ..settings(&["clusterDomain=mesh.example"]) };
        let values = chart.values(&ha).unwrap();
        let manifests = chart.manifests("mesh", &values).unwrap();
        let kinds: Vec<_> = manifests
            .iter()
            .map(|text| document::parse_yaml(text).unwrap()["kind"].as_str().unwrap().to_owned())
            .collect();
        for (kind, count) in [("Deployment", 3), ("DaemonSet", 1), ("PodDisruptionBudget", 3)] {
            assert_eq!(kinds.iter().filter(|found| *found == kind).count(), count, "{kind}: {kinds:?}");
        }
        for flag in ["--cluster-domain=mesh.example", "--identity-scheme=kubernetes.io/tls"] {
            assert!(manifests.iter().any(|text| text.contains(flag)), "{flag}");
        }
    }

    #[test]
    fn a_value_that_the_schema_refuses_is_named() {
        let chart = Chart::control_plane().unwrap();
        for (setting, words) in [
            ("controllerReplica=3", "controllerReplica"),
            ("unknown=null", "unknown"),
            ("proxy.unknown=null", "unknown"),
            ("controllerLogLevel=loud", "controllerLogLevel"),
            ("proxy.defaultInboundPolicy=open", "proxy.defaultInboundPolicy"),
        ] {
            let error = chart.values(&settings(&[setting])).unwrap_err().to_string();
            assert!(error.contains(words), "{setting}: {error}");
        }
    }

    #[test]
    fn the_charts_own_words_are_the_error() {
        let chart = Chart::control_plane().unwrap();
        let values = chart.values(&Settings::default()).unwrap();
        let error = chart.manifests("mesh", &values).unwrap_err().to_string();
        assert!(error.starts_with("identityTrustAnchorsPEM is missing"), "{error}");
    }

    #[test]
    fn a_value_of_linkerds_without_a_meaning_is_mentioned() {
        let chart = Chart::control_plane().unwrap();
        let of = |more: &[&str]| {
            let values = chart.values(&settings(more)).unwrap();
            chart.meaningless("mesh", &values).unwrap()
        };
        assert!(of(&["cniEnabled=true"]).iter().any(|note| note.starts_with("cniEnabled: ")));
        assert_eq!(of(&[]), Vec::<String>::new());
    }

    /// What objects are selected by must not change with a release: a Deployment's selector cannot be changed.
    fn selectors<'a>(value: &'a serde_yaml_ng::Value, found: &mut Vec<&'a serde_yaml_ng::Value>) {
        match value {
            serde_yaml_ng::Value::Mapping(map) => {
                for (key, inner) in map {
                    match key.as_str() {
                        Some("matchLabels" | "selector" | "podSelector") => found.push(inner),
                        _ => selectors(inner, found),
                    }
                }
            }
            serde_yaml_ng::Value::Sequence(list) => list.iter().for_each(|inner| selectors(inner, found)),
            _ => {}
        }
    }

    #[test]
    fn every_object_has_the_recommended_labels_and_none_is_selected_by_them() {
        let everything = "podMonitor.enabled=true,prometheusRule.enabled=true,networkPolicy.enabled=true,\
                          enablePodDisruptionBudget=true,enablePodAntiAffinity=true,enableRemoteDiscovery=true,\
                          webhookClientCA=PEM,commonLabels.team=ops";
        let viz = "podMonitor.enabled=true,podDisruptionBudget.enabled=true,clients[0].name=a,clients[0].namespace=b,\
                   commonLabels.team=ops";
        for (chart, set) in [
            (CONTROL_PLANE, settings(&[everything]).set),
            (VIZ, vec![viz.to_owned()]),
            ("weft-agent", vec!["commonLabels.team=ops".to_owned()]),
        ] {
            let chart = Chart::read(chart).unwrap();
            let values = chart.values(&Settings { set, ..Settings::default() }).unwrap();
            for text in chart.manifests("mesh", &values).unwrap() {
                let object = document::parse_yaml(&text).unwrap();
                let labels = &object["metadata"]["labels"];
                let of = |name: &str| labels[format!("app.kubernetes.io/{name}").as_str()].as_str();
                for label in ["name", "component"] {
                    assert!(of(label).is_some_and(|value| !value.is_empty()), "{}: {label} of {text}", chart.name);
                }
                assert_eq!(
                    (of("instance"), of("managed-by"), of("part-of")),
                    (Some(chart.name), Some("weft"), Some("weft"))
                );
                assert_eq!(of("version"), Some(env!("CARGO_PKG_VERSION")), "{text}");
                let release = format!("{}-{}", chart.name, env!("CARGO_PKG_VERSION"));
                assert_eq!(labels["helm.sh/chart"].as_str(), Some(release.as_str()), "{text}");
                assert_eq!(labels["team"].as_str(), Some("ops"), "{text}");
                let mut found = Vec::new();
                selectors(&object, &mut found);
                for selector in found {
                    let selector = serde_json::to_string(selector).unwrap();
                    for label in
                        ["io/instance", "io/managed-by", "io/version", "kubernetes.io/component", "helm.sh", "team"]
                    {
                        assert!(!selector.contains(label), "{label}: {selector}");
                    }
                }
            }
        }
        let chart = Chart::definitions().unwrap();
        let set = vec!["installGatewayAPI=true".to_owned()];
        let values = chart.values(&Settings { set, ..Settings::default() }).unwrap();
        for text in chart.manifests("mesh", &values).unwrap() {
            let object = document::parse_yaml(&text).unwrap();
            let labels = &object["metadata"]["labels"];
            let gateway = object["metadata"]["name"].as_str().unwrap().ends_with("gateway.networking.k8s.io");
            assert_eq!(labels["app.kubernetes.io/part-of"].as_str(), Some("weft"));
            let component = if gateway { "gateway-api" } else { "crds" };
            assert_eq!(labels["app.kubernetes.io/component"].as_str(), Some(component));
        }
    }

    #[test]
    fn a_label_of_ones_own_takes_precedence_but_for_what_is_selected_by() {
        let chart = Chart::control_plane().unwrap();
        let own =
            "commonLabels.app\\.kubernetes\\.io/instance=mesh,commonLabels.linkerd\\.io/control-plane-component=x";
        let values = chart.values(&settings(&[own])).unwrap();
        for text in chart.manifests("mesh", &values).unwrap() {
            let object = document::parse_yaml(&text).unwrap();
            let labels = &object["metadata"]["labels"];
            assert_eq!(labels["app.kubernetes.io/instance"].as_str(), Some("mesh"), "{text}");
            assert_ne!(labels["linkerd.io/control-plane-component"].as_str(), Some("x"), "{text}");
        }
    }

    /// A map with a key twice is not YAML: each value comes once, and the last one that sets it counts.
    #[test]
    fn labels_and_annotations_of_pods_take_precedence_but_for_what_is_selected_by() {
        let pods = "commonLabels.team=all,podLabels.team=pods,podAnnotations.linkerd\\.io/created-by=ours,\
                    podAnnotations.cluster-autoscaler\\.kubernetes\\.io/safe-to-evict=ours,\
                    podLabels.linkerd\\.io/control-plane-component=x,podLabels.linkerd\\.io/proxy-deployment=x,\
                    podLabels.app\\.kubernetes\\.io/part-of=x,podLabels.k8s-app=x";
        let monitors = "podMonitor.enabled=true,podMonitor.labels.team=monitors";
        let rules = "prometheusRule.enabled=true,prometheusRule.labels.team=monitors";
        for (name, set, count) in [
            (CONTROL_PLANE, settings(&[pods, monitors, rules]).set, 4),
            (VIZ, vec![pods.to_owned(), monitors.to_owned()], 1),
            ("weft-agent", vec![pods.to_owned()], 1),
        ] {
            let chart = Chart::read(name).unwrap();
            let values = chart.values(&Settings { set, ..Settings::default() }).unwrap();
            let mut found = 0;
            for text in chart.manifests("mesh", &values).unwrap() {
                let object = document::parse_yaml(&text).unwrap();
                let is_monitor = ["PodMonitor", "PrometheusRule"].contains(&object["kind"].as_str().unwrap());
                let team = if is_monitor { "monitors" } else { "all" };
                assert_eq!(object["metadata"]["labels"]["team"].as_str(), Some(team), "{text}");
                let pod = &object["spec"]["template"]["metadata"];
                if pod.is_null() {
                    continue;
                }
                found += 1;
                assert_eq!(pod["labels"]["team"].as_str(), Some("pods"), "{text}");
                for annotation in ["linkerd.io/created-by", "cluster-autoscaler.kubernetes.io/safe-to-evict"] {
                    assert_eq!(pod["annotations"][annotation].as_str(), Some("ours"), "{text}");
                }
                for (label, value) in object["spec"]["selector"]["matchLabels"].as_mapping().unwrap() {
                    assert_eq!(&pod["labels"][label.as_str().unwrap()], value, "{text}");
                }
            }
            assert_eq!(found, count, "{name}");
        }
    }

    #[test]
    fn a_components_own_environment_and_flags_are_its_own() {
        let chart = Chart::control_plane().unwrap();
        let values = "identity.additionalEnv[0].name=OF_identity,proxyInjector.experimentalEnv[0].name=OF_proxy-injector,\
                      destinationController.additionalEnv[0].name=OF_destination,spValidator.additionalEnv[0].name=OF_sp-validator,\
                      destinationController.experimentalArgs={--of=destination},policyController.additionalArgs={--of=policy}";
        let values = chart.values(&settings(&[values])).unwrap();
        let mut found = Vec::new();
        for text in chart.manifests("mesh", &values).unwrap() {
            let object = document::parse_yaml(&text).unwrap();
            let containers = object["spec"]["template"]["spec"]["containers"].as_sequence();
            for container in containers.into_iter().flatten() {
                let name = container["name"].as_str().unwrap();
                let variables = container["env"].as_sequence().into_iter().flatten();
                let variables = variables.filter_map(|variable| variable["name"].as_str()?.strip_prefix("OF_"));
                let arguments = container["args"].as_sequence().into_iter().flatten();
                let arguments = arguments.filter_map(|argument| argument.as_str()?.strip_prefix("--of="));
                for of in variables.chain(arguments) {
                    assert_eq!(of, name);
                    found.push(name.to_owned());
                }
            }
        }
        found.sort();
        assert_eq!(found, ["destination", "destination", "identity", "policy", "proxy-injector", "sp-validator"]);
    }

    #[test]
    fn the_policy_services_may_watch_the_definition_of_each_kind_that_may_be_absent() {
        let chart = Chart::control_plane().unwrap();
        for (required, count) in [(false, 4), (true, 5)] {
            let set = format!("policyController.requireReferenceGrants={required}");
            let values = chart.values(&settings(&[&set])).unwrap();
            let texts = chart.manifests("mesh", &values).unwrap();
            let mut objects = texts.iter().map(|text| document::parse_yaml(text).unwrap());
            let role = objects
                .find(|object| object["kind"] == "ClusterRole" && object["metadata"]["name"] == "linkerd-policy")
                .unwrap();
            let names = |group: &str, list: &str| -> Vec<String> {
                let rules = role["rules"].as_sequence().unwrap().iter();
                let readable = rules.filter(|rule| {
                    rule["apiGroups"][0] == group && rule["verbs"].as_sequence().unwrap().contains(&"watch".into())
                });
                let names = readable.flat_map(|rule| rule[list].as_sequence().unwrap());
                names.map(|name| name.as_str().unwrap().to_owned()).collect()
            };
            let kinds = names("gateway.networking.k8s.io", "resources");
            assert_eq!(kinds.len(), count, "{kinds:?}");
            let definitions = names("apiextensions.k8s.io", "resourceNames");
            let expected: Vec<_> = kinds.iter().map(|kind| format!("{kind}.gateway.networking.k8s.io")).collect();
            assert_eq!(definitions, expected);
        }
    }

    #[test]
    fn discovery_ignores_the_skips_that_agents_ignore() {
        let chart = Chart::control_plane().unwrap();
        for (set, expected) in [
            (&["proxyInit.ignoreInboundPorts=25"][..], None),
            (&["agent.allowBypass=false"], Some("--allowed-skip-inbound-ports=4567,4568")),
            (&["agent.allowBypass=false", "proxyInit.ignoreInboundPorts=25"], Some("--allowed-skip-inbound-ports=25")),
            (&["agent.allowBypass=false", "proxyInit.ignoreInboundPorts="], Some("--allowed-skip-inbound-ports=")),
        ] {
            let values = chart.values(&settings(set)).unwrap();
            let mut found = Vec::new();
            for text in chart.manifests("mesh", &values).unwrap() {
                let object = document::parse_yaml(&text).unwrap();
                let containers = object["spec"]["template"]["spec"]["containers"].as_sequence();
                for container in containers.into_iter().flatten() {
                    let arguments = container["args"].as_sequence().into_iter().flatten();
                    let skips = arguments.filter_map(|argument| argument.as_str().filter(|one| one.contains("-skip-")));
                    found.extend(skips.map(|flag| format!("{} {flag}", container["name"].as_str().unwrap())));
                }
            }
            let expected: Vec<_> = expected.into_iter().map(|flag| format!("destination {flag}")).collect();
            assert_eq!(found, expected, "{set:?}");
        }
    }

    #[test]
    fn values_of_older_charts_are_mentioned_or_refused() {
        let chart = Chart::control_plane().unwrap();
        for (set, words) in [
            ("policyController.image.name=mine/policy-controller", "policyController.image: no meaning here"),
            ("proxyInit.resources.cpu.limit=1", "proxyInit.resources: no meaning here"),
            ("controlPlaneTracingNamespace=traces", "controlPlaneTracingNamespace: no meaning here"),
        ] {
            let values = chart.values(&settings(&[set])).unwrap();
            chart.manifests("mesh", &values).unwrap();
            let notes = chart.meaningless("mesh", &values).unwrap();
            assert!(notes.len() == 1 && notes[0].starts_with(words), "{set}: {notes:?}");
        }
        let linkerds = "policyController.image.name=cr.l5d.io/linkerd/policy-controller,controlPlaneTracing=false";
        let values = chart.values(&settings(&[linkerds])).unwrap();
        assert_eq!(chart.meaningless("mesh", &values).unwrap(), Vec::<String>::new());
        let values = chart.values(&settings(&["controlPlaneTracing=true"])).unwrap();
        let refused = chart.manifests("mesh", &values).unwrap_err().to_string();
        assert!(refused.contains("controlPlaneTracing: not supported yet"), "{refused}");
    }

    /// Without one of them, the policy controller would not become ready.
    #[test]
    fn a_cluster_without_one_of_the_definitions_is_refused() {
        let template = CHARTS.get_file("weft-control-plane/templates/_require.tpl").unwrap();
        let asked = template.contents_utf8().unwrap();
        let chart = Chart::definitions().unwrap();
        let texts = chart.manifests("mesh", &chart.values(&Settings::default()).unwrap()).unwrap();
        assert_eq!(texts.len(), 10);
        for text in texts {
            let definition = document::parse_yaml(&text).unwrap();
            let mut versions = definition["spec"]["versions"].as_sequence().unwrap().iter();
            let stored = versions.find(|version| version["storage"].as_bool() == Some(true)).unwrap();
            let [name, version] =
                [&definition["metadata"]["name"], &stored["name"]].map(|value| value.as_str().unwrap());
            assert!(asked.contains(&format!("{name:?} {version:?}")), "{name} {version}");
        }
    }

    #[test]
    fn the_definitions_are_those_that_the_values_ask_for() {
        let names = |settings: &[&str]| -> Vec<String> {
            let chart = Chart::definitions().unwrap();
            let set = settings.iter().map(|setting| (*setting).to_owned()).collect();
            let values = chart.values(&Settings { set, ..Settings::default() }).unwrap();
            let texts = chart.manifests("mesh", &values).unwrap();
            let read = texts.iter().map(|text| document::parse_yaml(text).unwrap());
            read.map(|value| {
                assert_eq!(value["kind"], "CustomResourceDefinition");
                value["metadata"]["name"].as_str().unwrap().to_owned()
            })
            .collect()
        };
        let ours = names(&[]);
        for name in ["servers.policy.linkerd.io", "serviceprofiles.linkerd.io", "externalworkloads.workload.linkerd.io"]
        {
            assert!(ours.iter().any(|known| known == name), "{name}: {ours:?}");
        }
        let gateway = ".gateway.networking.k8s.io";
        for (settings, expected) in [
            (&[][..], &[][..]),
            (&["enableHttpRoutes=true"], &["grpcroutes", "httproutes"]),
            (&["enableTlsRoutes=true"], &["tlsroutes"]),
            (&["enableTcpRoutes=true,installGatewayAPI=false"], &["tcproutes"]),
            (
                &["installGatewayAPI=true,enableHttpRoutes=false"],
                &["backendtlspolicies", "gatewayclasses", "gateways", "referencegrants", "tcproutes", "tlsroutes"],
            ),
        ] {
            let all = names(settings);
            let (theirs, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|name| name.ends_with(gateway));
            let theirs: Vec<_> = theirs.iter().map(|name| name.trim_end_matches(gateway)).collect();
            assert_eq!((theirs, others), (expected.to_vec(), ours.clone()), "{settings:?}");
        }
    }
}
