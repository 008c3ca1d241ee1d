//! Pods that start and stop: whether a byte ever bypasses the proxy, and whether anything is left behind.
//!
//! Every pod is a network namespace with a proxy, an application that dials out from its first instant and listens, and
//! a client elsewhere that dials the application as soon as the pod has an address. As with a kubelet, the application
//! starts when the proxy reports that both directions are attested. The proxy forwards nothing, so any byte that the
//! server elsewhere or the application receives has bypassed it.
//!
//! ```text
//! application ──> elsewhere:9000   must end at the pod's proxy (P), never at the server (S)
//! elsewhere ──> application:8080   must end at the pod's proxy (P), never at the application (A)
//! ```
//!
//! A control, the same without enrolment, has to receive bytes: otherwise receiving none would prove nothing.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::Serialize;
use tokio::task::JoinSet;
use weft_test_kit::wait::until;

use super::{
    actor::{Actor, Answered, Order, Received, Reply},
    enrolment::proxy_addresses,
    kernel::Holdings,
    machine::Machine,
    node::{APPLICATION_UID, Footprint, Node, PROXY_UID, Pod, Pods},
};

const SERVER_PORT: u16 = 9000;
const APPLICATION_PORT: u16 = 8080;
const ATTESTED_WITHIN_MS: u64 = 60_000;
/// Attempts of each side before a pod is stopped.
const ATTEMPTS: u64 = 5;
/// Timeout of these attempts.
const TALKS_WITHIN: Duration = Duration::from_secs(20);
/// Polling interval of their count.
const ASKS_EVERY: Duration = Duration::from_millis(10);
/// The agent removes pods that are gone every few seconds; the kernel frees memory later still.
const CLEAN_WITHIN: Duration = Duration::from_secs(30);
/// More growth per pod than this means a leak.
const GROWTH_BYTES_PER_POD: f64 = 4096.0;

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Pods in total.
    pub pods: u32,
    /// Pods that start and stop together.
    pub batch: u32,
    /// Pods of the control.
    pub control: u32,
}

/// How a pod ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The application ends, then the proxy, then the agent is notified.
    Orderly,
    /// The proxy is killed while the application runs; then as above.
    ProxyFirst,
    /// The namespace is removed, and the agent has to detect it.
    Unannounced,
}

/// Totals of all pods of one kind.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Traffic {
    /// Pods that started and stopped.
    pub pods: u32,
    /// Counts of the server elsewhere: must be zero.
    pub server: Received,
    /// Counts of the applications: must be zero.
    pub applications: Received,
    /// Answers to applications.
    pub out: Answered,
    /// Answers to the clients elsewhere.
    pub inward: Answered,
    /// Longest time from the proxy's listen to the attestation of both directions, milliseconds.
    pub attested_ms_max: f64,
}

/// Resources at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// In the kernel.
    pub holdings: Holdings,
    /// The agent's process.
    pub agent: Footprint,
    /// The kernel's memory for maps, bytes.
    pub map_bytes: u64,
}

/// Results of one run.
#[derive(Debug, Serialize)]
pub struct Churn {
    /// The machine of the run.
    pub machine: Machine,
    /// Without enrolment.
    pub control: Traffic,
    /// With it.
    pub meshed: Traffic,
    /// Before the first pod.
    pub before: State,
    /// After the first tenth, for memory: one-time allocations of the agent are complete.
    pub warm: State,
    /// At the end.
    pub after: State,
    /// Duration, seconds.
    pub seconds: f64,
    /// Violations; empty if there are none.
    pub faults: Vec<String>,
}

/// Elsewhere: the server, and a process per client.
struct Elsewhere {
    pod: Pod,
    server: Actor,
}

