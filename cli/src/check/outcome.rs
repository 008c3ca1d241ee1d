//! Checks as data, and their results.

use serde::{Serialize, Serializer, ser::SerializeStruct as _};

use super::{
    answer::Stop,
    facts::{Facts, Mode, Part},
};
use crate::{docs, problem::Problem};

/// The document that explains each check.
const HINTS: &str = "troubleshooting.md";

/// A group of checks, under Linkerd's name if Linkerd has it.
pub(super) struct Category {
    pub(super) name: &'static str,
    /// The facts that its checks look at.
    pub(super) needs: &'static [Part],
    pub(super) applies: fn(Mode) -> bool,
    pub(super) checks: &'static [Check],
}

/// A check, and the function that evaluates it.
pub(super) struct Check {
    /// The condition that holds if the check passes.
    pub(super) description: &'static str,
    /// Its place in [`HINTS`]; Linkerd's if Linkerd has the same check.
    pub(super) anchor: &'static str,
    pub(super) severity: Severity,
    pub(super) judge: Judge,
}

/// Returns the problems that were found; none if the check passes.
pub(super) type Judge = fn(&Facts) -> Result<Vec<Problem>, Stop>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// Later checks make no sense if this one fails.
    Fatal,
    /// Stays wrong until somebody acts.
    Error,
    /// May still become right by itself.
    Waits,
    /// Works, but not for long, or not as intended.
    Warning,
}

/// The results of all checks that apply.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) success: bool,
    pub(super) categories: Vec<CategoryOutcome>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CategoryOutcome {
    pub(super) category_name: &'static str,
    pub(super) checks: Vec<CheckOutcome>,
}

#[derive(Debug)]
pub(super) struct CheckOutcome {
    pub(super) description: &'static str,
    pub(super) anchor: &'static str,
    pub(super) severity: Severity,
    pub(super) problems: Vec<Problem>,
}

impl Outcome {
    /// Evaluates every check, up to a fatal failure.
    pub(super) fn of<'a>(categories: impl IntoIterator<Item = &'a Category>, facts: &Facts) -> Self {
        let mut outcomes = Vec::new();
        let mut fatal = false;
        for category in categories {
            let mut checks = Vec::new();
            for check in category.checks {
                let Some(outcome) = check.ask(facts) else { continue };
                fatal = outcome.is_error() && outcome.severity == Severity::Fatal;
                checks.push(outcome);
                if fatal {
                    break;
                }
            }
            if !checks.is_empty() {
                outcomes.push(CategoryOutcome { category_name: category.name, checks });
            }
            if fatal {
                break;
            }
        }
        let success = !outcomes.iter().flat_map(|category| &category.checks).any(CheckOutcome::is_error);
        Self { success, categories: outcomes }
    }

    /// The first failure that may resolve itself; `None` if all checks passed, or if a failure needs action.
    pub(super) fn waits_for(&self) -> Option<String> {
        let mut failed = self.checks().filter(|check| check.is_error()).peekable();
        let first = *failed.peek()?;
        let heals = failed.all(|check| check.severity == Severity::Waits);
        heals.then(|| match first.problems.first() {
            Some(problem) => format!("{}: {problem}", first.description),
            None => first.description.to_owned(),
        })
    }

    /// Whether a failure makes all later checks meaningless.
    pub(super) fn is_fatal(&self) -> bool {
        self.checks().any(|check| check.is_error() && check.severity == Severity::Fatal)
    }

    /// Whether a failure needs action, so that no check is asked again.
    pub(super) fn is_final(&self) -> bool {
        self.checks().any(|check| check.is_error() && check.severity != Severity::Waits)
    }

    pub(super) fn checks(&self) -> impl Iterator<Item = &CheckOutcome> {
        self.categories.iter().flat_map(|category| &category.checks)
    }

    /// The checks with the names of their categories.
    pub(super) fn named_checks(&self) -> impl Iterator<Item = (&'static str, &CheckOutcome)> {
        let categories = self.categories.iter();
        categories.flat_map(|category| category.checks.iter().map(|check| (category.category_name, check)))
    }
}

impl Check {
    pub(super) const fn new(description: &'static str, anchor: &'static str, severity: Severity, judge: Judge) -> Self {
        Self { description, anchor, severity, judge }
    }

