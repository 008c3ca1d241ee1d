//! The load: what is sent in which shape, by one thread of a process in the client's pod, and what came of it.
//!
//! Latencies are of whole exchanges. A closed loop sends the next request when the last one is answered; an open loop
//! sends at fixed times and counts from these, so that a stall shows in every request that it delayed.

mod flood;
mod http1;
mod http2;
mod meter;
mod open;
pub(crate) mod server;
mod start;
mod tcp;
mod usage;

use std::{cell::Cell, net::SocketAddr, path::PathBuf, rc::Rc, time::Duration};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::task::{JoinSet, LocalSet};

use flood::Running;
pub use flood::{Flood, FloodCounts};
pub use meter::Measured;
use meter::Meter;
use server::Server;
pub use start::Started;
use usage::Cpu;

/// The longest time for one exchange; a longer one is a failure.
const EXCHANGE_WITHIN: Duration = Duration::from_secs(10);
/// Pause before a failed connection is opened again.
const PAUSE: Duration = Duration::from_millis(20);
/// Connections that are opened at once by [`Order::Hold`] and by floods that hold connections.
const OPENING: usize = 32;

/// Orders to the processes in the pods.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Serve every protocol, each on its port.
    Serve,
    /// Send load.
    Load(Load),
    /// Open connections, use each once, and keep them in place of those that were kept before.
    Hold {
        /// Where to.
        target: SocketAddr,
        /// Whether they speak HTTP/1.1, or else plain bytes.
        http: bool,
        /// How many.
        connections: usize,
    },
    /// Flood a proxy, in place of an earlier flood, until [`Order::EndFlood`]. The reply comes when the flood is in
    /// force.
    Flood {
        /// With what.
        flood: Flood,
        /// Where to.
        target: SocketAddr,
    },
    /// End the flood.
    EndFlood,
    /// Kill a proxy in this pod, and wait until the next one in its place is ready.
    Restart {
        /// The proxy's process.
        pid: u32,
        /// The cgroup of its container, in which the next one starts.
        cgroup: PathBuf,
    },
}

/// Replies of these processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// No result.
    Done,
    /// Of [`Order::Load`].
    Measured(Measured),
    /// Of [`Order::EndFlood`].
    Flooded(FloodCounts),
    /// Of [`Order::Restart`].
    Started(Started),
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Load {
    /// What is sent.
    pub(crate) shape: Shape,
    /// Where to.
    pub(crate) target: SocketAddr,
    /// Time before anything counts.
    pub(crate) warm_up: Duration,
    /// Time in which it counts.
    pub(crate) time: Duration,
    /// Processes whose CPU time counts.
    pub(crate) processes: Vec<u32>,
}

/// The shape of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shape {
    /// HTTP/1.1 requests on kept connections.
    Http1 {
        /// Connections, each with one request at a time.
        connections: u32,
    },
    /// HTTP/1.1 requests, each on its own connection.
    Http1New {
        /// Connections at a time.
        connections: u32,
    },
    /// HTTP/1.1 requests at fixed times.
    Open {
        /// Requests per second.
        rate: u32,
        /// Connections, which take turns.
        connections: u32,
    },
    /// HTTP/2 requests.
    Http2 {
        /// Connections.
        connections: u32,
        /// Requests at a time on each.
        streams: u32,
    },
    /// Unary gRPC calls.
    GrpcUnary {
        /// Connections.
        connections: u32,
        /// Calls at a time on each.
        streams: u32,
    },
    /// Messages back and forth on gRPC streams that stay open.
    GrpcStream {
        /// Connections.
        connections: u32,
        /// Streams on each.
        streams: u32,
    },
    /// One stream of bytes from the server.
    Bulk,
    /// 64 bytes back and forth on one connection.
    RoundTrip,
}

/// State of such a process.
#[derive(Debug, Default)]
pub struct Process {
    server: Option<Server>,
    held: Vec<std::net::TcpStream>,
    flood: Option<Running>,
}

impl Process {
    /// Carries out an order.
    ///
    /// # Errors
    /// A connection failed, or a process to be measured ended.
    pub fn follow(&mut self, order: Order) -> anyhow::Result<Reply> {
        raise_file_limit()?;
        match order {
            Order::Serve => self.server = Some(Server::start()?),
            Order::Restart { pid, cgroup } => return Ok(Reply::Started(start::restart(pid, &cgroup)?)),
            Order::Load(load) => return Ok(Reply::Measured(on_this_thread(measure(load))?)),
            Order::Hold { target, http, connections } => {
                // Both sets together may be more than the limit of open files.
                self.held.clear();
                self.held = on_this_thread(hold(target, http, connections))?;
            }
            Order::Flood { flood, target } => {
                if let Some(earlier) = self.flood.take() {
                    earlier.end().context("the earlier flood")?;
                }
                self.flood = Some(Running::start(flood, target, flood::BEGINS_WITHIN)?);
            }
            Order::EndFlood => {
                let counts = self.flood.take().context("there is no flood")?.end()?;
                return Ok(Reply::Flooded(counts));
            }
        }
        Ok(Reply::Done)
    }
}

