//! The running example mesh: every protocol over mutual TLS, policy with its opposites, the kernel's trace, no
//! netfilter state, and an unaffected pod outside the mesh. All tests of this file share one mesh; they only inspect it
//! or send requests.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        process::CommandExt as _,
    },
    process::{Command, Stdio},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::libc;
use rustix::{
    process::{Gid, Pid, PidfdFlags, PidfdGetfdFlags, Uid, pidfd_getfd, pidfd_open},
    thread::{set_thread_gid, set_thread_groups, set_thread_uid},
};
use serde_json::Value;
use weft_examples::client::{Probe, Report};
use weft_proto::agent::{Direction, WatchRequest};
use weft_test_kit::{
    agent::{self, REDIRECT},
    binaries,
    mesh::{Mesh, Pod, Shared},
    observe,
    wait::eventually,
};
use weft_tests::report::assert_vouched_for;

static MESH: Shared = Shared::example();

const WEB: &str = "web.shop:80";
const CLIENT_ID: &str = "client.shop.serviceaccount.identity.linkerd.cluster.local";

async fn load(mesh: &Mesh, namespace: &str, app: &str, arguments: &[&str]) -> Report {
    let pod = mesh.pod_of(namespace, app).await.unwrap();
    mesh.load(namespace, &pod, arguments).await.unwrap()
}

/// Sends requests that must all be answered, and returns the pods that answered.
async fn answered(mesh: &Mesh, namespace: &str, app: &str, arguments: &[&str]) -> Report {
    let report = load(mesh, namespace, app, arguments).await;
    assert!(report.requests > 0 && report.failures == 0, "{report:?}");
    assert!(report.peer_addr_ok, "the application saw another peer than it dialled: {report:?}");
    report
}

/// Sends requests from the client until every replica has answered; none may fail meanwhile.
async fn answered_by_all(mesh: &Mesh, arguments: &[&str], replicas: usize) -> Report {
    let client = mesh.pod_of("shop", "client").await.unwrap();
    let within = Duration::from_secs(30);
    let report = mesh.load_all("shop", &client, arguments, replicas, within).await.unwrap();
    assert_eq!(report.failures, 0, "{report:?}");
    assert_eq!(report.by_backend.len(), replicas, "{report:?}");
    assert!(report.peer_addr_ok, "{report:?}");
    report
}

/// Sends requests from the client until something else has happened. A stream of events is open once the agent has
/// answered; the kernel's switch follows at once, so a single request may come before it.
async fn until_seen<T>(mesh: &Mesh, seen: impl Future<Output = T>) -> T {
    let requests = async {
        eventually("an event", Duration::from_secs(60), async || {
            answered(mesh, "shop", "client", &["http1", "--target", WEB, "--count", "3", "--fresh"]).await;
            Err::<(), _>("requests were answered")
        })
        .await;
    };
    tokio::select! {
        seen = seen => seen,
        () = requests => unreachable!("requests go on until an event came"),
    }
}

/// Sends requests that must all be refused, and returns the errors.
async fn refused(mesh: &Mesh, namespace: &str, app: &str, arguments: &[&str]) -> Report {
    let report = load(mesh, namespace, app, arguments).await;
    assert!(report.requests > 0 && report.failures == report.requests, "{report:?}");
    report
}

#[test]
fn http1_reaches_every_replica_with_the_clients_identity() {
    MESH.test(async |mesh| {
        let report = answered_by_all(mesh, &["http1", "--target", WEB, "--count", "60"], 3).await;
        assert_vouched_for(&report, CLIENT_ID);
    });
}

#[test]
fn http2_reaches_every_replica_with_the_clients_identity() {
    MESH.test(async |mesh| {
        let report = answered_by_all(mesh, &["http2", "--target", WEB, "--count", "60"], 3).await;
        assert_vouched_for(&report, CLIENT_ID);
    });
}

#[test]
fn grpc_reaches_every_replica_with_the_clients_identity() {
    MESH.test(async |mesh| {
        let report = answered_by_all(mesh, &["grpc", "--target", WEB, "--count", "60"], 3).await;
        assert_vouched_for(&report, CLIENT_ID);
    });
}

#[test]
fn websocket_reaches_every_replica_with_the_clients_identity() {
    MESH.test(async |mesh| {
        let report = answered_by_all(mesh, &["ws", "--target", WEB, "--count", "60", "--fresh"], 3).await;
        assert_vouched_for(&report, CLIENT_ID);
    });
}

