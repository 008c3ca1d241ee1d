//! Outbound traffic by Service, route and backend.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use weft_proto::viz::{OutboundRow, StatOutboundResponse};

use super::{Reading, Requests, route};
use crate::{
    collect::View,
    family::{Family, Name, Series},
    intern::Interner,
    target::{Key, Kind, Target},
};

#[derive(Default)]
struct Row {
    http: Requests,
    retries: u64,
}

/// Resource, service, route, its kind, and the backend.
type RowKey = (Key, String, String, String, String);

pub(crate) fn outbound(
    view: &View,
    target: &Target,
    to: Option<&Target>,
    window: Duration,
    interner: &Mutex<Interner>,
) -> StatOutboundResponse {
    let mut found: BTreeMap<RowKey, Row> = BTreeMap::new();
    let mut reading = Reading::new(view, window);
    reading.proxies(
        |state| target.row_of(&state.pod),
        |own, state, span| {
            state.history.counted(span, |series: &Arc<Series>, counted| {
                let backend = match series.family {
                    Family::RouteStatuses | Family::RouteDuration | Family::RouteRetries => String::new(),
                    Family::BackendStatuses | Family::BackendDuration => backend(series),
                    _ => return,
                };
                if to.is_some_and(|to| !is_to(series, to)) {
                    return;
                }
                let (route, kind) = route(series);
                let row = found.entry((own.clone(), service(series), route, kind, backend)).or_default();
                row.http.asked(span);
                match series.family {
                    Family::RouteStatuses | Family::BackendStatuses => row.http.add(series, &counted),
                    Family::RouteRetries => row.retries += counted.total,
                    _ => row.http.add_latency(series, &counted),
                }
            });
        },
    );
    let coverage = reading.end();
    let interner = interner.lock();
    let rows = found.into_iter().filter(|(_, row)| !row.http.is_empty() || row.retries > 0);
    let rows = rows
        .map(|((key, service, route, route_kind, backend), row)| OutboundRow {
            resource: Some(key.resource()),
            service,
            route,
            route_kind,
            backend,
            http: row.http.golden(&interner),
            timeouts: row.http.timeouts,
            retries: row.retries,
        })
        .collect();
    StatOutboundResponse { rows, coverage: Some(coverage) }
}

/// `shop/web:80` of a Service, or the host name or name of another kind of parent.
fn service(series: &Series) -> String {
    let (namespace, name, port) =
        (series.label(Name::ParentNamespace), series.label(Name::ParentName), series.label(Name::ParentPort));
    named(namespace, if name.is_empty() { series.label(Name::Hostname) } else { name }, port)
}

fn backend(series: &Series) -> String {
    let name = series.label(Name::BackendName);
    // Linkerd has no name for a backend that is an address.
    let name = if name.is_empty() { series.label(Name::BackendKind) } else { name };
    let backend = named(series.label(Name::BackendNamespace), name, series.label(Name::BackendPort));
    if backend.is_empty() { "unknown".to_owned() } else { backend }
}

fn named(namespace: &str, name: &str, port: &str) -> String {
    let mut text = String::new();
    if !namespace.is_empty() {
        text = format!("{namespace}/");
    }
    text.push_str(name);
    if !port.is_empty() {
        text = format!("{text}:{port}");
    }
    text
}

fn is_to(series: &Series, to: &Target) -> bool {
    let is = |name: Name, wanted: &str| wanted.is_empty() || series.is(name, wanted);
    match to.kind {
        Kind::Authority => to.name.is_empty() || service(series) == to.name || series.is(Name::Hostname, &to.name),
        _ => {
            series.is(Name::ParentKind, "Service")
                && is(Name::ParentNamespace, &to.namespace)
                && is(Name::ParentName, &to.name)
        }
    }
}
