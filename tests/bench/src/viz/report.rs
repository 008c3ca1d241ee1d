//! The results, as JSON and as tables. What was not asked for is absent.

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

use crate::{
    enrolment::Quantiles,
    machine::Machine,
    target::{Target, number},
};

/// What a full window of 1,000 pods may take (docs/scale.md).
const MEMORY_MIB: f64 = 256.0;
/// Pods of that limit.
const PODS_OF_LIMIT: u32 = 1000;
/// Scrapes of a pod in a minute, with the component's own interval.
const SCRAPES_PER_MINUTE: f64 = 6.0;
/// Numbers of scrapes after which the table has the memory.
const MILESTONES: [u64; 6] = [2, 10, 30, 60, 91, 900];

/// All measurements of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What it ran on.
    pub machine: Machine,
    /// What there was.
    pub setup: Setup,
    /// What a scrape costs a proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<Scraped>,
    /// What the component takes with its own interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minute: Option<Collected>,
    /// What it takes until its window is full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<Collected>,
    /// The limits, and whether they are met; those of what was measured.
    pub targets: Vec<Target>,
}

/// The pods and their pages.
#[derive(Clone, Debug, Serialize)]
pub struct Setup {
    /// Meshed pods.
    pub pods: u32,
    /// Deployments that they are of.
    pub workloads: u32,
    /// Lines of each page.
    pub lines: usize,
    /// Bytes of each page.
    pub bytes: usize,
}

/// A scrape of a real proxy.
#[derive(Clone, Debug, Serialize)]
pub struct Scraped {
    /// Lines of its page, comments excluded.
    pub lines: usize,
    /// Bytes of its page.
    pub bytes: usize,
    /// CPU time for one scrape, milliseconds.
    pub cpu_ms: f64,
    /// The load that it is compared with.
    pub requests_per_second: u32,
    /// CPU time of the proxy with that load, seconds per minute.
    pub cpu_seconds_per_minute: f64,
}

/// What the component did and took.
#[derive(Clone, Debug, Serialize)]
pub struct Collected {
    /// Its time between two scrapes.
    pub interval_seconds: f64,
    /// How long was measured, after the first answer.
    pub seconds: f64,
    /// Scrapes in that time.
    pub scrapes: u64,
    /// Those that failed, since its start.
    pub failures: u64,
    /// Bytes of a scrape.
    pub bytes_per_scrape: f64,
    /// CPU time of the component, answers included.
    pub cpu_seconds: f64,
    /// CPU time of this bench, which serves the pages.
    pub bench_cpu_seconds: f64,
    /// From the first scrape of a round to its last.
    pub round_seconds: Vec<f64>,
    /// From the first question until every proxy was scraped twice.
    pub first_answer_seconds: f64,
    /// Answers about the last minute, milliseconds.
    pub answer_ms: Quantiles,
    /// Answers about the whole window, milliseconds.
    pub window_answer_ms: Quantiles,
    /// Resident memory, by the number of scrapes of each pod.
    pub resident: Vec<Resident>,
    /// At the end.
    pub resident_bytes: u64,
    /// The most at a time.
    pub peak_bytes: u64,
}

/// Resident memory of the component.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Resident {
    /// Scrapes of each pod.
    pub scrapes: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Setup {
    /// As one line.
    #[must_use]
    pub fn describe(&self) -> String {
        let Self { pods, workloads, lines, bytes } = self;
        format!("{pods} pods of {workloads} Deployments; {lines} lines and {} kB of metrics each", bytes / 1000)
    }
}

impl Scraped {
    /// CPU time of a minute's scrapes over that of a minute's requests, in percent.
    #[must_use]
    pub fn share_percent(&self) -> f64 {
        self.cpu_ms / 1e3 * SCRAPES_PER_MINUTE / self.cpu_seconds_per_minute * 100.0
    }

    /// The table for people.
    #[must_use]
    pub fn table(&self) -> String {
        rows([
            ("a scrape of weft-proxy".to_owned(), String::new()),
            ("lines, kB".to_owned(), format!("{}, {}", self.lines, self.bytes / 1000)),
            ("CPU for a scrape, ms".to_owned(), number(self.cpu_ms)),
            (
                format!("CPU of the proxy at {} requests/s, s per minute", self.requests_per_second),
                number(self.cpu_seconds_per_minute),
            ),
            ("six scrapes of that, %".to_owned(), number(self.share_percent())),
        ])
    }
}

impl Collected {
    /// CPU time of the component, seconds per minute.
    #[must_use]
    pub fn cpu_seconds_per_minute(&self) -> f64 {
        self.cpu_seconds * 60.0 / self.seconds
    }

    /// CPU time of the component for each scrape, its answers included, milliseconds.
    #[must_use]
    pub fn cpu_ms_per_scrape(&self) -> f64 {
        self.cpu_seconds * 1e3 / self.scrapes as f64
    }

