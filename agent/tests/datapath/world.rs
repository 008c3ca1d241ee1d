//! The namespaces, the cgroup, the bpffs, the agent: made with unique names, removed on drop.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;
use tokio_stream::StreamExt;
use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};
use weft_proto::agent::{
    EnrolRequest, EnrolResponse, Event, PodRef, PortRange, StatusRequest, StatusResponse, WatchRequest,
    WithdrawRequest, pods_client::PodsClient, status_client::StatusClient, trace_client::TraceClient,
};

use crate::pod::Pod;

const AGENT: &str = env!("CARGO_BIN_EXE_weft-agent");
/// For an agent under load on an emulated machine, too.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct World {
    prefix: String,
    run: PathBuf,
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

impl World {
    pub(crate) fn new() -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test needs root: it makes network namespaces and loads programs"
        );
        let prefix = format!("wfdp{}", std::process::id());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let cgroup2 = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("a cgroup2 mount");
        let cgroup = PathBuf::from(cgroup2.split(' ').nth(4).unwrap()).join(&prefix);
        let world = Self {
            run: PathBuf::from("/run").join(&prefix),
            cgroup,
            agent: None,
            kept: BTreeMap::new(),
            runtime: Runtime::new().unwrap(),
            started: 0,
            prefix,
        };
        // From here on drop removes what is there.
        fs::create_dir(&world.cgroup).unwrap();
        fs::create_dir_all(world.run.join("bpffs")).unwrap();
        run(&format!("mount -t bpf bpffs {}", world.run.join("bpffs").display()));
        for name in ["a", "b", "c"] {
            run(&format!("ip netns add {}{name}", world.prefix));
            run(&format!("ip -n {}{name} link set lo up", world.prefix));
        }
        world.join(("a", 1), ("b", 2), 99);
        world.join(("c", 3), ("b", 2), 98);
        // Second addresses, which nobody uses without asking for them.
        for address in ["10.98.0.77/24", "fd98::77/64"] {
            run(&format!("ip -n {}c addr add {address} dev to98 nodad preferred_lft 0", world.prefix));
        }
        run(&format!("ip -n {}a addr add 10.99.0.11/24 dev to99", world.prefix));
        let mut world = world;
        world.start_agent(&[]);
        world
    }

    /// A veth pair between two namespaces, with addresses of both families.
    fn join(&self, one: (&str, u8), other: (&str, u8), net: u8) {
        let prefix = &self.prefix;
        run(&format!(
            "ip link add to{net} netns {prefix}{} type veth peer name to{net} netns {prefix}{}",
            one.0, other.0
        ));
        for (name, host) in [one, other] {
            run(&format!("ip -n {prefix}{name} addr add 10.{net}.0.{host}/24 dev to{net}"));
            run(&format!("ip -n {prefix}{name} addr add fd{net}::{host}/64 dev to{net} nodad"));
            run(&format!("ip -n {prefix}{name} link set to{net} up"));
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
            .stdout(Stdio::from(log.try_clone().unwrap()))
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        self.agent = Some(agent);
        self.eventually("the agent's socket", |world| world.try_channel());
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
            assert!(begin.elapsed() < PATIENCE, "{what} did not come within {PATIENCE:?}: {}", self.agent_log());
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
            skip_inbound_ports: vec![PortRange { first: 4190, last: 4191 }, PortRange { first: 9000, last: 9100 }],
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

    fn netns(&self, name: &str) -> String {
        format!("/run/netns/{}{name}", self.prefix)
    }

    /// Starts a process in a namespace.
    pub(crate) fn pod(&self, netns: &str, uid: u32) -> Pod {
        Pod::start(&self.cgroup, &self.netns(netns), uid)
    }

    /// Keeps a process for later checks.
    pub(crate) fn keep(&mut self, name: &'static str, start: impl FnOnce(&Self) -> Pod) {
        let pod = start(self);
        self.kept.insert(name, pod);
    }

    pub(crate) fn drop_kept(&mut self, name: &str) {
        assert!(self.kept.remove(name).is_some(), "nobody keeps {name}");
    }
}

impl Watch<'_> {
    pub(crate) fn try_next(&mut self, patience: Duration) -> Option<Event> {
        let next = async { tokio::time::timeout(patience, self.stream.next()).await };
        self.runtime.block_on(next).ok().flatten().map(|event| event.unwrap())
    }

    pub(crate) fn find(&mut self, wanted: impl Fn(&Event) -> bool) -> Event {
        let mut seen = Vec::new();
        while let Some(event) = self.try_next(PATIENCE) {
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
        let quietly = |command: &str| {
            let words: Vec<&str> = command.split_whitespace().collect();
            let _ = Command::new(words[0]).args(&words[1..]).stderr(Stdio::null()).status();
        };
        for name in ["a", "b", "c"] {
            quietly(&format!("ip netns del {}{name}", self.prefix));
        }
        quietly(&format!("umount {}", self.run.join("bpffs").display()));
        let _ = fs::remove_dir_all(&self.run);
        let begin = Instant::now();
        // The kernel needs a moment to bury the last process.
        while fs::remove_dir(&self.cgroup).is_err() && begin.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
    }
}
