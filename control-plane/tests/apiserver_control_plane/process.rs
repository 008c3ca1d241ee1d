//! A process of the control plane, and waiting for it.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Longest wait for something that should happen soon, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);
/// Interval between checks.
const PAUSE: Duration = Duration::from_millis(50);

/// A process; killed when dropped.
pub(crate) struct Process {
    child: Mutex<Child>,
    log: Arc<Mutex<Vec<String>>>,
}

/// How to end a process.
#[derive(Clone, Copy)]
pub(crate) enum Signal {
    Terminate,
    Kill,
}

/// Waits until `check` succeeds.
pub(crate) async fn eventually(what: &str, mut check: impl AsyncFnMut() -> Result<(), String>) {
    let since = Instant::now();
    loop {
        let Err(found) = check().await else { return };
        assert!(since.elapsed() < PATIENCE, "never came: {what}; last: {found}");
        tokio::time::sleep(PAUSE).await;
    }
}

impl Process {
    /// Starts a subcommand on ports that the system chooses.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_weft-control-plane"))
            .args(arguments)
            .args(["--admin-addr", "127.0.0.1:0", "--log-format", "json", "--log-level", "debug"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let outputs: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for output in outputs {
            let log = log.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    log.lock().unwrap().push(line);
                }
            });
        }
        Self { child: Mutex::new(child), log }
    }

    /// Lines of the log that contain `part`.
    pub(crate) fn lines(&self, part: &str) -> Vec<String> {
        self.log.lock().unwrap().iter().filter(|line| line.contains(part)).cloned().collect()
    }

    /// Waits for a line of the log that contains `part`.
    pub(crate) async fn says(&self, part: &str) {
        eventually(part, async || if self.lines(part).is_empty() { Err("not yet".to_owned()) } else { Ok(()) }).await;
    }

    /// The address of a service.
    pub(crate) async fn bound(&self, service: &str) -> SocketAddr {
        let mut found = None;
        eventually("the process started", async || {
            let lines = self.lines("\"started\"");
            let line: Value = lines.first().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
            // The field is flat or nested, depending on the format.
            let field = line.get(service).or_else(|| line["fields"].get(service));
            let text = field.and_then(Value::as_str).unwrap_or_default();
            found = text.trim_start_matches("Some(").trim_end_matches(')').parse().ok();
            if found.is_some() { Ok(()) } else { Err(self.log.lock().unwrap().join("\n")) }
        })
        .await;
        found.unwrap()
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

    /// Waits for `/ready`.
    pub(crate) async fn ready(&self) {
        eventually("ready", async || match self.get("/ready").await {
            (200, _) => Ok(()),
            answer => Err(format!("{answer:?}\n{}", self.log.lock().unwrap().join("\n"))),
        })
        .await;
    }

    /// Sends a signal and waits for the exit.
    pub(crate) async fn end(&self, signal: Signal) {
        self.signal(signal);
        self.ended().await;
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = self.child.lock().unwrap().id();
        let signal = match signal {
            Signal::Terminate => "-TERM",
            Signal::Kill => "-KILL",
        };
        assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
    }

    /// Waits for the exit: exit code and log.
    pub(crate) async fn ended(&self) -> (Option<i32>, String) {
        let mut code = None;
        eventually("the end of the process", async || match self.child.lock().unwrap().try_wait().unwrap() {
            Some(status) => {
                code = status.code();
                Ok(())
            }
            None => Err("it runs".to_owned()),
        })
        .await;
        // The readers of its output notice the end a moment later.
        tokio::time::sleep(PAUSE).await;
        (code, self.log.lock().unwrap().join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let mut child = self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
        if std::thread::panicking() {
            let log = self.log.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            #[expect(clippy::print_stderr, reason = "libtest shows it beside what failed")]
            {
                eprintln!("log of the process:\n{}", log.join("\n"));
            }
        }
    }
}
