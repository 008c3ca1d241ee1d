//! Output of the checks for people: a mark and the condition; for failures also object, field and remedy.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
};

use weft_k8s_api::printable;

use super::outcome::{CheckOutcome, Outcome, Severity};
use crate::output;

/// Clears the terminal's current line.
const CLEAR_LINE: &str = "\r\x1b[2K";
/// Longest progress text: one line of a narrow terminal, since a wrapped line would not be cleared.
const LINE: usize = 78;

/// Shows on a terminal's standard error what the command waits for; prints nothing elsewhere.
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
            let text: String = printable::line(&format!("waiting for: {check}")).chars().take(LINE).collect();
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

/// `short`: only the checks that did not pass.
pub(super) fn print(outcome: &Outcome, short: bool) -> io::Result<()> {
    let colours = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    output::styled(&text(outcome, short, colours))
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
            for (index, problem) in check.problems.iter().enumerate() {
                let _ = writeln!(text, "    {}", printable::lines(&problem.to_string()));
                // Consecutive problems may have the same remedy.
                if check.problems.get(index + 1).is_none_or(|next| next.remedy != problem.remedy) {
                    let _ = writeln!(text, "      remedy: {}", printable::lines(&problem.remedy));
                }
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
        if let Some(cause) = cause(outcome) {
            let _ = write!(text, "\nBegin with \"{}\": others may follow from it", cause.description);
        }
    }
    text
}

/// The first failure that needs action, if there also are failures that may resolve themselves: those may depend on
/// it.
fn cause(outcome: &Outcome) -> Option<&CheckOutcome> {
    let failed = || outcome.checks().filter(|check| check.is_error());
    let waits = failed().any(|check| check.severity == Severity::Waits);
    failed().find(|check| check.severity != Severity::Waits).filter(|_| waits)
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
    use super::{super::outcome::CategoryOutcome, *};
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
                        Secret linkerd/issuer, data[\"crt.pem\"]: has expired\n      remedy: make a new one\n\n\
                        Status check results are ×: 1 check failed";
        assert_eq!(text, expected);
    }

    /// Problems quote annotations and logs of pods.
    #[test]
    fn a_problem_cannot_style_itself() {
        let mut outcome = outcome();
        outcome.categories[0].checks[1].problems = vec![Problem::new("Pod shop/web", "\x1b[32m√", "\x1b]0;x\x07")];
        let text = text(&outcome, false, false);
        assert!(!text.contains(['\x1b', '\x07']), "{text:?}");
    }

    #[test]
    fn the_failure_that_others_wait_for_is_named_last() {
        let mut outcome = outcome();
        assert!(!text(&outcome, false, false).contains("Begin with"));
        let waits = vec![Problem::new("Pod linkerd/identity", "is Pending", "wait")];
        let waits = CheckOutcome { description: "pods are ready", severity: Severity::Waits, problems: waits };
        outcome.categories[0].checks.insert(0, waits);
        assert!(
            text(&outcome, false, false).ends_with("Begin with \"issuer cert is valid\": others may follow from it")
        );
    }

    #[test]
    fn problems_in_a_row_share_their_cure() {
        let problem = |object: &str| Problem::new(object, "does not exist", "install it");
        let mut outcome = outcome();
        outcome.categories[0].checks[1].problems = vec![problem("a"), problem("b")];
        assert!(
            text(&outcome, true, false)
                .contains("    a: does not exist\n    b: does not exist\n      remedy: install it\n")
        );
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
