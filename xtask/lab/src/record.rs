//! `record`: runs a command in a terminal and draws what it shows as a picture (SVG) for the documents.
//!
//! `script` (util-linux) makes the terminal, the crate `vt100` understands what is written to it, so that colours are
//! those that a person sees and what was overwritten is gone. The lines appear one after the other; viewers with
//! reduced motion, and programs that do not animate, get all of them.

use std::{fmt::Write as _, fs, num::NonZeroU16, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};
use weft_xtask::command::step;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask record --output docs/pictures/check.svg -- weft check
  cargo xtask record --output explain.svg -- weft explain deploy/client to web:80 --namespace shop

docs/pictures/README.md has the commands of the pictures that are there.")]
pub(crate) struct Args {
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Width of the terminal
    #[arg(long, default_value = "110")]
    columns: NonZeroU16,
    /// The most lines to show; what is more is left out in the middle
    #[arg(long, default_value_t = 32)]
    lines: usize,
    /// The command
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Height of the terminal: what scrolls out of it is lost.
const ROWS: NonZeroU16 = NonZeroU16::new(1000).expect("not zero");
/// Distance between two lines, size of a character, and space around the text, in the picture's units.
const LINE: usize = 18;
const FONT: usize = 13;
const MARGIN: usize = 16;
/// Width of a character of that size, in hundredths of a unit, in the widest of the fonts.
const CHARACTER: usize = 783;
/// Seconds between two lines.
const PAUSE: f64 = 0.12;

/// A piece of a line in one style.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Span {
    class: &'static str,
    text: String,
}

/// Records the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let line: Vec<_> = args.command.iter().map(|word| quoted(word)).collect();
    let line = line.join(" ");
    step(&format!("record {line}"));
    let seen = in_terminal(&line, args.columns)?;
    let lines = cut(lines(&seen, args.columns), args.lines);
    fs::write(&args.output, picture(&line, &lines)).with_context(|| format!("write {}", args.output.display()))?;
    println!("{}", args.output.display());
    Ok(())
}

