//! The targets, the measurements, and whether a target is met.

use std::borrow::Cow;

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

use super::result::{median, spread};

/// Whether a target is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// By more than the repetitions' spread.
    Met,
    /// By more than the repetitions' spread.
    Missed,
    /// The limit is within the spread: this run cannot decide.
    Undecided,
}

/// One target.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// Name of the measurement.
    pub name: Cow<'static, str>,
    /// Unit of the measurement.
    pub unit: &'static str,
    /// The maximum or minimum.
    pub limit: f64,
    /// Whether the limit is a minimum.
    pub at_least: bool,
    /// The median of the repetitions.
    pub measured: f64,
    /// The spread of the repetitions: half the distance between their quartiles.
    pub spread: f64,
    /// Whether it is met.
    pub outcome: Outcome,
}

impl Target {
    /// A target with `limit` as maximum.
    #[must_use]
    pub fn at_most(name: impl Into<Cow<'static, str>>, unit: &'static str, limit: f64, repetitions: Vec<f64>) -> Self {
        Self::new(name.into(), unit, limit, false, repetitions)
    }

    /// A target with `limit` as minimum.
    #[must_use]
    pub fn at_least(name: impl Into<Cow<'static, str>>, unit: &'static str, limit: f64, repetitions: Vec<f64>) -> Self {
        Self::new(name.into(), unit, limit, true, repetitions)
    }

    fn new(name: Cow<'static, str>, unit: &'static str, limit: f64, at_least: bool, repetitions: Vec<f64>) -> Self {
        let (measured, spread) = (median(repetitions.clone()), spread(repetitions));
        let room = if at_least { measured - limit } else { limit - measured };
        let outcome = match room {
            // Without a measurement the target is missed.
            room if room.is_nan() => Outcome::Missed,
            room if room.abs() < spread => Outcome::Undecided,
            room if room < 0.0 => Outcome::Missed,
            _ => Outcome::Met,
        };
        Self { name, unit, limit, at_least, measured, spread, outcome }
    }

    fn outcome_text(&self) -> String {
        match self.outcome {
            Outcome::Met => "met".to_owned(),
            Outcome::Undecided => "undecided".to_owned(),
            Outcome::Missed => format!("missed by {}", number((self.measured - self.limit).abs())),
        }
    }
}

/// The targets as a table for people.
#[must_use]
pub fn table(targets: &[Target]) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    table.set_header(["target", "limit", "measured", "spread", ""]);
    for target in targets {
        let sign = if target.at_least { "≥" } else { "≤" };
        table.add_row([
            format!("{}, {}", target.name, target.unit),
            format!("{sign} {}", number(target.limit)),
            number(target.measured),
            number(target.spread),
            target.outcome_text(),
        ]);
    }
    table.to_string()
}

/// With the significant digits only.
#[must_use]
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_within_the_spread_decides_nothing() {
        for (row, target, expected) in [
            ("below", Target::at_most("x", "us", 4.0, vec![1.0, 1.1, 1.2, 1.3]), Outcome::Met),
            ("above", Target::at_most("x", "us", 1.0, vec![4.0, 4.1, 4.2, 4.3]), Outcome::Missed),
            ("around", Target::at_most("x", "us", 2.0, vec![1.0, 1.1, 3.0, 3.1]), Outcome::Undecided),
            ("reached", Target::at_least("x", "", 2.0, vec![3.0]), Outcome::Met),
            ("not reached", Target::at_least("x", "", 2.0, vec![1.0]), Outcome::Missed),
            ("exactly", Target::at_most("x", "", 0.0, vec![0.0]), Outcome::Met),
            ("no number", Target::at_most("x", "", 1.0, vec![f64::NAN]), Outcome::Missed),
        ] {
            assert_eq!(target.outcome, expected, "{row}");
        }
    }

    #[test]
    fn says_by_how_much_a_target_is_missed() {
        let text = table(&[Target::at_most("hook", "us", 4.0, vec![5.5])]);
        assert!(text.contains("missed by 1.50") && text.contains("≤ 4.00"), "{text}");
    }
}
