//! Exemplars: beside a histogram's bucket, a request that is in it, by its trace ([OpenMetrics 1.0][spec]).
//!
//! prometheus-client's `Exemplar` has no public constructor: only its own histogram can have exemplars, and that one
//! takes a lock for every observation. So our histogram announces, before it is encoded, which of its lines have an
//! exemplar, and [`Writer`] appends them.
//!
//! [spec]: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md#exemplars

use std::{
    cell::RefCell,
    collections::VecDeque,
    fmt,
    num::NonZeroU128,
    time::{SystemTime, UNIX_EPOCH},
};

thread_local! {
    /// Of the lines that this thread writes next.
    static NEXT: RefCell<Next> = RefCell::default();
}

#[derive(Default)]
struct Next {
    /// Lines since [`announce`].
    lines: usize,
    exemplars: VecDeque<(usize, Exemplar)>,
}

/// An observation and its trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exemplar {
    /// The trace, as in `traceparent`.
    pub trace_id: NonZeroU128,
    /// What was observed, in the histogram's unit.
    pub value: f64,
    /// When.
    pub at: SystemTime,
}

/// Says which of the lines that this thread encodes next have an exemplar, by their distance from the first, ascending.
pub fn announce(exemplars: impl IntoIterator<Item = (usize, Exemplar)>) {
    NEXT.set(Next { lines: 0, exemplars: exemplars.into_iter().collect() });
}

/// Text of metrics, with the exemplars that were announced or, in a format that has none, without.
pub(super) struct Writer {
    pub(super) text: String,
    has_exemplars: bool,
}

impl Writer {
    pub(super) fn new(has_exemplars: bool) -> Self {
        Self { text: String::new(), has_exemplars }
    }
}

impl fmt::Write for Writer {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        NEXT.with_borrow_mut(|next| {
            if next.exemplars.is_empty() {
                self.text.push_str(part);
                return Ok(());
            }
            for piece in part.split_inclusive('\n') {
                if let Some(end) = piece.strip_suffix('\n') {
                    self.text.push_str(end);
                    if let Some(exemplar) = next.line_ended()
                        && self.has_exemplars
                    {
                        write!(self.text, "{exemplar}")?;
                    }
                    self.text.push('\n');
                } else {
                    self.text.push_str(piece);
                }
            }
            Ok(())
        })
    }
}

impl Next {
    /// The exemplar of the line that ends.
    fn line_ended(&mut self) -> Option<Exemplar> {
        let line = self.lines;
        self.lines += 1;
        self.exemplars.pop_front_if(|(of, _)| *of == line).map(|(_, exemplar)| exemplar)
    }
}

impl fmt::Display for Exemplar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        write!(formatter, " # {{trace_id=\"{:032x}\"}} {} {at:.3}", self.trace_id, self.value)
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, time::Duration};

    use super::*;

    fn exemplar(trace_id: u128) -> Exemplar {
        let at = UNIX_EPOCH + Duration::from_millis(1_700_000_000_250);
        Exemplar { trace_id: NonZeroU128::new(trace_id).unwrap(), value: 2.5, at }
    }

    fn written(has_exemplars: bool) -> String {
        let mut writer = Writer::new(has_exemplars);
        writer.write_str("before\n").unwrap();
        announce([(1, exemplar(0xab)), (2, exemplar(1))]);
        for part in ["sum", " 1", "\n", "bucket 1\nbucket", " 2\n", "after\n"] {
            writer.write_str(part).unwrap();
        }
        writer.text
    }

    #[test]
    fn an_exemplar_ends_its_line_and_no_other() {
        let with = |id: &str| format!(" # {{trace_id=\"{id:0>32}\"}} 2.5 1700000000.250");
        let expected = format!("before\nsum 1\nbucket 1{}\nbucket 2{}\nafter\n", with("ab"), with("1"));
        assert_eq!(written(true), expected);
        assert_eq!(written(false), "before\nsum 1\nbucket 1\nbucket 2\nafter\n");
    }
}
