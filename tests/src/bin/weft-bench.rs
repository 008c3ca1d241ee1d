//! `weft-bench`: measures what the documentation claims. `cargo xtask bench` builds everything optimised and runs it.

use std::{collections::BTreeMap, process::ExitCode};

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use weft_tests::bench::{
    Contender, Effort,
    machine::Machine,
    result::{Comparison, Mode, Sample},
};

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
    Interception {
        /// Print the comparison as one JSON object on the last line
        #[arg(long)]
        json: bool,
        /// How often to measure each; the median counts
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
        repetitions: u32,
        /// Connections opened one after the other, per repetition
        #[arg(long, default_value_t = 1000)]
        connects: u64,
        /// Connections opened by 16 tasks at once, per repetition
        #[arg(long, default_value_t = 2000)]
        burst: u64,
        /// Round trips of 64 bytes, per repetition
        #[arg(long, default_value_t = 10_000)]
        pings: u64,
        /// Bytes of the bulk stream, per repetition
        #[arg(long, default_value_t = 1 << 30)]
        bulk_bytes: u64,
        /// The longest time for each of these, seconds
        #[arg(long, default_value_t = 5)]
        limit_seconds: u64,
    },
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let Subject::Interception { json, repetitions, connects, burst, pings, bulk_bytes, limit_seconds } =
        Cli::parse().subject;
    let effort = Effort { connects, burst, pings, bulk_bytes, limit_seconds };
    let mut contenders = Vec::new();
    let outcome = tokio::select! {
        outcome = interception(&mut contenders, repetitions, effort) => Some(outcome),
        () = told_to_stop() => None,
    };
    for contender in contenders {
        contender.stop().await?;
    }
    let Some(comparison) = outcome.transpose()? else { return Ok(ExitCode::from(130)) };
    let machine = &comparison.machine;
    println!("\nLinux {}, {} CPUs, {}, {} MiB", machine.kernel, machine.cpus, machine.model, machine.memory_mib);
    println!("{}", comparison.table());
    for row in &comparison.undecided {
        println!("eBPF and iptables are within the spread of the repetitions in: {row}");
    }
    for row in &comparison.ebpf_worse_than_iptables {
        println!("eBPF is worse than iptables in: {row}");
    }
    if json {
        println!("{}", serde_json::to_string(&comparison)?);
    }
    Ok(ExitCode::SUCCESS)
}

async fn interception(contenders: &mut Vec<Contender>, repetitions: u32, effort: Effort) -> anyhow::Result<Comparison> {
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
