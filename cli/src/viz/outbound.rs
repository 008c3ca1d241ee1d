//! `weft stat-outbound`: what workloads send, by Service, route and backend.

use anyhow::Result;
use clap::Args;
use futures::future::try_join_all;
use serde::Serialize;
use weft_proto::viz::{OutboundRow, StatOutboundRequest};

use super::{
    render::{self, golden, percent, rate, rps, success_rate},
    scope::{ScopeArgs, WindowArgs, resource, resources},
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
    /// Only traffic to this Service, or to this authority: svc/NAME, au/HOST:PORT
    #[arg(long, value_name = "RESOURCE")]
    to: Option<String>,
    /// Namespace of --to [default: that of the resource]
    #[arg(long, value_name = "NAMESPACE", requires = "to")]
    to_namespace: Option<String>,
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
    namespace: &'a str,
    kind: &'a str,
    name: &'a str,
    service: &'a str,
    route: &'a str,
    route_type: &'a str,
    backend: &'a str,
    success: Option<f64>,
    rps: Option<f64>,
    latency_ms_p50: Option<f64>,
    latency_ms_p95: Option<f64>,
    latency_ms_p99: Option<f64>,
    timeouts: u64,
    retries: u64,
    successes: Option<u64>,
    failures: Option<u64>,
    window_seconds: Option<f64>,
}

pub(super) async fn execute(args: OutboundArgs) -> Result<()> {
    let scope = args.scope.once(&args.window).await?;
    let to = match &args.to {
        Some(to) => Some(resource(to, args.to_namespace.as_deref().unwrap_or(&scope.namespace))?),
        None => None,
    };
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
                if row.route == "default" { "[default]".to_owned() } else { or_nothing(&row.route) },
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
    let coverage = answers.first().and_then(|answer| answer.coverage.as_ref());
    finish(
        (&scope.source, args.output),
        table,
        &json,
        coverage,
        "no request was sent in this time: --time-window counts for longer",
    )
}

fn json_row(row: &OutboundRow) -> JsonRow<'_> {
    let resource = row.resource.as_ref();
    let http = row.http.as_ref();
    JsonRow {
        namespace: resource.map_or("", |resource| &resource.namespace),
        kind: resource.map_or("", |resource| &resource.kind),
        name: resource.map_or("", |resource| &resource.name),
        service: &row.service,
        route: &row.route,
        route_type: &row.route_kind,
        backend: &row.backend,
        success: http.and_then(success_rate),
        rps: http.map(rps),
        latency_ms_p50: http.and_then(|http| http.p50_ms),
        latency_ms_p95: http.and_then(|http| http.p95_ms),
        latency_ms_p99: http.and_then(|http| http.p99_ms),
        timeouts: row.timeouts,
        retries: row.retries,
        successes: http.map(|http| http.success),
        failures: http.map(|http| http.failure),
        window_seconds: http.map(|http| http.seconds),
    }
}
