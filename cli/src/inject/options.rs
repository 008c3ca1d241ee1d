//! Settings of proxies on the command line, each of which becomes an annotation.

use anyhow::{Result, bail};
use clap::Args;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use weft_k8s_api::{inject, labels};

use crate::chart;

/// Linkerd's flags, with its names.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Proxy")]
pub(super) struct ProxyArgs {
    /// Lines about inbound requests: apache or json
    #[arg(long, value_name = "FORMAT")]
    access_log: Option<String>,
    /// Port of the proxy's admin server
    #[arg(long, value_name = "PORT")]
    admin_port: Option<String>,
    /// Port of the proxy's tap server
    #[arg(long, value_name = "PORT")]
    control_port: Option<String>,
    /// Image of the container with debugging tools
    #[arg(long, value_name = "IMAGE")]
    debug_image: Option<String>,
    /// Its tag or digest
    #[arg(long, value_name = "VERSION")]
    debug_image_version: Option<String>,
    /// Policy of ports that no Server selects, such as all-authenticated or deny
    #[arg(long, value_name = "POLICY")]
    default_inbound_policy: Option<String>,
    /// Add a container with debugging tools
    #[arg(long)]
    enable_debug_sidecar: bool,
    /// Also look up profiles of names outside the cluster
    #[arg(long)]
    enable_external_profiles: bool,
    /// Pull policy of the proxy's image: Always, IfNotPresent or Never
    #[arg(long, value_name = "POLICY")]
    image_pull_policy: Option<String>,
    /// Port on which the proxy accepts connections to the pod
    #[arg(long, value_name = "PORT")]
    inbound_port: Option<String>,
    /// Take the destination of each request from its headers, for ingress controllers
    #[arg(long)]
    ingress: bool,
    /// Ports without protocol detection: numbers, ranges and port names, separated by commas; also set on Services
    #[arg(long, value_name = "PORTS")]
    opaque_ports: Option<String>,
    /// Port on which the proxy accepts connections from the pod
    #[arg(long, value_name = "PORT")]
    outbound_port: Option<String>,
    /// Most CPU that the proxy may use
    #[arg(long, value_name = "QUANTITY")]
    proxy_cpu_limit: Option<String>,
    /// CPU that the proxy requests
    #[arg(long, alias = "proxy-cpu", value_name = "QUANTITY")]
    proxy_cpu_request: Option<String>,
    /// Group of the proxy
    #[arg(long, value_name = "GID")]
    proxy_gid: Option<String>,
    /// Image of the proxy
    #[arg(long, value_name = "IMAGE")]
    proxy_image: Option<String>,
    /// Log filter of the proxy
    #[arg(long, value_name = "FILTER")]
    proxy_log_level: Option<String>,
    /// Log format of the proxy: plain or json
    #[arg(long, value_name = "FORMAT")]
    proxy_log_format: Option<String>,
    /// Most memory that the proxy may use
    #[arg(long, value_name = "QUANTITY")]
    proxy_memory_limit: Option<String>,
    /// Memory that the proxy requests
    #[arg(long, alias = "proxy-memory", value_name = "QUANTITY")]
    proxy_memory_request: Option<String>,
    /// User of the proxy
    #[arg(long, value_name = "UID")]
    proxy_uid: Option<String>,
    /// Tag or digest of the proxy's image
    #[arg(short = 'v', long, value_name = "VERSION")]
    proxy_version: Option<String>,
    /// Registry of the proxy's image, such as registry.example:5000/mesh
    #[arg(long, value_name = "REGISTRY")]
    registry: Option<String>,
    /// Ports on which clients without an identity are refused
    #[arg(long, value_name = "PORTS")]
    require_identity_on_inbound_ports: Option<String>,
    /// How long work in flight may take when the pod ends
    #[arg(long, value_name = "DURATION")]
    shutdown_grace_period: Option<String>,
    /// Inbound ports that bypass the proxy: numbers and ranges, separated by commas
    #[arg(long, value_name = "PORTS")]
    skip_inbound_ports: Option<String>,
    /// Outbound ports that bypass the proxy: numbers and ranges, separated by commas
    #[arg(long, value_name = "PORTS")]
    skip_outbound_ports: Option<String>,
    /// Networks whose inbound connections bypass the proxy: CIDRs, separated by commas
    #[arg(long, value_name = "CIDRS")]
    skip_subnets: Option<String>,
    /// Seconds that the proxy runs on when its pod's termination begins
    #[arg(long, value_name = "SECONDS")]
    wait_before_exit_seconds: Option<String>,
    #[command(flatten)]
    pointless: PointlessArgs,
}

