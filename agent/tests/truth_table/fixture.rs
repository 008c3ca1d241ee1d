//! The fixture for the cases of one column: the pods, their servers, and the rules in force. Sets up what a case
//! describes, runs it and restores the state. Refuses to judge.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::PathBuf,
    thread,
};

use nix::sched::{CloneFlags, setns};
use weft_proto::agent::{EnrolRequest, PortRange, WatchRequest};
use weft_test_kit::{
    node::{Node, Watch},
    pod::{Answer, Pod},
};

use crate::{AGENT, case::*, linkerd_init, raw::Balancer, trace};

/// The kind of interception.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Column {
    Iptables,
    Weft,
}

impl Column {
    pub(crate) const ALL: [Self; 2] = [Self::Iptables, Self::Weft];

    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Weft => "Weft",
        }
    }

    /// The purpose of its node.
    const fn purpose(self) -> &'static str {
        match self {
            Self::Iptables => "truth-iptables",
            Self::Weft => "truth-weft",
        }
    }
}

/// The rules in force for the pod.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) proxy_uid: u32,
    pub(crate) proxy_gid: Option<u32>,
    pub(crate) only_port: Option<u16>,
    pub(crate) ipv6: bool,
    strict: bool,
    bypass: bool,
}

const USUAL: Rules =
    Rules { proxy_uid: PROXY_UID, proxy_gid: None, only_port: None, ipv6: true, strict: false, bypass: false };

/// Verdict counters by `direction verdict`.
pub(crate) type Counts = BTreeMap<String, u64>;

/// The outcome of a case.
#[derive(Debug)]
pub(crate) struct Findings {
    /// One per target.
    pub(crate) answers: Vec<Answer>,
    /// The changes of the agent's counters.
    pub(crate) verdicts: Counts,
    /// The traced events: direction and verdict, and the destination that was dialled.
    pub(crate) traced: Vec<(String, String)>,
    /// By target, the explanations that would be right, and the actual one.
    pub(crate) explained: Vec<(&'static str, BTreeSet<String>, String)>,
    /// The changes of the pod's own network counters (`TcpExt` of /proc/net/netstat).
    pub(crate) kernel: Counts,
}

pub(crate) struct Fixture {
    column: Column,
    // Dropped before the node, whose drop removes their cgroups.
    balancer: Option<Balancer>,
    proxy: Option<Pod>,
    _servers: Vec<Pod>,
    sysctls: Vec<(&'static str, String)>,
    /// With Weft only.
    watch: Option<Watch>,
    node: Node,
}

impl Fixture {
    pub(crate) fn new(column: Column) -> Self {
        let mut node = Node::new(column.purpose(), AGENT).unwrap();
        for name in [POD, PEER, MATE, NESTED] {
            node.add_netns(name);
        }
        for device in ["to97", "to98", "to99"] {
            let (one, other) = match device {
                "to99" => ((POD, 2), (PEER, 3)),
                "to98" => ((POD, 2), (MATE, 4)),
                _ => ((POD, 2), (NESTED, 5)),
            };
            node.join(one, other, device[2..].parse().unwrap());
        }
        let addresses = [
            // The pod's second addresses, its own link-local one, and those of the peer in a skipped network.
            (POD, "10.99.0.22/24", "to99"),
            (POD, "fd99::22/64", "to99"),
            (POD, "fe80::2/64", "to99"),
            (PEER, "10.99.0.77/24", "to99"),
            (PEER, "fd99::77/64", "to99"),
        ];
        for (name, address, device) in addresses {
            node.ip(name, &format!("addr add {address} dev {device} nodad preferred_lft 0"));
        }
        let routes = [
            (POD, "default via 10.99.0.3"),
            (POD, "default via fd99::3"),
            (NESTED, "default via 10.97.0.2"),
            (PEER, "10.97.0.0/24 via 10.99.0.2"),
        ];
        for (name, route) in routes {
            node.ip(name, &format!("route add {route}"));
        }
        for place in ["app", "proxy"] {
            fs::create_dir(node.cgroup().join(place)).unwrap();
        }
        let lent = node.directory().join("lent");
        fs::create_dir(&lent).unwrap();
        fs::set_permissions(lent, fs::Permissions::from_mode(0o777)).unwrap();
        if column == Column::Weft {
            node.start_agent(&[]);
        }
        let watch = (column == Column::Weft).then(|| node.watch(WatchRequest::default()));
        let mut fixture =
            Self { column, balancer: None, proxy: None, _servers: Vec::new(), sysctls: Vec::new(), watch, node };
        fixture.write_sysctl("net/ipv4/ip_forward", "1");
        for netns in [POD, PEER, MATE] {
            let mut server = fixture.start(Caller { netns, ..ROOT });
            for port in [53, 443, 4567, 8080, 8081] {
                server.ok(&format!("stand [::]:{port}"));
            }
            if netns == POD {
                server.ok("stand [fd99::2]:4191");
            }
            server.ok("echo [::]:5353");
            fixture._servers.push(server);
        }
        let mate = fixture.start_proxy(MATE, "stand");
        fixture._servers.push(mate);
        fixture.proxy = Some(fixture.start_proxy(POD, "stand"));
        fixture.enforce(MATE, &USUAL);
        fixture.enforce(POD, &USUAL);
        fixture
    }

