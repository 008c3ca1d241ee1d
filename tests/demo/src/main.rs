//! `weft-demo`: a real mesh on this host, shown and measured. `cargo xtask demo` builds everything and runs it.

#![expect(clippy::print_stdout, reason = "its output is its result")]

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use weft_demo::summary::Summary;
use weft_test_kit::mesh::{Interception, Mesh, Options, unique_name};

/// Exit code after Ctrl-C: 128 + SIGINT, the shell's convention.
const INTERRUPTED: u8 = 130;

/// Runs a mesh on this host, sends real traffic through it, kills its agent, and counts
#[derive(Parser)]
#[command(
    name = "weft-demo",
    version,
    after_help = "Examples:\n  weft-demo\n  weft-demo --json | tail -n 1\n  weft-demo --keep --name shop"
)]
struct Args {
    /// Print the summary as one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// Leave the mesh running and say how to reach, trace and stop it
    #[arg(long)]
    keep: bool,
    /// The sandbox's name [default: demo- and something unique]
    #[arg(long)]
    name: Option<String>,
    /// How connections reach the proxies
    #[arg(long, value_enum, default_value_t = Via::Ebpf)]
    interception: Via,
}

#[derive(Clone, Copy, ValueEnum)]
enum Via {
    /// The agent's programs
    Ebpf,
    /// linkerd-init's rules, for comparison: the promises about rules and tracked connections are broken then
    Iptables,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();

    let options = Options {
        name: args.name.unwrap_or_else(|| unique_name("demo")),
        interception: match args.interception {
            Via::Ebpf => Interception::Ebpf,
            Via::Iptables => Interception::Iptables,
        },
        ..Options::default()
    };
    println!("starting a mesh named {} from examples/mesh", options.name);
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    let mut told_to_stop = std::pin::pin!(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    });

    let mesh = tokio::select! {
        mesh = weft_demo::start(options) => mesh?,
        () = &mut told_to_stop => return Ok(ExitCode::from(INTERRUPTED)),
    };
    let outcome = tokio::select! {
        outcome = weft_demo::run(&mesh) => Some(outcome),
        () = &mut told_to_stop => None,
    };
    let mut summary = match outcome {
        Some(Ok(summary)) => summary,
        Some(Err(error)) => {
            mesh.stop().await.context("clean up")?;
            return Err(error);
        }
        None => {
            println!("\nstopping");
            mesh.stop().await.context("clean up")?;
            return Ok(ExitCode::from(INTERRUPTED));
        }
    };
    if args.keep {
        keep(mesh);
    } else {
        weft_demo::finish(mesh, &mut summary).await?;
    }
    conclude(&mut summary, args.json)
}

fn keep(mesh: Mesh) {
    let name = mesh.name().to_owned();
    let manifests = mesh.keep();
    println!("\nstill running; its manifests are in {} and may be edited", manifests.display());
    // What was just built is not in PATH.
    let weft = std::env::current_exe().unwrap_or_default().with_file_name("weft");
    let weft = weft.display();
    println!("  see it    {weft} sandbox ps --sandbox {name}");
    println!(
        "  reach it  {weft} sandbox exec --sandbox {name} shop/client -- weft-client http1 --target web.shop:80 --count 10"
    );
    println!("  trace it  {weft} trace --sandbox {name}");
    println!("  stop it   {weft} sandbox stop --sandbox {name} && rm -r {}", manifests.display());
}

fn conclude(summary: &mut Summary, json: bool) -> anyhow::Result<ExitCode> {
    summary.judge();
    println!("\n{}", summary.table());
    for broken in &summary.broken_promises {
        println!("broken: {broken}");
    }
    if summary.broken_promises.is_empty() {
        println!("every promise was kept");
    }
    if json {
        println!("{}", serde_json::to_string(summary)?);
    }
    Ok(if summary.broken_promises.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
