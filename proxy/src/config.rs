//! The proxy's settings, parsed once from the `LINKERD2_PROXY_*` environment that the injector writes.
//!
//! Owns the names, defaults and meaning of every variable. Refuses to read the process environment itself: it uses a
//! lookup function, so that parsing is pure and the rest of the program never reads the environment. An error names
//! the variable and the expected value, and never contains the actual value, because some of them are secrets.

#[cfg(test)]
mod effects;
mod env;
mod http2;
mod ignored;
mod parts;
mod trace;
mod variables;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroUsize,
    path::PathBuf,
    time::Duration,
};

use ipnet::IpNet;
use weft_tls::identity::Identity;

use crate::destination::Suffix;

pub(crate) use env::{ConfigError, Source};
pub(crate) use http2::{Http2Config, Http2ServerConfig, LATE_FRAMES, MAX_WINDOW, RESET_STREAMS, SMALL_FRAMES, Windows};
pub(crate) use trace::TraceConfig;
pub(crate) use variables::{help, unknown};

/// Idle HTTP/1 connections that are kept for an endpoint or a port, unless a variable says otherwise.
const MAX_IDLE_CONNECTIONS: usize = 10_000;

/// All settings of the proxy.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Data-plane worker threads. Linkerd's default: 1.
    pub(crate) cores: NonZeroUsize,
    /// Settings of the outbound side.
    pub(crate) outbound: OutboundConfig,
    /// Settings of the inbound side.
    pub(crate) inbound: InboundConfig,
    /// Settings of the admin server.
    pub(crate) admin: AdminConfig,
    /// Settings of the tap server; `None` disables it.
    pub(crate) tap: Option<TapConfig>,
    /// Settings of the export of spans; `None` disables it.
    pub(crate) trace: Option<TraceConfig>,
    /// This proxy's identity, and its certificate authority.
    pub(crate) identity: IdentityConfig,
    /// Address of discovery.
    pub(crate) destination: DestinationConfig,
    /// Address of policy.
    pub(crate) policy: PolicyConfig,
    /// How long an HTTP/1 client may take from the end of one exchange to the end of the next request's head
    /// (`WEFT_PROXY_HTTP1_IDLE_TIMEOUT`). 10 min: longer than Prometheus and common pools keep connections, so that
    /// they close first.
    pub(crate) http1_client_timeout: Duration,
    /// How long unused series are kept. Linkerd's default: 10 min.
    pub(crate) metrics_retain_idle: Duration,
    /// Bounds of the TTLs of DNS records.
    pub(crate) dns: DnsConfig,
    /// Limits of streams of the control plane.
    pub(crate) control_streams: StreamLimits,
    /// HTTP/2 settings for both directions.
    pub(crate) http2: Http2Config,
    /// How long in-flight work may take after SIGTERM. Linkerd's default: 2 min.
    pub(crate) shutdown_grace_period: Duration,
    /// Filter of the log (`LINKERD2_PROXY_LOG`).
    pub(crate) log: String,
    /// Whether headers of requests and responses are logged at the level `debug`: only where a filter is set that does
    /// not exclude them, as the injector's does unless `proxy-log-http-headers` is `insecure`. A change of the level
    /// has no effect on it.
    pub(crate) log_headers: bool,
    /// Whether log lines are JSON.
    pub(crate) log_json: bool,
    /// Format of the lines about inbound requests; `None` writes none.
    pub(crate) access_log: Option<AccessLogFormat>,
    /// Whether readiness waits until the kernel attests that both directions are redirected
    /// (`WEFT_PROXY_REQUIRE_REDIRECT`).
    pub(crate) require_redirect: bool,
}

/// Socket options of one side of a connection; `None` leaves the kernel's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SocketConfig {
    /// Idle time before TCP keepalive probes.
    pub(crate) keepalive: Option<Duration>,
    /// TCP_USER_TIMEOUT.
    pub(crate) user_timeout: Option<Duration>,
}

