//! Answers, from a view to a message, without I/O.

mod edges;
mod outbound;
mod profile;
mod series;
mod server;
mod stat;

use std::{collections::BTreeMap, time::Duration};

use weft_proto::viz::{Coverage, Golden, PodProblem, Tcp};

use crate::{
    collect::{ProxyState, View},
    error::RequestError,
    family::{FAILURE, Family, Name, SUCCESS, Series, TIMEOUT},
    history::{Counted, Span, WINDOW},
    intern::Interner,
    quantile::Histogram,
};
pub(crate) use edges::edges;
pub(crate) use outbound::outbound;
pub(crate) use profile::routes;
pub(crate) use series::{MOST_POINTS, series};
pub(crate) use server::inbound;
pub(crate) use stat::{Side, stat};

/// How far back an answer looks if the request does not say, in seconds: Linkerd's.
const USUAL: u32 = 60;
/// The most proxies that an answer names.
const PROBLEMS: usize = 20;

/// The window of a request.
pub(crate) fn window(seconds: u32) -> Result<Duration, RequestError> {
    let most = WINDOW.as_secs();
    match seconds {
        0 => Ok(Duration::from_secs(USUAL.into())),
        seconds if u64::from(seconds) <= most => Ok(Duration::from_secs(seconds.into())),
        seconds => Err(RequestError::Invalid {
            field: "window_seconds",
            message: format!("{seconds} is more than is kept: {most}"),
        }),
    }
}

/// Adds the series of the proxies that an answer is about, and says what it rests on.
struct Reading<'a> {
    view: &'a View,
    window: Duration,
    coverage: Coverage,
    longest: Duration,
}

impl<'a> Reading<'a> {
    fn new(view: &'a View, window: Duration) -> Self {
        let mut coverage = Coverage::default();
        coverage
            .problems
            .extend(view.remark.iter().map(|remark| PodProblem { message: remark.clone(), ..PodProblem::default() }));
        Self { view, window, coverage, longest: Duration::ZERO }
    }

    /// Calls `each` for every proxy that `is_about` selects and that was asked at both ends of the window.
    fn proxies<T>(&mut self, is_about: impl Fn(&ProxyState) -> Option<T>, mut each: impl FnMut(T, &ProxyState, Span)) {
        for proxy in &self.view.proxies {
            let state = proxy.state();
            let Some(about) = is_about(&state) else { continue };
            self.coverage.proxies += u32::from(state.is_there());
            let span = state.history.span(self.view.now, self.window);
            if state.is_there() {
                self.cover(&state, span);
            }
            if let Some(span) = span {
                self.longest = self.longest.max(span.length);
                each(about, &state, span);
            }
        }
    }

    fn cover(&mut self, state: &ProxyState, span: Option<Span>) {
        let message = match (&state.error, span, state.history.excess()) {
            (Some(error), ..) => error.clone(),
            (None, None, _) => "was asked once so far".to_owned(),
            (None, Some(_), excess) => {
                self.coverage.answered += 1;
                if excess == 0 {
                    return;
                }
                format!("{excess} of its series are not counted: they are too many")
            }
        };
        if self.coverage.problems.len() < PROBLEMS {
            let (namespace, pod) = (state.pod.namespace.clone(), state.pod.name.clone());
            self.coverage.problems.push(PodProblem { namespace, pod, message });
        }
    }

    fn end(mut self) -> Coverage {
        self.coverage.seconds = self.longest.as_secs_f64();
        self.coverage.problems.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
        self.coverage
    }
}

/// Requests of a row.
#[derive(Clone, Debug, Default)]
struct Requests {
    success: u64,
    failure: u64,
    timeouts: u64,
    buckets: BTreeMap<u8, u64>,
    latency: Option<Family>,
    /// The longest time between two scrapes of a proxy; `None` if none was asked at both ends.
    length: Option<Duration>,
}

/// Connections of a row.
#[derive(Clone, Debug, Default)]
struct Connections {
    open: u64,
    read: u64,
    written: u64,
    /// As of [`Requests`].
    length: Option<Duration>,
}

impl Requests {
    /// A proxy was asked, whether or not it counted.
    fn asked(&mut self, span: Span) {
        self.length = self.length.max(Some(span.length));
    }

    /// Adds a series of responses.
    fn add(&mut self, series: &Series, counted: &Counted) {
        match series.label(Name::Outcome) {
            SUCCESS => self.success += counted.total,
            FAILURE => self.failure += counted.total,
            TIMEOUT => {
                self.failure += counted.total;
                self.timeouts += counted.total;
            }
            _ => {}
        }
    }

    /// Adds a series of latencies.
    fn add_latency(&mut self, series: &Series, counted: &Counted) {
        self.latency = Some(series.family);
        for (bound, count) in &counted.buckets {
            *self.buckets.entry(*bound).or_default() += count;
        }
    }

    fn is_empty(&self) -> bool {
        self.success + self.failure == 0
    }

    fn golden(&self, interner: &Interner) -> Option<Golden> {
        let length = self.length?;
        let mut histogram = Histogram::default();
        for (bound, count) in &self.buckets {
            histogram.add(interner.bounds()[usize::from(*bound)], *count);
        }
        let quantile = |quantile| {
            let family = self.latency?;
            Some(histogram.quantile(quantile, interner.bounds_of(family))? * family.to_ms())
        };
        Some(Golden {
            success: self.success,
            failure: self.failure,
            p50_ms: quantile(0.5),
            p95_ms: quantile(0.95),
            p99_ms: quantile(0.99),
            seconds: length.as_secs_f64(),
        })
    }
}

impl Connections {
    fn asked(&mut self, span: Span) {
        self.length = self.length.max(Some(span.length));
    }

    fn add(&mut self, series: &Series, counted: &Counted) {
        match series.family {
            Family::Open => self.open += counted.total,
            Family::Read => self.read += counted.total,
            Family::Written => self.written += counted.total,
            _ => {}
        }
    }

    fn is_empty(&self) -> bool {
        self.open + self.read + self.written == 0
    }

    fn tcp(&self) -> Option<Tcp> {
        self.length.map(|length| Tcp {
            open_connections: self.open,
            read_bytes: self.read,
            write_bytes: self.written,
            seconds: length.as_secs_f64(),
        })
    }
}

/// Whether a series is of requests or connections that a pod's application accepts, at the client's side of its proxy.
fn is_inbound(series: &Series) -> bool {
    match series.family {
        Family::Open | Family::Read | Family::Written => {
            series.is(Name::Direction, "inbound") && series.is(Name::Peer, "src")
        }
        _ => series.is(Name::Direction, "inbound"),
    }
}

/// A route's name and kind. The kind is empty for a route that no resource made: `default`, `probe`.
fn route(series: &Series) -> (String, String) {
    let kind = series.label(Name::RouteKind);
    let kind = if kind == "default" { "" } else { kind };
    (series.label(Name::RouteName).to_owned(), kind.to_owned())
}

/// Whether a series is of requests or connections that a pod's application makes, at the server's side of its proxy.
fn is_outbound(series: &Series) -> bool {
    match series.family {
        Family::Open | Family::Read | Family::Written => {
            series.is(Name::Direction, "outbound") && series.is(Name::Peer, "dst")
        }
        _ => series.is(Name::Direction, "outbound"),
    }
}

#[cfg(test)]
mod tests;
