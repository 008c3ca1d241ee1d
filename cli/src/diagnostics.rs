//! `weft diagnostics`: what the control plane sends to proxies about endpoints, profiles and policy, and the metrics of
//! proxies and of the control plane. Verbs, flags and outputs are Linkerd's.
//!
//! ```text
//! endpoints, profile ──> destination API (8086) ┐
//! policy ──────────────> policy API (8090) ─────┴─ of a destination pod, in a cluster by port-forward
//! *-metrics ───────────> admin ports of pods
//! ```
//!
//! Refuses to evaluate the answers: `weft check` does.

mod api;
mod endpoints;
pub(crate) mod message;
mod metrics;
mod obfuscate;
mod policy;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft diagnostics endpoints web.shop.svc.cluster.local:80
  weft diagnostics policy -n shop po/web-0 8080         inbound policy of a pod's port
  weft diagnostics policy -n shop svc/web 80            outbound policy of a Service's port
  weft diagnostics profile 10.96.0.7:80
  weft diagnostics proxy-metrics -n shop deploy/web
  weft diagnostics controller-metrics")]
pub(crate) struct DiagnosticsArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the endpoints that proxies get for authorities
    #[command(visible_alias = "ep")]
    Endpoints(endpoints::EndpointsArgs),
    /// Show the policy that proxies get: inbound for a pod's port, outbound for a Service's, an EgressNetwork's or an
    /// address's
    Policy(policy::PolicyArgs),
    /// Show the profile that proxies get for an address
    Profile(policy::ProfileArgs),
    /// Print metrics of proxies
    ProxyMetrics(metrics::ProxyMetricsArgs),
    /// Print metrics of the control plane's containers
    #[command(visible_alias = "cp-metrics")]
    ControllerMetrics(metrics::ControllerMetricsArgs),
}

pub(crate) async fn execute(args: DiagnosticsArgs) -> Result<ExitCode> {
    match args.command {
        Command::Endpoints(args) => endpoints::execute(args).await?,
        Command::Policy(args) => policy::policy(args).await?,
        Command::Profile(args) => policy::profile(args).await?,
        Command::ProxyMetrics(args) => return metrics::of_proxies(args).await,
        Command::ControllerMetrics(args) => return metrics::of_control_plane(args).await,
    }
    Ok(ExitCode::SUCCESS)
}