/// Settings of the outbound side.
#[derive(Clone, Debug)]
pub(crate) struct OutboundConfig {
    /// Listeners; at most one per family.
    pub(crate) listen: Vec<SocketAddr>,
    /// Connections that may wait for each listener to accept them.
    pub(crate) backlog: Backlog,
    /// How long protocol detection waits when policy gives no timeout.
    pub(crate) detect_timeout: Duration,
    /// How long a connection attempt to an endpoint may take.
    pub(crate) connect_timeout: Duration,
    /// Accepted sockets.
    pub(crate) accept: SocketConfig,
    /// Sockets to endpoints.
    pub(crate) connect: SocketConfig,
    /// Smallest pause after a failed connection attempt; above 0 and at most `backoff_max`.
    pub(crate) backoff_min: Duration,
    /// Largest pause after failed connection attempts.
    pub(crate) backoff_max: Duration,
    /// The part of a pause by which it may be longer, at random. Linkerd's default: 0.1.
    pub(crate) backoff_jitter: f64,
    /// Requests that wait for a ready endpoint.
    pub(crate) http_queue: QueueConfig,
    /// Connections of unknown protocols that wait for a ready endpoint.
    pub(crate) tcp_queue: QueueConfig,
    /// Deadline for the control plane's first answers about a destination.
    pub(crate) discovery_timeout: Duration,
    /// How long an unused destination stays cached.
    pub(crate) discovery_idle_timeout: Duration,
    /// How long an idle HTTP/1 connection to an endpoint is kept.
    pub(crate) http1_idle_timeout: Duration,
    /// Idle HTTP/1 connections kept per endpoint and worker; as many attempts to connect go on without their requests.
    pub(crate) max_idle_connections: usize,
    /// Requests in flight per worker; beyond it they are shed.
    pub(crate) max_in_flight: usize,
    /// Whether endpoints without an identity are refused (`WEFT_PROXY_REQUIRE_MTLS`).
    pub(crate) require_mtls: bool,
    /// Whether requests name their destination in `l5d-dst-override`.
    pub(crate) ingress_mode: bool,
    /// Whether the application sees `l5d-proxy-error`.
    pub(crate) informational_headers: bool,
    /// Whether metrics of routes have a series for each host.
    pub(crate) hostname_labels: bool,
    /// Whether connections to loopback are allowed. Never set from the environment: only tests need it, because for a
    /// sidecar a loopback target is its own listener.
    pub(crate) allow_loopback: bool,
}

/// What may wait for a ready endpoint of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueConfig {
    /// How long one waits before it fails. Linkerd's default: 3 s.
    pub(crate) failfast_timeout: Duration,
    /// How many wait at once, of one worker; more are shed. Linkerd's default: 10,000.
    pub(crate) capacity: usize,
}

/// Settings of the inbound side.
#[derive(Clone, Debug)]
pub(crate) struct InboundConfig {
    /// Address of the listener. Linkerd's default: 0.0.0.0:4143.
    pub(crate) listen: SocketAddr,
    /// Connections that may wait for the listener to accept them.
    pub(crate) backlog: Backlog,
    /// Detection timeout if policy has none, and deadline for TLS and transport headers.
    pub(crate) detect_timeout: Duration,
    /// Whether metrics have a series for each authority.
    pub(crate) authority_labels: bool,
    /// How long a connection attempt to the application may take.
    pub(crate) connect_timeout: Duration,
    /// Accepted sockets.
    pub(crate) accept: SocketConfig,
    /// Sockets to the application.
    pub(crate) connect: SocketConfig,
    /// How long an idle HTTP/1 connection to the application is kept.
    pub(crate) http1_idle_timeout: Duration,
    /// Idle HTTP/1 connections kept per port and worker.
    pub(crate) max_idle_connections: usize,
    /// Requests in flight per worker; beyond it they are shed.
    pub(crate) max_in_flight: usize,
    /// Those of one client's address (`WEFT_PROXY_INBOUND_MAX_IN_FLIGHT_PER_CLIENT`).
    pub(crate) max_in_flight_of_a_client: Option<usize>,
    /// How long an unused port's policy stays cached.
    pub(crate) discovery_idle_timeout: Duration,
    /// Policy of ports without a server.
    pub(crate) default_policy: DefaultPolicy,
    /// How long connections to a port wait for the controller's first answer, and how long readiness waits for those
    /// of `ports` (`WEFT_PROXY_INBOUND_POLICY_TIMEOUT`). 10 s, as Linkerd's protocol detection.
    pub(crate) policy_timeout: Duration,
    /// Policy of a port without an answer in that time (`WEFT_PROXY_INBOUND_POLICY_UNANSWERED`).
    pub(crate) unanswered: Unanswered,
    /// Ports whose policy is watched from the start.
    pub(crate) ports: Vec<u16>,
    /// Ports that the default policy treats as opaque.
    pub(crate) opaque_ports: Vec<u16>,
    /// Ports on which connections in plaintext are refused, whatever their policy.
    pub(crate) tls_ports: Vec<u16>,
    /// Names that other clusters' proxies reach through this one; none, unless it is a gateway.
    pub(crate) gateway_suffixes: Vec<Suffix>,
    /// The pod's own addresses; empty means that any original destination is accepted.
    pub(crate) ips: Vec<IpAddr>,
}

