//! The signals that end a process.

use tokio::signal::unix::{SignalKind, signal};

/// Exit code after a second signal: 128 + SIGINT, the shell's convention.
const IMPATIENT_EXIT: i32 = 130;

/// Waits for SIGTERM or SIGINT. From then on a second one ends the process at once with exit code 130.
///
/// # Panics
/// When the runtime has no IO driver, or the process may not install handlers: both are bugs in the program.
#[expect(clippy::disallowed_methods, reason = "waits for the signal that ends the process")]
pub async fn shutdown() {
    let mut terminate = signal(SignalKind::terminate()).expect("SIGTERM can be handled");
    let mut interrupt = signal(SignalKind::interrupt()).expect("SIGINT can be handled");
    tokio::select! {
        _ = terminate.recv() => tracing::info!(signal = "SIGTERM", "shutting down"),
        _ = interrupt.recv() => tracing::info!(signal = "SIGINT", "shutting down"),
    }
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        std::process::exit(IMPATIENT_EXIT);
    });
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, poll_fn},
        pin::pin,
        process::Stdio,
        task::Poll,
        time::Duration,
    };

    use rustix::process::{Pid, Signal, kill_process};
    use tokio::{
        io::{AsyncBufReadExt as _, BufReader},
        process::Command,
        time::timeout,
    };

    use super::*;

    /// Set for the process that gets the signals: this test's program, started again.
    const SIGNALED: &str = "WEFT_TEST_SIGNALED";
    /// How long something that has to happen may take on a machine that is busy.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Never ends by itself, and says what it waits for.
    async fn wait_for_signals() {
        let mut first = pin!(shutdown());
        let waits = poll_fn(|cx| Poll::Ready(first.as_mut().poll(cx).is_pending())).await;
        assert!(waits, "nothing was sent");
        tell("waiting");
        first.await;
        tell("shutting down");
        pending::<()>().await;
    }

    #[expect(clippy::print_stderr, reason = "standard output has the lines of the test harness in it")]
    fn tell(line: &str) {
        eprintln!("{line}");
    }

    #[tokio::test]
    async fn a_second_signal_ends_the_process_with_130() {
        if std::env::var_os(SIGNALED).is_some() {
            return wait_for_signals().await;
        }
        let signals = [Signal::TERM, Signal::INT];
        for (first, second) in signals.into_iter().flat_map(|first| signals.map(|second| (first, second))) {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "signal::tests::a_second_signal_ends_the_process_with_130", "--nocapture"]);
            command.env(SIGNALED, "1").stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
            let mut child = command.spawn().unwrap();
            let pid = Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
            let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
            for (line, signal) in [("waiting", first), ("shutting down", second)] {
                let said = timeout(PATIENCE, lines.next_line()).await.expect("the process says nothing");
                assert_eq!(said.unwrap().as_deref(), Some(line), "{first:?}, {second:?}");
                assert_eq!(child.try_wait().unwrap(), None, "it has ended by itself");
                kill_process(pid, signal).unwrap();
            }
            let ended = timeout(PATIENCE, child.wait()).await.expect("the second signal does not end the process");
            assert_eq!(ended.unwrap().code(), Some(130), "{first:?}, {second:?}");
        }
    }
}
