//! `weft-bench`: measures what the documentation claims. `cargo xtask bench` builds everything optimised and runs it.

#![expect(clippy::print_stdout, reason = "its output is its result")]

use std::{collections::BTreeMap, process::ExitCode};

use anyhow::Context as _;
use clap::{Parser, Subcommand, ValueEnum};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use weft_bench::{
    Contender, Effort, actor,
    churn::{self, Churn},
    control_plane::{self, Bench},
    enrolment::{self, Burst, Memory, Quantiles},
    hooks::{self, Hooks},
    machine::Machine,
    node::Node,
    plot, proxy, ready,
    result::{Comparison, Mode, Sample},
    target::{self, Target},
    viz,
};
use weft_test_kit::actor::requested;

/// Measures Weft on this machine
#[derive(Parser)]
#[command(name = "weft-bench", version, after_help = "Example:\n  weft-bench interception --json --repetitions 9")]
struct Cli {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Subcommand)]
enum Subject {
    /// Direct connections, iptables redirection and eBPF redirection side by side
    Interception(Interception),
    /// Pods that start and stop: bytes around the proxy, and what stays behind
    Churn {
        /// Print the result as one JSON object on the last line
        #[arg(long)]
        json: bool,
        /// Pods in total
        #[arg(long, default_value_t = 1000)]
        pods: u32,
        /// Pods that start and stop at once
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=200))]
        batch: u32,
        /// Pods of the control, which are not enrolled and whose bytes must be noticed
        #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=200))]
        control: u32,
    },
    /// The control plane with a real API server, thousands of objects and simulated proxies
    ControlPlane(Box<control_plane::args::Args>),
    /// Two proxies between a client and a server: ours, HAProxy, none, side by side
    Proxy(Box<proxy::Args>),
    /// `weft-viz` with a real API server and 1,000 pods: what collecting their metrics costs it and a proxy
    Viz(Box<viz::args::Args>),
    /// Draw pictures of what was measured, from the JSON that the other subjects print
    Plot(plot::Args),
}

#[derive(clap::Args)]
struct Interception {
    /// Print everything as one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// Hooks, enrolment, ready, memory: have the agent use nothing that came with a later Linux, for example 5.10
    #[arg(long, value_name = "VERSION")]
    as_on_linux: Option<String>,
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    parts: Vec<Part>,
    /// How often to measure each; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Path: connections opened one after the other, per repetition
    #[arg(long, default_value_t = 1000)]
    connects: u64,
    /// Path: connections opened by 16 tasks at once, per repetition
    #[arg(long, default_value_t = 2000)]
    burst: u64,
    /// Path: round trips of 64 bytes, per repetition
    #[arg(long, default_value_t = 10_000)]
    pings: u64,
    /// Path: bytes of the bulk stream, per repetition
    #[arg(long, default_value_t = 1 << 30)]
    bulk_bytes: u64,
    /// Path: the longest time for each of these, seconds
    #[arg(long, default_value_t = 5)]
    limit_seconds: u64,
    /// Hooks: turns of each way, of 1000 connections in both directions
    #[arg(long, default_value_t = 41, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Hooks: how long connections are opened as fast as possible, seconds
    #[arg(long, default_value_t = 5)]
    flood_seconds: u64,
    /// Enrolment, ready: pods at once
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    at_once: u32,
    /// Memory: enrolled pods
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..=4000))]
    pods: u32,
}

/// A part of the bench of interception.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The whole way from a client to a server, in three sandboxes
    Path,
    /// What the programs cost, hook by hook
    Hooks,
    /// Pods that start at once
    Enrolment,
    /// Proxies that wait for their pods' enrolment at once
    Ready,
    /// What many pods take
    Memory,
}

/// All measurements of one run.
#[derive(Serialize)]
struct Report {
    machine: Machine,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<Comparison>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hooks: Option<Hooks>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    bursts: Vec<Burst>,
    /// Milliseconds from a pod's enrolment to the open gate of its proxy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ready_ms: Vec<Quantiles>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    memory: Vec<Memory>,
    targets: Vec<Target>,
}

impl Part {
    const ALL: [Self; 5] = [Self::Path, Self::Hooks, Self::Enrolment, Self::Ready, Self::Memory];
}

