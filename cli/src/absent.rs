//! Commands of Linkerd's that are not here: each is an error that says what to use instead, or why there is nothing to
//! do.
//!
//! Hidden, because they do nothing; understood, because fingers and scripts know them. The same list is in docs/cli.md.

use std::{ffi::OsString, process::ExitCode};

use clap::{Args, Subcommand};

use crate::output::note;

/// Exit code of wrong usage, as clap's.
const WRONG_USAGE: u8 = 2;

/// Whatever follows the command's name.
#[derive(Debug, Args)]
pub(crate) struct Anything {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, num_args = 0.., hide = true)]
    _arguments: Vec<OsString>,
}

/// Of `linkerd`.
#[derive(Debug, Subcommand)]
pub(crate) enum AtRoot {
    /// Print the manifests of the CNI plugin
    #[command(hide = true)]
    InstallCni(Anything),
    /// Mirror Services of other clusters
    #[command(hide = true, alias = "mc")]
    Multicluster(Anything),
    /// Install the extension for traces
    #[command(hide = true)]
    Jaeger(Anything),
    /// Repair what an old upgrade broke
    #[command(hide = true)]
    Repair(Anything),
}

/// Of `linkerd viz`.
#[derive(Debug, Subcommand)]
pub(crate) enum InViz {
    /// List the pods that can be tapped
    #[command(hide = true)]
    List(Anything),
    /// Print policy that admits Prometheus
    #[command(hide = true)]
    AllowScrapes(Anything),
    /// Print a ServiceProfile of observed requests
    #[command(hide = true)]
    Profile(Anything),
    /// Count what authorizations admit
    #[command(hide = true)]
    Authz(Anything),
    /// Print what to delete after an upgrade
    #[command(hide = true)]
    Prune(Anything),
}

impl AtRoot {
    pub(crate) fn refuse(&self) -> ExitCode {
        refuse(match self {
            Self::InstallCni(_) => {
                "install-cni: there is no CNI plugin to install: weft-agent, which `weft install` contains, redirects pods with \
                 eBPF beside any plugin; `weft check` says whether nodes can"
            }
            Self::Multicluster(_) => {
                "multicluster: there is no service mirror: use `linkerd multicluster`, whose mirrored Services Weft's control \
                 plane follows"
            }
            Self::Jaeger(_) => {
                "jaeger: there is nothing to install: proxies send spans to the OpenTelemetry collector that the values \
                 proxy.tracing of `weft install` name"
            }
            Self::Repair(_) => {
                "repair: there is nothing to repair: it is for upgrades from versions that Weft never had"
            }
        })
    }
}

impl InViz {
    pub(crate) fn refuse(&self) -> ExitCode {
        refuse(match self {
            Self::List(_) => "viz list: use `weft status`, which lists meshed pods",
            Self::AllowScrapes(_) => {
                "viz allow-scrapes: the component has no Prometheus: to admit one of your own, apply a Server for the port \
                 linkerd-admin and an AuthorizationPolicy"
            }
            Self::Profile(_) => {
                "viz profile: use `weft profile` with --open-api or --proto; observed requests are read by `linkerd viz profile --tap` alone"
            }
            Self::Authz(_) => {
                "viz authz: use `weft authz` for the authorizations that apply, and `weft stat-inbound -o wide` for what they admit \
                 and refuse"
            }
            Self::Prune(_) => {
                "viz prune: use `weft viz uninstall | kubectl delete -f -`, then `weft viz install | kubectl apply -f -`; only the \
                 metrics of the last 15 minutes are lost"
            }
        })
    }
}

fn refuse(what: &str) -> ExitCode {
    note(what);
    ExitCode::from(WRONG_USAGE)
}
