//! The parts of the settings: which variables each reads, and Linkerd's defaults.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use super::{
    DestinationConfig, InboundConfig, OutboundConfig, PolicyConfig, StreamLimits,
    env::{ConfigError, Env},
};

/// No variable changes it.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection's protocol is waited for.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an idle HTTP/1 connection is kept.
const HTTP1_IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// Requests in flight per worker.
const MAX_IN_FLIGHT: usize = 100_000;

impl OutboundConfig {
    /// `max_idle` is the number of idle connections unless outbound has its own.
    pub(super) fn parse(env: &Env<'_>, ingress_mode: bool, max_idle: usize) -> Result<Self, ConfigError> {
        let (backoff_min, backoff_max) = env.outbound_backoff()?;
        Ok(Self {
            listen: env.outbound_listen()?,
            backlog: env.backlog("OUTBOUND_TCP_LISTEN_BACKLOG")?,
            detect_timeout: env.duration("OUTBOUND_DETECT_TIMEOUT")?.unwrap_or(DETECT_TIMEOUT),
            connect_timeout: env.duration("OUTBOUND_CONNECT_TIMEOUT")?.unwrap_or(Duration::from_secs(1)),
            accept: env.socket("OUTBOUND_ACCEPT")?,
            connect: env.socket("OUTBOUND_CONNECT")?,
            backoff_min,
            backoff_max,
            backoff_jitter: env.backoff_jitter("OUTBOUND_CONNECT_EXP_BACKOFF_JITTER")?,
            http_queue: env.queue("OUTBOUND_HTTP")?,
            tcp_queue: env.queue("OUTBOUND_TCP")?,
            discovery_timeout: DISCOVERY_TIMEOUT,
            discovery_idle_timeout: env.duration("OUTBOUND_DISCOVERY_IDLE_TIMEOUT")?.unwrap_or(Duration::from_secs(5)),
            http1_idle_timeout: env
                .duration("OUTBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT")?
                .unwrap_or(HTTP1_IDLE_TIMEOUT),
            max_idle_connections: env.number("OUTBOUND_MAX_IDLE_CONNS_PER_ENDPOINT")?.unwrap_or(max_idle),
            max_in_flight: env.number("OUTBOUND_MAX_IN_FLIGHT")?.unwrap_or(MAX_IN_FLIGHT),
            require_mtls: env.require_mtls()?,
            ingress_mode,
            // What is behind an ingress is outside the mesh.
            informational_headers: !env.flag("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS")?.unwrap_or(ingress_mode),
            hostname_labels: env.flag("OUTBOUND_METRICS_HOSTNAME_LABELS")?.unwrap_or(false),
            allow_loopback: false,
        })
    }
}

impl InboundConfig {
    /// The policy of the admin port is watched from the start, too.
    pub(super) fn parse(env: &Env<'_>, admin_port: u16, max_idle: usize) -> Result<Self, ConfigError> {
        let listen = env.socket_addr("INBOUND_LISTEN_ADDR")?.unwrap_or((Ipv4Addr::UNSPECIFIED, 4143).into());
        let gateway_suffixes = env.suffixes("INBOUND_GATEWAY_SUFFIXES")?;
        Ok(Self {
            ports: watched_ports(env, listen, admin_port, !gateway_suffixes.is_empty())?,
            listen,
            backlog: env.backlog("INBOUND_TCP_LISTEN_BACKLOG")?,
            detect_timeout: env.duration("INBOUND_DETECT_TIMEOUT")?.unwrap_or(DETECT_TIMEOUT),
            authority_labels: env.unsafe_labels("INBOUND_METRICS_AUTHORITY_LABELS"),
            connect_timeout: env.duration("INBOUND_CONNECT_TIMEOUT")?.unwrap_or(Duration::from_millis(300)),
            accept: env.socket("INBOUND_ACCEPT")?,
            connect: env.socket("INBOUND_CONNECT")?,
            http1_idle_timeout: env
                .duration("INBOUND_HTTP1_CONNECTION_POOL_IDLE_TIMEOUT")?
                .unwrap_or(HTTP1_IDLE_TIMEOUT),
            max_idle_connections: max_idle,
            max_in_flight: env.number("INBOUND_MAX_IN_FLIGHT")?.unwrap_or(MAX_IN_FLIGHT),
            max_in_flight_of_a_client: env.max_in_flight_of_a_client()?,
            discovery_idle_timeout: env.duration("INBOUND_DISCOVERY_IDLE_TIMEOUT")?.unwrap_or(Duration::from_secs(90)),
            default_policy: env.default_policy()?,
            policy_timeout: env.policy_timeout()?,
            unanswered: env.unanswered()?,
            opaque_ports: env.ports("INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION")?,
            tls_ports: env.ports("INBOUND_PORTS_REQUIRE_TLS")?,
            gateway_suffixes,
            ips: env.ips("INBOUND_IPS")?,
        })
    }
}

/// The pod's ports, the admin port and, at a gateway, whose requests have the policy of the proxy's own port, that one.
fn watched_ports(
    env: &Env<'_>,
    listen: SocketAddr,
    admin_port: u16,
    is_gateway: bool,
) -> Result<Vec<u16>, ConfigError> {
    let mut ports = env.ports("INBOUND_PORTS")?;
    for port in is_gateway.then(|| listen.port()).into_iter().chain([admin_port]) {
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    Ok(ports)
}

impl DestinationConfig {
    pub(super) fn parse(env: &Env<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            control: env.control("DESTINATION_SVC")?,
            context: env.string("DESTINATION_CONTEXT").unwrap_or_default(),
            networks: env.networks("DESTINATION_PROFILE_NETWORKS")?,
            suffixes: env.profile_suffixes()?,
            initial_timeout: env.duration("DESTINATION_PROFILE_INITIAL_TIMEOUT")?.unwrap_or(Duration::from_millis(500)),
        })
    }
}

impl PolicyConfig {
    pub(super) fn parse(env: &Env<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            control: env.control("POLICY_SVC")?,
            workload: env.required("POLICY_WORKLOAD", "this workload's name for the policy controller")?,
            cluster_networks: env.networks("POLICY_CLUSTER_NETWORKS")?,
        })
    }
}

impl StreamLimits {
    pub(super) fn parse(env: &Env<'_>) -> Result<Self, ConfigError> {
        let limit = |name| Ok::<_, ConfigError>(env.duration(name)?.filter(|limit| !limit.is_zero()));
        Ok(Self {
            initial: limit("CONTROL_STREAM_INITIAL_TIMEOUT")?,
            idle: limit("CONTROL_STREAM_IDLE_TIMEOUT")?,
            lifetime: limit("CONTROL_STREAM_LIFETIME")?,
            keepalive: None,
        })
    }
}
