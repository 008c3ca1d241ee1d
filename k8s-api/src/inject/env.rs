//! The proxy's environment, in the order of Linkerd's template: a value may refer to earlier variables as `$(NAME)`.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector};

use super::{annotations::Settings, config::InjectConfig};
use crate::{duration::ProxyDuration, labels, ports::PortSet, quantity::whole_cores};

/// Directory of the proxy's key and signing request.
pub(super) const IDENTITY_DIR: &str = "/var/run/linkerd/identity/end-entity";
/// Where the projected token is mounted.
pub(super) const TOKEN_DIR: &str = "/var/run/secrets/tokens";
/// Name of the projected token's file.
pub(super) const TOKEN_FILE: &str = "linkerd-identity-token";

/// Where the pod's labels are mounted, for traces.
pub(super) const POD_INFO_DIR: &str = "/var/run/linkerd/podinfo";

/// Keeps the proxy unready until the kernel attests that both directions are redirected.
const REQUIRE_REDIRECT: &str = "WEFT_PROXY_REQUIRE_REDIRECT";
/// What the policy of a port is about which the policy controller has not answered in time.
const UNANSWERED: &str = "WEFT_PROXY_INBOUND_POLICY_UNANSWERED";
/// Makes the proxy refuse connections that would be plaintext.
const REQUIRE_MTLS: &str = "WEFT_PROXY_REQUIRE_MTLS";

/// Detection without a timeout is a timeout of a year, as in Linkerd's template.
const NO_TIMEOUT: &str = "365d";

/// Ports of a pod that the environment contains.
pub(super) struct PodPorts {
    /// Ports of the containers and of their probes.
    pub(super) inbound: PortSet,
    /// Opaque ports, not only the pod's own.
    pub(super) opaque: PortSet,
}

/// Collects variables in order.
struct Env(Vec<EnvVar>);

impl Env {
    fn raw(&mut self, name: &str, value: impl Into<String>) {
        self.0.push(EnvVar { name: name.to_owned(), value: Some(value.into()), ..EnvVar::default() });
    }

    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.raw(&format!("LINKERD2_PROXY_{name}"), value);
    }

    fn field(&mut self, name: &str, path: &str) {
        let field_ref = ObjectFieldSelector { api_version: None, field_path: path.to_owned() };
        let value_from = Some(EnvVarSource { field_ref: Some(field_ref), ..EnvVarSource::default() });
        self.0.push(EnvVar { name: name.to_owned(), value: None, value_from });
    }
}

/// The proxy's environment in one pod; `inherited` are the settings of its namespace.
pub(super) fn env(
    config: &InjectConfig,
    settings: &Settings,
    inherited: &Settings,
    ports: &PodPorts,
    ingress: bool,
) -> Vec<EnvVar> {
    let mut env = Env(Vec::new());
    env.field("_pod_name", "metadata.name");
    env.field("_pod_ns", "metadata.namespace");
    env.field("_pod_uid", "metadata.uid");
    env.field("_pod_ip", "status.podIP");
    env.field("_pod_nodeName", "spec.nodeName");
    env.raw("_pod_containerName", labels::PROXY_CONTAINER);
    workers(&mut env, config, settings);
    if let Some(ports) = &settings.require_identity_ports {
        env.set("INBOUND_PORTS_REQUIRE_IDENTITY", ports);
    }
    if !config.tuning.require_tls_ports.is_empty() {
        env.set("INBOUND_PORTS_REQUIRE_TLS", config.tuning.require_tls_ports.to_string());
    }
    telemetry(&mut env, config, settings);
    control_plane(&mut env, config, settings);
    timeouts(&mut env, config, settings);
    listeners(&mut env, config, settings, ports, ingress);
    identity(&mut env, config);
    if !settings.disable_tap && !inherited.disable_tap {
        tap(&mut env, config);
    }
    tracing(&mut env, config, [&inherited.trace_attributes, &settings.trace_attributes]);
    let lists = [&config.extra_env, &inherited.additional_env, &settings.additional_env];
    env.0.extend(merged(lists.into_iter().chain([&config.tuning.experimental_env])));
    if config.require_redirect {
        // After everything that a pod may add: no pod can opt out of noticing that the mesh is bypassed.
        env.raw(REQUIRE_REDIRECT, "true");
    }
    if config.tuning.deny_unanswered_ports {
        env.raw(UNANSWERED, "deny");
    }
    if settings.require_mtls {
        env.raw(REQUIRE_MTLS, "true");
    }
    env.0
}

