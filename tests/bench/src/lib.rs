//! The measurements of `weft-bench`. This file has the end-to-end cost of interception: direct connections,
//! linkerd-init's iptables rules and eBPF side by side in one run, with the same copy-only proxy behind both, so that
//! only the interception differs.
//!
//! Three sandboxes run at once and are measured in turn, in a different order each time, so that a change of the
//! machine's speed affects all of them. The result is the median of the repetitions.

#![expect(clippy::print_stdout, reason = "benches say what they do on standard output")]

pub mod actor;
pub mod churn;
pub mod control_plane;
pub mod enrolment;
pub mod hooks;
pub mod kernel;
pub mod load;
pub mod machine;
pub mod node;
pub mod plot;
pub mod proxy;
pub mod ready;
pub mod result;
pub mod target;
pub mod viz;

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use weft_examples::rawtcp::Measured;
use weft_passthrough::Connection;
use weft_sandbox::{config::Layout, host::cgroup};
use weft_test_kit::{
    binaries,
    manifests::Manifests,
    mesh::{ControlPlane, Interception, Mesh, Options, unique_name},
    observe,
    wait::until,
};

use result::{Mode, Sample};

/// The pods: one to connect from, one to connect to.
const MANIFEST: &str = include_str!("pods.yaml");
/// Namespace of both pods.
const NAMESPACE: &str = "bench";
/// The server's port for plain TCP.
const PORT: u16 = 9100;
/// Number of connections whose conntrack entries are counted.
const COUNTED_CONNECTIONS: u64 = 200;
/// Timeout for a started pod to serve.
const SERVES_WITHIN: Duration = Duration::from_secs(20);

/// Amount of measurements of one repetition.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Connections opened one after the other.
    pub connects: u64,
    /// Connections opened by several tasks at once.
    pub burst: u64,
    /// Round trips of 64 bytes.
    pub pings: u64,
    /// Bytes of the bulk stream.
    pub bulk_bytes: u64,
    /// Time limit of each of these, seconds.
    pub limit_seconds: u64,
}

/// One sandbox to measure.
pub struct Contender {
    mode: Mode,
    mesh: Mesh,
    target: String,
    client_netns: PathBuf,
    server_netns: PathBuf,
    cpu_stat: PathBuf,
    conntrack_entries_per_connection: f64,
}

impl Contender {
    /// Starts a sandbox for this mode and checks that its connections take the expected path.
    ///
    /// # Errors
    /// The sandbox does not start, or connections take another path, so that its numbers would mean something else.
    pub async fn start(mode: Mode) -> anyhow::Result<Self> {
        let manifests = Manifests::empty()?;
        let inject = if mode == Mode::Direct { "disabled" } else { "enabled" };
        manifests.write("pods.yaml", &MANIFEST.replace("{inject}", inject))?;
        let options = Options {
            name: unique_name(&format!("bench-{}", mode.label())),
            interception: match mode {
                Mode::Direct => Interception::None,
                Mode::Iptables => Interception::Iptables,
                Mode::Ebpf => Interception::Ebpf,
            },
            // The copy-only proxy needs no identity and no discovery.
            control_plane: ControlPlane::None,
            proxy: (mode != Mode::Direct).then_some(binaries::directory()?.join("weft-passthrough")),
            programs: None,
        };
        let mesh = Mesh::start(manifests, options).await?;
        let (client, server) = (mesh.pod(NAMESPACE, "client").await?, mesh.pod(NAMESPACE, "server").await?);
        let mut contender = Self {
            mode,
            target: format!("{}:{PORT}", server.ip),
            client_netns: client.netns,
            server_netns: server.netns,
            cpu_stat: cgroup::mount_point()?.join(Layout::of(mesh.name()).kubepods()).join("cpu.stat"),
            conntrack_entries_per_connection: 0.0,
            mesh,
        };
        until(SERVES_WITHIN, async || {
            contender.measure(&["--connects", "1", "--burst", "0", "--pings", "0", "--bulk-bytes", "0"]).await
        })
        .await
        .with_context(|| format!("{}: the server does not answer", mode.label()))?;
        contender.check_path().await?;
        contender.conntrack_entries_per_connection = contender.count_tracked().await?;
        Ok(contender)
    }

