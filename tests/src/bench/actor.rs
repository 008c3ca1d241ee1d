//! A process in a pod: `weft-bench actor`, which does what it is told, one line of JSON in, one line out.
//!
//! [`Actor`] is the handle, [`run`] the process. The process is single-threaded wherever it measures: client and server
//! are the same thread, so that no wake-up of another thread is in a number.

mod measure;
mod program;
mod talk;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead as _, Write as _},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    getsockopt_impl,
    sched::{CloneFlags, CpuSet, sched_setaffinity, setns},
    sockopt_impl,
    sys::socket::getsockopt,
    unistd::{Pid, Uid, setresuid},
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

pub use measure::{Connected, Flooded, Nanoseconds};
pub use program::now;
pub use talk::{Answered, Heard, Hearing};

/// The longest time an order may take.
const ANSWERS_WITHIN: Duration = Duration::from_secs(120);
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

/// Where a process is.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
pub struct Place {
    /// The network namespace
    #[arg(long)]
    pub netns: PathBuf,
    /// The cgroup2 directory
    #[arg(long)]
    pub cgroup: PathBuf,
}

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
    /// It did not work.
    Failed(String),
}

/// The handle of a running process, which ends with it.
#[derive(Debug)]
pub struct Actor {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Actor {
    /// Starts a process.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub async fn start(place: &Place) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("actor")
            .arg("--netns")
            .arg(&place.netns)
            .arg("--cgroup")
            .arg(&place.cgroup)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("start an actor")?;
        let input = child.stdin.take().context("an actor without input")?;
        let output = BufReader::new(child.stdout.take().context("an actor without output")?).lines();
        Ok(Self { child, input, output })
    }

    /// Tells it something and waits for the reply.
    ///
    /// # Errors
    /// What the process says went wrong, or that it ended or is silent.
    pub async fn tell(&mut self, order: &Order) -> anyhow::Result<Reply> {
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        let exchange = async {
            self.input.write_all(line.as_bytes()).await?;
            self.output.next_line().await
        };
        let reply =
            tokio::time::timeout(ANSWERS_WITHIN, exchange).await.with_context(|| format!("{order:?}: silence"))?;
        let reply =
            reply.with_context(|| format!("{order:?}"))?.with_context(|| format!("{order:?}: the actor ended"))?;
        match serde_json::from_str(&reply)? {
            Reply::Failed(error) => anyhow::bail!("{order:?}: {error}"),
            reply => Ok(reply),
        }
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
    pub async fn end(mut self) -> anyhow::Result<()> {
        drop(self.input);
        self.child.wait().await?;
        Ok(())
    }

    /// Kills the process and waits until it is gone.
    ///
    /// # Errors
    /// It cannot be killed.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }
}

/// The process. Returns when its input ends.
///
/// # Errors
/// The place cannot be entered, or the other side is gone.
pub fn run(place: &Place) -> anyhow::Result<()> {
    let mut stage = Stage::default();
    stage.enter(place)?;
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let reply = match stage.follow(serde_json::from_str(&line?)?) {
            Ok(reply) => reply,
            Err(error) => Reply::Failed(format!("{error:#}")),
        };
        serde_json::to_writer(&mut output, &reply)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

/// What the process has.
#[derive(Debug, Default)]
struct Stage {
    listeners: Vec<TcpListener>,
    listening_since: Option<Instant>,
    hearing: Hearing,
    dialling: Option<talk::Dialling>,
    program: Option<program::Program>,
}

impl Stage {
    fn follow(&mut self, order: Order) -> anyhow::Result<Reply> {
        match order {
            Order::Rest => {}
            Order::Enter(place) => self.enter(&place)?,
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

    fn enter(&mut self, place: &Place) -> anyhow::Result<()> {
        fs::write(place.cgroup.join("cgroup.procs"), std::process::id().to_string())
            .with_context(|| format!("enter {}", place.cgroup.display()))?;
        let netns = File::open(&place.netns).with_context(|| format!("open {}", place.netns.display()))?;
        setns(netns, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter {}", place.netns.display()))
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
