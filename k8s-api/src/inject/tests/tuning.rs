//! Settings of the proxy from values and annotations: each alone, both, and unreadable.

use super::*;
use crate::values::Values;

/// The proxy's environment without the prefix, of a pod with these annotations in a mesh with these values.
#[track_caller]
fn env_of(values: &str, annotations: Value) -> BTreeMap<String, String> {
    let variables = env(&injected_with(values, annotations, json!({})));
    let name = |name: &str| name.strip_prefix("LINKERD2_PROXY_").unwrap_or(name).to_owned();
    variables.into_iter().map(|(variable, value)| (name(&variable), value)).collect()
}

#[track_caller]
fn injected_with(values: &str, mut annotations: Value, spec: Value) -> Pod {
    annotations["linkerd.io/inject"] = json!("enabled");
    let config = Values::parse(values).unwrap().inject_config("linkerd", "anchors").unwrap();
    match inject(&pod(annotations, spec), None, &config).unwrap() {
        Decision::Injected(pod) => pod,
        Decision::Skipped(reason) => panic!("skipped: {reason}"),
    }
}

/// Values of the proxy, `{}` of the chart's defaults.
fn proxy_values(proxy: &str) -> String {
    format!("{{clusterDomain: mesh.example, proxy: {{image: {{name: p, version: v}}, {proxy}}}}}")
}

#[test]
fn values_and_annotations_become_variables_and_the_annotation_wins() {
    for (variable, default, values, from_values, annotation, value, from_annotation) in [
        (
            "INBOUND_CONNECT_TIMEOUT",
            "100ms",
            "inboundConnectTimeout: 1s",
            "1s",
            "proxy-inbound-connect-timeout",
            "2s",
            "2000ms",
        ),
        (
            "OUTBOUND_CONNECT_TIMEOUT",
            "1000ms",
            "outboundConnectTimeout: 1m30s",
            "90000ms",
            "proxy-outbound-connect-timeout",
            "2s",
            "2000ms",
        ),
        (
            "INBOUND_DISCOVERY_IDLE_TIMEOUT",
            "90s",
            "inboundDiscoveryCacheUnusedTimeout: 7s",
            "7s",
            "proxy-inbound-discovery-cache-unused-timeout",
            "8s",
            "8000ms",
        ),
        (
            "OUTBOUND_DISCOVERY_IDLE_TIMEOUT",
            "5s",
            "outboundDiscoveryCacheUnusedTimeout: 7s",
            "7s",
            "proxy-outbound-discovery-cache-unused-timeout",
            "8s",
            "8000ms",
        ),
        (
            "INBOUND_DETECT_TIMEOUT",
            "",
            "disableInboundProtocolDetectTimeout: true",
            "365d",
            "proxy-disable-inbound-protocol-detect-timeout",
            "false",
            "",
        ),
        (
            "OUTBOUND_DETECT_TIMEOUT",
            "",
            "disableOutboundProtocolDetectTimeout: true",
            "365d",
            "proxy-disable-outbound-protocol-detect-timeout",
            "0",
            "",
        ),
        (
            "SHUTDOWN_ENDPOINT_ENABLED",
            "false",
            "enableShutdownEndpoint: true",
            "true",
            "proxy-admin-shutdown",
            "disabled",
            "false",
        ),
        ("SHUTDOWN_GRACE_PERIOD", "", "shutdownGracePeriod: 30s", "30s", "shutdown-grace-period", "1m", "60000ms"),
        (
            "DESTINATION_PROFILE_SUFFIXES",
            "svc.mesh.example.",
            "enableExternalProfiles: true",
            ".",
            "enable-external-profiles",
            "F",
            "svc.mesh.example.",
        ),
        ("ACCESS_LOG", "", "accessLog: json", "json", "access-log", "apache", "apache"),
        (
            "OUTBOUND_METRICS_HOSTNAME_LABELS",
            "",
            "metrics: {hostnameLabels: true}",
            "true",
            "proxy-metrics-hostname-labels",
            "false",
            "",
        ),
        (
            "LOG",
            "l,[{headers}]=off,[{request}]=off",
            "logHTTPHeaders: insecure",
            "l",
            "proxy-log-http-headers",
            "off",
            "l,[{headers}]=off,[{request}]=off",
        ),
        ("CORES_MIN", "1", "runtime: {workers: {minimum: 2}}", "2", "proxy-cpu-request", "2500m", "3"),
        ("CORES_MAX", "", "runtime: {workers: {maximum: 2}}", "2", "proxy-cpu-limit", "100m", "1"),
        (
            "CORES_MAX_RATIO",
            "",
            "runtime: {workers: {maximumCPURatio: 0.5}}",
            "0.5",
            "proxy-cpu-ratio-limit",
            "0.25",
            "0.25",
        ),
    ] {
        let annotations = json!({format!("config.linkerd.io/{annotation}"): value});
        let found = |values: &str, annotations: Value| {
            env_of(&proxy_values(&format!("logLevel: l, {values}")), annotations).remove(variable).unwrap_or_default()
        };
        assert_eq!(found("", json!({})), default, "{variable} without either");
        assert_eq!(found(values, json!({})), from_values, "{variable} from {values}");
        assert_eq!(found(values, annotations), from_annotation, "{variable} from {annotation}: {value}");
    }
}