    /// One repetition.
    ///
    /// # Errors
    /// A connection failed or a counter cannot be read.
    pub async fn sample(&self, effort: Effort) -> anyhow::Result<Sample> {
        let limit = format!("{}s", effort.limit_seconds);
        let (connects, burst) = (effort.connects.to_string(), effort.burst.to_string());
        let (pings, bulk) = (effort.pings.to_string(), effort.bulk_bytes.to_string());
        let cpu_before = cpu_usage_us(&self.cpu_stat)?;
        let opening = self
            .measure(&[
                "--connects",
                &connects,
                "--burst",
                &burst,
                "--pings",
                "0",
                "--bulk-bytes",
                "0",
                "--limit",
                &limit,
            ])
            .await?;
        let cpu_us = cpu_usage_us(&self.cpu_stat)?.saturating_sub(cpu_before);
        let open = self
            .measure(&["--connects", "0", "--burst", "0", "--pings", &pings, "--bulk-bytes", &bulk, "--limit", &limit])
            .await?;
        Ok(Sample {
            connect_us: opening.connect_us,
            first_byte_us: opening.first_byte_us,
            connections_per_second: opening.connections_per_second,
            round_trip_us: open.round_trip_us,
            bulk_gbit_per_second: open.bulk_gbit_per_second,
            cpu_us_per_connection: cpu_us as f64 / opening.connections as f64,
            conntrack_entries_per_connection: self.conntrack_entries_per_connection,
        })
    }

    /// Stops the sandbox.
    ///
    /// # Errors
    /// Something could not be removed.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.mesh.stop().await
    }

    /// The path of this sandbox's connections.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    async fn measure(&self, arguments: &[&str]) -> anyhow::Result<Measured> {
        let mut command = vec!["weft-client", "tcp", "--target", &self.target];
        command.extend(arguments);
        let output = self.mesh.exec(NAMESPACE, "client", &command).await?;
        anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Counted once, before anything else fills the tables: entries outlive their connections by minutes, so later
    /// counts would mix expiring and new entries.
    async fn count_tracked(&self) -> anyhow::Result<f64> {
        let before = self.tracked()?;
        let connects = COUNTED_CONNECTIONS.to_string();
        self.measure(&["--connects", &connects, "--burst", "0", "--pings", "0", "--bulk-bytes", "0"]).await?;
        Ok(self.tracked()?.saturating_sub(before) as f64 / COUNTED_CONNECTIONS as f64)
    }

    fn tracked(&self) -> io::Result<u64> {
        let (client, server) = (observe::netfilter(&self.client_netns)?, observe::netfilter(&self.server_netns)?);
        Ok((client.conntrack + server.conntrack) as u64)
    }

    /// The proxies report which connections they copied.
    async fn check_path(&self) -> anyhow::Result<()> {
        let rules = observe::netfilter(&self.client_netns)?.rules + observe::netfilter(&self.server_netns)?.rules;
        anyhow::ensure!(
            (rules > 0) == (self.mode == Mode::Iptables),
            "{}: {rules} netfilter rules in the pods",
            self.mode.label()
        );
        if self.mode == Mode::Direct {
            return Ok(());
        }
        for pod in ["client", "server"] {
            let seen: Vec<Connection> = serde_json::from_str(&self.mesh.admin(NAMESPACE, pod, "/connections").await?)
                .context("read /connections")?;
            let passed = seen.iter().any(|connection| connection.original.as_ref() == Ok(&self.target));
            anyhow::ensure!(passed, "{}: no connection to {} passed the {pod}'s proxy", self.mode.label(), self.target);
        }
        Ok(())
    }
}

/// CPU time of a cgroup and all below it, microseconds, kernel and user together.
fn cpu_usage_us(cpu_stat: &Path) -> anyhow::Result<u64> {
    let text = fs::read_to_string(cpu_stat).with_context(|| format!("read {}", cpu_stat.display()))?;
    let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
    usage.and_then(|usage| usage.parse().ok()).with_context(|| format!("no usage_usec in {}", cpu_stat.display()))
}
