//! One load as every command counts it. It is sent once, after each command has scraped the proxies for the first time
//! and before any does so again. The mesh is this test's own: its proxies count the requests to their admin port, and
//! so they tell when the commands have scraped them.

use std::{
    process::{Child, Stdio},
    time::Duration,
};

use serde_json::Value;
use weft_test_kit::{
    manifests::Manifests,
    mesh::{Mesh, Options, Shared, unique_name},
    wait::{Polling, eventually},
};

use crate::{Running, WITHIN, command};

/// A client, and a server with a route. Neither has a probe, so nothing else is counted.
const PODS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop, annotations: {linkerd.io/inject: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: counter, namespace: shop, labels: {app: counter}}
spec:
  containers: [{name: counter, image: weft.io/examples, command: [weft-client, wait]}]
---
apiVersion: v1
kind: Pod
metadata: {name: counted, namespace: shop, labels: {app: counted}}
spec:
  containers: [{name: counted, image: weft.io/examples, command: [weft-echo], args: [--http, '8080']}]
---
apiVersion: v1
kind: Service
metadata: {name: counted, namespace: shop}
spec: {selector: {app: counted}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {name: counted.shop.svc.cluster.local, namespace: shop}
spec: {routes: [{name: all, condition: {pathRegex: /.*}}]}
";

static MESH: Shared = Shared::with(|| {
    let manifests = Manifests::empty().unwrap();
    manifests.write("pods.yaml", PODS).unwrap();
    (manifests, Options { name: unique_name("t-counts"), ..Options::default() })
});

/// The load: paths, and the number of requests for each. The first path is answered with 200. A request has three
/// events, and a proxy buffers 400 of a tap (`BUFFERED_EVENTS` of `proxy/src/tap.rs`): none is lost.
const SENT: [(&str, u64); 2] = [("/counted", 100), ("/status/503", 20)];
/// The path of requests before the load.
const BEFORE: &str = "/status/204";
/// The time between two such requests, or two scrapes of the test's own.
const PAUSE: Duration = Duration::from_millis(250);
/// The time between the two scrapes of a command, within which all commands start and the load is sent, on a busy
/// machine too.
const WINDOW: &str = "15s";

type Pick = fn(&Value) -> Option<&Value>;

/// Commands that scrape twice, and the row of each answer that has the counts.
const COMMANDS: [(&[&str], Pick); 7] = [
    (&["stat", "po/counter", "--to", "svc/counted"], |rows| rows.get(0)),
    (&["stat", "svc/counted"], |rows| rows.get(0)),
    (&["stat-inbound", "po/counted"], |rows| rows.as_array()?.iter().find(|row| row["port"] == "8080")),
    (&["stat-outbound", "po/counter"], |rows| rows.as_array()?.iter().find(|row| row["service"] == "counted")),
    (&["edges", "po"], |rows| rows.as_array()?.iter().find(|row| row["dst"] == "counted")),
    (&["routes", "po/counter", "--to", "svc/counted"], |tables| tables["pod/counter"].get(0)),
    (&["routes", "svc/counted"], |tables| tables["service/counted"].get(0)),
];

#[test]
fn every_command_counts_what_the_client_sent() {
    let _kept = crate::MESH.keep();
    MESH.test(async |mesh| {
        let sent = SENT.map(|(_, count)| count);
        let total: u64 = sent.iter().sum();
        let start = |verb: &str| Running::start(mesh, &[verb, "po/counter", "-n", "shop", "--max-rps", "1000"]);
        let (tap, top) = (start("tap"), start("top"));
        let (mut tap_lines, mut top_lines) = (Vec::<String>::new(), Vec::<String>::new());
        eventually("a request in tap and in top", Polling::every(PAUSE, WITHIN), async || {
            send(mesh, BEFORE, 1).await;
            tap_lines.extend(tap.lines.try_iter());
            top_lines.extend(top.lines.try_iter());
            let is_tapped = tap_lines.iter().any(|line| line.contains(" :status=204 "));
            let is_in_top = top_lines.iter().any(|line| line.contains(BEFORE));
            if is_tapped && is_in_top { Ok(()) } else { Err(format!("{tap_lines:#?}\n{top_lines:#?}")) }
        })
        .await;
        tap_lines.clear();

        let before = scrapes(mesh).await;
        let mut running = COMMANDS.map(|(arguments, _)| spawn(mesh, arguments));
        let mut own = 0;
        eventually("the first scrapes of every command", Polling::every(PAUSE, WITHIN), async || {
            own += 1;
            let now = scrapes(mesh).await;
            let of_commands = [now[0] - before[0] - own, now[1] - before[1] - own];
            let are_all = of_commands.iter().all(|scrapes| *scrapes >= COMMANDS.len() as u64);
            if are_all { Ok(()) } else { Err(format!("the proxies were scraped {of_commands:?} times")) }
        })
        .await;
        for (path, count) in SENT {
            send(mesh, path, count).await;
        }
        for (child, (arguments, _)) in running.iter_mut().zip(COMMANDS) {
            assert!(child.try_wait().unwrap().is_none(), "{arguments:?} ended before the load: {WINDOW} are too short");
        }

        for (child, (arguments, pick)) in running.into_iter().zip(COMMANDS) {
            let output = child.wait_with_output().unwrap();
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
            let row = pick(&answer).unwrap_or_else(|| panic!("{arguments:?}: {answer:#}"));
            let counts = [&row["successes"], &row["failures"]].map(Value::as_u64);
            assert_eq!(counts, sent.map(Some), "{arguments:?}: {answer:#}");
        }
        let live = eventually("the whole load in tap and in top", WITHIN, async || {
            tap_lines.extend(tap.lines.try_iter());
            top_lines.extend(top.lines.try_iter());
            let counts = [of_tap(&tap_lines), of_top(&top_lines)];
            let is_whole = counts.iter().all(|counts| counts.iter().sum::<u64>() >= total);
            if is_whole { Ok(counts) } else { Err(format!("{counts:?}: {top_lines:#?}")) }
        })
        .await;
        assert_eq!(live, [sent, sent], "of tap, and of top: {top_lines:#?}");
    });
}

async fn send(mesh: &Mesh, path: &str, count: u64) {
    let number = count.to_string();
    let load = ["http1", "--target", "counted.shop:80", "--path", path, "--count", &number, "--pause", "2ms"];
    let report = mesh.load("shop", "counter", &load).await.unwrap();
    assert_eq!(report.requests, count, "{report:?}");
}

/// The requests to the admin ports of both proxies so far, these two included.
async fn scrapes(mesh: &Mesh) -> [u64; 2] {
    let mut counts = [0; 2];
    for (count, pod) in counts.iter_mut().zip(["counter", "counted"]) {
        let metrics = mesh.metrics("shop", pod).await.unwrap();
        *count = metrics.sum("inbound_http_authz_allow_total", &[("target_port", "4191")]) as u64;
    }
    counts
}

fn spawn(mesh: &Mesh, arguments: &[&str]) -> Child {
    let mut weft = command(mesh, arguments);
    weft.args(["-n", "shop", "-t", WINDOW, "-o", "json"]).stdout(Stdio::piped()).spawn().unwrap()
}

/// The responses of each kind that `weft tap` has shown.
fn of_tap(lines: &[String]) -> [u64; 2] {
    [" :status=200 ", " :status=503 "].map(|status| {
        let shown = lines.iter().filter(|line| line.starts_with("rsp") && line.contains(status));
        shown.count() as u64
    })
}

/// The requests for each path in the last table of `weft top`.
fn of_top(lines: &[String]) -> [u64; 2] {
    SENT.map(|(path, _)| {
        let rows = lines.iter().rev().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let count = rows.filter(|cells| cells.get(3) == Some(&path)).find_map(|cells| cells.get(4)?.parse().ok());
        count.unwrap_or(0)
    })
}
