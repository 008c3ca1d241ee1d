//! Helm values of the mesh, as the chart stores them in ConfigMap `linkerd-config`: the settings of injected proxies
//! and of redirection.
//!
//! Values that no code here reads are ignored; a value that is read and has the wrong type or an invalid value is an
//! error with its path. Values may come from other charts of Linkerd's shape, so an absent one has Linkerd's default.

mod proxy;

use std::{fmt, str::FromStr};

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, de};

use crate::{
    field::{FieldPath, Invalid, Step},
    inject::{
        ControlPlaneAddrs, ExemptionRules, InjectConfig, ProxyPorts, ProxyResources, RedirectionDefaults, Skips,
        image_reference,
    },
    policy::{Cidr, DefaultPolicy},
    ports::PortSet,
    quantity::is_quantity,
};
use proxy::{DebugContainer, Proxy};

/// The values that are read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Values {
    #[serde(deserialize_with = "text")]
    cluster_domain: Option<String>,
    #[serde(deserialize_with = "text")]
    identity_trust_domain: Option<String>,
    #[serde(deserialize_with = "text")]
    cluster_networks: Option<String>,
    #[serde(rename = "disableIPv6")]
    disable_ipv6: Option<bool>,
    #[serde(deserialize_with = "text")]
    image_pull_policy: Option<String>,
    #[serde(deserialize_with = "text")]
    linkerd_version: Option<String>,
    proxy: Proxy,
    proxy_init: ProxyInit,
    debug_container: DebugContainer,
    agent: Agent,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Agent {
    #[serde(deserialize_with = "text")]
    proxy_exemption: Option<String>,
    enforce_proxy_exemption: Option<bool>,
    allow_bypass: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ProxyInit {
    #[serde(deserialize_with = "list")]
    ignore_inbound_ports: Option<String>,
    #[serde(deserialize_with = "list")]
    ignore_outbound_ports: Option<String>,
    #[serde(deserialize_with = "text")]
    skip_subnets: Option<String>,
    #[serde(rename = "kubeAPIServerPorts", deserialize_with = "list")]
    kube_api_server_ports: Option<String>,
}

impl Values {
    /// Parses YAML.
    ///
    /// # Errors
    /// When it is not YAML, or a value has the wrong type; the error names its path.
    pub fn parse(yaml: &str) -> Result<Self, Invalid> {
        let parsed = serde_path_to_error::deserialize(serde_yaml_ng::Deserializer::from_str(yaml));
        parsed.map_err(|error| {
            use serde_path_to_error::Segment;
            let steps = error.path().iter().filter_map(|segment| match segment {
                Segment::Seq { index } => Some(Step::Index(*index)),
                Segment::Map { key } => Some(Step::Key(key.clone())),
                Segment::Enum { variant } => Some(Step::Key(variant.clone())),
                Segment::Unknown => None,
            });
            FieldPath(steps.collect()).invalid(bare(error.inner()))
        })
    }

    /// Domain of the cluster's DNS names, without a final dot.
    pub fn cluster_domain(&self) -> &str {
        self.cluster_domain.as_deref().unwrap_or("cluster.local").trim_end_matches('.')
    }

    /// Settings of injection, for a control plane in `namespace` whose trust anchors are `anchors_pem`.
    ///
    /// # Errors
    /// When a value is invalid; the error names its path.
    pub fn inject_config(&self, namespace: &str, anchors_pem: &str) -> Result<InjectConfig, Invalid> {
        let proxy = &self.proxy;
        let name = proxy.image.name.as_ref().ok_or_else(|| missing("proxy.image.name", "the proxy's image"))?;
        let version = proxy.image.version.as_ref().or(self.linkerd_version.as_ref());
        let version = version.ok_or_else(|| missing("proxy.image.version", "the image's tag"))?;
        let mut config = InjectConfig::new(image_reference(name, version), version, anchors_pem);
        config.require_redirect = true;
        namespace.clone_into(&mut config.control_plane_namespace);
        self.cluster_domain().clone_into(&mut config.cluster_domain);
        // As in the chart, identities use the cluster's domain unless a trust domain is set.
        config.trust_domain = self.identity_trust_domain.clone().unwrap_or_else(|| config.cluster_domain.clone());
        config.control_plane = ControlPlaneAddrs::in_cluster(namespace, &config.cluster_domain, &config.trust_domain);
        if let Some(networks) = networks("clusterNetworks", self.cluster_networks.as_ref())? {
            config.cluster_networks = networks;
        }
        config.ipv6 = self.disable_ipv6 == Some(false);
        if let Some(policy) = proxy.image.pull_policy.as_ref().or(self.image_pull_policy.as_ref()) {
            let at = if proxy.image.pull_policy.is_some() { "proxy.image.pullPolicy" } else { "imagePullPolicy" };
            config.image_pull_policy = pull_policy(at, policy)?;
        }
        if let Some(level) = &proxy.log_level {
            config.log_level.clone_from(level);
        }
        if let Some(format) = &proxy.log_format {
            if !["plain", "json"].contains(&format.as_str()) {
                return Err(bad("proxy.logFormat", format, "plain or json"));
            }
            config.log_format.clone_from(format);
        }
        config.proxy_uid = self.proxy_uid()?;
        config.proxy_gid = proxy.gid.filter(|gid| *gid >= 0);
        config.exemption = self.exemption()?;
        config.skips = self.skips()?;
        config.ports = self.ports()?;
        config.resources = ProxyResources {
            cpu_request: quantity("proxy.resources.cpu.request", &proxy.resources.cpu.request)?,
            cpu_limit: quantity("proxy.resources.cpu.limit", &proxy.resources.cpu.limit)?,
            memory_request: quantity("proxy.resources.memory.request", &proxy.resources.memory.request)?,
            memory_limit: quantity("proxy.resources.memory.limit", &proxy.resources.memory.limit)?,
            storage_request: quantity("proxy.resources.ephemeral-storage.request", &proxy.resources.storage.request)?,
            storage_limit: quantity("proxy.resources.ephemeral-storage.limit", &proxy.resources.storage.limit)?,
        };
        if let Some(policy) = parse::<DefaultPolicy>("proxy.defaultInboundPolicy", &proxy.default_inbound_policy)? {
            config.default_inbound_policy = policy;
        }
        if let Some(ports) = parse("proxy.opaquePorts", &proxy.opaque_ports)? {
            config.default_opaque_ports = ports;
        }
        config.tap = proxy.tap();
        config.tuning = proxy.tuning()?;
        config.tuning.debug = Some(self.debug_container.image()?);
        config.extra_env = proxy.additional_env.clone().unwrap_or_default();
        Ok(config)
    }

    /// Redirection of pods without annotations.
    ///
    /// # Errors
    /// When a value is invalid; the error names its path.
    pub fn redirection(&self) -> Result<RedirectionDefaults, Invalid> {
        Ok(RedirectionDefaults {
            ports: self.ports()?,
            proxy_uid: self.proxy_uid()?,
            proxy_gid: self.proxy.gid.filter(|gid| *gid > 0),
            rules: self.exemption()?,
            skips: self.skips()?,
            control_plane_namespaces: Vec::new(),
        })
    }

    fn skips(&self) -> Result<Skips, Invalid> {
        let init = &self.proxy_init;
        let default = Skips::default();
        let ports = |path, value: &Option<String>, default: PortSet| {
            parse::<PortSet>(path, value).map(|ports| ports.unwrap_or(default))
        };
        Ok(Skips {
            inbound: ports("proxyInit.ignoreInboundPorts", &init.ignore_inbound_ports, default.inbound)?,
            outbound: ports("proxyInit.ignoreOutboundPorts", &init.ignore_outbound_ports, default.outbound)?,
            subnets: networks("proxyInit.skipSubnets", init.skip_subnets.as_ref())?.unwrap_or_default(),
            api_server_ports: ports(
                "proxyInit.kubeAPIServerPorts",
                &init.kube_api_server_ports,
                default.api_server_ports,
            )?,
        })
    }

    fn exemption(&self) -> Result<ExemptionRules, Invalid> {
        let default = ExemptionRules::default();
        Ok(ExemptionRules {
            default: parse("agent.proxyExemption", &self.agent.proxy_exemption)?.unwrap_or(default.default),
            enforced: self.agent.enforce_proxy_exemption.unwrap_or(default.enforced),
            bypass_allowed: self.agent.allow_bypass.unwrap_or(default.bypass_allowed),
        })
    }

    fn proxy_uid(&self) -> Result<i64, Invalid> {
        let uid = self.proxy.uid.unwrap_or(crate::labels::PROXY_UID);
        if uid > 0 { Ok(uid) } else { Err(bad("proxy.uid", &uid.to_string(), "a user id above 0")) }
    }

    fn ports(&self) -> Result<ProxyPorts, Invalid> {
        let (given, default) = (&self.proxy.ports, ProxyPorts::default());
        let port = |name: &str, port: Option<u16>, default: u16| match port {
            Some(0) => Err(bad(&format!("proxy.ports.{name}"), "0", "a port, 1-65535")),
            port => Ok(port.unwrap_or(default)),
        };
        Ok(ProxyPorts {
            admin: port("admin", given.admin, default.admin)?,
            control: port("control", given.control, default.control)?,
            inbound: port("inbound", given.inbound, default.inbound)?,
            outbound: port("outbound", given.outbound, default.outbound)?,
        })
    }
}

fn missing(path: &str, what: &str) -> Invalid {
    FieldPath::of(path).invalid(format!("missing, expected {what}"))
}

fn bad(path: &str, value: &str, expected: &str) -> Invalid {
    FieldPath::of(path).invalid(format!("bad value {value:?}, expected {expected}"))
}

fn pull_policy(path: &str, policy: &str) -> Result<String, Invalid> {
    match policy {
        "Always" | "IfNotPresent" | "Never" => Ok(policy.to_owned()),
        _ => Err(bad(path, policy, "Always, IfNotPresent or Never")),
    }
}

fn parse<T: FromStr<Err: fmt::Display>>(path: &str, value: &Option<String>) -> Result<Option<T>, Invalid> {
    let parsed = value.as_ref().map(|text| text.parse());
    parsed.transpose().map_err(|error| FieldPath::of(path).invalid(error))
}

fn quantity(path: &str, value: &Option<String>) -> Result<Option<String>, Invalid> {
    match value {
        Some(text) if !is_quantity(text) => Err(bad(path, text, "a Kubernetes quantity such as 100m or 64Mi")),
        value => Ok(value.clone()),
    }
}

fn networks(path: &str, value: Option<&String>) -> Result<Option<Vec<IpNet>>, Invalid> {
    let Some(text) = value else { return Ok(None) };
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let networks = parts.map(|part| part.parse::<Cidr>().map(|cidr| cidr.0)).collect::<Result<_, _>>();
    networks.map(Some).map_err(|error| FieldPath::of(path).invalid(error))
}

/// serde's message without the position and the path, which the error adds itself.
fn bare(error: &serde_yaml_ng::Error) -> String {
    let message = error.to_string();
    let message = message.split_once(": ").filter(|(path, _)| !path.contains(' ')).map_or(&*message, |(_, rest)| rest);
    match message.find(" at line ") {
        Some(end) if message.contains("expected") => message[..end].to_owned(),
        _ => message.to_owned(),
    }
}

/// Text. Empty means absent.
fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    list(deserializer).map(|text| text.filter(|text| !text.is_empty()))
}

