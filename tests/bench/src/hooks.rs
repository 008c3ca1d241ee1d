//! The cost of the programs, hook by hook: the same system calls in pods that differ only in the interception.
//!
//! Four pods on one node take turns in every repetition:
//!
//! ```text
//! direct     no program runs, no rule is there     dials the listener itself
//! iptables   linkerd-init's rules                  dials another address and ends at the same listener
//! ebpf       enrolled                              the same
//! unmeshed   not enrolled, but below the programs  dials the listener itself
//! ```
//!
//! All connections end at a listener in the pod, so that their paths are equally long.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
};

use anyhow::{Context as _, bail, ensure};
use aya::sys::{Stats, enable_stats};
use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;
use weft_proto::agent::Direction;
use weft_test_kit::agent::{REDIRECT, verdicts};

use super::{
    actor::{Actor, Connected, Flooded, Nanoseconds, Order, Reply},
    kernel::Runs,
    node::{APPLICATION_UID, Node, PROXY_UID},
    result::{median, spread},
    target::{Target, number},
};

/// An unused address (RFC 5737): an answer shows that the destination was replaced.
const ELSEWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(192, 0, 2, 10)), 80);
const OUTBOUND_PORT: u16 = 4140;
const INBOUND_PORT: u16 = 4143;
/// An application's port, without a listener.
const APPLICATION_PORT: u16 = 8080;
/// Pods that are flooded at once.
const FLOODED_PODS: usize = 2;

/// Amount of measurements.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Number of turns of each way.
    pub rounds: u32,
    /// Connections per turn and direction.
    pub connects: u32,
    /// Blocks of 64 socket options read per turn.
    pub blocks: u32,
    /// Duration of the flood of connections, milliseconds.
    pub flood_ms: u64,
}

/// The kind of interception.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// None.
    Direct,
    /// linkerd-init's rules.
    Iptables,
    /// The programs, in an enrolled pod.
    Ebpf,
    /// The programs, in a pod that is not enrolled.
    Unmeshed,
}

/// One turn.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Turn {
    /// From the pod.
    pub outbound: Connected,
    /// To the pod; the client is in another one.
    pub inbound: Connected,
    /// `getsockopt` of an ordinary option.
    pub option: Nanoseconds,
}

/// The cost of a program according to the kernel.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cost {
    /// Runs per connection, or per system call.
    pub runs_each: f64,
    /// Nanoseconds per run.
    pub ns_per_run: f64,
}

/// Connections opened as fast as possible.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Flood {
    /// Rate of all pods together.
    pub connections_per_second: f64,
    /// Connections.
    pub connections: u64,
    /// Connections whose accepted socket returned a destination other than the dialled one.
    pub wrong: u64,
    /// Increase of the agent's counter of flow misses.
    pub flow_misses: u64,
    /// Increase of its counter of redirected connections.
    pub redirected: u64,
}

/// All measurements.
#[derive(Debug, Serialize)]
pub struct Hooks {
    /// Every turn, by way, in order.
    pub turns: BTreeMap<Way, Vec<Turn>>,
    /// The kernel's run statistics, by operation and program.
    pub programs: BTreeMap<&'static str, BTreeMap<String, Cost>>,
    /// The result of opening connections as fast as possible.
    pub flood: Flood,
}

struct Probe {
    way: Way,
    outbound: Actor,
    outbound_target: SocketAddr,
    inbound: Actor,
    inbound_target: SocketAddr,
}

type Value = fn(&Turn) -> f64;

/// Names and units of the rows.
const ROWS: [(&str, Value); 9] = [
    ("connect p50, us", |turn| turn.outbound.connect.p50 / 1e3),
    ("connect p99, us", |turn| turn.outbound.connect.p99 / 1e3),
    ("SO_ORIGINAL_DST of it p50, us", |turn| turn.outbound.original.p50 / 1e3),
    ("connect from outside p50, us", |turn| turn.inbound.connect.p50 / 1e3),
    ("connect from outside p99, us", |turn| turn.inbound.connect.p99 / 1e3),
    ("SO_ORIGINAL_DST of it p50, us", |turn| turn.inbound.original.p50 / 1e3),
    ("both together p50, us", |turn| (turn.outbound.connect.p50 + turn.inbound.connect.p50) / 1e3),
    ("getsockopt p50, us", |turn| turn.option.p50 / 1e3),
    ("getsockopt p99, us", |turn| turn.option.p99 / 1e3),
];

