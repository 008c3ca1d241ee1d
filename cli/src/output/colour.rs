//! Colours: the one place that decides whether output has them, and which words of tables do.
//!
//! Red is what is refused, denied, missing or down; yellow is what may become so; green is rare. Programs read no
//! colours: JSON and YAML do not pass here.

use std::{
    borrow::Cow,
    ffi::OsStr,
    io::{self, IsTerminal as _},
    sync::OnceLock,
};

use clap::{
    ValueEnum,
    builder::styling::{AnsiColor, Style},
};
use comfy_table::{Cell, Row, Table};
use weft_k8s_api::printable;

/// Blanks between columns, after the longest cell.
pub(super) const GAP: u16 = 2;
/// Shares of successful requests below which Linkerd's dashboard shows a resource as poor, and as one to look at.
const POOR: f64 = 90.0;
const DOUBTFUL: f64 = 95.0;

/// When output has colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Colour {
    /// On a terminal, unless NO_COLOR is set or TERM is dumb
    #[default]
    Auto,
    /// Also in files and pipes
    Always,
    /// Nowhere
    Never,
}

/// What a text is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Refused, denied, missing or down.
    Bad,
    Warning,
    Good,
}

/// Whether standard output and standard error have colours. Neither has before [`Colour::choose`].
static CHOSEN: OnceLock<(bool, bool)> = OnceLock::new();

impl Colour {
    /// Decides for this process, once.
    pub(crate) fn choose(self) {
        let (no_color, term) = (std::env::var_os("NO_COLOR"), std::env::var_os("TERM"));
        let decide = |terminal| self.decide(terminal, no_color.as_deref(), term.as_deref());
        CHOSEN.get_or_init(|| (decide(io::stdout().is_terminal()), decide(io::stderr().is_terminal())));
    }

    /// `no_color`: see <https://no-color.org>.
    fn decide(self, terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => terminal && no_color.is_none_or(OsStr::is_empty) && !is_dumb(term),
        }
    }
}

/// Whether a terminal of this name shows escape codes instead of obeying them.
pub(super) fn is_dumb(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| term == "dumb")
}

/// Whether standard output has colours.
pub(crate) fn on_stdout() -> bool {
    CHOSEN.get().is_some_and(|(stdout, _)| *stdout)
}

/// Whether standard error has colours, for the sandbox's log.
#[cfg(target_os = "linux")]
pub(crate) fn on_stderr() -> bool {
    CHOSEN.get().is_some_and(|(_, stderr)| *stderr)
}

impl Tone {
    fn style(self) -> Style {
        match self {
            Self::Bad => AnsiColor::Red,
            Self::Warning => AnsiColor::Yellow,
            Self::Good => AnsiColor::Green,
        }
        .on_default()
    }
}

/// One line of text for standard output, escaped, in colour if there is a tone and standard output has colours.
pub(crate) fn paint(tone: impl Into<Option<Tone>>, text: &str) -> String {
    paint_if(on_stdout(), tone, text)
}

/// As [`paint`], whatever standard output has.
pub(crate) fn paint_if(colours: bool, tone: impl Into<Option<Tone>>, text: &str) -> String {
    let text = printable::line(text);
    match tone.into() {
        Some(tone) if colours => {
            let style = tone.style();
            format!("{style}{text}{style:#}")
        }
        _ => text.into_owned(),
    }
}

/// A kernel's verdict: a refusal, a meshed pod's connection that bypasses its proxy, or a redirect.
pub(crate) fn verdict(verdict: &str) -> Option<Tone> {
    match verdict {
        "redirect" => Some(Tone::Good),
        "pass_pod_bypassed" | "pass_node_bypassed" => Some(Tone::Warning),
        _ => verdict.starts_with("deny_").then_some(Tone::Bad),
    }
}

