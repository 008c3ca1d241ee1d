//! A process in a pod and what it measures there: the orders and replies of the bench over the kit's actors.
//!
//! [`Actor`] is the handle, [`run`] the process. The process is single-threaded wherever it measures: client and server
//! are the same thread, so that no wake-up of another thread is in a number.

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
pub use talk::{Answered, Heard, Hearing};

/// How often a proxy asks whether both directions are in force: as ours does.
const ASKS_EVERY: Duration = Duration::from_millis(5);

const ATTEST_LEVEL: libc::c_int = weft_ebpf_abi::socket::attest::LEVEL;
const ATTEST_OPTION: libc::c_int = weft_ebpf_abi::socket::attest::OPTION;
const ATTEST_BOTH: u32 = weft_ebpf_abi::socket::attest::OUTBOUND | weft_ebpf_abi::socket::attest::INBOUND;
sockopt_impl!(
    /// The private option by which a proxy asks what is in force.
    Attestation,
    GetOnly,
    ATTEST_LEVEL,
    ATTEST_OPTION,
    [u32; 4]
);

/// What a process may be told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Nothing: whoever answers runs.
    Rest,
    /// Move: sockets made from now on belong there, those made before stay where they are.
    Enter(Place),
    /// Run on one processor.
    Pin,
    /// Become a user, for good.
    Become(u32),
    /// Listen as this user on these addresses.
    Listen(u32, Vec<SocketAddr>),
    /// Connect one after the other; accept each with the listener on this port.
    Connect {
        /// Whom to dial.
        target: SocketAddr,
        /// Whose queue the connections end in.
        port: u16,
        /// How many.
        count: u32,
        /// Whether to ask the accepted socket for its original destination, which must be the target.
        original: bool,
    },
    /// As `Connect`, as fast as possible, for some milliseconds.
    Flood {
        /// Whom to dial.
        target: SocketAddr,
        /// Whose queue the connections end in.
        port: u16,
        /// How long.
        milliseconds: u64,
    },
    /// Ask a TCP socket for its type, in so many blocks of 64.
    Options(u32),
    /// Ask until both directions are in force, and tell how long that took.
    Attest(u64),
    /// Answer whoever connects to the listeners with this byte, and count what they send.
    Serve(u8),
    /// Dial this address again and again, send something, and count who answers.
    Dial(SocketAddr),
    /// Run a program as a user with this environment.
    Run(PathBuf, u32, BTreeMap<String, String>),
    /// Wait until the program logs a line with this text, and tell when that was.
    Says(String),
    /// Ask the program's HTTP server on loopback.
    Get(u16, String),
    /// What was heard by the listeners since they serve.
    Hear,
    /// Who answered since dialling began; goes on.
    Answers,
}

/// What a process says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// Nothing to tell.
    Done,
    /// Of [`Order::Connect`].
    Connected(Connected),
    /// Of [`Order::Flood`].
    Flooded(Flooded),
    /// Of [`Order::Options`].
    Timed(Nanoseconds),
    /// Of [`Order::Attest`], microseconds; nothing if the time was up.
    Attested(Option<u64>),
    /// Of [`Order::Says`]: the time as of [`now`].
    Said(u64),
    /// Of [`Order::Get`]: all of the answer; nothing while it does not listen.
    Got(Option<String>),
    /// Of [`Order::Hear`].
    Heard(Heard),
    /// Of [`Order::Answers`].
    Answered(Answered),
}

/// The handle of a running process, which ends with it: the kit's, with the bench's orders and replies.
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

    /// Gives an order and waits for the reply.
    ///
    /// # Errors
    /// What the process says went wrong, or that it ended or is silent.
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

    /// Lets the process end by itself, and with it what it runs.
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

/// The process. Returns when its input ends.
///
/// # Errors
/// The place cannot be entered, or the other side is gone.
pub fn run(place: &Place) -> anyhow::Result<()> {
    let mut process = Process::default();
    actor::run(place, |order| process.follow(order))
}

/// What the process has.
#[derive(Debug, Default)]
struct Process {
    listeners: Vec<TcpListener>,
    listening_since: Option<Instant>,
    hearing: Hearing,
    dialling: Option<talk::Dialling>,
    program: Option<program::Program>,
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
                    self.hearing.serve(listener.try_clone()?, byte)?;
                }
            }
            Order::Dial(target) => self.dialling = Some(talk::Dialling::start(target)?),
            Order::Run(program, uid, environment) => {
                self.program = Some(program::Program::start(&program, uid, &environment)?);
            }
            Order::Says(text) => return Ok(Reply::Said(self.program()?.says(&text)?)),
            Order::Get(port, path) => return Ok(Reply::Got(self.program()?.get(port, &path)?)),
            Order::Hear => return Ok(Reply::Heard(self.hearing.heard())),
            Order::Answers => {
                return Ok(Reply::Answered(self.dialling.as_ref().context("it does not dial")?.answered()));
            }
        }
        Ok(Reply::Done)
    }

    fn listen(&mut self, uid: u32, addresses: &[SocketAddr]) -> anyhow::Result<()> {
        // The real user is what the kernel's programs see; the saved one is the way back.
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
        // Beside a listener for IPv4, as proxies have it.
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}

/// The last processor: interrupts prefer the first.
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
            // By kernel version, where nothing is enrolled.
            Ok(_) | Err(Errno::ENOPROTOOPT | Errno::EOPNOTSUPP) => {}
            Err(error) => return Err(error).context("ask what is in force"),
        }
        if since.elapsed() > within {
            return Ok(None);
        }
        std::thread::sleep(ASKS_EVERY);
    }
}
