//! `pgo`: makes the profile for profile-guided optimisation of the proxy that users get.
//!
//! The profile is a file of the repository, so that a release runs nothing and comes out the same each time
//! ([decision 39](../../docs/adr/0039-profile-guided-optimisation.md)). The loads are those of `bench proxy`, between
//! two proxies with mutual TLS.

use std::{
    env,
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    build,
    command::{self, step},
    ebpf,
    setup::{self, Scope, toolchain},
    workspace::{self, Workspace},
};

/// The rows of the bench that run: everything that proxies do while they are not idle.
const ROWS: &str = "http1-1,http1-16,http1-64,http1-256,http2-1x64,http2-16x4,connection,open-1000,open-5000,bulk,\
                    round-trip,grpc-unary,grpc-stream";

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask pgo                  after a change of the data path, of its dependencies or of Rust
  cargo xtask bench proxy          measures the proxy with the profile
  cargo xtask dist                 ships it

Functions that have changed since the profile was made are compiled as without one. It needs root, as `bench proxy` does, and
llvm-profdata of rustc's LLVM: rustup's component llvm-tools, or the distribution's package of that LLVM.")]
pub(crate) struct Args {
    /// How long each load runs, seconds
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
}

/// Builds, runs and writes the profile.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let toolchain = setup::ensure(Scope::Run)?;
    let merge = toolchain::llvm_tool("llvm-profdata")?;
    let counts = Counts::create()?;
    ebpf::build(&workspace, &toolchain)?;
    let binaries = build::instrumented(&workspace, &counts.directory)?;
    step("run the loads of the bench");
    let mut bench = Command::new(binaries.join("weft-bench"));
    bench.args(["proxy", "--contenders", "weft", "--rows", ROWS, "--repetitions", "1", "--seconds"]);
    command::run(bench.arg(args.seconds.to_string()).current_dir(&workspace.root).env("WEFT_BIN_DIR", &binaries))?;
    let files = workspace::files(&counts.directory, "profraw")?;
    ensure!(!files.is_empty(), "the proxies wrote no counts into {}", counts.directory.display());
    let profile = build::pgo_profile(&workspace, &build::own_target());
    step(&format!("write {}", profile.display()));
    fs::create_dir_all(profile.parent().context("the profile is in a directory")?)?;
    // Without the functions that never ran, which would be most of the file.
    command::run(Command::new(merge).args(["merge", "--sparse", "--output"]).arg(&profile).args(files))
}

/// Where the proxies write what they count, removed when dropped. Its path is in the program, so that it is always the
/// same; and they write as users that may not enter the directories of the one that builds.
struct Counts {
    directory: PathBuf,
    /// Held for as long as the directory is used.
    _turn: File,
}

impl Counts {
    fn create() -> Result<Self> {
        let turn = workspace::lock(&workspace::cache_directory()?.join("pgo.lock"))?;
        let directory = env::temp_dir().join("weft-pgo");
        // Of a run that was killed.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).with_context(|| format!("create {}", directory.display()))?;
        let counts = Self { directory, _turn: turn };
        fs::set_permissions(&counts.directory, fs::Permissions::from_mode(0o777))?;
        Ok(counts)
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}
