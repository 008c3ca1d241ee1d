//! The namespaces, the cgroups, the bpffs, the agent: made with unique names, removed on drop, or by the next run when
//! this one is killed.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;
use tokio_stream::StreamExt;
use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};
use weft_proto::agent::{
    EnrolRequest, EnrolResponse, Event, ExplainRequest, ExplainResponse, PodRef, PortRange, StatusRequest,
    StatusResponse, WatchRequest, WithdrawRequest, pods_client::PodsClient, status_client::StatusClient,
    trace_client::TraceClient,
};

use crate::pod::Pod;

const AGENT: &str = env!("CARGO_BIN_EXE_weft-agent");
/// Ten seconds, unless the machine is an emulated one, on which the verifier alone may take a minute.
static PATIENCE: LazyLock<Duration> = LazyLock::new(|| {
    let seconds = std::env::var("WEFT_TEST_PATIENCE_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(10))
});

/// What every agent is told besides: to act as on an older Linux, if the environment says which.
fn as_on_linux() -> impl Iterator<Item = OsString> {
    let version = std::env::var_os("WEFT_TEST_AS_ON_LINUX").filter(|version| !version.is_empty());
    version.into_iter().flat_map(|version| ["--as-on-linux".into(), version])
}

pub(crate) struct World {
    prefix: String,
    run: PathBuf,
    /// Where the programs are attached; below it run the pods.
    cgroup: PathBuf,
    agent: Option<Child>,
    kept: BTreeMap<&'static str, Pod>,
    runtime: Runtime,
    started: u32,
}

/// A stream of events.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    stream: Streaming<Event>,
    runtime: &'a Runtime,
}

