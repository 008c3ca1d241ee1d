//! A process in a pod and its measurements: the bench's orders and replies, over the kit's actors.
//!
//! [`Actor`] is the handle, [`run`] the process. The process is single-threaded while it measures: client and server
//! are the same thread, so that no number includes the wake-up of another thread.

mod measure;
mod program;
mod talk;

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    getsockopt_impl,
    sched::{CpuSet, sched_setaffinity},
    sockopt_impl,
    sys::socket::getsockopt,
    unistd::{Pid, Uid, setresuid},
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};
use weft_test_kit::actor::{self, Place};

pub use measure::{Connected, Flooded, Nanoseconds};
pub use program::now;
pub use talk::{Answered, CountingServer, Received};

use crate::load;

/// The proxy's polling interval of attestation.
const ASKS_EVERY: Duration = Duration::from_millis(5);

const ATTEST_LEVEL: libc::c_int = weft_ebpf_abi::socket::attest::LEVEL;
const ATTEST_OPTION: libc::c_int = weft_ebpf_abi::socket::attest::OPTION;
const ATTEST_BOTH: u32 = weft_ebpf_abi::socket::attest::OUTBOUND | weft_ebpf_abi::socket::attest::INBOUND;
sockopt_impl!(
    /// The private option with which a proxy queries what is in force.
    Attestation,
    GetOnly,
    ATTEST_LEVEL,
    ATTEST_OPTION,
    [u32; 4]
);

/// Orders to a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// No operation: an answer shows that the process runs.
    Rest,
    /// Enter a place: sockets that are created later belong there, earlier ones stay in the old namespace.
    Enter(Place),
    /// Run on one processor.
    Pin,
    /// Change to a user, permanently.
    Become(u32),
    /// Listen as this user on these addresses.
    Listen(u32, Vec<SocketAddr>),
    /// Connect one after the other; accept each with the listener on this port.
    Connect {
        /// The address to dial.
        target: SocketAddr,
        /// The port of the listener that gets the connections.
        port: u16,
        /// Number of connections.
        count: u32,
        /// Whether to ask the accepted socket for its original destination, which must be the target.
        original: bool,
    },
    /// As `Connect`, as fast as possible, for some milliseconds.
    Flood {
        /// The address to dial.
        target: SocketAddr,
        /// The port of the listener that gets the connections.
        port: u16,
        /// Duration.
        milliseconds: u64,
    },
    /// Read a TCP socket's type, in this many blocks of 64.
    Options(u32),
    /// Poll until both directions are in force, and report the time.
    Attest(u64),
    /// Answer each connection to the listeners with this byte, and count the received bytes.
    Serve(u8),
    /// Dial this address repeatedly, send something, and count the answers by server.
    Dial(SocketAddr),
    /// Run a program as a user with this environment.
    Run(PathBuf, u32, BTreeMap<String, String>),
    /// Wait until the program logs a line with this text, and report the time.
    Says(String),
    /// Send a request to the program's HTTP server on loopback.
    Get(u16, String),
    /// Counts of the listeners since they serve.
    Received,
    /// Counts of the answers since dialling began; dialling continues.
    Answers,
    /// Serve or send load, for the bench of the proxy.
    Load(load::Order),
}

/// Replies of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// No result.
    Done,
    /// Of [`Order::Connect`].
    Connected(Connected),
    /// Of [`Order::Flood`].
    Flooded(Flooded),
    /// Of [`Order::Options`].
    Timed(Nanoseconds),
    /// Of [`Order::Attest`], microseconds; none after the timeout.
    Attested(Option<u64>),
    /// Of [`Order::Says`]: the time as of [`now`].
    Said(u64),
    /// Of [`Order::Get`]: the whole answer; none while it does not listen.
    Got(Option<String>),
    /// Of [`Order::Received`].
    Received(Received),
    /// Of [`Order::Answers`].
    Answered(Answered),
    /// Of [`Order::Load`].
    Loaded(load::Reply),
}

/// The handle of a running process: the kit's, with the bench's orders and replies. The process ends with it.
#[derive(Debug)]
pub struct Actor(actor::Actor);

impl Actor {
    /// Starts a process.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub async fn start(place: &Place) -> anyhow::Result<Self> {
        Ok(Self(actor::Actor::start(place).await?))
    }

    /// Sends an order and waits for the reply.
    ///
    /// # Errors
    /// The process's own error; or the process ended or did not reply.
    pub async fn tell(&mut self, order: &Order) -> anyhow::Result<Reply> {
        self.0.tell(order).await
    }

    /// [`Self::tell`] for orders without an answer.
    ///
    /// # Errors
    /// As there.
    pub async fn order(&mut self, order: &Order) -> anyhow::Result<()> {
        self.tell(order).await.map(drop)
    }

    /// The process id, while it runs.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.0.id()
    }

    /// Lets the process and its children end by themselves.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub async fn end(self) -> anyhow::Result<()> {
        self.0.end().await
    }

    /// Kills the process and waits until it is gone.
    ///
    /// # Errors
    /// It cannot be killed.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        self.0.kill().await
    }
}

