//! Series and bounds that proxies have in common: replicas of a workload have the same series, so each is kept once.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use crate::family::{Family, Read, Series};

/// The most different bounds of buckets. Linkerd's families have 31 together.
const BOUNDS: usize = 64;
/// Entries between two sweeps.
const SWEEP: usize = 4096;

/// What is shared by all proxies.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    series: HashSet<Arc<Series>>,
    values: HashSet<Arc<str>>,
    bounds: Vec<f64>,
    numbers: HashMap<u64, u8>,
    of_family: HashMap<Family, Vec<f64>>,
    sweep_at: usize,
}

impl Interner {
    /// The one instance of a series.
    pub(crate) fn series(&mut self, read: Read) -> Arc<Series> {
        let values = &mut self.values;
        let mut value = |text: String| -> Arc<str> {
            if let Some(known) = values.get(text.as_str()) {
                return Arc::clone(known);
            }
            let new: Arc<str> = text.into();
            values.insert(Arc::clone(&new));
            new
        };
        let labels = read.labels.into_iter().map(|(name, text)| (name, value(text))).collect();
        let series = Series { family: read.family, labels };
        if let Some(known) = self.series.get(&series) {
            return Arc::clone(known);
        }
        if self.series.len() >= self.sweep_at.max(SWEEP) {
            // No proxy has these any more.
            self.series.retain(|series| Arc::strong_count(series) > 1);
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.sweep_at = self.series.len() * 2;
        }
        let series = Arc::new(series);
        self.series.insert(Arc::clone(&series));
        series
    }

    /// The number of a bound; `None` beyond the limit.
    pub(crate) fn bound(&mut self, family: Family, bound: f64) -> Option<u8> {
        let number = match self.numbers.get(&bound.to_bits()) {
            Some(known) => *known,
            None => {
                let number = u8::try_from(self.bounds.len()).ok().filter(|number| usize::from(*number) < BOUNDS)?;
                self.bounds.push(bound);
                self.numbers.insert(bound.to_bits(), number);
                number
            }
        };
        let of_family = self.of_family.entry(family).or_default();
        if !of_family.contains(&bound) {
            of_family.push(bound);
        }
        Some(number)
    }

    /// The bounds of a family, in any order.
    pub(crate) fn bounds_of(&self, family: Family) -> &[f64] {
        self.of_family.get(&family).map_or(&[], Vec::as_slice)
    }

    /// The bounds by number.
    pub(crate) fn bounds(&self) -> &[f64] {
        &self.bounds
    }

    /// How many series there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.series.len()
    }
}
