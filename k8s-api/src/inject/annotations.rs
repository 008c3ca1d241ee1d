//! The annotations of one pod that configure its proxy and its redirection, parsed once.
//!
//! An unreadable annotation that decides about access is refused. Any other is ignored, as Linkerd does, and reported:
//! a namespace's misspelt timeout must not keep pods from starting.

use std::{collections::BTreeMap, fmt, time::Duration};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::EnvVar;

use super::exemption::Exemption;
use crate::{
    boolean, duration, labels,
    policy::{Cidr, DefaultPolicy},
    ports::{PortError, PortList, PortSet},
    quantity::{is_quantity, whole_cores},
};

/// How much of a value a message repeats, in characters: an annotation may have 256 KiB.
const SHOWN: usize = 64;

/// An annotation that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation}: {}", self.problem())]
pub struct InjectError {
    /// The whole name, with its prefix.
    pub annotation: &'static str,
    /// The whole value, up to 256 KiB; messages quote its beginning.
    pub value: String,
    /// The values that would have been accepted.
    pub expected: &'static str,
}

impl InjectError {
    /// What is wrong, without the annotation's name.
    pub(super) fn problem(&self) -> impl fmt::Display {
        format!("bad value {:?}, expected {}", shown(&self.value), self.expected)
    }
}

/// The part of a value that a message repeats.
pub(super) fn shown(value: &str) -> String {
    let mut part: String = value.chars().take(SHOWN).collect();
    if part.len() < value.len() {
        part.push('\u{2026}');
    }
    part
}

/// The parsed annotations of one pod.
#[derive(Clone, Debug, Default)]
pub(super) struct Reading {
    /// The readable ones.
    pub(super) settings: Settings,
    /// Unreadable ones that the pod must not run without: admitted clients, bypasses of the proxy.
    pub(super) refused: Vec<InjectError>,
    /// Unreadable ones for which the mesh's default applies, and unreadable entries of lists.
    pub(super) ignored: Vec<InjectError>,
}

/// Settings of one pod; for absent ones the mesh's default applies.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    pub(super) image: Option<String>,
    pub(super) version: Option<String>,
    pub(super) image_pull_policy: Option<String>,
    pub(super) uid: Option<i64>,
    pub(super) gid: Option<i64>,
    pub(super) exemption: Option<Exemption>,
    pub(super) bypass: bool,
    pub(super) require_mtls: bool,
    pub(super) disable_tap: bool,
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
    pub(super) grace_period: Option<Duration>,
    pub(super) inbound_connect_timeout: Option<Duration>,
    pub(super) outbound_connect_timeout: Option<Duration>,
    pub(super) inbound_cache_timeout: Option<Duration>,
    pub(super) outbound_cache_timeout: Option<Duration>,
    pub(super) no_inbound_detect_timeout: Option<bool>,
    pub(super) no_outbound_detect_timeout: Option<bool>,
    pub(super) external_profiles: Option<bool>,
    pub(super) gateway: bool,
    pub(super) log_http_headers: Option<bool>,
    pub(super) hostname_labels: Option<bool>,
    pub(super) wait_before_exit: Option<u32>,
    pub(super) debug: bool,
    pub(super) debug_image: Option<String>,
    pub(super) debug_version: Option<String>,
    pub(super) debug_pull_policy: Option<String>,
    pub(super) trace_attributes: BTreeMap<String, String>,
    pub(super) cpu: (Option<String>, Option<String>),
    pub(super) memory: (Option<String>, Option<String>),
    pub(super) storage: (Option<String>, Option<String>),
    pub(super) cpu_ratio: Option<f64>,
    pub(super) additional_env: Vec<EnvVar>,
}

const BOOL: &str = "true or false";
const PORT: &str = "a port, 1-65535";
const PORTS: &str = "ports 1-65535 or ranges such as 8000-8100, separated by commas";
const DURATION: &str = "numbers with units, such as 500ms or 1m30s";
const QUANTITY: &str = "a Kubernetes quantity such as 100m or 64Mi";
const POLICY: &str =
    "all-unauthenticated, all-authenticated, cluster-authenticated, cluster-unauthenticated, deny or audit";
/// Kubernetes' largest user and group id (`k8s.io/apimachinery/pkg/util/validation`, IsValidUserID).
const MAX_ID: i64 = i32::MAX as i64;

impl Settings {
    /// Least and most worker threads, which follow the annotated request and limit of CPU as in Linkerd
    /// (`linkerd2:pkg/inject/inject.go`, ToWholeCPUCores).
    pub(super) fn worker_bounds(&self) -> (Option<u32>, Option<u32>) {
        let cores = |quantity: &Option<String>| quantity.as_deref().and_then(whole_cores);
        (cores(&self.cpu.0), cores(&self.cpu.1))
    }

