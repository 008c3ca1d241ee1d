//! Metrics without the names of what a mesh is used for, to hand them to others.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// Labels whose values become digests. Linkerd's list is shorter: it keeps addresses and names of workloads and routes.
const LABELS: [&str; 7] = ["addr", "authority", "client_id", "hostname", "server_id", "target_addr", "target_ip"];
/// The prefix of labels about a destination's workload, and the suffixes of labels with names of objects.
const WORKLOAD: &str = "dst_";
const NAMES: [&str; 2] = ["_name", "_namespace"];

/// Whether the values of a label name what a mesh is used for.
fn is_hidden(label: &str) -> bool {
    LABELS.contains(&label) || label.starts_with(WORKLOAD) || NAMES.iter().any(|suffix| label.ends_with(suffix))
}

/// Metrics in Prometheus' text format, with digests in place of names and addresses. Equal values have equal digests.
pub(super) fn obfuscate(metrics: &str) -> String {
    let mut shown = String::with_capacity(metrics.len());
    for line in metrics.split_inclusive('\n') {
        if line.starts_with('#') {
            shown.push_str(line);
        } else {
            sample(line, &mut shown);
        }
    }
    shown
}

/// One line: `name{label="value",..} number`.
fn sample(line: &str, shown: &mut String) {
    let Some((name, mut rest)) = line.split_once('{') else { return shown.push_str(line) };
    shown.push_str(name);
    shown.push('{');
    while let Some((label, quoted)) = rest.split_once("=\"") {
        let end = closing_quote(quoted);
        let value = &quoted[..end];
        shown.push_str(label);
        shown.push_str("=\"");
        if is_hidden(label.trim_start_matches([',', ' '])) {
            digest(value, shown);
        } else {
            shown.push_str(value);
        }
        rest = &quoted[end..];
        // Whatever follows the labels has no quotes.
        if let Some(after) = rest.strip_prefix('"') {
            shown.push('"');
            rest = after;
        }
    }
    shown.push_str(rest);
}

/// Position of the quote that ends a value: one that no backslash escapes.
fn closing_quote(quoted: &str) -> usize {
    let mut escaped = false;
    for (index, byte) in quoted.bytes().enumerate() {
        match byte {
            b'"' if !escaped => return index,
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    quoted.len()
}

/// The first four bytes of a SHA-256, as Linkerd shows them.
fn digest(value: &str, shown: &mut String) {
    for byte in &Sha256::digest(value)[..4] {
        let _ = write!(shown, "{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_digests_and_nothing_else_changes() {
        let metrics = "# HELP request_total Requests of authority=\"x\".\n\
                       request_total{direction=\"outbound\",authority=\"web.shop:80\",tls=\"true\"} 5\n\
                       request_total{authority=\"web.shop:80\"} 1\n\
                       process_open_fds 7\n";
        let shown = obfuscate(metrics);
        assert!(!shown.contains("web.shop"), "{shown}");
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], metrics.lines().next().unwrap());
        let digest = lines[2].strip_prefix("request_total{authority=\"").unwrap().strip_suffix("\"} 1").unwrap();
        assert_eq!(digest.len(), 8);
        assert_eq!(lines[1], format!("request_total{{direction=\"outbound\",authority=\"{digest}\",tls=\"true\"}} 5"));
        assert_eq!(lines[3], "process_open_fds 7");
    }

    #[test]
    fn names_of_workloads_and_objects_are_hidden_and_kinds_are_not() {
        for label in ["target_ip", "dst_pod", "dst_deployment", "parent_name", "backend_namespace", "addr"] {
            assert!(is_hidden(label), "{label}");
        }
        for label in ["direction", "tls", "parent_kind", "target_port", "status_code", "le"] {
            assert!(!is_hidden(label), "{label}");
        }
    }

    #[test]
    fn quotes_and_commas_in_values_hide_nothing() {
        let line = r#"m{path="a\",b={}",client_id="a\\",zone="w"} 1"#;
        let shown = obfuscate(line);
        assert!(
            shown.starts_with(r#"m{path="a\",b={}",client_id=""#) && shown.ends_with(r#"",zone="w"} 1"#),
            "{shown}"
        );
        assert!(!shown.contains(r#"client_id="a"#), "{shown}");
    }

    #[test]
    fn a_line_that_ends_early_is_kept() {
        assert_eq!(obfuscate("m{path=\"a"), "m{path=\"a");
        assert_eq!(obfuscate("m{"), "m{");
    }
}
