//! A node by itself: a network with pods, a cgroup for meshed pods and one for others, and the real agent. No sandbox
//! and no containers: the pods run [`Actor`]s, so that only the interception is measured.
//!
//! Everything has one unique name and is removed by [`Node::remove`], or by the sandbox's janitor after a crash.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::process::{Child, Command};
use tonic::transport::Channel;
use weft_proto::agent::{EnrolRequest, PodRef, PortRange, WithdrawRequest, pods_client::PodsClient};
use weft_sandbox::{
    config::{Layout, POD_CIDR_V4, POD_CIDR_V6},
    host::{
        cgroup,
        cleanup::{self, Lock},
        iptables::{self, InitRules},
        janitor::{self, Janitor},
        mount_bpffs, network,
    },
};
use weft_test_kit::{actor::Place, agent, binaries, mesh::unique_name, wait::until};

use super::{actor::Actor, kernel::Pinned};

/// The proxies' user.
pub const PROXY_UID: u32 = 2102;
/// The applications' user.
pub const APPLICATION_UID: u32 = 1000;
/// The first addresses of the pods' network belong to the node.
const FIRST_POD: u32 = 16;
const AGENT_SERVES_WITHIN: Duration = Duration::from_secs(20);
/// An agent whose state is unchanged for this long counts as idle.
const REST: Duration = Duration::from_secs(2);
const RESTS_WITHIN: Duration = Duration::from_secs(60);
const NAMESPACE: &str = "bench";

/// A running node.
pub struct Node {
    layout: Layout,
    cgroup: PathBuf,
    agent: Option<Child>,
    channel: Option<Channel>,
    next: u32,
    // Dropped last and in this order: while the lock is held, no other run cleans up.
    lock: Lock,
    janitor: Janitor,
}

/// Client of the agent's API for pods.
#[derive(Clone, Debug)]
pub struct Pods(Channel);

/// A pod's network.
#[derive(Clone, Debug)]
pub struct Pod {
    number: u32,
    /// Its IPv4 address.
    pub ip: Ipv4Addr,
    ipv6: Ipv6Addr,
    /// Its network namespace.
    pub netns: PathBuf,
}

/// Resources of the agent's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Footprint {
    /// Resident memory, bytes.
    pub resident_bytes: u64,
    /// The most that was resident at a time, bytes.
    pub peak_bytes: u64,
    /// The part of it that is not backed by files: heap, stacks.
    pub anonymous_bytes: u64,
    /// Open file descriptors.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
}

impl Node {
    /// Creates a node without pods; [`Self::start_agent`] starts the agent.
    ///
    /// # Errors
    /// Root, cgroup2, a BPF file system or a binary is missing.
    pub async fn create(purpose: &str) -> anyhow::Result<Self> {
        let name = unique_name(purpose);
        let layout = Layout::of(&name);
        let lock = cleanup::lock(&name)?;
        let janitor = janitor::spawn(&binaries::directory()?.join("weft"), &name)?;
        let cgroup = cgroup::mount_point()?.join(layout.cgroup());
        let node = Self { cgroup, agent: None, channel: None, next: FIRST_POD, lock, janitor, layout };
        for name in ["kubepods", "plain", "agent"] {
            cgroup::create(&node.cgroup.join(name))?;
        }
        mount_bpffs(&node.layout.bpffs())?;
        network::create_node(&node.layout).await?;
        Ok(node)
    }

