//! The places of a run: sandboxes with a client's and a server's pod, the load's processes in them, the proxies
//! between, and a pod outside the mesh that floods the server's proxy. One sandbox has no mesh, for direct connections
//! and the HAProxys; the others have one each.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use weft_sandbox::{client::Sandbox, state::PodState};
use weft_test_kit::{
    actor::Place,
    manifests::Manifests,
    mesh::{ControlPlane, Interception, Mesh, Options, unique_name},
    wait::until,
};

use super::{
    endpoints::{ManyEndpoints, Surroundings},
    haproxy::{Hop, Pair},
    rows::{Contender, Protocol},
    tap::Tap,
};
use crate::{
    actor::{self, Actor},
    load::{Flood, FloodCounts, Load, Measured, Order, Reply, Shape, Started, server},
};

const NAMESPACE: &str = "bench";
const MANIFEST: &str = include_str!("pods.yaml");
/// The container with the proxy, as the injector names it.
const PROXY: &str = "linkerd-proxy";
/// Time for the proxies to answer after their start.
const SERVES_WITHIN: Duration = Duration::from_secs(20);
/// The message of a proxy's log that it has its certificate.
const CERTIFIED: &str = "certified identity";
/// Time for a line of the log to be in its file.
const LOGS_WITHIN: Duration = Duration::from_secs(5);
/// Time for the control plane to read ten thousand pods.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(120);
/// Time in which a proxy forgets an address that is not used: `LINKERD2_PROXY_OUTBOUND_DISCOVERY_IDLE_TIMEOUT`, 5 s,
/// and its sweep.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(8);
/// A measurement that only shows that there is a way.
const TRIAL: Duration = Duration::from_millis(100);

/// A running sandbox with its processes.
pub(crate) struct Site {
    kind: Kind,
    mesh: Mesh,
    client: Actor,
    server: Actor,
    /// From the first flood on.
    flooder: Option<Actor>,
    server_pid: u32,
    server_ip: String,
    service_ip: Option<IpAddr>,
    pairs: BTreeMap<Contender, Pair>,
}

/// The processes between client and server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proxies {
    /// In the client's pod.
    pub(crate) outbound: u32,
    /// In the server's pod.
    pub(super) inbound: u32,
}

/// What a sandbox is for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// No mesh.
    Plain,
    /// A mesh of the present programs.
    Present,
    /// The same with two workers in each proxy.
    Workers2,
    /// A mesh of the programs in this directory.
    Former(PathBuf),
}

impl Kind {
    fn of(contender: Contender, baseline: Option<&PathBuf>) -> anyhow::Result<Self> {
        Ok(match contender {
            Contender::Direct
            | Contender::HaproxyHttp1
            | Contender::HaproxyHttp1Flooded
            | Contender::HaproxyHttp2
            | Contender::HaproxyTcp => Self::Plain,
            Contender::Weft | Contender::Tapped | Contender::Flooded | Contender::Opaque => Self::Present,
            Contender::Workers2 => Self::Workers2,
            Contender::Baseline => Self::Former(baseline.context("no directory of a baseline")?.clone()),
        })
    }
}

/// Starts the sandboxes that these contenders need, and adds each to `sites` as soon as it is to be stopped.
///
/// # Errors
/// One does not start, or its connections take another path, so that its numbers would mean something else.
pub(crate) async fn start(
    sites: &mut Vec<Site>,
    contenders: &[Contender],
    baseline: Option<&PathBuf>,
) -> anyhow::Result<()> {
    for contender in contenders {
        let kind = Kind::of(*contender, baseline)?;
        if !sites.iter().any(|site| site.kind == kind) {
            let name = contender.label();
            sites.push(Site::start(kind).await.with_context(|| format!("start the sandbox of {name}"))?);
        }
        let site = find(sites, *contender)?;
        site.add(*contender)?;
        site.check(*contender).await?;
    }
    Ok(())
}

/// The site of a contender.
///
/// # Errors
/// It was not started.
pub(crate) fn find(sites: &mut [Site], contender: Contender) -> anyhow::Result<&mut Site> {
    let serves = |site: &&mut Site| match contender {
        Contender::Weft | Contender::Tapped | Contender::Flooded | Contender::Opaque => site.kind == Kind::Present,
        Contender::Workers2 => site.kind == Kind::Workers2,
        Contender::Baseline => matches!(site.kind, Kind::Former(_)),
        _ => site.kind == Kind::Plain,
    };
    sites.iter_mut().find(serves).with_context(|| format!("{} does not run", contender.label()))
}

