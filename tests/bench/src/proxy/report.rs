//! Samples, their medians and spreads by row and contender, as tables and as JSON, and the goals.

use std::{collections::BTreeMap, time::SystemTime};

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

use super::{
    profile::{Group, Profile},
    rows::{Act, Contender, Row},
};
use crate::{
    load::{Flood, FloodCounts, Measured, Shape, Started},
    machine::Machine,
    node::Footprint,
    result::{median, spread},
    target::{Target, number},
};

/// How to read the tables.
pub(super) const NOTE: &str =
    "The load, the server and the proxies share the processors. CPU per request is the figure to compare; rates and
latencies of closed loops depend on how much of the processors is left. `direct` and `opaque` are floors.";

const MIB: f64 = (1 << 20) as f64;

/// Numbers of one repetition by column. A column that does not apply is absent.
pub type Sample = BTreeMap<&'static str, f64>;

/// Columns: key in JSON, heading.
const COLUMNS: [(&str, &str); 20] = [
    ("per_second", "per s"),
    ("gbit_per_second", "Gbit/s"),
    ("p50_us", "p50 us"),
    ("p99_us", "p99 us"),
    ("p999_us", "p99.9 us"),
    ("cpu_outbound_us", "CPU out us"),
    ("cpu_inbound_us", "CPU in us"),
    ("cpu_us", "CPU both us"),
    ("cpu_server_us", "server us"),
    ("cpu_load_us", "load us"),
    ("rss_outbound_mib", "RSS out MiB"),
    ("rss_inbound_mib", "RSS in MiB"),
    ("flood_open", "flood open"),
    ("flood_connections_per_second", "flood conn/s"),
    ("flood_resets_per_second", "flood resets/s"),
    ("outbound_connection_kib", "out KiB/conn"),
    ("inbound_connection_kib", "in KiB/conn"),
    ("certificate_ms", "start to certificate ms"),
    ("ready_after_certificate_ms", "certificate to ready ms"),
    ("ready_ms", "start to ready ms"),
];

/// Everything that a run measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The machine of the run.
    pub machine: Machine,
    /// What HAProxy says it is, if it is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub haproxy: Option<String>,
    /// Time of each repetition that counts.
    pub seconds: f64,
    /// How often each was measured.
    pub repetitions: u32,
    /// How to read it.
    pub note: &'static str,
    /// By row, in the order of the table.
    pub rows: Vec<RowReport>,
    /// Rows that this machine cannot measure, with the reason.
    pub skipped: Vec<String>,
    /// Rows that ended with an error, with the error.
    pub failed: Vec<String>,
    /// Whether the goals are met; those of rows that were measured.
    pub targets: Vec<Target>,
}

/// A row of the comparison.
#[derive(Debug, Serialize)]
pub struct RowReport {
    /// Its name on the command line.
    pub name: &'static str,
    /// For people.
    pub what: &'static str,
    /// By contender.
    pub contenders: BTreeMap<Contender, Numbers>,
}

/// What a contender reached in a row.
#[derive(Debug, Default, Serialize)]
pub struct Numbers {
    /// The middle of the repetitions, by column.
    pub medians: BTreeMap<&'static str, f64>,
    /// Half the distance between their quartiles.
    pub spreads: BTreeMap<&'static str, f64>,
    /// Exchanges that failed, in all repetitions.
    pub failures: u64,
    /// Why the last of them failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Every repetition.
    pub samples: Vec<Sample>,
    /// Where the proxies spend their time, with --profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
}

