//! Floods: traffic of a peer that keeps a proxy busy, from a thread of its own until it is ended.
//!
//! Floods with a rate have their pace from a timer and leave out what the proxy does not take in time, so that they
//! take a known part of the processors that they share with what is measured. Closed connections are reset: none is
//! left in TIME_WAIT, and the ports do not run out.

use std::{
    cell::{Cell, RefCell},
    net::SocketAddr,
    rc::Rc,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use serde::{Deserialize, Serialize};
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{Semaphore, oneshot},
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{EXCHANGE_WITHIN, OPENING, PAUSE, connect, on_this_thread};

/// Time for a flood to be in force.
pub(super) const BEGINS_WITHIN: Duration = Duration::from_secs(20);
/// How often a flood with a rate sends its share.
const EVERY: Duration = Duration::from_millis(1);
/// Shares in a second.
const SHARES: u32 = 1000;
/// Pause before a held connection that the proxy closed is opened again.
const AWAY: Duration = Duration::from_secs(1);

/// A request line and a field, without the end of the head.
const HALF_HEAD: &[u8] = b"GET / HTTP/1.1\r\nhost: server.bench\r\n";
/// The start of a ClientHello: a record of 512 bytes, the handshake's type and length, and the version of TLS 1.2.
const HELLO_START: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
/// Bytes that are sent of the record, whose head has 5 more.
const HALF_HELLO_BYTES: usize = 5 + 256;
/// The client's preface and an empty SETTINGS (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
/// `GET http://server.bench/` in HPACK, without an entry in the table.
const GET_HEAD: &[u8] = b"\x82\x86\x84\x01\x0cserver.bench";
const HEADERS: u8 = 1;
const END_STREAM_AND_HEADERS: u8 = 5;
const RST_STREAM: u8 = 3;
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// What a peer does to a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flood {
    /// Holds connections open, each with half of an HTTP/1.1 head.
    Heads {
        /// Connections.
        connections: u32,
    },
    /// Holds connections open, each with half of a TLS ClientHello.
    Hellos {
        /// Connections.
        connections: u32,
    },
    /// Opens HTTP/2 streams and resets each at once (CVE-2023-44487).
    Resets {
        /// Connections, which are opened again when the proxy closes them.
        connections: u32,
        /// Streams per second, on all of them together.
        per_second: u32,
    },
    /// Opens connections and resets each at once.
    Connections {
        /// Connections per second.
        per_second: u32,
    },
}

/// Counts of a flood.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FloodCounts {
    /// The time since the flood was in force.
    pub(crate) seconds: f64,
    /// Connections that were open at the end.
    pub(crate) open: u64,
    /// Connections opened in this time.
    pub(crate) opened: u64,
    /// Streams opened and reset in this time.
    pub(crate) resets: u64,
    /// Why the last connection failed or ended.
    pub(crate) problem: Option<String>,
}

/// A flood in its thread. The thread ends when this is dropped.
#[derive(Debug)]
pub(super) struct Running {
    end: oneshot::Sender<()>,
    thread: thread::JoinHandle<anyhow::Result<FloodCounts>>,
}

/// Counters for the tasks of the thread.
#[derive(Debug, Default)]
struct Counters {
    open: Cell<u64>,
    opened: Cell<u64>,
    resets: Cell<u64>,
    problem: RefCell<Option<String>>,
}

impl Running {
    /// Starts a flood, and returns when it is in force: all connections that are to be held are open, or the first
    /// connection or reset was made.
    ///
    /// # Errors
    /// It is not in force in time.
    pub(super) fn start(flood: Flood, target: SocketAddr, within: Duration) -> anyhow::Result<Self> {
        let (end, ended) = oneshot::channel();
        let (begun, begins) = mpsc::channel();
        let run = move || on_this_thread(run(flood, target, within, begun, ended));
        let thread = thread::Builder::new().name("flood".to_owned()).spawn(run)?;
        let running = Self { end, thread };
        match begins.recv() {
            Ok(()) => Ok(running),
            Err(mpsc::RecvError) => {
                let counts = running.end()?;
                bail!("the flood ended by itself: {counts:?}")
            }
        }
    }

