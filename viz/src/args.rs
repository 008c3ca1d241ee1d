//! The command line, parsed once.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};
use weft_k8s_api::duration::parse_option;
use weft_runtime::telemetry::LogFormat;

/// The shortest time between scrapes: a proxy needs some milliseconds for one, and its counters change meanwhile.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

/// Golden metrics and live requests of a mesh, read from its proxies on demand.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Address of the API: gRPC, plaintext.
    #[arg(long, default_value = "0.0.0.0:8085")]
    pub(crate) addr: SocketAddr,
    /// Address of the admin server: /live, /ready, /metrics.
    #[arg(long, default_value = "0.0.0.0:9995")]
    pub(crate) admin_addr: SocketAddr,
    /// How to reach the Kubernetes API, one file or several as in KUBECONFIG; by default as a pod of the cluster, else
    /// by ~/.kube/config.
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Audience of tokens that are for this API alone. Tokens for the Kubernetes API are accepted, too.
    #[arg(long, default_value = "viz.weft.io", value_name = "NAME")]
    pub(crate) token_audience: String,
    /// Time between two scrapes of a proxy, such as 10s; at least 1s.
    #[arg(long, default_value = "10s", value_parser = interval)]
    pub(crate) scrape_interval: Duration,
    /// Longest wait for calls at shutdown.
    #[arg(long, default_value = "5s", value_parser = parse_option)]
    pub(crate) shutdown_grace_period: Duration,
    /// Log level, such as `debug`, or a filter such as `warn,weft_viz=debug,kube=debug`.
    #[arg(long, default_value = "info")]
    pub(crate) log_level: String,
    /// Log format, `plain` or `json`.
    #[arg(long, default_value = "plain")]
    pub(crate) log_format: LogFormat,
}

const EXAMPLES: &str = "\
Examples:
  In a cluster, as the chart weft-viz runs it:
    weft-viz
  Outside, with the rights of a kubeconfig:
    weft-viz --kubeconfig ~/.kube/config --addr 127.0.0.1:8085
  Shell completions:
    weft-viz completions bash > /etc/bash_completion.d/weft-viz";

/// What else the program does.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print completions for a shell.
    Completions {
        /// The shell to complete for.
        shell: clap_complete::Shell,
    },
}

fn interval(text: &str) -> Result<Duration, String> {
    parse_option(text).and_then(|interval| {
        if interval < SHORTEST_INTERVAL { Err("expected at least 1s".to_owned()) } else { Ok(interval) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Args::command().debug_assert();
        assert!(Args::try_parse_from(["weft-viz"]).unwrap().command.is_none());
        assert!(Args::try_parse_from(["weft-viz", "completions", "bash"]).unwrap().command.is_some());
        assert!(Args::try_parse_from(["weft-viz", "--scrape-interval", "100ms"]).is_err());
    }
}
