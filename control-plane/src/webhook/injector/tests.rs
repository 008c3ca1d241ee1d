//! The injector's patches and reports, from JSON objects.

use serde_json::{Value, json};

use super::*;

fn namespace(annotations: Value) -> Namespace {
    serde_json::from_value(json!({"metadata": {"name": "shop", "annotations": annotations}})).unwrap()
}

fn config() -> InjectConfig {
    InjectConfig::new("weft/proxy:1", "1", "anchors")
}

/// Applies the patch to the object as the API server has it.
fn applied(mut raw: Value, patch: &json_patch::Patch) -> Value {
    json_patch::patch(&mut raw, patch).unwrap();
    raw
}

#[track_caller]
fn check_pod(raw: Value) -> Value {
    let pod: Pod = serde_json::from_value(raw.clone()).unwrap();
    let Decision::Injected(after) = inject(&pod, None, &config()).unwrap() else { panic!("skipped") };
    let patched = applied(raw, &patch::pod(&pod, &after));
    assert_eq!(serde_json::from_value::<Pod>(patched.clone()).unwrap(), after);
    patched
}

#[test]
fn the_patch_makes_the_pod_what_injection_says() {
    let enabled = json!({"linkerd.io/inject": "enabled"});
    check_pod(json!({"metadata": {"annotations": enabled}, "spec": {"containers": [{"name": "app"}]}}));
    check_pod(json!({"metadata": {"annotations": enabled, "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "app"}], "volumes": [], "initContainers": []}}));
    check_pod(json!({"metadata": {"annotations": enabled, "labels": {"a/b": "~1"}},
        "spec": {"containers": [{"name": "app", "ports": [{"containerPort": 3306}]}],
            "volumes": [{"name": "data", "emptyDir": {}}], "initContainers": [{"name": "migrate", "image": "m"}]}}));
    let debugged = json!({"linkerd.io/inject": "enabled", "config.linkerd.io/enable-debug-sidecar": "true"});
    let patched = check_pod(json!({"metadata": {"annotations": debugged}, "spec": {"containers": [{"name": "app"}]}}));
    assert_eq!(patched["spec"]["containers"][1]["name"], "linkerd-debug");
}

#[test]
fn a_pod_without_containers_is_left_to_the_api_server() {
    for (pod, expected) in [
        (json!({"metadata": {}}), false),
        (json!({"metadata": {}, "spec": {"containers": null}}), false),
        (json!({"metadata": {}, "spec": {"containers": [{"name": "app"}]}}), true),
    ] {
        assert_eq!(is_complete(&serde_json::from_value(pod.clone()).unwrap()), expected, "{pod}");
    }
}

#[test]
fn fields_of_newer_versions_survive() {
    let patched = check_pod(json!({"metadata": {"annotations": {"linkerd.io/inject": "enabled"}},
        "spec": {"containers": [{"name": "app", "fromTheFuture": 1}], "alsoNew": true,
            "initContainers": [{"name": "migrate", "fromTheFuture": 2}]}}));
    assert_eq!(patched["spec"]["initContainers"][0]["name"], "linkerd-proxy");
    assert_eq!(patched["spec"]["initContainers"][1], json!({"name": "migrate", "fromTheFuture": 2}));
    assert_eq!(patched["spec"]["containers"][0]["fromTheFuture"], 1);
    assert_eq!(patched["spec"]["alsoNew"], true);
}

#[test]
fn the_sidecar_satisfies_the_restricted_pod_security_standard() {
    let patched = check_pod(json!({"metadata": {"annotations": {"linkerd.io/inject": "enabled"}},
        "spec": {"containers": [{"name": "app", "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}]}}));
    let proxy = &patched["spec"]["initContainers"][0];
    let context = &proxy["securityContext"];
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(context["runAsNonRoot"], true);
    assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(proxy["restartPolicy"], "Always");
    // The profile `restricted` allows these kinds of volumes, and no host ports.
    for volume in patched["spec"]["volumes"].as_array().unwrap() {
        assert!(volume.get("emptyDir").is_some() || volume.get("projected").is_some(), "{volume}");
    }
    assert!(proxy["ports"].as_array().unwrap().iter().all(|port| port.get("hostPort").is_none()));
}

#[test]
fn annotations_are_added_to_what_has_none_yet() {
    let service: Service =
        serde_json::from_value(json!({"metadata": {}, "spec": {"ports": [{"port": 3306}]}})).unwrap();
    let ports = inject::service_opaque_ports(&service, None, &config());
    let added = [("config.linkerd.io/opaque-ports", ports), ("weft.io/require-mtls", Some("true".to_owned()))];
    let patched = applied(json!({"metadata": {}}), &patch::annotations(&service.metadata, added));
    assert_eq!(patched["metadata"]["annotations"]["config.linkerd.io/opaque-ports"], "3306");
    assert_eq!(patched["metadata"]["annotations"]["weft.io/require-mtls"], "true");
    assert!(patch::annotations(&service.metadata, [("weft.io/require-mtls", None)]).0.is_empty());
}

#[test]
fn only_who_asked_for_a_proxy_hears_that_there_is_none() {
    let metadata =
        |annotations: Value| -> ObjectMeta { serde_json::from_value(json!({"annotations": annotations})).unwrap() };
    let (nothing, enabled, disabled) =
        (json!({}), json!({"linkerd.io/inject": "enabled"}), json!({"linkerd.io/inject": "disabled"}));
    for (reason, own, ns, expected) in [
        (SkipReason::HostNetwork, &nothing, &nothing, false),
        (SkipReason::HostNetwork, &enabled, &nothing, true),
        (SkipReason::HostNetwork, &nothing, &enabled, true),
        (SkipReason::HostNetwork, &disabled, &enabled, false),
        (SkipReason::AnnotationAbsent, &nothing, &nothing, false),
        (SkipReason::SidecarExists, &json!({"linkerd.io/inject": ""}), &nothing, false),
        (SkipReason::AnnotationDisabled, &disabled, &enabled, false),
        (SkipReason::SidecarExists, &nothing, &enabled, true),
    ] {
        assert_eq!(
            matters(reason, &metadata(own.clone()), Some(&namespace(ns.clone()))),
            expected,
            "{reason} {own} {ns}"
        );
    }
}

#[test]
fn a_refusal_names_the_annotation_and_its_place() {
    let annotation = "config.linkerd.io/skip-inbound-ports";
    let error = |own: Value, ns: Value| {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"annotations": own}, "spec": {"containers": []}})).unwrap();
        let namespace = namespace(ns);
        explain(&inject(&pod, Some(&namespace), &config()).unwrap_err(), &pod.metadata, Some(&namespace))
    };
    assert_eq!(
        error(json!({"linkerd.io/inject": "enabled", annotation: "many"}), json!({})),
        "cannot inject the proxy: annotation config.linkerd.io/skip-inbound-ports: bad value \"many\", expected ports \
         1-65535 or ranges such as 8000-8100, separated by commas"
    );
    let inherited = error(json!({}), json!({"linkerd.io/inject": "enabled", annotation: "many"}));
    assert!(inherited.ends_with("(set on namespace shop)"), "{inherited}");
    let user = json!({"metadata": {"annotations": {"linkerd.io/inject": "enabled"}},
        "spec": {"containers": [{"name": "app", "securityContext": {"runAsUser": 2102}}]}});
    let pod: Pod = serde_json::from_value(user).unwrap();
    let problem = explain(&inject(&pod, None, &config()).unwrap_err(), &pod.metadata, Some(&namespace(json!({}))));
    assert_eq!(
        problem,
        "cannot inject the proxy: spec.containers[0].securityContext.runAsUser is 2102, which is the proxy's: \
         connections of container \"app\" would bypass the proxy; use another id, or set the annotation \
         weft.io/proxy-exemption: cgroup"
    );
}

#[test]
fn what_is_ignored_is_a_warning() {
    let metadata =
        |annotations: Value| -> ObjectMeta { serde_json::from_value(json!({"annotations": annotations})).unwrap() };
    assert_eq!(
        warnings(&metadata(json!({"config.linkerd.io/proxy-cpu-limit": "many"}))).unwrap(),
        ["metadata.annotations[\"config.linkerd.io/proxy-cpu-limit\"]: bad value \"many\", expected a Kubernetes \
         quantity such as 100m or 64Mi; ignored"]
    );
    assert_eq!(warnings(&metadata(json!({"config.linkerd.io/proxy-cpu-limit": "1"}))), None);
    let long = warnings(&metadata(json!({"config.linkerd.io/proxy-uid": "x".repeat(200_000)}))).unwrap();
    assert!(long[0].len() < 250, "{} bytes", long[0].len());
}

#[test]
fn settings_that_cannot_be_read_name_the_file_and_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let sources = Sources {
        namespace: "linkerd".to_owned(),
        values: dir.path().join("values"),
        anchors: dir.path().join("ca-bundle.crt"),
    };
    let problem = || settings::load(&sources).unwrap_err().to_string();
    assert!(problem().contains("values: cannot be read"), "{}", problem());
    std::fs::write(&sources.values, "proxy: {image: {name: p, version: v}, uid: root}").unwrap();
    std::fs::write(&sources.anchors, "nothing").unwrap();
    assert!(problem().contains("ca-bundle.crt: trust anchors hold no certificate"), "{}", problem());
    std::fs::write(&sources.anchors, weft_tls::ca::Root::generate("root").unwrap().certificate_pem()).unwrap();
    assert!(problem().contains("values: proxy.uid: "), "{}", problem());
    std::fs::write(&sources.values, "proxy: {image: {name: p, version: v}}").unwrap();
    assert_eq!(settings::load(&sources).unwrap().proxy_image, "p:v");
}

/// An injector whose API server has the namespace `shop` alone, and the paths that it was asked for.
fn injector() -> (Injector, Arc<parking_lot::Mutex<Vec<String>>>, prometheus_client::registry::Registry) {
    let asked: Arc<parking_lot::Mutex<Vec<String>>> = Arc::default();
    let seen = asked.clone();
    let api = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let path = request.uri().to_string();
        let metadata =
            json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "shop"}});
        let missing =
            json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound"});
        let (code, body) = if path == "/api/v1/namespaces/shop" { (200, metadata) } else { (404, missing) };
        seen.lock().push(path);
        let body = kube::client::Body::from(body.to_string().into_bytes());
        let response = http::Response::builder().status(code).body(body).unwrap();
        std::future::ready(Ok::<_, std::convert::Infallible>(response))
    });
    let client = Client::new(api, "default");
    let mut registry = prometheus_client::registry::Registry::default();
    let (reporter, _) = owner::start(client.clone(), Events::none());
    let injector = Injector {
        settings: Settings::of(config()),
        namespaces: reflector::store().0,
        client,
        lookups: Semaphore::new(MAX_LOOKUPS),
        reporter,
        metrics: InjectorMetrics::new(&mut registry),
    };
    (injector, asked, registry)
}

