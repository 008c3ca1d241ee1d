//! What collecting metrics costs: `weft-viz` itself, in front of a real API server with the objects of 1,000 pods,
//! whose proxies' pages this process serves; and what a scrape costs a real proxy.
//!
//! ```text
//! caller ── Stat, every 5 s ──► weft-viz ── a scrape of each pod ──► 127.1.0.0/16, this process
//!                                   └── watches, TokenReview, SubjectAccessReview ──► API server
//! ```
//!
//! All of them share this machine's processors. Nothing is measured of the component's sidecar, which makes mutual TLS
//! of its connections, nor of the network.

pub mod args;
mod caller;
mod page;
mod proxies;
pub mod report;
mod scraped;
mod world;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use tokio::{
    process::Command,
    time::{MissedTickBehavior, interval},
};
use weft_test_kit::{binaries, wait::until};

use args::{Args, Part};
use caller::Caller;
use page::Page;
use proxies::Proxies;
use report::{Collected, Report, Resident, Setup};

use crate::{
    control_plane::{
        cluster::{Cluster, Created},
        process::{Process, get, usage},
    },
    enrolment::Quantiles,
    machine::Machine,
    proxy::site::Site,
    target,
};

/// Deployments over which the pods are spread.
const WORKLOADS: u32 = 50;
/// The component's own time between two scrapes.
const OWN_INTERVAL: Duration = Duration::from_secs(10);
/// Scrapes of 15 minutes with that interval, both ends included.
const WINDOW_SCRAPES: u64 = 91;
/// What a caller asks about by default, and at most.
const MINUTE: Duration = Duration::from_secs(60);
const WINDOW: Duration = Duration::from_secs(15 * 60);
/// As often as an open dashboard asks.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// How often the component's memory is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Questions about the whole window.
const WINDOW_QUESTIONS: u32 = 5;
/// The API server learns of the caller's rights by a watch, and the component keeps a refusal for 5 s.
const ALLOWED_WITHIN: Duration = Duration::from_secs(120);
/// Time for what the bench measures, beyond what it takes at the interval.
const PATIENCE: Duration = Duration::from_secs(120);

/// The bench, and what it has to remove.
pub struct Bench {
    args: Args,
    run: String,
    cluster: Option<Cluster>,
    sites: Vec<Site>,
}

/// What the component is measured against.
struct Surroundings<'a> {
    kubeconfig: &'a Path,
    /// Where the pods are.
    namespace: &'a str,
    pods: u32,
    proxies: Proxies,
    token: String,
}

/// When a measurement is over.
#[derive(Clone, Copy, Debug)]
enum Goal {
    Time(Duration),
    /// Scrapes of each pod.
    Scrapes(u64),
}

impl Bench {
    /// Prepares a run; nothing is started yet.
    ///
    /// # Errors
    /// There is no API server.
    pub fn new(args: Args) -> anyhow::Result<Self> {
        let wants_cluster = args.wants(Part::Minute) || args.wants(Part::Window);
        let choose = || Cluster::choose(&args.api_server);
        let cluster = wants_cluster.then(choose).transpose()?;
        Ok(Self { run: format!("weft-bench-{}", std::process::id()), args, cluster, sites: Vec::new() })
    }

    /// Measures the parts that were asked for, and prints each when it is done.
    ///
    /// # Errors
    /// The API server, the component or a sandbox does not do what it should.
    pub async fn run(&mut self) -> anyhow::Result<Report> {
        let Args { pods, destinations, .. } = self.args;
        let pages: Vec<_> = (0..WORKLOADS).map(|workload| Page::new(workload, WORKLOADS, destinations)).collect();
        let first = pages.first().context("no workload")?;
        let setup = Setup { pods, workloads: WORKLOADS, lines: first.lines(), bytes: first.at(0).len() };
        let mut report =
            Report { machine: Machine::here(), setup, proxy: None, minute: None, window: None, targets: Vec::new() };
        println!("{}", report.machine.describe());
        if self.args.wants(Part::Proxy) {
            println!("starting a sandbox");
            // Three pods of each destination, as in the pages.
            let scraped = scraped::measure(&mut self.sites, 3 * destinations).await?;
            println!("\n{}\n", scraped.table());
            report.proxy = Some(scraped);
            self.stop_sites().await?;
        }
        if let Some(cluster) = &mut self.cluster {
            println!("{}\nstarting an API server", report.setup.describe());
            let api = cluster.start().await?;
            println!("creating the pods");
            let proxies = Proxies::serve(pods, pages).await?;
            world::create(&api, &self.run, pods, WORKLOADS, proxies.port).await?;
            let token = world::token(&api, &self.run).await?;
            let kubeconfig = cluster.kubeconfig();
            let surroundings = Surroundings { kubeconfig, namespace: &self.run, pods, proxies, token };
            if self.args.wants(Part::Minute) {
                let goal = Goal::Time(Duration::from_secs(self.args.seconds.into()));
                let minute = surroundings.collect(OWN_INTERVAL, goal).await?;
                println!("\n{}", minute.table("minute"));
                report.minute = Some(minute);
            }
            if self.args.wants(Part::Window) {
                let interval = Duration::from_secs(self.args.interval_seconds.into());
                let window = surroundings.collect(interval, Goal::Scrapes(WINDOW_SCRAPES)).await?;
                println!("\n{}", window.table("window"));
                report.window = Some(window);
            }
        }
        report.targets = report.limits();
        if !report.targets.is_empty() {
            println!("\n{}", target::table(&report.targets));
        }
        Ok(report)
    }

