//! Manifests in, manifests and report out.

use std::fs;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use weft_k8s_api::inject::{Decision, InjectConfig};
use weft_tls::ca::Root;

use super::{options::Overrides, *};

const WEB: &str = "\
# The shop.
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
  namespace: shop
spec:
  selector:
    matchLabels: {app: web}
  template:
    metadata:
      labels:
        app: web
    spec:
      initContainers:
      - name: migrate
        image: web:1
      containers:
      - name: web
        image: web:1
        ports:
        - containerPort: 8080
        env:
        - name: FEATURE
          value: \"yes\"
      volumes:
      - name: scripts
        configMap:
          name: scripts
          defaultMode: 0755
";

fn documents(text: &str) -> Vec<Document> {
    document::parse(&"web.yaml".into(), text).unwrap()
}

fn overrides() -> Overrides {
    Overrides { mode: "enabled", annotations: Vec::new() }
}

fn annotated_with(text: &str, overrides: &Overrides) -> Result<Transformed> {
    let injection = Injection { overrides, manual: None };
    transform(&documents(text), ManifestFormat::Yaml, |object, place| transform::inject(object, place, &injection))
}

fn annotated(text: &str) -> Result<Transformed> {
    annotated_with(text, &overrides())
}

fn uninjected(text: &str) -> Result<Transformed> {
    transform(&documents(text), ManifestFormat::Yaml, transform::uninject)
}

/// With the chart's settings.
fn manual(text: &str, overrides: &Overrides) -> Result<Transformed> {
    let directory = tempfile::tempdir()?;
    let anchors = directory.path().join("ca.crt");
    fs::write(&anchors, Root::generate("root")?.certificate_pem())?;
    let documents = documents(text);
    let all: Vec<_> = documents.iter().flat_map(|document| document::objects(&document.value)).collect();
    let manual = Manual::of_chart("linkerd", &anchors, &all)?;
    let injection = Injection { overrides, manual: Some(&manual) };
    transform(&documents, ManifestFormat::Yaml, |object, place| transform::inject(object, place, &injection))
}

fn value(text: &str) -> serde_json::Value {
    serde_json::to_value(&documents(text)[0].value).unwrap()
}

fn outcomes(transformed: &Transformed) -> Vec<&Outcome> {
    transformed.entries.iter().map(|entry| &entry.outcome).collect()
}

#[test]
fn a_workload_is_annotated_where_its_pods_are() {
    for (kind, version, pointer) in [
        ("Deployment", "apps/v1", "/spec/template"),
        ("DaemonSet", "apps/v1", "/spec/template"),
        ("StatefulSet", "apps/v1", "/spec/template"),
        ("ReplicaSet", "apps/v1", "/spec/template"),
        ("ReplicationController", "v1", "/spec/template"),
        ("Job", "batch/v1", "/spec/template"),
        ("CronJob", "batch/v1", "/spec/jobTemplate/spec/template"),
        ("Pod", "v1", ""),
    ] {
        let pod = json!({"metadata": {"name": "web"}, "spec": {"containers": [{"name": "web", "image": "web"}]}});
        let mut object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": "web"}});
        match pointer {
            "" => object["spec"] = pod["spec"].clone(),
            "/spec/template" => object["spec"] = json!({"template": pod}),
            _ => object["spec"] = json!({"jobTemplate": {"spec": {"template": pod}}}),
        }
        let transformed = annotated(&object.to_string()).unwrap();
        assert_eq!(outcomes(&transformed), [&Outcome::Injected], "{kind}");
        let found = value(&transformed.manifests);
        let mode = found.pointer(&format!("{pointer}/metadata/annotations/linkerd.io~1inject"));
        assert_eq!(mode, Some(&json!("enabled")), "{kind}: {}", transformed.manifests);
    }
}

/// README meshes the whole application by one command.
#[test]
fn the_examples_client_outside_the_mesh_stays_outside() {
    let package = std::path::PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap());
    let text = fs::read_to_string(package.join("../examples/kubernetes/clients.yaml")).unwrap();
    let injected = annotated(&text).unwrap().manifests;
    let objects = document::parse(&"clients.yaml".into(), &injected).unwrap();
    let clients = objects.iter().map(|it| &it.value).filter(|it| it["kind"].as_str() == Some("Deployment"));
    let modes: Vec<_> = clients
        .map(|it| {
            let mode = it["spec"]["template"]["metadata"]["annotations"]["linkerd.io/inject"].as_str();
            (it["metadata"]["namespace"].as_str().unwrap(), mode.unwrap())
        })
        .collect();
    assert_eq!(modes, [("shop", "enabled"), ("outside", "disabled")]);
}

