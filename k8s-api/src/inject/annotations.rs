//! The `config.linkerd.io/*` annotations of one pod, parsed once.

use std::{collections::BTreeMap, str::FromStr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::EnvVar;

use super::redirection::Exemption;
use crate::{
    labels,
    policy::{Cidr, DefaultPolicy},
    ports::{PortList, PortSet},
};

/// An annotation that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation}: bad value {value:?}, expected {expected}")]
pub struct InjectError {
    /// Its name.
    pub annotation: &'static str,
    /// Its value.
    pub value: String,
    /// What would have been accepted.
    pub expected: &'static str,
}

/// Settings of one pod; absent ones are the mesh's to decide.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    pub(super) image: Option<String>,
    pub(super) version: Option<String>,
    pub(super) image_pull_policy: Option<String>,
    pub(super) uid: Option<i64>,
    pub(super) gid: Option<i64>,
    pub(super) exemption: Option<Exemption>,
    pub(super) bypass: bool,
    pub(super) control_port: Option<u16>,
    pub(super) inbound_port: Option<u16>,
    pub(super) outbound_port: Option<u16>,
    pub(super) admin_port: Option<u16>,
    pub(super) inbound_ports: Option<PortSet>,
    pub(super) opaque_ports: Option<PortList>,
    pub(super) skip_inbound_ports: Option<PortSet>,
    pub(super) skip_outbound_ports: Option<PortSet>,
    pub(super) skip_subnets: Option<Vec<IpNet>>,
    pub(super) default_policy: Option<DefaultPolicy>,
    pub(super) require_identity_ports: Option<String>,
    pub(super) log_level: Option<String>,
    pub(super) log_format: Option<String>,
    pub(super) access_log: Option<String>,
    pub(super) admin_shutdown: Option<bool>,
    pub(super) grace_period: Option<String>,
    pub(super) inbound_connect_timeout: Option<String>,
    pub(super) outbound_connect_timeout: Option<String>,
    pub(super) inbound_cache_timeout: Option<String>,
    pub(super) outbound_cache_timeout: Option<String>,
    pub(super) no_inbound_detect_timeout: bool,
    pub(super) no_outbound_detect_timeout: bool,
    pub(super) external_profiles: bool,
    pub(super) cpu: (Option<String>, Option<String>),
    pub(super) memory: (Option<String>, Option<String>),
    pub(super) additional_env: Vec<EnvVar>,
}

const BOOL: &str = "true or false";
const PORT: &str = "a port, 1-65535";
const PORTS: &str = "ports 1-65535 or ranges such as 8000-8100, separated by commas";
const PORTS_OR_NAMES: &str = "ports 1-65535, ranges such as 8000-8100 or port names, separated by commas";
const DURATION: &str = "an integer and a unit ms, s, m, h or d, such as 500ms";
const QUANTITY: &str = "a Kubernetes quantity such as 100m or 64Mi";
const POLICY: &str =
    "all-unauthenticated, all-authenticated, cluster-authenticated, cluster-unauthenticated, deny or audit";

