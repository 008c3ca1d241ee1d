//! `weft check`: whether a cluster can run the mesh, and whether the mesh that it runs is sound.
//!
//! ```text
//! API server, agents ──gather──> Facts ──judge (checks are data)──> Outcome ──> table, short, JSON
//!                         ^ ^      │                                    │
//!                         │ └──────┴─ until every part has arrived      │
//!                         └───────── while waiting may help ────────────┘
//! ```
//!
//! Categories and descriptions are Linkerd's where its checks apply, and so is the JSON; every failure names the
//! object, the field and a remedy. Checks are synchronous functions of the facts.

mod agents;
mod answer;
mod catalogue;
mod data_plane;
mod extensions;
mod facts;
mod gather;
mod high_availability;
mod identity;
mod installed;
mod kubernetes;
mod opaque_ports;
mod options;
mod outcome;
mod placement;
mod unsupported;
mod versions;
mod view;
mod viz;
mod webhooks;

use std::{io, process::ExitCode, time::Duration};

use anyhow::Result;
use tokio::time::Instant;

use crate::output::{
    self, Data,
    progress::{self, API_SERVER, Progress},
};
use gather::Gathering;
use options::{Format, Request, Scope};
use outcome::Outcome;
use view::Report;

pub(crate) use kubernetes::{is_too_old, our_crds};
pub(crate) use options::{CheckArgs, VizCheckArgs};

/// Pause between two rounds of checks while the mesh starts.
const AGAIN: Duration = Duration::from_secs(2);

pub(crate) async fn execute(args: CheckArgs) -> Result<ExitCode> {
    args.warnings().iter().for_each(|warning| output::note(warning));
    run(args.into()).await
}

/// `weft viz check`.
pub(crate) async fn viz(args: VizCheckArgs) -> Result<ExitCode> {
    run(args.into()).await
}

async fn run(request: Request) -> Result<ExitCode> {
    let give_up = Instant::now() + request.wait;
    let mut progress = Progress::new();
    let mut report = match request.output {
        Format::Json => Err(Data::Json),
        Format::Yaml => Err(Data::Yaml),
        Format::Table => Ok(Report::new(false)),
        Format::Short => Ok(Report::new(true)),
    };
    let outcome = loop {
        let outcome = round(&request.scope, report.as_mut().ok(), &mut progress).await?;
        match outcome.waits_for() {
            Some(check) if Instant::now() + AGAIN < give_up => {
                if let Ok(report) = &mut report {
                    report.print_settled(&outcome, &mut progress)?;
                }
                progress.clear();
                progress.show(&check);
            }
            _ => break outcome,
        }
        tokio::time::sleep(AGAIN).await;
    };
    progress.clear();
    match &mut report {
        Err(data) => data.print(&outcome)?,
        Ok(report) => report.print_rest(&outcome)?,
    }
    Ok(if outcome.success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Asks for all facts once. Each category is judged, and printed if nothing can change it, when its facts are there.
async fn round(scope: &Scope, mut report: Option<&mut Report>, progress: &mut Progress<io::Stderr>) -> Result<Outcome> {
    let mut gathering = progress::during(API_SERVER, Gathering::start(scope, &catalogue::needs(scope.mode))).await;
    loop {
        let mode = gathering.facts.applicable_mode();
        let known = catalogue::of(mode).take_while(|category| gathering.has(category.needs));
        let outcome = Outcome::of(known, &gathering.facts);
        let next = catalogue::of(mode).find(|category| !gathering.has(category.needs));
        let Some(next) = next.filter(|_| !outcome.is_fatal()) else { return Ok(outcome) };
        if let Some(report) = &mut report {
            report.print_settled(&outcome, progress)?;
        }
        progress::during(next.name, gathering.next()).await;
    }
}