#[test]
fn fields_keep_their_order_and_scalars_their_meaning() {
    let text = annotated(WEB).unwrap().manifests;
    let found = value(&text);
    assert_eq!(found["spec"]["template"]["spec"]["volumes"][0]["configMap"]["defaultMode"], json!(0o755));
    assert_eq!(found["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"], json!("yes"));
    let places = ["apiVersion", "kind", "metadata", "selector", "template", "initContainers", "containers", "volumes"];
    let places: Vec<_> = places.iter().map(|key| text.find(&format!("{key}:"))).collect();
    assert!(places.is_sorted() && places[0].is_some(), "{text}");
}

#[test]
fn what_is_not_changed_is_printed_as_it_was() {
    let config = "# Keep me.\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {mode: yes}\n";
    let transformed = annotated(config).unwrap();
    assert_eq!(transformed.manifests, format!("{config}---\n"));
    assert_eq!(outcomes(&transformed), [&Outcome::Skipped(None)]);
    let refusing =
        WEB.replace("        app: web\n", "        app: web\n      annotations: {linkerd.io/inject: disabled}\n");
    let transformed = annotated(&refusing).unwrap();
    assert_eq!(transformed.manifests, format!("{refusing}---\n"));
    assert!(transformed.entries[0].warnings[0].contains("disabled"), "{:?}", transformed.entries);
}

#[test]
fn items_of_lists_are_injected_where_they_are() {
    let service =
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "db"}, "spec": {"ports": [{"port": 1}]}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service, value(WEB)]});
    let mut settings = overrides();
    settings.annotations.push(("config.linkerd.io/opaque-ports", "3306".to_owned()));
    let transformed = annotated_with(&list.to_string(), &settings).unwrap();
    assert_eq!(outcomes(&transformed), [&Outcome::Annotated, &Outcome::Injected]);
    let found = value(&transformed.manifests);
    assert_eq!(found["items"][0]["metadata"]["annotations"], json!({"config.linkerd.io/opaque-ports": "3306"}));
    let annotations = &found["items"][1]["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations, &json!({"linkerd.io/inject": "enabled", "config.linkerd.io/opaque-ports": "3306"}));
}

#[test]
fn a_namespace_is_annotated_itself() {
    let transformed = annotated("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n").unwrap();
    assert_eq!(value(&transformed.manifests)["metadata"]["annotations"], json!({"linkerd.io/inject": "enabled"}));
}

/// Such as `linkerd.io/extension`, by which others find it.
#[test]
fn labels_of_a_namespace_stay() {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": "viz",
        "labels": {"linkerd.io/extension": "viz"},
    }});
    let injected = annotated(&namespace.to_string()).unwrap().manifests;
    assert_eq!(value(&injected)["metadata"]["labels"], namespace["metadata"]["labels"]);
    assert_eq!(value(&uninjected(&injected).unwrap().manifests), namespace);
}

#[test]
fn an_ingress_stays_one() {
    let ingress =
        WEB.replace("        app: web\n", "        app: web\n      annotations: {linkerd.io/inject: ingress}\n");
    assert!(annotated(&ingress).unwrap().manifests.contains("linkerd.io/inject: ingress"));
}

#[test]
fn a_service_of_another_group_is_not_one() {
    let other = "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: web}\n";
    assert_eq!(outcomes(&annotated(other).unwrap()), [&Outcome::Skipped(None)]);
}

