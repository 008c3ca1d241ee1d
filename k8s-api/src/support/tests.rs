//! The table compared with the code: every annotation is injected, every value looked up in the chart, every variable
//! in the proxy's source, every warning requested.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value as Json, json};

use super::*;
use crate::inject::{Decision, InjectConfig, Redirection, RedirectionDefaults, TapClient, Tracing, inject};

fn repository() -> PathBuf {
    PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("..")
}

fn metadata(annotations: Json) -> ObjectMeta {
    serde_json::from_value(json!({"annotations": annotations})).unwrap()
}

/// Annotations of pods that Linkerd reads (`linkerd2:pkg/k8s/labels.go`), each with a valid value other than the
/// default.
const LINKERD_ANNOTATIONS: &[(&str, &str)] = &[
    ("linkerd.io/inject", "enabled"),
    ("linkerd.io/inject", "ingress"),
    ("config.linkerd.io/proxy-image", "example.org/proxy"),
    ("config.linkerd.io/proxy-version", "v2"),
    ("config.linkerd.io/image-pull-policy", "Always"),
    ("config.linkerd.io/debug-image", "example.org/debug"),
    ("config.linkerd.io/debug-image-version", "v2"),
    ("config.linkerd.io/debug-image-pull-policy", "Always"),
    ("config.linkerd.io/enable-debug-sidecar", "true"),
    ("config.linkerd.io/control-port", "5190"),
    ("viz.linkerd.io/disable-tap", "true"),
    ("config.linkerd.io/inbound-port", "5143"),
    ("config.linkerd.io/outbound-port", "5140"),
    ("config.linkerd.io/admin-port", "5191"),
    ("config.linkerd.io/pod-inbound-ports", "81"),
    ("config.linkerd.io/skip-inbound-ports", "22"),
    ("config.linkerd.io/skip-outbound-ports", "25"),
    ("config.linkerd.io/skip-subnets", "10.1.0.0/16"),
    ("config.linkerd.io/opaque-ports", "9"),
    ("config.linkerd.io/proxy-cpu-request", "100m"),
    ("config.linkerd.io/proxy-cpu-limit", "1"),
    ("config.linkerd.io/proxy-cpu-ratio-limit", "0.5"),
    ("config.linkerd.io/proxy-memory-request", "20Mi"),
    ("config.linkerd.io/proxy-memory-limit", "250Mi"),
    ("config.linkerd.io/proxy-ephemeral-storage-request", "1Gi"),
    ("config.linkerd.io/proxy-ephemeral-storage-limit", "2Gi"),
    ("config.linkerd.io/proxy-uid", "3000"),
    ("config.linkerd.io/proxy-gid", "3000"),
    ("config.linkerd.io/proxy-admin-shutdown", "enabled"),
    ("config.linkerd.io/proxy-await", "enabled"),
    ("config.linkerd.io/close-wait-timeout", "3600s"),
    ("config.linkerd.io/shutdown-grace-period", "30s"),
    ("config.linkerd.io/proxy-log-level", "debug"),
    ("config.linkerd.io/proxy-log-format", "json"),
    ("config.linkerd.io/proxy-log-http-headers", "insecure"),
    ("config.linkerd.io/access-log", "apache"),
    ("config.linkerd.io/proxy-metrics-hostname-labels", "true"),
    ("config.linkerd.io/enable-external-profiles", "true"),
    ("config.linkerd.io/enable-gateway", "true"),
    ("config.linkerd.io/proxy-require-identity-inbound-ports", "80"),
    ("config.linkerd.io/default-inbound-policy", "deny"),
    ("config.linkerd.io/default-inbound-policy", "audit"),
    ("config.linkerd.io/proxy-inbound-connect-timeout", "1s"),
    ("config.linkerd.io/proxy-outbound-connect-timeout", "2s"),
    ("config.linkerd.io/proxy-inbound-discovery-cache-unused-timeout", "1m"),
    ("config.linkerd.io/proxy-outbound-discovery-cache-unused-timeout", "1m"),
    ("config.linkerd.io/proxy-disable-inbound-protocol-detect-timeout", "true"),
    ("config.linkerd.io/proxy-disable-outbound-protocol-detect-timeout", "true"),
    ("config.linkerd.io/proxy-enable-native-sidecar", "true"),
    ("config.beta.linkerd.io/proxy-enable-native-sidecar", "true"),
    ("config.alpha.linkerd.io/proxy-enable-native-sidecar", "true"),
    ("config.linkerd.io/proxy-additional-env", "[{\"name\": \"A\", \"value\": \"1\"}]"),
    ("config.alpha.linkerd.io/proxy-wait-before-exit-seconds", "10"),
    ("resource.opentelemetry.io/service.name", "web"),
];

