//! Processes of the control plane: the real binary, on loopback ports that the system chooses.
//!
//! Their logs name the ports and every request to the API server ([`log`]).

pub mod log;

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::Path,
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::{Child, Command},
    time::timeout,
};
use weft_test_kit::binaries;

use crate::node::Footprint;
use log::{Log, Requests};

const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// The time in which it must have read every object.
const READY_WITHIN: Duration = Duration::from_secs(600);
/// Deadline of a request to the admin server.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);
/// Pause between two looks whether a process has ended.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Requests to the API server and little else: a line for every object would be a load of its own.
const LOG_LEVEL: &str = "warn,weft=info,weft_control_plane::api=debug";

/// Both services.
pub(super) struct ControlPlane {
    pub(super) destination: Process,
    pub(super) policy: Process,
}

/// One process; killed when dropped.
pub(crate) struct Process {
    /// For people: its subcommand.
    pub(super) name: &'static str,
    child: Child,
    pid: u32,
    log: Arc<Mutex<Log>>,
    /// The gRPC service.
    pub(crate) address: SocketAddr,
    /// The admin server.
    pub(crate) admin: SocketAddr,
}

/// What a process has used so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_bytes: u64,
    /// The most that was resident at a time.
    pub(crate) peak_bytes: u64,
}

impl ControlPlane {
    /// Starts both processes, and returns when they are ready, with the seconds that each took.
    ///
    /// # Errors
    /// One of them ends or is not ready in time; the message ends with its log.
    pub(super) async fn start(
        kubeconfig: &Path,
        namespace: &str,
    ) -> anyhow::Result<(Self, BTreeMap<&'static str, f64>)> {
        let began = Instant::now();
        let (destination, policy) = tokio::try_join!(
            Process::start("destination", kubeconfig, namespace, &["--lease-identity", "bench"]),
            Process::start("policy", kubeconfig, namespace, &["--lease-identity", "bench"]),
        )?;
        let mut control_plane = Self { destination, policy };
        let mut seconds = BTreeMap::new();
        let ready =
            async |process: &mut Process| process.ready().await.map(|()| (process.name, began.elapsed().as_secs_f64()));
        let (destination, policy) =
            tokio::try_join!(ready(&mut control_plane.destination), ready(&mut control_plane.policy))?;
        seconds.extend([destination, policy]);
        Ok((control_plane, seconds))
    }

    pub(super) fn processes(&self) -> [&Process; 2] {
        [&self.destination, &self.policy]
    }

    /// The addresses of both services.
    pub(super) fn addresses(&self) -> [SocketAddr; 2] {
        self.processes().map(|process| process.address)
    }

