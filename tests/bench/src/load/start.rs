//! The start of a proxy, seen from its pod: from the new process until `/ready` says so.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

const ADMIN_PORT: u16 = 4191;
/// Between two looks: what the result may be off by.
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// A supervisor waits a second before it starts a process again.
const STARTS_WITHIN: Duration = Duration::from_secs(20);
const READY_WITHIN: Duration = Duration::from_secs(30);
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// When a proxy started.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Started {
    /// The process was in its cgroup: it becomes the proxy next.
    pub(crate) began: SystemTime,
    /// `/ready` answered 200.
    pub(crate) ready: SystemTime,
}

/// Kills the process in this cgroup, waits for the next and until it is ready.
///
/// # Errors
/// There is no next, or it is not ready in time.
pub(super) fn restart(old: u32, cgroup: &Path) -> anyhow::Result<Started> {
    kill(Pid::from_raw(i32::try_from(old)?), Signal::SIGKILL).context("kill the proxy")?;
    let processes = cgroup.join("cgroup.procs");
    let began = look(STARTS_WITHIN, || Ok(other_than(old, &fs::read_to_string(&processes)?)))?;
    let ready = look(READY_WITHIN, || Ok(is_ready()))?;
    Ok(Started { began, ready })
}

/// When the answer became yes.
fn look(within: Duration, mut ask: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<SystemTime> {
    let deadline = Instant::now() + within;
    while !ask()? {
        anyhow::ensure!(Instant::now() < deadline, "not within {within:?}");
        thread::sleep(LOOK_EVERY);
    }
    Ok(SystemTime::now())
}

/// Whether a list of processes has another than this one.
fn other_than(old: u32, processes: &str) -> bool {
    processes.lines().filter_map(|line| line.trim().parse::<u32>().ok()).any(|pid| pid != old)
}

fn is_ready() -> bool {
    let ask = || -> std::io::Result<bool> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT));
        let mut stream = TcpStream::connect_timeout(&address, ANSWERS_WITHIN)?;
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        stream.write_all(b"GET /ready HTTP/1.0\r\nhost: localhost\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_process_is_another_one() {
        assert!(!other_than(7, "") && !other_than(7, "7\n"));
        assert!(other_than(7, "8\n") && other_than(7, "7\n8\n"));
    }

    #[test]
    fn a_look_that_never_succeeds_ends_and_one_that_fails_says_why() {
        assert!(look(Duration::from_millis(1), || Ok(false)).is_err());
        let failed = look(STARTS_WITHIN, || anyhow::bail!("no such cgroup"));
        assert_eq!(failed.unwrap_err().to_string(), "no such cgroup");
    }
}