/// Linkerd's flags about its init container, which Weft does not have: accepted, with a note.
#[derive(Clone, Debug, Default, Args)]
struct PointlessArgs {
    #[arg(long, hide = true)]
    close_wait_timeout: Option<String>,
    #[arg(long, hide = true)]
    init_image: Option<String>,
    #[arg(long, hide = true)]
    init_image_version: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    native_sidecar: Option<String>,
}

/// Annotations that the options stand for.
#[derive(Clone, Debug, Default)]
pub(super) struct Overrides {
    /// The value of `linkerd.io/inject`.
    pub(super) mode: &'static str,
    /// Those of `config.linkerd.io`.
    pub(super) annotations: Vec<(&'static str, String)>,
}

impl Overrides {
    /// The value of an annotation.
    pub(super) fn get(&self, annotation: &str) -> Option<&str> {
        self.annotations.iter().find(|(name, _)| *name == annotation).map(|(_, value)| value.as_str())
    }
}

impl ProxyArgs {
    /// The mode, and the annotations that the given options stand for.
    ///
    /// # Errors
    /// When a value would be refused or ignored by the injector; the error names the option.
    pub(super) fn overrides(&self) -> Result<Overrides> {
        let rows = self.rows();
        for (flag, annotation, value) in &rows {
            let annotations = [((*annotation).to_owned(), value.clone())].into();
            let metadata = ObjectMeta { annotations: Some(annotations), ..ObjectMeta::default() };
            let found = inject::check_annotations(&metadata).into_iter().chain(inject::ignored_annotations(&metadata));
            if let Some(invalid) = found.into_iter().next() {
                bail!("{flag}: {}", invalid.problem);
            }
        }
        let mode = if self.ingress { "ingress" } else { "enabled" };
        Ok(Overrides { mode, annotations: rows.into_iter().map(|(_, name, value)| (name, value)).collect() })
    }

    /// What is said about flags that were given and have no meaning.
    pub(super) fn notes(&self) -> Vec<String> {
        let pointless = &self.pointless;
        let rows = [
            ("--close-wait-timeout", &pointless.close_wait_timeout, "redirected connections have no conntrack entries"),
            ("--init-image", &pointless.init_image, "there is no init container"),
            ("--init-image-version", &pointless.init_image_version, "there is no init container"),
            ("--native-sidecar", &pointless.native_sidecar, "the proxy is always a native sidecar"),
        ];
        let given = rows.into_iter().filter(|(_, given, _)| given.is_some());
        given.map(|(flag, _, why)| format!("{flag} has no meaning in Weft: {why}")).collect()
    }

    /// The proxy's image, and the flag that names it.
    fn image(&self) -> (&'static str, Option<String>) {
        match &self.registry {
            Some(registry) => {
                let image = self.proxy_image.as_deref().unwrap_or("weft-proxy");
                ("--registry", Some(chart::image_in(registry, image)))
            }
            None => ("--proxy-image", self.proxy_image.clone()),
        }
    }