/// Runs the control, then the pods.
///
/// # Errors
/// A process fails or a pod is not attested in time; violations are in the result instead.
pub async fn run(node: &mut Node, effort: Effort) -> anyhow::Result<Churn> {
    let started = Instant::now();
    node.at_rest().await?;
    let before = State::of(node).await?;
    let mut elsewhere = Elsewhere::start(node).await?;
    let mut control = Traffic::default();
    batch(node, &mut elsewhere, effort.control, false, &mut control).await?;
    control.server = elsewhere.received().await?;
    // A new process, so the server's count starts at zero.
    elsewhere.server.kill().await?;
    let mut elsewhere = Elsewhere::start(node).await?;

    let mut warm = None;
    let mut meshed = Traffic::default();
    while meshed.pods < effort.pods {
        let count = effort.batch.min(effort.pods - meshed.pods);
        batch(node, &mut elsewhere, count, true, &mut meshed).await?;
        println!(
            "{}/{} pods, {:.0} s, unmeshed bytes: {}",
            meshed.pods,
            effort.pods,
            started.elapsed().as_secs_f64(),
            meshed.applications.bytes + elsewhere.received().await?.bytes
        );
        if warm.is_none() && meshed.pods * 10 >= effort.pods {
            warm = Some((meshed.pods, State::of(node).await?));
        }
    }
    meshed.server = elsewhere.received().await?;
    // Everything is to be removed within the deadline; what is left then is a violation.
    let clean = until(CLEAN_WITHIN, async || {
        let after = State::of(node).await.map_err(|error| (State::default(), error.to_string()))?;
        if after.holdings == before.holdings && after.agent.descriptors <= before.agent.descriptors {
            Ok(after)
        } else {
            Err((after, String::new()))
        }
    });
    let after = match clean.await {
        Ok(after) | Err((after, _)) => after,
    };
    let (warm_pods, warm) = warm.unwrap_or_default();
    let mut churn = Churn {
        machine: Machine::here(),
        control,
        meshed,
        before,
        warm,
        after,
        seconds: started.elapsed().as_secs_f64(),
        faults: Vec::new(),
    };
    churn.faults = churn.find_faults(warm_pods);
    Ok(churn)
}

impl Elsewhere {
    async fn start(node: &mut Node) -> anyhow::Result<Self> {
        let pod = node.add_pod().await?;
        let mut server = node.plain_actor(&pod).await?;
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, SERVER_PORT));
        server.order(&Order::Listen(0, vec![address])).await?;
        server.order(&Order::Serve(b'S')).await?;
        Ok(Self { pod, server })
    }

    async fn received(&mut self) -> anyhow::Result<Received> {
        received(&mut self.server).await
    }
}

/// This many pods, from start to end, all at once.
async fn batch(
    node: &mut Node,
    elsewhere: &mut Elsewhere,
    count: u32,
    enrolled: bool,
    traffic: &mut Traffic,
) -> anyhow::Result<()> {
    let mut lives = JoinSet::new();
    for index in 0..count {
        let pod = node.add_pod().await?;
        let end = [End::Orderly, End::ProxyFirst, End::Unannounced][index as usize % 3];
        let client = node.plain_actor(&elsewhere.pod).await?;
        let (proxy, application) = (node.meshed_actor(&pod).await?, node.meshed_actor(&pod).await?);
        let server = SocketAddr::from((elsewhere.pod.ip, SERVER_PORT));
        let agent = if enrolled { Some(node.pods()?) } else { None };
        lives.spawn(async move {
            let life = Life { pod, server, agent, end };
            let lived = life.live(client, proxy, application).await;
            (life.pod, lived)
        });
    }
    while let Some(life) = lives.join_next().await {
        let (pod, lived) = life?;
        node.remove_pod(&pod).await?;
        traffic.add(&lived.with_context(|| format!("pod {}", pod.ip))?);
    }
    Ok(())
}

/// One pod.
struct Life {
    pod: Pod,
    server: SocketAddr,
    /// None in the control.
    agent: Option<Pods>,
    end: End,
}

/// Results of one pod.
struct Lived {
    application: Received,
    out: Answered,
    inward: Answered,
    attested_ms: f64,
}