/// Nothing is printed, and each problem has its file, line and document.
#[test]
fn what_cannot_be_injected_is_named_and_nothing_is_printed() {
    let host = WEB.replace("      initContainers:", "      hostNetwork: true\n      initContainers:");
    let istio = WEB.replace("name: migrate", "name: istio-init");
    let typo = WEB.replace("containerPort: 8080", "containerPort: http");
    let ports = WEB.replace(
        "        app: web\n",
        "        app: web\n      annotations: {config.linkerd.io/skip-inbound-ports: http}\n",
    );
    let control =
        WEB.replace("  name: web\n", "  name: web\n  labels: {linkerd.io/control-plane-component: identity}\n");
    let bare = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {}\n";
    for (text, words) in [
        (host.as_str(), &["web.yaml:17:", "document 2", "deployment/web", "hostNetwork is enabled", "disabled"][..]),
        (&istio, &["deployment/web", "spec.template.spec", "sidecar"]),
        (&typo, &["web.yaml:24:", "spec.template.spec.containers[0].ports[0].containerPort"]),
        (&ports, &["config.linkerd.io/skip-inbound-ports", "http"]),
        (&control, &["part of the control plane"]),
        (bare, &["web.yaml:6:", "spec.template: missing"]),
    ] {
        let stream = format!("{{\"a\": 1}}\n---\n{text}").replace("{\"a\": 1}", "a: 1");
        let error = annotated(&stream).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}\n{words:?}");
        assert!(error.starts_with("nothing is printed:\n"), "{error}");
    }
}

#[test]
fn every_problem_is_reported() {
    let host = WEB.replace("      initContainers:", "      hostNetwork: true\n      initContainers:");
    let error = annotated(&format!("{host}---\n{host}")).unwrap_err().to_string();
    assert_eq!(error.matches("hostNetwork is enabled").count(), 2, "{error}");
}