    /// Starts the agent and waits until it serves.
    ///
    /// # Errors
    /// It ends or does not serve in time; the error contains the end of its log.
    pub async fn start_agent(&mut self, flags: &[String]) -> anyhow::Result<()> {
        let log = fs::File::create(self.layout.agent_log())?;
        let mut child = Command::new(binaries::directory()?.join("weft-agent"))
            .arg("run")
            .arg("--socket")
            .arg(self.layout.agent_socket())
            .arg("--pin-dir")
            .arg(self.layout.pin_dir())
            .arg("--cgroup")
            .arg(self.meshed_cgroup())
            // As on a Kubernetes node, where a proxy's listen enrols its pod.
            .arg("--self-enrol-uid")
            .arg(PROXY_UID.to_string())
            .args(flags)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("start weft-agent")?;
        if let Some(pid) = child.id() {
            fs::write(self.cgroup.join("agent/cgroup.procs"), pid.to_string())?;
        }
        let socket = self.layout.agent_socket();
        let serving = until(AGENT_SERVES_WITHIN, async || -> anyhow::Result<Channel> {
            if let Some(status) = child.try_wait()? {
                anyhow::bail!("it ended with {status}");
            }
            let endpoint = tonic::transport::Endpoint::from_shared(format!("unix://{}", socket.display()))?;
            let channel = endpoint.connect().await?;
            agent::Agent::connect(&socket).await?.status().await?;
            Ok(channel)
        });
        let log = || fs::read_to_string(self.layout.agent_log()).unwrap_or_default();
        let channel = serving.await.with_context(|| format!("weft-agent does not serve: {}", log()))?;
        self.channel = Some(channel);
        self.agent = Some(child);
        Ok(())
    }

    /// Creates a pod's network.
    ///
    /// # Errors
    /// The kernel refuses a part.
    pub async fn add_pod(&mut self) -> anyhow::Result<Pod> {
        let number = self.next;
        self.next += 1;
        let ip = Ipv4Addr::from_bits(POD_CIDR_V4.0.to_bits() + number);
        let ipv6 = Ipv6Addr::from_bits(POD_CIDR_V6.0.to_bits() + u128::from(number));
        let netns = network::attach_pod(&self.layout, number, &[IpAddr::V4(ip), IpAddr::V6(ipv6)]).await?;
        Ok(Pod { number, ip, ipv6, netns })
    }

    /// Removes a pod's network and cgroup. Its processes have ended.
    ///
    /// # Errors
    /// The kernel keeps a part.
    pub async fn remove_pod(&self, pod: &Pod) -> anyhow::Result<()> {
        let cgroup = self.cgroup_of(pod);
        tokio::task::spawn_blocking(move || cgroup::remove(&cgroup)).await??;
        Ok(network::detach_pod(&self.layout, pod.number).await?)
    }

    /// Installs linkerd-init's rules in a pod.
    ///
    /// # Errors
    /// iptables is missing or refuses.
    pub async fn install_iptables(&self, pod: &Pod) -> anyhow::Result<()> {
        let rules = InitRules {
            proxy_uid: PROXY_UID,
            inbound_port: 4143,
            outbound_port: 4140,
            skip_inbound: vec!["4190".into(), "4191".into(), "4567".into(), "4568".into()],
            skip_outbound: vec!["4567".into(), "4568".into()],
            skip_subnets: Vec::new(),
            ipv6: true,
        };
        Ok(iptables::install(&pod.netns, &rules).await?)
    }

    /// The API at which pods are enrolled.
    ///
    /// # Errors
    /// The agent does not run.
    pub fn pods(&self) -> anyhow::Result<Pods> {
        self.channel.clone().map(Pods).context("the agent does not run")
    }