/// Measures on this node, on which the agent runs.
///
/// # Errors
/// A connection fails or takes another path than expected, so that its time would mean something else.
pub async fn measure(node: &mut Node, effort: Effort) -> anyhow::Result<Hooks> {
    let mut probes = Vec::new();
    for way in Way::ALL {
        probes.push(Probe::start(node, way).await?);
    }
    let enrolled = node.status().await?.pods.len();
    ensure!(enrolled == 1, "{enrolled} pods are enrolled in place of one");
    let mut turns = BTreeMap::<Way, Vec<Turn>>::new();
    for round in 0..=effort.rounds {
        for probe in &mut probes {
            let turn = probe.turn(effort).await?;
            // The first turn fills caches and tables.
            if round > 0 {
                turns.entry(probe.way).or_default().push(turn);
            }
        }
        probes.rotate_left(1);
    }
    probes.sort_by_key(|probe| probe.way);
    let programs = account(node, &mut probes, effort).await?;
    let flood = flood(node, effort).await?;
    Ok(Hooks { turns, programs, flood })
}

impl Way {
    /// All ways, in the order of the table.
    pub const ALL: [Self; 4] = [Self::Direct, Self::Iptables, Self::Ebpf, Self::Unmeshed];

    fn label(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Iptables => "iptables",
            Self::Ebpf => "ebpf",
            Self::Unmeshed => "unmeshed",
        }
    }

    fn is_redirected(self) -> bool {
        matches!(self, Self::Iptables | Self::Ebpf)
    }
}

impl Probe {
    async fn start(node: &mut Node, way: Way) -> anyhow::Result<Self> {
        let (pod, client) = (node.add_pod().await?, node.add_pod().await?);
        match way {
            Way::Iptables => node.install_iptables(&pod).await?,
            Way::Ebpf => node.pods()?.enrol(&pod).await?,
            Way::Direct | Way::Unmeshed => {}
        }
        let below_programs = matches!(way, Way::Ebpf | Way::Unmeshed);
        let start = async || if below_programs { node.meshed_actor(&pod).await } else { node.plain_actor(&pod).await };
        let (mut outbound, mut inbound) = (start().await?, start().await?);
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        // A pod outside the mesh has no process that could be taken for its proxy.
        let listener = if way.is_redirected() { PROXY_UID } else { APPLICATION_UID };
        outbound.order(&Order::Listen(listener, vec![loopback(OUTBOUND_PORT)])).await?;
        outbound.order(&Order::Pin).await?;
        outbound.order(&Order::Become(APPLICATION_UID)).await?;
        let anywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, INBOUND_PORT));
        inbound.order(&Order::Listen(listener, vec![anywhere])).await?;
        inbound.order(&Order::Pin).await?;
        // The client is elsewhere, so that only the inbound path is measured.
        inbound.order(&Order::Enter(node.plain_place(&client))).await?;
        let (outbound_target, inbound_port) =
            if way.is_redirected() { (ELSEWHERE, APPLICATION_PORT) } else { (loopback(OUTBOUND_PORT), INBOUND_PORT) };
        let inbound_target = SocketAddr::from((pod.ip, inbound_port));
        Ok(Self { way, outbound, outbound_target, inbound, inbound_target })
    }

    async fn turn(&mut self, effort: Effort) -> anyhow::Result<Turn> {
        Ok(Turn {
            outbound: self.connect_out(effort.connects).await?,
            inbound: self.connect_in(effort.connects).await?,
            option: self.options(effort.blocks).await?,
        })
    }

    async fn connect_out(&mut self, count: u32) -> anyhow::Result<Connected> {
        let original = self.way.is_redirected();
        let order = Order::Connect { target: self.outbound_target, port: OUTBOUND_PORT, count, original };
        connected(self.outbound.tell(&order).await.with_context(|| format!("{} outbound", self.way.label()))?)
    }

    async fn connect_in(&mut self, count: u32) -> anyhow::Result<Connected> {
        let original = self.way.is_redirected();
        let order = Order::Connect { target: self.inbound_target, port: INBOUND_PORT, count, original };
        connected(self.inbound.tell(&order).await.with_context(|| format!("{} inbound", self.way.label()))?)
    }

    async fn options(&mut self, blocks: u32) -> anyhow::Result<Nanoseconds> {
        match self.outbound.tell(&Order::Options(blocks)).await? {
            Reply::Timed(nanoseconds) => Ok(nanoseconds),
            other => bail!("unexpected {other:?}"),
        }
    }
}

