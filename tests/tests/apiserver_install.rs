//! `weft install`, `upgrade`, `prune` and `uninstall` against helm's own rendering and a real API server.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "shared/certificates.rs"]
mod certificates;

use std::{
    collections::BTreeMap,
    fs,
    process::{Command, Output},
};

use serde_json::{Value, json};
use weft_k8s_api::manifest::split;
use weft_tests::{
    cluster::Cluster,
    output::{errors, succeeded},
};

use certificates::generate_certificates;

const MESH: &str = "cli-install";

fn weft(cluster: &Cluster, arguments: &[&str], more: &[String]) -> Output {
    cluster
        .command("weft")
        .args(arguments)
        .args(more)
        .args(["-L", MESH])
        .current_dir(Cluster::repository())
        .output()
        .unwrap()
}

/// The objects of a stream, by kind and name, as kubectl reads them; kinds that it does not find, as YAML.
fn objects(cluster: &Cluster, yaml: &str) -> BTreeMap<String, Value> {
    let documents = split(yaml).into_iter().map(|document| document.text.to_owned());
    let (operators, others): (Vec<_>, Vec<_>) = documents.partition(|text| {
        ["monitoring.coreos.com/", "policy.linkerd.io/"]
            .iter()
            .any(|group| text.contains(&format!("apiVersion: {group}")))
    });
    let operators = operators.iter().map(|text| serde_yaml_ng::from_str(text).unwrap());
    let objects = cluster.objects(&others.join("\n---\n")).unwrap().into_iter();
    objects
        .chain(operators)
        .map(|object| {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            (format!("{}/{}", text(&object["kind"]), text(&object["metadata"]["name"])), object)
        })
        .collect()
}

/// What `weft` renders, with the label by which helm's objects differ.
fn by_helm(rendered: &str) -> String {
    rendered.replace("app.kubernetes.io/managed-by: weft\n", "app.kubernetes.io/managed-by: Helm\n")
}

/// Values as data, and no digest of their text: YAML may be written in several ways.
fn comparable(mut object: Value) -> Value {
    if let Some(values) = object.pointer_mut("/data/values") {
        *values = serde_yaml_ng::from_str(values.as_str().unwrap()).unwrap();
    }
    if let Some(annotations) = object.pointer_mut("/spec/template/metadata/annotations") {
        annotations.as_object_mut().unwrap().remove("checksum/config");
    }
    object
}

#[test]
fn the_manifests_of_weft_viz_are_those_of_helm() {
    let cluster = Cluster::from_env().unwrap();
    for (namespace, settings) in [
        ("linkerd-viz", &[][..]),
        ("elsewhere", &["--set", "resources.limits=null,image.version=sha256:ab,scrapeInterval=1m"]),
        (
            "linkerd-viz",
            &[
                "--set",
                "podMonitor.enabled=true,podMonitor.labels.team=ops,podDisruptionBudget.enabled=true,replicas=2,\
                 clients[0].name=grafana,clients[0].namespace=monitoring,podLabels.a=b,podLabels.c=e,commonLabels.c=d,\
                 commonLabels.team=all,podAnnotations.e=f,podAnnotations.linkerd\\.io/inject=ingress,\
                 nodeSelector.disk=ssd,tolerations[0].operator=Exists,imagePullSecrets[0].name=pull,\
                 priorityClassName=high",
            ],
        ),
    ] {
        let helm = ["template", "weft-viz", "charts/weft-viz", "--namespace", namespace];
        let helm = Command::new("helm").args(helm).args(settings).current_dir(Cluster::repository()).output().unwrap();
        let theirs = objects(&cluster, &succeeded(&helm));
        let ours = ["viz", "install", "--ignore-cluster", "--viz-namespace", namespace];
        let settings: Vec<String> = settings.iter().map(|text| (*text).to_owned()).collect();
        let mut found = objects(&cluster, &by_helm(&succeeded(&weft(&cluster, &ours, &settings))));
        assert!(found.remove(&format!("Namespace/{namespace}")).is_some(), "{:?}", found.keys());
        assert_eq!(found, theirs, "{settings:?}");
    }
}

