//! Golden metrics of workloads, Services and authorities.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use weft_proto::viz::{StatResponse, StatRow};

use super::{Connections, Reading, Requests, is_inbound, is_outbound};
use crate::{
    collect::{ProxyState, View},
    family::{Family, Name, Series},
    history::{Counted, Span},
    intern::Interner,
    target::{Key, Kind, PodCounts, Pods, Target, rows},
};

/// Which proxies count, and by what their series are put into rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side<'a> {
    /// The resource's own proxies, what they accept.
    Server,
    /// The resource's own proxies, what they send to this one.
    To(&'a Target),
    /// The proxies of this one, what they send to the resource.
    From(&'a Target),
    /// All proxies, what they send to the resource.
    Clients,
}

#[derive(Default)]
struct Row {
    pods: PodCounts,
    http: Requests,
    tcp: Connections,
}

pub(crate) fn stat(
    view: &View,
    target: &Target,
    side: Side<'_>,
    known: &Pods,
    window: Duration,
    interner: &Mutex<Interner>,
) -> StatResponse {
    let mut found: BTreeMap<Key, Row> = BTreeMap::new();
    if target.kind.has_pods() {
        found.extend(rows(target, known.live()).into_iter().map(|(key, pods)| (key, Row { pods, ..Row::default() })));
    }
    let mut reading = Reading::new(view, window);
    let of_pod = |state: &ProxyState| -> Option<Option<Key>> {
        match side {
            Side::Server if target.kind == Kind::Authority => target.is_of(&state.pod).then_some(None),
            Side::Server | Side::To(_) => Some(Some(target.row_of(&state.pod)?)),
            Side::From(from) => from.row_of(&state.pod).map(|_| None),
            Side::Clients => Some(None),
        }
    };
    let mut clients: Option<Span> = None;
    let mut add = |own: Option<Key>, state: &ProxyState, span: Span| {
        if let Some(key) = &own {
            let row = found.entry(key.clone()).or_default();
            row.http.asked(span);
            row.tcp.asked(span);
        } else if clients.is_none_or(|known| known.length < span.length) {
            clients = Some(span);
        }
        state.history.counted(span, |series: &Arc<Series>, counted: Counted| {
            if !matches!(
                series.family,
                Family::Responses | Family::Latency | Family::Open | Family::Read | Family::Written
            ) {
                return;
            }
            let key = match side {
                Side::Server if !is_inbound(series) => None,
                Side::Server if target.kind == Kind::Authority => {
                    target.authority(&state.pod.namespace, series.label(Name::Authority))
                }
                Side::Server => own.clone(),
                _ if !is_outbound(series) => None,
                Side::To(to) => to.row_of_destination(series, known).and(own.clone()),
                Side::From(_) | Side::Clients => target.row_of_destination(series, known),
            };
            let Some(key) = key else { return };
            let row = found.entry(key).or_default();
            match series.family {
                Family::Responses => {
                    row.http.asked(span);
                    row.http.add(series, &counted);
                }
                Family::Latency => {
                    row.http.asked(span);
                    row.http.add_latency(series, &counted);
                }
                _ => {
                    row.http.asked(span);
                    row.tcp.asked(span);
                    // A proxy that does not answer has no connections that anybody knows of.
                    if series.family != Family::Open || state.error.is_none() {
                        row.tcp.add(series, &counted);
                    }
                }
            }
        });
    };
    reading.proxies(of_pod, &mut add);
    // What no client sent anything to was seen too.
    for (row, span) in found.values_mut().zip(std::iter::repeat(clients)).filter_map(|(row, span)| Some((row, span?))) {
        row.http.asked(span);
        row.tcp.asked(span);
    }
    let coverage = reading.end();
    let interner = interner.lock();
    let status = |key: &Key| match target.kind {
        Kind::Pod => known.get(&key.namespace, &key.name).map(|pod| pod.status.clone()).unwrap_or_default(),
        _ => String::new(),
    };
    let rows = found
        .into_iter()
        .filter(|(_, row)| row.pods != PodCounts::default() || !row.http.is_empty() || !row.tcp.is_empty());
    let rows = rows
        .map(|(key, row)| StatRow {
            status: status(&key),
            resource: Some(key.resource()),
            meshed_pods: row.pods.meshed,
            running_pods: row.pods.running,
            failed_pods: row.pods.failed,
            http: row.http.golden(&interner),
            tcp: row.tcp.tcp(),
        })
        .collect();
    StatResponse { rows, coverage: Some(coverage) }
}