/// Policy of a port about which the controller has never sent anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// The default policy, as with Linkerd: a mesh whose controller is down can still start pods.
    Default,
    /// Deny every client.
    Deny,
}

/// Policy of a port without a server resource (`config.linkerd.io/default-inbound-policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultPolicy {
    /// No client.
    Deny,
    /// Any meshed client.
    AllAuthenticated,
    /// Any client.
    AllUnauthenticated,
    /// Meshed clients from the cluster's networks.
    ClusterAuthenticated,
    /// Any client from the cluster's networks.
    ClusterUnauthenticated,
    /// Any client, with a log line for clients that would otherwise be denied.
    Audit,
}

/// Settings of the admin server.
#[derive(Clone, Debug)]
pub(crate) struct AdminConfig {
    /// Address of the listener.
    pub(crate) listen: SocketAddr,
    /// Whether `POST /shutdown` is enabled.
    pub(crate) shutdown_endpoint: bool,
}

/// Settings of the tap server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TapConfig {
    /// Address of the listener. Linkerd's default: 0.0.0.0:4190.
    pub(crate) listen: SocketAddr,
    /// The only client that may tap, beside those of the pod itself.
    pub(crate) client: Identity,
}

/// Formats of the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessLogFormat {
    /// Apache's Common Log Format.
    Apache,
    /// One JSON object a line.
    Json,
}

/// Settings of this proxy's identity.
#[derive(Clone, Debug)]
pub(crate) struct IdentityConfig {
    /// This proxy's identity.
    pub(crate) local_name: Identity,
    /// The TLS server name with which clients ask for this proxy.
    pub(crate) server_name: Box<str>,
    /// The mesh's trust anchors as PEM. Like every setting they are read once: a rotation restarts the pods.
    pub(crate) trust_anchors: String,
    /// Where certificates come from.
    pub(crate) source: IdentitySource,
}

/// Where certificates come from.
#[derive(Clone, Debug)]
pub(crate) enum IdentitySource {
    /// The mesh's identity controller.
    Controller(ControllerIdentity),
    /// The SPIFFE Workload API on this unix socket, such as a SPIRE agent's.
    Spire(PathBuf),
}

/// Settings of certification by the identity controller.
#[derive(Clone, Debug)]
pub(crate) struct ControllerIdentity {
    /// Directory of `key.p8` and `csr.der`.
    pub(crate) dir: PathBuf,
    /// The service-account token, read at every attempt.
    pub(crate) token_file: PathBuf,
    /// The certificate authority.
    pub(crate) control: ControlAddr,
    /// Shortest time between renewals.
    pub(crate) min_refresh: Duration,
    /// Longest time between renewals.
    pub(crate) max_refresh: Duration,
}

/// Settings of the destination client.
#[derive(Clone, Debug)]
pub(crate) struct DestinationConfig {
    /// The destination controller.
    pub(crate) control: ControlAddr,
    /// Sent with every lookup as `context_token`.
    pub(crate) context: String,
    /// Networks whose addresses have profiles.
    pub(crate) networks: Vec<IpNet>,
    /// Names in inbound requests that have profiles. Linkerd's default: `svc.cluster.local`.
    pub(crate) suffixes: Vec<Suffix>,
    /// How long inbound requests wait for the profile of their name. Linkerd's default: 500 ms.
    pub(crate) initial_timeout: Duration,
}

/// Settings of the policy client.
#[derive(Clone, Debug)]
pub(crate) struct PolicyConfig {
    /// The policy controller.
    pub(crate) control: ControlAddr,
    /// This workload's name for the policy controller.
    pub(crate) workload: String,
    /// The cluster's networks, for the `cluster-*` default policies.
    pub(crate) cluster_networks: Vec<IpNet>,
}

/// Length of a listener's queue of connections that were not accepted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backlog(pub(crate) i32);

impl Default for Backlog {
    /// The kernel's default limit (`net.core.somaxconn`).
    fn default() -> Self {
        Self(4096)
    }
}

/// Bounds of the time for which DNS records are valid; `None` leaves the records' own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DnsConfig {
    /// The shortest time.
    pub(crate) min: Option<Duration>,
    /// The longest time; not below `min`.
    pub(crate) max: Option<Duration>,
}

