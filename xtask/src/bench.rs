//! `bench`: an optimised build of everything, then `weft-bench`, which produces the numbers in the documentation.

use std::os::unix::process::CommandExt;

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::{
    build::{self, Profile},
    command::step,
    ebpf,
    setup::{self, Scope},
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
}

/// Runs the bench; returns only if a step before it failed.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let toolchain = setup::ensure(Scope::Run)?;
    ebpf::build(&workspace, &toolchain)?;
    let binaries = build::binaries(&workspace, Profile::Release)?;
    let (subject, arguments) = match &args.subject {
        Subject::Interception { arguments } => ("interception", arguments),
        Subject::Churn { arguments } => ("churn", arguments),
    };
    step(&format!("measure {subject}"));
    let error = std::process::Command::new(binaries.join("weft-bench"))
        .arg(subject)
        .args(arguments)
        .current_dir(&workspace.root)
        .env("WEFT_BIN_DIR", &binaries)
        .exec();
    Err(error).context("start weft-bench")
}