impl Life {
    async fn live(&self, mut client: Actor, mut proxy: Actor, mut application: Actor) -> anyhow::Result<Lived> {
        client.order(&Order::Dial(SocketAddr::from((self.pod.ip, APPLICATION_PORT)))).await?;
        proxy.order(&Order::Listen(PROXY_UID, proxy_addresses())).await?;
        proxy.order(&Order::Serve(b'P')).await?;
        let mut attested_ms = 0.0;
        if let Some(agent) = &self.agent {
            let ask = Order::Attest(ATTESTED_WITHIN_MS);
            let (enrolled, attested) = tokio::join!(agent.enrol(&self.pod), proxy.tell(&ask));
            enrolled?;
            let Reply::Attested(Some(microseconds)) = attested? else { bail!("the proxy was never attested") };
            attested_ms = microseconds as f64 / 1e3;
        }
        // In this order, so that the application dials first.
        application.order(&Order::Become(APPLICATION_UID)).await?;
        application.order(&Order::Dial(self.server)).await?;
        let listen = vec![SocketAddr::from((Ipv4Addr::UNSPECIFIED, APPLICATION_PORT))];
        application.order(&Order::Listen(APPLICATION_UID, listen)).await?;
        application.order(&Order::Serve(b'A')).await?;
        attempts(&mut application, ATTEMPTS).await?;
        attempts(&mut client, ATTEMPTS).await?;
        if self.end == End::ProxyFirst {
            proxy.kill().await?;
            // Both continue against a pod whose proxy is dead.
            attempts(&mut application, ATTEMPTS).await?;
            attempts(&mut client, ATTEMPTS).await?;
        }
        let (received, out) = (received(&mut application).await?, answered(&mut application).await?);
        application.kill().await?;
        let inward = answered(&mut client).await?;
        client.kill().await?;
        if let (Some(agent), End::Orderly | End::ProxyFirst) = (&self.agent, self.end) {
            agent.withdraw(&self.pod).await?;
        }
        Ok(Lived { application: received, out, inward, attested_ms })
    }
}

/// Waits until this many more attempts have ended.
async fn attempts(actor: &mut Actor, count: u64) -> anyhow::Result<()> {
    let before = answered(actor).await?.attempts;
    let started = Instant::now();
    loop {
        let made = answered(actor).await?.attempts - before;
        if made >= count {
            return Ok(());
        }
        anyhow::ensure!(started.elapsed() < TALKS_WITHIN, "{made} attempts in {TALKS_WITHIN:?}");
        tokio::time::sleep(ASKS_EVERY).await;
    }
}

async fn received(actor: &mut Actor) -> anyhow::Result<Received> {
    match actor.tell(&Order::Received).await? {
        Reply::Received(received) => Ok(received),
        other => bail!("unexpected {other:?}"),
    }
}

async fn answered(actor: &mut Actor) -> anyhow::Result<Answered> {
    match actor.tell(&Order::Answers).await? {
        Reply::Answered(answered) => Ok(answered),
        other => bail!("unexpected {other:?}"),
    }
}

impl Traffic {
    fn add(&mut self, lived: &Lived) {
        self.pods += 1;
        self.applications.connections += lived.application.connections;
        self.applications.bytes += lived.application.bytes;
        sum(&mut self.out, &lived.out);
        sum(&mut self.inward, &lived.inward);
        self.attested_ms_max = self.attested_ms_max.max(lived.attested_ms);
    }

    /// Number of answers from one server, out and in.
    fn answers(&self, who: char) -> u64 {
        [&self.out, &self.inward].into_iter().filter_map(|answered| answered.by.get(&who)).sum()
    }
}

fn sum(total: &mut Answered, one: &Answered) {
    fn add<K: Clone + Ord>(total: &mut BTreeMap<K, u64>, one: &BTreeMap<K, u64>) {
        for (key, count) in one {
            *total.entry(key.clone()).or_default() += count;
        }
    }
    total.attempts += one.attempts;
    add(&mut total.by, &one.by);
    add(&mut total.failed, &one.failed);
}