/// Tasks end with the future.
fn on_this_thread<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(LocalSet::new().run_until(future))
}

async fn measure(load: Load) -> anyhow::Result<Measured> {
    let Load { shape, target, warm_up, time, processes } = load;
    let meter = Rc::new(Meter::new()?);
    let mut workers = JoinSet::new();
    let mut scheduled = false;
    match shape {
        Shape::Http1 { connections } => {
            for _ in 0..connections {
                workers.spawn_local(http1::keep_asking(target, Rc::clone(&meter)));
            }
        }
        Shape::Http1New { connections } => {
            for _ in 0..connections {
                workers.spawn_local(http1::keep_connecting(target, Rc::clone(&meter)));
            }
        }
        Shape::Open { rate, connections } => {
            scheduled = true;
            let plan = open::Plan::new(rate, connections, warm_up, time)?;
            for connection in 0..connections {
                workers.spawn_local(open::keep_to(plan, connection, target, Rc::clone(&meter)));
            }
        }
        Shape::Http2 { connections, streams } => {
            spawn_calls(&mut workers, (connections, streams), http2::Call::Get, target, &meter);
        }
        Shape::GrpcUnary { connections, streams } => {
            spawn_calls(&mut workers, (connections, streams), http2::Call::Unary, target, &meter);
        }
        Shape::GrpcStream { connections, streams } => {
            spawn_calls(&mut workers, (connections, streams), http2::Call::Messages, target, &meter);
        }
        Shape::Bulk => drop(workers.spawn_local(tcp::receive(target, Rc::clone(&meter)))),
        Shape::RoundTrip => drop(workers.spawn_local(tcp::ping(target, Rc::clone(&meter)))),
    }
    tokio::time::sleep(warm_up).await;
    let now = || processes.iter().map(|pid| Cpu::of(*pid)).collect::<anyhow::Result<Vec<_>>>();
    let (before, own_before) = (now()?, Cpu::of(std::process::id())?);
    meter.begin();
    tokio::time::sleep(time).await;
    let (after, own_after) = (now()?, Cpu::of(std::process::id())?);
    let seconds = meter.end();
    if scheduled {
        // What was due and is not answered counts, too: it would otherwise be the slowest that is left out.
        let all = async { while workers.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(EXCHANGE_WITHIN, all).await;
        for _ in 0..workers.len() {
            meter.failed(&anyhow::anyhow!("requests that were due are not answered"));
        }
    }
    workers.shutdown().await;
    let cpu_ns = after.iter().zip(&before).map(|(after, before)| after.since(before)).collect();
    Ok(meter.summary(seconds, cpu_ns, own_after.since(&own_before)))
}

fn spawn_calls(
    workers: &mut JoinSet<()>,
    (connections, streams): (u32, u32),
    call: http2::Call,
    target: SocketAddr,
    meter: &Rc<Meter>,
) {
    for _ in 0..connections {
        workers.spawn_local(http2::keep_calling(target, streams, call, Rc::clone(meter)));
    }
}

async fn hold(target: SocketAddr, http: bool, connections: usize) -> anyhow::Result<Vec<std::net::TcpStream>> {
    let left = Rc::new(Cell::new(connections));
    let mut workers = JoinSet::new();
    for _ in 0..OPENING.min(connections) {
        let left = Rc::clone(&left);
        workers.spawn_local(async move {
            let mut held = Vec::new();
            while let Some(rest) = left.get().checked_sub(1) {
                left.set(rest);
                let opened = async { if http { http1::once(target).await } else { tcp::once(target).await } };
                held.push(tokio::time::timeout(EXCHANGE_WITHIN, opened).await.context("a connection is silent")??);
            }
            anyhow::Ok(held)
        });
    }
    let mut all = Vec::with_capacity(connections);
    while let Some(held) = workers.join_next().await {
        for stream in held?.with_context(|| format!("open {connections} connections to {target}"))? {
            all.push(stream.into_std()?);
        }
    }
    Ok(all)
}

/// Ten thousand connections need as many descriptors.
fn raise_file_limit() -> anyhow::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).context("raise the limit of open files")?;
    }
    Ok(())
}

/// Connects without delaying small writes.
async fn connect(target: SocketAddr) -> anyhow::Result<tokio::net::TcpStream> {
    let stream = tokio::net::TcpStream::connect(target).await.with_context(|| format!("connect to {target}"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests;
