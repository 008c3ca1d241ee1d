//! Developer commands: `cargo xtask help`.
//!
//! Everything that a person or a machine does to this repository goes through here, so that the two commands of the
//! README are the whole set-up: [`setup`] installs what is missing, [`ebpf`] builds the kernel programs, [`demo`],
//! [`mod@test`], [`upgrade`] and [`mod@bench`] build and run, [`lint`] checks. Clusters, other kernels, images and bare
//! machines are a program of their own, which [`lab`] builds when it is asked for and which uses this library. It
//! shells out and depends on none of our packages, so it builds fast and works when they do not compile.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "results on standard output, progress on standard error"
)]

mod bench;
pub mod build;
mod codegen;
pub mod command;
mod demo;
pub mod ebpf;
mod fuzz;
mod lab;
mod lint;
mod pgo;
mod previous;
pub mod setup;
mod test;
mod upgrade;
pub mod workspace;

use std::{ffi::OsString, process::ExitCode};

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Set up, build, demonstrate, test, measure and check Weft.
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
  cargo xtask upgrade --from v0.1.0     back to an earlier version and up again, in a cluster, under load
  cargo xtask bench interception        direct, iptables and eBPF side by side
  cargo xtask bench control-plane       a real API server, thousands of objects, thousands of proxies' streams
  cargo xtask bench viz                 weft-viz and the metrics of 1,000 pods
  cargo xtask pgo                       make the PGO profile with which the shipped proxy is built
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
    /// Install what building and running need and report what the kernel lacks
    Setup(setup::Args),
    /// Build the kernel programs
    Ebpf(ebpf::Args),
    /// Run a real mesh on this host, show it, clean up
    Demo(demo::Args),
    /// Run the tests
    Test(test::Args),
    /// Upgrade a mesh from an earlier revision and take it back, in a cluster, while requests run
    Upgrade(upgrade::Args),
    /// Boot older and newer kernels and run the agent's datapath test on each
    #[command(disable_help_flag = true)]
    Kernels(lab::Args),
    /// Fuzz every parser of untrusted bytes
    Fuzz(fuzz::Args),
    /// Run the benchmarks
    Bench(bench::Args),
    /// Make the profile for profile-guided optimisation of the shipped proxy
    Pgo(pgo::Args),
    /// Run a real Kubernetes on this machine
    #[command(disable_help_flag = true)]
    Kube(lab::Args),
    /// Write container images and packaged charts
    #[command(disable_help_flag = true)]
    Dist(lab::Args),
    /// Run the demo or the tests in the root file system of a new machine
    #[command(disable_help_flag = true)]
    Bare(lab::Args),
    /// Draw what a command shows in a terminal, for the documents
    #[command(disable_help_flag = true)]
    Record(lab::Args),
    /// Check formatting, lints, dependency edges and the conventions of CONTRIBUTING.md
    Lint(lint::Args),
    /// Write the files that are generated from code, or check that they are current
    Codegen(codegen::Args),
    /// Print a completion script
    #[command(disable_help_flag = true)]
    Completions(lab::Args),
}

/// The command line, without the options of the programs that it starts.
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Does what this process's command line says.
pub fn main() -> ExitCode {
    match run(Cli::parse_from(for_lab(std::env::args_os().collect())).command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The program of the lab answers `help` for its subcommands: `help kube up` becomes `kube up --help`.
fn for_lab(mut words: Vec<OsString>) -> Vec<OsString> {
    let is_help = words.get(1).is_some_and(|word| word == "help");
    if is_help && words.get(2).and_then(|word| word.to_str()).is_some_and(|word| lab::SUBCOMMANDS.contains(&word)) {
        words.remove(1);
        words.push("--help".into());
    }
    words
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Setup(args) => setup::run(&args),
        Command::Ebpf(args) => ebpf::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Kernels(args) => lab::run("kernels", &args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Pgo(args) => pgo::run(&args),
        Command::Kube(args) => lab::run("kube", &args),
        Command::Dist(args) => lab::run("dist", &args),
        Command::Bare(args) => lab::run("bare", &args),
        Command::Record(args) => lab::run("record", &args),
        Command::Lint(args) => lint::run(&args),
        Command::Codegen(args) => codegen::run(&args),
        Command::Completions(args) => lab::run("completions", &args),
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

    #[test]
    fn the_lab_answers_for_its_subcommands() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert_eq!(for_lab(words("xtask help kube up")), words("xtask kube up --help"));
        for line in ["xtask help", "xtask help lint", "xtask kube up"] {
            assert_eq!(for_lab(words(line)), words(line));
        }
        let cli = Cli::try_parse_from(words("xtask kube up --help")).expect("the lab's to answer");
        let Command::Kube(args) = cli.command else { panic!("not the lab: {cli:?}") };
        assert_eq!(args.arguments, ["up", "--help"]);
    }
}
