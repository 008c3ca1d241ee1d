//! The control plane while its API server is gone, hangs, lags behind another one, or has forgotten what happened.
//!
//! One destination controller and its streams live through all of it, one disturbance after the other; the policy
//! controller's lease runs out beside that. `WEFT_TEST_API_OUTAGE_SECONDS` makes the outage longer, and has the test
//! wait until watches that hang are given up, too.

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, Instant},
};

use kube::Client;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tonic::Code;
use weft_test_kit::wait::eventually;

use crate::{
    link::Link,
    process::{PATIENCE, Process},
    second::{SecondServer, compact},
    status::{GOOD, POLICY, route, service},
    turn::Uses,
    world::{Updates, World, api_server_address},
};

/// How long the API server is gone: longer than a holder keeps a lease that it cannot renew, and than any watch waits
/// for its next attempt.
const OUTAGE: Duration = Duration::from_secs(12);
/// How often all connections are ended, in a row, and the time between two of these.
const CUTS: u64 = 5;
const BETWEEN_CUTS: Duration = Duration::from_secs(1);
/// Objects that are created meanwhile.
const CHANGES: u8 = 25;
/// What the destination controller watches.
const KINDS: [&str; 9] = [
    "services",
    "pods",
    "servers",
    "externalworkloads",
    "endpointslices",
    "nodes",
    "replicasets",
    "jobs",
    "serviceprofiles",
];
/// Connections that it has beside: watches of the lease and of Secrets, and requests.
const OTHER_CONNECTIONS: usize = 6;
/// Routes that get a status; the first half exists when the holder of the lease is killed.
const ROUTES: usize = 30;

/// A world, and what is disturbed in it.
struct Disturbed {
    world: World,
    /// Between the destination controller and an API server.
    link: Link,
    destination: Process,
    /// Endpoints of `web`.
    updates: Updates,
    second: SecondServer,
}

#[tokio::test]
async fn the_control_plane_outlives_its_api_server() {
    let long = std::env::var("WEFT_TEST_API_OUTAGE_SECONDS").ok().map(|seconds| seconds.parse().unwrap());
    let mut disturbed = Disturbed::start().await;
    disturbed.watches_are_cut_every_second().await;

    let leader = disturbed.world.policy_named("leader").await;
    leader.says("acquired lease").await;
    for number in 0..ROUTES / 2 {
        disturbed.create_route(number).await;
    }
    leader.says("wrote status").await;
    leader.end(Signal::SIGKILL).await;
    let killed = Instant::now();
    let outage = long.map_or(OUTAGE, Duration::from_secs);
    let (heir, _link) = disturbed.the_api_server_is_gone_and_another_one_has_forgotten(outage).await;
    disturbed.an_api_server_lags_behind().await;
    disturbed.connections_hang(long.is_some()).await;
    disturbed.what_the_leader_left_is_written_once(&heir).await;
    note(&format!("statuses were written {:?} after the leader was killed", killed.elapsed()));
    disturbed.world.done().await;
}

impl Disturbed {
    async fn start() -> Self {
        let world = World::using(Uses::Statuses).await;
        let mut second = SecondServer::start(world.directory()).await;
        world.apply(world.meshed_pod("web-1")).await;
        let link = world.link().await;
        let destination = world.destination("one", Some(&link)).await;
        destination.ready().await;
        let updates = world.watch_service(&destination, "web").await;
        second.client().await;
        Self { world, link, destination, updates, second }
    }

    /// Requests of the destination controller for a kind after the first `since` lines: watches, or lists.
    fn requests(&self, kind: &str, watches: bool, since: usize) -> usize {
        let path = format!("/{kind}?");
        let lines = self.destination.lines("API request");
        let of_kind = lines.iter().skip(since).filter(|line| line.contains("\"GET\"") && line.contains(&path));
        of_kind.filter(|line| line.contains("watch=true") == watches).count()
    }

    async fn create_route(&self, number: usize) {
        let port = u16::try_from(number).unwrap() + 80;
        self.world.apply(route(POLICY, "HTTPRoute", &route_name(number), &service(port), "web")).await;
    }

    async fn has_watches_up(&self, expected: usize) {
        eventually("watches that work", PATIENCE, async || {
            let (_, metrics) = self.destination.get("/metrics").await;
            let states: Vec<_> = metrics.lines().filter(|line| line.starts_with("weft_watch_up{")).collect();
            assert_eq!(states.len(), KINDS.len(), "{states:?}");
            let up = states.iter().filter(|line| line.ends_with(" 1")).count();
            if up == expected { Ok(()) } else { Err(format!("{states:#?}")) }
        })
        .await;
    }

