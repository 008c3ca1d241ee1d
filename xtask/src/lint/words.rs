//! One word per thing: finds words for which the glossary in ARCHITECTURE.md has another.

use std::path::Path;

use super::{Document, Finding};

/// The document with the table.
const GLOSSARY: &str = "ARCHITECTURE.md";
/// The head of the table: words that are not used, and the word that is.
const HEAD: &str = "| Not | But |";
/// History keeps its words, and the tests of this file need some.
const EXEMPT: [&str; 3] = ["CHANGELOG.md", "docs/adr/", "xtask/src/lint/words.rs"];

/// A word or phrase that is not used, in lower case, and what to write.
struct Rule {
    words: Vec<String>,
    instead: String,
}

/// Checks documents and sources, both as text.
pub(crate) fn check(documents: &[Document], sources: &[(&Path, &str)]) -> Vec<Finding> {
    let Some(glossary) = documents.iter().find(|document| document.path == Path::new(GLOSSARY)) else {
        return Vec::new();
    };
    let rules = rules(&glossary.text);
    if rules.is_empty() {
        let message = format!("has no table `{HEAD}` of words");
        return vec![Finding { subject: GLOSSARY.to_owned(), line: None, message }];
    }
    let documents = documents.iter().map(|document| (document.path.as_path(), document.text.as_str()));
    let texts = documents.chain(sources.iter().copied());
    let texts = texts.filter(|(path, _)| !EXEMPT.iter().any(|exempt| path.starts_with(exempt)));
    texts.flat_map(|(path, text)| in_text(&rules, path, text)).collect()
}

/// The rows of the table, each with words in backquotes and the replacement.
fn rules(glossary: &str) -> Vec<Rule> {
    let rows = glossary.lines().skip_while(|line| *line != HEAD).skip(2).map_while(|line| line.strip_prefix("| "));
    let cells = rows.filter_map(|row| row.trim_end_matches(" |").split_once(" | "));
    let of_row = |(not, but): (&str, &str)| {
        let quoted: Vec<_> = not.split('`').skip(1).step_by(2).map(words).collect();
        quoted.into_iter().map(move |words| Rule { words, instead: but.to_owned() }).collect::<Vec<_>>()
    };
    cells.flat_map(of_row).collect()
}

fn in_text(rules: &[Rule], path: &Path, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in text.lines().enumerate() {
        // The table itself.
        if line.starts_with("| `") && path == Path::new(GLOSSARY) {
            continue;
        }
        let line = words(line);
        for Rule { words, instead } in rules {
            if line.windows(words.len()).any(|found| found == words) {
                let message = format!("says `{}`; the glossary in {GLOSSARY} has: {instead}", words.join(" "));
                findings.push(Finding { subject: path.display().to_string(), line: Some(index + 1), message });
            }
        }
    }
    findings
}

/// The words of a line in lower case, those of identifiers too.
fn words(line: &str) -> Vec<String> {
    let mut spaced = String::with_capacity(line.len() + 8);
    let mut is_after_lowercase = false;
    for character in line.chars() {
        if character.is_uppercase() && is_after_lowercase {
            spaced.push(' ');
        }
        is_after_lowercase = character.is_lowercase();
        spaced.extend(character.to_lowercase());
    }
    spaced
        .split(|character: char| !character.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str =
        "# Glossary\n\n| Not | But |\n|---|---|\n| `enroll`, `sign up` | enrol |\n| `cure` | remedy |\n\nEnd.\n";

    fn found(path: &str, text: &str) -> Vec<String> {
        let documents = [Document { path: GLOSSARY.into(), text: TABLE.to_owned() }];
        check(&documents, &[(Path::new(path), text)]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn words_and_phrases_are_found_in_prose_and_in_identifiers() {
        let finding = |line: usize, word: &str, but: &str| {
            format!("agent/src/a.rs:{line}: says `{word}`; the glossary in ARCHITECTURE.md has: {but}")
        };
        let text =
            "// Enroll it.\nfn enroll_pod() {}\nstruct PodCure;\n// They sign up.\n// enrolled, cured, sign it up\n";
        let expected = [
            finding(1, "enroll", "enrol"),
            finding(2, "enroll", "enrol"),
            finding(3, "cure", "remedy"),
            finding(4, "sign up", "enrol"),
        ];
        assert_eq!(found("agent/src/a.rs", text), expected);
    }

    #[test]
    fn history_and_the_table_itself_are_left_alone() {
        assert_eq!(found("docs/adr/0001-a.md", "The cure."), [""; 0]);
        assert_eq!(found("docs/a.md", "The cure.").len(), 1);
    }

    #[test]
    fn a_glossary_without_a_table_is_found() {
        let documents = [Document { path: GLOSSARY.into(), text: "# Glossary\n".to_owned() }];
        assert_eq!(check(&documents, &[]).len(), 1);
    }
}
