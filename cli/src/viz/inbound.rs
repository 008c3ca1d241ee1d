//! `weft stat-inbound`: what servers accept and refuse, by route.

use anyhow::Result;
use clap::Args;
use futures::future::try_join_all;
use serde::Serialize;
use weft_proto::viz::{InboundRow, StatInboundRequest};

use super::{
    render::{self, JsonGolden, JsonResource, golden},
    scope::{ScopeArgs, WindowArgs, resources},
    stat::{Format, finish},
};
use crate::output::{self, or_nothing};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft stat-inbound deploy/web -n shop
  weft stat-inbound po -n shop -t 1m
  weft stat-inbound deploy/payments -n shop -o wide     also what policy and rate limits refused

SERVER is the Server and its port, [default] where none selects the port. TYPE is the kind of the route.")]
pub(crate) struct InboundArgs {
    /// KIND, KIND NAME... or KIND/NAME...: deploy, ds, sts, job, cj, rs, rc, po, ns
    #[arg(required = true, value_name = "RESOURCE")]
    resource: Vec<String>,
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
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
    server: String,
    route: &'a str,
    route_type: &'a str,
    #[serde(flatten)]
    http: JsonGolden,
    denied: u64,
    rate_limited: u64,
}

pub(super) async fn execute(args: InboundArgs) -> Result<()> {
    let scope = args.scope.once(&args.window).await?;
    let ask = |resource| {
        scope.source.stat_inbound(StatInboundRequest {
            resource: Some(resource),
            selector: args.selector.clone(),
            window_seconds: args.window.seconds(),
        })
    };
    let answers = try_join_all(resources(&args.resource, &scope.namespace)?.into_iter().map(ask)).await?;
    let rows: Vec<&InboundRow> = answers.iter().flat_map(|answer| &answer.rows).collect();
    let table = || {
        let mut columns =
            vec!["NAME", "SERVER", "ROUTE", "TYPE", "SUCCESS", "RPS", "LATENCY_P50", "LATENCY_P95", "LATENCY_P99"];
        if args.output == Format::Wide {
            columns.extend(["DENIED", "RATE_LIMITED"]);
        }
        if args.scope.all_namespaces {
            columns.insert(0, "NAMESPACE");
        }
        let mut table = output::columns(&columns);
        for row in &rows {
            let mut cells = vec![
                render::name(row.resource.as_ref()),
                server(row),
                render::route(&row.route),
                or_nothing(&row.route_kind),
            ];
            cells.extend(golden(row.http.as_ref()));
            if args.output == Format::Wide {
                cells.extend([row.denied.to_string(), row.rate_limited.to_string()]);
            }
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
        "no request arrived in this time: --time-window counts for longer",
    )
}

/// Linkerd's form of the server: `web-http:8080`, `[default]:8080`.
fn server(row: &InboundRow) -> String {
    let (port, name) = row.server.split_once(':').unwrap_or(("", &row.server));
    let name = if name.starts_with("default:") { "[default]" } else { name };
    if port.is_empty() { name.to_owned() } else { format!("{name}:{port}") }
}

fn json_row(row: &InboundRow) -> JsonRow<'_> {
    JsonRow {
        resource: row.resource.as_ref().into(),
        server: server(row),
        route: &row.route,
        route_type: &row.route_kind,
        http: row.http.as_ref().into(),
        denied: row.denied,
        rate_limited: row.rate_limited,
    }
}