    /// Nothing is lost, nothing is said twice, nothing is listed again, and nothing is left over.
    async fn watches_are_cut_every_second(&mut self) {
        let before = self.destination.lines("API request").len();
        let (world, link, updates) = (&self.world, &self.link, &mut self.updates);
        let cuts = async {
            for _ in 0..CUTS {
                tokio::time::sleep(BETWEEN_CUTS).await;
                link.sever(None);
            }
        };
        let changes = async {
            let pause = BETWEEN_CUTS * u32::try_from(CUTS).unwrap() / u32::from(CHANGES);
            for number in 1..=CHANGES {
                world.apply(world.slice(&format!("cut-{number}"), &format!("192.0.2.{number}"))).await;
                tokio::time::sleep(pause).await;
            }
        };
        let all: BTreeSet<_> = (1..=CHANGES).map(|number| format!("192.0.2.{number}:8080")).collect();
        let seen = async |updates: &mut Updates, sign: char| {
            let mut seen = BTreeSet::new();
            while seen != all {
                for part in updates.next().await.split(' ') {
                    let address = part.strip_prefix(sign).unwrap_or_else(|| panic!("{part} after {seen:?}"));
                    assert!(seen.insert(address.to_owned()), "{address} twice");
                }
            }
        };
        tokio::join!(cuts, changes, seen(updates, '+'));
        for number in 1..=CHANGES {
            world.delete("EndpointSlice", &format!("cut-{number}")).await;
        }
        seen(&mut self.updates, '-').await;
        let most = usize::try_from(CUTS).unwrap() + 1;
        for kind in KINDS {
            let (watches, lists) = (self.requests(kind, true, before), self.requests(kind, false, before));
            assert!(watches <= most && lists == 0, "{kind}: {watches} watches, {lists} lists");
        }
        eventually("no connection is left over", PATIENCE, async || match self.link.open() {
            open if open <= KINDS.len() + OTHER_CONNECTIONS => Ok(()),
            open => Err(open.to_string()),
        })
        .await;
        self.has_watches_up(KINDS.len()).await;
    }

