//! The component weft-viz in the tutorial's mesh: what the commands and the dashboard show through it, whom it refuses, and what its
//! replacement does to an open dashboard.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::world::{SHOP, World};

/// Its namespace.
const VIZ: &str = "linkerd-viz";
/// Requests that are sent.
const REQUESTS: u64 = 1000;
/// Longer than a scrape interval of the component, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
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
    let manifests = world.weft(&["viz", "install"]).unwrap();
    world.cluster.apply(&manifests).unwrap();
    world.cluster.rolled_out(VIZ, "deploy/weft-viz").unwrap();
    world.weft(&["viz", "check"]).unwrap();
    counts(world);
    taps(world);
    refuses(world);
    outlives_its_pod_and_its_account(world, &manifests);
    let left = world.weft(&["viz", "uninstall"]).unwrap();
    world.cluster.delete(&left).unwrap();
    assert_eq!(world.weft(&["viz", "uninstall"]).unwrap().trim(), "", "something is left");
    world.cluster.kubectl(&["delete", "namespace", VIZ]).unwrap();
}

/// Requests between two questions are counted: nobody but the component looks between them.
fn counts(world: &World) {
    let sent = || -> u64 {
        let arguments = ["stat", "deploy/client", "-n", SHOP, "--to", "svc/web", "-t", "10m", "-o", "json"];
        let rows: Value = serde_json::from_str(&world.weft(&arguments).unwrap()).unwrap();
        ["successes", "failures"].iter().filter_map(|field| rows[0][*field].as_u64()).sum()
    };
    let before = sent();
    let count = REQUESTS.to_string();
    let load = ["http1", "--target", "web.shop:80", "--count", &count, "--pause", "1ms"];
    let report = world.cluster.client(SHOP, &world.client(SHOP), &load).unwrap();
    assert_eq!((report.requests, report.failures), (REQUESTS, 0), "{report:?}");
    let counted = world.cluster.until(PATIENCE, |_| {
        let counted = sent() - before;
        anyhow::ensure!(counted >= REQUESTS * 99 / 100, "{counted} of {REQUESTS} requests were counted");
        Ok(counted)
    });
    let counted = counted.unwrap();
    assert!(counted <= REQUESTS * 101 / 100, "{counted} requests were counted, and {REQUESTS} sent");
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
    let tap =
        Running::start(world.cluster.command("weft").args(["tap", "deploy/client", "-n", SHOP, "--path", "/tapped"]));
    let (client, mut seen) = (world.client(SHOP), Vec::new());
    let tapped = world.cluster.until(PATIENCE, |cluster| {
        let load = ["http1", "--target", "web.shop:80", "--path", "/tapped", "--count", "2"];
        let report = cluster.client(SHOP, &client, &load)?;
        anyhow::ensure!(report.failures == 0, "{report:?}");
        seen.extend(tap.lines.try_iter());
        let has = |kind: &str, part: &str| seen.iter().any(|line| line.starts_with(kind) && line.contains(part));
        anyhow::ensure!(has("req", ":path=/tapped") && has("rsp", ":status=200") && has("end", ""), "{seen:?}");
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

/// A dashboard that is open goes on when other pods take over, and when its token is worth nothing any more: as after a night.
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
