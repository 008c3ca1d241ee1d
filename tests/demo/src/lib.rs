//! The demo: starts a mesh from `examples/mesh`, sends real traffic through it, kills the agent under load, and counts
//! the results. It prints each step, and checks the counts at the end.
//!
//! ```text
//! start -> traffic (1, 3) -> policy (2) -> agent restart (4) -> inspection (5) -> clean-up -> judgement
//! ```

#![expect(clippy::print_stdout, reason = "the demo says what it does on standard output")]

mod inspect;
mod restart;
pub mod summary;
mod trace;
mod traffic;

use std::collections::BTreeMap;

use anyhow::Context as _;
use weft_examples::client::Report;
use weft_test_kit::{
    manifests::Manifests,
    mesh::{Mesh, Options},
    observe,
};

use summary::{ReadyMs, Summary};
use trace::Trace;

/// State of the demo, passed from step to step.
struct Stage<'a> {
    mesh: &'a Mesh,
    /// The meshed client that every policy allows.
    client: String,
    /// A meshed client with an identity that `payments` does not name.
    stranger: String,
    /// A client outside the mesh.
    legacy: String,
    summary: Summary,
}

/// Starts the example mesh.
///
/// # Errors
/// One line with what is missing to start the mesh.
pub async fn start(options: Options) -> anyhow::Result<Mesh> {
    let manifests = Manifests::example().context("write the example manifests")?;
    Mesh::start(manifests, options).await
}

/// Runs every step against a started mesh, and counts the results.
///
/// # Errors
/// A step could not be carried out at all; requests that fail are counted instead.
pub async fn run(mesh: &Mesh) -> anyhow::Result<Summary> {
    let pods = mesh.pods().await?;
    for pod in &pods {
        let kind = if pod.meshed { "meshed" } else { "not meshed" };
        let ready = pod.ready_ms.map_or_else(String::new, |ready| format!(", ready in {ready} ms"));
        println!("  {}/{} {} {kind}{ready}", pod.namespace, pod.name, pod.ip);
    }
    let ready = pods.iter().filter(|pod| pod.meshed).filter_map(|pod| pod.ready_ms).collect();
    let mut stage = Stage {
        mesh,
        client: mesh.pod_of("shop", "client").await?,
        stranger: mesh.pod_of("shop", "stranger").await?,
        legacy: mesh.pod_of("legacy", "legacy").await?,
        summary: Summary { pods_ready_ms: ReadyMs::of(ready), ..Summary::default() },
    };
    let trace = Trace::start(&mesh.agent().await?).await.context("watch the agent's trace")?;
    stage.protocols(&trace).await?;
    stage.policy(&trace).await?;
    stage.summary.trace_events = trace.seen();
    drop(trace);
    stage.agent_restart().await?;
    stage.inspect().await?;
    Ok(stage.summary)
}

/// Stops the mesh, and counts what it leaves behind.
///
/// # Errors
/// The host's own tables cannot be read.
pub async fn finish(mesh: Mesh, summary: &mut Summary) -> anyhow::Result<()> {
    let name = mesh.name().to_owned();
    println!("\nclean up");
    mesh.stop().await?;
    summary.left_behind = observe::leftovers(&name)?.into_iter().collect();
    println!("  {} things left behind", summary.left_behind.len());
    Ok(())
}

impl Stage<'_> {
    /// Runs and counts a load that policy allows, and prints the result.
    fn allow(&mut self, what: &str, report: &Report) {
        self.summary.requests += report.requests;
        self.summary.failures += report.failures;
        self.count_peers(report);
        println!(
            "  {what}: {} of {} answered, p50 {:.2} ms, by {}",
            report.requests - report.failures,
            report.requests,
            report.latency_ms.p50,
            counted(&report.by_backend)
        );
        for (error, count) in &report.errors {
            println!("    {count} failed: {error}");
        }
    }

    /// Runs and counts a load that policy refuses, and prints the result.
    fn refuse(&mut self, what: &str, report: &Report) {
        self.summary.denied += report.failures;
        self.summary.wrongly_allowed += report.requests - report.failures;
        println!("  {what}: {} of {} refused ({})", report.failures, report.requests, counted(&report.errors));
    }

    fn count_peers(&mut self, report: &Report) {
        if !report.peer_addr_ok {
            self.summary.peer_mismatches += 1;
        }
    }
}

fn counted(counts: &BTreeMap<String, u64>) -> String {
    let parts: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    parts.join(", ")
}