/// The pod with the proxy, and its redirection, without the annotations that configured them.
fn injected(annotation: &str, value: &str) -> (Pod, Redirection) {
    let pod = json!({
        "metadata": {"name": "web", "namespace": "shop", "annotations": {"linkerd.io/inject": "enabled"}},
        "spec": {"containers": [{"name": "app", "ports": [{"containerPort": 80}]}]},
    });
    let mut pod: Pod = serde_json::from_value(pod).unwrap();
    let annotations = pod.metadata.annotations.as_mut().unwrap();
    // Each of the others concerns this one's container.
    annotations.insert(labels::ENABLE_DEBUG_SIDECAR.to_owned(), annotation.contains("debug-image").to_string());
    annotations.insert(annotation.to_owned(), value.to_owned());
    let mut config = InjectConfig::new("proxy:1", "1", "anchors");
    config.tap = Some(TapClient::default());
    // Without a collector, attributes of spans change nothing.
    config.tuning.tracing = Some(Tracing {
        collector: "otel.obs:4317".to_owned(),
        identity: None,
        service_name: "linkerd-proxy".to_owned(),
        attributes: BTreeMap::new(),
    });
    let Ok(Decision::Injected(mut pod)) = inject(&pod, None, &config) else { panic!("{annotation}: not injected") };
    let redirection = Redirection::of(&pod, &RedirectionDefaults::default()).unwrap();
    pod.metadata.annotations = None;
    (pod, redirection)
}

#[test]
fn every_annotation_of_linkerd_works_or_is_meaningless_or_warned_about() {
    let plain = injected("linkerd.io/inject", "enabled");
    let debugged = injected(labels::ENABLE_DEBUG_SIDECAR, "true");
    let mut seen = BTreeSet::new();
    for (annotation, value) in LINKERD_ANNOTATIONS {
        let row = lookup(POD_ANNOTATIONS, annotation, value).unwrap_or_else(|| panic!("{annotation}: no row"));
        seen.insert((row.name, row.value));
        let warnings = pod_warnings(&metadata(json!({"linkerd.io/inject": "enabled", *annotation: value})));
        assert_eq!(warnings.len(), usize::from(row.state == State::Unsupported), "{annotation}: {warnings:?}");
        let after = injected(annotation, value);
        let plain = if annotation.contains("debug-image") { &debugged } else { &plain };
        // The policy controller reads it from the pod, and passes it to the proxy.
        let read_elsewhere = *annotation == "linkerd.io/inject";
        match row.state {
            State::Works if !read_elsewhere => assert!(after != *plain, "{annotation}: {value} changes nothing"),
            State::Meaningless => assert!(after == *plain, "{annotation}: {value} has a meaning"),
            _ => {}
        }
    }
    let rows: BTreeSet<_> = POD_ANNOTATIONS.iter().map(|row| (row.name, row.value)).collect();
    assert_eq!(rows.difference(&seen).collect::<Vec<_>>(), Vec::<&(&str, &str)>::new(), "rows of no annotation");
}

#[test]
fn what_is_unknown_or_unreadable_is_warned_about() {
    for (annotations, expected) in [
        (json!({"config.linkerd.io/skip-inbound-port": "22"}), "unknown annotation; ignored"),
        (
            json!({"config.linkerd.io/proxy-cpu-limit": "many"}),
            "expected a Kubernetes quantity such as 100m or 64Mi; ignored",
        ),
        (
            json!({"config.linkerd.io/proxy-additional-env": "[{\"name\": \"LINKERD2_PROXY_CORE\", \"value\": \"1\"}]"}),
            "unknown variable; ignored",
        ),
    ] {
        let found = pod_warnings(&metadata(annotations.clone()));
        assert!(found.len() == 1 && found[0].problem.contains(expected), "{annotations}: {found:?}");
    }
    let fine = json!({"example.org/x": "y", "weft.io/bypass": "true", "linkerd.io/inject": "enabled",
        "config.linkerd.io/proxy-additional-env": "[{\"name\": \"LINKERD2_PROXY_LOG\", \"value\": \"debug\"}]"});
    assert_eq!(pod_warnings(&metadata(fine)), []);
}

