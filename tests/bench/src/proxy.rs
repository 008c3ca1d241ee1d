//! What two proxies between a client and a server cost: ours, HAProxy's with HTTP/1.1 and with HTTP/2 between them, no
//! proxy, and our opaque path as the floor, side by side in one run; and what a peer that floods the server's proxy
//! costs the others. With a directory of other programs of ours, a change is measured before and after.
//!
//! All contenders run at once and are measured in turn, in another order each time, so that a change of the machine's
//! speed affects all of them. A [`load`](crate::load) is one thread against one thread of a server; what it costs each
//! proxy is read from the kernel. Idle connections are held in sandboxes of their own, because memory that other rows
//! left behind would hide what they take.

pub(crate) mod endpoints;
mod haproxy;
mod profile;
mod report;
pub mod rows;
pub(crate) mod site;
mod tap;

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use clap::value_parser;
use rustix::process::{Resource, getrlimit};

use endpoints::ManyEndpoints;
use profile::Recording;
pub use profile::{Group, Profile, Shares};
pub use report::{Numbers, Report, RowReport, Sample};
use rows::{Act, Contender, ROWS, Row};
use site::{Proxies, Site};

use crate::{
    load::{Flood, FloodCounts, Measured},
    machine::Machine,
    node::Footprint,
    target,
};

/// Rows with new sandboxes for each repetition. Memory varies less than time.
const FRESH_REPETITIONS: u32 = 3;
/// Idle connections: time for the proxies to finish what their opening began, and to return the memory of it. jemalloc
/// does so within ten seconds.
const SETTLES: Duration = Duration::from_secs(13);
/// Descriptors of a process besides those of the connections.
const OTHER_DESCRIPTORS: u64 = 200;
/// Time of a load before it counts: hundreds of TLS handshakes take a part of it.
const WARM_UP: Duration = Duration::from_millis(700);
/// More of it for each endpoint, to which there has to be a connection.
const HANDSHAKE: Duration = Duration::from_millis(1);

/// Options of `weft-bench proxy`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  weft-bench proxy --json
  weft-bench proxy --rows http1-64,http2-1x64 --contenders weft,haproxy-http1 --repetitions 9
  weft-bench proxy --baseline ../before/target/measured --contenders weft,baseline
                                       before and after a change, in one run
  weft-bench proxy --rows http1-64 --contenders weft,haproxy-http2 --profile
                                       with where the proxies spend their time
  weft-bench proxy --rows flood-heads,flood-resets --contenders weft,weft-flooded
                                       what a flood costs the others
  weft-bench proxy --rows http1-16 --seconds 1 --repetitions 1")]
pub struct Args {
    /// Print everything as one JSON object on the last line
    #[arg(long)]
    pub json: bool,
    /// What to measure: http1-1, http1-16, http1-64, http1-256, http2-1x64, http2-16x4, connection, open-1000,
    /// open-5000, bulk, round-trip, grpc-unary, grpc-stream, endpoints-1000, endpoints-10000, workers, tap,
    /// flood-heads, flood-hellos, flood-resets, flood-connections, idle-http-1000, idle-http-10000, idle-opaque-1000,
    /// idle-opaque-10000, start [default: all]
    #[arg(long, value_delimiter = ',', value_name = "ROW", value_parser = Row::named, hide_possible_values = true)]
    pub rows: Vec<&'static Row>,
    /// Who takes part [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "CONTENDER")]
    pub contenders: Vec<Contender>,
    /// How often to measure each; the median counts
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..=100))]
    pub repetitions: u32,
    /// How long each load counts, seconds; before that it runs for 0.7 s
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u32).range(1..=60))]
    pub seconds: u32,
    /// Directory of other weft programs, such as target/measured of an earlier commit, to be measured as `baseline`
    #[arg(long, value_name = "DIR")]
    pub baseline: Option<PathBuf>,
    /// Sample the proxies of every contender with perf, in one more turn of each load that counts for nothing else;
    /// the stacks are written to this directory, a file for each row and contender
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "profiles")]
    pub profile: Option<PathBuf>,
}

/// One turn of a contender.
struct Turn {
    measured: Measured,
    /// Of the outbound and the inbound proxy, while the flood is still in force.
    memory: Option<[Footprint; 2]>,
    flood: Option<(Flood, FloodCounts)>,
}

/// A run and what it has started.
pub struct Bench {
    args: Args,
    sites: Vec<Site>,
}

