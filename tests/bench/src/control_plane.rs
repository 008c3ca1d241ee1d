//! The control plane as its clients see it: a real API server full of generated objects, the real processes, and
//! simulated proxies that hold the streams which real ones do.
//!
//! ```text
//! world ──writes──► API server ──watches──► weft-control-plane ──streams──► clients
//!   └──── when the API server had answered ──► changes ◄── when it arrived ────┘
//! ```
//!
//! Everything shares this machine's processors, the API server and the clients too, so the report has the bench's own
//! CPU time and how busy the machine was. Nothing is measured of proxies, TLS or the network.

pub(crate) mod api;
pub mod args;
pub mod changes;
mod clients;
pub(crate) mod cluster;
pub mod meter;
pub mod objects;
mod parts;
pub mod process;
pub mod report;
mod wire;
mod world;

use args::{Args, Part};
use cluster::{Cluster, Created};
use objects::Plan;
use parts::Run;
use report::Report;

use crate::machine::Machine;

/// The bench, and what it has to remove.
pub struct Bench {
    args: Args,
    plan: Plan,
    cluster: Cluster,
}

impl Bench {
    /// Prepares a run; nothing is started yet.
    ///
    /// # Errors
    /// The options contradict each other, or there is no API server.
    pub fn new(args: Args) -> anyhow::Result<Self> {
        let plan = Plan::new(&format!("weft-bench-{}", std::process::id()), args.size()?);
        let cluster = Cluster::choose(&args.api_server)?;
        Ok(Self { args, plan, cluster })
    }

    /// Measures the parts that were asked for, and prints each when it is done.
    ///
    /// # Errors
    /// The API server or the control plane does not do what it should.
    pub async fn run(&mut self) -> anyhow::Result<Report> {
        let machine = Machine::here();
        println!("{}", machine.describe());
        println!("starting an API server");
        let api = self.cluster.start().await?;
        self.cluster.install_definitions(&api).await?;
        println!("creating the objects, starting the control plane, connecting the clients");
        let (mut run, setup, start) = Run::start(&self.args, &self.plan, api, self.cluster.kubeconfig()).await?;
        println!("{}", setup.describe());
        let mut report = Report {
            machine,
            setup,
            start: None,
            changes: None,
            rollout: None,
            reconnect: None,
            stalled: None,
            slow: None,
            doubled: None,
        };
        if self.args.wants(Part::Start) {
            println!("\n{}", start.table());
            report.start = Some(start);
        }
        if self.args.wants(Part::Changes) {
            let changes = run.changes().await?;
            println!("\n{}", changes.table("changes"));
            report.changes = Some(changes);
        }
        if self.args.wants(Part::Rollout) {
            let rollout = run.rollout().await?;
            println!("\n{}", rollout.table("rollout"));
            report.rollout = Some(rollout);
        }
        if self.args.wants(Part::Reconnect) {
            let reconnect = run.reconnect().await?;
            println!("\n{}", reconnect.table());
            report.reconnect = Some(reconnect);
        }
        if self.args.wants(Part::Stalled) {
            let stalled = run.stalled().await?;
            println!("\n{}", stalled.table("stalled"));
            report.stalled = Some(stalled);
        }
        if self.args.wants(Part::Slow) {
            let slow = run.slow().await?;
            println!("\n{}", slow.table("slow"));
            report.slow = Some(slow);
        }
        if self.args.wants(Part::Doubled) {
            let doubled = run.doubled().await?;
            println!("\n{}", doubled.table());
            report.doubled = Some(doubled);
        } else {
            run.stop().await?;
        }
        Ok(report)
    }

    /// Removes the API server, or what was created in one that is not ours. Call it in any case.
    ///
    /// # Errors
    /// Something is left; the message says what.
    pub async fn remove(self) -> anyhow::Result<()> {
        println!("removing the objects and the API server");
        let namespaces = self.plan.namespaces().iter().cloned().chain([self.plan.control_namespace()]).collect();
        self.cluster.remove(&Created { run: self.plan.run, namespaces }).await
    }
}
