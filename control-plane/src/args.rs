//! The command line, parsed once into the settings of each part.

mod linkerd;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::Context;
use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use weft_k8s_api::{duration::parse_option, inject, policy::DefaultPolicy, ports};
use weft_runtime::telemetry::LogFormat;

use weft_index::{Cluster, EndpointsFrom, TransportMode};

use crate::{
    destination::{
        EndpointSettings,
        http2::{self, MeshedHttp2},
    },
    identity::issuer::Scheme,
};
use linkerd::{WithoutEffect, listen_address};

/// Weft's control plane: certificates, service discovery and policy for the proxies of a mesh.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES, args_override_self = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

impl Args {
    /// Parses the process's command line; of a flag that is given twice, the last one counts. Exits with a message if
    /// it is invalid.
    pub(crate) fn of_process() -> Self {
        Self::parse_from(linkerd::double_dashes(std::env::args_os()))
    }
}

const EXAMPLES: &str = "\
Examples:
  Everything in one process, from a directory of manifests:
    weft-control-plane all --dir manifests --identity-issuer-dir issuer \\
      --identity-trust-anchors ca.pem --token-key token.pub.pem
  Discovery and policy alone, from the Kubernetes API of the cluster or of a kubeconfig:
    weft-control-plane destination
    weft-control-plane policy --kubeconfig ~/.kube/config --default-inbound-policy deny
  The certificate authority of a cluster, which checks tokens by TokenReview:
    weft-control-plane identity --identity-issuer-dir issuer --identity-trust-anchors ca.pem
  Shell completions:
    weft-control-plane completions bash > /etc/bash_completion.d/weft-control-plane";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Run(Box<RunCommand>),
    /// Print completions for a shell.
    Completions {
        /// The shell to complete for.
        shell: clap_complete::Shell,
    },
}