impl Bench {
    /// A run that has started nothing.
    ///
    /// # Errors
    /// The options contradict each other.
    pub fn new(mut args: Args) -> anyhow::Result<Self> {
        use clap::ValueEnum as _;
        if args.rows.is_empty() {
            args.rows =
                ROWS.iter().map(|row| Row::named(row.name)).collect::<Result<_, _>>().map_err(anyhow::Error::msg)?;
        }
        if args.contenders.is_empty() {
            args.contenders = Contender::value_variants().to_vec();
            args.contenders.retain(|contender| *contender != Contender::Baseline || args.baseline.is_some());
        }
        let baseline = args.contenders.contains(&Contender::Baseline);
        anyhow::ensure!(baseline == args.baseline.is_some(), "the contender baseline and --baseline need each other");
        // The sandbox runs its programs from other directories.
        args.baseline = args.baseline.map(std::fs::canonicalize).transpose().context("--baseline")?;
        Ok(Self { args, sites: Vec::new() })
    }

    /// Measures every row and prints it. A row whose contender does not answer, or whose connections take another path,
    /// is in the report as failed.
    ///
    /// # Errors
    /// The sandboxes that rows share do not start.
    pub async fn run(&mut self) -> anyhow::Result<Report> {
        let mut report = Report {
            machine: Machine::here(),
            haproxy: haproxy::version(),
            seconds: f64::from(self.args.seconds),
            repetitions: self.args.repetitions,
            note: report::NOTE,
            rows: Vec::new(),
            skipped: Vec::new(),
            failed: Vec::new(),
            targets: Vec::new(),
        };
        if let Some(directory) = &self.args.profile {
            profile::check().await?;
            std::fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        }
        println!("{}\n{}", report.machine.describe(), report.haproxy.as_deref().unwrap_or("no HAProxy"));
        println!("{}", report::NOTE);
        // Loads first: they share sandboxes.
        let (loads, fresh): (Vec<_>, Vec<_>) =
            self.args.rows.clone().into_iter().partition(|row| row.shape().is_some());
        if !loads.is_empty() {
            self.start(&loads).await?;
        }
        for row in loads.into_iter().chain(fresh) {
            if let Some(reason) = too_many(row.act) {
                println!("{} is skipped: {reason}", row.name);
                report.skipped.push(format!("{}: {reason}", row.name));
                continue;
            }
            match self.row(row).await.context(row.name) {
                Ok(measured) => {
                    println!("\n{}\n", measured.table());
                    measured.profile_tables().iter().for_each(|table| println!("{table}\n"));
                    report.rows.push(measured);
                }
                // A row that fails near the end does not cost what the others measured before it.
                Err(error) => {
                    println!("{error:#}");
                    report.failed.push(format!("{error:#}"));
                }
            }
        }
        report.targets = report::targets(&report.rows);
        if !report.targets.is_empty() {
            println!("{}", target::table(&report.targets));
        }
        Ok(report)
    }

    /// Stops everything.
    ///
    /// # Errors
    /// Something is left.
    pub async fn remove(&mut self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        for site in self.sites.drain(..) {
            outcome = outcome.and(site.stop().await);
        }
        outcome
    }

