//! Consistency of documents: broken links, unexplained verdicts, tests that are named as a proof and do not exist.

use std::path::Path;

use syn::visit::Visit;

use super::{
    Document, Finding,
    rust::{RustFile, literal, normal},
};

/// File that defines the words of traces and metrics.
const VERDICTS: &str = "ebpf/abi/src/verdict.rs";
/// Document that explains each of them.
const VERDICTS_EXPLAINED: &str = "docs/interception.md";

/// Checks the documents against each other, against the files that `exists` accepts, and against the sources.
pub(crate) fn check(documents: &[Document], sources: &[RustFile], exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let mut findings: Vec<_> = documents.iter().flat_map(|document| broken_links(document, &exists)).collect();
    let explained = documents.iter().find(|document| document.path == Path::new(VERDICTS_EXPLAINED));
    let verdicts = sources.iter().find(|source| source.path == Path::new(VERDICTS));
    if let (Some(explained), Some(verdicts)) = (explained, verdicts) {
        let missing =
            labels(&verdicts.syntax).into_iter().filter(|label| !explained.text.contains(&format!("`{label}`")));
        findings.extend(missing.map(|label| finding(explained, None, format!("does not explain the verdict {label}"))));
    }
    let proofs = documents.iter().flat_map(|document| proofs(document).map(move |proof| (document, proof)));
    for (document, (line, test)) in proofs {
        if !sources.iter().any(|source| source.text.contains(&format!("fn {test}("))) {
            findings.push(finding(document, Some(line), format!("names the test {test}, which is not there")));
        }
    }
    findings
}

/// The functions that are named in the last column of tables with the header `Proof`, with their lines. Other proofs,
/// such as the names of checks, are sentences.
fn proofs(document: &Document) -> impl Iterator<Item = (usize, &str)> {
    let mut is_proof = false;
    document.text.lines().enumerate().flat_map(move |(index, line)| {
        let cells = line.trim().strip_prefix('|').and_then(|row| row.strip_suffix('|'));
        let last = cells.and_then(|cells| cells.rsplit('|').next()).map(str::trim);
        is_proof = match last {
            None => false,
            Some("Proof") => true,
            Some(_) => is_proof,
        };
        let names = last.filter(|_| is_proof).unwrap_or_default().split('`').skip(1).step_by(2);
        let is_function = |name: &&str| {
            name.matches('_').count() > 1
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        names.filter(is_function).map(move |name| (index + 1, name))
    })
}

fn broken_links(document: &Document, exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
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
fn labels(source: &syn::File) -> Vec<String> {
    #[derive(Default)]
    struct Arms(Vec<String>);
    impl<'ast> Visit<'ast> for Arms {
        fn visit_arm(&mut self, arm: &'ast syn::Arm) {
            let path = match &arm.pat {
                syn::Pat::Path(pattern) => Some(&pattern.path),
                syn::Pat::TupleStruct(pattern) => Some(&pattern.path),
                syn::Pat::Struct(pattern) => Some(&pattern.path),
                _ => None,
            };
            if path.is_some_and(|path| path.segments.first().is_some_and(|first| first.ident == "Self")) {
                self.0.extend(literal(&arm.body));
            }
            syn::visit::visit_arm(self, arm);
        }
    }
    let mut arms = Arms::default();
    arms.visit_file(source);
    arms.0.retain(|word| !["outbound", "inbound"].contains(&word.as_str()));
    arms.0
}

fn finding(document: &Document, line: Option<usize>, message: String) -> Finding {
    Finding { subject: document.path.display().to_string(), line, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> Document {
        Document { path: path.into(), text: text.to_owned() }
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
    fn a_test_that_is_named_as_a_proof_has_to_exist() {
        let text = "| Attack | Proof |\n|---|---|\n| a | `this_one_is_there`, `a check with words` |\n| b `not_a_proof_at_all` | \
            `this_one_is_gone` |\n\n| Other | Table |\n|---|---|\n| c | `weft_some_metric_total` |";
        let source = RustFile::parse("a.rs".into(), "fn this_one_is_there() {}".to_owned()).expect("Rust");
        let found = check(&[file("docs/a.md", text)], &[source], |_| true);
        assert_eq!(
            found.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["docs/a.md:4: names the test this_one_is_gone, which is not there"]
        );
    }

    #[test]
    fn every_verdict_has_to_be_explained() {
        let text = "fn f() { match self { Self::Redirect => \"redirect\", Self::PassProxy => \"pass_proxy\" } }";
        let source = RustFile::parse(VERDICTS.into(), text.to_owned()).expect("Rust");
        let document = file(VERDICTS_EXPLAINED, "| `redirect` |");
        let found = check(&[document], &[source], |_| true);
        assert_eq!(found.len(), 1);
        assert!(found[0].message.ends_with("pass_proxy"), "{found:?}");
    }
}