/// The actor process. Returns when its input ends.
///
/// # Errors
/// The place cannot be entered, or the other side has ended.
pub fn run(place: &Place) -> anyhow::Result<()> {
    let mut process = Process::default();
    actor::run(place, |order| process.follow(order))
}

/// State of the process.
#[derive(Debug, Default)]
struct Process {
    listeners: Vec<TcpListener>,
    listening_since: Option<Instant>,
    server: CountingServer,
    dialling: Option<talk::Dialling>,
    program: Option<program::Program>,
    load: load::Process,
}

impl Process {
    fn follow(&mut self, order: Order) -> anyhow::Result<Reply> {
        match order {
            Order::Rest => {}
            Order::Enter(place) => place.enter()?,
            Order::Pin => pin()?,
            Order::Become(uid) => {
                let uid = Uid::from_raw(uid);
                setresuid(uid, uid, uid)?;
            }
            Order::Listen(uid, addresses) => self.listen(uid, &addresses)?,
            Order::Connect { target, port, count, original } => {
                return Ok(Reply::Connected(measure::connect(self.listener(port)?, target, count, original)?));
            }
            Order::Flood { target, port, milliseconds } => {
                let time = Duration::from_millis(milliseconds);
                return Ok(Reply::Flooded(measure::flood(self.listener(port)?, target, time)?));
            }
            Order::Options(blocks) => return Ok(Reply::Timed(measure::options(blocks)?)),
            Order::Attest(milliseconds) => {
                let since = self.listening_since.context("attested before it listens")?;
                return Ok(Reply::Attested(attest(since, Duration::from_millis(milliseconds))?));
            }
            Order::Serve(byte) => {
                for listener in &self.listeners {
                    self.server.serve(listener.try_clone()?, byte)?;
                }
            }
            Order::Dial(target) => self.dialling = Some(talk::Dialling::start(target)?),
            Order::Run(program, uid, environment) => {
                self.program = Some(program::Program::start(&program, uid, &environment)?);
            }
            Order::Says(text) => return Ok(Reply::Said(self.program()?.says(&text)?)),
            Order::Get(port, path) => return Ok(Reply::Got(self.program()?.get(port, &path)?)),
            Order::Load(order) => return Ok(Reply::Loaded(self.load.follow(order)?)),
            Order::Received => return Ok(Reply::Received(self.server.received())),
            Order::Answers => {
                return Ok(Reply::Answered(self.dialling.as_ref().context("it does not dial")?.answered()));
            }
        }
        Ok(Reply::Done)
    }

    fn listen(&mut self, uid: u32, addresses: &[SocketAddr]) -> anyhow::Result<()> {
        // The kernel programs see the real user; the saved one allows the change back.
        let root = Uid::from_raw(0);
        let back = nix::unistd::getuid();
        if uid != back.as_raw() {
            setresuid(Uid::from_raw(uid), Uid::from_raw(uid), root).context("become the listener's user")?;
        }
        let listened = addresses.iter().try_for_each(|address| -> anyhow::Result<()> {
            self.listeners.push(listener(*address).with_context(|| format!("listen on {address}"))?);
            Ok(())
        });
        if uid != back.as_raw() {
            setresuid(back, back, back).context("become the former user again")?;
        }
        self.listening_since = Some(Instant::now());
        listened
    }

    fn program(&mut self) -> anyhow::Result<&mut program::Program> {
        self.program.as_mut().context("no program runs")
    }

    fn listener(&self, port: u16) -> anyhow::Result<&TcpListener> {
        let on = |listener: &&TcpListener| listener.local_addr().is_ok_and(|address| address.port() == port);
        self.listeners.iter().find(on).with_context(|| format!("nobody listens on port {port}"))
    }
}

fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // In addition to a listener for IPv4, as in proxies.
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}

/// The last processor: interrupts mostly use the first.
fn pin() -> nix::Result<()> {
    let last = std::thread::available_parallelism().map_or(1, usize::from) - 1;
    let mut cpus = CpuSet::new();
    cpus.set(last)?;
    sched_setaffinity(Pid::from_raw(0), &cpus)
}

fn attest(since: Instant, within: Duration) -> anyhow::Result<Option<u64>> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    loop {
        match getsockopt(&socket, Attestation) {
            Ok([flags, ..]) if flags & ATTEST_BOTH == ATTEST_BOTH => {
                return Ok(Some(u64::try_from(since.elapsed().as_micros())?));
            }
            // Depends on the kernel version, if nothing is enrolled.
            Ok(_) | Err(Errno::ENOPROTOOPT | Errno::EOPNOTSUPP) => {}
            Err(error) => return Err(error).context("ask what is in force"),
        }
        if since.elapsed() > within {
            return Ok(None);
        }
        std::thread::sleep(ASKS_EVERY);
    }
}