    /// Flag, annotation and value of what is given.
    fn rows(&self) -> Vec<(&'static str, &'static str, String)> {
        let yes = |is: bool| is.then(|| "true".to_owned());
        let image = self.image();
        let rows = [
            ("--access-log", labels::ACCESS_LOG, self.access_log.clone()),
            ("--admin-port", labels::ADMIN_PORT_ANNOTATION, self.admin_port.clone()),
            ("--control-port", labels::CONTROL_PORT_ANNOTATION, self.control_port.clone()),
            ("--debug-image", labels::DEBUG_IMAGE, self.debug_image.clone()),
            ("--debug-image-version", labels::DEBUG_IMAGE_VERSION, self.debug_image_version.clone()),
            ("--default-inbound-policy", labels::DEFAULT_INBOUND_POLICY, self.default_inbound_policy.clone()),
            ("--enable-debug-sidecar", labels::ENABLE_DEBUG_SIDECAR, yes(self.enable_debug_sidecar)),
            ("--enable-external-profiles", labels::ENABLE_EXTERNAL_PROFILES, yes(self.enable_external_profiles)),
            ("--image-pull-policy", labels::IMAGE_PULL_POLICY, self.image_pull_policy.clone()),
            ("--inbound-port", labels::INBOUND_PORT_ANNOTATION, self.inbound_port.clone()),
            ("--opaque-ports", labels::OPAQUE_PORTS, self.opaque_ports.clone()),
            ("--outbound-port", labels::OUTBOUND_PORT_ANNOTATION, self.outbound_port.clone()),
            ("--proxy-cpu-limit", labels::PROXY_CPU_LIMIT, self.proxy_cpu_limit.clone()),
            ("--proxy-cpu-request", labels::PROXY_CPU_REQUEST, self.proxy_cpu_request.clone()),
            ("--proxy-gid", labels::PROXY_GID_ANNOTATION, self.proxy_gid.clone()),
            (image.0, labels::PROXY_IMAGE, image.1),
            ("--proxy-log-level", labels::LOG_LEVEL, self.proxy_log_level.clone()),
            ("--proxy-log-format", labels::LOG_FORMAT, self.proxy_log_format.clone()),
            ("--proxy-memory-limit", labels::PROXY_MEMORY_LIMIT, self.proxy_memory_limit.clone()),
            ("--proxy-memory-request", labels::PROXY_MEMORY_REQUEST, self.proxy_memory_request.clone()),
            ("--proxy-uid", labels::PROXY_UID_ANNOTATION, self.proxy_uid.clone()),
            ("--proxy-version", labels::CONFIG_PROXY_VERSION, self.proxy_version.clone()),
            (
                "--require-identity-on-inbound-ports",
                labels::REQUIRE_IDENTITY_PORTS,
                self.require_identity_on_inbound_ports.clone(),
            ),
            ("--shutdown-grace-period", labels::SHUTDOWN_GRACE_PERIOD, self.shutdown_grace_period.clone()),
            ("--skip-inbound-ports", labels::SKIP_INBOUND_PORTS, self.skip_inbound_ports.clone()),
            ("--skip-outbound-ports", labels::SKIP_OUTBOUND_PORTS, self.skip_outbound_ports.clone()),
            ("--skip-subnets", labels::SKIP_SUBNETS, self.skip_subnets.clone()),
            ("--wait-before-exit-seconds", labels::WAIT_BEFORE_EXIT, self.wait_before_exit_seconds.clone()),
        ];
        rows.into_iter().filter_map(|(flag, annotation, value)| Some((flag, annotation, value?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        proxy: ProxyArgs,
    }

    fn overrides(arguments: &[&str]) -> Result<Overrides> {
        let arguments = std::iter::once("inject").chain(arguments.iter().copied());
        Command::try_parse_from(arguments).unwrap().proxy.overrides()
    }

    #[test]
    fn options_become_annotations() {
        let found = overrides(&["--skip-outbound-ports", "25,587-588", "--enable-debug-sidecar", "--ingress"]).unwrap();
        assert_eq!(found.mode, "ingress");
        assert_eq!(found.get("config.linkerd.io/skip-outbound-ports"), Some("25,587-588"));
        assert_eq!(found.get("config.linkerd.io/enable-debug-sidecar"), Some("true"));
        assert_eq!(found.annotations.len(), 2);
    }

    #[test]
    fn a_value_that_the_injector_would_refuse_or_ignore_is_refused_with_its_option() {
        for (flag, value) in [
            ("--skip-inbound-ports", "http"),
            ("--skip-subnets", "everywhere"),
            ("--default-inbound-policy", "open"),
            ("--proxy-uid", "root"),
            ("--proxy-cpu-limit", "much"),
            ("--admin-port", "0"),
            ("--access-log", "xml"),
            ("--image-pull-policy", "Sometimes"),
            ("--wait-before-exit-seconds", "long"),
        ] {
            let error = overrides(&[flag, value]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{flag}: bad value {value:?}")), "{error}");
        }
    }

    #[test]
    fn a_registry_is_the_one_of_the_proxys_image() {
        let image =
            |arguments: &[&str]| overrides(arguments).unwrap().get("config.linkerd.io/proxy-image").map(str::to_owned);
        let registry = "registry.example:5000/mesh";
        assert_eq!(image(&["--registry", registry]).as_deref(), Some("registry.example:5000/mesh/weft-proxy"));
        let both = ["--registry", registry, "--proxy-image", "cr.l5d.io/linkerd/proxy"];
        assert_eq!(image(&both).as_deref(), Some("registry.example:5000/mesh/proxy"));
        assert_eq!(image(&["--proxy-image", "a/b"]).as_deref(), Some("a/b"));
        assert_eq!(image(&["--proxy-cpu", "1"]), None);
    }

    #[test]
    fn linkerds_options_without_a_meaning_are_accepted_with_the_reason() {
        let notes = |arguments: &[&str]| {
            let arguments = std::iter::once("inject").chain(arguments.iter().copied());
            let proxy = Command::try_parse_from(arguments).unwrap().proxy;
            assert_eq!(proxy.overrides().unwrap().annotations, []);
            proxy.notes()
        };
        for flag in ["--close-wait-timeout=1s", "--init-image=x", "--init-image-version=x", "--native-sidecar"] {
            let notes = notes(&[flag]);
            let name = flag.split('=').next().unwrap();
            assert!(notes.len() == 1 && notes[0].starts_with(&format!("{name} has no meaning")), "{notes:?}");
        }
        assert_eq!(notes(&[]), Vec::<String>::new());
    }
}
