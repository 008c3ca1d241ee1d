//! Injection, from JSON pods to the fields that matter.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Namespace, Pod};
use serde_json::{Value, json};

use super::*;

fn config() -> InjectConfig {
    InjectConfig::new("weft/proxy:1", "1.2.3", "-----BEGIN CERTIFICATE-----")
}

fn pod(annotations: Value, spec: Value) -> Pod {
    let mut object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web-abc-x", "namespace": "shop", "annotations": annotations,
            "labels": {"app": "web", "pod-template-hash": "abc"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "u"}]},
        "spec": {"containers": [{"name": "app", "ports": [
            {"containerPort": 8080, "name": "http"}, {"containerPort": 3306}, {"containerPort": 53, "protocol": "UDP"}]}]}
    });
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn namespace(annotations: Value) -> Namespace {
    serde_json::from_value(
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop", "annotations": annotations}}),
    )
    .unwrap()
}

fn injected(pod: &Pod, namespace: Option<&Namespace>) -> Pod {
    match inject(pod, namespace, &config()).unwrap() {
        Decision::Injected(pod) => pod,
        Decision::Skipped(reason) => panic!("skipped: {reason}"),
    }
}

fn proxy(pod: &Pod) -> &Container {
    &pod.spec.as_ref().unwrap().init_containers.as_ref().unwrap()[0]
}

fn env(pod: &Pod) -> BTreeMap<String, String> {
    let vars = proxy(pod).env.iter().flatten();
    vars.map(|var| {
        let field = var
            .value_from
            .as_ref()
            .and_then(|from| from.field_ref.as_ref())
            .map(|field| format!("field {}", field.field_path));
        (var.name.clone(), var.value.clone().or(field).unwrap())
    })
    .collect()
}

#[test]
fn decides_by_the_workload_then_the_namespace() {
    let enabled = json!({"linkerd.io/inject": "enabled"});
    let sidecar = json!({"containers": [{"name": "linkerd-proxy"}]});
    for (name, own, ns, spec, expected) in [
        ("pod asks", enabled.clone(), json!({}), json!({}), None),
        ("namespace asks", json!({}), enabled.clone(), json!({}), None),
        (
            "pod refuses",
            json!({"linkerd.io/inject": "disabled"}),
            enabled.clone(),
            json!({}),
            Some("injection_disable_annotation_present"),
        ),
        ("nobody asks", json!({}), json!({}), json!({}), Some("injection_enable_annotation_absent")),
        (
            "bad at pod",
            json!({"linkerd.io/inject": "yes"}),
            enabled.clone(),
            json!({}),
            Some("invalid_inject_annotation_at_workload"),
        ),
        (
            "bad at namespace",
            json!({}),
            json!({"linkerd.io/inject": "yes"}),
            json!({}),
            Some("invalid_inject_annotation_at_ns"),
        ),
        ("pod overrides bad namespace", enabled.clone(), json!({"linkerd.io/inject": "yes"}), json!({}), None),
        ("host network", enabled.clone(), json!({}), json!({"hostNetwork": true}), Some("host_network_enabled")),
        ("has a proxy", enabled.clone(), json!({}), sidecar, Some("sidecar_already_exists")),
        (
            "no token",
            enabled,
            json!({}),
            json!({"automountServiceAccountToken": false}),
            Some("disabled_automount_service_account_token_account"),
        ),
    ] {
        let decision = inject(&pod(own, spec), Some(&namespace(ns)), &config()).unwrap();
        let reason = match decision {
            Decision::Injected(_) => None,
            Decision::Skipped(reason) => Some(reason.label()),
        };
        assert_eq!(reason, expected, "{name}");
    }
}

