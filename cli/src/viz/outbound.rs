//! `weft stat-outbound`: what workloads send, by Service, route and backend.

use anyhow::Result;
use clap::Args;
use futures::future::try_join_all;
use serde::Serialize;
use weft_proto::viz::{OutboundRow, StatOutboundRequest};

use super::{
    render::{self, JsonResource, JsonRouteCounts, golden, percent, success_rate},
    scope::{ScopeArgs, ToArgs, WindowArgs, resources},
    stat::{COUNTS, finish},
};
use crate::{
    kind,
    output::{self, WideFormat, or_nothing, progress},
};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft stat-outbound deploy/client -n shop
  weft stat-outbound deploy/client -n shop --to svc/web      one Service
  weft stat-outbound deploy -n shop -t 1m -o json

A row without BACKEND is the whole route, where retries are part of one request; those with one are attempts.
TIMEOUTS is a share of the requests, RETRIES one of all that was sent.")]
pub(crate) struct OutboundArgs {
    #[arg(required = true, value_name = "RESOURCE", help = kind::help("KIND, KIND NAME... or KIND/NAME..."))]
    resource: Vec<String>,
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    #[command(flatten)]
    to: ToArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    window: WindowArgs,
    #[command(flatten)]
    scope: ScopeArgs,
}

/// A row in JSON: Linkerd's fields, then ours. A row of the whole route has no backend, that of a backend no retries.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonRow<'a> {
    #[serde(flatten)]
    resource: JsonResource<'a>,
    service: &'a str,
    port: &'a str,
    route: String,
    route_type: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    backend: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    backend_port: &'a str,
    success_rate: Option<f64>,
    timeout_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_rate: Option<f64>,
    #[serde(flatten)]
    http: JsonRouteCounts,
    service_namespace: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    backend_namespace: &'a str,
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
    let asked = try_join_all(resources(&args.resource, &scope.namespace)?.into_iter().map(ask));
    let answers = progress::during(COUNTS, asked).await?;
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
                or_nothing(render::route_kind(&row.route_kind)),
                or_nothing(&row.backend),
            ];
            cells.extend(golden(row.http.as_ref()));
            cells.extend([percent(timeout_rate(row)), percent(retry_rate(row))]);
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
        rows.is_empty().then_some("no request was sent in this time: --time-window counts for longer"),
    )
}

/// Namespace, name and port of what a proxy has a name for: `shop/web:80` of a Service, else `example.com:443`.
fn parts(named: &str) -> (&str, &str, &str) {
    let (namespace, name) = named.split_once('/').unwrap_or(("", named));
    let (name, port) = name.rsplit_once(':').unwrap_or((name, ""));
    (namespace, name, port)
}

/// The share of requests whose time was over.
fn timeout_rate(row: &OutboundRow) -> Option<f64> {
    share(row.timeouts, requests(row))
}

/// The share of what was sent that were repetitions, as Linkerd has it; a backend does not know which are.
fn retry_rate(row: &OutboundRow) -> Option<f64> {
    row.backend.is_empty().then(|| share(row.retries, requests(row) + row.retries))?
}

fn requests(row: &OutboundRow) -> u64 {
    row.http.as_ref().map_or(0, |http| http.success + http.failure)
}

fn share(count: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| count as f64 / all as f64)
}

fn json_row(row: &OutboundRow) -> JsonRow<'_> {
    let (service_namespace, service, port) = parts(&row.service);
    let (backend_namespace, backend, backend_port) = parts(&row.backend);
    JsonRow {
        resource: row.resource.as_ref().into(),
        service,
        port,
        route: render::route(&row.route),
        route_type: render::route_kind(&row.route_kind),
        backend,
        backend_port,
        success_rate: row.http.as_ref().and_then(success_rate),
        timeout_rate: timeout_rate(row),
        retry_rate: retry_rate(row),
        http: row.http.as_ref().into(),
        service_namespace,
        backend_namespace,
        timeouts: row.timeouts,
        retries: row.retries,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use weft_proto::viz::Golden;

    use super::*;

    /// Linkerd's fields (`linkerd2:viz/cmd/stat-outbound.go`) and the counts.
    #[test]
    fn rows_have_linkerds_fields() {
        let http = Golden { success: 7, failure: 1, p50_ms: Some(2.0), seconds: 4.0, ..Golden::default() };
        let route = OutboundRow {
            service: "shop/web:80".to_owned(),
            route: "default".to_owned(),
            route_kind: "default".to_owned(),
            http: Some(http),
            timeouts: 2,
            retries: 2,
            ..OutboundRow::default()
        };
        let found = serde_json::to_value(json_row(&route)).unwrap();
        assert_eq!(
            found,
            json!({"namespace": "", "kind": "", "name": "", "service": "web", "port": "80", "route": "[default]",
                "routeType": "", "successRate": 0.875, "timeoutRate": 0.25, "retryRate": 0.2, "rps": 2.0,
                "latencyMsP50": 2.0, "latencyMsP95": null, "latencyMsP99": null, "successes": 7, "failures": 1,
                "windowSeconds": 4.0, "serviceNamespace": "shop", "timeouts": 2, "retries": 2})
        );
        let backend = OutboundRow { backend: "shop/web-b:8080".to_owned(), ..route };
        let found = serde_json::to_value(json_row(&backend)).unwrap();
        assert_eq!(
            (&found["backend"], &found["backendPort"], &found["backendNamespace"], found.get("retryRate")),
            (&json!("web-b"), &json!("8080"), &json!("shop"), None)
        );
        assert_eq!(parts("example.com:443"), ("", "example.com", "443"));
        assert_eq!(parts("unknown"), ("", "unknown", ""));
    }
}
