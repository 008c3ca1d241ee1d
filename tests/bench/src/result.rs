//! Samples, their medians, and the comparison as a table and as JSON.

use std::collections::BTreeMap;

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;
use weft_examples::rawtcp::Quantiles;

use super::machine::Machine;

/// The path of connections from the client to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// No proxy at all.
    Direct,
    /// Two pass-through proxies behind linkerd-init's rules.
    Iptables,
    /// Two pass-through proxies behind the agent's programs.
    Ebpf,
}

impl Mode {
    /// All modes, in the order of the table.
    pub const ALL: [Self; 3] = [Self::Direct, Self::Iptables, Self::Ebpf];

    /// The label in names and tables.
    pub fn label(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Iptables => "iptables",
            Self::Ebpf => "ebpf",
        }
    }
}

/// Measurements of one repetition.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sample {
    /// Time of `connect` alone, microseconds.
    pub connect_us: Quantiles,
    /// Time from `connect` to the server's first byte, microseconds.
    pub first_byte_us: Quantiles,
    /// New connections per second.
    pub connections_per_second: f64,
    /// Round trip of 64 bytes, microseconds.
    pub round_trip_us: Quantiles,
    /// One bulk stream, gigabits per second.
    pub bulk_gbit_per_second: f64,
    /// CPU time of all processes in both pods, kernel included, microseconds per connection.
    pub cpu_us_per_connection: f64,
    /// New conntrack entries in both pods, per connection.
    pub conntrack_entries_per_connection: f64,
}

/// A line of the comparison.
struct Row {
    name: &'static str,
    /// Whether more is better.
    more: bool,
    value: fn(&Sample) -> f64,
}

const ROWS: [Row; 10] = [
    Row { name: "connect p50, us", more: false, value: |sample| sample.connect_us.p50 },
    Row { name: "connect p99, us", more: false, value: |sample| sample.connect_us.p99 },
    Row { name: "connect to first byte p50, us", more: false, value: |sample| sample.first_byte_us.p50 },
    Row { name: "connect to first byte p99, us", more: false, value: |sample| sample.first_byte_us.p99 },
    Row { name: "new connections per second", more: true, value: |sample| sample.connections_per_second },
    Row { name: "64 B round trip p50, us", more: false, value: |sample| sample.round_trip_us.p50 },
    Row { name: "64 B round trip p99, us", more: false, value: |sample| sample.round_trip_us.p99 },
    Row { name: "one bulk stream, Gbit/s", more: true, value: |sample| sample.bulk_gbit_per_second },
    Row { name: "CPU per connection, us", more: false, value: |sample| sample.cpu_us_per_connection },
    Row {
        name: "conntrack entries per connection",
        more: false,
        value: |sample| sample.conntrack_entries_per_connection,
    },
];

/// All measurements of one run.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The machine of the run.
    pub machine: Machine,
    /// Number of repetitions of each mode.
    pub repetitions: usize,
    /// The median of each number, by mode.
    pub medians: BTreeMap<&'static str, BTreeMap<&'static str, f64>>,
    /// The spread of a mode's repetitions: half the distance between the quartiles of each number, by mode.
    pub spreads: BTreeMap<&'static str, BTreeMap<&'static str, f64>>,
    /// Rows in which eBPF's median is worse than iptables' by more than the larger of the two spreads.
    pub ebpf_worse_than_iptables: Vec<&'static str>,
    /// Rows in which it is worse by less: the run cannot decide.
    pub undecided: Vec<&'static str>,
    /// Every repetition, by mode, in order.
    pub samples: BTreeMap<&'static str, Vec<Sample>>,
}