impl std::fmt::Display for Part {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

fn main() -> anyhow::Result<ExitCode> {
    // Before any other thread starts, because it changes namespace and user.
    if let Some(place) = requested() {
        return actor::run(&place).map(|()| ExitCode::SUCCESS);
    }
    let subject = Cli::parse().subject;
    tokio::runtime::Runtime::new().context("start tokio")?.block_on(bench(subject))
}

async fn bench(subject: Subject) -> anyhow::Result<ExitCode> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match subject {
        Subject::Interception(args) => interception(&args).await,
        Subject::Churn { json, pods, batch, control } => {
            let effort = churn::Effort { pods, batch, control };
            let churn = on_node("churn", &[], async |node| churn::run(node, effort).await).await?;
            churn.map_or(Ok(ExitCode::from(130)), |churn| report_churn(&churn, json))
        }
        Subject::ControlPlane(args) => control_plane(*args).await,
        Subject::Proxy(args) => compare_proxies(*args).await,
        Subject::Viz(args) => collect_metrics(*args).await,
        Subject::Plot(args) => {
            plot::run(&args)?.iter().for_each(|path| println!("{}", path.display()));
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn control_plane(args: control_plane::args::Args) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let mut bench = Bench::new(args)?;
    let outcome = until_told_to_stop(bench.run()).await;
    conclude(json, outcome, bench.remove().await, |_| ExitCode::SUCCESS)
}

async fn collect_metrics(args: viz::args::Args) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let mut bench = viz::Bench::new(args)?;
    let outcome = until_told_to_stop(bench.run()).await;
    conclude(json, outcome, bench.remove().await, |_| ExitCode::SUCCESS)
}

async fn compare_proxies(args: proxy::Args) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let mut bench = proxy::Bench::new(args)?;
    let outcome = until_told_to_stop(bench.run()).await;
    let code = |report: &proxy::Report| if report.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    conclude(json, outcome, bench.remove().await, code)
}

/// The outcome of a measurement; `None` if it was told to stop before.
async fn until_told_to_stop<T>(measuring: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        outcome = measuring => Some(outcome),
        () = told_to_stop() => None,
    }
}

/// Prints a report as JSON if that was asked for. What could not be removed is an error of its own.
fn conclude<R: Serialize>(
    json: bool,
    outcome: Option<anyhow::Result<R>>,
    removed: anyhow::Result<()>,
    code: impl FnOnce(&R) -> ExitCode,
) -> anyhow::Result<ExitCode> {
    if let (Some(Err(_)), Err(left)) = (&outcome, &removed) {
        println!("{left:#}");
    }
    let Some(report) = outcome.transpose()? else { return removed.map(|()| ExitCode::from(130)) };
    if json {
        println!("{}", serde_json::to_string(&report)?);
    }
    removed.map(|()| code(&report))
}

