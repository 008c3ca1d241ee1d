//! Output of the checks for people: a mark and the condition; for failures also object, field and remedy.

use std::{collections::BTreeSet, fmt::Write as _, io};

use weft_k8s_api::printable;

use super::outcome::{CheckOutcome, Outcome, Severity};
use crate::output::{
    self, Tone,
    colour::{self, paint_if},
    progress::Progress,
};

/// A report that is printed check by check, in the order of the catalogue, while later checks still wait.
pub(super) struct Report {
    /// Only the checks that did not pass.
    short: bool,
    colours: bool,
    /// Category and description of the printed checks that passed.
    passed: BTreeSet<(&'static str, &'static str)>,
    /// Those that did not pass.
    failed: BTreeSet<(&'static str, &'static str)>,
    /// The category of the last line.
    category: Option<&'static str>,
}

impl Report {
    pub(super) fn new(short: bool) -> Self {
        Self::with_colours(short, colour::on_stdout())
    }

    fn with_colours(short: bool, colours: bool) -> Self {
        Self { short, colours, passed: BTreeSet::new(), failed: BTreeSet::new(), category: None }
    }

    /// Prints the checks before the first one that may still change, except those that are printed already.
    pub(super) fn print_settled(&mut self, outcome: &Outcome, progress: &mut Progress<io::Stderr>) -> io::Result<()> {
        let text = self.settled(outcome);
        if text.is_empty() {
            return Ok(());
        }
        progress.clear();
        output::styled(text.trim_end())
    }

    /// Prints the other checks, those that passed before and fail now, and the result.
    pub(super) fn print_rest(&mut self, outcome: &Outcome) -> io::Result<()> {
        output::styled(&self.rest(outcome))
    }

    fn settled(&mut self, outcome: &Outcome) -> String {
        let is_final = outcome.is_final();
        let checks = outcome.named_checks().take_while(|(_, check)| is_final || !check.is_error());
        checks.map(|(category, check)| self.check(category, check)).collect()
    }

    fn rest(&mut self, outcome: &Outcome) -> String {
        let mut text: String = outcome.named_checks().map(|(category, check)| self.check(category, check)).collect();
        if self.category.is_some() {
            text.push('\n');
        }
        text + &result(outcome, self.colours)
    }

    /// The lines of a check; none if they are printed already.
    fn check(&mut self, category: &'static str, check: &CheckOutcome) -> String {
        let mut text = String::new();
        let printed = if check.problems.is_empty() { &mut self.passed } else { &mut self.failed };
        if !printed.insert((category, check.description)) || (self.short && check.problems.is_empty()) {
            return text;
        }
        if self.category != Some(category) {
            let blank = if self.category.is_some() { "\n" } else { "" };
            let _ = writeln!(text, "{blank}{category}\n{}", "-".repeat(category.len()));
            self.category = Some(category);
        }
        let _ = writeln!(text, "{} {}", mark(check, self.colours), check.description);
        for line in check.explanation() {
            let _ = writeln!(text, "    {}", printable::lines(&line));
        }
        if !check.problems.is_empty() {
            let _ = writeln!(text, "    see {} for hints", check.link());
        }
        text
    }
}