impl Site {
    async fn start(kind: Kind) -> anyhow::Result<Self> {
        let (inject, interception, control_plane) = match kind {
            Kind::Plain => ("disabled", Interception::None, ControlPlane::None),
            Kind::Present | Kind::Workers2 | Kind::Former(_) => ("enabled", Interception::Ebpf, ControlPlane::Weft),
        };
        let opaque = format!("{},{},{}", server::OPAQUE_HTTP1, server::OPAQUE_HTTP2, server::TCP);
        let manifests = Manifests::empty()?;
        let workers = if kind == Kind::Workers2 { "2" } else { "1" };
        let pods = MANIFEST.replace("{inject}", inject).replace("{opaque}", &opaque).replace("{workers}", workers);
        manifests.write("pods.yaml", &pods)?;
        let programs = match &kind {
            Kind::Former(directory) => Some(directory.clone()),
            Kind::Plain | Kind::Present | Kind::Workers2 => None,
        };
        let name = unique_name("bench-proxy");
        let mesh = Mesh::start(manifests, Options { name, interception, control_plane, programs, proxy: None }).await?;
        match Self::inhabit(&mesh).await {
            Ok((client, server)) => {
                let service_ip = mesh.service_ips().await?.into_iter().next();
                let service_ip = service_ip.map(|ip| ip.parse()).transpose().context("the Service's address")?;
                let server_ip = mesh.pod(NAMESPACE, "server").await?.ip;
                let server_pid = server.id().context("the server ended")?;
                let pairs = BTreeMap::new();
                Ok(Self { kind, mesh, client, server, flooder: None, server_pid, server_ip, service_ip, pairs })
            }
            Err(error) => {
                mesh.stop().await?;
                Err(error)
            }
        }
    }

    /// Starts the processes of the load in both pods, in the cgroups of their applications.
    async fn inhabit(mesh: &Mesh) -> anyhow::Result<(Actor, Actor)> {
        let mut server = Actor::start(&place(mesh, "server")?).await?;
        server.order(&actor::Order::Load(Order::Serve)).await?;
        Ok((Actor::start(&place(mesh, "client")?).await?, server))
    }

    /// Starts what a contender needs besides the sandbox.
    fn add(&mut self, contender: Contender) -> anyhow::Result<()> {
        let contender = contender.unflooded();
        if self.pairs.contains_key(&contender) {
            return Ok(());
        }
        let hop = match contender {
            Contender::HaproxyHttp1 => Hop::Http1,
            Contender::HaproxyHttp2 => Hop::Http2,
            Contender::HaproxyTcp => Hop::Tcp,
            Contender::Direct
            | Contender::Weft
            | Contender::Baseline
            | Contender::Workers2
            | Contender::Tapped
            | Contender::Flooded
            | Contender::HaproxyHttp1Flooded
            | Contender::Opaque => return Ok(()),
        };
        let pair = Pair::start(&Sandbox::open(self.mesh.name())?, hop, &self.server_ip)?;
        self.pairs.insert(contender, pair);
        Ok(())
    }

    /// Waits until a contender answers, and checks that our proxies use mutual TLS.
    async fn check(&mut self, contender: Contender) -> anyhow::Result<()> {
        let shape = match contender {
            Contender::HaproxyTcp => Shape::RoundTrip,
            _ => Shape::Http1 { connections: 1 },
        };
        let protocol = if shape == Shape::RoundTrip { Protocol::Tcp } else { Protocol::Http1 };
        let answers = until(SERVES_WITHIN, async || {
            let target = self.target(contender, protocol)?;
            let measured = self.measure(contender, target, shape, Duration::ZERO, TRIAL).await?;
            let problem = measured.problem.unwrap_or_default();
            anyhow::ensure!(measured.count > 0 && measured.failures == 0, "no answer: {problem}");
            Ok(())
        });
        let answered = answers.await;
        let said = self.pairs.get_mut(&contender.unflooded()).map(Pair::started).unwrap_or_default();
        answered.with_context(|| format!("{} does not serve: {said}", contender.label()))?;
        if self.kind != Kind::Plain {
            let opened = self.mesh.metrics(NAMESPACE, "client").await?.connections_to(&[self.server_ip.clone()].into());
            let good = opened.mtls > 0 && opened.plaintext == 0;
            anyhow::ensure!(good, "{}: not every connection has mutual TLS: {opened:?}", contender.label());
        }
        Ok(())
    }

