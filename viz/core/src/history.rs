//! What one proxy counted: the differences between its scrapes, over the window.
//!
//! ```text
//! page ─> each line: in the page before? ─ yes ─> difference to its value ─┐
//!                           └─ no ─> the number of its series ─────────────┴─> sum by series ─> Sample, in varints
//! ```
//!
//! Differences are taken line by line, before lines become one series: a line that the proxy evicts, because nothing
//! used it for ten minutes, must not look like a counter that fell. Times are the collector's; the proxy's clock is
//! only compared with itself.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    exposition::{Lines, Page},
    family::{Family, Series},
};

/// How far back answers look.
pub(crate) const WINDOW: Duration = Duration::from_secs(15 * 60);
/// The most series of a proxy.
const MOST_SERIES: usize = 4 * 1024;
/// How old the newest scrape of a shorter window may be: two intervals and a deadline.
const LATE: Duration = Duration::from_secs(30);
/// The most samples: one a second.
const MOST_SAMPLES: usize = 900;

/// A proxy's window.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Of the last scrape.
    lines: Arc<Lines>,
    series: Vec<Option<Entry>>,
    free: Vec<u16>,
    samples: VecDeque<Sample>,
    /// The bits of `process_start_time_seconds`.
    started: Option<u64>,
    scrapes: u32,
    /// Lines of the last scrape that were beyond the limit.
    excess: u32,
}

#[derive(Debug)]
struct Entry {
    series: Arc<Series>,
    lines: u32,
    /// The last scrape in which it counted.
    counted: u32,
}

#[derive(Debug)]
struct Sample {
    at: Instant,
    scrape: u32,
    bytes: Box<[u8]>,
}

/// What a series counted in a window.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Counted {
    /// The difference of a counter, or the value of a gauge at the window's end.
    pub(crate) total: u64,
    /// Of a histogram: (number of the bound, observations in its bucket alone).
    pub(crate) buckets: Vec<(u8, u64)>,
}

/// The scrapes that a window lies between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Span {
    /// The index of the first sample that counts.
    from: usize,
    /// That of the sample after the last.
    to: usize,
    /// From the scrape before the first to the last.
    pub(crate) length: Duration,
}

impl History {
    /// The lines of the last scrape, which the next one is read beside.
    pub(crate) fn lines(&self) -> &Arc<Lines> {
        &self.lines
    }

    /// Adds a scrape that was read beside [`Self::lines`]. Scrapes come in the order of their times.
    pub(crate) fn add(&mut self, page: Page, at: Instant, bounds: &[f64]) {
        let is_first = self.scrapes == 0;
        self.scrapes = self.scrapes.wrapping_add(1).max(1);
        // Its counters begin at zero. Where the process does not say when it started, falling counters alone tell.
        let restarted = page.started.is_some() && self.started.is_some() && page.started != self.started;
        self.started = page.started.or(self.started);
        // A line that was not there before began at zero, unless the last scrape had no room for it.
        let new_lines_count = !is_first && (self.excess == 0 || restarted);
        self.excess = page.excess;
        let mut numbers = self.numbers(&page);
        let mut new = page.new.into_iter();
        let mut lines = page.before.followed_by(page.lines.len());
        let mut differences = Vec::new();
        for line in page.lines {
            let (last, series, bound) = match line.before {
                Some(place) => {
                    let (last, series, bound) = page.before.at(place);
                    (Some(last), series, bound)
                }
                None => {
                    let Some(line) = new.next() else { break };
                    let Some(series) = self.number(&mut numbers, line.series) else {
                        self.excess += 1;
                        continue;
                    };
                    (None, series, line.bound)
                }
            };
            let Some(entry) = self.series[usize::from(series)].as_mut() else { continue };
            entry.lines += 1;
            let difference = match last {
                _ if entry.series.family == Family::Open => line.value,
                Some(last) if !restarted && line.value >= last => line.value - last,
                Some(_) => line.value,
                None if new_lines_count => line.value,
                None => 0.0,
            };
            if difference > 0.0 {
                differences.push((series, bound, difference));
            }
            lines.push(line, series, bound);
        }
        for series in page.before.series() {
            if let Some(entry) = self.series[usize::from(*series)].as_mut() {
                entry.lines -= 1;
            }
        }
        self.lines = Arc::new(lines);
        let bytes = self.encode(&mut differences, bounds);
        self.samples.push_back(Sample { at, scrape: self.scrapes, bytes });
        self.forget_samples(at);
    }