impl Comparison {
    /// Summarises the samples of a run.
    pub fn of(machine: Machine, samples: BTreeMap<Mode, Vec<Sample>>) -> Self {
        let summary = |summarise: fn(Vec<f64>) -> f64| -> BTreeMap<_, BTreeMap<_, _>> {
            let of_mode = |samples: &[Sample]| -> BTreeMap<_, _> {
                ROWS.iter().map(|row| (row.name, summarise(samples.iter().map(row.value).collect()))).collect()
            };
            samples.iter().map(|(mode, samples)| (mode.label(), of_mode(samples))).collect()
        };
        let (medians, spreads) = (summary(median), summary(spread));
        let both = |numbers: &BTreeMap<&str, BTreeMap<&str, f64>>, row: &Row| {
            let of = |mode: Mode| numbers.get(mode.label()).and_then(|rows| rows.get(row.name)).copied();
            of(Mode::Ebpf).zip(of(Mode::Iptables))
        };
        let (mut worse, mut undecided) = (Vec::new(), Vec::new());
        for row in &ROWS {
            let Some((ebpf, iptables)) = both(&medians, row) else { continue };
            let behind = if row.more { iptables - ebpf } else { ebpf - iptables };
            let noise = both(&spreads, row).map_or(0.0, |(ebpf, iptables)| ebpf.max(iptables));
            if behind > noise {
                worse.push(row.name);
            } else if behind > 0.0 {
                undecided.push(row.name);
            }
        }
        Self {
            machine,
            repetitions: samples.values().map(Vec::len).max().unwrap_or(0),
            medians,
            spreads,
            ebpf_worse_than_iptables: worse,
            undecided,
            samples: samples.into_iter().map(|(mode, samples)| (mode.label(), samples)).collect(),
        }
    }

    /// The comparison as a table for people.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(NOTHING);
        let modes: Vec<_> = Mode::ALL.into_iter().filter(|mode| self.medians.contains_key(mode.label())).collect();
        let mut header = vec!["median of repetitions".to_owned()];
        header.extend(modes.iter().map(|mode| mode.label().to_owned()));
        table.set_header(header);
        for row in &ROWS {
            let mut cells = vec![row.name.to_owned()];
            cells.extend(modes.iter().map(|mode| format!("{:.1}", self.medians[mode.label()][row.name])));
            table.add_row(cells);
        }
        table.to_string()
    }
}

/// The middle value, the mean of both for an even number of values; zero if there are none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        count if count % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Half the distance between the quartiles; zero for fewer than four values, which have none.
pub(super) fn spread(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let half = values.len() / 2;
    if half < 2 {
        return 0.0;
    }
    let (lower, upper) = (values[..half].to_vec(), values[values.len() - half..].to_vec());
    (median(upper) - median(lower)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_ignores_an_outlier() {
        assert_eq!(median(vec![100.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![1.0, 2.0]), 1.5);
        assert_eq!(median(Vec::new()), 0.0);
    }

    #[test]
    fn names_the_rows_in_which_ebpf_is_worse_and_no_others() {
        let sample =
            |rate, cpu| Sample { connections_per_second: rate, cpu_us_per_connection: cpu, ..Sample::default() };
        let samples = [(Mode::Iptables, vec![sample(100.0, 5.0)]), (Mode::Ebpf, vec![sample(90.0, 4.0)])];
        let comparison = Comparison::of(Machine::here(), samples.into());
        assert_eq!(comparison.ebpf_worse_than_iptables, ["new connections per second"]);
        assert!(comparison.table().contains("new connections per second"));
    }

    #[test]
    fn a_difference_within_the_spread_of_the_repetitions_decides_nothing() {
        let samples = |rates: [f64; 4]| -> Vec<Sample> {
            rates.map(|rate| Sample { connections_per_second: rate, ..Sample::default() }).into()
        };
        let check = |ebpf| {
            let samples = [(Mode::Iptables, samples([90.0, 98.0, 102.0, 110.0])), (Mode::Ebpf, samples(ebpf))];
            let comparison = Comparison::of(Machine::here(), samples.into());
            (comparison.ebpf_worse_than_iptables, comparison.undecided)
        };
        let row = vec!["new connections per second"];
        assert_eq!(check([89.0, 97.0, 101.0, 109.0]), (vec![], row.clone()));
        assert_eq!(check([49.0, 57.0, 61.0, 69.0]), (row, vec![]));
    }
}
