//! Names of Kubernetes' objects (RFC 1123).

/// Whether `text` is a DNS label, as names of namespaces are: 63 characters at most.
pub fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_part(text)
}

/// Whether `text` is what Kubernetes calls a DNS subdomain, as names of most objects are: labels that are joined by
/// dots, 253 characters at most together (`k8s.io/apimachinery:pkg/util/validation`, `IsDNS1123Subdomain`).
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_part)
}

/// Whether `text` is a DNS name: a subdomain of labels that are no longer than DNS allows.
pub(crate) fn is_dns_name(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

fn is_part(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_lower_case_and_bounded() {
        let long = ["x".repeat(63), "x".repeat(64), "x".repeat(253), "x".repeat(254)];
        for (text, expected) in [
            ("shop", [true, true, true]),
            ("0-shop", [true, true, true]),
            ("web.shop", [false, true, true]),
            ("", [false, false, false]),
            (".", [false, false, false]),
            ("web..shop", [false, false, false]),
            ("-shop", [false, false, false]),
            ("shop-", [false, false, false]),
            ("Shop", [false, false, false]),
            ("default?1", [false, false, false]),
            ("a/secrets/b", [false, false, false]),
            ("shöp", [false, false, false]),
            (&long[0], [true, true, true]),
            (&long[1], [false, true, false]),
            (&long[2], [false, true, false]),
            (&long[3], [false, false, false]),
        ] {
            assert_eq!([is_label(text), is_subdomain(text), is_dns_name(text)], expected, "{text:?}");
        }
    }
}