    /// Waits until one of them has ended, and says why.
    pub(super) async fn ended(&self) -> anyhow::Error {
        loop {
            if let Some(error) = self.processes().into_iter().find_map(|process| process.usage().err()) {
                return error;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Ends both.
    ///
    /// # Errors
    /// One cannot be killed.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        self.destination.kill().await?;
        self.policy.kill().await
    }
}

impl Process {
    /// Starts a service of the control plane.
    async fn start(name: &'static str, kubeconfig: &Path, namespace: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        let program = binaries::directory()?.join("weft-control-plane");
        let mut command = Command::new(&program);
        command
            .arg(name)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(["--controller-namespace", namespace, "--log-format", "json", "--log-level", LOG_LEVEL])
            .args(["--admin-addr", "127.0.0.1:0", &format!("--{name}-addr"), "127.0.0.1:0"])
            .args(arguments);
        Self::spawn(name, name, command).await
    }

    /// Starts a program that logs in JSON, and returns when it has said where it serves `service` and its admin server.
    ///
    /// # Errors
    /// It ends or does not say so in time; the message ends with its log.
    pub(crate) async fn spawn(name: &'static str, service: &'static str, mut command: Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child =
            command.spawn().with_context(|| format!("start {}", command.as_std().get_program().to_string_lossy()))?;
        let pid = child.id().with_context(|| format!("{name} ended at once"))?;
        let log = Arc::<Mutex<Log>>::default();
        tokio::spawn(log::read(child.stdout.take(), log.clone()));
        tokio::spawn(log::read(child.stderr.take(), log.clone()));
        let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut process = Self { name, child, pid, log, address: unknown, admin: unknown };
        let bound = async |process: &Self| {
            let log = process.log();
            Ok((log.address(service)?, log.address("admin")?))
        };
        (process.address, process.admin) = process.wait("start", STARTS_WITHIN, bound).await?;
        Ok(process)
    }

    /// Ends it.
    ///
    /// # Errors
    /// It cannot be killed.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill().await.with_context(|| format!("kill {}", self.name))
    }

    /// Waits until it says that it is ready.
    ///
    /// # Errors
    /// It ends or is not ready in time; the message ends with its log.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        let ask = async |process: &Self| match get(process.admin, "/ready").await? {
            (200, _) => Ok(()),
            (status, body) => bail!("{status} {}", body.trim()),
        };
        self.wait("become ready", READY_WITHIN, ask).await
    }

    /// Polls until the answer is good, the time is up, or the process ended.
    async fn wait<T>(
        &mut self,
        what: &str,
        within: Duration,
        ask: impl AsyncFn(&Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let began = Instant::now();
        loop {
            self.check()?;
            match ask(self).await {
                Ok(answer) => return Ok(answer),
                Err(error) if began.elapsed() > within => {
                    bail!("{} does not {what} within {within:?}: {error:#}\n{}", self.name, self.tail());
                }
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Fails if it ended.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("{} ended ({status}):\n{}", self.name, self.tail()),
            None => Ok(()),
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tail(&self) -> String {
        self.log().tail()
    }

    /// What it has used so far.
    ///
    /// # Errors
    /// It ended.
    pub(crate) fn usage(&self) -> anyhow::Result<Usage> {
        usage(self.pid).with_context(|| format!("{} ended:\n{}", self.name, self.tail()))
    }

    /// Its requests to the API server so far; `None` if its log names none.
    pub(super) fn requests(&self) -> Option<Requests> {
        self.log().requests()
    }
}

/// CPU time and memory of a process, from /proc.
///
/// # Errors
/// There is no such process.
pub(crate) fn usage(pid: u32) -> anyhow::Result<Usage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let cpu_seconds = cpu_seconds(&stat, rustix::param::clock_ticks_per_second())
        .with_context(|| format!("/proc/{pid}/stat has another format"))?;
    let Footprint { resident_bytes, peak_bytes, .. } = Footprint::of(pid)?;
    Ok(Usage { cpu_seconds, resident_bytes, peak_bytes })
}

/// User and system time of a line of /proc/PID/stat (proc_pid_stat(5)): its 14th and 15th field.
fn cpu_seconds(stat: &str, ticks_per_second: u64) -> Option<f64> {
    // The name in parentheses may contain anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((user + system) as f64 / ticks_per_second as f64)
}

/// Sends a GET to an admin server on a connection of its own, as a kubelet does: status and body.
///
/// # Errors
/// There is no answer.
pub(crate) async fn get(admin: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let asked = async {
        let mut stream = TcpStream::connect(admin).await?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the answer is not HTTP")?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no status")?;
        Ok((status, body.to_owned()))
    };
    timeout(ANSWERS_WITHIN, asked).await.with_context(|| format!("GET {path}: no answer within {ANSWERS_WITHIN:?}"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_after_any_name() {
        let stat = "7 (a) b) (c) S 1 7 7 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 3 0 100 1000 10 18446744073709551615";
        assert_eq!(cpu_seconds(stat, 100), Some(2.0));
        assert_eq!(cpu_seconds("7 (a) S 1", 100), None);
        let usage = usage(std::process::id()).unwrap();
        assert!(usage.resident_bytes > 0 && usage.cpu_seconds >= 0.0);
    }
}
