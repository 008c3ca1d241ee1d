//! `weft stat`: golden metrics of workloads, Services and authorities.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use weft_proto::viz::{Coverage, Resource, StatRequest, StatResponse, StatRow};

use super::{
    render::{self, JsonGolden, JsonResource, bytes_per_second, golden, rate},
    scope::{Scope, ScopeArgs, WindowArgs, other, resources},
    screen,
    source::Source,
};
use crate::{
    kind::{Kind, names},
    output::{self, NOTHING, WideFormat, note, or_nothing, progress},
};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft stat deploy -n shop                            every Deployment of a namespace
  weft stat deploy/web po/web-0 -n shop               these
  weft stat ns                                        every namespace
  weft stat svc/web -n shop                           a Service, as its clients see it
  weft stat deploy/web -n shop --to svc/payments      what web sends to payments
  weft stat deploy -n shop --from deploy/client       what client sends to each
  weft stat deploy/web -n shop -t 1m -o json | jq '.[0].success'
  weft stat deploy -n shop --watch                    drawn again every two seconds; q ends

Without the component weft-viz the proxies are asked directly, twice, a second or --time-window apart. A proxy that does not
answer is named on standard error; the numbers are those of the others. TCP_CONN is the number of open connections.
JSON has the counts (successes, failures) and the seconds that they lie between, beside Linkerd's fields.")]
pub(crate) struct StatArgs {
    #[arg(
        required = true,
        value_name = "RESOURCE",
        help = format!("KIND, KIND NAME... or KIND/NAME...: {}, or all", names(Kind::all()))
    )]
    resource: Vec<String>,
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    /// Only traffic to this resource, KIND or KIND/NAME
    #[arg(long, value_name = "RESOURCE", conflicts_with = "from")]
    to: Option<String>,
    /// Namespace of --to [default: that of the resource]
    #[arg(long, value_name = "NAMESPACE", conflicts_with = "from")]
    to_namespace: Option<String>,
    /// Only traffic from this resource, KIND or KIND/NAME
    #[arg(long, value_name = "RESOURCE")]
    from: Option<String>,
    /// Namespace of --from [default: that of the resource]
    #[arg(long, value_name = "NAMESPACE")]
    from_namespace: Option<String>,
    /// Also resources without a proxy
    #[arg(long)]
    unmeshed: bool,
    /// Refresh every two seconds; q quits
    #[arg(short, long)]
    watch: bool,
    /// Output format: wide adds bytes per second
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    window: WindowArgs,
    #[command(flatten)]
    scope: ScopeArgs,
}

/// A row in JSON: Linkerd's fields, then ours.
#[derive(Serialize)]
struct JsonRow<'a> {
    #[serde(flatten)]
    resource: JsonResource<'a>,
    #[serde(skip_serializing_if = "str::is_empty")]
    status: &'a str,
    meshed: String,
    #[serde(flatten)]
    http: JsonGolden,
    tcp_open_connections: Option<u64>,
    tcp_read_bytes_rate: Option<f64>,
    tcp_write_bytes_rate: Option<f64>,
}

/// What these verbs wait for.
pub(super) const COUNTS: &str = "two scrapes of the proxies' metrics";

pub(super) async fn execute(args: StatArgs) -> Result<()> {
    let scope = if args.watch { args.scope.repeated().await? } else { args.scope.once(&args.window).await? };
    let requests = requests(&args, &scope)?;
    let namespaced = args.scope.all_namespaces;
    if args.watch {
        return screen::repeat(async |said| {
            let answers = ask(&scope, &requests).await?;
            said.problems(answers.iter().filter_map(|answer| answer.coverage.as_ref()));
            text(&args, namespaced, &answers)
        })
        .await;
    }
    let answers = progress::during(COUNTS, ask(&scope, &requests)).await?;
    let text = text(&args, namespaced, &answers)?;
    if args.output.data().is_none() && !answers.iter().any(|answer| shown(&args, answer).next().is_some()) {
        note(nothing(&answers));
    } else {
        output::styled(&text)?;
    }
    render::problems(answers.iter().filter_map(|answer| answer.coverage.as_ref()));
    if args.output == WideFormat::Wide {
        note(scope.source.name());
    }
    Ok(())
}

fn nothing(answers: &[StatResponse]) -> &'static str {
    if answers.iter().all(|answer| answer.rows.is_empty()) {
        "no resource was found: see --namespace and --all-namespaces"
    } else {
        "no resource of these has a proxy: --unmeshed shows them"
    }
}

async fn ask(scope: &Scope, requests: &[StatRequest]) -> Result<Vec<StatResponse>> {
    // Together, so that they share the scrapes.
    futures::future::try_join_all(requests.iter().map(|request| scope.source.stat(request.clone()))).await
}

