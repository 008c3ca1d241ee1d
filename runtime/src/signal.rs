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
