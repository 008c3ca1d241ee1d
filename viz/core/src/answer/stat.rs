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

impl Side<'_> {
    /// The row that a series of this proxy belongs to; `own` is the row of the proxy's pod.
    fn row_of(
        self,
        target: &Target,
        known: &Pods,
        state: &ProxyState,
        own: Option<&Key>,
        series: &Series,
    ) -> Option<Key> {
        match self {
            Self::Server if !is_inbound(series) => None,
            Self::Server if target.kind == Kind::Authority => {
                target.authority(&state.pod.namespace, series.label(Name::Authority))
            }
            Self::Server => own.cloned(),
            _ if !is_outbound(series) => None,
            Self::To(to) => to.row_of_destination(series, known).and(own.cloned()),
            Self::From(_) | Self::Clients => target.row_of_destination(series, known),
        }
    }
}

#[derive(Default)]
struct Row {
    pods: PodCounts,
    http: Requests,
    tcp: Connections,
}

impl Row {
    fn asked(&mut self, span: Span) {
        self.http.asked(span);
        self.tcp.asked(span);
    }

    /// Adds what a series of this proxy has counted.
    fn add(&mut self, state: &ProxyState, series: &Series, counted: &Counted, span: Span) {
        self.http.asked(span);
        match series.family {
            Family::Responses => self.http.add(series, counted),
            Family::Latency => self.http.add_latency(series, counted),
            _ => {
                self.tcp.asked(span);
                // A proxy that does not answer has no connections that anybody knows of.
                if series.family != Family::Open || state.error.is_none() {
                    self.tcp.add(series, counted);
                }
            }
        }
    }
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
            found.entry(key.clone()).or_default().asked(span);
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
            if let Some(key) = side.row_of(target, known, state, own.as_ref(), series) {
                found.entry(key).or_default().add(state, series, &counted, span);
            }
        });
    };
    reading.proxies(of_pod, &mut add);
    // What no client sent anything to was seen too.
    for (row, span) in found.values_mut().zip(std::iter::repeat(clients)).filter_map(|(row, span)| Some((row, span?))) {
        row.asked(span);
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
