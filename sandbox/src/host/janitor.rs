//! Cleans up after a daemon that died: a process that only waits for the daemon's end.
//!
//! It reads a pipe that only the daemon writes to. The kernel closes it however the daemon ends, `kill -9` included.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{HostError, Result, cleanup};
use crate::config::Layout;

/// How long a dying daemon may hold its lock after its pipe is closed: the kernel closes its files one after the
/// other.
const LOCK_FREE_WITHIN: Duration = Duration::from_secs(2);
/// Interval between checks for that.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The daemon's handle to its janitor. If it is dropped without [`Janitor::dismiss`], the janitor cleans up as after a
/// crash.
#[derive(Debug)]
pub struct Janitor {
    child: Child,
}

/// Starts `weft sandbox-janitor NAME` in a process group of its own, so that Ctrl-C reaches the daemon alone.
///
/// # Errors
/// When the binary cannot be started.
pub fn spawn(weft: &Path, name: &str) -> Result<Janitor> {
    let child = Command::new(weft)
        .arg("sandbox-janitor")
        .arg(name)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .process_group(0)
        // The janitor needs neither the daemon's environment nor its directory, and must not keep a file system busy.
        .current_dir("/")
        .spawn()
        .map_err(|source| HostError::Start { path: weft.to_owned(), source })?;
    Ok(Janitor { child })
}

impl Janitor {
    /// Ends the janitor after everything is cleaned up, and waits until it has exited.
    pub fn dismiss(mut self) {
        if let Some(mut stdin) = self.child.stdin.take() {
            // A janitor that has already exited needs no message.
            let _ = stdin.write_all(b".");
        }
        let _ = self.child.wait();
    }
}

/// The body of `weft sandbox-janitor`: waits on standard input for the daemon's end, and cleans up unless the daemon
/// reported that nothing is left.
///
/// # Errors
/// When something could not be removed.
pub fn run(name: &str) -> Result<()> {
    if dismissed(io::stdin().lock()) {
        return Ok(());
    }
    let deadline = Instant::now() + LOCK_FREE_WITHIN;
    let _lock = loop {
        match cleanup::lock(name) {
            Ok(lock) => break lock,
            Err(HostError::AlreadyRuns { .. }) if Instant::now() < deadline => thread::sleep(LOOK_EVERY),
            // The present owner of the name has cleaned up before it started.
            Err(HostError::AlreadyRuns { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
    };
    let layout = Layout::of(name);
    // The log of a daemon in the background; one in a terminal has none.
    let _ = fs::remove_file(layout.daemon_log());
    cleanup::remove_everything(&layout)
}

/// Whether a byte arrives before the end.
fn dismissed(mut input: impl io::Read) -> bool {
    let mut byte = [0];
    loop {
        match input.read(&mut byte) {
            Ok(read) => return read > 0,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_byte_dismisses() {
        assert!(dismissed(&b"."[..]));
        assert!(!dismissed(io::empty()));
    }
}
