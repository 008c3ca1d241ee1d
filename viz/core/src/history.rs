//! What one proxy counted: the differences between its scrapes, over the window.
//!
//! ```text
//! scrape ─> each line: known by its hash? ─ yes ─> difference to the last value ─┐
//!                             └─ no ─> labels ─> series (interned) ──────────────┴─> sum by series ─> Sample, in varints
//! ```
//!
//! Differences are taken line by line, before lines become one series: a line that the proxy evicts, because nothing used it for ten
//! minutes, must not look like a counter that fell. Times are the collector's; the proxy's clock is only compared with itself.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    family::{Reader, Series, Sort, known},
    intern::Interner,
    scrape::samples,
};

/// How far back answers look.
pub(crate) const WINDOW: Duration = Duration::from_secs(15 * 60);
/// The most lines of a proxy that are kept apart. A proxy with 100 destinations has 6,000.
const MOST_LINES: usize = 16 * 1024;
/// The most series of a proxy.
const MOST_SERIES: usize = 4 * 1024;
/// How old the newest scrape of a shorter window may be: two intervals and a deadline.
const LATE: Duration = Duration::from_secs(30);
/// The most samples: one a second.
const MOST_SAMPLES: usize = 900;

/// A proxy's window.
#[derive(Debug)]
pub(crate) struct History {
    hasher: RandomState,
    lines: HashMap<u64, Line, Identity>,
    series: Vec<Option<Entry>>,
    numbers: HashMap<Arc<Series>, u32>,
    free: Vec<u32>,
    samples: VecDeque<Sample>,
    /// The bits of `process_start_time_seconds`.
    started: Option<u64>,
    scrapes: u32,
    /// Lines of the last scrape that were one too many.
    excess: u32,
    differences: Vec<(u32, u8, f64)>,
}

/// A line of the exposition, by the hash of its name and labels.
#[derive(Debug)]
struct Line {
    last: f64,
    series: u32,
    bound: u8,
    /// The low bits of the last scrape that had it.
    seen: u16,
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

impl Default for History {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            lines: HashMap::default(),
            series: Vec::new(),
            numbers: HashMap::new(),
            free: Vec::new(),
            samples: VecDeque::new(),
            started: None,
            scrapes: 0,
            excess: 0,
            differences: Vec::new(),
        }
    }
}

impl History {
    /// Adds a scrape. Scrapes come in the order of their times.
    pub(crate) fn add(&mut self, text: &[u8], at: Instant, interner: &mut Interner) {
        let is_first = self.scrapes == 0;
        self.scrapes = self.scrapes.wrapping_add(1).max(1);
        let seen = self.scrapes as u16;
        let mut start = None;
        samples(text, known, |(_, sort), line| {
            if sort == Sort::Start {
                start = Some(line.value.to_bits());
            }
        });
        // Its counters begin at zero. Where the process does not say when it started, falling counters alone tell.
        let restarted = start.is_some() && self.started.is_some() && start != self.started;
        self.started = start.or(self.started);
        // A line that was not there before began at zero, unless the last scrape had no room for it.
        let new_lines_count = !is_first && (self.excess == 0 || restarted);
        self.excess = 0;
        let mut differences = std::mem::take(&mut self.differences);
        let mut reader = Reader::default();
        let mut found = 0;
        samples(text, known, |(family, sort), line| {
            let Some(family) = family else { return };
            let value = line.value.max(0.0);
            let hash = self.hasher.hash_one(line.series);
            if let Some(known) = self.lines.get_mut(&hash) {
                found += usize::from(known.seen != seen);
                known.seen = seen;
                let is_reset = restarted || value < known.last;
                let difference = match sort {
                    Sort::Gauge => value,
                    _ if is_reset => value,
                    _ => value - known.last,
                };
                known.last = value;
                if difference > 0.0 {
                    differences.push((known.series, known.bound, difference));
                }
                return;
            }
            let has_room = self.lines.len() < MOST_LINES;
            let read = has_room.then(|| reader.read((family, sort), &line)).flatten();
            let Some((read, bound)) = read else {
                self.excess += u32::from(!has_room);
                return;
            };
            let number = match sort {
                Sort::Bucket => interner.bound(family, bound),
                _ => Some(u8::MAX),
            };
            let number = number.and_then(|bound| Some((bound, self.number(interner.series(read))?)));
            let Some((bound, series)) = number else {
                self.excess += 1;
                return;
            };
            found += 1;
            self.lines.insert(hash, Line { last: value, series, bound, seen });
            if let Some(entry) = self.series[series as usize].as_mut() {
                entry.lines += 1;
            }
            if value > 0.0 && (new_lines_count || sort == Sort::Gauge) {
                differences.push((series, bound, value));
            }
        });
        if found < self.lines.len() {
            self.forget_lines(seen);
        }
        let bytes = self.encode(&mut differences, interner.bounds());
        differences.clear();
        differences.shrink_to(256);
        self.differences = differences;
        self.samples.push_back(Sample { at, scrape: self.scrapes, bytes });
        self.forget_samples(at);
    }

