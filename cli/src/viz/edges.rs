//! `weft edges`: which workloads call which, with the identities of both.

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use weft_proto::viz::{Edge, EdgesRequest};

use super::{
    render,
    scope::{ScopeArgs, WindowArgs, resource},
    stat::{COUNTS, finish},
};
use crate::{
    kind,
    output::{self, WideFormat, or_nothing, progress},
};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft edges deploy -n shop
  weft edges po -n shop -o wide        identities, and clients without a proxy in this namespace
  weft edges deploy -n shop -t 1m      counts for longer: an edge is there while there is traffic
  weft edges deploy -n shop -o json | jq '.[] | select(.no_tls_reason != \"\")'

SECURED is a check mark for mutual TLS, else the reason why there is none.")]
pub(crate) struct EdgesArgs {
    #[arg(value_name = "RESOURCE", help = kind::help("KIND or KIND/NAME of both ends"))]
    resource: String,
    /// Output format: wide adds identities, and clients that have no row of this kind
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    window: WindowArgs,
    #[command(flatten)]
    scope: ScopeArgs,
}

/// An edge in JSON: Linkerd's fields, then ours.
#[derive(Serialize)]
struct JsonEdge<'a> {
    src: &'a str,
    src_namespace: &'a str,
    src_kind: &'a str,
    dst: &'a str,
    dst_namespace: &'a str,
    client_id: &'a str,
    server_id: &'a str,
    no_tls_reason: &'a str,
    client_identity: &'a str,
    server_identity: &'a str,
    successes: Option<u64>,
    failures: Option<u64>,
    tcp_open_connections: Option<u64>,
    denied: u64,
}

pub(super) async fn execute(args: EdgesArgs) -> Result<()> {
    let scope = args.scope.once(&args.window).await?;
    let request = EdgesRequest {
        resource: Some(resource(&args.resource, &scope.namespace)?),
        window_seconds: args.window.seconds(),
    };
    let answer = progress::during(COUNTS, scope.source.edges(request)).await?;
    // Clients that have no row of their kind are for those who ask for more.
    let kind =
        answer.edges.iter().filter_map(|edge| edge.destination.as_ref()).map(|resource| resource.kind.clone()).next();
    let is_shown = |edge: &&Edge| {
        args.output != WideFormat::Table || edge.source.as_ref().map(|source| &source.kind) == kind.as_ref()
    };
    let edges: Vec<&Edge> = answer.edges.iter().filter(is_shown).collect();
    let table = || {
        let mut columns = vec!["SRC", "DST", "SRC_NS", "DST_NS"];
        if args.output == WideFormat::Wide {
            columns.extend(["CLIENT_ID", "SERVER_ID"]);
        }
        columns.push("SECURED");
        let mut table = output::columns(&columns);
        for edge in &edges {
            let (source, destination) = (edge.source.as_ref(), edge.destination.as_ref());
            let mut cells = vec![
                render::name(source),
                render::name(destination),
                render::namespace(source),
                render::namespace(destination),
            ];
            if args.output == WideFormat::Wide {
                let identities = [&edge.client_identity, &edge.server_identity];
                cells.extend(identities.map(|identity| or_nothing(short_identity(identity))));
            }
            cells.push(if edge.no_identity_reason.is_empty() {
                "√".to_owned()
            } else {
                edge.no_identity_reason.clone()
            });
            table.add_row(cells);
        }
        output::text(&table)
    };
    let json: Vec<_> = edges.iter().map(|edge| json_edge(edge)).collect();
    finish((&scope.source, args.output), table, &json, &answer.coverage, nothing(&edges, &answer.edges))
}

/// Why a table would have no row.
fn nothing(shown: &[&Edge], seen: &[Edge]) -> Option<&'static str> {
    match (shown, seen) {
        ([_, ..], _) => None,
        ([], [_, ..]) => Some("all traffic was of clients that have no row of this kind: -o wide shows them"),
        ([], []) => Some("no traffic was seen in this time: --time-window counts for longer"),
    }
}

/// Linkerd's form: the ServiceAccount and its namespace.
fn short_identity(identity: &str) -> &str {
    identity.split_once(".serviceaccount.identity.").map_or(identity, |(account, _)| account)
}

fn json_edge(edge: &Edge) -> JsonEdge<'_> {
    let (source, destination) = (edge.source.as_ref(), edge.destination.as_ref());
    JsonEdge {
        src: source.map_or("", |resource| &resource.name),
        src_namespace: source.map_or("", |resource| &resource.namespace),
        src_kind: source.map_or("", |resource| &resource.kind),
        dst: destination.map_or("", |resource| &resource.name),
        dst_namespace: destination.map_or("", |resource| &resource.namespace),
        client_id: short_identity(&edge.client_identity),
        server_id: short_identity(&edge.server_identity),
        no_tls_reason: &edge.no_identity_reason,
        client_identity: &edge.client_identity,
        server_identity: &edge.server_identity,
        successes: edge.http.as_ref().map(|http| http.success),
        failures: edge.http.as_ref().map(|http| http.failure),
        tcp_open_connections: edge.tcp.as_ref().map(|tcp| tcp.open_connections),
        denied: edge.denied,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_that_the_table_leaves_out_are_not_denied() {
        let edge = Edge::default();
        assert_eq!(nothing(&[&edge], std::slice::from_ref(&edge)), None);
        assert!(nothing(&[], &[edge]).unwrap().contains("-o wide"));
        assert!(nothing(&[], &[]).unwrap().contains("--time-window"));
    }
}
