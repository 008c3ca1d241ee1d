//! How long pods wait for their enrolment when many start at once, and how much of the node's memory many pods take.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::Serialize;
use tokio::task::JoinSet;

use super::{
    actor::{Actor, Order, Reply},
    kernel::MapUse,
    node::{Footprint, Node, PROXY_UID},
    target::Target,
};

/// Timeout of a proxy's wait for both directions.
const ATTESTED_WITHIN: Duration = Duration::from_secs(60);

/// One burst of starting pods.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Burst {
    /// From the proxy's listen to the attestation of both directions, milliseconds.
    pub attested_ms: Quantiles,
    /// Time of the agent's answer to an enrolment, milliseconds.
    pub enrolled_ms: Quantiles,
}

/// Two points of a distribution, and its maximum.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Quantiles {
    /// Half are at most this.
    pub p50: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// The largest value.
    pub max: f64,
}

/// Resources of this many pods.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Enrolled pods.
    pub pods: u32,
    /// The agent's process.
    pub agent: Footprint,
    /// The pinned maps.
    pub maps: BTreeMap<String, MapUse>,
    /// The programs, bytes.
    pub program_bytes: u64,
}

/// The addresses of a proxy's listeners.
pub fn proxy_addresses() -> Vec<SocketAddr> {
    vec![
        SocketAddr::from((Ipv4Addr::LOCALHOST, 4140)),
        SocketAddr::from((Ipv6Addr::LOCALHOST, 4140)),
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 4143)),
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, 4143)),
        // Without it, the agent would look for one among the pod's processes.
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 4191)),
    ]
}

/// Starts this many pods at once: every proxy listens and polls, and the agent is notified of every pod.
///
/// # Errors
/// A pod is not attested within a minute.
pub async fn burst(node: &mut Node, pods: u32) -> anyhow::Result<Burst> {
    let mut starting = Vec::new();
    for _ in 0..pods {
        let pod = node.add_pod().await?;
        let actor = node.meshed_actor(&pod).await?;
        starting.push((pod, actor));
    }
    // Each has answered once before the measurement, which excludes the start of processes.
    for (_, actor) in &mut starting {
        actor.order(&Order::Rest).await?;
    }
    node.at_rest().await?;
    let (mut proxies, mut enrolments) = (JoinSet::new(), JoinSet::new());
    let mut networks = Vec::new();
    for (pod, actor) in starting {
        proxies.spawn(listen_and_ask(actor));
        let api = node.pods()?;
        networks.push(pod.clone());
        enrolments.spawn(async move {
            let started = Instant::now();
            api.enrol(&pod).await.map(|()| started.elapsed().as_secs_f64() * 1e3)
        });
    }
    let (mut attested, mut enrolled, mut actors) = (Vec::new(), Vec::new(), Vec::new());
    while let Some(done) = enrolments.join_next().await {
        enrolled.push(done??);
    }
    while let Some(done) = proxies.join_next().await {
        let (milliseconds, actor) = done??;
        attested.push(milliseconds);
        actors.push(actor);
    }
    for actor in actors {
        actor.kill().await?;
    }
    for pod in networks {
        node.pods()?.withdraw(&pod).await?;
        node.remove_pod(&pod).await?;
    }
    Ok(Burst { attested_ms: Quantiles::of(attested), enrolled_ms: Quantiles::of(enrolled) })
}

async fn listen_and_ask(mut actor: Actor) -> anyhow::Result<(f64, Actor)> {
    actor.order(&Order::Listen(PROXY_UID, proxy_addresses())).await?;
    let milliseconds = u64::try_from(ATTESTED_WITHIN.as_millis())?;
    match actor.tell(&Order::Attest(milliseconds)).await? {
        Reply::Attested(Some(microseconds)) => Ok((microseconds as f64 / 1e3, actor)),
        Reply::Attested(None) => bail!("a pod was not attested within {ATTESTED_WITHIN:?}"),
        other => bail!("unexpected {other:?}"),
    }
}

/// Resources of the agent and the kernel without pods, then with this many.
///
/// # Errors
/// A pod cannot be enrolled.
pub async fn memory(node: &mut Node, pods: u32) -> anyhow::Result<[Memory; 2]> {
    let empty = Memory::of(node, 0).await?;
    for _ in 0..pods {
        let pod = node.add_pod().await?;
        node.pods()?.enrol(&pod).await?;
    }
    let enrolled = node.status().await?.pods.len();
    anyhow::ensure!(enrolled == pods as usize, "{enrolled} of {pods} pods are enrolled");
    Ok([empty, Memory::of(node, pods).await?])
}

impl Memory {
    async fn of(node: &Node, pods: u32) -> anyhow::Result<Self> {
        node.at_rest().await?;
        let pinned = node.pinned();
        Ok(Self {
            pods,
            agent: node.footprint()?,
            maps: pinned.maps()?,
            program_bytes: pinned.program_bytes().context("ask for the programs' memory")?,
        })
    }

    /// The kernel's memory for all maps, bytes.
    #[must_use]
    pub fn map_bytes(&self) -> u64 {
        self.maps.values().map(|map| map.bytes).sum()
    }
}

/// The targets for starting pods.
#[must_use]
pub fn burst_targets(bursts: &[Burst]) -> Vec<Target> {
    let of = |value: fn(&Burst) -> f64| bursts.iter().map(value).collect();
    vec![Target::at_most("listening to attested p99, pods at once", "ms", 20.0, of(|burst| burst.attested_ms.p99))]
}

/// The targets for memory.
#[must_use]
pub fn memory_targets([none, many]: &[Memory; 2]) -> Vec<Target> {
    let mib = |bytes: u64| vec![bytes as f64 / f64::from(1 << 20)];
    vec![
        Target::at_most("agent's resident memory, many pods", "MiB", 16.0, mib(many.agent.resident_bytes)),
        Target::at_most("kernel maps and programs, many pods", "MiB", 6.0, mib(many.map_bytes() + many.program_bytes)),
        Target::at_most("kernel maps and programs, no pod", "MiB", 1.5, mib(none.map_bytes() + none.program_bytes)),
    ]
}

impl Quantiles {
    /// Of these values.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let at = |quantile: f64| {
            let index = (values.len() as f64 * quantile) as usize;
            values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or_default()
        };
        Self { p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_is_the_last_of_a_hundred() {
        let quantiles = Quantiles::of((1..=100).map(f64::from).collect());
        assert_eq!((quantiles.p50, quantiles.p99, quantiles.max), (51.0, 100.0, 100.0));
    }
}
