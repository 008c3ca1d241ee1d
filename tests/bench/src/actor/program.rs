//! A program that an actor runs in its place, and the program's log.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, BufReader, PipeReader, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use rustix::time::{ClockId, clock_gettime};

/// Timeout of a server on loopback.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// A running program, killed on drop.
#[derive(Debug)]
pub(super) struct Program {
    process: Child,
    log: BufReader<PipeReader>,
}

impl Program {
    /// Starts a program as a user, with only this environment.
    ///
    /// # Errors
    /// There is no such program.
    pub(super) fn start(program: &Path, uid: u32, environment: &BTreeMap<String, String>) -> anyhow::Result<Self> {
        let (log, output) = io::pipe()?;
        let mut command = Command::new(program);
        command.uid(uid).gid(uid).env_clear().envs(environment);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let process = command.spawn().with_context(|| format!("start {}", program.display()))?;
        Ok(Self { process, log: BufReader::new(log) })
    }

    /// Waits until it logs a line with this text. Returns the time: [`now`].
    ///
    /// # Errors
    /// It ends before that; the error contains its output.
    pub(super) fn says(&mut self, text: &str) -> anyhow::Result<u64> {
        let (mut said, mut line) = (String::new(), String::new());
        loop {
            line.clear();
            if self.log.read_line(&mut line)? == 0 {
                anyhow::bail!("it ended without a word of {text:?}: {said}");
            }
            if line.contains(text) {
                return Ok(now());
            }
            said.push_str(&line);
        }
    }

    /// The answer of its HTTP server on loopback, with headers; none while it does not listen.
    ///
    /// # Errors
    /// It does not answer, or has ended; the error contains its output.
    pub(super) fn get(&mut self, port: u16, path: &str) -> anyhow::Result<Option<String>> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut stream = match TcpStream::connect(address) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let Some(status) = self.process.try_wait()? else { return Ok(None) };
                let mut said = String::new();
                self.log.read_to_string(&mut said)?;
                anyhow::bail!("it ended with {status}: {said}");
            }
            stream => stream.with_context(|| format!("connect to {address}"))?,
        };
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).with_context(|| format!("read from {address}"))?;
        Ok(Some(answer))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The time of the clock that all processes share and that cannot be set, microseconds.
#[must_use]
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000 + time.tv_nsec.cast_unsigned() / 1_000
}