#[test]
fn adds_a_native_sidecar_first_and_no_iptables() {
    let spec = json!({"initContainers": [{"name": "migrate"}]});
    let pod = injected(&pod(json!({"linkerd.io/inject": "enabled"}), spec), None);
    let spec = pod.spec.as_ref().unwrap();
    let names: Vec<_> = spec.init_containers.iter().flatten().map(|container| container.name.as_str()).collect();
    assert_eq!(names, ["linkerd-proxy", "migrate"]);
    let proxy = proxy(&pod);
    assert_eq!(proxy.restart_policy.as_deref(), Some("Always"));
    let startup = proxy.startup_probe.as_ref().unwrap();
    assert_eq!((startup.period_seconds, startup.failure_threshold), (Some(1), Some(120)));
    assert_eq!(startup.http_get.as_ref().unwrap().path.as_deref(), Some("/ready"));
    let context = proxy.security_context.as_ref().unwrap();
    assert_eq!((context.run_as_user, context.allow_privilege_escalation), (Some(2102), Some(false)));
    let volumes: Vec<_> = spec.volumes.iter().flatten().map(|volume| volume.name.as_str()).collect();
    assert_eq!(volumes, ["linkerd-identity-end-entity", "linkerd-identity-token"]);
}

#[test]
fn marks_the_pod_as_meshed() {
    let pod = injected(
        &pod(json!({}), json!({})),
        Some(&namespace(json!({
        "linkerd.io/inject": "enabled", "config.linkerd.io/proxy-log-level": "debug", "example.org/other": "x"}))),
    );
    let labels = pod.metadata.labels.unwrap();
    assert_eq!(labels["linkerd.io/control-plane-ns"], "linkerd");
    assert_eq!(labels["linkerd.io/workload-ns"], "shop");
    assert_eq!(labels["linkerd.io/proxy-deployment"], "web");
    let annotations = pod.metadata.annotations.unwrap();
    assert_eq!(annotations["linkerd.io/inject"], "enabled");
    assert_eq!(annotations["config.linkerd.io/proxy-log-level"], "debug");
    assert_eq!(annotations["config.linkerd.io/opaque-ports"], "3306");
    assert_eq!(annotations["linkerd.io/trust-root-sha256"].len(), 64);
    assert!(!annotations.contains_key("example.org/other"));
}

