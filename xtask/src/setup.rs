//! `setup`: finds what is missing, reports what it is and why it is needed, and installs it.
//!
//! Detection looks for the thing itself (a program, a file, a compiler's version), never for a package, so that a
//! machine prepared in any other way is accepted. apt and cargo install; without apt or root, a message says what to
//! run. Nothing is written into the checkout.

pub mod cargo_tools;
pub(crate) mod kernel;
pub mod packages;
pub mod toolchain;

use anyhow::{Context as _, Result, bail};

use crate::command::step;
use toolchain::Toolchain;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask setup              install what is missing
  cargo xtask setup --check      only report; exit code 1 when something is missing

The kernel programs need a compiler that can build `core` for bpfel-unknown-none, and bpf-linker with the same LLVM:
  1. rustup toolchain install nightly --profile minimal --component rust-src,clippy; cargo install bpf-linker
  2. Debian's rustc-web, rust-web-src and llvm-22-dev, and bpf-linker built against them
Whichever is found is used; where neither is, setup installs the second with apt, else the first with rustup.")]
pub(crate) struct Args {
    /// Report without installing
    #[arg(long)]
    check: bool,
}

/// The purpose, which determines the requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Compile.
    Build,
    /// Compile, then create pods and load programs: root, kernel features and network tools as well.
    Run,
    /// Compile and run, and run a Kubernetes node: container runtime and network plugins as well.
    Kube,
    /// Compile, and boot other kernels: also an emulator and the parts of an initramfs.
    Kernels,
    /// The same for arm64.
    KernelsArm64,
}

/// Installs or reports.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.check {
        return report();
    }
    ensure(Scope::Build)?;
    install_packages(Scope::Kube)?;
    cargo_tools::ensure(&cargo_tools::CARGO_DENY)?;
    can_run().context("everything is installed, but nothing can run here")?;
    step("everything is there");
    Ok(())
}

/// Ensures that everything for `scope` is there, and installs what is missing. Quiet and fast if nothing is missing.
///
/// # Errors
/// When something is missing and cannot be installed; the message says what and what to do.
pub fn ensure(scope: Scope) -> Result<Toolchain> {
    if scope != Scope::Build {
        can_run()?;
    }
    install_packages(scope)?;
    toolchain::ensure()
}

/// Whether pods and programs can run here: checked before minutes of building, not after.
///
/// # Errors
/// With all that the kernel or this user lacks.
pub(crate) fn can_run() -> Result<()> {
    let problems = kernel::problems();
    if !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(())
}

/// Ensures only programs and libraries of the distribution.
///
/// # Errors
/// As [`ensure`].
pub fn install_packages(scope: Scope) -> Result<()> {
    packages::install(&packages::missing(scope))
}

fn report() -> Result<()> {
    let mut missing = 0;
    for need in packages::missing(Scope::Kube) {
        missing += 1;
        println!("missing  {}: {} (apt: {})", need.probe, need.why, need.package);
    }
    match toolchain::detect() {
        Ok(found) => println!("found    {found}"),
        Err(problem) => {
            missing += 1;
            println!("missing  eBPF toolchain: {problem:#}");
        }
    }
    if cargo_tools::find(&cargo_tools::CARGO_DENY)?.is_none() {
        missing += 1;
        println!("missing  cargo-deny: {} (cargo install)", cargo_tools::CARGO_DENY.why);
    }
    for problem in kernel::problems() {
        missing += 1;
        println!("missing  {problem}");
    }
    if missing > 0 {
        bail!(
            "{missing} of the things that Weft needs are missing; `cargo xtask setup` installs what can be installed"
        );
    }
    println!("found    everything that building, demo, tests, benches and clusters need");
    Ok(())
}