    /// Runs a case and restores the state.
    pub(crate) fn run(&mut self, case: &Case) -> Findings {
        let rules = self.prepare(case.given);
        let explained = if self.column == Column::Weft { self.explained(case) } else { Vec::new() };
        if let Some(watch) = &mut self.watch {
            trace::skip_old(watch);
        }
        let (verdicts, kernel) = (self.verdicts(), self.kernel_counters());
        let answers = self.act(case, &rules);
        let verdicts = moved(self.verdicts(), &verdicts);
        let traced = self.watch.as_mut().map(|watch| trace::traced(watch, case, &verdicts)).unwrap_or_default();
        let findings =
            Findings { answers, verdicts, traced, explained, kernel: moved(self.kernel_counters(), &kernel) };
        self.put_back(case);
        findings
    }

    /// Requests explanations of a case's connections.
    fn explained(&self, case: &Case) -> Vec<(&'static str, BTreeSet<String>, String)> {
        let ask = |target: &&'static str| {
            let (request, right) = trace::question(case, target)?;
            Some((*target, right, self.node.explain(request).unwrap().verdict))
        };
        case.to.iter().filter_map(ask).collect()
    }

    pub(crate) fn agent_log(&self) -> String {
        self.node.agent_log()
    }

    fn prepare(&mut self, given: &[Given]) -> Rules {
        let mut rules = USUAL;
        for given in given {
            match *given {
                Given::NoRules | Given::NoProxy => {}
                Given::Ipv4Only => rules.ipv6 = false,
                Given::ProxyGroup => rules.proxy_gid = Some(PROXY_GID),
                Given::ProxyUser(uid) => rules.proxy_uid = uid,
                Given::Strict => rules.strict = true,
                Given::OnlyPort(port) => rules.only_port = Some(port),
                Given::Bypassed => rules.bypass = true,
                Given::NodeBypassed if self.column == Column::Weft => self.node.bypass("on"),
                Given::NodeBypassed => rules.bypass = true,
                Given::InitRules if self.column == Column::Weft => {
                    linkerd_init::install(&self.node.netns(POD), &USUAL);
                }
                Given::InitRules => {}
                Given::Tracking => linkerd_init::track(&self.node.netns(POD), true),
                Given::Sysctl(path, value) => {
                    let before = self.write_sysctl(path, value);
                    self.sysctls.push((path, before));
                }
                Given::BalancerAbove => self.balance(self.node.root_cgroup().to_owned()),
                Given::BalancerBelow => self.balance(self.cgroup(Place::Pod)),
            }
        }
        if given.contains(&Given::NoProxy) {
            self.proxy = None;
        } else if !self.sysctls.is_empty() {
            // Some are read when a socket begins to listen.
            self.proxy = None;
            self.proxy = Some(self.start_proxy(POD, "stand"));
        }
        if given.contains(&Given::NoRules) {
            self.lift();
        } else if !given.is_empty() {
            self.enforce(POD, &rules);
        }
        rules
    }

    fn put_back(&mut self, case: &Case) {
        self.balancer = None;
        let sysctls = std::mem::take(&mut self.sysctls);
        if matches!(case.act, Act::Cancel(_) | Act::Overflow) || !sysctls.is_empty() {
            self.proxy = None;
        }
        for (path, value) in sysctls {
            self.write_sysctl(path, &value);
        }
        if case.given.contains(&Given::Tracking) {
            linkerd_init::track(&self.node.netns(POD), false);
        }
        if case.given.contains(&Given::NodeBypassed) && self.column == Column::Weft {
            self.node.bypass("off");
        }
        if case.given.contains(&Given::InitRules) && self.column == Column::Weft {
            linkerd_init::flush(&self.node.netns(POD));
        }
        if !case.given.is_empty() {
            self.enforce(POD, &USUAL);
        }
        if self.proxy.is_none() {
            self.proxy = Some(self.start_proxy(POD, "stand"));
        }
    }