#[test]
fn gives_the_proxy_linkerds_environment() {
    let probe = json!({"containers": [{"name": "app", "ports": [{"containerPort": 8080, "name": "http"}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 9000}}}]});
    let pod = injected(
        &pod(json!({"linkerd.io/inject": "enabled", "config.linkerd.io/opaque-ports": "http,5432"}), probe),
        None,
    );
    let env = env(&pod);
    for (name, expected) in [
        ("_pod_name", "field metadata.name"),
        ("LINKERD2_PROXY_DESTINATION_SVC_ADDR", "linkerd-dst-headless.linkerd.svc.cluster.local.:8086"),
        ("LINKERD2_PROXY_POLICY_SVC_ADDR", "linkerd-policy.linkerd.svc.cluster.local.:8090"),
        ("LINKERD2_PROXY_IDENTITY_SVC_ADDR", "linkerd-identity-headless.linkerd.svc.cluster.local.:8080"),
        ("LINKERD2_PROXY_POLICY_SVC_NAME", "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local"),
        ("LINKERD2_PROXY_POLICY_WORKLOAD", r#"{"ns":"$(_pod_ns)", "pod":"$(_pod_name)"}"#),
        ("LINKERD2_PROXY_INBOUND_PORTS", "8080,9000"),
        ("LINKERD2_PROXY_INBOUND_IPS", "field status.podIPs"),
        ("LINKERD2_PROXY_INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION", "5432,8080"),
        ("LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "0.0.0.0:4143"),
        ("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS", "127.0.0.1:4140"),
        (
            "LINKERD2_PROXY_IDENTITY_LOCAL_NAME",
            "$(_pod_sa).$(_pod_ns).serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)",
        ),
    ] {
        assert_eq!(env.get(name).map(String::as_str), Some(expected), "{name}");
    }
}

#[test]
fn references_only_variables_that_stand_before_them() {
    let pod = injected(&pod(json!({"linkerd.io/inject": "enabled"}), json!({})), None);
    let mut seen = Vec::new();
    for var in proxy(&pod).env.iter().flatten() {
        for reference in var.value.iter().flat_map(|value| value.split("$(").skip(1)) {
            let name = reference.split(')').next().unwrap();
            assert!(seen.contains(&name), "{} refers to {name}", var.name);
        }
        seen.push(&var.name);
    }
}

#[test]
fn ipv6_opens_listeners_of_both_families() {
    let config = InjectConfig { ipv6: true, ..config() };
    let Decision::Injected(pod) =
        inject(&pod(json!({"linkerd.io/inject": "enabled"}), json!({})), None, &config).unwrap()
    else {
        panic!()
    };
    let env = env(&pod);
    assert_eq!(env["LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS"], "127.0.0.1:4140,[::1]:4140");
    assert_eq!(env["LINKERD2_PROXY_INBOUND_LISTEN_ADDR"], "[::]:4143");
}

#[test]
fn a_malformed_annotation_is_named_with_value_and_expectation() {
    for (annotation, value) in [
        ("config.linkerd.io/skip-inbound-ports", "80,x"),
        ("config.linkerd.io/skip-subnets", "10.0.0.0/40"),
        ("config.linkerd.io/opaque-ports", "NOT A PORT"),
        ("config.linkerd.io/default-inbound-policy", "allow"),
        ("config.linkerd.io/proxy-uid", "root"),
        ("config.linkerd.io/inbound-port", "0"),
        ("config.linkerd.io/proxy-inbound-connect-timeout", "soon"),
        ("config.linkerd.io/proxy-cpu-limit", "many"),
        ("config.linkerd.io/proxy-additional-env", "{}"),
        ("config.linkerd.io/proxy-enable-native-sidecar", "false"),
    ] {
        let bad = pod(json!({"linkerd.io/inject": "enabled", annotation: value}), json!({}));
        let error = inject(&bad, None, &config()).unwrap_err();
        assert_eq!((error.annotation, error.value.as_str()), (annotation, value));
        assert!(error.to_string().contains("expected"), "{error}");
        assert_eq!(check_annotations(&bad.metadata).len(), 1, "{annotation}");
    }
}

#[test]
fn a_pod_that_stays_out_may_say_what_it_likes() {
    let bad = pod(json!({"config.linkerd.io/proxy-uid": "root"}), json!({}));
    assert_eq!(inject(&bad, None, &config()), Ok(Decision::Skipped(SkipReason::AnnotationAbsent)));
}

#[test]
fn redirection_follows_the_annotations() {
    let defaults = RedirectionDefaults::default();
    let plain = Redirection::of(&pod(json!({}), json!({})), &defaults).unwrap();
    assert_eq!(plain.skip_inbound_ports.to_string(), "4191,4567-4568");
    assert_eq!((plain.outbound_port, plain.inbound_port, plain.proxy_uid), (4140, 4143, 2102));
    assert_eq!(plain.control_port, 4190);
    let own = json!({"config.linkerd.io/skip-inbound-ports": "22", "config.linkerd.io/skip-outbound-ports": "443",
        "config.linkerd.io/skip-subnets": "10.1.0.0/16", "config.linkerd.io/admin-port": "9191",
        "config.linkerd.io/control-port": "9190"});
    let own = Redirection::of(&pod(own, json!({})), &defaults).unwrap();
    assert_eq!(
        (own.skip_inbound_ports.to_string(), own.skip_outbound_ports.to_string()),
        ("22,9191".to_owned(), "443".to_owned())
    );
    assert_eq!((own.control_port, own.skip_subnets.len()), (9190, 1));
    assert!(
        Redirection::of(&pod(json!({"config.linkerd.io/skip-outbound-ports": "all"}), json!({})), &defaults).is_err()
    );
}