/// The last lines: the result, and where to begin.
fn result(outcome: &Outcome, colours: bool) -> String {
    let mut text = String::new();
    let failed = outcome.checks().filter(|check| check.is_error()).count();
    let warned = outcome.checks().filter(|check| check.result() == "warning").count();
    let checks = |count: usize| if count == 1 { "1 check".to_owned() } else { format!("{count} checks") };
    let warnings = if warned == 0 { String::new() } else { format!(", {} with a warning", checks(warned)) };
    if outcome.success {
        let _ = write!(text, "Status check results are {}{warnings}", paint_if(colours, Tone::Good, "√"));
    } else {
        let _ = write!(
            text,
            "Status check results are {}: {} failed{warnings}",
            paint_if(colours, Tone::Bad, "×"),
            checks(failed)
        );
        if let Some(cause) = cause(outcome) {
            let _ = write!(text, "\nStart with \"{}\": it may be the cause of others", cause.description);
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

fn mark(check: &CheckOutcome, colours: bool) -> String {
    match check.result() {
        "success" => paint_if(colours, Tone::Good, "√"),
        "warning" => paint_if(colours, Tone::Warning, "‼"),
        _ => paint_if(colours, Tone::Bad, "×"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::outcome::CategoryOutcome, *};
    use crate::problem::Problem;

    fn text(outcome: &Outcome, short: bool, colours: bool) -> String {
        Report::with_colours(short, colours).rest(outcome)
    }

    #[test]
    fn checks_are_printed_once_and_before_the_first_that_waits() {
        let check = |description, failed: bool| CheckOutcome {
            description,
            anchor: "k8s-api",
            severity: Severity::Waits,
            problems: if failed {
                vec![Problem::new("Pod linkerd/identity", "is Pending", "wait")]
            } else {
                Vec::new()
            },
        };
        let round = |rows: [bool; 3]| Outcome {
            success: !rows.contains(&true),
            categories: vec![
                CategoryOutcome { category_name: "one", checks: vec![check("a", rows[0]), check("b", rows[1])] },
                CategoryOutcome { category_name: "two", checks: vec![check("c", rows[2])] },
            ],
        };
        let mut report = Report::with_colours(false, false);
        assert_eq!(report.settled(&round([false, true, true])), "one\n---\n√ a\n");
        assert_eq!(report.settled(&round([false, true, false])), "");
        assert_eq!(report.settled(&round([false, false, true])), "√ b\n");
        assert_eq!(report.rest(&round([false, false, false])), "\ntwo\n---\n√ c\n\nStatus check results are √");
    }

    #[test]
    fn what_needs_action_is_printed_before_the_last_facts_are_known() {
        let mut report = Report::with_colours(false, false);
        let text = report.settled(&outcome());
        assert!(text.contains("× issuer cert is valid\n"), "{text}");
        assert_eq!(report.settled(&outcome()), "");
        assert_eq!(report.rest(&outcome()), "\nStatus check results are ×: 1 check failed");
    }

    #[test]
    fn a_check_that_fails_after_it_passed_is_printed_again() {
        let mut report = Report::with_colours(false, false);
        let mut outcome = outcome();
        let problems = std::mem::take(&mut outcome.categories[0].checks[1].problems);
        assert!(report.settled(&outcome).ends_with("√ issuer cert is valid\n"));
        outcome.categories[0].checks[1].problems = problems;
        assert!(report.rest(&outcome).starts_with("× issuer cert is valid\n    Secret linkerd/issuer"));
    }

    fn outcome() -> Outcome {
        let check = |description, problems| {
            let anchor = "l5d-identity-cert-config-valid";
            CheckOutcome { description, anchor, severity: Severity::Error, problems }
        };
        let broken = vec![Problem::new("Secret linkerd/issuer, data[\"crt.pem\"]", "has expired", "make a new one")];
        let checks = vec![check("trust anchors are valid", Vec::new()), check("issuer cert is valid", broken)];
        Outcome { success: false, categories: vec![CategoryOutcome { category_name: "linkerd-identity", checks }] }
    }

    #[test]
    fn a_failure_is_followed_by_its_remedy() {
        let text = text(&outcome(), false, false);
        let expected = "linkerd-identity\n----------------\n√ trust anchors are valid\n× issuer cert is valid\n    \
                        Secret linkerd/issuer, data[\"crt.pem\"]: has expired\n      remedy: make a new one\n    \
                        see docs/troubleshooting.md#l5d-identity-cert-config-valid for hints\n\n\
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
        let (description, anchor) = ("pods are ready", "l5d-api-control-ready");
        let waits = CheckOutcome { description, anchor, severity: Severity::Waits, problems: waits };
        outcome.categories[0].checks.insert(0, waits);
        assert!(
            text(&outcome, false, false)
                .ends_with("Start with \"issuer cert is valid\": it may be the cause of others")
        );
    }

    #[test]
    fn problems_in_a_row_share_their_remedy() {
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