    /// Parses the annotations that Weft knows.
    pub(super) fn read(annotations: &BTreeMap<String, String>) -> Reading {
        let mut from = Annotations { annotations, refused: Vec::new(), ignored: Vec::new() };
        let settings = Self {
            image: from.text(labels::PROXY_IMAGE),
            version: from.text(labels::CONFIG_PROXY_VERSION),
            image_pull_policy: from.pull_policy(labels::IMAGE_PULL_POLICY),
            uid: from.setting(labels::PROXY_UID_ANNOTATION, "a user id above 0", |text| {
                text.parse().ok().filter(|uid| (1..=MAX_ID).contains(uid))
            }),
            gid: from.setting(labels::PROXY_GID_ANNOTATION, "a group id, or -1 for the image's", |text| {
                text.parse().ok().filter(|gid| *gid <= MAX_ID)
            }),
            exemption: from.policy(labels::PROXY_EXEMPTION, "user or cgroup", |text| text.parse().ok()),
            bypass: from.policy(labels::BYPASS, BOOL, boolean::parse).unwrap_or(false),
            require_mtls: from.policy(labels::REQUIRE_MTLS, BOOL, boolean::parse).unwrap_or(false),
            disable_tap: from.disables_tap(),
            control_port: from.port(labels::CONTROL_PORT_ANNOTATION),
            inbound_port: from.port(labels::INBOUND_PORT_ANNOTATION),
            outbound_port: from.port(labels::OUTBOUND_PORT_ANNOTATION),
            admin_port: from.port(labels::ADMIN_PORT_ANNOTATION),
            inbound_ports: from.setting(labels::POD_INBOUND_PORTS, PORTS, |text| text.parse().ok()),
            opaque_ports: from.port_list(labels::OPAQUE_PORTS),
            skip_inbound_ports: from.policy(labels::SKIP_INBOUND_PORTS, PORTS, |text| text.parse().ok()),
            skip_outbound_ports: from.policy(labels::SKIP_OUTBOUND_PORTS, PORTS, |text| text.parse().ok()),
            skip_subnets: from.policy(labels::SKIP_SUBNETS, "CIDRs separated by commas", subnets),
            default_policy: from.policy(labels::DEFAULT_INBOUND_POLICY, POLICY, |text| text.parse().ok()),
            require_identity_ports: from.policy(labels::REQUIRE_IDENTITY_PORTS, PORTS, |text| {
                text.parse::<PortSet>().ok().map(|ports| ports.to_string())
            }),
            log_level: from.text(labels::LOG_LEVEL),
            log_format: from.one_of(labels::LOG_FORMAT, &["plain", "json"], "plain or json"),
            access_log: from.one_of(labels::ACCESS_LOG, &["apache", "json"], "apache or json"),
            admin_shutdown: from.setting(labels::ADMIN_SHUTDOWN, "enabled or disabled", |text| match text {
                "enabled" => Some(true),
                "disabled" => Some(false),
                _ => None,
            }),
            grace_period: from.duration(labels::SHUTDOWN_GRACE_PERIOD),
            inbound_connect_timeout: from.duration(labels::INBOUND_CONNECT_TIMEOUT),
            outbound_connect_timeout: from.duration(labels::OUTBOUND_CONNECT_TIMEOUT),
            inbound_cache_timeout: from.duration(labels::INBOUND_CACHE_TIMEOUT),
            outbound_cache_timeout: from.duration(labels::OUTBOUND_CACHE_TIMEOUT),
            no_inbound_detect_timeout: from.flag(labels::DISABLE_INBOUND_DETECT_TIMEOUT),
            no_outbound_detect_timeout: from.flag(labels::DISABLE_OUTBOUND_DETECT_TIMEOUT),
            external_profiles: from.flag(labels::ENABLE_EXTERNAL_PROFILES),
            gateway: from.flag(labels::ENABLE_GATEWAY).unwrap_or(false),
            log_http_headers: from.setting(labels::LOG_HTTP_HEADERS, "insecure or off", |text| match text {
                "insecure" => Some(true),
                "off" => Some(false),
                _ => None,
            }),
            hostname_labels: from.flag(labels::METRICS_HOSTNAME_LABELS),
            wait_before_exit: from.setting(labels::WAIT_BEFORE_EXIT, "whole seconds", |text| text.parse().ok()),
            debug: from.flag(labels::ENABLE_DEBUG_SIDECAR).unwrap_or(false),
            debug_image: from.text(labels::DEBUG_IMAGE),
            debug_version: from.text(labels::DEBUG_IMAGE_VERSION),
            debug_pull_policy: from.pull_policy(labels::DEBUG_IMAGE_PULL_POLICY),
            trace_attributes: trace_attributes(annotations),
            cpu: (from.quantity(labels::PROXY_CPU_REQUEST), from.quantity(labels::PROXY_CPU_LIMIT)),
            memory: (from.quantity(labels::PROXY_MEMORY_REQUEST), from.quantity(labels::PROXY_MEMORY_LIMIT)),
            storage: (from.quantity(labels::PROXY_STORAGE_REQUEST), from.quantity(labels::PROXY_STORAGE_LIMIT)),
            cpu_ratio: from.setting(labels::PROXY_CPU_RATIO_LIMIT, "a ratio above 0 and at most 1", |text| {
                text.parse().ok().filter(|ratio| *ratio > 0.0 && *ratio <= 1.0)
            }),
            additional_env: from
                .setting(labels::PROXY_ADDITIONAL_ENV, "a JSON list of {\"name\", \"value\"}", |text| {
                    serde_json::from_str(text).ok()
                })
                .unwrap_or_default(),
        };
        // A proxy that starts beside or after the application would leave its first connections unredirected or
        // refused.
        for name in labels::NATIVE_SIDECAR {
            from.setting(name, "true: the proxy is always a native sidecar", |text| {
                boolean::parse(text).filter(|on| *on)
            });
        }
        from.setting(labels::PROXY_AWAIT, "enabled: the application always waits for the proxy", |text| {
            (text == "enabled").then_some(())
        });
        Reading { settings, refused: from.refused, ignored: from.ignored }
    }
}