#[test]
fn manifests_are_those_of_helm() {
    let cluster = Cluster::from_env().unwrap();
    let generated = generate_certificates();
    let certificates = generated.all();
    let ours = ["Namespace/cli-install", "Secret/linkerd-config-overrides"];
    let images = "controllerImage=weft/control-plane,proxy.image.name=weft/proxy";
    for settings in [
        &[][..],
        &["--values", "charts/weft-control-plane/values-ha.yaml"],
        &["--values", "k8s-api/linkerd/values.yaml", "--set", images],
        &["--values", "k8s-api/linkerd/values-ha.yaml", "--set", images],
        &["--set", "disableIPv6=false,controllerLogLevel=debug,proxy.requireTLSOnInboundPorts=1"],
        &[
            "--set",
            "podMonitor.enabled=true,podMonitor.labels.team=ops,prometheusRule.enabled=true,networkPolicy.enabled=true",
            "--set-string",
            "podMonitor.controller.namespaceSelector=matchNames: [{{ .Release.Namespace }}]",
        ],
        &[
            "--set",
            "proxy.tracing.enabled=true,proxy.tracing.collector.endpoint=otel.obs:4317,proxy.tracing.labels.zone=z,\
             proxy.tracing.collector.meshIdentity.serviceAccountName=otel,\
             proxy.tracing.collector.meshIdentity.namespace=obs,proxy.readinessProbe.initialDelaySeconds=3,\
             podAnnotations.team=all,identity.podAnnotations.team=mesh,\
             proxy.resources.cpu.request=1500m,proxy.resources.cpu.limit=4",
        ],
        &["--set", "proxy.tracing.enabled=true,proxy.tracing.collector.endpoint=[::1]:4317"],
        &["--set", "controllerImage=cr.l5d.io/linkerd/controller,agent.image.name=registry.example:5000/a/weft-agent"],
        &["--set", "enableRemoteDiscovery=true,enableEndpointSlices=false,proxy.cores=2,podLabels.a=b"],
        &[
            "--set-string",
            "commonLabels.team=all,podLabels.team=pods,podLabels.linkerd\\.io/control-plane-component=x,\
             podAnnotations.cluster-autoscaler\\.kubernetes\\.io/safe-to-evict=false,podMonitor.labels.team=ops,\
             prometheusRule.labels.team=ops",
            "--set",
            "podMonitor.enabled=true,prometheusRule.enabled=true",
        ],
        &["--set", "nodeSelector.disk=ssd,tolerations[0].operator=Exists,proxyInit.ignoreInboundPorts=4567"],
        &["--set", "proxy.runtime.workers.maximumCPURatio=0.5,proxy.inbound.server.http2.maxConcurrentStreams=9"],
        &["--set", "proxy.experimentalEnv[0].name=A,proxy.experimentalEnv[0].value=yes,imagePullSecrets[0].name=pull"],
        &[
            "--set-string",
            "clusterDomain=mesh.example,identityTrustDomain=trust.example",
            "--set",
            "proxyInjector.externalSecret=true,proxyInjector.injectCaFrom=linkerd/injector",
        ],
    ] {
        let settings: Vec<_> = settings.iter().map(|text| (*text).to_owned()).chain(certificates.clone()).collect();
        let helm = ["template", "weft-control-plane", "charts/weft-control-plane", "--namespace", MESH];
        let helm = Command::new("helm").args(helm).args(&settings).current_dir(Cluster::repository()).output().unwrap();
        let mut theirs = objects(&cluster, &succeeded(&helm));
        let rendered = succeeded(&weft(&cluster, &["install", "--ignore-cluster"], &settings));
        let mut found = objects(&cluster, &by_helm(&rendered));
        for name in ours {
            assert!(found.remove(name).is_some(), "{name}: {:?}", found.keys());
        }
        assert_eq!(found.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{settings:?}");
        for (name, object) in found {
            assert_eq!(comparable(object), comparable(theirs.remove(&name).unwrap()), "{settings:?}: {name}");
        }
    }
}

/// Null removes a value of the chart. For a name that the chart does not have it stays, and the schema refuses it.
#[test]
fn a_null_without_a_value_to_remove_is_refused_as_by_helm() {
    let cluster = Cluster::from_env().unwrap();
    let generated = generate_certificates();
    let file = generated.path("values.yaml");
    fs::write(&file, "unknown: null\n").unwrap();
    let values = ["--values".to_owned(), file.display().to_string()];
    let settings: Vec<_> = values.into_iter().chain(generated.all()).collect();
    let helm = ["template", "weft-control-plane", "charts/weft-control-plane", "--namespace", MESH];
    let helm = Command::new("helm").args(helm).args(&settings).current_dir(Cluster::repository()).output().unwrap();
    for failed in [helm, weft(&cluster, &["install", "--ignore-cluster"], &settings)] {
        assert_eq!((failed.status.code(), failed.stdout.len()), (Some(1), 0));
        assert!(errors(&failed).contains("unknown"), "{}", errors(&failed));
    }
}

/// What helm refuses, with the same words.
#[test]
fn a_value_that_cannot_be_right_is_refused() {
    let cluster = Cluster::from_env().unwrap();
    let generated = generate_certificates();
    let certificates = generated.all();
    for (setting, words) in [
        ("controllerReplica=3", "controllerReplica"),
        ("controller.tracing.enabled=true", "not supported yet"),
        ("proxy.tracing.enabled=true,proxy.tracing.collector.endpoint=otel.obs:4317", "collector.meshIdentity"),
        ("enableEndpointSlices=false,disableIPv6=false", "IPv6"),
        ("proxyInjector.externalSecret=true", "caBundle"),
    ] {
        let failed = weft(&cluster, &["install", "--ignore-cluster", "--set", setting], &certificates);
        assert_eq!((failed.status.code(), failed.stdout.len()), (Some(1), 0), "{setting}");
        assert!(errors(&failed).contains(words), "{setting}: {}", errors(&failed));
    }
    let failed = weft(&cluster, &["install", "--ignore-cluster"], &certificates[..2]);
    assert!(errors(&failed).contains("--identity-issuer-certificate-file"), "{}", errors(&failed));
}

/// A definition with the names of the Prometheus Operator's, which admits anything.
fn pod_monitors() -> Value {
    let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let version = json!({"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": anything}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "podmonitors.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
            "scope": "Namespaced",
            "versions": [version],
        },
    })
}

