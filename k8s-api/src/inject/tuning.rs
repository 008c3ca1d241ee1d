//! Settings of the proxy that change how it works, and not what it admits: time limits, threads, telemetry. The mesh's
//! owner sets them as values, and most of them have an annotation for pods that need others.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::EnvVar;

use crate::{duration::ProxyDuration, ports::PortSet};

/// Settings for pods without annotations.
#[derive(Clone, Debug, PartialEq)]
pub struct ProxyTuning {
    /// Worker threads.
    pub workers: Workers,
    /// Whether `/shutdown` is served on the admin port.
    pub shutdown_endpoint: bool,
    /// How long a draining proxy waits; `None` leaves it to the proxy.
    pub grace_period: Option<ProxyDuration>,
    /// How many seconds the proxy runs at least after the pod's termination begins.
    pub wait_before_exit: u32,
    /// How long the proxy tries to reach the application, and another endpoint.
    pub connect_timeout: PerDirection<ProxyDuration>,
    /// Idle time after which inbound policies, and outbound discovery, are forgotten.
    pub cache_timeout: PerDirection<ProxyDuration>,
    /// Whether protocol detection waits without limit.
    pub no_detect_timeout: PerDirection<bool>,
    /// Settings of the HTTP/2 servers, such as `keepAliveInterval`.
    pub http2: PerDirection<BTreeMap<String, String>>,
    /// Limits of streams of the control plane.
    pub control_streams: ControlStreams,
    /// Ports on which connections in plaintext are refused.
    pub require_tls_ports: PortSet,
    /// Ports that only mesh identities may use under the default policy, in pods without the annotation.
    pub require_identity_ports: PortSet,
    /// Whether ports are denied about which the policy controller has not answered in time.
    pub deny_unanswered_ports: bool,
    /// Timing of the kubelet's probes.
    pub probes: Probes,
    /// Whether names outside the cluster have profiles.
    pub external_profiles: bool,
    /// Whether headers may be logged.
    pub log_http_headers: bool,
    /// Format of the access log, `apache` or `json`.
    pub access_log: Option<String>,
    /// Whether outbound metrics have the label `hostname`.
    pub hostname_labels: bool,
    /// Where traces go.
    pub tracing: Option<Tracing>,
    /// Further environment, after that of annotations.
    pub experimental_env: Vec<EnvVar>,
    /// The container with debugging tools, for pods that ask for it; `None` adds none, where there are no images.
    pub debug: Option<DebugImage>,
}

/// A setting of the inbound and of the outbound side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PerDirection<T> {
    /// From clients to the application.
    pub inbound: T,
    /// From the application to other endpoints.
    pub outbound: T,
}

/// Numbers of the proxy's worker threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workers {
    /// The older setting for [`Workers::minimum`]; 0 means absent.
    pub cores: u32,
    /// Minimum number of threads.
    pub minimum: u32,
    /// Maximum number of threads; 0 means absent.
    pub maximum: u32,
    /// Maximum as a fraction of the machine's processors; 0 means absent.
    pub maximum_cpu_ratio: f64,
}

/// Timing of the probes of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    /// Whether the kubelet restarts it.
    pub liveness: ProbeTiming,
    /// Whether Services send traffic to the pod.
    pub readiness: ProbeTiming,
    /// Whether the pod's other containers may start.
    pub startup: ProbeTiming,
}

/// Timing of one probe; `None` means Kubernetes' default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeTiming {
    /// Seconds before the first probe.
    pub initial_delay_seconds: Option<u16>,
    /// Seconds between probes.
    pub period_seconds: Option<u16>,
    /// Seconds until a probe fails for lack of an answer.
    pub timeout_seconds: Option<u16>,
    /// Consecutive successes after a failure that count as success.
    pub success_threshold: Option<u16>,
    /// Consecutive failures after a success that count as failure.
    pub failure_threshold: Option<u16>,
}

/// Limits of the proxy's streams from the control plane; `None` means none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlStreams {
    /// Deadline for the first message.
    pub initial: Option<ProxyDuration>,
    /// The longest silence afterwards.
    pub idle: Option<ProxyDuration>,
    /// The longest time that a stream may be open.
    pub lifetime: Option<ProxyDuration>,
}

/// Where the proxy sends traces, and what they say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracing {
    /// `host:port` of the OpenTelemetry collector.
    pub collector: String,
    /// ServiceAccount and namespace of the collector, if it is meshed.
    pub identity: Option<(String, String)>,
    /// Value of the attribute `service.name`.
    pub service_name: String,
    /// Further attributes.
    pub attributes: BTreeMap<String, String>,
}

/// Image of the container with debugging tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebugImage {
    /// Name without the tag.
    pub name: String,
    /// Tag or digest.
    pub version: String,
    /// Pull policy; `None` means that of the proxy's image.
    pub pull_policy: Option<String>,
}

impl Default for ProxyTuning {
    /// Linkerd's Helm defaults.
    fn default() -> Self {
        let keepalive: BTreeMap<_, _> = [("keepAliveInterval", "10s"), ("keepAliveTimeout", "3s")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        Self {
            workers: Workers { cores: 0, minimum: 1, maximum: 0, maximum_cpu_ratio: 0.0 },
            shutdown_endpoint: false,
            grace_period: None,
            wait_before_exit: 0,
            connect_timeout: PerDirection {
                inbound: ProxyDuration::millis(100),
                outbound: ProxyDuration::millis(1000),
            },
            cache_timeout: PerDirection { inbound: ProxyDuration::seconds(90), outbound: ProxyDuration::seconds(5) },
            no_detect_timeout: PerDirection::default(),
            http2: PerDirection { inbound: keepalive.clone(), outbound: keepalive },
            control_streams: ControlStreams {
                initial: Some(ProxyDuration::seconds(3)),
                idle: Some(ProxyDuration::minutes(5)),
                lifetime: Some(ProxyDuration::hours(1)),
            },
            require_tls_ports: PortSet::default(),
            require_identity_ports: PortSet::default(),
            deny_unanswered_ports: false,
            probes: Probes {
                liveness: ProbeTiming { initial_delay_seconds: Some(10), ..ProbeTiming::default() },
                // Without Linkerd's delay of 2 s: a probe within it is skipped, and the next one is a period later.
                readiness: ProbeTiming::default(),
                // 120 tries, one a second, make Linkerd's two minutes.
                startup: ProbeTiming {
                    period_seconds: Some(1),
                    failure_threshold: Some(120),
                    ..ProbeTiming::default()
                },
            },
            external_profiles: false,
            log_http_headers: false,
            access_log: None,
            hostname_labels: false,
            tracing: None,
            experimental_env: Vec::new(),
            debug: Some(DebugImage::default()),
        }
    }
}

impl Default for DebugImage {
    /// Linkerd's image, of the release that this is compatible with.
    fn default() -> Self {
        Self { name: "cr.l5d.io/linkerd/debug".to_owned(), version: "edge-26.8.3".to_owned(), pull_policy: None }
    }
}
