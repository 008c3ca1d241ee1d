//! A process of the control plane.

use std::{ffi::OsStr, net::SocketAddr, ops::Deref, path::PathBuf, process::Command, time::Duration};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weft_test_kit::{process, wait::eventually};

/// Longest wait for something that should happen soon, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// A wall clock that processes have in place of the machine's.
pub(crate) struct Clock {
    /// The file from which they read by how much it is off.
    pub(crate) offset: PathBuf,
    /// libfaketime.
    pub(crate) library: PathBuf,
}

/// See above; killed when dropped.
pub(crate) struct Process(process::Process);

impl Deref for Process {
    type Target = process::Process;

    fn deref(&self) -> &process::Process {
        &self.0
    }
}

impl Process {
    /// Starts a subcommand on ports that the system chooses.
    pub(crate) fn start(arguments: &[impl AsRef<OsStr>]) -> Self {
        Self::start_at(arguments, None)
    }

    /// The same with a wall clock of its own.
    pub(crate) fn start_at(arguments: &[impl AsRef<OsStr>], clock: Option<&Clock>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weft-control-plane"));
        if let Some(Clock { offset, library }) = clock {
            command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", offset);
            // The file is read at each look at the clock; monotonic clocks and the times of files stay the machine's.
            command.envs([("FAKETIME_NO_CACHE", "1"), ("DONT_FAKE_MONOTONIC", "1"), ("NO_FAKE_STAT", "1")]);
        }
        command.args(arguments).args(["--admin-addr", "127.0.0.1:0", "--log-format", "json", "--log-level", "debug"]);
        Self(process::Process::start(&mut command, PATIENCE))
    }

    /// The address of a service.
    pub(crate) async fn bound(&self, service: &str) -> SocketAddr {
        eventually("the process started", PATIENCE, async || {
            let lines = self.lines("\"started\"");
            let line: Value = lines.first().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
            // The field is flat or nested, depending on the format.
            let field = line.get(service).or_else(|| line["fields"].get(service));
            let text = field.and_then(Value::as_str).unwrap_or_default();
            let address = text.trim_start_matches("Some(").trim_end_matches(')').parse();
            address.map_err(|_| self.output())
        })
        .await
    }

    /// Sends a GET to the admin server: status and body.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let mut stream = tokio::net::TcpStream::connect(self.bound("admin").await).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// Waits until the metrics have a line.
    pub(crate) async fn counts(&self, line: &str) {
        eventually(line, PATIENCE, async || match self.get("/metrics").await {
            (200, metrics) if metrics.lines().any(|found| found == line) => Ok(()),
            answer => Err(format!("{answer:?}")),
        })
        .await;
    }

    /// Waits for `/ready`.
    pub(crate) async fn ready(&self) {
        eventually("ready", PATIENCE, async || match self.get("/ready").await {
            (200, _) => Ok(()),
            answer => Err(format!("{answer:?}\n{}", self.output())),
        })
        .await;
    }
}
