//! Screens that are drawn again: on a terminal the alternate screen, until q, Esc or Ctrl-C; elsewhere one text after
//! the other.
//!
//! A screen is written in one piece over the last one, line by line, so that nothing flickers.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use anyhow::{Context as _, Result};
use crossterm::{
    cursor,
    event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
    execute, queue,
    style::Print,
    terminal,
};
use futures::StreamExt as _;
use weft_k8s_api::printable;
use weft_proto::viz::Coverage;

use super::{render, scope::EVERY};
use crate::output;

/// What a person wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Draw,
    End,
}

/// A terminal's alternate screen; the former one is back when it is dropped.
pub(super) struct Screen {
    events: EventStream,
    /// The text of the last drawing, for a terminal that changes its size.
    last: String,
}

/// What is said below the text.
#[derive(Debug, Default)]
pub(super) struct Said(Vec<String>);

impl Said {
    /// Proxies that did not answer.
    pub(super) fn problems<'a>(&mut self, coverages: impl Iterator<Item = &'a Coverage>) {
        for problem in coverages.flat_map(|coverage| &coverage.problems) {
            let line = render::problem(&problem.namespace, &problem.pod, &problem.message);
            if !self.0.contains(&line) {
                self.0.push(line);
            }
        }
    }
}

/// Whether standard output and input are a person's.
pub(super) fn is_terminal() -> bool {
    io::stdout().is_terminal() && io::stdin().is_terminal()
}

/// Shows what `render` returns, again and again, until the person ends it.
pub(super) async fn repeat(mut render: impl AsyncFnMut(&mut Said) -> Result<String>) -> Result<()> {
    let mut screen = if is_terminal() { Some(Screen::open()?) } else { None };
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let Some(open) = &mut screen else {
            let mut said = Said::default();
            tokio::select! {
                _ = tokio::signal::ctrl_c() => return Ok(()),
                text = render(&mut said) => output::styled(&text?)?,
            }
            said.0.iter().for_each(|line| output::note(line));
            ticks.tick().await;
            continue;
        };
        let mut said = Said::default();
        // Keys work while proxies are asked.
        let text = {
            let rendering = render(&mut said);
            tokio::pin!(rendering);
            loop {
                tokio::select! {
                    text = &mut rendering => break text?,
                    wish = open.wish() => if wish? == Wish::End { return Ok(()) },
                }
            }
        };
        let below: String = said.0.iter().map(|line| format!("\n! {line}")).collect();
        open.draw(&format!("{text}{below}\n\nq ends"))?;
        loop {
            tokio::select! {
                _ = ticks.tick() => break,
                wish = open.wish() => if wish? == Wish::End { return Ok(()) },
            }
        }
    }
}

impl Screen {
    /// Enters the alternate screen.
    pub(super) fn open() -> Result<Self> {
        terminal::enable_raw_mode().context("set up the terminal")?;
        let screen = Self { events: EventStream::new(), last: String::new() };
        execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide, terminal::DisableLineWrap)?;
        Ok(screen)
    }

    /// Waits for a key that ends, or for a change of the terminal's size, after which the text is drawn again.
    pub(super) async fn wish(&mut self) -> Result<Wish> {
        loop {
            match self.events.next().await {
                Some(Ok(Event::Resize(..))) => {
                    let last = std::mem::take(&mut self.last);
                    execute!(io::stdout(), terminal::Clear(terminal::ClearType::All))?;
                    self.draw(&last)?;
                    return Ok(Wish::Draw);
                }
                Some(Ok(Event::Key(key))) if ends(key) => return Ok(Wish::End),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error).context("read the terminal"),
                None => return Ok(Wish::End),
            }
        }
    }

    /// Draws a text; what is wider or longer than the terminal is cut.
    pub(super) fn draw(&mut self, text: &str) -> Result<()> {
        let (columns, rows) = terminal::size().unwrap_or((80, 24));
        let mut out = io::BufWriter::with_capacity(64 << 10, io::stdout().lock());
        queue!(out, terminal::BeginSynchronizedUpdate, cursor::MoveTo(0, 0))?;
        let text = printable::lines(text).into_owned();
        for (index, line) in text.lines().take(rows.into()).enumerate() {
            // Not every terminal can be told not to wrap lines; those that can also cut wide characters.
            let line: String = line.chars().take(columns.into()).collect();
            queue!(
                out,
                cursor::MoveTo(0, u16::try_from(index).unwrap_or(u16::MAX)),
                Print(line),
                terminal::Clear(terminal::ClearType::UntilNewLine)
            )?;
        }
        queue!(out, terminal::Clear(terminal::ClearType::FromCursorDown), terminal::EndSynchronizedUpdate)?;
        out.flush()?;
        self.last = text;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        let _ = execute!(io::stdout(), terminal::EnableLineWrap, cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

/// How long a screen may go without being drawn.
pub(super) const FRAME: Duration = Duration::from_millis(250);

fn ends(key: KeyEvent) -> bool {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind != KeyEventKind::Release
        && match key.code {
            KeyCode::Char('q') | KeyCode::Esc => true,
            KeyCode::Char('c' | 'd') => control,
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q_escape_and_control_c_end() {
        let key = |code, modifiers| KeyEvent::new(code, modifiers);
        assert!(ends(key(KeyCode::Char('q'), KeyModifiers::NONE)));
        assert!(ends(key(KeyCode::Esc, KeyModifiers::NONE)));
        assert!(ends(key(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(!ends(key(KeyCode::Char('c'), KeyModifiers::NONE)));
        assert!(!ends(key(KeyCode::Down, KeyModifiers::NONE)));
    }
}
