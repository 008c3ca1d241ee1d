//! Injection: JSON pods in, the relevant fields out.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Namespace, Pod};
use serde_json::{Value, json};

use super::*;

mod bypass;
mod tuning;

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
        ("no annotation", json!({}), json!({}), json!({}), Some("injection_enable_annotation_absent")),
        ("empty at pod", json!({"linkerd.io/inject": ""}), enabled.clone(), json!({}), None),
        (
            "empty at namespace",
            json!({}),
            json!({"linkerd.io/inject": ""}),
            json!({}),
            Some("injection_enable_annotation_absent"),
        ),
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
            // The injector projects a token of its own.
            "no token",
            enabled,
            json!({}),
            json!({"automountServiceAccountToken": false}),
            None,
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
fn an_empty_request_is_an_absent_one() {
    let empty = pod(json!({"linkerd.io/inject": ""}), json!({}));
    assert_eq!(check_annotations(&empty.metadata), []);
    let injected = injected(&empty, Some(&namespace(json!({"linkerd.io/inject": "ingress"}))));
    assert_eq!(injected.metadata.annotations.unwrap()["linkerd.io/inject"], "ingress");
}

/// The API server refuses a pod with a label of more than 63 characters, and its owner may have a longer name.
#[test]
fn a_long_name_of_an_owner_is_cut_to_a_label() {
    let long = |length: usize| "n".repeat(length);
    let labels = |kind: &str, name: &str| {
        let mut pod = pod(json!({"linkerd.io/inject": "enabled"}), json!({}));
        let owner = &mut pod.metadata.owner_references.as_mut().unwrap()[0];
        (owner.kind, owner.name) = (kind.to_owned(), name.to_owned());
        injected(&pod, None).metadata.labels.unwrap()
    };
    for (name, expected) in [
        (long(63), long(63)),
        (long(64), long(63)),
        (format!("{}.{}", long(62), long(137)), long(62)),
        (format!("{}.-.{}", long(61), long(2)), long(61)),
    ] {
        let found = labels("ReplicaSet", &format!("{name}-abc"));
        assert_eq!(found["linkerd.io/proxy-deployment"], expected, "{name}");
        assert_eq!(labels("DaemonSet", &name)["linkerd.io/proxy-daemonset"], expected, "{name}");
    }
    assert_eq!(labels(&long(63), "web")[&format!("linkerd.io/proxy-{}", long(57))], "web");
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
fn an_unreadable_policy_refuses_the_pod() {
    for (annotation, value) in [
        ("config.linkerd.io/skip-inbound-ports", "80,x"),
        ("config.linkerd.io/skip-outbound-ports", "all"),
        ("config.linkerd.io/skip-subnets", "10.0.0.0/40"),
        ("config.linkerd.io/default-inbound-policy", "allow"),
        ("config.linkerd.io/proxy-require-identity-inbound-ports", "http"),
        ("weft.io/proxy-exemption", "container"),
        ("weft.io/bypass", "yes"),
        ("weft.io/require-mtls", "strict"),
    ] {
        let bad = pod(json!({"linkerd.io/inject": "enabled", annotation: value}), json!({}));
        let Err(Refusal::Annotation(error)) = inject(&bad, None, &config()) else { panic!("{annotation}") };
        assert_eq!((error.annotation, error.value.as_str()), (annotation, value));
        assert!(error.to_string().contains("expected"), "{error}");
        assert_eq!(check_annotations(&bad.metadata).len(), 1, "{annotation}");
        assert_eq!(Redirection::of(&bad, &RedirectionDefaults::default()), Err(error), "{annotation}");
    }
}

#[test]
fn other_unreadable_annotations_are_ignored_and_named() {
    let plain = env(&injected(&pod(json!({"linkerd.io/inject": "enabled"}), json!({})), None));
    for (annotation, value) in [
        ("config.linkerd.io/proxy-uid", "root"),
        ("config.linkerd.io/proxy-uid", "0"),
        ("config.linkerd.io/proxy-gid", "wheel"),
        ("config.linkerd.io/inbound-port", "0"),
        ("config.linkerd.io/pod-inbound-ports", "http"),
        ("config.linkerd.io/proxy-inbound-connect-timeout", "soon"),
        ("config.linkerd.io/proxy-outbound-connect-timeout", "1h-5m"),
        ("config.linkerd.io/shutdown-grace-period", "-1s"),
        ("config.linkerd.io/proxy-cpu-limit", "many"),
        ("config.linkerd.io/proxy-additional-env", "{}"),
        ("config.linkerd.io/access-log", "nginx"),
        ("config.linkerd.io/proxy-log-format", "xml"),
        ("config.linkerd.io/proxy-admin-shutdown", "maybe"),
        ("config.linkerd.io/proxy-disable-inbound-protocol-detect-timeout", "yes"),
        ("config.linkerd.io/proxy-enable-native-sidecar", "false"),
        ("config.alpha.linkerd.io/proxy-enable-native-sidecar", "false"),
        ("config.beta.linkerd.io/proxy-enable-native-sidecar", "no"),
    ] {
        let bad = pod(json!({"linkerd.io/inject": "enabled", annotation: value}), json!({}));
        let pod = injected(&bad, None);
        assert_eq!(env(&pod), plain, "{annotation}: {value}");
        assert_eq!(proxy(&pod).security_context.as_ref().unwrap().run_as_user, Some(2102), "{annotation}");
        assert_eq!(check_annotations(&bad.metadata), [], "{annotation}");
        let ignored = ignored_annotations(&pod.metadata);
        assert_eq!(ignored.len(), 1, "{annotation}: {ignored:?}");
        assert_eq!(ignored[0].field, FieldPath::annotation(annotation));
        assert!(Redirection::of(&pod, &RedirectionDefaults::default()).is_ok(), "{annotation}");
    }
}

#[test]
fn only_the_bad_entry_of_a_list_of_opaque_ports_is_ignored_and_named() {
    let annotations = json!({"linkerd.io/inject": "enabled", "config.linkerd.io/opaque-ports": "6543,My_Port,http"});
    let pod = injected(&pod(annotations, json!({})), None);
    assert_eq!(env(&pod)["LINKERD2_PROXY_INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION"], "6543,8080");
    let [ignored] = &ignored_annotations(&pod.metadata)[..] else { panic!("not one") };
    assert_eq!(ignored.field, FieldPath::annotation(labels::OPAQUE_PORTS));
    assert!(ignored.problem.starts_with("bad value \"My_Port\", expected ports"), "{ignored}");
}

#[test]
fn linkerds_spellings_are_understood() {
    for (annotation, value, variable, expected) in [
        ("proxy-admin-shutdown", "enabled", "SHUTDOWN_ENDPOINT_ENABLED", "true"),
        ("proxy-admin-shutdown", "disabled", "SHUTDOWN_ENDPOINT_ENABLED", "false"),
        ("shutdown-grace-period", "1m30s", "SHUTDOWN_GRACE_PERIOD", "90000ms"),
        ("proxy-inbound-connect-timeout", "1.5s", "INBOUND_CONNECT_TIMEOUT", "1500ms"),
        ("proxy-outbound-discovery-cache-unused-timeout", "1h0m0s", "OUTBOUND_DISCOVERY_IDLE_TIMEOUT", "3600000ms"),
        ("proxy-disable-outbound-protocol-detect-timeout", "True", "OUTBOUND_DETECT_TIMEOUT", "365d"),
        ("proxy-disable-inbound-protocol-detect-timeout", "1", "INBOUND_DETECT_TIMEOUT", "365d"),
        ("access-log", "json", "ACCESS_LOG", "json"),
        ("proxy-log-format", "json", "LOG_FORMAT", "json"),
        ("enable-external-profiles", "t", "DESTINATION_PROFILE_SUFFIXES", "."),
    ] {
        let annotation = format!("config.linkerd.io/{annotation}");
        let pod = injected(&pod(json!({"linkerd.io/inject": "enabled", &annotation: value}), json!({})), None);
        assert_eq!(env(&pod)[&format!("LINKERD2_PROXY_{variable}")], expected, "{annotation}: {value}");
        assert_eq!(ignored_annotations(&pod.metadata), [], "{annotation}: {value}");
    }
    let config = InjectConfig { proxy_gid: Some(2102), ..config() };
    let unset = pod(json!({"linkerd.io/inject": "enabled", "config.linkerd.io/proxy-gid": "-1"}), json!({}));
    let Ok(Decision::Injected(pod)) = inject(&unset, None, &config) else { panic!("not injected") };
    assert_eq!(proxy(&pod).security_context.as_ref().unwrap().run_as_group, None);
    let defaults = RedirectionDefaults { proxy_gid: Some(2102), ..RedirectionDefaults::default() };
    assert_eq!(Redirection::of(&pod, &defaults).unwrap().proxy_gid, None);
}

#[test]
fn additional_environment_is_merged_and_the_pods_own_wins() {
    let variable = |name: &str, value: &str| json!({"name": name, "value": value});
    let list = |variables: &[Value]| {
        json!({
        "linkerd.io/inject": "enabled", "config.linkerd.io/proxy-additional-env": json!(variables).to_string()})
    };
    let helm = [variable("A", "helm"), variable("B", "helm"), variable("C", "helm")];
    let config = InjectConfig { extra_env: serde_json::from_value(json!(helm)).unwrap(), ..config() };
    let namespace = namespace(list(&[variable("B", "namespace"), variable("C", "namespace")]));
    for (own, expected) in [
        (
            list(&[variable("C", "pod"), variable("D", "pod")]),
            &[("A", "helm"), ("B", "namespace"), ("C", "pod"), ("D", "pod")][..],
        ),
        (json!({}), &[("A", "helm"), ("B", "namespace"), ("C", "namespace")]),
    ] {
        let Ok(Decision::Injected(pod)) = inject(&pod(own, json!({})), Some(&namespace), &config) else {
            panic!("not injected")
        };
        let found: Vec<_> = proxy(&pod).env.iter().flatten().filter(|variable| variable.name.len() == 1).collect();
        let found: Vec<_> = found.iter().map(|it| (it.name.as_str(), it.value.as_deref().unwrap())).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn a_pod_that_stays_out_may_say_what_it_likes() {
    let bad = pod(json!({"config.linkerd.io/skip-subnets": "here"}), json!({}));
    assert_eq!(inject(&bad, None, &config()), Ok(Decision::Skipped(SkipReason::AnnotationAbsent)));
}

/// The pods of a stock Linkerd have no annotation for it: its init container has the ports as arguments.
#[test]
fn a_control_plane_reaches_the_api_server_without_its_proxy() {
    let api_server_ports = "443,6443".parse::<crate::ports::PortSet>().unwrap();
    let skips = Skips { api_server_ports, ..Skips::default() };
    let defaults = RedirectionDefaults { skips, ..RedirectionDefaults::default() };
    let own = json!({"config.linkerd.io/skip-outbound-ports": "25"});
    for (annotations, component, expected) in [
        (json!({}), true, "443,4567-4568,6443"),
        (own.clone(), true, "25,443,6443"),
        (json!({}), false, "4567-4568"),
        (own, false, "25"),
    ] {
        let mut pod = pod(annotations, json!({}));
        if component {
            let label = (labels::CONTROL_PLANE_COMPONENT.to_owned(), "destination".to_owned());
            pod.metadata.labels.get_or_insert_default().extend([label]);
        }
        assert_eq!(Redirection::of(&pod, &defaults).unwrap().skip_outbound_ports.to_string(), expected);
    }
}

#[test]
fn redirection_follows_the_annotations() {
    let defaults = RedirectionDefaults::default();
    let plain = Redirection::of(&pod(json!({}), json!({})), &defaults).unwrap();
    assert_eq!(plain.skip_inbound_ports.to_string(), "4567-4568");
    assert_eq!((plain.outbound_port, plain.inbound_port, plain.proxy_uid), (4140, 4143, 2102));
    assert_eq!((plain.control_port, plain.admin_port), (4190, 4191));
    let own = json!({"config.linkerd.io/skip-inbound-ports": "22", "config.linkerd.io/skip-outbound-ports": "443",
        "config.linkerd.io/skip-subnets": "10.1.0.0/16", "config.linkerd.io/admin-port": "9191",
        "config.linkerd.io/control-port": "9190"});
    let own = Redirection::of(&pod(own, json!({})), &defaults).unwrap();
    assert_eq!(
        (own.skip_inbound_ports.to_string(), own.skip_outbound_ports.to_string()),
        ("22".to_owned(), "443".to_owned())
    );
    assert_eq!((own.control_port, own.admin_port, own.skip_subnets.len()), (9190, 9191, 1));
    assert!(
        Redirection::of(&pod(json!({"config.linkerd.io/skip-outbound-ports": "all"}), json!({})), &defaults).is_err()
    );
}

#[test]
fn a_running_pod_has_the_ports_that_its_proxy_was_started_with() {
    let annotations = |ports: [u16; 4]| {
        let names = ["outbound", "inbound", "control", "admin"];
        let annotations = names.into_iter().zip(ports);
        annotations.map(|(name, port)| (format!("config.linkerd.io/{name}-port"), port.to_string())).collect::<Vec<_>>()
    };
    let found = |pod: &Pod, ports| {
        let found = Redirection::of(pod, &RedirectionDefaults { ports, ..RedirectionDefaults::default() }).unwrap();
        [found.outbound_port, found.inbound_port, found.control_port, found.admin_port]
    };
    for (own, expected) in
        [(None, [4140, 4143, 4190, 4191]), (Some([5140, 5143, 5190, 5191]), [5140, 5143, 5190, 5191])]
    {
        let mut created = pod(json!({"linkerd.io/inject": "enabled"}), json!({}));
        created.metadata.annotations.get_or_insert_default().extend(own.into_iter().flat_map(annotations));
        let mut running = injected(&created, None);
        // Of other charts, and with the proxy's listeners exchanged.
        let other = ProxyPorts { outbound: 6140, inbound: 6143, control: 6190, admin: 6191 };
        assert_eq!(found(&running, other), expected);
        let [outbound, inbound, control, admin] = expected;
        running.metadata.annotations.as_mut().unwrap().extend(annotations([inbound, outbound, admin, control]));
        assert_eq!(found(&running, ProxyPorts::default()), expected);
        created.metadata.annotations.as_mut().unwrap().extend(annotations([inbound, outbound, admin, control]));
        assert_eq!(found(&created, other), [inbound, outbound, admin, control], "it was not injected yet");
    }
}

/// A pod whose application runs with these ids, in its own security context or in the pod's.
fn pod_with_ids(annotations: Value, of_container: Value, of_pod: Value) -> Pod {
    let spec = json!({"containers": [{"name": "other"}, {"name": "app", "securityContext": of_container}],
        "securityContext": of_pod});
    let mut annotations = annotations;
    annotations["linkerd.io/inject"] = json!("enabled");
    pod(annotations, spec)
}

#[test]
fn an_application_with_the_proxys_user_or_group_is_refused_unless_the_pod_is_strict() {
    let with_group = InjectConfig { proxy_gid: Some(2103), ..config() };
    let strict = InjectConfig {
        exemption: ExemptionRules { default: Exemption::Cgroup, ..ExemptionRules::default() },
        ..config()
    };
    let (none, user, group) = (json!({}), json!({"runAsUser": 2102}), json!({"runAsGroup": 2103}));
    let cgroup = json!({"weft.io/proxy-exemption": "cgroup"});
    let of_user = json!({"weft.io/proxy-exemption": "user"});
    let own_uid = json!({"config.linkerd.io/proxy-uid": "1000"});
    let field = |at: &str| Some(at.to_owned());
    for (row, config, annotations, of_container, of_pod, expected) in [
        ("another user", &config(), &none, json!({"runAsUser": 1000}), &none, None),
        ("container", &config(), &none, user.clone(), &none, field("spec.containers[1].securityContext.runAsUser")),
        ("pod", &config(), &none, none.clone(), &user, field("spec.securityContext.runAsUser")),
        ("strict by annotation", &config(), &cgroup, user.clone(), &none, None),
        ("strict by default", &strict, &none, user.clone(), &none, None),
        (
            "lax by annotation",
            &strict,
            &of_user,
            user.clone(),
            &none,
            field("spec.containers[1].securityContext.runAsUser"),
        ),
        ("group", &with_group, &none, group.clone(), &none, field("spec.containers[1].securityContext.runAsGroup")),
        ("a group that exempts no connection", &config(), &none, group.clone(), &none, None),
        (
            "proxy's user by annotation",
            &config(),
            &own_uid,
            json!({"runAsUser": 1000}),
            &none,
            field("spec.containers[1].securityContext.runAsUser"),
        ),
        ("user of the default proxy", &config(), &own_uid, user.clone(), &none, None),
    ] {
        let pod = pod_with_ids(annotations.clone(), of_container, of_pod.clone());
        let found = match inject(&pod, None, config) {
            Ok(Decision::Injected(_)) => None,
            Err(Refusal::ProxyId { field, .. }) => Some(field.to_string()),
            other => panic!("{row}: {other:?}"),
        };
        assert_eq!(found, expected, "{row}");
    }
    // The other containers have their own user; the pod's user is the proxy's.
    let others = json!({"containers": [{"name": "app", "securityContext": {"runAsUser": 1000}}],
        "securityContext": {"runAsUser": 2102}});
    assert!(inject(&pod(json!({"linkerd.io/inject": "enabled"}), others), None, &config()).is_ok());
    let init = json!({"initContainers": [{"name": "migrate", "securityContext": {"runAsUser": 2102}}]});
    assert!(inject(&pod(json!({"linkerd.io/inject": "enabled"}), init), None, &config()).is_err());
}

#[test]
fn a_pod_that_shares_the_proxys_user_is_strict_to_the_agent_whatever_it_says() {
    let defaults = RedirectionDefaults::default();
    let exemption = |pod: &Pod| Redirection::of(pod, &defaults).unwrap().exemption;
    let none = json!({});
    assert_eq!(exemption(&pod_with_ids(none.clone(), none.clone(), none.clone())), Exemption::User);
    let shared = pod_with_ids(json!({"weft.io/proxy-exemption": "user"}), json!({"runAsUser": 2102}), none.clone());
    assert_eq!(exemption(&shared), Exemption::Cgroup);
    let debugged = json!({"ephemeralContainers": [{"name": "debug", "securityContext": {"runAsUser": 2102}}]});
    assert_eq!(exemption(&pod(none, debugged)), Exemption::Cgroup);
    // The proxy itself is not an application.
    let injected = injected(&pod(json!({"linkerd.io/inject": "enabled"}), json!({})), None);
    assert_eq!(exemption(&injected), Exemption::User);
}

#[test]
fn a_strict_pod_whose_application_may_be_the_proxys_user_shares_no_processes_with_it() {
    let strict = ExemptionRules { default: Exemption::Cgroup, ..ExemptionRules::default() };
    let app = |user: Value| json!([{"name": "app", "securityContext": user}]);
    let (other, proxys) = (json!({"runAsUser": 1000}), json!({"runAsUser": 2102}));
    for (row, shares, containers, whole, is_refused) in [
        ("the proxy's user", "shareProcessNamespace", app(proxys.clone()), json!({}), true),
        ("the proxy's user, on the pod", "shareProcessNamespace", app(json!({})), proxys.clone(), true),
        ("the user of the image", "shareProcessNamespace", app(json!({})), json!({}), true),
        ("another user", "shareProcessNamespace", app(other.clone()), json!({}), false),
        ("another user, on the pod", "shareProcessNamespace", app(json!({})), other.clone(), false),
        ("another user in place of the pod's", "shareProcessNamespace", app(other), proxys.clone(), false),
        ("the node's processes", "hostPID", app(proxys.clone()), json!({}), true),
        ("processes of its own", "shareProcessNamespace", app(proxys), json!({}), false),
    ] {
        let is_shared = row != "processes of its own";
        let spec = json!({"containers": containers, "securityContext": whole, shares: is_shared});
        let pod = pod(json!({"linkerd.io/inject": "enabled"}), spec);
        let refusal = inject(&pod, None, &InjectConfig { exemption: strict, ..config() }).err();
        let text = refusal.as_ref().map(ToString::to_string).unwrap_or_default();
        assert_eq!(matches!(refusal, Some(Refusal::SharedProcesses { .. })), is_refused, "{row}: {refusal:?}");
        assert_eq!(
            text.starts_with(&format!("spec.{shares}: ")) && text.contains("\"app\""),
            is_refused,
            "{row}: {text}"
        );
    }
    // Where the proxy's user passes anyway, the user of an image is its owner's choice.
    let spec = json!({"shareProcessNamespace": true});
    assert!(inject(&pod(json!({"linkerd.io/inject": "enabled"}), spec), None, &config()).is_ok());
}

#[test]
fn mutual_tls_is_required_by_an_annotation_that_no_variable_undoes() {
    let value = |pod: &Pod| env(pod).remove("WEFT_PROXY_REQUIRE_MTLS");
    let required = Some("true".to_owned());
    let undo = r#"[{"name": "WEFT_PROXY_REQUIRE_MTLS", "value": "false"}]"#;
    let annotated = pod(
        json!({"linkerd.io/inject": "enabled", "weft.io/require-mtls": "true", "config.linkerd.io/proxy-additional-env": undo}),
        json!({}),
    );
    assert_eq!(value(&injected(&annotated, None)), required);
    let by_namespace = namespace(json!({"linkerd.io/inject": "enabled", "weft.io/require-mtls": "true"}));
    assert_eq!(value(&injected(&pod(json!({}), json!({})), Some(&by_namespace))), required);
    let without = json!({"linkerd.io/inject": "enabled", "weft.io/require-mtls": "false"});
    assert_eq!(value(&injected(&pod(without, json!({})), Some(&by_namespace))), None);
}

#[test]
fn weft_annotations_are_inherited_from_the_namespace() {
    let ns = json!({"linkerd.io/inject": "enabled", "weft.io/proxy-exemption": "cgroup"});
    let inherited = injected(&pod(json!({}), json!({})), Some(&namespace(ns.clone())));
    assert_eq!(inherited.metadata.annotations.as_ref().unwrap()["weft.io/proxy-exemption"], "cgroup");
    assert_eq!(Redirection::of(&inherited, &RedirectionDefaults::default()).unwrap().exemption, Exemption::Cgroup);
    let own = injected(&pod(json!({"weft.io/proxy-exemption": "user"}), json!({})), Some(&namespace(ns)));
    assert_eq!(own.metadata.annotations.unwrap()["weft.io/proxy-exemption"], "user");
}
