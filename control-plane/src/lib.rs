//! The control plane as a library, for its own program and its fuzz targets: discovery, policy and identity for the
//! proxies of a mesh. Nothing else may use it: applications meet on gRPC.
//!
//! Start reading at `app`: it binds the servers, starts every task, and stops them again.

#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests start what they end with"))]

mod allowance;
mod api;
mod app;
mod args;
mod authority;
mod clusters;
mod destination;
mod file_changes;
pub mod fuzz;
mod grpc;
mod identity;
mod lease;
mod metrics;
mod policy;
mod slices;
mod source;
mod status;
mod stream;
mod webhook;

use std::process::ExitCode;

use clap::CommandFactory;

use args::{Args, Command};

/// Parses the command line and runs the command.
///
/// Exits with 2 if the command line is invalid, with 1 if the command fails, otherwise with 0.
pub fn main() -> ExitCode {
    let args = Args::of_process();
    let (command, log) = match args.command {
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Args::command(), "weft-control-plane", &mut std::io::stdout());
            return ExitCode::SUCCESS;
        }
        Command::Run(command) => (command, args.log),
    };
    match app::main(&command, &log) {
        Ok(()) => ExitCode::SUCCESS,
        #[expect(clippy::print_stderr, reason = "the log may not have been set up")]
        Err(error) => {
            eprintln!("weft-control-plane: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes on one line, without causes that the previous message already contains.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.replace('\n', " ")
}