/// A sample of a load.
pub(super) fn loaded(shape: Shape, measured: &Measured, memory: Option<[Footprint; 2]>) -> Sample {
    let mut sample = Sample::new();
    // Of a stream, a MiB counts as one.
    let (count, rate) = if shape == Shape::Bulk {
        (measured.count as f64 / MIB, ("gbit_per_second", measured.count as f64 * 8.0 / 1e9))
    } else {
        sample.insert("p50_us", measured.p50_us);
        sample.insert("p99_us", measured.p99_us);
        sample.insert("p999_us", measured.p999_us);
        (measured.count as f64, ("per_second", measured.count as f64))
    };
    sample.insert(rate.0, rate.1 / measured.seconds);
    let each = |nanoseconds: u64| nanoseconds as f64 / 1e3 / count;
    sample.insert("cpu_load_us", each(measured.own_cpu_ns));
    if let Some(server) = measured.cpu_ns.first() {
        sample.insert("cpu_server_us", each(*server));
    }
    if let [_, outbound, inbound] = measured.cpu_ns[..] {
        sample.insert("cpu_outbound_us", each(outbound));
        sample.insert("cpu_inbound_us", each(inbound));
        sample.insert("cpu_us", each(outbound + inbound));
    }
    if let Some(memory) = memory {
        sample.extend(resident(memory));
    }
    sample
}

/// What a flood came to, for a load's sample.
pub(super) fn flooded(flood: Flood, counts: &FloodCounts) -> Sample {
    let per_second = |count: u64| count as f64 / counts.seconds;
    let opened = ("flood_connections_per_second", per_second(counts.opened));
    match flood {
        Flood::Heads { .. } | Flood::Hellos { .. } => [("flood_open", counts.open as f64), opened].into(),
        Flood::Resets { .. } => [("flood_resets_per_second", per_second(counts.resets)), opened].into(),
        Flood::Connections { .. } => [opened].into(),
    }
}

/// A sample of idle connections.
pub(super) fn idle(connections: u32, before: [Footprint; 2], after: [Footprint; 2]) -> Sample {
    let growth = |index: usize| {
        let grown = after[index].resident_bytes.saturating_sub(before[index].resident_bytes);
        grown as f64 / 1024.0 / f64::from(connections)
    };
    let mut sample: Sample = resident(after).into();
    sample.insert("rss_outbound_before_mib", before[0].resident_bytes as f64 / MIB);
    sample.insert("rss_inbound_before_mib", before[1].resident_bytes as f64 / MIB);
    sample.insert("outbound_connection_kib", growth(0));
    sample.insert("inbound_connection_kib", growth(1));
    sample
}

/// A sample of a start.
pub(super) fn started(started: Started, certified: SystemTime) -> Sample {
    let between = |from: SystemTime, to: SystemTime| match to.duration_since(from) {
        Ok(later) => later.as_secs_f64() * 1e3,
        Err(earlier) => -earlier.duration().as_secs_f64() * 1e3,
    };
    let Started { began, ready } = started;
    [
        ("certificate_ms", between(began, certified)),
        ("ready_after_certificate_ms", between(certified, ready)),
        ("ready_ms", between(began, ready)),
    ]
    .into()
}