#[test]
fn websocket_carries_many_messages_on_one_connection() {
    MESH.test(async |mesh| {
        let report = answered(mesh, "shop", "client", &["ws", "--target", WEB, "--count", "50"]).await;
        assert_eq!(report.connections, 1);
        assert_eq!(report.by_backend.len(), 1, "{report:?}");
    });
}

#[test]
fn tcp_in_which_the_server_speaks_first_reaches_every_replica() {
    MESH.test(async |mesh| {
        answered_by_all(mesh, &["banner", "--target", "banner.shop:9000", "--count", "40", "--fresh"], 2).await;
    });
}

#[test]
fn a_pod_is_reached_by_its_own_address_too() {
    MESH.test(async |mesh| {
        let web = mesh.pod("shop", &mesh.pod_of("shop", "web").await.unwrap()).await.unwrap();
        let target = format!("{}:8080", web.ip);
        let report = answered(mesh, "shop", "client", &["http1", "--target", &target, "--count", "5"]).await;
        assert_eq!(report.by_backend.keys().collect::<Vec<_>>(), [&web.name]);
        assert_vouched_for(&report, CLIENT_ID);
    });
}

#[test]
fn ipv4_through_an_ipv6_socket_is_redirected_like_ipv4() {
    MESH.test(async |mesh| {
        let arguments = ["http1", "--target", WEB, "--count", "10", "--fresh", "--mapped"];
        let report = answered(mesh, "shop", "client", &arguments).await;
        assert_vouched_for(&report, CLIENT_ID);
    });
}

#[test]
fn ipv6_is_redirected_like_ipv4() {
    MESH.test(async |mesh| {
        let web = mesh.pod("shop", &mesh.pod_of("shop", "web").await.unwrap()).await.unwrap();
        let ipv6 = web.ipv6.expect("pods have an IPv6 address");
        let target = format!("[{ipv6}]:8080");
        let report = answered(mesh, "shop", "client", &["http1", "--target", &target, "--count", "5", "--fresh"]).await;
        assert_vouched_for(&report, CLIENT_ID);
    });
}

#[test]
fn meshed_pods_speak_mutual_tls_and_never_plaintext() {
    MESH.test(async |mesh| {
        answered(mesh, "shop", "client", &["http1", "--target", WEB, "--count", "10", "--fresh"]).await;
        answered(mesh, "shop", "client", &["banner", "--target", "banner.shop:9000", "--count", "4", "--fresh"]).await;
        let pods = mesh.pods().await.unwrap();
        let meshed: BTreeSet<_> = pods.iter().filter(|pod| pod.meshed).flat_map(Pod::addresses).collect();
        let (mut mtls, mut plaintext) = (0, 0);
        for pod in pods.iter().filter(|pod| pod.meshed) {
            let metrics = mesh.metrics(&pod.namespace, &pod.name).await.unwrap();
            let others = meshed.iter().filter(|ip| !pod.has(ip)).cloned().collect();
            let counted = metrics.connections_to(&others);
            mtls += counted.mtls;
            plaintext += counted.plaintext;
        }
        assert!(mtls > 0);
        assert_eq!(plaintext, 0);
    });
}

#[test]
fn a_service_that_names_identities_answers_the_named_client() {
    MESH.test(async |mesh| {
        let report =
            answered(mesh, "shop", "client", &["http1", "--target", "payments.shop:80", "--count", "10"]).await;
        assert_vouched_for(&report, CLIENT_ID);
        answered(mesh, "shop", "client", &["banner", "--target", "payments.shop:9000", "--count", "3", "--fresh"])
            .await;
    });
}

#[test]
fn a_service_that_names_identities_refuses_another_meshed_client() {
    MESH.test(async |mesh| {
        let report =
            refused(mesh, "shop", "stranger", &["http1", "--target", "payments.shop:80", "--count", "5"]).await;
        assert_eq!(report.errors.keys().collect::<Vec<_>>(), ["status 403"], "{report:?}");
        refused(mesh, "shop", "stranger", &["banner", "--target", "payments.shop:9000", "--count", "3"]).await;
    });
}