fn requests(args: &StatArgs, scope: &Scope) -> Result<Vec<StatRequest>> {
    if args.to.is_none() && args.to_namespace.is_some() || args.from.is_none() && args.from_namespace.is_some() {
        bail!(
            "--to-namespace and --from-namespace are the namespaces of --to and --from: name those too, such as --to svc"
        );
    }
    let to = other(args.to.as_deref(), args.to_namespace.as_deref(), &scope.namespace)?;
    let from = other(args.from.as_deref(), args.from_namespace.as_deref(), &scope.namespace)?;
    let request = |resource: Resource| StatRequest {
        resource: Some(resource),
        selector: args.selector.clone(),
        window_seconds: args.window.seconds(),
        to: to.clone(),
        from: from.clone(),
    };
    Ok(resources(&args.resource, &scope.namespace)?.into_iter().map(request).collect())
}

/// The rows to show.
fn shown<'a>(args: &StatArgs, answer: &'a StatResponse) -> impl Iterator<Item = &'a StatRow> {
    let unmeshed = args.unmeshed;
    answer.rows.iter().filter(move |row| unmeshed || row.meshed_pods > 0 || is_of_clients(row))
}

fn is_of_clients(row: &StatRow) -> bool {
    row.resource.as_ref().is_some_and(|resource| matches!(resource.kind.as_str(), "service" | "authority"))
}

fn text(args: &StatArgs, namespaced: bool, answers: &[StatResponse]) -> Result<String> {
    if let Some(data) = args.output.data() {
        let rows: Vec<_> = answers.iter().flat_map(|answer| shown(args, answer)).map(json_row).collect();
        return data.text(&rows);
    }
    let kinds: BTreeSet<&str> = answers
        .iter()
        .flat_map(|answer| shown(args, answer))
        .filter_map(|row| Some(row.resource.as_ref()?.kind.as_str()))
        .collect();
    let mut columns = vec!["NAME", "MESHED", "SUCCESS", "RPS", "LATENCY_P50", "LATENCY_P95", "LATENCY_P99", "TCP_CONN"];
    if args.output == WideFormat::Wide {
        columns.extend(["READ_BYTES/SEC", "WRITE_BYTES/SEC"]);
    }
    let with_status = kinds.contains("pod");
    if with_status {
        columns.insert(1, "STATUS");
    }
    if namespaced {
        columns.insert(0, "NAMESPACE");
    }
    let mut table = output::columns(&columns);
    for row in answers.iter().flat_map(|answer| shown(args, answer)) {
        let mut name = render::name(row.resource.as_ref());
        if kinds.len() > 1 {
            let kind = row.resource.as_ref().map_or("", |resource| resource.kind.as_str());
            name = format!("{}/{name}", Kind::parse(kind).map_or(kind, |known| known.short()));
        }
        let mut cells = vec![name];
        if with_status {
            cells.push(or_nothing(&row.status));
        }
        cells.push(meshed(row));
        cells.extend(golden(row.http.as_ref()));
        let tcp = row.tcp.as_ref();
        cells.push(tcp.map_or_else(|| NOTHING.to_owned(), |tcp| tcp.open_connections.to_string()));
        if args.output == WideFormat::Wide {
            let cell = |bytes: fn(&weft_proto::viz::Tcp) -> u64| {
                tcp.map_or_else(|| NOTHING.to_owned(), |tcp| bytes_per_second(rate(bytes(tcp), tcp.seconds)))
            };
            cells.extend([cell(|tcp| tcp.read_bytes), cell(|tcp| tcp.write_bytes)]);
        }
        if namespaced {
            cells.insert(0, render::namespace(row.resource.as_ref()));
        }
        table.add_row(cells);
    }
    // A screen has no colours: it cuts lines.
    Ok(if args.watch { output::plain(&table) } else { output::text(&table) })
}

fn meshed(row: &StatRow) -> String {
    if is_of_clients(row) { NOTHING.to_owned() } else { format!("{}/{}", row.meshed_pods, row.running_pods) }
}

fn json_row(row: &StatRow) -> JsonRow<'_> {
    let tcp = row.tcp.as_ref();
    JsonRow {
        resource: row.resource.as_ref().into(),
        status: &row.status,
        meshed: meshed(row),
        http: row.http.as_ref().into(),
        tcp_open_connections: tcp.map(|tcp| tcp.open_connections),
        tcp_read_bytes_rate: tcp.map(|tcp| rate(tcp.read_bytes, tcp.seconds)),
        tcp_write_bytes_rate: tcp.map(|tcp| rate(tcp.write_bytes, tcp.seconds)),
    }
}

/// Prints a table, JSON or YAML, and says what is missing and, to who asks for more, who answered: the end of the verbs
/// with one answer. Where it has no row, `nothing` says so instead of a table.
pub(super) fn finish<'a>(
    (source, output): (&Source, WideFormat),
    table: impl FnOnce() -> String,
    rows: &impl Serialize,
    coverages: impl IntoIterator<Item = &'a Coverage>,
    nothing: Option<&str>,
) -> Result<()> {
    match (output.data(), nothing) {
        (Some(data), _) => data.print(rows)?,
        (_, Some(nothing)) => note(nothing),
        (_, None) => output::styled(&table())?,
    }
    render::problems(coverages);
    if output == WideFormat::Wide {
        note(source.name());
    }
    Ok(())
}
