//! Traffic by the route of a ServiceProfile.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use weft_proto::viz::{RouteRow, RoutesResponse};

use super::{Reading, Requests, is_inbound};
use crate::{
    collect::{ProxyState, View},
    family::{Family, Name, Series},
    intern::Interner,
    target::{Key, Kind, Target},
};

/// The name of requests that no route matches: Linkerd's.
const NO_ROUTE: &str = "[DEFAULT]";

/// Whose proxies counted, the Service of the profile, and the route.
type RowKey = (Key, String, String);

#[derive(Default)]
struct Row {
    effective: Requests,
    actual: Requests,
}

pub(crate) fn routes(
    view: &View,
    target: &Target,
    to: Option<&Target>,
    window: Duration,
    interner: &Mutex<Interner>,
) -> RoutesResponse {
    let mut found: BTreeMap<RowKey, Row> = BTreeMap::new();
    let mut reading = Reading::new(view, window);
    // Whose proxies count; nobody's in particular where the request is about a Service.
    let of_pod = |state: &ProxyState| match target.kind {
        Kind::Service | Kind::Authority => target.is_of(&state.pod).then_some(None),
        _ => target.row_of(&state.pod).map(Some),
    };
    reading.proxies(of_pod, |own, state, span| {
        state.history.counted(span, |series: &Arc<Series>, counted| {
            let is_actual = match series.family {
                Family::ProfileResponses | Family::ProfileLatency => false,
                Family::ActualResponses | Family::ActualLatency => true,
                _ => return,
            };
            let host = host(series.label(Name::ProfileDst));
            let is_wanted = match to {
                None => is_inbound(series) && (target.kind.has_pods() || names(target, host)),
                Some(to) => !is_inbound(series) && names(to, host),
            };
            if !is_wanted {
                return;
            }
            let route = series.label(Name::ProfileRoute);
            let route = if route.is_empty() { NO_ROUTE } else { route };
            let own = own.clone().unwrap_or_else(|| destination(host));
            let row = found.entry((own, service(host), route.to_owned())).or_default();
            let requests = if is_actual { &mut row.actual } else { &mut row.effective };
            requests.asked(span);
            match series.family {
                Family::ProfileLatency | Family::ActualLatency => requests.add_latency(series, &counted),
                _ => requests.add(series, &counted),
            }
        });
    });
    let coverage = reading.end();
    let interner = interner.lock();
    let rows = found.into_iter().filter(|(_, row)| !row.effective.is_empty() || !row.actual.is_empty());
    let rows = rows
        .map(|((key, service, route), row)| RouteRow {
            resource: Some(key.resource()),
            route,
            service,
            effective: row.effective.golden(&interner),
            actual: row.actual.golden(&interner).filter(|_| to.is_some()),
        })
        .collect();
    RoutesResponse { rows, coverage: Some(coverage) }
}

/// Without the port.
fn host(authority: &str) -> &str {
    authority.rsplit_once(':').map_or(authority, |(host, _)| host)
}

/// `web.shop` of `web.shop.svc.cluster.local`; others as they are.
fn service(host: &str) -> String {
    host.split_once(".svc.").map_or(host, |(service, _)| service).to_owned()
}

/// The Service that a profile describes, or its authority if that is not a Service's name.
fn destination(host: &str) -> Key {
    match service(host).split_once('.') {
        Some((name, namespace)) if host.contains(".svc.") => Key::new(namespace, "service", name),
        _ => Key::new("", "authority", host),
    }
}

/// Whether it is the Service, or a destination whose profile has this name.
fn names(target: &Target, host: &str) -> bool {
    if target.kind == Kind::Authority {
        return target.name.is_empty() || self::host(&target.name) == host || target.name == service(host);
    }
    let Some((name, namespace)) =
        service(host).split_once('.').map(|(name, namespace)| (name.to_owned(), namespace.to_owned()))
    else {
        return false;
    };
    (target.name.is_empty() || target.name == name) && (target.namespace.is_empty() || target.namespace == namespace)
}
