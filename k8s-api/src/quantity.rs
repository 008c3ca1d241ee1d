//! Kubernetes' quantities, such as `100m` and `64Mi`: whether the API server accepts one.

/// Whether `text` is a quantity of 0 or above: a decimal number and a binary, decimal or exponent suffix
/// (`k8s.io/apimachinery/pkg/api/resource`).
pub(crate) fn is_quantity(text: &str) -> bool {
    split(text).is_some()
}

/// The number and the suffix of a quantity; `None` if it is not one.
fn split(text: &str) -> Option<(f64, &str)> {
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    let number_end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(number_end);
    let known = match suffix {
        "" | "n" | "u" | "m" | "k" | "M" | "G" | "T" | "P" | "E" | "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" => true,
        exponent => exponent.strip_prefix(['e', 'E']).is_some_and(|power| power.parse::<i8>().is_ok()),
    };
    number.parse().ok().filter(|_| known).map(|number| (number, suffix))
}

/// Whole processors of a quantity of CPU, rounded up and at least 1; `None` if it is not one.
pub(crate) fn whole_cores(text: &str) -> Option<u32> {
    let (number, suffix) = split(text)?;
    let unit = match suffix {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        // No machine has a thousand processors a thousand times; what is larger is as good as no limit.
        "k" | "M" | "G" | "T" | "P" | "E" | "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" => 1e3,
        exponent => 10f64.powi(exponent.get(1..)?.parse().ok()?),
    };
    // Casts saturate.
    Some(((number * unit).ceil() as u32).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_numbers_with_one_suffix() {
        for text in ["0", "1", "100m", "1.5", ".5", "64Mi", "1e3", "1E6", "12e-3", "+1Gi", "1E"] {
            assert!(is_quantity(text), "{text}");
        }
        for text in ["", "many", "-1", "1e3Ki", "1 Gi", "Mi", "1.2.3", "1mi", "inf", "1e", "1e9999"] {
            assert!(!is_quantity(text), "{text}");
        }
    }

    #[test]
    fn processors_are_rounded_up() {
        for (text, expected) in [
            ("100m", Some(1)),
            ("1", Some(1)),
            ("1001m", Some(2)),
            ("2.5", Some(3)),
            ("25e-1", Some(3)),
            ("0", Some(1)),
            ("2k", Some(2000)),
            ("1e100", Some(u32::MAX)),
            ("many", None),
        ] {
            assert_eq!(whole_cores(text), expected, "{text}");
        }
    }
}