    /// The numbers of the series, where a page needs them. They are interned: one is known by its address.
    fn numbers(&self, page: &Page) -> HashMap<*const Series, u16> {
        let known =
            (0..).zip(&self.series).filter_map(|(number, entry)| Some((Arc::as_ptr(&entry.as_ref()?.series), number)));
        if page.new.is_empty() { HashMap::new() } else { known.collect() }
    }

    /// The number of a series; `None` if there are too many.
    fn number(&mut self, numbers: &mut HashMap<*const Series, u16>, series: Arc<Series>) -> Option<u16> {
        if let Some(number) = numbers.get(&Arc::as_ptr(&series)) {
            return Some(*number);
        }
        if self.free.is_empty() && self.series.len() >= MOST_SERIES {
            self.forget_series(numbers);
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.series.len() < MOST_SERIES => {
                self.series.push(None);
                u16::try_from(self.series.len() - 1).ok()?
            }
            None => return None,
        };
        numbers.insert(Arc::as_ptr(&series), number);
        self.series[usize::from(number)] = Some(Entry { series, lines: 0, counted: self.scrapes });
        Some(number)
    }

    fn forget_samples(&mut self, now: Instant) {
        // One more than the window, to begin at.
        while self.samples.len() > MOST_SAMPLES
            || self.samples.get(1).is_some_and(|second| now.saturating_duration_since(second.at) >= WINDOW)
        {
            self.samples.pop_front();
        }
    }

    /// Frees the numbers of series without lines that no sample names.
    fn forget_series(&mut self, numbers: &mut HashMap<*const Series, u16>) {
        let oldest = self.samples.front().map_or(self.scrapes, |sample| sample.scrape);
        for (number, slot) in (0..).zip(&mut self.series) {
            if let Some(entry) = slot.take_if(|entry| entry.lines == 0 && entry.counted < oldest) {
                numbers.remove(&Arc::as_ptr(&entry.series));
                self.free.push(number);
            }
        }
    }

    /// The differences by series: number, then a count, or the number of buckets and (bound, observations) for each.
    fn encode(&mut self, differences: &mut [(u16, u8, f64)], bounds: &[f64]) -> Box<[u8]> {
        let bound = |number: u8| bounds.get(usize::from(number)).copied().unwrap_or_default();
        differences
            .sort_by(|a, b| (a.0, bound(a.1)).partial_cmp(&(b.0, bound(b.1))).unwrap_or(std::cmp::Ordering::Equal));
        let mut bytes = Vec::new();
        let mut last = 0;
        for of_series in differences.chunk_by(|a, b| a.0 == b.0) {
            let number = of_series[0].0;
            put(&mut bytes, u64::from(number - last));
            last = number;
            if let Some(entry) = self.series[usize::from(number)].as_mut() {
                entry.counted = self.scrapes;
            }
            if of_series[0].1 == u8::MAX {
                put(&mut bytes, of_series.iter().map(|(.., difference)| difference).sum::<f64>() as u64);
                continue;
            }
            let mut buckets = Vec::new();
            let mut below = 0.0;
            for of_bound in of_series.chunk_by(|a, b| a.1 == b.1) {
                let cumulative: f64 = of_bound.iter().map(|(.., difference)| difference).sum();
                // Buckets are read one after the other while requests go on: one may be behind.
                if cumulative > below {
                    buckets.push((of_bound[0].1, (cumulative - below) as u64));
                    below = cumulative;
                }
            }
            put(&mut bytes, buckets.len() as u64);
            for (bound, count) in buckets {
                bytes.push(bound);
                put(&mut bytes, count);
            }
        }
        bytes.into_boxed_slice()
    }

    /// Lines of the last scrape that were not counted.
    pub(crate) fn excess(&self) -> u32 {
        self.excess
    }

    /// When the proxy last answered.
    pub(crate) fn last(&self) -> Option<Instant> {
        self.samples.back().map(|sample| sample.at)
    }

