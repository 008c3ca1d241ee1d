//! What a command waits for, on a terminal's standard error; nothing where that is no terminal.

use std::{
    io::{self, IsTerminal as _, Write},
    pin::pin,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use weft_k8s_api::printable;

use super::colour;

/// How long a command may be silent.
const SILENCE: Duration = Duration::from_secs(1);
/// What most commands wait for.
pub(crate) const API_SERVER: &str = "the API server";
/// Clears the terminal's current line.
const CLEAR_LINE: &str = "\r\x1b[2K";
/// Longest text: one line of a narrow terminal, since a wrapped line would not be cleared.
const LINE: usize = 78;

/// Whether a line is shown on standard error.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// A line that can be replaced and cleared.
pub(crate) struct Progress<W: Write> {
    /// `None` where nothing is shown.
    terminal: Option<W>,
    shown: bool,
}

impl Progress<io::Stderr> {
    /// On standard error, if it is a terminal.
    pub(crate) fn new() -> Self {
        let is_shown = io::stderr().is_terminal() && !colour::is_dumb(std::env::var_os("TERM").as_deref());
        Self { terminal: is_shown.then(io::stderr), shown: false }
    }
}

impl<W: Write> Progress<W> {
    pub(crate) fn show(&mut self, what: &str) {
        let Some(terminal) = &mut self.terminal else { return };
        let text: String = printable::line(&format!("waiting for: {what}")).chars().take(LINE).collect();
        // A closed terminal is no failure of the command.
        let _ = write!(terminal, "{CLEAR_LINE}{text}").and_then(|()| terminal.flush());
        self.shown = true;
        SHOWN.store(true, Ordering::Relaxed);
    }

    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.shown)
            && let Some(terminal) = &mut self.terminal
        {
            SHOWN.store(false, Ordering::Relaxed);
            let _ = write!(terminal, "{CLEAR_LINE}").and_then(|()| terminal.flush());
        }
    }

    /// Awaits `work`, and shows `what` is waited for while it takes longer than a second.
    async fn during<T>(mut self, what: &str, work: impl Future<Output = T>) -> T {
        if self.terminal.is_none() {
            return work.await;
        }
        let mut work = pin!(work);
        if let Ok(done) = tokio::time::timeout(SILENCE, &mut work).await {
            return done;
        }
        self.show(what);
        // Cleared when dropped, also when this future is.
        work.await
    }
}

impl<W: Write> Drop for Progress<W> {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Awaits `work`. If it takes longer than a second, standard error says what is waited for, if it is a terminal.
///
/// Not for `work` that calls this itself: the end of the inner wait would clear the line of the outer one.
pub(crate) async fn during<T>(what: &str, work: impl Future<Output = T>) -> T {
    Progress::new().during(what, work).await
}

/// Before something else is written to standard error.
pub(super) fn make_room() {
    if SHOWN.swap(false, Ordering::Relaxed) {
        let _ = write!(io::stderr(), "{CLEAR_LINE}");
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    fn written(terminal: bool, run: impl AsyncFnOnce(Progress<&mut Vec<u8>>)) -> String {
        let mut out = Vec::new();
        let progress = Progress { terminal: terminal.then_some(&mut out), shown: false };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(run(progress));
        String::from_utf8(out).unwrap()
    }

    async fn slow(progress: Progress<&mut Vec<u8>>) {
        let work = async { tokio::time::sleep(SILENCE + Duration::from_millis(1)).await };
        progress.during("the agents", work).await;
    }

    #[test]
    fn only_a_long_wait_is_shown_and_nothing_stays() {
        assert_eq!(written(true, slow), "\r\x1b[2Kwaiting for: the agents\r\x1b[2K");
        assert_eq!(written(true, async |progress| progress.during("the agents", ready(())).await), "");
    }

    #[test]
    fn a_file_gets_nothing() {
        assert_eq!(written(false, slow), "");
    }

    #[test]
    fn a_wait_that_is_given_up_leaves_nothing() {
        let given_up = written(true, async |progress| {
            let wait = progress.during("the pods", pending::<()>());
            tokio::time::timeout(SILENCE * 2, wait).await.unwrap_err();
        });
        assert_eq!(given_up, "\r\x1b[2Kwaiting for: the pods\r\x1b[2K");
    }

    #[test]
    fn the_text_stays_on_one_line() {
        let shown = written(true, async |mut progress| progress.show(&format!("a\n{}", "x".repeat(200))));
        let text = shown.split(CLEAR_LINE).nth(1).unwrap();
        assert!(text.starts_with("waiting for: a\\nxx") && text.len() == LINE, "{shown:?}");
    }
}