fn report_churn(churn: &Churn, json: bool) -> anyhow::Result<ExitCode> {
    println!("\n{}\n{}", churn.machine.describe(), churn.summary());
    println!("{} pods in {:.0} s, {} faults", churn.meshed.pods, churn.seconds, churn.faults.len());
    if json {
        println!("{}", serde_json::to_string(churn)?);
    }
    Ok(if churn.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn interception(args: &Interception) -> anyhow::Result<ExitCode> {
    let machine = Machine::here();
    let wants = |part| args.parts.contains(&part);
    let flags: Vec<String> =
        args.as_on_linux.iter().flat_map(|version| ["--as-on-linux".to_owned(), version.clone()]).collect();
    let mut report = Report {
        machine,
        path: None,
        hooks: None,
        bursts: Vec::new(),
        ready_ms: Vec::new(),
        memory: Vec::new(),
        targets: Vec::new(),
    };
    println!("{}", report.machine.describe());
    if wants(Part::Path) {
        let Some(comparison) = path(args).await? else { return Ok(ExitCode::from(130)) };
        print_path(&comparison);
        report.path = Some(comparison);
    }
    if wants(Part::Hooks) {
        let effort = hooks::Effort {
            rounds: args.turns,
            connects: 1000,
            blocks: 300,
            flood_ms: args.flood_seconds.saturating_mul(1000),
        };
        let measured = on_node("hooks", &flags, async |node| hooks::measure(node, effort).await).await?;
        let Some(hooks) = measured else { return Ok(ExitCode::from(130)) };
        println!("\n{}\n\n{}", hooks.table(), hooks.account_table());
        report.targets.extend(hooks.targets());
        report.hooks = Some(hooks);
    }
    if wants(Part::Enrolment) {
        let repetitions = args.repetitions;
        let measured = on_node("enrolment", &flags, async |node| {
            let mut bursts = Vec::new();
            for repetition in 1..=repetitions {
                let burst = enrolment::burst(node, args.at_once).await?;
                println!(
                    "{repetition}/{repetitions} {} pods at once: listening to attested p50 {:.0} ms, p99 {:.0} ms, max {:.0} ms; enrolment p50 {:.0} ms, p99 {:.0} ms",
                    args.at_once,
                    burst.attested_ms.p50,
                    burst.attested_ms.p99,
                    burst.attested_ms.max,
                    burst.enrolled_ms.p50,
                    burst.enrolled_ms.p99
                );
                bursts.push(burst);
            }
            Ok(bursts)
        });
        let Some(bursts) = measured.await? else { return Ok(ExitCode::from(130)) };
        report.targets.extend(enrolment::burst_targets(&bursts));
        report.bursts = bursts;
    }
    if wants(Part::Ready) {
        let measured = on_node("ready", &flags, async |node| {
            let mut bursts = Vec::new();
            for repetition in 1..=args.repetitions {
                let burst = ready::burst(node, args.at_once).await?;
                println!(
                    "{repetition}/{} {} proxies at once: enrolment to open gate p50 {:.0} ms, p99 {:.0} ms, max {:.0} ms",
                    args.repetitions, args.at_once, burst.p50, burst.p99, burst.max
                );
                bursts.push(burst);
            }
            Ok(bursts)
        });
        let Some(bursts) = measured.await? else { return Ok(ExitCode::from(130)) };
        report.targets.extend(ready::targets(&bursts));
        report.ready_ms = bursts;
    }
    if wants(Part::Memory) {
        let measured = on_node("memory", &flags, async |node| enrolment::memory(node, args.pods).await).await?;
        let Some(memory) = measured else { return Ok(ExitCode::from(130)) };
        memory.iter().for_each(print_memory);
        report.targets.extend(enrolment::memory_targets(&memory));
        report.memory = memory.into();
    }
    if !report.targets.is_empty() {
        println!("\n{}", target::table(&report.targets));
    }
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn print_path(comparison: &Comparison) {
    println!("\n{}", comparison.table());
    for row in &comparison.undecided {
        println!("eBPF and iptables are within the spread of the repetitions in: {row}");
    }
    for row in &comparison.ebpf_worse_than_iptables {
        println!("eBPF is worse than iptables in: {row}");
    }
}

fn print_memory(memory: &Memory) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "\n{} pods: agent {:.1} MiB resident, {:.1} MiB of it heap and stacks; maps {:.2} MiB, programs {:.2} MiB",
        memory.pods,
        mib(memory.agent.resident_bytes),
        mib(memory.agent.anonymous_bytes),
        mib(memory.map_bytes()),
        mib(memory.program_bytes)
    );
    for (name, map) in &memory.maps {
        let entries = map.entries.map_or_else(String::new, |entries| format!(", {entries} entries"));
        println!("  {name}: {:.1} KiB{entries}", map.bytes as f64 / 1024.0);
    }
}

/// Runs a function on a node with an agent, and removes the node in any case. `None` if the run was interrupted.
async fn on_node<T>(
    purpose: &str,
    flags: &[String],
    act: impl AsyncFnOnce(&mut Node) -> anyhow::Result<T>,
) -> anyhow::Result<Option<T>> {
    println!("starting a node for {purpose}");
    let mut node = Node::create(&format!("bench-{purpose}")).await?;
    let outcome = tokio::select! {
        outcome = async { node.start_agent(flags).await?; act(&mut node).await } => Some(outcome),
        () = told_to_stop() => None,
    };
    node.remove().await?;
    outcome.transpose()
}

async fn path(args: &Interception) -> anyhow::Result<Option<Comparison>> {
    let effort = Effort {
        connects: args.connects,
        burst: args.burst,
        pings: args.pings,
        bulk_bytes: args.bulk_bytes,
        limit_seconds: args.limit_seconds,
    };
    let mut contenders = Vec::new();
    let outcome = tokio::select! {
        outcome = compare(&mut contenders, args.repetitions, effort) => Some(outcome),
        () = told_to_stop() => None,
    };
    for contender in contenders {
        contender.stop().await?;
    }
    outcome.transpose()
}

async fn compare(contenders: &mut Vec<Contender>, repetitions: u32, effort: Effort) -> anyhow::Result<Comparison> {
    let machine = Machine::here();
    for mode in Mode::ALL {
        println!("starting {}", mode.label());
        contenders.push(Contender::start(mode).await?);
    }
    let mut samples: BTreeMap<Mode, Vec<Sample>> = BTreeMap::new();
    for repetition in 1..=repetitions {
        for contender in contenders.iter() {
            let sample = contender.sample(effort).await?;
            println!(
                "{repetition}/{repetitions} {:<8} first byte p50 {:.1} us, {:.0} connections/s, round trip p50 {:.1} us, {:.2} Gbit/s",
                contender.mode().label(),
                sample.first_byte_us.p50,
                sample.connections_per_second,
                sample.round_trip_us.p50,
                sample.bulk_gbit_per_second
            );
            samples.entry(contender.mode()).or_default().push(sample);
        }
        contenders.rotate_left(1);
    }
    Ok(Comparison::of(machine, samples))
}

async fn told_to_stop() {
    let (terminate, interrupt) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    match (terminate, interrupt) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        // Without handlers the signals end the process by themselves.
        _ => std::future::pending().await,
    }
}
