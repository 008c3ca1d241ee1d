//! The subcommands of `cargo xtask` that make machines and what runs on them; it starts this program.
//!
//! [`kube`] is a cluster to run in, [`kernels`] runs on other kernels, [`bare`] on a new machine, [`dist`] is what is
//! shipped, [`record`] draws terminals, [`tools`] are the programs of a cluster, [`processor`] is what they are for.
//! Building, packages and toolchains are `weft_xtask`'s.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "results on standard output, progress on standard error"
)]

mod bare;
mod dist;
mod kernels;
mod kube;
mod libraries;
mod processor;
mod record;
mod tools;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot older and newer kernels and run the agent's datapath test on each
    Kernels(kernels::Args),
    /// Run a real Kubernetes on this machine
    Kube(kube::Args),
    /// Write container images and packaged charts
    Dist(dist::Args),
    /// Run the demo or the tests in the root file system of a new machine
    Bare(bare::Args),
    /// Draw what a command shows in a terminal, for the documents
    Record(record::Args),
    /// Print a completion script
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
        Command::Kernels(args) => kernels::run(&args),
        Command::Kube(args) => kube::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Bare(args) => bare::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut command_line(), "cargo-xtask", &mut std::io::stdout());
            Ok(())
        }
    }
}

/// The command line of `cargo xtask` with the options of this program in their places.
fn command_line() -> clap::Command {
    let own = Cli::command();
    own.get_subcommands().fold(weft_xtask::command_line(), |whole, subcommand| {
        whole.mut_subcommand(subcommand.get_name(), |_| subcommand.clone())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        command_line().debug_assert();
    }

    #[test]
    fn every_subcommand_is_one_of_cargo_xtask_in_the_same_words() {
        let outer = weft_xtask::command_line();
        for own in Cli::command().get_subcommands() {
            let name = own.get_name();
            let known = outer.find_subcommand(name).unwrap_or_else(|| panic!("{name}: cargo xtask does not start it"));
            assert_eq!(known.get_about().map(ToString::to_string), own.get_about().map(ToString::to_string), "{name}");
        }
    }

    #[test]
    fn completions_cover_both_programs() {
        let mut script = Vec::new();
        clap_complete::generate(clap_complete::Shell::Bash, &mut command_line(), "cargo-xtask", &mut script);
        let script = String::from_utf8(script).expect("a script is text");
        for word in ["--control-plane-only", "--accelerator", "--quick", "interception"] {
            assert!(script.contains(word), "{word}");
        }
    }
}