#[test]
fn a_whole_proxy_is_the_injectors() {
    let mut settings = overrides();
    settings.annotations.push(("config.linkerd.io/enable-debug-sidecar", "true".to_owned()));
    let transformed = manual(WEB, &settings).unwrap();
    let template = &value(&transformed.manifests)["spec"]["template"];
    let names = |list: &str| -> Vec<String> {
        let list = template["spec"][list].as_array().unwrap().iter();
        list.map(|element| element["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("initContainers"), ["linkerd-proxy", "migrate"]);
    assert_eq!(names("containers"), ["web", "linkerd-debug"]);
    assert_eq!(names("volumes"), ["scripts", "linkerd-identity-end-entity", "linkerd-identity-token"]);
    let labels = &template["metadata"]["labels"];
    assert_eq!((&labels["linkerd.io/workload-ns"], &labels["app"]), (&json!("shop"), &json!("web")));
    assert_eq!(labels["linkerd.io/proxy-deployment"], json!("web"));
    assert_eq!(template["metadata"]["annotations"].get("linkerd.io/inject"), None);
    let image = template["spec"]["initContainers"][0]["image"].as_str().unwrap();
    assert!(image.ends_with(concat!("weft-proxy:", env!("CARGO_PKG_VERSION"))), "{image}");
}

/// The pod that the template stands for, injected by the same function as in the webhook.
#[test]
fn a_whole_proxy_equals_the_webhooks() {
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n  annotations:\n    config.linkerd.io/skip-outbound-ports: \"25\"\n";
    let transformed = manual(&format!("{namespace}---\n{WEB}"), &overrides()).unwrap();
    let injected = documents(&transformed.manifests).pop().unwrap().value;
    let template = |value: &Value| serde_json::to_value(value).unwrap()["spec"]["template"].clone();
    let of = |template: serde_json::Value| -> Pod {
        serde_json::from_value(
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}),
        )
        .unwrap()
    };
    let found = of(template(&injected));
    let mut pod = of(value(WEB)["spec"]["template"].clone());
    pod.metadata.namespace = Some("shop".to_owned());
    pod.metadata.annotations = Some([("linkerd.io/inject".to_owned(), "enabled".to_owned())].into());
    let namespace = serde_json::from_value(value(namespace)).unwrap();
    let Ok(Decision::Injected(webhook)) =
        weft_k8s_api::inject::inject(&pod, Some(&namespace), &InjectConfig::new("x", "1", "x"))
    else {
        panic!("not injected")
    };
    let shape = |pod: &Pod| {
        let spec = pod.spec.clone().unwrap();
        let names: Vec<_> = spec.init_containers.into_iter().flatten().map(|container| container.name).collect();
        let volumes: Vec<_> = spec.volumes.into_iter().flatten().map(|volume| volume.name).collect();
        (names, volumes)
    };
    assert_eq!(shape(&found), shape(&webhook));
    assert_eq!(
        found.metadata.annotations.as_ref().unwrap()["config.linkerd.io/skip-outbound-ports"],
        webhook.metadata.annotations.as_ref().unwrap()["config.linkerd.io/skip-outbound-ports"],
    );
}

#[test]
fn a_pod_that_the_webhook_would_refuse_is_refused() {
    let root = WEB.replace(
        "        image: web:1\n        ports",
        "        image: web:1\n        securityContext: {runAsUser: 2102}\n        ports",
    );
    let error = manual(&root, &overrides()).unwrap_err().to_string();
    assert!(error.contains("2102") && error.contains("would bypass the proxy"), "{error}");
    // Without the cluster's settings it may be right.
    let transformed = annotated(&root).unwrap();
    assert!(transformed.entries[0].warnings[0].contains("2102"), "{:?}", transformed.entries);
}

#[test]
fn injecting_twice_is_injecting_once() {
    let once = manual(WEB, &overrides()).unwrap().manifests;
    let again = manual(once.trim_end_matches("---\n"), &overrides()).unwrap().manifests;
    // The trust anchors differ: each call makes its own.
    assert_eq!(once.matches("name: linkerd-proxy\n").count(), again.matches("name: linkerd-proxy\n").count());
    assert_eq!(again.matches("linkerd-identity-token").count(), once.matches("linkerd-identity-token").count());
    let annotated_once = annotated(WEB).unwrap().manifests;
    assert_eq!(annotated(annotated_once.trim_end_matches("---\n")).unwrap().manifests, annotated_once);
}

#[test]
fn uninjecting_leaves_what_was_there() {
    let expected = value(WEB);
    for injected in [annotated(WEB).unwrap(), manual(WEB, &overrides()).unwrap()] {
        let transformed = uninjected(&injected.manifests).unwrap();
        assert_eq!(outcomes(&transformed), [&Outcome::Uninjected]);
        assert_eq!(value(&transformed.manifests), expected);
    }
    assert_eq!(outcomes(&uninjected(WEB).unwrap()), [&Outcome::Skipped(None)]);
}

/// As `linkerd inject --manual` prints it.
#[test]
fn linkerds_proxy_is_removed_too() {
    let injected = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {"template": {
        "metadata": {
            "annotations": {"linkerd.io/created-by": "linkerd/cli", "linkerd.io/proxy-version": "x", "config.linkerd.io/proxy-uid": "3"},
            "labels": {"app": "web", "linkerd.io/control-plane-ns": "linkerd"},
        },
        "spec": {
            "initContainers": [{"name": "linkerd-init", "image": "i"}, {"name": "linkerd-proxy", "image": "p"}],
            "containers": [{"name": "web", "image": "w"}],
            "volumes": [{"name": "linkerd-proxy-init-xtables-lock"}, {"name": "linkerd-identity-end-entity"}],
        },
    }}});
    let found = value(&uninjected(&injected.to_string()).unwrap().manifests);
    assert_eq!(
        found["spec"]["template"],
        json!({
            "metadata": {"annotations": {"config.linkerd.io/proxy-uid": "3"}, "labels": {"app": "web"}},
            "spec": {"containers": [{"name": "web", "image": "w"}]},
        })
    );
}

#[test]
fn json_is_a_stream_of_objects() {
    let injection = Injection { overrides: &overrides(), manual: None };
    let documents = documents(&format!("{WEB}---\na: 1\n"));
    let transformed =
        transform(&documents, ManifestFormat::Json, |object, place| transform::inject(object, place, &injection))
            .unwrap();
    let objects: Vec<serde_json::Value> =
        serde_json::Deserializer::from_str(&transformed.manifests).into_iter().collect::<Result<_, _>>().unwrap();
    assert_eq!(objects[0]["kind"], json!("Deployment"));
    assert_eq!(objects[1], json!({"a": 1}));
    assert_eq!(transformed.entries[1].kind, "");
}

#[tokio::test]
async fn whole_proxies_without_a_cluster_need_trust_anchors() {
    use clap::Parser;
    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        inject: InjectArgs,
    }
    let args = Command::try_parse_from(["inject", "--manual", "--ignore-cluster", "web.yaml"]).unwrap().inject;
    let Err(error) = settings(&args, &[]).await else { panic!("settings without trust anchors") };
    assert!(error.to_string().contains("--identity-trust-anchors-file"), "{error}");
}
