//! Parses single values of environment variables: one function per kind of value, one error for all of them.
//!
//! Owns syntax (durations, address lists, port ranges); refuses to know the purpose of a variable beyond its group.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroUsize,
    ops::RangeInclusive,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use ipnet::IpNet;
use weft_tls::identity::Identity;

use super::{
    AccessLogFormat, Backlog, ControlAddr, ControllerIdentity, DefaultPolicy, DnsConfig, IdentityConfig,
    IdentitySource, Keepalive, QueueConfig, SocketConfig, TapConfig, Unanswered, is_loopback_host, localhost,
};
use crate::{destination::Suffix, duration};

/// Returns the value of a variable by its full name.
pub(crate) type Source<'a> = &'a dyn Fn(&str) -> Option<String>;

const DURATION: &str = "a duration such as 500ms, 10s, 2m, 1h, 1d or 0";
pub(super) const PREFIX: &str = "LINKERD2_PROXY_";
/// Settings that Linkerd does not have.
pub(super) const OWN_PREFIX: &str = "WEFT_PROXY_";

/// A variable that cannot be used. The message never contains the value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConfigError {
    /// A required variable is absent or empty.
    #[error("{variable} is not set: expected {expected}")]
    Missing {
        /// The variable's full name.
        variable: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A variable's value cannot be parsed.
    #[error("{variable} is invalid: expected {expected}")]
    Invalid {
        /// The variable's full name.
        variable: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A variable that must not be set.
    #[error("{variable} is set: {reason}")]
    Refused {
        /// The variable's full name.
        variable: String,
        /// The reason, and what to do.
        reason: &'static str,
    },
}

/// The environment, addressed without the prefix.
pub(super) struct Env<'a>(Source<'a>);

impl<'a> Env<'a> {
    pub(super) fn new(source: Source<'a>) -> Self {
        Self(source)
    }

    /// A variable's value; blank counts as unset, as in Linkerd.
    pub(super) fn string(&self, name: &str) -> Option<String> {
        (self.0)(&format!("{PREFIX}{name}")).filter(|value| !value.trim().is_empty())
    }

