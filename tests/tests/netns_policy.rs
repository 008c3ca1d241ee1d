//! Manifests change while the mesh runs: policy follows, and a malformed file affects no other file.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{process::Command, time::Duration};

use weft_examples::client::Report;
use weft_test_kit::{
    binaries,
    manifests::Manifests,
    mesh::{Mesh, Options, unique_name},
    wait::eventually,
};

/// Time limit for a file's change to reach the proxies: the watcher's delay, the index, the stream.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(60);
const PAYMENTS: &str = "payments.shop:80";

async fn start(name: &str) -> Mesh {
    let options = Options { name: unique_name(name), ..Options::default() };
    Mesh::start(Manifests::example().unwrap(), options).await.unwrap()
}

async fn ask(mesh: &Mesh, namespace: &str, app: &str, target: &str) -> Report {
    let pod = mesh.pod_of(namespace, app).await.unwrap();
    mesh.load(namespace, &pod, &["http1", "--target", target, "--count", "4"]).await.unwrap()
}

async fn eventually_allowed(mesh: &Mesh, namespace: &str, app: &str, target: &str) {
    eventually("allowed", FOLLOWS_WITHIN, async || {
        let report = ask(mesh, namespace, app, target).await;
        if report.failures == 0 { Ok(()) } else { Err(format!("{report:?}")) }
    })
    .await;
}

async fn eventually_denied(mesh: &Mesh, namespace: &str, app: &str, target: &str) {
    eventually("denied", FOLLOWS_WITHIN, async || {
        let report = ask(mesh, namespace, app, target).await;
        if report.errors.get("status 403") == Some(&report.requests) { Ok(()) } else { Err(format!("{report:?}")) }
    })
    .await;
}

fn ps(mesh: &Mesh, format: &str) -> String {
    let mut weft = Command::new(binaries::directory().unwrap().join("weft"));
    let output = weft.args(["sandbox", "ps", "--sandbox", mesh.name(), "-o", format]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_follows_an_edit_from_allow_to_deny_and_back() {
    let mesh = start("t-policy").await;
    eventually_allowed(&mesh, "shop", "client", PAYMENTS).await;
    eventually_denied(&mesh, "shop", "stranger", PAYMENTS).await;

    mesh.manifests().edit("payments.yaml", "name: client\n", "name: stranger\n").unwrap();
    eventually_denied(&mesh, "shop", "client", PAYMENTS).await;
    eventually_allowed(&mesh, "shop", "stranger", PAYMENTS).await;

    mesh.manifests().edit("payments.yaml", "name: stranger\n", "name: client\n").unwrap();
    eventually_allowed(&mesh, "shop", "client", PAYMENTS).await;
    eventually_denied(&mesh, "shop", "stranger", PAYMENTS).await;
    mesh.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_manifest_is_named_and_the_rest_goes_on() {
    let mesh = start("t-manifest").await;
    mesh.manifests()
        .write(
            "broken.yaml",
            "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: broken\n  namespace: shop\nspec:\n  replicas: two\n",
        )
        .unwrap();
    let job = "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: nightly, namespace: shop}\n";
    mesh.manifests().write("job.yaml", job).unwrap();
    // Another file that is written after the broken one still takes effect.
    mesh.manifests().edit("payments.yaml", "name: client\n", "name: stranger\n").unwrap();
    eventually_allowed(&mesh, "shop", "stranger", PAYMENTS).await;
    eventually_denied(&mesh, "shop", "client", PAYMENTS).await;
    eventually_allowed(&mesh, "legacy", "legacy", "web.shop:80").await;

    let complaint = eventually("a complaint", FOLLOWS_WITHIN, async || {
        let errors = mesh.manifest_errors().map_err(|error| error.to_string())?;
        let about = errors.into_iter().find(|error| error.contains("broken.yaml") && error.contains("replicas"));
        about.ok_or("nobody complained about broken.yaml".to_owned())
    })
    .await;
    assert!(complaint.contains("line 7") || complaint.contains(":7"), "no line: {complaint}");
    assert!(complaint.contains("expected") || complaint.contains("i32"), "no expectation: {complaint}");

    // What does not run is shown with its file and object, also to a person who did not see the log.
    let table = ps(&mesh, "table");
    let line = |of: &str| table.lines().find(|line| line.contains(of)).unwrap_or_else(|| panic!("no {of}: {table}"));
    assert!(line("broken.yaml").starts_with("manifest ") && line("broken.yaml").contains("Deployment shop/broken"));
    assert!(line("job.yaml").starts_with("ignored ") && line("job.yaml").contains("CronJob nightly"));
    let state: serde_json::Value = serde_json::from_str(&ps(&mesh, "json")).unwrap();
    assert!(state["ignored_manifests"][0].as_str().unwrap().contains("job.yaml:1: CronJob nightly"), "{state}");

    mesh.manifests().remove("broken.yaml").unwrap();
    mesh.manifests().edit("payments.yaml", "name: stranger\n", "name: client\n").unwrap();
    eventually_allowed(&mesh, "shop", "client", PAYMENTS).await;
    mesh.stop().await.unwrap();
}