impl State {
    async fn of(node: &Node) -> anyhow::Result<Self> {
        // One call to the agent first, so that it has allocated what a call needs.
        node.status().await?;
        let pinned = node.pinned();
        let map_bytes = pinned.maps()?.values().map(|map| map.bytes).sum();
        Ok(Self { holdings: pinned.holdings()?, agent: node.footprint()?, map_bytes })
    }
}

impl Churn {
    fn find_faults(&self, warm_pods: u32) -> Vec<String> {
        let mut faults = Vec::new();
        let mut require = |holds: bool, text: String| {
            if !holds {
                faults.push(text);
            }
        };
        let (control, meshed) = (&self.control, &self.meshed);
        require(
            control.server.bytes > 0,
            "the control's server received nothing: the bench detects no traffic".to_owned(),
        );
        require(control.applications.bytes > 0, "the control's applications received nothing".to_owned());
        require(meshed.server.connections == 0, format!("the server received {:?}", meshed.server));
        require(meshed.applications.connections == 0, format!("applications received {:?}", meshed.applications));
        let (server, application) = (meshed.answers('S'), meshed.answers('A'));
        require(server + application == 0, format!("answers around the proxy: {server} out, {application} in"));
        for (direction, answered) in [("out", &meshed.out), ("in", &meshed.inward)] {
            let proxied = answered.by.get(&'P').copied().unwrap_or_default();
            require(proxied >= u64::from(meshed.pods), format!("only {proxied} connections {direction} met a proxy"));
        }
        let (before, after) = (&self.before, &self.after);
        for (map, count) in &after.holdings.entries {
            let was = before.holdings.entries.get(map).copied().unwrap_or_default();
            require(*count == was, format!("map {map} has {count} entries, had {was}"));
        }
        for (what, was, is) in [
            ("programs", before.holdings.programs, after.holdings.programs),
            ("links", before.holdings.links, after.holdings.links),
            ("pins", before.holdings.pins, after.holdings.pins),
        ] {
            require(is == was, format!("{is} {what}, were {was}"));
        }
        let (was, is) = (before.agent.descriptors, after.agent.descriptors);
        require(is <= was, format!("the agent has {is} file descriptors, had {was}"));
        let growth = self.growth_bytes_per_pod(warm_pods);
        require(growth <= GROWTH_BYTES_PER_POD, format!("the agent's memory grew by {growth:.0} bytes a pod"));
        faults
    }

    /// The agent's heap, from the first tenth to the end.
    fn growth_bytes_per_pod(&self, warm_pods: u32) -> f64 {
        let pods = self.meshed.pods.saturating_sub(warm_pods).max(1);
        let (was, is) = (self.warm.agent.anonymous_bytes, self.after.agent.anonymous_bytes);
        (is as f64 - was as f64) / f64::from(pods)
    }

    /// The results as a table for people.
    #[must_use]
    pub fn summary(&self) -> String {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let mut lines = Vec::new();
        for (name, traffic) in [("control", &self.control), ("meshed", &self.meshed)] {
            lines.push(format!(
                "{name}: {} pods; bytes at the server {}, at applications {}; out {:?} failed {:?}; in {:?} failed {:?}",
                traffic.pods,
                traffic.server.bytes,
                traffic.applications.bytes,
                traffic.out.by,
                traffic.out.failed,
                traffic.inward.by,
                traffic.inward.failed
            ));
        }
        for (name, state) in [("before", &self.before), ("warm", &self.warm), ("after", &self.after)] {
            lines.push(format!(
                "{name}: entries {:?}, {} programs, {} links, {} pins; agent {} descriptors, {} threads, {:.1} MiB resident, {:.1} MiB heap; maps {:.2} MiB",
                state.holdings.entries,
                state.holdings.programs,
                state.holdings.links,
                state.holdings.pins,
                state.agent.descriptors,
                state.agent.threads,
                mib(state.agent.resident_bytes),
                mib(state.agent.anonymous_bytes),
                mib(state.map_bytes)
            ));
        }
        lines.push(format!("longest from listening to attested: {:.0} ms", self.meshed.attested_ms_max));
        lines.extend(self.faults.iter().map(|fault| format!("FAULT: {fault}")));
        lines.join("\n")
    }
}