fn connected(reply: Reply) -> anyhow::Result<Connected> {
    match reply {
        Reply::Connected(connected) => Ok(connected),
        other => bail!("unexpected {other:?}"),
    }
}

/// The kernel's run statistics, after the measurements, because collecting them takes time too.
async fn account(
    node: &Node,
    probes: &mut [Probe],
    effort: Effort,
) -> anyhow::Result<BTreeMap<&'static str, BTreeMap<String, Cost>>> {
    let _kept = enable_stats(Stats::RunTime).context("have the kernel count the programs' time (Linux 5.8)")?;
    let pinned = node.pinned();
    let mut account = BTreeMap::new();
    for probe in probes {
        let names = match probe.way {
            Way::Ebpf => ["outbound", "inbound", "getsockopt"],
            Way::Unmeshed => ["unmeshed outbound", "unmeshed inbound", "unmeshed getsockopt"],
            Way::Direct | Way::Iptables => continue,
        };
        for (index, name) in names.into_iter().enumerate() {
            let before = pinned.runs()?;
            let times = match index {
                0 => probe.connect_out(effort.connects).await.map(|_| effort.connects)?,
                1 => probe.connect_in(effort.connects).await.map(|_| effort.connects)?,
                _ => probe.options(effort.blocks).await.map(|_| effort.blocks * 64)?,
            };
            let costs = pinned.runs()?.into_iter().filter_map(|(program, runs)| {
                let runs = runs.since(before.get(&program).copied().unwrap_or_default());
                (runs.count > 0).then(|| (program, cost(runs, times)))
            });
            account.insert(name, costs.collect());
        }
    }
    Ok(account)
}

fn cost(runs: Runs, times: u32) -> Cost {
    Cost {
        runs_each: runs.count as f64 / f64::from(times.max(1)),
        ns_per_run: runs.time_ns as f64 / runs.count.max(1) as f64,
    }
}

async fn flood(node: &mut Node, effort: Effort) -> anyhow::Result<Flood> {
    let mut actors = Vec::new();
    for _ in 0..FLOODED_PODS {
        let pod = node.add_pod().await?;
        node.pods()?.enrol(&pod).await?;
        let mut actor = node.meshed_actor(&pod).await?;
        let listener = SocketAddr::from((Ipv4Addr::LOCALHOST, OUTBOUND_PORT));
        actor.order(&Order::Listen(PROXY_UID, vec![listener])).await?;
        actor.order(&Order::Become(APPLICATION_UID)).await?;
        actors.push(actor);
    }
    let before = node.status().await?;
    let mut running = tokio::task::JoinSet::new();
    for mut actor in actors {
        let order = Order::Flood { target: ELSEWHERE, port: OUTBOUND_PORT, milliseconds: effort.flood_ms };
        running.spawn(async move { actor.tell(&order).await });
    }
    let mut sum = Flooded::default();
    while let Some(reply) = running.join_next().await {
        let Reply::Flooded(flooded) = reply?? else { bail!("a flood without an end") };
        sum.connections += flooded.connections;
        sum.wrong += flooded.wrong;
        sum.seconds = sum.seconds.max(flooded.seconds);
    }
    let after = node.status().await?;
    let redirected = |status| verdicts(status, Direction::Outbound, REDIRECT);
    let flood = Flood {
        connections_per_second: sum.connections as f64 / sum.seconds,
        connections: sum.connections,
        wrong: sum.wrong,
        flow_misses: after.flow_misses - before.flow_misses,
        redirected: redirected(&after) - redirected(&before),
    };
    // A counter that misses connections would miss their flow misses too.
    ensure!(
        flood.redirected == flood.connections,
        "{} connections, {} redirected",
        flood.connections,
        flood.redirected
    );
    Ok(flood)
}