fn review(kind: &str, namespace: &str) -> AdmissionRequest<DynamicObject> {
    let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "kind": {"group": "", "version": "v1", "kind": kind},
        "resource": {"group": "", "version": "v1", "resource": "x"}, "name": "", "namespace": namespace,
        "operation": "CREATE", "userInfo": {}, "dryRun": false,
        "object": {"apiVersion": "v1", "kind": kind, "metadata": {"name": "web"},
            "spec": {"containers": [{"name": "app"}]}}}});
    crate::webhook::server::read(&serde_json::to_vec(&review).unwrap()).unwrap()
}

#[tokio::test]
async fn a_namespace_that_is_no_name_is_refused_without_a_lookup() {
    let (injector, asked, registry) = injector();
    let series = || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text.lines().filter(|line| line.contains("namespace=")).count()
    };
    let long = "x".repeat(60_000);
    for name in ["default?1", "a/secrets/b", "?watch=true", "..", "", "Shop", &long] {
        for kind in ["Pod", "Service"] {
            let answer = injector.answer(&review(kind, name)).await;
            assert!(!answer.allowed && answer.result.code == 400, "{kind} {name:?}: {:?}", answer.result);
            let message = &answer.result.message;
            assert!(message.contains("request.namespace") && message.len() < 250, "{message}");
        }
    }
    assert_eq!(asked.lock().as_slice(), [""; 0]);
    assert_eq!(series(), 0);
    // A name that may be one is looked up, and is counted only if the namespace exists.
    let answer = injector.answer(&review("Pod", "gone")).await;
    assert!(!answer.allowed && answer.result.code == 500, "{:?}", answer.result);
    assert_eq!(series(), 0);
    assert!(injector.answer(&review("Pod", "shop")).await.allowed);
    assert_eq!(asked.lock().as_slice(), ["/api/v1/namespaces/gone", "/api/v1/namespaces/shop"]);
    assert_eq!(series(), 2, "a request and its response");
}

#[test]
fn labels_of_metrics_come_from_closed_sets() {
    let owned_by = |kind: &str| -> ObjectMeta {
        let owner = json!({"apiVersion": "x/v1", "kind": kind, "name": "n", "uid": "u", "controller": true});
        serde_json::from_value(json!({"ownerReferences": [owner]})).unwrap()
    };
    for (kind, expected) in
        [("ReplicaSet", "deployment"), ("CronJob", "cronjob"), ("Rollout", "other"), ("an attacker's text", "other")]
    {
        assert_eq!(request_labels(&owned_by(kind), "pod", "").owner_kind, expected, "{kind}");
    }
    assert_eq!(request_labels(&ObjectMeta::default(), "pod", "").owner_kind, "pod");
}