#[test]
fn a_service_that_names_identities_refuses_an_unmeshed_client() {
    MESH.test(async |mesh| {
        let report =
            refused(mesh, "legacy", "legacy", &["http1", "--target", "payments.shop:80", "--count", "5"]).await;
        assert_eq!(report.errors.keys().collect::<Vec<_>>(), ["status 403"], "{report:?}");
        refused(mesh, "legacy", "legacy", &["banner", "--target", "payments.shop:9000", "--count", "3"]).await;
    });
}

#[test]
fn a_service_without_policy_answers_an_unmeshed_client() {
    MESH.test(async |mesh| {
        for command in ["http1", "http2", "grpc", "ws"] {
            let report = answered(mesh, "legacy", "legacy", &[command, "--target", WEB, "--count", "5"]).await;
            assert!(report.by_client_id.is_empty(), "nobody vouches for an unmeshed client: {report:?}");
        }
        answered(mesh, "legacy", "legacy", &["banner", "--target", "banner.shop:9000", "--count", "3"]).await;
    });
}

#[test]
fn nobody_can_vouch_for_himself() {
    MESH.test(async |mesh| {
        let metrics_before = mesh.metrics_of("shop", "payments").await.unwrap();
        refused(mesh, "legacy", "legacy", &["http1", "--target", "payments.shop:80", "--count", "4", "--fresh"]).await;
        let metrics = mesh.metrics_of("shop", "payments").await.unwrap();
        let denied = metrics.sum("inbound_http_authz_deny_total", &[])
            - metrics_before.sum("inbound_http_authz_deny_total", &[]);
        assert!(denied >= 4.0, "{denied} denials counted");
    });
}

#[test]
fn the_trace_tells_who_was_redirected_from_where_to_where() {
    MESH.test(async |mesh| {
        let client = mesh.pod_of("shop", "client").await.unwrap();
        let request =
            WatchRequest { namespace: "shop".to_owned(), pod: client.clone(), port: 80, ..WatchRequest::default() };
        let mut events = mesh.agent().await.unwrap().watch(request).await.unwrap();
        let services = mesh.service_ips().await.unwrap();
        let event = until_seen(mesh, async {
            loop {
                let event = events.message().await.unwrap().expect("the trace goes on");
                if event.direction() == Direction::Outbound && event.verdict == REDIRECT {
                    return event;
                }
            }
        })
        .await;
        let pod = event.pod.unwrap();
        assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("shop", client.as_str()));
        assert_eq!(event.command, "weft-client");
        assert!(event.pid > 0);
        let (ip, port) = event.original_destination.rsplit_once(':').unwrap();
        assert!(services.contains(ip) && port == "80", "{}", event.original_destination);
        assert_eq!(event.new_destination, "127.0.0.1:4140");
    });
}

#[test]
fn no_pod_has_a_rule_or_a_tracked_connection() {
    MESH.test(async |mesh| {
        answered(mesh, "shop", "client", &["http1", "--target", WEB, "--count", "10", "--fresh"]).await;
        answered(mesh, "legacy", "legacy", &["http1", "--target", WEB, "--count", "10", "--fresh"]).await;
        for pod in mesh.pods().await.unwrap() {
            let state = observe::netfilter(&pod.netns).unwrap();
            assert_eq!(state, observe::Netfilter::default(), "{}", pod.name);
        }
    });
}

#[test]
fn an_application_sees_the_peer_it_dialled_and_its_own_address() {
    MESH.test(async |mesh| {
        let client = mesh.pod("shop", &mesh.pod_of("shop", "client").await.unwrap()).await.unwrap();
        for (command, target) in [("http1", WEB), ("banner", "banner.shop:9000")] {
            let report =
                answered(mesh, "shop", "client", &[command, "--target", target, "--count", "4", "--fresh"]).await;
            assert_eq!(report.local_ips, std::slice::from_ref(&client.ip));
            assert!(!report.seen_peer_ips.contains(&client.ip), "the server saw the client itself: {report:?}");
        }
    });
}

#[test]
fn proxies_see_the_original_destination() {
    MESH.test(async |mesh| {
        answered(mesh, "shop", "client", &["http1", "--target", WEB, "--count", "4", "--fresh"]).await;
        let services = mesh.service_ips().await.unwrap();
        let metrics = mesh.metrics_of("shop", "client").await.unwrap();
        let seen = metrics.original_destinations();
        assert!(seen.iter().any(|ip| services.contains(ip)), "{seen:?} has none of {services:?}");
    });
}