impl Settings {
    /// Reads what is there; what cannot be read is returned beside it, in the order of this list.
    pub(super) fn read(annotations: &BTreeMap<String, String>) -> (Self, Vec<InjectError>) {
        let mut from = Annotations { annotations, errors: Vec::new() };
        let settings = Self {
            image: from.text(labels::PROXY_IMAGE),
            version: from.text(labels::CONFIG_PROXY_VERSION),
            image_pull_policy: from.one_of(
                labels::IMAGE_PULL_POLICY,
                &["Always", "IfNotPresent", "Never"],
                "Always, IfNotPresent or Never",
            ),
            uid: from.parse_if(labels::PROXY_UID_ANNOTATION, "a user id above 0", |uid: &i64| *uid > 0),
            gid: from.parse_if(labels::PROXY_GID_ANNOTATION, "a group id, 0 or above", |gid: &i64| *gid >= 0),
            exemption: from.parse(labels::PROXY_EXEMPTION, "user or cgroup"),
            bypass: from.parse(labels::BYPASS, BOOL).unwrap_or(false),
            control_port: from.port(labels::CONTROL_PORT_ANNOTATION),
            inbound_port: from.port(labels::INBOUND_PORT_ANNOTATION),
            outbound_port: from.port(labels::OUTBOUND_PORT_ANNOTATION),
            admin_port: from.port(labels::ADMIN_PORT_ANNOTATION),
            inbound_ports: from.parse(labels::POD_INBOUND_PORTS, PORTS),
            opaque_ports: from.parse(labels::OPAQUE_PORTS, PORTS_OR_NAMES),
            skip_inbound_ports: from.parse(labels::SKIP_INBOUND_PORTS, PORTS),
            skip_outbound_ports: from.parse(labels::SKIP_OUTBOUND_PORTS, PORTS),
            skip_subnets: from
                .parse::<Subnets>(labels::SKIP_SUBNETS, "CIDRs separated by commas")
                .map(|subnets| subnets.0),
            default_policy: from.parse(labels::DEFAULT_INBOUND_POLICY, POLICY),
            require_identity_ports: from
                .parse::<PortSet>(labels::REQUIRE_IDENTITY_PORTS, PORTS)
                .map(|ports| ports.to_string()),
            log_level: from.text(labels::LOG_LEVEL),
            log_format: from.one_of(labels::LOG_FORMAT, &["plain", "json"], "plain or json"),
            access_log: from.one_of(labels::ACCESS_LOG, &["apache", "json"], "apache or json"),
            admin_shutdown: from.parse(labels::ADMIN_SHUTDOWN, BOOL),
            grace_period: from.duration(labels::SHUTDOWN_GRACE_PERIOD),
            inbound_connect_timeout: from.duration(labels::INBOUND_CONNECT_TIMEOUT),
            outbound_connect_timeout: from.duration(labels::OUTBOUND_CONNECT_TIMEOUT),
            inbound_cache_timeout: from.duration(labels::INBOUND_CACHE_TIMEOUT),
            outbound_cache_timeout: from.duration(labels::OUTBOUND_CACHE_TIMEOUT),
            no_inbound_detect_timeout: from.parse(labels::DISABLE_INBOUND_DETECT_TIMEOUT, BOOL).unwrap_or(false),
            no_outbound_detect_timeout: from.parse(labels::DISABLE_OUTBOUND_DETECT_TIMEOUT, BOOL).unwrap_or(false),
            external_profiles: from.parse(labels::ENABLE_EXTERNAL_PROFILES, BOOL).unwrap_or(false),
            cpu: (from.quantity(labels::PROXY_CPU_REQUEST), from.quantity(labels::PROXY_CPU_LIMIT)),
            memory: (from.quantity(labels::PROXY_MEMORY_REQUEST), from.quantity(labels::PROXY_MEMORY_LIMIT)),
            additional_env: from
                .parse::<EnvList>(labels::PROXY_ADDITIONAL_ENV, "a JSON list of {\"name\", \"value\"}")
                .unwrap_or_default()
                .0,
        };
        // A proxy that starts beside or after the application would leave its first connections unredirected or refused.
        from.one_of(labels::NATIVE_SIDECAR, &["true"], "true: Weft's proxy is always a native sidecar");
        (settings, from.errors)
    }
}

struct Annotations<'a> {
    annotations: &'a BTreeMap<String, String>,
    errors: Vec<InjectError>,
}

impl Annotations<'_> {
    fn text(&self, name: &str) -> Option<String> {
        self.annotations.get(name).filter(|value| !value.is_empty()).cloned()
    }

    fn parse<T: FromStr>(&mut self, name: &'static str, expected: &'static str) -> Option<T> {
        self.parse_if(name, expected, |_| true)
    }

    fn parse_if<T: FromStr>(
        &mut self,
        name: &'static str,
        expected: &'static str,
        valid: impl Fn(&T) -> bool,
    ) -> Option<T> {
        let value = self.annotations.get(name)?;
        let parsed = value.trim().parse().ok().filter(valid);
        if parsed.is_none() {
            self.errors.push(InjectError { annotation: name, value: value.clone(), expected });
        }
        parsed
    }

    fn port(&mut self, name: &'static str) -> Option<u16> {
        self.parse_if(name, PORT, |port: &u16| *port != 0)
    }

    fn one_of(&mut self, name: &'static str, values: &[&str], expected: &'static str) -> Option<String> {
        self.parse_if(name, expected, |value: &String| values.contains(&value.as_str()))
    }

    fn duration(&mut self, name: &'static str) -> Option<String> {
        self.parse_if(name, DURATION, |value: &String| is_duration(value))
    }

    fn quantity(&mut self, name: &'static str) -> Option<String> {
        self.parse_if(name, QUANTITY, |value: &String| is_quantity(value))
    }
}

struct Subnets(Vec<IpNet>);

impl FromStr for Subnets {
    type Err = crate::policy::CidrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        parts.map(|part| part.parse::<Cidr>().map(|cidr| cidr.0)).collect::<Result<_, _>>().map(Self)
    }
}

#[derive(Default)]
struct EnvList(Vec<EnvVar>);

impl FromStr for EnvList {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(text).map(Self)
    }
}

/// The proxy's own syntax of durations: an integer and a unit, or a bare 0.
fn is_duration(text: &str) -> bool {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[digits.len()..];
    digits
        .parse::<u64>()
        .is_ok_and(|number| matches!(unit, "ms" | "s" | "m" | "h" | "d") || (unit.is_empty() && number == 0))
}

/// Kubernetes' quantities: a decimal number and a binary, decimal or exponent suffix.
pub(crate) fn is_quantity(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = &text[number.len()..];
    number.parse::<f64>().is_ok_and(|number| number >= 0.0)
        && matches!(
            suffix,
            "" | "n" | "u" | "m" | "k" | "M" | "G" | "T" | "P" | "E" | "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei"
        )
}
