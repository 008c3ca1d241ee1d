//! The host layer on a real kernel, as root. Every test has its own sandbox name and leaves nothing behind.
//!
//! The binary that starts containers is this one: called with the name of a hidden subcommand, it behaves as `weft`
//! does.

#![expect(clippy::print_stderr, reason = "a container that cannot start says why")]
#![expect(clippy::unwrap_used, reason = "a failure is the test's")]

use std::{
    fs,
    future::Future,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    process::{self, ExitCode, Stdio},
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use weft_sandbox::{
    config::{DNS_ADDRESS, Layout},
    host::{
        HostError, cgroup, cleanup,
        container::{self, Mount, Spec},
        iptables::{self, InitRules},
        janitor, mount_bpffs, netns, network,
        services::{self, Protocol, VirtualService},
    },
};
use weft_test_kit::{check::catch, mesh::unique_name, wait::blocking::eventually};

const POD_1: [&str; 2] = ["10.244.0.10", "fd00:10:244::a"];
const POD_2: [&str; 2] = ["10.244.0.11", "fd00:10:244::b"];
const POD_3: [&str; 2] = ["10.244.0.12", "fd00:10:244::c"];
const SERVICE: &str = "10.96.0.20:80";
/// Longest wait for something that should happen at once, on a busy machine.
const WAIT: Duration = Duration::from_secs(60);

type Test = (&'static str, fn(&'static Layout));

const TESTS: [Test; 12] = [
    ("pods_reach_each_other_in_both_families", |layout| run(pods_reach_each_other_in_both_families(layout))),
    ("the_node_reaches_pods_from_its_own_address", |layout| run(the_node_reaches_pods_from_its_own_address(layout))),
    ("pods_reach_the_name_servers_address", |layout| run(pods_reach_the_name_servers_address(layout))),
    ("a_service_reaches_all_of_its_endpoints", |layout| run(a_service_reaches_all_of_its_endpoints(layout))),
    ("a_service_reaches_the_pod_that_asks", |layout| run(a_service_reaches_the_pod_that_asks(layout))),
    ("a_service_without_endpoints_refuses_at_once", |layout| run(a_service_without_endpoints_refuses_at_once(layout))),
    ("init_rules_redirect_all_but_the_proxy", |layout| run(init_rules_redirect_all_but_the_proxy(layout))),
    ("a_container_is_what_its_specification_says", |layout| run(a_container_is_what_its_specification_says(layout))),
    ("a_container_that_cannot_be_says_why", |layout| run(a_container_that_cannot_be_says_why(layout))),
    ("everything_is_removed_and_nothing_of_others", |layout| run(everything_is_removed_and_nothing_of_others(layout))),
    ("the_lock_excludes_until_it_is_given_back", the_lock_excludes_until_it_is_given_back),
    ("the_janitor_cleans_up_unless_dismissed", |layout| run(the_janitor_cleans_up_unless_dismissed(layout))),
];

/// Without libtest: containers and the janitor need a binary whose `main` handles the hidden subcommands, with one
/// thread.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["sandbox-init", spec] => {
            let error = container::init(Path::new(spec));
            eprintln!("{error}");
            return ExitCode::from(error.exit_code());
        }
        ["sandbox-janitor", name] => {
            return janitor::run(name).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        _ => {}
    }
    let trials = TESTS.iter().map(|(name, test)| Trial::test(*name, || in_sandbox(*test))).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs a test with a sandbox's names of its own, and removes whatever carries them.
fn in_sandbox(test: fn(&'static Layout)) -> Result<(), Failed> {
    let layout: &'static Layout = Box::leak(Box::new(Layout::of(&unique_name("t"))));
    let outcome = catch(|| test(layout));
    let removed = cleanup::remove_everything(layout).and(cleanup::remove_everything(&other(layout)));
    outcome?;
    Ok(removed?)
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(test);
}

async fn pods_reach_each_other_in_both_families(layout: &Layout) {
    let pods = pods(layout).await;
    for address in POD_2 {
        let server = Banner::start(&pods.second, address, "second");
        let (said, from) = ask(&pods.first, server.address).unwrap();
        assert_eq!((said.as_str(), from), ("second", server.address));
    }
}

async fn the_node_reaches_pods_from_its_own_address(layout: &Layout) {
    let pods = pods(layout).await;
    for (address, node) in POD_1.into_iter().zip(["10.244.0.1", "fd00:10:244::1"]) {
        let server = Banner::start(&pods.first, address, "first");
        assert_eq!(ask(&pods.node, server.address).unwrap().0, "first");
        assert_eq!(server.last_peer(), ip(node));
    }
}

async fn pods_reach_the_name_servers_address(layout: &Layout) {
    let pods = pods(layout).await;
    // The rules are in force: the address is in the service CIDR, where every address that is not a Service's is
    // refused.
    services::apply(&pods.node, &[]).await.unwrap();
    let tcp = Banner::start_at(&pods.node, SocketAddr::new(DNS_ADDRESS, 53), "node");
    assert_eq!(ask(&pods.first, tcp.address).unwrap().0, "node");
    let server = netns::within(&pods.node, || UdpSocket::bind((DNS_ADDRESS, 53)).unwrap()).unwrap();
    let client = netns::within(&pods.first, || UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(WAIT)).unwrap();
    }
    let mut buffer = [0; 16];
    client.send_to(b"question", (DNS_ADDRESS, 53)).unwrap();
    let (_, peer) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(peer.ip(), ip(POD_1[0]));
    server.send_to(b"answer", peer).unwrap();
    assert_eq!(client.recv_from(&mut buffer).unwrap(), (6, SocketAddr::new(DNS_ADDRESS, 53)));
}

