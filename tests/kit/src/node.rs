//! A node by itself: cgroups, network namespaces, a bpffs and the real agent. No sandbox and no containers: the pods
//! run processes of the test ([`crate::pod`]).
//!
//! Everything has one unique name and is removed when the node is dropped, or by the next node for the same purpose if
//! its process was killed. Its methods block and must not be called from asynchronous code, unless their documentation
//! says so.

use std::{
    ffi::OsString,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use nix::unistd::{Pid, geteuid};
use tonic::{Status, Streaming};
use weft_proto::agent::{
    EnrolRequest, EnrolResponse, Event, ExplainRequest, ExplainResponse, PodRef, StatusResponse, WatchRequest,
};
use weft_sandbox::{
    config::{Layout, RUN_DIR},
    host::{
        HostError, cgroup,
        cleanup::{self, Lock},
        mount_bpffs, netns,
    },
};

use crate::{
    actor::Place,
    agent::Agent,
    mesh::unique_name,
    pod::{PROXY_UID, Pod},
    wait::{block_on, blocking::until, patience},
};

/// The namespace of the pods that [`Node`] names.
const POD_NAMESPACE: &str = "test";
/// Environment variable with the Linux version for the agents of [`Node::start_agent`]: they behave as on that older
/// Linux.
const AS_ON_LINUX: &str = "WEFT_TEST_AS_ON_LINUX";

/// A running node.
pub struct Node {
    program: PathBuf,
    layout: Layout,
    cgroup: PathBuf,
    agent: Option<Child>,
    /// Number of agents so far; each has its own log.
    agents: u32,
    // Dropped last: while the lock is held, no other run removes the node.
    _lock: Lock,
}

/// A stream of events.
#[derive(Debug)]
pub struct Watch {
    stream: Streaming<Event>,
}

/// Arguments that make the agents of this run use only features of a Linux older than the real one: `--as-on-linux
/// VERSION`, or nothing.
pub fn as_on_linux() -> impl Iterator<Item = OsString> {
    let version = std::env::var_os(AS_ON_LINUX).filter(|version| !version.is_empty());
    version.into_iter().flat_map(|version| ["--as-on-linux".into(), version])
}

/// A unique name, and its lock.
fn claim(purpose: &str) -> Result<(Layout, Lock), HostError> {
    loop {
        let name = unique_name(purpose);
        match cleanup::lock(&name) {
            // Another run found the name before it was locked, and checks whether a crash left it behind.
            Err(HostError::AlreadyRuns { .. }) => {}
            lock => return Ok((Layout::of(&name), lock?)),
        }
    }
}

impl Node {
    /// A node without pods. Its agent is this program, and is not started yet. May be called from asynchronous code.
    ///
    /// # Errors
    /// The process is not root, or the host lacks cgroup2 or bpffs.
    pub fn new(purpose: &str, program: impl Into<PathBuf>) -> Result<Self, HostError> {
        assert!(geteuid().is_root(), "root is needed to make cgroups and network namespaces and to load programs");
        remove_abandoned(purpose);
        let (layout, lock) = claim(purpose)?;
        let cgroup = cgroup::mount_point()?.join(layout.cgroup());
        // From here on, drop removes what exists.
        let node = Self { program: program.into(), cgroup, agent: None, agents: 0, layout, _lock: lock };
        cgroup::create(&node.cgroup())?;
        mount_bpffs(&node.layout.bpffs())?;
        Ok(node)
    }

    /// Its names and paths.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its own directory.
    pub fn directory(&self) -> PathBuf {
        self.layout.run_dir()
    }

    /// The parent of all other cgroups of the node.
    pub fn root_cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// The cgroup of the pods, to which the agent attaches its programs.
    pub fn cgroup(&self) -> PathBuf {
        self.cgroup.join("kubepods")
    }

    /// The id of a cgroup below the pods' cgroup; the cgroup is created if missing.
    pub fn cgroup_id(&self, name: &str) -> u64 {
        let path = self.cgroup().join(name);
        cgroup::create(&path).unwrap();
        // A cgroup's id is its directory's inode number.
        fs::metadata(path).unwrap().ino()
    }

    /// Creates a network namespace with loopback up.
    pub fn add_netns(&self, name: &str) {
        netns::create(&self.netns_name(name)).unwrap();
    }

    /// The file of a network namespace.
    pub fn netns(&self, name: &str) -> PathBuf {
        Path::new("/run/netns").join(self.netns_name(name))
    }

    fn netns_name(&self, name: &str) -> String {
        format!("{}{name}", self.layout.netns_prefix())
    }

    /// A veth pair between two network namespaces, each end with its host number: `toNET` with 10.NET.0.HOST/24 and
    /// fdNET::HOST/64.
    pub fn join(&self, one: (&str, u8), other: (&str, u8), net: u8) {
        let [from, to] = [one, other].map(|(name, _)| self.netns_name(name));
        run(&format!("ip link add to{net} netns {from} type veth peer name to{net} netns {to}"));
        for (name, host) in [one, other] {
            self.ip(name, &format!("addr add 10.{net}.0.{host}/24 dev to{net}"));
            self.ip(name, &format!("addr add fd{net}::{host}/64 dev to{net} nodad"));
            self.ip(name, &format!("link set to{net} up"));
        }
    }

    /// Runs ip(8) in a network namespace.
    pub fn ip(&self, netns: &str, arguments: &str) {
        run(&format!("ip -n {} {arguments}", self.netns_name(netns)));
    }

    /// Starts a process in a network namespace and in the cgroup that all such processes share.
    pub fn pod(&self, netns: &str, uid: u32) -> Pod {
        self.pod_at(self.cgroup(), netns, uid, uid)
    }

    /// Starts a process in a network namespace and in its own cgroup.
    pub fn pod_in(&self, cgroup: &str, netns: &str, uid: u32) -> Pod {
        self.cgroup_id(cgroup);
        self.pod_at(self.cgroup().join(cgroup), netns, uid, uid)
    }

    /// Starts a process in a network namespace and any cgroup.
    pub fn pod_at(&self, cgroup: PathBuf, netns: &str, uid: u32, gid: u32) -> Pod {
        Pod::start(&Place { netns: self.netns(netns), cgroup, uid, gid })
    }

    /// Starts a process with servers on the proxy's three addresses.
    pub fn proxy(&self, netns: &str) -> Pod {
        let mut proxy = self.pod(netns, PROXY_UID);
        proxy.ok("proxy");
        proxy
    }

    /// Waits until the answer is there, and fails the test with the agent's log if it does not come.
    pub fn eventually<T>(&self, what: &str, mut ask: impl FnMut(&Self) -> Option<T>) -> T {
        let answer = until(patience(), || ask(self).ok_or(()));
        answer.unwrap_or_else(|()| panic!("{what} did not come within {:?}: {}", patience(), self.agent_log()))
    }
}

/// The agent's process.
impl Node {
    /// Starts the agent and waits until it serves.
    pub fn start_agent(&mut self, flags: &[&str]) {
        self.start_agent_at(&self.pins(), flags);
    }

    /// Starts an agent with another pin directory, and waits until it serves.
    pub fn start_agent_at(&mut self, pin_dir: &Path, flags: &[&str]) {
        let mut command = Command::new(&self.program);
        command.args(self.agent_arguments(pin_dir, flags));
        self.spawn_agent(&mut command);
        self.wait_for_agent();
    }

    /// The arguments of an agent with this pin directory.
    pub fn agent_arguments(&self, pin_dir: &Path, flags: &[&str]) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["run".into(), "--socket".into(), self.layout.agent_socket().into()];
        arguments.extend(["--pin-dir".into(), pin_dir.into(), "--cgroup".into(), self.cgroup().into()]);
        arguments.extend(flags.iter().map(Into::into));
        arguments.extend(as_on_linux());
        arguments
    }

    /// Starts a program in place of the agent, without waiting for it. May be called from asynchronous code.
    pub fn spawn_agent(&mut self, command: &mut Command) {
        let log = self.next_log();
        let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn();
        assert!(self.agent.replace(child.unwrap()).is_none(), "an agent runs");
    }

    /// A file for the output of the next agent; [`Self::agent_log`] reads it.
    pub fn next_log(&mut self) -> fs::File {
        self.agents += 1;
        fs::File::create(self.agent_log_file()).unwrap()
    }

    /// The output of the last agent.
    pub fn agent_log(&self) -> String {
        fs::read_to_string(self.agent_log_file()).unwrap_or_default()
    }

    fn agent_log_file(&self) -> PathBuf {
        self.directory().join(format!("agent-{}.log", self.agents))
    }

    /// Waits until the agent serves.
    pub fn wait_for_agent(&self) {
        self.eventually("the agent's socket", Self::try_agent);
    }

    /// Whether an agent serves.
    pub fn is_served(&self) -> bool {
        self.try_agent().is_some()
    }

    /// Kills the agent.
    pub fn kill_agent(&mut self) {
        let mut agent = self.take_agent();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    /// Waits until the agent ends by itself; true if it exits with success.
    pub fn agent_ended(&mut self) -> bool {
        let mut agent = self.take_agent();
        self.eventually("the agent's end", |_| agent.try_wait().unwrap()).success()
    }

    /// Hands the agent's process over to the caller, who has to end it.
    pub fn take_agent(&mut self) -> Child {
        self.agent.take().unwrap()
    }

    /// The agent's process id.
    pub fn agent_pid(&self) -> Pid {
        Pid::from_raw(self.agent.as_ref().unwrap().id().cast_signed())
    }

    /// Runs the agent's program to its end.
    fn run_agent(&self, arguments: &[&str]) {
        let (program, pins) = (self.program.display(), self.pins());
        run(&format!("{program} {} --pin-dir {}", arguments.join(" "), pins.display()));
    }

    /// Detaches the programs and removes all pins.
    pub fn unload(&self) {
        self.run_agent(&["unload"]);
    }

    /// Switches the node's bypass on or off, as a person would.
    pub fn bypass(&self, state: &str) {
        self.run_agent(&["bypass", state]);
    }

    /// The default pin directory of agents.
    pub fn pins(&self) -> PathBuf {
        self.layout.pin_dir()
    }

    /// Whether there are no pins.
    pub fn pins_are_gone(&self) -> bool {
        !self.pins().exists()
    }

    /// Removes all pins, as another program would.
    pub fn remove_pins(&self) {
        // The agent may recreate some of them while others are being removed.
        self.eventually("the end of the pins", |node| fs::remove_dir_all(node.pins()).ok());
    }
}

/// The agent's API.
impl Node {
    fn try_agent(&self) -> Option<Agent> {
        block_on(Agent::connect(&self.layout.agent_socket())).ok()
    }

    /// A dead agent may be called too; the call fails like one on a broken connection.
    fn agent(&self) -> Result<Agent, Status> {
        self.try_agent().ok_or_else(|| Status::unavailable("no agent runs"))
    }

    /// The name of a pod of the node in requests.
    pub fn pod_ref(name: &str) -> PodRef {
        PodRef { namespace: POD_NAMESPACE.to_owned(), name: name.to_owned() }
    }

    /// Enrols a pod.
    ///
    /// # Errors
    /// The agent's error, or `UNAVAILABLE` when none runs.
    pub fn enrol(&self, request: EnrolRequest) -> Result<EnrolResponse, Status> {
        block_on(self.agent()?.enrol(request))
    }

    /// Withdraws a pod.
    pub fn withdraw(&self, name: &str) {
        self.withdraw_pod(Self::pod_ref(name));
    }

    /// Withdraws a pod of any namespace.
    pub fn withdraw_pod(&self, pod: PodRef) {
        block_on(self.agent().unwrap().withdraw(pod)).unwrap();
    }

    /// The agent's pods and counters.
    pub fn status(&self) -> StatusResponse {
        block_on(self.agent().unwrap().status()).unwrap()
    }

    /// The kernel's decision about a hypothetical connection.
    ///
    /// # Errors
    /// The agent's error.
    pub fn explain(&self, request: ExplainRequest) -> Result<ExplainResponse, Status> {
        block_on(self.agent()?.explain(request))
    }

    /// Events from now on.
    pub fn watch(&self, request: WatchRequest) -> Watch {
        self.try_watch(request).unwrap()
    }

    /// Events from now on.
    ///
    /// # Errors
    /// The agent's error.
    pub fn try_watch(&self, request: WatchRequest) -> Result<Watch, Status> {
        Ok(Watch { stream: block_on(self.agent()?.watch(request))? })
    }
}

impl Watch {
    /// The next event, if it comes within this time.
    pub fn try_next(&mut self, within: Duration) -> Option<Event> {
        let next = async { tokio::time::timeout(within, self.stream.message()).await };
        block_on(next).ok().and_then(Result::unwrap)
    }

    /// The next event that satisfies this condition; others are discarded.
    pub fn find(&mut self, wanted: impl Fn(&Event) -> bool) -> Event {
        let mut seen = Vec::new();
        while let Some(event) = self.try_next(patience()) {
            if wanted(&event) {
                return event;
            }
            seen.push(event);
        }
        panic!("the event did not come; these did: {seen:#?}");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        if let Err(error) = cleanup::remove_everything(&self.layout) {
            eprintln!("{} was not cleaned up: {error}", self.directory().display());
        }
    }
}

/// Removes the nodes of processes that were killed.
fn remove_abandoned(purpose: &str) {
    let names = fs::read_dir(RUN_DIR).into_iter().flatten().flatten();
    for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        let is_ours = name.strip_prefix(purpose).is_some_and(|rest| rest.starts_with('-') && !rest.contains('.'));
        // A live process holds the lock.
        if is_ours && let Ok(_lock) = cleanup::lock(&name) {
            let _ = cleanup::remove_everything(&Layout::of(&name));
        }
    }
}

/// Runs a program; its arguments are separated by spaces.
fn run(command: &str) {
    let words: Vec<&str> = command.split_whitespace().collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap_or_else(|error| panic!("{command}: {error}"));
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}
