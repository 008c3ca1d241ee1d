//! `weft-client`: the example client. Prints the result, and exits with 1 when a request failed.

#![expect(clippy::print_stdout, reason = "its output is its result")]

use std::{io, net::SocketAddr, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use weft_examples::{
    client::{self, Load, Phase, Protocol, Report},
    rawtcp::{self, Plan},
};

/// An example client: sends requests to weft-echo and reports what came back
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:\n  weft-client http1 --target web.shop:8080 --count 100 --json\n  \
                  weft-client grpc --target web.shop:8080 --duration 5s --concurrency 4\n  \
                  weft-client tcp --target 10.244.0.9:9100"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// HTTP/1.1 requests
    Http1(LoadArgs),
    /// HTTP/2 requests by prior knowledge
    Http2(LoadArgs),
    /// Unary gRPC calls
    Grpc(LoadArgs),
    /// WebSocket messages
    Ws(LoadArgs),
    /// Lines over TCP, where the server speaks first
    Banner(LoadArgs),
    /// Measure connections, round trips and bulk transfer over plain TCP
    Tcp(TcpArgs),
    /// Open one connection and print what the kernel says about it, as JSON
    Probe(ProbeArgs),
    /// Do nothing until told to stop: a pod to run the other commands in
    Wait,
}

#[derive(Args)]
struct LoadArgs {
    /// HOST:PORT
    #[arg(long)]
    target: String,
    /// Path of HTTP requests
    #[arg(long, default_value = "/")]
    path: String,
    /// Requests to send [default: 1, or no limit with --duration or --until-eof]
    #[arg(long)]
    count: Option<u64>,
    /// Send for this long, e.g. 5s
    #[arg(long, value_parser = humantime::parse_duration)]
    duration: Option<Duration>,
    /// Send until standard input ends; each of its lines names what happens from then on, for the report of failures
    #[arg(long)]
    until_eof: bool,
    /// Workers, each with a connection of its own
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
    /// Pause of each worker after each request
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    pause: Duration,
    /// The longest time for one request
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// A new connection for every request
    #[arg(long)]
    fresh: bool,
    /// Dial IPv4 addresses through an IPv6 socket
    #[arg(long)]
    mapped: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct TcpArgs {
    /// ADDRESS:PORT
    #[arg(long)]
    target: SocketAddr,
    /// Connections to open one after the other
    #[arg(long, default_value_t = 1000)]
    connects: u64,
    /// Connections to open over several tasks
    #[arg(long, default_value_t = 2000)]
    burst: u64,
    /// Tasks of the burst
    #[arg(long, default_value_t = 16)]
    concurrency: usize,
    /// Round trips of 64 bytes
    #[arg(long, default_value_t = 10_000)]
    pings: u64,
    /// Bytes of the bulk stream
    #[arg(long, default_value_t = 1 << 30)]
    bulk_bytes: u64,
    /// The longest time for each of these
    #[arg(long, default_value = "5s", value_parser = humantime::parse_duration)]
    limit: Duration,
}

#[derive(Args)]
struct ProbeArgs {
    /// HOST:PORT
    #[arg(long)]
    target: String,
    /// Dial an IPv4 address through an IPv6 socket
    #[arg(long)]
    mapped: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Http1(args) => load(Protocol::Http1, args).await,
        Command::Http2(args) => load(Protocol::Http2, args).await,
        Command::Grpc(args) => load(Protocol::Grpc, args).await,
        Command::Ws(args) => load(Protocol::WebSocket, args).await,
        Command::Banner(args) => load(Protocol::Banner, args).await,
        Command::Tcp(args) => {
            let plan = Plan {
                connects: args.connects,
                burst: args.burst,
                concurrency: args.concurrency,
                pings: args.pings,
                bulk_bytes: args.bulk_bytes,
                limit: args.limit,
            };
            let measured =
                rawtcp::measure(args.target, plan).await.with_context(|| format!("measure {}", args.target))?;
            println!("{}", serde_json::to_string(&measured)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Probe(args) => {
            let probe = client::probe(&args.target, args.mapped)
                .await
                .with_context(|| format!("connect to {}", args.target))?;
            println!("{}", serde_json::to_string(&probe)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Wait => {
            let mut terminate = signal(SignalKind::terminate())?;
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn load(protocol: Protocol, args: LoadArgs) -> anyhow::Result<ExitCode> {
    let until_told = args.duration.is_some() || args.until_eof;
    let count = if until_told { args.count } else { Some(args.count.unwrap_or(1)) };
    let (stop, phase) = (CancellationToken::new(), Phase::default());
    if args.until_eof {
        let (stop, phase) = (stop.clone(), phase.clone());
        // A separate thread, because the process must be able to end while standard input is open.
        std::thread::spawn(move || {
            // A read error counts as the end of input.
            io::stdin().lines().map_while(Result::ok).for_each(|line| phase.begin(&line));
            stop.cancel();
        });
    }
    let report = client::drive(Load {
        protocol,
        target: args.target,
        path: args.path,
        count,
        duration: args.duration,
        stop,
        concurrency: args.concurrency,
        pause: args.pause,
        timeout: args.timeout,
        fresh: args.fresh,
        mapped: args.mapped,
        phase,
    })
    .await;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(if report.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(report: &Report) {
    println!(
        "{} to {}: {} requests, {} failed, p50 {:.2} ms, p99 {:.2} ms",
        report.protocol, report.target, report.requests, report.failures, report.latency_ms.p50, report.latency_ms.p99
    );
    for (backend, count) in &report.by_backend {
        println!("  {count:>6} from {backend}");
    }
    for (error, count) in &report.errors {
        println!("  {count:>6} failed: {error}");
    }
    // Without phases, this says what is said above.
    for failed in report.failed.iter().filter(|failed| !failed.phase.is_empty()) {
        println!("  {failed}");
    }
}
