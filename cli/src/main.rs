//! `weft`, the command line: checks, status, traces and explanations of a mesh; and a mesh on this host.
//!
//! ```text
//! weft check           ──> a cluster's API server ──────────┬──> the agents, by pods/exec
//! weft status, trace   ──> target: a cluster, a sandbox, ───┘
//!                                  or an agent's unix socket
//! weft diagnostics,    ──> a cluster or a sandbox ──────────┬──> ports of proxies and of the control plane,
//!      identity                                             ┘    by pods/portforward
//! weft stat, tap, ...  ──> weft_viz_core (engine) ───────┘
//! weft sandbox ...     ──> weft_sandbox (daemon, client)
//! ```
//!
//! Owns arguments, tables, JSON and YAML on standard output and exit codes: 2 for wrong usage, 1 for failures, and the
//! command's own for `weft sandbox exec`. Refuses to decide anything about the mesh: the libraries do that. Two hidden
//! subcommands are the program that the sandbox starts for its containers and its janitor.

mod absent;
mod agent;
mod arguments;
mod authz;
mod chart;
mod check;
mod cluster;
mod complete;
mod component;
mod dashboard;
mod diagnostics;
mod docs;
mod explain;
mod extension;
mod identity;
mod inject;
mod install;
mod kind;
mod manifest;
mod mesh;
mod output;
mod pod_network;
mod problem;
mod profile;
#[cfg(all(test, target_os = "linux"))]
mod reference;
mod resource;
mod sandbox;
mod status;
mod target;
mod trace;
mod version;
mod viz;

use std::{
    env,
    ffi::OsString,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use clap::{Args, CommandFactory as _, Parser, Subcommand};
#[cfg(target_os = "linux")]
use weft_sandbox::host::{container, janitor};

#[derive(Debug, Parser)]
#[command(
    name = "weft",
    version,
    about = "A service mesh for Kubernetes, wire-compatible with Linkerd: eBPF programs on each node redirect the traffic of pods to \
             the proxies in them, which encrypt, authorize and measure it",
    after_help = "Examples:
  weft check                             whether the mesh of the current kubeconfig's cluster is sound
  weft status                            its parts, and which pods the kernel redirects
  weft trace deploy/web -n shop          what the kernel decides, while it decides it
  weft stat deploy -n shop               success rate, requests per second and latency of its Deployments
  weft tap deploy/web -n shop            its requests, live
  weft explain web-0 to payments:80      what it would decide, and why
  sudo weft sandbox run examples/mesh    a mesh on this host, from Kubernetes manifests
  sudo weft sandbox ps                   its pods
  weft completion bash > /etc/bash_completion.d/weft"
)]
struct Cli {
    /// When output has colours
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t)]
    color: output::Colour,
    /// Not read: [`arguments`] moves all of these behind the command. Here help and completion find them.
    #[command(flatten)]
    _cluster: cluster::ClusterArgs,
    #[command(flatten)]
    _others: GlobalArgs,
    #[command(subcommand)]
    command: Command,
}

