//! What a part of the run took: CPU time and memory of every process, messages, requests to the API server, and how
//! fast the admin servers answered meanwhile.

use std::{
    fs,
    net::SocketAddr,
    time::{Duration, Instant},
};

use serde::Serialize;
use tokio::{sync::watch, time::sleep};

use super::{
    clients::{Clients, Counts},
    process::{ControlPlane, Usage, get, log::Requests, usage},
};
use crate::enrolment::Quantiles;

/// Pause between two probes of an admin server.
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// Values at the beginning of a part.
pub(super) struct Meter {
    began: Instant,
    processes: [(Usage, Option<Requests>); 2],
    own: Usage,
    machine: Option<MachineTime>,
    counts: Counts,
}

/// What a part took.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    /// Its duration, with the wait for the last messages.
    pub seconds: f64,
    /// By process of the control plane.
    pub processes: Vec<ProcessLoad>,
    /// CPU time of the bench itself: the clients and the writes to the API server.
    pub bench_cpu_seconds: f64,
    /// The part of all processors' time in which they were not idle, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_busy: Option<f64>,
    /// Messages at clients.
    pub messages: u64,
    /// Those per second, without the wait for the last of them.
    pub messages_per_second: f64,
    /// Bytes of HTTP/2 DATA at clients.
    pub data_bytes: u64,
    /// Connections that the control plane closed.
    pub lost_connections: u64,
    /// Streams that the control plane ended or refused.
    pub ended_streams: u64,
    /// Why the last of them ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_problem: Option<String>,
}

/// What a process of the control plane took.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessLoad {
    /// Its subcommand, such as `destination`.
    pub process: &'static str,
    /// User and system time.
    pub cpu_seconds: f64,
    /// Resident memory at the beginning.
    pub resident_bytes_before: u64,
    /// Resident memory at the end.
    pub resident_bytes_after: u64,
    /// Its requests to the API server, for an opening since it started; absent if its log names none at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_requests: Option<Requests>,
}

/// How an admin server answered `GET /live`.
#[derive(Clone, Debug, Serialize)]
pub struct Liveness {
    /// The subcommand of the process.
    pub process: &'static str,
    /// Answers with status 200.
    pub answers: u64,
    /// Other answers, and requests without one.
    pub failures: u64,
    /// Time of the answers; absent without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub milliseconds: Option<Quantiles>,
}

/// Time of all processors since boot, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MachineTime {
    idle: u64,
    all: u64,
}

impl Meter {
    /// Begins to measure.
    ///
    /// # Errors
    /// A process ended.
    pub(super) fn start(control_plane: &ControlPlane, clients: &Clients) -> anyhow::Result<Self> {
        let [destination, policy] = control_plane.processes().map(|process| (process.usage(), process.requests()));
        Ok(Self {
            began: Instant::now(),
            processes: [(destination.0?, destination.1), (policy.0?, policy.1)],
            own: usage(std::process::id())?,
            machine: MachineTime::now(),
            counts: clients.counts(),
        })
    }

    /// What there has been since. `active_seconds` is the part of that time in which messages were caused, without the
    /// wait for the last of them.
    ///
    /// # Errors
    /// A process ended.
    pub(super) fn read(
        &self,
        control_plane: &ControlPlane,
        clients: &Clients,
        active_seconds: Option<f64>,
    ) -> anyhow::Result<Load> {
        let seconds = self.began.elapsed().as_secs_f64();
        let mut processes = Vec::new();
        for (process, (before, requests)) in control_plane.processes().into_iter().zip(&self.processes) {
            let after = process.usage()?;
            let requests_before = requests.clone().unwrap_or_default();
            processes.push(ProcessLoad {
                process: process.name,
                cpu_seconds: after.cpu_seconds - before.cpu_seconds,
                resident_bytes_before: before.resident_bytes,
                resident_bytes_after: after.resident_bytes,
                api_requests: process.requests().map(|requests| requests.since(&requests_before)),
            });
        }
        let counts = clients.counts().since(&self.counts);
        Ok(Load {
            seconds,
            processes,
            bench_cpu_seconds: usage(std::process::id())?.cpu_seconds - self.own.cpu_seconds,
            machine_busy: self.machine.zip(MachineTime::now()).and_then(|(before, now)| now.busy_since(before)),
            messages: counts.messages,
            messages_per_second: counts.messages as f64 / active_seconds.unwrap_or(seconds),
            data_bytes: counts.bytes,
            lost_connections: counts.lost_connections,
            ended_streams: counts.ended_streams,
            last_problem: counts.last_problem,
        })
    }
}

impl ProcessLoad {
    /// By how much the memory grew, bytes; negative if it shrank.
    #[must_use]
    pub fn growth_bytes(&self) -> f64 {
        self.resident_bytes_after as f64 - self.resident_bytes_before as f64
    }
}

impl MachineTime {
    fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// The first line of /proc/stat (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq, steal.
    fn parse(text: &str) -> Option<Self> {
        let fields: Option<Vec<u64>> = text
            .lines()
            .next()?
            .strip_prefix("cpu ")?
            .split_whitespace()
            .take(8)
            .map(|field| field.parse().ok())
            .collect();
        let fields = fields.filter(|fields| fields.len() == 8)?;
        Some(Self { idle: fields.iter().skip(3).take(2).sum(), all: fields.iter().sum() })
    }

    fn busy_since(self, before: Self) -> Option<f64> {
        let (all, idle) = (self.all.checked_sub(before.all)?, self.idle.saturating_sub(before.idle));
        (all > 0).then(|| 1.0 - idle as f64 / all as f64)
    }
}

/// Asks both admin servers for `/live` again and again until the sender says so.
pub(super) async fn probe(processes: [(&'static str, SocketAddr); 2], stop: watch::Receiver<bool>) -> [Liveness; 2] {
    let [destination, policy] = processes.map(|(name, admin)| probe_one(name, admin, stop.clone()));
    let (destination, policy) = tokio::join!(destination, policy);
    [destination, policy]
}

async fn probe_one(process: &'static str, admin: SocketAddr, mut stop: watch::Receiver<bool>) -> Liveness {
    let (mut milliseconds, mut failures) = (Vec::new(), 0);
    loop {
        let asked = Instant::now();
        match get(admin, "/live").await {
            Ok((200, _)) => milliseconds.push(asked.elapsed().as_secs_f64() * 1e3),
            _ => failures += 1,
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            () = sleep(PROBE_EVERY) => {}
        }
    }
    let answers = milliseconds.len() as u64;
    Liveness { process, answers, failures, milliseconds: (answers > 0).then(|| Quantiles::of(milliseconds)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_includes_waiting_for_disks() {
        let before = MachineTime::parse("cpu  10 0 10 70 10 0 0 0 0 0\ncpu0 1\n").unwrap();
        assert_eq!(before, MachineTime { idle: 80, all: 100 });
        let now = MachineTime { idle: 130, all: 200 };
        assert_eq!(now.busy_since(before), Some(0.5));
        assert_eq!(before.busy_since(before), None, "no time has passed");
        assert_eq!(MachineTime::parse("cpu 1 2\n"), None);
        assert!(MachineTime::now().is_some());
    }
}
