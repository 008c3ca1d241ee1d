//! `weft sandbox`: what its subcommands take. What they do is below: [`run`] starts a sandbox, [`ps`] shows it,
//! [`exec`] reaches into its pods and ends it. On other systems than Linux every one of them is an error.

#[cfg(target_os = "linux")]
mod exec;
#[cfg(all(test, target_os = "linux"))]
mod fixture;
#[cfg(target_os = "linux")]
mod ps;
#[cfg(target_os = "linux")]
mod run;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Args, Subcommand};
use weft_sandbox::config::{DEFAULT_NAME, Interception};

use crate::{
    output::{Format, WideFormat},
    target::sandbox_name,
};

#[derive(Debug, Args)]
#[command(
    about = "Run a mesh on this host, without Kubernetes, and inspect it (needs root)",
    after_help = "Examples:
  weft sandbox run examples/mesh                run it here; Ctrl-C removes everything
  weft sandbox run examples/mesh --detach       run it in the background
  weft sandbox ps                               its pods
  weft sandbox exec client-0 -- curl -s http://web.shop
  weft sandbox logs client-0 -c linkerd-proxy -f
  weft sandbox stop                             end it and remove what it made"
)]
pub(crate) struct SandboxArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run what the manifests of a directory describe, and follow them while they are edited
    Run(RunArgs),
    /// Show the pods of a sandbox
    Ps(PsArgs),
    /// Show the sandboxes of this host
    List(ListArgs),
    /// Run a command in a pod, as its container would; exits with the command's status
    Exec(ExecArgs),
    /// Print what a container wrote
    Logs(LogsArgs),
    /// End a sandbox and remove everything that it created
    Stop(StopArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft sandbox run examples/mesh
  weft sandbox run examples/mesh --sandbox other --detach -o json
  weft sandbox run examples/mesh --interception iptables     linkerd-init's rules instead of eBPF
  weft sandbox run examples/mesh --proxy ./linkerd2-proxy    another program in the sidecar's place")]
struct RunArgs {
    /// Directory of .yaml, .yml and .json manifests, read recursively and watched
    dir: PathBuf,
    #[command(flatten)]
    sandbox: Name,
    /// How traffic is redirected to the proxies: ebpf, iptables (linkerd-init's rules in each meshed pod) or none
    #[arg(long, default_value_t, value_name = "WAY")]
    interception: Interception,
    /// Program to run in place of weft-proxy; must honour the LINKERD2_PROXY_* environment
    #[arg(long, value_name = "PATH")]
    proxy: Option<PathBuf>,
    /// No control plane: for sidecars that need neither identity nor discovery
    #[arg(long)]
    without_control_plane: bool,
    /// Log filter of this command, proxies, agent and control plane
    #[arg(long, value_name = "FILTER", default_value = "warn,weft=info")]
    log_level: String,
    /// Return when it is ready and leave it running
    #[arg(long)]
    detach: bool,
    /// Output format: json and yaml print the whole state when everything is ready
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  weft sandbox ps\n  weft sandbox ps -o json | jq '.pods[].ips'")]
struct PsArgs {
    #[command(flatten)]
    sandbox: Name,
    /// Output format: wide adds owners and containers; json and yaml are the whole state, with Services, addresses and
    /// times
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weft sandbox list -o json")]
struct ListArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft sandbox exec client-0 -- weft-client http1 --target web.shop:80 --count 10
  weft sandbox exec shop/web -c linkerd-proxy -- sh")]
struct ExecArgs {
    /// The pod: its name, NAMESPACE/NAME, or a prefix that only one pod has
    pod: String,
    #[command(flatten)]
    sandbox: Name,
    #[command(flatten)]
    container: Container,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  weft sandbox logs client-0\n  weft sandbox logs shop/web -c linkerd-proxy -f")]
struct LogsArgs {
    /// The pod: its name, NAMESPACE/NAME, or a prefix that only one pod has
    pod: String,
    #[command(flatten)]
    sandbox: Name,
    #[command(flatten)]
    container: Container,
    /// Continue printing until the pod has gone
    #[arg(short, long)]
    follow: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  weft sandbox stop\n  weft sandbox stop --sandbox other")]
struct StopArgs {
    #[command(flatten)]
    sandbox: Name,
}

#[derive(Debug, Args)]
struct Name {
    /// Name of the sandbox, which distinguishes sandboxes on one host
    #[arg(long = "sandbox", value_name = "NAME", default_value = DEFAULT_NAME, value_parser = sandbox_name)]
    name: String,
}

#[derive(Debug, Args)]
struct Container {
    /// The container [default: the first that is not the proxy]
    #[arg(short, long)]
    container: Option<String>,
}

#[cfg(target_os = "linux")]
pub(crate) async fn execute(args: SandboxArgs) -> Result<ExitCode> {
    match args.command {
        Command::Run(args) => return run::execute(args).await,
        Command::Exec(args) => return exec::exec(args).await,
        Command::Ps(args) => ps::ps(&args)?,
        Command::List(args) => ps::list(&args)?,
        Command::Logs(args) => exec::logs(&args).await?,
        Command::Stop(args) => exec::stop(&args).await?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(not(target_os = "linux"))]
pub(crate) async fn execute(_: SandboxArgs) -> Result<ExitCode> {
    anyhow::bail!(
        "`weft sandbox` needs Linux: its pods are made of network namespaces, cgroups and eBPF programs, which {} does not \
         have",
        std::env::consts::OS
    )
}