/// Linkerd's global flags that only some commands have here.
#[derive(Debug, Args)]
struct GlobalArgs {
    #[arg(long = "api-addr", id = "api_addr", hide = true)]
    _api_addr: Option<String>,
    #[arg(long = "cni-namespace", id = "cni_namespace", hide = true)]
    _cni_namespace: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a mesh on this host, without Kubernetes, and inspect it
    Sandbox(sandbox::SandboxArgs),
    /// Show the kernel's decisions about connections of meshed pods, live
    Trace(trace::TraceArgs),
    #[command(flatten)]
    Metrics(viz::Verb),
    /// Explain what the kernel would do with a connection of a meshed pod, by which rule, and what to change
    Explain(explain::ExplainArgs),
    /// Check whether a cluster can run the mesh, and whether its mesh is healthy
    Check(check::CheckArgs),
    /// Show the parts of the mesh, which pods the kernel redirects, and what is wrong
    Status(status::StatusArgs),
    /// Show requests, topology and the kernel's verdicts in a browser
    Dashboard(dashboard::DashboardArgs),
    /// Add the proxy to manifests
    Inject(Box<inject::InjectArgs>),
    /// Remove the proxy, and what asks for it, from manifests
    Uninject(inject::UninjectArgs),
    /// Show what the control plane sends to proxies, and metrics
    #[command(visible_alias = "dg")]
    Diagnostics(diagnostics::DiagnosticsArgs),
    /// Show the certificates that proxies present, and whether the mesh accepts them
    Identity(identity::IdentityArgs),
    /// Show the authorizations that apply to a workload
    Authz(authz::AuthzArgs),
    /// Print a ServiceProfile
    Profile(profile::ProfileArgs),
    /// Print the manifests of a mesh, or of its custom resource definitions
    Install(install::InstallArgs),
    /// Print the manifests of an installed mesh in this version
    Upgrade(install::UpgradeArgs),
    /// Print what to delete to remove the mesh
    Uninstall(install::UninstallArgs),
    /// Print what to delete after an upgrade
    Prune(install::PruneArgs),
    /// Install, check and remove the component that keeps metrics and serves taps
    Viz(extension::VizArgs),
    #[command(flatten)]
    Absent(absent::AtRoot),
    /// Print the versions of this program, the control plane and proxies
    Version(version::VersionArgs),
    /// Print a completion script
    #[command(
        visible_alias = "completions",
        after_help = "Examples:
  source <(weft completion bash)                             in this shell
  weft completion bash > /etc/bash_completion.d/weft         in every one
  weft completion zsh > \"${fpath[1]}/_weft\"
  weft completion fish > ~/.config/fish/completions/weft.fish

The script asks weft, which asks the cluster for names of namespaces, workloads, pods, Services and EgressNetworks."
    )]
    Completion {
        /// The shell to complete for
        shell: clap_complete::Shell,
    },
    /// Write manual pages of every command
    #[command(hide = true)]
    Man {
        /// Where to
        directory: PathBuf,
    },
    /// Run a container (internal)
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    SandboxInit {
        /// Specification of the container; removed when read
        spec_file: PathBuf,
    },
    /// Wait for a sandbox's daemon to end and remove what it left (internal)
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    SandboxJanitor {
        /// Name of the sandbox
        name: String,
    },
}

impl Cli {
    fn read(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(arguments::rewritten(&Self::command(), line))
    }
}

fn main() -> ExitCode {
    complete::answer(Cli::command);
    let Cli { color, command, .. } = Cli::read(env::args_os()).unwrap_or_else(|error| error.exit());
    color.choose();
    let failed = match execute(command) {
        Ok(code) => return code,
        Err(error) => error,
    };
    if output::is_closed_pipe(&failed) {
        // The reader has closed the pipe, as in `weft trace | head`.
        return ExitCode::SUCCESS;
    }
    output::note(&format!("{failed:#}"));
    ExitCode::FAILURE
}

