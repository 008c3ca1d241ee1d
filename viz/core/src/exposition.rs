//! A proxy's metrics, read in the pieces that arrive: a page has a megabyte and more, and a mesh has 1,000 of them
//! every ten seconds.
//!
//! Owns which lines a proxy has, and how one is known again: by the hash of its name and labels, at the place where the
//! page before had it.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use parking_lot::Mutex;

use crate::{
    family::{Known, Reader, Series, Sort, known},
    intern::Interner,
    scrape::{Line, samples},
};

/// The most text of one scrape, in bytes: some 35,000 lines.
const MOST_TEXT: usize = 16 << 20;
/// The longest line, in bytes. Labels of Linkerd's longest lines have 1 KiB together.
const LONGEST_LINE: usize = 64 << 10;
/// The most lines of a proxy that are kept apart. A proxy with 100 destinations has 6,000.
pub(crate) const MOST_LINES: usize = 16 * 1024;

/// The lines of a page that are kept, in its order. Columns, because a row would be padded by a third.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    hasher: RandomState,
    hashes: Vec<u64>,
    values: Vec<f64>,
    series: Vec<u16>,
    bounds: Vec<u8>,
}

/// A proxy's metrics while they are read.
#[derive(Debug)]
pub struct Exposition<'a> {
    interner: &'a Mutex<Interner>,
    page: Page,
    /// Where the page before has the line that comes next, if nothing came or went.
    next: usize,
    /// The places of the page before by hash, once something did.
    places: Option<HashMap<u64, usize>>,
    reader: Reader,
    /// The beginning of a line whose end has not arrived.
    cut: Vec<u8>,
    size: usize,
}

/// A line of the page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) hash: u64,
    pub(crate) value: f64,
    /// Its place in the page before; `None` for the next of the new ones.
    pub(crate) before: Option<u32>,
}

/// What a line counts that the page before did not have.
#[derive(Debug)]
pub(crate) struct New {
    pub(crate) series: Arc<Series>,
    pub(crate) bound: u8,
}

/// What was read of a page.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) before: Arc<Lines>,
    pub(crate) lines: Vec<Found>,
    pub(crate) new: Vec<New>,
    /// The bits of `process_start_time_seconds`.
    pub(crate) started: Option<u64>,
    /// Lines beyond the limit.
    pub(crate) excess: u32,
}

impl<'a> Exposition<'a> {
    pub(crate) fn new(before: Arc<Lines>, interner: &'a Mutex<Interner>) -> Self {
        let lines = Vec::with_capacity(before.len());
        let page = Page { before, lines, new: Vec::new(), started: None, excess: 0 };
        Self { interner, page, next: 0, places: None, reader: Reader::default(), cut: Vec::new(), size: 0 }
    }

    /// Reads the next piece, of any length.
    ///
    /// # Errors
    /// The page has more than 16 MiB, or a line more than 64 KiB. The scrape has failed then.
    pub fn read(&mut self, mut piece: &[u8]) -> Result<(), String> {
        self.size += piece.len();
        if self.size > MOST_TEXT {
            return Err(format!("its metrics are larger than {} MiB", MOST_TEXT >> 20));
        }
        if !self.cut.is_empty()
            && let Some(end) = memchr::memchr(b'\n', piece)
        {
            self.cut.extend_from_slice(&piece[..end]);
            piece = &piece[end + 1..];
            self.end_cut();
        }
        let (whole, cut) = piece.split_at(memchr::memrchr(b'\n', piece).map_or(0, |end| end + 1));
        self.whole_lines(whole);
        self.cut.extend_from_slice(cut);
        if self.cut.len() > LONGEST_LINE {
            return Err(format!("its metrics have a line of more than {} KiB", LONGEST_LINE >> 10));
        }
        Ok(())
    }

    /// How many bytes were read.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The page, after its last piece.
    pub(crate) fn end(mut self) -> Page {
        self.end_cut();
        self.page
    }

    fn end_cut(&mut self) {
        let mut line = std::mem::take(&mut self.cut);
        self.whole_lines(&line);
        line.clear();
        self.cut = line;
    }

    fn whole_lines(&mut self, text: &[u8]) {
        samples(text, known, |known, line| self.line(known, &line));
    }

    fn line(&mut self, (family, sort): Known, line: &Line<'_>) {
        let Some(family) = family else {
            if sort == Sort::Start {
                self.page.started = Some(line.value.to_bits());
            }
            return;
        };
        if self.page.lines.len() == MOST_LINES {
            self.page.excess += 1;
            return;
        }
        let hash = self.page.before.hasher.hash_one(line.series);
        let before = self.place(hash);
        if before.is_none() {
            let Some((read, bound)) = self.reader.read((family, sort), line) else { return };
            let mut interner = self.interner.lock();
            let bound = match sort {
                Sort::Bucket => interner.bound(family, bound),
                _ => Some(u8::MAX),
            };
            let Some(bound) = bound else {
                self.page.excess += 1;
                return;
            };
            self.page.new.push(New { series: interner.series(read), bound });
        }
        self.page.lines.push(Found { hash, value: line.value.max(0.0), before });
    }

