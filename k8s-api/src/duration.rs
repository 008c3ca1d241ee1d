//! Durations as in Go, Helm values and annotations: `300ms`, `1m30s`, `24h0m0s`; also days, `365d`, as in Linkerd's
//! proxy.
//!
//! `kube::core::Duration` reads the same syntax, but panics on text such as `1h-5m` and `9e99h`, which anybody who may
//! annotate a pod can write.

use std::{fmt, str::FromStr, time::Duration};

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

/// Parses a duration as the proxy does: a whole number with `ms`, `s`, `m`, `h` or `d`; zero needs no unit.
///
/// `None` for anything else, and for more milliseconds than fit in 64 bits.
pub fn parse_whole(text: &str) -> Option<Duration> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let number: u64 = number.parse().ok()?;
    let millis = match unit {
        "" if number == 0 => 0,
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 60 * 60 * 1000,
        "d" => 24 * 60 * 60 * 1000,
        _ => return None,
    };
    number.checked_mul(millis).map(Duration::from_millis)
}

/// [`parse`] for options of a command line.
///
/// # Errors
/// Says what is expected.
pub fn parse_option(text: &str) -> Result<Duration, String> {
    parse(text).ok_or_else(|| "expected numbers with units ms, s, m, h or d, such as 500ms or 24h0m0s".to_owned())
}

/// A duration as the proxy reads it: one whole number and one of the units `ms`, `s`, `m`, `h` and `d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyDuration(String);

/// Text that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad duration {0:?}, expected a number with a unit, such as 500ms or 10s")]
pub struct BadDuration(String);

impl FromStr for ProxyDuration {
    type Err = BadDuration;

    /// Reads every duration that [`parse`] reads, and keeps the spelling where the proxy reads it too.
    fn from_str(text: &str) -> Result<Self, BadDuration> {
        let duration = parse(text).ok_or_else(|| BadDuration(text.to_owned()))?;
        Ok(if parse_whole(text).is_some() { Self(text.to_owned()) } else { Self::from(duration) })
    }
}

impl ProxyDuration {
    pub(crate) fn millis(count: u32) -> Self {
        Self(format!("{count}ms"))
    }

    pub(crate) fn seconds(count: u32) -> Self {
        Self(format!("{count}s"))
    }

    pub(crate) fn minutes(count: u32) -> Self {
        Self(format!("{count}m"))
    }

    pub(crate) fn hours(count: u32) -> Self {
        Self(format!("{count}h"))
    }
}

impl From<Duration> for ProxyDuration {
    fn from(duration: Duration) -> Self {
        Self(format!("{}ms", duration.as_millis()))
    }
}

impl fmt::Display for ProxyDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
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

    #[test]
    fn whole_durations_are_a_number_and_a_unit() {
        for (text, millis) in [
            ("0", Some(0)),
            ("00", Some(0)),
            ("0s", Some(0)),
            ("500ms", Some(500)),
            ("10s", Some(10_000)),
            ("5m", Some(300_000)),
            ("2h", Some(7_200_000)),
            ("1d", Some(86_400_000)),
            ("10", None),
            ("1.5s", None),
            ("1h30m", None),
            ("-1s", None),
            ("s", None),
            ("", None),
            ("1w", None),
            ("1 s", None),
            ("99999999999999999999s", None),
            ("18446744073709551615d", None),
        ] {
            assert_eq!(parse_whole(text), millis.map(Duration::from_millis), "{text:?}");
        }
    }

    #[test]
    fn the_proxy_reads_one_number_and_one_unit() {
        for (text, expected) in [
            ("500ms", "500ms"),
            ("10s", "10s"),
            ("1d", "1d"),
            ("1m30s", "90000ms"),
            ("1.5s", "1500ms"),
            ("0", "0"),
            ("5us", "0ms"),
        ] {
            assert_eq!(text.parse::<ProxyDuration>().map(|duration| duration.to_string()).as_deref(), Ok(expected));
        }
        let error = "soon".parse::<ProxyDuration>().unwrap_err().to_string();
        assert!(error.contains("\"soon\"") && error.contains("500ms"), "{error}");
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
