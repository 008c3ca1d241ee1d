//! Golden metrics of one resource over time.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use weft_proto::viz::{Point, SeriesResponse};

use super::{Connections, Reading, Requests, is_inbound, is_outbound};
use crate::{
    collect::View,
    family::{Family, Series},
    intern::Interner,
    target::{Pods, Target},
};

/// The most points.
pub(crate) const MOST_POINTS: u32 = 900;

pub(crate) fn series(
    view: &View,
    target: &Target,
    known: &Pods,
    (window, step): (Duration, Duration),
    interner: &Mutex<Interner>,
) -> SeriesResponse {
    let points = (window.as_secs_f64() / step.as_secs_f64()).ceil().min(f64::from(MOST_POINTS)) as u32;
    // Scrapes are some time before now: the newest point ends with the newest of them.
    let last = |proxy: &Arc<crate::collect::Proxy>| proxy.state().history.last();
    let newest = view.proxies.iter().filter_map(last).max().unwrap_or(view.now);
    let ends: Vec<(f64, Instant)> = (0..points)
        .rev()
        .filter_map(|index| {
            let age = step * index;
            Some((age.as_secs_f64(), newest.checked_sub(age)?))
        })
        .collect();
    let mut found: Vec<(Requests, Connections)> = vec![Default::default(); ends.len()];
    let mut reading = Reading::new(view, window);
    reading.proxies(
        |state| (!target.kind.has_pods() || target.row_of(&state.pod).is_some()).then_some(()),
        |(), state, _| {
            for ((_, end), (http, tcp)) in ends.iter().zip(&mut found) {
                let Some(span) = state.history.interval(*end, step) else { continue };
                http.asked(span);
                tcp.asked(span);
                state.history.counted(span, |series: &Arc<Series>, counted| {
                    let is_ours = match target.kind.has_pods() {
                        true => is_inbound(series),
                        false => is_outbound(series) && target.row_of_destination(series, known).is_some(),
                    };
                    match series.family {
                        _ if !is_ours => {}
                        Family::Responses => http.add(series, &counted),
                        Family::Latency => http.add_latency(series, &counted),
                        Family::Open | Family::Read | Family::Written => tcp.add(series, &counted),
                        _ => {}
                    }
                });
            }
        },
    );
    let coverage = reading.end();
    let interner = interner.lock();
    let points = ends.iter().zip(&found).map(|((age, _), (http, tcp))| Point {
        age_seconds: *age,
        http: http.golden(&interner),
        tcp: tcp.tcp(),
    });
    // Before the first scrape there is nothing, not even a gap.
    let points = points.skip_while(|point| point.http.is_none()).collect();
    SeriesResponse { points, coverage: Some(coverage) }
}
