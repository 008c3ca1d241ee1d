//! Checks for people: a mark, what is true or is not, and below it object, field and cure.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
};

use super::verdict::{CheckOutcome, Outcome};
use crate::output;

/// Clears the line that a terminal's cursor is in.
const CLEAR_LINE: &str = "\r\x1b[2K";
/// Longest progress text: one line of a narrow terminal, since a wrapped line would not be cleared.
const LINE: usize = 78;

/// What is being waited for, on a terminal's standard error; elsewhere nothing.
pub(super) struct Progress {
    terminal: bool,
    shown: bool,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self { terminal: io::stderr().is_terminal(), shown: false }
    }

    pub(super) fn show(&mut self, check: &str) {
        if self.terminal {
            let text: String = format!("waiting for: {check}").chars().take(LINE).collect();
            let _ = write!(io::stderr(), "{CLEAR_LINE}{text}");
            self.shown = true;
        }
    }

    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr(), "{CLEAR_LINE}");
        }
    }
}

/// `short`: only what did not pass.
pub(super) fn print(outcome: &Outcome, short: bool) -> io::Result<()> {
    let colours = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    output::line(&text(outcome, short, colours))
}

fn text(outcome: &Outcome, short: bool, colours: bool) -> String {
    let mut text = String::new();
    for category in &outcome.categories {
        let shown: Vec<_> = category.checks.iter().filter(|check| !short || !check.problems.is_empty()).collect();
        if shown.is_empty() {
            continue;
        }
        let name = category.category_name;
        let _ = writeln!(text, "{name}\n{}", "-".repeat(name.len()));
        for check in shown {
            let _ = writeln!(text, "{} {}", mark(check, colours), check.description);
            for problem in &check.problems {
                let _ = writeln!(text, "    {problem}\n      cure: {}", problem.cure);
            }
        }
        text.push('\n');
    }
    let failed = outcome.checks().filter(|check| check.is_error()).count();
    let warned = outcome.checks().filter(|check| check.result() == "warning").count();
    let checks = |count: usize| if count == 1 { "1 check".to_owned() } else { format!("{count} checks") };
    let warnings = if warned == 0 { String::new() } else { format!(", {} with a warning", checks(warned)) };
    if outcome.success {
        let _ = write!(text, "Status check results are {}{warnings}", paint("√", GREEN, colours));
    } else {
        let _ =
            write!(text, "Status check results are {}: {} failed{warnings}", paint("×", RED, colours), checks(failed));
    }
    text
}

const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

fn mark(check: &CheckOutcome, colours: bool) -> String {
    match check.result() {
        "success" => paint("√", GREEN, colours),
        "warning" => paint("‼", YELLOW, colours),
        _ => paint("×", RED, colours),
    }
}

fn paint(text: &str, colour: &str, colours: bool) -> String {
    if colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::{
        super::verdict::{CategoryOutcome, Severity},
        *,
    };
    use crate::problem::Problem;

    fn outcome() -> Outcome {
        let check = |description, problems| CheckOutcome { description, severity: Severity::Error, problems };
        let broken = vec![Problem::new("Secret linkerd/issuer, data[\"crt.pem\"]", "has expired", "make a new one")];
        let checks = vec![check("trust anchors are valid", Vec::new()), check("issuer cert is valid", broken)];
        Outcome { success: false, categories: vec![CategoryOutcome { category_name: "linkerd-identity", checks }] }
    }

    #[test]
    fn a_failure_is_followed_by_its_cure() {
        let text = text(&outcome(), false, false);
        let expected = "linkerd-identity\n----------------\n√ trust anchors are valid\n× issuer cert is valid\n    \
                        Secret linkerd/issuer, data[\"crt.pem\"]: has expired\n      cure: make a new one\n\n\
                        Status check results are ×: 1 check failed";
        assert_eq!(text, expected);
    }

    #[test]
    fn short_is_what_failed() {
        let text = text(&outcome(), true, false);
        assert!(text.contains("issuer cert") && !text.contains("trust anchors"), "{text}");
    }

    #[test]
    fn colours_are_for_terminals() {
        assert!(!text(&outcome(), false, false).contains('\x1b'));
        assert!(text(&outcome(), false, true).contains("\x1b[31m×"));
    }
}
