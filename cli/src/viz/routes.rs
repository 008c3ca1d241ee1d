//! `weft routes`: traffic by the routes of ServiceProfiles.

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use weft_proto::viz::{Golden, RouteRow, RoutesRequest};

use super::{
    render::{JsonCounts, golden, per_second, percent, rps, success_rate},
    scope::{ScopeArgs, ToArgs, WindowArgs, resource},
    stat::{Format, finish},
};
use crate::output::{self, NOTHING};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft routes svc/web -n shop                               the routes of a Service, as its pods see them
  weft routes deploy/web -n shop
  weft routes deploy/client -n shop --to svc/web -o wide    as a client sees them, with retries apart

[DEFAULT] is what no route of the ServiceProfile matches. Routes of Gateway API: weft stat-outbound, weft stat-inbound.")]
pub(crate) struct RoutesArgs {
    /// KIND or KIND/NAME: svc, deploy, ds, sts, job, cj, rs, rc, po, ns
    #[arg(value_name = "RESOURCE")]
    resource: String,
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    #[command(flatten)]
    to: ToArgs,
    /// Output format: wide shows what was sent, retries included, beside what clients saw
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
    #[command(flatten)]
    window: WindowArgs,
    #[command(flatten)]
    scope: ScopeArgs,
}

/// A route in JSON, with Linkerd's fields and the counts.
#[derive(Serialize)]
struct JsonRow<'a> {
    route: &'a str,
    authority: &'a str,
    effective_success: Option<f64>,
    effective_rps: Option<f64>,
    actual_success: Option<f64>,
    actual_rps: Option<f64>,
    #[serde(flatten)]
    counts: JsonCounts,
}

pub(super) async fn execute(args: RoutesArgs) -> Result<()> {
    let scope = args.scope.once(&args.window).await?;
    let to = args.to.resource(&scope.namespace)?;
    let request = RoutesRequest {
        resource: Some(resource(&args.resource, &scope.namespace)?),
        selector: args.selector.clone(),
        window_seconds: args.window.seconds(),
        to,
    };
    let answer = scope.source.routes(request).await?;
    let with_actual = args.output == Format::Wide && args.to.to.is_some();
    let table = || {
        let mut columns = vec!["ROUTE", "SERVICE"];
        match with_actual {
            true => columns.extend(["EFFECTIVE_SUCCESS", "EFFECTIVE_RPS", "ACTUAL_SUCCESS", "ACTUAL_RPS"]),
            false => columns.extend(["SUCCESS", "RPS"]),
        }
        columns.extend(["LATENCY_P50", "LATENCY_P95", "LATENCY_P99"]);
        let mut table = output::columns(&columns);
        for row in &answer.rows {
            let [success, rps, p50, p95, p99] = golden(row.effective.as_ref());
            let mut cells = vec![row.route.clone(), row.service.clone(), success, rps];
            if with_actual {
                cells.extend(sent(row.actual.as_ref()));
            }
            cells.extend([p50, p95, p99]);
            table.add_row(cells);
        }
        output::text(&table)
    };
    let json: Vec<_> = answer.rows.iter().map(json_row).collect();
    let nothing = "no request was seen on a route of a ServiceProfile in this time: --time-window counts for longer";
    finish((&scope.source, args.output), table, &json, &answer.coverage, nothing)
}

fn sent(actual: Option<&Golden>) -> [String; 2] {
    match actual {
        Some(actual) => [percent(success_rate(actual)), per_second(rps(actual))],
        None => [NOTHING.to_owned(), NOTHING.to_owned()],
    }
}

fn json_row(row: &RouteRow) -> JsonRow<'_> {
    let (effective, actual) = (row.effective.as_ref(), row.actual.as_ref());
    JsonRow {
        route: &row.route,
        authority: &row.service,
        effective_success: effective.and_then(success_rate),
        effective_rps: effective.map(rps),
        actual_success: actual.and_then(success_rate),
        actual_rps: actual.map(rps),
        counts: effective.into(),
    }
}
