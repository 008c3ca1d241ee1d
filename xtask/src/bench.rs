//! `bench`: an optimised build of everything, then `weft-bench`, which produces the numbers in the documentation.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::{
    build::{self, Profile},
    command::{self, step},
    ebpf,
    lab::Lab,
    setup::{self, Scope, packages},
    workspace::Workspace,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// Compare direct connections, iptables redirection and eBPF redirection in one run, hook by hook and as a whole
    #[command(after_help = "Examples:
  cargo xtask bench interception
  cargo xtask bench interception --json --repetitions 9
  cargo xtask bench interception --parts hooks,enrolment,memory
  cargo xtask bench interception -- --help     every option of weft-bench")]
    Interception {
        /// Arguments for `weft-bench interception`, such as --json and --repetitions N
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
    /// Start and stop pods in a loop: no byte may bypass the proxy, nothing may be left behind
    #[command(after_help = "Examples:
  cargo xtask bench churn
  cargo xtask bench churn --pods 1000 --json
  cargo xtask bench churn -- --help            every option of weft-bench")]
    Churn {
        /// Arguments for `weft-bench churn`, such as --json and --pods N
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
    /// Measure the control plane with a real API server, thousands of objects and simulated proxies
    #[command(after_help = "Examples:
  cargo xtask bench control-plane --json
  cargo xtask bench control-plane --parts start,changes --seconds 60
  cargo xtask bench control-plane --pods 1000 --services 100 --clients 200 --rollout-pods 100
  cargo xtask bench control-plane -- --help    every option of weft-bench

It starts an API server of its own (`cargo xtask kube up --control-plane-only`) and removes it at the end; needs root.
With --kubeconfig FILE it uses one that runs, and removes its objects from it.")]
    ControlPlane {
        /// Arguments for `weft-bench control-plane`, such as --json and --clients N
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
    /// Compare two proxies of ours with two HAProxys and with none: CPU, latency, memory, row by row
    #[command(after_help = "Examples:
  cargo xtask bench proxy --json
  cargo xtask bench proxy --rows http1-64,http2-1x64 --repetitions 9
  cargo xtask bench proxy --baseline DIR       another commit's target/measured takes part
  cargo xtask bench proxy -- --help            every option of weft-bench

The proxy is built as `cargo xtask dist` builds it, with the profile of `cargo xtask pgo`, into target/measured. It
installs Debian's haproxy, which nothing else here needs.")]
    Proxy {
        /// Arguments for `weft-bench proxy`, such as --json and --rows ROW,ROW
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
    /// Measure what collecting the metrics of 1,000 pods costs weft-viz and a proxy
    #[command(after_help = "Examples:
  cargo xtask bench viz --json
  cargo xtask bench viz --parts window --interval-seconds 10   a window of 15 minutes in 15 minutes
  cargo xtask bench viz --pods 3000 --destinations 5
  cargo xtask bench viz -- --help              every option of weft-bench

It starts an API server of its own (`cargo xtask kube up --control-plane-only`) and removes it at the end; needs root.")]
    Viz {
        /// Arguments for `weft-bench viz`, such as --json and --pods N
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
    /// Draw the pictures in docs/benchmarks from the data beside them, which the others print with --json
    #[command(after_help = "Examples:
  cargo xtask bench plot
  cargo xtask bench plot --data /tmp/run --output /tmp/run")]
    Plot {
        /// Arguments for `weft-bench plot`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
}

/// Tells `weft-bench` which program starts an API server.
const LAB_VARIABLE: &str = "WEFT_LAB";

/// Runs the bench; returns only if a step before it failed.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    if let Subject::Plot { arguments } = &args.subject {
        // Nothing is measured: an unoptimised build will do.
        let mut plot = command::cargo();
        plot.args(["run", "--quiet", "--package", "weft-bench", "--", "plot"]).args(arguments);
        return command::run(plot.current_dir(&workspace.root));
    }
    let toolchain = setup::ensure(Scope::Run)?;
    if let Subject::Proxy { arguments } = &args.subject {
        packages::ensure(&packages::PEER)?;
        if arguments.iter().any(|argument| argument.starts_with("--profile")) {
            packages::ensure(&packages::PROFILER)?;
        }
    }
    ebpf::build(&workspace, &toolchain)?;
    let binaries = match args.subject {
        Subject::Proxy { .. } => build::measured(&workspace)?,
        _ => build::binaries(&workspace, Profile::Release)?,
    };
    let (subject, arguments) = match &args.subject {
        Subject::Interception { arguments } => ("interception", arguments),
        Subject::Churn { arguments } => ("churn", arguments),
        Subject::ControlPlane { arguments } => ("control-plane", arguments),
        Subject::Proxy { arguments } => ("proxy", arguments),
        Subject::Viz { arguments } => ("viz", arguments),
        Subject::Plot { arguments } => ("plot", arguments),
    };
    let mut bench = Command::new(binaries.join("weft-bench"));
    bench.arg(subject).args(arguments).current_dir(&workspace.root).env("WEFT_BIN_DIR", &binaries);
    if matches!(args.subject, Subject::ControlPlane { .. } | Subject::Viz { .. }) {
        bench.env(LAB_VARIABLE, Lab::build(&workspace)?.program());
    }
    step(&format!("measure {subject}"));
    Err(bench.exec()).context("start weft-bench")
}
