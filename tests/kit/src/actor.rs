//! A process that carries out orders: one line of JSON in, one line of JSON out.
//!
//! [`Actor`] is the handle. The process is the running program, started again: its `main` calls [`requested`] first,
//! and if this process is to be an actor it calls [`run`]. The program defines the orders and replies.

use std::{
    fs::{self, File},
    io::{self, BufRead as _, Write as _},
    path::PathBuf,
    process::Stdio,
};

use anyhow::Context as _;
use nix::{
    sched::{CloneFlags, setns},
    unistd::{Gid, Uid, setgid, setuid},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use crate::wait::patience;

/// The first argument of an actor process; its [`Place`] is the second.
const ARGUMENT: &str = "weft-actor";
/// Timeout of an order, in multiples of `patience`.
const PATIENCE_FACTOR: u32 = 12;

/// Network namespace, cgroup and user of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The network namespace.
    pub netns: PathBuf,
    /// The cgroup2 directory.
    pub cgroup: PathBuf,
    /// User id; 0 is root.
    pub uid: u32,
    /// Group id; 0 is the group of root.
    pub gid: u32,
}

/// A running process, killed on drop.
#[derive(Debug)]
pub struct Actor {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Place {
    /// As root, in a network namespace and a cgroup.
    pub fn of_root(netns: impl Into<PathBuf>, cgroup: impl Into<PathBuf>) -> Self {
        Self { netns: netns.into(), cgroup: cgroup.into(), uid: 0, gid: 0 }
    }

    /// Moves the calling process into the cgroup and the calling thread into the network namespace: sockets that are
    /// created later belong there, earlier ones stay in the old namespace.
    ///
    /// # Errors
    /// There is no such place.
    pub fn enter(&self) -> anyhow::Result<()> {
        let processes = self.cgroup.join("cgroup.procs");
        fs::write(&processes, std::process::id().to_string()).with_context(|| processes.display().to_string())?;
        let netns = File::open(&self.netns).with_context(|| self.netns.display().to_string())?;
        setns(netns, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter {}", self.netns.display()))
    }
}

impl Actor {
    /// Starts a process. Needs a tokio runtime.
    ///
    /// # Errors
    /// The program cannot be started again.
    pub async fn start(place: &Place) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(ARGUMENT)
            .arg(serde_json::to_string(place)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("start an actor")?;
        let input = child.stdin.take().context("an actor without input")?;
        let output = BufReader::new(child.stdout.take().context("an actor without output")?).lines();
        Ok(Self { child, input, output })
    }

    /// Sends an order and waits for the reply.
    ///
    /// # Errors
    /// The process's own error; or the process ended or did not reply.
    pub async fn tell<R: DeserializeOwned>(&mut self, order: &impl Serialize) -> anyhow::Result<R> {
        let mut line = serde_json::to_string(order)?;
        let exchange = async {
            self.input.write_all(format!("{line}\n").as_bytes()).await?;
            self.output.next_line().await
        };
        let reply = tokio::time::timeout(PATIENCE_FACTOR * patience(), exchange).await;
        line.truncate(200);
        let reply = reply.with_context(|| format!("{line}: silence"))?.with_context(|| line.clone())?;
        let reply = reply.with_context(|| format!("{line}: the actor ended"))?;
        let reply: Result<R, String> = serde_json::from_str(&reply)?;
        reply.map_err(|error| anyhow::anyhow!("{line}: {error}"))
    }

    /// The process id, while it runs.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Lets the process and its children end by themselves.
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
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }
}

/// The place of this process if it is to be an actor. Called before a program reads its arguments.
///
/// # Panics
/// When the argument is not a place: [`Actor`] wrote it.
pub fn requested() -> Option<Place> {
    let mut arguments = std::env::args().skip(1);
    arguments.next().filter(|first| first == ARGUMENT)?;
    let place = arguments.next().and_then(|place| serde_json::from_str(&place).ok());
    Some(place.unwrap_or_else(|| panic!("{ARGUMENT} takes a place")))
}

/// The actor process: enters its place and carries out orders until its input ends.
///
/// # Errors
/// The place cannot be entered, or the other side has ended.
pub fn run<O: DeserializeOwned, R: Serialize>(
    place: &Place,
    mut follow: impl FnMut(O) -> anyhow::Result<R>,
) -> anyhow::Result<()> {
    place.enter()?;
    setgid(Gid::from_raw(place.gid))?;
    setuid(Uid::from_raw(place.uid))?;
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let reply = follow(serde_json::from_str(&line?)?).map_err(|error| format!("{error:#}"));
        serde_json::to_writer(&mut output, &reply)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}
