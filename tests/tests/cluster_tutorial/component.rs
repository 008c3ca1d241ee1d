//! The component weft-viz in the tutorial's mesh: what the commands and the dashboard show through it, whom it refuses,
//! and what its replacement does to an open dashboard.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::world::{SHOP, World};

/// The namespace of the component.
const VIZ: &str = "linkerd-viz";
/// Requests that are sent, by their outcome.
const SUCCESSES: u64 = 900;
const FAILURES: u64 = 100;
/// Longer than the component's interval between scrapes.
const INTERVAL: Duration = Duration::from_secs(3);
/// Longer than a scrape interval of the component, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Makes `weft routes` count.
const PROFILE: &str = "
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {name: web.shop.svc.cluster.local, namespace: shop}
spec: {routes: [{name: all, condition: {pathRegex: /.*}}]}
";
/// Somebody who may reach the component, and has no right to what it answers.
const NOBODY: &str = "
apiVersion: v1
kind: ServiceAccount
metadata: {name: nobody, namespace: linkerd-viz}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: nobody, namespace: linkerd-viz}
rules:
  - {apiGroups: [''], resources: [pods], verbs: [get, list]}
  - {apiGroups: [''], resources: [pods/portforward], verbs: [create, get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: nobody, namespace: linkerd-viz}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: nobody}
subjects: [{kind: ServiceAccount, name: nobody, namespace: linkerd-viz}]
";

pub(super) fn shows_what_happens(world: &mut World) {
    let manifests = world.weft(&["viz", "install", "--set", "scrapeInterval=2s"]).unwrap();
    world.cluster.apply(&manifests).unwrap();
    world.cluster.rolled_out(VIZ, "deploy/weft-viz").unwrap();
    world.weft(&["viz", "check"]).unwrap();
    let check = world.weft(&["viz", "check", "--proxy", "-n", SHOP, "-o", "json"]).unwrap();
    assert!(check.contains("weft-viz-data-plane") && !check.contains("\"error\""), "{check}");
    counts(world);
    taps(world);
    refuses(world);
    outlives_its_pod_and_its_account(world, &manifests);
    let left = world.weft(&["viz", "uninstall"]).unwrap();
    world.cluster.delete(&left).unwrap();
    assert_eq!(world.weft(&["viz", "uninstall"]).unwrap().trim(), "", "something is left");
    world.cluster.kubectl(&["delete", "namespace", VIZ, "--wait=false"]).unwrap();
}

/// Requests between two questions are counted: nobody but the component looks between them.
fn counts(world: &World) {
    type Keep = fn(&Value) -> bool;
    let commands: [(&[&str], Keep); 6] = [
        (&["stat", "deploy/client", "--to", "svc/web"], |_| true),
        (&["stat", "svc/web"], |_| true),
        (&["stat-inbound", "deploy/web"], |row| row["route"] != "probe"),
        (&["stat-outbound", "deploy/client"], |row| row["service"] == "web" && row.get("backend").is_none()),
        (&["edges", "deploy"], |row| row["src"] == "client" && row["dst"] == "web"),
        (&["routes", "deploy/client", "--to", "svc/web"], |_| true),
    ];
    let counted = |(arguments, keep): &(&[&str], Keep)| -> [u64; 2] {
        let arguments = [arguments, &["-n", SHOP, "-t", "10m", "-o", "json"][..]].concat();
        let answer: Value = serde_json::from_str(&world.weft(&arguments).unwrap()).unwrap();
        // `routes` has a list for each resource.
        let lists: Vec<&Value> = answer.as_object().map_or(vec![&answer], |tables| tables.values().collect());
        let rows = lists.into_iter().flat_map(|list| list.as_array().unwrap()).filter(|row| keep(row));
        rows.fold([0, 0], |sums, row| {
            let of = |field: &str| row[field].as_u64().unwrap_or_default();
            [sums[0] + of("successes"), sums[1] + of("failures")]
        })
    };
    world.cluster.apply(PROFILE).unwrap();
    let send = |path: &str, count: u64| {
        let count = count.to_string();
        let load = ["http1", "--target", "web.shop:80", "--path", path, "--count", &count];
        let load = [&load[..], &["--concurrency", "4", "--pause", "1ms"]].concat();
        let report = world.cluster.client(SHOP, &world.client(SHOP), &load).unwrap();
        assert_eq!(report.requests.to_string(), count, "{report:?}");
    };
    // The client's proxy has the profile once a request is counted by its route, and the component once it looked.
    let known = world.cluster.until(PATIENCE, |_| {
        send("/", 1);
        anyhow::ensure!(counted(&commands[5]) != [0, 0], "no route is counted");
        Ok(())
    });
    known.unwrap();
    let settled = world.cluster.until(PATIENCE, |_| {
        let looked = || commands.each_ref().map(counted);
        let before = looked();
        std::thread::sleep(INTERVAL);
        anyhow::ensure!(before == looked(), "something is still counted");
        Ok(before)
    });
    let before = settled.unwrap();
    send("/", SUCCESSES);
    send("/status/503", FAILURES);
    for (command, before) in commands.iter().zip(before) {
        let right = world.cluster.until(PATIENCE, |_| {
            let now = counted(command);
            let found = [now[0] - before[0], now[1] - before[1]];
            let is_right = |found: u64, sent: u64| found.abs_diff(sent) <= sent / 100;
            let [successes, failures] = found;
            anyhow::ensure!(
                is_right(successes, SUCCESSES) && is_right(failures, FAILURES),
                "{:?}: {found:?}",
                command.0
            );
            Ok(())
        });
        right.unwrap();
    }
    world.cluster.delete(PROFILE).unwrap();
}

