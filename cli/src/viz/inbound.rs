//! `weft stat-inbound`: what servers accept and refuse, by route.

use anyhow::Result;
use clap::Args;
use futures::future::try_join_all;
use serde::Serialize;
use weft_proto::viz::{InboundRow, StatInboundRequest};

use super::{
    render::{self, JsonResource, JsonRouteCounts, golden, named_port, success_rate},
    scope::{ScopeArgs, WindowArgs, resources},
    stat::{COUNTS, finish},
};
use crate::{
    kind,
    output::{self, WideFormat, or_nothing, progress},
};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft stat-inbound deploy/web -n shop
  weft stat-inbound po -n shop -t 1m
  weft stat-inbound deploy/payments -n shop -o wide     also what policy and rate limits refused

SERVER is the Server and its port, [default] where none selects the port. TYPE is the kind of the route.")]
pub(crate) struct InboundArgs {
    #[arg(required = true, value_name = "RESOURCE", help = kind::help("KIND, KIND NAME... or KIND/NAME..."))]
    resource: Vec<String>,
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    /// Output format: wide adds what policy and rate limits refused
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    window: WindowArgs,
    #[command(flatten)]
    scope: ScopeArgs,
}

/// A row in JSON: Linkerd's fields, then ours.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonRow<'a> {
    #[serde(flatten)]
    resource: JsonResource<'a>,
    server: &'a str,
    port: &'a str,
    route: String,
    route_type: &'a str,
    /// Linkerd's spelling of it.
    #[serde(rename = "successesRate")]
    success_rate: Option<f64>,
    #[serde(flatten)]
    http: JsonRouteCounts,
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
    let asked = try_join_all(resources(&args.resource, &scope.namespace)?.into_iter().map(ask));
    let answers = progress::during(COUNTS, asked).await?;
    let rows: Vec<&InboundRow> = answers.iter().flat_map(|answer| &answer.rows).collect();
    let table = || {
        let mut columns =
            vec!["NAME", "SERVER", "ROUTE", "TYPE", "SUCCESS", "RPS", "LATENCY_P50", "LATENCY_P95", "LATENCY_P99"];
        if args.output == WideFormat::Wide {
            columns.extend(["DENIED", "RATE_LIMITED"]);
        }
        if args.scope.all_namespaces {
            columns.insert(0, "NAMESPACE");
        }
        let mut table = output::columns(&columns);
        for row in &rows {
            let mut cells = vec![
                render::name(row.resource.as_ref()),
                named_port(server(row)),
                render::route(&row.route),
                or_nothing(render::route_kind(&row.route_kind)),
            ];
            cells.extend(golden(row.http.as_ref()));
            if args.output == WideFormat::Wide {
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
        rows.is_empty().then_some("no request arrived in this time: --time-window counts for longer"),
    )
}

/// The Server, `[default]` where none selects the port, and the port.
fn server(row: &InboundRow) -> (&str, &str) {
    let (port, name) = row.server.split_once(':').unwrap_or(("", &row.server));
    (if name.starts_with("default:") { "[default]" } else { name }, port)
}

fn json_row(row: &InboundRow) -> JsonRow<'_> {
    let (server, port) = server(row);
    JsonRow {
        resource: row.resource.as_ref().into(),
        server,
        port,
        route: render::route(&row.route),
        route_type: render::route_kind(&row.route_kind),
        success_rate: row.http.as_ref().and_then(success_rate),
        http: row.http.as_ref().into(),
        denied: row.denied,
        rate_limited: row.rate_limited,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use weft_proto::viz::Golden;

    use super::*;

    /// Linkerd's fields (`linkerd2:viz/cmd/stat-inbound.go`), the counts and what was refused.
    #[test]
    fn rows_have_linkerds_fields() {
        let row = InboundRow {
            server: "8080:web-http".to_owned(),
            route: "api".to_owned(),
            route_kind: "HTTPRoute".to_owned(),
            http: Some(Golden { success: 3, failure: 1, p99_ms: Some(9.5), seconds: 2.0, ..Golden::default() }),
            denied: 5,
            ..InboundRow::default()
        };
        assert_eq!(
            serde_json::to_value(json_row(&row)).unwrap(),
            json!({"namespace": "", "kind": "", "name": "", "server": "web-http", "port": "8080", "route": "api",
                "routeType": "HTTPRoute", "successesRate": 0.75, "rps": 2.0, "latencyMsP50": null, "latencyMsP95": null,
                "latencyMsP99": 9.5, "successes": 3, "failures": 1, "windowSeconds": 2.0, "denied": 5, "rateLimited": 0})
        );
        let default = InboundRow { server: "8080:default:deny".to_owned(), ..row };
        assert_eq!(server(&default), ("[default]", "8080"));
    }
}
