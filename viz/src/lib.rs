//! The component `weft-viz`: it serves `weft.viz.v1` to callers that Kubernetes knows and allows.
//!
//! ```text
//! watch of pods ──> Pods ──┐
//!                          ├─ Mesh (Fleet) ──> Engine ──> service: gRPC
//! proxies' 4191, 4190 ─────┘                                 │
//!                      TokenReview, SubjectAccessReview ──> gate
//! ```
//!
//! Owns finding pods and deciding who may ask. Refuses to know what metrics mean: that is the engine in `viz/core`.
//! Start reading at `app`.

mod app;
mod args;
mod fleet;
mod gate;
mod limits;
mod metrics;
mod pods;
mod service;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Args, Command};

/// Parses the command line and runs the process.
///
/// Exits with 2 if the command line is invalid, with 1 if the process fails, otherwise with 0.
pub fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(Command::Completions { shell }) = args.command {
        clap_complete::generate(shell, &mut Args::command(), "weft-viz", &mut std::io::stdout());
        return ExitCode::SUCCESS;
    }
    match app::main(&args) {
        Ok(()) => ExitCode::SUCCESS,
        #[expect(clippy::print_stderr, reason = "the log may not have been set up")]
        Err(error) => {
            eprintln!("weft-viz: {error:#}");
            ExitCode::FAILURE
        }
    }
}