    /// `None` if the check is skipped.
    fn ask(&self, facts: &Facts) -> Option<CheckOutcome> {
        let (severity, problems) = match ((self.judge)(facts), self.severity) {
            (Ok(problems), severity) => (severity, problems),
            // A user who may not read this may be able to read other things.
            (Err(Stop::Unanswered(problem)), Severity::Fatal) => (Severity::Error, vec![problem]),
            (Err(Stop::Unanswered(problem)), severity) => (severity, vec![problem]),
            (Err(Stop::Skip), _) => return None,
        };
        Some(CheckOutcome { description: self.description, anchor: self.anchor, severity, problems })
    }
}

impl CheckOutcome {
    pub(super) fn is_error(&self) -> bool {
        !self.problems.is_empty() && self.severity != Severity::Warning
    }

    /// Where the check is explained.
    pub(super) fn link(&self) -> String {
        docs::page(&format!("{HINTS}#{}", self.anchor))
    }

    /// The problems, each with its remedy; consecutive problems may share one.
    pub(super) fn explanation(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (index, problem) in self.problems.iter().enumerate() {
            lines.push(problem.to_string());
            if self.problems.get(index + 1).is_none_or(|next| next.remedy != problem.remedy) {
                lines.push(format!("  remedy: {}", problem.remedy));
            }
        }
        lines
    }

    /// Linkerd's name of the result.
    pub(super) fn result(&self) -> &'static str {
        match (self.problems.is_empty(), self.severity) {
            (true, _) => "success",
            (false, Severity::Warning) => "warning",
            (false, _) => "error",
        }
    }
}

impl Serialize for CheckOutcome {
    /// As `linkerd check -o json`: the hint is a link, and the error what a person has to read.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let failed = !self.problems.is_empty();
        let mut check = serializer.serialize_struct("check", if failed { 4 } else { 2 })?;
        check.serialize_field("description", self.description)?;
        if failed {
            check.serialize_field("hint", &self.link())?;
            check.serialize_field("error", &self.explanation().join("\n"))?;
        }
        check.serialize_field("result", self.result())?;
        check.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(checks: Vec<(Severity, bool)>) -> Outcome {
        let problems =
            |failed: bool| if failed { vec![Problem::new("Pod a/b", "broken", "mend it")] } else { Vec::new() };
        let checks = checks
            .into_iter()
            .map(|(severity, failed)| CheckOutcome {
                description: "it works",
                anchor: "k8s-api",
                severity,
                problems: problems(failed),
            })
            .collect();
        Outcome { success: false, categories: vec![CategoryOutcome { category_name: "linkerd-existence", checks }] }
    }

    #[test]
    fn time_is_given_to_what_it_may_heal() {
        assert!(outcome(vec![(Severity::Waits, true), (Severity::Warning, true)]).waits_for().is_some());
        assert_eq!(outcome(vec![(Severity::Waits, true), (Severity::Error, true)]).waits_for(), None);
        assert_eq!(outcome(vec![(Severity::Waits, false), (Severity::Warning, true)]).waits_for(), None);
    }

    #[test]
    fn what_needs_action_is_final() {
        assert!(outcome(vec![(Severity::Waits, true), (Severity::Error, true)]).is_final());
        assert!(!outcome(vec![(Severity::Waits, true), (Severity::Warning, true)]).is_final());
        assert!(outcome(vec![(Severity::Fatal, true)]).is_fatal());
        assert!(!outcome(vec![(Severity::Fatal, false), (Severity::Error, true)]).is_fatal());
    }

    #[test]
    fn json_is_linkerds() {
        let json = serde_json::to_value(outcome(vec![(Severity::Error, true), (Severity::Error, false)])).unwrap();
        let category = &json["categories"][0];
        assert_eq!(category["categoryName"], "linkerd-existence");
        let failed = serde_json::json!({"description": "it works", "hint": "docs/troubleshooting.md#k8s-api",
            "error": "Pod a/b: broken\n  remedy: mend it", "result": "error"});
        assert_eq!(category["checks"][0], failed);
        assert_eq!(category["checks"][1], serde_json::json!({"description": "it works", "result": "success"}));
    }
}
