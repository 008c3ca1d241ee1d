//! `weft routes`: traffic by the routes of ServiceProfiles.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use weft_proto::viz::{Golden, Resource, RouteRow, RoutesRequest};

use super::{
    render::{JsonCounts, golden, per_second, percent, rps, success_rate},
    scope::{ScopeArgs, ToArgs, WindowArgs, resource},
    stat::{COUNTS, finish},
};
use crate::{
    kind,
    output::{self, NOTHING, WideFormat, progress},
};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft routes svc/web -n shop                               the routes of a Service, as its pods see them
  weft routes deploy/web -n shop
  weft routes deploy/client -n shop --to svc/web -o wide    as a client sees them, with retries apart

Where several resources are asked about, each has a table of its own. [DEFAULT] is what no route of the ServiceProfile matches. Routes of Gateway API: weft stat-outbound, weft stat-inbound.")]
pub(crate) struct RoutesArgs {
    #[arg(value_name = "RESOURCE", help = kind::help("KIND or KIND/NAME") + ", svc")]
    resource: String,
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    #[command(flatten)]
    to: ToArgs,
    /// Output format: wide shows what was sent, retries included, beside what clients saw
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
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
    #[serde(flatten)]
    rates: JsonRates,
    #[serde(flatten)]
    counts: JsonCounts,
}

#[derive(Serialize)]
#[serde(untagged)]
enum JsonRates {
    AtServer {
        success: Option<f64>,
        rps: Option<f64>,
    },
    AtClient {
        effective_success: Option<f64>,
        effective_rps: Option<f64>,
        actual_success: Option<f64>,
        actual_rps: Option<f64>,
    },
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
    let answer = progress::during(COUNTS, scope.source.routes(request)).await?;
    let at_client = args.to.to.is_some();
    let mut tables: BTreeMap<String, Vec<&RouteRow>> = BTreeMap::new();
    for row in &answer.rows {
        tables.entry(owner(row.resource.as_ref(), args.scope.all_namespaces)).or_default().push(row);
    }
    let with_actual = at_client && args.output == WideFormat::Wide;
    let table = || {
        let one = |(owner, rows): (&String, &Vec<&RouteRow>)| {
            let title = if tables.len() > 1 { format!("==> {owner} <==\n") } else { String::new() };
            title + &table(rows, with_actual)
        };
        tables.iter().map(one).collect::<Vec<_>>().join("\n")
    };
    let json: BTreeMap<&String, Vec<JsonRow<'_>>> =
        tables.iter().map(|(owner, rows)| (owner, rows.iter().map(|row| json_row(row, at_client)).collect())).collect();
    let nothing = "no request was seen on a route of a ServiceProfile in this time: --time-window counts for longer";
    let nothing = json.is_empty().then_some(nothing);
    finish((&scope.source, args.output), table, &json, &answer.coverage, nothing)
}

/// Whose routes they are, as Linkerd writes it: `deployment/web`.
fn owner(resource: Option<&Resource>, with_namespace: bool) -> String {
    let Some(Resource { namespace, kind, name }) = resource else { return String::new() };
    let namespace = if with_namespace && !namespace.is_empty() { format!("{namespace}/") } else { String::new() };
    format!("{namespace}{kind}/{name}")
}

fn table(rows: &[&RouteRow], with_actual: bool) -> String {
    let mut columns = vec!["ROUTE", "SERVICE"];
    match with_actual {
        true => columns.extend(["EFFECTIVE_SUCCESS", "EFFECTIVE_RPS", "ACTUAL_SUCCESS", "ACTUAL_RPS"]),
        false => columns.extend(["SUCCESS", "RPS"]),
    }
    columns.extend(["LATENCY_P50", "LATENCY_P95", "LATENCY_P99"]);
    let mut table = output::columns(&columns);
    for row in rows {
        let [success, rps, p50, p95, p99] = golden(row.effective.as_ref());
        let mut cells = vec![row.route.clone(), row.service.clone(), success, rps];
        if with_actual {
            cells.extend(sent(row.actual.as_ref()));
        }
        cells.extend([p50, p95, p99]);
        table.add_row(cells);
    }
    output::text(&table)
}

fn sent(actual: Option<&Golden>) -> [String; 2] {
    match actual {
        Some(actual) => [percent(success_rate(actual)), per_second(rps(actual))],
        None => [NOTHING.to_owned(), NOTHING.to_owned()],
    }
}

fn json_row(row: &RouteRow, at_client: bool) -> JsonRow<'_> {
    let (effective, actual) = (row.effective.as_ref(), row.actual.as_ref());
    let rates = |golden: Option<&Golden>| (golden.and_then(success_rate), golden.map(rps));
    let (success, rps) = rates(effective);
    let (actual_success, actual_rps) = rates(actual);
    let rates = match at_client {
        false => JsonRates::AtServer { success, rps },
        true => JsonRates::AtClient { effective_success: success, effective_rps: rps, actual_success, actual_rps },
    };
    JsonRow { route: &row.route, authority: &row.service, rates, counts: effective.into() }
}