    /// Ends the flood and closes its connections.
    ///
    /// # Errors
    /// It was not in force.
    pub(super) fn end(self) -> anyhow::Result<FloodCounts> {
        // If nobody receives, the thread has ended, and its result says why.
        let _ = self.end.send(());
        self.thread.join().map_err(|_| anyhow!("the flood's thread panicked"))?
    }
}

async fn run(
    flood: Flood,
    target: SocketAddr,
    within: Duration,
    begun: mpsc::Sender<()>,
    ended: oneshot::Receiver<()>,
) -> anyhow::Result<FloodCounts> {
    let counters = Rc::new(Counters::default());
    let mut workers = JoinSet::new();
    match flood {
        Flood::Heads { connections } => spawn_held(&mut workers, connections, HALF_HEAD.into(), target, &counters),
        Flood::Hellos { connections } => spawn_held(&mut workers, connections, half_hello().into(), target, &counters),
        Flood::Resets { connections, per_second } => {
            for share in shares(per_second, connections)? {
                workers.spawn_local(keep_resetting(share, target, Rc::clone(&counters)));
            }
        }
        Flood::Connections { per_second } => {
            for share in shares(per_second, 1)? {
                workers.spawn_local(keep_connecting(share, target, Rc::clone(&counters)));
            }
        }
    }
    let in_force = async {
        while !counters.is_in_force(flood) {
            sleep(EVERY).await;
        }
    };
    if timeout(within, in_force).await.is_err() {
        bail!("{flood:?} of {target} is not in force within {within:?}: {counters:?}");
    }
    let (began, opened, resets) = (Instant::now(), counters.opened.get(), counters.resets.get());
    // If nobody receives, nobody waits for the end either: the sender is gone as well.
    let _ = begun.send(());
    let _ = ended.await;
    let counts = FloodCounts {
        seconds: began.elapsed().as_secs_f64(),
        open: counters.open.get(),
        opened: counters.opened.get() - opened,
        resets: counters.resets.get() - resets,
        problem: counters.problem.borrow().clone(),
    };
    workers.shutdown().await;
    Ok(counts)
}

impl Counters {
    fn is_in_force(&self, flood: Flood) -> bool {
        match flood {
            Flood::Heads { connections } | Flood::Hellos { connections } => self.open.get() == u64::from(connections),
            Flood::Resets { .. } => self.resets.get() > 0,
            Flood::Connections { .. } => self.opened.get() > 0,
        }
    }

    fn opened(&self) {
        self.open.set(self.open.get() + 1);
        self.opened.set(self.opened.get() + 1);
    }

    fn closed(&self) {
        self.open.set(self.open.get() - 1);
    }

    fn failed(&self, error: &anyhow::Error) {
        *self.problem.borrow_mut() = Some(format!("{error:#}"));
    }
}

/// How much each connection sends in each [`EVERY`], at least one.
///
/// # Errors
/// There are no connections.
fn shares(per_second: u32, connections: u32) -> anyhow::Result<Vec<u32>> {
    let each = (per_second / SHARES).checked_div(connections).context("a flood without connections")?;
    Ok(vec![each.max(1); usize::try_from(connections)?])
}

fn spawn_held(
    workers: &mut JoinSet<()>,
    connections: u32,
    bytes: Rc<[u8]>,
    target: SocketAddr,
    counters: &Rc<Counters>,
) {
    let opening = Rc::new(Semaphore::new(OPENING));
    for _ in 0..connections {
        workers.spawn_local(keep_held(Rc::clone(&bytes), target, Rc::clone(&opening), Rc::clone(counters)));
    }
}