    /// The last state stays in force, for old and new streams. The API server that comes back has nothing of what
    /// happened before etcd was compacted.
    async fn the_api_server_is_gone_and_another_one_has_forgotten(&mut self, outage: Duration) -> (Process, Link) {
        let world = &self.world;
        world.apply(world.slice("web-1", "192.0.2.1")).await;
        world.apply(world.slice("web-2", "192.0.2.2")).await;
        self.updates.bring(&["+192.0.2.1:8080", "+192.0.2.2:8080"]).await;
        let link = world.link().await;
        let kubeconfig = world.through(&link).await;
        let policy = world.policy_as(&kubeconfig).await;
        let certificates = world.certificates();
        let identity = world.identity_as(Some(&kubeconfig), &certificates).await;
        policy.ready().await;
        identity.ready().await;
        world.port_policy(&policy, "web-1", 8080, &["all-unauthenticated"]).await;
        world.service_account("web").await;
        let token = world.token("web", "identity.l5d.io").await;
        let name = world.identity_of("web");
        world.certify(&identity, &name, &token).await.unwrap();

        let began = Instant::now();
        let lines = |part: &str| self.destination.lines(part).len();
        let (lists, lost, worked) = (lines("API request"), lines("lost lease"), lines("watch works again"));
        let regained = lines("regained lease");
        self.link.cut();
        link.cut();
        self.second.etcd.mute();
        world.delete("EndpointSlice", "web-1").await;
        world.apply(world.slice("web-3", "192.0.2.3")).await;
        for number in ROUTES / 2..ROUTES {
            self.create_route(number).await;
        }
        let spec = json!({"podSelector": {}, "port": 8080});
        world.apply(world.policy_object("Server", "v1beta3", "web", spec)).await;
        compact(&newest(&world.client).await).await;
        // The watches of the second API server cannot resume, so it lists anew and forgets.
        self.second.etcd.sever(None);
        self.second.etcd.mend();
        self.has_watches_up(0).await;
        for process in [&self.destination, &policy, &identity] {
            assert_eq!(process.get("/live").await, (200, "live\n".to_owned()));
            assert_eq!(process.get("/ready").await.0, 200);
        }
        let mut new = world.watch_service(&self.destination, "web").await;
        assert_eq!(new.next().await, "+192.0.2.1:8080 +192.0.2.2:8080");
        let kubernetes = "kubernetes.default.svc.cluster.local:443".to_owned();
        let kubernetes = world.watch_path(&self.destination, kubernetes).await.next().await;
        assert!(kubernetes.starts_with('+'), "a name that nobody has asked for before: {kubernetes}");
        world.port_policy(&policy, "web-1", 8080, &["all-unauthenticated"]).await;
        assert_eq!(world.certify(&identity, &name, &token).await.unwrap_err().code(), Code::Internal);
        eventually("the holder gives up its lease", PATIENCE, async || {
            if lines("lost lease") > lost { Ok(()) } else { Err("it holds it") }
        })
        .await;
        tokio::time::sleep(outage.saturating_sub(began.elapsed())).await;

        self.link.sever(Some(&self.second.address()));
        let back = Instant::now();
        self.link.mend();
        link.mend();
        for updates in [&mut self.updates, &mut new] {
            updates.bring(&["+192.0.2.3:8080", "-192.0.2.1:8080"]).await;
        }
        self.has_watches_up(KINDS.len()).await;
        let recovered = back.elapsed();
        world.port_policy(&policy, "web-1", 8080, &[]).await;
        world.certify(&identity, &name, &token).await.unwrap();
        eventually("the holder has its lease again", PATIENCE, async || {
            if lines("regained lease") > regained { Ok(()) } else { Err("not yet") }
        })
        .await;
        note(&format!(
            "gone for {:?}, endpoints are current {recovered:?} after it, all {:?}",
            back - began,
            back.elapsed()
        ));
        // Of any kind: other tests write some of them, so that the second API server remembers the position after all.
        eventually("a position was lost", PATIENCE, async || {
            let anew = self.destination.lines("watch begins anew");
            if anew.is_empty() { Err("none was") } else { Ok(()) }
        })
        .await;
        for kind in KINDS {
            let lists = self.requests(kind, false, lists);
            assert!(lists <= 1, "{lists} lists of {kind}");
        }
        // Log lines pass through a queue: they appear later than the metrics.
        let work_again = || lines("watch works again") - worked;
        eventually("log lines of watches that work again", PATIENCE, async || match work_again() {
            said if said >= KINDS.len() => Ok(()),
            said => Err(format!("of {said}: {:#?}", self.destination.lines("watch "))),
        })
        .await;
        assert_eq!(work_again(), KINDS.len(), "{:#?}", self.destination.lines("watch "));
        (policy, link)
    }

    /// Of what was pending and what came since, another replica writes what is missing as soon as the lease has run
    /// out.
    async fn what_the_leader_left_is_written_once(&self, heir: &Process) {
        let world = &self.world;
        for number in 0..ROUTES {
            world.says(heir, POLICY, "HTTPRoute", &route_name(number), &[GOOD]).await;
        }
        assert_eq!(heir.lines("acquired lease").len(), 1);
        let log = std::env::var("WEFT_KUBE_AUDIT_LOG").unwrap();
        // The API server notes a request after its answer, and so after the status can be read.
        eventually("one write of each status", PATIENCE, async || {
            let log = fs::read_to_string(&log).unwrap();
            let written: Vec<_> = log.lines().filter_map(|line| written_status(line, &world.namespace)).collect();
            let is_once = |number: &usize| {
                let of_route = written.iter().filter(|(written, _)| *written == route_name(*number));
                let (answered, unanswered): (Vec<_>, Vec<_>) = of_route.partition(|(_, is_answered)| *is_answered);
                // It can have carried out what it could not answer, because the leader was killed meanwhile.
                let is_cut_off = *number < ROUTES / 2 && answered.is_empty() && !unanswered.is_empty();
                answered.len() == 1 || is_cut_off
            };
            let wrong: Vec<_> = (0..ROUTES).filter(|number| !is_once(number)).map(route_name).collect();
            if wrong.is_empty() { Ok(()) } else { Err(format!("of {wrong:?}: {written:?}")) }
        })
        .await;
    }

