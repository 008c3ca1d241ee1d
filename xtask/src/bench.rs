//! `bench`: an optimised build of everything, then `weft-bench`. Numbers in the documentation come from here.

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
    /// Compares direct connections, iptables redirection and eBPF redirection in one run
    #[command(after_help = "Examples:
  cargo xtask bench interception
  cargo xtask bench interception --json --repetitions 9
  cargo xtask bench interception -- --help     every option of weft-bench")]
    Interception {
        /// Arguments for `weft-bench interception`, such as --json and --repetitions N
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
}

/// Runs the bench; returns only when something before it failed.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let toolchain = setup::ensure(Scope::Run)?;
    ebpf::build(&workspace, &toolchain)?;
    let binaries = build::binaries(&workspace, Profile::Release)?;
    let Subject::Interception { arguments } = &args.subject;
    step("measure interception");
    let error = std::process::Command::new(binaries.join("weft-bench"))
        .arg("interception")
        .args(arguments)
        .current_dir(&workspace.root)
        .env("WEFT_BIN_DIR", &binaries)
        .exec();
    Err(error).context("start weft-bench")
}