/// The text of a list that has a default: an empty one is a list of nothing. A number counts as its digits, because
/// Helm turns `--set proxy.opaquePorts=25` into one.
fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    struct Scalar;
    impl de::Visitor<'_> for Scalar {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string")
        }

        fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
            Ok(Some(text.trim().to_owned()))
        }

        fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
            Ok(Some(number.to_string()))
        }

        fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
            Ok(Some(number.to_string()))
        }

        fn visit_f64<E>(self, number: f64) -> Result<Self::Value, E> {
            Ok(Some(number.to_string()))
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }
    }
    deserializer.deserialize_any(Scalar)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inject::{Exemption, TapClient};

    const FULL: &str = "
clusterDomain: mesh.example
identityTrustDomain: trust.example
clusterNetworks: 10.0.0.0/8, 192.168.0.0/16
disableIPv6: false
imagePullPolicy: Always
agent: {logLevel: info}
proxy:
  image: {name: registry/weft-proxy, version: 1.2.3, pullPolicy: Never}
  logLevel: debug
  logFormat: json
  uid: 3000
  gid: -1
  defaultInboundPolicy: deny
  opaquePorts: 25
  tap: {serviceAccountName: viz, namespace: observe}
  ports: {admin: 9191, control: 9190, inbound: 9143, outbound: 9140}
  resources: {cpu: {request: 1, limit: ''}, memory: {limit: 64Mi, request: null}}
