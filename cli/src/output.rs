//! Standard output: aligned tables for people, JSON and YAML for programs; and notes on standard error.

pub(crate) mod colour;
mod format;
pub(crate) mod progress;

use std::{
    io::{self, Write as _},
    time::Duration,
};

use comfy_table::Table;
use weft_k8s_api::printable;

pub(crate) use colour::{Colour, Tone, paint};
pub(crate) use format::{Data, Format, WideFormat};

/// An empty table with columns of these names, aligned by spaces alone so that `awk` can read it too.
pub(crate) fn table<const N: usize>(names: [&str; N]) -> Table {
    columns(&names)
}

/// As [`table`], for columns that depend on what was asked for.
pub(crate) fn columns(names: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header(names.iter().copied());
    for column in table.column_iter_mut() {
        column.set_padding((0, colour::GAP));
    }
    table
}

/// The text of an empty cell, which `awk` would otherwise not count.
pub(crate) const NOTHING: &str = "-";

pub(crate) fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

pub(crate) fn or_nothing(text: &str) -> String {
    if text.is_empty() { NOTHING } else { text }.to_owned()
}

/// Prints one or several lines of text. Control characters are escaped.
pub(crate) fn line(text: &str) -> io::Result<()> {
    styled(&printable::lines(text))
}

/// Prints one or several lines unchanged. The caller has escaped what it quotes.
pub(crate) fn styled(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

/// Prints manifests, which are for programs: nothing is added or escaped.
pub(crate) fn raw(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Prints a table without trailing blanks in its last column.
pub(crate) fn print(table: &Table) -> io::Result<()> {
    styled(&text(table))
}

/// A table as text for standard output, in its colours. Control characters are escaped.
pub(crate) fn text(table: &Table) -> String {
    colour::table(table, colour::on_stdout())
}

/// A table as text for a screen, without colours. Control characters are escaped.
pub(crate) fn plain(table: &Table) -> String {
    colour::table(table, false)
}

/// One line on standard error, so that standard output is results alone.
pub(crate) fn note(text: &str) {
    progress::make_room();
    // If nobody reads standard error, that is not a failure.
    let _ = writeln!(io::stderr(), "weft: {}", printable::lines(text));
}

/// Parser for clap: a whole number with a unit, or several, such as 90s, 5m or 1h30m.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}: expected a number and a unit, such as 30s or 5m"))
}

/// Whether the reader of standard output has closed the pipe, which is not a failure.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned_by_spaces_alone() {
        let mut rows = table(["NAME", "READY"]);
        rows.add_row(["a-longer-name", "true"]);
        rows.add_row(["b", "false"]);
        let text = rows.trim_fmt();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines, ["NAME           READY", "a-longer-name  true", "b              false"]);
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert!(duration("5").unwrap_err().contains("30s"));
    }

    #[test]
    fn a_reader_that_left_is_distinguished_from_a_full_disk() {
        assert!(is_closed_pipe(&io::Error::from(io::ErrorKind::BrokenPipe).into()));
        assert!(!is_closed_pipe(&io::Error::from(io::ErrorKind::StorageFull).into()));
    }
}