    /// The number of a series; `None` if there are too many.
    fn number(&mut self, series: Arc<Series>) -> Option<u32> {
        if let Some(number) = self.numbers.get(&series) {
            return Some(*number);
        }
        if self.free.is_empty() && self.series.len() >= MOST_SERIES {
            self.forget_series();
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.series.len() < MOST_SERIES => {
                self.series.push(None);
                u32::try_from(self.series.len() - 1).ok()?
            }
            None => return None,
        };
        self.series[number as usize] = Some(Entry { series: Arc::clone(&series), lines: 0, counted: self.scrapes });
        self.numbers.insert(series, number);
        Some(number)
    }

    /// Drops the lines that the last scrape did not have.
    fn forget_lines(&mut self, seen: u16) {
        let series = &mut self.series;
        self.lines.retain(|_, line| {
            let is_kept = line.seen == seen;
            if !is_kept && let Some(entry) = series[line.series as usize].as_mut() {
                entry.lines -= 1;
            }
            is_kept
        });
        if self.lines.capacity() > 4 * self.lines.len().max(64) {
            self.lines.shrink_to_fit();
        }
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
    fn forget_series(&mut self) {
        let oldest = self.samples.front().map_or(self.scrapes, |sample| sample.scrape);
        for (number, slot) in self.series.iter_mut().enumerate() {
            if let Some(entry) = slot.take_if(|entry| entry.lines == 0 && entry.counted < oldest) {
                self.numbers.remove(&entry.series);
                self.free.extend(u32::try_from(number));
            }
        }
    }

    /// The differences by series: number, then a count, or the number of buckets and (bound, observations) for each.
    fn encode(&mut self, differences: &mut [(u32, u8, f64)], bounds: &[f64]) -> Box<[u8]> {
        let bound = |number: u8| bounds.get(usize::from(number)).copied().unwrap_or_default();
        differences
            .sort_by(|a, b| (a.0, bound(a.1)).partial_cmp(&(b.0, bound(b.1))).unwrap_or(std::cmp::Ordering::Equal));
        let mut bytes = Vec::new();
        let mut last = 0;
        for of_series in differences.chunk_by(|a, b| a.0 == b.0) {
            let number = of_series[0].0;
            put(&mut bytes, u64::from(number - last));
            last = number;
            if let Some(entry) = self.series[number as usize].as_mut() {
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

    /// The scrapes whose distance is nearest to `window`, back from the newest that is not after `end`; `None` if there are not two
    /// in the window.
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
                let is_gauge = entry.series.family == crate::family::Family::Open;
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
        let table = |capacity: usize, entry: usize| capacity * 8 / 7 * (entry + 1);
        size_of::<Self>()
            + table(self.lines.capacity(), size_of::<(u64, Line)>())
            + self.series.capacity() * size_of::<Option<Entry>>()
            + table(self.numbers.capacity(), size_of::<(Arc<Series>, u32)>())
            + self.free.capacity() * 4
            + self.samples.capacity() * size_of::<Sample>()
            // The allocator's own for each.
            + self.samples.iter().map(|sample| sample.bytes.len() + 16).sum::<usize>()
            + self.differences.capacity() * size_of::<(u32, u8, f64)>()
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

/// Keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct Identity;

#[derive(Debug)]
struct Is(u64);

impl BuildHasher for Identity {
    type Hasher = Is;

    fn build_hasher(&self) -> Is {
        Is(0)
    }
}

impl std::hash::Hasher for Is {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |all, byte| all << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

#[cfg(test)]
mod tests;