#[test]
fn no_connection_arrives_at_a_proxy_unannounced() {
    MESH.test(async |mesh| {
        answered(mesh, "shop", "client", &["http1", "--target", WEB, "--count", "40", "--fresh", "--concurrency", "8"])
            .await;
        let status = mesh.agent().await.unwrap().status().await.unwrap();
        assert_eq!(status.flow_misses, 0);
        assert!(status.pods.iter().all(|pod| pod.outbound && pod.inbound), "{status:?}");
    });
}

#[test]
fn a_pod_that_is_not_meshed_notices_nothing() {
    MESH.test(async |mesh| {
        let legacy = mesh.pod("legacy", "legacy").await.unwrap();
        let web = mesh.pod("shop", &mesh.pod_of("shop", "web").await.unwrap()).await.unwrap();
        let mut events = mesh
            .agent()
            .await
            .unwrap()
            .watch(WatchRequest { direction: Direction::Outbound.into(), ..WatchRequest::default() })
            .await
            .unwrap();
        until_seen(mesh, events.message()).await.unwrap().expect("the trace goes on");

        let target = format!("{}:8080", web.ip);
        let output = mesh.exec("legacy", "legacy", &["weft-client", "probe", "--target", &target]).await.unwrap();
        let probe: Probe = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((probe.dialled.as_str(), probe.peer.as_str()), (target.as_str(), target.as_str()));
        assert!(probe.local.starts_with(&format!("{}:", legacy.ip)), "{probe:?}");
        for answer in [&probe.original_dst_v4, &probe.original_dst_v6] {
            let error = answer.as_ref().expect_err("only the kernel's own error is an answer here");
            // Not tracked; no such option; no such option for the other family.
            assert!(matches!(*error, libc::ENOENT | libc::ENOPROTOOPT | libc::EOPNOTSUPP), "errno {error}");
        }

        let status = mesh.agent().await.unwrap().status().await.unwrap();
        let known: Vec<_> = status.pods.iter().filter_map(|pod| pod.pod.as_ref()).collect();
        assert!(known.iter().all(|pod| pod.namespace != "legacy"), "{known:?}");
        // Whatever the kernel decided in between, it decided nothing about this pod: a connection of a meshed pod
        // afterwards ends the search.
        let probed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        until_seen(mesh, async {
            loop {
                let event = events.message().await.unwrap().expect("the trace goes on");
                let is_later = u128::from(event.time_unix_ns) > probed;
                let pod = event.pod.unwrap_or_default();
                assert_ne!(pod.namespace, "legacy", "a verdict about an unmeshed pod");
                if is_later && pod.name.starts_with("client") {
                    break;
                }
            }
        })
        .await;
        let status = mesh.agent().await.unwrap().status().await.unwrap();
        assert!(agent::verdicts(&status, Direction::Outbound, REDIRECT) > 0, "the meshed pod's were counted");
    });
}

/// The process of a pod's proxy, and its user and group.
fn proxy_of(pod: &Pod) -> (i32, u32, u32) {
    let netns = fs::metadata(&pod.netns).unwrap().ino();
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let proxy = |pid: i32| {
        let process = format!("/proc/{pid}");
        let inside = fs::metadata(format!("{process}/ns/net")).is_ok_and(|namespace| namespace.ino() == netns);
        let status = fs::read_to_string(format!("{process}/status")).ok().filter(|_| inside)?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next();
        let is_proxy = field("Name:") == Some("weft-proxy");
        let id = |name: &str| field(name).and_then(|id| id.parse().ok()).filter(|_| is_proxy);
        Some((pid, id("Uid:")?, id("Gid:")?))
    };
    processes.into_iter().find_map(proxy).unwrap_or_else(|| panic!("no proxy in {}", pod.name))
}

/// What a process of another one's user may have of it: a descriptor, its files, its environment.
fn loot(pid: i32) -> [Result<(), Option<i32>>; 3] {
    let process = format!("/proc/{pid}");
    let descriptor = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty())
        .and_then(|process| pidfd_getfd(process, 0, PidfdGetfdFlags::empty()));
    let files = fs::read_dir(format!("{process}/root/"));
    let environment = fs::read(format!("{process}/environ"));
    [descriptor.map(drop).map_err(io::Error::from), files.map(drop), environment.map(drop)]
        .map(|result| result.map_err(|error| error.raw_os_error()))
}