    /// Where the page before has a line.
    fn place(&mut self, hash: u64) -> Option<u32> {
        let hashes = &self.page.before.hashes;
        let place = if hashes.get(self.next) == Some(&hash) {
            self.next
        } else {
            let places = self.places.get_or_insert_with(|| (0..).zip(hashes).map(|(at, hash)| (*hash, at)).collect());
            *places.get(&hash)?
        };
        self.next = place + 1;
        u32::try_from(place).ok()
    }
}

impl Lines {
    pub(crate) fn len(&self) -> usize {
        self.hashes.len()
    }

    /// The value, the series and the bound of the line at a place.
    pub(crate) fn at(&self, place: u32) -> (f64, u16, u8) {
        let place = place as usize;
        (self.values[place], self.series[place], self.bounds[place])
    }

    /// The series of the lines, as often as they have lines.
    pub(crate) fn series(&self) -> &[u16] {
        &self.series
    }

    /// Those of the page after this one: none yet, with room for `lines`.
    pub(crate) fn followed_by(&self, lines: usize) -> Self {
        Self {
            hasher: self.hasher.clone(),
            hashes: Vec::with_capacity(lines),
            values: Vec::with_capacity(lines),
            series: Vec::with_capacity(lines),
            bounds: Vec::with_capacity(lines),
        }
    }

    /// Adds a line.
    pub(crate) fn push(&mut self, line: Found, series: u16, bound: u8) {
        self.hashes.push(line.hash);
        self.values.push(line.value);
        self.series.push(series);
        self.bounds.push(bound);
    }

    /// The memory that it holds, in bytes.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.hashes.capacity() * (8 + 8 + 2 + 1) + 4 * 16
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(before: Lines, pieces: &[&[u8]]) -> Result<Page, String> {
        let interner = Mutex::default();
        let mut exposition = Exposition::new(Arc::new(before), &interner);
        pieces.iter().try_for_each(|piece| exposition.read(piece))?;
        Ok(exposition.end())
    }

    /// The lines of a page as those before another.
    fn lines(page: &Page, hasher: RandomState) -> Lines {
        let mut lines = Lines { hasher, ..Lines::default() };
        page.lines.iter().for_each(|line| lines.push(*line, 0, 0));
        lines
    }

    fn page(ports: &[u16]) -> String {
        ports.iter().map(|port| format!("response_total{{target_port=\"{port}\"}} {port}\n")).collect()
    }

    #[test]
    fn a_line_is_found_wherever_the_page_before_had_it() {
        let first = read(Lines::default(), &[page(&[1, 2, 3, 4]).as_bytes()]).unwrap();
        assert!(first.lines.iter().all(|line| line.before.is_none()));
        let hasher = first.before.hasher.clone();
        let places = |ports: &[u16]| {
            let second = read(lines(&first, hasher.clone()), &[page(ports).as_bytes()]).unwrap();
            second.lines.iter().map(|line| line.before).collect::<Vec<_>>()
        };
        assert_eq!(places(&[1, 2, 3, 4]), [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(places(&[4, 2, 5, 3, 1]), [Some(3), Some(1), None, Some(2), Some(0)]);
        assert_eq!(places(&[3, 4]), [Some(2), Some(3)]);
    }

    #[test]
    fn what_is_too_large_fails() {
        let long = format!("response_total{{a=\"{}\"}} 1\n", "a".repeat(LONGEST_LINE));
        let (beginning, rest) = long.as_bytes().split_at(40_000);
        let error = read(Lines::default(), &[beginning, &rest[..25_550]]).unwrap_err();
        assert_eq!(error, "its metrics have a line of more than 64 KiB");
        let comment = vec![b'\n'; MOST_TEXT];
        assert_eq!(read(Lines::default(), &[&comment]).unwrap().lines.len(), 0);
        let error = read(Lines::default(), &[&comment, b"\n"]).unwrap_err();
        assert_eq!(error, "its metrics are larger than 16 MiB");
    }

    proptest! {
        #[test]
        fn pieces_say_what_the_whole_says(
            text in "(response_total\\{a=\"[a\n}]{0,3}\"\\} [0-9]\n?|process_start_time_seconds 7\n|#\n|\n){0,12}",
            cuts in prop::collection::vec(0..200_usize, 0..8),
        ) {
            let whole = read(Lines::default(), &[text.as_bytes()]).unwrap();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]).collect();
            let cut = read(Lines::default(), &pieces).unwrap();
            let values = |page: &Page| page.lines.iter().map(|line| line.value).collect::<Vec<_>>();
            prop_assert_eq!(values(&cut), values(&whole));
            prop_assert_eq!((cut.started, cut.excess, cut.new.len()), (whole.started, whole.excess, whole.new.len()));
        }
    }
}