/// Merges lists: a variable of a later list replaces one of the same name (`linkerd2:pkg/inject/inject.go`,
/// MergeAdditionalEnv).
fn merged<'a>(lists: impl Iterator<Item = &'a Vec<EnvVar>>) -> Vec<EnvVar> {
    let mut all: Vec<EnvVar> = Vec::new();
    for variable in lists.flatten() {
        match all.iter_mut().find(|known| known.name == variable.name) {
            Some(known) => known.clone_from(variable),
            None => all.push(variable.clone()),
        }
    }
    all
}

/// Numbers of worker threads. Proxies read either the older `CORES` or `CORES_MIN`.
///
/// An annotated request or limit of CPU is the least or the most of them. One of the chart's values is so too, as
/// Linkerd's documentation says ("Configuring Proxy Concurrency"), but neither lowers the least nor replaces the most
/// that `proxy.runtime.workers` sets.
fn workers(env: &mut Env, config: &InjectConfig, settings: &Settings) {
    let workers = config.tuning.workers;
    let (least, most) = settings.worker_bounds();
    let set = |number: u32| Some(number).filter(|number| *number > 0);
    let of_value = |quantity: &Option<String>| quantity.as_deref().and_then(whole_cores);
    let of_request = of_value(&config.resources.cpu_request).unwrap_or_default();
    if let Some(cores) = set(workers.cores) {
        env.set("CORES", cores.to_string());
    }
    if let Some(least) = least.or(set(workers.minimum.max(workers.cores).max(of_request))) {
        env.set("CORES_MIN", least.to_string());
    }
    if let Some(most) = most.or(set(workers.maximum)).or_else(|| of_value(&config.resources.cpu_limit)) {
        env.set("CORES_MAX", most.to_string());
    }
    if let Some(ratio) = settings.cpu_ratio.or(Some(workers.maximum_cpu_ratio).filter(|ratio| *ratio > 0.0)) {
        env.set("CORES_MAX_RATIO", ratio.to_string());
    }
}

fn telemetry(env: &mut Env, config: &InjectConfig, settings: &Settings) {
    let tuning = &config.tuning;
    env.set("SHUTDOWN_ENDPOINT_ENABLED", settings.admin_shutdown.unwrap_or(tuning.shutdown_endpoint).to_string());
    // Headers may contain secrets, so their spans stay off at any level.
    let headers = settings.log_http_headers.unwrap_or(tuning.log_http_headers);
    let off = if headers { "" } else { ",[{headers}]=off,[{request}]=off" };
    env.set("LOG", format!("{}{off}", settings.log_level.as_ref().unwrap_or(&config.log_level)));
    env.set("LOG_FORMAT", settings.log_format.as_ref().unwrap_or(&config.log_format));
    if let Some(format) = settings.access_log.as_ref().or(tuning.access_log.as_ref()) {
        env.set("ACCESS_LOG", format);
    }
    if let Some(period) = settings.grace_period.map(ProxyDuration::from).or_else(|| tuning.grace_period.clone()) {
        env.set("SHUTDOWN_GRACE_PERIOD", period.to_string());
    }
    if settings.hostname_labels.unwrap_or(tuning.hostname_labels) {
        env.set("OUTBOUND_METRICS_HOSTNAME_LABELS", "true");
    }
}

