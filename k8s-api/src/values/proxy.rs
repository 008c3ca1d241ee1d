//! Values of the proxy, `proxy` in the chart.

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::api::core::v1::EnvVar;
use serde::Deserialize;

use super::{bad, list, missing, parse, pull_policy, text};
use crate::{
    duration::ProxyDuration,
    field::Invalid,
    inject::{ControlStreams, DebugImage, PerDirection, ProbeTiming, Probes, ProxyTuning, TapClient, Tracing, Workers},
};

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Proxy {
    pub(super) image: Image,
    #[serde(deserialize_with = "text")]
    pub(super) log_level: Option<String>,
    #[serde(deserialize_with = "text")]
    pub(super) log_format: Option<String>,
    pub(super) uid: Option<i64>,
    pub(super) gid: Option<i64>,
    #[serde(deserialize_with = "text")]
    pub(super) default_inbound_policy: Option<String>,
    #[serde(deserialize_with = "list")]
    pub(super) opaque_ports: Option<String>,
    pub(super) ports: Ports,
    pub(super) resources: Resources,
    pub(super) additional_env: Option<Vec<EnvVar>>,
    experimental_env: Option<Vec<EnvVar>>,
    cores: Option<u32>,
    runtime: Runtime,
    enable_shutdown_endpoint: Option<bool>,
    #[serde(deserialize_with = "text")]
    shutdown_grace_period: Option<String>,
    wait_before_exit_seconds: Option<u32>,
    #[serde(deserialize_with = "text")]
    inbound_connect_timeout: Option<String>,
    #[serde(deserialize_with = "text")]
    outbound_connect_timeout: Option<String>,
    #[serde(deserialize_with = "text")]
    inbound_discovery_cache_unused_timeout: Option<String>,
    #[serde(deserialize_with = "text")]
    outbound_discovery_cache_unused_timeout: Option<String>,
    disable_inbound_protocol_detect_timeout: Option<bool>,
    disable_outbound_protocol_detect_timeout: Option<bool>,
    #[serde(rename = "requireTLSOnInboundPorts", deserialize_with = "text")]
    require_tls_on_inbound_ports: Option<String>,
    #[serde(deserialize_with = "text")]
    require_identity_on_inbound_ports: Option<String>,
    deny_unanswered_ports: Option<bool>,
    liveness_probe: Option<Timing>,
    readiness_probe: Option<Timing>,
    startup_probe: Option<Timing>,
    enable_external_profiles: Option<bool>,
    #[serde(rename = "logHTTPHeaders", deserialize_with = "text")]
    log_http_headers: Option<String>,
    #[serde(deserialize_with = "text")]
    access_log: Option<String>,
    metrics: Metrics,
    tracing: TracingValues,
    tap: Account,
    control: Control,
    inbound: Side,
    outbound: Side,
}

/// Timing of a probe, as in Kubernetes.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Timing {
    initial_delay_seconds: Option<u16>,
    period_seconds: Option<u16>,
    timeout_seconds: Option<u16>,
    success_threshold: Option<u16>,
    failure_threshold: Option<u16>,
}

