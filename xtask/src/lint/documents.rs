//! Documents drift: links that lead nowhere, verdicts that nobody explains.

use std::path::{Path, PathBuf};

use super::{Finding, Source, lexer::code_only};

/// Where the words of traces and metrics are defined.
const VERDICTS: &str = "ebpf-abi/src/verdict.rs";
/// Where each of them is explained.
const VERDICTS_EXPLAINED: &str = "docs/interception.md";

/// Checks the documents against each other, against the files that `exists` knows and against the sources.
pub(crate) fn check(documents: &[Source], sources: &[Source], exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let mut findings: Vec<_> = documents.iter().flat_map(|document| broken_links(document, &exists)).collect();
    let explained = documents.iter().find(|document| document.path == Path::new(VERDICTS_EXPLAINED));
    let verdicts = sources.iter().find(|source| source.path == Path::new(VERDICTS));
    if let (Some(explained), Some(verdicts)) = (explained, verdicts) {
        let missing =
            labels(&verdicts.text).into_iter().filter(|label| !explained.text.contains(&format!("`{label}`")));
        findings.extend(missing.map(|label| finding(explained, None, format!("does not explain the verdict {label}"))));
    }
    findings
}

fn broken_links(document: &Source, exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let directory = document.path.parent().unwrap_or(Path::new(""));
    let mut findings = Vec::new();
    for (index, line) in document.text.lines().enumerate() {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            if !exists(&normal(&directory.join(file))) {
                findings.push(finding(document, Some(index + 1), format!("links to {target}, which is not there")));
            }
        }
    }
    findings
}

/// The words in match arms such as `Self::Redirect => "redirect"`, without those of the directions.
fn labels(source: &str) -> Vec<String> {
    let code = code_only(source);
    // Literals are blank in `code`, so arms are found there and their words read from the source.
    let lines = code.lines().zip(source.lines());
    let arms = lines.filter(|(code, _)| code.trim_start().starts_with("Self::") && code.contains("=>"));
    let words = arms.filter_map(|(_, line)| line.split('"').nth(1));
    words.filter(|word| !["outbound", "inbound"].contains(word)).map(str::to_owned).collect()
}

fn finding(document: &Source, line: Option<usize>, message: String) -> Finding {
    Finding { subject: document.path.display().to_string(), line, message }
}

/// The path without `a/..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path {
        match part.to_str() {
            Some("..") => drop(normal.pop()),
            Some(".") => {}
            _ => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> Source {
        Source { path: path.into(), text: text.to_owned() }
    }

    #[test]
    fn a_link_has_to_lead_somewhere() {
        let document =
            file("docs/a.md", "[x](b.md#part) [y](../README.md)\n[z](https://weft.io) [w](gone.md) [v](#here)");
        let exists = |path: &Path| ["docs/b.md", "README.md"].iter().any(|known| path == Path::new(known));
        let found = check(&[document], &[], exists);
        assert_eq!(
            found.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["docs/a.md:2: links to gone.md, which is not there"]
        );
    }

    #[test]
    fn every_verdict_has_to_be_explained() {
        let source =
            file(VERDICTS, "match self {\n  Self::Redirect => \"redirect\",\n  Self::PassProxy => \"pass_proxy\",\n}");
        let document = file(VERDICTS_EXPLAINED, "| `redirect` |");
        let found = check(&[document], &[source], |_| true);
        assert_eq!(found.len(), 1);
        assert!(found[0].message.ends_with("pass_proxy"), "{found:?}");
    }
}