#[test]
fn services_and_resources_that_are_not_acted_upon_are_warned_about() {
    for annotation in ["mirror.linkerd.io/exported", "multicluster.linkerd.io/cluster-name"] {
        assert_eq!(service_warnings(&metadata(json!({annotation: "x"}))).len(), 1, "{annotation}");
    }
    for annotation in [
        "balancer.linkerd.io/failure-accrual",
        "balancer.linkerd.io/failure-accrual-consecutive-max-failures",
        "balancer.alpha.linkerd.io/failure-accrual-success-rate-threshold",
        "balancer.alpha.linkerd.io/penalize-failures",
        "balancer.alpha.linkerd.io/load-biaser-penalty",
        "config.linkerd.io/opaque-ports",
        "retry.linkerd.io/http",
        "timeout.linkerd.io/request",
        "timeout.linkerd.io/idle",
    ] {
        assert_eq!(service_warnings(&metadata(json!({annotation: "x"}))), [], "{annotation}");
    }
    let (policy, gateway, linkerd) = ("policy.linkerd.io", "gateway.networking.k8s.io", "linkerd.io");
    let route = json!({"spec": {"targetRef": {"kind": "HTTPRoute", "name": "x"}}});
    let routes = json!({"spec": {"routes": [{"name": "a"}, {"name": "b", "isRetryable": true, "timeout": "1s"}]}});
    let filter = |name: &str| json!({"spec": {"rules": [{"filters": [{"type": name}]}]}});
    let parents = |parents: Json| json!({"spec": {"parentRefs": parents}});
    for (group, kind, object, expected) in [
        (gateway, "HTTPRoute", filter("RequestMirror"), &["spec.rules.filters.type"][..]),
        (gateway, "HTTPRoute", parents(json!([{"name": "front"}])), &[]),
        (
            gateway,
            "HTTPRoute",
            parents(json!([{"name": "front"}, {"kind": "Service", "group": "", "name": "web"}])),
            &[],
        ),
        (
            policy,
            "HTTPRoute",
            json!({"spec": {"rules": [{"timeouts": {"backendRequest": "1s"}}]}}),
            &["spec.rules.timeouts.backendRequest"],
        ),
        (policy, "HTTPRoute", json!({"spec": {"rules": [{"timeouts": {"request": "1s"}}]}}), &[]),
        (gateway, "GRPCRoute", filter("ResponseHeaderModifier"), &["spec.rules.filters.type"]),
        (gateway, "HTTPRoute", filter("RequestRedirect"), &[]),
        (policy, "EgressNetwork", json!({}), &[]),
        (policy, "HTTPLocalRateLimitPolicy", json!({}), &[]),
        (policy, "AuthorizationPolicy", route, &[]),
        (policy, "AuthorizationPolicy", json!({"spec": {"targetRef": {"kind": "Server"}}}), &[]),
        (policy, "Server", json!({"spec": {"accessPolicy": "audit"}}), &[]),
        (policy, "Server", json!({"spec": {"accessPolicy": "deny"}}), &[]),
        (linkerd, "ServiceProfile", routes, &[]),
        (linkerd, "ServiceProfile", json!({"spec": {"dstOverrides": [{}], "routes": []}}), &[]),
        ("example.org", "HTTPRoute", json!({}), &[]),
    ] {
        let found: Vec<_> = object_warnings(group, kind, &object).iter().map(|it| it.field.to_string()).collect();
        assert_eq!(found, expected, "{kind}.{group} {object}");
    }
}

/// Every leaf of a tree of values; an empty map or list is one.
fn leaves(value: &Json, path: &str, into: &mut Vec<String>) {
    match value.as_object().filter(|map| !map.is_empty()) {
        Some(map) => map.iter().for_each(|(key, inner)| {
            leaves(inner, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, into);
        }),
        None => into.push(path.to_owned()),
    }
}