fn execute(command: Command) -> Result<ExitCode> {
    match command {
        #[cfg(target_os = "linux")]
        Command::SandboxInit { spec_file } => Ok(sandbox_init(&spec_file)),
        #[cfg(target_os = "linux")]
        Command::SandboxJanitor { name } => {
            janitor::run(&name).with_context(|| format!("clean up after sandbox {name}"))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Sandbox(args) => wait(|| sandbox::execute(args))?,
        Command::Trace(args) => {
            wait(|| trace::execute(args))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Metrics(verb) => {
            wait(|| viz::execute(verb))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Explain(args) => {
            wait(|| explain::execute(args))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Check(args) => wait(|| check::execute(args))?,
        Command::Status(args) => {
            wait(|| status::execute(args))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Dashboard(args) => {
            wait(|| dashboard::execute(args))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Inject(args) => wait(|| inject::inject(*args))?,
        Command::Uninject(args) => wait(|| inject::uninject(args))?,
        Command::Diagnostics(args) => wait(|| diagnostics::execute(args))?,
        Command::Identity(args) => wait(|| identity::execute(args))?,
        Command::Authz(args) => {
            wait(|| authz::execute(args))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Profile(args) => wait(|| profile::execute(args))?,
        Command::Install(args) => wait(|| install::install(args))?,
        Command::Upgrade(args) => wait(|| install::upgrade(args))?,
        Command::Uninstall(args) => wait(|| install::uninstall(args))?,
        Command::Prune(args) => wait(|| install::prune(args))?,
        Command::Viz(args) => wait(|| extension::execute(args))?,
        Command::Absent(command) => Ok(command.refuse()),
        Command::Version(args) => {
            wait(|| version::execute(&args))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { directory } => {
            let pages = clap_mangen::generate_to(Cli::command(), &directory);
            pages.with_context(|| format!("write manual pages to {}", directory.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completion { shell } => {
            let mut script = Vec::new();
            complete::script(shell, &mut script)?;
            io::stdout().write_all(&script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Namespaces belong to a thread: this runs before there is a second one.
#[cfg(target_os = "linux")]
fn sandbox_init(spec_file: &std::path::Path) -> ExitCode {
    let error = container::init(spec_file);
    output::note(&error.to_string());
    ExitCode::from(error.exit_code())
}

/// Runs a command. Its future is made here, in a frame of its own: in a frame of all of them they would not fit on a
/// thread's stack in a debug build.
#[inline(never)]
fn wait<F: Future>(command: impl FnOnce() -> F) -> Result<F::Output> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    Ok(runtime.context("start tokio")?.block_on(command()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn colours_can_be_chosen_before_and_after_the_command() {
        for arguments in [["weft", "--color", "never", "status"], ["weft", "status", "--color", "never"]] {
            assert_eq!(Cli::try_parse_from(arguments).unwrap().color, output::Colour::Never);
        }
        assert_eq!(Cli::try_parse_from(["weft", "status"]).unwrap().color, output::Colour::Auto);
        assert!(Cli::try_parse_from(["weft", "status", "--color", "sometimes"]).is_err());
    }

    /// Every command that does something, by its names.
    fn leaves(command: &clap::Command, names: &[&str]) -> Vec<Vec<String>> {
        if !command.has_subcommands() {
            return vec![names.iter().map(|name| (*name).to_owned()).collect()];
        }
        command.get_subcommands().flat_map(|it| leaves(it, &[names, &[it.get_name()]].concat())).collect()
    }

    /// Without arguments that have to be given.
    fn lenient(command: clap::Command) -> clap::Command {
        command.mut_args(|arg| arg.required(false)).mut_subcommands(lenient)
    }

    fn of_leaf(root: &clap::Command, line: &[&str]) -> Result<clap::ArgMatches, clap::Error> {
        let line = arguments::rewritten(root, line.iter().map(OsString::from));
        let mut matches = root.clone().try_get_matches_from(line)?;
        while let Some((_, below)) = matches.remove_subcommand() {
            matches = below;
        }
        Ok(matches)
    }

    #[test]
    fn the_cluster_can_be_chosen_before_and_after_every_command_that_takes_one() {
        let root = lenient(Cli::command());
        let choice = ["--context=west", "-L", "mesh", "--as", "jane", "--as-group=dev", "--verbose"];
        let (mut taking, mut others) = (0, Vec::new());
        for names in leaves(&root, &[]) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let first = [&["weft"], choice.as_slice(), names.as_slice()].concat();
            let last = [&["weft"], names.as_slice(), choice.as_slice()].concat();
            let between = [&["weft"], &names[..1], choice.as_slice(), &names[1..]].concat();
            let is_unknown = |line: &[&str]| {
                of_leaf(&root, line).is_err_and(|error| error.kind() == clap::error::ErrorKind::UnknownArgument)
            };
            if is_unknown(&last) {
                assert!(!is_unknown(&first), "{names:?}");
                others.push(names.join(" "));
                continue;
            }
            taking += 1;
            for line in [first, last, between] {
                let matches = match of_leaf(&root, &line) {
                    Ok(matches) => matches,
                    // One of several arguments is required.
                    Err(error) if error.kind() == clap::error::ErrorKind::MissingRequiredArgument => continue,
                    Err(error) => panic!("{line:?}: {error}"),
                };
                // A command that is not here takes everything as it is.
                if matches.try_contains_id("context").is_ok() {
                    let one = |id| matches.get_one::<String>(id).map(String::as_str);
                    assert_eq!((one("context"), one("linkerd_namespace")), (Some("west"), Some("mesh")), "{line:?}");
                    assert!(matches.get_flag("verbose") && one("impersonate") == Some("jane"), "{line:?}");
                }
            }
        }
        assert!(taking > 30, "{taking}: {others:?}");
        others.retain(|name| !name.starts_with("sandbox"));
        assert_eq!(others, ["uninject", "completion", "man"]);
    }

    #[test]
    fn a_cluster_before_the_command_excludes_a_sandbox_after_it() {
        let read = |line: &str| Cli::read(line.split(' ').map(OsString::from));
        assert!(read("weft --context west status").is_ok() && read("weft status --sandbox default").is_ok());
        assert!(read("weft --context west status --sandbox default").is_err());
        assert!(read("weft --api-addr 127.0.0.1:8086 check").is_ok());
        assert!(read("weft --api-addr 127.0.0.1:8086 install").is_ok());
        assert!(read("weft install --api-addr 127.0.0.1:8086").is_err());
    }

    fn shown(arguments: &[&str]) -> String {
        format!("{:?}", Cli::try_parse_from(arguments).unwrap().command)
    }

    #[test]
    fn verbs_of_linkerds_extension_are_understood_below_viz() {
        let verbs: [&[&str]; 8] = [
            &["stat", "deploy", "-n", "shop", "-o", "wide"],
            &["stat-inbound", "deploy/web"],
            &["stat-outbound", "deploy/web"],
            &["edges", "po"],
            &["routes", "svc/web"],
            &["top", "deploy/web"],
            &["tap", "deploy/web", "--method", "POST"],
            &["dashboard", "--port", "0"],
        ];
        for arguments in verbs {
            let below = [&["weft", "viz"], arguments].concat();
            let at_root = shown(&[&["weft"], arguments].concat());
            // The same arguments, in another command.
            let (_, of_root) = at_root.split_once('(').unwrap();
            assert!(shown(&below).contains(of_root), "{arguments:?}: {at_root}");
        }
    }

    #[test]
    fn commands_that_only_linkerd_has_are_refused_by_name_whatever_follows() {
        let commands: [&[&str]; 10] = [
            &["install-cni"],
            &["multicluster", "link", "--cluster-name", "west"],
            &["mc", "gateways"],
            &["jaeger", "install"],
            &["repair", "--force"],
            &["viz", "list", "-n", "shop"],
            &["viz", "allow-scrapes", "--target-namespace", "shop"],
            &["viz", "profile", "--tap", "deploy/web", "web"],
            &["viz", "authz", "-n", "shop", "deploy/web"],
            &["viz", "prune"],
        ];
        for arguments in commands {
            let command = Cli::try_parse_from([&["weft"], arguments].concat()).unwrap().command;
            assert_eq!(format!("{:?}", execute(command).unwrap()), format!("{:?}", ExitCode::from(2)), "{arguments:?}");
        }
        let help = Cli::command().render_long_help().to_string();
        assert!(!help.contains("install-cni") && !help.contains("multicluster"), "{help}");
    }

    #[test]
    fn completion_has_an_older_name() {
        assert!(Cli::try_parse_from(["weft", "completions", "bash"]).is_ok());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_the_sandbox_starts_is_understood_but_not_shown() {
        assert!(Cli::try_parse_from(["weft", "sandbox-init", "spec.json"]).is_ok());
        assert!(Cli::try_parse_from(["weft", "sandbox-janitor", "default"]).is_ok());
        let help = Cli::command().render_long_help().to_string();
        assert!(!help.contains("sandbox-init") && !help.contains("sandbox-janitor"));
    }
}
