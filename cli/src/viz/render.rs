//! Numbers as Linkerd prints them, and what an answer rests on.

use std::time::Duration;

use weft_proto::viz::{Coverage, Golden, Resource};

use crate::output::{NOTHING, note};

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

/// Says which proxies did not answer.
pub(super) fn problems(coverage: Option<&Coverage>) {
    let Some(coverage) = coverage else { return };
    for problem in &coverage.problems {
        match (problem.namespace.as_str(), problem.pod.as_str()) {
            (_, "") => note(&problem.message),
            (namespace, pod) => note(&format!("{namespace}/{pod}: {}", problem.message)),
        }
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