    /// How many scrapes are kept.
    pub(crate) fn len(&self) -> usize {
        self.samples.len()
    }

    /// The scrapes whose distance is nearest to `window`, back from the newest that is not after `end`; `None` if there
    /// are not two in the window.
    pub(crate) fn span(&self, end: Instant, window: Duration) -> Option<Span> {
        let to = self.samples.iter().rposition(|sample| sample.at <= end)?;
        let newest = self.samples[to].at;
        if end.saturating_duration_since(newest) > window.max(LATE) {
            return None;
        }
        let distance = |index: usize| {
            let length = newest.saturating_duration_since(self.samples[index].at);
            length.abs_diff(window)
        };
        let base = (0..to).min_by_key(|index| distance(*index))?;
        let length = newest.saturating_duration_since(self.samples[base].at);
        (!length.is_zero()).then_some(Span { from: base + 1, to: to + 1, length })
    }

    /// The scrapes of one point of a plot: those after `end` minus `step`, up to `end`.
    pub(crate) fn interval(&self, end: Instant, step: Duration) -> Option<Span> {
        let to = self.samples.iter().rposition(|sample| sample.at <= end)? + 1;
        let begin = end.checked_sub(step)?;
        let from = self.samples.iter().rposition(|sample| sample.at <= begin).map_or(1, |base| base + 1);
        let length = self.samples.get(to - 1)?.at.saturating_duration_since(self.samples.get(from - 1)?.at);
        (!length.is_zero()).then_some(Span { from, to, length })
    }

    /// What was counted in a span, by series. Gauges have the value of the newest scrape.
    pub(crate) fn counted(&self, span: Span, mut each: impl FnMut(&Arc<Series>, Counted)) {
        let mut all: Vec<Option<Counted>> = Vec::new();
        all.resize(self.series.len(), None);
        for (index, sample) in self.samples.range(span.from..span.to).enumerate() {
            let is_newest = span.from + index + 1 == span.to;
            self.decode(sample, |number, counted| {
                let Some(entry) = self.series.get(number).and_then(Option::as_ref) else { return };
                let is_gauge = entry.series.family == Family::Open;
                if is_gauge && !is_newest {
                    return;
                }
                let Some(slot) = all.get_mut(number) else { return };
                let sum = slot.get_or_insert_default();
                sum.total += counted.total;
                for (bound, count) in counted.buckets {
                    match sum.buckets.iter_mut().find(|(known, _)| *known == bound) {
                        Some((_, sum)) => *sum += count,
                        None => sum.buckets.push((bound, count)),
                    }
                }
            });
        }
        for (entry, counted) in self.series.iter().zip(all) {
            if let (Some(entry), Some(counted)) = (entry, counted) {
                each(&entry.series, counted);
            }
        }
    }

    /// Reads a sample. What [`Self::encode`] wrote is whole.
    fn decode(&self, sample: &Sample, mut each: impl FnMut(usize, Counted)) {
        let mut rest = &*sample.bytes;
        let mut number = 0;
        while let Some(step) = take(&mut rest) {
            number += step as usize;
            let is_histogram = self
                .series
                .get(number)
                .and_then(Option::as_ref)
                .is_some_and(|entry| entry.series.family.is_histogram());
            let Some(value) = take(&mut rest) else { return };
            if !is_histogram {
                each(number, Counted { total: value, buckets: Vec::new() });
                continue;
            }
            let mut buckets = Vec::with_capacity(value as usize);
            for _ in 0..value {
                let Some((bound, after)) = rest.split_first() else { return };
                rest = after;
                let Some(count) = take(&mut rest) else { return };
                buckets.push((*bound, count));
            }
            each(number, Counted { total: 0, buckets });
        }
    }

    /// An estimate of the memory that it holds, in bytes, without what proxies share.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.lines.bytes()
            + self.series.capacity() * size_of::<Option<Entry>>()
            + self.free.capacity() * size_of::<u16>()
            + self.samples.capacity() * size_of::<Sample>()
            // The allocator's own for each.
            + self.samples.iter().map(|sample| sample.bytes.len() + 16).sum::<usize>()
    }
}

/// Writes a number, seven bits a byte.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests;
