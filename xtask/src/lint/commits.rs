//! Subjects of commits: `package: imperative summary`, lower case, at most 72 columns.

use anyhow::{Context, Result};

use super::Finding;
use crate::{
    command::{self, step},
    setup::packages,
    workspace::Workspace,
};

/// The last commit before the rule was checked. Subjects up to here are exempt.
const BASE: &str = "c3e212f2c9c14863067dba4cb35a5868f52a875a";
/// Width of a subject in `git log --oneline` on a terminal of 80 columns.
const LONGEST: usize = 72;

/// Checks the commits between [`BASE`] and HEAD.
///
/// # Errors
/// When git cannot list the commits.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    if !workspace.root.join(".git").exists() {
        step("commit subjects: not checked, this is no git checkout");
        return Ok(Vec::new());
    }
    packages::ensure(&[packages::GIT])?;
    let git = |arguments: &[&str]| command::output(command::git(&workspace.root).args(arguments));
    if git(&["merge-base", "--is-ancestor", BASE, "HEAD"]).is_err() {
        step(&format!("commit subjects: not checked, this clone's history does not reach back to {BASE}"));
        return Ok(Vec::new());
    }
    let log = git(&["log", "--no-merges", "--format=%h %s", &format!("{BASE}..HEAD")]).context("list commits")?;
    Ok(log.lines().filter_map(finding).collect())
}

/// The problem with the subject in a line `HASH SUBJECT`.
fn finding(line: &str) -> Option<Finding> {
    let (hash, subject) = line.split_once(' ').unwrap_or((line, ""));
    let message = problem(subject)?;
    Some(Finding { subject: format!("commit {hash}"), line: None, message: format!("\"{subject}\": {message}") })
}

fn problem(subject: &str) -> Option<String> {
    let columns = subject.chars().count();
    if columns > LONGEST {
        return Some(format!("{columns} columns, more than {LONGEST}"));
    }
    let Some((packages, summary)) = subject.split_once(": ") else {
        return Some("is not `package: imperative summary`".to_owned());
    };
    let is_name = |name: &str| {
        name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_./".contains(c)) && !name.is_empty()
    };
    if !packages.split(", ").all(is_name) {
        return Some(format!("{packages:?} is not a list of packages or folders in lower case"));
    }
    // An acronym (`TLS`, `H2`) or a name in backticks may start the summary.
    let word = summary.split(' ').next().unwrap_or_default();
    if word.chars().next().is_none_or(char::is_uppercase) && !word.chars().skip(1).any(char::is_uppercase) {
        return Some("the summary does not begin in lower case".to_owned());
    }
    summary.ends_with('.').then(|| "ends with a full stop".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_subjects_in_the_projects_form() {
        for subject in [
            "proxy: refuse a redirect without a host",
            "agent, tests: read counters through aya",
            "control-plane: TLS listeners evict idle clients",
            ".ci: print the time of each phase",
        ] {
            assert_eq!(problem(subject), None, "{subject}");
        }
    }

    #[test]
    fn refuses_other_subjects() {
        let long = format!("proxy: {}", "x".repeat(LONGEST));
        let cases = [
            (long.as_str(), "79 columns"),
            ("refuse a redirect", "is not `package"),
            ("Proxy: refuse a redirect", "lower case"),
            ("proxy: Refuse a redirect", "begin in lower case"),
            ("proxy: refuse a redirect.", "full stop"),
            ("", "is not `package"),
        ];
        for (subject, expected) in cases {
            let problem = problem(subject).unwrap_or_default();
            assert!(problem.contains(expected), "{subject}: {problem}");
        }
    }

    #[test]
    fn names_the_commit() {
        let found = finding("abc1234 Fix it").expect("a finding");
        assert!(found.to_string().starts_with("commit abc1234: \"Fix it\": is not"), "{found}");
    }
}