/// Which services to run.
#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one, boxed, in the life of a process")]
pub(crate) enum RunCommand {
    /// Run every service in one process.
    All {
        #[command(flatten)]
        cluster: ClusterArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        destination: DestinationArgs,
        #[command(flatten)]
        policy: PolicyArgs,
        #[command(flatten)]
        identity: IdentityArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Run discovery: Destination.Get and GetProfile.
    Destination {
        #[command(flatten)]
        cluster: ClusterArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        destination: DestinationArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Run policy: InboundServerPolicies and OutboundPolicies.
    Policy {
        #[command(flatten)]
        cluster: ClusterArgs,
        #[command(flatten)]
        source: SourceArgs,
        #[command(flatten)]
        policy: PolicyArgs,
        #[command(flatten)]
        validator: ValidatorArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Run the certificate authority: Identity.Certify.
    Identity {
        #[command(flatten)]
        cluster: ClusterArgs,
        #[command(flatten)]
        identity: IdentityArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Run the webhook that adds proxies to pods.
    ProxyInjector {
        #[command(flatten)]
        webhook: WebhookArgs,
        #[command(flatten)]
        injector: InjectorArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Run the webhook that checks ServiceProfiles.
    SpValidator {
        #[command(flatten)]
        webhook: WebhookArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
}

/// Logging.
#[derive(Debug, ClapArgs)]
pub(crate) struct LogArgs {
    /// Log level of the control plane, such as `debug`, or a filter such as `warn,weft_control_plane=debug,kube=debug`.
    #[arg(long, global = true, default_value = "info")]
    pub(crate) log_level: String,
    /// Log format, `plain` or `json`.
    #[arg(long, global = true, default_value = "plain")]
    pub(crate) log_format: LogFormat,
}

/// Names and networks of the cluster, the same for every process.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ClusterArgs {
    /// Namespace of the control plane.
    #[arg(long, default_value = "linkerd")]
    pub(crate) controller_namespace: String,
    /// Trust domain of identities.
    #[arg(long, alias = "identity-trust-domain", default_value = "cluster.local")]
    pub(crate) trust_domain: String,
    /// Domain of the cluster's DNS names.
    #[arg(long, default_value = "cluster.local")]
    pub(crate) cluster_domain: String,
    /// The cluster's networks.
    #[arg(long, value_delimiter = ',', default_values_t = inject::default_cluster_networks(),
        overrides_with = "cluster_networks")]
    pub(crate) cluster_networks: Vec<IpNet>,
    /// Ports that are opaque unless a manifest says otherwise.
    #[arg(long, default_value = ports::DEFAULT_OPAQUE_PORTS)]
    pub(crate) default_opaque_ports: ports::PortSet,
    /// How to reach the Kubernetes API, where it is needed; by default as a pod of the cluster, else by ~/.kube/config.
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// Where objects come from.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct SourceArgs {
    /// Kind of the source; by default `file` where --dir is given, else `kube`.
    #[arg(long)]
    pub(crate) source: Option<SourceKind>,
    /// Directory of manifests (*.yaml, *.yml, *.json), watched with everything below it.
    #[arg(long, value_name = "DIR", required_if_eq("source", "file"))]
    pub(crate) dir: Option<PathBuf>,
    /// Name of this replica in the elections of the writers of EndpointSlices and of statuses; a pod's own name.
    #[arg(long, env = "HOSTNAME", value_name = "NAME")]
    lease_identity: Option<String>,
}

/// Kinds of sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SourceKind {
    /// The Kubernetes API.
    Kube,
    /// A directory of manifests.
    File,
}

/// The source that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The Kubernetes API.
    Kube,
    /// A directory of manifests.
    File(PathBuf),
}

impl SourceArgs {
    /// The source that the flags choose.
    ///
    /// # Errors
    /// When a directory is given and the source is not `file`.
    pub(crate) fn source(&self) -> anyhow::Result<Source> {
        match (self.source, self.dir.clone()) {
            (None | Some(SourceKind::File), Some(dir)) => Ok(Source::File(dir)),
            (None | Some(SourceKind::Kube), None) => Ok(Source::Kube),
            (Some(SourceKind::Kube), Some(_)) => anyhow::bail!("--dir is for --source file, drop one of the two"),
            (Some(SourceKind::File), None) => anyhow::bail!("--source file needs --dir"),
        }
    }

    /// The name of this replica.
    ///
    /// # Errors
    /// When there is none: two replicas of one name would both believe that they hold a lease.
    pub(crate) fn lease_identity(&self) -> anyhow::Result<String> {
        let identity = self.lease_identity.clone().filter(|identity| !identity.is_empty());
        identity.context("--lease-identity: no name, pass the pod's own (the environment has no HOSTNAME)")
    }
}

/// Discovery.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct DestinationArgs {
    /// Address of the destination service.
    #[arg(long, alias = "addr", default_value = "0.0.0.0:8086", value_parser = listen_address)]
    pub(crate) destination_addr: SocketAddr,
    /// How proxies reach meshed endpoints.
    #[arg(long, default_value = "transport-header")]
    pub(crate) outbound_transport_mode: TransportModeArg,
    /// Announce IPv6 endpoints; pods with both families are then reached by IPv6.
    #[arg(long, default_value_t = false, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true")]
    pub(crate) enable_ipv6: bool,
    /// Inbound ports that annotations may have bypass the proxies of their pods, where the node agents allow no others
    /// (chart values agent.allowBypass and proxyInit.ignoreInboundPorts); any if the flag is absent.
    #[arg(long, value_name = "PORTS")]
    pub(crate) allowed_skip_inbound_ports: Option<ports::PortSet>,
    /// Tell proxies that meshed endpoints accept HTTP/1 inside HTTP/2.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true")]
    pub(crate) enable_h2_upgrade: bool,
    /// Read endpoints from EndpointSlices; from Endpoints if false, which have neither zones nor IPv6, and then the
    /// endpoints of ExternalWorkloads are not written.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true")]
    pub(crate) enable_endpoint_slices: bool,
    /// Give endpoints in the client's zone ten times the weight of others.
    #[arg(long, default_value_t = false, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true")]
    pub(crate) ext_endpoint_zone_weights: bool,
    /// Parameters of HTTP/2 connections to meshed endpoints, JSON as in Linkerd's chart; empty leaves them to the
    /// proxy.
    #[arg(long, value_name = "JSON", default_value = http2::DEFAULT)]
    pub(crate) meshed_http2_client_params: MeshedHttp2,
    /// Follow the clusters that Secrets in the control plane's namespace link, and announce endpoints of Services
    /// there.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true")]
    pub(crate) enable_remote_discovery: bool,
    #[command(flatten)]
    pub(crate) without_effect: WithoutEffect,
}

