//! The proxy's environment, in the order of Linkerd's template: a value may refer to earlier variables as `$(NAME)`.

use std::time::Duration;

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector};

use super::{annotations::Settings, config::InjectConfig};
use crate::{labels, ports::PortSet};

/// Directory of the proxy's key and signing request.
pub(super) const IDENTITY_DIR: &str = "/var/run/linkerd/identity/end-entity";
/// Where the projected token is mounted.
pub(super) const TOKEN_DIR: &str = "/var/run/secrets/tokens";
/// Name of the projected token's file.
pub(super) const TOKEN_FILE: &str = "linkerd-identity-token";

/// Keeps the proxy unready until the kernel attests that both directions are redirected.
const REQUIRE_REDIRECT: &str = "WEFT_PROXY_REQUIRE_REDIRECT";

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

/// The proxy's environment in one pod; `inherited` is added by the namespace.
pub(super) fn env(
    config: &InjectConfig,
    settings: &Settings,
    inherited: &[EnvVar],
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
    if let Some(ports) = &settings.require_identity_ports {
        env.set("INBOUND_PORTS_REQUIRE_IDENTITY", ports);
    }
    telemetry(&mut env, config, settings);
    control_plane(&mut env, config, settings);
    timeouts(&mut env, settings);
    listeners(&mut env, config, settings, ports, ingress);
    identity(&mut env, config);
    env.0.extend(merged([&config.extra_env, inherited, &settings.additional_env]));
    if config.require_redirect {
        // After everything that a pod may add: no pod can opt out of noticing that the mesh is bypassed.
        env.raw(REQUIRE_REDIRECT, "true");
    }
    env.0
}

/// Merges lists: a variable of a later list replaces one of the same name (`linkerd2:pkg/inject/inject.go`,
/// MergeAdditionalEnv).
fn merged(lists: [&[EnvVar]; 3]) -> Vec<EnvVar> {
    let mut all: Vec<EnvVar> = Vec::new();
    for variable in lists.into_iter().flatten() {
        match all.iter_mut().find(|known| known.name == variable.name) {
            Some(known) => known.clone_from(variable),
            None => all.push(variable.clone()),
        }
    }
    all
}

fn telemetry(env: &mut Env, config: &InjectConfig, settings: &Settings) {
    env.set("SHUTDOWN_ENDPOINT_ENABLED", settings.admin_shutdown.unwrap_or(false).to_string());
    // Headers may contain secrets, so their spans stay off at any level.
    let level = settings.log_level.as_ref().unwrap_or(&config.log_level);
    env.set("LOG", format!("{level},[{{headers}}]=off,[{{request}}]=off"));
    if let Some(ratio) = settings.cpu_ratio {
        env.set("CORES_MAX_RATIO", ratio.to_string());
    }
    env.set("LOG_FORMAT", settings.log_format.as_ref().unwrap_or(&config.log_format));
    if let Some(format) = &settings.access_log {
        env.set("ACCESS_LOG", format);
    }
    if let Some(period) = settings.grace_period {
        env.set("SHUTDOWN_GRACE_PERIOD", millis(period));
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
    env.set("CONTROL_STREAM_INITIAL_TIMEOUT", "3s");
    env.set("CONTROL_STREAM_IDLE_TIMEOUT", "5m");
    env.set("CONTROL_STREAM_LIFETIME", "1h");
}

fn timeouts(env: &mut Env, settings: &Settings) {
    let or = |value: Option<Duration>, default: &str| value.map_or_else(|| default.to_owned(), millis);
    env.set("INBOUND_CONNECT_TIMEOUT", or(settings.inbound_connect_timeout, "100ms"));
    env.set("OUTBOUND_CONNECT_TIMEOUT", or(settings.outbound_connect_timeout, "1000ms"));
    env.set("OUTBOUND_DISCOVERY_IDLE_TIMEOUT", or(settings.outbound_cache_timeout, "5s"));
    env.set("INBOUND_DISCOVERY_IDLE_TIMEOUT", or(settings.inbound_cache_timeout, "90s"));
    if settings.no_outbound_detect_timeout {
        env.set("OUTBOUND_DETECT_TIMEOUT", NO_TIMEOUT);
    }
    if settings.no_inbound_detect_timeout {
        env.set("INBOUND_DETECT_TIMEOUT", NO_TIMEOUT);
    }
}

/// The proxy's own syntax: one number and one unit.
fn millis(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
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
    let suffixes = if settings.external_profiles { ".".to_owned() } else { format!("svc.{}.", config.cluster_domain) };
    env.set("DESTINATION_PROFILE_SUFFIXES", suffixes);
    env.set("INBOUND_ACCEPT_KEEPALIVE", "10000ms");
    env.set("OUTBOUND_CONNECT_KEEPALIVE", "10000ms");
    env.set("INBOUND_ACCEPT_USER_TIMEOUT", "30s");
    env.set("OUTBOUND_CONNECT_USER_TIMEOUT", "30s");
    for side in ["INBOUND", "OUTBOUND"] {
        env.set(&format!("{side}_SERVER_HTTP2_KEEP_ALIVE_INTERVAL"), "10s");
        env.set(&format!("{side}_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT"), "3s");
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