    /// The agent's own status.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn status(&self) -> anyhow::Result<weft_proto::agent::StatusResponse> {
        Ok(agent::Agent::connect(&self.layout.agent_socket()).await?.status().await?)
    }

    /// The agent's state in the kernel.
    pub fn pinned(&self) -> Pinned {
        Pinned::new(&self.layout.pin_dir())
    }

    /// Waits until the agent is idle after a start or a burst of pods: its resources no longer change.
    ///
    /// # Errors
    /// It does not become idle.
    pub async fn at_rest(&self) -> anyhow::Result<()> {
        let look = || -> anyhow::Result<_> { Ok((self.pinned().holdings()?, self.footprint()?.descriptors)) };
        let deadline = Instant::now() + RESTS_WITHIN;
        let mut last = look()?;
        loop {
            tokio::time::sleep(REST).await;
            let now = look()?;
            if now == last {
                return Ok(());
            }
            anyhow::ensure!(Instant::now() < deadline, "the agent does not come to rest within {RESTS_WITHIN:?}");
            last = now;
        }
    }

    /// Resources of the agent's process.
    ///
    /// # Errors
    /// It does not run.
    pub fn footprint(&self) -> anyhow::Result<Footprint> {
        let pid = self.agent.as_ref().and_then(Child::id).context("the agent does not run")?;
        Footprint::of(pid)
    }

    /// Starts a process in a pod, below the agent's programs.
    ///
    /// # Errors
    /// It does not start.
    pub async fn meshed_actor(&self, pod: &Pod) -> anyhow::Result<Actor> {
        let cgroup = self.cgroup_of(pod);
        cgroup::create(&cgroup)?;
        Actor::start(&Place::of_root(&pod.netns, cgroup)).await
    }

    /// Starts a process in a pod without programs.
    ///
    /// # Errors
    /// It does not start.
    pub async fn plain_actor(&self, pod: &Pod) -> anyhow::Result<Actor> {
        Actor::start(&self.plain_place(pod)).await
    }

    /// The cgroup without programs.
    pub fn plain_place(&self, pod: &Pod) -> Place {
        Place::of_root(&pod.netns, self.cgroup.join("plain"))
    }

    /// Stops the agent and removes everything.
    ///
    /// # Errors
    /// Something is left.
    pub async fn remove(mut self) -> anyhow::Result<()> {
        if let Some(mut agent) = self.agent.take() {
            agent.kill().await.context("kill weft-agent")?;
        }
        let layout = self.layout.clone();
        tokio::task::spawn_blocking(move || cleanup::remove_everything(&layout)).await??;
        self.janitor.dismiss();
        drop(self.lock);
        Ok(())
    }

    /// A pod's own: what the kernel enrols by itself is bounded for each.
    fn cgroup_of(&self, pod: &Pod) -> PathBuf {
        self.meshed_cgroup().join(format!("pod{}", pod.number))
    }

    fn meshed_cgroup(&self) -> PathBuf {
        self.cgroup.join("kubepods")
    }
}

impl Pods {
    /// Enrols a pod; returns when both directions are in force. The rules are those of [`Node::install_iptables`].
    ///
    /// # Errors
    /// The agent refuses.
    pub async fn enrol(&self, pod: &Pod) -> anyhow::Result<()> {
        let ports = |ranges: &[(u32, u32)]| ranges.iter().map(|&(first, last)| PortRange { first, last }).collect();
        let request = EnrolRequest {
            pod: Some(pod.name()),
            netns_path: pod.netns.display().to_string(),
            ips: vec![pod.ip.to_string(), pod.ipv6.to_string()],
            proxy_uid: PROXY_UID,
            outbound_port: 4140,
            inbound_port: 4143,
            skip_outbound_ports: ports(&[(4567, 4568)]),
            skip_inbound_ports: ports(&[(4567, 4568)]),
            ..EnrolRequest::default()
        };
        PodsClient::new(self.0.clone()).enrol(request).await.context("enrol a pod")?;
        Ok(())
    }

    /// Withdraws a pod.
    ///
    /// # Errors
    /// The agent refuses.
    pub async fn withdraw(&self, pod: &Pod) -> anyhow::Result<()> {
        let request = WithdrawRequest { pod: Some(pod.name()) };
        PodsClient::new(self.0.clone()).withdraw(request).await.context("withdraw a pod")?;
        Ok(())
    }
}

impl Pod {
    fn name(&self) -> PodRef {
        PodRef { namespace: NAMESPACE.to_owned(), name: format!("pod-{}", self.number) }
    }
}

impl Footprint {
    /// Resources of a process, from /proc.
    ///
    /// # Errors
    /// There is no such process.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let process = Path::new("/proc").join(pid.to_string());
        let status = fs::read_to_string(process.join("status"))?;
        let field = |name: &str| -> anyhow::Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let number = line.and_then(|line| line.split_whitespace().next()).with_context(|| format!("no {name}"))?;
            Ok(number.parse()?)
        };
        Ok(Self {
            resident_bytes: field("VmRSS")? * 1024,
            peak_bytes: field("VmHWM")? * 1024,
            anonymous_bytes: field("RssAnon")? * 1024,
            descriptors: fs::read_dir(process.join("fd"))?.count() as u64,
            threads: field("Threads")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_a_footprint() {
        let footprint = Footprint::of(std::process::id()).unwrap();
        assert!(footprint.resident_bytes > footprint.anonymous_bytes && footprint.anonymous_bytes > 0);
        assert!(footprint.descriptors >= 3 && footprint.threads >= 1);
    }
}