/// For a shell, and to read.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// What a command writes to a terminal. Its exit code does not matter: a failed check is worth a picture, too.
fn in_terminal(line: &str, columns: NonZeroU16) -> Result<Vec<u8>> {
    let mut script = Command::new("script");
    script.args(["--quiet", "--command", &format!("stty cols {columns} rows {ROWS}; {line}"), "/dev/null"]);
    script.env("TERM", "xterm-256color").env_remove("NO_COLOR").stdin(std::process::Stdio::null());
    let output = script.output().context("start script, of util-linux (Debian: bsdutils)")?;
    if output.stdout.is_empty() {
        bail!("`{line}` wrote nothing: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// The lines of the terminal, without empty ones at the end.
fn lines(seen: &[u8], columns: NonZeroU16) -> Vec<Vec<Span>> {
    let mut terminal = vt100::Parser::new(ROWS, columns, 0);
    terminal.process(seen);
    let mut lines = Vec::new();
    for row in 0..ROWS.get() {
        let mut spans: Vec<Span> = Vec::new();
        for column in 0..columns.get() {
            let Some(cell) = terminal.screen().cell(row, column) else { continue };
            if cell.is_wide_continuation() {
                continue;
            }
            let text = if cell.has_contents() { cell.contents() } else { " " };
            let class = class(cell);
            match spans.last_mut() {
                Some(last) if last.class == class => last.text += text,
                _ => spans.push(Span { class, text: text.to_owned() }),
            }
        }
        while spans.last().is_some_and(|span| span.text.trim_end().is_empty()) {
            spans.pop();
        }
        if let Some(last) = spans.last_mut() {
            last.text.truncate(last.text.trim_end().len());
        }
        lines.push(spans);
    }
    while lines.last().is_some_and(Vec::is_empty) {
        lines.pop();
    }
    lines
}

fn class(cell: &vt100::Cell) -> &'static str {
    match cell.fgcolor() {
        vt100::Color::Idx(1 | 9) => "red",
        vt100::Color::Idx(2 | 10) => "green",
        vt100::Color::Idx(3 | 11) => "yellow",
        vt100::Color::Idx(4..=6 | 12..=14) => "blue",
        _ if cell.bold() => "bold",
        _ if cell.dim() => "dim",
        _ => "plain",
    }
}

/// At most this number of lines: those in the middle are left out, and counted.
fn cut(mut lines: Vec<Vec<Span>>, most: usize) -> Vec<Vec<Span>> {
    if lines.len() > most {
        let (head, left_out) = (most / 2, lines.len() - most + 1);
        let note = Span { class: "dim", text: format!("… {left_out} lines …") };
        lines.splice(head..head + left_out, [vec![note]]);
    }
    lines
}

fn picture(command: &str, lines: &[Vec<Span>]) -> String {
    let length = |spans: &Vec<Span>| spans.iter().map(|span| span.text.chars().count()).sum::<usize>();
    let columns = lines.iter().map(length).max().unwrap_or_default().max(command.chars().count() + 2);
    let width = columns * CHARACTER / 100 + 2 * MARGIN;
    let height = (lines.len() + 1) * LINE + 2 * MARGIN;
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{label}">
  <style>
    rect {{ fill: #161b22; stroke: #656c76; }}
    text {{ font: {FONT}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d1d7e0; white-space: pre; }}
    .red {{ fill: #ff7b72; }}
    .green {{ fill: #56d364; }}
    .yellow {{ fill: #e3b341; }}
    .blue {{ fill: #79c0ff; }}
    .dim {{ fill: #9198a1; }}
    .bold {{ font-weight: 700; }}
    @keyframes appear {{ from {{ visibility: hidden; }} to {{ visibility: visible; }} }}
    @media (prefers-reduced-motion: no-preference) {{ text {{ animation: appear 0s backwards; }} }}
  </style>
  <rect x="0.5" y="0.5" width="{inner}" height="{below}" rx="8"/>
"#,
        label = escaped(&format!("terminal: {command}")),
        inner = width - 1,
        below = height - 1,
    );
    let prompt = [Span { class: "dim", text: "$ ".to_owned() }, Span { class: "bold", text: command.to_owned() }];
    for (index, spans) in std::iter::once(&prompt[..]).chain(lines.iter().map(Vec::as_slice)).enumerate() {
        if spans.is_empty() {
            continue;
        }
        #[expect(clippy::cast_precision_loss, reason = "some hundred lines")]
        let delay = if index == 0 { 0.0 } else { 0.8 + PAUSE * index as f64 };
        let y = MARGIN + (index + 1) * LINE - 4;
        // Writing to a string does not fail.
        let _ =
            write!(svg, r#"  <text x="{MARGIN}" y="{y}" xml:space="preserve" style="animation-delay:{delay:.2}s">"#);
        for span in spans {
            let _ = write!(svg, r#"<tspan class="{}">{}</tspan>"#, span.class, escaped(&span.text));
        }
        svg.push_str("</text>\n");
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn width(columns: u16) -> NonZeroU16 {
        NonZeroU16::new(columns).expect("not zero")
    }

    fn text(lines: &[Vec<Span>]) -> Vec<String> {
        lines.iter().map(|spans| spans.iter().map(|span| span.text.as_str()).collect()).collect()
    }

    #[test]
    fn what_was_overwritten_is_gone_and_colours_stay() {
        let seen = lines(b"waiting\r\x1b[2K\x1b[32m\xe2\x88\x9a\x1b[0m fine\r\n\r\n  next  \r\n", width(20));
        assert_eq!(text(&seen), ["√ fine", "", "  next"]);
        assert_eq!(seen[0][0], Span { class: "green", text: "√".to_owned() });
    }

    #[test]
    fn lines_in_the_middle_are_left_out_and_counted() {
        let long = (0..10).map(|n| vec![Span { class: "plain", text: n.to_string() }]).collect();
        assert_eq!(text(&cut(long, 5)), ["0", "1", "… 6 lines …", "8", "9"]);
    }

    #[test]
    fn the_picture_shows_markup_as_text() {
        let line = vec![Span { class: "plain", text: "<a> & \"b\"".to_owned() }];
        let svg = picture("weft 'x y'", &[line]);
        assert!(svg.contains("&lt;a&gt; &amp; &quot;b&quot;"), "{svg}");
    }

    #[test]
    fn words_with_blanks_are_quoted_for_the_shell() {
        assert_eq!(quoted("po/web"), "po/web");
        assert_eq!(quoted("it's a"), r"'it'\''s a'");
    }

    #[test]
    fn a_command_is_seen_as_in_a_terminal() -> Result<()> {
        let seen = in_terminal("test -t 1 && echo terminal", width(40))?;
        assert_eq!(text(&lines(&seen, width(40))), ["terminal"]);
        Ok(())
    }
}
