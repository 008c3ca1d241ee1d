//! Numbers as Linkerd prints them, in tables and in JSON, and what an answer rests on.

use std::{collections::BTreeSet, time::Duration};

use serde::Serialize;
use weft_proto::viz::{Coverage, Golden, Resource};

use crate::output::{NOTHING, note, or_nothing};

/// A resource in JSON, as fields of a row.
#[derive(Serialize)]
pub(super) struct JsonResource<'a> {
    namespace: &'a str,
    kind: &'a str,
    name: &'a str,
}

impl<'a> From<Option<&'a Resource>> for JsonResource<'a> {
    fn from(resource: Option<&'a Resource>) -> Self {
        let text = |field: fn(&Resource) -> &String| resource.map_or("", |resource| field(resource));
        Self {
            namespace: text(|resource| &resource.namespace),
            kind: text(|resource| &resource.kind),
            name: text(|resource| &resource.name),
        }
    }
}

/// Golden metrics in JSON, as fields of a row: Linkerd's, then the counts.
#[derive(Serialize)]
pub(super) struct JsonGolden {
    success: Option<f64>,
    rps: Option<f64>,
    #[serde(flatten)]
    counts: JsonCounts,
}

/// Latencies and counts of golden metrics in JSON, as fields of a row.
#[derive(Serialize)]
pub(super) struct JsonCounts {
    latency_ms_p50: Option<f64>,
    latency_ms_p95: Option<f64>,
    latency_ms_p99: Option<f64>,
    successes: Option<u64>,
    failures: Option<u64>,
    window_seconds: Option<f64>,
}

impl From<Option<&Golden>> for JsonGolden {
    fn from(http: Option<&Golden>) -> Self {
        Self { success: http.and_then(success_rate), rps: http.map(rps), counts: http.into() }
    }
}

impl From<Option<&Golden>> for JsonCounts {
    fn from(http: Option<&Golden>) -> Self {
        Self {
            latency_ms_p50: http.and_then(|http| http.p50_ms),
            latency_ms_p95: http.and_then(|http| http.p95_ms),
            latency_ms_p99: http.and_then(|http| http.p99_ms),
            successes: http.map(|http| http.success),
            failures: http.map(|http| http.failure),
            window_seconds: http.map(|http| http.seconds),
        }
    }
}

/// As [`JsonCounts`], in the form that `stat-inbound` and `stat-outbound` have with Linkerd.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct JsonRouteCounts {
    rps: Option<f64>,
    latency_ms_p50: Option<f64>,
    latency_ms_p95: Option<f64>,
    latency_ms_p99: Option<f64>,
    successes: Option<u64>,
    failures: Option<u64>,
    window_seconds: Option<f64>,
}

impl From<Option<&Golden>> for JsonRouteCounts {
    fn from(http: Option<&Golden>) -> Self {
        let JsonCounts { latency_ms_p50, latency_ms_p95, latency_ms_p99, successes, failures, window_seconds } =
            http.into();
        let rps = http.map(rps);
        Self { rps, latency_ms_p50, latency_ms_p95, latency_ms_p99, successes, failures, window_seconds }
    }
}

/// Successes of all responses, between 0 and 1.
pub(super) fn success_rate(http: &Golden) -> Option<f64> {
    let all = http.success + http.failure;
    (all > 0).then(|| http.success as f64 / all as f64)
}

/// Responses a second.
pub(super) fn rps(http: &Golden) -> f64 {
    rate(http.success + http.failure, http.seconds)
}