    fn balance(&mut self, cgroup: PathBuf) {
        let parse = |address: &str| {
            let address: SocketAddr = address.parse().unwrap();
            let SocketAddr::V4(address) = address else { panic!("{address} is not IPv4") };
            (*address.ip(), address.port())
        };
        let (from, to): ((Ipv4Addr, u16), (Ipv4Addr, u16)) = (parse(BALANCED.0), parse(BALANCED.1));
        self.balancer = Some(Balancer::attach(&fs::File::open(cgroup).unwrap(), from, to).unwrap());
    }

    fn act(&mut self, case: &Case, rules: &Rules) -> Vec<Answer> {
        let mut client = self.start(case.by);
        let each = |client: &mut Pod, command: &dyn Fn(&str) -> String| {
            case.to.iter().map(|target| client.answer(&command(target))).collect()
        };
        match case.act {
            Act::Dial(how) => each(&mut client, &|target| format!("dial {target} {}", words(how))),
            Act::ConnectEarly => {
                self.lift();
                let first = case.to[0];
                client.ok(&format!("open {first}"));
                self.enforce(POD, rules);
                vec![client.answer("use")]
            }
            Act::CreateEarly => {
                self.lift();
                case.to.iter().for_each(|target| client.ok(&format!("create {target}")));
                self.enforce(POD, rules);
                each(&mut client, &|target| format!("connect-created {target}"))
            }
            Act::Borrow(owner) => {
                let mut owner = self.start(owner);
                let borrow = |target: &&str| {
                    let path = self.node.directory().join("lent/socket");
                    let _ = fs::remove_file(&path);
                    owner.ok(&format!("lend {} {target}", path.display()));
                    client.answer(&format!("borrow {} {target}", path.display()))
                };
                case.to.iter().map(borrow).collect()
            }
            Act::Cancel(first) => {
                let mut proxy = self.halt_proxy();
                let mut others = self.start(case.by);
                // The queue has room for two: the kernel counts from zero.
                (0..3).for_each(|_| others.ok(&format!("start {first}")));
                let source = client.say(&format!("cancel {first}"));
                assert!(!source.starts_with("error"), "{source}");
                proxy.ok("resume");
                self.proxy = Some(proxy);
                each(&mut client, &|target| format!("dial {target} from {source}"))
            }
            Act::Overflow => {
                let mut proxy = self.halt_proxy();
                case.to.iter().for_each(|target| client.ok(&format!("start {target}")));
                proxy.ok("resume");
                self.proxy = Some(proxy);
                each(&mut client, &|_| "finish".to_owned())
            }
        }
    }

    /// A proxy that replaces the usual one, with room for two connections, and that accepts none.
    fn halt_proxy(&mut self) -> Pod {
        self.proxy = None;
        self.start_proxy(POD, "halt")
    }

    fn start_proxy(&self, netns: &'static str, how: &str) -> Pod {
        let mut proxy = self.start(Caller { netns, ..PROXY });
        // Both kinds of a listener of its own: of both families, and of IPv4 alone, as with `disableIPv6: true`.
        for address in ["127.0.0.1:4140", "[::1]:4140", "[::]:4143", "[::]:4190", "0.0.0.0:4191"] {
            proxy.ok(&format!("{how} {address}"));
        }
        proxy
    }

    /// Starts a process of the table.
    fn start(&self, caller: Caller) -> Pod {
        let start = |uid, gid| self.node.pod_at(self.cgroup(caller.place), caller.netns, uid, gid);
        if caller.place != Place::UserNamespace {
            return start(caller.uid, caller.gid);
        }
        let mut process = start(0, 0);
        process.ok("unshare-users");
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{}/{map}", process.id()), format!("0 {SHIFT} 65536")).unwrap();
        }
        process.ok(&format!("become {} {}", caller.uid, caller.gid));
        process
    }

    fn cgroup(&self, place: Place) -> PathBuf {
        match place {
            Place::Pod => self.node.cgroup().join("app"),
            Place::Proxy | Place::UserNamespace => self.node.cgroup().join("proxy"),
            Place::Host => self.node.root_cgroup().to_owned(),
        }
    }