impl DestinationArgs {
    /// Checks flags that exclude each other.
    ///
    /// # Errors
    /// When IPv6 is announced from objects that have a pod's first address alone.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.enable_endpoint_slices || !self.enable_ipv6,
            "--enable-ipv6 needs --enable-endpoint-slices: Endpoints have only one address of a pod"
        );
        Ok(())
    }

    /// Settings of messages about endpoints.
    pub(crate) fn endpoint_settings(&self) -> EndpointSettings {
        EndpointSettings {
            http2: self.meshed_http2_client_params.clone(),
            zone_weights: self.ext_endpoint_zone_weights,
        }
    }

    /// The objects that list endpoints.
    pub(crate) fn endpoints_from(&self) -> EndpointsFrom {
        if self.enable_endpoint_slices { EndpointsFrom::Slices } else { EndpointsFrom::Endpoints }
    }
}

/// Names of [`TransportMode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportModeArg {
    /// By the inbound port and a transport header.
    TransportHeader,
    /// By the application's port.
    Transparent,
}

/// Policy.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct PolicyArgs {
    /// Address of the policy services.
    #[arg(long, default_value = "0.0.0.0:8090")]
    pub(crate) policy_addr: SocketAddr,
    /// Policy of ports that no Server selects.
    #[arg(long, default_value_t = DefaultPolicy::AllUnauthenticated)]
    pub(crate) default_inbound_policy: DefaultPolicy,
    /// Networks from which probes come.
    #[arg(long, value_delimiter = ',', default_value = "0.0.0.0/0,::/0", overrides_with = "probe_networks")]
    pub(crate) probe_networks: Vec<IpNet>,
    /// Namespace whose EgressNetworks apply to clients of all namespaces that have none of their own.
    #[arg(long, default_value = "linkerd-egress")]
    pub(crate) global_egress_network_namespace: String,
    /// Let a route send traffic to a Service of another namespace only where a ReferenceGrant of that namespace permits
    /// it.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) require_reference_grants: bool,
    /// Let clients set timeouts and retries of single requests by headers, such as `l5d-timeout`.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) allow_l5d_request_headers: bool,
    /// How long a patch of a status may take, in milliseconds.
    #[arg(long, default_value_t = 5000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) patch_timeout_ms: u64,
}