    /// The table for people.
    #[must_use]
    pub fn table(&self, part: &str) -> String {
        let quantiles = |Quantiles { p50, p99, max }: Quantiles| {
            format!("p50 {}, p99 {}, max {}", number(p50), number(p99), number(max))
        };
        let resident = |scrapes: u64| self.resident.iter().find(|resident| resident.scrapes >= scrapes);
        let memory = MILESTONES.into_iter().filter_map(resident);
        let mut memory: Vec<_> = memory.map(|at| format!("{} after {}", number(mib(at.bytes)), at.scrapes)).collect();
        memory.dedup();
        rows([
            (format!("{part}, a scrape each {} s", number(self.interval_seconds)), String::new()),
            ("measured for, s".to_owned(), number(self.seconds)),
            ("scrapes, failed ones".to_owned(), format!("{}, {}", self.scrapes, self.failures)),
            ("bytes for a scrape".to_owned(), number(self.bytes_per_scrape)),
            ("CPU of weft-viz, s per minute".to_owned(), number(self.cpu_seconds_per_minute())),
            ("CPU of weft-viz for a scrape, ms".to_owned(), number(self.cpu_ms_per_scrape())),
            (
                "CPU of the bench for a scrape, ms".to_owned(),
                number(self.bench_cpu_seconds * 1e3 / self.scrapes as f64),
            ),
            ("a round over all pods, s".to_owned(), quantiles(Quantiles::of(self.round_seconds.clone()))),
            ("first answer, s".to_owned(), number(self.first_answer_seconds)),
            ("answers about a minute, ms".to_owned(), quantiles(self.answer_ms)),
            ("answers about 15 minutes, ms".to_owned(), quantiles(self.window_answer_ms)),
            ("resident, MiB".to_owned(), memory.join(", ")),
            ("most resident at a time, MiB".to_owned(), number(mib(self.peak_bytes))),
        ])
    }
}

impl Report {
    /// The measurements that have a limit.
    #[must_use]
    pub fn limits(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        if let Some(minute) = &self.minute {
            let rounds = minute.round_seconds.clone();
            targets.push(Target::at_most("a round over all pods", "s", minute.interval_seconds, rounds));
            targets.push(Target::at_most("scrapes that failed", "", 0.0, vec![minute.failures as f64]));
        }
        if let Some(window) = self.window.as_ref().filter(|_| self.setup.pods == PODS_OF_LIMIT) {
            let memory = [
                ("resident with a full window", window.resident_bytes),
                ("most resident at a time", window.peak_bytes),
            ];
            targets.extend(memory.map(|(name, bytes)| Target::at_most(name, "MiB", MEMORY_MIB, vec![mib(bytes)])));
        }
        targets
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A table of two columns, of which the first row is the heading.
fn rows<const N: usize>(rows: [(String, String); N]) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    for (name, value) in rows {
        table.add_row([name, value]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Outcome;

    fn collected() -> Collected {
        let quantiles = Quantiles::of(vec![1.0, 2.0]);
        Collected {
            interval_seconds: 10.0,
            seconds: 30.0,
            scrapes: 3000,
            failures: 0,
            bytes_per_scrape: 1e5,
            cpu_seconds: 6.0,
            bench_cpu_seconds: 3.0,
            round_seconds: vec![1.0, 1.1, 1.2],
            first_answer_seconds: 2.5,
            answer_ms: quantiles,
            window_answer_ms: quantiles,
            resident: [2, 9, 11, 91].map(|scrapes| Resident { scrapes, bytes: scrapes << 20 }).into(),
            resident_bytes: 91 << 20,
            peak_bytes: 300 << 20,
        }
    }

    #[test]
    fn figures_are_per_minute_and_per_scrape() {
        let collected = collected();
        assert_eq!((collected.cpu_seconds_per_minute(), collected.cpu_ms_per_scrape()), (12.0, 2.0));
        let table = collected.table("window");
        assert!(
            table.contains("2.00 after 2, 11.0 after 11, 91.0 after 91\n") || table.contains("91.0 after 91 "),
            "{table}"
        );
        let scraped =
            Scraped { lines: 1, bytes: 1, cpu_ms: 5.0, requests_per_second: 100, cpu_seconds_per_minute: 1.5 };
        assert!((scraped.share_percent() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn memory_has_a_limit_with_a_thousand_pods_alone() {
        let setup = Setup { pods: 1000, workloads: 50, lines: 2000, bytes: 1 };
        let mut report = Report {
            machine: Machine::here(),
            setup,
            proxy: None,
            minute: Some(collected()),
            window: Some(collected()),
            targets: Vec::new(),
        };
        let outcomes = |report: &Report| report.limits().iter().map(|target| target.outcome).collect::<Vec<_>>();
        assert_eq!(outcomes(&report), [Outcome::Met, Outcome::Met, Outcome::Met, Outcome::Missed]);
        report.setup.pods = 100;
        assert_eq!(outcomes(&report), [Outcome::Met, Outcome::Met]);
    }
}