struct Annotations<'a> {
    annotations: &'a BTreeMap<String, String>,
    refused: Vec<InjectError>,
    ignored: Vec<InjectError>,
}

impl Annotations<'_> {
    fn text(&self, name: &str) -> Option<String> {
        self.annotations.get(name).filter(|value| !value.is_empty()).cloned()
    }

    fn read<T>(
        &self,
        name: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<Result<T, InjectError>> {
        let value = self.annotations.get(name)?;
        let error = || InjectError { annotation: name, value: value.clone(), expected };
        Some(parse(value.trim()).ok_or_else(error))
    }

    /// A setting that the pod must not run without.
    fn policy<T>(
        &mut self,
        name: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let read = self.read(name, expected, parse)?;
        read.map_err(|error| self.refused.push(error)).ok()
    }

    /// A setting with a default.
    fn setting<T>(
        &mut self,
        name: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let read = self.read(name, expected, parse)?;
        read.map_err(|error| self.ignored.push(error)).ok()
    }

    fn port(&mut self, name: &'static str) -> Option<u16> {
        self.setting(name, PORT, |text| text.parse().ok().filter(|port| *port != 0))
    }

    /// Only the entries that cannot be read are ignored.
    fn port_list(&mut self, name: &'static str) -> Option<PortList> {
        let (list, bad) = PortList::read(self.annotations.get(name)?);
        let error = |bad: PortError| InjectError { annotation: name, value: bad.entry, expected: bad.expected };
        self.ignored.extend(bad.map(error));
        Some(list)
    }

    fn flag(&mut self, name: &'static str) -> Option<bool> {
        self.setting(name, BOOL, boolean::parse)
    }

    /// Linkerd's injector ignores what it cannot read, and enables tap.
    fn disables_tap(&mut self) -> bool {
        let (name, expected) = (labels::DISABLE_TAP, "true or false (tap stays disabled)");
        self.annotations.contains_key(name) && self.setting(name, expected, boolean::parse).unwrap_or(true)
    }

    fn pull_policy(&mut self, name: &'static str) -> Option<String> {
        self.one_of(name, &["Always", "IfNotPresent", "Never"], "Always, IfNotPresent or Never")
    }

    fn one_of(&mut self, name: &'static str, values: &[&str], expected: &'static str) -> Option<String> {
        self.setting(name, expected, |text| values.contains(&text).then(|| text.to_owned()))
    }

    fn duration(&mut self, name: &'static str) -> Option<Duration> {
        self.setting(name, DURATION, duration::parse)
    }

    fn quantity(&mut self, name: &'static str) -> Option<String> {
        self.setting(name, QUANTITY, |text| is_quantity(text).then(|| text.to_owned()))
    }
}

/// Attributes of traces. Each is a line of a variable, so a value has one line.
fn trace_attributes(annotations: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let named = annotations
        .iter()
        .filter_map(|(name, value)| Some((name.strip_prefix(labels::TRACE_ATTRIBUTE_PREFIX)?, value)));
    named.map(|(name, value)| (name.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" "))).collect()
}

fn subnets(text: &str) -> Option<Vec<IpNet>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| part.parse::<Cidr>().ok().map(|cidr| cidr.0)).collect()
}
