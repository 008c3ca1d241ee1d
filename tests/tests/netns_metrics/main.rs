//! What `weft stat` and its siblings say about a running mesh, compared with the clients' own counts, and what a
//! Prometheus has of it. All tests of this file share one mesh; each counts between pods that no other test uses
//! together. `counts` has a mesh of its own.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod counts;
mod dashboards;
mod terminal;

use std::{
    io::{BufRead as _, BufReader},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use weft_test_kit::{
    binaries,
    manifests::Manifests,
    mesh::{Mesh, Options, Shared, unique_name},
    wait::eventually,
};
use weft_tests::prometheus::Prometheus;

use terminal::Terminal;

/// A ServiceProfile for `payments`, so that there are routes.
const PROFILE: &str = "
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata:
  name: payments.shop.svc.cluster.local
  namespace: shop
spec:
  routes:
    - name: GET /invoices
      condition:
        method: GET
        pathRegex: /invoices
";

static MESH: Shared = Shared::with(|| {
    let manifests = Manifests::example().unwrap_or_else(|error| panic!("write the example manifests: {error}"));
    manifests.write("profile.yaml", PROFILE).unwrap_or_else(|error| panic!("write a ServiceProfile: {error}"));
    (manifests, Options { name: unique_name("t-metrics"), ..Options::default() })
});

const WITHIN: Duration = Duration::from_secs(60);

fn command(mesh: &Mesh, arguments: &[&str]) -> Command {
    let mut weft = Command::new(binaries::directory().unwrap().join("weft"));
    weft.args(arguments).args(["--sandbox", mesh.name()]);
    weft
}

/// A `weft` that goes on: its lines of standard output, and of standard error.
struct Running {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Running {
    fn start(mesh: &Mesh, arguments: &[&str]) -> Self {
        let mut child = command(mesh, arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let (lines_tx, lines) = mpsc::channel();
        let out = child.stdout.take().unwrap();
        let err = child.stderr.take().unwrap();
        for reader in [Box::new(out) as Box<dyn std::io::Read + Send>, Box::new(err)] {
            let lines_tx = lines_tx.clone();
            std::thread::spawn(move || {
                BufReader::new(reader).lines().map_while(Result::ok).try_for_each(|line| lines_tx.send(line)).ok()
            });
        }
        Self { child, lines }
    }

    /// The next line, or what came so far.
    fn line(&self) -> String {
        self.lines.recv_timeout(WITHIN).expect("weft prints another line in time")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rows that `weft` prints as JSON, and what it says beside them.
fn rows(mesh: &Mesh, arguments: &[&str]) -> (Vec<Value>, String) {
    let output = command(mesh, arguments).args(["-o", "json"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "weft {arguments:?}: {said}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")), said)
}

/// As [`rows`], while a client sends requests until `weft` has ended.
async fn rows_during(mesh: &Mesh, arguments: &[&str], app: &str, target: &str, path: &str) -> Vec<Value> {
    serde_json::from_value(json_during(mesh, arguments, app, target, path).await).unwrap()
}

/// What `weft` prints as JSON, while a client sends requests until it has ended.
async fn json_during(mesh: &Mesh, arguments: &[&str], app: &str, target: &str, path: &str) -> Value {
    let mut child = command(mesh, arguments).args(["-o", "json"]).stdout(Stdio::piped()).spawn().unwrap();
    while child.try_wait().unwrap().is_none() {
        load(mesh, app, target, path, 10).await;
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "weft {arguments:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Requests for a path, and how many there were.
async fn load(mesh: &Mesh, app: &str, target: &str, path: &str, count: u64) -> u64 {
    let pod = mesh.pod_of("shop", app).await.unwrap();
    let count = count.to_string();
    let report =
        mesh.load("shop", &pod, &["http1", "--target", target, "--path", path, "--count", &count]).await.unwrap();
    report.requests
}

#[test]
fn what_was_counted_is_what_the_client_sent() {
    MESH.test(async |mesh| {
        // A window that is open before the load and after it, however long that takes.
        let to = Running::start(
            mesh,
            &["stat", "deploy/client", "-n", "shop", "--to", "svc/web", "--watch", "-t", "15m", "-o", "json"],
        );
        let from = Running::start(
            mesh,
            &["stat", "deploy/web", "-n", "shop", "--from", "deploy/client", "--watch", "-t", "15m", "-o", "json"],
        );
        let first = |running: &Running| serde_json::from_str::<Value>(&running.line()).unwrap();
        for running in [&to, &from] {
            let before = first(running);
            assert_eq!((&before[0]["successes"], &before[0]["failures"]), (&0.into(), &0.into()), "{before}");
        }
        let successes = load(mesh, "client", "web.shop:80", "/", 730).await;
        let failures = load(mesh, "client", "web.shop:80", "/status/503", 70).await;
        assert_eq!((successes, failures), (730, 70));
        for (running, name, meshed) in [(&to, "client", "1/1"), (&from, "web", "3/3")] {
            let counted = loop {
                let rows = first(running);
                let row = &rows[0];
                assert_eq!((row["name"].as_str(), row["meshed"].as_str()), (Some(name), Some(meshed)), "{rows}");
                if row["successes"].as_u64().unwrap() + row["failures"].as_u64().unwrap() >= successes + failures {
                    break rows;
                }
            };
            let row = &counted[0];
            assert_eq!((&row["successes"], &row["failures"]), (&successes.into(), &failures.into()), "{counted}");
            let (rps, seconds) = (row["rps"].as_f64().unwrap(), row["window_seconds"].as_f64().unwrap());
            assert!(
                (rps * seconds - 800.0).abs() < 0.01 && (row["success"].as_f64().unwrap() - 730.0 / 800.0).abs() < 1e-9,
                "{counted}"
            );
            let latency =
                ["latency_ms_p50", "latency_ms_p95", "latency_ms_p99"].map(|name| row[name].as_f64().unwrap());
            assert!(latency[0] > 0.0 && latency[0] <= latency[1] && latency[1] <= latency[2], "{counted}");
        }
    });
}

#[test]
fn the_table_has_linkerds_columns_and_leaves_out_what_has_no_proxy() {
    MESH.test(async |mesh| {
        let output = command(mesh, &["stat", "deploy", "-n", "shop", "-o", "wide"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let columns = [
            "NAME",
            "MESHED",
            "SUCCESS",
            "RPS",
            "LATENCY_P50",
            "LATENCY_P95",
            "LATENCY_P99",
            "TCP_CONN",
            "READ_BYTES/SEC",
            "WRITE_BYTES/SEC",
        ];
        assert_eq!(lines[0], columns, "{text}");
        let names: Vec<&str> = lines[1..].iter().map(|line| line[0]).collect();
        assert_eq!(names, ["banner", "client", "payments", "web"], "{text}");
        let (pods, _) = rows(mesh, &["stat", "po", "-A"]);
        let is_shown = |pod: &Value| pod["namespace"] != "legacy" && pod["status"] == "Running";
        assert!(!pods.is_empty() && pods.iter().all(is_shown), "{pods:#?}");
        let (all, _) = rows(mesh, &["stat", "po", "-A", "--unmeshed"]);
        let legacy = all.iter().find(|pod| pod["namespace"] == "legacy").expect("it is shown");
        assert_eq!(legacy["meshed"], "0/1");
    });
}

#[test]
fn edges_have_identities_and_refusals() {
    MESH.test(async |mesh| {
        let edges = eventually("an edge", WITHIN, async || {
            let edges =
                rows_during(mesh, &["edges", "po", "-n", "shop", "-t", "2s"], "stranger", "payments.shop:80", "/")
                    .await;
            let edge = edges.into_iter().find(|edge| edge["src"] == "stranger" && edge["denied"].as_u64() > Some(0));
            edge.ok_or("no edge of the stranger with refusals")
        })
        .await;
        let id = |name: &str| format!("{name}.shop.serviceaccount.identity.linkerd.cluster.local");
        assert_eq!(
            (&edges["client_identity"], &edges["server_identity"]),
            (&id("stranger").into(), &id("payments").into()),
            "{edges}"
        );
        assert_eq!((&edges["client_id"], &edges["server_id"]), (&"stranger.shop".into(), &"payments.shop".into()));
        assert_eq!(edges["no_tls_reason"], "", "{edges}");
    });
}

#[test]
fn a_denied_client_is_in_stat_inbound() {
    MESH.test(async |mesh| {
        eventually("refusals", WITHIN, async || {
            let arguments = ["stat-inbound", "deploy/payments", "-n", "shop", "-t", "2s"];
            let rows = rows_during(mesh, &arguments, "stranger", "payments.shop:80", "/").await;
            let row = rows.iter().find(|row| row["server"] == "payments-http" && row["denied"].as_u64() > Some(0));
            let row = row.inspect(|row| assert_eq!(row["port"], "8080"));
            row.map(|_| ()).ok_or(format!("{rows:#?}"))
        })
        .await;
    });
}

#[test]
fn routes_of_a_profile_are_counted_at_both_ends() {
    MESH.test(async |mesh| {
        eventually("routes", WITHIN, async || {
            let at_server = ["routes", "svc/payments", "-n", "shop", "-t", "2s"];
            let inbound = json_during(mesh, &at_server, "client", "payments.shop:80", "/invoices").await;
            let at_client = ["routes", "deploy/client", "-n", "shop", "--to", "svc/payments", "-t", "2s"];
            let outbound = json_during(mesh, &at_client, "client", "payments.shop:80", "/invoices").await;
            for (tables, owner, success) in
                [(&inbound, "service/payments", "success"), (&outbound, "deployment/client", "effective_success")]
            {
                let row = tables[owner].as_array().into_iter().flatten().find(|row| row["route"] == "GET /invoices");
                let row = row.ok_or_else(|| format!("{inbound:#?} {outbound:#?}"))?;
                assert_eq!((row[success].as_f64(), row["authority"].as_str()), (Some(1.0), Some("payments.shop")));
            }
            Ok::<_, String>(())
        })
        .await;
    });
}

#[test]
fn tap_shows_a_request_its_response_its_end_and_the_kernels_verdict() {
    MESH.test(async |mesh| {
        let pod = mesh.pod_of("shop", "client").await.unwrap();
        let tap = Running::start(mesh, &["tap", &format!("po/{pod}"), "-n", "shop", "--path", "/tapped", "--kernel"]);
        let mut seen = Vec::new();
        eventually("a whole request", WITHIN, async || {
            let report = mesh
                .load(
                    "shop",
                    &pod,
                    &["http1", "--target", "web.shop:80", "--path", "/tapped", "--count", "2", "--fresh"],
                )
                .await
                .unwrap();
            assert_eq!(report.failures, 0);
            seen.extend(tap.lines.try_iter());
            // The events of one request have one id.
            let id = seen
                .iter()
                .find(|line| line.starts_with("knl"))
                .and_then(|line| line.split(' ').nth(1))
                .map(str::to_owned);
            let id = id.ok_or(format!("no verdict: {seen:#?}"))?;
            let of = |kind: &str| seen.iter().any(|line| line.starts_with(kind) && line.split(' ').nth(1) == Some(&id));
            if ["req", "rsp", "end"].into_iter().all(of) { Ok(()) } else { Err(format!("{seen:#?}")) }
        })
        .await;
        let line = |kind: &str| seen.iter().find(|line| line.starts_with(kind)).unwrap().clone();
        let request = line("req");
        assert!(
            request.contains(" proxy=out src=")
                && request.contains(" tls=true :method=GET :authority=web.shop:80 :path=/tapped"),
            "{request}"
        );
        assert!(line("rsp").contains(" :status=200 latency="), "{seen:#?}");
        assert!(line("end").contains(" response-length="), "{seen:#?}");
        let verdict = line("knl");
        assert!(
            verdict.contains(" verdict=redirect original=") && verdict.contains(" new=127.0.0.1:4140"),
            "{verdict}"
        );
        assert!(seen.iter().all(|line| !line.contains("healthz")), "{seen:#?}");
    });
}

/// Screens that are drawn again: all of it fits after the size changed, nothing is cleared between two drawings, and
/// what was on the terminal before is back at the end.
#[test]
fn live_screens_behave_in_a_terminal() {
    const CLEAR: &str = "\x1b[2J";
    const BEGIN: &str = "\x1b[?2026h";
    MESH.test(async |mesh| {
        for (arguments, heading, key) in [
            (&["stat", "deploy", "-n", "shop", "--watch"][..], "NAME", "q"),
            (&["top", "deploy/client", "-n", "shop"], "SOURCE", "\x1b"),
            (&["top", "deploy/client", "-n", "shop"], "SOURCE", "\x03"),
        ] {
            let mut terminal = Terminal::run(&command(mesh, arguments), (30, 150));
            terminal.until(|screen| screen.alternate_screen() && screen.contents().contains(heading));
            let drawn = terminal.written(BEGIN);
            load(mesh, "client", "payments.shop:80", "/invoices", 20).await;
            eventually("two more drawings", WITHIN, async || {
                if terminal.written(BEGIN) > drawn + 1 { Ok(()) } else { Err(terminal.shown()) }
            })
            .await;
            assert_eq!(terminal.written(CLEAR), 0, "{arguments:?} flickers");
            terminal.resize((6, 40));
            let of_width =
                |screen: &vt100::Screen| screen.rows(0, 40).next().is_some_and(|row| row.starts_with(heading));
            terminal.until(|screen| of_width(screen) && !screen.contents().contains("SUCCESS_RATE"));
            terminal.press(key);
            assert!(terminal.end().success(), "{arguments:?}");
            terminal.until(|screen| !screen.alternate_screen() && !screen.hide_cursor());
        }
    });
}

/// Requests as fast as the proxies can: the tap shows its rate of them, each to its end, and no request fails.
#[test]
fn a_tap_of_a_busy_service_is_sampled_and_bounded() {
    // Ten times that is sent by a busy machine, too.
    const RATE: usize = 5;
    MESH.test(async |mesh| {
        let pod = mesh.pod_of("shop", "stranger").await.unwrap();
        let send = async |more: &[&str]| {
            let arguments = [&["http1", "--target", "web.shop:80", "--path", "/busy"], more].concat();
            let report = mesh.load("shop", &pod, &arguments).await.unwrap();
            assert_eq!(report.failures, 0, "{report:?}");
            usize::try_from(report.requests).unwrap()
        };
        let of_pod = format!("po/{pod}");
        let tap = Running::start(
            mesh,
            &["tap", &of_pod, "-n", "shop", "--to", "svc/web", "--path", "/busy", "--max-rps", &RATE.to_string()],
        );
        let of = |kind: &str, lines: &[String]| lines.iter().filter(|line| line.starts_with(kind)).count();
        let mut lines: Vec<String> = Vec::new();
        eventually("the tap is there, and has the end of each request", WITHIN, async || {
            send(&["--count", "1"]).await;
            lines.extend(tap.lines.try_iter());
            let [shown, ended] = ["req", "end"].map(|kind| of(kind, &lines));
            if shown == ended && ended > 0 { Ok(()) } else { Err(format!("{lines:#?}")) }
        })
        .await;
        lines.clear();
        let began = Instant::now();
        let sent = send(&["--duration", "3s", "--concurrency", "16"]).await;
        let seconds = began.elapsed().as_secs_f64();
        eventually("the end of all that was shown", WITHIN, async || {
            lines.extend(tap.lines.try_iter());
            let [shown, ended] = ["req", "end"].map(|kind| of(kind, &lines));
            if shown == ended && shown > RATE { Ok(()) } else { Err(format!("{shown} shown, {ended} ended")) }
        })
        .await;
        let shown = of("req", &lines);
        assert_eq!(of("rsp", &lines), shown);
        assert!(shown as f64 <= RATE as f64 * (seconds + 2.0) && sent > 10 * shown, "{shown} of {sent} in {seconds} s");
    });
}

#[test]
fn a_proxy_that_does_not_answer_is_named_and_the_others_are_shown() {
    MESH.test(async |mesh| {
        let state = mesh.state().unwrap();
        let pod = state.pods.iter().find(|pod| pod.name.starts_with("banner")).unwrap();
        let proxy = pod.containers.iter().find(|container| container.name == "linkerd-proxy").unwrap();
        let proxy = Pid::from_raw(i32::try_from(proxy.pid.unwrap()).unwrap());
        kill(proxy, Signal::SIGSTOP).unwrap();
        // All tests share the mesh, so the proxy is resumed even if the command panics.
        let answer = catch_unwind(AssertUnwindSafe(|| rows(mesh, &["stat", "po", "-n", "shop", "-l", "app=banner"])));
        kill(proxy, Signal::SIGCONT).unwrap();
        let (rows, said) = answer.unwrap_or_else(|panic| resume_unwind(panic));
        assert_eq!(rows.len(), 2, "{rows:#?}");
        let silent = rows.iter().find(|row| row["name"] == pod.name.as_str()).unwrap();
        let other = rows.iter().find(|row| row["name"] != pod.name.as_str()).unwrap();
        assert!(silent["window_seconds"].is_null() && other["window_seconds"].as_f64() > Some(0.0), "{rows:#?}");
        assert!(said.contains(&format!("shop/{}: no answer within 5s", pod.name)), "{said}");
        assert!(said.contains("counted: 1 of 2 proxies"), "{said}");
    });
}

#[test]
fn wrong_usage_says_what_is_right() {
    MESH.test(async |mesh| {
        for (arguments, expected) in [
            (&["stat", "wombats", "-n", "shop"][..], "deploy, ds, sts"),
            (&["stat", "svc/web", "-n", "shop", "--to", "deploy/web"], "name a workload"),
            (&["tap", "svc/web", "-n", "shop"], "name a workload, a pod or a namespace"),
            (&["routes", "deploy/client", "-n", "shop", "--to", "deploy/web"], "Services and authorities"),
        ] {
            let output = command(mesh, arguments).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
            assert!(said.contains(expected), "{arguments:?}: {said}");
        }
    });
}

/// Every metric that Linkerd's dashboards select, as they narrow it and with the labels by which they sum it.
#[test]
fn linkerds_grafana_dashboards_have_series() {
    MESH.test(async |mesh| {
        let prometheus = Prometheus::of(mesh).await.unwrap();
        let sent = load(mesh, "client", "payments.shop:80", "/invoices", 200).await;
        // The last of the load is scraped.
        let seen = r#"sum(request_total{direction="outbound", deployment="client", dst_service="payments"})"#;
        prometheus.until("the requests of the load", &format!("{seen} >= {sent}")).await.unwrap();
        // Each proxy is scraped at its own time.
        eventually("series of every metric", WITHIN, async || {
            let mut without = Vec::new();
            for (metric, narrowed, labels) in dashboards::LINKERD {
                let selector = format!("{metric}{{{narrowed}}}");
                let missing = dashboards::missing(&prometheus.ask(&selector).unwrap(), labels);
                if !missing.is_empty() {
                    without.push(format!("{selector} has no {}", missing.join(", ")));
                }
            }
            if without.is_empty() { Ok(()) } else { Err(without.join("\n")) }
        })
        .await;
        // Ours is about agents, which this Prometheus does not scrape: it understands what is asked.
        for expression in dashboards::of_our_dashboards().unwrap() {
            prometheus.ask(&expression).unwrap();
        }
    });
}