    /// The value of a variable that other programs read, too, and that has no prefix.
    pub(super) fn foreign(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    pub(super) fn required(&self, name: &str, expected: &'static str) -> Result<String, ConfigError> {
        self.string(name).ok_or_else(|| ConfigError::Missing { variable: format!("{PREFIX}{name}"), expected })
    }

    pub(super) fn refuse(&self, name: &str, reason: &'static str) -> Result<(), ConfigError> {
        match self.string(name) {
            None => Ok(()),
            Some(_) => Err(ConfigError::Refused { variable: format!("{PREFIX}{name}"), reason }),
        }
    }

    fn parse<T>(
        &self,
        name: &str,
        expected: &'static str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.string(name) else { return Ok(None) };
        match read(value.trim()) {
            Some(parsed) => Ok(Some(parsed)),
            None => Err(invalid(name, expected)),
        }
    }

    pub(super) fn duration(&self, name: &str) -> Result<Option<Duration>, ConfigError> {
        self.parse(name, DURATION, duration::parse)
    }

    pub(super) fn number<N: FromStr>(&self, name: &str) -> Result<Option<N>, ConfigError> {
        self.parse(name, "a whole number", |value| value.parse().ok())
    }

    /// A number within bounds, which `expected` names.
    pub(super) fn number_in(
        &self,
        name: &str,
        bounds: RangeInclusive<u32>,
        expected: &'static str,
    ) -> Result<Option<u32>, ConfigError> {
        self.parse(name, expected, |value| value.parse().ok().filter(|number| bounds.contains(number)))
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        self.parse(name, "true or false", boolean)
    }

    /// Whether labels that clients choose are allowed: only by the word `unsafe`.
    pub(super) fn unsafe_labels(&self, name: &str) -> bool {
        self.string(name).is_some_and(|value| value.trim().eq_ignore_ascii_case("unsafe"))
    }

    pub(super) fn socket_addr(&self, name: &str) -> Result<Option<SocketAddr>, ConfigError> {
        self.parse(name, "an address such as 0.0.0.0:4143 or [::]:4143", |value| value.parse().ok())
    }

    fn path(&self, name: &str) -> Result<PathBuf, ConfigError> {
        self.required(name, "a path").map(PathBuf::from)
    }

    pub(super) fn ports(&self, name: &str) -> Result<Vec<u16>, ConfigError> {
        self.parse(name, "ports such as 80,443,8000-8100", ports).map(Option::unwrap_or_default)
    }

    pub(super) fn ips(&self, name: &str) -> Result<Vec<IpAddr>, ConfigError> {
        self.parse(name, "IP addresses separated by commas", list).map(Option::unwrap_or_default)
    }

    pub(super) fn networks(&self, name: &str) -> Result<Vec<IpNet>, ConfigError> {
        self.parse(name, "networks such as 10.0.0.0/8,fd00::/8", list).map(Option::unwrap_or_default)
    }

    pub(super) fn suffixes(&self, name: &str) -> Result<Vec<Suffix>, ConfigError> {
        let read = |value: &str| {
            let suffixes = value.split(',').map(str::trim).filter(|suffix| !suffix.is_empty());
            suffixes.map(Suffix::parse).collect()
        };
        self.parse(name, "DNS suffixes such as svc.cluster.local.", read).map(Option::unwrap_or_default)
    }

    /// Shortest and longest pause between connection attempts to an endpoint.
    pub(super) fn outbound_backoff(&self) -> Result<(Duration, Duration), ConfigError> {
        const MIN: &str = "OUTBOUND_CONNECT_EXP_BACKOFF_MIN";
        let min = self.duration(MIN)?.unwrap_or(Duration::from_millis(100));
        let max = self.duration("OUTBOUND_CONNECT_EXP_BACKOFF_MAX")?.unwrap_or(Duration::from_secs(60));
        if min.is_zero() || min > max {
            return Err(invalid(MIN, "a duration above 0 and at most LINKERD2_PROXY_OUTBOUND_CONNECT_EXP_BACKOFF_MAX"));
        }
        Ok((min, max))
    }

    /// The part by which pauses between connection attempts vary. Linkerd's bounds.
    pub(super) fn backoff_jitter(&self, name: &str) -> Result<f64, ConfigError> {
        let read = |value: &str| value.parse().ok().filter(|jitter| (0.0..=100.0).contains(jitter));
        Ok(self.parse(name, "a factor from 0 to 100", read)?.unwrap_or(0.1))
    }

    /// What may wait for an endpoint.
    pub(super) fn queue(&self, group: &str) -> Result<QueueConfig, ConfigError> {
        let timeout = self.duration(&format!("{group}_FAILFAST_TIMEOUT"))?;
        let capacity = self.number(&format!("{group}_QUEUE_CAPACITY"))?;
        Ok(QueueConfig {
            failfast_timeout: timeout.unwrap_or(Duration::from_secs(3)),
            capacity: capacity.unwrap_or(10_000),
        })
    }

    /// Names in inbound requests that have profiles.
    pub(super) fn profile_suffixes(&self) -> Result<Vec<Suffix>, ConfigError> {
        const NAME: &str = "DESTINATION_PROFILE_SUFFIXES";
        match self.string(NAME) {
            Some(_) => self.suffixes(NAME),
            None => Ok(Suffix::parse("svc.cluster.local.").into_iter().collect()),
        }
    }

    pub(super) fn socket(&self, group: &str) -> Result<SocketConfig, ConfigError> {
        Ok(SocketConfig {
            keepalive: self.duration(&format!("{group}_KEEPALIVE"))?.filter(|d| !d.is_zero()),
            user_timeout: self.duration(&format!("{group}_USER_TIMEOUT"))?.filter(|d| !d.is_zero()),
        })
    }

    pub(super) fn http2_keepalive(&self, group: &str) -> Result<Option<Keepalive>, ConfigError> {
        let interval = self.duration(&format!("{group}_KEEP_ALIVE_INTERVAL"))?;
        let timeout = self.duration(&format!("{group}_KEEP_ALIVE_TIMEOUT"))?;
        Ok(match (interval, timeout) {
            (Some(interval), Some(timeout)) if !interval.is_zero() => Some(Keepalive { interval, timeout }),
            _ => None,
        })
    }

    /// Number of workers: the larger of CORES_MIN (or the older CORES) and what CORES_MAX or CORES_MAX_RATIO allow, at
    /// most as many as processors are `available`.
    pub(super) fn cores(&self, available: NonZeroUsize) -> Result<NonZeroUsize, ConfigError> {
        let count = "a whole number of at least 1";
        let positive = |value: &str| value.parse::<NonZeroUsize>().ok();
        let min = match self.parse("CORES_MIN", count, positive)? {
            Some(min) => Some(min),
            None => self.parse("CORES", count, positive)?,
        };
        let max = self.parse("CORES_MAX", count, positive)?;
        let ratio = self.parse("CORES_MAX_RATIO", "a ratio above 0 and at most 1", |value| {
            value.parse::<f64>().ok().filter(|ratio| *ratio > 0.0 && *ratio <= 1.0)
        })?;
        let of_ratio = ratio.and_then(|ratio| NonZeroUsize::new((available.get() as f64 * ratio).round() as usize));
        let cores = max.or(of_ratio).unwrap_or(NonZeroUsize::MIN).max(min.unwrap_or(NonZeroUsize::MIN));
        Ok(cores.min(available))
    }

    pub(super) fn outbound_listen(&self) -> Result<Vec<SocketAddr>, ConfigError> {
        let expected = "one address, or an IPv4 and an IPv6 one separated by a comma";
        let many: Option<Vec<SocketAddr>> = self.parse("OUTBOUND_LISTEN_ADDRS", expected, list)?;
        match many {
            Some(addrs) if addrs.len() <= 2 && (addrs.len() < 2 || addrs[0].is_ipv4() != addrs[1].is_ipv4()) => {
                Ok(addrs)
            }
            Some(_) => Err(invalid("OUTBOUND_LISTEN_ADDRS", expected)),
            None => Ok(vec![self.socket_addr("OUTBOUND_LISTEN_ADDR")?.unwrap_or(localhost(4140))]),
        }
    }

    pub(super) fn default_policy(&self) -> Result<DefaultPolicy, ConfigError> {
        let expected =
            "deny, audit, all-authenticated, all-unauthenticated, cluster-authenticated or cluster-unauthenticated";
        let policy = self.parse("INBOUND_DEFAULT_POLICY", expected, |value| {
            Some(match value {
                "deny" => DefaultPolicy::Deny,
                "audit" => DefaultPolicy::Audit,
                "all-authenticated" => DefaultPolicy::AllAuthenticated,
                "all-unauthenticated" => DefaultPolicy::AllUnauthenticated,
                "cluster-authenticated" => DefaultPolicy::ClusterAuthenticated,
                "cluster-unauthenticated" => DefaultPolicy::ClusterUnauthenticated,
                _ => return None,
            })
        })?;
        Ok(policy.unwrap_or(DefaultPolicy::AllUnauthenticated))
    }

    pub(super) fn control(&self, group: &str) -> Result<ControlAddr, ConfigError> {
        let name = format!("{group}_ADDR");
        let expected = "an address such as linkerd-dst-headless.linkerd.svc.cluster.local.:8086";
        let value = self.required(&name, expected)?;
        let (host, port) = host_port(value.trim()).ok_or_else(|| invalid(&name, expected))?;
        let identity = self.identity(&format!("{group}_NAME"))?;
        if identity.is_none() && !is_loopback_host(&host) {
            return Err(ConfigError::Missing {
                variable: format!("{PREFIX}{group}_NAME"),
                expected: "the identity of a service that is not on loopback",
            });
        }
        Ok(ControlAddr { host, port, identity })
    }

    /// A service that need not be there.
    pub(super) fn optional_control(&self, group: &str) -> Result<Option<ControlAddr>, ConfigError> {
        let is_set = |suffix| self.string(&format!("{group}_{suffix}")).is_some();
        (is_set("ADDR") || is_set("NAME")).then(|| self.control(group)).transpose()
    }

    fn identity(&self, name: &str) -> Result<Option<Identity>, ConfigError> {
        self.parse(name, "a DNS name or a URI", |value| value.parse().ok())
    }

    /// This proxy's identity, and where its certificates come from.
    pub(super) fn own_identity(&self) -> Result<IdentityConfig, ConfigError> {
        let local_name = self.local_name()?;
        let source = match self.workload_api()? {
            Some(socket) => {
                if !matches!(&local_name, Identity::Uri(uri) if uri.starts_with("spiffe://")) {
                    return Err(invalid(
                        "IDENTITY_SERVER_ID",
                        "a SPIFFE ID (spiffe://…), because SPIRE issues no other",
                    ));
                }
                IdentitySource::Spire(socket)
            }
            None => IdentitySource::Controller(ControllerIdentity {
                dir: self.path("IDENTITY_DIR")?,
                token_file: self.path("IDENTITY_TOKEN_FILE")?,
                control: self.control("IDENTITY_SVC")?,
                min_refresh: self.duration("IDENTITY_MIN_REFRESH")?.unwrap_or(Duration::from_secs(10)),
                max_refresh: self.duration("IDENTITY_MAX_REFRESH")?.unwrap_or(Duration::from_secs(24 * 3600)),
            }),
        };
        Ok(IdentityConfig {
            server_name: self.server_name(&local_name)?,
            trust_anchors: self.required("IDENTITY_TRUST_ANCHORS", "the mesh's trust anchors as PEM")?,
            local_name,
            source,
        })
    }

    /// The socket of the SPIFFE Workload API, a path with or without `unix:`; the older name only without the newer.
    fn workload_api(&self) -> Result<Option<PathBuf>, ConfigError> {
        let socket = |name| {
            self.parse(name, "a unix socket such as unix:///run/spire/sockets/agent.sock", |value| {
                let path = value.strip_prefix("unix:").unwrap_or(value);
                // Two more slashes are those of a URI without an authority.
                let path = path.strip_prefix("//").unwrap_or(path);
                path.starts_with('/').then(|| PathBuf::from(path))
            })
        };
        let newer = socket("IDENTITY_SPIRE_WORKLOAD_API_ADDRESS")?;
        let older = socket("IDENTITY_SPIRE_SOCKET")?;
        Ok(newer.or(older))
    }

    /// Bounds of the TTLs of DNS records.
    pub(super) fn dns(&self) -> Result<DnsConfig, ConfigError> {
        let (min, max) = (self.duration("DNS_MIN_TTL")?, self.duration("DNS_MAX_TTL")?);
        if min.zip(max).is_some_and(|(min, max)| min > max) {
            return Err(invalid("DNS_MIN_TTL", "a duration of at most LINKERD2_PROXY_DNS_MAX_TTL"));
        }
        Ok(DnsConfig { min, max })
    }

    /// The length of a listener's queue.
    pub(super) fn backlog(&self, name: &str) -> Result<Backlog, ConfigError> {
        let positive = |value: &str| value.parse().ok().filter(|length: &i32| *length > 0).map(Backlog);
        Ok(self.parse(name, "a number of connections above 0", positive)?.unwrap_or_default())
    }

    fn local_name(&self) -> Result<Identity, ConfigError> {
        let local = self.identity("IDENTITY_LOCAL_NAME")?;
        // The injector always sets the other one, so this one is what somebody asked for.
        let server = self.identity("IDENTITY_SERVER_ID")?;
        server.or(local).ok_or(ConfigError::Missing {
            variable: format!("{PREFIX}IDENTITY_LOCAL_NAME"),
            expected: "this workload's identity, a DNS name",
        })
    }

    /// The TLS server name of clients: by default the identity, if that is a DNS name.
    fn server_name(&self, own: &Identity) -> Result<Box<str>, ConfigError> {
        match (self.identity("IDENTITY_SERVER_NAME")?, own) {
            (Some(Identity::Dns(name)), _) => Ok((&*name).into()),
            (Some(Identity::Uri(_)), _) => Err(invalid("IDENTITY_SERVER_NAME", "a DNS name")),
            (None, Identity::Dns(name)) => Ok((&**name).into()),
            (None, Identity::Uri(_)) => {
                let expected = "the DNS name that clients ask for in TLS, because the identity is a URI";
                Err(ConfigError::Missing { variable: format!("{PREFIX}IDENTITY_SERVER_NAME"), expected })
            }
        }
    }

    pub(super) fn log_json(&self) -> Result<bool, ConfigError> {
        let json = self.parse("LOG_FORMAT", "plain or json", |value| match value.to_ascii_lowercase().as_str() {
            "plain" => Some(false),
            "json" => Some(true),
            _ => None,
        })?;
        Ok(json.unwrap_or(false))
    }

    /// Whether a filter is set that does not exclude headers.
    pub(super) fn log_headers(&self) -> bool {
        let filter = self.string("LOG");
        filter.is_some_and(|filter| !filter.split(',').any(|directive| directive.trim() == "[{headers}]=off"))
    }

    /// Whether the tap server is enabled, and for whom. The injector always sets the address.
    pub(super) fn tap(&self) -> Result<Option<TapConfig>, ConfigError> {
        let listen = self.socket_addr("CONTROL_LISTEN_ADDR")?;
        let listen = listen.unwrap_or(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 4190)));
        Ok(self.identity("TAP_SVC_NAME")?.map(|client| TapConfig { listen, client }))
    }

    pub(super) fn access_log(&self) -> Result<Option<AccessLogFormat>, ConfigError> {
        self.parse("ACCESS_LOG", "apache or json", |value| match value.to_ascii_lowercase().as_str() {
            "apache" => Some(AccessLogFormat::Apache),
            "json" => Some(AccessLogFormat::Json),
            _ => None,
        })
    }

    pub(super) fn require_redirect(&self) -> Result<bool, ConfigError> {
        Ok(self.parse_own("REQUIRE_REDIRECT", "true or false", boolean)?.unwrap_or(false))
    }

    pub(super) fn require_mtls(&self) -> Result<bool, ConfigError> {
        Ok(self.parse_own("REQUIRE_MTLS", "true or false", boolean)?.unwrap_or(false))
    }

    pub(super) fn policy_timeout(&self) -> Result<Duration, ConfigError> {
        let timeout = self.parse_own("INBOUND_POLICY_TIMEOUT", DURATION, duration::parse)?;
        Ok(timeout.unwrap_or(Duration::from_secs(10)))
    }

    pub(super) fn http1_client_timeout(&self) -> Result<Duration, ConfigError> {
        let timeout = self.parse_own("HTTP1_IDLE_TIMEOUT", DURATION, duration::parse)?;
        Ok(timeout.filter(|timeout| !timeout.is_zero()).unwrap_or(Duration::from_secs(600)))
    }

    pub(super) fn max_in_flight_of_a_client(&self) -> Result<Option<usize>, ConfigError> {
        self.parse_own("INBOUND_MAX_IN_FLIGHT_PER_CLIENT", "a number above zero", |value| {
            value.parse().ok().filter(|limit| *limit > 0)
        })
    }

    pub(super) fn unanswered(&self) -> Result<Unanswered, ConfigError> {
        let unanswered = self.parse_own("INBOUND_POLICY_UNANSWERED", "default or deny", |value| match value {
            "default" => Some(Unanswered::Default),
            "deny" => Some(Unanswered::Deny),
            _ => None,
        })?;
        Ok(unanswered.unwrap_or(Unanswered::Default))
    }

    /// A setting that Linkerd does not have.
    fn parse_own<T>(
        &self,
        name: &str,
        expected: &'static str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let variable = format!("{OWN_PREFIX}{name}");
        let Some(value) = (self.0)(&variable).filter(|value| !value.trim().is_empty()) else { return Ok(None) };
        read(value.trim()).map(Some).ok_or(ConfigError::Invalid { variable, expected })
    }
}

fn invalid(name: &str, expected: &'static str) -> ConfigError {
    ConfigError::Invalid { variable: format!("{PREFIX}{name}"), expected }
}

fn boolean(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Some(true),
        "false" | "0" | "no" => Some(false),
        _ => None,
    }
}

fn list<T: FromStr>(value: &str) -> Option<Vec<T>> {
    value.split(',').map(str::trim).filter(|item| !item.is_empty()).map(|item| item.parse().ok()).collect()
}

fn ports(value: &str) -> Option<Vec<u16>> {
    let mut ports = Vec::new();
    for item in value.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        match item.split_once('-') {
            None => ports.push(item.parse().ok()?),
            Some((first, last)) => {
                let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
                if first > last {
                    return None;
                }
                ports.extend(first..=last);
            }
        }
    }
    ports.sort_unstable();
    ports.dedup();
    (!ports.contains(&0)).then_some(ports)
}

fn host_port(value: &str) -> Option<(String, u16)> {
    let (host, port) = value.rsplit_once(':')?;
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(v6) => v6.parse::<IpAddr>().ok()?.to_string(),
        None if host.is_empty() || host.contains([':', '/', ' ']) => return None,
        None => host.to_owned(),
    };
    Some((host, port))
}
