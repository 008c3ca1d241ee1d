//! Inbound traffic by Server and route, with what policy refused.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use weft_proto::viz::{InboundRow, StatInboundResponse};

use super::{Reading, Requests, is_inbound, route};
use crate::{
    collect::View,
    family::{Family, Name, Series},
    intern::Interner,
    target::{Key, Target},
};

#[derive(Default)]
struct Row {
    http: Requests,
    denied: u64,
    limited: u64,
}

/// Resource, server, route and its kind.
type RowKey = (Key, String, String, String);

pub(crate) fn inbound(
    view: &View,
    target: &Target,
    window: Duration,
    interner: &Mutex<Interner>,
) -> StatInboundResponse {
    let mut found: BTreeMap<RowKey, Row> = BTreeMap::new();
    let mut reading = Reading::new(view, window);
    reading.proxies(
        |state| target.row_of(&state.pod),
        |own, state, span| {
            state.history.counted(span, |series: &Arc<Series>, counted| {
                let is_ours = match series.family {
                    Family::Responses | Family::Latency => is_inbound(series),
                    Family::DeniedRequests | Family::DeniedConnections | Family::RateLimited => true,
                    _ => false,
                };
                if !is_ours {
                    return;
                }
                let (route, kind) = route(series);
                let row = found.entry((own.clone(), server(series), route, kind)).or_default();
                row.http.asked(span);
                match series.family {
                    Family::Responses => row.http.add(series, &counted),
                    Family::Latency => row.http.add_latency(series, &counted),
                    Family::RateLimited => row.limited += counted.total,
                    _ => row.denied += counted.total,
                }
            });
        },
    );
    let coverage = reading.end();
    let interner = interner.lock();
    let rows = found.into_iter().filter(|(_, row)| !row.http.is_empty() || row.denied + row.limited > 0);
    let rows = rows
        .map(|((key, server, route, route_kind), row)| InboundRow {
            resource: Some(key.resource()),
            server,
            route,
            route_kind,
            http: row.http.golden(&interner),
            denied: row.denied,
            rate_limited: row.limited,
        })
        .collect();
    StatInboundResponse { rows, coverage: Some(coverage) }
}

/// `8080:web-http`, or `8080:default:all-unauthenticated`.
fn server(series: &Series) -> String {
    let default = if series.is(Name::SrvKind, "default") { "default:" } else { "" };
    format!("{}:{default}{}", series.label(Name::SrvPort), series.label(Name::SrvName))
}