fn run(command: &str) {
    let words: Vec<&str> = command.split_whitespace().collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap_or_else(|error| panic!("{command}: {error}"));
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a command quietly; it may fail.
fn attempt(command: &str) {
    let words: Vec<&str> = command.split_whitespace().collect();
    let _ = Command::new(words[0]).args(&words[1..]).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

impl World {
    /// Three namespaces in a row, and an agent that enrolled none of them.
    pub(crate) fn new() -> Self {
        let mut world = Self::bare("wfdp", &["a", "b", "c"]);
        world.join(("a", 1), ("b", 2), 99);
        world.join(("c", 3), ("b", 2), 98);
        // Second addresses, which nobody uses without asking for them.
        for address in ["10.98.0.77/24", "fd98::77/64"] {
            world.ip("c", &format!("addr add {address} dev to98 nodad preferred_lft 0"));
        }
        world.ip("a", "addr add 10.99.0.11/24 dev to99");
        world.start_agent(&[]);
        world
    }

    /// Namespaces with nothing in them, and no agent. `tag` is for one use per process.
    pub(crate) fn bare(tag: &str, names: &[&str]) -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test needs root: it makes network namespaces and loads programs"
        );
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let cgroup2 = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("a cgroup2 mount");
        let cgroup2 = PathBuf::from(cgroup2.split(' ').nth(4).unwrap());
        remove_leftovers(tag, &cgroup2);
        let prefix = format!("{tag}{}", std::process::id());
        let world = Self {
            run: PathBuf::from("/run").join(&prefix),
            cgroup: cgroup2.join(&prefix).join("pods"),
            agent: None,
            kept: BTreeMap::new(),
            runtime: Runtime::new().unwrap(),
            started: 0,
            prefix,
        };
        // From here on drop removes what is there.
        fs::create_dir_all(&world.cgroup).unwrap();
        fs::create_dir_all(world.run.join("bpffs")).unwrap();
        run(&format!("mount -t bpf bpffs {}", world.run.join("bpffs").display()));
        for name in names {
            run(&format!("ip netns add {}{name}", world.prefix));
            world.ip(name, "link set lo up");
        }
        world
    }

    /// Runs ip(8) in a namespace.
    pub(crate) fn ip(&self, name: &str, arguments: &str) {
        run(&format!("ip -n {}{name} {arguments}", self.prefix));
    }

    /// A directory of this run's own.
    pub(crate) fn directory(&self) -> &Path {
        &self.run
    }

    /// The cgroup to which the programs are attached.
    pub(crate) fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// A veth pair between two namespaces, with addresses of both families.
    pub(crate) fn join(&self, one: (&str, u8), other: (&str, u8), net: u8) {
        let prefix = &self.prefix;
        run(&format!(
            "ip link add to{net} netns {prefix}{} type veth peer name to{net} netns {prefix}{}",
            one.0, other.0
        ));
        for (name, host) in [one, other] {
            self.ip(name, &format!("addr add 10.{net}.0.{host}/24 dev to{net}"));
            self.ip(name, &format!("addr add fd{net}::{host}/64 dev to{net} nodad"));
            self.ip(name, &format!("link set to{net} up"));
        }
    }

    pub(crate) fn start_agent(&mut self, flags: &[&str]) {
        self.started += 1;
        let log = fs::File::create(self.run.join(format!("agent-{}.log", self.started))).unwrap();
        let agent = Command::new(AGENT)
            .args(["run", "--socket"])
            .arg(self.run.join("agent.sock"))
            .arg("--pin-dir")
            .arg(self.pin_dir())
            .arg("--cgroup")
            .arg(&self.cgroup)
            .args(flags)
            .args(as_on_linux())
            .stdout(Stdio::from(log.try_clone().unwrap()))
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        self.agent = Some(agent);
        self.eventually("the agent's socket", Self::try_channel);
    }

    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    pub(crate) fn agent_log(&self) -> String {
        fs::read_to_string(self.run.join(format!("agent-{}.log", self.started))).unwrap_or_default()
    }

    fn pin_dir(&self) -> PathBuf {
        self.run.join("bpffs/v1")
    }

    pub(crate) fn unload(&self) {
        run(&format!("{AGENT} unload --pin-dir {}", self.pin_dir().display()));
    }

    /// Switches the node's redirection, as a person would.
    pub(crate) fn bypass(&self, state: &str) {
        run(&format!("{AGENT} bypass {state} --pin-dir {}", self.pin_dir().display()));
    }

    pub(crate) fn pins_are_gone(&self) -> bool {
        !self.pin_dir().exists()
    }

    /// Asks again and again until there is an answer.
    pub(crate) fn eventually<T>(&self, what: &str, mut ask: impl FnMut(&Self) -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            if let Some(answer) = ask(self) {
                return answer;
            }
            assert!(begin.elapsed() < *PATIENCE, "{what} did not come within {:?}: {}", *PATIENCE, self.agent_log());
            std::thread::yield_now();
        }
    }

    fn try_channel(&self) -> Option<Channel> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.run.join("agent.sock").display())).unwrap();
        self.runtime.block_on(endpoint.connect()).ok()
    }

    fn channel(&self) -> Channel {
        self.try_channel().expect("a running agent")
    }

    /// An enrolment of one of the namespaces, as a sandbox would ask for it.
    pub(crate) fn request(&self, name: &str) -> EnrolRequest {
        let ips = match name {
            "a" => vec!["10.99.0.1", "fd99::1"],
            "b" => vec!["10.99.0.2", "fd99::2", "10.98.0.2", "fd98::2"],
            "c" => vec!["10.98.0.3", "fd98::3"],
            _ => panic!("{name} is not meshed"),
        };
        EnrolRequest {
            pod: Some(PodRef { namespace: "test".into(), name: name.into() }),
            uid: String::new(),
            netns_path: self.netns(name),
            ips: ips.into_iter().map(Into::into).collect(),
            proxy_uid: 2102,
            outbound_port: 4140,
            inbound_port: 4143,
            skip_outbound_ports: vec![PortRange { first: 9090, last: 9090 }, PortRange { first: 4567, last: 4568 }],
            skip_inbound_ports: vec![PortRange { first: 4191, last: 4191 }, PortRange { first: 9000, last: 9100 }],
            skip_subnets: vec!["10.98.0.64/27".into(), "fd98::77/128".into()],
            ..EnrolRequest::default()
        }
    }

    pub(crate) fn enrol(&self, request: EnrolRequest) -> Result<EnrolResponse, Status> {
        let mut client = PodsClient::new(self.channel());
        self.runtime.block_on(client.enrol(request)).map(tonic::Response::into_inner)
    }

    pub(crate) fn withdraw(&self, name: &str) {
        let pod = Some(PodRef { namespace: "test".into(), name: name.into() });
        let mut client = PodsClient::new(self.channel());
        self.runtime.block_on(client.withdraw(WithdrawRequest { pod })).unwrap();
    }

    pub(crate) fn status(&self) -> StatusResponse {
        let mut client = StatusClient::new(self.channel());
        self.runtime.block_on(client.get(StatusRequest {})).unwrap().into_inner()
    }

    pub(crate) fn try_watch(&self, request: WatchRequest) -> Result<Watch<'static>, Status> {
        // A runtime of its own, so that the world can be borrowed while the stream is open.
        let runtime: &'static Runtime = Box::leak(Box::new(Runtime::new().unwrap()));
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.run.join("agent.sock").display())).unwrap();
        let stream =
            runtime.block_on(async { TraceClient::new(endpoint.connect().await.unwrap()).watch(request).await })?;
        Ok(Watch { stream: stream.into_inner(), runtime })
    }

    pub(crate) fn watch(&self, request: WatchRequest) -> Watch<'static> {
        self.try_watch(request).unwrap()
    }

    pub(crate) fn netns(&self, name: &str) -> String {
        format!("/run/netns/{}{name}", self.prefix)
    }

    /// Starts a process in a namespace.
    pub(crate) fn pod(&self, netns: &str, uid: u32) -> Pod {
        Pod::start(&self.cgroup, &self.netns(netns), uid, uid)
    }

    /// Keeps a process for later checks.
    pub(crate) fn keep(&mut self, name: &'static str, start: impl FnOnce(&Self) -> Pod) {
        let pod = start(self);
        self.kept.insert(name, pod);
    }

    pub(crate) fn drop_kept(&mut self, name: &str) {
        assert!(self.kept.remove(name).is_some(), "nobody keeps {name}");
    }

    /// Starts a process in a namespace and in a cgroup of its own below the one that all others share.
    pub(crate) fn pod_in(&self, cgroup: &str, netns: &str, uid: u32) -> Pod {
        self.cgroup_id(cgroup);
        Pod::start(&self.cgroup.join(cgroup), &self.netns(netns), uid, uid)
    }

    /// The id of such a cgroup, made if it is not there.
    pub(crate) fn cgroup_id(&self, cgroup: &str) -> u64 {
        let path = self.cgroup.join(cgroup);
        fs::create_dir_all(&path).unwrap();
        fs::metadata(path).unwrap().ino()
    }

    pub(crate) fn explain(&self, request: ExplainRequest) -> Result<ExplainResponse, Status> {
        let mut client = TraceClient::new(self.channel());
        self.runtime.block_on(client.explain(request)).map(tonic::Response::into_inner)
    }
}