/// A command that goes on, and its lines.
struct Running {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let (lines_tx, lines) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| lines_tx.send(line)).ok());
        Self { child, lines }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn taps(world: &World) {
    let start = |verb: &str| {
        let arguments = [verb, "deploy/client", "-n", SHOP, "--path", "/tapped"];
        Running::start(world.cluster.command("weft").args(arguments))
    };
    let (tap, top) = (start("tap"), start("top"));
    let (client, mut seen, mut rows) = (world.client(SHOP), Vec::new(), Vec::new());
    let tapped = world.cluster.until(PATIENCE, |cluster| {
        let load = ["http1", "--target", "web.shop:80", "--path", "/tapped", "--count", "2"];
        let report = cluster.client(SHOP, &client, &load)?;
        anyhow::ensure!(report.failures == 0, "{report:?}");
        seen.extend(tap.lines.try_iter());
        let has = |kind: &str, part: &str| seen.iter().any(|line| line.starts_with(kind) && line.contains(part));
        anyhow::ensure!(has("req", ":path=/tapped") && has("rsp", ":status=200") && has("end", ""), "{seen:?}");
        rows.extend(top.lines.try_iter());
        anyhow::ensure!(rows.iter().any(|row| row.contains("/tapped")), "{rows:?}");
        Ok(())
    });
    tapped.unwrap();
}

fn refuses(world: &World) {
    world.cluster.apply(NOBODY).unwrap();
    let token = world.cluster.kubectl(&["-n", VIZ, "create", "token", "nobody"]).unwrap();
    let config = world.cluster.kubectl(&["config", "view", "--raw", "--minify", "-o", "json"]).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["users"][0]["user"] = json!({ "token": token.trim() });
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(config.to_string().as_bytes()).unwrap();
    let path = file.path().to_str().unwrap();
    let right = format!("system:serviceaccount:{VIZ}:nobody may not get stats.viz.weft.io in namespace {SHOP}");
    // The API server learns of the account's rights to reach the component by a watch.
    let refused =
        world.cluster.until(PATIENCE, |_| match world.weft(&["stat", "deploy", "-n", SHOP, "--kubeconfig", path]) {
            Err(refused) if refused.to_string().contains(&right) => Ok(refused.to_string()),
            Err(refused) => Err(refused),
            Ok(answered) => panic!("it is answered: {answered}"),
        });
    let refused = refused.unwrap();
    assert!(refused.contains("--direct"), "{refused}");
    world.cluster.delete(NOBODY).unwrap();
}

/// A dashboard that is open goes on when other pods take over, and when its token is worth nothing any more: as after a
/// night.
fn outlives_its_pod_and_its_account(world: &World, manifests: &str) {
    let dashboard = Running::start(world.cluster.command("weft").args(["dashboard", "--port", "0", "--show", "url"]));
    let address = dashboard.lines.recv_timeout(PATIENCE).expect("it prints its address");
    let (origin, key) = address.split_once("/#key=").expect("the address has a key");
    let curl = |name: &str, question: &Value| {
        let mut curl = world.cluster.command("curl");
        curl.args(["--silent", "--show-error", "--fail-with-body", "--no-buffer"]);
        curl.args(["--header", &format!("authorization: Bearer {key}"), "--header", "content-type: application/json"]);
        curl.args(["--data", &question.to_string(), &format!("{origin}/api/v1/{name}")]);
        curl
    };
    let ask = |name: &str, question: &Value| -> anyhow::Result<Value> {
        let output = curl(name, question).args(["--max-time", "30"]).output().context("start curl")?;
        let text = String::from_utf8_lossy(&output.stdout);
        anyhow::ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_str(&text).context("an answer is JSON")
    };
    let meshed = || {
        let question = json!({"resource": {"kind": "deployment", "namespace": SHOP, "name": "web"}});
        let answer = ask("stat", &question)?;
        anyhow::ensure!(answer["rows"][0]["meshedPods"].as_u64() == Some(2), "{answer}");
        Ok(())
    };
    assert_eq!(ask("about", &json!({})).unwrap()["source"], "answered by weft-viz");
    meshed().unwrap();
    let question = json!({"resource": {"kind": "deployment", "namespace": SHOP, "name": "client"}, "path": "/later"});
    let tap = Running::start(&mut curl("tap", &question));
    let before = world.cluster.pods(VIZ, "app.kubernetes.io/name=weft-viz").unwrap();
    for account in ["weft-viz-tapper", "weft-viz-viewer"] {
        world.cluster.kubectl(&["-n", VIZ, "delete", "serviceaccount", account]).unwrap();
    }
    world.cluster.apply(manifests).unwrap();
    world.cluster.kubectl(&["-n", VIZ, "rollout", "restart", "deploy/weft-viz"]).unwrap();
    world.cluster.rolled_out(VIZ, "deploy/weft-viz").unwrap();
    for pod in &before {
        world.cluster.kubectl(&["-n", VIZ, "wait", "--for=delete", &format!("pod/{pod}"), "--timeout=60s"]).unwrap();
    }
    world.cluster.until(PATIENCE, |_| meshed()).unwrap();
    // So does its tap.
    let (client, mut seen) = (world.client(SHOP), String::new());
    let tapped = world.cluster.until(PATIENCE, |cluster| {
        cluster.client(SHOP, &client, &["http1", "--target", "web.shop:80", "--path", "/later", "--count", "1"])?;
        seen.extend(tap.lines.try_iter());
        anyhow::ensure!(seen.contains("the tap goes on") && seen.contains(r#""path":"/later""#), "{seen}");
        Ok(())
    });
    tapped.unwrap();
}