    /// Puts rules in force for a pod.
    fn enforce(&self, netns: &str, rules: &Rules) {
        match self.column {
            Column::Iptables if rules.bypass => linkerd_init::flush(&self.node.netns(netns)),
            Column::Iptables => linkerd_init::install(&self.node.netns(netns), rules),
            Column::Weft => drop(self.node.enrol(self.request(netns, rules)).unwrap()),
        }
    }

    /// Removes the pod's rules.
    fn lift(&self) {
        match self.column {
            Column::Iptables => linkerd_init::flush(&self.node.netns(POD)),
            Column::Weft => self.node.withdraw(POD),
        }
    }

    fn request(&self, netns: &str, rules: &Rules) -> EnrolRequest {
        let one = |port: u16| PortRange { first: port.into(), last: port.into() };
        let mut skip_inbound_ports: Vec<_> = SKIPPED_INBOUND.map(one).into();
        if let Some(port) = rules.only_port {
            let port = u32::from(port);
            skip_inbound_ports =
                vec![PortRange { first: 1, last: port - 1 }, PortRange { first: port + 1, last: u16::MAX.into() }];
        }
        let ips = if netns == POD { OWN.to_vec() } else { vec!["10.98.0.4", "fd98::4"] };
        EnrolRequest {
            pod: Some(Node::pod_ref(netns)),
            uid: String::new(),
            netns_path: self.node.netns(netns).display().to_string(),
            ips: ips.into_iter().map(Into::into).collect(),
            proxy_uid: rules.proxy_uid,
            outbound_port: OUTBOUND_PORT.into(),
            inbound_port: INBOUND_PORT.into(),
            skip_outbound_ports: SKIPPED_OUTBOUND.map(one).into(),
            skip_inbound_ports,
            skip_subnets: SKIPPED_SUBNETS.map(Into::into).into(),
            proxy_gid: rules.proxy_gid.unwrap_or_default(),
            // A cgroup's id is its directory's inode number.
            proxy_cgroup: if rules.strict { fs::metadata(self.cgroup(Place::Proxy)).unwrap().ino() } else { 0 },
            bypass: rules.bypass,
            control_port: 0,
            admin_port: 0,
        }
    }

    fn verdicts(&self) -> Counts {
        if self.column == Column::Iptables {
            return Counts::new();
        }
        let counts = self.node.status().verdicts.into_iter();
        counts.map(|count| (trace::label(count.direction(), &count.verdict), count.count)).collect()
    }

    /// `TcpExt` of the pod.
    fn kernel_counters(&self) -> Counts {
        let text = self.inside(|| fs::read_to_string("/proc/thread-self/net/netstat").unwrap());
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let values = values.split(' ').map(|value| value.parse().unwrap_or_default());
        names.split(' ').map(str::to_owned).zip(values).collect()
    }

    /// Writes a sysctl of the pod and returns its old value.
    fn write_sysctl(&self, path: &str, value: &str) -> String {
        let path = format!("/proc/sys/{path}");
        self.inside(|| {
            let before = fs::read_to_string(&path).unwrap();
            fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
            before.trim_end().to_owned()
        })
    }

    /// Runs a function in the pod's network namespace, on a thread that ends with it.
    fn inside<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let netns = fs::File::open(self.node.netns(POD)).unwrap();
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                setns(&netns, CloneFlags::CLONE_NEWNET).unwrap();
                act()
            });
            inside.join().unwrap()
        })
    }
}

/// The changes of counters that changed.
fn moved(after: Counts, before: &Counts) -> Counts {
    let moves = after.into_iter().map(|(name, count)| {
        let by = count - before.get(&name).copied().unwrap_or_default();
        (name, by)
    });
    moves.filter(|(_, by)| *by > 0).collect()
}

/// The command for a way to connect.
fn words(how: How) -> String {
    match how {
        How::Plain => "plain".into(),
        How::Nonblocking => "nonblocking".into(),
        How::FastOpenSend => "fast-open-send".into(),
        How::FastOpenConnect => "fast-open-connect".into(),
        How::Ring => "ring".into(),
        How::Multipath => "multipath".into(),
        How::Device(device) => format!("device {device}"),
        How::From(source) => format!("from {source}"),
        How::FromPort(source) => format!("from-port {source}"),
        How::After(first) => format!("after {first}"),
        How::Alternating(first) => format!("alternating {first}"),
        How::Beside(first) => format!("beside {first}"),
        How::Fresh => "fresh".into(),
        How::Udp => "udp".into(),
        How::Icmp => "icmp".into(),
        How::Via(first) => format!("via {first}"),
        How::RawSyn => "raw-syn".into(),
        How::PacketSyn => "packet-syn".into(),
    }
}