async fn a_service_reaches_all_of_its_endpoints(layout: &Layout) {
    let pods = pods(layout).await;
    let first = Banner::start(&pods.first, POD_1[0], "first");
    let second = Banner::start(&pods.second, POD_2[0], "second");
    let endpoints = vec![first.address, second.address];
    services::apply(&pods.node, &[service(endpoints)]).await.unwrap();
    for client in [&pods.third, &pods.node] {
        let said: Vec<String> = (0..64)
            .map(|_| {
                let (said, from) = ask(client, SERVICE.parse().unwrap()).unwrap();
                assert_eq!(from, SERVICE.parse().unwrap());
                said
            })
            .collect();
        for name in ["first", "second"] {
            assert!(said.iter().any(|said| said == name), "{name}: {said:?}");
        }
    }
    assert_eq!(second.last_peer(), ip("10.244.0.1"), "the node's own connections come from its address");
    services::apply(&pods.node, &[service(vec![second.address])]).await.unwrap();
    for _ in 0..16 {
        assert_eq!(ask(&pods.third, SERVICE.parse().unwrap()).unwrap().0, "second");
    }
    assert_eq!(second.last_peer(), ip(POD_3[0]), "a pod's address is kept");
}

async fn a_service_reaches_the_pod_that_asks(layout: &Layout) {
    let pods = pods(layout).await;
    let server = Banner::start(&pods.first, POD_1[0], "first");
    services::apply(&pods.node, &[service(vec![server.address])]).await.unwrap();
    assert_eq!(ask(&pods.first, SERVICE.parse().unwrap()).unwrap().0, "first");
}

async fn a_service_without_endpoints_refuses_at_once(layout: &Layout) {
    let pods = pods(layout).await;
    services::apply(&pods.node, &[service(vec![])]).await.unwrap();
    for client in [&pods.first, &pods.node] {
        for address in [SERVICE, "10.96.0.21:80"] {
            let error = ask(client, address.parse().unwrap()).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{address}");
        }
    }
}

async fn init_rules_redirect_all_but_the_proxy(layout: &Layout) {
    let pods = pods(layout).await;
    let rules = InitRules {
        proxy_uid: 2102,
        inbound_port: 4143,
        outbound_port: 4140,
        skip_inbound: vec!["9000".into()],
        skip_outbound: vec!["9001-9002".into()],
        skip_subnets: vec![],
        ipv6: true,
    };
    for _ in 0..2 {
        iptables::install(&pods.first, &rules).await.unwrap();
    }
    let saved = saved_rules(&pods.first);
    assert_eq!(saved.matches("-A PREROUTING -j PROXY_INIT_REDIRECT").count(), 1, "{saved}");
    let proxies = [(4143, "inbound"), (4140, "outbound")]
        .map(|(port, name)| Banner::start_at(&pods.first, SocketAddr::new(ip("0.0.0.0"), port), name));
    let there = Banner::start_at(&pods.second, SocketAddr::new(ip(POD_2[0]), 9001), "direct");
    let here = Banner::start_at(&pods.first, SocketAddr::new(ip(POD_1[0]), 9000), "direct");
    assert_eq!(ask(&pods.first, "10.244.0.11:80".parse().unwrap()).unwrap().0, "outbound");
    assert_eq!(ask(&pods.first, there.address).unwrap().0, "direct");
    assert_eq!(ask(&pods.second, "10.244.0.10:80".parse().unwrap()).unwrap().0, "inbound");
    assert_eq!(ask(&pods.second, here.address).unwrap().0, "direct");
    drop(proxies);
}

