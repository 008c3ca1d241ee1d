//! `weft tap`: requests as they happen, with the kernel's verdicts beside them.
//!
//! ```text
//! engine ── events of requests ──┬──> a line for each
//! agents ── verdicts, joined by pod and ports (--kernel) ──┘
//! ```

mod format;
mod kernel;

use std::num::NonZeroU64;

use anyhow::{Result, anyhow};
use clap::{Args, ValueEnum};
use futures::StreamExt as _;
use weft_proto::viz::{TapEvent, TapRequest, tap_event};

use super::scope::{ScopeArgs, ToArgs, WindowArgs, resources};
use crate::output::{self, note};
use format::{json, line};
use kernel::Kernel;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft tap deploy/web -n shop                               requests that web sends and receives
  weft tap deploy/client -n shop --to svc/web --path /api   some
  weft tap ns/shop --method POST --max-rps 10
  weft tap po/web-0 -n shop -o json | jq .requestInitEvent
  weft tap deploy/client -n shop --kernel                   the kernel's verdict of the same connection, too

Where weft-viz is installed, it taps for those who may create taps.viz.weft.io. Otherwise, and with --direct, proxies answer on the
loopback address of their pod, which a port-forward reaches: whoever may create pods/portforward may tap. What is beyond --max-rps is left out, and counted on standard error. --kernel asks the nodes' agents, which takes
the right to weft trace; only connections that begin while tapping have a verdict.")]
pub(crate) struct TapArgs {
    /// KIND/NAME, KIND NAME or KIND: deploy, ds, sts, job, cj, rs, rc, po, ns
    #[arg(required = true, num_args = 1..=2, value_name = "RESOURCE")]
    resource: Vec<String>,
    #[command(flatten)]
    filter: FilterArgs,
    /// Also show the verdicts of the kernel about each connection
    #[arg(long)]
    kernel: bool,
    /// End after so many requests
    #[arg(long, value_name = "N")]
    count: Option<NonZeroU64>,
    /// Output format: wide adds what both ends belong to and the route; json is one object a line, with headers
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
    #[command(flatten)]
    scope: ScopeArgs,
}

/// Which requests.
#[derive(Clone, Debug, Args)]
pub(super) struct FilterArgs {
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    #[command(flatten)]
    to: ToArgs,
    /// Only requests with this method
    #[arg(long, default_value = "", hide_default_value = true)]
    method: String,
    /// Only requests whose authority begins so
    #[arg(long, default_value = "", hide_default_value = true)]
    authority: String,
    /// Only requests whose path begins so
    #[arg(long, default_value = "", hide_default_value = true)]
    path: String,
    /// Only requests with this scheme: http or https
    #[arg(long, default_value = "", hide_default_value = true)]
    scheme: String,
    /// The most requests a second, of all proxies together
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    max_rps: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A line for each event
    Table,
    /// Also what both ends belong to
    Wide,
    /// For programs, in Linkerd's form
    Json,
}

impl FilterArgs {
    pub(super) fn request(&self, words: &[String], namespace: &str, headers: bool) -> Result<TapRequest> {
        let mut found = resources(words, namespace)?;
        let (Some(wanted), true) = (found.pop(), found.is_empty()) else {
            return Err(anyhow!("name one resource: KIND/NAME, KIND NAME or KIND"));
        };
        Ok(TapRequest {
            resource: Some(wanted),
            selector: self.selector.clone(),
            to: self.to.resource(namespace)?,
            method: self.method.clone(),
            authority: self.authority.clone(),
            path: self.path.clone(),
            scheme: self.scheme.clone(),
            max_rps: self.max_rps,
            headers,
        })
    }
}

pub(super) async fn execute(args: TapArgs) -> Result<()> {
    let scope = args.scope.once(&WindowArgs { time_window: None }).await?;
    let request = args.filter.request(&args.resource, &scope.namespace, args.output == Format::Json)?;
    // Verdicts precede requests: the agents have to be asked first.
    let mut kernel = if args.kernel { Some(Kernel::open(&scope.network, &scope.namespace).await) } else { None };
    let mut events = scope.source.tap(request).await?;
    if args.output == Format::Wide {
        note(scope.source.name());
    }
    let mut left = args.count.map(NonZeroU64::get);
    loop {
        let event = tokio::select! {
            _ = tokio::signal::ctrl_c() => return Ok(()),
            // Verdicts are kept while no request comes.
            () = async { match &mut kernel { Some(kernel) => kernel.listen().await, None => std::future::pending().await } } => continue,
            event = events.next() => event,
        };
        let Some(event) = event.transpose()? else { return Ok(()) };
        if event.skipped > 0 {
            note(&format!("{} requests were left out before this one: see --max-rps", event.skipped));
        }
        if let Some(tap_event::Event::Problem(why)) = &event.event {
            note(&format!("{}/{}: {why}", event.namespace, event.pod));
            continue;
        }
        show(&args, &event)?;
        if let (Some(kernel), Some(tap_event::Event::Request(_))) = (&mut kernel, &event.event)
            && let Some(verdict) = kernel.verdict(&event).await
        {
            output::line(&match args.output {
                Format::Json => verdict.json(&event),
                _ => verdict.line(&event),
            })?;
        }
        if let Some(tap_event::Event::End(_)) = event.event
            && let Some(left) = &mut left
        {
            *left -= 1;
            if *left == 0 {
                return Ok(());
            }
        }
    }
}

fn show(args: &TapArgs, event: &TapEvent) -> Result<()> {
    match args.output {
        Format::Json => output::json(&json(event)),
        Format::Table => Ok(output::line(&line(event, false))?),
        Format::Wide => Ok(output::line(&line(event, true))?),
    }
}
