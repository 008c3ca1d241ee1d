//! `weft-control-plane`: discovery, policy and identity for the proxies of a mesh.
//!
//! Start reading at [`app`]: it binds the servers, starts every task, and stops them again.

mod app;
mod args;
mod destination;
mod identity;
mod index;
mod metrics;
mod policy;
mod source;
mod stream;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Args, Command};

fn main() -> ExitCode {
    let args = Args::parse();
    let (command, log) = match args.command {
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Args::command(), "weft-control-plane", &mut std::io::stdout());
            return ExitCode::SUCCESS;
        }
        Command::Run(command) => (command, args.log),
    };
    match app::main(&command, &log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whoever reads it: the chain of causes behind colons.
            eprintln!("weft-control-plane: {error:#}");
            ExitCode::FAILURE
        }
    }
}