proxyInit: {ignoreInboundPorts: '22,8000-8002', ignoreOutboundPorts: '', skipSubnets: 10.9.0.0/16}
";

    #[test]
    fn reads_what_the_chart_writes() {
        let values = Values::parse(FULL).unwrap();
        let config = values.inject_config("mesh", "anchors").unwrap();
        assert_eq!(values.cluster_domain(), "mesh.example");
        assert_eq!(config.proxy_image, "registry/weft-proxy:1.2.3");
        assert_eq!((config.proxy_version.as_str(), config.image_pull_policy.as_str()), ("1.2.3", "Never"));
        assert_eq!(config.control_plane.policy.addr, "linkerd-policy.mesh.svc.mesh.example.:8090");
        assert_eq!(
            config.control_plane.identity.name,
            "linkerd-identity.mesh.serviceaccount.identity.mesh.trust.example"
        );
        assert_eq!((config.cluster_networks.len(), config.ipv6, config.require_redirect), (2, true, true));
        assert_eq!((config.proxy_uid, config.proxy_gid), (3000, None));
        assert_eq!(config.ports, ProxyPorts { outbound: 9140, inbound: 9143, control: 9190, admin: 9191 });
        assert_eq!(config.tap, Some(TapClient { service_account: "viz".into(), namespace: "observe".into() }));
        assert_eq!(config.resources.cpu_request.as_deref(), Some("1"));
        assert_eq!(config.resources.cpu_limit, None);
        assert_eq!(config.resources.memory_limit.as_deref(), Some("64Mi"));
        assert_eq!(config.default_inbound_policy, DefaultPolicy::Deny);
        assert_eq!(config.default_opaque_ports.to_string(), "25");
        let redirection = values.redirection().unwrap();
        assert_eq!(redirection.skips.inbound.to_string(), "22,8000-8002");
        assert_eq!(redirection.skips.outbound, PortSet::default());
        assert_eq!(redirection.skips.subnets.len(), 1);
        assert_eq!(config.skips, redirection.skips);
        assert_eq!((redirection.proxy_uid, redirection.ports.inbound), (3000, 9143));
    }

    #[test]
    fn absent_values_have_linkerds_defaults() {
        let values = Values::parse("proxy: {image: {name: p, version: v}}").unwrap();
        let config = values.inject_config("linkerd", "anchors").unwrap();
        let expected = InjectConfig { require_redirect: true, ..InjectConfig::new("p:v", "v", "anchors") };
        assert_eq!(config, expected);
        assert_eq!(values.redirection().unwrap(), RedirectionDefaults::default());
    }

    #[test]
    fn an_empty_list_is_empty_and_an_absent_one_is_linkerds() {
        let lists = |section: &str, key: &str, value: &str| {
            let section = match section {
                "proxy" => format!("proxy: {{image: {{name: p, version: v}}, {key}: {value}}}"),
                _ => format!("proxy: {{image: {{name: p, version: v}}}}, {section}: {{{key}: {value}}}"),
            };
            let values = Values::parse(&format!("{{{section}}}")).unwrap();
            let config = values.inject_config("linkerd", "anchors").unwrap();
            assert_eq!(values.redirection().unwrap().skips, config.skips, "{key}: {value}");
            let Skips { inbound, outbound, api_server_ports, .. } = config.skips;
            [config.default_opaque_ports, inbound, outbound, api_server_ports].map(|list| list.to_string())
        };
        let default = ["25,587,3306,4444,5432,6379,9300,11211", "4567-4568", "4567-4568", ""];
        for (index, (section, key)) in [
            ("proxy", "opaquePorts"),
            ("proxyInit", "ignoreInboundPorts"),
            ("proxyInit", "ignoreOutboundPorts"),
            ("proxyInit", "kubeAPIServerPorts"),
        ]
        .into_iter()
        .enumerate()
        {
            for (value, expected) in [("null", default[index]), ("''", ""), ("' '", ""), ("80", "80")] {
                let mut all = default;
                all[index] = expected;
                assert_eq!(lists(section, key, value), all, "{key}: {value}");
            }
        }
    }

    #[test]
    fn images_may_have_digests() {
        for (image, expected) in [
            ("{name: p, version: v}", "p:v"),
            ("{name: p, version: 'sha256:ab'}", "p@sha256:ab"),
            ("{name: 'p@sha256:ab', version: v}", "p@sha256:ab"),
        ] {
            let values = Values::parse(&format!("proxy: {{image: {image}}}")).unwrap();
            assert_eq!(values.inject_config("linkerd", "anchors").unwrap().proxy_image, expected);
        }
    }

    #[test]
    fn the_administrators_rules_are_read() {
        let values = Values::parse("agent: {proxyExemption: cgroup, enforceProxyExemption: true, allowBypass: false}");
        let rules = ExemptionRules { default: Exemption::Cgroup, enforced: true, bypass_allowed: false };
        assert_eq!(values.unwrap().redirection().unwrap().rules, rules);
    }

    #[test]
    fn the_trust_domain_is_the_clusters_unless_it_is_said() {
        let values = Values::parse("{clusterDomain: mesh.example, proxy: {image: {name: p, version: v}}}").unwrap();
        assert_eq!(values.inject_config("linkerd", "anchors").unwrap().trust_domain, "mesh.example");
    }

    #[test]
    fn errors_name_the_path() {
        for (yaml, expected) in [
            ("proxy: {image: [1]}", "proxy.image: "),
            ("proxy: {uid: root}", "proxy.uid: invalid type: string \"root\", expected i64"),
            ("proxy: {ports: {admin: 70000}}", "proxy.ports.admin: "),
            (
                "proxy: {resources: {cpu: {limit: {}}}}",
                "proxy.resources.cpu.limit: invalid type: map, expected a string",
            ),
            ("proxyInit: {ignoreInboundPorts: [1]}", "proxyInit.ignoreInboundPorts: "),
            ("disableIPv6: maybe", "disableIPv6: "),
        ] {
            let error = Values::parse(yaml).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{yaml}: {error}");
        }
        assert!(Values::parse("proxy: [").is_err());
    }

    #[test]
    fn values_that_mean_nothing_are_named() {
        for (yaml, expected) in [
            ("{}", "proxy.image.name"),
            ("proxy: {image: {name: p}}", "proxy.image.version"),
            ("proxy: {image: {name: p, version: v}, uid: 0}", "proxy.uid"),
            ("proxy: {image: {name: p, version: v}, logFormat: xml}", "proxy.logFormat"),
            ("proxy: {image: {name: p, version: v, pullPolicy: Often}}", "proxy.image.pullPolicy"),
            ("proxy: {image: {name: p, version: v}, defaultInboundPolicy: all}", "proxy.defaultInboundPolicy"),
            ("proxy: {image: {name: p, version: v}, opaquePorts: many}", "proxy.opaquePorts"),
            (
                "proxy: {image: {name: p, version: v}, resources: {memory: {limit: big}}}",
                "proxy.resources.memory.limit",
            ),
            ("proxy: {image: {name: p, version: v}, ports: {admin: 0}}", "proxy.ports.admin"),
            ("{clusterNetworks: here, proxy: {image: {name: p, version: v}}}", "clusterNetworks"),
        ] {
            let error = Values::parse(yaml).unwrap().inject_config("linkerd", "anchors").unwrap_err();
            assert_eq!(error.field.to_string(), expected, "{yaml}: {error}");
        }
        let skip = Values::parse("proxyInit: {ignoreOutboundPorts: all}").unwrap().redirection().unwrap_err();
        assert_eq!(skip.field.to_string(), "proxyInit.ignoreOutboundPorts");
    }
}