impl Watch<'_> {
    pub(crate) fn try_next(&mut self, patience: Duration) -> Option<Event> {
        let next = async { tokio::time::timeout(patience, self.stream.next()).await };
        self.runtime.block_on(next).ok().flatten().map(|event| event.unwrap())
    }

    pub(crate) fn find(&mut self, wanted: impl Fn(&Event) -> bool) -> Event {
        let mut seen = Vec::new();
        while let Some(event) = self.try_next(*PATIENCE) {
            if wanted(&event) {
                return event;
            }
            seen.push(event);
        }
        panic!("the event did not come; these did: {seen:#?}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.kept.clear();
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        remove(&self.prefix, self.cgroup.parent().unwrap());
    }
}

/// Removes everything that carries a name.
fn remove(prefix: &str, cgroup: &Path) {
    let namespaces = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = namespaces.filter_map(|entry| entry.file_name().into_string().ok());
    for name in names.filter(|name| name.strip_prefix(prefix).is_some_and(|rest| !rest.starts_with(char::is_numeric))) {
        attempt(&format!("ip netns del {name}"));
    }
    attempt(&format!("umount /run/{prefix}/bpffs"));
    let _ = fs::remove_dir_all(Path::new("/run").join(prefix));
    let begin = Instant::now();
    // The kernel needs a moment to bury the last process.
    while !remove_cgroup(cgroup) && begin.elapsed() < *PATIENCE {
        std::thread::yield_now();
    }
}