impl From<Timing> for ProbeTiming {
    fn from(timing: Timing) -> Self {
        Self {
            initial_delay_seconds: timing.initial_delay_seconds,
            period_seconds: timing.period_seconds,
            timeout_seconds: timing.timeout_seconds,
            success_threshold: timing.success_threshold,
            failure_threshold: timing.failure_threshold,
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Runtime {
    workers: WorkerValues,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct WorkerValues {
    minimum: Option<u32>,
    maximum: Option<u32>,
    /// `--set` makes a text of it.
    #[serde(rename = "maximumCPURatio", deserialize_with = "text")]
    maximum_cpu_ratio: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metrics {
    hostname_labels: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct TracingValues {
    enabled: Option<bool>,
    #[serde(deserialize_with = "text")]
    trace_service_name: Option<String>,
    labels: Option<BTreeMap<String, Scalar>>,
    collector: Collector,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Collector {
    #[serde(deserialize_with = "text")]
    endpoint: Option<String>,
    mesh_identity: Account,
}

/// A ServiceAccount.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Account {
    #[serde(deserialize_with = "text")]
    service_account_name: Option<String>,
    #[serde(deserialize_with = "text")]
    namespace: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Control {
    streams: Option<Streams>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Streams {
    #[serde(deserialize_with = "text")]
    initial_timeout: Option<String>,
    #[serde(deserialize_with = "text")]
    idle_timeout: Option<String>,
    #[serde(deserialize_with = "text")]
    lifetime: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Side {
    server: Server,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Server {
    http2: Option<BTreeMap<String, Scalar>>,
}

/// A text or a number, as text.
#[derive(Clone, Debug, Default, Deserialize)]
struct Scalar(#[serde(deserialize_with = "text")] Option<String>);

/// The container with debugging tools.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct DebugContainer {
    image: Image,
}

impl DebugContainer {
    /// Its image, with defaults for absent settings.
    pub(super) fn image(&self) -> Result<DebugImage, Invalid> {
        let (given, default) = (self.image.clone(), DebugImage::default());
        let policy =
            given.pull_policy.map(|policy| pull_policy("debugContainer.image.pullPolicy", &policy)).transpose()?;
        Ok(DebugImage {
            name: given.name.unwrap_or(default.name),
            version: given.version.unwrap_or(default.version),
            pull_policy: policy,
        })
    }
}

impl Proxy {
    /// Who may tap; `None` unless both names are given.
    pub(super) fn tap(&self) -> Option<TapClient> {
        let Account { service_account_name, namespace } = self.tap.clone();
        let (service_account, namespace) = service_account_name.zip(namespace)?;
        Some(TapClient { service_account, namespace })
    }

    /// How the proxy works, without the image for debugging.
    pub(super) fn tuning(&self) -> Result<ProxyTuning, Invalid> {
        let default = ProxyTuning::default();
        let duration = |path: &str, value: &Option<String>, default: ProxyDuration| {
            parse::<ProxyDuration>(&format!("proxy.{path}"), value).map(|duration| duration.unwrap_or(default))
        };
        let (connect, cache) = (default.connect_timeout, default.cache_timeout);
        let http2 = |side: &Side, default| side.server.http2.as_ref().map_or(default, texts);
        Ok(ProxyTuning {
            workers: self.workers(default.workers)?,
            shutdown_endpoint: self.enable_shutdown_endpoint.unwrap_or(default.shutdown_endpoint),
            grace_period: parse("proxy.shutdownGracePeriod", &self.shutdown_grace_period)?,
            wait_before_exit: self.wait_before_exit_seconds.unwrap_or(default.wait_before_exit),
            connect_timeout: PerDirection {
                inbound: duration("inboundConnectTimeout", &self.inbound_connect_timeout, connect.inbound)?,
                outbound: duration("outboundConnectTimeout", &self.outbound_connect_timeout, connect.outbound)?,
            },
            cache_timeout: PerDirection {
                inbound: duration(
                    "inboundDiscoveryCacheUnusedTimeout",
                    &self.inbound_discovery_cache_unused_timeout,
                    cache.inbound,
                )?,
                outbound: duration(
                    "outboundDiscoveryCacheUnusedTimeout",
                    &self.outbound_discovery_cache_unused_timeout,
                    cache.outbound,
                )?,
            },
            no_detect_timeout: PerDirection {
                inbound: self.disable_inbound_protocol_detect_timeout.unwrap_or_default(),
                outbound: self.disable_outbound_protocol_detect_timeout.unwrap_or_default(),
            },
            http2: PerDirection {
                inbound: http2(&self.inbound, default.http2.inbound),
                outbound: http2(&self.outbound, default.http2.outbound),
            },
            control_streams: self.control_streams(default.control_streams)?,
            require_tls_ports: parse("proxy.requireTLSOnInboundPorts", &self.require_tls_on_inbound_ports)?
                .unwrap_or_default(),
            require_identity_ports: parse(
                "proxy.requireIdentityOnInboundPorts",
                &self.require_identity_on_inbound_ports,
            )?
            .unwrap_or_default(),
            deny_unanswered_ports: self.deny_unanswered_ports.unwrap_or_default(),
            probes: Probes {
                liveness: self.liveness_probe.map_or(default.probes.liveness, Into::into),
                readiness: self.readiness_probe.map_or(default.probes.readiness, Into::into),
                startup: self.startup_probe.map_or(default.probes.startup, Into::into),
            },
            external_profiles: self.enable_external_profiles.unwrap_or_default(),
            log_http_headers: match self.log_http_headers.as_deref() {
                None | Some("off") => false,
                Some("insecure") => true,
                Some(other) => return Err(bad("proxy.logHTTPHeaders", other, "insecure or off")),
            },
            access_log: match self.access_log.as_deref() {
                None | Some("") => None,
                Some("apache" | "json") => self.access_log.clone(),
                Some(other) => return Err(bad("proxy.accessLog", other, "apache or json")),
            },
            hostname_labels: self.metrics.hostname_labels.unwrap_or_default(),
            tracing: self.tracing.read()?,
            experimental_env: self.experimental_env.clone().unwrap_or_default(),
            debug: default.debug,
        })
    }

    fn workers(&self, default: Workers) -> Result<Workers, Invalid> {
        let WorkerValues { minimum, maximum, maximum_cpu_ratio } = &self.runtime.workers;
        let ratio = match maximum_cpu_ratio {
            None => default.maximum_cpu_ratio,
            Some(text) => {
                let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
                let expected = "a ratio above 0 and at most 1, or 0 for none";
                ratio.ok_or_else(|| bad("proxy.runtime.workers.maximumCPURatio", text, expected))?
            }
        };
        Ok(Workers {
            cores: self.cores.unwrap_or(default.cores),
            minimum: minimum.unwrap_or(default.minimum),
            maximum: maximum.unwrap_or(default.maximum),
            maximum_cpu_ratio: ratio,
        })
    }

    fn control_streams(&self, default: ControlStreams) -> Result<ControlStreams, Invalid> {
        let Some(streams) = &self.control.streams else { return Ok(default) };
        Ok(ControlStreams {
            initial: parse("proxy.control.streams.initialTimeout", &streams.initial_timeout)?,
            idle: parse("proxy.control.streams.idleTimeout", &streams.idle_timeout)?,
            lifetime: parse("proxy.control.streams.lifetime", &streams.lifetime)?,
        })
    }
}

impl TracingValues {
    fn read(&self) -> Result<Option<Tracing>, Invalid> {
        if self.enabled != Some(true) {
            return Ok(None);
        }
        let (path, expected) = ("proxy.tracing.collector.endpoint", "HOST:PORT of an OpenTelemetry collector");
        let collector = self.collector.endpoint.clone().ok_or_else(|| missing(path, expected))?;
        let host = host(&collector).ok_or_else(|| bad(path, &collector, expected))?;
        let Account { service_account_name, namespace } = self.collector.mesh_identity.clone();
        let identity = service_account_name.zip(namespace);
        // The proxy would refuse to start: it speaks plaintext within its own pod only.
        if identity.is_none() && !is_loopback(host) {
            let expected = "serviceAccountName and namespace of the collector, which has to be meshed";
            return Err(missing("proxy.tracing.collector.meshIdentity", expected));
        }
        Ok(Some(Tracing {
            collector,
            identity,
            service_name: self.trace_service_name.clone().unwrap_or_else(|| "linkerd-proxy".to_owned()),
            attributes: self.labels.as_ref().map(texts).unwrap_or_default(),
        }))
    }
}

/// The host of `HOST:PORT`, an IPv6 address without its brackets.
fn host(endpoint: &str) -> Option<&str> {
    let (host, port) = endpoint.rsplit_once(':')?;
    port.parse::<u16>().ok().filter(|port| *port != 0)?;
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => host.parse::<IpAddr>().is_ok().then_some(host),
        None => Some(host).filter(|host| !host.is_empty() && !host.contains([':', '/', ' '])),
    }
}

fn is_loopback(host: &str) -> bool {
    host.trim_end_matches('.').eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn texts(map: &BTreeMap<String, Scalar>) -> BTreeMap<String, String> {
    map.iter().filter_map(|(name, value)| Some((name.clone(), value.0.clone()?))).collect()
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Image {
    #[serde(deserialize_with = "text")]
    pub(super) name: Option<String>,
    #[serde(deserialize_with = "text")]
    pub(super) version: Option<String>,
    #[serde(deserialize_with = "text")]
    pub(super) pull_policy: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Ports {
    pub(super) admin: Option<u16>,
    pub(super) control: Option<u16>,
    pub(super) inbound: Option<u16>,
    pub(super) outbound: Option<u16>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Resources {
    pub(super) cpu: Resource,
    pub(super) memory: Resource,
    #[serde(rename = "ephemeral-storage")]
    pub(super) storage: Resource,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Resource {
    #[serde(deserialize_with = "text")]
    pub(super) request: Option<String>,
    #[serde(deserialize_with = "text")]
    pub(super) limit: Option<String>,
}