#[test]
fn an_annotated_image_has_the_meshs_version_unless_it_names_its_own() {
    for (image, version, expected) in [
        ("", "", "p:1.2.3"),
        ("a/b", "", "a/b:1.2.3"),
        ("r:5000/a/b", "", "r:5000/a/b:1.2.3"),
        ("a/b:9", "", "a/b:9"),
        ("a/b@sha256:ab", "", "a/b@sha256:ab"),
        ("a/b:9@sha256:ab", "", "a/b:9@sha256:ab"),
        ("", "v2", "p:v2"),
        ("a/b", "v2", "a/b:v2"),
        ("a/b:9", "v2", "a/b:v2"),
        ("a/b", "sha256:ab", "a/b@sha256:ab"),
    ] {
        let annotations = json!({"config.linkerd.io/proxy-image": image, "config.linkerd.io/proxy-version": version});
        let pod = injected_with("{proxy: {image: {name: p, version: 1.2.3}}}", annotations, json!({}));
        assert_eq!(proxy(&pod).image.as_deref(), Some(expected), "{image:?} and {version:?}");
    }
}

#[test]
fn values_without_an_annotation_become_variables() {
    for (values, variable, expected) in [
        ("", "CORES", None),
        ("cores: 3", "CORES", Some("3")),
        ("cores: 3", "CORES_MIN", Some("3")),
        ("runtime: {workers: {minimum: 0}}", "CORES_MIN", None),
        ("resources: {cpu: {request: 1500m, limit: 2500m}}", "CORES_MIN", Some("2")),
        ("resources: {cpu: {request: 1500m, limit: 2500m}}", "CORES_MAX", Some("3")),
        ("resources: {cpu: {request: 100m}}, runtime: {workers: {minimum: 4}}", "CORES_MIN", Some("4")),
        ("resources: {cpu: {limit: 8}}, runtime: {workers: {maximum: 4}}", "CORES_MAX", Some("4")),
        ("resources: {cpu: {request: 8}}", "CORES_MAX", None),
        ("", "INBOUND_PORTS_REQUIRE_TLS", None),
        ("runtime: {workers: {maximumCPURatio: '0.5'}}", "CORES_MAX_RATIO", Some("0.5")),
        ("runtime: {workers: {maximumCPURatio: 1}}", "CORES_MAX_RATIO", Some("1")),
        ("runtime: {workers: {maximumCPURatio: null}}", "CORES_MAX_RATIO", None),
        ("requireTLSOnInboundPorts: 8080", "INBOUND_PORTS_REQUIRE_TLS", Some("8080")),
        ("requireTLSOnInboundPorts: '8080,9000-9001'", "INBOUND_PORTS_REQUIRE_TLS", Some("8080,9000-9001")),
        ("", "CONTROL_STREAM_LIFETIME", Some("1h")),
        ("control: {streams: {lifetime: 2h}}", "CONTROL_STREAM_LIFETIME", Some("2h")),
        ("control: {streams: {lifetime: 2h}}", "CONTROL_STREAM_IDLE_TIMEOUT", Some("")),
        ("", "INBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", Some("10s")),
        (
            "inbound: {server: {http2: {maxConcurrentStreams: 9}}}",
            "INBOUND_SERVER_HTTP2_MAX_CONCURRENT_STREAMS",
            Some("9"),
        ),
        ("outbound: {server: {http2: {keepAliveTimeout: 4s}}}", "OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", Some("4s")),
        ("additionalEnv: [{name: A, value: a}], experimentalEnv: [{name: A, value: e}]", "A", Some("e")),
    ] {
        assert_eq!(env_of(&proxy_values(values), json!({})).get(variable).map(String::as_str), expected, "{values}");
    }
}