fn control_plane(env: &mut Env, config: &InjectConfig, settings: &Settings) {
    let networks = config.cluster_networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    env.set("DESTINATION_SVC_ADDR", &config.control_plane.destination.addr);
    env.set("DESTINATION_PROFILE_NETWORKS", &networks);
    env.set("POLICY_SVC_ADDR", &config.control_plane.policy.addr);
    env.set("POLICY_WORKLOAD", r#"{"ns":"$(_pod_ns)", "pod":"$(_pod_name)"}"#);
    env.set("INBOUND_DEFAULT_POLICY", settings.default_policy.unwrap_or(config.default_inbound_policy).label());
    env.set("POLICY_CLUSTER_NETWORKS", &networks);
    let streams = &config.tuning.control_streams;
    for (name, limit) in
        [("INITIAL_TIMEOUT", &streams.initial), ("IDLE_TIMEOUT", &streams.idle), ("LIFETIME", &streams.lifetime)]
    {
        env.set(&format!("CONTROL_STREAM_{name}"), limit.as_ref().map(ToString::to_string).unwrap_or_default());
    }
}

fn timeouts(env: &mut Env, config: &InjectConfig, settings: &Settings) {
    let tuning = &config.tuning;
    let or = |own: Option<Duration>, default: &ProxyDuration| {
        own.map_or_else(|| default.clone(), ProxyDuration::from).to_string()
    };
    let (connect, cache) = (&tuning.connect_timeout, &tuning.cache_timeout);
    env.set("INBOUND_CONNECT_TIMEOUT", or(settings.inbound_connect_timeout, &connect.inbound));
    env.set("OUTBOUND_CONNECT_TIMEOUT", or(settings.outbound_connect_timeout, &connect.outbound));
    env.set("OUTBOUND_DISCOVERY_IDLE_TIMEOUT", or(settings.outbound_cache_timeout, &cache.outbound));
    env.set("INBOUND_DISCOVERY_IDLE_TIMEOUT", or(settings.inbound_cache_timeout, &cache.inbound));
    if settings.no_outbound_detect_timeout.unwrap_or(tuning.no_detect_timeout.outbound) {
        env.set("OUTBOUND_DETECT_TIMEOUT", NO_TIMEOUT);
    }
    if settings.no_inbound_detect_timeout.unwrap_or(tuning.no_detect_timeout.inbound) {
        env.set("INBOUND_DETECT_TIMEOUT", NO_TIMEOUT);
    }
}

fn listeners(env: &mut Env, config: &InjectConfig, settings: &Settings, ports: &PodPorts, ingress: bool) {
    let any = if config.ipv6 { "[::]" } else { "0.0.0.0" };
    let outbound = settings.outbound_port.unwrap_or(config.ports.outbound);
    env.set("CONTROL_LISTEN_ADDR", format!("{any}:{}", settings.control_port.unwrap_or(config.ports.control)));
    env.set("ADMIN_LISTEN_ADDR", format!("{any}:{}", settings.admin_port.unwrap_or(config.ports.admin)));
    env.set("OUTBOUND_LISTEN_ADDR", format!("127.0.0.1:{outbound}"));
    let v6 = if config.ipv6 { format!(",[::1]:{outbound}") } else { String::new() };
    env.set("OUTBOUND_LISTEN_ADDRS", format!("127.0.0.1:{outbound}{v6}"));
    env.set("INBOUND_LISTEN_ADDR", format!("{any}:{}", settings.inbound_port.unwrap_or(config.ports.inbound)));
    env.field("LINKERD2_PROXY_INBOUND_IPS", "status.podIPs");
    let inbound: Vec<_> =
        settings.inbound_ports.as_ref().unwrap_or(&ports.inbound).iter().map(|port| port.to_string()).collect();
    env.set("INBOUND_PORTS", inbound.join(","));
    if ingress {
        env.set("INGRESS_MODE", "true");
    }
    let cluster = format!("svc.{}.", config.cluster_domain);
    if settings.gateway {
        env.set("INBOUND_GATEWAY_SUFFIXES", &cluster);
    }
    let every_name = settings.external_profiles.unwrap_or(config.tuning.external_profiles);
    env.set("DESTINATION_PROFILE_SUFFIXES", if every_name { "." } else { &cluster });
    env.set("INBOUND_ACCEPT_KEEPALIVE", "10000ms");
    env.set("OUTBOUND_CONNECT_KEEPALIVE", "10000ms");
    env.set("INBOUND_ACCEPT_USER_TIMEOUT", "30s");
    env.set("OUTBOUND_CONNECT_USER_TIMEOUT", "30s");
    let http2 = &config.tuning.http2;
    for (side, parameters) in [("INBOUND", &http2.inbound), ("OUTBOUND", &http2.outbound)] {
        for (name, value) in parameters {
            env.set(&format!("{side}_SERVER_HTTP2_{}", upper_snake(name)), value);
        }
    }
    env.set("INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION", ports.opaque.to_string());
}

fn identity(env: &mut Env, config: &InjectConfig) {
    env.set("DESTINATION_CONTEXT", r#"{"ns":"$(_pod_ns)", "nodeName":"$(_pod_nodeName)", "pod":"$(_pod_name)"}"#);
    env.field("_pod_sa", "spec.serviceAccountName");
    env.raw("_l5d_ns", &config.control_plane_namespace);
    env.raw("_l5d_trustdomain", &config.trust_domain);
    env.set("IDENTITY_DIR", IDENTITY_DIR);
    env.set("IDENTITY_TRUST_ANCHORS", &config.trust_anchors_pem);
    env.set("IDENTITY_TOKEN_FILE", format!("{TOKEN_DIR}/{TOKEN_FILE}"));
    env.set("IDENTITY_SVC_ADDR", &config.control_plane.identity.addr);
    env.set("IDENTITY_LOCAL_NAME", "$(_pod_sa).$(_pod_ns).serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)");
    env.set("IDENTITY_SVC_NAME", &config.control_plane.identity.name);
    env.set("DESTINATION_SVC_NAME", &config.control_plane.destination.name);
    env.set("POLICY_SVC_NAME", &config.control_plane.policy.name);
}

/// Who may tap. Linkerd's tap injector adds the variable once more where it is installed, and the kubelet uses the last
/// one: its tap works then, and Weft's does not reach that pod.
fn tap(env: &mut Env, config: &InjectConfig) {
    let Some(client) = &config.tap else { return };
    let (account, namespace) = (&client.service_account, &client.namespace);
    env.set("TAP_SVC_NAME", format!("{account}.{namespace}.serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)"));
}

/// Where traces go, and their attributes; later maps take precedence.
fn tracing(env: &mut Env, config: &InjectConfig, annotated: [&BTreeMap<String, String>; 2]) {
    let Some(tracing) = &config.tuning.tracing else { return };
    env.set("TRACE_ATTRIBUTES_PATH", format!("{POD_INFO_DIR}/labels"));
    env.set("TRACE_COLLECTOR_SVC_ADDR", &tracing.collector);
    if let Some((account, namespace)) = &tracing.identity {
        env.set(
            "TRACE_COLLECTOR_SVC_NAME",
            format!("{account}.{namespace}.serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)"),
        );
    }
    env.set("TRACE_SERVICE_NAME", &tracing.service_name);
    let own =
        [("k8s.pod.ip", "$(_pod_ip)"), ("k8s.pod.uid", "$(_pod_uid)"), ("k8s.container.name", "$(_pod_containerName)")];
    let mut attributes: BTreeMap<&str, &str> = own.into();
    for (name, value) in [&tracing.attributes].into_iter().chain(annotated).flatten() {
        attributes.insert(name, value);
    }
    let mut lines = String::new();
    for (name, value) in attributes {
        let _ = writeln!(lines, "{name}={value}");
    }
    env.set("TRACE_EXTRA_ATTRIBUTES", lines);
}

/// `keepAliveInterval` as `KEEP_ALIVE_INTERVAL`.
fn upper_snake(name: &str) -> String {
    let mut upper = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !upper.is_empty() {
            upper.push('_');
        }
        upper.push(c.to_ascii_uppercase());
    }
    upper
}