/// Certificate authority.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct IdentityArgs {
    /// Address of the identity service.
    #[arg(long, default_value = "0.0.0.0:8080")]
    pub(crate) identity_addr: SocketAddr,
    /// Directory of the issuer: crt.pem and key.pem, or tls.crt and tls.key; watched.
    #[arg(long, value_name = "DIR")]
    pub(crate) identity_issuer_dir: PathBuf,
    /// Format of the issuer, Linkerd's flag; by default crt.pem and key.pem if crt.pem exists.
    #[arg(long, value_enum, value_name = "SCHEME")]
    pub(crate) identity_scheme: Option<Scheme>,
    /// Trust anchors, PEM; watched.
    #[arg(long, value_name = "FILE")]
    pub(crate) identity_trust_anchors: PathBuf,
    /// Public key that verifies service account tokens, PEM; by default the Kubernetes API reviews tokens.
    #[arg(long, value_name = "FILE")]
    pub(crate) token_key: Option<PathBuf>,
    /// Certify holders of tokens that were issued for the API server and not for the mesh, such as those of
    /// proxies without a projected token. Any such token of a ServiceAccount is then as good as its mesh
    /// identity.
    #[arg(long, default_value_t = false, action = clap::ArgAction::Set)]
    pub(crate) identity_accept_any_audience: bool,
    /// How long certificates are valid, such as 24h or 90s.
    #[arg(long, default_value = "24h", value_parser = parse_option)]
    pub(crate) identity_issuance_lifetime: Duration,
    /// By how much clocks may differ, such as 20s.
    #[arg(long, default_value = "20s", value_parser = parse_option)]
    pub(crate) identity_clock_skew_allowance: Duration,
}

/// A webhook that runs in its own process.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct WebhookArgs {
    /// Namespace of the control plane.
    #[arg(long, default_value = "linkerd")]
    pub(crate) controller_namespace: String,
    /// How to reach the Kubernetes API; by default as a pod of the cluster, else by ~/.kube/config.
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Address of the webhook, HTTPS.
    #[arg(long, default_value = "0.0.0.0:8443")]
    pub(crate) webhook_addr: SocketAddr,
    #[command(flatten)]
    pub(crate) certificate: WebhookCertificateArgs,
}

/// The webhook beside the policy services.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ValidatorArgs {
    /// Address of the webhook that checks policy resources, HTTPS; by default it is not served.
    #[arg(long)]
    pub(crate) webhook_addr: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) certificate: WebhookCertificateArgs,
}

/// Certificates of webhooks.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct WebhookCertificateArgs {
    /// How long generated certificates of webhooks are valid, such as 90d; renewed when a third of that is left.
    #[arg(long, default_value = "90d", value_parser = certificate_lifetime)]
    pub(crate) webhook_certificate_lifetime: Duration,
    /// Authorities that sign client certificates of API servers, PEM; where given, clients of webhooks without such a
    /// certificate are refused. The API servers need it in the kubeconfig of their admission configuration. Read once.
    #[arg(long, value_name = "FILE")]
    pub(crate) webhook_client_ca: Option<PathBuf>,
}

/// Injection.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct InjectorArgs {
    /// Helm values of the mesh, YAML; watched.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/config/values")]
    pub(crate) values: PathBuf,
    /// Trust anchors for proxies, PEM; watched.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/identity/trust-roots/ca-bundle.crt")]
    pub(crate) identity_trust_anchors: PathBuf,
}

/// Administration.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct AdminArgs {
    /// Address of /live, /ready, /ping and /metrics.
    #[arg(long, alias = "metrics-addr", default_value = "0.0.0.0:9990", value_parser = listen_address)]
    pub(crate) admin_addr: SocketAddr,
    /// Longest wait for streams and calls at shutdown.
    #[arg(long, default_value = "5s", value_parser = parse_option)]
    pub(crate) shutdown_grace_period: Duration,
}

