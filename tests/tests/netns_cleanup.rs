//! A sandbox leaves nothing behind: not when it is stopped, and not when it, or the program that started it, is killed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use weft_test_kit::{
    binaries,
    manifests::Manifests,
    mesh::{Mesh, Options, unique_name},
    observe::leftovers,
    wait::eventually,
};

/// The janitor reacts at once; processes get their grace period.
const CLEAN_WITHIN: Duration = Duration::from_secs(90);

async fn eventually_clean(name: &str, temporary: Option<&TempDir>) {
    eventually("nothing left behind", CLEAN_WITHIN, async || {
        let mut left = leftovers(name).unwrap();
        if let Some(temporary) = temporary {
            left.extend(fs::read_dir(temporary.path()).unwrap().map(|entry| format!("{:?}", entry.unwrap().path())));
        }
        if left.is_empty() { Ok(()) } else { Err(format!("left behind: {left:?}")) }
    })
    .await;
}

/// A demo with its own directory for temporary files.
fn demo(name: &str, temporary: &TempDir) -> Child {
    let mut demo = Command::new(binaries::directory().unwrap().join("weft-demo"));
    demo.args(["--name", name])
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_sandbox_leaves_nothing() {
    let name = unique_name("t-stop");
    let options = Options { name: name.clone(), ..Options::default() };
    let mesh = Mesh::start(Manifests::example().unwrap(), options).await.unwrap();
    let left = leftovers(&name).unwrap();
    for kind in ["namespace", "files", "mount", "cgroup", "process"] {
        assert!(left.iter().any(|thing| thing.starts_with(kind)), "a running sandbox has a {kind}: {left:?}");
    }
    mesh.stop().await.unwrap();
    // The daemon removes its files last, and then ends: only its process may still be there.
    let left = leftovers(&name).unwrap();
    assert!(left.iter().all(|thing| thing.starts_with("process ")), "left behind: {left:?}");
    eventually_clean(&name, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_sandbox_leaves_nothing() {
    let name = unique_name("t-crash");
    let options = Options { name: name.clone(), ..Options::default() };
    let mesh = Mesh::start(Manifests::example().unwrap(), options).await.unwrap();
    mesh.crash().unwrap();
    eventually_clean(&name, None).await;
}

/// Ctrl-C at the worst moments: before anything has started, and in the middle of the start.
#[tokio::test(flavor = "multi_thread")]
async fn a_demo_interrupted_while_it_starts_leaves_nothing() {
    for (moment, file) in [("early", ".log"), ("late", "/state.json")] {
        let name = unique_name(&format!("t-{moment}"));
        let temporary = tempfile::tempdir().unwrap();
        let mut demo = demo(&name, &temporary);
        let sign = format!("/run/weft/{name}{file}");
        eventually(&sign, Duration::from_secs(30), async || fs::exists(&sign).unwrap().then_some(()).ok_or("not yet"))
            .await;
        let pid = nix::unistd::Pid::from_raw(i32::try_from(demo.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
        assert_eq!(demo.wait().unwrap().code(), Some(130));
        eventually_clean(&name, Some(&temporary)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_demo_leaves_nothing() {
    let name = unique_name("t-demo");
    let temporary = tempfile::tempdir().unwrap();
    let mut demo = demo(&name, &temporary);
    eventually("a ready pod", Duration::from_secs(60), async || {
        let state = fs::read_to_string(format!("/run/weft/{name}/state.json")).unwrap_or_default();
        if state.contains("\"ready\": true") { Ok(()) } else { Err("the demo has no ready pod yet") }
    })
    .await;
    demo.kill().unwrap();
    demo.wait().unwrap();
    eventually_clean(&name, Some(&temporary)).await;
}