async fn a_container_is_what_its_specification_says(layout: &Layout) {
    let pods = pods(layout).await;
    let volume = layout.run_dir().join("volume");
    fs::create_dir_all(&volume).unwrap();
    fs::write(volume.join("token"), "secret").unwrap();
    let resolv = layout.run_dir().join("resolv.conf");
    fs::write(&resolv, "nameserver 10.96.0.10\n").unwrap();
    let script = "id -u; id -g; pwd; cat /var/run/secrets/tokens/token /etc/resolv.conf; ls /run; echo $A-$HOME-; \
                  touch /var/run/secrets/tokens/x 2>/dev/null || echo read-only; \
                  cat /proc/self/cgroup | grep ^0; readlink /proc/self/ns/net; \
                  grep -q '^SigIgn:.*[02468ace]...$' /proc/self/status && echo SIGPIPE ends it";
    let mut spec = spec(layout, &["sh", "-c", script]);
    spec.netns = Some(pods.first.clone());
    spec.uid = Some(2102);
    spec.working_dir = Some("/tmp".into());
    spec.env.push(("A".into(), "value".into()));
    spec.mounts = vec![
        Mount { source: volume, target: "/var/run/secrets/tokens".into(), read_only: true },
        Mount { source: resolv, target: "/etc/resolv.conf".into(), read_only: true },
    ];
    let (code, output) = run_container(layout, &spec).await;
    let namespace = netns::within(&pods.first, || fs::read_link("/proc/thread-self/ns/net").unwrap()).unwrap();
    let cgroup = format!("/{}/container", layout.cgroup().display());
    let expected = format!(
        "2102\n0\n/tmp\nsecretnameserver 10.96.0.10\nsecrets\nvalue--\nread-only\n0::{cgroup}\n{}\n\
         SIGPIPE ends it\n",
        namespace.display()
    );
    assert_eq!((code, output), (Some(0), expected));
    assert!(Path::new("/run/netns").exists() && !Path::new("/run/secrets/tokens").exists(), "the host sees no volumes");
}

async fn a_container_that_cannot_be_says_why(layout: &Layout) {
    cgroup::create(&cgroup_of(layout)).unwrap();
    fs::create_dir_all(layout.run_dir()).unwrap();
    let (code, output) = run_container(layout, &spec(layout, &["no-such-program"])).await;
    assert_eq!(code, Some(127), "{output}");
    assert!(output.contains("no-such-program"), "{output}");
    let mut elsewhere = spec(layout, &["true"]);
    elsewhere.mounts = vec![Mount { source: layout.run_dir(), target: "/no/such/place".into(), read_only: false }];
    let (code, output) = run_container(layout, &elsewhere).await;
    assert_eq!(code, Some(126), "{output}");
    assert!(output.contains("/no/such/place"), "{output}");
}

async fn everything_is_removed_and_nothing_of_others(layout: &Layout) {
    let other = other(layout);
    network::create_node(&other).await.unwrap();
    let pods = pods(layout).await;
    mount_bpffs(&layout.bpffs()).unwrap();
    mount_bpffs(&layout.bpffs()).unwrap();
    let mut sleeper = spawn(layout, &spec(layout, &["sleep", "1000"]), Stdio::null());
    eventually("a process in the cgroup", WAIT, || match &cgroup::processes(&cgroup_of(layout)).unwrap()[..] {
        [_] => Ok(()),
        found => Err(format!("{found:?}")),
    });
    network::detach_pod(layout, 3).await.unwrap();
    network::detach_pod(layout, 3).await.unwrap();
    assert!(!pods.third.exists());
    cleanup::remove_everything(layout).unwrap();
    sleeper.wait().await.unwrap();
    for path in [&pods.node, &pods.first, &layout.run_dir(), &cgroup_of(layout)] {
        assert!(!path.exists(), "{}", path.display());
    }
    cleanup::remove_everything(layout).unwrap();
    assert!(Path::new("/run/netns").join(other.node_netns()).exists());
}

fn the_lock_excludes_until_it_is_given_back(_: &'static Layout) {
    let name = format!("t{}-lock", process::id());
    let lock = cleanup::lock(&name).unwrap();
    match cleanup::lock(&name) {
        Err(error @ HostError::AlreadyRuns { .. }) => {
            assert!(error.to_string().contains(&process::id().to_string()), "{error}");
        }
        other => panic!("{other:?}"),
    }
    drop(lock);
    drop(cleanup::lock(&name).unwrap());
    assert!(!Path::new("/run/weft").join(format!("{name}.lock")).exists());
}