impl Hooks {
    /// The targets of these numbers.
    #[must_use]
    pub fn targets(&self) -> Vec<Target> {
        let pairs = |one: Way, other: Way, value: Value, combine: fn(f64, f64) -> f64| -> Vec<f64> {
            let (one, other) = (self.turns.get(&one), self.turns.get(&other));
            let (one, other) = (one.into_iter().flatten(), other.into_iter().flatten());
            one.zip(other).map(|(one, other)| combine(value(one), value(other))).collect()
        };
        let difference = |one: f64, other: f64| one - other;
        let connect: Value = |turn| turn.outbound.connect.p50 / 1e3;
        let accept: Value = |turn| turn.inbound.connect.p50 / 1e3;
        let option: Value = |turn| turn.option.p50 / 1e3;
        let ebpf = pairs(Way::Ebpf, Way::Direct, connect, difference);
        let iptables = pairs(Way::Iptables, Way::Direct, connect, difference);
        let share = ebpf.iter().zip(&iptables).map(|(ebpf, iptables)| ebpf / iptables).collect();
        vec![
            Target::at_most("connect p50, eBPF over direct", "us", 2.0, ebpf),
            Target::at_most("of what iptables adds to connect", "times", 0.3, share),
            Target::at_most(
                "connect p50, unmeshed pod over no programs",
                "us",
                0.25,
                pairs(Way::Unmeshed, Way::Direct, connect, difference),
            ),
            Target::at_most(
                "getsockopt p50, unmeshed pod over no programs",
                "us",
                1.0,
                pairs(Way::Unmeshed, Way::Direct, option, difference),
            ),
            Target::at_most(
                "connect from outside p50, sk_lookup against iptables",
                "times",
                1.0,
                pairs(Way::Ebpf, Way::Iptables, accept, |ebpf, iptables| ebpf / iptables),
            ),
            Target::at_least("new connections", "per second", 20_000.0, vec![self.flood.connections_per_second]),
            Target::at_most("flow misses in them", "connections", 0.0, vec![self.flood.flow_misses as f64]),
            Target::at_most("wrong original destinations in them", "connections", 0.0, vec![self.flood.wrong as f64]),
        ]
    }

    /// The rows by way, as a table for people: median and spread.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(NOTHING);
        table.set_header(std::iter::once("median ± spread of turns").chain(Way::ALL.map(Way::label)));
        for (name, value) in ROWS {
            let cells = Way::ALL.map(|way| {
                let values: Vec<f64> = self.turns.get(&way).into_iter().flatten().map(value).collect();
                let middle = median(values.clone());
                // Not measured for this way.
                if middle == 0.0 { String::new() } else { format!("{} ± {}", number(middle), number(spread(values))) }
            });
            table.add_row(std::iter::once(name.to_owned()).chain(cells));
        }
        table.to_string()
    }

    /// The kernel's run statistics as a table for people.
    #[must_use]
    pub fn account_table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(NOTHING);
        table.set_header(["what", "program", "runs each", "ns per run", "ns each"]);
        for (what, programs) in &self.programs {
            for (program, cost) in programs {
                let cells = [cost.runs_each, cost.ns_per_run, cost.runs_each * cost.ns_per_run].map(number);
                table.add_row([(*what).to_owned(), program.clone()].into_iter().chain(cells));
            }
        }
        table.to_string()
    }
}