    /// Sends load by way of a contender. The CPU times are those of the server, then of the contender's outbound and
    /// inbound proxies.
    ///
    /// # Errors
    /// A process ended.
    pub(crate) async fn measure(
        &mut self,
        contender: Contender,
        target: SocketAddr,
        shape: Shape,
        warm_up: Duration,
        time: Duration,
    ) -> anyhow::Result<Measured> {
        let mut processes = vec![self.server_pid];
        processes.extend(self.proxies(contender)?.iter().flat_map(|proxies| [proxies.outbound, proxies.inbound]));
        let load = Load { shape, target, warm_up, time, processes };
        let tap = if contender == Contender::Tapped { Some(Tap::start(self.mesh.name(), NAMESPACE)?) } else { None };
        let reply = self.client.tell(&actor::Order::Load(Order::Load(load))).await?;
        if let Some(tap) = tap {
            tap.finish().await?;
        }
        match reply {
            actor::Reply::Loaded(Reply::Measured(measured)) => Ok(measured),
            other => bail!("unexpected {other:?}"),
        }
    }

    /// Floods the proxy in the server's pod, from a pod outside the mesh, until [`Self::end_flood`] or the next flood.
    ///
    /// # Errors
    /// The flood is not in force in time.
    pub(super) async fn flood(&mut self, contender: Contender, flood: Flood) -> anyhow::Result<()> {
        let server_ip = self.server_ip.parse().context("the server's address")?;
        let target = match self.pairs.get(&contender.unflooded()) {
            Some(pair) => pair.flooded(server_ip, flood),
            None => SocketAddr::new(server_ip, flooded_port(flood)),
        };
        let flooder = match &mut self.flooder {
            Some(flooder) => flooder,
            None => self.flooder.insert(Actor::start(&place(&self.mesh, "flooder")?).await?),
        };
        flooder.order(&actor::Order::Load(Order::Flood { flood, target })).await
    }

    /// Ends the flood.
    ///
    /// # Errors
    /// When no flood was begun, or its process has ended.
    pub(super) async fn end_flood(&mut self) -> anyhow::Result<FloodCounts> {
        let flooder = self.flooder.as_mut().context("there was no flood")?;
        match flooder.tell(&actor::Order::Load(Order::EndFlood)).await? {
            actor::Reply::Loaded(Reply::Flooded(counts)) => Ok(counts),
            other => bail!("unexpected {other:?}"),
        }
    }

    /// Opens connections by way of a contender, and keeps them until the next are to be opened or the site ends.
    ///
    /// # Errors
    /// A connection failed.
    pub(super) async fn hold(
        &mut self,
        contender: Contender,
        protocol: Protocol,
        connections: u32,
    ) -> anyhow::Result<()> {
        let target = self.target(contender, protocol)?;
        let connections = usize::try_from(connections)?;
        let order = Order::Hold { target, http: protocol == Protocol::Http1, connections };
        self.client.order(&actor::Order::Load(order)).await
    }

    /// Kills the client's proxy. Returns when the next one started, when it was certified and when it was ready.
    ///
    /// # Errors
    /// It is not ready in time, or its log does not say when it was certified.
    pub(super) async fn restart(&mut self, contender: Contender) -> anyhow::Result<(Started, SystemTime)> {
        let pid = self.proxies(contender)?.context("no proxy to start")?.outbound;
        let (cgroup, log) = {
            let state = self.mesh.state()?;
            let pod = pod(&state.pods, "client")?;
            let proxy = pod.containers.iter().find(|container| container.name == PROXY).context("no proxy")?;
            (pod.cgroup.join(PROXY), proxy.log.clone())
        };
        let reply = self.client.tell(&actor::Order::Load(Order::Restart { pid, cgroup })).await?;
        let actor::Reply::Loaded(Reply::Started(started)) = reply else { bail!("unexpected {reply:?}") };
        let certified = until(LOGS_WITHIN, async || {
            let times = certified(&fs::read_to_string(&log)?);
            times.filter(|time| *time >= started.began).context("the proxy's log does not say when it was certified")
        });
        Ok((started, certified.await?))
    }

    /// The processes of a contender; none without proxies.
    ///
    /// # Errors
    /// One has ended.
    pub(crate) fn proxies(&self, contender: Contender) -> anyhow::Result<Option<Proxies>> {
        if let Some(pair) = self.pairs.get(&contender.unflooded()) {
            let (outbound, inbound) = pair.pids()?;
            return Ok(Some(Proxies { outbound, inbound }));
        }
        if self.kind == Kind::Plain {
            return Ok(None);
        }
        let state = self.mesh.state()?;
        let proxy = |name: &str| -> anyhow::Result<u32> {
            let proxy = pod(&state.pods, name)?.containers.iter().find(|container| container.name == PROXY);
            proxy.and_then(|proxy| proxy.pid).with_context(|| format!("the {name}'s proxy does not run"))
        };
        Ok(Some(Proxies { outbound: proxy("client")?, inbound: proxy("server")? }))
    }

