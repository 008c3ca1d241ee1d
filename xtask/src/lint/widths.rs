//! Columns of comments and documents, which no formatter bounds. Lines of code and of tables, which cannot be wrapped,
//! are left alone; the cells of tables have a bound of their own.

use std::path::Path;

use super::{Document, Finding};

/// The widest line of text, as rustfmt's of code.
const COLUMNS: usize = 120;

/// The most characters of a cell; more of them are text, and belong below the table.
const CELL: usize = 140;

/// Heads of columns that list tests, whose names are sentences.
const PROOFS: [&str; 4] = ["Proof", "Proofs", "Test", "Tests"];

/// Documents that a test writes from the definitions of the commands (`cli/src/reference.rs`).
const GENERATED: &str = "docs/reference";

/// Checks comments of sources, given with their paths, and the text and tables of documents.
pub(crate) fn check(documents: &[Document], sources: &[(&Path, &str)]) -> Vec<Finding> {
    let is_written = |document: &&Document| !document.path.starts_with(GENERATED);
    let mut findings = Vec::new();
    for document in documents.iter().filter(is_written) {
        findings
            .extend(too_wide(document.text.lines().map(Some)).into_iter().map(|line| wide_line(&document.path, line)));
        findings.extend(wide_cells(&document.text).into_iter().map(|line| wide_cell(&document.path, line)));
    }
    for (path, text) in sources {
        findings.extend(too_wide(text.lines().map(comment)).into_iter().map(|line| wide_line(path, line)));
    }
    findings
}

fn wide_line(path: &Path, line: usize) -> Finding {
    finding(path, line, format!("is wider than {COLUMNS} columns: wrap it"))
}

fn wide_cell(path: &Path, line: usize) -> Finding {
    finding(path, line, format!("has a cell of more than {CELL} characters: put the detail below the table"))
}

fn finding(path: &Path, line: usize, message: String) -> Finding {
    Finding { subject: path.display().to_string(), line: Some(line), message }
}

/// The line, if it is a comment.
fn comment(line: &str) -> Option<&str> {
    line.trim_start().starts_with("//").then_some(line)
}

/// The numbers of lines of text that are too wide.
fn too_wide<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<usize> {
    let mut is_code = false;
    let mut found = Vec::new();
    for (index, line) in lines.enumerate() {
        let Some(line) = line else {
            is_code = false;
            continue;
        };
        // A comment's text, or the line of a document with its indentation, which may make it code.
        let text = comment(line).map_or(line, |comment| comment.trim_start().trim_start_matches(['/', '!']));
        if text.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code && line.chars().count() > COLUMNS && !text.starts_with("    ") && !is_whole(text) {
            found.push(index + 1);
        }
    }
    found
}

/// Whether it has to be one line: a row of a table, a comment of HTML, or a single word, such as a link.
fn is_whole(text: &str) -> bool {
    let text = text.trim();
    text.starts_with('|') || text.starts_with("<!--") || !text.contains(' ')
}

/// The numbers of lines of tables with a cell that is too wide, in columns that do not list tests.
fn wide_cells(text: &str) -> Vec<usize> {
    let mut is_code = false;
    let mut head = Vec::new();
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        is_code ^= line.starts_with("```");
        let Some(row) = line.strip_prefix('|').filter(|_| !is_code) else {
            head.clear();
            continue;
        };
        let cells = cells(row);
        if head.is_empty() {
            head.clone_from(&cells);
        }
        let lists_tests = |column: usize| head.get(column).is_some_and(|name| PROOFS.contains(name));
        let is_wide = |(column, cell): (usize, &&str)| cell.chars().count() > CELL && !lists_tests(column);
        if cells.iter().enumerate().any(is_wide) {
            found.push(index + 1);
        }
    }
    found
}

/// The cells of a row without its first `|`. One that is escaped, as in `a \| b`, is part of a cell.
fn cells(row: &str) -> Vec<&str> {
    let mut is_escaped = false;
    let ends = |character: char| {
        let is_end = character == '|' && !is_escaped;
        is_escaped = character == '\\' && !is_escaped;
        is_end
    };
    row.split(ends).map(str::trim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let document = Document { path: path.into(), text: text.to_owned() };
        let (documents, sources) = match path.ends_with(".md") {
            true => (vec![document], vec![]),
            false => (vec![], vec![(Path::new(path), text)]),
        };
        check(&documents, &sources).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn text_beyond_the_width_is_found_in_comments_and_documents() {
        let wide = "word ".repeat(30);
        assert_eq!(found("a.md", &format!("# A\n\n{wide}\n")), ["a.md:3: is wider than 120 columns: wrap it"]);
        let comments = format!("//! {wide}\nfn f() {{\n    // {wide}\n}}\n");
        assert_eq!(found("a.rs", &comments).len(), 2);
        // The first line's fence ends with its comment.
        assert_eq!(found("a.rs", &format!("//! ```\nfn f() {{}}\n/// {wide}\n")).len(), 1);
    }

    #[test]
    fn what_cannot_be_wrapped_is_left_alone() {
        let wide = "word ".repeat(30);
        let link = format!("https://{}", "a".repeat(120));
        let row = format!("| {0} | {0} |", &wide[..100]);
        for text in [format!("```\n{wide}\n```\n"), row, link, format!("    $ {wide}"), "─ ".repeat(60)] {
            assert_eq!(found("a.md", &text), Vec::<String>::new());
        }
        assert_eq!(
            found("a.rs", &format!("let a = \"{wide}\";\n//! ```text\n//! {wide}\n//! ```\n")),
            Vec::<String>::new()
        );
        assert_eq!(found("docs/reference/cli.md", &wide), Vec::<String>::new());
    }

    #[test]
    fn a_cell_that_is_too_wide_is_found_unless_its_column_lists_tests() {
        let wide = "word ".repeat(30);
        let lines = |text: &str| {
            let findings = found("a.md", text);
            assert!(findings.iter().all(|finding| finding.contains("has a cell of more than 140 characters")));
            findings.iter().filter_map(|finding| finding.split(':').nth(1)?.parse().ok()).collect::<Vec<usize>>()
        };
        let table = format!("| Behaviour | Proof |\n|---|---|\n| {wide} | a |\n| a | {wide} |\n");
        assert_eq!(lines(&table), [3]);
        // The next table has columns of its own.
        assert_eq!(lines(&format!("{table}\n| Test | Result |\n|---|---|\n| {wide} | a |\n| a | {wide} |\n")), [3, 9]);
        let half = &wide[..80];
        assert_eq!(lines(&format!("| A | B |\n|---|---|\n| {half} | {half} |\n| {half} \\| {half} | b |\n")), [4]);
        assert_eq!(lines(&format!("```text\n{table}```\n")), [0; 0]);
        assert_eq!(found("docs/reference/cli.md", &table), [""; 0]);
    }
}