    /// Starts the contenders of these rows.
    async fn start(&mut self, rows: &[&'static Row]) -> anyhow::Result<()> {
        let mut contenders = self.args.contenders.clone();
        contenders.retain(|contender| rows.iter().any(|row| row.has(*contender)));
        let names: Vec<_> = contenders.iter().map(|contender| contender.label()).collect();
        println!("starting {}", names.join(", "));
        site::start(&mut self.sites, &contenders, self.args.baseline.as_ref()).await
    }

    async fn row(&mut self, row: &'static Row) -> anyhow::Result<RowReport> {
        if row.shape().is_none() {
            return self.fresh(row).await;
        }
        let mut measured = self.load(row).await?;
        self.profile(row, &mut measured).await.context("profile")?;
        Ok(measured)
    }

    async fn load(&mut self, row: &'static Row) -> anyhow::Result<RowReport> {
        let mut report = RowReport::new(row);
        let shape = row.shape().context("not a load")?;
        let mut turns = self.turns(row);
        for repetition in 1..=self.args.repetitions {
            for contender in &turns {
                let Turn { measured, memory, flood } = self.measure(row, *contender).await?;
                let problem = measured.problem.clone();
                let name = contender.label();
                anyhow::ensure!(measured.count > 0, "{name} answered nothing: {}", problem.unwrap_or_default());
                let mut sample = report::loaded(shape, &measured, memory);
                sample.extend(flood.iter().flat_map(|(flood, counts)| report::flooded(*flood, counts)));
                say(repetition, self.args.repetitions, row, *contender, &sample);
                let numbers = report.contenders.entry(*contender).or_default();
                numbers.add(sample);
                numbers.failures += measured.failures;
                numbers.problem = measured.problem.or(numbers.problem.take());
            }
            let next = 1.min(turns.len());
            turns.rotate_left(next);
        }
        Ok(report)
    }

    /// One turn of a contender, under a flood if it is measured under one.
    async fn measure(&mut self, row: &Row, contender: Contender) -> anyhow::Result<Turn> {
        let flood = row.flood(contender);
        if let Some(flood) = flood {
            site::find(&mut self.sites, contender)?.flood(contender, flood).await.context("flood")?;
        }
        let measured = self.send(row, contender).await;
        let site = site::find(&mut self.sites, contender)?;
        let memory = site.proxies(contender).and_then(|proxies| proxies.map(footprints).transpose());
        // Before anything fails: the next turn is not to be flooded.
        let flood = match flood {
            Some(flood) => Some((flood, site.end_flood().await.context("end the flood")?)),
            None => None,
        };
        Ok(Turn { measured: measured?, memory: memory?, flood })
    }

    /// The load of one turn.
    async fn send(&mut self, row: &Row, contender: Contender) -> anyhow::Result<Measured> {
        let shape = row.shape().context("not a load")?;
        let time = Duration::from_secs(self.args.seconds.into());
        let site = site::find(&mut self.sites, contender)?;
        let Act::Endpoints { number } = row.act else {
            let target = site.target(contender, row.protocol())?;
            return site.measure(contender, target, shape, WARM_UP, time).await;
        };
        let churn = site.publish_endpoints(contender, number).await?.churn();
        let warm_up = WARM_UP + HANDSHAKE * number;
        let measured = site.measure(contender, ManyEndpoints::target(), shape, warm_up, time).await;
        let changes = churn.end().await?;
        anyhow::ensure!(changes > 0, "no endpoint changed");
        measured
    }

    /// Samples each contender's proxies during one more load of a row.
    async fn profile(&mut self, row: &'static Row, report: &mut RowReport) -> anyhow::Result<()> {
        let Some(directory) = self.args.profile.clone() else { return Ok(()) };
        for contender in self.turns(row) {
            let site = site::find(&mut self.sites, contender)?;
            let Some(proxies) = site.proxies(contender)? else { continue };
            let file = |kind| directory.join(format!("{}-{}.{kind}", row.name, contender.label()));
            let recording = Recording::start(proxies, file("data")).await?;
            self.measure(row, contender).await?;
            let profile = recording.finish(file("folded")).await.with_context(|| contender.label())?;
            report.contenders.entry(contender).or_default().profile = Some(profile);
        }
        Ok(())
    }

    /// A row that needs processes which have done nothing else.
    async fn fresh(&mut self, row: &'static Row) -> anyhow::Result<RowReport> {
        let repetitions = self.args.repetitions.min(FRESH_REPETITIONS);
        let mut report = RowReport::new(row);
        for repetition in 1..=repetitions {
            self.remove().await?;
            self.start(&[row]).await?;
            for contender in self.turns(row) {
                let site = site::find(&mut self.sites, contender)?;
                let sample = match row.act {
                    Act::Start => {
                        let (started, certified) = site.restart(contender).await?;
                        report::started(started, certified)
                    }
                    Act::Idle { connections, .. } => idle(site, row, contender, connections).await?,
                    Act::Load(_) | Act::Endpoints { .. } | Act::Workers | Act::Tap | Act::Flood(_) => {
                        anyhow::bail!("a load")
                    }
                };
                say(repetition, repetitions, row, contender, &sample);
                report.contenders.entry(contender).or_default().add(sample);
            }
        }
        Ok(report)
    }

    /// The contenders of a row, in the order of their first turn.
    fn turns(&self, row: &Row) -> Vec<Contender> {
        self.args.contenders.iter().copied().filter(|contender| row.has(*contender)).collect()
    }
}

async fn idle(site: &mut Site, row: &Row, contender: Contender, connections: u32) -> anyhow::Result<Sample> {
    let proxies = site.proxies(contender)?.context("idle connections without a proxy")?;
    let before = footprints(proxies)?;
    site.hold(contender, row.protocol(), connections).await.with_context(|| contender.label())?;
    tokio::time::sleep(SETTLES).await;
    Ok(report::idle(connections, before, footprints(proxies)?))
}

/// A line of progress.
fn say(repetition: u32, of: u32, row: &Row, contender: Contender, sample: &Sample) {
    let shown = |key: &str| sample.get(key).map(|value| format!("{key} {}", target::number(*value)));
    let keys = [
        "per_second",
        "gbit_per_second",
        "p50_us",
        "p99_us",
        "cpu_outbound_us",
        "cpu_inbound_us",
        "outbound_connection_kib",
        "inbound_connection_kib",
        "certificate_ms",
        "ready_ms",
        "flood_open",
        "flood_connections_per_second",
        "flood_resets_per_second",
    ];
    let numbers: Vec<_> = keys.into_iter().filter_map(shown).collect();
    println!("{repetition}/{of} {:<17} {:<21} {}", row.name, contender.label(), numbers.join(", "));
}

fn footprints(proxies: Proxies) -> anyhow::Result<[Footprint; 2]> {
    Ok([Footprint::of(proxies.outbound)?, Footprint::of(proxies.inbound)?])
}

/// Why this machine cannot hold the connections of a row.
fn too_many(act: Act) -> Option<String> {
    let needed = descriptors(act)?;
    let limit = getrlimit(Resource::Nofile).maximum?;
    (limit < needed).then(|| format!("a process needs {needed} open files, and the limit here is {limit}"))
}

/// The most descriptors that a process of a row with thousands of connections needs. A proxy's listener has a quarter
/// of them, of which one peer may have half on the inbound side.
fn descriptors(act: Act) -> Option<u64> {
    const OF_PEER: u64 = 8;
    const OF_APPLICATION: u64 = 4;
    let connections = match act {
        // The server's proxy has a connection from the other proxy for each.
        Act::Endpoints { number } => OF_PEER * u64::from(number),
        // HTTP connections share the one to the other proxy.
        Act::Idle { http, connections } => u64::from(connections) * if http { OF_APPLICATION } else { OF_PEER },
        // The flooder is one peer. No request is complete, so none goes to the application.
        Act::Flood(Flood::Heads { connections } | Flood::Hellos { connections }) => OF_PEER * u64::from(connections),
        Act::Flood(Flood::Resets { .. } | Flood::Connections { .. }) => return None,
        Act::Load(_) | Act::Workers | Act::Tap | Act::Start => return None,
    };
    Some(connections + OTHER_DESCRIPTORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        Args {
            json: false,
            rows: Vec::new(),
            contenders: Vec::new(),
            repetitions: 1,
            seconds: 1,
            baseline: None,
            profile: None,
        }
    }

    #[test]
    fn a_baseline_takes_part_only_with_its_directory() {
        let plain = Bench::new(args()).unwrap();
        assert!(!plain.args.contenders.contains(&Contender::Baseline));
        assert_eq!(plain.args.rows.len(), ROWS.len());
        let both = Bench::new(Args { baseline: Some(".".into()), ..args() }).unwrap();
        assert!(both.args.contenders.contains(&Contender::Baseline));
        assert!(Bench::new(Args { contenders: vec![Contender::Baseline], ..args() }).is_err());
        assert!(Bench::new(Args { contenders: vec![Contender::Weft], baseline: Some(".".into()), ..args() }).is_err());
    }

    #[test]
    fn rows_with_thousands_of_connections_need_descriptors_for_the_listeners_share() {
        let needed = |name| descriptors(Row::named(name).unwrap().act);
        for row in ["flood-heads", "flood-hellos"] {
            assert_eq!(needed(row), Some(80_200), "{row}");
        }
        assert_eq!(needed("idle-http-10000"), Some(40_200));
        assert_eq!(needed("idle-opaque-1000"), Some(8_200));
        for row in ["flood-resets", "flood-connections", "http1-64"] {
            assert_eq!(needed(row), None, "{row}");
        }
    }

    #[test]
    fn the_help_names_every_row() {
        use clap::Args as _;
        let command = Args::augment_args(clap::Command::new("proxy"));
        let rows = command.get_arguments().find(|argument| argument.get_id() == "rows").unwrap();
        let help = rows.get_help().unwrap().to_string();
        let words: Vec<_> = help.split([' ', ',', '\n', '[']).collect();
        for row in &ROWS {
            assert!(words.contains(&row.name), "{}: {help}", row.name);
        }
    }
}
