//! Events on standard output, notes beside it.

use std::num::NonZeroU64;

use anyhow::Result;
use weft_proto::agent::Event;

use super::{format, names::Names};
use crate::output::{self, WideFormat, colour, note};

/// Prints events until there are enough.
pub(super) struct Printer {
    format: WideFormat,
    /// Events to print; `None` means without end.
    count: Option<NonZeroU64>,
    shown: u64,
    /// Whether the header is printed.
    introduced: bool,
    /// Number of lost events in total.
    lost: u64,
    /// Width of the longest name so far.
    pod_width: usize,
    /// Names of addresses, shown if there is room for them.
    names: Names,
}

/// Whether more events are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    More,
    Enough,
}

impl Printer {
    pub(super) fn new(format: WideFormat, count: Option<NonZeroU64>) -> Self {
        Self {
            format,
            count,
            shown: 0,
            introduced: false,
            lost: 0,
            pod_width: format::POD_WIDTH,
            names: Names::default(),
        }
    }

    /// Whether names of addresses are shown: not in the narrow table.
    pub(super) fn shows_names(&self) -> bool {
        self.format != WideFormat::Table
    }

    pub(super) fn names(&mut self) -> &mut Names {
        &mut self.names
    }

    /// Number of printed events.
    pub(super) fn shown(&self) -> u64 {
        self.shown
    }

    /// Prints the header, once an agent answers.
    pub(super) fn header(&mut self) -> Result<()> {
        if self.format.data().is_none() && !self.introduced {
            self.introduced = true;
            output::line(&format::header(self.format == WideFormat::Wide))?;
        }
        Ok(())
    }

    /// `node`: the event's node; empty if there is only one.
    pub(super) fn event(&mut self, node: &str, event: &Event) -> Result<Next> {
        self.loss(node, event.dropped_before);
        self.pod_width = self.pod_width.max(format::pod(event).len());
        let line = format::Line { pod_width: self.pod_width, colours: colour::on_stdout() };
        match (self.format.data(), self.format) {
            (Some(data), _) => data.print_next(&format::json(node, &self.names, event))?,
            (None, WideFormat::Wide) => output::styled(&line.wide(node, &self.names, event))?,
            (None, _) => output::styled(&line.narrow(event))?,
        }
        self.shown += 1;
        Ok(if self.count.is_some_and(|count| self.shown >= count.get()) { Next::Enough } else { Next::More })
    }

    /// Reports that events were lost, even if the events around them are not shown.
    pub(super) fn loss(&mut self, node: &str, dropped: u64) {
        if dropped > 0 {
            self.lost += dropped;
            let place = if node.is_empty() { String::new() } else { format!(" on {node}") };
            note(&format!("{dropped} events were dropped here{place}, {} in all: filter more", self.lost));
        }
    }
}