fn row_of(rows: &'static [Value], path: &str) -> Option<&'static Value> {
    let covers =
        |row: &&Value| path == row.path || path.strip_prefix(row.path).is_some_and(|rest| rest.starts_with('.'));
    rows.iter().filter(covers).max_by_key(|row| row.path.len())
}

#[test]
fn every_value_of_linkerd_has_a_row_and_the_chart_knows_it() {
    let definitions =
        "{installGatewayAPI: false, enableHttpRoutes: null, enableTlsRoutes: null, enableTcpRoutes: null}";
    for (rows, linkerd, chart) in [
        (VALUES, table::LINKERD_VALUES, "weft-control-plane"),
        (UNLISTED_VALUES, table::UNLISTED, "weft-control-plane"),
        (DEFINITION_VALUES, definitions, "weft-crds"),
    ] {
        let linkerd: Json = serde_yaml_ng::from_str(linkerd).unwrap();
        let chart = repository().join("charts").join(chart);
        let schema = fs::read(chart.join("values.schema.json")).unwrap();
        let schema: Json = serde_json::from_slice(&schema).unwrap();
        let ours = fs::read_to_string(chart.join("values.yaml")).unwrap();
        let ours: Json = serde_yaml_ng::from_str(&ours).unwrap();
        let mut paths = Vec::new();
        leaves(&linkerd, "", &mut paths);
        let mut seen = BTreeSet::new();
        for path in &paths {
            let row = row_of(rows, path).unwrap_or_else(|| panic!("{path}: no row"));
            seen.insert(row.path);
            assert!(accepts(&schema, &schema, path), "{path}: the chart's schema does not know it");
            let documented = row.path.split('.').try_fold(&ours, |at, key| at.get(key)).is_some();
            assert!(documented || row.state != State::Works, "{path}: works, and is not in values.yaml");
        }
        let idle: Vec<_> = rows.iter().map(|row| row.path).filter(|path| !seen.contains(path)).collect();
        assert_eq!(idle, Vec::<&str>::new(), "rows of no value");
    }
}

/// Whether a JSON schema allows a path to be set.
fn accepts(root: &Json, schema: &Json, path: &str) -> bool {
    let mut at = schema;
    for key in path.split('.') {
        while let Some(name) = at.get("$ref").and_then(Json::as_str) {
            at = &root["definitions"][name.rsplit('/').next().unwrap_or_default()];
        }
        if *at == json!(true) || at.get("additionalProperties") != Some(&json!(false)) {
            return true;
        }
        match at["properties"].get(key) {
            Some(inner) => at = inner,
            None => return false,
        }
    }
    true
}

#[test]
fn every_variable_is_read_by_the_proxy_or_is_not_supported() {
    let source = |file: &str| fs::read_to_string(repository().join("proxy/src").join(file)).unwrap();
    let files = ["config.rs", "config/env.rs", "config/http2.rs", "config/parts.rs", "config/trace.rs"];
    let text: String = files.map(source).concat();
    // Names, and prefixes and suffixes of composed names.
    let words: BTreeSet<&str> =
        text.split('"').map(|word| word.trim_start_matches("{group}").trim_start_matches("{PREFIX}")).collect();
    let read = |name: &str| {
        let halves = || name.char_indices().filter(|(_, c)| *c == '_').map(|(at, _)| name.split_at(at));
        words.contains(name) || halves().any(|(group, end)| words.contains(group) && words.contains(end))
    };
    for group in VARIABLES.iter().filter_map(|row| row.name.strip_suffix('*')) {
        let refuses = words.iter().any(|word| word.starts_with(group));
        assert!(refuses, "LINKERD2_PROXY_{group}*: a group of names is for what the proxy refuses");
    }
    for row in VARIABLES.iter().filter(|row| row.value.is_empty() && !row.name.ends_with('*')) {
        assert_eq!(
            read(row.name),
            row.state == State::Works,
            "LINKERD2_PROXY_{}: proxy/src/config.rs and k8s-api/src/support/variables.rs disagree",
            row.name
        );
    }
    let unique: BTreeSet<_> = VARIABLES.iter().map(|row| (row.name, row.value)).collect();
    assert_eq!(unique.len(), VARIABLES.len());
    let injected = injected("linkerd.io/inject", "enabled").0;
    for variable in injected.spec.unwrap().init_containers.unwrap()[0].env.iter().flatten() {
        let Some(name) = variable.name.strip_prefix("LINKERD2_PROXY_") else { continue };
        assert!(lookup(VARIABLES, name, "").is_some(), "{name} is injected and has no row");
    }
}

#[test]
fn what_is_made_from_the_table_is_current() {
    for (path, text) in [
        ("docs/compatibility.md", document()),
        ("charts/weft-control-plane/files/linkerd-values.json", chart_values()),
        ("proxy/src/config/linkerd.txt", proxy_variables()),
    ] {
        let kept = fs::read_to_string(repository().join(path)).unwrap_or_default();
        assert!(kept == text, "{path} is not current; run `cargo run -p weft-k8s-api --example support`");
    }
}