    /// An older state is never shown: not to a stream, and not by a process that starts.
    async fn an_api_server_lags_behind(&mut self) {
        let world = &self.world;
        let first = api_server_address().await;
        self.second.etcd.mute();
        self.link.sever(Some(&first));
        world.apply(world.slice("web-4", "192.0.2.4")).await;
        world.delete("EndpointSlice", "web-3").await;
        assert_eq!(self.updates.next().await, "+192.0.2.4:8080");
        assert_eq!(self.updates.next().await, "-192.0.2.3:8080");
        // To the one that has not seen this; so does a new process.
        let begun = self.link.begun();
        self.link.sever(Some(&self.second.address()));
        let link = Link::to(self.second.address()).await;
        let other = world.destination("two", Some(&link)).await;
        eventually("both use it", PATIENCE, async || {
            let connections = (self.link.begun() - begun, link.begun());
            let all = u64::try_from(KINDS.len()).unwrap();
            if connections.0 >= all && connections.1 >= all { Ok(()) } else { Err(format!("{connections:?}")) }
        })
        .await;
        for _ in 0..20 {
            let (status, waits) = other.get("/ready").await;
            assert_eq!(status, 503, "it has what the API server had before: {waits}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        world.delete("EndpointSlice", "web-2").await;
        self.second.etcd.mend();
        assert_eq!(self.updates.next().await, "-192.0.2.2:8080");
        other.ready().await;
        assert_eq!(world.watch_service(&other, "web").await.next().await, "+192.0.2.4:8080");
    }

    /// The lease is kept although the answer of a renewal and everything after it on its watch are lost.
    async fn connections_hang(&mut self, long: bool) {
        let lines = |part: &str| self.destination.lines(part).len();
        let (before, renewed) = (lines("API request"), lines("renewed lease"));
        self.link.sever(Some(&api_server_address().await));
        eventually("watches and renewals use new connections", PATIENCE, async || {
            let waits = KINDS.iter().chain(&["leases"]).find(|kind| self.requests(kind, true, before) == 0);
            if waits.is_none() && lines("renewed lease") > renewed { Ok(()) } else { Err(format!("{waits:?}")) }
        })
        .await;
        self.has_watches_up(KINDS.len()).await;
        self.world.apply(self.world.slice("web-6", "192.0.2.6")).await;
        assert_eq!(self.updates.next().await, "+192.0.2.6:8080");
        // The next renewal is sent on the connection of this one, unless another request takes it over first. Then
        // there is no answer to be lost, and it is tried again.
        let (lost, conflicts) = (lines("lost lease"), lines("\"status\":409"));
        let mut began = Instant::now();
        eventually("an answer that was lost", PATIENCE * 3, async || {
            let renewed = lines("renewed lease");
            let renewals = async |more: usize| {
                eventually("a renewal", PATIENCE, async || {
                    let now = lines("renewed lease");
                    if now >= renewed + more { Ok(()) } else { Err(format!("{now} of {renewed} + {more}")) }
                })
                .await;
            };
            renewals(1).await;
            self.link.hang();
            began = Instant::now();
            self.world.apply(self.world.slice("web-5", "192.0.2.5")).await;
            renewals(4).await;
            if lines("\"status\":409") > conflicts { Ok(()) } else { Err("none") }
        })
        .await;
        tokio::time::sleep(OUTAGE.saturating_sub(began.elapsed())).await;
        assert_eq!(lines("lost lease"), lost);
        assert_eq!(self.world.lease_holder().await.as_deref(), Some("one"));
        if long {
            assert_eq!(self.updates.next_within(PATIENCE * 2).await, "+192.0.2.5:8080");
            note(&format!("silent watches were given up after {:?}", began.elapsed()));
            assert!(lines("watch is silent") > 0, "something else ended them");
        }
    }
}

fn route_name(number: usize) -> String {
    format!("route-{number}")
}

/// The resource version of the newest state.
async fn newest(client: &Client) -> String {
    let request = http::Request::get("/api/v1/namespaces?limit=1").body(Vec::new()).unwrap();
    let list: Value = client.request(request).await.unwrap();
    list["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

/// The HTTPRoute whose status a request of the audit log writes, and whether the API server answered that it was
/// written.
fn written_status(line: &str, namespace: &str) -> Option<(String, bool)> {
    let request: Value = serde_json::from_str(line).ok()?;
    let object = &request["objectRef"];
    let is_wanted = request["verb"] == "patch"
        && object["subresource"] == "status"
        && object["resource"] == "httproutes"
        && object["namespace"] == namespace;
    let is_answered = request["responseStatus"]["code"] == 200;
    is_wanted.then(|| (object["name"].as_str().unwrap_or_default().to_owned(), is_answered))
}

/// A measurement, for `--nocapture`.
#[expect(clippy::print_stderr, reason = "the documents state what is measured here")]
fn note(text: &str) {
    eprintln!("measured: {text}");
}