/// One installation, because its objects are cluster-wide.
#[test]
fn an_installation_is_upgraded_pruned_and_removed() {
    let cluster = Cluster::from_env().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("manifest.yaml");
    let kubectl = |verb: &[&str], manifest: &str| {
        fs::write(&file, manifest).unwrap();
        cluster.kubectl(&[verb, &["-f", file.to_str().unwrap()]].concat()).unwrap()
    };
    let run = |arguments: &[&str]| weft(&cluster, arguments, &[]);
    let named = |stream: &str| objects(&cluster, stream).into_keys().collect::<Vec<_>>();

    for verb in ["upgrade", "prune", "uninstall"] {
        let said = errors(&run(&[verb]));
        assert!(said.contains("ConfigMap cli-install/linkerd-config does not exist"), "{verb}: {said}");
    }
    // Only `install` can go on without an answer.
    for verb in ["install", "upgrade", "prune", "uninstall"] {
        let said = errors(&run(&[verb, "--as", "nobody"]));
        assert!(said.contains("ConfigMap cli-install/linkerd-config of"), "{verb}: {said}");
        assert_eq!(said.contains("--ignore-cluster"), verb == "install", "{said}");
    }
    kubectl(&["apply", "--server-side", "--force-conflicts"], &succeeded(&run(&["install", "--crds"])));
    let installed = run(&["install", "--set", "proxy.logLevel=warn\\,a=info", "--controller-log-level", "debug"]);
    assert!(errors(&installed).contains("generated a trust anchor"), "{}", errors(&installed));
    let installed = succeeded(&installed);
    kubectl(&["apply"], &installed);
    let said = errors(&run(&["install"]));
    assert!(said.contains("weft upgrade"), "{said}");

    // Linkerd's extension has the component's namespace, too, with labels that `kubectl apply` would remove.
    let viz = ["viz", "install", "--viz-namespace", "cli-install-viz"];
    assert!(succeeded(&run(&viz)).contains("kind: Namespace\n"));
    cluster.kubectl(&["create", "namespace", "cli-install-viz"]).unwrap();
    assert!(!succeeded(&run(&viz)).contains("kind: Namespace\n"));
    cluster.kubectl(&["delete", "namespace", "cli-install-viz", "--wait=false"]).unwrap();

    // Nothing has changed, so nothing does: neither certificates nor values.
    assert_eq!(succeeded(&run(&["upgrade"])), installed);
    let pruned = run(&["prune"]);
    assert!(errors(&pruned).contains("nothing to delete"), "{}", errors(&pruned));
    assert_eq!(succeeded(&pruned), "");
    // The manifests say the same as the cluster does, where no cluster answers.
    let kept = directory.path().join("installed.yaml");
    fs::write(&kept, &installed).unwrap();
    let nowhere = ["--kubeconfig", "/nonexistent", "upgrade", "--from-manifests", kept.to_str().unwrap()];
    assert_eq!(succeeded(&run(&nowhere)), installed);
    let twice = errors(&run(&["upgrade", "--from-manifests", "-", "--values", "-"]));
    assert!(twice.contains("standard input can be read once"), "{twice}");
    let replicas = [&nowhere[..], &["--controller-replicas", "2"]].concat();
    assert_eq!(succeeded(&run(&replicas)), succeeded(&run(&["upgrade", "--controller-replicas", "2"])));
    kubectl(&["apply"], &succeeded(&run(&["upgrade", "--controller-replicas", "2"])));
    kubectl(&["apply"], &succeeded(&run(&["upgrade"])));
    let stored = cluster.get(&["-n", MESH, "deploy", "linkerd-destination"]).unwrap();
    assert_eq!(stored["spec"]["replicas"], 2);
    assert!(stored.to_string().contains("--log-level=debug"));

    let labels = json!({"app.kubernetes.io/part-of": "weft", "linkerd.io/control-plane-ns": MESH});
    let stale = |name: &str, labels: &Value| {
        let metadata = json!({"name": name, "namespace": MESH, "labels": labels});
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}).to_string()
    };
    kubectl(&["apply"], &stale("older", &labels));
    kubectl(&["apply"], &stale("others", &json!({"linkerd.io/control-plane-ns": MESH})));
    let pruned = succeeded(&run(&["prune"]));
    assert_eq!(named(&pruned), ["ConfigMap/older"]);
    kubectl(&["delete"], &pruned);

    // A kind that the cluster has only now.
    let definition = pod_monitors().to_string();
    kubectl(&["apply"], &definition);
    cluster.serves("podmonitors.monitoring.coreos.com").unwrap();
    kubectl(&["apply"], &succeeded(&run(&["upgrade", "--set", "podMonitor.enabled=true"])));
    assert_eq!(succeeded(&run(&["prune"])), "");
    kubectl(&["apply"], &succeeded(&run(&["upgrade", "--set", "podMonitor.enabled=false"])));
    let pruned = succeeded(&run(&["prune"]));
    let count = |text: &str| pruned.matches(text).count();
    assert_eq!((count("kind: PodMonitor\n"), count("kind: ")), (3, 3), "{pruned}");
    kubectl(&["delete"], &pruned);
    kubectl(&["delete"], &definition);

    let refused = |arguments: &[&str], words: &[&str]| {
        let output = run(arguments);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{arguments:?}");
        assert!(words.iter().all(|word| errors(&output).contains(word)), "{arguments:?}: {}", errors(&output));
    };
    // What `helm template` renders has another label, and the values are with the tool that applied it.
    let relabel = |value: &str| {
        let label = format!("app.kubernetes.io/managed-by={value}");
        cluster.kubectl(&["-n", MESH, "label", "--overwrite", "configmap", "linkerd-config", &label]).unwrap();
    };
    relabel("Helm");
    for verb in ["install", "upgrade", "prune", "uninstall"] {
        refused(&[verb], &["such as Argo CD", "use that tool"]);
    }
    relabel("weft");
    let pod = |name: &str, labels: Value| {
        let spec = json!({"containers": [{"name": "main", "image": "main"}]});
        let metadata = json!({"name": name, "namespace": "default", "labels": labels});
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    };
    let web = pod("web", json!({"linkerd.io/control-plane-ns": MESH})).to_string();
    kubectl(&["apply"], &web);
    refused(&["uninstall"], &["1 pods have a proxy (default/web)"]);
    // As the pods that a CronJob keeps.
    let ended = json!({"status": {"phase": "Succeeded"}}).to_string();
    cluster.kubectl(&["patch", "pod", "web", "--subresource=status", "--type=merge", "-p", &ended]).unwrap();
    assert!(succeeded(&run(&["uninstall"])).contains("servers.policy.linkerd.io"));
    kubectl(&["delete", "--force"], &web);

    // The component has a proxy, too, and goes in another way.
    let labels = json!({"app.kubernetes.io/name": "weft-viz", "app.kubernetes.io/part-of": "weft",
        "linkerd.io/control-plane-ns": MESH});
    let viz_pod = pod("weft-viz", labels.clone()).to_string();
    let template = json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "main"}]}});
    let mut viz = json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "weft-viz", "namespace": "default", "labels": labels},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}});
    kubectl(&["apply"], &viz_pod);
    kubectl(&["apply"], &viz.to_string());
    refused(&["uninstall"], &["first `weft viz uninstall | kubectl delete -f -`"]);
    viz["metadata"]["labels"]["app.kubernetes.io/managed-by"] = json!("Helm");
    kubectl(&["apply"], &viz.to_string());
    refused(&["uninstall"], &["first remove it with the tool that renders its chart"]);
    refused(&["viz", "uninstall"], &["such as Argo CD", "use that tool"]);
    refused(&["viz", "install"], &["such as Argo CD", "use that tool", "--ignore-cluster"]);
    viz["metadata"]["annotations"] = json!({"meta.helm.sh/release-name": "metrics"});
    kubectl(&["apply"], &viz.to_string());
    refused(&["uninstall"], &["first `helm uninstall metrics --namespace default`"]);
    refused(&["viz", "uninstall"], &["use `helm uninstall metrics --namespace default`"]);
    refused(&["viz", "install"], &["use `helm upgrade metrics --namespace default`", "--ignore-cluster"]);
    kubectl(&["delete"], &viz.to_string());
    kubectl(&["delete", "--force"], &viz_pod);
    let gone = succeeded(&run(&["uninstall", "--keep-crds"]));
    assert!(!gone.contains("CustomResourceDefinition"), "{gone}");
    assert!(succeeded(&run(&["uninstall"])).contains("servers.policy.linkerd.io"));
    kubectl(&["delete", "--wait=false"], &gone);
    let kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations,\
                 validatingadmissionpolicies,validatingadmissionpolicybindings";
    let selector = format!("linkerd.io/control-plane-ns={MESH}");
    let left = cluster.kubectl(&["get", kinds, "-A", "-l", &selector, "-o", "name"]).unwrap();
    assert_eq!(left.trim(), "");
    assert_eq!(cluster.get(&["namespace", MESH]).unwrap()["status"]["phase"], "Terminating");
}
