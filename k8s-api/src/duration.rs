//! Durations as in Go, Helm values and annotations: `300ms`, `1m30s`, `24h0m0s`; also days, `365d`, as in Linkerd's
//! proxy.
//!
//! `kube::core::Duration` reads the same syntax, but panics on text such as `1h-5m` and `9e99h`, which anybody who may
//! annotate a pod can write.

use std::time::Duration;

/// Nanoseconds of each unit (`time.ParseDuration` of Go's standard library; `d` is linkerd2-proxy's).
const UNITS: [(&str, f64); 9] = [
    ("ns", 1.0),
    ("us", 1e3),
    ("\u{b5}s", 1e3),
    ("\u{3bc}s", 1e3),
    ("ms", 1e6),
    ("s", 1e9),
    ("m", 60e9),
    ("h", 3_600e9),
    ("d", 86_400e9),
];
/// Go's longest duration, 292 years, in nanoseconds.
const MAX_NANOS: f64 = i64::MAX as f64;

/// Parses a duration: decimal numbers with units, one after the other, or a bare `0`.
///
/// `None` for anything else, also for negative durations and for those above 292 years.
pub fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    if rest.is_empty() {
        return None;
    }
    let mut nanos = 0.0;
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..unit_at].parse().ok()?;
        rest = &rest[unit_at..];
        let next_at = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, unit_nanos) = UNITS.iter().find(|(unit, _)| *unit == &rest[..next_at])?;
        nanos += number * unit_nanos;
        rest = &rest[next_at..];
    }
    // Whole nanoseconds, so that 0.1s is 100 ms and not a nanosecond less.
    (nanos <= MAX_NANOS).then(|| Duration::from_nanos(nanos.round() as u64))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_what_go_and_linkerds_proxy_read() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("300ms", 300),
            ("1.5s", 1500),
            (".5s", 500),
            ("+1s", 1000),
            ("1m30s", 90_000),
            ("24h0m0s", 86_400_000),
            ("365d", 31_536_000_000),
            ("0.1s", 100),
            ("2000000ns", 2),
            ("1000us", 1),
            ("1000µs", 1),
        ] {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn refuses_everything_else() {
        for text in [
            "",
            "+",
            "1",
            "soon",
            "1 s",
            "s",
            "1x",
            "-1s",
            "1h-5m",
            "9e99h",
            "inf",
            "NaNs",
            "1..5s",
            ".s",
            "99999999d",
            "1S",
            "++1s",
            "10s ",
            "１s",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "[-+0-9.a-zµ ]{0,24}") {
            let _ = parse(&text);
        }

        #[test]
        fn whole_milliseconds_survive(millis in 0..=u64::from(u32::MAX)) {
            prop_assert_eq!(parse(&format!("{millis}ms")), Some(Duration::from_millis(millis)));
        }
    }
}