/// Holds a connection, and another one after it if the proxy closes it.
async fn keep_held(bytes: Rc<[u8]>, target: SocketAddr, opening: Rc<Semaphore>, counters: Rc<Counters>) {
    loop {
        let opened = {
            let _permit = opening.acquire().await;
            open(target, &bytes).await
        };
        match opened {
            Ok(mut stream) => {
                counters.opened();
                let end = read_to_end(&mut stream).await;
                counters.closed();
                counters.failed(&end.err().unwrap_or_else(closed_by_proxy));
            }
            Err(error) => counters.failed(&error),
        }
        sleep(AWAY).await;
    }
}

/// Opens and resets streams on one connection after the other.
async fn keep_resetting(share: u32, target: SocketAddr, counters: Rc<Counters>) {
    loop {
        match open(target, PREFACE).await {
            Ok(stream) => {
                counters.opened();
                let end = reset_until_closed(stream, share, &counters).await;
                counters.closed();
                counters.failed(&end.err().unwrap_or_else(closed_by_proxy));
            }
            Err(error) => counters.failed(&error),
        }
        sleep(PAUSE).await;
    }
}

async fn reset_until_closed(mut stream: TcpStream, share: u32, counters: &Counters) -> anyhow::Result<()> {
    let (mut from, mut to) = stream.split();
    let sending = async {
        let mut ticks = paced();
        let mut ids = (1..u32::MAX / 2).step_by(2);
        loop {
            ticks.tick().await;
            let streams: Vec<_> = ids.by_ref().take(usize::try_from(share)?).collect();
            to.write_all(&streams.iter().flat_map(|id| canceled(*id)).collect::<Vec<_>>()).await?;
            counters.resets.set(counters.resets.get() + streams.len() as u64);
        }
    };
    tokio::select! {
        read = read_to_end(&mut from) => read,
        sent = sending => sent,
    }
}

/// Opens connections, each of which is reset at once.
async fn keep_connecting(share: u32, target: SocketAddr, counters: Rc<Counters>) {
    let mut ticks = paced();
    loop {
        ticks.tick().await;
        for _ in 0..share {
            match open(target, &[]).await {
                Ok(stream) => {
                    counters.opened();
                    drop(stream);
                    counters.closed();
                }
                Err(error) => counters.failed(&error),
            }
        }
    }
}

/// A connection that is reset when it is closed, and the first bytes on it.
async fn open(target: SocketAddr, bytes: &[u8]) -> anyhow::Result<TcpStream> {
    let opened = async {
        let mut stream = connect(target).await?;
        SockRef::from(&stream).set_linger(Some(Duration::ZERO)).context("reset when closed")?;
        stream.write_all(bytes).await.context("send the first bytes")?;
        anyhow::Ok(stream)
    };
    timeout(EXCHANGE_WITHIN, opened).await.with_context(|| format!("{target} does not accept in time"))?
}

/// Reads what there is, until the proxy closes the connection.
async fn read_to_end(from: &mut (impl tokio::io::AsyncRead + Unpin)) -> anyhow::Result<()> {
    let mut sink = [0; 512];
    while from.read(&mut sink).await.context("read")? > 0 {}
    Ok(())
}

fn paced() -> tokio::time::Interval {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

fn closed_by_proxy() -> anyhow::Error {
    anyhow!("closed by the proxy")
}

fn half_hello() -> Vec<u8> {
    let mut bytes = HELLO_START.to_vec();
    bytes.resize(HALF_HELLO_BYTES, 7);
    bytes
}

/// A GET on a stream that is reset at once.
fn canceled(stream: u32) -> Vec<u8> {
    [frame(HEADERS, END_STREAM_AND_HEADERS, stream, GET_HEAD), frame(RST_STREAM, 0, stream, &CANCEL)].concat()
}

/// One frame (RFC 9113 section 4.1). The payload is shorter than 256 bytes.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    [&[0, 0, payload.len() as u8, kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

#[cfg(test)]
mod tests;