/// A table as text, control characters escaped, with colours in the cells that say that something is wrong.
pub(super) fn table(table: &Table, colours: bool) -> String {
    let text = table.trim_fmt();
    if !colours {
        return printable::lines(&text).into_owned();
    }
    let names = table.header().into_iter().flat_map(Row::cell_iter).map(Cell::content);
    let mut columns = Vec::new();
    let mut start = 0;
    for (name, width) in names.zip(table.column_max_content_widths()) {
        columns.push((name, usize::from(start), usize::from(start + width)));
        start += width + GAP;
    }
    let line = |line| match printable::line(line) {
        Cow::Borrowed(line) => paint_cells(line, &columns),
        // Its columns have moved.
        Cow::Owned(escaped) => escaped,
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// A line of a table. `columns`: names, and the characters between which their cells are.
fn paint_cells(line: &str, columns: &[(String, usize, usize)]) -> String {
    let at = |column| line.char_indices().nth(column).map_or(line.len(), |(index, _)| index);
    let mut painted = String::new();
    let mut done = 0;
    for (name, start, end) in columns {
        let start = at(*start);
        let cell = line[start..at(*end)].trim_end();
        if let Some(tone) = tone(name, cell) {
            painted.push_str(&line[done..start]);
            painted.push_str(&paint_if(true, tone, cell));
            done = start + cell.len();
        }
    }
    painted + &line[done..]
}

/// What a word means in a column of this name, in whichever table.
fn tone(column: &str, cell: &str) -> Option<Tone> {
    let is_counted = || cell.parse::<u64>().is_ok_and(|count| count > 0);
    match (column, cell) {
        ("STATE", "refused" | "missing") | ("AGENT", "no answer") | ("LEVEL", "error") => Some(Tone::Bad),
        ("OUTBOUND" | "INBOUND", "no" | "bypassed") | ("STATUS", "Failed") => Some(Tone::Bad),
        ("STATE", "pending" | "leaving" | "unknown") | ("LEVEL", "warn") => Some(Tone::Warning),
        ("READY", "no") | ("PROXY", "not-ready") | ("STATUS", "Pending" | "Unknown") => Some(Tone::Warning),
        ("REFUSED" | "DENIED", _) => is_counted().then_some(Tone::Bad),
        ("PENDING" | "RATE_LIMITED", _) => is_counted().then_some(Tone::Warning),
        ("SECURED", "√") => Some(Tone::Good),
        // Why a connection is plaintext.
        ("SECURED", reason) => (reason != column).then_some(Tone::Warning),
        ("READY" | "MESHED" | "PODS", _) => part(cell),
        ("SUCCESS" | "EFFECTIVE_SUCCESS" | "ACTUAL_SUCCESS", _) => success(cell),
        ("VERDICT", _) => verdict(cell),
        _ => None,
    }
}

/// `0/n` is an error, fewer than all a warning.
fn part(cell: &str) -> Option<Tone> {
    let (some, all) = cell.split_once('/')?;
    let (some, all) = (some.parse::<u64>().ok()?, all.parse::<u64>().ok()?);
    match some {
        _ if some >= all => None,
        0 => Some(Tone::Bad),
        _ => Some(Tone::Warning),
    }
}

fn success(cell: &str) -> Option<Tone> {
    let percent: f64 = cell.strip_suffix('%')?.parse().ok()?;
    match percent {
        _ if percent < POOR => Some(Tone::Bad),
        _ if percent < DOUBTFUL => Some(Tone::Warning),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        let auto = |terminal, no_color: Option<&str>, term: Option<&str>| {
            Colour::Auto.decide(terminal, no_color.map(OsStr::new), term.map(OsStr::new))
        };
        assert!(auto(true, None, Some("xterm-256color")) && auto(true, Some(""), None));
        assert!(!auto(false, None, Some("xterm-256color")), "a pipe");
        assert!(!auto(true, Some("1"), Some("xterm-256color")));
        assert!(!auto(true, None, Some("dumb")));
        let forced =
            |colour: Colour, terminal| colour.decide(terminal, Some(OsStr::new("1")), Some(OsStr::new("dumb")));
        assert!(forced(Colour::Always, false) && !forced(Colour::Never, true));
        assert!(!Colour::Never.decide(true, None, None));
    }

    fn status() -> Table {
        let mut status = super::super::table(["POD", "STATE", "READY", "NODE"]);
        status.add_row(["web-0", "enrolled", "2/2", "refused"]);
        status.add_row(["web-1", "refused", "0/2", "node-b"]);
        status.add_row(["web-2", "pending", "1/2", "node-c"]);
        status
    }

    #[test]
    fn cells_have_the_colour_of_their_column_and_stay_aligned() {
        let plain = table(&status(), false);
        assert!(!plain.contains('\x1b'));
        let painted = table(&status(), true);
        let lines: Vec<_> = painted.lines().collect();
        assert_eq!(lines[0], "POD    STATE     READY  NODE");
        assert_eq!(lines[1], "web-0  enrolled  2/2    refused");
        assert_eq!(lines[2], "web-1  \x1b[31mrefused\x1b[0m   \x1b[31m0/2\x1b[0m    node-b");
        assert_eq!(lines[3], "web-2  \x1b[33mpending\x1b[0m   \x1b[33m1/2\x1b[0m    node-c");
        let without =
            ["\x1b[31m", "\x1b[33m", "\x1b[0m"].iter().fold(painted.clone(), |text, code| text.replace(code, ""));
        assert_eq!(without, plain);
    }

    /// Cells quote names of processes and messages of pods.
    #[test]
    fn a_cell_cannot_style_itself() {
        let mut quoting = status();
        quoting.add_row(["\x1b[32mweb", "refused", "0/2", "node-d"]);
        let painted = table(&quoting, true);
        let last = painted.lines().last().unwrap();
        assert!(last.starts_with("\\u{1b}[32mweb") && !last.contains('\x1b'), "{last:?}");
        assert_eq!(paint_if(true, Tone::Bad, "a\x1b[0mb"), "\x1b[31ma\\u{1b}[0mb\x1b[0m");
    }

    #[test]
    fn words_mean_what_their_column_says() {
        use Tone::{Bad, Good, Warning};
        for (column, cell, expected) in [
            ("STATE", "missing", Some(Bad)),
            ("NAME", "missing", None),
            ("INBOUND", "bypassed", Some(Bad)),
            ("REFUSED", "0", None),
            ("REFUSED", "2", Some(Bad)),
            ("PENDING", "2", Some(Warning)),
            ("MESHED", "0/0", None),
            ("MESHED", "yes", None),
            ("SUCCESS", "89.99%", Some(Bad)),
            ("SUCCESS", "94.99%", Some(Warning)),
            ("SUCCESS", "100.00%", None),
            ("SUCCESS", "-", None),
            ("SECURED", "√", Some(Good)),
            ("SECURED", "no_identity", Some(Warning)),
            ("SECURED", "SECURED", None),
            ("VERDICT", "redirect", Some(Good)),
            ("VERDICT", "deny_no_listener", Some(Bad)),
            ("VERDICT", "pass_node_bypassed", Some(Warning)),
            ("VERDICT", "pass_proxy", None),
        ] {
            assert_eq!(tone(column, cell), expected, "{column} {cell}");
        }
    }
}
