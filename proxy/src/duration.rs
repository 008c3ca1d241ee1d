//! Linkerd's spelling of durations, in settings and in headers.

use std::time::Duration;

/// Parses a whole number with `ms`, `s`, `m`, `h` or `d`; zero needs no unit. `None` for anything else, and for more
/// milliseconds than fit in 64 bits.
pub(crate) fn parse(text: &str) -> Option<Duration> {
    let text = text.trim();
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let number: u64 = number.parse().ok()?;
    let milliseconds = match unit {
        "" if number == 0 => 0,
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    number.checked_mul(milliseconds).map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_whole_numbers_with_a_unit() {
        for (text, milliseconds) in
            [("0", 0), ("00", 0), ("5ms", 5), (" 2s ", 2_000), ("3m", 180_000), ("4h", 14_400_000), ("1d", 86_400_000)]
        {
            assert_eq!(parse(text), Some(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["1", "-1s", "1.5s", "s", "", "1w", "1 s", "99999999999999999999s", "18446744073709551615d"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