    /// Publishes a Service with `number` endpoints, and waits until requests to it are answered.
    ///
    /// # Errors
    /// They are not answered in time.
    pub(crate) async fn publish_endpoints(
        &mut self,
        contender: Contender,
        number: u32,
    ) -> anyhow::Result<ManyEndpoints> {
        let surroundings = {
            let state = self.mesh.state()?;
            let server = pod(&state.pods, "server")?.netns.clone();
            let published = Sandbox::open(self.mesh.name())?.layout().published_dir();
            let server_ip = self.server_ip.parse().context("the server's address")?;
            Surroundings { published, node: state.node_netns.clone(), server, server_ip }
        };
        let endpoints = ManyEndpoints::publish(&surroundings, number).await?;
        let answers = until(PUBLISHED_WITHIN, async || {
            let shape = Shape::Http1 { connections: 1 };
            let target = ManyEndpoints::target();
            let measured = self.measure(contender, target, shape, Duration::ZERO, TRIAL).await?;
            if measured.count == 0 || measured.failures > 0 {
                // While an address without a policy is in use, the proxy does not ask for one again.
                tokio::time::sleep(FORGOTTEN_AFTER).await;
                bail!("no answer: {}", measured.problem.unwrap_or_default());
            }
            Ok(())
        });
        answers.await.context("the Service with many endpoints does not answer")?;
        Ok(endpoints)
    }

    /// The metrics of the client's proxy.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) async fn scrape(&self) -> anyhow::Result<String> {
        self.mesh.admin(NAMESPACE, "client", "/metrics").await
    }

    /// Where the client dials.
    pub(super) fn target(&self, contender: Contender, protocol: Protocol) -> anyhow::Result<SocketAddr> {
        if let Some(pair) = self.pairs.get(&contender.unflooded()) {
            return Ok(pair.target(protocol));
        }
        let port = match (protocol, contender) {
            (Protocol::Http1, Contender::Opaque) => server::OPAQUE_HTTP1,
            (Protocol::Http2, Contender::Opaque) => server::OPAQUE_HTTP2,
            (Protocol::Http1, _) => server::HTTP1,
            (Protocol::Http2, _) => server::HTTP2,
            (Protocol::Tcp, _) => server::TCP,
        };
        let ip = match contender {
            Contender::Direct => self.server_ip.parse().context("the server's address")?,
            _ => self.service_ip.context("no Service")?,
        };
        Ok(SocketAddr::new(ip, port))
    }

    /// Stops the sandbox; the processes in its pods end with it.
    ///
    /// # Errors
    /// Something could not be removed.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        let Self { mesh, client, server, flooder, .. } = self;
        for actor in [client, server].into_iter().chain(flooder) {
            actor.kill().await?;
        }
        mesh.stop().await
    }
}

/// When a proxy was certified last, from its log.
fn certified(log: &str) -> Option<SystemTime> {
    let line = log.lines().rfind(|line| line.contains(CERTIFIED))?;
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    humantime::parse_rfc3339(line["timestamp"].as_str()?).ok()
}

/// The application's port behind our proxy that a flood's protocol is for.
fn flooded_port(flood: Flood) -> u16 {
    match flood {
        Flood::Heads { .. } | Flood::Hellos { .. } | Flood::Connections { .. } => server::HTTP1,
        Flood::Resets { .. } => server::HTTP2,
    }
}

/// Where the process of a pod's load runs.
fn place(mesh: &Mesh, name: &str) -> anyhow::Result<Place> {
    let state = mesh.state()?;
    let pod = pod(&state.pods, name)?;
    Ok(Place::of_root(&pod.netns, pod.cgroup.join(name)))
}

fn pod<'a>(pods: &'a [PodState], name: &str) -> anyhow::Result<&'a PodState> {
    let found = pods.iter().find(|pod| pod.namespace == NAMESPACE && pod.name == name);
    found.with_context(|| format!("no pod {NAMESPACE}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_certificate_counts() {
        let log = [("10.287067", "certified identity"), ("11.500000", "certified identity"), ("12.000000", "other")].map(
            |(seconds, message)| {
                let begin = format!(r#"{{"timestamp":"2026-11-23T12:23:{seconds}Z","level":"INFO""#);
                format!(r#"{begin},"fields":{{"message":"{message}","server.id":"a"}},"target":"weft_proxy","threadId":"ThreadId(1)"}}"#)
            },
        );
        let time = certified(&log.join("\n")).unwrap();
        assert_eq!(humantime::format_rfc3339_micros(time).to_string(), "2026-11-23T12:23:11.500000Z");
        assert!(certified(&log[2]).is_none());
        assert!(certified("[     0.287067s]  INFO ThreadId(01) weft_proxy: certified identity\n").is_none());
    }
}