fn resident([outbound, inbound]: [Footprint; 2]) -> [(&'static str, f64); 2] {
    let mib = |memory: Footprint| memory.resident_bytes as f64 / MIB;
    [("rss_outbound_mib", mib(outbound)), ("rss_inbound_mib", mib(inbound))]
}

impl Numbers {
    /// Adds a repetition.
    pub(super) fn add(&mut self, sample: Sample) {
        self.samples.push(sample);
        let keys: Vec<_> = self.samples.iter().flat_map(|sample| sample.keys().copied()).collect();
        for key in keys {
            self.medians.insert(key, median(self.of(key)));
            self.spreads.insert(key, spread(self.of(key)));
        }
    }

    /// Every repetition's number in a column.
    fn of(&self, key: &str) -> Vec<f64> {
        self.samples.iter().filter_map(|sample| sample.get(key).copied()).collect()
    }
}

impl RowReport {
    /// A row without samples.
    pub(super) fn new(row: &Row) -> Self {
        Self { name: row.name, what: row.what, contenders: BTreeMap::new() }
    }

    /// The row as a table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let has = |key: &str| self.contenders.values().any(|numbers| numbers.medians.contains_key(key));
        let columns: Vec<_> = COLUMNS.iter().filter(|(key, _)| has(key)).collect();
        let mut table = Table::new();
        table.load_preset(NOTHING);
        let headings = columns.iter().map(|(_, heading)| (*heading).to_owned());
        table.set_header([self.name.to_owned()].into_iter().chain(headings));
        for (contender, numbers) in &self.contenders {
            let cell = |key: &str| {
                let Some(middle) = numbers.medians.get(key) else { return String::new() };
                match numbers.spreads.get(key) {
                    // Where differences decide, their noise is beside them. Few repetitions have none.
                    Some(spread) if key == "cpu_us" && *spread > 0.0 => {
                        format!("{} ± {}", number(*middle), number(*spread))
                    }
                    _ => number(*middle),
                }
            };
            let cells = columns.iter().map(|(key, _)| cell(key));
            table.add_row([contender.label().to_owned()].into_iter().chain(cells));
        }
        let failed = self.contenders.iter().filter(|(_, numbers)| numbers.failures > 0).map(|(contender, numbers)| {
            let problem = numbers.problem.as_deref().unwrap_or_default();
            format!("\n{}: {} exchanges failed: {problem}", contender.label(), numbers.failures)
        });
        format!("{}\n{table}{}", self.what, failed.collect::<String>())
    }

    /// Where the contenders' proxies spend their time, as tables for people; none without --profile.
    #[must_use]
    pub fn profile_tables(&self) -> Vec<String> {
        let profiles = self.contenders.iter().filter_map(|(contender, numbers)| {
            let profile = numbers.profile.as_ref()?;
            let cpu = |key: &str| numbers.medians.get(key).copied().unwrap_or_default();
            let mut table = Table::new();
            table.load_preset(NOTHING);
            let name = format!("{}, {}", self.name, contender.label());
            table.set_header([&name, "CPU out us", "CPU in us", "% of both"]);
            for line in profile.lines(cpu("cpu_outbound_us"), cpu("cpu_inbound_us")) {
                table.add_row(line);
            }
            Some(format!("{table}\nstacks: {}", profile.folded.display()))
        });
        profiles.collect()
    }

    /// A contender's number in each repetition.
    fn of(&self, contender: Contender, key: &str) -> Vec<f64> {
        self.contenders.get(&contender).map(|numbers| numbers.of(key)).unwrap_or_default()
    }

    /// The part of our CPU time in which metrics are counted, in percent; `None` without --profile.
    fn metrics_percent(&self) -> Option<f64> {
        let numbers = self.contenders.get(&Contender::Weft)?;
        let cpu = |key: &str| numbers.medians.get(key).copied().unwrap_or_default();
        let parts = numbers.profile.as_ref()?.parts(cpu("cpu_outbound_us"), cpu("cpu_inbound_us"));
        parts.into_iter().find(|(group, _)| *group == Group::Metrics).map(|(_, [.., part])| part * 100.0)
    }

    /// In each repetition, ours over the best of the others; empty if there is none to compare with.
    fn ratio(&self, key: &str) -> Vec<f64> {
        let ours = self.of(Contender::Weft, key);
        let others = [Contender::HaproxyHttp1, Contender::HaproxyHttp2, Contender::HaproxyTcp].map(|c| self.of(c, key));
        let best = |index: usize| others.iter().filter_map(|other| other.get(index)).copied().reduce(f64::min);
        ours.iter().enumerate().filter_map(|(index, ours)| Some(ours / best(index)?)).collect()
    }
}

