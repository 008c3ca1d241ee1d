//! Developer commands: `cargo xtask help`.
//!
//! Everything that a person or a machine does to this repository goes through here, so that the two commands of the
//! README are the whole set-up: [`setup`] installs what is missing, [`ebpf`] builds the kernel programs, [`demo`],
//! [`mod@test`] and [`mod@bench`] build and run, [`kernels`] runs on other kernels, [`bare`] on a new machine, [`kube`] is a
//! cluster to run in, [`dist`] is what is shipped, [`lint`] checks. It shells out and depends on none of our packages, so
//! it builds fast and works when they do not compile.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "results on standard output, progress on standard error"
)]

mod bare;
mod bench;
mod build;
mod codegen;
mod command;
mod demo;
mod dist;
mod ebpf;
mod fuzz;
mod kernels;
mod kube;
mod lint;
mod setup;
mod test;
mod tools;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Sets up, builds, demonstrates, tests, measures and checks Weft.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    version,
    after_help = "Examples:
  cargo xtask demo                      install what is missing, build, run a mesh on this host, clean up
  cargo xtask demo --json               the same; the last line of standard output is one JSON object
  cargo xtask test                      unit tests, then tests against the real kernel
  cargo xtask test unit -- verdict      unit tests whose name contains \"verdict\", without root
  cargo xtask bench interception        direct, iptables and eBPF side by side
  cargo xtask fuzz                      every parser of untrusted bytes, a minute each
  cargo xtask kernels 5.15 6.1          the agent's datapath test on other kernels, in qemu
  cargo xtask kube up                   a real Kubernetes on this machine, with Weft's images in it
  cargo xtask dist                      container images and charts
  cargo xtask bare --run demo           the same as on a new Debian with nothing but Rust
  cargo xtask lint                      what has to pass before a push
  cargo xtask setup --check             say what is missing, change nothing

The target directory is cargo's (CARGO_TARGET_DIR is respected). Tools are kept in ~/.cache/weft (WEFT_CACHE_DIR)."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Installs what building and running need and reports what the kernel lacks
    Setup(setup::Args),
    /// Builds the kernel programs
    Ebpf(ebpf::Args),
    /// Runs a real mesh on this host, shows it, cleans up
    Demo(demo::Args),
    /// Runs the tests
    Test(test::Args),
    /// Boots older and newer kernels and runs the agent's datapath test on each
    Kernels(kernels::Args),
    /// Gives what reads untrusted bytes inputs that break it, as long as there are any
    Fuzz(fuzz::Args),
    /// Measures
    Bench(bench::Args),
    /// Runs a real Kubernetes on this machine
    Kube(kube::Args),
    /// Writes container images and packaged charts
    Dist(dist::Args),
    /// Runs the demo or the tests in the root file system of a new machine
    Bare(bare::Args),
    /// Checks formatting, lints, dependency edges and the conventions of CONTRIBUTING.md
    Lint(lint::Args),
    /// Writes the files that are generated from code, or checks that they are current
    Codegen(codegen::Args),
    /// Prints a completion script
    Completions {
        /// The shell to complete for
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Setup(args) => setup::run(&args),
        Command::Ebpf(args) => ebpf::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Kube(args) => kube::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Bare(args) => bare::run(&args),
        Command::Lint(args) => lint::run(&args),
        Command::Codegen(args) => codegen::run(&args),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "cargo-xtask", &mut std::io::stdout());
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_of_the_demo_reach_it_untouched() {
        let cli = Cli::try_parse_from(["cargo xtask", "demo", "--json", "--keep"]).expect("parses");
        let Command::Demo(args) = cli.command else { panic!("not the demo: {cli:?}") };
        assert_eq!(args.arguments, ["--json", "--keep"]);
    }
}
