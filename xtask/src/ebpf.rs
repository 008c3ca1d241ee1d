//! `ebpf`: builds the kernel programs into `ebpf/target`, where the agent's build script expects them.
//!
//! The programs are a separate workspace: another target (`bpfel-unknown-none`) whose `core` has to be built from
//! source, which only nightly allows; see [`crate::setup::toolchain`] for the two supported compilers. Cargo skips
//! unchanged parts.

use std::{path::PathBuf, process::Command};

use anyhow::{Result, bail};

use crate::{
    command::{self, step},
    setup::{
        self, Scope,
        toolchain::{Compiler, Toolchain},
    },
    workspace::Workspace,
};

/// The target of the programs: the kernel's virtual machine, little-endian.
const TARGET: &str = "bpfel-unknown-none";

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask ebpf             build ebpf/target/bpfel-unknown-none/release/weft-ebpf
  cargo xtask ebpf --check     compile only as far as errors show")]
pub(crate) struct Args {
    /// Check without linking
    #[arg(long)]
    check: bool,
}

/// Builds or checks.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let toolchain = setup::ensure(Scope::Build)?;
    if args.check {
        step("check the kernel programs");
        return command::run(&mut cargo(&workspace, &toolchain, "check")?);
    }
    let object = build(&workspace, &toolchain)?;
    eprintln!("{}", object.display());
    Ok(())
}

/// Builds the object and returns its path.
///
/// # Errors
/// When it does not compile or bpf-linker refuses it.
pub fn build(workspace: &Workspace, toolchain: &Toolchain) -> Result<PathBuf> {
    step("build the kernel programs");
    command::run(&mut cargo(workspace, toolchain, "build")?)?;
    let object = workspace.ebpf().join("target").join(TARGET).join("release/weft-ebpf");
    if !object.is_file() {
        bail!(
            "cargo built the kernel programs but left no {}: does ebpf/Cargo.toml name the binary weft-ebpf?",
            object.display()
        );
    }
    Ok(object)
}

/// Flags of the compiler and of bpf-linker for the kernel programs.
const FLAGS: [&str; 3] = [
    // Line information becomes BTF, which the kernel prints with verifier errors and needs for typed maps.
    "-Cdebuginfo=2",
    "-Clink-arg=--btf",
    // Otherwise bpf-linker has memory cleared by a function of one byte at a time, which is a program of its own in the
    // kernel.
    "-Clink-arg=--disable-expand-memcpy-in-order",
    // No `-Ctarget-cpu=v3`: the verifier of Linux 5.10 loses the bounds of indices that are computed in 32 bits.
];

/// A cargo command (`build`, `check`, `clippy`) for the kernel programs, ready for more arguments.
///
/// # Errors
/// When PATH cannot be extended.
pub(crate) fn cargo(workspace: &Workspace, toolchain: &Toolchain, subcommand: &str) -> Result<Command> {
    let mut cargo = match &toolchain.compiler {
        Compiler::Nightly { .. } => {
            let mut rustup = Command::new("rustup");
            rustup.args(["run", "nightly", "cargo"]).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
            rustup
        }
        Compiler::System { rustc, .. } => {
            let mut cargo = command::cargo();
            // RUSTC_BOOTSTRAP lets a stable compiler accept `-Z build-std`.
            cargo.env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "1");
            cargo
        }
    };
    // Settings of a build for the host must not affect this one.
    for variable in [
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
        "CARGO_INCREMENTAL",
        "RUSTFLAGS",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
    ] {
        cargo.env_remove(variable);
    }
    let directory = workspace.ebpf();
    let flags: Vec<_> = FLAGS.map(str::to_owned).into_iter().chain(workspace.remapping()?).collect();
    cargo
        .current_dir(&directory)
        .arg(subcommand)
        .args(["--release", "-Z", "build-std=core", "--target", TARGET, "--target-dir"])
        .arg(directory.join("target"))
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("PATH", command::path_with(&toolchain.linker_directory)?);
    Ok(cargo)
}