async fn the_janitor_cleans_up_unless_dismissed(layout: &Layout) {
    let name = name(layout);
    fs::create_dir_all(layout.run_dir()).unwrap();
    let weft = std::env::current_exe().unwrap();
    janitor::spawn(&weft, &name).unwrap().dismiss();
    assert!(layout.run_dir().exists());
    // The end of its pipe is all that a killed daemon would leave.
    drop(janitor::spawn(&weft, &name).unwrap());
    eventually("nothing left", WAIT, || if layout.run_dir().exists() { Err("files") } else { Ok(()) });
}

struct Pods {
    node: PathBuf,
    first: PathBuf,
    second: PathBuf,
    third: PathBuf,
}

async fn pods(layout: &Layout) -> Pods {
    cgroup::create(&cgroup_of(layout)).unwrap();
    fs::create_dir_all(layout.run_dir()).unwrap();
    let node = network::create_node(layout).await.unwrap();
    let ips = |ips: [&str; 2]| ips.map(ip);
    Pods {
        node,
        first: network::attach_pod(layout, 1, &ips(POD_1)).await.unwrap(),
        second: network::attach_pod(layout, 2, &ips(POD_2)).await.unwrap(),
        third: network::attach_pod(layout, 3, &ips(POD_3)).await.unwrap(),
    }
}

/// Sends its name to every client.
struct Banner {
    address: SocketAddr,
    peers: std::sync::mpsc::Receiver<IpAddr>,
}

impl Banner {
    fn start(netns: &Path, address: &str, name: &'static str) -> Self {
        Self::start_at(netns, SocketAddr::new(ip(address), 0), name)
    }

    fn start_at(netns: &Path, address: SocketAddr, name: &'static str) -> Self {
        let listener = netns::within(netns, move || TcpListener::bind(address).unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let (peers_tx, peers) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            while let Ok((mut connection, peer)) = listener.accept() {
                if peers_tx.send(peer.ip()).is_err() {
                    return;
                }
                let _ = connection.write_all(name.as_bytes());
            }
        });
        Self { address, peers }
    }

    fn last_peer(&self) -> IpAddr {
        self.peers.try_iter().last().unwrap()
    }
}

/// What a client in this namespace receives, and the address from which it connected.
fn ask(netns: &Path, address: SocketAddr) -> std::io::Result<(String, SocketAddr)> {
    netns::within(netns, move || {
        let mut connection = TcpStream::connect_timeout(&address, WAIT)?;
        connection.set_read_timeout(Some(WAIT))?;
        let mut said = String::new();
        connection.read_to_string(&mut said)?;
        Ok((said, connection.peer_addr()?))
    })
    .unwrap()
}

fn service(endpoints: Vec<SocketAddr>) -> VirtualService {
    let address: SocketAddr = SERVICE.parse().unwrap();
    VirtualService { address: address.ip(), port: address.port(), protocol: Protocol::Tcp, endpoints }
}

fn saved_rules(netns: &Path) -> String {
    let output = netns::within(netns, || process::Command::new("iptables-nft-save").output().unwrap()).unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn name(layout: &Layout) -> String {
    layout.cgroup().display().to_string().replace("weft-", "")
}

/// A sandbox whose name starts with this one's.
fn other(layout: &Layout) -> Layout {
    Layout::of(&format!("{}-other", name(layout)))
}

fn cgroup_of(layout: &Layout) -> PathBuf {
    cgroup::mount_point().unwrap().join(layout.cgroup()).join("container")
}

fn spec(layout: &Layout, argv: &[&str]) -> Spec {
    Spec {
        netns: None,
        cgroup: cgroup_of(layout),
        uid: None,
        gid: None,
        working_dir: None,
        mounts: vec![],
        env: vec![("PATH".into(), "/usr/bin:/bin".into())],
        argv: argv.iter().map(ToString::to_string).collect(),
    }
}

fn spawn(layout: &Layout, spec: &Spec, output: Stdio) -> tokio::process::Child {
    let weft = std::env::current_exe().unwrap();
    container::spawn(&weft, &layout.run_dir().join("spec.json"), spec, Stdio::null(), output, Stdio::inherit()).unwrap()
}

async fn run_container(layout: &Layout, spec: &Spec) -> (Option<i32>, String) {
    let weft = std::env::current_exe().unwrap();
    let child = container::spawn(
        &weft,
        &layout.run_dir().join("spec.json"),
        spec,
        Stdio::null(),
        Stdio::piped(),
        Stdio::piped(),
    );
    let output = child.unwrap().wait_with_output().await.unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}
