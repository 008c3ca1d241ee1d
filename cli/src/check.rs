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

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use tokio::time::Instant;

<<<<<<< HEAD
use crate::{
    cluster::ClusterArgs,
    output::{
        Data,
        progress::{self, Progress},
    },
};
use facts::Mode;
=======
use crate::output;
<<<<<<< HEAD
use options::{Format, Request};
>>>>>>> 5307a67 (cli: check only definitions, an expected version, and log requests)
=======
use gather::Gathering;
use options::{Format, Request, Scope};
>>>>>>> ad333f5 (cli: judge each category of checks when its facts have arrived)
use outcome::Outcome;
use view::Report;

pub(crate) use kubernetes::{is_too_old, our_crds};
pub(crate) use options::{CheckArgs, VizCheckArgs};

/// Pause between two rounds of checks while the mesh starts.
const AGAIN: Duration = Duration::from_secs(2);

<<<<<<< HEAD
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft check --pre                    before installing: what the cluster lacks
  weft check                          after installing: waits until everything is up, or says what is wrong
  weft check --proxy -n shop          the proxies of one namespace as well
  weft check -o short                 what failed, and nothing else
  weft check -o json --wait 0s | jq -r '.categories[].checks[] | select(.result == \"error\") | .error'

Ends with 1 when a check fails. Warnings are no failure. --wait is for what time may heal, such as a pod that starts; a
wrong certificate ends the wait at once.")]
pub(crate) struct CheckArgs {
    /// Only the requirements for an installation of the control plane
    #[arg(long, conflicts_with = "proxy")]
    pre: bool,
    /// Also the pods with a proxy
    #[arg(long)]
    proxy: bool,
    /// With --proxy: only this namespace [default: all]
    #[arg(short, long)]
    namespace: Option<String>,
    /// How long to wait for conditions that may still become true
    #[arg(long, value_name = "TIME", default_value = "300s", value_parser = crate::output::duration)]
    wait: Duration,
    /// Output format: json and yaml are Linkerd's, {success, categories}
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft viz check
  weft viz check -o short --wait 0s

Ends with 1 when a check fails. `weft check` does the same where the component is installed.")]
pub(crate) struct VizCheckArgs {
    /// How long to wait for conditions that may still become true
    #[arg(long, value_name = "TIME", default_value = "300s", value_parser = crate::output::duration)]
    wait: Duration,
    /// Output format: json and yaml are Linkerd's, {success, categories}
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Every check
    Table,
    /// Only checks that did not pass
    Short,
    /// For programs
    Json,
    /// For programs, and people who read all of it
    Yaml,
}

=======
>>>>>>> 5307a67 (cli: check only definitions, an expected version, and log requests)
pub(crate) async fn execute(args: CheckArgs) -> Result<ExitCode> {
    args.warnings().iter().for_each(|warning| output::note(warning));
    run(args.into()).await
}

/// `weft viz check`.
pub(crate) async fn viz(args: VizCheckArgs) -> Result<ExitCode> {
    run(args.into()).await
}

async fn run(request: Request) -> Result<ExitCode> {
    if request.verbose {
        options::log_requests();
    }
    let give_up = Instant::now() + request.wait;
    let mut progress = Progress::new();
<<<<<<< HEAD
    let mut report = match args.output {
        Format::Json => Err(Data::Json),
        Format::Yaml => Err(Data::Yaml),
        Format::Table => Ok(Report::new(false)),
        Format::Short => Ok(Report::new(true)),
=======
    let mut report = match request.output {
        Format::Json => None,
        Format::Table => Some(Report::new(false)),
        Format::Short => Some(Report::new(true)),
>>>>>>> 5307a67 (cli: check only definitions, an expected version, and log requests)
    };
    let gather = || gather::gather(&args.cluster, mode, args.namespace.as_deref());
    let mut facts = progress::during("the cluster's answers", gather()).await;
    let outcome = loop {
<<<<<<< HEAD
<<<<<<< HEAD
=======
        let facts = gather::gather(&request.scope).await;
>>>>>>> 5307a67 (cli: check only definitions, an expected version, and log requests)
        let outcome = Outcome::of(catalogue::CATEGORIES, &facts);
        match outcome.waits_for() {
            Some(check) if Instant::now() + AGAIN < give_up => {
                if let Ok(report) = &mut report {
                    progress.clear();
                    report.print_settled(&outcome)?;
=======
        let outcome = round(&request.scope, report.as_mut(), &mut progress).await?;
        match outcome.waits_for() {
            Some(check) if Instant::now() + AGAIN < give_up => {
                if let Some(report) = &mut report {
                    report.print_settled(&outcome, &mut progress)?;
>>>>>>> ad333f5 (cli: judge each category of checks when its facts have arrived)
                }
                progress.clear();
                progress.show(&check);
            }
            _ => break outcome,
        }
        tokio::time::sleep(AGAIN).await;
        facts = gather().await;
    };
    progress.clear();
    match &mut report {
<<<<<<< HEAD
        Err(data) => data.print(&outcome)?,
        Ok(report) => report.print_rest(&outcome)?,
=======
        None => output::json(&outcome)?,
        Some(report) => report.print_rest(&outcome)?,
>>>>>>> 5307a67 (cli: check only definitions, an expected version, and log requests)
    }
    Ok(if outcome.success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Asks for all facts once. Each category is judged, and printed if nothing can change it, when its facts are there.
async fn round(scope: &Scope, mut report: Option<&mut Report>, progress: &mut Progress) -> Result<Outcome> {
    let mut gathering = Gathering::start(scope, &catalogue::needs(scope.mode)).await;
    loop {
        let known = catalogue::of(scope.mode).take_while(|category| gathering.has(category.needs));
        let outcome = Outcome::of(known, &gathering.facts);
        let next = catalogue::of(scope.mode).find(|category| !gathering.has(category.needs));
        let Some(next) = next.filter(|_| !outcome.is_fatal()) else { return Ok(outcome) };
        if let Some(report) = &mut report {
            report.print_settled(&outcome, progress)?;
        }
        progress.begin(next.name);
        gathering.next().await;
    }
}