#[test]
fn unanswered_ports_are_denied_by_a_value_that_no_variable_undoes() {
    const VARIABLE: &str = "WEFT_PROXY_INBOUND_POLICY_UNANSWERED";
    let undo =
        json!({"config.linkerd.io/proxy-additional-env": format!(r#"[{{"name": "{VARIABLE}", "value": "default"}}]"#)});
    let found = |values: &str| env_of(&proxy_values(values), undo.clone()).remove(VARIABLE);
    assert_eq!(found("denyUnansweredPorts: false").as_deref(), Some("default"));
    assert_eq!(found("denyUnansweredPorts: true").as_deref(), Some("deny"));
}

#[test]
fn bad_values_are_named() {
    for (values, path) in [
        ("inboundConnectTimeout: soon", "proxy.inboundConnectTimeout"),
        ("shutdownGracePeriod: -1s", "proxy.shutdownGracePeriod"),
        ("control: {streams: {idleTimeout: 5}}", "proxy.control.streams.idleTimeout"),
        ("requireTLSOnInboundPorts: all", "proxy.requireTLSOnInboundPorts"),
        ("requireIdentityOnInboundPorts: all", "proxy.requireIdentityOnInboundPorts"),
        ("runtime: {workers: {maximumCPURatio: 1.5}}", "proxy.runtime.workers.maximumCPURatio"),
        ("logHTTPHeaders: 'on'", "proxy.logHTTPHeaders"),
        ("accessLog: nginx", "proxy.accessLog"),
        ("tracing: {enabled: true}", "proxy.tracing.collector.endpoint"),
        ("tracing: {enabled: true, collector: {endpoint: otel}}", "proxy.tracing.collector.endpoint"),
        ("tracing: {enabled: true, collector: {endpoint: 'http://otel:4317'}}", "proxy.tracing.collector.endpoint"),
        ("tracing: {enabled: true, collector: {endpoint: 'otel:4317'}}", "proxy.tracing.collector.meshIdentity"),
        (
            "tracing: {enabled: true, collector: {endpoint: 'localhost.obs:4317'}}",
            "proxy.tracing.collector.meshIdentity",
        ),
    ] {
        let values = Values::parse(&proxy_values(values)).unwrap();
        assert_eq!(values.inject_config("linkerd", "anchors").unwrap_err().field.to_string(), path);
    }
    let policy = "{proxy: {image: {name: p, version: v}}, debugContainer: {image: {pullPolicy: Often}}}";
    let error = Values::parse(policy).unwrap().inject_config("linkerd", "anchors").unwrap_err();
    assert_eq!(error.field.to_string(), "debugContainer.image.pullPolicy");
}

#[test]
fn probes_have_the_timing_of_the_values() {
    let proxy = |values: &str| {
        let pod = injected_with(&proxy_values(values), json!({}), json!({}));
        serde_json::to_value(&pod.spec.unwrap().init_containers.unwrap()[0]).unwrap()
    };
    let timing = |values: &str, probe: &str| {
        let mut found = proxy(values)[probe].clone();
        found.as_object_mut().unwrap().remove("httpGet").unwrap();
        found
    };
    for (values, probe, expected) in [
        ("", "livenessProbe", json!({"initialDelaySeconds": 10})),
        // The kubelet skips the probe that follows the startup probe where there is a delay.
        ("", "readinessProbe", json!({})),
        ("", "startupProbe", json!({"periodSeconds": 1, "failureThreshold": 120})),
        (
            "livenessProbe: {initialDelaySeconds: 0, timeoutSeconds: 5}",
            "livenessProbe",
            json!({"initialDelaySeconds": 0, "timeoutSeconds": 5}),
        ),
        (
            "readinessProbe: {periodSeconds: 3, successThreshold: 2}",
            "readinessProbe",
            json!({"periodSeconds": 3, "successThreshold": 2}),
        ),
        ("startupProbe: {failureThreshold: 9}", "startupProbe", json!({"failureThreshold": 9})),
    ] {
        assert_eq!(timing(values, probe), expected, "{values}");
    }
    let error = Values::parse(&proxy_values("livenessProbe: {timeoutSeconds: -1}")).unwrap_err();
    assert_eq!(error.field.to_string(), "proxy.livenessProbe.timeoutSeconds");
}

/// The policy controller reads the pod's annotation, and nothing else.
#[test]
fn ports_that_require_an_identity_become_an_annotation_of_the_pod() {
    let annotation = |ports: &str| json!({labels::REQUIRE_IDENTITY_PORTS: ports});
    let values = "requireIdentityOnInboundPorts: '9,10-11'";
    for (values, of_pod, of_namespace, expected) in [
        ("", json!({}), json!({}), None),
        (values, json!({}), json!({}), Some("9-11")),
        ("requireIdentityOnInboundPorts: 9", json!({}), json!({}), Some("9")),
        (values, annotation("7"), json!({}), Some("7")),
        (values, json!({}), annotation("8"), Some("8")),
    ] {
        let config = Values::parse(&proxy_values(values)).unwrap().inject_config("linkerd", "anchors").unwrap();
        let mut of_namespace = of_namespace;
        of_namespace["linkerd.io/inject"] = json!("enabled");
        let decision = inject(&pod(of_pod, json!({})), Some(&namespace(of_namespace)), &config).unwrap();
        let Decision::Injected(injected) = decision else { panic!("{decision:?}") };
        let found = injected.metadata.annotations.unwrap().get(labels::REQUIRE_IDENTITY_PORTS).cloned();
        assert_eq!(found.as_deref(), expected, "{values}");
    }
}

#[test]
fn unreadable_tuning_leaves_the_values_in_force() {
    let values = proxy_values("inboundConnectTimeout: 7s, enableShutdownEndpoint: true, waitBeforeExitSeconds: 5");
    let plain = injected_with(&values, json!({}), json!({}));
    for (annotation, value) in [
        ("config.linkerd.io/proxy-inbound-connect-timeout", "soon"),
        ("config.linkerd.io/proxy-admin-shutdown", "false"),
        ("config.linkerd.io/proxy-cpu-ratio-limit", "2"),
        ("config.linkerd.io/proxy-log-http-headers", "on"),
        ("config.linkerd.io/proxy-metrics-hostname-labels", "yes"),
        ("config.linkerd.io/enable-gateway", "yes"),
        ("config.linkerd.io/enable-debug-sidecar", "yes"),
        ("config.linkerd.io/debug-image-pull-policy", "Often"),
        ("config.linkerd.io/proxy-await", "disabled"),
        ("config.alpha.linkerd.io/proxy-wait-before-exit-seconds", "10s"),
    ] {
        let pod = injected_with(&values, json!({annotation: value}), json!({}));
        assert_eq!(pod.spec, plain.spec, "{annotation}");
        let ignored = ignored_annotations(&pod.metadata);
        assert_eq!(ignored.len(), 1, "{annotation}: {ignored:?}");
        assert_eq!(ignored[0].field, FieldPath::annotation(annotation));
    }
}

#[test]
fn a_gateway_forwards_to_the_clusters_services_and_only_the_pod_itself_can_be_one() {
    let gateway = json!({"linkerd.io/inject": "enabled", "config.linkerd.io/enable-gateway": "true"});
    let own = env(&injected(&pod(gateway.clone(), json!({})), None));
    assert_eq!(own["LINKERD2_PROXY_INBOUND_GATEWAY_SUFFIXES"], "svc.cluster.local.");
    let inherited = env(&injected(&pod(json!({}), json!({})), Some(&namespace(gateway))));
    assert!(!inherited.contains_key("LINKERD2_PROXY_INBOUND_GATEWAY_SUFFIXES"));
}

#[test]
fn the_proxy_waits_before_it_exits_no_longer_than_its_pod_may() {
    let sleep = |values: &str, annotations: Value, spec: Value| {
        let pod = injected_with(&proxy_values(values), annotations, spec);
        let hook = proxy(&pod).lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.clone());
        hook.map(|hook| hook.sleep.unwrap().seconds)
    };
    let annotated = |seconds: &str| json!({"config.alpha.linkerd.io/proxy-wait-before-exit-seconds": seconds});
    let (none, wait) = (json!({}), "waitBeforeExitSeconds: 7");
    assert_eq!(sleep("", none.clone(), none.clone()), None);
    assert_eq!(sleep(wait, none.clone(), none.clone()), Some(7));
    assert_eq!(sleep(wait, annotated("9"), none.clone()), Some(9));
    assert_eq!(sleep(wait, annotated("0"), none.clone()), None);
    assert_eq!(sleep("", annotated("40"), none.clone()), Some(30), "Kubernetes' default");
    assert_eq!(sleep("", annotated("40"), json!({"terminationGracePeriodSeconds": 60})), Some(40));
    assert_eq!(sleep("", annotated("40"), json!({"terminationGracePeriodSeconds": 0})), None);
}

#[test]
fn the_debug_container_is_added_on_request() {
    let debug = |values: &str, annotations: Value| {
        let pod = injected_with(values, annotations, json!({}));
        let containers = pod.spec.unwrap().containers;
        assert_eq!(containers[0].name, "app");
        containers.into_iter().find(|container| container.name == "linkerd-debug")
    };
    let values = proxy_values("logLevel: l");
    let on = |more: Value| {
        let mut annotations = json!({"config.linkerd.io/enable-debug-sidecar": "true"});
        annotations.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        annotations
    };
    assert!(debug(&values, json!({})).is_none());
    assert!(debug(&values, json!({"config.linkerd.io/debug-image": "x"})).is_none());
    let container = debug(&values, on(json!({}))).unwrap();
    assert!(container.image.unwrap().starts_with("cr.l5d.io/linkerd/debug:"));
    assert_eq!(container.image_pull_policy.as_deref(), Some("IfNotPresent"));
    let own = json!({"config.linkerd.io/debug-image": "x", "config.linkerd.io/debug-image-version": "sha256:ab",
        "config.linkerd.io/debug-image-pull-policy": "Always"});
    let container = debug(&values, on(own.clone())).unwrap();
    assert_eq!(
        (container.image.as_deref(), container.image_pull_policy.as_deref()),
        (Some("x@sha256:ab"), Some("Always"))
    );
    let values =
        "{proxy: {image: {name: p, version: v}}, debugContainer: {image: {name: d, version: 1, pullPolicy: Never}}}";
    let container = debug(values, on(json!({}))).unwrap();
    assert_eq!((container.image.as_deref(), container.image_pull_policy.as_deref()), (Some("d:1"), Some("Never")));
    // Where there are no images.
    let mut config = config();
    config.tuning.debug = None;
    let asks =
        pod(json!({"linkerd.io/inject": "enabled", "config.linkerd.io/enable-debug-sidecar": "true"}), json!({}));
    let Ok(Decision::Injected(without)) = inject(&asks, None, &config) else { panic!("not injected") };
    assert_eq!(without.spec.unwrap().containers.len(), 1);
    // The namespace may ask for the container, and not choose its image.
    let mut ns = on(own);
    ns["linkerd.io/inject"] = json!("enabled");
    let pod = injected(&pod(json!({}), json!({})), Some(&namespace(ns)));
    assert!(pod.spec.unwrap().containers[1].image.as_deref().unwrap().starts_with("cr.l5d.io/linkerd/debug:"));
}

#[test]
fn traces_go_to_the_collector_with_the_attributes_of_all_levels() {
    let on = "tracing: {enabled: true, labels: {team: a, zone: z}, collector: {endpoint: 'otel.obs:4317', meshIdentity: \
              {serviceAccountName: otel, namespace: obs}}}";
    let attributes = json!({"resource.opentelemetry.io/team": "b", "resource.opentelemetry.io/two": "x\n y"});
    let pod = injected_with(&proxy_values(on), attributes.clone(), json!({}));
    let variables = env(&pod);
    for (name, expected) in [
        ("ATTRIBUTES_PATH", "/var/run/linkerd/podinfo/labels"),
        ("COLLECTOR_SVC_ADDR", "otel.obs:4317"),
        ("COLLECTOR_SVC_NAME", "otel.obs.serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)"),
        ("SERVICE_NAME", "linkerd-proxy"),
        (
            "EXTRA_ATTRIBUTES",
            "k8s.container.name=$(_pod_containerName)\nk8s.pod.ip=$(_pod_ip)\nk8s.pod.uid=$(_pod_uid)\nteam=b\ntwo=x y\nzone=z\n",
        ),
    ] {
        assert_eq!(variables[&format!("LINKERD2_PROXY_TRACE_{name}")], expected, "{name}");
    }
    let volumes = pod.spec.as_ref().unwrap().volumes.iter().flatten();
    assert!(volumes.clone().any(|volume| volume.name == "linkerd-podinfo" && volume.downward_api.is_some()));
    let mounts = proxy(&pod).volume_mounts.iter().flatten();
    assert!(
        mounts.clone().any(|mount| mount.name == "linkerd-podinfo" && mount.mount_path == "/var/run/linkerd/podinfo")
    );
    // The namespace's attributes count less than the pod's.
    let config = Values::parse(&proxy_values(on)).unwrap().inject_config("linkerd", "anchors").unwrap();
    let own = super::pod(json!({"resource.opentelemetry.io/team": "c"}), json!({}));
    let mut ns = attributes.clone();
    ns["linkerd.io/inject"] = json!("enabled");
    let Ok(Decision::Injected(pod)) = inject(&own, Some(&namespace(ns)), &config) else { panic!("not injected") };
    let lines = env(&pod)["LINKERD2_PROXY_TRACE_EXTRA_ATTRIBUTES"].clone();
    assert!(lines.contains("team=c\n") && lines.contains("two=x y\n"), "{lines}");

    for own in ["localhost.:4317", "127.0.0.1:4317", "[::1]:4317"] {
        let pod = injected_with(
            &proxy_values(&format!("tracing: {{enabled: true, collector: {{endpoint: '{own}'}}}}")),
            json!({}),
            json!({}),
        );
        assert_eq!(env(&pod)["LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR"], own);
        assert!(!env(&pod).contains_key("LINKERD2_PROXY_TRACE_COLLECTOR_SVC_NAME"));
    }
    let off = injected_with(&proxy_values("tracing: {collector: {endpoint: 'otel.obs:4317'}}"), attributes, json!({}));
    assert!(env(&off).keys().all(|name| !name.contains("TRACE_")));
    assert_eq!(off.spec.as_ref().unwrap().volumes.iter().flatten().count(), 2);
}

#[test]
fn tap_is_served_to_the_client_of_the_values_unless_the_pod_or_its_namespace_disables_it() {
    let values = proxy_values("tap: {serviceAccountName: viz, namespace: observe}");
    let client = "viz.observe.serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)";
    let tap = |values: &str, annotations: Value| env_of(values, annotations).remove("TAP_SVC_NAME");
    assert_eq!(tap(&values, json!({})).as_deref(), Some(client));
    assert_eq!(tap(&proxy_values("tap: {serviceAccountName: '', namespace: observe}"), json!({})), None);
    assert_eq!(tap(&proxy_values("tap: {serviceAccountName: viz}"), json!({})), None);
    assert_eq!(tap(&proxy_values("gid: -1"), json!({})), None);
    for (own, inherited, served) in [
        (Some("true"), None, false),
        (Some("false"), None, true),
        (Some("yes"), None, false),
        (None, Some("true"), false),
        // As with Linkerd's injector, a pod cannot undo what its namespace says.
        (Some("false"), Some("true"), false),
        (None, Some("false"), true),
    ] {
        let annotation = |value: Option<&str>| value.map_or(json!({}), |value| json!({labels::DISABLE_TAP: value}));
        let mut annotations = annotation(own);
        annotations["linkerd.io/inject"] = json!("enabled");
        let namespace = serde_json::from_value(json!({"metadata": {"annotations": annotation(inherited)}})).unwrap();
        let config = Values::parse(&values).unwrap().inject_config("linkerd", "anchors").unwrap();
        let decision = inject(&pod(annotations, json!({})), Some(&namespace), &config).unwrap();
        let Decision::Injected(pod) = decision else { panic!("{own:?} {inherited:?}: skipped") };
        assert_eq!(env(&pod).contains_key("LINKERD2_PROXY_TAP_SVC_NAME"), served, "{own:?} {inherited:?}");
    }
    let unreadable = pod(json!({labels::DISABLE_TAP: "yes"}), json!({}));
    assert_eq!(ignored_annotations(&unreadable.metadata).len(), 1);
}