/// Limits of the control plane's streams (`CONTROL_STREAM_*`); `None` means no limit. They do not apply to a
/// controller on loopback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamLimits {
    /// Deadline for the first message.
    pub(crate) initial: Option<Duration>,
    /// The longest silence afterwards.
    pub(crate) idle: Option<Duration>,
    /// The longest time that the stream may be open.
    pub(crate) lifetime: Option<Duration>,
    /// Pings on the connection that the streams share; `None` means the numbers of Linkerd's chart, and none on
    /// loopback.
    pub(crate) keepalive: Option<Keepalive>,
}

/// HTTP/2 PING keepalive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keepalive {
    /// Time between pings.
    pub(crate) interval: Duration,
    /// Deadline for the answer.
    pub(crate) timeout: Duration,
}

/// One control-plane service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ControlAddr {
    /// A DNS name or an IP address.
    pub(crate) host: String,
    /// The port, unless an SRV record says otherwise.
    pub(crate) port: u16,
    /// The expected identity of the server; `None` only for loopback, which is spoken to in plaintext.
    pub(crate) identity: Option<Identity>,
}

/// A setting whose content turned out to be unusable when it was used; the process exits with 64.
#[derive(Debug, thiserror::Error)]
#[error("{variable} cannot be used: {reason}")]
pub(crate) struct UnusableSetting {
    /// The variable's full name.
    pub(crate) variable: &'static str,
    /// Why it cannot be used.
    pub(crate) reason: String,
}

impl Config {
    /// Parses all settings. `source` returns the value of a variable by its full name.
    ///
    /// # Errors
    /// The first variable that is missing or malformed. The process should print it and exit with 64.
    pub(crate) fn parse(source: Source<'_>) -> Result<Self, ConfigError> {
        let env = env::Env::new(source);
        let ingress_mode = env.flag("INGRESS_MODE")?.unwrap_or(false);
        env.refuse("IDENTITY_DISABLED", "identity is mandatory; unset it")?;
        let admin_listen = env.socket_addr("ADMIN_LISTEN_ADDR")?.unwrap_or(localhost(4191));
        let max_idle = env.number("MAX_IDLE_CONNS_PER_ENDPOINT")?.unwrap_or(MAX_IDLE_CONNECTIONS);
        Ok(Self {
            cores: env.cores(std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN))?,
            outbound: OutboundConfig::parse(&env, ingress_mode, max_idle)?,
            inbound: InboundConfig::parse(&env, admin_listen.port(), max_idle)?,
            admin: AdminConfig {
                listen: admin_listen,
                shutdown_endpoint: env.flag("SHUTDOWN_ENDPOINT_ENABLED")?.unwrap_or(false),
            },
            tap: env.tap()?,
            trace: TraceConfig::parse(&env)?,
            identity: env.own_identity()?,
            destination: DestinationConfig::parse(&env)?,
            policy: PolicyConfig::parse(&env)?,
            metrics_retain_idle: env.duration("METRICS_RETAIN_IDLE")?.unwrap_or(Duration::from_secs(600)),
            http1_client_timeout: env.http1_client_timeout()?,
            dns: env.dns()?,
            control_streams: StreamLimits::parse(&env)?,
            http2: Http2Config::parse(&env)?,
            shutdown_grace_period: env.duration("SHUTDOWN_GRACE_PERIOD")?.unwrap_or(Duration::from_secs(120)),
            log_headers: env.log_headers(),
            log: env
                .string("LOG")
                .unwrap_or_else(|| "warn,linkerd=info,weft=info,weft_proxy=info,hickory=error".to_owned()),
            log_json: env.log_json()?,
            access_log: env.access_log()?,
            require_redirect: env.require_redirect()?,
        })
    }

    /// Limits of streams of a service of the control plane: none if it is in this very pod, from where it cannot vanish
    /// unnoticed.
    pub(crate) fn stream_limits(&self, service: &ControlAddr) -> StreamLimits {
        if service.is_loopback() { StreamLimits::default() } else { self.control_streams }
    }

    /// Whether `ip` is one of the pod's own addresses.
    pub(crate) fn is_local(&self, ip: IpAddr) -> bool {
        self.inbound.ips.contains(&ip)
    }
}

impl ControlAddr {
    /// Whether the service is in this pod and is therefore spoken to in plaintext.
    pub(crate) fn is_loopback(&self) -> bool {
        is_loopback_host(&self.host)
    }
}

fn is_loopback_host(host: &str) -> bool {
    host.trim_end_matches('.').eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn localhost(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

#[cfg(test)]
mod tests;
