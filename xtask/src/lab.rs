//! `kube`, `kernels`, `dist`, `bare`, `record`, `completions`: the program `weft-lab`, built when it is first asked
//! for.
//!
//! Code for clusters, emulators and images is most of xtask's and is rarely run.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{command, workspace::Workspace};

/// What the program does. That it does exactly this is tested beside it.
pub(crate) const SUBCOMMANDS: [&str; 6] = ["bare", "completions", "dist", "kernels", "kube", "record"];
/// Package and program.
const NAME: &str = "weft-lab";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Arguments for the lab; --help shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub(crate) arguments: Vec<OsString>,
}

/// Becomes the program, so that Ctrl-C and the exit code are its own; returns only when something before it failed.
pub(crate) fn run(subcommand: &str, args: &Args) -> Result<()> {
    let lab = Lab::build(&Workspace::load()?)?;
    let error = lab.command(&[subcommand]).args(&args.arguments).exec();
    Err(error).context("start weft-lab")
}

/// The built program `weft-lab`.
#[derive(Clone, Debug)]
pub(crate) struct Lab {
    program: PathBuf,
}

impl Lab {
    /// Builds it.
    ///
    /// # Errors
    /// When it does not compile.
    pub(crate) fn build(workspace: &Workspace) -> Result<Self> {
        let mut cargo = command::cargo();
        command::run(cargo.args(["build", "--quiet", "--package", NAME]).current_dir(&workspace.root))?;
        Ok(Self::at(&workspace.binaries("debug")))
    }

    /// The one in a directory of built programs.
    pub(crate) fn at(binaries: &Path) -> Self {
        Self { program: binaries.join(NAME) }
    }

    /// The program's file.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// The program with arguments, ready to start.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments);
        command
    }
}