/// The goals of what was measured.
pub(super) fn targets(rows: &[RowReport]) -> Vec<Target> {
    let mut targets = Vec::new();
    for row in rows {
        let Ok(known) = Row::named(row.name) else { continue };
        let mut at_most = |what: String, unit, limit, numbers: Vec<f64>| {
            if !numbers.is_empty() {
                targets.push(Target::at_most(what, unit, limit, numbers));
            }
        };
        let (name, ours) = (row.name, |key| row.of(Contender::Weft, key));
        match known.act {
            Act::Load(Shape::Bulk) => {
                let numbers = ours("gbit_per_second");
                if !numbers.is_empty() {
                    targets.push(Target::at_least(name, "Gbit/s", 10.0, numbers));
                }
            }
            Act::Load(Shape::RoundTrip) => {
                at_most(format!("{name}, p50 over HAProxy's"), "times", 1.0, row.ratio("p50_us"));
            }
            Act::Load(shape) => {
                at_most(
                    format!("{name}, part of metrics in the CPU"),
                    "%",
                    3.0,
                    row.metrics_percent().into_iter().collect(),
                );
                at_most(format!("{name}, CPU over HAProxy's better mode"), "times", 0.8, row.ratio("cpu_us"));
                match shape {
                    Shape::Open { rate: 1000, .. } => {
                        at_most(format!("{name}, p50"), "us", 300.0, ours("p50_us"));
                        at_most(format!("{name}, p99"), "us", 550.0, ours("p99_us"));
                    }
                    Shape::Http1 { connections: 1 } => at_most(format!("{name}, p50"), "us", 140.0, ours("p50_us")),
                    _ => {}
                }
            }
            // Where processors are free, twice the workers serve 1.8 times the requests if each costs 2 / 1.8 times the
            // CPU.
            Act::Workers => {
                let (one, two) = (ours("cpu_us"), row.of(Contender::Workers2, "cpu_us"));
                let times = one.iter().zip(&two).map(|(one, two)| two / one).collect();
                at_most(format!("{name}, CPU with two over CPU with one"), "times", 2.0 / 1.8, times);
            }
            Act::Tap => {
                let (without, with) = (ours("cpu_us"), row.of(Contender::Tapped, "cpu_us"));
                let more = without.iter().zip(&with).map(|(without, with)| (with / without - 1.0) * 100.0).collect();
                at_most(format!("{name}, CPU that a tap adds"), "%", 3.0, more);
            }
            Act::Flood(_) => {
                let (alone, flooded) = (ours("p99_us"), row.of(Contender::Flooded, "p99_us"));
                let times = alone.iter().zip(&flooded).map(|(alone, flooded)| flooded / alone).collect();
                at_most(format!("{name}, p99 under the flood over p99 without it"), "times", 2.0, times);
            }
            // HAProxy takes no part.
            Act::Endpoints { .. } => {}
            Act::Start => {
                at_most(format!("{name}, certificate to ready"), "ms", 6.0, ours("ready_after_certificate_ms"));
            }
            Act::Idle { .. } => {
                at_most(format!("{name}, outbound proxy"), "KiB each", 6.0, ours("outbound_connection_kib"));
                at_most(format!("{name}, inbound proxy"), "KiB each", 6.0, ours("inbound_connection_kib"));
                at_most(format!("{name}, resident before"), "MiB", 8.0, ours("rss_outbound_before_mib"));
            }
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(cpu_ns: Vec<u64>) -> Measured {
        Measured { seconds: 2.0, count: 1000, cpu_ns, own_cpu_ns: 3_000_000, ..Measured::default() }
    }

    fn row(name: &str, numbers: &[(Contender, &'static str, &[f64])]) -> RowReport {
        let mut row = RowReport::new(Row::named(name).unwrap());
        for (contender, key, values) in numbers {
            for value in *values {
                row.contenders.entry(*contender).or_default().add([(*key, *value)].into());
            }
        }
        row
    }

    #[test]
    fn cpu_counts_for_each_request() {
        let shape = Shape::Http1 { connections: 1 };
        let sample = loaded(shape, &measured(vec![1_000_000, 20_000_000, 25_000_000]), None);
        for (key, expected) in [
            ("per_second", 500.0),
            ("cpu_outbound_us", 20.0),
            ("cpu_inbound_us", 25.0),
            ("cpu_us", 45.0),
            ("cpu_server_us", 1.0),
            ("cpu_load_us", 3.0),
        ] {
            assert_eq!(sample[key], expected, "{key}");
        }
        assert!(!loaded(shape, &measured(vec![1]), None).contains_key("cpu_us"), "no proxy, no CPU");
    }

    #[test]
    fn a_stream_counts_in_bits_and_mebibytes() {
        let bulk = Measured { count: 1 << 30, ..measured(vec![0, 1_024_000, 0]) };
        let sample = loaded(Shape::Bulk, &bulk, None);
        assert_eq!(sample["cpu_outbound_us"], 1.0);
        assert_eq!(sample["gbit_per_second"], f64::from(1 << 30) * 8.0 / 2e9);
        assert!(!sample.contains_key("p50_us"));
    }

    #[test]
    fn a_flood_counts_by_the_second_and_as_what_is_open() {
        let counts = FloodCounts { seconds: 4.0, open: 7, opened: 20, resets: 8000, problem: None };
        for (flood, expected) in [
            (Flood::Heads { connections: 7 }, vec![("flood_connections_per_second", 5.0), ("flood_open", 7.0)]),
            (
                Flood::Resets { connections: 1, per_second: 2000 },
                vec![("flood_connections_per_second", 5.0), ("flood_resets_per_second", 2000.0)],
            ),
            (Flood::Connections { per_second: 5 }, vec![("flood_connections_per_second", 5.0)]),
        ] {
            let sample = flooded(flood, &counts);
            assert_eq!(sample, expected.into_iter().collect(), "{flood:?}");
            assert!(sample.keys().all(|key| COLUMNS.iter().any(|(column, _)| column == key)), "{flood:?}");
        }
    }

    #[test]
    fn the_goal_of_a_flood_is_a_ratio_of_our_own_p99_in_the_same_repetition() {
        use Contender::{Flooded, HaproxyHttp1, HaproxyHttp1Flooded, Weft};
        let row = row(
            "flood-heads",
            &[
                (Weft, "p99_us", &[400.0, 500.0]),
                (Flooded, "p99_us", &[600.0, 500.0]),
                (HaproxyHttp1, "p99_us", &[100.0, 100.0]),
                (HaproxyHttp1Flooded, "p99_us", &[900.0, 900.0]),
            ],
        );
        let targets = targets(&[row]);
        assert_eq!(targets.len(), 1);
        assert!((targets[0].measured, targets[0].limit) == (1.25, 2.0), "{targets:?}");
    }

    #[test]
    fn memory_of_a_connection_is_the_growth() {
        let memory = |mib: u64| Footprint { resident_bytes: mib << 20, ..Footprint::default() };
        let sample = idle(1024, [memory(8), memory(9)], [memory(16), memory(9)]);
        assert_eq!((sample["outbound_connection_kib"], sample["inbound_connection_kib"]), (8.0, 0.0));
        assert_eq!((sample["rss_outbound_before_mib"], sample["rss_outbound_mib"]), (8.0, 16.0));
    }

    #[test]
    fn a_start_has_two_parts() {
        use std::time::Duration;
        let at = |milliseconds| SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds);
        let sample = started(Started { began: at(1000), ready: at(1025) }, at(1020));
        assert_eq!((sample["certificate_ms"], sample["ready_after_certificate_ms"]), (20.0, 5.0));
        assert_eq!(sample["ready_ms"], 25.0);
    }

    #[test]
    fn the_goal_is_a_ratio_to_the_better_mode_of_the_same_repetition() {
        use Contender::{HaproxyHttp1, HaproxyHttp2, Weft};
        let row = row(
            "http1-64",
            &[
                (Weft, "cpu_us", &[30.0, 60.0]),
                (HaproxyHttp1, "cpu_us", &[50.0, 90.0]),
                (HaproxyHttp2, "cpu_us", &[40.0, 100.0]),
            ],
        );
        assert_eq!(row.ratio("cpu_us"), [30.0 / 40.0, 60.0 / 90.0]);
        let targets = targets(&[row]);
        assert_eq!(targets.len(), 1);
        assert!(targets[0].name.contains("http1-64") && targets[0].limit == 0.8);
    }

    #[test]
    fn without_a_peer_there_is_no_ratio_and_no_goal() {
        let alone = row("http2-1x64", &[(Contender::Weft, "cpu_us", &[20.0])]);
        assert!(targets(&[alone]).is_empty());
    }

    #[test]
    fn a_table_has_the_columns_that_someone_has_and_names_failures() {
        let mut row = row("http1-1", &[(Contender::Weft, "cpu_us", &[1.0, 2.0, 3.0, 4.0])]);
        let numbers = row.contenders.get_mut(&Contender::Weft).unwrap();
        (numbers.failures, numbers.problem) = (3, Some("reset".to_owned()));
        let text = row.table();
        assert!(text.contains("2.50 ± 1.00") && text.contains("CPU both us") && !text.contains("Gbit/s"), "{text}");
        assert!(text.contains("weft: 3 exchanges failed: reset"), "{text}");
    }
}