impl ClusterArgs {
    /// Settings of the index; a part that does not run has its defaults.
    pub(crate) fn cluster(&self, destination: Option<&DestinationArgs>, policy: Option<&PolicyArgs>) -> Cluster {
        let mode = destination.map_or(TransportModeArg::TransportHeader, |args| args.outbound_transport_mode);
        Cluster {
            control_namespace: self.controller_namespace.clone(),
            cluster_domain: self.cluster_domain.trim_end_matches('.').to_owned(),
            trust_domain: self.trust_domain.clone(),
            networks: self.cluster_networks.clone(),
            probe_networks: policy.map(|args| args.probe_networks.clone()).unwrap_or_default(),
            default_policy: policy.map_or(DefaultPolicy::Deny, |args| args.default_inbound_policy),
            default_opaque_ports: self.default_opaque_ports.clone(),
            allowed_skips: destination.and_then(|args| args.allowed_skip_inbound_ports.clone()),
            transport_mode: match mode {
                TransportModeArg::TransportHeader => TransportMode::TransportHeader,
                TransportModeArg::Transparent => TransportMode::Transparent,
            },
            egress_namespace: policy.map(|args| args.global_egress_network_namespace.clone()).unwrap_or_default(),
            require_reference_grants: policy.is_some_and(|args| args.require_reference_grants),
            ipv6: destination.is_some_and(|args| args.enable_ipv6),
            h2_upgrade: destination.is_none_or(|args| args.enable_h2_upgrade),
            endpoints_from: destination.map_or(EndpointsFrom::Slices, DestinationArgs::endpoints_from),
        }
    }
}

/// Settings of the index by the defaults of the command line.
#[cfg(test)]
pub(crate) fn default_cluster() -> Cluster {
    let Command::Run(command) = Args::parse_from(["weft-control-plane", "policy"]).command else {
        panic!("no command")
    };
    let RunCommand::Policy { cluster, policy, .. } = *command else { panic!("another command") };
    cluster.cluster(None, Some(&policy))
}

/// The shortest lifetime leaves time for a change-over, which waits a tenth of it.
fn certificate_lifetime(text: &str) -> Result<Duration, String> {
    let lifetime = parse_option(text)?;
    if lifetime < Duration::from_secs(10) {
        return Err("expected at least 10s".to_owned());
    }
    Ok(lifetime)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_directory_chooses_the_file_source() {
        let parse = |flags: &[&str]| {
            let all = ["weft-control-plane", "destination"].iter().chain(flags);
            match *match Args::try_parse_from(all).ok()?.command {
                Command::Run(command) => command,
                Command::Completions { .. } => unreachable!(),
            } {
                RunCommand::Destination { source, .. } => source.source().ok(),
                _ => unreachable!(),
            }
        };
        assert_eq!(parse(&[]), Some(Source::Kube));
        assert_eq!(parse(&["--source", "kube"]), Some(Source::Kube));
        assert_eq!(parse(&["--dir", "d"]), Some(Source::File("d".into())));
        assert_eq!(parse(&["--source", "file", "--dir", "d"]), Some(Source::File("d".into())));
        assert_eq!(parse(&["--source", "file"]), None);
        assert_eq!(parse(&["--source", "kube", "--dir", "d"]), None);
    }

    #[test]
    fn a_replica_without_a_name_cannot_want_the_lease() {
        let parse = |name: &str| {
            let parsed = Args::try_parse_from(["weft-control-plane", "destination", "--lease-identity", name]).unwrap();
            let Command::Run(command) = parsed.command else { panic!("a process runs") };
            let RunCommand::Destination { source, .. } = *command else { panic!("it is the destination service") };
            source.lease_identity().map_err(|error| error.to_string())
        };
        assert_eq!(parse("linkerd-destination-0"), Ok("linkerd-destination-0".to_owned()));
        assert!(parse("").unwrap_err().contains("--lease-identity"));
    }

    #[test]
    fn ipv6_needs_endpoint_slices() {
        for (flags, fine) in [
            (&[][..], true),
            (&["--enable-endpoint-slices=false"], true),
            (&["--enable-ipv6=true"], true),
            (&["--enable-ipv6"], true),
            (&["--enable-ipv6=true", "--enable-endpoint-slices=false"], false),
        ] {
            let all = ["weft-control-plane", "destination"].iter().chain(flags);
            let Command::Run(command) = Args::try_parse_from(all).unwrap().command else { panic!("a process runs") };
            let RunCommand::Destination { destination, .. } = *command else { panic!("it is the destination service") };
            assert_eq!(destination.check().is_ok(), fine, "{flags:?}");
        }
    }
}
