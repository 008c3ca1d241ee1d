//! `test`: unit tests of every package, then tests against the real kernel.
//!
//! The level is in the path: integration tests of the packages in [`PRIVILEGED`] need root and BPF (`netns`), all
//! others run anywhere (`unit`). A privileged test never skips itself; without root, ask for `unit`.

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::{
    build::{self, Profile, Snapshot},
    command::{self, step},
    ebpf,
    setup::{self, Scope},
    workspace::Workspace,
};

/// Packages whose integration tests load programs, create namespaces and start the real binaries.
const PRIVILEGED: [&str; 3] = ["weft-agent", "weft-sandbox", "weft-tests"];

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask test                        everything; needs root
  cargo xtask test unit                   without root
  cargo xtask test netns -- websocket     tests against the kernel whose name contains \"websocket\"
  cargo xtask test netns -- --list        their names")]
pub(crate) struct Args {
    /// Which tests
    #[arg(value_enum, default_value_t = Level::All)]
    level: Level,
    /// Arguments for the test programs: a part of a name, --exact, --nocapture, --list
    #[arg(last = true, value_name = "FILTER")]
    filter: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Level {
    /// Tests that need no privilege
    Unit,
    /// Tests with network namespaces, cgroups and the kernel's BPF; root
    Netns,
    /// Both
    All,
}

/// Builds and runs the tests of a level.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let scope = if args.level == Level::Unit { Scope::Build } else { Scope::Run };
    let toolchain = setup::ensure(scope)?;
    ebpf::build(&workspace, &toolchain)?;
    let (privileged, plain): (Vec<_>, Vec<_>) =
        workspace.integration_tests().into_iter().partition(|(package, _)| PRIVILEGED.contains(&package.as_str()));
    let mut failed = Vec::new();
    if args.level != Level::Netns {
        step("unit tests");
        let mut selection = vec!["--lib".to_owned(), "--bins".to_owned()];
        selection.extend(plain.into_iter().flat_map(|(_, test)| ["--test".to_owned(), test]));
        if let Err(error) = cargo_test(&workspace, &selection, args, None) {
            // What the other level says is worth knowing too.
            eprintln!("error: {error:#}");
            failed.push("unit");
        }
    }
    if args.level != Level::Unit {
        let binaries = build::binaries(&workspace, Profile::Dev)?;
        let snapshot = Snapshot::take(&workspace, &binaries)?;
        step("tests against the kernel");
        let selection: Vec<_> = privileged.into_iter().flat_map(|(_, test)| ["--test".to_owned(), test]).collect();
        if selection.is_empty() {
            bail!("no integration tests found in {}", PRIVILEGED.join(" and "));
        }
        if let Err(error) = cargo_test(&workspace, &selection, args, Some(&snapshot)) {
            eprintln!("error: {error:#}");
            failed.push("netns");
        }
    }
    if !failed.is_empty() {
        bail!("tests failed: {}", failed.join(", "));
    }
    Ok(())
}

fn cargo_test(workspace: &Workspace, selection: &[String], args: &Args, binaries: Option<&Snapshot>) -> Result<()> {
    let mut cargo = command::cargo();
    cargo
        .current_dir(&workspace.root)
        .args(["test", "--workspace", "--no-fail-fast"])
        .args(selection)
        .arg("--")
        .args(&args.filter);
    if let Some(snapshot) = binaries {
        cargo.env("WEFT_BIN_DIR", snapshot.directory());
    }
    command::run_inheriting(&mut cargo)
}