/// Removes a cgroup and those below it; says whether it is gone.
fn remove_cgroup(cgroup: &Path) -> bool {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    for child in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_cgroup(&child.path());
    }
    fs::remove_dir(cgroup).is_ok() || !cgroup.exists()
}

/// Removes what runs left behind that were killed.
fn remove_leftovers(tag: &str, cgroup2: &Path) {
    let runs = fs::read_dir("/run").into_iter().flatten().flatten();
    for name in runs.filter_map(|entry| entry.file_name().into_string().ok()) {
        let process = name.strip_prefix(tag).filter(|rest| rest.parse::<u32>().is_ok());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            remove(&name, &cgroup2.join(&name));
        }
    }
}

/// For tests of the agent's own troubles.
#[allow(dead_code, reason = "each test has its own part of the world")]
impl World {
    /// Where the agents pin that nobody told otherwise.
    pub(crate) fn pins(&self) -> PathBuf {
        self.pin_dir()
    }

    /// Removes all pins, as somebody else would.
    pub(crate) fn remove_pins(&self) {
        // The agent may make some of them again while others are being removed.
        self.eventually("the end of the pins", |world| fs::remove_dir_all(world.pins()).ok());
    }

    /// How many programs an agent has to attach to the cgroup: one more as on Linux 5.10, where sockets carry cookies.
    pub(crate) fn cgroup_programs() -> usize {
        8 + usize::from(as_on_linux().next().is_some())
    }

    /// The arguments of an agent that pins elsewhere.
    pub(crate) fn agent_arguments(&self, pin_dir: &Path, flags: &[&str]) -> Vec<std::ffi::OsString> {
        let mut arguments: Vec<std::ffi::OsString> = ["run", "--socket"].map(Into::into).into();
        arguments.push(self.run.join("agent.sock").into());
        arguments.extend(["--pin-dir".into(), pin_dir.into(), "--cgroup".into(), self.cgroup.clone().into()]);
        arguments.extend(flags.iter().map(Into::into));
        arguments.extend(as_on_linux());
        arguments
    }

    /// A file for what the next agent says; [`Self::agent_log`] reads it.
    pub(crate) fn next_log(&mut self) -> fs::File {
        self.started += 1;
        fs::File::create(self.run.join(format!("agent-{}.log", self.started))).unwrap()
    }

    /// Starts a program in the agent's place, without waiting for it.
    pub(crate) fn spawn_agent(&mut self, command: &mut Command) {
        let log = self.next_log();
        let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        assert!(self.agent.replace(child).is_none(), "an agent runs");
    }

    /// Starts an agent that pins elsewhere, and waits for it.
    pub(crate) fn start_agent_at(&mut self, pin_dir: &Path, flags: &[&str]) {
        let arguments = self.agent_arguments(pin_dir, flags);
        self.spawn_agent(Command::new(AGENT).args(arguments));
        self.wait_for_agent();
    }

    pub(crate) fn wait_for_agent(&self) {
        self.eventually("the agent's socket", Self::try_channel);
    }

    pub(crate) fn is_served(&self) -> bool {
        self.try_channel().is_some()
    }

    pub(crate) fn agent_pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.agent.as_ref().unwrap().id().cast_signed())
    }

    /// Waits until the agent ends by itself; true if it says that it succeeded.
    pub(crate) fn agent_ended(&mut self) -> bool {
        let mut agent = self.agent.take().unwrap();
        let ended = self.eventually("the agent's end", |_| agent.try_wait().unwrap());
        ended.success()
    }

    /// Lets the agent be: what it is now is somebody else's to end.
    pub(crate) fn take_agent(&mut self) -> Child {
        self.agent.take().unwrap()
    }

    /// A process in one of the namespaces, whose servers answer as the proxy.
    pub(crate) fn proxy_of(&self, netns: &str) -> Pod {
        let mut proxy = self.pod(netns, 2102);
        proxy.ok("proxy");
        proxy
    }
}