    /// Removes everything. Call it in any case.
    ///
    /// # Errors
    /// Something is left; the message says what.
    pub async fn remove(mut self) -> anyhow::Result<()> {
        let stopped = self.stop_sites().await;
        if let Some(cluster) = self.cluster {
            println!("removing the objects and the API server");
            let namespaces = vec![self.run.clone()];
            cluster.remove(&Created { run: self.run, namespaces }).await?;
        }
        stopped
    }

    async fn stop_sites(&mut self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        for site in self.sites.drain(..) {
            outcome = outcome.and(site.stop().await);
        }
        outcome
    }
}

impl Surroundings<'_> {
    /// Runs the component until the goal is reached.
    async fn collect(&self, scrape_interval: Duration, goal: Goal) -> anyhow::Result<Collected> {
        let proxies = &self.proxies;
        proxies.reset();
        let mut command = Command::new(binaries::directory()?.join("weft-viz"));
        command
            .arg("--kubeconfig")
            .arg(self.kubeconfig)
            .args(["--addr", "127.0.0.1:0", "--admin-addr", "127.0.0.1:0", "--log-format", "json"])
            .args(["--scrape-interval", &format!("{}s", scrape_interval.as_secs())]);
        let mut component = Process::spawn("weft-viz", "api", command).await?;
        component.ready().await?;
        let caller = Caller::new(component.address, &self.token, self.namespace, self.pods)?;
        let asked = Instant::now();
        until(ALLOWED_WITHIN, async || caller.ask(MINUTE).await).await.context("the first answer")?;
        let first_answer_seconds = asked.elapsed().as_secs_f64();

        let (before, own_before) = (component.usage()?, usage(std::process::id())?);
        let (began, scrapes_before) = (Instant::now(), proxies.scrapes());
        let mut resident = Vec::<Resident>::new();
        let mut answers = Vec::new();
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut asked = began;
        let longest = PATIENCE
            + match goal {
                Goal::Time(time) => time,
                Goal::Scrapes(scrapes) => 4 * scrape_interval * u32::try_from(scrapes)?,
            };
        loop {
            looks.tick().await;
            component.check()?;
            let scrapes = proxies.rounds();
            if resident.last().is_none_or(|last| last.scrapes < scrapes) {
                resident.push(Resident { scrapes, bytes: component.usage()?.resident_bytes });
            }
            let is_reached = match goal {
                Goal::Time(time) => began.elapsed() >= time,
                Goal::Scrapes(goal) => scrapes >= goal,
            };
            if is_reached {
                break;
            }
            ensure!(began.elapsed() < longest, "{scrapes} scrapes of each pod in {:?}", began.elapsed());
            if asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                answers.push(caller.ask(MINUTE).await?);
            }
        }
        let (seconds, after, own_after) =
            (began.elapsed().as_secs_f64(), component.usage()?, usage(std::process::id())?);
        let scrapes = proxies.scrapes() - scrapes_before;
        let mut of_window = Vec::new();
        for _ in 0..WINDOW_QUESTIONS {
            of_window.push(caller.ask(WINDOW).await?);
        }
        let (status, metrics) = get(component.admin, "/metrics").await?;
        ensure!(status == 200, "weft-viz's metrics: {status}");
        let value = |name: &str| counter(&metrics, name);
        let successes = value("weft_viz_scrapes_total{result=\"success\"}").context("it counts no scrapes")?;
        let bytes = value("weft_viz_scrape_bytes_total").context("it counts no bytes")?;
        let resident_bytes = after.resident_bytes.max(component.usage()?.resident_bytes);
        let peak_bytes = component.usage()?.peak_bytes;
        component.kill().await?;
        Ok(Collected {
            interval_seconds: scrape_interval.as_secs_f64(),
            seconds,
            scrapes,
            failures: value("weft_viz_scrapes_total{result=\"failure\"}").unwrap_or_default() as u64,
            bytes_per_scrape: bytes / successes,
            cpu_seconds: after.cpu_seconds - before.cpu_seconds,
            bench_cpu_seconds: own_after.cpu_seconds - own_before.cpu_seconds,
            round_seconds: proxies.round_seconds(),
            first_answer_seconds,
            answer_ms: Quantiles::of(answers),
            window_answer_ms: Quantiles::of(of_window),
            resident,
            resident_bytes,
            peak_bytes,
        })
    }
}

/// The value of a series in a page of metrics.
fn counter(metrics: &str, series: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_found_by_its_whole_series() {
        let metrics = "# TYPE a_total counter\na_total{result=\"success\"} 12\na_total_bytes 7\n";
        assert_eq!(counter(metrics, "a_total{result=\"success\"}"), Some(12.0));
        assert_eq!(counter(metrics, "a_total"), None);
    }
}
