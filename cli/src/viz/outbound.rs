//! `weft stat-outbound`: what workloads send, by Service, route and backend.

use anyhow::Result;
use clap::Args;
use futures::future::try_join_all;
use serde::Serialize;
use weft_proto::viz::{OutboundRow, StatOutboundRequest};

use super::{
    render::{self, JsonGolden, JsonResource, golden, percent, rate},
    scope::{ScopeArgs, ToArgs, WindowArgs, resources},
    stat::{Format, finish},
};
use crate::output::{self, NOTHING, or_nothing};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft stat-outbound deploy/client -n shop
  weft stat-outbound deploy/client -n shop --to svc/web      one Service
  weft stat-outbound deploy -n shop -t 1m -o json

A row without BACKEND is the whole route, where retries are part of one request; those with one are attempts.
TIMEOUTS and RETRIES are shares of the requests.")]
pub(crate) struct OutboundArgs {
    /// KIND, KIND NAME... or KIND/NAME...: deploy, ds, sts, job, cj, rs, rc, po, ns
    #[arg(required = true, value_name = "RESOURCE")]
    resource: Vec<String>,
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    #[command(flatten)]
    to: ToArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
    #[command(flatten)]
    window: WindowArgs,
    #[command(flatten)]
    scope: ScopeArgs,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    #[serde(flatten)]
    resource: JsonResource<'a>,
    service: &'a str,
    route: &'a str,
    route_type: &'a str,
    backend: &'a str,
    #[serde(flatten)]
    http: JsonGolden,
    timeouts: u64,
    retries: u64,
}

pub(super) async fn execute(args: OutboundArgs) -> Result<()> {
    let scope = args.scope.once(&args.window).await?;
    let to = args.to.resource(&scope.namespace)?;
    let ask = |resource| {
        scope.source.stat_outbound(StatOutboundRequest {
            resource: Some(resource),
            selector: args.selector.clone(),
            window_seconds: args.window.seconds(),
            to: to.clone(),
        })
    };
    let answers = try_join_all(resources(&args.resource, &scope.namespace)?.into_iter().map(ask)).await?;
    let rows: Vec<&OutboundRow> = answers.iter().flat_map(|answer| &answer.rows).collect();
    let table = || {
        let mut columns = vec![
            "NAME",
            "SERVICE",
            "ROUTE",
            "TYPE",
            "BACKEND",
            "SUCCESS",
            "RPS",
            "LATENCY_P50",
            "LATENCY_P95",
            "LATENCY_P99",
            "TIMEOUTS",
            "RETRIES",
        ];
        if args.scope.all_namespaces {
            columns.insert(0, "NAMESPACE");
        }
        let mut table = output::columns(&columns);
        for row in &rows {
            let mut cells = vec![
                render::name(row.resource.as_ref()),
                or_nothing(&row.service),
                render::route(&row.route),
                or_nothing(&row.route_kind),
                or_nothing(&row.backend),
            ];
            cells.extend(golden(row.http.as_ref()));
            let share = |count: u64| {
                let all = row.http.as_ref().map_or(0, |http| http.success + http.failure);
                if row.backend.is_empty() {
                    percent((all > 0).then(|| rate(count, all as f64)))
                } else {
                    NOTHING.to_owned()
                }
            };
            cells.extend([share(row.timeouts), share(row.retries)]);
            if args.scope.all_namespaces {
                cells.insert(0, render::namespace(row.resource.as_ref()));
            }
            table.add_row(cells);
        }
        output::text(&table)
    };
    let json: Vec<_> = rows.iter().map(|row| json_row(row)).collect();
    finish(
        (&scope.source, args.output),
        table,
        &json,
        answers.iter().filter_map(|answer| answer.coverage.as_ref()),
        "no request was sent in this time: --time-window counts for longer",
    )
}

fn json_row(row: &OutboundRow) -> JsonRow<'_> {
    JsonRow {
        resource: row.resource.as_ref().into(),
        service: &row.service,
        route: &row.route,
        route_type: &row.route_kind,
        backend: &row.backend,
        http: row.http.as_ref().into(),
        timeouts: row.timeouts,
        retries: row.retries,
    }
}
