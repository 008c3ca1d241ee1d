//! A sandbox leaves nothing behind: neither when it is stopped nor when it, or the program that started it, is killed.

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use weft_tests::{
    binaries,
    manifests::Manifests,
    mesh::{Mesh, Options, unique_name},
    observe::leftovers,
    wait::eventually,
};

/// The janitor notices at once; processes get their grace period.
const CLEAN_WITHIN: Duration = Duration::from_secs(30);

async fn eventually_clean(name: &str) {
    eventually(CLEAN_WITHIN, async || {
        let left = leftovers(name).unwrap();
        if left.is_empty() { Ok(()) } else { Err(format!("left behind: {left:?}")) }
    })
    .await;
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
    assert_eq!(leftovers(&name).unwrap(), BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_sandbox_leaves_nothing() {
    let name = unique_name("t-crash");
    let options = Options { name: name.clone(), ..Options::default() };
    let mesh = Mesh::start(Manifests::example().unwrap(), options).await.unwrap();
    mesh.crash().unwrap();
    eventually_clean(&name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_demo_leaves_nothing() {
    let name = unique_name("t-demo");
    let demo = binaries::directory().unwrap().join("weft-demo");
    let mut demo =
        Command::new(demo).args(["--name", &name]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually(Duration::from_secs(60), async || {
        let state = fs::read_to_string(format!("/run/weft/{name}/state.json")).unwrap_or_default();
        if state.contains("\"ready\": true") { Ok(()) } else { Err("the demo has no ready pod yet") }
    })
    .await;
    demo.kill().unwrap();
    demo.wait().unwrap();
    eventually_clean(&name).await;
}
