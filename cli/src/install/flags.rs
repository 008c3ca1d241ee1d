//! Linkerd's flags of `install` and `upgrade`, with its names: each stands for values of the chart.
//!
//! A flag is one row of [`FLAGS`]. Files and `--set` take precedence over flags, as with Linkerd. A flag without help
//! sets a value that Weft does not act on: the chart says so, with the reason.

use std::fs;

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_json::Value;
use weft_k8s_api::boolean;

use crate::chart::{self, values};

/// What a flag takes, and what becomes of it.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A text; the name of what it is in the help.
    Text(&'static str),
    /// A whole number, as for `Text`.
    Number(&'static str),
    /// Several, separated by commas or in several flags; the value is one text.
    List(&'static str),
    /// The path of a file, whose text is the value.
    File,
    /// The value of `--flag`, and that of `--flag=false`.
    Switch(&'static str, &'static str),
    /// The registry of the images that the values name.
    Registry,
}
use Kind::{File, List, Number, Registry, Switch, Text};

/// A flag.
#[derive(Debug)]
struct Flag {
    name: &'static str,
    kind: Kind,
    /// Of the values that it sets.
    paths: &'static [&'static str],
    help: &'static str,
}

const fn flag(name: &'static str, kind: Kind, paths: &'static [&'static str], help: &'static str) -> Flag {
    Flag { name, kind, paths, help }
}

const ON: Kind = Switch("true", "false");
const OFF: Kind = Switch("false", "true");
const EXTERNAL: Kind = Switch("kubernetes.io/tls", "linkerd.io/tls");
const IMAGES: &[&str] = &["controllerImage", "proxy.image.name", "agent.image.name"];
const VERSIONS: &[&str] = &["controllerImageVersion", "agent.image.version"];
const PULL_POLICIES: &[&str] = &["imagePullPolicy", "proxy.image.pullPolicy", "agent.image.pullPolicy"];

/// Groups of the help, with their flags. Of two flags that set one value, the later one adds to the earlier one.
const FLAGS: &[(&str, &[Flag])] = &[
    (
        "Control plane",
        &[
            flag("cluster-domain", Text("DOMAIN"), &["clusterDomain"], "Domain of the cluster's DNS names"),
            flag("controller-gid", Number("GID"), &["controllerGID"], "Group of the control plane's processes"),
            flag("controller-log-level", Text("LEVEL"), &["controllerLogLevel"], "Log level of the control plane"),
            flag("controller-replicas", Number("NUMBER"), &["controllerReplicas"], "Replicas of each Deployment"),
            flag("controller-uid", Number("UID"), &["controllerUID"], "User of the control plane's processes"),
            flag("disable-h2-upgrade", OFF, &["enableH2Upgrade"], "Let HTTP/1 stay HTTP/1 between proxies"),
            flag("enable-endpoint-slices", ON, &["enableEndpointSlices"], "Read EndpointSlices; =false: Endpoints"),
            flag("control-plane-tracing", ON, &["controlPlaneTracing"], ""),
            flag("control-plane-tracing-namespace", Text("NAMESPACE"), &["controlPlaneTracingNamespace"], ""),
            flag("disable-heartbeat", ON, &["disableHeartBeat"], ""),
            flag("linkerd-cni-enabled", ON, &["cniEnabled"], ""),
        ],
    ),
    (
        "Identity",
        &[
            flag("identity-trust-anchors-file", File, &["identityTrustAnchorsPEM"], "Trust anchors of the mesh, PEM"),
            flag(
                "identity-issuer-certificate-file",
                File,
                &["identity.issuer.tls.crtPEM"],
                "Certificate that signs those of proxies, PEM",
            ),
            flag("identity-issuer-key-file", File, &["identity.issuer.tls.keyPEM"], "Its private key, PEM"),
            flag("identity-trust-domain", Text("DOMAIN"), &["identityTrustDomain"], "Trust domain of identities"),
            flag(
                "identity-external-issuer",
                EXTERNAL,
                &["identity.issuer.scheme"],
                "Another tool, such as cert-manager, makes the Secret with the issuer",
            ),
            flag(
                "identity-external-ca",
                ON,
                &["identity.externalCA"],
                "Another tool, such as trust-manager, makes the ConfigMap with the trust anchors",
            ),
            flag(
                "identity-issuance-lifetime",
                Text("DURATION"),
                &["identity.issuer.issuanceLifetime"],
                "Validity of proxies' certificates",
            ),
            flag(
                "identity-clock-skew-allowance",
                Text("DURATION"),
                &["identity.issuer.clockSkewAllowance"],
                "Difference of clocks that certificates allow for",
            ),
        ],
    ),
    (
        "Images",
        &[
            flag("control-plane-version", Text("VERSION"), VERSIONS, "Tag of the images of control plane and agent"),
            flag("image-pull-policy", Text("POLICY"), PULL_POLICIES, "Pull policy: Always, IfNotPresent or Never"),
            flag("proxy-image", Text("IMAGE"), &["proxy.image.name"], "Image of the proxy, without its tag"),
            flag("proxy-version", Text("VERSION"), &["proxy.image.version"], "Tag or digest of the proxy's image"),
            flag("registry", Registry, IMAGES, "Registry of the images, such as registry.example:5000/mesh"),
            flag("init-image", Text("IMAGE"), &["proxyInit.image.name"], ""),
            flag("init-image-version", Text("VERSION"), &["proxyInit.image.version"], ""),
        ],
    ),
    (
        "Proxy",
        &[
            flag("admin-port", Number("PORT"), &["proxy.ports.admin"], "Port of the proxy's admin server"),
            flag("control-port", Number("PORT"), &["proxy.ports.control"], "Port of the proxy's tap server"),
            flag("inbound-port", Number("PORT"), &["proxy.ports.inbound"], "Port for connections to the pod"),
            flag("outbound-port", Number("PORT"), &["proxy.ports.outbound"], "Port for connections from the pod"),
            flag(
                "default-inbound-policy",
                Text("POLICY"),
                &["proxy.defaultInboundPolicy"],
                "Policy of ports that no Server selects, such as all-authenticated or deny",
            ),
            flag(
                "enable-external-profiles",
                ON,
                &["proxy.enableExternalProfiles"],
                "Also look up profiles of names outside the cluster",
            ),
            flag("opaque-ports", List("PORTS"), &["proxy.opaquePorts"], "Ports without protocol detection"),
            flag(
                "skip-inbound-ports",
                List("PORTS"),
                &["proxyInit.ignoreInboundPorts"],
                "Inbound ports that bypass the proxy: numbers and ranges, separated by commas",
            ),
            flag(
                "skip-outbound-ports",
                List("PORTS"),
                &["proxyInit.ignoreOutboundPorts"],
                "Outbound ports that bypass the proxy: numbers and ranges, separated by commas",
            ),
            flag("proxy-cpu-limit", Text("QUANTITY"), &["proxy.resources.cpu.limit"], "Most CPU of a proxy"),
            flag("proxy-cpu-request", Text("QUANTITY"), &["proxy.resources.cpu.request"], "CPU that a proxy requests"),
            flag("proxy-memory-limit", Text("QUANTITY"), &["proxy.resources.memory.limit"], "Most memory of a proxy"),
            flag(
                "proxy-memory-request",
                Text("QUANTITY"),
                &["proxy.resources.memory.request"],
                "Memory that a proxy requests",
            ),
            flag("proxy-log-level", Text("FILTER"), &["proxy.logLevel"], "Log filter of proxies"),
            flag("proxy-gid", Number("GID"), &["proxy.gid"], "Group of proxies"),
            flag("proxy-uid", Number("UID"), &["proxy.uid"], "User of proxies"),
            flag("native-sidecar", ON, &["proxy.nativeSidecar"], ""),
        ],
    ),
];

fn all() -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().flat_map(|(_, flags)| flags.iter())
}

impl Flag {
    fn arg(&self, group: &'static str) -> Arg {
        let arg = Arg::new(self.name).long(self.name).help(self.help).help_heading(group).hide(self.help.is_empty());
        let arg = match self.name {
            "proxy-version" => arg.short('v'),
            // Their older names.
            "proxy-cpu-request" => arg.alias("proxy-cpu"),
            "proxy-memory-request" => arg.alias("proxy-memory"),
            _ => arg,
        };
        match self.kind {
            Text(what) => arg.value_name(what),
            Number(what) => arg.value_name(what).allow_negative_numbers(true).value_parser(number),
            List(what) => arg.value_name(what).action(ArgAction::Append),
            File => arg.value_name("FILE"),
            Registry => arg.value_name("REGISTRY"),
            Switch(..) => arg
                .value_name("BOOL")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
                .value_parser(truth),
        }
    }

    /// What was given on the command line.
    fn given(&self, matches: &ArgMatches) -> Option<String> {
        let all = matches.try_get_many::<String>(self.name).ok()??;
        Some(all.map(String::as_str).collect::<Vec<_>>().join(","))
    }

    /// The new value; `None` if it equals the present one.
    fn value(&self, given: &str, present: Option<&str>) -> Result<Option<Value>> {
        let text = |text: &str| match text {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            text => Value::from(text),
        };
        Ok(match self.kind {
            Text(_) | List(_) => Some(Value::from(given)),
            Number(_) => Some(Value::from(given.parse::<i64>().with_context(|| format!("--{} {given}", self.name))?)),
            File => {
                let read = fs::read_to_string(given).with_context(|| format!("--{} {given}", self.name))?;
                Some(Value::from(read))
            }
            Switch(on, off) => Some(text(if given == "true" { on } else { off })),
            // The chart replaces Linkerd's images by Weft's, in the registry of the agent's.
            Registry => {
                let ours = present.filter(|image| !is_linkerds(image));
                ours.map(|image| Value::from(chart::image_in(given, image)))
            }
        })
    }
}

/// Whether an image is one that Linkerd's values name.
fn is_linkerds(image: &str) -> bool {
    let name = image.split('@').next().unwrap_or(image);
    ["linkerd/controller", "linkerd/proxy"].iter().any(|end| name == *end || name.ends_with(&format!("/{end}")))
}

/// Parser for clap: `true` or `false`, however it is written.
fn truth(text: &str) -> Result<String, String> {
    boolean::parse(text).map(|is| is.to_string()).ok_or_else(|| "expected true or false".to_owned())
}

/// Parser for clap.
fn number(text: &str) -> Result<String, String> {
    text.parse::<i64>().map(|_| text.to_owned()).map_err(|_| "expected a whole number".to_owned())
}

/// The flags that were given.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkerdArgs(Vec<(&'static Flag, String)>);

impl LinkerdArgs {
    /// Puts the values that the flags stand for into `values`, which differ from the chart's `defaults`.
    ///
    /// # Errors
    /// When a file cannot be read; the error names the flag.
    pub(super) fn onto(&self, values: &mut Value, defaults: &Value) -> Result<()> {
        for (flag, given) in &self.0 {
            for path in flag.paths {
                let pointer = format!("/{}", path.replace('.', "/"));
                let present = values.pointer(&pointer).or_else(|| defaults.pointer(&pointer)).and_then(Value::as_str);
                if let Some(value) = flag.value(given, present)? {
                    values::put(values, path, value)?;
                }
            }
        }
        Ok(())
    }

    /// The name of one of them.
    pub(super) fn first(&self) -> Option<&'static str> {
        self.0.first().map(|(flag, _)| flag.name)
    }
}

impl FromArgMatches for LinkerdArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(all().filter_map(|flag| Some((flag, flag.given(matches)?))).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for LinkerdArgs {
    fn augment_args(command: Command) -> Command {
        let rows = FLAGS.iter().flat_map(|(group, flags)| flags.iter().map(|flag| flag.arg(group)));
        command.args(rows.collect::<Vec<_>>())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

#[cfg(test)]
mod tests;