/// As in a pod whose containers share their processes: the kernel asks for the user and the group, and for nothing
/// else.
#[test]
fn a_process_of_the_proxys_user_does_not_get_into_the_proxy() {
    MESH.test(async |mesh| {
        let name = mesh.pod_of("shop", "web").await.unwrap();
        let (proxy, uid, gid) = proxy_of(&mesh.pod("shop", &name).await.unwrap());
        let mut another = Command::new("sleep").arg("600").uid(uid).gid(gid).spawn().unwrap();
        let pids = [proxy, i32::try_from(another.id()).unwrap()];
        let thief = thread::spawn(move || {
            set_thread_groups(&[]).unwrap();
            set_thread_gid(Gid::from_raw(gid)).unwrap();
            set_thread_uid(Uid::from_raw(uid)).unwrap();
            pids.map(loot)
        });
        let loot = thief.join();
        another.kill().and_then(|()| another.wait()).unwrap();
        let [of_proxy, of_another] = loot.unwrap();
        assert_eq!(of_another, [Ok(()); 3], "such a process could never get into another");
        assert_eq!(of_proxy, [libc::EPERM, libc::EACCES, libc::EACCES].map(|errno| Err(Some(errno))));
        // The proxy itself may.
        let metrics = mesh.metrics("shop", &name).await.unwrap();
        assert!(metrics.sum("process_open_fds", &[]) > 0.0);
    });
}

/// Images have their programs so: a proxy forbids it by itself only a moment after its start.
#[test]
fn a_process_whose_user_cannot_read_its_program_is_roots_from_its_start() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.path().join("cat");
    fs::copy("/usr/bin/cat", &program).unwrap();
    for (mode, owner) in [(0o755, 2102), (0o711, 0)] {
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new(&program);
        let mut process = command.uid(2102).gid(2102).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // Its first answer says that it runs.
        process.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        process.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let found = fs::metadata(format!("/proc/{}/environ", process.id())).map(|file| file.uid());
        process.kill().and_then(|()| process.wait()).unwrap();
        assert_eq!(found.unwrap(), owner, "mode {mode:o}");
    }
}

/// The output of `weft` about this sandbox.
fn weft(mesh: &Mesh, arguments: &[&str]) -> String {
    let mut weft = Command::new(binaries::directory().unwrap().join("weft"));
    let output = weft.args(arguments).args(["--sandbox", mesh.name()]).output().unwrap();
    assert!(output.status.success(), "weft {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn rows(text: &str) -> Vec<Value> {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn weft_shows_what_proxies_of_a_sandbox_receive_and_present() {
    MESH.test(async |mesh| {
        let name = mesh.pod_of("shop", "web").await.unwrap();
        let pod = format!("shop/{name}");
        let endpoints = rows(&weft(mesh, &["diagnostics", "endpoints", "web.shop.svc.cluster.local:80", "-o", "json"]));
        assert_eq!(endpoints.len(), 3, "{endpoints:#?}");
        let policy = weft(mesh, &["diagnostics", "policy", "-n", "shop", &format!("po/{name}"), "8080"]);
        assert!(policy.contains("Detect:") && policy.contains("labels:"), "{policy}");
        let profile = weft(mesh, &["diagnostics", "profile", "web.shop.svc.cluster.local:80"]);
        assert!(profile.contains("\"fully_qualified_name\": \"web.shop.svc.cluster.local\""), "{profile}");
        let metrics = weft(mesh, &["diagnostics", "proxy-metrics", &pod]);
        assert!(metrics.contains("process_start_time_seconds"), "{metrics}");
        let metrics = weft(mesh, &["diagnostics", "controller-metrics"]);
        assert!(metrics.contains("grpc_server_handled_total") && !metrics.contains("# ERROR"), "{metrics}");
        let identities = rows(&weft(mesh, &["identity", &pod, "-o", "json"]));
        assert_eq!(identities[0]["accepted"], true, "{identities:#?}");
        let name = identities[0]["certificates"][0]["names"][0].as_str().unwrap();
        assert_eq!(name, "web.shop.serviceaccount.identity.linkerd.cluster.local");
    });
}