pub(super) fn rate(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

pub(super) fn percent(rate: Option<f64>) -> String {
    rate.map_or_else(|| NOTHING.to_owned(), |rate| format!("{:.2}%", rate * 100.0))
}

pub(super) fn per_second(rate: f64) -> String {
    format!("{rate:.1}rps")
}

pub(super) fn milliseconds(ms: Option<f64>) -> String {
    ms.map_or_else(|| NOTHING.to_owned(), |ms| format!("{ms:.0}ms"))
}

pub(super) fn bytes_per_second(rate: f64) -> String {
    format!("{rate:.1}B/s")
}

/// SUCCESS, RPS and the latencies; nothing but blanks without a request.
pub(super) fn golden(http: Option<&Golden>) -> [String; 5] {
    match http {
        Some(http) if http.success + http.failure > 0 => [
            percent(success_rate(http)),
            per_second(rps(http)),
            milliseconds(http.p50_ms),
            milliseconds(http.p95_ms),
            milliseconds(http.p99_ms),
        ],
        _ => std::array::from_fn(|_| NOTHING.to_owned()),
    }
}

pub(super) fn name(resource: Option<&Resource>) -> String {
    resource.map_or_else(|| NOTHING.to_owned(), |resource| resource.name.clone())
}

pub(super) fn namespace(resource: Option<&Resource>) -> String {
    let namespace = resource.map(|resource| resource.namespace.as_str()).filter(|namespace| !namespace.is_empty());
    namespace.unwrap_or(NOTHING).to_owned()
}

/// A route's name, as Linkerd writes the one that no resource made.
pub(super) fn route(name: &str) -> String {
    if name == "default" { "[default]".to_owned() } else { or_nothing(name) }
}

/// `web-http:8080`; only the name where there is no port.
pub(super) fn named_port((name, port): (&str, &str)) -> String {
    if port.is_empty() { name.to_owned() } else { format!("{name}:{port}") }
}

/// A route's kind, which Linkerd leaves empty for the one that no resource made.
pub(super) fn route_kind(kind: &str) -> &str {
    if kind == "default" { "" } else { kind }
}

/// Which proxy did not answer, and why; or what an answer leaves out.
pub(super) fn problem(namespace: &str, pod: &str, message: &str) -> String {
    if pod.is_empty() { message.to_owned() } else { format!("{namespace}/{pod}: {message}") }
}

/// Says which proxies did not answer. One may be in several answers.
pub(super) fn problems<'a>(coverages: impl IntoIterator<Item = &'a Coverage>) {
    let mut known = BTreeSet::new();
    for coverage in coverages {
        if known.insert(format!("{:?}", coverage.problems)) {
            problems_of(coverage);
        }
    }
}

fn problems_of(coverage: &Coverage) {
    for one in &coverage.problems {
        note(&problem(&one.namespace, &one.pod, &one.message));
    }
    let silent = coverage.proxies.saturating_sub(coverage.answered);
    let named = u32::try_from(coverage.problems.len()).unwrap_or(u32::MAX);
    if silent > named {
        note(&format!("{} more proxies did not answer", silent - named));
    }
    if silent > 0 {
        note(&format!("counted: {} of {} proxies", coverage.answered, coverage.proxies));
    }
}

/// A duration in whole microseconds, as Linkerd prints it.
pub(super) fn micros(us: u64) -> String {
    format!("{us}µs")
}

/// A duration in the largest unit that leaves it whole or with one digit.
pub(super) fn short_duration(duration: Duration) -> String {
    let us = duration.as_micros();
    match us {
        0..1_000 => format!("{us}µs"),
        1_000..1_000_000 => format!("{}ms", us / 1_000),
        _ => format!("{:.1}s", duration.as_secs_f64()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_linkerd_writes_them() {
        let http =
            Golden { success: 19, failure: 1, p50_ms: Some(1.5), p95_ms: None, p99_ms: Some(99.4), seconds: 10.0 };
        assert_eq!(golden(Some(&http)), ["95.00%", "2.0rps", "2ms", "-", "99ms"]);
        assert_eq!(golden(Some(&Golden::default())), ["-"; 5]);
        assert_eq!(golden(None), ["-"; 5]);
        assert_eq!(short_duration(Duration::from_micros(950)), "950µs");
        assert_eq!(short_duration(Duration::from_micros(1950)), "1ms");
        assert_eq!(short_duration(Duration::from_millis(1950)), "1.9s");
    }
}
