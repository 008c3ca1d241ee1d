//! What was done with each object, for standard error; the lines are Linkerd's, with the reason after them.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
};

use weft_k8s_api::printable;

/// What was done with one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Kind in lower case; empty if it has none.
    pub(super) kind: String,
    /// Name.
    pub(super) name: String,
    /// What was done.
    pub(super) outcome: Outcome,
    /// What a person should know about it.
    pub(super) warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Injected,
    Annotated,
    Uninjected,
    /// With the reason, if there is more to say than that nothing applies to its kind.
    Skipped(Option<&'static str>),
}

/// The report; `injecting` unless proxies were removed.
pub(super) fn text(entries: &[Entry], injecting: bool) -> String {
    let mut text = String::from("\n");
    let mut warned = false;
    for warning in entries.iter().flat_map(|entry| &entry.warnings) {
        let _ = writeln!(text, "‼ {}", printable::line(warning));
        warned = true;
    }
    if injecting && !entries.iter().any(|entry| matches!(entry.outcome, Outcome::Injected | Outcome::Annotated)) {
        text.push_str("‼ no supported objects found\n");
        warned = true;
    }
    if warned {
        text.push('\n');
    }
    for entry in entries {
        if entry.kind.is_empty() {
            text.push_str("document missing \"kind\" field, skipped\n");
            continue;
        }
        let outcome = match entry.outcome {
            Outcome::Injected => "injected",
            Outcome::Annotated => "annotated",
            Outcome::Uninjected => "uninjected",
            Outcome::Skipped(_) => "skipped",
        };
        let (kind, name) = (printable::line(&entry.kind), printable::line(&entry.name));
        let _ = write!(text, "{kind} \"{name}\" {outcome}");
        if let Outcome::Skipped(Some(reason)) = entry.outcome {
            let _ = write!(text, ": {reason}");
        }
        text.push('\n');
    }
    text.push('\n');
    text
}

/// Prints it.
pub(super) fn print(text: &str) {
    // A closed standard error is not a failure.
    let _ = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: &str, outcome: Outcome, warnings: &[&str]) -> Entry {
        let warnings = warnings.iter().map(|warning| (*warning).to_owned()).collect();
        Entry { kind: kind.to_owned(), name: "web".to_owned(), outcome, warnings }
    }

    #[test]
    fn the_report_is_linkerds() {
        let entries = [
            entry("deployment", Outcome::Injected, &["deployment/web uses \"protocol: UDP\""]),
            entry("configmap", Outcome::Skipped(None), &[]),
            entry("", Outcome::Skipped(None), &[]),
            entry("job", Outcome::Skipped(Some("it says so")), &[]),
        ];
        assert_eq!(
            text(&entries, true),
            "\n‼ deployment/web uses \"protocol: UDP\"\n\ndeployment \"web\" injected\nconfigmap \"web\" skipped\n\
             document missing \"kind\" field, skipped\njob \"web\" skipped: it says so\n\n"
        );
    }

    #[test]
    fn nothing_to_inject_is_said() {
        assert!(
            text(&[entry("configmap", Outcome::Skipped(None), &[])], true).contains("‼ no supported objects found")
        );
        assert!(!text(&[entry("configmap", Outcome::Skipped(None), &[])], false).contains("no supported"));
    }
}
