//! `demo`: sets up, builds, and executes `weft-demo` in its place, so that Ctrl-C and the exit code are the demo's
//! own.

use std::os::unix::process::CommandExt;

use anyhow::{Context, Result};

use crate::{
    build::{self, Profile},
    command::step,
    ebpf,
    setup::{self, Scope},
    workspace::Workspace,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask demo                run, show, clean up
  cargo xtask demo --json         the last line of standard output is one JSON object
  cargo xtask demo --keep         leave the mesh running and say how to reach, trace and stop it
  cargo xtask demo -- --help      every option of the demo")]
pub(crate) struct Args {
    /// Arguments for weft-demo
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub(crate) arguments: Vec<String>,
}

/// Runs the demo; returns only if a step before it failed.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let toolchain = setup::ensure(Scope::Run)?;
    ebpf::build(&workspace, &toolchain)?;
    let binaries = build::binaries(&workspace, Profile::Dev)?;
    step("run the demo");
    let error = std::process::Command::new(binaries.join("weft-demo"))
        .args(&args.arguments)
        .current_dir(&workspace.root)
        .env("WEFT_BIN_DIR", &binaries)
        .exec();
    Err(error).context("start weft-demo")
}
